//! One task: rows of queries against a range of keys, by online softmax.
//!
//! Rows are taken in panels as wide as the micro-kernel, a row a lane. For each block of keys a panel computes
//! Sᵀ = K Qᵀ, moves its running maximum, turns Sᵀ into Pᵀ and adds Vᵀ Pᵀ to Oᵀ; a row's maximum and sum are
//! lanes too, so the softmax never reduces across a vector. Scores exist for one panel and one block at a time.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use std::ops::Range;

use super::{
    ahead::{Ahead, Coming},
    block::Block,
    column::Column,
    job::{Job, Workspace, rows_of},
    lanes::{load_queries, store_outputs},
    panel::{Panel, Segment, Stair},
    plan::Task,
    queue::Queue,
    rows::Rows,
    scratch::Carve,
    simd::Simd,
    tile::{Outputs, Scores, Vectors},
    visible::Visible,
};
use crate::tensor::Raw;

/// Runs a task.
///
/// # Safety
/// Requires a CPU with `S`; the call must have passed the contract and the task be of its plan.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(
    job: &Job<'_>,
    task: &Task,
    tasks: &Queue<'_, Task>,
    workspace: &mut Workspace,
) {
    let problem = &job.call.problem;
    let width = S::VECS * S::LANES;
    let padded = |n: usize| n.next_multiple_of(S::LANES);
    let (q_rows, o_rows) = (padded(problem.head_dim), padded(problem.head_dim_v));
    let panel_count = task.rows.len().div_ceil(width);
    let block_k = job.block_k;
    let longest = block_k.min(task.keys.len());

    let mut carve = Carve::new();
    let q = carve.part(panel_count * q_rows * width);
    let o = carve.part(panel_count * o_rows * width);
    let stats = carve.part(panel_count * 4 * width);
    let s = carve.part(longest * width);
    let k_wide = carve.part(longest * problem.head_dim);
    let v_wide = carve.part(longest * o_rows);
    let strip = carve.part(S::LANES * q_rows.max(o_rows));
    let base = workspace.floats.reserve(carve.total());

    // SAFETY: all parts lie inside the reserved scratch.
    unsafe {
        let (s, strip) = (base.add(s), base.add(strip));
        workspace.panels.clear();
        let visible = Visible::new(job.call, task.batch);
        for index in 0..panel_count {
            let start = task.rows.start + index * width;
            let rows = start..(start + width).min(task.rows.end);
            let mut panel = Panel::new(visible, rows, problem.group(), S::LANES);
            panel.q = base.add(q + index * q_rows * width);
            panel.o = base.add(o + index * o_rows * width);
            panel.max = base.add(stats + index * 4 * width);
            panel.sum = panel.max.add(width);
            panel.top = panel.max.add(2 * width);
            panel.rescale = panel.max.add(3 * width);
            for vec in 0..panel.vecs {
                S::store(panel.max.add(vec * S::LANES), S::splat(f32::NEG_INFINITY));
                S::store(panel.sum.add(vec * S::LANES), S::splat(0.0));
            }
            workspace.panels.push(panel);
        }
        // Blocks begin at multiples of their length, so that a row's do not depend on its task.
        let block_of = |task: &Task, start: usize| {
            start..(start / block_k + 1).saturating_mul(block_k).min(task.keys.end)
        };
        let mut keys = block_of(task, task.keys.start);
        while !keys.is_empty() {
            let (k, v) = (rows(&job.call.k, task, &keys), rows(&job.call.v, task, &keys));
            let block = Block::new::<S>(keys.clone(), k, v, base.add(k_wide), base.add(v_wide));
            let next = block_of(task, keys.end);
            // At the end of a task comes what the next one begins with.
            let (then, then_keys) = match tasks.peek() {
                Some(then) if next.is_empty() => (then, block_of(then, then.keys.start)),
                _ => (task, next.clone()),
            };
            let (k, v) = (rows(&job.call.k, then, &then_keys), rows(&job.call.v, then, &then_keys));
            let panels = &mut workspace.panels;
            let share =
                then_keys.len().div_ceil(panels.iter().filter(|panel| panel.sees(&keys)).count().max(1));
            let mut shares = (0..then_keys.len()).step_by(share.max(1));
            for index in 0..panel_count {
                if !panels[index].sees(&keys) {
                    continue;
                }
                let queries = match panels.get(index + 1) {
                    Some(panel) if panel.fresh && panel.sees(&keys) => panel.rows.clone(),
                    None if next.is_empty() => then.rows.start..then.rows.end.min(then.rows.start + width),
                    _ => 0..0,
                };
                let panel = &mut panels[index];
                panel.done = !panel.sees(&(keys.end..task.keys.end));
                let outputs = if panel.done && task.part.is_none() { panel.rows.clone() } else { 0..0 };
                let part = shares.next().map_or(0..0, |start| start..(start + share).min(then_keys.len()));
                let coming = [
                    queries_of(job, &job.call.o, task, &outputs),
                    queries_of(job, &job.call.q, then, &queries),
                    k.part(part.clone()),
                    v.part(part),
                ];
                let tiles = (keys.len() + problem.head_dim_v).div_ceil(S::ROWS);
                if panel.fresh {
                    load_queries::<S>(job, task, panel, strip);
                }
                step::<S>(job, panel, &block, s, &mut Ahead::new(coming, tiles));
                if panel.done {
                    store_outputs::<S>(job, task, panel, strip);
                }
            }
            keys = next;
        }
        for panel in workspace.panels.iter_mut().filter(|panel| !panel.done) {
            // No block of the task was seen.
            clear_outputs::<S>(panel, problem.head_dim_v);
            store_outputs::<S>(job, task, panel, strip);
        }
    }
}

