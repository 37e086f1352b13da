//! `flashcore bench`: how fast, how sure, how right, and against whom.

pub mod ceilings;
pub mod grid;
pub mod itself;
mod show;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use flashcore::plan::{Kernel, Schedule};
use flashcore::{DType, Mask, Pass, cpu};
use serde::Serialize;
use serde_json::Value;

use super::screen::{Progress, Tone, say, toned};
use super::{EightBits, Exit, Json, percent};
use crate::bench::cells::{Cell, Matrix, Member};
use crate::bench::cpu::{self as on_cpu, CpuBench};
use crate::bench::gpu::{self as on_gpu, Cache, FA3, GpuBench, Ours, PEERS, Regime};
use crate::bench::outcome::{CausalShare, Outcome, Summary, causal_shares, is_ours, summaries};
use crate::bench::{Bench, Clock, Machine};
use crate::cases::Passes;
use crate::ceilings::Ceilings;
use crate::device::DeviceName;
use crate::evidence::{Document, Environment, kept, saved::Saved};
use crate::gpu::cublas::CUBLAS;
use crate::stats::MARGIN;
use crate::{interrupt, memory, shapes};

#[derive(Args)]
#[command(mut_arg("shapes", |shapes| shapes.required_unless_present("matrix")), after_help = "\
Shapes are names (mission, long, decode …; an unknown one lists them) or BxHxSxD, such as 1x8x512x64, with a slash where \
queries and keys differ, such as 1x32/8x1/4096x128.

Contenders take turns in rounds, in an order that is shuffled for every round, on the same inputs, and every time stands \
beside the error of what was timed. Times are microseconds; rates count causal as half.

On the CPU the clock is the call clock. On a GPU it is the kernel clock, with the call clock beside it for a shape that \
is timed alone, and everything runs in worker processes: one that crashes or hangs costs its own row and no other. \
torch is looked for in $FLASHCORE_PYTHON, then python3.

flashcore compare compares a report with an earlier one; flashcore grid times the shapes of a file.")]
pub struct Options {
    #[command(flatten)]
    cells: Cells,
    #[command(flatten)]
    eight: EightBits,
    /// A set of cells
    #[arg(long, value_enum, conflicts_with_all = ["shapes", "causal", "no_causal", "dtype", "EightBits"])]
    matrix: Option<Matrix>,
    /// Of a matrix, only cells whose name or group contains this, such as head_dim 128 or page=16
    #[arg(long, value_name = "TEXT", requires = "matrix")]
    only: Option<String>,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    pace: Pace,
    /// Exactly N rounds per cell
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    samples: Option<u32>,
    #[command(flatten)]
    against: Against,
    /// GPU: every kernel of ours, from the simplest up, with the gain of each rung
    #[arg(long, conflicts_with_all = ["kernel", "schedule"])]
    ladder: bool,
    /// GPU: a kernel with its default schedule instead of the planner's choice; may be given more than once
    #[arg(long, value_name = "NAME", conflicts_with = "schedule")]
    kernel: Vec<Kernel>,
    /// GPU: a schedule as inspect prints it; may be given more than once
    #[arg(long, value_name = "TEXT")]
    schedule: Vec<Schedule>,
    /// GPU: samples of 250 ms without a pause, so that the power limit has set the clock, and energy beside time
    #[arg(long, conflicts_with = "calls")]
    sustained: bool,
    /// GPU: read the call clock in a matrix too
    #[arg(long)]
    calls: bool,
    /// Keep this run under a name, for this machine, as what flashcore compare holds later ones against
    #[arg(long, value_name = "NAME", value_parser = kept::baseline_name)]
    save_baseline: Option<String>,
    #[command(flatten)]
    json: Json,
}

/// Which cells, by their shapes.
#[derive(Args)]
pub(super) struct Cells {
    /// What to time, by name or as BxHxSxD
    #[arg(value_name = "SHAPE", value_parser = shapes::parse)]
    shapes: Vec<shapes::Named>,
    /// With a causal mask
    #[arg(long, conflicts_with = "no_causal")]
    causal: bool,
    /// Without a mask, for named shapes that are causal
    #[arg(long)]
    no_causal: bool,
    /// f16, bf16, f32, f8 or all (but f8); the named shape's own by default
    #[arg(long, value_name = "DTYPE", value_parser = dtypes)]
    dtype: Option<Dtypes>,
    /// forward, backward (gradients), or both in one call, as a training step takes them; forward by default, but
    /// backward with --matrix training
    #[arg(long)]
    pass: Option<Passes>,
}

