//! Decode: few rows against many keys, which is a matter of reading K and V once, as they lie.
//!
//! Dot products run along the head dim and outputs along its columns, straight from the tensors' own type; while
//! one block of K is multiplied its V is asked for, and then the next block's K, a few lines at a time, so that
//! memory never waits: a core has only so many requests in flight, and more at once than these hold up its sums.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use std::ops::Range;

use super::{
    finish::{Stats, finish_row},
    job::{Job, Workspace, pieces_of, rows_of},
    math::{self, Exp2Below},
    panel::MAX_LANES,
    plan::Task,
    rows::{Vectorised, by_type},
    scoring::Scoring,
    scratch::Carve,
    simd::Simd,
    visible::Visible,
};
use crate::{DType, Problem, layouts::View};

/// Beyond this, rows are better put into lanes.
const MAX_ROWS: usize = 8;
/// Keys between two updates of the running maxima; a multiple of every vector's lanes.
const BLOCK: usize = 64;

/// Whether so many rows of a kv head are for this path: few, and head dims of whole vectors.
pub(super) fn suits<S: Simd>(problem: &Problem, rows: usize) -> bool {
    rows <= MAX_ROWS
        && problem.head_dim.is_multiple_of(S::LANES)
        && problem.head_dim_v.is_multiple_of(S::LANES)
}

/// Where the rows of a block of keys or of values are, which may lie in several pages.
#[derive(Clone, Copy)]
pub(super) struct Places<'a> {
    rows: &'a [*const u8],
    /// Elements of a row.
    len: usize,
    dtype: DType,
}

impl Places<'_> {
    /// Asks for some rows, as far as there are such.
    #[inline(always)]
    fn prefetch<S: Simd>(self, rows: Range<usize>) {
        let rows = rows.start.min(self.rows.len())..rows.end.min(self.rows.len());
        for row in &self.rows[rows] {
            for offset in (0..self.len * self.dtype.size()).step_by(64) {
                S::prefetch(row.wrapping_add(offset));
            }
        }
    }
}

/// Room for the places of a block.
#[derive(Clone, Copy)]
struct Found {
    rows: [*const u8; BLOCK],
    count: usize,
}

impl Found {
    /// Finds the rows of a sequence's keys.
    #[inline(always)]
    fn new(view: View<'_>, task: &Task, keys: Range<usize>) -> Self {
        let mut found = Self { rows: [std::ptr::null(); BLOCK], count: keys.len() };
        for (at, piece) in pieces_of(view, task.batch, task.head, keys) {
            let step = piece.stride * piece.dtype.size();
            for (i, row) in found.rows[at..at + piece.count].iter_mut().enumerate() {
                *row = piece.at.wrapping_add(i * step);
            }
        }
        found
    }

    #[inline(always)]
    fn places(&self, view: View<'_>) -> Places<'_> {
        Places { rows: &self.rows[..self.count], len: view.layout.shape[3], dtype: view.dtype }
    }
}

/// A row's running state.
#[derive(Clone)]
struct Row {
    keys: Range<usize>,
    max: f32,
    sum: f32,
    /// What the outputs so far are to be multiplied with.
    rescale: f32,
}

/// Runs a task.
///
/// # Safety
/// Requires a CPU with `S`; the call must have passed the contract and the task be of its plan.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(job: &Job<'_>, task: &Task, workspace: &mut Workspace) {
    // SAFETY: the caller's promise.
    unsafe { by_type!(job.call.k().dtype, run_typed::<S, _>(job, task, workspace)) }
}

