//! Key tiles of sequences of different lengths, shared out on the GPU: every block gets as many, whatever the lengths are.
//!
//! A column is a tile of queries of one head. All key tiles stand in a row: those that the first column of the first sequence
//! sees, those of its next column, and so on to the last column of the last sequence. Before each column there is room for what
//! it costs to begin with it; a sequence without keys has no place in the row. The row is cut into equal shares, one per block. So
//! a share is some parts: a part is a stretch of one column's key tiles. Room that is cut in two belongs to whoever has the
//! column's first tile.
//!
//! The number of a part is that of its block plus that of its column. From one part to the next, at least one of the two
//! grows, so no two parts have the same number; and the parts of a column have numbers one behind the other. Each part's
//! partial result lies in the workspace at its number. Which numbers a column's parts have lies there too, for the kernel
//! that merges them.
//!
//! A warp finds the parts of its block. It looks at the lengths of 32 sequences at a time, from the first to those of its last
//! part.

use flashcore_ptx::{B32, GlobalPtr, KernelBuilder, Reg, kernel_params};

use crate::{
    Spec,
    bind::{Args, Operand},
};

/// Rows of a tile of queries.
const ROWS: u32 = 64;

/// Sequences that a warp looks at together.
const TOGETHER: u32 = 32;

/// How many times as many are on their way at once when all are counted.
const AT_ONCE: u32 = 4;

/// All lanes.
const ALL_LANES: u32 = u32::MAX;

/// The fewest bytes of keys and values that are worth a share of their own, and the fewest keys.
const FEWEST: [u32; 2] = [64 << 10, 128];

/// What it costs to begin with a column, in key tiles: its queries, scores that nothing overlaps, and a partial result. Not measured.
const START: u32 = 1;

kernel_params! {
    /// What launches are given behind their other parameters where blocks share keys by length.
    pub struct ShareParams {
        /// For each column, the number of its first part and how many parts it has: two u32.
        part_places: GlobalPtr,
        /// Sequences.
        part_sequences: u32,
        /// Tiles of queries of a head.
        part_tiles: u32,
        /// Rows of a partial result.
        part_rows: u32,
    }
}

/// Tiles of queries of a head with so many rows.
///
/// ```
/// use flashcore_kernels::{ElementType, Spec, share_tiles};
///
/// // Rows of one query stay together.
/// let spec = Spec { rows_per_query: 24, ..Spec::new(ElementType::F16, 64) };
/// assert_eq!(share_tiles(&spec, 96), 2);
/// ```
pub fn share_tiles(spec: &Spec, len_q: u32) -> u32 {
    len_q.div_ceil(rows(spec))
}

/// Rows of a partial result of a head with so many rows.
pub fn share_rows(spec: &Spec, len_q: u32) -> u32 {
    len_q.min(rows(spec))
}

/// Rows that a tile takes: those of whole queries.
fn rows(spec: &Spec) -> u32 {
    ROWS / spec.rows_per_query * spec.rows_per_query
}

impl ShareParams {
    /// The parameters of a launch.
    pub(crate) fn bind(args: &Args, spec: &Spec) -> Self {
        let [_, _, len_q] = args.rows(spec);
        Self {
            part_places: args.tensor(Operand::PartialPlaces).pointer(),
            part_sequences: args.sequences,
            part_tiles: share_tiles(spec, len_q),
            part_rows: share_rows(spec, len_q),
        }
    }

    /// The number of a column's first part, and how many parts it has.
    pub(crate) fn parts_of(k: &mut KernelBuilder, column: Reg<B32>) -> [Reg<B32>; 2] {
        let places = k.param(Self::part_places);
        let at = k.mad_wide_u32(column, 8u32, places);
        k.ld_global_vec(at)
    }
}

/// The fewest key tiles of so many keys that are worth a share of their own.
fn fewest(spec: &Spec, block_n: u32) -> u32 {
    let [bytes, keys] = FEWEST;
    let key_bytes = (spec.head_dim + spec.head_dim_v) * spec.kv.unwrap_or(spec.dtype).size();
    bytes.div_ceil(key_bytes).max(keys).div_ceil(block_n)
}

