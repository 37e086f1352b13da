//! Benchmarks of a CPU, and of a thing against itself; and what those of a GPU share with them.

use std::collections::HashMap;
use std::sync::Mutex;

use flashcore::Mask;
use serde_json::{Map, Value, json};

use super::fields::{Place, any, raw, raws};
use super::header::{asked, is_time, margin, option};
use super::judgement::{Judged, judgement};
use super::{Audit, near};
use crate::bench::{self, AgainstItself, Cell, Outcome, Taken, causal_shares, summarise_all};
use crate::cases::parse_mask;
use crate::ceilings::Ceilings;
use crate::gpu::bench::largest_tensor;
use crate::rule::Judgement;
use crate::shapes;
use crate::stats::{self, Interval};
use crate::timing::Samples;

/// Elements of a tensor that could be timed.
const MOST_ELEMENTS: f64 = (1u64 << 36) as f64;
/// Elements of a CPU's tensors that are drawn again: more take longer than they tell.
const MOST_DRAWN: usize = 1 << 24;
/// Calls of a sample at most.
const MOST_CALLS: u64 = 10_000;

/// As JSON; what was read from JSON can be written to it.
pub(super) fn value(of: impl serde::Serialize) -> Value {
    serde_json::to_value(of).unwrap_or_default()
}

pub(super) fn remake(audit: &mut Audit, root: &Place<'_>, version: u32) -> Map<String, Value> {
    let mut made = raws(&["threads", "no_torch_because"]);
    made.insert("clock".into(), json!("call"));
    let threads = audit.count(&root.get("threads"), 1..=65_536);
    let environment = root.get("environment").get("cpu");
    let isa = device(audit, root, threads);
    made.insert("device".into(), raw());
    let torch = root.get("torch");
    audit.maybe_text(&root.get("no_torch_because"), any);
    let either = torch.is_null() != root.get("no_torch_because").is_null();
    audit.require("no_torch_because", either, "is told where there is torch, or is not where there is none");
    made.insert("torch".into(), Value::Null);
    if !torch.is_null() {
        audit.text(&torch.get("version"), |text| text.starts_with(|c: char| c.is_ascii_digit()));
        audit.text(&torch.get("python"), any);
        made.insert("torch".into(), json!({"version": raw(), "threads": threads, "python": raw()}));
    }
    let model = environment.get("model");
    let model = if model.is_null() { "an unknown CPU" } else { model.str() };
    let machine = format!("cpu-{isa} on {model}, {threads} threads");
    let (ceilings, again) = self::ceilings(audit, &root.get("ceilings"), &machine);
    made.insert("ceilings".into(), again);
    let mut outcomes = Vec::new();
    let mut cells = Vec::new();
    for place in audit.list(&root.get("cells")) {
        let Some(cell) = cell(audit, &place) else { continue };
        let taken =
            Cpu { version, torch: !torch.is_null(), margin: margin(root), ceilings: ceilings.as_ref() };
        let Some((outcome, again)) = taken.cell(audit, &place, &cell) else { continue };
        outcomes.push(outcome);
        cells.push(again);
    }
    asked(audit, root, version, cells.len(), &mut made);
    made.insert("cells".into(), Value::Array(cells));
    made.insert("summaries".into(), value(summarise_all(&outcomes)));
    made.insert("causal_shares".into(), value(causal_shares(&outcomes)));
    made
}

/// The instruction set by the device's name, `cpu (avx2, 2 threads)`.
fn device<'a>(audit: &mut Audit, root: &Place<'a>, threads: u64) -> &'a str {
    let plural = if threads == 1 { "" } else { "s" };
    let end = format!(", {threads} thread{plural})");
    let named = root.get("device").str().strip_prefix("cpu (").and_then(|rest| rest.strip_suffix(&end));
    let paths = root.get("environment").get("cpu").get("paths").items();
    let isa = named.filter(|isa| paths.iter().any(|path| path.str() == *isa));
    audit.require("device", isa.is_some(), "is no path of this CPU on these threads");
    isa.unwrap_or_default()
}

/// Ceilings that times were held against: of this machine.
pub(super) fn ceilings(audit: &mut Audit, place: &Place<'_>, machine: &str) -> (Option<Ceilings>, Value) {
    if place.is_null() {
        return (None, Value::Null);
    }
    audit.text(&place.get("created"), is_time);
    super::machine::rates(audit, place);
    let rates = ["matmul_tflops", "memory_gbytes", "exp_gops", "launch_us", "launch_host_us"];
    let mut made = raws(&rates);
    made.extend([("machine".into(), json!(machine)), ("created".into(), raw())]);
    (serde_json::from_value(place.value.clone()).ok(), Value::Object(made))
}

