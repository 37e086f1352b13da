//! One task: rows of queries against a range of keys, by online softmax.
//!
//! Rows are taken in panels as wide as the micro-kernel, a row a lane. For each block of keys a panel computes
//! Sᵀ = K Qᵀ, moves its running maximum, turns Sᵀ into Pᵀ and adds Vᵀ Pᵀ to Oᵀ; a row's maximum and sum are
//! lanes too, so the softmax never reduces across a vector. Scores exist for one panel and one block at a time.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use std::ops::Range;

use super::{
    math,
    plan::{self, Task},
    rows,
    scratch::{Carve, Scratch},
    simd::Simd,
    tile::{Scalars, accumulate},
};
use crate::{DType, contract::Call, tensor::Raw};

/// Lanes of the widest vector.
const MAX_LANES: usize = 16;

/// What all tasks of a call share.
pub(super) struct Job<'a> {
    pub call: &'a Call<'a>,
    pub block_k: usize,
    /// Where split tasks leave their parts: for each part, `part_rows` rows of head_dim_v outputs, then as many
    /// maxima, then as many sums.
    pub parts: *mut f32,
    pub part_rows: usize,
}

// SAFETY: tasks write to disjoint rows of the outputs and to disjoint parts.
unsafe impl Sync for Job<'_> {}

impl Job<'_> {
    /// f32 of one part.
    pub(super) fn part_len(&self) -> usize {
        self.part_rows * (self.call.problem.head_dim_v + 2)
    }

    /// What the stored scores (tanh of them under a softcap) are to be multiplied with.
    pub(super) fn score_scale(&self) -> f32 {
        self.call.problem.softcap.unwrap_or(self.call.problem.scale)
    }

    /// The query head and the query of a row.
    pub(super) fn head_and_query(&self, head_kv: usize, row: usize) -> (usize, usize) {
        let group = self.call.problem.group();
        (head_kv * group + row % group, row / group)
    }
}

/// The address of a row.
///
/// # Safety
/// The indices must be inside the tensor's shape.
unsafe fn row_at(raw: &Raw, b: usize, h: usize, s: usize) -> *mut u8 {
    // SAFETY: the contract checked that the shape lies inside the memory.
    unsafe { raw.ptr.add(raw.layout.row(b, h, s) * raw.dtype.size()) }
}

/// Rows in the lanes of up to `VECS` vectors.
struct Panel {
    rows: Range<usize>,
    vecs: usize,
    /// Scratch of Qᵀ, head_dim rows of `vecs` vectors.
    q: *mut f32,
    /// Scratch of Oᵀ, head_dim_v rows of `vecs` vectors.
    o: *mut f32,
    /// Scratch of the lanes' maxima, sums and (relative to the block) first and end keys.
    max: *mut f32,
    sum: *mut f32,
    first: *mut f32,
    end: *mut f32,
    /// The keys of each lane's row.
    keys: [Range<usize>; MAX_LANES * 4],
    /// From the first key that any lane sees to the last.
    any: Range<usize>,
    /// The keys that all lanes see.
    all: Range<usize>,
}

/// Some rows of K or V as f32.
#[derive(Clone, Copy)]
struct Block {
    at: *const f32,
    stride: usize,
}

