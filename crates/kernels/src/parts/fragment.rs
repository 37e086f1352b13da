//! How `mma.sync` lays a warp's tiles over its threads.
//!
//! With g = lane / 4 and t = lane % 4, a thread holds these elements of a 16×8 accumulator: (g, 2t), (g, 2t + 1), (g +
//! 8, 2t), (g + 8, 2t + 1): two neighbours of an upper row and two of a lower row. Two accumulators side by side,
//! rounded to 16 bits, are an A operand as they stand, so probabilities go from one product into the next without
//! leaving their thread.

use flashcore_ptx::{B32, F32, KernelBuilder, MatrixTy, Reg};

use super::{
    softmax::{NEG_INF, SoftmaxParams},
    work::{Rows, Work},
};
use crate::ElementType;

/// One thread's part of a 16×8 accumulator.
pub(crate) type Acc = [Reg<F32>; 4];

/// The elements of an [`Acc`] that belong to its upper and to its lower row.
pub(crate) const HALVES: [[usize; 2]; 2] = [[0, 1], [2, 3]];

/// The element type as `mma` names it.
pub(crate) fn matrix_ty(dtype: ElementType) -> MatrixTy {
    match dtype {
        ElementType::F16 => MatrixTy::F16,
        ElementType::Bf16 => MatrixTy::Bf16,
        ElementType::E4m3 => MatrixTy::E4m3,
        ElementType::F32 => unreachable!("schedules with tensor cores refuse f32"),
    }
}

/// Two neighbours rounded to the element type, `first` in the lower half.
pub(crate) fn pack(k: &mut KernelBuilder, dtype: ElementType, first: Reg<F32>, second: Reg<F32>) -> Reg<B32> {
    match dtype {
        ElementType::F16 => k.cvt_rn_f16x2_f32(second, first),
        ElementType::Bf16 => k.cvt_rn_bf16x2_f32(second, first),
        ElementType::F32 | ElementType::E4m3 => unreachable!("schedules with tensor cores refuse these"),
    }
}

/// Four numbers rounded to e4m3, the first in the lowest byte.
pub(crate) fn pack_e4m3(k: &mut KernelBuilder, [a, b, c, d]: [Reg<F32>; 4]) -> Reg<B32> {
    let (low, high) = (k.cvt_rn_satfinite_e4m3x2_f32(b, a), k.cvt_rn_satfinite_e4m3x2_f32(d, c));
    k.pack_b32(low, high)
}

/// A row of accumulators as A operands: two side by side make one. Of e4m3 it is four, and what a thread has of two of them
/// goes side by side: of each sixteen columns, the order is then 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
pub(crate) fn a_operands(k: &mut KernelBuilder, dtype: ElementType, row: &[Acc]) -> Vec<[Reg<B32>; 4]> {
    if dtype == ElementType::E4m3 {
        let halves = |k: &mut KernelBuilder, pair: &[Acc]| {
            HALVES.map(|[a, b]| pack_e4m3(k, [pair[0][a], pair[0][b], pair[1][a], pair[1][b]]))
        };
        return row
            .chunks_exact(4)
            .map(|four| {
                let ([a, b], [c, d]) = (halves(k, &four[..2]), halves(k, &four[2..]));
                [a, b, c, d]
            })
            .collect();
    }
    row.chunks_exact(2)
        .map(|pair| {
            let (left, right) = (&pair[0], &pair[1]);
            [
                pack(k, dtype, left[0], left[1]),
                pack(k, dtype, left[2], left[3]),
                pack(k, dtype, right[0], right[1]),
                pack(k, dtype, right[2], right[3]),
            ]
        })
        .collect()
}

/// Rounds accumulators to A operands in registers that others know.
pub(crate) fn pack_into(k: &mut KernelBuilder, dtype: ElementType, from: &[Reg<F32>], to: &[[Reg<B32>; 4]]) {
    let from: Vec<Acc> = from.chunks_exact(4).map(|quad| [quad[0], quad[1], quad[2], quad[3]]).collect();
    for (to, packed) in to.iter().zip(a_operands(k, dtype, &from)) {
        for (&to, packed) in to.iter().zip(packed) {
            k.set(to, |k| k.mov_b32(packed));
        }
    }
}

/// Two neighbours as f32, the one in the lower half first.
pub(crate) fn unpack(k: &mut KernelBuilder, dtype: ElementType, both: Reg<B32>) -> [Reg<F32>; 2] {
    if dtype == ElementType::F16 {
        return k.unpack_b32(both).map(|half| k.cvt_f32_f16(half));
    }
    let (low, high) = (k.shl_b32(both, 16u32), k.and_b32(both, 0xffff_0000u32));
    [k.f32_from_bits(low), k.f32_from_bits(high)]
}

/// Which rows and columns a thread holds.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    /// The lane.
    pub lane: Reg<B32>,
    /// The warp's first row in the block.
    pub warp_row: Reg<B32>,
    /// lane / 4: the row in a 16-row tile.
    pub g: Reg<B32>,
    /// 2 · (lane % 4): the first column in an 8-column tile.
    pub column: Reg<B32>,
}

impl Place {
    /// For warps with this many rows each.
    pub fn new(k: &mut KernelBuilder, rows_per_warp: u32) -> Self {
        let tid = k.tid_x();
        let warp = k.shr_u32(tid, 5u32);
        let lane = k.and_b32(tid, 31u32);
        let warp_row = k.mul_lo_u32(warp, rows_per_warp);
        let g = k.shr_u32(lane, 2u32);
        let t = k.and_b32(lane, 3u32);
        let column = k.shl_b32(t, 1u32);
        Self { lane, warp_row, g, column }
    }

    /// The problem's row for the upper or lower half of a 16-row tile.
    pub fn row(&self, k: &mut KernelBuilder, rows: &Rows, tile: usize, half: usize) -> Reg<B32> {
        let first = k.add_u32(rows.first_row, self.warp_row);
        let row = k.add_u32(first, self.g);
        k.add_u32(row, (16 * tile + 8 * half) as u32)
    }

    /// Turns dot products into scores and hides the keys that a row does not see. `first_key` is the tile's first
    /// key; without it every row sees the whole tile.
    pub fn score(
        &self,
        k: &mut KernelBuilder,
        work: &Work,
        params: SoftmaxParams,
        scores: &mut [Vec<Acc>],
        first_key: Option<Reg<B32>>,
    ) {
        let dots: Vec<Reg<F32>> = scores.iter().flatten().flatten().copied().collect();
        params.score(k, &dots);
        let Some(first_key) = first_key else { return };
        let origin = k.add_s32(first_key, self.column);
        for (tile, scores) in scores.iter_mut().enumerate() {
            for (half, elements) in HALVES.iter().enumerate() {
                let row = self.row(k, &work.rows, tile, half);
                let end = work.band.row_end(k, row);
                let end = k.sub_s32(end, origin);
                let begin = work.band.row_begin(k, row).map(|begin| k.sub_s32(begin, origin));
                for (n, score) in scores.iter_mut().enumerate() {
                    for &i in elements {
                        let column = (8 * n + i % 2) as i32;
                        let seen = k.setp_gt_s32(end, column);
                        score[i] = k.selp_f32(score[i], NEG_INF, seen);
                        if let Some(begin) = begin {
                            let seen = k.setp_le_s32(begin, column);
                            score[i] = k.selp_f32(score[i], NEG_INF, seen);
                        }
                    }
                }
            }
        }
    }
}
