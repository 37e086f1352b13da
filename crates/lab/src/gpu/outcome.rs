//! What a cell on a GPU gave, and what many cells say together. Everything is measured, derived from it, or absent.

use flashcore::cuda::driver::GpuState;
use flashcore::plan::Kernel;
use flashcore::{DType, Problem};
use serde::Serialize;
use serde_json::Value;

use super::cells::Member;
use super::worker::KERNEL;
use crate::bench::{Comparison, pairing};
use crate::ceilings::Roofline;
use crate::physics::{self, Rate};
use crate::rule::Judgement;
use crate::stats::{self, Interval, Verdict};

/// The GPU and its driver.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Facts {
    /// What our worker says of the GPU and of itself.
    pub ours: Value,
    /// What torch's worker says of itself; absent without torch.
    pub torch: Option<Value>,
    /// The version of the kernel driver.
    pub driver: Option<String>,
    /// The dense peak of the tensor cores at the highest clock in TFLOP/s, where the generation is known.
    pub peak_tflops: Option<f64>,
    /// The rate of an 8192³ matrix product in f16, measured by torch.
    pub matmul_tflops: Option<f64>,
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
    /// What holds the clocks back; absent where NVML does not tell.
    pub throttled_by: Option<Vec<&'static str>>,
    /// Whether that is heat or a fault of the power supply, so that a round that ends here does not count.
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

/// What the call clock says.
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
    /// The least.
    pub min_us: Option<f64>,
    /// The median of the host's own time for a call, in microseconds.
    pub host_p50_us: Option<f64>,
    /// Its 90 % quantile.
    pub host_p90_us: Option<f64>,
}

/// How long the first call of a problem takes, to its end, in a process that has a context already.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FirstCall {
    /// With empty caches: the code is emitted and assembled. Microseconds.
    pub cold_us: Option<f64>,
    /// With the code on disk.
    pub warm_us: Option<f64>,
    /// Why one of them is absent.
    pub failure: Option<String>,
}

/// What was measured of one contender in a cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Its name.
    pub name: String,
    /// What was planned, for ours: kernel, schedule, grid, registers, the hash of its PTX.
    pub plan: Option<Value>,
    /// Calls in one sample.
    pub calls_per_sample: u32,
    /// Kernel-clock microseconds a call, one sample a round.
    pub samples_us: Vec<f64>,
    /// Their median.
    pub p50_us: Option<f64>,
    /// Their 90 % quantile.
    pub p90_us: Option<f64>,
    /// The least.
    pub min_us: Option<f64>,
    /// The 95 % bootstrap interval of the median.
    pub median_interval_us: Option<Interval>,
    /// Floating-point operations a second by the median, causal counted half, in units of 1e12.
    pub tflops: Option<f64>,
    /// That as a share of the chip's dense peak.
    pub peak_share: Option<f64>,
    /// That as a share of the measured rate of a matrix product.
    pub matmul_share: Option<f64>,
    /// Bytes that must move a second by the median, in units of 1e9.
    pub gbytes: Option<f64>,
    /// The time against the ceilings that were kept for this GPU; absent where none were.
    pub roofline: Option<Roofline>,
    /// What the call clock says.
    pub call: Option<CallClock>,
    /// The rule's judgement of its output.
    pub error: Option<Judgement>,
    /// Whether a replayed call gave the bits of a direct one; ours only.
    pub replay_is_same: Option<bool>,
    /// Why it has no result, or left before the end.
    pub failure: Option<String>,
}

impl Measured {
    pub(crate) fn failed(name: &str, why: String) -> Self {
        let mut nothing = summarise(name, &[], 0, &Problem::new(1, 1, 1, 8, DType::F16), None, None);
        nothing.failure = Some(why);
        nothing
    }

    /// Whoever left before the end has samples, and nothing is said of them.
    pub(crate) fn left(mut self, why: Option<String>) -> Self {
        if why.is_some() {
            (self.p50_us, self.p90_us, self.min_us, self.median_interval_us) = (None, None, None, None);
            (self.tflops, self.peak_share, self.matmul_share, self.gbytes) = (None, None, None, None);
            self.roofline = None;
        }
        self.failure = why;
        self
    }

