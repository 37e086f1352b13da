//! `flashcore bench`: how fast, how sure, how right, and against whom.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use clap::{Args, ValueEnum};
use flashcore::cuda::driver::Driver;
use flashcore::plan::{Kernel, Schedule};
use flashcore::{DType, Mask, cpu};
use serde::Serialize;

use super::after_bench::{self, AfterBench, Finished, INTERRUPTED, percent};
use super::screen::{Progress, Tone, say, toned};
use super::{Exit, Json, bench_gpu};
use crate::bench::{
    AgainstItself, Bench, CausalShare, Cell, Measured, Outcome, Summary, causal_shares, cpu_matrix,
    summarise_all,
};
use crate::ceilings::Ceilings;
use crate::evidence::{Document, Environment, schemas};
use crate::gpu::bench::{self as gpu_bench, Cache};
use crate::gpu::cells::{self, Member};
use crate::interrupt;
use crate::peers::{Torch, TorchFacts};
use crate::rbk;
use crate::shapes;
use crate::stats::{MARGIN, Verdict};
use crate::timing::{Effort, SAMPLE, SETTLE};
use crate::{files, memory};

#[derive(Args)]
#[command(after_help = "\
Shapes are names (mission, long, decode …; an unknown one lists them) or BxHxSxD, such as 1x8x512x64, with a slash where \
queries and keys differ, such as 1x32/8x1/4096x128.

Contenders take turns in rounds, on the same inputs, and every time stands beside the error of what was timed. Times are \
microseconds; rates count causal as half.

On the CPU the clock is that of the caller. On a GPU it is the kernel clock, with the caller's beside it for a shape that \
is looked at alone, and everything runs in worker processes: one that crashes or hangs costs its own row and no other. \
torch is looked for in $FLASHCORE_PYTHON, then python3.

With --compare the exit code is the gate's: 0 nothing is slower by more than --fail-on, 1 something surely is, 2 the samples \
do not say. By the kernel clock times are compared as they are; by the call clock of a CPU, by a peer's times where both runs \
have one.")]
pub struct Options {
    /// What to time, by name or as BxHxSxD
    #[arg(value_name = "SHAPE", value_parser = shapes::parse,
          required_unless_present_any = ["matrix", "config", "candidate", "ceilings"])]
    shapes: Vec<shapes::Named>,
    /// A set of cells
    #[arg(long, value_enum, conflicts_with = "shapes")]
    matrix: Option<Matrix>,
    /// A grid of shapes in a file, as rbk_config.yaml; writes rbk_report.json, .csv and .md
    #[arg(long, value_name = "FILE", conflicts_with_all = ["shapes", "matrix", "samples", "dtype", "causal", "no_causal"])]
    config: Option<PathBuf>,
    /// Measure what this machine can do at most, and keep it: rates are shown as fractions of that from then on
    #[arg(long, conflicts_with_all = ["matrix", "config", "candidate"])]
    ceilings: bool,
    /// Compare ours with itself N times, and say how often the verdict was wrong
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000),
          conflicts_with_all = ["matrix", "config", "compare", "save_baseline", "ladder", "peers"])]
    against_itself: Option<u32>,
    /// Plant a slow-down in one side of --against-itself, such as 2%, which must then be called SLOWER
    #[arg(long, value_name = "PERCENT", value_parser = percent, requires = "against_itself")]
    handicap: Option<f64>,
    /// With a causal mask
    #[arg(long, conflicts_with_all = ["no_causal", "matrix"])]
    causal: bool,
    /// Without a mask, for named shapes that are causal
    #[arg(long, conflicts_with = "matrix")]
    no_causal: bool,
    /// f16, bf16, f32 or all; the named shape's own by default
    #[arg(long, value_name = "DTYPE", value_parser = dtypes, conflicts_with = "matrix")]
    dtype: Option<Dtypes>,
    /// auto (the GPU where there is one), cpu, one path of the CPU engine such as cpu-portable, or cuda, with -N for the
    /// GPU of number N
    #[arg(long, default_value = "auto", value_parser = place)]
    device: Place,
    /// CPU: threads for every contender; all cores by default
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    threads: Option<u32>,
    /// Exactly N rounds a cell
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    samples: Option<u32>,
    /// Time for all cells together, such as 90s or 4m; cells take less where every comparison is decided
    #[arg(long, value_name = "TIME", value_parser = duration, allow_negative_numbers = true)]
    budget: Option<Duration>,
    /// The smallest difference that matters, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = MARGIN * 100.0, allow_negative_numbers = true)]
    margin: f64,
    /// Do not look for torch
    #[arg(long)]
    no_peers: bool,
    /// GPU: torch's backends flash, cudnn, efficient, math (the first two by default in a matrix); flash_attn, xformers and
    /// flex where they are installed; and cublas, which is unfused
    #[arg(long, value_name = "NAMES", value_parser = peers, conflicts_with = "no_peers")]
    peers: Option<Peers>,
    /// GPU: every kernel of ours, from the simplest up, with the gain of each rung
    #[arg(long, conflicts_with_all = ["kernel", "schedule"])]
    ladder: bool,
    /// GPU: a kernel with its default schedule instead of the planner's choice; may be given more than once
    #[arg(long, value_name = "NAME", conflicts_with = "schedule")]
    kernel: Vec<Kernel>,
    /// GPU: a schedule as inspect prints it; may be given more than once
    #[arg(long, value_name = "TEXT")]
    schedule: Vec<Schedule>,
    /// GPU: what calls find in the L2 cache
    #[arg(long, value_enum, default_value_t = Cache::Cold)]
    cache: Cache,
    /// GPU: read the call clock in a matrix too
    #[arg(long)]
    calls: bool,
    #[command(flatten)]
    after: AfterBench,
    #[command(flatten)]
    json: Json,
}

