//! Candidates of a search that misbehave, put through the search itself; and one that is better.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;

use flashcore::plan::{Hardware, Target};
use flashcore::{DType, Problem};

use super::{Trial, Verdict};
use crate::gpu::host::{Host, Kind};
use crate::rng::Rng;
use crate::search::decide::Rule;
use crate::search::device::{Device, Trouble, Workers};
use crate::search::gates::Gates;
use crate::search::journal::{Fate, Journal, State, Task};
use crate::search::kernels::{Assembler, KernelGates};
use crate::search::propose::{Exhaustive, Proposer};
use crate::search::run::{Search, Settings};
use crate::search::space::Space;
use crate::timing::Effort;

const JUDGE: &str = "evolve";

/// The schedule to beat.
pub const INCUMBENT: &str = "kind=incumbent";

/// Target cases.
pub const CASES: usize = 3;

/// What each planted candidate is.
pub const PLANTED: [&str; 13] = [
    "kind=does-not-fit",
    "kind=spills",
    "kind=twin-of-slow",
    "kind=baseline-itself",
    "kind=races",
    "kind=fast-and-wrong",
    "kind=hangs",
    "kind=crashes-on-the-clock",
    "kind=slow",
    "kind=lucky",
    "kind=noisy",
    "kind=fast-in-one-case",
    "kind=fast",
];

/// Gates that give planted answers.
pub struct PlantedGates {
    /// Whether candidates pass them while others are on the clock.
    pub overlap: bool,
}

impl Gates for PlantedGates {
    fn check(&self, candidate: &str, _: usize) -> Result<(), String> {
        if candidate == "kind=does-not-fit" { Err("too much shared memory".into()) } else { Ok(()) }
    }

    fn assemble(&self, candidate: &str, _: usize) -> Result<String, String> {
        match candidate {
            "kind=spills" => Err("spills 8 bytes".into()),
            "kind=twin-of-slow" => Ok("kind=slow".into()),
            "kind=baseline-itself" => Ok(INCUMBENT.into()),
            _ => Ok(candidate.into()),
        }
    }

    fn simulate(&self, candidate: &str, _: usize) -> Result<(), String> {
        if candidate == "kind=races" { Err("a race".into()) } else { Ok(()) }
    }

    fn can_overlap(&self) -> bool {
        self.overlap
    }
}

/// A device that gives planted answers, and counts how often it is asked for each candidate.
pub struct PlantedDevice<'a> {
    /// Its noise.
    pub rng: Rng,
    /// How often it was asked for each candidate.
    pub asked: &'a RefCell<BTreeMap<String, usize>>,
    /// How often in all.
    pub calls: &'a Cell<usize>,
}

impl PlantedDevice<'_> {
    fn count(&mut self, candidate: &str) {
        *self.asked.borrow_mut().entry(candidate.into()).or_default() += 1;
        self.calls.set(self.calls.get() + 1);
    }

    /// One time of a candidate whose true time is 100 µs or less.
    fn time(&mut self, candidate: &str, case: usize, data: u64) -> f64 {
        let (median, spread) = match (candidate, case, data) {
            ("kind=fast", ..) | ("kind=fast-in-one-case", 0, _) => (100.0 / 1.06, 0.01),
            ("kind=fast-and-wrong" | "kind=races" | "kind=spills", ..) => (50.0, 0.01),
            // On the data of the search it looks 10 % faster, for whatever reason; on others it is not.
            ("kind=lucky", _, 0) => (90.0, 0.01),
            ("kind=noisy", ..) => (100.0, 0.5),
            ("kind=slow", ..) => (120.0, 0.01),
            _ => (100.0, 0.01),
        };
        median * (spread * self.rng.normal()).exp()
    }
}

