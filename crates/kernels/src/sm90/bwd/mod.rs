//! The backward kernel for Hopper: `wgmma`, TMA, warp specialisation, and gradients of the queries that are added up in a
//! fixed order.
//!
//! A block has 128 keys of one head: two consumer warpgroups hold 64 of them each, with dK and dV in their registers. It
//! walks over the tiles of queries that see them, from the last to the first, and over the query heads that share them.
//! For each, a warpgroup computes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ: what a thread then has of Pᵀ and dSᵀ are the A operands of dV
//! += Pᵀ dO and dK += dSᵀ Q as they stand. Only dS goes through shared memory, where both warpgroups need all of it for their
//! parts of dQ = dS K. The products that begin the next step are issued before this step's last one is waited for.
//!
//! All key tiles of a head add to the same dQ, in f32 and in L2. They take turns: a block adds to a query tile when the
//! block before it has, so that every run adds up in the same order. Blocks follow each other through the query tiles at the
//! distance of one such turn. Where all have the same length, that costs time only once; under a mask, blocks also wait for
//! those that began late. Where all walks are whole rounds, blocks may begin at different tiles (`rotation.rs`), and then none
//! has to wait. The last kernel, [`finish`], scales and rounds what they leave.

mod block;
mod consumer;
pub mod finish;
mod params;
mod parts;
mod producer;
mod rotation;
mod tails;
pub mod wide;
mod writer;

use flashcore_ptx::{GridDep, KernelBuilder, Shared, SharedLayout, Target, TensorMap};

pub use self::params::{BwdParams, PackedGradients, RoundingParams};
use self::{consumer::Consumer, producer::Producer, writer::Writer};
use super::fwd::{PITCH, columns, panels};
use crate::{
    Args, Blocks, Family, Geometry, Map, Operand, Packed, ROW_PADDING, ScheduleError, Spec,
    family::{check_registers, schedule},
};

/// The largest head dim: dK and dV are in registers.
pub const MAX_HEAD_DIM: u32 = 128;
/// Consumer warpgroups.
const WARPGROUPS: u32 = 2;
/// Keys of a warpgroup, and rows of what one `wgmma` computes.
const ROWS: u32 = 64;
/// Keys of a block.
pub const KEYS: u32 = WARPGROUPS * ROWS;
/// Threads that compute.
const CONSUMERS: u32 = 128 * WARPGROUPS;
/// Slots for tiles of dO.
const DO_STAGES: u32 = 2;
/// Tiles of dS: one is written while the other is read.
const DS_STAGES: u32 = 2;
/// Bytes behind a tile of queries that hold a number per row.
const STATISTICS: u32 = 1024;
/// Registers besides the fragments.
const OTHER_REGISTERS: u32 = 24;

// Named barriers; 0 is the block's own.
/// The first of one barrier per writer and warpgroup: its part of dQ is in shared memory.
const DQ_FULL: u32 = 1;
/// The first of one barrier per warpgroup: its part of dQ has been read from there.
const DQ_EMPTY: u32 = 5;
/// All consumers.
const ALL: u32 = 7;
/// The first of one barrier per warpgroup for its own threads.
const OWN: u32 = 8;
/// The first of one barrier per warpgroup for its turn at the tensor cores.
const TURN: u32 = 10;

schedule! {
    /// The knobs of the kernel.
    pub struct Schedule {
        /// Queries per step: 64, or 128 with head dims up to 64.
        pub block_m: u32,
        /// Slots for tiles of queries: 2 to 4.
        pub stages: u32,
        /// Whether warpgroups take turns at the tensor cores, so that one computes scores while the other multiplies.
        pub pingpong: bool,
        /// Whether the blocks of a head begin their walks at different query tiles, so that none waits for its turn from the
        /// start; without a mask.
        pub rotate: bool = false,
        /// Whether the block that adds last to a tile of dQ scales, rounds and stores it, so that no launch has to. Every
        /// query has to see a key.
        pub rounds: bool = false,
    }
}

/// A kernel's shared memory.
struct Memory {
    layout: SharedLayout,
    k: Shared,
    v: Shared,
    q: Shared,
    d_o: Shared,
    ds: Shared,
    dq: Shared,
    q_bars: Shared,
    do_bars: Shared,
    ds_bars: Shared,
    k_bar: Shared,
    v_bar: Shared,
    /// Where the last to add rounds, a barrier for each writer: what others added to a tile is there.
    sum_bars: Option<Shared>,
    /// Where queries are packed, a barrier for each producer: a sequence's last tile is there, with rows of the next.
    landed: Option<[Shared; 2]>,
}

/// Bytes of the tiles.
#[derive(Clone, Copy)]
struct Sizes {
    /// A panel of a query tile.
    q_panel: u32,
    /// A panel of a key tile.
    k_panel: u32,
    q: u32,
    d_o: u32,
    k: u32,
    v: u32,
    /// A slot of queries, with a number for each.
    q_slot: u32,
    do_slot: u32,
    /// A tile of dS.
    ds: u32,
    /// A warpgroup's part of dQ, in f32.
    dq_part: u32,
}

