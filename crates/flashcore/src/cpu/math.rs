//! Exponential and hyperbolic tangent of a vector, by polynomials.
#![allow(unsafe_code)] // Calls vector instructions, so it must run where the CPU has them.

use super::{scoring::Change, simd::Simd};

/// 2^x − 1 = x·P(x) on [−½, ½], minimax by relative error (2.6e-9).
#[allow(clippy::approx_constant)] // The last one is near ln 2, but fitted.
const EXP2: [f32; 6] =
    [0.000_155_946_78, 0.001_340_664_4, 0.009_617_693, 0.055_503_106, 0.240_226_53, 0.693_147_2];

/// tanh(x) = x + x³·P(x²) on [0, ⅝], minimax by relative error (4.4e-9).
const TANH: [f32; 5] = [-0.005_704_987, 0.020_639_087, -0.053_739_715, 0.133_314_42, -0.333_332_8];

/// Scales for [`ScaledExp2`]: nothing overflows or vanishes on the way.
pub(super) const SCALES: std::ops::Range<f32> = 1e-30..1e30;

/// 2^(x · scale) for a positive scale and x · scale ≤ 127, to 2 ulp; 0 below 2^−126.5 (so for −∞), NaN for NaN.
#[derive(Clone, Copy)]
pub(super) struct ScaledExp2<S: Simd> {
    scale: S::V,
    /// Where x · scale is −127.
    least: S::V,
}

impl<S: Simd> ScaledExp2<S> {
    /// # Safety
    /// Requires a CPU with `S`.
    #[inline(always)]
    pub(super) unsafe fn new(scale: f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self { scale: S::splat(scale), least: S::splat(-127.0 / scale) } }
    }

    /// # Safety
    /// Requires a CPU with `S`.
    #[inline(always)]
    pub(super) unsafe fn of(self, x: S::V) -> S::V {
        // Adding this leaves round(x · scale) + 127 in the low bits of the sum: the exponent of the power of two
        // next to the result, and 0 for −127.
        const ROUND: f32 = 12_582_912.0 + 127.0;
        // SAFETY: the caller's promise.
        unsafe {
            let x = S::max(self.least, x);
            let shifted = S::fma(x, self.scale, S::splat(ROUND));
            let whole = S::sub(shifted, S::splat(ROUND));
            let fraction = S::fms(x, self.scale, whole);
            let mut p = S::splat(EXP2[0]);
            for &c in &EXP2[1..] {
                p = S::fma(p, fraction, S::splat(c));
            }
            p = S::fma(p, fraction, S::splat(1.0));
            S::mul(p, S::low_bits_to_exponent(shifted))
        }
    }
}

/// tanh(x) to 2 ulp, ±1 for ±∞, NaN for NaN.
///
/// # Safety
/// Requires a CPU with `S`.
#[inline(always)]
pub(super) unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        let magnitude = S::abs(x);
        // Near 0: an odd polynomial, because 1 − 2/(e^2x + 1) cancels.
        let square = S::mul(x, x);
        let mut p = S::splat(TANH[0]);
        for &c in &TANH[1..] {
            p = S::fma(p, square, S::splat(c));
        }
        let near = S::fma(S::mul(p, square), x, x);
        // Elsewhere: e^2|x|, which at |x| = 10 has long lost to the rounding of 1.
        let power =
            ScaledExp2::<S>::new(2.0 * std::f32::consts::LOG2_E).of(S::min(S::splat(10.0), magnitude));
        let one = S::splat(1.0);
        let far = S::sub(one, S::div(S::splat(2.0), S::add(power, one)));
        S::select_less(magnitude, S::splat(0.625), near, S::copy_sign(far, x))
    }
}

/// What a [`Change`] makes of products.
///
/// # Safety
/// Requires a CPU with `S`.
#[inline(always)]
pub(super) unsafe fn change<S: Simd>(change: Change, x: S::V) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        let x = S::mul(x, S::splat(change.inner));
        let x = if change.tanh { tanh::<S>(x) } else { x };
        S::mul(x, S::splat(change.outer))
    }
}
