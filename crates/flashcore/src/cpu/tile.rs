//! The micro-kernels: scalars times rows of vectors, accumulated in registers.
//!
//! Queries lie in the lanes of the vectors of scores, so that K is only ever broadcast, and columns of V in the lanes of the
//! vectors of outputs, so that probabilities are: neither K nor V needs to be transposed.
#![allow(unsafe_code)] // Raw pointers into panels whose sizes the caller knows.

use std::ops::Range;

use half::{bf16, f16};

use super::{
    ahead::{Coming, LINE, Lines},
    rows::Vectorised,
    simd::Simd,
};
use crate::DType;

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

/// The vectors of a product: vector v of step k is at `at + k · step + v · LANES`.
#[derive(Clone, Copy)]
pub(super) struct Vectors {
    pub at: *const f32,
    pub step: usize,
}

impl Vectors {
    /// The same vectors without the first `k` steps.
    #[inline(always)]
    pub(super) fn skip(self, k: usize) -> Self {
        Self { at: self.at.wrapping_add(k * self.step), ..self }
    }
}

/// `acc[r][v] += Σ_k scalar(r, k) · vector(k, v)` for k below `len`, as the compiler arranges it; asks for `lines` in passing.
///
/// # Safety
/// Requires a CPU with `S`; the scalars and vectors must be readable.
#[inline(always)]
pub(super) unsafe fn accumulate<S: Simd, const R: usize, const V: usize>(
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
            for (v, x) in x.iter_mut().enumerate() {
                *x = S::load(b.at.add(k * b.step + v * S::LANES));
            }
            for (acc, row) in acc.iter_mut().zip(a.rows) {
                let scalar = S::splat(*row.add(k * a.step));
                for (acc, &x) in acc.iter_mut().zip(&x) {
                    *acc = S::fma(scalar, x, *acc);
                }
            }
        }
    }
    acc
}

/// `Σ_k scalar(r, k) · vector(k, v)` for k below `keys`: R neighbouring scalars from `p`, `VECS` vectors further in every
/// step, times the V vectors from `v`, which lie one behind the other.
///
/// # Safety
/// As of [`accumulate`].
#[inline(always)]
pub(super) unsafe fn product<S: Simd, const R: usize, const V: usize>(
    p: *const f32,
    v: *const f32,
    keys: usize,
    lines: Lines,
) -> [[S::V; V]; R] {
    let mut rows = [p; R];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = p.wrapping_add(r);
    }
    let scalars = Scalars { rows, step: S::VECS * S::LANES };
    let vectors = Vectors { at: v, step: V * S::LANES };
    // SAFETY: the caller's promise.
    unsafe { accumulate::<S, R, V>([[S::splat(0.0); V]; R], scalars, vectors, keys, lines) }
}

/// Sᵀ = K Qᵀ of some keys and vectors of queries.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    /// The first key, and the step to the next.
    pub k: *const f32,
    pub stride: usize,
    /// The first vector of queries, in rows of `VECS` vectors.
    pub q: *const f32,
    /// How many elements of queries and keys are multiplied.
    pub len: usize,
    /// Where the first key's scores go, in rows of `VECS` vectors.
    pub s: *mut f32,
    /// Whether they are added to what is there: the products of other elements.
    pub onto: bool,
    /// The highest scores of each lane so far; absent while elements are left.
    pub tops: Option<*mut f32>,
}

/// How the elements of a head dim are cut for [`Scores`]. Long ones are summed in parts, because in one chain the rounding
/// of every term is that of the whole sum.
#[inline(always)]
pub(super) fn chains(head_dim: usize) -> impl Iterator<Item = Range<usize>> {
    /// What a part has at most.
    const PART: usize = 128;
    // Even ones, of which kernels take four elements at a time.
    let even = || head_dim.div_ceil(head_dim.div_ceil(PART)).next_multiple_of(4);
    let len = if head_dim <= PART { PART } else { even() };
    (0..head_dim).step_by(len).map(move |start| start..(start + len).min(head_dim))
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
    let &Scores { k, stride, q, len, s, onto, tops } = scores;
    let q = Vectors { at: q, step: S::VECS * S::LANES };
    for first in keys.step_by(R) {
        // SAFETY: the caller's promise.
        unsafe {
            let (k, s) = (k.add(first * stride), s.add(first * S::VECS * S::LANES));
            let mut rows = [k; R];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = k.add(r * stride);
            }
            let lines = coming.beside::<S>(len, q.at);
            let zeros = [[S::splat(0.0); V]; R];
            let mut tile = S::accumulate::<R, V>(zeros, Scalars { rows, step: 1 }, q, len, lines);
            let at = |r: usize, v: usize| s.add((r * S::VECS + v) * S::LANES);
            if onto {
                for (r, row) in tile.iter_mut().enumerate() {
                    for (v, x) in row.iter_mut().enumerate() {
                        *x = S::add(S::load(at(r, v)), *x);
                    }
                }
            }
            for v in 0..V {
                for (r, row) in tile.iter().enumerate() {
                    S::store(at(r, v), row[v]);
                }
                if let Some(tops) = tops {
                    let mut top = S::load(tops.add(v * S::LANES));
                    for row in &tile {
                        top = S::max(row[v], top);
                    }
                    S::store(tops.add(v * S::LANES), top);
                }
            }
        }
    }
}

