//! The journal: everything that happened to every candidate, one line of JSON each, appended and never changed.
//!
//! A search that is killed at any moment goes on from its journal. A line that the kill cut short is left out, and what
//! it would have said is done again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::decide::{Rule, Standing};
use super::gates::Gate;
use crate::files;

/// What a search is for. A journal is gone on with only for the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// The device's name.
    pub device: String,
    /// What the code is for; `cpu` for the CPU engine.
    pub target: String,
    /// The target cases.
    pub cases: Vec<String>,
    /// The schedules that are to be beaten, one a case.
    pub incumbents: Vec<String>,
    /// The rule of acceptance.
    pub rule: Rule,
}

/// One line of a journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The search began, or went on after a kill.
    Start {
        /// What for.
        task: Task,
        /// FlashCore's version and commit.
        version: String,
    },
    /// A generation began.
    Generation {
        /// Its number, from 1.
        number: usize,
    },
    /// A candidate was named.
    Named {
        /// The candidate.
        candidate: String,
        /// Who named it.
        by: String,
    },
    /// A gate refused it.
    Refused {
        /// The candidate.
        candidate: String,
        /// Which gate.
        gate: Gate,
        /// Why.
        why: String,
    },
    /// Its machine code is another's: that one's result is its result.
    Duplicate {
        /// The candidate.
        candidate: String,
        /// Whose code it has.
        of: String,
        /// The code's hash.
        identity: String,
    },
    /// It passed every gate before the device.
    Passed {
        /// The candidate.
        candidate: String,
        /// The hash of its code.
        identity: String,
    },
    /// It goes to the device now. Where nothing follows, it may be what ended the search.
    Begun {
        /// The candidate.
        candidate: String,
    },
    /// It crashed or hung its worker, and is not run again.
    Quarantined {
        /// The candidate.
        candidate: String,
        /// Where.
        gate: Gate,
        /// How.
        why: String,
    },
    /// It was timed beside the incumbents.
    Timed {
        /// The candidate.
        candidate: String,
        /// The rung of the halving, from 0; each has twice the rounds of the one before.
        rung: usize,
        /// How it stands.
        standings: Vec<Standing>,
    },
    /// It did not reach the next rung, or not the gain: its last standings are its result.
    Left {
        /// The candidate.
        candidate: String,
    },
    /// It challenged the incumbents until every comparison was decided or the time for it was spent.
    Challenged {
        /// The candidate.
        candidate: String,
        /// Which data: 0 for those of the search, a number of its own for fresh ones.
        data: u64,
        /// How it stands.
        standings: Vec<Standing>,
        /// Whether the rule accepts it.
        accepted: bool,
    },
    /// It won on fresh data too, and is the incumbent of some cases from now on.
    Accepted {
        /// The candidate.
        candidate: String,
        /// Its standings on fresh data in the cases that it won both times.
        standings: Vec<Standing>,
    },
    /// The search ended.
    End {
        /// Why.
        why: String,
    },
}

/// How a candidate fared.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "fate", rename_all = "snake_case")]
pub enum Fate {
    /// It is under way.
    Open,
    /// A gate refused it.
    Refused {
        /// Which.
        gate: Gate,
        /// Why.
        why: String,
    },
    /// It shares another's result.
    Duplicate {
        /// Whose.
        of: String,
    },
    /// It crashed or hung its worker.
    Quarantined {
        /// Where.
        gate: Gate,
        /// How.
        why: String,
    },
    /// It was timed and is not better by the rule.
    Slower,
    /// It was better once, and not on fresh data.
    Unconfirmed,
    /// It is an incumbent, or was one.
    Accepted,
}

/// All that is known of a candidate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// Who named it.
    pub by: String,
    /// The hash of its code, once it is known.
    pub identity: Option<String>,
    /// How it fared.
    pub fate: Fate,
    /// Its last standings.
    pub standings: Vec<Standing>,
    /// How many times faster than what the search began with, by the rule's score; none before it was timed.
    pub score: Option<f64>,
    /// How often it was begun without an end.
    #[serde(skip)]
    begun: usize,
}

/// How often a candidate may be under way when a search is killed. The first time is bad luck.
const MAY_BE_THERE: usize = 2;

