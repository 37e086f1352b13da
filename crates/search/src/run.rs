//! The search: generations of candidates through the gates, onto the clock, and against the incumbents.
//!
//! Within a generation the candidates that are right take turns beside the incumbents, in rungs: each rung has twice
//! the rounds of the one before and half the candidates. A candidate that looks better after the last rung challenges
//! the incumbents until the comparison is decided; if it wins, it has to win again on fresh data.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::decide::Standing;
use super::device::{Device, Trouble};
use super::gates::{Gate, Gates, Refusal};
use super::journal::{Event, Journal, State, Task};
use super::propose::{Proposer, SoFar};
use super::space::Space;
use flashcore_clock::timing::Effort;

/// The settings of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Candidates per generation that pass the static gate.
    pub generation: usize,
    /// Time for all of it.
    pub budget: Duration,
    /// Rungs of the halving.
    pub rungs: usize,
    /// Rounds of the first rung.
    pub rounds: usize,
    /// Time to decide between a challenger and the incumbent in one case.
    pub challenge: Duration,
    /// The least duration of a sample.
    pub sample: Duration,
    /// The most generations.
    pub generations: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            generation: 24,
            budget: Duration::from_mins(20),
            rungs: 3,
            rounds: 5,
            challenge: Duration::from_secs(4),
            sample: Duration::from_millis(2),
            generations: usize::MAX,
        }
    }
}

/// Candidates that are timed in one race, along with the incumbent.
const RACERS: usize = 7;

/// What is shown while a search runs.
pub struct View<'a> {
    /// What happened so far.
    pub state: &'a State,
    /// What is going on.
    pub doing: String,
    /// The time that is left.
    pub left: Duration,
}

/// A search and everything it needs.
pub struct Search<'a> {
    /// What it is for.
    pub task: Task,
    /// The space.
    pub space: &'a Space,
    /// The gates before the device.
    pub gates: &'a dyn Gates,
    /// The device.
    pub device: &'a mut dyn Device,
    /// Who names candidates.
    pub proposers: Vec<Box<dyn Proposer>>,
    /// Its memory.
    pub journal: Journal,
    /// Its settings.
    pub settings: Settings,
    /// Whether somebody wants it to stop.
    pub stop: &'a dyn Fn() -> bool,
    /// Shows its progress.
    pub view: &'a mut dyn FnMut(&View<'_>),
    /// Gets notes for the user.
    pub note: &'a mut dyn FnMut(&str),
}

/// A candidate that passed the gates before the device.
struct Ready {
    candidate: String,
    cases: Vec<usize>,
    guess: Option<f64>,
}

/// What the gates before the device make of a candidate.
enum Prepared {
    Refused(Refusal),
    Duplicate { of: String, identity: String },
    Ready { identity: String, ready: Ready },
}

/// A candidate with the cases whose static gate it passed.
type Checked = (String, Vec<usize>);

/// Brings candidates through the gates between the static one and the device.
struct Preparer<'a> {
    gates: &'a dyn Gates,
    needed: usize,
    /// The candidate that a code hash belongs to.
    known: BTreeMap<String, String>,
}

impl Preparer<'_> {
    fn prepare(&mut self, batch: Vec<Checked>) -> Vec<(String, Prepared)> {
        let assembled: Vec<(Checked, Result<String, String>)> = batch
            .into_par_iter()
            .map(|(candidate, cases)| {
                let (cases, identity) = self.assemble(&candidate, cases);
                ((candidate, cases), identity)
            })
            .collect();
        let mut results = Vec::new();
        let mut fresh = Vec::new();
        for ((candidate, cases), identity) in assembled {
            match identity {
                Err(why) => {
                    results.push((candidate, Prepared::Refused(Refusal { gate: Gate::Assembler, why })));
                }
                Ok(identity) => {
                    let owner = self.known.entry(identity.clone()).or_insert_with(|| candidate.clone());
                    if *owner == candidate {
                        fresh.push((candidate, cases, identity));
                    } else {
                        results.push((candidate, Prepared::Duplicate { of: owner.clone(), identity }));
                    }
                }
            }
        }
        let simulated: Vec<(String, Prepared)> = fresh
            .into_par_iter()
            .map(|(candidate, cases, identity)| {
                let fault = cases.iter().find_map(|&case| self.gates.simulate(&candidate, case).err());
                let prepared = if let Some(why) = fault {
                    Prepared::Refused(Refusal { gate: Gate::Simulator, why })
                } else {
                    let guess = self.gates.guess(&candidate);
                    Prepared::Ready { identity, ready: Ready { candidate: candidate.clone(), cases, guess } }
                };
                (candidate, prepared)
            })
            .collect();
        results.extend(simulated);
        results
    }

    /// The cases that a candidate assembles for, and the hash of all its code.
    fn assemble(&self, candidate: &str, cases: Vec<usize>) -> (Vec<usize>, Result<String, String>) {
        let (mut kept, mut codes, mut refused) = (Vec::new(), Vec::new(), None);
        for case in cases {
            match self.gates.assemble(candidate, case) {
                Ok(code) => {
                    kept.push(case);
                    codes.push(format!("{case}:{code};"));
                }
                Err(why) => refused = refused.or(Some(why)),
            }
        }
        if kept.len() < self.needed {
            return (kept, Err(refused.unwrap_or_else(|| "it fits too few cases".into())));
        }
        (kept, Ok(crate::hash(codes.concat().as_bytes())))
    }
}

