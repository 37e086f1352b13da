//! A consumer warpgroup: 64 keys, with the gradients of them and of their values in registers.

use flashcore_ptx::{
    B32, BulkHint, F32, KernelBuilder, Operand, ParamHandle, Pred, ProxySpace, Reg, Scope, Shared, TensorMap,
    Wgmma,
};

use super::{
    ALL, BwdParams, CONSUMERS, DO_STAGES, DQ_EMPTY, DQ_FULL, DS_STAGES, KEYS, Memory, OWN, PITCH, ROWS,
    Schedule, Sizes, TURN, WARPGROUPS,
    block::{Block, Rounds, Steps},
    columns, panels,
    params::{self, PackedGradients},
    parts::{self, Hidden, STEP, STEPS},
    writer,
};
use crate::{
    Spec,
    parts::{
        fragment::{matrix_ty, pack_into},
        softmax::{ScoreHandles, SoftmaxParams},
        work::Rows,
    },
    phase::wait_for_launch,
    sm90::{descriptor::Descriptor, ring::Ring, stage},
};

const HANDLES: ScoreHandles<BwdParams> = ScoreHandles {
    exp_scale: BwdParams::exp_scale,
    tanh_scale: BwdParams::tanh_scale,
    scale: BwdParams::scale,
    softcap: BwdParams::softcap,
};

pub(super) struct Consumer<'a> {
    schedule: Schedule,
    spec: &'a Spec,
    sizes: Sizes,
    memory: &'a Memory,
    params: SoftmaxParams,
    /// The queries whose scores are next, and those whose dK is.
    q: Ring,
    q_behind: Ring,
    d_o: Ring,
    /// dS as it is written, and as it is read for dQ.
    ds_in: Ring,
    ds_out: Ring,
    /// Whether the next part of dQ is of an even step (0) or of an odd one (1).
    dq_parity: Reg<B32>,
    /// Sᵀ, then Pᵀ; dPᵀ, then dSᵀ.
    s: Vec<Reg<F32>>,
    dp: Vec<Reg<F32>>,
    /// Pᵀ and dSᵀ as A operands.
    p: Vec<[Reg<B32>; 4]>,
    ds: Vec<[Reg<B32>; 4]>,
    dk: Vec<Reg<F32>>,
    dv: Vec<Reg<F32>>,
    dq: Vec<Reg<F32>>,
    /// The warpgroup.
    group: Reg<B32>,
    /// The thread in the warpgroup.
    thread: Reg<B32>,
    lane: Reg<B32>,
    first_lane: Reg<Pred>,
    /// The key in the block of this thread's upper row.
    row: Reg<B32>,
    /// The first query that this thread holds of every eight.
    column: Reg<B32>,
}

impl<'a> Consumer<'a> {
    pub fn new(k: &mut KernelBuilder, schedule: Schedule, spec: &'a Spec, memory: &'a Memory) -> Self {
        k.section("consumer");
        let sizes = schedule.sizes(spec);
        let tid = k.tid_x();
        let group = k.shr_u32(tid, 7u32);
        let group = k.shfl_idx(group, 0u32);
        let thread = k.and_b32(tid, 127u32);
        let lane = k.and_b32(tid, 31u32);
        let warp = k.shr_u32(tid, 5u32);
        let g = k.shr_u32(lane, 2u32);
        let t = k.and_b32(lane, 3u32);
        let zeros = |k: &mut KernelBuilder, count: u32| (0..count).map(|_| k.mov_f32(0.0)).collect();
        let operands = |k: &mut KernelBuilder| {
            (0..schedule.block_m / 16).map(|_| std::array::from_fn(|_| k.mov_b32(0u32))).collect()
        };
        Self {
            schedule,
            spec,
            sizes,
            memory,
            params: SoftmaxParams::read_from(k, spec, &HANDLES),
            q: Ring::consumer(k, memory.q, sizes.q_slot, memory.q_bars, schedule.stages),
            q_behind: Ring::consumer(k, memory.q, sizes.q_slot, memory.q_bars, schedule.stages),
            d_o: Ring::consumer(k, memory.d_o, sizes.do_slot, memory.do_bars, DO_STAGES),
            ds_in: Ring::producer(k, memory.ds, sizes.ds, memory.ds_bars, DS_STAGES),
            ds_out: Ring::consumer(k, memory.ds, sizes.ds, memory.ds_bars, DS_STAGES),
            dq_parity: k.mov_b32(0u32),
            s: zeros(k, schedule.block_m / 2),
            dp: zeros(k, schedule.block_m / 2),
            p: operands(k),
            ds: operands(k),
            dk: zeros(k, spec.head_dim / 2),
            dv: zeros(k, spec.head_dim_v / 2),
            dq: zeros(k, schedule.part_columns(spec.head_dim) / 2),
            group,
            thread,
            lane,
            first_lane: k.setp_eq_u32(lane, 0u32),
            row: k.mad_lo_u32(warp, 16u32, g),
            column: k.shl_b32(t, 1u32),
        }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        wait_for_launch(k);
        let block = Block::find(k, self.schedule, self.spec);
        match block.exists {
            Some(exists) => k.if_(exists, |k| self.keys(k, &block)),
            None => self.keys(k, &block),
        }
    }