/// What a run times: the options' own cells, or a file's.
pub(super) struct Task {
    pub cells: Vec<Cell>,
    /// Rounds, if exactly so many are wanted.
    pub rounds: Option<usize>,
    pub warmups: u32,
    pub config: Option<rbk::Config>,
}

/// A set of cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Matrix {
    Cpu,
    Gpu(cells::Matrix),
}

impl ValueEnum for Matrix {
    fn value_variants<'a>() -> &'a [Self] {
        use cells::Matrix::{Anchors, Decode, Small};
        &[Matrix::Cpu, Matrix::Gpu(Anchors), Matrix::Gpu(Small), Matrix::Gpu(Decode)]
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        match self {
            Matrix::Cpu => Some(clap::builder::PossibleValue::new("cpu").help(
                "The CPU engine's record: four shapes in f32, bf16 and f16, causal and not, and a decode (25 cells)",
            )),
            Matrix::Gpu(matrix) => matrix.to_possible_value(),
        }
    }
}

/// Where a benchmark runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// A GPU where there is one, else the CPU.
    Auto,
    Cpu(cpu::Isa),
    Cuda(u32),
}

impl Options {
    pub(super) fn matrix(&self) -> Option<cells::Matrix> {
        match self.matrix {
            Some(Matrix::Gpu(matrix)) => Some(matrix),
            Some(Matrix::Cpu) | None => None,
        }
    }

    pub(super) fn peers(&self) -> Option<&[String]> {
        if self.no_peers { Some(&[]) } else { self.peers.as_ref().map(|peers| peers.0.as_slice()) }
    }

    pub(super) fn ladder(&self) -> bool {
        self.ladder
    }

    pub(super) fn kernels(&self) -> &[Kernel] {
        &self.kernel
    }

    pub(super) fn schedules(&self) -> &[Schedule] {
        &self.schedule
    }

    pub(super) fn cache(&self) -> Cache {
        self.cache
    }

    pub(super) fn call_clock(&self) -> bool {
        self.calls
    }

    pub(super) fn after(&self) -> &AfterBench {
        &self.after
    }

    pub(super) fn ceilings(&self) -> bool {
        self.ceilings
    }

    /// How often ours is compared with itself, and what one side's times are multiplied with.
    pub(super) fn against_itself(&self) -> Option<(usize, f64)> {
        self.against_itself.map(|times| (times as usize, 1.0 + self.handicap.unwrap_or(0.0)))
    }

    fn task(&self) -> Result<Task, String> {
        let Some(path) = &self.config else {
            let rounds = self.samples.map(|samples| samples as usize);
            return Ok(Task { cells: self.cells(), rounds, warmups: 0, config: None });
        };
        let text = files::read_text(path)?;
        let config = rbk::Config::parse(&text).map_err(|why| format!("{}: {why}", path.display()))?;
        Ok(Task {
            cells: config.cells(),
            rounds: Some(config.iterations as usize),
            warmups: config.warmups,
            config: Some(config),
        })
    }

