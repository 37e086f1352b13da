//! The journal: everything that happened to every candidate, one line of JSON each, appended and never changed.
//!
//! A search that is killed at any moment can continue from its journal. A line that the kill cut short is left out, and
//! what it would have said is done again. Lines are numbered and carry a checksum, so that a damaged line is left out
//! and missing lines are noticed. The writer of a journal holds a lock on it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::decide::{Rule, Standing};
use super::gates::Gate;
use flashcore_host::files;

/// What a search is for. A journal is continued only for the same task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// The device's name.
    pub device: String,
    /// The target of the code; `cpu` for the CPU engine.
    pub target: String,
    /// The target cases.
    pub cases: Vec<String>,
    /// The schedules to beat, one per case.
    pub incumbents: Vec<String>,
    /// The rule of acceptance.
    pub rule: Rule,
}

/// One line of a journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The search began, or continued after a kill.
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
    /// It is in flight.
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

/// How often a candidate may be in flight when a search is killed. The first time may be bad luck.
const MAY_BE_THERE: usize = 2;

/// What a journal says, line after line.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// What for.
    pub task: Option<Task>,
    /// The schedules to beat, one per case.
    pub incumbents: Vec<String>,
    /// How many times faster each case's incumbent is than what the search began with.
    pub gains: Vec<f64>,
    /// Every candidate.
    pub records: BTreeMap<String, Record>,
    /// The names of all candidates, and of the incumbents.
    pub named: BTreeSet<String>,
    /// The candidate that a code hash belongs to.
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
                // A case without an incumbent belongs to no search.
                if self.task.is_none() && task.cases.len() == task.incumbents.len() {
                    self.incumbents.clone_from(&task.incumbents);
                    self.gains = vec![1.0; task.cases.len()];
                    self.named.extend(task.incumbents.iter().cloned());
                    self.task = Some(task.clone());
                    // Where the first start is lost, winners come before the next one.
                    for (candidate, standings) in std::mem::take(&mut self.accepted) {
                        self.accept(&candidate, &standings);
                    }
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
                self.accept(candidate, standings);
                self.end(candidate, Fate::Accepted);
            }
            // A candidate in flight when a person ended the search did not cause the end.
            Event::End { .. } => self.records.values_mut().for_each(|record| record.begun = 0),
        }
    }

    fn accept(&mut self, candidate: &str, standings: &[Standing]) {
        for standing in standings {
            let of_case = self.incumbents.get_mut(standing.case).zip(self.gains.get_mut(standing.case));
            if let Some((incumbent, gain)) = of_case {
                *incumbent = candidate.into();
                *gain *= standing.speed_up;
            }
        }
        self.accepted.push((candidate.into(), standings.to_vec()));
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

    /// Candidates that were in flight when the search was killed: those to try again, and those for which it happened
    /// too often to be chance.
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

/// What is wrong with a journal's lines. The search continues without them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// The places in the file of lines that cannot be read, from 1.
    pub unreadable: Vec<usize>,
    /// How many lines are gone without a trace.
    pub missing: u64,
    /// Whether its beginning is among them.
    pub headless: bool,
}

impl Damage {
    /// Whether there is any.
    pub fn is_none(&self) -> bool {
        self.unreadable.is_empty() && self.missing == 0
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if let Some(first) = self.unreadable.first() {
            parts.push(format!(
                "{} of its lines cannot be read, the first is line {first}",
                self.unreadable.len()
            ));
        }
        if self.missing > 0 {
            let which = if self.headless { ", its beginning among them" } else { "" };
            parts.push(format!("{} lines are missing{which}", self.missing));
        }
        write!(f, "{}; what they said is not known and may be tried again", parts.join(", and "))
    }
}

/// Where lines are written.
struct Pen {
    file: Option<File>,
    /// The number of the next line.
    next: u64,
}

impl Pen {
    /// Writes a line. The operating system has it when this returns, so that it survives whatever happens to this
    /// process.
    fn write(&mut self, event: &Event) -> Result<(), String> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let event = serde_json::to_string(event).map_err(|error| error.to_string())?;
        let line = line(self.next, &event);
        file.write_all(line.as_bytes()).map_err(|error| format!("the journal cannot be written: {error}"))?;
        self.next += 1;
        Ok(())
    }
}

/// A journal on disk with what it says.
pub struct Journal {
    pen: Arc<Mutex<Pen>>,
    state: State,
    damage: Damage,
}

impl Journal {
    fn new(file: Option<File>, replay: Replay) -> Self {
        let Replay { state, damage, next, .. } = replay;
        Self { pen: Arc::new(Mutex::new(Pen { file, next })), state, damage }
    }

    /// One that is kept in memory only.
    pub fn in_memory() -> Self {
        Self::new(None, replay(&[]))
    }

