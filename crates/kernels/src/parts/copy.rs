//! Copies of tiles from global into swizzled shared memory, by all threads of a block with `cp.async`.

use flashcore_ptx::{
    B32, B64, CpAsyncBytes, CpAsyncCache, KernelBuilder, L2Prefetch, Operand, Pred, Reg, Shared,
};

use super::swizzle::{CHUNK, Tile};

/// The largest distance between two rows, in bytes, such that offsets within a tile fit in 32 bits.
pub const MAX_ROW_STRIDE: u64 = 1 << 23;

/// How the threads of a block share the copy of a tile: a thread copies one chunk column of a panel, at a fixed stride
/// of rows. Tiles of the same shape share this.
#[derive(Clone, Copy)]
pub(crate) struct Share {
    tile: Tile,
    /// Rows that all threads together cover in one step.
    rows_at_once: u32,
    /// This thread's first row.
    row: Reg<B32>,
    /// This thread's chunk of a panel's row.
    chunk: Reg<B32>,
    /// The offset of its first chunk in the tile.
    offset: Reg<B32>,
    /// True where its chunk of the last panel lies beyond the head dim.
    padding: Option<Reg<Pred>>,
}

impl Share {
    /// For rows of `head_dim` elements.
    pub fn new(k: &mut KernelBuilder, tile: Tile, head_dim: u32, threads: u32) -> Self {
        let chunks = tile.chunks();
        let tid = k.tid_x();
        let row = k.shr_u32(tid, chunks.trailing_zeros());
        let chunk = k.and_b32(tid, chunks - 1);
        let (shift, mask) = tile.swizzle();
        let line = k.shr_u32(row, shift);
        let xor = k.and_b32(line, mask);
        let place = k.xor_b32(chunk, xor);
        let place = k.shl_b32(place, CHUNK.trailing_zeros());
        let offset = k.mad_lo_u32(row, tile.pitch(), place);
        let padding = (head_dim < tile.cols).then(|| k.setp_eq_u32(chunk, chunks - 1));
        Self { tile, rows_at_once: threads / chunks, row, chunk, offset, padding }
    }
}

/// A tensor's tiles on their way into shared memory.
pub(crate) struct TileCopy {
    share: Share,
    /// Bytes from one row to the next; at most [`MAX_ROW_STRIDE`].
    stride: Reg<B32>,
    /// Bytes from one of this thread's rows to the next.
    step: Reg<B32>,
}

impl TileCopy {
    /// For rows that are `stride` bytes apart.
    pub fn new(k: &mut KernelBuilder, share: Share, stride: Reg<B64>) -> Self {
        let stride = k.cvt_u32_u64(stride);
        let step = k.mul_lo_u32(stride, share.rows_at_once);
        Self { share, stride, step }
    }

    /// How threads share its tiles.
    pub fn share(&self) -> Share {
        self.share
    }

    /// This thread's source for the tile whose first row is at an address.
    pub fn source(&self, k: &mut KernelBuilder, first_row: Reg<B64>) -> Reg<B64> {
        let row = k.mad_wide_u32(self.share.row, self.stride, first_row);
        self.share.in_row(k, row)
    }

    /// Moves a source one tile towards the first row.
    pub fn step_back(&self, k: &mut KernelBuilder, source: Reg<B64>) {
        let tile = k.mul_wide_u32(self.stride, self.share.tile.rows);
        k.set(source, |k| k.sub_u64(source, tile));
    }

    /// Copies a tile to `slot` bytes after the start of an allocation. With `rows`, only that many rows exist; the
    /// others become zeros.
    pub fn start(
        &self,
        k: &mut KernelBuilder,
        to: Shared,
        slot: Option<Reg<B32>>,
        source: Reg<B64>,
        rows: Option<Reg<B32>>,
    ) {
        let at = self.share.target(k, to, slot);
        for (turn, first) in (0..).zip(self.share.rows()) {
            let from = if turn == 0 { source } else { k.mad_wide_u32(self.step, turn, source) };
            self.share.if_in_tile(k, first, |k| self.turn(k, at, from, first, rows));
        }
    }

