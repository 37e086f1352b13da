//! What an instruction is made of: targets, ISA versions, register classes, typed registers and operands.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Not;

use crate::inst::{Arg, MemBase};
use crate::shared::Shared;

/// A GPU architecture that a module is written for, oldest first.
///
/// Every later target has what the earlier ones have. The `a` of [`Target::Sm90a`] marks code that runs on
/// Hopper only: `wgmma` and `setmaxnreg` need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// Ampere data centre (A100).
    Sm80,
    /// Ada (L4, RTX 40).
    Sm89,
    /// Hopper, the portable part.
    Sm90,
    /// Hopper with its architecture-specific instructions.
    Sm90a,
}

impl Target {
    /// All targets, oldest first.
    pub const ALL: [Target; 4] = [Target::Sm80, Target::Sm89, Target::Sm90, Target::Sm90a];

    /// The name as `.target` and ptxas's `-arch` spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Target::Sm80 => "sm_80",
            Target::Sm89 => "sm_89",
            Target::Sm90 => "sm_90",
            Target::Sm90a => "sm_90a",
        }
    }

    /// The target of this name, if it is one.
    pub fn from_name(name: &str) -> Option<Target> {
        Target::ALL.into_iter().find(|t| t.name() == name)
    }

    /// The oldest PTX version that knows the target.
    pub const fn isa(self) -> IsaVersion {
        match self {
            Target::Sm80 => IsaVersion::V7_0,
            Target::Sm89 | Target::Sm90 => IsaVersion::V7_8,
            Target::Sm90a => IsaVersion::V8_0,
        }
    }

    /// The most shared memory one block can opt in to, in bytes.
    pub const fn max_shared_bytes(self) -> u32 {
        match self {
            Target::Sm80 => 163 * 1024,
            Target::Sm89 => 99 * 1024,
            Target::Sm90 | Target::Sm90a => 227 * 1024,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A PTX ISA version, as `.version` states it.
///
/// The oldest here is 7.0, the first that knows `sm_80`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IsaVersion {
    /// The number before the point.
    pub major: u8,
    /// The number after the point.
    pub minor: u8,
}

macro_rules! isa_versions {
    ($($name:ident = $major:literal . $minor:literal;)*) => {
        impl IsaVersion {
            $(#[doc = concat!("PTX ", stringify!($major), ".", stringify!($minor), ".")]
            pub const $name: IsaVersion = IsaVersion { major: $major, minor: $minor };)*
            /// The versions that exist from 7.0 on, oldest first, up to the newest the table names.
            pub const ALL: &'static [IsaVersion] = &[$(IsaVersion::$name),*];
        }
    };
}

isa_versions! {
    V7_0 = 7 . 0;
    V7_1 = 7 . 1;
    V7_2 = 7 . 2;
    V7_3 = 7 . 3;
    V7_4 = 7 . 4;
    V7_5 = 7 . 5;
    V7_6 = 7 . 6;
    V7_7 = 7 . 7;
    V7_8 = 7 . 8;
    V8_0 = 8 . 0;
    V8_1 = 8 . 1;
    V8_2 = 8 . 2;
    V8_3 = 8 . 3;
    V8_4 = 8 . 4;
    V8_5 = 8 . 5;
    V8_6 = 8 . 6;
    V8_7 = 8 . 7;
    V8_8 = 8 . 8;
    V9_0 = 9 . 0;
}

impl fmt::Display for IsaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What an instruction needs: the oldest PTX version and the oldest target that have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// The oldest PTX version.
    pub isa: IsaVersion,
    /// The oldest target.
    pub target: Target,
}

/// The classes of registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RegClass {
    /// A predicate, `%p`.
    Pred,
    /// 16 bits, `%h`: an f16, a bf16, a pair of fp8 values.
    B16,
    /// 32 bits, `%r`: an integer, a shared-memory address, a packed pair of halves, four fp8 values.
    B32,
    /// 64 bits, `%rd`: an integer, a global address, a matrix descriptor, an mbarrier state.
    B64,
    /// A single-precision float, `%f`.
    F32,
}

