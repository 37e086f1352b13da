//! AVX-512F: sixteen lanes, thirty-two registers.

use std::arch::{asm, x86_64::*};

use super::{
    Coming, Job, LaneRows, Lines, MAX_LANES, Outputs, Range, Scalars, Scores, Simd, Vectorised, Vectors,
    math, outlined, stream, tile, wide,
};

/// AVX-512F.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512;

/// 2^(x/16) − 1 = x·P(x) on [−½, ½]: the series, whose next term is 9e-9 at most.
const EXP2_SIXTEENTH: [f32; 3] = [1.355_080_8e-5, 9.383_848e-4, 0.043_321_7];

/// The bits of 2^(j/16), less j at the place of sixteenths of the exponent: adding i = 16 n + j there gives 2^(i/16).
#[rustfmt::skip] // Eight to a line.
const ROOTS: [u32; 16] = [
    0x3f80_0000, 0x3f7d_aac3, 0x3f7b_95c2, 0x3f79_c3d3, 0x3f78_37f0, 0x3f76_f532, 0x3f75_fed7, 0x3f75_583f,
    0x3f75_04f3, 0x3f75_08a4, 0x3f75_672a, 0x3f76_248c, 0x3f77_44fd, 0x3f78_ccdf, 0x3f7a_c0c7, 0x3f7d_257d,
];

