//! Energy per call, by the counter of the whole board that NVML reads.
//!
//! The counter moves every 100 ms on an H200, which is not much less than a sample. Its difference from before to
//! after a sample could be off by a step at either end, and would hold what ran before. So the counter is watched
//! during the sample, about once per millisecond, and what counts is the time and the energy **from the first step to
//! the last one while the timed calls ran**. A step is seen at most one look late, at both ends alike. Over all samples
//! the energies and the times are added up, and their quotient is the power. Times the mean time of a call, that is
//! the energy of a call. Nothing is subtracted: a GPU that idles has its share in it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use flashcore::cuda::driver::Nvml;
use flashcore_judge::stats::{self, Interval};
use serde::Serialize;

use crate::timing::{Samples, Used};

/// The pause between two looks at the counter.
const LOOK: Duration = Duration::from_millis(1);

/// A step of the counter: when it was seen, what the counter said then, and the SM clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    at: Instant,
    mj: u64,
    sm_clock_mhz: Option<u32>,
}

/// Reads a GPU's counter.
#[derive(Clone, Copy)]
pub struct Meter<'a> {
    nvml: &'a Nvml,
    uuid: &'a str,
}

impl<'a> Meter<'a> {
    /// Absent where the GPU has no such counter.
    pub fn new(nvml: &'a Nvml, uuid: &'a str) -> Option<Self> {
        nvml.device(uuid)?.energy_mj()?;
        Some(Self { nvml, uuid })
    }

    /// Watches the counter while `work` runs.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> (T, Vec<Step>) {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let steps = scope.spawn(|| self.watch(&done));
            let found = work();
            done.store(true, Ordering::Relaxed);
            (found, steps.join().unwrap_or_default())
        })
    }

    fn watch(&self, done: &AtomicBool) -> Vec<Step> {
        let mut steps = Vec::new();
        let Some(device) = self.nvml.device(self.uuid) else { return steps };
        // When the counter came to what it says at first is not known.
        let mut last = device.energy_mj();
        while !done.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK);
            let now = device.energy_mj();
            if let Some(mj) = now.filter(|_| now != last) {
                steps.push(Step { at: Instant::now(), mj, sm_clock_mhz: device.sm_clock_mhz() });
            }
            last = now;
        }
        steps
    }
}

/// What was used from the first to the last step since `from`; absent with fewer than two.
pub fn used(steps: &[Step], from: Instant) -> Option<Used> {
    let steps = &steps[steps.partition_point(|step| step.at < from)..];
    let (first, last) = (steps.first()?, steps.last()?);
    let us = last.at.duration_since(first.at).as_secs_f64() * 1e6;
    let clocks: Vec<f64> = steps.iter().filter_map(|step| step.sm_clock_mhz.map(f64::from)).collect();
    let mj = last.mj.checked_sub(first.mj)?;
    (us > 0.0).then(|| Used { mj, us, sm_clock_mhz: mean(&clocks) })
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// What a contender's calls used. Only in samples that are long enough for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Energy {
    /// During each sample; null where the counter did not move twice.
    pub used: Vec<Option<Used>>,
    /// The power in watts: all energies over all times.
    pub power_w: f64,
    /// The energy of a call in millijoules: the power times the mean time of a call.
    pub mj_per_call: f64,
    /// Its 95 % bootstrap interval over the samples: what the counter's steps leave open is in it.
    pub mj_interval: Option<Interval>,
    /// Joules per 1e12 operations, causal counted half.
    pub j_per_tflop: f64,
    /// The mean SM clock in MHz.
    pub sm_clock_mhz: Option<f64>,
}

impl Energy {
    /// Of a contender's samples; absent where no counter told anything, or the contender left before the end.
    pub fn of(samples: &Samples, flops: f64) -> Option<Self> {
        if samples.failure.is_some() {
            return None;
        }
        let told = samples.used.iter().zip(&samples.times).filter_map(|(used, &us)| Some(((*used)?, us)));
        let told: Vec<(Used, f64)> = told.collect();
        let column = |of: &dyn Fn(&(Used, f64)) -> f64| told.iter().map(of).collect::<Vec<f64>>();
        let columns = [column(&|it| it.0.mj as f64), column(&|it| it.0.us), column(&|it| it.1)];
        let per_call = |[mj, us, call_us]: [f64; 3]| mj / us * call_us;
        let mj_per_call = per_call([mean(&columns[0])?, mean(&columns[1])?, mean(&columns[2])?]);
        let clocks: Vec<f64> = told.iter().filter_map(|(used, _)| used.sm_clock_mhz).collect();
        Some(Self {
            power_w: columns[0].iter().sum::<f64>() / columns[1].iter().sum::<f64>() * 1e3,
            mj_per_call,
            mj_interval: stats::mean_interval(&columns, 0.95, per_call),
            j_per_tflop: mj_per_call / flops * 1e9,
            sm_clock_mhz: mean(&clocks),
            used: samples.used.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_is_between_the_first_and_the_last_step_of_the_timed_calls() {
        let start = Instant::now();
        let step = |ms: u64, mj: u64, mhz: u32| Step {
            at: start + Duration::from_millis(ms),
            mj,
            sm_clock_mhz: Some(mhz),
        };
        // The step at 10 ms is before the timed calls, and holds what ran then.
        let steps = [
            step(10, 90_000, 1980),
            step(60, 100_000, 1500),
            step(110, 135_000, 1520),
            step(160, 170_000, 1540),
        ];
        let from = start + Duration::from_millis(50);
        let found = used(&steps, from).unwrap();
        assert_eq!((found.mj, found.sm_clock_mhz), (70_000, Some(1520.0)));
        assert!((found.us - 100_000.0).abs() < 1e-6);
        assert_eq!(used(&steps[..2], from), None, "one step is no time");
        assert_eq!(used(&[], from), None);
    }

    #[test]
    fn energy_is_power_times_the_time_of_a_call() {
        let used = |mj, us| Some(Used { mj, us, sm_clock_mhz: None });
        let samples = Samples {
            name: "x".into(),
            calls: 150,
            times: vec![1000.0, 1000.0, 1000.0],
            // 700 W, seen in two of three samples.
            used: vec![used(70_000, 100_000.0), None, used(35_000, 50_000.0)],
            failure: None,
        };
        let energy = Energy::of(&samples, 2e12).unwrap();
        assert!((energy.power_w - 700.0).abs() < 1e-9 && (energy.mj_per_call - 700.0).abs() < 1e-9);
        assert!((energy.j_per_tflop - 0.35).abs() < 1e-12);
        assert_eq!((energy.sm_clock_mhz, energy.mj_interval), (None, None), "two samples have no spread");
        assert_eq!(Energy::of(&Samples { used: vec![None; 3], ..samples.clone() }, 2e12), None);
        assert_eq!(Energy::of(&Samples { failure: Some("it died".into()), ..samples }, 2e12), None);
    }
}
