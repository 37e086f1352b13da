//! One task: rows of queries against a range of keys, by online softmax.
//!
//! Rows are taken in panels as wide as the micro-kernel, a row a lane. For each block of keys a panel computes
//! Sᵀ = K Qᵀ, moves its running maximum, turns Sᵀ into Pᵀ and adds Vᵀ Pᵀ to Oᵀ; a row's maximum and sum are
//! lanes too, so the softmax never reduces across a vector. Scores exist for one panel and one block at a time.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use std::ops::Range;

use super::{
    block::{Ahead, Block},
    column::Column,
    job::{Job, Workspace, rows_of},
    lanes::{load_queries, store_outputs},
    panel::{Panel, Segment},
    plan::Task,
    scratch::Carve,
    simd::Simd,
    tile::{OutputTile, ScoreTile, Vectors},
    visible::Visible,
};

/// Runs a task.
///
/// # Safety
/// Requires a CPU with `S`; the call must have passed the contract and the task be of its plan.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(job: &Job<'_>, task: &Task, workspace: &mut Workspace) {
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
            load_queries::<S>(job, task, &panel, strip);
            for lane in 0..panel.vecs * S::LANES {
                *panel.max.add(lane) = f32::NEG_INFINITY;
                *panel.sum.add(lane) = 0.0;
            }
            workspace.panels.push(panel);
        }
        let rows = |raw, keys: &Range<usize>| rows_of(raw, task.batch, task.head, keys.start, keys.len());
        // Blocks begin at multiples of their length, so that a row's do not depend on its task.
        let from = |start: usize| start..(start / block_k + 1).saturating_mul(block_k).min(task.keys.end);
        let (score_tiles, output_tiles) = (longest.div_ceil(S::ROWS), problem.head_dim_v.div_ceil(S::ROWS));
        let mut keys = from(task.keys.start);
        while !keys.is_empty() {
            let (k, v) = (rows(&job.call.k, &keys), rows(&job.call.v, &keys));
            let block = Block::new::<S>(keys.clone(), k, v, base.add(k_wide), base.add(v_wide));
            let next = from(keys.end);
            let mut coming = Coming {
                k: Ahead::new(rows(&job.call.k, &next), panel_count * score_tiles),
                v: Ahead::new(rows(&job.call.v, &next), panel_count * output_tiles),
                o: Ahead::new(rows(&job.call.o, &(0..0)), output_tiles),
            };
            for panel in &mut workspace.panels {
                // Rows of one head lie behind each other.
                let last = panel.ends_in(&keys) && task.part.is_none() && problem.group() == 1;
                let outputs = if last { panel.rows.clone() } else { 0..0 };
                coming.o = Ahead::new(rows(&job.call.o, &outputs), output_tiles);
                step::<S>(job, panel, &block, s, &mut coming);
            }
            keys = next;
        }
        for panel in &mut workspace.panels {
            if panel.fresh {
                clear_outputs::<S>(panel, problem.head_dim_v);
            }
            store_outputs::<S>(job, task, panel, strip);
        }
    }
}