impl Cells {
    fn pass(&self) -> Passes {
        self.pass.unwrap_or(Pass::Forward.into())
    }

    fn members(&self, eight: EightBits) -> Result<Vec<Member>, String> {
        let mut members = Vec::new();
        for named in &self.shapes {
            let causal = (named.causal || self.causal) && !self.no_causal;
            let mask = if causal { Mask::Causal } else { Mask::None };
            let dtypes = self.dtype.as_ref().map_or(vec![named.dtype], |dtypes| dtypes.0.clone());
            for dtype in dtypes {
                let types = eight.types(dtype);
                let (name, shape, pass) = (named.name, named.shape, self.pass());
                let cell = Cell { name, shape, mask, types, pass, sequences: None };
                cell.problem().check().map_err(|error| error.to_string())?;
                members.push(Member::of_all(cell));
            }
        }
        Ok(members)
    }
}

/// The device on which cells are timed.
#[derive(Args)]
pub(super) struct Place {
    /// auto (the GPU where there is one), cpu, one path of the CPU engine such as cpu-portable, or cuda, with -N for
    /// GPU number N
    #[arg(long, default_value = "auto")]
    device: DeviceName,
    /// CPU: threads for every contender; all cores by default
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    threads: Option<u32>,
    /// GPU: what calls find in the L2 cache
    #[arg(long, value_enum, default_value_t = Cache::Cold)]
    cache: Cache,
}

/// How long, and how finely.
#[derive(Args)]
pub(super) struct Pace {
    /// Time for all cells together, such as 90s or 4m; cells take less where every comparison is decided
    #[arg(long, value_name = "TIME", value_parser = duration, allow_negative_numbers = true)]
    budget: Option<Duration>,
    /// The smallest difference that matters, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = MARGIN * 100.0, allow_negative_numbers = true)]
    margin: f64,
}

impl Pace {
    fn margin(&self) -> Result<f64, String> {
        percent(&self.margin.to_string())
            .map_err(|_| format!("--margin {} is not a percentage from 0 to 100", self.margin))
    }
}

/// The peers that ours is timed against.
#[derive(Args)]
pub(super) struct Against {
    /// Do not look for torch
    #[arg(long)]
    no_peers: bool,
    /// GPU: torch's backends flash, cudnn, efficient, math (the first two by default in a matrix, and fa3); fa3
    /// (FlashAttention-3), flash_attn, xformers and flex where they are installed; and cublas, which is unfused
    #[arg(long, value_name = "NAMES", value_parser = peers, conflicts_with = "no_peers")]
    peers: Option<Peers>,
}

impl Against {
    /// The peers that were named; absent for the default choice.
    fn named(&self) -> Option<Vec<String>> {
        if self.no_peers { Some(Vec::new()) } else { self.peers.as_ref().map(|peers| peers.0.clone()) }
    }
}

/// Dtypes in a row, which clap would otherwise take for many values.
#[derive(Clone, Debug)]
pub(super) struct Dtypes(pub(super) Vec<DType>);

pub(super) fn dtypes(text: &str) -> Result<Dtypes, String> {
    if text == "all" {
        return Ok(Dtypes(DType::WIDE.to_vec()));
    }
    let one = |part: &str| part.trim().parse().map_err(|why: flashcore::Error| format!("{why}, and all"));
    text.split(',').map(one).collect::<Result<_, _>>().map(Dtypes)
}

/// Peers in a row, which clap would otherwise take for many values.
#[derive(Clone, Debug)]
struct Peers(Vec<String>);

fn peers(text: &str) -> Result<Peers, String> {
    let known = on_gpu::peers();
    let one = |name: &str| {
        let found = known.iter().find(|peer| **peer == name.trim()).map(ToString::to_string);
        found.ok_or_else(|| format!("'{name}' is no peer; possible are {}", known.join(", ")))
    };
    text.split(',').map(one).collect::<Result<_, _>>().map(Peers)
}

