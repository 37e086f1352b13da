//! One task of bf16, by products of whole matrices (AMX, or AVX-512 with BF16).
//!
//! As in `attend`, rows are the lanes of panels, and each panel goes through the blocks of a stretch: Sᵀ = K Qᵀ, softmax
//! down the columns of Sᵀ, then Oᵀ = Oᵀ · rescale + Vᵀ Pᵀ with P rounded to bf16. All products are of matrices of sixteen
//! rows and 32 elements, of which the right one has its elements in pairs: the two of a pair lie in one word, and the next
//! pair is a row further. So K is read as it lies, a word of Q or Pᵀ has two elements or two keys, and V is transposed.
//!
//! A block's keys are taken in groups of 32 from its first one on, whatever a task sees of them, so that sums do not depend
//! on the task; what is not seen is zero.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use std::{arch::x86_64::*, ops::Range};

use super::{
    column::Column,
    cut::Cut,
    finish::{finish_row, stats},
    isa::Isa,
    job::{Job, Workspace, rows_of},
    lanes::{rows_at, rows_in},
    panel::{Panel, join},
    plan::Task,
    rows::Rows,
    scratch::Carve,
    simd::{
        Avx512 as S, Simd,
        amx::{Amx, MATRIX, Matrices, ROW, SIDE},
        pairs::Pairs,
    },
    visible::Visible,
};
use crate::{DType, Keys, Problem, layouts::View};

/// Elements, or keys, of a row of a left matrix.
pub(super) const PAIRED: usize = 2 * SIDE;
/// Rows of a panel.
pub(super) const WIDTH: usize = S::VECS * S::LANES;
/// f32 of a matrix.
pub(super) const WORDS: usize = SIDE * SIDE;
/// Bytes of a row of Sᵀ or Oᵀ.
pub(super) const STRIDE: usize = WIDTH * size_of::<f32>();

/// The most bytes between rows of K that are read where they lie.
const FAR: usize = 1024;

/// Whether so many rows of a kv head are for this path: of bf16, of keys that lie one behind the other, and enough of them to
/// pay for turning V.
pub(super) fn suits(problem: &Problem, rows: usize) -> bool {
    let paged = matches!(problem.keys, Keys::Paged { .. });
    problem.dtype == DType::BF16 && problem.dtype_kv.is_none() && !paged && rows >= SIDE
}

/// Runs a task.
///
/// # Safety
/// Requires a CPU with `isa`, which multiplies bf16 (a test has a model of AMX); the call must be of bf16 and have passed the contract, its
/// scoring must fit, and the task be of its plan.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn run(isa: Isa, job: &Job<'_>, task: &Task, workspace: &mut Workspace) {
    // SAFETY: the caller's promise.
    unsafe {
        if isa == Isa::Bf16 {
            return run_on(job, task, workspace, &mut Pairs);
        }
        #[cfg(test)]
        if !super::simd::amx::is_available() {
            return run_on(job, task, workspace, &mut super::simd::amx::Model::new());
        }
        run_on(job, task, workspace, &mut Amx::new());
    }
}

/// A block of keys and values.
pub(super) struct Packed {
    /// The first key of the first group, and those of the task.
    first: usize,
    keys: Range<usize>,
    /// Row `first` of K, and the bytes from one row to the next.
    k: *const u8,
    k_stride: usize,
    /// Vᵀ: for each sixteen columns of V, a matrix of sixteen rows and 32 keys per group.
    v: *const u8,
    /// The most groups of a block.
    groups: usize,
}

/// Sizes that all of a task's panels and blocks share.
struct Sizes {
    head_dim: usize,
    /// Matrices along a row of Q and K, and those down the columns of V.
    depth: usize,
    columns: usize,
    /// The most groups of a block.
    groups: usize,
}

