//! Benchmarks of a GPU.

use clap::ValueEnum;
use flashcore::plan::Target;
use serde_json::{Map, Value, json};

use super::Audit;
use super::bench::{are_different, ceilings, cell, cells, contender, drawn, together, value};
use super::fields::{Place, any, is_hex, is_version, raw, raws};
use super::header::{flag, margin};
use super::judgement::Judged;
use crate::bench::cells::{Cell, DENSE, Matrix, Member, WIDE};
use crate::bench::gpu::{
    FA3, IN_PYTHON, Regime, SUSTAINED_SAMPLE, largest_tensor, peak_tflops, peers, sets_to_flush,
};
use crate::bench::outcome::{
    CallClock, Conditions, Details, GpuConditions, Limits, Measured, Outcome, SEED, is_ours,
};
use crate::ceilings::Ceilings;
use crate::energy::Energy;
use crate::gpu::pool::Pool;
use crate::gpu::worker::{KERNEL, SCHEDULE};
use crate::physics;
use crate::timing::{Samples, Used};

/// What may throttle clocks, and whether that is heat or a power supply fault.
const REASONS: [(&str, bool); 8] = [
    ("applications clocks", false),
    ("power cap", false),
    ("hardware slowdown", true),
    ("sync boost", false),
    ("software thermal slowdown", true),
    ("hardware thermal slowdown", true),
    ("power brake", true),
    ("display clocks", false),
];

/// The most watts that a GPU can use.
const MOST_WATTS: f64 = 5_000.0;

/// What cells are recomputed with.
struct Bench<'a> {
    version: u32,
    margin: f64,
    limits: Limits,
    torch: bool,
    /// The libraries beside torch whose versions are told.
    libraries: Vec<&'a str>,
    regime: Regime,
    l2_bytes: f64,
    warm: bool,
    ceilings: Option<Ceilings>,
}

pub(super) fn remake(audit: &mut Audit, root: &Place<'_>, version: u32) -> Map<String, Value> {
    let mut made = raws(&["cache", "no_torch_because", "budget_seconds", "seconds", "lost_workers"]);
    made.insert("clock".into(), json!("kernel"));
    let cache = audit.text(&root.get("cache"), |text| ["cold", "warm"].contains(&text));
    let gpu = root.get("gpu");
    let peak = peak_tflops(gpu.get("ours").value);
    made.insert("gpu".into(), facts(audit, root, peak, version));
    // How long samples are is what the command asked for; in older versions they are short.
    let sustained = version >= 3 && flag(root, "--sustained");
    let regime = if sustained { Regime::Sustained } else { Regime::Bursts };
    if version >= 3 {
        made.insert("regime".into(), value(regime));
    }
    let torch = !gpu.get("torch").is_null();
    audit.maybe_text(&root.get("no_torch_because"), any);
    let either = !torch || root.get("no_torch_because").is_null();
    audit.require("no_torch_because", either, "is told where there is torch");
    let device = gpu.get("ours").get("device").str();
    let (ceilings, again) = ceilings(audit, &root.get("ceilings"), device);
    made.insert("ceilings".into(), again);
    audit.number(&root.get("budget_seconds"), f64::MIN_POSITIVE..=86_400.0);
    let seconds = audit.number(&root.get("seconds"), f64::MIN_POSITIVE..1e6);
    audit.count(&root.get("lost_workers"), ..=10_000);
    let bench = Bench {
        version,
        margin: margin(root),
        limits: Limits::Gpu { peak_tflops: peak, matmul_tflops: gpu.get("matmul_tflops").value.as_f64() },
        torch,
        libraries: libraries(&gpu).collect(),
        regime,
        l2_bytes: gpu.get("ours").get("l2_bytes").value.as_f64().unwrap_or(0.0),
        warm: cache == "warm",
        ceilings,
    };
    let outcomes =
        cells(audit, root, version, &mut made, |audit, place, cell| bench.cell(audit, place, cell));
    let spent: f64 = outcomes.iter().filter_map(Outcome::gpu).map(|gpu| gpu.seconds).sum();
    audit.require("seconds", spent <= seconds * (1.0 + 1e-9), "are fewer than those of the cells");
    alike(audit, root, &outcomes);
    let failed = outcomes.iter().any(|outcome| outcome.failure().is_some());
    let whole = !(failed && root.get("complete").value == &json!(true));
    audit.require("complete", whole, "is said of a run in which a cell has no result");
    made.insert("inputs".into(), pools(audit, root, &outcomes));
    made
}

