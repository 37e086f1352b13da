//! The arithmetic of the tensor cores, on register fragments.
//!
//! Products of f16, bf16 and fp8 values are exact in f32. They are added to the accumulator one after the other,
//! k ascending, each addition rounded to nearest f32 (a fused multiply-add chain that starts from C). Hardware
//! adds blocks of products with truncation, so its low bits differ; both are within the usual error bounds. Sums of fp8
//! products are an exception, unless it is asked for otherwise: their bits are so few that [`short`](super::short)
//! models them.
//!
//! A fragment register of a 16-bit operand is an 8x8 matrix in row-major order over the lanes, two elements
//! per lane; of an 8-bit operand an 8x16 matrix, four elements per lane. An accumulator has four registers: rows
//! `lane / 4` and `lane / 4 + 8`, columns `2 (lane % 4)` and the one after it. Operands are widened to where the
//! lanes of the accumulators want them, so that a step of k is a fused multiply-add of whole registers.

use std::collections::HashMap;

use flashcore_ptx::MatrixTy;

use crate::machine::regs::{Aligned, Regs, Row};
use crate::numerics as num;

/// The deepest product.
const DEPTH: usize = 32;

/// Sixteen rows of A: for each k, and for the upper and the lower eight rows, what each lane multiplies by.
pub type ATile = [[[f32; 32]; 2]; DEPTH];

/// Eight columns of B. The even columns of a k stand together and so do the odd ones; [`quad`] says where.
pub type BTile = [[f32; 16]; DEPTH / 2];

/// Where the four even (0) or odd (1) columns of a k are in a [`BTile`]: the line, and the first place in it.
///
/// This is the order that 4x4 transpositions within the lines give.
#[inline(always)]
pub const fn quad(k: usize, odd: usize) -> (usize, usize) {
    (k / 8 * 4 + k % 4, odd * 8 + k % 8 / 4 * 4)
}

/// A widened, and what it was widened from: kernels multiply the same A by many Bs.
#[repr(C, align(64))]
pub struct WideA {
    /// As the lanes want it.
    pub tile: ATile,
    from: [Row; 4],
    ty: Option<MatrixTy>,
}

impl WideA {
    const NONE: WideA = WideA { tile: [[[0.0; 32]; 2]; DEPTH], from: [[0; 32]; 4], ty: None };

    /// Whether it was widened from this A; if not, it will be.
    #[inline(always)]
    pub fn is_of(&mut self, ty: MatrixTy, regs: &[&Row]) -> bool {
        // Without a branch for each word, so that it becomes a few vector instructions.
        let differs = |(a, b): (&&Row, &Row)| a.iter().zip(b).fold(0, |bits, (a, b)| bits | (a ^ b)) != 0;
        if regs.len() == 4 && self.ty == Some(ty) && !regs.iter().zip(&self.from).any(differs) {
            return true;
        }
        self.ty = (regs.len() == 4).then_some(ty);
        for (from, row) in self.from.iter_mut().zip(regs) {
            *from = **row;
        }
        false
    }
}

/// Tiles that are used again from product to product.
#[repr(C, align(64))]
pub struct Tiles {
    /// Two As, widened: warps with two blocks of rows multiply them in turns.
    pub a: [Box<WideA>; 2],
    /// The Bs of two products, widened.
    pub b: [BTile; 2],
    /// The A of a warpgroup as fragments, four per warp.
    pub a_rows: Vec<Aligned<Row>>,
    /// The B of a warpgroup as fragments, two for eight columns.
    pub b_rows: Vec<Aligned<Row>>,
    /// The columns of the B of a warpgroup, eight by eight, widened.
    pub b_columns: Vec<BTile>,
}

impl Default for Tiles {
    fn default() -> Self {
        Tiles {
            a: [(); 2].map(|()| Box::new(WideA::NONE)),
            b: [[[0.0; 16]; DEPTH / 2]; 2],
            a_rows: Vec::new(),
            b_rows: Vec::new(),
            b_columns: Vec::new(),
        }
    }
}

