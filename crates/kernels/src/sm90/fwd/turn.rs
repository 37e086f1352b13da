//! The warps that turn V around: from a row per key to a row per column, as the product of 8-bit floats needs it.
//!
//! `ldmatrix` turns pairs of bytes around, `prmt` takes the pairs apart, and `stmatrix` writes rows of sixteen keys. Of
//! each sixteen, the keys stand in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: that is where a thread's own
//! probabilities stand among its A operands.

use flashcore_ptx::{B32, KernelBuilder, ProxySpace, Reg, Shared};

use super::{Memory, PITCH, Schedule, Sizes, Turned, columns};
use crate::{Spec, sm90::ring::Ring};

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

/// Takes the even bytes of two registers.
const EVEN: u32 = 0x6420;
/// What makes even bytes odd ones, and odd ones even.
const OTHERS: u32 = 0x1111;

/// One warp. It has few registers, so it keeps few numbers.
pub(super) struct Turner<'a> {
    schedule: Schedule,
    spec: &'a Spec,
    sizes: Sizes,
    /// V as it was copied, from where this lane reads the first sixteen keys and the first columns.
    v: Ring,
    /// V turned around, from where this lane writes them.
    turned: Ring,
    /// Keys from the tile's first on, for each slot of V; 0 after the last tile.
    left: Shared,
    /// Which bytes of two registers make the first of two rows.
    picks: Reg<B32>,
}

impl<'a> Turner<'a> {
    pub fn new(
        k: &mut KernelBuilder,
        schedule: Schedule,
        spec: &'a Spec,
        memory: &Memory,
        Turned { slots, bars, left }: Turned,
    ) -> Self {
        k.section("turn");
        let sizes = schedule.sizes(spec);
        let tid = k.tid_x();
        let lane = k.and_b32(tid, 31u32);
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
        let picks = k.selp_b32(EVEN ^ OTHERS, EVEN, swapped);
        let row = k.mad_lo_u32(right, 16u32, byte);
        let chunk = k.and_b32(byte, 7u32);
        let write = k.mul_lo_u32(row, PITCH);
        let write = k.mad_lo_u32(chunk, 16u32, write);
        let v = Ring::consumer(k, memory.v, sizes.v, memory.v_bars, schedule.stages);
        let turned = v.behind(k, slots, sizes.turned, bars).further(k, write);
        Self { schedule, spec, sizes, v: v.further(k, read), turned, left, picks }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        let left = k.mov_b32(0u32);
        k.while_(
            |k| {
                self.v.wait_filled(k);
                let word = self.v.word(k, self.left);
                k.set(left, |k| k.ld_shared(word));
                k.setp_ne_u32(left, 0u32)
            },
            |k, _| self.turn(k, left),
        );
    }

    /// Turns one tile around, and passes it on.
    fn turn(&self, k: &mut KernelBuilder, left: Reg<B32>) {
        let Schedule { block_n, .. } = self.schedule;
        k.section("turn: one tile of V");
        self.turned.wait_free(k);
        let (from, to) = (self.v.address(k), self.turned.address(k));
        // Each warp takes every third sixteen keys.
        let tid = k.tid_x();
        let warp = k.shr_u32(tid, 5u32);
        let sixteen = k.sub_u32(warp, self.schedule.consumer_threads() / 32 + 1);
        let sixteen = k.mov_b32(sixteen);
        k.while_(
            |k| k.setp_lt_u32(sixteen, block_n / 16),
            |k, _| {
                let from = k.mad_lo_u32(sixteen, 16 * PITCH, from);
                let to = self.place(k, sixteen, to);
                let exists = self.spec.has_foreign_keys().then(|| exists(k, left, sixteen));
                let steps: Vec<u32> = (0..rows(self.spec) / STEP).collect();
                for steps in steps.chunks(IN_FLIGHT) {
                    let loaded: Vec<_> = steps.iter().map(|&step| self.load(k, from, step)).collect();
                    for (&step, [a, b, c, d]) in steps.iter().zip(loaded) {
                        let others = k.xor_b32(self.picks, OTHERS);
                        let rows = [(a, b, self.picks), (a, b, others), (c, d, self.picks), (c, d, others)];
                        let rows = rows.map(|(upper, lower, picks)| {
                            let row = k.prmt_b32(upper, lower, picks);
                            exists.map_or(row, |exists| k.and_b32(row, exists))
                        });
                        k.stmatrix(to.at((STEP * PITCH * step) as i32), rows);
                    }
                }
                k.set(sixteen, |k| k.add_u32(sixteen, WARPS));
            },
        );
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_warp_sync();
        let tid = k.tid_x();
        let lane = k.and_b32(tid, 31u32);
        let first_lane = k.setp_eq_u32(lane, 0u32);
        let (free, filled) = (self.v.free(k), self.turned.filled(k));
        k.when(first_lane, |k| k.mbarrier_arrive(filled));
        k.when(first_lane, |k| k.mbarrier_arrive(free));
        self.v.advance(k);
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
        // Slots start at whole lines, so a step inside a line is an XOR.
        if self.schedule.block_n <= PITCH {
            let chunk = k.shl_b32(sixteen, 4u32);
            return k.xor_b32(to, chunk);
        }
        let (panel, inside) = (k.shr_u32(sixteen, 3u32), k.and_b32(sixteen, 7u32));
        let chunk = k.shl_b32(inside, 4u32);
        let to = k.xor_b32(to, chunk);
        k.mad_lo_u32(panel, self.sizes.turned_panel, to)
    }
}

/// Which bytes are of keys that exist. The others become zeros: their probabilities are 0, but 0 · NaN is NaN.
fn exists(k: &mut KernelBuilder, left: Reg<B32>, sixteen: Reg<B32>) -> Reg<B32> {
    let tid = k.tid_x();
    let quad = k.and_b32(tid, 3u32);
    let before = k.shl_b32(quad, 1u32);
    let before = k.mad_lo_u32(sixteen, 16u32, before);
    let left = k.sub_s32(left, before);
    let mut mask = k.mov_b32(0u32);
    for (byte, key) in [0, 1, 8, 9].into_iter().enumerate() {
        let there = k.setp_gt_s32(left, key);
        let bits = k.selp_b32(0xff_u32 << (8 * byte), 0u32, there);
        mask = k.or_b32(mask, bits);
    }
    mask
}
