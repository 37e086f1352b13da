//! The plain instructions that kernels consist of, with AVX-512: a row of 32 lanes is two vectors.
//!
//! Single-precision results must hold the canonical NaN. A NaN is rare, so one comparison tests the row for any, and only
//! then is it changed. What is not written here is computed by the loops of `alu`; so is `max` or
//! `cvt` of a row that holds a NaN. All give the same bits.

use std::arch::x86_64::*;
use std::f64::consts::LN_2;

use flashcore_ptx::{Alu, Cmp, NumType};

use crate::machine::regs::{Aligned, Regs, Row};
use crate::numerics::CANONICAL_NAN;
use crate::program::Exec;
use crate::vectors::alu::{self, AluInst, SetpInst};

/// A row of registers as two vectors.
type WideRow = [__m512; 2];

#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn get(rows: &[Aligned<Row>], row: u32) -> WideRow {
    let row = rows[row as usize].as_ptr().cast::<f32>();
    // SAFETY: a row is 32 words, which are read as floats; no alignment is required.
    unsafe { [_mm512_loadu_ps(row), _mm512_loadu_ps(row.add(16))] }
}

#[inline]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_code)]
fn put(regs: &mut Regs, row: u32, value: WideRow) {
    let to = regs.r32[row as usize].as_mut_ptr().cast::<f32>();
    // SAFETY: a row is 32 words, which are written as floats; no alignment is required.
    unsafe {
        _mm512_storeu_ps(to, value[0]);
        _mm512_storeu_ps(to.add(16), value[1]);
    }
    regs.init32[row as usize] = u32::MAX;
}

/// Whether any lane of either is NaN.
#[inline]
#[target_feature(enable = "avx512f")]
fn any_nan(x: __m512, y: __m512) -> bool {
    _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, y) != 0
}

/// Writes the result of an arithmetic instruction.
#[inline]
#[target_feature(enable = "avx512f")]
fn put_result(regs: &mut Regs, row: u32, mut value: WideRow) {
    if any_nan(value[0], value[1]) {
        value = [with_canonical_nans(value[0]), with_canonical_nans(value[1])];
    }
    put(regs, row, value);
}

#[inline]
#[target_feature(enable = "avx512f")]
fn with_canonical_nans(x: __m512) -> __m512 {
    let nan = _mm512_castsi512_ps(_mm512_set1_epi32(CANONICAL_NAN as i32));
    _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), x, nan)
}

/// Executes plain instructions and comparisons one after the other, in the lanes of the mask.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
pub fn run_steps(regs: &mut Regs, steps: &[Exec], mask: u32) {
    for step in steps {
        match step {
            Exec::Alu(inst) if mask == u32::MAX => execute(regs, inst),
            Exec::Setp(inst) if mask == u32::MAX => compare(regs, inst),
            Exec::Alu(_) | Exec::Setp(_) => any(regs, step, mask),
            Exec::Mma(_) | Exec::Op | Exec::Branch | Exec::Nop => {}
        }
    }
}

/// Executes any plain instruction by the loops of `alu`. Not a part of the loop over the instructions, which has all it
/// needs in registers.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
fn any(regs: &mut Regs, step: &Exec, mask: u32) {
    match step {
        Exec::Alu(inst) => alu::execute(regs, inst, mask),
        Exec::Setp(inst) => alu::compare(regs, inst, mask),
        Exec::Mma(_) | Exec::Op | Exec::Branch | Exec::Nop => {}
    }
}

