//! The latencies of shapes that are not part of a sweep: small ones, above all.

use super::chart::{Bars, Chart};
use super::contender;
use super::page::{Block, Piece, Section, Table, text};
use super::reading::{Bench, Cell};
use super::speed;

/// The cells of a benchmark that are part of no sweep and hold no ladder, by pass, mask and dtype.
fn groups<'a>(bench: &Bench<'a>) -> Vec<(String, Vec<Cell<'a>>)> {
    let swept: Vec<String> =
        speed::sweeps(bench).iter().flat_map(|s| s.cells.iter().map(Cell::label)).collect();
    let mut all: Vec<(String, Vec<Cell<'a>>)> = Vec::new();
    for cell in bench.cells.iter().filter(|cell| !is_ladder(cell) && !swept.contains(&cell.label())) {
        let pass = cell.pass().map_or_else(String::new, |pass| format!("{pass}, "));
        let key = format!("{pass}{}, {}", cell.mask, cell.dtype);
        match all.iter_mut().find(|(known, _)| *known == key) {
            Some((_, cells)) => cells.push(cell.clone()),
            None => all.push((key, vec![cell.clone()])),
        }
    }
    all
}

/// Whether a cell holds the rungs of the ladder, which has a section of its own.
pub fn is_ladder(cell: &Cell<'_>) -> bool {
    !cell.field.get("ladder").items().is_empty()
}

/// The charts of a benchmark, each with its cells.
pub fn bars<'a>(bench: &Bench<'a>) -> Vec<(Bars, Vec<Cell<'a>>)> {
    let of = |(key, cells): (String, Vec<Cell<'a>>)| {
        let row = |cell: &Cell<'a>| {
            let names = contender::sorted(cell.names().into_iter());
            let times =
                names.into_iter().filter_map(|name| Some((name.clone(), cell.number(&name, "p50_us")?)));
            (cell.shape.to_string(), times.collect())
        };
        let rows = cells.iter().map(row).filter(|(_, bars): &(String, Vec<_>)| !bars.is_empty()).collect();
        (Bars { title: format!("Median time, {key}"), unit: "µs", rows, logarithmic: false }, cells)
    };
    groups(bench).into_iter().map(of).filter(|(bars, _)| !bars.rows.is_empty()).collect()
}

fn table(title: &str, cells: &[Cell<'_>]) -> Table {
    let names = contender::sorted(cells.iter().flat_map(Cell::names));
    let peers: Vec<&String> = names.iter().filter(|name| contender::look(name) != 0).collect();
    let mut head = vec!["batch, heads, length, head_dim".to_string()];
    head.extend(names.iter().map(|name| format!("#{}", contender::label(name))));
    head.extend(peers.iter().map(|peer| format!("against {}", contender::label(peer))));
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let against = if peers.is_empty() { "" } else { ", and ours against each peer" };
    let mut table = Table::new(format!("{title}: µs{against}"), &head);
    for cell in cells {
        let times = names.iter().filter_map(|name| cell.number(name, "p50_us"));
        let best = times.map(|time| time.value()).reduce(f64::min);
        let mut row = vec![text(cell.shape)];
        row.extend(names.iter().map(|name| cell.line(name, "p50_us", best)));
        row.extend(peers.iter().map(|peer| cell.speed_up(peer)));
        table.rows.push(row);
    }
    table
}

/// The section; absent if every benchmark is a sweep.
pub fn section(benches: &[Bench<'_>]) -> Option<Section> {
    let mut blocks = Vec::new();
    for bench in benches {
        let charts = bars(bench);
        if charts.is_empty() {
            continue;
        }
        let device = bench.device().unwrap_or("a device that has no name");
        let mut words = text(format!("On {device}, {}, from ", bench.conditions()));
        words.push(Piece::File(bench.root.file()));
        words.push(Piece::Text(".".into()));
        blocks.push(Block::Text(words));
        for (bars, cells) in charts {
            let table = table(&bars.title, &cells);
            blocks.push(Block::Figure(Chart::Bars(bars), table));
        }
    }
    (!blocks.is_empty()).then(|| Section {
        id: "small",
        title: "Latency of small and single shapes".into(),
        blocks,
    })
}
