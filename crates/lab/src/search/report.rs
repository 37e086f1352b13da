//! What a search leaves for people: `leaderboard.json` and `evo_log.csv`, made from the journal alone.

use std::io::Write;
use std::path::Path;

use serde::Serialize;

use super::decide::Standing;
use super::journal::{Fate, State, Task};
use crate::evidence::{Document, Environment};
use crate::files;

/// The best schedule of a case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Leader {
    /// The case.
    pub case: String,
    /// The schedule.
    pub schedule: String,
    /// Whether the search found it, rather than beginning with it.
    pub found: bool,
    /// How many times faster than what the search began with; 1 for that itself.
    pub speed_up: f64,
    /// The standing that it was accepted by: measured on fresh data against the incumbent of that time.
    pub accepted_by: Option<Standing>,
}

/// One that was timed.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Timed<'a> {
    schedule: &'a str,
    speed_up: f64,
    #[serde(flatten)]
    fate: &'a Fate,
    by: &'a str,
    identity: &'a Option<String>,
    standings: &'a [Standing],
}

#[derive(Serialize)]
struct Leaderboard<'a> {
    task: &'a Task,
    leaders: Vec<Leader>,
    /// The best that were timed, accepted or not.
    timed: Vec<Timed<'a>>,
    candidates: usize,
    assembled: usize,
    refused: std::collections::BTreeMap<super::gates::Gate, usize>,
    quarantined: usize,
    duplicates: usize,
    accepted: usize,
    generations: usize,
}

/// The most candidates on the leaderboard.
const BEST: usize = 20;

/// The best schedule of each case.
pub fn leaders(state: &State) -> Vec<Leader> {
    let Some(task) = &state.task else { return Vec::new() };
    let leader = |case: usize| {
        let schedule = &state.incumbents[case];
        let standing = state.accepted.iter().rev().find(|(candidate, _)| candidate == schedule);
        let standing = standing.and_then(|(_, all)| all.iter().find(|standing| standing.case == case));
        Leader {
            case: task.cases[case].clone(),
            schedule: schedule.clone(),
            found: standing.is_some(),
            speed_up: state.gains[case],
            accepted_by: standing.copied(),
        }
    };
    (0..task.cases.len()).map(leader).collect()
}

/// Candidates that reached the assembler's gate and were let through it.
pub fn assembled(state: &State) -> usize {
    state.records.values().filter(|record| record.identity.is_some()).count()
}

/// Writes both files into a folder.
pub fn write(folder: &Path, state: &State, environment: &Environment, complete: bool) -> Result<(), String> {
    let Some(task) = &state.task else { return Ok(()) };
    let count = |is: fn(&Fate) -> bool| state.records.values().filter(|record| is(&record.fate)).count();
    let elites = state.elites();
    let timed = elites.iter().take(BEST).map(|(schedule, speed_up)| {
        let record = &state.records[schedule];
        Timed {
            schedule,
            speed_up: *speed_up,
            fate: &record.fate,
            by: &record.by,
            identity: &record.identity,
            standings: &record.standings,
        }
    });
    let board = Leaderboard {
        task,
        leaders: leaders(state),
        timed: timed.collect(),
        candidates: state.records.len(),
        assembled: assembled(state),
        refused: state.refused(),
        quarantined: count(|fate| matches!(fate, Fate::Quarantined { .. })),
        duplicates: count(|fate| matches!(fate, Fate::Duplicate { .. })),
        accepted: state.accepted.len(),
        generations: state.generations,
    };
    let document = Document::new("flashcore.leaderboard/1", environment, complete, &board);
    let path = folder.join("leaderboard.json");
    files::write_whole(&path, |out| {
        serde_json::to_writer_pretty(&mut *out, &document)?;
        out.write_all(b"\n")
    })
    .map_err(|error| files::explain("write", &path, &error))?;
    let path = folder.join("evo_log.csv");
    files::write_whole(&path, |out| log(out, state, task))
        .map_err(|error| files::explain("write", &path, &error))
}

/// One line per candidate; times in microseconds.
fn log(out: &mut dyn Write, state: &State, task: &Task) -> std::io::Result<()> {
    let mut columns: Vec<String> =
        ["schedule", "proposer", "fate", "gate", "why", "identity", "speed_up"].map(String::from).to_vec();
    for case in &task.cases {
        columns.extend([format!("{case} us"), format!("{case} incumbent us"), format!("{case} speed_up")]);
    }
    writeln!(out, "{}", columns.iter().map(|column| quoted(column)).collect::<Vec<_>>().join(","))?;
    for (schedule, record) in &state.records {
        let (fate, gate, why) = match &record.fate {
            Fate::Open => ("open", "", ""),
            Fate::Refused { gate, why } => ("refused", gate.name(), why.as_str()),
            Fate::Duplicate { of } => ("duplicate", "assembler", of.as_str()),
            Fate::Quarantined { gate, why } => ("quarantined", gate.name(), why.as_str()),
            Fate::Slower => ("not better", "timing", ""),
            Fate::Unconfirmed => ("unconfirmed", "timing", ""),
            Fate::Accepted => ("accepted", "", ""),
        };
        let score = record.score.map_or_else(String::new, |score| format!("{score:.4}"));
        let identity = record.identity.clone().unwrap_or_default();
        let mut line: Vec<String> =
            [schedule, record.by.as_str(), fate, gate, why, identity.as_str(), score.as_str()]
                .map(quoted)
                .to_vec();
        for case in 0..task.cases.len() {
            match record.standings.iter().find(|standing| standing.case == case) {
                Some(Standing { us, incumbent_us, speed_up, .. }) => {
                    line.extend([format!("{us:.3}"), format!("{incumbent_us:.3}"), format!("{speed_up:.4}")]);
                }
                None => line.extend([const { String::new() }; 3]),
            }
        }
        writeln!(out, "{}", line.join(","))?;
    }
    Ok(())
}

/// A field of a CSV file, on one line.
fn quoted(field: &str) -> String {
    let field = field.replace(['\n', '\r'], " ");
    if field.contains([',', '"']) { format!("\"{}\"", field.replace('"', "\"\"")) } else { field }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_with_a_comma_or_a_quote_or_a_line_end_stays_one_field() {
        assert_eq!(quoted("plain"), "plain");
        assert_eq!(quoted("a=1,b=\"x\"\n"), "\"a=1,b=\"\"x\"\" \"");
    }
}
