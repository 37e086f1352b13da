//! The two warps that add tiles of dQ to global memory, when it is their block's turn: one those of even steps, the other
//! those of odd ones, so that each has the time of two steps for its own.
//!
//! Where the block that is the last to add to a tile rounds it (`rounds`), what the others have added comes to the tile's place
//! in shared memory before the consumers write there. They add to that themselves, and leave rounded rows to be stored.

use flashcore_ptx::{
    AtomOp, AtomTy, B32, B64, BulkHint, KernelBuilder, L2Evict, MemHint, Operand, Order, Pred, ProxySpace,
    Reg, Scope,
};

use super::{
    BwdParams, DQ_EMPTY, DQ_FULL, Memory, ROWS, RoundingParams, Schedule, WARPGROUPS,
    block::{Block, Steps},
    columns,
};
use crate::{Spec, phase::wait_for_launch};

/// Threads at the barriers between a warpgroup and a writer.
pub(super) const THREADS: u32 = 128 + 32;

pub(super) struct Writer<'a> {
    schedule: Schedule,
    spec: &'a Spec,
    bytes: u32,
    /// Whether it writes the tiles of even steps (0) or of odd ones (1).
    parity: Reg<B32>,
    /// Where a tile is.
    tile: Reg<B32>,
    first_lane: Reg<Pred>,
    /// Where what others have added is loaded: the barrier that says that it is there, and its phase.
    sums: Option<[Reg<B32>; 2]>,
}

impl<'a> Writer<'a> {
    pub fn new(
        k: &mut KernelBuilder,
        schedule: Schedule,
        spec: &'a Spec,
        memory: &Memory,
        parity: Reg<B32>,
    ) -> Self {
        k.section("writer");
        let (tid, tile) = (k.tid_x(), k.shared_addr(memory.dq));
        let lane = k.and_b32(tid, 31u32);
        let bytes = WARPGROUPS * schedule.sizes(spec).dq_part;
        let sums = memory.sum_bars.map(|bars| {
            let bars = k.shared_addr(bars);
            [k.mad_lo_u32(parity, 8u32, bars), k.mov_b32(0u32)]
        });
        Self { schedule, spec, bytes, parity, tile, first_lane: k.setp_eq_u32(lane, 0u32), sums }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        wait_for_launch(k);
        let block = Block::find(k, self.schedule, self.spec);
        let steps = block.steps(k, self.spec);
        let first = k.setp_eq_u32(self.parity, 0u32);
        let begins = k.and_pred(first, block.any);
        k.if_(begins, |k| self.hand_over(k, &block, [steps.head, steps.at]));
        let step = k.mov_b32(0u32);
        steps.each(k, |k| {
            let parity = k.and_b32(step, 1u32);
            let mine = k.setp_eq_u32(parity, self.parity);
            k.if_(mine, |k| self.step(k, &block, &steps));
            k.set(step, |k| k.add_u32(step, 1u32));
        });
    }

    /// Says that the place of a tile may be written to.
    fn hand_back(k: &mut KernelBuilder) {
        k.comment("the tile has been read, and its place may be written to");
        for group in 0..WARPGROUPS {
            k.bar_arrive(DQ_EMPTY + group, THREADS);
        }
    }

    /// The number of a head's query tile among all of the workspace.
    fn number(&self, k: &mut KernelBuilder, block: &Block, [head, at]: [Reg<B32>; 2]) -> Reg<B32> {
        let (heads, tiles) = (k.param(BwdParams::heads), k.param(BwdParams::q_tiles));
        let head = k.mad_lo_u32(block.queries.entry, heads, head);
        let place = block.queries.padded_tile(k, at, self.schedule.block_m);
        k.mad_lo_u32(head, tiles, place)
    }

    fn step(&self, k: &mut KernelBuilder, block: &Block, steps: &Steps) {
        let Some(rounds) = block.rounds else { return self.add(k, block, steps) };
        let [last, _] = rounds.of(k, steps.at);
        k.if_else(last, |k| self.store(k, block, steps), |k| self.add(k, block, steps));
    }