    /// Begins a journal. An existing one is neither overwritten nor continued.
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
        lock(&file, path)?;
        Ok(Self::new(Some(file), replay(&[])))
    }

    /// Continues a journal. A last line that was cut short is removed.
    pub fn resume(path: &Path) -> Result<Self, String> {
        let say = |what: &'static str| move |error: std::io::Error| files::explain(what, path, &error);
        let mut file = OpenOptions::new().read(true).append(true).open(path).map_err(say("go on with"))?;
        lock(&file, path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(say("read"))?;
        let replay = replay(&bytes);
        file.set_len(replay.whole as u64).map_err(say("cut"))?;
        Ok(Self::new(Some(file), replay))
    }

    /// Writes a line, and takes it in.
    pub fn write(&mut self, event: &Event) -> Result<(), String> {
        self.pen.lock().unwrap_or_else(PoisonError::into_inner).write(event)?;
        self.state.apply(event);
        Ok(())
    }

    /// Writes down that somebody ended the search, from outside of it.
    pub fn ender(&self) -> impl FnOnce() + Send + 'static {
        let pen = Arc::clone(&self.pen);
        move || {
            let end = Event::End { why: "it was stopped".into() };
            // Without this line it continues as after a kill.
            let _ = pen.lock().unwrap_or_else(PoisonError::into_inner).write(&end);
        }
    }

    /// What it says so far.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// What was wrong with it when it was continued.
    pub fn damage(&self) -> &Damage {
        &self.damage
    }
}

/// How long a lock is waited for. The lock of a search that has just ended may outlive it: a process that it was just
/// starting holds all open files until it has begun.
const PATIENCE: Duration = Duration::from_secs(2);

/// Locks a journal for as long as its file is open. The operating system releases it whatever happens to the process.
fn lock(file: &File, path: &Path) -> Result<(), String> {
    let started = Instant::now();
    let mut locked = file.try_lock();
    while matches!(locked, Err(TryLockError::WouldBlock)) && started.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
        locked = file.try_lock();
    }
    match locked {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(format!(
            "another search writes to {}: wait for its end or stop it, or choose another --out",
            path.display()
        )),
        // Some network file systems have no locks.
        Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(error)) => Err(files::explain("lock", path, &error)),
    }
}

/// What a journal says, left as it is, and what is wrong with it.
pub fn read(path: &Path) -> Result<(State, Damage), String> {
    let Replay { state, damage, .. } = replay(&files::read(path)?);
    Ok((state, damage))
}

/// What a journal's bytes say.
pub struct Replay {
    /// What its lines say.
    pub state: State,
    /// What is wrong with them.
    pub damage: Damage,
    /// Bytes of its whole lines.
    whole: usize,
    /// The number of the next line.
    next: u64,
}

/// Takes in the whole lines of a journal.
pub fn replay(bytes: &[u8]) -> Replay {
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    let (mut state, mut damage, mut next) = (State::default(), Damage::default(), 1);
    let mut unreadable = 0;
    for (place, line) in (1..).zip(bytes[..whole].split_inclusive(|&byte| byte == b'\n')) {
        match parse(line) {
            Some((number, event)) if number >= next => {
                // Lines that cannot be read stand where numbers are left out, and are not counted twice.
                let missing = (number - next).saturating_sub(unreadable);
                damage.headless |= next == 1 && missing > 0;
                damage.missing += missing;
                (next, unreadable) = (number + 1, 0);
                state.apply(&event);
            }
            _ => {
                unreadable += 1;
                damage.unreadable.push(place);
            }
        }
    }
    next += unreadable;
    Replay { state, damage, whole, next }
}

/// Characters of a line's checksum.
const CHECKSUM: usize = 8;

fn checksum(number: u64, event: &str) -> String {
    blake3::hash(format!("{number} {event}").as_bytes()).to_hex()[..CHECKSUM].to_string()
}

/// An event as its line: the event's own fields after the line's number and checksum.
fn line(number: u64, event: &str) -> String {
    format!("{{\"line\":{number},\"checksum\":\"{}\",{}\n", checksum(number, event), &event[1..])
}