/// A product of a warp, m16n8k16 of 16-bit elements, added to f32: its operands are rows.
#[derive(Clone, Copy, Debug)]
pub struct MmaInst {
    /// The format of A.
    pub a_ty: MatrixTy,
    /// The format of B.
    pub b_ty: MatrixTy,
    /// The fragment of A.
    pub a: [u32; 4],
    /// The fragment of B.
    pub b: [u32; 2],
    /// What it is added to: the accumulators, or rows none of which is one.
    pub c: [u32; 4],
    /// The accumulators, four different rows.
    pub acc: [u32; 4],
    /// How it is computed together with those beside it.
    pub company: Company,
}

/// What a product of a run shares with those beside it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Company {
    /// Which of the two widened As it uses.
    slot: u8,
    /// The next product has the same A and needs nothing of this one: the two are computed at once.
    pub joined: bool,
    /// Its B, and that of the product it is computed with, are those that were widened before.
    pub same_b: bool,
}

impl Company {
    /// Which of the widened As the product uses.
    #[inline(always)]
    pub fn slot(self) -> usize {
        usize::from(self.slot)
    }
}

/// Finds out what each product of a run shares with those beside it. `seen` numbers the As.
pub fn acquaint(run: &mut [MmaInst], seen: &mut HashMap<[u32; 4], u8>) {
    let mut at = 0;
    // The products that were computed before this one, and have widened their Bs.
    let mut before = 0..0;
    while at < run.len() {
        let number = (seen.len() % 2) as u8;
        let slot = *seen.entry(run[at].a).or_insert(number);
        let joined = run.get(at + 1).is_some_and(|next| run[at].can_join(next));
        let now = at..at + 1 + usize::from(joined);
        let (earlier, present) = (&run[before.clone()], &run[now.clone()]);
        let wrote = |row: &u32| earlier.iter().any(|product| product.acc.contains(row));
        let same_b = earlier.len() == present.len()
            && present.iter().zip(earlier).all(|(a, b)| a.b == b.b && a.b_ty == b.b_ty)
            && !present.iter().flat_map(|product| &product.b).any(wrote);
        run[at].company = Company { slot, joined, same_b };
        at = now.end;
        before = now;
    }
}

impl MmaInst {
    /// Whether it can be computed at the same time as the product after it, by the same A.
    fn can_join(&self, next: &MmaInst) -> bool {
        let needs = |row: &u32| next.a.contains(row) || next.b.contains(row) || next.c.contains(row);
        self.a == next.a
            && self.a_ty == next.a_ty
            && !self.acc.iter().any(|row| needs(row) || next.acc.contains(row))
    }

    /// Takes over what it is added to. Its A and B have been widened by then: accumulators may be among their rows.
    #[inline(always)]
    pub fn begin(&self, regs: &mut Regs) {
        if self.c != self.acc {
            for (acc, c) in self.acc.into_iter().zip(self.c) {
                regs.r32[acc as usize] = regs.r32[c as usize];
            }
        }
        for row in self.acc {
            regs.init32[row as usize] = u32::MAX;
        }
    }
}

/// Computes products one after the other.
#[inline(always)]
pub fn multiply_all(regs: &mut Regs, products: &[MmaInst], tiles: &mut Tiles) {
    for inst in products {
        let row = |row: u32| -> &Row { &regs.r32[row as usize] };
        let a = &mut tiles.a[inst.company.slot()];
        if !a.is_of(inst.a_ty, &inst.a.map(row)) {
            read_a(inst.a_ty, &inst.a.map(row), &mut a.tile);
        }
        read_b(inst.b_ty, &inst.b.map(row), &mut tiles.b[0]);
        inst.begin(regs);
        if let Ok(acc) = regs.r32.get_disjoint_mut(inst.acc.map(|row| row as usize)) {
            multiply(16, &a.tile, &tiles.b[0], acc.map(|row| &mut **row));
        }
    }
}

