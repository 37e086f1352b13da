//! Loads and stores, and the asynchronous copies of a lane.

use super::KernelBuilder;
use super::data::args;
use crate::inst::*;
use crate::modifiers::*;
use crate::types::*;

/// An address in the shared memory of some block of the cluster, as `mapa` makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterAddr(pub Reg<B32>);

impl From<ClusterAddr> for Addr<B32> {
    fn from(a: ClusterAddr) -> Self {
        a.0.into()
    }
}

/// How a load or store is ordered and cached. `MemHint::new()` asks for nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemHint {
    order: Order,
    cache: CacheHint,
    policy: Option<Operand<B64>>,
}

impl MemHint {
    /// No hint.
    pub fn new() -> MemHint {
        MemHint::default()
    }

    /// A memory order.
    pub fn order(self, order: Order) -> MemHint {
        MemHint { order, ..self }
    }

    /// A cache operator.
    pub fn cache(self, op: CacheOp) -> MemHint {
        MemHint { cache: CacheHint { op: Some(op), ..self.cache }, ..self }
    }

    /// The data is read-only for the whole kernel.
    pub fn nc(self) -> MemHint {
        MemHint { cache: CacheHint { non_coherent: true, ..self.cache }, ..self }
    }

    /// An L1 eviction priority.
    pub fn l1(self, evict: L1Evict) -> MemHint {
        MemHint { cache: CacheHint { l1: Some(evict), ..self.cache }, ..self }
    }

    /// How much L2 should fetch.
    pub fn l2_prefetch(self, size: L2Prefetch) -> MemHint {
        MemHint { cache: CacheHint { l2_prefetch: Some(size), ..self.cache }, ..self }
    }

    /// An L2 policy, from [`KernelBuilder::create_policy`] or a constant that is one.
    pub fn policy(self, policy: impl Into<Operand<B64>>) -> MemHint {
        MemHint { cache: CacheHint { policy: true, ..self.cache }, policy: Some(policy.into()), ..self }
    }
}

/// The element type with which a register of a class is loaded and stored.
fn mem_ty<T: MemType>() -> MemTy {
    match T::CLASS {
        RegClass::B16 => MemTy::B16,
        RegClass::B64 => MemTy::B64,
        RegClass::F32 => MemTy::F32,
        RegClass::B32 | RegClass::Pred => MemTy::B32,
    }
}

/// The width for `N` elements of a type. Where PTX has none, this does not compile.
fn width<T: MemType, const N: usize>() -> Width {
    const {
        assert!(N == 1 || N == 2 || N == 4, "a load or store moves 1, 2 or 4 elements");
        assert!(N as u32 * T::CLASS.bytes() <= 16, "a load or store moves at most 16 bytes");
    }
    match N {
        1 => Width::V1,
        2 => Width::V2,
        _ => Width::V4,
    }
}

/// Loads.
impl KernelBuilder {
    #[track_caller]
    fn load<T: MemType, const N: usize>(&mut self, space: Space, addr: Arg, hint: MemHint) -> [Reg<T>; N] {
        let dst = self.regs();
        let (ty, width) = (mem_ty::<T>(), width::<T, N>());
        let op = Op::Ld { space, ty, width, order: hint.order, cache: hint.cache };
        let src = std::iter::once(addr).chain(hint.policy.map(Arg::from)).collect();
        self.emit(op, args(&dst), src);
        dst
    }

    #[track_caller]
    fn store<T: MemType>(&mut self, space: Space, width: Width, addr: Arg, values: Vec<Arg>, hint: MemHint) {
        let op = Op::St { space, ty: mem_ty::<T>(), width, order: hint.order, cache: hint.cache };
        let src = std::iter::once(addr).chain(values).chain(hint.policy.map(Arg::from)).collect();
        self.emit(op, Vec::new(), src);
    }

