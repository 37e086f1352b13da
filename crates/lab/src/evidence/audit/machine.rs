//! The ceilings of a machine, and what bounds a kernel on it.

use flashcore::plan::Target;
use serde_json::{Map, Value, json};

use super::Audit;
use super::bench::value;
use super::checks::problem;
use super::fields::{Place, any, raw, raws};
use super::gpu::is_schedule;
use crate::ncu;
use crate::occupancy::{Limit, Occupancy};
use crate::physics;

/// Checks the rates of ceilings.
pub(super) fn rates(audit: &mut Audit, place: &Place<'_>) {
    for (name, most) in [("matmul_tflops", 1e5), ("memory_gbytes", 1e6), ("exp_gops", 1e7)] {
        audit.maybe_number(&place.get(name), f64::MIN_POSITIVE..most);
    }
    let launches = ["launch_us", "launch_host_us"].map(|name| place.get(name));
    for launch in launches.iter().filter(|launch| !launch.is_null()) {
        audit.time(launch);
    }
    let both = launches[0].is_null() == launches[1].is_null();
    audit.require(&launches[0].at, both, "is one of two clocks, and the other is absent");
}

pub(super) fn ceilings(audit: &mut Audit, root: &Place<'_>, _: u32) -> Map<String, Value> {
    rates(audit, root);
    let whole = root.get("complete").value == &json!(true);
    audit.require("complete", whole, "is false, but ceilings are all measured or not written");
    let machine = audit.text(&root.get("machine"), any);
    if let Some(rest) = machine.strip_prefix("cpu-") {
        let cpu = root.get("environment").get("cpu");
        let model = cpu.get("model");
        let model = if model.is_null() { "an unknown CPU" } else { model.str() };
        let threads = rest.strip_suffix(" threads").and_then(|rest| rest.rsplit_once(", "));
        let isa = threads.and_then(|(rest, threads)| {
            threads.parse::<u32>().ok().filter(|&threads| threads > 0)?;
            rest.strip_suffix(&format!(" on {model}"))
        });
        let known = isa.is_some_and(|isa| cpu.get("paths").items().iter().any(|path| path.str() == isa));
        audit.require("machine", known, "is not the CPU that the environment tells of");
        audit.require("launch_us", root.get("launch_us").is_null(), "is given, but a CPU launches nothing");
    }
    raws(&["machine", "matmul_tflops", "memory_gbytes", "exp_gops", "launch_us", "launch_host_us"])
}

pub(super) fn profile(audit: &mut Audit, root: &Place<'_>, _: u32) -> Map<String, Value> {
    let mut made = raws(&["problem", "device", "target", "schedule", "reason", "not_profiled"]);
    let posed = problem(root.get("problem").str());
    audit.require("problem", posed.is_some(), "is no problem");
    audit.text(&root.get("device"), any);
    audit.text(&root.get("reason"), any);
    let target = audit.text(&root.get("target"), |text| Target::ALL.iter().any(|known| known.name() == text));
    let target = Target::ALL.into_iter().find(|known| known.name() == target);
    let schedule = audit.text(&root.get("schedule"), is_schedule);
    made.insert("kernel".into(), json!(schedule.split(':').next()));
    let (profiled, bound) = figures(audit, &root.get("profiled"));
    audit.maybe_text(&root.get("not_profiled"), any);
    let either = profiled.is_null() != root.get("not_profiled").is_null();
    audit.require("not_profiled", either, "is told of a profile, or not where there is none");
    made.extend([("profiled".into(), profiled), ("bound".into(), bound)]);

    let assembled = root.get("assembled");
    let mut registers = None;
    made.insert("assembled".into(), Value::Null);
    if !assembled.is_null() {
        audit.text(&assembled.get("source"), |text| text.starts_with("ptxas "));
        registers = Some(audit.count(&assembled.get("registers"), 1..=255));
        for name in ["spill_bytes", "cubin_bytes", "serialised_wgmma"] {
            audit.count(&assembled.get(name), ..1 << 30);
        }
        audit.count(&assembled.get("barriers"), ..=16);
        let names = ["source", "registers", "spill_bytes", "barriers", "cubin_bytes", "serialised_wgmma"];
        made.insert("assembled".into(), Value::Object(raws(&names)));
    }
    let loaded = root.get("loaded");
    made.insert("loaded".into(), Value::Null);
    if !loaded.is_null() {
        audit.count(&loaded.get("local_bytes"), ..1 << 30);
        audit.count(&loaded.get("shared_bytes"), ..=232_448);
        let mut again = raws(&["local_bytes", "shared_bytes"]);
        // The driver loads what ptxas made.
        again.insert("registers".into(), registers.map_or_else(raw, Value::from));
        made.insert("loaded".into(), Value::Object(again));
    }
    let on_gpu = !root.get("profiled").is_null() || !root.get("roofline").get("time_us").is_null();
    audit.require("loaded", !on_gpu || !loaded.is_null(), "is null, but the kernel ran on a GPU");
    let whole = root.get("complete").value == &json!(true);
    audit.require("complete", whole, "is false, but a profile is whole or not written");
    made.insert("machine_code".into(), machine_code(audit, &root.get("machine_code")));
    made.insert("occupancy".into(), occupancy(audit, root, target, registers));
    made.insert("roofline".into(), roofline(audit, root));
    made.insert("simulated".into(), simulated(audit, &root.get("simulated")));
    made
}

