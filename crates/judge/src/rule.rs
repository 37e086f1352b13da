//! The tolerance rule: how wrong an engine's result may be.
//!
//! An engine is compared with the f64 oracle, and may be at most **twice as wrong as plain attention of the same
//! precision** (scores and probabilities rounded to the dtype, as an unfused framework keeps them), by maximum,
//! by RMS, and by row, so that one bad row cannot hide among many. lse has a bound of its own. Where plain
//! attention overflows (f16 scores beyond 65504) it measures nothing; for those rows it keeps its scores in f32.
//!
//! # The floor
//!
//! Twice an error that is zero by luck is zero, and every correct engine would fail: the first row of a causal
//! problem has one key, and plain attention returns its value exactly. So each row has a floor, derived from its
//! [`Conditioning`] rather than guessed. A correct engine keeps scores and sums in f32, and may round its
//! probabilities and its output to the dtype. With ε the dtype's epsilon and ε₃₂ that of f32, to first order:
//!
//! - **luck**, which differs from row to row: rounding the output and the probabilities, ε/2 each, moves a row by
//!   at most `ε·magnitude`; summing head_dim products and n keys in f32 moves it by about
//!   `ε₃₂·(√head_dim·sensitivity + √n·magnitude)` (rounding errors add up like a random walk).
//! - **habit**, which is the same in every row: folding the scale into base 2 and dividing at the end costs a few
//!   roundings in f32, `ε₃₂·(4·magnitude + sensitivity)`, and nothing below the smallest subnormal can be held.
//!
//! A row's floor is luck plus habit. Over many rows luck averages out, so the floors of maximum and RMS take luck
//! divided by √n, where n is the effective number of rows, (Σl²)²/Σl⁴, which is 1 when one row outweighs all
//! others. The floor is small: a row of standard normal inputs may be off by ε times its magnitude, where a dropped
//! tile or a wrong scale is off by a hundred times that; and over a whole head it all but vanishes.
//!
//! # NaN and infinity
//!
//! Where the truth is NaN or infinite because an input is, the result must not be finite either: hiding it is as wrong
//! as spreading it. Where the oracle has NaN, NaN or an infinity is right. Where it has an infinity in o, that infinity
//! is right, and so is NaN, since a probability that was rounded to 0 makes 0·∞. A −∞ in lse must be exactly that.

use flashcore::oracle::{self, Reference, Rounding};
use flashcore::{Problem, Tensor};
use serde::Serialize;

use crate::conditioning::{Conditioning, conditioning};
use crate::inputs::smallest_subnormal;

/// One query of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Row {
    /// Batch entry.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query.
    pub query: usize,
}

/// An error with what it is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(into = "WrittenBound")]
pub struct Bound {
    /// The engine's error against the oracle.
    pub error: f64,
    /// The error of plain same-precision attention.
    pub plain: f64,
    /// What the rule allows: twice `plain`, and the floor.
    pub allowed: f64,
}

/// A bound as it is serialised: with the floor, so that what is allowed can be recomputed.
#[derive(Serialize)]
struct WrittenBound {
    error: f64,
    plain: f64,
    floor: f64,
    allowed: f64,
}

impl From<Bound> for WrittenBound {
    fn from(Bound { error, plain, allowed }: Bound) -> Self {
        Self { error, plain, floor: allowed - 2.0 * plain, allowed }
    }
}

impl Bound {
    /// The error as a share of what is allowed; an error of 0 is a share of 0, even where nothing is allowed.
    pub fn share(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.allowed }
    }

    /// Whether the error is within what is allowed. NaN is not.
    pub fn holds(&self) -> bool {
        self.error <= self.allowed
    }
}

/// One element that is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BadElement {
    /// Whether it is of lse rather than of o.
    pub lse: bool,
    /// Its row.
    pub row: Row,
    /// Its column; 0 for lse.
    pub column: usize,
    /// What the oracle says.
    pub expected: f64,
    /// What the engine returned.
    pub actual: f64,
    /// How far it may be off.
    pub allowed: f64,
}

