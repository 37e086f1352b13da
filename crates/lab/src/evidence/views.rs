//! Views of an evidence file: the same facts, chosen and arranged for one question each.
//!
//! `build_meta.json` says what was built and where it ran, `correctness_summary.json` whether it is right,
//! `perf_baseline.json` how fast it is. Nothing in them is new, and what the evidence does not say is null; each names
//! the file that it was made from, with the hash of its text.

use serde_json::{Value, json};

/// The names of the views and what they hold, made from a file's text and its document.
pub fn views(source: &str, text: &str, document: &Value) -> [(&'static str, Value); 3] {
    let of = json!({
        "file": source,
        "blake3": blake3::hash(text.as_bytes()).to_hex().to_string(),
        "schema": document["schema"],
        "created": document["created"],
    });
    [
        ("build_meta.json", build_meta(&of, document)),
        ("correctness_summary.json", correctness(&of, document)),
        ("perf_baseline.json", performance(&of, document)),
    ]
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Every result of every cell, with its cell.
fn results(document: &Value) -> impl Iterator<Item = (&Value, &Value)> {
    list(&document["cells"])
        .iter()
        .flat_map(|cell| list(&cell["results"]).iter().map(move |result| (cell, result)))
}

fn build_meta(of: &Value, document: &Value) -> Value {
    let mut kernels: Vec<&Value> = Vec::new();
    for (_, result) in results(document) {
        if !result["plan"].is_null() && !kernels.contains(&&result["plan"]) {
            kernels.push(&result["plan"]);
        }
    }
    json!({
        "evidence": of,
        "command": document["command"],
        "complete": document["complete"],
        "environment": document["environment"],
        "gpu": document["gpu"],
        "kernels": kernels,
    })
}

/// Whether a judgement's bounds hold; null where there is none.
fn holds(judgement: &Value) -> Value {
    if judgement.is_null() {
        return Value::Null;
    }
    let within = |name: &str| {
        let bound = &judgement[name];
        let pair = bound["error"].as_f64().zip(bound["allowed"].as_f64());
        (bound.is_null() && name == "lse") || pair.is_some_and(|(error, allowed)| error <= allowed)
    };
    json!(["max", "rms", "row", "lse"].into_iter().all(within) && judgement["first_bad"].is_null())
}

fn correctness(of: &Value, document: &Value) -> Value {
    let judged: Vec<Value> = results(document)
        .map(|(cell, result)| {
            json!({
                "shape": cell["shape"], "dtype": cell["dtype"], "mask": cell["mask"], "name": result["name"],
                "right": holds(&result["error"]), "judged_rows": cell["judged_rows"], "rows": cell["rows"],
                "error": result["error"], "failure": result["failure"],
            })
        })
        .collect();
    let failed = |record: &&Value| record["status"] == "failed";
    let failures: Vec<&Value> = list(&document["results"]).iter().filter(failed).collect();
    json!({
        "evidence": of,
        "rule": document["rule"],
        "engines": document["engines"],
        "failures": failures,
        "results": judged,
    })
}

fn performance(of: &Value, document: &Value) -> Value {
    let cells: Vec<Value> = list(&document["cells"])
        .iter()
        .map(|cell| {
            let times: Vec<Value> = list(&cell["results"])
                .iter()
                .map(|result| {
                    let rate = if result.get("tflops").is_some() { &result["tflops"] } else { &result["gflops"] };
                    json!({
                        "name": result["name"], "p50_us": result["p50_us"], "p90_us": result["p90_us"],
                        "min_us": result["min_us"], "median_interval_us": result["median_interval_us"],
                        "samples": list(&result["samples_us"]).len(), "rate": rate, "right": holds(&result["error"]),
                        "call_p50_us": result["call"]["p50_us"], "failure": result["failure"],
                    })
                })
                .collect();
            json!({
                "name": cell["name"], "shape": cell["shape"], "dtype": cell["dtype"], "mask": cell["mask"],
                "flops": cell["flops"], "results": times, "comparisons": cell["comparisons"],
            })
        })
        .collect();
    json!({
        "evidence": of,
        "clock": document["clock"],
        "cache": document["cache"],
        "regime": document["regime"],
        "rate": if document["gpu"].is_null() { "GFLOP/s" } else { "TFLOP/s" },
        "cells": cells,
        "summaries": document["summaries"],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_says_what_the_evidence_says_and_null_where_it_says_nothing() {
        let bound = json!({"error": 1.0, "plain": 1.0, "allowed": 2.0});
        let document = json!({
            "schema": "flashcore.bench-gpu/1", "created": "now", "gpu": {"driver": "1"},
            "cells": [{"shape": "1x1x8x8", "dtype": "f16", "mask": "full", "results": [
                {"name": "flashcore", "plan": {"code": "ab"}, "samples_us": [1.0, 3.0], "p50_us": 2.0, "tflops": 5.0,
                 "error": {"max": bound, "rms": bound, "row": bound, "lse": null, "first_bad": null}},
                {"name": "peer", "plan": null, "error": null}]}],
        });
        let [(_, build), (_, right), (_, fast)] = views("a.json", "text", &document);
        assert_eq!(build["kernels"], json!([{"code": "ab"}]));
        assert_eq!(build["environment"], Value::Null);
        assert_eq!(
            (&right["results"][0]["right"], &right["results"][1]["right"]),
            (&json!(true), &Value::Null)
        );
        assert_eq!(fast["cells"][0]["results"][0]["p50_us"], 2.0);
        assert_eq!(fast["cells"][0]["results"][0]["rate"], 5.0);
        assert_eq!(fast["cells"][0]["results"][1]["p50_us"], Value::Null);
        assert_eq!(fast["evidence"]["blake3"], blake3::hash(b"text").to_hex().to_string());
    }

    #[test]
    fn a_bound_that_is_broken_is_not_right() {
        let bound = |error: f64| json!({"error": error, "plain": 1.0, "allowed": 2.0});
        let of =
            |error| holds(&json!({"max": bound(error), "rms": bound(1.0), "row": bound(1.0), "lse": null}));
        assert_eq!(of(1.0), json!(true));
        assert_eq!(of(3.0), json!(false));
        assert_eq!(holds(&json!({"max": {"error": null, "plain": 1.0, "allowed": 2.0}})), json!(false));
    }
}
