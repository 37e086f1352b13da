//! Reports: every number has a source, what is absent is shown as absent, and docs/report is what the command makes.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use flashcore_lab::evidence::audit::contradictions;
use flashcore_lab::report::{self, source::Evidence};
use roxmltree::{Document, Node, NodeType, ParsingOptions};
use serde_json::{Value, json};

/// How docs/report is made again after the record has changed.
const MAKE: &str = "cargo run --release -- report record/*.json -o docs/report --charts docs";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

/// The record, as the command sees it from the repository for a report in docs/report.
fn record() -> Vec<Evidence> {
    // Read once: every file is audited.
    static RECORD: OnceLock<Vec<Evidence>> = OnceLock::new();
    RECORD.get_or_init(read_record).clone()
}

fn read_record() -> Vec<Evidence> {
    let mut names: Vec<String> = std::fs::read_dir(root().join("record"))
        .expect("record/")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| Path::new(name).extension().is_some_and(|kind| kind == "json"))
        .collect();
    names.sort();
    let read = |name: &String| {
        let text = std::fs::read_to_string(root().join("record").join(name)).expect("a file of the record");
        Evidence::read(&format!("record/{name}"), &format!("../../record/{name}"), &text, contradictions)
            .expect("evidence")
    };
    names.iter().map(read).collect()
}

/// What a page is made of, as if it had been audited.
fn of(value: &Value) -> Evidence {
    Evidence { name: "made/up.json".into(), link: "up.json".into(), hash: String::new(), body: value.clone() }
}

fn html(files: &[Evidence]) -> String {
    report::pages(files)[0].1.clone()
}

fn parse(text: &str) -> Document<'_> {
    Document::parse_with_options(text, ParsingOptions { allow_dtd: true, ..ParsingOptions::default() })
        .expect("well-formed XML")
}

fn class<'a>(node: &Node<'a, '_>) -> &'a str {
    node.attribute("class").unwrap_or_default()
}

fn words(node: Node<'_, '_>) -> String {
    node.descendants().filter(Node::is_text).filter_map(|text| text.text()).collect()
}

fn is_number(node: &Node<'_, '_>) -> bool {
    node.has_tag_name(("http://www.w3.org/1999/xhtml", "a")) && class(node).split(' ').any(|name| name == "n")
}

/// The value of a field, or of two with a division sign between.
fn look_up(body: &Value, path: &str) -> f64 {
    let one = |pointer: &str| {
        let value = body.pointer(pointer).and_then(Value::as_f64);
        value.unwrap_or_else(|| panic!("{pointer} is no number of the evidence"))
    };
    match path.split_once(" ÷ ") {
        None => one(path),
        Some((dividend, _)) if one(dividend) == 0.0 => 0.0,
        Some((dividend, divisor)) => one(dividend) / one(divisor),
    }
}

/// Whether a text is a value rounded to the digits that it shows.
fn rounds_to(shown: &str, style: &str, value: f64) -> bool {
    let factor = match style {
        "percent" => 100.0,
        "gibibytes" => 1.0 / f64::from(1 << 30),
        "thousandths" => 1e-3,
        _ => 1.0,
    };
    let digits = shown.trim_end_matches(['×', '%', ' ']).trim_end_matches(" GiB");
    let (mantissa, exponent) = digits.split_once('e').unwrap_or((digits, "0"));
    let decimals = mantissa.split_once('.').map_or(0, |(_, behind)| behind.len() as i32);
    let last_place = 10f64.powi(exponent.parse::<i32>().expect("an exponent") - decimals);
    let shown: f64 = digits.parse().unwrap_or_else(|_| panic!("{digits} is no number"));
    (shown - value * factor).abs() <= 0.5 * last_place * (1.0 + 1e-9)
}

