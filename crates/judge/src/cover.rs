//! Covering designs: few rows that together contain every pair of values of any two fields.
//!
//! Most hidden faults show when two things meet: a batch and a mask, a head dim and a layout. All combinations are far
//! too many to run; a covering design has every pair in about as many rows as the two longest lists have combinations.

use std::collections::BTreeSet;

use crate::rng::Rng;

/// Candidate rows for each row that is taken: the one with the most new pairs wins.
const CANDIDATES: usize = 24;

/// A value of one field together with a value of a later one: field, value, field, value.
type Pair = [usize; 4];

/// Rows over fields that have `values[i]` values each, as indices of values. `fits` says whether a row, given as far as
/// it is known, can be completed; pairs that no row can hold are left out. The same seed gives the same rows.
///
/// ```
/// use flashcore_judge::cover::pairs;
/// let rows = pairs(&[3, 3, 3, 3], &|_| true, 1);
/// assert!(rows.len() < 20); // of 81
/// assert!(rows.iter().any(|row| row[1] == 2 && row[3] == 0));
/// ```
pub fn pairs(values: &[usize], fits: &dyn Fn(&[Option<usize>]) -> bool, seed: u64) -> Vec<Vec<usize>> {
    let with = |pair: &Pair| {
        let mut row = vec![None; values.len()];
        (row[pair[0]], row[pair[2]]) = (Some(pair[1]), Some(pair[3]));
        row
    };
    let mut open: BTreeSet<Pair> = BTreeSet::new();
    for a in 0..values.len() {
        for b in a + 1..values.len() {
            let all = (0..values[a]).flat_map(|x| (0..values[b]).map(move |y| [a, x, b, y]));
            open.extend(all.filter(|pair| fits(&with(pair))));
        }
    }
    let mut rng = Rng::new(seed);
    let mut rows = Vec::new();
    while let Some(first) = open.first().copied() {
        let candidates =
            (0..CANDIDATES).filter_map(|_| complete(with(&first), values, &open, fits, &mut rng));
        let best = candidates.max_by_key(|row| met(row).filter(|pair| open.contains(pair)).count());
        // A pair that `fits` allowed but that no row can hold must not be tried forever.
        open.remove(&first);
        if let Some(row) = best {
            for pair in met(&row) {
                open.remove(&pair);
            }
            rows.push(row);
        }
    }
    rows
}

/// The pairs that a row holds.
fn met(row: &[usize]) -> impl Iterator<Item = Pair> + '_ {
    (0..row.len()).flat_map(move |a| (a + 1..row.len()).map(move |b| [a, row[a], b, row[b]]))
}

/// Fills a row field by field, each with the value that adds the most new pairs.
fn complete(
    mut row: Vec<Option<usize>>,
    values: &[usize],
    open: &BTreeSet<Pair>,
    fits: &dyn Fn(&[Option<usize>]) -> bool,
    rng: &mut Rng,
) -> Option<Vec<usize>> {
    let mut fields: Vec<usize> = (0..row.len()).filter(|&field| row[field].is_none()).collect();
    for i in (1..fields.len()).rev() {
        fields.swap(i, rng.below(i + 1));
    }
    for field in fields {
        let gain = |value: usize, row: &[Option<usize>]| {
            let known = row.iter().enumerate().filter_map(|(other, known)| known.map(|known| (other, known)));
            let pair = |(other, known)| {
                if other < field { [other, known, field, value] } else { [field, value, other, known] }
            };
            known.map(pair).filter(|pair| open.contains(pair)).count()
        };
        let mut ranked: Vec<(usize, u64, usize)> =
            (0..values[field]).map(|value| (gain(value, &row), rng.next_u64(), value)).collect();
        ranked.sort_unstable_by(|a, b| b.cmp(a));
        let fitting = ranked.into_iter().find(|&(_, _, value)| {
            row[field] = Some(value);
            fits(&row)
        });
        fitting?;
    }
    row.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_that_fits_is_met_and_none_that_does_not() {
        let values = [5, 4, 6, 3, 2];
        // The first and the third field together must stay below 8.
        let fits = |row: &[Option<usize>]| row[0].unwrap_or(0) + row[2].unwrap_or(0) < 8;
        let rows = pairs(&values, &fits, 7);
        let seen: BTreeSet<Pair> = rows.iter().flat_map(|row| met(row)).collect();
        assert!(rows.iter().all(|row| row[0] + row[2] < 8));
        let mut expected = 0;
        for a in 0..5 {
            for b in a + 1..5 {
                for x in 0..values[a] {
                    for y in 0..values[b] {
                        let possible = (a, b) != (0, 2) || x + y < 8;
                        expected += usize::from(possible);
                        assert_eq!(seen.contains(&[a, x, b, y]), possible, "{a} {x} {b} {y}");
                    }
                }
            }
        }
        assert_eq!(seen.len(), expected);
        assert!(rows.len() < 50, "{}", rows.len());
        assert_eq!(rows, pairs(&values, &fits, 7));
    }

    #[test]
    fn one_value_everywhere_is_one_row() {
        assert_eq!(pairs(&[1, 1, 1], &|_| true, 1), [[0, 0, 0]]);
    }
}