/// Runs a task.
///
/// # Safety
/// Requires a CPU with `S`; the call must have passed the contract and the task be of its plan.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(job: &Job<'_>, task: &Task, scratch: &mut Scratch) {
    let call = job.call;
    let problem = &call.problem;
    let (head_dim, head_dim_v) = (problem.head_dim, problem.head_dim_v);
    let lanes = S::LANES;
    let width = S::VECS * lanes;
    let padded = |n: usize| n.next_multiple_of(lanes);
    let panel_count = task.rows.len().div_ceil(width);
    let block_k = job.block_k.min(task.keys.len()).max(1);

    let mut carve = Carve::new();
    let q_len = padded(head_dim) * width;
    let o_len = padded(head_dim_v) * width;
    let q = carve.part(panel_count * q_len);
    let o = carve.part(panel_count * o_len);
    let stats = carve.part(panel_count * 4 * width);
    let p = carve.part(block_k * width);
    let k_wide = carve.part(block_k * head_dim);
    let v_wide = carve.part(block_k * head_dim_v);
    let strip = carve.part(lanes * padded(head_dim.max(head_dim_v)));
    let base = scratch.reserve(carve.total());

    // SAFETY: all parts lie inside the reserved scratch.
    unsafe {
        let strip = base.add(strip);
        let p = base.add(p);
        for panel_index in 0..panel_count {
            let panel = panel::<S>(job, task, panel_index, base, q, q_len, o, o_len, stats);
            load_queries::<S>(job, task, &panel, strip);
            for i in 0..panel.vecs * lanes {
                *panel.max.add(i) = f32::NEG_INFINITY;
                *panel.sum.add(i) = 0.0;
            }
            std::ptr::write_bytes(panel.o, 0, padded(head_dim_v) * panel.vecs * lanes);
        }
        for start in task.keys.clone().step_by(block_k) {
            let keys = start..(start + block_k).min(task.keys.end);
            let k = block::<S>(&call.k, task, &keys, head_dim, base.add(k_wide));
            let v = block::<S>(&call.v, task, &keys, head_dim_v, base.add(v_wide));
            for panel_index in 0..panel_count {
                let panel = panel::<S>(job, task, panel_index, base, q, q_len, o, o_len, stats);
                match panel.vecs {
                    1 => step::<S, 1>(job, &panel, &keys, k, v, p),
                    2 => step::<S, 2>(job, &panel, &keys, k, v, p),
                    3 if S::VECS >= 3 => step::<S, 3>(job, &panel, &keys, k, v, p),
                    4 if S::VECS >= 4 => step::<S, 4>(job, &panel, &keys, k, v, p),
                    _ => unreachable!("a panel has at most VECS vectors"),
                }
            }
        }
        for panel_index in 0..panel_count {
            let panel = panel::<S>(job, task, panel_index, base, q, q_len, o, o_len, stats);
            store_outputs::<S>(job, task, &panel, strip);
        }
    }
}

/// Panel number `index` of a task.
#[inline(always)]
unsafe fn panel<S: Simd>(
    job: &Job<'_>,
    task: &Task,
    index: usize,
    base: *mut f32,
    q: usize,
    q_len: usize,
    o: usize,
    o_len: usize,
    stats: usize,
) -> Panel {
    let width = S::VECS * S::LANES;
    let start = task.rows.start + index * width;
    let rows = start..(start + width).min(task.rows.end);
    let vecs = rows.len().div_ceil(S::LANES);
    let mut keys = [const { 0..0 }; MAX_LANES * 4];
    let (mut any, mut all) = (0..0, 0..usize::MAX);
    for (lane, keys) in keys.iter_mut().enumerate().take(vecs * S::LANES) {
        let row = (start + lane).min(rows.end - 1);
        *keys = plan::visible(job.call, task.batch, job.head_and_query(task.head, row).1);
        all = all.start.max(keys.start)..all.end.min(keys.end);
        if keys.start < keys.end {
            any =
                if any.is_empty() { keys.clone() } else { any.start.min(keys.start)..any.end.max(keys.end) };
        }
    }
    // SAFETY: the parts were carved for all panels of the task.
    unsafe {
        let stats = base.add(stats + index * 4 * width);
        Panel {
            rows,
            vecs,
            q: base.add(q + index * q_len),
            o: base.add(o + index * o_len),
            max: stats,
            sum: stats.add(width),
            first: stats.add(2 * width),
            end: stats.add(3 * width),
            keys,
            any,
            all,
        }
    }
}

