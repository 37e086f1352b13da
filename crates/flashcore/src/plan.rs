//! Plan: a problem with the launches that compute it, and the workspace that they share.
//!
//! Choosing is a pure function of the problem, the hardware and the table of what searches found, so a plan can be
//! printed, tested as a table and made for a GPU that is not there.

mod bind;
#[doc(hidden)]
pub mod choose;
mod fold;
mod workspace;

use flashcore_kernels::{Blocks, ElementType, ScheduleError, Section, Spec, packed_tiles};
pub use flashcore_kernels::{Kernel, Map, Packed, Schedule};
pub use flashcore_ptx::Target;
use flashcore_ptx::{Module, TraceSize};

pub use self::bind::Bindings;
pub(crate) use self::fold::{Folded, fold};
use self::{fold::apart, workspace::Workspace};
use crate::{DType, Error, Keys, Pass, Problem, Queries, Result, tuned::Table};

/// The longest sequences that the kernels take: so that the sum of two lengths, a window and a tile fits 31 bits.
pub const MAX_KERNEL_LEN: usize = 1 << 28;

/// The most blocks in the second and third dimension of a grid.
const MAX_GRID_YZ: usize = 65535;

/// The most tiles of queries in a launch: clusters of eight are still fewer than 2^31 blocks.
const MAX_TILES: u64 = 1 << 28;

/// The most key tiles that blocks share by length: the kernels count them in 32 bits, and blocks round them up.
pub(crate) const MAX_SHARED_TILES: u64 = 1 << 31;

/// What the choice of a plan depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hardware {
    /// Its name.
    pub name: String,
    /// What its code is compiled for.
    pub target: Target,
    /// Multiprocessors.
    pub sms: u32,
}

impl Hardware {
    /// A typical GPU of a target, to plan without one.
    pub fn typical(target: Target) -> Self {
        let (name, sms) = match target {
            Target::Sm80 => ("A100", 108),
            Target::Sm89 => ("L4", 58),
            Target::Sm90 | Target::Sm90a => ("H200", 132),
        };
        Self { name: name.into(), target, sms }
    }
}

/// A problem with the launches that compute it, one after the other, and why these.
///
/// ```
/// use flashcore::plan::{Hardware, Plan};
/// use flashcore::{DType, Problem};
/// # use flashcore::plan::Target;
/// let problem = Problem::new(1, 8, 512, 64, DType::F16);
/// let plan = Plan::choose(&problem, &Hardware::typical(Target::Sm80))?;
/// assert_eq!(plan.main().grid, [8, 8, 1]); // 64 queries per block
/// println!("{plan}");
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// What is asked.
    pub problem: Problem,
    /// The target of the code.
    pub target: Target,
    /// What is launched, in this order.
    pub launches: Vec<Launch>,
    /// Why these.
    pub reason: String,
    /// Which of the launches does the most of the work.
    main: usize,
    /// The problem as the kernels see it.
    folded: Folded,
    /// Heads whose tiles of queries are taken up together.
    section: Section,
    /// What the launches hand on to each other.
    workspace: Workspace,
}

/// One kernel of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// What the kernel is compiled for.
    pub spec: Spec,
    /// The kernel's knobs.
    pub schedule: Schedule,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads per block.
    pub threads: u32,
    /// Blocks per cluster; 1 without clusters.
    pub cluster: u32,
    /// Bytes of shared memory per block.
    pub shared_bytes: u32,
}

