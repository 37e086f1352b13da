//! Times, verdicts and files that cannot be true, put to the statistics and to the audit of evidence; and true ones.

use std::time::Duration;

use flashcore::{DType, Mask, Pass, Problem};
use serde_json::{Value, json};

use super::{Trial, Verdict};
use crate::bench::cells::Cell;
use crate::bench::gpu::{largest_tensor, peak_tflops};
use crate::bench::outcome::{
    Comparison, Conditions, Details, GpuConditions, Limits, Measured, Outcome, SEED, judged_rows, summaries,
};
use crate::evidence::audit::audit;
use crate::evidence::compare::{Gate, compare};
use crate::evidence::saved::Saved;
use crate::evidence::{Environment, schemas, seal};
use crate::gpu::pool::Pool;
use crate::ncu::{self, Figure};
use crate::physics::{self, Rate};
use crate::rng::Rng;
use crate::rule::{Bound, Judgement};
use crate::shapes::Shape;
use crate::stats::{self, MARGIN};
use crate::timing::{Contender, Effort, SAMPLE, Samples, measure};

const STATISTICS: &str = "statistics";
const AUDIT: &str = "evidence";
const BENCH: &str = "bench";

/// Rounds of a synthetic measurement.
const ROUNDS: usize = 40;

/// What the worker reports about an invented GPU.
fn gpu() -> Value {
    json!({
        "capability": "9.0", "commit": null, "cuda": "13.0", "device": "a GPU", "uuid": "GPU-0", "l2_bytes": 1 << 20,
        "memory_bytes": 1_u64 << 36, "sm_clock_khz": 1_900_000, "sms": 128, "version": env!("CARGO_PKG_VERSION"),
        "empty_launch": {"call_p50_us": 5.0, "host_p50_us": 3.0},
    })
}

/// Its dense peak, in TFLOP/s.
fn peak() -> f64 {
    peak_tflops(&gpu()).unwrap_or(f64::NAN)
}

/// Times as machines give them: a skewed spread about a median, and an outlier now and then.
fn times(rng: &mut Rng, median: f64, spread: f64) -> Vec<f64> {
    (0..ROUNDS)
        .map(|_| {
            let outlier = if rng.chance(0.03) { 1.0 + 0.2 * rng.unit() } else { 1.0 };
            median * (spread * rng.normal()).exp() * outlier
        })
        .collect()
}

/// A cell of 4 batch entries as bench writes it: ours at some times, a peer at others.
fn outcome(ours: &[f64], theirs: &[f64]) -> Outcome {
    let shape = Shape { batch: 4, heads_q: 1, heads_kv: 1, len_q: 8192, len_k: 8192, head_dim: 64 };
    let cell = Cell {
        name: "",
        shape,
        mask: Mask::None,
        types: DType::F16.into(),
        pass: Pass::Forward.into(),
        sequences: None,
    };
    let problem = cell.problem();
    let bound = |error: f64| Bound { error, plain: 2.0 * error, allowed: 5.0 * error };
    let rows = judged_rows(&problem).len();
    let limits = Limits::Gpu { peak_tflops: Some(peak()), matmul_tflops: None };
    let results = [("flashcore", ours), ("cublas", theirs)].map(|(name, times)| {
        let judgement = Judgement::forward(rows, [1e-4, 2e-5, 1e-4].map(bound), None);
        let mut details = Details::default();
        if name == "flashcore" {
            details.replay_is_same = Some(true);
            details.plan = Some(json!({
                "kernel": "sm80_fwd", "schedule": "sm80_fwd:block_m=64,block_n=64,warps=4,stages=2",
                "target": "sm_90a", "reason": "asked for", "grid": [64, 4, 1], "threads": 128, "shared_bytes": 0,
                "registers": 128, "local_bytes": 0, "code": "0".repeat(64),
            }));
        }
        let samples = Samples { name: name.into(), calls: 1, times: times.to_vec(), ..Samples::default() };
        let measured = Measured::new(samples, Some(judgement), &cell.work(), &limits, None);
        Measured { details: Some(details), ..measured }
    });
    let conditions =
        GpuConditions { group: "all".into(), sets: 1, seconds: 10.0, ..GpuConditions::default() };
    Outcome::new(&cell, rows, results.into(), Conditions::Gpu(conditions), MARGIN)
}

/// An honest file of one cell, in which the peer is 1.3 times as slow.
pub(crate) fn honest() -> Value {
    honest_run(5)
}

/// The same from another run.
fn honest_run(seed: u64) -> Value {
    let mut rng = Rng::new(seed);
    document(&times(&mut rng, 250.0, 0.003), &times(&mut rng, 325.0, 0.003))
}

