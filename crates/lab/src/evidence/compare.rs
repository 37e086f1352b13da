//! This run against an earlier one: a gate against regressions.
//!
//! A change is the new time over the old one, so **above 1 is slower**. The gate fails where a contender is slower by
//! more than the allowed slow-down, with confidence: the whole interval of its change lies above that. It passes where
//! the whole interval lies below. In between it is undecided, which is not a pass.
//!
//! Two runs share no rounds, so what disturbed the machine during one is not in the other's samples. By the kernel
//! clock of a GPU this matters little. On a CPU it matters much: where both runs timed the same peer, ours is compared
//! by its time as a share of that peer's.

use serde::Serialize;

use crate::bench::outcome::is_ours;
use crate::evidence::saved::{Saved, SavedCell, SavedResult};
use crate::gpu::worker::PLANNER;
use crate::stats::{Interval, RatioDraws, VERDICT_LEVEL, VERDICT_ROUNDS, Verdict, verdict_after};

/// What the gate says of one change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Gate {
    /// Not slower by more than is allowed, with confidence.
    Pass,
    /// Slower by more than that, with confidence.
    Regression,
    /// The samples do not decide it, or there are none.
    Undecided,
}

/// How a contender's time changed in one cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// The cell, as `1x8x512x64 f16 causal`.
    pub cell: String,
    /// Who.
    pub contender: String,
    /// The peer by whose time both runs are measured; absent where times are compared as they are.
    pub relative_to: Option<String>,
    /// The earlier median in microseconds.
    pub base_us: Option<f64>,
    /// The new one.
    pub new_us: Option<f64>,
    /// New over old: above 1 is slower.
    pub change: Option<f64>,
    /// Its 95 % interval.
    pub interval: Option<Interval>,
    /// The interval that verdict and gate rest on.
    pub verdict_interval: Option<Interval>,
    /// Whether the new one is FASTER or SLOWER than the old, by the smallest difference that matters.
    pub verdict: Verdict,
    /// What the gate says.
    pub gate: Gate,
    /// Why it could not be compared.
    pub why: Option<String>,
}

/// What a comparison of two runs found: the content of `comparison.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Changes {
    /// When the earlier run was written.
    pub base_created: String,
    /// When the new one was.
    pub new_created: String,
    /// The commit that the earlier binary was built from.
    pub base_commit: Option<String>,
    /// The new binary's.
    pub new_commit: Option<String>,
    /// What both ran on.
    pub machine: String,
    /// Which clock.
    pub clock: String,
    /// The slow-down that is allowed.
    pub fail_on: f64,
    /// The smallest difference that matters.
    pub margin: f64,
    /// One for every cell and contender of ours in the new run.
    pub changes: Vec<Change>,
    /// Cells of the earlier run that the new one did not time.
    pub not_measured: Vec<String>,
    /// The gate over all of them.
    pub gate: Gate,
}

/// Compares two runs, or says why they cannot be.
pub fn compare(base: &Saved, new: &Saved, fail_on: f64, margin: f64) -> Result<Changes, String> {
    let pairs = [
        ("clock", Some(base.clock.clone()), Some(new.clock.clone())),
        ("machine", Some(base.machine()), Some(new.machine())),
        ("cache mode", base.cache.clone(), new.cache.clone()),
        ("regime", Some(regime(base)), Some(regime(new))),
    ];
    for (what, old, now) in pairs {
        if old != now {
            let text = |side: Option<String>| side.unwrap_or_else(|| "none".into());
            return Err(format!("the {what} differs: {} then, {} now", text(old), text(now)));
        }
    }
    let with_samples = |saved: &Saved| saved.cells.iter().any(|cell| is_measured(&cell.results));
    if with_samples(new) && new.created == base.created && new.cells == base.cells {
        return Err("these are one run's samples: a run is not compared with itself".into());
    }
    let mut changes = Vec::new();
    for cell in &new.cells {
        let before = base.cells.iter().find(|other| other.label() == cell.label());
        let names = cell.results.iter().map(|result| result.name.as_str()).filter(|name| is_ours(name));
        let names: Vec<&str> = names.collect();
        if names.is_empty() {
            changes.push(unknown(cell, PLANNER, cell.failure.as_deref().unwrap_or("it has no result")));
        }
        for name in names {
            changes.push(match before {
                Some(before) => change(before, cell, name, fail_on, margin, &new.clock),
                None => unknown(cell, name, "the earlier run has no such cell"),
            });
        }
    }
    let timed = |cell: &SavedCell| new.cells.iter().any(|other| other.label() == cell.label());
    let not_measured = base.cells.iter().filter(|cell| !timed(cell)).map(SavedCell::label).collect();
    let gate = if changes.iter().any(|change| change.gate == Gate::Regression) {
        Gate::Regression
    } else if changes.is_empty() || changes.iter().any(|change| change.gate == Gate::Undecided) {
        Gate::Undecided
    } else {
        Gate::Pass
    };
    let commit = |saved: &Saved| saved.environment["commit"].as_str().map(String::from);
    Ok(Changes {
        base_created: base.created.clone(),
        new_created: new.created.clone(),
        base_commit: commit(base),
        new_commit: commit(new),
        machine: new.machine(),
        clock: new.clock.clone(),
        fail_on,
        margin,
        changes,
        not_measured,
        gate,
    })
}