/// A time as 90, 90s, 2.5m or 1h.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.char_indices().last() {
        Some((end, 's')) => (&text[..end], 1.0),
        Some((end, 'm')) => (&text[..end], 60.0),
        Some((end, 'h')) => (&text[..end], 3600.0),
        _ => (text, 1.0),
    };
    let seconds = number.parse::<f64>().ok().map(|number| number * unit);
    let seconds = seconds.filter(|&seconds| seconds > 0.0 && seconds <= 86_400.0);
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "give a time above 0, such as 2.5, 90s or 4m".into())
}

/// What is timed, where, and against whom.
struct Task<'a> {
    members: Vec<Member>,
    place: &'a Place,
    margin: f64,
    /// Time for everything.
    budget: Option<Duration>,
    /// Rounds, if an exact number is wanted.
    rounds: Option<usize>,
    warmups: u32,
    /// Which of our kernels, on a GPU.
    ours: Ours,
    /// The peers that were named; absent for the default choice.
    peers: Option<Vec<String>>,
    /// Whether the cells are shown one by one, rather than as rows of a table.
    alone: bool,
    /// Whether a GPU's cells in a table are also timed by the call clock.
    calls: bool,
    /// How long a GPU's samples are.
    regime: Regime,
    /// What only a CPU, or only a GPU, can do.
    only: Option<Only>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Only {
    Cpu,
    Gpu,
    /// A GPU, but the CPU engine does it too where it is named.
    GpuUnlessNamed,
}

/// The path of the CPU, or the number of the GPU, that a task runs on.
#[derive(Clone, Copy)]
enum On {
    Cpu(cpu::Isa),
    Gpu(u32),
}

impl<'a> Task<'a> {
    /// Ours alone, as the planner chooses.
    fn new(members: Vec<Member>, place: &'a Place, margin: f64) -> Self {
        Self {
            members,
            place,
            margin,
            budget: None,
            rounds: None,
            warmups: 0,
            ours: Ours::Planner,
            peers: Some(Vec::new()),
            alone: true,
            calls: false,
            regime: Regime::Bursts,
            only: None,
        }
    }

    fn device(&self) -> Result<On, String> {
        let engine = cpu::Engine::new();
        match (self.place.device, self.only) {
            (DeviceName::Auto, Some(Only::Gpu | Only::GpuUnlessNamed)) => {
                let none = || {
                    let named = self.only == Some(Only::GpuUnlessNamed);
                    let instead = if named { "; --device cpu times it on the CPU engine" } else { "" };
                    format!("this is timed on a GPU, and there is none here (flashcore doctor says why){instead}")
                };
                self.place.device.gpu().map(On::Gpu).ok_or_else(none)
            }
            (DeviceName::Auto, Some(Only::Cpu)) => Ok(On::Cpu(engine.isa())),
            (DeviceName::Auto, None) => Ok(self.place.device.gpu().map_or(On::Cpu(engine.isa()), On::Gpu)),
            (DeviceName::Cpu(_), Some(Only::Gpu)) => {
                Err("kernels, schedules, their matrices and --sustained are a GPU's: leave --device away, or give \
                     cuda"
                    .into())
            }
            (DeviceName::Cuda(..), Some(Only::Cpu)) => {
                Err("--matrix cpu is the CPU engine's: leave --device away, or give cpu".into())
            }
            (DeviceName::Cpu(None), _) => Ok(On::Cpu(engine.isa())),
            (DeviceName::Cpu(Some(isa)), _) => {
                Ok(On::Cpu(engine.with_isa(isa).map_err(|error| error.to_string())?.isa()))
            }
            (DeviceName::Cuda(ordinal, None), _) => Ok(On::Gpu(ordinal.unwrap_or(0))),
            (other, _) => Err(format!("the CPU engine and a GPU are timed, not {other}; give cpu or cuda")),
        }
    }

