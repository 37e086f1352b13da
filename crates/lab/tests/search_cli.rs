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
    let text = said(&flashcore(folder.path(), &["micro", "tiny", "--target", "sm_90a", "--sample", "10"]));
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