impl RegClass {
    /// All classes, in the order in which they are declared.
    pub const ALL: [RegClass; 5] =
        [RegClass::Pred, RegClass::B16, RegClass::B32, RegClass::B64, RegClass::F32];

    /// The prefix of the printed register name.
    pub const fn prefix(self) -> &'static str {
        match self {
            RegClass::Pred => "%p",
            RegClass::B16 => "%h",
            RegClass::B32 => "%r",
            RegClass::B64 => "%rd",
            RegClass::F32 => "%f",
        }
    }

    /// The PTX type of the declaration.
    pub const fn type_name(self) -> &'static str {
        match self {
            RegClass::Pred => "pred",
            RegClass::B16 => "b16",
            RegClass::B32 => "b32",
            RegClass::B64 => "b64",
            RegClass::F32 => "f32",
        }
    }

    /// The size of a value in bytes; a predicate has none in memory and counts as 0.
    pub const fn bytes(self) -> u32 {
        match self {
            RegClass::Pred => 0,
            RegClass::B16 => 2,
            RegClass::B32 | RegClass::F32 => 4,
            RegClass::B64 => 8,
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A type that a [`Reg`] can have: one of [`Pred`], [`B16`], [`B32`], [`B64`], [`F32`].
pub trait RegType: sealed::Sealed + Copy + fmt::Debug + 'static {
    /// The class at run time.
    const CLASS: RegClass;
}

/// A register type that memory can hold: every one but [`Pred`].
pub trait MemType: RegType {}

macro_rules! reg_types {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {}
        impl sealed::Sealed for $name {}
        impl RegType for $name {
            const CLASS: RegClass = RegClass::$name;
        })*
    };
}

reg_types! {
    /// The type of predicate registers.
    Pred;
    /// The type of 16-bit registers.
    B16;
    /// The type of 32-bit registers.
    B32;
    /// The type of 64-bit registers.
    B64;
    /// The type of single-precision registers.
    F32;
}

impl MemType for B16 {}
impl MemType for B32 {}
impl MemType for B64 {}
impl MemType for F32 {}

/// The number of a virtual register in its kernel: an index into [`Kernel::regs`](crate::Kernel::regs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegId(pub u32);

/// A virtual register of a known type.
///
/// It is a name, not a value: copying it does not copy what the register holds.
#[derive(Clone, Copy)]
pub struct Reg<T: RegType> {
    pub(crate) id: RegId,
    pub(crate) ty: PhantomData<T>,
}

impl<T: RegType> Reg<T> {
    pub(crate) const fn new(id: RegId) -> Self {
        Reg { id, ty: PhantomData }
    }

    /// The register's number in its kernel.
    pub const fn id(self) -> RegId {
        self.id
    }
}

impl<T: RegType> PartialEq for Reg<T> {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}
impl<T: RegType> Eq for Reg<T> {}
impl<T: RegType> fmt::Debug for Reg<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reg<{:?}>({})", T::CLASS, self.id.0)
    }
}

impl Reg<B32> {
    /// The shared-memory address `bytes` after the one in this register.
    pub fn at(self, bytes: i32) -> Addr<B32> {
        Addr::new(MemBase::Reg(self.id), bytes)
    }
}

impl Reg<B64> {
    /// The global (or generic) address `bytes` after the one in this register.
    pub fn at(self, bytes: i32) -> Addr<B64> {
        Addr::new(MemBase::Reg(self.id), bytes)
    }
}

/// A constant with its class, as raw bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Imm {
    /// The class of the operand it stands for.
    pub class: RegClass,
    /// The bits, in the low end.
    pub bits: u64,
}

/// A source operand of a known type: a register or a constant.
#[derive(Clone, Copy, Debug)]
pub struct Operand<T: RegType> {
    pub(crate) arg: SourceArg,
    ty: PhantomData<T>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum SourceArg {
    Reg(RegId),
    Imm(u64),
}

impl<T: RegType> Operand<T> {
    const fn imm(bits: u64) -> Self {
        Operand { arg: SourceArg::Imm(bits), ty: PhantomData }
    }