/// The GPU, the driver and torch, as they name themselves.
fn facts(audit: &mut Audit, root: &Place<'_>, peak: Option<f64>, version_of_file: u32) -> Value {
    let (gpu, version) = (root.get("gpu"), root.get("environment").get("flashcore").value);
    let (ours, torch) = (gpu.get("ours"), gpu.get("torch"));
    audit.text(&ours.get("capability"), is_version);
    audit.maybe_text(&ours.get("commit"), |text| is_hex(text, 40));
    audit.text(&ours.get("cuda"), is_version);
    audit.text(&ours.get("device"), any);
    audit.text(&ours.get("uuid"), |text| text.starts_with("GPU-"));
    audit.count(&ours.get("l2_bytes"), ..1 << 40);
    audit.count(&ours.get("memory_bytes"), 1 << 20..1 << 50);
    audit.count(&ours.get("sm_clock_khz"), ..=10_000_000);
    audit.count(&ours.get("sms"), 1..=10_000);
    for clock in ["call_p50_us", "host_p50_us"] {
        audit.time(&ours.get("empty_launch").get(clock));
    }
    let mut own = raws(&["capability", "commit", "cuda", "device", "uuid"]);
    own.extend(raws(&["l2_bytes", "memory_bytes", "sm_clock_khz", "sms"]));
    own.insert("empty_launch".into(), Value::Object(raws(&["call_p50_us", "host_p50_us"])));
    own.insert("version".into(), version.clone());
    audit.maybe_text(&gpu.get("driver"), is_version);
    let most = peak.map_or(1e6, |peak| peak * physics::ABOVE_PEAK);
    let matmul = audit.maybe_number(&gpu.get("matmul_tflops"), f64::MIN_POSITIVE..=most);
    audit.require(
        "gpu.matmul_tflops",
        matmul.is_none() || !torch.is_null(),
        "is given, but torch measures it, and there is none",
    );
    for (name, known) in [("peak_tflops", peak.is_some()), ("matmul_tflops", matmul.is_some())] {
        if !known {
            audit.miss(format!("gpu.{name}"));
        }
    }
    let mut theirs = Value::Null;
    if !torch.is_null() {
        audit.text(&torch.get("version"), |text| text.starts_with(|c: char| c.is_ascii_digit()));
        audit.text(&torch.get("cuda"), is_version);
        audit.count(&torch.get("cudnn"), 1..10_000_000);
        let known = peers();
        let installed = audit.list(&torch.get("installed"));
        for name in &installed {
            audit.text(name, |text| known.contains(&text));
        }
        let once = are_different(installed.iter().map(Place::str).collect());
        audit.require("gpu.torch.installed", once, "hold one twice");
        theirs = Value::Object(raws(&["version", "cuda", "cudnn", "installed"]));
        theirs["device"] = ours.get("device").value.clone();
        if version_of_file >= 3 {
            let versions = torch.get("versions");
            let names: Vec<&str> = libraries(&gpu).collect();
            for name in &names {
                audit.require(&versions.at, IN_PYTHON.contains(name), "are of somebody who is no library");
                audit.text(&versions.get(name), is_version_or_hash);
            }
            theirs["versions"] = Value::Object(raws(&names));
        }
    }
    let mut made =
        json!({"ours": own, "torch": theirs, "driver": raw(), "peak_tflops": peak, "matmul_tflops": raw()});
    if version_of_file >= 3 {
        let why = gpu.get("no_fa3_because");
        audit.maybe_text(&why, any);
        let absent = !torch.is_null() && libraries(&gpu).all(|name| name != FA3);
        audit.require(&why.at, why.is_null() || absent, "is told where it is there, or without torch");
        made["no_fa3_because"] = raw();
    }
    made
}

/// The libraries beside torch whose versions are told.
fn libraries<'a>(gpu: &Place<'a>) -> impl Iterator<Item = &'a str> + use<'a> {
    let versions = gpu.get("torch").get("versions").value.as_object();
    versions.into_iter().flat_map(Map::keys).map(String::as_str)
}

/// A version, or the hash of a file that has none.
fn is_version_or_hash(text: &str) -> bool {
    match text.strip_prefix("sha256:") {
        Some(hash) => is_hex(hash, 64),
        None => text.starts_with(|c: char| c.is_ascii_digit()),
    }
}

