//! A thing compared with itself.

use flashcore::Mask;
use serde_json::{Map, Value, json};

use super::bench::{are_different, value};
use super::fields::{Place, raw};
use super::header::{margin, option};
use super::{Audit, near};
use crate::bench::cells::Types;
use crate::bench::itself::{AgainstItself, TIMES};
use crate::bench::outcome::Comparison;
use crate::shapes;
use crate::stats::{self, Interval};

pub(super) fn remake(audit: &mut Audit, root: &Place<'_>, version: u32) -> Map<String, Value> {
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

/// How often the command was told to compare; older files have `bench --against-itself N`.
fn asked_times(root: &Place<'_>) -> u64 {
    let given = option(root, "--times").or_else(|| option(root, "--against-itself"));
    given.map_or(TIMES, |text| text.parse().unwrap_or(0))
}

/// As `1x8x512x64 f16 causal`.
fn is_label(text: &str) -> bool {
    let words = text.split_once(' ').and_then(|(shape, rest)| Some((shape, rest.rsplit_once(' ')?)));
    let Some((shape, (types, mask))) = words else { return false };
    let shape = shapes::parse(shape).is_ok_and(|named| named.shape.to_string() == shape);
    shape
        && types.parse::<Types>().is_ok()
        && mask.parse::<Mask>().is_ok_and(|known| known.to_string() == mask)
}

/// A comparison whose samples are not kept: one interval lies within the other, and the verdict follows from the wider
/// one.
fn lone_comparison(audit: &mut Audit, place: &Place<'_>, margin: f64) -> Comparison {
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
    Comparison { peer: "itself".into(), speed_up, interval: usual, verdict_interval: sure, verdict, margin }
}
