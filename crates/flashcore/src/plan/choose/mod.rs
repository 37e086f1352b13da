//! Every choice that was measured, by generation of GPU: which kernel and which schedule a problem gets.

mod sm80;
mod sm90;

use flashcore_kernels::{Kernel, Schedule, ScheduleError, Section, Spec, ladder, sm90::combine};
use flashcore_ptx::Target;

use super::{Hardware, Launch, MAX_GRID_YZ};
use crate::{DType, Problem};

/// The schedules to try for a kernel and a spec, best first. The search goes beyond them.
#[allow(clippy::match_wildcard_for_single_variants)] // It is one variant for the workbench, and any for others.
pub fn schedules(kernel: Kernel, spec: &Spec) -> Vec<Schedule> {
    // As others see it, the list of kernels is open.
    #[allow(clippy::match_wildcard_for_single_variants)]
    match kernel {
        Kernel::Scalar => vec![Schedule::Scalar(ladder::scalar::Schedule { warps: 4 })],
        Kernel::Sm80Mma => {
            [64, 32, 16].map(|block_n| Schedule::Sm80Mma(ladder::mma::Schedule { block_n })).into()
        }
        Kernel::Sm80Fwd => sm80::schedules(spec),
        Kernel::Sm90Fwd => sm90::schedules(spec).into_iter().map(Schedule::Sm90Fwd).collect(),
        _ => Vec::new(),
    }
}

/// The first of [`schedules`] that fits the target.
pub fn default_schedule(kernel: Kernel, spec: &Spec, target: Target) -> Result<Schedule, ScheduleError> {
    let mut refused = None;
    for schedule in schedules(kernel, spec) {
        match schedule.check(spec, target) {
            Ok(()) => return Ok(schedule),
            Err(error) => refused = Some(error),
        }
    }
    let none = || ScheduleError::Malformed { reason: format!("{kernel} computes no attention by itself") };
    Err(refused.unwrap_or_else(none))
}

/// What merges the parts of the keys that a schedule leaves, if it does.
pub fn merge(spec: &Spec, schedule: &Schedule) -> Option<Schedule> {
    match schedule {
        Schedule::Sm90Fwd(parts) if parts.parts > 1 => {
            // So many that all parts of a query are read at once, if possible.
            let warps = parts.parts.div_ceil(combine::AT_ONCE).clamp(4, 16);
            Some(Schedule::Combine(combine::Schedule { warps, shift: parts.shift(spec) }))
        }
        _ => None,
    }
}

/// Heads whose tiles of queries are taken up together.
pub(super) fn section(problem: &Problem, launch: &Launch) -> Section {
    match launch.schedule {
        Schedule::Sm90Fwd(schedule) if schedule.has_sections(&launch.spec) => {
            sm90::section(problem, schedule, launch.grid[0] / schedule.multicast)
        }
        _ => Section::default(),
    }
}

/// What of a problem the kernels with tensor cores do not take, if anything.
fn no_tensor_cores(problem: &Problem, target: Target) -> Option<String> {
    let Problem { batch, heads_q, head_dim, head_dim_v, .. } = *problem;
    // The scalar kernel does not take 8-bit floats: a family with tensor cores says what it refuses.
    if problem.dtype.is_f8() {
        return None;
    }
    let possible =
        |dim: usize| dim.is_multiple_of(8) && dim <= flashcore_kernels::MAX_TENSOR_CORE_HEAD_DIM as usize;
    if problem.dtype == DType::F32 {
        return Some("f32".into());
    }
    if !possible(head_dim) || !possible(head_dim_v) {
        return Some(format!("head_dim {head_dim} with head_dim_v {head_dim_v}"));
    }
    // Hopper's blocks lie in a row.
    let many = batch.max(heads_q) > MAX_GRID_YZ && target != Target::Sm90a;
    many.then(|| format!("more than {MAX_GRID_YZ} batch entries or heads"))
}

/// The schedule for a problem as the kernels see it, and why.
pub(super) fn schedule(
    problem: &Problem,
    spec: &Spec,
    hardware: &Hardware,
) -> Result<(Schedule, String), ScheduleError> {
    if let Some(what) = no_tensor_cores(problem, hardware.target) {
        let schedule = default_schedule(Kernel::Scalar, spec, hardware.target)?;
        return Ok((schedule, format!("{what} leaves the scalar kernel, which is right and slow")));
    }
    if hardware.target == Target::Sm90a
        && let Some(choice) = sm90::choose(problem, spec, hardware)
    {
        return Ok(choice);
    }
    if hardware.target == Target::Sm90a && spec.dtype.is_fp8() {
        return default_schedule(Kernel::Sm90Fwd, spec, hardware.target)
            .map(|schedule| (schedule, "it is the only one that fits".into()));
    }
    sm80::choose(problem, spec, hardware)
}
