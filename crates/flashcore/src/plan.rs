//! Plan: a problem with a kernel, a schedule and a launch chosen for it.
//!
//! Choosing is a pure function of the problem and the hardware, so a plan can be printed, tested as a table and
//! made for a GPU that is not there.

use flashcore_kernels::{Dtype, FwdParams, ScheduleError, Spec};
pub use flashcore_kernels::{Kernel, Schedule};
pub use flashcore_ptx::Target;
use flashcore_ptx::{GlobalPtr, Module};

use crate::{DType, Error, Layout, Problem, Result};

/// The longest sequences that the kernels take: so that the sum of two lengths, a window and a tile fits 31 bits.
pub const MAX_KERNEL_LEN: usize = 1 << 28;

/// The most blocks in the second and third dimension of a grid.
const MAX_GRID_YZ: usize = 65535;

/// Alignment of addresses and row strides: the kernels move 16 bytes at once.
pub(crate) const ALIGNMENT: usize = 16;

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

/// A problem with a kernel, a schedule and a launch chosen for it.
///
/// ```
/// use flashcore::plan::{Hardware, Plan};
/// use flashcore::{DType, Problem};
/// # use flashcore::plan::Target;
/// let problem = Problem::new(1, 8, 512, 64, DType::F16);
/// let plan = Plan::choose(&problem, &Hardware::typical(Target::Sm80))?;
/// assert_eq!(plan.grid, [8, 8, 1]); // 64 queries a block
/// println!("{plan}");
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// What is asked.
    pub problem: Problem,
    /// What the kernel is compiled for.
    pub spec: Spec,
    /// The kernel's knobs.
    pub schedule: Schedule,
    /// The target of the code.
    pub target: Target,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads a block.
    pub threads: u32,
    /// Shared memory a block, in bytes.
    pub shared_bytes: u32,
    /// Why this schedule.
    pub reason: String,
}

impl Plan {
    /// The plan for a problem on some hardware.
    pub fn choose(problem: &Problem, hardware: &Hardware) -> Result<Self> {
        let spec = spec(problem, &hardware.name)?;
        let (schedule, reason) = choose_schedule(problem, &spec, hardware)
            .map_err(|error| unsupported(&hardware.name, &spec, &error))?;
        Self::assemble(problem, spec, schedule, hardware.target, reason)
    }

    /// The plan with a schedule of the caller's.
    pub fn with_schedule(problem: &Problem, hardware: &Hardware, schedule: Schedule) -> Result<Self> {
        let spec = spec(problem, &hardware.name)?;
        schedule.check(&spec, hardware.target).map_err(|error| unsupported(&hardware.name, &spec, &error))?;
        Self::assemble(problem, spec, schedule, hardware.target, "asked for".into())
    }

    /// The plan with the default schedule of a kernel.
    pub fn with_kernel(problem: &Problem, hardware: &Hardware, kernel: Kernel) -> Result<Self> {
        let spec = spec(problem, &hardware.name)?;
        let schedule = kernel
            .default_schedule(&spec, hardware.target)
            .map_err(|error| unsupported(&hardware.name, &spec, &error))?;
        Self::assemble(problem, spec, schedule, hardware.target, format!("the default of {kernel}"))
    }

    fn assemble(
        problem: &Problem,
        spec: Spec,
        schedule: Schedule,
        target: Target,
        reason: String,
    ) -> Result<Self> {
        let geometry = schedule.geometry(&spec);
        let grid = geometry.grid(problem.batch as u32, problem.heads_q as u32, problem.len_q as u32);
        if grid[1..].iter().any(|&size| size as usize > MAX_GRID_YZ) {
            return Err(Error::Unsupported {
                device: target.to_string(),
                what: format!("a grid of {grid:?} blocks"),
                possible: format!("up to {MAX_GRID_YZ} batch entries, heads and row blocks"),
            });
        }
        let (threads, shared_bytes) = (geometry.threads, geometry.shared_bytes);
        Ok(Self { problem: *problem, spec, schedule, target, grid, threads, shared_bytes, reason })
    }

    /// The kernel.
    pub fn kernel(&self) -> Kernel {
        self.schedule.kernel()
    }

