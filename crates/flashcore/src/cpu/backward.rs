//! The backward pass: the gradients of q, k and v.
//!
//! Probabilities are computed again from lse, a tile at a time, so that memory grows with the lengths and not with their
//! product. There are three steps, each of them cut into items that threads take one by one:
//!
//! 1. For each row of queries, what its gradients of probabilities have in common: D = Σ dO∘O, less the gradient of lse.
//! 2. Chunks of keys, each against all rows of the query heads that share it. A chunk adds up dK and dV of its own keys, and
//!    leaves its part of dQ. Rows are taken in panels, one row per lane, as in the forward pass: Sᵀ = K Qᵀ and dPᵀ = V dOᵀ,
//!    then P and dS = P∘(dP − D) lane by lane, then dV += Pᵀ dO, dK += dSᵀ Q and dQ += dS K. All five are the products of
//!    [`tile`](super::tile); what a mask empties is left out as in the forward pass.
//! 3. The parts of dQ are added up in the order of keys.
//!
//! Where the CPU multiplies bf16, products of whole matrices do all five (`matrix`).
//!
//! How a call is cut depends on the problem alone, never on the number of threads, and so do the bits of its results. Products
//! and sums are f32; a kv head whose scores f32 does not hold well enough is computed in f64 (`wide`).
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

#[cfg(target_arch = "x86_64")]
mod matrix;
#[cfg(test)]
mod tests;
mod wide;

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

use super::{
    ahead::{Ahead, Coming},
    attend::{evenly, output_tiles, score_tiles},
    block::Block,
    column::Column,
    helpers::Source,
    isa::Isa,
    job::{Job, Workspace, rows_of},
    lanes::load_queries,
    panel::{MAX_LANES, Panel, Segment, meet},
    plan::Task,
    pool::{WORTH_A_THREAD, each},
    rows::{self, Rows, Vectorised, by_type, column_tiles},
    schedule::Schedule,
    scoring::Scoring,
    scratch::{Carve, Scratch},
    simd::{Simd, dispatch},
    tile::{Outputs, Scores, chains},
    visible::Visible,
};
use crate::{DType, Name, Problem, contract::Call, layouts::View};

/// Keys of a tile of scores: the tile stays in the nearest cache.
const BLOCK: usize = 64;
/// Bytes of the keys, values and their gradients that are worked on together: they stay in the second-level cache.
const STRETCH: usize = 512 << 10;
/// Chunks of keys that there should be in all.
const ENOUGH_CHUNKS: usize = 32;
/// Chunks that the keys of a head are cut into at most: each has a part of dQ.
const MOST_CHUNKS: usize = 8;
/// Keys of a chunk at least.
const LEAST_CHUNK: usize = 256;
/// The largest lse that f32 holds well enough, to an 8000th.
const MOST_LSE: f32 = 2048.0;
/// Rows of an item of the first and the last step, about.
const FEW_ROWS: usize = 512;

/// What all items of a call share.
struct Shared<'a> {
    job: Job<'a>,
    /// Of each sequence.
    sizes: Vec<Sizes>,
    /// Elements of a row of dQ, in whole vectors.
    step: usize,
    /// Keys of a chunk.
    chunk: usize,
    /// For each kv head, what is subtracted from the scores of each row, then what is subtracted from its gradients of
    /// probabilities.
    stats: *mut f32,
    /// For each kv head and chunk, the rows of dQ, or those of each panel turned.
    parts: *mut f32,
    /// Whether the CPU multiplies whole matrices of what the call has.
    by_matrices: bool,
    /// Of each kv head, whether it has a row so small that the products of whole matrices lose it.
    faint: Vec<AtomicBool>,
}

/// What a sequence has.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Rows of a kv head.
    rows: usize,
    /// The same in whole panels.
    padded: usize,
    /// Keys that have gradients, seen or not.
    keys: usize,
    /// Chunks of them.
    chunks: usize,
    /// Rows of panels of the kv heads of sequences before it, and the same for every chunk.
    rows_before: usize,
    parts_before: usize,
}

