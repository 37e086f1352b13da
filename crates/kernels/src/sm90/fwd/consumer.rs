//! A consumer warpgroup: 64 queries, their scores, probabilities and output in registers.

use flashcore_ptx::{B32, B64, BulkHint, F32, KernelBuilder, Pred, ProxySpace, Reg, Scope, Wgmma};

use super::{
    Memory, PITCH, ROWS, Schedule, Sizes, Turned,
    aside::Aside,
    blocks::BlockScales,
    by_length, columns, gather, merge, packed, panels, partial,
    softmax::{self, RowState, Softmax},
    tiles::{Keys, Tile, each_tile, step},
};
use crate::{
    Phase, Spec,
    parts::{
        fragment::{matrix_ty, pack_into},
        params::DescaleParams,
        softmax::{ScoreHandles, SoftmaxParams},
        work::{QueryRows, first_query_head},
    },
    phase::wait_for_launch,
    sm90::{Sm90Params, descriptor::Descriptor, ring::Ring, stage},
};

// Named barriers; 0 is the block's own.
/// The first of one barrier per warpgroup for its turn at the tensor cores.
const TURN: u32 = 1;
/// The first of one barrier per warpgroup for its own threads.
const OWN: u32 = 5;
/// The barrier of all consumers.
pub(super) const ALL: u32 = 9;

/// Bytes of a row that one product takes.
const STEP: u32 = 32;
/// Products over a panel.
const STEPS: u32 = PITCH / STEP;

/// How many elements one product sums over.
fn depth(spec: &Spec) -> u32 {
    STEP / spec.dtype.size()
}

pub(super) const HANDLES: ScoreHandles<Sm90Params> = ScoreHandles {
    exp_scale: Sm90Params::exp_scale,
    tanh_scale: Sm90Params::tanh_scale,
    scale: Sm90Params::scale,
    softcap: Sm90Params::softcap,
};

pub(super) struct Consumer<'a> {
    pub schedule: Schedule,
    pub spec: &'a Spec,
    pub memory: &'a Memory,
    sizes: Sizes,
    q: Ring,
    k: Ring,
    v: Ring,
    pub softmax: Softmax,
    scores: Vec<Reg<F32>>,
    p: Vec<[Reg<B32>; 4]>,
    pub o: Vec<Reg<F32>>,
    /// The queries as operands, where they are kept in registers.
    q_regs: Vec<[Reg<B32>; 4]>,
    /// The sums over one key tile, of some columns of the output, where they are flushed.
    apart: Vec<Reg<F32>>,
    /// What the output of each row is to be multiplied by before those are added to it.
    owed_factors: Vec<Reg<F32>>,
    /// The sums over key tiles before, where they are put aside.
    aside: Option<Aside>,
    blocks: Option<BlockScales>,
    /// Whether the output already holds something that the next product adds to.
    more: Reg<Pred>,
    /// The warpgroup.
    pub group: Reg<B32>,
    /// The thread in the warpgroup.
    pub thread: Reg<B32>,
    /// Whether this is the first lane of its warp.
    first_lane: Reg<Pred>,
    /// Whether this is the first thread of its warpgroup, which stores the output.
    leader: Reg<Pred>,
    /// The row in the block of this thread's upper row.
    row: Reg<B32>,
    /// The first column that this thread holds in a group of eight.
    pub column: Reg<B32>,
    o_map: Option<Reg<B64>>,
}