    /// The gradients of the block's keys and values.
    fn keys(&self, k: &mut KernelBuilder, block: &Block) {
        k.if_(block.any, |k| self.walk(k, block));
        k.section("consumer: dK and dV");
        let scale = k.param(BwdParams::scale);
        for &dk in &self.dk {
            k.set(dk, |k| k.mul_f32(dk, scale));
        }
        k.comment("no warpgroup reads keys or values any more");
        k.bar_sync(ALL, CONSUMERS);
        self.stage(k, &self.dv, self.memory.v);
        self.stage(k, &self.dk, self.memory.k);
        k.fence_proxy_async(ProxySpace::Shared);
        let own = k.add_u32(self.group, OWN);
        k.bar_sync(own, 128u32);
        let by_tma = |k: &mut KernelBuilder| {
            let leader = k.setp_eq_u32(self.thread, 0u32);
            k.if_(leader, |k| {
                self.store(k, block, BwdParams::dv_map, self.spec.head_dim_v, self.memory.v);
                self.store(k, block, BwdParams::dk_map, self.spec.head_dim, self.memory.k);
                k.bulk_commit();
                k.bulk_wait_read(0);
            });
        };
        let Some(len) = block.keys.len() else { return by_tma(k) };
        let first_key = k.mad_lo_u32(self.group, ROWS, block.first_key);
        let left = k.sub_s32(len, first_key);
        let all = k.setp_ge_s32(left, ROWS as i32);
        k.if_else(all, by_tma, |k| {
            k.comment("the rows behind are the next sequence's");
            let both = [
                (params::DV, self.spec.head_dim_v, self.memory.v),
                (params::DK, self.spec.head_dim, self.memory.k),
            ];
            for (gradient, head_dim, tile) in both {
                let rows = (self.own_rows(k, tile), self.sizes.k_panel);
                let to = PackedGradients::row(k, gradient, &block.keys, block.kv_head, first_key);
                stage::store_rows(k, rows, self.thread, left, to, (head_dim, self.spec.dtype));
            }
        });
    }

    /// The walk over the query tiles.
    fn walk(&self, k: &mut KernelBuilder, block: &Block) {
        k.section("walk: the first scores");
        let steps = block.steps(k, self.spec);
        for bar in [self.memory.k_bar, self.memory.v_bar] {
            k.mbarrier_wait_parity(bar, 0u32, Scope::Cta);
        }
        if self.spec.has_foreign_keys() {
            self.clear(k, block);
        }
        self.start_scores(k);
        self.start_dp(k);
        k.wgmma_wait(1);
        self.score(k, block, &steps);
        let is_second = k.setp_eq_u32(self.group, 1u32);
        k.if_(is_second, |k| self.end_turn(k));
        // The first step has no dQ before it: it computes its own, which counts with the next.
        let later = k.mov_pred(false);
        k.section("walk: the end of a step and the start of the next");
        k.while_(
            |k| k.setp_gt_s32(steps.left, 1),
            |k, _| {
                self.finish_step(k, block, &steps, later, true);
                k.set(later, |k| k.mov_pred(true));
                steps.advance(k);
                k.comment("dK, and the next scores");
                k.wgmma_wait(1);
                self.q_behind.give_back(k, self.first_lane);
                self.score(k, block, &steps);
            },
        );
        k.section("walk: the end of the last step");
        self.finish_step(k, block, &steps, later, false);
        self.start_dq(k);
        k.wgmma_wait(0);
        self.stage_dq(k, block.rounds.map(|rounds| (rounds, steps.at)));
        if self.schedule.pingpong {
            k.comment("the turn that nobody takes any more");
            k.if_(!is_second, |k| self.begin_turn(k));
        }
    }

