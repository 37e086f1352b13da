//! What the backward kernels have in common: products over tiles of rows, probabilities, and what a mask hides.

use flashcore_ptx::{
    B32, B64, F32, GlobalPtr, KernelBuilder, KernelParams, ParamHandle, Pred, ProxySpace, Reg, Wgmma,
};

use super::{ALL, CONSUMERS, PITCH, ROWS};
use crate::{
    ElementType, Spec,
    parts::{
        fragment::matrix_ty,
        softmax::{NEG_INF, SoftmaxParams},
        work::{Band, Rows},
    },
    sm90::descriptor::Descriptor,
};

/// Bytes of a row that one product takes, and the products over a panel.
pub(super) const STEP: u32 = 32;
pub(super) const STEPS: u32 = PITCH / STEP;

/// The product of 64 rows with all rows of a tile, given where both begin and the bytes of their panels. `ready` comes before
/// each panel.
pub(super) fn times_rows(
    k: &mut KernelBuilder,
    dtype: ElementType,
    to: &[Reg<F32>],
    [a, b]: [Reg<B32>; 2],
    [a_panel, b_panel]: [u32; 2],
    head_dim: u32,
    ready: impl Fn(&mut KernelBuilder, u32),
) {
    let (a, b) = (Descriptor::new(k, a, 16), Descriptor::new(k, b, 16));
    let spec = Wgmma::new(2 * to.len() as u16, matrix_ty(dtype));
    for step in 0..head_dim.div_ceil(16) {
        let (panel, inside) = (step / STEPS, STEP * (step % STEPS));
        if inside == 0 {
            ready(k, panel);
        }
        let a = a.at(k, panel * a_panel + inside);
        let b = b.at(k, panel * b_panel + inside);
        k.wgmma_ss(spec, to, a, b, step > 0);
    }
}

/// Adds the product of A operands with a tile, whose rows are what is summed over.
pub(super) fn add(
    k: &mut KernelBuilder,
    dtype: ElementType,
    to: &[Reg<F32>],
    a: &[[Reg<B32>; 4]],
    tile: Reg<B32>,
    panel: u32,
) {
    let tile = Descriptor::new(k, tile, panel);
    let spec = Wgmma::new(2 * to.len() as u16, matrix_ty(dtype));
    for (step, &a) in (0..).zip(a) {
        let b = tile.at(k, step * 16 * PITCH);
        k.wgmma_rs(Wgmma { trans_b: true, ..spec }, to, a, b, true);
    }
}

/// The probability of a score: 2^(score · scale − lse).
pub(super) fn probability(
    k: &mut KernelBuilder,
    params: SoftmaxParams,
    score: Reg<F32>,
    lse: Reg<F32>,
) -> Reg<F32> {
    let offset = k.neg_f32(lse);
    let exponent = k.fma_f32(score, params.exp_scale(), offset);
    k.ex2_approx_ftz_f32(exponent)
}

/// Where the numbers of a head's queries are, from a row on.
pub(super) fn numbers_at<P: KernelParams>(
    k: &mut KernelBuilder,
    numbers: ParamHandle<P, GlobalPtr>,
    [to_batch, to_head]: [ParamHandle<P, u64>; 2],
    [batch, head, row]: [Reg<B32>; 3],
) -> Reg<B64> {
    let numbers = k.param(numbers);
    let (to_batch, to_head) = (k.param(to_batch), k.param(to_head));
    let (batch, head) = (k.cvt_u64_u32(batch), k.cvt_u64_u32(head));
    let numbers = k.mad_lo_u64(batch, to_batch, numbers);
    let numbers = k.mad_lo_u64(head, to_head, numbers);
    k.mad_wide_u32(row, 4u32, numbers)
}

/// The numbers of a thread's two queries of eight.
pub(super) fn number(k: &mut KernelBuilder, numbers: Reg<B32>, eight: i32) -> [Reg<F32>; 2] {
    k.ld_shared_vec(numbers.at(32 * eight))
}

/// Which queries of a tile do not see a thread's keys, where rows of scores are keys.
pub(super) struct Hidden {
    /// Whether a query of the tile does not see a key of the warpgroup.
    pub any: Reg<Pred>,
    /// The first query that sees the upper and the lower key, and one past the last, from this thread's first query on.
    bounds: [(Reg<B32>, Option<Reg<B32>>); 2],
}

