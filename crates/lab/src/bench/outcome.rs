//! The results of a cell, and summaries over many cells. Everything is measured, derived from measurements, or absent.
//!
//! One set of types for two clocks: the call clock of a CPU and the kernel clock of a GPU. What only one of them has is
//! in [`Rates`], [`Details`] and [`Conditions`].

use flashcore::cuda::driver::GpuState;
use flashcore::plan::Kernel;
use flashcore::{Mask, Pass, Problem, Queries};
use serde::Serialize;
use serde_json::Value;

use super::cells::{Cell, DENSE, Member, WIDE};
use crate::ceilings::{Ceilings, Roofline, Work};
use crate::energy::Energy;
use crate::gpu::cublas::CUBLAS;
use crate::gpu::sequences::Sequences;
use crate::gpu::worker::{KERNEL, PLANNER, SCHEDULE};
use crate::operands::sample_rows;
use crate::physics::{self, Rate};
use crate::rule::{Judgement, Row};
use crate::stats::{self, Interval, Verdict};
use crate::timing::{Orders, Samples};

/// The seed of every benchmark's inputs.
pub(crate) const SEED: u64 = 2026;
/// Multiply-adds that the oracle may compute for one cell; larger problems are judged by sampled rows.
const ORACLE_WORK: f64 = 3e8;

/// As many rows as the oracle can compute in reasonable time, spread over all heads.
pub(crate) fn judged_rows(problem: &Problem) -> Vec<Row> {
    sample_rows(problem, most_rows(problem), SEED)
}

/// How many rows that is.
pub(crate) fn most_rows(problem: &Problem) -> usize {
    let work_of_row = problem.len_k as f64 * (problem.head_dim + problem.head_dim_v) as f64;
    (ORACLE_WORK / work_of_row) as usize
}

/// Rows of a problem's output.
pub(crate) fn rows(problem: &Problem) -> usize {
    let queries = match problem.queries {
        Queries::Dense => problem.batch * problem.len_q,
        Queries::Packed { total } => total,
    };
    problem.heads_q * queries
}

/// Peers that write their scores and probabilities to memory.
const UNFUSED: [&str; 2] = ["math", CUBLAS];

/// Whether a contender is ours.
pub(crate) fn is_ours(name: &str) -> bool {
    [PLANNER, DENSE, WIDE].contains(&name) || name.starts_with(KERNEL) || name.starts_with(SCHEDULE)
}

/// The limits that rates are compared with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limits {
    /// Of a CPU, measured in turns with the contenders.
    Cpu {
        /// Multiply-adds, in GFLOP/s.
        fma_gflops: f64,
        /// Reads in GB/s; only where memory is the limit.
        read_gbytes: Option<f64>,
    },
    /// Of a GPU.
    Gpu {
        /// The dense peak of the tensor cores in TFLOP/s, where the generation is known.
        peak_tflops: Option<f64>,
        /// The measured rate of a matrix product.
        matmul_tflops: Option<f64>,
    },
}

/// The rate of the operations by the median, causal counted half, and its share of the limits.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Rates {
    /// By the call clock of a CPU.
    Cpu {
        /// Floating-point operations per second, in units of 1e9.
        gflops: Option<f64>,
        /// That as a share of the measured FMA peak.
        fma_peak_share: Option<f64>,
        /// The rate of the bytes as a share of the measured read bandwidth; only where memory is the limit.
        bandwidth_share: Option<f64>,
    },
    /// By the kernel clock of a GPU.
    Gpu {
        /// Floating-point operations per second, in units of 1e12.
        tflops: Option<f64>,
        /// That as a share of the chip's dense peak.
        peak_share: Option<f64>,
        /// That as a share of the measured rate of a matrix product.
        matmul_share: Option<f64>,
    },
}

impl Rates {
    /// The rate in GFLOP/s on a CPU, in TFLOP/s on a GPU.
    pub fn rate(&self) -> Option<f64> {
        match *self {
            Rates::Cpu { gflops, .. } => gflops,
            Rates::Gpu { tflops, .. } => tflops,
        }
    }

    /// The rate as a share of the peak of the arithmetic.
    pub fn peak_share(&self) -> Option<f64> {
        match *self {
            Rates::Cpu { fma_peak_share, .. } => fma_peak_share,
            Rates::Gpu { peak_share, .. } => peak_share,
        }
    }

    /// Whether this is faster than a machine with these limits can be.
    fn are_impossible(&self) -> bool {
        let above = |share, slack| physics::rate(share, Some(1.0), slack) == Rate::Impossible;
        match *self {
            Rates::Cpu { fma_peak_share, bandwidth_share, .. } => {
                above(fma_peak_share, physics::ABOVE_MEASURED)
                    || above(bandwidth_share, physics::ABOVE_MEASURED)
            }
            Rates::Gpu { peak_share, .. } => above(peak_share, physics::ABOVE_PEAK),
        }
    }
}

/// Times by the call clock of a GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallClock {
    /// Microseconds from an event before the call to one after it.
    pub call_us: Vec<f64>,
    /// The host's own microseconds for each of these calls.
    pub host_us: Vec<f64>,
    /// Their median.
    pub p50_us: Option<f64>,
    /// Their 90 % quantile.
    pub p90_us: Option<f64>,
    /// Their minimum.
    pub min_us: Option<f64>,
    /// The median of the host's own time for a call, in microseconds.
    pub host_p50_us: Option<f64>,
    /// Its 90 % quantile.
    pub host_p90_us: Option<f64>,
}

