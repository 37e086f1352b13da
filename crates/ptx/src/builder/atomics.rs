//! Atomics and reductions on global and shared memory.

use super::KernelBuilder;
use super::data::args;
use super::memory::ClusterAddr;
use crate::inst::*;
use crate::modifiers::*;
use crate::shared::Shared;
use crate::types::*;

/// Where an atomic acts: the type of the address says in which space.
#[derive(Clone, Copy, Debug)]
pub struct At {
    space: Space,
    addr: Arg,
}

impl From<Addr<B64>> for At {
    fn from(addr: Addr<B64>) -> Self {
        At { space: Space::Global, addr: addr.into() }
    }
}

impl From<Reg<B64>> for At {
    fn from(addr: Reg<B64>) -> Self {
        addr.at(0).into()
    }
}

impl From<Addr<B32>> for At {
    fn from(addr: Addr<B32>) -> Self {
        At { space: Space::Shared, addr: addr.into() }
    }
}

impl From<Reg<B32>> for At {
    fn from(addr: Reg<B32>) -> Self {
        addr.at(0).into()
    }
}

impl From<Shared> for At {
    fn from(shared: Shared) -> Self {
        shared.at(0).into()
    }
}

impl From<ClusterAddr> for At {
    fn from(addr: ClusterAddr) -> Self {
        At { space: Space::SharedCluster, addr: addr.0.at(0).into() }
    }
}

macro_rules! atom_table {
    ($($atom:ident $red:ident $op:ident $ty:ident $class:ident;)*) => {
        /// Atomics that return the old value, and the same as reductions, which do not.
        impl KernelBuilder {
            $(#[doc = concat!("`atom`: ", stringify!($op), " of ", stringify!($ty), "; returns the old value.")]
            #[track_caller]
            pub fn $atom(
                &mut self,
                sem: AtomSem,
                scope: Scope,
                at: impl Into<At>,
                value: impl Into<Operand<$class>>,
            ) -> Reg<$class> {
                let (dst, at) = (self.reg(), at.into());
                let op = Op::Atom { space: at.space, op: AtomOp::$op, ty: AtomTy::$ty, sem, scope };
                self.emit(op, vec![dst.into()], vec![at.addr, value.into().into()]);
                dst
            }

            #[doc = concat!("`red`: ", stringify!($op), " of ", stringify!($ty), ".")]
            #[track_caller]
            pub fn $red(&mut self, sem: AtomSem, scope: Scope, at: impl Into<At>, value: impl Into<Operand<$class>>) {
                let at = at.into();
                let (op, ty, width) = (AtomOp::$op, AtomTy::$ty, Width::V1);
                let op = Op::Red { space: at.space, op, ty, width, sem, scope };
                self.emit(op, Vec::new(), vec![at.addr, value.into().into()]);
            })*
        }

        /// The operations and types of the table.
        pub const ATOMICS: &[(AtomOp, AtomTy)] = &[$((AtomOp::$op, AtomTy::$ty)),*];
    };
}

atom_table! {
    atom_add_u32 red_add_u32 Add U32 B32;
    atom_add_s32 red_add_s32 Add S32 B32;
    atom_add_u64 red_add_u64 Add U64 B64;
    atom_add_f32 red_add_f32 Add F32 F32;
    atom_add_f16x2 red_add_f16x2 Add F16x2 B32;
    atom_add_bf16x2 red_add_bf16x2 Add Bf16x2 B32;
    atom_min_u32 red_min_u32 Min U32 B32;
    atom_min_s32 red_min_s32 Min S32 B32;
    atom_min_u64 red_min_u64 Min U64 B64;
    atom_min_s64 red_min_s64 Min S64 B64;
    atom_max_u32 red_max_u32 Max U32 B32;
    atom_max_s32 red_max_s32 Max S32 B32;
    atom_max_u64 red_max_u64 Max U64 B64;
    atom_max_s64 red_max_s64 Max S64 B64;
    atom_and_b32 red_and_b32 And B32 B32;
    atom_or_b32 red_or_b32 Or B32 B32;
    atom_xor_b32 red_xor_b32 Xor B32 B32;
    atom_and_b64 red_and_b64 And B64 B64;
    atom_or_b64 red_or_b64 Or B64 B64;
    atom_xor_b64 red_xor_b64 Xor B64 B64;
    atom_inc_u32 red_inc_u32 Inc U32 B32;
    atom_dec_u32 red_dec_u32 Dec U32 B32;
}

/// Exchanges, and reductions of vectors.
impl KernelBuilder {
    /// Exchanges 32 bits; returns the old value.
    #[track_caller]
    pub fn atom_exch_b32(
        &mut self,
        sem: AtomSem,
        scope: Scope,
        at: impl Into<At>,
        value: impl Into<Operand<B32>>,
    ) -> Reg<B32> {
        self.atom(AtomOp::Exch, AtomTy::B32, sem, scope, at.into(), vec![value.into().into()])
    }

    /// Exchanges 64 bits; returns the old value.
    #[track_caller]
    pub fn atom_exch_b64(
        &mut self,
        sem: AtomSem,
        scope: Scope,
        at: impl Into<At>,
        value: impl Into<Operand<B64>>,
    ) -> Reg<B64> {
        self.atom(AtomOp::Exch, AtomTy::B64, sem, scope, at.into(), vec![value.into().into()])
    }

    /// Writes `value` where 32 bits equal `expected`; returns the old value.
    #[track_caller]
    pub fn atom_cas_b32(
        &mut self,
        sem: AtomSem,
        scope: Scope,
        at: impl Into<At>,
        expected: impl Into<Operand<B32>>,
        value: impl Into<Operand<B32>>,
    ) -> Reg<B32> {
        let src = vec![expected.into().into(), value.into().into()];
        self.atom(AtomOp::Cas, AtomTy::B32, sem, scope, at.into(), src)
    }

    /// Writes `value` where 64 bits equal `expected`; returns the old value.
    #[track_caller]
    pub fn atom_cas_b64(
        &mut self,
        sem: AtomSem,
        scope: Scope,
        at: impl Into<At>,
        expected: impl Into<Operand<B64>>,
        value: impl Into<Operand<B64>>,
    ) -> Reg<B64> {
        let src = vec![expected.into().into(), value.into().into()];
        self.atom(AtomOp::Cas, AtomTy::B64, sem, scope, at.into(), src)
    }

    #[track_caller]
    fn atom<T: RegType>(
        &mut self,
        op: AtomOp,
        ty: AtomTy,
        sem: AtomSem,
        scope: Scope,
        at: At,
        values: Vec<Arg>,
    ) -> Reg<T> {
        let dst = self.reg();
        let op = Op::Atom { space: at.space, op, ty, sem, scope };
        self.emit(op, vec![dst.into()], std::iter::once(at.addr).chain(values).collect());
        dst
    }

    /// Adds 2 or 4 floats to global memory at once.
    #[track_caller]
    pub fn red_add_vec_f32<const N: usize>(
        &mut self,
        sem: AtomSem,
        scope: Scope,
        addr: impl Into<Addr<B64>>,
        values: [Reg<F32>; N],
    ) {
        const { assert!(N == 2 || N == 4, "red moves 2 or 4 floats at once") };
        let width = if N == 2 { Width::V2 } else { Width::V4 };
        let op = Op::Red { space: Space::Global, op: AtomOp::Add, ty: AtomTy::F32, width, sem, scope };
        let src = std::iter::once(addr.into().into()).chain(args(&values)).collect();
        self.emit(op, Vec::new(), src);
    }
}
