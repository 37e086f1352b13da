//! Exponential and hyperbolic tangent of a vector, by polynomials.
#![allow(unsafe_code)] // Calls vector instructions, so it must run where the CPU has them.

use super::simd::Simd;

/// 2^x − 1 = x·P(x) on [−½, ½], minimax by relative error (2.6e-9).
#[allow(clippy::approx_constant)] // The last one is near ln 2, but fitted.
const EXP2: [f32; 6] =
    [0.000_155_946_78, 0.001_340_664_4, 0.009_617_693, 0.055_503_106, 0.240_226_53, 0.693_147_2];

/// tanh(x) = x + x³·P(x²) on [0, ⅝], minimax by relative error (4.4e-9).
const TANH: [f32; 5] = [-0.005_704_987, 0.020_639_087, -0.053_739_715, 0.133_314_42, -0.333_332_8];

/// Scales for [`Exp2Below`]: nothing overflows or vanishes on the way.
pub(super) const SCALES: std::ops::Range<f32> = 1e-30..1e30;

/// 2^(−x · scale) for a positive scale and x · scale ≥ −127, to 2 ulp; 0 below 2^−126.5 (so for ∞), NaN for NaN.
#[derive(Clone, Copy)]
pub(super) struct Exp2Below<S: Simd> {
    scale: S::V,
    /// Where x · scale is 127.
    most: S::V,
}

impl<S: Simd> Exp2Below<S> {
    /// # Safety
    /// Requires a CPU with `S`.
    #[inline(always)]
    pub(super) unsafe fn new(scale: f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self { scale: S::splat(-scale), most: S::splat(127.0 / scale) } }
    }

    /// # Safety
    /// Requires a CPU with `S`.
    #[inline(always)]
    pub(super) unsafe fn of(self, x: S::V) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::exp2(x, self.scale, self.most) }
    }
}

/// Adding this to a number that is not too large leaves its nearest whole number in the low bits of the sum.
pub(super) const ROUND: f32 = 12_582_912.0;

/// 2^(x · scale) for a negative scale, with x · scale = −127 at `most`, as of [`Exp2Below`]; `to_exponent` shifts the bits of
/// its argument left by 23, so that a small integer in the low ones becomes an exponent.
///
/// # Safety
/// Requires a CPU with `S`.
#[inline(always)]
pub(super) unsafe fn exp2<S: Simd>(
    x: S::V,
    scale: S::V,
    most: S::V,
    to_exponent: impl Fn(S::V) -> S::V,
) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        // The sum's low bits are the exponent of the power of two next to the result, and 0 for −127.
        let round = S::splat(ROUND + 127.0);
        let x = S::min(most, x);
        let shifted = S::fma(x, scale, round);
        let fraction = S::fms(x, scale, S::sub(shifted, round));
        S::mul(exp2_of_fraction::<S>(fraction), to_exponent(shifted))
    }
}

/// 2^x on [−½, ½].
///
/// # Safety
/// Requires a CPU with `S`.
#[inline(always)]
pub(super) unsafe fn exp2_of_fraction<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        let mut p = S::splat(EXP2[0]);
        for &c in &EXP2[1..] {
            p = S::fma(p, x, S::splat(c));
        }
        S::fma(p, x, S::splat(1.0))
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
        // Near 0: an odd polynomial, because a difference from 1 cancels.
        let square = S::mul(x, x);
        let mut p = S::splat(TANH[0]);
        for &c in &TANH[1..] {
            p = S::fma(p, square, S::splat(c));
        }
        let near = S::fma(S::mul(p, square), x, x);
        // Elsewhere: 1 − 2t/(1 + t) with t = e^−2|x|.
        let t = Exp2Below::<S>::new(2.0 * std::f32::consts::LOG2_E).of(magnitude);
        let one = S::splat(1.0);
        let far = S::sub(one, S::div(S::add(t, t), S::add(one, t)));
        S::select_less(magnitude, S::splat(0.625), near, S::copy_sign(far, x))
    }
}