#[inline(always)]
unsafe fn run_typed<S: Simd, E: Vectorised>(job: &Job<'_>, task: &Task, workspace: &mut Workspace) {
    let Problem { head_dim, head_dim_v, .. } = job.call.problem;
    let count = task.rows.len();
    let scoring = job.scoring(task.batch, task.head);
    let mut carve = Carve::new();
    let q = carve.part(count * head_dim);
    let o = carve.part(count * head_dim_v);
    let p = carve.part(count * BLOCK);
    let base = workspace.floats.reserve(carve.total());
    let mut rows = [const { Row { keys: 0..0, max: f32::NEG_INFINITY, sum: 0.0, rescale: 1.0 } }; MAX_ROWS];
    let rows = &mut rows[..count];
    // SAFETY: all parts lie inside the reserved scratch, and keys inside the tensors.
    unsafe {
        let (q, o, p) = (base.add(q), base.add(o), base.add(p));
        let visible = Visible::new(job.call, task.batch);
        for (i, row) in rows.iter_mut().enumerate() {
            let (h, s) = job.head_and_query(task.head, task.rows.start + i);
            rows_of(job.call.q(), task.batch, h, s, 1).widen::<S>(q.add(i * head_dim));
            row.keys = visible.keys(s);
        }
        std::ptr::write_bytes(o, 0, count * head_dim_v);
        let (all_k, all_v) = (job.call.k(), job.call.v());
        let from = |start: usize| start.min(task.keys.end)..(start + BLOCK).min(task.keys.end);
        let mut found = Found::new(all_k, task, from(task.keys.start));
        for start in task.keys.clone().step_by(BLOCK) {
            let keys = from(start);
            let values = Found::new(all_v, task, keys.clone());
            let (k, v) = (found.places(all_k), values.places(all_v));
            let (mut ahead, mut i) = (Some(v), 0);
            while i + 4 <= count {
                S::dots::<E, 4>(k, ahead.take(), q.add(i * head_dim), p.add(i * BLOCK));
                i += 4;
            }
            while i < count {
                S::dots::<E, 1>(k, ahead.take(), q.add(i * head_dim), p.add(i * BLOCK));
                i += 1;
            }
            for (i, row) in rows.iter_mut().enumerate() {
                softmax::<S>(scoring, row, &keys, p.add(i * BLOCK));
            }
            found = Found::new(all_k, task, from(keys.end));
            let (mut ahead, mut i) = (Some(found.places(all_k)), 0);
            let together = rows.iter().all(|row| row.keys == rows[0].keys);
            // Rows that see the same keys share the reading of V.
            while together && i + 4 <= count {
                let rescale = std::array::from_fn(|g| rows[i + g].rescale);
                let (p, o) = (p.add(i * BLOCK), o.add(i * head_dim_v));
                S::outputs::<E, 4>(v, ahead.take(), rescale, p, o);
                i += 4;
            }
            // Others take their own only: 0 · ∞ of another's would spoil them.
            while i < count {
                let first = rows[i].keys.start.saturating_sub(keys.start).min(keys.len());
                let end = rows[i].keys.end.clamp(keys.start + first, keys.end) - keys.start;
                let seen = Places { rows: &v.rows[first..end], ..v };
                let (p, o) = (p.add(i * BLOCK + first), o.add(i * head_dim_v));
                S::outputs::<E, 1>(seen, ahead.take(), [rows[i].rescale], p, o);
                i += 1;
            }
        }
        for (i, row) in rows.iter().enumerate() {
            let o = o.add(i * head_dim_v);
            if task.part.is_none() {
                let factor = S::splat(job.descale(task.batch, task.head) / row.sum);
                for d in (0..head_dim_v).step_by(S::LANES) {
                    S::store(o.add(d), S::mul(S::load(o.add(d)), factor));
                }
            }
            let stats = Stats { max: row.max, sum: row.sum, sees_keys: !row.keys.is_empty() };
            finish_row::<S>(job, task, task.rows.start + i, o, stats);
        }
    }
}

/// The products of G queries with a block of keys, as many at once as a vector has lanes.
///
/// # Safety
/// Requires a CPU with `S`, readable keys, at least one, G queries of as many elements, and G rows of `BLOCK` at `p`.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, E: Vectorised, const G: usize>(
    k: Places<'_>,
    ahead: Option<Places<'_>>,
    q: *const f32,
    p: *mut f32,
) {
    let at_once = S::LANES / G;
    let count = k.rows.len();
    for first in (0..count).step_by(at_once) {
        // SAFETY: keys beyond the last are read as the last, and queries have `len` elements.
        unsafe {
            let mut acc = [S::splat(0.0); MAX_LANES];
            let rows: [*const E; MAX_LANES] =
                std::array::from_fn(|i| k.rows.get_unchecked((first + i).min(count - 1)).cast());
            for d in (0..k.len).step_by(S::LANES) {
                if let Some(ahead) = ahead {
                    let row = |d: usize| first + d * at_once / k.len;
                    ahead.prefetch::<S>(row(d)..row(d + S::LANES));
                }
                let mut queries = [S::splat(0.0); G];
                for (g, query) in queries.iter_mut().enumerate() {
                    *query = S::load(q.add(g * k.len + d));
                }
                for i in 0..at_once {
                    let key = E::load::<S>(rows[i].add(d));
                    for (g, &query) in queries.iter().enumerate() {
                        acc[g * at_once + i] = S::fma(query, key, acc[g * at_once + i]);
                    }
                }
            }
            S::transpose(&mut acc[..S::LANES]);
            let mut half = S::LANES / 2;
            while half > 0 {
                for i in 0..half {
                    acc[i] = S::add(acc[i], acc[i + half]);
                }
                half /= 2;
            }
            let mut products = [0.0; MAX_LANES];
            S::store(products.as_mut_ptr(), acc[0]);
            for g in 0..G {
                let to = p.add(g * BLOCK + first);
                std::ptr::copy_nonoverlapping(products.as_ptr().add(g * at_once), to, at_once);
            }
        }
    }
}