    /// Whether its output is known to break the rule, or a replay not to repeat it.
    fn is_wrong(&self) -> bool {
        self.error.as_ref().is_some_and(|error| !error.passed()) || self.replay_is_same == Some(false)
    }

    /// Whether its output obeys the rule, and a replay repeats it.
    pub fn is_right(&self) -> bool {
        self.error.as_ref().is_some_and(Judgement::passed) && self.replay_is_same != Some(false)
    }
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

/// Everything that a cell gave.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The shape's name, if it has one.
    pub name: Option<&'static str>,
    /// The group that it is averaged in.
    pub group: String,
    /// As BxHxSxD.
    pub shape: String,
    /// The dtype.
    pub dtype: &'static str,
    /// The mask.
    pub mask: String,
    /// Floating-point operations of a call, causal counted half.
    pub flops: f64,
    /// Bytes that must move in a call.
    pub bytes: f64,
    /// Sets of tensors that calls took turns on.
    pub sets: usize,
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
    /// Each kernel against the one below it, where several of ours ran.
    pub ladder: Vec<Rung>,
    /// The first call.
    pub first_call: Option<FirstCall>,
    /// The GPU before the first round, and after every one; none without NVML.
    pub states: Vec<State>,
    /// Whether the GPU was slowed down, so that rounds were taken again.
    pub measured_again: bool,
    /// Rounds that were taken again.
    pub retaken_rounds: usize,
    /// Rounds that count although the GPU was slowed down: it did not recover.
    pub throttled_rounds: usize,
    /// Ours ran faster than the chip can: the measurement is wrong.
    pub impossible: bool,
    /// Why there is no result at all.
    pub failure: Option<String>,
    /// Seconds that the cell took.
    pub seconds: f64,
}

impl Outcome {
    /// As `1x8x512x64 f16 causal`.
    pub fn label(&self) -> String {
        format!("{} {} {}", self.shape, self.dtype, self.mask)
    }

    /// Ours, which the others are compared with.
    pub fn ours(&self) -> Option<&Measured> {
        self.results.first()
    }

    /// What follows from the results.
    pub(crate) fn conclude(&mut self, margin: f64, peak: Option<f64>) {
        let sampled: Vec<(&str, &[f64])> =
            self.results.iter().map(|result| (result.name.as_str(), &result.samples_us[..])).collect();
        self.pairing = pairing(&sampled);
        self.comparisons = compare(&self.results, margin);
        self.ladder = ladder(&self.results, margin);
        let rate = |result: &Measured| physics::rate(result.tflops, peak, physics::ABOVE_PEAK);
        self.impossible = self.results.iter().any(|result| rate(result) == Rate::Impossible);
    }

    /// Whether the arithmetic is so small that the kernel clock shows launches and little else.
    pub fn is_launch_bound(&self) -> bool {
        let share = self.ours().and_then(|ours| ours.peak_share);
        // One query reads every key once: memory is its limit, and its rate says nothing.
        !self.shape.contains("x1/")
            && physics::rate(share, Some(1.0), physics::ABOVE_PEAK) == Rate::LaunchBound
    }
}

/// A cell of which nothing is known yet.
pub(crate) fn blank(member: &Member) -> Outcome {
    let (cell, problem) = (&member.cell, member.cell.problem());
    Outcome {
        name: Some(cell.name).filter(|name| !name.is_empty()),
        group: member.group.clone(),
        shape: cell.shape.to_string(),
        dtype: cell.dtype.name(),
        mask: cell.mask.to_string(),
        flops: problem.flops(),
        bytes: problem.min_bytes(),
        sets: 0,
        judged_rows: 0,
        rows: problem.batch * problem.heads_q * problem.len_q,
        results: Vec::new(),
        pairing: String::new(),
        comparisons: Vec::new(),
        ladder: Vec::new(),
        first_call: None,
        states: Vec::new(),
        measured_again: false,
        retaken_rounds: 0,
        throttled_rounds: 0,
        impossible: false,
        failure: None,
        seconds: 0.0,
    }
}

