//! One task: rows of queries against a range of keys, by online softmax.
//!
//! Rows are taken in panels as wide as the micro-kernel, one row per lane, and keys in blocks. For each block that it sees a
//! panel computes Sᵀ = K Qᵀ, moves its running maximum, turns Sᵀ into Pᵀ and adds P V to O; a row's maximum and sum are
//! lanes, so the softmax never reduces across a vector. Scores exist for one panel and one block at a time.
//!
//! As many blocks as the cache holds are a stretch: each panel goes through all of it before the next one does. So the
//! panel stays in the nearest cache meanwhile, and needs a place of its own only where there are several stretches.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use std::ops::Range;

use super::{
    ahead::{Ahead, Coming},
    block::Block,
    column::Column,
    cut::{Cut, Step},
    finish::{finish_panel, stats, write_lse},
    job::{Job, Workspace, pieces_of, rows_of},
    lanes::{load_queries, rows_at},
    panel::{MAX_LANES, MAX_VECS, Panel, Segment},
    plan::Task,
    queue::Queue,
    rows::{Rows, column_tiles},
    scratch::Carve,
    simd::Simd,
    tile::{Done, Outputs, Scores, chains},
    visible::Visible,
    wide,
};
use crate::layouts::View;

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
    let (q_rows, o_step) = (padded(problem.head_dim), padded(problem.head_dim_v));
    let panel_count = task.rows.len().div_ceil(width);
    let cut = cut_of(job, task);
    let (blocks, only_one) = cut.longest_stretch();
    // Where one stretch is all, each panel is done before the next one begins.
    let places = if only_one { 1 } else { panel_count };
    let longest = job.block_k.min(task.keys.len());

    let mut carve = Carve::new();
    let q = carve.part(places * q_rows * width);
    let o = carve.part(places * o_step * width);
    let stats = carve.part(places * 5 * width);
    let s = carve.part(longest * width);
    let k_wide = carve.part(blocks * longest * problem.head_dim);
    let v_wide = carve.part(blocks * longest * o_step);
    let strip = carve.part(S::LANES * q_rows);
    let base = workspace.floats.reserve(carve.total());

    // SAFETY: all parts lie inside the reserved scratch.
    unsafe {
        let (s, strip) = (base.add(s), base.add(strip));
        let panels = &mut workspace.panels;
        panels.clear();
        let visible = Visible::new(job.call, task.batch);
        for index in 0..panel_count {
            let start = task.rows.start + index * width;
            let rows = start..(start + width).min(task.rows.end);
            let mut panel = Panel::new(visible, rows, problem.group(), S::LANES);
            let place = index % places;
            panel.q = base.add(q + place * q_rows * width);
            panel.o = base.add(o + place * o_step * width);
            panel.place_stats(base.add(stats + place * 5 * width), width);
            panels.push(panel);
        }
        let blocks = &mut workspace.blocks;
        blocks.clear();
        let mut now = cut.first(panels);
        while let Some(step) = now {
            let keys = cut.keys(step.block..step.block + 1);
            let number = step.block - step.stretch.start;
            if blocks.len() <= number {
                blocks.resize_with(number + 1, || None);
            }
            if blocks[number].is_none() {
                let k_wide = base.add(k_wide + number * longest * problem.head_dim);
                let v_wide = base.add(v_wide + number * longest * o_step);
                let of = |view| pieces_of(view, task.batch, task.head, keys.clone());
                let (k, v) = (of(job.call.k()), of(job.call.v()));
                blocks[number] = Some(Block::new::<S>(keys.clone(), k, v, k_wide, v_wide));
            }
            let next = cut.after(panels, &step);
            panels[step.panel].done = !panels[step.panel].sees(&(keys.end..task.keys.end));
            let coming = what_comes(job, task, tasks, &cut, panels, blocks, &step, next.as_ref());
            let tiles = (keys.len() + problem.head_dim_v).div_ceil(S::ROWS);
            let panel = &mut panels[step.panel];
            if panel.fresh {
                load_queries::<S>(job, task, job.call.q(), panel, panel.q, strip);
                panel.clear_stats::<S>();
            }
            if let Some(block) = &blocks[number] {
                attend::<S>(job, task, panel, block, s, &mut Ahead::new(coming, tiles));
            }
            if next.as_ref().is_some_and(|next| next.stretch != step.stretch) {
                blocks.clear();
            }
            now = next;
        }
        for panel in panels.iter_mut().filter(|panel| !panel.done) {
            // No block of the task was seen.
            panel.clear_stats::<S>();
            std::ptr::write_bytes(panel.o, 0, o_step * width);
            finish_panel::<S>(job, task, panel, o_step);
        }
    }
}

