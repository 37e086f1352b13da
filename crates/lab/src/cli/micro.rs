//! `flashcore micro`: what the pieces of kernels cost, schedules ranked by that cost, and how good the ranking is.

use std::path::{Path, PathBuf};

use clap::Args;
use flashcore::cuda::Cuda;
use flashcore::plan::{Hardware, Kernel, Target};
use rayon::prelude::*;
use serde::Serialize;

use super::Exit;
use super::screen::{Tone, say, toned};
use crate::evidence::{Document, Environment};
use crate::files;
use crate::micro::{self, Costs, Measured, Piece, rank_correlation};
use crate::rng::Rng;
use crate::search::config;
use crate::search::gates::Gates;
use crate::search::journal;
use crate::search::kernels::{Assembler, KernelGates, space};

#[derive(Args)]
#[command(after_help = "\
On a GPU each piece is timed by the multiprocessors' own clock. Without one the simulator counts its instructions, and \
costs are nominal; the file says which. With the journal of a search the order by the model is compared with the times that \
the search measured: a rank correlation of 1 is the same order, 0 is none, and what is not known is null.")]
pub struct Options {
    /// The case whose schedules are ordered
    #[arg(value_parser = config::target, default_value = "mission")]
    shape: config::Target,
    /// Without this machine's GPU: a typical one of sm_80, sm_89 or sm_90a
    #[arg(long, value_parser = super::inspect::target)]
    target: Option<Target>,
    /// The kernel; the target's best by default
    #[arg(long, value_name = "NAME")]
    kernel: Option<Kernel>,
    /// Schedules that are drawn at random and ordered
    #[arg(long, value_name = "N", default_value_t = 32)]
    sample: usize,
    /// The journal of a search for the same case, whose times the order is compared with
    #[arg(long, value_name = "journal.jsonl")]
    journal: Option<PathBuf>,
    /// Where to write the result
    #[arg(long, value_name = "FILE", default_value = "micro_best.json")]
    out: PathBuf,
}

/// Schedules that the file names as the best.
const BEST: usize = 8;

#[derive(Serialize)]
struct Ranked {
    schedule: String,
    /// Scheduler cycles per pair of a query and a key, by the model.
    predicted: f64,
    /// Microseconds in the journal; absent where it was not timed.
    measured_us: Option<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    device: String,
    case: String,
    pieces: &'a [Measured],
    costs: &'a Costs,
    /// The best by the model.
    top: Vec<&'a Ranked>,
    ranked: &'a [Ranked],
    /// Rank correlation of the model's order with the measured times; null where there are none.
    rank_correlation: Option<f64>,
    compared: usize,
}

pub fn micro(options: &Options) -> Result<Exit, String> {
    let cuda = if options.target.is_some() { None } else { Cuda::new(0).ok() };
    let hardware = match (&cuda, options.target) {
        (Some(cuda), _) => cuda.hardware().clone(),
        (None, target) => Hardware::typical(target.unwrap_or(Target::Sm90a)),
    };
    let pieces = pieces(&hardware, cuda.as_ref())?;
    let costs = Costs::of(&pieces);
    let ranked = rank(options, &hardware, &costs)?;
    let timed: Vec<(f64, f64)> =
        ranked.iter().filter_map(|it| Some((it.predicted, it.measured_us?))).collect();
    let correlation = rank_correlation(&timed);
    let report = Report {
        device: hardware.name.clone(),
        case: options.shape.cell.label(),
        pieces: &pieces,
        costs: &costs,
        top: ranked.iter().take(BEST).collect(),
        ranked: &ranked,
        rank_correlation: correlation,
        compared: timed.len(),
    };
    show(&report);
    let environment = Environment::read();
    let document = Document::new("flashcore.micro/1", &environment, true, &report);
    files::write_whole(&options.out, |out| {
        serde_json::to_writer_pretty(&mut *out, &document)?;
        out.write_all(b"\n")
    })
    .map_err(|error| files::explain("write", &options.out, &error))?;
    say(&format!("written: {}", options.out.display()));
    Ok(Exit::Pass)
}

/// Every piece, counted, and timed where there is a GPU.
fn pieces(hardware: &Hardware, cuda: Option<&Cuda>) -> Result<Vec<Measured>, String> {
    let all = Piece::all(hardware.target);
    let mut measured =
        all.par_iter().map(|&piece| micro::count(piece, hardware.target)).collect::<Result<Vec<_>, _>>()?;
    if let Some(cuda) = cuda {
        for (piece, measured) in all.iter().zip(&mut measured) {
            measured.cycles = Some(micro::time(*piece, cuda)?);
        }
    }
    Ok(measured)
}

