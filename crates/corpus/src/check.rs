//! One case through one engine: everything that must hold of its result.
//!
//! - Outputs are poisoned before each run, and every element must be written.
//! - Guard zones around and inside every tensor must stay as they were, and so must the inputs.
//! - The result obeys the [tolerance rule](flashcore_judge::rule): in all rows, or in a large problem in rows that are
//!   chosen once the result exists, while every element of the other rows must be in the range of an average of the
//!   values.
//! - A second run, over another poison, gives the same bits (unless the engine says that it does not).
//! - One row of an input is redrawn at a time (in a backward pass of two of the inputs, and o and lse follow): rows that see it must change as the oracle's do, and rows that
//!   do not see it must not change at all. Which rows are redrawn depends on the engine's own result, so no engine can
//!   know in advance.
//! - A NaN or infinite element reaches what depends on it, and nothing else.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use flashcore::signature::{Parameter, PerTensor, Role, Signature};
use flashcore::{Name, Pass, Problem};
use serde::Serialize;

use crate::cases::Case;
use crate::engine::Engine;
use flashcore_judge::diagnose::{Diagnosis, Kind, diagnose};
use flashcore_judge::guarded::{Breach, Guarded, Poison};
use flashcore_judge::operands::{Operands, Spot};
use flashcore_judge::rng::Rng;
use flashcore_judge::rule::{Judgement, Measure, Row, Verdict, Yardstick};

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
    /// A cache does not hold what was appended, or something else of it was changed.
    Miswritten {
        /// Which cache.
        tensor: Name,
        /// How many of its rows are wrong.
        count: usize,
        /// The first of them.
        first: Row,
    },
    /// The result is further from the oracle than the rule allows.
    Wrong {
        /// What was redrawn before the run; none in the first.
        after: Option<Name>,
        /// The rule's judgement.
        judgement: Box<Judgement>,
        /// The rows that break their bounds.
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
    /// Elements outside the judged rows that cannot be an average of the values.
    Outlandish {
        /// How many elements.
        count: usize,
        /// The first of them.
        first: Row,
    },
    /// An output did not change although an input did, and the oracle's output with it.
    Ignored(Name),
    /// Rows changed that do not see what was redrawn.
    Leaked {
        /// What was redrawn.
        operand: Name,
        /// The first row that changed.
        first: Row,
    },
}

impl Fault {
    /// A wrong result that is not reproducible is a race, whatever else it looks like.
    fn is_of_a_race(&mut self, differs: &Fault) {
        if let (Fault::Wrong { diagnosis, .. }, Fault::NotRepeatable { count, rows }) = (self, differs) {
            let why = format!("the next run gives other bits in {count} elements of {} rows", rows.len());
            *diagnosis = Diagnosis { kind: Kind::Race, why };
        }
    }
}

/// What a result must satisfy, in a sentence.
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

/// Rows that are judged after a redraw, where there are as many.
const FOLLOWERS: u64 = 12;
/// Multiply-adds that judging more of them may take.
const FOLLOWERS_WORK: u64 = 200_000;

/// How many rows are tried for a redraw whose effect is visible.
const REDRAWS: usize = 3;

/// Operands with one row redrawn, and the truth about some of the rows that depend on it.
struct Redrawn {
    spot: Spot,
    operands: Operands,
    truth: Yardstick,
    /// Whether the truth changed so much that a result must change too.
    shows: bool,
}

/// A case with its inputs and the truth about them, shared by all engines.
pub struct Prepared {
    /// The case.
    pub case: Case,
    operands: Operands,
    yardstick: OnceLock<Yardstick>,
}

impl Prepared {
    /// Draws the inputs. The oracle runs when the first result is there.
    pub fn new(case: Case) -> Self {
        let operands = case.operands();
        Self { case, operands, yardstick: OnceLock::new() }
    }

    /// The inputs.
    pub fn operands(&self) -> &Operands {
        &self.operands
    }

    /// The truth about all rows.
    pub fn yardstick(&self) -> &Yardstick {
        self.yardstick.get_or_init(|| self.operands.yardstick())
    }

