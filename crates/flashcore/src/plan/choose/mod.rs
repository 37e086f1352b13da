//! Every choice that was measured, by generation of GPU: which kernel and which schedule a problem gets.

mod sm80;
mod sm90;

use flashcore_kernels::{
    Kernel, Schedule, ScheduleError, Section, Spec, append, combine, ladder, quantize,
    sm80::{bwd, bwd::Of, bwd_rows},
    sm90 as hopper,
};
use flashcore_ptx::Target;

use super::{Hardware, Launch, MAX_GRID_YZ, block_keys, element, workspace};
use crate::{DType, Keys, Pass, Problem, Queries};

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
        Kernel::Sm90Bwd => [(128, spec.head_dim.max(spec.head_dim_v) <= 64), (64, true)]
            .into_iter()
            .filter(|&(_, fits)| fits)
            .map(|(block_m, _)| {
                Schedule::Sm90Bwd(hopper::bwd::Schedule {
                    block_m,
                    stages: 3,
                    pingpong: true,
                    rotate: !spec.is_masked(),
                    rounds: false,
                })
            })
            .collect(),
        Kernel::Sm90BwdWide => [3, 2]
            .map(|stages| hopper::bwd::wide::Schedule { stages, pingpong: true, piecewise: false })
            .map(Schedule::Sm90BwdWide)
            .into(),
        Kernel::Sm80Decode => sm80::decoding(spec).map(Schedule::Sm80Decode).into(),
        Kernel::Sm90Fwd => sm90::schedules(spec).into_iter().map(Schedule::Sm90Fwd).collect(),
        Kernel::Sm80Bwd => {
            [Of::KeysAndValues, Of::Keys].into_iter().flat_map(|of| sm80::gradients(spec, of)).collect()
        }
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
    Err(refused.unwrap_or_else(|| computes_nothing(kernel, Pass::Forward)))
}

/// The first launch of a backward pass.
pub(super) const ROWS: Schedule = Schedule::BwdRows(bwd_rows::Schedule { warps: 4 });

/// Whether a schedule of a kernel stands for a whole pass: what else it takes follows from it.
pub(super) fn computes(kernel: Kernel, pass: Pass) -> bool {
    match pass {
        Pass::Forward => Kernel::LADDER.contains(&kernel) || kernel == Kernel::Sm80Decode,
        Pass::Backward => Kernel::BACKWARD.contains(&kernel),
    }
}

/// What is said of a kernel that does not compute a pass.
pub(super) fn computes_nothing(kernel: Kernel, pass: Pass) -> ScheduleError {
    let reason = match pass {
        Pass::Forward => format!("{kernel} computes no attention by itself"),
        Pass::Backward => format!("{kernel} computes no gradients by itself"),
    };
    ScheduleError::Malformed { reason }
}

/// The launches that compute gradients once the rows are known, for a schedule that stands for them.
pub(super) fn gradients(
    problem: &Problem,
    spec: &Spec,
    schedule: Schedule,
    hardware: &Hardware,
) -> Result<Vec<Schedule>, ScheduleError> {
    // As others see it, the list of kernels is open.
    #[allow(clippy::match_wildcard_for_single_variants)]
    match schedule {
        Schedule::Sm90Bwd(hopper::bwd::Schedule { rounds: true, .. }) => {
            if every_query_sees_a_key(problem) {
                return Ok(vec![schedule]);
            }
            let reason =
                "rounds=1: there are queries that see no key, and nobody would write their gradients";
            Err(ScheduleError::Malformed { reason: reason.into() })
        }
        Schedule::Sm90Bwd(hopper::bwd::Schedule { block_m, rotate, .. }) => {
            Ok(vec![schedule, Schedule::Sm90BwdFinish(hopper::bwd::finish::Schedule { block_m, rotate })])
        }
        Schedule::Sm90BwdWide(_) => Ok(vec![schedule]),
        Schedule::Sm80Bwd(given) => sm80_gradients(problem, spec, given, hardware),
        _ => Err(computes_nothing(schedule.kernel(), Pass::Backward)),
    }
}