impl Launch {
    /// The launch of a kernel for a problem as it sees it.
    fn new(folded: &Problem, spec: Spec, schedule: Schedule, hardware: &Hardware) -> Result<Self> {
        let geometry = schedule.geometry(&spec);
        let Problem { batch, heads_q, heads_kv, len_q, len_k, queries, keys, .. } = *folded;
        // Batch entries and rows as tiles of so many count them.
        let packed = |total: usize, rows: u32| match geometry.blocks {
            Blocks::Packed { .. } | Blocks::EachPacked => [batch as u32, total as u32],
            // A tile of one row is always full. Without sequences there is none.
            _ if rows == 1 => [batch.min(1) as u32, total as u32],
            // Tiles are numbered as if all were one entry's.
            _ => [1, rows * packed_tiles(rows, total as u32, batch as u32)],
        };
        let of_queries = |rows| match queries {
            Queries::Dense => [batch as u32, len_q as u32],
            Queries::Packed { total } => packed(total, rows),
        };
        let (heads, [batch, len]) = match keys {
            _ if !geometry.is_of_keys() => (heads_q, of_queries(geometry.rows)),
            Keys::Packed { total } => (heads_kv, packed(total, geometry.rows)),
            _ => (heads_kv, [batch as u32, len_k as u32]),
        };
        let heads = heads as u32;
        let queries = match geometry.blocks {
            Blocks::QueriesThenKeys { queries } => {
                let [batch, len] = of_queries(queries);
                geometry.query_blocks(batch, heads_q as u32, len)
            }
            _ => 0,
        };
        let mut grid = geometry.grid(batch, heads, len, hardware.sms);
        grid[0] = grid[0].saturating_add(u32::try_from(queries).unwrap_or(u32::MAX));
        let tiles = geometry.tiles(batch, heads, len) + queries;
        if grid[1..].iter().any(|&size| size as usize > MAX_GRID_YZ) || tiles > MAX_TILES {
            return Err(Error::Unsupported {
                device: hardware.target.to_string(),
                what: format!("a grid of {grid:?} blocks"),
                possible: format!("up to {MAX_GRID_YZ} batch entries, heads and row blocks"),
                source: None,
            });
        }
        if let Schedule::Sm90Fwd(shares) = schedule
            && shares.by_length
            && tiles.saturating_mul(len_k.div_ceil(shares.block_n as usize) as u64) > MAX_SHARED_TILES
        {
            return Err(Error::Unsupported {
                device: hardware.target.to_string(),
                what: format!("{tiles} tiles of queries with up to {len_k} keys each, shared by length"),
                possible: "up to 2^31 key tiles; take by_length=0".into(),
                source: None,
            });
        }
        let (threads, shared_bytes, cluster) = (geometry.threads, geometry.shared_bytes, geometry.cluster());
        Ok(Self { spec, schedule, grid, threads, cluster, shared_bytes })
    }

    /// The kernel.
    pub fn kernel(&self) -> Kernel {
        self.schedule.kernel()
    }

    /// Its code for a target.
    pub fn module(&self, target: Target) -> Result<Module> {
        self.schedule.emit(&self.spec, target).map_err(|error| unsupported(&target.to_string(), &error))
    }
}

impl std::fmt::Display for Launch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {} threads", self.grid, self.threads)?;
        if self.cluster > 1 {
            write!(f, ", in clusters of {}", self.cluster)?;
        }
        write!(f, ", {} bytes of shared memory per block", self.shared_bytes)
    }
}

impl Plan {
    /// The plan for a problem on some hardware.
    pub fn choose(problem: &Problem, hardware: &Hardware) -> Result<Self> {
        Self::choose_by(problem, hardware, Table::current())
    }

    /// The plan for a problem on some hardware, by a given table of what searches found.
    #[doc(hidden)]
    pub fn choose_by(problem: &Problem, hardware: &Hardware, tuned: &Table) -> Result<Self> {
        let attended = attended(problem, hardware)?;
        let folded = fold(&attended, choose::kernel(&attended, hardware));
        let spec = spec(&folded, hardware)?;
        if let Some((entry, origin)) = tuned.find(&attended, &spec, hardware) {
            let gain = 100.0 * (entry.speed_up - 1.0);
            let reason = format!(
                "{origin}: {gain:.1} % faster than the planner's choice, measured on {}",
                entry.problem
            );
            return Self::assemble(problem, spec, entry.schedule, hardware, reason);
        }
        let (schedule, mut reason) = choose::schedule(&folded.problem, &spec, hardware)
            .map_err(|error| unsupported(&hardware.name, &error))?;
        reason.extend(apart(&attended, &folded, schedule.kernel()));
        Self::assemble(problem, spec, schedule, hardware, reason)
    }

