//! Times, verdicts and files that cannot be true, put to the statistics and to the audit of evidence; and true ones.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Trial, Verdict};
use crate::audit::audit;
use crate::bench::Comparison;
use crate::compare::{Gate, compare};
use crate::evidence::seal;
use crate::ncu::{self, Figure};
use crate::physics::{self, Rate};
use crate::rng::Rng;
use crate::saved::Saved;
use crate::stats::{self, MARGIN};
use crate::timing::{Contender, Effort, SAMPLE, measure};

const STATISTICS: &str = "statistics";
const AUDIT: &str = "evidence";
const BENCH: &str = "bench";

/// Rounds of a synthetic measurement.
const ROUNDS: usize = 40;

/// A chip's dense peak, in TFLOP/s.
const PEAK: f64 = 1000.0;

/// Times as machines give them: a skewed spread about a median, and an outlier now and then.
fn times(rng: &mut Rng, median: f64, spread: f64) -> Vec<f64> {
    (0..ROUNDS)
        .map(|_| {
            let outlier = if rng.chance(0.03) { 1.0 + 0.2 * rng.unit() } else { 1.0 };
            median * (spread * rng.normal()).exp() * outlier
        })
        .collect()
}

/// A cell of an evidence file, as bench writes it: ours at `ours` µs, a peer at `theirs`.
fn cell(shape: &str, flops: f64, bytes: f64, rows: usize, ours: &[f64], theirs: &[f64]) -> Value {
    let result = |name: &str, samples: &[f64]| {
        let p50 = stats::median(samples);
        let tflops = p50.map(|time| flops / time / 1e6);
        let bound = json!({"error": 1e-4, "plain": 2e-4, "allowed": 5e-4});
        json!({
            "name": name, "samples_us": samples, "p50_us": p50, "p90_us": stats::quantile(samples, 0.9),
            "min_us": stats::quantile(samples, 0.0), "median_interval_us": stats::median_interval(samples, 0.95),
            "tflops": tflops, "peak_share": tflops.map(|rate| rate / PEAK), "matmul_share": null,
            "gbytes": p50.map(|time| bytes / time / 1e3), "call": null, "failure": null,
            "error": {"max": bound, "rms": bound, "row": bound, "lse": null},
        })
    };
    json!({
        "name": null, "shape": shape, "dtype": "f16", "mask": "full", "group": "all", "flops": flops, "bytes": bytes, "rows": rows,
        "judged_rows": rows, "results": [result("flashcore", ours), result("peer", theirs)],
        "comparisons": Comparison::of(ours, "peer", theirs, MARGIN), "ladder": [], "impossible": false, "failure": null,
    })
}

/// An honest file of one cell: 4 batch entries, the peer 1.3 times as slow, each comparison of its own samples.
fn honest() -> Value {
    honest_run(5)
}

/// The same from another run.
fn honest_run(seed: u64) -> Value {
    let mut rng = Rng::new(seed);
    let (ours, theirs) = (times(&mut rng, 500.0, 0.003), times(&mut rng, 650.0, 0.003));
    let (batch, heads, len, dim) = (4.0, 16.0, 2048.0, 128.0);
    let (flops, bytes) = (4.0 * batch * heads * len * len * dim, 4.0 * batch * heads * len * dim * 2.0);
    let mut cell = cell("4x16x2048x128", flops, bytes, 4 * 16 * 2048, &ours, &theirs);
    cell["comparisons"] = json!([cell["comparisons"]]);
    let comparison = &cell["comparisons"][0];
    let (speed_up, verdict) = (comparison["speed_up"].clone(), comparison["verdict"].clone());
    let count = |word: &str| usize::from(verdict == word);
    let verdicts = ["FASTER", "SAME", "SLOWER", "UNDECIDED"].map(count);
    json!({
        "schema": "flashcore.bench-gpu/1", "hash": "", "created": "2026-11-15T00:00:00Z", "command": ["flashcore"],
        "complete": true, "clock": "kernel", "cache": "cold", "environment": {"commit": "0", "dirty": false},
        "gpu": {"peak_tflops": PEAK, "matmul_tflops": null}, "cells": [cell],
        "summaries": [{"group": "all", "peer": "peer", "cells": 1, "geometric_mean": speed_up, "smallest": speed_up,
            "smallest_cell": "4x16x2048x128 f16 full", "verdicts": verdicts}],
    })
}

fn text(document: &Value) -> String {
    serde_json::to_string_pretty(document).map(|text| seal(&text)).unwrap_or_default()
}

/// What the audit says of a file.
fn audited(text: &str) -> Verdict {
    match audit(text) {
        Err(why) => Verdict::NotRun(why),
        Ok(audit) => match audit.contradictions.first() {
            Some(first) => Verdict::Refused(first.clone()),
            None => Verdict::Accepted(format!("{} numbers made again", audit.checked)),
        },
    }
}

