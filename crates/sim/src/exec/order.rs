//! What strong accesses and fences order: a strong write publishes through the word that it writes, a strong read takes
//! in what was published there.

use flashcore_ptx::{Order, Scope};

use crate::exec::for_lanes;
use crate::machine::Cluster;
use crate::machine::regs::{Row, Row64};
use crate::races::clock::ClockPair;

impl Cluster<'_> {
    /// A load with this order from words of global memory.
    pub(super) fn acquire_global(&mut self, w: usize, mask: u32, order: Order, addresses: &Row64) {
        if let Some((acquire, scope)) = strength(order) {
            self.observe_global(w, mask, acquire, scope, addresses);
        }
    }

    /// A store with this order to words of global memory.
    pub(super) fn release_global(&mut self, w: usize, mask: u32, order: Order, addresses: &Row64) {
        if let Some((release, scope)) = strength(order) {
            self.publish_global(w, mask, release, scope, addresses);
        }
    }

    /// A load with this order from words of shared memory.
    pub(super) fn acquire_shared(
        &mut self,
        w: usize,
        block: usize,
        mask: u32,
        order: Order,
        addresses: &Row,
    ) {
        if let Some((acquire, _)) = strength(order) {
            self.observe_shared(w, block, mask, acquire, addresses);
        }
    }

    /// A store with this order to words of shared memory.
    pub(super) fn release_shared(
        &mut self,
        w: usize,
        block: usize,
        mask: u32,
        order: Order,
        addresses: &Row,
    ) {
        if let Some((release, _)) = strength(order) {
            self.publish_shared(w, block, mask, release, addresses);
        }
    }

    /// A strong write to words of global memory publishes: what the lanes have done if it is a release, else what was
    /// done before a fence.
    pub(super) fn publish_global(
        &mut self,
        w: usize,
        mask: u32,
        release: bool,
        scope: Scope,
        addresses: &Row64,
    ) {
        let (id, launch) = (self.id, self.launch);
        let warp = &mut self.warps[w];
        let published = match release {
            _ if !is_wide(scope) => None,
            true => Some(warp.clocks.publish_abroad(id, mask, warp.live)),
            false => warp.clocks.fenced_abroad(mask, warp.live),
        };
        if let Some(published) = published {
            self.progress += 1;
            for_lanes(mask, |l| launch.sync.release(addresses[l], &published));
        }
    }

    /// A strong read of words of global memory takes in what was published there: at once if it is an acquire,
    /// else at the next fence.
    pub(super) fn observe_global(
        &mut self,
        w: usize,
        mask: u32,
        acquire: bool,
        scope: Scope,
        addresses: &Row64,
    ) {
        if !is_wide(scope) {
            return;
        }
        let (id, launch) = (self.id, self.launch);
        let warp = &mut self.warps[w];
        for_lanes(mask, |l| {
            if let Some(published) = launch.sync.acquire(addresses[l]) {
                if acquire {
                    warp.clocks.acquire_abroad(id, mask, warp.live, &published);
                } else {
                    warp.clocks.observe_abroad(mask, warp.live, published);
                }
            }
        });
    }

    /// The same as [`Cluster::publish_global`] for words of a block's shared memory.
    pub(super) fn publish_shared(
        &mut self,
        w: usize,
        block: usize,
        mask: u32,
        release: bool,
        addresses: &Row,
    ) {
        let warp = &mut self.warps[w];
        let mut published = ClockPair::default();
        if release {
            warp.clocks.publish(mask, warp.live, &mut published);
        } else if let Some(fenced) = warp.clocks.fenced(mask, warp.live) {
            published = fenced;
        } else {
            return;
        }
        self.progress += 1;
        let sync = &mut self.blocks[block].sync;
        for_lanes(mask, |l| sync.entry(addresses[l]).or_default().join(&published));
    }

    /// The same as [`Cluster::observe_global`] for words of a block's shared memory.
    pub(super) fn observe_shared(
        &mut self,
        w: usize,
        block: usize,
        mask: u32,
        acquire: bool,
        addresses: &Row,
    ) {
        let (sync, warp) = (&self.blocks[block].sync, &mut self.warps[w]);
        for_lanes(mask, |l| {
            if let Some(published) = sync.get(&addresses[l]) {
                if acquire {
                    warp.clocks.acquire(mask, warp.live, published);
                } else {
                    warp.clocks.observe(mask, warp.live, published);
                }
            }
        });
    }

    /// `fence` and `membar`: what strong reads have seen is taken in, and strong writes from here on publish what these
    /// lanes have done so far. One that does not reach beyond the cluster orders nothing between clusters.
    pub fn fence(&mut self, w: usize, mask: u32, wide: bool) {
        let warp = &mut self.warps[w];
        warp.clocks.fence(self.id, mask, warp.live, wide);
    }
}

/// Whether what has this scope reaches beyond the cluster.
pub fn is_wide(scope: Scope) -> bool {
    matches!(scope, Scope::Gpu | Scope::Sys)
}

/// Whether a strong access acquires or releases by itself, and its scope; `None` for a weak one.
fn strength(order: Order) -> Option<(bool, Scope)> {
    match order {
        Order::Weak => None,
        Order::Volatile => Some((false, Scope::Sys)),
        Order::Relaxed(scope) => Some((false, scope)),
        Order::Acquire(scope) | Order::Release(scope) => Some((true, scope)),
    }
}
