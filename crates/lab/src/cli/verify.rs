//! `flashcore verify`: the corpus through the engines, judged by the oracle.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use flashcore::Pass;
use flashcore::cuda::Cuda;
use flashcore::plan::{Hardware, Target};
use flashcore::sim::SimGpu;
use serde::Serialize;

use super::screen::{Progress, Tone, say, toned};
use super::{Exit, Json};
use crate::cases::{Case, Passes, Tier, corpus_of};
use crate::check::{Outcome, Prepared, RULE, Status};
use crate::crew;
use crate::device::DeviceName;
use crate::engine::{self, Engine};
use crate::evidence::{Environment, schemas};
use crate::explain::{describe, explain, reproduce};
use crate::faults::{self, Finding, Nature, Trial};
use crate::gpu::stress;
use crate::gpu::worker::PLANNER;
use crate::inputs::Wild;
use crate::interrupt;
use crate::needle;
use crate::rule::Judgement;
use crate::subject::command::CommandEngine;
use crate::subject::ptx::PtxEngine;
use crate::subject::torch::TorchEngine;
use crate::tally::Tally;

#[derive(Args)]
pub struct Options {
    /// all, a kind (cpu, cuda, sim: every path or kernel of it), or one engine such as cpu-portable or cuda-0
    #[arg(long, default_value = "all")]
    device: DeviceName,
    /// One schedule on --device cuda or sim, such as `flashcore plan` shows, instead of what the planner would choose
    #[arg(long, value_name = "SCHEDULE", requires = "device", conflicts_with_all = ["subject", "command", "ptx"])]
    schedule: Option<String>,
    /// Somebody else's attention instead of a device: torch, or torch-flash, torch-cudnn, torch-efficient and torch-math
    /// on a GPU
    #[arg(long, value_name = "NAME", conflicts_with_all = ["device", "command", "ptx"])]
    subject: Option<String>,
    /// A command instead of a device: it reads q, k and v from the safetensors file {in} and writes o, and lse if it can,
    /// to {out}; key lengths are a tensor beside them, and what else is asked is in the file's metadata, and in {mask},
    /// {scale} and {softcap}
    #[arg(long, value_name = "LINE", conflicts_with_all = ["device", "ptx"])]
    command: Option<String>,
    /// With --command: seconds that a call may take [default: 60]. With --ptx in the simulator: warp instructions that a
    /// launch may execute [default: 1e8]
    #[arg(long, value_name = "NUMBER")]
    limit: Option<f64>,
    /// With --command: two runs need not give the same bits
    #[arg(long, requires = "command")]
    nondeterministic: bool,
    /// A kernel as PTX text, with --device sim in the simulator and with cuda on the first GPU
    #[arg(long, value_name = "FILE.ptx", requires = "launch")]
    ptx: Option<PathBuf>,
    /// With --ptx: how it is launched, and what it computes
    #[arg(long, value_name = "FILE.toml", requires = "ptx")]
    launch: Option<PathBuf>,
    /// forward, backward (gradients), or both
    #[arg(long, value_name = "PASS", default_value = "forward")]
    pass: Passes,
    /// The quick cases only (the default)
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// All cases
    #[arg(long)]
    full: bool,
    /// Instead of the corpus: plant every fault that the workbench must refuse, and honest work that it must accept
    #[arg(long, conflicts_with_all = ["quick", "full", "filter", "stress"])]
    faults: bool,
    /// Instead of the corpus, on a GPU (and, small, on sim): a needle among up to 128k keys of 8 bits, at several depths, for ours,
    /// for ours with sums over all keys, and for FlashAttention-3 where it is installed
    #[arg(long, conflicts_with_all = ["quick", "full", "filter", "stress", "faults"])]
    needle: bool,
    /// GPU: instead of the corpus, calls from 8 threads on 4 streams, replays, and runs in a row must give the same bits
    #[arg(long, conflicts_with_all = ["quick", "full", "filter"])]
    stress: bool,
    /// With --stress: calls from all threads together, and a tenth as many replays, of every problem
    #[arg(long, value_name = "N", default_value_t = stress::Plan::default().calls, requires = "stress")]
    calls: usize,
    /// With --stress: runs in a row of every problem
    #[arg(long, value_name = "N", default_value_t = stress::Plan::default().repeats, requires = "stress")]
    repeats: usize,
    /// With --stress: only the first N problems
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true, requires = "stress")]
    problems: usize,
    /// Only cases whose name contains TEXT, or equals it when TEXT begins with =; may be given more than once
    #[arg(long, value_name = "TEXT")]
    filter: Vec<String>,
    #[command(flatten)]
    json: Json,
}

