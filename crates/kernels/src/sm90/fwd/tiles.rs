//! Which query tile a block takes, and which keys that tile sees.

use flashcore_ptx::{B32, KernelBuilder, Operand, ParamHandle, Pred, Reg};

use super::{ROWS, Schedule, Walk, packed};
use crate::{
    Spec,
    parts::work::{Band, KeyRange, Rows, first_query_head},
    sm90::{PackedParams, Sm90Params},
};

/// A query tile.
pub(super) struct Tile {
    pub rows: Rows,
    /// The first row of the work tile: of all blocks that share key tiles.
    first_row: Reg<B32>,
    /// Rows of the work tile that are taken.
    rows_taken: u32,
    pub kv_head: Reg<B32>,
    pub band: Band,
    pub starts: Starts,
    /// Where blocks share keys by length: which of the keys are this part's.
    pub part: Option<Part>,
}

/// A part of the keys of a tile.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// The first key tile, and the last.
    pub first: Reg<B32>,
    pub last: Reg<B32>,
    /// Its number among all parts.
    pub number: Reg<B32>,
}

/// The rows of the tensors at which a sequence begins, where it is packed.
#[derive(Clone, Copy)]
pub(super) struct Starts {
    pub queries: Option<Reg<B32>>,
    pub keys: Option<Reg<B32>>,
}

/// The key tiles that one block walks over, from `last` down to `first`, perhaps not to all of them.
pub(super) struct Keys {
    pub first: Reg<B32>,
    pub last: Reg<B32>,
    /// Whether there are any.
    pub any: Reg<Pred>,
    pub range: KeyRange,
}

impl Keys {
    /// The tiles of one of several warpgroups that take them in turn, given how far before the last its first one is.
    pub fn every(&self, k: &mut KernelBuilder, schedule: Schedule, before: Reg<B32>) -> Keys {
        let before = if schedule.in_turn { between(k, schedule, before) } else { before };
        let last = k.sub_s32(self.last, before);
        let some = k.setp_ge_s32(last, self.first);
        Keys { first: self.first, last, any: k.and_pred(self.any, some), range: self.range }
    }

    /// Leaves what one of several blocks has that take the tiles in turn.
    fn take_turn(&mut self, k: &mut KernelBuilder, block: Reg<B32>) {
        self.last = k.sub_s32(self.last, block);
        let some = k.setp_ge_s32(self.last, self.first);
        self.any = k.and_pred(self.any, some);
    }

    /// Whether a block has another key tile after one.
    pub fn follows(&self, k: &mut KernelBuilder, schedule: Schedule, at: Reg<B32>) -> Reg<Pred> {
        if !schedule.in_turn {
            return k.setp_gt_s32(at, self.first);
        }
        let next = step(k, schedule, at, 1);
        k.setp_ge_s32(next, self.first)
    }

    /// Leaves one of several shares of this many key tiles each; the first has the last tiles.
    fn take_share(&mut self, k: &mut KernelBuilder, index: Reg<B32>, share: Reg<B32>) {
        let before = k.mul_lo_u32(index, share);
        self.last = k.sub_s32(self.last, before);
        let past_mine = k.sub_s32(self.last, share);
        let first_mine = k.add_s32(past_mine, 1);
        let some = k.setp_ge_s32(self.last, self.first);
        self.any = k.and_pred(self.any, some);
        self.first = k.max_s32(self.first, first_mine);
    }
}

/// So many key tiles of a block, in those of all blocks that take them in turn.
fn between(k: &mut KernelBuilder, schedule: Schedule, tiles: impl Into<Operand<B32>>) -> Reg<B32> {
    let blocks = if schedule.split > 1 { k.mov_b32(schedule.split) } else { k.nctaid_y() };
    k.mul_lo_u32(blocks, tiles)
}

/// The key tile that is so many of a block's after one.
pub(super) fn step(k: &mut KernelBuilder, schedule: Schedule, at: Reg<B32>, tiles: u32) -> Reg<B32> {
    if !schedule.in_turn {
        return k.sub_s32(at, tiles);
    }
    let tiles = between(k, schedule, tiles);
    k.sub_s32(at, tiles)
}

