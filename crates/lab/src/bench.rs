//! One cell of a benchmark: a problem, everyone who computes it, how right and how fast each is, and who is faster.

use std::time::{Duration, Instant};

use flashcore::{DType, Mask, Problem, cpu};
use serde::Serialize;

use crate::ceilings::{Ceilings, Roofline};
use crate::engine::{DeviceEngine, Engine};
use crate::guarded::{Arrangement, Guarded, Poison};
use crate::inputs::Distribution;
use crate::operands::{Operands, sample_rows};
use crate::peers::{self, Torch};
use crate::physics::{self, Rate};
use crate::rule::{Judgement, Row, Yardstick};
use crate::shapes::Shape;
use crate::stats::{self, Interval, Verdict};
use crate::timing::{Contender, Effort, Samples, measure};

/// Multiply-adds that are worth asking the oracle about in one cell; larger problems are judged by sampled rows.
const ORACLE_WORK: f64 = 3e8;
/// The seed of every benchmark's inputs.
const SEED: u64 = 2026;

/// What is to be timed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// Its name, if it has one.
    pub name: &'static str,
    /// Its sizes.
    pub shape: Shape,
    /// Its mask.
    pub mask: Mask,
    /// Its dtype.
    pub dtype: DType,
}

impl Cell {
    /// The problem to compute.
    pub fn problem(&self) -> Problem {
        self.shape.problem(self.mask, self.dtype)
    }

    /// As `1x8x512x64 f16 causal`.
    pub fn label(&self) -> String {
        format!("{} {} {}", self.shape, self.dtype, self.mask)
    }

    /// Whether memory rather than arithmetic sets its limit: one query reads every key and value once.
    pub fn is_decode(&self) -> bool {
        self.shape.len_q == 1
    }
}

/// The cells of the CPU engine's record: four shapes in three dtypes, causal and not, and one decode.
pub fn cpu_matrix() -> Vec<Cell> {
    let shapes = ["1x8x512x64", "1x8x2048x64", "1x8x2048x128", "1x32x1024x128"];
    let mut cells = Vec::new();
    for shape in shapes {
        let named = crate::shapes::parse(shape).expect("a shape of the matrix");
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for mask in [Mask::None, Mask::Causal] {
                cells.push(Cell { name: "", shape: named.shape, mask, dtype });
            }
        }
    }
    let decode = crate::shapes::parse("decode").expect("a shape by name");
    cells.push(Cell { name: decode.name, shape: decode.shape, mask: Mask::None, dtype: decode.dtype });
    cells
}

/// What was measured of one contender in a cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Its name.
    pub name: String,
    /// Calls in one sample.
    pub calls_per_sample: u32,
    /// Microseconds a call, one sample a round.
    pub samples_us: Vec<f64>,
    /// Their median.
    pub p50_us: Option<f64>,
    /// Their 90 % quantile.
    pub p90_us: Option<f64>,
    /// The least.
    pub min_us: Option<f64>,
    /// The 95 % bootstrap interval of the median.
    pub median_interval_us: Option<Interval>,
    /// Floating-point operations a second by the median, causal counted half, in units of 1e9.
    pub gflops: Option<f64>,
    /// That as a share of the measured FMA peak.
    pub fma_peak_share: Option<f64>,
    /// Bytes that must move a second by the median, in units of 1e9.
    pub gbytes: Option<f64>,
    /// That as a share of the measured read bandwidth; only where memory is the limit.
    pub bandwidth_share: Option<f64>,
    /// The time against the ceilings that were kept for this machine; absent where none were.
    pub roofline: Option<Roofline>,
    /// The rule's judgement of its output.
    pub error: Option<Judgement>,
    /// Why it left before the end, if it did.
    pub failure: Option<String>,
}

