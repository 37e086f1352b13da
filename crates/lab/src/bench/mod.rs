//! How fast, how right, and against whom.
//!
//! - [`cells`] says what is timed, [`cpu`] and [`gpu`] time it, each by its clock, and [`outcome`] is what a cell gave.
//! - [`itself`] compares a thing with itself, to see how often the procedure is wrong.

pub mod cells;
pub mod cpu;
pub mod gpu;
pub mod itself;
pub mod outcome;

use std::time::Duration;

use serde::Serialize;

use self::cells::Member;
use self::gpu::{Cache, Facts, Regime};
use self::itself::{AgainstItself, Repetitions};
use self::outcome::Outcome;
use crate::ceilings::Ceilings;
use crate::evidence::schemas;
use crate::gpu::pool::Stored;
use crate::peers::TorchFacts;

/// Whose time it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Clock {
    /// Time that a caller waits; used on a CPU.
    Call,
    /// Device time; used on a GPU.
    Kernel,
}

impl Clock {
    /// The schema of reports by this clock.
    pub fn schema(self) -> &'static str {
        match self {
            Clock::Call => schemas::BENCH,
            Clock::Kernel => schemas::BENCH_GPU,
        }
    }
}

/// A device that cells are timed on, by its clock.
pub trait Bench {
    /// The clock that verdicts rest on.
    fn clock(&self) -> Clock;

    /// What a report says about the machine.
    fn machine(&self) -> Machine<'_>;

    /// The peers that ours is timed against.
    fn peers(&self) -> Vec<String>;

    /// Why there is no torch.
    fn no_torch(&self) -> Option<&str>;

    /// The ceilings that times are compared with; absent where none were kept.
    fn ceilings(&self) -> Option<&Ceilings>;

    /// Measures the machine's ceilings; times are compared with them from now on.
    fn measure_ceilings(&mut self, created: &str) -> Result<&Ceilings, String>;

    /// Times one cell within about `budget`. `progress` is told what is going on and the share of it that is done.
    fn run(
        &mut self,
        member: &Member,
        budget: Duration,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(&str, f64),
    ) -> Result<Outcome, String>;

    /// Compares ours with itself, each time by the whole procedure within about `budget`. Stops early, with what there
    /// is, when `stop` says so.
    fn against_itself(
        &self,
        member: &Member,
        repetitions: Repetitions,
        budget: Duration,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<AgainstItself, String>;
}

/// What a report says about the machine that cells were timed on.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Machine<'a> {
    /// A CPU.
    Cpu {
        /// The engine, as `cpu (avx2, 2 threads)`.
        device: String,
        /// Threads per contender.
        threads: usize,
        /// The torch that it is compared with.
        torch: Option<TorchFacts>,
    },
    /// A GPU.
    Gpu {
        /// What calls find in the L2 cache.
        cache: Cache,
        /// How long a sample is.
        regime: Regime,
        /// The GPU, the drivers and the versions.
        gpu: &'a Facts,
        /// The inputs.
        inputs: Vec<&'a Stored>,
        /// How often a worker was lost and started again.
        lost_workers: usize,
    },
}