/// The number and the event of a line, if it is what [`line`] made.
fn parse(line: &[u8]) -> Option<(u64, Event)> {
    let text = std::str::from_utf8(line).ok()?.strip_prefix("{\"line\":")?.strip_suffix('\n')?;
    let (number, rest) = text.split_once(",\"checksum\":\"")?;
    let (sum, fields) = rest.split_once("\",")?;
    let (number, event) = (number.parse().ok()?, format!("{{{fields}"));
    if number == u64::MAX || sum != checksum(number, &event) {
        return None;
    }
    Some((number, serde_json::from_str(&event).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_judge::stats::Interval;

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
        drop(journal);
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
            drop(resumed);
            assert!(Journal::resume(&path).unwrap().damage().is_none(), "{text}");
        }
    }

    fn written(folder: &Path) -> (std::path::PathBuf, Vec<String>) {
        let path = folder.join("journal.jsonl");
        let mut journal = Journal::create(&path).unwrap();
        for event in history() {
            journal.write(&event).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        (path, text.split_inclusive('\n').map(String::from).collect())
    }

    #[test]
    fn a_journal_that_somebody_writes_to_is_refused_and_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let (path, lines) = written(folder.path());
        let first = Journal::resume(&path).unwrap();
        let why = Journal::resume(&path).err().unwrap();
        assert!(why.contains("another search") && why.contains("--out"), "{why}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), lines.concat());
        drop(first);
        assert!(Journal::resume(&path).is_ok());
    }

    #[test]
    fn a_damaged_line_costs_that_line_whatever_its_damage() {
        let folder = tempfile::tempdir().unwrap();
        let (path, lines) = written(folder.path());
        for damaged in 0..lines.len() {
            let events: Vec<Event> = history();
            let mut expected = State::default();
            let kept = events.iter().enumerate().filter(|(at, _)| *at != damaged);
            kept.for_each(|(_, event)| expected.apply(event));
            // A digit that became another, half of the line, bytes that are no text.
            let line = lines[damaged].as_bytes();
            let mut other = line.to_vec();
            let digit = line.iter().rposition(u8::is_ascii_alphanumeric).unwrap();
            other[digit] ^= 1;
            let half = [&line[line.len() / 2..]].concat();
            let garbage = [&[0xff, 0, 0xfe], &line[3..]].concat();
            for bad in [other, half, garbage] {
                let all: Vec<&[u8]> = (0..lines.len())
                    .map(|at| if at == damaged { &bad[..] } else { lines[at].as_bytes() })
                    .collect();
                std::fs::write(&path, all.concat()).unwrap();
                let mut journal = Journal::resume(&path).unwrap();
                assert_eq!(journal.damage().unreadable, [damaged + 1]);
                assert_eq!((journal.damage().missing, journal.damage().headless), (0, false));
                assert_eq!(journal.state().records, expected.records);
                // It is written to, and resumed again, with that one line lost and no other.
                journal.write(&Event::End { why: "test".into() }).unwrap();
                drop(journal);
                let again = Journal::resume(&path).unwrap();
                assert_eq!((again.damage().unreadable.len(), again.damage().missing), (1, 0));
            }
        }
    }

    #[test]
    fn lines_that_are_gone_are_missed_at_the_beginning_and_in_the_middle() {
        let folder = tempfile::tempdir().unwrap();
        let (path, lines) = written(folder.path());
        for gone in [0..lines.len() / 2, 0..1, 3..5] {
            let left: Vec<&str> =
                (0..lines.len()).filter(|at| !gone.contains(at)).map(|at| lines[at].as_str()).collect();
            std::fs::write(&path, left.concat()).unwrap();
            let journal = Journal::resume(&path).unwrap();
            assert_eq!(journal.damage().missing, gone.len() as u64);
            assert_eq!(journal.damage().headless, gone.start == 0);
            let said = journal.damage().to_string();
            assert!(said.contains("missing") && said.contains("beginning") == (gone.start == 0), "{said}");
        }
    }

    #[test]
    fn winners_before_the_first_start_that_is_left_are_incumbents_all_the_same() {
        let mut state = State::default();
        for event in &history()[1..] {
            state.apply(event);
        }
        state.apply(&history()[0]);
        assert_eq!(state.incumbents, ["a=1", "a=1"]);
        assert_eq!(state.gains, [1.1, 1.2]);
        assert_eq!(state.accepted.len(), 1);
    }

    #[test]
    fn who_is_under_way_when_a_person_stops_the_search_is_no_suspect() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        let mut journal = Journal::create(&path).unwrap();
        let candidate = "a=1".to_string();
        journal.write(&Event::Named { candidate: candidate.clone(), by: "random".into() }).unwrap();
        for _ in 0..3 {
            journal.write(&Event::Begun { candidate: candidate.clone() }).unwrap();
            journal.ender()();
            drop(journal);
            journal = Journal::resume(&path).unwrap();
            assert_eq!(journal.state().unfinished(), (vec![candidate.clone()], vec![]));
        }
    }

    #[test]
    fn a_journal_is_never_overwritten_and_what_is_none_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        Journal::create(&path).unwrap();
        assert!(Journal::create(&path).err().unwrap().contains("--resume"));
        std::fs::write(&path, "{}\n").unwrap();
        assert!(Journal::resume(&path).unwrap().damage().to_string().contains("line 1"));
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