/// Computes two products of one A at once, each from four rows into four. What one writes, the other does not read.
#[inline(always)]
pub fn multiply_two(
    depth: usize,
    a: &ATile,
    b: [&BTile; 2],
    rows: &mut [Aligned<Row>],
    from: [[u32; 4]; 2],
    to: [[u32; 4]; 2],
) {
    for ((b, from), to) in b.into_iter().zip(from).zip(to) {
        let mut sums = from.map(|row| *rows[row as usize]);
        multiply(depth, a, b, sums.each_mut());
        for (row, sum) in to.into_iter().zip(sums) {
            rows[row as usize] = Aligned(sum);
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

/// Elements per 32-bit register.
const fn per_register(ty: MatrixTy) -> usize {
    (32 / ty.bits()) as usize
}

/// Widens the A fragment of a warp.
#[inline(always)]
pub fn read_a(ty: MatrixTy, regs: &[&Row], tile: &mut ATile) {
    // Decided here, so that each format has loops of its own.
    match ty {
        MatrixTy::F16 => read_a_as(MatrixTy::F16, regs, tile),
        MatrixTy::Bf16 => read_a_as(MatrixTy::Bf16, regs, tile),
        ty => read_a_as(ty, regs, tile),
    }
}

#[inline(always)]
fn read_a_as(ty: MatrixTy, regs: &[&Row], tile: &mut ATile) {
    let per = per_register(ty);
    // Registers alternate between the upper and the lower eight rows, then go on along k.
    for (r, row) in regs.iter().enumerate() {
        for i in 0..per {
            let values = widen(ty, row, i);
            for t in 0..4 {
                let line = &mut tile[4 * per * (r / 2) + per * t + i][r % 2];
                for g in 0..8 {
                    line[4 * g..4 * g + 4].copy_from_slice(&[values[4 * g + t]; 4]);
                }
            }
        }
    }
}

/// Widens the B fragment of a warp.
#[inline(always)]
pub fn read_b(ty: MatrixTy, regs: &[&Row], tile: &mut BTile) {
    match ty {
        MatrixTy::F16 => read_b_as(MatrixTy::F16, regs, tile),
        MatrixTy::Bf16 => read_b_as(MatrixTy::Bf16, regs, tile),
        ty => read_b_as(ty, regs, tile),
    }
}

#[inline(always)]
fn read_b_as(ty: MatrixTy, regs: &[&Row], tile: &mut BTile) {
    let per = per_register(ty);
    for (r, row) in regs.iter().enumerate() {
        for i in 0..per {
            let values = widen(ty, row, i);
            for t in 0..4 {
                let k = 4 * per * r + per * t + i;
                for odd in 0..2 {
                    let (line, first) = quad(k, odd);
                    for j in 0..4 {
                        tile[line][first + j] = values[4 * (2 * j + odd) + t];
                    }
                }
            }
        }
    }
}

/// Multiplies sixteen rows by eight columns into four accumulator registers of f32.
#[inline(always)]
pub fn multiply(depth: usize, a: &ATile, b: &BTile, acc: [&mut Row; 4]) {
    match depth {
        8 => multiply_as::<8>(a, b, acc),
        16 => multiply_as::<16>(a, b, acc),
        _ => multiply_as::<32>(a, b, acc),
    }
}

#[inline(always)]
fn multiply_as<const DEPTH: usize>(a: &ATile, b: &BTile, mut acc: [&mut Row; 4]) {
    // Half of the lanes at a time, so that their sums stay in vector registers.
    for first in [0, 16] {
        let mut sums = [[0.0f32; 16]; 4];
        for (sum, acc) in sums.iter_mut().zip(&acc) {
            for l in 0..16 {
                sum[l] = f32::from_bits(acc[first + l]);
            }
        }
        for k in 0..DEPTH {
            for (r, sum) in sums.iter_mut().enumerate() {
                let (line, place) = quad(k, r % 2);
                let (x, y) = (&a[k][r / 2], &b[line]);
                for l in 0..16 {
                    sum[l] = x[first + l].mul_add(y[place + l % 4], sum[l]);
                }
            }
        }
        for (sum, acc) in sums.iter().zip(&mut acc) {
            for l in 0..16 {
                acc[first + l] = num::canonical(sum[l]);
            }
        }
    }
}

/// Widens the fragments of a product, A only where it is not the one that was widened last.
#[inline(always)]
pub fn widen_both(a_ty: MatrixTy, a: &[&Row], b_ty: MatrixTy, b: &[&Row], tiles: &mut Tiles) {
    let wide = &mut tiles.a[0];
    if !wide.is_of(a_ty, a) {
        read_a(a_ty, a, &mut wide.tile);
    }
    read_b(b_ty, b, &mut tiles.b[0]);
}

/// Turns an 8x8 matrix of 16-bit elements around: rows become columns.
#[inline(always)]
pub fn transposed(matrix: &Row) -> Row {
    let mut out = [0; 32];
    // Two rows and two columns at a time.
    for row in 0..4 {
        for column in 0..4 {
            let (upper, lower) = (matrix[8 * row + column], matrix[8 * row + 4 + column]);
            out[8 * column + row] = upper & 0xFFFF | lower << 16;
            out[8 * column + 4 + row] = upper >> 16 | lower & 0xFFFF_0000;
        }
    }
    out
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::vectors::{self, Level};

    /// Element (row, column) of a matrix of 16-bit elements in a register.
    fn half(matrix: &Row, row: usize, column: usize) -> u16 {
        (matrix[4 * row + column / 2] >> (16 * (column % 2))) as u16
    }

    #[test]
    fn a_matrix_turned_around_has_its_rows_as_columns() {
        let matrix: Row = std::array::from_fn(|l| ((2 * l as u32 + 1) << 16) | (2 * l as u32));
        let turned = transposed(&matrix);
        for (row, column) in (0..8).flat_map(|row| (0..8).map(move |column| (row, column))) {
            assert_eq!(half(&turned, column, row), half(&matrix, row, column));
        }
        assert_eq!(transposed(&turned), matrix);
    }

    /// `D = A B + C` by the definition: one fused multiply-add after the other, k ascending.
    fn defined(ty: MatrixTy, a: &[Row; 4], b: &[Row; 2], c: &[Row; 4]) -> [Row; 4] {
        let per = 32 / ty.bits() as usize;
        let value = |register: &Row, row: usize, column: usize| {
            let word = register[4 * row + column / per] >> (column % per * ty.bits() as usize);
            match ty {
                MatrixTy::F16 => num::f16_to_f32(word as u16),
                MatrixTy::Bf16 => num::bf16_to_f32(word as u16),
                MatrixTy::E4m3 => num::e4m3_to_f32(word as u8),
                MatrixTy::E5m2 => num::e5m2_to_f32(word as u8),
            }
        };
        let mut d = *c;
        for (m, n) in (0..16).flat_map(|m| (0..8).map(move |n| (m, n))) {
            let at = &mut d[m / 8 * 2 + n % 2][4 * (m % 8) + n / 2];
            let mut sum = f32::from_bits(*at);
            for k in 0..8 * per {
                let x = value(&a[m / 8 + k / (4 * per) * 2], m % 8, k % (4 * per));
                sum = x.mul_add(value(&b[k / (4 * per)], n, k % (4 * per)), sum);
            }
            *at = num::canonical(sum);
        }
        d
    }

    #[test]
    fn every_level_multiplies_each_format_to_the_bit_as_defined() {
        let (mut random, best) = (Random::new(7), Level::detect());
        for ty in [MatrixTy::F16, MatrixTy::Bf16, MatrixTy::E4m3, MatrixTy::E5m2] {
            for round in 0..20 {
                // All bit patterns at first, NaN and infinity among them; then numbers of moderate size.
                let mut row = |moderate: u32| -> Row {
                    std::array::from_fn(|_| {
                        let word = random.next() as u32;
                        if round < 3 { word } else { word & moderate }
                    })
                };
                let moderate = match ty {
                    MatrixTy::F16 => 0xBBFF_BBFF,
                    MatrixTy::Bf16 => 0xBFFF_BFFF,
                    _ => 0xBBBB_BBBB,
                };
                let a = [(); 4].map(|()| row(moderate));
                let b = [(); 2].map(|()| row(moderate));
                let c = [(); 4].map(|()| row(0xBFFF_FFFF));
                let want = defined(ty, &a, &b, &c);
                for level in [Level::Baseline, Level::Avx2, Level::Avx512].into_iter().filter(|&l| l <= best)
                {
                    let mut tiles = Tiles::default();
                    let mut d = c;
                    let depth = 256 / ty.bits() as usize;
                    vectors::read_a(level, ty, &a.each_ref(), &mut tiles.a[0].tile);
                    vectors::read_b(level, ty, &b.each_ref(), &mut tiles.b[0]);
                    vectors::multiply(level, depth, &tiles.a[0].tile, &tiles.b[0], d.each_mut());
                    assert_eq!(d, want, "{ty:?} {level:?}");
                    let mut rows: Vec<_> = c.iter().map(|row| Aligned(*row)).collect();
                    rows.resize(12, Aligned([0; 32]));
                    let (from, to) = ([[0, 1, 2, 3]; 2], [[4, 5, 6, 7], [8, 9, 10, 11]]);
                    let (a, b) = (&tiles.a[0].tile, &tiles.b[0]);
                    vectors::multiply_two(level, depth, a, [b, b], &mut rows, from, to);
                    assert!(rows[4..].iter().zip(want.iter().cycle()).all(|(row, want)| **row == *want));
                }
            }
        }
    }

    #[test]
    fn products_in_a_row_are_what_each_is_alone_even_where_one_feeds_the_next() {
        let (mut random, best) = (Random::new(11), Level::detect());
        let mut row = || Aligned(std::array::from_fn(|_| random.next() as u32 & 0x3BFF_3BFF));
        let rows: Vec<_> = (0..46).map(|_| row()).collect();
        let inst = |a, b, c, acc| MmaInst {
            a_ty: MatrixTy::F16,
            b_ty: MatrixTy::F16,
            a,
            b,
            c,
            acc,
            company: Company::default(),
        };
        let mut products = [
            inst([0, 1, 2, 3], [4, 5], [20, 21, 22, 23], [8, 9, 10, 11]),
            // The same A and other accumulators, then into A itself, then by the A that came of it.
            inst([0, 1, 2, 3], [6, 7], [12, 13, 14, 15], [12, 13, 14, 15]),
            inst([0, 1, 2, 3], [4, 5], [20, 20, 21, 21], [0, 1, 2, 3]),
            inst([0, 1, 2, 3], [6, 7], [8, 9, 10, 11], [8, 9, 10, 11]),
            // The B of one is what the one before has computed.
            inst([4, 5, 6, 7], [8, 9], [20, 21, 22, 23], [16, 17, 18, 19]),
            // Two As by the same two Bs; the last changes the first B before it is wanted again.
            inst([16, 17, 18, 19], [24, 25], [28, 29, 30, 31], [28, 29, 30, 31]),
            inst([16, 17, 18, 19], [26, 27], [32, 33, 34, 35], [32, 33, 34, 35]),
            inst([4, 5, 6, 7], [24, 25], [36, 37, 38, 39], [36, 37, 38, 39]),
            inst([4, 5, 6, 7], [26, 27], [40, 41, 42, 43], [24, 25, 44, 45]),
            inst([16, 17, 18, 19], [24, 25], [28, 29, 30, 31], [28, 29, 30, 31]),
            inst([16, 17, 18, 19], [26, 27], [32, 33, 34, 35], [32, 33, 34, 35]),
        ];
        acquaint(&mut products, &mut HashMap::new());
        let companies = products.map(|product| (product.company.joined, product.company.same_b));
        assert_eq!(companies.map(|(joined, _)| u8::from(joined)), [1, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0]);
        assert_eq!(companies.map(|(_, same)| u8::from(same)), [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        let mut want = rows.clone();
        for MmaInst { a, b, c, acc, .. } in products {
            let of = |row: u32| *want[row as usize];
            let sums = defined(MatrixTy::F16, &a.map(of), &b.map(of), &c.map(of));
            acc.iter().zip(sums).for_each(|(&row, sum)| want[row as usize] = Aligned(sum));
        }
        for level in [Level::Baseline, Level::Avx2, Level::Avx512].into_iter().filter(|&l| l <= best) {
            let mut regs = Regs { r32: rows.clone(), init32: vec![0; rows.len()], ..Regs::default() };
            vectors::multiply_all(level, &mut regs, &products, &mut Tiles::default());
            for (i, (got, want)) in regs.r32.iter().zip(&want).enumerate() {
                assert_eq!(**got, **want, "row {i} {level:?}");
            }
            let written = products.iter().flat_map(|product| product.acc);
            assert!(written.into_iter().all(|row| regs.init32[row as usize] == u32::MAX));
        }
    }
}
