//! The commands around `flashcore bench`: comparing runs, baselines, grids in a file, ceilings, and a thing against
//! itself. Where the judgement is tested, reports with known times stand in for runs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use flashcore_lab::rbk;
use flashcore_lab::rng::Rng;
use flashcore_lab::stats::median;
use serde_json::{Value, json};
use tempfile::TempDir;

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs the command in this folder, with a cache of its own and without torch.
    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_flashcore"))
            .args(arguments)
            .current_dir(self.0.path())
            .env("FLASHCORE_CACHE", self.path("cache"))
            .env("FLASHCORE_PYTHON", "no-such-python")
            .output()
            .unwrap()
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap()
    }

    /// A report of a GPU in which the mission shape took times around a median, with a relative spread.
    fn report(&self, name: &str, seed: u64, us: f64, spread: f64) {
        let mut rng = Rng::new(seed);
        let samples: Vec<f64> = (0..30).map(|_| us * (spread * rng.normal()).exp()).collect();
        let ours = json!({"name": "flashcore", "samples_us": samples, "p50_us": median(&samples), "p90_us": null,
                          "min_us": null, "median_interval_us": null, "error": null, "failure": null});
        let cell = json!({"name": "mission", "shape": "1x8x512x64", "dtype": "f16", "mask": "full",
                          "results": [ours], "failure": null, "flops": 536_870_912.0});
        let report = json!({"schema": "flashcore.bench-gpu/1", "created": name, "complete": true, "clock": "kernel",
                            "cache": "cold", "gpu": {"ours": {"device": "NVIDIA H200"}}, "environment": {},
                            "cells": [cell]});
        std::fs::write(self.path(name), report.to_string()).unwrap();
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("it was not killed")
}

#[test]
fn the_gate_passes_faster_and_equal_runs_fails_slower_ones_and_leaves_noisy_ones_open() {
    let place = Place::new();
    place.report("base.json", 1, 10.0, 0.005);
    for (name, us, spread, expected, word) in [
        ("faster.json", 9.0, 0.005, 0, "FASTER"),
        ("equal.json", 10.0, 0.005, 0, "PASS"),
        ("slower.json", 10.8, 0.005, 1, "REGRESSION"),
        ("noisy.json", 10.3, 0.3, 2, "UNDECIDED"),
    ] {
        place.report(name, 2, us, spread);
        let output = place.run(&["compare", "base.json", name, "--fail-on", "3%"]);
        assert_eq!(code(&output), expected, "{name}: {}", text(&output));
        assert!(text(&output).contains(word), "{name}: {}", text(&output));
        let comparison = place.json("comparison.json");
        assert_eq!(comparison["schema"], "flashcore.comparison/1");
        let change = comparison["changes"][0]["change"].as_f64().unwrap();
        assert!((change - us / 10.0).abs() < 0.05 + spread, "{name}: {change}, and above 1 is slower");
        assert_eq!(comparison["fail_on"], 0.03);
    }
}

#[test]
fn what_is_let_pass_is_what_was_asked_for() {
    let place = Place::new();
    place.report("base.json", 1, 10.0, 0.003);
    place.report("new.json", 2, 10.5, 0.003);
    let gate = |fail_on: &str| code(&place.run(&["compare", "base.json", "new.json", "--fail-on", fail_on]));
    assert_eq!((gate("3%"), gate("10%"), gate("2.5")), (1, 0, 1));
    assert_eq!(gate("-3%"), 2, "a negative slow-down is a mistake");
}