impl CallClock {
    /// Summarises samples of both clocks.
    pub(crate) fn of(call_us: Vec<f64>, host_us: Vec<f64>) -> Self {
        Self {
            p50_us: stats::median(&call_us),
            p90_us: stats::quantile(&call_us, 0.9),
            min_us: stats::quantile(&call_us, 0.0),
            host_p50_us: stats::median(&host_us),
            host_p90_us: stats::quantile(&host_us, 0.9),
            call_us,
            host_us,
        }
    }
}

/// What only a GPU's worker reports about a contender.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Details {
    /// What was planned, for ours: kernel, schedule, grid, registers, the hash of its PTX.
    pub plan: Option<Value>,
    /// Times by the call clock.
    pub call: Option<CallClock>,
    /// Whether a replayed call gave the bits of a direct one; ours only.
    pub replay_is_same: Option<bool>,
    /// What its calls used, in sustained samples.
    pub energy: Option<Energy>,
}

/// What was measured of one contender in a cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Its name.
    pub name: String,
    /// Calls in one sample.
    pub calls_per_sample: u32,
    /// Microseconds per call by the run's clock, one sample per round.
    pub samples_us: Vec<f64>,
    /// Their median.
    pub p50_us: Option<f64>,
    /// Their 90 % quantile.
    pub p90_us: Option<f64>,
    /// Their minimum.
    pub min_us: Option<f64>,
    /// The 95 % bootstrap interval of the median.
    pub median_interval_us: Option<Interval>,
    /// Rates by the median.
    #[serde(flatten)]
    pub rates: Rates,
    /// Bytes that must move per second by the median, in units of 1e9.
    pub gbytes: Option<f64>,
    /// The time compared with the ceilings kept for this machine; absent where none were.
    pub roofline: Option<Roofline>,
    /// The rule's judgement of its output.
    pub error: Option<Judgement>,
    /// What only a GPU's worker reports.
    #[serde(flatten)]
    pub details: Option<Details>,
    /// Why it has no result, or left before the end.
    pub failure: Option<String>,
}

impl Measured {
    /// Summarises samples. A contender that left before the end has samples, but no summary of them.
    pub(crate) fn new(
        samples: Samples,
        error: Option<Judgement>,
        work: &Work,
        limits: &Limits,
        ceilings: Option<&Ceilings>,
    ) -> Self {
        let times = if samples.failure.is_none() { &samples.times[..] } else { &[] };
        let p50 = stats::median(times);
        let share = |rate: Option<f64>, limit: Option<f64>| rate.zip(limit).map(|(rate, limit)| rate / limit);
        let gbytes = p50.map(|time| work.bytes / time / 1e3);
        let twice = |rate: Option<f64>| rate.map(|rate| work.at_once * rate);
        let (rates, details) = match *limits {
            Limits::Cpu { fma_gflops, read_gbytes } => {
                let gflops = p50.map(|time| work.flops / time / 1e3);
                let fma_peak_share = share(gflops, Some(fma_gflops));
                (Rates::Cpu { gflops, fma_peak_share, bandwidth_share: share(gbytes, read_gbytes) }, None)
            }
            Limits::Gpu { peak_tflops, matmul_tflops } => {
                let tflops = p50.map(|time| work.flops / time / 1e6);
                let (peak, matmul) = (twice(peak_tflops), twice(matmul_tflops));
                let (peak_share, matmul_share) = (share(tflops, peak), share(tflops, matmul));
                (Rates::Gpu { tflops, peak_share, matmul_share }, Some(Details::default()))
            }
        };
        Self {
            name: samples.name,
            calls_per_sample: samples.calls,
            p50_us: p50,
            p90_us: stats::quantile(times, 0.9),
            min_us: stats::quantile(times, 0.0),
            median_interval_us: stats::median_interval(times, 0.95),
            rates,
            gbytes,
            roofline: ceilings.and_then(|ceilings| ceilings.roofline(work, p50)),
            error,
            details,
            failure: samples.failure,
            samples_us: samples.times,
        }
    }

    /// What was planned, for ours on a GPU.
    pub fn plan(&self) -> Option<&Value> {
        self.details.as_ref()?.plan.as_ref()
    }

    /// Times by the call clock of a GPU.
    pub fn call(&self) -> Option<&CallClock> {
        self.details.as_ref()?.call.as_ref()
    }

    /// What its calls used, in sustained samples on a GPU.
    pub fn energy(&self) -> Option<&Energy> {
        self.details.as_ref()?.energy.as_ref()
    }

    /// Whether a replay is known not to repeat the result.
    pub fn replay_differs(&self) -> bool {
        self.details.as_ref().is_some_and(|details| details.replay_is_same == Some(false))
    }

    /// Whether its output obeys the rule, and a replay repeats it.
    pub fn is_right(&self) -> bool {
        self.error.as_ref().is_some_and(Judgement::passed) && !self.replay_differs()
    }

    /// Whether its output is known to break the rule, or a replay not to repeat it.
    pub fn is_wrong(&self) -> bool {
        self.error.as_ref().is_some_and(|error| !error.passed()) || self.replay_differs()
    }

    /// This one against another, without a verdict where its result is wrong: its speed means nothing then.
    fn against(&self, other: &Measured, margin: f64) -> Option<Comparison> {
        let mut found = Comparison::of(&self.samples_us, &other.name, &other.samples_us, margin)?;
        if self.is_wrong() {
            found.verdict = Verdict::Undecided;
        }
        Some(found)
    }
}