/// The honest file with a change that its hash was made after: the audit must see it in the numbers.
fn falsified(name: &'static str, change: fn(&mut Value)) -> Trial {
    Trial::fault(name, AUDIT, move || {
        let mut document = honest();
        change(&mut document);
        audited(&text(&document))
    })
}

/// Divides every time of ours by a number, and makes all that is derived from them again, as a harness would that
/// believes in it.
fn speed_up(document: &mut Value, by: f64) {
    let cell_of = |document: &Value| document["cells"][0].clone();
    let samples = |cell: &Value, n: usize| -> Vec<f64> {
        let samples = cell["results"][n]["samples_us"].as_array().cloned().unwrap_or_default();
        samples.iter().filter_map(Value::as_f64).collect()
    };
    let old = cell_of(document);
    let ours: Vec<f64> = samples(&old, 0).iter().map(|time| time / by).collect();
    let number = |name: &str| old[name].as_f64().unwrap_or(f64::NAN);
    let rows = old["rows"].as_u64().unwrap_or(0) as usize;
    let mut new = cell("4x16x2048x128", number("flops"), number("bytes"), rows, &ours, &samples(&old, 1));
    let speed_up = new["comparisons"]["speed_up"].clone();
    new["comparisons"] = json!([new["comparisons"]]);
    document["cells"][0] = new;
    document["summaries"][0]["geometric_mean"] = speed_up.clone();
    document["summaries"][0]["smallest"] = speed_up;
}

/// Comparisons of a thing with itself, and how many of them may call a difference: 3 in 100, each way.
const AGAINST_ITSELF: usize = 200;

/// One thing against itself, again and again: whoever often calls a difference is no judge.
fn against_itself() -> Verdict {
    let mut rng = Rng::new(11);
    let called = (0..AGAINST_ITSELF)
        .filter(|_| {
            let (a, b) = (times(&mut rng, 100.0, 0.02), times(&mut rng, 100.0, 0.02));
            let verdict = Comparison::of(&a, "itself", &b, MARGIN).map(|comparison| comparison.verdict);
            !matches!(verdict, Some(stats::Verdict::Same | stats::Verdict::Undecided))
        })
        .count();
    let words = format!("a difference is called in {called} of {AGAINST_ITSELF} comparisons");
    if called * 100 <= 6 * AGAINST_ITSELF { Verdict::Refused(words) } else { Verdict::Accepted(words) }
}

/// What is said of a true difference between two things, the other's time over ours.
fn compared(speed_up: f64, spread: f64) -> Verdict {
    let mut rng = Rng::new(3);
    let (ours, theirs) = (times(&mut rng, 100.0, spread), times(&mut rng, 100.0 * speed_up, spread));
    match Comparison::of(&ours, "peer", &theirs, MARGIN) {
        Some(it) if it.verdict == stats::Verdict::Faster => {
            Verdict::Accepted(format!("FASTER, {:+.1} %", 100.0 * (it.speed_up - 1.0)))
        }
        Some(it) => Verdict::Refused(it.verdict.to_string()),
        None => Verdict::Refused("there is no comparison".into()),
    }
}

/// What the regression gate says of a run that comes after the honest one, with a change made to it.
fn regression(change: fn(&mut Value)) -> Verdict {
    let (then, mut now) = (honest(), honest_run(6));
    now["created"] = json!("2026-11-16T00:00:00Z");
    change(&mut now);
    let compared = Saved::of(&then).and_then(|then| compare(&then, &Saved::of(&now)?, FAIL_ON, MARGIN));
    match compared.map(|changes| changes.gate) {
        Ok(Gate::Pass) => Verdict::Accepted("no regression".into()),
        Ok(Gate::Regression) => Verdict::Refused("a regression".into()),
        Ok(Gate::Undecided) => Verdict::Refused("undecided: the two runs share no cell that says it".into()),
        Err(why) => Verdict::Refused(why),
    }
}

/// A slow-down from which on the regression gate fails.
const FAIL_ON: f64 = 0.03;

/// A contender whose clock never moves.
struct Stopped;

impl Contender for Stopped {
    fn name(&self) -> String {
        "stopped".into()
    }

    fn sample(&mut self, _: u32, _: u32) -> Result<f64, String> {
        Ok(0.0)
    }
}

/// What a measurement makes of a clock that never moves.
fn stopped_clock() -> Verdict {
    let effort = Effort {
        rounds: Some(6),
        budget: Duration::ZERO,
        margin: MARGIN,
        settle: Duration::ZERO,
        sample: SAMPLE,
    };
    let samples = measure(&mut [Box::new(Stopped)], &effort, &|| false, &mut |_, _| {});
    match &samples[0].failure {
        Some(why) => Verdict::Refused(why.clone()),
        None => Verdict::Accepted(format!("{} samples", samples[0].times.len())),
    }
}

/// What the wall says of a clock that divides what it counts. The wall is a known one, which a busy machine does not move:
/// it counts 1 % more than the clock, as launches take.
fn on_the_wall(divided_by: f64) -> Verdict {
    let us = 10e3;
    match physics::clock_against_wall(us / divided_by, || Ok(1.01 * us)) {
        Ok(()) => Verdict::Accepted("the wall agrees".into()),
        Err(why) => Verdict::Refused(why),
    }
}

