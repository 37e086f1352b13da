//! An attacker who can recompute the hash: every leaf of every kind of evidence is changed, and the audit must notice,
//! unless the change is on the list of what nothing in a file can contradict.

use std::collections::BTreeSet;

use flashcore::{DType, Device, Mask, Name, Pass, Problem};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::audit;
use crate::bench::cells::Cell;
use crate::bench::cpu::{checksums, inputs};
use crate::bench::gpu::{largest_tensor, peak_tflops, sets_to_flush};
use crate::bench::itself::AgainstItself;
use crate::bench::outcome::{
    CallClock, Comparison, Conditions, CpuConditions, Details, FirstCall, GpuConditions, Limits, Measured,
    Outcome, SEED, causal_shares, judged_rows, rows, summaries,
};
use crate::cases::{Tier, corpus};
use crate::ceilings::Ceilings;
use crate::check::RULE;
use crate::energy::Energy;
use crate::evidence::{Environment, schemas, seal};
use crate::faults;
use crate::gpu::pool::Pool;
use crate::rng::Rng;
use crate::rule::{Bound, Judgement};
use crate::shapes;
use crate::stats::{self, MARGIN};
use crate::timing::{Samples, Used};

/// What nothing in a file can contradict: the kinds (`*` for all), the places, the changes, and why.
const FREE: &[(&str, &str, &[&str], &str)] = &[
    // What every file begins with.
    (
        "*",
        "/command /command/*",
        &["other", "doubled", "shortened", "shuffled"],
        "how the command was called, beyond its name and the options that numbers follow from: what it asked for is in the rest",
    ),
    (
        "*",
        "/environment/cpu/cores /environment/cpu/model /environment/memory_bytes",
        &["half more", "other", "null"],
        "a machine as it tells of itself",
    ),
    ("*", "/environment/dirty", &["flipped"], "whether a tree had changes is known to the build alone"),
    (
        "verify/1 verify/2 faults/1 stress/1 stress/2 profile/1",
        "/environment/optimised",
        &["flipped"],
        "how the binary was built; where times count, it must be true",
    ),
    (
        "bench/1 bench/2 bench-gpu/1 bench-gpu/3 against-itself/1 against-itself/2 verify/1 stress/1 stress/2",
        "/complete",
        &["flipped"],
        "true may become false: an interrupt can come when everything is done; the other way round things are missing",
    ),
    // Raw measurements, each alone.
    (
        "bench/1 bench/2 bench-gpu/1 bench-gpu/3",
        "/cells/*/results/*/error/max/error /cells/*/results/*/error/rms/error /cells/*/results/*/error/row/error",
        &["half more"],
        "how far an output was off, within what is allowed: outputs are not kept",
    ),
    (
        "verify/1 verify/2 stress/1 stress/2",
        "/results/*/judgement/rms/error /results/*/judgement/row/error /results/*/judgement/lse/error \
         /problems/*/judgement/max/error /problems/*/judgement/rms/error /problems/*/judgement/row/error \
         /problems/*/judgement/lse/error",
        &["half more"],
        "the same; the largest of a corpus stands in the tally too",
    ),
    (
        "stress/1 stress/2",
        "/problems/*/threaded/different /problems/*/replayed/different /problems/*/repeated/different",
        &["half more"],
        "how often the bits differed, which is what was counted",
    ),
    (
        "bench-gpu/1 bench-gpu/3",
        "/cells/*/results/*/replay_is_same",
        &["flipped"],
        "of a kernel that is compared with nothing: whether a replay gave the same bits, which is what was looked at",
    ),
    (
        "bench-gpu/1 bench-gpu/3",
        "/cells/*/first_call/cold_us /cells/*/first_call/warm_us /gpu/ours/empty_launch/call_p50_us \
         /gpu/ours/empty_launch/host_p50_us /ceilings/launch_us /ceilings/launch_host_us",
        &["half more"],
        "a single time from which nothing else follows",
    ),
    (
        "ceilings/1",
        "/matmul_tflops /memory_gbytes /exp_gops /launch_us /launch_host_us",
        &["half more", "null"],
        "a rate that was measured, or was not",
    ),
    (
        "bench-gpu/1 bench-gpu/3",
        "/cells/*/states/*/sm_clock_mhz /cells/*/states/*/memory_clock_mhz /cells/*/states/*/power_w \
         /cells/*/states/*/temperature_c /cells/*/states/*/throttled_by /cells/*/states",
        &["half more", "shortened", "shuffled"],
        "what NVML told at one moment, beyond what took a round again",
    ),
    (
        "bench/1 bench/2 bench-gpu/1 bench-gpu/3",
        "/cells/*/results/*/calls_per_sample /budget_seconds /seconds /cells/*/seconds /lost_workers",
        &["half more"],
        "how the run went: calls behind a sample, seconds, workers that were lost",
    ),
    ("bench-gpu/3", "/cells/*/results/*/energy", &["null"], "that no counter told anything of these calls"),
    // Lists whose order has no meaning.
    (
        "bench/1 bench/2 bench-gpu/1 bench-gpu/3",
        "/cells /cells/*/results/*/call/call_us /cells/*/results/*/call/host_us",
        &["shuffled"],
        "cells stand each for itself, and calls one after the other are paired with nothing",
    ),
    // Names and words.
    (
        "bench/1 bench/2 bench-gpu/1 bench-gpu/3",
        "/cells/*/name",
        &["null"],
        "a shape may go without its name",
    ),
    (
        "bench-gpu/1 bench-gpu/3",
        "/cells/*/results/*/plan/#",
        &["half more", "other", "shuffled"],
        "what the planner and the driver said of a kernel, within what a GPU has; no report shows it",
    ),
    (
        "bench/1 bench/2 bench-gpu/1 bench-gpu/3",
        "/gpu/driver /gpu/ours/memory_bytes /gpu/torch/cudnn /gpu/torch/installed /torch/python",
        &["half more", "null", "other", "shortened"],
        "names, versions and sizes as the machine and torch tell them",
    ),
    ("ceilings/1", "/machine", &["other"], "a GPU's name; a CPU's must be that of the environment"),
    (
        "verify/1 verify/2 faults/1 bench-gpu/1 bench-gpu/3",
        "/results/*/skipped /results/*/faults /results/*/faults/* /findings/*/said /cells/*/results/*/failure",
        &["other", "doubled"],
        "the words in which somebody gave a reason",
    ),
    (
        "profile/1",
        "/device /reason /assembled/# /loaded/local_bytes /machine_code# /profiled/*/value \
         /roofline/matmul_tflops /roofline/peak_tflops /simulated/#",
        &["half more", "null", "other"],
        "counters of Nsight Compute, ptxas and the simulator, each alone; a report shows none of them",
    ),
    // What the first version did not write down.
    (
        "bench/1 verify/1 stress/1 bench-gpu/1",
        "/cells/*/results/*/error/row/allowed /cells/*/results/*/error/row/plain /results/*/judgement/# \
         /problems/*/judgement/#",
        &["half more", "huge"],
        "version 1 has no floor; maximum and RMS of contenders beside each other share one yardstick all the same",
    ),
    (
        "bench/1",
        "/cells/*/fma_peak_samples_us /cells/*/fma_peak_samples_us/* /cells/*/bandwidth_samples_us \
         /cells/*/bandwidth_samples_us/* /cells/*/full_samples_us /cells/*/full_samples_us/*",
        &["half more", "shuffled"],
        "version 1 has no hash of the samples: of those of a limit only the median shows",
    ),
    (
        "bench-gpu/1",
        "/cells/*/results/*/call/host_p50_us /cells/*/results/*/call/host_p90_us",
        &["half more"],
        "version 1 has no samples of the host's clock",
    ),
    (
        "against-itself/1",
        "/cells/*/comparisons /cells/*/comparisons/*/verdict_interval/high",
        &["half more", "shuffled"],
        "version 1 has no samples of a thing against itself",
    ),
    ("stress/1", "/problems", &["shortened"], "version 1 does not say how many problems were asked for"),
];