/// Our error may be at most so many times that of the most exact peer.
pub const MOST_ERROR: f64 = 1.02;

/// Our errors against the oracle beside those of the most exact peer that fuses: one that does not may keep its scores in
/// f32, at a price in time that nobody pays.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Exactness {
    /// Our root mean square error over the smallest of the peers'.
    pub rms_ratio: f64,
    /// Whose that is.
    pub rms_peer: String,
    /// Our largest error over the smallest of the peers'.
    pub max_ratio: f64,
    /// Whose that is.
    pub max_peer: String,
    /// What the ratio of the root mean squares may be.
    pub allowed: f64,
    /// Whether it is at most that.
    pub holds: bool,
}

impl Exactness {
    /// Of the first against the others that are right; absent without any, or where theirs is no error at all.
    fn of(results: &[Measured]) -> Option<Self> {
        let (ours, others) = results.split_first()?;
        let fuses = |it: &&Measured| !is_ours(&it.name) && !UNFUSED.contains(&it.name.as_str());
        let peers: Vec<&Measured> = others.iter().filter(fuses).filter(|it| it.is_right()).collect();
        let beside = |of: fn(&Judgement) -> f64| {
            let best = peers.iter().filter_map(|peer| Some((of(peer.error.as_ref()?), &peer.name)));
            let (least, peer) = best.min_by(|a, b| a.0.total_cmp(&b.0))?;
            let ratio = of(ours.error.as_ref()?) / least;
            ratio.is_finite().then(|| (ratio, peer.clone()))
        };
        let (rms_ratio, rms_peer) = beside(|error| error.rms().error)?;
        let (max_ratio, max_peer) = beside(|error| error.max().error)?;
        let holds = rms_ratio <= MOST_ERROR;
        Some(Self { rms_ratio, rms_peer, max_ratio, max_peer, allowed: MOST_ERROR, holds })
    }
}

/// The order in which contenders took their turns in each round: those that gave an output take part.
fn orders(results: &[Measured]) -> Vec<String> {
    let racers: Vec<&str> =
        results.iter().filter(|it| it.error.is_some()).map(|it| it.name.as_str()).collect();
    let rounds = results.iter().map(|it| it.samples_us.len()).max().unwrap_or(0);
    let mut orders = Orders::new(racers.len());
    let mut next = || orders.draw().into_iter().map(|place| racers[place]).collect::<Vec<_>>().join(", ");
    (0..rounds).map(|_| next()).collect()
}

/// Ours against one peer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The peer's name.
    pub peer: String,
    /// The peer's median over ours: above 1 when ours is faster.
    pub speed_up: f64,
    /// Its 95 % bootstrap interval.
    pub interval: Interval,
    /// The interval that the verdict rests on.
    pub verdict_interval: Interval,
    /// The verdict.
    pub verdict: Verdict,
    /// The smallest difference that matters.
    pub margin: f64,
}

impl Comparison {
    /// Ours against a peer by their samples, one per round each; absent where there are too few.
    pub fn of(ours: &[f64], peer: &str, theirs: &[f64], margin: f64) -> Option<Self> {
        let draws = stats::RatioDraws::paired(theirs, ours)?;
        let (ratio, sure) = (draws.at(0.95), draws.at(stats::VERDICT_LEVEL));
        let rounds = ours.len().min(theirs.len());
        Some(Self {
            peer: peer.into(),
            speed_up: ratio.estimate,
            interval: ratio.interval,
            verdict_interval: sure.interval,
            verdict: stats::verdict_after(rounds, &sure.interval, margin),
            margin,
        })
    }
}

/// The first against every other contender that ran to the end.
fn compare(results: &[Measured], margin: f64) -> Vec<Comparison> {
    let Some((ours, others)) = results.split_first() else { return Vec::new() };
    if ours.failure.is_some() {
        return Vec::new();
    }
    let ran = others.iter().filter(|other| other.failure.is_none());
    ran.filter_map(|other| ours.against(other, margin)).collect()
}

/// The hash of samples, round by round: it fixes which times were taken in the same round, which comparisons rest on.
pub(crate) fn pairing(of: &[(&str, &[f64])]) -> String {
    let mut hasher = blake3::Hasher::new();
    let rounds = of.iter().map(|(_, samples)| samples.len()).max().unwrap_or(0);
    for round in 0..rounds {
        for (name, samples) in of {
            // No real time is 0.
            let time = samples.get(round).copied().unwrap_or(0.0);
            hasher.update(name.as_bytes()).update(&time.to_le_bytes());
        }
    }
    format!("blake3:{}", hasher.finalize().to_hex())
}

/// One rung of the ladder against the one below.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rung {
    /// The kernel.
    pub kernel: String,
    /// Its median, in microseconds by the kernel clock.
    pub p50_us: Option<f64>,
    /// Against the rung below; absent for the first.
    pub gain: Option<Comparison>,
}

/// The kernels among the results in the order of the ladder, each against the one below it that ran.
fn ladder(results: &[Measured], margin: f64) -> Vec<Rung> {
    let of = |kernel: Kernel| results.iter().find(|result| result.name == format!("{KERNEL}{kernel}"));
    let rungs: Vec<&Measured> = Kernel::LADDER.into_iter().filter_map(of).collect();
    if rungs.len() < 2 {
        return Vec::new();
    }
    let mut below: Option<&Measured> = None;
    let mut all = Vec::new();
    for rung in rungs {
        let ran = rung.failure.is_none();
        let gain = below.filter(|_| ran).and_then(|below| rung.against(below, margin));
        all.push(Rung { kernel: rung.name.replace(KERNEL, ""), p50_us: rung.p50_us, gain });
        if ran && !rung.samples_us.is_empty() {
            below = Some(rung);
        }
    }
    all
}

