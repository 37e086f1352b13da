//! The command on a GPU that is not there: a fake driver answers, so that everything but the numbers is real. What
//! counts is that a failure costs its own row and no other, and that nothing unmeasured is taken for a result.

#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // The fake driver's harness loads a library.

#[path = "../../driver/tests/fake/mod.rs"]
mod fake;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// A machine with the fake driver and a Python of its own.
struct Machine {
    driver: TempDir,
    folder: TempDir,
}

/// A program that is not Python: there is no torch on this machine.
const NO_PYTHON: &str = "no-such-python";

impl Machine {
    fn new(flags: &[&str]) -> Option<Self> {
        Some(Self { driver: fake::as_system_driver(flags)?, folder: tempfile::tempdir().unwrap() })
    }

    /// Adds a library to those that the machine has, from a file in `tests/fake`.
    fn with_library(self, source: &str, name: &str) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake").join(source);
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let output = Command::new(compiler)
            .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
            .arg(self.driver.path().join(name))
            .arg(source)
            .output()
            .expect("the compiler that built the fake driver");
        assert!(output.status.success(), "{}", text(&output));
        self
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        command
            .env("LD_LIBRARY_PATH", self.driver.path())
            .env("FLASHCORE_CACHE", self.folder.path().join("cubins"))
            .env("FLASHCORE_PYTHON", NO_PYTHON);
        command
    }

    /// Runs the command with a report and a variable in its environment.
    fn run_with(&self, arguments: &[&str], variable: &str, value: &str) -> (Output, Value) {
        let json = self.folder.path().join("report.json");
        let mut command = self.command();
        command.args(arguments).arg("--json").arg(&json).env(variable, value);
        let output = command.output().unwrap();
        let report = std::fs::read(&json).unwrap_or_else(|_| panic!("no report: {}", text(&output)));
        (output, serde_json::from_slice(&report).unwrap())
    }

    /// Runs the command with a report.
    fn run(&self, arguments: &[&str]) -> (Output, Value) {
        self.run_with_python(arguments, Path::new(NO_PYTHON))
    }

    fn run_with_python(&self, arguments: &[&str], python: &Path) -> (Output, Value) {
        let json = self.folder.path().join("report.json");
        let output = self
            .command()
            .args(arguments)
            .arg("--json")
            .arg(&json)
            .env("FLASHCORE_PYTHON", python)
            .output()
            .unwrap();
        let report = std::fs::read(&json).unwrap_or_else(|_| panic!("no report: {}", text(&output)));
        (output, serde_json::from_slice(&report).unwrap())
    }

    /// What contradicts itself in the last report. The fake's clock counts operations, so its samples may take longer than
    /// the wall; everything else must hold, whatever was measured.
    fn contradictions(&self) -> Vec<String> {
        let report = std::fs::read_to_string(self.folder.path().join("report.json")).unwrap();
        let mut found = flashcore_lab::evidence::audit::audit(&report).unwrap().contradictions;
        found.retain(|why| !why.contains("seconds are fewer"));
        found
    }

    /// A stand-in for a Python with torch, which answers requests by a shell script.
    fn python(&self, script: &str) -> std::path::PathBuf {
        let path = self.folder.path().join("python");
        std::fs::write(&path, format!("#!/bin/sh\n[ \"$1\" = -c ] && exit 0\n{script}")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("it was not killed")
}

const TINY: [&str; 6] = ["bench", "tiny", "--device", "cuda", "--samples", "6"];

#[test]
fn a_kernel_that_writes_nothing_is_found_out_before_it_is_timed() {
    let Some(machine) = Machine::new(&[]) else { return };
    let (output, report) = machine.run(&TINY);
    assert_eq!(code(&output), 2, "{}", text(&output));
    assert!(text(&output).contains("2048 of 2048 elements were never written"), "{}", text(&output));
    let ours = &report["cells"][0]["results"][0];
    assert_eq!((&ours["p50_us"], &ours["error"]), (&Value::Null, &Value::Null));
    assert_eq!(report["complete"], true, "the cell has its row");
    assert_eq!(machine.contradictions(), [""; 0]);
}

#[test]
fn a_wrong_result_is_timed_and_fails_the_command_and_everything_is_in_the_report() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let (output, report) = machine.run(&TINY);
    assert_eq!(code(&output), 1, "{}", text(&output));
    assert!(text(&output).contains("WRONG") && text(&output).contains("without torch"), "{}", text(&output));
    assert_eq!(report["schema"], "flashcore.bench-gpu/3");
    assert_eq!((&report["clock"], &report["cache"]), (&"kernel".into(), &"cold".into()));
    assert_eq!(report["gpu"]["ours"]["device"], "Fake GPU 0");
    assert_eq!(report["gpu"]["ours"]["cuda"], "12.8");
    assert!(report["gpu"]["ours"]["empty_launch"]["host_p50_us"].as_f64().unwrap() > 0.0);
    let cell = &report["cells"][0];
    let ours = &cell["results"][0];
    assert_eq!(ours["samples_us"].as_array().unwrap().len(), 6);
    // The fake's clock counts operations: a call is a millisecond.
    assert_eq!(ours["p50_us"].as_f64(), Some(1000.0));
    assert_eq!(ours["replay_is_same"], true);
    assert!(ours["call"]["host_p50_us"].as_f64().unwrap() > 0.0);
    assert!(ours["plan"]["schedule"].as_str().unwrap().contains(':'));
    assert_eq!(ours["plan"]["code"].as_str().unwrap().len(), 64);
    assert!(cell["first_call"]["cold_us"].as_f64().unwrap() > 0.0, "{cell}");
    assert!(cell["first_call"]["warm_us"].as_f64().unwrap() > 0.0);
    assert!(report["environment"]["flashcore"].is_string() && report["command"][1] == "bench");
    assert!(report["inputs"][0]["checksums"][0].as_u64().is_some());
    assert_eq!(machine.contradictions(), [""; 0]);
}

