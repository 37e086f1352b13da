//! One case through one engine: everything that must hold of its result.
//!
//! - Outputs are poisoned before each run, and every element must be written.
//! - Guard zones around and inside every tensor must stay as they were, and so must the inputs.
//! - The result obeys the [tolerance rule](crate::rule).
//! - A second run, over another poison, gives the same bits (unless the engine says that it does not).
//! - q, k and v of one kv head are redrawn one at a time: the output must follow as the oracle's does, and the
//!   heads that do not see the change must not move at all.

use std::sync::OnceLock;

use flashcore::{DType, Name, Problem};
use serde::Serialize;

use crate::cases::Case;
use crate::diagnose::{Diagnosis, Kind, diagnose};
use crate::engine::Engine;
use crate::guarded::{Breach, Guarded, Poison};
use crate::operands::Operands;
use crate::rng::Rng;
use crate::rule::{Judgement, Row, Yardstick};

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// The engine refused a call that the contract allows.
    Refused(String),
    /// Elements of an output that were never written.
    NotWritten {
        /// Which output.
        tensor: Name,
        /// How many elements.
        count: usize,
        /// The first of them.
        first: Row,
    },
    /// Memory outside a tensor was overwritten.
    Guard {
        /// Which tensor.
        tensor: Name,
        /// Where.
        breach: Breach,
    },
    /// An input was changed.
    InputChanged(Name),
    /// The result is further from the oracle than the rule allows.
    Wrong {
        /// What was redrawn before the run; none in the first.
        after: Option<Name>,
        /// The rule's judgement.
        judgement: Box<Judgement>,
        /// Where the rows that break their bounds are.
        bad_rows: Vec<Row>,
        /// What it looks like.
        diagnosis: Diagnosis,
    },
    /// Two runs on the same inputs differ.
    NotRepeatable {
        /// How many elements differ.
        count: usize,
        /// The rows that they lie in.
        rows: Vec<Row>,
    },
    /// An output did not move though an input did, and the oracle's output with it.
    Ignored(Name),
    /// Heads moved that do not see the operand that was redrawn.
    Leaked {
        /// What was redrawn.
        operand: Name,
        /// The first row that moved.
        first: Row,
    },
}

impl Fault {
    /// A wrong result that does not come again is a race, whatever else it looks like.
    fn is_of_a_race(&mut self, differs: &Fault) {
        if let (Fault::Wrong { diagnosis, .. }, Fault::NotRepeatable { count, rows }) = (self, differs) {
            let why = format!("the next run gives other bits in {count} elements of {} rows", rows.len());
            *diagnosis = Diagnosis { kind: Kind::Race, why };
        }
    }
}

/// What is asked of a result, in a sentence.
pub const RULE: &str = "at most twice the error of plain same-precision attention against an f64 oracle, plus the \
                    conditioned floor, by maximum, RMS and row; lse by its own bound";

/// How a case went.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Everything holds.
    Passed(Judgement),
    /// The engine does not compute this problem; why.
    Skipped(String),
    /// Something is wrong. The judgement is of the first run, if there was one.
    Failed(Vec<Fault>),
}

/// The status word of an outcome, in tables and in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Everything holds.
    Passed,
    /// The engine does not compute this problem.
    Skipped,
    /// Something is wrong.
    Failed,
}

impl Outcome {
    /// The status word.
    pub fn status(&self) -> Status {
        match self {
            Outcome::Passed(_) => Status::Passed,
            Outcome::Skipped(_) => Status::Skipped,
            Outcome::Failed(_) => Status::Failed,
        }
    }
}

/// A redrawn operand of one kv head, with the truth that goes with it.
struct Redrawn {
    operand: Name,
    operands: Operands,
    truth: Yardstick,
}

/// A case with its inputs and the truth about them, shared by all engines.
pub struct Prepared {
    /// The case.
    pub case: Case,
    operands: Operands,
    yardstick: Yardstick,
    redrawn: OnceLock<Vec<Redrawn>>,
}

impl Prepared {
    /// Draws the inputs and asks the oracle.
    pub fn new(case: Case) -> Self {
        let operands = case.operands();
        let yardstick = operands.yardstick();
        Self { case, operands, yardstick, redrawn: OnceLock::new() }
    }

    /// The inputs.
    pub fn operands(&self) -> &Operands {
        &self.operands
    }

    /// The truth.
    pub fn yardstick(&self) -> &Yardstick {
        &self.yardstick
    }

