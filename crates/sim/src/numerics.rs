//! Number formats and the arithmetic that the hardware does its own way.
//!
//! Conversions are written without branches on the value, so that a loop over the 32 lanes of a warp becomes
//! vector code. They are exact: tests compare every 8-bit and 16-bit pattern with an independent definition.
//!
//! `ex2`, `lg2`, `rcp`, `rsqrt`, `tanh`, `sin` and `cos` are defined by PTX only up to an error bound. Here they
//! are computed in double precision and rounded once, so they are at least as good as any GPU's. An H200 gives the
//! same `ex2` and `rsqrt` to one unit in the last place and the same `lg2` to two; its `tanh` is a hundred units
//! off, and its `sin` and `cos` are for small arguments only.

use std::f64::consts::LN_2;

/// The NaN that every single-precision instruction produces.
pub const CANONICAL_NAN: u32 = 0x7FFF_FFFF;

/// The largest magnitude code of e4m3 (448); the next one is NaN.
const E4M3_MAX: u32 = 0x7E;
/// The largest finite magnitude code of e5m2 (57344).
const E5M2_MAX: u32 = 0x7B;

/// Replaces any NaN by the canonical one.
#[inline(always)]
pub fn canonical(x: f32) -> u32 {
    if x.is_nan() { CANONICAL_NAN } else { x.to_bits() }
}

/// Replaces a subnormal by zero of the same sign, as `.ftz` does with inputs and results.
#[inline(always)]
pub fn flush(x: f32) -> f32 {
    let bits = x.to_bits();
    if bits & 0x7F80_0000 == 0 { f32::from_bits(bits & 0x8000_0000) } else { x }
}

/// Widens a half to single precision; exact.
#[inline(always)]
pub fn f16_to_f32(half: u16) -> f32 {
    let sign = (u32::from(half) & 0x8000) << 16;
    let magnitude = u32::from(half) & 0x7FFF;
    // Subnormal halves go through an integer conversion, so that no subnormal f32 slows the vector unit down.
    let subnormal = ((magnitude as i32) as f32 * f32::from_bits(0x3380_0000)).to_bits();
    let normal = (magnitude << 13) + (112 << 23);
    let special = normal + (112 << 23);
    let bits = if magnitude < 0x0400 {
        subnormal
    } else if magnitude >= 0x7C00 {
        special
    } else {
        normal
    };
    f32::from_bits(bits | sign)
}

/// Widens a bfloat16 to single precision; exact.
#[inline(always)]
pub fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// Rounds to half, nearest even; NaN becomes the canonical `0x7FFF`.
#[inline(always)]
pub fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    // Adding 0.5 puts the last place of a subnormal half at the last place of the f32: the adder rounds.
    let magic = 126u32 << 23;
    let subnormal =
        (f32::from_bits(magnitude.min(113 << 23)) + f32::from_bits(magic)).to_bits().wrapping_sub(magic);
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + odd) >> 13;
    let finite = if magnitude < 113 << 23 { subnormal } else { normal };
    let large = if magnitude > 0x7F80_0000 { 0x7FFF } else { 0x7C00 };
    let half = if magnitude >= 143 << 23 { large } else { finite };
    let sign = if magnitude > 0x7F80_0000 { 0 } else { sign };
    (half | sign) as u16
}

/// Rounds to half towards zero; NaN becomes the canonical `0x7FFF`.
#[inline(always)]
pub fn f32_to_f16_rz(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7FFF_FFFF;
    if magnitude > 0x7F80_0000 {
        return 0x7FFF;
    }
    if magnitude == 0x7F80_0000 {
        return sign | 0x7C00;
    }
    let nearest = f32_to_f16(f32::from_bits(magnitude));
    let down = u16::from(f16_to_f32(nearest) > f32::from_bits(magnitude));
    sign | (nearest - down)
}

/// Rounds to bfloat16, nearest even; NaN becomes the canonical `0x7FFF`.
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    (if nan { 0x7FFF } else { rounded }) as u16
}

/// Rounds to bfloat16 towards zero; NaN becomes the canonical `0x7FFF`.
#[inline(always)]
pub fn f32_to_bf16_rz(x: f32) -> u16 {
    let bits = x.to_bits();
    let nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    (if nan { 0x7FFF } else { bits >> 16 }) as u16
}

