//! One task: rows of queries against a range of keys, by online softmax.
//!
//! Rows are taken in panels as wide as the micro-kernel, a row a lane. For each block of keys a panel computes
//! Sᵀ = K Qᵀ, moves its running maximum, turns Sᵀ into Pᵀ and adds Vᵀ Pᵀ to Oᵀ; a row's maximum and sum are
//! lanes too, so the softmax never reduces across a vector. Scores exist for one panel and one block at a time.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use std::{cell::Cell, ops::Range};

use super::{
    math::{self, Exp2Below},
    panel::{MAX_LANES, Panel, Segment},
    plan::Task,
    rows::{self, Rows},
    scoring::Scoring,
    scratch::{Carve, Scratch},
    simd::Simd,
    tile::{OutputTile, ScoreTile, Vectors},
    visible::Visible,
};
use crate::{
    DType,
    contract::Call,
    tensor::{Layout, Raw},
};

/// What all tasks of a call share.
pub(super) struct Job<'a> {
    pub call: &'a Call<'a>,
    pub scoring: Scoring,
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

    /// The query head and the query of a row.
    pub(super) fn head_and_query(&self, head_kv: usize, row: usize) -> (usize, usize) {
        let group = self.call.problem.group();
        (head_kv * group + row % group, row / group)
    }
}

/// What a thread keeps between tasks.
pub(super) struct Workspace {
    pub floats: Scratch,
    panels: Vec<Panel>,
}

impl Workspace {
    pub(super) const fn new() -> Self {
        Self { floats: Scratch::new(), panels: Vec::new() }
    }
}

/// The address of a row; it is in bounds if the indices are inside the shape.
fn row_at(raw: &Raw, b: usize, h: usize, s: usize) -> *mut u8 {
    raw.ptr.wrapping_add(raw.layout.row(b, h, s) * raw.dtype.size())
}

/// `count` rows of a head; they are readable if they are inside the shape.
pub(super) fn rows_of(raw: &Raw, b: usize, h: usize, s: usize, count: usize) -> Rows {
    let Layout { shape, strides } = raw.layout;
    Rows { at: row_at(raw, b, h, s), dtype: raw.dtype, stride: strides[2], count, len: shape[3] }
}

/// Keys of the block after the one at work, brought into the cache bit by bit.
struct Ahead {
    k: Rows,
    v: Rows,
    /// Rows that each tile of scores asks for.
    step: usize,
    done: usize,
}

impl Ahead {
    #[inline(always)]
    fn advance<S: Simd>(&mut self) {
        let rows = self.done..self.done + self.step;
        self.k.prefetch::<S>(rows.clone());
        self.v.prefetch::<S>(rows.clone());
        self.done = rows.end;
    }
}

/// A block of keys as f32: rows of K, and V in panels of `LANES` columns.
struct Block {
    keys: Range<usize>,
    k: *const f32,
    k_stride: usize,
    v: *const f32,
    head_dim_v: usize,
    /// Whether V has wild values, once that was asked.
    wild: Cell<Option<bool>>,
}

impl Block {
    /// Column `d` of key number `key` of the block.
    #[inline(always)]
    unsafe fn value<S: Simd>(&self, key: usize, d: usize) -> *const f32 {
        // SAFETY: the caller's indices are inside the block.
        unsafe { self.v.add((d / S::LANES * self.keys.len() + key) * S::LANES + d % S::LANES) }
    }

