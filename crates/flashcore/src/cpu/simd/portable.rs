//! Plain arrays that every compiler back end turns into its own vectors.

use half::{bf16, f16};

use super::{Coming, Job, Outputs, Range, Scores, Simd, Vectorised, math, outlined, stream, tile, wide};

/// Four lanes as an array: what every 64-bit CPU holds in one register.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Portable;

/// The vector of [`Portable`].
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub(in crate::cpu) struct Lanes([f32; 4]);

/// Where the target has no fused instruction, `mul_add` would be a call into the C library.
const FUSED: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

macro_rules! each_lane {
    ($i:ident => $e:expr) => {
        Lanes(std::array::from_fn(
            #[inline(always)]
            |$i| $e,
        ))
    };
}

impl Simd for Portable {
    type V = Lanes;
    const LANES: usize = 4;
    const ROWS: usize = 4;
    const VECS: usize = 2;
    const COLUMNS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Lanes {
        Lanes([x; 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Lanes {
        // SAFETY: the caller has `LANES` elements there.
        Lanes(unsafe { from.cast::<[f32; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Lanes) {
        // SAFETY: the caller has `LANES` elements there.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(x.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Lanes {
        // SAFETY: the caller has `LANES` elements there.
        let bits = unsafe { from.cast::<[u16; 4]>().read_unaligned() };
        each_lane!(i => f16_to_f32(bits[i]))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Lanes {
        // SAFETY: the caller has `LANES` elements there.
        let bits = unsafe { from.cast::<[u16; 4]>().read_unaligned() };
        each_lane!(i => f32::from_bits(u32::from(bits[i]) << 16))
    }
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> Lanes {
        // SAFETY: the caller has `LANES` elements there.
        let bits = unsafe { from.cast::<[u8; 4]>().read_unaligned() }.map(u16::from);
        each_lane!(i => 256.0 * f16_to_f32((bits[i] & 0x80) << 8 | (bits[i] & 0x7f) << 7))
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: Lanes) {
        // SAFETY: the caller has `LANES` elements there.
        unsafe { to.cast::<[u16; 4]>().write_unaligned(x.0.map(|x| f16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, x: Lanes) {
        // SAFETY: the caller has `LANES` elements there.
        unsafe { to.cast::<[u16; 4]>().write_unaligned(x.0.map(|x| bf16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn add(a: Lanes, b: Lanes) -> Lanes {
        each_lane!(i => a.0[i] + b.0[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Lanes, b: Lanes) -> Lanes {
        each_lane!(i => a.0[i] - b.0[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Lanes, b: Lanes) -> Lanes {
        each_lane!(i => a.0[i] * b.0[i])
    }
    #[inline(always)]
    unsafe fn div(a: Lanes, b: Lanes) -> Lanes {
        each_lane!(i => a.0[i] / b.0[i])
    }
    #[inline(always)]
    unsafe fn fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        if FUSED {
            each_lane!(i => a.0[i].mul_add(b.0[i], c.0[i]))
        } else {
            each_lane!(i => a.0[i] * b.0[i] + c.0[i])
        }
    }
    #[inline(always)]
    unsafe fn fms(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        if FUSED {
            each_lane!(i => a.0[i].mul_add(b.0[i], -c.0[i]))
        } else {
            each_lane!(i => a.0[i] * b.0[i] - c.0[i])
        }
    }
    #[inline(always)]
    unsafe fn max(a: Lanes, b: Lanes) -> Lanes {
        each_lane!(i => if a.0[i] > b.0[i] { a.0[i] } else { b.0[i] })
    }
    #[inline(always)]
    unsafe fn min(a: Lanes, b: Lanes) -> Lanes {
        each_lane!(i => if a.0[i] < b.0[i] { a.0[i] } else { b.0[i] })
    }
    #[inline(always)]
    unsafe fn select_less(a: Lanes, b: Lanes, x: Lanes, y: Lanes) -> Lanes {
        each_lane!(i => if a.0[i] < b.0[i] { x.0[i] } else { y.0[i] })
    }
    #[inline(always)]
    unsafe fn are_numbers(x: Lanes) -> bool {
        !x.0.iter().any(|x| x.is_nan())
    }
    #[inline(always)]
    unsafe fn abs(x: Lanes) -> Lanes {
        each_lane!(i => x.0[i].abs())
    }
    #[inline(always)]
    unsafe fn copy_sign(x: Lanes, s: Lanes) -> Lanes {
        each_lane!(i => x.0[i].copysign(s.0[i]))
    }
    #[inline(always)]
    unsafe fn exp2(x: Lanes, scale: Lanes, most: Lanes) -> Lanes {
        // SAFETY: every CPU has these vectors.
        unsafe {
            math::exp2::<Self>(
                x,
                scale,
                most,
                #[inline(always)]
                |x| each_lane!(i => f32::from_bits(x.0[i].to_bits() << 23)),
            )
        }
    }
    outlined! {}
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Lanes]) {
        let [a, b, c, d] = [rows[0].0, rows[1].0, rows[2].0, rows[3].0];
        for (i, row) in rows.iter_mut().enumerate().take(4) {
            *row = Lanes([a[i], b[i], c[i], d[i]]);
        }
    }
}

/// Widens f16 with integer arithmetic alone, which vectorises where a table or a branch would not: the
/// exponent is rebased by a multiplication that also normalises denormals.
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let finite = f32::from_bits(magnitude) * f32::from_bits((254 - 15) << 23);
    // Infinity and NaN keep their fraction and take the full exponent.
    let wide = if magnitude >= 0x7c00 << 13 { magnitude | 0x7f80_0000 } else { finite.to_bits() };
    f32::from_bits(sign | wide)
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_f16_widens_to_its_exact_value() {
        for bits in 0..=u16::MAX {
            let exact = half::f16::from_bits(bits).to_f32();
            let ours = super::f16_to_f32(bits);
            assert!(
                ours == exact && ours.is_sign_negative() == exact.is_sign_negative()
                    || ours.is_nan() && exact.is_nan()
            );
        }
    }
}
