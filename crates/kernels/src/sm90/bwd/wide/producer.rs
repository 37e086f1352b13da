//! The threads that move tiles from global to shared memory: one those that scores are products of, queries and keys, the
//! other dO and the values.

use flashcore_ptx::{
    Addr, B32, BulkHint, GlobalPtr, KernelBuilder, L2Evict, Operand, ParamHandle, Reg, Shared, TensorMap,
};

use super::{
    Block, DO_STAGES, KEYS, Memory, NUMBERS, PANEL, QUERIES, ROWS, Schedule, WideParams, columns, panels,
};
use crate::{
    Spec,
    parts::sequence::Side as Lie,
    phase::wait_for_launch,
    sm90::{
        bwd::{
            block::Steps,
            tails::{Tail, Tails},
        },
        ring::Ring,
    },
};

/// A tensor of one side, and the slots in which its tiles are walked over.
struct Side {
    map: ParamHandle<WideParams, TensorMap>,
    stages: u32,
}

pub(super) struct Producer<'a> {
    spec: &'a Spec,
    head_dim: u32,
    queries: Side,
    keys: Side,
    tiles: Shared,
    bars: Shared,
    /// In how many pieces tiles are waited for, and the barriers of those behind the first.
    pieces: u32,
    rest: Shared,
    own: Shared,
    /// A number for each query, and where it goes.
    numbers: (ParamHandle<WideParams, GlobalPtr>, Shared),
    tails: Option<Tails>,
}

impl<'a> Producer<'a> {
    /// For queries and keys.
    pub fn of_scores(k: &mut KernelBuilder, schedule: Schedule, spec: &'a Spec, memory: &Memory) -> Self {
        let side = |map| Side { map, stages: schedule.stages };
        Self {
            spec,
            head_dim: spec.head_dim,
            queries: side(WideParams::q_map),
            keys: side(WideParams::k_map),
            tiles: memory.s,
            bars: memory.s_bars,
            pieces: schedule.pieces(spec.head_dim, spec),
            rest: memory.s_rest,
            own: memory.own_s,
            numbers: (WideParams::row_lse, memory.lse),
            tails: memory.landed.map(|[landed, _]| Tails::new(k, landed)),
        }
    }

    /// For the gradients of the outputs, and values.
    pub fn of_values(k: &mut KernelBuilder, schedule: Schedule, spec: &'a Spec, memory: &Memory) -> Self {
        Self {
            spec,
            head_dim: spec.head_dim_v,
            queries: Side { map: WideParams::do_map, stages: DO_STAGES },
            keys: Side { map: WideParams::v_map, stages: schedule.value_stages() },
            tiles: memory.p,
            bars: memory.p_bars,
            pieces: schedule.pieces(spec.head_dim_v, spec),
            rest: memory.p_rest,
            own: memory.own_p,
            numbers: (WideParams::row_delta, memory.delta),
            tails: memory.landed.map(|[_, landed]| Tails::new(k, landed)),
        }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        k.section("producer");
        wait_for_launch(k);
        Block::find(
            k,
            self.spec,
            |k, block| {
                k.if_(block.any, |k| {
                    let steps = block.key_steps(k);
                    let own = (&self.queries, &block.queries);
                    self.walk(k, &block, &steps, [own, (&self.keys, &block.keys)], QUERIES, None);
                });
            },
            |k, block| {
                k.if_(block.any, |k| {
                    let steps = block.query_steps(k, self.spec);
                    let sides = [(&self.keys, &block.keys), (&self.queries, &block.queries)];
                    self.walk(k, &block, &steps, sides, KEYS, Some(self.numbers));
                });
            },
        );
    }

    fn bytes(&self) -> u32 {
        panels(self.head_dim, self.spec.dtype) * PANEL
    }

