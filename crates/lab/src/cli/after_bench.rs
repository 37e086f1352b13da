//! What `flashcore bench` does with a run when it is over: keep it, compare it with an earlier one, write its tables.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use serde_json::Value;

use super::screen::{Tone, say, toned};
use super::{Exit, Json};
use crate::evidence::compare::{Change, Changes, Gate, compare};
use crate::evidence::{Document, Environment};
use crate::evidence::{kept, saved::Saved};
use crate::stats::Verdict;
use crate::{files, interrupt, rbk};

#[derive(Args, Clone, Debug)]
pub struct AfterBench {
    /// Compare with an earlier run: a report that --json wrote, or a baseline by its name
    #[arg(long, value_name = "BASE")]
    compare: Option<String>,
    /// Compare that one with this report instead of running anything
    #[arg(long, value_name = "FILE", requires = "compare", conflicts_with_all = ["shapes", "matrix", "config"])]
    candidate: Option<PathBuf>,
    /// The slow-down against BASE that is still let pass; more is a failure
    #[arg(long, value_name = "PERCENT", default_value = "3%", value_parser = percent, requires = "compare",
          allow_negative_numbers = true)]
    fail_on: f64,
    /// Where to write what the comparison found
    #[arg(long, value_name = "FILE", default_value = "comparison.json", requires = "compare")]
    comparison: PathBuf,
    /// Keep this run under a name, for this machine, to compare later ones with
    #[arg(long, value_name = "NAME", value_parser = kept::baseline_name)]
    save_baseline: Option<String>,
}

/// A share as 3, 3% or 2.5%.
pub(super) fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>().ok();
    let share = number.map(|number| number / 100.0).filter(|share| (0.0..1.0).contains(share));
    share.ok_or_else(|| "give a percentage from 0 to 100, such as 3%".into())
}

impl AfterBench {
    /// The report that is compared in place of a run.
    pub(super) fn candidate(&self) -> Option<&Path> {
        self.candidate.as_deref()
    }

    /// Refuses what could only fail after the work is done.
    pub(super) fn check(&self) -> Result<(), String> {
        match &self.compare {
            Some(base) if !Path::new(base).exists() => kept::baseline_name(base).map(drop).map_err(|_| {
                format!("--compare {base}: there is no such file, and baselines have other names")
            }),
            _ => Ok(()),
        }
    }
}

/// What is said of a run that was interrupted.
pub(super) const INTERRUPTED: &str =
    "interrupted: what was measured until then is kept, and the rest is absent";

/// A run that is over.
pub(super) struct Finished<'a, T: Serialize> {
    pub schema: &'a str,
    pub environment: &'a Environment,
    pub complete: bool,
    pub report: &'a T,
    /// How the run itself ended.
    pub exit: Exit,
}

impl<T: Serialize> Finished<'_, T> {
    /// Writes, keeps and compares what was asked for.
    pub(super) fn conclude(
        &self,
        options: &AfterBench,
        json: &Json,
        config: Option<&rbk::Config>,
        margin: f64,
    ) -> Result<Exit, String> {
        let Finished { schema, environment, complete, report, exit } = *self;
        json.write(schema, environment, complete, report)?;
        if interrupt::requested() {
            say(&toned(Tone::Bad, INTERRUPTED));
        }
        if config.is_none() && options.save_baseline.is_none() && options.compare.is_none() {
            return Ok(exit);
        }
        let document = Document::new(schema, environment, complete, report);
        let document = serde_json::to_value(&document).map_err(|error| error.to_string())?;
        let run = Saved::of(&document)?;
        if let Some(config) = config {
            tables(config, &run, environment, complete)?;
        }
        // Before the run is kept, which may be under the very name.
        let compared = match &options.compare {
            Some(base) => Some(against(options, base, &run, margin)?),
            None => None,
        };
        if let Some(name) = &options.save_baseline {
            save(name, &run, &document, exit)?;
        }
        Ok(compared.map_or(exit, |gate| match (exit, gate) {
            (Exit::Fail, _) | (_, Gate::Regression) => Exit::Fail,
            (_, Gate::Undecided) => Exit::CouldNot,
            (_, Gate::Pass) if complete => Exit::Pass,
            (_, Gate::Pass) => Exit::CouldNot,
        }))
    }
}

/// Compares a report with an earlier one; nothing is run.
pub(super) fn compare_reports(options: &AfterBench, candidate: &Path, margin: f64) -> Result<Exit, String> {
    let base = options.compare.as_deref().ok_or("--candidate is compared with --compare BASE")?;
    Ok(match against(options, base, &Saved::read(candidate)?, margin)? {
        Gate::Pass => Exit::Pass,
        Gate::Regression => Exit::Fail,
        Gate::Undecided => Exit::CouldNot,
    })
}

fn against(options: &AfterBench, base: &str, run: &Saved, margin: f64) -> Result<Gate, String> {
    let path = if Path::new(base).is_file() {
        PathBuf::from(base)
    } else {
        let kept = kept::path("baselines", &run.machine(), base)?;
        if !kept.is_file() {
            return Err(format!(
                "there is neither a file {base} nor a baseline of that name for {}; --save-baseline {base} keeps one",
                run.machine()
            ));
        }
        kept
    };
    let changes = compare(&Saved::read(&path)?, run, options.fail_on, margin)
        .map_err(|why| format!("{} cannot be compared with: {why}", path.display()))?;
    say(&describe(&changes));
    let environment = Environment::read();
    let document = Document::new("flashcore.comparison/1", &environment, true, &changes);
    kept::write_json(&options.comparison, &document)?;
    Ok(changes.gate)
}

fn save(name: &str, run: &Saved, document: &Value, exit: Exit) -> Result<(), String> {
    if !run.complete || exit == Exit::Fail {
        return Err(format!("a run that is wrong or not complete is no baseline; {name} was not saved"));
    }
    let path = kept::keep("baselines", &run.machine(), name, document)?;
    say(&format!("kept as {name} for {}: {}", run.machine(), path.display()));
    Ok(())
}

fn tables(
    config: &rbk::Config,
    run: &Saved,
    environment: &Environment,
    complete: bool,
) -> Result<(), String> {
    let report = rbk::Report::new(config, run)?;
    let folder = &config.output_dir;
    std::fs::create_dir_all(folder).map_err(|error| files::explain("make", folder, &error))?;
    let text = |ending: &str, text: &str| {
        let path = rbk::path(config, ending);
        files::write_whole(&path, |out| out.write_all(text.as_bytes()))
            .map_err(|error| files::explain("write", &path, &error))
    };
    let mut written = Vec::new();
    if config.save_json {
        let document = Document::new("flashcore.rbk/1", environment, complete, &report);
        kept::write_json(&rbk::path(config, "json"), &document)?;
        written.push("json");
    }
    if config.save_csv {
        text("csv", &report.csv())?;
        written.push("csv");
    }
    if config.save_markdown {
        text("md", &report.markdown())?;
        written.push("md");
    }
    if !written.is_empty() {
        say(&format!("written: rbk_report.{{{}}} in {}", written.join(","), folder.display()));
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_read_with_and_without_their_sign_and_never_negative() {
        assert_eq!((percent("3%"), percent("2.5")), (Ok(0.03), Ok(0.025)));
        for bad in ["-3%", "100%", "three", "%"] {
            assert!(percent(bad).is_err(), "{bad}");
        }
    }
}