/// How a task's keys are cut.
fn cut_of(job: &Job<'_>, task: &Task) -> Cut {
    Cut::new(task, job.block_k, job.call.problem.head_dim + job.call.problem.head_dim_v)
}

/// What is needed soon: where outputs go, queries, keys and values; at the end of a task, what the next one begins with.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // All that there is to know about the order of work.
fn what_comes(
    job: &Job<'_>,
    task: &Task,
    tasks: &Queue<'_, Task>,
    cut: &Cut,
    panels: &[Panel],
    blocks: &[Option<Block>],
    step: &Step,
    next: Option<&Step>,
) -> [Rows; 4] {
    let none = || (task, 0..0);
    let (k_task, keys) = match next {
        Some(Step { block, stretch, .. }) => {
            let number = block - stretch.start;
            let known = *stretch == step.stretch && blocks.get(number).is_some_and(Option::is_some);
            if known { none() } else { (task, cut.keys(*block..block + 1)) }
        }
        None => tasks.peek().map_or_else(none, |then| (then, cut_of(job, then).first_keys())),
    };
    let keys_and_values = [job.call.k(), job.call.v()].map(|view| rows(view, k_task, &keys));
    // Queries of the next panel, and the places of this one's outputs, come with its first block.
    let panel = &panels[step.panel];
    let stretch = cut.keys(step.stretch.clone());
    let first_keys = cut.keys(step.block..step.block + 1);
    if panel.reach(&stretch).start < first_keys.start {
        let [k, v] = keys_and_values;
        return [Rows { count: 0, ..k }, Rows { count: 0, ..k }, k, v];
    }
    let (q_task, queries) = match panels[step.panel + 1..].iter().find(|panel| panel.sees(&stretch)) {
        Some(panel) if panel.fresh => (task, panel.rows.clone()),
        None if stretch.end == task.keys.end => tasks.peek().map_or_else(none, |then| {
            (then, then.rows.start..then.rows.end.min(then.rows.start + panel.rows.len()))
        }),
        _ => none(),
    };
    let ends = task.part.is_none() && !panel.sees(&(stretch.end..task.keys.end));
    let outputs = if ends { panel.rows.clone() } else { 0..0 };
    let [k, v] = keys_and_values;
    [queries_of(job, job.call.o(), task, &outputs), queries_of(job, job.call.q(), q_task, &queries), k, v]
}

/// Rows of K or V, as far as they lie one behind the other.
fn rows(view: View<'_>, task: &Task, keys: &Range<usize>) -> Rows {
    rows_of(view, task.batch, task.head, keys.start, keys.len().min(view.lie.together(keys.start)))
}

/// Rows of Q or O; none where several heads' lie between each other.
fn queries_of(job: &Job<'_>, view: View<'_>, task: &Task, rows: &Range<usize>) -> Rows {
    let count = if job.call.problem.group() == 1 { rows.len() } else { 0 };
    rows_of(view, task.batch, task.head, rows.start, count)
}

/// How many of `count` rows go into tiles of `tall` ones, so that the others fill tiles of four wherever they can.
#[inline(always)]
pub(super) fn evenly(tall: usize, count: usize) -> usize {
    let others = count % tall;
    if tall == 6 && matches!(others, 2 | 3) && count > 6 { count - others - 6 } else { count - others }
}

/// Calls `S::score::<keys, vectors>` for all keys of a segment, with tiles as tall as there are registers for.
macro_rules! score_tiles {
    ($s:ident, $vecs:expr, $keys:expr, $scores:expr, $coming:expr) => {
        match $vecs {
            1 => score_tiles!($s::<1>, $keys, $scores, $coming),
            2 => score_tiles!($s::<2>, $keys, $scores, $coming),
            3 if $s::VECS >= 3 => score_tiles!($s::<3>, $keys, $scores, $coming),
            4 if $s::VECS >= 4 => score_tiles!($s::<4>, $keys, $scores, $coming),
            _ => unreachable!("a panel has at most VECS vectors"),
        }
    };
    ($s:ident::<$v:literal>, $keys:expr, $scores:expr, $coming:expr) => {{
        let tall = $s::tall($v);
        let tall_ones = if tall > 4 { evenly(tall, $keys) } else { 0 };
        match tall {
            8 if tall_ones > 0 => $s::score::<8, $v>($scores, 0..tall_ones, $coming),
            6 if tall_ones > 0 => $s::score::<6, $v>($scores, 0..tall_ones, $coming),
            _ => {}
        }
        let fours = tall_ones + ($keys - tall_ones) / 4 * 4;
        let twos = fours + ($keys - fours) / 2 * 2;
        if tall_ones < fours {
            $s::score::<4, $v>($scores, tall_ones..fours, $coming);
        }
        if fours < twos {
            $s::score::<2, $v>($scores, fours..twos, $coming);
        }
        if twos < $keys {
            $s::score::<1, $v>($scores, twos..$keys, $coming);
        }
    }};
}