    /// Blocks in all.
    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }

    /// The kernel's code.
    pub fn module(&self) -> Result<Module> {
        self.schedule
            .emit(&self.spec, self.target)
            .map_err(|error| unsupported(&self.target.to_string(), &self.spec, &error))
    }

    /// The launch parameters for tensors at these addresses.
    pub fn params(&self, tensors: &Addresses) -> FwdParams {
        let problem = &self.problem;
        let bytes = |layout: &Layout, dim: usize, size: usize| (layout.strides[dim] * size) as u64;
        let size = problem.dtype.size();
        let band = problem.mask.band();
        // A bound this large reaches over every key from every query.
        let unlimited = problem.len_q + problem.len_k;
        let bound = |side: Option<usize>| side.map_or(unlimited, |side| side.min(unlimited)) as i32;
        let log2_e = std::f32::consts::LOG2_E;
        let Addresses { q, k, v, o, lse, key_lengths } = tensors;
        let (lse_address, lse_layout) = lse.unwrap_or((0, Layout::bhsd([0; 4])));
        FwdParams {
            q: GlobalPtr(q.0),
            k: GlobalPtr(k.0),
            v: GlobalPtr(v.0),
            o: GlobalPtr(o.0),
            lse: GlobalPtr(lse_address),
            key_lengths: GlobalPtr(key_lengths.unwrap_or(0)),
            q_batch: bytes(&q.1, 0, size),
            q_head: bytes(&q.1, 1, size),
            q_row: bytes(&q.1, 2, size),
            k_batch: bytes(&k.1, 0, size),
            k_head: bytes(&k.1, 1, size),
            k_row: bytes(&k.1, 2, size),
            v_batch: bytes(&v.1, 0, size),
            v_head: bytes(&v.1, 1, size),
            v_row: bytes(&v.1, 2, size),
            o_batch: bytes(&o.1, 0, size),
            o_head: bytes(&o.1, 1, size),
            o_row: bytes(&o.1, 2, size),
            lse_batch: bytes(&lse_layout, 0, 4),
            lse_head: bytes(&lse_layout, 1, 4),
            lse_row: bytes(&lse_layout, 2, 4),
            len_q: problem.len_q as u32,
            len_k: problem.len_k as u32,
            group: problem.group() as u32,
            left: bound(band.left),
            right: bound(band.right),
            exp_scale: problem.softcap.unwrap_or(problem.scale) * log2_e,
            tanh_scale: problem.softcap.map_or(0.0, |softcap| problem.scale / softcap),
        }
    }
}

/// Where the tensors of a launch are, in the device's memory.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// The queries.
    pub q: (u64, Layout),
    /// The keys.
    pub k: (u64, Layout),
    /// The values.
    pub v: (u64, Layout),
    /// The output.
    pub o: (u64, Layout),
    /// The lse, if it is wanted.
    pub lse: Option<(u64, Layout)>,
    /// The key lengths, one u32 a batch entry, if there are any.
    pub key_lengths: Option<u64>,
}

/// What a kernel for this problem is compiled for.
fn spec(problem: &Problem, device: &str) -> Result<Spec> {
    let refuse = |what: String, possible: &str| {
        Err(Error::Unsupported { device: device.into(), what, possible: possible.into() })
    };
    let dtype = match problem.dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::Bf16,
        DType::F32 => return refuse("f32".into(), "f16 and bf16; f32 runs on the CPU"),
    };
    for (what, len) in [("queries", problem.len_q), ("keys", problem.len_k)] {
        if len > MAX_KERNEL_LEN {
            return refuse(format!("{len} {what}"), "up to 2^28 a head");
        }
    }
    for (what, count) in [("batch entries", problem.batch), ("heads", problem.heads_q)] {
        if count > MAX_GRID_YZ {
            return refuse(format!("{count} {what}"), "up to 65535");
        }
    }
    let band = problem.mask.band();
    let masked = band.left.is_some() || band.right.is_some();
    Ok(Spec {
        dtype,
        head_dim: problem.head_dim as u32,
        head_dim_v: problem.head_dim_v as u32,
        left: band.left.is_some(),
        right: band.right.is_some(),
        top_left: masked && band.top_left,
        softcap: problem.softcap.is_some(),
        key_lengths: problem.key_lengths,
        grouped: problem.heads_kv != problem.heads_q,
        lse: problem.lse,
    })
}

