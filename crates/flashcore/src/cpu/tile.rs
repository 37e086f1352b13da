//! The micro-kernel: a block of scalars times rows of vectors, accumulated in registers.
//!
//! Queries lie in the lanes of the vectors in both products, so K and V are only ever broadcast: K needs neither
//! transposition nor padding, V only to be cut into panels.
#![allow(unsafe_code)] // Raw pointers into panels whose sizes the caller knows.

use super::simd::Simd;

/// The scalars of a product.
#[derive(Clone, Copy)]
pub(super) enum Scalars {
    /// Rows of K: element (row, k) is at `at + row · stride + k`.
    Rows { at: *const f32, stride: usize },
    /// A panel of V: element (row, k) is at `at + k · LANES + row`.
    Panel { at: *const f32 },
}

impl Scalars {
    /// The same scalars without the first `k`.
    ///
    /// # Safety
    /// `k` must be in bounds.
    #[inline(always)]
    pub(super) unsafe fn skip<S: Simd>(self, k: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Scalars::Rows { at, stride } => Scalars::Rows { at: at.add(k), stride },
                Scalars::Panel { at } => Scalars::Panel { at: at.add(k * S::LANES) },
            }
        }
    }
}

/// The vectors of a product: vector v of step k is at `at + (k · width + v) · LANES`.
#[derive(Clone, Copy)]
pub(super) struct Vectors {
    pub at: *const f32,
    pub width: usize,
}

impl Vectors {
    /// The same vectors without the first `k` steps.
    ///
    /// # Safety
    /// `k` must be in bounds.
    #[inline(always)]
    pub(super) unsafe fn skip<S: Simd>(self, k: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self { at: self.at.add(k * self.width * S::LANES), ..self } }
    }
}

/// `acc[row][v] += Σ_k scalar(row, k) · vector(k, v)` for k below `len`, as the compiler arranges it.
///
/// # Safety
/// Requires a CPU with `S`; the scalars and vectors must be readable.
#[inline(always)]
pub(super) unsafe fn accumulate<S: Simd, const R: usize, const V: usize>(
    mut acc: [[S::V; V]; R],
    a: Scalars,
    b: Vectors,
    len: usize,
) -> [[S::V; V]; R] {
    for k in 0..len {
        // SAFETY: the caller's promise.
        unsafe {
            let mut x = [S::splat(0.0); V];
            for (v, x) in x.iter_mut().enumerate() {
                *x = S::load(b.at.add((k * b.width + v) * S::LANES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let scalar = S::splat(match a {
                    Scalars::Rows { at, stride } => *at.add(r * stride + k),
                    Scalars::Panel { at } => *at.add(k * S::LANES + r),
                });
                for (acc, &x) in acc.iter_mut().zip(&x) {
                    *acc = S::fma(scalar, x, *acc);
                }
            }
        }
    }
    acc
}
