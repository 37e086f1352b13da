//! Plan: a problem with a kernel, a schedule and a launch chosen for it.
//!
//! Choosing is a pure function of the problem, the hardware and the table of what searches found, so a plan can be
//! printed, tested as a table and made for a GPU that is not there.

mod fold;
mod hopper;

use flashcore_kernels::{
    Divisor, Dtype, FwdParams, MAX_ROW_STRIDE, ScheduleError, Sm90Params, Spec, sm90_fwd, sm90_fwd::Walk,
};
pub use flashcore_kernels::{Kernel, Schedule};
pub use flashcore_ptx::Target;
use flashcore_ptx::{GlobalPtr, KernelParams, Module, TensorMap};

pub(crate) use self::fold::fold;
use self::fold::fold_tensors;
use crate::{DType, Error, Layout, Problem, Result, error::Name, tuned::Table};

/// The longest sequences that the kernels take: so that the sum of two lengths, a window and a tile fits 31 bits.
pub const MAX_KERNEL_LEN: usize = 1 << 28;

/// The most blocks in the second and third dimension of a grid.
const MAX_GRID_YZ: usize = 65535;

/// The most tiles of queries in a launch: clusters of eight are still fewer than 2^31 blocks.
const MAX_TILES: u64 = 1 << 28;

/// Keys and values of the heads that are taken up together, in bytes: they should stay in the L2 cache.
const SECTION_BYTES: u64 = 32 << 20;

/// From so many tiles of queries on, how they are ordered is not worth working out.
const MANY_TILES: u64 = 1 << 16;

/// What a tile of queries costs beside its key tiles, in key tiles.
const TILE_OVERHEAD: u64 = 1;

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
    /// Blocks of a cluster; 1 without clusters.
    pub cluster: u32,
    /// Shared memory a block, in bytes.
    pub shared_bytes: u32,
    /// Why this schedule.
    pub reason: String,
    /// The problem as the kernel sees it.
    folded: Problem,
    /// Queries a block.
    rows: u32,
    /// Heads whose tiles of queries are taken up together.
    section: u32,
}

impl Plan {
    /// The plan for a problem on some hardware.
    pub fn choose(problem: &Problem, hardware: &Hardware) -> Result<Self> {
        Self::choose_by(problem, hardware, Table::current())
    }

    /// The plan for a problem on some hardware, by a given table of what searches found.
    pub fn choose_by(problem: &Problem, hardware: &Hardware, tuned: &Table) -> Result<Self> {
        let folded = &fold(problem);
        let spec = spec(folded, &hardware.name)?;
        if let Some((entry, origin)) = tuned.find(problem, &spec, hardware) {
            let gain = 100.0 * (entry.speed_up - 1.0);
            let reason = format!(
                "{origin}: {gain:.1} % faster than the planner's choice, measured on {}",
                entry.problem
            );
            return Self::assemble(problem, spec, entry.schedule, hardware, reason);
        }
        let (schedule, reason) =
            choose_schedule(folded, &spec, hardware).map_err(|error| unsupported(&hardware.name, &error))?;
        Self::assemble(problem, spec, schedule, hardware, reason)
    }

    /// The plan with a schedule of the caller's.
    pub fn with_schedule(problem: &Problem, hardware: &Hardware, schedule: Schedule) -> Result<Self> {
        let spec = spec(&fold(problem), &hardware.name)?;
        schedule.check(&spec, hardware.target).map_err(|error| unsupported(&hardware.name, &error))?;
        Self::assemble(problem, spec, schedule, hardware, "asked for".into())
    }

    /// The plan with the default schedule of a kernel.
    pub fn with_kernel(problem: &Problem, hardware: &Hardware, kernel: Kernel) -> Result<Self> {
        let spec = spec(&fold(problem), &hardware.name)?;
        let schedule = kernel
            .default_schedule(&spec, hardware.target)
            .map_err(|error| unsupported(&hardware.name, &error))?;
        Self::assemble(problem, spec, schedule, hardware, format!("the default of {kernel}"))
    }

