//! The two warps that add tiles of dQ to global memory, when it is their block's turn: one those of even steps, the other
//! those of odd ones, so that each has the time of two steps for its own.

use flashcore_ptx::{
    AtomOp, AtomTy, B32, BulkHint, KernelBuilder, L2Evict, MemHint, Order, Pred, ProxySpace, Reg, Scope,
};

use super::{BwdParams, DQ_EMPTY, DQ_FULL, Memory, Schedule, WARPGROUPS, block::Block};
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
        Self { schedule, spec, bytes, parity, tile, first_lane: k.setp_eq_u32(lane, 0u32) }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        wait_for_launch(k);
        let block = Block::find(k, self.schedule, self.spec);
        let steps = block.steps(k, self.spec);
        let first = k.setp_eq_u32(self.parity, 0u32);
        let begins = k.and_pred(first, block.any);
        k.if_(begins, Self::hand_back);
        let step = k.mov_b32(0u32);
        steps.each(k, |k| {
            let parity = k.and_b32(step, 1u32);
            let mine = k.setp_eq_u32(parity, self.parity);
            k.if_(mine, |k| self.step(k, &block, steps.head, steps.at, steps.left));
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

    fn step(&self, k: &mut KernelBuilder, block: &Block, head: Reg<B32>, at: Reg<B32>, left: Reg<B32>) {
        let (heads, tiles) = (k.param(BwdParams::heads), k.param(BwdParams::q_tiles));
        let head = k.mad_lo_u32(block.queries.entry, heads, head);
        let place = block.queries.padded_tile(k, at, self.schedule.block_m);
        let tile = k.mad_lo_u32(head, tiles, place);
        let turns = k.param(BwdParams::turns);
        let (mine, second) = block.turn(k, self.schedule, at);
        let tile = match second {
            Some(second) => {
                let copy = k.param(BwdParams::copy);
                let other = k.add_u32(tile, copy);
                k.selp_b32(other, tile, second)
            }
            None => tile,
        };
        let turn = k.mad_wide_u32(tile, 4u32, turns);
        k.if_(self.first_lane, |k| {
            k.comment("the turn of this block: those before it have added");
            k.loop_(|k, l| {
                let now = k.ld_global_hint::<B32>(turn, MemHint::new().order(Order::Acquire(Scope::Gpu)));
                let is_mine = k.setp_eq_u32(now, mine);
                k.break_if(l, is_mine);
            });
            k.fence_proxy_async(ProxySpace::Global);
        });
        k.bar_warp_sync();
        for group in 0..WARPGROUPS {
            let full = k.mad_lo_u32(self.parity, WARPGROUPS, DQ_FULL + group);
            k.bar_sync(full, THREADS);
        }
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
        let more = k.setp_gt_u32(left, 1u32);
        k.if_(more, Self::hand_back);
        k.if_(self.first_lane, |k| {
            k.comment("complete, not only read: the next block adds to it");
            k.bulk_wait(0);
            let next = k.add_u32(mine, 1u32);
            k.st_global_hint(turn, next, MemHint::new().order(Order::Release(Scope::Gpu)));
        });
        k.bar_warp_sync();
    }
}
