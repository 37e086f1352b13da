//! The plain instructions: registers in, one register out, each lane for itself.
//!
//! A whole warp is computed at once by loops over the 32 lanes that the compiler turns into vector code. The
//! loops are compiled for the baseline, for AVX2 with FMA and for AVX-512; the best that the processor has is
//! chosen at run time. All give the same bits.

use flashcore_ptx::{Alu, Cmp, NumType};

use crate::machine::regs::{Regs, Row, Row64};
use crate::numerics as num;

/// A decoded plain instruction: its operands are rows.
#[derive(Clone, Copy, Debug)]
pub struct AluInst {
    /// What it does.
    pub alu: Alu,
    /// The destination.
    pub d: u32,
    /// The sources, as many as it has.
    pub s: [u32; 4],
}

/// A decoded comparison.
#[derive(Clone, Copy, Debug)]
pub struct SetpInst {
    /// The comparison.
    pub cmp: Cmp,
    /// How the sources are read.
    pub ty: NumType,
    /// The destination predicate.
    pub d: u32,
    /// The first source.
    pub a: u32,
    /// The second source.
    pub b: u32,
}

/// Executes a plain instruction in the lanes of the mask.
#[inline(always)]
pub fn execute(regs: &mut Regs, inst: &AluInst, mask: u32) {
    use Alu::*;
    let AluInst { alu, d, s: [a, b, c, e] } = *inst;
    match alu {
        MovPred => {
            let v = regs.pred[a as usize];
            regs.set_pred(d, mask, v);
        }
        MovB16 | MovB32 | MovF32 | F32ToBits | F32FromBits => {
            let v = regs.r32[a as usize];
            regs.set32(d, mask, &v);
        }
        MovB64 => {
            let v = regs.r64[a as usize];
            regs.set64(d, mask, &v);
        }

        AddU32 | AddS32 => bin(regs, mask, d, a, b, u32::wrapping_add),
        SubU32 | SubS32 => bin(regs, mask, d, a, b, u32::wrapping_sub),
        MulLoU32 | MulLoS32 => bin(regs, mask, d, a, b, u32::wrapping_mul),
        MulHiU32 => bin(regs, mask, d, a, b, |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        MulHiS32 => {
            bin(regs, mask, d, a, b, |a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32);
        }
        MulWideU32 => wide(regs, mask, d, a, b, |a, b| u64::from(a) * u64::from(b)),
        MulWideS32 => wide(regs, mask, d, a, b, |a, b| (i64::from(a as i32) * i64::from(b as i32)) as u64),
        MadLoU32 | MadLoS32 => tri(regs, mask, d, a, b, c, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        MadWideU32 => mad_wide(regs, mask, d, a, b, c, |a, b| u64::from(a) * u64::from(b)),
        MadWideS32 => {
            mad_wide(regs, mask, d, a, b, c, |a, b| (i64::from(a as i32) * i64::from(b as i32)) as u64);
        }
        // Division by zero is unspecified in PTX; hardware gives all ones, for the remainder too.
        DivU32 => bin(regs, mask, d, a, b, |a, b| a.checked_div(b).unwrap_or(u32::MAX)),
        DivS32 => {
            bin(regs, mask, d, a, b, |a, b| {
                if b == 0 { u32::MAX } else { (a as i32).wrapping_div(b as i32) as u32 }
            });
        }
        RemU32 => bin(regs, mask, d, a, b, |a, b| a.checked_rem(b).unwrap_or(!0)),
        RemS32 => {
            bin(regs, mask, d, a, b, |a, b| {
                if b == 0 { u32::MAX } else { (a as i32).wrapping_rem(b as i32) as u32 }
            });
        }
        MinU32 => bin(regs, mask, d, a, b, u32::min),
        MinS32 => bin(regs, mask, d, a, b, |a, b| (a as i32).min(b as i32) as u32),
        MaxU32 => bin(regs, mask, d, a, b, u32::max),
        MaxS32 => bin(regs, mask, d, a, b, |a, b| (a as i32).max(b as i32) as u32),
        NegS32 => un(regs, mask, d, a, u32::wrapping_neg),
        AbsS32 => un(regs, mask, d, a, |a| (a as i32).wrapping_abs() as u32),

        AddU64 | AddS64 => bin64(regs, mask, d, a, b, u64::wrapping_add),
        SubU64 | SubS64 => bin64(regs, mask, d, a, b, u64::wrapping_sub),
        MulLoU64 | MulLoS64 => bin64(regs, mask, d, a, b, u64::wrapping_mul),
        MulHiU64 => bin64(regs, mask, d, a, b, |a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64),
        MadLoU64 | MadLoS64 => {
            let (x, y, z) = (regs.r64[a as usize], regs.r64[b as usize], regs.r64[c as usize]);
            let out = std::array::from_fn(|l| x[l].wrapping_mul(y[l]).wrapping_add(z[l]));
            regs.set64(d, mask, &out);
        }
        DivU64 => bin64(regs, mask, d, a, b, |a, b| a.checked_div(b).unwrap_or(u64::MAX)),
        RemU64 => bin64(regs, mask, d, a, b, |a, b| a.checked_rem(b).unwrap_or(!0)),
        MinU64 => bin64(regs, mask, d, a, b, u64::min),
        MinS64 => bin64(regs, mask, d, a, b, |a, b| (a as i64).min(b as i64) as u64),
        MaxU64 => bin64(regs, mask, d, a, b, u64::max),
        MaxS64 => bin64(regs, mask, d, a, b, |a, b| (a as i64).max(b as i64) as u64),
        NegS64 => un64(regs, mask, d, a, u64::wrapping_neg),

        AndB16 | AndB32 => bin(regs, mask, d, a, b, |a, b| a & b),
        OrB16 | OrB32 => bin(regs, mask, d, a, b, |a, b| a | b),
        XorB16 | XorB32 => bin(regs, mask, d, a, b, |a, b| a ^ b),
        NotB16 => un(regs, mask, d, a, |a| !a & 0xFFFF),
        NotB32 => un(regs, mask, d, a, |a| !a),
        AndB64 => bin64(regs, mask, d, a, b, |a, b| a & b),
        OrB64 => bin64(regs, mask, d, a, b, |a, b| a | b),
        XorB64 => bin64(regs, mask, d, a, b, |a, b| a ^ b),
        NotB64 => un64(regs, mask, d, a, |a| !a),
        // Shifts clamp: by the width or more, all bits leave.
        ShlB32 => bin(regs, mask, d, a, b, |a, n| if n > 31 { 0 } else { a << n }),
        ShrU32 => bin(regs, mask, d, a, b, |a, n| if n > 31 { 0 } else { a >> n }),
        ShrS32 => bin(regs, mask, d, a, b, |a, n| ((a as i32) >> n.min(31)) as u32),
        ShlB64 => shift64(regs, mask, d, a, b, |a, n| if n > 63 { 0 } else { a << n }),
        ShrU64 => shift64(regs, mask, d, a, b, |a, n| if n > 63 { 0 } else { a >> n }),
        ShrS64 => shift64(regs, mask, d, a, b, |a, n| ((a as i64) >> n.min(63)) as u64),
        ShfLWrapB32 => tri(regs, mask, d, a, b, c, |lo, hi, n| {
            ((u64::from(hi) << 32 | u64::from(lo)) << (n & 31) >> 32) as u32
        }),
        ShfRWrapB32 => {
            tri(regs, mask, d, a, b, c, |lo, hi, n| {
                ((u64::from(hi) << 32 | u64::from(lo)) >> (n & 31)) as u32
            });
        }
        Lop3B32 => {
            let table = regs.r32[e as usize][0];
            tri(regs, mask, d, a, b, c, |a, b, c| lop3(a, b, c, table));
        }
        BfeU32 => tri(regs, mask, d, a, b, c, |a, start, len| bfe(u64::from(a), start, len, 32) as u32),
        BfeS32 => tri(regs, mask, d, a, b, c, bfe_s32),
        BfeU64 => {
            let (x, start, len) = (regs.r64[a as usize], regs.r32[b as usize], regs.r32[c as usize]);
            let out = std::array::from_fn(|l| bfe(x[l], start[l], len[l], 64));
            regs.set64(d, mask, &out);
        }
        BfiB32 => {
            let (x, y) = (regs.r32[a as usize], regs.r32[b as usize]);
            let (start, len) = (regs.r32[c as usize], regs.r32[e as usize]);
            let out =
                std::array::from_fn(|l| bfi(u64::from(x[l]), u64::from(y[l]), start[l], len[l], 32) as u32);
            regs.set32(d, mask, &out);
        }
        BfiB64 => {
            let (x, y) = (regs.r64[a as usize], regs.r64[b as usize]);
            let (start, len) = (regs.r32[c as usize], regs.r32[e as usize]);
            let out = std::array::from_fn(|l| bfi(x[l], y[l], start[l], len[l], 64));
            regs.set64(d, mask, &out);
        }
        PrmtB32 => tri(regs, mask, d, a, b, c, prmt),
        PopcB32 => un(regs, mask, d, a, u32::count_ones),
        ClzB32 => un(regs, mask, d, a, u32::leading_zeros),
        BrevB32 => un(regs, mask, d, a, u32::reverse_bits),
        BfindU32 => un(regs, mask, d, a, |a| 31u32.wrapping_sub(a.leading_zeros())),

        AndPred => preds(regs, mask, d, a, b, |a, b| a & b),
        OrPred => preds(regs, mask, d, a, b, |a, b| a | b),
        XorPred => preds(regs, mask, d, a, b, |a, b| a ^ b),
        NotPred => {
            let v = !regs.pred[a as usize];
            regs.set_pred(d, mask, v);
        }
        SelpB16 | SelpB32 | SelpF32 => {
            let (x, y, p) = (regs.r32[a as usize], regs.r32[b as usize], regs.pred[c as usize]);
            let mut out = [0; 32];
            for l in 0..32 {
                out[l] = if p >> l & 1 == 1 { x[l] } else { y[l] };
            }
            regs.set32(d, mask, &out);
        }
        SelpB64 => {
            let (x, y, p) = (regs.r64[a as usize], regs.r64[b as usize], regs.pred[c as usize]);
            let out = std::array::from_fn(|l| if p >> l & 1 == 1 { x[l] } else { y[l] });
            regs.set64(d, mask, &out);
        }
        SlctB32S32 | SlctF32S32 => {
            tri(regs, mask, d, a, b, c, |a, b, c| if (c as i32) >= 0 { a } else { b });
        }

        AddF32 => fbin(regs, mask, d, a, b, |a, b| a + b),
        AddFtzF32 => fbin(regs, mask, d, a, b, |a, b| num::flush(num::flush(a) + num::flush(b))),
        SubF32 => fbin(regs, mask, d, a, b, |a, b| a - b),
        SubFtzF32 => fbin(regs, mask, d, a, b, |a, b| num::flush(num::flush(a) - num::flush(b))),
        MulF32 => fbin(regs, mask, d, a, b, |a, b| a * b),
        MulFtzF32 => fbin(regs, mask, d, a, b, |a, b| num::flush(num::flush(a) * num::flush(b))),
        FmaF32 => ftri(regs, mask, d, a, b, c, f32::mul_add),
        FmaFtzF32 => ftri(regs, mask, d, a, b, c, |a, b, c| {
            num::flush(num::flush(a).mul_add(num::flush(b), num::flush(c)))
        }),
        MinF32 => fbin(regs, mask, d, a, b, num::min),
        MinFtzF32 => fbin(regs, mask, d, a, b, |a, b| num::min(num::flush(a), num::flush(b))),
        MinNanF32 => fbin(regs, mask, d, a, b, |a, b| nan_or(a, b, num::min(a, b))),
        MaxF32 => fbin(regs, mask, d, a, b, num::max),
        MaxFtzF32 => fbin(regs, mask, d, a, b, |a, b| num::max(num::flush(a), num::flush(b))),
        MaxNanF32 => fbin(regs, mask, d, a, b, |a, b| nan_or(a, b, num::max(a, b))),
        NegF32 => fun(regs, mask, d, a, |a| -a),
        AbsF32 => fun(regs, mask, d, a, f32::abs),
        CopysignF32 => {
            bin(regs, mask, d, a, b, |sign, magnitude| sign & 0x8000_0000 | magnitude & 0x7FFF_FFFF);
        }
        DivF32 | DivFullF32 | DivApproxF32 => fbin(regs, mask, d, a, b, |a, b| a / b),
        RcpF32 | RcpApproxF32 => fun(regs, mask, d, a, num::rcp),
        RcpApproxFtzF32 => fun(regs, mask, d, a, |a| num::flush(num::rcp(num::flush(a)))),
        SqrtF32 | SqrtApproxF32 => fun(regs, mask, d, a, f32::sqrt),
        SqrtApproxFtzF32 => fun(regs, mask, d, a, |a| num::flush(a).sqrt()),
        RsqrtApproxF32 => fun(regs, mask, d, a, num::rsqrt),
        RsqrtApproxFtzF32 => fun(regs, mask, d, a, |a| num::rsqrt(num::flush(a))),
        Ex2ApproxF32 => fun(regs, mask, d, a, num::exp2),
        Ex2ApproxFtzF32 => fun(regs, mask, d, a, num::exp2_flushed),
        Lg2ApproxF32 => fun(regs, mask, d, a, num::log2),
        Lg2ApproxFtzF32 => fun(regs, mask, d, a, |a| num::log2(num::flush(a))),
        SinApproxF32 => fun(regs, mask, d, a, |a| f64::from(a).sin() as f32),
        CosApproxF32 => fun(regs, mask, d, a, |a| f64::from(a).cos() as f32),
        TanhApproxF32 => fun(regs, mask, d, a, num::tanh),

        AddF16 => hbin::<Half>(regs, mask, d, a, b, |a, b| a + b),
        SubF16 => hbin::<Half>(regs, mask, d, a, b, |a, b| a - b),
        MulF16 => hbin::<Half>(regs, mask, d, a, b, |a, b| a * b),
        FmaF16 => hfma::<Half>(regs, mask, d, a, b, c),
        MinF16 => hbin::<Half>(regs, mask, d, a, b, num::min),
        MaxF16 => hbin::<Half>(regs, mask, d, a, b, num::max),
        NegF16 | NegBf16 => un(regs, mask, d, a, |a| a ^ 0x8000),
        AbsF16 | AbsBf16 => un(regs, mask, d, a, |a| a & 0x7FFF),
        Ex2ApproxF16 => hun::<Half>(regs, mask, d, a, num::exp2),
        TanhApproxF16 => hun::<Half>(regs, mask, d, a, num::tanh),
        FmaBf16 => hfma::<Brain>(regs, mask, d, a, b, c),
        MinBf16 => hbin::<Brain>(regs, mask, d, a, b, num::min),
        MaxBf16 => hbin::<Brain>(regs, mask, d, a, b, num::max),
        AddBf16 => hbin::<Brain>(regs, mask, d, a, b, |a, b| a + b),
        SubBf16 => hbin::<Brain>(regs, mask, d, a, b, |a, b| a - b),
        MulBf16 => hbin::<Brain>(regs, mask, d, a, b, |a, b| a * b),

        AddF16x2 => pbin::<Half>(regs, mask, d, a, b, |a, b| a + b),
        SubF16x2 => pbin::<Half>(regs, mask, d, a, b, |a, b| a - b),
        MulF16x2 => pbin::<Half>(regs, mask, d, a, b, |a, b| a * b),
        FmaF16x2 => pfma::<Half>(regs, mask, d, a, b, c),
        MinF16x2 => pbin::<Half>(regs, mask, d, a, b, num::min),
        MaxF16x2 => pbin::<Half>(regs, mask, d, a, b, num::max),
        NegF16x2 | NegBf16x2 => un(regs, mask, d, a, |a| a ^ 0x8000_8000),
        AbsF16x2 | AbsBf16x2 => un(regs, mask, d, a, |a| a & 0x7FFF_7FFF),
        Ex2ApproxF16x2 => pun::<Half>(regs, mask, d, a, num::exp2),
        TanhApproxF16x2 => pun::<Half>(regs, mask, d, a, num::tanh),
        FmaBf16x2 => pfma::<Brain>(regs, mask, d, a, b, c),
        MinBf16x2 => pbin::<Brain>(regs, mask, d, a, b, num::min),
        MaxBf16x2 => pbin::<Brain>(regs, mask, d, a, b, num::max),
        AddBf16x2 => pbin::<Brain>(regs, mask, d, a, b, |a, b| a + b),
        SubBf16x2 => pbin::<Brain>(regs, mask, d, a, b, |a, b| a - b),
        MulBf16x2 => pbin::<Brain>(regs, mask, d, a, b, |a, b| a * b),
        Ex2ApproxFtzBf16x2 => pun::<Brain>(regs, mask, d, a, num::exp2_flushed),
        TanhApproxBf16x2 => pun::<Brain>(regs, mask, d, a, num::tanh),

        CvtRnF16F32 => un(regs, mask, d, a, |a| u32::from(num::f32_to_f16(f32::from_bits(a)))),
        CvtRzF16F32 => un(regs, mask, d, a, |a| u32::from(num::f32_to_f16_rz(f32::from_bits(a)))),
        CvtRnBf16F32 => un(regs, mask, d, a, |a| u32::from(num::f32_to_bf16(f32::from_bits(a)))),
        CvtRzBf16F32 => un(regs, mask, d, a, |a| u32::from(num::f32_to_bf16_rz(f32::from_bits(a)))),
        CvtF32F16 => un(regs, mask, d, a, |a| num::canonical(num::f16_to_f32(a as u16))),
        CvtF32Bf16 => un(regs, mask, d, a, |a| num::canonical(num::bf16_to_f32(a as u16))),
        CvtRnF16x2F32 => pack(regs, mask, d, a, b, num::f32_to_f16),
        CvtRzF16x2F32 => pack(regs, mask, d, a, b, num::f32_to_f16_rz),
        CvtRnReluF16x2F32 => pack(regs, mask, d, a, b, |x| num::f32_to_f16(relu(x))),
        CvtRnBf16x2F32 => pack(regs, mask, d, a, b, num::f32_to_bf16),
        CvtRzBf16x2F32 => pack(regs, mask, d, a, b, num::f32_to_bf16_rz),
        CvtRnReluBf16x2F32 => pack(regs, mask, d, a, b, |x| num::f32_to_bf16(relu(x))),
        CvtRnSatfiniteE4m3x2F32 => pack8(regs, mask, d, a, b, num::f32_to_e4m3),
        CvtRnSatfiniteE5m2x2F32 => pack8(regs, mask, d, a, b, num::f32_to_e5m2),
        CvtRnSatfiniteE4m3x2F16x2 => un(regs, mask, d, a, |a| narrow(a, num::f32_to_e4m3)),
        CvtRnSatfiniteE5m2x2F16x2 => un(regs, mask, d, a, |a| narrow(a, num::f32_to_e5m2)),
        CvtRnF16x2E4m3x2 => un(regs, mask, d, a, |a| widen(a, num::e4m3_to_f32)),
        CvtRnF16x2E5m2x2 => un(regs, mask, d, a, |a| widen(a, num::e5m2_to_f32)),
        CvtRniF32F32 => fun(regs, mask, d, a, f32::round_ties_even),
        CvtRziF32F32 => fun(regs, mask, d, a, f32::trunc),
        CvtRmiF32F32 => fun(regs, mask, d, a, f32::floor),
        CvtRpiF32F32 => fun(regs, mask, d, a, f32::ceil),
        CvtSatF32F32 => fun(regs, mask, d, a, |a| if a > 0.0 { a.min(1.0) } else { 0.0 }),

        CvtRnF32S32 => un(regs, mask, d, a, |a| (a as i32 as f32).to_bits()),
        CvtRnF32U32 => un(regs, mask, d, a, |a| (a as f32).to_bits()),
        CvtRnF32S64 => narrow64(regs, mask, d, a, |a| (a as i64 as f32).to_bits()),
        CvtRnF32U64 => narrow64(regs, mask, d, a, |a| (a as f32).to_bits()),
        CvtRnF16S32 => un(regs, mask, d, a, |a| u32::from(num::f64_to_f16(f64::from(a as i32)))),
        CvtRnF16U32 => un(regs, mask, d, a, |a| u32::from(num::f64_to_f16(f64::from(a)))),
        // Out-of-range values saturate and NaN becomes 0: what `as` does.
        CvtRniS32F32 => un(regs, mask, d, a, |a| f32::from_bits(a).round_ties_even() as i32 as u32),
        CvtRziS32F32 => un(regs, mask, d, a, |a| f32::from_bits(a) as i32 as u32),
        CvtRmiS32F32 => un(regs, mask, d, a, |a| f32::from_bits(a).floor() as i32 as u32),
        CvtRpiS32F32 => un(regs, mask, d, a, |a| f32::from_bits(a).ceil() as i32 as u32),
        CvtRniU32F32 => un(regs, mask, d, a, |a| f32::from_bits(a).round_ties_even() as u32),
        CvtRziU32F32 => un(regs, mask, d, a, |a| f32::from_bits(a) as u32),

        CvtU64U32 => widen64(regs, mask, d, a, u64::from),
        CvtS64S32 => widen64(regs, mask, d, a, |a| i64::from(a as i32) as u64),
        CvtU32U64 => narrow64(regs, mask, d, a, |a| a as u32),
        CvtU16U32 => un(regs, mask, d, a, |a| a & 0xFFFF),
        CvtU32U16 => un(regs, mask, d, a, |a| a & 0xFFFF),
        CvtS32S16 => un(regs, mask, d, a, |a| i32::from(a as u16 as i16) as u32),
        CvtSatS32S64 => narrow64(regs, mask, d, a, |a| {
            (a as i64).clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32 as u32
        }),
    }
}

/// Executes a comparison in the lanes of the mask.
#[inline(always)]
pub fn compare(regs: &mut Regs, inst: &SetpInst, mask: u32) {
    let SetpInst { cmp, ty, d, a, b } = *inst;
    let result = match ty {
        NumType::U32 | NumType::U16 => integers(cmp, &regs.r32[a as usize], &regs.r32[b as usize], |x| x),
        NumType::S32 => integers(cmp, &regs.r32[a as usize], &regs.r32[b as usize], |x| x as i32),
        NumType::S16 => integers(cmp, &regs.r32[a as usize], &regs.r32[b as usize], |x| x as u16 as i16),
        NumType::U64 => integers(cmp, &regs.r64[a as usize], &regs.r64[b as usize], |x| x),
        NumType::S64 => integers(cmp, &regs.r64[a as usize], &regs.r64[b as usize], |x| x as i64),
        NumType::F32 => floats(cmp, &regs.r32[a as usize], &regs.r32[b as usize]),
    };
    regs.set_pred(d, mask, result);
}

#[inline(always)]
fn lanes(f: impl Fn(usize) -> bool) -> u32 {
    let mut bits = 0;
    for l in 0..32 {
        bits |= u32::from(f(l)) << l;
    }
    bits
}

#[inline(always)]
fn integers<T: Copy, U: Ord>(cmp: Cmp, a: &[T; 32], b: &[T; 32], read: impl Fn(T) -> U) -> u32 {
    match cmp {
        Cmp::Eq | Cmp::Equ => lanes(|l| read(a[l]) == read(b[l])),
        Cmp::Ne | Cmp::Neu => lanes(|l| read(a[l]) != read(b[l])),
        Cmp::Lt | Cmp::Ltu => lanes(|l| read(a[l]) < read(b[l])),
        Cmp::Le | Cmp::Leu => lanes(|l| read(a[l]) <= read(b[l])),
        Cmp::Gt | Cmp::Gtu => lanes(|l| read(a[l]) > read(b[l])),
        Cmp::Ge | Cmp::Geu => lanes(|l| read(a[l]) >= read(b[l])),
        Cmp::Num => u32::MAX,
        Cmp::Nan => 0,
    }
}

#[inline(always)]
fn floats(cmp: Cmp, a: &Row, b: &Row) -> u32 {
    let x = |l: usize| f32::from_bits(a[l]);
    let y = |l: usize| f32::from_bits(b[l]);
    match cmp {
        Cmp::Eq => lanes(|l| x(l) == y(l)),
        Cmp::Ne => lanes(|l| x(l) < y(l) || x(l) > y(l)),
        Cmp::Lt => lanes(|l| x(l) < y(l)),
        Cmp::Le => lanes(|l| x(l) <= y(l)),
        Cmp::Gt => lanes(|l| x(l) > y(l)),
        Cmp::Ge => lanes(|l| x(l) >= y(l)),
        Cmp::Equ => !lanes(|l| x(l) < y(l) || x(l) > y(l)),
        Cmp::Neu => !lanes(|l| x(l) == y(l)),
        Cmp::Ltu => !lanes(|l| x(l) >= y(l)),
        Cmp::Leu => !lanes(|l| x(l) > y(l)),
        Cmp::Gtu => !lanes(|l| x(l) <= y(l)),
        Cmp::Geu => !lanes(|l| x(l) < y(l)),
        Cmp::Num => lanes(|l| !x(l).is_nan() && !y(l).is_nan()),
        Cmp::Nan => lanes(|l| x(l).is_nan() || y(l).is_nan()),
    }
}

#[inline(always)]
fn un(regs: &mut Regs, mask: u32, d: u32, a: u32, f: impl Fn(u32) -> u32) {
    let x = regs.r32[a as usize];
    let mut out = [0; 32];
    for l in 0..32 {
        out[l] = f(x[l]);
    }
    regs.set32(d, mask, &out);
}

#[inline(always)]
fn bin(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, f: impl Fn(u32, u32) -> u32) {
    let (x, y) = (regs.r32[a as usize], regs.r32[b as usize]);
    let mut out = [0; 32];
    for l in 0..32 {
        out[l] = f(x[l], y[l]);
    }
    regs.set32(d, mask, &out);
}

#[inline(always)]
fn tri(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, c: u32, f: impl Fn(u32, u32, u32) -> u32) {
    let (x, y, z) = (regs.r32[a as usize], regs.r32[b as usize], regs.r32[c as usize]);
    let mut out = [0; 32];
    for l in 0..32 {
        out[l] = f(x[l], y[l], z[l]);
    }
    regs.set32(d, mask, &out);
}

#[inline(always)]
fn wide(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, f: impl Fn(u32, u32) -> u64) {
    let (x, y) = (regs.r32[a as usize], regs.r32[b as usize]);
    let mut out: Row64 = [0; 32];
    for l in 0..32 {
        out[l] = f(x[l], y[l]);
    }
    regs.set64(d, mask, &out);
}

#[inline(always)]
fn mad_wide(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, c: u32, f: impl Fn(u32, u32) -> u64) {
    let (x, y, z) = (regs.r32[a as usize], regs.r32[b as usize], regs.r64[c as usize]);
    let mut out: Row64 = [0; 32];
    for l in 0..32 {
        out[l] = f(x[l], y[l]).wrapping_add(z[l]);
    }
    regs.set64(d, mask, &out);
}

#[inline(always)]
fn un64(regs: &mut Regs, mask: u32, d: u32, a: u32, f: impl Fn(u64) -> u64) {
    let out = regs.r64[a as usize].map(f);
    regs.set64(d, mask, &out);
}

#[inline(always)]
fn bin64(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, f: impl Fn(u64, u64) -> u64) {
    let (x, y) = (regs.r64[a as usize], regs.r64[b as usize]);
    let mut out: Row64 = [0; 32];
    for l in 0..32 {
        out[l] = f(x[l], y[l]);
    }
    regs.set64(d, mask, &out);
}

#[inline(always)]
fn shift64(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, f: impl Fn(u64, u32) -> u64) {
    let (x, n) = (regs.r64[a as usize], regs.r32[b as usize]);
    let mut out: Row64 = [0; 32];
    for l in 0..32 {
        out[l] = f(x[l], n[l]);
    }
    regs.set64(d, mask, &out);
}

#[inline(always)]
fn widen64(regs: &mut Regs, mask: u32, d: u32, a: u32, f: impl Fn(u32) -> u64) {
    let x = regs.r32[a as usize];
    let mut out: Row64 = [0; 32];
    for l in 0..32 {
        out[l] = f(x[l]);
    }
    regs.set64(d, mask, &out);
}

#[inline(always)]
fn narrow64(regs: &mut Regs, mask: u32, d: u32, a: u32, f: impl Fn(u64) -> u32) {
    let x = regs.r64[a as usize];
    let mut out: Row = [0; 32];
    for l in 0..32 {
        out[l] = f(x[l]);
    }
    regs.set32(d, mask, &out);
}

#[inline(always)]
fn preds(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, f: impl Fn(u32, u32) -> u32) {
    let v = f(regs.pred[a as usize], regs.pred[b as usize]);
    regs.set_pred(d, mask, v);
}

#[inline(always)]
fn fun(regs: &mut Regs, mask: u32, d: u32, a: u32, f: impl Fn(f32) -> f32) {
    let x = regs.r32[a as usize];
    let mut out = [0; 32];
    // Not through a closure of its own, which would be compiled without the vector instructions of the caller.
    for l in 0..32 {
        out[l] = num::canonical(f(f32::from_bits(x[l])));
    }
    regs.set32(d, mask, &out);
}

#[inline(always)]
fn fbin(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, f: impl Fn(f32, f32) -> f32) {
    bin(regs, mask, d, a, b, |a, b| num::canonical(f(f32::from_bits(a), f32::from_bits(b))));
}

#[inline(always)]
fn ftri(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, c: u32, f: impl Fn(f32, f32, f32) -> f32) {
    tri(regs, mask, d, a, b, c, |a, b, c| {
        num::canonical(f(f32::from_bits(a), f32::from_bits(b), f32::from_bits(c)))
    });
}

/// A 16-bit float format.
trait Narrow {
    fn widen(code: u16) -> f32;
    /// Rounds a sum, product or function value, computed in f32: f32 has more than twice the digits, so
    /// rounding twice equals rounding once.
    fn round(x: f32) -> u16;
}

enum Half {}
enum Brain {}

impl Narrow for Half {
    #[inline(always)]
    fn widen(code: u16) -> f32 {
        num::f16_to_f32(code)
    }
    #[inline(always)]
    fn round(x: f32) -> u16 {
        num::f32_to_f16(x)
    }
}

impl Narrow for Brain {
    #[inline(always)]
    fn widen(code: u16) -> f32 {
        num::bf16_to_f32(code)
    }
    #[inline(always)]
    fn round(x: f32) -> u16 {
        num::f32_to_bf16(x)
    }
}

#[inline(always)]
fn hun<F: Narrow>(regs: &mut Regs, mask: u32, d: u32, a: u32, f: impl Fn(f32) -> f32) {
    un(regs, mask, d, a, |a| u32::from(F::round(f(F::widen(a as u16)))));
}

#[inline(always)]
fn hbin<F: Narrow>(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, f: impl Fn(f32, f32) -> f32) {
    bin(regs, mask, d, a, b, |a, b| u32::from(F::round(f(F::widen(a as u16), F::widen(b as u16)))));
}

#[inline(always)]
fn fma16<F: Narrow>(a: u16, b: u16, c: u16) -> u16 {
    F::round(num::fma_to_odd(F::widen(a), F::widen(b), F::widen(c)))
}

#[inline(always)]
fn hfma<F: Narrow>(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, c: u32) {
    tri(regs, mask, d, a, b, c, |a, b, c| u32::from(fma16::<F>(a as u16, b as u16, c as u16)));
}

#[inline(always)]
fn pun<F: Narrow>(regs: &mut Regs, mask: u32, d: u32, a: u32, f: impl Fn(f32) -> f32) {
    un(regs, mask, d, a, |a| {
        let lo = F::round(f(F::widen(a as u16)));
        let hi = F::round(f(F::widen((a >> 16) as u16)));
        u32::from(hi) << 16 | u32::from(lo)
    });
}

#[inline(always)]
fn pbin<F: Narrow>(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, f: impl Fn(f32, f32) -> f32) {
    bin(regs, mask, d, a, b, |a, b| {
        let lo = F::round(f(F::widen(a as u16), F::widen(b as u16)));
        let hi = F::round(f(F::widen((a >> 16) as u16), F::widen((b >> 16) as u16)));
        u32::from(hi) << 16 | u32::from(lo)
    });
}

#[inline(always)]
fn pfma<F: Narrow>(regs: &mut Regs, mask: u32, d: u32, a: u32, b: u32, c: u32) {
    tri(regs, mask, d, a, b, c, |a, b, c| {
        let lo = fma16::<F>(a as u16, b as u16, c as u16);
        let hi = fma16::<F>((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16);
        u32::from(hi) << 16 | u32::from(lo)
    });
}

#[inline(always)]
fn pack(regs: &mut Regs, mask: u32, d: u32, hi: u32, lo: u32, f: impl Fn(f32) -> u16) {
    bin(regs, mask, d, hi, lo, |hi, lo| {
        u32::from(f(f32::from_bits(hi))) << 16 | u32::from(f(f32::from_bits(lo)))
    });
}

#[inline(always)]
fn pack8(regs: &mut Regs, mask: u32, d: u32, hi: u32, lo: u32, f: impl Fn(f32) -> u8) {
    bin(regs, mask, d, hi, lo, |hi, lo| {
        u32::from(f(f32::from_bits(hi))) << 8 | u32::from(f(f32::from_bits(lo)))
    });
}

#[inline(always)]
fn narrow(pair: u32, f: impl Fn(f32) -> u8) -> u32 {
    let lo = f(num::f16_to_f32(pair as u16));
    let hi = f(num::f16_to_f32((pair >> 16) as u16));
    u32::from(hi) << 8 | u32::from(lo)
}

#[inline(always)]
fn widen(pair: u32, f: impl Fn(u8) -> f32) -> u32 {
    let lo = num::f32_to_f16(f(pair as u8));
    let hi = num::f32_to_f16(f((pair >> 8) as u8));
    u32::from(hi) << 16 | u32::from(lo)
}

#[inline(always)]
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

#[inline(always)]
fn nan_or(a: f32, b: f32, otherwise: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { otherwise }
}

#[inline(always)]
fn lop3(a: u32, b: u32, c: u32, table: u32) -> u32 {
    let mut out = 0;
    for i in 0..8 {
        let x = if i & 4 != 0 { a } else { !a };
        let y = if i & 2 != 0 { b } else { !b };
        let z = if i & 1 != 0 { c } else { !c };
        let on = 0u32.wrapping_sub(table >> i & 1);
        out |= x & y & z & on;
    }
    out
}

#[inline(always)]
fn bfe(a: u64, start: u32, len: u32, width: u32) -> u64 {
    let (start, len) = (start & 0xFF, len & 0xFF);
    if start >= width {
        return 0;
    }
    let shifted = a >> start;
    if len >= 64 { shifted } else { shifted & ((1u64 << len) - 1) }
}

#[inline(always)]
fn bfe_s32(a: u32, start: u32, len: u32) -> u32 {
    let (start, len) = (start & 0xFF, len & 0xFF);
    if len == 0 {
        return 0;
    }
    // Bits beyond the word repeat its sign, as do those beyond the field.
    let field = i64::from(a as i32) >> start.min(63);
    let keep = 64 - len.min(32);
    (field << keep >> keep) as u32
}

#[inline(always)]
fn bfi(a: u64, b: u64, start: u32, len: u32, width: u32) -> u64 {
    let (start, len) = (start & 0xFF, len & 0xFF);
    if start >= width || len == 0 {
        return b;
    }
    let field = if len >= 64 { u64::MAX } else { (1u64 << len) - 1 } << start;
    b & !field | (a << start) & field
}

#[inline(always)]
fn prmt(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    let mut out = 0;
    for i in 0..4 {
        let pick = selector >> (i * 4) & 0xF;
        let byte = (bytes >> ((pick & 7) * 8)) as u8;
        // The top bit of the nibble asks for the byte's sign in all its bits.
        let byte = if pick & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 };
        out |= u32::from(byte) << (i * 8);
    }
    out
}
