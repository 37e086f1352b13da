//! Instructions as plain data: what the builder makes, the printer prints, the checker reads and a simulator
//! runs. Everything is public, so that a test can drop or alter an instruction of a finished module.
//!
//! Operand order: an instruction has its destinations in [`Inst::dst`] and its sources in [`Inst::src`], each
//! in the order in which PTX writes them unless the variant of [`Op`] says otherwise. Vectors and fragments lie
//! flat: a `v4` load has four destinations. Addresses are one [`Arg::Mem`] each.

use std::panic::Location;
use std::sync::Arc;

use crate::modifiers::*;
use crate::table::Alu;
use crate::types::{Guard, Imm, RegId};

/// One instruction of a kernel's body.
#[derive(Clone, Debug, PartialEq)]
pub struct Inst {
    /// What it does.
    pub op: Op,
    /// The predicate that must hold for a lane to execute it.
    pub guard: Option<Guard>,
    /// Where results go: [`Arg::Reg`], or [`Arg::Sink`] where the result is discarded.
    pub dst: Vec<Arg>,
    /// What it reads. `wgmma` reads its destinations, too: see [`Inst::reads_dst`].
    pub src: Vec<Arg>,
    /// The kernel author's comment on it, printed above it.
    pub comment: Option<Arc<str>>,
    /// The section of the kernel that it belongs to: an index into [`Kernel::sections`](crate::Kernel::sections).
    pub section: Option<u32>,
    /// The line of the kernel author's Rust code that emitted it; none where it was read from text.
    pub loc: Option<&'static Location<'static>>,
}

/// An operand without its Rust type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arg {
    /// A register.
    Reg(RegId),
    /// A constant.
    Imm(Imm),
    /// A memory operand, `[base+offset]`.
    Mem {
        /// Where it starts.
        base: MemBase,
        /// Bytes after that.
        offset: i32,
    },
    /// `_`: the result is discarded.
    Sink,
}

impl Arg {
    /// The register that the operand reads or writes, if any; for memory, the base register.
    pub fn reg(self) -> Option<RegId> {
        match self {
            Arg::Reg(id) | Arg::Mem { base: MemBase::Reg(id), .. } => Some(id),
            Arg::Imm(_) | Arg::Mem { .. } | Arg::Sink => None,
        }
    }
}

/// What a memory operand is relative to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemBase {
    /// An address in a register.
    Reg(RegId),
    /// An allocation of shared memory: an index into [`Kernel::shared`](crate::Kernel::shared)'s allocations.
    Shared(u32),
    /// A kernel parameter: an index into [`Kernel::params`](crate::Kernel::params).
    Param(u32),
}

/// A place in the body that branches name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabelId(pub u32);