#[test]
fn a_crash_costs_its_own_rung_of_the_ladder_and_no_other() {
    let Some(machine) = Machine::new(&["-DZEROS", "-DCRASH_ON=\"flashcore_sm80_mma\""]) else { return };
    let mut arguments = TINY.to_vec();
    arguments.push("--ladder");
    let (output, report) = machine.run(&arguments);
    assert_eq!(code(&output), 1, "{}", text(&output));
    let results = report["cells"][0]["results"].as_array().unwrap();
    for result in results {
        let (name, failure) = (result["name"].as_str().unwrap(), &result["failure"]);
        if name == "kernel sm80_mma" {
            assert!(failure.as_str().unwrap().contains("worker has ended"), "{failure}");
        } else if name == "kernel scalar" || name == "kernel sm80_fwd" {
            assert_eq!(failure, &Value::Null, "{name}");
            assert_eq!(result["samples_us"].as_array().unwrap().len(), 6, "{name}");
        }
    }
    assert_eq!(report["lost_workers"], 1);
    assert_eq!(machine.contradictions(), [""; 0]);
    let ladder = report["cells"][0]["ladder"].as_array().unwrap();
    assert_eq!(ladder[0]["kernel"], "scalar");
    let fwd = ladder.iter().find(|rung| rung["kernel"] == "sm80_fwd").unwrap();
    assert_eq!(fwd["gain"]["peer"], "kernel scalar", "the rung between has no time");
}

#[test]
fn given_kernels_and_schedules_are_timed_by_their_names() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let schedule = "sm80_fwd:block_m=64,block_n=64,warps=4,stages=2,q_in_regs=1,order=head";
    let (_, report) =
        machine.run(&["bench", "tiny", "--samples", "5", "--schedule", schedule, "--device", "cuda-1"]);
    let results = report["cells"][0]["results"].as_array().unwrap();
    assert_eq!(results[0]["name"], format!("schedule {schedule}"));
    assert_eq!((&results[0]["plan"]["schedule"], results.len()), (&schedule.into(), 1));
    assert_eq!(report["gpu"]["ours"]["device"], "Fake GPU 1");
    let (_, report) =
        machine.run(&["bench", "tiny", "--samples", "5", "--kernel", "scalar", "--kernel", "sm80_mma"]);
    let cell = &report["cells"][0];
    assert_eq!(cell["results"][0]["plan"]["kernel"], "scalar");
    assert_eq!(cell["comparisons"][0]["peer"], "kernel sm80_mma");
}

