//! What kind of fault a wrong result shows.
//!
//! Each usual fault of an attention kernel gives a certain wrong result: a lost tile, a wrong scale, a mask that is off
//! by one. So a few of the wrong rows are computed again in f64 with each of these faults, and the fault that reproduces
//! the engine's rows is named, with its number (which tile, which factor). Where none does, the diagnosis says so rather
//! than guess.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::Range;

use flashcore::signature::Rows;
use flashcore::{Mask, Name, Problem};
use serde::Serialize;

use crate::operands::Operands;
use crate::rule::{Judgement, Measure, Row, Verdict, Yardstick};

/// The kinds of faults that are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Nothing was computed.
    Zero,
    /// NaN or infinity.
    NotFinite,
    /// Scores or outputs are multiplied by a wrong number.
    Scale,
    /// Errors are biased to one side.
    Bias,
    /// Other keys than the mask allows.
    Mask,
    /// Some keys are missing, or replaced by others.
    Tile,
    /// The tensors of another head or batch entry, or rows in a wrong place.
    Place,
    /// Swapped operands.
    Operands,
    /// Two runs differ.
    Race,
    /// None of these.
    Unknown,
}

impl Kind {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Zero => "zero",
            Kind::NotFinite => "not finite",
            Kind::Scale => "scale",
            Kind::Bias => "bias",
            Kind::Mask => "mask",
            Kind::Tile => "tile",
            Kind::Place => "place",
            Kind::Operands => "operands",
            Kind::Race => "race",
            Kind::Unknown => "unknown",
        }
    }
}

/// What a wrong result looks like.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Diagnosis {
    /// What kind of fault.
    pub kind: Kind,
    /// What points to it.
    pub why: String,
}

impl Diagnosis {
    fn new(kind: Kind, why: impl Into<String>) -> Self {
        Self { kind, why: why.into() }
    }
}

/// The most wrong rows that are computed again.
const LOOKED_AT: usize = 6;

/// Usual sizes of key tiles, the largest first, so that one lost tile is not taken for several smaller ones.
const TILES: [usize; 10] = [256, 192, 128, 112, 96, 80, 64, 48, 32, 16];

/// The most tiles of one size that are tried: a row is computed again for each of them.
const MOST_TILES: usize = 100;

/// Diagnoses a result that the rule refused: the first output with bad rows. What is `given` is in the order of the
/// measures' rows.
pub fn diagnose(
    operands: &Operands,
    yardstick: &Yardstick,
    given: &[(Name, Vec<f32>)],
    judgement: &Judgement,
) -> Diagnosis {
    let found = |wrong: fn(&Verdict) -> bool| judgement.outputs.iter().position(wrong);
    let Some(at) = found(|verdict| !verdict.bad_rows.is_empty()) else {
        let at = found(|verdict| !verdict.passed()).unwrap_or(0);
        return leaning(yardstick.of(given[at].0), &given[at].1).unwrap_or_else(|| {
            Diagnosis::new(Kind::Unknown, "every row is within its bound, and yet all together are not")
        });
    };
    let (output, got, wrong) = (given[at].0, &given[at].1[..], &judgement.outputs[at].bad_rows[..]);
    let measure = yardstick.of(output);
    if output == Name::Lse {
        return lse_alone(measure, got, wrong);
    }
    let hidden = |&&i: &&usize| {
        let truth = &measure.truth()[measure.elements(i)];
        got[measure.elements(i)].iter().zip(truth).any(|(x, truth)| x.is_finite() && !truth.is_finite())
    };
    let hidden = wrong.iter().filter(hidden).count();
    if hidden > 0 {
        let why = format!(
            "{hidden} of {} bad rows hold numbers where a NaN or an infinity of the inputs must reach them",
            wrong.len()
        );
        return Diagnosis::new(Kind::NotFinite, why);
    }
    let not_finite =
        wrong.iter().filter(|&&i| got[measure.elements(i)].iter().any(|x| !x.is_finite())).count();
    if not_finite > 0 {
        let why = format!("{not_finite} of {} bad rows hold a NaN or an infinity", wrong.len());
        return Diagnosis::new(Kind::NotFinite, why);
    }
    if wrong.iter().all(|&i| got[measure.elements(i)].iter().all(|&x| x == 0.0)) {
        return Diagnosis::new(
            Kind::Zero,
            "every bad row is zero: nothing was computed, or nothing added up",
        );
    }
    let usual = || {
        let rows: Vec<Seen> = spread(wrong).map(|i| Seen::new(operands, measure, got, i)).collect();
        scale(&rows)
            .or_else(|| mask(&rows, &operands.problem))
            .or_else(|| exchanged(&rows, operands))
            .or_else(|| misplaced(&rows, measure))
            .or_else(|| tile(&rows))
            .or_else(|| offset(&rows))
    };
    // Only the rows of o can be computed again.
    let found = match output {
        Name::O => usual().or_else(|| leaning(measure, got)),
        _ => gain(measure, got, wrong),
    };
    found.unwrap_or_else(|| unknown(measure, got, wrong))
}

