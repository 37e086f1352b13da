//! A chunk of keys of bf16, by products of whole matrices (AMX, or AVX-512 with BF16).
//!
//! The same steps as without, on panels of rows and blocks of keys, with P and dS rounded to bf16. All products are of
//! matrices of sixteen rows and 32 elements, of which the right one has its elements in pairs
//! ([`matrix`](super::super::matrix)): Sᵀ and dPᵀ have pairs of elements, dV and dK pairs of rows, and dQᵀ = Kᵀ dSᵀ pairs of
//! keys. So a part of dQ lies turned: for each panel, a row per element.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use std::{arch::x86_64::*, ops::Range};

use super::{
    super::{
        column::Column,
        isa::Isa,
        job::{Workspace, rows_of},
        matrix::{
            Multiplier, PAIRED, Product, WIDTH, WORDS, copy_padded, pack_rows, pairs, transpose_values, word,
        },
        panel::{Panel, join, meet},
        plan::Task,
        scratch::Carve,
        simd::{
            Avx512 as S, Simd,
            amx::{Amx, MATRIX, Matrices, ROW, SIDE},
            pairs::Pairs,
        },
        visible::Visible,
    },
    BLOCK, STRETCH, Shared, write_keys,
};
use crate::{Name, Problem, layouts::View};

/// Bytes of a row of a panel's P or dS in bf16.
const ROW_OF_PANEL: usize = WIDTH * size_of::<u16>();

/// dK and dV of a chunk of keys, and its part of dQ.
///
/// # Safety
/// Requires a CPU with `isa`, which multiplies bf16 (a test has a model of AMX); the call must be of bf16 and have passed the contract, its
/// scoring must fit, and the task be of its plan.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn run(isa: Isa, shared: &Shared<'_>, task: &Task, workspace: &mut Workspace) {
    // SAFETY: the caller's promise.
    unsafe {
        if isa == Isa::Bf16 {
            return run_on(shared, task, workspace, &mut Pairs);
        }
        #[cfg(test)]
        if !super::super::simd::amx::is_available() {
            return run_on(shared, task, workspace, &mut super::super::simd::amx::Model::new());
        }
        run_on(shared, task, workspace, &mut Amx::new());
    }
}