impl<'a> Consumer<'a> {
    pub fn new(k: &mut KernelBuilder, schedule: Schedule, spec: &'a Spec, memory: &'a Memory) -> Self {
        k.section("consumer");
        let sizes = schedule.sizes(spec);
        let Schedule { stages, q_stages, block_n, .. } = schedule;
        let tid = k.tid_x();
        let group = k.shr_u32(tid, 7u32);
        let group = k.shfl_idx(group, 0u32);
        let thread = k.and_b32(tid, 127u32);
        let lane = k.and_b32(tid, 31u32);
        // Warpgroups that work together have the same rows.
        let warp = k.shr_u32(if schedule.together { thread } else { tid }, 5u32);
        let g = k.shr_u32(lane, 2u32);
        let row = k.mad_lo_u32(warp, 16u32, g);
        let t = k.and_b32(lane, 3u32);
        let params = SoftmaxParams::read_from(k, spec, &HANDLES);
        let softmax = Softmax::new(k, params, schedule.lazy, spec.dtype, schedule.poly);
        let q_operands = if schedule.q_regs { spec.head_dim.div_ceil(depth(spec)) } else { 0 };
        let zeros = |k: &mut KernelBuilder, count: u32| (0..count).map(|_| k.mov_f32(0.0)).collect();
        let tiles = |k: &mut KernelBuilder, slots, bytes, bars| {
            let ring = Ring::consumer(k, slots, bytes, bars, stages);
            if schedule.together { ring.starting_at(k, group, schedule.stride()) } else { ring }
        };
        let (v, v_bytes, v_bars) = match memory.turned {
            Some(Turned { slots, bars, .. }) => (slots, sizes.turned, bars),
            None => (memory.v, sizes.v, memory.v_bars),
        };
        Self {
            schedule,
            spec,
            memory,
            sizes,
            q: Ring::consumer(k, memory.q, sizes.q_slot, memory.q_bars, q_stages),
            k: tiles(k, memory.k, sizes.k, memory.k_bars),
            v: tiles(k, v, v_bytes, v_bars),
            softmax,
            scores: zeros(k, block_n / 2),
            p: (0..block_n / depth(spec)).map(|_| std::array::from_fn(|_| k.mov_b32(0u32))).collect(),
            o: zeros(k, spec.head_dim_v / 2),
            q_regs: (0..q_operands).map(|_| std::array::from_fn(|_| k.mov_b32(0u32))).collect(),
            apart: zeros(k, schedule.flushed_columns(spec).unwrap_or(0) / 2),
            owed_factors: zeros(k, if schedule.flushed_columns(spec).is_some() { 2 } else { 0 }),
            aside: (schedule.aside_bytes(spec) > 0).then(|| Aside::new(k, schedule, spec, group, thread)),
            blocks: BlockScales::new(k, schedule, spec),
            more: k.mov_pred(false),
            group,
            thread,
            first_lane: k.setp_eq_u32(lane, 0u32),
            leader: k.setp_eq_u32(thread, 0u32),
            row,
            column: k.shl_b32(t, 1u32),
            o_map: schedule.stores_by_tma().then(|| k.tensor_map(Sm90Params::o_map)),
        }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        if self.takes_turns() {
            k.comment("the first warpgroup's first turn");
            let last = k.setp_eq_u32(self.group, self.schedule.warpgroups - 1);
            k.if_(last, |k| k.bar_arrive(TURN, 256u32));
        }
        // The slot whose output is still being stored; it is released once the store is done.
        let owed = k.mov_b32(0u32);
        wait_for_launch(k);
        Phase::Tile.begin(k);
        match self.memory.told {
            None => each_tile(k, self.schedule, self.spec, |k, tile| self.tile(k, tile, owed)),
            Some(told) if self.schedule.by_length => {
                by_length::each_told(k, self.schedule, self.spec, told, &self.q, |k, tile| {
                    self.tile(k, tile, owed);
                });
            }
            Some(told) => {
                packed::each_told(k, self.schedule, self.spec, told, &self.q, |k, tile| {
                    self.tile(k, tile, owed);
                });
            }
        }
        if self.schedule.persistent {
            Phase::Store.begin(k);
        }
        if self.takes_turns() {
            k.comment("the turn that nobody takes any more");
            let first = k.setp_eq_u32(self.group, 0u32);
            k.if_(first, |k| k.bar_sync(TURN, 256u32));
        }
        if self.schedule.stores_by_tma() {
            k.comment("shared memory stays until the last output has been read from it");
            k.if_(self.leader, |k| k.bulk_wait_read(0));
        }
        k.end_trace();
    }

    fn takes_turns(&self) -> bool {
        self.schedule.pingpong && self.schedule.warpgroups > 1
    }