    /// The plan with a schedule of the caller's.
    pub fn with_schedule(problem: &Problem, hardware: &Hardware, schedule: Schedule) -> Result<Self> {
        let spec = spec(&fold(&attended(problem, hardware)?, schedule.kernel()), hardware)?;
        let refuse = |error: &ScheduleError| unsupported(&hardware.name, error);
        schedule.check(&spec, hardware.target).map_err(|error| refuse(&error))?;
        if !choose::computes(schedule.kernel(), problem.pass) {
            return Err(refuse(&choose::computes_nothing(schedule.kernel(), problem.pass)));
        }
        Self::assemble(problem, spec, schedule, hardware, "asked for".into())
    }

    /// The plan with the default schedule of a kernel.
    pub fn with_kernel(problem: &Problem, hardware: &Hardware, kernel: Kernel) -> Result<Self> {
        let spec = spec(&fold(&attended(problem, hardware)?, kernel), hardware)?;
        let refuse = |error: &ScheduleError| unsupported(&hardware.name, error);
        if !choose::computes(kernel, problem.pass) {
            return Err(refuse(&choose::computes_nothing(kernel, problem.pass)));
        }
        let schedule =
            choose::default_schedule(kernel, &spec, hardware.target).map_err(|error| refuse(&error))?;
        Self::assemble(problem, spec, schedule, hardware, format!("the default of {kernel}"))
    }

    fn assemble(
        problem: &Problem,
        spec: Spec,
        schedule: Schedule,
        hardware: &Hardware,
        reason: String,
    ) -> Result<Self> {
        let attended = attended(problem, hardware)?;
        let as_seen = fold(&attended, schedule.kernel());
        let folded = as_seen.problem;
        let mut workspace = Workspace::of(&folded, &schedule);
        let (mut launches, mut shift) = (Vec::new(), None);
        if attended.dtype != problem.dtype {
            let refuse = |error: ScheduleError| unsupported(&hardware.name, &error);
            (launches, shift) = choose::quantising(problem, &folded, &schedule, hardware).map_err(refuse)?;
            workspace.quantise(&folded, &launches);
        } else if choose::turned(&schedule) {
            let reason = "V lies turned around only where the plan quantises it: take turned=0".into();
            return Err(unsupported(&hardware.name, &ScheduleError::Malformed { reason }));
        }
        if problem.append.is_some() {
            let refuse = |error: ScheduleError| unsupported(&hardware.name, &error);
            launches.extend(choose::appending(problem, &spec, hardware).map_err(refuse)?);
            workspace.append(problem, &as_seen);
        }
        let rows = folded.batch * folded.heads_q * folded.len_q;
        let mut launch = |spec: Spec, schedule: Schedule| {
            let launch = Launch::new(&folded, spec, schedule, hardware)?;
            launches.push(launch);
            Ok::<(), Error>(())
        };
        if problem.pass == Pass::Backward {
            // Only the first launch reads the gradient of lse, and o.
            let Spec { lse, packed_q, .. } = spec;
            let rows = Spec { lse, packed_q, ..Spec::new(spec.dtype, spec.head_dim_v) };
            launch(rows, choose::ROWS)?;
            let refuse = |error: ScheduleError| unsupported(&hardware.name, &error);
            for schedule in choose::gradients(&folded, &spec, schedule, hardware).map_err(refuse)? {
                launch(Spec { lse: false, ..spec }, schedule)?;
            }
            // Without queries the gradients of the keys are still to be written, and the other way round.
            if launches.iter().any(|launch| !launch.grid.contains(&0)) {
                launches.retain(|launch| !launch.grid.contains(&0));
            }
        } else if let Some(merge) = choose::merge(&spec, &schedule, rows, hardware.sms) {
            // The parts write no lse; whoever merges them does.
            launch(Spec { lse: false, ..spec }, schedule)?;
            launch(spec, merge)?;
        } else {
            launch(spec, schedule)?;
        }
        launches.extend(shift);
        if problem.append.is_some() {
            // Without queries there is still something to append.
            if launches.iter().any(|launch| !launch.grid.contains(&0)) {
                launches.retain(|launch| !launch.grid.contains(&0));
            }
        }
        let main = launches.iter().position(|launch| launch.schedule == schedule).unwrap_or(0);
        let section = choose::section(&folded, &launches[main]);
        workspace.put_aside(&folded, &launches[main]);
        workspace.share(&folded, &launches[main]);
        Ok(Self {
            problem: *problem,
            target: hardware.target,
            launches,
            reason,
            main,
            folded: as_seen,
            section,
            workspace,
        })
    }