impl Schedule {
    /// Whether there are registers for the next step's dP before this step's dQ has left them.
    fn is_roomy(self, spec: &Spec) -> bool {
        spec.head_dim + spec.head_dim_v <= 128 && self.block_m == ROWS
    }

    /// Whether each warpgroup computes dQ of its own queries, rather than its own columns.
    pub(crate) fn parts_by_rows(self) -> bool {
        self.block_m == WARPGROUPS * ROWS
    }

    /// Columns of dQ that one warpgroup computes: those beyond the head dim are 0, and none lie in two panels.
    pub(crate) fn part_columns(self, head_dim: u32) -> u32 {
        match head_dim {
            dim if self.parts_by_rows() => dim,
            dim @ ..=64 => (dim / 2).next_multiple_of(8),
            _ => 64,
        }
    }

    /// Copies of dQ that are added up apart.
    pub fn copies(self) -> u32 {
        if self.rotate { rotation::COPIES } else { 1 }
    }

    /// Query tiles that a head has room for in the workspace.
    pub fn query_tiles(self, len_q: u32) -> u32 {
        len_q.div_ceil(ROW_PADDING) * (ROW_PADDING / self.block_m)
    }

    /// The same for a launch.
    fn head_tiles(self, spec: &Spec, args: &Args) -> u32 {
        self.query_tiles(ROW_PADDING * args.head_tiles(Operand::Q, spec.packed_q, ROW_PADDING))
    }

    /// Bytes of a tile of dQ in f32.
    pub fn dq_tile_bytes(self, head_dim: u32) -> u32 {
        WARPGROUPS * ROWS * self.part_columns(head_dim) * 4
    }

    fn sizes(self, spec: &Spec) -> Sizes {
        let (of_qk, of_v) = (panels(spec.head_dim, spec.dtype), panels(spec.head_dim_v, spec.dtype));
        let (q_panel, k_panel) = (self.block_m * PITCH, KEYS * PITCH);
        Sizes {
            q_panel,
            k_panel,
            q: of_qk * q_panel,
            d_o: of_v * q_panel,
            k: of_qk * k_panel,
            v: of_v * k_panel,
            q_slot: of_qk * q_panel + STATISTICS,
            do_slot: of_v * q_panel + STATISTICS,
            ds: self.block_m * KEYS * 2,
            dq_part: ROWS * self.part_columns(spec.head_dim) * 4,
        }
    }

    fn memory(self, spec: &Spec) -> Memory {
        let sizes = self.sizes(spec);
        let mut layout = SharedLayout::new();
        let mut tiles = |name: &str, bytes: u32| layout.alloc(name, bytes, 1024);
        let (k, v) = (tiles("k", sizes.k), tiles("v", sizes.v));
        let (q, d_o) = (tiles("q", self.stages * sizes.q_slot), tiles("do", DO_STAGES * sizes.do_slot));
        let (ds, dq) = (tiles("ds", DS_STAGES * sizes.ds), tiles("dq", WARPGROUPS * sizes.dq_part));
        let mut bars = |name: &str, count: u32| layout.alloc(name, 8 * count, 8);
        let (q_bars, do_bars) = (bars("q barriers", 2 * self.stages), bars("do barriers", 2 * DO_STAGES));
        let ds_bars = bars("ds barriers", 2 * DS_STAGES);
        let (k_bar, v_bar) = (bars("k barrier", 1), bars("v barrier", 1));
        let sum_bars = self.rounds.then(|| bars("sum barriers", 2));
        let landed =
            spec.packed_q.then(|| ["q landed barrier", "do landed barrier"].map(|name| bars(name, 1)));
        Memory { layout, k, v, q, d_o, ds, dq, q_bars, do_bars, ds_bars, k_bar, v_bar, sum_bars, landed }
    }

    /// About how many registers a consumer's thread needs: the gradients, and the larger of what is there while scores
    /// are computed and while the queries' gradients are.
    fn registers(self, spec: &Spec) -> u32 {
        let Schedule { block_m, .. } = self;
        let gradients = spec.head_dim / 2 + spec.head_dim_v / 2;
        let ahead = if self.is_roomy(spec) { block_m } else { block_m / 2 };
        let next = ahead + block_m / 4 + self.part_columns(spec.head_dim) / 2;
        gradients + (block_m + block_m / 8).max(next) + OTHER_REGISTERS
    }