/// Executes a plain instruction in all lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
fn execute(regs: &mut Regs, inst: &AluInst) {
    let AluInst { alu, d, s: [a, b, c, _] } = *inst;
    let rows = &regs.r32[..];
    match alu {
        Alu::MovB32 | Alu::MovF32 => {
            let x = get(rows, a);
            put(regs, d, x);
        }
        Alu::AddF32 => {
            let (x, y) = (get(rows, a), get(rows, b));
            put_result(regs, d, [_mm512_add_ps(x[0], y[0]), _mm512_add_ps(x[1], y[1])]);
        }
        Alu::SubF32 => {
            let (x, y) = (get(rows, a), get(rows, b));
            put_result(regs, d, [_mm512_sub_ps(x[0], y[0]), _mm512_sub_ps(x[1], y[1])]);
        }
        Alu::MulF32 => {
            let (x, y) = (get(rows, a), get(rows, b));
            put_result(regs, d, [_mm512_mul_ps(x[0], y[0]), _mm512_mul_ps(x[1], y[1])]);
        }
        Alu::FmaF32 => {
            let (x, y, z) = (get(rows, a), get(rows, b), get(rows, c));
            let sums = [_mm512_fmadd_ps(x[0], y[0], z[0]), _mm512_fmadd_ps(x[1], y[1], z[1])];
            put_result(regs, d, sums);
        }
        Alu::MaxF32 => {
            let (x, y) = (get(rows, a), get(rows, b));
            if any_nan(x[0], y[0]) || any_nan(x[1], y[1]) {
                return any(regs, &Exec::Alu(*inst), u32::MAX);
            }
            // The larger, and of two zeros the positive one.
            let larger = [_mm512_range_ps::<0b0101>(x[0], y[0]), _mm512_range_ps::<0b0101>(x[1], y[1])];
            put(regs, d, larger);
        }
        Alu::Ex2ApproxFtzF32 => {
            let x = get(rows, a);
            if any_nan(x[0], x[1]) {
                return any(regs, &Exec::Alu(*inst), u32::MAX);
            }
            put(regs, d, exp2_flushed(x));
        }
        Alu::CvtRnF16x2F32 => {
            let (high, low) = (get(rows, a), get(rows, b));
            if any_nan(high[0], low[0]) || any_nan(high[1], low[1]) {
                return any(regs, &Exec::Alu(*inst), u32::MAX);
            }
            put(regs, d, [half_pairs(high[0], low[0]), half_pairs(high[1], low[1])]);
        }
        Alu::AddU32 | Alu::AddS32 => {
            let (x, y) = (words(rows, a), words(rows, b));
            put_words(regs, d, [_mm512_add_epi32(x[0], y[0]), _mm512_add_epi32(x[1], y[1])]);
        }
        Alu::SubU32 | Alu::SubS32 => {
            let (x, y) = (words(rows, a), words(rows, b));
            put_words(regs, d, [_mm512_sub_epi32(x[0], y[0]), _mm512_sub_epi32(x[1], y[1])]);
        }
        Alu::MulLoU32 | Alu::MulLoS32 => {
            let (x, y) = (words(rows, a), words(rows, b));
            put_words(regs, d, [_mm512_mullo_epi32(x[0], y[0]), _mm512_mullo_epi32(x[1], y[1])]);
        }
        Alu::AndB32 => {
            let (x, y) = (words(rows, a), words(rows, b));
            put_words(regs, d, [_mm512_and_si512(x[0], y[0]), _mm512_and_si512(x[1], y[1])]);
        }
        Alu::OrB32 => {
            let (x, y) = (words(rows, a), words(rows, b));
            put_words(regs, d, [_mm512_or_si512(x[0], y[0]), _mm512_or_si512(x[1], y[1])]);
        }
        Alu::XorB32 => {
            let (x, y) = (words(rows, a), words(rows, b));
            put_words(regs, d, [_mm512_xor_si512(x[0], y[0]), _mm512_xor_si512(x[1], y[1])]);
        }
        // Shifts by the width or more give zero here, too.
        Alu::ShlB32 => {
            let (x, n) = (words(rows, a), words(rows, b));
            put_words(regs, d, [_mm512_sllv_epi32(x[0], n[0]), _mm512_sllv_epi32(x[1], n[1])]);
        }
        Alu::ShrU32 => {
            let (x, n) = (words(rows, a), words(rows, b));
            put_words(regs, d, [_mm512_srlv_epi32(x[0], n[0]), _mm512_srlv_epi32(x[1], n[1])]);
        }
        Alu::SelpB32 | Alu::SelpF32 => {
            let (x, y, holds) = (get(rows, a), get(rows, b), regs.pred[c as usize]);
            let low = _mm512_mask_blend_ps(holds as u16, y[0], x[0]);
            let high = _mm512_mask_blend_ps((holds >> 16) as u16, y[1], x[1]);
            put(regs, d, [low, high]);
        }
        _ => any(regs, &Exec::Alu(*inst), u32::MAX),
    }
}