/// Kinds that take a while to recompute.
const SLOW: [&str; 5] = ["bench/1", "bench-gpu/1", "bench-gpu/3", "against-itself/1", "against-itself/2"];

/// Rounds of every measurement here.
const ROUNDS: usize = 6;

fn times(rng: &mut Rng, median: f64) -> Vec<f64> {
    (0..ROUNDS).map(|_| median * (0.01 * rng.normal()).exp()).collect()
}

fn judgement(rows: usize, error: f64, lse: bool) -> Judgement {
    let bound = |error: f64, plain: f64, floor: f64| Bound { error, plain, allowed: 2.0 * plain + floor };
    let o = [bound(error, 4e-4, 2e-5), bound(error / 8.0, 6e-5, 5e-6), bound(error / 2.0, 2e-4, 3e-4)];
    Judgement::forward(rows, o, lse.then(|| bound(1e-6, 1e-6, 1e-5)))
}

fn cell(shape: &str, mask: Mask) -> Cell {
    let named = shapes::parse(shape).unwrap();
    Cell {
        name: named.name,
        shape: named.shape,
        mask,
        types: DType::F16.into(),
        pass: Pass::Forward.into(),
        sequences: None,
    }
}

/// A whole file of a kind.
fn document(schema: &str, command: &str, body: &Value) -> Value {
    let mut environment = serde_json::to_value(Environment::read()).unwrap();
    (environment["commit"], environment["dirty"]) = (json!("0123456789".repeat(4)), json!(false));
    (environment["cpu"]["model"], environment["memory_bytes"]) = (json!("A CPU"), json!(1_u64 << 34));
    environment["optimised"] = json!(true);
    environment["cpu"]["paths"] = json!(["avx2", "portable"]);
    environment["cpu"]["chosen"] = json!("avx2");
    environment["cpu"]["why"] = json!("avx2 is the widest that this CPU has of portable, avx2, avx512");
    let command: Vec<&str> = command.split(' ').collect();
    let mut document = json!({"schema": schema, "hash": "", "created": "2026-11-16T12:34:56Z", "command": command,
        "complete": true, "environment": environment});
    document.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
    document
}