// SAFETY (of all blocks below): the trait requires a CPU with AVX-512F, and room for `LANES` elements where a
// method reads or writes.
#[allow(clippy::undocumented_unsafe_blocks)] // One reason for all of these one-liners, stated above.
impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const ROWS: usize = 6;
    const VECS: usize = 4;
    const COLUMNS: usize = 4;

    #[inline(always)]
    fn tall(vectors: usize) -> usize {
        if vectors > 3 { 6 } else { 8 }
    }

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
    unsafe fn load_e4m3(from: *const u8) -> __m512 {
        unsafe {
            let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
            let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)));
            let rest = _mm256_slli_epi16::<7>(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)));
            _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256.0))
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
    unsafe fn are_numbers(x: __m512) -> bool {
        unsafe { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x) == 0 }
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
    unsafe fn exp2(x: __m512, scale: __m512, most: __m512) -> __m512 {
        unsafe {
            // In sixteenths, so that a short polynomial is left between them.
            let (scale, round) = (Self::mul(scale, Self::splat(16.0)), Self::splat(math::ROUND));
            let shifted = Self::fma(x, scale, round);
            let rest = Self::fms(x, scale, Self::sub(shifted, round));
            let whole = _mm512_castps_si512(shifted);
            let roots = _mm512_loadu_si512(ROOTS.as_ptr().cast());
            let power =
                _mm512_add_epi32(_mm512_permutexvar_epi32(whole, roots), _mm512_slli_epi32::<19>(whole));
            let power = _mm512_castsi512_ps(power);
            let [c, b, a] = EXP2_SIXTEENTH.map(|x| Self::splat(x));
            let more = Self::mul(rest, Self::fma(Self::fma(c, rest, b), rest, a));
            // Below `most`, or NaN; an infinite x has left NaN in the rest.
            let some = _mm512_cmp_ps_mask::<_CMP_NGE_UQ>(x, most);
            _mm512_maskz_fmadd_ps(some, power, more, power)
        }
    }
    #[inline(always)]
    unsafe fn accumulate<const R: usize, const V: usize>(
        mut acc: [[__m512; V]; R],
        a: Scalars<R>,
        b: Vectors,
        len: usize,
        lines: Lines,
    ) -> [[__m512; V]; R] {
        let steps = len / 4;
        unsafe {
            if a.step != 1 || b.step != Self::VECS * Self::LANES || steps == 0 {
                return tile::accumulate::<Self, R, V>(acc, a, b, len, lines);
            }
            if (R == 6 || R == 4) && V == 4 {
                let mut tile = [[_mm512_setzero_ps(); 4]; 6];
                let mut rows = [a.rows[0]; 6];
                for (tile, acc) in tile.iter_mut().zip(&acc) {
                    tile.copy_from_slice(acc);
                }
                rows[..R].copy_from_slice(&a.rows);
                tile = if R == 6 {
                    up_to_six_rows::<6>(tile, rows, b.at, steps, lines)
                } else {
                    up_to_six_rows::<4>(tile, rows, b.at, steps, lines)
                };
                for (tile, acc) in tile.iter().zip(&mut acc) {
                    acc.copy_from_slice(tile);
                }
            } else if R == 8 && V <= 3 {
                let mut tile = [[_mm512_setzero_ps(); 3]; 8];
                for (tile, acc) in tile.iter_mut().zip(&acc) {
                    tile[..V].copy_from_slice(acc);
                }
                let mut rows = [std::ptr::null(); 8];
                rows.copy_from_slice(&a.rows);
                tile = match V {
                    1 => eight_rows::<1>(tile, rows, b.at, steps, lines),
                    2 => eight_rows::<2>(tile, rows, b.at, steps, lines),
                    _ => eight_rows::<3>(tile, rows, b.at, steps, lines),
                };
                for (tile, acc) in tile.iter().zip(&mut acc) {
                    acc.copy_from_slice(&tile[..V]);
                }
            } else {
                return tile::accumulate::<Self, R, V>(acc, a, b, len, lines);
            }
            let done = 4 * steps;
            let (a, b) = (a.skip(done), b.skip(done));
            tile::accumulate::<Self, R, V>(acc, a, b, len - done, Lines::none(b.at))
        }
    }
    #[inline(always)]
    unsafe fn product<const R: usize, const V: usize>(
        p: *const f32,
        v: *const f32,
        keys: usize,
        lines: Lines,
    ) -> [[__m512; V]; R] {
        unsafe {
            let mut result = [[_mm512_setzero_ps(); V]; R];
            if V == 4 && (R == 4 || R == 6) {
                let tile = if R > 4 {
                    times_four::<6>(p, v, keys, lines)
                } else {
                    times_four::<4>(p, v, keys, lines)
                };
                for (result, tile) in result.iter_mut().zip(&tile) {
                    result.copy_from_slice(&tile[..V]);
                }
            } else if V <= 3 && R == 8 {
                let tile = match V {
                    1 => eight_times::<1>(p, v, keys, lines),
                    2 => eight_times::<2>(p, v, keys, lines),
                    _ => eight_times::<3>(p, v, keys, lines),
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
    unsafe fn columns_f32(rows: &LaneRows, d: usize) -> [__m512; MAX_LANES] {
        unsafe {
            let mut columns = [_mm512_setzero_ps(); MAX_LANES];
            for (i, four) in columns.chunks_exact_mut(4).enumerate() {
                let words = words(rows, 4 * d + 16 * i);
                for (column, word) in four.iter_mut().zip(words) {
                    *column = _mm512_castsi512_ps(word);
                }
            }
            columns
        }
    }
    #[inline(always)]
    unsafe fn columns_bf16(rows: &LaneRows, d: usize) -> [__m512; MAX_LANES] {
        unsafe {
            let mut columns = [_mm512_setzero_ps(); MAX_LANES];
            for (i, eight) in columns.chunks_exact_mut(8).enumerate() {
                let words = words(rows, 2 * d + 16 * i);
                for (two, word) in eight.chunks_exact_mut(2).zip(words) {
                    let high = _mm512_and_epi32(word, _mm512_set1_epi32(-0x1_0000));
                    two[0] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(word));
                    two[1] = _mm512_castsi512_ps(high);
                }
            }
            columns
        }
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

/// Four words of each of sixteen rows, from a byte on, as columns.
///
/// # Safety
/// Requires AVX-512F and so many readable bytes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn words(rows: &LaneRows, byte: usize) -> [__m512i; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let at = |row: usize| _mm_loadu_si128(rows[row].add(byte).cast());
        // Rows 0, 4, 8 and 12 behind each other, and so on: the blocks of 128 bits are where they have to be.
        let mut x = [_mm512_setzero_si512(); 4];
        for (i, x) in x.iter_mut().enumerate() {
            *x = _mm512_castsi128_si512(at(i));
            *x = _mm512_inserti32x4::<1>(*x, at(i + 4));
            *x = _mm512_inserti32x4::<2>(*x, at(i + 8));
            *x = _mm512_inserti32x4::<3>(*x, at(i + 12));
        }
        let [a, b, c, d] = x;
        let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(ab_low, cd_low),
            _mm512_unpackhi_epi64(ab_low, cd_low),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}

/// `ROWS` rows of scalars, four or six, times four vectors, four steps of k at a time, in the order and with the registers that it has to
/// have: the compiler spills accumulators and spends additions on addresses, and both cost more than they seem where another
/// thread shares the core's front end.
///
/// # Safety
/// Requires AVX-512F, `steps` above 0, and `4 · steps` steps of scalars and vectors.
#[rustfmt::skip] // Registers in rows of the tile.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn up_to_six_rows<const ROWS: usize>(
    mut acc: [[__m512; 4]; 6],
    rows: [*const f32; 6],
    b: *const f32,
    steps: usize,
    lines: Lines,
) -> [[__m512; 4]; 6] {
    // SAFETY: the caller's promise; the block only reads, and only scalars and vectors.
    unsafe {
        asm!(
            ".macro row scalar, w, x, y, z",
            "vbroadcastss zmm28, dword ptr [\\scalar]",
            "vfmadd231ps \\w, zmm28, zmm24",
            "vfmadd231ps \\x, zmm28, zmm25",
            "vfmadd231ps \\y, zmm28, zmm26",
            "vfmadd231ps \\z, zmm28, zmm27",
            ".endm",
            "2:",
            ".irp u, 0, 1, 2, 3",
            "vmovups zmm24, [{b} + \\u*256]",
            "vmovups zmm25, [{b} + \\u*256 + 64]",
            "vmovups zmm26, [{b} + \\u*256 + 128]",
            "vmovups zmm27, [{b} + \\u*256 + 192]",
            "row {r0}+{k}+\\u*4, zmm0, zmm1, zmm2, zmm3",
            "row {r1}+{k}+\\u*4, zmm4, zmm5, zmm6, zmm7",
            "row {r2}+{k}+\\u*4, zmm8, zmm9, zmm10, zmm11",
            "row {r3}+{k}+\\u*4, zmm12, zmm13, zmm14, zmm15",
            ".if {rows} > 4",
            "row {r4}+{k}+\\u*4, zmm16, zmm17, zmm18, zmm19",
            "row {r5}+{k}+\\u*4, zmm20, zmm21, zmm22, zmm23",
            ".endif",
            ".endr",
            "prefetcht1 [{line}]",
            "prefetcht1 [{line} + 64]",
            "add {line}, {line_step}",
            "add {k}, 16",
            "add {b}, 1024",
            "dec {n}",
            "jnz 2b",
            ".purgem row",
            r0 = in(reg) rows[0], r1 = in(reg) rows[1], r2 = in(reg) rows[2],
            r3 = in(reg) rows[3], r4 = in(reg) rows[4], r5 = in(reg) rows[5],
            rows = const ROWS,
            k = inout(reg) 0_usize => _,
            b = inout(reg) b => _,
            n = inout(reg) steps => _,
            line = inout(reg) lines.at => _,
            line_step = in(reg) lines.step,
            inout("zmm0") acc[0][0], inout("zmm1") acc[0][1], inout("zmm2") acc[0][2], inout("zmm3") acc[0][3],
            inout("zmm4") acc[1][0], inout("zmm5") acc[1][1], inout("zmm6") acc[1][2], inout("zmm7") acc[1][3],
            inout("zmm8") acc[2][0], inout("zmm9") acc[2][1], inout("zmm10") acc[2][2], inout("zmm11") acc[2][3],
            inout("zmm12") acc[3][0], inout("zmm13") acc[3][1], inout("zmm14") acc[3][2], inout("zmm15") acc[3][3],
            inout("zmm16") acc[4][0], inout("zmm17") acc[4][1], inout("zmm18") acc[4][2], inout("zmm19") acc[4][3],
            inout("zmm20") acc[5][0], inout("zmm21") acc[5][1], inout("zmm22") acc[5][2], inout("zmm23") acc[5][3],
            out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _,
            options(readonly, nostack),
        );
    }
    acc
}

/// The same of eight rows and `VECS` vectors, at most three. A single vector is summed in two columns of registers, because
/// eight sums at a time would wait for each other.
///
/// # Safety
/// As of [`up_to_six_rows`].
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
            ".macro row odd, scalar, x, y, z",
            "vbroadcastss zmm27, dword ptr [\\scalar]",
            ".if {vecs} == 1 && \\odd",
            "vfmadd231ps \\y, zmm27, zmm24",
            ".else",
            "vfmadd231ps \\x, zmm27, zmm24",
            ".endif",
            ".if {vecs} > 1",
            "vfmadd231ps \\y, zmm27, zmm25",
            ".endif",
            ".if {vecs} > 2",
            "vfmadd231ps \\z, zmm27, zmm26",
            ".endif",
            ".endm",
            "2:",
            ".irp u, 0, 1, 2, 3",
            "vmovups zmm24, [{b} + \\u*256]",
            ".if {vecs} > 1",
            "vmovups zmm25, [{b} + \\u*256 + 64]",
            ".endif",
            ".if {vecs} > 2",
            "vmovups zmm26, [{b} + \\u*256 + 128]",
            ".endif",
            "row \\u%2, {r0}+{k}+\\u*4, zmm0, zmm1, zmm2",
            "row \\u%2, {r1}+{k}+\\u*4, zmm3, zmm4, zmm5",
            "row \\u%2, {r2}+{k}+\\u*4, zmm6, zmm7, zmm8",
            "row \\u%2, {r3}+{k}+\\u*4, zmm9, zmm10, zmm11",
            "row \\u%2, {r4}+{k}+\\u*4, zmm12, zmm13, zmm14",
            "row \\u%2, {r5}+{k}+\\u*4, zmm15, zmm16, zmm17",
            "row \\u%2, {r6}+{k}+\\u*4, zmm18, zmm19, zmm20",
            "row \\u%2, {r7}+{k}+\\u*4, zmm21, zmm22, zmm23",
            ".endr",
            "prefetcht1 [{line}]",
            "prefetcht1 [{line} + 64]",
            "add {line}, {line_step}",
            "add {k}, 16",
            "add {b}, 1024",
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
        if VECS == 1 {
            for row in &mut acc {
                row[0] = _mm512_add_ps(row[0], row[1]);
            }
        }
    }
    acc
}