    /// q, k and v redrawn one at a time in the kv head of one batch entry that has keys.
    fn redrawn(&self) -> &[Redrawn] {
        self.redrawn.get_or_init(|| {
            let Problem { batch, heads_q, heads_kv, len_q, .. } = self.case.problem;
            let candidates: Vec<usize> = (0..batch).filter(|&b| self.operands.keys(b) > 0).collect();
            if candidates.is_empty() || heads_q * len_q == 0 {
                return Vec::new();
            }
            let mut rng = Rng::stream(self.case.seed, 77);
            let (b, kv_head) = (rng.pick(&candidates), rng.below(heads_kv));
            let fresh = self.case.operands_from(self.case.seed.wrapping_add(0x5eed));
            let group = self.case.problem.group();
            [Name::Q, Name::K, Name::V]
                .into_iter()
                .map(|operand| {
                    let mut operands = self.operands.clone();
                    let (to, from, first, heads) = match operand {
                        Name::Q => (&mut operands.q, &fresh.q, kv_head * group, group),
                        Name::K => (&mut operands.k, &fresh.k, kv_head, 1),
                        _ => (&mut operands.v, &fresh.v, kv_head, 1),
                    };
                    copy_heads(to, from, b, first, heads);
                    let truth = operands.yardstick_of_group(b, kv_head);
                    Redrawn { operand, operands, truth }
                })
                .collect()
        })
    }

    /// Runs the case through an engine and checks everything.
    pub fn check(&self, engine: &dyn Engine) -> Outcome {
        if let Err(why) = engine.supports(&self.case.problem) {
            return Outcome::Skipped(why);
        }
        let mut faults = Vec::new();
        let first = match run(engine, &self.case, &self.operands, Poison::First, &mut faults) {
            Ok(first) => first,
            Err(refusal) => return Outcome::Failed(vec![refusal]),
        };
        let (o, lse) = (first.o.values(), first.lse.as_ref().map(Guarded::values));
        let judgement = self.yardstick.judge(&o, lse.as_deref());
        if !judgement.passed() {
            faults.push(wrong(None, &judgement, &self.operands, &self.yardstick, &o, lse.as_deref()));
        }
        match run(engine, &self.case, &self.operands, Poison::Second, &mut faults) {
            Ok(second) if engine.deterministic() => {
                if let Some(differs) = self.differs(&first, &second) {
                    for fault in &mut faults {
                        fault.is_of_a_race(&differs);
                    }
                    faults.push(differs);
                }
            }
            Ok(_) => {}
            Err(refusal) => faults.push(refusal),
        }
        // What a wrong or unsteady engine does with changed inputs says nothing more.
        if faults.is_empty() {
            for redrawn in self.redrawn() {
                match run(engine, &self.case, &redrawn.operands, Poison::First, &mut faults) {
                    Ok(after) => {
                        self.follows(engine, redrawn, &first, &after, &mut faults);
                        self.try_again(engine, redrawn, &after, &mut faults);
                    }
                    Err(refusal) => faults.push(refusal),
                }
            }
        }
        faults.dedup();
        if faults.is_empty() { Outcome::Passed(judgement) } else { Outcome::Failed(faults) }
    }

    /// Whether the second run's bits differ from the first's.
    fn differs(&self, first: &Outputs, second: &Outputs) -> Option<Fault> {
        let changed = changed_rows(first, second, &self.case.problem);
        let count = changed.iter().map(|(_, n)| n).sum();
        let rows: Vec<Row> = changed.into_iter().map(|(row, _)| row).collect();
        (!rows.is_empty()).then_some(Fault::NotRepeatable { count, rows })
    }

    /// Looks whether what went wrong with changed inputs goes wrong again.
    fn try_again(&self, engine: &dyn Engine, redrawn: &Redrawn, after: &Outputs, faults: &mut Vec<Fault>) {
        if faults.is_empty() || !engine.deterministic() {
            return;
        }
        if let Ok(again) = run(engine, &self.case, &redrawn.operands, Poison::Second, faults)
            && let Some(differs) = self.differs(after, &again)
        {
            for fault in &mut *faults {
                fault.is_of_a_race(&differs);
            }
            faults.push(differs);
        }
    }

