//! Timing: contenders take turns in rounds, in one process group and one state of the machine.
//!
//! In each round every contender is sampled once, and the order rotates, so that what the machine does to one it
//! does to all. A sample is as many calls as it takes to be well past the clock's resolution. Which clock that is, is the
//! contender's affair: on the CPU it is the **call** clock, what a caller waits for from before the call to after it.

use std::time::{Duration, Instant};

use crate::stats::{self, Interval, LOOKS, Verdict, median_ratio, verdict};

/// Something that can be put on the clock.
pub trait Contender {
    /// The name in tables and in JSON.
    fn name(&self) -> String;

    /// Makes `warm` calls off the clock and then `calls` on it, and returns the microseconds that one took.
    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String>;
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
const FEWEST: usize = 5;
/// What a sample takes at least by the clock of the CPU.
pub const SAMPLE: Duration = Duration::from_millis(2);
/// Calls longer than this need no call before them to wake threads and fill caches.
const LONG_CALL_US: f64 = 50_000.0;
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
    /// Microseconds a call, one a round.
    pub times: Vec<f64>,
    /// Why it left before the end, if it did.
    pub failure: Option<String>,
}

/// Measures all contenders; the first is the one that the others are compared with. Stops when every comparison has
/// its verdict and its ratio (alone, the median) is known within the margin, when the budget is spent, or when `stop`
/// says so. `progress` is told the rounds done and the share of the effort that they are.
pub fn measure(
    contenders: &mut [Box<dyn Contender + '_>],
    effort: &Effort,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(usize, f64),
) -> Vec<Samples> {
    let mut samples: Vec<Samples> =
        contenders.iter_mut().map(|contender| calibrate(contender.as_mut(), effort.sample)).collect();
    let started = Instant::now();
    let mut round = 0;
    while !stop() && samples[0].failure.is_none() {
        for turn in 0..contenders.len() {
            let who = (round + turn) % contenders.len();
            let Samples { calls, times, failure, .. } = &mut samples[who];
            if failure.is_some() {
                continue;
            }
            if contenders.len() > 1 {
                std::thread::sleep(effort.settle);
            }
            let warm = u32::from(times.last().is_none_or(|&time| time < LONG_CALL_US));
            match contenders[who].sample(warm, *calls) {
                Ok(time) => times.push(time),
                Err(why) => *failure = Some(why),
            }
        }
        round += 1;
        let share = effort.share(round, started.elapsed());
        progress(round, share);
        let look = effort.rounds.is_none() && is_look(round);
        if share >= 1.0 || (look && settled(&samples, effort.margin)) {
            break;
        }
    }
    samples
}

impl Effort {
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

/// Finds how many calls make a sample, which also warms everything up.
fn calibrate(contender: &mut dyn Contender, least: Duration) -> Samples {
    let mut samples = Samples { name: contender.name(), calls: 1, times: Vec::new(), failure: None };
    match contender.sample(1, 1) {
        Ok(time) => {
            let needed = least.as_secs_f64() * 1e6 / time.max(0.01);
            samples.calls = (needed.ceil() as u32).clamp(1, 10_000);
        }
        Err(why) => samples.failure = Some(why),
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
        let known = median_ratio(&peer.times, ours, 0.95).is_some_and(|ratio| narrow(&ratio.interval));
        let sure = median_ratio(&peer.times, ours, stats::VERDICT_LEVEL);
        known && sure.is_some_and(|ratio| verdict(&ratio.interval, margin) != Verdict::Undecided)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
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
        budget: Duration::from_mins(1),
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
    fn the_order_rotates_from_round_to_round() {
        let log = RefCell::new(Vec::new());
        let mut contenders = [scripted("a", &log, || Ok(9e4)), scripted("b", &log, || Ok(9e4))];
        let effort = Effort { rounds: Some(3), ..LONG };
        let samples = run(&mut contenders, &effort);
        assert_eq!(*log.borrow(), ["a", "b", "a", "b", "b", "a", "a", "b"]);
        assert!(samples.iter().all(|samples| samples.times.len() == 3 && samples.calls == 1));
    }

    #[test]
    fn a_short_call_is_repeated_until_the_clock_sees_it() {
        let log = RefCell::new(Vec::new());
        let mut contenders = [scripted("a", &log, || Ok(10.0))];
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
    fn a_spent_budget_ends_it_but_not_before_five_rounds() {
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

    #[test]
    fn an_interrupt_keeps_what_there_is() {
        let log = RefCell::new(Vec::new());
        let mut contenders = [scripted("a", &log, || Ok(1e5))];
        let samples = measure(&mut contenders, &LONG, &|| log.borrow().len() > 4, &mut |_, _| {});
        assert_eq!(samples[0].times.len(), 4);
    }
}
