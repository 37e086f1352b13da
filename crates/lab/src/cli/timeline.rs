//! `flashcore profile --trace`: what each role of a kernel's blocks does when, by stamps of the kernel itself.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use flashcore::Device;
use flashcore::cuda::Cuda;
use flashcore::plan::Plan;
use flashcore::sim::{AsyncMode, Config, SimGpu};
use flashcore_clock::traced;
use serde::Serialize;

use super::inspect::reduced;
use super::screen::{Progress, Tone, say, toned};
use super::{Exit, Json, check_file};
use crate::evidence::Environment;
use crate::guarded::Arrangement;
use crate::inputs::Distribution;
use crate::operands::Operands;
use crate::timeline::{NO_BLOCK, Row, Timeline, Unit, call_ns, tick_ns};
use crate::{files, memory};

/// How far the stamps may be from the kernel clock.
const AGREES_WITHIN: f64 = 0.10;
/// Multiprocessors of the simulated GPU: so few that persistent blocks have several tiles.
const SIMULATED_SMS: u32 = 2;
/// Stamps that a role of a block has room for in the simulator.
const SIMULATED_STAMPS: u32 = 1 << 12;

/// Where a timeline is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum On {
    /// This machine's GPU
    Cuda,
    /// The simulator: a few tiles of the shape, in instructions
    Sim,
}

#[derive(Args)]
pub struct Options {
    /// Write a timeline of the kernel to FILE, in the Chrome trace format that Perfetto opens
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Draw the timeline of one multiprocessor as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Where the timeline is taken
    #[arg(long, value_enum, default_value = "cuda")]
    device: On,
}

impl Options {
    /// Whether a timeline is asked for.
    pub fn wanted(&self) -> bool {
        self.trace.is_some() || self.svg.is_some()
    }

    /// Whether no GPU is to be asked.
    pub fn simulates(&self) -> bool {
        self.device == On::Sim
    }
}

/// What the stamps cost, and how they compare with the kernel clock.
#[derive(Serialize)]
struct Clocks {
    /// The kernel clock.
    kernel_us: f64,
    /// The kernel clock of the kernel with stamps.
    stamped_us: f64,
    /// How much longer it takes with stamps, as a share.
    stamps_cost: f64,
    /// From the end of the call before to the end of this one, by the stamps.
    call_us: f64,
    /// The same as a share of the kernel clock with stamps.
    agreement: f64,
    agrees: bool,
    /// How well the clocks of two multiprocessors are aligned, in nanoseconds: one tick of the clock that they share.
    tick_ns: Option<u64>,
    /// Registers per thread and bytes of local memory, without stamps and with them.
    registers: [(u32, u32); 2],
}

#[derive(Serialize)]
struct Report {
    problem: String,
    device: String,
    schedule: String,
    unit: &'static str,
    /// How long the call took, in this unit.
    length: f64,
    clocks: Option<Clocks>,
    multiprocessors: usize,
    /// Blocks that were launched, and how many of them were recorded.
    blocks: (u32, u32),
    stamps: usize,
    stamps_lost: u64,
    /// Where the time goes, by role.
    rows: Vec<Row>,
}