/// Turns a row's products into exponentials and moves its maximum and sum.
#[inline(always)]
unsafe fn softmax<S: Simd>(scoring: Scoring, row: &mut Row, keys: &Range<usize>, p: *mut f32) {
    let len = keys.len().next_multiple_of(S::LANES);
    let first = row.keys.start.saturating_sub(keys.start).min(len);
    let end = row.keys.end.saturating_sub(keys.start).min(keys.len());
    // SAFETY: a row of p has `BLOCK` elements, which is a multiple of the lanes.
    unsafe {
        if let Some(inner) = scoring.inner {
            for i in (0..len).step_by(S::LANES) {
                S::store(p.add(i), math::capped::<S>(inner, S::load(p.add(i))));
            }
        }
        for i in (0..first).chain(end.max(first)..len) {
            *p.add(i) = f32::NEG_INFINITY;
        }
        let mut tops = S::splat(f32::NEG_INFINITY);
        for i in (0..len).step_by(S::LANES) {
            tops = S::max(S::load(p.add(i)), tops);
        }
        let max = fold::<S>(tops, row.max, |a, b| if b > a { b } else { a });
        let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let exp = Exp2Below::<S>::new(scoring.scale * std::f32::consts::LOG2_E);
        row.rescale = fold::<S>(exp.of(S::splat(base - row.max)), 0.0, |_, b| b);
        row.max = max;
        let mut sums = S::splat(0.0);
        for i in (0..len).step_by(S::LANES) {
            let x = exp.of(S::sub(S::splat(base), S::load(p.add(i))));
            sums = S::add(sums, x);
            S::store(p.add(i), x);
        }
        row.sum = fold::<S>(sums, row.sum * row.rescale, |a, b| a + b);
    }
}

/// Folds the lanes of a vector, half onto half, and then onto `start`.
#[inline(always)]
unsafe fn fold<S: Simd>(x: S::V, start: f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; MAX_LANES];
    // SAFETY: no vector has more lanes.
    unsafe { S::store(lanes.as_mut_ptr(), x) };
    let mut half = S::LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = join(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    join(start, lanes[0])
}

/// O = O · rescale + P V for G rows and a block of keys.
///
/// # Safety
/// Requires a CPU with `S`, readable values of whole vectors, G rows of `BLOCK` at `p`, and G rows of outputs at `o`.
#[inline(always)]
pub(super) unsafe fn outputs<S: Simd, E: Vectorised, const G: usize>(
    v: Places<'_>,
    mut ahead: Option<Places<'_>>,
    rescale: [f32; G],
    p: *const f32,
    o: *mut f32,
) {
    let vectors = v.len / S::LANES;
    let mut vec = 0;
    // SAFETY: columns end at the last whole vector, which is the last of a row.
    unsafe {
        // As many columns as there are registers for; the fewer passes, the more evenly memory is asked.
        if 8 * G < S::ROWS * S::VECS {
            while vec + 8 <= vectors {
                output_columns::<S, E, G, 8>(v, ahead.take(), rescale, p, o, vec);
                vec += 8;
            }
        }
        if 4 * G < S::ROWS * S::VECS {
            while vec + 4 <= vectors {
                output_columns::<S, E, G, 4>(v, ahead.take(), rescale, p, o, vec);
                vec += 4;
            }
        } else {
            while vec + 2 <= vectors {
                output_columns::<S, E, G, 2>(v, ahead.take(), rescale, p, o, vec);
                vec += 2;
            }
        }
        while vec < vectors {
            output_columns::<S, E, G, 1>(v, ahead.take(), rescale, p, o, vec);
            vec += 1;
        }
    }
}

#[inline(always)]
unsafe fn output_columns<S: Simd, E: Vectorised, const G: usize, const C: usize>(
    v: Places<'_>,
    ahead: Option<Places<'_>>,
    rescale: [f32; G],
    p: *const f32,
    o: *mut f32,
    vec: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        // What was there before is added at the end: in one chain, the rounding of every term would be that of the whole sum.
        let mut acc = [[S::splat(0.0); C]; G];
        for (key, row) in v.rows.iter().enumerate() {
            if let Some(ahead) = ahead {
                ahead.prefetch::<S>(key..key + 1);
            }
            let row = row.cast::<E>().add(vec * S::LANES);
            let mut values = [S::splat(0.0); C];
            for (c, value) in values.iter_mut().enumerate() {
                *value = E::load::<S>(row.add(c * S::LANES));
            }
            for (g, acc) in acc.iter_mut().enumerate() {
                let weight = S::splat(*p.add(g * BLOCK + key));
                for (acc, &value) in acc.iter_mut().zip(&values) {
                    *acc = S::fma(weight, value, *acc);
                }
            }
        }
        for (g, acc) in acc.iter().enumerate() {
            for (c, &acc) in acc.iter().enumerate() {
                let at = o.add(g * v.len + (vec + c) * S::LANES);
                S::store(at, S::fma(S::load(at), S::splat(rescale[g]), acc));
            }
        }
    }
}