impl Measured {
    /// Whether its output obeys the rule.
    pub fn is_right(&self) -> bool {
        self.error.as_ref().is_some_and(Judgement::passed)
    }
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

/// Everything that a cell gave.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The shape's name, if it has one.
    pub name: Option<&'static str>,
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
    /// The seed of the inputs.
    pub seed: u64,
    /// Checksums of q, k and v, which every contender was given.
    pub checksums: [u32; 3],
    /// Rows of the output that were judged.
    pub judged_rows: usize,
    /// Rows of the output.
    pub rows: usize,
    /// The FMA peak in GFLOP/s, by the best of its samples.
    pub fma_peak_gflops: f64,
    /// Microseconds that the operations of a call take as multiply-adds that never leave the registers, one sample a round,
    /// in turn with the contenders.
    pub fma_peak_samples_us: Vec<f64>,
    /// The read bandwidth in GB/s, likewise; only where memory is the limit.
    pub bandwidth_gbytes: Option<f64>,
    /// Microseconds that the bytes of a call take to be read where no cache holds them, as the samples above.
    pub bandwidth_samples_us: Vec<f64>,
    /// Microseconds of the same call without its mask, as the samples above; only where the mask is causal.
    pub full_samples_us: Vec<f64>,
    /// The rate as a share of that without the mask, by useful operations and medians; likewise.
    pub causal_share: Option<f64>,
    /// Ours first.
    pub results: Vec<Measured>,
    /// The hash of all samples, round by round.
    pub pairing: String,
    /// Ours against each peer that ran.
    pub comparisons: Vec<Comparison>,
    /// Ours came out faster than the best that was seen of the machine: its speed changed meanwhile, so that nothing is
    /// decided.
    pub impossible: bool,
    /// The rate is so low that the call is timed rather than the arithmetic.
    pub launch_bound: bool,
    #[serde(skip)]
    cell: Option<Cell>,
}

impl Outcome {
    /// As `1x8x512x64 f16 causal`.
    pub fn label(&self) -> String {
        format!("{} {} {}", self.shape, self.dtype, self.mask)
    }

    /// Ours.
    pub fn ours(&self) -> &Measured {
        &self.results[0]
    }

    /// What was asked for.
    pub fn cell(&self) -> Option<&Cell> {
        self.cell.as_ref()
    }
}

/// What was taken in a cell, from which all that is said of it follows.
pub(crate) struct Taken {
    pub checksums: [u32; 3],
    pub judged_rows: usize,
    /// Ours first, each with the rule's judgement of its output.
    pub results: Vec<(Samples, Option<Judgement>)>,
    /// The samples of the limits and of the call without its mask, as in [`Outcome`].
    pub fma_peak_us: Vec<f64>,
    pub bandwidth_us: Vec<f64>,
    pub full_us: Vec<f64>,
    /// The FMA peak, where there is no round to take it from.
    pub fma_peak_gflops: f64,
}

impl Taken {
    /// What follows from it.
    pub(crate) fn outcome(self, cell: &Cell, ceilings: Option<&Ceilings>, margin: f64) -> Outcome {
        let problem = cell.problem();
        let peak = best_rate(problem.flops(), &self.fma_peak_us).unwrap_or(self.fma_peak_gflops);
        let bandwidth = best_rate(problem.min_bytes(), &self.bandwidth_us);
        let results: Vec<Measured> = self
            .results
            .into_iter()
            .map(|(samples, error)| {
                let mut measured = summarise(samples, error, &problem, peak, bandwidth);
                let roofline = |ceilings: &Ceilings| ceilings.roofline(&problem, measured.p50_us);
                measured.roofline = ceilings.and_then(roofline);
                measured
            })
            .collect();
        let by_arithmetic = physics::rate(results[0].gflops, Some(peak), physics::ABOVE_MEASURED);
        let by_memory = physics::rate(results[0].gbytes, bandwidth, physics::ABOVE_MEASURED);
        let impossible = [by_arithmetic, by_memory].contains(&Rate::Impossible);
        let mut comparisons = compare(&results, margin);
        if impossible {
            for comparison in &mut comparisons {
                comparison.verdict = Verdict::Undecided;
            }
        }
        let full = Cell { mask: Mask::None, ..*cell }.problem();
        let causal_share = stats::median(&self.full_us)
            .zip(results[0].p50_us)
            .map(|(full_us, us)| full_us / us * (problem.flops() / full.flops()));
        let mut sampled: Vec<(&str, &[f64])> =
            results.iter().map(|result| (result.name.as_str(), &result.samples_us[..])).collect();
        sampled.extend([
            ("FMA peak", &self.fma_peak_us[..]),
            ("read bandwidth", &self.bandwidth_us),
            ("without the mask", &self.full_us),
        ]);
        let pairing = pairing(&sampled);
        Outcome {
            name: Some(cell.name).filter(|name| !name.is_empty()),
            shape: cell.shape.to_string(),
            dtype: cell.dtype.name(),
            mask: cell.mask.to_string(),
            flops: problem.flops(),
            bytes: problem.min_bytes(),
            seed: SEED,
            checksums: self.checksums,
            judged_rows: self.judged_rows,
            rows: rows(&problem),
            fma_peak_gflops: peak,
            fma_peak_samples_us: self.fma_peak_us,
            bandwidth_gbytes: bandwidth,
            bandwidth_samples_us: self.bandwidth_us,
            full_samples_us: self.full_us,
            causal_share,
            results,
            pairing,
            comparisons,
            impossible,
            launch_bound: by_arithmetic == Rate::LaunchBound && !cell.is_decode(),
            cell: Some(*cell),
        }
    }
}

