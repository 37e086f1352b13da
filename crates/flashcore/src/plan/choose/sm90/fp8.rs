//! The blocks for 8-bit floats, of which each has its queries and their keys for itself. Those for many tiles were measured on
//! an H200.

use flashcore_kernels::{Schedule as Any, Spec, sm90::fwd::Schedule};

use super::blocks::wide;
use crate::{Problem, plan::Hardware};

/// Every schedule that a plan may have for a spec, best first: those for many tiles of queries, then those for few.
pub(super) fn schedules(spec: &Spec) -> Vec<Schedule> {
    for_many(spec).into_iter().chain(for_few(spec)).collect()
}

/// After so many keys the output is put aside: until then the tensor cores' own sums are off by up to 1.5 %.
const KEYS: u32 = 2048;

/// For grids that fill the GPU: the largest tiles that leave room for flushed sums. Wider heads leave none beside a whole
/// output, which is put aside in memory.
fn for_many(spec: &Spec) -> Vec<Schedule> {
    // With maxima as they are, the largest probability is not rounded.
    let wide = |warpgroups, block_n, q_stages| Schedule { lazy: 0, ..wide(warpgroups, block_n, q_stages) };
    let aside = |block_n, q_stages| Schedule { flush: KEYS / block_n, ..wide(2, block_n, q_stages) };
    let first = match spec.head_dim.max(spec.head_dim_v) {
        ..=64 if !spec.softcap => wide(3, 128, 2),
        ..=64 => wide(2, 128, 2),
        65..=128 => aside(192, 2),
        _ => Schedule { pingpong: false, ..aside(96, 1) },
    };
    vec![first, wide(2, 128, 2), wide(2, 96, 1), wide(2, 64, 1), wide(2, 32, 1)]
}

/// For grids that do not: blocks of one warpgroup, which are more.
fn for_few(spec: &Spec) -> Vec<Schedule> {
    let alone =
        |many: Schedule| Schedule { warpgroups: 1, q_stages: 1, pingpong: false, persistent: false, ..many };
    for_many(spec).into_iter().map(alone).collect()
}

/// The schedule for a problem, and why; `None` where none fits.
pub(super) fn choose(problem: &Problem, spec: &Spec, hardware: &Hardware) -> Option<(Schedule, String)> {
    let fits = |schedule: &Schedule| Any::Sm90Fwd(*schedule).check(spec, hardware.target).is_ok();
    let many = for_many(spec).into_iter().find(fits);
    let few = for_few(spec).into_iter().find(fits);
    let tiles = |rows: u32| problem.len_q.div_ceil(rows as usize) * problem.heads_q * problem.batch;
    let (sms, whole) = (hardware.sms, "8-bit floats take blocks that have their keys for themselves");
    let fills = |many: &Schedule| tiles(many.rows()) >= sms as usize;
    let (schedule, what) = match many.filter(fills) {
        Some(many) => (many, format!("keep {sms} SMs busy")),
        None => (few.or(many)?, format!("do not fill {sms} SMs")),
    };
    let rows = schedule.rows();
    Some((schedule, format!("{} tiles of {rows} queries {what}; {whole}", tiles(rows))))
}
