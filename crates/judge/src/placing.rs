//! Packed and paged calls, as the judge sees them.
//!
//! Whoever judges sees one dense problem, with a row for every query and key that a sequence may have. How the sequences
//! really lie is decided when an engine runs: their rows are put where the [`Placing`] says, in memory that is otherwise
//! unreadable, and results are read back from there. So the oracle and the rule know nothing of layouts.
//!
//! Sequences have different numbers of queries. Those of a sequence are the *last* rows of its batch entry, so that a mask
//! that is aligned bottom-right means the same in both. The rows before them do not exist: they are zeros, and nobody
//! judges them.

use flashcore::signature::{Parameter, PerTensor, Rows};
use flashcore::{Keys, Name, Problem, Queries};

use crate::guarded::{Arrangement, Guarded};
use crate::rng::Rng;
use crate::rule::Row;

/// Pages of a pool that no sequence has: they were freed, and hold what nobody may read.
const FREED: usize = 3;

/// Where the sequences of a call lie.
#[derive(Clone, Debug, PartialEq)]
pub struct Placing {
    /// What the engine is asked.
    pub problem: Problem,
    /// How the tensors lie in memory.
    pub arrangement: Arrangement,
    /// How many queries each sequence has.
    pub queries: Vec<u32>,
    /// How many keys each sequence has.
    pub keys: Vec<u32>,
    /// The pages of each sequence, as far as the table goes; those that no key reaches are of others, or of none.
    pages: Vec<i32>,
}

/// How many pages a pool has for sequences of these lengths: theirs, and some that were freed.
pub fn pool(keys: &[u32], page: usize) -> usize {
    keys.iter().map(|&len| (len as usize).div_ceil(page)).sum::<usize>() + FREED
}

impl Placing {
    /// Sequences of these lengths, whose pages are drawn from a seed.
    pub fn new(
        problem: Problem,
        arrangement: Arrangement,
        queries: Vec<u32>,
        keys: Vec<u32>,
        seed: u64,
    ) -> Self {
        let mut placing = Self { problem, arrangement, queries, keys, pages: Vec::new() };
        if let Keys::Paged { page, pages } = problem.keys {
            let mut rng = Rng::stream(seed, 300);
            let mut order: Vec<usize> = (0..pages).collect();
            for i in (1..pages).rev() {
                order.swap(i, rng.below(i + 1));
            }
            let width = problem.len_k.div_ceil(page);
            let mut free = order.iter().map(|&page| page as i32);
            for &len in &placing.keys {
                let used = (len as usize).div_ceil(page);
                placing.pages.extend(free.by_ref().take(used));
                // Nobody may look at what follows.
                let others = [-1, pages as i32 + 1000].into_iter().cycle();
                placing.pages.extend(others.take(width - used));
            }
        }
        placing
    }

    /// The dense problem that is judged.
    pub fn dense(problem: Problem) -> Problem {
        let dense = problem.with_queries(Queries::Dense).with_keys(Keys::Dense);
        if problem.is_dense() { dense } else { dense.with_key_lengths() }
    }

    /// Where a sequence of these lengths begins, and the next ones do.
    fn starts(lengths: &[u32]) -> Vec<f32> {
        (0..=lengths.len()).map(|n| lengths[..n].iter().sum::<u32>() as f32).collect()
    }

    /// The rows of a batch entry that are no queries of its sequence.
    pub fn padding(&self, batch: usize) -> usize {
        self.problem.len_q - self.queries[batch] as usize
    }

    /// Whether a row is of a sequence.
    pub fn has(&self, row: &Row) -> bool {
        match row.kind {
            Rows::Queries => row.position >= self.padding(row.batch),
            Rows::Keys => row.position < self.keys[row.batch] as usize,
            _ => true,
        }
    }

    /// Where a row is that is of a sequence: the batch entry and the row of its tensor.
    pub fn place(&self, row: &Row) -> (usize, usize) {
        let before = |lengths: &[u32]| lengths[..row.batch].iter().sum::<u32>() as usize;
        match (row.kind, self.problem.queries, self.problem.keys) {
            (Rows::Queries, Queries::Packed { .. }, _) => {
                (0, before(&self.queries) + row.position - self.padding(row.batch))
            }
            (Rows::Keys, _, Keys::Packed { .. }) => (0, before(&self.keys) + row.position),
            (Rows::Keys, _, Keys::Paged { page, .. }) => {
                let width = self.problem.len_k.div_ceil(page);
                (self.pages[row.batch * width + row.position / page] as usize, row.position % page)
            }
            _ => (row.batch, row.position),
        }
    }

    /// Starts, or the table.
    pub fn places(&self, of: &Parameter) -> Guarded {
        let values = match of.name {
            Name::QStarts => Self::starts(&self.queries),
            Name::KStarts => Self::starts(&self.keys),
            _ => self.pages.iter().map(|&page| page as f32).collect(),
        };
        Guarded::with_values(of.dtype, Arrangement::Bhsd, of.shape, &values)
    }

    /// The rows of a dense tensor, put where they lie, in memory that is otherwise unreadable.
    pub fn put(&self, of: &Parameter, dense: &Guarded) -> Guarded {
        let mut placed = Guarded::new(of.dtype, self.arrangement, of.shape);
        let mut memory = placed.view_mut();
        self.each_row(of, dense.shape(), |row, (batch, at), elements| {
            dense.view().read_row(row.batch, row.head, row.position, elements);
            memory.write_row(batch, row.head, at, elements);
        });
        placed
    }

    /// A dense tensor of what lies there; rows that are of no sequence are zeros.
    pub fn take(&self, of: &Parameter, dense: &Parameter, placed: &Guarded) -> Guarded {
        let zeros = vec![0.0; dense.shape.iter().product()];
        let mut all = Guarded::with_values(of.dtype, self.arrangement, dense.shape, &zeros);
        let mut memory = all.view_mut();
        self.each_row(of, dense.shape, |row, (batch, at), elements| {
            placed.view().read_row(batch, row.head, at, elements);
            memory.write_row(row.batch, row.head, row.position, elements);
        });
        all
    }

    /// Takes up every row of a dense tensor that is of a sequence, with its place and room for its elements.
    fn each_row(
        &self,
        of: &Parameter,
        [batch, heads, len, width]: [usize; 4],
        mut work: impl FnMut(Row, (usize, usize), &mut [f32]),
    ) {
        let mut elements = vec![0.0; width];
        for i in 0..batch * heads * len {
            let row =
                Row { kind: of.rows, batch: i / (heads * len), head: i / len % heads, position: i % len };
            if self.has(&row) {
                work(row, self.place(&row), &mut elements);
            }
        }
    }
}

/// The inputs of a call by name, each where it lies.
pub(crate) fn placed<'a>(placing: &Placing, dense: impl Fn(Name) -> &'a Guarded) -> PerTensor<Guarded> {
    let mut tensors = PerTensor::default();
    for of in placing.problem.signature().inputs() {
        let tensor = match of.rows {
            Rows::Places => placing.places(of),
            Rows::Heads => dense(of.name).clone(),
            _ => placing.put(of, dense(of.name)),
        };
        tensors.set(of.name, tensor);
    }
    tensors
}
