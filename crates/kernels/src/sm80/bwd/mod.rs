//! Gradients on Ampere and Ada, and wherever there is no kernel of a GPU's own: `mma.sync`, `ldmatrix`, `cp.async`.
//!
//! A block owns some rows, queries or keys, and walks over tiles of the others. From both it computes the scores and
//! probabilities again, and the gradients of both:
//!
//! | product | rows are queries | rows are keys |
//! |---|---|---|
//! | S = own · walkedᵀ | Q Kᵀ | K Qᵀ |
//! | dP = own · walkedᵀ | dO Vᵀ | V dOᵀ |
//! | += dS · walked | dQ += dS K | dK += dSᵀ Q |
//! | += P · walked | | dV += Pᵀ dO |
//!
//! Probabilities are 2^(score − row lse), and dS = P∘(dP − row delta), with what the first launch has found for each query
//! ([`bwd_rows`](super::bwd_rows)). A warp has 16 or 32 of the block's rows; its P and dS go from one product into the next in
//! registers. Whoever owns keys takes up all query heads that share them, one after the other. So every gradient is added up
//! in one place, always in the same order: there are no atomics, and no workspace for sums.

mod kernel;

use flashcore_ptx::{GlobalPtr, KernelBuilder, Shared, SharedLayout, Target, TensorMap, kernel_params};

use self::kernel::Kernel;
use crate::{
    Args, BindError, Blocks, Family, Geometry, Map, Operand, Order, Packed, ROW_PADDING, ScheduleError, Spec,
    family::{Knob, MAX_REGISTERS, check_registers, schedule},
    parts::{params::check_rows, swizzle::Tile},
    sm90::PackedParams,
};

/// Registers besides the fragments: operands on their way to the tensor cores, addresses, statistics.
const OTHER_REGISTERS: u32 = 64;

kernel_params! {
    /// What a launch is given. Strides are in bytes.
    pub struct BwdParams {
        /// The block's own rows that scores are products of: queries or keys.
        own_s: GlobalPtr,
        /// The block's own rows that gradients of probabilities are products of: those of o, or values.
        own_p: GlobalPtr,
        /// The other rows that scores are products of.
        walk_s: GlobalPtr,
        /// The other rows that gradients of probabilities are products of.
        walk_p: GlobalPtr,
        /// The gradient of `own_s`.
        grad_s: GlobalPtr,
        /// The gradient of `own_p`, where it is one of values.
        grad_p: GlobalPtr,
        /// lse · log2 e of each query.
        row_lse: GlobalPtr,
        /// What is subtracted from each query's gradients of probabilities.
        row_delta: GlobalPtr,
        /// One u32 per batch entry; read only by kernels with key lengths.
        key_lengths: GlobalPtr,
        /// From one batch entry to the next.
        own_s_batch: u64,
        /// From one head to the next.
        own_s_head: u64,
        /// From one row to the next.
        own_s_row: u64,
        /// From one batch entry to the next.
        own_p_batch: u64,
        /// From one head to the next.
        own_p_head: u64,
        /// From one row to the next.
        own_p_row: u64,
        /// From one batch entry to the next.
        walk_s_batch: u64,
        /// From one head to the next.
        walk_s_head: u64,
        /// From one row to the next.
        walk_s_row: u64,
        /// From one batch entry to the next.
        walk_p_batch: u64,
        /// From one head to the next.
        walk_p_head: u64,
        /// From one row to the next.
        walk_p_row: u64,
        /// From one batch entry to the next.
        grad_s_batch: u64,
        /// From one head to the next.
        grad_s_head: u64,
        /// From one row to the next.
        grad_s_row: u64,
        /// From one batch entry to the next.
        grad_p_batch: u64,
        /// From one head to the next.
        grad_p_head: u64,
        /// From one row to the next.
        grad_p_row: u64,
        /// From one batch entry of the rows' numbers to the next.
        stats_batch: u64,
        /// From one head of the rows' numbers to the next.
        stats_head: u64,
        /// Queries per head.
        len_q: u32,
        /// Keys per head.
        len_k: u32,
        /// Query heads per kv head; read only by grouped kernels.
        group: u32,
        /// As in [`crate::FwdParams`].
        left: i32,
        /// As in [`crate::FwdParams`].
        right: i32,
        /// As in [`crate::FwdParams`].
        exp_scale: f32,
        /// As in [`crate::FwdParams`].
        tanh_scale: f32,
        /// The scale.
        scale: f32,
        /// As in [`crate::FwdParams`].
        softcap: f32,
    }
}