/// A stretch of one column's key tiles.
pub(crate) struct Part {
    /// The sequence of its column.
    pub sequence: Reg<B32>,
    /// Which of the sequence's columns.
    pub column: Reg<B32>,
    /// The first key tile.
    pub first: Reg<B32>,
    /// The last one.
    pub last: Reg<B32>,
    pub number: Reg<B32>,
}

/// A block's share, and how far it has been taken.
pub(crate) struct Shares<'a> {
    /// How many keys a sequence has.
    len: &'a dyn Fn(&mut KernelBuilder, Reg<B32>) -> Reg<B32>,
    /// Keys of a tile.
    block_n: u32,
    /// Columns of a sequence.
    columns: Reg<B32>,
    lane: Reg<B32>,
    block: Reg<B32>,
    /// Places of a share.
    share: Reg<B32>,
    /// The next place in the row, and the end of this block's.
    at: Reg<B32>,
    end: Reg<B32>,
    /// The first of the sequences that are looked at, and the places in the row before it.
    first: Reg<B32>,
    before: Reg<B32>,
    /// The places of a column of this lane's sequence.
    places: Reg<B32>,
    /// The places in the row up to the end of these sequences.
    past: Reg<B32>,
}

impl<'a> Shares<'a> {
    /// The share of this block, in all lanes of a warp.
    pub fn new(
        k: &mut KernelBuilder,
        spec: &Spec,
        block_n: u32,
        columns: Reg<B32>,
        len: &'a dyn Fn(&mut KernelBuilder, Reg<B32>) -> Reg<B32>,
    ) -> Self {
        k.section("shares: how much each block has");
        let (block, blocks, lane) = (k.ctaid_x(), k.nctaid_x(), k.laneid());
        let sequences = k.param(ShareParams::part_sequences);
        let [share, at, end, first, before, places, past] = std::array::from_fn(|_| k.mov_b32(0u32));
        let shares = Self { len, block_n, columns, lane, block, share, at, end, first, before, places, past };
        let all = k.mov_b32(0u32);
        k.for_s32(lane, sequences, AT_ONCE * TOGETHER, |k, sequence, _| {
            for i in 0..AT_ONCE {
                let sequence = k.add_u32(sequence, i * TOGETHER);
                let places = shares.places_of(k, sequence);
                k.set(all, |k| k.add_u32(all, places));
            }
        });
        let all = k.redux_add_u32(all, ALL_LANES);
        let all = k.mul_lo_u32(all, columns);
        let up = k.add_u32(all, blocks);
        let up = k.sub_u32(up, 1u32);
        let even = k.div_u32(up, blocks);
        k.set(share, |k| k.max_u32(even, fewest(spec, block_n)));
        k.set(at, |k| k.mul_lo_u32(block, share));
        let mine = k.add_u32(at, share);
        k.set(end, |k| k.min_u32(mine, all));
        shares.look(k);
        shares
    }

    /// Says of sequences without keys that they have no parts.
    fn store_without_keys(&self, k: &mut KernelBuilder) {
        k.comment("no keys, and so no parts");
        let (sequences, zero) = (k.param(ShareParams::part_sequences), k.mov_b32(0u32));
        k.for_s32(self.lane, sequences, TOGETHER, |k, sequence, _| {
            let places = self.places_of(k, sequence);
            let none = k.setp_eq_u32(places, 0u32);
            k.if_(none, |k| {
                k.for_s32(0u32, self.columns, 1u32, |k, column, _| {
                    let column = k.mad_lo_u32(sequence, self.columns, column);
                    store_parts(k, column, [zero, zero]);
                });
            });
        });
    }

    /// Places of a column of a sequence; none where there are not so many sequences.
    fn places_of(&self, k: &mut KernelBuilder, sequence: Reg<B32>) -> Reg<B32> {
        let sequences = k.param(ShareParams::part_sequences);
        let last = k.sub_u32(sequences, 1u32);
        // Without a branch, so that reads do not wait for each other.
        let read = k.min_u32(sequence, last);
        let len = (self.len)(k, read);
        let past = k.add_u32(len, self.block_n * (1 + START) - 1);
        let places = k.div_u32(past, self.block_n);
        let (exists, some) = (k.setp_le_u32(sequence, last), k.setp_gt_s32(len, 0));
        let counts = k.and_pred(exists, some);
        k.selp_b32(places, 0u32, counts)
    }

