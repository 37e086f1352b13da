//! The last query tiles of packed sequences, which come with rows of the next sequence.
//!
//! Those have no probabilities, but 0 · NaN is NaN. So such a tile counts with a barrier of the producer's own at first; then its
//! warp overwrites what is not the sequence's with zeros, and tells those who wait for the tile.

use flashcore_ptx::{B32, KernelBuilder, Pred, ProxySpace, Reg, Scope, Shared};

use super::{
    block::Steps,
    parts::{self, Panels},
};

pub(super) struct Tails {
    pub first_lane: Reg<Pred>,
    lane: Reg<B32>,
    landed: Reg<B32>,
    parity: Reg<B32>,
}

/// Whether a tile is such a one, and how many of its rows are the sequence's.
#[derive(Clone, Copy)]
pub(super) struct Tail {
    any: Reg<Pred>,
    left: Reg<B32>,
}

impl Tail {
    /// Of the tile of a step, given its rows.
    pub fn of(k: &mut KernelBuilder, len_q: Reg<B32>, steps: &Steps, rows: u32) -> Self {
        let first_row = steps.first_row(k, rows);
        let left = k.sub_s32(len_q, first_row);
        Self { any: k.setp_lt_s32(left, rows as i32), left }
    }
}

impl Tails {
    /// Of a producer's warp, with a barrier for one arrival.
    pub fn new(k: &mut KernelBuilder, landed: Shared) -> Self {
        let (lane, landed) = (k.laneid(), k.shared_addr(landed));
        Self { first_lane: k.setp_eq_u32(lane, 0u32), lane, landed, parity: k.mov_b32(0u32) }
    }

    /// The barrier with which the copies of a tile count.
    pub fn barrier(&self, k: &mut KernelBuilder, tail: Tail, filled: Reg<B32>) -> Reg<B32> {
        k.selp_b32(self.landed, filled, tail.any)
    }

    /// Clears the tile that has been asked for, if it is such a one, and says then that it is filled.
    pub fn clear(&self, k: &mut KernelBuilder, tail: Tail, rows: u32, tile: Panels<'_>, filled: Reg<B32>) {
        k.bar_warp_sync();
        k.if_(tail.any, |k| {
            k.comment("zeros behind the last query");
            k.mbarrier_wait_parity(self.landed, self.parity, Scope::Cta);
            k.set(self.parity, |k| k.xor_b32(self.parity, 1u32));
            parts::zero(k, (32, |_| self.lane), tail.left, rows, &[tile]);
            k.fence_proxy_async(ProxySpace::Shared);
            k.bar_warp_sync();
            k.when(self.first_lane, |k| k.mbarrier_arrive(filled));
        });
    }
}