/// Calls `S::$tile::<rows, vectors>` over all rows of a segment, with tiles as tall as there are registers for.
macro_rules! tiles {
    ($s:ident::$tile:ident, $segment:expr, $rows:expr, $row:ident => $arg:expr) => {
        match $segment.end_vec - $segment.first_vec {
            1 => tiles!($s::$tile::<1>, $rows, $row => $arg),
            2 => tiles!($s::$tile::<2>, $rows, $row => $arg),
            3 if $s::VECS >= 3 => tiles!($s::$tile::<3>, $rows, $row => $arg),
            _ => unreachable!("a panel has at most VECS vectors"),
        }
    };
    ($s:ident::$tile:ident::<$v:literal>, $rows:expr, $row:ident => $arg:expr) => {{
        let mut $row = 0;
        if $s::ROWS >= 8 {
            while $row + 8 <= $rows {
                $s::$tile::<8, $v>(&$arg);
                $row += 8;
            }
        }
        while $row + 4 <= $rows {
            $s::$tile::<4, $v>(&$arg);
            $row += 4;
        }
        if $row + 2 <= $rows {
            $s::$tile::<2, $v>(&$arg);
            $row += 2;
        }
        if $row < $rows {
            $s::$tile::<1, $v>(&$arg);
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
                at: s.add(((seen.start - block.keys.start) * panel.vecs + vec) * S::LANES),
                step: panel.vecs * S::LANES,
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
        // A first rectangle of all vectors starts the outputs and takes their rescaling along.
        let whole = segments[0].end_vec - segments[0].first_vec == panel.vecs;
        let wild = masked && block.has_wild_values::<S>();
        if panel.fresh && (wild || !whole) {
            clear_outputs::<S>(panel, problem.head_dim_v);
        }
        if wild {
            return exact_outputs::<S>(panel, block, s);
        }
        // One rectangle takes that of its vectors along; several would take some more than once.
        if segments.len() > 1 && !whole {
            rescale_outputs::<S>(panel, problem.head_dim_v);
        }
        for &segment in segments.iter() {
            outputs::<S>(panel, block, segment, s, coming);
            panel.fresh = false;
            forget_rescaling::<S>(panel);
        }
    }
}

/// Rows that will be needed soon: keys and values of the next block, and where outputs that are done will go.
struct Coming {
    k: Ahead,
    v: Ahead,
    o: Ahead,
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
    let step = panel.vecs * S::LANES;
    // SAFETY: as of `step`.
    unsafe {
        let (k, s) = (block.k.add(first * block.k_stride), s.add(first * step + lane));
        let q = Vectors { at: panel.q.add(lane), width: panel.vecs };
        tiles!(S::score, segment, segment.end_key - segment.first_key, key => {
            coming.k.advance::<S>();
            ScoreTile {
                k: k.add(key * block.k_stride),
                stride: block.k_stride,
                q,
                head_dim,
                s: s.add(key * step),
                tops: panel.top.add(lane),
            }
        });
    }
}

/// Makes the outputs of a panel zeros.
#[inline(always)]
unsafe fn clear_outputs<S: Simd>(panel: &mut Panel, head_dim_v: usize) {
    let rows = head_dim_v.next_multiple_of(S::LANES);
    // SAFETY: a panel's outputs have that many rows.
    unsafe { std::ptr::write_bytes(panel.o, 0, rows * panel.vecs * S::LANES) };
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
                let at = panel.o.add((d * panel.vecs + vec) * S::LANES);
                S::store(at, S::mul(S::load(at), S::load(factor)));
            }
        }
        forget_rescaling::<S>(panel);
    }
}

/// Oᵀ = Oᵀ · rescale + Vᵀ Pᵀ of a segment; without the first term where the panel is fresh.
#[inline(always)]
unsafe fn outputs<S: Simd>(
    panel: &Panel,
    block: &Block,
    segment: Segment,
    p: *const f32,
    coming: &mut Coming,
) {
    let first = segment.first_key - block.keys.start;
    let lane = segment.first_vec * S::LANES;
    let step = panel.vecs * S::LANES;
    // SAFETY: as of `step`.
    unsafe {
        let p = Vectors { at: p.add(first * step + lane), width: panel.vecs };
        let rescale = (!panel.fresh).then_some(panel.rescale.add(lane).cast_const());
        let o = panel.o.add(lane);
        tiles!(S::output, segment, block.head_dim_v, d => {
            coming.v.advance::<S>();
            coming.o.advance::<S>();
            OutputTile {
                v: block.v.add(first * S::LANES),
                panel: block.keys.len() * S::LANES,
                d,
                p,
                len: segment.end_key - segment.first_key,
                o: o.add(d * step),
                rescale,
            }
        });
    }
}

/// The same, lane by lane and only for keys that the lane's row sees: where 0 · ∞ would spoil rows that do not.
#[inline(always)]
unsafe fn exact_outputs<S: Simd>(panel: &Panel, block: &Block, p: *const f32) {
    let width = panel.vecs * S::LANES;
    // SAFETY: as of `step`.
    unsafe {
        for lane in 0..width {
            let factor = *panel.rescale.add(lane);
            let keys =
                panel.lanes[lane].start.max(block.keys.start)..panel.lanes[lane].end.min(block.keys.end);
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
