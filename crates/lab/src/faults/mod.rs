//! The fault suite: faults that the workbench must refuse, planted in the very code paths that users rely on, and honest
//! work that it must accept.
//!
//! A harness that passes everything is as good as none, and one that refuses honest work is soon switched off. So
//! `flashcore verify --faults` plants, one after another, what has fooled harnesses before: results that are wrong in a
//! known way ([`results`]), only where few look ([`hidden`]) or because sequences were not found ([`misplaced`]) or caches miswritten ([`miswritten`]), impossible clocks and numbers ([`numbers`]), candidates
//! of a search that misbehave ([`candidates`]); and beside each kind, something honest.

pub mod candidates;
pub mod hidden;
pub mod misplaced;
pub mod miswritten;
pub mod numbers;
pub mod planted;
pub mod results;

use serde::Serialize;

/// What the workbench made of something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It was refused; why.
    Refused(String),
    /// It was accepted; as what.
    Accepted(String),
    /// It could not be run, which is never right; why.
    NotRun(String),
}

/// What should become of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Nature {
    /// A fault: it must be refused.
    Fault,
    /// Honest work: it must be accepted.
    Honest,
}

/// One thing that the workbench is tried on.
pub struct Trial {
    /// What it is.
    pub name: String,
    /// Whether it is a fault.
    pub nature: Nature,
    /// What judges it.
    pub judge: &'static str,
    run: Box<dyn Fn() -> Verdict + Send + Sync>,
}

impl Trial {
    fn fault(
        name: impl Into<String>,
        judge: &'static str,
        run: impl Fn() -> Verdict + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), nature: Nature::Fault, judge, run: Box::new(run) }
    }

    fn honest(
        name: impl Into<String>,
        judge: &'static str,
        run: impl Fn() -> Verdict + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), nature: Nature::Honest, judge, run: Box::new(run) }
    }

    /// Puts it to the workbench.
    pub fn run(&self) -> Finding {
        let verdict = (self.run)();
        let as_it_should = match (self.nature, &verdict) {
            (Nature::Fault, Verdict::Refused(_)) | (Nature::Honest, Verdict::Accepted(_)) => true,
            (Nature::Fault, Verdict::Accepted(_))
            | (Nature::Honest, Verdict::Refused(_))
            | (_, Verdict::NotRun(_)) => false,
        };
        let (Verdict::Refused(said) | Verdict::Accepted(said) | Verdict::NotRun(said)) = verdict;
        Finding { name: self.name.clone(), nature: self.nature, judge: self.judge, as_it_should, said }
    }
}

/// What became of a trial.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was put to the workbench.
    pub name: String,
    /// Whether it is a fault.
    pub nature: Nature,
    /// What judged it.
    pub judge: &'static str,
    /// Whether a fault was refused, or honest work accepted.
    pub as_it_should: bool,
    /// What was said of it.
    pub said: String,
}

/// Every trial, faults first.
pub fn all() -> Vec<Trial> {
    let mut trials: Vec<Trial> = [
        results::trials(),
        hidden::trials(),
        misplaced::trials(),
        miswritten::trials(),
        numbers::trials(),
        candidates::trials(),
    ]
    .into_iter()
    .flatten()
    .collect();
    trials.sort_by_key(|trial| trial.nature == Nature::Honest);
    trials
}

/// How many trials of one nature went as they should, and how many there are.
pub fn count(findings: &[Finding], nature: Nature) -> (usize, usize) {
    let of = || findings.iter().filter(|finding| finding.nature == nature);
    (of().filter(|finding| finding.as_it_should).count(), of().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_that_is_accepted_and_honest_work_that_is_refused_both_count_against_the_suite() {
        let accept = || Verdict::Accepted("fine".into());
        let refuse = || Verdict::Refused("no".into());
        let trials = [
            Trial::fault("caught", "x", refuse),
            Trial::fault("missed", "x", accept),
            Trial::honest("accepted", "x", accept),
            Trial::honest("accused", "x", refuse),
        ];
        let findings: Vec<Finding> = trials.iter().map(Trial::run).collect();
        assert_eq!(findings.iter().map(|it| it.as_it_should).collect::<Vec<_>>(), [true, false, true, false]);
        assert_eq!(count(&findings, Nature::Fault), (1, 2));
        assert_eq!(count(&findings, Nature::Honest), (1, 2));
    }
}