    /// The same plan, whose main kernel stamps its [phases](flashcore_kernels::Phase): see
    /// [`trace_size`](Plan::trace_size).
    #[doc(hidden)]
    pub fn traced(mut self) -> Self {
        self.launches[self.main].spec.traced = true;
        self
    }

    /// The memory in which every block of the main kernel has room for so many stamps per role.
    #[doc(hidden)]
    pub fn trace_size(&self, stamps: u32) -> TraceSize {
        let roles = self.main().schedule.roles().len() as u32;
        TraceSize { blocks: self.main().grid.iter().product(), roles, stamps: stamps.next_multiple_of(2) }
    }

    /// The launch that does the most of the work: that computes attention, or its parts, or gradients.
    pub fn main(&self) -> &Launch {
        &self.launches[self.main]
    }

    /// Which of the launches that is.
    pub(crate) fn main_index(&self) -> usize {
        self.main
    }

    /// The kernel of the main launch.
    pub fn kernel(&self) -> Kernel {
        self.main().kernel()
    }

    /// Whether there is nothing to launch.
    pub fn is_empty(&self) -> bool {
        self.launches.iter().all(|launch| launch.grid.contains(&0))
    }

    /// Bytes of memory that the launches need beside the tensors. Nothing is expected in it, and nothing is left.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.bytes()
    }
}

/// The type as the kernels name it.
fn element(dtype: DType) -> ElementType {
    match dtype {
        DType::F16 => ElementType::F16,
        DType::BF16 => ElementType::Bf16,
        DType::F32 => ElementType::F32,
        DType::F8E4M3 => ElementType::E4m3,
        DType::I32 => unreachable!("attention on integers was refused"),
    }
}

/// The keys of a block with descales of its own, as the kernels count them: no head has more than the longest.
fn block_keys(keys: usize) -> u32 {
    keys.min(MAX_KERNEL_LEN) as u32
}

/// What the kernels for attention are given of a problem: f8, where its tensors become f8 first.
fn attended(problem: &Problem, hardware: &Hardware) -> Result<Problem> {
    let refuse = |what: &str, possible: &str| {
        let (device, what, possible) = (hardware.name.clone(), what.into(), possible.into());
        Err(Error::Unsupported { device, what, possible, source: None })
    };
    if problem.append.is_some() {
        if let Some(what) = choose::no_tensor_cores(problem, hardware.target) {
            let possible = "f16 and bf16 with head dims in multiples of 8 up to 256; for others copy the tensors to the host and \
                            call Device::cpu()";
            return refuse(&format!("an append with {what}"), possible);
        }
        return Ok(problem.appended());
    }
    if problem.quantise.is_none() {
        return Ok(*problem);
    }
    if problem.dtype == DType::F32 {
        return refuse("quantising f32", "f16 and bf16; or a copy on the host and Device::cpu()");
    }
    // Without keys there is nothing to quantise, and nobody writes descales.
    match (problem.len_k, problem.out) {
        (0, None) => Ok(Problem { quantise: None, ..*problem }),
        (0, Some(_)) => refuse("quantising without keys to an output of another type", "the type of q"),
        _ => Ok(problem.quantised()),
    }
}