#[test]
fn both_passes_are_one_call_of_more_operations_and_are_judged_by_the_gradient_of_q() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let run = |pass: &str| {
        let (output, report) = machine.run(&[&TINY[..], &["--dtype", "bf16", "--pass", pass]].concat());
        assert_eq!(code(&output), 1, "zeros are no gradients: {}", text(&output));
        assert_eq!(machine.contradictions(), [""; 0], "{pass}");
        report["cells"][0].clone()
    };
    let [backward, both] = ["backward", "both"].map(run);
    assert_eq!(both["pass"], "both");
    let flops = |cell: &Value| cell["flops"].as_f64().unwrap();
    assert_eq!(flops(&both), 1.4 * flops(&backward));
    // The fake's clock counts operations: a call has more of them with a forward pass in it.
    let us = |cell: &Value| cell["results"][0]["p50_us"].as_f64().unwrap();
    assert!(us(&both) > us(&backward), "{} {}", us(&both), us(&backward));
    let judged = |cell: &Value| cell["results"][0]["error"]["dq"]["max"]["error"].is_number();
    assert!(judged(&both) && judged(&backward));
    let output =
        machine.command().args(TINY).args(["--pass", "both", "--kernel", "sm80_bwd"]).output().unwrap();
    assert!(code(&output) == 2 && text(&output).contains("of one pass"), "{}", text(&output));
}

#[test]
fn pages_are_timed_beside_the_same_keys_laid_out_densely() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let arguments = [
        "bench",
        "--matrix",
        "paged",
        "--only",
        "1x32/8x1/8192x128 bf16 full page=16 ",
        "--samples",
        "6",
        "--budget",
        "60",
    ];
    let (output, report) = machine.run(&[&arguments[..], &["--no-peers"]].concat());
    let cell = &report["cells"][0];
    let names: Vec<&str> =
        cell["results"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["flashcore", "flashcore dense"], "{}", text(&output));
    assert_eq!(cell["layout"], "page=16 keys=8192");
    for result in cell["results"].as_array().unwrap() {
        assert_eq!(result["failure"], Value::Null, "{}", text(&output));
        assert!(result["error"]["max"]["error"].is_number() && result["plan"]["schedule"].is_string());
    }
    assert_eq!(cell["comparisons"][0]["peer"], "flashcore dense");
    // The fake GPU has hardly a peak, and this is no tiny problem.
    let mut contradictions = machine.contradictions();
    contradictions.retain(|why| !why.contains("faster than the chip"));
    assert_eq!(contradictions, [""; 0]);
    let said = text(&output);
    let table = said.lines().filter(|line| line.contains("dense") || line.contains('±'));
    assert!(table.clone().count() >= 2 && table.clone().all(|line| line.chars().count() <= 100), "{said}");
}

#[test]
fn a_matrix_goes_on_past_its_budget_by_saying_what_was_not_run() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let (output, report) = machine.run(&["bench", "--matrix", "small", "--budget", "0.001"]);
    assert_ne!(code(&output), 0);
    let cells = report["cells"].as_array().unwrap();
    assert_eq!((cells.len(), &report["complete"]), (18, &Value::Bool(false)));
    assert!(cells.iter().all(|cell| cell["failure"] == "the budget is spent"));
    assert!(text(&output).contains("18 cells without a time"), "{}", text(&output));
    assert_eq!(machine.contradictions(), [""; 0]);
}

#[test]
fn peers_are_asked_by_name_and_one_that_fails_leaves_the_rest() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    // Knows the pool's checksums by reading what it was sent, and has one backend that works.
    let script = r#"
while read -r line; do
    case "$line" in
    *'"op":"hello"'*) echo '{"version": "9.9", "cudnn": 91900, "cuda": "13.0", "device": "Fake"}' ;;
    *'"op":"matmul"'*) echo '{"tflops": 700.0}' ;;
    *'"op":"pool"'*)
        echo "{\"checksums\": [$SUMS]}" ;;
    *'"op":"load"'*) echo '{}' ;;
    *'"who":"math"'*) echo '{"error": "OutOfMemoryError: CUDA out of memory."}' ;;
    *'"op":"output"'*)
        path=${line##*\"path\":\"}; path=${path%%\"*}
        head -c 4096 /dev/zero > "$path"; echo '{"bytes": 4096}' ;;
    *'"op":"sample"'*) echo '{"us": 2000.0, "calls": 1}' ;;
    *'"op":"calls"'*) echo '{"call_us": [50, 51, 52], "host_us": [40, 41, 42]}' ;;
    esac
