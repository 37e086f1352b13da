//! The warps that turn V around: from a row per key to a row per column, as the product of 8-bit floats needs it.
//!
//! `ldmatrix` turns pairs of bytes around, `prmt` takes the pairs apart, and `stmatrix` writes rows of sixteen keys. Of
//! each sixteen, key [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15] stand at the places in order: that is where a
//! thread's own probabilities stand among its A operands.

use flashcore_ptx::{B32, KernelBuilder, Pred, ProxySpace, Reg, Shared};

use super::{
    Memory, PITCH, Schedule, Sizes, columns,
    ring::Ring,
    tiles::{Tile, each_tile},
};
use crate::{Spec, phase::wait_for_launch};

/// Warps that turn tiles around: those of the producer's warpgroup that copy nothing.
pub(super) const WARPS: u32 = 3;

/// Columns that are turned around by one instruction each.
const STEP: u32 = 32;

/// How many of these are in flight: loads wait for stores before them, so several loads come first.
const IN_FLIGHT: usize = 2;

/// Rows of a tile that is turned around.
pub(super) fn rows(spec: &Spec) -> u32 {
    spec.head_dim_v.next_multiple_of(STEP)
}

pub(super) struct Turner<'a> {
    schedule: Schedule,
    spec: &'a Spec,
    sizes: Sizes,
    /// V as it was copied.
    v: Ring,
    /// V turned around.
    turned: Ring,
    /// The first sixteen keys of this warp.
    first: Reg<B32>,
    /// Where this lane reads in a tile, for the first sixteen keys and the first columns.
    read: Reg<B32>,
    /// The start of the row where this lane writes.
    write: Reg<B32>,
    /// Which chunk of its row's first eight this lane writes for the first sixteen keys, by the swizzle.
    phase: Reg<B32>,
    /// Which bytes of two registers make the first of two rows, and the second.
    picks: [Reg<B32>; 2],
    first_lane: Reg<Pred>,
    /// The first key of sixteen that this lane has after the turn.
    key: Reg<B32>,
}

impl<'a> Turner<'a> {
    pub fn new(
        k: &mut KernelBuilder,
        schedule: Schedule,
        spec: &'a Spec,
        memory: &Memory,
        (slots, bars): (Shared, Shared),
    ) -> Self {
        k.section("turn");
        let (sizes, stages) = (schedule.sizes(spec), schedule.stages);
        let tid = k.tid_x();
        let (warp, lane) = (k.shr_u32(tid, 5u32), k.and_b32(tid, 31u32));
        let first = k.sub_u32(warp, schedule.consumer_threads() / 32 + 1);
        let (matrix, i) = (k.shr_u32(lane, 3u32), k.and_b32(lane, 7u32));
        let (below, right) = (k.and_b32(matrix, 1u32), k.shr_u32(matrix, 1u32));
        // Matrices of eight keys by sixteen bytes: two below each other, two beside each other.
        let key = k.mad_lo_u32(below, 8u32, i);
        let chunk = k.xor_b32(right, i);
        let read = k.mul_lo_u32(key, PITCH);
        let read = k.mad_lo_u32(chunk, 16u32, read);
        // A pair of them gives two matrices of eight rows: one has the even bytes of the first four places and the odd
        // ones of the last four, the other has the rest. So the rows of a matrix lie in eight different chunks of banks.
        let last = k.shr_u32(i, 2u32);
        let odd = k.xor_b32(below, last);
        let byte = k.mad_lo_u32(i, 2u32, odd);
        let swapped = k.setp_ge_u32(lane, 16u32);
        let (even, odd) = (0x6420u32, 0x7531u32);
        let picks = [k.selp_b32(odd, even, swapped), k.selp_b32(even, odd, swapped)];
        let row = k.mad_lo_u32(right, 16u32, byte);
        let quad = k.and_b32(lane, 3u32);
        Self {
            schedule,
            spec,
            sizes,
            v: Ring::consumer(k, memory.v, sizes.v, memory.v_bars, stages),
            turned: Ring::producer(k, slots, sizes.turned, bars, stages),
            first,
            read,
            write: k.mul_lo_u32(row, PITCH),
            phase: k.and_b32(byte, 7u32),
            picks,
            first_lane: k.setp_eq_u32(lane, 0u32),
            key: k.shl_b32(quad, 1u32),
        }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        wait_for_launch(k);
        each_tile(k, self.schedule, self.spec, |k, tile| {
            let keys = tile.keys(k, self.schedule);
            k.section("turn: the V tiles of one tile of queries");
            k.if_(keys.any, |k| {
                let at = k.mov_b32(keys.last);
                k.while_(
                    |k| k.setp_ge_s32(at, keys.first),
                    |k, _| {
                        self.turn(k, tile, at);
                        k.set(at, |k| k.sub_s32(at, 1));
                    },
                );
            });
        });
    }

