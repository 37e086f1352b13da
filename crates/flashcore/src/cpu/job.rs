//! What the tasks of a call share, and what a thread keeps between them.
#![allow(unsafe_code)] // Threads share raw outputs, of which each task writes its own rows.

use super::{block::Block, panel::Panel, rows::Rows, scoring::Scoring, scratch::Scratch};
use crate::{
    contract::Call,
    tensor::{Layout, Raw},
};

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

/// The address of a row; it is in bounds if the indices are inside the shape.
pub(super) fn row_at(raw: &Raw, b: usize, h: usize, s: usize) -> *mut u8 {
    raw.ptr.wrapping_add(raw.layout.row(b, h, s).wrapping_mul(raw.dtype.size()))
}

/// `count` rows of a head; they are readable if they are inside the shape.
pub(super) fn rows_of(raw: &Raw, b: usize, h: usize, s: usize, count: usize) -> Rows {
    let Layout { shape, strides } = raw.layout;
    Rows { at: row_at(raw, b, h, s), dtype: raw.dtype, stride: strides[2], count, len: shape[3] }
}
