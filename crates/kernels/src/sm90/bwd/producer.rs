//! The threads that move tiles from global to shared memory: one the queries and keys, the other dO and the values.

use flashcore_ptx::{
    B32, BulkHint, GlobalPtr, KernelBuilder, L2Evict, Operand, ParamHandle, Reg, Shared, TensorMap,
};

use super::{
    BwdParams, DO_STAGES, Memory, Schedule, Sizes,
    block::{Block, Steps},
    columns, panels,
    parts::numbers_at,
    tails::{Tail, Tails},
};
use crate::{Spec, phase::wait_for_launch, sm90::ring::Ring};

pub(super) struct Producer<'a> {
    schedule: Schedule,
    spec: &'a Spec,
    sizes: Sizes,
    head_dim: u32,
    ring: Ring,
    /// Bytes of a tile of its ring, behind which lies a number for each row.
    bytes: u32,
    map: ParamHandle<BwdParams, TensorMap>,
    numbers: ParamHandle<BwdParams, GlobalPtr>,
    keys_map: ParamHandle<BwdParams, TensorMap>,
    keys: Shared,
    keys_bar: Shared,
    tails: Option<Tails>,
}

impl<'a> Producer<'a> {
    /// For queries and keys.
    pub fn of_queries(k: &mut KernelBuilder, schedule: Schedule, spec: &'a Spec, memory: &Memory) -> Self {
        k.section("producer: queries and keys");
        let sizes = schedule.sizes(spec);
        Self {
            schedule,
            spec,
            sizes,
            head_dim: spec.head_dim,
            ring: Ring::producer(k, memory.q, sizes.q_slot, memory.q_bars, schedule.stages),
            bytes: sizes.q,
            map: BwdParams::q_map,
            numbers: BwdParams::row_lse,
            keys_map: BwdParams::k_map,
            keys: memory.k,
            keys_bar: memory.k_bar,
            tails: memory.landed.map(|[landed, _]| Tails::new(k, landed)),
        }
    }

    /// For the gradients of the outputs, and values.
    pub fn of_gradients(k: &mut KernelBuilder, schedule: Schedule, spec: &'a Spec, memory: &Memory) -> Self {
        k.section("producer: dO and values");
        let sizes = schedule.sizes(spec);
        Self {
            schedule,
            spec,
            sizes,
            head_dim: spec.head_dim_v,
            ring: Ring::producer(k, memory.d_o, sizes.do_slot, memory.do_bars, DO_STAGES),
            bytes: sizes.d_o,
            map: BwdParams::do_map,
            numbers: BwdParams::row_delta,
            keys_map: BwdParams::v_map,
            keys: memory.v,
            keys_bar: memory.v_bar,
            tails: memory.landed.map(|[_, landed]| Tails::new(k, landed)),
        }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        wait_for_launch(k);
        let block = Block::find(k, self.schedule, self.spec);
        k.if_(block.any, |k| {
            let steps = block.steps(k, self.spec);
            self.alone(k, |k| {
                k.comment("the block's keys, or its values: nobody else reads them");
                let (slot, filled) = (k.shared_addr(self.keys), k.shared_addr(self.keys_bar));
                k.mbarrier_arrive_expect_tx(filled, self.panels() * self.sizes.k_panel);
                let at = [block.keys.row(k, block.first_key), block.kv_head, block.keys.entry];
                self.copy(k, self.keys_map, L2Evict::First, self.sizes.k_panel, slot, filled, at);
            });
            steps.each(k, |k| self.load(k, &block, &steps));
        });
    }

    fn panels(&self) -> u32 {
        panels(self.head_dim, self.spec.dtype)
    }

    /// What one thread does, where the others of its warp are there too.
    fn alone(&self, k: &mut KernelBuilder, does: impl FnOnce(&mut KernelBuilder)) {
        match &self.tails {
            Some(tails) => k.if_(tails.first_lane, does),
            None => does(k),
        }
    }

    /// A tile of the query side, and behind it a number for each row.
    fn load(&self, k: &mut KernelBuilder, block: &Block, steps: &Steps) {
        let ring = &self.ring;
        let (rows, panel) = (self.schedule.block_m, self.sizes.q_panel);
        let tail = self.tails.as_ref().map(|tails| (tails, Tail::of(k, block.len_q, steps, rows)));
        self.alone(k, |k| {
            k.comment("a tile of the query side, once its slot is free");
            ring.wait_free(k);
            let (slot, filled, first_row) =
                (ring.address(k), ring.filled(k), steps.first_row(k, self.schedule.block_m));
            let filled = tail.map_or(filled, |(tails, tail)| tails.barrier(k, tail, filled));
            let numbers_bytes = self.schedule.block_m * 4;
            k.mbarrier_arrive_expect_tx(filled, self.bytes + numbers_bytes);
            let at = [block.queries.row(k, first_row), steps.head, block.queries.entry];
            self.copy(k, self.map, L2Evict::Last, self.sizes.q_panel, slot, filled, at);
            let strides = [BwdParams::row_batch, BwdParams::row_head];
            let first_row = block.queries.padded(k, first_row);
            let place = [block.queries.entry, steps.head, first_row];
            let numbers = numbers_at(k, self.numbers, strides, place);
            k.bulk_load(slot.at(self.bytes as i32), numbers, numbers_bytes, filled, BulkHint::new());
        });
        if let Some((tails, tail)) = tail {
            let (slot, filled) = (|k: &mut KernelBuilder| ring.address(k), ring.filled(k));
            tails.clear(k, tail, rows, (&slot, self.panels(), panel), filled);
        }
        ring.advance(k);
    }

    /// Starts the copy of a tile, panel by panel.
    #[expect(clippy::too_many_arguments, reason = "a copy has two ends and a place")]
    fn copy(
        &self,
        k: &mut KernelBuilder,
        map: ParamHandle<BwdParams, TensorMap>,
        evict: L2Evict,
        panel_bytes: u32,
        slot: Reg<B32>,
        filled: Reg<B32>,
        [row, head, batch]: [Reg<B32>; 3],
    ) {
        let (map, policy) = (k.tensor_map(map), k.create_policy(evict));
        let hint = BulkHint::new().policy(policy);
        for panel in 0..self.panels() {
            let column = Operand::from(panel * columns(self.spec.dtype));
            let to = slot.at((panel * panel_bytes) as i32);
            k.tensor_load(to, map, &[column, row.into(), head.into(), batch.into()], filled, hint);
        }
    }
}