/// Rows of K or V.
fn rows(raw: &Raw, task: &Task, keys: &Range<usize>) -> Rows {
    rows_of(raw, task.batch, task.head, keys.start, keys.len())
}

/// Rows of Q or O; none where several heads' lie between each other.
fn queries_of(job: &Job<'_>, raw: &Raw, task: &Task, rows: &Range<usize>) -> Rows {
    let count = if job.call.problem.group() == 1 { rows.len() } else { 0 };
    rows_of(raw, task.batch, task.head, rows.start, count)
}

/// Calls `S::$tile::<rows, vectors>` for all rows of a segment or stair, with tiles as tall as there are registers for.
macro_rules! tiles {
    ($s:ident::$tile:ident, $part:expr, $rows:expr, $product:expr, $coming:expr) => {
        match $part.end_vec - $part.first_vec {
            1 => tiles!($s::$tile::<1>, $rows, $product, $coming),
            2 => tiles!($s::$tile::<2>, $rows, $product, $coming),
            3 if $s::VECS >= 3 => tiles!($s::$tile::<3>, $rows, $product, $coming),
            _ => unreachable!("a panel has at most VECS vectors"),
        }
    };
    ($s:ident::$tile:ident::<$v:literal>, $rows:expr, $product:expr, $coming:expr) => {{
        let (eights, fours, twos) = ($rows - $rows % 8, $rows - $rows % 4, $rows - $rows % 2);
        let eights = if $s::ROWS >= 8 { eights } else { 0 };
        if eights > 0 {
            $s::$tile::<8, $v>($product, 0..eights, $coming);
        }
        if eights < fours {
            $s::$tile::<4, $v>($product, eights..fours, $coming);
        }
        if fours < twos {
            $s::$tile::<2, $v>($product, fours..twos, $coming);
        }
        if twos < $rows {
            $s::$tile::<1, $v>($product, twos..$rows, $coming);
        }
    }};
}

/// One panel against one block of keys.
#[inline(always)]
unsafe fn step<S: Simd>(job: &Job<'_>, panel: &mut Panel, block: &Block, s: *mut f32, coming: &mut Coming) {
    let problem = &job.call.problem;
    let segments = panel.segments(&block.keys);
    if segments.is_empty() {
        return;
    }
    // SAFETY: segments are inside the block, whose rows are readable; panels and s are scratch of that size.
    unsafe {
        for vec in 0..panel.vecs {
            S::store(panel.top.add(vec * S::LANES), S::splat(f32::NEG_INFINITY));
        }
        for &segment in segments.iter() {
            scores::<S>(panel, block, segment, problem.head_dim, s, coming);
        }
        let mut masked = false;
        for vec in 0..panel.vecs {
            let seen = panel.seen(vec, &block.keys);
            let column = Column {
                at: s.add(((seen.start - block.keys.start) * S::VECS + vec) * S::LANES),
                keys: seen,
                panel,
                vec,
            };
            let changed = column.change::<S>(job.scoring);
            let hidden = column.mask::<S>();
            if changed || hidden {
                column.find_top::<S>();
            }
            masked |= hidden;
            column.softmax::<S>(job.scoring.scale);
        }
        // A first stair of all vectors starts the outputs and takes their rescaling along.
        let whole = segments[0].end_vec - segments[0].first_vec == panel.vecs;
        let wild = masked && block.has_wild_values::<S>();
        if panel.fresh && (wild || !whole) {
            clear_outputs::<S>(panel, problem.head_dim_v);
        }
        if wild {
            return exact_outputs::<S>(panel, block, s);
        }
        // One stair takes that of its vectors along; several would take some more than once.
        if !whole && segments.stairs().count() > 1 {
            rescale_outputs::<S>(panel, problem.head_dim_v);
        }
        for stair in segments.stairs() {
            outputs::<S>(panel, block, stair, s, coming);
            panel.fresh = false;
            forget_rescaling::<S>(panel);
        }
    }
}

