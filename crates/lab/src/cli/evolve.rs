//! `flashcore evolve`: searches for faster schedules, unattended.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use flashcore::cuda::Cuda;
use flashcore::plan::{Hardware, Kernel, Plan, Target};
use flashcore::{DType, Pass, Problem, tuned};
use flashcore_ptx::ptxas::Ptxas;

use super::Exit;
use super::bench::{Dtypes, dtypes, duration};
use super::screen::{Progress, Tone, say, toned};
use crate::bench::cells::Cell;
use crate::bench::gpu::{SAMPLE, sets_to_flush};
use crate::device::DeviceName;
use crate::evidence::Environment;
use crate::gpu::host::{Host, Kind};
use crate::rng::Rng;
use crate::search::config::{self, Config};
use crate::search::decide::Rule;
use crate::search::device::Workers;
use crate::search::gates::{Gate, Gates};
use crate::search::journal::{Journal, State, Task};
use crate::search::kernels::{Assembler, Drivers, KernelGates};
use crate::search::propose::{Elites, Exhaustive, External, Proposer, Random};
use crate::search::run::{Search, Settings, View};
use crate::search::space::Space;
use crate::search::{cpu, kernels, report};
use crate::{interrupt, memory};

#[derive(Args)]
#[command(after_help = "\
Shapes are names or BxHxSxD, with :causal, :full, :backward, :f16 or :bf16 after them: 4x16x512x64:causal. A single shape is \
searched in f16 and bf16, because a winner must be faster in two cases.

A candidate passes the static check, the assembler (no spills, no serialised wgmma, no known machine code), the simulator, \
parity on the device, and the clock; it is accepted when it is 3 % faster than the incumbent in two cases, surely faster, \
and again so on fresh data. Candidates run in worker processes: a crash or a hang costs one candidate.

Everything is written to the journal in --out as it happens; --resume goes on from it after any kill. leaderboard.json \
and evo_log.csv lie beside it. On a GPU, winners go into the tuned table in the cache folder, which the planner reads.

A proposer of your own (--external) is a command that reads one {\"want\": N, \"elites\": [...], \"knobs\": {...}, ...} per line \
and answers {\"schedules\": [...]}; an empty list means that it has no more.")]
pub struct Options {
    /// The target cases
    #[arg(value_name = "SHAPE", value_parser = config::target)]
    shapes: Vec<config::Target>,
    /// A file with the same settings; the command line overrides it
    #[arg(long, value_name = "evo.yaml")]
    config: Option<PathBuf>,
    /// f16, bf16, f8 or f16,bf16, for shapes that do not name a dtype
    #[arg(long, value_name = "DTYPE", value_parser = dtypes)]
    dtype: Option<Dtypes>,
    /// auto (the GPU where there is one), cpu, or cuda, with -N for GPU number N
    #[arg(long, default_value = "auto")]
    device: DeviceName,
    /// The kernel whose schedules are searched; the planner's by default
    #[arg(long, value_name = "NAME")]
    kernel: Option<Kernel>,
    /// Time for the search, such as 90s or 20m
    #[arg(long, value_name = "TIME", value_parser = duration)]
    budget: Option<Duration>,
    /// The most generations
    #[arg(long, value_name = "N")]
    generations: Option<usize>,
    /// Candidates per generation
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    generation: Option<u32>,
    /// The seed of random choices and inputs
    #[arg(long)]
    seed: Option<u64>,
    /// Who proposes: elites, random, exhaustive; the first two by default
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    proposers: Option<Vec<String>>,
    /// A command that also proposes candidates, over JSON lines
    #[arg(long, value_name = "COMMAND")]
    external: Option<String>,
    /// Where the journal and the results go
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Go on with the journal in the folder
    #[arg(long)]
    resume: bool,
    /// Only show the space and what passes the gates before the device; needs no GPU
    #[arg(long)]
    dry_run: bool,
    /// For a dry run without the GPU: sm_80, sm_89 or sm_90a
    #[arg(long, value_name = "TARGET", value_parser = super::inspect::target, requires = "dry_run")]
    target: Option<Target>,
    /// For a dry run: how many candidates are put through the assembler and the simulator
    #[arg(long, value_name = "N", default_value_t = 8, requires = "dry_run")]
    sample: usize,
    /// Instruction costs measured by micro; they only change the order in which candidates are tried
    #[arg(long, value_name = "micro_best.json")]
    micro: Option<PathBuf>,
}

/// Where the results go by default.
const OUT: &str = "evo";

/// The longest wait for a worker's answer, including starting it and handing it its inputs; longer is a hang.
const WATCHDOG: Duration = Duration::from_secs(40);