/// Which gradients a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Of {
    /// Those of queries.
    Queries,
    /// Those of keys and values.
    KeysAndValues,
    /// Those of keys alone, where there is no room for both.
    Keys,
    /// Those of values alone.
    Values,
}

impl Of {
    /// All of them.
    pub const ALL: [Of; 4] = [Of::Queries, Of::KeysAndValues, Of::Keys, Of::Values];

    const fn name(self) -> &'static str {
        match self {
            Of::Queries => "dq",
            Of::KeysAndValues => "dkdv",
            Of::Keys => "dk",
            Of::Values => "dv",
        }
    }

    /// Whether it adds up dS · walked.
    fn of_scores(self) -> bool {
        self != Of::Values
    }

    /// Whether it adds up P · walked.
    fn of_probabilities(self) -> bool {
        matches!(self, Of::KeysAndValues | Of::Values)
    }
}

impl Knob for Of {
    fn text(self) -> String {
        self.name().into()
    }

    fn read(text: &str) -> Result<Self, &'static str> {
        Of::ALL.into_iter().find(|of| of.name() == text).ok_or("possible are dq, dkdv, dk and dv")
    }
}

schedule! {
    /// The knobs of the kernel.
    pub struct Schedule {
        /// Which gradients.
        pub of: Of,
        /// Rows that a block owns: 64 or 128.
        pub block: u32,
        /// Rows of a tile that it walks over: 16, 32, 64 or 128.
        pub walk: u32,
        /// Warps per block, with 16 or 32 of its rows each.
        pub warps: u32,
        /// Slots for the tiles that it walks over: 1 or 2.
        pub stages: u32,
        /// The order of the blocks.
        pub order: Order,
    }
}

/// A kernel's shared memory.
struct Memory {
    layout: SharedLayout,
    own_s: Shared,
    own_p: Shared,
    walk_s: Shared,
    walk_p: Shared,
    /// For each slot, lse of each query of the tile, then delta; where queries are walked over.
    stats: Option<Shared>,
}

/// The tiles of a schedule.
#[derive(Clone, Copy)]
struct Tiles {
    own_s: Tile,
    own_p: Tile,
    walk_s: Tile,
    walk_p: Tile,
}

impl Schedule {
    fn tiles(self, spec: &Spec) -> Tiles {
        Tiles {
            own_s: Tile::new(self.block, spec.head_dim),
            own_p: Tile::new(self.block, spec.head_dim_v),
            walk_s: Tile::new(self.walk, spec.head_dim),
            walk_p: Tile::new(self.walk, spec.head_dim_v),
        }
    }

    fn memory(self, spec: &Spec) -> Memory {
        let tiles = self.tiles(spec);
        let mut layout = SharedLayout::new();
        let own_s = layout.alloc("own_s", tiles.own_s.bytes(), 128);
        let own_p = layout.alloc("own_p", tiles.own_p.bytes(), 128);
        let walk_s = layout.alloc("walk_s", self.stages * tiles.walk_s.bytes(), 128);
        let walk_p = layout.alloc("walk_p", self.stages * tiles.walk_p.bytes(), 128);
        let stats =
            (self.of != Of::Queries).then(|| layout.alloc("stats", self.stages * self.stats_bytes(), 128));
        Memory { layout, own_s, own_p, walk_s, walk_p, stats }
    }

    /// Bytes of the numbers of a tile of queries.
    fn stats_bytes(self) -> u32 {
        2 * 4 * self.walk
    }

    /// 16-row tiles per warp.
    fn m_tiles(self) -> u32 {
        self.block / self.warps / 16
    }
}

impl Family for Schedule {
    fn geometry(self, spec: &Spec) -> Geometry {
        let blocks = match self.of {
            Of::Queries => Blocks::Each(self.order),
            Of::KeysAndValues | Of::Keys | Of::Values => Blocks::EachKeys(self.order),
        };
        let shared_bytes = self.memory(spec).layout.bytes();
        Geometry { rows: self.block, threads: 32 * self.warps, shared_bytes, blocks }
    }