/// Schedules by the model, cheapest first: those of the journal and some that are drawn at random.
fn rank(options: &Options, hardware: &Hardware, costs: &Costs) -> Result<Vec<Ranked>, String> {
    let problem = options.shape.cell.problem();
    let best = if Kernel::Sm90Fwd.runs_on(hardware.target) { Kernel::Sm90Fwd } else { Kernel::Sm80Fwd };
    let space = space(options.kernel.unwrap_or(best));
    let gates =
        KernelGates::new(hardware.clone(), vec![problem], Assembler::Absent).with_costs(costs.clone());
    let times = match &options.journal {
        Some(path) => measured_times(path, &options.shape.cell.label())?,
        None => Vec::new(),
    };
    let mut candidates: Vec<String> = times.iter().map(|(schedule, _)| schedule.clone()).collect();
    let fitting: Vec<&String> =
        space.members().iter().filter(|candidate| gates.check(candidate, 0).is_ok()).collect();
    let mut rng = Rng::new(1);
    for _ in 0..options.sample.min(fitting.len()) {
        let drawn = fitting[rng.below(fitting.len())];
        if !candidates.contains(drawn) {
            candidates.push(drawn.clone());
        }
    }
    let drawn = candidates.len();
    let mut ranked: Vec<Ranked> = candidates
        .into_par_iter()
        .filter_map(|schedule| {
            gates.simulate(&schedule, 0).ok()?;
            let predicted = gates.guess(&schedule)?;
            let measured_us = times.iter().find(|(known, _)| *known == schedule).map(|(_, us)| *us);
            Some(Ranked { schedule, predicted, measured_us })
        })
        .collect();
    if ranked.len() < drawn {
        say(&format!(
            "{} of {drawn} schedules were refused by the simulator and have no place in the order",
            drawn - ranked.len()
        ));
    }
    ranked.sort_by(|a, b| a.predicted.total_cmp(&b.predicted));
    Ok(ranked)
}

/// The times of a case in a journal.
fn measured_times(path: &Path, case: &str) -> Result<Vec<(String, f64)>, String> {
    let (state, damage) = journal::read(path)?;
    if !damage.is_none() {
        say(&format!("{}: {damage}", path.display()));
    }
    let cases = state.task.as_ref().map(|task| task.cases.clone()).unwrap_or_default();
    let at = cases.iter().position(|known| known == case).ok_or_else(|| {
        format!("{} is of a search for {}, not for {case}", path.display(), cases.join(", "))
    })?;
    let time = |(schedule, record): (&String, &journal::Record)| {
        let standing = record.standings.iter().find(|standing| standing.case == at)?;
        Some((schedule.clone(), standing.us))
    };
    Ok(state.records.iter().filter_map(time).collect())
}

/// The costs that a file of this command holds.
pub fn costs(path: &Path) -> Result<Costs, String> {
    let text = files::read_text(path)?;
    let mut file: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    serde_json::from_value(file["costs"].take())
        .map_err(|error| format!("{} holds no costs: {error}", path.display()))
}

fn show(report: &Report<'_>) {
    say(&toned(
        Tone::Strong,
        &format!(
            "{:<20} {:>10} {:>13} {:>7} {:>10}",
            "piece", "cycles", "instructions", "passes", "conflicts"
        ),
    ));
    for it in report.pieces {
        let cycles = it.cycles.map_or("-".into(), |cycles| format!("{cycles:.2}"));
        say(&format!(
            "{:<20} {cycles:>10} {:>13.1} {:>7.1} {:>10.1}",
            it.piece, it.instructions_per_turn, it.passes_per_turn, it.conflicts_per_turn
        ));
    }
    let how = if report.costs.measured { "measured" } else { "nominal: no GPU here" };
    say(&toned(
        Tone::Strong,
        &format!("\nthe best of {} schedules by the model ({how}), for {}", report.ranked.len(), report.case),
    ));
    for it in &report.top {
        let time = it.measured_us.map_or(String::new(), |us| format!("  {us:.2} µs"));
        say(&format!("{:>8.3}  {}{time}", it.predicted, it.schedule));
    }
    match report.rank_correlation {
        Some(rho) => say(&format!("rank correlation with {} measured times: {rho:.2}", report.compared)),
        None => say("what the order is worth is not known: give the --journal of a search on the GPU"),
    }
}