impl Options {
    /// What is put under test.
    fn engines(&self) -> Result<Vec<Box<dyn Engine>>, String> {
        if let Some(name) = &self.subject {
            return Ok(vec![Box::new(TorchEngine::start(name)?)]);
        }
        if let Some(line) = &self.command {
            let seconds = self.limit.unwrap_or(60.0);
            let limit = Duration::try_from_secs_f64(seconds)
                .map_err(|_| format!("--limit {seconds} is no time in seconds"))?;
            return Ok(vec![Box::new(CommandEngine::new(line, limit, !self.nondeterministic)?)]);
        }
        if let (Some(ptx), Some(launch)) = (&self.ptx, &self.launch) {
            let limit = self.limit.map(warp_instructions).transpose()?;
            return PtxEngine::select(ptx, launch, self.device, limit);
        }
        if self.limit.is_some() {
            return Err("--limit is for --command (seconds) and --ptx (warp instructions)".into());
        }
        if let Some(schedule) = &self.schedule {
            return engine::with_schedule(self.device, schedule);
        }
        engine::select(self.device)
    }
}

/// A limit of warp instructions, which may be written as 1e9.
fn warp_instructions(limit: f64) -> Result<u64, String> {
    // Beyond this, whole numbers are not exact in f64; nobody waits that long.
    let most = (1_u64 << 53) as f64;
    if (1.0..=most).contains(&limit) && limit.fract() == 0.0 {
        Ok(limit as u64)
    } else {
        Err(format!("--limit {limit} is no number of warp instructions: 1 to {most:e} are"))
    }
}

#[derive(Serialize)]
struct Report {
    tier: Tier,
    rule: &'static str,
    /// Cases that were asked for.
    asked: usize,
    engines: Vec<Tally>,
    results: Vec<Record>,
}

/// One case on one engine.
#[derive(Serialize)]
struct Record {
    case: String,
    engine: String,
    status: Status,
    problem: String,
    inputs: &'static str,
    wild: Option<&'static str>,
    arrangement: &'static str,
    seed: u64,
    judgement: Option<Judgement>,
    skipped: Option<String>,
    faults: Vec<String>,
    reproduce: String,
}

/// What was found so far.
#[derive(Default)]
struct Found {
    tallies: Vec<Tally>,
    results: Vec<Record>,
}

/// Failures that are explained at length; after so many, another one adds nothing.
const EXPLAINED: usize = 10;

