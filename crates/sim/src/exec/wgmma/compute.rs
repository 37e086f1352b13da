//! A product computed into the accumulators of its four warps.

use flashcore_ptx::{AccTy, MatrixTy};

use crate::exec::matrix::multiply;
use crate::exec::wgmma::{ASource, Product};
use crate::machine::Cluster;
use crate::machine::regs::{Aligned, Row};
use crate::machine::warp::Warp;
use crate::memory::descriptor::Descriptor;
use crate::memory::shared::SharedMemory;
use crate::program::Slot;
use crate::vectors::mma::{self, ATile, BTile};
use crate::vectors::short::{self, ShortSum};
use crate::vectors::{self, Level};

impl Cluster<'_> {
    /// Computes a product into the accumulators of the four warps.
    pub(super) fn compute(&mut self, first: usize, product: &Product) {
        let level = self.launch.level;
        let form = &product.form;
        let short = self.short_sum(form.a, form.b, form.acc, short::WGMMA_BLOCK);
        let shared = &self.blocks[self.warps[first].block].shared;
        let tiles = &mut *self.tiles;
        let columns = u32::from(form.n);
        read_operand(level, shared, &product.b, form.trans_b, form.b, columns, &mut tiles.b_rows);
        if form.negate_b {
            tiles.b_rows.iter_mut().for_each(|fragment| negate(form.b, fragment));
        }
        tiles.b_columns.resize(usize::from(form.n) / 8, [[0.0; 16]; 16]);
        for (tile, rows) in tiles.b_columns.iter_mut().zip(tiles.b_rows.as_chunks::<2>().0) {
            vectors::read_b(level, form.b, &[&*rows[0], &*rows[1]], tile);
        }
        if let ASource::Shared(descriptor) = &product.a {
            read_operand(level, shared, descriptor, form.trans_a, form.a, 64, &mut tiles.a_rows);
        }
        let program = self.launch.program;
        let accumulators = program.dst(&program.code[product.pc as usize]);
        for (place, warp) in self.warps[first..first + 4].iter_mut().enumerate() {
            let mut a: [Row; 4] = match &product.a {
                // They were read in the order of B, two fragments for eight rows; A has the rows first.
                ASource::Shared(_) => [0, 2, 1, 3].map(|i| *tiles.a_rows[4 * place + i]),
                ASource::Rows(fragment) => fragment.map(|row| *warp.regs.r32[row as usize]),
            };
            if form.negate_a {
                for fragment in &mut a {
                    negate(form.a, fragment);
                }
            }
            let wide = &mut tiles.a[0];
            if !wide.is_of(form.a, &a.each_ref()) {
                vectors::read_a(level, form.a, &a.each_ref(), &mut wide.tile);
            }
            if !product.scale_d {
                for &slot in accumulators {
                    *accumulator(warp, slot) = [0; 32];
                }
            }
            let (a, depth) = (&wide.tile, usize::from(form.k()));
            if form.acc == AccTy::F32 {
                for (tiles, slots) in tiles.b_columns.chunks(2).zip(accumulators.chunks(8)) {
                    multiply_columns(level, short, depth, a, tiles, warp, slots);
                }
            } else {
                for (tile, slots) in tiles.b_columns.iter().zip(accumulators.chunks_exact(2)) {
                    let [low, high] = [0, 1].map(|i| *accumulator(warp, slots[i]));
                    let mut acc = mma::unpack_f16([&low, &high]);
                    multiply(level, short, depth, a, tile, acc.each_mut());
                    let sums = mma::pack_f16(&acc);
                    slots.iter().zip(&sums).for_each(|(&slot, sum)| *accumulator(warp, slot) = *sum);
                }
            }
        }
    }
}

/// Reads an operand in shared memory as fragments: for eight rows each, one for the first half of k and one for the
/// second.
fn read_operand(
    level: Level,
    shared: &SharedMemory,
    descriptor: &Descriptor,
    mn_major: bool,
    ty: MatrixTy,
    rows: u32,
    fragments: &mut Vec<Aligned<Row>>,
) {
    // A chunk along the rows has 16-bit elements of one k: eight of them are the matrix turned around.
    debug_assert!(!mn_major || ty.bits() == 16);
    fragments.resize(rows as usize / 4, Aligned([0; 32]));
    for (four, fragments) in fragments.chunks_mut(4).enumerate() {
        let mut addresses: Row = [0; 32];
        for (l, address) in (0..).zip(&mut addresses[..8 * fragments.len()]) {
            let (eight, half, i) = (2 * four as u32 + l / 16, l / 8 % 2, l % 8);
            *address = if mn_major {
                descriptor.mn_major(eight, 8 * half + i)
            } else {
                descriptor.k_major(8 * eight + i, half)
            };
        }
        let to = &[0, 1, 2, 3][..fragments.len()];
        vectors::load_matrices(level, shared.bytes(), &addresses, mn_major, to, fragments);
    }
}

/// Changes the sign of every element.
fn negate(ty: MatrixTy, fragment: &mut Row) {
    let signs = if ty.bits() == 16 { 0x8000_8000 } else { 0x8080_8080 };
    for word in fragment {
        *word ^= signs;
    }
}

/// Where an accumulator is: set aside while a late product is in flight and somebody has looked at it.
pub(super) fn accumulator(warp: &mut Warp, slot: Slot) -> &mut Row {
    let row = slot.word() as usize;
    if warp.wgmma.rows[row].held { &mut warp.wgmma.held[row] } else { &mut warp.regs.r32[row] }
}

/// Multiplies by one or two tiles of columns, into four accumulators for each tile. Two tiles are computed at once if all
/// accumulators are in the same place.
fn multiply_columns(
    level: Level,
    short: Option<ShortSum>,
    depth: usize,
    a: &ATile,
    tiles: &[BTile],
    warp: &mut Warp,
    slots: &[Slot],
) {
    if short.is_none()
        && let ([first, second], Ok(rows)) = (tiles, <&[Slot; 8]>::try_from(slots))
    {
        let rows = rows.map(Slot::word);
        let held = warp.wgmma.rows[rows[0] as usize].held;
        if rows.iter().all(|&row| warp.wgmma.rows[row as usize].held == held) {
            let file = if held { &mut warp.wgmma.held } else { &mut warp.regs.r32 };
            let [a0, a1, a2, a3, b0, b1, b2, b3] = rows;
            let sums = [[a0, a1, a2, a3], [b0, b1, b2, b3]];
            return vectors::multiply_two(level, depth, a, [first, second], file, sums, sums);
        }
    }
    for (tile, slots) in tiles.iter().zip(slots.chunks_exact(4)) {
        let mut values: [Row; 4] = std::array::from_fn(|i| *accumulator(warp, slots[i]));
        multiply(level, short, depth, a, tile, values.each_mut());
        slots.iter().zip(values).for_each(|(&slot, value)| *accumulator(warp, slot) = value);
    }
}