impl Device for PlantedDevice<'_> {
    fn parity(&mut self, candidate: &str, _: usize, _: u64) -> Result<(), Trouble> {
        self.count(candidate);
        match candidate {
            "kind=fast-and-wrong" => Err(Trouble::Wrong("row 3 is off".into())),
            "kind=hangs" => Err(Trouble::Lost("did not answer within 20 s".into())),
            _ => Ok(()),
        }
    }

    fn race(
        &mut self,
        contenders: &[&str],
        case: usize,
        data: u64,
        effort: &Effort,
        _: &dyn Fn() -> bool,
    ) -> Vec<Result<Vec<f64>, Trouble>> {
        let rounds = effort.rounds.unwrap_or(40);
        let one = |who: &&str| {
            self.count(who);
            if *who == "kind=crashes-on-the-clock" {
                return Err(Trouble::Lost("has ended (signal 11)".into()));
            }
            Ok((0..rounds).map(|_| self.time(who, case, data)).collect())
        };
        contenders.iter().map(one).collect()
    }
}

/// What the planted search is for.
pub fn task() -> Task {
    Task {
        device: "planted".into(),
        target: "cpu".into(),
        cases: (0..CASES).map(|case| format!("case {case}")).collect(),
        incumbents: vec![INCUMBENT.into(); CASES],
        rule: Rule::default(),
    }
}

/// Searches through everything that is planted; after `most` calls of the device it is stopped as by a kill. Returns
/// the fate of each candidate, and how often the device was asked for it.
pub fn search(
    journal: Journal,
    overlap: bool,
    seed: u64,
    most: usize,
) -> Result<(State, BTreeMap<String, usize>), String> {
    let (asked, calls) = (RefCell::default(), Cell::new(0));
    let space = Space::of(PLANTED.map(String::from).to_vec());
    let mut device = PlantedDevice { rng: Rng::new(seed), asked: &asked, calls: &calls };
    let proposers: Vec<Box<dyn Proposer>> = vec![Box::new(Exhaustive::default())];
    let mut search = Search {
        task: task(),
        space: &space,
        gates: &PlantedGates { overlap },
        device: &mut device,
        proposers,
        journal,
        settings: Settings { generation: 20, budget: Duration::from_mins(5), ..Settings::default() },
        stop: &|| calls.get() >= most,
        view: &mut |_| {},
        note: &mut |_| {},
    };
    search.run()?;
    let state = search.journal.state().clone();
    Ok((state, asked.take()))
}

/// What the search makes of one planted candidate.
fn fate(kind: &str) -> Verdict {
    let state = match search(Journal::in_memory(), false, 1, usize::MAX) {
        Ok((state, _)) => state,
        Err(why) => return Verdict::NotRun(why),
    };
    match state.records.get(&format!("kind={kind}")).map(|record| &record.fate) {
        Some(Fate::Accepted) => Verdict::Accepted("it wins, and wins again on fresh data".into()),
        Some(Fate::Refused { gate, why }) => Verdict::Refused(format!("at the {gate} gate: {why}")),
        Some(Fate::Duplicate { of }) => Verdict::Refused(format!("its machine code is that of {of}")),
        Some(Fate::Quarantined { why, .. }) => Verdict::Refused(format!("quarantined: {why}")),
        Some(Fate::Slower) => Verdict::Refused("it is not faster by the rule".into()),
        Some(Fate::Unconfirmed) => Verdict::Refused("it wins once, and not on fresh data".into()),
        Some(Fate::Open) | None => Verdict::NotRun("the search left it open".into()),
    }
}

fn fate_of_twin() -> Verdict {
    match fate("twin-of-slow") {
        Verdict::Refused(why) if why.contains("machine code") => Verdict::Refused(why),
        Verdict::Refused(why) | Verdict::Accepted(why) | Verdict::NotRun(why) => {
            Verdict::Accepted(format!("both were timed: {why}"))
        }
    }
}

fn planted(name: &'static str, kind: &'static str) -> Trial {
    Trial::fault(name, JUDGE, move || fate(kind))
}

/// The watchdog of a planted worker.
const PATIENCE: Duration = Duration::from_millis(500);

