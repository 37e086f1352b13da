//! The rule's judgement of an output: what is allowed follows from its yardstick, and whether it is right from that.

use flashcore::{DType, Name};
use serde_json::{Value, json};

use super::fields::{Place, raw, raws};
use super::{Audit, near};
use crate::bench::cells::Cell;
use crate::rule::{Bound, Judgement};

/// What is known of the output that was judged.
#[derive(Clone, Copy, Default)]
pub(super) struct Judged {
    /// Its rows.
    pub rows: usize,
    /// Elements of a row; 0 where that is not known.
    pub width: usize,
    /// Whether lse was judged too; absent where that is not known.
    pub lse: Option<bool>,
    /// The dtype, where the inputs are standard normal numbers: a floor is then a few of its rounding errors.
    pub normal: Option<DType>,
    /// The gradient that was judged in place of the output.
    pub gradient: Option<Name>,
}

impl Judged {
    /// Some rows of a cell's output.
    pub fn of(cell: &Cell, rows: usize) -> Self {
        let (output, width) = cell.asked().judged();
        let gradient = (output != Name::O).then_some(output);
        let normal = gradient.is_none().then_some(cell.types.dtype);
        Self { rows, width, lse: Some(false), normal, gradient }
    }
}

/// Checks the judgement of a backward pass: each gradient as an output by itself.
pub(super) fn gradients(
    audit: &mut Audit,
    place: &Place<'_>,
    version: u32,
    outputs: &[(Name, Judged)],
) -> (Judgement, Value) {
    let mut made = json!({"lse": null});
    let mut all = Judgement { outputs: Vec::new() };
    let mut broken = Vec::new();
    for (name, of) in outputs {
        let (one, again) = bounds(audit, &place.get(&name.to_string()), version, *of);
        let again = again.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
        made[name.to_string()] = again.map(|(key, value)| (key.clone(), value.clone())).collect();
        broken.extend((!one.passed()).then(|| (name.to_string(), one.max())));
        all.outputs.extend(one.outputs);
    }
    let bad = place.get("first_bad");
    let of = broken.iter().find(|(name, _)| name == bad.get("output").str());
    audit.require(&bad.at, bad.is_null() == broken.is_empty() && bad.is_null() == of.is_none(), BAD);
    made["first_bad"] = of.map_or(Value::Null, |(_, max)| bad_element(audit, &bad, max));
    (all, made)
}

/// What is wrong with a bad element that does not fit what was judged.
const BAD: &str = "names a bad element of what is right, or none of what is wrong";

/// Checks a judgement. What is right has every error within its bound, and no bad element.
pub(super) fn judgement(
    audit: &mut Audit,
    place: &Place<'_>,
    version: u32,
    judged: Judged,
) -> (Judgement, Value) {
    let (found, mut made) = bounds(audit, place, version, judged);
    let bad = place.get("first_bad");
    audit.require(&bad.at, bad.is_null() == found.passed(), BAD);
    made["first_bad"] = if bad.is_null() { Value::Null } else { bad_element(audit, &bad, &found.max()) };
    (found, made)
}

/// The bounds of an output.
fn bounds(audit: &mut Audit, place: &Place<'_>, version: u32, judged: Judged) -> (Judgement, Value) {
    let mut made = json!({});
    let mut read = |audit: &mut Audit, name: &str| {
        let (bound, again) = bound(audit, &place.get(name), version);
        let floor = judged.normal.map_or(f64::INFINITY, |dtype| 8.0 * f64::from(dtype.epsilon()) + 1e-4);
        let few = name == "lse" || bound.allowed <= 2.0 * bound.plain + floor;
        audit.require(&place.get(name).at, few, "allows more than roundings explain");
        made[name] = again;
        bound
    };
    let (max, rms, row) = (read(audit, "max"), read(audit, "rms"), read(audit, "row"));
    let lse = (!place.get("lse").is_null()).then(|| read(audit, "lse"));
    if lse.is_none() {
        made["lse"] = Value::Null;
    }
    let lse_is_there = judged.lse.is_none_or(|wanted| wanted == lse.is_some());
    audit.require(&format!("{}.lse", place.at), lse_is_there, "does not fit what was asked for");
    // No element's error is above the largest, and the root mean square lies in between.
    let all = (judged.rows * judged.width) as f64;
    let between = |low: f64, high: f64| low <= high * (1.0 + 1e-9);
    let ordered = between(row.error, max.error)
        && between(row.plain, max.plain)
        && between(rms.error, max.error)
        && between(rms.plain, max.plain)
        && between(rms.allowed, max.allowed)
        && (all == 0.0 || between(max.error / all.sqrt(), rms.error) || max.error.is_infinite())
        && (all == 0.0 || between(max.plain / all.sqrt(), rms.plain));
    audit.require(&place.at, ordered, "has a root mean square or a row that its maximum cannot have");
    made["rows"] = json!(judged.rows);
    (Judgement::forward(judged.rows, [max, rms, row], lse), made)
}

/// An error with what it may be: twice plain attention's and the floor, which is written down since version 2.
fn bound(audit: &mut Audit, place: &Place<'_>, version: u32) -> (Bound, Value) {
    let error = if place.get("error").is_null() {
        // Infinity is null in JSON; it is within no bound.
        f64::INFINITY
    } else {
        audit.number(&place.get("error"), 0.0..)
    };
    let plain = audit.number(&place.get("plain"), 0.0..);
    let allowed = audit.number(&place.get("allowed"), 0.0..);
    let mut made = raws(&["error", "plain", "allowed"]);
    if version < 2 {
        let enough = allowed >= 2.0 * plain * (1.0 - 1e-9);
        audit.require(&place.at, enough, "allows less than twice the plain error, so it is not the rule's");
    } else {
        let floor = audit.number(&place.get("floor"), -1e-12 * allowed..);
        made.insert("floor".into(), raw());
        let follows = near(allowed, 2.0 * plain + floor);
        audit.require(&place.at, follows, "allows something else than twice the plain error and the floor");
    }
    (Bound { error, plain, allowed }, Value::Object(made))
}

/// An element of o or lse, or of a gradient, whose rows may be of keys.
fn bad_element(audit: &mut Audit, place: &Place<'_>, max: &Bound) -> Value {
    let of_gradient = !place.get("output").is_null();
    let of_lse = !of_gradient && audit.flag(&place.get("lse"));
    let position = if place.get("row").get("key").is_null() { "query" } else { "key" };
    let row = ["batch", "head", position];
    for name in row {
        audit.count(&place.get("row").get(name), ..1 << 40);
    }
    audit.count(&place.get("column"), ..1 << 20);
    let expected = audit.maybe_number(&place.get("expected"), ..);
    let actual = audit.maybe_number(&place.get("actual"), ..);
    audit.number(&place.get("allowed"), 0.0..);
    if let (Some(expected), Some(actual), false) = (expected, actual, of_lse) {
        let within = (actual - expected).abs() <= max.error * (1.0 + 1e-9);
        audit.require(&place.at, within, "is further off than the largest error");
    }
    let which = if of_gradient { "output" } else { "lse" };
    let mut made = raws(&[which, "column", "expected", "actual", "allowed"]);
    made.insert("row".into(), Value::Object(raws(&row)));
    Value::Object(made)
}
