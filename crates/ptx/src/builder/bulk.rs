//! Bulk copies: whole rows and tensor tiles, done by the copy engine (TMA).

use super::KernelBuilder;
use super::memory::ClusterAddr;
use crate::inst::*;
use crate::modifiers::*;
use crate::types::*;

/// What a bulk copy can be given besides its addresses. `BulkHint::new()` asks for nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct BulkHint {
    multicast: Option<Operand<B16>>,
    policy: Option<Operand<B64>>,
}

impl BulkHint {
    /// No hint.
    pub fn new() -> BulkHint {
        BulkHint::default()
    }

    /// Every block of the cluster whose bit is set receives the data, at the same shared address. Loads only.
    pub fn multicast(self, mask: impl Into<Operand<B16>>) -> BulkHint {
        BulkHint { multicast: Some(mask.into()), ..self }
    }

    /// An L2 policy.
    pub fn policy(self, policy: impl Into<Operand<B64>>) -> BulkHint {
        BulkHint { policy: Some(policy.into()), ..self }
    }

    fn args(self) -> impl Iterator<Item = Arg> {
        self.multicast.map(Arg::from).into_iter().chain(self.policy.map(Arg::from))
    }
}

/// Bulk copies of a row of bytes.
impl KernelBuilder {
    /// Copies bytes (a multiple of 16) from global to shared memory, counted at an mbarrier.
    #[track_caller]
    pub fn bulk_load(
        &mut self,
        dst: impl Into<Addr<B32>>,
        src: impl Into<Addr<B64>>,
        bytes: impl Into<Operand<B32>>,
        bar: impl Into<Addr<B32>>,
        hint: BulkHint,
    ) {
        let op = Op::BulkLoad { multicast: hint.multicast.is_some(), policy: hint.policy.is_some() };
        let args = [dst.into().into(), src.into().into(), bytes.into().into(), bar.into().into()];
        self.emit(op, Vec::new(), args.into_iter().chain(hint.args()).collect());
    }

    /// Copies bytes (a multiple of 16) from shared to global memory, in this thread's bulk group.
    #[track_caller]
    pub fn bulk_store(
        &mut self,
        dst: impl Into<Addr<B64>>,
        src: impl Into<Addr<B32>>,
        bytes: impl Into<Operand<B32>>,
        hint: BulkHint,
    ) {
        let hint = self.no_multicast(hint);
        let op = Op::BulkStore { policy: hint.policy.is_some() };
        let args = [dst.into().into(), src.into().into(), bytes.into().into()];
        self.emit(op, Vec::new(), args.into_iter().chain(hint.args()).collect());
    }

    /// Copies bytes (a multiple of 16) to the shared memory of a block of the cluster, counted at its mbarrier.
    #[track_caller]
    pub fn bulk_to_cluster(
        &mut self,
        dst: ClusterAddr,
        src: impl Into<Addr<B32>>,
        bytes: impl Into<Operand<B32>>,
        bar: ClusterAddr,
    ) {
        let args = vec![dst.0.at(0).into(), src.into().into(), bytes.into().into(), bar.0.at(0).into()];
        self.emit(Op::BulkToCluster, Vec::new(), args);
    }

    /// Brings bytes (a multiple of 16) of global memory into L2.
    #[track_caller]
    pub fn bulk_prefetch(
        &mut self,
        src: impl Into<Addr<B64>>,
        bytes: impl Into<Operand<B32>>,
        hint: BulkHint,
    ) {
        let hint = self.no_multicast(hint);
        let op = Op::BulkPrefetch { policy: hint.policy.is_some() };
        let args = [src.into().into(), bytes.into().into()];
        self.emit(op, Vec::new(), args.into_iter().chain(hint.args()).collect());
    }

    /// Reduces shared memory into global memory, in this thread's bulk group.
    #[track_caller]
    pub fn bulk_reduce(
        &mut self,
        op: AtomOp,
        ty: AtomTy,
        dst: impl Into<Addr<B64>>,
        src: impl Into<Addr<B32>>,
        bytes: impl Into<Operand<B32>>,
        hint: BulkHint,
    ) {
        let hint = self.no_multicast(hint);
        let args = [dst.into().into(), src.into().into(), bytes.into().into()];
        let op = Op::BulkReduce { op, ty, policy: hint.policy.is_some() };
        self.emit(op, Vec::new(), args.into_iter().chain(hint.args()).collect());
    }

    /// Reduces this block's shared memory into that of a block of the cluster, counted at its mbarrier.
    #[track_caller]
    pub fn bulk_reduce_cluster(
        &mut self,
        op: AtomOp,
        ty: AtomTy,
        dst: ClusterAddr,
        src: impl Into<Addr<B32>>,
        bytes: impl Into<Operand<B32>>,
        bar: ClusterAddr,
    ) {
        let args = vec![dst.0.at(0).into(), src.into().into(), bytes.into().into(), bar.0.at(0).into()];
        self.emit(Op::BulkReduceCluster { op, ty }, Vec::new(), args);
    }

