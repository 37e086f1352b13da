//! Timing: contenders take turns in rounds, in one process group and one state of the machine.
//!
//! In each round every contender is sampled once, in an order that is shuffled anew, so that a slow phase of the machine
//! meets all of them, no rhythm of it keeps meeting the same one, and nobody always follows the same other. A sample is
//! as many calls as it takes to be well past the clock's resolution. Each contender brings its clock: on the CPU it is
//! the **call** clock, from before the call to after it.

use std::time::{Duration, Instant};

use crate::physics;
use flashcore_judge::rng::Rng;
use flashcore_judge::stats::{self, Interval, LOOKS, RatioDraws, Verdict, verdict};
use serde::Serialize;

/// Something that can be timed.
pub trait Contender {
    /// The name in tables and in JSON.
    fn name(&self) -> String;

    /// Makes `warm` untimed calls and then `calls` timed ones, and returns the microseconds per call.
    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String>;

    /// What the machine used during the last sample, where a counter tells.
    fn used(&mut self) -> Option<Used> {
        None
    }
}

/// What a machine used between two steps of its energy counter, both during one sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Used {
    /// Millijoules.
    pub mj: u64,
    /// Microseconds from the one step to the other.
    pub us: f64,
    /// The mean of the SM clock in MHz at the steps, where it is told.
    pub sm_clock_mhz: Option<f64>,
}

/// Watches the machine around every round.
pub trait Watch {
    /// Whether something slows the machine down now, so that a round that ends now does not count.
    fn is_throttled(&mut self) -> bool;
}

/// No watching.
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
    /// The number of rounds, if it is fixed.
    pub rounds: Option<usize>,
    /// Time for all contenders together; the fewest rounds needed may take longer.
    pub budget: Duration,
    /// The smallest difference that matters.
    pub margin: f64,
    /// The pause between two contenders' turns.
    pub settle: Duration,
    /// The shortest time of a sample.
    pub sample: Duration,
}

/// Rounds before the first look at the samples.
const FIRST_LOOK: usize = 10;
/// The fewest rounds, however long they take.
const FEWEST: usize = stats::VERDICT_ROUNDS;
/// The shortest time of a sample on the CPU.
pub const SAMPLE: Duration = Duration::from_millis(2);
/// The most calls per sample.
pub const MOST_CALLS: u32 = 100_000;
/// The most attempts to find the number of calls.
const CALIBRATIONS: usize = 4;
/// A sample of at least this share of the wanted time is long enough.
const CLOSE: f64 = 0.8;
/// Calls longer than this need no warm-up call to wake threads and fill caches.
const LONG_CALL_US: f64 = 50_000.0;
/// How long to warm up after a pause: idle cores take a few milliseconds to reach full speed, which short calls would
/// feel more of.
const WAKE_US: f64 = 4_000.0;
/// The pause between two turns, so that threads of the one before have stopped spinning: OpenMP's threads wait for
/// about 15 ms before they sleep, and would slow down the next contender.
pub const SETTLE: Duration = Duration::from_millis(25);

/// One contender's samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples {
    /// The contender's name.
    pub name: String,
    /// Calls in one sample.
    pub calls: u32,
    /// Microseconds per call, one value per round.
    pub times: Vec<f64>,
    /// What the machine used during each of them, where a counter tells.
    pub used: Vec<Option<Used>>,
    /// Why it left before the end, if it did.
    pub failure: Option<String>,
}

/// What a measurement gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// One entry per contender.
    pub samples: Vec<Samples>,
    /// Rounds that were discarded and repeated because the machine was slowed down in them.
    pub retaken: usize,
    /// Rounds that count although the machine was slowed down in them: it did not recover.
    pub throttled: usize,
}

/// The most rounds that are repeated; a machine that stays slow is measured as it is, and the result says so.
const RETAKES: usize = 12;
/// How long a machine that is slowed down is left alone.
const REST: Duration = Duration::from_millis(250);

