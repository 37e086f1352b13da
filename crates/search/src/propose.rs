//! Proposers: who names the next candidates. Whatever they say, the gates decide.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use serde::Serialize;

use super::space::Space;
use flashcore_host::process::Worker;
use flashcore_judge::rng::Rng;

/// What proposers may know about the search.
pub struct SoFar<'a> {
    /// The space.
    pub space: &'a Space,
    /// Every candidate that was named before.
    pub named: &'a BTreeSet<String>,
    /// The best candidates that were timed, with their scores, best first: how many times faster than the incumbent.
    pub elites: &'a [(String, f64)],
    /// The schedule to beat in each case.
    pub incumbents: &'a [String],
    /// The cases.
    pub cases: &'a [String],
}

impl SoFar<'_> {
    /// Whether nobody has named a candidate yet.
    fn is_new(&self, candidate: &str) -> bool {
        !self.named.contains(candidate)
    }
}

/// Something that proposes candidates.
pub trait Proposer {
    /// The name in the journal.
    fn name(&self) -> &'static str;

    /// Up to `want` candidates that nobody has named yet; none when there is nothing left to say.
    fn propose(&mut self, want: usize, so_far: &SoFar<'_>) -> Result<Vec<String>, String>;
}

/// All schedules, in the order of the space.
#[derive(Default)]
pub struct Exhaustive {
    next: usize,
}

impl Proposer for Exhaustive {
    fn name(&self) -> &'static str {
        "exhaustive"
    }

    fn propose(&mut self, want: usize, so_far: &SoFar<'_>) -> Result<Vec<String>, String> {
        let mut found = Vec::new();
        while let Some(member) = so_far.space.members().get(self.next).filter(|_| found.len() < want) {
            self.next += 1;
            if so_far.is_new(member) {
                found.push(member.clone());
            }
        }
        Ok(found)
    }
}

/// Anything of the space, each member once.
pub struct Random {
    rng: Rng,
    /// The members in the order in which they are drawn, from the last to the first; filled at the first draw.
    order: Option<Vec<usize>>,
}

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self { rng: Rng::stream(seed, 1), order: None }
    }
}

impl Proposer for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn propose(&mut self, want: usize, so_far: &SoFar<'_>) -> Result<Vec<String>, String> {
        let members = so_far.space.members();
        let rng = &mut self.rng;
        let order = self.order.get_or_insert_with(|| {
            let mut order: Vec<usize> = (0..members.len()).collect();
            for last in (1..order.len()).rev() {
                order.swap(last, rng.below(last + 1));
            }
            order
        });
        let mut found = Vec::new();
        while found.len() < want
            && let Some(at) = order.pop()
        {
            if so_far.is_new(&members[at]) {
                found.push(members[at].clone());
            }
        }
        Ok(found)
    }
}

/// Children of the best: mutations of one, and crossings of two. Before there are elites, of the incumbents.
pub struct Elites {
    rng: Rng,
}

impl Elites {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self { rng: Rng::stream(seed, 2) }
    }
}

/// How many of the best have children.
const PARENTS: usize = 8;

impl Proposer for Elites {
    fn name(&self) -> &'static str {
        "elites"
    }

    fn propose(&mut self, want: usize, so_far: &SoFar<'_>) -> Result<Vec<String>, String> {
        let best = so_far.elites.iter().take(PARENTS).map(|(candidate, _)| candidate);
        let parents: Vec<&str> = best.chain(so_far.incumbents).map(String::as_str).collect();
        let mut found: Vec<String> = Vec::new();
        if parents.is_empty() {
            return Ok(found);
        }
        // Most children of a parent that has had many are known already; then it is another parent's turn.
        for _ in 0..want * 20 {
            if found.len() == want {
                break;
            }
            let mother = self.rng.pick(&parents);
            let child = if parents.len() > 1 && self.rng.chance(0.4) {
                Space::cross(mother, self.rng.pick(&parents), &mut self.rng)
            } else {
                so_far.space.mutate(mother, &mut self.rng)
            };
            if so_far.is_new(&child) && !found.contains(&child) {
                found.push(child);
            }
        }
        Ok(found)
    }
}

/// How long an external command may take: it may ask a language model.
const THINK: Duration = Duration::from_mins(5);

/// A command that is told what happened and answers with candidates, one line of JSON each way.
pub struct External {
    worker: Worker,
}