/// How long the first call of a problem takes until it completes, in a process that already has a context.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FirstCall {
    /// With empty caches: the code is emitted and assembled. Microseconds.
    pub cold_us: Option<f64>,
    /// With the code on disk.
    pub warm_us: Option<f64>,
    /// Why one of them is absent.
    pub failure: Option<String>,
}

/// The GPU's state around a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct State {
    /// The SM clock in MHz.
    pub sm_clock_mhz: Option<u32>,
    /// The memory clock in MHz.
    pub memory_clock_mhz: Option<u32>,
    /// Power in watts.
    pub power_w: Option<f64>,
    /// The power limit in watts.
    pub power_limit_w: Option<f64>,
    /// Degrees Celsius.
    pub temperature_c: Option<u32>,
    /// What throttles the clocks; absent where NVML does not say.
    pub throttled_by: Option<Vec<&'static str>>,
    /// Whether the reason is heat or a power supply fault, so that a round that ends here does not count.
    pub throttled: Option<bool>,
}

impl From<GpuState> for State {
    fn from(state: GpuState) -> Self {
        let watts = |milli: u32| f64::from(milli) / 1e3;
        Self {
            sm_clock_mhz: state.sm_clock_mhz,
            memory_clock_mhz: state.memory_clock_mhz,
            power_w: state.power_mw.map(watts),
            power_limit_w: state.power_limit_mw.map(watts),
            temperature_c: state.temperature_c,
            throttled_by: state.throttle.map(|_| state.throttle_reasons()),
            throttled: state.throttle.map(|_| state.is_unwell()),
        }
    }
}

/// The conditions in which a CPU's cell was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CpuConditions {
    /// The seed of the inputs.
    pub seed: u64,
    /// Checksums of q, k and v, which every contender was given.
    pub checksums: [u32; 3],
    /// The FMA peak in GFLOP/s, by the best of its samples.
    pub fma_peak_gflops: f64,
    /// Microseconds that the operations of a call take as multiply-adds in registers only, one sample per round, in
    /// turns with the contenders.
    pub fma_peak_samples_us: Vec<f64>,
    /// The read bandwidth in GB/s, likewise; only where memory is the limit.
    pub bandwidth_gbytes: Option<f64>,
    /// Microseconds that reading the bytes of a call takes when no cache holds them, sampled like the above.
    pub bandwidth_samples_us: Vec<f64>,
    /// Microseconds of the same call without its mask, sampled like the above; only where the mask is causal.
    pub full_samples_us: Vec<f64>,
    /// The rate as a share of that without the mask, by useful operations and medians; likewise.
    pub causal_share: Option<f64>,
    /// Whether the rate is so low that the time is the call's overhead rather than arithmetic.
    pub launch_bound: bool,
}

/// How a GPU's cell was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GpuConditions {
    /// The group that it is averaged in.
    pub group: String,
    /// Sets of tensors that calls rotated over.
    pub sets: usize,
    /// Each kernel against the one below it, where several of ours ran.
    pub ladder: Vec<Rung>,
    /// Our errors beside the most exact peer's.
    pub exactness: Option<Exactness>,
    /// The order of the contenders in each round.
    pub orders: Vec<String>,
    /// The first call.
    pub first_call: Option<FirstCall>,
    /// The GPU before the first round, and after every one; none without NVML.
    pub states: Vec<State>,
    /// Whether the GPU was throttled, so that rounds were repeated.
    pub measured_again: bool,
    /// Rounds that were repeated.
    pub retaken_rounds: usize,
    /// Rounds that count although the GPU was throttled: it did not recover.
    pub throttled_rounds: usize,
    /// Why there is no result at all.
    pub failure: Option<String>,
    /// Seconds that the cell took.
    pub seconds: f64,
}

/// What only a CPU or only a GPU records about a cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Conditions {
    /// Of a CPU.
    Cpu(CpuConditions),
    /// Of a GPU.
    Gpu(GpuConditions),
}

/// All results of a cell.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// What was asked for.
    #[serde(skip)]
    pub cell: Cell,
    /// The shape's name, if it has one.
    pub name: Option<&'static str>,
    /// As BxHxSxD.
    pub shape: String,
    /// The dtype; behind it the type of k and v where it differs, and how they are quantised.
    pub dtype: String,
    /// The mask.
    pub mask: String,
    /// The pass, where it is not the forward one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pass: Option<&'static str>,
    /// How sequences of lengths of their own lie, as the label has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layout: Option<String>,
    /// Their lengths.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequences: Option<Sequences>,
    /// Floating-point operations of a call, causal counted half.
    pub flops: f64,
    /// Bytes that must move in a call.
    pub bytes: f64,
    /// Rows of the output that were judged.
    pub judged_rows: usize,
    /// Rows of the output.
    pub rows: usize,
    /// Ours first.
    pub results: Vec<Measured>,
    /// The hash of all samples, round by round.
    pub pairing: String,
    /// The first of ours against everyone else that ran.
    pub comparisons: Vec<Comparison>,
    /// Faster than the machine's known limits, so no verdict is given. On a GPU, whose peak is known, the measurement
    /// is wrong; on a CPU, the machine's speed changed meanwhile.
    pub impossible: bool,
    /// What only a CPU or only a GPU records.
    #[serde(flatten)]
    pub conditions: Conditions,
}

