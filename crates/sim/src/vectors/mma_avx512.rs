//! The tensor cores' arithmetic with AVX-512: the same sums in the same order, a register of sixteen lanes at a time.
//!
//! Fragments lie in memory as 8x8 matrices of 16-bit elements, so sixteen consecutive elements are two rows of
//! eight. Widened, A goes to the lanes by permutations and B by 4x4 transpositions.

use std::arch::x86_64::*;

use flashcore_ptx::MatrixTy;

use crate::machine::regs::{Aligned, Regs, Row};
use crate::numerics::CANONICAL_NAN;
use crate::vectors::mma::{self, ATile, BTile, MmaInst, Tiles, quad};
use crate::vectors::short::{self, LOWEST, NONE, ShortSum};

#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn load(from: &[f32; 16]) -> __m512 {
    // SAFETY: the reference is to the sixteen floats that are read; no alignment is required.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn store(to: &mut [f32; 16], value: __m512) {
    // SAFETY: the reference is to the sixteen floats that are written; no alignment is required.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
}

/// Sixteen words of memory as a vector.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
pub fn load_words(from: &[u32; 16]) -> __m512i {
    // SAFETY: the reference is to the sixteen words that are read; no alignment is required.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

/// A vector as sixteen words of memory.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
pub fn store_words(to: &mut [u32; 16], value: __m512i) {
    // SAFETY: the reference is to the sixteen words that are written; no alignment is required.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
}

/// Four floats, four times.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn repeat(quad: &[f32; 4]) -> __m512 {
    // SAFETY: the reference is to the four floats that are read; no alignment is required.
    _mm512_broadcast_f32x4(unsafe { _mm_loadu_ps(quad.as_ptr()) })
}

/// Sixteen elements of 16 bits, widened.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn widen(ty: MatrixTy, from: &[u32; 8]) -> __m512 {
    // SAFETY: the reference is to the eight words that are read; no alignment is required.
    let halves = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
    if ty == MatrixTy::F16 {
        _mm512_cvtph_ps(halves)
    } else {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
    }
}

/// The index of element `k` of each of four rows of eight, four times each.
const EACH_FOUR_TIMES: [[u32; 16]; 8] = {
    let mut index = [[0; 16]; 8];
    let mut k = 0;
    while k < 8 {
        let mut lane = 0;
        while lane < 16 {
            index[k][lane] = (8 * (lane / 4) + k) as u32;
            lane += 1;
        }
        k += 1;
    }
    index
};

/// Widens the A fragment of a warp.
#[target_feature(enable = "avx512f")]
pub fn read_a(ty: MatrixTy, regs: &[&Row], tile: &mut ATile) {
    if ty.bits() != 16 {
        return mma::read_a(ty, regs, tile);
    }
    for (r, row) in regs.iter().enumerate() {
        for (half, rows) in row.as_chunks::<16>().0.iter().enumerate() {
            let (first, second) = (widen(ty, &rows.as_chunks().0[0]), widen(ty, &rows.as_chunks().0[1]));
            for (k, index) in EACH_FOUR_TIMES.iter().enumerate() {
                let values = _mm512_permutex2var_ps(first, load_words(index), second);
                let lanes = tile[8 * (r / 2) + k][r % 2].as_chunks_mut::<16>().0;
                store(&mut lanes[half], values);
            }
        }
    }
}

/// Widens the fragments of a product, A only where it is not the one that was widened last.
#[target_feature(enable = "avx512f")]
pub fn widen_both(a_ty: MatrixTy, a: &[&Row], b_ty: MatrixTy, b: &[&Row], tiles: &mut Tiles) {
    let wide = &mut tiles.a[0];
    if !wide.is_of(a_ty, a) {
        read_a(a_ty, a, &mut wide.tile);
    }
    read_b(b_ty, b, &mut tiles.b[0]);
}