/// What a journal says, line after line.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// What for.
    pub task: Option<Task>,
    /// The schedules to beat, one a case.
    pub incumbents: Vec<String>,
    /// How many times faster each case's incumbent is than what the search began with.
    pub gains: Vec<f64>,
    /// Every candidate.
    pub records: BTreeMap<String, Record>,
    /// The names of all candidates, and of the incumbents.
    pub named: BTreeSet<String>,
    /// Whose code a hash is.
    pub identities: BTreeMap<String, String>,
    /// The generations so far.
    pub generations: usize,
    /// Accepted candidates in order, with the standings that they were accepted by.
    pub accepted: Vec<(String, Vec<Standing>)>,
}

impl State {
    /// Takes in one line.
    pub fn apply(&mut self, event: &Event) {
        match event {
            Event::Start { task, .. } => {
                if self.task.is_none() {
                    self.incumbents.clone_from(&task.incumbents);
                    self.gains = vec![1.0; task.cases.len()];
                    self.named.extend(task.incumbents.iter().cloned());
                    self.task = Some(task.clone());
                }
            }
            Event::Generation { number } => self.generations = *number,
            Event::Named { candidate, by } => {
                self.named.insert(candidate.clone());
                let record = Record {
                    by: by.clone(),
                    identity: None,
                    fate: Fate::Open,
                    standings: Vec::new(),
                    score: None,
                    begun: 0,
                };
                self.records.entry(candidate.clone()).or_insert(record);
            }
            Event::Refused { candidate, gate, why } => {
                self.end(candidate, Fate::Refused { gate: *gate, why: why.clone() });
            }
            Event::Duplicate { candidate, of, identity } => {
                self.end(candidate, Fate::Duplicate { of: of.clone() });
                self.identify(candidate, identity);
            }
            Event::Passed { candidate, identity } => {
                self.identities.entry(identity.clone()).or_insert_with(|| candidate.clone());
                self.identify(candidate, identity);
            }
            Event::Begun { candidate } => {
                if let Some(record) = self.records.get_mut(candidate) {
                    record.begun += 1;
                }
            }
            Event::Quarantined { candidate, gate, why } => {
                self.end(candidate, Fate::Quarantined { gate: *gate, why: why.clone() });
            }
            Event::Timed { candidate, standings, .. } => self.stand(candidate, standings),
            Event::Left { candidate } => self.end(candidate, Fate::Slower),
            Event::Challenged { candidate, data, standings, accepted } => {
                self.stand(candidate, standings);
                if !accepted {
                    self.end(candidate, if *data == 0 { Fate::Slower } else { Fate::Unconfirmed });
                }
            }
            Event::Accepted { candidate, standings } => {
                for standing in standings {
                    self.incumbents[standing.case].clone_from(candidate);
                    self.gains[standing.case] *= standing.speed_up;
                }
                self.accepted.push((candidate.clone(), standings.clone()));
                self.end(candidate, Fate::Accepted);
            }
            Event::End { .. } => {}
        }
    }

    fn end(&mut self, candidate: &str, fate: Fate) {
        if let Some(record) = self.records.get_mut(candidate) {
            record.fate = fate;
        }
    }

    fn identify(&mut self, candidate: &str, identity: &str) {
        if let Some(record) = self.records.get_mut(candidate) {
            record.identity = Some(identity.into());
        }
    }

    fn stand(&mut self, candidate: &str, standings: &[Standing]) {
        let rule = self.task.as_ref().map_or_else(Rule::default, |task| task.rule);
        let total =
            |standing: &Standing| standing.speed_up * self.gains.get(standing.case).copied().unwrap_or(1.0);
        let totals: Vec<f64> = standings.iter().map(total).collect();
        if let Some(record) = self.records.get_mut(candidate) {
            record.standings = standings.to_vec();
            record.score = rule.score(&totals).or(record.score);
        }
    }

    /// Candidates that were timed, with their scores, best first.
    pub fn elites(&self) -> Vec<(String, f64)> {
        let mut elites: Vec<(String, f64)> = self
            .records
            .iter()
            .filter(|(_, record)| matches!(record.fate, Fate::Slower | Fate::Unconfirmed | Fate::Accepted))
            .filter_map(|(candidate, record)| Some((candidate.clone(), record.score?)))
            .collect();
        elites.sort_by(|a, b| b.1.total_cmp(&a.1));
        elites
    }

