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
