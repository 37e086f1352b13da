//! How a call is cut into tasks that threads take one by one.
//!
//! Whether keys are split depends on the problem and the schedule's blocks only, never on the number of threads, so
//! that results do not either.

use std::ops::Range;

use super::{schedule::Schedule, visible::Visible};
use crate::contract::Call;

/// Tasks per thread, at least.
const TASKS_PER_THREAD: usize = 4;
/// A task is at most a thread's share of the work that is left, divided by this. The first tasks are then large and the
/// last ones small, so that all threads end at about the same time.
const PART_OF_THE_REST: usize = 2;
/// With fewer tasks than this, long rows are split over keys too.
const ENOUGH_TASKS: usize = 64;
/// Rows per task, for counting the tasks that [`ENOUGH_TASKS`] is compared with.
const FEW_ROWS: usize = 96;

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

/// All tasks of a call, in the order in which threads take them, and what is to merge after them.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub tasks: Vec<Task>,
    pub splits: Vec<Split>,
    /// The most rows of a part.
    pub part_rows: usize,
    /// The multiply-adds of all tasks.
    pub work: usize,
}

/// Rows of any head, and the keys that some of them see.
#[derive(Clone, Debug)]
struct Piece {
    rows: Range<usize>,
    keys: Range<usize>,
    /// About how many pairs of a row and a key that it sees there are.
    pairs: usize,
}

impl Piece {
    fn new(visible: Visible, rows: Range<usize>, group: usize) -> Self {
        let (first, last) = (rows.start / group, (rows.end - 1) / group);
        let (keys, _) = visible.any_and_all(first..=last);
        let pairs = rows.len() * (visible.keys(first).len() + visible.keys(last).len()).div_ceil(2);
        Self { rows, keys, pairs }
    }

    /// Pairs of the largest task that it makes.
    fn task(&self, split_k: usize) -> usize {
        self.pairs.min(self.rows.len().saturating_mul(split_k))
    }

    /// Two of about as many panels each, the cheaper one first.
    fn halves(&self, visible: Visible, group: usize, panel: usize) -> [Self; 2] {
        let middle = self.rows.start + (self.rows.len() / 2).next_multiple_of(panel);
        let halves = [self.rows.start..middle, middle..self.rows.end];
        let mut halves = halves.map(|rows| Self::new(visible, rows, group));
        halves.sort_by_key(|half| half.pairs);
        halves
    }
}

impl Plan {
    /// For panels of `panel` rows.
    pub(super) fn new(call: &Call<'_>, schedule: &Schedule, panel: usize) -> Self {
        let problem = &call.problem;
        let group = problem.group();
        let sequences = call.sequences();
        let each_rows: Vec<usize> = (0..problem.batch).map(|batch| sequences.rows(batch)).collect();
        let rows = each_rows.iter().copied().max().unwrap_or(0);
        let heads = problem.batch * problem.heads_kv;
        // Results do not depend on the rows of a task, so these may depend on the threads.
        let blocks = (TASKS_PER_THREAD * schedule.threads)
            .div_ceil(heads.max(1))
            .min(rows.div_ceil(panel))
            .max(rows.div_ceil(schedule.block_q.max(1)))
            .max(1);
        let most = schedule.block_q.max(1);
        let most = if most < panel { most } else { most / panel * panel };
        let block = rows.div_ceil(blocks).next_multiple_of(panel).clamp(1, most);
        // They do depend on the keys, so these must not.
        let few = each_rows.iter().map(|rows| rows.div_ceil(FEW_ROWS)).sum::<usize>() * problem.heads_kv
            < ENOUGH_TASKS;
        let split_k = if few { schedule.split_k.max(1) } else { usize::MAX };
        let mut plan = Self { part_rows: block.min(rows), ..Self::default() };
        let width = problem.head_dim + problem.head_dim_v;
        let mut batches = Vec::with_capacity(problem.batch);
        let mut left = 0;
        for (batch, &rows) in each_rows.iter().enumerate() {
            let visible = Visible::new(call, batch);
            let mut pieces: Vec<Piece> = (0..rows)
                .step_by(block)
                .map(|start| Piece::new(visible, start..(start + block).min(rows), group))
                .collect();
            // The dearest first, so that the cheap ones even out the end.
            pieces.sort_by_key(|piece| std::cmp::Reverse(piece.pairs));
            for piece in &pieces {
                left += piece.pairs * problem.heads_kv;
                // Few rows cost as much as some more, because K and V are read all the same.
                plan.work += piece.keys.len() * piece.rows.len().max(16) * width * problem.heads_kv;
            }
            batches.push((visible, pieces));
        }
        for (batch, (visible, pieces)) in batches.iter().enumerate() {
            // Head by head, so that threads share what is in the cache.
            for head in 0..problem.heads_kv {
                let mut pieces: Vec<Piece> = pieces.iter().rev().cloned().collect();
                while let Some(piece) = pieces.pop() {
                    let most = left / (PART_OF_THE_REST * schedule.threads.max(1));
                    if schedule.threads > 1 && piece.task(split_k) > most && piece.rows.len() > panel {
                        pieces.extend(piece.halves(*visible, group, panel));
                    } else {
                        left = left.saturating_sub(piece.pairs);
                        plan.push(batch, head, &piece.rows, &piece.keys, split_k);
                    }
                }
            }
        }
        plan
    }

