//! The ladder: our kernels from the simplest to the fastest on one shape, and what a caller waits.

use super::chart::{Bars, Chart};
use super::contender;
use super::page::{Block, Piece, Section, Table, interval, number, text};
use super::reading::{Bench, Cell, comparison};
use super::small::is_ladder;
use super::source::{Number, Style};

/// The chart of every cell that holds the ladder.
pub fn bars(benches: &[Bench<'_>]) -> Vec<Bars> {
    let cells = benches.iter().flat_map(|bench| &bench.cells).filter(|cell| is_ladder(cell));
    cells.map(chart).filter(|bars| !bars.rows.is_empty()).collect()
}

fn chart(cell: &Cell<'_>) -> Bars {
    let rungs = cell.field.get("ladder").items();
    let row = |kernel: &str, time: Number| (kernel.to_string(), vec![(format!("kernel {kernel}"), time)]);
    let rows =
        rungs.iter().filter_map(|rung| Some(row(rung.get("kernel").text()?, rung.get("p50_us").number()?)));
    let rows = rows.collect();
    Bars {
        title: format!("The ladder at {}", cell.label()),
        unit: "µs (logarithmic)",
        rows,
        logarithmic: true,
    }
}

fn rungs(cell: &Cell<'_>) -> Table {
    let head = ["kernel", "#median µs", "against the rung below"];
    let mut table = Table::new(format!("The ladder at {}", cell.label()), &head);
    for rung in cell.field.get("ladder").items() {
        let gain = rung.get("gain");
        let gain = if gain.is_absent() {
            vec![Piece::Absent("there is none below it".into())]
        } else {
            comparison(&gain)
        };
        let kernel = rung.get("kernel").text().unwrap_or_default();
        table.rows.push(vec![text(kernel), number(rung.get("p50_us").number(), Style::Digits), gain]);
    }
    table
}

/// The kernel clock and the call clock of everyone in a cell.
fn clocks(cell: &Cell<'_>) -> Option<Table> {
    let names = contender::sorted(cell.names().into_iter());
    let called = |name: &String| cell.result(name).is_some_and(|result| !result.get("call").is_absent());
    if !names.iter().any(called) {
        return None;
    }
    let head = [
        "contender",
        "#kernel median",
        "interval of the median",
        "#call median",
        "#call p90",
        "#host median",
    ];
    let mut table = Table::new(format!("Kernel clock and call clock at {}, µs", cell.label()), &head);
    for name in &names {
        let Some(result) = cell.result(name) else { continue };
        let (call, around) = (result.get("call"), result.get("median_interval_us"));
        table.rows.push(vec![
            text(contender::label(name)),
            cell.line(name, "p50_us", None),
            interval(around.get("low").number(), around.get("high").number(), Style::Digits),
            number(call.get("p50_us").number(), Style::Digits),
            number(call.get("p90_us").number(), Style::Digits),
            number(call.get("host_p50_us").number(), Style::Digits),
        ]);
    }
    Some(table)
}

/// How long the first call of a cell takes.
fn first_call(cell: &Cell<'_>) -> Option<Table> {
    let first = cell.field.get("first_call");
    if first.is_absent() {
        return None;
    }
    let mut table = Table::new(format!("The first call at {}, µs", cell.label()), &["caches", "#time"]);
    let time = |key: &str| number(first.get(key).number(), Style::Digits);
    table.rows.push(vec![text("empty: the code is emitted and assembled"), time("cold_us")]);
    table.rows.push(vec![text("with the code on disk"), time("warm_us")]);
    Some(table)
}

/// The section; absent where no benchmark has the ladder or the call clock.
pub fn section(benches: &[Bench<'_>]) -> Option<Section> {
    let mut blocks = Vec::new();
    for bench in benches {
        let mut found = Vec::new();
        for cell in &bench.cells {
            if is_ladder(cell) {
                found.push(Block::Figure(Chart::Bars(chart(cell)), rungs(cell)));
            }
            found.extend(clocks(cell).map(Block::Table));
            found.extend(first_call(cell).map(Block::Table));
        }
        if !found.is_empty() {
            let device = bench.device().unwrap_or("a device that has no name");
            let mut words = text(format!("On {device}, {}, from ", bench.conditions()));
            words.push(Piece::File(bench.root.file()));
            words.push(Piece::Text(
                ". Every rung is a kernel by its default schedule; what FlashCore runs is planned for the shape. The \
                 call clock holds the host's work too."
                    .into(),
            ));
            blocks.push(Block::Text(words));
            blocks.extend(found);
        }
    }
    (!blocks.is_empty()).then(|| Section { id: "ladder", title: "The ladder".into(), blocks })
}
