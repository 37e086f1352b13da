//! What smoothed keys take from lse, given back: the last pass adds scale · q · mean to the lse of each query.

use flashcore_ptx::{B32, F32, GlobalPtr, KernelBuilder, Reg, kernel_params};

use super::{
    Quantize, WIDTH,
    params::{Common, OfQ, TensorParams},
    smooth::mean_address,
};
use crate::parts::params::address;

/// Rows that a thread has in flight.
const ROWS_AT_ONCE: u32 = 4;

kernel_params! {
    /// What this pass is given behind what all passes are. Strides are in bytes.
    pub(super) struct OfLse {
        lse: GlobalPtr,
        lse_batch: u64,
        lse_head: u64,
        lse_row: u64,
        scale: f32,
    }
}

impl OfLse {
    pub fn of(args: &crate::Args) -> Self {
        let lse = args.tensor(crate::Operand::Lse);
        let [lse_batch, lse_head, lse_row] = lse.strides;
        Self { lse: lse.pointer(), lse_batch, lse_head, lse_row, scale: args.scale }
    }
}

impl Quantize {
    /// The queries as they were, against the mean as it was: a rotation of both leaves their product as it is.
    pub(super) fn shift(self, k: &mut KernelBuilder) {
        k.section("shift: which queries");
        let [rows, heads, _] = OfQ::counts();
        let (rows, heads, item) = (k.param(rows), k.param(heads), k.ctaid_x());
        let chunks = self.chunks_of(k, rows);
        let (all_heads, chunk) = (k.div_u32(item, chunks), k.rem_u32(item, chunks));
        let (batch, head) = (k.div_u32(all_heads, heads), k.rem_u32(all_heads, heads));
        let first = k.mul_lo_u32(chunk, self.rows);
        let past = k.add_u32(first, self.rows);
        let end = k.min_u32(rows, past);
        let group = k.param(Common::group);
        let kv_head = k.div_u32(head, group);

        // A row's lanes are a power of two, of which the last may have nothing.
        let lanes = (self.head_dim / WIDTH).next_power_of_two();
        let at_once = self.threads(super::Pass::Shift) / lanes;
        let tid = k.tid_x();
        let (own, lane) = (k.shr_u32(tid, lanes.trailing_zeros()), k.and_b32(tid, lanes - 1));
        let column = k.mul_lo_u32(lane, WIDTH);
        let holds = k.setp_lt_u32(column, self.head_dim);
        let at = mean_address(k, batch, kv_head);
        let at = k.mad_wide_u32(column, 4u32, at);
        let mean: [Reg<F32>; 8] = std::array::from_fn(|_| k.mov_f32(0.0));
        k.when(holds, |k| {
            k.set([mean[0], mean[1], mean[2], mean[3]], |k| k.ld_global_vec(at));
        });
        k.when(holds, |k| {
            k.set([mean[4], mean[5], mean[6], mean[7]], |k| k.ld_global_vec(at.at(16)));
        });
        let (base, [to_batch, to_head, to_row]) = OfQ::x();
        let base = address(k, base, &[to_batch, to_head], &[batch, head]);
        let base = k.mad_wide_u32(column, 2u32, base);
        let to_row = k.param(to_row);
        let lse = address(k, OfLse::lse, &[OfLse::lse_batch, OfLse::lse_head], &[batch, head]);
        let (lse_row, scale) = (k.param(OfLse::lse_row), k.param(OfLse::scale));
        let leads = k.setp_eq_u32(lane, 0u32);
        let last = k.sub_u32(end, 1u32);
        k.section("shift: some queries at a time");
        k.for_s32(first, end, (ROWS_AT_ONCE * at_once) as i32, |k, start, _| {
            let mine = k.add_u32(start, own);
            let read: Vec<_> = (0..ROWS_AT_ONCE)
                .map(|i| {
                    let row = k.add_u32(mine, i * at_once);
                    let exists = k.setp_lt_u32(row, end);
                    let row = k.min_u32(row, last);
                    let row = k.cvt_u64_u32(row);
                    let at = k.mad_lo_u64(row, to_row, base);
                    let words: [Reg<B32>; 4] = std::array::from_fn(|_| k.mov_b32(0u32));
                    k.when(holds, |k| k.set(words, |k| k.ld_global_vec(at)));
                    (words, row, exists)
                })
                .collect();
            for (words, row, exists) in read {
                let x = self.unpack(k, words);
                let mut dot = k.mul_f32(x[0], mean[0]);
                for (x, mean) in x.into_iter().zip(mean).skip(1) {
                    dot = k.fma_f32(x, mean, dot);
                }
                for distance in (0..lanes.trailing_zeros()).map(|bit| 1u32 << bit) {
                    let other = k.shfl_bfly(dot, distance);
                    dot = k.add_f32(dot, other);
                }
                let at = k.mad_lo_u64(row, lse_row, lse);
                let writes = k.and_pred(exists, leads);
                k.if_(writes, |k| {
                    let before: Reg<F32> = k.ld_global(at);
                    let after = k.fma_f32(dot, scale, before);
                    k.st_global(at, after);
                });
            }
        });
    }
}