// SAFETY: items write to disjoint rows of the gradients, of the stats and of the parts.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    /// Of an item's sequence.
    fn sizes(&self, task: &Task) -> &Sizes {
        &self.sizes[task.batch]
    }

    /// What is subtracted from the scores of a row, and from its gradients of probabilities.
    fn stats(&self, task: &Task, row: usize) -> [*mut f32; 2] {
        let Sizes { padded, rows_before, .. } = *self.sizes(task);
        let at = self.stats.wrapping_add(2 * (rows_before + task.head * padded) + row);
        [at, at.wrapping_add(padded)]
    }

    /// Whether an item's head has products of whole matrices, whose results have dQ turned. Known after the first step.
    fn turned(&self, task: &Task) -> bool {
        self.by_matrices && !self.faint(task).load(Ordering::Relaxed)
    }

    /// Of an item's kv head.
    fn faint(&self, task: &Task) -> &AtomicBool {
        &self.faint[task.batch * self.job.call.problem.heads_kv + task.head]
    }

    /// A row of a chunk's part of dQ.
    fn part(&self, task: &Task, chunk: usize, row: usize) -> *mut f32 {
        let Sizes { padded, chunks, parts_before, .. } = *self.sizes(task);
        let before = parts_before + (task.head * chunks + chunk) * padded;
        self.parts.wrapping_add((before + row) * self.step)
    }
}

/// Computes a call.
pub(super) fn run(isa: Isa, schedule: &Schedule, helpers: Source<'_>, call: &Call<'_>) {
    let problem = &call.problem;
    let Problem { heads_kv, len_k, head_dim, head_dim_v, .. } = *problem;
    let job = Job {
        call,
        scoring: Scoring::of(problem),
        descaled: Vec::new(),
        block_k: BLOCK,
        parts: std::ptr::null_mut(),
        part_rows: 0,
    };
    let heads = problem.batch * heads_kv;
    // How many chunks there are depends on the problem alone.
    let chunks = ENOUGH_CHUNKS.div_ceil(heads.max(1)).min(MOST_CHUNKS);
    let chunk = len_k.div_ceil(chunks).max(LEAST_CHUNK).next_multiple_of(BLOCK);
    let sequences = call.sequences();
    let (mut rows_before, mut parts_before) = (0, 0);
    let sizes = |sequence: usize| {
        let (rows, keys) = (sequences.rows(sequence), sequences.room(sequence));
        let (padded, chunks) = (rows.next_multiple_of(isa.panel()), keys.div_ceil(chunk));
        let sizes = Sizes { rows, padded, keys, chunks, rows_before, parts_before };
        rows_before += heads_kv * padded;
        parts_before += heads_kv * padded * chunks;
        sizes
    };
    let sizes: Vec<Sizes> = (0..problem.batch).map(sizes).collect();
    let pairs: usize = sizes.iter().map(|of| of.rows * of.keys).sum();
    let work = heads_kv * pairs * (3 * head_dim + 2 * head_dim_v);
    let threads = schedule.threads.min(1 + work / WORTH_A_THREAD);
    let task = |i: usize, rows: Range<usize>, keys: Range<usize>| Task {
        batch: i / heads_kv,
        head: i % heads_kv,
        rows,
        keys,
        part: None,
    };
    let (exact, fast): (Vec<usize>, Vec<usize>) =
        (0..heads).partition(|&i| needs_f64(&job, &task(i, 0..sizes[i / heads_kv].rows, 0..0)));
    let whole = |i: usize| task(i, 0..sizes[i / heads_kv].rows, 0..sizes[i / heads_kv].keys);
    let exact: Vec<Task> = exact.into_iter().map(whole).collect();
    // SAFETY (of all calls below): the engine has only an instruction set that this CPU has; the call is checked, the items
    // are of its own rows and keys, and the steps come one after the other.
    #[allow(clippy::undocumented_unsafe_blocks)] // Above.
    each(helpers, threads, &exact, |task, _, _| unsafe { in_f64(isa, &job, task) });
    if fast.is_empty() {
        return;
    }
    let step = head_dim.next_multiple_of(isa.lanes());
    let (mut stats, mut parts) = (Scratch::new(), Scratch::new());
    let shared = Shared {
        job,
        sizes,
        step,
        chunk,
        stats: stats.reserve(2 * rows_before),
        parts: parts.reserve(parts_before * step),
        by_matrices: by_matrices(isa, problem),
        faint: (0..heads).map(|_| AtomicBool::new(false)).collect(),
    };
    let few = FEW_ROWS.next_multiple_of(isa.panel());
    let of_rows = |i: usize| {
        let Sizes { padded, .. } = shared.sizes[i / heads_kv];
        (0..padded).step_by(few).map(move |start| task(i, start..(start + few).min(padded), 0..0))
    };
    let of_keys = |i: usize| {
        let Sizes { rows, keys, .. } = shared.sizes[i / heads_kv];
        (0..keys).step_by(chunk).map(move |start| task(i, 0..rows, start..(start + chunk).min(keys)))
    };
    let of_rows: Vec<Task> = fast.iter().copied().flat_map(of_rows).collect();
    let mut of_keys: Vec<Task> = fast.iter().copied().flat_map(of_keys).collect();
    // The dearest first, so that the cheap ones even out the end.
    of_keys.sort_by_cached_key(|task| {
        let visible = Visible::new(call, task.batch);
        let seen = |query: usize| meet(&visible.keys(query), &task.keys).len();
        std::cmp::Reverse((0..sequences.queries(task.batch)).step_by(16).map(seen).sum::<usize>())
    });
    #[allow(clippy::undocumented_unsafe_blocks)] // Above.
    unsafe {
        each(helpers, threads, &of_rows, |task, _, space| prepare(isa, &shared, task, space));
        each(helpers, threads, &of_keys, |task, _, space| {
            #[cfg(target_arch = "x86_64")]
            if shared.turned(task) {
                return matrix::run(isa, &shared, task, space);
            }
            differentiate(isa, &shared, task, space);
        });
        each(helpers, threads, &of_rows, |task, _, space| add_up(isa, &shared, task, space));
    }
}