    /// Starts the contenders.
    fn start(&self, environment: &Environment, tell: &mut dyn FnMut(&str)) -> Result<Box<dyn Bench>, String> {
        let device = self.device()?;
        // Before any inputs are drawn: a machine that runs out of memory may kill any process.
        for Member { cell, .. } in &self.members {
            let needed = match device {
                On::Cpu(_) if cell.sequences.is_some() => 2 * memory::to_call(&cell.dense()),
                On::Cpu(_) => memory::to_judge(&cell.problem()),
                On::Gpu(_) => memory::of_rows(&cell.problem()),
            };
            memory::check(&cell.label(), needed)?;
        }
        let Task { margin, rounds, warmups, alone, .. } = *self;
        let ordinal = match device {
            On::Gpu(ordinal) => ordinal,
            On::Cpu(isa) => {
                let threads = self.place.threads.map_or(environment.cpu.cores, |threads| threads as usize);
                let peers = self.peers.as_ref().is_none_or(|peers| !peers.is_empty());
                let setup = on_cpu::Setup { isa, threads, peers, rounds, warmups, margin };
                return Ok(Box::new(CpuBench::start(setup, environment)?));
            }
        };
        // In a table, only the two peers that count; the others take more time than they are worth.
        let usual = if alone { &PEERS[..] } else { &PEERS[..2] };
        let installed: &[&str] = match (&self.peers, alone) {
            (Some(_), _) => &[],
            (None, true) => &[FA3, "flash_attn", "xformers", CUBLAS],
            (None, false) => &[FA3],
        };
        let bursts = self.regime == Regime::Bursts;
        let setup = on_gpu::Setup {
            ordinal,
            ours: self.ours.clone(),
            peers: self.peers.clone().unwrap_or_else(|| usual.iter().map(ToString::to_string).collect()),
            installed,
            cache: self.place.cache,
            regime: self.regime,
            call_clock: bursts && (alone || self.calls),
            first_call: bursts && alone,
            rounds,
            warmups,
            margin,
        };
        Ok(Box::new(GpuBench::start(setup, &self.members, tell)?))
    }

    /// Time for all cells, by default.
    fn usual_budget(&self, bench: &dyn Bench) -> Duration {
        let a_cell = match (bench.clock(), self.alone) {
            (Clock::Kernel, _) if self.regime == Regime::Sustained => {
                3 + 2 * (1 + bench.peers().len() as u64)
            }
            (Clock::Kernel, true) => 15,
            (Clock::Kernel, false) => 6,
            (Clock::Call, _) if bench.peers().is_empty() => 2,
            (Clock::Call, _) => 10,
        };
        Duration::from_secs(a_cell) * self.members.len() as u32
    }
}

#[derive(Serialize)]
struct Report<'a> {
    clock: Clock,
    #[serde(flatten)]
    machine: Machine<'a>,
    no_torch_because: Option<&'a str>,
    ceilings: Option<&'a Ceilings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    budget_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    /// Cells that were asked for.
    asked: usize,
    cells: &'a [Outcome],
    summaries: Vec<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    causal_shares: Option<Vec<CausalShare>>,
}

impl<'a> Report<'a> {
    fn new(
        bench: &'a dyn Bench,
        cells: &'a [Outcome],
        asked: usize,
        budget: Duration,
        started: Instant,
    ) -> Self {
        let by_kernel = bench.clock() == Clock::Kernel;
        Self {
            clock: bench.clock(),
            machine: bench.machine(),
            no_torch_because: bench.no_torch(),
            ceilings: bench.ceilings(),
            budget_seconds: by_kernel.then_some(budget.as_secs_f64()),
            seconds: by_kernel.then(|| started.elapsed().as_secs_f64()),
            asked,
            cells,
            summaries: summaries(cells),
            causal_shares: (!by_kernel).then(|| causal_shares(cells)),
        }
    }
}

/// A finished run: how it ended, and the report that is written.
struct Finished {
    exit: Exit,
    complete: bool,
    environment: Environment,
    outcomes: Vec<Outcome>,
    document: Value,
}

/// The message about a run that was interrupted.
const INTERRUPTED: &str = "interrupted: what was measured until then is kept, and the rest is absent";

