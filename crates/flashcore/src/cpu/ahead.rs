//! Rows that will be needed soon, on their way into the cache.

use super::{rows::Rows, simd::Simd};

/// A cache line.
pub(super) const LINE: usize = 64;

/// What a micro-kernel asks for in passing: the cache line at `at` and the next one, those `step` bytes further, and so on,
/// two for every [`EVERY`](Self::EVERY) steps of its own.
///
/// So requests are spread: a core has only so many of them in flight, and more at once hold up the loads of the products
/// beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lines {
    pub at: *const u8,
    pub step: usize,
}

impl Lines {
    /// How many steps of a micro-kernel there are to a request.
    pub(super) const EVERY: usize = 4;

    /// Nothing but what lies at `near`, which is in the cache already.
    #[inline(always)]
    pub(super) fn none(near: *const f32) -> Self {
        Self { at: near.cast(), step: 0 }
    }
}

/// What a panel's step asks for: where outputs that are done will go, the next panel's queries, and keys and values of the
/// next block.
pub(super) type Coming = Ahead<4>;

/// Rows that will be needed soon.
pub(super) struct Ahead<const N: usize> {
    rows: [Rows; N],
    /// Which rows are at work, the first of them that is left, and the bytes of it that were asked for.
    which: usize,
    row: usize,
    asked: usize,
    /// Lines a tile.
    lines: usize,
}

impl<const N: usize> Ahead<N> {
    /// To be brought in beside about `tiles` tiles, in this order.
    pub(super) fn new(rows: [Rows; N], tiles: usize) -> Self {
        let rows = rows.map(Rows::without_gaps);
        let lines: usize = rows.iter().map(|rows| rows.count * rows.bytes().div_ceil(LINE)).sum();
        Self { rows, which: 0, row: 0, asked: 0, lines: lines.div_ceil(tiles.max(1)) }
    }

    /// What a micro-kernel of `steps` steps is to ask for; its own data begin at `near`.
    #[inline(always)]
    pub(super) fn beside<S: Simd>(&mut self, steps: usize, near: *const f32) -> Lines {
        let times = steps / Lines::EVERY;
        // One line at a time is better where that is enough.
        let pace = if self.lines > times { 2 * LINE } else { LINE };
        let most = times * pace;
        let Some(rows) = self.rows.get(self.which).filter(|_| most > 0) else { return Lines::none(near) };
        if rows.count > 1 {
            for _ in 0..self.lines {
                let Some((line, _)) = self.next(LINE) else { break };
                S::prefetch(line);
            }
            return Lines::none(near);
        }
        let Some((at, bytes)) = self.next(most) else { return Lines::none(near) };
        let step = if bytes == most { pace } else { bytes.div_ceil(times) };
        Lines { at, step }
    }

    /// The next `most` bytes, or as many as are left of a row.
    #[inline(always)]
    fn next(&mut self, most: usize) -> Option<(*const u8, usize)> {
        let mut rows = self.rows.get(self.which)?;
        while self.row == rows.count {
            (self.which, self.row) = (self.which + 1, 0);
            rows = self.rows.get(self.which)?;
        }
        let at = rows.at.wrapping_add(self.row * rows.stride * rows.dtype.size() + self.asked);
        let bytes = most.min(rows.bytes() - self.asked);
        self.asked += bytes;
        if self.asked == rows.bytes() {
            (self.row, self.asked) = (self.row + 1, 0);
        }
        Some((at, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, cpu::simd::Portable};

    fn rows(at: usize, stride: usize, count: usize, len: usize) -> Rows {
        Rows { at: std::ptr::without_provenance(at), dtype: DType::F16, stride, count, len }
    }

    #[test]
    fn every_byte_of_every_row_comes_once_and_in_order() {
        let given = [rows(0, 1000, 2, 40), rows(50_000, 8, 0, 8), rows(100_000, 16, 2, 16)];
        let mut ahead = Ahead::new(given, 2);
        let all: Vec<_> = std::iter::from_fn(|| ahead.next(64)).map(|(at, n)| (at.addr(), n)).collect();
        assert_eq!(all, [(0, 64), (64, 16), (2000, 64), (2064, 16), (100_000, 64)]);
    }

    /// What is asked for beside kernels of sixteen steps, four requests each, until nothing is left.
    fn asked(tiles: usize) -> Vec<(usize, usize)> {
        let mut ahead = Ahead::new([rows(0, 50, 0, 50), rows(6400, 50, 6, 50)], tiles);
        let next = || Some(ahead.beside::<Portable>(16, std::ptr::null()));
        let asked = std::iter::from_fn(next).take_while(|lines| lines.step > 0);
        asked.map(|lines| (lines.at.addr(), lines.step)).collect()
    }

    #[test]
    fn rows_without_gaps_come_a_line_a_time_where_that_is_enough() {
        assert_eq!(asked(3), [(6400, 64), (6656, 64), (6912, 22)]);
    }

    #[test]
    fn rows_without_gaps_come_two_lines_a_time_where_there_are_few_tiles() {
        assert_eq!(asked(1), [(6400, 128), (6912, 22)]);
    }
}