/// Runs the body for each query tile that this block takes.
pub(super) fn each_tile(
    k: &mut KernelBuilder,
    schedule: Schedule,
    spec: &Spec,
    mut body: impl FnMut(&mut KernelBuilder, &Tile),
) {
    let item = if schedule.cluster() > 1 { k.clusterid_x() } else { k.ctaid_x() };
    if !schedule.persistent {
        let place = match schedule.order(spec) {
            Walk::Sections => Place::in_section(k, item),
            Walk::Plain | Walk::Pairs => Place::in_head(k, item, None),
        };
        let tile = Tile::find(k, schedule, spec, place);
        body(k, &tile);
        return;
    }
    let items = k.param(Sm90Params::items);
    let blocks = if schedule.cluster() > 1 { k.nclusterid_x() } else { k.nctaid_x() };
    match schedule.order(spec) {
        Walk::Plain => {
            let item = k.mov_b32(item);
            k.while_(
                |k| k.setp_lt_u32(item, items),
                |k, _| {
                    let place = Place::in_head(k, item, None);
                    let tile = Tile::find(k, schedule, spec, place);
                    body(k, &tile);
                    k.set(item, |k| k.add_u32(item, blocks));
                },
            );
        }
        Walk::Pairs => {
            let (item, second) = (k.mov_b32(item), k.mov_pred(false));
            k.while_(
                |k| k.setp_lt_u32(item, items),
                |k, _| {
                    let place = Place::in_head(k, item, Some(second));
                    let alone = k.and_pred(second, place.middle);
                    k.if_(!alone, |k| {
                        let tile = Tile::find(k, schedule, spec, place);
                        body(k, &tile);
                    });
                    let next = k.add_u32(item, blocks);
                    k.set(item, |k| k.selp_b32(next, item, second));
                    k.set(second, |k| k.not_pred(second));
                },
            );
        }
        Walk::Sections => {
            let rounds = Rounds::new(k, schedule, item, blocks);
            k.while_(
                |k| k.setp_lt_u32(rounds.start, items),
                |k, _| {
                    let inside = k.setp_lt_u32(rounds.item, items);
                    let place = Place::in_section(k, rounds.item);
                    let exists = k.setp_ge_s32(place.block, 0);
                    let exists = k.and_pred(exists, inside);
                    k.if_(exists, |k| {
                        let tile = Tile::find(k, schedule, spec, place);
                        body(k, &tile);
                    });
                    rounds.next(k);
                },
            );
        }
    }
}

/// The items that a persistent block takes, one of each round. Every other round runs backwards: tiles come longest first,
/// and so the block that had the longest of a round gets the shortest of the next.
pub(super) struct Rounds {
    blocks: Reg<B32>,
    /// This block's place in this round and in the next.
    mine: Reg<B32>,
    other: Reg<B32>,
    /// The round's first item.
    start: Reg<B32>,
    /// This block's.
    pub item: Reg<B32>,
}

impl Rounds {
    /// For one of so many blocks.
    pub fn new(k: &mut KernelBuilder, schedule: Schedule, block: Reg<B32>, blocks: Reg<B32>) -> Self {
        let last = k.sub_u32(blocks, 1u32);
        let item = if schedule.ctas == 2 { beside_another(k, block, blocks, last) } else { block };
        let mirrored = k.sub_u32(last, item);
        let (mine, other) = (k.mov_b32(item), k.mov_b32(mirrored));
        let (start, item) = (k.mov_b32(0u32), k.mov_b32(item));
        Self { blocks, mine, other, start, item }
    }

    /// Goes on to the next round.
    pub fn next(&self, k: &mut KernelBuilder) {
        let Self { blocks, mine, other, start, item } = *self;
        k.set(start, |k| k.add_u32(start, blocks));
        let swapped = k.mov_b32(mine);
        k.set(mine, |k| k.mov_b32(other));
        k.set(other, |k| k.mov_b32(swapped));
        k.set(item, |k| k.add_u32(start, mine));
    }
}

/// The position of a block in a round when two share a multiprocessor, one from each half of the round: the second half
/// is taken backwards, so that a long tile runs beside a short one.
fn beside_another(k: &mut KernelBuilder, item: Reg<B32>, blocks: Reg<B32>, last: Reg<B32>) -> Reg<B32> {
    let half = k.shr_u32(blocks, 1u32);
    let ends = k.add_u32(last, half);
    let backwards = k.sub_u32(ends, item);
    let first = k.setp_lt_u32(item, half);
    k.selp_b32(item, backwards, first)
}

/// Where a query tile is: the head, over all batch entries, and the block of rows.
#[derive(Clone, Copy)]
struct Place {
    head: Reg<B32>,
    block: Reg<B32>,
    /// Whether the block of rows is the middle one, which has no other to be paired with.
    middle: Reg<Pred>,
}

impl Place {
    /// Head by head, the last block first. `second` where a work tile is a pair: the first block from the end with the
    /// first from the start, the second with the second, and so on. Under a causal mask, all pairs have equally many
    /// keys.
    fn in_head(k: &mut KernelBuilder, item: Reg<B32>, second: Option<Reg<Pred>>) -> Self {
        let (head_items, blocks) = (k.param(Sm90Params::head_items), k.param(Sm90Params::blocks));
        let head = divide(k, item, Sm90Params::items_mul, Sm90Params::items_shift);
        let index = remainder(k, item, head, head_items);
        let last_block = k.sub_u32(blocks, 1u32);
        let from_end = k.sub_u32(last_block, index);
        let middle = k.setp_eq_u32(from_end, index);
        let block = second.map_or(from_end, |second| k.selp_b32(index, from_end, second));
        Self { head, block, middle }
    }