/// O = O · rescale + P V of a panel's rows and neighbouring columns.
#[derive(Clone, Copy)]
pub(super) struct Outputs {
    /// The first row's probability of the first key; the next row's is beside it, the next key's `VECS` vectors further.
    pub p: *const f32,
    /// The columns of the first key's value; those of the next one are behind it.
    pub v: *const f32,
    pub keys: usize,
    /// The columns of the first row's outputs, and the step to the next row.
    pub o: *mut f32,
    pub step: usize,
    /// What each row's outputs so far are to be multiplied with; without it they are taken for zeros.
    pub rescale: Option<*const f32>,
    /// Where the outputs are done, where they go instead.
    pub done: Option<Done>,
    /// Whether some row does not see all of the keys: its probability of those is 0, but 0 · ∞ is not.
    pub masked: bool,
}

/// Where rows of outputs go that are done.
#[derive(Clone, Copy)]
pub(super) struct Done {
    /// The rows, and the column where the tiles begin.
    pub rows: *const *mut u8,
    pub column: usize,
    pub dtype: DType,
    /// What each row is to be multiplied with at last.
    pub factors: *const f32,
    /// Set where an output is infinite or NaN.
    pub wild: *mut bool,
}

/// Tiles of R rows and V vectors of columns; `rows` are as many as whole tiles have. Returns whether they could be: of a
/// tile whose products with keys that a row does not see may not be 0, and of those after it, nothing is changed.
///
/// # Safety
/// Requires a CPU with `S`; all of the tiles must be readable, or writable.
#[inline(always)]
pub(super) unsafe fn output<S: Simd, const R: usize, const V: usize>(
    outputs: &Outputs,
    rows: Range<usize>,
    coming: &mut Coming,
) -> bool {
    let &Outputs { p, v, keys, o, step, rescale, done, masked } = outputs;
    for first in rows.step_by(R) {
        // SAFETY: the caller's promise.
        unsafe {
            let (p, o) = (p.add(first), o.add(first * step));
            let lines = coming.beside::<S>(keys, p);
            // What was there before is added at the end: loads at the beginning would hold the sums up.
            let mut tile = S::product::<R, V>(p, v, keys, lines);
            if masked && !is_finite::<S, R, V>(&tile) {
                return false;
            }
            if let Some(rescale) = rescale {
                for (r, row) in tile.iter_mut().enumerate() {
                    let factor = S::splat(*rescale.add(first + r));
                    for (v, x) in row.iter_mut().enumerate() {
                        *x = S::fma(S::load(o.add(r * step + v * S::LANES)), factor, *x);
                    }
                }
            }
            match done.map(|done| (done, done.dtype)) {
                None => {
                    for (r, row) in tile.iter().enumerate() {
                        for (v, &x) in row.iter().enumerate() {
                            S::store(o.add(r * step + v * S::LANES), x);
                        }
                    }
                }
                Some((done, DType::F32)) => write::<S, f32, R, V>(&tile, done, first),
                Some((done, DType::F16)) => write::<S, f16, R, V>(&tile, done, first),
                Some((done, DType::BF16)) => write::<S, bf16, R, V>(&tile, done, first),
                // No output is of f8, says the contract.
                Some((_, DType::F8E4M3 | DType::I32)) => unreachable!("an output of f8 or of integers"),
            }
        }
    }
    true
}