    fn tile(&self, k: &mut KernelBuilder, tile: &Tile, owed: Reg<B32>) {
        let keys = tile.keys(k, self.schedule);
        k.section("consumer: one tile of queries");
        match &self.blocks {
            Some(blocks) => blocks.begin(k, tile),
            None if self.spec.dtype.is_fp8() => self.descale_scores(k, tile),
            None => {}
        }
        self.softmax.reset(k);
        k.set(self.more, |k| k.mov_pred(false));
        if let Some(aside) = &self.aside {
            aside.reset(k);
        }
        Phase::QWait.begin_tile(k, tile.rows.first_row);
        self.q.wait_filled(k);
        Phase::Tile.begin(k);
        // Whoever turns 8-bit values around makes zeros of those behind the last key.
        if self.spec.has_foreign_keys() && !self.spec.dtype.is_fp8() {
            let mut who = keys.any;
            if self.schedule.together {
                // The last key tile is the first warpgroup's.
                let first = k.setp_eq_u32(self.group, 0u32);
                who = k.and_pred(who, first);
            }
            k.if_(who, |k| self.clear_values(k, tile, keys.last));
        }
        // With several warpgroups, each walks over the tiles that its own rows see, and skips the others; together,
        // they take the tiles in turn.
        let own = (self.schedule.warpgroups > 1).then(|| {
            if self.schedule.together {
                keys.every(k, self.schedule, self.group)
            } else {
                tile.own_keys(k, self.schedule, self.group)
            }
        });
        let mine = own.as_ref().unwrap_or(&keys);
        k.if_else(
            mine.any,
            |k| self.walk(k, tile, &keys, mine, owed),
            |k| {
                self.give_back_queries(k, owed);
                if self.has_own_rows() {
                    k.if_(keys.any, |k| {
                        let at = k.mov_b32(keys.last);
                        self.pass_down_to(k, at, keys.first);
                    });
                }
                self.clear_output(k);
            },
        );
        k.section("consumer: the end of a tile");
        let merges = self.schedule.together || self.schedule.split > 1;
        if merges { Phase::Merge } else { Phase::Store }.begin(k);
        for row in &self.softmax.rows {
            row.finish(k);
        }
        if !self.schedule.together {
            self.end(k, tile, owed);
            if self.schedule.persistent {
                Phase::Tile.begin(k);
            }
            return;
        }
        let first = k.setp_eq_u32(self.group, 0u32);
        k.if_else(
            first,
            |k| {
                gather::receive(k, self);
                if self.schedule.split == 1 {
                    Phase::Store.begin(k);
                }
                self.end(k, tile, owed);
            },
            |k| {
                gather::send(k, self);
                if self.schedule.split > 1 {
                    k.comment("every thread of a cluster waits for what it arrived at");
                    k.cluster_wait(true);
                }
            },
        );
    }

    fn clear_output(&self, k: &mut KernelBuilder) {
        for &o in &self.o {
            k.set(o, |k| k.mov_f32(0.0));
        }
    }

    /// Whether there are several warpgroups, each with rows of its own.
    fn has_own_rows(&self) -> bool {
        self.schedule.warpgroups > 1 && !self.schedule.together
    }

    /// Merges with other blocks, and stores the tile's result.
    fn end(&self, k: &mut KernelBuilder, tile: &Tile, owed: Reg<B32>) {
        if self.schedule.by_length {
            k.comment("all lanes have read what the producer said");
            k.bar_warp_sync();
            self.q.give_back(k, self.first_lane);
            partial::store(k, self, tile);
            return;
        }
        if self.schedule.parts > 1 {
            partial::store(k, self, tile);
            self.q.advance(k);
            return;
        }
        if self.schedule.split > 1 {
            merge::run(k, self, tile);
            self.store_lse(k, tile, true);
            self.q.advance(k);
            return;
        }
        self.store_lse(k, tile, false);
        self.store_output(k, tile);
        let free = self.q.free(k);
        let free = k.shared_addr(free);
        k.set(owed, |k| k.mov_b32(free));
        self.q.advance(k);
        if self.schedule.q_stages == 1 {
            // The next queries need this very slot: waiting longer would be a deadlock.
            self.give_back_queries(k, owed);
            k.set(owed, |k| k.mov_b32(0u32));
        }
    }

    /// Releases the slot of the previous tile's queries, once its output has been read from there.
    fn give_back_queries(&self, k: &mut KernelBuilder, owed: Reg<B32>) {
        if self.schedule.split > 1 || !self.schedule.persistent || self.schedule.by_length {
            return;
        }
        let some = k.setp_ne_u32(owed, 0u32);
        let mine = k.and_pred(self.leader, some);
        k.if_(mine, |k| {
            k.comment("the output before has been read, so its slot is free for queries");
            k.bulk_wait_read(0);
            k.mbarrier_arrive(owed);
        });
    }

