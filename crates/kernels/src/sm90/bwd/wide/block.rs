//! What a block owns, and which tiles it walks over.

use flashcore_ptx::{B32, B64, GlobalPtr, KernelBuilder, ParamHandle, Pred, Reg};

use super::{KEYS, QUERIES, ROWS, WideParams};
use crate::{
    Spec,
    parts::{
        sequence::{self, Side},
        work::{Band, Rows},
    },
    sm90::bwd::{
        block::{Seen, Steps, keys_of, place},
        parts::numbers_at,
    },
};

/// What a block owns.
pub(super) struct Block {
    /// Where the queries and the keys of its batch entry lie.
    pub queries: Side,
    pub keys: Side,
    /// Whether there are such queries or keys, where not every block has some.
    exists: Option<Reg<Pred>>,
    /// The head of what it owns: a query head, or a key head.
    pub head: Reg<B32>,
    /// The key head.
    pub kv_head: Reg<B32>,
    /// The first query or key that it owns.
    pub first_row: Reg<B32>,
    pub len_q: Reg<B32>,
    pub band: Band,
    first: Reg<B32>,
    last: Reg<B32>,
    /// Whether there are tiles to walk over.
    pub any: Reg<Pred>,
}

impl Block {
    /// Blocks of queries come first, since they have more to do, and of those the last ones, which under a causal mask see the
    /// most keys. Of the blocks of keys, the first are those that the most queries see.
    pub fn find(
        k: &mut KernelBuilder,
        spec: &Spec,
        queries: impl FnOnce(&mut KernelBuilder, Block),
        keys: impl FnOnce(&mut KernelBuilder, Block),
    ) {
        k.section("block: which queries or keys of which head");
        let (item, before) = (k.ctaid_x(), k.param(WideParams::q_blocks));
        let of_queries = k.setp_lt_u32(item, before);
        k.if_else(
            of_queries,
            |k| {
                let block = Self::of_queries(k, spec, item);
                block.if_exists(k, queries);
            },
            |k| {
                let item = k.sub_u32(item, before);
                let block = Self::of_keys(k, spec, item);
                block.if_exists(k, keys);
            },
        );
    }

    fn if_exists(self, k: &mut KernelBuilder, work: impl FnOnce(&mut KernelBuilder, Block)) {
        match self.exists {
            Some(exists) => k.if_(exists, |k| work(k, self)),
            None => work(k, self),
        }
    }

    fn of_queries(k: &mut KernelBuilder, spec: &Spec, item: Reg<B32>) -> Self {
        let numbers = [WideParams::q_units, WideParams::q_section, WideParams::q_tiles, WideParams::heads]
            .map(|n| k.param(n));
        let [place, batch, head] = place(k, item, numbers);
        let last_tile = k.sub_u32(numbers[2], 1u32);
        let tile = k.sub_u32(last_tile, place);
        let kv_head = if spec.grouped {
            let group = k.param(WideParams::group);
            k.div_u32(head, group)
        } else {
            head
        };
        let [batch, tile] = match sequence::starts(spec)[0] {
            Some(starts) => sequence::find_tile(k, starts, [QUERIES, 1], tile),
            None => [batch, tile],
        };
        let (sides, band, len_q) = Self::band(k, spec, batch);
        let [queries, keys] = sides;
        let exists = queries.has_tile(k, tile, QUERIES);
        let first_row = k.mul_lo_u32(tile, QUERIES);
        let rows = Rows { batch, head, len_q, first_row };
        let range = band.key_range(k, &rows, QUERIES);
        let any = k.setp_lt_s32(range.begin, range.end);
        let last_key = k.sub_s32(range.end, 1);
        let (first, last) = (k.div_u32(range.begin, ROWS), k.div_u32(last_key, ROWS));
        Self { queries, keys, exists, head, kv_head, first_row, len_q, band, first, last, any }
    }

    fn of_keys(k: &mut KernelBuilder, spec: &Spec, item: Reg<B32>) -> Self {
        let numbers = [WideParams::k_units, WideParams::k_section, WideParams::k_tiles, WideParams::heads_kv]
            .map(|n| k.param(n));
        let [tile, batch, head] = place(k, item, numbers);
        let [batch, tile] = match sequence::starts(spec)[1] {
            Some(starts) => sequence::find_tile(k, starts, [KEYS, 1], tile),
            None => [batch, tile],
        };
        let (sides, band, len_q) = Self::band(k, spec, batch);
        let [queries, keys] = sides;
        let exists = keys.has_tile(k, tile, KEYS);
        let first_row = k.mul_lo_u32(tile, KEYS);
        let Seen { first, last, any } = Seen::of(k, &band, [first_row, len_q], [KEYS, ROWS]);
        Self { queries, keys, exists, head, kv_head: head, first_row, len_q, band, first, last, any }
    }

    /// Where queries and keys lie, which keys queries see, and how many queries there are.
    fn band(k: &mut KernelBuilder, spec: &Spec, batch: Reg<B32>) -> ([Side; 2], Band, Reg<B32>) {
        let sides = sequence::starts(spec).map(|starts| Side::of(k, starts, batch));
        let len_q = sides[0].len().unwrap_or_else(|| k.param(WideParams::len_q));
        let keys = keys_of(k, spec, batch, &sides[1], (WideParams::len_k, WideParams::key_lengths));
        (sides, Band::new(k, spec, keys, len_q, [WideParams::left, WideParams::right]), len_q)
    }

    /// The walk over the query tiles that see a block's keys, for every query head that shares them.
    pub fn query_steps(&self, k: &mut KernelBuilder, spec: &Spec) -> Steps {
        let group = spec.grouped.then_some(WideParams::group);
        Steps::new(k, group, self.head, [self.first, self.last], self.any)
    }

    /// The walk over the key tiles that a block's queries see.
    pub fn key_steps(&self, k: &mut KernelBuilder) -> Steps {
        Steps::new::<WideParams>(k, None, self.kv_head, [self.first, self.last], self.any)
    }

    /// Where the numbers of a head's queries are, from a row on.
    pub fn numbers(
        &self,
        k: &mut KernelBuilder,
        numbers: ParamHandle<WideParams, GlobalPtr>,
        head: Reg<B32>,
        row: Reg<B32>,
    ) -> Reg<B64> {
        let strides = [WideParams::row_batch, WideParams::row_head];
        let row = self.queries.padded(k, row);
        numbers_at(k, numbers, strides, [self.queries.entry, head, row])
    }
}