/// Rounds to an 8-bit float of the given mantissa width and bias, nearest even, saturating to `max`.
#[inline(always)]
fn f32_to_f8<const MANTISSA: u32, const BIAS: u32>(x: f32, max: u32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) & 0x80;
    let magnitude = bits & 0x7FFF_FFFF;
    let smallest_normal = (128 - BIAS) << 23;
    // The power of two whose last place is the format's smallest step.
    let magic = (128 - BIAS - MANTISSA + 23) << 23;
    let subnormal = (f32::from_bits(magnitude.min(smallest_normal)) + f32::from_bits(magic))
        .to_bits()
        .wrapping_sub(magic);
    let shift = 23 - MANTISSA;
    let odd = (magnitude >> shift) & 1;
    let normal =
        magnitude.wrapping_sub((127 - BIAS) << 23).wrapping_add((1 << (shift - 1)) - 1 + odd) >> shift;
    let code = if magnitude < smallest_normal { subnormal } else { normal }.min(max);
    let nan = magnitude > 0x7F80_0000;
    (if nan { 0x7F } else { code | sign }) as u8
}

/// Rounds to e4m3, nearest even, saturating to ±448; NaN becomes `0x7F`.
#[inline(always)]
pub fn f32_to_e4m3(x: f32) -> u8 {
    f32_to_f8::<3, 7>(x, E4M3_MAX)
}

/// Rounds to e5m2, nearest even, saturating to ±57344; NaN becomes `0x7F`.
#[inline(always)]
pub fn f32_to_e5m2(x: f32) -> u8 {
    f32_to_f8::<2, 15>(x, E5M2_MAX)
}

/// Widens e4m3 to single precision; exact.
#[inline(always)]
pub fn e4m3_to_f32(code: u8) -> f32 {
    let sign = (u32::from(code) & 0x80) << 24;
    let magnitude = u32::from(code) & 0x7F;
    let subnormal = ((magnitude as i32) as f32 * f32::from_bits((127 - 9) << 23)).to_bits();
    let normal = (magnitude << 20) + (120 << 23);
    let bits = if magnitude < 8 { subnormal } else { normal };
    let bits = if magnitude == 0x7F { CANONICAL_NAN } else { bits };
    f32::from_bits(bits | sign)
}

/// Widens e5m2 to single precision; exact. It is the upper half of an f16.
#[inline(always)]
pub fn e5m2_to_f32(code: u8) -> f32 {
    f16_to_f32(u16::from(code) << 8)
}

/// Rounds to half, nearest even, in one step.
pub fn f64_to_f16(x: f64) -> u16 {
    f32_to_f16(f64_to_f32_odd(x, 0.0))
}

/// `a * b + c` rounded to odd in single precision, so that rounding on to a 16-bit format equals rounding the
/// exact value once.
pub fn fma_to_odd(a: f32, b: f32, c: f32) -> f32 {
    // The product of two 16-bit floats is exact; the sum is taken with its error.
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    if !sum.is_finite() {
        return sum as f32;
    }
    let rest = sum - product;
    let error = (product - (sum - rest)) + (c - rest);
    f64_to_f32_odd(sum, error)
}

/// Rounds `x + error` to an f32 whose last bit is odd unless the value is exact; `error` is below x's last place.
fn f64_to_f32_odd(x: f64, error: f64) -> f32 {
    let near = x as f32;
    if near.is_nan() || (f64::from(near) == x && error == 0.0) {
        return near;
    }
    // Truncate towards zero, then set the last bit because something was lost.
    let magnitude = x.abs();
    let toward = if x < 0.0 { -error } else { error };
    let mut bits = near.to_bits() & 0x7FFF_FFFF;
    let back = f64::from(f32::from_bits(bits));
    if back > magnitude || (back == magnitude && toward < 0.0) {
        bits -= 1;
    }
    f32::from_bits(bits | 1 | (if x < 0.0 { 0x8000_0000 } else { 0 }))
}

