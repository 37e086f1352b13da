//! Operands: the inputs of one call in guarded memory, with the options that go with them.

use flashcore::{Attention, Mask, Problem};
use rayon::prelude::*;

use crate::guarded::{Arrangement, Guarded};
use crate::inputs::{Distribution, Values, draw};
use crate::rng::Rng;
use crate::rule::{Row, Yardstick};

/// The inputs of one call.
#[derive(Clone, Debug)]
pub struct Operands {
    /// What is asked.
    pub problem: Problem,
    /// How many keys each batch entry has, if not all of them.
    pub key_lengths: Option<Vec<u32>>,
    /// The queries.
    pub q: Guarded,
    /// The keys.
    pub k: Guarded,
    /// The values.
    pub v: Guarded,
}

impl Operands {
    /// Draws inputs for a problem. Keys behind a key length do not exist, so they are made unreadable.
    pub fn draw(
        problem: Problem,
        key_lengths: Option<Vec<u32>>,
        arrangement: Arrangement,
        distribution: Distribution,
        seed: u64,
    ) -> Self {
        Self::with_values(problem, key_lengths, arrangement, &draw(&problem, distribution, seed))
    }

    /// Puts given values into guarded memory.
    pub fn with_values(
        problem: Problem,
        key_lengths: Option<Vec<u32>>,
        arrangement: Arrangement,
        values: &Values,
    ) -> Self {
        let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, dtype, .. } = problem;
        let tensor = |heads, len, width, values: &[f32]| {
            Guarded::with_values(dtype, arrangement, [batch, heads, len, width], values)
        };
        let mut operands = Self {
            problem,
            key_lengths,
            q: tensor(heads_q, len_q, head_dim, &values.q),
            k: tensor(heads_kv, len_k, head_dim, &values.k),
            v: tensor(heads_kv, len_k, head_dim_v, &values.v),
        };
        for b in 0..batch {
            for s in operands.keys(b)..len_k {
                for h in 0..heads_kv {
                    operands.k.spoil_row(b, h, s);
                    operands.v.spoil_row(b, h, s);
                }
            }
        }
        operands
    }

    /// How many keys batch entry `b` has.
    pub fn keys(&self, b: usize) -> usize {
        self.key_lengths.as_ref().map_or(self.problem.len_k, |lengths| lengths[b] as usize)
    }

    /// The public call with this problem's options.
    pub fn attention(&self) -> Attention<'_> {
        let attention = Attention::new().mask(self.problem.mask).scale(self.problem.scale);
        let attention = attention.softcap(self.problem.softcap.unwrap_or(0.0));
        match &self.key_lengths {
            Some(lengths) => attention.key_lengths(lengths),
            None => attention,
        }
    }

    /// The yardstick of all rows.
    pub fn yardstick(&self) -> Yardstick {
        let (q, k, v) = (self.q.view(), self.k.view(), self.v.view());
        Yardstick::new(&self.problem, &q, &k, &v, self.key_lengths.as_deref())
    }

    /// The yardstick of the query heads that share one kv head of one batch entry.
    pub fn yardstick_of_group(&self, b: usize, kv_head: usize) -> Yardstick {
        let Problem { len_q, len_k, .. } = self.problem;
        let group = self.problem.group();
        let mut problem = self.problem.with_kv(1, len_k);
        (problem.batch, problem.heads_q) = (1, group);
        let lengths = self.key_lengths.as_ref().map(|lengths| [lengths[b]]);
        let q = self.q.part(b, 1, kv_head * group, group, 0, len_q);
        let k = self.k.part(b, 1, kv_head, 1, 0, len_k);
        let v = self.v.part(b, 1, kv_head, 1, 0, len_k);
        Yardstick::new(&problem, &q, &k, &v, lengths.as_ref().map(|lengths| &lengths[..])).at(Row {
            batch: b,
            head: kv_head * group,
            query: 0,
        })
    }

    /// The yardstick of chosen rows, for problems too large to judge whole.
    pub fn yardstick_of_rows(&self, rows: &[Row]) -> Yardstick {
        let one = |row: &Row| {
            let &Row { batch, head, query } = row;
            let keys = self.problem.mask.keys(query, self.problem.len_q, self.keys(batch));
            let kv_head = head / self.problem.group();
            let mut problem = self.problem.with_kv(1, keys.len()).with_mask(Mask::None);
            (problem.batch, problem.heads_q, problem.len_q, problem.key_lengths) = (1, 1, 1, false);
            let q = self.q.part(batch, 1, head, 1, query, 1);
            let k = self.k.part(batch, 1, kv_head, 1, keys.start, keys.len());
            let v = self.v.part(batch, 1, kv_head, 1, keys.start, keys.len());
            Yardstick::new(&problem, &q, &k, &v, None).at(*row)
        };
        let parts: Vec<Yardstick> = rows.par_iter().map(one).collect();
        Yardstick::join(parts).unwrap_or_else(|| {
            let mut nothing = self.problem;
            nothing.batch = 0;
            let Problem { len_q, len_k, heads_q, heads_kv, .. } = nothing;
            let q = self.q.part(0, 0, 0, heads_q, 0, len_q);
            let k = self.k.part(0, 0, 0, heads_kv, 0, len_k);
            let v = self.v.part(0, 0, 0, heads_kv, 0, len_k);
            Yardstick::new(&nothing, &q, &k, &v, None)
        })
    }

    /// Up to `most` rows spread over all heads: the first and the last query of every head where there is room,
    /// and random ones between.
    pub fn sample_rows(&self, most: usize, seed: u64) -> Vec<Row> {
        sample_rows(&self.problem, most, seed)
    }
}