/// What a limit is by its samples, in units of 1e9 a second: the best that was seen, because whatever else runs on a machine
/// only takes away from it.
pub(crate) fn best_rate(amount: f64, samples_us: &[f64]) -> Option<f64> {
    stats::quantile(samples_us, 0.0).map(|time| amount / time / 1e3)
}

/// The hash of samples round by round: it shows who took which time beside whom, which comparisons rest on.
pub(crate) fn pairing(of: &[(&str, &[f64])]) -> String {
    let mut hasher = blake3::Hasher::new();
    let rounds = of.iter().map(|(_, samples)| samples.len()).max().unwrap_or(0);
    for round in 0..rounds {
        for (name, samples) in of {
            // Nobody's time is 0.
            let time = samples.get(round).copied().unwrap_or(0.0);
            hasher.update(name.as_bytes()).update(&time.to_le_bytes());
        }
    }
    format!("blake3:{}", hasher.finalize().to_hex())
}

/// How cells are timed.
#[derive(Debug)]
pub struct Bench {
    engine: DeviceEngine,
    isa: cpu::Isa,
    threads: usize,
    effort: Effort,
    torch: Option<Torch>,
    warmups: u32,
    ceilings: Option<Ceilings>,
}

/// What comparing a thing with itself, again and again, says of the procedure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AgainstItself {
    /// The cell, as `1x8x512x64 f16 causal`.
    pub cell: String,
    /// What one side's times were multiplied with: 1.02 plants a slow-down of 2 %.
    pub handicap: f64,
    /// Measurements.
    pub repetitions: usize,
    /// How often each verdict was given: FASTER, SAME, SLOWER, UNDECIDED.
    pub verdicts: [usize; 4],
    /// How often the 95 % interval held the truth.
    pub held: usize,
    /// Every measurement's comparison, the handicapped side against the other.
    pub comparisons: Vec<Comparison>,
    /// The samples that each rests on, of the handicapped side and of the other.
    pub samples_us: Vec<[Vec<f64>; 2]>,
    /// The hash of these samples, round by round.
    pub pairing: String,
}

/// Why a thing cannot be compared with itself.
pub(crate) const TOO_FEW: &str = "fewer than five rounds say nothing: give --samples 5 or more";

/// The share of measurements in which FASTER, and SLOWER, may be said of two things that are one.
pub const FALSE_POSITIVES: f64 = 0.03;

impl AgainstItself {
    /// Of comparisons of a thing, its times multiplied with `handicap`, with itself.
    pub fn new(cell: String, handicap: f64, comparisons: Vec<Comparison>) -> Self {
        let count = |verdict| comparisons.iter().filter(|it| it.verdict == verdict).count();
        let truth = 1.0 / handicap;
        let holds = |it: &&Comparison| (it.interval.low..=it.interval.high).contains(&truth);
        Self {
            cell,
            handicap,
            repetitions: comparisons.len(),
            verdicts: [Verdict::Faster, Verdict::Same, Verdict::Slower, Verdict::Undecided].map(count),
            held: comparisons.iter().filter(holds).count(),
            comparisons,
            samples_us: Vec::new(),
            pairing: String::new(),
        }
    }