fn ceilings(machine: &str) -> Ceilings {
    Ceilings {
        machine: machine.into(),
        created: "2026-11-15T01:02:03Z".into(),
        matmul_tflops: Some(800.0),
        memory_gbytes: Some(4000.0),
        exp_gops: Some(3900.0),
        launch_us: Some(5.0),
        launch_host_us: Some(3.0),
    }
}

/// A benchmark of a GPU in sustained samples: a ladder of two and a peer, in a cell with everything that there can be and
/// in one where all failed.
fn bench_gpu() -> Value {
    bench_gpu_of(Pass::Forward)
}

fn bench_gpu_of(pass: Pass) -> Value {
    let hello = json!({
        "capability": "9.0", "commit": null, "cuda": "13.0", "device": "A GPU", "uuid": "GPU-0", "l2_bytes": 1 << 22,
        "memory_bytes": 1_u64 << 36, "sm_clock_khz": 1_900_000, "sms": 128, "version": env!("CARGO_PKG_VERSION"),
        "empty_launch": {"call_p50_us": 5.0, "host_p50_us": 3.0},
    });
    let (peak, matmul, ceilings) = (peak_tflops(&hello), Some(700.0), ceilings("A GPU"));
    let mut rng = Rng::new(1);
    let mut outcomes: Vec<Outcome> = Vec::new();
    for (shape, mask) in [("small", Mask::None), ("1x2x128x64", Mask::Causal)] {
        let cell = Cell { pass: pass.into(), ..cell(shape, mask) };
        let problem = cell.problem();
        let rows = judged_rows(&problem).len();
        let limits = Limits::Gpu { peak_tflops: peak, matmul_tflops: matmul };
        let results = [("kernel sm80_fwd", 10.0), ("kernel scalar", 40.0), ("fa3", 13.0)].map(|(name, median)| {
            let mut samples = Samples { name: name.into(), ..Samples::default() };
            if mask == Mask::Causal {
                samples.failure = Some("it ran out of memory".into());
                return Measured::new(samples, None, &cell.work(), &limits, None);
            }
            (samples.calls, samples.times) = (15_000, times(&mut rng, median));
            let step = |n: u64| Used { mj: 70_000 + n, us: 1e5, sm_clock_mhz: Some(1500.0 + n as f64) };
            samples.used = (0..ROUNDS as u64).map(|n| (n != 1).then(|| step(n))).collect();
            let mut details = Details {
                energy: Energy::of(&samples, problem.flops()),
                call: Some(CallClock::of(times(&mut rng, median + 5.0), times(&mut rng, 3.0))),
                ..Details::default()
            };
            if let Some(kernel) = name.strip_prefix("kernel ") {
                details.replay_is_same = Some(true);
                details.plan = Some(json!({
                    "kernel": kernel, "schedule": format!("{kernel}:block_m=64,warps=4"), "target": "sm_90a",
                    "reason": "asked for", "grid": [8, 4, 1], "threads": 128, "shared_bytes": 1024, "registers": 128,
                    "local_bytes": 0, "code": "0123456789abcdef".repeat(4),
                }));
            }
            let mut error = judgement(rows, 1e-4, false);
            if pass == Pass::Backward {
                error.outputs[0].output = Name::Dq;
            }
            let found = Measured::new(samples, Some(error), &cell.work(), &limits, Some(&ceilings));
            Measured { details: Some(details), ..found }
        });
        let again = mask == Mask::None;
        let conditions = GpuConditions {
            group: "all".into(),
            sets: sets_to_flush(problem.min_bytes(), f64::from(1 << 22)),
            seconds: 12.0,
            first_call: Some(FirstCall { cold_us: Some(4e5), warm_us: Some(2e4), failure: None }),
            retaken_rounds: usize::from(again),
            measured_again: again,
            ..GpuConditions::default()
        };
        outcomes.push(Outcome::new(&cell, rows, results.into(), Conditions::Gpu(conditions), MARGIN));
    }
    let mut cells = serde_json::to_value(&outcomes).unwrap();
    let state = |n: usize| {
        let heat = n == 3;
        let reasons =
            if heat { json!(["power cap", "hardware thermal slowdown"]) } else { json!(["power cap"]) };
        json!({"sm_clock_mhz": 1900, "memory_clock_mhz": 3200, "power_w": 400.5, "power_limit_w": 700.0,
               "temperature_c": 50, "throttled_by": reasons, "throttled": heat})
    };
    cells[0]["states"] = (0..ROUNDS + 2).map(state).collect();
    let elements = largest_tensor(&Problem::new(1, 2, 128, 64, DType::F16));
    let body = json!({
        "clock": "kernel", "cache": "cold", "regime": "sustained", "no_torch_because": null, "ceilings": ceilings,
        "budget_seconds": 15.0, "seconds": 30.0, "lost_workers": 1, "asked": 2, "cells": cells, "summaries": summaries(&outcomes),
        "gpu": {"ours": hello, "driver": "580.1", "peak_tflops": peak, "matmul_tflops": matmul, "no_fa3_because": null,
                "torch": {"version": "2.11.0", "cuda": "13.0", "cudnn": 91900, "device": "A GPU", "installed": ["fa3"],
                          "versions": {"fa3": format!("sha256:{}", "0123456789abcdef".repeat(4))}}},
        "inputs": [{"dtype": "f16", "seed": SEED, "elements": elements,
                    "checksums": Pool::draw(DType::F16, elements, SEED).checksums()}],
    });
    document(schemas::BENCH_GPU, "flashcore bench small --ladder --sustained", &body)
}