/// A cell for which there was no time.
pub fn not_run(member: &Member, why: &str) -> Outcome {
    Outcome { failure: Some(why.into()), ..blank(member) }
}

/// What samples of the kernel clock say.
pub(crate) fn summarise(
    name: &str,
    times: &[f64],
    calls: u32,
    problem: &Problem,
    peak: Option<f64>,
    matmul: Option<f64>,
) -> Measured {
    let p50 = stats::median(times);
    let tflops = p50.map(|time| problem.flops() / time / 1e6);
    Measured {
        name: name.into(),
        plan: None,
        calls_per_sample: calls,
        samples_us: times.to_vec(),
        p50_us: p50,
        p90_us: stats::quantile(times, 0.9),
        min_us: stats::quantile(times, 0.0),
        median_interval_us: stats::median_interval(times, 0.95),
        tflops,
        peak_share: tflops.zip(peak).map(|(rate, peak)| rate / peak),
        matmul_share: tflops.zip(matmul).map(|(rate, matmul)| rate / matmul),
        gbytes: p50.map(|time| problem.min_bytes() / time / 1e3),
        roofline: None,
        call: None,
        error: None,
        replay_is_same: None,
        failure: None,
    }
}

/// What a worker's samples of the call clock say.
pub(super) fn call_clock(reply: &Value) -> CallClock {
    let numbers = |name: &str| -> Vec<f64> {
        reply[name].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
    };
    CallClock::of(numbers("call_us"), numbers("host_us"))
}