done"#;
    let arguments = ["bench", "tiny", "--device", "cuda", "--samples", "6", "--peers", "flash,math"];
    let (_, before) = machine.run(&TINY);
    let sums: Vec<String> =
        before["inputs"][0]["checksums"].as_array().unwrap().iter().map(Value::to_string).collect();
    let python = machine.python(&format!("SUMS='{}'\n{script}", sums.join(", ")));
    let (output, report) = machine.run_with_python(&arguments, &python);
    let cell = &report["cells"][0];
    let [ours, flash, math] = &cell["results"].as_array().unwrap()[..] else { panic!("{cell}") };
    assert_eq!(
        (&ours["name"], &flash["name"], &math["name"]),
        (&"flashcore".into(), &"flash".into(), &"math".into())
    );
    assert_eq!(flash["p50_us"].as_f64(), Some(2000.0));
    assert_eq!(flash["call"]["p50_us"].as_f64(), Some(51.0));
    assert!(math["failure"].as_str().unwrap().contains("out of memory"));
    let comparison = &cell["comparisons"][0];
    // Twice as fast, and wrong: that is no verdict.
    assert_eq!((comparison["speed_up"].as_f64(), &comparison["verdict"]), (Some(2.0), &"UNDECIDED".into()));
    assert_eq!(report["gpu"]["matmul_tflops"].as_f64(), Some(700.0));
    assert_eq!(report["lost_workers"], 0);
    assert!(text(&output).contains("OutOfMemoryError"), "{}", text(&output));
    // Inputs that did not arrive as they were sent are no inputs.
    let python = machine.python(&format!("SUMS='1, 2, 3'\n{script}"));
    let (_, report) = machine.run_with_python(&arguments, &python);
    let flash = &report["cells"][0]["results"][1];
    assert!(flash["failure"].as_str().unwrap().contains("another q"), "{flash}");
}

#[test]
fn a_round_in_which_heat_slowed_the_gpu_down_is_marked_and_taken_again() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let machine = machine.with_library("nvml.c", "libnvidia-ml.so.1");
    // Readings: one before the first round and one after each; the second round is hot.
    let (output, report) = machine.run_with(&TINY, "NVML_HOT", "3");
    let cell = &report["cells"][0];
    assert_eq!(
        (&cell["retaken_rounds"], &cell["throttled_rounds"]),
        (&1.into(), &0.into()),
        "{}",
        text(&output)
    );
    assert_eq!(cell["results"][0]["samples_us"].as_array().unwrap().len(), 6);
    let states = cell["states"].as_array().unwrap();
    assert_eq!(states.len(), 8, "one before, six rounds, and the one that was taken again");
    assert_eq!((&states[1]["throttled"], &states[2]["throttled"]), (&false.into(), &true.into()));
    assert_eq!(states[2]["throttled_by"][0], "hardware thermal slowdown");
    assert_eq!(states[0]["sm_clock_mhz"], 1980);
    assert_eq!(states[0]["power_w"].as_f64(), Some(350.5));
    // What is not supported or does not exist is absent, whatever is in memory.
    assert_eq!((&states[0]["temperature_c"], &states[0]["power_limit_w"]), (&Value::Null, &Value::Null));
    assert_eq!(report["gpu"]["driver"], "999.1");
    assert!(text(&output).contains("taken again"), "{}", text(&output));
}

#[test]
fn without_nvml_nothing_is_said_of_clocks_and_no_round_is_taken_again() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let (_, report) = machine.run(&TINY);
    let cell = &report["cells"][0];
    assert_eq!((cell["states"].as_array().unwrap().len(), &cell["retaken_rounds"]), (0, &0.into()));
    assert_eq!(report["gpu"]["driver"], Value::Null);
}