/// Widens and transposes the panel's queries; lanes without a row become zeros.
#[inline(always)]
unsafe fn load_queries<S: Simd>(job: &Job<'_>, task: &Task, panel: &Panel, strip: *mut f32) {
    let raw = &job.call.q;
    let head_dim = job.call.problem.head_dim;
    let stride = head_dim.next_multiple_of(S::LANES);
    // SAFETY: rows are inside q, and the strip holds `LANES` padded rows.
    unsafe {
        for vec in 0..panel.vecs {
            for lane in 0..S::LANES {
                let row = panel.rows.start + vec * S::LANES + lane;
                let to = strip.add(lane * stride);
                if row < panel.rows.end {
                    let (h, s) = job.head_and_query(task.head, row);
                    rows::widen::<S>(raw.dtype, row_at(raw, task.batch, h, s), to, head_dim);
                } else {
                    std::ptr::write_bytes(to, 0, head_dim);
                }
            }
            for d in (0..stride).step_by(S::LANES) {
                let mut tile = [S::splat(0.0); MAX_LANES];
                for (lane, x) in tile.iter_mut().enumerate().take(S::LANES) {
                    *x = S::load(strip.add(lane * stride + d));
                }
                S::transpose(&mut tile[..S::LANES]);
                for (i, &x) in tile.iter().enumerate().take(S::LANES) {
                    S::store(panel.q.add(((d + i) * panel.vecs + vec) * S::LANES), x);
                }
            }
        }
    }
}

/// Rows of K or V: where they lie if they are f32 already, else widened into scratch.
#[inline(always)]
unsafe fn block<S: Simd>(raw: &Raw, task: &Task, keys: &Range<usize>, len: usize, wide: *mut f32) -> Block {
    // SAFETY: keys are inside the tensor, and `wide` has room for a block.
    unsafe {
        let first = row_at(raw, task.batch, task.head, keys.start);
        if raw.dtype == DType::F32 {
            return Block { at: first.cast(), stride: raw.layout.strides[2] };
        }
        for key in 0..keys.len() {
            let from = first.add(key * raw.layout.strides[2] * raw.dtype.size());
            rows::widen::<S>(raw.dtype, from, wide.add(key * len), len);
        }
        Block { at: wide, stride: len }
    }
}

/// One panel against one block of keys.
#[inline(always)]
unsafe fn step<S: Simd, const V: usize>(
    job: &Job<'_>,
    panel: &Panel,
    keys: &Range<usize>,
    k: Block,
    v: Block,
    p: *mut f32,
) {
    let problem = &job.call.problem;
    let seen = keys.start.max(panel.any.start)..keys.end.min(panel.any.end);
    if seen.is_empty() {
        return;
    }
    // SAFETY: `seen` is inside the block, whose rows are readable; panels and p are scratch of that size.
    unsafe {
        let skip = seen.start - keys.start;
        let k = Block { at: k.at.add(skip * k.stride), ..k };
        let v = Block { at: v.at.add(skip * v.stride), ..v };
        scores::<S, V>(panel.q, k, problem.head_dim, p, seen.len());
        if let Some(softcap) = problem.softcap {
            let inner = S::splat(problem.scale / softcap);
            for i in 0..seen.len() * V {
                let at = p.add(i * S::LANES);
                S::store(at, math::tanh::<S>(S::mul(S::load(at), inner)));
            }
        }
        if panel.all.start > seen.start || panel.all.end < seen.end {
            mask::<S, V>(panel, &seen, p);
        }
        let rescale = softmax::<S, V>(panel, p, seen.len(), job.score_scale() * std::f32::consts::LOG2_E);
        outputs::<S, V>(panel.o, v, problem.head_dim_v, p, seen.len(), rescale);
    }
}

/// Runs `$one::<S, rows, V>(row, ..)` over all rows, with tiles as tall as the instruction set has registers for.
macro_rules! by_rows {
    ($rows:expr, $row:ident => $call:ident :: <$s:ident, _, $v:ident> ($($arg:expr),*)) => {{
        let mut $row = 0;
        if $s::ROWS >= 8 {
            while $row + 8 <= $rows {
                $call::<$s, 8, $v>($($arg),*);
                $row += 8;
            }
        }
        while $row + 4 <= $rows {
            $call::<$s, 4, $v>($($arg),*);
            $row += 4;
        }
        if $row + 2 <= $rows {
            $call::<$s, 2, $v>($($arg),*);
            $row += 2;
        }
        if $row < $rows {
            $call::<$s, 1, $v>($($arg),*);
        }
    }};
}

/// Sᵀ = K Qᵀ for `len` keys.
#[inline(always)]
unsafe fn scores<S: Simd, const V: usize>(q: *const f32, k: Block, head_dim: usize, s: *mut f32, len: usize) {
    // SAFETY: as of `step`.
    unsafe {
        by_rows!(len, key => score_tile::<S, _, V>(
            q, Block { at: k.at.add(key * k.stride), ..k }, head_dim, s.add(key * V * S::LANES)
        ));
    }
}

