//! The end of a row: into the outputs, or into the part of a split task.
#![allow(unsafe_code)] // Raw outputs and the workspace of parts.

use super::{job::Job, panel::Panel, plan::Task, rows, simd::Simd};

/// Multiplies the outputs of a panel that is done, in rows of `step`, with the inverse of their sums, and writes them; or
/// leaves them as the part of a split task.
///
/// # Safety
/// Requires a CPU with `S` and a panel of the task, all of whose keys have been worked on.
#[inline(always)]
pub(super) unsafe fn finish_panel<S: Simd>(job: &Job<'_>, task: &Task, panel: &Panel, step: usize) {
    for (lane, row) in panel.rows.clone().enumerate() {
        // SAFETY: the caller's promise; rows are of whole vectors.
        unsafe {
            let from = panel.o.add(lane * step);
            if task.part.is_none() {
                let factor = S::splat(*panel.inverse.add(lane));
                for d in (0..step).step_by(S::LANES) {
                    S::store(from.add(d), S::mul(S::load(from.add(d)), factor));
                }
            }
            finish_row::<S>(job, task, row, from, stats(panel, lane));
        }
    }
}

/// What the softmax of a panel's lane came to.
///
/// # Safety
/// The lane's maximum and sum must have been set.
#[inline(always)]
pub(super) unsafe fn stats(panel: &Panel, lane: usize) -> Stats {
    // SAFETY: the caller's promise.
    unsafe {
        Stats {
            max: *panel.max.add(lane),
            sum: *panel.sum.add(lane),
            sees_keys: !panel.keys(lane).is_empty(),
        }
    }
}

/// What the softmax of a row came to.
#[derive(Clone, Copy)]
pub(super) struct Stats {
    pub max: f32,
    pub sum: f32,
    pub sees_keys: bool,
}

/// Writes one row of outputs (already divided by their sum), or leaves it (not divided) as the part of a split task.
///
/// # Safety
/// Requires a CPU with `S`, `head_dim_v` f32 at `from`, which this may change, and a row of the task.
#[inline(always)]
pub(super) unsafe fn finish_row<S: Simd>(
    job: &Job<'_>,
    task: &Task,
    row: usize,
    from: *mut f32,
    stats: Stats,
) {
    let Some(part) = task.part else {
        // SAFETY: the caller's promise.
        return unsafe { write_row::<S>(job, task.batch, task.head, row, from, stats) };
    };
    let head_dim_v = job.call.problem.head_dim_v;
    let place = row - task.rows.start;
    // SAFETY: parts are inside their workspace.
    unsafe {
        let part = job.parts.add(part * job.part_len());
        std::ptr::copy_nonoverlapping(from, part.add(place * head_dim_v), head_dim_v);
        *part.add(job.part_rows * head_dim_v + place) = stats.max;
        *part.add(job.part_rows * (head_dim_v + 1) + place) = stats.sum;
    }
}

/// Writes one row of o and its lse; without keys, zeros and −∞. A row that f32 did not hold is computed again.
///
/// # Safety
/// Requires a CPU with `S`, `head_dim_v` f32 at `from`, which this may change, and a row of the plan.
#[inline(always)]
pub(super) unsafe fn write_row<S: Simd>(
    job: &Job<'_>,
    batch: usize,
    head_kv: usize,
    row: usize,
    from: *mut f32,
    stats: Stats,
) {
    let (h, s) = job.head_and_query(head_kv, row);
    let head_dim_v = job.call.problem.head_dim_v;
    // SAFETY: the caller's promise.
    unsafe {
        if !stats.sees_keys {
            std::ptr::write_bytes(from, 0, head_dim_v);
        } else if !(stats.sum > 0.0 && rows::are_finite(from, head_dim_v)) {
            return S::write_row(job, batch, head_kv, row);
        }
        let o = job.call.o();
        rows::narrow::<S>(o.dtype, from, o.row_at(batch, h, s), head_dim_v);
        write_lse(job, batch, head_kv, row, stats);
    }
}

/// Writes the lse of one row, where it is wanted; without keys, −∞.
///
/// # Safety
/// Requires a row of the plan.
#[inline(always)]
pub(super) unsafe fn write_lse(job: &Job<'_>, batch: usize, head_kv: usize, row: usize, stats: Stats) {
    let Some(to) = job.call.lse() else { return };
    let (h, s) = job.head_and_query(head_kv, row);
    let lse = if stats.sees_keys {
        let scale = job.scoring(batch, head_kv).scale;
        (f64::from(stats.max) * f64::from(scale) + f64::from(stats.sum).ln()) as f32
    } else {
        f32::NEG_INFINITY
    };
    // SAFETY: the caller's promise.
    unsafe { to.row_at(batch, h, s).cast::<f32>().write(lse) };
}
