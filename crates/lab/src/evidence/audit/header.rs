//! The header of every file: when, by which command, on what.

use flashcore::cpu::Isa;
use serde_json::{Map, Value, json};

use super::Audit;
use super::fields::{Place, any, is_hex, is_version, raw, raws};
use crate::stats;

const SYSTEMS: [&str; 4] = ["freebsd", "linux", "macos", "windows"];
const ARCHITECTURES: [&str; 5] = ["aarch64", "powerpc64", "riscv64", "s390x", "x86_64"];

/// Checks all of it, except the schema and the hash, which were checked before.
pub(super) fn remake(audit: &mut Audit, root: &Place<'_>, commands: &[&str]) -> Map<String, Value> {
    audit.text(&root.get("created"), is_time);
    let words = audit.list(&root.get("command"));
    let words: Vec<&str> = words.iter().map(|word| audit.text(word, any)).collect();
    let program = words.first().and_then(|program| program.rsplit(['/', '\\']).next());
    let is_command = program.is_some_and(|name| name.starts_with("flashcore"))
        && words.get(1).is_some_and(|word| commands.contains(word));
    let wanted = commands.first().unwrap_or(&"");
    audit.require("command", is_command, &format!("is not flashcore {wanted}, which writes this schema"));
    audit.flag(&root.get("complete"));
    let mut made = raws(&["schema", "hash", "created", "command", "complete"]);
    made.insert("environment".into(), environment(audit, &root.get("environment")));
    let optimised = root.get("environment").get("optimised").value == &json!(true);
    let fit = optimised || !commands.contains(&"bench");
    audit.require("environment.optimised", fit, "is false: times of such a build say nothing");
    made
}

fn environment(audit: &mut Audit, place: &Place<'_>) -> Value {
    audit.text(&place.get("flashcore"), is_version);
    if audit.maybe_text(&place.get("commit"), |text| is_hex(text, 40)).is_none() {
        audit.miss("environment.commit");
    }
    if !place.get("dirty").is_null() {
        audit.flag(&place.get("dirty"));
    }
    let built_in_git = !place.get("commit").is_null();
    let dirty_is_known = !place.get("dirty").is_null();
    audit.require("environment.dirty", built_in_git == dirty_is_known, "is known only where the commit is");
    audit.text(&place.get("os"), |text| SYSTEMS.contains(&text));
    audit.text(&place.get("arch"), |text| ARCHITECTURES.contains(&text));
    cpu(audit, &place.get("cpu"));
    if !place.get("memory_bytes").is_null() {
        let bytes = audit.count(&place.get("memory_bytes"), 1 << 20..1 << 50);
        audit.require("environment.memory_bytes", bytes.is_multiple_of(1024), "is no whole number of KiB");
    }
    audit.flag(&place.get("optimised"));
    let cpu = raws(&["model", "cores", "paths", "chosen", "why"]);
    let mut made = raws(&["flashcore", "commit", "dirty", "os", "arch", "memory_bytes", "optimised"]);
    made.insert("cpu".into(), Value::Object(cpu));
    Value::Object(made)
}

fn cpu(audit: &mut Audit, place: &Place<'_>) {
    audit.maybe_text(&place.get("model"), any);
    audit.count(&place.get("cores"), 1..=65_536);
    let paths = audit.list(&place.get("paths"));
    let ranks: Vec<Option<usize>> =
        paths.iter().map(|path| Isa::ALL.iter().position(|isa| isa.name() == path.str())).collect();
    // The widest first, and portable is everywhere.
    let in_order = ranks.iter().all(Option::is_some) && ranks.is_sorted_by(|a, b| a > b);
    let paths: Vec<&str> = paths.iter().map(Place::str).collect();
    let whole = in_order && paths.last() == Some(&Isa::Portable.name());
    audit.require("environment.cpu.paths", whole, "are not the paths of a CPU");
    let chosen = audit.text(&place.get("chosen"), |text| paths.contains(&text));
    let widest = |why: &str| {
        let of = why.strip_prefix(&format!("{chosen} is the widest that this CPU has of "));
        Some(&chosen) == paths.first()
            && of.is_some_and(|of| paths.iter().all(|path| of.split(", ").any(|name| name == *path)))
    };
    let says = |why: &str| {
        let asked = why.strip_prefix("FLASHCORE_CPU=").and_then(|rest| rest.strip_suffix(" asks for it"));
        let otherwise = why.strip_prefix("FLASHCORE_CPU ").and_then(|rest| rest.rsplit_once("; "));
        asked.is_some_and(|name| name.eq_ignore_ascii_case(chosen))
            || otherwise.is_some_and(|(_, why)| widest(why))
            || widest(why)
    };
    audit.text(&place.get("why"), says);
}

/// As 2026-11-15T03:00:00Z, in a year in which there was a FlashCore.
pub(super) fn is_time(text: &str) -> bool {
    let written = |time| humantime::format_rfc3339_seconds(time).to_string();
    let year = text.get(..4).and_then(|year| year.parse::<u32>().ok());
    year.is_some_and(|year| (2026..2100).contains(&year))
        && humantime::parse_rfc3339(text).is_ok_and(|time| written(time) == text)
}

/// The last value of an option in the command line, as `--name VALUE` or `--name=VALUE`.
pub(super) fn option<'a>(root: &Place<'a>, name: &str) -> Option<&'a str> {
    let words: Vec<&str> = root.get("command").items().iter().map(Place::str).collect();
    let at = |n: usize| match words[n].strip_prefix(name)? {
        "" => words.get(n + 1).copied(),
        rest => rest.strip_prefix('='),
    };
    (0..words.len()).rev().find_map(at)
}

/// Whether the command line has an option without a value.
pub(super) fn flag(root: &Place<'_>, name: &str) -> bool {
    root.get("command").items().iter().any(|word| word.str() == name)
}

/// The smallest difference that matters, from the command line.
pub(super) fn margin(root: &Place<'_>) -> f64 {
    let percent = option(root, "--margin").and_then(|text| text.parse::<f64>().ok());
    percent.map_or(stats::MARGIN, |percent| percent / 100.0)
}

/// A run that ran to its end has everything that was asked for; only since version 2 is it known how much that is.
pub(super) fn asked(
    audit: &mut Audit,
    root: &Place<'_>,
    version: u32,
    found: usize,
    made: &mut Map<String, Value>,
) {
    audit.require(&root.at, found > 0, "holds nothing: nothing was found out");
    if version < 2 {
        return;
    }
    let asked = audit.count(&root.get("asked"), 1..=1 << 20) as usize;
    let whole = found == asked || (found < asked && root.get("complete").value == &json!(false));
    audit.require("asked", whole, "is not how many there are, though the run is complete");
    made.insert("asked".into(), raw());
}
