//! Statistics of timings: quantiles, bootstrap intervals, and verdicts that say how sure they are.
//!
//! Times are skewed and have outliers, so everything here uses medians and takes its uncertainty from
//! resampling. Two things are compared by the ratio of their medians over the rounds in which both ran:
//! resampling rounds rather than samples keeps times together that were measured under the same conditions.

use serde::{Deserialize, Serialize};

use crate::rng::Rng;

/// Resamples of a bootstrap: the ends of a 99 % interval rest on ten of them each.
const RESAMPLES: usize = 2000;

/// An interval with the confidence that it has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Its lower end.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
    /// How often intervals made this way contain the truth.
    pub level: f64,
}

/// The quantile `p` of values, interpolated between neighbours; absent without values.
pub fn quantile(values: &[f64], p: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    quantile_of_sorted(&sorted, p)
}

fn quantile_of_sorted(sorted: &[f64], p: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let place = p.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    Some(sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64))
}

/// The median; absent without values.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// Values in rising order, each with its place: the median of a resample is found by counting through them.
struct Ranked(Vec<(f64, usize)>);

impl Ranked {
    fn new(values: &[f64]) -> Self {
        let mut ranked: Vec<(f64, usize)> = values.iter().copied().zip(0..).collect();
        ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self(ranked)
    }

    /// The median of a resample: `drawn` says how often the value of each place is in it, in all as many as there are
    /// values.
    fn median(&self, drawn: &[u32]) -> f64 {
        let half = drawn.len() as u32 / 2;
        let odd = drawn.len() % 2 == 1;
        let mut seen = 0;
        let mut lower = f64::NAN;
        for &(value, place) in &self.0 {
            if seen < half && seen + drawn[place] >= half {
                lower = value;
            }
            seen += drawn[place];
            if seen > half {
                return if odd { value } else { f64::midpoint(lower, value) };
            }
        }
        f64::NAN
    }
}

/// Draws places with replacement, and counts how often each was drawn.
fn draw(drawn: &mut [u32], rng: &mut Rng) {
    drawn.fill(0);
    for _ in 0..drawn.len() {
        drawn[rng.below(drawn.len())] += 1;
    }
}

/// The ends of the middle `level` of a bootstrap distribution in rising order.
fn interval_of_sorted(draws: &[f64], level: f64) -> Interval {
    let end = |p: f64| quantile_of_sorted(draws, p).unwrap_or(f64::NAN);
    Interval { low: end((1.0 - level) / 2.0), high: end(f64::midpoint(1.0, level)), level }
}

/// The bootstrap interval of the median; absent with fewer than five values, which say nothing about spread.
pub fn median_interval(values: &[f64], level: f64) -> Option<Interval> {
    if values.len() < 5 {
        return None;
    }
    let mut rng = Rng::new(values.len() as u64);
    let (ranked, mut drawn) = (Ranked::new(values), vec![0; values.len()]);
    let mut draws: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            draw(&mut drawn, &mut rng);
            ranked.median(&drawn)
        })
        .collect();
    draws.sort_by(f64::total_cmp);
    Some(interval_of_sorted(&draws, level))
}

/// The bootstrap interval of what `of` makes of the means of some columns, whose rows belong together; absent with fewer
/// than five rows.
pub fn mean_interval<const N: usize>(
    columns: &[Vec<f64>; N],
    level: f64,
    of: impl Fn([f64; N]) -> f64,
) -> Option<Interval> {
    let rows = columns.iter().map(Vec::len).min().filter(|&rows| rows >= 5)?;
    let mut rng = Rng::new(rows as u64);
    let mut drawn = vec![0; rows];
    let mut draws: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            draw(&mut drawn, &mut rng);
            let mean = |column: &Vec<f64>| {
                column.iter().zip(&drawn).map(|(x, &times)| x * f64::from(times)).sum::<f64>() / rows as f64
            };
            of(std::array::from_fn(|n| mean(&columns[n])))
        })
        .collect();
    draws.sort_by(f64::total_cmp);
    Some(interval_of_sorted(&draws, level))
}