/// 2^x in double precision for the fractional part, rounded once to single precision.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    // Outside of this range the result is 0, infinite, or NaN; the clamp keeps the exponent arithmetic valid.
    let clamped = f64::from(x).clamp(-160.0, 130.0);
    // Adding and subtracting 1.5·2^52 rounds to the nearest integer without a call.
    let magic = 6_755_399_441_055_744.0;
    let shifted = clamped + magic;
    let whole = shifted - magic;
    let t = (clamped - whole) * LN_2;
    // The Taylor series of e^t for |t| <= ln2/2: the 11th term is below 2^-41.
    let mut p: f64 = 1.0 / 3_628_800.0;
    p = p.mul_add(t, 1.0 / 362_880.0);
    p = p.mul_add(t, 1.0 / 40_320.0);
    p = p.mul_add(t, 1.0 / 5_040.0);
    p = p.mul_add(t, 1.0 / 720.0);
    p = p.mul_add(t, 1.0 / 120.0);
    p = p.mul_add(t, 1.0 / 24.0);
    p = p.mul_add(t, 1.0 / 6.0);
    p = p.mul_add(t, 0.5);
    p = p.mul_add(t, 1.0);
    p = p.mul_add(t, 1.0);
    // The low bits of `shifted` hold the integer part in two's complement.
    let scale = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    let result = (p * scale) as f32;
    if x.is_nan() { f32::from_bits(CANONICAL_NAN) } else { result }
}

/// 2^x with subnormal numbers taken for zero, before and after.
#[inline(always)]
pub fn exp2_flushed(x: f32) -> f32 {
    flush(exp2(flush(x)))
}

/// log2(x), computed in double precision and rounded once.
#[inline(always)]
pub fn log2(x: f32) -> f32 {
    f64::from(x).log2() as f32
}

/// 1/x correctly rounded.
#[inline(always)]
pub fn rcp(x: f32) -> f32 {
    1.0 / x
}

/// 1/sqrt(x), computed in double precision and rounded once.
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    (1.0 / f64::from(x).sqrt()) as f32
}

/// tanh(x), computed in double precision and rounded once.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    f64::from(x).tanh() as f32
}

/// The larger of two, as `max.f32` has it: a NaN gives way to the number, and +0 is above -0.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    let larger = if a > b { a } else { b };
    // Equal values differ at most in the sign of zero: the intersection of the bits is +0.
    let larger = if a == b { f32::from_bits(a.to_bits() & b.to_bits()) } else { larger };
    let larger = if b.is_nan() { a } else { larger };
    if a.is_nan() { b } else { larger }
}

