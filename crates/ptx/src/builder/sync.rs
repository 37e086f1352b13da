//! Barriers of the block, the warp and the cluster, mbarriers, and fences.

use super::memory::ClusterAddr;
use super::{FULL_MASK, KernelBuilder};
use crate::inst::*;
use crate::modifiers::*;
use crate::types::*;

/// Barriers of a warp and of the block.
impl KernelBuilder {
    /// `bar.sync 0`: waits for all threads of the block.
    #[track_caller]
    pub fn bar_sync_all(&mut self) {
        self.emit(Op::BarSync { aligned: true }, Vec::new(), vec![Operand::<B32>::from(0).into()]);
    }

    /// `bar.sync id, threads`: waits until that many threads have arrived at the barrier.
    #[track_caller]
    pub fn bar_sync(&mut self, id: impl Into<Operand<B32>>, threads: impl Into<Operand<B32>>) {
        self.emit(Op::BarSync { aligned: true }, Vec::new(), vec![id.into().into(), threads.into().into()]);
    }

    /// `bar.arrive id, threads`: arrives at the barrier without waiting.
    #[track_caller]
    pub fn bar_arrive(&mut self, id: impl Into<Operand<B32>>, threads: impl Into<Operand<B32>>) {
        self.emit(Op::BarArrive { aligned: true }, Vec::new(), vec![id.into().into(), threads.into().into()]);
    }

    /// `barrier.sync id, threads`: as [`KernelBuilder::bar_sync`], where the lanes of a warp may have diverged.
    #[track_caller]
    pub fn barrier_sync(&mut self, id: impl Into<Operand<B32>>, threads: impl Into<Operand<B32>>) {
        self.emit(Op::BarSync { aligned: false }, Vec::new(), vec![id.into().into(), threads.into().into()]);
    }

    /// `barrier.arrive id, threads`: as [`KernelBuilder::bar_arrive`], where the lanes of a warp may have diverged.
    #[track_caller]
    pub fn barrier_arrive(&mut self, id: impl Into<Operand<B32>>, threads: impl Into<Operand<B32>>) {
        self.emit(
            Op::BarArrive { aligned: false },
            Vec::new(),
            vec![id.into().into(), threads.into().into()],
        );
    }

    /// `bar.warp.sync` for all lanes.
    #[track_caller]
    pub fn bar_warp_sync(&mut self) {
        self.bar_warp_sync_mask(FULL_MASK);
    }

    /// `bar.warp.sync` for the lanes of a mask.
    #[track_caller]
    pub fn bar_warp_sync_mask(&mut self, mask: impl Into<Operand<B32>>) {
        self.emit(Op::BarWarpSync, Vec::new(), vec![mask.into().into()]);
    }
}

/// Fences.
impl KernelBuilder {
    /// `membar`.
    #[track_caller]
    pub fn membar(&mut self, level: MembarLevel) {
        self.emit(Op::Membar(level), Vec::new(), Vec::new());
    }

    /// `fence`.
    #[track_caller]
    pub fn fence(&mut self, sem: FenceSem, scope: Scope) {
        self.emit(Op::Fence { sem, scope }, Vec::new(), Vec::new());
    }

    /// `fence.proxy.async`: what this thread wrote is seen by asynchronous copies and `wgmma` that follow.
    #[track_caller]
    pub fn fence_proxy_async(&mut self, space: ProxySpace) {
        self.emit(Op::FenceProxyAsync(space), Vec::new(), Vec::new());
    }

    /// `fence.mbarrier_init.release.cluster`: initialised mbarriers are seen by the cluster and by copies.
    #[track_caller]
    pub fn fence_mbarrier_init(&mut self) {
        self.emit(Op::FenceMbarrierInit, Vec::new(), Vec::new());
    }
}

/// mbarriers.
impl KernelBuilder {
    /// Initialises an mbarrier for this many arrivals per phase.
    #[track_caller]
    pub fn mbarrier_init(&mut self, bar: impl Into<Addr<B32>>, arrivals: impl Into<Operand<B32>>) {
        self.emit(Op::MbarrierInit, Vec::new(), vec![bar.into().into(), arrivals.into().into()]);
    }

    /// Ends an mbarrier's life, so that its bytes can be used again.
    #[track_caller]
    pub fn mbarrier_inval(&mut self, bar: impl Into<Addr<B32>>) {
        self.emit(Op::MbarrierInval, Vec::new(), vec![bar.into().into()]);
    }

