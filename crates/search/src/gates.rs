//! The gates that a candidate passes, cheapest first.

use serde::{Deserialize, Serialize};

/// What a candidate must pass. A cheap gate never comes after an expensive one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Gate {
    /// Shared memory, registers, threads, from the knobs alone.
    Static,
    /// It assembles without spills and without serialised `wgmma`, and its machine code is new.
    Assembler,
    /// Right on small cases in the simulator, with no findings.
    Simulator,
    /// Right on the device, by the oracle.
    Parity,
    /// Faster.
    Timing,
}

impl Gate {
    /// In the order in which they stand.
    pub const ALL: [Gate; 5] = [Gate::Static, Gate::Assembler, Gate::Simulator, Gate::Parity, Gate::Timing];

    /// The name in tables and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Gate::Static => "static",
            Gate::Assembler => "assembler",
            Gate::Simulator => "simulator",
            Gate::Parity => "parity",
            Gate::Timing => "timing",
        }
    }
}

impl std::fmt::Display for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// A candidate that did not pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// Which gate.
    pub gate: Gate,
    /// Why.
    pub why: String,
}

/// The gates before the device. They run in parallel, on many threads.
pub trait Gates: Sync {
    /// Whether the knobs alone let a candidate run a case.
    fn check(&self, candidate: &str, case: usize) -> Result<(), String>;

    /// Assembles a candidate for a case. Returns its identity: the hash of its machine code and of its launch.
    fn assemble(&self, candidate: &str, case: usize) -> Result<String, String>;

    /// Runs a candidate in the simulator, on small problems of a case's kind.
    fn simulate(&self, candidate: &str, case: usize) -> Result<(), String>;

    /// A guess at what a simulated candidate costs, to try promising ones first; nothing else depends on it.
    fn guess(&self, _candidate: &str) -> Option<f64> {
        None
    }

    /// Whether candidates can pass these gates while others are on the clock.
    fn can_overlap(&self) -> bool;
}
