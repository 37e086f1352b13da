//! Whether an evidence file is consistent: the whole document is recomputed from its raw part, and compared with the
//! file field by field.
//!
//! **Raw** is what was measured or read off a machine: samples, errors, names, versions. It must have the right type
//! and lie in a possible range. Everything else **follows** from it by the very functions that wrote it, bootstrap
//! included, and must agree to nine digits. An unknown or missing field is refused, and so is an unknown schema: what
//! nobody checks proves nothing.

mod bench;
mod checks;
mod cpu;
mod fields;
mod gpu;
mod header;
mod itself;
mod judgement;
mod machine;

#[cfg(test)]
mod attacks;

use serde::Serialize;
use serde_json::{Map, Value};

use self::fields::{Place, RAW};
use crate::evidence;

/// What was found in a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Audit {
    /// The file's schema.
    pub schema: String,
    /// How many numbers, verdicts and hashes were recomputed and agree.
    pub checked: usize,
    /// What the file does not say.
    pub absent: Vec<String>,
    /// What cannot be true.
    pub contradictions: Vec<String>,
    /// Why this version cannot check the file.
    #[serde(skip)]
    beyond: Option<String>,
}

impl Audit {
    /// Whether nothing contradicts itself.
    pub fn holds(&self) -> bool {
        self.contradictions.is_empty()
    }

    /// Compares what a file says with what was recomputed.
    fn agree(&mut self, at: &str, said: &Value, made: &Value) {
        match (said, made) {
            (_, Value::String(made)) if made == RAW => {}
            (Value::Object(said), Value::Object(made)) => {
                let under =
                    |name: &str| if at.is_empty() { name.to_string() } else { format!("{at}.{name}") };
                for (name, made) in made {
                    match said.get(name) {
                        Some(said) => self.agree(&under(name), said, made),
                        None => self.deny(&under(name), "is needed and is not there"),
                    }
                }
                for name in said.keys().filter(|name| !made.contains_key(*name)) {
                    self.deny(&under(name), "is no field of this schema");
                }
            }
            (Value::Array(said), Value::Array(made)) => {
                if said.len() != made.len() {
                    let why = format!("holds {} entries, but its source makes it {}", said.len(), made.len());
                    self.deny(at, why);
                }
                for (n, (said, made)) in said.iter().zip(made).enumerate() {
                    self.agree(&format!("{at}[{n}]"), said, made);
                }
            }
            (Value::Number(a), Value::Number(b)) if a == b || is_near(a, b) => self.checked += 1,
            _ if said == made => self.checked += 1,
            _ => self.deny(at, format!("is {}, but its source makes it {}", brief(said), brief(made))),
        }
    }

    /// Refuses a place unless a condition holds there.
    fn require(&mut self, at: &str, holds: bool, otherwise: &str) {
        if holds {
            self.checked += 1;
        } else {
            self.deny(at, otherwise);
        }
    }

    fn deny(&mut self, at: &str, why: impl std::fmt::Display) {
        self.contradictions.push(format!("{at} {why}"));
    }

    fn miss(&mut self, what: impl Into<String>) {
        self.absent.push(what.into());
    }
}

/// Whether numbers agree: fractions to nine digits, counts exactly.
fn is_near(a: &serde_json::Number, b: &serde_json::Number) -> bool {
    a.is_f64() && b.is_f64() && a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| near(a, b))
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

/// A value as a message shows it.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() > 80 { text.chars().take(80).collect::<String>() + "…" } else { text }
}