    /// One chunk of each panel.
    fn turn(&self, k: &mut KernelBuilder, at: Reg<B32>, from: Reg<B64>, first: u32, rows: Option<Reg<B32>>) {
        let exists = rows.map(|rows| {
            let row = k.add_u32(self.share.row, first);
            k.setp_lt_s32(row, rows)
        });
        self.share.chunk_of_row(k, at, from, first, exists);
    }
}

impl Share {
    /// The rows that a thread copies, relative to its first.
    pub fn rows(&self) -> impl Iterator<Item = u32> + use<> {
        (0..self.tile.rows).step_by(self.rows_at_once as usize)
    }

    /// This thread's first row.
    pub fn first_row(&self) -> Reg<B32> {
        self.row
    }

    /// This thread's source in the row at an address.
    pub fn in_row(&self, k: &mut KernelBuilder, row: Reg<B64>) -> Reg<B64> {
        k.mad_wide_u32(self.chunk, CHUNK, row)
    }

    /// Where in shared memory this thread's first row goes, some bytes after the start of an allocation.
    fn target(&self, k: &mut KernelBuilder, to: Shared, slot: Option<Reg<B32>>) -> Reg<B32> {
        let base = k.shared_addr(to);
        let at = k.add_u32(base, self.offset);
        slot.map_or(at, |slot| k.add_u32(at, slot))
    }

    /// Copies a tile whose rows lie anywhere: `find` says where this thread's source in one of [`rows`](Share::rows) is, and
    /// whether the row exists; others become zeros.
    pub fn gather(
        &self,
        k: &mut KernelBuilder,
        to: Shared,
        slot: Option<Reg<B32>>,
        mut find: impl FnMut(&mut KernelBuilder, u32) -> (Reg<B64>, Reg<Pred>),
    ) {
        let at = self.target(k, to, slot);
        for first in self.rows() {
            let copy = |k: &mut KernelBuilder| {
                let (from, exists) = find(k, first);
                self.chunk_of_row(k, at, from, first, Some(exists));
            };
            self.if_in_tile(k, first, copy);
        }
    }

    /// Runs the body where this thread has such a row: in the last turn, fewer may be left than the threads could copy.
    fn if_in_tile(&self, k: &mut KernelBuilder, first: u32, body: impl FnOnce(&mut KernelBuilder)) {
        if first + self.rows_at_once > self.tile.rows {
            let inside = k.setp_lt_u32(self.row, self.tile.rows - first);
            k.if_(inside, body);
        } else {
            body(k);
        }
    }

    /// One chunk of each panel of a row.
    fn chunk_of_row(
        &self,
        k: &mut KernelBuilder,
        at: Reg<B32>,
        from: Reg<B64>,
        first: u32,
        exists: Option<Reg<Pred>>,
    ) {
        let Share { tile, padding, .. } = *self;
        let row_bytes = exists.map(|exists| k.selp_b32(CHUNK, 0u32, exists));
        for panel in 0..tile.panels() {
            let last = panel + 1 == tile.panels();
            let bytes: Option<Operand<B32>> = match (row_bytes, padding.filter(|_| last)) {
                (None, None) => None,
                (Some(bytes), None) => Some(bytes.into()),
                (bytes, Some(padding)) => {
                    let bytes = bytes.map_or_else(|| Operand::from(CHUNK), Operand::from);
                    Some(k.selp_b32(0u32, bytes, padding).into())
                }
            };
            let to = at.at((panel * tile.panel_bytes() + first * tile.pitch()) as i32);
            let from = from.at((panel * tile.pitch()) as i32);
            let prefetch = Some(L2Prefetch::B128);
            k.cp_async_hint(CpAsyncCache::Cg, CpAsyncBytes::B16, to, from, bytes, prefetch, None);
        }
    }
}
