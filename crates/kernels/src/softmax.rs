//! The online softmax: exponentials of base 2 with the scale folded in, running maximum and sum.
//!
//! A row without keys keeps the maximum −∞ and the sum 0: its output is 0 and its lse −∞, never NaN.

use flashcore_ptx::{F32, KernelBuilder, Reg};

use crate::{
    FwdParams, Spec,
    fragment::{Acc, HALVES},
};

/// −∞ as a constant operand.
pub(crate) const NEG_INF: f32 = f32::NEG_INFINITY;

/// The numbers that turn dot products into exponents.
#[derive(Clone, Copy)]
pub(crate) struct SoftmaxParams {
    exp_scale: Reg<F32>,
    tanh_scale: Option<Reg<F32>>,
}

impl SoftmaxParams {
    /// Reads them from the launch.
    pub fn read(k: &mut KernelBuilder, spec: &Spec) -> Self {
        let exp_scale = k.param(FwdParams::exp_scale);
        let tanh_scale = spec.softcap.then(|| k.param(FwdParams::tanh_scale));
        Self { exp_scale, tanh_scale }
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

    /// What is added in the exponent: minus the row's maximum, scaled; 0 for a row that has seen no key, so that
    /// −∞ + ∞ does not arise. `seen`: every row is known to have seen a key.
    pub fn offset(&self, k: &mut KernelBuilder, max: Reg<F32>, seen: bool) -> Reg<F32> {
        let scaled = k.mul_f32(max, self.exp_scale);
        let offset = k.neg_f32(scaled);
        if seen {
            return offset;
        }
        let none = k.setp_eq_f32(max, NEG_INF);
        k.selp_f32(0.0, offset, none)
    }

    /// 2^(score · scale + offset).
    pub fn exp(&self, k: &mut KernelBuilder, score: Reg<F32>, offset: Reg<F32>) -> Reg<F32> {
        let exponent = k.fma_f32(score, self.exp_scale, offset);
        k.ex2_approx_ftz_f32(exponent)
    }

    /// 1 / sum, or 0 for a row without keys.
    pub fn inverse(k: &mut KernelBuilder, sum: Reg<F32>) -> Reg<F32> {
        let none = k.setp_eq_f32(sum, 0.0);
        let inverse = k.rcp_approx_ftz_f32(sum);
        k.selp_f32(0.0, inverse, none)
    }

    /// The natural logarithm of the sum of exponentials; −∞ for a row without keys.
    pub fn lse(&self, k: &mut KernelBuilder, max: Reg<F32>, sum: Reg<F32>) -> Reg<F32> {
        let offset = self.offset(k, max, false);
        let log = k.lg2_approx_ftz_f32(sum);
        let total = k.sub_f32(log, offset);
        k.mul_f32(total, std::f64::consts::LN_2)
    }
}

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
    pub fn step(&self, k: &mut KernelBuilder, scores: &mut [Vec<Acc>], o: &[Vec<Acc>], masked: bool) {
        for ((state, scores), o) in self.rows.iter().zip(scores).zip(o) {
            for (row, half) in state.iter().zip(HALVES) {
                let mut max = row.max;
                for score in scores.iter() {
                    for &i in &half {
                        max = k.max_f32(max, score[i]);
                    }
                }
                for distance in [1u32, 2] {
                    let other = k.shfl_bfly(max, distance);
                    max = k.max_f32(max, other);
                }
                let offset = self.params.offset(k, max, !masked);
                let rescale = self.params.exp(k, row.max, offset);
                k.set(row.max, |k| k.mov_f32(max));
                let mut sum = k.mul_f32(row.sum, rescale);
                for score in scores.iter_mut() {
                    for &i in &half {
                        score[i] = self.params.exp(k, score[i], offset);
                        sum = k.add_f32(sum, score[i]);
                    }
                }
                k.set(row.sum, |k| k.mov_f32(sum));
                for o in o {
                    for &i in &half {
                        k.set(o[i], |k| k.mul_f32(o[i], rescale));
                    }
                }
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
