//! AVX2 with FMA and F16C: eight lanes, sixteen registers.

use std::arch::{asm, x86_64::*};

use super::{
    Coming, Job, Lines, Outputs, Range, Scalars, Scores, Simd, Vectorised, Vectors, math, outlined, stream,
    tile, wide,
};

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx2;

// SAFETY (of all blocks below): the trait requires a CPU with AVX2, FMA and F16C, and room for `LANES` elements
// where a method reads or writes.
#[allow(clippy::undocumented_unsafe_blocks)] // One reason for all of these one-liners, stated above.
impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const ROWS: usize = 4;
    const VECS: usize = 3;
    const COLUMNS: usize = 3;

    #[inline(always)]
    fn tall(vectors: usize) -> usize {
        if vectors == 2 { 6 } else { 4 }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m256) {
        unsafe { _mm256_storeu_ps(to, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m256 {
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> __m256 {
        unsafe {
            let wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(from.cast()));
            let sign = _mm_slli_epi16::<8>(_mm_and_si128(wide, _mm_set1_epi16(0x80)));
            let rest = _mm_slli_epi16::<7>(_mm_and_si128(wide, _mm_set1_epi16(0x7f)));
            _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, rest)), _mm256_set1_ps(256.0))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: __m256) {
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, x: __m256) {
        unsafe {
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let rounded = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(even, quiet, nan));
            let packed = _mm256_packus_epi32(rounded, rounded);
            let packed = _mm256_permute4x64_epi64::<0b1000>(packed);
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed));
        }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn fms(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmsub_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn select_less(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        unsafe { _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }
    #[inline(always)]
    unsafe fn are_numbers(x: __m256) -> bool {
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x)) == 0 }
    }
    #[inline(always)]
    unsafe fn abs(x: __m256) -> __m256 {
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), x) }
    }
    #[inline(always)]
    unsafe fn copy_sign(x: __m256, s: __m256) -> __m256 {
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(sign, x), _mm256_and_ps(sign, s))
        }
    }
    #[inline(always)]
    unsafe fn exp2(x: __m256, scale: __m256, most: __m256) -> __m256 {
        unsafe {
            math::exp2::<Self>(
                x,
                scale,
                most,
                #[inline(always)]
                |x| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(x))),
            )
        }
    }
    #[inline(always)]
    unsafe fn accumulate<const R: usize, const V: usize>(
        mut acc: [[__m256; V]; R],
        a: Scalars<R>,
        b: Vectors,
        len: usize,
        lines: Lines,
    ) -> [[__m256; V]; R] {
        let steps = len / 4;
        unsafe {
            if R == 4 && V == 3 && a.step == 1 && b.step == Self::VECS * Self::LANES && steps > 0 {
                let mut tile = [[_mm256_setzero_ps(); 3]; 4];
                for (tile, acc) in tile.as_flattened_mut().iter_mut().zip(acc.as_flattened()) {
                    *tile = *acc;
                }
                let mut rows = [std::ptr::null(); 4];
                rows.copy_from_slice(&a.rows);
                tile = four_rows(tile, rows, b.at, steps, lines);
                for (tile, acc) in tile.as_flattened().iter().zip(acc.as_flattened_mut()) {
                    *acc = *tile;
                }
                let done = 4 * steps;
                let (a, b) = (a.skip(done), b.skip(done));
                return tile::accumulate::<Self, R, V>(acc, a, b, len - done, Lines::none(b.at));
            }
            tile::accumulate::<Self, R, V>(acc, a, b, len, lines)
        }
    }
    #[inline(always)]
    unsafe fn product<const R: usize, const V: usize>(
        p: *const f32,
        v: *const f32,
        keys: usize,
        lines: Lines,
    ) -> [[__m256; V]; R] {
        unsafe {
            let mut result = [[_mm256_setzero_ps(); V]; R];
            if R == 6 && V == 2 {
                for (result, tile) in result.iter_mut().zip(&six_times_two(p, v, keys, lines)) {
                    result.copy_from_slice(tile);
                }
            } else if R == 4 && V <= 3 {
                let tile = match V {
                    1 => four_times::<1>(p, v, keys, lines),
                    2 => four_times::<2>(p, v, keys, lines),
                    _ => four_times::<3>(p, v, keys, lines),
                };
                for (result, tile) in result.iter_mut().zip(&tile) {
                    result.copy_from_slice(&tile[..V]);
                }
            } else {
                result = tile::product::<Self, R, V>(p, v, keys, lines);
            }
            result
        }
    }
    outlined! { #[target_feature(enable = "avx2,fma,f16c")] }
    #[inline(always)]
    fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    fn prefetch_near(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [__m256]) {
        unsafe {
            let rows: &mut [__m256; 8] = rows.try_into().unwrap_unchecked();
            // Within 128-bit lanes: 4×4 transpositions of each group of four rows.
            for i in [0, 4] {
                let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
                let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                rows[i] = _mm256_shuffle_ps::<0x44>(ab_low, cd_low);
                rows[i + 1] = _mm256_shuffle_ps::<0xee>(ab_low, cd_low);
                rows[i + 2] = _mm256_shuffle_ps::<0x44>(ab_high, cd_high);
                rows[i + 3] = _mm256_shuffle_ps::<0xee>(ab_high, cd_high);
            }
            // Between them: columns j and j + 4 are the low and high halves.
            for j in 0..4 {
                let (a, b) = (rows[j], rows[j + 4]);
                rows[j] = _mm256_permute2f128_ps::<0x20>(a, b);
                rows[j + 4] = _mm256_permute2f128_ps::<0x31>(a, b);
            }
        }
    }
}

