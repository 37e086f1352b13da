//! The micro-kernels: scalars times rows of vectors, accumulated in registers.
//!
//! Queries lie in the lanes of the vectors in both products, so K and V are only ever broadcast: K needs neither
//! transposition nor padding, V only to be cut into panels.
#![allow(unsafe_code)] // Raw pointers into panels whose sizes the caller knows.

use std::ops::Range;

use super::{
    ahead::{Coming, LINE, Lines},
    panel::MAX_VECS,
    simd::Simd,
};

/// The scalars of a product: element k of row r is at `rows[r] + k · step`.
#[derive(Clone, Copy)]
pub(super) struct Scalars<const R: usize> {
    pub rows: [*const f32; R],
    pub step: usize,
}

impl<const R: usize> Scalars<R> {
    /// The same scalars without the first `k`.
    #[inline(always)]
    pub(super) fn skip(self, k: usize) -> Self {
        Self { rows: self.rows.map(|row| row.wrapping_add(k * self.step)), ..self }
    }
}

/// The vectors of a product: vector v of step k is at `at + (k · VECS + v) · LANES`.
#[derive(Clone, Copy)]
pub(super) struct Vectors {
    pub at: *const f32,
}

impl Vectors {
    /// The same vectors without the first `k` steps.
    #[inline(always)]
    pub(super) fn skip<S: Simd>(self, k: usize) -> Self {
        Self { at: self.at.wrapping_add(k * S::VECS * S::LANES) }
    }
}

/// `acc[r][v] += Σ_k scalar(r, k) · vector(k, v)` for k below `len` and v from `F`, as the compiler arranges it; asks for
/// `lines` in passing.
///
/// # Safety
/// Requires a CPU with `S`; the scalars and vectors must be readable.
#[inline(always)]
pub(super) unsafe fn accumulate<S: Simd, const R: usize, const V: usize, const F: usize>(
    mut acc: [[S::V; V]; R],
    a: Scalars<R>,
    b: Vectors,
    len: usize,
    lines: Lines,
) -> [[S::V; V]; R] {
    for k in 0..len {
        if k.is_multiple_of(Lines::EVERY) {
            let line = lines.at.wrapping_add(k / Lines::EVERY * lines.step);
            S::prefetch(line);
            S::prefetch(line.wrapping_add(LINE));
        }
        // SAFETY: the caller's promise.
        unsafe {
            let mut x = [S::splat(0.0); V];
            for (v, x) in x.iter_mut().enumerate().skip(F) {
                *x = S::load(b.at.add((k * S::VECS + v) * S::LANES));
            }
            for (acc, row) in acc.iter_mut().zip(a.rows) {
                let scalar = S::splat(*row.add(k * a.step));
                for (acc, &x) in acc.iter_mut().zip(&x).skip(F) {
                    *acc = S::fma(scalar, x, *acc);
                }
            }
        }
    }
    acc
}

/// `Σ_k scalar(r, k) · vector(k, v)` for k below `keys[v]`, which is not less than the one before it.
///
/// # Safety
/// As of [`accumulate`].
#[inline(always)]
pub(super) unsafe fn stair<S: Simd, const R: usize, const V: usize>(
    a: Scalars<R>,
    b: Vectors,
    keys: [usize; MAX_VECS],
    lines: Lines,
) -> [[S::V; V]; R] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut tile = S::accumulate::<R, V, 0>([[S::splat(0.0); V]; R], a, b, keys[0], lines);
        let none = Lines::none(b.at);
        if V > 1 && keys[1] > keys[0] {
            let (a, b) = (a.skip(keys[0]), b.skip::<S>(keys[0]));
            tile = S::accumulate::<R, V, 1>(tile, a, b, keys[1] - keys[0], none);
        }
        if V > 2 && keys[2] > keys[1] {
            let (a, b) = (a.skip(keys[1]), b.skip::<S>(keys[1]));
            tile = S::accumulate::<R, V, 2>(tile, a, b, keys[2] - keys[1], none);
        }
        tile
    }
}

/// Sᵀ = K Qᵀ of some keys and vectors of queries.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    /// The first key, and the step to the next.
    pub k: *const f32,
    pub stride: usize,
    pub q: Vectors,
    pub head_dim: usize,
    /// Where the first key's scores go, in rows of `VECS` vectors.
    pub s: *mut f32,
    /// The highest scores of each lane so far.
    pub tops: *mut f32,
}

/// Tiles of R keys and V vectors; `keys` are as many as whole tiles have.
///
/// # Safety
/// Requires a CPU with `S`; all of the tiles must be readable, or writable.
#[inline(always)]
pub(super) unsafe fn score<S: Simd, const R: usize, const V: usize>(
    scores: &Scores,
    keys: Range<usize>,
    coming: &mut Coming,
) {
    let &Scores { k, stride, q, head_dim, s, tops } = scores;
    for first in keys.step_by(R) {
        // SAFETY: the caller's promise.
        unsafe {
            let (k, s) = (k.add(first * stride), s.add(first * S::VECS * S::LANES));
            let mut rows = [k; R];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = k.add(r * stride);
            }
            let lines = coming.beside::<S>(head_dim, q.at);
            let zeros = [[S::splat(0.0); V]; R];
            let tile = S::accumulate::<R, V, 0>(zeros, Scalars { rows, step: 1 }, q, head_dim, lines);
            for v in 0..V {
                let mut top = S::load(tops.add(v * S::LANES));
                for (r, row) in tile.iter().enumerate() {
                    S::store(s.add((r * S::VECS + v) * S::LANES), row[v]);
                    top = S::max(row[v], top);
                }
                S::store(tops.add(v * S::LANES), top);
            }
        }
    }
}