    /// Whether a value is infinite or NaN, so that a probability of 0 does not make it vanish.
    #[inline(always)]
    unsafe fn has_wild_values<S: Simd>(&self) -> bool {
        if let Some(wild) = self.wild.get() {
            return wild;
        }
        // SAFETY: the panels hold whole vectors, and no vector has more than `MAX_LANES` lanes.
        let wild = unsafe {
            // 0 · x is 0, or NaN where x is wild; two sums, so that neither waits for the other.
            let (mut even, mut odd) = (S::splat(0.0), S::splat(0.0));
            let vectors = self.keys.len() * self.head_dim_v.div_ceil(S::LANES);
            for pair in 0..vectors / 2 {
                let at = self.v.add(2 * pair * S::LANES);
                even = S::fma(S::load(at), S::splat(0.0), even);
                odd = S::fma(S::load(at.add(S::LANES)), S::splat(0.0), odd);
            }
            if !vectors.is_multiple_of(2) {
                even = S::fma(S::load(self.v.add((vectors - 1) * S::LANES)), S::splat(0.0), even);
            }
            let mut lanes = [0.0; MAX_LANES];
            S::store(lanes.as_mut_ptr(), S::add(even, odd));
            lanes.iter().any(|&x| x != 0.0)
        };
        self.wild.set(Some(wild));
        wild
    }
}

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
        let mut keys = from(task.keys.start);
        while !keys.is_empty() {
            let (k, k_stride) = k_rows::<S>(rows(&job.call.k, &keys), base.add(k_wide));
            rows(&job.call.v, &keys).widen_to_panels::<S>(base.add(v_wide));
            let block = Block {
                k,
                k_stride,
                v: base.add(v_wide),
                head_dim_v: problem.head_dim_v,
                wild: Cell::new(None),
                keys: keys.clone(),
            };
            let next = from(keys.end);
            let mut ahead = Ahead {
                k: rows(&job.call.k, &next),
                v: rows(&job.call.v, &next),
                step: next.len().div_ceil(panel_count * longest.div_ceil(S::ROWS)),
                done: 0,
            };
            for panel in &mut workspace.panels {
                step::<S>(job, panel, &block, s, &mut ahead);
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
                    rows_of(raw, task.batch, h, s, 1).widen::<S>(to);
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

/// Rows of K and their stride: where they lie if they are contiguous f32 already, else widened into scratch.
#[inline(always)]
unsafe fn k_rows<S: Simd>(rows: Rows, wide: *mut f32) -> (*const f32, usize) {
    if rows.dtype == DType::F32 && rows.stride == rows.len {
        return (rows.at.cast(), rows.stride);
    }
    // SAFETY: keys are inside the tensor, and `wide` has room for a block.
    unsafe { rows.widen::<S>(wide) };
    (wide, rows.len)
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
unsafe fn step<S: Simd>(job: &Job<'_>, panel: &mut Panel, block: &Block, s: *mut f32, ahead: &mut Ahead) {
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
            scores::<S>(panel, block, segment, problem.head_dim, s, ahead);
        }
        let mut masked = false;
        for vec in 0..panel.vecs {
            let seen = panel.seen(vec, &block.keys);
            let column = Column {
                at: s.add(((seen.start - block.keys.start) * panel.vecs + vec) * S::LANES),
                step: panel.vecs * S::LANES,
                keys: seen,
            };
            let changed = change::<S>(job.scoring, &column);
            let hidden = mask::<S>(panel, vec, &column);
            if changed || hidden {
                find_top::<S>(panel, vec, &column);
            }
            masked |= hidden;
            softmax::<S>(panel, vec, &column, job.scoring.scale);
        }
        // One rectangle of all vectors starts the outputs.
        let whole = segments.len() == 1 && segments[0].end_vec - segments[0].first_vec == panel.vecs;
        if panel.fresh && (masked || !whole) {
            clear_outputs::<S>(panel, problem.head_dim_v);
        }
        // One rectangle takes the rescaling along; several would take it more than once.
        if segments.len() > 1 {
            rescale_outputs::<S>(panel, problem.head_dim_v);
        }
        if masked && block.has_wild_values::<S>() {
            return exact_outputs::<S>(panel, block, s);
        }
        for &segment in segments.iter() {
            outputs::<S>(panel, block, segment, s);
        }
        panel.fresh = false;
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
    ahead: &mut Ahead,
) {
    let first = segment.first_key - block.keys.start;
    let lane = segment.first_vec * S::LANES;
    let step = panel.vecs * S::LANES;
    // SAFETY: as of `step`.
    unsafe {
        let (k, s) = (block.k.add(first * block.k_stride), s.add(first * step + lane));
        let q = Vectors { at: panel.q.add(lane), width: panel.vecs };
        tiles!(S::score, segment, segment.end_key - segment.first_key, key => {
            ahead.advance::<S>();
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

/// What one vector of a panel sees of a block: a column of scores.
struct Column {
    keys: Range<usize>,
    at: *mut f32,
    step: usize,
}

/// Brings products into the scoring's form; whether that changed any.
#[inline(always)]
unsafe fn change<S: Simd>(scoring: Scoring, column: &Column) -> bool {
    let Some(change) = scoring.change else { return false };
    // SAFETY: as of `step`.
    unsafe {
        for key in 0..column.keys.len() {
            let at = column.at.add(key * column.step);
            S::store(at, math::change::<S>(change, S::load(at)));
        }
    }
    true
}

/// Finds the highest scores of a column anew.
#[inline(always)]
unsafe fn find_top<S: Simd>(panel: &Panel, vec: usize, column: &Column) {
    // SAFETY: as of `step`.
    unsafe {
        // Several at once, because one chain would wait for each comparison.
        let mut tops = [S::splat(f32::NEG_INFINITY); 4];
        let mut left = column.keys.len();
        let mut at = column.at;
        while left >= 4 {
            for (i, top) in tops.iter_mut().enumerate() {
                *top = S::max(S::load(at.add(i * column.step)), *top);
            }
            at = at.add(4 * column.step);
            left -= 4;
        }
        for i in 0..left {
            tops[0] = S::max(S::load(at.add(i * column.step)), tops[0]);
        }
        let top = S::max(S::max(tops[0], tops[1]), S::max(tops[2], tops[3]));
        S::store(panel.top.add(vec * S::LANES), top);
    }
}

/// Makes the scores of keys that a row does not see −∞; whether there are any.
#[inline(always)]
unsafe fn mask<S: Simd>(panel: &Panel, vec: usize, column: &Column) -> bool {
    let (keys, all) = (&column.keys, &panel.all[vec]);
    if all.start <= keys.start && keys.end <= all.end {
        return false;
    }
    // Counted from the column's first key, so that f32 holds them exactly.
    let (mut first, mut end) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
    let from_start = |key: usize| key.saturating_sub(keys.start).min(keys.len());
    for (lane, seen) in panel.lanes[vec * S::LANES..][..S::LANES].iter().enumerate() {
        first[lane] = from_start(seen.start) as f32;
        end[lane] = from_start(seen.end) as f32;
    }
    // SAFETY: as of `step`; no vector has more than `MAX_LANES` lanes.
    unsafe {
        let hidden = S::splat(f32::NEG_INFINITY);
        let (first, end) = (S::load(first.as_ptr()), S::load(end.as_ptr()));
        let before = 0..from_start(all.start);
        let after = from_start(all.end).max(before.end)..keys.len();
        for key in before.chain(after) {
            let at = column.at.add(key * column.step);
            let key = S::splat(key as f32);
            let x = S::select_less(key, end, S::load(at), hidden);
            S::store(at, S::select_less(key, first, hidden, x));
        }
    }
    true
}

/// Moves the running maxima to the tops where these are higher, turns scores into exponentials, adds these to the
/// running sums, and notes what the outputs so far are to be multiplied with.
#[inline(always)]
unsafe fn softmax<S: Simd>(panel: &Panel, vec: usize, column: &Column, scale: f32) {
    // SAFETY: as of `step`.
    unsafe {
        let (max_at, sum_at) = (panel.max.add(vec * S::LANES), panel.sum.add(vec * S::LANES));
        let exp = Exp2Below::<S>::new(scale * std::f32::consts::LOG2_E);
        let old = S::load(max_at);
        let max = S::max(S::load(panel.top.add(vec * S::LANES)), old);
        S::store(max_at, max);
        // A row that has seen only −∞ subtracts 0, so that its exponentials are 0 rather than NaN.
        let base = S::select_less(S::splat(f32::NEG_INFINITY), max, max, S::splat(0.0));
        let rescale = exp.of(S::sub(base, old));
        let mut sum = S::splat(0.0);
        for key in 0..column.keys.len() {
            let at = column.at.add(key * column.step);
            let p = exp.of(S::sub(base, S::load(at)));
            sum = S::add(sum, p);
            S::store(at, p);
        }
        S::store(sum_at, S::fma(S::load(sum_at), rescale, sum));
        S::store(panel.rescale.add(vec * S::LANES), rescale);
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
            S::store(factor, S::splat(1.0));
        }
    }
}

/// Oᵀ = Oᵀ · rescale + Vᵀ Pᵀ of a segment; without the first term where the panel is fresh.
#[inline(always)]
unsafe fn outputs<S: Simd>(panel: &Panel, block: &Block, segment: Segment, p: *const f32) {
    let first = segment.first_key - block.keys.start;
    let lane = segment.first_vec * S::LANES;
    let step = panel.vecs * S::LANES;
    // SAFETY: as of `step`.
    unsafe {
        let p = Vectors { at: p.add(first * step + lane), width: panel.vecs };
        let rescale = (!panel.fresh).then_some(panel.rescale.add(lane).cast_const());
        let o = panel.o.add(lane);
        tiles!(S::output, segment, block.head_dim_v, d => OutputTile {
            v: block.v.add(first * S::LANES),
            panel: block.keys.len() * S::LANES,
            d,
            p,
            len: segment.end_key - segment.first_key,
            o: o.add(d * step),
            rescale,
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
                let stats = Stats {
                    max: *panel.max.add(lane),
                    sum: *panel.sum.add(lane),
                    sees_keys: !panel.lanes[lane].is_empty(),
                };
                finish_row::<S>(job, task, row, from, stats);
            }
        }
    }
}

/// What the softmax of a row came to.
#[derive(Clone, Copy)]
pub(super) struct Stats {
    pub max: f32,
    pub sum: f32,
    pub sees_keys: bool,
}

/// Writes one row of outputs (already divided by their sum), or leaves it (not divided) as the part of a split task.
///
/// # Safety
/// Requires a CPU with `S`, `head_dim_v` f32 at `from`, which this may change, and a row of the task.
#[inline(always)]
pub(super) unsafe fn finish_row<S: Simd>(
    job: &Job<'_>,
    task: &Task,
    row: usize,
    from: *mut f32,
    stats: Stats,
) {
    let Some(part) = task.part else {
        // SAFETY: the caller's promise.
        return unsafe { write_row::<S>(job, task.batch, task.head, row, from, stats) };
    };
    let head_dim_v = job.call.problem.head_dim_v;
    let place = row - task.rows.start;
    // SAFETY: parts are inside their workspace.
    unsafe {
        let part = job.parts.add(part * job.part_len());
        std::ptr::copy_nonoverlapping(from, part.add(place * head_dim_v), head_dim_v);
        *part.add(job.part_rows * head_dim_v + place) = stats.max;
        *part.add(job.part_rows * (head_dim_v + 1) + place) = stats.sum;
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
    stats: Stats,
) {
    let (h, s) = job.head_and_query(head_kv, row);
    let head_dim_v = job.call.problem.head_dim_v;
    // SAFETY: the caller's promise.
    unsafe {
        if !stats.sees_keys {
            std::ptr::write_bytes(from, 0, head_dim_v);
        }
        let raw = &job.call.o;
        rows::narrow::<S>(raw.dtype, from, row_at(raw, batch, h, s), head_dim_v);
        if let Some(raw) = &job.call.lse {
            let lse = if !stats.sees_keys {
                f32::NEG_INFINITY
            } else if stats.sum == 0.0 {
                // Every score was −∞: the same NaN that the outputs are.
                f32::NAN
            } else {
                (f64::from(stats.max) * f64::from(job.scoring.scale) + f64::from(stats.sum).ln()) as f32
            };
            row_at(raw, batch, h, s).cast::<f32>().write(lse);
        }
    }
}