/// Whether a gradient is wrong by a factor alone.
fn gain(measure: &Measure, got: &[f32], wrong: &[usize]) -> Option<Diagnosis> {
    let pairs = |row: usize| {
        let at = measure.elements(row);
        got[at.clone()].iter().map(|&x| f64::from(x)).zip(measure.truth()[at].iter().copied())
    };
    let all = || spread(wrong).flat_map(pairs);
    let gain =
        all().map(|(x, truth)| x * truth).sum::<f64>() / all().map(|(_, truth)| truth * truth).sum::<f64>();
    let alike = |row: usize| {
        let bound = measure.row_bound(row, got);
        let distance = pairs(row).map(|(x, truth)| (x - gain * truth).abs()).fold(0.0, f64::max);
        distance <= bound.error / 3.0 && distance <= 4.0 * bound.allowed + 0.02 * bound.error
    };
    spread(wrong).all(alike).then(|| {
        let why = format!(
            "it is {gain:.4} times what it should be: a factor too many or too few, such as the scale"
        );
        Diagnosis::new(Kind::Scale, why)
    })
}

/// A few of many, evenly spread from the first to the last.
fn spread(all: &[usize]) -> impl Iterator<Item = usize> {
    let few = all.len().min(LOOKED_AT);
    (0..few).map(move |n| all[n * (all.len() - 1) / (few - 1).max(1)])
}

/// A wrong row with everything needed to compute it again.
struct Seen {
    row: Row,
    got: Vec<f64>,
    truth: Vec<f64>,
    error: f64,
    allowed: f64,
    query: Vec<f64>,
    /// All keys of the row's head and their values, whether the mask allows them or not.
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
    scores: Vec<f64>,
    range: Range<usize>,
    problem: Problem,
}

impl Seen {
    fn new(operands: &Operands, measure: &Measure, o: &[f32], at: usize) -> Self {
        let problem = operands.problem;
        let row = measure.rows()[at];
        let bound = measure.row_bound(at, o);
        let mut query = vec![0.0; problem.head_dim];
        operands.q.view().read_row(row.batch, row.head, row.position, &mut query);
        let len = operands.keys(row.batch);
        let kv_head = row.head / problem.group();
        let descale = f64::from(operands.descales().at(row.batch, kv_head, 0)[0]);
        let query: Vec<f64> = query.into_iter().map(|x| f64::from(x) * descale).collect();
        let (keys, values) = read_head(operands, row.batch, kv_head);
        let scores = keys.iter().map(|key| score(&problem, &query, key, 1.0)).collect();
        Self {
            row,
            got: o[measure.elements(at)].iter().map(|&x| f64::from(x)).collect(),
            truth: measure.truth()[measure.elements(at)].to_vec(),
            error: bound.error,
            allowed: bound.allowed,
            query,
            keys,
            values,
            scores,
            range: problem.mask.keys(row.position, problem.len_q, len),
            problem,
        }
    }

    /// Whether the engine gave this result instead of the truth: it is within the rule's tolerance of it, and much
    /// nearer to it than to the truth.
    fn is(&self, other: &[f64]) -> bool {
        let distance = self.got.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        distance <= self.error / 3.0 && distance <= 4.0 * self.allowed + 0.02 * self.error
    }