    #[track_caller]
    pub(super) fn load_param(&mut self, index: u32, class: RegClass, dst: Arg) {
        let ty = match class {
            RegClass::B16 => MemTy::B16,
            RegClass::B64 => MemTy::B64,
            RegClass::F32 => MemTy::F32,
            RegClass::B32 | RegClass::Pred => MemTy::B32,
        };
        let (order, cache) = (Order::Weak, CacheHint::default());
        let op = Op::Ld { space: Space::Param, ty, width: Width::V1, order, cache };
        self.emit(op, vec![dst], vec![Arg::Mem { base: MemBase::Param(index), offset: 0 }]);
    }

    /// Loads from global memory.
    #[track_caller]
    pub fn ld_global<T: MemType>(&mut self, addr: impl Into<Addr<B64>>) -> Reg<T> {
        let [dst] = self.load(Space::Global, addr.into().into(), MemHint::new());
        dst
    }

    /// Loads from global memory with a hint.
    #[track_caller]
    pub fn ld_global_hint<T: MemType>(&mut self, addr: impl Into<Addr<B64>>, hint: MemHint) -> Reg<T> {
        let [dst] = self.load(Space::Global, addr.into().into(), hint);
        dst
    }

    /// Loads 2 or 4 elements from global memory.
    ///
    /// More than 16 bytes, or a number of elements that PTX does not have, does not compile:
    ///
    /// ```compile_fail
    /// # use flashcore_ptx::*;
    /// # let mut k = KernelBuilder::new("k", Target::Sm80);
    /// let at = k.mov_b64(0);
    /// let wide: [Reg<B64>; 4] = k.ld_global_vec(at);
    /// ```
    #[track_caller]
    pub fn ld_global_vec<T: MemType, const N: usize>(&mut self, addr: impl Into<Addr<B64>>) -> [Reg<T>; N] {
        self.load(Space::Global, addr.into().into(), MemHint::new())
    }

    /// Loads 2 or 4 elements from global memory with a hint.
    #[track_caller]
    pub fn ld_global_vec_hint<T: MemType, const N: usize>(
        &mut self,
        addr: impl Into<Addr<B64>>,
        hint: MemHint,
    ) -> [Reg<T>; N] {
        self.load(Space::Global, addr.into().into(), hint)
    }

    /// Loads from this block's shared memory.
    #[track_caller]
    pub fn ld_shared<T: MemType>(&mut self, addr: impl Into<Addr<B32>>) -> Reg<T> {
        let [dst] = self.load(Space::Shared, addr.into().into(), MemHint::new());
        dst
    }

    /// Loads 2 or 4 elements from this block's shared memory.
    #[track_caller]
    pub fn ld_shared_vec<T: MemType, const N: usize>(&mut self, addr: impl Into<Addr<B32>>) -> [Reg<T>; N] {
        self.load(Space::Shared, addr.into().into(), MemHint::new())
    }

    /// Loads 1, 2 or 4 elements from the shared memory of a block of the cluster.
    #[track_caller]
    pub fn ld_cluster<T: MemType, const N: usize>(&mut self, addr: ClusterAddr) -> [Reg<T>; N] {
        self.load(Space::SharedCluster, addr.0.at(0).into(), MemHint::new())
    }

    /// Loads a byte of global memory, zero-extended.
    #[track_caller]
    pub fn ld_global_u8(&mut self, addr: impl Into<Addr<B64>>) -> Reg<B32> {
        self.load_byte(Space::Global, MemTy::U8, addr.into().into())
    }

    /// Loads a byte of global memory, sign-extended.
    #[track_caller]
    pub fn ld_global_s8(&mut self, addr: impl Into<Addr<B64>>) -> Reg<B32> {
        self.load_byte(Space::Global, MemTy::S8, addr.into().into())
    }

    /// Loads a byte of shared memory, zero-extended.
    #[track_caller]
    pub fn ld_shared_u8(&mut self, addr: impl Into<Addr<B32>>) -> Reg<B32> {
        self.load_byte(Space::Shared, MemTy::U8, addr.into().into())
    }