    /// P and dS of a tile of queries, whose scores are there, and whose dP has been issued.
    fn score(&self, k: &mut KernelBuilder, block: &Block, steps: &Steps) {
        let first_row = steps.first_row(k, self.schedule.block_m);
        let hidden = self.hidden(k, block, first_row);
        let (lse, delta) =
            (self.numbers(k, &self.q, self.sizes.q), self.numbers(k, &self.d_o, self.sizes.d_o));
        if self.spec.softcap {
            k.wgmma_wait(0);
            self.capped(k, &hidden, lse, delta);
        } else {
            self.params.score(k, &self.s);
            let probabilities = |k: &mut KernelBuilder| {
                for (eight, s) in (0..).zip(self.s.chunks_exact(4)) {
                    let lse = parts::number(k, lse, eight);
                    for (i, &s) in s.iter().enumerate() {
                        k.set(s, |k| parts::probability(k, self.params, s, lse[i % 2]));
                    }
                }
            };
            // On both ways, so that the assembler does not move them behind the wait for dP.
            k.if_else(
                hidden.any,
                |k| {
                    hidden.hide(k, &self.s, 0);
                    probabilities(k);
                },
                probabilities,
            );
            k.wgmma_wait(0);
            for (eight, (s, dp)) in (0..).zip(self.s.chunks_exact(4).zip(self.dp.chunks_exact(4))) {
                let delta = parts::number(k, delta, eight);
                for (i, (&s, &dp)) in s.iter().zip(dp).enumerate() {
                    k.set(dp, |k| {
                        let difference = k.sub_f32(dp, delta[i % 2]);
                        k.mul_f32(difference, s)
                    });
                }
            }
        }
        pack_into(k, self.spec.dtype, &self.s, &self.p);
        pack_into(k, self.spec.dtype, &self.dp, &self.ds);
    }

    /// The products with P and dS, and dQ of the step before; `next`: those that begin the next step are issued on the way.
    fn finish_step(&self, k: &mut KernelBuilder, block: &Block, steps: &Steps, later: Reg<Pred>, next: bool) {
        self.store_ds(k);
        self.begin_turn(k);
        k.comment("dV += P^T dO");
        let tile = self.d_o.address(k);
        k.wgmma_fence();
        self.add(k, &self.dv, &self.p, tile);
        k.wgmma_commit();
        self.start_dq(k);
        k.comment("dK += dS^T Q");
        let tile = self.q_behind.address(k);
        k.wgmma_fence();
        self.add(k, &self.dk, &self.ds, tile);
        k.wgmma_commit();
        k.comment("dV");
        k.wgmma_wait(2);
        self.d_o.give_back(k, self.first_lane);
        if next {
            self.q.advance(k);
            self.start_scores(k);
            if self.schedule.is_roomy(self.spec) {
                self.start_dp(k);
            }
        }
        self.end_turn(k);
        k.comment("dQ");
        k.wgmma_wait(match (next, self.schedule.is_roomy(self.spec)) {
            (false, _) => 1,
            (true, false) => 2,
            (true, true) => 3,
        });
        k.if_(later, |k| {
            self.ds_out.give_back(k, self.first_lane);
            let rounds = block.rounds.map(|rounds| (rounds, steps.previous(k)));
            self.stage_dq(k, rounds);
        });
        if next && !self.schedule.is_roomy(self.spec) {
            if self.schedule.block_m > ROWS {
                k.comment("dK, whose operands leave registers for dP");
                k.wgmma_wait(1);
            }
            self.start_dp(k);
        }
    }