/// Where candidates run.
enum Place {
    Cpu,
    Cuda(u32, Cuda),
    /// Nowhere: a dry run for a GPU that is not there.
    Nowhere(Target),
}

/// Everything that a search is set up from.
struct Setup {
    cells: Vec<Cell>,
    rule: Rule,
    settings: Settings,
    seed: u64,
    out: PathBuf,
    proposers: Vec<String>,
    external: Option<String>,
    kernel: Option<Kernel>,
}

pub fn evolve(options: &Options) -> Result<Exit, String> {
    let setup = Setup::new(options)?;
    let problems: Vec<Problem> = setup.cells.iter().map(Cell::problem).collect();
    let place = place(options)?;
    if options.dry_run {
        return dry_run(&setup, &problems, &place, options.sample);
    }
    match place {
        Place::Nowhere(_) => Err("without a GPU only a dry run is possible".into()),
        Place::Cpu => {
            problems.iter().try_for_each(|problem| memory::check(problem, memory::to_call(problem)))?;
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let words: Vec<OsString> =
                vec![std::env::current_exe().map_err(|error| error.to_string())?.into(), "cpu-worker".into()];
            let host = Host::new(Kind::Command("cpu worker", words), 0).with_watchdog(WATCHDOG);
            let sets = vec![1; problems.len()];
            let task = Task {
                device: Environment::read().cpu_name(),
                target: "cpu".into(),
                cases: setup.cells.iter().map(Cell::label).collect(),
                incumbents: problems.iter().map(cpu::incumbent).collect(),
                rule: setup.rule,
            };
            let gates = cpu::CpuGates::new(problems.clone(), cores);
            let mut device = Workers::new(host, problems, sets, setup.seed);
            let state = search(options, &setup, task, &cpu::space(cores), &gates, &mut device)?;
            Ok(finish(&state))
        }
        Place::Cuda(ordinal, cuda) => {
            let hardware = cuda.hardware().clone();
            let l2 = cuda.context().properties().l2_bytes as f64;
            let kernel = setup.kernel(&hardware);
            let incumbents = Setup::incumbents(&problems, &hardware, kernel)?;
            let task = Task {
                device: hardware.name.clone(),
                target: hardware.target.name().into(),
                cases: setup.cells.iter().map(Cell::label).collect(),
                incumbents,
                rule: setup.rule,
            };
            let sets = problems.iter().map(|problem| sets_to_flush(problem.min_bytes(), l2)).collect();
            let workers = std::thread::available_parallelism().map_or(1, usize::from) / 2;
            let drivers = Drivers::new(ordinal, workers)?;
            let assembler = if let Ok(ptxas) = Ptxas::find() {
                Assembler::Ptxas(ptxas, Some(drivers))
            } else {
                say("no ptxas here: the driver assembles, and cannot say whether it serialised a wgmma");
                Assembler::Driver(drivers)
            };
            let mut gates = KernelGates::new(hardware.clone(), problems.clone(), assembler);
            if let Some(path) = &options.micro {
                gates = gates.with_costs(super::micro::costs(path)?);
            }
            let host = Host::new(Kind::Ours, ordinal).with_watchdog(WATCHDOG);
            let mut device = Workers::new(host, problems.clone(), sets, setup.seed);
            let state = search(options, &setup, task, &kernels::space(kernel), &gates, &mut device)?;
            record(&state, &problems, &hardware)?;
            Ok(finish(&state))
        }
    }
}