/// Executes a comparison in all lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
fn compare(regs: &mut Regs, inst: &SetpInst) {
    let SetpInst { cmp, ty, d, a, b } = *inst;
    if ty != NumType::S32 && (ty != NumType::U32 || !matches!(cmp, Cmp::Eq | Cmp::Ne)) {
        return any(regs, &Exec::Setp(*inst), u32::MAX);
    }
    let rows = &regs.r32[..];
    let (x, y) = (words(rows, a), words(rows, b));
    let halves = match cmp {
        Cmp::Eq => [_mm512_cmpeq_epi32_mask(x[0], y[0]), _mm512_cmpeq_epi32_mask(x[1], y[1])],
        Cmp::Ne => [_mm512_cmpneq_epi32_mask(x[0], y[0]), _mm512_cmpneq_epi32_mask(x[1], y[1])],
        Cmp::Lt => [_mm512_cmplt_epi32_mask(x[0], y[0]), _mm512_cmplt_epi32_mask(x[1], y[1])],
        Cmp::Le => [_mm512_cmple_epi32_mask(x[0], y[0]), _mm512_cmple_epi32_mask(x[1], y[1])],
        Cmp::Gt => [_mm512_cmpgt_epi32_mask(x[0], y[0]), _mm512_cmpgt_epi32_mask(x[1], y[1])],
        Cmp::Ge => [_mm512_cmpge_epi32_mask(x[0], y[0]), _mm512_cmpge_epi32_mask(x[1], y[1])],
        _ => return any(regs, &Exec::Setp(*inst), u32::MAX),
    };
    regs.set_pred(d, u32::MAX, u32::from(halves[1]) << 16 | u32::from(halves[0]));
}

/// A row of registers as integers.
#[inline]
#[target_feature(enable = "avx512f")]
fn words(rows: &[Aligned<Row>], row: u32) -> [__m512i; 2] {
    let [low, high] = get(rows, row);
    [_mm512_castps_si512(low), _mm512_castps_si512(high)]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn put_words(regs: &mut Regs, row: u32, value: [__m512i; 2]) {
    put(regs, row, [_mm512_castsi512_ps(value[0]), _mm512_castsi512_ps(value[1])]);
}

/// Pairs of halves, rounded to nearest even; none is NaN.
#[inline]
#[target_feature(enable = "avx512f")]
fn half_pairs(high: __m512, low: __m512) -> __m512 {
    let high = _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high));
    let low = _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low));
    _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32::<16>(high), low))
}

/// The coefficients of the Taylor series of e^t, the highest first: those of `numerics::exp2`.
const SERIES: [f64; 11] = [
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];

/// 2^x with subnormal numbers taken for zero, as `numerics::exp2_flushed` computes it, step by step; no lane is NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn exp2_flushed(x: WideRow) -> WideRow {
    let quarter = |x: __m512, upper: bool| {
        // A subnormal number has the power of zero, and adds less than the rounding of it.
        let half = if upper { _mm512_extractf32x8_ps::<1>(x) } else { _mm512_castps512_ps256(x) };
        _mm512_cvtps_pd(half)
    };
    let all = [quarter(x[0], false), quarter(x[0], true), quarter(x[1], false), quarter(x[1], true)];
    let magic = _mm512_set1_pd(6_755_399_441_055_744.0);
    let (mut t, mut power, mut sum) = (all, all, [_mm512_set1_pd(SERIES[0]); 4]);
    for i in 0..4 {
        let clamped = _mm512_min_pd(_mm512_max_pd(all[i], _mm512_set1_pd(-160.0)), _mm512_set1_pd(130.0));
        power[i] = _mm512_add_pd(clamped, magic);
        let whole = _mm512_sub_pd(power[i], magic);
        t[i] = _mm512_mul_pd(_mm512_sub_pd(clamped, whole), _mm512_set1_pd(LN_2));
    }
    // Four series side by side: each step of one waits for the step before.
    for &coefficient in &SERIES[1..] {
        for i in 0..4 {
            sum[i] = _mm512_fmadd_pd(sum[i], t[i], _mm512_set1_pd(coefficient));
        }
    }
    let mut halves = [_mm256_setzero_ps(); 4];
    for i in 0..4 {
        let biased = _mm512_add_epi64(_mm512_castpd_si512(power[i]), _mm512_set1_epi64(1023));
        let scale = _mm512_castsi512_pd(_mm512_slli_epi64::<52>(biased));
        halves[i] = _mm512_cvtpd_ps(_mm512_mul_pd(sum[i], scale));
    }
    [flushed(halves[0], halves[1]), flushed(halves[2], halves[3])]
}

