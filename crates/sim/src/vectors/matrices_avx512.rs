//! What matrix instructions must know of their addresses, and the loads of their matrices, with AVX-512: a matrix has eight rows
//! of 16 bytes, so its addresses are half a vector, and its elements are two vectors.

use std::arch::x86_64::*;

use crate::machine::RANK_SHIFT;
use crate::machine::regs::{Aligned, Row};
use crate::races::shared_shadow::{CELL, PAGE, PAGE_BYTES};
use crate::vectors::matrices::Survey;
use crate::vectors::mma_avx512::{load_words, store_words};

/// The row of 16 bytes at an address.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn load_row(bytes: &[u8], at: u32) -> __m128i {
    let row = &bytes[at as usize..][..CELL as usize];
    // SAFETY: the slice has the sixteen bytes that are read; no alignment is required.
    unsafe { _mm_loadu_si128(row.as_ptr().cast()) }
}

/// Four rows of 16 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_rows(bytes: &[u8], at: &[u32; 4]) -> __m512i {
    let rows = _mm512_castsi128_si512(load_row(bytes, at[0]));
    let rows = _mm512_inserti32x4::<1>(rows, load_row(bytes, at[1]));
    let rows = _mm512_inserti32x4::<2>(rows, load_row(bytes, at[2]));
    _mm512_inserti32x4::<3>(rows, load_row(bytes, at[3]))
}

/// For each element of half a matrix turned around, where it stands among the 64 of the matrix; two to a word.
const TURNED: [[u32; 16]; 2] = {
    let mut index = [[0; 16]; 2];
    let mut at = 0;
    while at < 64 {
        let from = at as u32 % 8 * 8 + at as u32 / 8;
        index[at / 32][at % 32 / 2] |= from << (16 * (at % 2));
        at += 1;
    }
    index
};

/// Loads 8x8 matrices of 16-bit elements, each into a row of registers, from rows that are all inside of memory.
#[target_feature(enable = "avx512f,avx512bw")]
pub fn load(bytes: &[u8], addresses: &Row, trans: bool, to: &[u32], regs: &mut [Aligned<Row>]) {
    for (rows, &register) in addresses.as_chunks::<8>().0.iter().zip(to) {
        let halves = rows.as_chunks().0;
        let (mut upper, mut lower) = (load_rows(bytes, &halves[0]), load_rows(bytes, &halves[1]));
        if trans {
            (upper, lower) = (
                _mm512_permutex2var_epi16(upper, load_words(&TURNED[0]), lower),
                _mm512_permutex2var_epi16(upper, load_words(&TURNED[1]), lower),
            );
        }
        let matrix = regs[register as usize].as_chunks_mut().0;
        store_words(&mut matrix[0], upper);
        store_words(&mut matrix[1], lower);
    }
}

/// The lane that the first row of a lane's matrix belongs to, in half a warp.
const FIRST: [u32; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8];

/// Surveys the addresses `base + offset` of rows in the block of rank `own`, whose shared memory ends at `end`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub fn survey(base: &Row, offset: u32, own: u32, end: u32, out: &mut Survey) {
    let word = |value: u32| _mm512_set1_epi32(value as i32);
    out.inside = 0;
    out.together = 0;
    for half in 0..2 {
        let (base, out_addresses) = (base.as_chunks().0, out.addresses.as_chunks_mut().0);
        let addresses = _mm512_add_epi32(load_words(&base[half]), word(offset));
        let ranks = _mm512_srli_epi32::<RANK_SHIFT>(addresses);
        let ranked = _mm512_cmpeq_epi32_mask(ranks, word(own));
        let addresses = _mm512_mask_sub_epi32(addresses, ranked, addresses, word(own << RANK_SHIFT));
        store_words(&mut out_addresses[half], addresses);
        if let Some(last) = end.checked_sub(CELL) {
            let aligned = _mm512_testn_epi32_mask(addresses, word(CELL - 1));
            let inside = _mm512_mask_cmple_epu32_mask(aligned, addresses, word(last));
            out.inside |= u32::from(inside) << (16 * half);
        }
        let pages = _mm512_srli_epi32::<{ PAGE_BYTES.trailing_zeros() }>(addresses);
        let together = _mm512_cmpeq_epi32_mask(pages, _mm512_permutexvar_epi32(load_words(&FIRST), pages));
        out.together |= u32::from(together) << (16 * half);
        let cells = _mm512_srli_epi32::<{ CELL.trailing_zeros() }>(addresses);
        let cells = _mm512_cvtepi32_epi8(_mm512_and_si512(cells, word(PAGE as u32 - 1)));
        out.rows[2 * half] = _mm_extract_epi64::<0>(cells) as u64;
        out.rows[2 * half + 1] = _mm_extract_epi64::<1>(cells) as u64;
        let bits = _mm512_sllv_epi64(_mm512_set1_epi64(1), _mm512_cvtepu8_epi64(cells));
        out.cells[2 * half] = _mm512_reduce_or_epi64(bits) as u64;
        let cells = _mm_unpackhi_epi64(cells, cells);
        let bits = _mm512_sllv_epi64(_mm512_set1_epi64(1), _mm512_cvtepu8_epi64(cells));
        out.cells[2 * half + 1] = _mm512_reduce_or_epi64(bits) as u64;
    }
}