impl Setup {
    fn new(options: &Options) -> Result<Self, String> {
        let file = match &options.config {
            None => Config::default(),
            Some(path) => {
                let text = crate::files::read_text(path)?;
                Config::parse(&text).map_err(|why| format!("{}: {why}", path.display()))?
            }
        };
        let mut targets = options.shapes.clone();
        if targets.is_empty() {
            targets = file.shapes.iter().map(config::Wanted::target).collect::<Result<_, _>>()?;
        }
        if targets.is_empty() {
            return Err(format!("no shape to search for.\n\n{}", crate::shapes::possible()));
        }
        let cells = config::cases(&targets, options.dtype.as_ref().map(|dtypes| dtypes.0.as_slice()));
        if let Some(cell) = cells.iter().find(|cell| cell.types.dtype == DType::F32) {
            return Err(format!("{}: searches are in f16, bf16 and f8", cell.label()));
        }
        if let Some(cell) = cells.iter().find(|cell| cell.sequences.is_some()) {
            return Err(format!(
                "{}: schedules are searched on sequences of one length: give the shape of the longest",
                cell.label()
            ));
        }
        let default = Rule::default();
        let rule = Rule {
            gain: file.gain.map_or(default.gain, |percent| percent / 100.0),
            cases: file.cases.unwrap_or(default.cases),
        };
        if !(rule.gain > 0.0 && rule.gain < 1.0) || rule.cases == 0 {
            return Err("gain is a percentage above 0 and below 100, and cases at least 1".into());
        }
        if cells.len() < rule.cases {
            return Err(format!(
                "a winner must be faster in {} cases, and there {} only {}: name another shape, or --dtype f16,bf16",
                rule.cases,
                if cells.len() == 1 { "is" } else { "are" },
                cells.len()
            ));
        }
        let budget = match (options.budget, &file.budget) {
            (Some(budget), _) => Some(budget),
            (None, Some(text)) => Some(duration(text)?),
            (None, None) => None,
        };
        let usual = Settings::default();
        let settings = Settings {
            budget: budget.unwrap_or(usual.budget),
            generation: options
                .generation
                .map(|n| n as usize)
                .or(file.generation)
                .unwrap_or(usual.generation),
            generations: options.generations.or(file.generations).unwrap_or(usual.generations),
            ..usual
        };
        let kernel = match (options.kernel, &file.kernel) {
            (Some(kernel), _) => Some(kernel),
            (None, Some(name)) => Some(name.parse().map_err(|error| format!("{error}"))?),
            (None, None) => None,
        };
        let usual = || vec!["elites".to_string(), "random".to_string()];
        Ok(Self {
            cells,
            rule,
            settings,
            seed: options.seed.or(file.seed).unwrap_or(1),
            out: options
                .out
                .clone()
                .or_else(|| file.output_dir.as_ref().map(PathBuf::from))
                .unwrap_or_else(|| OUT.into()),
            proposers: options.proposers.clone().or(file.proposers).unwrap_or_else(usual),
            external: options.external.clone().or(file.external),
            kernel,
        })
    }

    /// The kernel to search: the asked-for one, or the target's best; of gradients, the planner's.
    fn kernel(&self, hardware: &Hardware) -> Kernel {
        let of_gradients = || {
            let problem = self.cells.iter().map(Cell::problem).find(|it| it.pass == Pass::Backward)?;
            Some(Plan::choose(&problem, hardware).ok()?.kernel())
        };
        self.kernel.or_else(of_gradients).unwrap_or(if Kernel::Sm90Fwd.runs_on(hardware.target) {
            Kernel::Sm90Fwd
        } else {
            Kernel::Sm80Fwd
        })
    }

    /// The schedule to beat: the planner's choice, or the default of a kernel that was asked for.
    fn incumbents(problems: &[Problem], hardware: &Hardware, kernel: Kernel) -> Result<Vec<String>, String> {
        let plan = |problem: &Problem| {
            let plan = Plan::choose(problem, hardware)?;
            if plan.kernel() == kernel { Ok(plan) } else { Plan::with_kernel(problem, hardware, kernel) }
        };
        let text = |plan: flashcore::Result<Plan>| {
            plan.map(|plan| plan.main().schedule.to_string()).map_err(|error| error.to_string())
        };
        problems.iter().map(|problem| text(plan(problem))).collect()
    }

    fn proposers(&self) -> Result<Vec<Box<dyn Proposer>>, String> {
        let mut all: Vec<Box<dyn Proposer>> = Vec::new();
        for name in &self.proposers {
            all.push(match name.as_str() {
                "elites" => Box::new(Elites::new(self.seed)),
                "random" => Box::new(Random::new(self.seed)),
                "exhaustive" => Box::new(Exhaustive::default()),
                _ => {
                    return Err(format!(
                        "'{name}' is no proposer; possible are elites, random and exhaustive"
                    ));
                }
            });
        }
        if let Some(command) = &self.external {
            all.push(Box::new(External::start(command)?));
        }
        if all.is_empty() {
            return Err("nobody proposes anything".into());
        }
        Ok(all)
    }
}

fn place(options: &Options) -> Result<Place, String> {
    if let Some(target) = options.target {
        return Ok(Place::Nowhere(target));
    }
    match (options.device, options.device.gpu()) {
        (_, Some(ordinal)) => {
            Cuda::new(ordinal).map(|cuda| Place::Cuda(ordinal, cuda)).map_err(|error| error.to_string())
        }
        (DeviceName::Auto | DeviceName::Cpu(None), None) => Ok(Place::Cpu),
        (other, None) => {
            Err(format!("schedules are searched on --device auto, cpu, cuda or cuda-N, not on {other}"))
        }
    }
}