/// A benchmark of a CPU beside torch: a causal call and one query.
fn bench_cpu() -> Value {
    let mut rng = Rng::new(2);
    let ceilings =
        Ceilings { launch_us: None, launch_host_us: None, ..ceilings("cpu-avx2 on A CPU, 2 threads") };
    let mut outcomes = Vec::new();
    for (shape, mask) in [("small", Mask::Causal), ("1x2x1/512x64", Mask::None)] {
        let cell = cell(shape, mask);
        let rows = self::rows(&cell.problem());
        let mut of = |name: &str, median: f64| {
            let times = times(&mut rng, median);
            let samples = Samples { name: name.into(), calls: 100, times, ..Samples::default() };
            (samples, Some(judgement(rows, 1e-4, false)))
        };
        let results = vec![of("flashcore", 20.0), of("torch", 30.0)];
        let decode = cell.is_decode();
        let conditions = CpuConditions {
            checksums: checksums(&inputs(&cell, &Device::cpu()).unwrap()),
            fma_peak_samples_us: times(&mut rng, 10.0),
            bandwidth_samples_us: if decode { times(&mut rng, 15.0) } else { Vec::new() },
            full_samples_us: if decode { Vec::new() } else { times(&mut rng, 35.0) },
            ..CpuConditions::default()
        };
        outcomes.push(Outcome::on_cpu(&cell, rows, results, conditions, Some(&ceilings), MARGIN));
    }
    let body = json!({
        "clock": "call", "device": "cpu (avx2, 2 threads)", "threads": 2, "no_torch_because": null, "ceilings": ceilings,
        "torch": {"version": "2.11.0", "threads": 2, "python": "python3"}, "asked": 2, "cells": outcomes,
        "summaries": summaries(&outcomes), "causal_shares": causal_shares(&outcomes),
    });
    document(schemas::BENCH, "flashcore bench small 1x2x1/512x64 --margin 2", &body)
}

