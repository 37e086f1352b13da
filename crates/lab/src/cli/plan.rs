//! `flashcore plan`: what would run for a shape, and with --explain, why.

use clap::Args;
use flashcore::cuda::Cuda;
use flashcore::plan::{Hardware, Launch, Plan, Target};
use flashcore::tuned::{self, Table};
use flashcore::{DType, Mask, Pass, Problem, cpu};
use serde::Serialize;

use super::screen::{Tone, say, toned};
use super::{EightBits, Exit, Json};
use crate::evidence::Environment;
use crate::search::config;

#[derive(Args)]
pub struct Options {
    /// A shape by name, or BxHxSxD, with :causal, :full, :f16 or :bf16 after it; or a whole problem, such as '16x32/8x4096x128
    /// bf16 causal packed=18632' or '8x32/8x1/4096x128 bf16 key-lengths page=16/2048'
    #[arg(value_parser = asked)]
    shape: Asked,
    /// With a causal mask
    #[arg(long)]
    causal: bool,
    /// f16, bf16, f32 or f8
    #[arg(long)]
    dtype: Option<DType>,
    #[command(flatten)]
    eight: EightBits,
    /// forward or backward (gradients)
    #[arg(long, default_value = "forward")]
    pass: Pass,
    /// Plan for a typical GPU of a target, such as sm_90a, rather than for this machine's
    #[arg(long, value_parser = super::inspect::target)]
    target: Option<Target>,
    /// With --target, the GPU's name, by which the tuned table is looked up
    #[arg(long, value_name = "NAME", requires = "target")]
    name: Option<String>,
    /// Say where the choice came from, and what there was to choose from
    #[arg(long)]
    explain: bool,
    #[command(flatten)]
    json: Json,
}

/// What a plan is wanted for.
#[derive(Clone)]
enum Asked {
    Shape(config::Target),
    Problem(Problem),
}

/// A shape, or a problem, which has several words.
fn asked(text: &str) -> Result<Asked, String> {
    if text.contains(' ') {
        return text.parse().map(Asked::Problem).map_err(|error: flashcore::Error| error.to_string());
    }
    config::target(text).map(Asked::Shape)
}

#[derive(Serialize)]
struct Report {
    problem: String,
    device: String,
    /// Absent for the CPU engine.
    kernel: Option<&'static str>,
    schedule: String,
    reason: String,
    /// Absent for the CPU engine.
    grid: Option<[u32; 3]>,
    /// Every launch, in order; none for the CPU engine.
    launches: Vec<LaunchRow>,
    /// Memory that the launches need in addition to the tensors.
    workspace_bytes: usize,
    /// What the planner chooses where no table says otherwise.
    untuned_schedule: Option<String>,
    /// Entries of the tables for this device, whatever their problems.
    tuned_entries: Vec<String>,
    /// Where the user's table would be.
    user_table: Option<String>,
}

/// One launch of a plan.
#[derive(Serialize)]
struct LaunchRow {
    kernel: &'static str,
    schedule: String,
    grid: [u32; 3],
    threads: u32,
    cluster: u32,
    shared_bytes: u32,
    /// Whether it may start before the previous launch has ended.
    programmatic: bool,
}

impl LaunchRow {
    fn of(launch: &Launch) -> Self {
        let Launch { schedule, grid, threads, cluster, shared_bytes, .. } = *launch;
        Self {
            kernel: schedule.kernel().name(),
            schedule: schedule.to_string(),
            grid,
            threads,
            cluster,
            shared_bytes,
            programmatic: schedule.is_programmatic(),
        }
    }
}

