//! Rows in f64, as attention is defined: for what f32 does not hold.
//!
//! The other paths keep scores and sums in f32, where large inputs, scales or values overflow although the truth is an
//! ordinary number. Such a row comes out infinite or NaN there, and is computed again here. So are all rows of a problem
//! whose scale or softcap leaves f32 no room. This is slow and rare.
#![allow(unsafe_code)] // Raw tensors; the contract and the plan bound every index.

use std::ops::Range;

use super::{
    job::{Job, pieces_of, rows_of},
    plan::Task,
    rows,
    simd::Simd,
    visible::Visible,
};
use crate::{Descales, Problem, contract::Call, layouts::View};

/// Keys that are read at a time.
const BLOCK: usize = 64;

/// All rows of a task that is not split.
///
/// # Safety
/// Requires a CPU with `S`; the call must have passed the contract and the task be of its plan.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(job: &Job<'_>, task: &Task) {
    for row in task.rows.clone() {
        // SAFETY: the caller's promise.
        unsafe { S::write_row(job, task.batch, task.head, row) };
    }
}

/// Whether none of a row's outputs is infinite or NaN, as they were written.
///
/// # Safety
/// Requires a CPU with `S` and a row of the plan.
#[inline(always)]
pub(super) unsafe fn is_finite<S: Simd>(job: &Job<'_>, batch: usize, head_kv: usize, row: usize) -> bool {
    let (h, s) = job.head_and_query(head_kv, row);
    let mut written = vec![0.0; job.call.problem.head_dim_v];
    // SAFETY: the caller's promise.
    unsafe {
        rows_of(job.call.o(), batch, h, s, 1).widen::<S>(written.as_mut_ptr());
        rows::are_finite(written.as_ptr(), written.len())
    }
}

/// Computes one row and writes it and its lse; without keys, zeros and −∞.
///
/// # Safety
/// As of [`is_finite`].
#[inline(always)]
pub(super) unsafe fn write_row<S: Simd>(job: &Job<'_>, batch: usize, head_kv: usize, row: usize) {
    let (h, s) = job.head_and_query(head_kv, row);
    let call = job.call;
    let mut o = vec![0.0; call.problem.head_dim_v];
    // SAFETY: the caller's promise.
    unsafe {
        let lse = attend::<S>(call, batch, head_kv, [h, s], &mut o);
        let o: Vec<f32> = o.into_iter().map(|x| x as f32).collect();
        rows::narrow::<S>(call.o().dtype, o.as_ptr(), call.o().row_at(batch, h, s), o.len());
        if let Some(to) = call.lse() {
            to.row_at(batch, h, s).cast::<f32>().write(lse as f32);
        }
    }
}

/// Adds the outputs of one query, by head and place, to `o`, which are zeros, and returns its lse.
#[inline(always)]
unsafe fn attend<S: Simd>(
    call: &Call<'_>,
    batch: usize,
    head_kv: usize,
    [h, s]: [usize; 2],
    o: &mut [f64],
) -> f64 {
    let Problem { head_dim, head_dim_v, scale, softcap, .. } = call.problem;
    let [of_q, of_k, of_v] = Descales::among(&call.tensors).at(batch, head_kv, 0).map(f64::from);
    let scale = f64::from(scale) * of_q * of_k;
    let visible = Visible::new(call, batch).keys(s);
    if visible.is_empty() {
        return f64::NEG_INFINITY;
    }
    let read = |view: View<'_>, head: usize, rows: Range<usize>| {
        let mut wide = vec![0.0; rows.len() * view.layout.shape[3]];
        for (at, rows) in pieces_of(view, batch, head, rows) {
            // SAFETY: the caller's promise; there is room for all of the rows.
            unsafe { rows.widen::<S>(wide.as_mut_ptr().add(at * rows.len)) };
        }
        wide
    };
    let query: Vec<f64> = read(call.q(), h, s..s + 1).into_iter().map(f64::from).collect();
    let blocks = || visible.clone().step_by(BLOCK).map(|start| start..(start + BLOCK).min(visible.end));
    let score = |key: &[f32]| {
        let score = dot(&query, key) * scale;
        softcap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
    };

    let mut max = f64::NEG_INFINITY;
    for keys in blocks() {
        for key in read(call.k(), head_kv, keys).chunks_exact(head_dim) {
            let score = score(key);
            // ∞ − ∞ is NaN, and so is what is divided by a sum with it.
            if score.is_nan() || score == f64::INFINITY {
                o.fill(f64::NAN);
                return f64::NAN;
            }
            max = max.max(score);
        }
    }
    if max == f64::NEG_INFINITY {
        // No key has any weight: 0 / 0, and the logarithm of 0.
        o.fill(f64::NAN);
        return max;
    }
    let mut sum = 0.0;
    for keys in blocks() {
        let (k, v) = (read(call.k(), head_kv, keys.clone()), read(call.v(), head_kv, keys));
        for (key, value) in k.chunks_exact(head_dim).zip(v.chunks_exact(head_dim_v)) {
            let weight = (score(key) - max).exp();
            sum += weight;
            for (o, &x) in o.iter_mut().zip(value) {
                *o += weight * f64::from(x);
            }
        }
    }
    for o in o {
        *o *= of_v / sum;
    }
    max + sum.ln()
}

/// Σ xᵢ·yᵢ, in lanes for speed.
#[inline(always)]
pub(super) fn dot(x: &[f64], y: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    let (xs, ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    for ((sum, &x), &y) in sums.iter_mut().zip(xs.remainder()).zip(ys.remainder()) {
        *sum = x * f64::from(y);
    }
    for (x, y) in xs.zip(ys) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * f64::from(y[lane]);
        }
    }
    sums.iter().sum()
}
