//! What verify found: on the corpus, under stress, and of the faults that were planted to test it.

use super::page::{Block, Piece, Section, Table, number, text};
use super::source::{Evidence, Field, Style};

/// Failures that are listed; the file has all.
const LISTED: usize = 20;

fn verified(root: &Field<'_>) -> Vec<Block> {
    let head = ["engine", "#passed", "#skipped", "#failed", "#largest share of what is allowed", "at"];
    let mut table = Table::new("The corpus on every engine", &head);
    for engine in root.get("engines").items() {
        let of = |key: &str, style| number(engine.get(key).number(), style);
        table.rows.push(vec![
            text(engine.get("engine").text().unwrap_or_default()),
            of("passed", Style::Exact),
            of("skipped", Style::Exact),
            of("failed", Style::Exact),
            of("worst_share", Style::Percent),
            text(engine.get("worst_case").text().unwrap_or_default()),
        ]);
    }
    let mut failures = Table::new("What failed first", &["case", "engine", "what is wrong"]);
    let results = root.get("results").items();
    for result in results.iter().filter(|result| result.get("status").text() == Some("failed")).take(LISTED) {
        let faults: Vec<&str> = result.get("faults").items().iter().filter_map(Field::text).collect();
        let of = |key: &str| text(result.get(key).text().unwrap_or_default());
        failures.rows.push(vec![of("case"), of("engine"), text(faults.join("; "))]);
    }
    let mut blocks = vec![Block::Table(table)];
    if !failures.rows.is_empty() {
        blocks.push(Block::Table(failures));
    }
    blocks
}

fn stressed(root: &Field<'_>) -> Vec<Block> {
    let head = [
        "problem",
        "#calls from threads",
        "#differ",
        "#replays",
        "#differ",
        "#runs in a row",
        "#differ",
        "schedule",
    ];
    let mut table = Table::new("Results that must have the same bits every time", &head);
    for problem in root.get("problems").items() {
        let mut row = vec![text(problem.get("problem").text().unwrap_or_default())];
        for way in ["threaded", "replayed", "repeated"] {
            for key in ["runs", "different"] {
                row.push(number(problem.get(way).get(key).number(), Style::Exact));
            }
        }
        row.push(text(problem.get("schedule").text().unwrap_or_default()));
        table.rows.push(row);
    }
    vec![Block::Table(table)]
}

fn planted(root: &Field<'_>) -> Vec<Block> {
    let mut counts = Table::new("Planted faults and honest work", &["what", "#as it should be", "#of"]);
    for (key, words) in
        [("caught", "faults that were caught"), ("accepted", "honest trials that were accepted")]
    {
        let pair = root.get(key).items();
        let of = |i: usize| number(pair.get(i).and_then(Field::number), Style::Exact);
        counts.rows.push(vec![text(words), of(0), of(1)]);
    }
    let mut missed = Table::new("What was judged wrongly", &["trial", "nature", "judge", "what it said"]);
    let findings = root.get("findings").items();
    for finding in findings.iter().filter(|finding| finding.get("as_it_should").flag() != Some(true)) {
        let of = |key: &str| text(finding.get(key).text().unwrap_or_default());
        missed.rows.push(vec![of("name"), of("nature"), of("judge"), of("said")]);
    }
    let mut blocks = vec![Block::Table(counts)];
    blocks.extend(Some(missed).filter(|missed| !missed.rows.is_empty()).map(Block::Table));
    blocks
}

/// The section; absent without such evidence.
pub fn section(files: &[Evidence]) -> Option<Section> {
    let mut blocks = Vec::new();
    for file in 0..files.len() {
        let root = Field::root(files, file);
        let schema = root.get("schema").text().unwrap_or_default();
        let found = if schema.starts_with("flashcore.verify/") {
            verified(&root)
        } else if schema.starts_with("flashcore.stress/") {
            stressed(&root)
        } else if schema.starts_with("flashcore.faults/") {
            planted(&root)
        } else {
            continue;
        };
        let whole = if root.get("complete").flag() == Some(false) { ", which was interrupted" } else { "" };
        let mut words = text("From ");
        words.push(Piece::File(file));
        words.push(Piece::Text(format!("{whole}.")));
        blocks.push(Block::Text(words));
        blocks.extend(found);
    }
    (!blocks.is_empty()).then(|| Section { id: "checks", title: "What verify found".into(), blocks })
}