#[test]
fn unfused_attention_is_two_products_of_cublas_and_a_softmax_and_shared_heads_are_rows_of_one() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let machine = machine.with_library("cublas.c", "libcublas.so.12");
    let log = machine.folder.path().join("log");
    let arguments = [
        "bench",
        "2x4/2x16/40x64",
        "--device",
        "cuda",
        "--samples",
        "6",
        "--dtype",
        "bf16",
        "--peers",
        "cublas",
    ];
    let (output, report) = machine.run_with(&arguments, "CUBLAS_LOG", log.to_str().unwrap());
    let cublas = &report["cells"][0]["results"][1];
    assert_eq!((&cublas["name"], &cublas["failure"]), (&"cublas".into(), &Value::Null), "{}", text(&output));
    assert_eq!(cublas["samples_us"].as_array().unwrap().len(), 6);
    assert!(cublas["call"]["p50_us"].as_f64().unwrap() > 0.0 && cublas["error"]["max"]["error"].is_number());
    let log = std::fs::read_to_string(log).unwrap();
    let lines: Vec<&str> = log.lines().collect();
    // K transposed times Q; then V times the result. The two heads of a group are 32 columns.
    assert_eq!(
        lines[0],
        "1 0: 40 32 64 x 4, alpha 0.125, types 14 14 14, ld 64 64 40, strides 2560 2048 1280, compute 68"
    );
    assert_eq!(
        lines[1],
        "0 0: 64 32 40 x 4, alpha 1, types 14 14 14, ld 64 40 64, strides 2560 1280 2048, compute 68"
    );
    let (_, report) = machine.run_with(&arguments, "CUBLAS_FAILS", "1");
    let results = &report["cells"][0]["results"];
    assert!(results[1]["failure"].as_str().unwrap().contains("no memory"), "{results}");
    assert_eq!(results[0]["failure"], Value::Null, "ours has its row all the same");
}

#[test]
fn without_cublas_its_row_says_where_it_was_looked_for() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let mut arguments = TINY.to_vec();
    arguments.extend(["--peers", "cublas"]);
    let (_, report) = machine.run_with(&arguments, "FLASHCORE_CUBLAS", "/nonexistent/libcublas.so.12");
    let failure = report["cells"][0]["results"][1]["failure"].as_str().unwrap();
    assert!(failure.contains("/nonexistent/libcublas.so.12"), "{failure}");
}

#[test]
fn ceilings_of_a_gpu_are_kept_for_it_and_times_are_held_against_them() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let (output, found) = machine.run(&["ceilings", "--device", "cuda"]);
    assert_eq!(code(&output), 0, "{}", text(&output));
    assert_eq!((&found["schema"], &found["machine"]), (&"flashcore.ceilings/1".into(), &"Fake GPU 0".into()));
    for rate in ["matmul_tflops", "memory_gbytes", "exp_gops", "launch_us", "launch_host_us"] {
        assert!(found[rate].as_f64().unwrap() > 0.0, "{rate}: {found}");
    }
    let (_, report) = machine.run(&TINY);
    assert_eq!(report["ceilings"]["matmul_tflops"], found["matmul_tflops"]);
    assert!(report["cells"][0]["results"][0]["roofline"]["share"].as_f64().unwrap() > 0.0);
    assert_eq!(machine.contradictions(), [""; 0]);
    // Another GPU has ceilings of its own, and nobody measured them.
    let (_, report) = machine.run(&["bench", "tiny", "--samples", "6", "--device", "cuda-1"]);
    assert_eq!(report["cells"][0]["results"][0]["roofline"], Value::Null);
}

#[test]
fn a_time_that_a_peer_divided_by_something_is_held_against_the_wall_and_is_no_result() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    // A replay takes 20 ms of the wall, and the peer says that a call took a microsecond.
    let script = r#"
while read -r line; do
    case "$line" in
    *'"op":"hello"'*) echo '{"version": "9.9", "cudnn": 1, "cuda": "13.0", "device": "Fake"}' ;;
    *'"op":"matmul"'*) echo '{"tflops": 700.0}' ;;
    *'"op":"pool"'*) echo "{\"checksums\": [$SUMS]}" ;;
    *'"op":"load"'*) echo '{}' ;;
    *'"op":"output"'*)
        path=${line##*\"path\":\"}; path=${path%%\"*}
        head -c 4096 /dev/zero > "$path"; echo '{"bytes": 4096}' ;;
    *'"op":"sample"'*) sleep 0.1; echo '{"us": 1.0, "calls": 1}' ;;
    *'"op":"calls"'*) echo '{"call_us": [50, 51, 52], "host_us": [40, 41, 42]}' ;;
    esac
