//! The softmax of a warpgroup's rows: two rows per thread, each shared by four threads.
//!
//! Probabilities are 2^((score − reference) · scale), where the reference is the largest score so far or, with the lazy
//! rescale, one whose probability is at most 2^`lazy` times smaller. For bf16, whose range is that of f32, lazy
//! probabilities are scaled down by that factor, so that none is above 1 and no product overflows that would not
//! otherwise. For e4m3, whose range is small, they are scaled up, so that the largest is 2^8: the largest power of two that
//! it has.
//!
//! Most key tiles raise no row's reference. Each thread sees that by its own scores alone, and then nothing is exchanged
//! with others and nothing is rescaled. Where a reference moves, the output is rescaled. Where scores are so large that
//! an offset would lose their last bits, the reference is subtracted from each first. Each of these three ways is one
//! stretch of code without branches, in which the assembler overlaps exponentials, sums and packing.
//!
//! With a softcap, exponentials are not all that the exponential unit computes: a tanh takes two more of its instructions.
//! So in tiles that every row sees, a tanh of small arguments is a polynomial, with the scale of the exponent in its
//! coefficients: six instructions more per score than without a softcap. It is a matter of each score alone which of the
//! two it takes; only where all scores of a warp are small, the other is not computed at all.

use flashcore_ptx::{F32, KernelBuilder, Pred, Reg};

use crate::{
    ElementType,
    parts::softmax::{E4M3_BOOST, FUSED_UP_TO, NEG_INF, SoftmaxParams},
};

/// The most that a limit is above its reference: finite, so that it adds nothing to −∞.
const MOST_SLACK: f32 = 1e37;

/// Added to a number, it leaves the nearest integer in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// What is known of a row so far. The sum is this thread's part until [`RowState::finish`].
#[derive(Clone, Copy)]
pub(super) struct RowState {
    /// The score whose probability comes out as 1; −∞ while no key has been seen.
    pub reference: Reg<F32>,
    pub sum: Reg<F32>,
    /// What is added to a scaled score for its exponent.
    offset: Reg<F32>,
    /// The largest score that needs no new reference: the reference itself, unless rescaling is lazy.
    limit: Reg<F32>,
}

/// The softmax of one thread's rows.
pub(super) struct Softmax {
    pub params: SoftmaxParams,
    pub rows: [RowState; 2],
    /// Whether a row of the warp has an offset that is too large to be added to scaled scores.
    far: Reg<Pred>,
    /// How far scores may exceed the reference; `None`: not at all.
    slack: Option<Reg<F32>>,
    lazy: u32,
    /// The power of two by which all probabilities are scaled down; see [`shift`].
    pub shift: f32,
    /// Of eight exponentials in unmasked tiles, how many are computed by a polynomial.
    poly: u32,
}

/// How a score becomes a probability, given its row and its index among the row's scores.
type Exp<'a> = &'a dyn Fn(&mut KernelBuilder, Reg<F32>, usize, usize) -> Reg<F32>;

/// What follows the exponentials of a tile, given what the output is to be multiplied by.
type Then<'a> = &'a dyn Fn(&mut KernelBuilder, Option<[Reg<F32>; 2]>);

/// The power of two by which probabilities are scaled down, or up where it is negative.
pub(super) fn shift(lazy: u32, dtype: ElementType) -> f32 {
    match dtype {
        ElementType::Bf16 => lazy as f32,
        ElementType::E4m3 => lazy as f32 - E4M3_BOOST,
        ElementType::F16 | ElementType::F32 => 0.0,
    }
}

/// How far scores may exceed the reference so that no probability is more than 2^`lazy` times larger.
fn slack(k: &mut KernelBuilder, params: &SoftmaxParams, lazy: u32) -> Reg<F32> {
    let inverse = k.rcp_approx_ftz_f32(params.exp_scale());
    let slack = k.mul_f32(inverse, lazy as f32);
    k.min_f32(slack, MOST_SLACK)
}

impl RowState {
    fn new(k: &mut KernelBuilder, lazy: bool) -> Self {
        let reference = k.mov_f32(NEG_INF);
        let limit = if lazy { k.mov_f32(NEG_INF) } else { reference };
        let [sum, offset] = [0, 1].map(|_| k.mov_f32(0.0));
        Self { reference, sum, offset, limit }
    }