    /// Turns one tile around, and passes it on.
    fn turn(&self, k: &mut KernelBuilder, tile: &Tile, at: Reg<B32>) {
        let Schedule { block_n, .. } = self.schedule;
        self.v.wait_filled(k);
        self.turned.wait_free(k);
        let (from, to) = (self.v.address(k), self.turned.address(k));
        let (from, to) = (k.add_u32(from, self.read), k.add_u32(to, self.write));
        // Keys of this batch entry from this lane's first on.
        let left = self.spec.key_lengths.then(|| {
            let first = k.mad_lo_u32(at, block_n, self.key);
            k.sub_s32(tile.band.keys, first)
        });
        let sixteen = k.mov_b32(self.first);
        k.while_(
            |k| k.setp_lt_u32(sixteen, block_n / 16),
            |k, _| {
                let from = k.mad_lo_u32(sixteen, 16 * PITCH, from);
                let to = self.place(k, sixteen, to);
                let exists = left.map(|left| exists(k, left, sixteen));
                let steps: Vec<u32> = (0..rows(self.spec) / STEP).collect();
                for steps in steps.chunks(IN_FLIGHT) {
                    let loaded: Vec<_> = steps.iter().map(|&step| self.load(k, from, step)).collect();
                    for (&step, [a, b, c, d]) in steps.iter().zip(loaded) {
                        let rows = [(a, b, 0), (a, b, 1), (c, d, 0), (c, d, 1)].map(
                            |(upper, lower, pick): (_, _, usize)| {
                                let row = k.prmt_b32(upper, lower, self.picks[pick]);
                                exists.map_or(row, |exists| k.and_b32(row, exists))
                            },
                        );
                        k.stmatrix(to.at((STEP * PITCH * step) as i32), rows);
                    }
                }
                k.set(sixteen, |k| k.add_u32(sixteen, WARPS));
            },
        );
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_warp_sync();
        let (free, filled) = (self.v.free(k), self.turned.filled(k));
        k.when(self.first_lane, |k| k.mbarrier_arrive(filled));
        k.when(self.first_lane, |k| k.mbarrier_arrive(free));
        self.v.advance(k);
        self.turned.advance(k);
    }

    /// Sixteen keys by [`STEP`] columns.
    fn load(&self, k: &mut KernelBuilder, from: Reg<B32>, step: u32) -> [Reg<B32>; 4] {
        let inside = STEP * step % columns(self.spec.dtype);
        // Rows start at whole lines, so a step inside a line is an XOR.
        let at = if inside == 0 { from } else { k.xor_b32(from, inside) };
        let panel = STEP * step / columns(self.spec.dtype);
        k.ldmatrix_trans(at.at((panel * self.sizes.kv_panel) as i32))
    }

    /// Where this lane writes sixteen keys.
    fn place(&self, k: &mut KernelBuilder, sixteen: Reg<B32>, to: Reg<B32>) -> Reg<B32> {
        if self.schedule.block_n <= PITCH {
            let chunk = k.xor_b32(sixteen, self.phase);
            return k.mad_lo_u32(chunk, 16u32, to);
        }
        let (panel, inside) = (k.shr_u32(sixteen, 3u32), k.and_b32(sixteen, 7u32));
        let to = k.mad_lo_u32(panel, self.sizes.turned_panel, to);
        let chunk = k.xor_b32(inside, self.phase);
        k.mad_lo_u32(chunk, 16u32, to)
    }
}

/// Which bytes are of keys that exist. The others become zeros: their probabilities are 0, but 0 · NaN is NaN.
fn exists(k: &mut KernelBuilder, left: Reg<B32>, sixteen: Reg<B32>) -> Reg<B32> {
    let before = k.shl_b32(sixteen, 4u32);
    let left = k.sub_s32(left, before);
    let mut mask = k.mov_b32(0u32);
    for (byte, key) in [0, 1, 8, 9].into_iter().enumerate() {
        let there = k.setp_gt_s32(left, key);
        let bits = k.selp_b32(0xff_u32 << (8 * byte), 0u32, there);
        mask = k.or_b32(mask, bits);
    }
    mask
}