/// The smaller of two, as `min.f32` has it: a NaN gives way to the number, and -0 is below +0.
#[inline(always)]
pub fn min(a: f32, b: f32) -> f32 {
    let smaller = if a < b { a } else { b };
    let smaller = if a == b { f32::from_bits(a.to_bits() | b.to_bits()) } else { smaller };
    let smaller = if b.is_nan() { a } else { smaller };
    if a.is_nan() { b } else { smaller }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_as_the_half_crate_has_it() {
        for code in 0..=u16::MAX {
            let want = half::f16::from_bits(code).to_f32();
            let got = f16_to_f32(code);
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{code:#x}");
            let want = half::bf16::from_bits(code).to_f32();
            let got = bf16_to_f32(code);
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{code:#x}");
        }
    }

    /// Values around every representable number and every rounding boundary of a 16-bit format.
    fn probes() -> impl Iterator<Item = f32> {
        (0..=u16::MAX).flat_map(|code| {
            let half = half::f16::from_bits(code).to_f32();
            let brain = half::bf16::from_bits(code).to_f32();
            [half, brain].into_iter().flat_map(|x| {
                let bits = x.to_bits();
                [0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001]
                    .into_iter()
                    .flat_map(move |d| [bits.wrapping_add(d), bits.wrapping_sub(d)])
                    .map(f32::from_bits)
            })
        })
    }

    #[test]
    fn rounding_to_16_bits_agrees_with_the_half_crate_around_every_boundary() {
        for x in probes() {
            if x.is_nan() {
                assert_eq!(f32_to_f16(x), 0x7FFF);
                assert_eq!(f32_to_bf16(x), 0x7FFF);
            } else {
                assert_eq!(f32_to_f16(x), half::f16::from_f32(x).to_bits(), "{x:e}");
                assert_eq!(f32_to_bf16(x), half::bf16::from_f32(x).to_bits(), "{x:e}");
            }
        }
    }

    #[test]
    fn rounding_towards_zero_never_grows_and_is_the_closest_such() {
        for x in probes().filter(|x| !x.is_nan()) {
            let code = f32_to_f16_rz(x);
            let back = f16_to_f32(code);
            assert!(back.abs() <= x.abs());
            if back.is_finite() {
                assert!(f16_to_f32(code + 1).abs() > x.abs(), "{x:e}");
            }
            let code = f32_to_bf16_rz(x);
            assert!(bf16_to_f32(code).abs() <= x.abs());
            if x.is_finite() {
                assert!(bf16_to_f32(code + 1).abs() > x.abs(), "{x:e}");
            }
        }
    }

    /// The value of an 8-bit float by the definition of its fields.
    fn f8_value(code: u8, mantissa_bits: u32, bias: i32) -> f64 {
        let exponent = i32::from((code & 0x7F) >> mantissa_bits);
        let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        let magnitude = if exponent == 0 {
            mantissa * 2f64.powi(1 - bias)
        } else {
            (1.0 + mantissa) * 2f64.powi(exponent - bias)
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_fp8_code_widens_by_the_definition_of_its_fields() {
        for code in 0..=u8::MAX {
            if code & 0x7F == 0x7F {
                assert!(e4m3_to_f32(code).is_nan());
            } else {
                assert_eq!(f64::from(e4m3_to_f32(code)), f8_value(code, 3, 7));
                assert_eq!(f32_to_e4m3(e4m3_to_f32(code)), code);
            }
            match code & 0x7F {
                0x7C => assert!(e5m2_to_f32(code).is_infinite()),
                0x7D..=0x7F => assert!(e5m2_to_f32(code).is_nan()),
                _ => {
                    assert_eq!(f64::from(e5m2_to_f32(code)), f8_value(code, 2, 15));
                    assert_eq!(f32_to_e5m2(e5m2_to_f32(code)), code);
                }
            }
        }
    }

    /// Every half, and the f32 next to each tie between two codes: these show a value that is rounded twice.
    fn fp8_probes() -> impl Iterator<Item = f32> {
        let ties = [(3, 7, E4M3_MAX), (2, 15, E5M2_MAX)].into_iter().flat_map(|(mantissa, bias, max)| {
            (0..=max as u8).flat_map(move |code| {
                let tie = f8_value(code, mantissa, bias).midpoint(f8_value(code + 1, mantissa, bias));
                let bits = (tie as f32).to_bits();
                [bits - 1, bits, bits + 1].into_iter().flat_map(|b| [f32::from_bits(b), -f32::from_bits(b)])
            })
        });
        let ends = [f32::MAX, f32::MIN, f32::MIN_POSITIVE, f32::from_bits(1), f32::NAN, -f32::NAN];
        (0..=u16::MAX).map(f16_to_f32).chain(ties).chain(ends)
    }

    #[test]
    fn rounding_to_fp8_picks_the_nearest_code_and_ties_to_even() {
        let nearest = |x: f64, mantissa: u32, bias: i32, max: u32| -> u8 {
            let sign = if x.is_sign_negative() { 0x80 } else { 0 };
            // Farther out, all codes would be equally far away in f64.
            let x = x.abs().min(1e6);
            let best = (0..=max as u8)
                .min_by(|&a, &b| {
                    let da = (f8_value(a, mantissa, bias) - x).abs();
                    let db = (f8_value(b, mantissa, bias) - x).abs();
                    da.total_cmp(&db).then((a & 1).cmp(&(b & 1)))
                })
                .expect("codes exist");
            best | sign
        };
        for x in fp8_probes() {
            if x.is_nan() {
                assert_eq!((f32_to_e4m3(x), f32_to_e5m2(x)), (0x7F, 0x7F));
            } else {
                assert_eq!(f32_to_e4m3(x), nearest(f64::from(x), 3, 7, E4M3_MAX), "{x:e}");
                assert_eq!(f32_to_e5m2(x), nearest(f64::from(x), 2, 15, E5M2_MAX), "{x:e}");
            }
        }
    }

    #[test]
    fn the_types_of_the_float8_crate_are_these_but_for_the_codes_of_nan() {
        use float8::{F8E4M3, F8E5M2};
        for code in 0..=u8::MAX {
            for (got, want) in [
                (e4m3_to_f32(code), F8E4M3::from_bits(code).to_f32()),
                (e5m2_to_f32(code), F8E5M2::from_bits(code).to_f32()),
            ] {
                assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{code:#x}");
            }
        }
        for x in fp8_probes() {
            let (e4m3, e5m2) = (F8E4M3::from_f32(x), F8E5M2::from_f32(x));
            if x.is_nan() {
                assert!(e4m3.to_f32().is_nan() && e5m2.to_f32().is_nan());
            } else {
                assert_eq!((f32_to_e4m3(x), f32_to_e5m2(x)), (e4m3.to_bits(), e5m2.to_bits()), "{x:e}");
            }
        }
    }

    #[test]
    fn a_fused_multiply_add_of_halves_is_rounded_once() {
        // The exact value lies just above a tie that rounding to f32 first would take for the tie itself.
        let (a, b, c) = (f16_to_f32(0x3C01), f16_to_f32(0x3801), f16_to_f32(0x0001));
        let exact = f64::from(a) * f64::from(b) + f64::from(c);
        assert_eq!(f32_to_f16(fma_to_odd(a, b, c)), half::f16::from_f64(exact).to_bits());
        for i in 0..2000u32 {
            let code =
                |k: u32| (i.wrapping_mul(k) >> 7 & 0x7BFF) as u16 | (i.wrapping_mul(k) & 0x8000) as u16;
            let (x, y, z) = (code(2_654_435_761), code(40_503), code(2_246_822_519));
            let [x, y, z] = [x, y, z].map(f16_to_f32);
            let exact = f64::from(x) * f64::from(y) + f64::from(z);
            let want = half::f16::from_f64(exact);
            if want.is_finite() && f64::from(x) * f64::from(y) != 0.0 {
                assert_eq!(f32_to_f16(fma_to_odd(x, y, z)), want.to_bits(), "{x:e} * {y:e} + {z:e}");
            }
        }
        assert_eq!(f64_to_f16(65519.0), 0x7BFF);
        assert_eq!(f64_to_f16(65520.0), 0x7C00);
        assert_eq!(f64_to_f16(-2049.0), half::f16::from_f64(-2049.0).to_bits());
        assert!(fma_to_odd(f32::INFINITY, 0.0, 1.0).is_nan());
    }

    #[test]
    fn exp2_is_within_half_a_unit_in_the_last_place_and_exact_at_the_ends() {
        let mut x = -160.0f32;
        while x < 130.0 {
            let want = f64::from(x).exp2();
            let got = f64::from(exp2(x));
            let rounded = f64::from(want as f32);
            let ulp = f64::from((want as f32).to_bits().wrapping_add(1).min(0x7F80_0000)).max(1.0);
            assert!(
                got == rounded || (got - want).abs() <= (rounded - want).abs() * 1.001,
                "exp2({x}) = {got:e}, want {rounded:e} ({ulp})"
            );
            x += 0.003_1;
        }
        assert_eq!(exp2(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp2(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!(exp2(-149.0).to_bits(), 1);
        assert!(exp2(f32::NAN).is_nan());
    }

    #[test]
    fn min_and_max_prefer_numbers_to_nan_and_order_the_zeros() {
        assert_eq!(max(f32::NAN, 1.0), 1.0);
        assert_eq!(max(1.0, f32::NAN), 1.0);
        assert!(max(f32::NAN, f32::NAN).is_nan());
        assert_eq!(max(-0.0, 0.0).to_bits(), 0);
        assert_eq!(max(0.0, -0.0).to_bits(), 0);
        assert_eq!(min(-0.0, 0.0).to_bits(), 0x8000_0000);
        assert_eq!(min(0.0, -0.0).to_bits(), 0x8000_0000);
        assert_eq!(min(f32::NAN, 1.0), 1.0);
        assert_eq!(min(2.0, 1.0), 1.0);
        assert_eq!(max(2.0, 1.0), 2.0);
        assert_eq!(max(-3.0, -3.0), -3.0);
        assert_eq!(min(f32::NEG_INFINITY, 0.0), f32::NEG_INFINITY);
    }
}