impl Outcome {
    /// Derives a cell from its results.
    pub(crate) fn new(
        cell: &Cell,
        judged_rows: usize,
        results: Vec<Measured>,
        mut conditions: Conditions,
        margin: f64,
    ) -> Self {
        let (problem, work) = (cell.problem(), cell.work());
        let mut sampled: Vec<(&str, &[f64])> =
            results.iter().map(|result| (result.name.as_str(), &result.samples_us[..])).collect();
        // On a CPU only ours is compared with the limits: they were measured in turns with it.
        let held = match &mut conditions {
            Conditions::Cpu(cpu) => {
                sampled.extend([
                    ("FMA peak", &cpu.fma_peak_samples_us[..]),
                    ("read bandwidth", &cpu.bandwidth_samples_us),
                    ("without the mask", &cpu.full_samples_us),
                ]);
                1
            }
            Conditions::Gpu(gpu) => {
                gpu.ladder = ladder(&results, margin);
                gpu.exactness = Exactness::of(&results);
                gpu.orders = orders(&results);
                results.len()
            }
        };
        let pairing = pairing(&sampled);
        let impossible = results.iter().take(held).any(|result| result.rates.are_impossible());
        let mut comparisons = compare(&results, margin);
        if impossible {
            for comparison in &mut comparisons {
                comparison.verdict = Verdict::Undecided;
            }
        }
        Self {
            cell: cell.clone(),
            name: Some(cell.name).filter(|name| !name.is_empty()),
            shape: cell.shape.to_string(),
            dtype: cell.types.to_string(),
            mask: cell.mask.to_string(),
            pass: (cell.pass != Pass::Forward.into()).then(|| cell.pass.name()),
            layout: cell.sequences.as_ref().map(ToString::to_string),
            sequences: cell.sequences.clone(),
            flops: work.flops,
            bytes: work.bytes,
            judged_rows,
            rows: rows(&problem),
            results,
            pairing,
            comparisons,
            impossible,
            conditions,
        }
    }

    /// A CPU's cell from samples, each with the rule's judgement of the result, ours first. Of the conditions, only the
    /// measured parts are needed; their FMA peak is used where there is no sample of it.
    pub(crate) fn on_cpu(
        cell: &Cell,
        judged_rows: usize,
        samples: Vec<(Samples, Option<Judgement>)>,
        mut cpu: CpuConditions,
        ceilings: Option<&Ceilings>,
        margin: f64,
    ) -> Self {
        let work = cell.work();
        let fma_gflops = best_rate(work.flops, &cpu.fma_peak_samples_us).unwrap_or(cpu.fma_peak_gflops);
        let read_gbytes = best_rate(work.bytes, &cpu.bandwidth_samples_us);
        let limits = Limits::Cpu { fma_gflops, read_gbytes };
        let measured = |(samples, error)| Measured::new(samples, error, &work, &limits, ceilings);
        let results: Vec<Measured> = samples.into_iter().map(measured).collect();
        let full = Cell { mask: Mask::None, ..cell.clone() }.work();
        let causal_share = stats::median(&cpu.full_samples_us)
            .zip(results[0].p50_us)
            .map(|(full_us, us)| full_us / us * (work.flops / full.flops));
        (cpu.seed, cpu.fma_peak_gflops, cpu.bandwidth_gbytes) = (SEED, fma_gflops, read_gbytes);
        (cpu.causal_share, cpu.launch_bound) = (causal_share, is_launch_bound(cell, results.first()));
        Self::new(cell, judged_rows, results, Conditions::Cpu(cpu), margin)
    }

    /// A cell of a GPU that has no result, and why.
    pub fn not_run(member: &Member, why: &str) -> Self {
        let (group, failure) = (member.group.clone(), Some(why.into()));
        let conditions = Conditions::Gpu(GpuConditions { group, failure, ..GpuConditions::default() });
        Self { pairing: String::new(), ..Self::new(&member.cell, 0, Vec::new(), conditions, 0.0) }
    }

    /// As `1x8x512x64 f16 causal`.
    pub fn label(&self) -> String {
        self.cell.label()
    }

    /// Ours, which the others are compared with.
    pub fn ours(&self) -> Option<&Measured> {
        self.results.first()
    }

    /// Whether the arithmetic is so small that the time is mostly launch overhead.
    pub fn is_launch_bound(&self) -> bool {
        is_launch_bound(&self.cell, self.ours())
    }

    /// How it was measured, on a GPU.
    pub fn gpu(&self) -> Option<&GpuConditions> {
        if let Conditions::Gpu(gpu) = &self.conditions { Some(gpu) } else { None }
    }

    /// In which conditions it was measured, on a CPU.
    pub fn cpu(&self) -> Option<&CpuConditions> {
        if let Conditions::Cpu(cpu) = &self.conditions { Some(cpu) } else { None }
    }

    /// Why there is no result at all.
    pub fn failure(&self) -> Option<&str> {
        self.gpu()?.failure.as_deref()
    }

    /// The group that it is averaged in; a CPU's cells have none.
    fn group(&self) -> Option<&str> {
        self.gpu().map(|gpu| gpu.group.as_str())
    }
}

/// Whether our rate is so low that the time is launch overhead. A single query reads every key once: memory is its
/// limit, and its arithmetic rate says nothing.
fn is_launch_bound(cell: &Cell, ours: Option<&Measured>) -> bool {
    let share = ours.and_then(|ours| ours.rates.peak_share());
    !cell.is_decode() && physics::rate(share, Some(1.0), physics::ABOVE_PEAK) == Rate::LaunchBound
}

