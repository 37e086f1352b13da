//! Which key tile a block has, and which query tiles see it.

use flashcore_ptx::{B32, GlobalPtr, KernelBuilder, KernelParams, ParamHandle, Pred, Reg};

use super::{BwdParams, KEYS, Schedule, rotation::Rotation};
use crate::{
    Spec,
    parts::{
        sequence::{self, Side},
        work::Band,
    },
};

/// The key tile of a block.
pub(super) struct Block {
    /// Where the queries and the keys of its batch entry lie.
    pub queries: Side,
    pub keys: Side,
    /// Whether there is such a tile, where not every block has one.
    pub exists: Option<Reg<Pred>>,
    pub kv_head: Reg<B32>,
    /// The tile's number in its head.
    pub tile: Reg<B32>,
    pub first_key: Reg<B32>,
    pub len_q: Reg<B32>,
    pub band: Band,
    /// The query tiles that see it: from the last down to the first, for every query head of the group.
    first: Reg<B32>,
    last: Reg<B32>,
    /// Whether there are any.
    pub any: Reg<Pred>,
    rotation: Option<Rotation>,
    /// The query tiles of whose dQ it is the last to add to, where that rounds them.
    pub rounds: Option<Rounds>,
}

/// More query tiles than there are.
const ALL_TILES: u32 = 1 << 29;

/// The query tiles that a block is the last to add to: those before one.
#[derive(Clone, Copy)]
pub(super) struct Rounds {
    /// Twice that one, and 1 more if other blocks have added before.
    code: Reg<B32>,
}

/// The query tiles that see some keys.
pub(super) struct Seen {
    pub first: Reg<B32>,
    pub last: Reg<B32>,
    /// Whether there are any.
    pub any: Reg<Pred>,
}

/// One role's position in the walk over a block's tiles.
pub(super) struct Steps {
    first: Reg<B32>,
    last: Reg<B32>,
    /// The tile that a round begins with, if it is not the last.
    start: Option<Reg<B32>>,
    /// The head whose tiles these are.
    pub head: Reg<B32>,
    /// The tile.
    pub at: Reg<B32>,
    /// Steps left, this one among them.
    pub left: Reg<B32>,
    grouped: bool,
}

impl Block {
    /// Blocks come section by section of key heads; in a section, all first key tiles, then all second ones. A block
    /// waits only for blocks before it, which have started before it.
    pub fn find(k: &mut KernelBuilder, schedule: Schedule, spec: &Spec) -> Self {
        k.section("block: which keys of which head");
        let (units, section) = (k.param(BwdParams::units), k.param(BwdParams::section));
        let (tiles, heads_kv) = (k.param(BwdParams::k_tiles), k.param(BwdParams::heads_kv));
        let item = k.ctaid_x();
        let [tile, batch, kv_head] = place(k, item, [units, section, tiles, heads_kv]);
        let [q_starts, k_starts] = sequence::starts(spec);
        let [batch, tile] = match k_starts {
            Some(starts) => sequence::find_tile(k, starts, [KEYS, 1], tile),
            None => [batch, tile],
        };
        let queries = Side::of(k, q_starts, batch);
        let len_q = queries.len().unwrap_or_else(|| k.param(BwdParams::len_q));
        let side = Side::of(k, k_starts, batch);
        let keys = keys_of(k, spec, batch, &side, (BwdParams::len_k, BwdParams::key_lengths));
        let exists = side.has_tile(k, tile, KEYS);
        let band = Band::new(k, spec, keys, len_q, [BwdParams::left, BwdParams::right]);
        let first_key = k.mul_lo_u32(tile, KEYS);

        let Seen { first, last, any } = Seen::of(k, &band, [first_key, len_q], [KEYS, schedule.block_m]);
        let any = exists.map_or(any, |exists| k.and_pred(any, exists));
        let rotation = schedule.rotate.then(|| {
            let query_tiles = k.add_u32(last, 1u32);
            Rotation::new(k, band.keys, query_tiles)
        });
        let place = [tile, first_key];
        let rounds = schedule.rounds.then(|| Rounds::new(k, &band, schedule.block_m, place));
        Self {
            queries,
            keys: side,
            exists,
            kv_head,
            tile,
            first_key,
            len_q,
            band,
            first,
            last,
            any,
            rotation,
            rounds,
        }
    }

