//! The softmax of a warpgroup's rows: two rows per thread, each shared by four threads.
//!
//! Probabilities are 2^((score − reference) · scale), where the reference is the largest score so far or, with the lazy
//! rescale, one whose probability is at most 2^8 times smaller. For bf16, whose range is that of f32, lazy
//! probabilities are scaled down by that factor, so that none is above 1 and no product overflows that would not
//! otherwise.

use flashcore_ptx::{F32, KernelBuilder, Pred, Reg};

use crate::{
    ElementType,
    parts::softmax::{FUSED_UP_TO, NEG_INF, SoftmaxParams},
};

/// How much a row's maximum may exceed its reference, as a power of two, before the lazy rescale moves it.
const SLACK: f32 = 8.0;

/// Added to a number, it leaves the nearest integer in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// What is known of a row so far. The sum is this thread's part until [`RowState::finish`].
#[derive(Clone, Copy)]
pub(super) struct RowState {
    /// The score whose probability comes out as 1; −∞ while no key has been seen.
    pub reference: Reg<F32>,
    pub sum: Reg<F32>,
}

/// How a score becomes a probability, given its row and its index among the row's scores.
type Exp<'a> = &'a dyn Fn(&mut KernelBuilder, Reg<F32>, usize, usize) -> Reg<F32>;

/// The factors that the output so far must be multiplied by.
pub(super) struct Rescale {
    factors: [Reg<F32>; 2],
    /// Whether any row of the warp changes; `None`: assume that one does.
    any: Option<Reg<Pred>>,
}

/// The power of two by which probabilities are scaled down.
pub(super) fn shift(lazy: bool, dtype: ElementType) -> f32 {
    if lazy && dtype == ElementType::Bf16 { SLACK } else { 0.0 }
}

/// How a tile's scores are treated.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    /// Some rows may see no key of this tile, nor of any before it.
    pub masked: bool,
    /// No key has been seen before.
    pub first: bool,
    pub lazy: bool,
    /// The power of two by which all probabilities of a row are scaled down; see [`shift`].
    pub shift: f32,
    /// Of eight exponentials, how many are computed by a polynomial.
    pub poly: u32,
}

impl RowState {
    pub fn new(k: &mut KernelBuilder) -> Self {
        Self { reference: k.mov_f32(NEG_INF), sum: k.mov_f32(0.0) }
    }