/// How a kind of evidence is recomputed.
struct Kind {
    /// The commands that write it, or wrote it once.
    commands: &'static [&'static str],
    version: u32,
    /// Everything after the header that all kinds share.
    remake: fn(&mut Audit, &Place<'_>, u32) -> Map<String, Value>,
    /// Whether its inputs are those of its seed; checked last, since drawing them takes a while.
    inputs: fn(&mut Audit, &Place<'_>),
}

const BENCH: &[&str] = &["bench", "grid"];
const AGAINST_ITSELF: &[&str] = &["against-itself", "bench"];
const CEILINGS: &[&str] = &["ceilings", "bench"];

/// Files that commands write but that are no evidence: nothing in them can be recomputed.
const NOTES: [&str; 8] = ["comparison", "doctor", "inspect", "leaderboard", "micro", "plan", "rbk", "run"];

/// The schemas that are known, for messages.
const KNOWN: &str = "against-itself/1 and /2, bench/1 and /2, bench-gpu/1 to /3, ceilings/1, faults/1, profile/1, \
                     stress/1 and /2, verify/1 and /2";

fn kind(schema: &str) -> Result<Kind, String> {
    let name = schema
        .strip_prefix("flashcore.")
        .ok_or_else(|| format!("{schema} is not known here: it is no schema of flashcore's"))?;
    let of = |commands, version, remake| Kind { commands, version, remake, inputs: |_, _| {} };
    Ok(match name {
        "bench/1" => Kind { inputs: cpu::inputs, ..of(BENCH, 1, cpu::remake) },
        "bench/2" => Kind { inputs: cpu::inputs, ..of(BENCH, 2, cpu::remake) },
        "bench-gpu/1" => Kind { inputs: gpu::inputs, ..of(BENCH, 1, gpu::remake) },
        "bench-gpu/2" => Kind { inputs: gpu::inputs, ..of(BENCH, 2, gpu::remake) },
        "bench-gpu/3" => Kind { inputs: gpu::inputs, ..of(BENCH, 3, gpu::remake) },
        "against-itself/1" => of(AGAINST_ITSELF, 1, itself::remake),
        "against-itself/2" => of(AGAINST_ITSELF, 2, itself::remake),
        "verify/1" => of(&["verify"], 1, checks::verify),
        "verify/2" => of(&["verify"], 2, checks::verify),
        "faults/1" => of(&["verify"], 1, checks::faults),
        "stress/1" => of(&["verify"], 1, checks::stress),
        "stress/2" => of(&["verify"], 2, checks::stress),
        "ceilings/1" => of(CEILINGS, 1, machine::ceilings),
        "profile/1" => of(&["profile"], 1, machine::profile),
        _ if NOTES.contains(&name.split('/').next().unwrap_or_default()) => {
            return Err(format!("{schema} is a note and no evidence: nothing in it can be made again"));
        }
        _ => {
            return Err(format!(
                "{schema} is not known here, so nothing of it is checked; known are {KNOWN}"
            ));
        }
    })
}

/// Audits the text of a file. An error says why it is no evidence, or none that this version can check.
pub fn audit(text: &str) -> Result<Audit, String> {
    let document: Value = serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
    let schema = document["schema"].as_str().ok_or("it has no schema, so it is no evidence")?.to_string();
    let kind = kind(&schema)?;
    let whole = evidence::hash_holds(text, &document);
    let whole = whole.ok_or("it has no hash, so it is no evidence: nobody knows whether it was changed")?;
    let mut audit = Audit { schema, ..Audit::default() };
    audit.require("hash", whole, "is not that of the text: the file was changed");
    let root = Place::root(&document);
    let mut made = header::remake(&mut audit, &root, kind.commands);
    made.extend((kind.remake)(&mut audit, &root, kind.version));
    if let Some(why) = audit.beyond.take() {
        return Err(why);
    }
    audit.agree("", &document, &Value::Object(made));
    if audit.holds() {
        (kind.inputs)(&mut audit, &root);
    }
    Ok(audit)
}

/// What contradicts itself in the text of a file, or why it is no evidence.
pub fn contradictions(text: &str) -> Result<Vec<String>, String> {
    audit(text).map(|audit| audit.contradictions)
}

/// A difference between two files.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Where, as a path of names.
    pub at: String,
    /// What the first file says; absent where it says nothing.
    pub first: Option<Value>,
    /// What the second says.
    pub second: Option<Value>,
}

/// Where two documents differ, raw samples left out: those of two runs always do.
pub fn differences(first: &Value, second: &Value) -> Vec<Difference> {
    let mut all = Vec::new();
    compare("", first, second, &mut all);
    all
}