/// The widest tile, four steps of k at a time. It needs all sixteen registers, which the compiler does not manage
/// without moving and spilling them.
///
/// # Safety
/// Requires AVX2 and FMA, `steps` above 0, and `4 · steps` steps of scalars and vectors.
#[rustfmt::skip] // Registers in rows of the tile.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn four_rows(
    mut acc: [[__m256; 3]; 4],
    rows: [*const f32; 4],
    b: *const f32,
    steps: usize,
    lines: Lines,
) -> [[__m256; 3]; 4] {
    // SAFETY: the caller's promise; the block only reads, and only scalars and vectors.
    unsafe {
        asm!(
            ".macro row scalar, w, x, y",
            "vbroadcastss ymm15, dword ptr [\\scalar]",
            "vfmadd231ps \\w, ymm15, ymm12",
            "vfmadd231ps \\x, ymm15, ymm13",
            "vfmadd231ps \\y, ymm15, ymm14",
            ".endm",
            "2:",
            ".irp u, 0, 1, 2, 3",
            "vmovups ymm12, [{b} + \\u*96]",
            "vmovups ymm13, [{b} + \\u*96 + 32]",
            "vmovups ymm14, [{b} + \\u*96 + 64]",
            "row {r0}+{k}+\\u*4, ymm0, ymm1, ymm2",
            "row {r1}+{k}+\\u*4, ymm3, ymm4, ymm5",
            "row {r2}+{k}+\\u*4, ymm6, ymm7, ymm8",
            "row {r3}+{k}+\\u*4, ymm9, ymm10, ymm11",
            ".endr",
            "prefetcht1 [{line}]",
            "prefetcht1 [{line} + 64]",
            "add {line}, {line_step}",
            "add {k}, 16",
            "add {b}, 384",
            "dec {n}",
            "jnz 2b",
            ".purgem row",
            r0 = in(reg) rows[0], r1 = in(reg) rows[1], r2 = in(reg) rows[2], r3 = in(reg) rows[3],
            k = inout(reg) 0_usize => _,
            b = inout(reg) b => _,
            n = inout(reg) steps => _,
            line = inout(reg) lines.at => _,
            line_step = in(reg) lines.step,
            inout("ymm0") acc[0][0], inout("ymm1") acc[0][1], inout("ymm2") acc[0][2],
            inout("ymm3") acc[1][0], inout("ymm4") acc[1][1], inout("ymm5") acc[1][2],
            inout("ymm6") acc[2][0], inout("ymm7") acc[2][1], inout("ymm8") acc[2][2],
            inout("ymm9") acc[3][0], inout("ymm10") acc[3][1], inout("ymm11") acc[3][2],
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(readonly, nostack),
        );
    }
    acc
}