/// What the rule says about one result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judgement {
    /// The largest error of any element.
    pub max: Bound,
    /// The root mean square of all errors.
    pub rms: Bound,
    /// The row with the largest error relative to what it is allowed.
    pub row: Bound,
    /// The lse with the largest error relative to what it is allowed; absent if lse was not wanted.
    pub lse: Option<Bound>,
    /// How many rows were judged.
    pub rows: usize,
    /// The rows that exceed one of their bounds, as indices into the yardstick's rows.
    #[serde(skip)]
    pub bad_rows: Vec<usize>,
    /// The first element that is wrong, or the worst one when only the maximum or RMS bound is exceeded.
    pub first_bad: Option<BadElement>,
}

impl Judgement {
    /// Whether every bound holds.
    pub fn passed(&self) -> bool {
        self.bad_rows.is_empty() && self.max.holds() && self.rms.holds()
    }

    /// The largest share of any bound that the result used.
    pub fn share_used(&self) -> f64 {
        [Some(self.max), Some(self.rms), Some(self.row), self.lse]
            .into_iter()
            .flatten()
            .map(|bound| bound.share())
            .fold(0.0, f64::max)
    }

    /// The engine's largest error as a multiple of plain attention's; absent where plain attention is exact.
    pub fn error_ratio(&self) -> Option<f64> {
        (self.max.plain > 0.0).then(|| self.max.error / self.max.plain)
    }
}

/// What a row may be off by in addition to twice plain attention's error.
#[derive(Clone, Copy, Debug, Default)]
struct Floor {
    luck: f64,
    habit: f64,
    lse: f64,
}

/// The truth about a problem's rows, and how far from it a result may be.
#[derive(Clone, Debug)]
pub struct Yardstick {
    rows: Vec<Row>,
    head_dim_v: usize,
    oracle: Reference,
    plain: Reference,
    floors: Vec<Floor>,
}

impl Yardstick {
    /// For all rows of a problem.
    pub fn new(
        problem: &Problem,
        q: &Tensor<'_>,
        k: &Tensor<'_>,
        v: &Tensor<'_>,
        key_lengths: Option<&[u32]>,
    ) -> Self {
        let oracle = oracle::attention(problem, q, k, v, key_lengths);
        let plain = |rounding| oracle::same_precision(problem, q, k, v, key_lengths, rounding);
        let mut rounded = plain(Rounding::ScoresAndProbabilities);
        let unrounded = plain(Rounding::Probabilities);
        let width = problem.head_dim_v;
        for (i, row) in rounded.o.chunks_exact_mut(width.max(1)).enumerate() {
            if !row.iter().all(|x| x.is_finite()) {
                row.copy_from_slice(&unrounded.o[i * width..][..width]);
            }
        }
        // Where even that overflows, only the floor is allowed.
        for (plain, truth) in rounded.o.iter_mut().zip(&oracle.o) {
            if !plain.is_finite() && truth.is_finite() {
                *plain = *truth;
            }
        }
        let felt = conditioning(problem, q, k, v, key_lengths, &oracle);
        let floors = felt.iter().zip(&oracle.lse).map(|(felt, lse)| floor(problem, felt, *lse)).collect();
        let Problem { batch, heads_q, len_q, .. } = *problem;
        let rows = (0..batch * heads_q * len_q)
            .map(|i| Row { batch: i / (heads_q * len_q), head: i / len_q % heads_q, query: i % len_q })
            .collect();
        // lse is summed from scores in f32 by every engine, so its yardstick is the one that does so too.
        let plain = Reference { o: rounded.o, lse: unrounded.lse };
        Self { rows, head_dim_v: width, oracle, plain, floors }
    }

    /// The same rows as part of a larger problem, where they begin at `first`.
    pub fn at(mut self, first: Row) -> Self {
        for row in &mut self.rows {
            row.batch += first.batch;
            row.head += first.head;
            row.query += first.query;
        }
        self
    }

    /// Several yardsticks as one. Panics unless their rows have one width.
    pub fn join(parts: impl IntoIterator<Item = Yardstick>) -> Option<Self> {
        parts.into_iter().reduce(|mut all, part| {
            assert_eq!(all.head_dim_v, part.head_dim_v, "rows of one width");
            all.rows.extend(part.rows);
            all.oracle.o.extend(part.oracle.o);
            all.oracle.lse.extend(part.oracle.lse);
            all.plain.o.extend(part.plain.o);
            all.plain.lse.extend(part.plain.lse);
            all.floors.extend(part.floors);
            all
        })
    }

