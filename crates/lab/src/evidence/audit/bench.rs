//! What benchmarks of a CPU and of a GPU have in common.

use std::collections::HashMap;
use std::sync::Mutex;

use flashcore::{Mask, Pass};
use serde::Deserialize as _;
use serde_json::{Map, Value, json};

use super::Audit;
use super::fields::{Place, any, raw, raws};
use super::header::{asked, is_time};
use super::judgement::{Judged, gradients, judgement};
use crate::bench::cells::{Cell, Types};
use crate::bench::outcome::{Outcome, summaries};
use crate::cases::Passes;
use crate::ceilings::Ceilings;
use crate::gpu::sequences::Sequences;
use crate::rule::Judgement;
use crate::shapes;
use crate::timing::{MOST_CALLS, Samples};

/// The most elements of a tensor that could be timed.
const MOST_ELEMENTS: f64 = (1u64 << 36) as f64;

/// As JSON; what was read from JSON can be written to it.
pub(super) fn value(of: impl serde::Serialize) -> Value {
    serde_json::to_value(of).unwrap_or_default()
}

/// Recomputes the cells, each by `remake`, and what follows from all of them.
pub(super) fn cells(
    audit: &mut Audit,
    root: &Place<'_>,
    version: u32,
    made: &mut Map<String, Value>,
    remake: impl Fn(&mut Audit, &Place<'_>, Cell) -> Option<(Outcome, Value)>,
) -> Vec<Outcome> {
    let (mut outcomes, mut cells) = (Vec::new(), Vec::new());
    for place in audit.list(&root.get("cells")) {
        let Some(cell) = cell(audit, &place) else { continue };
        let Some((outcome, again)) = remake(audit, &place, cell) else { continue };
        outcomes.push(outcome);
        cells.push(again);
    }
    asked(audit, root, version, cells.len(), made);
    made.insert("cells".into(), Value::Array(cells));
    made.insert("summaries".into(), value(summaries(&outcomes)));
    outcomes
}

/// The ceilings that times were compared with: of this machine.
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

/// The problem of a cell; absent, and refused, where no such problem is possible.
pub(super) fn cell(audit: &mut Audit, place: &Place<'_>) -> Option<Cell> {
    let text = |name: &str| place.get(name).str();
    let shape = shapes::parse(text("shape")).ok().map(|named| named.shape);
    let shape = shape.filter(|shape| shape.to_string() == text("shape"));
    let mask = text("mask").parse::<Mask>().ok().filter(|mask| mask.to_string() == text("mask"));
    let types = text("dtype").parse::<Types>().ok();
    let pass = if place.get("pass").is_null() {
        Some(Passes::One(Pass::Forward))
    } else {
        text("pass").parse().ok()
    };
    let (Some(shape), Some(mask), Some(types), Some(pass)) = (shape, mask, types, pass) else {
        audit.deny(&place.at, "has a shape, a mask, a dtype or a pass that is none");
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
    let mut cell =
        Cell { name: named.map_or("", |named| named.name), shape, mask, types, pass, sequences: None };
    if !place.get("sequences").is_null() {
        let given = Sequences::deserialize(place.get("sequences").value).ok();
        cell.sequences = given.filter(|sequences| sequences.fit(&cell.dense()));
        let whole = cell.sequences.as_ref().is_some_and(|it| value(it) == *place.get("sequences").value);
        audit.require(&place.get("sequences").at, whole, "are not sequences of this shape");
        cell.sequences.as_ref()?;
    }
    Some(cell)
}

/// What every benchmark records about a contender: samples, judgement, and why it left.
pub(super) struct Contender {
    pub samples: Samples,
    pub judgement: Option<Judgement>,
    /// The recomputed judgement.
    pub error: Value,
}

/// Reads a contender: one that has a time has a judgement, and one that failed says why.
pub(super) fn contender(audit: &mut Audit, place: &Place<'_>, version: u32, judged: Judged) -> Contender {
    let field = |name: &str| place.get(name);
    let failure = audit.maybe_text(&field("failure"), any).map(String::from);
    let times = audit.times(&field("samples_us"));
    let least = u64::from(failure.is_none());
    let calls = audit.count(&field("calls_per_sample"), least..=u64::from(MOST_CALLS)) as u32;
    let (judgement, error) = if field("error").is_null() {
        let nothing = failure.is_some() && times.is_empty();
        let at = format!("{}.error", place.at);
        audit.require(&at, nothing, "is null beside a time: nobody knows whether it is right");
        (None, Value::Null)
    } else {
        let (judgement, error) = match judged.gradient {
            None => judgement(audit, &field("error"), version, judged),
            Some(name) => gradients(audit, &field("error"), version, &[(name, judged)]),
        };
        (Some(judgement), error)
    };
    let name = audit.text(&field("name"), any).to_string();
    Contender { samples: Samples { name, calls, times, failure, ..Samples::default() }, judgement, error }
}

/// All contenders of a cell are judged by one yardstick, and those that stay to the end are sampled once per round.
pub(super) fn together(audit: &mut Audit, at: &str, all: &[Contender]) {
    let yardstick = |it: &Contender| {
        it.judgement.as_ref().map(|it| [it.max(), it.rms()].map(|it| (it.plain, it.allowed)))
    };
    let mut yardsticks = all.iter().filter_map(yardstick);
    let first = yardsticks.next();
    let same = yardsticks.all(|other| Some(other) == first);
    audit.require(at, same, "judges its contenders by different yardsticks");
    let rounds = all.iter().map(|it| it.samples.times.len()).max().unwrap_or(0);
    // Where one leaves, a round may end before every contender had a turn.
    let least = rounds.saturating_sub(usize::from(all.iter().any(|it| it.samples.failure.is_some())));
    let stayed = |it: &&Contender| it.samples.failure.is_none();
    let in_turn = all.iter().filter(stayed).all(|it| it.samples.times.len() >= least);
    audit.require(at, in_turn, "has contenders that were not sampled once per round");
    let names = all.iter().map(|it| it.samples.name.as_str()).collect();
    audit.require(at, are_different(names), "has one contender twice");
}

/// The checksums of inputs that were drawn already, by cell: several audits of one process share them.
static DRAWN: Mutex<Option<HashMap<String, [u32; 3]>>> = Mutex::new(None);

/// Checksums, made at most once in a process.
pub(super) fn drawn(key: String, draw: impl FnOnce() -> [u32; 3]) -> [u32; 3] {
    let mut drawn = DRAWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    *drawn.get_or_insert_default().entry(key).or_insert_with(draw)
}

/// Whether no text occurs twice.
pub(super) fn are_different(mut texts: Vec<&str>) -> bool {
    texts.sort_unstable();
    texts.windows(2).all(|two| two[0] != two[1])
}