fn compare(at: &str, first: &Value, second: &Value, all: &mut Vec<Difference>) {
    let under = |name: &str| if at.is_empty() { name.to_string() } else { format!("{at}.{name}") };
    let differ = |first: Option<&Value>, second: Option<&Value>, at: String| Difference {
        at,
        first: first.cloned(),
        second: second.cloned(),
    };
    match (first, second) {
        (Value::Object(a), Value::Object(b)) => {
            let mut names: Vec<&String> =
                a.keys().chain(b.keys().filter(|name| !a.contains_key(*name))).collect();
            names.retain(|name| !["samples_us", "call_us", "hash"].contains(&name.as_str()));
            for name in names {
                match (a.get(name), b.get(name)) {
                    (Some(a), Some(b)) => compare(&under(name), a, b, all),
                    (a, b) => all.push(differ(a, b, under(name))),
                }
            }
        }
        (Value::Array(a), Value::Array(b)) => {
            for n in 0..a.len().max(b.len()) {
                let at = format!("{at}[{}]", label(a.get(n).or(b.get(n)), n));
                match (a.get(n), b.get(n)) {
                    (Some(a), Some(b)) => compare(&at, a, b, all),
                    (a, b) => all.push(differ(a, b, at)),
                }
            }
        }
        _ if first == second => {}
        _ => all.push(differ(Some(first), Some(second), at.into())),
    }
}

/// What to call an element of a list: its own name where it has one.
fn label(value: Option<&Value>, n: usize) -> String {
    let named = |name: &str| value?.get(name)?.as_str().map(String::from);
    match (named("shape"), named("dtype"), named("mask")) {
        (Some(shape), Some(dtype), Some(mask)) => format!("{shape} {dtype} {mask}"),
        _ => named("name").or_else(|| named("peer")).unwrap_or_else(|| n.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn differences_name_the_place_and_leave_raw_samples_out() {
        let of = |p50: f64| {
            json!({"cells": [{"shape": "1x1x8x8", "dtype": "f16", "mask": "full",
                "results": [{"name": "flashcore", "samples_us": [p50], "p50_us": p50}]}]})
        };
        assert_eq!(differences(&of(1.0), &of(1.0)), []);
        let found = differences(&of(1.0), &of(2.0));
        let [one] = &found[..] else { panic!("{found:?}") };
        assert_eq!(one.at, "cells[1x1x8x8 f16 full].results[flashcore].p50_us");
        assert_eq!((&one.first, &one.second), (&Some(json!(1.0)), &Some(json!(2.0))));
        assert_eq!(differences(&json!({"a": 1}), &json!({})).len(), 1);
        assert_eq!(differences(&json!({"a": [1]}), &json!({"a": [1, 2]})).len(), 1);
    }

    #[test]
    fn what_is_no_evidence_is_said_to_be_none() {
        assert!(audit("{").unwrap_err().contains("not JSON"));
        assert!(audit("{}").unwrap_err().contains("schema"));
        let without_hash = json!({"schema": "flashcore.bench/1", "cells": []}).to_string();
        assert!(audit(&without_hash).unwrap_err().contains("no hash"));
        for schema in
            ["flashcore.bench/3", "flashcore.bench/", "flashcore.bench", "flashcore.verify/0", "other/1"]
        {
            let text = json!({"schema": schema, "hash": "blake3:0"}).to_string();
            assert!(audit(&text).unwrap_err().contains("known"), "{schema}");
        }
        for note in NOTES {
            let text = json!({"schema": format!("flashcore.{note}/1"), "hash": "blake3:0"}).to_string();
            assert!(audit(&text).unwrap_err().contains("a note"), "{note}");
        }
    }

    #[test]
    fn counts_agree_or_do_not_and_measures_agree_to_nine_digits() {
        let agree = |said: Value, made: Value| {
            let mut audit = Audit::default();
            audit.agree("", &said, &made);
            audit.holds()
        };
        assert!(agree(json!(1.0), json!(1.0 + 1e-10)) && !agree(json!(1.0), json!(1.0 + 1e-8)));
        assert!(!agree(json!(4_000_000_000_u32), json!(4_000_000_001_u32)));
        assert!(!agree(json!({"a": 1, "b": 2}), json!({"a": 1})) && !agree(json!({}), json!({"a": 1})));
        assert!(!agree(json!([1, 1]), json!([1])) && !agree(json!(null), json!(0.0)));
    }
}
