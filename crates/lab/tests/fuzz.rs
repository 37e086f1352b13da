//! Every reader on malformed inputs: none may panic, hang, or allocate too much memory.
//!
//! Inputs are made from good ones by small steps, always in the same order. Each target runs for about a second; by
//! hand, for as long as you like: `FLASHCORE_FUZZ_SECONDS=600 cargo test --release -p flashcore-lab --test fuzz`. What
//! a reader stumbles over is kept in a file that the message names. The reader of PTX has its own tests.

#![allow(unsafe_code)] // An allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use flashcore::cpu::Engine;
use flashcore::cuda::CubinCache;
use flashcore::plan::{Hardware, Plan, Target};
use flashcore::tuned::{Origin, Table};
use flashcore::{DType, Mask, Problem};
use flashcore_lab::evidence::saved::Saved;
use flashcore_lab::evidence::{audit, compare, views};
use flashcore_lab::gpu::protocol::{Asked, Request};
use flashcore_lab::gpu::worker::{PLANNER, SCHEDULE};
use flashcore_lab::report::{self, source::Evidence};
use flashcore_lab::rng::Rng;
use flashcore_lab::search::cpu_worker::Server;
use flashcore_lab::search::decide::{Rule, Standing};
use flashcore_lab::search::gates::Gate;
use flashcore_lab::search::journal::{self, Event, Journal, Task};
use flashcore_lab::search::{config, cpu_worker, space};
use flashcore_lab::stats::Interval;
use flashcore_lab::subject::ptx::Launch;
use flashcore_lab::{cases, memory, rbk, shapes};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