impl Bench<'_> {
    /// Absent where the raw values are impossible: nothing follows from them.
    fn cell(&self, audit: &mut Audit, place: &Place<'_>, cell: Cell) -> Option<(Outcome, Value)> {
        let group = audit.text(&place.get("group"), |group| is_group(&cell, group)).to_string();
        let seconds = audit.number(&place.get("seconds"), 0.0..1e6);
        let results = audit.list(&place.get("results"));
        if !place.get("failure").is_null() {
            let why = audit.text(&place.get("failure"), any);
            audit.miss(format!("{}: {why}", place.at));
            let mut outcome = Outcome::not_run(&Member { cell, group, with_forms: false }, why);
            if let Conditions::Gpu(gpu) = &mut outcome.conditions {
                gpu.seconds = seconds;
            }
            let made = value(&outcome);
            return Some((outcome, self.of_version(made)));
        }
        audit.require(&place.at, !results.is_empty(), "has neither a result nor a failure");
        let rows = cell.judged_rows().len();
        let judged = Judged::of(&cell, rows);
        let contenders: Vec<_> =
            results.iter().map(|result| contender(audit, result, self.version, judged)).collect();
        together(audit, &place.at, &contenders);
        if !audit.holds() {
            return None;
        }
        let (mut measured, mut patches) = (Vec::new(), Vec::new());
        let mut on_the_clock = 0.0;
        for (contender, result) in contenders.into_iter().zip(&results) {
            let calls = f64::from(contender.samples.calls);
            on_the_clock += contender.samples.times.iter().sum::<f64>() * calls / 1e6;
            let error = contender.error.clone();
            let (found, call, plan) = self.measured(audit, result, contender, &cell);
            measured.push(found);
            patches.push((error, call, plan));
        }
        audit.require(
            &format!("{}.seconds", place.at),
            on_the_clock <= seconds * (1.0 + 1e-9),
            "are fewer than its samples took",
        );
        let rounds = measured.iter().map(|result| result.samples_us.len()).max().unwrap_or(0);
        let retaken_rounds = audit.count(&place.get("retaken_rounds"), ..=10_000) as usize;
        let conditions = GpuConditions {
            group,
            sets: if self.warm { 1 } else { sets_to_flush(cell.work().bytes, self.l2_bytes) },
            retaken_rounds,
            throttled_rounds: audit.count(&place.get("throttled_rounds"), ..=rounds as u64) as usize,
            measured_again: retaken_rounds > 0,
            seconds,
            ..GpuConditions::default()
        };
        let unwell = conditions.retaken_rounds + conditions.throttled_rounds;
        let states = states(audit, place, (retaken_rounds, unwell), rounds);
        let outcome = Outcome::new(&cell, rows, measured, Conditions::Gpu(conditions), self.margin);
        audit.require(&place.at, !outcome.impossible, "is faster than the chip can be");
        let mut made = value(&outcome);
        made["states"] = states;
        made["first_call"] = first_call(audit, &place.get("first_call"));
        for (n, (error, call, plan)) in patches.into_iter().enumerate() {
            let result = &mut made["results"][n];
            (result["error"], result["plan"]) = (error, plan);
            if let Some(call) = call {
                result["call"] = call;
            }
        }
        Some((outcome, self.of_version(made)))
    }

    fn of_version(&self, mut made: Value) -> Value {
        let unknown: &[&str] = match self.version {
            ..2 => &["pairing", "exactness", "orders"],
            2 => &["exactness", "orders"],
            _ => &[],
        };
        if let Some(made) = made.as_object_mut() {
            made.retain(|name, _| !unknown.contains(&name.as_str()));
        }
        for result in made["results"].as_array_mut().into_iter().flatten().filter(|_| self.version < 3) {
            result.as_object_mut().and_then(|made| made.remove("energy"));
        }
        made
    }

    /// A contender as it was summarised; patched into it are its plan and, in an older version, its call clock.
    fn measured(
        &self,
        audit: &mut Audit,
        place: &Place<'_>,
        contender: super::bench::Contender,
        cell: &Cell,
    ) -> (Measured, Option<Value>, Value) {
        let super::bench::Contender { mut samples, judgement, .. } = contender;
        let ours = is_ours(&samples.name);
        let known =
            ours || (peers().contains(&samples.name.as_str()) && (self.torch || samples.name == "cublas"));
        audit.require(&format!("{}.name", place.at), known, "is nobody who could be timed here");
        if ours {
            let (kernel, schedule) = (samples.name.strip_prefix(KERNEL), samples.name.strip_prefix(SCHEDULE));
            let real = kernel.is_none_or(is_name) && schedule.is_none_or(is_schedule);
            audit.require(&format!("{}.name", place.at), real, "names no kernel or schedule");
            let form = [DENSE, WIDE].into_iter().find(|form| *form == samples.name);
            let has = form.is_none_or(|form| cell.forms().iter().any(|(name, _)| *name == form));
            audit.require(&format!("{}.name", place.at), has, "is a form that this cell has not");
        }
        let told = self.version < 3
            || judgement.is_none()
            || !IN_PYTHON.contains(&samples.name.as_str())
            || self.libraries.contains(&samples.name.as_str());
        audit.require(&format!("{}.name", place.at), told, "is a library whose version is not told");
        if self.regime == Regime::Sustained && samples.failure.is_none() {
            let least = SUSTAINED_SAMPLE.as_secs_f64() * 1e6 / 2.0;
            let long = samples.times.iter().all(|us| us * f64::from(samples.calls) >= least);
            audit.require(&place.at, long, "has samples that are too short for the power limit to settle");
        }
        // A contender without an output was asked for nothing more.
        let (asked, whole) = (judgement.is_some(), samples.failure.is_none());
        self.used(audit, &place.get("energy"), &mut samples);
        let work = cell.of_contender(&samples.name).work();
        let energy = Energy::of(&samples, work.flops);
        let mut details = Details { energy, ..Details::default() };
        let replay = place.get("replay_is_same");
        if !replay.is_null() {
            details.replay_is_same = Some(audit.flag(&replay));
        }
        let told = if whole { replay.is_null() != ours } else { (ours && asked) || replay.is_null() };
        audit.require(&replay.at, told, "is told of others, or not of ours");
        let plan = place.get("plan");
        let told = if whole { plan.is_null() != ours } else { (ours && asked) || plan.is_null() };
        audit.require(&plan.at, told, "is told of others, or not of ours");
        let plan = if plan.is_null() { Value::Null } else { self::plan(audit, &plan, &samples.name) };
        let mut patch = None;
        let call = place.get("call");
        audit.require(&call.at, asked || call.is_null(), "is of somebody who gave no output");
        if !call.is_null() {
            let host_us = if self.version < 2 { Vec::new() } else { audit.times(&call.get("host_us")) };
            let clock = CallClock::of(audit.times(&call.get("call_us")), host_us);
            if self.version < 2 {
                let p50 = audit.time(&call.get("host_p50_us"));
                let p90 = audit.time(&call.get("host_p90_us"));
                audit.require(&call.at, p50 <= p90, "has a median above its 90 % quantile");
                let mut made = value(&clock);
                made.as_object_mut().and_then(|made| made.remove("host_us"));
                (made["host_p50_us"], made["host_p90_us"]) = (raw(), raw());
                patch = Some(made);
            } else {
                let both = clock.host_us.len() == clock.call_us.len();
                audit.require(&call.at, both, "has not both clocks of every call");
            }
            audit.require(&call.at, clock.p50_us.is_some(), "has no samples");
            details.call = Some(clock);
        }
        let found = Measured::new(samples, judgement, &work, &self.limits, self.ceilings.as_ref());
        (Measured { details: Some(details), ..found }, patch, plan)
    }
}