    fn assemble(
        problem: &Problem,
        spec: Spec,
        schedule: Schedule,
        hardware: &Hardware,
        reason: String,
    ) -> Result<Self> {
        let geometry = schedule.geometry(&spec);
        let folded = fold(problem);
        let (batch, heads, len_q) = (folded.batch as u32, folded.heads_q as u32, folded.len_q as u32);
        let target = hardware.target;
        let grid = geometry.grid(batch, heads, len_q, hardware.sms);
        let tiles = geometry.tiles(batch, heads, len_q);
        if grid[1..].iter().any(|&size| size as usize > MAX_GRID_YZ) || tiles > MAX_TILES {
            return Err(Error::Unsupported {
                device: target.to_string(),
                what: format!("a grid of {grid:?} blocks"),
                possible: format!("up to {MAX_GRID_YZ} batch entries, heads and row blocks"),
            });
        }
        let (threads, shared_bytes, cluster) = (geometry.threads, geometry.shared_bytes, geometry.cluster());
        let mut plan = Self {
            problem: *problem,
            folded,
            spec,
            schedule,
            target,
            grid,
            threads,
            cluster,
            shared_bytes,
            reason,
            rows: geometry.rows,
            section: 1,
        };
        if let Schedule::Sm90Fwd(schedule) = schedule
            && schedule.order(&plan.spec) == Walk::Sections
        {
            plan.section = plan.choose_section(schedule);
        }
        Ok(plan)
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
            .map_err(|error| unsupported(&self.target.to_string(), &error))
    }

    /// The launch parameters for tensors at these addresses, as the kernel reads them. `encode` makes the tensor maps
    /// that the kernel copies with, if it does. Nothing is allocated.
    pub fn pack(
        &self,
        tensors: &Addresses,
        encode: &mut dyn FnMut(&Map) -> Result<TensorMap>,
    ) -> Result<Packed> {
        let tensors = &fold_tensors(tensors, &self.problem, &self.folded);
        let schedule = match self.schedule {
            Schedule::Sm90Fwd(schedule) => schedule,
            Schedule::Scalar(_) => return Ok(Packed::new(&self.params(tensors))),
            Schedule::Sm80Mma(_) | Schedule::Sm80Fwd(_) => {
                self.check_rows(tensors)?;
                return Ok(Packed::new(&self.params(tensors)));
            }
        };
        let boxes = schedule.boxes();
        let mut map = |tensor: &(u64, Layout), rows: u32| encode(&self.map(tensor, tensors, rows));
        let maps = [
            map(&tensors.q, boxes.q)?,
            map(&tensors.k, boxes.kv)?,
            map(&tensors.v, boxes.kv)?,
            map(&tensors.o, boxes.o)?,
        ];
        Ok(Packed::new(&self.tile_params(tensors, maps)))
    }

    /// Refuses rows that are further apart than the kernels without TMA can count.
    fn check_rows(&self, tensors: &Addresses) -> Result<()> {
        let Addresses { q, k, v, o, .. } = tensors;
        for (tensor, (_, layout)) in [(Name::Q, q), (Name::K, k), (Name::V, v), (Name::O, o)] {
            let row = (layout.strides[2] * self.folded.dtype.size()) as u64;
            if layout.shape[2] > 1 && row > MAX_ROW_STRIDE {
                return Err(Error::Unsupported {
                    device: self.target.to_string(),
                    what: format!("rows of {tensor} that are {row} bytes apart"),
                    possible: format!("up to {MAX_ROW_STRIDE} bytes; copy {tensor} to a denser layout"),
                });
            }
        }
        Ok(())
    }

    /// What a tensor map describes: a tensor in boxes of so many rows.
    fn map(&self, tensor: &(u64, Layout), tensors: &Addresses, box_rows: u32) -> Map {
        let (address, Layout { shape: [batch, heads, len, dim], strides }) = *tensor;
        let row_bytes = (dim * self.folded.dtype.size()) as u64;
        // Where there is one entry, any distance to the next will do.
        let distance = |size: usize, dim: usize| {
            if size > 1 { (strides[dim] * self.folded.dtype.size()) as u64 } else { row_bytes }
        };
        let empty = [batch, heads, len].contains(&0);
        Map {
            dtype: self.folded.dtype,
            // Nothing is read of a tensor without elements, but its map needs an address.
            address: if empty { tensors.q.0 } else { address },
            dims: [dim, len, heads, batch].map(|size| size.max(1) as u64),
            strides: [distance(len, 2), distance(heads, 1), distance(batch, 0)],
            box_dims: [flashcore_kernels::sm90_fwd::Schedule::BOX_COLUMNS, box_rows, 1, 1],
        }
    }