/// Four neighbouring scalars from `p` times `VECS` vectors from `v`, at most three; those of the next key are three vectors
/// and `VECS` further.
///
/// # Safety
/// Requires AVX2 and FMA and that many keys of scalars and vectors.
#[rustfmt::skip] // Registers in rows of the tile.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn four_times<const VECS: usize>(
    p: *const f32,
    v: *const f32,
    keys: usize,
    lines: Lines,
) -> [[__m256; 3]; 4] {
    let mut acc = [[_mm256_setzero_ps(); 3]; 4];
    // SAFETY: the caller's promise; the block only reads, and only scalars and vectors.
    unsafe {
        asm!(
            ".macro row at, x, y, z",
            "vbroadcastss ymm15, dword ptr [{p} + \\at]",
            "vfmadd231ps \\x, ymm15, ymm12",
            ".if {vecs} > 1",
            "vfmadd231ps \\y, ymm15, ymm13",
            ".endif",
            ".if {vecs} > 2",
            "vfmadd231ps \\z, ymm15, ymm14",
            ".endif",
            ".endm",
            ".macro step u",
            "vmovups ymm12, [{v} + \\u*{vecs}*32]",
            ".if {vecs} > 1",
            "vmovups ymm13, [{v} + \\u*{vecs}*32 + 32]",
            ".endif",
            ".if {vecs} > 2",
            "vmovups ymm14, [{v} + \\u*{vecs}*32 + 64]",
            ".endif",
            "row \\u*96, ymm0, ymm1, ymm2",
            "row \\u*96+4, ymm3, ymm4, ymm5",
            "row \\u*96+8, ymm6, ymm7, ymm8",
            "row \\u*96+12, ymm9, ymm10, ymm11",
            ".endm",
            // Four keys at a time, then the rest one by one.
            "sub {n}, 4",
            "jb 3f",
            "2:",
            "step 0",
            "step 1",
            "step 2",
            "step 3",
            "prefetcht1 [{line}]",
            "prefetcht1 [{line} + 64]",
            "add {line}, {line_step}",
            "add {p}, 384",
            "add {v}, {vecs}*128",
            "sub {n}, 4",
            "jae 2b",
            "3:",
            "add {n}, 4",
            "jz 5f",
            "4:",
            "step 0",
            "add {p}, 96",
            "add {v}, {vecs}*32",
            "dec {n}",
            "jnz 4b",
            "5:",
            ".purgem row",
            ".purgem step",
            vecs = const VECS,
            p = inout(reg) p => _,
            v = inout(reg) v => _,
            n = inout(reg) keys => _,
            line = inout(reg) lines.at => _,
            line_step = in(reg) lines.step,
            inout("ymm0") acc[0][0], inout("ymm1") acc[0][1], inout("ymm2") acc[0][2],
            inout("ymm3") acc[1][0], inout("ymm4") acc[1][1], inout("ymm5") acc[1][2],
            inout("ymm6") acc[2][0], inout("ymm7") acc[2][1], inout("ymm8") acc[2][2],
            inout("ymm9") acc[3][0], inout("ymm10") acc[3][1], inout("ymm11") acc[3][2],
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(readonly, nostack),
        );
    }
    acc
}

/// Six neighbouring scalars from `p` times two vectors from `v`; those of the next key are three vectors and two further.
///
/// # Safety
/// Requires AVX2 and FMA and that many keys of scalars and vectors.
#[rustfmt::skip] // Registers in rows of the tile.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn six_times_two(
    p: *const f32,
    v: *const f32,
    keys: usize,
    lines: Lines,
) -> [[__m256; 2]; 6] {
    let mut acc = [[_mm256_setzero_ps(); 2]; 6];
    // SAFETY: the caller's promise; the block only reads, and only scalars and vectors.
    unsafe {
        asm!(
            ".macro row at, x, y",
            "vbroadcastss ymm14, dword ptr [{p} + \\at]",
            "vfmadd231ps \\x, ymm14, ymm12",
            "vfmadd231ps \\y, ymm14, ymm13",
            ".endm",
            ".macro step u",
            "vmovups ymm12, [{v} + \\u*64]",
            "vmovups ymm13, [{v} + \\u*64 + 32]",
            "row \\u*96, ymm0, ymm1",
            "row \\u*96+4, ymm2, ymm3",
            "row \\u*96+8, ymm4, ymm5",
            "row \\u*96+12, ymm6, ymm7",
            "row \\u*96+16, ymm8, ymm9",
            "row \\u*96+20, ymm10, ymm11",
            ".endm",
            // Four keys at a time, then the rest one by one.
            "sub {n}, 4",
            "jb 3f",
            "2:",
            "step 0",
            "step 1",
            "step 2",
            "step 3",
            "prefetcht1 [{line}]",
            "prefetcht1 [{line} + 64]",
            "add {line}, {line_step}",
            "add {p}, 384",
            "add {v}, 256",
            "sub {n}, 4",
            "jae 2b",
            "3:",
            "add {n}, 4",
            "jz 5f",
            "4:",
            "step 0",
            "add {p}, 96",
            "add {v}, 64",
            "dec {n}",
            "jnz 4b",
            "5:",
            ".purgem row",
            ".purgem step",
            p = inout(reg) p => _,
            v = inout(reg) v => _,
            n = inout(reg) keys => _,
            line = inout(reg) lines.at => _,
            line_step = in(reg) lines.step,
            inout("ymm0") acc[0][0], inout("ymm1") acc[0][1],
            inout("ymm2") acc[1][0], inout("ymm3") acc[1][1],
            inout("ymm4") acc[2][0], inout("ymm5") acc[2][1],
            inout("ymm6") acc[3][0], inout("ymm7") acc[3][1],
            inout("ymm8") acc[4][0], inout("ymm9") acc[4][1],
            inout("ymm10") acc[5][0], inout("ymm11") acc[5][1],
            out("ymm12") _, out("ymm13") _, out("ymm14") _,
            options(readonly, nostack),
        );
    }
    acc
}