/// Runs a search to its end, and writes what it found after every step that changed it.
fn search(
    options: &Options,
    setup: &Setup,
    task: Task,
    space: &Space,
    gates: &dyn Gates,
    device: &mut Workers,
) -> Result<State, String> {
    std::fs::create_dir_all(&setup.out).map_err(|error| crate::files::explain("make", &setup.out, &error))?;
    let path = setup.out.join("journal.jsonl");
    let journal = if options.resume { Journal::resume(&path)? } else { Journal::create(&path)? };
    if !journal.damage().is_none() {
        say(&toned(Tone::Bad, &format!("{} is damaged: {}", path.display(), journal.damage())));
    }
    interrupt::finish_steps(journal.ender());
    let environment = Environment::read();
    let is_cpu = task.target == "cpu";
    for (case, incumbent) in task.cases.iter().zip(&task.incumbents) {
        say(&format!("{case:<28} {incumbent}"));
    }
    say(&format!(
        "{} schedules in the space; {} has {}",
        space.members().len(),
        if is_cpu { "the CPU engine" } else { &task.device },
        screen_time(setup.settings.budget),
    ));
    let total = setup.settings.budget.as_secs().max(1);
    let progress = std::cell::RefCell::new(Progress::new(total));
    let mut written = Instant::now();
    let mut view = |view: &View<'_>| {
        let done = total.saturating_sub(view.left.as_secs());
        progress.borrow_mut().at(done, &line(view));
        if written.elapsed() > Duration::from_secs(20) {
            written = Instant::now();
            // What cannot be written now is written, or reported, at the end.
            let _ = report::write(&setup.out, view.state, &environment, false);
        }
    };
    let mut note = |text: &str| progress.borrow().say(text);
    let sample = if is_cpu { crate::timing::SAMPLE } else { SAMPLE };
    let mut search = Search {
        task,
        space,
        gates,
        device,
        proposers: setup.proposers()?,
        journal,
        settings: Settings { sample, ..setup.settings.clone() },
        stop: &interrupt::requested,
        view: &mut view,
        note: &mut note,
    };
    let ended = search.run();
    interrupt::finishing();
    let state = search.journal.state().clone();
    progress.borrow().finish();
    report::write(&setup.out, &state, &environment, ended.is_ok() && !interrupt::requested())?;
    let why = ended?;
    say(&format!("\nended: {why}. {}", summary(&state)));
    say(&format!("workers lost and started again: {}", device.lost()));
    say(&format!("written: journal.jsonl, leaderboard.json, evo_log.csv in {}", setup.out.display()));
    Ok(state)
}

/// What a search is doing, on one line.
fn line(view: &View<'_>) -> String {
    let best = report::leaders(view.state).into_iter().max_by(|a, b| a.speed_up.total_cmp(&b.speed_up));
    let best = best.filter(|leader| leader.found).map_or_else(
        || {
            let elites = view.state.elites();
            elites.first().map_or("none timed".to_string(), |(_, score)| format!("best so far {score:.3}x"))
        },
        |leader| {
            let interval = leader.accepted_by.map(|standing| standing.interval);
            let interval = interval.map_or(String::new(), |it| format!(" [{:.3}, {:.3}]", it.low, it.high));
            format!("accepted {:.3}x{interval}", leader.speed_up)
        },
    );
    format!(
        "generation {}, {}, {best}; {}; {} left",
        view.state.generations,
        summary(view.state),
        view.doing,
        screen_time(view.left)
    )
}

/// What happened to the candidates, in a few words.
fn summary(state: &State) -> String {
    let refused = state.refused();
    let refused: Vec<String> = Gate::ALL
        .into_iter()
        .filter_map(|gate| refused.get(&gate).map(|count| format!("{gate} {count}")))
        .collect();
    let refused = if refused.is_empty() { "none".into() } else { refused.join(", ") };
    format!(
        "{} candidates, {} assembled, refused: {refused}, accepted {}",
        state.records.len(),
        report::assembled(state),
        state.accepted.len()
    )
}

fn screen_time(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds >= 60 { format!("{}m{:02}s", seconds / 60, seconds % 60) } else { format!("{seconds}s") }
}

/// Says what was found. A search that found nothing better has done its work all the same.
fn finish(state: &State) -> Exit {
    for leader in report::leaders(state) {
        let gain = 100.0 * (leader.speed_up - 1.0);
        let text = if leader.found {
            toned(Tone::Good, &format!("{:<28} +{gain:.1} %  {}", leader.case, leader.schedule))
        } else {
            format!("{:<28} nothing better than {}", leader.case, leader.schedule)
        };
        say(&text);
    }
    if interrupt::requested() { Exit::CouldNot } else { Exit::Pass }
}

