//! Packed queries: the sequences lie one behind the other, and only the GPU knows where each begins.
//!
//! Each block has a tile, numbered as [`sequence`](crate::parts::sequence) does. Numbers that are nobody's are left at once.

use flashcore_ptx::{B32, KernelBuilder, Pred, Reg, Shared};

use crate::{
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
    /// The sequence's first row in the tensors.
    pub start: Reg<B32>,
}

impl Tile {
    /// Finds this block's, and whether there is one in its place.
    pub fn find(k: &mut KernelBuilder, rows: u32, order: Order) -> (Self, Reg<Pred>) {
        k.section("packed: which sequence");
        let (place, head) = (k.ctaid_x(), k.ctaid_y());
        let [batch, tile] = find_tile(k, PackedParams::q_starts, rows, place);
        let [start, end] = ends(k, PackedParams::q_starts, batch);
        let len_q = k.sub_s32(end, start);
        let first_row = k.mul_lo_u32(tile, rows);
        let exists = k.setp_lt_s32(first_row, len_q);
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
        (Self { rows: Rows { batch, head, len_q, first_row }, start }, exists)
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
        let at = note_of_warp(k, notes);
        let [batch, start, len_q, first_row] = k.ld_shared_vec(at);
        Self { rows: Rows { batch, head: k.ctaid_y(), len_q, first_row }, start }
    }

    /// Its rows in the tensors, which have one batch entry.
    pub fn in_tensors(&self, k: &mut KernelBuilder) -> Rows {
        let Rows { head, len_q, first_row, .. } = self.rows;
        Rows {
            batch: k.mov_b32(0u32),
            head,
            len_q: k.add_u32(self.start, len_q),
            first_row: k.add_u32(self.start, first_row),
        }
    }
}

/// Where this warp's note is.
fn note_of_warp(k: &mut KernelBuilder, notes: Shared) -> Reg<B32> {
    let (tid, base) = (k.tid_x(), k.shared_addr(notes));
    let warp = k.shr_u32(tid, 5u32);
    k.mad_lo_u32(warp, NOTE, base)
}
