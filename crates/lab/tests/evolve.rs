//! The search as specified: planted candidates must be refused, quarantined or found not to be better, and better ones
//! accepted.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::Path;

use flashcore_lab::faults::candidates::{self, CASES, PlantedDevice, PlantedGates, task};
use flashcore_lab::rng::Rng;
use flashcore_lab::search::gates::Gate;
use flashcore_lab::search::journal::{Event, Fate, Journal, State, Task};
use flashcore_lab::search::run::{Search, Settings};
use flashcore_lab::search::space::Space;

/// Searches through everything that is planted. After `most` device calls it is stopped as by a kill.
fn search(journal: Journal, overlap: bool, seed: u64, most: usize) -> (State, BTreeMap<String, usize>) {
    candidates::search(journal, overlap, seed, most).unwrap()
}

fn whole(overlap: bool, seed: u64) -> (State, BTreeMap<String, usize>) {
    search(Journal::in_memory(), overlap, seed, usize::MAX)
}

fn fate<'a>(state: &'a State, kind: &str) -> &'a Fate {
    &state.records[&format!("kind={kind}")].fate
}

#[test]
fn every_planted_candidate_meets_the_fate_that_is_specified() {
    for overlap in [false, true] {
        let (state, asked) = whole(overlap, 1);
        let refused_at = |kind: &str| match fate(&state, kind) {
            Fate::Refused { gate, .. } => Some(*gate),
            _ => None,
        };
        assert_eq!(refused_at("does-not-fit"), Some(Gate::Static));
        assert_eq!(refused_at("spills"), Some(Gate::Assembler));
        assert_eq!(refused_at("races"), Some(Gate::Simulator));
        assert_eq!(refused_at("fast-and-wrong"), Some(Gate::Parity));
        assert!(matches!(fate(&state, "hangs"), Fate::Quarantined { gate: Gate::Parity, .. }));
        assert!(matches!(fate(&state, "crashes-on-the-clock"), Fate::Quarantined { gate: Gate::Timing, .. }));
        // The twins share one result, whichever came first.
        let twins = ["slow", "twin-of-slow"].map(|kind| fate(&state, kind).clone());
        assert!(twins.iter().any(|fate| matches!(fate, Fate::Duplicate { .. })), "{twins:?}");
        assert!(twins.contains(&Fate::Slower), "{twins:?}");
        assert!(matches!(fate(&state, "baseline-itself"), Fate::Duplicate { of } if of.contains("planner")));
        assert_eq!(fate(&state, "fast-in-one-case"), &Fate::Slower);
        assert_eq!(fate(&state, "fast"), &Fate::Accepted);
        assert_eq!(state.incumbents, ["kind=fast"; CASES]);
        // A cheap gate comes before an expensive one: what an early one refuses never reaches the device.
        for kind in ["does-not-fit", "spills", "races"] {
            assert!(!asked.contains_key(&format!("kind={kind}")), "{kind}");
        }
        assert_eq!(asked["kind=hangs"], 1);
        assert_eq!(asked["kind=fast-and-wrong"], 1);
    }
}

#[test]
fn luck_and_noise_never_win_whatever_the_seed() {
    for seed in 0..40 {
        let (state, _) = whole(false, seed);
        assert_ne!(fate(&state, "lucky"), &Fate::Accepted, "seed {seed}");
        assert_ne!(fate(&state, "noisy"), &Fate::Accepted, "seed {seed}");
        assert_eq!(state.incumbents, ["kind=fast"; CASES], "seed {seed}");
    }
}

#[test]
fn a_lucky_timing_is_seen_through_on_fresh_data() {
    let (state, _) = whole(false, 3);
    let lucky = fate(&state, "lucky");
    // Where it challenges before the fast one is the incumbent, it wins once and not again.
    assert!(matches!(lucky, Fate::Unconfirmed), "{lucky:?}");
}

#[test]
fn a_search_killed_at_any_moment_ends_where_one_that_ran_through_does() {
    let (through, _) = whole(false, 7);
    for kill_after in [1, 4, 7, 9, 20, 30, 45, 60] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        search(Journal::create(&path).unwrap(), false, 7, kill_after);
        cut_last_line(&path);
        let (state, asked) = search(Journal::resume(&path).unwrap(), false, 8, usize::MAX);
        assert_eq!(state.incumbents, through.incumbents, "after {kill_after}");
        for (candidate, record) in &state.records {
            assert_ne!(record.fate, Fate::Open, "{candidate} after {kill_after}");
        }
        // A candidate quarantined before the kill is not run again.
        let before = std::fs::read_to_string(&path).unwrap();
        let quarantined = before.lines().filter(|line| line.contains("\"quarantined\"")).count();
        assert_eq!(quarantined, 2, "after {kill_after}");
        assert!(asked.get("kind=hangs").is_none_or(|&times| times == 1), "after {kill_after}");
    }
}