pub fn timeline(
    options: &Options,
    json: &Json,
    plan: &Plan,
    device: &str,
    cuda: Option<&Cuda>,
) -> Result<Exit, String> {
    for (option, path) in [("--trace", &options.trace), ("--svg", &options.svg)] {
        path.as_deref().map_or(Ok(()), |path| check_file(option, path))?;
    }
    if plan.main().schedule.roles().is_empty() {
        let kernel = plan.kernel();
        return Err(format!("{kernel} has no stamps: take --kernel sm80_fwd or --kernel sm90_fwd"));
    }
    let mut progress = Progress::new(3);
    let (timeline, report) = match (options.device, cuda) {
        (On::Sim, _) => simulate(plan, device, &mut progress)?,
        (On::Cuda, Some(cuda)) => measure(plan, device, cuda, &mut progress)?,
        (On::Cuda, None) => {
            return Err(
                "there is no GPU here to take a timeline on: take --device sim for one in instructions"
                    .into(),
            );
        }
    };
    progress.at(2, "writing");
    let about = format!("{} on {}, {}", report.problem, report.device, report.schedule);
    if let Some(path) = &options.trace {
        files::write_whole(path, |out| timeline.write_trace(&about, &mut std::io::BufWriter::new(out)))
            .map_err(|error| files::explain("write", path, &error))?;
    }
    if let Some(path) = &options.svg {
        let title = format!("{} on {}", report.problem, report.device);
        let text = timeline.picture(&title);
        files::write_whole(path, |out| out.write_all(text.as_bytes()))
            .map_err(|error| files::explain("write", path, &error))?;
    }
    progress.finish();
    say(&text(&timeline, &report, options));
    json.write("flashcore.timeline/1", &Environment::read(), true, &report)?;
    let agrees = report.clocks.as_ref().is_none_or(|clocks| clocks.agrees);
    Ok(if agrees { Exit::Pass } else { Exit::Fail })
}

/// The inputs of a problem.
fn draw(problem: &flashcore::Problem) -> Result<Operands, String> {
    memory::check(problem, memory::to_judge(problem))?;
    Ok(Operands::draw(*problem, None, Arrangement::Bhsd, Distribution::Normal, 0))
}

/// On the simulator: as much of the problem as it runs in a moment.
fn simulate(plan: &Plan, device: &str, progress: &mut Progress) -> Result<(Timeline, Report), String> {
    let problem = reduced(plan);
    let operands = draw(&problem)?;
    progress.at(1, "simulating");
    // Copies and products take no time of their own, as an instruction does.
    let config = Config { async_mode: AsyncMode::Early, ..Config::default() };
    let gpu = SimGpu::new(plan.target).with_config(config).with_sms(SIMULATED_SMS);
    let gpu = gpu.with_schedule(plan.main().schedule).with_trace(SIMULATED_STAMPS);
    operands
        .attention()
        .run(&Device::sim(gpu.clone()), &operands.q.view(), &operands.k.view(), &operands.v.view())
        .map_err(|error| format!("the simulator refuses this kernel: {error}"))?;
    let timeline = Timeline::simulated(plan.main().schedule.roles(), &gpu.last_trace())?;
    let made = gpu.plan(&problem).map_err(|error| error.to_string())?;
    let blocks = made.main().grid.iter().product();
    let report = report(&made, &format!("the simulated {device}"), &timeline, None, (blocks, blocks));
    Ok((timeline, report))
}

/// On a GPU: the replay of middle length.
fn measure(
    plan: &Plan,
    device: &str,
    cuda: &Cuda,
    progress: &mut Progress,
) -> Result<(Timeline, Report), String> {
    let operands = draw(&plan.problem)?;
    progress.at(1, "running the kernel with stamps and without");
    let recorded = traced::record(cuda, plan, &operands)?;
    let mut replays = Vec::new();
    for replay in &recorded.replays {
        replays.push((call_ns(replay)?, replay));
    }
    replays.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (_, middle) = replays[replays.len() / 2];
    let timeline = Timeline::measured(plan.main().schedule.roles(), middle)?;
    let traced::Recorded { plain_us, stamped_us, registers, blocks, .. } = recorded;
    let agreement = timeline.length() / stamped_us;
    let clocks = Clocks {
        kernel_us: plain_us,
        stamped_us,
        stamps_cost: stamped_us / plain_us - 1.0,
        call_us: timeline.length(),
        agreement,
        agrees: (agreement - 1.0).abs() <= AGREES_WITHIN,
        tick_ns: tick_ns(middle),
        registers,
    };
    let report = report(plan, device, &timeline, Some(clocks), blocks);
    Ok((timeline, report))
}

