//! Where the rows of 8x8 matrices lie in shared memory: everything that `ldmatrix` and `stmatrix` must know of their
//! addresses, found out at once; and the matrices themselves, read from there.

use crate::machine::RANK_SHIFT;
use crate::machine::regs::{Aligned, Row};
use crate::races::shared_shadow::{CELL, PAGE, PAGE_BYTES};
use crate::vectors::mma;

/// The addresses of the rows of four matrices, eight rows of 16 bytes each, and what is known of them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Survey {
    /// The addresses.
    pub addresses: Row,
    /// The rows that are aligned and end before the end.
    pub inside: u32,
    /// The rows that are in the same page as the first row of their matrix.
    pub together: u32,
    /// The cells of the rows of each matrix in their pages, one bit per cell.
    pub cells: [u64; 4],
    /// The same, one byte per row.
    pub rows: [u64; 4],
}

impl Survey {
    /// Nothing yet.
    pub const NONE: Survey =
        Survey { addresses: [0; 32], inside: 0, together: 0, cells: [0; 4], rows: [0; 4] };

    /// The page of the first row of a matrix.
    #[inline(always)]
    pub fn page(&self, matrix: usize) -> u32 {
        self.addresses[8 * matrix] / PAGE_BYTES
    }

    /// Whether the rows of a matrix are known to use every bank of shared memory once.
    #[inline(always)]
    pub fn free_of_conflicts(&self, matrix: usize) -> bool {
        let halves = self.cells[matrix] | self.cells[matrix] >> 32;
        let quarters = halves | halves >> 16;
        (self.inside >> (8 * matrix)) as u8 == u8::MAX && (quarters | quarters >> 8) as u8 == u8::MAX
    }
}

/// Surveys the addresses `base + offset` of rows in the block of rank `own`, whose shared memory ends at `end`. The rank
/// may be part of the addresses.
#[inline(always)]
pub fn survey(base: &Row, offset: u32, own: u32, end: u32, out: &mut Survey) {
    *out = Survey::NONE;
    for (l, base) in base.iter().enumerate() {
        let address = base.wrapping_add(offset);
        let rank = if address >> RANK_SHIFT == own { own << RANK_SHIFT } else { 0 };
        out.addresses[l] = address - rank;
        let (address, matrix) = (out.addresses[l], l / 8);
        let cell = u64::from(address / CELL % PAGE as u32);
        let inside = address.is_multiple_of(CELL) && address < end && end - address >= CELL;
        out.inside |= u32::from(inside) << l;
        out.together |= u32::from(address / PAGE_BYTES == out.page(matrix)) << l;
        out.cells[matrix] |= 1 << cell;
        out.rows[matrix] |= cell << (8 * (l % 8));
    }
}

/// Loads 8x8 matrices of 16-bit elements, each into a row of registers, from rows that are all inside of memory.
#[inline(always)]
pub fn load(bytes: &[u8], addresses: &Row, trans: bool, to: &[u32], regs: &mut [Aligned<Row>]) {
    for (rows, &register) in addresses.as_chunks::<8>().0.iter().zip(to) {
        let matrix = &mut regs[register as usize];
        for (words, &at) in matrix.as_chunks_mut::<4>().0.iter_mut().zip(rows) {
            let row = &bytes[at as usize..][..CELL as usize];
            for (word, bytes) in words.iter_mut().zip(row.as_chunks().0) {
                *word = u32::from_le_bytes(*bytes);
            }
        }
        if trans {
            matrix.0 = mma::transposed(matrix);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::banks;
    use crate::vectors::{self, Level};

    fn levels() -> impl Iterator<Item = Level> {
        let best = Level::detect();
        [Level::Baseline, Level::Avx2, Level::Avx512].into_iter().filter(move |&level| level <= best)
    }

    #[test]
    fn every_level_finds_the_same_rows_cells_and_conflicts() {
        let layouts: [fn(u32) -> u32; 7] = [
            |l| 4096 + 128 * l + 16 * (l % 8),
            |l| 128 * l,
            |l| 256 * (l % 8) + 16 * (l / 8) + 16 * (l % 8),
            |l| 16 * l + 8,
            |l| 1024 * l,
            |l| (3 << RANK_SHIFT) + 128 * l,
            |l| ((l % 5) << RANK_SHIFT) + u32::MAX / 2 * (l % 3),
        ];
        for (layout, end) in layouts.into_iter().flat_map(|layout| [(layout, 5000), (layout, 8)]) {
            let base: Row = std::array::from_fn(|l| layout(l as u32).wrapping_sub(96));
            let mut surveyed = Survey::NONE;
            survey(&base, 96, 3, end, &mut surveyed);
            for level in levels() {
                let mut found = Survey::NONE;
                vectors::survey(level, &base, 96, 3, end, &mut found);
                assert_eq!(found, surveyed, "{level:?}");
            }
            for (matrix, rows) in surveyed.addresses.as_chunks::<8>().0.iter().enumerate() {
                let pages = rows.map(|row| row / 1024);
                assert_eq!(surveyed.page(matrix), pages[0]);
                for (r, row) in rows.iter().enumerate() {
                    let bit = |rows: u32| rows >> (8 * matrix + r) & 1 == 1;
                    assert_eq!(bit(surveyed.together), pages[r] == pages[0]);
                    assert_eq!(bit(surveyed.inside), row % 16 == 0 && u64::from(*row) + 16 <= u64::from(end));
                }
                assert_eq!(surveyed.rows[matrix].to_le_bytes().map(u32::from), rows.map(|row| row / 16 % 64));
                let cells = rows.iter().fold(0, |cells, row| cells | 1 << (row / 16 % 64));
                assert_eq!(surveyed.cells[matrix], cells);
                assert!(!surveyed.free_of_conflicts(matrix) || banks::row_passes(rows) == 1);
            }
        }
        let mut swizzled = Survey::NONE;
        survey(&std::array::from_fn(|l| 128 * l as u32 + 16 * (l as u32 % 8)), 0, 0, 4096, &mut swizzled);
        assert!((0..4).all(|matrix| swizzled.free_of_conflicts(matrix)));
    }

    #[test]
    fn every_level_loads_the_same_matrices_straight_and_turned_around() {
        let bytes: Vec<u8> = (0..4096u32).map(|i| ((i * 37) >> 3) as u8).collect();
        let addresses: Row = std::array::from_fn(|l| (l as u32 * 7 % 32) * 128 + 16 * (l as u32 % 8));
        for (trans, count) in [(false, 4), (true, 4), (false, 2), (true, 1)] {
            let to = &[5, 0, 3, 2][..count];
            let mut want = vec![Aligned([0; 32]); 6];
            load(&bytes, &addresses, trans, to, &mut want);
            for level in levels() {
                let mut regs = vec![Aligned([0; 32]); 6];
                vectors::load_matrices(level, &bytes, &addresses, trans, to, &mut regs);
                assert!(regs.iter().zip(&want).all(|(got, want)| **got == **want), "{level:?}");
            }
            let first = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            assert_eq!(want[5][0] & 0xFFFF, first & 0xFFFF);
        }
    }
}
