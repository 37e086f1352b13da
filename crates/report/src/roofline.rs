//! How far from the device's limits: rates below the ceilings that the evidence has. What was not measured is said
//! to be absent.

use super::chart::{Chart, Roofline};
use super::page::{Block, Piece, Section, Table, number, text};
use super::reading::{Bench, Cell};
use super::source::{Evidence, Field, Number, Style};

/// The result of ours that a cell is compared by.
const OURS: &str = "flashcore";

/// The ceilings of a device, each from the newest file that measured it.
struct Ceilings {
    /// Rates of products in TFLOP/s, with their names.
    products: Vec<(String, Number)>,
    /// GB/s.
    memory: Option<Number>,
    /// Exponentials, in units of 1e9 per second.
    exponentials: Option<Number>,
    /// Microseconds of an empty kernel.
    launch: Option<Number>,
}

/// The files that tell ceilings of a device: its benchmarks, and what `bench --ceilings` wrote.
fn ceilings<'a>(files: &'a [Evidence], device: &str, benches: &[&Bench<'a>]) -> Ceilings {
    let alone = (0..files.len()).map(|file| Field::root(files, file)).filter(|root| {
        let of_ceilings =
            root.get("schema").text().is_some_and(|name| name.starts_with("flashcore.ceilings/"));
        of_ceilings && root.get("machine").text() == Some(device)
    });
    let mut ours: Vec<Field<'a>> =
        benches.iter().map(|bench| bench.root.get("ceilings")).chain(alone).collect();
    ours.sort_by_key(|root| std::cmp::Reverse(root.get("created").text()));
    let mut gpus: Vec<&&Bench<'a>> = benches.iter().collect();
    gpus.sort_by_key(|bench| std::cmp::Reverse(bench.root.get("created").text()));
    let measured = |key: &str| ours.iter().find_map(|root| root.get(key).number());
    let told = |key: &str| gpus.iter().find_map(|bench| bench.root.get("gpu").get(key).number());
    let named = |name: &str, rate: Option<Number>| rate.map(|rate| (name.to_string(), rate));
    let products = [
        named("dense peak, at the highest clock", told("peak_tflops")),
        named("products alone, measured", measured("matmul_tflops")),
        named("torch's matrix product, measured", told("matmul_tflops")),
    ];
    Ceilings {
        products: products.into_iter().flatten().collect(),
        memory: measured("memory_gbytes"),
        exponentials: measured("exp_gops"),
        launch: measured("launch_us"),
    }
}

/// The devices of GPU benchmarks, each with its benchmarks.
fn devices<'b, 'a>(benches: &'b [Bench<'a>]) -> Vec<(&'a str, Vec<&'b Bench<'a>>)> {
    let mut all: Vec<(&str, Vec<&Bench<'_>>)> = Vec::new();
    for bench in benches {
        let Some(device) = bench.root.get("gpu").get("ours").get("device").text() else { continue };
        match all.iter_mut().find(|(known, _)| *known == device) {
            Some((_, found)) => found.push(bench),
            None => all.push((device, vec![bench])),
        }
    }
    all
}

/// The chart of every device.
pub fn charts(files: &[Evidence], benches: &[Bench<'_>]) -> Vec<(String, Roofline)> {
    let of = |(device, benches): (&str, Vec<&Bench<'_>>)| {
        let ceilings = ceilings(files, device, &benches);
        (device.to_string(), chart(device, &benches, &ceilings))
    };
    devices(benches).into_iter().map(of).filter(|(_, chart)| !chart.points.is_empty()).collect()
}

fn chart(device: &str, benches: &[&Bench<'_>], ceilings: &Ceilings) -> Roofline {
    let mut points = Vec::new();
    for cell in benches.iter().flat_map(|bench| &bench.cells) {
        if let (Some(intensity), Some(rate)) = (intensity(cell), cell.number(OURS, "tflops")) {
            points.push((cell.label(), cell.mask != "full", intensity, rate));
        }
    }
    Roofline {
        title: format!("FlashCore on {device}"),
        points,
        ceilings: ceilings.products.clone(),
        bandwidth: ceilings.memory.clone(),
    }
}

/// Operations per byte that must move.
fn intensity(cell: &Cell<'_>) -> Option<Number> {
    Some(cell.field.get("flops").number()?.over(&cell.field.get("bytes").number()?))
}

/// The ceilings as a table; what no file measured is absent.
fn ceilings_table(device: &str, ceilings: &Ceilings) -> Table {
    let mut table = Table::new(format!("Ceilings of {device}"), &["ceiling", "#rate", "unit"]);
    for (name, rate) in &ceilings.products {
        table.rows.push(vec![text(name.clone()), number(Some(rate.clone()), Style::Digits), text("TFLOP/s")]);
    }
    let others = [
        ("memory, measured by copying", &ceilings.memory, "GB/s"),
        ("exponentials, measured", &ceilings.exponentials, "billions a second"),
        ("an empty launch, measured", &ceilings.launch, "µs"),
    ];
    for (name, value, unit) in others {
        table.rows.push(vec![text(name), number(value.clone(), Style::Digits), text(unit)]);
    }
    table
}

fn cells_table(device: &str, benches: &[&Bench<'_>]) -> Table {
    let head =
        ["cell", "#TFLOP/s", "#of the peak", "#of torch's matrix product", "#GB/s", "#operations a byte"];
    let head: Vec<&str> = head.into_iter().chain(["#of what the ceilings allow", "bound by"]).collect();
    let mut table = Table::new(format!("FlashCore on {device}, cell by cell"), &head);
    for cell in benches.iter().flat_map(|bench| &bench.cells) {
        let Some(ours) = cell.result(OURS) else { continue };
        let of = |key: &str, style| number(ours.get(key).number(), style);
        let roofline = ours.get("roofline");
        let bound = roofline.get("bound").text();
        table.rows.push(vec![
            text(cell.label()),
            of("tflops", Style::Digits),
            of("peak_share", Style::Percent),
            of("matmul_share", Style::Percent),
            of("gbytes", Style::Digits),
            number(intensity(cell), Style::Digits),
            number(roofline.get("share").number(), Style::Percent),
            bound.map_or_else(|| vec![Piece::Absent(String::new())], text),
        ]);
    }
    table
}

/// The section; absent without a benchmark on a GPU.
pub fn section(files: &[Evidence], benches: &[Bench<'_>]) -> Option<Section> {
    let words = "A ceiling that no file of this report measured is absent: nothing is taken from a data sheet but the \
                 dense peak, which is computed from the number of multiprocessors and their highest clock. Torch's \
                 matrix product is a yardstick rather than a bound.";
    let mut blocks = vec![Block::Text(text(words))];
    for (device, benches) in devices(benches) {
        let ceilings = ceilings(files, device, &benches);
        let chart = chart(device, &benches, &ceilings);
        if !chart.points.is_empty() {
            blocks.push(Block::Figure(Chart::Roofline(chart), ceilings_table(device, &ceilings)));
            blocks.push(Block::Folded(
                "Every cell's share of the ceilings".into(),
                cells_table(device, &benches),
            ));
        }
    }
    (blocks.len() > 1).then(|| Section { id: "roofline", title: "Roofline".into(), blocks })
}
