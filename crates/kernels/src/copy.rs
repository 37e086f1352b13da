//! Copies of tiles from global into swizzled shared memory, by all threads of a block with `cp.async`.

use flashcore_ptx::{
    Addr, B32, B64, CpAsyncBytes, CpAsyncCache, KernelBuilder, L2Prefetch, Operand, Pred, Reg, Shared,
};

use crate::swizzle::{CHUNK, Tile};

/// How the threads of a block share the copy of a tile: a thread has one chunk column of a panel, in every so
/// many rows.
pub(crate) struct TileCopy {
    tile: Tile,
    head_dim: u32,
    /// Rows that all threads together cover at once.
    rows_at_once: u32,
    /// This thread's first row.
    row: Reg<B32>,
    /// The offset of its first chunk in the tile.
    offset: Reg<B32>,
    /// The offset of its first chunk from the tile's first row in global memory.
    source_offset: Reg<B64>,
    /// Bytes from one of its rows to the next.
    source_step: Reg<B64>,
    /// Holds where its chunk of the last panel lies beyond the head dim.
    padding: Option<Reg<Pred>>,
}

impl TileCopy {
    /// For rows that are `stride` bytes apart.
    pub fn new(k: &mut KernelBuilder, tile: Tile, head_dim: u32, threads: u32, stride: Reg<B64>) -> Self {
        let chunks = tile.chunks();
        let rows_at_once = threads / chunks;
        let tid = k.tid_x();
        let row = k.shr_u32(tid, chunks.trailing_zeros());
        let chunk = k.and_b32(tid, chunks - 1);
        let (shift, mask) = tile.swizzle();
        let line = k.shr_u32(row, shift);
        let xor = k.and_b32(line, mask);
        let place = k.xor_b32(chunk, xor);
        let place = k.shl_b32(place, CHUNK.trailing_zeros());
        let offset = k.mad_lo_u32(row, tile.pitch(), place);
        let wide_row = k.cvt_u64_u32(row);
        let column = k.mul_wide_u32(chunk, CHUNK);
        let source_offset = k.mad_lo_u64(wide_row, stride, column);
        let source_step = k.mul_lo_u64(stride, u64::from(rows_at_once));
        let padding = (head_dim < tile.cols).then(|| k.setp_eq_u32(chunk, chunks - 1));
        Self { tile, head_dim, rows_at_once, row, offset, source_offset, source_step, padding }
    }

    /// This thread's source for the tile whose first row is at an address.
    pub fn source(&self, k: &mut KernelBuilder, first_row: Reg<B64>) -> Reg<B64> {
        k.add_u64(first_row, self.source_offset)
    }

    /// Copies a tile to `slot` bytes after the start of an allocation. With `rows`, only so many rows exist; the
    /// others become zeros.
    pub fn start(
        &self,
        k: &mut KernelBuilder,
        to: Shared,
        slot: Option<Reg<B32>>,
        source: Reg<B64>,
        rows: Option<Reg<B32>>,
    ) {
        let base = k.shared_addr(to);
        let mut at = k.add_u32(base, self.offset);
        if let Some(slot) = slot {
            at = k.add_u32(at, slot);
        }
        let mut source = source;
        for first in (0..self.tile.rows).step_by(self.rows_at_once as usize) {
            if first > 0 {
                source = k.add_u64(source, self.source_step);
            }
            // The rows of the last turn may be fewer than the threads.
            let turn_rows = self.tile.rows - first;
            let copy = |k: &mut KernelBuilder| self.turn(k, at, source, first, rows);
            if turn_rows < self.rows_at_once {
                let inside = k.setp_lt_u32(self.row, turn_rows);
                k.if_(inside, copy);
            } else {
                copy(k);
            }
        }
    }

    /// One chunk of each panel.
    fn turn(&self, k: &mut KernelBuilder, at: Reg<B32>, source: Reg<B64>, first: u32, rows: Option<Reg<B32>>) {
        let row_bytes = rows.map(|rows| {
            let row = k.add_u32(self.row, first);
            let exists = k.setp_lt_s32(row, rows);
            k.selp_b32(CHUNK, 0u32, exists)
        });
        for panel in 0..self.tile.panels() {
            let last = panel + 1 == self.tile.panels();
            let bytes: Option<Operand<B32>> = match (row_bytes, self.padding.filter(|_| last)) {
                (None, None) => None,
                (Some(bytes), None) => Some(bytes.into()),
                (bytes, Some(padding)) => {
                    let bytes = bytes.map_or_else(|| Operand::from(CHUNK), Operand::from);
                    Some(k.selp_b32(0u32, bytes, padding).into())
                }
            };
            debug_assert!(self.head_dim + 8 >= self.tile.cols);
            let to: Addr<B32> = at.at((panel * self.tile.panel_bytes() + first * self.tile.pitch()) as i32);
            let from = source.at((panel * self.tile.pitch()) as i32);
            let prefetch = Some(L2Prefetch::B128);
            k.cp_async_hint(CpAsyncCache::Cg, CpAsyncBytes::B16, to, from, bytes, prefetch, None);
        }
    }
}