    pub fn reset(self, k: &mut KernelBuilder) {
        k.set(self.reference, |k| k.mov_f32(NEG_INF));
        k.set(self.sum, |k| k.mov_f32(0.0));
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

/// Reduces in four chains, so that no instruction waits for the one before it.
fn reduce(
    k: &mut KernelBuilder,
    values: impl Iterator<Item = Reg<F32>>,
    chains: usize,
    combine: impl Fn(&mut KernelBuilder, Reg<F32>, Reg<F32>) -> Reg<F32>,
) -> Reg<F32> {
    let mut partial: Vec<Reg<F32>> = Vec::new();
    for (i, value) in values.enumerate() {
        if i < chains {
            partial.push(value);
        } else {
            partial[i % chains] = combine(k, partial[i % chains], value);
        }
    }
    while partial.len() > 1 {
        partial = partial
            .chunks(2)
            .map(|pair| if let &[a, b] = pair { combine(k, a, b) } else { pair[0] })
            .collect();
    }
    partial[0]
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

/// One key tile: turns scores, in place, into probabilities that are not yet divided by the sum. The result must be
/// applied to the output before this tile's values are added.
pub(super) fn step(
    k: &mut KernelBuilder,
    params: SoftmaxParams,
    rows: &[RowState; 2],
    scores: &[Reg<F32>],
    kind: Kind,
) -> Option<Rescale> {
    let scale = params.exp_scale();
    let maxima = [0, 1].map(|half| {
        let max = reduce(k, row_elements(scores, half), 4, |k, a, b| k.max_f32(a, b));
        [1u32, 2].into_iter().fold(max, |max, distance| {
            let other = k.shfl_bfly(max, distance);
            k.max_f32(max, other)
        })
    });
    let rescale = if kind.first {
        for (row, max) in rows.iter().zip(maxima) {
            k.set(row.reference, |k| k.mov_f32(max));
        }
        None
    } else if kind.lazy {
        let grown = [0, 1].map(|half| {
            let above = k.sub_f32(maxima[half], rows[half].reference);
            let above = k.mul_f32(above, scale);
            k.setp_gt_f32(above, SLACK)
        });
        let either = k.or_pred(grown[0], grown[1]);
        let any = k.vote_any(either);
        let factors = [0, 1].map(|_| k.mov_f32(1.0));
        k.if_(any, |k| {
            for half in 0..2 {
                let RowState { reference: old, sum } = rows[half];
                let new = maxima[half];
                let factor = params.exp(k, old, new);
                k.set(factors[half], |k| k.selp_f32(factor, 1.0, grown[half]));
                k.set(old, |k| k.selp_f32(new, old, grown[half]));
                k.set(sum, |k| k.mul_f32(sum, factors[half]));
            }
        });
        Some(Rescale { factors, any: Some(any) })
    } else {
        let factors = [0, 1].map(|half| {
            let RowState { reference: old, sum } = rows[half];
            let new = k.max_f32(maxima[half], old);
            let relative_to = SoftmaxParams::reference(k, new, !kind.masked);
            let factor = params.exp(k, old, relative_to);
            k.set(old, |k| k.mov_f32(new));
            k.set(sum, |k| k.mul_f32(sum, factor));
            factor
        });
        Some(Rescale { factors, any: None })
    };
    let used = [0, 1].map(|half| {
        let reference = SoftmaxParams::reference(k, rows[half].reference, !kind.masked);
        let offset = params.offset(k, reference);
        (reference, if kind.shift == 0.0 { offset } else { k.sub_f32(offset, kind.shift) })
    });
    let sizes = used.map(|(_, offset)| k.abs_f32(offset));
    let largest = k.max_f32(sizes[0], sizes[1]);
    let large = k.setp_gt_f32(largest, FUSED_UP_TO);
    let any_large = k.vote_any(large);
    // Each probability is added as soon as it is computed: the additions then overlap the exponentials that follow.
    let each = |k: &mut KernelBuilder, exp: Exp<'_>| {
        for (half, row) in rows.iter().enumerate() {
            let mut sums = [row.sum, row.sum];
            for (i, score) in row_elements(scores, half).enumerate() {
                k.set(score, |k| exp(k, score, half, i));
                sums[i % 2] = if i == 1 { score } else { k.add_f32(sums[i % 2], score) };
            }
            k.set(row.sum, |k| k.add_f32(sums[0], sums[1]));
        }
    };
    k.if_else(
        any_large,
        |k| each(k, &|k, score, half, _| params.exp_shifted(k, score, used[half].0, kind.shift)),
        |k| {
            each(k, &|k, score, half, i| {
                // Spread over the row, so that both pipes are kept busy.
                let poly = !kind.masked && (i as u32 % 8) * kind.poly % 8 + kind.poly > 7;
                let exponent = k.fma_f32(score, scale, used[half].1);
                if poly { exp2_poly(k, exponent) } else { k.ex2_approx_ftz_f32(exponent) }
            });
        },
    );
    rescale
}

impl Rescale {
    /// Multiplies the output.
    pub fn apply(&self, k: &mut KernelBuilder, o: &[Reg<F32>]) {
        let all = |k: &mut KernelBuilder| {
            for (half, &factor) in self.factors.iter().enumerate() {
                for o in row_elements(o, half) {
                    k.set(o, |k| k.mul_f32(o, factor));
                }
            }
        };
        match self.any {
            Some(any) => k.if_(any, all),
            None => all(k),
        }
    }
}

/// Hides from a row the keys that it does not see: those before `begin` and from `end` on, both counted from the
/// tile's first key and this thread's first column.
pub(super) fn hide(
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