    /// Arrives once.
    #[track_caller]
    pub fn mbarrier_arrive(&mut self, bar: impl Into<Addr<B32>>) {
        let op = Op::MbarrierArrive { space: Space::Shared, count: false, scope: Scope::Cta };
        self.emit(op, vec![Arg::Sink], vec![bar.into().into()]);
    }

    /// Arrives once, and returns the state to wait for.
    #[track_caller]
    pub fn mbarrier_arrive_state(&mut self, bar: impl Into<Addr<B32>>) -> Reg<B64> {
        let state = self.reg();
        let op = Op::MbarrierArrive { space: Space::Shared, count: false, scope: Scope::Cta };
        self.emit(op, vec![state.into()], vec![bar.into().into()]);
        state
    }

    /// Arrives several times at once.
    #[track_caller]
    pub fn mbarrier_arrive_count(&mut self, bar: impl Into<Addr<B32>>, count: impl Into<Operand<B32>>) {
        let op = Op::MbarrierArrive { space: Space::Shared, count: true, scope: Scope::Cta };
        self.emit(op, vec![Arg::Sink], vec![bar.into().into(), count.into().into()]);
    }

    /// Arrives once at the mbarrier of a block of the cluster. With [`Scope::Cluster`], who waits there sees what was
    /// written before, at the price of a fence of the whole GPU; [`Scope::Cta`] is enough where nothing was written, as
    /// when a slot is given back that was only read.
    #[track_caller]
    pub fn mbarrier_arrive_cluster(&mut self, bar: ClusterAddr, scope: Scope) {
        let op = Op::MbarrierArrive { space: Space::SharedCluster, count: false, scope };
        self.emit(op, vec![Arg::Sink], vec![bar.0.at(0).into()]);
    }

    /// Arrives several times at once at the mbarrier of a block of the cluster.
    #[track_caller]
    pub fn mbarrier_arrive_count_cluster(&mut self, bar: ClusterAddr, count: impl Into<Operand<B32>>) {
        let op = Op::MbarrierArrive { space: Space::SharedCluster, count: true, scope: Scope::Cluster };
        self.emit(op, vec![Arg::Sink], vec![bar.0.at(0).into(), count.into().into()]);
    }

    /// Arrives once, and lets the phase also wait for this many bytes of asynchronous copies.
    #[track_caller]
    pub fn mbarrier_arrive_expect_tx(&mut self, bar: impl Into<Addr<B32>>, bytes: impl Into<Operand<B32>>) {
        let op = Op::MbarrierArriveExpectTx { space: Space::Shared };
        self.emit(op, vec![Arg::Sink], vec![bar.into().into(), bytes.into().into()]);
    }

    /// As [`KernelBuilder::mbarrier_arrive_expect_tx`], at the mbarrier of a block of the cluster.
    #[track_caller]
    pub fn mbarrier_arrive_expect_tx_cluster(&mut self, bar: ClusterAddr, bytes: impl Into<Operand<B32>>) {
        let op = Op::MbarrierArriveExpectTx { space: Space::SharedCluster };
        self.emit(op, vec![Arg::Sink], vec![bar.0.at(0).into(), bytes.into().into()]);
    }

    /// Lets the phase also wait for this many bytes of asynchronous copies, without arriving.
    #[track_caller]
    pub fn mbarrier_expect_tx(&mut self, bar: impl Into<Addr<B32>>, bytes: impl Into<Operand<B32>>) {
        let op = Op::MbarrierExpectTx { space: Space::Shared };
        self.emit(op, Vec::new(), vec![bar.into().into(), bytes.into().into()]);
    }

    /// As [`KernelBuilder::mbarrier_expect_tx`], at the mbarrier of a block of the cluster.
    #[track_caller]
    pub fn mbarrier_expect_tx_cluster(&mut self, bar: ClusterAddr, bytes: impl Into<Operand<B32>>) {
        let op = Op::MbarrierExpectTx { space: Space::SharedCluster };
        self.emit(op, Vec::new(), vec![bar.0.at(0).into(), bytes.into().into()]);
    }

    /// Whether the phase of this parity is complete. `scope` is [`Scope::Cta`], or [`Scope::Cluster`] where
    /// other blocks' writes must be seen.
    #[track_caller]
    pub fn mbarrier_test_wait_parity(
        &mut self,
        bar: impl Into<Addr<B32>>,
        parity: impl Into<Operand<B32>>,
        scope: Scope,
    ) -> Reg<Pred> {
        let done = self.reg();
        let op = Op::MbarrierTestWait { parity: true, scope };
        self.emit(op, vec![done.into()], vec![bar.into().into(), parity.into().into()]);
        done
    }