    /// The walk over the key tiles.
    fn walk(&self, k: &mut KernelBuilder, tile: &Tile, block: &Keys, keys: &Keys, owed: Reg<B32>) {
        let Schedule { block_n, .. } = self.schedule;
        // Of a tile without keys there are no queries in shared memory.
        self.load_queries(k);
        let at = k.mov_b32(if self.schedule.together { keys.last } else { block.last });
        if self.spec.right && self.has_own_rows() {
            let after = k.add_s32(keys.last, 1);
            self.pass_down_to(k, at, after);
        }
        // Tiles from `after_full` on hold keys that some row does not see; so do those before `first_full`.
        let after_full = k.div_u32(keys.range.full_end, block_n);
        let after_full = k.max_s32(after_full, keys.first);

        k.section("walk: the first key tile");
        let descales = self.blocks.as_ref().map(|blocks| blocks.of(k, at));
        Phase::KWait.begin_tile(k, at);
        self.k.wait_filled(k);
        self.begin_turn(k, at);
        Phase::Qk.begin_tile(k, at);
        k.wgmma_fence();
        self.scores(k);
        k.wgmma_commit();
        self.end_turn(k);
        self.give_back_queries(k, owed);
        if !self.apart.is_empty() {
            self.clear_output(k);
            self.owe(k, None);
        }
        Phase::QkWait.begin_tile(k, at);
        k.wgmma_wait(0);
        Phase::Softmax.begin_tile(k, at);
        self.give_back(k, &self.k);
        if let Some((blocks, [of_k, of_v])) = self.blocks.as_ref().zip(descales) {
            blocks.scale(k, self.spec, &self.softmax, of_k);
            // The output is still 0.
            blocks.change(k, of_v);
        }
        self.softmax.score(k, &self.scores, true);
        let first_full = self.spec.left.then(|| {
            let up = k.add_u32(keys.range.full_begin, block_n - 1);
            k.div_u32(up, block_n)
        });
        let mut partly = k.setp_ge_s32(at, after_full);
        if let Some(first_full) = first_full {
            let before = k.setp_lt_s32(at, first_full);
            partly = k.or_pred(partly, before);
        }
        k.if_(partly, |k| self.mask(k, tile, at));
        self.softmax.first(k, &self.scores);
        self.pack(k);
        k.set(at, |k| step(k, self.schedule, at, self.schedule.stride()));

        k.section("walk: masked tiles from the end");
        self.tiles_down_to(k, tile, at, after_full, true);
        k.section("walk: tiles that every row sees");
        let stop = first_full.map_or(keys.first, |first_full| k.max_s32(first_full, keys.first));
        match &self.aside {
            None => self.tiles_down_to(k, tile, at, stop, false),
            Some(aside) => k.while_(
                |k| k.setp_ge_s32(at, stop),
                |k, _| {
                    let pause = k.sub_s32(at, self.schedule.flush - 1);
                    let pause = k.max_s32(pause, stop);
                    self.tiles_down_to(k, tile, at, pause, false);
                    let goes_on = k.setp_ge_s32(at, stop);
                    k.if_(goes_on, |k| {
                        aside.put(k, &self.softmax, &self.o);
                        k.set(self.more, |k| k.mov_pred(false));
                    });
                },
            ),
        }
        if self.spec.left {
            k.section("walk: masked tiles at the window's start");
            self.tiles_down_to(k, tile, at, keys.first, true);
        }

        k.section("walk: the last values");
        let stride = self.schedule.stride();
        Phase::VWait.begin_after(k, at, stride);
        self.v.wait_filled(k);
        Phase::Pv.begin_after(k, at, stride);
        self.start_values(k);
        Phase::PvWait.begin_after(k, at, stride);
        k.wgmma_wait(0);
        self.flush_last(k);
        self.give_back(k, &self.v);
        if let Some(aside) = &self.aside {
            aside.take_back(k, &self.softmax, &self.o);
        }
        if self.spec.left && self.has_own_rows() {
            self.pass_down_to(k, at, block.first);
        }
    }

    /// Skips tiles that none of this warpgroup's rows see.
    fn pass_down_to(&self, k: &mut KernelBuilder, at: Reg<B32>, stop: Reg<B32>) {
        k.comment("tiles of the other warpgroups");
        k.while_(
            |k| k.setp_ge_s32(at, stop),
            |k, _| {
                Phase::Skip.begin_tile(k, at);
                for ring in [&self.k, &self.v] {
                    ring.wait_filled(k);
                    self.give_back(k, ring);
                }
                self.begin_turn(k, at);
                self.end_turn(k);
                k.set(at, |k| k.sub_s32(at, 1));
            },
        );
    }

    /// Waits for this warpgroup's turn at the tensor cores. Every warpgroup takes one for every key tile.
    fn begin_turn(&self, k: &mut KernelBuilder, at: Reg<B32>) {
        if self.takes_turns() {
            Phase::Turn.begin_tile(k, at);
            let own = k.add_u32(self.group, TURN);
            k.bar_sync(own, 256u32);
        }
    }

    /// Gives the turn to the next warpgroup.
    fn end_turn(&self, k: &mut KernelBuilder) {
        if self.takes_turns() {
            let next = k.add_u32(self.group, 1u32);
            let wraps = k.setp_eq_u32(next, self.schedule.warpgroups);
            let next = k.selp_b32(0u32, next, wraps);
            let next = k.add_u32(next, TURN);
            k.bar_arrive(next, 256u32);
        }
    }

    fn tiles_down_to(&self, k: &mut KernelBuilder, tile: &Tile, at: Reg<B32>, stop: Reg<B32>, masked: bool) {
        k.while_(
            |k| k.setp_ge_s32(at, stop),
            |k, _| {
                self.key_tile(k, tile, at, masked);
                k.set(at, |k| step(k, self.schedule, at, self.schedule.stride()));
            },
        );
    }

