//! The commands around the search: plan, micro and profile, as a user without a GPU sees them.

use std::path::Path;
use std::process::{Command, Output};

fn flashcore(cache: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    command.args(arguments).env("FLASHCORE_CACHE", cache).env_remove("FLASHCORE_NCU").current_dir(cache);
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_plan_says_whether_a_tuned_table_or_the_planners_rules_chose() {
    let folder = tempfile::tempdir().unwrap();
    let plan = ["plan", "mission", "--target", "sm_80", "--name", "My GPU", "--explain"];
    let before = said(&flashcore(folder.path(), &plan));
    assert!(before.contains("the planner's own rules"), "{before}");
    let tuned = "sm80_fwd:block_m=64,block_n=32,warps=4,stages=3,q_in_regs=0,order=longest";
    let line = format!("My GPU | sm_80 | 1x8/8x512/512x64/64 f16 full | {tuned} | 1.0700\n");
    std::fs::write(folder.path().join("tuned.txt"), line).unwrap();
    let after = said(&flashcore(folder.path(), &plan));
    assert!(after.contains(tuned) && after.contains("this machine's table: 7.0 %"), "{after}");
    assert!(after.contains("without it"), "{after}");
    let other = said(&flashcore(folder.path(), &["plan", "mission", "--target", "sm_80", "--explain"]));
    assert!(!other.contains(tuned), "{other}");
}

#[test]
fn micro_counts_pieces_orders_schedules_and_claims_no_correlation_without_times() {
    let folder = tempfile::tempdir().unwrap();
    let text = said(&flashcore(folder.path(), &["micro", "tiny", "--target", "sm_90a", "--sample", "20"]));
    assert!(text.contains("wgmma 64x128x64") && text.contains("not known"), "{text}");
    let file = json(&folder.path().join("micro_best.json"));
    assert_eq!(file["rank_correlation"], serde_json::Value::Null);
    assert_eq!(file["costs"]["measured"], false);
    assert!(file["pieces"].as_array().unwrap().iter().all(|piece| piece["cycles"].is_null()));
    let top = file["top"].as_array().unwrap();
    assert_eq!(top.len(), 8);
    let predicted: Vec<f64> = top.iter().map(|it| it["predicted"].as_f64().unwrap()).collect();
    assert!(predicted.is_sorted(), "{predicted:?}");
}

#[test]
fn a_profile_without_counters_says_so_and_labels_what_it_has_instead() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["profile", "mission", "--target", "sm_80", "--json", "profile.json"];
    let text = said(&flashcore(folder.path(), &arguments));
    assert!(text.contains("no counters: there is no GPU here") && text.contains("simulator"), "{text}");
    let file = json(&folder.path().join("profile.json"));
    for absent in ["profiled", "bound", "loaded"] {
        assert!(file[absent].is_null(), "{absent}");
    }
    assert!(file["roofline"]["time_us"].is_null());
    assert!(file["simulated"]["warp_instructions"].as_u64() > Some(0));
}

/// The slices of a trace by track: name, beginning, length.
type Tracks = std::collections::BTreeMap<(u64, u64), Vec<(String, f64, f64)>>;

fn tracks(trace: &serde_json::Value) -> Tracks {
    let mut tracks = Tracks::new();
    for event in trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X") {
        let number = |name: &str| event[name].as_f64().unwrap();
        let track = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        let name = event["name"].as_str().unwrap().to_string();
        tracks.entry(track).or_default().push((name, number("ts"), number("dur")));
    }
    tracks
}

#[test]
fn a_timeline_from_the_simulator_has_every_section_and_its_parts_add_up() {
    let folder = tempfile::tempdir().unwrap();
    for (shape, expected) in [
        ("mission", vec!["merge", "copy K", "slot wait", "Q wait", "launch wait"]),
        ("1x16x16384x128:causal:bf16", vec!["turn", "rescale", "K wait", "V wait", "QK wait", "PV wait"]),
    ] {
        let files = ["--trace", "t.json", "--svg", "t.svg", "--json", "r.json"];
        let arguments: Vec<&str> = ["profile", shape, "--device", "sim"].into_iter().chain(files).collect();
        let text = said(&flashcore(folder.path(), &arguments));
        assert!(text.lines().skip(2).all(|line| line.chars().count() <= 100), "{text}");
        let tracks = tracks(&json(&folder.path().join("t.json")));
        assert!(tracks.len() >= 3, "a producer and two warpgroups");
        let mut names = std::collections::BTreeSet::new();
        for slices in tracks.values() {
            let (mut end, first) = (slices[0].1, slices[0].1);
            for (name, from, length) in slices {
                assert!((from - end).abs() < 1e-6 && *length >= 0.0, "{name} at {from}, after {end}");
                end = from + length;
                names.insert(name.clone());
            }
            let sum: f64 = slices.iter().map(|slice| slice.2).sum();
            assert!((sum - (end - first)).abs() < 1e-6, "{sum} of {}", end - first);
        }
        let always = ["setup", "tile", "QK", "PV", "softmax", "store", "copy Q", "copy V"];
        for name in expected.iter().chain(&always) {
            assert!(names.contains(*name), "{shape}: {name} is missing in {names:?}");
        }
        let report = json(&folder.path().join("r.json"));
        for role in ["consumer 0", "consumer 1", "producer"] {
            let rows = report["rows"].as_array().unwrap().iter().filter(|row| row["role"] == role);
            let (share, total) = rows.fold((0.0, 0.0), |(share, total), row| {
                (share + row["share"].as_f64().unwrap(), total + row["total"].as_f64().unwrap())
            });
            assert!((share - 1.0).abs() < 1e-9, "{role}: {share}");
            assert!((total - report["length"].as_f64().unwrap()).abs() < 1e-9, "{role}: {total}");
        }
        let picture = std::fs::read_to_string(folder.path().join("t.svg")).unwrap();
        let drawn = roxmltree::Document::parse(&picture).unwrap();
        assert!(drawn.descendants().filter(|node| node.has_tag_name("rect")).count() > 20);
        assert!(picture.contains("prefers-color-scheme:dark") && picture.contains("softmax"));
    }
}

#[test]
fn a_timeline_that_cannot_be_taken_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, reason) in [
        (vec!["--target", "sm_90a"], "--device sim"),
        (vec!["--device", "sim", "--kernel", "scalar"], "sm80_fwd"),
    ] {
        let arguments = ["profile", "tiny", "--trace", "t.json"].into_iter().chain(arguments);
        let output = flashcore(folder.path(), &arguments.collect::<Vec<_>>());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(reason), "{said}");
    }
}