/// Calls `S::output::<rows, vectors>`.
macro_rules! output_tiles {
    ($s:ident, $vectors:expr, $tall:expr, $outputs:expr, $rows:expr, $coming:expr) => {
        match ($vectors, $tall) {
            (1, 8) => $s::output::<8, 1>($outputs, $rows, $coming),
            (1, 4) => $s::output::<4, 1>($outputs, $rows, $coming),
            (1, _) => $s::output::<1, 1>($outputs, $rows, $coming),
            (2, 8) => $s::output::<8, 2>($outputs, $rows, $coming),
            (2, 6) => $s::output::<6, 2>($outputs, $rows, $coming),
            (2, 4) => $s::output::<4, 2>($outputs, $rows, $coming),
            (2, _) => $s::output::<1, 2>($outputs, $rows, $coming),
            (3, 8) => $s::output::<8, 3>($outputs, $rows, $coming),
            (3, 4) => $s::output::<4, 3>($outputs, $rows, $coming),
            (3, _) => $s::output::<1, 3>($outputs, $rows, $coming),
            (_, 6) => $s::output::<6, 4>($outputs, $rows, $coming),
            (_, 4) => $s::output::<4, 4>($outputs, $rows, $coming),
            _ => $s::output::<1, 4>($outputs, $rows, $coming),
        }
    };
}

pub(super) use {output_tiles, score_tiles};

/// One panel against one block of keys; writes the outputs of a panel that is done.
#[inline(always)]
unsafe fn attend<S: Simd>(
    job: &Job<'_>,
    task: &Task,
    panel: &mut Panel,
    block: &Block,
    s: *mut f32,
    coming: &mut Coming,
) {
    let head_dim_v = job.call.problem.head_dim_v;
    let o_step = head_dim_v.next_multiple_of(S::LANES);
    let scoring = job.scoring(task.batch, task.head);
    // SAFETY: segments are inside the block, whose rows are readable; panels and s are scratch of that size.
    unsafe {
        for vec in 0..panel.vecs {
            S::store(panel.top.add(vec * S::LANES), S::splat(f32::NEG_INFINITY));
        }
        let column = |panel, vec, keys: Range<usize>| Column {
            at: s.add(((keys.start - block.keys.start) * S::VECS + vec) * S::LANES),
            keys,
            panel,
            vec,
        };
        for &segment in panel.segments(&block.keys).iter() {
            let plain = if scoring.inner.is_none() { panel.plain(&segment) } else { segment.first_key };
            // Tiles whose scores count as they are, then others.
            let tiles = (plain - segment.first_key) / 8 * 8;
            let split = if plain == segment.end_key { plain } else { segment.first_key + tiles };
            let (plain, rest) =
                (Segment { end_key: split, ..segment }, Segment { first_key: split, ..segment });
            scores::<S>(job, panel, block, plain, s, coming);
            if split == segment.end_key {
                continue;
            }
            // Tops of scores that do not count are forgotten; the other row is free until the softmax.
            for lane in (rest.first_vec * S::LANES..rest.end_vec * S::LANES).step_by(S::LANES) {
                S::store(panel.rescale.add(lane), S::load(panel.top.add(lane)));
            }
            scores::<S>(job, panel, block, rest, s, coming);
            for vec in rest.first_vec..rest.end_vec {
                let column = column(panel, vec, rest.first_key..rest.end_key);
                if column.is_settled(scoring) {
                    continue;
                }
                S::store(panel.top.add(vec * S::LANES), S::load(panel.rescale.add(vec * S::LANES)));
                column.settle::<S>(scoring);
            }
        }
        for vec in 0..panel.vecs {
            column(panel, vec, panel.seen(vec, &block.keys)).softmax::<S>(scoring.scale);
            if panel.done {
                let descale = S::splat(job.descale(task.batch, task.head));
                let inverse = S::div(descale, S::load(panel.sum.add(vec * S::LANES)));
                S::store(panel.inverse.add(vec * S::LANES), inverse);
            }
        }
        let lanes = panel.vecs * S::LANES;
        let straight = panel.done
            && task.part.is_none()
            && o_step == head_dim_v
            && panel.rows.len() == lanes
            && !panel.keys(0).is_empty()
            && !panel.keys(lanes - 1).is_empty();
        if straight {
            let mut rows = [std::ptr::null_mut(); MAX_VECS * MAX_LANES];
            for first in (0..lanes).step_by(S::LANES) {
                let of_vec = rows_at::<S>(job, task, job.call.o(), panel.rows.start + first);
                rows[first..first + S::LANES].copy_from_slice(&of_vec[..S::LANES]);
            }
            let wild = outputs::<S>(job, panel, block, s, Some(&rows), coming);
            for lane in (0..lanes).filter(|_| wild || job.call.lse().is_some()) {
                let (row, stats) = (panel.rows.start + lane, stats(panel, lane));
                if wild && !wide::is_finite::<S>(job, task.batch, task.head, row) {
                    S::write_row(job, task.batch, task.head, row);
                } else {
                    write_lse(job, task.batch, task.head, row, stats);
                }
            }
        } else {
            outputs::<S>(job, panel, block, s, None, coming);
        }
        panel.fresh = false;
        if panel.done && !straight {
            finish_panel::<S>(job, task, panel, o_step);
        }
    }
}