    /// Computes the scores of one key tile while the values of the previous tile are added.
    fn key_tile(&self, k: &mut KernelBuilder, tile: &Tile, at: Reg<B32>, masked: bool) {
        let before = self.schedule.stride();
        let descales = self.blocks.as_ref().map(|blocks| blocks.of(k, at));
        Phase::KWait.begin_tile(k, at);
        self.k.wait_filled(k);
        self.begin_turn(k, at);
        Phase::Qk.begin_tile(k, at);
        k.wgmma_fence();
        self.scores(k);
        k.wgmma_commit();
        Phase::VWait.begin_after(k, at, before);
        self.v.wait_filled(k);
        Phase::Pv.begin_after(k, at, before);
        // The wait is a loop, and the assembler wants a fence on this side of it too.
        self.start_values(k);
        self.end_turn(k);
        Phase::QkWait.begin_tile(k, at);
        k.wgmma_wait(1);
        Phase::Softmax.begin_tile(k, at);
        self.give_back(k, &self.k);
        let change = self.blocks.as_ref().zip(descales).map(|(blocks, [of_k, of_v])| {
            blocks.scale(k, self.spec, &self.softmax, of_k);
            blocks.change(k, of_v)
        });
        self.softmax.score(k, &self.scores, masked);
        if masked {
            self.mask(k, tile, at);
        }
        self.softmax.step(k, &self.scores, masked, &|k, factors| {
            Phase::PvWait.begin_after(k, at, before);
            k.wgmma_wait(0);
            Phase::Rescale.begin_tile(k, at);
            self.give_back(k, &self.v);
            self.flush_last(k);
            self.pack(k);
            self.rescale(k, factors, change);
        });
        k.set(self.more, |k| k.mov_pred(true));
    }

    /// Multiplies the output by these factors, now or, where sums are flushed, when the next ones are added to it; then also by
    /// what changes its unit.
    fn rescale(&self, k: &mut KernelBuilder, factors: Option<[Reg<F32>; 2]>, change: Option<Reg<F32>>) {
        if !self.apart.is_empty() {
            let factors = match (factors, change) {
                (Some(factors), Some(change)) => Some(factors.map(|factor| k.mul_f32(factor, change))),
                (None, Some(change)) => Some([change; 2]),
                (factors, None) => factors,
            };
            return self.owe(k, factors);
        }
        for (half, factor) in factors.into_iter().flatten().enumerate() {
            for o in softmax::row_elements(&self.o, half) {
                k.set(o, |k| k.mul_f32(o, factor));
            }
        }
    }

    /// Remembers what the output is to be multiplied by: 1 where nothing is given.
    fn owe(&self, k: &mut KernelBuilder, factors: Option<[Reg<F32>; 2]>) {
        for (half, &owed) in self.owed_factors.iter().enumerate() {
            k.set(owed, |k| match factors {
                Some(factors) => k.mov_f32(factors[half]),
                None => k.mov_f32(1.0),
            });
        }
    }

    /// Takes the queries into registers, if they are kept there.
    fn load_queries(&self, k: &mut KernelBuilder) {
        if self.q_regs.is_empty() {
            return;
        }
        let slot = self.q.address(k);
        let slot = if self.schedule.together { slot } else { k.mad_lo_u32(self.group, ROWS * PITCH, slot) };
        let loaded = stage::read(k, self.q_regs.len() as u32, self.thread, slot, self.sizes.q_panel);
        for (kept, loaded) in self.q_regs.iter().flatten().zip(loaded.iter().flatten()) {
            k.set(*kept, |k| k.mov_b32(*loaded));
        }
    }

    /// S = Q Kᵀ, from the next slots.
    fn scores(&self, k: &mut KernelBuilder) {
        k.comment("S = Q K^T");
        let mut q = self.q.address(k);
        if !self.schedule.together {
            q = k.mad_lo_u32(self.group, ROWS * PITCH, q);
        }
        let (q, keys) = (Descriptor::new(k, q, 16), self.k.address(k));
        let keys = Descriptor::new(k, keys, 16);
        let spec = Wgmma::new(self.schedule.block_n as u16, matrix_ty(self.spec.dtype));
        for step in 0..self.spec.head_dim.div_ceil(depth(self.spec)) {
            let (panel, inside) = (step / STEPS, STEP * (step % STEPS));
            let a = q.at(k, panel * self.sizes.q_panel + inside);
            let b = keys.at(k, panel * self.sizes.kv_panel + inside);
            match self.q_regs.get(step as usize) {
                Some(&a) => k.wgmma_rs(spec, &self.scores, a, b, step > 0),
                None => k.wgmma_ss(spec, &self.scores, a, b, step > 0),
            }
        }
    }

