//! Keys and values in pages: each thread looks up the page of every row that it copies, a tile ahead.
//!
//! Pages may have any number of keys. Where they have as many as some tiles, one look-up is enough for all rows of a tile.
//! Rows behind the last key, and those of a page that the pool has not, become zeros, and nothing is read for them.

use flashcore_ptx::{B32, B64, KernelBuilder, ParamHandle, Pred, Reg, Shared};

use crate::{
    FwdParams,
    parts::{
        copy::Share,
        params::{PageParams, PoolParams},
        work::Work,
    },
};

/// What stands for a page that is not looked up.
const NONE: u32 = u32::MAX;

/// The pages of a block's sequence, on the walk from the last key tile to the first.
pub(super) struct Pages {
    page: u32,
    block_n: u32,
    /// How threads share tiles.
    share: Share,
    /// The table of the sequence.
    table: Reg<B64>,
    /// Keys of the sequence.
    keys: Reg<B32>,
    /// The first key of the tile that is copied next.
    first_key: Reg<B32>,
    /// The pages of this thread's rows in that tile, or the one page of all of them.
    ids: Vec<Reg<B32>>,
}

/// A tensor in a pool.
pub(super) struct InPool {
    /// The head's rows in the first page.
    pub base: Reg<B64>,
    /// From one page to the next.
    pub to_page: ParamHandle<FwdParams, u64>,
    /// From one row to the next.
    pub row: ParamHandle<FwdParams, u64>,
}

/// Look-ups that a thread makes for a tile of which it copies so many rows.
pub(super) fn look_ups(page: u32, block_n: u32, rows: u32) -> u32 {
    if page.is_multiple_of(block_n) { 1 } else { rows }
}

impl Pages {
    /// Begins at the tile with this first key, whose pages are looked up.
    pub fn begin(
        k: &mut KernelBuilder,
        [page, block_n]: [u32; 2],
        share: Share,
        work: &Work,
        first_key: Reg<B32>,
    ) -> Self {
        k.comment("the table of pages");
        let (table, row) = (k.param(PageParams::pages), k.param(PageParams::pages_row));
        let batch = k.cvt_u64_u32(work.rows.batch);
        let table = k.mad_lo_u64(batch, row, table);
        let count = look_ups(page, block_n, share.rows().count() as u32);
        let ids = (0..count).map(|_| k.mov_b32(NONE)).collect();
        let first_key = k.mov_b32(first_key);
        let pages = Self { page, block_n, share, table, keys: work.band.keys, first_key, ids };
        pages.look_up(k);
        pages
    }

    /// Goes on to the tile before, whose pages are looked up.
    pub fn step_back(&self, k: &mut KernelBuilder) {
        k.comment("the pages of the tile before");
        k.set(self.first_key, |k| k.sub_s32(self.first_key, self.block_n as i32));
        self.look_up(k);
    }

    /// Whether all rows of a tile are in one page.
    fn together(&self) -> bool {
        self.page.is_multiple_of(self.block_n)
    }

    fn look_up(&self, k: &mut KernelBuilder) {
        for (&id, first) in self.ids.iter().zip(self.share.rows()) {
            let key = if self.together() { self.first_key } else { self.key(k, first) };
            // Unsigned, so that keys before the first do not exist either.
            let exists = k.setp_lt_u32(key, self.keys);
            let index = k.div_u32(key, self.page);
            let entry = k.mad_wide_u32(index, 4u32, self.table);
            k.set(id, |k| k.mov_b32(NONE));
            k.when(exists, |k| k.set(id, |k| k.ld_global(entry)));
        }
    }

    /// The key of one of this thread's rows.
    fn key(&self, k: &mut KernelBuilder, first: u32) -> Reg<B32> {
        let key = k.add_u32(self.first_key, self.share.first_row());
        if first == 0 { key } else { k.add_u32(key, first) }
    }

    /// Copies the tile of a tensor.
    pub fn copy(&self, k: &mut KernelBuilder, of: &InPool, to: Shared, slot: Option<Reg<B32>>) {
        let (to_page, row) = (k.param(of.to_page), k.param(of.row));
        let (pool, stride) = (k.param(PoolParams::pool), k.cvt_u32_u64(row));
        let find = |k: &mut KernelBuilder, id: Reg<B32>| -> (Reg<B64>, Reg<Pred>) {
            // Unsigned, so that a negative number is none either.
            let known = k.setp_lt_u32(id, pool);
            let id = k.selp_b32(id, 0u32, known);
            let id = k.cvt_u64_u32(id);
            (k.mad_lo_u64(id, to_page, of.base), known)
        };
        let one = self.together().then(|| find(k, self.ids[0]));
        let mut ids = self.ids.iter();
        self.share.gather(k, to, slot, |k, first| {
            let (page, known) = one.unwrap_or_else(|| find(k, *ids.next().expect("a look-up for each row")));
            let key = self.key(k, first);
            let exists = k.setp_lt_s32(key, self.keys);
            let exists = k.and_pred(exists, known);
            let inside = k.rem_u32(key, self.page);
            let row = k.mad_wide_u32(inside, stride, page);
            (self.share.in_row(k, row), exists)
        });
    }
}

impl InPool {
    /// The keys of a block.
    pub fn keys(work: &Work) -> Self {
        Self { base: work.k, to_page: FwdParams::k_batch, row: FwdParams::k_row }
    }

    /// Its values.
    pub fn values(work: &Work) -> Self {
        Self { base: work.v, to_page: FwdParams::v_batch, row: FwdParams::v_row }
    }
}