/// What an external command is told.
#[derive(Serialize)]
struct Asked<'a> {
    want: usize,
    cases: &'a [String],
    incumbents: &'a [String],
    elites: Vec<Elite<'a>>,
    knobs: &'a std::collections::BTreeMap<String, Vec<String>>,
    tried: usize,
}

#[derive(Serialize)]
struct Elite<'a> {
    schedule: &'a str,
    speed_up: f64,
}

impl External {
    /// Starts a command line, as a shell reads it.
    pub fn start(command: &str) -> Result<Self, String> {
        let shell = if cfg!(windows) { ["cmd", "/C"] } else { ["sh", "-c"] };
        let worker = Worker::start("proposer", Command::new(shell[0]).args([shell[1], command]))?;
        Ok(Self { worker })
    }
}

impl Proposer for External {
    fn name(&self) -> &'static str {
        "external"
    }

    fn propose(&mut self, want: usize, so_far: &SoFar<'_>) -> Result<Vec<String>, String> {
        let elites = so_far.elites.iter().take(2 * PARENTS);
        let request = Asked {
            want,
            cases: so_far.cases,
            incumbents: so_far.incumbents,
            elites: elites.map(|(schedule, speed_up)| Elite { schedule, speed_up: *speed_up }).collect(),
            knobs: so_far.space.values(),
            tried: so_far.named.len(),
        };
        let reply = self.worker.ask(&request, THINK).map_err(flashcore_host::process::Silence::reason)?;
        let schedules = reply["schedules"]
            .as_array()
            .ok_or("the proposer sent no list under \"schedules\"; an empty one means that it has no more")?;
        let texts = schedules.iter().map(|schedule| {
            schedule
                .as_str()
                .map(String::from)
                .ok_or_else(|| format!("{schedule} is not the text of a schedule"))
        });
        let mut found: Vec<String> = Vec::new();
        for text in texts {
            let text = text?;
            if so_far.is_new(&text) && !found.contains(&text) && found.len() < want {
                found.push(text);
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> Space {
        Space::of((0..20).map(|i| format!("k:a={},b={}", i % 5, i / 5)).collect())
    }

    /// Asks again and again until there are no more, remembering what was named.
    fn all(proposer: &mut dyn Proposer, elites: &[(String, f64)]) -> BTreeSet<String> {
        let space = space();
        let (mut named, incumbents) = (BTreeSet::new(), vec!["k:a=0,b=0".to_string()]);
        loop {
            let so_far = SoFar { space: &space, named: &named, elites, incumbents: &incumbents, cases: &[] };
            let found = proposer.propose(3, &so_far).unwrap();
            assert!(found.iter().all(|candidate| !named.contains(candidate)) && found.len() <= 3);
            if found.is_empty() {
                return named;
            }
            named.extend(found);
        }
    }

    #[test]
    fn exhaustive_and_random_name_every_member_once() {
        let members: BTreeSet<String> = space().members().iter().cloned().collect();
        assert_eq!(all(&mut Exhaustive::default(), &[]), members);
        assert_eq!(all(&mut Random::new(3), &[]), members);
    }

    #[test]
    fn children_of_the_best_stay_within_the_values_of_the_knobs() {
        let elites = [("k:a=4,b=3".to_string(), 1.2)];
        let children = all(&mut Elites::new(3), &elites);
        let members: BTreeSet<String> = space().members().iter().cloned().collect();
        assert!(children.is_subset(&members) && children.len() > 10, "{children:?}");
    }

    #[cfg(unix)]
    #[test]
    fn an_external_command_proposes_over_json_lines_and_may_end() {
        let script = "read line; case $line in *'\"want\":3'*'k:a=0,b=0'*) ;; *) exit 9;; esac; \
                      echo '{\"schedules\": [\"k:a=1,b=7\", \"k:a=1,b=7\", \"k:a=2,b=7\"]}'; \
                      read line; echo '{\"schedules\": []}'; sleep 100";
        let named = all(&mut External::start(script).unwrap(), &[]);
        assert_eq!(named.into_iter().collect::<Vec<_>>(), ["k:a=1,b=7", "k:a=2,b=7"]);
        let space = space();
        let so_far =
            SoFar { space: &space, named: &BTreeSet::new(), elites: &[], incumbents: &[], cases: &[] };
        let babble =
            External::start("read line; echo '{\"ideas\": 1}'; sleep 100").unwrap().propose(1, &so_far);
        assert!(babble.unwrap_err().contains("\"schedules\""));
        let gone = External::start("exit 3").unwrap().propose(1, &so_far);
        assert!(gone.is_err());
    }
}
