//! The mean of the keys: sums and bounds of each channel by chunk, and the pass that makes of them the mean and the largest
//! magnitude that is left when it is subtracted.

use flashcore_ptx::{B32, B64, F32, KernelBuilder, Pred, Reg};

use super::{
    Chunk, MEAN_THREADS, Memory, Quantize, Reader, address, first_thread,
    params::{Common, OfK, TensorParams},
    reduce,
    rotation::{butterfly_sign, sign_factors},
};
use crate::parts::softmax::NEG_INF;

/// Chunks that a thread of the pass between has in flight.
const CHUNKS_AT_ONCE: u32 = 4;

/// The sums and bounds of a thread's eight channels.
pub(super) struct Channels {
    sum: [Reg<F32>; 8],
    least: [Reg<F32>; 8],
    most: [Reg<F32>; 8],
}

impl Channels {
    pub fn new(k: &mut KernelBuilder) -> Self {
        let mut eight = |value: f32| std::array::from_fn(|_| k.mov_f32(value));
        Self { sum: eight(0.0), least: eight(f32::INFINITY), most: eight(NEG_INF) }
    }

    /// Adds a row.
    pub fn add(&self, k: &mut KernelBuilder, x: &[Reg<F32>; 8], exists: Reg<Pred>) {
        for (&sum, &x) in self.sum.iter().zip(x) {
            k.when(exists, |k| k.set(sum, |k| k.add_f32(sum, x)));
        }
    }

    /// Widens the bounds to a row, which may have been seen before.
    pub fn bound(&self, k: &mut KernelBuilder, y: &[Reg<F32>; 8]) {
        for (i, &y) in y.iter().enumerate() {
            k.set(self.least[i], |k| k.min_f32(self.least[i], y));
            k.set(self.most[i], |k| k.max_f32(self.most[i], y));
        }
    }

    /// Adds up what the block's threads have of each channel, in the order of their rows, and stores it.
    pub fn store(
        &self,
        k: &mut KernelBuilder,
        of: Quantize,
        memory: &Memory,
        reader: &Reader,
        chunk: &Chunk,
    ) {
        k.section("scan: sums and bounds of the channels");
        let columns = reader.columns;
        let base = k.shared_addr(memory.channels);
        let row = k.mul_lo_u32(reader.row, columns);
        let place = k.add_u32(row, reader.column);
        let mine = k.mad_lo_u32(place, 4u32, base);
        let part = (4 * reader.at_once * columns) as i32;
        let works = k.setp_lt_u32(reader.row, reader.at_once);
        for (i, of) in [&self.sum, &self.least, &self.most].into_iter().enumerate() {
            for half in 0..2 {
                let values = std::array::from_fn::<_, 4, _>(|j| of[4 * half + j]);
                let at = mine.at(part * i as i32 + 16 * half as i32);
                k.when(works, |k| k.st_shared_vec(at, values));
            }
        }
        k.bar_sync_all();
        let tid = k.tid_x();
        let [rows, ..] = OfK::counts();
        let rows = k.param(rows);
        let chunks = of.chunks_of(k, rows);
        let item = k.mad_lo_u32(chunk.batch, chunk.heads, chunk.head);
        let out = partial_address(k, columns, chunks, item);
        let out = k.mad_wide_u32(chunk.chunk, 12 * columns, out);
        let channel = k.setp_lt_u32(tid, columns);
        k.if_(channel, |k| {
            let totals = [k.mov_f32(0.0), k.mov_f32(f32::INFINITY), k.mov_f32(NEG_INF)];
            let mine = k.mad_lo_u32(tid, 4u32, base);
            for row in 0..reader.at_once {
                let theirs: [Reg<F32>; 3] = std::array::from_fn(|i| {
                    k.ld_shared(mine.at(part * i as i32 + (4 * columns * row) as i32))
                });
                merge(k, totals, theirs);
            }
            let out = k.mad_wide_u32(tid, 4u32, out);
            for (i, total) in totals.into_iter().enumerate() {
                k.st_global(out.at((4 * columns) as i32 * i as i32), total);
            }
        });
    }
}

/// Adds sums and widens bounds.
fn merge(k: &mut KernelBuilder, into: [Reg<F32>; 3], from: [Reg<F32>; 3]) {
    k.set(into[0], |k| k.add_f32(into[0], from[0]));
    k.set(into[1], |k| k.min_f32(into[1], from[1]));
    k.set(into[2], |k| k.max_f32(into[2], from[2]));
}

/// Where the partial sums and bounds of a kv head are: for each chunk the sums, the least and the largest.
fn partial_address(k: &mut KernelBuilder, columns: u32, chunks: Reg<B32>, item: Reg<B32>) -> Reg<B64> {
    let base = k.param(Common::partials);
    let chunk = k.mul_lo_u32(item, chunks);
    k.mad_wide_u32(chunk, 12 * columns, base)
}

/// Where the mean of a kv head is.
pub(super) fn mean_address(k: &mut KernelBuilder, batch: Reg<B32>, head: Reg<B32>) -> Reg<B64> {
    address(k, Common::mean, &[Common::mean_batch, Common::mean_head], &[batch, head])
}