    pub(super) fn margin(&self) -> f64 {
        self.margin
    }

    pub(super) fn budget(&self) -> Option<Duration> {
        self.budget
    }

    /// Whether anything was asked for that only a GPU has.
    fn wants_gpu(&self) -> bool {
        self.matrix().is_some() || self.ladder || !self.kernel.is_empty() || !self.schedule.is_empty()
    }

    /// The GPU's number, or the CPU's instruction set.
    fn place(&self) -> Result<Place, String> {
        let gpu_is_there = || Driver::load().and_then(Driver::device_count).is_ok_and(|count| count > 0);
        match self.device {
            Place::Auto if self.matrix == Some(Matrix::Cpu) => Ok(Place::Cpu(cpu::Engine::new().isa())),
            Place::Auto if self.wants_gpu() || gpu_is_there() => Ok(Place::Cuda(0)),
            Place::Auto => Ok(Place::Cpu(cpu::Engine::new().isa())),
            Place::Cpu(_) if self.wants_gpu() => {
                Err("kernels, schedules and their matrices are a GPU's: leave --device away, or give cuda"
                    .into())
            }
            Place::Cuda(_) if self.matrix == Some(Matrix::Cpu) => {
                Err("--matrix cpu is the CPU engine's: leave --device away, or give cpu".into())
            }
            given => Ok(given),
        }
    }

    /// The cells as a GPU times them.
    fn members(&self, task: &Task) -> Vec<Member> {
        match self.matrix() {
            Some(matrix) => matrix.cells(),
            None => task.cells.iter().map(|&cell| Member { cell, group: "all".into() }).collect(),
        }
    }
}

/// Dtypes in a row, which clap would otherwise take for many values.
#[derive(Clone, Debug)]
pub(super) struct Dtypes(pub(super) Vec<DType>);

pub(super) fn dtypes(text: &str) -> Result<Dtypes, String> {
    if text == "all" {
        return Ok(Dtypes(DType::ALL.to_vec()));
    }
    let one = |part: &str| part.trim().parse().map_err(|why: String| format!("{why}, and all"));
    text.split(',').map(one).collect::<Result<_, _>>().map(Dtypes)
}

/// Peers in a row, which clap would otherwise take for many values.
#[derive(Clone, Debug)]
struct Peers(Vec<String>);

