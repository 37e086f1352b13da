//! One engine over many cases, as a line of a table: what passed, what failed, and what was skipped for which reason.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::check::Outcome;

/// One engine over all cases.
#[derive(Clone, Debug, Serialize)]
pub struct Tally {
    /// Its name.
    pub engine: String,
    /// Cases in which everything holds.
    pub passed: usize,
    /// Cases that it does not compute.
    pub skipped: usize,
    /// Cases in which something is wrong.
    pub failed: usize,
    /// The reasons for skipping, without their numbers, and how many cases each has.
    pub skipped_why: BTreeMap<String, usize>,
    /// The largest share of what is allowed that any case used.
    pub worst_share: Option<f64>,
    /// The case that used it.
    pub worst_case: Option<String>,
}

impl Tally {
    /// Nothing yet.
    pub fn new(engine: &str) -> Self {
        Self {
            engine: engine.to_string(),
            passed: 0,
            skipped: 0,
            failed: 0,
            skipped_why: BTreeMap::new(),
            worst_share: None,
            worst_case: None,
        }
    }

    /// Counts a case.
    pub fn count(&mut self, case: &str, outcome: &Outcome) {
        match outcome {
            Outcome::Passed(judgement) => {
                self.passed += 1;
                let share = judgement.share_used();
                if self.worst_share.is_none_or(|worst| share > worst) {
                    (self.worst_share, self.worst_case) = (Some(share), Some(case.to_string()));
                }
            }
            Outcome::Skipped(why) => {
                self.skipped += 1;
                *self.skipped_why.entry(kind(why)).or_default() += 1;
            }
            Outcome::Failed(_) => self.failed += 1,
        }
    }

    /// Why cases were skipped, the most frequent reason first; empty where none was.
    pub fn reasons(&self) -> String {
        let mut reasons: Vec<(&String, &usize)> = self.skipped_why.iter().collect();
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let words: Vec<String> = reasons.iter().map(|(why, count)| format!("{count} × {why}")).collect();
        words.join("; ")
    }
}

/// A reason without what differs from case to case: its numbers, and what follows in parentheses or after a colon.
fn kind(why: &str) -> String {
    let short = why.split([':', '(']).next().unwrap_or(why).trim();
    let word = |word: &str| if word.parse::<u128>().is_ok() { "N".to_string() } else { word.to_string() };
    short.split_whitespace().map(word).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_that_differ_in_numbers_are_counted_together() {
        let mut tally = Tally::new("x");
        let skip = |why: &str| Outcome::Skipped(why.into());
        tally.count(
            "a",
            &skip("H200 does not do head_dim 3 with head_dim_v 3 (head_dim 3: …): possible is 8"),
        );
        tally.count("b", &skip("H200 does not do f32: possible is f16"));
        tally.count("c", &skip("H200 does not do head_dim 500 with head_dim_v 500: possible is 8"));
        tally.count("d", &Outcome::Failed(Vec::new()));
        assert_eq!((tally.passed, tally.skipped, tally.failed), (0, 3, 1));
        assert_eq!(
            tally.reasons(),
            "2 × H200 does not do head_dim N with head_dim_v N; 1 × H200 does not do f32"
        );
    }
}
