//! Keys and values in pages: a key tile is copied piece by piece, each from the page that it is in.
//!
//! The lanes of the producer's warp read the table, one for each piece, a tile before it is copied. Pieces behind the last
//! key have no page: what is copied for them lies outside the pool, and is zeros.

use flashcore_ptx::{B32, B64, KernelBuilder, Operand, PrefetchLevel, Reg};

use super::{PITCH, Schedule, tiles::Tile};
use crate::{PageParams, Spec};

/// A page that does not exist.
const NONE: u32 = u32::MAX;

/// Entries of a table in a line of the cache.
const ENTRIES: u32 = 32;

/// Lines of a table that each lane asks for.
const LINES: u32 = 4;

/// The pages of a tile's batch entry, and which of them come next.
#[derive(Clone, Copy)]
pub(super) struct Pages {
    page: u32,
    block_n: u32,
    /// Keys of a piece.
    piece: u32,
    lane: Reg<B32>,
    table: Reg<B64>,
    /// Keys of the batch entry.
    keys: Reg<B32>,
    /// The pages of this lane's piece in three tiles: that of the next values, that of the next keys, and the one after.
    of_values: Reg<B32>,
    of_keys: Reg<B32>,
    ahead: Reg<B32>,
}

/// Keys of a piece of a tile of which a block copies so many keys: all lie in one page.
pub(super) fn piece(keys: u32, page: u32) -> u32 {
    let (mut a, mut b) = (keys, page);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Where one key tile of one tensor is.
#[derive(Clone, Copy)]
pub(super) struct Pieces {
    /// The page of each lane's piece.
    ids: Reg<B32>,
    /// The place in its page of the tile's first key; `None` where tiles begin with a page.
    inside: Option<Reg<B32>>,
    head: Reg<B32>,
    page: u32,
    piece: u32,
    count: u32,
}

impl Pages {
    /// Those of a tile, given the key tiles that come first. Says early which part of the table will be read.
    pub fn new(k: &mut KernelBuilder, schedule: Schedule, page: u32) -> Self {
        let [of_values, of_keys, ahead, keys] = std::array::from_fn(|_| k.mov_b32(0u32));
        Self {
            page,
            block_n: schedule.block_n,
            piece: piece(schedule.block_n, page),
            lane: k.laneid(),
            table: k.mov_b64(0u64),
            keys,
            of_values,
            of_keys,
            ahead,
        }
    }

    /// Asks for the table of a tile's batch entry. The number of its keys may still be on its way.
    pub fn ask(&self, k: &mut KernelBuilder, tile: &Tile) {
        k.comment("the table of pages");
        let (table, row) = (k.param(PageParams::pages), k.param(PageParams::pages_row));
        let batch = k.cvt_u64_u32(tile.rows.batch);
        k.set(self.table, |k| k.mad_lo_u64(batch, row, table));
        let most = k.param(PageParams::most_pages);
        for line in 0..LINES {
            let first = k.mul_lo_u32(self.lane, ENTRIES);
            let first = k.add_u32(first, line * ENTRIES * 32);
            let exists = k.setp_lt_u32(first, most);
            let at = k.mad_wide_u32(first, 4u32, self.table);
            k.when(exists, |k| k.prefetch_global(PrefetchLevel::L2, at));
        }
    }

    /// Begins with a key tile, and those before it.
    pub fn begin(&self, k: &mut KernelBuilder, tile: &Tile, at: Reg<B32>) {
        k.set(self.keys, |k| k.mov_b32(tile.band.keys));
        self.look_up(k, self.of_keys, at);
        let next = k.sub_s32(at, 1);
        self.look_up(k, self.ahead, next);
    }

    /// Goes on to the key tile before.
    pub fn advance(&self, k: &mut KernelBuilder, at: Reg<B32>) {
        k.set(self.of_values, |k| k.mov_b32(self.of_keys));
        k.set(self.of_keys, |k| k.mov_b32(self.ahead));
        let next = k.sub_s32(at, 1);
        self.look_up(k, self.ahead, next);
    }

    /// There are no more keys, only the values of those before.
    pub fn end(&self, k: &mut KernelBuilder) {
        k.set(self.of_values, |k| k.mov_b32(self.of_keys));
    }

    /// Where the keys of a tile are, given its first.
    pub fn keys(&self, k: &mut KernelBuilder, first_key: Reg<B32>, head: Reg<B32>) -> Pieces {
        self.pieces(k, self.of_keys, first_key, head)
    }

    /// Where the values of a tile are, given its first key.
    pub fn values(&self, k: &mut KernelBuilder, first_key: Reg<B32>, head: Reg<B32>) -> Pieces {
        self.pieces(k, self.of_values, first_key, head)
    }

    fn pieces(&self, k: &mut KernelBuilder, ids: Reg<B32>, first_key: Reg<B32>, head: Reg<B32>) -> Pieces {
        let Self { page, block_n, piece, .. } = *self;
        let inside = (!block_n.is_multiple_of(page)).then(|| k.rem_u32(first_key, page));
        Pieces { ids, inside, head, page, piece, count: block_n / piece }
    }

    /// The page of this lane's piece of a key tile, which may not exist.
    fn look_up(&self, k: &mut KernelBuilder, to: Reg<B32>, at: Reg<B32>) {
        let first = k.mul_lo_u32(at, self.block_n);
        let key = k.mad_lo_u32(self.lane, self.piece, first);
        // Unsigned, so that keys before the first do not exist either.
        let exists = k.setp_lt_u32(key, self.keys);
        let index = k.div_u32(key, self.page);
        let entry = k.mad_wide_u32(index, 4u32, self.table);
        k.set(to, |k| k.mov_b32(NONE));
        k.when(exists, |k| k.set(to, |k| k.ld_global(entry)));
    }
}

impl Pieces {
    /// Runs the body for each piece, in all lanes: with the bytes before it in a panel, and its row, head and page.
    pub fn each(
        &self,
        k: &mut KernelBuilder,
        mut body: impl FnMut(&mut KernelBuilder, u32, [Operand<B32>; 3]),
    ) {
        for index in 0..self.count {
            let id = k.shfl_idx(self.ids, index);
            let first = index * self.piece;
            let row = match self.inside {
                None => Operand::from(first % self.page),
                Some(inside) if index == 0 => inside.into(),
                Some(inside) => {
                    let place = k.add_u32(inside, first);
                    k.rem_u32(place, self.page).into()
                }
            };
            body(k, first * PITCH, [row, self.head.into(), id.into()]);
        }
    }
}

/// Whether the producer is a whole warp, rather than one thread.
pub(super) fn needs_warp(spec: &Spec) -> bool {
    spec.packed_q || spec.page.is_some()
}