/// Notes that the outputs of a panel have been multiplied with their rescaling.
#[inline(always)]
unsafe fn forget_rescaling<S: Simd>(panel: &Panel) {
    for vec in 0..panel.vecs {
        // SAFETY: a panel has a row of them.
        unsafe { S::store(panel.rescale.add(vec * S::LANES), S::splat(1.0)) };
    }
}

/// Sᵀ = K Qᵀ of a segment, with the tops that its lanes reach.
#[inline(always)]
unsafe fn scores<S: Simd>(
    panel: &Panel,
    block: &Block,
    segment: Segment,
    head_dim: usize,
    s: *mut f32,
    coming: &mut Coming,
) {
    let first = segment.first_key - block.keys.start;
    let lane = segment.first_vec * S::LANES;
    let step = S::VECS * S::LANES;
    // SAFETY: as of `step`.
    unsafe {
        let (k, s) = (block.k.add(first * block.k_stride), s.add(first * step + lane));
        let q = Vectors { at: panel.q.add(lane) };
        let scores = Scores { k, stride: block.k_stride, q, head_dim, s, tops: panel.top.add(lane) };
        tiles!(S::score, segment, segment.end_key - segment.first_key, &scores, coming);
    }
}

/// Makes the outputs of a panel zeros.
#[inline(always)]
unsafe fn clear_outputs<S: Simd>(panel: &mut Panel, head_dim_v: usize) {
    let rows = head_dim_v.next_multiple_of(S::LANES);
    // SAFETY: a panel's outputs have that many rows.
    unsafe { std::ptr::write_bytes(panel.o, 0, rows * S::VECS * S::LANES) };
    panel.fresh = false;
}

/// Multiplies the outputs of a panel with their rescaling, once and for all.
#[inline(always)]
unsafe fn rescale_outputs<S: Simd>(panel: &Panel, head_dim_v: usize) {
    // SAFETY: as of `step`.
    unsafe {
        for vec in 0..panel.vecs {
            let factor = panel.rescale.add(vec * S::LANES);
            for d in 0..head_dim_v {
                let at = panel.o.add((d * S::VECS + vec) * S::LANES);
                S::store(at, S::mul(S::load(at), S::load(factor)));
            }
        }
        forget_rescaling::<S>(panel);
    }
}

/// Oᵀ = Oᵀ · rescale + Vᵀ Pᵀ of a stair; without the first term where the panel is fresh.
#[inline(always)]
unsafe fn outputs<S: Simd>(panel: &Panel, block: &Block, stair: Stair, p: *const f32, coming: &mut Coming) {
    let first = stair.first_key - block.keys.start;
    let lane = stair.first_vec * S::LANES;
    let step = S::VECS * S::LANES;
    // SAFETY: as of `step`.
    unsafe {
        let p = Vectors { at: p.add(first * step + lane) };
        let rescale = (!panel.fresh).then_some(panel.rescale.add(lane).cast_const());
        let outputs = Outputs {
            v: block.v.add(first * S::LANES),
            panel: block.keys.len() * S::LANES,
            p,
            keys: stair.keys,
            o: panel.o.add(lane),
            rescale,
        };
        tiles!(S::output, stair, block.head_dim_v, &outputs, coming);
    }
}

/// The same, lane by lane and only for keys that the lane's row sees: where 0 · ∞ would spoil rows that do not.
#[inline(always)]
unsafe fn exact_outputs<S: Simd>(panel: &Panel, block: &Block, p: *const f32) {
    let width = S::VECS * S::LANES;
    // SAFETY: as of `step`.
    unsafe {
        for lane in 0..panel.vecs * S::LANES {
            let factor = *panel.rescale.add(lane);
            let seen = panel.keys(lane);
            let keys = seen.start.max(block.keys.start)..seen.end.min(block.keys.end);
            for d in 0..block.head_dim_v {
                let o = panel.o.add(d * width + lane);
                let mut sum = *o * factor;
                for key in keys.clone() {
                    let key = key - block.keys.start;
                    sum += *p.add(key * width + lane) * *block.value::<S>(key, d);
                }
                *o = sum;
            }
        }
    }
}