    fn check(self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        let refuse = |reason: String| Err(ScheduleError::Malformed { reason });
        let Self { block, walk, warps, stages, .. } = self;
        if ![(64, 4), (128, 4), (128, 8)].contains(&(block, warps)) {
            return refuse(format!(
                "block {block} with {warps} warps: possible is 64 with 4, 128 with 4 and 128 with 8"
            ));
        }
        if !(16..=ROW_PADDING).contains(&walk) || !walk.is_power_of_two() {
            return refuse(format!("walk {walk}: possible are 16, 32, 64 and 128"));
        }
        if !(1..=2).contains(&stages) {
            return refuse(format!("{stages} stages: possible are 1 and 2"));
        }
        self.memory(spec).layout.fits(target)?;
        check_registers(self.fragments(spec), OTHER_REGISTERS, MAX_REGISTERS)
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let memory = self.memory(spec);
        let mut k = KernelBuilder::new(&format!("flashcore_sm80_bwd_{}", self.of.name()), target)
            .params::<BwdParams>()
            .shared(memory.layout.clone())
            .threads(32 * self.warps)
            // Without a minimum, ptxas may spill to fit one more block on a multiprocessor.
            .min_blocks_per_sm(1);
        if spec.packed_q || spec.packed_k {
            k = k.more_params::<PackedParams>();
        }
        Kernel::begin(&mut k, self, spec, &memory).run(&mut k);
        k
    }

    fn check_args(self, args: &Args) -> Result<(), BindError> {
        let [own, walked, gradients] = self.operands();
        check_rows(args, &[own, walked, gradients].concat())
    }

    fn bind<E>(
        self,
        spec: &Spec,
        args: &Args,
        _: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        let [[own_s, own_p], [walk_s, walk_p], [grad_s, grad_p]] =
            self.operands().map(|pair| pair.map(|operand| args.tensor(operand)));
        let (row_lse, row_delta) = (args.tensor(Operand::RowLse), args.tensor(Operand::RowDelta));
        let [_, _, len_q] = args.queries();
        let scores = args.scores();
        packed.push(&BwdParams {
            own_s: own_s.pointer(),
            own_p: own_p.pointer(),
            walk_s: walk_s.pointer(),
            walk_p: walk_p.pointer(),
            grad_s: grad_s.pointer(),
            grad_p: grad_p.pointer(),
            row_lse: row_lse.pointer(),
            row_delta: row_delta.pointer(),
            key_lengths: args.tensor(Operand::KeyLengths).pointer(),
            own_s_batch: own_s.strides[0],
            own_s_head: own_s.strides[1],
            own_s_row: own_s.strides[2],
            own_p_batch: own_p.strides[0],
            own_p_head: own_p.strides[1],
            own_p_row: own_p.strides[2],
            walk_s_batch: walk_s.strides[0],
            walk_s_head: walk_s.strides[1],
            walk_s_row: walk_s.strides[2],
            walk_p_batch: walk_p.strides[0],
            walk_p_head: walk_p.strides[1],
            walk_p_row: walk_p.strides[2],
            grad_s_batch: grad_s.strides[0],
            grad_s_head: grad_s.strides[1],
            grad_s_row: grad_s.strides[2],
            grad_p_batch: grad_p.strides[0],
            grad_p_head: grad_p.strides[1],
            grad_p_row: grad_p.strides[2],
            stats_batch: row_lse.strides[0],
            stats_head: row_lse.strides[1],
            len_q,
            len_k: args.tensor(Operand::K).shape[2] as u32,
            group: args.group(),
            left: args.left,
            right: args.right,
            exp_scale: scores.exp_scale,
            tanh_scale: scores.tanh_scale,
            scale: scores.scale,
            softcap: scores.softcap,
        });
        if spec.packed_q || spec.packed_k {
            packed.extend(&PackedParams::bind(args));
        }
        Ok(())
    }
}

impl Schedule {
    /// The block's own tensors, those that it walks over, and the gradients, each for scores and for probabilities. The
    /// gradient of o is no result: its place is empty.
    fn operands(self) -> [[Operand; 2]; 3] {
        let (queries, keys) = ([Operand::Q, Operand::Do], [Operand::K, Operand::V]);
        match self.of {
            Of::Queries => [queries, keys, [Operand::Dq, Operand::Dq]],
            Of::KeysAndValues | Of::Keys | Of::Values => [keys, queries, [Operand::Dk, Operand::Dv]],
        }
    }

    /// Registers of a thread for sums, scores and their gradients.
    fn fragments(self, spec: &Spec) -> u32 {
        let tiles = self.tiles(spec);
        let sums = u32::from(self.of.of_scores()) * tiles.own_s.cols / 2
            + u32::from(self.of.of_probabilities()) * tiles.own_p.cols / 2;
        let kept = 1 + u32::from(self.of.of_scores()) * (1 + u32::from(spec.softcap));
        self.m_tiles() * (sums + kept * self.walk / 2)
    }
}