done"#;
    let (_, before) = machine.run(&TINY);
    let sums: Vec<String> =
        before["inputs"][0]["checksums"].as_array().unwrap().iter().map(Value::to_string).collect();
    let python = machine.python(&format!("SUMS='{}'\n{script}", sums.join(", ")));
    let arguments = ["bench", "tiny", "--device", "cuda", "--samples", "6", "--peers", "flash"];
    let (output, report) = machine.run_with_python(&arguments, &python);
    let flash = &report["cells"][0]["results"][1];
    assert!(flash["failure"].as_str().unwrap().contains("divided by something"), "{}", text(&output));
    assert_eq!(
        report["cells"][0]["comparisons"].as_array().unwrap().len(),
        0,
        "and nobody is compared with it"
    );
}

/// A peer whose samples take 50 ms of the wall and 250 ms of its own clock.
const SLOW_PEER: &str = r#"
while read -r line; do
    case "$line" in
    *'"op":"hello"'*) echo '{"version": "9.9", "cudnn": 91900, "cuda": "13.0", "device": "Fake GPU 0", "installed": []}' ;;
    *'"op":"matmul"'*) echo '{"error": "no"}' ;;
    *'"op":"pool"'*) echo "{\"checksums\": [$SUMS]}" ;;
    *'"op":"load"'*) echo '{}' ;;
    *'"op":"output"'*)
        path=${line##*\"path\":\"}; path=${path%%\"*}
        head -c 4096 /dev/zero > "$path"; echo '{"bytes": 4096}' ;;
    *'"op":"sample"'*) sleep 0.05; echo '{"us": 2000.0, "calls": 125}' ;;
    esac
done"#;

#[test]
fn sustained_samples_have_an_energy_and_evidence_says_so() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let (_, before) = machine.run(&TINY);
    assert_eq!(
        (&before["regime"], &before["cells"][0]["results"][0]["energy"]),
        (&"bursts".into(), &Value::Null)
    );
    let machine = machine.with_library("nvml.c", "libnvidia-ml.so.1");
    let sums: Vec<String> =
        before["inputs"][0]["checksums"].as_array().unwrap().iter().map(Value::to_string).collect();
    let python = machine.python(&format!("SUMS='{}'\n{SLOW_PEER}", sums.join(", ")));
    let arguments = [&TINY[..], &["--sustained", "--peers", "flash"]].concat();
    let (output, report) = machine.run_with_python(&arguments, &python);
    assert_eq!(report["regime"], "sustained", "{}", text(&output));
    let [ours, flash] = &report["cells"][0]["results"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!((&ours["calls_per_sample"], &flash["calls_per_sample"]), (&250.into(), &125.into()));
    assert_eq!(flash["call"], Value::Null, "the call clock is not of this regime");
    let energy = &flash["energy"];
    assert_eq!(energy["used"].as_array().unwrap().len(), 6);
    for number in ["power_w", "mj_per_call", "j_per_tflop", "sm_clock_mhz"] {
        assert!(energy[number].as_f64().unwrap() > 0.0, "{number} of {energy}");
    }
    let orders = report["cells"][0]["orders"].as_array().unwrap();
    assert!(orders.len() == 6 && orders.iter().any(|order| order != &orders[0]), "{orders:?}");
    assert!(text(&output).contains("sustained: samples of 250 ms"), "{}", text(&output));
    assert!(text(&output).contains("J/TFLOP"), "{}", text(&output));
    assert_eq!(machine.contradictions(), [""; 0]);
    // A driver without the counter, and a machine without NVML: there is no column and no number.
    let python = python.to_str().unwrap();
    let without = |machine: &Machine, variable: &str, value: &str| {
        let json = machine.folder.path().join("report.json");
        let mut command = machine.command();
        command
            .args(&arguments)
            .arg("--json")
            .arg(&json)
            .env("FLASHCORE_PYTHON", python)
            .env(variable, value);
        let output = command.output().unwrap();
        let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        assert_eq!(report["cells"][0]["results"][1]["energy"], Value::Null);
        assert!(
            !text(&output).contains("J/TFLOP") && text(&output).contains("no energy"),
            "{}",
            text(&output)
        );
        assert_eq!(machine.contradictions(), [""; 0]);
    };
    without(&machine, "NVML_NO_ENERGY", "1");
    std::fs::remove_file(machine.driver.path().join("libnvidia-ml.so.1")).unwrap();
    without(&machine, "NVML_NO_ENERGY", "");
}

