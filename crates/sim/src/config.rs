//! How a launch is simulated.

use std::fmt;
use std::sync::Arc;

/// When the effects of asynchronous operations happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum AsyncMode {
    /// As late as the waits allow: at the wait that observes them. Until then the destination holds NaN.
    #[default]
    Late,
    /// As early as possible: when they are started.
    Early,
    /// At moments chosen by this seed.
    Random(u64),
}

impl AsyncMode {
    /// What it adds to the seed of the random choices.
    pub(crate) fn salt(self) -> u64 {
        match self {
            AsyncMode::Late | AsyncMode::Early => 0,
            AsyncMode::Random(seed) => seed.wrapping_mul(0xA24B_AED4_963E_E407) | 1,
        }
    }
}

/// What is checked. All of it by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Checks {
    /// Registers that are read without a value.
    pub registers: bool,
    /// Races and uninitialised reads in shared memory.
    pub shared: bool,
    /// Races and uninitialised reads in global memory.
    pub global: bool,
    /// Bank conflicts and sectors.
    pub costs: bool,
}

impl Checks {
    /// Everything.
    pub const ALL: Checks = Checks { registers: true, shared: true, global: true, costs: true };
    /// Only what a run cannot do without: bounds, alignment, deadlocks.
    pub const NONE: Checks = Checks { registers: false, shared: false, global: false, costs: false };
}

/// How tensor cores add up products of fp8. Sums of products of 16-bit elements are always in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Sums {
    /// As Ada's `mma.sync` and Hopper's `wgmma` do: the products of one instruction and the accumulator are cut off this
    /// many bits from the highest bit of the largest, and so is their sum. Hardware has 14. Long sums drift; what is
    /// added to an f32 register every few instructions does not.
    Short {
        /// The bits, from 4 to 17.
        bits: u8,
    },
    /// One product after the other, each addition rounded to the nearest f32: more than any of these GPUs does.
    F32,
}

impl Default for Fp8Sums {
    /// As the hardware does: a kernel that relies on more is wrong.
    fn default() -> Self {
        Fp8Sums::Short { bits: 14 }
    }
}

/// Ends launches from outside, as Ctrl-C does. It is polled every few thousand warp instructions.
#[derive(Clone, Default)]
pub struct Stop(Option<Arc<dyn Fn() -> bool + Send + Sync>>);

impl Stop {
    /// Ends a launch as soon as `asked` says so.
    pub fn when(asked: impl Fn() -> bool + Send + Sync + 'static) -> Stop {
        Stop(Some(Arc::new(asked)))
    }

    /// Whether launches are to end now.
    pub(crate) fn asked(&self) -> bool {
        self.0.as_ref().is_some_and(|asked| asked())
    }
}

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Stop::when(..)" } else { "Stop::default()" })
    }
}

/// How a launch is simulated.
#[derive(Clone, Debug)]
pub struct Config {
    /// When asynchronous effects happen.
    pub async_mode: AsyncMode,
    /// Which interleaving of warps is run. Seed 0 runs each warp until it waits, in order; any other seed
    /// switches between warps at random moments.
    pub seed: u64,
    /// What is checked.
    pub checks: Checks,
    /// How products of fp8 are added up.
    pub fp8_sums: Fp8Sums,
    /// Host threads; 0 takes as many as the machine has cores. With one thread a launch is reproducible to the
    /// last bit; with several, only the order in which blocks reach the same atomic may differ.
    pub threads: usize,
    /// Warp instructions that a launch may execute; one that needs more is taken to hang. Setting up a block counts,
    /// too: one instruction per register of a warp, and one per 128 bytes of shared memory. So a grid that is too large
    /// for the budget is refused before it takes any time or memory.
    pub budget: u64,
    /// Ends a launch early.
    pub stop: Stop,
    /// How many different findings end a launch.
    pub max_findings: usize,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            async_mode: AsyncMode::Late,
            seed: 0,
            checks: Checks::ALL,
            fp8_sums: Fp8Sums::default(),
            threads: 0,
            budget: 1_000_000_000,
            stop: Stop::default(),
            max_findings: 1000,
        }
    }
}