    /// Attention on pairs of keys: one gives the score, the other the value.
    fn attend(&self, pairs: impl Iterator<Item = (usize, usize)>) -> Vec<f64> {
        let pairs: Vec<(usize, usize)> = pairs.collect();
        let weights = pairs.iter().map(|&(key, _)| self.scores[key]).collect::<Vec<_>>();
        average(&weights, pairs.iter().map(|&(_, value)| &self.values[value][..]), self.got.len())
    }

    /// Attention on a range of keys.
    fn on(&self, range: Range<usize>) -> Vec<f64> {
        self.attend(range.map(|key| (key, key)))
    }

    /// Attention with scores that are multiplied once more.
    fn scaled(&self, factor: f64) -> Vec<f64> {
        let scores: Vec<f64> = self
            .range
            .clone()
            .map(|key| score(&self.problem, &self.query, &self.keys[key], factor))
            .collect();
        average(&scores, self.range.clone().map(|key| &self.values[key][..]), self.got.len())
    }
}

fn read_head(operands: &Operands, b: usize, kv_head: usize) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let Problem { head_dim, head_dim_v, .. } = operands.problem;
    let descales = operands.descales();
    let read = |tensor: &crate::guarded::Guarded, width: usize, of: usize| {
        let view = tensor.view();
        (0..operands.keys(b))
            .map(|s| {
                let mut row = vec![0.0; width];
                view.read_row(b, kv_head, s, &mut row);
                let descale = descales.at(b, kv_head, operands.problem.descale_block(s))[of];
                row.into_iter().map(|x| f64::from(x) * f64::from(descale)).collect()
            })
            .collect()
    };
    (read(&operands.k, head_dim, 1), read(&operands.v, head_dim_v, 2))
}

fn score(problem: &Problem, query: &[f64], key: &[f64], factor: f64) -> f64 {
    let dot: f64 = query.iter().zip(key).map(|(a, b)| a * b).sum();
    let scaled = dot * f64::from(problem.scale) * factor;
    problem.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh())
}

/// The average of values by the softmax of scores; zeros without any.
fn average<'a>(scores: &[f64], values: impl Iterator<Item = &'a [f64]>, width: usize) -> Vec<f64> {
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    let mut out = vec![0.0; width];
    for (score, value) in scores.iter().zip(values) {
        let weight = (score - most).exp();
        sum += weight;
        out.iter_mut().zip(value).for_each(|(out, x)| *out += weight * x);
    }
    if sum > 0.0 {
        for x in &mut out {
            *x /= sum;
        }
    }
    out
}

/// Whether one change to every row gives what the engine gave.
fn all_are(rows: &[Seen], other: impl Fn(&Seen) -> Vec<f64>) -> bool {
    rows.iter().all(|row| row.is(&other(row)))
}

/// Weights that do not depend on the scores, or scores or outputs that are multiplied by a wrong number.
fn scale(rows: &[Seen]) -> Option<Diagnosis> {
    if all_are(rows, |row| row.scaled(0.0)) {
        let why = "every key has the same weight: the scores are not used";
        return Some(Diagnosis::new(Kind::Scale, why));
    }
    let pairs = || rows.iter().flat_map(|row| row.got.iter().zip(&row.truth));
    let gain = pairs().map(|(a, b)| a * b).sum::<f64>() / pairs().map(|(_, b)| b * b).sum::<f64>();
    if all_are(rows, |row| row.truth.iter().map(|x| x * gain).collect()) {
        let why = format!(
            "the output is {gain:.4} times what it should be: a wrong sum to divide by, or a rescaling that is missing"
        );
        return Some(Diagnosis::new(Kind::Scale, why));
    }
    let factor = best_factor(rows);
    all_are(rows, |row| row.scaled(factor)).then(|| {
        let why = format!("the scores are {factor:.4} times what they should be: a wrong scale");
        Diagnosis::new(Kind::Scale, why)
    })
}