    /// The walk, from its start.
    pub fn steps(&self, k: &mut KernelBuilder, spec: &Spec) -> Steps {
        let group = spec.grouped.then_some(BwdParams::group);
        let steps = Steps::new(k, group, self.kv_head, [self.first, self.last], self.any);
        match self.rotation {
            Some(rotation) => steps.beginning(k, |k| rotation.start(k, self.tile)),
            None => steps,
        }
    }

    /// How many key tiles before this one add to the same copy of a query tile's dQ, and whether that is the second.
    pub fn turn(
        &self,
        k: &mut KernelBuilder,
        schedule: Schedule,
        at: Reg<B32>,
    ) -> (Reg<B32>, Option<Reg<Pred>>) {
        if let Some(rotation) = self.rotation {
            let (turn, second) = rotation.turn(k, self.tile, at);
            return (turn, Some(second));
        }
        let first_row = k.mul_lo_u32(at, schedule.block_m);
        let turn = match self.band.row_begin(k, first_row) {
            Some(begin) => {
                let first_tile = k.div_u32(begin, KEYS);
                k.sub_u32(self.tile, first_tile)
            }
            None => self.tile,
        };
        (turn, None)
    }
}

impl Rounds {
    fn new(k: &mut KernelBuilder, band: &Band, rows: u32, [tile, first_key]: [Reg<B32>; 2]) -> Self {
        k.comment("the query tiles that see no key behind these");
        let next = k.add_s32(first_key, KEYS as i32);
        let is_last = k.setp_ge_s32(next, band.keys);
        let first = match band.key_begin(k, next) {
            // A row behind the last is in a tile behind the last: only where masks are aligned top-left are there such rows, and
            // then they are multiples of a tile's.
            Some(row) => {
                let row = k.max_s32(row, 0);
                k.div_u32(row, rows)
            }
            None => k.mov_b32(0u32),
        };
        let past = k.selp_b32(ALL_TILES, first, is_last);
        let others = k.min_u32(tile, 1u32);
        Self { code: k.mad_lo_u32(past, 2u32, others) }
    }

    /// Whether the block is the last to add to a tile, and whether others have added before it then.
    pub fn of(self, k: &mut KernelBuilder, tile: Reg<B32>) -> [Reg<Pred>; 2] {
        let odd = k.mad_lo_u32(tile, 2u32, 1u32);
        let is_last = k.setp_gt_s32(self.code, odd);
        let others = k.and_b32(self.code, 1u32);
        let others = k.setp_ne_s32(others, 0u32);
        [is_last, k.and_pred(is_last, others)]
    }
}

impl Seen {
    /// Of the keys of a tile, given the first, among so many queries; `sizes` are those of that tile and of a query tile.
    pub fn of(
        k: &mut KernelBuilder,
        band: &Band,
        [first_key, len_q]: [Reg<B32>; 2],
        [keys, rows]: [u32; 2],
    ) -> Self {
        k.comment("the query tiles that see these keys");
        let some = k.setp_lt_s32(first_key, band.keys);
        let last_key = k.add_s32(first_key, keys as i32 - 1);
        let first_row = band.key_begin(k, first_key).unwrap_or_else(|| k.mov_b32(0));
        let final_row = k.sub_s32(len_q, 1);
        let last_row = match band.key_end(k, last_key) {
            Some(end) => {
                let last = k.sub_s32(end, 1);
                k.min_s32(last, final_row)
            }
            None => final_row,
        };
        let in_order = k.setp_le_s32(first_row, last_row);
        let any = k.and_pred(some, in_order);
        let first_row = k.max_s32(first_row, 0);
        let exists = k.setp_ge_s32(last_row, 0);
        let any = k.and_pred(any, exists);
        Self { first: k.div_u32(first_row, rows), last: k.div_u32(last_row, rows), any }
    }
}

/// The tile, batch entry and head of an item. Items come section by section of units, the heads of all batch entries; in a
/// section, all first tiles, then all second ones.
pub(super) fn place(
    k: &mut KernelBuilder,
    item: Reg<B32>,
    [units, section, tiles, heads]: [Reg<B32>; 4],
) -> [Reg<B32>; 3] {
    let remainder = |k: &mut KernelBuilder, n: Reg<B32>, quotient: Reg<B32>, by: Reg<B32>| {
        let whole = k.mul_lo_u32(quotient, by);
        k.sub_u32(n, whole)
    };
    let places = k.mul_lo_u32(section, tiles);
    let number = k.div_u32(item, places);
    let inside = remainder(k, item, number, places);
    let before = k.mul_lo_u32(number, section);
    let behind = k.sub_u32(units, before);
    let taken = k.min_u32(section, behind);
    let tile = k.div_u32(inside, taken);
    let unit = remainder(k, inside, tile, taken);
    let unit = k.add_u32(before, unit);
    let batch = k.div_u32(unit, heads);
    [tile, batch, remainder(k, unit, batch, heads)]
}