    /// The truth about the rows that are judged.
    fn truth(&self, rng: &mut Rng) -> Cow<'_, Yardstick> {
        match self.case.rows {
            None => Cow::Borrowed(self.yardstick()),
            Some(most) => {
                let rows = self.operands.sample_rows(most, rng.next_u64());
                Cow::Owned(self.operands.yardstick_of_rows(&rows))
            }
        }
    }

    /// Whether the truth about some rows differs, in any output but lse, so much from that before anything was redrawn that
    /// rounding cannot hide it.
    fn shows(&self, after: &Yardstick) -> bool {
        let signature = self.operands.problem.signature();
        signature.outputs().filter(|of| of.name != Name::Lse).any(|of| {
            let after = after.of(of.name);
            if self.case.rows.is_some() {
                return moved(self.operands.yardstick_of_rows(after.rows()).of(of.name).truth(), after);
            }
            let all = self.yardstick().of(of.name);
            let index = |row: &Row| all.rows().binary_search(row).expect("every row was judged");
            let before = after.rows().iter().flat_map(|row| &all.truth()[all.elements(index(row))]);
            moved(&before.copied().collect::<Vec<_>>(), after)
        })
    }

    /// The truth about some of the rows that depend on a redrawn one, or all of its kv head's gradients.
    fn truth_after(&self, operands: &Operands, reader: Row, spot: &Spot, rng: &mut Rng) -> Yardstick {
        match self.case.problem.pass {
            Pass::Forward => operands.yardstick_of_rows(&self.followers(reader, spot, rng)),
            Pass::Backward => {
                operands.yardstick_of_group(reader.batch, reader.head / self.case.problem.group())
            }
        }
    }

    /// The inputs of which a row is redrawn: all, or in a backward pass, whose truth takes long, any two. What a forward pass
    /// gave follows from the others.
    fn redrawable(&self, rng: &mut Rng) -> Vec<Name> {
        let signature = self.operands.problem.signature();
        let names = signature.inputs().map(|of| of.name);
        let names = names.filter(|name| !matches!(name, Name::O | Name::Lse));
        let (mut names, descales): (Vec<Name>, Vec<Name>) =
            names.partition(|name| !Name::DESCALES.contains(name));
        // One of the descales stands for all.
        names.extend((!descales.is_empty()).then(|| rng.pick(&descales)));
        while self.case.problem.pass == Pass::Backward && names.len() > 2 {
            names.remove(rng.below(names.len()));
        }
        names
    }

    /// One row of an input redrawn, chosen such that some query attends to it. None where no query attends to
    /// anything.
    fn redraw(&self, operand: Name, rng: &mut Rng) -> Option<Redrawn> {
        let mut operands = self.operands.clone();
        for tries in 1.. {
            let (reader, keys) = self.operands.reader(rng, 1)?;
            let kv_head = reader.head / self.case.problem.group();
            let (head, row) = match operand {
                Name::K | Name::V => (kv_head, self.operands.attended(&reader, keys, rng)),
                Name::QDescale => (kv_head, 0),
                Name::KDescale | Name::VDescale => {
                    (kv_head, self.case.problem.descale_block(self.operands.attended(&reader, keys, rng)))
                }
                _ => (reader.head, reader.position),
            };
            let spot = Spot { operand, batch: reader.batch, head, row, column: 0 };
            operands.write_row(&spot, &self.operands.redrawn(&spot, rng));
            let truth = self.truth_after(&operands, reader, &spot, rng);
            let shows = self.shows(&truth);
            if shows || tries == REDRAWS {
                return Some(Redrawn { spot, operands, truth, shows });
            }
            operands.write_row(&spot, &self.operands.row(operand, spot.batch, head, row));
        }
        None
    }

    /// The rows that are judged after a redraw: one that attends to it, the first and the last that see it, and others.
    fn followers(&self, reader: Row, spot: &Spot, rng: &mut Rng) -> Vec<Row> {
        let Problem { len_q, .. } = self.case.problem;
        let group = self.case.problem.group();
        let heads = if spot.operand == Name::Q {
            spot.head..spot.head + 1
        } else {
            spot.head * group..(spot.head + 1) * group
        };
        let first = heads.start;
        let row = |head, query| Row::query(spot.batch, head, query);
        let see: Vec<usize> =
            (0..len_q).filter(|&query| self.operands.depends(&row(first, query), spot)).collect();
        let mut rows = vec![reader];
        let ends = [see.first(), see.last()].into_iter().flatten();
        rows.extend(ends.map(|&position| Row { position, ..reader }));
        let Problem { len_k, head_dim, head_dim_v, .. } = self.case.problem;
        let most = FOLLOWERS.max(FOLLOWERS_WORK / (len_k * (head_dim + head_dim_v)).max(1) as u64) as usize;
        if most >= see.len() * heads.len() {
            return heads.flat_map(|head| see.iter().map(move |&query| row(head, query))).collect();
        }
        while rows.len() < most {
            rows.push(row(first + rng.below(heads.len()), rng.pick(&see)));
        }
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    /// Runs the case through an engine and checks everything.
    pub fn check(&self, engine: &dyn Engine) -> Outcome {
        if let Err(why) = engine.supports(&self.case.problem) {
            return Outcome::Skipped(why);
        }
        if !self.case.problem.is_dense() && !engine.takes_sequences() {
            return Outcome::Skipped(format!("{} takes dense tensors alone", engine.name()));
        }
        if self.case.problem.append.is_some() && !engine.appends() {
            return Outcome::Skipped(format!("{} does not append", engine.name()));
        }
        if self.case.problem.pass == Pass::Backward && !engine.differentiates() {
            return Outcome::Skipped(format!("{} computes no gradients", engine.name()));
        }
        let mut faults = Vec::new();
        let first = match run(engine, &self.case, &self.operands, Poison::First, &mut faults) {
            Ok(first) => first,
            Err(refusal) => return Outcome::Failed(vec![refusal]),
        };
        // The rows to check are drawn from the result itself: the same for the same engine, and unknown in advance.
        let mut rng = Rng::stream(self.case.seed, first.fingerprint());
        let truth = self.truth(&mut rng);
        let mut given = first.gather(&truth);
        if self.case.wild.is_some() && !engine.hides_values() {
            self.forgive_values(truth.of(Name::O), &mut given[0].1);
        }
        let judgement = truth.judge(&given);
        if !judgement.passed() {
            faults.push(wrong(None, &judgement, &self.operands, &truth, &given));
        }
        if self.case.rows.is_some() {
            let beyond = self.operands.beyond_values(first.o());
            faults.extend(beyond.map(|(count, first)| Fault::Outlandish { count, first }));
        }
        // What a wrong engine does with changed inputs says nothing more. Nor does a row that changes where an element
        // is NaN or infinite.
        if faults.is_empty() && self.case.wild.is_none() {
            for operand in self.redrawable(&mut rng) {
                let Some(redrawn) = self.redraw(operand, &mut rng) else { break };
                match run(engine, &self.case, &redrawn.operands, Poison::First, &mut faults) {
                    Ok(after) => {
                        self.follows(engine, &redrawn, &first, &after, &mut faults);
                        self.try_again(engine, &redrawn, &after, &mut faults);
                    }
                    Err(refusal) => faults.push(refusal),
                }
            }
        }
        // Last, so that anything the runs in between left behind shows.
        match run(engine, &self.case, &self.operands, Poison::Second, &mut faults) {
            Ok(second) if engine.deterministic() => {
                if let Some(differs) = Self::differs(&first, &second) {
                    for fault in &mut faults {
                        fault.is_of_a_race(&differs);
                    }
                    faults.push(differs);
                }
            }
            Ok(_) => {}
            Err(refusal) => faults.push(refusal),
        }
        // In an engine whose runs differ, a row that changes by itself was not changed by a redraw.
        if faults.iter().any(|fault| matches!(fault, Fault::NotRepeatable { .. })) {
            faults.retain(|fault| !matches!(fault, Fault::Leaked { .. }));
        }
        faults.dedup();
        if faults.is_empty() { Outcome::Passed(judgement) } else { Outcome::Failed(faults) }
    }

    /// Accepts the NaN that a probability of 0 times a NaN or infinite value gives, in the value's own column.
    fn forgive_values(&self, truth: &Measure, o: &mut [f32]) {
        let Some(spot) = self.operands.wild.filter(|spot| spot.operand == Name::V) else { return };
        let group = self.case.problem.group();
        for (i, row) in truth.rows().iter().enumerate() {
            let at = truth.elements(i).start + spot.column;
            let same_values = row.batch == spot.batch && row.head / group == spot.head;
            if same_values && !self.operands.depends(row, &spot) && !o[at].is_finite() {
                o[at] = truth.truth()[at] as f32;
            }
        }
    }

    /// Whether the second run's bits differ from the first's.
    fn differs(first: &Outputs, second: &Outputs) -> Option<Fault> {
        let changed = changed_rows(first, second);
        let count = changed.iter().map(|(_, n)| n).sum();
        let rows: Vec<Row> = changed.into_iter().map(|(row, _)| row).collect();
        (!rows.is_empty()).then_some(Fault::NotRepeatable { count, rows })
    }

    /// Checks whether a failure with changed inputs happens again.
    fn try_again(&self, engine: &dyn Engine, redrawn: &Redrawn, after: &Outputs, faults: &mut Vec<Fault>) {
        if faults.is_empty() || !engine.deterministic() {
            return;
        }
        if let Ok(again) = run(engine, &self.case, &redrawn.operands, Poison::Second, faults)
            && let Some(differs) = Self::differs(after, &again)
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
        let Redrawn { spot, truth, shows, .. } = redrawn;
        let given = after.gather(truth);
        let judgement = truth.judge(&given);
        let results = |of: &&(Name, Vec<f32>)| of.0 != Name::Lse;
        let stood_still = given.iter().filter(results).eq(before.gather(truth).iter().filter(results));
        if stood_still && (*shows || !judgement.passed()) {
            faults.push(Fault::Ignored(spot.operand));
        } else if !judgement.passed() {
            faults.push(wrong(Some(spot.operand), &judgement, &redrawn.operands, truth, &given));
        }
        if engine.deterministic() {
            let moved = changed_rows(before, after);
            let outside = moved.iter().find(|(row, _)| !self.operands.depends(row, spot));
            faults.extend(outside.map(|&(first, _)| Fault::Leaked { operand: spot.operand, first }));
        }
    }
}