fn unsupported(device: &str, spec: &Spec, error: &ScheduleError) -> Error {
    let what = format!("head_dim {} with head_dim_v {} ({error})", spec.head_dim, spec.head_dim_v);
    Error::Unsupported { device: device.into(), what, possible: "multiples of 8 up to 256".into() }
}

/// The schedule for a problem, and why.
fn choose_schedule(
    problem: &Problem,
    spec: &Spec,
    hardware: &Hardware,
) -> Result<(Schedule, String), ScheduleError> {
    let blocks = |rows: usize| problem.len_q.div_ceil(rows) * problem.heads_q * problem.batch;
    let fills = blocks(128) >= hardware.sms as usize;
    let reason = if fills {
        format!("{} blocks of 128 queries fill {} SMs", blocks(128), hardware.sms)
    } else {
        let (large, small, sms) = (blocks(128), blocks(64), hardware.sms);
        format!("{large} blocks of 128 queries would leave SMs of {sms} idle; 64 make {small}")
    };
    let candidates = Kernel::Sm80Fwd.schedules(spec);
    let rows = |schedule: &Schedule| schedule.geometry(spec).rows;
    let (large, small): (Vec<Schedule>, Vec<Schedule>) = candidates.into_iter().partition(|s| rows(s) > 64);
    let candidates = if fills { [large, small] } else { [small, large] };
    let mut refused = None;
    for schedule in candidates.into_iter().flatten() {
        match schedule.check(spec, hardware.target) {
            Ok(()) => return Ok((schedule, reason)),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.unwrap_or_else(|| ScheduleError::Malformed { reason: "no schedule to try".into() }))
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "problem   {}", self.problem)?;
        writeln!(f, "kernel    {} for {}", self.kernel(), self.target)?;
        writeln!(f, "schedule  {}", self.schedule)?;
        writeln!(f, "why       {}", self.reason)?;
        writeln!(f, "grid      {:?} of {} threads", self.grid, self.threads)?;
        write!(f, "shared    {} bytes of {} a block", self.shared_bytes, self.target.max_shared_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mask;

    fn plan(problem: Problem) -> Plan {
        Plan::choose(&problem, &Hardware::typical(Target::Sm80)).unwrap()
    }

    #[test]
    fn small_grids_get_small_blocks() {
        assert_eq!(plan(Problem::new(1, 8, 512, 64, DType::F16)).grid, [8, 8, 1]);
        assert_eq!(plan(Problem::new(4, 16, 2048, 64, DType::F16)).grid, [16, 16, 4]);
    }

    #[test]
    fn causal_blocks_run_longest_first() {
        let causal = plan(Problem::new(4, 16, 2048, 64, DType::F16).with_mask(Mask::Causal));
        assert_eq!(causal.grid, [16, 4, 16]);
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
            Problem::new(1, 8, 512, 64, DType::F32),
            Problem::new(1, 8, 512, 65, DType::F16),
            Problem::new(1, 8, 512, 512, DType::F16),
            Problem::new(1, 8, MAX_KERNEL_LEN + 1, 64, DType::F16),
            Problem::new(70_000, 8, 16, 64, DType::F16),
        ] {
            assert!(matches!(Plan::choose(&problem, &hardware), Err(Error::Unsupported { .. })), "{problem}");
        }
    }

    #[test]
    fn windows_beyond_every_key_are_cut_to_fit_the_kernel() {
        let mask = Mask::Window { left: Some(usize::MAX), right: Some(0) };
        let plan = plan(Problem::new(1, 1, 100, 64, DType::F16).with_mask(mask));
        let at = (0, Layout::bhsd([1, 1, 100, 64]));
        let params = plan.params(&Addresses { q: at, k: at, v: at, o: at, lse: None, key_lengths: None });
        assert_eq!((params.left, params.right), (200, 0));
    }
}