    /// The rows that it measures, in the order in which results are given.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The truth.
    pub fn oracle(&self) -> &Reference {
        &self.oracle
    }

    /// The largest error of one row of a result.
    pub fn row_error(&self, i: usize, o: &[f32]) -> f64 {
        let row = i * self.head_dim_v..(i + 1) * self.head_dim_v;
        worst(o[row.clone()].iter().map(|&x| f64::from(x)).zip(&self.oracle.o[row]))
    }

    /// What one row may be off by.
    pub fn row_allowed(&self, i: usize) -> f64 {
        let row = i * self.head_dim_v..(i + 1) * self.head_dim_v;
        let plain = worst(self.plain.o[row.clone()].iter().copied().zip(&self.oracle.o[row]));
        2.0 * plain + self.floors[i].luck + self.floors[i].habit
    }

    /// What rounding alone may move a row by.
    pub fn row_floor(&self, i: usize) -> f64 {
        self.floors[i].luck + self.floors[i].habit
    }

    /// Judges a result: o as rows of head_dim_v, lse as one value per row, both in the order of [`Yardstick::rows`].
    pub fn judge(&self, o: &[f32], lse: Option<&[f32]>) -> Judgement {
        assert_eq!(o.len(), self.oracle.o.len(), "o has one element for each of the oracle's");
        let width = self.head_dim_v.max(1);
        let rows: Vec<(f64, f64)> = o
            .chunks_exact(width)
            .zip(self.oracle.o.chunks_exact(width).zip(self.plain.o.chunks_exact(width)))
            .map(|(got, (truth, plain))| {
                let ours = worst(got.iter().map(|&x| f64::from(x)).zip(truth));
                (ours, worst(plain.iter().copied().zip(truth)))
            })
            .collect();
        let row_bounds: Vec<Bound> = rows
            .iter()
            .zip(&self.floors)
            .map(|(&(error, plain), floor)| Bound {
                error,
                plain,
                allowed: 2.0 * plain + floor.luck + floor.habit,
            })
            .collect();
        let lse_bounds: Option<Vec<Bound>> = lse.map(|lse| {
            assert_eq!(lse.len(), self.rows.len(), "lse has one element per row");
            (0..lse.len())
                .map(|i| {
                    let truth = self.oracle.lse[i];
                    let plain = distance(self.plain.lse[i], truth);
                    let error = distance(f64::from(lse[i]), truth);
                    Bound { error, plain, allowed: 2.0 * plain + self.floors[i].lse }
                })
                .collect()
        });
        let bad_rows: Vec<usize> = (0..self.rows.len())
            .filter(|&i| !row_bounds[i].holds() || lse_bounds.as_ref().is_some_and(|lse| !lse[i].holds()))
            .collect();
        let mut judgement = Judgement {
            max: self.whole(&rows, |errors| errors.fold(0.0, max)),
            rms: self.rms(o),
            row: worst_bound(&row_bounds),
            lse: lse_bounds.as_deref().map(worst_bound),
            rows: self.rows.len(),
            first_bad: None,
            bad_rows,
        };
        if !judgement.passed() {
            judgement.first_bad = self.first_bad(&judgement, o, lse, &row_bounds, lse_bounds.as_deref());
        }
        judgement
    }

    /// A bound over all rows at once.
    fn whole(&self, rows: &[(f64, f64)], over: impl Fn(&mut dyn Iterator<Item = f64>) -> f64) -> Bound {
        let error = over(&mut rows.iter().map(|row| row.0));
        let plain = over(&mut rows.iter().map(|row| row.1));
        let luck = over(&mut self.floors.iter().map(|floor| floor.luck)) / self.carriers().sqrt();
        let habit = over(&mut self.floors.iter().map(|floor| floor.habit));
        Bound { error, plain, allowed: 2.0 * plain + luck + habit }
    }

    fn rms(&self, o: &[f32]) -> Bound {
        let truth = &self.oracle.o;
        let ours = rms(o.iter().zip(truth).map(|(&x, truth)| output_distance(f64::from(x), *truth)));
        let plain = rms(self.plain.o.iter().zip(truth).map(|(x, truth)| output_distance(*x, *truth)));
        let luck = rms(self.floors.iter().map(|floor| floor.luck)) / self.carriers().sqrt();
        let habit = rms(self.floors.iter().map(|floor| floor.habit));
        Bound { error: ours, plain, allowed: 2.0 * plain + luck + habit }
    }