    /// Of the samples of every measurement, the handicapped side's first; absent where one has too few.
    pub fn of(cell: String, handicap: f64, samples_us: Vec<[Vec<f64>; 2]>, margin: f64) -> Option<Self> {
        let compared = |[ours, other]: &[Vec<f64>; 2]| Comparison::of(ours, "itself", other, margin);
        let comparisons = samples_us.iter().map(compared).collect::<Option<_>>()?;
        let sides =
            [0, 1].map(|side: usize| samples_us.iter().flat_map(|pair| &pair[side]).copied().collect());
        let [ours, other]: [Vec<f64>; 2] = sides;
        let pairing = pairing(&[("flashcore", &ours), ("itself", &other)]);
        Some(Self { samples_us, pairing, ..Self::new(cell, handicap, comparisons) })
    }

    /// Whether the procedure keeps what it promises: without a handicap FASTER and SLOWER within their rate of error
    /// (or once, where that is less than one), with one SLOWER in nine of ten and never FASTER.
    pub fn passed(&self) -> bool {
        let [faster, _, slower, _] = self.verdicts;
        let most = ((self.repetitions as f64 * FALSE_POSITIVES) as usize).max(1);
        if self.handicap > 1.0 {
            faster == 0 && slower * 10 >= self.repetitions * 9
        } else {
            faster <= most && slower <= most
        }
    }
}

/// Somebody whose times are multiplied with a number, to plant a slow-down that is known.
pub(crate) struct Handicapped<C> {
    pub(crate) contender: C,
    pub(crate) name: &'static str,
    pub(crate) factor: f64,
}

impl<C: Contender> Contender for Handicapped<C> {
    fn name(&self) -> String {
        self.name.into()
    }

    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String> {
        self.contender.sample(warm, calls).map(|us| us * self.factor)
    }
}

impl Bench {
    /// With the CPU engine on given instructions and threads, and torch where there is one.
    pub fn new(isa: cpu::Isa, threads: usize, effort: Effort, torch: Option<Torch>) -> Result<Self, String> {
        let engine = DeviceEngine::cpu(isa, threads)?;
        Ok(Self { engine, isa, threads, effort, torch, warmups: 0, ceilings: None })
    }

    /// With so many calls of everybody before the first sample, beside the one that finds out how long a call takes.
    pub fn with_warmups(mut self, warmups: u32) -> Self {
        self.warmups = warmups;
        self
    }

    /// With ceilings that times are held against.
    pub fn with_ceilings(mut self, ceilings: Option<Ceilings>) -> Self {
        self.ceilings = ceilings;
        self
    }

    /// Compares ours with itself so many times, each time by the whole procedure; one side's times are multiplied with
    /// `handicap`. Stops early, with what there is, when `stop` says so.
    pub fn against_itself(
        &self,
        cell: &Cell,
        repetitions: usize,
        handicap: f64,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<AgainstItself, String> {
        let operands = inputs(cell);
        // Nobody else's threads are about.
        let effort = Effort { settle: Duration::ZERO, ..self.effort };
        let side = |name, factor| -> Box<dyn Contender + '_> {
            Box::new(Handicapped { contender: Ours::new(&self.engine, &operands), name, factor })
        };
        let mut taken = Vec::new();
        while taken.len() < repetitions && !stop() {
            progress(taken.len());
            let mut contenders = [side("flashcore", handicap), side("itself", 1.0)];
            let mut samples = measure(&mut contenders, &effort, stop, &mut |_, _| {});
            if stop() {
                break;
            }
            if let Some(why) = samples.iter().find_map(|samples| samples.failure.clone()) {
                return Err(why);
            }
            taken.push([0, 1].map(|side: usize| std::mem::take(&mut samples[side].times)));
        }
        AgainstItself::of(cell.label(), handicap, taken, effort.margin).ok_or_else(|| TOO_FEW.into())
    }

    /// The engine under test.
    pub fn engine(&self) -> &DeviceEngine {
        &self.engine
    }