/// As a kill in the middle of a write leaves it.
fn cut_last_line(path: &Path) {
    let text = std::fs::read_to_string(path).unwrap();
    let last = text.trim_end().lines().last().unwrap().len();
    std::fs::write(path, &text[..text.trim_end().len() - last / 2]).unwrap();
}

#[test]
fn a_journal_of_another_search_is_not_gone_on_with() {
    let mut journal = Journal::in_memory();
    let other = Task { device: "another".into(), ..task() };
    journal.write(&Event::Start { task: other, version: "1".into() }).unwrap();
    let space = Space::of(Vec::new());
    let (asked, calls) = (RefCell::default(), Cell::new(0));
    let result = Search {
        task: task(),
        space: &space,
        gates: &PlantedGates { overlap: false },
        device: &mut PlantedDevice { rng: Rng::new(1), asked: &asked, calls: &calls },
        proposers: Vec::new(),
        journal,
        settings: Settings::default(),
        stop: &|| false,
        view: &mut |_| {},
        note: &mut |_| {},
    }
    .run();
    assert!(result.unwrap_err().contains("another"));
}

/// Real worker processes: this crate's own binary, and ones that misbehave.
#[cfg(unix)]
mod processes {
    use super::*;
    use flashcore::{DType, Mask, Problem};
    use flashcore_lab::gpu::host::{Host, Kind};
    use flashcore_lab::search::device::{Device, Trouble, Workers};
    use flashcore_lab::timing::{Effort, SAMPLE};
    use std::process::{Command, Stdio};
    use std::time::Duration;

    const FLASHCORE: &str = env!("CARGO_BIN_EXE_flashcore");
    const SCHEDULE: &str = "block_q=48,block_k=64,split_k=512,threads=1";

    fn workers(script: &str) -> Workers {
        let words = ["sh", "-c", script].map(Into::into).to_vec();
        let host = Host::new(Kind::Command("test worker", words), 0).with_watchdog(Duration::from_mins(10));
        let causal = Problem::new(1, 2, 96, 32, DType::F16).with_mask(Mask::Causal);
        let plain = Problem::new(1, 2, 96, 32, DType::BF16);
        Workers::new(host, vec![causal, plain], vec![1, 1], 5)
    }

    #[test]
    fn the_cpus_worker_is_right_and_is_timed() {
        let mut workers = workers(&format!("exec {FLASHCORE} cpu-worker"));
        for case in 0..2 {
            for data in [0, 3] {
                assert_eq!(workers.parity(SCHEDULE, case, data), Ok(()));
            }
        }
        let effort = Effort {
            rounds: Some(5),
            budget: Duration::ZERO,
            margin: 0.03,
            settle: Duration::ZERO,
            sample: SAMPLE,
        };
        let times = workers.race(&[SCHEDULE, "nonsense"], 0, 0, &effort, &|| false);
        assert!(times[0].as_ref().unwrap().iter().all(|&time| time > 0.0));
        assert!(matches!(times[1], Err(Trouble::Refused(_))), "{times:?}");
    }

    #[test]
    fn a_worker_that_computes_another_mask_is_found_wrong() {
        let script = format!("sed -u 's/f16 causal/f16/' | {FLASHCORE} cpu-worker");
        let mut workers = workers(&script);
        assert!(matches!(workers.parity(SCHEDULE, 0, 0), Err(Trouble::Wrong(_))));
        assert_eq!(workers.parity(SCHEDULE, 1, 0), Ok(()));
    }

    #[test]
    fn a_hang_and_a_crash_cost_one_candidate_each_and_the_next_one_runs() {
        let script = format!(
            "while read -r line; do case $line in *output*block_q=1,*) sleep 100;; *output*block_q=2,*) kill -9 $$;; \
             *) echo \"$line\";; esac; done | {FLASHCORE} cpu-worker"
        );
        let words = ["sh", "-c", &script].map(Into::into).to_vec();
        let host = Host::new(Kind::Command("test worker", words), 0).with_watchdog(Duration::from_secs(2));
        let mut workers = Workers::new(host, vec![Problem::new(1, 1, 32, 32, DType::F16)], vec![1], 5);
        for (number, block_q) in [(1, 1), (2, 2)] {
            let candidate = SCHEDULE.replace("block_q=48", &format!("block_q={block_q}"));
            let trouble = workers.parity(&candidate, 0, 0);
            assert!(matches!(trouble, Err(Trouble::Lost(_))), "{trouble:?}");
            assert!(workers.lost() >= number);
            // On a machine so busy that an honest worker is late too, it is asked again.
            let mut answers = (0..100).map(|_| workers.parity(SCHEDULE, 0, 0));
            let answer = answers.find(|answer| !matches!(answer, Err(Trouble::Lost(_))));
            assert_eq!(answer, Some(Ok(())));
        }
    }