    /// Waits for this warpgroup's turn at the tensor cores.
    fn begin_turn(&self, k: &mut KernelBuilder) {
        if self.schedule.pingpong {
            let own = k.add_u32(self.group, TURN);
            k.bar_sync(own, CONSUMERS);
        }
    }

    /// Gives the turn to the other warpgroup.
    fn end_turn(&self, k: &mut KernelBuilder) {
        if self.schedule.pingpong {
            let other = k.xor_b32(self.group, 1u32);
            let other = k.add_u32(other, TURN);
            k.bar_arrive(other, CONSUMERS);
        }
    }

    /// Issues Sᵀ = K Qᵀ, once the queries are there.
    fn start_scores(&self, k: &mut KernelBuilder) {
        k.comment("S^T = K Q^T");
        self.q.wait_filled(k);
        let (keys, queries) = (self.own_rows(k, self.memory.k), self.q.address(k));
        k.wgmma_fence();
        self.times_rows(k, &self.s, keys, queries, self.spec.head_dim);
        k.wgmma_commit();
    }

    /// Issues dPᵀ = V dOᵀ, once the gradients are there.
    fn start_dp(&self, k: &mut KernelBuilder) {
        k.comment("dP^T = V dO^T");
        self.d_o.wait_filled(k);
        let (values, gradients) = (self.own_rows(k, self.memory.v), self.d_o.address(k));
        k.wgmma_fence();
        self.times_rows(k, &self.dp, values, gradients, self.spec.head_dim_v);
        k.wgmma_commit();
    }

    /// Where this warpgroup's rows of a key tile begin.
    fn own_rows(&self, k: &mut KernelBuilder, tile: Shared) -> Reg<B32> {
        let start = k.shared_addr(tile);
        k.mad_lo_u32(self.group, ROWS * PITCH, start)
    }

    /// A product of this warpgroup's rows of a key tile with all rows of a query tile.
    fn times_rows(&self, k: &mut KernelBuilder, to: &[Reg<F32>], a: Reg<B32>, b: Reg<B32>, head_dim: u32) {
        let panels = [self.sizes.k_panel, self.sizes.q_panel];
        parts::times_rows(k, self.spec.dtype, to, [a, b], panels, head_dim, |_, _| {});
    }

    /// Adds the product of Pᵀ or dSᵀ with a query tile.
    fn add(&self, k: &mut KernelBuilder, to: &[Reg<F32>], a: &[[Reg<B32>; 4]], tile: Reg<B32>) {
        parts::add(k, self.spec.dtype, to, a, tile, self.sizes.q_panel);
    }

    /// Issues this warpgroup's part of dQ = dS K, once all of dS is there.
    fn start_dq(&self, k: &mut KernelBuilder) {
        k.comment("dQ = dS K");
        self.ds_out.wait_filled(k);
        let width = self.schedule.part_columns(self.spec.head_dim);
        let (ds, keys) = (self.ds_out.address(k), k.shared_addr(self.memory.k));
        let (ds, keys) = if self.schedule.parts_by_rows() {
            (k.mad_lo_u32(self.group, ROWS * PITCH, ds), keys)
        } else {
            let whole_panel = width == columns(self.spec.dtype);
            let further = if whole_panel { self.sizes.k_panel } else { 2 * width };
            (ds, k.mad_lo_u32(self.group, further, keys))
        };
        let (ds, keys) = (Descriptor::new(k, ds, 16), Descriptor::new(k, keys, self.sizes.k_panel));
        let spec = Wgmma::new(width as u16, matrix_ty(self.spec.dtype));
        k.wgmma_fence();
        for step in 0..KEYS / 16 {
            let (panel, inside) = (step / STEPS, STEP * (step % STEPS));
            let a = ds.at(k, panel * self.sizes.q_panel + inside);
            let b = keys.at(k, step * 16 * PITCH);
            k.wgmma_ss(Wgmma { trans_b: true, ..spec }, &self.dq, a, b, step > 0);
        }
        k.wgmma_commit();
    }