/// The factor of the scores that brings the rows nearest to what the engine gave: the best of a coarse grid, refined.
/// One row is not enough, since a row with few keys may give the same result for many factors.
fn best_factor(rows: &[Seen]) -> f64 {
    let distance = |power: f64| {
        let of = |row: &Seen| {
            let other = row.scaled(power.exp2());
            row.got.iter().zip(other).map(|(a, b)| (a - b).powi(2)).sum::<f64>()
        };
        rows.iter().map(of).sum::<f64>()
    };
    let (mut centre, mut step) = (0.0, 0.25);
    let grid = (-24..=24).map(|n| f64::from(n) * step);
    if let Some(best) = grid.min_by(|&a, &b| distance(a).total_cmp(&distance(b))) {
        centre = best;
    }
    for _ in 0..24 {
        step /= 2.0;
        let near = [centre - step, centre, centre + step];
        centre = near.into_iter().min_by(|&a, &b| distance(a).total_cmp(&distance(b))).unwrap_or(centre);
    }
    centre.exp2()
}

/// Keys too many or too few at either end of what the mask allows.
fn mask(rows: &[Seen], problem: &Problem) -> Option<Diagnosis> {
    let all = |row: &Seen| 0..row.keys.len();
    let masked = rows.iter().any(|row| row.range != all(row));
    if masked && all_are(rows, |row| row.on(all(row))) {
        return Some(Diagnosis::new(Kind::Mask, "every key is seen: the mask is not applied"));
    }
    if let Some(other) = match problem.mask {
        Mask::Causal => Some(Mask::CausalTopLeft),
        Mask::CausalTopLeft => Some(Mask::Causal),
        _ => None,
    } && problem.len_q != problem.len_k
        && all_are(rows, |row| row.on(other.keys(row.row.position, problem.len_q, row.keys.len())))
    {
        return Some(Diagnosis::new(Kind::Mask, format!("the mask is {other}, aligned to the other corner")));
    }
    for ((first, last), words) in [
        ((0, 1), "one key too many behind the last one: the mask is off by one"),
        ((0, -1), "the last key is missing: the mask, or the number of keys, is off by one"),
        ((-1, 0), "one key too many before the first one: the window is off by one"),
        ((1, 0), "the first key is missing: the window is off by one"),
    ] {
        let shifted = |row: &Seen| -> Option<Range<usize>> {
            let range = row.range.start.checked_add_signed(first)?..row.range.end.checked_add_signed(last)?;
            (range.start <= range.end && range.end <= row.keys.len()).then_some(range)
        };
        if rows.iter().all(|row| shifted(row).is_some_and(|range| row.is(&row.on(range)))) {
            return Some(Diagnosis::new(Kind::Mask, words));
        }
    }
    None
}

/// K and V swapped, or taken from another head.
fn exchanged(rows: &[Seen], operands: &Operands) -> Option<Diagnosis> {
    let problem = operands.problem;
    if problem.head_dim == problem.head_dim_v
        && all_are(rows, |row| {
            let keys = || row.range.clone();
            let scores: Vec<f64> =
                keys().map(|key| score(&problem, &row.query, &row.values[key], 1.0)).collect();
            average(&scores, keys().map(|key| &row.keys[key][..]), row.got.len())
        })
    {
        return Some(Diagnosis::new(Kind::Operands, "k and v are swapped"));
    }
    // The kv head that each row was computed with, if there is one.
    let heads = rows.iter().map(|row| {
        (0..problem.heads_kv).find(|&head| {
            let (keys, values) = read_head(operands, row.row.batch, head);
            let scores: Vec<f64> =
                row.range.clone().map(|key| score(&problem, &row.query, &keys[key], 1.0)).collect();
            row.is(&average(&scores, row.range.clone().map(|key| &values[key][..]), row.got.len()))
        })
    });
    let heads: Vec<usize> = heads.collect::<Option<_>>()?;
    let (first, head) = (rows[0].row.head, heads[0]);
    let why = format!(
        "k and v are those of another head: query head {first} reads kv head {head} rather than {}",
        first / problem.group()
    );
    Some(Diagnosis::new(Kind::Place, why))
}

