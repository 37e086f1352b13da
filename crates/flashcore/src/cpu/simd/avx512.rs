//! AVX-512F: sixteen lanes, thirty-two registers.

use std::arch::x86_64::*;

use super::Simd;

/// AVX-512F.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512;

// SAFETY (of all blocks below): the trait requires a CPU with AVX-512F, and room for `LANES` elements where a
// method reads or writes.
#[allow(clippy::undocumented_unsafe_blocks)] // One reason for all of these one-liners, stated above.
impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const ROWS: usize = 8;
    const VECS: usize = 3;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(to, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: __m512) {
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, x: __m512) {
        unsafe {
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_epi32(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let even = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let quiet = _mm512_or_epi32(bits, _mm512_set1_epi32(0x0040_0000));
            let rounded = _mm512_mask_mov_epi32(even, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), quiet);
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded)));
        }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn select_less(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x) }
    }
    #[inline(always)]
    unsafe fn abs(x: __m512) -> __m512 {
        unsafe { _mm512_abs_ps(x) }
    }
    #[inline(always)]
    unsafe fn copy_sign(x: __m512, s: __m512) -> __m512 {
        unsafe {
            let (x, s) = (_mm512_castps_si512(x), _mm512_castps_si512(s));
            // Where the mask is set take s, else x.
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi32(i32::MIN), s, x))
        }
    }
    #[inline(always)]
    unsafe fn low_bits_to_exponent(x: __m512) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(x))) }
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [__m512]) {
        unsafe {
            let rows: &mut [__m512; 16] = rows.try_into().unwrap_unchecked();
            // Within 128-bit lanes: 4×4 transpositions of each group of four rows.
            for i in [0, 4, 8, 12] {
                let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
                let (ab_low, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                rows[i] = _mm512_shuffle_ps::<0x44>(ab_low, cd_low);
                rows[i + 1] = _mm512_shuffle_ps::<0xee>(ab_low, cd_low);
                rows[i + 2] = _mm512_shuffle_ps::<0x44>(ab_high, cd_high);
                rows[i + 3] = _mm512_shuffle_ps::<0xee>(ab_high, cd_high);
            }
            // Between them: the same on 128-bit blocks, for the four rows that hold column j, j + 4, j + 8, j + 12.
            for j in 0..4 {
                let [a, b, c, d] = [rows[j], rows[j + 4], rows[j + 8], rows[j + 12]];
                let ab_even = _mm512_shuffle_f32x4::<0x88>(a, b);
                let ab_odd = _mm512_shuffle_f32x4::<0xdd>(a, b);
                let cd_even = _mm512_shuffle_f32x4::<0x88>(c, d);
                let cd_odd = _mm512_shuffle_f32x4::<0xdd>(c, d);
                rows[j] = _mm512_shuffle_f32x4::<0x88>(ab_even, cd_even);
                rows[j + 4] = _mm512_shuffle_f32x4::<0x88>(ab_odd, cd_odd);
                rows[j + 8] = _mm512_shuffle_f32x4::<0xdd>(ab_even, cd_even);
                rows[j + 12] = _mm512_shuffle_f32x4::<0xdd>(ab_odd, cd_odd);
            }
        }
    }
}
