//! Where the lanes of a warp read the operands of `mma` in swizzled tiles.

use flashcore_ptx::{Addr, B32, KernelBuilder, Reg, Shared};

use super::{
    fragment::Place,
    swizzle::{CHUNK, Tile},
};

/// Which operand of `mma` four 8×8 matrices make.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operand {
    /// 16 rows × 16 columns.
    A,
    /// Two B operands from rows of the transposed matrix: 16 rows × 16 columns of K.
    B,
    /// Two B operands from rows, each matrix transposed on its way: 16 rows × 16 columns of V.
    BTransposed,
}

/// Where a lane's row of `ldmatrix` starts.
pub(crate) struct LaneAddress {
    tile: Tile,
    /// For the first 16 columns of a panel.
    first: Reg<B32>,
}

impl LaneAddress {
    pub fn new(k: &mut KernelBuilder, tile: Tile, memory: Shared, place: Place, operand: Operand) -> Self {
        // Lane l gives row l % 8 of matrix l / 8. One bit of the matrix's index is its row half, the other its column
        // half, in the order that the operand needs.
        let row = k.and_b32(place.lane, 7u32);
        let low = k.bfe_u32(place.lane, 3u32, 1u32);
        let high = k.bfe_u32(place.lane, 4u32, 1u32);
        let (row_half, column_half) = if operand == Operand::B { (high, low) } else { (low, high) };
        let row = k.mad_lo_u32(row_half, 8u32, row);
        let (shift, mask) = tile.swizzle();
        let line = k.shr_u32(row, shift);
        let xor = k.and_b32(line, mask);
        let chunk = k.xor_b32(column_half, xor);
        let base = k.shared_addr(memory);
        let start = k.mad_lo_u32(row, tile.pitch(), base);
        Self { tile, first: k.mad_lo_u32(chunk, CHUNK, start) }
    }

    /// The tile.
    pub fn tile(&self) -> Tile {
        self.tile
    }

    /// The same some bytes further: a multiple of 16 rows, or a slot.
    pub fn moved(&self, k: &mut KernelBuilder, bytes: Option<Reg<B32>>) -> Self {
        Self { tile: self.tile, first: bytes.map_or(self.first, |bytes| k.add_u32(self.first, bytes)) }
    }

    /// For 16 columns of a panel; `column` counts in 16s. The chunk bits of an address are those of the swizzle alone,
    /// as tiles start at whole lines, so a step inside a panel is an XOR.
    pub fn step(&self, k: &mut KernelBuilder, column: u32) -> Reg<B32> {
        match column % (self.tile.chunks() / 2) {
            0 => self.first,
            column => k.xor_b32(self.first, 2 * column * CHUNK),
        }
    }

    /// The address for 16 rows and 16 columns, given the columns' step.
    pub fn at(&self, step: Reg<B32>, row: u32, column: u32) -> Addr<B32> {
        let panel = column / (self.tile.chunks() / 2);
        step.at((panel * self.tile.panel_bytes() + row * self.tile.pitch()) as i32)
    }
}