    #[track_caller]
    fn load_byte(&mut self, space: Space, ty: MemTy, addr: Arg) -> Reg<B32> {
        let dst = self.reg();
        let op = Op::Ld { space, ty, width: Width::V1, order: Order::Weak, cache: CacheHint::default() };
        self.emit(op, vec![dst.into()], vec![addr]);
        dst
    }
}

/// Stores.
impl KernelBuilder {
    /// Stores to global memory.
    #[track_caller]
    pub fn st_global<T: MemType>(&mut self, addr: impl Into<Addr<B64>>, value: impl Into<Operand<T>>) {
        self.st_global_hint(addr, value, MemHint::new());
    }

    /// Stores to global memory with a hint.
    #[track_caller]
    pub fn st_global_hint<T: MemType>(
        &mut self,
        addr: impl Into<Addr<B64>>,
        value: impl Into<Operand<T>>,
        hint: MemHint,
    ) {
        let value = vec![value.into().into()];
        self.store::<T>(Space::Global, Width::V1, addr.into().into(), value, hint);
    }

    /// Stores 2 or 4 elements to global memory.
    #[track_caller]
    pub fn st_global_vec<T: MemType, const N: usize>(
        &mut self,
        addr: impl Into<Addr<B64>>,
        values: [Reg<T>; N],
    ) {
        self.st_global_vec_hint(addr, values, MemHint::new());
    }

    /// Stores 2 or 4 elements to global memory with a hint.
    #[track_caller]
    pub fn st_global_vec_hint<T: MemType, const N: usize>(
        &mut self,
        addr: impl Into<Addr<B64>>,
        values: [Reg<T>; N],
        hint: MemHint,
    ) {
        self.store::<T>(Space::Global, width::<T, N>(), addr.into().into(), args(&values), hint);
    }

    /// Stores to this block's shared memory.
    #[track_caller]
    pub fn st_shared<T: MemType>(&mut self, addr: impl Into<Addr<B32>>, value: impl Into<Operand<T>>) {
        let value = vec![value.into().into()];
        self.store::<T>(Space::Shared, Width::V1, addr.into().into(), value, MemHint::new());
    }

    /// Stores 2 or 4 elements to this block's shared memory.
    #[track_caller]
    pub fn st_shared_vec<T: MemType, const N: usize>(
        &mut self,
        addr: impl Into<Addr<B32>>,
        values: [Reg<T>; N],
    ) {
        let hint = MemHint::new();
        self.store::<T>(Space::Shared, width::<T, N>(), addr.into().into(), args(&values), hint);
    }

    /// Stores 1, 2 or 4 elements to the shared memory of a block of the cluster.
    #[track_caller]
    pub fn st_cluster<T: MemType, const N: usize>(&mut self, addr: ClusterAddr, values: [Reg<T>; N]) {
        let at = addr.0.at(0).into();
        self.store::<T>(Space::SharedCluster, width::<T, N>(), at, args(&values), MemHint::new());
    }

    /// Stores the low byte of a register to global memory.
    #[track_caller]
    pub fn st_global_u8(&mut self, addr: impl Into<Addr<B64>>, value: Reg<B32>) {
        self.store_byte(Space::Global, addr.into().into(), value);
    }

    /// Stores the low byte of a register to shared memory.
    #[track_caller]
    pub fn st_shared_u8(&mut self, addr: impl Into<Addr<B32>>, value: Reg<B32>) {
        self.store_byte(Space::Shared, addr.into().into(), value);
    }

    #[track_caller]
    fn store_byte(&mut self, space: Space, addr: Arg, value: Reg<B32>) {
        let (order, cache) = (Order::Weak, CacheHint::default());
        let op = Op::St { space, ty: MemTy::U8, width: Width::V1, order, cache };
        self.emit(op, Vec::new(), vec![addr, value.into()]);
    }

