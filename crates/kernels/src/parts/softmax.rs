//! The online softmax: base-2 exponentials with the scale folded in, running maximum and sum.
//!
//! A row without keys keeps the maximum −∞ and the sum 0: its output is 0 and its lse −∞, never NaN.

use flashcore_ptx::{F32, KernelBuilder, KernelParams, ParamHandle, Pred, Reg};

use super::fragment::{Acc, HALVES};
use crate::{FwdParams, Spec};

/// −∞ as a constant operand.
pub(crate) const NEG_INF: f32 = f32::NEG_INFINITY;

/// The largest exponent offset with which the maximum's probability, rounded to 16 bits, is still 1: an offset of 2^12
/// is rounded by at most 2^-12, which vanishes next to 1 in f16.
pub(crate) const FUSED_UP_TO: f32 = 4096.0;

/// The exponent of the largest power of two that e4m3 has.
pub(crate) const E4M3_BOOST: f32 = 8.0;

/// The numbers that turn dot products into exponents.
#[derive(Clone, Copy)]
pub(crate) struct SoftmaxParams {
    exp_scale: Reg<F32>,
    tanh_scale: Option<Reg<F32>>,
    cap: Option<Cap>,
    /// The scale and the softcap, for kernels with scaled scores.
    scaled: Option<(Reg<F32>, Option<Reg<F32>>)>,
}

/// Where a kernel's parameters have the numbers of [`SoftmaxParams`].
pub(crate) struct ScoreHandles<P> {
    pub exp_scale: ParamHandle<P, f32>,
    pub tanh_scale: ParamHandle<P, f32>,
    pub scale: ParamHandle<P, f32>,
    pub softcap: ParamHandle<P, f32>,
}

/// (tanh x / x − 1) / x² as a polynomial in x² for |x| up to 1, highest power first; tanh then has a relative error
/// below 8e-8.
const TANH_POLYNOMIAL: [f32; 7] = [
    -0.000_355_741_18,
    0.002_291_876_8,
    -0.007_933_086,
    0.021_477_833,
    -0.053_876_76,
    0.133_322_95,
    -0.333_332_93,
];

/// The largest argument whose tanh is computed by [`SMALL_TANH`].
const SMALL: f32 = 0.5;

/// tanh x / x as a polynomial in x² for |x| up to [`SMALL`], highest power first: relative error below 3e-8.
const SMALL_TANH: [f32; 5] = [0.017_135_007, -0.052_986_075, 0.133_247_8, -0.333_330_7, 1.0];

/// Scores that are computed at a time where intermediate values would take too many registers.
const CHUNK: usize = 8;

/// What becomes of a dot product, given its index.
type OfDot<'a> = &'a dyn Fn(&mut KernelBuilder, Reg<F32>, usize) -> Reg<F32>;

/// A softcap of scores that are not scaled: a score is a tanh, and the softcap is part of the exponent's scale.
#[derive(Clone, Copy)]
pub(crate) struct Cap {
    /// The factor applied to a dot product before the tanh.
    scale: Reg<F32>,
    /// [`SMALL_TANH`] for a dot product rather than for the tanh's argument, and for an exponent rather than for the tanh.
    polynomial: [Reg<F32>; 5],
    /// What makes a tanh of an exponent.
    inverse: Reg<F32>,
}

impl Cap {
    fn new(k: &mut KernelBuilder, scale: Reg<F32>, exp_scale: Reg<F32>) -> Self {
        let (square, mut power) = (k.mul_f32(scale, scale), k.mul_f32(scale, exp_scale));
        let mut polynomial = SMALL_TANH.map(|_| scale);
        for (register, coefficient) in polynomial.iter_mut().zip(SMALL_TANH).rev() {
            *register = k.mul_f32(power, coefficient);
            power = k.mul_f32(power, square);
        }
        Self { scale, polynomial, inverse: k.rcp_approx_ftz_f32(exp_scale) }
    }

    /// The exponent of a dot product that is small, before the offset: a product of two factors.
    pub fn factors(&self, k: &mut KernelBuilder, dot: Reg<F32>) -> [Reg<F32>; 2] {
        let square = k.mul_f32(dot, dot);
        let [highest, rest @ ..] = self.polynomial;
        [rest.into_iter().fold(highest, |p, coefficient| k.fma_f32(p, square, coefficient)), dot]
    }