impl Sizes {
    fn of(problem: &Problem, block_k: usize) -> Self {
        let Problem { head_dim, head_dim_v, .. } = *problem;
        let (depth, columns) = (head_dim.div_ceil(PAIRED), head_dim_v.div_ceil(SIDE));
        Self { head_dim, depth, columns, groups: block_k.div_ceil(PAIRED) }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn run_on<M: Multiplier>(job: &Job<'_>, task: &Task, workspace: &mut Workspace, registers: &mut M) {
    let problem = &job.call.problem;
    // The end of a task may come before that of a block.
    let block_k = job.block_k.min(task.keys.end.max(1));
    let sizes = Sizes::of(problem, block_k);
    let panel_count = task.rows.len().div_ceil(WIDTH);
    // Two elements are as long as one f32.
    let cut = Cut::new(task, job.block_k, (problem.head_dim + problem.head_dim_v).div_ceil(2));
    let (blocks, only_one) = cut.longest_stretch();
    // Where one stretch is all, each panel is done before the next one begins.
    let places = if only_one { 1 } else { panel_count };
    let keys = sizes.groups * PAIRED;

    let mut carve = Carve::new();
    let q = carve.part(places * sizes.depth * S::VECS * WORDS);
    let o = carve.part(places * sizes.columns * SIDE * WIDTH);
    let stats = carve.part(places * 5 * WIDTH);
    let s = carve.part(keys * WIDTH);
    let p = carve.part(sizes.groups * S::VECS * WORDS);
    let k = carve.part(blocks * keys * sizes.depth * SIDE);
    let v = carve.part(blocks * sizes.groups * sizes.columns * WORDS);
    // Sixteen rows: of queries at first, of outputs in the end.
    let strip = carve.part(SIDE * SIDE * sizes.depth.max(sizes.columns));
    let base = workspace.floats.reserve(carve.total());

    // SAFETY: all parts lie inside the reserved scratch.
    unsafe {
        let (s, p, strip) = (base.add(s), base.add(p), base.add(strip));
        let panels = &mut workspace.panels;
        panels.clear();
        let visible = Visible::new(job.call, task.batch);
        for index in 0..panel_count {
            let start = task.rows.start + index * WIDTH;
            let rows = start..(start + WIDTH).min(task.rows.end);
            let mut panel = Panel::new(visible, rows, problem.group(), S::LANES);
            let place = index % places;
            panel.q = base.add(q + place * sizes.depth * S::VECS * WORDS);
            panel.o = base.add(o + place * sizes.columns * SIDE * WIDTH);
            panel.place_stats(base.add(stats + place * 5 * WIDTH), WIDTH);
            panels.push(panel);
        }
        let packed = &mut workspace.packed;
        packed.clear();
        let mut now = cut.first(panels);
        while let Some(step) = now {
            let keys = cut.keys(step.block..step.block + 1);
            let number = step.block - step.stretch.start;
            if packed.len() <= number {
                packed.resize_with(number + 1, || None);
            }
            let block = packed[number].get_or_insert_with(|| {
                let k = base.add(k + number * sizes.groups * PAIRED * sizes.depth * SIDE);
                let v = base.add(v + number * sizes.groups * sizes.columns * WORDS);
                pack(job, task, &sizes, step.block * job.block_k, keys.clone(), k, v)
            });
            let panel = &mut panels[step.panel];
            panel.done = !panel.sees(&(keys.end..task.keys.end));
            if panel.fresh {
                pack_rows(job, task, job.call.q(), panel, panel.q, strip);
                panel.clear_stats::<S>();
            }
            attend(job, &sizes, panel, block, s, p, registers);
            panel.fresh = false;
            if panel.done {
                finish(job, task, &sizes, panel, strip);
            }
            let next = cut.after(panels, &step);
            if next.as_ref().is_some_and(|next| next.stretch != step.stretch) {
                packed.clear();
            }
            now = next;
        }
        for panel in panels.iter_mut().filter(|panel| !panel.done) {
            // No block of the task was seen.
            panel.clear_stats::<S>();
            std::ptr::write_bytes(panel.o, 0, sizes.columns * SIDE * WIDTH);
            finish(job, task, &sizes, panel, strip);
        }
    }
}

/// A block from key `first` on, of which the task has `keys`; there is room for copies of its groups at `k_copy` and `v`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn pack(
    job: &Job<'_>,
    task: &Task,
    sizes: &Sizes,
    first: usize,
    keys: Range<usize>,
    k_copy: *mut f32,
    v: *mut f32,
) -> Packed {
    let rows = |view| rows_of(view, task.batch, task.head, keys.start, keys.len());
    let (before, end) = (keys.start - first, keys.end - first);
    let keys_at = job.call.k();
    let (mut k, mut k_stride) =
        (rows_of(keys_at, task.batch, task.head, first, 1).at, keys_at.layout.strides[2] * 2);
    // SAFETY: rows are inside their tensors, and copies inside the scratch.
    unsafe {
        // Whole cache lines, and not so far apart that sixteen rows fall into one place of the cache.
        let lines = [k.addr(), k_stride].iter().all(|at| at.is_multiple_of(ROW));
        let near = sizes.head_dim.is_multiple_of(PAIRED) && lines && k_stride <= FAR;
        if !near || end.next_multiple_of(PAIRED) > keys_at.rows_from(task.batch, first) {
            let to = k_copy.cast::<u16>();
            copy_padded(rows(keys_at), to.add(before * sizes.depth * PAIRED), sizes.depth * PAIRED);
            (k, k_stride) = (to.cast(), sizes.depth * ROW);
        }
        let values = rows(job.call.v());
        for group in before / PAIRED..end.div_ceil(PAIRED) {
            for column in 0..sizes.columns {
                let to = v.add((column * sizes.groups + group) * WORDS);
                transpose_values(values, group * PAIRED, before, column * SIDE, to);
            }
        }
    }
    Packed { first, keys, k, k_stride, v: v.cast_const().cast(), groups: sizes.groups }
}

/// Copies rows of bf16 to rows of `len` elements; the rest of these are zeros.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn copy_padded(rows: Rows, to: *mut u16, len: usize) {
    for row in 0..rows.count {
        // SAFETY: the caller's promise.
        unsafe {
            let to = to.add(row * len);
            std::ptr::copy_nonoverlapping(rows.at.cast::<u16>().add(row * rows.stride), to, rows.len);
            std::ptr::write_bytes(to.add(rows.len), 0, len - rows.len);
        }
    }
}