/// Oᵀ = Oᵀ · rescale + Vᵀ Pᵀ of some keys and vectors of probabilities.
#[derive(Clone, Copy)]
pub(super) struct Outputs {
    /// The first key in the first panel of V, and the step to the next panel.
    pub v: *const f32,
    pub panel: usize,
    pub p: Vectors,
    /// How many keys each vector takes: none fewer than the one before it.
    pub keys: [usize; MAX_VECS],
    /// The first column's outputs, in rows of `VECS` vectors.
    pub o: *mut f32,
    /// What the outputs so far are to be multiplied with; without it they are taken for zeros.
    pub rescale: Option<*const f32>,
}

/// Tiles of R columns of V and V vectors; `columns` are as many as whole tiles have and begin at a multiple of R.
///
/// # Safety
/// Requires a CPU with `S`; all of the tiles must be readable, or writable.
#[inline(always)]
pub(super) unsafe fn output<S: Simd, const R: usize, const V: usize>(
    outputs: &Outputs,
    columns: Range<usize>,
    coming: &mut Coming,
) {
    debug_assert!(
        S::LANES.is_multiple_of(R) && columns.start.is_multiple_of(R),
        "a tile's columns lie in one panel"
    );
    let &Outputs { v: values, panel, p, keys, o, rescale } = outputs;
    for d in columns.step_by(R) {
        // SAFETY: the caller's promise.
        unsafe {
            let o = o.add(d * S::VECS * S::LANES);
            let mut rows = [values.add(d / S::LANES * panel + d % S::LANES); R];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = row.add(r);
            }
            let lines = coming.beside::<S>(keys[V - 1], p.at);
            // What was there before is added at the end: loads at the beginning would hold the sums up.
            let mut tile = S::stair::<R, V>(Scalars { rows, step: S::LANES }, p, keys, lines);
            if let Some(rescale) = rescale {
                for (r, row) in tile.iter_mut().enumerate() {
                    for (v, x) in row.iter_mut().enumerate() {
                        let factor = S::load(rescale.add(v * S::LANES));
                        *x = S::fma(S::load(o.add((r * S::VECS + v) * S::LANES)), factor, *x);
                    }
                }
            }
            for (r, row) in tile.iter().enumerate() {
                for (v, &x) in row.iter().enumerate() {
                    S::store(o.add((r * S::VECS + v) * S::LANES), x);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{available, panel::MAX_LANES, simd::dispatch};

    dispatch! { unsafe fn check(keys: [usize; MAX_VECS]) = check_on }

    #[inline(always)]
    unsafe fn check_on<S: Simd>(keys: [usize; MAX_VECS]) {
        // SAFETY: the caller's promise.
        unsafe {
            if S::ROWS >= 8 {
                check_tile::<S, 8, 1>(keys);
                check_tile::<S, 8, 2>(keys);
            }
            if S::ROWS >= 8 && S::VECS >= 3 {
                check_tile::<S, 8, 3>(keys);
            }
            if S::VECS >= 3 {
                check_tile::<S, 4, 3>(keys);
            }
            check_tile::<S, 4, 2>(keys);
            check_tile::<S, 4, 1>(keys);
            check_tile::<S, 1, 2>(keys);
        }
    }

    /// Small whole numbers, whose sums f32 holds exactly.
    fn numbers(len: usize, factor: usize) -> Vec<f32> {
        (0..len).map(|i| (i * factor % 11) as f32 - 5.0).collect()
    }

    #[inline(always)]
    unsafe fn check_tile<S: Simd, const R: usize, const V: usize>(keys: [usize; MAX_VECS]) {
        let (a, b) = (numbers(100 * S::LANES, 7), numbers(100 * S::VECS * S::LANES, 3));
        let rows = std::array::from_fn(|r| a[r..].as_ptr());
        // SAFETY: the caller's promise; there are numbers for 100 keys.
        let tile = unsafe {
            let scalars = Scalars { rows, step: S::LANES };
            S::stair::<R, V>(scalars, Vectors { at: b.as_ptr() }, keys, Lines::none(b.as_ptr()))
        };
        for (r, row) in tile.iter().enumerate() {
            for (v, &sums) in row.iter().enumerate() {
                let mut lanes = [0.0; MAX_LANES];
                // SAFETY: the caller's promise; no vector has more than `MAX_LANES` lanes.
                unsafe { S::store(lanes.as_mut_ptr(), sums) };
                for (lane, &sum) in lanes.iter().enumerate().take(S::LANES) {
                    let product = |k: usize| a[k * S::LANES + r] * b[(k * S::VECS + v) * S::LANES + lane];
                    assert_eq!(
                        sum,
                        (0..keys[v]).map(product).sum::<f32>(),
                        "{R}x{V}, {keys:?}: row {r}, vector {v}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_stair_sums_as_many_keys_as_each_vector_takes() {
        for keys in [[0; 3], [5; 3], [64; 3], [0, 3, 9], [4, 8, 13], [1, 2, 3], [30, 46, 62], [7, 7, 90]] {
            for isa in available() {
                // SAFETY: the instruction set is available.
                unsafe { check(isa, keys) };
            }
        }
    }
}