    /// Times one cell. `progress` is told what is going on and the share of it that is done.
    pub fn run(
        &mut self,
        cell: &Cell,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(&str, f64),
    ) -> Result<Outcome, String> {
        let problem = cell.problem();
        progress("drawing inputs", 0.0);
        let operands = inputs(cell);
        progress("asking the oracle", 0.0);
        let (yardstick, judged) = yardstick(&operands);
        let mut ours = Ours::new(&self.engine, &operands);
        let error = ours.output().map(|o| judged.judge(&yardstick, &o))?;
        let mut errors = vec![Ok(error)];
        if let Some(torch) = &mut self.torch {
            progress("handing the inputs to torch", 0.0);
            let output = torch.load(&operands).and_then(|()| torch.output(&problem));
            errors.push(output.map(|o| judged.judge(&yardstick, &o)));
        }
        let mut contenders: Vec<Box<dyn Contender + '_>> = vec![Box::new(ours)];
        let mut absent = None;
        if let Some(torch) = &mut self.torch {
            match &errors[1] {
                Ok(_) => contenders.push(Box::new(torch)),
                Err(why) => absent = Some(why.clone()),
            }
        }
        let limits = contenders.len();
        let work = cpu::Work::fma(self.isa, self.threads);
        contenders.push(Box::new(Limit { name: "FMA peak", work, amount: problem.flops() }));
        if cell.is_decode() {
            let work = cpu::Work::read(self.isa, self.threads);
            contenders.push(Box::new(Limit { name: "read bandwidth", work, amount: problem.min_bytes() }));
        }
        // A rate that was taken minutes earlier says nothing on a machine whose neighbours come and go.
        let causal = cell.mask == Mask::Causal;
        if causal {
            contenders.push(Box::new(Ours { mask: Mask::None, ..Ours::new(&self.engine, &operands) }));
        }
        if self.warmups > 0 {
            progress("warming up", 0.0);
            for contender in &mut contenders {
                // Whoever fails here fails again on the clock, where it is written down.
                let _ = contender.sample(self.warmups, 1);
            }
        }
        let mut rounds = |round: usize, share: f64| progress(&format!("round {round}"), share.min(1.0));
        let mut samples = measure(&mut contenders, &self.effort, stop, &mut rounds);
        drop(contenders);
        let mut limits = samples.split_off(limits).into_iter().map(|samples| samples.times);
        let fma_peak_us = limits.next().unwrap_or_default();
        let full_us = if causal { limits.next_back().unwrap_or_default() } else { Vec::new() };
        let bandwidth_us = limits.next().unwrap_or_default();
        let unseen = fma_peak_us.is_empty();
        let fma_peak_gflops =
            if unseen { cpu::fma_peak(self.isa, self.threads, Duration::ZERO) } else { 0.0 };
        if let Some(why) = absent {
            samples.push(Samples { name: "torch".into(), calls: 0, times: Vec::new(), failure: Some(why) });
        }
        let taken = Taken {
            checksums: checksums(&operands),
            judged_rows: yardstick.rows().len(),
            results: samples.into_iter().zip(errors).map(|(samples, error)| (samples, error.ok())).collect(),
            fma_peak_us,
            bandwidth_us,
            full_us,
            fma_peak_gflops,
        };
        Ok(taken.outcome(cell, self.ceilings.as_ref(), self.effort.margin))
    }
}

/// A cell's inputs.
pub(crate) fn inputs(cell: &Cell) -> Operands {
    Operands::draw(cell.problem(), None, Arrangement::Bhsd, Distribution::Normal, SEED)
}

/// The checksums of q, k and v.
pub(crate) fn checksums(operands: &Operands) -> [u32; 3] {
    [&operands.q, &operands.k, &operands.v].map(peers::checksum)
}

/// Which rows of an output are judged.
enum Judged {
    All,
    Rows(Vec<usize>, usize),
}

impl Judged {
    fn judge(&self, yardstick: &Yardstick, o: &[f32]) -> Judgement {
        match self {
            Judged::All => yardstick.judge(o, None),
            Judged::Rows(rows, width) => {
                let chosen: Vec<f32> =
                    rows.iter().flat_map(|row| o[row * width..][..*width].to_vec()).collect();
                yardstick.judge(&chosen, None)
            }
        }
    }
}

/// The truth for all rows, or for as many as it takes reasonable time to know.
fn yardstick(operands: &Operands) -> (Yardstick, Judged) {
    let problem = &operands.problem;
    let Some(chosen) = judged_rows(problem) else { return (operands.yardstick(), Judged::All) };
    let index = |row: &Row| (row.batch * problem.heads_q + row.head) * problem.len_q + row.query;
    let indices = chosen.iter().map(index).collect();
    (operands.yardstick_of_rows(&chosen), Judged::Rows(indices, problem.head_dim_v))
}

