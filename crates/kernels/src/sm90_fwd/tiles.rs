//! Which tile of queries a block takes up, and which keys that tile sees.

use flashcore_ptx::{B32, KernelBuilder, ParamHandle, Pred, Reg};

use super::Schedule;
use crate::{
    Sm90Params, Spec,
    work::{Band, KeyRange, Rows},
};

/// A tile of queries.
pub(super) struct Tile {
    pub rows: Rows,
    pub kv_head: Reg<B32>,
    pub band: Band,
}

/// The key tiles that one block walks over, from `last` down to `first`.
pub(super) struct Keys {
    pub first: Reg<B32>,
    pub last: Reg<B32>,
    /// Whether there are any.
    pub any: Reg<Pred>,
    pub range: KeyRange,
}

/// Runs the body for each tile of queries that this block takes up.
pub(super) fn each_tile(
    k: &mut KernelBuilder,
    schedule: Schedule,
    spec: &Spec,
    mut body: impl FnMut(&mut KernelBuilder, &Tile),
) {
    let cluster = if schedule.split > 1 { k.clusterid_x() } else { k.ctaid_x() };
    if !schedule.persistent {
        let tile = Tile::find(k, schedule, spec, cluster);
        body(k, &tile);
        return;
    }
    let tiles = k.param(Sm90Params::tiles);
    let clusters = if schedule.split > 1 { k.nclusterid_x() } else { k.nctaid_x() };
    // Every other round runs backwards: tiles come longest first, and so the block that had the longest of a round
    // gets the shortest of the next.
    let last = k.sub_u32(clusters, 1u32);
    let mirrored = k.sub_u32(last, cluster);
    let (mine, other) = (k.mov_b32(cluster), k.mov_b32(mirrored));
    let start = k.mov_b32(0u32);
    let position = k.mov_b32(cluster);
    k.while_(
        |k| k.setp_lt_u32(start, tiles),
        |k, _| {
            let exists = k.setp_lt_u32(position, tiles);
            k.if_(exists, |k| {
                let tile = Tile::find(k, schedule, spec, position);
                body(k, &tile);
            });
            k.set(start, |k| k.add_u32(start, clusters));
            let swapped = k.mov_b32(mine);
            k.set(mine, |k| k.mov_b32(other));
            k.set(other, |k| k.mov_b32(swapped));
            k.set(position, |k| k.add_u32(start, mine));
        },
    );
}

/// n / divisor, and what remains.
fn divide(
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

fn remainder(k: &mut KernelBuilder, n: Reg<B32>, quotient: Reg<B32>, divisor: Reg<B32>) -> Reg<B32> {
    let taken = k.mul_lo_u32(quotient, divisor);
    k.sub_u32(n, taken)
}

impl Tile {
    fn find(k: &mut KernelBuilder, schedule: Schedule, spec: &Spec, position: Reg<B32>) -> Self {
        k.section("tile: which rows of which head");
        let (section_heads, blocks) = (k.param(Sm90Params::section), k.param(Sm90Params::blocks));
        let section = divide(k, position, Sm90Params::section_tiles_mul, Sm90Params::section_tiles_shift);
        let section_tiles = k.mul_lo_u32(section_heads, blocks);
        let inside = remainder(k, position, section, section_tiles);
        let from_end = divide(k, inside, Sm90Params::section_mul, Sm90Params::section_shift);
        let head_inside = remainder(k, inside, from_end, section_heads);
        let head = k.mad_lo_u32(section, section_heads, head_inside);
        let batch = divide(k, head, Sm90Params::heads_mul, Sm90Params::heads_shift);
        let heads = k.param(Sm90Params::heads);
        let head = remainder(k, head, batch, heads);
        let kv_head =
            if spec.grouped { divide(k, head, Sm90Params::group_mul, Sm90Params::group_shift) } else { head };
        let last_block = k.sub_u32(blocks, 1u32);
        let block = k.sub_u32(last_block, from_end);
        let len_q = k.param(Sm90Params::len_q);
        let rows = Rows { batch, head, len_q, first_row: k.mul_lo_u32(block, schedule.rows()) };
        let keys = if spec.key_lengths {
            let lengths = k.param(Sm90Params::key_lengths);
            let own = k.mad_wide_u32(batch, 4u32, lengths);
            k.ld_global::<B32>(own)
        } else {
            k.param(Sm90Params::len_k)
        };
        let band = Band::new(k, spec, keys, len_q, [Sm90Params::left, Sm90Params::right]);
        Self { rows, kv_head, band }
    }

    /// The key tiles that this block walks over.
    pub fn keys(&self, k: &mut KernelBuilder, schedule: Schedule) -> Keys {
        let range = self.band.key_range(k, &self.rows, schedule.rows());
        let past = k.add_u32(range.end, schedule.block_n - 1);
        let past = k.div_u32(past, schedule.block_n);
        let (mut last, mut first) = (k.sub_s32(past, 1), k.div_u32(range.begin, schedule.block_n));
        let mut any = k.setp_lt_s32(range.begin, range.end);
        if schedule.split > 1 {
            k.comment("this block's share of the key tiles");
            let rank = k.cluster_ctarank();
            let count = k.sub_s32(past, first);
            let share = k.add_u32(count, schedule.split - 1);
            let share = k.shr_u32(share, schedule.split.trailing_zeros());
            let before = k.mul_lo_u32(rank, share);
            last = k.sub_s32(last, before);
            let past_mine = k.sub_s32(last, share);
            let first_mine = k.add_s32(past_mine, 1);
            let some = k.setp_ge_s32(last, first);
            any = k.and_pred(any, some);
            first = k.max_s32(first, first_mine);
        }
        Keys { first, last, any, range }
    }
}