    fn tile_params(&self, tensors: &Addresses, [q_map, k_map, v_map, o_map]: [TensorMap; 4]) -> Sm90Params {
        let params = self.params(tensors);
        let FwdParams { lse, key_lengths, o_batch, o_head, o_row, lse_batch, lse_head, lse_row, .. } = params;
        let FwdParams { o, len_q, len_k, group, left, right, exp_scale, tanh_scale, scale, softcap, .. } =
            params;
        let blocks = len_q.div_ceil(self.rows);
        let heads = self.folded.heads_q as u32;
        let all_heads = self.folded.batch as u32 * heads;
        let paired =
            matches!(self.schedule, Schedule::Sm90Fwd(schedule) if schedule.order(&self.spec) == Walk::Pairs);
        let head_items = if paired { blocks.div_ceil(2) } else { blocks };
        let section = self.section;
        let by = Divisor::new;
        Sm90Params {
            q_map,
            k_map,
            v_map,
            o_map,
            o,
            lse,
            key_lengths,
            o_batch,
            o_head,
            o_row,
            lse_batch,
            lse_head,
            lse_row,
            len_q,
            len_k,
            items: head_items * all_heads,
            head_items,
            blocks,
            section,
            heads,
            section_tiles_mul: by(section * blocks).mul,
            section_tiles_shift: by(section * blocks).shift,
            section_mul: by(section).mul,
            section_shift: by(section).shift,
            items_mul: by(head_items).mul,
            items_shift: by(head_items).shift,
            heads_mul: by(heads).mul,
            heads_shift: by(heads).shift,
            group_mul: by(group).mul,
            group_shift: by(group).shift,
            left,
            right,
            exp_scale,
            tanh_scale,
            scale,
            softcap,
        }
    }

    /// Heads whose tiles are taken up together, longest first: such that the blocks finish at about the same time,
    /// and if possible few enough that their keys and values stay in the cache.
    fn choose_section(&self, schedule: sm90_fwd::Schedule) -> u32 {
        let (rows, block_n) = (schedule.rows(), schedule.block_n);
        let Problem { batch, heads_q, len_q, len_k, head_dim, head_dim_v, .. } = self.folded;
        let heads = (batch * heads_q) as u32;
        let bytes = (len_k * (head_dim + head_dim_v) * self.folded.dtype.size()) as u64;
        let cached = (SECTION_BYTES * self.folded.group() as u64 / bytes.max(1)).max(1);
        let costs: Vec<u64> = (0..len_q.div_ceil(rows as usize))
            .rev()
            .map(|block| key_tiles(&self.folded, block, rows as usize, block_n as usize) + TILE_OVERHEAD)
            .collect();
        let candidates = (1..=heads).filter(|&section| heads.is_multiple_of(section));
        if !schedule.persistent || costs.len() as u64 * u64::from(heads) > MANY_TILES {
            // So many rounds come out even whatever the order, and blocks that end make room for the next in any.
            return candidates.filter(|&section| u64::from(section) <= cached).max().unwrap_or(1);
        }
        let score = |section: u32| {
            let longest = longest_share(&costs, heads, section, self.grid[0]);
            // Keys and values that fall out of the cache cost about as much as one block in eight more.
            if u64::from(section) > cached { longest + longest / 8 } else { longest }
        };
        candidates.min_by_key(|&section| score(section)).unwrap_or(1)
    }

    fn params(&self, tensors: &Addresses) -> FwdParams {
        let problem = &self.folded;
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
            // Finite, so that a dot product of 0 stays 0 under the smallest softcap.
            tanh_scale: problem
                .softcap
                .map_or(0.0, |softcap| (problem.scale / softcap).clamp(f32::MIN, f32::MAX)),
            scale: problem.scale,
            softcap: problem.softcap.unwrap_or(0.0),
            heads: problem.heads_q as u32,
        }
    }
}

/// The most bytes that the parameters of a kernel have.
const MAX_PARAM_BYTES: usize = 768;

/// The most parameters that a kernel has.
const MAX_PARAMS: usize = 48;

/// Launch parameters as bytes.
pub struct Packed {
    bytes: [u8; MAX_PARAM_BYTES],
    len: usize,
    places: [u16; MAX_PARAMS],
    count: usize,
}

impl Packed {
    fn new<P: KernelParams>(params: &P) -> Self {
        let mut packed = Self { bytes: [0; MAX_PARAM_BYTES], len: 0, places: [0; MAX_PARAMS], count: 0 };
        packed.len = params.pack_into(&mut packed.bytes);
        for (to, place) in packed.places.iter_mut().zip(P::offsets()) {
            *to = place as u16;
            packed.count += 1;
        }
        packed
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Where each parameter starts in the bytes.
    pub fn places(&self) -> &[u16] {
        &self.places[..self.count]
    }
}

/// What a tensor map describes; dimensions are counted from the innermost. Its boxes are permuted within 128 bytes, and
/// read zeros outside of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Map {
    /// The element type.
    pub dtype: DType,
    /// The address of the first element.
    pub address: u64,
    /// Elements of each dimension.
    pub dims: [u64; 4],
    /// Bytes between neighbours in each dimension but the first.
    pub strides: [u64; 3],
    /// Elements of a box in each dimension.
    pub box_dims: [u32; 4],
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
        DType::F32 => Dtype::F32,
    };
    for (what, len) in [("queries", problem.len_q), ("keys", problem.len_k)] {
        if len > MAX_KERNEL_LEN {
            return refuse(format!("{len} {what}"), "up to 2^28 a head");
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
        head_dim: problem.head_dim as u32,
        head_dim_v: problem.head_dim_v as u32,
        left: band.left.is_some(),
        right: band.right.is_some(),
        top_left: masked && band.top_left,
        softcap: problem.softcap.is_some(),
        scaled_scores: Spec::needs_scaled_scores(dtype, problem.scale, problem.softcap),
        key_lengths: problem.key_lengths,
        grouped: problem.heads_kv != problem.heads_q,
        lse: problem.lse,
    })
}

