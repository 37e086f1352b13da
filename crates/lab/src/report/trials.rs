//! Trials of schedules that led to the kernels as they are: the fastest of each problem.

use super::page::{Block, Line, Piece, Section, Table, code, number, text};
use super::source::{Evidence, Field, Style};

/// The rows of a trial with a rate, with the run that each belongs to.
fn rows<'a>(root: &Field<'a>) -> Vec<(Option<&'a str>, Field<'a>)> {
    let mut all: Vec<(Option<&str>, Field<'_>)> = Vec::new();
    all.extend(root.get("throughput").items().into_iter().map(|row| (None, row)));
    for run in root.get("runs").items() {
        let what = run.get("what").text();
        all.extend(run.get("rows").items().into_iter().map(|row| (what, row)));
    }
    all
}

fn table(root: &Field<'_>, device: &str) -> Table {
    let mut best: Vec<(&str, Option<&str>, Field<'_>, f64)> = Vec::new();
    for (what, row) in rows(root) {
        let (Some(problem), Some(rate)) = (row.get("problem").text(), row.get("tflops").number()) else {
            continue;
        };
        match best.iter_mut().find(|(known, ..)| *known == problem) {
            Some(found) if found.3 >= rate.value() => {}
            Some(found) => *found = (problem, what, row, rate.value()),
            None => best.push((problem, what, row, rate.value())),
        }
    }
    let mut table = Table::new(
        format!("The fastest schedule that was tried for each problem on {device}"),
        &["problem", "#TFLOP/s", "#µs", "schedule", "tried in"],
    );
    for (problem, what, row, _) in best {
        let in_which: Line = what.map_or_else(|| vec![Piece::Absent(String::new())], text);
        table.rows.push(vec![
            text(problem),
            number(row.get("tflops").number(), Style::Digits),
            number(row.get("us").number(), Style::Digits),
            code(row.get("schedule").text().unwrap_or_default()),
            in_which,
        ]);
    }
    table
}

/// The section; absent without such evidence.
pub fn section(files: &[Evidence]) -> Option<Section> {
    let mut blocks = Vec::new();
    for file in 0..files.len() {
        let root = Field::root(files, file);
        if !root.get("schema").text().is_some_and(|schema| schema.starts_with("flashcore.trial/")) {
            continue;
        }
        let device = root.get("device").text().unwrap_or("a device that has no name");
        let mut words = vec![Piece::File(file)];
        words.push(Piece::Text(format!(": {}.", root.get("method").text().unwrap_or_default())));
        blocks.push(Block::Text(words));
        blocks.push(Block::Folded(
            format!("The fastest schedules of {}", files[file].short_name()),
            table(&root, device),
        ));
    }
    (!blocks.is_empty()).then(|| Section { id: "trials", title: "Trials".into(), blocks })
}