impl Quantize {
    /// The pass between: one block per kv head. A thread has a channel of every so many chunks.
    pub(super) fn mean(self, k: &mut KernelBuilder, memory: &Memory) {
        let columns = self.head_dim;
        let strands = MEAN_THREADS / columns;
        k.section("mean: a channel of some chunks");
        let [rows, heads, _] = OfK::counts();
        let (rows, heads) = (k.param(rows), k.param(heads));
        let item = k.ctaid_x();
        let (batch, head) = (k.div_u32(item, heads), k.rem_u32(item, heads));
        let keys = if self.key_lengths {
            let lengths = k.param(Common::key_lengths);
            let own = k.mad_wide_u32(batch, 4u32, lengths);
            let length = k.ld_global::<B32>(own);
            k.min_u32(rows, length)
        } else {
            rows
        };
        let chunks = self.chunks_of(k, rows);
        let tid = k.tid_x();
        let (strand, channel) = (k.div_u32(tid, columns), k.rem_u32(tid, columns));
        let works = k.setp_lt_u32(strand, strands);
        let partials = partial_address(k, columns, chunks, item);
        let partials = k.mad_wide_u32(channel, 4u32, partials);
        let totals = [k.mov_f32(0.0), k.mov_f32(f32::INFINITY), k.mov_f32(NEG_INF)];
        let first = k.selp_b32(strand, chunks, works);
        k.for_s32(first, chunks, (CHUNKS_AT_ONCE * strands) as i32, |k, chunk, _| {
            let read: Vec<[Reg<F32>; 3]> = (0..CHUNKS_AT_ONCE)
                .map(|i| {
                    let chunk = if i == 0 { chunk } else { k.add_u32(chunk, i * strands) };
                    let exists = k.setp_lt_u32(chunk, chunks);
                    let at = k.mad_wide_u32(chunk, 12 * columns, partials);
                    let read = [k.mov_f32(0.0), k.mov_f32(f32::INFINITY), k.mov_f32(NEG_INF)];
                    for (i, &read) in read.iter().enumerate() {
                        let at = at.at((4 * columns) as i32 * i as i32);
                        k.when(exists, |k| k.set(read, |k| k.ld_global(at)));
                    }
                    read
                })
                .collect();
            for read in read {
                merge(k, totals, read);
            }
        });
        k.section("mean: all strands, in their order");
        let base = k.shared_addr(memory.channels);
        let mine = k.mad_lo_u32(tid, 12u32, base);
        for (i, &total) in totals.iter().enumerate() {
            k.st_shared(mine.at(4 * i as i32), total);
        }
        k.bar_sync_all();
        let of_channel = k.mad_lo_u32(channel, 12u32, base);
        let all = [k.mov_f32(0.0), k.mov_f32(f32::INFINITY), k.mov_f32(NEG_INF)];
        for strand in 0..strands {
            let theirs: [Reg<F32>; 3] = std::array::from_fn(|i| {
                k.ld_shared(of_channel.at((12 * columns * strand) as i32 + 4 * i as i32))
            });
            merge(k, all, theirs);
        }
        let [sum, least, most] = all;
        let count = k.cvt_rn_f32_u32(keys);
        let mean = k.div_f32(sum, count);
        let none = k.setp_eq_u32(keys, 0u32);
        let mean = k.selp_f32(0.0, mean, none);
        let at = mean_address(k, batch, head);
        let at = k.mad_wide_u32(channel, 4u32, at);
        let writes = k.setp_lt_u32(tid, columns);
        k.when(writes, |k| k.st_global(at, mean));
        let turned = match self.rotate {
            None => mean,
            Some(seed) => self.turn_mean(k, seed, mean, channel, base),
        };
        let (above, below) = (k.sub_f32(most, turned), k.sub_f32(turned, least));
        let size = k.max_f32(above, below);
        // Without keys it is below 0.
        let size = k.max_f32(size, 0.0);
        let size = reduce(k, memory, size, MEAN_THREADS);
        let amax = k.param(OfK::amax());
        let at = k.mad_wide_u32(item, 4u32, amax);
        let first = first_thread(k);
        k.when(first, |k| k.st_global(at, size));
    }

    /// The mean, rotated: a channel per thread, as often as there are strands.
    fn turn_mean(
        self,
        k: &mut KernelBuilder,
        seed: u32,
        mean: Reg<F32>,
        channel: Reg<B32>,
        base: Reg<B32>,
    ) -> Reg<F32> {
        let factor = sign_factors(k, seed, self.head_dim, channel, 1)[0];
        let mut value = k.mul_f32(mean, factor);
        for distance in (0..self.head_dim.trailing_zeros()).map(|bit| 1 << bit) {
            let other = if distance < 32 {
                k.shfl_bfly(value, distance)
            } else {
                let tid = k.tid_x();
                let other = k.xor_b32(tid, distance);
                let (mine, theirs) = (k.mad_lo_u32(tid, 4u32, base), k.mad_lo_u32(other, 4u32, base));
                k.bar_sync_all();
                k.st_shared(mine, value);
                k.bar_sync_all();
                k.ld_shared(theirs)
            };
            let sign = butterfly_sign(k, channel, distance);
            value = k.fma_f32(value, sign, other);
        }
        value
    }
}