    fn reset(self, k: &mut KernelBuilder) {
        for (register, value) in
            [(self.reference, NEG_INF), (self.limit, NEG_INF), (self.sum, 0.0), (self.offset, 0.0)]
        {
            k.set(register, |k| k.mov_f32(value));
        }
    }

    /// Whether the offset is too large to be added to scaled scores.
    fn is_far(self, k: &mut KernelBuilder) -> Reg<Pred> {
        let size = k.abs_f32(self.offset);
        k.setp_gt_f32(size, FUSED_UP_TO)
    }

    /// Adds up the sums of the four threads that share the row.
    pub fn finish(self, k: &mut KernelBuilder) {
        for distance in [1u32, 2] {
            let other = k.shfl_bfly(self.sum, distance);
            k.set(self.sum, |k| k.add_f32(self.sum, other));
        }
    }
}

/// The elements of a warpgroup's accumulator that belong to its upper (0) or lower (1) row.
pub(super) fn row_elements(scores: &[Reg<F32>], half: usize) -> impl Iterator<Item = Reg<F32>> + '_ {
    scores.chunks_exact(4).flat_map(move |quad| [quad[2 * half], quad[2 * half + 1]])
}

/// 2^x by a polynomial on the multiply-add pipes, for x from −∞ to 127: relative error under 1e-4, a quarter of the
/// error of rounding to f16.
fn exp2_poly(k: &mut KernelBuilder, x: Reg<F32>) -> Reg<F32> {
    let x = k.max_ftz_f32(x, -125.0);
    let shifted = k.add_f32(x, ROUND);
    let whole = k.sub_f32(shifted, ROUND);
    let part = k.sub_f32(x, whole);
    // Minimax on [−1/2, 1/2].
    let p = k.fma_f32(part, 0.055_171_654_f32, 0.242_611_99_f32);
    let p = k.fma_f32(p, part, 0.693_260_4_f32);
    let p = k.fma_f32(p, part, 0.999_928_1_f32);
    let (p, shifted) = (k.f32_to_bits(p), k.f32_to_bits(shifted));
    let exponent = k.shl_b32(shifted, 23u32);
    let bits = k.add_u32(p, exponent);
    k.f32_from_bits(bits)
}

impl Softmax {
    pub fn new(
        k: &mut KernelBuilder,
        params: SoftmaxParams,
        lazy: u32,
        dtype: ElementType,
        poly: u32,
    ) -> Self {
        let slack = (lazy > 0).then(|| slack(k, &params, lazy));
        let rows = [0, 1].map(|_| RowState::new(k, lazy > 0));
        Self { params, rows, far: k.mov_pred(false), slack, lazy, shift: shift(lazy, dtype), poly }
    }

    /// Multiplies all dot products from here on by a factor, given the numbers without it.
    pub fn multiply(&self, k: &mut KernelBuilder, base: &SoftmaxParams, factor: Reg<F32>) {
        self.params.set_multiplied(k, base, factor);
        if let Some(register) = self.slack {
            k.set(register, |k| slack(k, &self.params, self.lazy));
        }
    }

    /// Turns the dot products of a key tile into scores, in place, unless that is done within [`Softmax::step`].
    pub fn score(&self, k: &mut KernelBuilder, dots: &[Reg<F32>], masked: bool) {
        if masked || self.params.cap().is_none() {
            self.params.score(k, dots);
        }
    }

    /// No key has been seen.
    pub fn reset(&self, k: &mut KernelBuilder) {
        for row in self.rows {
            row.reset(k);
        }
        k.set(self.far, |k| k.mov_pred(false));
    }

    /// The first key tile: turns scores, in place, into probabilities that are not yet divided by the sum.
    pub fn first(&self, k: &mut KernelBuilder, scores: &[Reg<F32>]) {
        let maxima = maxima(k, scores);
        let factors = self.renew(k, maxima);
        self.exactly(k, scores, factors);
    }