/// Whether the truth about some rows of an output changed so much that rounding cannot hide it.
fn moved(before: &[f64], after: &Measure) -> bool {
    (0..after.rows().len()).any(|i| {
        let far = |at: usize| (before[at] - after.truth()[at]).abs() > after.row_floor(i);
        after.elements(i).any(far)
    })
}

/// A result that the rule refused, with what it looks like.
fn wrong(
    after: Option<Name>,
    judgement: &Judgement,
    operands: &Operands,
    truth: &Yardstick,
    given: &[(Name, Vec<f32>)],
) -> Fault {
    let rows = |of: &Verdict| of.bad_rows.iter().map(|&i| truth.of(of.output).rows()[i]).collect::<Vec<_>>();
    let bad_rows: BTreeSet<Row> = judgement.outputs.iter().flat_map(rows).collect();
    let bad_rows = bad_rows.into_iter().collect();
    let diagnosis = diagnose(operands, truth, given, judgement);
    Fault::Wrong { after, judgement: Box::new(judgement.clone()), bad_rows, diagnosis }
}

/// The outputs of one run, as the problem's signature lists them.
struct Outputs {
    signature: Signature,
    tensors: PerTensor<Guarded>,
}

impl Outputs {
    fn o(&self) -> &Guarded {
        &self.tensors[Name::O]
    }

