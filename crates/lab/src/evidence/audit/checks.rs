//! What verify finds out: the corpus on engines, planted faults, a GPU under stress.

use std::collections::HashMap;
use std::sync::OnceLock;

use flashcore::{Mask, Name, Pass, Problem};
use serde_json::{Map, Value, json};

use super::Audit;
use super::bench::{are_different, value};
use super::fields::{Place, any, raw, raws};
use super::gpu::is_schedule;
use super::header::asked;
use super::judgement::{Judged, gradients, judgement};
use crate::bench::outcome::rows;
use crate::cases::{Case, Passes, Tier, corpus_of};
use crate::check::{Outcome, RULE};
use crate::faults::{self, Nature};
use crate::gpu::stress;
use crate::inputs::Wild;
use crate::rule::Judgement;
use crate::tally::Tally;

/// The cases of this version by name, each with its place in the corpus.
fn cases() -> &'static HashMap<String, (usize, Case)> {
    static CASES: OnceLock<HashMap<String, (usize, Case)>> = OnceLock::new();
    CASES.get_or_init(|| {
        corpus_of(Passes::Both)
            .into_iter()
            .enumerate()
            .map(|(n, case)| (case.name.clone(), (n, case)))
            .collect()
    })
}

/// What a file of another version's corpus is answered with.
fn other_version(at: &str, what: &str) -> String {
    format!("{at}: this version has no {what}, so it cannot check it; the version that wrote the file can")
}

pub(super) fn verify(audit: &mut Audit, root: &Place<'_>, version: u32) -> Map<String, Value> {
    let full = audit.text(&root.get("tier"), |text| ["quick", "full"].contains(&text)) == "full";
    let tier = if full { Tier::Full } else { Tier::Quick };
    let tallies = audit.list(&root.get("engines"));
    let engines: Vec<&str> = tallies.iter().map(|tally| audit.text(&tally.get("engine"), any)).collect();
    let mut tallied: Vec<Tally> = engines.iter().map(|engine| Tally::new(engine)).collect();
    let places = audit.list(&root.get("results"));
    let (mut results, mut last) = (Vec::new(), None);
    for (n, place) in places.iter().enumerate() {
        let name = place.get("case").str();
        let Some((rank, case)) = cases().get(name) else {
            audit.beyond = Some(other_version(&place.at, &format!("case '{name}'")));
            break;
        };
        // Case by case in the corpus's order, each on every engine.
        let begins = n % engines.len().max(1) == 0;
        let in_order = if begins { last.is_none_or(|last| last < *rank) } else { last == Some(*rank) };
        audit.require(&place.at, in_order && case.tier <= tier, "is not the case whose turn it is");
        last = Some(*rank);
        let engine = if engines.is_empty() { "" } else { engines[n % engines.len()] };
        let (made, judgement) = record(audit, place, version, case, engine);
        results.push(made);
        if let Some(tally) = tallied.get_mut(n % engines.len().max(1)) {
            let why = place.get("skipped").str();
            let outcome = match (place.get("status").str(), judgement) {
                ("skipped", _) => Outcome::Skipped(why.into()),
                (_, Some(judgement)) => Outcome::Passed(judgement),
                _ => Outcome::Failed(Vec::new()),
            };
            tally.count(name, &outcome);
        }
    }
    let whole = !engines.is_empty() && results.len() % engines.len() == 0;
    audit.require("results", whole, "are not one for every case and engine");
    let mut made = raws(&["tier"]);
    let found = results.len() / engines.len().max(1);
    asked(audit, root, version, found, &mut made);
    if version >= 2 {
        let complete = root.get("asked").value.as_u64() == Some(found as u64);
        audit.require(
            "complete",
            root.get("complete").value == &json!(complete),
            "is not what the cases say",
        );
    }
    made.insert("rule".into(), json!(RULE));
    made.insert("results".into(), Value::Array(results));
    let written = |tally: Tally| {
        let mut written = value(tally);
        if version < 2 {
            written.as_object_mut().and_then(|written| written.remove("skipped_why"));
        }
        written
    };
    made.insert("engines".into(), tallied.into_iter().map(written).collect());
    made
}

/// What is known of each gradient of a backward pass.
fn of_gradients(problem: &Problem) -> Vec<(Name, Judged)> {
    let of = |[batch, heads, len, width]: [usize; 4]| Judged {
        rows: batch * heads * len,
        width,
        lse: Some(false),
        ..Judged::default()
    };
    problem.signature().outputs().map(|output| (output.name, of(output.shape))).collect()
}

