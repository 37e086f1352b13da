//! The online softmax: exponentials of base 2 with the scale folded in, running maximum and sum.
//!
//! A row without keys keeps the maximum −∞ and the sum 0: its output is 0 and its lse −∞, never NaN.

use flashcore_ptx::{F32, KernelBuilder, KernelParams, ParamHandle, Reg};

use crate::{
    FwdParams, Spec,
    fragment::{Acc, HALVES},
};

/// −∞ as a constant operand.
pub(crate) const NEG_INF: f32 = f32::NEG_INFINITY;

/// The largest exponent offset with which the maximum's probability, rounded to 16 bits, is still 1: the rounding of
/// an offset of 2^12 is 2^-12 at most, which f16 does not see beside 1.
pub(crate) const FUSED_UP_TO: f32 = 4096.0;

/// The numbers that turn dot products into exponents.
#[derive(Clone, Copy)]
pub(crate) struct SoftmaxParams {
    exp_scale: Reg<F32>,
    tanh_scale: Option<Reg<F32>>,
}

impl SoftmaxParams {
    /// Reads them from the launch.
    pub fn read(k: &mut KernelBuilder, spec: &Spec) -> Self {
        Self::read_from(k, spec, [FwdParams::exp_scale, FwdParams::tanh_scale])
    }

    /// Reads them from these parameters.
    pub fn read_from<P: KernelParams>(
        k: &mut KernelBuilder,
        spec: &Spec,
        [exp_scale, tanh_scale]: [ParamHandle<P, f32>; 2],
    ) -> Self {
        let exp_scale = k.param(exp_scale);
        let tanh_scale = spec.softcap.then(|| k.param(tanh_scale));
        Self { exp_scale, tanh_scale }
    }

    /// What a score is multiplied with before the exponential of base 2.
    pub fn exp_scale(&self) -> Reg<F32> {
        self.exp_scale
    }

    /// The score of a dot product: itself, or with a softcap the tanh of it scaled.
    ///
    /// tanh x = 1 − 2 / (1 + e^2x): two fast instructions with an absolute error near 1e-7, where tanh.approx
    /// has 5e-4, which the exponential after it would multiply with the softcap.
    pub fn score(&self, k: &mut KernelBuilder, dot: Reg<F32>) -> Reg<F32> {
        let Some(scale) = self.tanh_scale else { return dot };
        let x = k.mul_f32(dot, scale);
        let exponent = k.mul_f32(x, 2.0 * std::f64::consts::LOG2_E);
        let power = k.ex2_approx_ftz_f32(exponent);
        let sum = k.add_f32(power, 1.0);
        let inverse = k.rcp_approx_ftz_f32(sum);
        k.fma_f32(inverse, -2.0, 1.0)
    }

    /// What scores are taken relative to: the row's maximum; 0 for a row that has seen no key, so that −∞ − −∞ does
    /// not arise. `seen`: every row is known to have seen a key.
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

    /// The same times 2^−shift.
    pub fn exp_shifted(
        &self,
        k: &mut KernelBuilder,
        score: Reg<F32>,
        reference: Reg<F32>,
        shift: f32,
    ) -> Reg<F32> {
        if shift == 0.0 {
            return self.exp(k, score, reference);
        }
        let difference = k.sub_f32(score, reference);
        let exponent = k.fma_f32(difference, self.exp_scale, -shift);
        k.ex2_approx_ftz_f32(exponent)
    }

    /// −reference · scale, for [`SoftmaxParams::exp_fused`].
    pub fn offset(&self, k: &mut KernelBuilder, reference: Reg<F32>) -> Reg<F32> {
        let scaled = k.mul_f32(reference, self.exp_scale);
        k.neg_f32(scaled)
    }

    /// 2^(score · scale + offset): one instruction less, but off by the rounding of the offset, in all keys of a row
    /// alike.
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

    /// The natural logarithm of the sum of exponentials; −∞ for a row without keys. `shift`: the sum is smaller by
    /// that power of two.
    pub fn lse(&self, k: &mut KernelBuilder, max: Reg<F32>, sum: Reg<F32>, shift: f32) -> Reg<F32> {
        let reference = Self::reference(k, max, false);
        let log = k.lg2_approx_ftz_f32(sum);
        let log = if shift == 0.0 { log } else { k.add_f32(log, shift) };
        let total = k.fma_f32(reference, self.exp_scale, log);
        k.mul_f32(total, std::f64::consts::LN_2)
    }
}

/// How the score of a row becomes a probability; rows are counted over tiles and halves.
type Exp<'a> = &'a dyn Fn(&mut KernelBuilder, Reg<F32>, usize) -> Reg<F32>;

/// The running maximum and sum of one row. The sum is this thread's part until [`OnlineSoftmax::finish`].
#[derive(Clone, Copy)]
pub(crate) struct RowState {
    pub max: Reg<F32>,
    pub sum: Reg<F32>,
}

/// The softmax of the rows that a warp holds as fragments: two rows a thread and 16-row tile.
pub(crate) struct OnlineSoftmax {
    pub params: SoftmaxParams,
    /// One entry a 16-row tile: the upper row, the lower row.
    pub rows: Vec<[RowState; 2]>,
}

impl OnlineSoftmax {
    /// No key seen yet.
    pub fn new(k: &mut KernelBuilder, params: SoftmaxParams, tiles: usize) -> Self {
        let mut row = || RowState { max: k.mov_f32(NEG_INF), sum: k.mov_f32(0.0) };
        Self { params, rows: (0..tiles).map(|_| [row(), row()]).collect() }
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
                |k| each(k, &|k, score, row| params.exp(k, score, references[row].0)),
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