    /// The constant's bits, if the operand is a constant.
    pub const fn constant(self) -> Option<u64> {
        match self.arg {
            SourceArg::Imm(bits) => Some(bits),
            SourceArg::Reg(_) => None,
        }
    }
}

impl<T: RegType> From<Operand<T>> for Arg {
    fn from(op: Operand<T>) -> Arg {
        match op.arg {
            SourceArg::Reg(id) => Arg::Reg(id),
            SourceArg::Imm(bits) => Arg::Imm(Imm { class: T::CLASS, bits }),
        }
    }
}

impl<T: RegType> From<Reg<T>> for Arg {
    fn from(reg: Reg<T>) -> Arg {
        Arg::Reg(reg.id)
    }
}

impl<T: RegType> From<Reg<T>> for Operand<T> {
    fn from(reg: Reg<T>) -> Self {
        Operand { arg: SourceArg::Reg(reg.id), ty: PhantomData }
    }
}

macro_rules! immediates {
    ($($class:ident: $($ty:ty as $bits:expr),*;)*) => {
        $($(impl From<$ty> for Operand<$class> {
            fn from(value: $ty) -> Self {
                let to_bits: fn($ty) -> u64 = $bits;
                Operand::imm(to_bits(value))
            }
        })*)*
    };
}

immediates! {
    Pred: bool as |v| u64::from(v);
    B16: u16 as |v| u64::from(v), i16 as |v| u64::from(v.cast_unsigned());
    B32: u32 as |v| u64::from(v), i32 as |v| u64::from(v.cast_unsigned());
    B64: u64 as |v| v, i64 as |v| v.cast_unsigned(),
        u32 as |v| u64::from(v), i32 as |v| i64::from(v).cast_unsigned();
    // A bare literal is an f64 to Rust; it is rounded to f32 here.
    F32: f32 as |v| u64::from(v.to_bits()), f64 as |v| u64::from((v as f32).to_bits());
}

/// A predicate, possibly negated: what an instruction or a branch is guarded by.
///
/// `!p` on a predicate register makes the negated guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    /// The predicate register.
    pub reg: Reg<Pred>,
    /// Whether the guard holds where the predicate is false.
    pub negated: bool,
}

impl From<Reg<Pred>> for Guard {
    fn from(reg: Reg<Pred>) -> Guard {
        Guard { reg, negated: false }
    }
}

impl Not for Reg<Pred> {
    type Output = Guard;
    fn not(self) -> Guard {
        Guard { reg: self, negated: true }
    }
}

impl Not for Guard {
    type Output = Guard;
    fn not(self) -> Guard {
        Guard { reg: self.reg, negated: !self.negated }
    }
}

/// A memory address: `Addr<B32>` for shared memory, `Addr<B64>` for global memory.
///
/// Made from a register (`r.into()`, `r.at(16)`) or, for shared memory, from an allocation
/// (`tile.into()`, `tile.at(16)`).
#[derive(Clone, Copy, Debug)]
pub struct Addr<W: RegType> {
    pub(crate) base: MemBase,
    pub(crate) offset: i32,
    width: PhantomData<W>,
}

impl<W: RegType> Addr<W> {
    pub(crate) const fn new(base: MemBase, offset: i32) -> Self {
        Addr { base, offset, width: PhantomData }
    }
}

impl<W: RegType> From<Reg<W>> for Addr<W> {
    fn from(reg: Reg<W>) -> Self {
        Addr::new(MemBase::Reg(reg.id), 0)
    }
}

impl From<Shared> for Addr<B32> {
    fn from(shared: Shared) -> Self {
        shared.at(0)
    }
}

impl<W: RegType> From<Addr<W>> for Arg {
    fn from(addr: Addr<W>) -> Arg {
        Arg::Mem { base: addr.base, offset: addr.offset }
    }
}