/// The ratio of two medians with its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Median of the first over median of the second.
    pub estimate: f64,
    /// The bootstrap interval over rounds.
    pub interval: Interval,
}

/// The bootstrap distribution of a ratio of two medians, from which intervals of any level are read.
#[derive(Clone, Debug, PartialEq)]
pub struct RatioDraws {
    estimate: f64,
    /// In rising order.
    draws: Vec<f64>,
}

impl RatioDraws {
    /// For times of the same rounds, one per round each: whole rounds are resampled, so that what slowed both at once
    /// stays together. Absent with fewer than five rounds, or where a median is not positive.
    pub fn paired(numerator: &[f64], denominator: &[f64]) -> Option<Self> {
        let rounds = numerator.len().min(denominator.len());
        Self::of(&numerator[..rounds], &denominator[..rounds], true)
    }

    /// For times of two runs, which have no round in common: each side is resampled on its own.
    pub fn independent(numerator: &[f64], denominator: &[f64]) -> Option<Self> {
        Self::of(numerator, denominator, false)
    }

    fn of(numerator: &[f64], denominator: &[f64], paired: bool) -> Option<Self> {
        if numerator.len().min(denominator.len()) < 5 {
            return None;
        }
        let (above, below) = (median(numerator)?, median(denominator)?);
        if !(above > 0.0 && below > 0.0) {
            return None;
        }
        let mut rng = Rng::new(numerator.len() as u64);
        let (upper, lower) = (Ranked::new(numerator), Ranked::new(denominator));
        let (mut drawn, mut others) = (vec![0; numerator.len()], vec![0; denominator.len()]);
        let mut draws: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                draw(&mut drawn, &mut rng);
                if paired {
                    return upper.median(&drawn) / lower.median(&drawn);
                }
                draw(&mut others, &mut rng);
                upper.median(&drawn) / lower.median(&others)
            })
            .collect();
        draws.sort_by(f64::total_cmp);
        Some(Self { estimate: above / below, draws })
    }

    /// This ratio divided by another that was drawn from other samples.
    pub fn over(&self, other: &Self) -> Self {
        let mut rng = Rng::new(self.draws.len() as u64);
        let mut drawn = |from: &[f64]| from[rng.below(from.len())];
        let mut draws: Vec<f64> = (0..RESAMPLES).map(|_| drawn(&self.draws) / drawn(&other.draws)).collect();
        draws.sort_by(f64::total_cmp);
        Self { estimate: self.estimate / other.estimate, draws }
    }

    /// The ratio with the interval of a level.
    pub fn at(&self, level: f64) -> Ratio {
        Ratio { estimate: self.estimate, interval: interval_of_sorted(&self.draws, level) }
    }
}

/// The ratio of the medians of `numerator` and `denominator`, which hold one time per round each. Absent with fewer
/// than five rounds, or where a median is not positive.
pub fn median_ratio(numerator: &[f64], denominator: &[f64], level: f64) -> Option<Ratio> {
    RatioDraws::paired(numerator, denominator).map(|draws| draws.at(level))
}

/// What a comparison says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Verdict {
    /// Faster, and it may matter.
    Faster,
    /// Slower, and it may matter.
    Slower,
    /// Any difference is smaller than what matters.
    Same,
    /// The samples do not decide.
    Undecided,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Verdict::Faster => "FASTER",
            Verdict::Slower => "SLOWER",
            Verdict::Same => "SAME",
            Verdict::Undecided => "UNDECIDED",
        })
    }
}

/// The smallest difference that matters, unless another is asked for.
pub const MARGIN: f64 = 0.02;

/// How often at most the samples are looked at before the budget ends.
pub const LOOKS: usize = 5;

/// The confidence of the interval that a verdict rests on. The 5 % of error that a reader expects are shared
/// among the looks, since each of them could end the measurement by chance.
pub const VERDICT_LEVEL: f64 = 1.0 - 0.05 / LOOKS as f64;