    /// Candidates that were under way when the search was killed: those to take up again, and those that were there
    /// too often for it to be chance.
    pub fn unfinished(&self) -> (Vec<String>, Vec<String>) {
        let open = self.records.iter().filter(|(_, record)| record.fate == Fate::Open);
        let (again, suspects): (Vec<_>, Vec<_>) = open.partition(|(_, record)| record.begun < MAY_BE_THERE);
        let names = |of: Vec<(&String, &Record)>| of.into_iter().map(|(name, _)| name.clone()).collect();
        (names(again), names(suspects))
    }

    /// How many candidates each gate refused, quarantine included.
    pub fn refused(&self) -> BTreeMap<Gate, usize> {
        let mut counts = BTreeMap::new();
        for record in self.records.values() {
            if let Fate::Refused { gate, .. } | Fate::Quarantined { gate, .. } = record.fate {
                *counts.entry(gate).or_default() += 1;
            }
        }
        counts
    }
}

/// A journal on disk with what it says.
pub struct Journal {
    file: Option<File>,
    state: State,
}

impl Journal {
    /// One that is kept in memory only.
    pub fn in_memory() -> Self {
        Self { file: None, state: State::default() }
    }

    /// Begins a journal. One that is there already is neither overwritten nor gone on with.
    pub fn create(path: &Path) -> Result<Self, String> {
        let file = OpenOptions::new().append(true).create_new(true).open(path).map_err(|error| {
            if error.kind() == std::io::ErrorKind::AlreadyExists {
                format!(
                    "{} is there already: go on with it by --resume, or choose another --out",
                    path.display()
                )
            } else {
                files::explain("begin", path, &error)
            }
        })?;
        Ok(Self { file: Some(file), state: State::default() })
    }

    /// Goes on with a journal. A last line that was cut short is cut off.
    pub fn resume(path: &Path) -> Result<Self, String> {
        let say = |what: &'static str| move |error: std::io::Error| files::explain(what, path, &error);
        let mut file = OpenOptions::new().read(true).write(true).open(path).map_err(say("go on with"))?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(say("read"))?;
        let (state, whole) = replay(&text, path)?;
        file.set_len(whole as u64).map_err(say("cut"))?;
        file.seek(SeekFrom::End(0)).map_err(say("go on with"))?;
        Ok(Self { file: Some(file), state })
    }

    /// Writes a line, and takes it in. The line is with the operating system when this returns, so that whatever
    /// happens to this process, it stays.
    pub fn write(&mut self, event: &Event) -> Result<(), String> {
        if let Some(file) = &mut self.file {
            let mut line = serde_json::to_vec(event).map_err(|error| error.to_string())?;
            line.push(b'\n');
            file.write_all(&line).map_err(|error| format!("the journal cannot be written: {error}"))?;
        }
        self.state.apply(event);
        Ok(())
    }

    /// What it says so far.
    pub fn state(&self) -> &State {
        &self.state
    }
}

/// What a journal says, left as it is.
pub fn read(path: &Path) -> Result<State, String> {
    let text = std::fs::read_to_string(path).map_err(|error| files::explain("read", path, &error))?;
    replay(&text, path).map(|(state, _)| state)
}