/// One case on one engine.
fn record(
    audit: &mut Audit,
    place: &Place<'_>,
    version: u32,
    case: &Case,
    engine: &str,
) -> (Value, Option<Judgement>) {
    let mut made = raws(&["case", "status", "faults", "reproduce"]);
    made.insert("engine".into(), json!(engine));
    made.insert("problem".into(), json!(case.problem.to_string()));
    made.insert("inputs".into(), json!(case.inputs.name()));
    if version >= 2 {
        made.insert("wild".into(), json!(case.wild.map(Wild::name)));
    }
    made.insert("arrangement".into(), json!(case.arrangement.name()));
    made.insert("seed".into(), json!(case.seed));
    made.extend([("judgement".into(), Value::Null), ("skipped".into(), Value::Null)]);
    let status = audit.text(&place.get("status"), |text| ["passed", "skipped", "failed"].contains(&text));
    let faults = audit.list(&place.get("faults"));
    for fault in &faults {
        audit.text(fault, any);
    }
    let told = (status == "failed") != faults.is_empty();
    audit.require(&place.at, told, "failed, and nobody says by what, or did not, and somebody does");
    let mut judged = None;
    if status == "passed" {
        // Somebody else's engine may give no lse.
        let gives = ["cpu", "cuda", "sim"].iter().any(|kind| engine.starts_with(kind));
        let lse = (gives || !case.problem.lse).then_some(case.problem.lse);
        let all = rows(&case.problem);
        let count = case.rows.map_or(all, |most| {
            // Of a large problem, which ones follows from the engine's own result, and some are drawn twice.
            let most = most.max(case.problem.batch * case.problem.heads_q).min(all);
            audit.count(&place.get("judgement").get("rows"), 1..=most as u64) as usize
        });
        let of = Judged { rows: count, width: case.problem.head_dim_v, lse, ..Judged::default() };
        let place_of = place.get("judgement");
        let (judgement, again) = match case.problem.pass {
            Pass::Forward => judgement(audit, &place_of, version, of),
            Pass::Backward => gradients(audit, &place_of, version, &of_gradients(&case.problem)),
        };
        let right = judgement.passed();
        audit.require(&place.at, right, "passed, though its judgement does not");
        made.insert("judgement".into(), again);
        judged = Some(judgement);
    }
    if status == "skipped" {
        audit.text(&place.get("skipped"), any);
        made.insert("skipped".into(), raw());
    }
    let device = format!("--device {engine}");
    let again = |text: &str| {
        let pass = if case.problem.pass == Pass::Forward { "" } else { " --pass backward" };
        let text = text.strip_prefix(&format!("flashcore verify --full{pass} "));
        let wish = text.and_then(|text| text.strip_suffix(&format!(" --filter '={}'", case.name)));
        wish.is_some_and(|wish| {
            wish == device || (wish.starts_with("--") && !wish.starts_with("--device cpu"))
        })
    };
    audit.text(&place.get("reproduce"), again);
    (Value::Object(made), judged)
}

pub(super) fn faults(audit: &mut Audit, root: &Place<'_>, _: u32) -> Map<String, Value> {
    static SUITE: OnceLock<Vec<(String, Nature, &str)>> = OnceLock::new();
    let suite = SUITE.get_or_init(|| {
        faults::all().into_iter().map(|trial| (trial.name, trial.nature, trial.judge)).collect()
    });
    let places = audit.list(&root.get("findings"));
    let mut findings = Vec::new();
    let mut counts = [[0, 0]; 2];
    for (n, place) in places.iter().enumerate() {
        let name = place.get("name").str();
        let planted = suite.get(n).filter(|(planted, ..)| planted == name);
        let Some((name, nature, judge)) = planted else {
            audit.beyond = Some(other_version(&place.at, &format!("trial '{name}' in this place")));
            break;
        };
        let good = audit.flag(&place.get("as_it_should"));
        audit.text(&place.get("said"), any);
        let count = &mut counts[usize::from(*nature == Nature::Honest)];
        *count = [count[0] + usize::from(good), count[1] + 1];
        let nature = value(nature);
        findings.push(
            json!({"name": name, "nature": nature, "judge": judge, "as_it_should": raw(), "said": raw()}),
        );
    }
    let complete = findings.len() == suite.len();
    audit.require("complete", root.get("complete").value == &json!(complete), "is not what the findings say");
    audit.require("findings", !findings.is_empty(), "are none: nothing was planted");
    let [caught, accepted] = counts;
    let made = json!({"caught": caught, "accepted": accepted, "findings": findings});
    made.as_object().cloned().unwrap_or_default()
}