/// Whether no value was infinite or NaN: one that is makes a product with every row so, be the probability 0 or not.
#[inline(always)]
unsafe fn is_finite<S: Simd, const R: usize, const V: usize>(tile: &[[S::V; V]; R]) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        // 0 · x is 0, or NaN where x is not finite.
        let mut sum = S::splat(0.0);
        for &x in &tile[0] {
            sum = S::fma(x, S::splat(0.0), sum);
        }
        S::are_numbers(sum)
    }
}

/// Writes a tile that is done, from row `first` on.
#[inline(always)]
unsafe fn write<S: Simd, E: Vectorised, const R: usize, const V: usize>(
    tile: &[[S::V; V]; R],
    done: Done,
    first: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        // 0 · x is 0, or NaN where x is not finite. Several sums, because one would wait for itself.
        let mut sums = [S::splat(0.0); V];
        for (r, row) in tile.iter().enumerate() {
            let factor = S::splat(*done.factors.add(first + r));
            let to = (*done.rows.add(first + r)).cast::<E>().add(done.column);
            for (v, &x) in row.iter().enumerate() {
                let x = S::mul(x, factor);
                E::store::<S>(to.add(v * S::LANES), x);
                sums[v] = S::fma(x, S::splat(0.0), sums[v]);
            }
        }
        let sum = sums.into_iter().reduce(|a, b| S::add(a, b));
        if sum.is_some_and(|sum| !S::are_numbers(sum)) {
            *done.wild = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{available, panel::MAX_LANES, simd::dispatch};

    dispatch! { unsafe fn check(keys: usize) = check_on }

    #[inline(always)]
    unsafe fn check_on<S: Simd>(keys: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if S::COLUMNS >= 4 {
                check_tile::<S, 6, 4>(keys);
                check_tile::<S, 4, 4>(keys);
            }
            if S::COLUMNS >= 3 {
                check_tile::<S, 8, 3>(keys);
                check_tile::<S, 4, 3>(keys);
            }
            check_tile::<S, 8, 2>(keys);
            check_tile::<S, 6, 2>(keys);
            check_tile::<S, 8, 1>(keys);
            check_tile::<S, 4, 2>(keys);
            check_tile::<S, 4, 1>(keys);
        }
    }

    /// Small whole numbers, whose sums f32 holds exactly.
    fn numbers(len: usize, factor: usize) -> Vec<f32> {
        (0..len).map(|i| (i * factor % 11) as f32 - 5.0).collect()
    }

    #[inline(always)]
    unsafe fn check_tile<S: Simd, const R: usize, const V: usize>(keys: usize) {
        let width = S::VECS * S::LANES;
        let (p, values) = (numbers(100 * width, 7), numbers(100 * V * S::LANES, 3));
        // SAFETY: the caller's promise; there are numbers for 100 keys.
        let tile = unsafe { S::product::<R, V>(p.as_ptr(), values.as_ptr(), keys, Lines::none(p.as_ptr())) };
        for (r, row) in tile.iter().enumerate() {
            for (v, &sums) in row.iter().enumerate() {
                let mut lanes = [0.0; MAX_LANES];
                // SAFETY: the caller's promise; no vector has more than `MAX_LANES` lanes.
                unsafe { S::store(lanes.as_mut_ptr(), sums) };
                for (lane, &sum) in lanes.iter().enumerate().take(S::LANES) {
                    let product = |k: usize| p[k * width + r] * values[(k * V + v) * S::LANES + lane];
                    assert_eq!(
                        sum,
                        (0..keys).map(product).sum::<f32>(),
                        "{R}x{V}, {keys} keys: row {r}, vector {v}"
                    );
                }
            }
        }
    }

    #[test]
    fn long_head_dims_are_summed_in_even_parts() {
        for head_dim in 1..=crate::MAX_HEAD_DIM {
            let parts: Vec<_> = chains(head_dim).collect();
            assert!(parts.iter().cloned().flatten().eq(0..head_dim), "{parts:?}");
            assert!(parts.iter().all(|part| part.len() <= 128 && part.start.is_multiple_of(4)), "{parts:?}");
        }
    }

    #[test]
    fn a_product_sums_as_many_keys_as_there_are() {
        for keys in [0, 1, 3, 4, 5, 8, 63, 64, 90] {
            for isa in available() {
                // SAFETY: the instruction set is available.
                unsafe { check(isa, keys) };
            }
        }
    }
}