#[test]
fn every_number_of_the_page_is_what_its_field_says() {
    let files = record();
    let page = html(&files);
    let document = parse(&page);
    // The lines of the evidence: which file, which field, which value.
    let mut lines: HashMap<&str, (usize, String, f64)> = HashMap::new();
    for (file, details) in (0..files.len()).map(|file| (file, format!("file{}", file + 1))) {
        let details = document.descendants().find(|node| node.attribute("id") == Some(details.as_str()));
        for line in
            details.expect("every file is listed").descendants().filter(|node| node.tag_name().name() == "tr")
        {
            let Some(name) = line.attribute("id") else { continue };
            let cells: Vec<String> = line.children().filter(Node::is_element).map(words).collect();
            lines.insert(name, (file, cells[0].clone(), cells[1].parse().expect("a value")));
        }
    }
    let mut seen = 0;
    for link in document.descendants().filter(is_number) {
        let name =
            link.attribute("href").and_then(|href| href.strip_prefix('#')).expect("a link into the page");
        let (file, path, value) = lines.get(name).unwrap_or_else(|| panic!("{name} is not listed"));
        assert_eq!(look_up(&files[*file].body, path), *value, "{path} of {}", files[*file].name);
        let (shown, style) = (words(link), link.attribute("data-style").expect("a style"));
        assert!(rounds_to(&shown, style, *value), "{shown} is not {value} ({path})");
        seen += 1;
    }
    assert!(seen > 500, "only {seen} numbers were found");
}

