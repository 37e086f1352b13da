//! `flashcore compare`: a gate against regressions, by two reports of `flashcore bench`.

use std::path::{Path, PathBuf};

use clap::Args;

use super::screen::{Tone, say, toned};
use super::{Exit, percent};
use crate::evidence::compare::{Change, Changes, Gate, compare as changes};
use crate::evidence::{Document, Environment, kept, saved::Saved};
use crate::stats::{MARGIN, Verdict};

#[derive(Args)]
#[command(after_help = "\
The exit code is the gate's: 0 nothing is slower by more than --fail-on, 1 something surely is, 2 the samples do not say. By \
the kernel clock times are compared as they are; by the call clock of a CPU, by a peer's times where both runs have one.")]
pub struct Options {
    /// The earlier run: a report that bench --json wrote, or a name that bench --save-baseline kept
    #[arg(value_name = "BASE")]
    base: String,
    /// The later run: a report that bench --json wrote
    #[arg(value_name = "FILE")]
    new: PathBuf,
    /// The slow-down that still passes; more is a failure
    #[arg(long, value_name = "PERCENT", default_value = "3%", value_parser = percent, allow_negative_numbers = true)]
    fail_on: f64,
    /// The smallest difference that matters
    #[arg(long, value_name = "PERCENT", value_parser = percent, allow_negative_numbers = true)]
    margin: Option<f64>,
    /// Where to write what was found
    #[arg(long, value_name = "FILE", default_value = "comparison.json")]
    json: PathBuf,
}

pub fn compare(options: &Options) -> Result<Exit, String> {
    let new = Saved::read(&options.new)?;
    let path = base(&options.base, &new)?;
    let margin = options.margin.unwrap_or(MARGIN);
    let found = changes(&Saved::read(&path)?, &new, options.fail_on, margin)
        .map_err(|why| format!("{} cannot be compared with: {why}", path.display()))?;
    say(&describe(&found));
    let environment = Environment::read();
    let document = Document::new("flashcore.comparison/1", &environment, true, &found);
    kept::write_json(&options.json, &document)?;
    Ok(match found.gate {
        Gate::Pass if new.complete => Exit::Pass,
        Gate::Regression => Exit::Fail,
        Gate::Pass | Gate::Undecided => Exit::CouldNot,
    })
}

/// The file of the earlier run: itself, or what was kept under its name for the machine of the later one.
fn base(base: &str, new: &Saved) -> Result<PathBuf, String> {
    if Path::new(base).is_file() {
        return Ok(base.into());
    }
    let machine = new.machine();
    let kept = kept::path("baselines", &machine, &kept::baseline_name(base)?)?;
    if kept.is_file() {
        return Ok(kept);
    }
    Err(format!(
        "there is neither a file {base} nor a baseline of that name for {machine}; flashcore bench --save-baseline {base} \
         keeps one"
    ))
}

fn describe(changes: &Changes) -> String {
    let commit = |commit: &Option<String>| {
        commit
            .as_ref()
            .map_or_else(String::new, |hash| format!(" at {}", hash.chars().take(9).collect::<String>()))
    };
    let mut lines = vec![toned(
        Tone::Strong,
        &format!(
            "\nagainst the run of {}{}, {} clock; more than {:.3} % slower is a failure",
            changes.base_created,
            commit(&changes.base_commit),
            changes.clock,
            changes.fail_on * 100.0
        ),
    )];
    lines.extend(changes.changes.iter().map(line));
    if !changes.not_measured.is_empty() {
        lines.push(format!("  not timed now: {}", changes.not_measured.join(", ")));
    }
    let count = |gate: Gate| changes.changes.iter().filter(|change| change.gate == gate).count();
    let (regressions, open) = (count(Gate::Regression), count(Gate::Undecided));
    lines.push(match changes.gate {
        Gate::Pass => toned(Tone::Good, "PASS: nothing got slower by more than that"),
        Gate::Regression => {
            toned(Tone::Bad, &format!("REGRESSION in {regressions} of {}", changes.changes.len()))
        }
        Gate::Undecided => toned(Tone::Bad, &format!("UNDECIDED in {open} of {}", changes.changes.len())),
    });
    lines.join("\n")
}

fn line(change: &Change) -> String {
    let who = format!("  {} {}", change.cell, change.contender);
    let (Some(ratio), Some(interval)) = (change.change, change.interval) else {
        return format!("{who}: cannot be compared: {}", change.why.as_deref().unwrap_or("no samples"));
    };
    let time = |us: Option<f64>| us.map_or_else(|| "-".into(), |us| format!("{us:.2} µs"));
    let signed = |ratio: f64| format!("{:+.1} %", (ratio - 1.0) * 100.0);
    let words = match change.verdict {
        Verdict::Faster => toned(Tone::Good, "FASTER"),
        Verdict::Slower => toned(Tone::Bad, "SLOWER"),
        other => other.to_string(),
    };
    let relative =
        change.relative_to.as_ref().map_or_else(String::new, |peer| format!(", measured by {peer}'s time"));
    format!(
        "{who}: {} before, {} now: {} [{}, {}] of its time, {words}{relative}",
        time(change.base_us),
        time(change.new_us),
        signed(ratio),
        signed(interval.low),
        signed(interval.high),
    )
}