/// Measures all contenders as [`measure_watched`] does, without watching the machine.
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
/// says so. A round in which `watch` saw the machine slowed down is repeated. `progress` is told the rounds done and
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
    let mut orders = Orders::new(contenders.len());
    let mut order = orders.draw();
    watch.is_throttled();
    while !stop() && samples[0].failure.is_none() {
        for &who in &order {
            let Samples { calls, times, used, failure, .. } = &mut samples[who];
            if failure.is_some() {
                continue;
            }
            if contenders.len() > 1 {
                std::thread::sleep(effort.settle);
            }
            let warm = effort.warm(times.last().copied());
            match contenders[who].sample(warm, *calls).and_then(physics::time) {
                Ok(time) => {
                    times.push(time);
                    used.push(contenders[who].used());
                }
                Err(why) => *failure = Some(why),
            }
        }
        if watch.is_throttled() {
            if retaken < RETAKES && effort.share(round, started.elapsed()) < 1.0 {
                for samples in &mut samples {
                    samples.times.truncate(round);
                    samples.used.truncate(round);
                }
                retaken += 1;
                std::thread::sleep(REST);
                continue;
            }
            throttled += 1;
        }
        round += 1;
        order = orders.draw();
        let share = effort.share(round, started.elapsed());
        progress(round, share);
        let look = effort.rounds.is_none() && is_look(round);
        if share >= 1.0 || (look && settled(&samples, effort.margin)) {
            break;
        }
    }
    Measurement { samples, retaken, throttled }
}

/// In which order the contenders take their turns in each round, by a seed that is their number: the same on every
/// machine. In n rounds each of the n contenders begins once, those after it come in any order, and with three or more
/// no round has the order of the one before. A round that is taken again keeps its order.
pub struct Orders {
    contenders: usize,
    left: Vec<usize>,
    last: Vec<usize>,
    rng: Rng,
}

impl Orders {
    /// For a number of contenders.
    pub fn new(contenders: usize) -> Self {
        Self { contenders, left: Vec::new(), last: Vec::new(), rng: Rng::new(contenders as u64) }
    }

    /// The order of the next round: places in the list of contenders.
    pub fn draw(&mut self) -> Vec<usize> {
        if self.left.is_empty() {
            self.left = (0..self.contenders).collect();
        }
        if self.left.is_empty() {
            return Vec::new();
        }
        let first = self.left.swap_remove(self.rng.below(self.left.len()));
        let mut order: Vec<usize> = (0..self.contenders).collect();
        order.swap(0, first);
        loop {
            for place in (2..order.len()).rev() {
                order.swap(place, 1 + self.rng.below(place));
            }
            if self.contenders < 3 || order != self.last {
                self.last.clone_from(&order);
                return order;
            }
        }
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

    /// The share of the effort spent after `round` rounds in a given time; 1 ends it.
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
    let mut samples = Samples { name: contender.name(), calls: 1, ..Samples::default() };
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

    /// A contender that measures nothing but reports given times.
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
    fn everybody_begins_equally_often_in_an_order_that_is_shuffled_for_every_round() {
        let log = RefCell::new(Vec::new());
        let mut contenders = ["a", "b", "c", "d"].map(|name| scripted(name, &log, || Ok(9e4)));
        let samples = run(&mut contenders, &Effort { rounds: Some(80), ..LONG });
        assert!(samples.iter().all(|samples| samples.times.len() == 80 && samples.calls == 1));
        let log = log.borrow();
        // The first four calls find out how many make a sample.
        let rounds: Vec<String> = log[4..].chunks_exact(4).map(<[&str]>::concat).collect();
        for block in rounds.chunks_exact(4) {
            assert!(
                ["a", "b", "c", "d"].iter().all(|name| block.iter().any(|round| round.starts_with(name)))
            );
        }
        assert!(rounds.windows(2).all(|two| two[0] != two[1]), "{rounds:?}");
        // Everybody comes right after everybody else, about equally often.
        for pair in ["ab", "ac", "ad", "ba", "bc", "bd", "ca", "cb", "cd", "da", "db", "dc"] {
            let often = rounds.iter().filter(|round| round.contains(pair)).count();
            assert!((10..=30).contains(&often), "{pair}: {often}");
        }
        // What a report tells of the order is what was done.
        let mut orders = Orders::new(4);
        let told = rounds.iter().all(|round| {
            *round == orders.draw().iter().map(|&n| ["a", "b", "c", "d"][n]).collect::<String>()
        });
        assert!(told);
    }

    #[test]
    fn two_contenders_do_not_alternate_and_one_has_an_order_too() {
        let mut orders = Orders::new(2);
        let firsts: Vec<usize> = (0..40).map(|_| orders.draw()[0]).collect();
        assert_eq!(firsts.iter().sum::<usize>(), 20);
        assert!(firsts.windows(2).any(|two| two[0] == two[1]));
        assert_eq!((Orders::new(1).draw(), Orders::new(0).draw()), (vec![0], vec![]));
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

    /// Sees a slowed-down machine at some of the looks.
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
            // The first call of each went into calibration, the third was discarded.
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