/// The places in scratch.
struct Places {
    /// Q and dO of a panel in pairs of elements, and in pairs of rows.
    q_elements: *mut f32,
    do_elements: *mut f32,
    q_rows: *mut f32,
    do_rows: *mut f32,
    /// Sᵀ, which becomes Pᵀ, and dPᵀ, which becomes dSᵀ: a row per key of a block.
    p: *mut f32,
    ds: *mut f32,
    /// The same in bf16, and dSᵀ in pairs of keys.
    p_rounded: *mut u16,
    ds_rounded: *mut u16,
    ds_keys: *mut f32,
    /// Rows of K and V, and Kᵀ: for each sixteen columns, a matrix of sixteen rows and 32 keys per group.
    k: *mut u16,
    v: *mut u16,
    k_turned: *mut f32,
    /// Sums of a stretch, in pieces as wide as a panel is tall.
    dk: *mut f32,
    dv: *mut f32,
    strip: *mut f32,
    /// The most keys of a stretch, in whole groups.
    keys: usize,
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn run_on<M: Multiplier>(
    shared: &Shared<'_>,
    task: &Task,
    workspace: &mut Workspace,
    registers: &mut M,
) {
    let call = shared.job.call;
    let Problem { head_dim, head_dim_v, .. } = call.problem;
    let (depth, depth_v) = (head_dim.div_ceil(PAIRED), head_dim_v.div_ceil(PAIRED));
    let (k_wide, v_wide) = (head_dim.next_multiple_of(WIDTH), head_dim_v.next_multiple_of(WIDTH));
    let bytes = size_of::<f32>() * (k_wide + v_wide) + ROW * (2 * depth + depth_v);
    let longest = (STRETCH / bytes / BLOCK * BLOCK).max(BLOCK).min(task.keys.len());
    let keys = longest.next_multiple_of(PAIRED);

    let mut carve = Carve::new();
    let q_elements = carve.part(depth * S::VECS * WORDS);
    let do_elements = carve.part(depth_v * S::VECS * WORDS);
    let (q_rows, do_rows) = (carve.part(k_wide * WIDTH / 2), carve.part(v_wide * WIDTH / 2));
    let (p, ds) = (carve.part(BLOCK * WIDTH), carve.part(BLOCK * WIDTH));
    let (p_rounded, ds_rounded) = (carve.part(BLOCK * WIDTH / 2), carve.part(BLOCK * WIDTH / 2));
    let ds_keys = carve.part(BLOCK / PAIRED * S::VECS * WORDS);
    let (k, v) = (carve.part(keys * depth * SIDE), carve.part(keys * depth_v * SIDE));
    let k_turned = carve.part(keys / PAIRED * shared.step / SIDE * WORDS);
    let (dk, dv) = (carve.part(k_wide * keys), carve.part(v_wide * keys));
    let strip = carve.part((SIDE * SIDE * depth.max(depth_v)).max(k_wide).max(v_wide));
    let base = workspace.floats.reserve(carve.total());
    let visible = Visible::new(call, task.batch);
    // SAFETY: all parts lie inside the reserved scratch.
    unsafe {
        let places = Places {
            q_elements: base.add(q_elements),
            do_elements: base.add(do_elements),
            q_rows: base.add(q_rows),
            do_rows: base.add(do_rows),
            p: base.add(p),
            ds: base.add(ds),
            p_rounded: base.add(p_rounded).cast(),
            ds_rounded: base.add(ds_rounded).cast(),
            ds_keys: base.add(ds_keys),
            k: base.add(k).cast(),
            v: base.add(v).cast(),
            k_turned: base.add(k_turned),
            dk: base.add(dk),
            dv: base.add(dv),
            strip: base.add(strip),
            keys,
        };
        for start in task.keys.clone().step_by(longest) {
            let all = start..(start + longest).min(task.keys.end);
            std::ptr::write_bytes(places.dk, 0, k_wide * keys);
            std::ptr::write_bytes(places.dv, 0, v_wide * keys);
            // What lies behind a key length is not there to be read.
            let there = meet(&all, &(0..visible.count()));
            pack_keys(shared, task, &there, &places);
            let all_rows = shared.sizes(task).rows;
            for first in (0..all_rows).step_by(WIDTH) {
                let rows = first..(first + WIDTH).min(all_rows);
                let panel = Panel::new(visible, rows, call.problem.group(), S::LANES);
                if !panel.sees(&there) {
                    continue;
                }
                let part = shared.part(task, task.keys.start / shared.chunk, first);
                if !panel.sees(&(task.keys.start..start)) {
                    std::ptr::write_bytes(part, 0, WIDTH * shared.step);
                }
                for (view, elements, in_rows) in [
                    (call.q(), places.q_elements, places.q_rows),
                    (call.of_queries(Name::Do), places.do_elements, places.do_rows),
                ] {
                    load(shared, task, view, &panel, elements, in_rows, places.strip);
                }
                for start in there.clone().step_by(BLOCK) {
                    let block = start..(start + BLOCK).min(there.end);
                    if panel.sees(&block) {
                        add(shared, task, &panel, &block, start - there.start, part, &places, registers);
                    }
                }
            }
            write_keys::<S>(shared, task, &all, keys, [places.dk, places.dv], places.strip);
        }
    }
}

/// Copies rows of K and V, and turns K; groups are filled up with zeros.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn pack_keys(shared: &Shared<'_>, task: &Task, keys: &Range<usize>, places: &Places) {
    let call = shared.job.call;
    let rows = |view: View<'_>| rows_of(view, task.batch, task.head, keys.start, keys.len());
    let groups = keys.len().div_ceil(PAIRED);
    // SAFETY: as of `run_on`.
    unsafe {
        for (view, to) in [(call.k(), places.k), (call.v(), places.v)] {
            let len = view.layout.shape[3].next_multiple_of(PAIRED);
            copy_padded(rows(view), to, len);
            std::ptr::write_bytes(to.add(keys.len() * len), 0, (groups * PAIRED - keys.len()) * len);
        }
        for column in 0..shared.step / SIDE {
            for group in 0..groups {
                let to = places.k_turned.add((column * places.keys / PAIRED + group) * WORDS);
                transpose_values(rows(call.k()), group * PAIRED, 0, column * SIDE, to);
            }
        }
    }
}