/// A matrix of Vᵀ: sixteen columns of V from `column` on, of 32 keys of a block from number `key` on, whose first `before`
/// keys are not among `values`. What is outside is zero.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transpose_values(values: Rows, key: usize, before: usize, column: usize, to: *mut f32) {
    // SAFETY: the caller's promise; only columns of rows that are there are read.
    unsafe {
        let row = |number: usize| -> __m512i {
            let Some(row) = number.checked_sub(before).filter(|&row| row < values.count) else {
                return _mm512_setzero_si512();
            };
            let at = values.at.cast::<u16>().add(row * values.stride + column);
            if column + SIDE <= values.len {
                return _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            }
            let mut some = [0_u16; SIDE];
            std::ptr::copy_nonoverlapping(at, some.as_mut_ptr(), values.len - column);
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(some.as_ptr().cast()))
        };
        let mut words = [_mm512_setzero_ps(); SIDE];
        for (pair, word) in words.iter_mut().enumerate() {
            let (even, odd) = (row(key + 2 * pair), row(key + 2 * pair + 1));
            *word = _mm512_castsi512_ps(_mm512_or_epi32(even, _mm512_slli_epi32::<16>(odd)));
        }
        S::transpose(&mut words);
        for (i, &word) in words.iter().enumerate() {
            S::store(to.add(i * SIDE), word);
        }
    }
}