/// What a kernel for this problem is compiled for.
fn spec(folded: &Folded, hardware: &Hardware) -> Result<Spec> {
    let Folded { problem, rows_per_query } = folded;
    let refuse = |what: String, possible: &str| {
        let device = hardware.name.clone();
        Err(Error::Unsupported { device, what, possible: possible.into(), source: None })
    };
    if problem.pass == Pass::Backward
        && let Some(what) = choose::no_tensor_cores(problem, hardware.target)
    {
        let possible = "f16 and bf16 with head dims in multiples of 8 up to 256; for others copy the tensors to the host and \
                        call Device::cpu()";
        return refuse(format!("the backward pass of {what}"), possible);
    }
    if let Some(what) = choose::no_places(problem, hardware.target) {
        let possible = "the forward pass of f16, bf16 and, from Ada on, f8 (of a cache in f8 with pages of a multiple of 16), and \
                        the backward pass of packed sequences, with head dims in multiples of 8 up to 256; for others copy the \
                        tensors to the host and call Device::cpu()";
        return refuse(what, possible);
    }
    let dtype = element(problem.dtype);
    for (what, len) in [("queries", problem.len_q), ("keys", problem.len_k)] {
        if len > MAX_KERNEL_LEN {
            return refuse(format!("{len} {what}"), "up to 2^28 per head");
        }
    }
    let heads = problem.batch as u128 * problem.heads_q as u128;
    if heads > u128::from(MAX_TILES) {
        return refuse(
            format!("{} batch entries of {} heads", problem.batch, problem.heads_q),
            "up to 2^28 heads",
        );
    }
    let band = problem.mask.band();
    let masked = band.left.is_some() || band.right.is_some();
    Ok(Spec {
        dtype,
        out: problem.dtype.is_f8().then(|| element(problem.out())),
        kv: problem.dtype_kv.map(element),
        descale_keys: problem.descale_keys.map(block_keys),
        head_dim: problem.head_dim as u32,
        head_dim_v: problem.head_dim_v as u32,
        left: band.left.is_some(),
        right: band.right.is_some(),
        top_left: masked && band.top_left,
        softcap: problem.softcap.is_some(),
        scaled_scores: Spec::needs_scaled_scores(element(problem.dtype_kv()), problem.scale, problem.softcap)
            || problem.dtype.is_f8() && problem.descale_keys.is_some(),
        key_lengths: problem.key_lengths,
        packed_q: matches!(problem.queries, Queries::Packed { .. }),
        packed_k: matches!(problem.keys, Keys::Packed { .. } | Keys::Apart { .. }),
        page: match problem.keys {
            Keys::Paged { page, .. } => Some(page as u32),
            Keys::Dense | Keys::Packed { .. } | Keys::Apart { .. } => None,
        },
        grouped: problem.heads_kv != problem.heads_q,
        rows_per_query: *rows_per_query as u32,
        lse: problem.lse,
        traced: false,
    })
}

fn unsupported(device: &str, error: &ScheduleError) -> Error {
    let possible = match error {
        ScheduleError::Cache { .. } => "the planner's own choice",
        ScheduleError::Fp8 { .. } => {
            "f16 or bf16 there, f8 on Ada and Hopper, or a copy on the host and Device::cpu()"
        }
        _ => "another kernel or schedule, or the planner's own choice",
    };
    let possible = possible.into();
    let source = Some(error.clone().into());
    Error::Unsupported { device: device.into(), what: error.to_string(), possible, source }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "problem   {}", self.problem)?;
        let Folded { problem: folded, rows_per_query } = &self.folded;
        if *rows_per_query > 1 {
            let (rows, queries) = (folded.len_q, self.problem.len_q);
            let main = self.main();
            let one = rows <= main.schedule.geometry(&main.spec).rows as usize;
            let tiles = if one { "one tile" } else { "the same tiles" };
            writeln!(
                f,
                "folded    {rows_per_query} heads that share keys are rows of {tiles}: {queries} queries, {rows} rows"
            )?;
        } else if folded.len_q != self.problem.len_q {
            writeln!(
                f,
                "folded    {} heads that share keys are the rows of one tile: {folded}",
                folded.len_q
            )?;
        }
        for launch in &self.launches {
            writeln!(f, "kernel    {} for {}", launch.kernel(), self.target)?;
            writeln!(f, "schedule  {}", launch.schedule)?;
            writeln!(f, "grid      {launch}")?;
        }
        if self.workspace_bytes() > 0 {
            writeln!(f, "workspace {} bytes", self.workspace_bytes())?;
        }
        write!(f, "why       {}", self.reason)
    }
}

