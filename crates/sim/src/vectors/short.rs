//! Sums of fp8 products as the tensor cores of Ada and Hopper make them: in fixed point, cut off.
//!
//! The accumulator and the products of some k, each exact, are lined up at the largest exponent among them, cut off
//! towards zero a number of bits below it, and added. The sum is cut off to the same number of bits, and is the next
//! accumulator. An exponent is that of the operands, as they are stored: the product of 1.5 and 1.5 has that of 1.
//!
//! Models that agree with the hardware to the bit have been published (MMA-Sim, arXiv 2511.10909): 13 bits below the
//! largest exponent; `wgmma` adds its 32 k at once, Ada's `mma.sync` 16 k at a time. Hopper's `mma.sync` keeps more.

use std::ops::Range;

use flashcore_ptx::{AccTy, MatrixTy};

use crate::machine::regs::Row;
use crate::numerics::canonical;
use crate::vectors::mma::{ATile, BTile, quad};

/// The k that one `wgmma` adds at once.
pub const WGMMA_BLOCK: usize = 32;

/// The k that `mma.sync` adds at once.
pub const MMA_BLOCK: usize = 16;

/// What zero counts as where the largest exponent is looked for.
pub const NONE: f32 = f32::MIN_POSITIVE;

/// The smallest number that sums are lined up at, so that the scales are normal numbers.
pub const LOWEST: f32 = f32::from_bits(27 << 23);

/// How products are added.
#[derive(Clone, Copy, Debug)]
pub struct ShortSum {
    /// The k that are added at once.
    pub block: usize,
    /// Two to the number of bits below the largest exponent.
    pub steps: f32,
    /// The bits of an f32 sum that are kept.
    pub keep: u32,
    /// The exponents of subnormal As and Bs, as powers of two.
    pub lowest: [f32; 2],
}

impl ShortSum {
    /// Sums of `bits` bits, the leading one included.
    pub fn new(bits: u8, block: usize, a: MatrixTy, b: MatrixTy, acc: AccTy) -> ShortSum {
        let bits = u32::from(bits);
        let lowest = |ty| f32::from_bits(if ty == MatrixTy::E4m3 { 127 - 6 } else { 127 - 14 } << 23);
        // What becomes an f16 is rounded to it at once.
        let keep = if acc == AccTy::F32 { u32::MAX << (24 - bits) } else { u32::MAX };
        ShortSum { block, steps: f32::from_bits((126 + bits) << 23), keep, lowest: [lowest(a), lowest(b)] }
    }
}

/// The exponent of an operand, as a power of two. Infinity and NaN have infinity.
#[inline(always)]
fn exponent(x: f32, lowest: f32) -> f32 {
    let power = f32::from_bits(x.to_bits() & 0x7F80_0000);
    if x == 0.0 { NONE } else { larger(power, lowest) }
}

/// The larger of two numbers, by one instruction: neither is NaN.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// Multiplies sixteen rows by eight columns of depth 32 into four accumulator registers of f32.
#[inline(always)]
pub fn multiply(how: &ShortSum, a: &ATile, b: &BTile, acc: [&mut Row; 4]) {
    let mut b_exponents: BTile = [[0.0; 16]; 16];
    for (exponents, line) in b_exponents.iter_mut().zip(b) {
        for l in 0..16 {
            exponents[l] = exponent(line[l], how.lowest[1]);
        }
    }
    let mut a_exponents: ATile = [[[0.0; 32]; 2]; 32];
    for (exponents, rows) in a_exponents.as_flattened_mut().iter_mut().zip(a.as_flattened()) {
        for l in 0..32 {
            exponents[l] = exponent(rows[l], how.lowest[0]);
        }
    }
    for (r, acc) in acc.into_iter().enumerate() {
        // Half of the lanes at a time, so that their sums stay in vector registers.
        for (half, acc) in acc.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            for block in (0..32).step_by(how.block).map(|first| first..first + how.block) {
                sum_up(how, (a, b), (&a_exponents, &b_exponents), (r, 16 * half), block, acc);
            }
        }
    }
}