/// Every text that stands in evidence, the names of its fields among them.
fn texts(value: &Value, found: &mut String) {
    match value {
        Value::String(text) => found.push_str(text),
        Value::Array(items) => items.iter().for_each(|item| texts(item, found)),
        Value::Object(members) => members.iter().for_each(|(key, member)| {
            found.push_str(key);
            found.push('\n');
            texts(member, found);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    found.push('\n');
}

/// The shares of what is allowed that evidence gives, as a chart writes them.
fn shares(value: &Value, found: &mut HashSet<String>) {
    if let (Some(error), Some(allowed)) = (value["error"].as_f64(), value["allowed"].as_f64()) {
        let share = if error == 0.0 { 0.0 } else { error / allowed };
        found.insert(format!("{:.1}", share * 100.0));
    }
    match value {
        Value::Array(items) => items.iter().for_each(|item| shares(item, found)),
        Value::Object(members) => members.values().for_each(|member| shares(member, found)),
        _ => {}
    }
}

#[test]
fn no_number_stands_on_the_page_without_a_source() {
    let files = record();
    let page = html(&files);
    let document = parse(&page);
    // Names that have a digit in them and are no numbers.
    let names = ["FlashAttention-2", "FlashAttention-3", "BLAKE3", "p90"];
    let mut told = String::new();
    let mut shown: HashSet<String> = HashSet::new();
    for file in &files {
        texts(&file.body, &mut told);
        told.push_str(&file.name);
        told.push_str(&file.hash);
        shares(&file.body, &mut shown);
    }
    let trim = |text: String| text.trim_end_matches(['×', '%', ' ']).to_string();
    shown.extend(document.descendants().filter(is_number).map(words).map(trim));
    let mut seen = 0;
    for text in document.descendants().filter(|node| node.node_type() == NodeType::Text) {
        let of_a_kind = |node: &Node<'_, '_>| {
            is_number(node) || node.tag_name().name() == "style" || ["tick", "fields"].contains(&class(node))
        };
        if text.ancestors().any(|node| of_a_kind(&node)) {
            continue;
        }
        let mut rest = text.text().unwrap_or_default().to_string();
        for name in names {
            rest = rest.replace(name, "");
        }
        for word in rest.split(|c: char| c.is_whitespace() || "()[]{},;:×".contains(c)) {
            let word = word.trim_matches(['.', '–', '-', '%', '/']);
            if word.chars().any(|c| c.is_ascii_digit()) {
                assert!(
                    shown.contains(word) || told.contains(word),
                    "{word} has no source, in {:?}",
                    text.text()
                );
                seen += 1;
            }
        }
    }
    assert!(seen > 500, "only {seen} words with digits were found");
}

#[test]
fn the_markdown_twin_links_every_number_to_its_field() {
    let files = record();
    let [_, (_, markdown)] = report::pages(&files);
    let mut targets: HashMap<&str, (f64, f64)> = HashMap::new();
    for line in markdown.lines() {
        let Some((name, rest)) = line.strip_prefix('[').and_then(|line| line.split_once("]: ")) else {
            continue;
        };
        let (link, title) = rest.split_once(' ').expect("a title");
        let (file, pointer) = link.split_once('#').expect("a field");
        let body = &files.iter().find(|known| known.link == file).expect("a file of the record").body;
        let title = title.trim_matches('"');
        let (value, path) = title.split_once(" = ").unwrap_or((title, pointer));
        targets.insert(name, (value.parse().expect("a value"), look_up(body, path)));
    }
    for (name, (said, found)) in &targets {
        assert_eq!(said, found, "{name}");
    }
    let mut seen = 0;
    for (at, _) in markdown.match_indices("][n") {
        let name = &markdown[at + 2..][..markdown[at + 2..].find(']').expect("an end")];
        let shown = &markdown[markdown[..at].rfind('[').expect("a beginning") + 1..at];
        let (value, _) = targets.get(name).unwrap_or_else(|| panic!("{name} leads nowhere"));
        let fits = ["ratio", "percent", "gibibytes", "thousandths"]
            .iter()
            .any(|style| rounds_to(shown, style, *value));
        assert!(fits, "{shown} is not {value}");
        seen += 1;
    }
    assert!(seen > 500, "only {seen} numbers were found");
    for (at, _) in markdown.match_indices("](") {
        let link = &markdown[at + 2..][..markdown[at + 2..].find(')').expect("an end")];
        assert!(link == report::HTML || files.iter().any(|file| file.link == link), "{link} leads nowhere");
    }
}

/// A benchmark of one cell, in which a peer failed and a ceiling was not measured.
fn incomplete() -> Value {
    let bound = json!({"error": 1e-4, "plain": 2e-4, "allowed": 5e-4});
    json!({
        "schema": "flashcore.bench-gpu/1", "created": "2026-11-15T07:33:19Z", "clock": "kernel", "cache": "cold",
        "gpu": {"ours": {"device": "NVIDIA X1"}, "torch": null, "peak_tflops": null, "matmul_tflops": null},
        "cells": [{
            "shape": "1x8x512x64", "dtype": "f16", "mask": "full", "group": "all", "flops": 536870912.0, "bytes": 2097152.0,
            "results": [
                {"name": "flashcore", "p50_us": 5.5, "tflops": 97.6, "peak_share": null, "matmul_share": null,
                 "gbytes": 381.0, "error": {"max": bound, "rms": bound, "row": bound, "lse": null}, "failure": null},
                {"name": "cudnn", "p50_us": null, "tflops": null, "error": null, "failure": "no engine <for> this"},
            ],
            "comparisons": [], "ladder": [], "states": [],
        }],
        "summaries": [],
    })
}

#[test]
fn the_regime_and_the_energy_of_a_run_are_shown() {
    let mut sustained = incomplete();
    sustained["regime"] = json!("sustained");
    sustained["cells"][0]["results"][0]["energy"] = json!({
        "used": [null], "power_w": 698.0, "mj_per_call": 3.84, "mj_interval": null, "j_per_tflop": 7.15,
        "sm_clock_mhz": 1512.0,
    });
    let page = html(&[of(&sustained)]);
    let document = parse(&page);
    let text = words(document.root());
    assert!(text.contains("kernel clock, cold cache, sustained"), "{text}");
    let rows = document.descendants().filter(|node| node.tag_name().name() == "tr");
    let cells = |row: Node<'_, '_>| row.children().filter(Node::is_element).map(words).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = rows.map(cells).collect();
    let expected = ["1x8x512x64 f16 full", "FlashCore", "3.84", "absent", "absent", "7.150", "698", "1512"];
    assert!(rows.iter().any(|row| *row == expected), "{rows:?}");
    let names: Vec<String> = report::charts(&[of(&sustained)]).into_iter().map(|(name, _)| name).collect();
    assert!(names.contains(&"x1-small-full-sustained.svg".into()), "{names:?}");
    assert!(!html(&[of(&incomplete())]).contains("id=\"energy\""), "and not where there is none");
}

#[test]
fn what_was_not_measured_is_shown_as_absent_with_the_reason() {
    let files = [of(&incomplete())];
    let page = html(&files);
    let document = parse(&page);
    let absent: Vec<_> = document.descendants().filter(|node| class(node) == "absent").collect();
    assert!(absent.iter().any(|node| node.attribute("title") == Some("no engine <for> this")));
    let row = |first: &str| {
        let rows = document.descendants().filter(|node| node.tag_name().name() == "tr");
        let cells =
            |row: Node<'_, '_>| row.children().filter(Node::is_element).map(words).collect::<Vec<_>>();
        rows.map(cells).find(|cells| cells[0] == first).unwrap_or_else(|| panic!("no row {first}"))
    };
    assert_eq!(row("1x8x512x64"), ["1x8x512x64", "5.50", "absent", "absent"]);
    assert_eq!(row("memory, measured by copying"), ["memory, measured by copying", "absent", "GB/s"]);
    let cell = row("1x8x512x64 f16 full");
    assert_eq!(cell[1..5], ["97.6", "absent", "absent", "381"], "no peak was known, and none is made up");
    let [_, (_, markdown)] = report::pages(&files);
    assert!(markdown.contains("*absent (no engine <for> this)*"));
    assert!(!page.contains("NaN") && !markdown.contains("NaN"));
}

#[test]
fn ceilings_are_those_that_were_measured_on_the_same_device() {
    let ceilings = |machine: &str| {
        of(&json!({
            "schema": "flashcore.ceilings/1", "machine": machine, "created": "2026-11-15T08:00:00Z",
            "matmul_tflops": 905.4, "memory_gbytes": 3987.0, "exp_gops": null, "launch_us": 2.25,
        }))
    };
    let rows = |files: &[Evidence]| {
        let page = html(files);
        let document = parse(&page);
        let rows = document.descendants().filter(|node| node.tag_name().name() == "tr");
        let cells =
            |row: Node<'_, '_>| row.children().filter(Node::is_element).map(words).collect::<Vec<_>>();
        let drawn = document.descendants().filter(|node| class(node) == "ceiling").count();
        (rows.map(cells).collect::<Vec<_>>(), drawn)
    };
    let (found, drawn) = rows(&[of(&incomplete()), ceilings("NVIDIA X1")]);
    for row in [
        ["products alone, measured", "905", "TFLOP/s"],
        ["memory, measured by copying", "3987", "GB/s"],
        ["exponentials, measured", "absent", "billions a second"],
        ["an empty launch, measured", "2.25", "µs"],
    ] {
        assert!(found.iter().any(|known| known[..] == row), "{row:?}");
    }
    assert_eq!(drawn, 2, "the products and the memory");
    let (found, drawn) = rows(&[of(&incomplete()), ceilings("NVIDIA X2")]);
    assert!(found.iter().any(|known| known[..] == ["memory, measured by copying", "absent", "GB/s"]));
    assert_eq!(drawn, 0, "another device's ceilings say nothing");
}

#[test]
fn lengths_of_one_group_are_a_chart_of_lines_and_other_shapes_have_bars() {
    let cell = |group: &str, shape: &str, mask: &str, rate: f64| {
        let mut cell = incomplete()["cells"][0].clone();
        (cell["group"], cell["shape"], cell["mask"]) = (json!(group), json!(shape), json!(mask));
        cell["results"][0]["tflops"] = json!(rate);
        cell
    };
    let mut value = incomplete();
    value["cells"] = json!([
        cell("long", "1x8x2048x64", "full", 300.0),
        cell("long", "4x8x512x64", "full", 100.0),
        cell("long", "2x8x1024x64", "full", 200.0),
        cell("mixed", "1x8x512x64", "full", 50.0),
        cell("mixed", "1x8x512x128", "full", 60.0),
        cell("mixed", "1x8x1024x64", "causal", 70.0),
    ]);
    let page = html(&[of(&value)]);
    let document = parse(&page);
    let titles = |section: &str| {
        let section =
            document.descendants().find(|node| node.attribute("id") == Some(section)).expect("a section");
        let charts = section.descendants().filter(|node| node.tag_name().name() == "svg");
        charts.filter_map(|svg| Some(words(svg.first_element_child()?))).collect::<Vec<_>>()
    };
    assert_eq!(titles("speed"), ["head_dim 64, full, f16"]);
    assert_eq!(titles("small"), ["Median time, full, f16", "Median time, causal, f16"]);
    let marks = document.descendants().filter(|node| node.tag_name().name() == "title").map(words);
    let of_lines: Vec<String> =
        marks.filter(|title| title.contains(": ") && title.ends_with("TFLOP/s")).collect();
    let order = ["512: 100", "1024: 200", "2048: 300"].map(|what| format!("FlashCore, {what} TFLOP/s"));
    assert_eq!(of_lines[..3], order, "in the order of the lengths");
}

#[test]
fn a_report_shows_a_new_value_when_the_evidence_has_one() {
    let mut value = incomplete();
    assert!(!html(&[of(&value)]).contains("77.1 %"));
    value["cells"][0]["results"][0]["matmul_share"] = json!(0.7712);
    assert!(html(&[of(&value)]).contains("77.1 %"));
}

#[test]
fn a_result_outside_the_rule_is_seen_in_the_chart_and_in_the_table() {
    let mut value = incomplete();
    value["cells"][0]["results"][0]["error"]["row"]["error"] = json!(1e-3);
    let page = html(&[of(&value)]);
    let document = parse(&page);
    let title = "FlashCore, 1x8x512x64 f16 full by row: 200.0 %";
    assert!(document.descendants().any(|node| node.tag_name().name() == "title" && words(node) == title));
    assert!(document.descendants().filter(is_number).any(|number| words(number) == "200.0 %"));
}

#[test]
fn what_verify_found_has_a_section_with_its_failures() {
    let value = json!({
        "schema": "flashcore.verify/1", "complete": true, "tier": "quick",
        "engines": [{"engine": "cpu-avx2", "passed": 41, "skipped": 2, "failed": 1, "worst_share": 1.25, "worst_case": "sinks"}],
        "results": [
            {"case": "plain", "engine": "cpu-avx2", "status": "passed", "faults": []},
            {"case": "sinks", "engine": "cpu-avx2", "status": "failed", "faults": ["row 7 is off", "scale"]},
        ],
    });
    let page = html(&[of(&value)]);
    let document = parse(&page);
    let section =
        document.descendants().find(|node| node.attribute("id") == Some("checks")).expect("a section");
    let text = words(section);
    for expected in ["cpu-avx2", "41", "125.0 %", "row 7 is off; scale"] {
        assert!(text.contains(expected), "{expected} is missing in {text}");
    }
    assert!(!text.contains("plain"), "what passed is not listed");
}

#[test]
fn a_page_needs_no_network_and_tells_its_charts_in_words() {
    let page = html(&record());
    let document = parse(&page);
    for node in document.descendants().filter(Node::is_element) {
        assert!(!["script", "img", "link", "iframe", "object"].contains(&node.tag_name().name()));
        assert!(node.attribute("src").is_none());
        if let Some(href) = node.attribute("href") {
            assert!(href.starts_with('#') || href.starts_with("../../record/"), "{href}");
        }
        if node.tag_name().name() == "svg" {
            for part in ["title", "desc"] {
                let found =
                    node.children().find(|child| child.tag_name().name() == part).expect("words for a chart");
                assert!(!words(found).is_empty());
                let id = found.attribute("id").expect("a name");
                assert!(
                    node.attribute("aria-labelledby").is_some_and(|by| by.split(' ').any(|name| name == id))
                );
            }
        }
    }
    let mut names = HashSet::new();
    for name in document.descendants().filter_map(|node| node.attribute("id")) {
        assert!(names.insert(name), "{name} is the name of two things");
    }
    let links = document.descendants().filter_map(|node| node.attribute("href")?.strip_prefix('#'));
    for link in links {
        assert!(names.contains(link), "#{link} leads nowhere");
    }
    assert!(page.len() < 1_000_000, "{} bytes", page.len());
}

#[test]
fn charts_are_files_of_their_own_named_after_the_device() {
    let charts = report::charts(&record());
    let names: Vec<&str> = charts.iter().map(|(name, _)| name.as_str()).collect();
    // What the planner chooses and what one kernel does are two pictures.
    let shows = |name: &str, contender: &str| {
        let svg = charts.iter().find(|(known, _)| known == name).map(|(_, svg)| svg);
        svg.is_some_and(|svg| svg.contains(&format!("<title>{contender}, 512: ")))
    };
    assert!(shows("h200.svg", "FlashCore") && shows("h200.svg", "cuDNN"), "{names:?}");
    assert!(shows("h200-sm80-fwd.svg", "FlashCore sm80_fwd"), "{names:?}");
    assert!(shows("h200-backward.svg", "FlashAttention-3"), "{names:?}");
    for (name, svg) in
        charts.iter().filter(|(name, svg)| name.starts_with("h200") && svg.contains("attention "))
    {
        let pass = if name.contains("backward") { "backward" } else { "forward" };
        assert!(svg.contains(&format!("attention {pass}, TFLOP/s")), "{name}");
    }
    for (name, svg) in &charts {
        let document = parse(svg);
        assert!(svg.contains("record/"), "{name} says where its numbers are from");
        assert!(document.root_element().children().any(|node| node.tag_name().name() == "desc"), "{name}");
    }
}

#[test]
fn the_report_in_docs_is_what_the_command_makes_of_the_record() {
    let files = record();
    let same = |folder: &str, all: &[report::Written]| {
        for (name, text) in all {
            let path = root().join(folder).join(name);
            let found = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(found == *text, "{folder}/{name} is not what the record gives: {MAKE}");
        }
    };
    same("docs/report", &report::pages(&files));
    same("docs", &report::charts(&files));
}

#[test]
fn what_was_planted_and_missed_is_named() {
    let finding = |name: &str, nature: &str, right: bool| json!({"name": name, "nature": nature, "judge": "the rule", "as_it_should": right, "said": "right"});
    let value = json!({
        "schema": "flashcore.faults/1", "caught": [22, 23], "accepted": [9, 9],
        "findings": [finding("zeros", "fault", true), finding("a stale output", "fault", false)],
    });
    let page = html(&[of(&value)]);
    let document = parse(&page);
    let section =
        document.descendants().find(|node| node.attribute("id") == Some("checks")).expect("a section");
    let text = words(section);
    assert!(text.contains("22") && text.contains("23") && text.contains("a stale output"), "{text}");
    assert!(!text.contains("zeros"), "what was caught is not listed");
}

#[test]
fn a_file_that_a_report_cannot_show_is_named() {
    let shown = of(&incomplete());
    let mut other = of(&json!({"schema": "flashcore.micro/1", "pieces": []}));
    other.name = "made/pieces.json".into();
    let page = html(&[shown.clone(), other]);
    assert!(page.contains("Shown by their environment only: made/pieces.json."));
    assert!(!html(&[shown]).contains("Shown by their environment only"));
}

/// What the command does in a folder: its exit code and its words.
fn run(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    let output =
        command.arg("report").args(arguments).current_dir(folder).output().expect("the command starts");
    let words = [output.stdout, output.stderr].map(|words| String::from_utf8_lossy(&words).into_owned());
    (output.status.code(), words.concat())
}

/// A benchmark of the record.
fn benchmark() -> Evidence {
    let is_one = |file: &Evidence| file.body["schema"] == "flashcore.bench-gpu/1";
    record().into_iter().find(is_one).expect("the record holds a benchmark")
}

#[test]
fn the_command_writes_the_same_bytes_every_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    std::fs::copy(root().join(benchmark().name), at("up.json")).expect("a copy");
    for out in ["one", "two"] {
        let (code, words) = run(folder.path(), &["up.json", "-o", out, "--charts", out]);
        assert_eq!(code, Some(0), "{words}");
    }
    let names = |out: &str| {
        let entries =
            std::fs::read_dir(at(out)).expect("a folder").map(|entry| entry.expect("an entry").file_name());
        entries.collect::<HashSet<_>>()
    };
    assert_eq!(names("one"), names("two"));
    assert!(names("one").len() > 2, "two pages and a chart at least");
    for name in names("one") {
        let read = |out: &str| std::fs::read_to_string(at(out).join(&name)).expect("a file");
        assert_eq!(read("one"), read("two"), "{name:?}");
    }
    assert!(std::fs::read_to_string(at("one/report.md")).expect("a report").contains("(../up.json)"));
}

#[test]
fn the_command_makes_nothing_of_what_is_no_evidence_or_contradicts_itself() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let refused = |name: &str, code: i32, because: &str| {
        let (given, words) = run(folder.path(), &[name, "-o", "out", "--charts", "out"]);
        assert_eq!(given, Some(code), "{words}");
        assert!(words.contains(because), "{words}");
        assert!(!at("out").exists(), "nothing is written of a report that cannot be made");
    };
    refused("none.json", 2, "none.json");
    std::fs::write(at("other.json"), "{}").expect("a file");
    refused("other.json", 2, "schema");
    let sealed = |name: &str, document: &mut Value| {
        document["hash"] = json!("");
        let text = serde_json::to_string_pretty(document).expect("JSON");
        std::fs::write(at(name), flashcore_lab::evidence::seal(&text)).expect("a file");
    };
    let mut edited = benchmark().body;
    sealed("same.json", &mut edited);
    assert_eq!(run(folder.path(), &["same.json", "-o", "same"]).0, Some(0));
    edited["cells"][0]["results"][0]["p50_us"] = json!(4.0);
    sealed("edited.json", &mut edited);
    refused("edited.json", 1, "contradicts itself");
    // What nobody checks is not shown.
    let mut unknown = benchmark().body;
    unknown["schema"] = json!("flashcore.bench-gpu/9");
    sealed("unknown.json", &mut unknown);
    refused("unknown.json", 2, "not known");
    let mut open = benchmark().body;
    open.as_object_mut().expect("a document").remove("hash");
    std::fs::write(at("open.json"), open.to_string()).expect("a file");
    refused("open.json", 2, "no hash");
    sealed("note.json", &mut json!({"schema": "flashcore.micro/1", "pieces": []}));
    refused("note.json", 2, "a note");
}