/// Whether it is known on the host that no query is without keys: between the first and the last, bounds are monotonous.
fn every_query_sees_a_key(problem: &Problem) -> bool {
    let Problem { len_q, len_k, mask, .. } = *problem;
    let sees = |row: usize| !mask.keys(row, len_q, len_k).is_empty();
    problem.is_dense() && !problem.key_lengths && (len_q == 0 || (sees(0) && sees(len_q - 1)))
}

/// A kernel for some of the gradients, with those that compute the others.
fn sm80_gradients(
    problem: &Problem,
    spec: &Spec,
    given: bwd::Schedule,
    hardware: &Hardware,
) -> Result<Vec<Schedule>, ScheduleError> {
    let of = |of| match Schedule::Sm80Bwd(given) {
        given_one if given.of == of => Ok(given_one),
        _ => sm80::choose_gradients(problem, spec, of, hardware),
    };
    let together = of(Of::KeysAndValues);
    let keys = match (given.of, together) {
        (Of::KeysAndValues | Of::Queries, Ok(together)) => vec![together],
        _ => vec![of(Of::Keys)?, of(Of::Values)?],
    };
    Ok(keys.into_iter().chain([of(Of::Queries)?]).collect())
}

/// The launches that make f8 of a problem's tensors, which are `folded` afterwards; and the one behind attention that gives
/// back to lse what smoothed keys took from it, where both are asked for.
pub(super) fn quantising(
    problem: &Problem,
    folded: &Problem,
    schedule: &Schedule,
    hardware: &Hardware,
) -> Result<(Vec<Launch>, Option<Launch>), ScheduleError> {
    let Some(quantiser) = problem.quantise else { return Ok((Vec::new(), None)) };
    let spec = Spec {
        head_dim_v: folded.head_dim_v as u32,
        key_lengths: folded.key_lengths,
        descale_keys: folded.descale_keys.map(block_keys),
        ..Spec::new(element(problem.dtype), folded.head_dim as u32)
    };
    let shapes = workspace::shapes(folded);
    let launch = |of: quantize::Schedule| -> Result<Launch, ScheduleError> {
        let schedule = Schedule::Quantize(of);
        schedule.check(&spec, hardware.target)?;
        let geometry = schedule.geometry(&spec);
        let (threads, shared_bytes, cluster) = (geometry.threads, geometry.shared_bytes, geometry.cluster());
        Ok(Launch { spec, schedule, grid: of.grid(&spec, &shapes), threads, cluster, shared_bytes })
    };
    let turn = turned(schedule);
    let all = quantize::Schedule::all(quantiser.smooths(), quantiser.rotates())
        .map(|pass| quantize::Schedule { turn: turn && pass.pass == quantize::Pass::Cast, ..pass });
    let shift = (quantiser.smooths() && problem.lse).then(|| launch(quantize::Schedule::shift()));
    Ok((all.map(launch).collect::<Result<_, ScheduleError>>()?, shift.transpose()?))
}

/// The launch that appends to a problem's cache, before attention that is compiled for this spec.
pub(super) fn appending(
    problem: &Problem,
    spec: &Spec,
    hardware: &Hardware,
) -> Result<Option<Launch>, ScheduleError> {
    let Some(append) = problem.append else { return Ok(None) };
    let of = append::Schedule {
        rotary: append.rotary.map(|rotary| rotary.dim as u32),
        interleaved: append.rotary.is_some_and(|rotary| rotary.interleaved),
        positions: append.rotary.is_some_and(|rotary| rotary.positions),
        packed: append.total.is_some(),
        threads: 128,
    };
    let Spec { dtype, kv, descale_keys, head_dim, head_dim_v, left, right, packed_q, packed_k, page, .. } =
        *spec;
    let plain =
        Spec { kv, descale_keys, head_dim_v, left, right, key_lengths: true, ..Spec::new(dtype, head_dim) };
    let (schedule, spec) = (Schedule::Append(of), Spec { packed_q, packed_k, page, ..plain });
    schedule.check(&spec, hardware.target)?;
    let geometry = schedule.geometry(&spec);
    let packed_q = if let Queries::Packed { total } = problem.queries { Some(total) } else { None };
    let rows = |packed: Option<usize>, each: usize| packed.unwrap_or(problem.batch * each) as u64;
    let of_queries = problem.heads_q as u64 * rows(packed_q, problem.len_q);
    let of_new = problem.heads_kv as u64 * rows(append.total, append.len);
    let blocks = of.grid(&spec, problem.batch as u64, [of_queries, of_new])?;
    let (threads, shared_bytes, cluster) = (geometry.threads, geometry.shared_bytes, geometry.cluster());
    Ok(Some(Launch { spec, schedule, grid: [blocks, 1, 1], threads, cluster, shared_bytes }))
}

