//! The instruction table: one line per instruction, with the oldest PTX version and the oldest target that have it.
//!
//! The first half holds the plain instructions (registers in, one register out). A line gives the builder's
//! method, the variant of [`Alu`], the mnemonic, the operand types, and what it needs; the macro makes the enum,
//! the method and the look-ups from it. The second half holds the families, whose mnemonics have parameters:
//! a line gives the pattern of [`Op`], the syntax as the manual has it, and what it needs.
//!
//! Operand types: `Pred`, `B16`, `B32`, `B64`, `F32` take a register or a constant; `P`, `H`, `H2` take only a
//! register (predicate, half, pair of halves: PTX has no constants of these); `C` takes only a constant.
//!
//! Tests assemble every line with ptxas for each target from the one it names on, check that it is refused one version
//! and one target earlier, and require that every family line is reached.

use crate::builder::KernelBuilder;
use crate::inst::*;
use crate::modifiers::*;
use crate::types::*;

/// The operand kinds of the table's lines.
mod kind {
    use super::*;

    /// What a line's operand accepts, and the register class it has.
    pub trait Kind {
        type Class: RegType;
        type Operand: Into<Arg>;
        const REGISTER_ONLY: bool;
        const CONSTANT_ONLY: bool;
    }

    macro_rules! kinds {
        ($($kind:ty: $class:ident, $operand:ty, $reg:literal, $constant:literal;)*) => {
            $(impl Kind for $kind {
                type Class = $class;
                type Operand = $operand;
                const REGISTER_ONLY: bool = $reg;
                const CONSTANT_ONLY: bool = $constant;
            })*
        };
    }

    pub enum P {}
    pub enum H {}
    pub enum H2 {}
    pub enum C {}

    kinds! {
        Pred: Pred, Operand<Pred>, false, false;
        B16: B16, Operand<B16>, false, false;
        B32: B32, Operand<B32>, false, false;
        B64: B64, Operand<B64>, false, false;
        F32: F32, Operand<F32>, false, false;
        P: Pred, Reg<Pred>, true, false;
        H: B16, Reg<B16>, true, false;
        H2: B32, Reg<B32>, true, false;
        C: B32, Constant, false, true;
    }
}
use kind::{C, H, H2, Kind, P};

/// An operand that must be a constant, such as the truth table of `lop3`.
#[derive(Clone, Copy, Debug)]
pub struct Constant(u32);

impl From<u32> for Constant {
    fn from(value: u32) -> Self {
        Constant(value)
    }
}

impl From<Constant> for Arg {
    fn from(c: Constant) -> Arg {
        Arg::Imm(Imm { class: RegClass::B32, bits: u64::from(c.0) })
    }
}

/// One operand of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandSpec {
    /// Its register class.
    pub class: RegClass,
    /// Whether PTX takes only a register there.
    pub register_only: bool,
    /// Whether PTX takes only a constant there.
    pub constant_only: bool,
}

/// A line of the first half of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AluLine {
    /// The mnemonic with its modifiers.
    pub text: &'static str,
    /// The class of the result.
    pub dst: RegClass,
    /// The sources.
    pub src: &'static [OperandSpec],
    /// What it needs.
    pub needs: Needs,
}

macro_rules! alu_table {
    ($($(#[doc = $doc:literal])* $method:ident $variant:ident $text:literal
        $dst:ident = ($($arg:ident: $src:ident),*) $isa:ident $target:ident;)*) => {
        /// A plain instruction: registers in, one register out, each lane for itself.
        ///
        /// One variant per line of the table; [`Alu::line`] gives the line.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum Alu {
            $(#[doc = concat!("`", $text, "`")] $variant,)*
        }

        impl Alu {
            /// All plain instructions, in table order.
            pub const ALL: &'static [Alu] = &[$(Alu::$variant),*];

            /// The table's line.
            pub const fn line(self) -> &'static AluLine {
                const LINES: &[AluLine] = &[$(AluLine {
                    text: $text,
                    dst: <<$dst as Kind>::Class as RegType>::CLASS,
                    src: &[$(OperandSpec {
                        class: <<$src as Kind>::Class as RegType>::CLASS,
                        register_only: <$src as Kind>::REGISTER_ONLY,
                        constant_only: <$src as Kind>::CONSTANT_ONLY,
                    }),*],
                    needs: Needs { isa: IsaVersion::$isa, target: Target::$target },
                }),*];
                &LINES[self as usize]
            }
        }

        /// Plain instructions, one method per line of the table.
        impl KernelBuilder {
            $(#[doc = concat!("`", $text, "`", $(" ", $doc),*)]
            #[track_caller]
            pub fn $method(&mut self, $($arg: impl Into<<$src as Kind>::Operand>),*) -> Reg<<$dst as Kind>::Class> {
                let dst = self.reg();
                let src = vec![$(Into::<<$src as Kind>::Operand>::into($arg).into()),*];
                self.emit(Op::Alu(Alu::$variant), vec![dst.into()], src);
                dst
            })*
        }
    };
}