/// Times the cells, shows them as they come, and writes the report.
fn time(task: &Task<'_>, json: &Json) -> Result<Finished, String> {
    json.check()?;
    let environment = Environment::read();
    let asked = task.members.len();
    let mut progress = Progress::new(asked as u64 * 100);
    // Starting the contenders takes its share of the budget.
    let started = Instant::now();
    let mut bench = task.start(&environment, &mut |what| progress.at(0, what))?;
    let budget = task.budget.unwrap_or_else(|| task.usual_budget(&*bench));
    let mut outcomes = Vec::new();
    let part = |bench: &dyn Bench, outcomes: &[Outcome]| {
        serde_json::to_value(Report::new(bench, outcomes, asked, budget, started)).unwrap_or_default()
    };
    // The report so far, in case the next cell never ends.
    let kept = Arc::new(Mutex::new(part(&*bench, &outcomes)));
    interrupt::finish_steps({
        let (kept, json, environment, schema) =
            (Arc::clone(&kept), json.clone(), environment.clone(), bench.clock().schema());
        move || {
            say(&toned(Tone::Bad, INTERRUPTED));
            let part = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(why) = json.write(schema, &environment, false, &*part) {
                interrupt::tell(&format!("error: {why}"));
            }
        }
    });
    let wide = task.members.iter().any(|member| show::is_long(&member.cell.label()));
    let forms = show::forms(&task.members);
    progress.say(&show::heading(&environment, &*bench, (!task.alone).then_some((wide, &forms[..]))));
    for (i, member) in task.members.iter().enumerate() {
        if interrupt::requested() {
            break;
        }
        let label = member.cell.label();
        let mut tell = |what: &str, share: f64| {
            progress.at(i as u64 * 100 + (share * 100.0) as u64, &format!("{label}: {what}"));
        };
        let left = budget.saturating_sub(started.elapsed());
        let outcome = match bench.clock() {
            Clock::Kernel if left.is_zero() => Outcome::not_run(member, "the budget is spent"),
            Clock::Kernel => {
                bench.run(member, left / (asked - i) as u32, &interrupt::requested, &mut tell)?
            }
            Clock::Call => bench.run(member, budget / asked as u32, &interrupt::requested, &mut tell)?,
        };
        progress.say(&if task.alone { show::describe(&outcome) } else { show::row(&outcome, wide) });
        outcomes.push(outcome);
        *kept.lock().unwrap_or_else(PoisonError::into_inner) = part(&*bench, &outcomes);
    }
    interrupt::finishing();
    progress.finish();
    let report = Report::new(&*bench, &outcomes, asked, budget, started);
    let closing = show::closing(&report, started.elapsed());
    if !closing.is_empty() {
        say(&closing);
    }
    if interrupt::requested() {
        say(&toned(Tone::Bad, INTERRUPTED));
    }
    let all_ran = outcomes.len() == asked && outcomes.iter().all(|outcome| outcome.failure().is_none());
    let complete = all_ran && !interrupt::requested();
    json.write(bench.clock().schema(), &environment, complete, &report)?;
    let document = Document::new(bench.clock().schema(), &environment, complete, &report);
    let document = serde_json::to_value(&document).map_err(|error| error.to_string())?;
    let exit = exit(&outcomes, complete);
    Ok(Finished { exit, complete, environment, outcomes, document })
}

/// Wrong results of ours fail, and so does a rate above a GPU's peak; a cell without a result, or an interrupt, means
/// that the run could not finish. Speed, and what is undecided about it, is for `flashcore compare`: a busy machine
/// makes no result wrong.
fn exit(outcomes: &[Outcome], complete: bool) -> Exit {
    let wrong = |outcome: &Outcome| {
        (outcome.impossible && outcome.gpu().is_some())
            || outcome.results.iter().any(|result| is_ours(&result.name) && result.is_wrong())
    };
    let is_missing = |outcome: &Outcome| outcome.ours().is_none_or(|ours| ours.failure.is_some());
    if outcomes.iter().any(wrong) {
        Exit::Fail
    } else if !complete || outcomes.iter().any(is_missing) {
        Exit::CouldNot
    } else {
        Exit::Pass
    }
}