    /// Starts O += P V, from the next slot. Where sums are flushed, all columns are added but the last ones, which are
    /// left to [`Consumer::flush_last`].
    fn start_values(&self, k: &mut KernelBuilder) {
        let parts = self.o.len().checked_div(self.apart.len()).unwrap_or(1);
        for part in 0..parts {
            if part > 0 {
                k.wgmma_wait(0);
                self.flush(k, part - 1);
            }
            k.wgmma_fence();
            if self.spec.dtype.is_fp8() {
                self.add_turned_values(k, part);
            } else {
                self.add_values(k);
            }
            k.wgmma_commit();
        }
    }

    /// Adds to the output what the last product with values came to.
    fn flush_last(&self, k: &mut KernelBuilder) {
        if !self.apart.is_empty() {
            self.flush(k, self.o.len() / self.apart.len() - 1);
        }
    }

    /// Adds one part of the columns to the output.
    fn flush(&self, k: &mut KernelBuilder, part: usize) {
        let columns = self.o.iter().skip(part * self.apart.len());
        for (i, (&o, &apart)) in columns.zip(&self.apart).enumerate() {
            k.set(o, |k| k.fma_f32(o, self.owed_factors[i % 4 / 2], apart));
        }
    }

    /// P V for one part of the columns, from the next slot of values that are turned around.
    fn add_turned_values(&self, k: &mut KernelBuilder, part: usize) {
        k.comment("P V");
        let to = if self.apart.is_empty() { &self.o } else { &self.apart };
        let width = 2 * to.len() as u32;
        let values = self.v.address(k);
        let values = Descriptor::new(k, values, 16);
        let spec = Wgmma::new(width as u16, matrix_ty(self.spec.dtype));
        for (step, &p) in (0..).zip(&self.p) {
            let (panel, inside) = (step / STEPS, STEP * (step % STEPS));
            let row = part as u32 * width * PITCH;
            let b = values.at(k, panel * self.sizes.turned_panel + row + inside);
            match step {
                0 if self.apart.is_empty() => k.wgmma_rs(spec, to, p, b, self.more),
                _ => k.wgmma_rs(spec, to, p, b, step > 0),
            }
        }
    }

    /// O += P V, from the next slot.
    fn add_values(&self, k: &mut KernelBuilder) {
        k.comment("O += P V");
        let values = self.v.address(k);
        let values = Descriptor::new(k, values, self.sizes.kv_panel);
        let spec = Wgmma::new(self.spec.head_dim_v as u16, matrix_ty(self.spec.dtype));
        let spec = Wgmma { trans_b: true, ..spec };
        for (step, &p) in self.p.iter().enumerate() {
            let b = values.at(k, step as u32 * 16 * PITCH);
            if step == 0 {
                k.wgmma_rs(spec, &self.o, p, b, self.more);
            } else {
                k.wgmma_rs(spec, &self.o, p, b, true);
            }
        }
    }

    /// Says that this warp is done with a slot, and goes on to the next.
    fn give_back(&self, k: &mut KernelBuilder, ring: &Ring) {
        if self.schedule.multicast > 1 {
            // One lane for each block of the cluster.
            let free = ring.free(k);
            let free = k.shared_addr(free);
            let lane = k.and_b32(self.thread, 31u32);
            let block = k.and_b32(lane, self.schedule.multicast - 1);
            let there = k.mapa(free, block);
            let tells = k.setp_lt_u32(lane, self.schedule.multicast);
            k.when(tells, |k| k.mbarrier_arrive_cluster(there, Scope::Cta));
        } else {
            let free = ring.free(k);
            k.when(self.first_lane, |k| k.mbarrier_arrive(free));
        }
        ring.advance(k);
    }

    fn mask(&self, k: &mut KernelBuilder, tile: &Tile, at: Reg<B32>) {
        let first_key = k.mul_lo_u32(at, self.schedule.block_n);
        let origin = k.add_s32(first_key, self.column);
        for half in 0..2 {
            let row = self.problem_row(k, tile, half);
            let end = tile.band.row_end(k, row);
            let end = k.sub_s32(end, origin);
            let begin = tile.band.row_begin(k, row).map(|begin| k.sub_s32(begin, origin));
            softmax::hide(k, &self.scores, half as usize, begin, end);
        }
    }

    /// The probabilities as operands of the next product.
    fn pack(&self, k: &mut KernelBuilder) {
        pack_into(k, self.spec.dtype, &self.scores, &self.p);
    }

    /// The problem's row for this thread's upper (0) or lower (1) row.
    pub fn problem_row(&self, k: &mut KernelBuilder, tile: &Tile, half: u32) -> Reg<B32> {
        let row = k.add_u32(tile.rows.first_row, self.row);
        if half == 0 { row } else { k.add_u32(row, 8u32) }
    }

