//! The statistics by simulation, with the stopping rule in force: how often intervals hold the truth, how often a
//! verdict is wrong, and that what is there to be found is found. Times are drawn, so the truth is known.

use std::time::Duration;

use flashcore_lab::bench::outcome::Comparison;
use flashcore_lab::rng::Rng;
use flashcore_lab::stats::{MARGIN, Verdict};
use flashcore_lab::timing::{Contender, Effort, measure};
use rayon::prelude::*;

/// What a machine adds to a time.
#[derive(Clone, Copy, Debug)]
enum Noise {
    /// Normal, with a relative standard deviation.
    Normal(f64),
    /// A skewed spread, and one sample in twenty up to twice as long.
    Outliers(f64),
    /// A floor with a tail so heavy that it has no variance.
    Pareto(f64),
}

impl Noise {
    const ALL: [Noise; 3] = [Noise::Normal(0.02), Noise::Outliers(0.02), Noise::Pareto(0.02)];

    fn draw(self, rng: &mut Rng) -> f64 {
        match self {
            Noise::Normal(spread) => 1.0 + spread * rng.normal(),
            Noise::Outliers(_) if rng.chance(0.05) => 1.0 + rng.unit(),
            Noise::Outliers(spread) => (spread * rng.normal()).exp(),
            Noise::Pareto(spread) => 1.0 + spread * ((1.0 - rng.unit()).powf(-1.0 / 1.5) - 1.0),
        }
    }
}

/// A contender whose times are drawn.
struct Drawn {
    name: &'static str,
    median: f64,
    noise: Noise,
    rng: Rng,
}

impl Contender for Drawn {
    fn name(&self) -> String {
        self.name.into()
    }

    fn sample(&mut self, _: u32, _: u32) -> Result<f64, String> {
        Ok(1e5 * self.median * self.noise.draw(&mut self.rng))
    }
}

const EFFORT: Effort = Effort {
    rounds: None,
    budget: Duration::from_hours(1),
    margin: MARGIN,
    settle: Duration::ZERO,
    sample: Duration::from_millis(1),
};

/// One whole measurement of two contenders, of which the peer takes `speed_up` times as long.
fn race(seed: u64, speed_up: f64, noise: Noise, effort: &Effort) -> Comparison {
    let drawn = |name, median, stream| -> Box<dyn Contender> {
        Box::new(Drawn { name, median, noise, rng: Rng::stream(seed, stream) })
    };
    let mut contenders = [drawn("ours", 1.0, 0), drawn("theirs", speed_up, 1)];
    let samples = measure(&mut contenders, effort, &|| false, &mut |_, _| {});
    Comparison::of(&samples[0].times, "theirs", &samples[1].times, MARGIN).expect("five rounds at least")
}

fn races(runs: u64, speed_up: f64, noise: Noise, effort: &Effort) -> Vec<Comparison> {
    (0..runs).into_par_iter().map(|seed| race(seed, speed_up, noise, effort)).collect()
}

fn share(all: &[Comparison], what: impl Fn(&Comparison) -> bool) -> f64 {
    all.iter().filter(|comparison| what(comparison)).count() as f64 / all.len() as f64
}

#[test]
fn a_95_percent_interval_holds_the_truth_in_93_to_97_of_100_measurements_that_stopped_by_themselves() {
    for noise in Noise::ALL {
        let mut pooled = Vec::new();
        for speed_up in [1.0, 1.01, 1.02, 1.05, 1.3] {
            let all = races(200, speed_up, noise, &EFFORT);
            let held = share(&all, |it| (it.interval.low..=it.interval.high).contains(&speed_up));
            // Three standard deviations of a share of 200 below 95 %.
            assert!(held >= 0.904, "{noise:?} at {speed_up}: {held}");
            pooled.push(held);
        }
        let held = pooled.iter().sum::<f64>() / pooled.len() as f64;
        assert!((0.93..=0.97).contains(&held), "{noise:?}: {held} of {pooled:?}");
    }
}

#[test]
fn without_a_difference_faster_and_slower_are_each_said_in_under_3_of_100_measurements() {
    for noise in Noise::ALL {
        let all = races(500, 1.0, noise, &EFFORT);
        let said = |verdict| share(&all, |it| it.verdict == verdict);
        let (faster, slower) = (said(Verdict::Faster), said(Verdict::Slower));
        assert!(faster < 0.03 && slower < 0.03, "{noise:?}: {faster} {slower}");
        assert!(said(Verdict::Same) > 0.9, "{noise:?}: {}", said(Verdict::Same));
    }
}

#[test]
fn so_it_is_where_a_budget_ends_after_the_fewest_rounds_or_the_noise_leaves_it_open() {
    let short = Effort { budget: Duration::ZERO, ..EFFORT };
    for (noise, effort) in
        [(Noise::Normal(0.05), &short), (Noise::Pareto(0.1), &short), (Noise::Normal(0.06), &EFFORT)]
    {
        let all = races(if effort.budget.is_zero() { 2000 } else { 300 }, 1.0, noise, effort);
        let said = |verdict| share(&all, |it| it.verdict == verdict);
        let (faster, slower) = (said(Verdict::Faster), said(Verdict::Slower));
        assert!(faster < 0.03 && slower < 0.03, "{noise:?}: {faster} {slower}");
    }
}

#[test]
fn a_true_gain_of_2_percent_or_more_is_called_and_never_called_a_loss() {
    for noise in [Noise::Normal(0.01), Noise::Outliers(0.01), Noise::Pareto(0.01)] {
        for gain in [1.02, 1.03, 1.10] {
            let all = races(80, gain, noise, &EFFORT);
            let faster = share(&all, |it| it.verdict == Verdict::Faster);
            assert!(faster > 0.95, "{noise:?} {gain}: {faster}");
            assert_eq!(share(&all, |it| it.verdict == Verdict::Slower), 0.0);
            let all = races(80, 1.0 / gain, noise, &EFFORT);
            let slower = share(&all, |it| it.verdict == Verdict::Slower);
            assert!(slower > 0.95, "{noise:?} {gain}: {slower}");
            assert_eq!(share(&all, |it| it.verdict == Verdict::Faster), 0.0);
        }
    }
}

#[test]
fn a_thing_compared_with_itself_on_the_same_times_is_the_same() {
    let mut rng = Rng::new(5);
    let times: Vec<f64> = (0..20).map(|_| Noise::Outliers(0.05).draw(&mut rng)).collect();
    let itself = Comparison::of(&times, "itself", &times, MARGIN).unwrap();
    assert_eq!((itself.speed_up, itself.verdict), (1.0, Verdict::Same));
}