/// When candidates are prepared: while others are timed, or before, where that would disturb the clock.
enum Kitchen<'a> {
    Here(Preparer<'a>, Option<Vec<Checked>>),
    Beside { ask: Sender<Vec<Checked>>, given: Receiver<Vec<(String, Prepared)>>, waiting: bool },
}

impl Kitchen<'_> {
    fn start(&mut self, batch: Vec<Checked>) {
        match self {
            Kitchen::Here(_, place) => *place = Some(batch),
            Kitchen::Beside { ask, waiting, .. } => *waiting = ask.send(batch).is_ok(),
        }
    }

    /// The results of the batch that was started last, if one was.
    fn finish(&mut self) -> Option<Vec<(String, Prepared)>> {
        match self {
            Kitchen::Here(preparer, place) => place.take().map(|batch| preparer.prepare(batch)),
            Kitchen::Beside { given, waiting, .. } => {
                std::mem::take(waiting).then(|| given.recv().ok()).flatten()
            }
        }
    }
}

impl Search<'_> {
    /// Runs until the time is spent, nothing is left to try, or somebody stops it. Says why it ended.
    pub fn run(&mut self) -> Result<String, String> {
        let ends = Instant::now() + self.settings.budget;
        self.begin()?;
        let mut preparer = Preparer {
            gates: self.gates,
            needed: self.task.rule.cases,
            known: self.journal.state().identities.clone(),
        };
        if let Some(identity) = self.incumbents_identity(&preparer) {
            preparer.known.entry(identity).or_insert_with(|| "the planner's choice".into());
        }
        let overlap = self.gates.can_overlap();
        let why = std::thread::scope(|scope| {
            let mut kitchen = if overlap {
                let (ask, asked) = channel::<Vec<Checked>>();
                let (give, given) = channel();
                scope.spawn(move || {
                    for batch in asked {
                        if give.send(preparer.prepare(batch)).is_err() {
                            break;
                        }
                    }
                });
                Kitchen::Beside { ask, given, waiting: false }
            } else {
                Kitchen::Here(preparer, None)
            };
            self.generations(&mut kitchen, overlap, ends)
        })?;
        self.journal.write(&Event::End { why: why.clone() })?;
        Ok(why)
    }

    /// Writes down what the search is for, and who stopped the last one.
    fn begin(&mut self) -> Result<(), String> {
        if let Some(before) = &self.journal.state().task
            && *before != self.task
        {
            return Err(format!(
                "the journal is of another search, on {} for {}; choose another --out",
                before.device,
                before.cases.join(", ")
            ));
        }
        let version = option_env!("FLASHCORE_COMMIT").unwrap_or(env!("CARGO_PKG_VERSION"));
        self.journal.write(&Event::Start { task: self.task.clone(), version: version.into() })?;
        let (_, suspects) = self.journal.state().unfinished();
        for candidate in suspects {
            let why = "the search ended twice while it ran".to_string();
            self.journal.write(&Event::Quarantined { candidate, gate: Gate::Parity, why })?;
        }
        Ok(())
    }

    fn incumbents_identity(&self, preparer: &Preparer<'_>) -> Option<String> {
        let codes = self.task.incumbents.iter().enumerate().map(|(case, incumbent)| {
            let code = preparer.gates.assemble(incumbent, case).ok()?;
            Some(format!("{case}:{code};"))
        });
        let codes: Option<String> = codes.collect();
        Some(crate::hash(codes?.as_bytes()))
    }

    fn generations(
        &mut self,
        kitchen: &mut Kitchen<'_>,
        overlap: bool,
        ends: Instant,
    ) -> Result<String, String> {
        let first = self.journal.state().generations;
        let batch = self.name_candidates(ends, true)?;
        kitchen.start(batch);
        while let Some(prepared) = {
            self.show("preparing candidates", ends);
            kitchen.finish()
        } {
            let over = |search: &Self| {
                if (search.stop)() {
                    return Some("it was stopped");
                }
                let generations = search.journal.state().generations - first;
                (Instant::now() >= ends)
                    .then_some("the time is spent")
                    .or((generations >= search.settings.generations).then_some("the generations are through"))
            };
            if overlap && over(self).is_none() {
                let next = self.name_candidates(ends, false)?;
                if !next.is_empty() {
                    kitchen.start(next);
                }
            }
            let ready = self.write_prepared(prepared)?;
            self.compete(&ready, ends)?;
            if let Some(why) = over(self) {
                return Ok(why.into());
            }
            if !overlap {
                let next = self.name_candidates(ends, false)?;
                if !next.is_empty() {
                    kitchen.start(next);
                }
            }
        }
        Ok("nothing is left to try".into())
    }

    fn show(&mut self, doing: &str, ends: Instant) {
        let left = ends.saturating_duration_since(Instant::now());
        (self.view)(&View { state: self.journal.state(), doing: doing.into(), left });
    }

    /// The next generation: candidates that pass the static gate. Those that do not are recorded and dropped.
    fn name_candidates(&mut self, ends: Instant, first: bool) -> Result<Vec<Checked>, String> {
        let number = self.journal.state().generations + 1;
        self.journal.write(&Event::Generation { number })?;
        let mut batch = Vec::new();
        if first {
            // Trying one case's incumbent in the others is the cheapest idea of all.
            let mut others = self.task.incumbents.clone();
            others.sort();
            others.dedup();
            let (again, _) = self.journal.state().unfinished();
            let asked = |candidate: &String| self.journal.state().records.contains_key(candidate);
            let ask = others.len() > 1 && !others.iter().all(asked);
            for candidate in others.into_iter().filter(|candidate| ask && !again.contains(candidate)) {
                self.consider(candidate, "incumbents", &mut batch)?;
            }
            for candidate in again {
                let by = self.journal.state().records[&candidate].by.clone();
                self.consider(candidate, &by, &mut batch)?;
            }
        }
        while batch.len() < self.settings.generation && Instant::now() < ends && !(self.stop)() {
            let mut silent = true;
            let want = (self.settings.generation - batch.len()).div_ceil(self.proposers.len().max(1));
            let mut at = 0;
            while at < self.proposers.len() {
                let state = self.journal.state();
                let so_far = SoFar {
                    space: self.space,
                    named: &state.named,
                    elites: &state.elites(),
                    incumbents: &state.incumbents,
                    cases: &self.task.cases,
                };
                let by = self.proposers[at].name();
                match self.proposers[at].propose(want, &so_far) {
                    Ok(candidates) => {
                        for candidate in candidates {
                            silent = false;
                            self.consider(candidate, by, &mut batch)?;
                        }
                        at += 1;
                    }
                    Err(why) => {
                        (self.note)(&format!("the {by} proposer is not asked any more: {why}"));
                        drop(self.proposers.remove(at));
                    }
                }
            }
            if silent {
                break;
            }
        }
        Ok(batch)
    }

    /// Writes a candidate down and puts it to the static gate.
    fn consider(&mut self, candidate: String, by: &str, batch: &mut Vec<Checked>) -> Result<(), String> {
        self.journal.write(&Event::Named { candidate: candidate.clone(), by: by.into() })?;
        let (mut cases, mut refused) = (Vec::new(), None);
        for case in 0..self.task.cases.len() {
            match self.gates.check(&candidate, case) {
                Ok(()) => cases.push(case),
                Err(why) => refused = refused.or(Some(why)),
            }
        }
        if cases.len() >= self.task.rule.cases {
            batch.push((candidate, cases));
            return Ok(());
        }
        let why = refused.unwrap_or_else(|| "it fits too few cases".into());
        self.journal.write(&Event::Refused { candidate, gate: Gate::Static, why })
    }

    fn write_prepared(&mut self, prepared: Vec<(String, Prepared)>) -> Result<Vec<Ready>, String> {
        let mut all = Vec::new();
        for (candidate, prepared) in prepared {
            let event = match prepared {
                Prepared::Refused(Refusal { gate, why }) => Event::Refused { candidate, gate, why },
                Prepared::Duplicate { of, identity } => Event::Duplicate { candidate, of, identity },
                Prepared::Ready { identity, ready } => {
                    all.push(ready);
                    Event::Passed { candidate, identity }
                }
            };
            self.journal.write(&event)?;
        }
        all.sort_by(|a, b| a.guess.unwrap_or(f64::MAX).total_cmp(&b.guess.unwrap_or(f64::MAX)));
        Ok(all)
    }

    /// Parity, the halving, and the challenges of one generation. Candidates for which time runs out stay open.
    fn compete(&mut self, ready: &[Ready], ends: Instant) -> Result<(), String> {
        let mut alive = Vec::new();
        for (done, one) in ready.iter().enumerate() {
            if self.is_over(ends) {
                break;
            }
            self.show(&format!("parity {} of {}", done + 1, ready.len()), ends);
            self.journal.write(&Event::Begun { candidate: one.candidate.clone() })?;
            if self.is_right(&one.candidate, &one.cases, 0)? {
                alive.push(one);
            }
        }
        for rung in 0..self.settings.rungs {
            if alive.is_empty() || self.is_over(ends) {
                return Ok(());
            }
            self.show(
                &format!("rung {} of {}: {} candidates", rung + 1, self.settings.rungs, alive.len()),
                ends,
            );
            let mut standings = self.rung(&alive, rung, ends)?;
            if self.is_over(ends) {
                return Ok(());
            }
            let mut ranked: Vec<(&Ready, (f64, f64), bool)> = Vec::new();
            for one in alive {
                let Some(standing) = standings.remove(&one.candidate) else { continue };
                // By the lower end of the interval: otherwise noise could rank an equal above a true gain.
                let sure: Vec<f64> = standing.iter().map(|standing| standing.interval.low).collect();
                let speed_ups: Vec<f64> = standing.iter().map(|standing| standing.speed_up).collect();
                let score = self.task.rule.score(&sure).zip(self.task.rule.score(&speed_ups));
                let wins = self.task.rule.accepts(&standing).is_some();
                let candidate = one.candidate.clone();
                self.journal.write(&Event::Timed {
                    candidate: candidate.clone(),
                    rung,
                    standings: standing,
                })?;
                match score {
                    Some(score) => ranked.push((one, score, wins)),
                    None => self.journal.write(&Event::Left { candidate })?,
                }
            }
            ranked.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
            let last = rung + 1 == self.settings.rungs;
            let keep = if last { ranked.len() } else { ranked.len().div_ceil(2) };
            alive = Vec::new();
            for (place, (one, (_, score), wins)) in ranked.into_iter().enumerate() {
                let promising = !last || score >= 1.0 + self.task.rule.gain / 2.0;
                // A candidate that already wins by the rule gets its challenge, even if others are better.
                if wins || (place < keep && promising) {
                    alive.push(one);
                } else {
                    self.journal.write(&Event::Left { candidate: one.candidate.clone() })?;
                }
            }
        }
        for one in alive {
            if self.is_over(ends) {
                break;
            }
            self.challenge(one, ends)?;
        }
        Ok(())
    }

    fn is_over(&self, ends: Instant) -> bool {
        (self.stop)() || Instant::now() >= ends
    }

    /// Whether a candidate's results are right; if not, that is written down.
    fn is_right(&mut self, candidate: &str, cases: &[usize], data: u64) -> Result<bool, String> {
        for &case in cases {
            if let Err(trouble) = self.device.parity(candidate, case, data) {
                self.write_trouble(candidate, Gate::Parity, case, &trouble)?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn write_trouble(
        &mut self,
        candidate: &str,
        gate: Gate,
        case: usize,
        trouble: &Trouble,
    ) -> Result<(), String> {
        let why = format!("{}: {}", self.task.cases[case], trouble.why());
        let candidate = candidate.to_string();
        self.journal.write(&match trouble {
            Trouble::Lost(_) => Event::Quarantined { candidate, gate, why },
            Trouble::Wrong(_) | Trouble::Refused(_) => Event::Refused { candidate, gate, why },
        })
    }

    /// Times candidates beside the incumbents; those that fail are recorded and left out.
    fn rung(
        &mut self,
        alive: &[&Ready],
        rung: usize,
        ends: Instant,
    ) -> Result<BTreeMap<String, Vec<Standing>>, String> {
        let effort = self.effort(Some(self.settings.rounds << rung), Duration::ZERO);
        let mut standings: BTreeMap<String, Vec<Standing>> =
            alive.iter().map(|one| (one.candidate.clone(), Vec::new())).collect();
        for case in 0..self.task.cases.len() {
            let there: Vec<&&Ready> = alive.iter().filter(|one| one.cases.contains(&case)).collect();
            for group in there.chunks(RACERS) {
                let racing: Vec<&str> = group
                    .iter()
                    .map(|one| one.candidate.as_str())
                    .filter(|candidate| standings.contains_key(*candidate))
                    .collect();
                if racing.is_empty() || self.is_over(ends) {
                    continue;
                }
                for (candidate, standing) in self.race(&racing, case, 0, &effort)? {
                    match standing {
                        Ok(Some(standing)) => {
                            standings.entry(candidate).and_modify(|all| all.push(standing));
                        }
                        Ok(None) => {}
                        Err(trouble) => {
                            standings.remove(&candidate);
                            self.write_trouble(&candidate, Gate::Timing, case, &trouble)?;
                        }
                    }
                }
            }
        }
        Ok(standings)
    }

    fn effort(&self, rounds: Option<usize>, budget: Duration) -> Effort {
        let Settings { sample, .. } = self.settings;
        Effort { rounds, budget, margin: self.task.rule.gain, settle: Duration::ZERO, sample }
    }

    /// One race beside the incumbent of a case.
    #[allow(clippy::type_complexity)]
    fn race(
        &mut self,
        candidates: &[&str],
        case: usize,
        data: u64,
        effort: &Effort,
    ) -> Result<Vec<(String, Result<Option<Standing>, Trouble>)>, String> {
        let incumbent = self.journal.state().incumbents[case].clone();
        let mut contenders = vec![incumbent.as_str()];
        contenders.extend(candidates);
        let mut times = self.device.race(&contenders, case, data, effort, self.stop).into_iter();
        let ours = times.next().ok_or("nobody was timed")?;
        let ours = ours.map_err(|trouble| {
            format!("the incumbent of {} cannot be timed: {}", self.task.cases[case], trouble.why())
        })?;
        let stand =
            |theirs: Result<Vec<f64>, Trouble>| theirs.map(|theirs| Standing::of(case, &ours, &theirs));
        Ok(candidates.iter().map(ToString::to_string).zip(times.map(stand)).collect())
    }

    /// A candidate against the incumbents: on the search's data, and, if it wins there, on fresh ones.
    fn challenge(&mut self, one: &Ready, ends: Instant) -> Result<(), String> {
        let mut cases = one.cases.clone();
        let fresh = 1 + self.journal.state().records.len() as u64;
        for data in [0, fresh] {
            self.show(if data == 0 { "a challenge" } else { "a confirmation on fresh data" }, ends);
            if data != 0 && !self.is_right(&one.candidate, &cases, data)? {
                return Ok(());
            }
            let effort = self.effort(None, self.settings.challenge);
            let mut standings = Vec::new();
            for &case in &cases {
                for (candidate, standing) in self.race(&[&one.candidate], case, data, &effort)? {
                    match standing {
                        Ok(standing) => standings.extend(standing),
                        Err(trouble) => {
                            return self.write_trouble(&candidate, Gate::Timing, case, &trouble);
                        }
                    }
                }
            }
            if (self.stop)() {
                return Ok(());
            }
            let won = self.task.rule.accepts(&standings);
            self.journal.write(&Event::Challenged {
                candidate: one.candidate.clone(),
                data,
                standings: standings.clone(),
                accepted: won.is_some(),
            })?;
            let Some(won) = won else { return Ok(()) };
            if data != 0 {
                standings.retain(|standing| won.contains(&standing.case));
                let candidate = one.candidate.clone();
                let praise = self.praise(&candidate, &standings);
                (self.note)(&praise);
                return self.journal.write(&Event::Accepted { candidate, standings });
            }
            cases = won;
        }
        Ok(())
    }

    fn praise(&self, candidate: &str, standings: &[Standing]) -> String {
        let one = |standing: &Standing| {
            let Standing { case, speed_up, interval, .. } = standing;
            format!(
                "{} {:+.1} % [{:+.1}, {:+.1}]",
                self.task.cases[*case],
                100.0 * (speed_up - 1.0),
                100.0 * (interval.low - 1.0),
                100.0 * (interval.high - 1.0)
            )
        };
        let standings: Vec<String> = standings.iter().map(one).collect();
        format!("accepted  {candidate}\n          {}", standings.join(", "))
    }
}
