//! Timing: contenders take turns in rounds, in one process group and one state of the machine.
//!
//! In each round every contender is sampled once, and the order rotates by drawn steps, so that what the machine does to
//! one it does to all, and no rhythm of its own falls on the same one again and again. A sample is as many calls as it takes to be well past the clock's resolution. Which clock that is, is the
//! contender's affair: on the CPU it is the **call** clock, what a caller waits for from before the call to after it.

use std::time::{Duration, Instant};

use crate::physics;
use flashcore_judge::rng::Rng;
use flashcore_judge::stats::{self, Interval, LOOKS, RatioDraws, Verdict, verdict};

/// Something that can be put on the clock.
pub trait Contender {
    /// The name in tables and in JSON.
    fn name(&self) -> String;

    /// Makes `warm` calls off the clock and then `calls` on it, and returns the microseconds that one took.
    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String>;
}

/// Somebody who looks at the machine around every round.
pub trait Watch {
    /// Looks now, and says whether something slows the machine down, so that a round that ends now does not count.
    fn is_throttled(&mut self) -> bool;
}

/// Nobody looks.
#[derive(Clone, Copy, Debug)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn is_throttled(&mut self) -> bool {
        false
    }
}

/// How long to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// Rounds, if exactly so many are wanted.
    pub rounds: Option<usize>,
    /// Time for all contenders together; the rounds that are needed at least may take longer.
    pub budget: Duration,
    /// The smallest difference that matters.
    pub margin: f64,
    /// The pause between two contenders' turns.
    pub settle: Duration,
    /// What a sample takes at least.
    pub sample: Duration,
}

/// Rounds before the first look at the samples.
const FIRST_LOOK: usize = 10;
/// Rounds that are needed at least, however long they take.
const FEWEST: usize = stats::VERDICT_ROUNDS;
/// What a sample takes at least by the clock of the CPU.
pub const SAMPLE: Duration = Duration::from_millis(2);
/// Calls of one sample at most.
const MOST_CALLS: u32 = 10_000;
/// How often the number of calls is tried out at most.
const CALIBRATIONS: usize = 4;
/// A sample that is shorter than wanted by no more than this is long enough.
const CLOSE: f64 = 0.8;
/// Calls longer than this need no call before them to wake threads and fill caches.
const LONG_CALL_US: f64 = 50_000.0;
/// How long calls go on before the clock starts after a pause: cores that were idle take a few milliseconds to be as fast as
/// they can be, which short calls would feel more of.
const WAKE_US: f64 = 4_000.0;
/// Between two turns, so that threads of the one before have stopped spinning: OpenMP's wait for more work for
/// about 15 ms before they sleep, and would slow down whoever comes next.
pub const SETTLE: Duration = Duration::from_millis(25);

/// One contender's samples.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples {
    /// The contender's name.
    pub name: String,
    /// Calls in one sample.
    pub calls: u32,
    /// Microseconds per call, one per round.
    pub times: Vec<f64>,
    /// Why it left before the end, if it did.
    pub failure: Option<String>,
}

/// What a measurement gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// Of each contender.
    pub samples: Vec<Samples>,
    /// Rounds that were thrown away and taken again, since the machine was slowed down in them.
    pub retaken: usize,
    /// Rounds that count although the machine was slowed down in them: it did not recover.
    pub throttled: usize,
}

/// Rounds that are taken again at most; a machine that stays slow is measured as it is, and that is said.
const RETAKES: usize = 12;
/// How long a machine that is slowed down is left alone.
const REST: Duration = Duration::from_millis(250);