alu_table! {
    // Moves.
    mov_pred MovPred "mov.pred" Pred = (a: Pred) V7_0 Sm80;
    mov_b16 MovB16 "mov.b16" B16 = (a: B16) V7_0 Sm80;
    mov_b32 MovB32 "mov.b32" B32 = (a: B32) V7_0 Sm80;
    mov_b64 MovB64 "mov.b64" B64 = (a: B64) V7_0 Sm80;
    mov_f32 MovF32 "mov.f32" F32 = (a: F32) V7_0 Sm80;
    /// The bits of a float.
    f32_to_bits F32ToBits "mov.b32" B32 = (a: F32) V7_0 Sm80;
    /// The float of some bits.
    f32_from_bits F32FromBits "mov.b32" F32 = (a: B32) V7_0 Sm80;

    // 32-bit integers.
    add_u32 AddU32 "add.u32" B32 = (a: B32, b: B32) V7_0 Sm80;
    add_s32 AddS32 "add.s32" B32 = (a: B32, b: B32) V7_0 Sm80;
    sub_u32 SubU32 "sub.u32" B32 = (a: B32, b: B32) V7_0 Sm80;
    sub_s32 SubS32 "sub.s32" B32 = (a: B32, b: B32) V7_0 Sm80;
    mul_lo_u32 MulLoU32 "mul.lo.u32" B32 = (a: B32, b: B32) V7_0 Sm80;
    mul_lo_s32 MulLoS32 "mul.lo.s32" B32 = (a: B32, b: B32) V7_0 Sm80;
    mul_hi_u32 MulHiU32 "mul.hi.u32" B32 = (a: B32, b: B32) V7_0 Sm80;
    mul_hi_s32 MulHiS32 "mul.hi.s32" B32 = (a: B32, b: B32) V7_0 Sm80;
    mul_wide_u32 MulWideU32 "mul.wide.u32" B64 = (a: B32, b: B32) V7_0 Sm80;
    mul_wide_s32 MulWideS32 "mul.wide.s32" B64 = (a: B32, b: B32) V7_0 Sm80;
    mad_lo_u32 MadLoU32 "mad.lo.u32" B32 = (a: B32, b: B32, c: B32) V7_0 Sm80;
    mad_lo_s32 MadLoS32 "mad.lo.s32" B32 = (a: B32, b: B32, c: B32) V7_0 Sm80;
    mad_wide_u32 MadWideU32 "mad.wide.u32" B64 = (a: B32, b: B32, c: B64) V7_0 Sm80;
    mad_wide_s32 MadWideS32 "mad.wide.s32" B64 = (a: B32, b: B32, c: B64) V7_0 Sm80;
    div_u32 DivU32 "div.u32" B32 = (a: B32, b: B32) V7_0 Sm80;
    div_s32 DivS32 "div.s32" B32 = (a: B32, b: B32) V7_0 Sm80;
    rem_u32 RemU32 "rem.u32" B32 = (a: B32, b: B32) V7_0 Sm80;
    rem_s32 RemS32 "rem.s32" B32 = (a: B32, b: B32) V7_0 Sm80;
    min_u32 MinU32 "min.u32" B32 = (a: B32, b: B32) V7_0 Sm80;
    min_s32 MinS32 "min.s32" B32 = (a: B32, b: B32) V7_0 Sm80;
    max_u32 MaxU32 "max.u32" B32 = (a: B32, b: B32) V7_0 Sm80;
    max_s32 MaxS32 "max.s32" B32 = (a: B32, b: B32) V7_0 Sm80;
    neg_s32 NegS32 "neg.s32" B32 = (a: B32) V7_0 Sm80;
    abs_s32 AbsS32 "abs.s32" B32 = (a: B32) V7_0 Sm80;

    // 64-bit integers.
    add_u64 AddU64 "add.u64" B64 = (a: B64, b: B64) V7_0 Sm80;
    add_s64 AddS64 "add.s64" B64 = (a: B64, b: B64) V7_0 Sm80;
    sub_u64 SubU64 "sub.u64" B64 = (a: B64, b: B64) V7_0 Sm80;
    sub_s64 SubS64 "sub.s64" B64 = (a: B64, b: B64) V7_0 Sm80;
    mul_lo_u64 MulLoU64 "mul.lo.u64" B64 = (a: B64, b: B64) V7_0 Sm80;
    mul_lo_s64 MulLoS64 "mul.lo.s64" B64 = (a: B64, b: B64) V7_0 Sm80;
    mul_hi_u64 MulHiU64 "mul.hi.u64" B64 = (a: B64, b: B64) V7_0 Sm80;
    mad_lo_u64 MadLoU64 "mad.lo.u64" B64 = (a: B64, b: B64, c: B64) V7_0 Sm80;
    mad_lo_s64 MadLoS64 "mad.lo.s64" B64 = (a: B64, b: B64, c: B64) V7_0 Sm80;
    div_u64 DivU64 "div.u64" B64 = (a: B64, b: B64) V7_0 Sm80;
    rem_u64 RemU64 "rem.u64" B64 = (a: B64, b: B64) V7_0 Sm80;
    min_u64 MinU64 "min.u64" B64 = (a: B64, b: B64) V7_0 Sm80;
    min_s64 MinS64 "min.s64" B64 = (a: B64, b: B64) V7_0 Sm80;
    max_u64 MaxU64 "max.u64" B64 = (a: B64, b: B64) V7_0 Sm80;
    max_s64 MaxS64 "max.s64" B64 = (a: B64, b: B64) V7_0 Sm80;
    neg_s64 NegS64 "neg.s64" B64 = (a: B64) V7_0 Sm80;

    // Bits.
    and_b16 AndB16 "and.b16" B16 = (a: B16, b: B16) V7_0 Sm80;
    or_b16 OrB16 "or.b16" B16 = (a: B16, b: B16) V7_0 Sm80;
    xor_b16 XorB16 "xor.b16" B16 = (a: B16, b: B16) V7_0 Sm80;
    not_b16 NotB16 "not.b16" B16 = (a: B16) V7_0 Sm80;
    and_b32 AndB32 "and.b32" B32 = (a: B32, b: B32) V7_0 Sm80;
    or_b32 OrB32 "or.b32" B32 = (a: B32, b: B32) V7_0 Sm80;
    xor_b32 XorB32 "xor.b32" B32 = (a: B32, b: B32) V7_0 Sm80;
    not_b32 NotB32 "not.b32" B32 = (a: B32) V7_0 Sm80;
    and_b64 AndB64 "and.b64" B64 = (a: B64, b: B64) V7_0 Sm80;
    or_b64 OrB64 "or.b64" B64 = (a: B64, b: B64) V7_0 Sm80;
    xor_b64 XorB64 "xor.b64" B64 = (a: B64, b: B64) V7_0 Sm80;
    not_b64 NotB64 "not.b64" B64 = (a: B64) V7_0 Sm80;
    shl_b32 ShlB32 "shl.b32" B32 = (a: B32, bits: B32) V7_0 Sm80;
    shr_u32 ShrU32 "shr.u32" B32 = (a: B32, bits: B32) V7_0 Sm80;
    shr_s32 ShrS32 "shr.s32" B32 = (a: B32, bits: B32) V7_0 Sm80;
    shl_b64 ShlB64 "shl.b64" B64 = (a: B64, bits: B32) V7_0 Sm80;
    shr_u64 ShrU64 "shr.u64" B64 = (a: B64, bits: B32) V7_0 Sm80;
    shr_s64 ShrS64 "shr.s64" B64 = (a: B64, bits: B32) V7_0 Sm80;
    /// The upper word of `hi:lo` shifted left by `bits` modulo 32.
    shf_l_wrap_b32 ShfLWrapB32 "shf.l.wrap.b32" B32 = (lo: B32, hi: B32, bits: B32) V7_0 Sm80;
    /// The lower word of `hi:lo` shifted right by `bits` modulo 32.
    shf_r_wrap_b32 ShfRWrapB32 "shf.r.wrap.b32" B32 = (lo: B32, hi: B32, bits: B32) V7_0 Sm80;
    /// Any function of three bits, by its truth table: `f(0xf0, 0xcc, 0xaa)`.
    lop3_b32 Lop3B32 "lop3.b32" B32 = (a: B32, b: B32, c: B32, table: C) V7_0 Sm80;
    bfe_u32 BfeU32 "bfe.u32" B32 = (a: B32, start: B32, len: B32) V7_0 Sm80;
    bfe_s32 BfeS32 "bfe.s32" B32 = (a: B32, start: B32, len: B32) V7_0 Sm80;
    bfe_u64 BfeU64 "bfe.u64" B64 = (a: B64, start: B32, len: B32) V7_0 Sm80;
    /// Inserts the low bits of `a` into `b`.
    bfi_b32 BfiB32 "bfi.b32" B32 = (a: B32, b: B32, start: B32, len: B32) V7_0 Sm80;
    bfi_b64 BfiB64 "bfi.b64" B64 = (a: B64, b: B64, start: B32, len: B32) V7_0 Sm80;
    /// Picks four of the eight bytes `b:a`, one per nibble of the selector.
    prmt_b32 PrmtB32 "prmt.b32" B32 = (a: B32, b: B32, selector: B32) V7_0 Sm80;
    popc_b32 PopcB32 "popc.b32" B32 = (a: B32) V7_0 Sm80;
    clz_b32 ClzB32 "clz.b32" B32 = (a: B32) V7_0 Sm80;
    brev_b32 BrevB32 "brev.b32" B32 = (a: B32) V7_0 Sm80;
    /// The position of the highest set bit, or `0xffffffff`.
    bfind_u32 BfindU32 "bfind.u32" B32 = (a: B32) V7_0 Sm80;

    // Predicates and choices.
    and_pred AndPred "and.pred" Pred = (a: P, b: P) V7_0 Sm80;
    or_pred OrPred "or.pred" Pred = (a: P, b: P) V7_0 Sm80;
    xor_pred XorPred "xor.pred" Pred = (a: P, b: P) V7_0 Sm80;
    not_pred NotPred "not.pred" Pred = (a: P) V7_0 Sm80;
    /// `a` where the predicate holds, else `b`.
    selp_b16 SelpB16 "selp.b16" B16 = (a: B16, b: B16, p: P) V7_0 Sm80;
    /// `a` where the predicate holds, else `b`.
    selp_b32 SelpB32 "selp.b32" B32 = (a: B32, b: B32, p: P) V7_0 Sm80;
    /// `a` where the predicate holds, else `b`.
    selp_b64 SelpB64 "selp.b64" B64 = (a: B64, b: B64, p: P) V7_0 Sm80;
    /// `a` where the predicate holds, else `b`.
    selp_f32 SelpF32 "selp.f32" F32 = (a: F32, b: F32, p: P) V7_0 Sm80;
    /// `a` where `c` is not negative, else `b`.
    slct_b32_s32 SlctB32S32 "slct.b32.s32" B32 = (a: B32, b: B32, c: B32) V7_0 Sm80;
    /// `a` where `c` is not negative, else `b`.
    slct_f32_s32 SlctF32S32 "slct.f32.s32" F32 = (a: F32, b: F32, c: B32) V7_0 Sm80;

    // Single precision. Rounding is written out, so that ptxas does not contract a product and a sum to an fma
    // that the author did not write.
    add_f32 AddF32 "add.rn.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    add_ftz_f32 AddFtzF32 "add.rn.ftz.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    sub_f32 SubF32 "sub.rn.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    sub_ftz_f32 SubFtzF32 "sub.rn.ftz.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    mul_f32 MulF32 "mul.rn.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    mul_ftz_f32 MulFtzF32 "mul.rn.ftz.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    fma_f32 FmaF32 "fma.rn.f32" F32 = (a: F32, b: F32, c: F32) V7_0 Sm80;
    fma_ftz_f32 FmaFtzF32 "fma.rn.ftz.f32" F32 = (a: F32, b: F32, c: F32) V7_0 Sm80;
    min_f32 MinF32 "min.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    min_ftz_f32 MinFtzF32 "min.ftz.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    min_nan_f32 MinNanF32 "min.NaN.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    max_f32 MaxF32 "max.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    max_ftz_f32 MaxFtzF32 "max.ftz.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    max_nan_f32 MaxNanF32 "max.NaN.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    neg_f32 NegF32 "neg.f32" F32 = (a: F32) V7_0 Sm80;
    abs_f32 AbsF32 "abs.f32" F32 = (a: F32) V7_0 Sm80;
    copysign_f32 CopysignF32 "copysign.f32" F32 = (sign: F32, magnitude: F32) V7_0 Sm80;
    div_f32 DivF32 "div.rn.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    div_full_f32 DivFullF32 "div.full.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    div_approx_f32 DivApproxF32 "div.approx.f32" F32 = (a: F32, b: F32) V7_0 Sm80;
    rcp_f32 RcpF32 "rcp.rn.f32" F32 = (a: F32) V7_0 Sm80;
    rcp_approx_f32 RcpApproxF32 "rcp.approx.f32" F32 = (a: F32) V7_0 Sm80;
    rcp_approx_ftz_f32 RcpApproxFtzF32 "rcp.approx.ftz.f32" F32 = (a: F32) V7_0 Sm80;
    sqrt_f32 SqrtF32 "sqrt.rn.f32" F32 = (a: F32) V7_0 Sm80;
    sqrt_approx_f32 SqrtApproxF32 "sqrt.approx.f32" F32 = (a: F32) V7_0 Sm80;
    sqrt_approx_ftz_f32 SqrtApproxFtzF32 "sqrt.approx.ftz.f32" F32 = (a: F32) V7_0 Sm80;
    rsqrt_approx_f32 RsqrtApproxF32 "rsqrt.approx.f32" F32 = (a: F32) V7_0 Sm80;
    rsqrt_approx_ftz_f32 RsqrtApproxFtzF32 "rsqrt.approx.ftz.f32" F32 = (a: F32) V7_0 Sm80;
    ex2_approx_f32 Ex2ApproxF32 "ex2.approx.f32" F32 = (a: F32) V7_0 Sm80;
    ex2_approx_ftz_f32 Ex2ApproxFtzF32 "ex2.approx.ftz.f32" F32 = (a: F32) V7_0 Sm80;
    lg2_approx_f32 Lg2ApproxF32 "lg2.approx.f32" F32 = (a: F32) V7_0 Sm80;
    lg2_approx_ftz_f32 Lg2ApproxFtzF32 "lg2.approx.ftz.f32" F32 = (a: F32) V7_0 Sm80;
    sin_approx_f32 SinApproxF32 "sin.approx.f32" F32 = (a: F32) V7_0 Sm80;
    cos_approx_f32 CosApproxF32 "cos.approx.f32" F32 = (a: F32) V7_0 Sm80;
    tanh_approx_f32 TanhApproxF32 "tanh.approx.f32" F32 = (a: F32) V7_0 Sm80;

    // Half precision, one per register.
    add_f16 AddF16 "add.rn.f16" B16 = (a: H, b: H) V7_0 Sm80;
    sub_f16 SubF16 "sub.rn.f16" B16 = (a: H, b: H) V7_0 Sm80;
    mul_f16 MulF16 "mul.rn.f16" B16 = (a: H, b: H) V7_0 Sm80;
    fma_f16 FmaF16 "fma.rn.f16" B16 = (a: H, b: H, c: H) V7_0 Sm80;
    min_f16 MinF16 "min.f16" B16 = (a: H, b: H) V7_0 Sm80;
    max_f16 MaxF16 "max.f16" B16 = (a: H, b: H) V7_0 Sm80;
    neg_f16 NegF16 "neg.f16" B16 = (a: H) V7_0 Sm80;
    abs_f16 AbsF16 "abs.f16" B16 = (a: H) V7_0 Sm80;
    ex2_approx_f16 Ex2ApproxF16 "ex2.approx.f16" B16 = (a: H) V7_0 Sm80;
    tanh_approx_f16 TanhApproxF16 "tanh.approx.f16" B16 = (a: H) V7_0 Sm80;
    fma_bf16 FmaBf16 "fma.rn.bf16" B16 = (a: H, b: H, c: H) V7_0 Sm80;
    min_bf16 MinBf16 "min.bf16" B16 = (a: H, b: H) V7_0 Sm80;
    max_bf16 MaxBf16 "max.bf16" B16 = (a: H, b: H) V7_0 Sm80;
    neg_bf16 NegBf16 "neg.bf16" B16 = (a: H) V7_0 Sm80;
    abs_bf16 AbsBf16 "abs.bf16" B16 = (a: H) V7_0 Sm80;
    add_bf16 AddBf16 "add.rn.bf16" B16 = (a: H, b: H) V7_8 Sm90;
    sub_bf16 SubBf16 "sub.rn.bf16" B16 = (a: H, b: H) V7_8 Sm90;
    mul_bf16 MulBf16 "mul.rn.bf16" B16 = (a: H, b: H) V7_8 Sm90;

    // Pairs of halves.
    add_f16x2 AddF16x2 "add.rn.f16x2" B32 = (a: H2, b: H2) V7_0 Sm80;
    sub_f16x2 SubF16x2 "sub.rn.f16x2" B32 = (a: H2, b: H2) V7_0 Sm80;
    mul_f16x2 MulF16x2 "mul.rn.f16x2" B32 = (a: H2, b: H2) V7_0 Sm80;
    fma_f16x2 FmaF16x2 "fma.rn.f16x2" B32 = (a: H2, b: H2, c: H2) V7_0 Sm80;
    min_f16x2 MinF16x2 "min.f16x2" B32 = (a: H2, b: H2) V7_0 Sm80;
    max_f16x2 MaxF16x2 "max.f16x2" B32 = (a: H2, b: H2) V7_0 Sm80;
    neg_f16x2 NegF16x2 "neg.f16x2" B32 = (a: H2) V7_0 Sm80;
    abs_f16x2 AbsF16x2 "abs.f16x2" B32 = (a: H2) V7_0 Sm80;
    ex2_approx_f16x2 Ex2ApproxF16x2 "ex2.approx.f16x2" B32 = (a: H2) V7_0 Sm80;
    tanh_approx_f16x2 TanhApproxF16x2 "tanh.approx.f16x2" B32 = (a: H2) V7_0 Sm80;
    fma_bf16x2 FmaBf16x2 "fma.rn.bf16x2" B32 = (a: H2, b: H2, c: H2) V7_0 Sm80;
    min_bf16x2 MinBf16x2 "min.bf16x2" B32 = (a: H2, b: H2) V7_0 Sm80;
    max_bf16x2 MaxBf16x2 "max.bf16x2" B32 = (a: H2, b: H2) V7_0 Sm80;
    neg_bf16x2 NegBf16x2 "neg.bf16x2" B32 = (a: H2) V7_0 Sm80;
    abs_bf16x2 AbsBf16x2 "abs.bf16x2" B32 = (a: H2) V7_0 Sm80;
    add_bf16x2 AddBf16x2 "add.rn.bf16x2" B32 = (a: H2, b: H2) V7_8 Sm90;
    sub_bf16x2 SubBf16x2 "sub.rn.bf16x2" B32 = (a: H2, b: H2) V7_8 Sm90;
    mul_bf16x2 MulBf16x2 "mul.rn.bf16x2" B32 = (a: H2, b: H2) V7_8 Sm90;
    ex2_approx_ftz_bf16x2 Ex2ApproxFtzBf16x2 "ex2.approx.ftz.bf16x2" B32 = (a: H2) V7_8 Sm90;
    tanh_approx_bf16x2 TanhApproxBf16x2 "tanh.approx.bf16x2" B32 = (a: H2) V7_8 Sm90;

    // Conversions between floats. In a pair the first operand goes to the upper half.
    cvt_rn_f16_f32 CvtRnF16F32 "cvt.rn.f16.f32" B16 = (a: F32) V7_0 Sm80;
    cvt_rz_f16_f32 CvtRzF16F32 "cvt.rz.f16.f32" B16 = (a: F32) V7_0 Sm80;
    cvt_rn_bf16_f32 CvtRnBf16F32 "cvt.rn.bf16.f32" B16 = (a: F32) V7_0 Sm80;
    cvt_rz_bf16_f32 CvtRzBf16F32 "cvt.rz.bf16.f32" B16 = (a: F32) V7_0 Sm80;
    cvt_f32_f16 CvtF32F16 "cvt.f32.f16" F32 = (a: H) V7_0 Sm80;
    cvt_f32_bf16 CvtF32Bf16 "cvt.f32.bf16" F32 = (a: H) V7_1 Sm80;
    cvt_rn_f16x2_f32 CvtRnF16x2F32 "cvt.rn.f16x2.f32" B32 = (hi: F32, lo: F32) V7_0 Sm80;
    cvt_rz_f16x2_f32 CvtRzF16x2F32 "cvt.rz.f16x2.f32" B32 = (hi: F32, lo: F32) V7_0 Sm80;
    cvt_rn_relu_f16x2_f32 CvtRnReluF16x2F32 "cvt.rn.relu.f16x2.f32" B32 = (hi: F32, lo: F32) V7_0 Sm80;
    cvt_rn_bf16x2_f32 CvtRnBf16x2F32 "cvt.rn.bf16x2.f32" B32 = (hi: F32, lo: F32) V7_0 Sm80;
    cvt_rz_bf16x2_f32 CvtRzBf16x2F32 "cvt.rz.bf16x2.f32" B32 = (hi: F32, lo: F32) V7_0 Sm80;
    cvt_rn_relu_bf16x2_f32 CvtRnReluBf16x2F32 "cvt.rn.relu.bf16x2.f32" B32 = (hi: F32, lo: F32) V7_0 Sm80;
    cvt_rn_satfinite_e4m3x2_f32 CvtRnSatfiniteE4m3x2F32 "cvt.rn.satfinite.e4m3x2.f32" B16 = (hi: F32, lo: F32) V8_1 Sm89;
    cvt_rn_satfinite_e5m2x2_f32 CvtRnSatfiniteE5m2x2F32 "cvt.rn.satfinite.e5m2x2.f32" B16 = (hi: F32, lo: F32) V8_1 Sm89;
    cvt_rn_satfinite_e4m3x2_f16x2 CvtRnSatfiniteE4m3x2F16x2 "cvt.rn.satfinite.e4m3x2.f16x2" B16 = (a: H2) V8_1 Sm89;
    cvt_rn_satfinite_e5m2x2_f16x2 CvtRnSatfiniteE5m2x2F16x2 "cvt.rn.satfinite.e5m2x2.f16x2" B16 = (a: H2) V8_1 Sm89;
    cvt_rn_f16x2_e4m3x2 CvtRnF16x2E4m3x2 "cvt.rn.f16x2.e4m3x2" B32 = (a: H) V8_1 Sm89;
    cvt_rn_f16x2_e5m2x2 CvtRnF16x2E5m2x2 "cvt.rn.f16x2.e5m2x2" B32 = (a: H) V8_1 Sm89;
    /// To the nearest integer, ties to even.
    cvt_rni_f32_f32 CvtRniF32F32 "cvt.rni.f32.f32" F32 = (a: F32) V7_0 Sm80;
    cvt_rzi_f32_f32 CvtRziF32F32 "cvt.rzi.f32.f32" F32 = (a: F32) V7_0 Sm80;
    cvt_rmi_f32_f32 CvtRmiF32F32 "cvt.rmi.f32.f32" F32 = (a: F32) V7_0 Sm80;
    cvt_rpi_f32_f32 CvtRpiF32F32 "cvt.rpi.f32.f32" F32 = (a: F32) V7_0 Sm80;
    /// Clamped to 0..1, NaN to 0.
    cvt_sat_f32_f32 CvtSatF32F32 "cvt.sat.f32.f32" F32 = (a: F32) V7_0 Sm80;

    // Conversions between integers and floats.
    cvt_rn_f32_s32 CvtRnF32S32 "cvt.rn.f32.s32" F32 = (a: B32) V7_0 Sm80;
    cvt_rn_f32_u32 CvtRnF32U32 "cvt.rn.f32.u32" F32 = (a: B32) V7_0 Sm80;
    cvt_rn_f32_s64 CvtRnF32S64 "cvt.rn.f32.s64" F32 = (a: B64) V7_0 Sm80;
    cvt_rn_f32_u64 CvtRnF32U64 "cvt.rn.f32.u64" F32 = (a: B64) V7_0 Sm80;
    cvt_rn_f16_s32 CvtRnF16S32 "cvt.rn.f16.s32" B16 = (a: B32) V7_0 Sm80;
    cvt_rn_f16_u32 CvtRnF16U32 "cvt.rn.f16.u32" B16 = (a: B32) V7_0 Sm80;
    cvt_rni_s32_f32 CvtRniS32F32 "cvt.rni.s32.f32" B32 = (a: F32) V7_0 Sm80;
    cvt_rzi_s32_f32 CvtRziS32F32 "cvt.rzi.s32.f32" B32 = (a: F32) V7_0 Sm80;
    cvt_rmi_s32_f32 CvtRmiS32F32 "cvt.rmi.s32.f32" B32 = (a: F32) V7_0 Sm80;
    cvt_rpi_s32_f32 CvtRpiS32F32 "cvt.rpi.s32.f32" B32 = (a: F32) V7_0 Sm80;
    cvt_rni_u32_f32 CvtRniU32F32 "cvt.rni.u32.f32" B32 = (a: F32) V7_0 Sm80;
    cvt_rzi_u32_f32 CvtRziU32F32 "cvt.rzi.u32.f32" B32 = (a: F32) V7_0 Sm80;

    // Conversions between integers.
    cvt_u64_u32 CvtU64U32 "cvt.u64.u32" B64 = (a: B32) V7_0 Sm80;
    cvt_s64_s32 CvtS64S32 "cvt.s64.s32" B64 = (a: B32) V7_0 Sm80;
    cvt_u32_u64 CvtU32U64 "cvt.u32.u64" B32 = (a: B64) V7_0 Sm80;
    cvt_u16_u32 CvtU16U32 "cvt.u16.u32" B16 = (a: B32) V7_0 Sm80;
    cvt_u32_u16 CvtU32U16 "cvt.u32.u16" B32 = (a: B16) V7_0 Sm80;
    cvt_s32_s16 CvtS32S16 "cvt.s32.s16" B32 = (a: B16) V7_0 Sm80;
    cvt_sat_s32_s64 CvtSatS32S64 "cvt.sat.s32.s64" B32 = (a: B64) V7_0 Sm80;
}