/// What an instruction does. A variant's fields are the modifiers of the PTX mnemonic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    // Registers only.
    /// A plain instruction: registers in, one register out, each lane for itself. See [`Alu`].
    Alu(Alu),
    /// `setp`: compares two sources into a predicate.
    Setp {
        /// The comparison.
        cmp: Cmp,
        /// How the sources are read.
        ty: NumType,
    },
    /// `mov` from a special register.
    MovSpecial(Special),
    /// `mov.b64 d, {lo, hi}`: two 32-bit halves into one register.
    PackB64,
    /// `mov.b64 {lo, hi}, a`.
    UnpackB64,
    /// `mov.b32 d, {lo, hi}`: two 16-bit halves into one register.
    PackB32,
    /// `mov.b32 {lo, hi}, a`.
    UnpackB32,
    /// `mov` of an address: the source is an [`Arg::Mem`]. 32 bits for shared memory, 64 for a parameter.
    AddrOf,
    /// `cvta`: an address between its space and the generic space; a 64-bit source and destination.
    Cvta {
        /// The space.
        space: Space,
        /// From generic to the space (`cvta.to`), else from the space to generic.
        to_space: bool,
    },
    /// `createpolicy.fractional`: an L2 policy for all accesses, without sources.
    CreatePolicy(L2Evict),

    // Control.
    /// A place that branches name; does nothing.
    Label(LabelId),
    /// A branch, conditional where it has a guard.
    Bra {
        /// Where lanes go that take it.
        target: LabelId,
        /// Where lanes that diverged here reconverge: the immediate post-dominator, or none where they meet only
        /// at the end of the kernel. Present on guarded branches.
        reconverge: Option<LabelId>,
    },
    /// `exit`: ends the lanes.
    Exit,
    /// `ret` from the kernel.
    Ret,
    /// `trap`: stops the kernel with an error.
    Trap,

    // Plain memory.
    /// `ld`. Source: the address, then the policy if the hint has one.
    Ld {
        /// The address space.
        space: Space,
        /// The element.
        ty: MemTy,
        /// The number of elements, and of destinations.
        width: Width,
        /// The memory order.
        order: Order,
        /// The cache hint.
        cache: CacheHint,
    },
    /// `st`. Sources: the address, the elements, then the policy if the hint has one.
    St {
        /// The address space.
        space: Space,
        /// The element.
        ty: MemTy,
        /// The number of elements.
        width: Width,
        /// The memory order.
        order: Order,
        /// The cache hint.
        cache: CacheHint,
    },
    /// `prefetch.global`. Source: the address.
    Prefetch(PrefetchLevel),
    /// `atom`. Sources: the address, the operand, for [`AtomOp::Cas`] the comparand before it. Returns the old value.
    Atom {
        /// The address space.
        space: Space,
        /// The operation.
        op: AtomOp,
        /// The element.
        ty: AtomTy,
        /// The memory order.
        sem: AtomSem,
        /// Its reach.
        scope: Scope,
    },
    /// `red`: as `atom`, without a result. Sources: the address, then the elements.
    Red {
        /// The address space.
        space: Space,
        /// The operation.
        op: AtomOp,
        /// The element.
        ty: AtomTy,
        /// The number of elements.
        width: Width,
        /// The memory order.
        sem: AtomSem,
        /// Its reach.
        scope: Scope,
    },

    // Between the lanes of a warp.
    /// `shfl.sync`. Sources: the value, the lane operand, the clamp, the member mask. A second destination, a
    /// predicate, says whether the source lane was in range.
    Shfl(ShflMode),
    /// `vote.sync` into a predicate. Sources: the predicate, the member mask.
    Vote(VoteMode),
    /// `vote.sync.ballot`: the mask of lanes whose predicate holds. Sources: the predicate, the member mask.
    Ballot,
    /// `match.sync.b32`. Sources: the value, the member mask.
    Match(MatchMode),
    /// `redux.sync`. Sources: the value, the member mask.
    Redux {
        /// The operation.
        op: AtomOp,
        /// The element: `U32`, `S32`, or `B32` for the bitwise operations.
        ty: AtomTy,
    },
    /// `elect.sync`. Destinations: the elected lane (or sink), the predicate that is true in it. Source: the mask.
    Elect,
    /// `activemask`.
    ActiveMask,
    /// `bar.warp.sync`. Source: the member mask.
    BarWarpSync,

    // Block barriers and fences.
    /// `bar.sync` (aligned: all lanes of a warp execute it together) or `barrier.sync`. Sources: the barrier's
    /// id, then the number of threads if given.
    BarSync {
        /// Whether all lanes of the warp execute it together.
        aligned: bool,
    },
    /// `bar.arrive` or `barrier.arrive`. Sources: the barrier's id and the number of threads.
    BarArrive {
        /// Whether all lanes of the warp execute it together.
        aligned: bool,
    },
    /// `membar`.
    Membar(MembarLevel),
    /// `fence`.
    Fence {
        /// The order.
        sem: FenceSem,
        /// Its reach.
        scope: Scope,
    },
    /// `fence.proxy.async`: orders this thread's ordinary accesses before asynchronous ones that follow.
    FenceProxyAsync(ProxySpace),
    /// `fence.mbarrier_init.release.cluster`.
    FenceMbarrierInit,

    // Asynchronous copies of a lane.
    /// `cp.async`, non-bulk. Sources: the shared address, the global address, then the bytes to read (fewer
    /// than copied: the rest is zero-filled) if `src_size`, then the policy if `policy`.
    CpAsync {
        /// The caches.
        cache: CpAsyncCache,
        /// The bytes written.
        bytes: CpAsyncBytes,
        /// An L2 prefetch size.
        l2_prefetch: Option<L2Prefetch>,
        /// Whether a source size is given.
        src_size: bool,
        /// Whether an L2 policy is given.
        policy: bool,
    },
    /// `cp.async.commit_group`.
    CpAsyncCommit,
    /// `cp.async.wait_group N`: at most N of this thread's groups stay in flight.
    CpAsyncWait(u8),
    /// `cp.async.wait_all`.
    CpAsyncWaitAll,
    /// `cp.async.mbarrier.arrive`: arrives when this thread's copies so far are done. Source: the mbarrier.
    CpAsyncMbarrierArrive {
        /// Whether the arrival counts as one of those the barrier was initialised for.
        noinc: bool,
    },

    // Matrix fragments and tensor cores of a warp.
    /// `ldmatrix`. Source: the address. One 32-bit destination per matrix.
    Ldmatrix {
        /// The number of matrices.
        count: MatrixCount,
        /// Whether each is transposed.
        trans: bool,
    },
    /// `stmatrix`. Sources: the address, one 32-bit register per matrix.
    Stmatrix {
        /// The number of matrices.
        count: MatrixCount,
        /// Whether each is transposed.
        trans: bool,
    },
    /// `mma.sync.aligned.*.row.col`. Sources: the A, the B and the C registers.
    Mma {
        /// The shape.
        shape: MmaShape,
        /// A's element.
        a: MatrixTy,
        /// B's element.
        b: MatrixTy,
        /// The accumulator.
        acc: AccTy,
    },

    // mbarrier.
    /// `mbarrier.init`. Sources: the address, the number of arrivals.
    MbarrierInit,
    /// `mbarrier.inval`. Source: the address.
    MbarrierInval,
    /// `mbarrier.arrive`. Sources: the address, then the number of arrivals if `count`. The destination is the
    /// state or [`Arg::Sink`].
    MbarrierArrive {
        /// [`Space::Shared`], or [`Space::SharedCluster`] for another block's barrier.
        space: Space,
        /// Whether a number of arrivals is given.
        count: bool,
        /// Who may rely on what was written before: [`Scope::Cta`], or [`Scope::Cluster`] for another block's barrier.
        scope: Scope,
    },
    /// `mbarrier.arrive.expect_tx`. Sources: the address, the bytes. The destination is the state or [`Arg::Sink`].
    MbarrierArriveExpectTx {
        /// [`Space::Shared`] or [`Space::SharedCluster`].
        space: Space,
    },
    /// `mbarrier.expect_tx.relaxed`. Sources: the address, the bytes.
    MbarrierExpectTx {
        /// [`Space::Shared`] or [`Space::SharedCluster`].
        space: Space,
    },
    /// `mbarrier.test_wait`: does not block. Sources: the address, then the parity (32 bits) or the state (64 bits).
    MbarrierTestWait {
        /// Whether it asks by parity.
        parity: bool,
        /// The reach of the acquire.
        scope: Scope,
    },
    /// `mbarrier.try_wait`: may block for a while. Sources: the address, the parity or the state, then the
    /// suspend time hint in nanoseconds if `hint`.
    MbarrierTryWait {
        /// Whether it asks by parity.
        parity: bool,
        /// The reach of the acquire.
        scope: Scope,
        /// Whether a time hint is given.
        hint: bool,
    },

    // Bulk copies.
    /// `cp.async.bulk` global to shared. Sources: the shared address, the global address, the bytes, the
    /// mbarrier, the CTA mask if `multicast`, the policy if `policy`.
    BulkLoad {
        /// Whether every block of a mask receives it.
        multicast: bool,
        /// Whether an L2 policy is given.
        policy: bool,
    },
    /// `cp.async.bulk` shared to global. Sources: the global address, the shared address, the bytes, the policy
    /// if `policy`.
    BulkStore {
        /// Whether an L2 policy is given.
        policy: bool,
    },
    /// `cp.async.bulk` from this block's shared memory to another's. Sources: the remote address, the local
    /// address, the bytes, the remote mbarrier.
    BulkToCluster,
    /// `cp.async.bulk.prefetch.L2.global`. Sources: the global address, the bytes, the policy if `policy`.
    BulkPrefetch {
        /// Whether an L2 policy is given.
        policy: bool,
    },
    /// `cp.reduce.async.bulk` shared to global. Sources: the global address, the shared address, the bytes, the
    /// policy if `policy`.
    BulkReduce {
        /// The operation.
        op: AtomOp,
        /// The element.
        ty: AtomTy,
        /// Whether an L2 policy is given.
        policy: bool,
    },
    /// `cp.reduce.async.bulk` from this block's shared memory to another's. Sources: the remote address, the
    /// local address, the bytes, the remote mbarrier.
    BulkReduceCluster {
        /// The operation.
        op: AtomOp,
        /// The element.
        ty: AtomTy,
    },
    /// `cp.async.bulk.tensor` global to shared, tile mode. Sources: the shared address, the tensor map, the
    /// coordinates (innermost first), the mbarrier, the CTA mask if `multicast`, the policy if `policy`.
    TensorLoad {
        /// The rank.
        dims: Dims,
        /// Whether every block of a mask receives it.
        multicast: bool,
        /// Whether an L2 policy is given.
        policy: bool,
    },
    /// `cp.async.bulk.tensor` shared to global, tile mode. Sources: the tensor map, the coordinates, the shared
    /// address, the policy if `policy`.
    TensorStore {
        /// The rank.
        dims: Dims,
        /// Whether an L2 policy is given.
        policy: bool,
    },
    /// `cp.reduce.async.bulk.tensor` shared to global, tile mode; the element is the map's. Sources as for
    /// [`Op::TensorStore`].
    TensorReduce {
        /// The operation.
        op: AtomOp,
        /// The rank.
        dims: Dims,
        /// Whether an L2 policy is given.
        policy: bool,
    },
    /// `cp.async.bulk.prefetch.tensor` to L2. Sources: the tensor map, the coordinates, the policy if `policy`.
    TensorPrefetch {
        /// The rank.
        dims: Dims,
        /// Whether an L2 policy is given.
        policy: bool,
    },
    /// `cp.async.bulk.commit_group`.
    BulkCommit,
    /// `cp.async.bulk.wait_group N`: at most N of this thread's bulk groups stay in flight.
    BulkWait {
        /// The number.
        pending: u8,
        /// Whether it waits only for the reads of the sources.
        read: bool,
    },
    /// `prefetch.tensormap`. Source: the tensor map's generic address.
    PrefetchTensormap,

    // Tensor cores of a warpgroup.
    /// `wgmma.mma_async.sync.aligned.m64nNk*`. Destinations: the accumulators, read as well unless scale-d is
    /// false. Sources: A as one descriptor or four registers, B's descriptor, the scale-d predicate.
    Wgmma(Wgmma),
    /// `wgmma.fence`.
    WgmmaFence,
    /// `wgmma.commit_group`.
    WgmmaCommit,
    /// `wgmma.wait_group N`.
    WgmmaWait(u8),
    /// `setmaxnreg`.
    SetMaxNReg {
        /// Whether the warps take registers; else they give some back.
        inc: bool,
        /// Registers per thread after it.
        count: u16,
    },

    // Clusters.
    /// `mapa.shared::cluster.u32`. Sources: a shared address of this block (register), the rank of the block.
    Mapa,
    /// `getctarank.shared::cluster.u32`. Source: a cluster shared address.
    GetCtaRank,
    /// `barrier.cluster.arrive`.
    ClusterArrive {
        /// What it publishes.
        sem: ClusterArrive,
        /// Whether all lanes of the warp execute it together.
        aligned: bool,
    },
    /// `barrier.cluster.wait.acquire`.
    ClusterWait {
        /// Whether all lanes of the warp execute it together.
        aligned: bool,
    },
    /// `st.async` to another block's shared memory. Sources: the remote address, the elements, the remote mbarrier.
    StAsync {
        /// The element: `B32`, `B64` or `F32`.
        ty: MemTy,
        /// The number of elements.
        width: Width,
    },

    // The rest.
    /// `griddepcontrol`.
    GridDepControl(GridDep),
    /// `nanosleep`. Source: nanoseconds.
    Nanosleep,
}