/// Whether a schedule takes values that the quantiser has turned around.
pub(super) fn turned(schedule: &Schedule) -> bool {
    matches!(schedule, Schedule::Sm90Fwd(schedule) if schedule.turned)
}

/// Threads that a multiprocessor of Hopper runs at a time.
const HOPPER_THREADS: usize = 2048;

/// What merges the parts of the keys that a schedule leaves for so many rows, if it does.
pub fn merge(spec: &Spec, schedule: &Schedule, rows: usize, sms: u32) -> Option<Schedule> {
    let shift = match schedule {
        Schedule::Sm90Fwd(parts) => parts.shift(spec),
        _ => 0,
    };
    let by_length = is_by_length(schedule);
    let parts = parts(schedule);
    let warps = if by_length {
        // A few rows may have many parts each, many rows have few: as many as run at a time.
        [4, 2]
            .into_iter()
            .find(|&warps| rows * 32 * warps as usize <= sms as usize * HOPPER_THREADS)
            .unwrap_or(1)
    } else {
        // So many that all parts of a query are read at once, if possible.
        parts.div_ceil(combine::AT_ONCE).clamp(4, 16)
    };
    (parts > 1 || by_length).then_some(Schedule::Combine(combine::Schedule { warps, shift, by_length }))
}

/// Whether the blocks of a schedule share all keys by length.
pub(super) fn is_by_length(schedule: &Schedule) -> bool {
    matches!(schedule, Schedule::Sm90Fwd(schedule) if schedule.by_length)
}

/// The parts that a schedule cuts the keys into.
pub(super) fn parts(schedule: &Schedule) -> u32 {
    match schedule {
        Schedule::Sm90Fwd(schedule) => schedule.parts,
        Schedule::Sm80Decode(schedule) => schedule.parts,
        _ => 1,
    }
}

/// Heads whose tiles of queries are taken up together.
pub(super) fn section(problem: &Problem, launch: &Launch) -> Section {
    match launch.schedule {
        Schedule::Sm90Fwd(_) if launch.spec.packed_q => sm90::packed_section(problem),
        Schedule::Sm90Fwd(schedule) if schedule.has_sections(&launch.spec) => {
            sm90::section(problem, schedule, launch.grid[0] / schedule.multicast)
        }
        _ => Section::default(),
    }
}

/// What of packed sequences or pages no kernel takes, if anything.
pub(super) fn no_places(problem: &Problem, target: Target) -> Option<String> {
    let what = match problem.keys {
        _ if problem.is_dense() => return None,
        Keys::Paged { page, .. } if problem.dtype_kv.is_some() && has_odd_pages(problem) => {
            format!("pages of {page} keys of f8")
        }
        Keys::Paged { .. } => "keys in pages".to_string(),
        Keys::Dense | Keys::Packed { .. } | Keys::Apart { .. } => "packed sequences".into(),
    };
    let paged = matches!(problem.keys, Keys::Paged { .. });
    // A cache of 8 bits has a kernel of its own.
    if paged && problem.pass == Pass::Backward || problem.dtype_kv.is_some() && has_odd_pages(problem) {
        return Some(what);
    }
    no_tensor_cores(problem, target).map(|without| format!("{what} with {without}"))
}