fn unsupported(device: &str, error: &ScheduleError) -> Error {
    let possible = "another kernel or schedule, or the planner's own choice".into();
    Error::Unsupported { device: device.into(), what: error.to_string(), possible }
}

/// What of a problem the kernels with tensor cores do not take, if anything.
fn no_tensor_cores(problem: &Problem, target: Target) -> Option<String> {
    let Problem { batch, heads_q, head_dim, head_dim_v, .. } = *problem;
    let possible = |dim: usize| dim.is_multiple_of(8) && dim <= flashcore_kernels::MAX_HEAD_DIM as usize;
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

/// The schedule for a problem, and why.
fn choose_schedule(
    problem: &Problem,
    spec: &Spec,
    hardware: &Hardware,
) -> Result<(Schedule, String), ScheduleError> {
    if let Some(what) = no_tensor_cores(problem, hardware.target) {
        let schedule = Kernel::Scalar.default_schedule(spec, hardware.target)?;
        return Ok((schedule, format!("{what} leaves the scalar kernel, which is right and slow")));
    }
    if hardware.target == Target::Sm90a
        && let Some(choice) = hopper::choose(problem, spec, hardware)
    {
        return Ok(choice);
    }
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

/// The key tiles that a block of rows sees.
fn key_tiles(problem: &Problem, block: usize, rows: usize, block_n: usize) -> u64 {
    let Problem { len_q, len_k, mask, .. } = *problem;
    let last_row = ((block + 1) * rows).min(len_q) - 1;
    let begin = mask.keys(block * rows, len_q, len_k).start;
    let end = mask.keys(last_row, len_q, len_k).end;
    if end <= begin { 0 } else { (end.div_ceil(block_n) - begin / block_n) as u64 }
}

/// The work of the block that has the most of it, when tiles of these costs are taken up section by section, every other
/// round backwards.
fn longest_share(costs: &[u64], heads: u32, section: u32, blocks: u32) -> u64 {
    let mut shares = vec![0_u64; blocks as usize];
    let tiles =
        (0..heads / section).flat_map(|_| costs.iter().flat_map(|&cost| (0..section).map(move |_| cost)));
    for (i, cost) in tiles.enumerate() {
        let (round, place) = (i / shares.len(), i % shares.len());
        let at = if round.is_multiple_of(2) { place } else { shares.len() - 1 - place };
        shares[at] += cost;
    }
    shares.into_iter().max().unwrap_or(0)
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "problem   {}", self.problem)?;
        if self.folded.len_q != self.problem.len_q {
            let heads = self.folded.len_q;
            writeln!(f, "folded    {heads} heads that share keys are the rows of one tile: {}", self.folded)?;
        }
        writeln!(f, "kernel    {} for {}", self.kernel(), self.target)?;
        writeln!(f, "schedule  {}", self.schedule)?;
        writeln!(f, "why       {}", self.reason)?;
        write!(f, "grid      {:?} of {} threads", self.grid, self.threads)?;
        if self.cluster > 1 {
            write!(f, ", in clusters of {}", self.cluster)?;
        }
        writeln!(f)?;
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
            Problem::new(1, 8, MAX_KERNEL_LEN + 1, 64, DType::F16),
            Problem::new(1 << 20, 1 << 10, 16, 64, DType::F16),
        ] {
            assert!(matches!(Plan::choose(&problem, &hardware), Err(Error::Unsupported { .. })), "{problem}");
        }
    }

    #[test]
    fn what_tensor_cores_do_not_take_runs_on_the_scalar_kernel() {
        let chosen = |problem: &Problem, target| {
            let plan = Plan::choose(problem, &Hardware::typical(target)).unwrap();
            plan.module().unwrap();
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
        let scaled = |problem: Problem| plan(problem).spec.scaled_scores;
        for usual in [mission, mission.with_softcap(50.0), mission.with_scale(1e-3), mission.with_scale(1e6)]
        {
            assert!(!scaled(usual), "{usual}");
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
            let tensors = Addresses { q: far, k: kv, v: kv, o: far, lse: None, key_lengths: None };
            plan.pack(&tensors, &mut |_| Ok(TensorMap::default())).map(|_| ())
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
        let params = plan.params(&Addresses { q: at, k: at, v: at, o: at, lse: None, key_lengths: None });
        assert_eq!((params.left, params.right), (200, 0));
    }
}