/// The keys of a batch entry, given where they lie.
pub(super) fn keys_of<P: KernelParams>(
    k: &mut KernelBuilder,
    spec: &Spec,
    batch: Reg<B32>,
    side: &Side,
    (len_k, lengths): (ParamHandle<P, u32>, ParamHandle<P, GlobalPtr>),
) -> Reg<B32> {
    if !spec.key_lengths {
        return side.len().unwrap_or_else(|| k.param(len_k));
    }
    let lengths = k.param(lengths);
    let own = k.mad_wide_u32(batch, 4u32, lengths);
    k.ld_global::<B32>(own)
}

impl Steps {
    /// Over the tiles from the last to the first. `group`: once for every query head that shares the head.
    pub fn new<P: KernelParams>(
        k: &mut KernelBuilder,
        group: Option<ParamHandle<P, u32>>,
        head: Reg<B32>,
        [first, last]: [Reg<B32>; 2],
        any: Reg<Pred>,
    ) -> Self {
        let past = k.add_s32(last, 1);
        let count = k.sub_s32(past, first);
        let (start, count) = match group {
            Some(group) => {
                let group = k.param(group);
                (k.mul_lo_u32(head, group), k.mul_lo_u32(count, group))
            }
            None => (head, count),
        };
        let count = k.selp_b32(count, 0u32, any);
        let (head, at, left) = (k.mov_b32(start), k.mov_b32(last), k.mov_b32(count));
        Self { first, last, start: None, head, at, left, grouped: group.is_some() }
    }

    /// Rounds that begin with another tile than the last.
    pub fn beginning(
        self,
        k: &mut KernelBuilder,
        start: impl FnOnce(&mut KernelBuilder) -> Reg<B32>,
    ) -> Self {
        k.comment("where its rounds begin");
        let start = start(k);
        k.set(self.at, |k| k.mov_b32(start));
        Self { start: Some(start), ..self }
    }

    /// The first row of the tile, given the rows of one.
    pub fn first_row(&self, k: &mut KernelBuilder, rows: u32) -> Reg<B32> {
        k.mul_lo_u32(self.at, rows)
    }

    /// The head and the tile of the step after this one, in rounds that begin with the last tile.
    pub fn next(&self, k: &mut KernelBuilder) -> [Reg<B32>; 2] {
        let ends = k.setp_eq_u32(self.at, self.first);
        let (tile, head) = (k.sub_s32(self.at, 1), k.add_u32(self.head, 1u32));
        [k.selp_b32(head, self.head, ends), k.selp_b32(self.last, tile, ends)]
    }

    /// The tile of the step before this one, in such rounds.
    pub fn previous(&self, k: &mut KernelBuilder) -> Reg<B32> {
        let above = k.add_u32(self.at, 1u32);
        if !self.grouped {
            return above;
        }
        let begins = k.setp_eq_u32(self.at, self.last);
        k.selp_b32(self.first, above, begins)
    }

    /// Goes on to the next step.
    pub fn advance(&self, k: &mut KernelBuilder) {
        k.set(self.left, |k| k.sub_u32(self.left, 1u32));
        if let Some(start) = self.start {
            let wraps = k.setp_eq_u32(self.at, self.first);
            let next = k.sub_s32(self.at, 1);
            k.set(self.at, |k| k.selp_b32(self.last, next, wraps));
            if self.grouped {
                let ends = k.setp_eq_u32(self.at, start);
                let head = k.add_u32(self.head, 1u32);
                k.set(self.head, |k| k.selp_b32(head, self.head, ends));
            }
            return;
        }
        if !self.grouped {
            k.set(self.at, |k| k.sub_s32(self.at, 1));
            return;
        }
        let ends = k.setp_eq_u32(self.at, self.first);
        let (next, head) = (k.sub_s32(self.at, 1), k.add_u32(self.head, 1u32));
        k.set(self.at, |k| k.selp_b32(self.last, next, ends));
        k.set(self.head, |k| k.selp_b32(head, self.head, ends));
    }

    /// Runs the body for each step.
    pub fn each(&self, k: &mut KernelBuilder, body: impl FnOnce(&mut KernelBuilder)) {
        k.while_(
            |k| k.setp_gt_s32(self.left, 0),
            |k, _| {
                body(k);
                self.advance(k);
            },
        );
    }
}