    /// The effective number of rows for luck: all when they are alike, one when it outweighs the others.
    fn carriers(&self) -> f64 {
        let most = self.floors.iter().map(|floor| floor.luck).fold(0.0, f64::max);
        if most == 0.0 {
            return 1.0;
        }
        let squares = || self.floors.iter().map(|floor| (floor.luck / most).powi(2));
        squares().sum::<f64>().powi(2) / squares().map(|x| x * x).sum::<f64>()
    }

    fn first_bad(
        &self,
        judgement: &Judgement,
        o: &[f32],
        lse: Option<&[f32]>,
        row_bounds: &[Bound],
        lse_bounds: Option<&[Bound]>,
    ) -> Option<BadElement> {
        let width = self.head_dim_v;
        let element = |i: usize, column: usize, allowed: f64| BadElement {
            lse: false,
            row: self.rows[i],
            column,
            expected: self.oracle.o[i * width + column],
            actual: f64::from(o[i * width + column]),
            allowed,
        };
        let error = |i: usize| output_distance(f64::from(o[i]), self.oracle.o[i]);
        if let Some(&i) = judgement.bad_rows.first() {
            let allowed = row_bounds[i].allowed;
            let column = (0..width).find(|column| !matches!(error(i * width + column), e if e <= allowed));
            return match (column, lse, lse_bounds) {
                (Some(column), _, _) => Some(element(i, column, allowed)),
                (None, Some(lse), Some(bounds)) => Some(BadElement {
                    lse: true,
                    row: self.rows[i],
                    column: 0,
                    expected: self.oracle.lse[i],
                    actual: f64::from(lse[i]),
                    allowed: bounds[i].allowed,
                }),
                _ => None,
            };
        }
        let worst = (0..o.len()).max_by(|&a, &b| error(a).total_cmp(&error(b)))?;
        Some(element(worst / width, worst % width, judgement.max.allowed))
    }
}

/// The floor of one row; a row without keys has none, its zeros and −∞ are exact.
fn floor(problem: &Problem, row: &Conditioning, lse: f64) -> Floor {
    if row.keys == 0 {
        return Floor::default();
    }
    let epsilon = f64::from(problem.dtype.epsilon());
    let single = f64::from(f32::EPSILON);
    let (keys, head_dim) = (row.keys as f64, problem.head_dim as f64);
    // One that is not finite is right or wrong, never near.
    let lse = if lse.is_finite() { lse.abs() } else { 0.0 };
    let smallest = smallest_subnormal(problem.dtype) + keys * f64::from(f32::from_bits(1));
    Floor {
        luck: epsilon * row.magnitude
            + single * (head_dim.sqrt() * row.sensitivity + keys.sqrt() * row.magnitude),
        habit: single * (4.0 * row.magnitude + row.sensitivity) + smallest,
        lse: single * ((head_dim.sqrt() + 4.0) * row.score_magnitude + 4.0 + keys.sqrt() + lse),
    }
}

/// The distance of two values; 0 for the same infinity, and for anything not finite where the truth is NaN. Infinite
/// where only one is finite.
fn distance(got: f64, truth: f64) -> f64 {
    if got == truth || truth.is_nan() && !got.is_finite() {
        return 0.0;
    }
    let distance = (got - truth).abs();
    if distance.is_nan() { f64::INFINITY } else { distance }
}

/// The same for an element of o, where NaN may stand for an infinity.
fn output_distance(got: f64, truth: f64) -> f64 {
    if truth.is_infinite() && got.is_nan() { 0.0 } else { distance(got, truth) }
}

fn worst<'a>(pairs: impl Iterator<Item = (f64, &'a f64)>) -> f64 {
    pairs.map(|(got, truth)| output_distance(got, *truth)).fold(0.0, f64::max)
}

fn max(a: f64, b: f64) -> f64 {
    a.max(b)
}

/// Root mean square, free of overflow and underflow at the dtypes' extremes.
fn rms(errors: impl Iterator<Item = f64> + Clone) -> f64 {
    let most = errors.clone().fold(0.0, f64::max);
    if most == 0.0 || most.is_infinite() {
        return most;
    }
    let (count, sum) = errors.fold((0_usize, 0.0), |(n, sum), x| (n + 1, sum + (x / most).powi(2)));
    most * (sum / count as f64).sqrt()
}