/// What becomes of a candidate whose worker process does what a script says.
fn in_worker(script: &str) -> Verdict {
    let words: Vec<OsString> = ["sh", "-c", script].map(Into::into).to_vec();
    let host = Host::new(Kind::Command("planted worker", words), 0).with_watchdog(PATIENCE);
    let mut workers = Workers::new(host, vec![Problem::new(1, 1, 32, 32, DType::F16)], vec![1], 5);
    match workers.parity("planted", 0, 0) {
        Ok(()) => Verdict::Accepted("parity".into()),
        Err(Trouble::Lost(why)) => Verdict::Refused(why),
        Err(trouble) => Verdict::NotRun(trouble.why().into()),
    }
}

/// What the static gate of the kernels' own search says of a schedule at head dim 128.
fn static_gate(schedule: &str) -> Verdict {
    let problems = vec![Problem::new(1, 8, 512, 128, DType::F16)];
    let gates = KernelGates::new(Hardware::typical(Target::Sm80), problems, Assembler::Absent);
    match gates.check(schedule, 0) {
        Ok(()) => Verdict::Accepted("it fits".into()),
        Err(why) if why.contains("shared") => Verdict::Refused(why),
        Err(why) => Verdict::NotRun(format!("it is refused for another reason: {why}")),
    }
}

/// Whether two schedules that differ in name only are seen to be one binary.
fn same_binary() -> Verdict {
    let problems = vec![Problem::new(1, 8, 512, 64, DType::F16)];
    let gates = KernelGates::new(Hardware::typical(Target::Sm90a), problems, Assembler::Absent);
    // Without a mask there are no long and short tiles to pair, so the knob changes nothing.
    let code = |pairs: u32| {
        let knobs = "warpgroups=2,block_n=128,stages=2,q_stages=1,ctas=1,split=1,pingpong=1,lazy=1,poly=0,persistent=1";
        gates.assemble(&format!("sm90_fwd:{knobs},pairs={pairs}"), 0)
    };
    match (code(0), code(1)) {
        (Ok(a), Ok(b)) if a == b => Verdict::Refused("one identity: both share one result".into()),
        (Ok(_), Ok(_)) => Verdict::Accepted("as two candidates".into()),
        (Err(why), _) | (_, Err(why)) => Verdict::NotRun(why),
    }
}

/// Every trial of candidates.
pub fn trials() -> Vec<Trial> {
    vec![
        planted("a candidate that is the baseline itself", "baseline-itself"),
        // Whichever of the two is met first, the other shares its result.
        Trial::fault("two candidates with one binary", JUDGE, || match fate("slow") {
            Verdict::Refused(why) if why.contains("machine code") => Verdict::Refused(why),
            _ => fate_of_twin(),
        }),
        Trial::fault("two schedules of a kernel with one binary", JUDGE, same_binary),
        planted("a candidate that spills", "spills"),
        planted("a candidate that is fast and wrong", "fast-and-wrong"),
        planted("a candidate that is lucky once", "lucky"),
        planted("a candidate that is noisy", "noisy"),
        planted("a candidate that hangs, in the search", "hangs"),
        planted("a candidate that crashes on the clock", "crashes-on-the-clock"),
        Trial::fault("a worker that hangs", JUDGE, || in_worker("exec sleep 100")),
        Trial::fault("a worker that crashes", JUDGE, || in_worker("kill -9 $$")),
        Trial::fault("shared memory over the opt-in limit", JUDGE, || {
            static_gate("sm80_fwd:block_m=128,block_n=128,warps=8,stages=3,q_in_regs=0,order=head")
        }),
        Trial::honest("a schedule that fits its shared memory", JUDGE, || {
            static_gate("sm80_fwd:block_m=64,block_n=32,warps=4,stages=2,q_in_regs=0,order=head")
        }),
        Trial::honest("a candidate that is 6 % faster", JUDGE, || fate("fast")),
    ]
}