/// Turns a panel's rows of a tensor of queries into right matrices: one for each 32 elements and vector. Lanes without a row
/// become zeros.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn pack_rows(
    job: &Job<'_>,
    task: &Task,
    view: View<'_>,
    panel: &Panel,
    matrices: *mut f32,
    strip: *mut f32,
) {
    let head_dim = view.layout.shape[3];
    let depths = head_dim.div_ceil(PAIRED);
    for vec in 0..panel.vecs {
        let first = panel.rows.start + vec * S::LANES;
        // SAFETY: rows are inside q, and the strip holds sixteen padded rows.
        unsafe {
            let whole = head_dim.is_multiple_of(PAIRED) && first + S::LANES <= panel.rows.end;
            let rows = if whole {
                rows_at::<S>(job, task, view, first)
            } else {
                let len = depths * PAIRED;
                for lane in 0..S::LANES {
                    let to = strip.cast::<u16>().add(lane * len);
                    if first + lane < panel.rows.end {
                        let (h, s) = job.head_and_query(task.head, first + lane);
                        copy_padded(rows_of(view, task.batch, h, s, 1), to, len);
                    } else {
                        std::ptr::write_bytes(to, 0, len);
                    }
                }
                rows_in::<S>(strip, len / 2)
            };
            for depth in 0..depths {
                let to = matrices.add((depth * S::VECS + vec) * WORDS);
                let words = S::columns_f32(&rows, depth * SIDE);
                for (i, &word) in words.iter().enumerate() {
                    S::store(to.add(i * SIDE), word);
                }
            }
        }
    }
}

/// One panel against one block of keys.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn attend<M: Multiplier>(
    job: &Job<'_>,
    sizes: &Sizes,
    panel: &mut Panel,
    block: &Packed,
    s: *mut f32,
    p: *mut f32,
    registers: &mut M,
) {
    // SAFETY: groups are inside the block; panels, s and p are scratch of that size.
    unsafe {
        for vec in 0..panel.vecs {
            S::store(panel.top.add(vec * S::LANES), S::splat(f32::NEG_INFINITY));
        }
        for vecs in pairs(panel.vecs) {
            let groups = seen_groups(panel, &vecs, block);
            let settle = |group: usize| {
                let first = block.first + group * PAIRED;
                for vec in vecs.clone() {
                    let seen = panel.seen(vec, &block.keys);
                    let keys = seen.start.max(first)..seen.end.min(first + PAIRED);
                    if keys.start < keys.end {
                        column(panel, vec, block, keys, s).settle::<S>(job.scoring);
                    }
                }
            };
            for group in groups.clone() {
                let product = Product {
                    a: block.k.add(group * PAIRED * block.k_stride),
                    a_next: SIDE * block.k_stride,
                    a_stride: block.k_stride,
                    a_step: ROW,
                    b: panel.q.add(vecs.start * WORDS).cast(),
                    steps: sizes.depth,
                    c: s.add(group * PAIRED * WIDTH + vecs.start * S::LANES).cast(),
                    onto: false,
                };
                registers.multiply(&product, true, vecs.len() > 1);
                // One group behind: while its scores are near, and the next ones are still on their way.
                if group > groups.start {
                    settle(group - 1);
                }
            }
            if !groups.is_empty() {
                settle(groups.end - 1);
            }
            for vec in vecs.clone() {
                let column = column(panel, vec, block, panel.seen(vec, &block.keys), s);
                exponentials(&column, block, job.scoring.scale, &groups, p);
                if panel.done {
                    let inverse = S::div(S::splat(1.0), S::load(panel.sum.add(vec * S::LANES)));
                    S::store(panel.inverse.add(vec * S::LANES), inverse);
                }
            }
            outputs(sizes, panel, block, vecs, &groups, p, registers);
        }
    }
}

/// Vectors of a panel two by two, as a product takes them.
pub(super) fn pairs(vecs: usize) -> impl Iterator<Item = Range<usize>> {
    (0..vecs).step_by(2).map(move |first| first..vecs.min(first + 2))
}

/// The groups of a block that hold what some vectors see of it.
#[inline(always)]
fn seen_groups(panel: &Panel, vecs: &Range<usize>, block: &Packed) -> Range<usize> {
    let seen = vecs.clone().map(|vec| panel.seen(vec, &block.keys)).fold(0..0, |a, b| join(&a, &b));
    if seen.is_empty() {
        return 0..0;
    }
    (seen.start - block.first) / PAIRED..(seen.end - block.first).div_ceil(PAIRED)
}

/// What a vector sees of some keys of a block.
#[inline(always)]
fn column<'a>(panel: &'a Panel, vec: usize, block: &Packed, keys: Range<usize>, s: *mut f32) -> Column<'a> {
    Column { panel, vec, at: s.wrapping_add((keys.start - block.first) * WIDTH + vec * S::LANES), keys }
}