pub(super) fn stress(audit: &mut Audit, root: &Place<'_>, version: u32) -> Map<String, Value> {
    let is_device = |text: &str| {
        let rest = text.strip_prefix("cuda:").and_then(|rest| rest.strip_suffix(')'));
        let parts = rest.and_then(|rest| rest.split_once(" ("));
        parts.is_some_and(|(ordinal, name)| ordinal.parse::<u32>().is_ok() && !name.trim().is_empty())
    };
    audit.text(&root.get("device"), is_device);
    let plan = root.get("plan");
    let calls = audit.count(&plan.get("calls"), 1..1 << 40);
    let repeats = audit.count(&plan.get("repeats"), 1..1 << 40);
    let stress::Plan { threads, streams, .. } = stress::Plan::default();
    let replays = calls.div_ceil(10);
    let mut problems = Vec::new();
    let places = audit.list(&root.get("problems"));
    for (n, place) in places.iter().enumerate() {
        let Some(problem) = problem(place.get("problem").str()) else {
            audit.deny(&place.at, "is of no problem");
            continue;
        };
        audit.text(&place.get("schedule"), is_schedule);
        let judged_at = place.get("judgement");
        let (_, again) = match problem.pass {
            Pass::Forward => {
                let lse = stress::find(place.get("problem").str()).map(|(_, lse)| lse);
                let normal = Some(problem.dtype);
                let (rows, width) = (rows(&problem), problem.head_dim_v);
                judgement(audit, &judged_at, version, Judged { rows, width, lse, normal, gradient: None })
            }
            Pass::Backward => gradients(audit, &judged_at, version, &of_gradients(&problem)),
        };
        let mut made = json!({"problem": raw(), "schedule": raw(), "judgement": again});
        // The last one of a run that was interrupted may have run less often.
        let last = root.get("complete").value == &json!(false) && n + 1 == places.len();
        for (name, expected) in [("threaded", calls), ("replayed", replays), ("repeated", repeats)] {
            let runs = audit.count(&place.get(name).get("runs"), ..=expected);
            audit.require(&place.at, last || runs == expected, "did not run as often as was planned");
            audit.count(&place.get(name).get("different"), ..=runs);
            made[name] = Value::Object(raws(&["runs", "different"]));
        }
        problems.push(made);
    }
    let texts: Vec<&str> = places.iter().map(|place| place.get("problem").str()).collect();
    // A problem that this version does not have may stand anywhere.
    let order: Vec<usize> =
        texts.iter().filter_map(|text| stress::find(text)).map(|(place, _)| place).collect();
    let in_order = order.is_sorted() && are_different(texts);
    audit.require("problems", in_order, "are not in their order, or one stands twice");
    let mut made = raws(&["device"]);
    asked(audit, root, version, problems.len(), &mut made);
    let plan =
        json!({"threads": threads, "streams": streams, "calls": raw(), "replays": replays, "repeats": raw()});
    made.extend([("plan".into(), plan), ("problems".into(), Value::Array(problems))]);
    made
}

/// A problem by its text, as it is written now or was written before: `1x8x512x64 f16 causal len_k=97`.
pub(super) fn problem(text: &str) -> Option<Problem> {
    let problem: Problem = text.parse().ok()?;
    let Problem { batch, heads_q, len_q, len_k, .. } = problem;
    let usual = len_k <= 1 << 20 && [batch, heads_q, len_q].iter().all(|size| (1..=1 << 20).contains(size));
    (usual && (problem.to_string() == text || former_text(&problem) == text)).then_some(problem)
}

/// The text of a problem before sizes had slashes.
fn former_text(problem: &Problem) -> String {
    let Problem { heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, lse: _, .. } = *problem;
    let square = problem.with_kv(heads_q, len_q).with_head_dim_v(head_dim).to_string();
    let mut words: Vec<String> =
        square.split(' ').filter(|&word| word != "lse").map(str::to_string).collect();
    // Sizes that differ came after the mask.
    let at = if problem.mask == Mask::None { 2 } else { 3 };
    let differing =
        [("len_k", len_k, len_q), ("heads_kv", heads_kv, heads_q), ("head_dim_v", head_dim_v, head_dim)];
    let differing = differing.into_iter().filter(|(_, own, usual)| own != usual);
    words.splice(at..at, differing.map(|(name, own, _)| format!("{name}={own}")));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_problem_of_the_corpus_is_read_from_its_text() {
        let posed = |case: &&Case| rows(&case.problem) > 0;
        for case in cases().values().map(|(_, case)| case).filter(posed) {
            let text = case.problem.to_string();
            let read = problem(&text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(rows(&read), rows(&case.problem), "{text}");
        }
        for other in ["", "1x8x512x64", "1x8x512 f16", "1x8x512x64 f16 sideways", "0x8x512x64 f16"] {
            assert_eq!(problem(other), None, "{other}");
        }
    }
}
