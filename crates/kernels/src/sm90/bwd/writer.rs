//! The warp that adds a warpgroup's part of dQ to global memory, when it is its block's turn.

use flashcore_ptx::{
    AtomOp, AtomTy, B32, BulkHint, KernelBuilder, L2Evict, MemHint, Order, Pred, ProxySpace, Reg, Scope,
};

use super::{BwdParams, DQ_EMPTY, DQ_FULL, DQ_PARTS, Memory, Schedule, block::Block};
use crate::{Spec, phase::wait_for_launch};

/// Threads at the barriers between a warpgroup and its writer.
pub(super) const THREADS: u32 = 128 + 32;

pub(super) struct Writer<'a> {
    spec: &'a Spec,
    bytes: u32,
    /// The warpgroup whose part it writes.
    group: Reg<B32>,
    /// Where that part is.
    part: Reg<B32>,
    first_lane: Reg<Pred>,
}

impl<'a> Writer<'a> {
    pub fn new(
        k: &mut KernelBuilder,
        schedule: Schedule,
        spec: &'a Spec,
        memory: &Memory,
        group: Reg<B32>,
    ) -> Self {
        k.section("writer");
        let parts = k.shared_addr(memory.dq);
        let bytes = schedule.sizes(spec).dq_part;
        let part = k.mad_lo_u32(group, bytes, parts);
        let tid = k.tid_x();
        let lane = k.and_b32(tid, 31u32);
        Self { spec, bytes, group, part, first_lane: k.setp_eq_u32(lane, 0u32) }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        wait_for_launch(k);
        let block = Block::find(k, self.spec);
        let steps = block.steps(k, self.spec);
        let (full, empty) = (k.add_u32(self.group, DQ_FULL), k.add_u32(self.group, DQ_EMPTY));
        let bytes = self.bytes;
        k.if_(block.any, |k| {
            k.comment("the part may be written");
            k.bar_arrive(empty, THREADS);
        });
        steps.each(k, |k| {
            k.bar_sync(full, THREADS);
            let (heads, tiles) = (k.param(BwdParams::heads), k.param(BwdParams::q_tiles));
            let head = k.mad_lo_u32(block.batch, heads, steps.head);
            let tile = k.mad_lo_u32(head, tiles, steps.at);
            let part = k.mad_lo_u32(tile, DQ_PARTS, self.group);
            let turns = k.param(BwdParams::turns);
            let turn = k.mad_wide_u32(part, 4u32, turns);
            let mine = block.turn(k, steps.at);
            k.if_(self.first_lane, |k| {
                let tiles = k.param(BwdParams::dq_tiles);
                let to = k.mad_wide_u32(part, bytes, tiles);
                k.comment("the turn of this block: those before it have added");
                k.loop_(|k, l| {
                    let now = k.ld_global_hint::<B32>(turn, MemHint::new().order(Order::Acquire(Scope::Gpu)));
                    let is_mine = k.setp_eq_u32(now, mine);
                    k.break_if(l, is_mine);
                });
                k.fence_proxy_async(ProxySpace::Global);
                let hint = k.create_policy(L2Evict::Last);
                let hint = BulkHint::new().policy(hint);
                let first = k.setp_eq_u32(mine, 0u32);
                k.if_else(
                    first,
                    |k| k.bulk_store(to, self.part, bytes, hint),
                    |k| k.bulk_reduce(AtomOp::Add, AtomTy::F32, to, self.part, bytes, hint),
                );
                k.bulk_commit();
                k.bulk_wait_read(0);
            });
            k.bar_warp_sync();
            let more = k.setp_gt_u32(steps.left, 1u32);
            k.if_(more, |k| {
                k.comment("the part has been read, and may be written again");
                k.bar_arrive(empty, THREADS);
            });
            k.if_(self.first_lane, |k| {
                k.comment("complete, not only read: the next block adds to it");
                k.bulk_wait(0);
                k.fence_proxy_async(ProxySpace::Global);
                let next = k.add_u32(mine, 1u32);
                k.st_global_hint(turn, next, MemHint::new().order(Order::Release(Scope::Gpu)));
            });
            k.bar_warp_sync();
        });
    }
}