/// The softmax of a column, with its exponentials as pairs of bf16 in the matrices of its groups.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn exponentials(column: &Column<'_>, block: &Packed, scale: f32, groups: &Range<usize>, p: *mut f32) {
    let keys = &column.keys;
    // SAFETY: as of `attend`.
    unsafe {
        column.move_to_tops::<S>(scale, |exp, base| {
            let zero = S::splat(0.0);
            let put = |pair: usize, [even, odd]: [__m512; 2]| {
                let matrix = pair / SIDE * S::VECS + column.vec;
                let to = p.add(matrix * WORDS + pair % SIDE * SIDE);
                _mm512_storeu_si512(to.cast(), word(even, odd));
            };
            let mut sum = zero;
            let mut next = |number: usize| {
                let x = exp.of(S::sub(base, S::load(column.at.add(number * WIDTH))));
                sum = S::add(sum, x);
                x
            };
            // Pairs are counted from the block's first key on.
            let all = groups.start * SIDE..groups.end * SIDE;
            let (mut pair, mut done) = (all.start, 0);
            if !keys.is_empty() {
                let start = keys.start - block.first;
                while pair < start / 2 {
                    put(pair, [zero; 2]);
                    pair += 1;
                }
                if start % 2 == 1 {
                    put(pair, [zero, next(0)]);
                    (pair, done) = (pair + 1, 1);
                }
                while done + 2 <= keys.len() {
                    put(pair, [next(done), next(done + 1)]);
                    (pair, done) = (pair + 1, done + 2);
                }
                if done < keys.len() {
                    put(pair, [next(done), zero]);
                    pair += 1;
                }
            }
            for pair in pair..all.end {
                put(pair, [zero; 2]);
            }
            sum
        });
    }
}

/// Rounds two vectors to bf16 and puts them side by side. They hold numbers from 0 to 1, or NaN, of which the sums tell.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn word(even: __m512, odd: __m512) -> __m512i {
    let half = _mm512_set1_epi32(0x8000);
    let low = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(even), half));
    let high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    // The upper half of the second, or the first.
    _mm512_ternarylogic_epi32::<0xea>(high, _mm512_set1_epi32(-0x1_0000), low)
}

/// Oᵀ = Oᵀ · rescale + Vᵀ Pᵀ of some vectors, without the first term where the panel is fresh.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn outputs<M: Multiplier>(
    sizes: &Sizes,
    panel: &Panel,
    block: &Packed,
    vecs: Range<usize>,
    groups: &Range<usize>,
    p: *const f32,
    registers: &mut M,
) {
    if groups.is_empty() && !panel.fresh {
        return;
    }
    // SAFETY: as of `attend`.
    unsafe {
        if !panel.fresh {
            for vec in vecs.clone() {
                let rescale = S::load(panel.rescale.add(vec * S::LANES));
                if _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(rescale, S::splat(1.0)) == 0 {
                    continue;
                }
                for row in 0..sizes.columns * SIDE {
                    let at = panel.o.add(row * WIDTH + vec * S::LANES);
                    S::store(at, S::mul(S::load(at), rescale));
                }
            }
        }
        for column in (0..sizes.columns).step_by(2) {
            let product = Product {
                a: block.v.add((column * block.groups + groups.start) * MATRIX),
                a_next: block.groups * MATRIX,
                a_stride: ROW,
                a_step: MATRIX,
                b: p.add((groups.start * S::VECS + vecs.start) * WORDS).cast(),
                steps: groups.len(),
                c: panel.o.add(column * SIDE * WIDTH + vecs.start * S::LANES).cast(),
                onto: !panel.fresh,
            };
            registers.multiply(&product, column + 1 < sizes.columns, vecs.len() > 1);
        }
    }
}

/// C = A B, or C += A B, of up to two by two matrices: A's are `a_next` bytes apart, B's and C's lie beside each other.
pub(super) struct Product {
    /// The first left matrix, the bytes to the second, from row to row, and from step to step.
    pub a: *const u8,
    pub a_next: usize,
    pub a_stride: usize,
    pub a_step: usize,
    /// The first right matrix; those of the next step are `VECS` matrices further.
    pub b: *const u8,
    pub steps: usize,
    /// The first result, in rows of `VECS` vectors.
    pub c: *mut u8,
    pub onto: bool,
}