/// Computes products one after the other, or two at once where they have one A.
#[target_feature(enable = "avx512f")]
pub fn multiply_all(regs: &mut Regs, products: &[MmaInst], tiles: &mut Tiles) {
    let mut left = products;
    while let [inst, after @ ..] = left {
        let Tiles { a, b, .. } = &mut *tiles;
        let a = &mut a[inst.company.slot()];
        let row = |row: u32| -> &Row { &regs.r32[row as usize] };
        let rows = [row(inst.a[0]), row(inst.a[1]), row(inst.a[2]), row(inst.a[3])];
        if !a.is_of(inst.a_ty, &rows) {
            read_a(inst.a_ty, &rows, &mut a.tile);
        }
        let count = if inst.company.joined && !after.is_empty() { 2 } else { 1 };
        let now = &left[..count];
        if !inst.company.same_b {
            for (product, b) in now.iter().zip(b.iter_mut()) {
                read_b(product.b_ty, &[row(product.b[0]), row(product.b[1])], b);
            }
        }
        if let [first, second] = now {
            let (from, to) = ([first.c, second.c], [first.acc, second.acc]);
            sum_two::<16>(&a.tile, [&b[0], &b[1]], &mut regs.r32, from, to);
        } else {
            inst.begin(regs);
            if let Ok(acc) = regs.r32.get_disjoint_mut(inst.acc.map(|row| row as usize)) {
                multiply_as::<16>(&a.tile, &b[0], acc.map(|row| &mut **row));
            }
        }
        for product in now {
            for row in product.acc {
                regs.init32[row as usize] = u32::MAX;
            }
        }
        left = &left[count..];
    }
}

/// Computes two products of one A at once, each from four rows into four. What one writes, the other does not read.
#[target_feature(enable = "avx512f")]
pub fn multiply_two(
    depth: usize,
    a: &ATile,
    b: [&BTile; 2],
    rows: &mut [Aligned<Row>],
    from: [[u32; 4]; 2],
    to: [[u32; 4]; 2],
) {
    match depth {
        8 => sum_two::<8>(a, b, rows, from, to),
        16 => sum_two::<16>(a, b, rows, from, to),
        _ => sum_two::<32>(a, b, rows, from, to),
    }
}

/// Sixteen sums are in flight at a time: as many as keep both multipliers busy, and each value of A is used four times.
#[inline]
#[target_feature(enable = "avx512f")]
fn sum_two<const DEPTH: usize>(
    a: &ATile,
    b: [&BTile; 2],
    rows: &mut [Aligned<Row>],
    from: [[u32; 4]; 2],
    to: [[u32; 4]; 2],
) {
    // No closures and no references to the sums, which are compiled for other processors or put them into memory.
    let mut sums = [_mm512_setzero_ps(); 16];
    for i in 0..8 {
        let row = rows[from[i / 4][i % 4] as usize].as_chunks::<16>().0;
        sums[2 * i] = _mm512_castsi512_ps(load_words(&row[0]));
        sums[2 * i + 1] = _mm512_castsi512_ps(load_words(&row[1]));
    }
    for (k, x) in a[..DEPTH].iter().enumerate() {
        let ((line, even), (_, odd)) = (quad(k, 0), quad(k, 1));
        let (first, second) = (b[0][line].as_chunks().0, b[1][line].as_chunks().0);
        let y = [
            repeat(&first[even / 4]),
            repeat(&first[odd / 4]),
            repeat(&second[even / 4]),
            repeat(&second[odd / 4]),
        ];
        for r in 0..2 {
            let x = x[r].as_chunks::<16>().0;
            for half in 0..2 {
                let x = load(&x[half]);
                for product in 0..2 {
                    let sum = 8 * product + 4 * r + half;
                    sums[sum] = _mm512_fmadd_ps(x, y[2 * product], sums[sum]);
                    sums[sum + 2] = _mm512_fmadd_ps(x, y[2 * product + 1], sums[sum + 2]);
                }
            }
        }
    }
    let mut nans = 0;
    for i in 0..8 {
        nans |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sums[2 * i], sums[2 * i + 1]);
    }
    if nans != 0 {
        for i in 0..16 {
            sums[i] = with_canonical_nans(sums[i]);
        }
    }
    for i in 0..8 {
        let row = rows[to[i / 4][i % 4] as usize].as_chunks_mut::<16>().0;
        store_words(&mut row[0], _mm512_castps_si512(sums[2 * i]));
        store_words(&mut row[1], _mm512_castps_si512(sums[2 * i + 1]));
    }
}