    /// Whether a dot product's tanh is a polynomial. Not for NaN, which is one by both ways.
    pub fn is_small(&self, k: &mut KernelBuilder, dot: Reg<F32>) -> Reg<Pred> {
        let x = k.mul_f32(dot, self.scale);
        let size = k.abs_f32(x);
        k.setp_lt_f32(size, SMALL)
    }

    /// The tanh of a dot product that is small.
    pub fn small(&self, k: &mut KernelBuilder, dot: Reg<F32>) -> Reg<F32> {
        let [a, b] = self.factors(k, dot);
        let exponent = k.mul_f32(a, b);
        k.mul_f32(exponent, self.inverse)
    }

    /// The tanh of a dot product that is not.
    pub fn large(&self, k: &mut KernelBuilder, dot: Reg<F32>) -> Reg<F32> {
        let x = k.mul_f32(dot, self.scale);
        let size = k.abs_f32(x);
        let tanh = tanh_beside_one(k, size);
        k.copysign_f32(x, tanh)
    }

    /// The tanh of a dot product, by the way that is its own.
    pub fn tanh(&self, k: &mut KernelBuilder, dot: Reg<F32>) -> Reg<F32> {
        let (small, large) = (self.small(k, dot), self.large(k, dot));
        let is_small = self.is_small(k, dot);
        k.selp_f32(small, large, is_small)
    }

    /// Turns dot products, in place, into what `small` makes of those that are small, and `either` of any. A few at a time,
    /// so that their intermediate values fit in registers.
    pub fn each(&self, k: &mut KernelBuilder, dots: &[Reg<F32>], small: OfDot<'_>, either: OfDot<'_>) {
        for (chunk, dots) in dots.chunks(CHUNK).enumerate() {
            let turn = |k: &mut KernelBuilder, into: OfDot<'_>| {
                for (i, &dot) in dots.iter().enumerate() {
                    k.set(dot, |k| into(k, dot, CHUNK * chunk + i));
                }
            };
            let every = dots.iter().map(|&dot| self.is_small(k, dot)).collect::<Vec<_>>();
            let all = every.into_iter().reduce(|all, one| k.and_pred(all, one)).expect("at least one score");
            let all = k.vote_all(all);
            k.if_else(all, |k| turn(k, small), |k| turn(k, either));
        }
    }
}

impl SoftmaxParams {
    /// Reads them from the launch.
    pub fn read(k: &mut KernelBuilder, spec: &Spec) -> Self {
        let handles = ScoreHandles {
            exp_scale: FwdParams::exp_scale,
            tanh_scale: FwdParams::tanh_scale,
            scale: FwdParams::scale,
            softcap: FwdParams::softcap,
        };
        Self::read_from(k, spec, &handles)
    }

    /// Reads them from these parameters.
    pub fn read_from<P: KernelParams>(k: &mut KernelBuilder, spec: &Spec, handles: &ScoreHandles<P>) -> Self {
        let exp_scale =
            if spec.scaled_scores { k.mov_f32(std::f32::consts::LOG2_E) } else { k.param(handles.exp_scale) };
        let tanh_scale = spec.softcap.then(|| k.param(handles.tanh_scale));
        let scaled = spec.scaled_scores.then(|| {
            let scale = k.param(handles.scale);
            (scale, spec.softcap.then(|| k.param(handles.softcap)))
        });
        let cap = tanh_scale.filter(|_| scaled.is_none()).map(|scale| Cap::new(k, scale, exp_scale));
        Self { exp_scale, tanh_scale, cap, scaled }
    }

    /// Sets these numbers to those for dot products that are to be multiplied by a factor. A softcap has scaled scores.
    pub fn set_multiplied(&self, k: &mut KernelBuilder, base: &Self, factor: Reg<F32>) {
        match (self.scaled, base.scaled) {
            (Some((scale, _)), Some((base, _))) => k.set(scale, |k| k.mul_f32(base, factor)),
            _ => k.set(self.exp_scale, |k| k.mul_f32(base.exp_scale, factor)),
        }
        if let (Some(tanh_scale), Some(base)) = (self.tanh_scale, base.tanh_scale) {
            k.set(tanh_scale, |k| k.mul_f32(base, factor));
        }
    }

    /// The factor applied to a score before the base-2 exponential.
    pub fn exp_scale(&self) -> Reg<F32> {
        self.exp_scale
    }

    /// The softcap of scores that are not scaled.
    pub fn cap(&self) -> Option<Cap> {
        self.cap
    }

