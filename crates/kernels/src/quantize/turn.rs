//! Values turned around: a row for each column of V, along the keys, as the product of 8-bit floats needs them.
//!
//! Of each sixteen, the keys stand in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, as the attention kernel's own warps write
//! them. A thread has four keys that stand side by side, of sixteen columns: it reads whole sectors of four rows, and the lanes
//! of a warp write words that lie one behind the other.

use flashcore_ptx::{B32, F32, KernelBuilder, Reg};

use super::{Chunk, Quantize, THREADS, address, params::TensorParams};

/// Keys whose order is changed among themselves.
pub(super) const KEYS: u32 = 16;

/// Columns of a thread: two loads of 16 bytes, which are a sector.
const COLUMNS: u32 = 16;

impl Quantize {
    /// The codes of a chunk of values. What lies behind the last key becomes zeros, as far as memory reaches.
    pub(super) fn cast_turned<P: TensorParams>(
        self,
        k: &mut KernelBuilder,
        chunk: &Chunk,
        inverse: Reg<F32>,
    ) {
        k.section("cast: codes, turned around");
        let [rows, ..] = P::counts();
        let rows = k.param(rows);
        let (base, [to_batch, to_head, to_row]) = P::x();
        let x = address(k, base, &[to_batch, to_head], &[chunk.batch, chunk.head]);
        let to_row = k.param(to_row);
        let (base, [to_batch, to_head, to_column]) = P::out();
        let out = address(k, base, &[to_batch, to_head], &[chunk.batch, chunk.head]);
        let to_column = k.param(to_column);
        let past = k.add_u32(chunk.first, self.rows);
        let padded = k.add_u32(rows, KEYS - 1);
        let padded = k.and_b32(padded, !(KEYS - 1));
        let past = k.min_u32(past, padded);
        let last = k.sub_u32(chunk.end, 1u32);
        let some = k.setp_lt_s32(chunk.first, chunk.end);

        let tid = k.tid_x();
        let (warp, lane) = (k.shr_u32(tid, 5u32), k.and_b32(tid, 31u32));
        let (sixteen, word) = (k.shr_u32(lane, 2u32), k.and_b32(lane, 3u32));
        // A warp has 128 keys of sixteen columns, then others.
        let groups = self.head_dim_v / COLUMNS;
        let items = groups * self.rows.div_ceil(128);
        k.for_s32(warp, items, (THREADS / 32) as i32, |k, item, _| {
            let (part, group) = (k.div_u32(item, groups), k.rem_u32(item, groups));
            let column = k.mul_lo_u32(group, COLUMNS);
            let first = k.mad_lo_u32(part, 128u32, chunk.first);
            let first = k.mad_lo_u32(sixteen, KEYS, first);
            let there = k.setp_lt_u32(first, past);
            let place = k.mad_lo_u32(word, 4u32, first);
            let key = k.mad_lo_u32(word, 2u32, first);
            let from = k.mad_wide_u32(column, 2u32, x);
            // Of each of four keys, eight columns at a time.
            let keys = [0u32, 1, 8, 9].map(|more| {
                let key = if more == 0 { key } else { k.add_u32(key, more) };
                let exists = k.setp_lt_s32(key, chunk.end);
                let exists = k.and_pred(exists, there);
                let reads = k.and_pred(exists, some);
                let row = k.min_u32(key, last);
                let row = k.cvt_u64_u32(row);
                let at = k.mad_lo_u64(row, to_row, from);
                let factor = k.selp_f32(inverse, 0.0, reads);
                [0, 16].map(|bytes| {
                    let words: [Reg<B32>; 4] = std::array::from_fn(|_| k.mov_b32(0u32));
                    k.when(reads, |k| k.set(words, |k| k.ld_global_vec(at.at(bytes))));
                    self.unpack(k, words).map(|x| k.mul_f32(x, factor))
                })
            });
            let to = k.cvt_u64_u32(place);
            let to = k.add_u64(out, to);
            for i in 0..COLUMNS {
                let [a, b, c, d] = keys.map(|of| of[(i / 8) as usize][(i % 8) as usize]);
                let pairs = [k.cvt_rn_satfinite_e4m3x2_f32(b, a), k.cvt_rn_satfinite_e4m3x2_f32(d, c)];
                let codes = k.pack_b32(pairs[0], pairs[1]);
                let column = k.add_u32(column, i);
                let column = k.cvt_u64_u32(column);
                let at = k.mad_lo_u64(column, to_column, to);
                k.when(there, |k| k.st_global(at, codes));
            }
        });
    }

    /// The shape of values that are turned around, given that of the values.
    pub fn turned([batch, heads, keys, columns]: [usize; 4]) -> [usize; 4] {
        [batch, heads, columns, keys.next_multiple_of(KEYS as usize)]
    }
}
