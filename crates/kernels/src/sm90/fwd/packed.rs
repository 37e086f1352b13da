//! Packed sequences: they lie one behind the other in the tensors, and only the GPU knows where each begins.
//!
//! The producer's warp finds the block's next tile, 32 sequences at a time, and tells the consumers through shared memory,
//! beside the slot of the tile's queries. It does so while they still work on the tile before.
//!
//! Tiles are taken in sections of heads, whose keys should stay in the cache. In a section, those come first that have the
//! most tiles of their sequence before them, and then, level by level, the others: under a causal mask these are the longest
//! first. As in [`tiles`](super::tiles), every other round runs backwards. A block's tiles come in this order, too, so it
//! only ever looks forward from one to the next.

use flashcore_ptx::{B32, GlobalPtr, KernelBuilder, ParamHandle, Pred, Reg, Shared};

use super::{
    Schedule,
    tiles::{Rounds, Starts, Tile, divide, kv_head, remainder},
};
use crate::{
    Spec,
    parts::work::{Band, Rows},
    sm90::{PackedParams, Sm90Params, ring::Ring},
};

/// Bytes that consumers are told of a tile: two vectors of four words.
pub(super) const TOLD: u32 = 32;

/// Sequences that a warp looks at together.
const TOGETHER: u32 = 32;

/// All lanes.
const ALL_LANES: u32 = u32::MAX;

/// Bytes of shared memory that a block reserves for what consumers are told.
pub(super) fn bytes(schedule: Schedule) -> u32 {
    schedule.q_stages * TOLD
}

/// Tells the consumers which tile's queries come to the ring's slot. One thread does, before it arrives at the slot's
/// barrier.
pub(super) fn tell(k: &mut KernelBuilder, told: Shared, queries: &Ring, tile: &Tile) {
    let Some(start) = tile.starts.queries else { return };
    let Rows { batch, head, len_q, first_row } = tile.rows;
    let at = queries.entry(k, told, TOLD);
    k.st_shared_vec(at, [len_q, first_row, start, tile.band.keys]);
    k.st_shared_vec(at.at(16), [batch, head, tile.kv_head, head]);
}

/// Tells them that there is none: it would have no queries.
pub(super) fn tell_end(k: &mut KernelBuilder, told: Shared, queries: &Ring) {
    let (at, none) = (queries.entry(k, told, TOLD), k.mov_b32(0u32));
    k.st_shared_vec(at, [none; 4]);
}

/// Runs the body for what the producer tells, until its first word is 0.
pub(super) fn each_word(
    k: &mut KernelBuilder,
    told: Shared,
    queries: &Ring,
    mut body: impl FnMut(&mut KernelBuilder, [[Reg<B32>; 4]; 2]),
) {
    k.loop_(|k, all| {
        queries.wait_filled(k);
        k.section("tile: what the producer says");
        let at = queries.entry(k, told, TOLD);
        let first: [Reg<B32>; 4] = k.ld_shared_vec(at);
        let none = k.setp_eq_u32(first[0], 0u32);
        k.break_if(all, none);
        let second = k.ld_shared_vec(at.at(16));
        body(k, [first, second]);
    });
}

/// Runs the body for each tile that the producer tells of.
pub(super) fn each_told(
    k: &mut KernelBuilder,
    schedule: Schedule,
    spec: &Spec,
    told: Shared,
    queries: &Ring,
    mut body: impl FnMut(&mut KernelBuilder, &Tile),
) {
    each_word(k, told, queries, |k, [[len_q, first_row, start, keys], [batch, head, kv_head, _]]| {
        let rows = Rows { batch, head, len_q, first_row };
        let band = Band::new(k, spec, keys, len_q, [Sm90Params::left, Sm90Params::right]);
        // Whoever copies keys knows where these begin.
        let starts = Starts { queries: Some(start), keys: None };
        body(k, &Tile::alone(schedule.rows(), rows, kv_head, band, starts));
    });
}

/// Runs the body for each tile that this block takes, in all lanes of a warp.
pub(super) fn each_found(
    k: &mut KernelBuilder,
    schedule: Schedule,
    spec: &Spec,
    mut body: impl FnMut(&mut KernelBuilder, &Tile),
) {
    let walk = Walk::new(k, schedule);
    let (block, blocks) = (k.ctaid_x(), k.nctaid_x());
    let rounds = Rounds::new(k, schedule, block, blocks);
    k.loop_(|k, all| {
        let item = rounds.item;
        let found = walk.find(k, item);
        k.break_if(all, !found);
        let tile = walk.tile(k, spec, item);
        body(k, &tile);
        rounds.next(k);
    });
}

/// A walk over all tiles: where it is, and which of the sequences that it looks at have a tile there.
struct Walk {
    rows: u32,
    lane: Reg<B32>,
    /// The first head of the section.
    section: Reg<B32>,
    /// The first row of the last tile of the longest sequence, and of the tiles at this level.
    top: Reg<B32>,
    row: Reg<B32>,
    /// The first of the sequences.
    first: Reg<B32>,
    /// Which of them have a tile at this level, as bits.
    having: Reg<B32>,
    /// Tiles of all heads of the section before those, and with those.
    before: Reg<B32>,
    past: Reg<B32>,
}