    fn evolve(out: &Path, more: &[&str]) -> Command {
        let mut command = Command::new(FLASHCORE);
        command.args(["evolve", "tiny", "--device", "cpu", "--generation", "3", "--seed", "2", "--out"]);
        command.arg(out).args(more).env("FLASHCORE_CACHE", out);
        command
    }

    fn journal(out: &Path) -> String {
        std::fs::read_to_string(out.join("journal.jsonl")).unwrap_or_default()
    }

    #[test]
    fn the_command_searches_survives_a_kill_and_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        let mut child =
            evolve(out, &["--budget", "1h"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while !journal(out).contains("\"timed\"") {
            assert_eq!(child.try_wait().unwrap(), None, "it ended by itself: {}", journal(out));
            std::thread::sleep(Duration::from_millis(50));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let before = journal(out).lines().count();
        let again = evolve(out, &["--budget", "1h", "--generations", "1"]).output().unwrap();
        assert!(String::from_utf8_lossy(&again.stderr).contains("--resume"));
        let resumed = evolve(out, &["--budget", "1h", "--generations", "1", "--resume"]).output().unwrap();
        assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
        let text = journal(out);
        assert!(text.lines().count() > before && text.contains("\"end\""));
        let board = std::fs::read_to_string(out.join("leaderboard.json")).unwrap();
        let board: serde_json::Value = serde_json::from_str(&board).unwrap();
        assert_eq!(board["schema"], "flashcore.leaderboard/1");
        assert!(board["candidates"].as_u64() >= Some(3), "{board}");
        let log = std::fs::read_to_string(out.join("evo_log.csv")).unwrap();
        assert!(log.starts_with("schedule,proposer,fate") && log.lines().count() > 3, "{log}");
    }

    #[test]
    fn of_two_searches_in_one_folder_the_second_is_refused_and_damages_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        let resume = ["--budget", "1h", "--generations", "1", "--resume"];
        assert!(evolve(out, &resume[..4]).output().unwrap().status.success());
        let before = journal(out);
        let files = || std::fs::read_dir(out).unwrap().count();
        let count = files();
        // As a running search holds it.
        let first = Journal::resume(&out.join("journal.jsonl")).unwrap();
        let second = evolve(out, &resume).output().unwrap();
        let said = String::from_utf8_lossy(&second.stderr);
        assert!(second.status.code() == Some(2) && said.contains("another search"), "{said}");
        assert_eq!((journal(out), files()), (before.clone(), count));
        drop(first);
        let third = evolve(out, &resume).output().unwrap();
        assert!(third.status.success(), "{}", String::from_utf8_lossy(&third.stderr));
        assert!(
            journal(out).starts_with(&before) && !String::from_utf8_lossy(&third.stdout).contains("damaged")
        );
    }

    /// Interrupts a search once it has begun, and waits for its end.
    fn interrupted(out: &Path, more: &[&str]) -> std::process::Output {
        let before = journal(out).matches("\"event\":\"start\"").count();
        // The proposer thinks for longer than the test runs.
        let child = evolve(out, &["--budget", "3000s", "--external", "sleep 3000"])
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Every search begins by writing that it did, with its handler of interrupts in place.
        let starts = |text: &str| text.matches("\"event\":\"start\"").count();
        while starts(&journal(out)) == before {
            std::thread::sleep(Duration::from_millis(5));
        }
        let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(status.success());
        child.wait_with_output().unwrap()
    }

    #[test]
    fn a_search_that_is_interrupted_again_and_again_writes_its_end_and_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        for more in [&[][..], &["--resume"], &["--resume"]] {
            let output = interrupted(out, more);
            assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
            let text = journal(out);
            assert!(text.lines().last().unwrap().contains("\"end\""), "{text}");
        }
        // Half of the journal is lost: the search goes on, and says so.
        let text = journal(out);
        let lines: Vec<&str> = text.split_inclusive('\n').collect();
        std::fs::write(out.join("journal.jsonl"), lines[lines.len() / 2..].concat()).unwrap();
        let resumed = evolve(out, &["--budget", "30s", "--generations", "1", "--resume"]).output().unwrap();
        assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
        let said = String::from_utf8_lossy(&resumed.stdout);
        assert!(said.contains("is damaged") && said.contains("its beginning among them"), "{said}");
    }

    #[test]
    fn a_dry_run_shows_the_space_of_a_gpu_that_is_not_there() {
        let run = |arguments: &[&str]| {
            let output =
                Command::new(FLASHCORE).args(["evolve", "mission", "--dry-run"]).args(arguments).output();
            String::from_utf8_lossy(&output.unwrap().stdout).into_owned()
        };
        let hopper = run(&["--target", "sm_90a", "--sample", "0"]);
        assert!(hopper.contains("warpgroups") && hopper.contains("static "), "{hopper}");
        let ampere = run(&["--target", "sm_80", "--sample", "1"]);
        assert!(ampere.contains("block_m") && ampere.contains("drawn at random"), "{ampere}");
        assert!(run(&["--device", "cpu"]).contains("split_k"));
    }
}