    fn push(&mut self, batch: usize, head: usize, rows: &Range<usize>, keys: &Range<usize>, split_k: usize) {
        // Splits are at multiples of their length, so that a row's do not depend on its task.
        let piece =
            |start: usize| start..((start / split_k).saturating_add(1).saturating_mul(split_k)).min(keys.end);
        let mut next = piece(keys.start);
        if next == *keys {
            self.tasks.push(Task { batch, head, rows: rows.clone(), keys: next, part: None });
            return;
        }
        let first_part = self.splits.last().map_or(0, |split| split.parts.end);
        let mut part = first_part;
        while !next.is_empty() {
            let after = piece(next.end);
            self.tasks.push(Task { batch, head, rows: rows.clone(), keys: next, part: Some(part) });
            (next, part) = (after, part + 1);
        }
        self.splits.push(Split { batch, head, rows: rows.clone(), parts: first_part..part });
    }

    /// How many parts there are in all.
    pub(super) fn parts(&self) -> usize {
        self.splits.last().map_or(0, |split| split.parts.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, DType, Mask, Name, Problem, TensorBuf, signature::PerTensor};

    /// The plan of a problem, and how often each (batch, head, row, key) is in one of its tasks.
    fn counted(problem: Problem, schedule: &str) -> (Plan, Vec<u8>) {
        let Problem { batch, heads_q, heads_kv, len_q, len_k, mask, .. } = problem;
        let lengths: Vec<u32> = (0..batch).map(|b| (len_k * b / batch) as u32).collect();
        let q =
            TensorBuf::from_f32(&vec![0.0; batch * heads_q * len_q], [batch, heads_q, len_q, 1], DType::F32);
        let kv = TensorBuf::from_f32(
            &vec![0.0; batch * heads_kv * len_k],
            [batch, heads_kv, len_k, 1],
            DType::F32,
        );
        let (q, kv) = (q.unwrap(), kv.unwrap());
        let attention = Attention::new().mask(mask).key_lengths(&lengths);
        let call = Call {
            problem: attention.problem(&q.view(), &kv.view(), &kv.view()).unwrap(),
            tensors: PerTensor::default()
                .with(Name::Q, q.view().raw)
                .with(Name::K, kv.view().raw)
                .with(Name::V, kv.view().raw)
                .with(Name::O, q.view().raw),
            key_lengths: Some(&lengths),
            device_lengths: None,
        };
        let schedule = schedule.parse::<Schedule>().unwrap().or(Schedule::for_head_dims(1, 1));
        let plan = Plan::new(&call, &schedule, 6);
        let rows = problem.group() * len_q;
        let mut seen = vec![0; batch * heads_kv * rows * len_k];
        for task in &plan.tasks {
            for row in task.rows.clone() {
                for key in task.keys.clone() {
                    seen[((task.batch * heads_kv + task.head) * rows + row) * len_k + key] += 1;
                }
            }
        }
        // What a row does not see may be in a task or not.
        for (i, seen) in seen.iter_mut().enumerate() {
            let (key, row, batch) = (i % len_k, i / len_k % rows, i / len_k / rows / heads_kv);
            if !Visible::new(&call, batch).keys(row / problem.group()).contains(&key) {
                *seen = 1;
            }
        }
        (plan, seen)
    }

    #[test]
    fn every_visible_pair_is_in_exactly_one_task() {
        let window = Mask::Window { left: Some(9), right: Some(2) };
        for mask in [Mask::None, Mask::Causal, Mask::CausalTopLeft, window] {
            for schedule in ["block_q=1", "block_q=7,split_k=5", "block_q=1000,split_k=13", ""] {
                let problem = Problem::new(3, 4, 21, 1, DType::F32).with_kv(2, 33).with_mask(mask);
                let (_, seen) = counted(problem, schedule);
                assert!(seen.iter().all(|&n| n == 1), "{problem} with '{schedule}'");
            }
        }
    }

    #[test]
    fn tasks_become_small_towards_the_end_where_several_threads_share_them() {
        let rows = |threads| {
            let problem = Problem::new(2, 4, 96, 1, DType::F32);
            let (plan, _) = counted(problem, &format!("block_q=96,threads={threads}"));
            // The first batch entry has no keys.
            plan.tasks.iter().filter(|task| task.batch == 1).map(|task| task.rows.len()).collect::<Vec<_>>()
        };
        assert_eq!(rows(1), [96; 4]);
        let shared = rows(2);
        let mut left = 4 * 96;
        for &rows in &shared {
            // A panel of this plan has six rows.
            assert!(rows <= (left / 4).max(6), "{shared:?}");
            left -= rows;
        }
        assert_eq!(left, 0);
    }

    #[test]
    fn every_row_is_finished_once_by_a_task_or_a_merge() {
        for schedule in ["block_q=5", "block_q=7,split_k=5"] {
            let problem = Problem::new(2, 2, 40, 1, DType::F32).with_kv(1, 30).with_mask(Mask::Causal);
            let (plan, _) = counted(problem, schedule);
            let whole = plan.tasks.iter().filter(|task| task.part.is_none()).map(|task| task.rows.len());
            let split = plan.splits.iter().map(|split| split.rows.len());
            assert_eq!(whole.chain(split).sum::<usize>(), 2 * 80);
            let mut parts: Vec<usize> = plan.tasks.iter().filter_map(|task| task.part).collect();
            parts.sort_unstable();
            assert!(parts.iter().copied().eq(0..plan.parts()));
        }
    }
}