#[test]
fn flash_attention_3_is_called_as_its_users_call_it_and_its_refusals_are_its_own() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        return println!("skipped: there is no python3 to run the worker in");
    }
    let fakes = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake");
    let log = machine.folder.path().join("fa3.log");
    let run = |arguments: &[&str], fa3: &str| {
        let _ = std::fs::remove_file(&log);
        let json = machine.folder.path().join("report.json");
        let common = ["--device", "cuda", "--samples", "6", "--sustained", "--cache", "warm", "--json"];
        let path = format!("{}:{}", fakes.display(), fakes.join(fa3).display());
        let mut command = machine.command();
        command.arg("bench").args(arguments).args(common).arg(&json);
        command.env("FLASHCORE_PYTHON", "python3").env("PYTHONPATH", path).env("FA3_LOG", &log);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        let output = command.output().unwrap();
        let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        assert_eq!(machine.contradictions(), [""; 0], "{}", text(&output));
        (text(&output), report, std::fs::read_to_string(&log).unwrap_or_default())
    };
    let fa3 = |report: &Value| -> Value {
        let results = report["cells"][0]["results"].as_array().unwrap();
        results.iter().find(|it| it["name"] == "fa3").cloned().unwrap_or_default()
    };
    let right = |result: &Value| {
        let within = |name: &str| {
            let bound = &result["error"][name];
            bound["error"].as_f64().unwrap() <= bound["allowed"].as_f64().unwrap()
        };
        result["failure"].is_null() && within("max") && within("rms") && result["p50_us"] == 2000.0
    };

    // Shared heads and a causal mask on more keys than queries, which torch has not.
    let (said, report, log) = run(&["1x4/2x8/24x64", "--causal", "--peers", "flash,fa3"], "fa3");
    assert!(right(&fa3(&report)), "{said}");
    assert!(log.contains("flash_attn_func 1 8 4 64") && !log.contains("kvcache"), "{log}");
    let why = report["cells"][0]["results"][1]["failure"].as_str().unwrap();
    assert!(why.contains("torch's is_causal"), "{why}");
    let version = report["gpu"]["torch"]["versions"]["fa3"].as_str().unwrap();
    assert!(version.starts_with("sha256:") && version.len() == 71, "{version}");
    // Ours writes zeros here, and the ratio says how far off that is.
    let exactness = &report["cells"][0]["exactness"];
    assert_eq!((&exactness["rms_peer"], &exactness["holds"]), (&"fa3".into(), &false.into()));

    // A head_dim that the build has not.
    let (said, report, _) = run(&["1x2x8x32", "--peers", "fa3"], "fa3");
    let why = fa3(&report)["failure"].clone();
    assert_eq!(why, "NotImplementedError: this build has no head_dim 32");
    assert!(said.contains("this build has no head_dim 32"), "{said}");

    // One query: what splits the keys, where the build has it, and the plain function where it has not.
    let decode = ["1x4/2x1/64x128", "--peers", "fa3", "--dtype"];
    let (said, report, log) = run(&[&decode[..], &["bf16"]].concat(), "fa3");
    assert!(right(&fa3(&report)) && log.contains("flash_attn_with_kvcache 1 1 4 128"), "{said}{log}");
    assert!(!log.contains("flash_attn_func"), "{log}");
    let (said, report, log) = run(&[&decode[..], &["f16"]].concat(), "fa3");
    assert!(right(&fa3(&report)) && log.contains("flash_attn_func 1 1 4 128"), "{said}{log}");

    // Where it is not there, the others go on.
    let (said, report, _) = run(&["1x1x8x64"], "nothing");
    assert!(
        said.contains("without fa3: python3 has no such module") && said.contains("PYTHONPATH"),
        "{said}"
    );
    assert!(fa3(&report).is_null() && report["gpu"]["no_fa3_because"].is_string());
    assert!(right(&report["cells"][0]["results"][1]), "{said}");
    let (said, report, _) = run(&["1x1x8x64"], "fa3");
    assert!(right(&fa3(&report)) && report["gpu"]["no_fa3_because"].is_null(), "{said}");
}