pub fn plan(options: &Options) -> Result<Exit, String> {
    options.json.check()?;
    let problem = match &options.shape {
        Asked::Shape(config::Target { cell, .. }) => {
            let mask = if options.causal { Mask::Causal } else { cell.mask };
            let types = options.eight.types(options.dtype.unwrap_or(cell.types.dtype));
            types.problem(cell.shape, mask).with_pass(options.pass)
        }
        Asked::Problem(problem) if options.causal || options.dtype.is_some() => {
            return Err(format!(
                "'{problem}' says its mask and dtype itself: leave out --causal and --dtype"
            ));
        }
        Asked::Problem(problem) if problem.pass == Pass::Forward => problem.with_pass(options.pass),
        Asked::Problem(problem) => *problem,
    };
    let problem = problem.check().map_err(|error| error.to_string())?;
    let hardware = match options.target {
        Some(target) => {
            let typical = Hardware::typical(target);
            let name = options.name.clone().unwrap_or(typical.name);
            Some(Hardware { name, ..typical })
        }
        None => Cuda::new(0).ok().map(|cuda| cuda.hardware().clone()),
    };
    let (text, report) = match hardware {
        Some(hardware) => on_gpu(&problem, &hardware, options.explain)?,
        None => on_cpu(&problem, options.explain),
    };
    say(&text);
    options.json.write("flashcore.plan/1", &Environment::read(), true, &report)?;
    Ok(Exit::Pass)
}

fn on_gpu(problem: &Problem, hardware: &Hardware, explain: bool) -> Result<(String, Report), String> {
    let say = |error: flashcore::Error| error.to_string();
    let table = Table::current();
    let plan = Plan::choose_by(problem, hardware, table).map_err(say)?;
    let untuned = Plan::choose_by(problem, hardware, &Table::default()).map_err(say)?;
    let of_device =
        |name: &str| name.trim_start_matches("NVIDIA ") == hardware.name.trim_start_matches("NVIDIA ");
    let entries: Vec<String> = table
        .entries()
        .iter()
        .filter(|(entry, _)| of_device(&entry.device) && entry.target == hardware.target)
        .map(|(entry, origin)| format!("{} from {origin}: {}", entry.problem, entry.schedule))
        .collect();
    let report = Report {
        problem: problem.to_string(),
        device: hardware.name.clone(),
        kernel: Some(plan.kernel().name()),
        schedule: plan.main().schedule.to_string(),
        reason: plan.reason.clone(),
        grid: Some(plan.main().grid),
        launches: plan.launches.iter().map(LaunchRow::of).collect(),
        workspace_bytes: plan.workspace_bytes(),
        untuned_schedule: Some(untuned.main().schedule.to_string()),
        tuned_entries: entries,
        user_table: tuned::user_file().map(|path| path.display().to_string()),
    };
    let mut text = plan.to_string();
    if explain {
        let mut lines = vec![toned(Tone::Strong, "\nwhere the choice came from")];
        if plan.main().schedule == untuned.main().schedule {
            lines.push("the planner's own rules; no entry of a tuned table changes them".into());
        } else {
            lines.push(plan.reason.clone());
            lines.push(format!("without it  {}\n            {}", untuned.main().schedule, untuned.reason));
        }
        let folder = report.user_table.as_deref().unwrap_or("none, for there is no cache folder");
        lines.push(format!(
            "tables      {} entries for {}; this machine's: {folder}",
            report.tuned_entries.len(),
            hardware.name
        ));
        lines.extend(report.tuned_entries.iter().map(|entry| format!("            {entry}")));
        text = format!("{text}\n{}", lines.join("\n"));
    }
    Ok((text, report))
}

fn on_cpu(problem: &Problem, explain: bool) -> (String, Report) {
    let engine = cpu::Engine::new();
    let schedule = engine.schedule(problem.head_dim, problem.head_dim_v).to_string();
    let reason = "there is no GPU here; tiles by the head dims, threads by the cores".to_string();
    let mut text =
        format!("problem   {problem}\nengine    cpu ({engine})\nschedule  {schedule}\nwhy       {reason}");
    if explain {
        text += "\ncode      ";
        text += &[engine.isa().name(), engine.why()].join(": ");
        text += "\ntables    the CPU engine reads none; for a GPU's plan give --target sm_90a";
    }
    let report = Report {
        problem: problem.to_string(),
        device: format!("cpu ({engine})"),
        kernel: None,
        schedule,
        reason,
        grid: None,
        launches: Vec::new(),
        workspace_bytes: 0,
        untuned_schedule: None,
        tuned_entries: Vec::new(),
        user_table: None,
    };
    (text, report)
}