/// A limit from its samples, in units of 1e9 per second: the best that was seen, because other programs on the machine
/// can only lower it.
fn best_rate(amount: f64, samples_us: &[f64]) -> Option<f64> {
    stats::quantile(samples_us, 0.0).map(|time| amount / time / 1e3)
}

/// How often each verdict was given: FASTER, SAME, SLOWER, UNDECIDED.
pub(super) fn count_verdicts(given: impl Iterator<Item = Verdict>) -> [usize; 4] {
    let given: Vec<Verdict> = given.collect();
    [Verdict::Faster, Verdict::Same, Verdict::Slower, Verdict::Undecided]
        .map(|verdict| given.iter().filter(|it| **it == verdict).count())
}

/// A summary over many cells.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The group; `all` for all cells of a GPU, absent on a CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The peer.
    pub peer: String,
    /// The number of cells with a ratio.
    pub cells: usize,
    /// The geometric mean of the speed-ups.
    pub geometric_mean: f64,
    /// The smallest.
    pub smallest: f64,
    /// The cell with the smallest.
    pub smallest_cell: String,
    /// How often each verdict was given: FASTER, SAME, SLOWER, UNDECIDED.
    pub verdicts: [usize; 4],
}

impl Summary {
    /// The speed-ups over a peer in some cells.
    fn of<'a>(outcomes: impl Iterator<Item = &'a Outcome>, peer: &str, group: Option<&str>) -> Option<Self> {
        let compared = |outcome: &'a Outcome| {
            outcome.comparisons.iter().find(|it| it.peer == peer).map(|it| (it, outcome))
        };
        let all: Vec<(&Comparison, &Outcome)> = outcomes.filter_map(compared).collect();
        let ratios: Vec<f64> = all.iter().map(|(it, _)| it.speed_up).collect();
        let (smallest, cell) = all.iter().min_by(|a, b| a.0.speed_up.total_cmp(&b.0.speed_up))?;
        Some(Self {
            group: group.map(String::from),
            peer: peer.into(),
            cells: all.len(),
            geometric_mean: stats::geometric_mean(&ratios)?,
            smallest: smallest.speed_up,
            smallest_cell: cell.label(),
            verdicts: count_verdicts(all.iter().map(|(it, _)| it.verdict)),
        })
    }
}

/// The speed-ups over each peer: on a GPU in every group, and over all cells where there are several groups; on a CPU over
/// all cells where there are several.
pub fn summaries(outcomes: &[Outcome]) -> Vec<Summary> {
    let mut groups: Vec<Option<&str>> = Vec::new();
    let mut peers: Vec<&str> = Vec::new();
    for outcome in outcomes {
        if !groups.contains(&outcome.group()) {
            groups.push(outcome.group());
        }
        for comparison in &outcome.comparisons {
            if !peers.contains(&comparison.peer.as_str()) {
                peers.push(&comparison.peer);
            }
        }
    }
    let mut all = Vec::new();
    for peer in peers {
        let of_group = |group: Option<&str>| {
            Summary::of(outcomes.iter().filter(|outcome| outcome.group() == group), peer, group)
        };
        all.extend(groups.iter().copied().filter_map(of_group));
        if groups.len() > 1 {
            all.extend(Summary::of(outcomes.iter(), peer, Some("all")));
        }
    }
    all.retain(|summary| summary.group.is_some() || summary.cells > 1);
    all
}

/// A causal cell's rate as a share of the rate of the same call without its mask, by useful operations.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CausalShare {
    /// The cell without its mask, as `1x8x512x64 f16`.
    pub cell: String,
    /// Causal rate over full rate.
    pub share: f64,
}

