//! AVX-512F: sixteen lanes, thirty-two registers.

use std::arch::{asm, x86_64::*};

use super::{
    Coming, Lines, MAX_VECS, Outputs, Range, Rows, Scalars, Scores, Simd, Vectorised, Vectors, outlined,
    stream, tile,
};

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
    unsafe fn fms(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmsub_ps(a, b, c) }
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
    unsafe fn accumulate<const R: usize, const V: usize, const F: usize>(
        mut acc: [[__m512; V]; R],
        a: Scalars<R>,
        b: Vectors,
        len: usize,
        lines: Lines,
    ) -> [[__m512; V]; R] {
        let steps = len / 4;
        unsafe {
            if R == 8 && F == 0 && a.step == 1 && steps > 0 {
                // The tile's vectors are the last of the three that the registers hold.
                let first = Self::VECS - V;
                let mut tile = [[_mm512_setzero_ps(); 3]; 8];
                for (tile, acc) in tile.iter_mut().zip(&acc) {
                    tile[first..].copy_from_slice(acc);
                }
                let mut rows = [std::ptr::null(); 8];
                rows.copy_from_slice(&a.rows);
                let at = b.at.wrapping_sub(first * Self::LANES);
                tile = match V {
                    1 => eight_rows::<1>(tile, rows, at, steps, lines),
                    2 => eight_rows::<2>(tile, rows, at, steps, lines),
                    _ => eight_rows::<3>(tile, rows, at, steps, lines),
                };
                for (tile, acc) in tile.iter().zip(&mut acc) {
                    acc.copy_from_slice(&tile[first..]);
                }
                let done = 4 * steps;
                let (a, b) = (a.skip(done), b.skip::<Self>(done));
                return tile::accumulate::<Self, R, V, F>(acc, a, b, len - done, Lines::none(b.at));
            }
            tile::accumulate::<Self, R, V, F>(acc, a, b, len, lines)
        }
    }
    #[inline(always)]
    unsafe fn stair<const R: usize, const V: usize>(
        a: Scalars<R>,
        b: Vectors,
        keys: [usize; MAX_VECS],
        lines: Lines,
    ) -> [[__m512; V]; R] {
        unsafe {
            if R != 8 {
                return tile::stair::<Self, R, V>(a, b, keys, lines);
            }
            // The tile's vectors are the last of the three that the registers hold.
            let first = Self::VECS - V;
            let (mut steps, mut done) = ([0; 3], 0);
            for (steps, keys) in steps[first..].iter_mut().zip(keys) {
                (*steps, done) = (keys - done, keys);
            }
            let tile = eight_columns(a.rows[0], b.at.wrapping_sub(first * Self::LANES), steps, lines);
            let mut result = [[_mm512_setzero_ps(); V]; R];
            for (result, tile) in result.iter_mut().zip(&tile) {
                result.copy_from_slice(&tile[first..]);
            }
            result
        }
    }
    outlined! { #[target_feature(enable = "avx512f")] }
    #[inline(always)]
    fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    fn prefetch_near(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
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

/// The tallest tile and the last `VECS` of its three vectors, four steps of k at a time, in the order and with the registers
/// that it has to have: the compiler spills accumulators and spends additions on addresses, and both cost more than they
/// seem where another thread shares the core's front end.
///
/// # Safety
/// Requires AVX-512F, `steps` above 0, and `4 · steps` steps of scalars and vectors.
#[rustfmt::skip] // Registers in rows of the tile.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn eight_rows<const VECS: usize>(
    mut acc: [[__m512; 3]; 8],
    rows: [*const f32; 8],
    b: *const f32,
    steps: usize,
    lines: Lines,
) -> [[__m512; 3]; 8] {
    // SAFETY: the caller's promise; the block only reads, and only scalars and vectors.
    unsafe {
        asm!(
            ".macro row scalar, x, y, z",
            "vbroadcastss zmm27, dword ptr [\\scalar]",
            ".if {vecs} > 2",
            "vfmadd231ps \\x, zmm27, zmm24",
            ".endif",
            ".if {vecs} > 1",
            "vfmadd231ps \\y, zmm27, zmm25",
            ".endif",
            "vfmadd231ps \\z, zmm27, zmm26",
            ".endm",
            "2:",
            ".irp u, 0, 1, 2, 3",
            ".if {vecs} > 2",
            "vmovups zmm24, [{b} + \\u*192]",
            ".endif",
            ".if {vecs} > 1",
            "vmovups zmm25, [{b} + \\u*192 + 64]",
            ".endif",
            "vmovups zmm26, [{b} + \\u*192 + 128]",
            "row {r0}+{k}+\\u*4, zmm0, zmm1, zmm2",
            "row {r1}+{k}+\\u*4, zmm3, zmm4, zmm5",
            "row {r2}+{k}+\\u*4, zmm6, zmm7, zmm8",
            "row {r3}+{k}+\\u*4, zmm9, zmm10, zmm11",
            "row {r4}+{k}+\\u*4, zmm12, zmm13, zmm14",
            "row {r5}+{k}+\\u*4, zmm15, zmm16, zmm17",
            "row {r6}+{k}+\\u*4, zmm18, zmm19, zmm20",
            "row {r7}+{k}+\\u*4, zmm21, zmm22, zmm23",
            ".endr",
            "prefetcht1 [{line}]",
            "prefetcht1 [{line} + 64]",
            "add {line}, {line_step}",
            "add {k}, 16",
            "add {b}, 768",
            "dec {n}",
            "jnz 2b",
            ".purgem row",
            r0 = in(reg) rows[0], r1 = in(reg) rows[1], r2 = in(reg) rows[2], r3 = in(reg) rows[3],
            r4 = in(reg) rows[4], r5 = in(reg) rows[5], r6 = in(reg) rows[6], r7 = in(reg) rows[7],
            vecs = const VECS,
            k = inout(reg) 0_usize => _,
            b = inout(reg) b => _,
            n = inout(reg) steps => _,
            line = inout(reg) lines.at => _,
            line_step = in(reg) lines.step,
            inout("zmm0") acc[0][0], inout("zmm1") acc[0][1], inout("zmm2") acc[0][2],
            inout("zmm3") acc[1][0], inout("zmm4") acc[1][1], inout("zmm5") acc[1][2],
            inout("zmm6") acc[2][0], inout("zmm7") acc[2][1], inout("zmm8") acc[2][2],
            inout("zmm9") acc[3][0], inout("zmm10") acc[3][1], inout("zmm11") acc[3][2],
            inout("zmm12") acc[4][0], inout("zmm13") acc[4][1], inout("zmm14") acc[4][2],
            inout("zmm15") acc[5][0], inout("zmm16") acc[5][1], inout("zmm17") acc[5][2],
            inout("zmm18") acc[6][0], inout("zmm19") acc[6][1], inout("zmm20") acc[6][2],
            inout("zmm21") acc[7][0], inout("zmm22") acc[7][1], inout("zmm23") acc[7][2],
            out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _,
            options(readonly, nostack),
        );
    }
    acc
}

/// Eight neighbouring scalars, sixteen elements further in every step, times three vectors; times the last two of them for
/// `steps[1]` steps after that, and times the last one for `steps[2]` more.
///
/// # Safety
/// Requires AVX-512F and that many steps of scalars and vectors.
#[rustfmt::skip] // Registers in rows of the tile.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn eight_columns(
    a: *const f32,
    b: *const f32,
    steps: [usize; 3],
    lines: Lines,
) -> [[__m512; 3]; 8] {
    let mut acc = [[_mm512_setzero_ps(); 3]; 8];
    // SAFETY: the caller's promise; the block only reads, and only scalars and vectors.
    unsafe {
        asm!(
            ".macro row vecs, at, x, y, z",
            "vbroadcastss zmm27, dword ptr [{a} + \\at]",
            ".if \\vecs > 2",
            "vfmadd231ps \\x, zmm27, zmm24",
            ".endif",
            ".if \\vecs > 1",
            "vfmadd231ps \\y, zmm27, zmm25",
            ".endif",
            "vfmadd231ps \\z, zmm27, zmm26",
            ".endm",
            ".macro step vecs, u",
            ".if \\vecs > 2",
            "vmovups zmm24, [{b} + \\u*192]",
            ".endif",
            ".if \\vecs > 1",
            "vmovups zmm25, [{b} + \\u*192 + 64]",
            ".endif",
            "vmovups zmm26, [{b} + \\u*192 + 128]",
            "row \\vecs, \\u*64, zmm0, zmm1, zmm2",
            "row \\vecs, \\u*64+4, zmm3, zmm4, zmm5",
            "row \\vecs, \\u*64+8, zmm6, zmm7, zmm8",
            "row \\vecs, \\u*64+12, zmm9, zmm10, zmm11",
            "row \\vecs, \\u*64+16, zmm12, zmm13, zmm14",
            "row \\vecs, \\u*64+20, zmm15, zmm16, zmm17",
            "row \\vecs, \\u*64+24, zmm18, zmm19, zmm20",
            "row \\vecs, \\u*64+28, zmm21, zmm22, zmm23",
            ".endm",
            // Four steps at a time, then the rest one by one.
            ".macro stage vecs, steps",
            "sub \\steps, 4",
            "jb 3f",
            "2:",
            "step \\vecs, 0",
            "step \\vecs, 1",
            "step \\vecs, 2",
            "step \\vecs, 3",
            "prefetcht1 [{line}]",
            "prefetcht1 [{line} + 64]",
            "add {line}, {line_step}",
            "add {a}, 256",
            "add {b}, 768",
            "sub \\steps, 4",
            "jae 2b",
            "3:",
            "add \\steps, 4",
            "jz 5f",
            "4:",
            "step \\vecs, 0",
            "add {a}, 64",
            "add {b}, 192",
            "dec \\steps",
            "jnz 4b",
            "5:",
            ".endm",
            "stage 3, {n3}",
            "stage 2, {n2}",
            "stage 1, {n1}",
            ".purgem row",
            ".purgem step",
            ".purgem stage",
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            n3 = inout(reg) steps[0] => _,
            n2 = inout(reg) steps[1] => _,
            n1 = inout(reg) steps[2] => _,
            line = inout(reg) lines.at => _,
            line_step = in(reg) lines.step,
            inout("zmm0") acc[0][0], inout("zmm1") acc[0][1], inout("zmm2") acc[0][2],
            inout("zmm3") acc[1][0], inout("zmm4") acc[1][1], inout("zmm5") acc[1][2],
            inout("zmm6") acc[2][0], inout("zmm7") acc[2][1], inout("zmm8") acc[2][2],
            inout("zmm9") acc[3][0], inout("zmm10") acc[3][1], inout("zmm11") acc[3][2],
            inout("zmm12") acc[4][0], inout("zmm13") acc[4][1], inout("zmm14") acc[4][2],
            inout("zmm15") acc[5][0], inout("zmm16") acc[5][1], inout("zmm17") acc[5][2],
            inout("zmm18") acc[6][0], inout("zmm19") acc[6][1], inout("zmm20") acc[6][2],
            inout("zmm21") acc[7][0], inout("zmm22") acc[7][1], inout("zmm23") acc[7][2],
            out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _,
            options(readonly, nostack),
        );
    }
    acc
}