/// What is said of a rate, as a share of the chip's peak.
fn rated(share: f64) -> Verdict {
    match physics::rate(Some(share * PEAK), Some(PEAK), physics::ABOVE_PEAK) {
        Rate::Possible => Verdict::Accepted("a possible rate".into()),
        Rate::Impossible => Verdict::Refused("above what the chip can do".into()),
        Rate::LaunchBound => Verdict::Refused("the launch is timed, not the arithmetic".into()),
        Rate::Unknown => Verdict::NotRun("nothing is said".into()),
    }
}

/// Every trial of numbers.
pub fn trials() -> Vec<Trial> {
    vec![
        Trial::fault("a time divided by the batch size, on the clock", BENCH, || on_the_wall(4.0)),
        Trial::fault("a rate above the chip's peak, on the clock", BENCH, || rated(1.5)),
        Trial::fault("a launch that passes for arithmetic", BENCH, || rated(0.005)),
        Trial::fault("an unmeasured time of 0, on the clock", BENCH, stopped_clock),
        Trial::fault("another shape as the baseline", BENCH, || {
            regression(|now| now["cells"][0]["shape"] = json!("1x16x2048x128"))
        }),
        Trial::fault("another machine as the baseline", BENCH, || {
            regression(|now| now["gpu"]["ours"] = json!({"device": "another GPU"}))
        }),
        Trial::fault("a run as its own baseline", BENCH, || regression(|now| *now = honest())),
        Trial::fault("a slow-down of 10 %", BENCH, || regression(|now| speed_up(now, 1.0 / 1.1))),
        falsified("a time divided by the batch size", |document| speed_up(document, 4.0)),
        falsified("a rate above the chip's peak", |document| speed_up(document, 5.0)),
        falsified("a comparison of two shapes", |document| {
            // As if the peer's time were taken from a cell that is four times as large.
            let old = document["cells"][0]["comparisons"][0]["speed_up"].as_f64().unwrap_or(f64::NAN);
            document["cells"][0]["comparisons"][0]["speed_up"] = json!(old * 4.0);
            document["summaries"][0]["geometric_mean"] = json!(old * 4.0);
            document["summaries"][0]["smallest"] = json!(old * 4.0);
        }),
        falsified("a comparison with someone who was not there", |document| {
            document["cells"][0]["comparisons"][0]["peer"] = json!("somebody else");
        }),
        falsified("an unmeasured time that is given as 0", |document| {
            document["cells"][0]["results"][1]["samples_us"] = json!([]);
            document["cells"][0]["results"][1]["p50_us"] = json!(0.0);
        }),
        falsified("samples that are 0", |document| {
            document["cells"][0]["results"][1]["samples_us"] = json!(vec![0.0; ROUNDS]);
        }),
        falsified("a time without a judgement of the result", |document| {
            document["cells"][0]["results"][0]["error"] = Value::Null;
        }),
        falsified("a verdict that its interval does not bear out", |document| {
            document["cells"][0]["comparisons"][0]["verdict"] = json!("SLOWER");
        }),
        falsified("a mean that is not that of its cells", |document| {
            document["summaries"][0]["geometric_mean"] = json!(2.0);
        }),
        falsified("operations that are counted twice", |document| {
            let flops = document["cells"][0]["flops"].as_f64().unwrap_or(f64::NAN);
            document["cells"][0]["flops"] = json!(flops * 2.0);
        }),
        Trial::fault("a file that was edited", AUDIT, || {
            audited(&text(&honest()).replace("\"created\": \"2026", "\"created\": \"2027"))
        }),
        Trial::fault("A compared with A", STATISTICS, against_itself),
        Trial::fault("noise that looks like a gain", STATISTICS, || compared(1.0, 0.2)),
        Trial::fault("a loss of 2 % that is called a gain", STATISTICS, || compared(1.0 / 1.02, 0.003)),
        Trial::fault("an empty profile", "profile", || {
            let nothing =
                ["tensor_percent", "dram_percent"].map(|name| Figure { name, metric: None, value: None });
            match ncu::bound(&nothing) {
                Some(bound) => Verdict::Accepted(bound.verdict),
                None => Verdict::Refused("nothing is said of what bounds the kernel".into()),
            }
        }),
        Trial::honest("a clock that the wall agrees with", BENCH, || on_the_wall(1.0)),
        Trial::honest("a rate of 70 % of the peak", BENCH, || rated(0.7)),
        Trial::honest("a later run that is as fast", BENCH, || regression(|_| {})),
        Trial::honest("a later run that is faster", BENCH, || regression(|now| speed_up(now, 1.2))),
        Trial::honest("a true gain of 2 %", STATISTICS, || compared(1.02, 0.002)),
        Trial::honest("an evidence file that holds together", AUDIT, || audited(&text(&honest()))),
    ]
}