    /// Whether the phase of this state is complete.
    #[track_caller]
    pub fn mbarrier_test_wait(
        &mut self,
        bar: impl Into<Addr<B32>>,
        state: Reg<B64>,
        scope: Scope,
    ) -> Reg<Pred> {
        let done = self.reg();
        let op = Op::MbarrierTestWait { parity: false, scope };
        self.emit(op, vec![done.into()], vec![bar.into().into(), state.into()]);
        done
    }

    /// Whether the phase of this parity is complete, after waiting for it a while.
    #[track_caller]
    pub fn mbarrier_try_wait_parity(
        &mut self,
        bar: impl Into<Addr<B32>>,
        parity: impl Into<Operand<B32>>,
        scope: Scope,
    ) -> Reg<Pred> {
        let done = self.reg();
        let op = Op::MbarrierTryWait { parity: true, scope, hint: false };
        self.emit(op, vec![done.into()], vec![bar.into().into(), parity.into().into()]);
        done
    }

    /// As [`KernelBuilder::mbarrier_try_wait_parity`], waiting about this many nanoseconds.
    #[track_caller]
    pub fn mbarrier_try_wait_parity_for(
        &mut self,
        bar: impl Into<Addr<B32>>,
        parity: impl Into<Operand<B32>>,
        scope: Scope,
        nanoseconds: impl Into<Operand<B32>>,
    ) -> Reg<Pred> {
        let done = self.reg();
        let op = Op::MbarrierTryWait { parity: true, scope, hint: true };
        let src = vec![bar.into().into(), parity.into().into(), nanoseconds.into().into()];
        self.emit(op, vec![done.into()], src);
        done
    }

    /// Whether the phase of this state is complete, after waiting for it a while.
    #[track_caller]
    pub fn mbarrier_try_wait(
        &mut self,
        bar: impl Into<Addr<B32>>,
        state: Reg<B64>,
        scope: Scope,
    ) -> Reg<Pred> {
        let done = self.reg();
        let op = Op::MbarrierTryWait { parity: false, scope, hint: false };
        self.emit(op, vec![done.into()], vec![bar.into().into(), state.into()]);
        done
    }

    /// Waits for the phase of this parity: a loop of `try_wait`, or of `test_wait` before Hopper.
    #[track_caller]
    pub fn mbarrier_wait_parity(
        &mut self,
        bar: impl Into<Addr<B32>>,
        parity: impl Into<Operand<B32>>,
        scope: Scope,
    ) {
        let (bar, parity) = (bar.into(), parity.into());
        if self.target() >= Target::Sm90 {
            self.spin_until(|k| k.mbarrier_try_wait_parity(bar, parity, scope));
        } else {
            self.spin_until(|k| k.mbarrier_test_wait_parity(bar, parity, scope));
        }
    }
}

/// Clusters, grids and the clock.
impl KernelBuilder {
    /// The address, in the block of this rank, of what lies at a shared address of this block.
    #[track_caller]
    pub fn mapa(&mut self, addr: Reg<B32>, rank: impl Into<Operand<B32>>) -> ClusterAddr {
        let dst = self.reg();
        self.emit(Op::Mapa, vec![dst.into()], vec![addr.into(), rank.into().into()]);
        ClusterAddr(dst)
    }

    /// The rank of the block that a cluster address belongs to.
    #[track_caller]
    pub fn getctarank(&mut self, addr: ClusterAddr) -> Reg<B32> {
        let dst = self.reg();
        self.emit(Op::GetCtaRank, vec![dst.into()], vec![addr.0.into()]);
        dst
    }

    /// Arrives at the cluster's barrier. `aligned`: all lanes of the warp do it together.
    #[track_caller]
    pub fn cluster_arrive(&mut self, sem: ClusterArrive, aligned: bool) {
        self.emit(Op::ClusterArrive { sem, aligned }, Vec::new(), Vec::new());
    }

    /// Waits at the cluster's barrier. `aligned`: all lanes of the warp do it together.
    #[track_caller]
    pub fn cluster_wait(&mut self, aligned: bool) {
        self.emit(Op::ClusterWait { aligned }, Vec::new(), Vec::new());
    }

    /// `griddepcontrol`.
    #[track_caller]
    pub fn griddepcontrol(&mut self, action: GridDep) {
        self.emit(Op::GridDepControl(action), Vec::new(), Vec::new());
    }

    /// Sleeps about this many nanoseconds.
    #[track_caller]
    pub fn nanosleep(&mut self, nanoseconds: impl Into<Operand<B32>>) {
        self.emit(Op::Nanosleep, Vec::new(), vec![nanoseconds.into().into()]);
    }
}
