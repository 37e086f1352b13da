//! Where the rows of 8x8 matrices lie in shared memory: what `ldmatrix` and `stmatrix` have to ask of their addresses, all
//! of it found out in one go.

use crate::regs::Row;
use crate::shadow::{CELL, PAGE, PAGE_BYTES};

/// Where the eight rows of a matrix lie, 16 bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixRows {
    /// All bits that occur in their addresses.
    pub bits: u32,
    /// The largest of their addresses.
    pub largest: u32,
    /// The page of the first row.
    pub page: u32,
    /// Whether all rows are in that page.
    pub in_one_page: bool,
    /// The cells of the rows in their pages, one bit a cell.
    pub cells: u64,
    /// The same, a byte a row.
    pub rows: u64,
}

impl MatrixRows {
    /// Whether the rows are aligned and together use every bank of shared memory once.
    #[inline(always)]
    pub fn free_of_conflicts(&self) -> bool {
        let halves = self.cells | self.cells >> 32;
        let quarters = halves | halves >> 16;
        self.bits.is_multiple_of(CELL) && (quarters | quarters >> 8) as u8 == u8::MAX
    }

    /// Whether the rows are aligned and end before this address.
    #[inline(always)]
    pub fn lie_below(&self, end: u32) -> bool {
        self.bits.is_multiple_of(CELL) && self.largest < end && self.largest + CELL <= end
    }
}

/// Looks at the addresses of the rows of four matrices.
#[inline(always)]
pub fn survey(addresses: &Row) -> [MatrixRows; 4] {
    // Loops without branches over all lanes and then over each eight, so that they become a few vector instructions.
    let (mut cell, mut bit, mut byte) = ([0u64; 32], [0u64; 32], [0u64; 32]);
    for l in 0..32 {
        cell[l] = u64::from(addresses[l] / CELL % PAGE as u32);
        bit[l] = 1 << cell[l];
        byte[l] = cell[l] << (8 * (l % 8));
    }
    std::array::from_fn(|matrix| {
        let first = 8 * matrix;
        let page = addresses[first] / PAGE_BYTES;
        let (mut bits, mut largest, mut apart, mut cells, mut rows) = (0, 0, 0, 0, 0);
        for l in first..first + 8 {
            bits |= addresses[l];
            largest = addresses[l].max(largest);
            apart |= (addresses[l] / PAGE_BYTES) ^ page;
            cells |= bit[l];
            rows |= byte[l];
        }
        MatrixRows { bits, largest, page, in_one_page: apart == 0, cells, rows }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::banks;
    use crate::simd::{self, Level};

    #[test]
    fn every_level_finds_the_same_rows_cells_and_conflicts() {
        let best = Level::detect();
        let layouts: [fn(u32) -> u32; 5] = [
            |l| 4096 + 128 * l + 16 * (l % 8),
            |l| 128 * l,
            |l| 256 * (l % 8) + 16 * (l / 8) + 16 * (l % 8),
            |l| 16 * l + 8,
            |l| 1024 * l,
        ];
        for layout in layouts {
            let addresses: Row = std::array::from_fn(|l| layout(l as u32));
            let surveyed = survey(&addresses);
            for level in [Level::Baseline, Level::Avx2, Level::Avx512].into_iter().filter(|&l| l <= best) {
                assert_eq!(simd::survey(level, &addresses), surveyed, "{level:?}");
            }
            for (rows, of) in addresses.as_chunks::<8>().0.iter().zip(&surveyed) {
                let pages: Vec<u32> = rows.iter().map(|row| row / 1024).collect();
                assert_eq!((of.page, of.in_one_page), (pages[0], pages.iter().all(|&page| page == pages[0])));
                assert_eq!(of.rows.to_le_bytes().map(u32::from), rows.map(|row| row / 16 % 64));
                assert_eq!(of.cells, rows.iter().fold(0, |cells, row| cells | 1 << (row / 16 % 64)));
                assert!(!of.free_of_conflicts() || banks::row_passes(rows) == 1);
                assert_eq!(of.lie_below(5000), rows.iter().all(|row| row % 16 == 0 && row + 16 <= 5000));
            }
        }
        let swizzled: Row = std::array::from_fn(|l| 128 * l as u32 + 16 * (l as u32 % 8));
        assert!(survey(&swizzled).iter().all(MatrixRows::free_of_conflicts));
    }
}