    /// Looks at the next sequences, one per lane.
    fn look(&self, k: &mut KernelBuilder) {
        let sequence = k.add_u32(self.first, self.lane);
        let places = self.places_of(k, sequence);
        k.set(self.places, |k| k.mov_b32(places));
        let all = k.redux_add_u32(places, ALL_LANES);
        k.set(self.past, |k| k.mad_lo_u32(all, self.columns, self.before));
    }

    /// Runs the body for each part of this block, in all lanes of a warp. The first block also says which columns have none.
    pub fn each(&self, k: &mut KernelBuilder, mut body: impl FnMut(&mut KernelBuilder, &Part)) {
        let Self { at, end, block, columns, share, .. } = *self;
        k.while_(
            |k| k.setp_lt_u32(at, end),
            |k, _| {
                let Stretch { sequence, column, places, inside } = self.next(k);
                let begin = k.sub_u32(at, inside);
                let left = k.sub_u32(end, begin);
                let past = k.min_u32(left, places);
                k.set(at, |k| k.add_u32(begin, past));
                k.comment("without a tile, the column is the next block's");
                let exists = k.setp_gt_u32(past, START);
                k.if_(exists, |k| {
                    let before = k.max_u32(inside, START);
                    let first = k.sub_u32(before, START);
                    let last = k.sub_u32(past, 1 + START);
                    let of_all = k.mad_lo_u32(sequence, columns, column);
                    let number = k.add_u32(block, of_all);
                    let begins = k.setp_eq_u32(first, 0u32);
                    let lead = k.setp_eq_u32(self.lane, 0u32);
                    let says = k.and_pred(begins, lead);
                    k.if_(says, |k| {
                        k.comment("whoever has the first tile of a column knows which parts it has");
                        let past = k.add_u32(begin, places);
                        let last = k.sub_u32(past, 1u32);
                        let last = k.div_u32(last, share);
                        let more = k.sub_u32(last, block);
                        let parts = k.add_u32(more, 1u32);
                        store_parts(k, of_all, [number, parts]);
                    });
                    body(k, &Part { sequence, column, first, last, number });
                });
            },
        );
        // Others may still be at work on what was found last.
        let leads = k.setp_eq_u32(block, 0u32);
        k.if_(leads, |k| self.store_without_keys(k));
    }

    /// What is at the next place.
    fn next(&self, k: &mut KernelBuilder) -> Stretch {
        k.section("shares: the next part");
        let Self { at, columns, .. } = *self;
        k.while_(
            |k| k.setp_ge_u32(at, self.past),
            |k, _| {
                k.set(self.before, |k| k.mov_b32(self.past));
                k.set(self.first, |k| k.add_u32(self.first, TOGETHER));
                self.look(k);
            },
        );
        k.comment("the places of this lane's sequence and of those of lanes below it");
        let own = k.mul_lo_u32(self.places, columns);
        let mut through = own;
        for distance in [1u32, 2, 4, 8, 16] {
            let below = k.shfl_up(through, distance);
            let some = k.setp_ge_u32(self.lane, distance);
            let sum = k.add_u32(through, below);
            through = k.selp_b32(sum, through, some);
        }
        let inside = k.sub_u32(at, self.before);
        let begin = k.sub_u32(through, own);
        k.comment("the last sequence that begins here or before, which is one with keys");
        let begun = k.setp_ge_u32(inside, begin);
        let it = k.ballot(begun, ALL_LANES);
        let it = k.bfind_u32(it);
        let (begin, places) = (k.shfl_idx(begin, it), k.shfl_idx(self.places, it));
        let inside = k.sub_u32(inside, begin);
        let column = k.div_u32(inside, places);
        let whole = k.mul_lo_u32(column, places);
        let inside = k.sub_u32(inside, whole);
        Stretch { sequence: k.add_u32(self.first, it), column, places, inside }
    }
}

/// Places of a column.
struct Stretch {
    sequence: Reg<B32>,
    column: Reg<B32>,
    /// How many the column has.
    places: Reg<B32>,
    /// Those of it before the next one.
    inside: Reg<B32>,
}

/// Says which parts a column has: the number of the first, and how many.
fn store_parts(k: &mut KernelBuilder, column: Reg<B32>, parts: [Reg<B32>; 2]) {
    let places = k.param(ShareParams::part_places);
    let at = k.mad_wide_u32(column, 8u32, places);
    k.st_global_vec(at, parts);
}
