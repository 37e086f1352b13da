//! Whether an evidence file holds together: every derived number is made again from the raw samples beside it, the hash
//! from the text, and what a gate needs must be there.
//!
//! A field is **checked** when it was made again and agrees, **absent** when an older file does not have it, and a
//! **contradiction** when it says something else than its sources, or cannot be true of the machine. Intervals are
//! resampled, so theirs agree within half of their width; everything else agrees to nine digits.

use flashcore::Mask;
use serde::Serialize;
use serde_json::Value;

use crate::bench::Comparison;
use crate::stats::{self, Interval, Verdict};
use crate::{cases, evidence, physics, shapes};

/// What was found in a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Audit {
    /// The file's schema.
    pub schema: String,
    /// How many numbers, verdicts and hashes were made again and agree.
    pub checked: usize,
    /// What the file does not say.
    pub absent: Vec<String>,
    /// What cannot be true.
    pub contradictions: Vec<String>,
}

impl Audit {
    /// Whether nothing contradicts itself.
    pub fn holds(&self) -> bool {
        self.contradictions.is_empty()
    }

    fn agree(&mut self, at: &str, said: &Value, made: Option<f64>) {
        match (said.as_f64(), made) {
            (None, None) => {}
            (Some(said), Some(made)) if near(said, made) => self.checked += 1,
            (Some(said), Some(made)) => self.deny(at, format!("is {said}, but its source makes it {made}")),
            (Some(said), None) => self.deny(at, format!("is {said}, but nothing was measured")),
            (None, Some(made)) if said.is_null() => {
                self.deny(at, format!("is null, but its source makes it {made}"));
            }
            (None, Some(_)) => self.deny(at, format!("is no number: {said}")),
        }
    }

    fn same(&mut self, at: &str, said: &Value, made: &Value) {
        if said == made {
            self.checked += 1;
        } else {
            self.deny(at, format!("is {said}, but its source makes it {made}"));
        }
    }

    fn require(&mut self, at: &str, holds: bool, otherwise: &str) {
        if holds {
            self.checked += 1;
        } else {
            self.deny(at, otherwise);
        }
    }

    fn deny(&mut self, at: &str, why: impl std::fmt::Display) {
        self.contradictions.push(format!("{at} {why}"));
    }