/// Right rows in wrong places.
fn misplaced(rows: &[Seen], measure: &Measure) -> Option<Diagnosis> {
    let width = rows[0].got.len();
    let truths = || measure.truth().chunks_exact(width).zip(measure.rows());
    let found = |row: &Seen| truths().find(|(truth, of)| **of != row.row && row.is(truth)).map(|(_, of)| *of);
    let found: Vec<Row> = rows.iter().map(found).collect::<Option<_>>()?;
    let (here, from) = (rows[0].row, found[0]);
    let why = format!("right rows in wrong places: {here} holds the result of {from}");
    Some(Diagnosis::new(Kind::Place, why))
}

/// What may have happened to one tile of keys.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mishap {
    /// It is missing.
    Dropped,
    /// It is counted twice.
    Doubled,
    /// Its keys are those of the tile before.
    KeysOfBefore,
    /// Its values are those of the tile before.
    ValuesOfBefore,
    /// Its keys and values are those of the tile before.
    BothOfBefore,
}

impl Mishap {
    const ALL: [Mishap; 5] = [
        Mishap::Dropped,
        Mishap::Doubled,
        Mishap::BothOfBefore,
        Mishap::KeysOfBefore,
        Mishap::ValuesOfBefore,
    ];

    /// Attention of a row where this happened to the tile of `size` keys from `first` on.
    fn on(self, row: &Seen, first: usize, size: usize) -> Option<Vec<f64>> {
        let inside = |key: &usize| (first..first + size).contains(key);
        if self != Mishap::Dropped && self != Mishap::Doubled && first < size {
            return None;
        }
        let keys = row.range.clone();
        if !keys.clone().any(|key| inside(&key)) {
            return None;
        }
        let of = |key: usize, here: bool| if here && inside(&key) { key - size } else { key };
        Some(match self {
            Mishap::Dropped => row.attend(keys.filter(|key| !inside(key)).map(|key| (key, key))),
            Mishap::Doubled => {
                let again = keys.clone().filter(inside);
                row.attend(keys.chain(again).map(|key| (key, key)))
            }
            Mishap::KeysOfBefore => row.attend(keys.map(|key| (of(key, true), key))),
            Mishap::ValuesOfBefore => row.attend(keys.map(|key| (key, of(key, true)))),
            Mishap::BothOfBefore => row.attend(keys.map(|key| (of(key, true), of(key, true)))),
        })
    }

    fn words(self, keys: &Range<usize>) -> String {
        let (first, last) = (keys.start, keys.end - 1);
        match self {
            Mishap::Dropped => format!("keys {first} to {last} are missing: a tile is dropped"),
            Mishap::Doubled => format!("keys {first} to {last} are counted twice: a tile is read again"),
            Mishap::KeysOfBefore => {
                format!(
                    "for keys {first} to {last} the scores of the tile before are used: a tile of k is read twice"
                )
            }
            Mishap::ValuesOfBefore => {
                format!(
                    "keys {first} to {last} weigh the values of the tile before: a tile of v is read twice"
                )
            }
            Mishap::BothOfBefore => {
                format!("keys {first} to {last} are those of the tile before: a tile is read twice")
            }
        }
    }
}