/// How long samples are.
fn regime(saved: &Saved) -> String {
    saved.regime.clone().unwrap_or_else(|| "bursts".into())
}

fn is_measured(results: &[SavedResult]) -> bool {
    results.iter().any(|result| !result.samples_us.is_empty())
}

/// A change that could not be measured.
fn unknown(cell: &SavedCell, name: &str, why: &str) -> Change {
    Change {
        cell: cell.label(),
        contender: name.into(),
        relative_to: None,
        base_us: None,
        new_us: None,
        change: None,
        interval: None,
        verdict_interval: None,
        verdict: Verdict::Undecided,
        gate: Gate::Undecided,
        why: Some(why.into()),
    }
}

fn change(before: &SavedCell, now: &SavedCell, name: &str, fail_on: f64, margin: f64, clock: &str) -> Change {
    let nothing = |why: &str| unknown(now, name, why);
    let (Some(old), Some(new)) = (before.result(name), now.result(name)) else {
        return nothing("the earlier run did not time it");
    };
    if let Some(why) = old.failure.as_ref().or(new.failure.as_ref()) {
        return nothing(why);
    }
    let peer = if clock == "call" { common_peer(before, now) } else { None };
    let draws = match peer {
        Some((old_peer, new_peer)) => RatioDraws::paired(&new.samples_us, &new_peer.samples_us)
            .zip(RatioDraws::paired(&old.samples_us, &old_peer.samples_us))
            .map(|(new, old)| new.over(&old)),
        None => RatioDraws::independent(&new.samples_us, &old.samples_us),
    };
    let Some(draws) = draws else {
        return nothing("five samples of each are the least that says something, and none may be zero");
    };
    let (ratio, sure) = (draws.at(0.95), draws.at(VERDICT_LEVEL).interval);
    // A verdict speaks of speed, which is one over time.
    let speed = Interval { low: 1.0 / sure.high, high: 1.0 / sure.low, level: sure.level };
    let rounds = new.samples_us.len().min(old.samples_us.len());
    let gate = if rounds < VERDICT_ROUNDS {
        Gate::Undecided
    } else if sure.low > 1.0 + fail_on {
        Gate::Regression
    } else if sure.high <= 1.0 + fail_on {
        Gate::Pass
    } else {
        Gate::Undecided
    };
    Change {
        relative_to: peer.map(|(peer, _)| peer.name.clone()),
        base_us: old.p50_us,
        new_us: new.p50_us,
        change: Some(ratio.estimate),
        interval: Some(ratio.interval),
        verdict_interval: Some(sure),
        verdict: verdict_after(rounds, &speed, margin),
        gate,
        why: None,
        ..unknown(now, name, "")
    }
}