/// What was asked in a cell; absent, and refused, where it is nothing that can be asked.
pub(super) fn cell(audit: &mut Audit, place: &Place<'_>) -> Option<Cell> {
    let text = |name: &str| place.get(name).str();
    let shape = shapes::parse(text("shape")).ok().map(|named| named.shape);
    let shape = shape.filter(|shape| shape.to_string() == text("shape"));
    let mask = parse_mask(text("mask")).ok().filter(|mask| mask.to_string() == text("mask"));
    let dtype = text("dtype").parse::<flashcore::DType>().ok().filter(|dtype| dtype.name() == text("dtype"));
    let (Some(shape), Some(mask), Some(dtype)) = (shape, mask, dtype) else {
        audit.deny(&place.at, "has a shape, a mask or a dtype that is none");
        return None;
    };
    let size = [shape.batch, shape.heads_q, shape.len_q.max(shape.len_k), shape.head_dim];
    if size.iter().map(|&n| n as f64).product::<f64>() > MOST_ELEMENTS {
        audit.deny(&place.at, "is larger than anything that could be timed");
        return None;
    }
    let named = shapes::NAMED.into_iter().find(|named| named.shape == shape && named.name == text("name"));
    let fits = place.get("name").is_null() || named.is_some();
    audit.require(&format!("{}.name", place.at), fits, "is not the name of this shape");
    Some(Cell { name: named.map_or("", |named| named.name), shape, mask, dtype })
}

/// What a contender's samples, its judgement and why it left are in every benchmark.
pub(super) struct Contender {
    pub samples: Samples,
    pub judgement: Option<Judgement>,
    /// The judgement made again.
    pub error: Value,
}

/// Reads a contender: who has a time has a judgement, and who failed says why.
pub(super) fn contender(audit: &mut Audit, place: &Place<'_>, version: u32, judged: Judged) -> Contender {
    let field = |name: &str| place.get(name);
    let failure = audit.maybe_text(&field("failure"), any).map(String::from);
    let times = audit.times(&field("samples_us"));
    let least = u64::from(failure.is_none());
    let calls = audit.count(&field("calls_per_sample"), least..=MOST_CALLS) as u32;
    let (judgement, error) = if field("error").is_null() {
        let nothing = failure.is_some() && times.is_empty();
        let at = format!("{}.error", place.at);
        audit.require(&at, nothing, "is null beside a time: nobody knows whether it is right");
        (None, Value::Null)
    } else {
        let (judgement, error) = judgement(audit, &field("error"), version, judged);
        (Some(judgement), error)
    };
    let name = audit.text(&field("name"), any).to_string();
    Contender { samples: Samples { name, calls, times, failure }, judgement, error }
}

/// Everybody in a cell is judged by one yardstick, and who stays to the end is sampled once a round.
pub(super) fn together(audit: &mut Audit, at: &str, all: &[Contender]) {
    let yardstick =
        |it: &Contender| it.judgement.as_ref().map(|it| [it.max, it.rms].map(|it| (it.plain, it.allowed)));
    let mut yardsticks = all.iter().filter_map(yardstick);
    let first = yardsticks.next();
    let same = yardsticks.all(|other| Some(other) == first);
    audit.require(at, same, "judges its contenders by different yardsticks");
    let rounds = all.iter().map(|it| it.samples.times.len()).max().unwrap_or(0);
    // Where one leaves, a round may end before everybody had a turn.
    let least = rounds.saturating_sub(usize::from(all.iter().any(|it| it.samples.failure.is_some())));
    let stayed = |it: &&Contender| it.samples.failure.is_none();
    let in_turn = all.iter().filter(stayed).all(|it| it.samples.times.len() >= least);
    audit.require(at, in_turn, "has contenders that were not sampled once a round");
    let names = all.iter().map(|it| it.samples.name.as_str()).collect();
    audit.require(at, are_different(names), "has one contender twice");
}

/// How cells of a CPU are made again.
struct Cpu<'a> {
    version: u32,
    torch: bool,
    margin: f64,
    ceilings: Option<&'a Ceilings>,
}