    /// A further key tile: the same; `then` is given what the output so far is to be multiplied by, if by anything.
    pub fn step(&self, k: &mut KernelBuilder, scores: &[Reg<F32>], masked: bool, then: Then<'_>) {
        let maxima = maxima(k, scores);
        let exactly = |k: &mut KernelBuilder, factors: [Reg<F32>; 2]| {
            self.exactly(k, scores, factors);
            then(k, Some(factors));
        };
        if masked {
            // These tiles are few, and one way keeps the code short.
            let factors = self.renew(k, maxima);
            return exactly(k, factors);
        }
        if let Some(cap) = self.params.cap() {
            let exponent = |k: &mut KernelBuilder, dot: Reg<F32>, offset: Reg<F32>| {
                let [a, b] = cap.factors(k, dot);
                k.fma_f32(a, b, offset)
            };
            // A tanh keeps the order, so the largest dot product has the largest score.
            let small = maxima.map(|dot| cap.small(k, dot));
            let within = [0, 1].map(|half| k.setp_le_f32(small[half], self.rows[half].limit));
            let within = k.and_pred(within[0], within[1]);
            let size = largest(k, scores.iter().copied(), |k, dot| k.abs_f32(dot));
            let small = cap.is_small(k, size);
            let small = k.vote_all(small);
            let by_polynomial = |k: &mut KernelBuilder, dot: Reg<F32>, half: usize, _: usize| {
                let exponent = exponent(k, dot, self.rows[half].offset);
                k.ex2_approx_ftz_f32(exponent)
            };
            let to_exponents = |k: &mut KernelBuilder| {
                let offset = |i: usize| self.rows[i % 4 / 2].offset;
                cap.each(k, scores, &|k, dot, i| exponent(k, dot, offset(i)), &|k, dot, i| {
                    let (small, large) = (exponent(k, dot, offset(i)), cap.large(k, dot));
                    let large = k.fma_f32(large, self.params.exp_scale(), offset(i));
                    let is_small = cap.is_small(k, dot);
                    k.selp_f32(small, large, is_small)
                });
            };
            let usual = k.and_pred(within, small);
            let usual = k.vote_all(usual);
            return k.if_else(
                usual,
                |k| {
                    self.each(k, scores, None, &by_polynomial);
                    then(k, None);
                },
                |k| {
                    let maxima = maxima.map(|dot| cap.tanh(k, dot));
                    let factors = self.renew(k, maxima);
                    let with = |k: &mut KernelBuilder, exp: Exp<'_>| {
                        self.each(k, scores, Some(factors), exp);
                        then(k, Some(factors));
                    };
                    k.if_else(
                        small,
                        |k| with(k, &by_polynomial),
                        |k| {
                            to_exponents(k);
                            with(k, &|k, exponent, _, _| k.ex2_approx_ftz_f32(exponent));
                        },
                    );
                },
            );
        }
        let grown = [0, 1].map(|half| k.setp_gt_f32(maxima[half], self.rows[half].limit));
        let either = k.or_pred(grown[0], grown[1]);
        let either = k.or_pred(either, self.far);
        let any = k.vote_any(either);
        k.if_else(
            any,
            |k| {
                let factors = self.renew(k, maxima);
                k.if_else(
                    self.far,
                    |k| exactly(k, factors),
                    |k| {
                        self.fused(k, scores, Some(factors));
                        then(k, Some(factors));
                    },
                );
            },
            |k| {
                self.fused(k, scores, None);
                then(k, None);
            },
        );
    }

    /// Moves the reference of each row whose largest score, here and in the other three threads, is above its limit. The
    /// result is what the output and sums so far are to be multiplied by: 1 for the other rows, so that what becomes of a
    /// row never depends on its neighbours.
    fn renew(&self, k: &mut KernelBuilder, maxima: [Reg<F32>; 2]) -> [Reg<F32>; 2] {
        let factors = [0, 1].map(|half| {
            let RowState { reference, offset, limit, .. } = self.rows[half];
            let max = [1u32, 2].into_iter().fold(maxima[half], |max, distance| {
                let other = k.shfl_bfly(max, distance);
                k.max_f32(max, other)
            });
            let grown = k.setp_gt_f32(max, limit);
            let mut moved = self.params.offset(k, max);
            if self.shift != 0.0 {
                moved = k.sub_f32(moved, self.shift);
            }
            k.set(offset, |k| k.selp_f32(moved, offset, grown));
            let factor = self.params.exp(k, reference, max);
            k.set(reference, |k| k.selp_f32(max, reference, grown));
            if let Some(slack) = self.slack {
                let above = k.add_f32(max, slack);
                k.set(limit, |k| k.selp_f32(above, limit, grown));
            }
            k.selp_f32(factor, 1.0, grown)
        });
        let far = self.rows.map(|row| row.is_far(k));
        let far = k.or_pred(far[0], far[1]);
        k.set(self.far, |k| k.vote_any(far));
        factors
    }

    /// Probabilities by the difference to the reference in rows that are far, by the offset in the others: one
    /// instruction more per score, but right for all.
    fn exactly(&self, k: &mut KernelBuilder, scores: &[Reg<F32>], factors: [Reg<F32>; 2]) {
        let terms = self.rows.map(|row| {
            let far = row.is_far(k);
            (k.selp_f32(row.reference, 0.0, far), k.selp_f32(-self.shift, row.offset, far))
        });
        self.each(k, scores, Some(factors), &|k, score, half, _| {
            let difference = k.sub_f32(score, terms[half].0);
            let exponent = k.fma_f32(difference, self.params.exp_scale(), terms[half].1);
            k.ex2_approx_ftz_f32(exponent)
        });
    }

    /// Probabilities by the offset.
    fn fused(&self, k: &mut KernelBuilder, scores: &[Reg<F32>], factors: Option<[Reg<F32>; 2]>) {
        self.each(k, scores, factors, &|k, score, half, i| {
            // Spread over the row, so that both pipes are kept busy.
            let poly = (i as u32 % 8) * self.poly % 8 + self.poly > 7;
            let exponent = k.fma_f32(score, self.params.exp_scale(), self.rows[half].offset);
            if poly { exp2_poly(k, exponent) } else { k.ex2_approx_ftz_f32(exponent) }
        });
    }

    /// Turns scores into probabilities and adds them to the sums, each as soon as it is computed: the additions then
    /// overlap the exponentials that follow. The sums so far are first multiplied by
    /// `factors`.
    fn each(&self, k: &mut KernelBuilder, scores: &[Reg<F32>], factors: Option<[Reg<F32>; 2]>, exp: Exp<'_>) {
        for (half, row) in self.rows.iter().enumerate() {
            let mut sums = [row.sum, row.sum];
            for (i, score) in row_elements(scores, half).enumerate() {
                k.set(score, |k| exp(k, score, half, i));
                sums[i % 2] = match (i, factors) {
                    (0, Some(factors)) => k.fma_f32(row.sum, factors[half], score),
                    (1, _) => score,
                    _ => k.add_f32(sums[i % 2], score),
                };
            }
            k.set(row.sum, |k| k.add_f32(sums[0], sums[1]));
        }
    }
}