pub fn bench(options: &Options) -> Result<Exit, String> {
    let Options { matrix, ladder, kernel, schedule, .. } = options;
    let ours = if !schedule.is_empty() {
        Ours::Schedules(schedule.iter().map(ToString::to_string).collect())
    } else if *ladder {
        match options.cells.pass().last() {
            Pass::Forward => Ours::Kernels(Kernel::LADDER.into_iter().rev().collect()),
            Pass::Backward => Ours::Kernels(Kernel::BACKWARD.into_iter().rev().collect()),
        }
    } else if kernel.is_empty() {
        Ours::Planner
    } else {
        Ours::Kernels(kernel.clone())
    };
    if options.cells.pass == Some(Passes::Both) && ours != Ours::Planner {
        return Err("a kernel or a schedule is of one pass: give --pass forward or backward, or leave it to the plans".into());
    }
    if options.sustained && *matrix == Some(Matrix::Cpu) {
        return Err("--sustained is a GPU's, and --matrix cpu is the CPU engine's: give one of them".into());
    }
    let only = match matrix {
        Some(Matrix::Cpu) => Some(Only::Cpu),
        None if ours == Ours::Planner && !options.sustained => None,
        Some(Matrix::Small | Matrix::Decode | Matrix::Paged | Matrix::Varlen)
            if ours == Ours::Planner && !options.sustained =>
        {
            Some(Only::GpuUnlessNamed)
        }
        _ => Some(Only::Gpu),
    };
    let mut members = match (matrix, options.cells.pass) {
        (None, _) => options.cells.members(options.eight),
        (Some(matrix), None) => Ok(matrix.usual_cells()),
        (Some(matrix), Some(pass)) => matrix.cells(pass),
    }?;
    if let Some(text) = &options.only {
        members.retain(|it| it.group.contains(text) || format!("{} ", it.cell.label()).contains(text));
        if members.is_empty() {
            return Err(format!("--only '{text}': no cell of the matrix, and no group, is named so"));
        }
    }
    let task = Task {
        budget: options.pace.budget,
        rounds: options.samples.map(|samples| samples as usize),
        ours,
        peers: options.against.named(),
        alone: matrix.is_none(),
        calls: options.calls,
        regime: if options.sustained { Regime::Sustained } else { Regime::Bursts },
        only,
        ..Task::new(members, &options.place, options.pace.margin()?)
    };
    let finished = time(&task, &options.json)?;
    if let Some(name) = &options.save_baseline {
        if !finished.complete || finished.exit == Exit::Fail {
            return Err(format!("a run that is wrong or not complete is no baseline; {name} was not saved"));
        }
        let machine = Saved::of(&finished.document)?.machine();
        let path = kept::keep("baselines", &machine, name, &finished.document)?;
        say(&format!("kept as {name} for {machine}: {}", path.display()));
    }
    Ok(finished.exit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::outcome::CpuConditions;
    use crate::rule::{Bound, Judgement};
    use crate::timing::Samples;

    /// A cell with a given error, where ours took 1 ms per round, torch 2 ms, and the machine's limit some time.
    fn outcome(error: f64, limit_us: f64) -> Outcome {
        let samples = |name: &str, us: f64| Samples {
            name: name.into(),
            calls: 1,
            times: vec![us; 10],
            ..Samples::default()
        };
        let bound = Bound { error, plain: 0.1, allowed: 0.2 };
        let judgement = Judgement::forward(1, [bound; 3], None);
        let taken = vec![(samples("flashcore", 1e3), Some(judgement)), (samples("torch", 2e3), None)];
        let conditions =
            CpuConditions { fma_peak_samples_us: vec![limit_us; 10], ..CpuConditions::default() };
        let named = shapes::parse("mission").unwrap();
        let (name, shape, dtype) = (named.name, named.shape, named.dtype);
        let cell = Cell {
            name,
            shape,
            mask: Mask::None,
            types: dtype.into(),
            pass: Pass::Forward.into(),
            sequences: None,
        };
        Outcome::on_cpu(&cell, 1, taken, conditions, None, 0.02)
    }

    #[test]
    fn the_exit_code_says_whether_results_are_right_however_busy_the_machine_was() {
        for limit_us in [500.0, 2e3] {
            assert_eq!(exit(&[outcome(0.1, limit_us)], true), Exit::Pass);
            assert_eq!(exit(&[outcome(0.1, limit_us)], false), Exit::CouldNot);
            assert_eq!(exit(&[outcome(0.3, limit_us)], true), Exit::Fail);
        }
    }

    #[test]
    fn a_time_beyond_the_limit_is_a_warning_and_undecided() {
        let [quiet, busy] = [500.0, 2e3].map(|limit_us| show::describe(&outcome(0.1, limit_us)));
        assert!(quiet.contains("FASTER") && !quiet.contains("of this machine's limit"), "{quiet}");
        assert!(!busy.contains("FASTER") && busy.contains("of this machine's limit"), "{busy}");
    }
}