/// `ROWS` neighbouring scalars from `p`, at most six, times four vectors from `v`; those of the next key are four vectors
/// further on both sides.
///
/// # Safety
/// Requires AVX-512F and that many keys of scalars and vectors.
#[rustfmt::skip] // Registers in rows of the tile.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn times_four<const ROWS: usize>(
    p: *const f32,
    v: *const f32,
    keys: usize,
    lines: Lines,
) -> [[__m512; 4]; 6] {
    let mut acc = [[_mm512_setzero_ps(); 4]; 6];
    // SAFETY: the caller's promise; the block only reads, and only scalars and vectors.
    unsafe {
        asm!(
            ".macro row at, w, x, y, z",
            "vbroadcastss zmm28, dword ptr [{p} + \\at]",
            "vfmadd231ps \\w, zmm28, zmm24",
            "vfmadd231ps \\x, zmm28, zmm25",
            "vfmadd231ps \\y, zmm28, zmm26",
            "vfmadd231ps \\z, zmm28, zmm27",
            ".endm",
            ".macro step u",
            "vmovups zmm24, [{v} + \\u*256]",
            "vmovups zmm25, [{v} + \\u*256 + 64]",
            "vmovups zmm26, [{v} + \\u*256 + 128]",
            "vmovups zmm27, [{v} + \\u*256 + 192]",
            "row \\u*256, zmm0, zmm1, zmm2, zmm3",
            "row \\u*256+4, zmm4, zmm5, zmm6, zmm7",
            "row \\u*256+8, zmm8, zmm9, zmm10, zmm11",
            "row \\u*256+12, zmm12, zmm13, zmm14, zmm15",
            ".if {rows} > 4",
            "row \\u*256+16, zmm16, zmm17, zmm18, zmm19",
            "row \\u*256+20, zmm20, zmm21, zmm22, zmm23",
            ".endif",
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
            "add {p}, 1024",
            "add {v}, 1024",
            "sub {n}, 4",
            "jae 2b",
            "3:",
            "add {n}, 4",
            "jz 5f",
            "4:",
            "step 0",
            "add {p}, 256",
            "add {v}, 256",
            "dec {n}",
            "jnz 4b",
            "5:",
            ".purgem row",
            ".purgem step",
            rows = const ROWS,
            p = inout(reg) p => _,
            v = inout(reg) v => _,
            n = inout(reg) keys => _,
            line = inout(reg) lines.at => _,
            line_step = in(reg) lines.step,
            inout("zmm0") acc[0][0], inout("zmm1") acc[0][1], inout("zmm2") acc[0][2], inout("zmm3") acc[0][3],
            inout("zmm4") acc[1][0], inout("zmm5") acc[1][1], inout("zmm6") acc[1][2], inout("zmm7") acc[1][3],
            inout("zmm8") acc[2][0], inout("zmm9") acc[2][1], inout("zmm10") acc[2][2], inout("zmm11") acc[2][3],
            inout("zmm12") acc[3][0], inout("zmm13") acc[3][1], inout("zmm14") acc[3][2], inout("zmm15") acc[3][3],
            inout("zmm16") acc[4][0], inout("zmm17") acc[4][1], inout("zmm18") acc[4][2], inout("zmm19") acc[4][3],
            inout("zmm20") acc[5][0], inout("zmm21") acc[5][1], inout("zmm22") acc[5][2], inout("zmm23") acc[5][3],
            out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _,
            options(readonly, nostack),
        );
    }
    acc
}