/// What Nsight Compute counted, and what bounds the kernel by that.
fn figures(audit: &mut Audit, place: &Place<'_>) -> (Value, Value) {
    if place.is_null() {
        return (Value::Null, Value::Null);
    }
    let places = audit.list(place);
    let names: Vec<&str> = ncu::figures().map(|(name, _)| name).collect();
    let said: Vec<&str> = places.iter().map(|figure| figure.get("name").str()).collect();
    audit.require(&place.at, names == said, "are not the figures that are asked for");
    let mut found = Vec::new();
    for ((name, metrics), place) in ncu::figures().zip(&places) {
        let metric = audit.maybe_text(&place.get("metric"), |text| metrics.contains(&text));
        let most = if name.ends_with("_percent") { 100.5 } else { 1e15 };
        let value = audit.maybe_number(&place.get("value"), 0.0..=most);
        audit.require(&place.at, metric.is_some() || value.is_none(), "is a value of no metric");
        found.push(ncu::Figure {
            name,
            metric: metrics.iter().copied().find(|known| Some(*known) == metric),
            value,
        });
    }
    (value(&found), value(ncu::bound(&found)))
}

/// Instructions by kind, the most frequent first.
fn machine_code(audit: &mut Audit, place: &Place<'_>) -> Value {
    if place.is_null() {
        return Value::Null;
    }
    audit.text(&place.get("source"), any);
    let all = pairs(audit, &place.get("kinds"));
    json!({"source": raw(), "instructions": all, "kinds": raw()})
}

/// The sum of a list of names with numbers, the largest first.
fn pairs(audit: &mut Audit, place: &Place<'_>) -> u64 {
    let counts: Vec<u64> = counts(audit, place);
    audit.require(&place.at, counts.is_sorted_by(|a, b| a >= b), "are not in order");
    counts.iter().sum()
}

/// The numbers of a list of names with numbers, each name once.
fn counts(audit: &mut Audit, place: &Place<'_>) -> Vec<u64> {
    let (mut counts, mut names) = (Vec::new(), Vec::new());
    for pair in audit.list(place) {
        let items = audit.list(&pair);
        let [name, count] = &items[..] else {
            audit.deny(&pair.at, "is no name with a number");
            continue;
        };
        names.push(audit.text(name, any));
        counts.push(audit.count(count, 1..1 << 50));
    }
    names.sort_unstable();
    audit.require(&place.at, names.windows(2).all(|two| two[0] != two[1]), "have one name twice");
    counts
}

/// Blocks per SM, by the registers and the target's other limits.
fn occupancy(audit: &mut Audit, root: &Place<'_>, target: Option<Target>, registers: Option<u64>) -> Value {
    let place = root.get("occupancy");
    let (Some(target), Some(registers)) = (target, registers) else { return Value::Null };
    // The threads are not in the file; the warps of all blocks together are.
    let blocks = audit.count(&place.get("blocks"), 1..=32) as u32;
    let warps = audit.count(&place.get("warps"), 1..=64) as u32;
    let shared = root.get("loaded").get("shared_bytes").value.as_u64();
    let threads = warps / blocks.max(1) * 32;
    let by = |shared: u32| Occupancy::of(target, threads, registers as u32, shared);
    if let Some(shared) = shared {
        return value(by(shared.min(1 << 20) as u32));
    }
    let made = by(0);
    let limits = [Limit::Threads, Limit::Registers, Limit::Shared, Limit::Blocks].map(value);
    let known = limits.contains(place.get("limit").value) && blocks <= made.blocks;
    audit.require(&place.at, known, "holds more blocks than there is room for");
    json!({"blocks": raw(), "warps": raw(), "max_warps": made.max_warps, "limit": raw()})
}

/// Operations and bytes follow from the problem, and the rate from the time.
fn roofline(audit: &mut Audit, root: &Place<'_>) -> Value {
    let place = root.get("roofline");
    let Some(problem) = problem(root.get("problem").str()) else { return Value::Null };
    let (flops, bytes) = (problem.flops(), problem.min_bytes());
    let time = place.get("time_us");
    let time = (!time.is_null()).then(|| audit.time(&time));
    let tflops = time.map(|us| flops / us / 1e6);
    let peak = audit.maybe_number(&place.get("peak_tflops"), f64::MIN_POSITIVE..1e5);
    let most = peak.map_or(1e5, |peak| peak * physics::ABOVE_PEAK);
    audit.maybe_number(&place.get("matmul_tflops"), f64::MIN_POSITIVE..=most);
    let possible = tflops.is_none_or(|tflops| tflops <= most);
    audit.require(&place.at, possible, "is faster than the chip can be");
    json!({"flops": flops, "bytes": bytes, "intensity": flops / bytes, "time_us": raw(), "tflops": tflops,
           "matmul_tflops": raw(), "peak_tflops": raw()})
}

/// What the simulator counted.
fn simulated(audit: &mut Audit, place: &Place<'_>) -> Value {
    let posed = problem(place.get("problem").str()).is_some();
    audit.require(&place.at, posed, "is of no problem");
    for name in ["tensor_instructions", "shared_passes", "bank_conflicts", "global_requests"] {
        audit.count(&place.get(name), ..1 << 50);
    }
    audit.number(&place.get("sectors_per_request"), 0.0..1e6);
    audit.number(&place.get("sector_efficiency"), 0.0..=1.0 + 1e-9);
    audit.number(&place.get("warp_instructions_per_second"), f64::MIN_POSITIVE..1e12);
    let all = pairs(audit, &place.get("mix"));
    let lost = counts(audit, &place.get("conflicting")).iter().sum();
    let conflicts = place.get("bank_conflicts").value.as_u64();
    audit.require(&place.at, conflicts == Some(lost), "has other bank conflicts than its instructions");
    let mut made = raws(&["problem", "tensor_instructions", "mix", "shared_passes", "bank_conflicts"]);
    made.extend(raws(&["conflicting", "global_requests", "sectors_per_request", "sector_efficiency"]));
    made.extend([("warp_instructions_per_second".into(), raw()), ("warp_instructions".into(), json!(all))]);
    Value::Object(made)
}
