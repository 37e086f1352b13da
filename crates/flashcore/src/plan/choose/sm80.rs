//! The choice of the schedule for Ampere and Ada. The schedules were measured on an H200, for want of their own GPUs.

use crate::{DType, Keys, Pass, Problem, Queries, plan::Hardware};
use flashcore_kernels::{
    Order, Schedule, ScheduleError, Spec,
    sm80::{
        bwd::{self, Of},
        decode, fwd,
    },
};

/// The most queries that packed sequences have on average where blocks of 128 would be mostly empty. It was not measured.
const SHORT: usize = 64;

/// The most rows of a kv head, which are the queries of all heads that share it, where blocks share the keys of each 16. It was
/// not measured.
const FEW: usize = 64;

/// The fewest keys that blocks share: with less, the second launch takes longer than it saves. It was not measured.
const LONG: usize = 1024;

/// The schedules to try for a spec, best first.
pub(super) fn schedules(spec: &Spec) -> Vec<Schedule> {
    let order = if spec.right { Order::LongestFirst } else { Order::HeadByHead };
    let fwd = |block_m, block_n, warps, stages, q_in_regs| {
        Schedule::Sm80Fwd(fwd::Schedule { block_m, block_n, warps, stages, q_in_regs, order })
    };
    let widest = spec.head_dim.max(spec.head_dim_v);
    // Warps of 32 queries read keys and values half as often; their output fills the registers at head dims over 64, and
    // then only short key tiles fit beside it.
    let large = match widest {
        ..=64 => vec![fwd(128, 64, 4, 2, true), fwd(128, 64, 4, 2, false)],
        _ => vec![fwd(128, 32, 4, 3, false), fwd(128, 64, 8, if spec.right { 3 } else { 2 }, true)],
    };
    let rest = [
        fwd(128, 64, 8, 1, false),
        fwd(64, 64, 4, 2, true),
        fwd(64, 64, 4, 2, false),
        fwd(64, 64, 4, 1, false),
        fwd(64, 32, 4, 1, false),
    ];
    large.into_iter().chain(rest).collect()
}

/// The schedule for a problem, and why.
pub(super) fn choose(
    problem: &Problem,
    spec: &Spec,
    hardware: &Hardware,
) -> Result<(Schedule, String), ScheduleError> {
    let blocks = |rows: usize| match problem.queries {
        Queries::Dense => problem.len_q.div_ceil(rows) * problem.heads_q * problem.batch,
        // The most that there can be: each sequence has at most one that is not full.
        Queries::Packed { total } => (total / rows + problem.batch.min(total)) * problem.heads_q,
    };
    let short = match problem.queries {
        Queries::Dense => false,
        Queries::Packed { total } => total <= SHORT * problem.batch,
    };
    let fills = blocks(128) >= hardware.sms as usize && !short;
    let reason = if short {
        format!("{} sequences have few queries each: {} blocks of 64", problem.batch, blocks(64))
    } else if fills {
        format!("{} blocks of 128 queries fill {} SMs", blocks(128), hardware.sms)
    } else {
        let (large, small, sms) = (blocks(128), blocks(64), hardware.sms);
        format!("{large} blocks of 128 queries would leave SMs of {sms} idle; 64 make {small}")
    };
    first_fit(schedules(spec), fills, spec, hardware).map(|schedule| (schedule, reason))
}

/// The schedules to try for few queries against many keys, largest first: the smaller ones are for the shared memory of Ada. None
/// was measured there.
pub(super) fn decoding(spec: &Spec) -> [decode::Schedule; 4] {
    let one = decode::Schedule::new(spec, 1);
    let small = |warps, stages| decode::Schedule { warps, keys: 16, stages, ..one };
    if spec.kv.is_none() {
        return [one, small(4, 2), small(2, 3), small(2, 2)];
    }
    [one, decode::Schedule { warps: 4, ..one }, small(8, 2), small(4, 2)]
}

/// Whether 16-bit queries are so few, and keys so many, that blocks share the keys: otherwise each tile of queries walks over all
/// of its keys alone.
pub(super) fn decodes(problem: &Problem, hardware: &Hardware) -> bool {
    let possible = |dim: usize| dim.is_multiple_of(16);
    let few = problem.group() * problem.len_q <= FEW && 2 * decoding_tiles(problem) <= hardware.sms as usize;
    let of_16_bits = matches!(problem.dtype, DType::F16 | DType::BF16);
    few && problem.len_k >= LONG
        && of_16_bits
        && problem.pass == Pass::Forward
        && possible(problem.head_dim)
        && possible(problem.head_dim_v)
}