/// The same numbers, and the NaN that the hardware makes.
#[inline]
#[target_feature(enable = "avx512f")]
fn with_canonical_nans(x: __m512) -> __m512 {
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    let nan = _mm512_castsi512_ps(_mm512_set1_epi32(CANONICAL_NAN as i32));
    _mm512_mask_blend_ps(is_nan, x, nan)
}

/// Widens the B fragment of a warp.
#[target_feature(enable = "avx512f")]
pub fn read_b(ty: MatrixTy, regs: &[&Row], tile: &mut BTile) {
    if ty.bits() != 16 {
        return mma::read_b(ty, regs, tile);
    }
    for (row, lines) in regs.iter().zip(tile.as_chunks_mut::<4>().0) {
        // Each has two columns with eight k: an even one and the odd one after it.
        let pairs = row.as_chunks().0;
        let (a, b) = (widen(ty, &pairs[0]), widen(ty, &pairs[1]));
        let (c, d) = (widen(ty, &pairs[2]), widen(ty, &pairs[3]));
        let (ab_low, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        store(&mut lines[0], _mm512_shuffle_ps::<0b01_00_01_00>(ab_low, cd_low));
        store(&mut lines[1], _mm512_shuffle_ps::<0b11_10_11_10>(ab_low, cd_low));
        store(&mut lines[2], _mm512_shuffle_ps::<0b01_00_01_00>(ab_high, cd_high));
        store(&mut lines[3], _mm512_shuffle_ps::<0b11_10_11_10>(ab_high, cd_high));
    }
}

/// Multiplies sixteen rows by eight columns into four accumulator registers of f32.
#[target_feature(enable = "avx512f")]
pub fn multiply(depth: usize, a: &ATile, b: &BTile, acc: [&mut Row; 4]) {
    match depth {
        8 => multiply_as::<8>(a, b, acc),
        16 => multiply_as::<16>(a, b, acc),
        _ => multiply_as::<32>(a, b, acc),
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn multiply_as<const DEPTH: usize>(a: &ATile, b: &BTile, acc: [&mut Row; 4]) {
    let mut sums = [[_mm512_setzero_ps(); 2]; 4];
    for (sum, acc) in sums.iter_mut().zip(&acc) {
        for (sum, acc) in sum.iter_mut().zip(acc.as_chunks::<16>().0) {
            *sum = _mm512_castsi512_ps(load_words(acc));
        }
    }
    for (k, rows) in a[..DEPTH].iter().enumerate() {
        let ((line, even), (_, odd)) = (quad(k, 0), quad(k, 1));
        let line = b[line].as_chunks().0;
        let (even, odd) = (repeat(&line[even / 4]), repeat(&line[odd / 4]));
        for (r, rows) in rows.iter().enumerate() {
            for (half, x) in rows.as_chunks::<16>().0.iter().enumerate() {
                let x = load(x);
                sums[2 * r][half] = _mm512_fmadd_ps(x, even, sums[2 * r][half]);
                sums[2 * r + 1][half] = _mm512_fmadd_ps(x, odd, sums[2 * r + 1][half]);
            }
        }
    }
    for (sum, acc) in sums.iter().zip(acc) {
        for (&sum, acc) in sum.iter().zip(acc.as_chunks_mut::<16>().0) {
            store_words(acc, _mm512_castps_si512(with_canonical_nans(sum)));
        }
    }
}

/// The exponents of operands, as [`short::multiply`] has them.
#[inline]
#[target_feature(enable = "avx512f")]
fn exponents(x: __m512, lowest: __m512) -> __m512 {
    let field = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7F80_0000));
    let power = _mm512_max_ps(_mm512_castsi512_ps(field), lowest);
    let zero = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(x, _mm512_setzero_ps());
    _mm512_mask_blend_ps(zero, power, _mm512_set1_ps(NONE))
}

/// Multiplies sixteen rows by eight columns of fp8 into four accumulator registers, in few bits.
#[target_feature(enable = "avx512f")]
pub fn multiply_short(how: &ShortSum, a: &ATile, b: &BTile, mut acc: [&mut Row; 4]) {
    const TO_ZERO: i32 = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    let before: [Row; 4] = [*acc[0], *acc[1], *acc[2], *acc[3]];
    let [a_lowest, b_lowest] = [_mm512_set1_ps(how.lowest[0]), _mm512_set1_ps(how.lowest[1])];
    let mut b_exponents: BTile = [[0.0; 16]; 16];
    for (exponent, line) in b_exponents.iter_mut().zip(b) {
        store(exponent, exponents(load(line), b_lowest));
    }
    let (steps, lowest) = (_mm512_set1_ps(how.steps), _mm512_set1_ps(LOWEST));
    let keep = _mm512_set1_epi32(how.keep.cast_signed());
    for first in (0..32).step_by(how.block) {
        for (r, half) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let even = _mm512_castsi512_ps(load_words(&acc[2 * r].as_chunks().0[half]));
            let odd = _mm512_castsi512_ps(load_words(&acc[2 * r + 1].as_chunks().0[half]));
            let mut top_even = _mm512_max_ps(exponents(even, lowest), lowest);
            let mut top_odd = _mm512_max_ps(exponents(odd, lowest), lowest);
            for k in first..first + how.block {
                let ((line, even), (_, odd)) = (quad(k, 0), quad(k, 1));
                let line = b_exponents[line].as_chunks().0;
                let x = exponents(load(&a[k][r].as_chunks().0[half]), a_lowest);
                top_even = _mm512_max_ps(top_even, _mm512_mul_ps(x, repeat(&line[even / 4])));
                top_odd = _mm512_max_ps(top_odd, _mm512_mul_ps(x, repeat(&line[odd / 4])));
            }
            let infinite = _mm512_set1_ps(f32::INFINITY);
            if _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(_mm512_max_ps(top_even, top_odd), infinite) != 0 {
                acc.iter_mut().zip(before).for_each(|(acc, before)| **acc = before);
                return short::multiply(how, a, b, acc);
            }
            let (scale_even, scale_odd) = (_mm512_div_ps(steps, top_even), _mm512_div_ps(steps, top_odd));
            let mut even = _mm512_roundscale_ps::<TO_ZERO>(_mm512_mul_ps(even, scale_even));
            let mut odd = _mm512_roundscale_ps::<TO_ZERO>(_mm512_mul_ps(odd, scale_odd));
            for k in first..first + how.block {
                let ((line, e), (_, o)) = (quad(k, 0), quad(k, 1));
                let line = b[line].as_chunks().0;
                let x = load(&a[k][r].as_chunks().0[half]);
                let product = _mm512_mul_ps(_mm512_mul_ps(x, repeat(&line[e / 4])), scale_even);
                even = _mm512_add_ps(even, _mm512_roundscale_ps::<TO_ZERO>(product));
                let product = _mm512_mul_ps(_mm512_mul_ps(x, repeat(&line[o / 4])), scale_odd);
                odd = _mm512_add_ps(odd, _mm512_roundscale_ps::<TO_ZERO>(product));
            }
            for (row, sum, top) in [(2 * r, even, top_even), (2 * r + 1, odd, top_odd)] {
                let sum = _mm512_castps_si512(_mm512_mul_ps(sum, _mm512_div_ps(top, steps)));
                store_words(&mut acc[row].as_chunks_mut().0[half], _mm512_and_si512(sum, keep));
            }
        }
    }
}
