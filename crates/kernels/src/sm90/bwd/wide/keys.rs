//! Blocks that own keys: one warpgroup holds dV and computes probabilities, the other holds dK and computes dS with them.

use flashcore_ptx::{B32, F32, KernelBuilder, ProxySpace, Reg, Scope};

use super::{
    ALL, Block, CONSUMERS, Consumer, DO_STAGES, HANDED, HANDED_BYTES, NUMBERS, ROWS, Walked, WideParams,
    operands, zeros,
};
use crate::{
    parts::{
        fragment::{pack, pack_into, unpack},
        work::Rows,
    },
    sm90::{
        bwd::{
            block::Steps,
            params,
            parts::{Hidden, number},
        },
        ring::Ring,
    },
};

/// What weights are multiplied by on their way under a softcap, where they may be far smaller than probabilities that
/// matter: the largest is 1, and the smallest normal f16 is 2^-14.
const BOOST: f32 = 16384.0;

impl Consumer<'_> {
    /// The warpgroup that holds dV.
    pub(super) fn own_values(&self, k: &mut KernelBuilder, block: &Block) {
        let dv = zeros(k, self.spec.head_dim_v / 2);
        k.if_(block.any, |k| self.walk_values(k, block, &dv));
        k.section("consumer: dV");
        let values = self.finish(k);
        let to = (WideParams::dv_map, params::DV, &block.keys);
        self.store(k, &dv, values, to, [block.first_row, block.head]);
    }

    /// The warpgroup that holds dK.
    pub(super) fn own_keys(&self, k: &mut KernelBuilder, block: &Block) {
        let dk = zeros(k, self.spec.head_dim / 2);
        k.if_(block.any, |k| self.walk_keys(k, block, &dk));
        k.section("consumer: dK");
        let scale = k.param(WideParams::scale);
        for &dk in &dk {
            k.set(dk, |k| k.mul_f32(dk, scale));
        }
        self.finish(k);
        let keys = k.shared_addr(self.memory.s);
        let to = (WideParams::dk_map, params::DK, &block.keys);
        self.store(k, &dk, keys, to, [block.first_row, block.head]);
    }

    /// Waits until no warpgroup reads the block's keys and values any more. Where the values are.
    fn finish(&self, k: &mut KernelBuilder) -> Reg<B32> {
        k.bar_sync(ALL, CONSUMERS);
        k.shared_addr(self.memory.p)
    }

    /// Waits for what the block owns; where its keys and values are.
    fn begin(&self, k: &mut KernelBuilder, block: &Block) -> [Reg<B32>; 2] {
        let own = [self.memory.s, self.memory.p].map(|tile| k.shared_addr(tile));
        for bar in [self.memory.own_s, self.memory.own_p] {
            k.mbarrier_wait_parity(bar, 0u32, Scope::Cta);
        }
        if self.spec.has_foreign_keys() {
            self.clear(k, block, block.first_row, own);
        }
        own
    }

    /// The queries and dO, behind the block's own tile.
    fn walked(&self, k: &mut KernelBuilder) -> [Walked; 2] {
        [self.walked_s(k, self.sizes.s), self.walked_p(k, self.sizes.p, DO_STAGES)]
    }

    /// The ring of handed probabilities, of one of its sides.
    fn handed(&self, k: &mut KernelBuilder, ring: Ring) -> Ring {
        let behind = k.mov_b32(self.schedule.handed(self.spec));
        ring.further(k, behind)
    }

    fn walk_values(&self, k: &mut KernelBuilder, block: &Block, dv: &[Reg<F32>]) {
        k.section("walk for dV");
        let steps = block.query_steps(k, self.spec);
        let [keys, _] = self.begin(k, block);
        let [q, d_o] = self.walked(k);
        let handed = Ring::producer(k, self.memory.s, HANDED_BYTES, self.memory.handed_bars, HANDED);
        let handed = self.handed(k, handed);
        let s = zeros(k, ROWS / 2);
        let p = operands(k);
        let start_scores = |k: &mut KernelBuilder| {
            k.comment("S^T = K Q^T");
            self.times(k, &s, keys, &q, self.spec.head_dim);
        };
        let add = |k: &mut KernelBuilder| {
            k.comment("dV += P^T dO");
            d_o.wait_all(k);
            let gradients = d_o.ring.address(k);
            self.add(k, dv, &p, gradients);
        };
        start_scores(k);
        k.wgmma_wait(0);
        self.hand_over(k, block, &steps, &s, &p, [&q.ring, &handed], |_| {});
        k.while_(
            |k| k.setp_gt_s32(steps.left, 1),
            |k, _| {
                start_scores(k);
                add(k);
                steps.advance(k);
                k.comment("the next scores");
                k.wgmma_wait(1);
                self.hand_over(k, block, &steps, &s, &p, [&q.ring, &handed], |k| {
                    // Not into other operands that are copied before the next product: the assembler takes the copies for
                    // the same registers, and these are still being read.
                    k.comment("dV, whose operands are written next");
                    k.wgmma_wait(0);
                    d_o.ring.give_back(k, self.first_lane);
                });
            },
        );
        k.section("walk for dV: the last step");
        add(k);
        k.wgmma_wait(0);
    }

    /// Makes probabilities of scores, for this warpgroup as operands and for the other in shared memory. `free` comes before
    /// the operands are written.
    #[expect(clippy::too_many_arguments, reason = "what a step of the walk has")]
    fn hand_over(
        &self,
        k: &mut KernelBuilder,
        block: &Block,
        steps: &Steps,
        s: &[Reg<F32>],
        p: &[[Reg<B32>; 4]],
        [q, handed]: [&Ring; 2],
        free: impl FnOnce(&mut KernelBuilder),
    ) {
        let first_row = steps.first_row(k, ROWS);
        let rows = Rows { batch: block.queries.entry, head: block.head, len_q: block.len_q, first_row };
        let own = [block.first_row, self.row, self.column];
        let hidden = Hidden::of(k, self.spec, &block.band, &rows, ROWS, |_| block.first_row, own);
        let lse = q.entry(k, self.memory.lse, NUMBERS);
        let lse = k.mad_lo_u32(self.column, 4u32, lse);
        // Under a softcap, others than the probabilities.
        let mut weights = Vec::new();
        self.probabilities(
            k,
            s,
            hidden.any,
            &|k, s, first| hidden.hide(k, s, first),
            &|k, eight| {
                let [a, b] = number(k, lse, eight as i32);
                [a, b, a, b]
            },
            &mut |k, _, given| {
                let [a, b, c, d] = given.map(|weight| k.mul_f32(weight, BOOST));
                let dtype = self.spec.dtype;
                weights.extend([pack(k, dtype, a, b), pack(k, dtype, c, d)]);
            },
        );
        free(k);
        pack_into(k, self.spec.dtype, s, p);
        if weights.is_empty() {
            weights = p.iter().flatten().copied().collect();
        }
        k.comment("to the other warpgroup");
        handed.wait_free(k);
        let slot = handed.address(k);
        let at = k.mad_lo_u32(self.thread, 16u32, slot);
        for (quad, weights) in (0..).zip(weights.as_chunks::<4>().0) {
            k.st_shared_vec(at.at(quad * 128 * 16), *weights);
        }
        k.comment("lse has been read, and is written again by a copy");
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_warp_sync();
        let filled = handed.filled(k);
        k.when(self.first_lane, |k| k.mbarrier_arrive(filled));
        handed.advance(k);
        q.give_back(k, self.first_lane);
    }

    fn walk_keys(&self, k: &mut KernelBuilder, block: &Block, dk: &[Reg<F32>]) {
        k.section("walk for dK");
        let steps = block.query_steps(k, self.spec);
        let [_, values] = self.begin(k, block);
        let [q, d_o] = self.walked(k);
        let handed = Ring::consumer(k, self.memory.s, HANDED_BYTES, self.memory.handed_bars, HANDED);
        let handed = self.handed(k, handed);
        let dp = zeros(k, ROWS / 2);
        let ds = operands(k);
        let start_dp = |k: &mut KernelBuilder| {
            k.comment("dP^T = V dO^T");
            self.times(k, &dp, values, &d_o, self.spec.head_dim_v);
        };
        let add = |k: &mut KernelBuilder| {
            self.take(k, &dp, &ds, &d_o.ring, &handed);
            k.comment("dK += dS^T Q");
            q.wait_all(k);
            let queries = q.ring.address(k);
            self.add(k, dk, &ds, queries);
        };
        start_dp(k);
        k.while_(
            |k| k.setp_gt_s32(steps.left, 1),
            |k, _| {
                add(k);
                start_dp(k);
                k.comment("dK");
                k.wgmma_wait(1);
                q.ring.give_back(k, self.first_lane);
                steps.advance(k);
            },
        );
        k.section("walk for dK: the last step");
        add(k);
        k.wgmma_wait(0);
    }

    /// dS, of what the other warpgroup has handed over and of dP, once that is there.
    fn take(&self, k: &mut KernelBuilder, dp: &[Reg<F32>], ds: &[[Reg<B32>; 4]], d_o: &Ring, handed: &Ring) {
        k.comment("from the other warpgroup");
        handed.wait_filled(k);
        let slot = handed.address(k);
        let at = k.mad_lo_u32(self.thread, 16u32, slot);
        let weights: Vec<[Reg<B32>; 4]> =
            (0..ROWS as i32 / 16).map(|quad| k.ld_shared_vec(at.at(quad * 128 * 16))).collect();
        let delta = d_o.entry(k, self.memory.delta, NUMBERS);
        let delta = k.mad_lo_u32(self.column, 4u32, delta);
        let delta: Vec<[Reg<F32>; 2]> = (0..ROWS as i32 / 8).map(|eight| number(k, delta, eight)).collect();
        k.comment("delta has been read, and is written again by a copy");
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_warp_sync();
        handed.give_back(k, self.first_lane);
        k.wgmma_wait(0);
        d_o.give_back(k, self.first_lane);
        for (eight, (dp, delta)) in dp.chunks_exact(4).zip(delta).enumerate() {
            let weights = &weights[eight / 2][2 * (eight % 2)..];
            let [a, b, c, d] =
                [weights[0], weights[1]].map(|both| unpack(k, self.spec.dtype, both)).concat()[..]
            else {
                unreachable!("two pairs")
            };
            for (i, (&dp, weight)) in dp.iter().zip([a, b, c, d]).enumerate() {
                k.set(dp, |k| {
                    let weight = if self.spec.softcap { k.mul_f32(weight, 1.0 / BOOST) } else { weight };
                    let difference = k.sub_f32(dp, delta[i % 2]);
                    k.mul_f32(difference, weight)
                });
            }
        }
        pack_into(k, self.spec.dtype, dp, ds);
    }
}