    /// Rows of V after the last key are not of this batch entry. Their probabilities are 0, but 0 · NaN is NaN,
    /// so the consumers overwrite these rows with zeros. Only the first key tile of the walk has any.
    fn clear_values(&self, k: &mut KernelBuilder, tile: &Tile, at: Reg<B32>) {
        let Schedule { block_n, .. } = self.schedule;
        let first_key = k.mul_lo_u32(at, block_n);
        let left = k.sub_s32(tile.band.keys, first_key);
        let some = k.setp_lt_s32(left, block_n as i32);
        k.if_(some, |k| {
            k.comment("zeros behind the last key");
            self.v.wait_filled(k);
            let slot = self.v.address(k);
            let zero = k.mov_f32(0.0);
            // Each thread clears 16 bytes of a row; rows do not mix in the swizzle.
            let threads = 128 * self.schedule.readers();
            let tid = k.tid_x();
            let chunk = k.and_b32(tid, 7u32);
            let row = k.shr_u32(tid, 3u32);
            let row = k.add_u32(row, left);
            let row = k.mov_b32(row);
            k.while_(
                |k| k.setp_lt_s32(row, block_n as i32),
                |k, _| {
                    let at = k.mad_lo_u32(row, PITCH, slot);
                    let at = k.mad_lo_u32(chunk, 16u32, at);
                    for panel in 0..panels(self.spec.head_dim_v, self.spec.dtype) {
                        k.st_shared_vec(at.at((panel * self.sizes.kv_panel) as i32), [zero; 4]);
                    }
                    k.set(row, |k| k.add_u32(row, threads / 8));
                },
            );
            k.fence_proxy_async(ProxySpace::Shared);
            k.bar_sync(if self.schedule.together { OWN } else { ALL }, threads);
        });
    }

    /// Writes lse, if it is wanted: by one of the four threads that share a row.
    fn store_lse(&self, k: &mut KernelBuilder, tile: &Tile, first_block_only: bool) {
        if !self.spec.lse {
            return;
        }
        k.section("consumer: lse");
        let mut first = k.setp_eq_u32(self.column, 0u32);
        if first_block_only {
            let rank = k.cluster_ctarank();
            let zero = k.setp_eq_u32(rank, 0u32);
            first = k.and_pred(first, zero);
        }
        let base = k.param(Sm90Params::lse);
        let head = [Sm90Params::lse_batch, Sm90Params::lse_head];
        let base = self.queries_address(k, tile, base, head);
        let rows = QueryRows::read(k, self.spec, [Sm90Params::lse_row, Sm90Params::lse_head]);
        for half in 0..2 {
            let row = self.problem_row(k, tile, half);
            let RowState { reference, sum, .. } = self.softmax.rows[half as usize];
            let value = self.softmax.params.lse(k, reference, sum, self.softmax.shift);
            let exists = tile.has_row(k, self.schedule, row);
            let mine = k.and_pred(first, exists);
            let row = tile.row_of_queries(k, row);
            let address = rows.address(k, base, row);
            k.when(mine, |k| k.st_global(address, value));
        }
    }

    /// The address of this tile's queries in a tensor: of its head, or of the first of its heads.
    pub fn queries_address(
        &self,
        k: &mut KernelBuilder,
        tile: &Tile,
        base: Reg<B64>,
        strides: [flashcore_ptx::ParamHandle<Sm90Params, u64>; 2],
    ) -> Reg<B64> {
        let head = first_query_head(k, self.spec, tile.rows.head);
        Self::address_of(k, tile, head, base, strides)
    }

    /// The address of this tile's head in a tensor.
    pub fn head_address(
        k: &mut KernelBuilder,
        tile: &Tile,
        base: Reg<B64>,
        strides: [flashcore_ptx::ParamHandle<Sm90Params, u64>; 2],
    ) -> Reg<B64> {
        Self::address_of(k, tile, tile.rows.head, base, strides)
    }

    fn address_of(
        k: &mut KernelBuilder,
        tile: &Tile,
        head: Reg<B32>,
        base: Reg<B64>,
        [batch_stride, head_stride]: [flashcore_ptx::ParamHandle<Sm90Params, u64>; 2],
    ) -> Reg<B64> {
        if tile.starts.queries.is_some() {
            let (head_stride, head) = (k.param(head_stride), k.cvt_u64_u32(tile.rows.head));
            return k.mad_lo_u64(head, head_stride, base);
        }
        let (batch_stride, head_stride) = (k.param(batch_stride), k.param(head_stride));
        let (batch, head) = (k.cvt_u64_u32(tile.rows.batch), k.cvt_u64_u32(head));
        let entry = k.mad_lo_u64(batch, batch_stride, base);
        k.mad_lo_u64(head, head_stride, entry)
    }