    /// Turns dot products into scores, in place.
    pub fn score(&self, k: &mut KernelBuilder, dots: &[Reg<F32>]) {
        match (self.scaled, self.tanh_scale) {
            (None, None) => {}
            (None, Some(_)) => {
                if let Some(cap) = self.cap {
                    cap.each(k, dots, &|k, dot, _| cap.small(k, dot), &|k, dot, _| cap.tanh(k, dot));
                }
            }
            (Some((scale, None)), _) | (Some((scale, _)), None) => {
                for &dot in dots {
                    k.set(dot, |k| k.mul_f32(dot, scale));
                }
            }
            // A few at a time, so that their intermediate values fit in registers.
            (Some((scale, Some(softcap))), Some(tanh_scale)) => {
                for dots in dots.chunks(2 * CHUNK) {
                    cap(k, dots, [scale, softcap, tanh_scale]);
                }
            }
        }
    }

    /// By what a score changes with scale · dot product: 1 − tanh² under a softcap, computed as 4e / (1 + e)² with e = e^-2|x|,
    /// whose error stays relative where the tanh is close to 1. `None` without a softcap.
    pub fn slope(&self, k: &mut KernelBuilder, dot: Reg<F32>) -> Option<Reg<F32>> {
        let x = k.mul_f32(dot, self.tanh_scale?);
        let size = k.abs_f32(x);
        let exponent = k.mul_f32(size, -2.0 * std::f64::consts::LOG2_E);
        let power = k.ex2_approx_ftz_f32(exponent);
        let sum = k.add_f32(power, 1.0);
        let inverse = k.rcp_approx_ftz_f32(sum);
        let square = k.mul_f32(inverse, inverse);
        let four = k.mul_f32(power, 4.0);
        Some(k.mul_f32(four, square))
    }

    /// 2^(score · scale − offset).
    pub fn exp_less(&self, k: &mut KernelBuilder, score: Reg<F32>, offset: Reg<F32>) -> Reg<F32> {
        let negative = k.neg_f32(offset);
        self.exp_fused(k, score, negative)
    }

    /// The reference subtracted from scores: the row's maximum, or 0 for a row that has seen no key, so that −∞ − −∞
    /// does not arise. `seen`: every row is known to have seen a key.
    pub fn reference(k: &mut KernelBuilder, max: Reg<F32>, seen: bool) -> Reg<F32> {
        if seen {
            return max;
        }
        let none = k.setp_eq_f32(max, NEG_INF);
        k.selp_f32(0.0, max, none)
    }

    /// 2^((score − reference) · scale): exactly 1 where the two are equal.
    pub fn exp(&self, k: &mut KernelBuilder, score: Reg<F32>, reference: Reg<F32>) -> Reg<F32> {
        let difference = k.sub_f32(score, reference);
        let exponent = k.mul_f32(difference, self.exp_scale);
        k.ex2_approx_ftz_f32(exponent)
    }

    /// −reference · scale, for [`SoftmaxParams::exp_fused`].
    pub fn offset(&self, k: &mut KernelBuilder, reference: Reg<F32>) -> Reg<F32> {
        let scaled = k.mul_f32(reference, self.exp_scale);
        k.neg_f32(scaled)
    }

    /// 2^(score · scale + offset): one instruction less, but off by the rounding of the offset, equally for all keys of
    /// a row.
    fn exp_fused(&self, k: &mut KernelBuilder, score: Reg<F32>, offset: Reg<F32>) -> Reg<F32> {
        let exponent = k.fma_f32(score, self.exp_scale, offset);
        k.ex2_approx_ftz_f32(exponent)
    }

    /// 1 / sum, or 0 for a row without keys.
    pub fn inverse(k: &mut KernelBuilder, sum: Reg<F32>) -> Reg<F32> {
        let none = k.setp_eq_f32(sum, 0.0);
        let inverse = k.rcp_approx_ftz_f32(sum);
        k.selp_f32(0.0, inverse, none)
    }

    /// The natural logarithm of the sum of exponentials; −∞ for a row without keys. `shift`: the sum was scaled down by
    /// that power of two.
    pub fn lse(&self, k: &mut KernelBuilder, max: Reg<F32>, sum: Reg<F32>, shift: f32) -> Reg<F32> {
        let reference = Self::reference(k, max, false);
        let log = k.lg2_approx_ftz_f32(sum);
        let log = if shift == 0.0 { log } else { k.add_f32(log, shift) };
        if self.scaled.is_some() {
            return k.fma_f32(log, std::f64::consts::LN_2, reference);
        }
        let total = k.fma_f32(reference, self.exp_scale, log);
        k.mul_f32(total, std::f64::consts::LN_2)
    }
}