    /// Where a slot has the numbers of this thread's queries: two of every eight.
    fn numbers(&self, k: &mut KernelBuilder, ring: &Ring, behind: u32) -> Reg<B32> {
        let slot = ring.address(k);
        let at = k.mad_lo_u32(self.column, 4u32, slot);
        k.add_u32(at, behind)
    }

    /// P and dS under a softcap, a few at a time: dS has the derivative of the tanh as a factor.
    fn capped(&self, k: &mut KernelBuilder, hidden: &Hidden, lse: Reg<B32>, delta: Reg<B32>) {
        let inverse = self.spec.scaled_scores.then(|| {
            let softcap = k.param(BwdParams::softcap);
            k.rcp_approx_ftz_f32(softcap)
        });
        for (eight, (scores, dps)) in (0..).zip(self.s.chunks_exact(4).zip(self.dp.chunks_exact(4))) {
            self.params.score(k, scores);
            let mut derivatives = Vec::new();
            for &score in scores {
                let tanh = inverse.map_or(score, |inverse| k.mul_f32(score, inverse));
                let negative = k.neg_f32(tanh);
                derivatives.push(k.fma_f32(negative, tanh, 1.0));
            }
            k.if_(hidden.any, |k| hidden.hide(k, scores, 4 * eight as usize));
            let (lse, delta) = (parts::number(k, lse, eight), parts::number(k, delta, eight));
            for (i, ((&score, &dp), derivative)) in scores.iter().zip(dps).zip(derivatives).enumerate() {
                k.set(score, |k| parts::probability(k, self.params, score, lse[i % 2]));
                let weight = k.mul_f32(score, derivative);
                k.set(dp, |k| {
                    let difference = k.sub_f32(dp, delta[i % 2]);
                    k.mul_f32(difference, weight)
                });
            }
        }
    }

    /// What of a query tile this warpgroup's keys are hidden from.
    fn hidden(&self, k: &mut KernelBuilder, block: &Block, first_row: Reg<B32>) -> Hidden {
        let rows = Rows { batch: block.queries.entry, head: block.kv_head, len_q: block.len_q, first_row };
        let first_key = |k: &mut KernelBuilder| k.mad_lo_u32(self.group, ROWS, block.first_key);
        let own = [block.first_key, self.row, self.column];
        Hidden::of(k, self.spec, &block.band, &rows, self.schedule.block_m, first_key, own)
    }

    /// Writes dS to shared memory: a row per query, a panel per warpgroup.
    fn store_ds(&self, k: &mut KernelBuilder) {
        k.comment("dS, for all of dQ");
        self.ds_in.wait_free(k);
        let tile = self.ds_in.address(k);
        let panel = k.mad_lo_u32(self.group, self.sizes.q_panel, tile);
        // Lane l gives row l % 8 of matrix l / 8: the first eight keys, the other eight, then the same eight queries
        // further. Its chunk of eight keys is permuted as by the swizzle.
        let inside = k.and_b32(self.lane, 7u32);
        let further = k.shr_u32(self.lane, 4u32);
        let query = k.mad_lo_u32(further, 8u32, inside);
        let warp = k.shr_u32(self.thread, 5u32);
        let second = k.bfe_u32(self.lane, 3u32, 1u32);
        let chunk = k.mad_lo_u32(warp, 2u32, second);
        let swizzled = k.xor_b32(chunk, inside);
        let line = k.mad_lo_u32(query, PITCH, panel);
        let at = k.mad_lo_u32(swizzled, 16u32, line);
        for (step, &ds) in (0..).zip(&self.ds) {
            k.stmatrix_trans(at.at(step * 16 * PITCH as i32), ds);
        }
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_warp_sync();
        let filled = self.ds_in.filled(k);
        k.when(self.first_lane, |k| k.mbarrier_arrive(filled));
        self.ds_in.advance(k);
    }