/// Tiles of the decoding kernel, in which heads that share keys are rows. Of packed sequences the least that there can be: each has
/// its own.
fn decoding_tiles(problem: &Problem) -> usize {
    let tiles = |queries: usize| (problem.group() * queries).div_ceil(decode::ROWS as usize);
    problem.heads_kv
        * match problem.queries {
            Queries::Dense => problem.batch * tiles(problem.len_q),
            Queries::Packed { total } => tiles(total).max(problem.batch.min(total)),
        }
}

/// The schedule of the decoding kernel, and why.
pub(super) fn decode(
    problem: &Problem,
    spec: &Spec,
    hardware: &Hardware,
) -> Result<(Schedule, String), ScheduleError> {
    let fits = |it: &decode::Schedule| Schedule::Sm80Decode(*it).check(spec, hardware.target).is_ok();
    let all = decoding(spec);
    let one = all.into_iter().find(fits).unwrap_or(all[0]);
    let tiles = decoding_tiles(problem);
    // A part has at least a step for each of its warps.
    let most = problem.len_k.div_ceil((one.keys * one.warps) as usize).max(1);
    let parts = (hardware.sms as usize / tiles.max(1)).clamp(1, most);
    let schedule = Schedule::Sm80Decode(decode::Schedule { parts: parts as u32, ..one });
    schedule.check(spec, hardware.target)?;
    let sms = hardware.sms;
    let why = match parts {
        1 => format!("{tiles} tiles of up to {} rows, one block each, on {sms} SMs", decode::ROWS),
        _ => format!("{tiles} tiles on {sms} SMs: {parts} blocks share the keys of each"),
    };
    Ok((schedule, why))
}

/// The first schedule that fits, among those with large blocks if they fill the GPU, else among those with small ones.
fn first_fit(
    candidates: Vec<Schedule>,
    fills: bool,
    spec: &Spec,
    hardware: &Hardware,
) -> Result<Schedule, ScheduleError> {
    let rows = |schedule: &Schedule| schedule.geometry(spec).rows;
    let (large, small): (Vec<Schedule>, Vec<Schedule>) = candidates.into_iter().partition(|s| rows(s) > 64);
    let candidates = if fills { [large, small] } else { [small, large] };
    let mut refused = None;
    for schedule in candidates.into_iter().flatten() {
        match schedule.check(spec, hardware.target) {
            Ok(()) => return Ok(schedule),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.unwrap_or_else(|| ScheduleError::Malformed { reason: "no schedule to try".into() }))
}

/// The schedules to try for some gradients, best first. None of them was measured yet.
pub(super) fn gradients(spec: &Spec, of: Of) -> Vec<Schedule> {
    let order = if spec.right { Order::LongestFirst } else { Order::HeadByHead };
    let bwd = |(block, walk, warps, stages)| {
        Schedule::Sm80Bwd(bwd::Schedule { of, block, walk, warps, stages, order })
    };
    let all = [
        (128, 64, 8, 2),
        (128, 32, 8, 2),
        (64, 64, 4, 2),
        (64, 32, 4, 2),
        (64, 32, 4, 1),
        (64, 16, 4, 2),
        (64, 16, 4, 1),
    ];
    all.map(bwd).into()
}

/// The schedule for some gradients of a problem.
pub(super) fn choose_gradients(
    problem: &Problem,
    spec: &Spec,
    of: Of,
    hardware: &Hardware,
) -> Result<Schedule, ScheduleError> {
    let dense = |len: usize| len.div_ceil(128) * problem.batch;
    let packed = |total: usize| total / 128 + problem.batch.min(total);
    let (heads, tiles) = match (of, problem.queries, problem.keys) {
        (Of::Queries, Queries::Dense, _) => (problem.heads_q, dense(problem.len_q)),
        (Of::Queries, Queries::Packed { total }, _) => (problem.heads_q, packed(total)),
        (_, _, Keys::Packed { total }) => (problem.heads_kv, packed(total)),
        _ => (problem.heads_kv, dense(problem.len_k)),
    };
    let fills = tiles * heads >= hardware.sms as usize;
    first_fit(gradients(spec, of), fills, spec, hardware)
}