/// How many rows are judged.
pub(crate) fn judged(problem: &Problem) -> usize {
    judged_rows(problem).map_or(rows(problem), |rows| rows.len())
}

/// The rows that are judged where there are too many to judge all.
fn judged_rows(problem: &Problem) -> Option<Vec<Row>> {
    let work_of_row = problem.len_k as f64 * (problem.head_dim + problem.head_dim_v) as f64;
    let all = work_of_row * rows(problem) as f64 <= ORACLE_WORK;
    (!all).then(|| sample_rows(problem, (ORACLE_WORK / work_of_row) as usize, SEED))
}

pub(crate) fn rows(problem: &Problem) -> usize {
    problem.batch * problem.heads_q * problem.len_q
}

/// The CPU engine on the clock.
struct Ours<'a> {
    engine: &'a DeviceEngine,
    operands: &'a Operands,
    mask: Mask,
    o: Guarded,
}

impl<'a> Ours<'a> {
    fn new(engine: &'a DeviceEngine, operands: &'a Operands) -> Self {
        let Problem { batch, heads_q, len_q, head_dim_v, dtype, .. } = operands.problem;
        let mut o = Guarded::new(dtype, Arrangement::Bhsd, [batch, heads_q, len_q, head_dim_v]);
        o.poison(Poison::First);
        Self { engine, operands, mask: operands.problem.mask, o }
    }

    fn call(&mut self) -> Result<(), String> {
        let Operands { q, k, v, .. } = self.operands;
        let inputs = [&q.view(), &k.view(), &v.view()];
        let attention = self.operands.attention().mask(self.mask);
        let run = self.engine.run(&attention, inputs, &mut self.o.view_mut(), None);
        run.map_err(|error| error.to_string())
    }

    /// What one call computes.
    fn output(&mut self) -> Result<Vec<f32>, String> {
        self.call()?;
        Ok(self.o.values())
    }
}

impl Contender for Ours<'_> {
    fn name(&self) -> String {
        "flashcore".into()
    }

    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String> {
        for _ in 0..warm {
            self.call()?;
        }
        let start = Instant::now();
        for _ in 0..calls {
            self.call()?;
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls))
    }
}

/// The operations or the bytes of a problem with nothing in their way, on the clock: what everybody's rate is a share of.
struct Limit {
    name: &'static str,
    work: cpu::Work,
    amount: f64,
}

impl Contender for Limit {
    fn name(&self) -> String {
        self.name.into()
    }

    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String> {
        for _ in 0..warm {
            self.work.time(self.amount);
        }
        Ok(self.work.time(self.amount * f64::from(calls)) * 1e6 / f64::from(calls))
    }
}

fn summarise(
    samples: Samples,
    error: Option<Judgement>,
    problem: &Problem,
    peak: f64,
    bandwidth: Option<f64>,
) -> Measured {
    // Whoever left before the end has samples, and nothing is said of them.
    let times = if samples.failure.is_none() { &samples.times[..] } else { &[] };
    let p50 = stats::median(times);
    let gflops = p50.map(|time| problem.flops() / time / 1e3);
    let gbytes = p50.map(|time| problem.min_bytes() / time / 1e3);
    Measured {
        name: samples.name,
        calls_per_sample: samples.calls,
        p50_us: p50,
        p90_us: stats::quantile(times, 0.9),
        min_us: stats::quantile(times, 0.0),
        median_interval_us: stats::median_interval(times, 0.95),
        gflops,
        fma_peak_share: gflops.map(|gflops| gflops / peak),
        gbytes,
        bandwidth_share: gbytes.zip(bandwidth).map(|(gbytes, bandwidth)| gbytes / bandwidth),
        roofline: None,
        error,
        failure: samples.failure,
        samples_us: samples.times,
    }
}