/// Turns dot products into softcap · tanh(scale · dot / softcap), in place.
fn cap(k: &mut KernelBuilder, dots: &[Reg<F32>], [scale, softcap, tanh_scale]: [Reg<F32>; 3]) {
    // |x| below 1: tanh x as x · (1 + x² · P(x²)), so that its error is relative however large the softcap is.
    let small = |k: &mut KernelBuilder, dot: Reg<F32>, x: Reg<F32>| {
        let score = k.mul_f32(dot, scale);
        let square = k.mul_f32(x, x);
        let [highest, rest @ ..] = TANH_POLYNOMIAL;
        let start = k.mov_f32(highest);
        let p = rest.into_iter().fold(start, |p, coefficient| k.fma_f32(p, square, coefficient));
        let p = k.mul_f32(p, square);
        k.fma_f32(score, p, score)
    };
    // For |x| from 1 on: tanh of |x|, where the error of the quotient is smallest.
    let large = |k: &mut KernelBuilder, x: Reg<F32>| {
        let size = k.abs_f32(x);
        let tanh = tanh_beside_one(k, size);
        let score = k.mul_f32(tanh, softcap);
        k.copysign_f32(x, score)
    };
    let xs: Vec<Reg<F32>> = dots.iter().map(|&dot| k.mul_f32(dot, tanh_scale)).collect();
    let sizes: Vec<Reg<F32>> = xs.iter().map(|&x| k.abs_f32(x)).collect();
    // NaN compares as not below 1, as wanted; a maximum would lose it.
    let every = sizes.iter().map(|&size| k.setp_lt_f32(size, 1.0)).collect::<Vec<_>>();
    let all = every.into_iter().reduce(|all, one| k.and_pred(all, one)).expect("at least one score");
    let all = k.vote_all(all);
    k.if_else(
        all,
        |k| {
            for (&dot, &x) in dots.iter().zip(&xs) {
                k.set(dot, |k| small(k, dot, x));
            }
        },
        |k| {
            for (&dot, &x) in dots.iter().zip(&xs) {
                let (small, large) = (small(k, dot, x), large(k, x));
                let size = k.abs_f32(x);
                let is_small = k.setp_lt_f32(size, 1.0);
                k.set(dot, |k| k.selp_f32(small, large, is_small));
            }
        },
    );
}

/// tanh x = 1 − 2 / (1 + e^2x): two fast instructions with an absolute error near 1e-7, where tanh.approx has 5e-4,
/// which the softcap would multiply before the exponential.
fn tanh_beside_one(k: &mut KernelBuilder, x: Reg<F32>) -> Reg<F32> {
    let exponent = k.mul_f32(x, 2.0 * std::f64::consts::LOG2_E);
    let power = k.ex2_approx_ftz_f32(exponent);
    let sum = k.add_f32(power, 1.0);
    let inverse = k.rcp_approx_ftz_f32(sum);
    k.fma_f32(inverse, -2.0, 1.0)
}

/// How the score of a row becomes a probability; rows are counted over tiles and halves.
type Exp<'a> = &'a dyn Fn(&mut KernelBuilder, Reg<F32>, usize) -> Reg<F32>;

/// The running maximum and sum of one row. The sum is this thread's part until [`OnlineSoftmax::finish`].
#[derive(Clone, Copy)]
pub(crate) struct OnlineRow {
    pub max: Reg<F32>,
    pub sum: Reg<F32>,
}

/// The softmax of the rows that a warp holds as fragments: two rows per thread and 16-row tile.
pub(crate) struct OnlineSoftmax {
    pub params: SoftmaxParams,
    /// The power of two by which all probabilities are scaled up.
    boost: f32,
    /// One entry per 16-row tile: the upper row, the lower row.
    pub rows: Vec<[OnlineRow; 2]>,
}

impl OnlineSoftmax {
    /// No key seen yet.
    pub fn new(k: &mut KernelBuilder, params: SoftmaxParams, tiles: usize) -> Self {
        let mut row = || OnlineRow { max: k.mov_f32(NEG_INF), sum: k.mov_f32(0.0) };
        Self { params, boost: 0.0, rows: (0..tiles).map(|_| [row(), row()]).collect() }
    }

    /// The same with probabilities that are scaled up so that the largest is the largest power of two that e4m3 has.
    pub fn of_e4m3(self) -> Self {
        Self { boost: E4M3_BOOST, ..self }
    }

