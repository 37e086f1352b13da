//! Sequences of lengths of their own in one call: packed, in a cache with room for more, or in pages of it.
//!
//! Their tensors lie in memory as those who serve models have them: token after token, and the heads of a token together.
//! Who judges numbers the queries of a sequence as [`Placing`] does: they are the last of as many as the longest has.

use flashcore::{Keys, Problem, Queries};
use flashcore_judge::guarded::Arrangement;
use flashcore_judge::placing::{self, Placing};
use flashcore_judge::rng::Rng;
use flashcore_judge::rule::Row;
use serde::{Deserialize, Serialize};

/// How their tensors lie in memory.
pub const ARRANGEMENT: Arrangement = Arrangement::Bshd;

/// The seed of the pages that sequences have.
const SEED: u64 = 7;

/// How long the sequences of a call are, and how their keys lie.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sequences {
    /// How many queries each has, where they are packed; absent where each has as many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queries: Option<Vec<u32>>,
    /// How many keys each has.
    pub keys: Vec<u32>,
    /// How its keys lie.
    pub lie: Lie,
}

/// How the keys of sequences lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lie {
    /// Each sequence has memory for as many as the longest has.
    Cache,
    /// One behind the other.
    Packed,
    /// In pages of so many, anywhere in a pool.
    Pages(usize),
}

impl Sequences {
    /// Each attends to itself, as the prompts of a batch do.
    pub fn packed(lengths: &[u32]) -> Self {
        Self { queries: Some(lengths.into()), keys: lengths.into(), lie: Lie::Packed }
    }

    /// As many queries of each against these keys.
    pub fn cached(keys: Vec<u32>, lie: Lie) -> Self {
        Self { queries: None, keys, lie }
    }

    /// The same with keys that lie otherwise.
    pub fn lying(&self, lie: Lie) -> Self {
        Self { lie, ..self.clone() }
    }

    /// Sequences of a problem that says how they lie, but not how long each is: one is as long as can be, and the others
    /// share what is left. None where all are as long.
    pub fn of(problem: &Problem) -> Option<Self> {
        let Problem { batch, len_q, len_k, .. } = *problem;
        let shared = |longest: usize, total: usize| -> Vec<u32> {
            let (others, left) = (batch.saturating_sub(1), total.saturating_sub(longest));
            let one = |n: usize| left * (n + 1) / others - left * n / others;
            let rest = (0..others).map(one).map(|len| len.min(longest));
            [longest].into_iter().chain(rest).map(|len| len as u32).collect()
        };
        let lie = match problem.keys {
            Keys::Packed { .. } => Lie::Packed,
            Keys::Paged { page, .. } => Lie::Pages(page),
            // In rows of a larger cache, which are like memory of their own.
            Keys::Dense | Keys::Apart { .. } => Lie::Cache,
        };
        let queries = match problem.queries {
            Queries::Packed { total } => Some(shared(len_q, total)),
            Queries::Dense => None,
        };
        let keys = match problem.keys {
            Keys::Packed { total } => shared(len_k, total),
            _ => vec![len_k as u32; batch],
        };
        (!problem.is_dense() || problem.key_lengths).then_some(Self { queries, keys, lie })
    }

    /// What an engine is asked, where a dense problem has the longest of each.
    pub fn problem(&self, dense: Problem) -> Problem {
        let total = |lengths: &[u32]| lengths.iter().map(|&len| len as usize).sum();
        let problem = match &self.queries {
            Some(queries) => dense.with_queries(Queries::Packed { total: total(queries) }),
            None => dense,
        };
        match self.lie {
            Lie::Cache => problem.with_key_lengths(),
            Lie::Packed => problem.with_keys(Keys::Packed { total: total(&self.keys) }),
            Lie::Pages(page) => {
                let pages = placing::pool(&self.keys, page);
                problem.with_key_lengths().with_keys(Keys::Paged { page, pages })
            }
        }
    }

    /// Whether these can be the sequences of a dense problem that has the longest of each.
    pub fn fit(&self, dense: &Problem) -> bool {
        let fits = |lengths: &[u32], longest: usize| {
            lengths.len() == dense.batch && lengths.iter().max().is_some_and(|&max| max as usize == longest)
        };
        let queries = self.queries.as_ref().is_none_or(|queries| fits(queries, dense.len_q));
        queries && fits(&self.keys, dense.len_k) && self.lie != Lie::Pages(0)
    }