/// What the whole lines of a journal say, and how many bytes they are.
fn replay(text: &str, path: &Path) -> Result<(State, usize), String> {
    let whole = text.rfind('\n').map_or(0, |end| end + 1);
    let mut state = State::default();
    for (number, line) in (1..).zip(text[..whole].lines()) {
        let event: Event = serde_json::from_str(line)
            .map_err(|error| format!("{} line {number} is no event: {error}", path.display()))?;
        state.apply(&event);
    }
    Ok((state, whole))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Interval;

    fn task() -> Task {
        Task {
            device: "a device".into(),
            target: "cpu".into(),
            cases: vec!["x".into(), "y".into()],
            incumbents: vec!["a=0".into(), "a=0".into()],
            rule: Rule::default(),
        }
    }

    fn standing(case: usize, speed_up: f64) -> Standing {
        let interval = Interval { low: speed_up - 0.01, high: speed_up + 0.01, level: 0.99 };
        Standing { case, us: 1.0, incumbent_us: speed_up, speed_up, interval, rounds: 10 }
    }

    fn history() -> Vec<Event> {
        let candidate = "a=1".to_string();
        let both = vec![standing(0, 1.1), standing(1, 1.2)];
        vec![
            Event::Start { task: task(), version: "1".into() },
            Event::Generation { number: 1 },
            Event::Named { candidate: candidate.clone(), by: "random".into() },
            Event::Named { candidate: "a=2".into(), by: "random".into() },
            Event::Refused { candidate: "a=2".into(), gate: Gate::Parity, why: "wrong".into() },
            Event::Passed { candidate: candidate.clone(), identity: "f00".into() },
            Event::Begun { candidate: candidate.clone() },
            Event::Timed { candidate: candidate.clone(), rung: 0, standings: both.clone() },
            Event::Challenged {
                candidate: candidate.clone(),
                data: 0,
                standings: both.clone(),
                accepted: true,
            },
            Event::Challenged {
                candidate: candidate.clone(),
                data: 7,
                standings: both.clone(),
                accepted: true,
            },
            Event::Accepted { candidate, standings: both },
        ]
    }

    #[test]
    fn a_journal_cut_at_any_byte_goes_on_from_its_last_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        let mut journal = Journal::create(&path).unwrap();
        for event in history() {
            journal.write(&event).unwrap();
        }
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let lines = whole[..cut]
                .split_inclusive(|&byte| byte == b'\n')
                .filter(|line| line.ends_with(b"\n"))
                .count();
            let mut resumed = Journal::resume(&path).unwrap();
            let mut expected = State::default();
            for event in &history()[..lines] {
                expected.apply(event);
            }
            assert_eq!(resumed.state().records, expected.records);
            assert_eq!(resumed.state().incumbents, expected.incumbents);
            resumed.write(&Event::End { why: "test".into() }).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            assert_eq!(text.lines().count(), lines + 1);
            assert!(text.lines().all(|line| serde_json::from_str::<Event>(line).is_ok()), "{text}");
        }
    }

    #[test]
    fn a_journal_is_never_overwritten_and_a_damaged_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        Journal::create(&path).unwrap();
        assert!(Journal::create(&path).err().unwrap().contains("--resume"));
        std::fs::write(&path, "{}\n").unwrap();
        assert!(Journal::resume(&path).err().unwrap().contains("line 1"));
        assert!(Journal::resume(&folder.path().join("none")).is_err());
    }

    #[test]
    fn an_accepted_candidate_is_the_incumbent_and_gains_multiply() {
        let mut state = State::default();
        for event in &history() {
            state.apply(event);
        }
        assert_eq!(state.incumbents, ["a=1", "a=1"]);
        assert_eq!(state.gains, [1.1, 1.2]);
        assert_eq!(state.refused(), BTreeMap::from([(Gate::Parity, 1)]));
        // The next one is 10 % faster than this incumbent, so more than 20 % faster than the first.
        state.apply(&Event::Named { candidate: "a=3".into(), by: "elites".into() });
        let standings = vec![standing(0, 1.1), standing(1, 1.1)];
        state.apply(&Event::Timed { candidate: "a=3".into(), rung: 0, standings });
        state.apply(&Event::Left { candidate: "a=3".into() });
        let best = &state.elites()[0];
        assert!(best.0 == "a=3" && best.1 > 1.2, "{best:?}");
    }

    #[test]
    fn who_is_under_way_at_one_kill_is_taken_up_again_and_at_two_is_a_suspect() {
        let mut state = State::default();
        for event in &history()[..4] {
            state.apply(event);
        }
        let candidate = "a=1".to_string();
        state.apply(&Event::Begun { candidate: candidate.clone() });
        assert_eq!(state.unfinished(), (vec![candidate.clone(), "a=2".into()], vec![]));
        state.apply(&Event::Begun { candidate: candidate.clone() });
        assert_eq!(state.unfinished(), (vec!["a=2".into()], vec![candidate]));
    }
}
