//! Speed over sequence length, one chart per head dimension and mask; and a summary over all cells.

use super::chart::{Chart, Lines, Series};
use super::contender;
use super::page::{Block, Line, Piece, Section, Table, Tile, number, text};
use super::reading::{Bench, Cell, interval_level};
use super::source::{Number, Style};

/// Lengths that a sweep must have.
const A_SWEEP: usize = 3;

/// Cells that differ in nothing but their length (and in the batch and heads that keep the work alike).
#[derive(Clone, Debug)]
pub struct Sweep<'a> {
    /// What they have in common: dtype, head dimension, mask.
    pub title: String,
    /// Their dtype.
    pub dtype: &'a str,
    /// In the order of their lengths.
    pub cells: Vec<Cell<'a>>,
}

/// What the cells of a sweep have in common: the group, the head dimension, the mask, the dtype and the pass.
type Key<'a> = (&'a str, &'a str, &'a str, &'a str, Option<&'a str>);

/// The sweeps of a benchmark: groups whose cells have one head dimension, one mask and each another length.
pub fn sweeps<'a>(bench: &Bench<'a>) -> Vec<Sweep<'a>> {
    let mut groups: Vec<(Key<'a>, Vec<Cell<'a>>)> = Vec::new();
    for cell in &bench.cells {
        let (Some(group), Some(head_dim)) = (cell.field.get("group").text(), cell.head_dim()) else {
            continue;
        };
        let key = (group, head_dim, cell.mask, cell.dtype, cell.pass());
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, cells)) => cells.push(cell.clone()),
            None => groups.push((key, vec![cell.clone()])),
        }
    }
    let mut all = Vec::new();
    for ((group, head_dim, mask, dtype, pass), mut cells) in groups {
        cells.sort_by_key(Cell::length);
        let distinct = cells.windows(2).all(|pair| pair[0].length() < pair[1].length());
        let alone = bench
            .cells
            .iter()
            .filter(|cell| cell.field.get("group").text() == Some(group) && cell.dtype == dtype)
            .all(|cell| cell.head_dim() == Some(head_dim) && cell.mask == mask);
        if cells.len() >= A_SWEEP && distinct && alone {
            let pass = pass.map_or_else(String::new, |pass| format!(", {pass}"));
            all.push(Sweep { title: format!("head_dim {head_dim}, {mask}, {dtype}{pass}"), dtype, cells });
        }
    }
    all
}

impl Sweep<'_> {
    fn names(&self) -> Vec<String> {
        contender::sorted(self.cells.iter().flat_map(Cell::names))
    }

    fn rates(&self) -> impl Iterator<Item = f64> + '_ {
        self.cells.iter().flat_map(|cell| {
            cell.names().into_iter().filter_map(|name| cell.number(&name, "tflops")).map(|rate| rate.value())
        })
    }

    /// The chart, with an axis that holds what is given.
    pub fn lines(&self, largest: f64, ceilings: &[(String, Number)]) -> Lines {
        let series = self.names().into_iter().map(|name| {
            let points = self.cells.iter().enumerate();
            let points = points.filter_map(|(i, cell)| Some((i, cell.number(&name, "tflops")?))).collect();
            Series { name, points }
        });
        Lines {
            title: self.title.clone(),
            axis: "sequence length".into(),
            places: self
                .cells
                .iter()
                .filter_map(|cell| cell.length().map(|(_, text)| text.to_string()))
                .collect(),
            unit: "TFLOP/s",
            largest,
            series: series.filter(|series: &Series| !series.points.is_empty()).collect(),
            ceilings: ceilings.to_vec(),
        }
    }

    fn table(&self) -> Table {
        let names = self.names();
        let peers: Vec<&String> = names.iter().filter(|name| contender::look(name) != 0).collect();
        let mut head = vec!["length".to_string(), "batch, heads".to_string()];
        head.extend(names.iter().map(|name| format!("#{}", contender::label(name))));
        head.extend(peers.iter().map(|peer| format!("against {}", contender::label(peer))));
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        let mut table = Table::new(format!("{}: TFLOP/s, and ours against each peer", self.title), &head);
        for cell in &self.cells {
            let rates = names.iter().filter_map(|name| cell.number(name, "tflops"));
            let best = rates.map(|rate| rate.value()).reduce(f64::max);
            let mut parts = cell.shape.split('x');
            let (batch, heads) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            let mut row = vec![
                text(cell.length().map_or("", |(_, text)| text)),
                text(format!("{batch},\u{a0}{heads}")),
            ];
            row.extend(names.iter().map(|name| cell.line(name, "tflops", best)));
            row.extend(peers.iter().map(|peer| cell.speed_up(peer)));
            table.rows.push(row);
        }
        table
    }
}

/// The rates that arithmetic is bounded by on a benchmark's device, as far as they were measured.
pub fn ceilings(bench: &Bench<'_>) -> Vec<(String, Number)> {
    let gpu = bench.root.get("gpu");
    let matmul =
        gpu.get("matmul_tflops").number().map(|rate| ("torch's matrix product, measured".to_string(), rate));
    matmul.into_iter().collect()
}

