//! What a call uses, by the counter of the whole board, in runs whose samples are long enough for it.

use super::contender;
use super::page::{Block, Piece, Section, Table, number, text};
use super::reading::{Bench, Cell};
use super::source::{Field, Style};

fn energy<'a>(cell: &Cell<'a>, name: &str) -> Option<Field<'a>> {
    cell.result(name).map(|result| result.get("energy")).filter(|energy| !energy.is_absent())
}

/// One row for every cell and contender with an energy.
fn table(bench: &Bench<'_>) -> Table {
    let head = ["cell", "contender", "#mJ per call", "#from", "#to", "#J per TFLOP", "#W", "#MHz"];
    let mut table =
        Table::new("Energy of a call, with its interval; per useful operation; power; SM clock", &head);
    for cell in &bench.cells {
        for name in contender::sorted(cell.names().into_iter()) {
            let Some(energy) = energy(cell, &name) else { continue };
            let of = |field: Field<'_>, style| number(field.number(), style);
            table.rows.push(vec![
                text(cell.label()),
                text(contender::label(&name)),
                of(energy.get("mj_per_call"), Style::Digits),
                of(energy.get("mj_interval").get("low"), Style::Digits),
                of(energy.get("mj_interval").get("high"), Style::Digits),
                of(energy.get("j_per_tflop"), Style::Fine),
                of(energy.get("power_w"), Style::Digits),
                of(energy.get("sm_clock_mhz"), Style::Digits),
            ]);
        }
    }
    table
}

/// The section; absent where no energy was measured.
pub fn section(benches: &[Bench<'_>]) -> Option<Section> {
    let mut blocks = Vec::new();
    for bench in benches {
        let table = table(bench);
        if table.rows.is_empty() {
            continue;
        }
        let device = bench.device().unwrap_or("a device that has no name");
        let mut words = text(format!("On {device}, {}, from ", bench.conditions()));
        words.push(Piece::File(bench.root.file()));
        words.push(Piece::Text(". Nothing is subtracted: what an idle GPU uses is in it.".into()));
        blocks.extend([Block::Text(words), Block::Table(table)]);
    }
    (!blocks.is_empty()).then(|| Section { id: "energy", title: "Energy".into(), blocks })
}