#[inline(always)]
unsafe fn score_tile<S: Simd, const R: usize, const V: usize>(
    q: *const f32,
    k: Block,
    head_dim: usize,
    s: *mut f32,
) {
    // SAFETY: as of `step`.
    unsafe {
        let zero = [[S::splat(0.0); V]; R];
        let tile =
            accumulate::<S, R, V>(zero, Scalars { at: k.at, row_step: k.stride, k_step: 1 }, q, head_dim);
        for (r, row) in tile.iter().enumerate() {
            for (v, &x) in row.iter().enumerate() {
                S::store(s.add((r * V + v) * S::LANES), x);
            }
        }
    }
}

/// Makes the scores of keys that a row does not see −∞.
#[inline(always)]
unsafe fn mask<S: Simd, const V: usize>(panel: &Panel, seen: &Range<usize>, s: *mut f32) {
    // SAFETY: as of `step`.
    unsafe {
        for (lane, keys) in panel.keys.iter().enumerate().take(V * S::LANES) {
            // Relative to the block, so that f32 holds them exactly.
            *panel.first.add(lane) = keys.start.saturating_sub(seen.start).min(seen.len()) as f32;
            *panel.end.add(lane) = keys.end.saturating_sub(seen.start).min(seen.len()) as f32;
        }
        let hidden = S::splat(f32::NEG_INFINITY);
        for key in 0..seen.len() {
            let at_key = S::splat(key as f32);
            for v in 0..V {
                let at = s.add((key * V + v) * S::LANES);
                let first = S::load(panel.first.add(v * S::LANES));
                let end = S::load(panel.end.add(v * S::LANES));
                let x = S::select_less(at_key, end, S::load(at), hidden);
                S::store(at, S::select_less(at_key, first, hidden, x));
            }
        }
    }
}

/// Moves the running maxima, turns scores into exponentials, adds these to the running sums, and returns what the
/// outputs so far are to be multiplied with.
#[inline(always)]
unsafe fn softmax<S: Simd, const V: usize>(panel: &Panel, s: *mut f32, len: usize, scale: f32) -> [S::V; V] {
    // SAFETY: as of `step`.
    unsafe {
        let infinity = S::splat(f32::NEG_INFINITY);
        let scale = S::splat(scale);
        let mut rescale = [S::splat(1.0); V];
        for (v, rescale) in rescale.iter_mut().enumerate() {
            let old = S::load(panel.max.add(v * S::LANES));
            let mut max = old;
            for key in 0..len {
                max = S::max(S::load(s.add((key * V + v) * S::LANES)), max);
            }
            S::store(panel.max.add(v * S::LANES), max);
            // A row that has seen only −∞ subtracts 0, so that its exponentials are 0 rather than NaN.
            let base = S::select_less(infinity, max, max, S::splat(0.0));
            *rescale = math::exp2::<S>(S::mul(S::sub(old, base), scale));
            let mut sum = S::splat(0.0);
            for key in 0..len {
                let at = s.add((key * V + v) * S::LANES);
                let p = math::exp2::<S>(S::mul(S::sub(S::load(at), base), scale));
                sum = S::add(sum, p);
                S::store(at, p);
            }
            let sums = panel.sum.add(v * S::LANES);
            S::store(sums, S::fma(S::load(sums), *rescale, sum));
        }
        rescale
    }
}

/// Oᵀ = Oᵀ · rescale + Vᵀ Pᵀ for `len` keys.
#[inline(always)]
unsafe fn outputs<S: Simd, const V: usize>(
    o: *mut f32,
    v: Block,
    head_dim_v: usize,
    p: *const f32,
    len: usize,
    rescale: [S::V; V],
) {
    // SAFETY: as of `step`.
    unsafe {
        by_rows!(head_dim_v, d => output_tile::<S, _, V>(
            o.add(d * V * S::LANES), Block { at: v.at.add(d), ..v }, p, len, rescale
        ));
    }
}

