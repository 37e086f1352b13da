//! Packed and paged calls, as the judge sees them.
//!
//! Whoever judges sees one dense problem, with a row for every query and key that a sequence may have. How the sequences
//! really lie is decided when an engine runs: their rows are put where the [`Placing`] says, in memory that is otherwise
//! unreadable, and results are read back from there. So the oracle and the rule know nothing of layouts.
//!
//! Sequences have different numbers of queries. Those of a sequence are the *last* rows of its batch entry, so that a mask
//! that is aligned bottom-right means the same in both. The rows before them do not exist: they are zeros, and nobody
//! judges them.
//!
//! Where a call appends, the dense problem is what attention is to see: all keys, and queries and new keys already turned. The
//! engine gets the last keys apart from the cache, and what is to be turned as it was before. That can be had exactly, because
//! every angle in the tables is a multiple of 90 degrees: another for each position and each pair, so that a wrong one shows.
//! For a cache of 8 bits, a new number is one of those that become the code of the dense problem (`codes.rs`).

use flashcore::signature::{Parameter, PerTensor, Rows};
use flashcore::{Appending, Keys, Name, Problem, Queries, Turning};

use crate::codes::number_of;
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
    /// How many keys each sequence has, those that are appended among them.
    pub keys: Vec<u32>,
    /// How many of them are appended.
    pub new: Vec<u32>,
    /// Where the keys of each sequence begin, where they begin anywhere.
    apart: Vec<u32>,
    /// The pages of each sequence, as far as the table goes; those that no key reaches are of others, or of none.
    pages: Vec<i32>,
}

/// Rows between sequences that begin anywhere, which are nobody's.
const GAP: usize = 2;