/// tanh(inner · x), and NaN where x is infinite: a sum that overflowed has lost its sign, which the tanh would hide.
///
/// # Safety
/// Requires a CPU with `S`.
#[inline(always)]
pub(super) unsafe fn capped<S: Simd>(inner: f32, x: S::V) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { S::fma(x, S::splat(0.0), tanh::<S>(S::mul(x, S::splat(inner)))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Isa, available, simd::dispatch};

    dispatch! { unsafe fn exp2_each(scale: f32, x: &mut [f32]) = exp2_each_on }

    #[inline(always)]
    unsafe fn exp2_each_on<S: Simd>(scale: f32, x: &mut [f32]) {
        assert!(x.len().is_multiple_of(S::LANES));
        for chunk in x.chunks_exact_mut(S::LANES) {
            // SAFETY: a chunk has `LANES` elements.
            unsafe {
                let below = S::sub(S::splat(0.0), S::load(chunk.as_ptr()));
                let y = Exp2Below::<S>::new(scale).of(below);
                S::store(chunk.as_mut_ptr(), y);
            }
        }
    }

    dispatch! { unsafe fn tanh_each(x: &mut [f32]) = tanh_each_on }

    #[inline(always)]
    unsafe fn tanh_each_on<S: Simd>(x: &mut [f32]) {
        assert!(x.len().is_multiple_of(S::LANES));
        for chunk in x.chunks_exact_mut(S::LANES) {
            // SAFETY: a chunk has `LANES` elements.
            unsafe { S::store(chunk.as_mut_ptr(), tanh::<S>(S::load(chunk.as_ptr()))) };
        }
    }

    /// `f(inputs)` is within `ulps` of `exact` on every instruction set.
    fn is_within(ulps: f64, inputs: &[f32], exact: impl Fn(f64) -> f64, f: impl Fn(Isa, &mut [f32])) {
        for isa in available() {
            let mut out = inputs.to_vec();
            f(isa, &mut out);
            for (&x, &y) in inputs.iter().zip(&out) {
                let exact = exact(f64::from(x));
                let ulp = f64::from(f32::EPSILON) * 2.0_f64.powf(exact.abs().log2().floor());
                let error = (f64::from(y) - exact).abs() / ulp;
                assert!(error <= ulps, "{isa}: f({x:e}) is {y:e}, not {exact:e} ({error:.2} ulp)");
            }
        }
    }

    #[test]
    fn exp2_is_within_two_ulp_wherever_its_result_is_normal() {
        let sweep: Vec<f32> = (0..1 << 20).map(|i| -126.0 + 252.0 * i as f32 / (1 << 20) as f32).collect();
        let small: Vec<f32> = (0..1 << 12).map(|i| -(2.0_f32.powf(-i as f32 / 50.0))).collect();
        for inputs in [sweep, small] {
            // SAFETY: the instruction set is available.
            is_within(2.0, &inputs, f64::exp2, |isa, x| unsafe { exp2_each(isa, 1.0, x) });
        }
    }

    #[test]
    fn exp2_takes_its_scale_along_to_three_ulp_and_the_rounding_of_an_unfused_product() {
        let inputs: Vec<f32> = (0..1 << 16).map(|i| -100.0 * i as f32 / (1 << 16) as f32).collect();
        for scale in [0.1_f32, 0.180_336_88, 1.2] {
            for isa in available() {
                let mut out = inputs.clone();
                // SAFETY: the instruction set is available.
                unsafe { exp2_each(isa, scale, &mut out) };
                for (&x, &y) in inputs.iter().zip(&out) {
                    let product = f64::from(x) * f64::from(scale);
                    let rounding = if isa == Isa::Portable { product.abs() } else { 0.0 };
                    let error = (f64::from(y) / product.exp2() - 1.0).abs() / f64::from(f32::EPSILON);
                    assert!(error <= 3.0 + rounding, "{isa}: {error:.2} ulp at {x:e} times {scale}");
                }
            }
        }
    }

    #[test]
    fn exp2_of_the_very_negative_is_zero_and_of_nan_is_nan() {
        for isa in available() {
            for scale in [SCALES.start, 0.125, 1.0, 1e29] {
                let mut x = [f32::NEG_INFINITY, f32::MIN, -128.0 / scale, f32::NAN].repeat(4);
                // SAFETY: the instruction set is available.
                unsafe { exp2_each(isa, scale, &mut x) };
                for four in x.chunks(4) {
                    assert_eq!(four[..3], [0.0; 3], "{isa}, scale {scale}");
                    assert!(four[3].is_nan(), "{isa}");
                }
            }
        }
    }

    #[test]
    fn exp2_of_zero_is_exactly_one() {
        for isa in available() {
            let mut x = [0.0, -0.0].repeat(8);
            // SAFETY: the instruction set is available.
            unsafe { exp2_each(isa, 0.3, &mut x) };
            assert_eq!(x, [1.0; 16], "{isa}");
        }
    }

    #[test]
    fn tanh_is_within_two_ulp_everywhere() {
        let sweep: Vec<f32> =
            (0..1 << 20).map(|i| -12.0 + 24.0 * (i as f32 + 0.5) / (1 << 20) as f32).collect();
        let small: Vec<f32> = (0..1 << 12).map(|i| 2.0_f32.powf(-i as f32 / 50.0)).collect();
        for inputs in [sweep, small] {
            // SAFETY: the instruction set is available.
            is_within(2.0, &inputs, f64::tanh, |isa, x| unsafe { tanh_each(isa, x) });
        }
    }

    #[test]
    fn tanh_of_infinity_is_one_and_of_nan_is_nan() {
        for isa in available() {
            let mut x = [f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::NAN].repeat(4);
            // SAFETY: the instruction set is available.
            unsafe { tanh_each(isa, &mut x) };
            for four in x.chunks(4) {
                assert_eq!(four[..3], [1.0, -1.0, 0.0], "{isa}");
                assert!(four[3].is_nan(), "{isa}");
            }
        }
    }
}