/// The bound that is most exceeded, or nearest to it.
fn worst_bound(bounds: &[Bound]) -> Bound {
    bounds.iter().copied().max_by(|a, b| a.share().total_cmp(&b.share())).unwrap_or(Bound {
        error: 0.0,
        plain: 0.0,
        allowed: 0.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guarded::Arrangement;
    use crate::inputs::Distribution;
    use crate::operands::Operands;
    use flashcore::{DType, Mask};

    fn yardstick(problem: Problem, inputs: Distribution) -> Yardstick {
        Operands::draw(problem, None, Arrangement::Bhsd, inputs, 8).yardstick()
    }

    /// The truth, rounded to a dtype: what the best engine returns.
    fn best(yardstick: &Yardstick, dtype: DType) -> Vec<f32> {
        yardstick.oracle().o.iter().map(|&x| dtype.round(x as f32)).collect()
    }

    #[test]
    fn the_rounded_truth_is_accepted_on_every_input_and_dtype() {
        for dtype in DType::ALL {
            for inputs in Distribution::ALL {
                let problem = Problem::new(1, 2, 33, 16, dtype).with_mask(Mask::Causal);
                let yardstick = yardstick(problem, inputs);
                let judgement = yardstick.judge(&best(&yardstick, dtype), None);
                assert!(judgement.passed(), "{dtype} {inputs}: {judgement:?}");
            }
        }
    }

    #[test]
    fn an_honest_rounding_is_accepted_where_plain_attention_is_exact_by_luck() {
        // One key: plain attention returns its value, so twice its error is nothing.
        for dtype in DType::ALL {
            let yardstick = yardstick(Problem::new(1, 1, 1, 16, dtype), Distribution::Normal);
            let exact = best(&yardstick, dtype);
            assert_eq!(yardstick.judge(&exact, None).row.plain, 0.0);
            let off = |ulps: f32| -> Vec<f32> {
                exact.iter().map(|&x| x + ulps * dtype.epsilon() * x.abs() / 2.0).collect()
            };
            assert!(yardstick.judge(&off(1.0), None).passed(), "{dtype}");
            // A value that is off by sixteen roundings is not luck.
            assert!(!yardstick.judge(&off(-16.0), None).passed(), "{dtype}");
        }
    }

    #[test]
    fn luck_averages_out_over_many_rows_but_not_over_one_loud_one() {
        let many = yardstick(Problem::new(1, 4, 256, 16, DType::F16), Distribution::Normal);
        let carriers = many.carriers();
        assert!((600.0..=1024.0).contains(&carriers), "{carriers}");
        let mut loud = many;
        loud.floors[77].luck *= 1e6;
        assert!((1.0..1.01).contains(&loud.carriers()));
    }

    #[test]
    fn a_bias_that_no_row_shows_is_seen_by_the_whole() {
        // Every output 2 % too large in bf16: within each row's own floor, but in every row.
        let yardstick = yardstick(Problem::new(1, 4, 512, 64, DType::BF16), Distribution::Normal);
        let biased: Vec<f32> =
            yardstick.oracle().o.iter().map(|&x| DType::BF16.round(x as f32 * 1.02)).collect();
        let judgement = yardstick.judge(&biased, None);
        assert!(judgement.bad_rows.is_empty() && !judgement.rms.holds(), "{judgement:?}");
    }

    #[test]
    fn where_half_precision_scores_overflow_the_yardstick_keeps_them_in_f32() {
        for inputs in [Distribution::OverflowingScores, Distribution::NegativeScores] {
            let yardstick = yardstick(Problem::new(1, 2, 64, 64, DType::F16), inputs);
            assert!(yardstick.plain.o.iter().all(|x| x.is_finite()), "{inputs}");
            assert!(yardstick.judge(&best(&yardstick, DType::F16), None).passed(), "{inputs}");
            assert!(!yardstick.judge(&vec![0.0; 2 * 64 * 64], None).passed(), "{inputs}");
        }
    }

    #[test]
    fn a_row_without_keys_must_be_zeros_and_minus_infinity_exactly() {
        let problem = Problem::new(1, 1, 2, 4, DType::F16).with_kv(1, 1).with_mask(Mask::Causal).with_lse();
        let yardstick = yardstick(problem, Distribution::Normal);
        let (o, lse) = (best(&yardstick, DType::F16), yardstick.oracle().lse[1] as f32);
        assert!(yardstick.judge(&o, Some(&[f32::NEG_INFINITY, lse])).passed());
        assert_eq!(yardstick.judge(&o, Some(&[-1e30, lse])).bad_rows, [0]);
        let mut tiny = o;
        tiny[3] = 1e-30;
        assert_eq!(yardstick.judge(&tiny, Some(&[f32::NEG_INFINITY, lse])).bad_rows, [0]);
    }

    /// A yardstick where one element of an input is NaN or infinite.
    fn with_one_element(operand: usize, at: usize, wild: f32) -> Yardstick {
        let problem = Problem::new(1, 1, 6, 4, DType::F32).with_mask(Mask::Causal).with_lse();
        let mut values = crate::inputs::draw(&problem, Distribution::Normal, 8);
        [&mut values.q, &mut values.k, &mut values.v][operand][at] = wild;
        Operands::with_values(problem, None, Arrangement::Bhsd, &values).yardstick()
    }

    #[test]
    fn a_nan_must_reach_the_rows_that_see_it_and_no_other() {
        for (operand, wild) in [(0, f32::NAN), (1, f32::NAN), (2, f32::NAN), (2, f32::INFINITY)] {
            // Element 1 of row 2: seen by query 2 alone in q, and by queries 2 to 5 in k and v.
            let yardstick = with_one_element(operand, 2 * 4 + 1, wild);
            let o = best(&yardstick, DType::F32);
            let lse: Vec<f32> = yardstick.oracle().lse.iter().map(|&x| x as f32).collect();
            let spoilt: Vec<usize> = (0..24).filter(|&i| !o[i].is_finite()).collect();
            let expected: Vec<usize> = match operand {
                0 => (8..12).collect(),
                1 => (8..24).collect(),
                _ => (8..24).filter(|i| i % 4 == 1).collect(),
            };
            assert_eq!(spoilt, expected, "{operand} {wild}");
            assert!(yardstick.judge(&o, Some(&lse)).passed(), "{operand} {wild}");
            for i in 0..24 {
                let mut other = o.clone();
                other[i] = if spoilt.contains(&i) { 0.0 } else { f32::NAN };
                assert_eq!(yardstick.judge(&other, None).bad_rows, [i / 4], "{operand} {wild} at {i}");
                // The finite elements must be right as well.
                if !spoilt.contains(&i) {
                    other[i] = o[i] * 1.001 + 1e-3;
                    assert_eq!(yardstick.judge(&other, None).bad_rows, [i / 4], "{operand} {wild} at {i}");
                }
            }
        }
    }

    #[test]
    fn an_infinite_key_that_weighs_nothing_leaves_numbers_that_are_judged_as_ever() {
        let yardstick = with_one_element(1, 2 * 4 + 1, f32::INFINITY);
        let o = best(&yardstick, DType::F32);
        let numbers = |row: usize| o[row * 4..][..4].iter().all(|x| x.is_finite());
        let seeing: Vec<bool> = (2..6).map(numbers).collect();
        assert!(seeing.contains(&true) && seeing.contains(&false), "{seeing:?}");
        let judgement = yardstick.judge(&o, None);
        assert!(judgement.passed() && judgement.row.allowed.is_finite(), "{judgement:?}");
        for row in (2..6).filter(|&row| numbers(row)) {
            let mut other = o.clone();
            other[row * 4] += 1e-3;
            assert_eq!(yardstick.judge(&other, None).bad_rows, [row]);
        }
    }

    #[test]
    fn the_first_bad_element_is_the_one_that_is_bad() {
        let yardstick = yardstick(Problem::new(2, 3, 5, 8, DType::F32), Distribution::Normal);
        let mut o = best(&yardstick, DType::F32);
        let index = ((3 + 2) * 5 + 4) * 8 + 6;
        o[index] += 0.5;
        let bad = yardstick.judge(&o, None).first_bad.unwrap();
        assert_eq!((bad.row, bad.column), (Row { batch: 1, head: 2, query: 4 }, 6));
        assert_eq!((bad.expected, bad.actual), (yardstick.oracle().o[index], f64::from(o[index])));
    }
}
