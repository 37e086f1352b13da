//! Blocks that share all keys by length: each takes one part after the other, of one tile of queries or of several.
//!
//! The producer's warp finds the block's next part, and tells the consumers through shared memory, beside the slot of the
//! tile's queries. It does so while they still work on the part before.

use flashcore_ptx::{B32, KernelBuilder, Reg, Shared};

use super::{
    Schedule,
    packed::{TOLD, each_word},
    tiles::{Part, Starts, Tile, divide, kv_head, remainder},
};
use crate::{
    Spec,
    parts::{
        shares::Shares,
        work::{Band, Rows},
    },
    sm90::{Sm90Params, ring::Ring},
};

/// Runs the body for each part that this block takes, in all lanes of a warp.
pub(super) fn each_found(
    k: &mut KernelBuilder,
    schedule: Schedule,
    spec: &Spec,
    mut body: impl FnMut(&mut KernelBuilder, &Tile),
) {
    let (heads, tiles) = (k.param(Sm90Params::heads), k.param(Sm90Params::blocks));
    let columns = k.mul_lo_u32(heads, tiles);
    let len = |k: &mut KernelBuilder, sequence: Reg<B32>| Tile::sequence(k, spec, sequence).0;
    let shares = Shares::new(k, spec, schedule.block_n, columns, &len);
    shares.each(k, |k, part| {
        k.section("tile: which rows of which head");
        let (batch, column) = (part.sequence, part.column);
        let head = divide(k, column, Sm90Params::items_mul, Sm90Params::items_shift);
        let block = remainder(k, column, head, tiles);
        let first_row = k.mul_lo_u32(block, schedule.rows_taken(spec));
        let (keys, start) = Tile::sequence(k, spec, batch);
        let starts = Starts { queries: None, keys: start };
        let part = Part { first: part.first, last: part.last, number: part.number };
        let tile = found(k, schedule, spec, [batch, head, first_row, keys], starts, part);
        body(k, &tile);
    });
}

/// Tells the consumers which part's queries come to the ring's slot. One thread does, before it arrives at the slot's barrier.
pub(super) fn tell(k: &mut KernelBuilder, told: Shared, queries: &Ring, tile: &Tile, part: Part) {
    let Rows { batch, head, first_row, .. } = tile.rows;
    let at = queries.entry(k, told, TOLD);
    // Parts have keys: without any, this is the end.
    k.st_shared_vec(at, [tile.band.keys, part.first, part.last, part.number]);
    k.st_shared_vec(at.at(16), [batch, head, first_row, first_row]);
}

/// Runs the body for each part that the producer tells of.
pub(super) fn each_told(
    k: &mut KernelBuilder,
    schedule: Schedule,
    spec: &Spec,
    told: Shared,
    queries: &Ring,
    mut body: impl FnMut(&mut KernelBuilder, &Tile),
) {
    each_word(k, told, queries, |k, [[keys, first, last, number], [batch, head, first_row, _]]| {
        // Whoever copies keys knows where these begin.
        let starts = Starts { queries: None, keys: None };
        let part = Part { first, last, number };
        let tile = found(k, schedule, spec, [batch, head, first_row, keys], starts, part);
        body(k, &tile);
    });
}

/// A part, given its batch entry, head, first row and keys.
fn found(
    k: &mut KernelBuilder,
    schedule: Schedule,
    spec: &Spec,
    [batch, head, first_row, keys]: [Reg<B32>; 4],
    starts: Starts,
    part: Part,
) -> Tile {
    let len_q = k.param(Sm90Params::len_q);
    let rows = Rows { batch, head, len_q, first_row };
    let band = Band::new(k, spec, keys, len_q, [Sm90Params::left, Sm90Params::right]);
    let kv_head = kv_head(k, spec, head);
    Tile::alone(schedule.rows_taken(spec), rows, kv_head, band, starts).with_part(part)
}