fn peers(text: &str) -> Result<Peers, String> {
    let one = |name: &str| {
        let known = gpu_bench::peers();
        if known.contains(&name.trim()) {
            Ok(name.trim().to_string())
        } else {
            Err(format!("'{name}' is no peer; possible are {}", known.join(", ")))
        }
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

fn place(text: &str) -> Result<Place, String> {
    let engine = cpu::Engine::new();
    match text.split_once('-').unwrap_or((text, "")) {
        ("auto", "") => Ok(Place::Auto),
        ("cpu", "") => Ok(Place::Cpu(engine.isa())),
        ("cpu", name) => engine.with_isa(name.parse()?).map(|engine| Place::Cpu(engine.isa())),
        ("cuda", "") => Ok(Place::Cuda(0)),
        ("cuda", ordinal) if ordinal.parse::<u32>().is_ok() => Ok(Place::Cuda(ordinal.parse().unwrap_or(0))),
        _ => {
            let paths: Vec<String> = cpu::available().iter().map(|isa| format!("cpu-{isa}")).collect();
            Err(format!(
                "bench times the CPU engine and the GPU; possible are auto, cpu, {}, cuda",
                paths.join(", ")
            ))
        }
    }
}

/// A p90 so many times p50 says that something else ran on the machine.
const NOISY: f64 = 1.3;

/// Why there is no torch when none was wanted.
const NO_PEERS: &str = "--no-peers";

#[derive(Serialize)]
struct Report {
    clock: &'static str,
    device: String,
    threads: usize,
    torch: Option<TorchFacts>,
    no_torch_because: Option<String>,
    ceilings: Option<Ceilings>,
    /// Cells that were asked for.
    asked: usize,
    cells: Vec<Outcome>,
    summaries: Vec<Summary>,
    causal_shares: Vec<CausalShare>,
}

pub fn bench(options: &Options) -> Result<Exit, String> {
    options.json.check()?;
    options.after.check()?;
    if !(0.0..100.0).contains(&options.margin) {
        return Err(format!("--margin {} is not a percentage from 0 to 100", options.margin));
    }
    let margin = options.margin / 100.0;
    if let Some(candidate) = options.after.candidate() {
        return after_bench::compare_reports(&options.after, candidate, margin);
    }
    let task = options.task()?;
    let isa = match options.place()? {
        Place::Cuda(ordinal) => {
            return bench_gpu::bench(options, &task, ordinal, &options.members(&task), &options.json);
        }
        Place::Cpu(isa) => isa,
        Place::Auto => cpu::Engine::new().isa(),
    };
    // Before anything is drawn: a machine that runs out of memory kills whom it likes.
    for cell in &task.cells {
        memory::check(&cell.label(), memory::to_judge(&cell.problem()))?;
    }
    let environment = Environment::read();
    let threads = options.threads.map_or(environment.cpu.cores, |threads| threads as usize);
    let machine = machine(&environment, isa, threads);
    if options.ceilings {
        let created = Document::new("", &environment, true, &()).created;
        let found = Ceilings::of_cpu(&machine, &created, isa, threads, Duration::from_secs(1));
        keep_ceilings(&found);
        if task.cells.is_empty() {
            options.json.write(schemas::CEILINGS, &environment, true, &found)?;
            return Ok(Exit::Pass);
        }
    }
    let no_peers = options.no_peers || options.against_itself.is_some();
    let torch = if no_peers { Err(NO_PEERS.to_string()) } else { Torch::start(threads) };
    let (torch, no_torch) = match torch {
        Ok(torch) => (Some(torch), None),
        Err(why) => (None, Some(why)),
    };
    let facts = torch.as_ref().map(Torch::facts);
    let a_cell = Duration::from_secs(if torch.is_some() { 10 } else { 2 });
    let budget = options.budget.map_or(a_cell, |all| all / task.cells.len().max(1) as u32);
    let effort = Effort { rounds: task.rounds, budget, margin, settle: SETTLE, sample: SAMPLE };
    let ceilings = Ceilings::kept(&machine)?;
    let mut bench =
        Bench::new(isa, threads, effort, torch)?.with_warmups(task.warmups).with_ceilings(ceilings.clone());
    if let Some((repetitions, handicap)) = options.against_itself() {
        interrupt::finish_steps(|| {});
        let mut progress = Progress::new((repetitions * task.cells.len()) as u64);
        let mut all = Vec::new();
        for (i, cell) in task.cells.iter().enumerate() {
            let mut tell = |done: usize| progress.at((i * repetitions + done) as u64, &cell.label());
            all.push(bench.against_itself(cell, repetitions, handicap, &interrupt::requested, &mut tell)?);
        }
        progress.finish();
        interrupt::finishing();
        return conclude_against_itself(&all, &environment, &options.json);
    }
    let found = Arc::new(Mutex::new(Report {
        clock: "call",
        device: bench.engine().device().to_string(),
        threads,
        torch: facts.clone(),
        no_torch_because: no_torch.clone(),
        ceilings,
        asked: task.cells.len(),
        summaries: Vec::new(),
        causal_shares: Vec::new(),
        cells: Vec::new(),
    }));
    interrupt::finish_steps({
        let (found, json, environment) = (Arc::clone(&found), options.json.clone(), environment.clone());
        move || keep_part(&found, &environment, &json)
    });
    say(&heading(&environment, &bench, facts.as_ref(), no_torch.as_deref()));
    let mut progress = Progress::new(task.cells.len() as u64 * 100);
    for (i, cell) in task.cells.iter().enumerate() {
        if interrupt::requested() {
            break;
        }
        let label = cell.label();
        let mut tell = |what: &str, share: f64| {
            progress.at(i as u64 * 100 + (share * 100.0) as u64, &format!("{label}: {what}"));
        };
        let outcome = bench.run(cell, &interrupt::requested, &mut tell)?;
        progress.say(&describe(&outcome));
        locked(&found).add(outcome);
    }
    interrupt::finishing();
    progress.finish();
    let report = locked(&found);
    let complete = report.cells.len() == task.cells.len() && !interrupt::requested();
    let closing = closing(&report);
    if !closing.is_empty() {
        say(&closing);
    }
    let exit = exit(&report, complete);
    Finished { schema: schemas::BENCH, environment: &environment, complete, report: &*report, exit }.conclude(
        &options.after,
        &options.json,
        task.config.as_ref(),
        margin,
    )
}

impl Report {
    /// Takes in a cell, and what follows from it.
    fn add(&mut self, outcome: Outcome) {
        self.cells.push(outcome);
        self.summaries = summarise_all(&self.cells);
        self.causal_shares = causal_shares(&self.cells);
    }
}

fn locked(found: &Mutex<Report>) -> MutexGuard<'_, Report> {
    found.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps what a run found until it is ended in the middle of a cell.
fn keep_part(found: &Mutex<Report>, environment: &Environment, json: &Json) {
    say(&toned(Tone::Bad, INTERRUPTED));
    if let Err(why) = json.write(schemas::BENCH, environment, false, &*locked(found)) {
        interrupt::tell(&format!("error: {why}"));
    }
}

/// What the ceilings of a CPU are kept for, as [`crate::evidence::saved::Saved::machine`] names it.
fn machine(environment: &Environment, isa: cpu::Isa, threads: usize) -> String {
    let model = environment.cpu.model.as_deref().unwrap_or("an unknown CPU");
    format!("cpu-{isa} on {model}, {threads} threads")
}

/// Shows ceilings and keeps them.
pub(super) fn keep_ceilings(found: &Ceilings) {
    let rate = |rate: Option<f64>, unit: &str| {
        rate.map_or_else(|| "not measured".into(), |rate| format!("{rate:.3} {unit}"))
    };
    say(&format!("the ceilings of {}", found.machine));
    say(&format!("  products      {}", rate(found.matmul_tflops, "TFLOP/s")));
    say(&format!("  memory        {}", rate(found.memory_gbytes, "GB/s")));
    say(&format!("  exponentials  {}", rate(found.exp_gops, "G/s")));
    if found.launch_us.is_some() {
        say(&format!(
            "  empty launch  {} by the call clock, {} of the host's",
            rate(found.launch_us, "µs"),
            rate(found.launch_host_us, "µs")
        ));
    }
    match found.keep() {
        Ok(path) => say(&format!("kept in {}", path.display())),
        Err(why) => say(&why),
    }
}

/// Says how often two things that are one were told apart, and whether that is as rare as it should be.
pub(super) fn conclude_against_itself(
    all: &[AgainstItself],
    environment: &Environment,
    json: &Json,
) -> Result<Exit, String> {
    #[derive(Serialize)]
    struct Body<'a> {
        cells: &'a [AgainstItself],
    }
    let complete = !interrupt::requested();
    for cell in all {
        let [faster, same, slower, undecided] = cell.verdicts;
        let words =
            if cell.passed() { toned(Tone::Good, "as it should be") } else { toned(Tone::Bad, "WRONG") };
        let planted = if cell.handicap > 1.0 {
            format!(" with a planted slow-down of {:.3} %", (cell.handicap - 1.0) * 100.0)
        } else {
            String::new()
        };
        say(&format!(
            "{} against itself{planted}, {} times: {faster} FASTER, {same} SAME, {slower} SLOWER, {undecided} UNDECIDED; \
             the 95 % interval held the truth {} times: {words}",
            cell.cell, cell.repetitions, cell.held
        ));
    }
    json.write(schemas::AGAINST_ITSELF, environment, complete, &Body { cells: all })?;
    Ok(if all.iter().any(|cell| !cell.passed()) {
        Exit::Fail
    } else if complete {
        Exit::Pass
    } else {
        Exit::CouldNot
    })
}

/// Wrong results fail, and an interrupt is no answer. How fast they came, and what is undecided about that, is for a gate
/// (`--compare`): a machine that is busy makes no result wrong.
fn exit(report: &Report, complete: bool) -> Exit {
    if report.cells.iter().any(|outcome| !outcome.ours().is_right()) {
        Exit::Fail
    } else if complete {
        Exit::Pass
    } else {
        Exit::CouldNot
    }
}

impl Options {
    fn cells(&self) -> Vec<Cell> {
        if self.matrix == Some(Matrix::Cpu) {
            return cpu_matrix();
        }
        let mut cells = Vec::new();
        for named in &self.shapes {
            let causal = (named.causal || self.causal) && !self.no_causal;
            let mask = if causal { Mask::Causal } else { Mask::None };
            let dtypes = self.dtype.as_ref().map_or(vec![named.dtype], |dtypes| dtypes.0.clone());
            cells.extend(dtypes.into_iter().map(|dtype| Cell {
                name: named.name,
                shape: named.shape,
                mask,
                dtype,
            }));
        }
        cells
    }
}

fn heading(
    environment: &Environment,
    bench: &Bench,
    torch: Option<&TorchFacts>,
    no_torch: Option<&str>,
) -> String {
    let device = bench.engine().device();
    let mut lines =
        vec![format!("FlashCore {} on {device}, {}", environment.flashcore, environment.cpu_name())];
    match (torch, no_torch) {
        (Some(torch), _) => {
            lines.push(format!("torch {} on {} threads, on the same inputs", torch.version, torch.threads));
        }
        (None, Some(why)) if why != NO_PEERS => lines.push(format!("without torch: {why}")),
        (None, _) => {}
    }
    if !environment.optimised {
        lines.push("this build is not optimised, its times say nothing: use cargo run --release".into());
    }
    let columns = format!(
        "\n{:<12} {:>11} {:>11} {:>11} {:>7} {:>9} {:>12}   error against the oracle",
        "", "p50 µs", "p90 µs", "min µs", "±95 %", "GFLOP/s", "of limit"
    );
    lines.push(toned(Tone::Strong, &columns));
    lines.join("\n")
}

fn describe(outcome: &Outcome) -> String {
    let name = outcome.name.map_or_else(String::new, |name| format!("{name}: "));
    let half = if outcome.mask.starts_with("causal") { ", causal counted half" } else { "" };
    let bytes = match outcome.bandwidth_gbytes {
        Some(_) => format!(", {:.1} MB", outcome.bytes / 1e6),
        None => String::new(),
    };
    let (label, gflop, rounds) = (outcome.label(), outcome.flops / 1e9, outcome.ours().samples_us.len());
    let title = format!("{name}{label}  ({gflop:.3} GFLOP a call{half}{bytes}; {rounds} rounds)");
    let mut lines = vec![toned(Tone::Strong, &title)];
    lines.extend(outcome.results.iter().map(|measured| line(outcome, measured)));
    for comparison in &outcome.comparisons {
        let tone = if comparison.verdict == Verdict::Slower { Tone::Bad } else { Tone::Good };
        lines.push(format!(
            "  {} than {}: {:.2}x its speed, with 95 % confidence {:.2}x to {:.2}x",
            toned(tone, &comparison.verdict.to_string()),
            comparison.peer,
            comparison.speed_up,
            comparison.interval.low,
            comparison.interval.high,
        ));
    }
    if let Some(share) = outcome.causal_share {
        lines.push(format!("  {share:.2} of the rate without the mask, by useful operations"));
    }
    if let (Some(p50), Some(p90)) = (outcome.ours().p50_us, outcome.ours().p90_us)
        && p90 > NOISY * p50
    {
        let times = p90 / p50;
        lines.push(format!(
            "  noisy: p90 is {times:.1} times p50; close other programs, or give a longer --budget"
        ));
    }
    if outcome.launch_bound {
        lines.push("  under 1 % of the peak: this times the call, not the arithmetic".into());
    }
    if let Some(roofline) = outcome.ours().roofline {
        lines.push(format!(
            "  {:.0} % of what this machine could do: {:.1} µs at its measured ceilings, bound by {}",
            roofline.share * 100.0,
            roofline.floor_us,
            roofline.bound
        ));
    }
    if outcome.impossible {
        let warning = "  faster than the best that was seen of this machine's limit, so its speed changed meanwhile: UNDECIDED; \
                       close other programs, or give a longer --budget";
        lines.push(toned(Tone::Bad, warning));
    }
    lines.join("\n")
}

fn line(outcome: &Outcome, measured: &Measured) -> String {
    if let Some(why) = &measured.failure {
        return format!("  {:<10} {why}", measured.name);
    }
    let number = |x: Option<f64>| x.map_or_else(|| "-".into(), |x| format!("{x:.1}"));
    let spread = measured.median_interval_us.zip(measured.p50_us).map_or_else(
        || "-".into(),
        |(interval, p50)| format!("{:.1} %", (interval.high - interval.low) / 2.0 / p50 * 100.0),
    );
    let limit = match (measured.bandwidth_share, measured.fma_peak_share) {
        (Some(share), _) => format!("{:.0} % memory", share * 100.0),
        (None, Some(share)) => format!("{:.0} % FMA", share * 100.0),
        (None, None) => "-".into(),
    };
    format!(
        "  {:<10} {:>11} {:>11} {:>11} {:>7} {:>9} {:>12}   {}",
        measured.name,
        number(measured.p50_us),
        number(measured.p90_us),
        number(measured.min_us),
        spread,
        number(measured.gflops),
        limit,
        error(outcome, measured),
    )
}

/// The error beside a time: its size, how it compares with plain attention's, and of how many rows.
fn error(outcome: &Outcome, measured: &Measured) -> String {
    let Some(judgement) = &measured.error else { return "not judged".into() };
    let verdict = if judgement.passed() { toned(Tone::Good, "right") } else { toned(Tone::Bad, "WRONG") };
    let against =
        judgement.error_ratio().map_or_else(String::new, |ratio| format!(", {ratio:.2} of plain's"));
    let rows = if outcome.judged_rows == outcome.rows {
        String::new()
    } else {
        format!(", {} of {} rows", outcome.judged_rows, outcome.rows)
    };
    format!("{verdict}: max {:.1e}{against}{rows}", judgement.max.error)
}

fn closing(report: &Report) -> String {
    let mut lines = Vec::new();
    for summary in &report.summaries {
        let [faster, same, slower, undecided] = summary.verdicts;
        let mean = toned(Tone::Strong, &format!("{:.2}x", summary.geometric_mean));
        lines.push(format!(
            "\n{} cells: {mean} the speed of {} by the geometric mean, {:.2}x at least ({})",
            summary.cells, summary.peer, summary.smallest, summary.smallest_cell,
        ));
        lines.push(format!("{faster} FASTER, {same} SAME, {slower} SLOWER, {undecided} UNDECIDED"));
    }
    if let Some(least) = report.causal_shares.iter().min_by(|a, b| a.share.total_cmp(&b.share)) {
        lines.push(format!(
            "causal runs at {:.2} of the full rate at least, by useful operations ({})",
            least.share, least.cell
        ));
    }
    let wrong = report.cells.iter().filter(|cell| !cell.ours().is_right()).count();
    if wrong > 0 {
        lines.push(toned(Tone::Bad, &format!("\n{wrong} results are wrong")));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Taken;
    use crate::rule::{Bound, Judgement};
    use crate::timing::Samples;

    /// A report of one cell with a given error, where ours took 1 ms a round, torch 2 ms, and the machine's limit some time.
    fn report(error: f64, limit_us: f64) -> Report {
        let samples =
            |name: &str, us: f64| Samples { name: name.into(), calls: 1, times: vec![us; 10], failure: None };
        let bound = Bound { error, plain: 0.1, allowed: 0.2 };
        let judgement = Judgement {
            max: bound,
            rms: bound,
            row: bound,
            lse: None,
            rows: 1,
            bad_rows: Vec::new(),
            first_bad: None,
        };
        let taken = Taken {
            checksums: [0; 3],
            judged_rows: 1,
            results: vec![(samples("flashcore", 1e3), Some(judgement)), (samples("torch", 2e3), None)],
            fma_peak_us: vec![limit_us; 10],
            bandwidth_us: Vec::new(),
            full_us: Vec::new(),
            fma_peak_gflops: 0.0,
        };
        let named = crate::shapes::parse("mission").unwrap();
        let cell = Cell { name: named.name, shape: named.shape, mask: Mask::None, dtype: named.dtype };
        Report {
            clock: "call",
            device: "cpu".into(),
            threads: 2,
            torch: None,
            no_torch_because: None,
            ceilings: None,
            asked: 1,
            cells: vec![taken.outcome(&cell, None, 0.02)],
            summaries: Vec::new(),
            causal_shares: Vec::new(),
        }
    }

    #[test]
    fn the_exit_code_says_whether_results_are_right_however_busy_the_machine_was() {
        for limit_us in [500.0, 2e3] {
            assert_eq!(exit(&report(0.1, limit_us), true), Exit::Pass);
            assert_eq!(exit(&report(0.1, limit_us), false), Exit::CouldNot);
            assert_eq!(exit(&report(0.3, limit_us), true), Exit::Fail);
        }
    }

    #[test]
    fn a_time_beyond_the_limit_is_a_warning_and_undecided() {
        let [quiet, busy] = [500.0, 2e3].map(|limit_us| describe(&report(0.1, limit_us).cells[0]));
        assert!(quiet.contains("FASTER") && !quiet.contains("of this machine's limit"), "{quiet}");
        assert!(!busy.contains("FASTER") && busy.contains("of this machine's limit"), "{busy}");
    }
}