    /// Hands this warpgroup's part of dQ of a query tile to the writer whose step it is; rounded, if this block is the last to
    /// add to it.
    fn stage_dq(&self, k: &mut KernelBuilder, rounds: Option<(Rounds, Reg<B32>)>) {
        let empty = k.add_u32(self.group, DQ_EMPTY);
        k.bar_sync(empty, writer::THREADS);
        let parts = k.shared_addr(self.memory.dq);
        let part = k.mad_lo_u32(self.group, self.sizes.dq_part, parts);
        let at = k.mad_lo_u32(self.thread, 16u32, part);
        let quads = || (0..).step_by(128 * 16).zip(self.dq.chunks_exact(4));
        let store = |k: &mut KernelBuilder| {
            for (offset, dq) in quads() {
                k.st_shared_vec(at.at(offset), [dq[0], dq[1], dq[2], dq[3]]);
            }
        };
        match rounds {
            Some((rounds, tile)) => {
                let [last, others] = rounds.of(k, tile);
                let round = |k: &mut KernelBuilder| {
                    k.if_(others, |k| {
                        k.comment("with what the blocks before have added");
                        for (offset, dq) in quads() {
                            let sum: [Reg<F32>; 4] = k.ld_shared_vec(at.at(offset));
                            for (&dq, sum) in dq.iter().zip(sum) {
                                k.set(dq, |k| k.add_f32(sum, dq));
                            }
                        }
                        let own = k.add_u32(self.group, OWN);
                        k.bar_sync(own, 128u32);
                    });
                    let scale = k.param(BwdParams::scale);
                    for &dq in &self.dq {
                        k.set(dq, |k| k.mul_f32(dq, scale));
                    }
                    let packed = stage::rounded(k, self.spec.dtype, &self.dq);
                    stage::write(k, &packed, self.thread, part, ROWS * PITCH);
                };
                k.if_else(last, round, store);
            }
            None => store(k),
        }
        k.fence_proxy_async(ProxySpace::Shared);
        let full = k.add_u32(self.group, DQ_FULL);
        let full = k.mad_lo_u32(self.dq_parity, WARPGROUPS, full);
        k.bar_arrive(full, writer::THREADS);
        k.set(self.dq_parity, |k| k.xor_b32(self.dq_parity, 1u32));
    }

    fn clear(&self, k: &mut KernelBuilder, block: &Block) {
        let left = k.sub_s32(block.band.keys, block.first_key);
        let count = |head_dim| panels(head_dim, self.spec.dtype);
        parts::clear(
            k,
            left,
            KEYS,
            &[
                (&|k| k.shared_addr(self.memory.k), count(self.spec.head_dim), self.sizes.k_panel),
                (&|k| k.shared_addr(self.memory.v), count(self.spec.head_dim_v), self.sizes.k_panel),
            ],
        );
    }

    /// Rounds a gradient and writes it over this warpgroup's rows of a key tile.
    fn stage(&self, k: &mut KernelBuilder, gradient: &[Reg<F32>], tile: Shared) {
        let packed = stage::rounded(k, self.spec.dtype, gradient);
        let rows = self.own_rows(k, tile);
        stage::write(k, &packed, self.thread, rows, self.sizes.k_panel);
    }

    /// Stores what [`Consumer::stage`] has written.
    fn store(
        &self,
        k: &mut KernelBuilder,
        block: &Block,
        map: ParamHandle<BwdParams, TensorMap>,
        head_dim: u32,
        tile: Shared,
    ) {
        let (map, rows) = (k.tensor_map(map), self.own_rows(k, tile));
        let first_key = k.mad_lo_u32(self.group, ROWS, block.first_key);
        let first_key = block.keys.row(k, first_key);
        for panel in 0..panels(head_dim, self.spec.dtype) {
            let column = Operand::from(panel * columns(self.spec.dtype));
            let at = [column, first_key.into(), block.kv_head.into(), block.keys.entry.into()];
            k.tensor_store(map, &at, rows.at((panel * self.sizes.k_panel) as i32), BulkHint::new());
        }
    }
}