/// Puts the winners into the user's tuned table.
fn record(state: &State, problems: &[Problem], hardware: &Hardware) -> Result<(), String> {
    let entry = |(problem, leader): (&Problem, report::Leader)| {
        if !leader.found {
            return None;
        }
        Some(tuned::Entry {
            device: hardware.name.clone(),
            target: hardware.target,
            problem: *problem,
            schedule: leader.schedule.parse().ok()?,
            speed_up: leader.speed_up,
        })
    };
    let entries: Vec<tuned::Entry> = problems.iter().zip(report::leaders(state)).filter_map(entry).collect();
    let Some(path) = tuned::user_file().filter(|_| !entries.is_empty()) else { return Ok(()) };
    tuned::record(&path, &entries).map_err(|error| error.to_string())?;
    say(&format!("plans are made by them from now on: {}", path.display()));
    Ok(())
}

/// Shows the space and what passes the gates before the device.
fn dry_run(setup: &Setup, problems: &[Problem], place: &Place, sample: usize) -> Result<Exit, String> {
    let hardware = match place {
        Place::Cpu => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let gates = cpu::CpuGates::new(problems.to_vec(), cores);
            show(setup, &cpu::space(cores), &gates, 0);
            say("\nThe CPU engine has nothing to assemble or to simulate.");
            return Ok(Exit::Pass);
        }
        Place::Cuda(_, cuda) => cuda.hardware().clone(),
        Place::Nowhere(target) => Hardware::typical(*target),
    };
    let kernel = setup.kernel(&hardware);
    let assembler = Ptxas::find().map_or(Assembler::Absent, |ptxas| Assembler::Ptxas(ptxas, None));
    if matches!(assembler, Assembler::Absent) {
        say("no ptxas here: the assembler's gate lets everything pass");
    }
    for (cell, incumbent) in setup.cells.iter().zip(Setup::incumbents(problems, &hardware, kernel)?) {
        say(&format!("{:<28} {incumbent}", cell.label()));
    }
    let gates = KernelGates::new(hardware, problems.to_vec(), assembler);
    show(setup, &kernels::space(kernel), &gates, sample);
    Ok(Exit::Pass)
}

/// The space by its knobs, what the static gate leaves, and how a sample fares in the assembler and the simulator.
fn show(setup: &Setup, space: &Space, gates: &dyn Gates, sample: usize) {
    say(&toned(Tone::Strong, &format!("\nspace     {} schedules", space.members().len())));
    for (knob, values) in space.values() {
        say(&format!("{knob:<10} {}", values.join(" ")));
    }
    let fits = |candidate: &str| -> Vec<usize> {
        (0..setup.cells.len()).filter(|&case| gates.check(candidate, case).is_ok()).collect()
    };
    let left: Vec<(&String, Vec<usize>)> = space
        .members()
        .iter()
        .map(|candidate| (candidate, fits(candidate)))
        .filter(|(_, cases)| cases.len() >= setup.rule.cases)
        .collect();
    say(&toned(
        Tone::Strong,
        &format!("static    {} left, which fit at least {} cases", left.len(), setup.rule.cases),
    ));
    for (case, cell) in setup.cells.iter().enumerate() {
        let count = left.iter().filter(|(_, cases)| cases.contains(&case)).count();
        say(&format!("          {count} of them fit {}", cell.label()));
    }
    let mut rng = Rng::new(setup.seed);
    let mut tried = Vec::new();
    for _ in 0..sample.min(left.len()) {
        let (candidate, cases) = &left[rng.below(left.len())];
        let assembled = cases.iter().try_for_each(|&case| gates.assemble(candidate, case).map(|_| ()));
        let outcome = assembled.map_err(|why| (Gate::Assembler, why)).and_then(|()| {
            cases
                .iter()
                .try_for_each(|&case| gates.simulate(candidate, case))
                .map_err(|why| (Gate::Simulator, why))
        });
        match &outcome {
            Ok(()) => say(&format!("passes    {candidate}")),
            Err((gate, why)) => {
                let first = why.lines().next().unwrap_or_default();
                say(&format!("{gate:<9} {candidate}\n          {first}"));
            }
        }
        tried.push(outcome);
    }
    if !tried.is_empty() {
        let count = |gate: Gate| tried.iter().filter(|it| matches!(it, Err((g, _)) if *g == gate)).count();
        let (assembler, simulator) = (count(Gate::Assembler), count(Gate::Simulator));
        say(&format!(
            "of {} drawn at random the assembler refuses {assembler} and the simulator {simulator}",
            tried.len()
        ));
    }
}