/// The charts of a benchmark on one scale; none of a sweep that ended before there was a line to draw.
pub fn panels(bench: &Bench<'_>) -> Vec<Lines> {
    let (sweeps, ceilings) = (sweeps(bench), ceilings(bench));
    let largest = scale(&sweeps, &ceilings);
    let mut panels: Vec<Lines> = sweeps.iter().map(|sweep| sweep.lines(largest, &ceilings)).collect();
    panels.retain(|panel| panel.series.iter().any(|series| series.points.len() > 1));
    panels
}

fn scale(sweeps: &[Sweep<'_>], ceilings: &[(String, Number)]) -> f64 {
    let rates = sweeps.iter().flat_map(Sweep::rates);
    // Room for the name of a ceiling above it.
    1.06 * rates.chain(ceilings.iter().map(|(_, rate)| rate.value())).fold(1.0, f64::max)
}

/// The section; absent without sweeps.
pub fn section(benches: &[Bench<'_>]) -> Option<Section> {
    let mut blocks = Vec::new();
    for bench in benches {
        let (sweeps, ceilings) = (sweeps(bench), ceilings(bench));
        if sweeps.is_empty() {
            continue;
        }
        let largest = scale(&sweeps, &ceilings);
        let device = bench.device().unwrap_or("a device that has no name");
        let mut words = text(format!("On {device}, {}, from ", bench.conditions()));
        words.push(Piece::File(bench.root.file()));
        words.push(Piece::Text(
            ". Causal is counted half. Batch and heads change with the length so that the number of tokens stays.".into(),
        ));
        for (name, rate) in &ceilings {
            words.push(Piece::Text(format!(" In the same run, {name}: ")));
            words.extend(number(Some(rate.clone()), Style::Digits));
            words.push(Piece::Text(" TFLOP/s.".into()));
        }
        blocks.push(Block::Text(words));
        for sweep in &sweeps {
            blocks.push(Block::Figure(Chart::Lines(sweep.lines(largest, &ceilings)), sweep.table()));
        }
    }
    (!blocks.is_empty()).then(|| Section { id: "speed", title: "Speed over sequence length".into(), blocks })
}

/// The summary over the cells of each benchmark for every peer; absent where nobody was compared.
pub fn summary(benches: &[Bench<'_>]) -> Option<Section> {
    let head =
        ["benchmark", "peer", "#cells", "#geometric mean", "#smallest", "smallest at", "#faster", "#same"];
    let head: Vec<&str> = head.into_iter().chain(["#slower", "#undecided"]).collect();
    let mut table =
        Table::new("FlashCore's speed as a multiple of each peer's, by the medians of each cell", &head);
    let mut tiles = Vec::new();
    for bench in benches {
        let ours_is_planned = bench.cells.first().is_some_and(|cell| {
            cell.names()
                .first()
                .is_some_and(|first| contender::look(first) == 0 && !first.starts_with("kernel "))
        });
        if !ours_is_planned {
            continue;
        }
        let mut all = bench.root.get("summaries").items();
        all.sort_by_key(|summary| summary.get("peer").text().map(contender::rank));
        let total = all.iter().any(|summary| summary.get("group").text() == Some("all"));
        for summary in all.iter().filter(|s| !total || s.get("group").text() == Some("all")) {
            let Some(peer) = summary.get("peer").text() else { continue };
            let (mean, cells) = (summary.get("geometric_mean").number(), summary.get("cells").number());
            if let (Some(mean), Some(cells)) = (&mean, &cells) {
                let mut label = text(format!("{}, geometric mean of ", contender::label(peer)));
                label.push(Piece::Number(cells.clone(), Style::Exact));
                let regime = bench.regime().map_or_else(String::new, |regime| format!(", {regime},"));
                label.push(Piece::Text(format!(" cells{regime} of ")));
                label.push(Piece::File(bench.root.file()));
                tiles.push(Tile { number: mean.clone(), style: Style::Ratio, label });
            }
            let verdicts = summary.get("verdicts").items();
            let one = |number: Option<Number>, style| super::page::number(number, style);
            let mut row: Vec<Line> = vec![
                vec![Piece::File(bench.root.file())],
                text(contender::label(peer)),
                one(cells, Style::Exact),
                one(mean, Style::Ratio),
                one(summary.get("smallest").number(), Style::Ratio),
                text(summary.get("smallest_cell").text().unwrap_or_default()),
            ];
            // FASTER, SAME, SLOWER, UNDECIDED, in the order of the evidence.
            row.extend(
                (0..4).map(|i| one(verdicts.get(i).and_then(super::source::Field::number), Style::Exact)),
            );
            table.rows.push(row);
        }
    }
    if table.rows.is_empty() {
        return None;
    }
    let mut words =
        text("How many times as fast as each peer FlashCore is, measured in turns with it in one run. ");
    if let Some(level) = interval_level(benches) {
        words.push(Piece::Text("In the tables below, brackets hold the ".into()));
        words.push(Piece::Number(level, Style::Percent));
        words.push(Piece::Text(
            " bootstrap interval of a ratio of medians, and the verdict stands behind it.".into(),
        ));
    }
    let blocks = vec![Block::Tiles(tiles), Block::Text(words), Block::Table(table)];
    Some(Section { id: "summary", title: "In short".into(), blocks })
}
