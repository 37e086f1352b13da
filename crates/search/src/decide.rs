//! The rule that a candidate is accepted by.

use serde::{Deserialize, Serialize};

use flashcore_judge::stats::{self, Interval, VERDICT_LEVEL};

/// When a candidate is better than what it is to replace.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// How much faster it must be: 0.03 for 3 %.
    pub gain: f64,
    /// In how many of the target cases it must win.
    pub cases: usize,
}

impl Default for Rule {
    fn default() -> Self {
        Self { gain: 0.03, cases: 2 }
    }
}

/// A candidate beside the incumbent in one case.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Standing {
    /// Which case.
    pub case: usize,
    /// The candidate's median, in microseconds.
    pub us: f64,
    /// The incumbent's.
    pub incumbent_us: f64,
    /// How many times faster the candidate is, by the medians.
    pub speed_up: f64,
    /// Its interval; absent where there were too few rounds.
    pub interval: Interval,
    /// Rounds.
    pub rounds: usize,
}

impl Standing {
    /// From times of one race, one per round each; none with fewer than five rounds.
    pub fn of(case: usize, incumbent: &[f64], candidate: &[f64]) -> Option<Self> {
        let ratio = stats::median_ratio(incumbent, candidate, VERDICT_LEVEL)?;
        Some(Self {
            case,
            us: stats::median(candidate)?,
            incumbent_us: stats::median(incumbent)?,
            speed_up: ratio.estimate,
            interval: ratio.interval,
            rounds: incumbent.len().min(candidate.len()),
        })
    }
}

impl Rule {
    /// Whether the candidate wins a case: faster by the gain, and with confidence not slower.
    pub fn wins(&self, standing: &Standing) -> bool {
        standing.speed_up >= 1.0 + self.gain && standing.interval.low > 1.0
    }

    /// The cases that are won, if they are enough to accept the candidate.
    pub fn accepts(&self, standings: &[Standing]) -> Option<Vec<usize>> {
        let won: Vec<usize> =
            standings.iter().filter(|standing| self.wins(standing)).map(|standing| standing.case).collect();
        (won.len() >= self.cases).then_some(won)
    }

    /// The score that ranks candidates: the speed-up that is reached in as many cases as must be won.
    pub fn score(&self, speed_ups: &[f64]) -> Option<f64> {
        let mut speed_ups = speed_ups.to_vec();
        speed_ups.sort_by(|a, b| b.total_cmp(a));
        speed_ups.get(self.cases.max(1) - 1).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_judge::rng::Rng;

    fn noisy(rng: &mut Rng, rounds: usize, median: f64, spread: f64) -> Vec<f64> {
        (0..rounds).map(|_| median * (spread * rng.normal()).exp()).collect()
    }

    #[test]
    fn three_percent_in_two_cases_are_accepted_and_in_one_are_not() {
        let rule = Rule::default();
        let mut rng = Rng::new(1);
        let mut standing = |case, speed_up: f64| {
            let (incumbent, candidate) =
                (noisy(&mut rng, 40, 100.0, 0.005), noisy(&mut rng, 40, 100.0 / speed_up, 0.005));
            Standing::of(case, &incumbent, &candidate).unwrap()
        };
        assert_eq!(rule.accepts(&[standing(0, 1.05), standing(1, 1.0), standing(2, 1.06)]), Some(vec![0, 2]));
        assert_eq!(rule.accepts(&[standing(0, 1.5), standing(1, 1.0)]), None);
        assert_eq!(rule.accepts(&[standing(0, 1.02), standing(1, 1.02)]), None);
    }

    #[test]
    fn a_gain_that_the_interval_does_not_bear_out_is_none() {
        let standing = Standing {
            case: 0,
            us: 90.0,
            incumbent_us: 100.0,
            speed_up: 1.11,
            interval: Interval { low: 0.99, high: 1.2, level: VERDICT_LEVEL },
            rounds: 5,
        };
        assert!(!Rule::default().wins(&standing));
    }

    #[test]
    fn equals_are_hardly_ever_accepted_by_luck_however_noisy_the_clock() {
        let rule = Rule::default();
        let mut rng = Rng::new(9);
        let accepted = (0..400)
            .filter(|_| {
                let mut standing = |case| {
                    let (a, b) = (noisy(&mut rng, 20, 100.0, 0.1), noisy(&mut rng, 20, 100.0, 0.1));
                    Standing::of(case, &a, &b).unwrap()
                };
                let (first, second) = ([standing(0), standing(1)], [standing(0), standing(1)]);
                rule.accepts(&first).is_some() && rule.accepts(&second).is_some()
            })
            .count();
        assert_eq!(accepted, 0);
    }

    #[test]
    fn the_score_is_the_speed_up_of_the_last_case_that_must_be_won() {
        let rule = Rule::default();
        assert_eq!(rule.score(&[1.2, 0.9, 1.1]), Some(1.1));
        assert_eq!(rule.score(&[1.2]), None);
        assert_eq!(Rule { cases: 1, ..rule }.score(&[0.9, 1.2]), Some(1.2));
    }
}