fn against_itself() -> Value {
    let mut rng = Rng::new(3);
    let samples = (0..4).map(|_| [times(&mut rng, 10.2), times(&mut rng, 10.0)]).collect();
    let found = AgainstItself::of("1x8x512x64 f16 full".into(), 1.02, samples, MARGIN).unwrap();
    let command = "flashcore against-itself mission --times 4 --handicap 2%";
    document(schemas::AGAINST_ITSELF, command, &json!({"cells": [found]}))
}

/// Three cases on two engines: passed, skipped and failed.
fn verify() -> Value {
    let cases: Vec<_> = corpus().into_iter().filter(|case| case.tier == Tier::Quick).take(3).collect();
    let engines = ["cpu-avx2", "cpu-portable"];
    let (mut results, mut worst) = (Vec::new(), 0.0);
    for (n, case) in cases.iter().enumerate() {
        for engine in engines {
            let judgement = judgement(rows(&case.problem), 1e-4 * (n + 1) as f64, case.problem.lse);
            let status = ["passed", "skipped", "failed"][if engine == engines[0] { 0 } else { n }];
            if engine == engines[0] {
                worst = judgement.share_used();
            }
            results.push(json!({
                "case": case.name, "engine": engine, "status": status, "problem": case.problem.to_string(),
                "inputs": case.inputs.name(), "wild": case.wild.map(crate::inputs::Wild::name), "arrangement": case.arrangement.name(), "seed": case.seed,
                "judgement": (status == "passed").then_some(&judgement),
                "skipped": (status == "skipped").then_some("it does not compute this"),
                "faults": if status == "failed" { json!(["row 7 is off"]) } else { json!([]) },
                "reproduce": format!("flashcore verify --full --device {engine} --filter '={}'", case.name),
            }));
        }
    }
    let first = judgement(1, 1e-4, cases[0].problem.lse).share_used();
    let body = json!({
        "tier": "quick", "rule": RULE, "asked": 3, "results": results, "engines": [
            {"engine": engines[0], "passed": 3, "skipped": 0, "failed": 0, "skipped_why": {}, "worst_share": worst, "worst_case": cases[2].name},
            {"engine": engines[1], "passed": 1, "skipped": 1, "failed": 1, "skipped_why": {"it does not compute this": 1}, "worst_share": first, "worst_case": cases[0].name},
        ],
    });
    document(schemas::VERIFY, "flashcore verify --filter x", &body)
}

fn planted() -> Value {
    let finding = |trial: &faults::Trial| json!({"name": trial.name, "nature": trial.nature, "judge": trial.judge, "as_it_should": true, "said": "so"});
    let all = faults::all();
    let honest = all.iter().filter(|trial| trial.nature == faults::Nature::Honest).count();
    let caught = all.len() - honest;
    let findings: Vec<Value> = all.iter().map(finding).collect();
    let body = json!({"caught": [caught, caught], "accepted": [honest, honest], "findings": findings});
    document(schemas::FAULTS, "flashcore verify --faults", &body)
}

fn stress() -> Value {
    let problem = |text: &str, lse: bool| {
        let rows = self::rows(&super::checks::problem(text).unwrap());
        json!({
            "problem": text, "schedule": "sm90_fwd:warpgroups=2,block_n=128", "judgement": judgement(rows, 1e-4, lse),
            "threaded": {"runs": 100, "different": 0}, "replayed": {"runs": 10, "different": 0},
            "repeated": {"runs": 50, "different": 0},
        })
    };
    let body = json!({
        "device": "cuda:0 (A GPU)", "asked": 2,
        "plan": {"threads": 8, "streams": 4, "calls": 100, "replays": 10, "repeats": 50},
        "problems": [problem("1x8x512x64 f16", false), problem("1x16x2048x64 f16 causal", true)],
    });
    document(schemas::STRESS, "flashcore verify --stress --problems 2", &body)
}

fn ceilings_of(machine: &str) -> Value {
    let mut found = serde_json::to_value(ceilings(machine)).unwrap();
    found.as_object_mut().unwrap().remove("created");
    document(schemas::CEILINGS, "flashcore ceilings", &found)
}

fn profile() -> Value {
    let text = include_str!("../../../../../record/2026-11-15-h200-profile-mission.json");
    serde_json::from_str(text).unwrap()
}

