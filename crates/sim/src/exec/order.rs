//! What strong accesses and fences order: a strong write publishes through the word that it writes, a strong read takes
//! in what was published there.

use flashcore_ptx::Order;

use crate::exec::for_lanes;
use crate::machine::Cluster;
use crate::machine::regs::{Row, Row64};
use crate::races::clock::ClockPair;

impl Cluster<'_> {
    pub(super) fn acquire_global(&mut self, w: usize, mask: u32, order: Order, addresses: &Row64) {
        if order != Order::Weak {
            self.observe_global(w, mask, matches!(order, Order::Acquire(_)), addresses);
        }
    }

    pub(super) fn release_global(&mut self, w: usize, mask: u32, order: Order, addresses: &Row64) {
        if order != Order::Weak {
            self.publish_global(w, mask, matches!(order, Order::Release(_)), addresses);
        }
    }

    pub(super) fn acquire_shared(
        &mut self,
        w: usize,
        block: usize,
        mask: u32,
        order: Order,
        addresses: &Row,
    ) {
        if order != Order::Weak {
            self.observe_shared(w, block, mask, matches!(order, Order::Acquire(_)), addresses);
        }
    }

    pub(super) fn release_shared(
        &mut self,
        w: usize,
        block: usize,
        mask: u32,
        order: Order,
        addresses: &Row,
    ) {
        if order != Order::Weak {
            self.publish_shared(w, block, mask, matches!(order, Order::Release(_)), addresses);
        }
    }

    /// A strong write to words of global memory publishes: what the warp has done if it is a release, else what
    /// it had done at its last fence.
    pub(super) fn publish_global(&mut self, w: usize, mask: u32, release: bool, addresses: &Row64) {
        let (id, launch) = (self.id, self.launch);
        let warp = &mut self.warps[w];
        let published = if release {
            warp.clocks.publish_abroad(id, mask, warp.live)
        } else if let Some(fenced) = &warp.fenced {
            fenced.abroad.clone()
        } else {
            return;
        };
        self.progress += 1;
        for_lanes(mask, |l| launch.sync.release(addresses[l], &published));
    }

    /// A strong read of words of global memory takes in what was published there: at once if it is an acquire,
    /// else at the next fence.
    pub(super) fn observe_global(&mut self, w: usize, mask: u32, acquire: bool, addresses: &Row64) {
        let launch = self.launch;
        let warp = &mut self.warps[w];
        for_lanes(mask, |l| {
            if let Some(published) = launch.sync.acquire(addresses[l]) {
                if acquire {
                    warp.clocks.acquire_abroad(&published);
                } else {
                    crate::races::sync_words::join(&mut warp.observed.abroad, &published);
                }
            }
        });
    }

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
        } else if let Some(fenced) = &warp.fenced {
            published.join(&fenced.pair);
        } else {
            return;
        }
        self.progress += 1;
        let sync = &mut self.blocks[block].sync;
        for_lanes(mask, |l| sync.entry(addresses[l]).or_default().join(&published));
    }

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
                    warp.observed.pair.join(published);
                }
            }
        });
    }

    /// `fence` and `membar`: what strong reads have observed is taken in, and strong writes from here on publish
    /// what the warp has done so far.
    pub fn fence(&mut self, w: usize, mask: u32) {
        let id = self.id;
        let warp = &mut self.warps[w];
        let observed = std::mem::take(&mut warp.observed);
        warp.clocks.acquire_abroad(&observed.abroad);
        warp.clocks.acquire(mask, warp.live, &observed.pair);
        let mut fenced = crate::machine::warp::Strong::default();
        warp.clocks.publish(mask, warp.live, &mut fenced.pair);
        fenced.abroad = warp.clocks.publish_abroad(id, mask, warp.live);
        warp.fenced = Some(Box::new(fenced));
    }
}