    /// How many queries a sequence has.
    fn queries(&self, problem: &Problem, sequence: usize) -> usize {
        self.queries.as_ref().map_or(problem.len_q, |queries| queries[sequence] as usize)
    }

    /// What each of them asks, alone.
    pub fn each(&self, problem: &Problem) -> Vec<Problem> {
        let alone = |sequence: usize| {
            let mut alone = problem.with_queries(Queries::Dense).with_keys(Keys::Dense);
            (alone.batch, alone.key_lengths) = (1, false);
            (alone.len_q, alone.len_k) = (self.queries(problem, sequence), self.keys[sequence] as usize);
            alone
        };
        (0..self.keys.len()).map(alone).collect()
    }

    /// Where they lie.
    pub fn placing(&self, problem: &Problem) -> Placing {
        let queries = (0..self.keys.len()).map(|sequence| self.queries(problem, sequence) as u32).collect();
        Placing::new(*problem, ARRANGEMENT, queries, self.keys.clone(), SEED)
    }

    /// The pages of each, row by row; 0 where no key reaches.
    pub fn table(&self, problem: &Problem) -> Vec<u32> {
        let Lie::Pages(page) = self.lie else { return Vec::new() };
        let (placing, width) = (self.placing(problem), problem.len_k.div_ceil(page));
        let entry = |at: usize| {
            let (sequence, page) = (at / width, page * (at % width));
            let row = Row { kind: flashcore::signature::Rows::Keys, ..Row::query(sequence, 0, page) };
            if placing.has(&row) { placing.place(&row).0 as u32 } else { 0 }
        };
        (0..self.keys.len() * width).map(entry).collect()
    }

    /// Up to `most` queries, as many of each sequence and head as there are or as that leaves, its last one among them.
    pub fn rows(&self, problem: &Problem, most: usize, seed: u64) -> Vec<Row> {
        let heads = (self.keys.len() * problem.heads_q).max(1);
        let mut rng = Rng::new(seed);
        let mut rows = Vec::new();
        for sequence in 0..self.keys.len() {
            let queries = self.queries(problem, sequence);
            let wanted = (most / heads).clamp(1, queries.max(1)).min(queries);
            for head in 0..problem.heads_q {
                let drawn = (1..wanted).map(|_| rng.below(queries));
                let mut chosen: Vec<usize> = queries.checked_sub(1).into_iter().chain(drawn).collect();
                chosen.sort_unstable();
                chosen.dedup();
                let place = |query| Row::query(sequence, head, problem.len_q - queries + query);
                rows.extend(chosen.into_iter().map(place));
            }
        }
        rows
    }

    /// A judged row's place among its sequence's queries.
    pub fn query(&self, problem: &Problem, row: &Row) -> usize {
        row.position + self.queries(problem, row.batch) - problem.len_q
    }

    /// Where a sequence's query is among the tokens of q.
    pub fn token_of_query(&self, problem: &Problem, sequence: usize, query: usize) -> usize {
        query + self.queries.as_ref().map_or(sequence * problem.len_q, |queries| before(queries, sequence))
    }

    /// Where its key is among the tokens of a cache, whose pages are copied from there, or of what is packed.
    pub fn token_of_key(&self, problem: &Problem, sequence: usize, key: usize) -> usize {
        match self.lie {
            Lie::Packed => before(&self.keys, sequence) + key,
            Lie::Cache | Lie::Pages(_) => sequence * problem.len_k + key,
        }
    }

    /// Which row of the output a judged one is, in the order (batch, heads, length).
    pub fn index(&self, problem: &Problem, row: &Row) -> usize {
        let token = self.token_of_query(problem, row.batch, self.query(problem, row));
        match problem.queries {
            Queries::Packed { total } => row.head * total + token,
            Queries::Dense => {
                (row.batch * problem.heads_q + row.head) * problem.len_q + token % problem.len_q.max(1)
            }
        }
    }
}

/// The tokens before a sequence's.
fn before(lengths: &[u32], sequence: usize) -> usize {
    lengths[..sequence].iter().map(|&len| len as usize).sum()
}