    /// The same as a dense problem has them.
    fn taken_from(self, operands: &Operands) -> Self {
        let Some(placing) = operands.placing() else { return self };
        let signature = operands.problem.signature();
        let mut tensors = PerTensor::default();
        for ((of, placed), dense) in self.each().zip(signature.outputs()) {
            tensors.set(of.name, placing.take(of, dense, placed));
        }
        Self { signature, tensors }
    }

    /// The rows of each output that are measured, in the order of the signature.
    fn gather(&self, truth: &Yardstick) -> Vec<(Name, Vec<f32>)> {
        self.each().map(|(of, output)| (of.name, output.gather(truth.of(of.name).rows()))).collect()
    }

    /// Each output that was asked for, with what it is.
    fn each(&self) -> impl Iterator<Item = (&Parameter, &Guarded)> {
        self.signature.outputs().filter_map(|of| Some((of, self.tensors.get(of.name)?)))
    }

    /// A number that depends on every bit of the result.
    fn fingerprint(&self) -> u64 {
        (0..).zip(self.each()).fold(0, |all, (i, (_, output))| all ^ output.fingerprint().rotate_left(i))
    }
}

/// Runs once into poisoned outputs, and adds what is wrong with the memory around the result.
fn run(
    engine: &dyn Engine,
    case: &Case,
    operands: &Operands,
    poison: Poison,
    faults: &mut Vec<Fault>,
) -> Result<Outputs, Fault> {
    // The engine works on a copy, so that what it does to its inputs shows and does not spread.
    let placed = operands.placed();
    let mut given = placed.clone().into_owned();
    let signature = given.problem.signature();
    let mut tensors = PerTensor::default();
    for output in signature.outputs().filter(|output| output.name != Name::Lse || engine.gives_lse()) {
        let mut memory = Guarded::new(output.dtype, case.arrangement, output.shape);
        memory.poison(poison);
        tensors.set(output.name, memory);
    }
    let mut caches = [given.k.clone(), given.v.clone()];
    let attention = given.attention();
    let ran = match case.problem.pass {
        Pass::Forward => {
            let inputs = [&given.q.view(), &given.k.view(), &given.v.view()];
            let views = tensors.get_each_mut([Name::O, Name::Lse]);
            let [Some(mut o), mut lse] = views.map(|output| output.map(Guarded::view_mut)) else {
                unreachable!("every forward pass has the output o")
            };
            let [k, v] = caches.each_mut().map(Guarded::view_mut);
            let appended = given.appended(|new| {
                let caches = [&mut { k }, &mut { v }];
                engine.append(&attention, new, inputs[0], caches, (&mut o, lse.as_mut()))
            });
            match appended {
                Some(appended) => appended,
                None => engine.run(&attention, inputs, &mut o, lse.as_mut()),
            }
        }
        Pass::Backward => {
            let views = tensors.get_each_mut([Name::Dq, Name::Dk, Name::Dv]);
            let [Some(mut dq), Some(mut dk), Some(mut dv)] =
                views.map(|output| output.map(Guarded::view_mut))
            else {
                unreachable!("every backward pass has these")
            };
            engine.differentiate(&attention, &given.given(), [&mut dq, &mut dk, &mut dv])
        }
    };
    ran.map_err(|error| Fault::Refused(error.to_string()))?;
    let outputs = Outputs { signature, tensors };
    if given.problem.append.is_some() {
        [given.k, given.v] = caches;
    }
    faults.extend(memory_faults(&operands.expected(&placed), &given, &outputs, poison));
    Ok(outputs.taken_from(operands))
}