impl Hidden {
    /// From so many queries, given where the warpgroup's keys begin and the keys and queries that the thread has: its upper
    /// row, counted from `block_key` on, and the first column of every eight.
    pub fn of(
        k: &mut KernelBuilder,
        spec: &Spec,
        band: &Band,
        rows: &Rows,
        queries: u32,
        first_key: impl FnOnce(&mut KernelBuilder) -> Reg<B32>,
        [block_key, row, column]: [Reg<B32>; 3],
    ) -> Self {
        let range = band.key_range(k, rows, queries);
        let first_key = first_key(k);
        let end = k.add_s32(first_key, ROWS as i32);
        let mut any = k.setp_lt_s32(range.full_end, end);
        if spec.left {
            let before = k.setp_gt_s32(range.full_begin, first_key);
            any = k.or_pred(any, before);
        }
        let origin = k.add_s32(rows.first_row, column);
        let bounds = [0, 8].map(|lower| {
            let key = k.add_s32(block_key, row);
            let key = k.add_s32(key, lower);
            let exists = k.setp_lt_s32(key, band.keys);
            let first = match band.key_begin(k, key) {
                Some(row) => k.sub_s32(row, origin),
                None => k.mov_b32(0),
            };
            let first = k.selp_b32(first, i32::MAX as u32, exists);
            let end = band.key_end(k, key).map(|row| k.sub_s32(row, origin));
            (first, end)
        });
        Hidden { any, bounds }
    }

    /// Hides scores, given the number of the first.
    pub fn hide(&self, k: &mut KernelBuilder, scores: &[Reg<F32>], first: usize) {
        for (i, &score) in (first..).zip(scores) {
            let (begin, end) = self.bounds[i % 4 / 2];
            let column = (8 * (i / 4) + i % 2) as i32;
            let seen = k.setp_le_s32(begin, column);
            k.set(score, |k| k.selp_f32(score, NEG_INF, seen));
            if let Some(end) = end {
                let seen = k.setp_gt_s32(end, column);
                k.set(score, |k| k.selp_f32(score, NEG_INF, seen));
            }
        }
    }
}

/// Where a tile begins, its panels, and the bytes of one.
pub(super) type Panels<'a> = (&'a dyn Fn(&mut KernelBuilder) -> Reg<B32>, u32, u32);

/// Rows after the last key do not belong to this batch entry. Their probabilities are 0, but 0 · NaN is NaN, so all
/// consumers overwrite them with zeros: the rows of these tiles from `left` on.
pub(super) fn clear(k: &mut KernelBuilder, left: Reg<B32>, rows: u32, tiles: &[Panels<'_>]) {
    let some = k.setp_lt_s32(left, rows as i32);
    k.if_(some, |k| {
        k.comment("zeros behind the last key");
        zero(k, (CONSUMERS, |k| k.tid_x()), left, rows, tiles);
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_sync(ALL, CONSUMERS);
    });
}

/// Overwrites the rows of these tiles from `left` on with zeros, given the threads that do and the number of each.
pub(super) fn zero(
    k: &mut KernelBuilder,
    (threads, thread): (u32, impl FnOnce(&mut KernelBuilder) -> Reg<B32>),
    left: Reg<B32>,
    rows: u32,
    tiles: &[Panels<'_>],
) {
    let zero = k.mov_f32(0.0);
    // Each thread clears 16 bytes of a row; rows do not mix in the swizzle.
    let thread = thread(k);
    let chunk = k.and_b32(thread, 7u32);
    let row = k.shr_u32(thread, 3u32);
    let row = k.add_u32(row, left);
    let row = k.mov_b32(row);
    k.while_(
        |k| k.setp_lt_s32(row, rows as i32),
        |k, _| {
            for (tile, panels, panel_bytes) in tiles {
                let tile = tile(k);
                let at = k.mad_lo_u32(row, PITCH, tile);
                let at = k.mad_lo_u32(chunk, 16u32, at);
                for panel in 0..*panels {
                    k.st_shared_vec(at.at((panel * panel_bytes) as i32), [zero; 4]);
                }
            }
            k.set(row, |k| k.add_u32(row, threads / 8));
        },
    );
}
