//! A failure in words: where, what kind, the first bad element, and how to see it again.

use std::fmt::Write as _;

use flashcore::{Name, Pass};

use crate::cases::Case;
use crate::check::{Fault, Prepared};
use crate::engine::Engine;
use flashcore_judge::diagnose::{Diagnosis, Kind, map, ranges};
use flashcore_judge::rule::{Judgement, Row};

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
    for rows in faults.iter().find_map(rows).into_iter().flat_map(by_kind) {
        for line in map(&prepared.operands().problem, rows).lines() {
            let _ = writeln!(text, "  {line}");
        }
    }
    let _ = write!(text, "  see it again: {}", reproduce(case, engine));
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
pub fn reproduce(case: &Case, engine: &dyn Engine) -> String {
    let pass = match case.problem.pass {
        Pass::Forward => "",
        Pass::Backward => " --pass backward",
    };
    format!("flashcore verify --full{pass} {} --filter '={}'", engine.wish(), case.name)
}

/// One fault in words.
pub fn describe(fault: &Fault) -> String {
    match fault {
        Fault::Refused(why) => format!("the call was refused: {why}"),
        Fault::NotWritten { tensor, count, first } => {
            format!("{count} elements of {tensor} were never written, the first in {first}")
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
        Fault::Miswritten { tensor, count, first } => {
            format!(
                "{count} rows of the cache {tensor} are not what the append should leave, the first is {first}"
            )
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
            "{count} elements of o are larger than every value of their head, or NaN or infinite, the first in {first}"
        ),
        Fault::Ignored(operand) => {
            format!(
                "a row of {operand} was redrawn and the result did not move: {operand} is not read there, or an old result is \
                 returned"
            )
        }
        Fault::Leaked { operand, first } => {
            format!("one row of {operand} was redrawn, and {first} moved, which does not see it")
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
    for verdict in &judgement.outputs {
        for (name, bound) in verdict.bounds() {
            let word = if bound.holds() { "holds" } else { "BROKEN" };
            let name = format!("{} {name}", verdict.output);
            let _ = writeln!(
                text,
                "  {name:<7} error {:.3e}, allowed {:.3e}, plain attention {:.3e}: {word}",
                bound.error, bound.allowed, bound.plain
            );
        }
    }
    let bad = judgement.outputs.iter().filter(|verdict| !verdict.bad_rows.is_empty());
    let bad = bad.map(|it| format!("{} of {} rows of {}", it.bad_rows.len(), it.rows, it.output));
    let bad: Vec<String> = bad.collect();
    if !bad.is_empty() {
        let _ = writeln!(text, "  {} are bad: {}", bad.join(" and "), places(bad_rows));
    }
    if let Some(bad) = judgement.first_bad() {
        let column = if bad.output == Name::Lse { String::new() } else { format!(", column {}", bad.column) };
        let _ = writeln!(
            text,
            "  first bad element: {} in {}{column}: expected {:.6e}, actual {:.6e}, off by {:.3e}, allowed {:.3e}",
            bad.output,
            bad.row,
            bad.expected,
            bad.actual,
            (bad.actual - bad.expected).abs(),
            bad.allowed
        );
    }
    text
}

/// Sorted rows, those of queries apart from those of keys.
fn by_kind(rows: &[Row]) -> impl Iterator<Item = &[Row]> {
    rows.chunk_by(|a, b| a.kind == b.kind)
}

/// Which batch entries, heads, and queries or keys a set of sorted rows lies in.
fn places(rows: &[Row]) -> String {
    let place = |rows: &[Row]| {
        let set = |part: fn(&Row) -> usize| ranges(&rows.iter().map(part).collect());
        let [_, many] = rows[0].kind.words();
        let (batch, heads) = (set(|row| row.batch), set(|row| row.head));
        format!("batch {batch}, heads {heads}, {many} {}", set(|row| row.position))
    };
    by_kind(rows).map(place).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::signature::Rows;
    use flashcore_judge::guarded::Breach;

    #[test]
    fn rows_of_queries_and_of_keys_are_told_apart() {
        let key = |row: Row| Row { kind: Rows::Keys, ..row };
        let rows = [Row::query(0, 2, 4), Row::query(0, 2, 5), key(Row::query(1, 0, 7))];
        assert_eq!(places(&rows), "batch 0, heads 2, queries 4-5; batch 1, heads 0, keys 7");
        let first = key(Row::query(1, 0, 7));
        let said = describe(&Fault::NotWritten { tensor: Name::V, count: 3, first });
        assert!(said.ends_with("of v were never written, the first in batch 1, head 0, key 7"), "{said}");
    }

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
