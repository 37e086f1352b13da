//! A failure in words: where, what kind, the first bad element, and how to see it again.

use std::fmt::Write as _;

use flashcore::Name;

use crate::check::{Fault, Prepared};
use crate::engine::Engine;
use flashcore_judge::diagnose::{Diagnosis, Kind, map, ranges};
use flashcore_judge::rule::{Bound, Judgement, Row};

/// What is wrong with a case on an engine, as a few lines for a person.
pub fn explain(prepared: &Prepared, engine: &dyn Engine, faults: &[Fault]) -> String {
    let case = &prepared.case;
    let name = engine.name();
    let mut text = format!(
        "{} on {name}\n  {}, {} inputs{}, {}, seed {}\n",
        case.name,
        case.problem,
        case.inputs,
        case.wild.map_or_else(String::new, |wild| format!(" with {wild}")),
        case.arrangement,
        case.seed
    );
    for fault in faults {
        for line in describe(fault).lines() {
            let _ = writeln!(text, "  {line}");
        }
    }
    if let Some(rows) = faults.iter().find_map(rows).filter(|rows| !rows.is_empty()) {
        for line in map(&case.problem, rows).lines() {
            let _ = writeln!(text, "  {line}");
        }
    }
    let _ = write!(text, "  see it again: {}", reproduce(&case.name, engine));
    text
}

/// The rows that a fault lies in, where it is known.
fn rows(fault: &Fault) -> Option<&[Row]> {
    match fault {
        Fault::Wrong { bad_rows: rows, .. } | Fault::NotRepeatable { rows, .. } => Some(rows),
        _ => None,
    }
}

/// The command that runs one case on one engine.
pub fn reproduce(case: &str, engine: &dyn Engine) -> String {
    format!("flashcore verify --full {} --filter '={case}'", engine.wish())
}

/// One fault in words.
pub fn describe(fault: &Fault) -> String {
    match fault {
        Fault::Refused(why) => format!("the call was refused: {why}"),
        Fault::NotWritten { tensor, count, first } => {
            format!("{count} elements of {tensor} were never written, the first in {}", at(*first))
        }
        Fault::Guard { tensor, breach } => {
            let place = match breach.offset {
                before if before < 0 => format!("{} elements before it", -before),
                after if after as usize >= breach.reach => {
                    format!("{} elements after it", after as usize - breach.reach + 1)
                }
                inside => format!("in the gap at element {inside}"),
            };
            format!("memory outside {tensor} was overwritten: {} elements, the first {place}", breach.count)
        }
        Fault::InputChanged(tensor) => format!("{tensor} was changed by the run, though it is an input"),
        Fault::Wrong { after, judgement, bad_rows, diagnosis } => {
            wrong(*after, judgement, bad_rows, diagnosis)
        }
        Fault::NotRepeatable { count, rows } => format!(
            "kind: {}: a second run on the same inputs differs in {count} elements: {}",
            Kind::Race.name(),
            places(rows)
        ),
        Fault::Outlandish { count, first } => format!(
            "{count} elements of o are larger than every value of their head, or NaN or infinite, the first in {}",
            at(*first)
        ),
        Fault::Ignored(operand) => {
            format!(
                "a row of {operand} was redrawn and o did not move: {operand} is not read there, or an old result is \
                 returned"
            )
        }
        Fault::Leaked { operand, first } => {
            format!("one row of {operand} was redrawn, and {} moved, which does not see it", at(*first))
        }
    }
}

fn wrong(after: Option<Name>, judgement: &Judgement, bad_rows: &[Row], diagnosis: &Diagnosis) -> String {
    let mut text = String::from("the result is wrong");
    if let Some(operand) = after {
        let _ = write!(text, " after {operand} was redrawn");
    }
    let _ = writeln!(text, ":");
    let _ = writeln!(text, "  kind: {}: {}", diagnosis.kind.name(), diagnosis.why);
    let bound = |name: &str, bound: &Bound| {
        let verdict = if bound.holds() { "holds" } else { "BROKEN" };
        format!(
            "  {name:<4} error {:.3e}, allowed {:.3e}, plain attention {:.3e}: {verdict}\n",
            bound.error, bound.allowed, bound.plain
        )
    };
    text += &bound("max", &judgement.max);
    text += &bound("rms", &judgement.rms);
    text += &bound("row", &judgement.row);
    if let Some(lse) = &judgement.lse {
        text += &bound("lse", lse);
    }
    if !bad_rows.is_empty() {
        let _ =
            writeln!(text, "  {} of {} rows are bad: {}", bad_rows.len(), judgement.rows, places(bad_rows));
    }
    if let Some(bad) = &judgement.first_bad {
        let tensor = if bad.lse { "lse" } else { "o" };
        let column = if bad.lse { String::new() } else { format!(", column {}", bad.column) };
        let _ = writeln!(
            text,
            "  first bad element: {tensor} in {}{column}: expected {:.6e}, actual {:.6e}, off by {:.3e}, allowed {:.3e}",
            at(bad.row),
            bad.expected,
            bad.actual,
            (bad.actual - bad.expected).abs(),
            bad.allowed
        );
    }
    text
}

fn at(row: Row) -> String {
    format!("batch {}, head {}, query {}", row.batch, row.head, row.query)
}

/// Which batch entries, heads and queries a set of rows lies in.
fn places(rows: &[Row]) -> String {
    let set = |part: fn(&Row) -> usize| ranges(&rows.iter().map(part).collect());
    format!("batch {}, heads {}, queries {}", set(|row| row.batch), set(|row| row.head), set(|row| row.query))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_judge::guarded::Breach;

    #[test]
    fn a_breach_says_on_which_side_it_is() {
        let say = |offset| {
            describe(&Fault::Guard { tensor: Name::O, breach: Breach { offset, count: 2, reach: 100 } })
        };
        assert!(say(-3).contains("3 elements before it"));
        assert!(say(100).contains("1 elements after it"));
        assert!(say(50).contains("in the gap at element 50"));
    }
}