    /// Brings the line of a global address into a cache.
    #[track_caller]
    pub fn prefetch_global(&mut self, level: PrefetchLevel, addr: impl Into<Addr<B64>>) {
        self.emit(Op::Prefetch(level), Vec::new(), vec![addr.into().into()]);
    }

    /// `st.async`: stores to the shared memory of a block of the cluster, counting the bytes at its mbarrier.
    #[track_caller]
    pub fn st_async<T: MemType, const N: usize>(
        &mut self,
        addr: ClusterAddr,
        values: [Reg<T>; N],
        bar: ClusterAddr,
    ) {
        let op = Op::StAsync { ty: mem_ty::<T>(), width: width::<T, N>() };
        let mut src = vec![addr.0.at(0).into()];
        src.extend(args(&values));
        src.push(bar.0.at(0).into());
        self.emit(op, Vec::new(), src);
    }
}

/// Asynchronous copies of a lane, global to shared.
impl KernelBuilder {
    /// `cp.async`: copies 4, 8 or 16 bytes.
    #[track_caller]
    pub fn cp_async(
        &mut self,
        cache: CpAsyncCache,
        bytes: CpAsyncBytes,
        dst: impl Into<Addr<B32>>,
        src: impl Into<Addr<B64>>,
    ) {
        let op = Op::CpAsync { cache, bytes, l2_prefetch: None, src_size: false, policy: false };
        self.emit(op, Vec::new(), vec![dst.into().into(), src.into().into()]);
    }

    /// `cp.async` that reads only `src_bytes` and fills the rest with zeros.
    #[track_caller]
    pub fn cp_async_zfill(
        &mut self,
        cache: CpAsyncCache,
        bytes: CpAsyncBytes,
        dst: impl Into<Addr<B32>>,
        src: impl Into<Addr<B64>>,
        src_bytes: impl Into<Operand<B32>>,
    ) {
        let op = Op::CpAsync { cache, bytes, l2_prefetch: None, src_size: true, policy: false };
        self.emit(op, Vec::new(), vec![dst.into().into(), src.into().into(), src_bytes.into().into()]);
    }

    /// `cp.async` with all its options.
    #[track_caller]
    pub fn cp_async_hint(
        &mut self,
        cache: CpAsyncCache,
        bytes: CpAsyncBytes,
        dst: impl Into<Addr<B32>>,
        src: impl Into<Addr<B64>>,
        src_bytes: Option<Operand<B32>>,
        l2_prefetch: Option<L2Prefetch>,
        policy: Option<Operand<B64>>,
    ) {
        let op = Op::CpAsync {
            cache,
            bytes,
            l2_prefetch,
            src_size: src_bytes.is_some(),
            policy: policy.is_some(),
        };
        let mut args = vec![dst.into().into(), src.into().into()];
        args.extend(src_bytes.map(Arg::from));
        args.extend(policy.map(Arg::from));
        self.emit(op, Vec::new(), args);
    }

    /// Closes the group of this thread's copies so far.
    #[track_caller]
    pub fn cp_async_commit(&mut self) {
        self.emit(Op::CpAsyncCommit, Vec::new(), Vec::new());
    }

    /// Waits until at most `pending` of this thread's groups are in flight.
    #[track_caller]
    pub fn cp_async_wait(&mut self, pending: u8) {
        self.emit(Op::CpAsyncWait(pending), Vec::new(), Vec::new());
    }

    /// Waits for all of this thread's copies.
    #[track_caller]
    pub fn cp_async_wait_all(&mut self) {
        self.emit(Op::CpAsyncWaitAll, Vec::new(), Vec::new());
    }

    /// Arrives at an mbarrier when this thread's copies so far are done. With `noinc` the arrival counts as one of
    /// those that the barrier was initialised for.
    #[track_caller]
    pub fn cp_async_mbarrier_arrive(&mut self, bar: impl Into<Addr<B32>>, noinc: bool) {
        self.emit(Op::CpAsyncMbarrierArrive { noinc }, Vec::new(), vec![bar.into().into()]);
    }
}
