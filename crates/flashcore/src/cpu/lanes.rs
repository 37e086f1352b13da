//! Rows of queries into the lanes of vectors.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use super::{
    job::{Job, rows_of},
    panel::{MAX_LANES, Panel},
    plan::Task,
    rows::{Vectorised, by_type},
    simd::Simd,
};
use crate::{DType, layouts::View, tensor::Layout};

/// The rows of a vector, a lane each.
pub(super) type LaneRows = [*mut u8; MAX_LANES];

/// `LANES` rows of a tensor of queries, from row `first` of a task.
#[inline(always)]
pub(super) fn rows_at<S: Simd>(job: &Job<'_>, task: &Task, view: View<'_>, first: usize) -> LaneRows {
    let mut rows = [std::ptr::null_mut(); MAX_LANES];
    let Layout { strides: [_, head, query, _], .. } = view.layout;
    let (bytes, group) = (view.dtype.size(), job.call.problem.group());
    let (first_head, first_query) = job.head_and_query(task.head, first);
    let mut at = view.row_at(task.batch, first_head, first_query);
    // The next row is the next head's of the group, or the first one's of the next query.
    let mut left = (task.head + 1) * group - first_head;
    for row in rows.iter_mut().take(S::LANES) {
        *row = at;
        left -= 1;
        at = if left > 0 {
            at.wrapping_add(head.wrapping_mul(bytes))
        } else {
            left = group;
            at.wrapping_add(query.wrapping_sub(head.wrapping_mul(group - 1)).wrapping_mul(bytes))
        };
    }
    rows
}

/// `LANES` rows of `len` elements, one behind the other.
#[inline(always)]
pub(super) fn rows_in<S: Simd>(strip: *mut f32, len: usize) -> LaneRows {
    let mut rows = [std::ptr::null_mut(); MAX_LANES];
    for (lane, at) in rows.iter_mut().enumerate().take(S::LANES) {
        *at = strip.wrapping_add(lane * len).cast();
    }
    rows
}

/// Widens and transposes a panel's rows of a tensor of queries; lanes without a row become zeros.
///
/// # Safety
/// Requires a CPU with `S`, a panel of the task, room for its rows at `lanes`, and for `LANES` rows at `strip`, both padded
/// to whole vectors.
#[inline(always)]
pub(super) unsafe fn load_queries<S: Simd>(
    job: &Job<'_>,
    task: &Task,
    view: View<'_>,
    panel: &Panel,
    lanes: *mut f32,
    strip: *mut f32,
) {
    let head_dim = view.layout.shape[3];
    let padded = head_dim.next_multiple_of(S::LANES);
    for vec in 0..panel.vecs {
        let first = panel.rows.start + vec * S::LANES;
        let to = lanes.wrapping_add(vec * S::LANES);
        // SAFETY: rows are inside q, and the strip holds `LANES` padded rows.
        unsafe {
            if padded == head_dim && first + S::LANES <= panel.rows.end {
                let rows = rows_at::<S>(job, task, view, first);
                by_type!(view.dtype, into_lanes::<S, _>(&rows, head_dim, to));
                continue;
            }
            for lane in 0..S::LANES {
                let to = strip.add(lane * padded);
                if first + lane < panel.rows.end {
                    let (h, s) = job.head_and_query(task.head, first + lane);
                    rows_of(view, task.batch, h, s, 1).widen::<S>(to);
                } else {
                    std::ptr::write_bytes(to, 0, head_dim);
                }
            }
            into_lanes::<S, f32>(&rows_in::<S>(strip, padded), padded, to);
        }
    }
}

/// Element d of every row into the lanes of vector `d · VECS` from `to`; `len` is of whole vectors.
#[inline(always)]
unsafe fn into_lanes<S: Simd, E: Vectorised>(rows: &LaneRows, len: usize, to: *mut f32) {
    for d in (0..len).step_by(S::LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            // Stores wait for their lines one after the other.
            for i in 0..S::LANES {
                S::prefetch_near(to.wrapping_add((d + i) * S::VECS * S::LANES).cast());
            }
            let columns = E::columns::<S>(rows, d);
            for (i, &x) in columns.iter().enumerate().take(S::LANES) {
                S::store(to.add((d + i) * S::VECS * S::LANES), x);
            }
        }
    }
}

/// `LANES` elements of as many rows, from element `d` on, as columns.
///
/// # Safety
/// Requires a CPU with `S` and readable rows.
#[inline(always)]
pub(super) unsafe fn columns<S: Simd, E: Vectorised>(rows: &LaneRows, d: usize) -> [S::V; MAX_LANES] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut tile = [S::splat(0.0); MAX_LANES];
        for (x, row) in tile.iter_mut().zip(rows).take(S::LANES) {
            *x = E::load::<S>(row.cast::<E>().add(d));
        }
        S::transpose(&mut tile[..S::LANES]);
        tile
    }
}