/// One tile of keys that is missing, doubled or replaced; the same for all rows, or one per row.
fn tile(rows: &[Seen]) -> Option<Diagnosis> {
    // The tiles that would explain a row, by what happened, size and place.
    let explain = |row: &Seen| -> BTreeSet<(Mishap, usize, usize)> {
        let len = row.keys.len();
        let mut found = BTreeSet::new();
        for mishap in Mishap::ALL {
            for size in TILES.into_iter().filter(|&size| size < len && len / size < MOST_TILES) {
                for first in (0..len).step_by(size) {
                    if mishap.on(row, first, size).is_some_and(|other| row.is(&other)) {
                        found.insert((mishap, size, first));
                    }
                }
            }
        }
        found
    };
    let explained: Vec<BTreeSet<(Mishap, usize, usize)>> = rows.iter().map(explain).collect();
    let common = explained.iter().skip(1).fold(explained[0].clone(), |common, next| &common & next);
    let keys = |first: usize, size: usize, row: &Seen| first..(first + size).min(row.keys.len());
    if let Some(&(mishap, size, first)) =
        common.iter().min_by_key(|(mishap, size, _)| (*mishap, usize::MAX - size))
    {
        return Some(Diagnosis::new(Kind::Tile, mishap.words(&keys(first, size, &rows[0]))));
    }
    // Each row may have lost a tile of its own, such as the last one that a causal mask leaves it.
    let kinds = |found: &BTreeSet<(Mishap, usize, usize)>| -> BTreeSet<(Mishap, usize)> {
        found.iter().map(|&(mishap, size, _)| (mishap, size)).collect()
    };
    let shared = explained.iter().map(kinds).reduce(|shared, next| &shared & &next)?;
    let &(mishap, size) = shared.iter().max_by_key(|(_, size)| *size)?;
    let &(_, _, first) = explained[0].iter().find(|found| (found.0, found.1) == (mishap, size))?;
    let why = format!(
        "each row has a tile of {size} keys of its own; query {}: {}",
        rows[0].row.position,
        mishap.words(&keys(first, size, &rows[0]))
    );
    Some(Diagnosis::new(Kind::Tile, why))
}

/// The same number added to every element.
fn offset(rows: &[Seen]) -> Option<Diagnosis> {
    let differences = || rows.iter().flat_map(|row| row.got.iter().zip(&row.truth).map(|(a, b)| a - b));
    let mean = differences().sum::<f64>() / differences().count() as f64;
    all_are(rows, |row| row.truth.iter().map(|x| x + mean).collect())
        .then(|| Diagnosis::new(Kind::Bias, format!("{mean:+.3e} is added to every element")))
}

/// The most elements that are searched for a bias.
const MANY: usize = 1 << 16;

/// Errors that point one way far more often than by chance: towards zero, away from it, down or up.
fn leaning(measure: &Measure, got: &[f32]) -> Option<Diagnosis> {
    let errors: Vec<(f64, f64)> = (0..)
        .zip(got.iter().zip(measure.truth()))
        .step_by((got.len() / MANY).max(1))
        .map(|(_, (&got, &truth))| (f64::from(got) - truth, truth))
        .filter(|(error, truth)| error.is_finite() && *error != 0.0 && *truth != 0.0)
        .collect();
    if errors.len() < 64 {
        return None;
    }
    let share = |test: fn(&(f64, f64)) -> bool| {
        errors.iter().filter(|error| test(error)).count() as f64 / errors.len() as f64
    };
    let outward = share(|(error, truth)| (*error > 0.0) == (*truth > 0.0));
    let upward = share(|(error, _)| *error > 0.0);
    let (lean, words) = [
        (1.0 - outward, "towards zero: something truncates where it should round"),
        (outward, "away from zero: something rounds outward"),
        (1.0 - upward, "down"),
        (upward, "up"),
    ]
    .into_iter()
    .max_by(|a, b| a.0.total_cmp(&b.0))?;
    (lean > 0.75)
        .then(|| Diagnosis::new(Kind::Bias, format!("{:.0} % of all errors point {words}", lean * 100.0)))
}

/// A wrong lse with a right output.
fn lse_alone(measure: &Measure, lse: &[f32], bad: &[usize]) -> Diagnosis {
    let pairs: Vec<(f64, f64)> = bad.iter().map(|&i| (f64::from(lse[i]), measure.truth()[i])).collect();
    if pairs.iter().any(|(got, truth)| !got.is_finite() && truth.is_finite()) {
        return Diagnosis::new(Kind::NotFinite, "o is right, but lse holds a NaN or an infinity");
    }
    let alike = |of: fn(&(f64, f64)) -> f64| -> Option<f64> {
        let all = pairs.iter().map(of);
        let (low, high) =
            all.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        (bad.len() > 1 && high - low <= 1e-3 * low.abs().max(high.abs())).then(|| f64::midpoint(low, high))
    };
    if let Some(gain) = alike(|(got, truth)| got / truth) {
        let base2 = (gain - std::f64::consts::LOG2_E).abs() < 1e-3;
        let hint = if base2 { ": it is a logarithm to base 2" } else { "" };
        return Diagnosis::new(
            Kind::Scale,
            format!("o is right, but lse is {gain:.4} times what it should be{hint}"),
        );
    }
    match alike(|(got, truth)| got - truth) {
        Some(added) => Diagnosis::new(Kind::Bias, format!("o is right, but {added:+.4} is added to lse")),
        None => Diagnosis::new(Kind::Unknown, "o is right, and lse is wrong without a pattern"),
    }
}