    /// Section by section of heads; in each, the last block of every head first. After the first blocks, a section has
    /// places without a tile: their block is negative.
    fn in_section(k: &mut KernelBuilder, item: Reg<B32>) -> Self {
        let (heads, blocks) = (k.param(Sm90Params::section), k.param(Sm90Params::blocks));
        let places = k.param(Sm90Params::places);
        let section = divide(k, item, Sm90Params::places_mul, Sm90Params::places_shift);
        let inside = remainder(k, item, section, places);
        let index = divide(k, inside, Sm90Params::section_mul, Sm90Params::section_shift);
        let head_inside = remainder(k, inside, index, heads);
        let head = k.mad_lo_u32(section, heads, head_inside);
        let last_block = k.sub_u32(blocks, 1u32);
        let block = k.sub_u32(last_block, index);
        let middle = k.setp_eq_u32(block, index);
        Self { head, block, middle }
    }
}

/// n / divisor.
pub(super) fn divide(
    k: &mut KernelBuilder,
    n: Reg<B32>,
    by: ParamHandle<Sm90Params, u32>,
    shift: ParamHandle<Sm90Params, u32>,
) -> Reg<B32> {
    let (mul, shift) = (k.param(by), k.param(shift));
    let product = k.mul_wide_u32(n, mul);
    let quotient = k.shr_u64(product, shift);
    k.cvt_u32_u64(quotient)
}

/// What remains of n, given the quotient.
pub(super) fn remainder(
    k: &mut KernelBuilder,
    n: Reg<B32>,
    quotient: Reg<B32>,
    divisor: Reg<B32>,
) -> Reg<B32> {
    let taken = k.mul_lo_u32(quotient, divisor);
    k.sub_u32(n, taken)
}

/// The kv head of a query head.
pub(super) fn kv_head(k: &mut KernelBuilder, spec: &Spec, head: Reg<B32>) -> Reg<B32> {
    if spec.grouped { divide(k, head, Sm90Params::group_mul, Sm90Params::group_shift) } else { head }
}

impl Tile {
    /// A tile whose rows its block has for itself.
    pub fn alone(rows_taken: u32, rows: Rows, kv_head: Reg<B32>, band: Band, starts: Starts) -> Self {
        Self { rows, first_row: rows.first_row, rows_taken, kv_head, band, starts, part: None }
    }

    /// The same with a part of its keys.
    pub fn with_part(self, part: Part) -> Self {
        Self { part: Some(part), ..self }
    }

    fn find(k: &mut KernelBuilder, schedule: Schedule, spec: &Spec, place: Place) -> Self {
        k.section("tile: which rows of which head");
        let Place { head, block, .. } = place;
        let batch = divide(k, head, Sm90Params::heads_mul, Sm90Params::heads_shift);
        let heads = k.param(Sm90Params::heads);
        let head = remainder(k, head, batch, heads);
        let kv_head = kv_head(k, spec, head);
        let len_q = k.param(Sm90Params::len_q);
        let first_row = k.mul_lo_u32(block, schedule.rows_taken(spec));
        let own_row = if schedule.multicast > 1 {
            let rank = k.cluster_ctarank();
            k.mad_lo_u32(rank, schedule.rows(), first_row)
        } else {
            first_row
        };
        let rows = Rows { batch, head, len_q, first_row: own_row };
        let (keys, start) = Self::sequence(k, spec, batch);
        let band = Band::new(k, spec, keys, len_q, [Sm90Params::left, Sm90Params::right]);
        let starts = Starts { queries: None, keys: start };
        Self { rows, first_row, rows_taken: schedule.rows_taken(spec), kv_head, band, starts, part: None }
    }

    /// How many keys a batch entry has, and where these begin, if they are packed.
    pub fn sequence(k: &mut KernelBuilder, spec: &Spec, batch: Reg<B32>) -> (Reg<B32>, Option<Reg<B32>>) {
        let ends = spec.packed_k.then(|| packed::ends(k, PackedParams::k_starts, batch));
        let start = ends.map(|[start, _]| start);
        if spec.key_lengths {
            let lengths = k.param(Sm90Params::key_lengths);
            let own = k.mad_wide_u32(batch, 4u32, lengths);
            return (k.ld_global::<B32>(own), start);
        }
        let keys = match ends {
            Some([start, end]) => k.sub_s32(end, start),
            None => k.param(Sm90Params::len_k),
        };
        (keys, start)
    }