/// How many rows sequences of these lengths take that begin anywhere.
pub fn apart(keys: &[u32]) -> usize {
    keys.iter().map(|&len| len as usize + GAP).sum()
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
        let new = vec![problem.append.map_or(0, |append| append.len as u32); keys.len()];
        let (apart, pages) = (Vec::new(), Vec::new());
        let mut placing = Self { problem, arrangement, queries, keys, new, apart, pages };
        if let Keys::Apart { .. } = problem.keys {
            // The last sequence comes first, and the first last.
            let behind = |sequence: usize| &placing.keys[sequence + 1..];
            let start = |sequence: usize| (self::apart(behind(sequence)) + GAP) as u32;
            // Nobody may look at the number behind the last.
            placing.apart = (0..placing.keys.len()).map(start).chain([u32::MAX >> 1]).collect();
        }
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

    /// With other numbers of keys that are appended.
    pub fn with_new(self, new: Vec<u32>) -> Self {
        Self { new, ..self }
    }

    /// How many keys each sequence has before.
    pub fn before(&self) -> Vec<u32> {
        self.keys.iter().zip(&self.new).map(|(after, new)| after - new).collect()
    }

    /// The dense problem that is judged.
    pub fn dense(problem: Problem) -> Problem {
        let dense = problem.appended().with_queries(Queries::Dense).with_keys(Keys::Dense);
        if problem.is_dense() && problem.append.is_none() { dense } else { dense.with_key_lengths() }
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
            (Rows::Keys, _, Keys::Apart { .. }) => (0, self.apart[row.batch] as usize + row.position),
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
            Name::KStarts if !self.apart.is_empty() => self.apart.iter().map(|&at| at as f32).collect(),
            Name::KStarts => Self::starts(&self.keys),
            Name::NewStarts => Self::starts(&self.new),
            Name::Positions => (0..self.keys.len()).map(|sequence| self.first(sequence) as f32).collect(),
            _ => self.pages.iter().map(|&page| page as f32).collect(),
        };
        Guarded::with_values(of.dtype, Arrangement::Bhsd, of.shape, &values)
    }

    /// The rows of a dense tensor, put where they lie, in memory that is otherwise unreadable.
    pub fn put(&self, of: &Parameter, dense: &Guarded) -> Guarded {
        self.put_some(of, of.rows, dense, |row, _| Some(self.place(row)))
    }

    /// Those rows of a dense tensor that have a place, put there after a change.
    fn put_some(
        &self,
        of: &Parameter,
        kind: Rows,
        dense: &Guarded,
        place: impl Fn(&Row, &mut [f32]) -> Option<(usize, usize)>,
    ) -> Guarded {
        let mut placed = Guarded::new(of.dtype, self.arrangement, of.shape);
        let mut memory = placed.view_mut();
        self.each_row(kind, dense.shape(), |row, elements| {
            dense.view().read_row(row.batch, row.head, row.position, elements);
            if let Some((batch, at)) = place(&row, elements) {
                memory.write_row(batch, row.head, at, elements);
            }
        });
        placed
    }

    /// What a new row is of an engine that is to store this one of the dense problem's keys or values.
    fn unstored<'a>(
        &self,
        name: Name,
        row: &Row,
        elements: &mut [f32],
        dense: &impl Fn(Name) -> &'a Guarded,
    ) {
        if !self.problem.is_eight_bit() {
            return;
        }
        let (which, of) = if name == Name::NewK { (1, Name::KDescale) } else { (2, Name::VDescale) };
        let mut descale = [1.0];
        if self.problem.descales[which] {
            let block = self.problem.descale_block(row.position);
            dense(of).view().read_row(row.batch, row.head, block, &mut descale);
        }
        let head = row.batch * self.problem.heads_kv + row.head;
        let mut rng = Rng::stream(which as u64, (head * self.problem.len_k + row.position) as u64);
        for x in elements {
            *x = number_of(*x, descale[0], self.problem.dtype, &mut rng);
        }
    }

    /// An input of a call that appends, as it is before.
    fn unappended<'a>(
        &self,
        of: &Parameter,
        append: &Appending,
        dense: &impl Fn(Name) -> &'a Guarded,
    ) -> Guarded {
        let of_dense = dense(match of.name {
            Name::NewK => Name::K,
            Name::NewV => Name::V,
            name => name,
        });
        let new_row = |row: &Row| row.position.checked_sub(self.before()[row.batch] as usize);
        let turn_back = |elements: &mut [f32], sequence: usize, ahead: usize| {
            if let Some(turning) = &append.rotary {
                turn_back(turning, elements, self.first(sequence) + ahead);
            }
        };
        match of.name {
            Name::K | Name::V => {
                let held = |row: &Row, _: &mut [f32]| new_row(row).is_none().then(|| self.place(row));
                self.put_some(of, Rows::Keys, of_dense, held)
            }
            Name::Q => self.put_some(of, Rows::Queries, of_dense, |row, elements| {
                let ahead = row.position - self.padding(row.batch);
                turn_back(elements, row.batch, if self.problem.turns_by_row() { ahead } else { 0 });
                Some(self.place(row))
            }),
            _ => self.put_some(of, Rows::Keys, of_dense, |row, elements| {
                let ahead = new_row(row)?;
                self.unstored(of.name, row, elements, dense);
                if of.name == Name::NewK {
                    turn_back(elements, row.batch, ahead);
                }
                let start = self.new[..row.batch].iter().sum::<u32>() as usize;
                Some(if append.total.is_some() { (0, start + ahead) } else { (row.batch, ahead) })
            }),
        }
    }

    /// The position of a sequence's first new key.
    fn first(&self, sequence: usize) -> usize {
        let rotary = self.problem.append.and_then(|append| append.rotary);
        match rotary {
            Some(Turning { positions: true, .. }) => 1 + 3 * sequence % 5,
            _ => self.before()[sequence] as usize,
        }
    }

    /// A dense tensor of what lies there; rows that are of no sequence are zeros.
    pub fn take(&self, of: &Parameter, dense: &Parameter, placed: &Guarded) -> Guarded {
        let zeros = vec![0.0; dense.shape.iter().product()];
        let mut all = Guarded::with_values(of.dtype, self.arrangement, dense.shape, &zeros);
        let mut memory = all.view_mut();
        self.each_row(of.rows, dense.shape, |row, elements| {
            let (batch, at) = self.place(&row);
            placed.view().read_row(batch, row.head, at, elements);
            memory.write_row(row.batch, row.head, row.position, elements);
        });
        all
    }

    /// Takes up every row of a dense tensor that is of a sequence, with room for its elements.
    fn each_row(
        &self,
        kind: Rows,
        [batch, heads, len, width]: [usize; 4],
        mut work: impl FnMut(Row, &mut [f32]),
    ) {
        let mut elements = vec![0.0; width];
        for i in 0..batch * heads * len {
            let row = Row { kind, batch: i / (heads * len), head: i / len % heads, position: i % len };
            if self.has(&row) {
                work(row, &mut elements);
            }
        }
    }
}

/// The cosine and the sine of a position and a pair: a multiple of 90 degrees.
fn angle(position: usize, pair: usize) -> [f32; 2] {
    [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]][(5 * position + 3 * pair + position * pair / 2) % 4]
}

/// A table of cosines, or of sines.
fn table(turning: &Turning, of: &Parameter) -> Guarded {
    let which = usize::from(of.name == Name::Sin);
    let half = turning.dim / 2;
    let values: Vec<f32> = (0..turning.table * half).map(|i| angle(i / half, i % half)[which]).collect();
    Guarded::with_values(of.dtype, Arrangement::Bhsd, of.shape, &values)
}

/// What a row was before it was turned.
fn turn_back(turning: &Turning, row: &mut [f32], position: usize) {
    for pair in 0..turning.dim / 2 {
        let [a, b] =
            if turning.interleaved { [2 * pair, 2 * pair + 1] } else { [pair, pair + turning.dim / 2] };
        let [cos, sin] = angle(position, pair);
        (row[a], row[b]) = (row[a] * cos + row[b] * sin, row[b] * cos - row[a] * sin);
    }
}