/// A whole file.
fn document(ours: &[f64], theirs: &[f64]) -> Value {
    let outcomes = [outcome(ours, theirs)];
    let elements = largest_tensor(&Problem::new(4, 1, 8192, 64, DType::F16));
    let checksums = Pool::draw(DType::F16, elements, SEED).checksums();
    let mut environment = serde_json::to_value(Environment::read()).unwrap_or_default();
    (environment["commit"], environment["dirty"]) = (json!("0".repeat(40)), json!(false));
    environment["optimised"] = json!(true);
    json!({
        "schema": schemas::BENCH_GPU, "hash": "", "created": "2026-11-15T00:00:00Z",
        "command": ["flashcore", "bench", "4x1x8192x64"], "complete": true, "environment": environment, "clock": "kernel",
        "cache": "warm", "regime": "bursts", "no_torch_because": null, "ceilings": null, "budget_seconds": 15.0, "seconds": 12.0,
        "lost_workers": 0, "asked": 1, "cells": outcomes, "summaries": summaries(&outcomes),
        "gpu": {"ours": gpu(), "torch": null, "driver": "580.1", "peak_tflops": peak(), "matmul_tflops": null,
                "no_fa3_because": null},
        "inputs": [{"dtype": "f16", "seed": SEED, "elements": elements, "checksums": checksums}],
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

/// What the audit says of a file that it must not take for evidence.
fn not_evidence(text: &str) -> Verdict {
    match audit(text) {
        Err(why) => Verdict::Refused(why),
        Ok(_) => Verdict::Accepted("it is taken for evidence".into()),
    }
}

/// The honest file with a change, and a hash made after it: the audit must notice it in the numbers.
fn falsified(name: &'static str, change: fn(&mut Value)) -> Trial {
    Trial::fault(name, AUDIT, move || {
        let mut document = honest();
        change(&mut document);
        audited(&text(&document))
    })
}

/// Divides every time of ours by a number, and recomputes all derived values, as a harness that believes the times
/// would.
fn speed_up(document: &mut Value, by: f64) {
    let samples = |n: usize| -> Vec<f64> {
        let samples =
            document["cells"][0]["results"][n]["samples_us"].as_array().cloned().unwrap_or_default();
        samples.iter().filter_map(Value::as_f64).collect()
    };
    let ours: Vec<f64> = samples(0).iter().map(|time| time / by).collect();
    let mut made = self::document(&ours, &samples(1));
    made["created"] = document["created"].clone();
    *document = made;
}

/// Comparisons of a thing with itself, and how many of them may call a difference: 3 in 100, each way.
const AGAINST_ITSELF: usize = 200;

/// One thing against itself, again and again: a judge that often calls a difference is not to be trusted.
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

/// The slow-down above which the regression gate fails.
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

/// What wall time says about a clock that divides its times. The wall time is simulated, so that a busy machine does
/// not move it: it is 1 % more than the clock, for the launches.
fn on_the_wall(divided_by: f64) -> Verdict {
    let us = 10e3;
    match physics::clock_against_wall(us / divided_by, || Ok(1.01 * us)) {
        Ok(()) => Verdict::Accepted("the wall agrees".into()),
        Err(why) => Verdict::Refused(why),
    }
}

/// What is said of a rate, as a share of the chip's peak.
fn rated(share: f64) -> Verdict {
    match physics::rate(Some(share * peak()), Some(peak()), physics::ABOVE_PEAK) {
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
            regression(|now| now["cells"][0]["shape"] = json!("1x1x8192x64"))
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
        falsified("an error above what is allowed beside a verdict", |document| {
            document["cells"][0]["results"][0]["error"]["row"]["error"] = json!(1.0);
            document["cells"][0]["results"][0]["error"]["max"]["error"] = json!(1.0);
        }),
        falsified("an allowed error that its yardstick does not give", |document| {
            document["cells"][0]["results"][0]["error"]["row"]["allowed"] = json!(1.0);
        }),
        falsified("samples that were put in another order", |document| {
            if let Some(samples) = document["cells"][0]["results"][0]["samples_us"].as_array_mut() {
                samples.reverse();
            }
        }),
        falsified("a field that nobody checks", |document| document["cells"][0]["note"] = json!("FASTER")),
        Trial::fault("a file of a version that nobody knows", AUDIT, || {
            let mut document = honest();
            document["schema"] = json!("flashcore.bench-gpu/9");
            not_evidence(&text(&document))
        }),
        Trial::fault("a file without its hash", AUDIT, || {
            not_evidence(&text(&honest()).replacen("\"hash\"", "\"no_hash\"", 1))
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