impl Cpu<'_> {
    /// Absent where what was taken cannot be: nothing follows from it.
    fn cell(&self, audit: &mut Audit, place: &Place<'_>, cell: &Cell) -> Option<(Outcome, Value)> {
        let problem = cell.problem();
        let judged_rows = bench::judged(&problem);
        let judged = Judged {
            rows: judged_rows,
            width: problem.head_dim_v,
            lse: Some(false),
            normal: Some(problem.dtype),
        };
        let contenders: Vec<Contender> = audit
            .list(&place.get("results"))
            .iter()
            .map(|result| contender(audit, result, self.version, judged))
            .collect();
        together(audit, &place.at, &contenders);
        let names: Vec<&str> = contenders.iter().map(|it| it.samples.name.as_str()).collect();
        let expected: &[&str] = if self.torch { &["flashcore", "torch"] } else { &["flashcore"] };
        audit.require(&format!("{}.results", place.at), names == expected, "are not of those who were there");
        let errors: Vec<Value> = contenders.iter().map(|it| it.error.clone()).collect();
        let results: Vec<_> = contenders.into_iter().map(|it| (it.samples, it.judgement)).collect();
        let ours = results.first().map(|(ours, _)| ours)?;
        let rounds = ours.failure.is_none().then_some(ours.times.len());
        let mut samples = |name: &str, are_taken: bool| {
            let times = audit.times(&place.get(name));
            let expected = if are_taken { rounds } else { Some(0) };
            let fits = expected.is_none_or(|expected| times.len() == expected);
            audit.require(&format!("{}.{name}", place.at), fits, "are not one a round, or not of this cell");
            times
        };
        let mut fma_peak_us = samples("fma_peak_samples_us", true);
        let mut bandwidth_us = samples("bandwidth_samples_us", cell.is_decode());
        let full_us = samples("full_samples_us", cell.mask == Mask::Causal);
        let fma_peak_gflops = audit.number(&place.get("fma_peak_gflops"), f64::MIN_POSITIVE..1e9);
        if !audit.holds() {
            return None;
        }
        if self.version < 2 {
            // A limit was the median of its samples then.
            fma_peak_us = stats::median(&fma_peak_us).into_iter().collect();
            bandwidth_us = stats::median(&bandwidth_us).into_iter().collect();
        }
        let checksums = [0; 3];
        let taken =
            Taken { checksums, judged_rows, results, fma_peak_us, bandwidth_us, full_us, fma_peak_gflops };
        let outcome = taken.outcome(cell, self.ceilings, self.margin);
        let mut made = value(&outcome);
        made["checksums"] = json!([raw(), raw(), raw()]);
        for checksum in audit.list(&place.get("checksums")) {
            audit.count(&checksum, ..=u64::from(u32::MAX));
        }
        for (n, error) in errors.into_iter().enumerate() {
            made["results"][n]["error"] = error;
        }
        if self.version < 2 {
            made.as_object_mut().and_then(|made| made.remove("pairing"));
            (made["fma_peak_samples_us"], made["bandwidth_samples_us"]) = (raw(), raw());
            audit.require(&place.at, !outcome.impossible, "is faster than the machine can be");
        }
        Some((outcome, made))
    }
}

/// The checksums of inputs that were drawn already, by cell: several audits of one process share them.
static DRAWN: Mutex<Option<HashMap<String, [u32; 3]>>> = Mutex::new(None);

/// Inputs come from the seed.
pub(super) fn inputs(audit: &mut Audit, root: &Place<'_>) {
    for place in root.get("cells").items() {
        let Some(cell) = cell(audit, &place) else { continue };
        if largest_tensor(&cell.problem()) > MOST_DRAWN {
            audit.miss(format!("{}: inputs of this size are not drawn again", place.at));
            continue;
        }
        let key = format!("{} {}", cell.shape, cell.dtype);
        let checksums = drawn(key, || bench::checksums(&bench::inputs(&cell)));
        audit.agree(&format!("{}.checksums", place.at), place.get("checksums").value, &value(checksums));
    }
}

/// Checksums, made at most once in a process.
pub(super) fn drawn(key: String, draw: impl FnOnce() -> [u32; 3]) -> [u32; 3] {
    let mut drawn = DRAWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    *drawn.get_or_insert_default().entry(key).or_insert_with(draw)
}