/// A file as the first version was.
fn first(mut document: Value) -> Value {
    if document["schema"] == schemas::BENCH_GPU {
        document = second(document);
    }
    let mut names = vec!["asked", "floor", "pairing", "host_us", "wild", "skipped_why"];
    if document["schema"] == schemas::AGAINST_ITSELF {
        names.push("samples_us");
    }
    without(&mut document, &names);
    if document["schema"] == schemas::BENCH {
        limits_by_the_median(&mut document);
    }
    let schema = document["schema"].as_str().unwrap().replace("/2", "/1");
    document["schema"] = json!(schema);
    document
}

/// A benchmark of a GPU as the second version was.
fn second(mut document: Value) -> Value {
    without(&mut document, &["regime", "energy", "exactness", "orders", "versions", "no_fa3_because"]);
    document["schema"] = json!("flashcore.bench-gpu/2");
    document
}

/// Removes the fields of these names, wherever they are.
fn without(value: &mut Value, names: &[&str]) {
    match value {
        Value::Object(members) => {
            members.retain(|name, _| !names.contains(&name.as_str()));
            members.values_mut().for_each(|member| without(member, names));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| without(item, names)),
        _ => {}
    }
}

/// What limits are, and shares of them, in the first version.
fn limits_by_the_median(document: &mut Value) {
    for cell in document["cells"].as_array_mut().unwrap() {
        for (limit, unit, amount) in [("fma_peak", "gflops", "flops"), ("bandwidth", "gbytes", "bytes")] {
            let samples = cell[format!("{limit}_samples_us")].clone();
            let samples: Vec<f64> = serde_json::from_value(samples).unwrap();
            let (rate, share) = (format!("{limit}_{unit}"), format!("{limit}_share"));
            let Some(median) = stats::median(&samples) else { continue };
            let limit = cell[amount].as_f64().unwrap() / median / 1e3;
            cell[&rate] = json!(limit);
            for result in cell["results"].as_array_mut().unwrap() {
                result[&share] = json!(result[unit].as_f64().unwrap() / limit);
            }
        }
    }
}

fn sealed(document: &Value) -> String {
    let mut document = document.clone();
    document["hash"] = json!("");
    seal(&(serde_json::to_string_pretty(&document).unwrap() + "\n"))
}

/// The changes an attacker may make to a value, each with its name.
fn changes(value: &Value) -> Vec<(&'static str, Value)> {
    let mut all = match value {
        Value::Null => {
            vec![("a number", json!(1.5)), ("a text", json!("something else")), ("true", json!(true))]
        }
        Value::Bool(flag) => vec![("flipped", json!(!flag)), ("null", Value::Null)],
        Value::Number(number) => {
            let half_more = match number.as_u64() {
                Some(0) => json!(1),
                Some(count) => json!(count + count.div_ceil(2)),
                None => json!(number.as_f64().unwrap() * 1.5),
            };
            let negated = match number.as_i64() {
                Some(count) => json!(-count.max(1)),
                None => json!(-number.as_f64().unwrap()),
            };
            let huge = if number.is_f64() { json!(1e300) } else { json!(u64::MAX) };
            vec![
                ("half more", half_more),
                ("negated", negated),
                ("huge", huge),
                ("NaN", json!("NaN")),
                ("null", Value::Null),
            ]
        }
        Value::String(_) => {
            vec![("other", json!("something else")), ("empty", json!("")), ("null", Value::Null)]
        }
        Value::Array(items) => {
            let mut turned = items.clone();
            turned.reverse();
            let mut swapped = items.clone();
            if let [first, second, ..] = &mut swapped[..] {
                std::mem::swap(first, second);
            }
            let shorter = items[..items.len().saturating_sub(1)].to_vec();
            let doubled = [&items[..], &items[..items.len().min(1)]].concat();
            vec![
                ("shuffled", json!(turned)),
                ("shuffled", json!(swapped)),
                ("shortened", json!(shorter)),
                ("doubled", json!(doubled)),
                ("null", Value::Null),
            ]
        }
        Value::Object(members) => {
            let mut all = vec![("null", Value::Null)];
            for name in members.keys() {
                let mut fewer = members.clone();
                fewer.remove(name);
                all.push(("removed", Value::Object(fewer)));
            }
            let mut more = members.clone();
            more.insert("note".into(), json!("FASTER"));
            all.push(("added", Value::Object(more)));
            all
        }
    };
    all.retain(|(_, changed)| changed != value);
    all
}

