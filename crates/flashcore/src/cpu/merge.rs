//! The parts of rows whose keys were split over tasks, brought together by their maxima and sums.
#![allow(unsafe_code)] // Raw outputs and the workspace of parts.

use super::{
    finish::{Stats, write_row},
    job::{Job, Workspace},
    plan::Split,
    simd::Simd,
    visible::Visible,
};

/// Merges the parts of some rows and writes these.
///
/// # Safety
/// Requires a CPU with `S`; all tasks of the split must have run.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(job: &Job<'_>, split: &Split, workspace: &mut Workspace) {
    let head_dim_v = job.call.problem.head_dim_v;
    let row_sum = workspace.floats.reserve(head_dim_v);
    let (scale, descale) = (job.scoring(split.batch, split.head).scale, job.descale(split.batch, split.head));
    let visible = Visible::new(job.call, split.batch);
    for row in split.rows.clone() {
        let place = row - split.rows.start;
        // SAFETY: parts are inside the workspace, and the row sum has room for a row.
        unsafe {
            let stat = |part: usize, which: usize| {
                *job.parts.add(part * job.part_len() + job.part_rows * (head_dim_v + which) + place)
            };
            // NaN never becomes the maximum, as in the tasks; it comes back through the sums.
            let max = split.parts.clone().map(|part| stat(part, 0)).fold(f32::NEG_INFINITY, f32::max);
            let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
            let mut sum = 0.0;
            std::ptr::write_bytes(row_sum, 0, head_dim_v);
            for part in split.parts.clone() {
                let weight = ((stat(part, 0) - base) * scale).exp();
                sum += weight * stat(part, 1);
                let from = job.parts.add(part * job.part_len() + place * head_dim_v);
                for d in 0..head_dim_v {
                    *row_sum.add(d) += weight * *from.add(d);
                }
            }
            // As the tasks do it, so that one part of all keys gives the same bits.
            let factor = descale / sum;
            for d in 0..head_dim_v {
                *row_sum.add(d) *= factor;
            }
            let query = job.head_and_query(split.head, row).1;
            let sees_keys = !visible.keys(query).is_empty();
            write_row::<S>(job, split.batch, split.head, row, row_sum, Stats { max, sum, sees_keys });
        }
    }
}
