//! Errors against the rule: how much of what is allowed every contender uses.

use super::chart::{Chart, Strip};
use super::contender;
use super::page::{Block, Line, Piece, Section, Table, text};
use super::reading::{Bench, Cell};
use super::source::{Field, Number, Style};

/// The bounds of the rule, with what they are called.
const BOUNDS: [(&str, &str); 4] = [("max", "maximum"), ("rms", "RMS"), ("row", "row"), ("lse", "lse")];

/// A bound of a result: the error, what is allowed, and the share of it.
struct Used {
    error: Number,
    allowed: Number,
    share: Number,
    cell: String,
}

fn used(cell: &Cell<'_>, result: &Field<'_>, bound: &str) -> Option<Used> {
    let bound = result.get("error").get(bound);
    let (error, allowed) = (bound.get("error").number()?, bound.get("allowed").number()?);
    Some(Used { share: error.over(&allowed), error, allowed, cell: cell.label() })
}

/// Every judged result of a contender by one bound.
fn all_used(benches: &[Bench<'_>], name: &str, bound: &str) -> Vec<Used> {
    let cells = benches.iter().flat_map(|bench| &bench.cells);
    cells.filter_map(|cell| used(cell, &cell.result(name)?, bound)).collect()
}

fn worst(all: Vec<Used>) -> Option<Used> {
    all.into_iter().reduce(|a, b| if b.share.value() > a.share.value() { b } else { a })
}

/// The section; absent where nothing was judged.
pub fn section(benches: &[Bench<'_>]) -> Option<Section> {
    let names = contender::sorted(benches.iter().flat_map(|b| b.cells.iter().flat_map(Cell::names)));
    let head = ["contender", "bound", "#error", "#allowed", "#share used", "worst at"];
    let mut table =
        Table::new("The result of each contender that comes nearest to the rule, by every bound", &head);
    let mut strip =
        Strip { title: "Errors of every cell, as shares of what the rule allows".into(), rows: Vec::new() };
    for name in &names {
        let mut row: Vec<(String, Number)> = Vec::new();
        for cell in benches.iter().flat_map(|bench| &bench.cells) {
            let Some(result) = cell.result(name) else { continue };
            let shares =
                BOUNDS.iter().filter_map(|(bound, words)| Some((*words, used(cell, &result, bound)?)));
            let worst = shares.reduce(|a, b| if b.1.share.value() > a.1.share.value() { b } else { a });
            row.extend(worst.map(|(words, used)| (format!("{} by {words}", used.cell), used.share)));
        }
        if row.is_empty() {
            continue;
        }
        strip.rows.push((name.clone(), row));
        for (bound, words) in BOUNDS {
            let Some(worst) = worst(all_used(benches, name, bound)) else { continue };
            let number = |number, style| -> Line { vec![Piece::Number(number, style)] };
            table.rows.push(vec![
                text(contender::label(name)),
                text(words),
                number(worst.error, Style::Error),
                number(worst.allowed, Style::Error),
                number(worst.share, Style::Percent),
                text(worst.cell),
            ]);
        }
    }
    if strip.rows.is_empty() {
        return None;
    }
    let words = "Every result is compared with plain attention in double precision. It may be off by twice the error \
                 that plain attention in the same precision makes, and a floor, by the largest error, by the root mean \
                 square, and in every row; a share above the whole would be a wrong result. Each mark is a cell, at the \
                 bound that it comes nearest to.";
    let blocks = vec![Block::Text(text(words)), Block::Figure(Chart::Strip(strip), table)];
    Some(Section { id: "error", title: "Error against the rule".into(), blocks })
}
