//! Evidence, through the command: what is on record is consistent, new files pass the audit, and edited ones fail.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn flashcore(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flashcore")).args(arguments).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn record() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../record");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "json")).collect()
}

#[test]
fn everything_on_record_holds_together() {
    let files = record();
    assert!(!files.is_empty());
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let audit = flashcore_lab::evidence::audit::audit(&text).unwrap();
        assert!(audit.holds(), "{}: {:#?}", file.display(), audit.contradictions);
        assert!(audit.checked > 0 || !audit.absent.is_empty(), "{}", file.display());
    }
}

/// A document with the hash of its text, as anyone who changes a number can write it.
fn sealed(document: &Value) -> String {
    let mut document = document.clone();
    document["hash"] = Value::from("");
    flashcore_lab::evidence::seal(&serde_json::to_string_pretty(&document).unwrap())
}

#[test]
fn a_number_on_record_cannot_be_changed_without_notice() {
    let gpu = [
        "/results/0/p50_us",
        "/results/0/tflops",
        "/results/0/median_interval_us/level",
        "/comparisons/0/speed_up",
        "/comparisons/0/margin",
        "/comparisons/0/interval/low",
        "/flops",
        "/judged_rows",
        "/results/0/samples_us/3",
        "/results/0/error/max/allowed",
    ];
    let cpu = ["/results/0/gflops", "/results/0/fma_peak_share", "/fma_peak_gflops"];
    // The second cell of the CPU's matrix is causal.
    for (name, n, paths) in [
        ("h200-small.json", 0, &gpu[..]),
        ("xeon-cpu.json", 0, &cpu),
        ("xeon-cpu.json", 1, &["/causal_share"]),
    ] {
        let file = record().into_iter().find(|path| path.to_string_lossy().ends_with(name)).unwrap();
        let honest: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let audit = |document: &Value| flashcore_lab::evidence::audit::audit(&sealed(document)).unwrap();
        for path in paths {
            let mut document = honest.clone();
            let number = document["cells"][n].pointer_mut(path).unwrap();
            *number = match number.as_u64() {
                Some(count) => Value::from(count - 1),
                None => Value::from(number.as_f64().unwrap() * 1.01),
            };
            assert!(!audit(&document).holds(), "{path}");
        }
        let mut document = honest.clone();
        document["cells"][n]["results"][0]["samples_us"].as_array_mut().unwrap().reverse();
        assert!(!audit(&document).holds(), "shuffled");
    }
}

#[test]
fn what_bench_writes_holds_and_no_reseal_hides_a_change_without_a_peer_to_compare_with() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let (bench, itself) = (path("bench.json"), path("itself.json"));
    let of = ["--device", "cpu-portable", "--no-peers", "--samples", "6", "--json"];
    let code =
        flashcore(&[&["bench", "tiny", "1x2x32x64", "--causal"][..], &of, &[&bench]].concat()).status.code();
    assert!(code.is_some_and(|code| code < 3));
    let of = ["--device", "cpu-portable", "--samples", "6", "--json"];
    flashcore(&[&["against-itself", "tiny", "--times", "2"][..], &of, &[&itself]].concat());
    let output = flashcore(&["evidence", "verify", &bench, &itself]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));

    let honest: Value = serde_json::from_str(&std::fs::read_to_string(&bench).unwrap()).unwrap();
    let changed = path("changed.json");
    let verify = |document: &Value| {
        std::fs::write(&changed, sealed(document)).unwrap();
        flashcore(&["evidence", "verify", &changed]).status.code()
    };
    assert_eq!(verify(&honest), Some(0));
    let mut shuffled = honest.clone();
    shuffled["cells"][0]["results"][0]["samples_us"].as_array_mut().unwrap().reverse();
    assert_eq!(verify(&shuffled), Some(1));
    let mut failed = honest.clone();
    failed["cells"][0]["results"][0]["failure"] = Value::from("it died");
    assert_eq!(verify(&failed), Some(1));
    let mut fewer = honest.clone();
    fewer["cells"].as_array_mut().unwrap().pop();
    assert_eq!(verify(&fewer), Some(1));
    let mut unknown = honest.clone();
    unknown["schema"] = Value::from("flashcore.bench/3");
    assert_eq!(verify(&unknown), Some(2));
    let mut open = honest;
    open.as_object_mut().unwrap().remove("hash");
    std::fs::write(&changed, open.to_string()).unwrap();
    assert_eq!(flashcore(&["evidence", "verify", &changed]).status.code(), Some(2));
}

#[test]
fn what_verify_writes_holds_until_it_is_edited_and_has_views() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let report = path("report.json");
    let filter = ["--device", "cpu-portable", "--filter", "lengths/self-len7-f16", "--json", &report];
    assert_eq!(flashcore(&[&["verify"], &filter[..]].concat()).status.code(), Some(0));

    let output = flashcore(&["evidence", "verify", &report]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(text(&output).contains("holds") && !text(&output).contains("absent: hash"), "{}", text(&output));

    let output = flashcore(&["evidence", "views", &report, "-o", &path("views")]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    for view in ["build_meta.json", "correctness_summary.json", "perf_baseline.json"] {
        let text = std::fs::read_to_string(folder.path().join("views").join(view)).unwrap();
        let view: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(view["evidence"]["file"], "report.json");
    }

    let edited = path("edited.json");
    let original = std::fs::read_to_string(&report).unwrap();
    std::fs::write(&edited, original.replace("\"passed\": 1", "\"passed\": 2")).unwrap();
    let output = flashcore(&["evidence", "verify", &report, &edited]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("the file was changed"), "{}", text(&output));
    assert_eq!(flashcore(&["evidence", "views", &edited, "-o", &path("views")]).status.code(), Some(2));

    assert_eq!(flashcore(&["evidence", "diff", &report, &report]).status.code(), Some(0));
    let output = flashcore(&["evidence", "diff", &report, &edited]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("engines[0].passed: 1 → 2"), "{}", text(&output));
}

#[test]
fn what_is_no_evidence_could_not_be_checked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.json").to_string_lossy().into_owned();
    assert_eq!(flashcore(&["evidence", "verify", &path]).status.code(), Some(2));
    std::fs::write(&path, "{\"schema\": \"other/1\"}").unwrap();
    assert_eq!(flashcore(&["evidence", "verify", &path]).status.code(), Some(2));
    // A note has a hash too, but nothing in it can be recomputed.
    assert_eq!(flashcore(&["plan", "tiny", "--json", &path]).status.code(), Some(0));
    let output = flashcore(&["evidence", "verify", &path]);
    assert!(output.status.code() == Some(2) && text(&output).contains("a note"), "{}", text(&output));
}
