//! Where candidates are computed and timed: worker processes with a watchdog.
//!
//! A candidate that crashes or hangs takes its worker with it and nothing else: the worker is started again for the
//! next one.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use flashcore::{DType, Problem};

pub use flashcore_search::device::{Device, Trouble};

use crate::bench::gpu::{OnClock, OnGpu, largest_tensor};
use crate::bench::outcome::judged_rows;
use crate::gpu::host::Host;
use crate::gpu::pool::{Pool, Stored};
use crate::gpu::protocol::{Asked, Request};
use crate::gpu::worker::SCHEDULE;
use crate::rule::{Row, Yardstick};
use crate::timing::{Contender, Effort, measure};

/// Inputs of one number and dtype, in memory and on disk.
struct Drawn {
    data: u64,
    dtype: DType,
    pool: Pool,
    stored: Stored,
    folder: tempfile::TempDir,
}

/// A device behind worker processes.
pub struct Workers {
    host: RefCell<Host>,
    problems: Vec<Problem>,
    sets: Vec<usize>,
    seed: u64,
    drawn: Vec<Drawn>,
    truths: BTreeMap<(usize, u64), (Vec<Row>, Yardstick)>,
}

impl Workers {
    /// For some problems. `sets` says, for each, how many sets of tensors the calls rotate over.
    pub fn new(host: Host, problems: Vec<Problem>, sets: Vec<usize>, seed: u64) -> Self {
        Self { host: RefCell::new(host), problems, sets, seed, drawn: Vec::new(), truths: BTreeMap::new() }
    }

    /// How often a worker was lost.
    pub fn lost(&self) -> usize {
        self.host.borrow().lost()
    }

    /// The inputs of a number for a dtype, large enough for every case of it.
    fn draw(&mut self, dtype: DType, data: u64) -> Result<usize, String> {
        let found = |drawn: &Drawn| drawn.data == data && drawn.dtype == dtype;
        if let Some(at) = self.drawn.iter().position(found) {
            return Ok(at);
        }
        // Fresh inputs are used once; those of the search stay.
        self.drawn.retain(|drawn| drawn.data == 0 || drawn.data == data);
        self.truths.retain(|&(_, of), _| of == 0 || of == data);
        let of_dtype = self.problems.iter().filter(|problem| problem.dtype == dtype);
        let most = of_dtype.map(largest_tensor).max().unwrap_or(1);
        let pool = Pool::draw(dtype, most, self.seed.wrapping_add(data));
        let folder = tempfile::tempdir().map_err(|error| format!("no folder for inputs: {error}"))?;
        let stored = pool.store(folder.path())?;
        self.drawn.push(Drawn { data, dtype, pool, stored, folder });
        Ok(self.drawn.len() - 1)
    }

    fn judge(&mut self, candidate: &str, case: usize, data: u64) -> Result<(), Trouble> {
        let problem = self.problems[case];
        let at = self.draw(problem.dtype, data).map_err(Trouble::Refused)?;
        let drawn = &self.drawn[at];
        let (rows, yardstick) = match self.truths.entry((case, data)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let rows = judged_rows(&problem);
                let yardstick = drawn.pool.yardstick(&problem, &rows);
                let yardstick =
                    yardstick.ok_or_else(|| Trouble::Refused("there is no row to judge".into()))?;
                place.insert((rows, yardstick))
            }
        };
        let cell = OnGpu { stored: &drawn.stored, problem: Asked::of(&problem), sets: self.sets[case] };
        let who = format!("{SCHEDULE}{candidate}");
        let lost = self.host.borrow().lost();
        let trouble = |why: String| {
            if self.host.borrow().lost() > lost { Trouble::Lost(why) } else { Trouble::Refused(why) }
        };
        let judgement =
            cell.judge(&self.host, &who, drawn.folder.path(), rows, yardstick).map_err(trouble)?;
        if !judgement.passed() {
            return Err(Trouble::Wrong(format!("it breaks the rule: {judgement:?}")));
        }
        let check = cell.ask(&self.host, &Request::Check { who }).map_err(trouble)?;
        match check["same"].as_bool() {
            Some(true) => Ok(()),
            _ => Err(Trouble::Wrong("a second run gave other bits".into())),
        }
    }
}

/// A contender that notices when its worker is lost.
struct Watched<'a> {
    on_clock: OnClock<'a>,
    lost: &'a Cell<bool>,
}

impl Contender for Watched<'_> {
    fn name(&self) -> String {
        self.on_clock.name()
    }

    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String> {
        let before = self.on_clock.host.borrow().lost();
        let result = self.on_clock.sample(warm, calls);
        if self.on_clock.host.borrow().lost() > before {
            self.lost.set(true);
        }
        result
    }
}

impl Device for Workers {
    fn parity(&mut self, candidate: &str, case: usize, data: u64) -> Result<(), Trouble> {
        self.judge(candidate, case, data)
    }

    fn race(
        &mut self,
        contenders: &[&str],
        case: usize,
        data: u64,
        effort: &Effort,
        stop: &dyn Fn() -> bool,
    ) -> Vec<Result<Vec<f64>, Trouble>> {
        let problem = self.problems[case];
        let at = match self.draw(problem.dtype, data) {
            Ok(at) => at,
            Err(why) => return contenders.iter().map(|_| Err(Trouble::Refused(why.clone()))).collect(),
        };
        let stored = &self.drawn[at].stored;
        let cell = OnGpu { stored, problem: Asked::of(&problem), sets: self.sets[case] };
        let names: Vec<String> = contenders.iter().map(|who| format!("{SCHEDULE}{who}")).collect();
        let lost: Vec<Cell<bool>> = names.iter().map(|_| Cell::new(false)).collect();
        let mut racers: Vec<Box<dyn Contender + '_>> = Vec::new();
        for (name, lost) in names.iter().zip(&lost) {
            let on_clock = OnClock::new(&cell, &self.host, name);
            racers.push(Box::new(Watched { on_clock, lost }));
        }
        let samples = measure(&mut racers, effort, stop, &mut |_, _| {});
        drop(racers);
        samples
            .into_iter()
            .zip(lost)
            .map(|(samples, lost)| match samples.failure {
                Some(why) if lost.get() => Err(Trouble::Lost(why)),
                Some(why) => Err(Trouble::Refused(why)),
                None => Ok(samples.times),
            })
            .collect()
    }
}
