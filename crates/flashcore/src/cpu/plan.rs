//! How a call is cut into tasks that threads take one by one.
//!
//! The cut depends on the problem and the schedule's blocks only, never on the number of threads, so that
//! results do not either.

use std::ops::Range;

use super::{panel::join, schedule::Schedule};
use crate::contract::Call;

/// With fewer tasks than this, long rows are split over keys too.
const ENOUGH_TASKS: usize = 64;

/// The work of one thread at a time: some rows of one kv head against some keys.
///
/// A row is a query of one of the query heads that share the kv head: row r is query r / group of the group's
/// head r % group, so that rows lie in the order of their masks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Task {
    pub batch: usize,
    pub head: usize,
    pub rows: Range<usize>,
    pub keys: Range<usize>,
    /// Where the part's result goes when the keys are split.
    pub part: Option<usize>,
}

/// Parts that belong to the same rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Split {
    pub batch: usize,
    pub head: usize,
    pub rows: Range<usize>,
    /// Their numbers, in the order of keys.
    pub parts: Range<usize>,
}

/// All tasks of a call, dearest first, and what is to merge after them.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub tasks: Vec<Task>,
    pub splits: Vec<Split>,
    /// The most rows of a part.
    pub part_rows: usize,
    /// The multiply-adds of all tasks.
    pub work: usize,
}

/// How many keys batch entry `b` has.
pub(super) fn key_count(call: &Call<'_>, b: usize) -> usize {
    call.key_lengths.map_or(call.problem.len_k, |lengths| lengths[b] as usize)
}

/// The keys that a query sees.
pub(super) fn visible(call: &Call<'_>, b: usize, query: usize) -> Range<usize> {
    call.problem.mask.keys(query, call.problem.len_q, key_count(call, b))
}

impl Plan {
    pub(super) fn new(call: &Call<'_>, schedule: &Schedule) -> Self {
        let problem = &call.problem;
        let group = problem.group();
        let rows = group * problem.len_q;
        let block = schedule.block_q.max(1).min(rows.max(1));
        let blocks = problem.batch * problem.heads_kv * rows.div_ceil(block);
        let split_k = if blocks < ENOUGH_TASKS { schedule.split_k.max(1) } else { usize::MAX };
        let mut plan = Self { part_rows: block, ..Self::default() };
        for batch in 0..problem.batch {
            for start in (0..rows).step_by(block) {
                let rows = start..(start + block).min(rows);
                let keys = union(call, batch, rows.start / group, rows.end.div_ceil(group));
                let width = problem.head_dim + problem.head_dim_v;
                // Few rows cost as much as some more, because K and V are read all the same.
                plan.work += keys.len() * rows.len().max(16) * width * problem.heads_kv;
                for head in 0..problem.heads_kv {
                    plan.push(batch, head, &rows, &keys, split_k);
                }
            }
        }
        plan.tasks.sort_by_key(|task| std::cmp::Reverse(task.rows.len() * task.keys.len()));
        plan
    }

    fn push(&mut self, batch: usize, head: usize, rows: &Range<usize>, keys: &Range<usize>, split_k: usize) {
        if keys.len() <= split_k {
            self.tasks.push(Task { batch, head, rows: rows.clone(), keys: keys.clone(), part: None });
            return;
        }
        let first_part = self.splits.last().map_or(0, |split| split.parts.end);
        let mut part = first_part;
        for start in keys.clone().step_by(split_k) {
            let keys = start..(start.saturating_add(split_k)).min(keys.end);
            self.tasks.push(Task { batch, head, rows: rows.clone(), keys, part: Some(part) });
            part += 1;
        }
        self.splits.push(Split { batch, head, rows: rows.clone(), parts: first_part..part });
    }

    /// How many parts there are in all.
    pub(super) fn parts(&self) -> usize {
        self.splits.last().map_or(0, |split| split.parts.end)
    }
}

/// The keys that any of some queries sees.
fn union(call: &Call<'_>, batch: usize, first: usize, end: usize) -> Range<usize> {
    let mut all = 0..0;
    for query in first..end {
        all = join(&all, &visible(call, batch, query));
    }
    all
}