/// What can be said about a result that no usual fault gives: which columns are wrong.
fn unknown(measure: &Measure, got: &[f32], wrong: &[usize]) -> Diagnosis {
    let columns: BTreeSet<usize> = wrong
        .iter()
        .flat_map(|&i| {
            let (row, allowed) = (measure.elements(i), measure.row_bound(i, got).allowed);
            let off = move |i: &usize| (f64::from(got[*i]) - measure.truth()[*i]).abs() > allowed;
            row.clone().filter(off).map(move |i| i - row.start)
        })
        .collect();
    let width = measure.elements(0).len();
    let which =
        if columns.len() == width { "all columns".into() } else { format!("columns {}", ranges(&columns)) };
    Diagnosis::new(Kind::Unknown, format!("no usual fault gives this result; {which} are wrong"))
}

/// Numbers as ranges: 0-3, 7, 9-12 …
pub fn ranges(numbers: &BTreeSet<usize>) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == n => *last = n,
            _ => runs.push((n, n)),
        }
    }
    let shown: Vec<String> = runs
        .iter()
        .take(6)
        .map(|&(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    shown.join(", ") + if runs.len() > 6 { " …" } else { "" }
}

/// The most characters of a map's line.
const MAP_WIDTH: usize = 64;

/// The most lines of a map.
const MAP_LINES: usize = 12;

/// Where bad rows are, as a small map: one line per head, one character for some queries or keys. Equal heads share a
/// line. All rows are of one kind.
pub fn map(problem: &Problem, bad: &[Row]) -> String {
    let kind = bad.first().map_or(Rows::Queries, |row| row.kind);
    let signature = problem.signature();
    let [batch, heads, len, _] =
        signature.iter().find(|tensor| tensor.rows == kind).map_or([0; 4], |tensor| tensor.shape);
    let tile = len.div_ceil(MAP_WIDTH).next_power_of_two().max(1);
    let columns = len.div_ceil(tile);
    let mut counts = vec![vec![0_usize; columns]; batch * heads];
    for row in bad {
        counts[row.batch * heads + row.head][row.position / tile] += 1;
    }
    let draw = |counts: &Vec<usize>| -> String {
        let mark = |(column, &count): (usize, &usize)| match count {
            0 => '.',
            _ if count == tile.min(len - column * tile) => '#',
            _ => '+',
        };
        counts.iter().enumerate().map(mark).collect()
    };
    let name = |first: usize, last: usize| {
        let (batch, head) = (first / heads, first % heads);
        let heads = if first == last { format!("{head}") } else { format!("{head}-{}", last % heads) };
        format!("batch {batch} head {heads}")
    };
    let mut lines: Vec<(usize, usize, String)> = Vec::new();
    for (at, counts) in counts.iter().enumerate() {
        let drawn = draw(counts);
        match lines.last_mut() {
            // Only heads of one batch entry share a line.
            Some((first, last, same)) if *same == drawn && *first / heads == at / heads => *last = at,
            _ => lines.push((at, at, drawn)),
        }
    }
    let [one, many] = kind.words();
    let each = if tile == 1 { format!("a {one}") } else { format!("{tile} {many}") };
    let mut text = format!("bad rows, one character for {each} (. none, + some, # all):");
    let names: Vec<String> =
        lines.iter().take(MAP_LINES).map(|(first, last, _)| name(*first, *last)).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0);
    for (name, (_, _, drawn)) in names.iter().zip(&lines) {
        let _ = write!(text, "\n  {name:<width$}  {drawn}");
    }
    if lines.len() > MAP_LINES {
        let _ = write!(text, "\n  … and {} lines more", lines.len() - MAP_LINES);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guarded::Arrangement;
    use crate::inputs::Distribution;
    use flashcore::DType;

    #[test]
    fn an_output_other_than_o_is_diagnosed_by_what_it_looks_like() {
        let problem: Problem = "2x4/2x5/7x8/6 f16".parse().unwrap();
        let operands = Operands::draw(problem, None, Arrangement::Bhsd, Distribution::Normal, 3);
        let yardstick = crate::rule::tests::like_gradients(&problem);
        let diagnosed = |change: fn(&mut [f32])| {
            let mut given: Vec<(Name, Vec<f32>)> = [Name::Q, Name::K, Name::V]
                .map(|name| (name, yardstick.of(name).truth().iter().map(|&x| x as f32).collect()))
                .into();
            change(&mut given[1].1[3 * 8..4 * 8]);
            diagnose(&operands, &yardstick, &given, &yardstick.judge(&given))
        };
        assert_eq!(diagnosed(|row| row.fill(0.0)).kind, Kind::Zero);
        assert_eq!(diagnosed(|row| row[2] = f32::NAN).kind, Kind::NotFinite);
        let scaled = diagnosed(|row| row.iter_mut().for_each(|x| *x *= 0.125));
        assert_eq!(scaled.kind, Kind::Scale);
        assert!(scaled.why.contains("0.1250 times"), "{}", scaled.why);
        let unknown = diagnosed(|row| row[2..5].fill(-7.0));
        assert_eq!(unknown.kind, Kind::Unknown);
        assert!(unknown.why.contains("columns 2-4 are wrong"), "{}", unknown.why);
    }

    #[test]
    fn numbers_read_as_ranges() {
        let of = |numbers: &[usize]| ranges(&numbers.iter().copied().collect());
        assert_eq!(of(&[0, 1, 2, 3, 7, 9, 10]), "0-3, 7, 9-10");
        assert_eq!(of(&[0, 2, 4, 6, 8, 10, 12, 14]), "0, 2, 4, 6, 8, 10 …");
    }

    #[test]
    fn a_map_shows_which_heads_and_queries_are_bad() {
        let problem = Problem::new(2, 3, 100, 8, DType::F16);
        let row = Row::query;
        let mut bad: Vec<Row> = (64..100).map(|query| row(0, 1, query)).collect();
        bad.push(row(1, 0, 3));
        let text = map(&problem, &bad);
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        assert!(lines[0].contains("2 queries"), "{text}");
        assert_eq!(lines[1], format!("  batch 0 head 0    {}", ".".repeat(50)));
        assert_eq!(lines[2], format!("  batch 0 head 1    {}{}", ".".repeat(32), "#".repeat(18)));
        assert_eq!(lines[4], format!("  batch 1 head 0    .+{}", ".".repeat(48)));
        assert_eq!(lines[5], format!("  batch 1 head 1-2  {}", ".".repeat(50)));
    }

    #[test]
    fn a_map_of_keys_has_a_line_per_kv_head() {
        let problem = Problem::new(1, 4, 100, 8, DType::F16).with_kv(2, 3);
        let text = map(&problem, &[Row { kind: Rows::Keys, ..Row::query(0, 1, 2) }]);
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert!(text.contains("one character for a key"), "{text}");
        assert_eq!(lines, ["  batch 0 head 0  ...", "  batch 0 head 1  ..#"]);
    }

    #[test]
    fn a_map_of_many_heads_stays_small() {
        let problem = Problem::new(1, 64, 8192, 8, DType::F16);
        let bad: Vec<Row> = (0..64).map(|head| Row::query(0, head, head * 128)).collect();
        let text = map(&problem, &bad);
        assert_eq!(text.lines().count(), MAP_LINES + 2);
        assert!(
            text.lines().all(|line| line.chars().count() < 100) && text.contains("128 queries"),
            "{text}"
        );
    }
}