/// Whether a kv head's gradients are computed in f64: f32 has no room for the scale or the softcap, or lse is so large that
/// probabilities taken from it would be off by more than roundings.
fn needs_f64(job: &Job<'_>, task: &Task) -> bool {
    let all = job.call.of_queries(Name::Lse);
    let large = |row: usize| {
        let (h, s) = job.head_and_query(task.head, row);
        // SAFETY: the row is of the call, whose lse is f32.
        let lse = unsafe { *all.row_at(task.batch, h, s).cast::<f32>() };
        lse.is_finite() && lse.abs() > MOST_LSE
    };
    !job.scoring.fits || task.rows.clone().any(large)
}

/// Whether products are those of whole matrices.
#[cfg(target_arch = "x86_64")]
fn by_matrices(isa: Isa, problem: &Problem) -> bool {
    isa.multiplies_bf16() && super::matrix::suits(problem, problem.group() * problem.len_q)
}

#[cfg(not(target_arch = "x86_64"))]
fn by_matrices(_: Isa, _: &Problem) -> bool {
    false
}

/// Whether a row of bf16 is not zero, but so small that its products are: those of whole matrices take for zero what is below
/// the normal numbers.
fn is_faint(row: Rows) -> bool {
    /// The bits of 2^−60.
    const LEAST: u16 = (127 - 60) << 7;
    // SAFETY: the row is there, and of bf16.
    let row = unsafe { std::slice::from_raw_parts(row.at.cast::<u16>(), row.len) };
    (1..LEAST).contains(&row.iter().fold(0, |most, bits| most.max(bits & 0x7fff)))
}