impl Bench<'_> {
    /// Reads what the counter told of a contender's samples.
    fn used(&self, audit: &mut Audit, place: &Place<'_>, samples: &mut Samples) {
        if self.version < 3 || place.is_null() {
            return;
        }
        audit.require(&place.at, self.regime == Regime::Sustained, "is of samples that are too short for it");
        let used = audit.list(&place.get("used"));
        audit.require(&place.at, used.len() == samples.times.len(), "is not of every sample");
        let mut read = |it: &Place<'_>| {
            let mj = audit.count(&it.get("mj"), ..1 << 40);
            let us = audit.time(&it.get("us"));
            let possible = mj as f64 <= us * MOST_WATTS / 1e3;
            audit.require(&it.at, possible, "is more than a GPU can use");
            let clock = audit.maybe_number(&it.get("sm_clock_mhz"), 0.0..10_000.0);
            Used { mj, us, sm_clock_mhz: clock }
        };
        samples.used = used.iter().map(|it| (!it.is_null()).then(|| read(it))).collect();
    }
}

/// Every cell has the same contenders, and all of them a call clock or none.
fn alike(audit: &mut Audit, root: &Place<'_>, outcomes: &[Outcome]) {
    let ran: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.failure().is_none()).collect();
    let names = |outcome: &&Outcome| -> Vec<String> {
        outcome.results.iter().map(|result| result.name.clone()).collect()
    };
    let same = ran.windows(2).all(|two| names(&two[0]) == names(&two[1]));
    audit.require("cells", same, "have different contenders");
    let ours_first = |outcome: &&Outcome| outcome.results.first().is_some_and(|first| is_ours(&first.name));
    audit.require("cells", ran.iter().all(ours_first), "begin with somebody else than ours");
    let whole = || ran.iter().flat_map(|outcome| &outcome.results).filter(|result| result.failure.is_none());
    let called = whole().filter(|result| result.call().is_some()).count();
    audit.require("cells", called == 0 || called == whole().count(), "have a call clock here and none there");
    let places = root.get("cells").items();
    let firsts = places.iter().filter(|cell| !cell.get("first_call").is_null()).count();
    audit.require("cells", firsts == 0 || firsts == ran.len(), "have a first call here and none there");
}