macro_rules! setp_table {
    ($($method:ident $cmp:ident $ty:ident $src:ident;)*) => {
        /// Comparisons, one method per line of the table.
        impl KernelBuilder {
            $(#[doc = concat!("`setp`, comparing as ", stringify!($cmp), " ", stringify!($ty))]
            #[track_caller]
            pub fn $method(&mut self, a: impl Into<Operand<$src>>, b: impl Into<Operand<$src>>) -> Reg<Pred> {
                let dst = self.reg();
                self.emit(
                    Op::Setp { cmp: Cmp::$cmp, ty: NumType::$ty },
                    vec![dst.into()],
                    vec![a.into().into(), b.into().into()],
                );
                dst
            })*
        }

        /// Every comparison of the table.
        pub const COMPARISONS: &[(Cmp, NumType)] = &[$((Cmp::$cmp, NumType::$ty)),*];
    };
}

setp_table! {
    setp_eq_u16 Eq U16 B16;
    setp_ne_u16 Ne U16 B16;
    setp_lt_u16 Lt U16 B16;
    setp_le_u16 Le U16 B16;
    setp_gt_u16 Gt U16 B16;
    setp_ge_u16 Ge U16 B16;
    setp_eq_s16 Eq S16 B16;
    setp_ne_s16 Ne S16 B16;
    setp_lt_s16 Lt S16 B16;
    setp_le_s16 Le S16 B16;
    setp_gt_s16 Gt S16 B16;
    setp_ge_s16 Ge S16 B16;
    setp_eq_u32 Eq U32 B32;
    setp_ne_u32 Ne U32 B32;
    setp_lt_u32 Lt U32 B32;
    setp_le_u32 Le U32 B32;
    setp_gt_u32 Gt U32 B32;
    setp_ge_u32 Ge U32 B32;
    setp_eq_s32 Eq S32 B32;
    setp_ne_s32 Ne S32 B32;
    setp_lt_s32 Lt S32 B32;
    setp_le_s32 Le S32 B32;
    setp_gt_s32 Gt S32 B32;
    setp_ge_s32 Ge S32 B32;
    setp_eq_u64 Eq U64 B64;
    setp_ne_u64 Ne U64 B64;
    setp_lt_u64 Lt U64 B64;
    setp_le_u64 Le U64 B64;
    setp_gt_u64 Gt U64 B64;
    setp_ge_u64 Ge U64 B64;
    setp_eq_s64 Eq S64 B64;
    setp_ne_s64 Ne S64 B64;
    setp_lt_s64 Lt S64 B64;
    setp_le_s64 Le S64 B64;
    setp_gt_s64 Gt S64 B64;
    setp_ge_s64 Ge S64 B64;
    setp_eq_f32 Eq F32 F32;
    setp_ne_f32 Ne F32 F32;
    setp_lt_f32 Lt F32 F32;
    setp_le_f32 Le F32 F32;
    setp_gt_f32 Gt F32 F32;
    setp_ge_f32 Ge F32 F32;
    setp_equ_f32 Equ F32 F32;
    setp_neu_f32 Neu F32 F32;
    setp_ltu_f32 Ltu F32 F32;
    setp_leu_f32 Leu F32 F32;
    setp_gtu_f32 Gtu F32 F32;
    setp_geu_f32 Geu F32 F32;
    setp_num_f32 Num F32 F32;
    setp_nan_f32 Nan F32 F32;
}