/// Adds the products of some k to half of an accumulator register, whose lanes begin with `first`.
#[inline(always)]
fn sum_up(
    how: &ShortSum,
    (a, b): (&ATile, &BTile),
    (a_exponents, b_exponents): (&ATile, &BTile),
    (r, first): (usize, usize),
    block: Range<usize>,
    acc: &mut [u32; 16],
) {
    let c = acc.map(f32::from_bits);
    let mut top = [LOWEST; 16];
    for l in 0..16 {
        top[l] = larger(exponent(c[l], LOWEST), LOWEST);
    }
    for k in block.clone() {
        let (line, place) = quad(k, r % 2);
        let (x, y) = (&a_exponents[k][r / 2], &b_exponents[line]);
        for l in 0..16 {
            top[l] = larger(x[first + l] * y[place + l % 4], top[l]);
        }
    }
    let (mut scale, mut sums) = ([0.0; 16], [0.0; 16]);
    for l in 0..16 {
        scale[l] = how.steps / top[l];
        sums[l] = (c[l] * scale[l]).trunc();
    }
    for k in block.clone() {
        let (line, place) = quad(k, r % 2);
        let (x, y) = (&a[k][r / 2], &b[line]);
        for l in 0..16 {
            sums[l] += (x[first + l] * y[place + l % 4] * scale[l]).trunc();
        }
    }
    for l in 0..16 {
        acc[l] = (sums[l] * (top[l] / how.steps)).to_bits() & how.keep;
    }
    if top.iter().any(|top| top.is_infinite()) {
        // With an infinity or a NaN among them, there is nothing to cut off.
        for l in (0..16).filter(|&l| top[l].is_infinite()) {
            let sum = block.clone().fold(c[l], |sum, k| {
                let (line, place) = quad(k, r % 2);
                sum + a[k][r / 2][first + l] * b[line][place + l % 4]
            });
            acc[l] = canonical(sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics as num;
    use crate::random::Random;
    use crate::vectors::mma::Tiles;
    use crate::vectors::{self, Level};

    /// A number as steps of 2^-3 below its exponent, and that exponent. None where it is not finite.
    fn parts(ty: MatrixTy, code: u8) -> Option<(i128, i32)> {
        let (mantissa, bias) = if ty == MatrixTy::E4m3 { (3, 7) } else { (2, 15) };
        let (field, fraction) =
            (i32::from((code & 0x7F) >> mantissa), i128::from(code & ((1 << mantissa) - 1)));
        let special = if ty == MatrixTy::E4m3 { code & 0x7F == 0x7F } else { field == 31 };
        let leading = if field == 0 { 0 } else { 1 << mantissa };
        let sign = if code & 0x80 == 0 { 1 } else { -1 };
        (!special).then_some(((sign * (leading + fraction)) << (3 - mantissa), field.max(1) - bias))
    }

    /// `value * 2^exponent` in steps of 2^at, cut off towards zero.
    fn cut(value: i128, exponent: i32, at: i32) -> i128 {
        let shift = at - exponent;
        if shift <= 0 { value << -shift } else { value / (1 << shift.min(120)) }
    }

    /// One element by the definition, in whole numbers. None where something is not finite.
    fn defined(bits: i32, a: &[(MatrixTy, u8)], b: &[(MatrixTy, u8)], c: f32) -> Option<f32> {
        let field = (c.to_bits() >> 23 & 0xFF) as i32;
        assert!((1..255).contains(&field) || c == 0.0, "the accumulator is no subnormal here");
        let significand = i128::from(c.to_bits() & 0x7F_FFFF | 0x80_0000);
        let c = (
            if c == 0.0 {
                0
            } else if c < 0.0 {
                -significand
            } else {
                significand
            },
            field - 127,
        );
        // Products are in steps of 2^-6, the accumulator in steps of 2^-23 below their exponents.
        let mut terms = vec![(c.0, c.1, 23)];
        for (&(a_ty, a), &(b_ty, b)) in a.iter().zip(b) {
            let ((x, ex), (y, ey)) = (parts(a_ty, a)?, parts(b_ty, b)?);
            terms.push((x * y, ex + ey, 6));
        }
        let Some(top) = terms.iter().filter(|t| t.0 != 0).map(|t| t.1).max() else { return Some(0.0) };
        let unit = top - (bits - 1);
        let sum: i128 =
            terms.iter().map(|&(value, exponent, steps)| cut(value, exponent - steps, unit)).sum();
        let length = 128 - sum.unsigned_abs().leading_zeros() as i32;
        let extra = (length - bits).max(0);
        let kept = sum / (1 << extra) * (1 << extra);
        Some((kept as f64 * f64::from(unit).exp2()) as f32)
    }

    #[test]
    fn every_level_cuts_sums_off_as_defined() {
        use MatrixTy::{E4m3, E5m2};
        let (mut random, best) = (Random::new(3), Level::detect());
        for (a_ty, b_ty, bits, block) in [
            (E4m3, E4m3, 14, WGMMA_BLOCK),
            (E4m3, E5m2, 14, MMA_BLOCK),
            (E5m2, E4m3, 9, WGMMA_BLOCK),
            (E5m2, E5m2, 17, MMA_BLOCK),
        ] {
            for round in 0..24 {
                // All codes at first, NaN and infinity among them; then numbers far apart, then near each other.
                let mask = [u32::MAX, 0xBBBB_BBBB, 0x9797_9797][round % 3];
                let mut row = || -> Row { std::array::from_fn(|_| random.next() as u32 & mask) };
                let (a, b) = ([(); 4].map(|()| row()), [(); 2].map(|()| row()));
                let mut sums = || -> Row {
                    std::array::from_fn(|_| match random.next() {
                        r if r % 8 == 0 => 0,
                        r => (r as u32 & 0x807F_FFFF) | (110 + (r >> 32) as u32 % 30) << 23,
                    })
                };
                let c = [(); 4].map(|()| sums());
                let byte = |rows: &[Row], row: usize, k: usize, half: usize| {
                    (rows[k / 16 * (rows.len() / 2) + half][4 * row + k % 16 / 4] >> (8 * (k % 4))) as u8
                };
                let how = ShortSum::new(bits, block, a_ty, b_ty, AccTy::F32);
                let mut wide = Tiles::default();
                for level in [Level::Baseline, Level::Avx2, Level::Avx512].into_iter().filter(|&l| l <= best)
                {
                    vectors::read_a(level, a_ty, &a.each_ref(), &mut wide.a[0].tile);
                    vectors::read_b(level, b_ty, &b.each_ref(), &mut wide.b[0]);
                    let mut d = c;
                    vectors::multiply_short(level, &how, &wide.a[0].tile, &wide.b[0], d.each_mut());
                    for (m, n) in (0..16).flat_map(|m| (0..8).map(move |n| (m, n))) {
                        let (r, l) = (m / 8 * 2 + n % 2, 4 * (m % 8) + n / 2);
                        let x: Vec<_> = (0..32).map(|k| (a_ty, byte(&a, m % 8, k, m / 8))).collect();
                        let y: Vec<_> = (0..32).map(|k| (b_ty, byte(&b, n, k, 0))).collect();
                        let start = Some(f32::from_bits(c[r][l]));
                        let want = (0..32).step_by(block).fold(start, |c, k| {
                            defined(i32::from(bits), &x[k..k + block], &y[k..k + block], c?)
                        });
                        let got = f32::from_bits(d[r][l]);
                        match want {
                            Some(want) => assert_eq!(got, want, "{a_ty:?} {b_ty:?} {bits} {level:?} {m} {n}"),
                            None => {
                                assert!(!got.is_finite() && (!got.is_nan() || d[r][l] == num::CANONICAL_NAN));
                            }
                        }
                    }
                }
            }
        }
    }
}