#[inline(always)]
unsafe fn output_tile<S: Simd, const R: usize, const V: usize>(
    o: *mut f32,
    v: Block,
    p: *const f32,
    len: usize,
    rescale: [S::V; V],
) {
    // SAFETY: as of `step`.
    unsafe {
        let mut tile = [[S::splat(0.0); V]; R];
        for (r, row) in tile.iter_mut().enumerate() {
            for (v, x) in row.iter_mut().enumerate() {
                *x = S::mul(S::load(o.add((r * V + v) * S::LANES)), rescale[v]);
            }
        }
        let tile = accumulate::<S, R, V>(tile, Scalars { at: v.at, row_step: 1, k_step: v.stride }, p, len);
        for (r, row) in tile.iter().enumerate() {
            for (v, &x) in row.iter().enumerate() {
                S::store(o.add((r * V + v) * S::LANES), x);
            }
        }
    }
}

/// Divides by the sums, transposes back and writes rows and lse; or leaves the part of a split task as it is.
#[inline(always)]
unsafe fn store_outputs<S: Simd>(job: &Job<'_>, task: &Task, panel: &Panel, strip: *mut f32) {
    let head_dim_v = job.call.problem.head_dim_v;
    let stride = head_dim_v.next_multiple_of(S::LANES);
    // SAFETY: rows are inside the outputs, parts inside their workspace, and the strip holds `LANES` padded rows.
    unsafe {
        for vec in 0..panel.vecs {
            let start = panel.rows.start + vec * S::LANES;
            let sums = S::load(panel.sum.add(vec * S::LANES));
            let factor = if task.part.is_some() { S::splat(1.0) } else { S::div(S::splat(1.0), sums) };
            for d in (0..stride).step_by(S::LANES) {
                let mut tile = [S::splat(0.0); MAX_LANES];
                for (i, x) in tile.iter_mut().enumerate().take(S::LANES) {
                    *x = S::mul(S::load(panel.o.add(((d + i) * panel.vecs + vec) * S::LANES)), factor);
                }
                S::transpose(&mut tile[..S::LANES]);
                for (lane, &x) in tile.iter().enumerate().take(S::LANES) {
                    S::store(strip.add(lane * stride + d), x);
                }
            }
            for row in start..(start + S::LANES).min(panel.rows.end) {
                let lane = row - panel.rows.start;
                let from = strip.add((row - start) * stride);
                let (max, sum) = (*panel.max.add(lane), *panel.sum.add(lane));
                if let Some(part) = task.part {
                    let part = job.parts.add(part * job.part_len());
                    let place = row - task.rows.start;
                    std::ptr::copy_nonoverlapping(from, part.add(place * head_dim_v), head_dim_v);
                    *part.add(job.part_rows * head_dim_v + place) = max;
                    *part.add(job.part_rows * (head_dim_v + 1) + place) = sum;
                } else {
                    let sees_keys = !panel.keys[lane].is_empty();
                    write_row::<S>(job, task.batch, task.head, row, from, sees_keys.then_some((max, sum)));
                }
            }
        }
    }
}

/// Writes one row of o and its lse; without keys, zeros and −∞.
///
/// # Safety
/// Requires a CPU with `S`, `head_dim_v` f32 at `from`, which this may change, and a row of the plan.
#[inline(always)]
pub(super) unsafe fn write_row<S: Simd>(
    job: &Job<'_>,
    batch: usize,
    head_kv: usize,
    row: usize,
    from: *mut f32,
    max_and_sum: Option<(f32, f32)>,
) {
    let (h, s) = job.head_and_query(head_kv, row);
    let head_dim_v = job.call.problem.head_dim_v;
    // SAFETY: the caller's promise.
    unsafe {
        if max_and_sum.is_none() {
            std::ptr::write_bytes(from, 0, head_dim_v);
        }
        let raw = &job.call.o;
        rows::narrow::<S>(raw.dtype, from, row_at(raw, batch, h, s), head_dim_v);
        if let Some(raw) = &job.call.lse {
            let lse = match max_and_sum {
                None => f32::NEG_INFINITY,
                // Every score was −∞: the same NaN that the outputs are.
                Some((_, 0.0)) => f32::NAN,
                Some((max, sum)) => {
                    (f64::from(max) * f64::from(job.score_scale()) + f64::from(sum).ln()) as f32
                }
            };
            row_at(raw, batch, h, s).cast::<f32>().write(lse);
        }
    }
}
