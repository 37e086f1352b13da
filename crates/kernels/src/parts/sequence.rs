//! Packed sequences in kernels whose blocks have one tile each: which sequence a block's tile is of, and where its rows lie.
//!
//! Tiles are numbered over all sequences, and each sequence has room for a tile that is not full: those of sequence s, which
//! begins at row r, have the numbers from ⌊r / rows⌋ + s on. So the number of a sequence's first tile depends on its own start
//! alone, and a block finds its sequence by bisection. Some numbers are nobody's. In the workspace, where every query has a row,
//! the rows of sequences are placed in the same way, by tiles of [`ROW_PADDING`].

use flashcore_ptx::{B32, B64, GlobalPtr, KernelBuilder, KernelParams, ParamHandle, Pred, Reg};

use super::work::Work;
use crate::{ROW_PADDING, Spec, sm90::PackedParams};

/// Tiles of so many rows that sequences with so many rows in all may have, and numbers that are nobody's.
///
/// ```
/// // However 300 rows are divided among three sequences, they have at most five tiles of 128.
/// assert_eq!(flashcore_kernels::packed_tiles(128, 300, 3), 5);
/// assert_eq!(flashcore_kernels::packed_tiles(128, 0, 3), 0);
/// assert_eq!(flashcore_kernels::packed_tiles(128, 300, 0), 0);
/// ```
pub fn packed_tiles(rows: u32, total: u32, sequences: u32) -> u32 {
    if total.min(sequences) == 0 { 0 } else { total / rows + sequences }
}

/// Where each sequence begins, of queries or of keys.
pub(crate) type Starts = ParamHandle<PackedParams, GlobalPtr>;

/// Where the queries or the keys of a batch entry lie.
#[derive(Clone, Copy)]
pub(crate) struct Side {
    /// The batch entry of its tensors: the first, where sequences are packed.
    pub entry: Reg<B32>,
    /// Where it is packed: the row at which it begins, in its tensors and in the workspace, and how many rows it has.
    sequence: Option<Sequence>,
}

#[derive(Clone, Copy)]
struct Sequence {
    start: Reg<B32>,
    padded: Reg<B32>,
    len: Reg<B32>,
}

impl Side {
    /// In tensors in which each batch entry has rows of its own.
    pub fn dense(entry: Reg<B32>) -> Self {
        Self { entry, sequence: None }
    }

    /// In tensors of this batch entry, or, given where packed sequences begin, of all of them.
    pub fn of(k: &mut KernelBuilder, packed: Option<Starts>, batch: Reg<B32>) -> Self {
        let Some(starts) = packed else { return Self::dense(batch) };
        let starts = k.param(starts);
        let at = k.mad_wide_u32(batch, 4u32, starts);
        let (start, end) = (k.ld_global::<B32>(at), k.ld_global::<B32>(at.at(4)));
        let len = k.sub_s32(end, start);
        let padded = first_tile(k, start, batch, ROW_PADDING);
        let padded = k.mul_lo_u32(padded, ROW_PADDING);
        Self { entry: k.mov_b32(0u32), sequence: Some(Sequence { start, padded, len }) }
    }

    /// How many rows it has, where that is another number for each sequence.
    pub fn len(&self) -> Option<Reg<B32>> {
        self.sequence.map(|sequence| sequence.len)
    }

    /// The row of the tensors that is one of its rows.
    pub fn row(&self, k: &mut KernelBuilder, row: Reg<B32>) -> Reg<B32> {
        self.sequence.map_or(row, |sequence| k.add_u32(sequence.start, row))
    }

    /// The address of its first row, given that of the first row of a head, and the bytes between rows.
    pub fn first_address<P: KernelParams>(
        &self,
        k: &mut KernelBuilder,
        head: Reg<B64>,
        to_row: ParamHandle<P, u64>,
    ) -> Reg<B64> {
        let Some(Sequence { start, .. }) = self.sequence else { return head };
        let to_row = k.param(to_row);
        Work::row_address(k, head, start, to_row)
    }

    /// The row of the workspace that is one of its rows.
    pub fn padded(&self, k: &mut KernelBuilder, row: Reg<B32>) -> Reg<B32> {
        self.sequence.map_or(row, |sequence| k.add_u32(sequence.padded, row))
    }

    /// Of tiles of the workspace with so many rows, the one that is one of its tiles.
    pub fn padded_tile(&self, k: &mut KernelBuilder, tile: Reg<B32>, rows: u32) -> Reg<B32> {
        let Some(Sequence { padded, .. }) = self.sequence else { return tile };
        let before = k.div_u32(padded, rows);
        k.add_u32(before, tile)
    }

    /// Whether it has a tile of this number, where not all that are counted exist.
    pub fn has_tile(&self, k: &mut KernelBuilder, tile: Reg<B32>, rows: u32) -> Option<Reg<Pred>> {
        let past = k.add_u32(self.len()?, rows - 1);
        let tiles = k.div_u32(past, rows);
        // Numbers before the first sequence's are large here.
        Some(k.setp_lt_u32(tile, tiles))
    }
}

/// The number of a sequence's first tile.
fn first_tile(k: &mut KernelBuilder, start: Reg<B32>, sequence: Reg<B32>, rows: u32) -> Reg<B32> {
    let before = k.div_u32(start, rows);
    k.add_u32(before, sequence)
}

/// The sequence that a tile of so many rows would be of, and its number there, where each token has so many rows.
pub(crate) fn find_tile(
    k: &mut KernelBuilder,
    starts: Starts,
    [rows, rows_per_token]: [u32; 2],
    number: Reg<B32>,
) -> [Reg<B32>; 2] {
    k.comment("the last sequence whose tiles begin at this number or before");
    let (starts, sequences) = (k.param(starts), k.param(PackedParams::sequences));
    let (found, past) = (k.mov_b32(0u32), k.mov_b32(sequences));
    let tile_of = |k: &mut KernelBuilder, sequence: Reg<B32>| {
        let at = k.mad_wide_u32(sequence, 4u32, starts);
        let start = k.ld_global::<B32>(at);
        let start = if rows_per_token == 1 { start } else { k.mul_lo_u32(start, rows_per_token) };
        first_tile(k, start, sequence, rows)
    };
    k.while_(
        |k| {
            let next = k.add_u32(found, 1u32);
            k.setp_lt_u32(next, past)
        },
        |k, _| {
            let both = k.add_u32(found, past);
            let middle = k.shr_u32(both, 1u32);
            let first = tile_of(k, middle);
            let before = k.setp_le_u32(first, number);
            k.set(found, |k| k.selp_b32(middle, found, before));
            k.set(past, |k| k.selp_b32(past, middle, before));
        },
    );
    let first = tile_of(k, found);
    [found, k.sub_u32(number, first)]
}

/// Where sequences begin that are packed.
pub(crate) fn starts(spec: &Spec) -> [Option<Starts>; 2] {
    [spec.packed_q.then_some(PackedParams::q_starts), spec.packed_k.then_some(PackedParams::k_starts)]
}