    /// A row's lse.
    pub fn lse(&self, k: &mut KernelBuilder, row: OnlineRow) -> Reg<F32> {
        self.params.lse(k, row.max, row.sum, -self.boost)
    }

    /// One key tile: turns scores into probabilities, not yet divided by the sum, and rescales the output so far.
    /// `masked`: some rows may see no key of this tile, nor of any before it.
    pub fn step(&self, k: &mut KernelBuilder, scores: &[Vec<Acc>], o: &[Vec<Acc>], masked: bool) {
        let params = self.params;
        let mut references = Vec::new();
        let mut largest: Option<Reg<F32>> = None;
        for ((state, scores), o) in self.rows.iter().zip(scores).zip(o) {
            for (row, half) in state.iter().zip(HALVES) {
                let mut max = row.max;
                for score in scores {
                    for &i in &half {
                        max = k.max_f32(max, score[i]);
                    }
                }
                for distance in [1u32, 2] {
                    let other = k.shfl_bfly(max, distance);
                    max = k.max_f32(max, other);
                }
                let reference = SoftmaxParams::reference(k, max, !masked);
                let rescale = params.exp(k, row.max, reference);
                k.set(row.max, |k| k.mov_f32(max));
                k.set(row.sum, |k| k.mul_f32(row.sum, rescale));
                for o in o {
                    for &i in &half {
                        k.set(o[i], |k| k.mul_f32(o[i], rescale));
                    }
                }
                let offset = params.offset(k, reference);
                let size = k.abs_f32(offset);
                largest = Some(largest.map_or(size, |largest| k.max_f32(largest, size)));
                let offset = self.boosted(k, offset);
                references.push((reference, offset));
            }
        }
        let each = |k: &mut KernelBuilder, exp: Exp<'_>| {
            for (tile, scores) in scores.iter().enumerate() {
                for (half, elements) in HALVES.iter().enumerate() {
                    for score in scores {
                        for &i in elements {
                            k.set(score[i], |k| exp(k, score[i], 2 * tile + half));
                        }
                    }
                }
            }
        };
        if let Some(largest) = largest {
            let large = k.setp_gt_f32(largest, FUSED_UP_TO);
            let any_large = k.vote_any(large);
            k.if_else(
                any_large,
                |k| each(k, &|k, score, row| self.exp(k, score, references[row].0)),
                |k| each(k, &|k, score, row| params.exp_fused(k, score, references[row].1)),
            );
        }
        for (state, scores) in self.rows.iter().zip(scores) {
            for (row, half) in state.iter().zip(HALVES) {
                let mut sum = row.sum;
                for score in scores {
                    for &i in &half {
                        sum = k.add_f32(sum, score[i]);
                    }
                }
                k.set(row.sum, |k| k.mov_f32(sum));
            }
        }
    }

    /// An exponent, so much larger as all are scaled up by.
    fn boosted(&self, k: &mut KernelBuilder, exponent: Reg<F32>) -> Reg<F32> {
        if self.boost == 0.0 { exponent } else { k.add_f32(exponent, self.boost) }
    }

    /// A probability, its reference subtracted first.
    fn exp(&self, k: &mut KernelBuilder, score: Reg<F32>, reference: Reg<F32>) -> Reg<F32> {
        let difference = k.sub_f32(score, reference);
        let exponent = k.mul_f32(difference, self.params.exp_scale);
        let exponent = self.boosted(k, exponent);
        k.ex2_approx_ftz_f32(exponent)
    }

    /// Adds up the sums of the four threads that share a row.
    pub fn finish(&self, k: &mut KernelBuilder) {
        for row in self.rows.iter().flatten() {
            for distance in [1u32, 2] {
                let other = k.shfl_bfly(row.sum, distance);
                k.set(row.sum, |k| k.add_f32(row.sum, other));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polynomials_are_as_close_to_the_tanh_as_they_say() {
        let at = |coefficients: &[f32], square: f64| {
            coefficients.iter().fold(0.0, |p, &coefficient| p * square + f64::from(coefficient))
        };
        for i in 1..=1000 {
            let x = f64::from(i) / 1000.0;
            let small = f64::from(SMALL) * x;
            let error = at(&SMALL_TANH, small * small) * small / small.tanh() - 1.0;
            assert!(error.abs() < 3e-8, "{error} at {small}");
            let error = (1.0 + at(&TANH_POLYNOMIAL, x * x) * x * x) * x / x.tanh() - 1.0;
            assert!(error.abs() < 8e-8, "{error} at {x}");
        }
    }
}
