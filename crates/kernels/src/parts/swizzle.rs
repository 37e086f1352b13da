//! Tiles of 16-bit elements in shared memory, laid out so that neither copies nor matrix loads have bank conflicts.
//!
//! A tile is cut into panels of 64, 32 or 16 columns, whichever is the widest that divides it. A panel's rows lie one
//! after another, and inside a row the 16-byte chunks are permuted: the chunk's index is XORed with the number of the
//! 128-byte line that holds the row. Eight rows of one column then fall on eight different groups of four banks, which
//! is what `ldmatrix`, `cp.async` and 16-byte accesses need.

/// Bytes of a chunk: the unit of `cp.async` and of a row of `ldmatrix`.
pub const CHUNK: u32 = 16;

/// A swizzled tile of `rows` × `cols` 16-bit elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Rows: queries or keys.
    pub rows: u32,
    /// Columns: a head dim, rounded up to a multiple of 16.
    pub cols: u32,
}

impl Tile {
    /// A tile for rows of `head_dim` elements.
    pub fn new(rows: u32, head_dim: u32) -> Self {
        Self { rows, cols: head_dim.next_multiple_of(16) }
    }

    /// Bytes in all.
    pub fn bytes(self) -> u32 {
        self.rows * self.cols * 2
    }

    /// Columns of a panel.
    pub fn panel(self) -> u32 {
        1 << self.cols.trailing_zeros().min(6)
    }

    /// Panels side by side.
    pub fn panels(self) -> u32 {
        self.cols / self.panel()
    }

    /// Bytes from one row to the next inside a panel.
    pub fn pitch(self) -> u32 {
        self.panel() * 2
    }

    /// Bytes of a panel.
    pub fn panel_bytes(self) -> u32 {
        self.rows * self.pitch()
    }

    /// 16-byte chunks of a row of a panel.
    pub fn chunks(self) -> u32 {
        self.pitch() / CHUNK
    }

    /// What the chunk index of a row is XORed with: `(row >> shift) & mask`.
    pub fn swizzle(self) -> (u32, u32) {
        ((128 / self.pitch()).trailing_zeros(), self.chunks() - 1)
    }

    /// The offset of the chunk that holds columns `8·chunk` and following of `row`.
    #[cfg(test)]
    pub fn offset(self, row: u32, chunk: u32) -> u32 {
        let (shift, mask) = self.swizzle();
        let (panel, chunk) = (chunk / self.chunks(), chunk % self.chunks());
        panel * self.panel_bytes() + row * self.pitch() + (chunk ^ ((row >> shift) & mask)) * CHUNK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD_DIMS: [u32; 9] = [8, 16, 40, 64, 72, 96, 128, 192, 256];

    #[test]
    fn every_chunk_has_a_place_of_its_own() {
        for head_dim in HEAD_DIMS {
            let tile = Tile::new(64, head_dim);
            let mut seen = vec![false; (tile.bytes() / CHUNK) as usize];
            for row in 0..tile.rows {
                for chunk in 0..tile.cols / 8 {
                    let slot = &mut seen[(tile.offset(row, chunk) / CHUNK) as usize];
                    assert!(!*slot, "head_dim {head_dim}, row {row}, chunk {chunk}");
                    *slot = true;
                }
            }
            assert!(seen.iter().all(|&seen| seen));
        }
    }

    #[test]
    fn eight_rows_of_a_chunk_fall_on_eight_bank_groups() {
        for head_dim in HEAD_DIMS {
            let tile = Tile::new(64, head_dim);
            for first in (0..tile.rows).step_by(8) {
                for chunk in 0..tile.cols / 8 {
                    let mut groups: Vec<u32> =
                        (first..first + 8).map(|row| tile.offset(row, chunk) / CHUNK % 8).collect();
                    groups.sort_unstable();
                    assert_eq!(groups, [0, 1, 2, 3, 4, 5, 6, 7], "head_dim {head_dim}, rows from {first}");
                }
            }
        }
    }
}