/// What a run did to memory that it should not have done, given its inputs as they are to be afterwards: left outputs unwritten,
/// or wrote elsewhere.
fn memory_faults(before: &Operands, after: &Operands, outputs: &Outputs, poison: Poison) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (of, output) in outputs.each() {
        let (tensor, unwritten) = (of.name, output.unwritten(poison));
        if let Some(&first) = unwritten.first() {
            let first = Row::of(of, first / of.shape[3]);
            faults.push(Fault::NotWritten { tensor, count: unwritten.len(), first });
        }
        faults.extend(output.breach().map(|breach| Fault::Guard { tensor, breach }));
    }
    for input in outputs.signature.inputs() {
        let tensor = input.name;
        let (before, after) = (before.operand(tensor), after.operand(tensor));
        if let Some(breach) = after.breach() {
            faults.push(Fault::Guard { tensor, breach });
        } else if !after.same_memory(before) && input.role == Role::Changed {
            let wrong = after.differences(before);
            let first = wrong.iter().position(|&count| count > 0).unwrap_or(0);
            let count = wrong.iter().filter(|&&count| count > 0).count();
            faults.push(Fault::Miswritten { tensor, count, first: Row::of(input, first) });
        } else if !after.same_memory(before) {
            faults.push(Fault::InputChanged(tensor));
        }
    }
    faults
}

/// The rows whose bits differ in any output, with how many elements do.
fn changed_rows(before: &Outputs, after: &Outputs) -> Vec<(Row, usize)> {
    let mut counts: BTreeMap<Row, usize> = BTreeMap::new();
    for ((of, before), (_, after)) in before.each().zip(after.each()) {
        for (i, count) in before.differences(after).into_iter().enumerate().filter(|&(_, count)| count > 0) {
            *counts.entry(Row::of(of, i)).or_default() += count;
        }
    }
    counts.into_iter().collect()
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
        let mut after = before.clone();
        let signature = case.problem.with_lse().signature();
        let mut tensors = PerTensor::default();
        for output in signature.outputs() {
            let zeros = vec![0.0; output.shape.iter().product()];
            let memory = Guarded::with_values(output.dtype, case.arrangement, output.shape, &zeros);
            tensors.set(output.name, memory);
        }
        let mut outputs = Outputs { signature, tensors };
        what(&mut after, &mut outputs);
        memory_faults(&before, &after, &outputs, Poison::First)
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
            |_, outputs| outputs.tensors.get_mut(Name::O).map(|o| (o.tamper(5), Name::O).1),
            |_, outputs| outputs.tensors.get_mut(Name::Lse).map(|lse| (lse.tamper(1), Name::Lse).1),
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
            let o = outputs.tensors.get_mut(Name::O).unwrap();
            o.poison(Poison::First);
            o.view_mut().write_row(0, 0, 0, &[0.0; 4]);
        });
        let first = Row::query(0, 0, 1);
        assert_eq!(faults, [Fault::NotWritten { tensor: Name::O, count: 36, first }]);
    }
}
