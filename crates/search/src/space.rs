//! The space of a search: schedules as texts `kernel:knob=value,…`, and the values that each knob takes.
//!
//! A proposer need not know what a knob means. It changes values and joins texts; the static gate decides which texts
//! are schedules.

use std::collections::BTreeMap;

use flashcore_judge::rng::Rng;

/// The schedules that a search draws from.
#[derive(Clone, Debug, PartialEq)]
pub struct Space {
    /// Every schedule, in the order of its making.
    members: Vec<String>,
    /// The values of each knob, in the order of their first appearance.
    values: BTreeMap<String, Vec<String>>,
}

/// A schedule's text, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parts<'t> {
    /// The kernel with its colon; empty for the CPU engine.
    head: &'t str,
    knobs: Vec<(&'t str, &'t str)>,
}

impl<'t> Parts<'t> {
    fn of(text: &'t str) -> Self {
        let at = text.find(':').map_or(0, |colon| colon + 1);
        let (head, knobs) = text.split_at(at);
        Self { head, knobs: knobs.split(',').filter_map(|pair| pair.split_once('=')).collect() }
    }

    fn text(&self) -> String {
        let knobs: Vec<String> = self.knobs.iter().map(|(knob, value)| format!("{knob}={value}")).collect();
        format!("{}{}", self.head, knobs.join(","))
    }
}

impl Space {
    /// The space of these schedules. What mutations make of them may lie outside of the list.
    pub fn of(members: Vec<String>) -> Self {
        let mut values: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for member in &members {
            for (knob, value) in Parts::of(member).knobs {
                let values = values.entry(knob.into()).or_default();
                if !values.iter().any(|known| known == value) {
                    values.push(value.into());
                }
            }
        }
        Self { members, values }
    }

    /// Every schedule.
    pub fn members(&self) -> &[String] {
        &self.members
    }

    /// The values of each knob.
    pub fn values(&self) -> &BTreeMap<String, Vec<String>> {
        &self.values
    }

    /// A schedule with one or two knobs changed, each to another of its values.
    pub fn mutate(&self, parent: &str, rng: &mut Rng) -> String {
        let mut parts = Parts::of(parent);
        let changes = 1 + usize::from(rng.chance(0.3));
        for _ in 0..changes {
            if parts.knobs.is_empty() {
                break;
            }
            let at = rng.below(parts.knobs.len());
            let (knob, value) = parts.knobs[at];
            let others: Vec<&str> = self.values.get(knob).map_or_else(Vec::new, |values| {
                values.iter().map(String::as_str).filter(|&other| other != value).collect()
            });
            if !others.is_empty() {
                parts.knobs[at].1 = rng.pick(&others);
            }
        }
        parts.text()
    }

    /// A schedule that has each knob from one of two.
    pub fn cross(mother: &str, father: &str, rng: &mut Rng) -> String {
        let (mut child, father) = (Parts::of(mother), Parts::of(father));
        for (knob, value) in &mut child.knobs {
            let other = father.knobs.iter().find(|(name, _)| name == knob);
            if let Some(&(_, theirs)) = other.filter(|_| rng.chance(0.5)) {
                *value = theirs;
            }
        }
        child.text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> Space {
        let texts = ["k:a=1,b=x", "k:a=2,b=x", "k:a=3,b=y"];
        Space::of(texts.map(String::from).to_vec())
    }

    #[test]
    fn a_knob_takes_the_values_that_it_has_among_the_members() {
        assert_eq!(space().values()["a"], ["1", "2", "3"]);
        assert_eq!(space().values()["b"], ["x", "y"]);
    }

    #[test]
    fn a_mutation_differs_from_its_parent_in_knobs_that_stay_within_their_values() {
        let space = space();
        let mut rng = Rng::new(5);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..200 {
            let child = space.mutate("k:a=1,b=x", &mut rng);
            let parts = Parts::of(&child);
            assert_eq!(parts.head, "k:");
            for (knob, value) in parts.knobs {
                assert!(space.values()[knob].iter().any(|known| known == value), "{child}");
            }
            seen.insert(child);
        }
        // Every schedule of the product but the parent can be reached; the parent only by changing a knob back.
        assert!(seen.len() >= 5, "{seen:?}");
    }

    #[test]
    fn a_crossing_has_every_knob_from_one_of_its_parents() {
        let mut rng = Rng::new(1);
        let children: std::collections::BTreeSet<String> =
            (0..50).map(|_| Space::cross("k:a=1,b=x", "k:a=3,b=y", &mut rng)).collect();
        let all = ["k:a=1,b=x", "k:a=1,b=y", "k:a=3,b=x", "k:a=3,b=y"];
        assert_eq!(children.into_iter().collect::<Vec<_>>(), all);
    }
}