/// Eight neighbouring scalars from `p` times `VECS` vectors from `v`, at most three; those of the next key are four vectors
/// and `VECS` further.
///
/// # Safety
/// Requires AVX-512F and that many keys of scalars and vectors.
#[rustfmt::skip] // Registers in rows of the tile.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn eight_times<const VECS: usize>(
    p: *const f32,
    v: *const f32,
    keys: usize,
    lines: Lines,
) -> [[__m512; 3]; 8] {
    let mut acc = [[_mm512_setzero_ps(); 3]; 8];
    // SAFETY: the caller's promise; the block only reads, and only scalars and vectors.
    unsafe {
        asm!(
            ".macro row at, x, y, z",
            "vbroadcastss zmm27, dword ptr [{p} + \\at]",
            "vfmadd231ps \\x, zmm27, zmm24",
            ".if {vecs} > 1",
            "vfmadd231ps \\y, zmm27, zmm25",
            ".endif",
            ".if {vecs} > 2",
            "vfmadd231ps \\z, zmm27, zmm26",
            ".endif",
            ".endm",
            ".macro step u",
            "vmovups zmm24, [{v} + \\u*{vecs}*64]",
            ".if {vecs} > 1",
            "vmovups zmm25, [{v} + \\u*{vecs}*64 + 64]",
            ".endif",
            ".if {vecs} > 2",
            "vmovups zmm26, [{v} + \\u*{vecs}*64 + 128]",
            ".endif",
            "row \\u*256, zmm0, zmm1, zmm2",
            "row \\u*256+4, zmm3, zmm4, zmm5",
            "row \\u*256+8, zmm6, zmm7, zmm8",
            "row \\u*256+12, zmm9, zmm10, zmm11",
            "row \\u*256+16, zmm12, zmm13, zmm14",
            "row \\u*256+20, zmm15, zmm16, zmm17",
            "row \\u*256+24, zmm18, zmm19, zmm20",
            "row \\u*256+28, zmm21, zmm22, zmm23",
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
            "add {p}, 1024",
            "add {v}, {vecs}*256",
            "sub {n}, 4",
            "jae 2b",
            "3:",
            "add {n}, 4",
            "jz 5f",
            "4:",
            "step 0",
            "add {p}, 256",
            "add {v}, {vecs}*64",
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