impl CallClock {
    /// What samples of both clocks say.
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

/// One against another, with a verdict unless it is wrong.
fn against(ours: &Measured, other: &Measured, margin: f64) -> Option<Comparison> {
    let compared = Comparison::of(&ours.samples_us, &other.name, &other.samples_us, margin);
    compared.map(|comparison| comparison.unless(ours.is_wrong()))
}

/// The first against everyone else that ran to the end.
fn compare(results: &[Measured], margin: f64) -> Vec<Comparison> {
    let Some((ours, others)) = results.split_first() else { return Vec::new() };
    if ours.failure.is_some() {
        return Vec::new();
    }
    let ran = others.iter().filter(|other| other.failure.is_none());
    ran.filter_map(|other| against(ours, other, margin)).collect()
}

/// The kernels among the results in the order of the ladder, each against the one below it that ran.
fn ladder(results: &[Measured], margin: f64) -> Vec<Rung> {
    let of = |kernel: Kernel| results.iter().find(|result| result.name == format!("{KERNEL}{kernel}"));
    let rungs: Vec<&Measured> = Kernel::ALL.into_iter().filter_map(of).collect();
    if rungs.len() < 2 {
        return Vec::new();
    }
    let mut below: Option<&Measured> = None;
    let mut all = Vec::new();
    for rung in rungs {
        let ran = rung.failure.is_none();
        let gain = below.filter(|_| ran).and_then(|below| against(rung, below, margin));
        all.push(Rung { kernel: rung.name.replace(KERNEL, ""), p50_us: rung.p50_us, gain });
        if ran && !rung.samples_us.is_empty() {
            below = Some(rung);
        }
    }
    all
}

/// What the cells of a group say together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The group; `all` for all cells.
    pub group: String,
    /// The peer.
    pub peer: String,
    /// How many cells there are a ratio for.
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

/// The speed-ups over each peer in every group, and over all cells where there are several groups.
pub fn summaries(outcomes: &[Outcome]) -> Vec<Summary> {
    let mut groups: Vec<&str> = Vec::new();
    let mut peers: Vec<&str> = Vec::new();
    for outcome in outcomes {
        if !groups.contains(&outcome.group.as_str()) {
            groups.push(&outcome.group);
        }
        for comparison in &outcome.comparisons {
            if !peers.contains(&comparison.peer.as_str()) {
                peers.push(&comparison.peer);
            }
        }
    }
    let several = groups.len() > 1;
    let mut all = Vec::new();
    for peer in peers {
        let of = |member: &dyn Fn(&Outcome) -> bool, name: &str| {
            let ratios: Vec<(f64, String, Verdict)> = outcomes
                .iter()
                .filter(|outcome| member(outcome))
                .filter_map(|outcome| {
                    let found = outcome.comparisons.iter().find(|comparison| comparison.peer == peer)?;
                    Some((found.speed_up, outcome.label(), found.verdict))
                })
                .collect();
            let speed_ups: Vec<f64> = ratios.iter().map(|(ratio, _, _)| *ratio).collect();
            let (smallest, cell, _) = ratios.iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
            let count = |verdict| ratios.iter().filter(|(_, _, given)| *given == verdict).count();
            Some(Summary {
                group: name.into(),
                peer: peer.into(),
                cells: ratios.len(),
                geometric_mean: stats::geometric_mean(&speed_ups)?,
                smallest: *smallest,
                smallest_cell: cell.clone(),
                verdicts: [Verdict::Faster, Verdict::Same, Verdict::Slower, Verdict::Undecided].map(count),
            })
        };
        all.extend(groups.iter().filter_map(|group| of(&|outcome| outcome.group == *group, group)));
        if several {
            all.extend(of(&|_| true, "all"));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Cell;
    use crate::gpu::worker::PLANNER;
    use flashcore::Mask;

    fn member(group: &str) -> Member {
        let shape = crate::shapes::parse("1x8x512x64").unwrap().shape;
        let cell = Cell { name: "", shape, mask: Mask::None, dtype: DType::F16 };
        Member { cell, group: group.into() }
    }

    fn result(name: &str, times: &[f64]) -> Measured {
        summarise(name, times, 1, &Problem::new(1, 8, 512, 64, DType::F16), Some(1000.0), None)
    }

    fn outcome(group: &str, ours: f64, flash: f64) -> Outcome {
        let mut outcome = blank(&member(group));
        outcome.results = vec![result(PLANNER, &[ours; 10]), result("flash", &[flash; 10])];
        outcome.comparisons = compare(&outcome.results, 0.02);
        outcome
    }

    #[test]
    fn rates_are_in_their_units_and_shares_follow() {
        let mission = result(PLANNER, &[5.0; 6]);
        assert!((mission.tflops.unwrap() - 4.0 * 8.0 * 512.0 * 512.0 * 64.0 / 5.0 / 1e6).abs() < 1e-9);
        assert!((mission.peak_share.unwrap() - mission.tflops.unwrap() / 1000.0).abs() < 1e-12);
        assert_eq!(mission.matmul_share, None, "not measured, and so absent");
        assert!((mission.gbytes.unwrap() - 4.0 * 8.0 * 512.0 * 64.0 * 2.0 / 5.0 / 1e3).abs() < 1e-9);
    }

    #[test]
    fn groups_have_means_of_their_own_and_all_cells_one_together() {
        let outcomes = [outcome("a", 10.0, 20.0), outcome("a", 10.0, 5.0), outcome("b", 10.0, 40.0)];
        let all = summaries(&outcomes);
        let means: Vec<(&str, usize, f64)> =
            all.iter().map(|s| (s.group.as_str(), s.cells, (s.geometric_mean * 1e6).round() / 1e6)).collect();
        assert_eq!(means, [("a", 2, 1.0), ("b", 1, 4.0), ("all", 3, 1.587_401)]);
        assert_eq!(all[0].verdicts, [1, 0, 1, 0]);
        assert_eq!(all[2].smallest, 0.5);
    }

    #[test]
    fn a_rung_is_compared_with_the_one_below_that_ran() {
        let kernel = |kernel: Kernel, time: f64| result(&format!("{KERNEL}{kernel}"), &[time; 10]);
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
        let mut outcome = outcome("a", 500.0, 500.0);
        assert!(outcome.is_launch_bound(), "0.001 of the peak");
        outcome.shape = "1x8x1/512x64".into();
        assert!(!outcome.is_launch_bound());
    }

    #[test]
    fn who_failed_is_not_compared_and_has_no_numbers() {
        let failed = Measured::failed("math", "OutOfMemoryError".into());
        assert_eq!((failed.p50_us, failed.tflops), (None, None));
        assert!(!failed.is_right());
        assert!(compare(&[result(PLANNER, &[1.0; 9]), failed], 0.02).is_empty());
    }
}