/// Sᵀ = K Qᵀ of a segment, with the tops that its lanes reach.
#[inline(always)]
unsafe fn scores<S: Simd>(
    job: &Job<'_>,
    panel: &Panel,
    block: &Block,
    segment: Segment,
    s: *mut f32,
    coming: &mut Coming,
) {
    let first = segment.first_key - block.keys.start;
    let lane = segment.first_vec * S::LANES;
    // SAFETY: as of `attend`.
    unsafe {
        let (vecs, keys) = (segment.end_vec - segment.first_vec, segment.end_key - segment.first_key);
        let head_dim = job.call.problem.head_dim;
        for elements in chains(head_dim) {
            let scores = Scores {
                k: block.k.add(first * block.k_stride + elements.start),
                stride: block.k_stride,
                q: panel.q.add(lane + elements.start * S::VECS * S::LANES),
                len: elements.len(),
                s: s.add(first * S::VECS * S::LANES + lane),
                onto: elements.start > 0,
                tops: (elements.end == head_dim).then_some(panel.top.add(lane)),
            };
            score_tiles!(S, vecs, keys, &scores, coming);
        }
    }
}

/// O = O · rescale + P V of a panel and a block, without the first term where the panel is fresh; straight into `rows` of
/// the output tensor where these are given. Returns whether something infinite or NaN was written there.
#[inline(always)]
unsafe fn outputs<S: Simd>(
    job: &Job<'_>,
    panel: &Panel,
    block: &Block,
    p: *const f32,
    rows: Option<&[*mut u8; MAX_VECS * MAX_LANES]>,
    coming: &mut Coming,
) -> bool {
    let mut wild = false;
    let wild_at = &raw mut wild;
    let step = block.head_dim_v.next_multiple_of(S::LANES);
    let lanes = panel.vecs * S::LANES;
    let all = panel.sees_all(&block.keys);
    for columns in column_tiles::<S>(block.head_dim_v) {
        let vectors = columns.len() / S::LANES;
        // SAFETY: as of `attend`.
        let of = |keys: &Range<usize>| unsafe {
            let key = keys.start - block.keys.start;
            Outputs {
                p: p.add(key * S::VECS * S::LANES),
                v: block.values(key, &columns),
                keys: keys.len(),
                o: panel.o.add(columns.start),
                step,
                rescale: (!panel.fresh).then_some(panel.rescale.cast_const()),
                done: rows.map(|rows| Done {
                    rows: rows.as_ptr(),
                    column: columns.start,
                    dtype: job.call.o().dtype,
                    factors: panel.inverse,
                    wild: wild_at,
                }),
                masked: !all,
            }
        };
        // Tall tiles, and some of four rows where these do not come out even.
        let tall = S::tall(vectors);
        // SAFETY: as of `attend`.
        unsafe {
            if all {
                let outputs = of(&block.keys);
                output_tiles!(S, vectors, tall, &outputs, 0..evenly(tall, lanes), coming);
                output_tiles!(S, vectors, 4, &outputs, evenly(tall, lanes)..lanes, coming);
                continue;
            }
            for first in (0..lanes).step_by(S::LANES) {
                let seen = panel.seen(first / S::LANES, &block.keys);
                let mut next = first;
                while next < first + S::LANES {
                    let tall = if next - first < evenly(tall, S::LANES) { tall } else { 4 };
                    let tile = next..next + tall;
                    // A few keys more, whose probabilities are 0 for these rows, where the kernel takes four at a time.
                    let keys = panel.seen_by(tile.clone(), &seen);
                    let keys = keys.start..seen.end.min(keys.start + keys.len().next_multiple_of(4));
                    if !output_tiles!(S, vectors, tall, &of(&keys), tile.clone(), coming) {
                        for lane in tile {
                            let seen = panel.seen_by(lane..lane + 1, &block.keys);
                            let outputs = Outputs { masked: false, ..of(&seen) };
                            output_tiles!(S, vectors, 1, &outputs, lane..lane + 1, coming);
                        }
                    }
                    next += tall;
                }
            }
        }
    }
    wild
}