/// Brings a panel's rows of Q or dO into right matrices, of pairs of elements and of pairs of rows. Rows that see no keys
/// become zeros: what they hold is nobody's business.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(
    shared: &Shared<'_>,
    task: &Task,
    view: View<'_>,
    panel: &Panel,
    elements: *mut f32,
    in_rows: *mut f32,
    strip: *mut f32,
) {
    let job = &shared.job;
    let len = view.layout.shape[3];
    let sees = |lane: usize| lane < panel.rows.len() && !panel.keys(lane).is_empty();
    // SAFETY: the caller's promise; only rows and columns that are there are read.
    unsafe {
        pack_rows(job, task, view, panel, elements, strip);
        if !(sees(0) && sees(panel.rows.len() - 1)) {
            for lane in (0..panel.vecs * S::LANES).filter(|&lane| !sees(lane)) {
                for word in 0..len.div_ceil(PAIRED) * SIDE {
                    let matrix = word / SIDE * S::VECS + lane / SIDE;
                    *elements.add(matrix * WORDS + word % SIDE * SIDE + lane % SIDE) = 0.0;
                }
            }
        }
        let row = |lane: usize, column: usize| -> __m512i {
            if !sees(lane) {
                return _mm512_setzero_si512();
            }
            let (h, s) = job.head_and_query(task.head, panel.rows.start + lane);
            let at = view.row_at(task.batch, h, s).cast::<u16>().add(column);
            if column + SIDE <= len {
                return _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            }
            let mut some = [0_u16; SIDE];
            std::ptr::copy_nonoverlapping(at, some.as_mut_ptr(), len - column);
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(some.as_ptr().cast()))
        };
        for (number, column) in (0..len).step_by(SIDE).enumerate() {
            let (piece, vec) = (number / S::VECS, number % S::VECS);
            for pair in 0..panel.vecs.div_ceil(2) * SIDE {
                let matrix = (piece * 2 + pair / SIDE) * S::VECS + vec;
                let (even, odd) = (row(2 * pair, column), row(2 * pair + 1, column));
                let to = in_rows.add(matrix * WORDS + pair % SIDE * SIDE);
                _mm512_storeu_si512(to.cast(), _mm512_or_epi32(even, _mm512_slli_epi32::<16>(odd)));
            }
        }
    }
}

