//! `flashcore against-itself`: how often the verdict is wrong, on this very machine.

use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{Cells, Pace, Place, Task};
use crate::bench::itself::{AgainstItself, Repetitions, TIMES};
use crate::cli::screen::{Progress, Tone, say, toned};
use crate::cli::{EightBits, Exit, Json, percent};
use crate::evidence::{Environment, schemas};
use crate::interrupt;

/// The most time for one comparison.
const A_COMPARISON: Duration = Duration::from_secs(1);

#[derive(Args)]
#[command(mut_arg("shapes", |shapes| shapes.required(true)), after_help = "\
Ours is compared with itself by the whole procedure of flashcore bench. Without a handicap FASTER and SLOWER may each be said \
in 3 of 100 comparisons; with one of at least the margin, SLOWER must be said in 9 of 10.")]
pub struct Options {
    #[command(flatten)]
    cells: Cells,
    #[command(flatten)]
    eight: EightBits,
    /// How often to compare
    #[arg(long, value_name = "N", default_value_t = TIMES, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    times: u64,
    /// Plant a slow-down in one side, such as 2%
    #[arg(long, value_name = "PERCENT", value_parser = percent, default_value = "0%")]
    handicap: f64,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    pace: Pace,
    /// Exactly N rounds per comparison
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    samples: Option<u32>,
    #[command(flatten)]
    json: Json,
}

#[derive(Serialize)]
struct Report<'a> {
    cells: &'a [AgainstItself],
}

pub fn against_itself(options: &Options) -> Result<Exit, String> {
    options.json.check()?;
    let environment = Environment::read();
    let rounds = options.samples.map(|samples| samples as usize);
    let members = options.cells.members(options.eight)?;
    let task = Task { rounds, ..Task::new(members, &options.place, options.pace.margin()?) };
    let repetitions = Repetitions { times: options.times as usize, handicap: 1.0 + options.handicap };
    let all = repetitions.times * task.members.len();
    let budget = options.pace.budget.map_or(A_COMPARISON, |budget| budget / all.max(1) as u32);
    interrupt::finish_steps(|| {});
    let mut progress = Progress::new(all as u64);
    let bench = task.start(&environment, &mut |what| progress.at(0, what))?;
    let mut found = Vec::new();
    for (i, member) in task.members.iter().enumerate() {
        let done = i * repetitions.times;
        let mut tell = |n: usize| progress.at((done + n) as u64, &member.cell.label());
        found.push(bench.against_itself(member, repetitions, budget, &interrupt::requested, &mut tell)?);
    }
    interrupt::finishing();
    progress.finish();
    let complete = !interrupt::requested();
    for cell in &found {
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
    options.json.write(schemas::AGAINST_ITSELF, &environment, complete, &Report { cells: &found })?;
    Ok(if !found.iter().all(AgainstItself::passed) {
        Exit::Fail
    } else if complete {
        Exit::Pass
    } else {
        Exit::CouldNot
    })
}