/// Ours against every peer that ran to the end.
fn compare(results: &[Measured], margin: f64) -> Vec<Comparison> {
    if results[0].failure.is_some() {
        return Vec::new();
    }
    let ours = &results[0].samples_us;
    let wrong = results[0].error.as_ref().is_some_and(|error| !error.passed());
    let peers = results[1..].iter().filter(|peer| peer.failure.is_none());
    let of = |peer: &Measured| Comparison::of(ours, &peer.name, &peer.samples_us, margin);
    peers.filter_map(of).map(|comparison| comparison.unless(wrong)).collect()
}

impl Comparison {
    /// Ours against a peer by their samples, one a round each; absent where they are too few to say anything.
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

    /// Without a verdict where ours is wrong: how fast it is decides nothing.
    pub(crate) fn unless(mut self, wrong: bool) -> Self {
        if wrong {
            self.verdict = Verdict::Undecided;
        }
        self
    }
}

/// What many cells say together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
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

/// The speed-ups over each peer, over all cells; absent with fewer than two.
pub fn summarise_all(outcomes: &[Outcome]) -> Vec<Summary> {
    let mut names: Vec<&str> =
        outcomes.iter().flat_map(|outcome| outcome.comparisons.iter().map(|c| c.peer.as_str())).collect();
    names.sort_unstable();
    names.dedup();
    names
        .into_iter()
        .filter_map(|peer| {
            let of = |outcome: &Outcome| {
                let found = outcome.comparisons.iter().find(|comparison| comparison.peer == peer);
                found.map(|comparison| (comparison.speed_up, outcome.label(), comparison.verdict))
            };
            let all: Vec<(f64, String, Verdict)> = outcomes.iter().filter_map(of).collect();
            let ratios: Vec<f64> = all.iter().map(|(ratio, _, _)| *ratio).collect();
            let (smallest, cell, _) = all.iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
            let count = |verdict| all.iter().filter(|(_, _, v)| *v == verdict).count();
            (all.len() > 1).then_some(Summary {
                peer: peer.to_string(),
                cells: all.len(),
                geometric_mean: stats::geometric_mean(&ratios)?,
                smallest: *smallest,
                smallest_cell: cell.clone(),
                verdicts: [Verdict::Faster, Verdict::Same, Verdict::Slower, Verdict::Undecided].map(count),
            })
        })
        .collect()
}

/// A causal cell's rate as a share of the rate of the same call without its mask, by useful operations.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CausalShare {
    /// The cell without its mask, as `1x8x512x64 f16`.
    pub cell: String,
    /// Causal rate over full rate.
    pub share: f64,
}

