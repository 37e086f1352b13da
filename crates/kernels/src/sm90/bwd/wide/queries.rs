//! Blocks that own queries: each warpgroup holds dQ of 64 of them.

use flashcore_ptx::{B32, F32, KernelBuilder, Reg, Scope};

use super::{Block, CONSUMERS, Consumer, ROWS, TURN, WARPGROUPS, WideParams, operands, zeros};
use crate::{
    parts::{
        fragment::pack_into,
        work::{KeyRange, Rows},
    },
    sm90::{
        bwd::{block::Steps, params},
        fwd::hide,
    },
};

/// What a warpgroup has of its queries.
struct Queries {
    /// Its first query.
    first_row: Reg<B32>,
    /// lse and delta of this thread's upper and lower row.
    lse: [Reg<F32>; 2],
    delta: [Reg<F32>; 2],
    /// The keys that all of its queries see.
    full_begin: Reg<B32>,
    full_end: Reg<B32>,
}

impl Consumer<'_> {
    /// A block that owns queries.
    pub(super) fn own_queries(&self, k: &mut KernelBuilder, block: &Block) {
        let dq = zeros(k, self.spec.head_dim / 2);
        k.if_(block.any, |k| self.walk_queries(k, block, &dq));
        k.section("consumer: dQ");
        let scale = k.param(WideParams::scale);
        for &dq in &dq {
            k.set(dq, |k| k.mul_f32(dq, scale));
        }
        let [queries, _] = self.own_tiles(k);
        let first_row = k.mad_lo_u32(self.group, ROWS, block.first_row);
        let to = (WideParams::dq_map, params::DQ, &block.queries);
        self.store(k, &dq, queries, to, [first_row, block.head]);
    }

    /// Where this warpgroup's queries and their dO are.
    fn own_tiles(&self, k: &mut KernelBuilder) -> [Reg<B32>; 2] {
        [(self.memory.s, self.sizes.s), (self.memory.p, self.sizes.p)].map(|(tiles, bytes)| {
            let tiles = k.shared_addr(tiles);
            k.mad_lo_u32(self.group, bytes, tiles)
        })
    }

    fn queries(&self, k: &mut KernelBuilder, block: &Block) -> Queries {
        let first_row = k.mad_lo_u32(self.group, ROWS, block.first_row);
        let row = k.add_u32(first_row, self.row);
        let [lse, delta] = [WideParams::row_lse, WideParams::row_delta].map(|numbers| {
            let at = block.numbers(k, numbers, block.head, row);
            [0, 8].map(|lower| k.ld_global::<F32>(at.at(4 * lower)))
        });
        let rows = Rows { batch: block.queries.entry, head: block.head, len_q: block.len_q, first_row };
        let KeyRange { full_begin, full_end, .. } = block.band.key_range(k, &rows, ROWS);
        Queries { first_row, lse, delta, full_begin, full_end }
    }

    fn walk_queries(&self, k: &mut KernelBuilder, block: &Block, dq: &[Reg<F32>]) {
        k.section("walk for dQ");
        let steps = block.key_steps(k);
        let own = self.queries(k, block);
        let [queries, gradients] = self.own_tiles(k);
        // The keys whose scores are next, and those whose part of dQ is.
        let [keys, keys_behind] = [(); 2].map(|()| self.walked_s(k, WARPGROUPS * self.sizes.s));
        let values = self.walked_p(k, WARPGROUPS * self.sizes.p, self.schedule.value_stages());
        let (s, dp) = (zeros(k, ROWS / 2), zeros(k, ROWS / 2));
        let ds = operands(k);
        for bar in [self.memory.own_s, self.memory.own_p] {
            k.mbarrier_wait_parity(bar, 0u32, Scope::Cta);
        }
        if self.spec.has_foreign_keys() {
            keys.wait_all(k);
            values.wait_all(k);
            let (first_key, tiles) =
                (steps.first_row(k, ROWS), [keys.ring.address(k), values.ring.address(k)]);
            self.clear(k, block, first_key, tiles);
        }
        let start_scores = |k: &mut KernelBuilder| {
            k.comment("S = Q K^T");
            self.times(k, &s, queries, &keys, self.spec.head_dim);
        };
        let start_dp = |k: &mut KernelBuilder| {
            k.comment("dP = dO V^T");
            self.times(k, &dp, gradients, &values, self.spec.head_dim_v);
        };
        let add = |k: &mut KernelBuilder| {
            k.comment("dQ += dS K");
            let keys = keys_behind.ring.address(k);
            self.add(k, dq, &ds, keys);
        };
        let finish_ds = |k: &mut KernelBuilder| {
            k.comment("dP");
            k.wgmma_wait(0);
            values.ring.give_back(k, self.first_lane);
            for (&dp, (i, &weight)) in dp.iter().zip(s.iter().enumerate()) {
                k.set(dp, |k| {
                    let difference = k.sub_f32(dp, own.delta[i % 4 / 2]);
                    k.mul_f32(difference, weight)
                });
            }
            pack_into(k, self.spec.dtype, &dp, &ds);
        };
        start_scores(k);
        start_dp(k);
        k.comment("S");
        k.wgmma_wait(1);
        self.weights(k, block, &own, &steps, &s);
        let is_second = k.setp_eq_u32(self.group, 1u32);
        k.if_(is_second, |k| self.end_turn(k));
        finish_ds(k);
        k.while_(
            |k| k.setp_gt_s32(steps.left, 1),
            |k, _| {
                self.begin_turn(k);
                keys.ring.advance(k);
                start_scores(k);
                add(k);
                // Values have fewer slots: nobody waits for them with the turn in hand.
                self.end_turn(k);
                start_dp(k);
                steps.advance(k);
                k.comment("S");
                k.wgmma_wait(2);
                self.weights(k, block, &own, &steps, &s);
                k.comment("dQ");
                k.wgmma_wait(1);
                keys_behind.ring.give_back(k, self.first_lane);
                finish_ds(k);
            },
        );
        k.section("walk for dQ: the last step");
        add(k);
        k.wgmma_wait(0);
        if self.schedule.pingpong {
            k.comment("the turn that nobody takes any more");
            k.if_(!is_second, |k| self.begin_turn(k));
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

    /// What dP is to be multiplied by, in the place of scores.
    fn weights(&self, k: &mut KernelBuilder, block: &Block, own: &Queries, steps: &Steps, s: &[Reg<F32>]) {
        let first_key = steps.first_row(k, ROWS);
        let end = k.add_s32(first_key, ROWS as i32);
        let mut hidden = k.setp_lt_s32(own.full_end, end);
        if self.spec.left {
            let before = k.setp_gt_s32(own.full_begin, first_key);
            hidden = k.or_pred(hidden, before);
        }
        let origin = k.add_s32(first_key, self.column);
        let row = k.add_u32(own.first_row, self.row);
        self.probabilities(
            k,
            s,
            hidden,
            &|k, s, first| {
                for half in 0..2 {
                    let row = k.add_u32(row, 8 * half);
                    let origin = k.add_s32(origin, 2 * first as i32);
                    let end = block.band.row_end(k, row);
                    let end = k.sub_s32(end, origin);
                    let begin = block.band.row_begin(k, row).map(|begin| k.sub_s32(begin, origin));
                    hide(k, s, half as usize, begin, end);
                }
            },
            &|_, _| [own.lse[0], own.lse[0], own.lse[1], own.lse[1]],
            &mut |k, eight, weights| {
                for (&s, weight) in s[4 * eight..].iter().zip(weights) {
                    k.set(s, |k| k.mov_f32(weight));
                }
            },
        );
    }
}