    /// Closes the group of this thread's bulk stores and reductions so far.
    #[track_caller]
    pub fn bulk_commit(&mut self) {
        self.emit(Op::BulkCommit, Vec::new(), Vec::new());
    }

    /// Waits until at most `pending` of this thread's bulk groups are in flight.
    #[track_caller]
    pub fn bulk_wait(&mut self, pending: u8) {
        self.emit(Op::BulkWait { pending, read: false }, Vec::new(), Vec::new());
    }

    /// Waits until at most `pending` of this thread's bulk groups have still to read their sources.
    #[track_caller]
    pub fn bulk_wait_read(&mut self, pending: u8) {
        self.emit(Op::BulkWait { pending, read: true }, Vec::new(), Vec::new());
    }

    /// The hint without the multicast that only loads have.
    #[track_caller]
    fn no_multicast(&mut self, hint: BulkHint) -> BulkHint {
        if hint.multicast.is_some() {
            self.forbidden("multicast is for loads only");
        }
        BulkHint { multicast: None, ..hint }
    }
}

/// Bulk copies of a tensor tile. Coordinates are in elements, the innermost dimension first.
impl KernelBuilder {
    /// Copies a tile from global to shared memory, counted at an mbarrier.
    #[track_caller]
    pub fn tensor_load(
        &mut self,
        dst: impl Into<Addr<B32>>,
        map: Reg<B64>,
        coordinates: &[Operand<B32>],
        bar: impl Into<Addr<B32>>,
        hint: BulkHint,
    ) {
        let Some(dims) = self.rank(coordinates) else { return };
        let op = Op::TensorLoad { dims, multicast: hint.multicast.is_some(), policy: hint.policy.is_some() };
        let mut args = vec![dst.into().into(), map.at(0).into()];
        args.extend(coordinates.iter().map(|&c| Arg::from(c)));
        args.push(bar.into().into());
        args.extend(hint.args());
        self.emit(op, Vec::new(), args);
    }

    /// Copies a tile from shared to global memory, in this thread's bulk group.
    #[track_caller]
    pub fn tensor_store(
        &mut self,
        map: Reg<B64>,
        coordinates: &[Operand<B32>],
        src: impl Into<Addr<B32>>,
        hint: BulkHint,
    ) {
        let Some(dims) = self.rank(coordinates) else { return };
        let op = Op::TensorStore { dims, policy: hint.policy.is_some() };
        self.tensor_out(op, map, coordinates, Some(src.into().into()), hint);
    }

    /// Reduces a tile of shared memory into global memory, in this thread's bulk group.
    #[track_caller]
    pub fn tensor_reduce(
        &mut self,
        op: AtomOp,
        map: Reg<B64>,
        coordinates: &[Operand<B32>],
        src: impl Into<Addr<B32>>,
        hint: BulkHint,
    ) {
        let Some(dims) = self.rank(coordinates) else { return };
        let op = Op::TensorReduce { op, dims, policy: hint.policy.is_some() };
        self.tensor_out(op, map, coordinates, Some(src.into().into()), hint);
    }

    /// Brings a tile of global memory into L2.
    #[track_caller]
    pub fn tensor_prefetch(&mut self, map: Reg<B64>, coordinates: &[Operand<B32>], hint: BulkHint) {
        let Some(dims) = self.rank(coordinates) else { return };
        let op = Op::TensorPrefetch { dims, policy: hint.policy.is_some() };
        self.tensor_out(op, map, coordinates, None, hint);
    }

    /// Brings a tensor map itself into the cache.
    #[track_caller]
    pub fn prefetch_tensormap(&mut self, map: Reg<B64>) {
        self.emit(Op::PrefetchTensormap, Vec::new(), vec![map.at(0).into()]);
    }

    #[track_caller]
    fn tensor_out(
        &mut self,
        op: Op,
        map: Reg<B64>,
        coordinates: &[Operand<B32>],
        src: Option<Arg>,
        hint: BulkHint,
    ) {
        let hint = self.no_multicast(hint);
        let mut args = vec![map.at(0).into()];
        args.extend(coordinates.iter().map(|&c| Arg::from(c)));
        args.extend(src);
        args.extend(hint.args());
        self.emit(op, Vec::new(), args);
    }

    /// The rank that the coordinates have. `None`, with the mistake recorded, where no such rank exists.
    #[track_caller]
    fn rank(&mut self, coordinates: &[Operand<B32>]) -> Option<Dims> {
        let dims = Dims::from_count(coordinates.len());
        if dims.is_none() {
            self.forbidden(&format!("{} coordinates: a tensor map has 1 to 5 dimensions", coordinates.len()));
        }
        dims
    }
}