/// Whether a cell is averaged in a group of this name.
fn is_group(cell: &Cell, group: &str) -> bool {
    let of = |matrix: Matrix| {
        let unnamed = Cell { name: "", ..cell.clone() };
        let same = |member: &Member| unnamed == member.cell && member.group == group;
        matrix.cells(cell.pass).is_ok_and(|members| members.iter().any(same))
    };
    group == "all" || Matrix::value_variants().iter().copied().any(of)
}

/// A name as kernels, knobs and their values have.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// As `sm90_fwd:warpgroups=2,block_n=128`. Kernels come and go, and their knobs; what was measured stays.
pub(super) fn is_schedule(text: &str) -> bool {
    let is_knob =
        |pair: &str| pair.split_once('=').is_some_and(|(knob, value)| is_name(knob) && is_name(value));
    text.split_once(':').is_some_and(|(kernel, knobs)| is_name(kernel) && knobs.split(',').all(is_knob))
}

/// The plan: it must be of the kernel that was asked for, and possible on a GPU.
fn plan(audit: &mut Audit, place: &Place<'_>, name: &str) -> Value {
    let schedule = audit.text(&place.get("schedule"), is_schedule);
    let kernel = schedule.split(':').next().unwrap_or_default();
    let asked = match (name.strip_prefix(KERNEL), name.strip_prefix(SCHEDULE)) {
        (Some(asked), _) => asked == kernel,
        (_, Some(asked)) => asked == schedule,
        _ => true,
    };
    audit.require(&place.at, asked, "is not of what was asked for");
    audit.text(&place.get("target"), |text| Target::ALL.iter().any(|target| target.name() == text));
    audit.text(&place.get("reason"), any);
    audit.text(&place.get("code"), |text| is_hex(text, 64));
    let grid = audit.list(&place.get("grid"));
    audit.require(&place.at, grid.len() == 3, "has a grid that is none");
    for side in grid {
        audit.count(&side, 1..1 << 31);
    }
    let threads = audit.count(&place.get("threads"), 32..=1024);
    audit.require(&place.at, threads.is_multiple_of(32), "has a part of a warp");
    audit.count(&place.get("shared_bytes"), ..=232_448);
    audit.count(&place.get("registers"), 1..=255);
    audit.count(&place.get("local_bytes"), ..1 << 30);
    let mut made = raws(&["schedule", "target", "reason", "code", "grid"]);
    made.extend(raws(&["threads", "shared_bytes", "registers", "local_bytes"]));
    made.insert("kernel".into(), json!(kernel));
    Value::Object(made)
}