    /// Whether a row of this block is one of the problem's, and no other block's.
    pub fn has_row(&self, k: &mut KernelBuilder, schedule: Schedule, row: Reg<B32>) -> Reg<Pred> {
        let mut past = self.rows.len_q;
        if self.rows_taken < schedule.tile_rows() {
            let end = k.add_u32(self.first_row, self.rows_taken);
            past = k.min_s32(past, end);
        }
        k.setp_lt_s32(row, past)
    }

    /// The coordinates in a tensor of queries of a column and a row of the tile's head.
    pub fn place(&self, k: &mut KernelBuilder, spec: &Spec, column: u32, row: Reg<B32>) -> [Operand<B32>; 4] {
        let Rows { batch, head, .. } = self.rows;
        if spec.rows_per_query > 1 {
            let query = k.div_u32(row, spec.rows_per_query);
            return [column.into(), first_query_head(k, spec, head).into(), query.into(), batch.into()];
        }
        match self.starts.queries {
            None => [column.into(), row.into(), head.into(), batch.into()],
            // Packed sequences are one batch entry.
            Some(_) => [column.into(), self.row_of_queries(k, row).into(), head.into(), 0u32.into()],
        }
    }

    /// The row of a tensor of queries that is a row of the tile's head.
    pub fn row_of_queries(&self, k: &mut KernelBuilder, row: Reg<B32>) -> Reg<B32> {
        self.starts.queries.map_or(row, |start| k.add_u32(start, row))
    }

    /// The row, the head and the batch entry of a key, where keys are not in pages.
    pub fn place_of_keys(&self, k: &mut KernelBuilder, key: Reg<B32>) -> [Operand<B32>; 3] {
        match self.starts.keys {
            None => [key.into(), self.kv_head.into(), self.rows.batch.into()],
            Some(start) => [k.add_u32(start, key).into(), self.kv_head.into(), 0u32.into()],
        }
    }

    /// The key tiles that this block walks over.
    pub fn keys(&self, k: &mut KernelBuilder, schedule: Schedule) -> Keys {
        let rows = Rows { first_row: self.first_row, ..self.rows };
        let mut keys = self.keys_of(k, schedule, rows, self.rows_taken);
        if schedule.split > 1 {
            k.comment("this block's share of the key tiles");
            let rank = k.cluster_ctarank();
            if schedule.in_turn {
                keys.take_turn(k, rank);
                return keys;
            }
            let past = k.add_s32(keys.last, 1);
            let count = k.sub_s32(past, keys.first);
            let share = k.add_u32(count, schedule.split - 1);
            let share = k.shr_u32(share, schedule.split.trailing_zeros());
            keys.take_share(k, rank, share);
        }
        if schedule.parts > 1 {
            k.comment("this part of the key tiles");
            let (part, parts) = (k.ctaid_y(), k.nctaid_y());
            if schedule.in_turn {
                keys.take_turn(k, part);
                return keys;
            }
            let past = k.add_s32(keys.last, 1);
            let count = k.sub_s32(past, keys.first);
            let count = k.max_s32(count, 0);
            let up = k.add_u32(parts, count);
            let up = k.sub_u32(up, 1u32);
            let share = k.div_u32(up, parts);
            keys.take_share(k, part, share);
        }
        if let Some(Part { first, last, .. }) = self.part {
            k.comment("this part of the key tiles");
            keys.last = k.min_s32(keys.last, last);
            keys.first = k.max_s32(keys.first, first);
            let some = k.setp_ge_s32(keys.last, keys.first);
            keys.any = k.and_pred(keys.any, some);
        }
        keys
    }

    /// The key tiles that one warpgroup's rows see.
    pub fn own_keys(&self, k: &mut KernelBuilder, schedule: Schedule, group: Reg<B32>) -> Keys {
        let first_row = k.mad_lo_u32(group, ROWS, self.rows.first_row);
        let rows = Rows { first_row, ..self.rows };
        let mut keys = self.keys_of(k, schedule, rows, ROWS);
        let some = k.setp_lt_s32(first_row, self.rows.len_q);
        keys.any = k.and_pred(keys.any, some);
        keys
    }

    fn keys_of(&self, k: &mut KernelBuilder, schedule: Schedule, block: Rows, rows: u32) -> Keys {
        let range = self.band.key_range(k, &block, rows);
        let past = k.add_u32(range.end, schedule.block_n - 1);
        let past = k.div_u32(past, schedule.block_n);
        let (last, first) = (k.sub_s32(past, 1), k.div_u32(range.begin, schedule.block_n));
        let any = k.setp_lt_s32(range.begin, range.end);
        Keys { first, last, any, range }
    }
}
