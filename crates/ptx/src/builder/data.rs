//! Data between registers: special registers, packing, address conversion, and exchange between lanes.

use super::KernelBuilder;
use crate::inst::*;
use crate::modifiers::*;
use crate::types::*;

/// A 32-bit register that lanes can exchange.
pub trait Word32: MemType {}
impl Word32 for B32 {}
impl Word32 for F32 {}

/// All lanes of a warp.
pub const FULL_MASK: u32 = 0xffff_ffff;

macro_rules! special_registers {
    ($($(#[$doc:meta])* $method:ident $special:ident $class:ident;)*) => {
        /// Special registers.
        impl KernelBuilder {
            $(#[doc = concat!("Reads `", stringify!($special), "`; see [`Special`].")]
            #[track_caller]
            pub fn $method(&mut self) -> Reg<$class> {
                let dst = self.reg();
                self.emit(Op::MovSpecial(Special::$special), vec![dst.into()], Vec::new());
                dst
            })*
        }
    };
}

special_registers! {
    tid_x TidX B32;
    tid_y TidY B32;
    tid_z TidZ B32;
    ntid_x NtidX B32;
    ntid_y NtidY B32;
    ntid_z NtidZ B32;
    ctaid_x CtaidX B32;
    ctaid_y CtaidY B32;
    ctaid_z CtaidZ B32;
    nctaid_x NctaidX B32;
    nctaid_y NctaidY B32;
    nctaid_z NctaidZ B32;
    laneid LaneId B32;
    warpid WarpId B32;
    lanemask_lt LaneMaskLt B32;
    smid SmId B32;
    nsmid NsmId B32;
    clusterid_x ClusterIdX B32;
    clusterid_y ClusterIdY B32;
    clusterid_z ClusterIdZ B32;
    nclusterid_x NclusterIdX B32;
    nclusterid_y NclusterIdY B32;
    nclusterid_z NclusterIdZ B32;
    cluster_ctaid_x ClusterCtaIdX B32;
    cluster_ctaid_y ClusterCtaIdY B32;
    cluster_ctaid_z ClusterCtaIdZ B32;
    cluster_nctaid_x ClusterNctaIdX B32;
    cluster_nctaid_y ClusterNctaIdY B32;
    cluster_nctaid_z ClusterNctaIdZ B32;
    cluster_ctarank ClusterCtaRank B32;
    cluster_nctarank ClusterNctaRank B32;
    dynamic_smem_size DynamicSmemSize B32;
    clock Clock B32;
    clock64 Clock64 B64;
    globaltimer GlobalTimer B64;
}

/// Packing and addresses.
impl KernelBuilder {
    /// One 64-bit register from two halves.
    #[track_caller]
    pub fn pack_b64(&mut self, lo: impl Into<Operand<B32>>, hi: impl Into<Operand<B32>>) -> Reg<B64> {
        let dst = self.reg();
        self.emit(Op::PackB64, vec![dst.into()], vec![lo.into().into(), hi.into().into()]);
        dst
    }

    /// The halves of a 64-bit register, the low one first.
    #[track_caller]
    pub fn unpack_b64(&mut self, a: Reg<B64>) -> [Reg<B32>; 2] {
        let dst = self.regs();
        self.emit(Op::UnpackB64, args(&dst), vec![a.into()]);
        dst
    }

    /// One 32-bit register from two halves.
    #[track_caller]
    pub fn pack_b32(&mut self, lo: impl Into<Operand<B16>>, hi: impl Into<Operand<B16>>) -> Reg<B32> {
        let dst = self.reg();
        self.emit(Op::PackB32, vec![dst.into()], vec![lo.into().into(), hi.into().into()]);
        dst
    }

    /// The halves of a 32-bit register, the low one first.
    #[track_caller]
    pub fn unpack_b32(&mut self, a: Reg<B32>) -> [Reg<B16>; 2] {
        let dst = self.regs();
        self.emit(Op::UnpackB32, args(&dst), vec![a.into()]);
        dst
    }

    /// A shared-memory address in a register.
    #[track_caller]
    pub fn shared_addr(&mut self, at: impl Into<Addr<B32>>) -> Reg<B32> {
        let addr = at.into();
        if let MemBase::Reg(id) = addr.base {
            return self.add_s32(Reg::new(id), addr.offset);
        }
        let dst = self.reg();
        self.emit(Op::AddrOf, vec![dst.into()], vec![addr.into()]);
        dst
    }

    /// A generic address as one of the space, or one of the space as a generic one.
    #[track_caller]
    pub fn cvta(&mut self, space: Space, to_space: bool, a: Reg<B64>) -> Reg<B64> {
        let dst = self.reg();
        self.emit(Op::Cvta { space, to_space }, vec![dst.into()], vec![a.into()]);
        dst
    }

    /// An L2 policy that applies to every access it is given to.
    #[track_caller]
    pub fn create_policy(&mut self, evict: L2Evict) -> Reg<B64> {
        let dst = self.reg();
        self.emit(Op::CreatePolicy(evict), vec![dst.into()], Vec::new());
        dst
    }
}

/// The lanes of a warp.
impl KernelBuilder {
    /// `shfl.sync` over all lanes: the value of another lane.
    #[track_caller]
    pub fn shfl<T: Word32>(&mut self, mode: ShflMode, a: Reg<T>, lane: impl Into<Operand<B32>>) -> Reg<T> {
        // Segments of the whole warp: the clamp is the last lane, but for `up` the first.
        let clamp = Operand::<B32>::from(if mode == ShflMode::Up { 0u32 } else { 31 });
        let dst = self.reg();
        let src = vec![a.into(), lane.into().into(), clamp.into(), Operand::<B32>::from(FULL_MASK).into()];
        self.emit(Op::Shfl(mode), vec![Arg::from(dst), Arg::Sink], src);
        dst
    }

    /// `shfl.sync` with its clamp and member mask; also whether the source lane was in range.
    #[track_caller]
    pub fn shfl_with<T: Word32>(
        &mut self,
        mode: ShflMode,
        a: Reg<T>,
        lane: impl Into<Operand<B32>>,
        clamp: impl Into<Operand<B32>>,
        mask: impl Into<Operand<B32>>,
    ) -> (Reg<T>, Reg<Pred>) {
        let (dst, in_range) = (self.reg(), self.reg());
        let src = vec![a.into(), lane.into().into(), clamp.into().into(), mask.into().into()];
        self.emit(Op::Shfl(mode), vec![Arg::from(dst), in_range.into()], src);
        (dst, in_range)
    }

    /// The value of the lane whose number differs by the bits of `mask`.
    #[track_caller]
    pub fn shfl_bfly<T: Word32>(&mut self, a: Reg<T>, mask: impl Into<Operand<B32>>) -> Reg<T> {
        self.shfl(ShflMode::Bfly, a, mask)
    }

    /// The value of the lane of this number.
    #[track_caller]
    pub fn shfl_idx<T: Word32>(&mut self, a: Reg<T>, lane: impl Into<Operand<B32>>) -> Reg<T> {
        self.shfl(ShflMode::Idx, a, lane)
    }

    /// The value of the lane this many below; of the lane itself where there is none.
    #[track_caller]
    pub fn shfl_up<T: Word32>(&mut self, a: Reg<T>, delta: impl Into<Operand<B32>>) -> Reg<T> {
        self.shfl(ShflMode::Up, a, delta)
    }

    /// The value of the lane this many above; of the lane itself where there is none.
    #[track_caller]
    pub fn shfl_down<T: Word32>(&mut self, a: Reg<T>, delta: impl Into<Operand<B32>>) -> Reg<T> {
        self.shfl(ShflMode::Down, a, delta)
    }

    /// `vote.sync` over the lanes of a mask.
    #[track_caller]
    pub fn vote(&mut self, mode: VoteMode, a: Reg<Pred>, mask: impl Into<Operand<B32>>) -> Reg<Pred> {
        let dst = self.reg();
        self.emit(Op::Vote(mode), vec![dst.into()], vec![a.into(), mask.into().into()]);
        dst
    }

    /// Whether the predicate holds in any lane.
    #[track_caller]
    pub fn vote_any(&mut self, a: Reg<Pred>) -> Reg<Pred> {
        self.vote(VoteMode::Any, a, FULL_MASK)
    }

    /// Whether the predicate holds in all lanes.
    #[track_caller]
    pub fn vote_all(&mut self, a: Reg<Pred>) -> Reg<Pred> {
        self.vote(VoteMode::All, a, FULL_MASK)
    }

    /// The mask of lanes in which the predicate holds.
    #[track_caller]
    pub fn ballot(&mut self, a: Reg<Pred>, mask: impl Into<Operand<B32>>) -> Reg<B32> {
        let dst = self.reg();
        self.emit(Op::Ballot, vec![dst.into()], vec![a.into(), mask.into().into()]);
        dst
    }

    /// `match.sync`: the mask of lanes with the same value, by [`MatchMode`].
    #[track_caller]
    pub fn match_b32(&mut self, mode: MatchMode, a: Reg<B32>, mask: impl Into<Operand<B32>>) -> Reg<B32> {
        let dst = self.reg();
        self.emit(Op::Match(mode), vec![dst.into()], vec![a.into(), mask.into().into()]);
        dst
    }

    /// `elect.sync`: a predicate that holds in one lane of the mask.
    #[track_caller]
    pub fn elect(&mut self, mask: impl Into<Operand<B32>>) -> Reg<Pred> {
        let elected = self.reg();
        self.emit(Op::Elect, vec![Arg::Sink, elected.into()], vec![mask.into().into()]);
        elected
    }

    /// The mask of lanes that execute this together, at this moment.
    #[track_caller]
    pub fn activemask(&mut self) -> Reg<B32> {
        let dst = self.reg();
        self.emit(Op::ActiveMask, vec![dst.into()], Vec::new());
        dst
    }
}

macro_rules! redux_table {
    ($($method:ident $op:ident $ty:ident;)*) => {
        /// Reductions over the lanes of a mask.
        impl KernelBuilder {
            $(#[doc = concat!("`redux.sync`: ", stringify!($op), " as ", stringify!($ty))]
            #[track_caller]
            pub fn $method(&mut self, a: Reg<B32>, mask: impl Into<Operand<B32>>) -> Reg<B32> {
                let dst = self.reg();
                let op = Op::Redux { op: AtomOp::$op, ty: AtomTy::$ty };
                self.emit(op, vec![dst.into()], vec![a.into(), mask.into().into()]);
                dst
            })*
        }
    };
}

redux_table! {
    redux_add_u32 Add U32;
    redux_min_u32 Min U32;
    redux_max_u32 Max U32;
    redux_add_s32 Add S32;
    redux_min_s32 Min S32;
    redux_max_s32 Max S32;
    redux_and_b32 And B32;
    redux_or_b32 Or B32;
    redux_xor_b32 Xor B32;
}

/// Registers as operands.
pub(super) fn args<T: RegType>(regs: &[Reg<T>]) -> Vec<Arg> {
    regs.iter().map(|&r| r.into()).collect()
}
