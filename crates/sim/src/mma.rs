//! The arithmetic of the tensor cores, on register fragments.
//!
//! Products of f16, bf16 and fp8 values are exact in f32. They are added to the accumulator one after the other,
//! k ascending, each addition rounded to nearest f32 (a fused multiply-add chain that starts from C). Hardware
//! adds blocks of products with truncation, so its low bits differ; both are within the usual error bounds.
//!
//! A fragment register of a 16-bit operand is an 8x8 matrix in row-major order over the lanes, two elements a
//! lane; of an 8-bit operand an 8x16 matrix, four elements a lane. An accumulator has four registers: rows
//! `lane / 4` and `lane / 4 + 8`, columns `2 (lane % 4)` and the one after it. Here a row of the accumulator is
//! kept as `[columns 0 2 4 6 1 3 5 7]`, which is two contiguous runs of the registers.

use flashcore_ptx::MatrixTy;

use crate::numerics as num;
use crate::regs::Row;

/// The order in which a row of eight accumulator columns is kept.
pub const COLUMNS: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Sixteen rows of A, up to 32 deep.
pub type ATile = [[f32; 32]; 16];
/// Eight columns of B in the order of [`COLUMNS`], up to 32 deep.
pub type BTile = [[f32; 8]; 32];

/// Widens one element of a register.
#[inline(always)]
fn element(ty: MatrixTy, word: u32, i: usize) -> f32 {
    match ty {
        MatrixTy::F16 => num::f16_to_f32((word >> (16 * i)) as u16),
        MatrixTy::Bf16 => num::bf16_to_f32((word >> (16 * i)) as u16),
        MatrixTy::E4m3 => num::e4m3_to_f32((word >> (8 * i)) as u8),
        MatrixTy::E5m2 => num::e5m2_to_f32((word >> (8 * i)) as u8),
    }
}

/// Widens all elements of a fragment register, in lane order.
#[inline(always)]
fn widen<const PER: usize>(row: &Row, widen_one: impl Fn(u32, usize) -> f32) -> [[f32; PER]; 32] {
    let mut out = [[0.0; PER]; 32];
    for lane in 0..32 {
        for (i, value) in out[lane].iter_mut().enumerate() {
            *value = widen_one(row[lane], i);
        }
    }
    out
}

/// Reads the A fragment of a warp: `depth` is 8, 16 or 32.
#[inline(always)]
pub fn read_a(ty: MatrixTy, regs: &[&Row], tile: &mut ATile) {
    match ty {
        MatrixTy::F16 => read_a_as::<2>(regs, tile, |w, i| element(MatrixTy::F16, w, i)),
        MatrixTy::Bf16 => read_a_as::<2>(regs, tile, |w, i| element(MatrixTy::Bf16, w, i)),
        MatrixTy::E4m3 => read_a_as::<4>(regs, tile, |w, i| element(MatrixTy::E4m3, w, i)),
        MatrixTy::E5m2 => read_a_as::<4>(regs, tile, |w, i| element(MatrixTy::E5m2, w, i)),
    }
}

#[inline(always)]
fn read_a_as<const PER: usize>(regs: &[&Row], tile: &mut ATile, one: impl Fn(u32, usize) -> f32) {
    // Registers alternate between the upper and the lower eight rows, then go on along k.
    for (r, row) in regs.iter().enumerate() {
        let values = widen::<PER>(row, &one);
        let (first_row, first_k) = (8 * (r % 2), 4 * PER * (r / 2));
        for g in 0..8 {
            for t in 0..4 {
                tile[first_row + g][first_k + PER * t..][..PER].copy_from_slice(&values[4 * g + t]);
            }
        }
    }
}

/// Reads the B fragment of a warp.
#[inline(always)]
pub fn read_b(ty: MatrixTy, regs: &[&Row], tile: &mut BTile) {
    match ty {
        MatrixTy::F16 => read_b_as::<2>(regs, tile, |w, i| element(MatrixTy::F16, w, i)),
        MatrixTy::Bf16 => read_b_as::<2>(regs, tile, |w, i| element(MatrixTy::Bf16, w, i)),
        MatrixTy::E4m3 => read_b_as::<4>(regs, tile, |w, i| element(MatrixTy::E4m3, w, i)),
        MatrixTy::E5m2 => read_b_as::<4>(regs, tile, |w, i| element(MatrixTy::E5m2, w, i)),
    }
}

#[inline(always)]
fn read_b_as<const PER: usize>(regs: &[&Row], tile: &mut BTile, one: impl Fn(u32, usize) -> f32) {
    for (r, row) in regs.iter().enumerate() {
        let values = widen::<PER>(row, &one);
        for t in 0..4 {
            for i in 0..PER {
                let k = 4 * PER * r + PER * t + i;
                for (place, column) in COLUMNS.into_iter().enumerate() {
                    tile[k][place] = values[4 * column + t][i];
                }
            }
        }
    }
}

/// Multiplies sixteen rows by eight columns into four accumulator registers of f32.
#[inline(always)]
pub fn multiply(depth: usize, a: &ATile, b: &BTile, acc: &mut [Row; 4]) {
    match depth {
        8 => multiply_as::<8>(a, b, acc),
        16 => multiply_as::<16>(a, b, acc),
        _ => multiply_as::<32>(a, b, acc),
    }
}

#[inline(always)]
fn multiply_as<const DEPTH: usize>(a: &ATile, b: &BTile, acc: &mut [Row; 4]) {
    for half in 0..2 {
        // Four rows at a time, so that their sums stay in vector registers.
        for first in (0..8).step_by(4) {
            let mut sums = [[0.0f32; 8]; 4];
            for (r, sum) in sums.iter_mut().enumerate() {
                let lane = 4 * (first + r);
                for t in 0..4 {
                    sum[t] = f32::from_bits(acc[2 * half][lane + t]);
                    sum[4 + t] = f32::from_bits(acc[2 * half + 1][lane + t]);
                }
            }
            for k in 0..DEPTH {
                for (r, sum) in sums.iter_mut().enumerate() {
                    let x = a[8 * half + first + r][k];
                    for (s, y) in sum.iter_mut().zip(&b[k]) {
                        *s = x.mul_add(*y, *s);
                    }
                }
            }
            for (r, sum) in sums.iter().enumerate() {
                let lane = 4 * (first + r);
                for t in 0..4 {
                    acc[2 * half][lane + t] = num::canonical(sum[t]);
                    acc[2 * half + 1][lane + t] = num::canonical(sum[4 + t]);
                }
            }
        }
    }
}

/// Unpacks two registers of f16 pairs into four of f32.
pub fn unpack_f16(acc: [&Row; 2]) -> [Row; 4] {
    let half =
        |r: usize, shift: u32| -> Row { acc[r].map(|w| num::f16_to_f32((w >> shift) as u16).to_bits()) };
    [half(0, 0), half(0, 16), half(1, 0), half(1, 16)]
}

/// Packs four registers of f32 into two of f16 pairs.
pub fn pack_f16(acc: &[Row; 4]) -> [Row; 2] {
    let pair = |r: usize| -> Row {
        std::array::from_fn(|l| {
            let lo = num::f32_to_f16(f32::from_bits(acc[r][l]));
            let hi = num::f32_to_f16(f32::from_bits(acc[r + 1][l]));
            u32::from(hi) << 16 | u32::from(lo)
        })
    };
    [pair(0), pair(2)]
}