thread_local! {
    /// The largest allocation that this thread has made.
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

fn count(size: usize) {
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
}

// SAFETY: every call is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// No input here needs a larger allocation.
const LARGEST_PIECE: usize = 256 << 20;

/// An input that takes this long hangs; even a busy machine needs a hundredth of it.
const HANG: Duration = Duration::from_mins(4);

/// What stands where a number or a word is expected.
const NASTY: [&str; 44] = [
    "",
    "0",
    "-1",
    "1",
    "255",
    "65536",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999999999",
    "1e308",
    "1e999",
    "-1e999",
    "1e-400",
    "NaN",
    "nan",
    ".inf",
    "-0.0",
    "0x7fffffffffffffff",
    "007",
    "1_000",
    "null",
    "true",
    "~",
    "\0",
    "é",
    "∞",
    "\u{202e}",
    "\u{feff}",
    "\r\n",
    "\n\n",
    "\"",
    "'",
    "\\",
    "*",
    "&a [*a]",
    "/",
    "|",
    "%s",
    "[",
    "{",
];

fn deep() -> Vec<Vec<u8>> {
    ["[", "{\"a\":", "- ", "a = [", "a: {", "[[a]]\n", "(", "x=", "!!a "]
        .map(|part| part.repeat(50_000).into())
        .to_vec()
}

fn seconds() -> Duration {
    let asked = std::env::var("FLASHCORE_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(asked.unwrap_or(1))
}

/// The runs of bytes of a kind.
fn runs(bytes: &[u8], of: impl Fn(&u8) -> bool) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (at, byte) in bytes.iter().enumerate() {
        match runs.last_mut() {
            Some((_, end)) if *end == at && of(byte) => *end += 1,
            _ if of(byte) => runs.push((at, at + 1)),
            _ => {}
        }
    }
    runs
}

fn pick<T: Copy>(rng: &mut Rng, of: &[T]) -> Option<T> {
    (!of.is_empty()).then(|| of[rng.below(of.len())])
}

/// One of some inputs, changed in a few places.
fn mutant(rng: &mut Rng, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[rng.below(seeds.len())].clone();
    for _ in 0..=rng.below(3) {
        let at = rng.below(bytes.len() + 1);
        let end = (at + 1 + rng.below(40)).min(bytes.len());
        match rng.below(10) {
            0 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
            1 if at < bytes.len() => bytes[at] = rng.below(256) as u8,
            2 => drop(bytes.drain(at..end)),
            3 => {
                let times = [1, 2, 50][rng.below(3)];
                let part = bytes[at..end].repeat(times);
                bytes.splice(at..at, part);
            }
            4 => drop(bytes.splice(at..at, NASTY[rng.below(NASTY.len())].bytes())),
            5 | 6 => {
                if let Some((from, to)) = pick(rng, &runs(&bytes, u8::is_ascii_digit)) {
                    bytes.splice(from..to, NASTY[rng.below(NASTY.len())].bytes());
                }
            }
            7 => {
                let word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
                let other = &seeds[rng.below(seeds.len())];
                if let (Some((from, to)), Some((a, b))) =
                    (pick(rng, &runs(&bytes, word)), pick(rng, &runs(other, word)))
                {
                    bytes.splice(from..to, other[a..b].iter().copied());
                }
            }
            8 => bytes.truncate(at),
            _ => {
                let other = &seeds[rng.below(seeds.len())];
                bytes.truncate(at);
                bytes.extend(&other[rng.below(other.len() + 1)..]);
            }
        }
    }
    bytes
}

/// Runs a reader on inputs: the seeds, known bad ones, and mutants for as long as there is time.
fn fuzz(name: &'static str, seeds: Vec<Vec<u8>>, read: impl Fn(&[u8]) + Send + 'static) {
    let (done, waiting) = sync_channel::<Result<(), String>>(64);
    let current = Arc::new(Mutex::new(Vec::new()));
    let shared = Arc::clone(&current);
    let ends = Instant::now() + seconds();
    std::thread::spawn(move || {
        let mut rng = Rng::new(7);
        let mut fixed = seeds.clone();
        fixed.extend(NASTY.iter().map(|text| text.as_bytes().to_vec()));
        fixed.extend(deep());
        // In the first seed, every number is replaced by each bad one.
        for (from, to) in runs(&seeds[0], u8::is_ascii_digit).into_iter().take(60) {
            fixed.extend(
                NASTY.iter().map(|text| [&seeds[0][..from], text.as_bytes(), &seeds[0][to..]].concat()),
            );
        }
        let least = fixed.len() + 50;
        for number in 0.. {
            if number >= least && Instant::now() >= ends {
                break;
            }
            let input = fixed.get(number).cloned().unwrap_or_else(|| mutant(&mut rng, &seeds));
            shared.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&input);
            LARGEST.set(0);
            let outcome = catch_unwind(AssertUnwindSafe(|| read(&input))).map_err(|_| "panics".to_string());
            let asked = LARGEST.get();
            let outcome = outcome.and_then(|()| {
                if asked > LARGEST_PIECE { Err(format!("asks for {asked} bytes at once")) } else { Ok(()) }
            });
            let failed = outcome.is_err();
            if done.send(outcome).is_err() || failed {
                break;
            }
        }
    });
    let fail = |why: &str| {
        let path = std::env::temp_dir().join(format!("flashcore-fuzz-{name}-{}", std::process::id()));
        let input = current.lock().unwrap_or_else(PoisonError::into_inner).clone();
        std::fs::write(&path, &input).unwrap();
        let shown: String = String::from_utf8_lossy(&input).chars().take(500).collect();
        panic!("the reader of {name} {why} on what is kept in {}:\n{shown}", path.display());
    };
    let mut inputs = 0;
    loop {
        match waiting.recv_timeout(HANG) {
            Ok(Ok(())) => inputs += 1,
            Ok(Err(why)) => fail(&why),
            Err(RecvTimeoutError::Timeout) => fail("hangs"),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    println!("{name}: {inputs} inputs");
}

/// A reader of text gets valid text; reading files deals with the rest.
fn fuzz_text(name: &'static str, seeds: &[&str], read: impl Fn(&str) + Send + 'static) {
    let seeds = seeds.iter().map(|seed| seed.as_bytes().to_vec()).collect();
    fuzz(name, seeds, move |bytes| read(&String::from_utf8_lossy(bytes)));
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn file(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Files of an ending in a folder.
fn files(folder: &str, ending: &str) -> Vec<String> {
    let all = std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<PathBuf> = all.filter(|path| path.extension().is_some_and(|it| it == ending)).collect();
    all.sort();
    all.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

#[test]
fn descriptions_of_launches() {
    let text = "entry = 'attention'\ngrid = ['len_q/64', 'batch*heads_q', 1]\nblock = [128, 1, 1]\nshared = 1024\n\
                parameters = ['q', 'k', 'v', 'o', 'lse', 'len_q', 'scale_log2', 'causal']\n[computes]\n\
                dtype = ['f16']\nhead_dim = [64]\nmask = ['full', 'causal', 'window(3,inf)']\ngrouped_heads = true\n";
    let mut seeds = vec![text.to_string()];
    seeds.extend(files("examples/verify", "toml"));
    let seeds: Vec<&str> = seeds.iter().map(String::as_str).collect();
    assert!(seeds.iter().all(|seed| Launch::parse(seed).is_ok()));
    fuzz_text("launch.toml", &seeds, |text| drop(Launch::parse(text)));
}

#[test]
fn tables_of_cases() {
    let mut seeds = vec![
        "[[case]]\nname = 'x'\ntier = 'quick'\nlen = [3, 5]\nbatch = 2\nheads = 4\nheads_kv = 2\nhead_dim = 16\n\
         dtype = ['f16', 'f32']\nmask = ['causal', 'window(3,4)']\nkey_lengths = [1, 3]\nscale = [0.5]\nseed = 7\n"
            .to_string(),
    ];
    seeds.extend(files("cases", "toml"));
    let seeds: Vec<&str> = seeds.iter().map(String::as_str).collect();
    assert!(seeds.iter().all(|seed| cases::parse("file", seed).is_ok()));
    fuzz_text("cases", &seeds, |text| drop(cases::parse("file", text)));
}

/// Nine levels of nine aliases each.
fn yaml_bomb() -> String {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
    for level in 1..10 {
        let of = vec![format!("*a{}", level - 1); 9].join(", ");
        let _ = writeln!(text, "a{level}: &a{level} [{of}]");
    }
    text + "shapes: *a9\n"
}

#[test]
fn grids_of_shapes() {
    let fields = "warmups: 3\niterations: 7\noutput_dir: out\nshapes:\n  - { name: tail, batch_size: 2, num_heads: 4, \
                  seq_len: 97, head_dim: 128, causal: true, dtype: bf16 }\n";
    let (example, bomb) = (file("examples/rbk_config.yaml"), yaml_bomb());
    assert!(rbk::Config::parse(fields).is_ok() && rbk::Config::parse(&example).is_ok());
    fuzz_text("rbk_config.yaml", &[fields, &example, &bomb], |text| {
        if let Ok(config) = rbk::Config::parse(text) {
            for cell in config.cells() {
                let problem = cell.problem();
                let _ = (cell.label(), problem.flops(), problem.min_bytes(), memory::to_judge(&problem));
            }
        }
    });
}

#[test]
fn searches_in_files() {
    let text = "shapes:\n  - mission\n  - 4x16x512x64:causal:bf16\n  - { name: long, batch_size: 2, num_heads: 32, \
                seq_len: 8192, head_dim: 64, causal: false, dtype: bf16 }\nbudget: 20m\nproposers: [elites, random]\n\
                gain: 3\ncases: 2\nseed: 7\ngeneration: 24\ngenerations: 3\nkernel: sm80_fwd\noutput_dir: out\n";
    let bomb = yaml_bomb();
    assert!(config::Config::parse(text).is_ok());
    fuzz_text("evo.yaml", &[text, &bomb], |text| {
        if let Ok(config) = config::Config::parse(text) {
            let targets: Vec<config::Target> =
                config.shapes.iter().filter_map(|wanted| wanted.target().ok()).collect();
            drop(config::cases(&targets, None));
        }
    });
}

#[test]
fn shapes_on_the_command_line() {
    let seeds =
        ["1x8x512x64", "2x32/8x1/4096x128", "mission", "4x16x512x64:causal:bf16", "1×1x1000000000X64"];
    fuzz_text("shapes", &seeds, |text| {
        let (Ok(target), Ok(_)) =
            (config::target(text), shapes::parse(text.split(':').next().unwrap_or_default()))
        else {
            return;
        };
        for dtype in DType::WIDE {
            let problem = target.cell.shape.problem(target.cell.mask, dtype).with_lse();
            let _ =
                (problem.flops(), problem.min_bytes(), memory::to_judge(&problem), memory::to_call(&problem));
            let _ = Engine::new().schedule(problem.head_dim, problem.head_dim_v);
            for target in Target::ALL {
                if let Ok(plan) = Plan::choose(&problem, &Hardware::typical(target)) {
                    let _ = plan.to_string();
                }
            }
        }
    });
}

#[test]
fn times_masks_and_schedules_on_the_command_line() {
    let mut seeds = vec!["window(128,inf)".to_string(), "causal-top-left".into()];
    let cpu = Engine::new().schedule(64, 64).to_string();
    assert!(cpu.parse::<flashcore::cpu::Schedule>().is_ok());
    seeds.push(cpu);
    for target in Target::ALL {
        let problem = Problem::new(1, 8, 512, 64, DType::F16);
        seeds.push(Plan::choose(&problem, &Hardware::typical(target)).unwrap().main().schedule.to_string());
    }
    let seeds: Vec<&str> = seeds.iter().map(String::as_str).collect();
    fuzz_text("schedules", &seeds, |text| {
        let (mask, window) = (text.parse::<Mask>(), cases::parse_window(text));
        for mask in [mask.ok(), window.ok()].into_iter().flatten() {
            let problem = Problem::new(2, 4, 33, 64, DType::F16).with_kv(2, 70).with_mask(mask);
            let _ = (problem.flops(), (0..33).map(|query| mask.keys(query, 33, 70).len()).sum::<usize>());
        }
        if let Ok(schedule) = text.parse() {
            for target in Target::ALL {
                let problem = Problem::new(2, 4, 33, 64, DType::F16).with_mask(Mask::Causal);
                let _ = Plan::with_schedule(&problem, &Hardware::typical(target), schedule);
            }
        }
        let _ = text.parse::<flashcore::cpu::Schedule>();
        let _ = space::Space::of(vec![text.to_string()]);
    });
}

/// Evidence of every kind, small: a benchmark keeps its first cells.
fn evidence() -> Vec<String> {
    let mut all = Vec::new();
    for text in files("record", "json") {
        let mut document: serde_json::Value = serde_json::from_str(&text).unwrap();
        for list in ["cells", "problems", "comparisons"] {
            if let Some(list) = document[list].as_array_mut() {
                list.truncate(2);
            }
        }
        all.push(if text.len() > 30_000 { document.to_string() } else { text });
    }
    all.sort_by_key(String::len);
    assert!(all.len() > 5);
    all
}

#[test]
fn evidence_and_what_is_made_of_it() {
    let seeds = evidence();
    let base = Saved::of(&serde_json::from_str(&file("record/2026-11-16-xeon-cpu.json")).unwrap()).unwrap();
    let seeds: Vec<&str> = seeds.iter().map(String::as_str).collect();
    let first: serde_json::Value = serde_json::from_str(seeds[0]).unwrap();
    fuzz_text("evidence", &seeds, move |text| {
        let _ = audit::audit(text);
        let Ok(document) = serde_json::from_str::<serde_json::Value>(text) else { return };
        let _ = audit::differences(&first, &document);
        let _ = views::views("a file", text, &document);
        if let Ok(run) = Saved::of(&document) {
            let _ = (compare::compare(&base, &run, 0.03, 0.02), compare::compare(&run, &run, 0.03, 0.02));
        }
        if let Ok(evidence) = Evidence::read("a", "b", text, audit::contradictions) {
            let all = [evidence];
            let _ = (report::pages(&all), report::charts(&all));
        }
    });
}

fn history() -> Vec<Event> {
    let candidate = || "a=1".to_string();
    let interval = Interval { low: 1.0, high: 1.2, level: 0.99 };
    let standing = |case| Standing { case, us: 1.0, incumbent_us: 1.1, speed_up: 1.1, interval, rounds: 10 };
    let standings = || vec![standing(0), standing(1)];
    let task = Task {
        device: "a device".into(),
        target: "cpu".into(),
        cases: vec!["x".into(), "y".into()],
        incumbents: vec!["a=0".into(), "a=0".into()],
        rule: Rule::default(),
    };
    vec![
        Event::Start { task, version: "1".into() },
        Event::Generation { number: 1 },
        Event::Named { candidate: candidate(), by: "random".into() },
        Event::Passed { candidate: candidate(), identity: "f00".into() },
        Event::Begun { candidate: candidate() },
        Event::Timed { candidate: candidate(), rung: 0, standings: standings() },
        Event::Challenged { candidate: candidate(), data: 7, standings: standings(), accepted: true },
        Event::Accepted { candidate: candidate(), standings: standings() },
        Event::Quarantined { candidate: candidate(), gate: Gate::Parity, why: "it hung".into() },
        Event::End { why: "the time is spent".into() },
    ]
}

/// Also events that a checksum would let pass: what a line says may be anything.
#[test]
fn journals() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal.jsonl");
    let mut journal = Journal::create(&path).unwrap();
    for event in history() {
        journal.write(&event).unwrap();
    }
    drop(journal);
    let events =
        history().iter().map(|event| serde_json::to_string(event).unwrap() + "\n").collect::<String>();
    let seeds = vec![events.into_bytes(), std::fs::read(&path).unwrap()];
    let copy = folder.path().join("copy.jsonl");
    fuzz("journal", seeds, move |bytes| {
        let (_, damage) = {
            std::fs::write(&copy, bytes).unwrap();
            journal::read(&copy).unwrap()
        };
        let mut resumed = Journal::resume(&copy).unwrap();
        assert_eq!(*resumed.damage(), damage);
        resumed.write(&history()[9]).unwrap();
        drop(resumed);
        // Whatever stood there, what is written now is read again.
        let (_, after) = journal::read(&copy).unwrap();
        assert_eq!((after.unreadable.len(), after.missing), (damage.unreadable.len(), damage.missing));
        let mut state = journal::State::default();
        for event in String::from_utf8_lossy(bytes).lines().filter_map(|line| serde_json::from_str(line).ok())
        {
            state.apply(&event);
        }
        let _ = (state.elites(), state.unfinished(), state.refused());
        let _ = flashcore_lab::search::report::leaders(&state);
    });
}

#[test]
fn tuned_tables() {
    let schedule = "sm80_fwd:block_m=64,block_n=32,warps=4,stages=3,q_in_regs=0,order=longest";
    let hopper =
        Plan::choose(&Problem::new(4, 16, 4096, 128, DType::BF16), &Hardware::typical(Target::Sm90a))
            .unwrap();
    let text = format!(
        "# a comment\nNVIDIA A100 | sm_80 | 1x8/8x512/512x64/64 f16 full | {schedule} | 1.05\n\
         NVIDIA H200 | sm_90a | 4x16/16x4096/4096x128/128 bf16 causal | {} | 1.0700\n",
        hopper.main().schedule
    );
    assert_eq!(Table::parse(&text, Origin::User).unwrap().entries().len(), 2);
    let shipped = file("crates/flashcore/tuned/h200.txt");
    fuzz_text("tuned.txt", &[&text, &shipped], |text| {
        let Ok(table) = Table::parse(text, Origin::User) else { return };
        for target in Target::ALL {
            let name = if target == Target::Sm80 { "A100" } else { "H200" };
            let hardware = Hardware { name: name.into(), ..Hardware::typical(target) };
            let own = table.entries().iter().map(|(entry, _)| entry.problem);
            for problem in own.chain([Problem::new(1, 8, 512, 64, DType::F16)]) {
                let _ = Plan::choose_by(&problem, &hardware, &table).map(|plan| plan.to_string());
            }
        }
    });
}

#[test]
fn cached_machine_code() {
    let folder = tempfile::tempdir().unwrap();
    let cache = CubinCache::in_folder(folder.path(), 1 << 20);
    cache.put("k", b"machine code").unwrap();
    let path = folder.path().join("k.cubin");
    let seed = std::fs::read(&path).unwrap();
    fuzz("cached cubins", vec![seed.clone()], move |bytes| {
        std::fs::write(&path, bytes).unwrap();
        let expected = (bytes == seed).then(|| b"machine code".to_vec());
        let given = cache.get("k");
        // A file that begins with the hash of nothing is a whole file of no code.
        assert!(given == expected || given == Some(Vec::new()), "{given:?}");
        let _ = folder.path();
    });
}

#[test]
fn requests_to_workers() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["q", "k", "v"].map(|name| folder.path().join(name));
    for path in &paths {
        std::fs::write(path, [0x3c_u8; 64]).unwrap();
    }
    let problem = Asked::of(&Problem::new(1, 2, 5, 8, DType::F16).with_mask(Mask::Causal));
    let who = PLANNER.to_string();
    let out = folder.path().join("out");
    let requests = [
        Request::Hello,
        Request::Pool { dtype: "f16".into(), paths },
        Request::Load { problem, sets: 1 },
        Request::Output { who: who.clone(), rows: vec![0, 3, 9], path: out },
        Request::Sample {
            who: format!("{SCHEDULE}{}", Engine::new().schedule(8, 8)),
            warm: 1,
            calls: 2,
            replays: 1,
        },
        Request::Check { who: who.clone() },
        Request::Sample { who, warm: 1, calls: 2, replays: 1 },
    ];
    let lines: Vec<String> = requests.iter().map(|request| serde_json::to_string(request).unwrap()).collect();
    let all = lines.join("\n");
    let mut server = Server::default();
    assert!(lines.iter().all(|line| server.answer_line(line).get("error").is_none()));
    fuzz_text("requests", &[&all], move |text| {
        let mut server = Server::default();
        for line in text.lines() {
            // What is asked for may be long or large, many threads start as asked, and files may be written anywhere.
            let threads = |line: &str| {
                let number =
                    line.split("threads=").nth(1).map(|rest| rest.split(|c: char| !c.is_ascii_digit()));
                number.and_then(|mut parts| parts.next()?.parse().ok()).unwrap_or(1)
            };
            if (5..=4096).contains(&threads(line)) {
                continue;
            }
            let harmless = match serde_json::from_str(line) {
                Ok(Request::Load { problem, .. }) => problem
                    .problem()
                    .map_or(true, |it| memory::to_call(&it) < 1 << 20 || memory::to_call(&it) > 1 << 45),
                Ok(Request::Sample { warm, calls, .. }) => {
                    warm.saturating_add(calls) < 100 || warm.max(calls) > cpu_worker::MOST_CALLS
                }
                Ok(Request::Output { path, .. }) => path.starts_with(folder.path()),
                Ok(Request::Pool { paths, .. }) => paths.iter().all(|path| path.starts_with(folder.path())),
                _ => true,
            };
            if harmless {
                let _ = server.answer_line(line);
            }
        }
    });
}

/// Runs the command, with no more than 8 GB of addresses, and checks how it ended.
fn ends_well(arguments: &[&str], input: &[u8]) {
    let mut child = Command::new("sh")
        .args(["-c", "ulimit -v 8000000; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_flashcore")])
        .args(arguments)
        .env("FLASHCORE_PYTHON", "no-such-python")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > HANG / 2 {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let ended =
        output.status.code().is_some_and(|code| code <= 2) && !said.contains("fault of flashcore itself");
    assert!(
        ended,
        "{arguments:?} ended with {} and said {said}; it read {} bytes",
        output.status,
        input.len()
    );
}

#[cfg(unix)]
#[test]
fn tensors_of_files() {
    let folder = tempfile::tempdir().unwrap();
    let (bytes, lengths) = (vec![0x3c_u8; 2 * 2 * 3 * 8], [3_i32, 2].map(i32::to_le_bytes).concat());
    let view = |dtype, shape: &[usize], bytes| TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
    let tensors = [
        ("q", view(Dtype::F16, &[2, 1, 3, 8], &bytes)),
        ("k", view(Dtype::F16, &[2, 1, 3, 8], &bytes)),
        ("v", view(Dtype::F16, &[2, 1, 3, 8], &bytes)),
        ("key_lengths", view(Dtype::I32, &[2], &lengths)),
    ];
    let whole = safetensors::serialize(tensors, None).unwrap();
    // Shapes of no elements, whose other sizes may be anything.
    let empty = |shape: &str| {
        let entry =
            |name: &str| format!("\"{name}\":{{\"dtype\":\"F16\",\"shape\":{shape},\"data_offsets\":[0,0]}}");
        let header = format!("{{{},{},{}}}", entry("q"), entry("k"), entry("v"));
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
    };
    let large = usize::MAX;
    let seeds = vec![
        whole,
        empty(&format!("[0,{large},1,8]")),
        empty(&format!("[{large},{large},0,8]")),
        empty("[4294967296,1,0,1]"),
        empty(&format!("[1,1,0,{large}]")),
    ];
    let (input, out) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    let run = move |bytes: &[u8]| {
        std::fs::write(&input, bytes).unwrap();
        ends_well(&["run", input.to_str().unwrap(), "-o", out.to_str().unwrap(), "--lse"], bytes);
        let _ = folder.path();
    };
    // A process for each: the seeds, and some mutants for as long as there is time.
    let mut rng = Rng::new(7);
    for seed in &seeds {
        run(seed);
    }
    let ends = Instant::now() + seconds();
    while Instant::now() < ends {
        run(&mutant(&mut rng, &seeds));
    }
}

#[cfg(unix)]
#[test]
fn sizes_that_no_machine_has() {
    let shapes = [
        "1x1x1000000000x64",
        "1x1x2147483647x1024",
        "1000000000x1x1x64",
        "1x1000000000x1x64",
        "1x1000000000/1x512x64",
        "1x1/1x1/2147483647x1024",
        "4294967296x1x1x1",
        "1x4294967297x1x1",
        "65536x65536x1x1",
        "1x9007199254740993/1x1x1",
        "9223372036854775807x1x1x1",
        "18446744073709551615x18446744073709551615x1x1",
    ];
    for shape in shapes {
        for command in [
            &["bench", "--no-peers", "--device", "cpu", "--samples", "5"][..],
            &["against-itself", "--device", "cpu", "--dtype", "f32", "--times", "2"],
            &["plan"],
            &["plan", "--target", "sm_90a", "--explain"],
            &["plan", "--target", "sm_80"],
        ] {
            ends_well(&[command, &[shape]].concat(), b"");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    for shape in &shapes[..6] {
        ends_well(&["inspect", shape, "--target", "sm_90a"], b"");
        ends_well(&["inspect", shape, "--kernel", "scalar"], b"");
        let out = folder.path().join(shape.replace('/', "-"));
        ends_well(
            &["evolve", shape, "--device", "cpu", "--budget", "1s", "--out", out.to_str().unwrap()],
            b"",
        );
    }
}