    /// Makes the descales of this tile's queries and keys a part of the scale.
    fn descale_scores(&self, k: &mut KernelBuilder, tile: &Tile) {
        let q = DescaleParams::read(k, crate::Operand::Q, tile.rows.batch, tile.kv_head);
        let keys = DescaleParams::read(k, crate::Operand::K, tile.rows.batch, tile.kv_head);
        let both = k.mul_f32(q, keys);
        let base = SoftmaxParams::read_from(k, self.spec, &HANDLES);
        self.softmax.multiply(k, &base, both);
    }

    /// Divides by the sums and stores the output by TMA, through the slot of the tile's queries.
    fn store_output(&self, k: &mut KernelBuilder, tile: &Tile) {
        let Some(o_map) = self.o_map else { return };
        k.section("consumer: output");
        let fp8 = self.spec.dtype.is_fp8();
        let descale = match &self.blocks {
            Some(blocks) => Some(blocks.unit),
            None => fp8.then(|| DescaleParams::read(k, crate::Operand::V, tile.rows.batch, tile.kv_head)),
        };
        for (half, row) in self.softmax.rows.iter().enumerate() {
            let inverse = SoftmaxParams::inverse(k, row.sum);
            let inverse = descale.map_or(inverse, |descale| k.mul_f32(inverse, descale));
            for o in softmax::row_elements(&self.o, half) {
                k.set(o, |k| k.mul_f32(o, inverse));
            }
        }
        let out = self.spec.out();
        let rounded = stage::rounded(k, out, &self.o);
        let own = k.add_u32(self.group, OWN);
        k.comment("no warp of the warpgroup reads its queries any more");
        k.bar_sync(own, 128u32);
        if tile.starts.queries.is_none() {
            return self.store_rows(k, tile, o_map, &rounded, own);
        }
        let first_row = k.mad_lo_u32(self.group, ROWS, tile.rows.first_row);
        let past = k.add_u32(first_row, ROWS);
        let whole = k.setp_le_s32(past, tile.rows.len_q);
        k.if_else(
            whole,
            |k| self.store_rows(k, tile, o_map, &rounded, own),
            |k| {
                k.comment("the next rows are another sequence's");
                self.store_some_rows(k, tile, &rounded);
            },
        );
    }

    /// Stores all 64 rows by TMA, given the barrier of the warpgroup.
    fn store_rows(
        &self,
        k: &mut KernelBuilder,
        tile: &Tile,
        o_map: Reg<B64>,
        rounded: &[[Reg<B32>; 2]],
        own: Reg<B32>,
    ) {
        let out = self.spec.out();
        let slot = self.q.address(k);
        let slot = k.mad_lo_u32(self.group, ROWS * PITCH, slot);
        stage::write(k, rounded, self.thread, slot, self.sizes.q_panel);
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_sync(own, 128u32);
        k.if_(self.leader, |k| {
            let first_row = k.mad_lo_u32(self.group, ROWS, tile.rows.first_row);
            for panel in 0..panels(self.spec.head_dim_v, out) {
                let at = tile.place(k, self.spec, panel * columns(out), first_row);
                let from = slot.at((panel * self.sizes.q_panel) as i32);
                k.tensor_store(o_map, &at, from, BulkHint::new());
            }
            k.bulk_commit();
        });
    }

    /// Stores the rows that are the problem's, from registers.
    fn store_some_rows(&self, k: &mut KernelBuilder, tile: &Tile, rounded: &[[Reg<B32>; 2]]) {
        for (half, (row, exists)) in self.output_rows(k, tile).into_iter().enumerate() {
            for (eight, words) in rounded.iter().take(self.spec.head_dim_v as usize / 8).enumerate() {
                k.when(exists, |k| k.st_global(row.at(16 * eight as i32), words[half]));
            }
        }
    }

    /// Where this thread's two rows of the output begin, at its first column, and whether they are the problem's.
    pub fn output_rows(&self, k: &mut KernelBuilder, tile: &Tile) -> [(Reg<B64>, Reg<Pred>); 2] {
        let base = k.param(Sm90Params::o);
        let base = self.queries_address(k, tile, base, [Sm90Params::o_batch, Sm90Params::o_head]);
        let rows = QueryRows::read(k, self.spec, [Sm90Params::o_row, Sm90Params::o_head]);
        [0, 1].map(|half| {
            let row = self.problem_row(k, tile, half);
            let exists = tile.has_row(k, self.schedule, row);
            let row = tile.row_of_queries(k, row);
            let address = rows.address(k, base, row);
            let address = k.mad_wide_u32(self.column, 2u32, address);
            (address, exists)
        })
    }

    pub fn inverse(&self, k: &mut KernelBuilder, half: usize) -> Reg<F32> {
        SoftmaxParams::inverse(k, self.softmax.rows[half].sum)
    }
}
