//! The micro-kernel: a block of scalars times rows of vectors, accumulated in registers.
//!
//! Queries lie in the lanes of the vectors in both products, so Kᵀ and V are only ever broadcast: they need no
//! transposition, no padding and no alignment.
#![allow(unsafe_code)] // Raw pointers into panels whose sizes the caller knows.

use super::simd::Simd;

/// The scalars of a product: element (row, k) is at `at + row · row_step + k · k_step`.
#[derive(Clone, Copy)]
pub(super) struct Scalars {
    pub at: *const f32,
    pub row_step: usize,
    pub k_step: usize,
}

/// `acc[row][v] += Σ_k scalar(row, k) · b[k · V · LANES + v · LANES..]` for k below `len`.
///
/// # Safety
/// Requires a CPU with `S`; the scalars and the `len` rows of `b` must be readable.
#[inline(always)]
pub(super) unsafe fn accumulate<S: Simd, const R: usize, const V: usize>(
    mut acc: [[S::V; V]; R],
    a: Scalars,
    b: *const f32,
    len: usize,
) -> [[S::V; V]; R] {
    for k in 0..len {
        // SAFETY: the caller's promise.
        unsafe {
            let row = b.add(k * V * S::LANES);
            let mut x = [S::splat(0.0); V];
            for (v, x) in x.iter_mut().enumerate() {
                *x = S::load(row.add(v * S::LANES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let scalar = S::splat(*a.at.add(r * a.row_step + k * a.k_step));
                for (acc, &x) in acc.iter_mut().zip(&x) {
                    *acc = S::fma(scalar, x, *acc);
                }
            }
        }
    }
    acc
}