/// What multiplies matrices.
///
/// # Safety
/// Requires a CPU that has its instructions, and matrices that can be read and written.
pub(super) trait Multiplier {
    /// With two left matrices where the product is `tall`, and two right ones where it is `wide`.
    unsafe fn multiply(&mut self, product: &Product, tall: bool, wide: bool);
}

impl<M: Matrices> Multiplier for M {
    #[inline(always)]
    unsafe fn multiply(&mut self, product: &Product, tall: bool, wide: bool) {
        // SAFETY: the caller's promise.
        unsafe {
            match (tall, wide) {
                (true, true) => product.multiply::<true, true, M>(self),
                (true, false) => product.multiply::<true, false, M>(self),
                (false, true) => product.multiply::<false, true, M>(self),
                (false, false) => product.multiply::<false, false, M>(self),
            }
        }
    }
}

impl Product {
    #[inline]
    unsafe fn multiply<const TALL: bool, const WIDE: bool, M: Matrices>(&self, registers: &mut M) {
        let below = self.c.wrapping_add(SIDE * STRIDE);
        let (mut a, mut b) = (self.a, self.b);
        // SAFETY: the caller's promise.
        unsafe {
            if self.onto {
                registers.load::<0>(self.c, STRIDE);
                if WIDE {
                    registers.load::<1>(self.c.add(ROW), STRIDE);
                }
                if TALL {
                    registers.load::<2>(below, STRIDE);
                }
                if TALL && WIDE {
                    registers.load::<3>(below.add(ROW), STRIDE);
                }
            } else {
                registers.zero::<0>();
                registers.zero::<1>();
                registers.zero::<2>();
                registers.zero::<3>();
            }
            for _ in 0..self.steps {
                registers.load::<4>(a, self.a_stride);
                registers.load::<6>(b, ROW);
                registers.dot::<0, 4, 6>();
                if WIDE {
                    registers.load::<7>(b.add(MATRIX), ROW);
                    registers.dot::<1, 4, 7>();
                }
                if TALL {
                    registers.load::<5>(a.add(self.a_next), self.a_stride);
                    registers.dot::<2, 5, 6>();
                }
                if TALL && WIDE {
                    registers.dot::<3, 5, 7>();
                }
                (a, b) = (a.wrapping_add(self.a_step), b.wrapping_add(S::VECS * MATRIX));
            }
            registers.store::<0>(self.c, STRIDE);
            if WIDE {
                registers.store::<1>(self.c.add(ROW), STRIDE);
            }
            if TALL {
                registers.store::<2>(below, STRIDE);
            }
            if TALL && WIDE {
                registers.store::<3>(below.add(ROW), STRIDE);
            }
        }
    }
}

/// Turns the outputs of a panel that is done into rows and writes these; the strip has room for sixteen.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn finish(job: &Job<'_>, task: &Task, sizes: &Sizes, panel: &Panel, strip: *mut f32) {
    let step = sizes.columns * SIDE;
    for vec in 0..panel.vecs {
        // SAFETY: as of `attend`.
        unsafe {
            let factor = match task.part {
                None => S::load(panel.inverse.add(vec * S::LANES)),
                Some(_) => S::splat(1.0),
            };
            for column in 0..sizes.columns {
                let mut tile = [S::splat(0.0); SIDE];
                for (i, row) in tile.iter_mut().enumerate() {
                    let at = panel.o.add((column * SIDE + i) * WIDTH + vec * S::LANES);
                    *row = S::mul(S::load(at), factor);
                }
                S::transpose(&mut tile);
                for (i, &row) in tile.iter().enumerate() {
                    S::store(strip.add(i * step + column * SIDE), row);
                }
            }
            let first = vec * S::LANES;
            for lane in first..panel.rows.len().min(first + S::LANES) {
                let from = strip.add((lane - first) * step);
                finish_row::<S>(job, task, panel.rows.start + lane, from, stats(panel, lane));
            }
        }
    }
}