    fn follows(
        &self,
        engine: &dyn Engine,
        redrawn: &Redrawn,
        before: &Outputs,
        after: &Outputs,
        faults: &mut Vec<Fault>,
    ) {
        let Redrawn { operand, truth, .. } = redrawn;
        let o = gather(&after.o, truth.rows());
        let lse = after.lse.as_ref().map(|lse| gather(lse, truth.rows()));
        let judgement = truth.judge(&o, lse.as_deref());
        if !judgement.passed() {
            let stood_still = o == gather(&before.o, truth.rows());
            faults.push(if stood_still {
                Fault::Ignored(*operand)
            } else {
                wrong(Some(*operand), &judgement, &redrawn.operands, truth, &o, lse.as_deref())
            });
        }
        if engine.deterministic() {
            let moved = changed_rows(before, after, &self.case.problem);
            let outside = moved.iter().find(|(row, _)| !truth.rows().contains(row));
            faults.extend(outside.map(|&(first, _)| Fault::Leaked { operand: *operand, first }));
        }
    }
}

/// A result that the rule refused, with what it looks like.
fn wrong(
    after: Option<Name>,
    judgement: &Judgement,
    operands: &Operands,
    truth: &Yardstick,
    o: &[f32],
    lse: Option<&[f32]>,
) -> Fault {
    let bad_rows = judgement.bad_rows.iter().map(|&i| truth.rows()[i]).collect();
    let diagnosis = diagnose(operands, truth, o, lse, &judgement.bad_rows);
    Fault::Wrong { after, judgement: Box::new(judgement.clone()), bad_rows, diagnosis }
}

/// The outputs of one run.
struct Outputs {
    o: Guarded,
    lse: Option<Guarded>,
}

/// Runs once into poisoned outputs, and adds what is wrong with the memory around the result.
fn run(
    engine: &dyn Engine,
    case: &Case,
    operands: &Operands,
    poison: Poison,
    faults: &mut Vec<Fault>,
) -> Result<Outputs, Fault> {
    let Problem { batch, heads_q, len_q, head_dim_v, dtype, lse, .. } = case.problem;
    // The engine works on a copy, so that what it does to its inputs shows and does not spread.
    let given = operands.clone();
    let mut o = Guarded::new(dtype, case.arrangement, [batch, heads_q, len_q, head_dim_v]);
    let mut lse = (lse && engine.gives_lse())
        .then(|| Guarded::new(DType::F32, case.arrangement, [batch, heads_q, len_q, 1]));
    o.poison(poison);
    if let Some(lse) = &mut lse {
        lse.poison(poison);
    }
    let inputs = [&given.q.view(), &given.k.view(), &given.v.view()];
    engine
        .run(&given.attention(), inputs, &mut o.view_mut(), lse.as_mut().map(Guarded::view_mut).as_mut())
        .map_err(|error| Fault::Refused(error.to_string()))?;
    let outputs = Outputs { o, lse };
    faults.extend(memory_faults(case, operands, &given, &outputs, poison));
    Ok(outputs)
}

/// What a run did to memory that it should not have done: left outputs unwritten, or wrote elsewhere.
fn memory_faults(
    case: &Case,
    before: &Operands,
    after: &Operands,
    outputs: &Outputs,
    poison: Poison,
) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (tensor, output) in [(Name::O, Some(&outputs.o)), (Name::Lse, outputs.lse.as_ref())] {
        let Some(output) = output else { continue };
        let unwritten = output.unwritten(poison);
        if let Some(&first) = unwritten.first() {
            let first = row_of(first / output.shape()[3], &case.problem);
            faults.push(Fault::NotWritten { tensor, count: unwritten.len(), first });
        }
        faults.extend(output.breach().map(|breach| Fault::Guard { tensor, breach }));
    }
    let inputs =
        [(Name::Q, &before.q, &after.q), (Name::K, &before.k, &after.k), (Name::V, &before.v, &after.v)];
    for (tensor, before, after) in inputs {
        if let Some(breach) = after.breach() {
            faults.push(Fault::Guard { tensor, breach });
        } else if !after.same_memory(before) {
            faults.push(Fault::InputChanged(tensor));
        }
    }
    faults
}

fn copy_heads(to: &mut Guarded, from: &Guarded, b: usize, first: usize, heads: usize) {
    let [_, _, len, width] = to.shape();
    let mut row = vec![0.0; width];
    for h in first..first + heads {
        for s in 0..len {
            from.view().read_row(b, h, s, &mut row);
            // A row that does not exist stays as unreadable as it was.
            if !row.iter().any(|x| x.is_nan()) {
                to.view_mut().write_row(b, h, s, &row);
            }
        }
    }
}