#[test]
fn stress_fails_a_gpu_whose_results_are_wrong_even_where_they_are_all_the_same() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let sizes = ["--calls", "20", "--repeats", "3", "--problems", "3"];
    let (output, report) = machine.run(&[&["verify", "--device", "cuda", "--stress"][..], &sizes].concat());
    assert_eq!(code(&output), 1, "{}", text(&output));
    assert_eq!(report["schema"], "flashcore.stress/2");
    let problems = report["problems"].as_array().unwrap();
    assert_eq!(problems.len(), 3);
    for problem in problems {
        assert_eq!(
            (&problem["threaded"]["runs"], &problem["threaded"]["different"]),
            (&20.into(), &0.into())
        );
        assert_eq!((&problem["replayed"]["runs"], &problem["replayed"]["different"]), (&2.into(), &0.into()));
        assert_eq!(problem["repeated"]["runs"], 3);
    }
    assert!(text(&output).contains("WRONG"), "{}", text(&output));
    assert_eq!(machine.contradictions(), [""; 0]);
    let cpu = machine.command().args(["verify", "--device", "cpu", "--stress"]).output().unwrap();
    assert!(text(&cpu).contains("--stress is for a GPU"), "{}", text(&cpu));
}

#[test]
fn gradients_are_put_under_stress_too() {
    let Some(machine) = Machine::new(&["-DZEROS"]) else { return };
    let sizes = ["--calls", "10", "--repeats", "2", "--problems", "2"];
    let stress = ["verify", "--device", "cuda", "--pass", "backward", "--stress"];
    let (output, report) = machine.run(&[&stress[..], &sizes].concat());
    assert_eq!(code(&output), 1, "{}", text(&output));
    for problem in report["problems"].as_array().unwrap() {
        assert!(problem["problem"].as_str().unwrap().ends_with("backward"), "{problem}");
        let runs = ["threaded", "replayed", "repeated"].map(|which| problem[which]["runs"].as_u64());
        assert_eq!(runs, [10, 1, 2].map(Some));
        assert!(["dq", "dk", "dv"].iter().all(|name| !problem["judgement"][name].is_null()), "{problem}");
    }
    assert_eq!(machine.contradictions(), [""; 0]);
}

#[test]
fn doctor_shows_the_cache_of_machine_code_and_clears_it() {
    let Some(machine) = Machine::new(&["-DZEROS", "-DCAPABILITY=80"]) else { return };
    machine.run(&TINY);
    let (output, report) = machine.run(&["doctor"]);
    assert_eq!(report["cache"]["files"], 1, "{}", text(&output));
    assert!(text(&output).contains("Fake GPU 0") && text(&output).contains("1 kernels"), "{}", text(&output));
    let (output, report) = machine.run(&["doctor", "--clear-cache"]);
    assert_eq!((&report["cache"]["files"], &report["cache"]["removed"][0]), (&0.into(), &1.into()));
    assert!(text(&output).contains("were removed"), "{}", text(&output));
}

#[test]
fn what_only_a_gpu_has_is_not_asked_of_the_cpu_and_the_other_way_round() {
    for (arguments, words) in [
        (&["bench", "--matrix", "anchors", "--device", "cpu"][..], "a GPU's"),
        (&["bench", "tiny", "--ladder", "--device", "cpu"], "a GPU's"),
        (&["bench", "--matrix", "cpu", "--device", "cuda"], "CPU engine's"),
        (&["bench", "tiny", "--peers", "flesh", "--device", "cuda"], "possible are flash"),
        (&["bench", "tiny", "--kernel", "sm70", "--device", "cuda"], "not a kernel"),
        (&["bench", "tiny", "--budget", "4x", "--device", "cuda"], "such as 2.5, 90s or 4m"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_flashcore")).args(arguments).output().unwrap();
        assert_eq!(code(&output), 2, "{arguments:?}");
        assert!(text(&output).contains(words), "{arguments:?}: {}", text(&output));
    }
}

#[test]
fn a_kernel_that_leaves_no_stamps_has_no_timeline() {
    let Some(machine) = Machine::new(&[]) else { return };
    let trace = machine.folder.path().join("t.json");
    let output = machine.command().args(["profile", "mission", "--trace"]).arg(&trace).output().unwrap();
    assert_eq!(code(&output), 2, "{}", text(&output));
    assert!(text(&output).contains("left no stamps"), "{}", text(&output));
    assert!(!trace.exists());
}