/// A peer that both runs timed, before and now.
fn common_peer<'a>(before: &'a SavedCell, now: &'a SavedCell) -> Option<(&'a SavedResult, &'a SavedResult)> {
    let timed = |result: &&SavedResult| !is_ours(&result.name) && result.failure.is_none();
    now.results.iter().filter(timed).find_map(|new| {
        let old = before.result(&new.name).filter(timed)?;
        (new.samples_us.len() >= 5 && old.samples_us.len() >= 5).then_some((old, new))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use serde_json::{Value, json};

    /// Times around a median, with a relative spread.
    fn times(seed: u64, median: f64, spread: f64, count: usize) -> Vec<f64> {
        let mut rng = Rng::new(seed);
        (0..count).map(|_| median * (spread * rng.normal()).exp()).collect()
    }

    fn result(name: &str, samples: &[f64]) -> Value {
        json!({"name": name, "samples_us": samples, "p50_us": crate::stats::median(samples), "p90_us": null,
               "min_us": null, "median_interval_us": null, "error": null, "failure": null})
    }

    /// A run on a GPU with one cell.
    fn gpu(created: &str, shape: &str, results: &[Value]) -> Saved {
        Saved::of(&json!({
            "schema": "flashcore.bench-gpu/1", "created": created, "complete": true, "clock": "kernel",
            "cache": "cold", "gpu": {"ours": {"device": "NVIDIA H200"}}, "environment": {"commit": created},
            "cells": [{"name": null, "shape": shape, "dtype": "f16", "mask": "full", "results": results,
                       "failure": null, "flops": 1.0}],
        }))
        .unwrap()
    }

    fn one(base: &[f64], new: &[f64]) -> Changes {
        let run = |created, samples| gpu(created, "1x8x512x64", &[result("flashcore", samples)]);
        compare(&run("then", base), &run("now", new), 0.03, 0.02).unwrap()
    }

    #[test]
    fn slower_fails_and_faster_passes_and_never_the_other_way_round() {
        let base = times(1, 10.0, 0.005, 30);
        let slower = one(&base, &times(2, 11.0, 0.005, 30));
        assert_eq!((slower.gate, slower.changes[0].verdict), (Gate::Regression, Verdict::Slower));
        assert!((slower.changes[0].change.unwrap() - 1.1).abs() < 0.01, "above 1 is slower");
        let faster = one(&base, &times(3, 9.0, 0.005, 30));
        assert_eq!((faster.gate, faster.changes[0].verdict), (Gate::Pass, Verdict::Faster));
        assert!(faster.changes[0].change.unwrap() < 1.0);
    }

    #[test]
    fn equal_runs_pass_in_nearly_all_cases_and_never_fail() {
        for seed in 0..60 {
            let equal = one(&times(seed, 10.0, 0.01, 30), &times(seed + 1000, 10.0, 0.01, 30));
            assert_eq!(equal.gate, Gate::Pass, "{equal:?}");
            assert_ne!(equal.changes[0].verdict, Verdict::Slower);
        }
    }

    #[test]
    fn a_slow_down_within_what_is_let_pass_passes_and_one_beyond_it_fails() {
        let base = times(4, 10.0, 0.002, 40);
        assert_eq!(one(&base, &times(5, 10.2, 0.002, 40)).gate, Gate::Pass);
        assert_eq!(one(&base, &times(6, 10.5, 0.002, 40)).gate, Gate::Regression);
    }

    #[test]
    fn noise_leaves_it_open_rather_than_accusing_or_excusing() {
        let noisy = one(&times(7, 10.0, 0.3, 12), &times(8, 10.4, 0.3, 12));
        assert_eq!(noisy.gate, Gate::Undecided);
        assert_eq!(noisy.changes[0].verdict, Verdict::Undecided);
    }

    #[test]
    fn another_shape_is_never_compared_with() {
        let samples = times(9, 10.0, 0.01, 20);
        let base = gpu("then", "1x8x512x64", &[result("flashcore", &samples)]);
        let new = gpu("now", "4x8x512x64", &[result("flashcore", &samples)]);
        let changes = compare(&base, &new, 0.03, 0.02).unwrap();
        assert_eq!((changes.gate, changes.changes[0].change), (Gate::Undecided, None));
        assert_eq!(changes.not_measured, ["1x8x512x64 f16 full"]);
    }

    #[test]
    fn another_machine_or_clock_or_the_same_run_is_refused() {
        let samples = times(10, 10.0, 0.01, 20);
        let run = |created| gpu(created, "1x8x512x64", &[result("flashcore", &samples)]);
        let mut other = run("now");
        other.gpu = json!({"ours": {"device": "NVIDIA A100"}});
        assert!(compare(&run("then"), &other, 0.03, 0.02).unwrap_err().contains("machine differs"));
        let mut other = run("now");
        other.regime = Some("bursts".into());
        assert!(compare(&run("then"), &other, 0.03, 0.02).is_ok(), "older files do not say it");
        other.regime = Some("sustained".into());
        assert!(compare(&run("then"), &other, 0.03, 0.02).unwrap_err().contains("regime differs"));
        let mut other = run("now");
        other.cache = Some("warm".into());
        assert!(compare(&run("then"), &other, 0.03, 0.02).unwrap_err().contains("cache mode differs"));
        let mut other = run("now");
        other.clock = "call".into();
        assert!(compare(&run("then"), &other, 0.03, 0.02).unwrap_err().contains("clock differs"));
        assert!(compare(&run("then"), &run("then"), 0.03, 0.02).unwrap_err().contains("with itself"));
    }

    #[test]
    fn what_was_not_measured_is_no_pass_and_no_zero() {
        let samples = times(11, 10.0, 0.01, 20);
        for nothing in [&[][..], &[0.0; 20]] {
            let changes = one(&samples, nothing);
            assert_eq!((changes.gate, changes.changes[0].change), (Gate::Undecided, None));
            assert_eq!(one(nothing, &samples).gate, Gate::Undecided);
        }
    }

    #[test]
    fn on_a_cpu_a_common_peer_takes_out_what_the_machine_did() {
        let run = |created: &str, load: f64, ours: f64, seed: u64| {
            let samples = times(seed, 100.0 * ours * load, 0.01, 30);
            let torch = times(seed + 1, 200.0 * load, 0.01, 30);
            let mut saved =
                gpu(created, "1x8x512x64", &[result("flashcore", &samples), result("torch", &torch)]);
            saved.clock = "call".into();
            saved
        };
        // The machine is half as fast now, which is nobody's regression.
        let changes = compare(&run("then", 1.0, 1.0, 20), &run("now", 2.0, 1.0, 30), 0.03, 0.02).unwrap();
        assert_eq!((changes.gate, changes.changes[0].relative_to.as_deref()), (Gate::Pass, Some("torch")));
        let changes = compare(&run("then", 2.0, 1.0, 20), &run("now", 1.0, 1.2, 30), 0.03, 0.02).unwrap();
        assert_eq!(changes.gate, Gate::Regression);
    }
}