/// Whether keys lie in pages that Hopper's kernel does not copy.
fn has_odd_pages(problem: &Problem) -> bool {
    matches!(problem.keys, Keys::Paged { page, .. } if !page.is_multiple_of(16))
}

/// What of a problem the kernels with tensor cores do not take, if anything.
pub(super) fn no_tensor_cores(problem: &Problem, target: Target) -> Option<String> {
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
    // The blocks of Hopper's forward kernel lie in a row.
    let in_a_row = target == Target::Sm90a && problem.pass == Pass::Forward && !has_odd_pages(problem);
    let many = batch.max(heads_q) > MAX_GRID_YZ && !in_a_row;
    many.then(|| format!("more than {MAX_GRID_YZ} batch entries or heads"))
}

/// The forward kernel that the choice for a problem comes to.
pub(super) fn kernel(problem: &Problem, hardware: &Hardware) -> Kernel {
    match hardware.target {
        _ if problem.dtype_kv.is_some() => Kernel::Sm80Decode,
        target if no_tensor_cores(problem, target).is_some() => Kernel::Scalar,
        Target::Sm80 | Target::Sm89 if !has_odd_pages(problem) && sm80::decodes(problem, hardware) => {
            Kernel::Sm80Decode
        }
        Target::Sm90a if !has_odd_pages(problem) => Kernel::Sm90Fwd,
        _ => Kernel::Sm80Fwd,
    }
}

/// The schedule for a problem as the kernels see it, and why.
pub(super) fn schedule(
    problem: &Problem,
    spec: &Spec,
    hardware: &Hardware,
) -> Result<(Schedule, String), ScheduleError> {
    if problem.pass == Pass::Backward {
        return backward(problem, spec, hardware);
    }
    let kernel = kernel(problem, hardware);
    if kernel == Kernel::Sm80Decode {
        return sm80::decode(problem, spec, hardware);
    }
    if let Some(what) = no_tensor_cores(problem, hardware.target) {
        let schedule = default_schedule(Kernel::Scalar, spec, hardware.target)?;
        return Ok((schedule, format!("{what} leaves the scalar kernel, which is right and slow")));
    }
    if kernel == Kernel::Sm80Fwd {
        let (schedule, mut why) = sm80::choose(problem, spec, hardware)?;
        if let (Target::Sm90a, Some(page)) = (hardware.target, spec.page) {
            why = format!("pages of {page} keys are no multiples of 16, which leaves Ampere's kernel; {why}");
        }
        return Ok((schedule, why));
    }
    if let Some(choice) = sm90::choose(problem, spec, hardware) {
        return Ok(choice);
    }
    if !problem.is_dense() || spec.dtype.is_fp8() {
        return default_schedule(Kernel::Sm90Fwd, spec, hardware.target)
            .map(|schedule| (schedule, "it is the only one that fits".into()));
    }
    sm80::choose(problem, spec, hardware)
}

/// The schedule that stands for a backward pass, and why.
fn backward(
    problem: &Problem,
    spec: &Spec,
    hardware: &Hardware,
) -> Result<(Schedule, String), ScheduleError> {
    let hopper = [
        (Kernel::Sm90Bwd, "all gradients from one kernel, whose blocks add to dQ in turn"),
        (
            Kernel::Sm90BwdWide,
            "all gradients from one kernel, some blocks of which own queries and the others keys",
        ),
    ];
    for (kernel, why) in hopper.into_iter().filter(|_| hardware.target == Target::Sm90a) {
        if let Ok(schedule) = default_schedule(kernel, spec, hardware.target) {
            return Ok((schedule, why.into()));
        }
    }
    let each = |of| sm80::choose_gradients(problem, spec, of, hardware);
    let together = "the keys' and the values' gradients from one kernel, the queries' from another";
    let apart = "three kernels: the keys' and the values' gradients together do not fit the registers";
    each(Of::KeysAndValues)
        .map(|schedule| (schedule, together.into()))
        .or_else(|_| each(Of::Keys).map(|schedule| (schedule, apart.into())))
}