    /// Copies what the block owns, so many rows, and then one tile of the other side after the other.
    fn walk(
        &self,
        k: &mut KernelBuilder,
        block: &Block,
        steps: &Steps,
        [own, walked]: [(&Side, &Lie); 2],
        rows: u32,
        numbers: Option<(ParamHandle<WideParams, GlobalPtr>, Shared)>,
    ) {
        let own_tiles = rows / ROWS;
        self.alone(k, |k| {
            k.comment("what the block owns: nobody else reads it");
            let (tiles, filled) = (k.shared_addr(self.tiles), k.shared_addr(self.own));
            k.mbarrier_arrive_expect_tx(filled, own_tiles * self.bytes());
            for tile in 0..own_tiles {
                let (slot, row) =
                    (k.add_u32(tiles, tile * self.bytes()), k.add_u32(block.first_row, tile * ROWS));
                let whole = |_: &mut KernelBuilder, _| filled.at(0);
                self.copy(k, own, L2Evict::First, slot, whole, [row, block.head]);
            }
        });
        let slots = self.tiles;
        let behind = k.mov_b32(own_tiles * self.bytes());
        let ring = Ring::producer(k, slots, self.bytes(), self.bars, walked.0.stages).further(k, behind);
        steps.each(k, |k| {
            let tails = self.tails.as_ref().filter(|_| numbers.is_some());
            let tail = tails.map(|tails| (tails, Tail::of(k, block.len_q, steps, ROWS)));
            self.alone(k, |k| {
                k.comment("a tile of the other side, once its slot is free");
                ring.wait_free(k);
                let (slot, filled) = (ring.address(k), ring.filled(k));
                let filled = tail.map_or(filled, |(tails, tail)| tails.barrier(k, tail, filled));
                let first_row = steps.first_row(k, ROWS);
                let more = if numbers.is_some() { NUMBERS } else { 0 };
                let first = if self.pieces > 1 { PANEL } else { self.bytes() };
                k.mbarrier_arrive_expect_tx(filled, first + more);
                let bar = |k: &mut KernelBuilder, panel: u32| {
                    if panel == 0 || self.pieces == 1 {
                        return filled.at(0);
                    }
                    let bar = ring.piece(k, self.rest, self.pieces - 1, panel);
                    k.mbarrier_arrive_expect_tx(bar, PANEL);
                    bar
                };
                self.copy(k, walked, L2Evict::Last, slot, bar, [first_row, steps.head]);
                if let Some((numbers, place)) = numbers {
                    let at = block.numbers(k, numbers, steps.head, first_row);
                    let place = ring.entry(k, place, NUMBERS);
                    k.bulk_load(place, at, NUMBERS, filled, BulkHint::new());
                }
            });
            if let Some((tails, tail)) = tail {
                let (slot, filled) = (|k: &mut KernelBuilder| ring.address(k), ring.filled(k));
                let panels = panels(self.head_dim, self.spec.dtype);
                tails.clear(k, tail, ROWS, (&slot, panels, PANEL), filled);
            }
            ring.advance(k);
        });
    }

    /// What one thread does, where the others of its warp are there too.
    fn alone(&self, k: &mut KernelBuilder, does: impl FnOnce(&mut KernelBuilder)) {
        match &self.tails {
            Some(tails) => k.if_(tails.first_lane, does),
            None => does(k),
        }
    }

    /// Starts the copy of a tile, panel by panel, each of which counts with a barrier.
    fn copy(
        &self,
        k: &mut KernelBuilder,
        (side, lie): (&Side, &Lie),
        evict: L2Evict,
        slot: Reg<B32>,
        filled: impl Fn(&mut KernelBuilder, u32) -> Addr<B32>,
        [row, head]: [Reg<B32>; 2],
    ) {
        let (map, policy) = (k.tensor_map(side.map), k.create_policy(evict));
        let row = lie.row(k, row);
        let hint = BulkHint::new().policy(policy);
        for panel in 0..panels(self.head_dim, self.spec.dtype) {
            let column = Operand::from(panel * columns(self.spec.dtype));
            let (to, filled) = (slot.at((panel * PANEL) as i32), filled(k, panel));
            k.tensor_load(to, map, &[column, row.into(), head.into(), lie.entry.into()], filled, hint);
        }
    }
}