/// The inputs of a call by name, each where it lies.
pub(crate) fn placed<'a>(placing: &Placing, dense: impl Fn(Name) -> &'a Guarded) -> PerTensor<Guarded> {
    let mut tensors = PerTensor::default();
    let append = placing.problem.append;
    for of in placing.problem.signature().inputs() {
        let tensor = match (of.rows, append) {
            (Rows::Positions, Some(Appending { rotary: Some(turning), .. })) => table(&turning, of),
            (Rows::Queries | Rows::Keys | Rows::NewKeys, Some(append)) => {
                placing.unappended(of, &append, &dense)
            }
            (Rows::Places, _) => placing.places(of),
            (Rows::Heads, _) => dense(of.name).clone(),
            _ => placing.put(of, dense(of.name)),
        };
        tensors.set(of.name, tensor);
    }
    tensors
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::Distribution;
    use crate::operands::Operands;
    use flashcore::{Attention, Device, Mask, oracle};

    const QUERIES: [u32; 4] = [3, 0, 9, 1];
    const KEYS: [u32; 4] = [5, 7, 13, 0];

    /// Inputs of a problem with sequences of those lengths.
    fn operands(text: &str, arrangement: Arrangement) -> Operands {
        let problem: Problem = text.parse().unwrap();
        let queries = match problem.queries {
            Queries::Dense => vec![problem.len_q as u32; 4],
            Queries::Packed { .. } => QUERIES.into(),
        };
        let placing = Placing::new(problem, arrangement, queries, KEYS.into(), 3);
        let dense = Placing::dense(problem);
        let drawn = Operands::draw(dense, Some(KEYS.into()), Arrangement::Bhsd, Distribution::Normal, 3);
        drawn.with_placing(placing)
    }

    #[test]
    fn the_truth_of_a_packed_call_is_that_of_each_sequence_alone() {
        for mask in [Mask::None, Mask::Causal, Mask::Window { left: Some(2), right: Some(1) }] {
            let text = format!("4x4/2x9/13x8 f32 packed=13/25 lse {mask}");
            let operands = operands(&text, Arrangement::Padded);
            let (placed, yardstick) = (operands.placed(), operands.yardstick());
            let truth = yardstick.of(Name::O);
            assert_eq!(truth.rows().len(), 4 * 13);
            let (mut first_q, mut first_k) = (0, 0);
            for (sequence, (len_q, len_k)) in QUERIES.into_iter().zip(KEYS).enumerate() {
                let (len_q, len_k) = (len_q as usize, len_k as usize);
                let mut alone = placed.problem.with_queries(Queries::Dense).with_keys(Keys::Dense);
                (alone.batch, alone.len_q, alone.len_k) = (1, len_q, len_k);
                let q = placed.q.part(0, 1, 0, 4, first_q, len_q);
                let [k, v] = [&placed.k, &placed.v].map(|of| of.part(0, 1, 0, 2, first_k, len_k));
                let o = oracle::attention(&alone, &q, &k, &v, None).o;
                let ours = (0..truth.rows().len()).filter(|&i| truth.rows()[i].batch == sequence);
                let ours: Vec<f64> = ours.flat_map(|i| truth.truth()[truth.elements(i)].to_vec()).collect();
                assert_eq!(ours, o, "{mask}, sequence {sequence}");
                (first_q, first_k) = (first_q + len_q, first_k + len_k);
            }
        }
    }

    #[test]
    fn what_is_put_somewhere_is_taken_from_there() {
        for text in ["4x4/2x9/13x8 f16 packed=13/25", "4x4/2x9/13x8 f16 packed-q=13 page=3/14 key-lengths"] {
            for arrangement in Arrangement::ALL {
                let operands = operands(text, arrangement);
                let (placing, placed) = (operands.placing().unwrap(), operands.placed());
                for (of, dense) in
                    placed.problem.signature().inputs().zip(operands.problem.signature().inputs())
                {
                    if !matches!(of.rows, Rows::Queries | Rows::Keys) {
                        continue;
                    }
                    let back = placing.take(of, dense, placed.operand(of.name));
                    let before = operands.operand(of.name);
                    for (i, count) in back.differences(before).into_iter().enumerate() {
                        assert!(
                            count == 0 || !placing.has(&Row::of(dense, i)),
                            "{text}: {}, row {i}",
                            of.name
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn what_no_sequence_has_is_unreadable_and_not_needed() {
        let operands = operands("4x4/2x9/13x8 f32 page=3/14 key-lengths causal", Arrangement::Bshd);
        let placed = operands.placed();
        let unreadable = placed.k.values().into_iter().filter(|x| x.is_nan()).count();
        assert_eq!(unreadable, (14 * 3 - 25) * 2 * 8);
        let (q, k, v) = (placed.q.view(), placed.k.view(), placed.v.view());
        let out = placed.attention().run(&Device::cpu(), &q, &k, &v).unwrap();
        assert!(out.o.to_f32().iter().all(|x| x.is_finite()));
        // A table that names a page more would be refused, or read what it must not.
        let longer = Attention::key_lengths(placed.attention(), &[6, 7, 13, 1]);
        let wrong = longer.run(&Device::cpu(), &q, &k, &v);
        assert!(wrong.is_err_and(|error| error.to_string().contains("page 0 of sequence 3")));
    }
}
