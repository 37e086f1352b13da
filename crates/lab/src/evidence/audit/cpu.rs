//! Benchmarks of a CPU.

use flashcore::{Device, Pass};
use serde_json::{Map, Value, json};

use super::Audit;
use super::bench::{Contender, ceilings, cell, cells, contender, drawn, together, value};
use super::fields::{Place, any, raw, raws};
use super::header::margin;
use super::judgement::Judged;
use crate::bench::cells::Cell;
use crate::bench::cpu::{checksums, inputs as draw, pool};
use crate::bench::gpu::largest_tensor;
use crate::bench::outcome::{CpuConditions, Outcome, causal_shares};
use crate::ceilings::Ceilings;
use crate::stats;

/// The most elements of tensors that are drawn again: more would take too long.
const MOST_DRAWN: usize = 1 << 24;

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
    let (ceilings, again) = ceilings(audit, &root.get("ceilings"), &machine);
    made.insert("ceilings".into(), again);
    let cpu = Cpu { version, torch: !torch.is_null(), margin: margin(root), ceilings };
    let outcomes = cells(audit, root, version, &mut made, |audit, place, cell| cpu.cell(audit, place, &cell));
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

/// How cells of a CPU are recomputed.
struct Cpu {
    version: u32,
    torch: bool,
    margin: f64,
    ceilings: Option<Ceilings>,
}

impl Cpu {
    /// Absent where the raw values are impossible: nothing follows from them.
    fn cell(&self, audit: &mut Audit, place: &Place<'_>, cell: &Cell) -> Option<(Outcome, Value)> {
        let judged_rows = cell.judged_rows().len();
        let judged = Judged::of(cell, judged_rows);
        let contenders: Vec<Contender> = audit
            .list(&place.get("results"))
            .iter()
            .map(|result| contender(audit, result, self.version, judged))
            .collect();
        together(audit, &place.at, &contenders);
        let names: Vec<&str> = contenders.iter().map(|it| it.samples.name.as_str()).collect();
        let mut others: Vec<&str> = names.iter().skip(1).copied().collect();
        if self.torch {
            let last = others.pop() == Some("torch");
            audit.require(&format!("{}.results", place.at), last, "are not of those who were there");
        }
        // Ours in other forms: all of them, or none.
        let forms: Vec<&str> = cell.forms().into_iter().map(|(name, _)| name).collect();
        let known = names.first() == Some(&"flashcore") && (others.is_empty() || others == forms);
        audit.require(&format!("{}.results", place.at), known, "are not of those who were there");
        let errors: Vec<Value> = contenders.iter().map(|it| it.error.clone()).collect();
        let results: Vec<_> = contenders.into_iter().map(|it| (it.samples, it.judgement)).collect();
        let ours = results.first().map(|(ours, _)| ours)?;
        let rounds = ours.failure.is_none().then_some(ours.times.len());
        let mut samples = |name: &str, are_taken: bool| {
            let times = audit.times(&place.get(name));
            let expected = if are_taken { rounds } else { Some(0) };
            let fits = expected.is_none_or(|expected| times.len() == expected);
            audit.require(
                &format!("{}.{name}", place.at),
                fits,
                "are not one per round, or not of this cell",
            );
            times
        };
        let mut fma_peak_us = samples("fma_peak_samples_us", true);
        let mut bandwidth_us = samples("bandwidth_samples_us", cell.is_decode());
        let full_us = samples("full_samples_us", cell.has_causal_share());
        let fma_peak_gflops = audit.number(&place.get("fma_peak_gflops"), f64::MIN_POSITIVE..1e9);
        if !audit.holds() {
            return None;
        }
        if self.version < 2 {
            // In that version, a limit was the median of its samples.
            fma_peak_us = stats::median(&fma_peak_us).into_iter().collect();
            bandwidth_us = stats::median(&bandwidth_us).into_iter().collect();
        }
        let conditions = CpuConditions {
            fma_peak_gflops,
            fma_peak_samples_us: fma_peak_us,
            bandwidth_samples_us: bandwidth_us,
            full_samples_us: full_us,
            ..CpuConditions::default()
        };
        let ceilings = self.ceilings.as_ref();
        let outcome = Outcome::on_cpu(cell, judged_rows, results, conditions, ceilings, self.margin);
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

/// Inputs come from the seed.
pub(super) fn inputs(audit: &mut Audit, root: &Place<'_>) {
    for place in root.get("cells").items() {
        let Some(cell) = cell(audit, &place) else { continue };
        if largest_tensor(&cell.problem()) > MOST_DRAWN {
            audit.miss(format!("{}: inputs of this size are not drawn again", place.at));
            continue;
        }
        if cell.sequences.is_some() {
            let key = format!("{} of {}", largest_tensor(&cell.problem()), cell.types);
            let checksums = drawn(key, || pool(&cell).checksums());
            audit.agree(&format!("{}.checksums", place.at), place.get("checksums").value, &value(checksums));
            continue;
        }
        let key = format!("{} {}", cell.shape, cell.types);
        // q, k and v are the same whatever is made of them.
        let forward = Cell { pass: Pass::Forward.into(), ..cell };
        let checksums =
            drawn(key, || draw(&forward, &Device::cpu()).map(|it| checksums(&it)).unwrap_or_default());
        audit.agree(&format!("{}.checksums", place.at), place.get("checksums").value, &value(checksums));
    }
}