/// Every place of a document; of long lists of plain values the first, one in the middle and the last.
fn places(value: &Value, at: &str, all: &mut Vec<String>) {
    all.push(at.into());
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                places(member, &format!("{at}/{name}"), all);
            }
        }
        Value::Array(items) => {
            let chosen = [0, items.len() / 2, items.len().saturating_sub(1)];
            let plain = items.len() > 6;
            for (n, item) in items.iter().enumerate().filter(|(n, _)| !plain || chosen.contains(n)) {
                places(item, &format!("{at}/{n}"), all);
            }
        }
        _ => {}
    }
}

/// A place without its numbers: `/cells/*/name`.
fn general(at: &str) -> String {
    let part = |part: &str| if part.parse::<usize>().is_ok() { "*".to_string() } else { part.to_string() };
    at.split('/').map(part).collect::<Vec<_>>().join("/")
}

fn is_free(kind: &str, at: &str, change: &str) -> Option<usize> {
    FREE.iter().position(|(kinds, places, changes, _)| {
        let kinds = *kinds == "*" || kinds.split(' ').any(|known| known == kind);
        let place = places
            .split(' ')
            .any(|place| place == at || place.strip_suffix('#').is_some_and(|start| at.starts_with(start)));
        kinds && place && changes.contains(&change)
    })
}

/// Changes everything in a document, and returns the entries of the list that were needed.
fn attack(honest: &Value) -> BTreeSet<usize> {
    let kind = honest["schema"].as_str().unwrap().trim_start_matches("flashcore.");
    let found = audit(&sealed(honest)).unwrap();
    assert!(found.holds(), "{kind}: {:#?}", found.contradictions);
    let mut all = Vec::new();
    places(honest, "", &mut all);
    let accepted: BTreeSet<(String, &str)> = all
        .par_iter()
        .filter(|at| {
            // The header of every file is checked in the same way; it is attacked only in kinds that are quick to
            // check.
            let begins = ["/environment", "/command"].iter().any(|start| at.starts_with(start));
            !(["/hash", ""].contains(&at.as_str()) || (begins && SLOW.contains(&kind)))
        })
        .flat_map_iter(|at| {
            let value = honest.pointer(at).unwrap();
            let survives = |(change, changed): (&'static str, Value)| {
                let mut document = honest.clone();
                *document.pointer_mut(at).unwrap() = changed;
                let accepted = audit(&sealed(&document)).is_ok_and(|audit| audit.holds());
                accepted.then(|| (general(at), change))
            };
            changes(value).into_iter().filter_map(survives).collect::<Vec<_>>()
        })
        .collect();
    let (free, missed): (Vec<_>, Vec<_>) = accepted
        .iter()
        .map(|(at, change)| ((at, change), is_free(kind, at, change)))
        .partition(|it| it.1.is_some());
    let missed: Vec<String> =
        missed.iter().map(|((at, change), _)| format!("{kind} {at}: {change}")).collect();
    assert!(missed.is_empty(), "{} changes are not seen:\n{}", missed.len(), missed.join("\n"));
    free.into_iter().filter_map(|(_, entry)| entry).collect()
}

/// Every kind of evidence. Version 2 of a GPU's benchmarks, which has nothing that versions 1 and 3 have not, is left out.
fn honest() -> Vec<Value> {
    let versions = [bench_gpu(), bench_cpu(), against_itself(), verify(), stress()];
    let mut all: Vec<Value> = versions.iter().cloned().map(first).collect();
    all.extend(versions);
    all.extend([planted(), ceilings_of("A GPU"), profile()]);
    all
}