/// The causal share of every cell that has one.
pub fn causal_shares(outcomes: &[Outcome]) -> Vec<CausalShare> {
    let of = |outcome: &Outcome| {
        let cell = format!("{} {}", outcome.shape, outcome.dtype);
        outcome.causal_share.map(|share| CausalShare { cell, share })
    };
    outcomes.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(name: &str, times: Vec<f64>) -> Measured {
        let samples = Samples { name: name.into(), calls: 1, times, failure: None };
        summarise(samples, None, &Problem::new(1, 1, 512, 64, DType::F16), 100.0, None)
    }

    #[test]
    fn the_matrix_has_24_cells_and_a_decode() {
        let cells = cpu_matrix();
        assert_eq!(cells.len(), 25);
        assert_eq!(cells.iter().filter(|cell| cell.is_decode()).count(), 1);
        for (i, cell) in cells.iter().enumerate() {
            assert!(!cells[..i].contains(cell), "{}", cell.label());
        }
    }

    #[test]
    fn rates_come_from_the_median_and_causal_counts_half() {
        let problem = Problem::new(1, 1, 1024, 64, DType::F16);
        let samples =
            Samples { name: "x".into(), calls: 1, times: vec![1000.0, 900.0, 2000.0], failure: None };
        let full = summarise(samples.clone(), None, &problem, 1000.0, None);
        assert_eq!(full.p50_us, Some(1000.0));
        assert!((full.gflops.unwrap() - 4.0 * 1024.0 * 1024.0 * 64.0 / 1e6).abs() < 1e-9);
        let causal = summarise(samples, None, &problem.with_mask(Mask::Causal), 1000.0, None);
        assert_eq!(causal.gflops.unwrap() * 2.0, full.gflops.unwrap());
        assert_eq!(full.bandwidth_share, None);
    }

    /// The mission's cell where ours took 1 ms a round, the multiply-adds these times, and torch 2 ms.
    fn beside(fma_peak_us: &[f64]) -> Outcome {
        let named = crate::shapes::parse("mission").unwrap();
        let cell = Cell { name: named.name, shape: named.shape, mask: Mask::None, dtype: named.dtype };
        let rounds = fma_peak_us.len();
        let samples = |name: &str, us: f64| Samples {
            name: name.into(),
            calls: 1,
            times: vec![us; rounds],
            failure: None,
        };
        let taken = Taken {
            checksums: [0; 3],
            judged_rows: 1,
            results: vec![(samples("flashcore", 1e3), None), (samples("torch", 2e3), None)],
            fma_peak_us: fma_peak_us.to_vec(),
            bandwidth_us: Vec::new(),
            full_us: Vec::new(),
            fma_peak_gflops: 0.0,
        };
        taken.outcome(&cell, None, 0.02)
    }

    #[test]
    fn a_limit_is_the_best_that_was_seen_of_it() {
        // Other programs ran in all turns of the limit but one.
        let noisy = beside(&[2.5e3, 900.0, 3e3, 4e3, 2e3, 3e3, 2.2e3, 5e3]);
        assert!(!noisy.impossible);
        assert_eq!(noisy.results[0].fma_peak_share, Some(0.9));
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
        let ours = result("flashcore", vec![100.0; 20]);
        let [comparison] = &compare(&[ours, result("torch", vec![150.0; 20])], 0.02)[..] else { panic!() };
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
    fn a_peer_that_failed_is_not_compared() {
        let mut torch = result("torch", vec![150.0; 20]);
        torch.failure = Some("it died".into());
        assert!(compare(&[result("flashcore", vec![100.0; 20]), torch], 0.02).is_empty());
    }

    #[test]
    fn a_thing_against_itself_may_be_called_faster_or_slower_in_3_of_100_measurements() {
        let of = |low: f64, high: f64, verdict| Comparison {
            peer: "itself".into(),
            speed_up: 1.0,
            interval: Interval { low, high, level: 0.95 },
            verdict_interval: Interval { low, high, level: 0.99 },
            verdict,
            margin: 0.02,
        };
        let run = |faster: usize, same: usize| {
            let mut all = vec![of(1.01, 1.05, Verdict::Faster); faster];
            all.extend(vec![of(0.99, 1.01, Verdict::Same); same]);
            AgainstItself::new("cell".into(), 1.0, all)
        };
        let good = run(6, 194);
        assert_eq!((good.verdicts, good.held, good.passed()), ([6, 194, 0, 0], 194, true));
        assert!(!run(7, 193).passed());
        assert!(run(1, 9).passed() && !run(2, 8).passed());
        let slow = |count: usize, others: usize| {
            let mut all = vec![of(0.97, 0.985, Verdict::Slower); count];
            all.extend(vec![of(0.97, 1.01, Verdict::Undecided); others]);
            AgainstItself::new("cell".into(), 1.02, all)
        };
        assert!(slow(9, 1).passed() && !slow(8, 2).passed());
        assert_eq!(slow(9, 1).held, 10, "both hold 1 / 1.02");
    }

    #[test]
    fn a_handicap_makes_a_time_longer_by_just_so_much() {
        struct Steady;
        impl Contender for Steady {
            fn name(&self) -> String {
                "steady".into()
            }

            fn sample(&mut self, _: u32, calls: u32) -> Result<f64, String> {
                if calls > 9 { Err("too many".into()) } else { Ok(50.0) }
            }
        }
        let mut slowed = Handicapped { contender: Steady, name: "slowed", factor: 1.02 };
        assert_eq!((slowed.name().as_str(), slowed.sample(1, 1)), ("slowed", Ok(51.0)));
        assert_eq!(slowed.sample(1, 10), Err("too many".into()));
    }

    #[test]
    fn without_samples_everything_measured_is_absent() {
        let nothing = result("x", Vec::new());
        assert_eq!((nothing.p50_us, nothing.gflops, nothing.min_us), (None, None, None));
        assert_eq!(serde_json::to_value(&nothing).unwrap()["p50_us"], serde_json::Value::Null);
    }
}