/// Adds what a panel and a block of keys contribute to all gradients; the block begins with key `first` of the stretch.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(clippy::too_many_arguments)] // All that takes part in it.
unsafe fn add<M: Multiplier>(
    shared: &Shared<'_>,
    task: &Task,
    panel: &Panel,
    block: &Range<usize>,
    first: usize,
    part: *mut f32,
    places: &Places,
    registers: &mut M,
) {
    let Problem { head_dim, head_dim_v, .. } = shared.job.call.problem;
    // The groups of the block that each pair of vectors sees.
    let mut seen = [const { 0..0 }; S::VECS / 2];
    // SAFETY: groups are inside the block, and all places of its size.
    unsafe {
        for (number, vecs) in pairs(panel.vecs).enumerate() {
            let keys = vecs.clone().map(|vec| panel.seen(vec, block)).fold(0..0, |a, b| join(&a, &b));
            if keys.is_empty() {
                continue;
            }
            let groups = (keys.start - block.start) / PAIRED..(keys.end - block.start).div_ceil(PAIRED);
            seen[number] = groups.clone();
            // Sᵀ = K Qᵀ and dPᵀ = V dOᵀ.
            for (rows, len, elements, to) in [
                (places.k, head_dim, places.q_elements, places.p),
                (places.v, head_dim_v, places.do_elements, places.ds),
            ] {
                let depth = len.div_ceil(PAIRED);
                for group in groups.clone() {
                    let product = Product {
                        a: rows.add((first + group * PAIRED) * depth * PAIRED).cast(),
                        a_next: SIDE * depth * ROW,
                        a_stride: depth * ROW,
                        a_step: ROW,
                        b: elements.add(vecs.start * WORDS).cast(),
                        steps: depth,
                        c: to.add(group * PAIRED * WIDTH + vecs.start * SIDE).cast(),
                        onto: false,
                    };
                    registers.multiply(&product, true, vecs.len() > 1);
                }
            }
            for vec in vecs.start..vecs.start + 2 {
                let keys = if vec < panel.vecs { panel.seen(vec, block) } else { block.start..block.start };
                round(shared, task, panel, vec, &keys, block.start, &groups, places);
            }
            // dQᵀ += Kᵀ dSᵀ.
            let columns = shared.step / SIDE;
            for column in (0..columns).step_by(2) {
                let group = column * places.keys / PAIRED + first / PAIRED + groups.start;
                let product = Product {
                    a: places.k_turned.add(group * WORDS).cast(),
                    a_next: places.keys / PAIRED * MATRIX,
                    a_stride: ROW,
                    a_step: MATRIX,
                    b: places.ds_keys.add((groups.start * S::VECS + vecs.start) * WORDS).cast(),
                    steps: groups.len(),
                    c: part.add(column * SIDE * WIDTH + vecs.start * SIDE).cast(),
                    onto: true,
                };
                registers.multiply(&product, column + 1 < columns, vecs.len() > 1);
            }
        }
        // dV += Pᵀ dO and dK += dSᵀ Q, of the pairs of vectors that see a group.
        for group in 0..block.len().div_ceil(PAIRED) {
            let sees = |number: &usize| seen[*number].contains(&group);
            let Some(start) = (0..seen.len()).find(sees) else { continue };
            let steps = 1 + (0..seen.len()).rfind(sees).unwrap_or(start) - start;
            for (rounded, rows, to, len) in [
                (places.p_rounded, places.do_rows, places.dv, head_dim_v),
                (places.ds_rounded, places.q_rows, places.dk, head_dim),
            ] {
                let columns = len.div_ceil(SIDE);
                for column in (0..columns).step_by(2) {
                    let (piece, vec) = (column / S::VECS, column % S::VECS);
                    let product = Product {
                        a: rounded.add(group * PAIRED * WIDTH + start * PAIRED).cast(),
                        a_next: SIDE * ROW_OF_PANEL,
                        a_stride: ROW_OF_PANEL,
                        a_step: ROW,
                        b: rows.add(((piece * 2 + start) * S::VECS + vec) * WORDS).cast(),
                        steps,
                        c: to.add((piece * places.keys + first + group * PAIRED) * WIDTH + vec * SIDE).cast(),
                        onto: true,
                    };
                    registers.multiply(&product, true, column + 1 < columns);
                }
            }
        }
    }
}

/// Makes probabilities and gradients of scores of what a vector sees, and rounds them; the rest of its groups is zero.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(clippy::too_many_arguments)] // As of `add`.
unsafe fn round(
    shared: &Shared<'_>,
    task: &Task,
    panel: &Panel,
    vec: usize,
    keys: &Range<usize>,
    block: usize,
    groups: &Range<usize>,
    places: &Places,
) {
    // SAFETY: as of `add`.
    unsafe {
        if !keys.is_empty() {
            let row = panel.rows.start + vec * S::LANES;
            let [from_scores, from_gradients] = shared.stats(task, row).map(|at| S::load(at));
            let at = (keys.start - block) * WIDTH + vec * S::LANES;
            let column = Column { panel, vec, keys: keys.clone(), at: places.p.add(at) };
            column.differentiate::<S>(shared.job.scoring, from_scores, from_gradients, places.ds.add(at));
        }
        let zero = S::splat(0.0);
        for pair in groups.start * SIDE..groups.end * SIDE {
            let mut both = [zero; 2];
            for (i, ds) in both.iter_mut().enumerate() {
                let key = 2 * pair + i;
                let at = key * WIDTH + vec * S::LANES;
                let mut p = zero;
                if keys.contains(&(block + key)) {
                    (p, *ds) = (S::load(places.p.add(at)), S::load(places.ds.add(at)));
                }
                S::store_bf16(places.p_rounded.add(at), p);
                S::store_bf16(places.ds_rounded.add(at), *ds);
            }
            let to = places.ds_keys.add((pair / SIDE * S::VECS + vec) * WORDS + pair % SIDE * SIDE);
            _mm512_storeu_si512(to.cast(), word(both[0], both[1]));
        }
    }
}