impl Walk {
    fn new(k: &mut KernelBuilder, schedule: Schedule) -> Self {
        k.section("packed: the longest sequence");
        let rows = schedule.rows();
        let lane = k.laneid();
        let sequences = k.param(PackedParams::sequences);
        let longest = k.mov_b32(0u32);
        k.for_s32(lane, sequences, TOGETHER, |k, sequence, _| {
            let [begin, end] = ends(k, PackedParams::q_starts, sequence);
            let len = k.sub_s32(end, begin);
            k.set(longest, |k| k.max_s32(longest, len));
        });
        let longest = k.redux_max_s32(longest, ALL_LANES);
        let last_row = k.sub_s32(longest, 1);
        let last_row = k.max_s32(last_row, 0);
        let tile = k.div_u32(last_row, rows);
        let top = k.mul_lo_u32(tile, rows);
        let row = k.mov_b32(top);
        let [section, first, having, before, past] = std::array::from_fn(|_| k.mov_b32(0u32));
        let walk = Self { rows, lane, section, top, row, first, having, before, past };
        walk.look(k);
        walk
    }

    /// Goes on to the tile of this number, if there are so many.
    fn find(&self, k: &mut KernelBuilder, item: Reg<B32>) -> Reg<Pred> {
        k.section("packed: the next tile");
        let heads = k.param(Sm90Params::heads);
        k.while_(
            |k| {
                let further = k.setp_ge_u32(item, self.past);
                let more = k.setp_lt_u32(self.section, heads);
                k.and_pred(further, more)
            },
            |k, _| {
                k.set(self.before, |k| k.mov_b32(self.past));
                let next = k.add_u32(self.first, TOGETHER);
                let sequences = k.param(PackedParams::sequences);
                let level_ends = k.setp_ge_u32(next, sequences);
                k.set(self.first, |k| k.selp_b32(0u32, next, level_ends));
                let lower = k.sub_s32(self.row, self.rows);
                let row = k.selp_b32(lower, self.row, level_ends);
                let section_ends = k.setp_lt_s32(row, 0);
                k.set(self.row, |k| k.selp_b32(self.top, row, section_ends));
                let heads = k.param(Sm90Params::section);
                let next = k.add_u32(self.section, heads);
                k.set(self.section, |k| k.selp_b32(next, self.section, section_ends));
                self.look(k);
            },
        );
        k.setp_lt_u32(self.section, heads)
    }

    /// Which of the sequences have a tile at this level.
    fn look(&self, k: &mut KernelBuilder) {
        let sequence = k.add_u32(self.first, self.lane);
        let sequences = k.param(PackedParams::sequences);
        let exists = k.setp_lt_u32(sequence, sequences);
        let len = k.mov_b32(0u32);
        k.if_(exists, |k| {
            let [begin, end] = ends(k, PackedParams::q_starts, sequence);
            k.set(len, |k| k.sub_s32(end, begin));
        });
        let has = k.setp_lt_s32(self.row, len);
        k.set(self.having, |k| k.ballot(has, ALL_LANES));
        let (tiles, heads) = (k.popc_b32(self.having), k.param(Sm90Params::section));
        k.set(self.past, |k| k.mad_lo_u32(tiles, heads, self.before));
    }

    /// The tile of this number, which was found.
    fn tile(&self, k: &mut KernelBuilder, spec: &Spec, item: Reg<B32>) -> Tile {
        k.section("packed: its sequence, rows and head");
        let inside = k.sub_u32(item, self.before);
        let heads = k.param(Sm90Params::section);
        let index = divide(k, inside, Sm90Params::section_mul, Sm90Params::section_shift);
        let head = remainder(k, inside, index, heads);
        let head = k.add_u32(head, self.section);
        // The sequence that so many others with a tile come before.
        let below = k.lanemask_lt();
        let below = k.and_b32(self.having, below);
        let below = k.popc_b32(below);
        let own = k.shr_u32(self.having, self.lane);
        let own = k.and_b32(own, 1u32);
        let (has, right) = (k.setp_ne_u32(own, 0u32), k.setp_eq_u32(below, index));
        let it = k.and_pred(has, right);
        let it = k.ballot(it, ALL_LANES);
        let it = k.bfind_u32(it);
        let batch = k.add_u32(self.first, it);
        let [start, end] = ends(k, PackedParams::q_starts, batch);
        let len_q = k.sub_s32(end, start);
        let (keys, first_key) = Tile::sequence(k, spec, batch);
        let rows = Rows { batch, head, len_q, first_row: k.mov_b32(self.row) };
        let band = Band::new(k, spec, keys, len_q, [Sm90Params::left, Sm90Params::right]);
        let starts = Starts { queries: Some(start), keys: first_key };
        Tile::alone(self.rows, rows, kv_head(k, spec, head), band, starts)
    }
}

/// Where a sequence begins and ends.
pub(crate) fn ends(
    k: &mut KernelBuilder,
    starts: ParamHandle<PackedParams, GlobalPtr>,
    sequence: Reg<B32>,
) -> [Reg<B32>; 2] {
    let starts = k.param(starts);
    let at = k.mad_wide_u32(sequence, 4u32, starts);
    [k.ld_global(at), k.ld_global(at.at(4))]
}
