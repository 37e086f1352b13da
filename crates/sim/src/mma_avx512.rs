//! The tensor cores' arithmetic with AVX-512: the same sums in the same order, a register of sixteen lanes at a time.
//!
//! Fragments lie in memory as 8x8 matrices of 16-bit elements, so sixteen consecutive elements are two rows of
//! eight. Widened, A goes to the lanes by permutations and B by 4x4 transpositions.

use std::arch::x86_64::*;

use flashcore_ptx::MatrixTy;

use crate::mma::{self, ATile, BTile, MmaInst, Tiles, quad};
use crate::numerics::CANONICAL_NAN;
use crate::regs::{Regs, Row};

#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn load(from: &[f32; 16]) -> __m512 {
    // SAFETY: the reference is to the sixteen floats that are read; no alignment is asked for.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn store(to: &mut [f32; 16], value: __m512) {
    // SAFETY: the reference is to the sixteen floats that are written; no alignment is asked for.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
}

#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn load_words(from: &[u32; 16]) -> __m512i {
    // SAFETY: the reference is to the sixteen words that are read; no alignment is asked for.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn store_words(to: &mut [u32; 16], value: __m512i) {
    // SAFETY: the reference is to the sixteen words that are written; no alignment is asked for.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
}

/// Four floats, four times.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn repeat(quad: &[f32; 4]) -> __m512 {
    // SAFETY: the reference is to the four floats that are read; no alignment is asked for.
    _mm512_broadcast_f32x4(unsafe { _mm_loadu_ps(quad.as_ptr()) })
}

/// Sixteen elements of 16 bits, widened.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn widen(ty: MatrixTy, from: &[u32; 8]) -> __m512 {
    // SAFETY: the reference is to the eight words that are read; no alignment is asked for.
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
    if !tiles.has_a(a_ty, a) {
        read_a(a_ty, a, &mut tiles.a);
    }
    read_b(b_ty, b, &mut tiles.b);
}

/// Computes products one after the other.
#[target_feature(enable = "avx512f")]
pub fn multiply_all(regs: &mut Regs, products: &[MmaInst], tiles: &mut Tiles) {
    let mut before: Option<&MmaInst> = None;
    for inst in products {
        let rows = |of: [u32; 4]| of.map(|row| &*regs.r32[row as usize]);
        if !before.is_some_and(|before| inst.has_a_of(before)) && !tiles.has_a(inst.a_ty, &rows(inst.a)) {
            read_a(inst.a_ty, &rows(inst.a), &mut tiles.a);
        }
        read_b(inst.b_ty, &inst.b.map(|row| &*regs.r32[row as usize]), &mut tiles.b);
        inst.begin(regs);
        if let Ok(acc) = regs.r32.get_disjoint_mut(inst.acc.map(|row| row as usize)) {
            multiply_as::<16>(&tiles.a, &tiles.b, acc.map(|row| &mut **row));
        }
        before = Some(inst);
    }
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
    let nan = _mm512_set1_epi32(CANONICAL_NAN as i32);
    for (sum, acc) in sums.iter().zip(acc) {
        for (&sum, acc) in sum.iter().zip(acc.as_chunks_mut::<16>().0) {
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sum, sum);
            store_words(acc, _mm512_mask_blend_epi32(is_nan, _mm512_castps_si512(sum), nan));
        }
    }
}