/// The causal share of every cell of a CPU that has one.
pub fn causal_shares(outcomes: &[Outcome]) -> Vec<CausalShare> {
    let of = |outcome: &Outcome| {
        let cell = format!("{} {}", outcome.shape, outcome.dtype);
        outcome.cpu()?.causal_share.map(|share| CausalShare { cell, share })
    };
    outcomes.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::Bound;
    use crate::shapes;
    use flashcore::DType;

    const CPU: Limits = Limits::Cpu { fma_gflops: 1000.0, read_gbytes: None };
    const GPU: Limits = Limits::Gpu { peak_tflops: Some(1000.0), matmul_tflops: None };

    fn samples(name: &str, times: &[f64]) -> Samples {
        Samples { name: name.into(), calls: 1, times: times.to_vec(), ..Samples::default() }
    }

    fn cell(shape: &str) -> Cell {
        let shapes::Named { name, shape, dtype, .. } = shapes::parse(shape).unwrap();
        Cell {
            name,
            shape,
            mask: Mask::None,
            types: dtype.into(),
            pass: Pass::Forward.into(),
            sequences: None,
        }
    }

    fn result(name: &str, times: &[f64], limits: &Limits) -> Measured {
        Measured::new(samples(name, times), None, &cell("mission").work(), limits, None)
    }

    fn failed(name: &str, limits: &Limits) -> Measured {
        let failure = Some("OutOfMemoryError".into());
        let samples = Samples { failure, ..samples(name, &[150.0; 20]) };
        Measured::new(samples, None, &cell("mission").work(), limits, None)
    }

    fn on_gpu(cell: &Cell, group: &str, results: Vec<Measured>) -> Outcome {
        let conditions = GpuConditions { group: group.into(), ..GpuConditions::default() };
        Outcome::new(cell, 1, results, Conditions::Gpu(conditions), 0.02)
    }

    /// The mission's cell on a CPU where ours took 1 ms per round, the multiply-adds these times, and torch 2 ms.
    fn beside(fma_peak_us: &[f64]) -> Outcome {
        let rounds = fma_peak_us.len();
        let taken =
            [("flashcore", 1e3), ("torch", 2e3)].map(|(name, us)| (samples(name, &vec![us; rounds]), None));
        let conditions =
            CpuConditions { fma_peak_samples_us: fma_peak_us.to_vec(), ..CpuConditions::default() };
        Outcome::on_cpu(&cell("mission"), 1, taken.into(), conditions, None, 0.02)
    }

    #[test]
    fn rates_come_from_the_median_in_their_units_and_causal_counts_half() {
        let gpu = result(PLANNER, &[4.0, 5.0, 7.0], &GPU);
        let flops = 4.0 * 8.0 * 512.0 * 512.0 * 64.0;
        let Rates::Gpu { tflops, peak_share, matmul_share } = gpu.rates else { panic!("{gpu:?}") };
        assert!((tflops.unwrap() - flops / 5.0 / 1e6).abs() < 1e-9);
        assert!((peak_share.unwrap() - tflops.unwrap() / 1000.0).abs() < 1e-12);
        assert_eq!(matmul_share, None, "not measured, and so absent");
        assert!((gpu.gbytes.unwrap() - 4.0 * 8.0 * 512.0 * 64.0 * 2.0 / 5.0 / 1e3).abs() < 1e-9);
        let of = |problem: &Problem| {
            Measured::new(samples("x", &[1000.0; 3]), None, &Work::of(problem), &CPU, None)
        };
        let problem = Problem::new(1, 1, 1024, 64, DType::F16);
        let (full, causal) = (of(&problem), of(&problem.with_mask(Mask::Causal)));
        assert!((full.rates.rate().unwrap() - 4.0 * 1024.0 * 1024.0 * 64.0 / 1e6).abs() < 1e-9);
        assert_eq!(causal.rates.rate().unwrap() * 2.0, full.rates.rate().unwrap());
    }

    #[test]
    fn the_fields_of_a_result_are_those_of_its_clock() {
        let fields = |limits: &Limits| {
            let made = serde_json::to_value(result("x", &[], limits)).unwrap();
            assert_eq!((&made["p50_us"], &made["min_us"]), (&Value::Null, &Value::Null), "absent, not 0");
            ["gflops", "fma_peak_share", "tflops", "plan", "call", "replay_is_same", "energy"]
                .map(|name| made.get(name).is_some())
        };
        assert_eq!(fields(&CPU), [true, true, false, false, false, false, false]);
        assert_eq!(fields(&GPU), [false, false, true, true, true, true, true]);
    }

    #[test]
    fn a_limit_is_the_best_that_was_seen_of_it() {
        // Other programs ran in all but one of the limit's samples.
        let noisy = beside(&[2.5e3, 900.0, 3e3, 4e3, 2e3, 3e3, 2.2e3, 5e3]);
        assert!(!noisy.impossible);
        assert_eq!(noisy.results[0].rates.peak_share(), Some(0.9));
        assert_eq!(noisy.comparisons[0].verdict, Verdict::Faster);
        assert_eq!(best_rate(6e3, &[3.0, 2.0, 4.0]), Some(3.0));
        assert_eq!(best_rate(6e3, &[]), None);
    }

    #[test]
    fn a_time_beyond_the_limit_decides_nothing() {
        let disturbed = beside(&[2.5e3, 1.2e3, 3e3, 4e3, 2e3, 3e3, 2.2e3, 5e3]);
        assert!(disturbed.impossible);
        assert_eq!(disturbed.comparisons[0].verdict, Verdict::Undecided);
    }

    #[test]
    fn a_speed_up_above_one_means_that_ours_is_faster() {
        let results = [result(PLANNER, &[100.0; 20], &CPU), result("torch", &[150.0; 20], &CPU)];
        let [comparison] = &compare(&results, 0.02)[..] else { panic!() };
        assert_eq!((comparison.speed_up, comparison.verdict), (1.5, Verdict::Faster));
    }

    #[test]
    fn five_rounds_have_a_ratio_and_no_verdict() {
        let of = |rounds: usize| Comparison::of(&vec![100.0; rounds], "x", &vec![150.0; rounds], 0.02);
        assert_eq!(of(4), None);
        assert_eq!(of(5).map(|it| (it.speed_up, it.verdict)), Some((1.5, Verdict::Undecided)));
        assert_eq!(of(6).map(|it| it.verdict), Some(Verdict::Faster));
    }

    #[test]
    fn who_failed_is_not_compared_and_has_no_numbers() {
        for limits in [CPU, GPU] {
            let failed = failed("math", &limits);
            assert_eq!((failed.p50_us, failed.rates.rate(), failed.is_right()), (None, None, false));
            assert!(compare(&[result(PLANNER, &[100.0; 20], &limits), failed], 0.02).is_empty());
        }
    }

    #[test]
    fn groups_have_means_of_their_own_and_all_cells_one_together() {
        let outcome = |group: &str, ours: f64, flash: f64| {
            let results = vec![result(PLANNER, &[ours; 10], &GPU), result("flash", &[flash; 10], &GPU)];
            on_gpu(&cell("mission"), group, results)
        };
        let outcomes = [outcome("a", 10.0, 20.0), outcome("a", 10.0, 5.0), outcome("b", 10.0, 40.0)];
        let all = summaries(&outcomes);
        let means: Vec<(Option<&str>, usize, f64)> = all
            .iter()
            .map(|s| (s.group.as_deref(), s.cells, (s.geometric_mean * 1e6).round() / 1e6))
            .collect();
        assert_eq!(means, [(Some("a"), 2, 1.0), (Some("b"), 1, 4.0), (Some("all"), 3, 1.587_401)]);
        assert_eq!(all[0].verdicts, [1, 0, 1, 0]);
        assert_eq!(all[2].smallest, 0.5);
        let on_cpu = [beside(&[500.0; 10]), beside(&[500.0; 10])];
        assert_eq!(summaries(&on_cpu[..1]), []);
        let [both] = &summaries(&on_cpu)[..] else { panic!() };
        assert_eq!((both.group.as_deref(), both.cells, both.geometric_mean), (None, 2, 2.0));
    }

    /// A result with these errors, of which it may make ten times as large ones.
    fn judged(name: &str, rms: f64, max: f64) -> Measured {
        let bound = |error: f64| Bound { error, plain: error, allowed: 10.0 * error };
        let (max, rms) = (bound(max), bound(rms));
        let judgement = Judgement::forward(1, [max, rms, max], None);
        Measured { error: Some(judgement), ..result(name, &[1e3; 6], &GPU) }
    }

    #[test]
    fn our_error_is_held_against_the_most_exact_peer_that_is_right_and_fuses() {
        let mut wrong = judged("flash", 1e-9, 1e-9);
        wrong.error.as_mut().unwrap().outputs[0].max.as_mut().unwrap().allowed = 0.0;
        let peers =
            [judged("cudnn", 1e-4, 7e-4), judged("fa3", 1.1e-4, 5e-4), judged("math", 1e-6, 1e-6), wrong];
        let of = |rms: f64| {
            let results = [&[judged(PLANNER, rms, 6e-4)], &peers[..]].concat();
            on_gpu(&cell("mission"), "a", results).gpu().unwrap().exactness.clone().unwrap()
        };
        let found = of(1.04e-4);
        assert!((found.rms_ratio - 1.04).abs() < 1e-9 && (found.max_ratio - 1.2).abs() < 1e-9);
        assert_eq!((found.rms_peer.as_str(), found.max_peer.as_str(), found.holds), ("cudnn", "fa3", false));
        assert!(of(1.01e-4).holds);
        let exactness = |results| on_gpu(&cell("mission"), "a", results).gpu().unwrap().exactness.clone();
        assert_eq!(exactness(vec![judged(PLANNER, 1e-4, 1e-3)]), None, "there is nobody beside it");
        assert_eq!(exactness(vec![judged(PLANNER, 1e-4, 1e-3), judged("fa3", 0.0, 0.0)]), None);
    }

    #[test]
    fn the_order_of_every_round_is_told_of_those_who_took_part() {
        let results = vec![
            judged(PLANNER, 1.0, 1.0),
            failed("math", &GPU),
            judged("fa3", 1.0, 1.0),
            judged("flash", 1.0, 1.0),
        ];
        let outcome = on_gpu(&cell("mission"), "a", results);
        let orders = &outcome.gpu().unwrap().orders;
        assert!(orders.len() >= 6 && orders.windows(2).all(|two| two[0] != two[1]), "{orders:?}");
        for order in orders {
            let mut names: Vec<&str> = order.split(", ").collect();
            names.sort_unstable();
            assert_eq!(names, ["fa3", "flash", PLANNER]);
        }
    }

    #[test]
    fn a_rung_is_compared_with_the_one_below_that_ran() {
        let kernel = |kernel: Kernel, time: f64| result(&format!("{KERNEL}{kernel}"), &[time; 10], &GPU);
        let mut broken = kernel(Kernel::Sm80Mma, 1.0);
        broken.samples_us.clear();
        let rungs = ladder(&[kernel(Kernel::Sm80Fwd, 10.0), broken, kernel(Kernel::Scalar, 1000.0)], 0.02);
        assert_eq!(
            rungs.iter().map(|rung| rung.kernel.as_str()).collect::<Vec<_>>()[..2],
            ["scalar", "sm80_mma"]
        );
        assert_eq!(rungs[0].gain, None);
        assert_eq!(rungs[1].gain, None);
        assert_eq!(rungs[2].gain.as_ref().map(|gain| gain.speed_up), Some(100.0));
    }

    #[test]
    fn what_nvml_does_not_tell_is_absent_and_never_zero_or_fine() {
        let blind = serde_json::to_value(State::from(GpuState::default())).unwrap();
        assert!(blind.as_object().unwrap().values().all(Value::is_null), "{blind}");
        let hot = GpuState { throttle: Some(0x44), power_mw: Some(350_500), ..GpuState::default() };
        let hot = State::from(hot);
        assert_eq!((hot.power_w, hot.throttled), (Some(350.5), Some(true)));
        assert_eq!(hot.throttled_by, Some(vec!["power cap", "hardware thermal slowdown"]));
    }

    #[test]
    fn a_rate_below_a_hundredth_of_the_peak_times_the_launch_unless_it_is_a_decode() {
        let of = |shape: &str| on_gpu(&cell(shape), "a", vec![result(PLANNER, &[500.0; 10], &GPU)]);
        assert!(of("1x8x512x64").is_launch_bound(), "0.001 of the peak");
        for decode in ["1x8x1/512x64", "1x8x1x64"] {
            assert!(!of(decode).is_launch_bound(), "{decode}");
        }
    }
}