/// Two halves of a vector of numbers that are not negative, with zero for subnormal ones.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn flushed(low: __m256, high: __m256) -> __m512 {
    let x = _mm512_insertf32x8::<1>(_mm512_castps256_ps512(low), high);
    let normal = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, _mm512_set1_ps(f32::MIN_POSITIVE));
    _mm512_maskz_mov_ps(normal, x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::vectors::{self, Level};

    #[test]
    fn every_level_computes_the_same_bits_of_all_kinds_of_numbers() {
        let special = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MIN_POSITIVE,
            -f32::MIN_POSITIVE,
            1e-40,
            -1e-40,
            f32::MAX,
            f32::MIN,
            65504.0,
            65520.0,
            6e-8,
            -149.5,
        ];
        let nans = [0x7FFF_FFFF, 0x7F80_0001, 0xFFC0_0000, 0x7FC0_1234];
        let mut random = Random::new(5);
        let best = Level::detect();
        for round in 0..200 {
            let mut row = || -> Aligned<Row> {
                Aligned(std::array::from_fn(|_| match (random.below(4), round % 4) {
                    (0, 0) => nans[random.below(nans.len())],
                    (0, 1) => special[random.below(special.len())].to_bits(),
                    (_, 2) => special[random.below(special.len())].to_bits(),
                    (1, _) => (random.below(4000) as f32 / 10.0 - 200.0).to_bits(),
                    _ => match random.next() as u32 {
                        bits if f32::from_bits(bits).is_nan() && round % 4 != 0 => 0x3F80_0000,
                        bits => bits,
                    },
                }))
            };
            let rows = vec![row(), row(), row(), Aligned([0; 32])];
            for alu in [
                Alu::MovB32,
                Alu::AddF32,
                Alu::SubF32,
                Alu::MulF32,
                Alu::FmaF32,
                Alu::MaxF32,
                Alu::Ex2ApproxFtzF32,
                Alu::CvtRnF16x2F32,
                Alu::AddU32,
                Alu::SubS32,
                Alu::MulLoU32,
                Alu::AndB32,
                Alu::OrB32,
                Alu::XorB32,
                Alu::ShlB32,
                Alu::ShrU32,
                Alu::SelpF32,
            ] {
                let mut rows = rows.clone();
                if matches!(alu, Alu::ShlB32 | Alu::ShrU32) {
                    rows[1].iter_mut().for_each(|n| *n %= 40);
                }
                let step = Exec::Alu(AluInst { alu, d: 3, s: [0, 1, 2, 0] });
                let run = |level: Level| {
                    let pred = vec![0, 0, 0xF0F0_1234];
                    let mut regs = Regs { r32: rows.clone(), init32: vec![0; 4], pred, ..Regs::default() };
                    vectors::run_steps(level, &mut regs, &[step], u32::MAX);
                    assert_eq!(regs.init32, [0, 0, 0, u32::MAX]);
                    *regs.r32[3]
                };
                let want = run(Level::Baseline);
                for level in [Level::Avx2, Level::Avx512].into_iter().filter(|&level| level <= best) {
                    let got = run(level);
                    let lane = (0..32).find(|&l| got[l] != want[l]);
                    let of = lane.map(|l| (rows[0][l], rows[1][l], rows[2][l], got[l], want[l]));
                    assert_eq!(of, None, "{alu:?} {level:?}: operands, result, and what it should be");
                }
            }
        }
    }
    #[test]
    fn every_level_compares_integers_alike() {
        let (mut random, best) = (Random::new(9), Level::detect());
        let mut row =
            || Aligned(std::array::from_fn(|_| [0, 1, 7, 0x7FFF_FFFF, 0x8000_0000, !0][random.below(6)]));
        let rows = vec![row(), row()];
        for ty in [NumType::S32, NumType::U32] {
            for cmp in [Cmp::Eq, Cmp::Ne, Cmp::Lt, Cmp::Le, Cmp::Gt, Cmp::Ge] {
                let step = Exec::Setp(SetpInst { cmp, ty, d: 0, a: 0, b: 1 });
                let run = |level: Level| {
                    let (pred, init_pred) = (vec![0xDEAD_BEEF], vec![0]);
                    let mut regs = Regs { r32: rows.clone(), pred, init_pred, ..Regs::default() };
                    vectors::run_steps(level, &mut regs, &[step], u32::MAX);
                    (regs.pred[0], regs.init_pred[0])
                };
                let want = run(Level::Baseline);
                assert_eq!(want.1, u32::MAX);
                for level in [Level::Avx2, Level::Avx512].into_iter().filter(|&level| level <= best) {
                    assert_eq!(run(level), want, "{cmp:?} {ty:?} {level:?}");
                }
            }
        }
    }
}