/// The largest of a thread's scores in each of its rows.
fn maxima(k: &mut KernelBuilder, scores: &[Reg<F32>]) -> [Reg<F32>; 2] {
    [0, 1].map(|half| largest(k, row_elements(scores, half), |_, score| score))
}

/// The largest of some values of scores, found in so many chains that no instruction waits for the one before it.
fn largest(
    k: &mut KernelBuilder,
    scores: impl Iterator<Item = Reg<F32>>,
    value: impl Fn(&mut KernelBuilder, Reg<F32>) -> Reg<F32>,
) -> Reg<F32> {
    const CHAINS: usize = 4;
    let mut largest: Vec<Reg<F32>> = Vec::with_capacity(CHAINS);
    for (i, score) in scores.enumerate() {
        let score = value(k, score);
        match largest.get_mut(i % CHAINS) {
            Some(chain) => *chain = k.max_f32(*chain, score),
            None => largest.push(score),
        }
    }
    while largest.len() > 1 {
        let pairs = largest.chunks(2);
        largest = pairs.map(|pair| if let &[a, b] = pair { k.max_f32(a, b) } else { pair[0] }).collect();
    }
    largest[0]
}

/// Hides from a row the keys that it does not see: those before `begin` and from `end` on, both counted from the
/// tile's first key and this thread's first column.
pub(in crate::sm90) fn hide(
    k: &mut KernelBuilder,
    scores: &[Reg<F32>],
    half: usize,
    begin: Option<Reg<flashcore_ptx::B32>>,
    end: Reg<flashcore_ptx::B32>,
) {
    for (i, score) in row_elements(scores, half).enumerate() {
        let column = (8 * (i / 2) + i % 2) as i32;
        let seen = k.setp_gt_s32(end, column);
        k.set(score, |k| k.selp_f32(score, NEG_INF, seen));
        if let Some(begin) = begin {
            let seen = k.setp_le_s32(begin, column);
            k.set(score, |k| k.selp_f32(score, NEG_INF, seen));
        }
    }
}