fn report(
    plan: &Plan,
    device: &str,
    timeline: &Timeline,
    clocks: Option<Clocks>,
    blocks: (u32, u32),
) -> Report {
    let mut sms: Vec<u32> = timeline.lanes.iter().map(|lane| lane.sm).collect();
    sms.dedup();
    Report {
        problem: plan.problem.to_string(),
        device: device.into(),
        schedule: plan.main().schedule.to_string(),
        unit: timeline.unit.name(),
        length: timeline.length(),
        clocks,
        multiprocessors: sms.len(),
        blocks,
        stamps: timeline.lanes.iter().map(|lane| lane.slices.len()).sum(),
        stamps_lost: timeline.lost,
        rows: timeline.table(|role| role),
    }
}

fn text(timeline: &Timeline, report: &Report, options: &Options) -> String {
    let mut lines = vec![format!("{} on {}\n{}", report.problem, report.device, report.schedule)];
    if let Some(clocks) = &report.clocks {
        let Clocks { kernel_us, stamped_us, stamps_cost, call_us, agreement, agrees, tick_ns, registers } =
            clocks;
        lines.push(format!(
            "\nkernel clock {kernel_us:.2} µs, with stamps {stamped_us:.2} µs: the stamps cost {:.1} %",
            100.0 * stamps_cost
        ));
        let tone = if *agrees { Tone::Good } else { Tone::Bad };
        let share = 100.0 * agreement;
        lines.push(toned(
            tone,
            &format!("parts        {call_us:.2} µs, {share:.1} % of the kernel clock with stamps"),
        ));
        let [(plain, spilled), (stamped, more)] = registers;
        lines.push(format!(
            "registers    {plain}, with stamps {stamped}; local memory {spilled} bytes, with stamps {more}"
        ));
        let within = tick_ns.map_or("an unknown time".into(), |ns| format!("{ns} ns"));
        lines.push(format!(
            "aligned      multiprocessors within {within}, the tick of the clock that they share"
        ));
    }
    let (all, recorded) = report.blocks;
    let lost =
        if report.stamps_lost > 0 { format!(", {} without room", report.stamps_lost) } else { String::new() };
    let some = if recorded < all { format!(" (of {all})") } else { String::new() };
    lines.push(format!(
        "recorded     {recorded} blocks{some} on {} multiprocessors, {} sections{lost}",
        report.multiprocessors, report.stamps
    ));
    if let Some(path) = &options.trace {
        let mut sms: Vec<u32> = timeline.shown().iter().map(|lane| lane.sm).collect();
        sms.dedup();
        lines.push(format!(
            "trace        {}: {} multiprocessors, those that end last; open it at https://ui.perfetto.dev",
            path.display(),
            sms.len()
        ));
    }
    let unit = match timeline.unit {
        Unit::Microseconds => "µs",
        Unit::Instructions => "k instr",
    };
    let heading = format!(
        "\n{:<10} {:<12} {:>9} {:>13} {:>13} {:>7}",
        "role",
        "section",
        "count",
        format!("each, {unit}"),
        format!("all, {unit}"),
        "share"
    );
    lines.push(toned(Tone::Strong, &heading));
    let mut role = String::new();
    for row in timeline.table(kind) {
        let name = if row.role == role { "" } else { row.role.as_str() };
        let each = if row.section == NO_BLOCK { String::new() } else { format!("{:.3}", row.each) };
        let count = if row.section == NO_BLOCK { String::new() } else { row.count.to_string() };
        lines.push(format!(
            "{name:<10} {:<12} {count:>9} {each:>13} {:>13.3} {:>5.1} %",
            row.section,
            row.total,
            100.0 * row.share
        ));
        role.clone_from(&row.role);
    }
    lines.join("\n")
}

/// What a role is, without its number.
fn kind(role: &str) -> &str {
    role.split(' ').next().unwrap_or(role)
}