dispatch! {
    /// What the rows of an item subtract from their scores and gradients.
    unsafe fn prepare(shared: &Shared<'_>, task: &Task, workspace: &mut Workspace) = prepare_on
}

dispatch! {
    /// dK and dV of a chunk of keys, and its part of dQ.
    unsafe fn differentiate(shared: &Shared<'_>, task: &Task, workspace: &mut Workspace) = differentiate_on
}

dispatch! {
    /// dQ of the rows of an item, from its parts.
    unsafe fn add_up(shared: &Shared<'_>, task: &Task, workspace: &mut Workspace) = add_up_on
}

dispatch! {
    /// All gradients of a kv head, in f64.
    unsafe fn in_f64(job: &Job<'_>, task: &Task) = wide::run
}

#[inline(always)]
unsafe fn prepare_on<S: Simd>(shared: &Shared<'_>, task: &Task, workspace: &mut Workspace) {
    let (job, call) = (&shared.job, shared.job.call);
    let visible = Visible::new(call, task.batch);
    let width = call.problem.head_dim_v.next_multiple_of(S::LANES);
    let mut carve = Carve::new();
    let (o, d_o) = (carve.part(width), carve.part(width));
    let base = workspace.floats.reserve(carve.total());
    // SAFETY: the caller's promise; both rows have room for whole vectors.
    unsafe {
        let (o, d_o) = (base.add(o), base.add(d_o));
        std::ptr::write_bytes(base, 0, carve.total());
        if shared.by_matrices && task.rows.start == 0 {
            let faint = |view, key| is_faint(rows_of(view, task.batch, task.head, key, 1));
            if (0..visible.count()).any(|key| faint(call.k(), key) || faint(call.v(), key)) {
                shared.faint(task).store(true, Ordering::Relaxed);
            }
        }
        for row in task.rows.clone() {
            let [from_scores, from_gradients] = shared.stats(task, row);
            // Of a row that sees nothing, or is none, every probability is 2^−∞.
            (*from_scores, *from_gradients) = (f32::INFINITY, 0.0);
            if row >= shared.sizes(task).rows {
                continue;
            }
            let (h, s) = job.head_and_query(task.head, row);
            let number = |name: Name| {
                call.some_of_queries(name).map_or(0.0, |of| *of.row_at(task.batch, h, s).cast::<f32>())
            };
            let lse = number(Name::Lse);
            if visible.keys(s).is_empty() || lse == f32::NEG_INFINITY {
                continue;
            }
            if shared.by_matrices {
                let faint = |view| is_faint(rows_of(view, task.batch, h, s, 1));
                if faint(call.q()) || faint(call.of_queries(Name::Do)) {
                    shared.faint(task).store(true, Ordering::Relaxed);
                }
            }
            for (name, to) in [(Name::O, o), (Name::Do, d_o)] {
                rows_of(call.of_queries(name), task.batch, h, s, 1).widen::<S>(to);
            }
            let mut sums = S::splat(0.0);
            for d in (0..width).step_by(S::LANES) {
                sums = S::fma(S::load(o.add(d)), S::load(d_o.add(d)), sums);
            }
            let mut lanes = [0.0; MAX_LANES];
            S::store(lanes.as_mut_ptr(), sums);
            *from_scores = lse / job.scoring.scale;
            *from_gradients = lanes.iter().sum::<f32>() - number(Name::Dlse);
        }
    }
}

#[inline(always)]
unsafe fn add_up_on<S: Simd>(shared: &Shared<'_>, task: &Task, workspace: &mut Workspace) {
    let (job, call) = (&shared.job, shared.job.call);
    let problem = &call.problem;
    let visible = Visible::new(call, task.batch);
    let is_turned = shared.turned(task);
    let width = S::VECS * S::LANES;
    let sums = workspace.floats.reserve(width * shared.step);
    let Sizes { rows: all_rows, keys, chunks, .. } = *shared.sizes(task);
    let chunk = |i: usize| i * shared.chunk..((i + 1) * shared.chunk).min(keys);
    for start in task.rows.clone().step_by(width) {
        let rows = start..(start + width).min(all_rows);
        if rows.is_empty() {
            break;
        }
        let panel = Panel::new(visible, rows.clone(), problem.group(), S::LANES);
        // SAFETY: the caller's promise; a panel has its part in every chunk that it sees.
        unsafe {
            std::ptr::write_bytes(sums, 0, width * shared.step);
            for i in (0..chunks).filter(|&i| panel.sees(&chunk(i))) {
                let part = shared.part(task, i, start);
                for at in (0..width * shared.step).step_by(S::LANES) {
                    S::store(sums.add(at), S::add(S::load(sums.add(at)), S::load(part.add(at))));
                }
            }
            for lane in (0..rows.len()).step_by(S::LANES) {
                for d in (0..shared.step).step_by(S::LANES) {
                    let mut tile = [S::splat(0.0); MAX_LANES];
                    let at = |i: usize| {
                        let turned = (d + i) * width + lane;
                        sums.add(if is_turned { turned } else { (lane + i) * shared.step + d })
                    };
                    for (i, x) in tile.iter_mut().enumerate().take(S::LANES) {
                        *x = S::mul(S::load(at(i)), S::splat(problem.scale));
                    }
                    if is_turned {
                        S::transpose(&mut tile[..S::LANES]);
                    }
                    let to = call.of_queries(Name::Dq);
                    for (i, x) in tile.iter().enumerate().take(S::LANES.min(rows.len() - lane)) {
                        let (h, s) = job.head_and_query(task.head, start + lane + i);
                        let row = to.row_at(task.batch, h, s).wrapping_add(d * to.dtype.size());
                        let mut elements = [0.0; MAX_LANES];
                        S::store(elements.as_mut_ptr(), *x);
                        rows::narrow::<S>(
                            to.dtype,
                            elements.as_ptr(),
                            row,
                            S::LANES.min(problem.head_dim - d),
                        );
                    }
                }
            }
        }
    }
}

/// The places in scratch of an item of the second step.
#[derive(Clone, Copy)]
struct Places {
    /// Qᵀ and dOᵀ of a panel, a row per element.
    q_lanes: *mut f32,
    do_lanes: *mut f32,
    /// Q and dO of a panel, in pieces as wide as a panel is tall: a row per row of each piece.
    q_rows: *mut f32,
    do_rows: *mut f32,
    /// Sᵀ, which becomes Pᵀ, and dPᵀ, which becomes dSᵀ: a row per key of a block.
    p: *mut f32,
    ds: *mut f32,
    /// dK and dV of a stretch in such pieces, a row per key.
    dk: *mut f32,
    dv: *mut f32,
    /// A panel's row of ones.
    ones: *mut f32,
}

/// The keys that are worked on together.
struct Stretch {
    /// All of them, and those that exist.
    keys: Range<usize>,
    /// K in rows, and in panels as wide as tiles of outputs.
    k: Block,
    /// V in rows.
    v: *const f32,
}

#[inline(always)]
unsafe fn differentiate_on<S: Simd>(shared: &Shared<'_>, task: &Task, workspace: &mut Workspace) {
    let call = shared.job.call;
    let Problem { head_dim, head_dim_v, .. } = call.problem;
    let width = S::VECS * S::LANES;
    let (k_wide, v_wide) = (head_dim.next_multiple_of(width), head_dim_v.next_multiple_of(width));
    let bytes = size_of::<f32>() * (head_dim + shared.step + head_dim_v + k_wide + v_wide);
    let longest = (STRETCH / bytes / BLOCK * BLOCK).max(BLOCK).min(task.keys.len());

    let mut carve = Carve::new();
    let q_lanes = carve.part(shared.step * width);
    let do_lanes = carve.part(head_dim_v.next_multiple_of(S::LANES) * width);
    let (q_rows, do_rows) = (carve.part(k_wide * width), carve.part(v_wide * width));
    let (p, ds) = (carve.part(BLOCK * width), carve.part(BLOCK * width));
    let (dk, dv) = (carve.part(k_wide * longest), carve.part(v_wide * longest));
    let k = carve.part(head_dim * longest);
    let k_panels = carve.part(shared.step * longest);
    let v = carve.part(head_dim_v * longest);
    let ones = carve.part(width);
    let strip = carve.part(k_wide.max(v_wide).max(S::LANES * shared.step.max(v_wide)));
    let base = workspace.floats.reserve(carve.total());
    let visible = Visible::new(call, task.batch);
    // SAFETY: all parts lie inside the reserved scratch.
    unsafe {
        let places = Places {
            q_lanes: base.add(q_lanes),
            do_lanes: base.add(do_lanes),
            q_rows: base.add(q_rows),
            do_rows: base.add(do_rows),
            p: base.add(p),
            ds: base.add(ds),
            dk: base.add(dk),
            dv: base.add(dv),
            ones: base.add(ones),
        };
        let strip = base.add(strip);
        for lane in 0..width {
            *places.ones.add(lane) = 1.0;
        }
        for start in task.keys.clone().step_by(longest) {
            let keys = start..(start + longest).min(task.keys.end);
            std::ptr::write_bytes(places.dk, 0, k_wide * keys.len());
            std::ptr::write_bytes(places.dv, 0, v_wide * keys.len());
            // What lies behind a key length is not there to be read.
            let there = meet(&keys, &(0..visible.count()));
            let rows = |view: View<'_>| rows_of(view, task.batch, task.head, there.start, there.len());
            let k_rows = rows(call.k());
            let v_rows = rows(call.v());
            let v = if v_rows.are_wide() {
                v_rows.at.cast()
            } else {
                v_rows.widen::<S>(base.add(v));
                base.add(v).cast_const()
            };
            let whole = |rows| std::iter::once((0, rows));
            let k =
                Block::new::<S>(there.clone(), whole(k_rows), whole(k_rows), base.add(k), base.add(k_panels));
            let stretch = Stretch { keys: keys.clone(), k, v };
            let all_rows = shared.sizes(task).rows;
            for first in (0..all_rows).step_by(width) {
                let rows = first..(first + width).min(all_rows);
                let panel = Panel::new(visible, rows, call.problem.group(), S::LANES);
                if !panel.sees(&there) {
                    continue;
                }
                if !panel.sees(&(task.keys.start..start)) {
                    let part = shared.part(task, task.keys.start / shared.chunk, first);
                    std::ptr::write_bytes(part, 0, width * shared.step);
                }
                load::<S>(shared, task, &panel, &places, strip);
                for start in there.clone().step_by(BLOCK) {
                    let block = start..(start + BLOCK).min(there.end);
                    for segment in panel.segments(&block).iter() {
                        add::<S>(shared, task, &panel, &stretch, &block, *segment, &places);
                    }
                }
            }
            write_keys::<S>(shared, task, &keys, keys.len(), [places.dk, places.dv], strip);
        }
    }
}

/// Writes the gradients of some keys, which lie in pieces of `count` rows; the strip has room for a row.
///
/// # Safety
/// Requires a CPU with `S`, and keys of the task.
#[inline(always)]
unsafe fn write_keys<S: Simd>(
    shared: &Shared<'_>,
    task: &Task,
    keys: &Range<usize>,
    count: usize,
    [dk, dv]: [*mut f32; 2],
    strip: *mut f32,
) {
    let call = shared.job.call;
    let width = S::VECS * S::LANES;
    for (name, from, factor) in [(Name::Dk, dk, call.problem.scale), (Name::Dv, dv, 1.0)] {
        let to = call.of_keys(name);
        let len = to.layout.shape[3];
        for (i, key) in keys.clone().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                for d in (0..len).step_by(S::LANES) {
                    let x = S::load(from.add((d / width * count + i) * width + d % width));
                    S::store(strip.add(d), S::mul(x, S::splat(factor)));
                }
                rows::narrow::<S>(to.dtype, strip, to.row_at(task.batch, task.head, key), len);
            }
        }
    }
}

/// Brings Q and dO of a panel into lanes and into rows. Rows that see no keys become zeros: what they hold is nobody's
/// business.
#[inline(always)]
unsafe fn load<S: Simd>(shared: &Shared<'_>, task: &Task, panel: &Panel, places: &Places, strip: *mut f32) {
    let (job, call) = (&shared.job, shared.job.call);
    let width = S::VECS * S::LANES;
    let sees = |lane: usize| lane < panel.rows.len() && !panel.keys(lane).is_empty();
    // Rows that see nothing are the first or the last.
    let blind = !(sees(0) && sees(panel.rows.len() - 1));
    for (view, lanes, rows) in [
        (call.q(), places.q_lanes, places.q_rows),
        (call.of_queries(Name::Do), places.do_lanes, places.do_rows),
    ] {
        let len = view.layout.shape[3];
        let pieces = len.div_ceil(width);
        // SAFETY: the caller's promise; lanes and rows have room for a panel.
        unsafe {
            load_queries::<S>(job, task, view, panel, lanes, strip);
            for lane in 0..panel.vecs * S::LANES {
                let to = rows.add(lane * width);
                if lane < panel.rows.len() && (!blind || sees(lane)) {
                    let (h, s) = job.head_and_query(task.head, panel.rows.start + lane);
                    let from = view.row_at(task.batch, h, s);
                    by_type!(view.dtype, into_pieces::<S, _>(from.cast(), len, to));
                    continue;
                }
                for piece in 0..pieces {
                    std::ptr::write_bytes(to.add(piece * width * width), 0, width);
                }
                for d in 0..len {
                    *lanes.add(d * width + lane) = 0.0;
                }
            }
        }
    }
}

/// Widens a row into pieces of a panel's width, `width` rows apart. Zeros fill the last vector.
#[inline(always)]
unsafe fn into_pieces<S: Simd, E: Vectorised>(from: *const E, len: usize, to: *mut f32) {
    let width = S::VECS * S::LANES;
    for d in (0..len).step_by(S::LANES) {
        // SAFETY: the caller's promise; no vector that is read ends behind the row.
        unsafe {
            let to = to.add(d / width * width * width + d % width);
            if d + S::LANES <= len {
                S::store(to, E::load::<S>(from.add(d)));
            } else {
                S::store(to, S::splat(0.0));
                for i in 0..len - d {
                    *to.add(i) = (*from.add(d + i)).to_f32();
                }
            }
        }
    }
}

/// Adds what a rectangle of scores contributes to all gradients.
#[inline(always)]
unsafe fn add<S: Simd>(
    shared: &Shared<'_>,
    task: &Task,
    panel: &Panel,
    stretch: &Stretch,
    block: &Range<usize>,
    segment: Segment,
    places: &Places,
) {
    let Problem { head_dim, head_dim_v, .. } = shared.job.call.problem;
    let width = S::VECS * S::LANES;
    let (lane, vecs) = (segment.first_vec * S::LANES, segment.end_vec - segment.first_vec);
    let keys = segment.end_key - segment.first_key;
    // The first key's number in the block, among those that exist, and among all of the stretch.
    let in_block = segment.first_key - block.start;
    let in_stretch = segment.first_key - stretch.keys.start;
    let tile = in_block * width + lane;
    let nothing = Rows { at: places.p.cast(), dtype: DType::F32, stride: 0, count: 0, len: 0 };
    let coming: &mut Coming = &mut Ahead::new([nothing; 4], 1);
    // SAFETY: the segment is inside the block and the panel, and these inside their places.
    unsafe {
        // Sᵀ = K Qᵀ and dPᵀ = V dOᵀ.
        for (rows, stride, lanes, to) in [
            (stretch.k.k, head_dim, places.q_lanes, places.p),
            (stretch.v, head_dim_v, places.do_lanes, places.ds),
        ] {
            for elements in chains(stride) {
                let scores = Scores {
                    k: rows.add(in_stretch * stride + elements.start),
                    stride,
                    q: lanes.add(elements.start * width + lane),
                    len: elements.len(),
                    s: to.add(tile),
                    onto: elements.start > 0,
                    tops: None,
                };
                score_tiles!(S, vecs, keys, &scores, coming);
            }
        }
        for vec in segment.first_vec..segment.end_vec {
            let row = panel.rows.start + vec * S::LANES;
            let [from_scores, from_gradients] = shared.stats(task, row).map(|at| S::load(at));
            let at = in_block * width + vec * S::LANES;
            let keys = segment.first_key..segment.end_key;
            let column = Column { panel, vec, keys, at: places.p.add(at) };
            column.differentiate::<S>(shared.job.scoring, from_scores, from_gradients, places.ds.add(at));
        }
        // dV += Pᵀ dO and dK += dSᵀ Q.
        for (scalars, rows, to, len) in [
            (places.p, places.do_rows, places.dv, head_dim_v),
            (places.ds, places.q_rows, places.dk, head_dim),
        ] {
            for (piece, start) in (0..len).step_by(width).enumerate() {
                let scores = Scores {
                    k: scalars.add(tile),
                    stride: width,
                    q: rows.add((piece * width + lane) * width),
                    len: vecs * S::LANES,
                    s: to.add((piece * stretch.keys.len() + in_stretch) * width),
                    onto: true,
                    tops: None,
                };
                let vecs = (len - start).min(width).div_ceil(S::LANES);
                score_tiles!(S, vecs, keys, &scores, coming);
            }
        }
        // dQ += dS K.
        let dq = shared.part(task, task.keys.start / shared.chunk, panel.rows.start);
        for columns in column_tiles::<S>(head_dim) {
            let vectors = columns.len() / S::LANES;
            let outputs = Outputs {
                p: places.ds.add(in_block * width),
                v: stretch.k.values(in_stretch, &columns),
                keys,
                o: dq.add(columns.start),
                step: shared.step,
                rescale: Some(places.ones),
                done: None,
                masked: false,
            };
            let (tall, end) = (S::tall(vectors), lane + vecs * S::LANES);
            let middle = lane + evenly(tall, vecs * S::LANES);
            output_tiles!(S, vectors, tall, &outputs, lane..middle, coming);
            output_tiles!(S, vectors, 4, &outputs, middle..end, coming);
        }
    }
}
