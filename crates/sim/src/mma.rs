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

/// Where each of the eight columns stands in that order.
pub const PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Sixteen rows of A, up to 32 deep.
pub type ATile = [[f32; 32]; 16];
/// Eight columns of B in the order of [`COLUMNS`], up to 32 deep.
pub type BTile = [[f32; 8]; 32];

/// Tiles that are used again from product to product.
pub struct Tiles {
    /// A, widened.
    pub a: ATile,
    /// B, widened.
    pub b: BTile,
    /// Rows of the A of a warpgroup, widened.
    pub a_rows: Vec<[f32; 32]>,
    /// The columns of the B of a warpgroup, eight by eight, widened.
    pub b_columns: Vec<BTile>,
    /// What A was widened from: kernels multiply the same A by many Bs in a row.
    a_from: ([Row; 4], Option<MatrixTy>),
}

impl Default for Tiles {
    fn default() -> Self {
        Tiles {
            a: [[0.0; 32]; 16],
            b: [[0.0; 8]; 32],
            a_rows: Vec::new(),
            b_columns: Vec::new(),
            a_from: ([[0; 32]; 4], None),
        }
    }
}

/// Widens element `i` of a register of all lanes.
#[inline(always)]
fn widen(ty: MatrixTy, row: &Row, i: usize) -> [f32; 32] {
    let mut out = [0.0; 32];
    match ty {
        MatrixTy::F16 => {
            for l in 0..32 {
                out[l] = num::f16_to_f32((row[l] >> (16 * i)) as u16);
            }
        }
        MatrixTy::Bf16 => {
            for l in 0..32 {
                out[l] = num::bf16_to_f32((row[l] >> (16 * i)) as u16);
            }
        }
        MatrixTy::E4m3 => {
            for l in 0..32 {
                out[l] = num::e4m3_to_f32((row[l] >> (8 * i)) as u8);
            }
        }
        MatrixTy::E5m2 => {
            for l in 0..32 {
                out[l] = num::e5m2_to_f32((row[l] >> (8 * i)) as u8);
            }
        }
    }
    out
}

/// Elements a 32-bit register holds.
const fn per_register(ty: MatrixTy) -> usize {
    (32 / ty.bits()) as usize
}

/// Reads the A fragment of a warp, unless it is the one that was read last.
#[inline(always)]
pub fn read_a(ty: MatrixTy, regs: &[&Row], tiles: &mut Tiles) {
    let same = tiles.a_from.1 == Some(ty) && regs.iter().zip(&tiles.a_from.0).all(|(a, b)| *a == b);
    if same && regs.len() == 4 {
        return;
    }
    tiles.a_from.1 = (regs.len() == 4).then_some(ty);
    let per = per_register(ty);
    // Registers alternate between the upper and the lower eight rows, then go on along k.
    for (r, row) in regs.iter().enumerate() {
        tiles.a_from.0[r] = **row;
        let (first_row, first_k) = (8 * (r % 2), 4 * per * (r / 2));
        for i in 0..per {
            let values = widen(ty, row, i);
            for g in 0..8 {
                for t in 0..4 {
                    tiles.a[first_row + g][first_k + per * t + i] = values[4 * g + t];
                }
            }
        }
    }
}

/// Reads the B fragment of a warp.
#[inline(always)]
fn read_b(ty: MatrixTy, regs: &[&Row], tile: &mut BTile) {
    let per = per_register(ty);
    for (r, row) in regs.iter().enumerate() {
        for i in 0..per {
            let values = widen(ty, row, i);
            for t in 0..4 {
                let line = &mut tile[4 * per * r + per * t + i];
                for (place, column) in COLUMNS.into_iter().enumerate() {
                    line[place] = values[4 * column + t];
                }
            }
        }
    }
}

/// The operands of one `mma.sync`.
pub struct Fragments<'a> {
    /// A's element.
    pub a_ty: MatrixTy,
    /// B's element.
    pub b_ty: MatrixTy,
    /// A's registers: two or four.
    pub a: &'a [&'a Row],
    /// B's registers: one or two.
    pub b: &'a [&'a Row],
    /// The depth: 8, 16 or 32.
    pub depth: usize,
}

/// One `mma.sync` with f32 accumulators.
#[inline(always)]
pub fn mma(fragments: &Fragments<'_>, tiles: &mut Tiles, acc: &mut [Row; 4]) {
    // Told apart here, so that each format has loops of its own.
    match fragments.a_ty {
        MatrixTy::F16 => read_a(MatrixTy::F16, fragments.a, tiles),
        MatrixTy::Bf16 => read_a(MatrixTy::Bf16, fragments.a, tiles),
        ty => read_a(ty, fragments.a, tiles),
    }
    match fragments.b_ty {
        MatrixTy::F16 => read_b(MatrixTy::F16, fragments.b, &mut tiles.b),
        MatrixTy::Bf16 => read_b(MatrixTy::Bf16, fragments.b, &mut tiles.b),
        ty => read_b(ty, fragments.b, &mut tiles.b),
    }
    multiply(fragments.depth, &tiles.a, &tiles.b, acc);
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
        // Eight rows at a time, so that their sums stay in vector registers.
        let mut sums = [[0.0f32; 8]; 8];
        for (r, sum) in sums.iter_mut().enumerate() {
            for t in 0..4 {
                sum[t] = f32::from_bits(acc[2 * half][4 * r + t]);
                sum[4 + t] = f32::from_bits(acc[2 * half + 1][4 * r + t]);
            }
        }
        for k in 0..DEPTH {
            for (r, sum) in sums.iter_mut().enumerate() {
                let x = a[8 * half + r][k];
                for (s, y) in sum.iter_mut().zip(&b[k]) {
                    *s = x.mul_add(*y, *s);
                }
            }
        }
        for (r, sum) in sums.iter().enumerate() {
            for t in 0..4 {
                acc[2 * half][4 * r + t] = num::canonical(sum[t]);
                acc[2 * half + 1][4 * r + t] = num::canonical(sum[4 + t]);
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
