//! Lines of global memory: warps mostly access 128 bytes with eight lanes, 16 bytes each, one lane after the other. Such
//! an access is checked once for the whole line.

use crate::machine::regs::Row64;
use crate::races::global_shadow::LINE;
use crate::races::shared_shadow::CELL;

/// The lanes of each eight that have an aligned line of cells, one cell after the other.
#[inline(always)]
pub fn whole_lines(addresses: &Row64) -> u32 {
    let mut lanes = 0;
    for (eight, cells) in addresses.as_chunks::<8>().0.iter().enumerate() {
        // Without a branch for each lane, so that it becomes a few vector instructions.
        let mut apart = cells[0] % LINE as u64;
        for (cell, i) in cells.iter().zip(0..) {
            apart |= cell ^ cells[0].wrapping_add(i * u64::from(CELL));
        }
        lanes |= u32::from(apart == 0) * (0xFF << (8 * eight));
    }
    lanes
}

/// The 32-byte sectors that a whole warp's access by four lines touches, if the lines are four.
#[inline]
pub fn sectors_of_four(addresses: &Row64) -> Option<u32> {
    let [a, b, c, d] = [addresses[0], addresses[8], addresses[16], addresses[24]];
    let apart = a != b && a != c && a != d && b != c && b != d && c != d;
    apart.then_some(4 * LINE as u32 / 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::banks;
    use crate::vectors::{self, Level};

    #[test]
    fn lines_are_found_where_eight_lanes_have_one_after_the_other() {
        let best = Level::detect();
        let mut rows: Row64 = std::array::from_fn(|l| 4096 + 1024 * (l as u64 / 8) + 16 * (l as u64 % 8));
        assert_eq!(sectors_of_four(&rows), Some(banks::sectors(&rows, u32::MAX)));
        for (change, want) in [
            ((0, rows[0]), u32::MAX),
            // Two lanes of the second eight change places, and the third eight begins within a line.
            ((9, rows[10]), !0xFF00),
            ((16, rows[16] + 16), !0xFF_FF00),
        ] {
            rows[change.0] = change.1;
            for level in [Level::Baseline, Level::Avx2, Level::Avx512].into_iter().filter(|&l| l <= best) {
                assert_eq!(vectors::whole_lines(level, &rows), want, "{level:?}");
            }
        }
        let again: Row64 = std::array::from_fn(|l| 4096 + 16 * (l as u64 % 8));
        assert_eq!((whole_lines(&again), sectors_of_four(&again)), (u32::MAX, None), "one line four times");
        let shifted: Row64 = std::array::from_fn(|l| 4096 + 64 + 16 * l as u64);
        assert_eq!(whole_lines(&shifted), 0, "not aligned");
    }
}
