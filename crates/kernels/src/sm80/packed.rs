//! Packed queries: the sequences lie one behind the other, and only the GPU knows where each begins.
//!
//! Each block has a tile, numbered as [`sequence`](crate::parts::sequence) does. Numbers that are nobody's are left at once.

use flashcore_ptx::{B32, KernelBuilder, Pred, Reg, Shared};

use crate::{
    FwdParams,
    parts::{
        sequence::find_tile,
        work::{Order, Rows},
    },
    sm90::{PackedParams, fwd::ends},
};

/// Bytes that a warp writes down of its tile.
const NOTE: u32 = 16;

/// Bytes of shared memory that a block reserves for what its warps write down.
pub(super) fn bytes(warps: u32) -> u32 {
    warps * NOTE
}

/// A block's tile of packed queries.
pub(super) struct Tile {
    /// Its sequence, and its rows in that sequence.
    pub rows: Rows,
    /// The sequence's first query in the tensors.
    pub start: Reg<B32>,
    /// Rows of a query.
    rows_per_query: u32,
}

impl Tile {
    /// Finds this block's, and whether there is one in its place.
    pub fn find(k: &mut KernelBuilder, rows: u32, order: Order) -> (Self, Reg<Pred>) {
        k.section("packed: which sequence");
        let at = [k.ctaid_x(), k.ctaid_y()];
        Self::in_place(k, [rows, 1], order, at)
    }

    /// The same for a one-dimensional grid, where a query may have several rows.
    pub fn find_in_row(
        k: &mut KernelBuilder,
        [rows, rows_per_query]: [u32; 2],
        order: Order,
    ) -> (Self, Reg<Pred>) {
        k.section("packed: which sequence");
        let at = place_in_row(k, rows);
        Self::in_place(k, [rows, rows_per_query], order, at)
    }

    fn in_place(
        k: &mut KernelBuilder,
        [rows, rows_per_query]: [u32; 2],
        order: Order,
        [place, head]: [Reg<B32>; 2],
    ) -> (Self, Reg<Pred>) {
        let [batch, tile] = find_tile(k, PackedParams::q_starts, [rows, rows_per_query], place);
        let [start, end] = ends(k, PackedParams::q_starts, batch);
        let len_q = k.sub_s32(end, start);
        let len_q = times(k, len_q, rows_per_query);
        let first_row = k.mul_lo_u32(tile, rows);
        // Those of numbers before the first sequence's are large here.
        let exists = k.setp_lt_u32(first_row, len_q);
        let first_row = match order {
            Order::HeadByHead => first_row,
            Order::LongestFirst => {
                // The last rows of a sequence first.
                let last = k.sub_s32(len_q, 1);
                let last = k.div_u32(last, rows);
                let tile = k.sub_u32(last, tile);
                k.mul_lo_u32(tile, rows)
            }
        };
        (Self { rows: Rows { batch, head, len_q, first_row }, start, rows_per_query }, exists)
    }

    /// Writes it down for the end of the block, so that the main loop keeps no registers for what only the epilogue needs.
    pub fn note(&self, k: &mut KernelBuilder, notes: Shared) {
        let Rows { batch, len_q, first_row, .. } = self.rows;
        let at = note_of_warp(k, notes);
        let lane = k.laneid();
        let first = k.setp_eq_u32(lane, 0u32);
        k.when(first, |k| k.st_shared_vec(at, [batch, self.start, len_q, first_row]));
        k.bar_warp_sync();
    }

    /// What was written down.
    pub fn noted(k: &mut KernelBuilder, notes: Shared) -> Self {
        Self::read(k, notes, 1, |k| k.ctaid_y())
    }

    /// The same for a one-dimensional grid.
    pub fn noted_in_row(k: &mut KernelBuilder, notes: Shared, [rows, rows_per_query]: [u32; 2]) -> Self {
        Self::read(k, notes, rows_per_query, |k| place_in_row(k, rows)[1])
    }

    fn read(
        k: &mut KernelBuilder,
        notes: Shared,
        rows_per_query: u32,
        head: impl FnOnce(&mut KernelBuilder) -> Reg<B32>,
    ) -> Self {
        let at = note_of_warp(k, notes);
        let [batch, start, len_q, first_row] = k.ld_shared_vec(at);
        Self { rows: Rows { batch, head: head(k), len_q, first_row }, start, rows_per_query }
    }

    /// Its rows in the tensors, which have one batch entry.
    pub fn in_tensors(&self, k: &mut KernelBuilder) -> Rows {
        let Rows { head, len_q, first_row, .. } = self.rows;
        let batch = k.mov_b32(0u32);
        let start = times(k, self.start, self.rows_per_query);
        Rows { batch, head, len_q: k.add_u32(start, len_q), first_row: k.add_u32(start, first_row) }
    }
}

/// The place among the tiles of a head, and the head, of a block of a one-dimensional grid.
fn place_in_row(k: &mut KernelBuilder, rows: u32) -> [Reg<B32>; 2] {
    let (all, sequences) = (k.param(FwdParams::len_q), k.param(PackedParams::sequences));
    let (block, full) = (k.ctaid_x(), k.div_u32(all, rows));
    let places = k.add_u32(full, sequences);
    let head = k.div_u32(block, places);
    let before = k.mul_lo_u32(head, places);
    [k.sub_u32(block, before), head]
}

/// So many rows of each of some queries.
fn times(k: &mut KernelBuilder, queries: Reg<B32>, rows: u32) -> Reg<B32> {
    if rows == 1 { queries } else { k.mul_lo_u32(queries, rows) }
}

/// Where this warp's note is.
fn note_of_warp(k: &mut KernelBuilder, notes: Shared) -> Reg<B32> {
    let (tid, base) = (k.tid_x(), k.shared_addr(notes));
    let warp = k.shr_u32(tid, 5u32);
    k.mad_lo_u32(warp, NOTE, base)
}