#[test]
fn whatever_is_changed_in_evidence_is_seen_or_is_free_for_a_reason() {
    let mut used = BTreeSet::new();
    let mut failures = Vec::new();
    for document in honest() {
        match std::panic::catch_unwind(|| attack(&document)) {
            Ok(entries) => used.extend(entries),
            Err(why) => failures.push(why.downcast_ref::<String>().cloned().unwrap_or_default()),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    for (n, (kinds, places, _, reason)) in FREE.iter().enumerate() {
        assert!(used.contains(&n), "{kinds} {places} need not be free: {reason}");
    }
}

#[test]
fn a_verdict_beside_a_result_that_is_wrong_is_seen_whatever_else_fits() {
    for (mut document, of) in [(bench_gpu(), 2), (bench_cpu(), 2), (first(bench_gpu()), 2)] {
        let ours = &mut document["cells"][0]["results"][0]["error"];
        (ours["max"]["error"], ours["row"]["error"]) = (json!(1.0), json!(1.0));
        ours["rms"]["error"] = json!(0.1);
        ours["first_bad"] = json!({"lse": false, "row": {"batch": 0, "head": 0, "query": 0}, "column": 0,
            "expected": 0.0, "actual": 1.0, "allowed": 0.1});
        let found = audit(&sealed(&document)).unwrap();
        assert!(found.contradictions.len() >= of - 1, "{found:?}");
        assert!(found.contradictions[0].contains("verdict"), "{found:?}");
    }
}

#[test]
fn a_contender_that_failed_has_no_numbers_and_no_comparison() {
    for mut document in [bench_gpu(), bench_cpu()] {
        let last = document["cells"][0]["results"].as_array().unwrap().len() - 1;
        document["cells"][0]["results"][last]["failure"] = json!("it died");
        let found = audit(&sealed(&document)).unwrap();
        let said = found.contradictions.join("\n");
        assert!(said.contains("p50_us") && said.contains("comparisons"), "{said}");
    }
}

#[test]
fn a_comparison_made_of_other_pairs_is_seen_though_every_number_follows() {
    let mut document = bench_cpu();
    let cell = &mut document["cells"][0];
    cell["results"][1]["samples_us"].as_array_mut().unwrap().reverse();
    let samples =
        |n: usize| -> Vec<f64> { serde_json::from_value(cell["results"][n]["samples_us"].clone()).unwrap() };
    let made = Comparison::of(&samples(0), "torch", &samples(1), MARGIN).unwrap();
    cell["comparisons"] = json!([made]);
    let found = audit(&sealed(&document)).unwrap();
    assert!(found.contradictions.iter().any(|why| why.contains("pairing")), "{found:?}");
}

#[test]
fn a_sustained_run_is_not_taken_for_bursts_and_bursts_not_for_a_sustained_run() {
    let said = |document: &Value| audit(&sealed(document)).unwrap().contradictions.join("\n");
    let honest = bench_gpu();
    assert_eq!(said(&honest), "");
    // Whoever changes the regime changes the command as well.
    let mut bursts = honest.clone();
    bursts["regime"] = json!("bursts");
    assert!(said(&bursts).contains("regime is \"bursts\""));
    bursts["command"] = json!(["flashcore", "bench", "small", "--ladder"]);
    assert!(said(&bursts).contains("energy is of samples that are too short"));
    let mut short = honest;
    for result in short["cells"][0]["results"].as_array_mut().unwrap() {
        result["calls_per_sample"] = json!(50);
    }
    assert!(said(&short).contains("too short for the power limit"));
}

#[test]
fn a_benchmark_of_gradients_is_read_and_not_taken_for_one_of_attention() {
    let said = |document: &Value| audit(&sealed(document)).unwrap().contradictions.join("\n");
    let honest = bench_gpu_of(Pass::Backward);
    assert_eq!(said(&honest), "");
    let mut forward = honest.clone();
    for cell in forward["cells"].as_array_mut().unwrap() {
        assert_eq!(cell.as_object_mut().unwrap().remove("pass"), Some(json!("backward")));
    }
    assert!(said(&forward).contains("cells[0].results[0].error.max"), "{}", said(&forward));
    let mut loose = honest.clone();
    loose["cells"][0]["results"][0]["error"]["dq"]["max"]["allowed"] = json!(1.0);
    assert!(said(&loose).contains("allows something else"), "{}", said(&loose));
    let mut sideways = honest;
    sideways["cells"][0]["pass"] = json!("sideways");
    assert!(said(&sideways).contains("a pass that is none"), "{}", said(&sideways));
}

#[test]
fn version_2_of_a_benchmark_is_still_read_and_has_nothing_of_version_3() {
    let said = |document: &Value| audit(&sealed(document)).unwrap().contradictions.join("\n");
    let mut document = second(bench_gpu());
    assert_eq!(said(&document), "");
    document["regime"] = json!("sustained");
    document["cells"][0]["exactness"] = Value::Null;
    let said = said(&document);
    assert!(said.contains("regime is no field") && said.contains("exactness is no field"), "{said}");
}