fn row_of(index: usize, problem: &Problem) -> Row {
    let Problem { heads_q, len_q, .. } = *problem;
    Row { batch: index / (heads_q * len_q), head: index / len_q % heads_q, query: index % len_q }
}

/// The given rows of an output, one after the other.
fn gather(output: &Guarded, rows: &[Row]) -> Vec<f32> {
    let width = output.shape()[3];
    let view = output.view();
    let mut all = vec![0.0; rows.len() * width];
    for (row, out) in rows.iter().zip(all.chunks_exact_mut(width)) {
        view.read_row(row.batch, row.head, row.query, out);
    }
    all
}

/// The rows whose bits differ in o or lse, with how many elements do.
fn changed_rows(before: &Outputs, after: &Outputs, problem: &Problem) -> Vec<(Row, usize)> {
    let differing = |before: &Guarded, after: &Guarded| -> Vec<usize> {
        let width = before.shape()[3];
        let (before, after) = (before.bits(), after.bits());
        let rows = before.chunks_exact(width).zip(after.chunks_exact(width));
        rows.map(|(a, b)| a.iter().zip(b).filter(|(a, b)| a != b).count()).collect()
    };
    let mut counts = differing(&before.o, &after.o);
    if let (Some(before), Some(after)) = (&before.lse, &after.lse) {
        counts.iter_mut().zip(differing(before, after)).for_each(|(count, more)| *count += more);
    }
    counts
        .into_iter()
        .enumerate()
        .filter(|&(_, count)| count > 0)
        .map(|(i, count)| (row_of(i, problem), count))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case() -> Case {
        let text = "[[case]]\nname = 'x'\ntier = 'quick'\nlen = 5\nhead_dim = 4\narrangement = 'padded'\ndtype = 'f16'";
        crate::cases::parse("test", text).unwrap().remove(0)
    }

    /// What is found when a run does something to the memory that it was given.
    fn found(what: impl Fn(&mut Operands, &mut Outputs)) -> Vec<Fault> {
        let case = case();
        let before = case.operands();
        let (mut after, shape) = (before.clone(), [1, 2, 5, 4]);
        let zeros = |dtype, shape: [usize; 4]| {
            Guarded::with_values(dtype, case.arrangement, shape, &vec![0.0; shape.iter().product()])
        };
        let mut outputs = Outputs { o: zeros(DType::F16, shape), lse: Some(zeros(DType::F32, [1, 2, 5, 1])) };
        what(&mut after, &mut outputs);
        memory_faults(&case, &before, &after, &outputs, Poison::First)
    }

    #[test]
    fn clean_memory_has_no_faults() {
        assert_eq!(found(|_, _| {}), []);
    }

    #[test]
    fn a_write_outside_any_tensor_is_found() {
        type Choose = fn(&mut Operands, &mut Outputs) -> Option<Name>;
        let tensors: [Choose; 5] = [
            |inputs, _| (inputs.q.tamper(-1), Some(Name::Q)).1,
            |inputs, _| (inputs.k.tamper(4), Some(Name::K)).1,
            |inputs, _| (inputs.v.tamper(4000), Some(Name::V)).1,
            |_, outputs| (outputs.o.tamper(5), Some(Name::O)).1,
            |_, outputs| outputs.lse.as_mut().map(|lse| (lse.tamper(1), Name::Lse).1),
        ];
        for tamper in tensors {
            let name = std::cell::Cell::new(None);
            let faults = found(|inputs, outputs| name.set(tamper(inputs, outputs)));
            let expected = name.get().unwrap();
            assert!(matches!(faults[..], [Fault::Guard { tensor, .. }] if tensor == expected), "{faults:?}");
        }
    }

    #[test]
    fn a_changed_input_is_found() {
        assert_eq!(found(|inputs, _| inputs.k.tamper(2)), [Fault::InputChanged(Name::K)]);
    }

    #[test]
    fn an_output_that_stays_poisoned_is_found() {
        let faults = found(|_, outputs| {
            outputs.o.poison(Poison::First);
            outputs.o.view_mut().write_row(0, 0, 0, &[0.0; 4]);
        });
        let first = Row { batch: 0, head: 0, query: 1 };
        assert_eq!(faults, [Fault::NotWritten { tensor: Name::O, count: 36, first }]);
    }
}