/// A line of the second half of the table: one family of instructions, or that part of it with the same needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FamilyLine {
    /// The syntax as the manual has it.
    pub syntax: &'static str,
    /// What it needs.
    pub needs: Needs,
}

macro_rules! family_table {
    ($($pattern:pat $(if $guard:expr)? => $syntax:literal $isa:ident $target:ident;)*) => {
        /// The lines of the families, in table order.
        pub const FAMILIES: &[FamilyLine] = &[$(FamilyLine {
            syntax: $syntax,
            needs: Needs { isa: IsaVersion::$isa, target: Target::$target },
        }),*];

        impl Op {
            /// What the instruction needs, from the table.
            pub fn needs(&self) -> Needs {
                match self {
                    Op::Alu(alu) => alu.line().needs,
                    $($pattern $(if $guard)? => Needs { isa: IsaVersion::$isa, target: Target::$target },)*
                }
            }

            /// The syntax line of the table: for an [`Alu`] its mnemonic.
            pub fn syntax(&self) -> &'static str {
                match self {
                    Op::Alu(alu) => alu.line().text,
                    $($pattern $(if $guard)? => $syntax,)*
                }
            }
        }
    };
}

family_table! {
    // Registers only.
    Op::Setp { .. } => "setp.cmp.type p, a, b" V7_0 Sm80;
    Op::MovSpecial(s) if s.needs_cluster() => "mov.u32 d, %cluster*" V7_8 Sm90;
    Op::MovSpecial(Special::Clock64 | Special::GlobalTimer) => "mov.u64 d, %special" V7_0 Sm80;
    Op::MovSpecial(_) => "mov.u32 d, %special" V7_0 Sm80;
    Op::PackB64 => "mov.b64 d, {lo, hi}" V7_0 Sm80;
    Op::UnpackB64 => "mov.b64 {lo, hi}, a" V7_0 Sm80;
    Op::PackB32 => "mov.b32 d, {lo, hi}" V7_0 Sm80;
    Op::UnpackB32 => "mov.b32 {lo, hi}, a" V7_0 Sm80;
    Op::AddrOf => "mov.{u32,u64} d, symbol+offset" V7_0 Sm80;
    Op::Cvta { space: Space::Param, .. } => "cvta{.to}.param.u64 d, a" V7_7 Sm80;
    Op::Cvta { space: Space::SharedCluster, .. } => "cvta{.to}.shared::cluster.u64 d, a" V7_8 Sm90;
    Op::Cvta { .. } => "cvta{.to}.space.u64 d, a" V7_0 Sm80;
    Op::CreatePolicy(_) => "createpolicy.fractional.L2::evict.b64 d, 1.0" V7_4 Sm80;

    // Control.
    Op::Label(_) => "label:" V7_0 Sm80;
    Op::Bra { .. } => "{@p} bra label" V7_0 Sm80;
    Op::Exit => "exit" V7_0 Sm80;
    Op::Ret => "ret" V7_0 Sm80;
    Op::Trap => "trap" V7_0 Sm80;

    // Plain memory.
    Op::Ld { space: Space::SharedCluster, .. } => "ld.shared::cluster{.vec}.type d, [a]" V7_8 Sm90;
    Op::Ld { order: Order::Relaxed(Scope::Cluster) | Order::Acquire(Scope::Cluster), .. }
        => "ld.{relaxed,acquire}.cluster.space{.vec}.type d, [a]" V7_8 Sm90;
    Op::Ld { cache: CacheHint { l1: None, l2_prefetch: None, policy: false, .. }, .. }
        => "ld{.order}.space{.cop}{.nc}{.vec}.type d, [a]" V7_0 Sm80;
    Op::Ld { .. } => "ld.global{.cop}{.nc}{.L1::evict}{.L2::cache_hint}{.L2::prefetch}{.vec}.type d, [a]{, policy}" V7_4 Sm80;
    Op::St { space: Space::SharedCluster, .. } => "st.shared::cluster{.vec}.type [a], b" V7_8 Sm90;
    Op::St { order: Order::Relaxed(Scope::Cluster) | Order::Release(Scope::Cluster), .. }
        => "st.{relaxed,release}.cluster.space{.vec}.type [a], b" V7_8 Sm90;
    Op::St { cache: CacheHint { l1: None, policy: false, .. }, .. }
        => "st{.order}.space{.cop}{.vec}.type [a], b" V7_0 Sm80;
    Op::St { .. } => "st.global{.cop}{.L1::evict}{.L2::cache_hint}{.vec}.type [a], b{, policy}" V7_4 Sm80;
    Op::Prefetch(_) => "prefetch.global.level [a]" V7_0 Sm80;
    Op::Atom { space: Space::SharedCluster, .. } => "atom.sem.scope.shared::cluster.op.type d, [a], b{, c}" V7_8 Sm90;
    Op::Atom { scope: Scope::Cluster, .. } => "atom.sem.cluster.space.op.type d, [a], b{, c}" V7_8 Sm90;
    Op::Atom { ty: AtomTy::Bf16 | AtomTy::Bf16x2, .. } => "atom.sem.scope.global.add.noftz.bf16{x2} d, [a], b" V7_8 Sm90;
    Op::Atom { .. } => "atom.sem.scope.space.op.type d, [a], b{, c}" V7_0 Sm80;
    Op::Red { width: Width::V2 | Width::V4, .. } => "red.sem.scope.global.add.vec.f32 [a], b" V8_1 Sm90;
    Op::Red { space: Space::SharedCluster, .. } => "red.sem.scope.shared::cluster.op.type [a], b" V7_8 Sm90;
    Op::Red { scope: Scope::Cluster, .. } => "red.sem.cluster.space.op.type [a], b" V7_8 Sm90;
    Op::Red { ty: AtomTy::Bf16 | AtomTy::Bf16x2, .. } => "red.sem.scope.global.add.noftz.bf16{x2} [a], b" V7_8 Sm90;
    Op::Red { .. } => "red.sem.scope.space.op.type [a], b" V7_0 Sm80;

    // Between the lanes of a warp.
    Op::Shfl(_) => "shfl.sync.mode.b32 d|p, a, b, c, mask" V7_0 Sm80;
    Op::Vote(_) => "vote.sync.mode.pred p, a, mask" V7_0 Sm80;
    Op::Ballot => "vote.sync.ballot.b32 d, a, mask" V7_0 Sm80;
    Op::Match(_) => "match.{any,all}.sync.b32 d, a, mask" V7_0 Sm80;
    Op::Redux { .. } => "redux.sync.op.type d, a, mask" V7_0 Sm80;
    Op::Elect => "elect.sync d|p, mask" V8_0 Sm90;
    Op::ActiveMask => "activemask.b32 d" V7_0 Sm80;
    Op::BarWarpSync => "bar.warp.sync mask" V7_0 Sm80;

    // Block barriers and fences.
    Op::BarSync { .. } => "{bar,barrier}.sync id{, threads}" V7_0 Sm80;
    Op::BarArrive { .. } => "{bar,barrier}.arrive id, threads" V7_0 Sm80;
    Op::Membar(_) => "membar.level" V7_0 Sm80;
    Op::Fence { scope: Scope::Cluster, .. } => "fence.sem.cluster" V7_8 Sm90;
    Op::Fence { .. } => "fence.sem.scope" V7_0 Sm80;
    Op::FenceProxyAsync(_) => "fence.proxy.async{.space}" V8_0 Sm90;
    Op::FenceMbarrierInit => "fence.mbarrier_init.release.cluster" V8_0 Sm90;

    // Asynchronous copies of a lane.
    Op::CpAsync { l2_prefetch: None, policy: false, .. }
        => "cp.async.{ca,cg}.shared.global [d], [a], bytes{, src-size}" V7_0 Sm80;
    Op::CpAsync { .. } => "cp.async.{ca,cg}.shared.global{.L2::cache_hint}{.L2::prefetch} [d], [a], bytes{, src-size}{, policy}" V7_4 Sm80;
    Op::CpAsyncCommit => "cp.async.commit_group" V7_0 Sm80;
    Op::CpAsyncWait(_) => "cp.async.wait_group n" V7_0 Sm80;
    Op::CpAsyncWaitAll => "cp.async.wait_all" V7_0 Sm80;
    Op::CpAsyncMbarrierArrive { .. } => "cp.async.mbarrier.arrive{.noinc}.shared.b64 [bar]" V7_0 Sm80;

    // Matrix fragments and tensor cores of a warp.
    Op::Ldmatrix { .. } => "ldmatrix.sync.aligned.m8n8.count{.trans}.shared.b16 {d}, [a]" V7_0 Sm80;
    Op::Stmatrix { .. } => "stmatrix.sync.aligned.m8n8.count{.trans}.shared.b16 [a], {b}" V7_8 Sm90;
    Op::Mma { shape: MmaShape::M16n8k32, acc: AccTy::F16, .. }
        => "mma.sync.aligned.m16n8k32.row.col.f16.{e4m3,e5m2}.{e4m3,e5m2}.f16 {d}, {a}, {b}, {c}" V8_7 Sm89;
    Op::Mma { shape: MmaShape::M16n8k32, .. }
        => "mma.sync.aligned.m16n8k32.row.col.f32.{e4m3,e5m2}.{e4m3,e5m2}.f32 {d}, {a}, {b}, {c}" V8_4 Sm89;
    Op::Mma { .. } => "mma.sync.aligned.{m16n8k8,m16n8k16}.row.col.acc.{f16,bf16}.{f16,bf16}.acc {d}, {a}, {b}, {c}" V7_0 Sm80;

    // mbarrier.
    Op::MbarrierInit => "mbarrier.init.shared.b64 [a], count" V7_0 Sm80;
    Op::MbarrierInval => "mbarrier.inval.shared.b64 [a]" V7_0 Sm80;
    Op::MbarrierArrive { space: Space::SharedCluster, .. }
        => "mbarrier.arrive{.release.cluster}.shared::cluster.b64 _, [a]{, count}" V8_0 Sm90;
    Op::MbarrierArrive { count: true, .. } => "mbarrier.arrive.shared.b64 d, [a], count" V7_8 Sm90;
    Op::MbarrierArrive { .. } => "mbarrier.arrive.shared.b64 {d, _}, [a]" V7_1 Sm80;
    Op::MbarrierArriveExpectTx { .. } => "mbarrier.arrive.expect_tx{.release.cluster}.space.b64 d, [a], bytes" V8_0 Sm90;
    Op::MbarrierExpectTx { .. } => "mbarrier.expect_tx.relaxed.scope.space.b64 [a], bytes" V8_0 Sm90;
    Op::MbarrierTestWait { scope: Scope::Cluster, .. } => "mbarrier.test_wait{.parity}.acquire.cluster.shared::cta.b64 p, [a], b" V8_0 Sm90;
    Op::MbarrierTestWait { parity: true, .. } => "mbarrier.test_wait.parity.shared.b64 p, [a], parity" V7_1 Sm80;
    Op::MbarrierTestWait { .. } => "mbarrier.test_wait.shared.b64 p, [a], state" V7_0 Sm80;
    Op::MbarrierTryWait { scope: Scope::Cluster, .. } => "mbarrier.try_wait{.parity}.acquire.cluster.shared::cta.b64 p, [a], b{, ns}" V8_0 Sm90;
    Op::MbarrierTryWait { .. } => "mbarrier.try_wait{.parity}.shared.b64 p, [a], b{, ns}" V7_8 Sm90;

    // Bulk copies.
    Op::BulkLoad { .. } => "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{.multicast::cluster}{.L2::cache_hint} [d], [a], bytes, [bar]{, mask}{, policy}" V8_0 Sm90;
    Op::BulkStore { .. } => "cp.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint} [d], [a], bytes{, policy}" V8_0 Sm90;
    Op::BulkToCluster => "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [a], bytes, [bar]" V8_0 Sm90;
    Op::BulkPrefetch { .. } => "cp.async.bulk.prefetch.L2.global{.L2::cache_hint} [a], bytes{, policy}" V8_0 Sm90;
    Op::BulkReduce { .. } => "cp.reduce.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}.op{.noftz}.type [d], [a], bytes{, policy}" V8_0 Sm90;
    Op::BulkReduceCluster { .. } => "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.op.type [d], [a], bytes, [bar]" V8_0 Sm90;
    Op::TensorLoad { .. } => "cp.async.bulk.tensor.dim.shared::cluster.global.tile.mbarrier::complete_tx::bytes{.multicast::cluster}{.L2::cache_hint} [d], [map, {c}], [bar]{, mask}{, policy}" V8_0 Sm90;
    Op::TensorStore { .. } => "cp.async.bulk.tensor.dim.global.shared::cta.tile.bulk_group{.L2::cache_hint} [map, {c}], [a]{, policy}" V8_0 Sm90;
    Op::TensorReduce { .. } => "cp.reduce.async.bulk.tensor.dim.global.shared::cta.op.tile.bulk_group{.L2::cache_hint} [map, {c}], [a]{, policy}" V8_0 Sm90;
    Op::TensorPrefetch { .. } => "cp.async.bulk.prefetch.tensor.dim.L2.global.tile{.L2::cache_hint} [map, {c}]{, policy}" V8_0 Sm90;
    Op::BulkCommit => "cp.async.bulk.commit_group" V8_0 Sm90;
    Op::BulkWait { .. } => "cp.async.bulk.wait_group{.read} n" V8_0 Sm90;
    Op::PrefetchTensormap => "prefetch.tensormap [a]" V8_0 Sm90;

    // Tensor cores of a warpgroup.
    Op::Wgmma(_) => "wgmma.mma_async.sync.aligned.m64nNk{16,32}.acc.a.b {d}, {a | desc-a}, desc-b, scale-d, scale-a, scale-b{, trans-a}{, trans-b}" V8_0 Sm90a;
    Op::WgmmaFence => "wgmma.fence.sync.aligned" V8_0 Sm90a;
    Op::WgmmaCommit => "wgmma.commit_group.sync.aligned" V8_0 Sm90a;
    Op::WgmmaWait(_) => "wgmma.wait_group.sync.aligned n" V8_0 Sm90a;
    Op::SetMaxNReg { .. } => "setmaxnreg.{inc,dec}.sync.aligned.u32 n" V8_0 Sm90a;

    // Clusters.
    Op::Mapa => "mapa.shared::cluster.u32 d, a, rank" V7_8 Sm90;
    Op::GetCtaRank => "getctarank.shared::cluster.u32 d, a" V7_8 Sm90;
    Op::ClusterArrive { .. } => "barrier.cluster.arrive{.sem}{.aligned}" V8_0 Sm90;
    Op::ClusterWait { .. } => "barrier.cluster.wait{.acquire}{.aligned}" V8_0 Sm90;
    Op::StAsync { .. } => "st.async.shared::cluster.mbarrier::complete_tx::bytes{.vec}.type [a], b, [bar]" V8_1 Sm90;

    // The rest.
    Op::GridDepControl(_) => "griddepcontrol.{launch_dependents,wait}" V7_8 Sm90;
    Op::Nanosleep => "nanosleep.u32 t" V7_0 Sm80;
}

impl Op {
    /// The oldest PTX version that has the instruction on a target.
    pub fn isa(&self, target: Target) -> IsaVersion {
        match self {
            // Hopper had these before Ada.
            Op::Alu(
                Alu::CvtRnSatfiniteE4m3x2F32
                | Alu::CvtRnSatfiniteE5m2x2F32
                | Alu::CvtRnSatfiniteE4m3x2F16x2
                | Alu::CvtRnSatfiniteE5m2x2F16x2
                | Alu::CvtRnF16x2E4m3x2
                | Alu::CvtRnF16x2E5m2x2,
            ) if target >= Target::Sm90 => IsaVersion::V7_8,
            _ => self.needs().isa,
        }
    }
}
