//! A kernel compared with itself, again and again, to test the comparison procedure.

use serde::Serialize;

use super::cells::Cell;
use super::outcome::{Comparison, count_verdicts, pairing};
use crate::timing::{Contender, Effort, measure};

/// The share of measurements in which FASTER, and likewise SLOWER, may be the verdict on a thing compared with itself.
pub const FALSE_POSITIVES: f64 = 0.03;

/// How often a thing is compared with itself, by default.
pub const TIMES: u64 = 100;

/// The result of comparing a thing with itself, again and again.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AgainstItself {
    /// The cell, as `1x8x512x64 f16 causal`.
    pub cell: String,
    /// The factor that one side's times were multiplied by: 1.02 plants a slow-down of 2 %.
    pub handicap: f64,
    /// Measurements.
    pub repetitions: usize,
    /// How often each verdict was given: FASTER, SAME, SLOWER, UNDECIDED.
    pub verdicts: [usize; 4],
    /// How often the 95 % interval held the truth.
    pub held: usize,
    /// Every measurement's comparison, the handicapped side against the other.
    pub comparisons: Vec<Comparison>,
    /// The samples behind each comparison, of the handicapped side and of the other.
    pub samples_us: Vec<[Vec<f64>; 2]>,
    /// The hash of these samples, round by round.
    pub pairing: String,
}

/// How often, and with which slow-down planted in one side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repetitions {
    /// How often.
    pub times: usize,
    /// The factor that one side's times are multiplied by.
    pub handicap: f64,
}

impl AgainstItself {
    /// From comparisons of a thing with itself, with one side's times multiplied by `handicap`.
    pub fn new(cell: String, handicap: f64, comparisons: Vec<Comparison>) -> Self {
        let truth = 1.0 / handicap;
        let holds = |it: &&Comparison| (it.interval.low..=it.interval.high).contains(&truth);
        Self {
            cell,
            handicap,
            repetitions: comparisons.len(),
            verdicts: count_verdicts(comparisons.iter().map(|it| it.verdict)),
            held: comparisons.iter().filter(holds).count(),
            comparisons,
            samples_us: Vec::new(),
            pairing: String::new(),
        }
    }

    /// From the samples of every measurement, the handicapped side's first; absent where one has too few.
    pub fn of(cell: String, handicap: f64, samples_us: Vec<[Vec<f64>; 2]>, margin: f64) -> Option<Self> {
        let compared = |[ours, other]: &[Vec<f64>; 2]| Comparison::of(ours, "itself", other, margin);
        let comparisons = samples_us.iter().map(compared).collect::<Option<_>>()?;
        let sides =
            [0, 1].map(|side: usize| samples_us.iter().flat_map(|pair| &pair[side]).copied().collect());
        let [ours, other]: [Vec<f64>; 2] = sides;
        let pairing = pairing(&[("flashcore", &ours), ("itself", &other)]);
        Some(Self { samples_us, pairing, ..Self::new(cell, handicap, comparisons) })
    }

    /// Measures both sides, which are the same thing, again and again, each time by the whole procedure. Stops early,
    /// with what there is, when `stop` says so.
    pub(super) fn measure(
        cell: &Cell,
        Repetitions { times, handicap }: Repetitions,
        [ours, other]: [Box<dyn Contender + '_>; 2],
        effort: &Effort,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, String> {
        let side = |contender, name, factor| Box::new(Handicapped { contender, name, factor });
        let mut sides: [Box<dyn Contender + '_>; 2] =
            [side(ours, "flashcore", handicap), side(other, "itself", 1.0)];
        let mut taken = Vec::new();
        while taken.len() < times && !stop() {
            progress(taken.len());
            let mut samples = measure(&mut sides, effort, stop, &mut |_, _| {});
            if stop() {
                break;
            }
            if let Some(why) = samples.iter().find_map(|samples| samples.failure.clone()) {
                return Err(why);
            }
            taken.push([0, 1].map(|side: usize| std::mem::take(&mut samples[side].times)));
        }
        let too_few = || "fewer than five rounds say nothing: give --samples 5 or more".into();
        Self::of(cell.label(), handicap, taken, effort.margin).ok_or_else(too_few)
    }

    /// Whether the procedure keeps its promise. Without a handicap: FASTER and SLOWER within their error rate (or once,
    /// where that is less than one). With one: SLOWER in nine of ten, and never FASTER.
    pub fn passed(&self) -> bool {
        let [faster, _, slower, _] = self.verdicts;
        let most = ((self.repetitions as f64 * FALSE_POSITIVES) as usize).max(1);
        if self.handicap > 1.0 {
            faster == 0 && slower * 10 >= self.repetitions * 9
        } else {
            faster <= most && slower <= most
        }
    }
}

/// A contender whose times are multiplied by a number, to plant a known slow-down.
struct Handicapped<'a> {
    contender: Box<dyn Contender + 'a>,
    name: &'static str,
    factor: f64,
}

impl Contender for Handicapped<'_> {
    fn name(&self) -> String {
        self.name.into()
    }

    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String> {
        self.contender.sample(warm, calls).map(|us| us * self.factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{Interval, Verdict};

    #[test]
    fn a_thing_against_itself_may_be_called_faster_or_slower_in_3_of_100_measurements() {
        let of = |low: f64, high: f64, verdict| Comparison {
            peer: "itself".into(),
            speed_up: 1.0,
            interval: Interval { low, high, level: 0.95 },
            verdict_interval: Interval { low, high, level: 0.99 },
            verdict,
            margin: 0.02,
        };
        let run = |faster: usize, same: usize| {
            let mut all = vec![of(1.01, 1.05, Verdict::Faster); faster];
            all.extend(vec![of(0.99, 1.01, Verdict::Same); same]);
            AgainstItself::new("cell".into(), 1.0, all)
        };
        let good = run(6, 194);
        assert_eq!((good.verdicts, good.held, good.passed()), ([6, 194, 0, 0], 194, true));
        assert!(!run(7, 193).passed());
        assert!(run(1, 9).passed() && !run(2, 8).passed());
        let slow = |count: usize, others: usize| {
            let mut all = vec![of(0.97, 0.985, Verdict::Slower); count];
            all.extend(vec![of(0.97, 1.01, Verdict::Undecided); others]);
            AgainstItself::new("cell".into(), 1.02, all)
        };
        assert!(slow(9, 1).passed() && !slow(8, 2).passed());
        assert_eq!(slow(9, 1).held, 10, "both hold 1 / 1.02");
    }

    #[test]
    fn a_handicap_makes_a_time_longer_by_just_so_much() {
        struct Steady;
        impl Contender for Steady {
            fn name(&self) -> String {
                "steady".into()
            }

            fn sample(&mut self, _: u32, calls: u32) -> Result<f64, String> {
                if calls > 9 { Err("too many".into()) } else { Ok(50.0) }
            }
        }
        let mut slowed = Handicapped { contender: Box::new(Steady), name: "slowed", factor: 1.02 };
        assert_eq!((slowed.name().as_str(), slowed.sample(1, 1)), ("slowed", Ok(51.0)));
        assert_eq!(slowed.sample(1, 10), Err("too many".into()));
    }
}