/// The fewest rounds for a verdict. With five, chance alone gives FASTER in more than 3 of 100 measurements of a thing
/// against itself.
pub const VERDICT_ROUNDS: usize = 6;

/// The verdict on a speed-up, the other's time over ours: `interval` contains it, `margin` is the smallest difference
/// that matters.
///
/// Faster and slower: the interval excludes 1 and reaches the margin. Same: it stays within the margin on both sides.
/// Anything else is undecided.
pub fn verdict(interval: &Interval, margin: f64) -> Verdict {
    let (low, high) = (interval.low, interval.high);
    let (faster, slower) = (1.0 + margin, 1.0 / (1.0 + margin));
    if low > 1.0 && high >= faster {
        Verdict::Faster
    } else if high < 1.0 && low <= slower {
        Verdict::Slower
    } else if low > slower && high < faster {
        Verdict::Same
    } else {
        Verdict::Undecided
    }
}

/// The verdict after this many rounds: undecided before there are enough of them.
pub fn verdict_after(rounds: usize, interval: &Interval, margin: f64) -> Verdict {
    if rounds < VERDICT_ROUNDS { Verdict::Undecided } else { verdict(interval, margin) }
}

/// The geometric mean; absent without values or where one is not positive.
pub fn geometric_mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() || !values.iter().all(|&x| x > 0.0) {
        return None;
    }
    Some((values.iter().map(|x| x.ln()).sum::<f64>() / values.len() as f64).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Realistic times: a floor, a skewed spread, and an occasional outlier.
    fn times(rng: &mut Rng, count: usize, median: f64) -> Vec<f64> {
        (0..count)
            .map(|_| {
                let spread = (0.03 * rng.normal()).exp();
                median * if rng.chance(0.05) { 1.0 + rng.unit() } else { spread }
            })
            .collect()
    }

    /// The true median of `times` with median 1: what 5 % of outliers, all above 1, do to the rest.
    fn true_median() -> f64 {
        median(&times(&mut Rng::new(1), 1_000_001, 1.0)).unwrap()
    }

    #[test]
    fn quantiles_interpolate_between_neighbours() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(quantile(&values, 0.0), Some(1.0));
        assert_eq!(median(&values), Some(2.5));
        assert_eq!(quantile(&values, 1.0), Some(4.0));
        assert!((quantile(&values, 0.9).unwrap() - 3.7).abs() < 1e-12);
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn the_median_of_a_resample_is_that_of_the_values_drawn() {
        let mut rng = Rng::new(12);
        for count in 1..40 {
            let values: Vec<f64> = (0..count).map(|i| f64::from((i * 5) % 7)).collect();
            let mut drawn = vec![0; values.len()];
            draw(&mut drawn, &mut rng);
            let times = |(&value, &times): (&f64, &u32)| vec![value; times as usize];
            let resample: Vec<f64> = values.iter().zip(&drawn).flat_map(times).collect();
            assert_eq!(resample.len(), values.len());
            assert_eq!(Ranked::new(&values).median(&drawn), median(&resample).unwrap());
        }
    }

    #[test]
    fn a_95_percent_interval_of_the_median_holds_the_truth_in_93_to_97_of_100_runs() {
        let truth = true_median();
        for count in [25, 60] {
            let mut rng = Rng::new(2);
            let runs = 1200;
            let held = (0..runs)
                .filter(|_| {
                    let interval = median_interval(&times(&mut rng, count, 1.0), 0.95).unwrap();
                    (interval.low..=interval.high).contains(&truth)
                })
                .count();
            let coverage = held as f64 / f64::from(runs);
            assert!((0.93..=0.97).contains(&coverage), "{coverage} with {count} samples");
        }
    }

    #[test]
    fn a_95_percent_interval_of_a_ratio_holds_the_truth_in_93_to_97_of_100_runs() {
        let mut rng = Rng::new(3);
        let runs = 1000;
        let held = (0..runs)
            .filter(|_| {
                let (a, b) = (times(&mut rng, 40, 1.3), times(&mut rng, 40, 1.0));
                let ratio = median_ratio(&a, &b, 0.95).unwrap().interval;
                (ratio.low..=ratio.high).contains(&1.3)
            })
            .count();
        let coverage = f64::from(held as u32) / f64::from(runs);
        assert!((0.93..=0.97).contains(&coverage), "{coverage}");
    }

    #[test]
    fn an_interval_of_a_quotient_of_means_holds_the_truth_in_most_runs() {
        let mut rng = Rng::new(4);
        let runs = 400;
        let held = (0..runs)
            .filter(|_| {
                let seconds: Vec<f64> = (0..20).map(|_| 1.0 + rng.unit()).collect();
                let joules = seconds.iter().map(|s| s * 700.0 * (0.02 * rng.normal()).exp()).collect();
                let watts = mean_interval(&[joules, seconds], 0.95, |[j, s]| j / s).unwrap();
                (watts.low..=watts.high).contains(&(700.0 * (0.5_f64 * 0.02 * 0.02).exp()))
            })
            .count();
        assert!((0.88..=0.98).contains(&(held as f64 / f64::from(runs))), "{held} of {runs}");
        assert_eq!(mean_interval(&[vec![1.0; 4]], 0.95, |[x]| x), None);
    }

    #[test]
    fn what_the_machine_does_to_both_at_once_does_not_blur_their_ratio() {
        let mut rng = Rng::new(10);
        let load: Vec<f64> = (0..40).map(|_| 1.0 + rng.unit()).collect();
        let with = |times: Vec<f64>| times.iter().zip(&load).map(|(t, l)| t * l).collect::<Vec<f64>>();
        let (a, b) = (with(vec![1.05; 40]), with(vec![1.0; 40]));
        let ratio = median_ratio(&a, &b, 0.95).unwrap();
        assert!((ratio.estimate - 1.05).abs() < 1e-9 && ratio.interval.high - ratio.interval.low < 1e-9);
    }

    #[test]
    fn runs_without_a_common_round_are_drawn_apart_and_their_interval_holds_the_truth() {
        let mut rng = Rng::new(5);
        let runs = 2500;
        let held = (0..runs)
            .filter(|_| {
                let (a, b) = (times(&mut rng, 30, 1.1), times(&mut rng, 45, 1.0));
                let ratio = RatioDraws::independent(&a, &b).unwrap().at(0.95).interval;
                (ratio.low..=ratio.high).contains(&1.1)
            })
            .count();
        let coverage = f64::from(held as u32) / f64::from(runs);
        assert!((0.93..=0.97).contains(&coverage), "{coverage}");
    }

    #[test]
    fn verdicts_follow_from_the_interval_alone() {
        let of = |low, high| verdict(&Interval { low, high, level: 0.99 }, 0.02);
        assert_eq!(of(1.01, 1.05), Verdict::Faster);
        assert_eq!(of(1.5, 1.6), Verdict::Faster);
        assert_eq!(of(0.9, 0.97), Verdict::Slower);
        assert_eq!(of(0.99, 1.01), Verdict::Same);
        assert_eq!(of(1.005, 1.015), Verdict::Same);
        assert_eq!(of(0.97, 1.04), Verdict::Undecided);
        assert_eq!(of(f64::NAN, f64::NAN), Verdict::Undecided);
    }

    #[test]
    fn too_few_samples_give_no_interval_and_nothing_gives_no_mean() {
        assert_eq!(median_interval(&[1.0; 4], 0.95), None);
        assert_eq!(median_ratio(&[1.0; 9], &[1.0; 4], 0.95), None);
        assert_eq!(median_ratio(&[0.0; 9], &[1.0; 9], 0.95), None);
        assert_eq!(geometric_mean(&[]), None);
        assert_eq!(geometric_mean(&[1.0, 0.0]), None);
        assert!((geometric_mean(&[1.0, 4.0]).unwrap() - 2.0).abs() < 1e-12);
    }
}