pub(super) fn against_itself(audit: &mut Audit, root: &Place<'_>, version: u32) -> Map<String, Value> {
    let mut cells = Vec::new();
    for place in audit.list(&root.get("cells")) {
        let label = audit.text(&place.get("cell"), is_label).to_string();
        let handicap = audit.number(&place.get("handicap"), 1.0..=2.0);
        let planted =
            option(root, "--handicap").and_then(|text| text.trim_end_matches('%').parse::<f64>().ok());
        let planted = near(handicap, 1.0 + planted.unwrap_or(0.0) / 100.0);
        audit.require(&format!("{}.handicap", place.at), planted, "is not what the command planted");
        let mut made;
        if version < 2 {
            let comparisons = audit.list(&place.get("comparisons"));
            let comparisons = comparisons.iter().map(|place| lone_comparison(audit, place, margin(root)));
            made = value(AgainstItself::new(label, handicap, comparisons.collect()));
            for name in ["samples_us", "pairing"] {
                made.as_object_mut().and_then(|made| made.remove(name));
            }
            for comparison in made["comparisons"].as_array_mut().into_iter().flatten() {
                comparison["speed_up"] = raw();
            }
        } else {
            let pairs = audit.list(&place.get("samples_us"));
            let pairs = pairs.iter().map(|pair| {
                let sides = audit.list(pair);
                let [ours, other] = &sides[..] else {
                    audit.deny(&pair.at, "is no pair of samples");
                    return [Vec::new(), Vec::new()];
                };
                let sides = [audit.times(ours), audit.times(other)];
                audit.require(&pair.at, sides[0].len() == sides[1].len(), "are not one of each a round");
                sides
            });
            let found = AgainstItself::of(label, handicap, pairs.collect(), margin(root));
            audit.require(&place.at, found.is_some(), "has too few samples for a comparison");
            made = value(found);
        }
        let repetitions = place.get("repetitions");
        let at_most_asked = repetitions.value.as_u64().unwrap_or(0) <= asked_times(root);
        audit.require(&repetitions.at, at_most_asked, "are more than the command asked for");
        let whole = root.get("complete").value != &json!(true)
            || repetitions.value.as_u64() == Some(asked_times(root));
        audit.require(
            &repetitions.at,
            whole,
            "are fewer than the command asked for, though it ran to its end",
        );
        cells.push(made);
    }
    audit.require("cells", !cells.is_empty(), "are none: nothing was measured");
    let labels = root.get("cells").items().iter().map(|place| place.get("cell").str()).collect();
    audit.require("cells", are_different(labels), "hold one twice");
    [("cells".to_string(), Value::Array(cells))].into_iter().collect()
}

/// Whether no text stands twice.
pub(super) fn are_different(mut texts: Vec<&str>) -> bool {
    texts.sort_unstable();
    texts.windows(2).all(|two| two[0] != two[1])
}

/// How often the command was told to compare.
fn asked_times(root: &Place<'_>) -> u64 {
    option(root, "--against-itself").and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// As `1x8x512x64 f16 causal`.
fn is_label(text: &str) -> bool {
    let words: Vec<&str> = text.split(' ').collect();
    let [shape, dtype, mask] = words[..] else { return false };
    let shape = shapes::parse(shape).is_ok_and(|named| named.shape.to_string() == shape);
    let dtype = dtype.parse::<flashcore::DType>().is_ok_and(|known| known.name() == dtype);
    shape && dtype && parse_mask(mask).is_ok_and(|known| known.to_string() == mask)
}

/// A comparison whose samples are not kept: its intervals lie in each other, and its verdict follows from the wider one.
fn lone_comparison(audit: &mut Audit, place: &Place<'_>, margin: f64) -> bench::Comparison {
    let mut interval = |name: &str, level: f64| {
        let place = place.get(name);
        let low = audit.number(&place.get("low"), f64::MIN_POSITIVE..1e6);
        Interval { low, high: audit.number(&place.get("high"), low..1e6), level }
    };
    let (usual, sure) = (interval("interval", 0.95), interval("verdict_interval", stats::VERDICT_LEVEL));
    let speed_up = audit.number(&place.get("speed_up"), sure.low..=sure.high);
    let within = sure.low <= usual.low && usual.high <= sure.high;
    audit.require(&place.at, within, "is surer of a narrower interval");
    // With fewer than six rounds there is no verdict, and it is not known how many there were.
    let follows = stats::verdict(&sure, margin);
    let verdict = if place.get("verdict").str() == "UNDECIDED" { stats::Verdict::Undecided } else { follows };
    bench::Comparison {
        peer: "itself".into(),
        speed_up,
        interval: usual,
        verdict_interval: sure,
        verdict,
        margin,
    }
}
