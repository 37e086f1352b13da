//! What the tasks of a call share, and what a thread keeps between them.
#![allow(unsafe_code)] // Threads share raw outputs, of which each task writes its own rows.

use std::ops::Range;

use super::{block::Block, panel::Panel, plan::Task, rows::Rows, scoring::Scoring, scratch::Scratch};
use crate::{contract::Call, layouts::View, tensor::Layout};

/// What all tasks of a call share.
pub(super) struct Job<'a> {
    pub call: &'a Call<'a>,
    /// Of every kv head that is not among `descaled`.
    pub scoring: Scoring,
    /// Of every batch entry and kv head of a call with descales: how its products become scores, and what its outputs are
    /// to be multiplied by.
    pub descaled: Vec<(Scoring, f32)>,
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

    /// The rows of a task's kv head.
    pub(super) fn rows(&self, task: &Task) -> usize {
        self.call.sequences().rows(task.batch)
    }

    /// How the products of a kv head become scores.
    #[inline(always)]
    pub(super) fn scoring(&self, batch: usize, head_kv: usize) -> Scoring {
        self.descaled.get(batch * self.call.problem.heads_kv + head_kv).map_or(self.scoring, |it| it.0)
    }

    /// What the outputs of a kv head are to be multiplied by.
    #[inline(always)]
    pub(super) fn descale(&self, batch: usize, head_kv: usize) -> f32 {
        self.descaled.get(batch * self.call.problem.heads_kv + head_kv).map_or(1.0, |it| it.1)
    }

    /// The query head and the query of a row.
    pub(super) fn head_and_query(&self, head_kv: usize, row: usize) -> (usize, usize) {
        match self.call.problem.group() {
            1 => (head_kv, row),
            group => (head_kv * group + row % group, row / group),
        }
    }
}

/// What a thread keeps between tasks.
pub(super) struct Workspace {
    pub floats: Scratch,
    pub panels: Vec<Panel>,
    /// The blocks of the stretch of keys at work, as far as they were needed.
    pub blocks: Vec<Option<Block>>,
    /// The same, for products of matrices.
    #[cfg(target_arch = "x86_64")]
    pub packed: Vec<Option<super::matrix::Packed>>,
}

impl Workspace {
    pub(super) const fn new() -> Self {
        Self {
            floats: Scratch::new(),
            panels: Vec::new(),
            blocks: Vec::new(),
            #[cfg(target_arch = "x86_64")]
            packed: Vec::new(),
        }
    }
}

/// `count` rows of a head that lie one behind the other; they are readable if the sequence has them.
#[inline(always)]
pub(super) fn rows_of(view: View<'_>, b: usize, h: usize, s: usize, count: usize) -> Rows {
    let Layout { shape, strides } = view.layout;
    Rows { at: view.row_at(b, h, s), dtype: view.dtype, stride: strides[2], count, len: shape[3] }
}

/// Rows of a head, cut where they do not lie one behind the other; each piece with the number of rows before it.
#[inline(always)]
pub(super) fn pieces_of(
    view: View<'_>,
    b: usize,
    h: usize,
    rows: Range<usize>,
) -> impl Iterator<Item = (usize, Rows)> {
    let mut next = rows.start;
    std::iter::from_fn(move || {
        let start = next;
        let count = (rows.end - start).min(view.lie.together(start));
        next += count;
        (count > 0).then(|| (start - rows.start, rows_of(view, b, h, start, count)))
    })
}