    fn miss(&mut self, what: impl Into<String>) {
        self.absent.push(what.into());
    }
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

/// Audits the text of a file. An error says why it is no evidence at all.
pub fn audit(text: &str) -> Result<Audit, String> {
    let document: Value = serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
    let schema = document["schema"].as_str().filter(|schema| schema.starts_with("flashcore."));
    let schema = schema.ok_or("it has no schema of flashcore's")?.to_string();
    let mut audit = Audit { schema: schema.clone(), ..Audit::default() };
    match evidence::hash_holds(text, &document) {
        Some(true) => audit.checked += 1,
        Some(false) => audit.deny("hash", "is not that of the text: the file was changed"),
        None => audit.miss("hash"),
    }
    if !schema.starts_with("flashcore.trial/") {
        for field in ["commit", "dirty"] {
            if document["environment"][field].is_null() {
                audit.miss(format!("environment.{field}"));
            }
        }
        for field in ["created", "command", "complete", "environment"] {
            audit.require(field, !document[field].is_null(), "is needed and is not there");
        }
    }
    match schema.as_str() {
        "flashcore.bench/1" | "flashcore.bench/2" | "flashcore.bench-gpu/1" => bench(&mut audit, &document),
        "flashcore.against-itself/1" => against_itself(&mut audit, &document),
        "flashcore.verify/1" => verify(&mut audit, &document),
        "flashcore.faults/1" => faults(&mut audit, &document),
        "flashcore.stress/1" => stress(&mut audit, &document),
        "flashcore.trial/1" => trial(&mut audit, &document),
        _ => audit.miss("derived numbers of this schema"),
    }
    Ok(audit)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn numbers(value: &Value) -> Vec<f64> {
    list(value).iter().filter_map(Value::as_f64).collect()
}

/// What a machine can do at most, where the file says so.
#[derive(Clone, Copy, Default)]
struct Limits {
    peak: Option<f64>,
    matmul: Option<f64>,
    /// Whether a CPU's limits are the best of their samples; before version 2 they were the medians, and no rate was above.
    best: bool,
}

fn bench(audit: &mut Audit, document: &Value) {
    let gpu = &document["gpu"];
    let best = document["schema"] == "flashcore.bench/2";
    let on_gpu = Limits { peak: gpu["peak_tflops"].as_f64(), matmul: gpu["matmul_tflops"].as_f64(), best };
    if !gpu.is_null() {
        for (name, limit) in [("peak_tflops", on_gpu.peak), ("matmul_tflops", on_gpu.matmul)] {
            if limit.is_none() {
                audit.miss(format!("gpu.{name}"));
            }
        }
    }
    let cells = list(&document["cells"]);
    audit.require("cells", !cells.is_empty(), "are none: nothing was measured");
    for (n, cell) in cells.iter().enumerate() {
        check_cell(audit, &format!("cells[{n}]"), cell, &on_gpu);
    }
    check_summaries(audit, document, cells);
}

fn check_cell(audit: &mut Audit, at: &str, cell: &Value, limits: &Limits) {
    let results = list(&cell["results"]);
    if !cell["failure"].is_null() || results.is_empty() {
        let why = cell["failure"].as_str().unwrap_or("there is no result");
        return audit.miss(format!("{at}: {why}"));
    }
    check_size(audit, at, cell);
    for (n, result) in results.iter().enumerate() {
        check_result(audit, &format!("{at}.results[{n}]"), cell, result, limits);
    }
    let ours = &results[0];
    if ours["failure"].is_null() {
        audit.require(
            &format!("{at}.results[0].error"),
            !ours["error"].is_null(),
            "is null beside a time: nobody knows whether it is right",
        );
    }
    for (rate, samples, amount) in [
        ("fma_peak_gflops", "fma_peak_samples_us", "flops"),
        ("bandwidth_gbytes", "bandwidth_samples_us", "bytes"),
    ] {
        if let Some(time) = stats::quantile(&numbers(&cell[samples]), if limits.best { 0.0 } else { 0.5 }) {
            let limit = cell[amount].as_f64().map(|amount| amount / time / 1e3);
            audit.agree(&format!("{at}.{rate}"), &cell[rate], limit);
        }
    }
    if let Some(full_us) = stats::median(&numbers(&cell["full_samples_us"])) {
        let text = |name: &str| cell[name].as_str().unwrap_or_default();
        let full = shapes::parse(text("shape")).ok().zip(text("dtype").parse().ok());
        let full = full.map(|(named, dtype)| named.shape.problem(Mask::None, dtype).flops());
        let share = stats::median(&numbers(&ours["samples_us"]))
            .zip(cell["flops"].as_f64().zip(full))
            .map(|(us, (flops, full))| full_us / us * (flops / full));
        audit.agree(&format!("{at}.causal_share"), &cell["causal_share"], share);
    }
    let beyond = |share: &str| ours[share].as_f64().is_some_and(|share| share > physics::ABOVE_MEASURED);
    let impossible = limits.best && (beyond("fma_peak_share") || beyond("bandwidth_share"));
    audit.same(&format!("{at}.impossible"), &cell["impossible"], &Value::from(impossible));
    for (n, said) in list(&cell["comparisons"]).iter().enumerate() {
        check_comparison(audit, &format!("{at}.comparisons[{n}]"), said, ours, results, impossible);
    }
    let mut below: Option<&Value> = None;
    for (n, rung) in list(&cell["ladder"]).iter().enumerate() {
        let at = format!("{at}.ladder[{n}]");
        let name = format!("kernel {}", rung["kernel"].as_str().unwrap_or_default());
        let Some(result) = results.iter().find(|result| result["name"] == name.as_str()) else {
            audit.deny(&at, format!("has no result named {name}"));
            continue;
        };
        audit.agree(&format!("{at}.p50_us"), &rung["p50_us"], stats::median(&numbers(&result["samples_us"])));
        if let (false, Some(below)) = (rung["gain"].is_null(), below) {
            check_comparison(
                audit,
                &format!("{at}.gain"),
                &rung["gain"],
                result,
                std::slice::from_ref(below),
                false,
            );
        }
        if !list(&result["samples_us"]).is_empty() {
            below = Some(result);
        }
    }
}

/// Operations and bytes follow from the shape; rows that were judged are rows.
fn check_size(audit: &mut Audit, at: &str, cell: &Value) {
    let text = |name: &str| cell[name].as_str().unwrap_or_default();
    let shape = shapes::parse(text("shape"));
    let (Ok(named), Ok(mask), Ok(dtype)) = (shape, cases::parse_mask(text("mask")), text("dtype").parse())
    else {
        return audit.deny(at, "has a shape, a mask or a dtype that is none");
    };
    let problem = named.shape.problem(mask, dtype);
    audit.agree(&format!("{at}.flops"), &cell["flops"], Some(problem.flops()));
    audit.agree(&format!("{at}.bytes"), &cell["bytes"], Some(problem.min_bytes()));
    let rows = problem.batch * problem.heads_q * problem.len_q;
    audit.agree(&format!("{at}.rows"), &cell["rows"], Some(rows as f64));
    let judged = cell["judged_rows"].as_u64().unwrap_or(0) as usize;
    audit.require(
        &format!("{at}.judged_rows"),
        (1..=rows).contains(&judged),
        "are none, or more than there are",
    );
}

fn check_result(audit: &mut Audit, at: &str, cell: &Value, result: &Value, limits: &Limits) {
    let samples = numbers(&result["samples_us"]);
    audit.require(
        &format!("{at}.samples_us"),
        samples.len() == list(&result["samples_us"]).len() && samples.iter().all(|&time| time > 0.0),
        "hold something that is no time",
    );
    check_quantiles(audit, at, result, &samples, "");
    let field = |name: &str| format!("{at}.{name}");
    check_interval(audit, &field("median_interval_us"), &result["median_interval_us"], || {
        stats::median_interval(&samples, 0.95)
    });
    let p50 = stats::median(&samples);
    let rate = |name: &str, unit: f64| Some(cell[name].as_f64()? / p50? / unit);
    audit.agree(&field("gbytes"), &result["gbytes"], rate("bytes", 1e3));
    if result.get("tflops").is_some() {
        let tflops = rate("flops", 1e6);
        let share = |of: Option<f64>| Some(tflops? / of?);
        audit.agree(&field("tflops"), &result["tflops"], tflops);
        audit.agree(&field("peak_share"), &result["peak_share"], share(limits.peak));
        audit.agree(&field("matmul_share"), &result["matmul_share"], share(limits.matmul));
        if let Some(share) = share(limits.peak) {
            audit.require(&field("tflops"), share <= physics::ABOVE_PEAK, "is more than the chip can do");
        }
    }
    if result.get("gflops").is_some() {
        let gflops = rate("flops", 1e3);
        let share = |rate: Option<f64>, of: &str| Some(rate? / cell[of].as_f64()?);
        audit.agree(&field("gflops"), &result["gflops"], gflops);
        audit.agree(&field("fma_peak_share"), &result["fma_peak_share"], share(gflops, "fma_peak_gflops"));
        let of_bandwidth = share(rate("bytes", 1e3), "bandwidth_gbytes");
        audit.agree(&field("bandwidth_share"), &result["bandwidth_share"], of_bandwidth);
        if let (false, Some(share)) = (limits.best, share(gflops, "fma_peak_gflops")) {
            audit.require(
                &field("gflops"),
                share <= physics::ABOVE_MEASURED,
                "is more than the machine can do",
            );
        }
    }
    if !result["call"].is_null() {
        let (call, at) = (&result["call"], field("call"));
        let samples = numbers(&call["call_us"]);
        check_quantiles(audit, &at, call, &samples, "");
    }
    if !result["error"].is_null() {
        check_judgement(audit, &field("error"), &result["error"], None);
    }
}

fn check_quantiles(audit: &mut Audit, at: &str, said: &Value, samples: &[f64], prefix: &str) {
    for (name, p) in [("p50_us", 0.5), ("p90_us", 0.9), ("min_us", 0.0)] {
        let name = format!("{prefix}{name}");
        audit.agree(&format!("{at}.{name}"), &said[&name], stats::quantile(samples, p));
    }
}

fn interval(value: &Value) -> Option<Interval> {
    serde_json::from_value(value.clone()).ok()
}

fn check_interval(audit: &mut Audit, at: &str, said: &Value, made: impl FnOnce() -> Option<Interval>) {
    match (interval(said), made()) {
        (None, None) => {}
        (Some(said), Some(made)) => {
            let slack = 0.5 * (made.high - made.low) + 1e-9 * made.high.abs();
            let agrees = (said.low - made.low).abs() <= slack && (said.high - made.high).abs() <= slack;
            let why = format!(
                "is {} to {}, but its samples make it {} to {}",
                said.low, said.high, made.low, made.high
            );
            audit.require(at, agrees && said.low <= said.high, &why);
        }
        (Some(_), None) => audit.deny(at, "is given, but there are too few samples for one"),
        (None, Some(_)) => audit.deny(at, "is absent, though there are samples for one"),
    }
}

/// A comparison must be of the samples of this very cell, and its verdict must follow from its interval.
/// Nothing is decided where ours is `impossible`.
fn check_comparison(
    audit: &mut Audit,
    at: &str,
    said: &Value,
    ours: &Value,
    results: &[Value],
    impossible: bool,
) {
    let Some(peer) = results.iter().find(|result| result["name"] == said["peer"]) else {
        return audit.deny(at, format!("is with {}, who has no result here", said["peer"]));
    };
    let samples = |of: &Value| numbers(&of["samples_us"]);
    let margin = said["margin"].as_f64().unwrap_or(stats::MARGIN);
    let Some(made) = Comparison::of(&samples(ours), "", &samples(peer), margin) else {
        return audit.deny(at, "is made, but there are too few samples for it");
    };
    audit.agree(&format!("{at}.speed_up"), &said["speed_up"], Some(made.speed_up));
    check_interval(audit, &format!("{at}.interval"), &said["interval"], || Some(made.interval));
    check_interval(audit, &format!("{at}.verdict_interval"), &said["verdict_interval"], || {
        Some(made.verdict_interval)
    });
    let rounds = samples(ours).len().min(samples(peer).len());
    let follows =
        interval(&said["verdict_interval"]).map(|interval| stats::verdict_after(rounds, &interval, margin));
    let follows = if impossible { Some(Verdict::Undecided) } else { follows };
    let verdict = follows.map_or(Value::Null, |verdict: Verdict| Value::from(verdict.to_string()));
    audit.same(&format!("{at}.verdict"), &said["verdict"], &verdict);
    if said["verdict"] == "FASTER" {
        audit.require(at, !ours["error"].is_null(), "calls faster what nobody knows to be right");
    }
}

fn check_judgement(audit: &mut Audit, at: &str, said: &Value, passed: Option<bool>) {
    let mut holds = true;
    for name in ["max", "rms", "row", "lse"] {
        let bound = &said[name];
        let (Some(error), Some(plain), Some(allowed)) =
            (bound["error"].as_f64(), bound["plain"].as_f64(), bound["allowed"].as_f64())
        else {
            // An infinite error is null in JSON: that is not within any bound.
            holds &= bound.is_null() && name == "lse";
            continue;
        };
        holds &= error <= allowed;
        let enough = allowed >= 2.0 * plain * (1.0 - 1e-9);
        audit.require(
            &format!("{at}.{name}"),
            enough,
            "allows less than twice the plain error, so it is not the rule's",
        );
    }
    if let Some(passed) = passed {
        audit.require(at, holds == passed, "does not fit the status beside it");
    }
}

fn check_summaries(audit: &mut Audit, document: &Value, cells: &[Value]) {
    for (n, said) in list(&document["summaries"]).iter().enumerate() {
        let at = format!("summaries[{n}]");
        let in_group = |cell: &&Value| {
            let group = said["group"].as_str();
            group.is_none_or(|group| group == "all" || cell["group"] == group)
        };
        let pair = |cell: &Value| {
            let found = list(&cell["comparisons"]).iter().find(|it| it["peer"] == said["peer"])?;
            Some((found["speed_up"].as_f64()?, found["verdict"].as_str()?.to_string()))
        };
        let pairs: Vec<(f64, String)> = cells.iter().filter(in_group).filter_map(pair).collect();
        let ratios: Vec<f64> = pairs.iter().map(|(ratio, _)| *ratio).collect();
        let smallest = ratios.iter().copied().min_by(f64::total_cmp);
        audit.agree(&format!("{at}.cells"), &said["cells"], Some(pairs.len() as f64));
        let mean = stats::geometric_mean(&ratios);
        audit.agree(&format!("{at}.geometric_mean"), &said["geometric_mean"], mean);
        audit.agree(&format!("{at}.smallest"), &said["smallest"], smallest);
        let count = |verdict: &str| pairs.iter().filter(|(_, given)| given == verdict).count();
        let counts = ["FASTER", "SAME", "SLOWER", "UNDECIDED"].map(count);
        audit.same(&format!("{at}.verdicts"), &said["verdicts"], &Value::from(counts.to_vec()));
    }
}

fn against_itself(audit: &mut Audit, document: &Value) {
    for (n, cell) in list(&document["cells"]).iter().enumerate() {
        let comparisons = list(&cell["comparisons"]);
        let count = |verdict: &str| comparisons.iter().filter(|it| it["verdict"] == verdict).count();
        let counts = ["FASTER", "SAME", "SLOWER", "UNDECIDED"].map(count);
        audit.same(&format!("cells[{n}].verdicts"), &cell["verdicts"], &Value::from(counts.to_vec()));
        let truth = 1.0 / cell["handicap"].as_f64().unwrap_or(f64::NAN);
        let holds =
            |it: &&Value| interval(&it["interval"]).is_some_and(|it| it.low <= truth && truth <= it.high);
        let held = comparisons.iter().filter(holds).count();
        audit.agree(&format!("cells[{n}].held"), &cell["held"], Some(held as f64));
        let all = comparisons.len() as f64;
        audit.agree(&format!("cells[{n}].repetitions"), &cell["repetitions"], Some(all));
    }
}

fn verify(audit: &mut Audit, document: &Value) {
    let results = list(&document["results"]);
    audit.require("results", !results.is_empty(), "are none: nothing was verified");
    for (n, record) in results.iter().enumerate() {
        let (at, status) = (format!("results[{n}]"), record["status"].as_str().unwrap_or_default());
        match status {
            "passed" if record["judgement"].is_null() => audit.deny(&at, "passed without a judgement"),
            "passed" => check_judgement(audit, &at, &record["judgement"], Some(true)),
            "failed" => {
                audit.require(&at, !list(&record["faults"]).is_empty(), "failed, and nobody says by what");
            }
            "skipped" => audit.require(&at, record["skipped"].is_string(), "is skipped, and nobody says why"),
            _ => audit.deny(&at, format!("has no status: {}", record["status"])),
        }
    }
    for (n, tally) in list(&document["engines"]).iter().enumerate() {
        for status in ["passed", "skipped", "failed"] {
            let of = |record: &&Value| record["engine"] == tally["engine"] && record["status"] == status;
            let made = results.iter().filter(of).count() as f64;
            audit.agree(&format!("engines[{n}].{status}"), &tally[status], Some(made));
        }
    }
}

fn faults(audit: &mut Audit, document: &Value) {
    let findings = list(&document["findings"]);
    for (nature, name) in [("fault", "caught"), ("honest", "accepted")] {
        let of = || findings.iter().filter(|finding| finding["nature"] == nature);
        let good = of().filter(|finding| finding["as_it_should"] == true).count();
        let counts = Value::from(vec![good, of().count()]);
        audit.same(name, &document[name], &counts);
    }
}

fn stress(audit: &mut Audit, document: &Value) {
    for (n, problem) in list(&document["problems"]).iter().enumerate() {
        check_judgement(audit, &format!("problems[{n}].judgement"), &problem["judgement"], None);
    }
}

/// A trial keeps no samples, only its times: what can be made again is each rate.
fn trial(audit: &mut Audit, document: &Value) {
    audit.miss("samples: times of a trial are medians alone");
    let rows = list(&document["runs"]).iter().flat_map(|run| list(&run["rows"]));
    for (n, row) in rows.enumerate() {
        let (Some(us), Some(said)) = (row["us"].as_f64(), row["tflops"].as_f64()) else { continue };
        let words: Vec<&str> = row["problem"].as_str().unwrap_or_default().split(' ').collect();
        let [shape, dtype, rest @ ..] = &words[..] else { continue };
        let mask = match rest {
            [] => "full",
            [mask] => mask,
            _ => continue,
        };
        let (Ok(named), Ok(mask), Ok(dtype)) = (shapes::parse(shape), cases::parse_mask(mask), dtype.parse())
        else {
            continue;
        };
        let made = named.shape.problem(mask, dtype).flops() / us / 1e6;
        let why = format!("has {said} TFLOP/s, but its time makes it {made:.1}");
        // Rates were rounded to whole numbers, and times to hundredths.
        audit.require(&format!("row {n}"), (said - made).abs() <= 0.51 + made * 0.01 / us, &why);
    }
}

/// A difference between two files.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Where, as a path of names.
    pub at: String,
    /// What the first file says; absent where it says nothing.
    pub first: Option<Value>,
    /// What the second says.
    pub second: Option<Value>,
}

/// Where two documents differ, raw samples left out: those of two runs always do.
pub fn differences(first: &Value, second: &Value) -> Vec<Difference> {
    let mut all = Vec::new();
    compare("", first, second, &mut all);
    all
}

fn compare(at: &str, first: &Value, second: &Value, all: &mut Vec<Difference>) {
    let under = |name: &str| if at.is_empty() { name.to_string() } else { format!("{at}.{name}") };
    let differ = |first: Option<&Value>, second: Option<&Value>, at: String| Difference {
        at,
        first: first.cloned(),
        second: second.cloned(),
    };
    match (first, second) {
        (Value::Object(a), Value::Object(b)) => {
            let mut names: Vec<&String> =
                a.keys().chain(b.keys().filter(|name| !a.contains_key(*name))).collect();
            names.retain(|name| !["samples_us", "call_us", "hash"].contains(&name.as_str()));
            for name in names {
                match (a.get(name), b.get(name)) {
                    (Some(a), Some(b)) => compare(&under(name), a, b, all),
                    (a, b) => all.push(differ(a, b, under(name))),
                }
            }
        }
        (Value::Array(a), Value::Array(b)) => {
            for n in 0..a.len().max(b.len()) {
                let at = format!("{at}[{}]", label(a.get(n).or(b.get(n)), n));
                match (a.get(n), b.get(n)) {
                    (Some(a), Some(b)) => compare(&at, a, b, all),
                    (a, b) => all.push(differ(a, b, at)),
                }
            }
        }
        _ if first == second => {}
        _ => all.push(differ(Some(first), Some(second), at.into())),
    }
}

/// What to call an element of a list: its own name where it has one.
fn label(value: Option<&Value>, n: usize) -> String {
    let named = |name: &str| value?.get(name)?.as_str().map(String::from);
    match (named("shape"), named("dtype"), named("mask")) {
        (Some(shape), Some(dtype), Some(mask)) => format!("{shape} {dtype} {mask}"),
        _ => named("name").or_else(|| named("peer")).unwrap_or_else(|| n.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn differences_name_the_place_and_leave_raw_samples_out() {
        let of = |p50: f64| {
            json!({"cells": [{"shape": "1x1x8x8", "dtype": "f16", "mask": "full",
                "results": [{"name": "flashcore", "samples_us": [p50], "p50_us": p50}]}]})
        };
        assert_eq!(differences(&of(1.0), &of(1.0)), []);
        let found = differences(&of(1.0), &of(2.0));
        let [one] = &found[..] else { panic!("{found:?}") };
        assert_eq!(one.at, "cells[1x1x8x8 f16 full].results[flashcore].p50_us");
        assert_eq!((&one.first, &one.second), (&Some(json!(1.0)), &Some(json!(2.0))));
        assert_eq!(differences(&json!({"a": 1}), &json!({})).len(), 1);
        assert_eq!(differences(&json!({"a": [1]}), &json!({"a": [1, 2]})).len(), 1);
    }

    #[test]
    fn what_is_no_evidence_is_said_to_be_none() {
        assert!(audit("{").unwrap_err().contains("not JSON"));
        assert!(audit("{}").unwrap_err().contains("schema"));
        let nothing = json!({"schema": "flashcore.bench/1", "created": "x", "command": [], "complete": true,
            "environment": {}, "cells": []});
        let found = audit(&nothing.to_string()).unwrap();
        assert!(!found.holds() && found.contradictions[0].contains("nothing was measured"), "{found:?}");
    }

    #[test]
    fn a_tally_must_count_its_records() {
        let judgement = json!({"max": {"error": 1.0, "plain": 1.0, "allowed": 2.0},
            "rms": {"error": 1.0, "plain": 1.0, "allowed": 2.0},
            "row": {"error": 1.0, "plain": 1.0, "allowed": 2.0}, "lse": null});
        let of = |passed: usize, status: &str| {
            json!({"schema": "flashcore.verify/1", "created": "x", "command": [], "complete": true, "environment": {},
                "engines": [{"engine": "e", "passed": passed, "skipped": 0, "failed": 0}],
                "results": [{"engine": "e", "status": status, "judgement": judgement, "faults": [], "skipped": null}]})
            .to_string()
        };
        assert!(audit(&of(1, "passed")).unwrap().holds());
        assert!(!audit(&of(2, "passed")).unwrap().holds());
        assert!(!audit(&of(0, "failed")).unwrap().holds());
        assert!(!audit(&of(0, "skipped")).unwrap().holds());
    }
}