#[test]
fn a_run_is_not_compared_with_itself_nor_with_what_is_no_run() {
    let place = Place::new();
    place.report("base.json", 1, 10.0, 0.01);
    let output = place.run(&["compare", "base.json", "base.json"]);
    assert_eq!(code(&output), 2);
    assert!(text(&output).contains("with itself"), "{}", text(&output));
    std::fs::write(place.path("other.json"), r#"{"schema": "flashcore.verify/1"}"#).unwrap();
    let output = place.run(&["compare", "other.json", "base.json"]);
    assert!(code(&output) == 2 && text(&output).contains("flashcore.verify/1"), "{}", text(&output));
    let output = place.run(&["compare", "main", "base.json"]);
    assert!(code(&output) == 2 && text(&output).contains("--save-baseline main"), "{}", text(&output));
    assert!(!place.path("comparison.json").exists());
}

#[test]
fn a_baseline_is_kept_by_name_and_found_again() {
    let place = Place::new();
    let bench = ["bench", "tiny", "--device", "cpu-portable", "--threads", "1", "--samples", "12"];
    let output = place.run(&[&bench[..], &["--save-baseline", "main"]].concat());
    assert_eq!(code(&output), 0, "{}", text(&output));
    assert!(text(&output).contains("kept as main"), "{}", text(&output));
    // How fast this machine is at the moment is not known; that the exit code agrees with the file is.
    assert_eq!(code(&place.run(&[&bench[..], &["--json", "new.json"]].concat())), 0);
    let output = place.run(&["compare", "main", "new.json", "--fail-on", "99%"]);
    let comparison = place.json("comparison.json");
    let codes = json!({"pass": 0, "regression": 1, "undecided": 2});
    let gate = comparison["gate"].as_str().unwrap().to_lowercase();
    assert_eq!(codes[&gate], code(&output), "{gate}: {}", text(&output));
    assert_eq!(comparison["changes"][0]["cell"], "1x1x32x64 f16 full");
    assert!(comparison["changes"][0]["base_us"].as_f64().unwrap() > 0.0);
    let output = place.run(&["bench", "tiny", "--save-baseline", "../main"]);
    assert_eq!(code(&output), 2, "{}", text(&output));
}

#[test]
fn a_grid_in_a_file_becomes_three_reports_with_every_error_beside_its_time() {
    let place = Place::new();
    let config = "warmups: 2\niterations: 6\noutput_dir: out\nshapes:\n  \
        - { name: first, batch_size: 1, num_heads: 2, seq_len: 33, head_dim: 64, causal: true, dtype: float16 }\n  \
        - { name: second, batch_size: 2, num_heads: 1, seq_len: 16, head_dim: 32, causal: false, dtype: f32 }\n";
    std::fs::write(place.path("rbk_config.yaml"), config).unwrap();
    let output = place.run(&["grid", "rbk_config.yaml", "--device", "cpu"]);
    assert_eq!(code(&output), 0, "{}", text(&output));
    let report = place.json("out/rbk_report.json");
    assert_eq!((&report["schema"], &report["clock"]), (&"flashcore.rbk/1".into(), &"call".into()));
    let rows = report["results"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, name) in rows.iter().zip(["first", "second"]) {
        assert_eq!((&row["name"], &row["correct"]), (&name.into(), &true.into()));
        assert_eq!(row["samples_us"].as_array().unwrap().len(), 6);
        assert!(row["p50_us"].as_f64().unwrap() > 0.0 && row["max_error"].as_f64().is_some());
    }
    let csv = std::fs::read_to_string(place.path("out/rbk_report.csv")).unwrap();
    assert_eq!(csv.lines().count(), 3);
    assert!(
        std::fs::read_to_string(place.path("out/rbk_report.md")).unwrap().contains("| first (1, 2, 33, 64)")
    );
    let output = place.run(&["grid", "nowhere.yaml"]);
    assert!(code(&output) == 2 && text(&output).contains("nowhere.yaml"), "{}", text(&output));
}

#[test]
fn the_example_in_the_repository_is_a_grid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/rbk_config.yaml");
    let config = rbk::Config::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(config.cells().len() >= 6);
}

#[test]
fn ceilings_are_measured_once_and_every_later_time_is_a_fraction_of_them() {
    let place = Place::new();
    let cpu = ["--device", "cpu", "--threads", "1"];
    let output = place.run(&[&["ceilings", "--json", "ceilings.json"][..], &cpu].concat());
    assert_eq!(code(&output), 0, "{}", text(&output));
    let found = place.json("ceilings.json");
    assert_eq!(found["schema"], "flashcore.ceilings/1");
    for rate in ["matmul_tflops", "memory_gbytes", "exp_gops"] {
        assert!(found[rate].as_f64().unwrap() > 0.0, "{found}");
    }
    assert_eq!(found["launch_us"], Value::Null, "a CPU launches nothing");
    let bench = ["bench", "medium", "--samples", "6", "--json", "bench.json"];
    let output = place.run(&[&bench[..], &cpu].concat());
    assert!(text(&output).contains("of what this machine could do"), "{}", text(&output));
    let report = place.json("bench.json");
    assert_eq!(report["ceilings"]["exp_gops"], found["exp_gops"]);
    let roofline = &report["cells"][0]["results"][0]["roofline"];
    let (floor, share) = (roofline["floor_us"].as_f64().unwrap(), roofline["share"].as_f64().unwrap());
    let time = report["cells"][0]["results"][0]["p50_us"].as_f64().unwrap();
    assert!((floor / time - share).abs() < 1e-9 && share > 0.0, "{roofline}");
    // Another number of threads is another machine, of which nothing was measured.
    let output =
        place.run(&["bench", "medium", "--samples", "6", "--json", "bench.json", "--device", "cpu-portable"]);
    assert_ne!(code(&output), 1, "{}", text(&output));
    assert_eq!(place.json("bench.json")["cells"][0]["results"][0]["roofline"], Value::Null);
}

#[test]
fn a_thing_against_itself_is_counted_verdict_by_verdict() {
    let place = Place::new();
    let arguments = [
        "against-itself",
        "tiny",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--times",
        "3",
        "--samples",
        "10",
        "--json",
        "itself.json",
    ];
    let output = place.run(&arguments);
    assert!(text(&output).contains("1x1x32x64 f16 full against itself, 3 times:"), "{}", text(&output));
    let cell = &place.json("itself.json")["cells"][0];
    let verdicts: u64 = cell["verdicts"].as_array().unwrap().iter().filter_map(Value::as_u64).sum();
    assert_eq!((verdicts, cell["comparisons"].as_array().unwrap().len()), (3, 3));
    // The output names the planted slow-down and the true ratio.
    let output = place.run(&[&arguments[..], &["--handicap", "2%"]].concat());
    assert!(text(&output).contains("with a planted slow-down of 2.000 %, 3 times:"), "{}", text(&output));
    assert_eq!(place.json("itself.json")["cells"][0]["handicap"].as_f64(), Some(1.02));
}