pub fn verify(options: &Options) -> Result<Exit, String> {
    options.json.check()?;
    if options.stress {
        return under_stress(options);
    }
    if options.needle {
        return find_needles(options);
    }
    if options.faults {
        return plant_faults(options);
    }
    let engines = options.engines()?;
    let tier = if options.full { Tier::Full } else { Tier::Quick };
    let cases = select(options.pass, tier, &options.filter)?;
    let started = Instant::now();
    let tallies = engines.iter().map(|engine| Tally::new(engine.name())).collect();
    let found = Arc::new(Mutex::new(Found { tallies, results: Vec::new() }));
    interrupt::finish_steps({
        let (found, json, asked) = (Arc::clone(&found), options.json.clone(), cases.len());
        move || keep_part(tier, asked, std::mem::take(&mut *locked(&found)), &json)
    });
    say(&format!(
        "{} cases on {}; {RULE}",
        cases.len(),
        engines.iter().map(|engine| engine.name()).collect::<Vec<_>>().join(", ")
    ));
    let total = cases.len();
    let mut progress = Progress::new(total as u64);
    let (mut done, mut explained) = (0, 0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let work = |case: &Case| check_on_all(case, &engines);
    crew::in_order(&cases, threads, &interrupt::requested, work, |at, checked| {
        // A simulated launch is cut short by Ctrl-C, which says nothing about the case.
        if interrupt::requested() && checked.iter().any(|(outcome, _)| matches!(outcome, Outcome::Failed(_)))
        {
            return;
        }
        let mut found = locked(&found);
        for ((outcome, explanation), (n, engine)) in checked.into_iter().zip(engines.iter().enumerate()) {
            found.tallies[n].count(&cases[at].name, &outcome);
            if let Some(explanation) = explanation
                && explained < EXPLAINED
            {
                explained += 1;
                progress.say(&format!("\n{} {explanation}", toned(Tone::Bad, "FAILED")));
            }
            found.results.push(Record::new(&cases[at], engine.as_ref(), outcome));
        }
        done += 1;
        progress.at(done as u64, &cases[at].name);
    });
    interrupt::finishing();
    progress.finish();
    let Found { tallies, results } = std::mem::take(&mut *locked(&found));
    say(&table(&tallies));
    let complete = done == total;
    let report = Report { tier, rule: RULE, asked: total, engines: tallies, results };
    options.json.write(schemas::VERIFY, &Environment::read(), complete, &report)?;
    let seconds = started.elapsed().as_secs_f64();
    let (exit, words) = verdict(&report.engines, done, total);
    let tone = if exit == Exit::Pass { Tone::Good } else { Tone::Bad };
    say(&format!("\n{} in {seconds:.1} s", toned(tone, &words)));
    Ok(exit)
}

/// Keeps the results so far, in case the run is ended in the middle of a case.
fn keep_part(tier: Tier, asked: usize, Found { tallies, results }: Found, json: &Json) {
    say(&table(&tallies));
    let report = Report { tier, rule: RULE, asked, engines: tallies, results };
    if let Err(why) = json.write(schemas::VERIFY, &Environment::read(), false, &report) {
        interrupt::tell(&format!("error: {why}"));
    }
}

/// One case on every engine, each with what to tell a person where it failed.
fn check_on_all(case: &Case, engines: &[Box<dyn Engine>]) -> Vec<(Outcome, Option<String>)> {
    // Where no engine computes the case, the inputs are not drawn and the oracle is not asked.
    let mut prepared: Option<Prepared> = None;
    let mut check = |engine: &dyn Engine| {
        let outcome = match engine.supports(&case.problem) {
            Err(why) => Outcome::Skipped(why),
            Ok(()) => prepared.get_or_insert_with(|| Prepared::new(case.clone())).check(engine),
        };
        let explanation = match (&outcome, &prepared) {
            (Outcome::Failed(faults), Some(prepared)) => Some(explain(prepared, engine, faults)),
            _ => None,
        };
        (outcome, explanation)
    };
    engines.iter().map(|engine| check(engine.as_ref())).collect()
}

#[derive(Serialize)]
struct FaultsReport {
    /// How many faults were refused, of how many.
    caught: (usize, usize),
    /// How many honest trials were accepted, of how many.
    accepted: (usize, usize),
    findings: Vec<Finding>,
}

impl FaultsReport {
    fn new(findings: Vec<Finding>) -> Self {
        let count = |nature| faults::count(&findings, nature);
        Self { caught: count(Nature::Fault), accepted: count(Nature::Honest), findings }
    }
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Plants every fault.
fn plant_faults(options: &Options) -> Result<Exit, String> {
    let found = Arc::new(Mutex::new(Vec::new()));
    interrupt::finish_steps({
        let (found, json) = (Arc::clone(&found), options.json.clone());
        move || {
            let report = FaultsReport::new(std::mem::take(&mut *locked(&found)));
            if let Err(why) = json.write(schemas::FAULTS, &Environment::read(), false, &report) {
                interrupt::tell(&format!("error: {why}"));
            }
        }
    });
    let started = Instant::now();
    let trials = faults::all();
    let mut progress = Progress::new(trials.len() as u64);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let width = trials.iter().map(|trial| trial.name.chars().count()).max().unwrap_or(0);
    crew::in_order(&trials, threads, &interrupt::requested, Trial::run, |at, finding| {
        progress.at(at as u64 + 1, &finding.name);
        let word = match (finding.as_it_should, finding.nature) {
            (true, Nature::Fault) => toned(Tone::Good, "caught  "),
            (true, Nature::Honest) => toned(Tone::Good, "accepted"),
            (false, Nature::Fault) => toned(Tone::Bad, "MISSED  "),
            (false, Nature::Honest) => toned(Tone::Bad, "ACCUSED "),
        };
        progress.say(&format!("{word} {:<width$}  {:<10} {}", finding.name, finding.judge, finding.said));
        locked(&found).push(finding);
    });
    interrupt::finishing();
    progress.finish();
    let report = FaultsReport::new(std::mem::take(&mut *locked(&found)));
    let complete = report.findings.len() == trials.len();
    let (caught, accepted) = (report.caught, report.accepted);
    options.json.write(schemas::FAULTS, &Environment::read(), complete, &report)?;
    let exit = if report.findings.iter().any(|finding| !finding.as_it_should) {
        Exit::Fail
    } else if complete {
        Exit::Pass
    } else {
        Exit::CouldNot
    };
    let tone = if exit == Exit::Pass { Tone::Good } else { Tone::Bad };
    let words = format!(
        "{} of {} faults caught, {} of {} honest accepted",
        caught.0, caught.1, accepted.0, accepted.1
    );
    say(&format!("\n{} in {:.1} s", toned(tone, &words), started.elapsed().as_secs_f64()));
    Ok(exit)
}

#[derive(Serialize)]
struct StressReport {
    device: String,
    plan: stress::Plan,
    /// Problems that were asked for.
    asked: usize,
    problems: Vec<stress::Record>,
}

/// Puts a GPU under stress.
fn under_stress(options: &Options) -> Result<Exit, String> {
    let ordinal = match options.device {
        DeviceName::All => 0,
        DeviceName::Cuda(ordinal, None) => ordinal.unwrap_or(0),
        other => return Err(format!("--stress is for a GPU: give --device cuda, not {other}")),
    };
    let cuda = Cuda::new(ordinal).map_err(|error| error.to_string())?;
    let plan = stress::Plan {
        calls: options.calls,
        replays: options.calls.div_ceil(10),
        repeats: options.repeats,
        ..stress::Plan::default()
    };
    interrupt::finish_steps(|| {});
    let started = Instant::now();
    say(&format!(
        "{cuda}: {} calls from {} threads on {} streams, {} replays and {} runs in a row must give the same bits",
        plan.calls, plan.threads, plan.streams, plan.replays, plan.repeats
    ));
    let mut progress = Progress::new(1000);
    let mut tell = |what: &str, share: f64| progress.at((share * 1000.0) as u64, what);
    let passes = match options.pass {
        Passes::One(pass) => vec![pass],
        Passes::Both => vec![Pass::Forward, Pass::Backward],
    };
    let stop = &interrupt::requested;
    let records = stress::stress(&cuda, &plan, &passes, options.problems, stop, &mut tell);
    interrupt::finishing();
    progress.finish();
    let records = records.map_err(|error| error.to_string())?;
    let complete = !interrupt::requested();
    for record in &records {
        let word = if record.passed() { toned(Tone::Good, "same") } else { toned(Tone::Bad, "DIFFERS") };
        let right = if record.judgement.passed() { "right" } else { "WRONG" };
        let count = |count: stress::Count| format!("{} of {}", count.different, count.runs);
        say(&format!(
            "{word:<8} {:<48} {right}; other bits in {} calls, {} replays, {} runs; {}",
            record.problem,
            count(record.threaded),
            count(record.replayed),
            count(record.repeated),
            record.schedule
        ));
    }
    let passed = !records.is_empty() && records.iter().all(stress::Record::passed);
    let report = StressReport {
        device: cuda.to_string(),
        plan,
        asked: options.problems.min(stress::count(&passes)),
        problems: records,
    };
    options.json.write(schemas::STRESS, &Environment::read(), complete, &report)?;
    let exit = match (passed, complete) {
        (false, true) => Exit::Fail,
        (_, false) => Exit::CouldNot,
        (true, true) => Exit::Pass,
    };
    let words = match exit {
        Exit::Pass => toned(Tone::Good, "PASSED"),
        Exit::Fail => toned(Tone::Bad, "FAILED"),
        Exit::CouldNot => toned(Tone::Bad, "INTERRUPTED"),
    };
    say(&format!("\n{words} in {:.1} s", started.elapsed().as_secs_f64()));
    Ok(exit)
}

#[derive(Serialize)]
struct NeedleReport {
    device: String,
    records: Vec<needle::Record>,
}

/// Looks for needles. Only ours has to find them all.
fn find_needles(options: &Options) -> Result<Exit, String> {
    let started = Instant::now();
    let (device, records) = if let DeviceName::Sim(_) = options.device {
        let (gpu, hardware) = (SimGpu::new(Target::Sm90a), Hardware::typical(Target::Sm90a));
        (gpu.to_string(), needle::on_sim(&gpu, &hardware)?)
    } else {
        let ordinal = match options.device {
            DeviceName::All => 0,
            DeviceName::Cuda(ordinal, None) => ordinal.unwrap_or(0),
            other => return Err(format!("--needle is for a GPU or sim: give --device cuda, not {other}")),
        };
        let cuda = Cuda::new(ordinal).map_err(|error| error.to_string())?;
        let mut progress = Progress::new(1000);
        let mut tell = |what: &str, share: f64| progress.at((share * 1000.0) as u64, what);
        let records = needle::on_gpu(ordinal, cuda.hardware(), &interrupt::requested, &mut tell);
        progress.finish();
        (cuda.to_string(), records?)
    };
    for record in &records {
        let what = match (&record.likeness, &record.failure) {
            (Some(likeness), _) => {
                let word = if likeness.found { toned(Tone::Good, "found") } else { toned(Tone::Bad, "lost") };
                format!(
                    "{word:<8} needle {:.3} of its part, cosine {:.5}, relative error {:.2e}, RMSE {:.2e}",
                    likeness.needle, likeness.cosine, likeness.relative_error, likeness.rmse
                )
            }
            (None, why) => why.clone().unwrap_or_default(),
        };
        let needle::Record { head_dim, keys, depth, contender, .. } = record;
        say(&format!("{contender:<10} head_dim {head_dim:<4} {keys:>7} keys, needle at {depth:<7} {what}"));
    }
    let complete = !interrupt::requested();
    let mut ours = records.iter().filter(|record| record.contender == PLANNER).peekable();
    let any = ours.peek().is_some();
    let all = ours.all(|record| record.likeness.is_some_and(|likeness| likeness.found));
    options.json.write(
        "flashcore.needle/1",
        &Environment::read(),
        complete,
        &NeedleReport { device, records },
    )?;
    say(&format!("\n{:.1} s", started.elapsed().as_secs_f64()));
    Ok(match (any && all, complete) {
        (_, false) => Exit::CouldNot,
        (true, true) => Exit::Pass,
        (false, true) => Exit::Fail,
    })
}

/// A failure counts even when the run was cut short; a pass needs the whole run.
fn verdict(tallies: &[Tally], done: usize, total: usize) -> (Exit, String) {
    if tallies.iter().any(|tally| tally.failed > 0) {
        (Exit::Fail, "FAILED".into())
    } else if done < total {
        (Exit::CouldNot, format!("INTERRUPTED after {done} of {total} cases"))
    } else if tallies.iter().all(|tally| tally.passed == 0) {
        (Exit::CouldNot, "NOTHING RAN: every case was skipped".into())
    } else {
        (Exit::Pass, "PASSED".into())
    }
}

/// The cases of a tier that the filters let through.
fn select(passes: Passes, tier: Tier, filters: &[String]) -> Result<Vec<Case>, String> {
    let matches = |case: &Case, filter: &str| match filter.strip_prefix('=') {
        Some(name) => case.name == name,
        None => case.name.contains(filter),
    };
    let wanted = |case: &Case| filters.is_empty() || filters.iter().any(|filter| matches(case, filter));
    let all = corpus_of(passes);
    let chosen: Vec<Case> = all.iter().filter(|case| case.tier <= tier && wanted(case)).cloned().collect();
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    let more = all.iter().filter(|case| wanted(case)).count();
    Err(if more > 0 {
        format!("no quick case matches, but {more} of the full corpus do: add --full")
    } else {
        let names: Vec<&str> = all.iter().step_by(all.len() / 8).map(|case| case.name.as_str()).collect();
        format!("no case matches; names are such as {}", names.join(", "))
    })
}

impl Record {
    fn new(case: &Case, engine: &dyn Engine, outcome: Outcome) -> Self {
        let mut record = Self {
            case: case.name.clone(),
            engine: engine.name().to_string(),
            status: outcome.status(),
            problem: case.problem.to_string(),
            inputs: case.inputs.name(),
            wild: case.wild.map(Wild::name),
            arrangement: case.arrangement.name(),
            seed: case.seed,
            judgement: None,
            skipped: None,
            faults: Vec::new(),
            reproduce: reproduce(case, engine),
        };
        match outcome {
            Outcome::Passed(judgement) => record.judgement = Some(judgement),
            Outcome::Skipped(why) => record.skipped = Some(why),
            Outcome::Failed(faults) => record.faults = faults.iter().map(describe).collect(),
        }
        record
    }
}

fn table(tallies: &[Tally]) -> String {
    let heading =
        format!("\n{:<16} {:>7} {:>7} {:>7}   nearest to its bound", "engine", "passed", "skipped", "failed");
    let line = |tally: &Tally| {
        let nearest = match (tally.worst_share, &tally.worst_case) {
            (Some(share), Some(case)) => format!("{:.0} % of what is allowed: {case}", share * 100.0),
            _ => "-".into(),
        };
        let Tally { engine, passed, skipped, failed, .. } = tally;
        format!("\n{engine:<16} {passed:>7} {skipped:>7} {failed:>7}   {nearest}")
    };
    let skipped =
        |tally: &Tally| format!("\n  {} skipped by {}: {}", tally.skipped, tally.engine, tally.reasons());
    let why: String = tallies.iter().filter(|tally| tally.skipped > 0).map(skipped).collect();
    toned(Tone::Strong, &heading) + &tallies.iter().map(line).collect::<String>() + &why
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(passed: usize, skipped: usize, failed: usize) -> Tally {
        Tally { passed, skipped, failed, ..Tally::new("x") }
    }

    #[test]
    fn one_failure_anywhere_fails_even_when_interrupted() {
        assert_eq!(verdict(&[tally(9, 0, 0), tally(8, 0, 1)], 9, 9).0, Exit::Fail);
        assert_eq!(verdict(&[tally(3, 0, 1)], 4, 9).0, Exit::Fail);
    }

    #[test]
    fn only_a_whole_run_in_which_something_ran_passes() {
        assert_eq!(verdict(&[tally(9, 0, 0), tally(2, 7, 0)], 9, 9).0, Exit::Pass);
        assert_eq!(verdict(&[tally(4, 0, 0)], 4, 9).0, Exit::CouldNot);
        assert_eq!(verdict(&[tally(0, 9, 0)], 9, 9).0, Exit::CouldNot);
    }

    #[test]
    fn a_filter_holds_or_with_an_equals_sign_is_the_name() {
        let select = |passes: &str, tier, filters: &[&str]| {
            let filters: Vec<String> = filters.iter().map(ToString::to_string).collect();
            super::select(passes.parse().unwrap(), tier, &filters).map(|cases| cases.len())
        };
        assert_eq!(select("forward", Tier::Quick, &["lengths/self-len7-f16"]), Ok(1));
        assert_eq!(select("both", Tier::Quick, &["lengths/self-len7-f16"]), Ok(2));
        assert!(select("forward", Tier::Quick, &["lengths/self-len"]).unwrap() > 20);
        assert!(select("forward", Tier::Quick, &["=lengths/self-len"]).is_err());
        assert!(select("forward", Tier::Full, &[]) > select("forward", Tier::Quick, &[]));
    }
}