/// The GPU before the first round and after every one; rounds that ended throttled were repeated, or are counted.
fn states(audit: &mut Audit, cell: &Place<'_>, (retaken, again): (usize, usize), rounds: usize) -> Value {
    let places = audit.list(&cell.get("states"));
    let looked = places.is_empty() || places.len() == 1 + rounds + retaken;
    audit.require(&cell.get("states").at, looked, "are not one before the first round and one after each");
    let mut made = Vec::new();
    let mut unwell = 0;
    for (n, place) in places.iter().enumerate() {
        audit.maybe_number(&place.get("sm_clock_mhz"), 0.0..10_000.0);
        audit.maybe_number(&place.get("memory_clock_mhz"), 0.0..20_000.0);
        audit.maybe_number(&place.get("power_w"), 0.0..5_000.0);
        audit.maybe_number(&place.get("power_limit_w"), 0.0..5_000.0);
        audit.maybe_number(&place.get("temperature_c"), 0.0..150.0);
        let mut state =
            raws(&["sm_clock_mhz", "memory_clock_mhz", "power_w", "power_limit_w", "temperature_c"]);
        let reasons = place.get("throttled_by");
        let mut throttled = None;
        if !reasons.is_null() {
            let rank = |reason: &Place<'_>| REASONS.iter().position(|(name, _)| *name == reason.str());
            let ranks: Vec<Option<usize>> = audit.list(&reasons).iter().map(rank).collect();
            let known = ranks.iter().all(Option::is_some) && ranks.is_sorted_by(|a, b| a < b);
            audit.require(&reasons.at, known, "are not what NVML names");
            throttled = Some(ranks.into_iter().flatten().any(|rank| REASONS[rank].1));
        }
        unwell += usize::from(n > 0 && throttled == Some(true));
        state.insert("throttled_by".into(), raw());
        state.insert("throttled".into(), value(throttled));
        made.push(Value::Object(state));
    }
    audit.require(
        &cell.at,
        unwell == again,
        "has other rounds taken again or slowed down than its states say",
    );
    // The limits of a GPU do not change while it is timed.
    let limits: Vec<Place<'_>> = places.iter().map(|place| place.get("power_limit_w")).collect();
    let one = limits.windows(2).all(|two| two[0].value == two[1].value);
    audit.require(&cell.get("states").at, one, "have different power limits");
    let telling = |place: &Place<'_>| -> Vec<bool> {
        let names = ["sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c", "throttled_by"];
        names.iter().map(|name| place.get(name).is_null()).collect()
    };
    let alike = places.windows(2).all(|two| telling(&two[0]) == telling(&two[1]));
    audit.require(&cell.get("states").at, alike, "tell something here that they do not tell there");
    Value::Array(made)
}

/// The first call with empty caches and with the code on disk; one that is absent says why.
fn first_call(audit: &mut Audit, place: &Place<'_>) -> Value {
    if place.is_null() {
        return Value::Null;
    }
    let mut absent = false;
    for name in ["cold_us", "warm_us"] {
        absent |= place.get(name).is_null();
        if !place.get(name).is_null() {
            audit.time(&place.get(name));
        }
    }
    let why = audit.maybe_text(&place.get("failure"), any);
    audit.require(&place.at, absent == why.is_some(), "is absent without a reason, or there with one");
    Value::Object(raws(&["cold_us", "warm_us", "failure"]))
}

/// The pools of inputs: one per dtype, as long as the largest tensor needs.
fn pools(audit: &mut Audit, root: &Place<'_>, outcomes: &[Outcome]) -> Value {
    for checksum in root.get("inputs").items().iter().flat_map(|input| input.get("checksums").items()) {
        audit.count(&checksum, ..=u64::from(u32::MAX));
    }
    let mut made = Vec::new();
    for dtype in ["f16", "bf16", "f8"] {
        let places = root.get("cells").items();
        let cells = places.iter().filter(|place| place.get("dtype").str().split(' ').next() == Some(dtype));
        let largest =
            cells.filter_map(|place| cell(audit, place)).map(|cell| largest_tensor(&cell.problem()));
        if let Some(elements) = largest.max().filter(|_| !outcomes.is_empty()) {
            let elements = elements.clamp(1, crate::gpu::pool::LEN);
            let checksums = json!([raw(), raw(), raw()]);
            made.push(json!({"dtype": dtype, "seed": SEED, "elements": elements, "checksums": checksums}));
        }
    }
    Value::Array(made)
}

/// Inputs come from the seed.
pub(super) fn inputs(audit: &mut Audit, root: &Place<'_>) {
    for place in root.get("inputs").items() {
        let Ok(dtype) = place.get("dtype").str().parse() else { continue };
        let elements = place.get("elements").value.as_u64().unwrap_or(0) as usize;
        let checksums =
            drawn(format!("{elements} {dtype}"), || Pool::draw(dtype, elements, SEED).checksums());
        audit.agree(&format!("{}.checksums", place.at), place.get("checksums").value, &value(checksums));
    }
}