    /// Adds a tile to what the blocks before have added, when they have.
    fn add(&self, k: &mut KernelBuilder, block: &Block, steps: &Steps) {
        let tile = self.number(k, block, [steps.head, steps.at]);
        let turns = k.param(BwdParams::turns);
        let (mine, second) = block.turn(k, self.schedule, steps.at);
        let tile = match second {
            Some(second) => {
                let copy = k.param(BwdParams::copy);
                let other = k.add_u32(tile, copy);
                k.selp_b32(other, tile, second)
            }
            None => tile,
        };
        let turn = k.mad_wide_u32(tile, 4u32, turns);
        k.if_(self.first_lane, |k| Self::wait_for_turn(k, turn, mine));
        k.bar_warp_sync();
        self.wait_for_tile(k);
        k.if_(self.first_lane, |k| {
            let tiles = k.param(BwdParams::dq_tiles);
            let to = k.mad_wide_u32(tile, self.bytes, tiles);
            let hint = k.create_policy(L2Evict::Last);
            let hint = BulkHint::new().policy(hint);
            let first = k.setp_eq_u32(mine, 0u32);
            k.if_else(
                first,
                |k| k.bulk_store(to, self.tile, self.bytes, hint),
                |k| k.bulk_reduce(AtomOp::Add, AtomTy::F32, to, self.tile, self.bytes, hint),
            );
            k.bulk_commit();
            k.bulk_wait_read(0);
        });
        k.bar_warp_sync();
        let more = k.setp_gt_u32(steps.left, 1u32);
        let complete = |k: &mut KernelBuilder| {
            k.if_(self.first_lane, |k| {
                k.comment("complete, not only read: the next block adds to it");
                k.bulk_wait(0);
                let next = k.add_u32(mine, 1u32);
                k.st_global_hint(turn, next, MemHint::new().order(Order::Release(Scope::Gpu)));
            });
        };
        let hand_back = |k: &mut KernelBuilder| {
            k.if_(more, Self::hand_back);
            complete(k);
        };
        match block.rounds {
            Some(rounds) => {
                let next = steps.next(k);
                let [_, brings] = rounds.of(k, next[1]);
                let brings = k.and_pred(brings, more);
                let bring = |k: &mut KernelBuilder| {
                    // First, so that the block after this one does not wait for what this one waits for.
                    complete(k);
                    self.bring(k, block, next);
                    Self::hand_back(k);
                };
                k.if_else(brings, bring, hand_back);
            }
            None => hand_back(k),
        }
        k.bar_warp_sync();
    }

    /// What one lane does before it touches a tile's sum.
    fn wait_for_turn(k: &mut KernelBuilder, turn: Reg<B64>, mine: Reg<B32>) {
        k.comment("the turn of this block: those before it have added");
        k.loop_(|k, l| {
            let now = k.ld_global_hint::<B32>(turn, MemHint::new().order(Order::Acquire(Scope::Gpu)));
            let is_mine = k.setp_eq_u32(now, mine);
            k.break_if(l, is_mine);
        });
        k.fence_proxy_async(ProxySpace::Global);
    }

    /// Waits until both warpgroups have written their parts of a tile.
    fn wait_for_tile(&self, k: &mut KernelBuilder) {
        for group in 0..WARPGROUPS {
            let full = k.mad_lo_u32(self.parity, WARPGROUPS, DQ_FULL + group);
            k.bar_sync(full, THREADS);
        }
    }

    /// Stores a tile whose rows are rounded: each warpgroup's part has rows, or columns, of its own.
    fn store(&self, k: &mut KernelBuilder, block: &Block, steps: &Steps) {
        self.wait_for_tile(k);
        let first_row = steps.first_row(k, self.schedule.block_m);
        let (of_rows, of_columns) =
            if self.schedule.parts_by_rows() { (ROWS, 0) } else { (0, columns(self.spec.dtype)) };
        k.if_(self.first_lane, |k| {
            let map = k.tensor_map(RoundingParams::dq_map);
            for group in 0..WARPGROUPS {
                let row = k.add_u32(first_row, group * of_rows);
                let column = Operand::from(group * of_columns);
                let at = [column, row.into(), steps.head.into(), block.queries.entry.into()];
                let from = self.tile.at((group * self.bytes / WARPGROUPS) as i32);
                k.tensor_store(map, &at, from, BulkHint::new());
            }
            k.bulk_commit();
            k.bulk_wait_read(0);
        });
        k.bar_warp_sync();
        let more = k.setp_gt_u32(steps.left, 1u32);
        k.if_(more, |k| {
            let next = steps.next(k);
            self.hand_over(k, block, next);
        });
    }

    /// Hands the tile's place to the consumers, for a head's query tile; if this block rounds it, with what others have added.
    fn hand_over(&self, k: &mut KernelBuilder, block: &Block, place: [Reg<B32>; 2]) {
        if let Some(rounds) = block.rounds {
            let [_, others] = rounds.of(k, place[1]);
            k.if_(others, |k| self.bring(k, block, place));
        }
        Self::hand_back(k);
    }

    /// Brings what the blocks before have added to a head's query tile, which this one rounds.
    fn bring(&self, k: &mut KernelBuilder, block: &Block, place: [Reg<B32>; 2]) {
        let Some([there, phase]) = self.sums else { return };
        k.comment("what the blocks before have added to a tile that this one rounds");
        let tile = self.number(k, block, place);
        let (turns, tiles) = (k.param(BwdParams::turns), k.param(BwdParams::dq_tiles));
        let (turn, from) = (k.mad_wide_u32(tile, 4u32, turns), k.mad_wide_u32(tile, self.bytes, tiles));
        k.if_(self.first_lane, |k| {
            Self::wait_for_turn(k, turn, block.tile);
            k.mbarrier_arrive_expect_tx(there, self.bytes);
            k.bulk_load(self.tile, from, self.bytes, there, BulkHint::new());
        });
        k.mbarrier_wait_parity(there, phase, Scope::Cta);
        k.set(phase, |k| k.xor_b32(phase, 1u32));
    }
}
