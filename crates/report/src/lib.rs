//! Reports: what a set of evidence files says, as one HTML file, as Markdown and as charts.
//!
//! A report is made from evidence and nothing else. [`source`] is the only way to a number, and it remembers the file
//! and the field; what a file does not hold is shown as absent. The sections ([`speed`], [`small`], [`energy`],
//! [`roofline`], [`errors`], [`ladder`], [`checks`], [`environment`]) read evidence into a [`page`], which [`html`] and
//! [`markdown`] write; [`chart`] draws. The same evidence gives the same bytes. [`timeline`] draws what no evidence holds:
//! what each role of a kernel does when.

pub mod chart;
pub mod checks;
pub mod contender;
pub mod energy;
pub mod environment;
pub mod errors;
pub mod html;
pub mod ladder;
pub mod markdown;
pub mod page;
pub mod reading;
pub mod register;
pub mod roofline;
pub mod small;
pub mod source;
pub mod speed;
pub mod svg;
pub mod timeline;

use page::{Page, Piece, Section, text};
use reading::Bench;
use source::{Evidence, Field};

/// The name of the HTML file.
pub const HTML: &str = "report.html";
/// The name of the Markdown file.
pub const MARKDOWN: &str = "report.md";

/// The schemas that a report shows something of beside the environment.
const SHOWN: [&str; 6] = [
    "flashcore.bench/",
    "flashcore.bench-gpu/",
    "flashcore.ceilings/",
    "flashcore.faults/",
    "flashcore.verify/",
    "flashcore.stress/",
];

/// A file of a report: its name and its text.
pub type Written = (String, String);

/// The HTML file and its twin.
pub fn pages(files: &[Evidence]) -> [Written; 2] {
    let page = compose(files);
    [(HTML.into(), html::render(&page, files)), (MARKDOWN.into(), markdown::render(&page, files, HTML))]
}

/// The charts as files of their own, named after the device.
pub fn charts(files: &[Evidence]) -> Vec<Written> {
    let benches = Bench::all(files);
    let mut all: Vec<Written> = Vec::new();
    let mut keep = |name: String, svg: String| match all.iter_mut().find(|(known, _)| *known == name) {
        // A later file in the list wins.
        Some(found) => found.1 = svg,
        None => all.push((name, svg)),
    };
    for bench in &benches {
        let Some(device) = bench.device().map(slug) else { continue };
        let source = &files[bench.root.file()].name;
        let (panels, kernel) = (speed::panels(bench), kernel(bench));
        let kind_of = kind(bench, kernel.as_deref());
        if !panels.is_empty() {
            // Full and causal of one head dimension are placed one below the other.
            let columns = panels.len().div_ceil(2).min(3);
            let mut ordered: Vec<chart::Lines> =
                panels.iter().filter(|p| !p.title.contains("causal")).cloned().collect();
            ordered.extend(panels.iter().filter(|p| p.title.contains("causal")).cloned());
            let regime = bench.regime().map_or_else(String::new, |regime| format!(", {regime}"));
            let (device_name, pass) = (bench.device().unwrap_or_default(), bench.pass().unwrap_or("forward"));
            let title = format!("{device_name}: attention {pass}, TFLOP/s{regime}");
            keep(format!("{device}{kind_of}.svg"), chart::grid(&title, &ordered, columns, source));
        }
        for (i, (bars, _)) in small::bars(bench).into_iter().enumerate() {
            let mask = bars.title.rsplit(", ").nth(1).map_or_else(|| i.to_string(), slug);
            keep(format!("{device}-small-{mask}{kind_of}.svg"), chart::Chart::Bars(bars).file(source));
        }
        for bars in ladder::bars(std::slice::from_ref(bench)) {
            let kind = kind(bench, None);
            keep(format!("{device}-ladder{kind}.svg"), chart::Chart::Bars(bars).file(source));
        }
    }
    for (device, roofline) in roofline::charts(files, &benches) {
        let names: Vec<&str> = benches
            .iter()
            .filter(|bench| bench.device() == Some(device.as_str()))
            .map(|bench| files[bench.root.file()].name.as_str())
            .collect();
        keep(
            format!("{}-roofline.svg", slug(&device)),
            chart::Chart::Roofline(roofline).file(&names.join(", ")),
        );
    }
    all
}

/// What sets a benchmark apart from the usual one, which is forward in f16 or else in bf16, with a cold cache and in bursts,
/// in a file's name; `of` names the kernel where it is not the planner's choice.
fn kind(bench: &Bench<'_>, of: Option<&str>) -> String {
    let pass = bench.pass();
    let usual = if pass.is_none() { "f16" } else { "bf16" };
    let dtype = bench.cells.first().map(|cell| cell.dtype).filter(|dtype| *dtype != usual);
    let cache = bench.root.get("cache").text().filter(|cache| *cache != "cold");
    let regime = bench.regime().filter(|regime| *regime != "bursts");
    [Some(""), of, pass, dtype, cache, regime].into_iter().flatten().map(slug).collect::<Vec<_>>().join("-")
}

/// The kernel that was measured in place of the planner's choice, if one was.
fn kernel(bench: &Bench<'_>) -> Option<String> {
    let names = bench.cells.first().map(reading::Cell::names).unwrap_or_default();
    let planned = names.iter().any(|name| name == "flashcore");
    names.iter().find_map(|name| name.strip_prefix("kernel ")).filter(|_| !planned).map(String::from)
}

/// A name in the form used in file names: `NVIDIA H200` is `h200`.
fn slug(name: &str) -> String {
    let lower = name.to_lowercase();
    let name = lower.strip_prefix("nvidia ").unwrap_or(&lower);
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-")
}

/// What the files say.
fn compose(files: &[Evidence]) -> Page {
    let benches = Bench::all(files);
    let mut sections: Vec<Section> = Vec::new();
    sections.extend(speed::summary(&benches));
    sections.extend(speed::section(&benches));
    sections.extend(small::section(&benches));
    sections.extend(energy::section(&benches));
    sections.extend(roofline::section(files, &benches));
    sections.extend(errors::section(&benches));
    sections.extend(ladder::section(&benches));
    sections.extend(checks::section(files));
    sections.push(environment::section(files));
    let mut devices: Vec<&str> = Vec::new();
    for file in 0..files.len() {
        let root = Field::root(files, file);
        let device = root.get("gpu").get("ours").get("device").text().or_else(|| root.get("device").text());
        devices.extend(device.filter(|device| !devices.contains(device)));
    }
    let on = if devices.is_empty() { String::new() } else { format!(" on {}", devices.join(", ")) };
    let mut lead = text(
        "Made from evidence files and nothing else: every number links to the field that it was read from, and what was not measured is shown as ",
    );
    lead.push(Piece::Absent(String::new()));
    lead.push(Piece::Text(".".into()));
    let unknown: Vec<&str> = files
        .iter()
        .filter(|file| {
            let schema = file.body.get("schema").and_then(serde_json::Value::as_str).unwrap_or_default();
            !SHOWN.iter().any(|shown| schema.starts_with(shown))
        })
        .map(|file| file.name.as_str())
        .collect();
    if !unknown.is_empty() {
        lead.push(Piece::Text(format!(" Shown by their environment only: {}.", unknown.join(", "))));
    }
    Page { title: format!("FlashCore{on}"), lead, sections }
}