/// Measures all contenders as [`measure_watched`] does, with nobody watching.
pub fn measure(
    contenders: &mut [Box<dyn Contender + '_>],
    effort: &Effort,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(usize, f64),
) -> Vec<Samples> {
    measure_watched(contenders, effort, &mut Unwatched, stop, progress).samples
}

/// Measures all contenders; the first is the one that the others are compared with. Stops when every comparison has
/// its verdict and its ratio (alone, the median) is known within the margin, when the budget is spent, or when `stop`
/// says so. A round in which `watch` saw the machine slowed down is taken again. `progress` is told the rounds done and
/// the share of the effort that they are.
pub fn measure_watched(
    contenders: &mut [Box<dyn Contender + '_>],
    effort: &Effort,
    watch: &mut dyn Watch,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(usize, f64),
) -> Measurement {
    let mut samples: Vec<Samples> =
        contenders.iter_mut().map(|contender| calibrate(contender.as_mut(), effort.sample)).collect();
    let started = Instant::now();
    let (mut round, mut retaken, mut throttled) = (0, 0, 0);
    let mut order = Order::new(contenders.len());
    watch.is_throttled();
    while !stop() && samples[0].failure.is_none() {
        let first = order.next();
        for turn in 0..contenders.len() {
            let who = (first + turn) % contenders.len();
            let Samples { calls, times, failure, .. } = &mut samples[who];
            if failure.is_some() {
                continue;
            }
            if contenders.len() > 1 {
                std::thread::sleep(effort.settle);
            }
            let warm = effort.warm(times.last().copied());
            match contenders[who].sample(warm, *calls).and_then(physics::time) {
                Ok(time) => times.push(time),
                Err(why) => *failure = Some(why),
            }
        }
        if watch.is_throttled() {
            if retaken < RETAKES && effort.share(round, started.elapsed()) < 1.0 {
                for samples in &mut samples {
                    samples.times.truncate(round);
                }
                retaken += 1;
                std::thread::sleep(REST);
                continue;
            }
            throttled += 1;
        }
        round += 1;
        let share = effort.share(round, started.elapsed());
        progress(round, share);
        let look = effort.rounds.is_none() && is_look(round);
        if share >= 1.0 || (look && settled(&samples, effort.margin)) {
            break;
        }
    }
    Measurement { samples, retaken, throttled }
}

/// Who begins each round: everybody once in as many rounds as there are contenders, in an order that is drawn.
struct Order {
    contenders: usize,
    left: Vec<usize>,
    rng: Rng,
}

impl Order {
    fn new(contenders: usize) -> Self {
        Self { contenders, left: Vec::new(), rng: Rng::new(contenders as u64) }
    }

    fn next(&mut self) -> usize {
        if self.left.is_empty() {
            self.left = (0..self.contenders).collect();
        }
        self.left.swap_remove(self.rng.below(self.left.len()))
    }
}

impl Effort {
    /// How many calls a contender makes before the clock starts, by the time of its last one.
    fn warm(&self, last_us: Option<f64>) -> u32 {
        match last_us {
            Some(time) if time >= LONG_CALL_US => 0,
            Some(time) if !self.settle.is_zero() => {
                (WAKE_US / time).ceil().clamp(1.0, f64::from(MOST_CALLS)) as u32
            }
            _ => 1,
        }
    }

    /// The share of the effort that `round` rounds in a given time are; 1 ends it.
    fn share(&self, round: usize, spent: Duration) -> f64 {
        if let Some(rounds) = self.rounds {
            return round as f64 / rounds as f64;
        }
        if round < FEWEST {
            return 0.0;
        }
        let by_time = spent.as_secs_f64() / self.budget.as_secs_f64();
        by_time.max(round as f64 / (FIRST_LOOK << (LOOKS - 1)) as f64)
    }
}

/// Whether the samples are looked at after this round: 10, 20, 40 and so on.
fn is_look(round: usize) -> bool {
    (0..LOOKS).any(|look| round == FIRST_LOOK << look)
}

/// Finds how many calls make a sample, which also warms everything up. The first call is slower than those after it, so
/// the number is tried out, and corrected where a sample came out too short.
fn calibrate(contender: &mut dyn Contender, least: Duration) -> Samples {
    let mut samples = Samples { name: contender.name(), calls: 1, times: Vec::new(), failure: None };
    for _ in 0..CALIBRATIONS {
        match contender.sample(1, samples.calls).and_then(physics::time) {
            Ok(time) => {
                let needed = least.as_secs_f64() * 1e6 / time.max(0.01);
                if f64::from(samples.calls) >= CLOSE * needed {
                    break;
                }
                samples.calls = (needed.ceil() as u32).clamp(1, MOST_CALLS);
            }
            Err(why) => {
                samples.failure = Some(why);
                break;
            }
        }
    }
    samples
}

/// Whether more samples would not change what is said: every comparison has its verdict, and its ratio (or, alone,
/// the median) is known within the margin.
fn settled(samples: &[Samples], margin: f64) -> bool {
    let narrow = |interval: &Interval| (interval.high - interval.low) / 2.0 <= margin * interval.low;
    let ours = &samples[0].times;
    let peers: Vec<&Samples> = samples[1..].iter().filter(|peer| peer.failure.is_none()).collect();
    if peers.is_empty() {
        return stats::median_interval(ours, 0.95).is_some_and(|interval| narrow(&interval));
    }
    peers.iter().all(|peer| {
        RatioDraws::paired(&peer.times, ours).is_some_and(|draws| {
            let sure = draws.at(stats::VERDICT_LEVEL).interval;
            narrow(&draws.at(0.95).interval) && verdict(&sure, margin) != Verdict::Undecided
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// A contender that keeps no time but says what it takes.
    struct Scripted<'a> {
        name: &'static str,
        log: &'a RefCell<Vec<&'static str>>,
        time: Box<dyn FnMut() -> Result<f64, String> + 'a>,
    }

    impl Contender for Scripted<'_> {
        fn name(&self) -> String {
            self.name.into()
        }

        fn sample(&mut self, _: u32, _: u32) -> Result<f64, String> {
            self.log.borrow_mut().push(self.name);
            (self.time)()
        }
    }

    const LONG: Effort = Effort {
        rounds: None,
        budget: Duration::from_hours(1),
        margin: 0.02,
        settle: Duration::ZERO,
        sample: SAMPLE,
    };

    fn scripted<'a>(
        name: &'static str,
        log: &'a RefCell<Vec<&'static str>>,
        time: impl FnMut() -> Result<f64, String> + 'a,
    ) -> Box<dyn Contender + 'a> {
        Box::new(Scripted { name, log, time: Box::new(time) })
    }

    fn run(contenders: &mut [Box<dyn Contender + '_>], effort: &Effort) -> Vec<Samples> {
        measure(contenders, effort, &|| false, &mut |_, _| {})
    }

    #[test]
    fn after_a_pause_short_calls_go_on_for_a_while_before_they_count() {
        let paused = Effort { settle: SETTLE, ..LONG };
        let warm = |effort: &Effort| [None, Some(10.0), Some(3e3), Some(9e4)].map(|last| effort.warm(last));
        assert_eq!(warm(&LONG), [1, 1, 1, 0]);
        assert_eq!(warm(&paused), [1, 400, 2, 0]);
    }

    #[test]
    fn everybody_begins_equally_often_and_not_in_a_rhythm() {
        let log = RefCell::new(Vec::new());
        let mut contenders = ["a", "b", "c"].map(|name| scripted(name, &log, || Ok(9e4)));
        let samples = run(&mut contenders, &Effort { rounds: Some(60), ..LONG });
        assert!(samples.iter().all(|samples| samples.times.len() == 60 && samples.calls == 1));
        let log = log.borrow();
        // The first three calls find out how many make a sample.
        let rounds: Vec<&[&str]> = log[3..].chunks_exact(3).collect();
        for round in &rounds {
            assert!(["abc", "bca", "cab"].contains(&round.concat().as_str()), "{round:?}");
        }
        let blocks: Vec<String> =
            rounds.chunks_exact(3).map(|block| block.iter().map(|round| round[0]).collect()).collect();
        for block in &blocks {
            assert!(["a", "b", "c"].iter().all(|name| block.contains(name)), "{block}");
        }
        assert!(blocks.iter().any(|block| *block != blocks[0]), "{blocks:?}");
    }

    #[test]
    fn a_short_call_is_repeated_until_the_clock_sees_it() {
        let log = RefCell::new(Vec::new());
        let mut contenders = [scripted("a", &log, || Ok(10.0))];
        assert_eq!(run(&mut contenders, &Effort { rounds: Some(1), ..LONG })[0].calls, 200);
    }

    #[test]
    fn a_slow_first_call_does_not_make_samples_short() {
        let log = RefCell::new(Vec::new());
        let mut calls = 0;
        let mut contenders = [scripted("a", &log, || {
            calls += 1;
            Ok(if calls == 1 { 1000.0 } else { 10.0 })
        })];
        assert_eq!(run(&mut contenders, &Effort { rounds: Some(1), ..LONG })[0].calls, 200);
    }

    #[test]
    fn a_clear_difference_ends_at_the_first_look_and_an_unclear_one_goes_on() {
        let log = RefCell::new(Vec::new());
        let mut rng = Rng::new(1);
        let mut noise = Rng::new(2);
        let mut contenders = [
            scripted("ours", &log, || Ok(1e5 * (0.2 * rng.normal()).exp())),
            scripted("theirs", &log, || Ok(1e5 * (0.2 * noise.normal()).exp())),
        ];
        assert_eq!(run(&mut contenders, &LONG)[0].times.len(), FIRST_LOOK << (LOOKS - 1));
        drop(contenders);
        let mut contenders = [scripted("ours", &log, || Ok(1e5)), scripted("theirs", &log, || Ok(1.5e5))];
        assert_eq!(run(&mut contenders, &LONG)[0].times.len(), FIRST_LOOK);
    }

    #[test]
    fn a_spent_budget_ends_it_but_not_before_there_can_be_a_verdict() {
        let log = RefCell::new(Vec::new());
        let mut contenders = [scripted("a", &log, || Ok(1e5))];
        let effort = Effort { budget: Duration::ZERO, ..LONG };
        assert_eq!(run(&mut contenders, &effort)[0].times.len(), FEWEST);
    }

    #[test]
    fn a_peer_that_fails_leaves_and_the_rest_goes_on() {
        let log = RefCell::new(Vec::new());
        let mut left = 3;
        let mut contenders = [
            scripted("ours", &log, || Ok(1e5)),
            scripted("theirs", &log, move || {
                left -= 1;
                if left > 0 { Ok(2e5) } else { Err("it died".into()) }
            }),
        ];
        let samples = run(&mut contenders, &Effort { rounds: Some(6), ..LONG });
        assert_eq!((samples[0].times.len(), samples[1].times.len()), (6, 1));
        assert_eq!(samples[1].failure.as_deref(), Some("it died"));
    }

    /// Sees a machine that is slowed down at some of the looks.
    struct Scene<F: FnMut(usize) -> bool>(usize, F);

    impl<F: FnMut(usize) -> bool> Watch for Scene<F> {
        fn is_throttled(&mut self) -> bool {
            self.0 += 1;
            (self.1)(self.0 - 1)
        }
    }

    #[test]
    fn a_round_in_which_the_machine_was_slowed_down_is_taken_again_for_everybody() {
        let log = RefCell::new(Vec::new());
        let (mut a, mut b) = (0.0, 0.0);
        let next = |x: &mut f64| {
            *x += 1.0;
            Ok(1e5 + *x)
        };
        let other = next;
        let mut contenders = [scripted("a", &log, || next(&mut a)), scripted("b", &log, || other(&mut b))];
        let effort = Effort { rounds: Some(3), ..LONG };
        // Looks: before all, and after each round; the second round is slow.
        let mut watch = Scene(0, |look| look == 2);
        let got = measure_watched(&mut contenders, &effort, &mut watch, &|| false, &mut |_, _| {});
        assert_eq!((got.retaken, got.throttled), (1, 0));
        for samples in &got.samples {
            // The first call of each went into calibration, the third was thrown away.
            assert_eq!(samples.times, [1e5 + 2.0, 1e5 + 4.0, 1e5 + 5.0], "{}", samples.name);
        }
    }

    #[test]
    fn a_machine_that_stays_slow_is_measured_as_it_is_and_that_is_counted() {
        let log = RefCell::new(Vec::new());
        let mut contenders = [scripted("a", &log, || Ok(1e5))];
        let effort = Effort { rounds: Some(2), ..LONG };
        let got =
            measure_watched(&mut contenders, &effort, &mut Scene(0, |_| true), &|| false, &mut |_, _| {});
        assert_eq!((got.retaken, got.throttled, got.samples[0].times.len()), (RETAKES, 2, 2));
    }

    #[test]
    fn a_time_that_was_not_measured_is_not_taken_for_zero() {
        for nothing in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let log = RefCell::new(Vec::new());
            let mut left = 4;
            let mut contenders = [
                scripted("ours", &log, || Ok(1e5)),
                scripted("theirs", &log, move || {
                    left -= 1;
                    Ok(if left > 0 { 1e5 } else { nothing })
                }),
            ];
            let samples = run(&mut contenders, &Effort { rounds: Some(6), ..LONG });
            assert_eq!((samples[0].times.len(), samples[1].times.len()), (6, 2));
            assert!(samples[1].failure.as_ref().is_some_and(|why| why.contains("no time")), "{samples:?}");
        }
    }

    #[test]
    fn an_interrupt_keeps_what_there_is() {
        let log = RefCell::new(Vec::new());
        let mut contenders = [scripted("a", &log, || Ok(1e5))];
        let samples = measure(&mut contenders, &LONG, &|| log.borrow().len() > 4, &mut |_, _| {});
        assert_eq!(samples[0].times.len(), 4);
    }
}