impl Op {
    /// Whether control does not pass to the next instruction in lanes that execute it.
    pub const fn ends_flow(&self) -> bool {
        matches!(self, Op::Bra { .. } | Op::Exit | Op::Ret | Op::Trap)
    }

    /// Whether the instruction belongs to an asynchronous `wgmma` stage.
    pub const fn is_wgmma(&self) -> bool {
        matches!(self, Op::Wgmma(_) | Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait(_))
    }
}

impl Inst {
    /// Whether the instruction reads its destinations before it writes them: `wgmma` does, unless scale-d is
    /// the constant false.
    pub fn reads_dst(&self) -> bool {
        let overwrites = matches!(self.src.last(), Some(Arg::Imm(imm)) if imm.bits == 0);
        matches!(self.op, Op::Wgmma(_)) && !overwrites
    }

    /// The registers that the instruction reads, its guard included.
    pub fn reads(&self) -> impl Iterator<Item = RegId> + '_ {
        let guard = self.guard.map(|g| g.reg.id());
        let accumulators = if self.reads_dst() { self.dst.as_slice() } else { &[] };
        let sources = self.src.iter().chain(accumulators).filter_map(|a| a.reg());
        guard.into_iter().chain(sources)
    }

    /// The registers that the instruction writes.
    pub fn writes(&self) -> impl Iterator<Item = RegId> + '_ {
        self.dst.iter().filter_map(|a| a.reg())
    }
}