/// Starts of sequences: where each begins, and where the last one ends.
pub fn starts(lengths: &[u32]) -> Vec<u32> {
    (0..=lengths.len()).map(|sequence| before(lengths, sequence) as u32).collect()
}

/// As `packed=18632`, `keys=70000`, or `page=16 keys=70000`: how they lie, and how many there are.
impl std::fmt::Display for Sequences {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let keys: u64 = self.keys.iter().copied().map(u64::from).sum();
        let queries: Option<u64> =
            self.queries.as_ref().map(|queries| queries.iter().copied().map(u64::from).sum());
        match (self.lie, queries) {
            (Lie::Packed, Some(queries)) if queries == keys => write!(f, "packed={keys}"),
            (_, Some(queries)) => write!(f, "queries={queries} "),
            (_, None) => Ok(()),
        }?;
        match self.lie {
            Lie::Packed if queries == Some(keys) => Ok(()),
            Lie::Packed => write!(f, "packed={keys}"),
            Lie::Cache => write!(f, "keys={keys}"),
            Lie::Pages(page) => write!(f, "page={page} keys={keys}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use flashcore::{DType, Mask};

    use super::*;

    const LENGTHS: [u32; 4] = [5, 0, 9, 3];

    fn problem() -> Problem {
        Problem::new(4, 4, 9, 8, DType::BF16).with_kv(2, 9).with_mask(Mask::Causal)
    }

    #[test]
    fn what_an_engine_is_asked_says_how_they_lie() {
        let asked = |it: Sequences| (it.problem(problem()).to_string(), it.to_string(), it.fit(&problem()));
        let packed = asked(Sequences::packed(&LENGTHS));
        assert_eq!(packed, ("4x4/2x9x8 bf16 causal packed=17".into(), "packed=17".into(), true));
        let cached = asked(Sequences::cached(LENGTHS.into(), Lie::Cache));
        assert_eq!(cached, ("4x4/2x9x8 bf16 causal key-lengths".into(), "keys=17".into(), true));
        let (text, short, _) = asked(Sequences::cached(LENGTHS.into(), Lie::Pages(4)));
        assert!(
            text.contains("key-lengths") && text.contains("page=4/") && short == "page=4 keys=17",
            "{text}"
        );
        assert!(
            !Sequences::packed(&[5, 0, 8, 3]).fit(&problem()) && !Sequences::packed(&[9]).fit(&problem())
        );
    }

    #[test]
    fn a_problem_without_lengths_has_some_that_fit_it() {
        for text in [
            "4x4/2x9x8 bf16 causal packed=17",
            "3x2x1/70x16 f16 key-lengths page=16/15",
            "1x2x5x8 f32 packed=5",
        ] {
            let problem: Problem = text.parse().unwrap();
            let found = Sequences::of(&problem).unwrap();
            let dense = problem.with_queries(Queries::Dense).with_keys(Keys::Dense);
            assert!(found.fit(&dense), "{found:?}");
            assert_eq!(found.problem(dense).queries, problem.queries, "{found:?}");
        }
        assert_eq!(Sequences::of(&problem()), None);
    }

    #[test]
    fn every_query_is_judged_once_at_its_place_and_every_page_is_somebody_s() {
        for sequences in [Sequences::packed(&LENGTHS), Sequences::cached(vec![9, 1, 4, 9], Lie::Pages(4))] {
            let problem = sequences.problem(problem());
            let rows = sequences.rows(&problem, 1_000_000, 1);
            let mut places: Vec<usize> = rows.iter().map(|row| sequences.index(&problem, row)).collect();
            let all = 4 * sequences.queries.as_ref().map_or(36, |_| 17);
            assert!(places.iter().all(|&place| place < all));
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), rows.len());
            assert!(rows.iter().all(|row| sequences.placing(&problem).has(row)));
            let mut pages = sequences.table(&problem);
            pages.retain(|&page| page > 0);
            let named = pages.len();
            pages.sort_unstable();
            pages.dedup();
            assert_eq!(pages.len(), named, "a page has one owner");
        }
        // Each is a problem of its own, and together they are the whole.
        let flops: f64 = Sequences::packed(&LENGTHS).each(&problem()).iter().map(Problem::flops).sum();
        let pairs = LENGTHS.iter().map(|&len| f64::from(len * len) / 2.0).sum::<f64>();
        assert_eq!(flops, pairs * 4.0 * 32.0);
    }
}