#[cfg(test)]
mod tests {
    use flashcore_kernels::MAX_ROW_STRIDE;
    use flashcore_ptx::TensorMap;

    use super::*;
    use crate::{Layout, Mask, Name};

    fn plan(problem: Problem) -> Plan {
        Plan::choose(&problem, &Hardware::typical(Target::Sm80)).unwrap()
    }

    #[test]
    fn small_grids_get_small_blocks() {
        assert_eq!(plan(Problem::new(1, 8, 512, 64, DType::F16)).main().grid, [8, 8, 1]);
        assert_eq!(plan(Problem::new(4, 16, 2048, 64, DType::F16)).main().grid, [16, 16, 4]);
    }

    #[test]
    fn causal_blocks_run_longest_first() {
        let causal = plan(Problem::new(4, 16, 2048, 64, DType::F16).with_mask(Mask::Causal));
        assert_eq!(causal.main().grid, [16, 4, 16]);
    }

    #[test]
    fn every_head_dim_has_a_schedule_on_every_target() {
        for target in [Target::Sm80, Target::Sm89, Target::Sm90a] {
            for head_dim in (8..=256).step_by(8) {
                for head_dim_v in [8, head_dim, 256] {
                    for len in [64, 8192] {
                        let problem = Problem::new(1, 16, len, head_dim, DType::BF16)
                            .with_head_dim_v(head_dim_v)
                            .with_lse();
                        let plan = Plan::choose(&problem, &Hardware::typical(target));
                        assert!(plan.is_ok(), "{problem} on {target}: {plan:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_the_kernels_do_not_take_is_refused_with_the_reason() {
        let hardware = Hardware::typical(Target::Sm80);
        for problem in [
            Problem::new(1, 8, MAX_KERNEL_LEN + 1, 64, DType::F16),
            Problem::new(1 << 20, 1 << 10, 16, 64, DType::F16),
            Problem::new(1, 8, 512, 64, DType::F32).backward(),
            Problem::new(1, 8, 512, 60, DType::F16).backward(),
            Problem::new(1, 8, 512, 64, DType::F16).with_head_dim_v(264).backward(),
        ] {
            assert!(matches!(Plan::choose(&problem, &hardware), Err(Error::Unsupported { .. })), "{problem}");
        }
    }

    #[test]
    fn every_8_bit_problem_has_a_plan_on_hopper_or_a_reason_why_not() {
        let choose = |text: &str, target| Plan::choose(&text.parse().unwrap(), &Hardware::typical(target));
        for head_dim in (16..=256).step_by(16) {
            for rest in ["", " causal lse", " window(100,3) softcap=30 key-lengths", " out=f16 descales"] {
                for sizes in ["1x16x8192", "1x16/4x1/5000", "2x3x70"] {
                    let plan = choose(&format!("{sizes}x{head_dim} f8{rest}"), Target::Sm90a).unwrap();
                    assert_eq!(plan.kernel(), Kernel::Sm90Fwd, "{plan}");
                }
            }
        }
        for (text, target, why) in [
            ("1x2x64x72 f8", Target::Sm90a, "multiples of 16"),
            ("1x2x64x512 f8", Target::Sm90a, "multiples of 16"),
            ("1x2x64x64 f8", Target::Sm80, "e4m3"),
        ] {
            match choose(text, target) {
                Err(Error::Unsupported { what, .. }) => assert!(what.contains(why), "{text}: {what}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }

    #[test]
    fn what_tensor_cores_do_not_take_runs_on_the_scalar_kernel() {
        let chosen = |problem: &Problem, target| {
            let plan = Plan::choose(problem, &Hardware::typical(target)).unwrap();
            plan.main().module(target).unwrap();
            plan.kernel()
        };
        for problem in [
            Problem::new(1, 8, 512, 64, DType::F32),
            Problem::new(1, 8, 512, 65, DType::F16),
            Problem::new(1, 8, 512, 64, DType::BF16).with_head_dim_v(1),
            Problem::new(1, 8, 512, 512, DType::F16),
            Problem::new(1, 8, 512, 64, DType::BF16).with_head_dim_v(1024),
        ] {
            for target in [Target::Sm80, Target::Sm89, Target::Sm90a] {
                assert_eq!(chosen(&problem, target), Kernel::Scalar, "{problem} on {target}");
            }
        }
        for many in [Problem::new(70_000, 8, 16, 64, DType::F16), Problem::new(1, 70_000, 16, 64, DType::F16)]
        {
            assert_eq!(chosen(&many, Target::Sm80), Kernel::Scalar);
            assert_eq!(chosen(&many, Target::Sm90a), Kernel::Sm90Fwd);
        }
    }

    #[test]
    fn scales_and_softcaps_that_the_fast_way_gets_wrong_are_computed_exactly() {
        let mission = Problem::new(1, 8, 512, 64, DType::F16);
        let scaled = |problem: Problem| plan(problem).main().spec.scaled_scores;
        let capped = mission.with_softcap(50.0);
        for usual in [mission, capped, capped.with_lse(), mission.with_scale(1e-3), mission.with_scale(1e6)] {
            assert!(!scaled(usual), "{usual}");
        }
        for unusual in [-0.125, 0.0, 1e-3, 1e6] {
            assert!(scaled(capped.with_scale(unusual)), "a softcap with a scale of {unusual}");
        }
        let caps = [1e-39, 100.0, 1e3, 1e30, f32::MAX].map(|cap| mission.with_softcap(cap));
        for unusual in caps.into_iter().chain([3e38, 1e-39].map(|scale| mission.with_scale(scale))) {
            assert!(scaled(unusual), "{unusual}");
        }
    }

    #[test]
    fn heads_that_are_too_far_apart_to_be_rows_are_refused_but_where_tma_counts() {
        let decode = Problem::new(1, 4, 1, 64, DType::F16).with_kv(1, 100);
        let packs = |target, to_head| {
            let plan = Plan::choose(&decode, &Hardware::typical(target)).unwrap();
            let apart = Layout { shape: [1, 4, 1, 64], strides: [4 * to_head, to_head, 64, 1] };
            let (far, kv) = ((0, apart), (0, Layout::bhsd([1, 1, 100, 64])));
            let at = |name, (address, layout)| (name, address, layout);
            let bindings =
                Bindings::of([at(Name::Q, far), at(Name::K, kv), at(Name::V, kv), at(Name::O, far)]);
            plan.bind(&bindings, &mut |_| Ok(TensorMap::default())).map(|_| ())
        };
        let (near, far) = (MAX_ROW_STRIDE as usize / 2, MAX_ROW_STRIDE as usize);
        assert_eq!(packs(Target::Sm80, near), Ok(()));
        assert!(matches!(packs(Target::Sm80, far), Err(Error::Unsupported { .. })));
        assert_eq!(packs(Target::Sm90a, far), Ok(()));
    }

    #[test]
    fn windows_beyond_every_key_are_cut_to_fit_the_kernel() {
        let mask = Mask::Window { left: Some(usize::MAX), right: Some(0) };
        let plan = plan(Problem::new(1, 1, 100, 64, DType::F16).with_mask(mask));
        let at = (0, Layout::bhsd([1, 1, 100, 64]));
        let args =
            plan.args(&Bindings::of([Name::Q, Name::K, Name::V, Name::O].map(|name| (name, at.0, at.1))));
        assert_eq!((args.left, args.right), (200, 0));
    }
}