/// Up to `most` rows of a problem, spread as [`Operands::sample_rows`] says.
pub fn sample_rows(problem: &Problem, most: usize, seed: u64) -> Vec<Row> {
    let Problem { batch, heads_q, len_q, .. } = *problem;
    let heads = batch * heads_q;
    let mut rows = Vec::new();
    let mut rng = Rng::new(seed);
    if heads * len_q == 0 {
        return rows;
    }
    let every = (most / heads).clamp(1, len_q);
    for head in 0..heads {
        let mut queries: Vec<usize> = match every {
            _ if every == len_q => (0..len_q).collect(),
            1 => vec![rng.below(len_q)],
            _ => [0, len_q - 1].into_iter().chain((2..every).map(|_| rng.below(len_q))).collect(),
        };
        queries.sort_unstable();
        queries.dedup();
        let row = |query| Row { batch: head / heads_q, head: head % heads_q, query };
        rows.extend(queries.into_iter().map(row));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::DType;

    fn operands() -> Operands {
        let problem = Problem::new(2, 4, 9, 8, DType::F16).with_kv(2, 13).with_mask(Mask::Causal);
        let problem = problem.with_key_lengths().with_head_dim_v(6).with_softcap(5.0);
        Operands::draw(problem, Some(vec![13, 7]), Arrangement::Padded, Distribution::Normal, 3)
    }

    /// The whole yardstick's truth for chosen rows.
    fn truth(all: &Yardstick, rows: &[Row]) -> (Vec<f64>, Vec<f64>) {
        let index = |row: &Row| all.rows().iter().position(|r| r == row).unwrap();
        let o = rows.iter().flat_map(|row| all.oracle().o[index(row) * 6..][..6].to_vec()).collect();
        (o, rows.iter().map(|row| all.oracle().lse[index(row)]).collect())
    }

    #[test]
    fn a_group_and_single_rows_have_the_truth_of_the_whole() {
        let operands = operands();
        let all = operands.yardstick();
        let group = operands.yardstick_of_group(1, 1);
        assert_eq!(group.rows().len(), 2 * 9);
        assert_eq!(truth(&all, group.rows()), (group.oracle().o.clone(), group.oracle().lse.clone()));
        let rows = operands.sample_rows(40, 1);
        let sampled = operands.yardstick_of_rows(&rows);
        assert_eq!(sampled.rows(), rows);
        assert_eq!(truth(&all, &rows), (sampled.oracle().o.clone(), sampled.oracle().lse.clone()));
    }

    #[test]
    fn sampled_rows_cover_every_head_with_its_first_and_last_query() {
        let rows = operands().sample_rows(40, 1);
        assert!(rows.len() <= 40);
        for batch in 0..2 {
            for head in 0..4 {
                for query in [0, 8] {
                    assert!(rows.contains(&Row { batch, head, query }), "{batch} {head} {query}");
                }
            }
        }
        assert_eq!(operands().sample_rows(10_000, 1).len(), 2 * 4 * 9);
    }

    #[test]
    fn keys_behind_a_key_length_are_unreadable_and_the_truth_does_not_need_them() {
        let operands = operands();
        let mut row = [0.0; 8];
        operands.k.view().read_row(1, 0, 7, &mut row);
        assert!(row.iter().all(|x| x.is_nan()));
        assert!(operands.yardstick().oracle().o.iter().all(|x| x.is_finite()));
    }

    #[test]
    fn no_rows_make_a_yardstick_that_accepts_nothing_but_nothing() {
        let yardstick = operands().yardstick_of_rows(&[]);
        assert!(yardstick.rows().is_empty());
        assert!(yardstick.judge(&[], Some(&[])).passed());
    }
}
