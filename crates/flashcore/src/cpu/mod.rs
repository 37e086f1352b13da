//! The CPU engine: fused online-softmax attention.
//!
//! One algorithm, written over a small vector trait (`simd`), compiled for each instruction set and chosen at run
//! time. A call is cut into tasks of rows and keys (`plan`) that threads (`helpers`, `openmp`) take one by one (`pool`, `queue`).
//! A task puts its queries into the lanes of vectors (`panel`, `lanes`) and goes through blocks of keys (`cut`, `block`):
//! scores by a register-tiled micro-kernel (`tile`), softmax (`column`), outputs by another one (`attend`), which both ask
//! for what comes next in passing (`ahead`). Few rows against many keys are another matter, that of reading K and V once
//! (`stream`). Where the CPU multiplies whole matrices of bf16, those do both products (`matrix`). The gradients are computed
//! by the same micro-kernels (`backward`).
//!
//! A step of decoding writes its keys into the cache first (`append`).
//!
//! The same call gives the same bits every time and on any number of threads; instruction sets differ in the last
//! ones. Scores and sums are f32. A row that comes out infinite or NaN is computed again in f64 (`wide`): its scores or
//! sums may have left f32 where the truth has not. Not noticed is a score that only its partial sums take to −∞, in a
//! row with others that are finite; plain attention in f32 loses such a key too.

mod ahead;
mod append;
mod attend;
mod backward;
mod block;
mod column;
mod cut;
mod finish;
mod helpers;
mod isa;
mod job;
mod lanes;
mod math;
#[cfg(target_arch = "x86_64")]
mod matrix;
mod merge;
mod openmp;
mod panel;
mod plan;
mod pool;
mod queue;
mod rates;
mod rows;
mod schedule;
mod scoring;
mod scratch;
mod simd;
mod stream;
#[cfg(test)]
mod tests;
mod tile;
mod visible;
mod wide;

use std::sync::Arc;

pub use isa::{Isa, available};
#[doc(hidden)]
pub use rates::{Work, exp_rate, fma_peak, read_bandwidth};
pub use schedule::Schedule;

use crate::{Error, Result, contract::Call, descales};

/// The environment variable that chooses the instruction set.
pub const ISA_VARIABLE: &str = "FLASHCORE_CPU";

/// The CPU engine: an instruction set and a schedule.
///
/// ```
/// use flashcore::{Attention, Device, Tensor, cpu};
///
/// let engine = cpu::Engine::new().with_isa(cpu::Isa::Portable)?.with_schedule("threads=1".parse()?);
/// let data = [1.0_f32; 4];
/// let x = Tensor::new(&data, &[1, 1, 2, 2])?;
/// let out = Attention::new().run(&Device::cpu_with(engine), &x, &x, &x)?;
/// assert_eq!(out.o.to_f32(), data);
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Engine {
    isa: Isa,
    why: Arc<str>,
    schedule: Schedule,
    /// Threads of its own, where another number of them than rayon's is asked for.
    helpers: Option<Arc<helpers::Helpers>>,
    /// Whether an OpenMP team may help instead, where no number of threads is asked for.
    openmp: bool,
}

impl Engine {
    /// With the widest instructions that this CPU has, or those that the environment asks for
    /// ([`ISA_VARIABLE`]).
    pub fn new() -> Self {
        let (isa, why) = isa::choose(std::env::var(ISA_VARIABLE).ok().as_deref());
        Self { isa, why: why.into(), schedule: Schedule::default(), helpers: None, openmp: false }
    }

    /// With the given instructions, or what is wrong with them.
    pub fn with_isa(self, isa: Isa) -> Result<Self> {
        if isa.is_available() {
            Ok(Self { isa, why: "it was asked for".into(), ..self })
        } else {
            Err(Error::Unsupported {
                device: "this CPU".into(),
                what: isa.to_string(),
                possible: isa::names(&available()),
                source: None,
            })
        }
    }

    /// With the given knobs; those at 0 keep their defaults.
    pub fn with_schedule(self, schedule: Schedule) -> Self {
        let shared = [0, rayon::current_num_threads()].contains(&schedule.threads);
        let helpers = if shared { None } else { helpers::Helpers::new(schedule.threads).map(Arc::new) };
        Self { schedule, helpers, ..self }
    }

    /// Where the program has an OpenMP runtime, as every program with torch has, the calling thread's team helps, however
    /// many it is, unless the schedule names a number of threads. Such a team spins between its own calls, so that other
    /// threads would come late. A thread that has no team yet gets one.
    pub fn with_openmp_team(self) -> Self {
        Self { openmp: true, ..self }
    }

    /// The instructions.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Why these instructions.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// The knobs for given head dims.
    pub fn schedule(&self, head_dim: usize, head_dim_v: usize) -> Schedule {
        self.schedule.or(Schedule::for_head_dims(head_dim, head_dim_v))
    }

    /// Computes a checked call.
    pub(crate) fn run(&self, call: &Call<'_>) -> Result<()> {
        if let Some(quantiser) = call.problem.quantise {
            return quantiser.run(call, |call| self.descaled(call));
        }
        append::run(call, |call| self.descaled(call))
    }

    /// Computes a call once blocks of keys have no descales of their own.
    fn descaled(&self, call: &Call<'_>) -> Result<()> {
        if call.problem.descale_keys.is_some() {
            return descales::applied(call, |call| self.compute(call));
        }
        self.compute(call);
        Ok(())
    }

    fn compute(&self, call: &Call<'_>) {
        let schedule = self.schedule(call.problem.head_dim, call.problem.head_dim_v);
        let helpers = match &self.helpers {
            Some(own) => helpers::Source::Own(own),
            None if self.openmp && self.schedule.threads == 0 => helpers::Source::OpenMp,
            None => helpers::Source::Any,
        };
        pool::run(self.isa, &schedule, helpers, call);
    }
}

impl Default for Engine {
    fn default() -> Self {
        Self::new()
    }
}

/// As `avx512, 2 threads`.
impl std::fmt::Display for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let threads = self.schedule(64, 64).threads;
        write!(f, "{}, {threads} thread{}", self.isa, if threads == 1 { "" } else { "s" })
    }
}