    /// Whether the knobs make a kernel for these head dims.
    fn check_shape(self, spec: &Spec) -> Result<(), ScheduleError> {
        let refuse = |reason: String| Err(ScheduleError::Malformed { reason });
        if !(2..=4).contains(&self.stages) || ![64, 128].contains(&self.block_m) {
            let Schedule { block_m, stages, .. } = self;
            return refuse(format!(
                "block_m {block_m} and {stages} stages: possible are 64 and 128, and 2 to 4"
            ));
        }
        if self.block_m > 64 && spec.head_dim.max(spec.head_dim_v) > 64 {
            return refuse("block_m 128: possible with head dims up to 64".into());
        }
        if self.rotate && spec.is_masked() {
            return refuse("walks are whole rounds only without a mask: take rotate=0".into());
        }
        if self.rounds {
            // A part has room for rounded rows, in whole panels.
            let panels = if self.parts_by_rows() { spec.head_dim >= 32 } else { spec.head_dim > 64 };
            let packed = spec.packed_q || spec.packed_k;
            if self.rotate || !panels || packed || spec.key_lengths || spec.left {
                return refuse(
                    "rounds=1: possible for dense tensors without key lengths and left bounds, with rotate=0, and with \
                     block_m=128 from head_dim 32 on, or block_m=64 above head_dim 64"
                        .into(),
                );
            }
        }
        if spec.head_dim.max(spec.head_dim_v) > MAX_HEAD_DIM {
            let Spec { head_dim, head_dim_v, .. } = *spec;
            let possible = "multiples of 8 from 8 to 128";
            return Err(ScheduleError::HeadDim { head_dim, head_dim_v, possible });
        }
        Ok(())
    }

    /// Registers of a producer's thread and of a consumer's.
    fn shares(self, spec: &Spec) -> (u16, u16) {
        let many = spec.head_dim + spec.head_dim_v > 192 || self.block_m > ROWS;
        if many { (24, 240) } else { (40, 232) }
    }

    fn threads() -> u32 {
        CONSUMERS + 128
    }

    fn initialise(self, k: &mut KernelBuilder, memory: &Memory) {
        k.section("barriers");
        k.griddepcontrol(GridDep::LaunchDependents);
        let tid = k.tid_x();
        let first = k.setp_eq_u32(tid, 0u32);
        k.if_(first, |k| {
            // dS is written, and every slot released, by one thread of each warp.
            let warps = CONSUMERS / 32;
            let rings = [
                (memory.q_bars, self.stages, 1),
                (memory.do_bars, DO_STAGES, 1),
                (memory.ds_bars, DS_STAGES, warps),
            ];
            for (bars, stages, fillers) in rings {
                for stage in 0..stages {
                    k.mbarrier_init(bars.at((16 * stage) as i32), fillers);
                    k.mbarrier_init(bars.at((16 * stage + 8) as i32), warps);
                }
            }
            k.mbarrier_init(memory.k_bar, 1u32);
            k.mbarrier_init(memory.v_bar, 1u32);
            if let Some(bars) = memory.sum_bars {
                k.mbarrier_init(bars, 1u32);
                k.mbarrier_init(bars.at(8), 1u32);
            }
            for &landed in memory.landed.iter().flatten() {
                k.mbarrier_init(landed, 1u32);
            }
            k.fence_mbarrier_init();
        });
        k.bar_sync_all();
    }
}

impl Family for Schedule {
    const PROGRAMMATIC: bool = true;

    fn check(self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        self.check_shape(spec)?;
        self.memory(spec).layout.fits(target)?;
        check_registers(self.registers(spec), 0, u32::from(self.shares(spec).1))
    }

    fn geometry(self, spec: &Spec) -> Geometry {
        Geometry {
            rows: KEYS,
            threads: Self::threads(),
            shared_bytes: self.memory(spec).layout.bytes(),
            blocks: Blocks::KeyRow,
        }
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let memory = self.memory(spec);
        let mut k = KernelBuilder::new("flashcore_sm90_bwd", target)
            .params::<BwdParams>()
            .shared(memory.layout.clone())
            .threads(Self::threads())
            .min_blocks_per_sm(1);
        k = PackedGradients::declare(k, spec);
        if self.rounds {
            k = k.more_params::<RoundingParams>();
        }
        let tid = k.tid_x();
        let warp = k.shr_u32(tid, 5u32);
        // Taken from one lane, so that the assembler knows that it is the same in all.
        let warp = k.shfl_idx(warp, 0u32);
        self.initialise(&mut k, &memory);
        k.roles(warp, |roles| {
            roles.warps(0..CONSUMERS / 32, |k| {
                k.setmaxnreg_inc(self.shares(spec).1);
                Consumer::new(k, self, spec, &memory).run(k);
            });
            roles.others(|k| {
                k.setmaxnreg_dec(self.shares(spec).0);
                // Whole warps, where they clear what they have copied.
                let (number, scale) = if spec.packed_q { (warp, 32) } else { (tid, 1) };
                let first = k.setp_eq_u32(number, CONSUMERS / scale);
                k.if_(first, |k| Producer::of_queries(k, self, spec, &memory).run(k));
                let second = k.setp_eq_u32(number, (CONSUMERS + 32) / scale);
                k.if_(second, |k| Producer::of_gradients(k, self, spec, &memory).run(k));
                let parity = k.sub_u32(warp, CONSUMERS / 32 + 2);
                let writes = k.setp_lt_u32(parity, 2u32);
                k.if_(writes, |k| Writer::new(k, self, spec, &memory, parity).run(k));
            });
        });
        k
    }

    fn bind<E>(
        self,
        spec: &Spec,
        args: &Args,
        encode: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        packed.push(&BwdParams::bind(self, spec, args, encode)?);
        PackedGradients::bind(spec, args, packed);
        if self.rounds {
            packed.extend(&RoundingParams::bind(spec, args, encode)?);
        }
        Ok(())
    }
}
