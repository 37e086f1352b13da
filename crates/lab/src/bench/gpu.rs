//! Timing on a GPU, by the kernel clock and the call clock, with each contender in a process of its own.
//!
//! Nothing that goes wrong in a cell ends the run: it is recorded in the row of the contender that it happened to.

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

use flashcore::cuda::driver::{GpuState, Nvml};
use flashcore::plan::Kernel;
use flashcore::{DType, Keys, Mask, Pass, Problem, Queries};
use serde::Serialize;
use serde_json::{Map, Value};

use super::cells::{Cell, Member, Types, WIDE};
use super::itself::{AgainstItself, Repetitions};
use super::outcome::{
    CallClock, Conditions, Details, FirstCall, GpuConditions, Limits, Measured, Outcome, SEED, State, is_ours,
};
use super::{Bench, Clock, Machine};
use crate::ceilings::Ceilings;
use crate::energy::{self, Energy, Meter};
use crate::files::widened;
use crate::gpu::cublas::{self, CUBLAS};
use crate::gpu::host::{Host, Kind};
use crate::gpu::pool::{Pool, Stored};
use crate::gpu::protocol::{Asked, Request};
use crate::gpu::worker::{KERNEL, PLANNER, SCHEDULE};
use crate::peers::{Folder, Torch, python};
use crate::physics;
use crate::rule::{Judgement, Row, Yardstick};
use crate::stats;
use crate::timing::{Contender, Effort, Measurement, Samples, Used, Watch, measure_watched};

/// The least duration of a sample of the kernel clock: a thousand times the resolution of an event.
pub(crate) const SAMPLE: Duration = Duration::from_micros(500);
/// The least duration of a sample in which the power limit settles: the GPU sets its clock by the power of some tens of
/// milliseconds, and its energy counter steps every 100.
pub(crate) const SUSTAINED_SAMPLE: Duration = Duration::from_millis(250);
/// Replays that a sustained sample is made of, where calls are long.
const SUSTAINED_REPLAYS: u32 = 15;
/// The most calls of a graph in a sustained sample; recording more takes long.
const SUSTAINED_GRAPH: u32 = 512;
/// Samples of the call clock; fewer where a call is long.
const CALLS: u32 = 300;
/// Time for the samples of the call clock.
const CALLS_TIME_US: f64 = 200_000.0;
/// The most sets of tensors, however large the cache is.
const MOST_SETS: usize = 128;
/// The most memory for all sets of tensors.
const MOST_BYTES: f64 = 8e9;

/// torch's backends.
pub const PEERS: [&str; 4] = ["flash", "cudnn", "efficient", "math"];
/// Other attention libraries in torch's Python, timed where they are installed.
pub const IN_PYTHON: [&str; 4] = [FA3, "flash_attn", "xformers", "flex"];
/// FlashAttention-3.
pub const FA3: &str = "fa3";
/// Peers whose causal mask is aligned bottom-right, as ours is.
const BOTTOM_RIGHT: [&str; 2] = [FA3, "flash_attn"];

/// Every possible peer.
pub fn peers() -> Vec<&'static str> {
    PEERS.into_iter().chain(IN_PYTHON).chain([CUBLAS]).collect()
}

/// The GPU and its driver.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Facts {
    /// What our worker reports about the GPU and itself.
    pub ours: Value,
    /// What torch's worker reports about itself, and the versions of the libraries beside it; absent without torch.
    pub torch: Option<Value>,
    /// Why FlashAttention-3 is not there, where it was wanted and torch is there.
    pub no_fa3_because: Option<String>,
    /// The version of the kernel driver.
    pub driver: Option<String>,
    /// The dense peak of the tensor cores at the highest clock in TFLOP/s, where the generation is known.
    pub peak_tflops: Option<f64>,
    /// The rate of an 8192³ matrix product in f16, measured by torch.
    pub matmul_tflops: Option<f64>,
}

/// What calls find in the L2 cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// Nothing of their own: calls rotate over so many sets of tensors that none is still in the cache
    Cold,
    /// What the previous call left: all calls work on one set of tensors
    Warm,
}

/// How long a sample is, and so at which clock a GPU runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Regime {
    /// Half a millisecond, as of a GPU that has other work in between: its clock is high.
    Bursts,
    /// Calls without a pause, so long that the power limit has set the clock, as of a GPU that does nothing else.
    Sustained,
}

impl Regime {
    /// The least duration of a sample.
    pub fn sample(self) -> Duration {
        match self {
            Regime::Bursts => SAMPLE,
            Regime::Sustained => SUSTAINED_SAMPLE,
        }
    }

    /// How a sample of so many calls is replayed. A sustained one is made of replays of a smaller graph, after a third
    /// as many that do not count: until then, the clock is still that of the contender before.
    fn replays(self, warm: u32, calls: u32) -> Replays {
        match self {
            Regime::Bursts => Replays { warm, calls, timed: 1 },
            Regime::Sustained => {
                let graph = calls.div_ceil(SUSTAINED_REPLAYS).clamp(1, SUSTAINED_GRAPH);
                let timed = calls.div_ceil(graph);
                Replays { warm: timed.div_ceil(3), calls: graph, timed }
            }
        }
    }
}

/// Replays of a graph of calls: some before the clock starts, and some on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Replays {
    warm: u32,
    calls: u32,
    timed: u32,
}

impl Replays {
    fn request(self, who: &str) -> Request {
        let Self { warm, calls, timed } = self;
        Request::Sample { who: who.into(), warm, calls, replays: timed }
    }
}

/// Which of our kernels are timed.
#[derive(Clone, Debug, PartialEq)]
pub enum Ours {
    /// The planner's choice.
    Planner,
    /// The defaults of some kernels.
    Kernels(Vec<Kernel>),
    /// Some schedules, by their text.
    Schedules(Vec<String>),
    /// The planner's choice, and schedules beside it.
    Beside(Vec<String>),
}

impl Ours {
    /// Their names in requests; the others are compared with the first.
    fn names(&self) -> Vec<String> {
        match self {
            Ours::Planner => vec![PLANNER.into()],
            Ours::Kernels(kernels) => kernels.iter().map(|kernel| format!("{KERNEL}{kernel}")).collect(),
            Ours::Schedules(texts) => texts.iter().map(|text| format!("{SCHEDULE}{text}")).collect(),
            Ours::Beside(texts) => {
                let beside = texts.iter().map(|text| format!("{SCHEDULE}{text}"));
                [PLANNER.into()].into_iter().chain(beside).collect()
            }
        }
    }
}

/// How cells are timed.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The GPU's number.
    pub ordinal: u32,
    /// Which of our kernels.
    pub ours: Ours,
    /// Which peers.
    pub peers: Vec<String>,
    /// Those that are added to them where they are found to be installed.
    pub installed: &'static [&'static str],
    /// What calls find in the cache.
    pub cache: Cache,
    /// How long a sample is.
    pub regime: Regime,
    /// Whether calls are also timed by the call clock.
    pub call_clock: bool,
    /// Whether the first call of the problem is timed too, in processes of its own.
    pub first_call: bool,
    /// Rounds, if an exact number is wanted.
    pub rounds: Option<usize>,
    /// Replays of each contender before the first sample.
    pub warmups: u32,
    /// The smallest difference that matters.
    pub margin: f64,
}

/// Times cells on one GPU.
pub struct GpuBench {
    setup: Setup,
    ours: RefCell<Host>,
    torch: Option<RefCell<Host>>,
    cublas: RefCell<Host>,
    ceilings: Option<Ceilings>,
    facts: Facts,
    no_torch: Option<String>,
    nvml: Option<Nvml>,
    folder: Folder,
    pools: Vec<(Pool, Stored)>,
    /// Ours in other forms.
    beside: RefCell<Host>,
    /// The numbers of 8 bits of some types, in 16.
    widened: Vec<(Types, Stored)>,
}

impl GpuBench {
    /// Starts the workers and hands them the inputs that the cells need. Without torch, only ours run.
    pub fn start(mut setup: Setup, cells: &[Member], progress: &mut dyn FnMut(&str)) -> Result<Self, String> {
        let folder = Folder::new()?;
        progress("starting the GPU");
        let mut ours = Host::new(Kind::Ours, setup.ordinal);
        let hello = ours.hello()?;
        let mut no_torch = None;
        let mut torch = None;
        let mut torch_facts = None;
        if !setup.installed.is_empty() || setup.peers.iter().any(|peer| peer != CUBLAS) {
            progress("starting torch");
            let mut host = Host::new(Kind::Torch, setup.ordinal);
            match host.hello() {
                Ok(facts) => (torch, torch_facts) = (Some(host), Some(facts)),
                Err(why) => no_torch = Some(why),
            }
        }
        let matmul = torch.as_mut().and_then(|torch| {
            progress("measuring the rate of a matrix product");
            torch.ask(&Request::Matmul { dtype: "f16".into() }).ok()?["tflops"].as_f64()
        });
        let mut no_fa3_because = None;
        if let (Some(torch), Some(facts)) = (&mut torch, &mut torch_facts) {
            no_fa3_because = add_libraries(&mut setup, torch, facts);
        }
        if setup.installed.contains(&CUBLAS) && cublas::find().is_some() {
            setup.peers.push(CUBLAS.into());
        }
        let nvml = Nvml::load();
        let facts = Facts {
            peak_tflops: peak_tflops(&hello),
            ours: hello,
            torch: torch_facts,
            no_fa3_because,
            driver: nvml.as_ref().and_then(Nvml::driver_version),
            matmul_tflops: matmul,
        };
        let mut pools = Vec::new();
        for dtype in [DType::F16, DType::BF16, DType::F8E4M3] {
            let needed = cells.iter().filter(|member| member.cell.types.dtype == dtype);
            if let Some(most) = needed.map(|member| largest_tensor(&member.cell.problem())).max() {
                progress(&format!("drawing inputs in {dtype}"));
                let pool = Pool::draw(dtype, most, SEED);
                let stored = pool.store(folder.path())?;
                pools.push((pool, stored));
            }
        }
        let mut widened: Vec<(Types, Stored)> = Vec::new();
        for types in cells.iter().filter(|member| member.with_forms).map(|member| member.cell.types) {
            let eight = types.dtype.is_f8() || types.kv.is_some();
            let known = widened.iter().any(|(known, _)| *known == types);
            let pool = pools.iter().find(|(_, stored)| stored.dtype == types.dtype.name());
            let Some((pool, _)) = pool.filter(|_| eight && !known) else { continue };
            progress("widening 8-bit inputs");
            let name = types.to_string().replace(' ', "-");
            let made = pool.in_16_bits(types.in_16_bits().dtype, types.kv.is_some());
            widened.push((types, made.store(&folder.within(&name)?)?));
        }
        let beside = RefCell::new(Host::new(Kind::Ours, setup.ordinal));
        let mut cublas = Host::new(Kind::Ours, setup.ordinal);
        if let Some(library) = setup.peers.iter().find(|peer| *peer == CUBLAS).and_then(|_| cublas::find()) {
            // So that torch is looked for only once.
            cublas = cublas.with_variable(cublas::VARIABLE, &library.to_string_lossy());
        }
        let ceilings = match facts.ours["device"].as_str() {
            Some(device) => Ceilings::kept(device)?,
            None => None,
        };
        Ok(Self {
            cublas: RefCell::new(cublas),
            ceilings,
            setup,
            ours: RefCell::new(ours),
            torch: torch.map(RefCell::new),
            facts,
            no_torch,
            nvml,
            folder,
            pools,
            beside,
            widened,
        })
    }

    /// Times others of ours from now on.
    pub fn take(&mut self, ours: Ours) {
        self.setup.ours = ours;
    }

    /// The GPU, the drivers and the versions.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    fn measure(
        &self,
        member: &Member,
        budget: Duration,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(&str, f64),
    ) -> Result<Outcome, String> {
        let started = Instant::now();
        let problem = member.cell.problem();
        let (pool, stored) = self.pool(&problem)?;
        progress("asking the oracle", 0.0);
        let rows = member.cell.judged_rows();
        let yardstick = match &member.cell.sequences {
            Some(sequences) => pool.yardstick_of(&problem, sequences, &rows),
            None => pool.yardstick(&problem, &rows),
        };
        let yardstick = yardstick.ok_or("there is no row to judge")?;
        let own = self.on_gpu(&member.cell, stored);
        let forms = self.forms(member);
        let mut racers = Vec::new();
        for (name, host) in self.contenders(&forms) {
            progress(&format!("judging {name}"), 0.0);
            let (who, cell) = match forms.iter().find(|(form, _)| *form == name) {
                Some((_, form)) => (PLANNER.to_string(), form),
                None => (name.clone(), &own),
            };
            let possible = if is_ours(&name) { Ok(()) } else { supports(&name, &problem) };
            let judged =
                possible.and_then(|()| cell.judge(host, &who, self.folder.path(), &rows, &yardstick));
            racers.push(Racer { name, who, host, cell, judged });
        }
        let limit = budget.saturating_sub(started.elapsed()).max(Duration::from_millis(100));
        let effort = self.effort(limit);
        let mut watch = OnGpuState { bench: self, states: Vec::new() };
        for racer in racers.iter().filter(|_| self.setup.warmups > 0) {
            progress(&format!("warming up {}", racer.name), 0.0);
            let request = Replays { warm: self.setup.warmups, calls: 1, timed: 1 }.request(&racer.who);
            // A contender that fails here fails again on the clock, where it is recorded.
            let _ = racer.cell.ask(racer.host, &request);
        }
        let (regime, meter) = (self.setup.regime, self.meter());
        let on_clock = |racer| OnClock { regime, meter, ..OnClock::of(racer) };
        let mut measurement = race(&racers, on_clock, &effort, &mut watch, stop, progress);
        for samples in measurement.samples.iter_mut().filter(|samples| samples.failure.is_none()) {
            if stop() {
                break;
            }
            if let Some(racer) = racers.iter().find(|racer| racer.name == samples.name) {
                progress(&format!("the clock of {} against the wall", samples.name), 1.0);
                samples.failure = racer.cell.check_clock(racer.host, &racer.who, samples, regime).err();
            }
        }
        let mut results = Vec::new();
        for Racer { name, who, host, cell, judged } in racers {
            let samples = &mut measurement.samples;
            let taken = samples.iter().position(|samples| samples.name == name);
            let mut samples = taken.map_or_else(
                || Samples { name: name.clone(), ..Samples::default() },
                |position| samples.swap_remove(position),
            );
            let mut details = Details::default();
            let judgement = match judged {
                Ok(judgement) => Some(judgement),
                Err(why) => {
                    samples.failure = Some(why);
                    None
                }
            };
            if samples.failure.is_none() {
                progress(&format!("the call clock of {name}"), 1.0);
                (details, samples.failure) = self.details(cell, host, &who, &samples);
            }
            let (work, limits) = (member.cell.of_contender(&samples.name).work(), self.limits());
            details.energy = Energy::of(&samples, work.flops);
            let measured = Measured::new(samples, judgement, &work, &limits, self.ceilings.as_ref());
            results.push(Measured { details: Some(details), ..measured });
        }
        let conditions = GpuConditions {
            group: member.group.clone(),
            sets: own.sets,
            states: watch.states,
            measured_again: measurement.retaken > 0,
            retaken_rounds: measurement.retaken,
            throttled_rounds: measurement.throttled,
            first_call: (self.setup.first_call && !stop()).then(|| {
                progress("the first call", 1.0);
                self.first_call(&own)
            }),
            ..GpuConditions::default()
        };
        let conditions = Conditions::Gpu(conditions);
        Ok(Outcome::new(&member.cell, rows.len(), results, conditions, self.setup.margin))
    }

    /// A cell, as workers are asked about it.
    fn on_gpu<'a>(&self, cell: &Cell, stored: &'a Stored) -> OnGpu<'a> {
        OnGpu { stored, problem: cell.asked(), sets: self.sets(cell) }
    }

    /// Ours in the other forms of a cell, on the same numbers.
    fn forms(&self, member: &Member) -> Vec<(&'static str, OnGpu<'_>)> {
        let wanted = member.with_forms && self.setup.ours == Ours::Planner;
        let forms = if wanted { member.cell.forms() } else { Vec::new() };
        let of = |(name, cell): (&'static str, Cell)| {
            let made = self.widened.iter().find(|(types, _)| *types == member.cell.types && name == WIDE);
            let stored =
                made.map(|(_, stored)| stored).or_else(|| Some(&self.pool(&cell.problem()).ok()?.1))?;
            Some((name, self.on_gpu(&cell, stored)))
        };
        forms.into_iter().filter_map(of).collect()
    }

    /// All contenders, ours first.
    fn contenders(&self, forms: &[(&'static str, OnGpu<'_>)]) -> Vec<(String, &RefCell<Host>)> {
        let ours = self.setup.ours.names().into_iter().map(|name| (name, &self.ours));
        // In a worker of their own: each has another problem loaded.
        let ours = ours.chain(forms.iter().map(|(name, _)| (name.to_string(), &self.beside)));
        let host = |peer: &String| if peer == CUBLAS { Some(&self.cublas) } else { self.torch.as_ref() };
        let peers = self.setup.peers.iter().filter_map(|peer| Some((peer.clone(), host(peer)?)));
        ours.chain(peers).collect()
    }

    fn pool(&self, problem: &Problem) -> Result<&(Pool, Stored), String> {
        let found = self.pools.iter().find(|(_, stored)| stored.dtype == problem.dtype.name());
        found.ok_or_else(|| "on a GPU f16, bf16 and f8 are timed".into())
    }

    fn limits(&self) -> Limits {
        let Facts { peak_tflops, matmul_tflops, .. } = self.facts;
        Limits::Gpu { peak_tflops, matmul_tflops }
    }

    fn effort(&self, budget: Duration) -> Effort {
        Effort {
            rounds: self.setup.rounds,
            budget,
            margin: self.setup.margin,
            settle: Duration::ZERO,
            sample: self.setup.regime.sample(),
        }
    }

    /// The GPU's energy counter, where samples are long enough for it.
    fn meter(&self) -> Option<Meter<'_>> {
        let uuid = self.facts.ours["uuid"].as_str()?;
        (self.setup.regime == Regime::Sustained).then(|| Meter::new(self.nvml.as_ref()?, uuid))?
    }

    /// The number of sets of tensors that pushes each set out of the cache before its turn comes again.
    fn sets(&self, cell: &Cell) -> usize {
        let l2 = self.facts.ours["l2_bytes"].as_f64().unwrap_or(0.0);
        match self.setup.cache {
            Cache::Warm => 1,
            Cache::Cold => sets_to_flush(cell.work().bytes, l2),
        }
    }

    /// What else a worker reports about a contender that was timed, and what went wrong in asking it.
    fn details(
        &self,
        cell: &OnGpu<'_>,
        host: &RefCell<Host>,
        who: &str,
        samples: &Samples,
    ) -> (Details, Option<String>) {
        let who = || who.to_string();
        let mut details = Details::default();
        let mut failure = None;
        let mut ask = |request: Request| match cell.ask(host, &request) {
            Ok(reply) => Some(reply),
            Err(why) => {
                failure.get_or_insert(why);
                None
            }
        };
        if is_ours(&samples.name) {
            details.plan = ask(Request::Plan { who: who() });
            details.replay_is_same =
                ask(Request::Check { who: who() }).and_then(|reply| reply["same"].as_bool());
        }
        if self.setup.call_clock {
            let p50 = stats::median(&samples.times);
            let room = p50.map_or(CALLS, |p50| (CALLS_TIME_US / p50.max(1.0)) as u32);
            let reply = ask(Request::Calls { who: who(), calls: room.clamp(5, CALLS) });
            details.call = reply.map(|reply| call_clock(&reply));
        }
        (details, failure)
    }

    /// Times the first call in two fresh processes that share a new cache, so that the second finds the code there.
    fn first_call(&self, cell: &OnGpu<'_>) -> FirstCall {
        // Some kernels are cached by FlashCore, some by the driver.
        let caches = [("FLASHCORE_CACHE", "cubins"), ("CUDA_CACHE_PATH", "driver")]
            .map(|(variable, name)| (variable, self.folder.path().join(name)));
        let who = self.setup.ours.names().swap_remove(0);
        let time = || {
            let mut host = Host::new(Kind::Ours, self.setup.ordinal);
            for (variable, folder) in &caches {
                host = host.with_variable(variable, &folder.to_string_lossy());
            }
            let reply = cell.ask(&RefCell::new(host), &Request::First { who: who.clone() })?;
            reply["us"].as_f64().ok_or_else(|| "the worker sent no time".to_string())
        };
        for (_, folder) in &caches {
            let _ = std::fs::remove_dir_all(folder);
        }
        let (cold, warm) = (time(), time());
        let failure = cold.as_ref().err().or(warm.as_ref().err()).cloned();
        FirstCall { cold_us: cold.ok(), warm_us: warm.ok(), failure }
    }

    fn state_now(&self) -> Option<GpuState> {
        let uuid = self.facts.ours["uuid"].as_str()?;
        Some(self.nvml.as_ref()?.device(uuid)?.state())
    }
}

impl Bench for GpuBench {
    fn clock(&self) -> Clock {
        Clock::Kernel
    }

    fn machine(&self) -> Machine<'_> {
        let torch = self.torch.as_ref().map_or(0, |torch| torch.borrow().lost());
        Machine::Gpu {
            cache: self.setup.cache,
            regime: self.setup.regime,
            gpu: &self.facts,
            inputs: self.pools.iter().map(|(_, stored)| stored).collect(),
            lost_workers: [&self.ours, &self.beside, &self.cublas]
                .map(|host| host.borrow().lost())
                .iter()
                .sum::<usize>()
                + torch,
        }
    }

    fn peers(&self) -> Vec<String> {
        self.setup.peers.clone()
    }

    fn no_torch(&self) -> Option<&str> {
        self.no_torch.as_deref()
    }

    fn ceilings(&self) -> Option<&Ceilings> {
        self.ceilings.as_ref()
    }

    fn measure_ceilings(&mut self, created: &str) -> Result<&Ceilings, String> {
        let found = self.ours.borrow_mut().ask(&Request::Ceilings)?;
        let number = |name: &str| found[name].as_f64().filter(|&rate| rate.is_finite() && rate > 0.0);
        let empty = &self.facts.ours["empty_launch"];
        Ok(self.ceilings.insert(Ceilings {
            machine: self.facts.ours["device"].as_str().unwrap_or("an unknown GPU").into(),
            created: created.into(),
            matmul_tflops: number("matmul_tflops"),
            memory_gbytes: number("memory_gbytes"),
            exp_gops: number("exp_gops"),
            launch_us: empty["call_p50_us"].as_f64(),
            launch_host_us: empty["host_p50_us"].as_f64(),
        }))
    }

    /// Failures are recorded in the outcome.
    fn run(
        &mut self,
        member: &Member,
        budget: Duration,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(&str, f64),
    ) -> Result<Outcome, String> {
        let started = Instant::now();
        let mut outcome =
            self.measure(member, budget, stop, progress).unwrap_or_else(|why| Outcome::not_run(member, &why));
        if let Conditions::Gpu(gpu) = &mut outcome.conditions {
            gpu.seconds = started.elapsed().as_secs_f64();
        }
        Ok(outcome)
    }

    fn against_itself(
        &self,
        Member { cell, .. }: &Member,
        repetitions: Repetitions,
        budget: Duration,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<AgainstItself, String> {
        let problem = cell.problem();
        let (_, stored) = self.pool(&problem)?;
        let on_gpu = self.on_gpu(cell, stored);
        let name = self.setup.ours.names().swap_remove(0);
        let side = || -> Box<dyn Contender + '_> { Box::new(OnClock::new(&on_gpu, &self.ours, &name)) };
        let effort = self.effort(budget);
        AgainstItself::measure(cell, repetitions, [side(), side()], &effort, stop, progress)
    }
}

/// Adds the libraries that are installed beside torch to the peers, and their versions to what is known of torch. Says
/// why FlashAttention-3 is not there, if it was wanted.
fn add_libraries(setup: &mut Setup, torch: &mut Host, facts: &mut Value) -> Option<String> {
    let installed: Vec<Value> = facts["installed"].as_array().cloned().unwrap_or_default();
    let (mut versions, mut no_fa3) = (Map::new(), None);
    for who in IN_PYTHON {
        let named = setup.peers.iter().any(|peer| peer == who);
        if !named && !setup.installed.contains(&who) {
            continue;
        }
        let version = if named || installed.contains(&who.into()) {
            torch.ask(&Request::Version { who: who.into() })
        } else {
            Err(format!("{} has no such module", python()))
        };
        match version {
            Ok(reply) => {
                versions.insert(who.into(), reply["version"].clone());
                setup.peers.extend((!named).then(|| who.to_string()));
            }
            Err(why) if who == FA3 => no_fa3 = Some(why),
            // A peer that was named says in its own row why it has no result.
            Err(_) => {}
        }
    }
    facts["versions"] = Value::Object(versions);
    no_fa3
}

/// Whether a peer computes a problem, or why not.
fn supports(peer: &str, problem: &Problem) -> Result<(), String> {
    if problem.pass == Pass::Backward && !PEERS.contains(&peer) && !BOTTOM_RIGHT.contains(&peer) {
        return Err(format!("gradients of {peer} are not timed"));
    }
    if !problem.is_dense() || problem.key_lengths {
        return supports_sequences(peer, problem);
    }
    // Tensors that ours quantises within the call are for peers what they are.
    let mut plain = *problem;
    plain.quantise = None;
    if problem.dtype.is_f8() && peer == FA3 {
        plain.dtype = DType::BF16;
    }
    if plain != *problem {
        return supports(peer, &plain);
    }
    let any_lengths = BOTTOM_RIGHT.contains(&peer) && problem.mask == Mask::Causal;
    Torch::supports(&if any_lengths { problem.with_mask(Mask::None) } else { *problem })
}

/// Whether a peer takes sequences of lengths of their own, or why not.
fn supports_sequences(peer: &str, problem: &Problem) -> Result<(), String> {
    if !["flash", "cudnn"].contains(&peer) && !BOTTOM_RIGHT.contains(&peer) {
        return Err(format!("{peer} takes no sequences of lengths of their own"));
    }
    if problem.softcap.is_some() || problem.is_eight_bit() {
        return Err(format!("{peer} is asked about sequences without a softcap and in 16 bits"));
    }
    let own = matches!((problem.queries, problem.keys), (Queries::Packed { total: q }, Keys::Packed { total: k }) if q == k);
    match problem.mask {
        Mask::None => Ok(()),
        // Where a sequence attends to itself, both ends of it are the same.
        Mask::Causal if own || peer != "cudnn" => Ok(()),
        Mask::Causal => Err("cuDNN's causal mask is aligned top-left".into()),
        mask => Err(format!("{peer} is not asked about a {mask} mask")),
    }
}

/// Summarises a worker's samples of the call clock.
fn call_clock(reply: &Value) -> CallClock {
    let numbers = |name: &str| -> Vec<f64> {
        reply[name].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
    };
    CallClock::of(numbers("call_us"), numbers("host_us"))
}

/// Reads the GPU's state around every round, and keeps it.
struct OnGpuState<'a> {
    bench: &'a GpuBench,
    states: Vec<State>,
}

impl Watch for OnGpuState<'_> {
    fn is_throttled(&mut self) -> bool {
        let Some(state) = self.bench.state_now() else { return false };
        self.states.push(State::from(state));
        state.is_unwell()
    }
}

/// A cell as it stands in requests to workers.
pub(crate) struct OnGpu<'a> {
    pub(crate) stored: &'a Stored,
    pub(crate) problem: Asked,
    pub(crate) sets: usize,
}

impl OnGpu<'_> {
    pub(crate) fn ask(&self, host: &RefCell<Host>, request: &Request) -> Result<Value, String> {
        host.borrow_mut().ask_about(self.stored, &self.problem, self.sets, request)
    }

    /// Checks a contender's clock against wall time, by replays long enough to time from outside.
    fn check_clock(
        &self,
        host: &RefCell<Host>,
        who: &str,
        samples: &Samples,
        regime: Regime,
    ) -> Result<(), String> {
        let Some(us) = stats::median(&samples.times) else { return Ok(()) };
        let mut replays = regime.replays(1, samples.calls);
        let a_replay = us * (replays.calls as usize).next_multiple_of(self.sets.max(1)) as f64;
        let enough = (physics::WALL_WATCH.as_secs_f64() * 1e6 / a_replay).ceil().clamp(1.0, 2000.0);
        replays.warm = replays.warm.max(enough as u32);
        physics::clock_against_wall(f64::from(replays.warm + replays.timed) * a_replay, || {
            let start = Instant::now();
            self.ask(host, &replays.request(who))?;
            Ok(start.elapsed().as_secs_f64() * 1e6)
        })
    }

    /// Lets a contender compute into poisoned memory, and judges some rows of the output, which it hands over in a
    /// file.
    pub(crate) fn judge(
        &self,
        host: &RefCell<Host>,
        who: &str,
        folder: &Path,
        rows: &[Row],
        yardstick: &Yardstick,
    ) -> Result<Judgement, String> {
        let (Asked { q: [_, heads, len_q, _], .. }, problem) = (&self.problem, self.problem.problem()?);
        let index = |row: &Row| match &self.problem.sequences {
            Some(sequences) => sequences.index(&problem, row),
            None => (row.batch * heads + row.head) * len_q + row.position,
        };
        let path = folder.join("o");
        let request =
            Request::Output { who: who.into(), rows: rows.iter().map(index).collect(), path: path.clone() };
        self.ask(host, &request)?;
        let bytes = std::fs::read(&path).map_err(|error| format!("cannot read its output: {error}"))?;
        let o = widened(&bytes, problem.out());
        let (output, width) = self.problem.judged();
        let expected = rows.len() * width;
        if o.len() != expected {
            return Err(format!("{} elements came back where {expected} were expected", o.len()));
        }
        Ok(yardstick.judge(&[(output, o)]))
    }
}

/// A contender on the kernel clock.
pub(crate) struct OnClock<'a> {
    pub(crate) cell: &'a OnGpu<'a>,
    pub(crate) host: &'a RefCell<Host>,
    pub(crate) name: &'a str,
    who: &'a str,
    regime: Regime,
    meter: Option<Meter<'a>>,
    used: Option<Used>,
}

impl<'a> OnClock<'a> {
    /// Of a racer, in bursts.
    fn of(Racer { name, who, host, cell, .. }: &'a Racer<'a>) -> Self {
        Self { who, ..Self::new(cell, host, name) }
    }

    /// In bursts.
    pub(crate) fn new(cell: &'a OnGpu<'a>, host: &'a RefCell<Host>, name: &'a str) -> Self {
        Self { cell, host, name, who: name, regime: Regime::Bursts, meter: None, used: None }
    }
}

impl Contender for OnClock<'_> {
    fn name(&self) -> String {
        self.name.into()
    }

    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String> {
        let request = self.regime.replays(warm, calls).request(self.who);
        let ask = || self.cell.ask(self.host, &request);
        let (reply, steps) = self.meter.map_or_else(|| (ask(), Vec::new()), |meter| meter.during(ask));
        let (reply, end) = (reply?, Instant::now());
        let us = reply["us"].as_f64().ok_or("the worker sent no time")?;
        // The reply comes as soon as the timed calls are done.
        let timed = Duration::try_from_secs_f64(us * reply["calls"].as_f64().unwrap_or(0.0) / 1e6);
        self.used = timed.ok().and_then(|timed| energy::used(&steps, end.checked_sub(timed)?));
        Ok(us)
    }

    fn used(&mut self) -> Option<Used> {
        self.used.take()
    }
}

/// Who takes part in a cell: by what name, and what a worker is asked about whom.
struct Racer<'a> {
    name: String,
    who: String,
    host: &'a RefCell<Host>,
    cell: &'a OnGpu<'a>,
    judged: Result<Judgement, String>,
}

/// Lets the contenders that gave an output take turns.
fn race<'a>(
    racers: &'a [Racer<'a>],
    on_clock: impl Fn(&'a Racer<'a>) -> OnClock<'a>,
    effort: &Effort,
    watch: &mut dyn Watch,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(&str, f64),
) -> Measurement {
    let running = racers.iter().filter(|racer| racer.judged.is_ok());
    let mut contenders: Vec<Box<dyn Contender + '_>> =
        running.map(|racer| Box::new(on_clock(racer)) as Box<dyn Contender>).collect();
    if contenders.is_empty() {
        return Measurement { samples: Vec::new(), retaken: 0, throttled: 0 };
    }
    let mut rounds = |round: usize, share: f64| progress(&format!("round {round}"), share.min(1.0));
    measure_watched(&mut contenders, effort, watch, stop, &mut rounds)
}

pub(crate) fn largest_tensor(problem: &Problem) -> usize {
    let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, .. } = *problem;
    batch * (heads_q * len_q * head_dim).max(heads_kv * len_k * head_dim.max(head_dim_v))
}

pub(crate) fn sets_to_flush(bytes: f64, l2: f64) -> usize {
    let enough = (2.0 * l2 / bytes).ceil() as usize + 1;
    let most = (MOST_BYTES / bytes) as usize;
    if bytes >= 2.0 * l2 { 1 } else { enough.min(most).clamp(1, MOST_SETS) }
}

/// 16-bit operations per SM and cycle of the tensor cores; a multiply-add counts as two.
pub(crate) fn peak_tflops(hello: &Value) -> Option<f64> {
    let per_cycle = match hello["capability"].as_str()? {
        "8.0" => 2048.0,
        "8.6" | "8.7" | "8.9" => 1024.0,
        "9.0" => 4096.0,
        _ => return None,
    };
    let clock = hello["sm_clock_khz"].as_f64().filter(|&khz| khz > 0.0)?;
    Some(hello["sms"].as_f64()? * per_cycle * clock * 1e3 / 1e12)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::Quantiser;
    use serde_json::json;

    #[test]
    fn the_peak_is_that_of_the_data_sheet() {
        let h200 = json!({"capability": "9.0", "sms": 132, "sm_clock_khz": 1_830_000});
        assert!((peak_tflops(&h200).unwrap() - 989.0).abs() < 1.0);
        let a100 = json!({"capability": "8.0", "sms": 108, "sm_clock_khz": 1_410_000});
        assert!((peak_tflops(&a100).unwrap() - 312.0).abs() < 1.0);
        assert_eq!(peak_tflops(&json!({"capability": "12.0", "sms": 1, "sm_clock_khz": 1})), None);
        assert_eq!(peak_tflops(&json!({"capability": "9.0", "sms": 1, "sm_clock_khz": 0})), None);
    }

    #[test]
    fn a_sustained_sample_is_long_whatever_a_call_takes_and_its_graph_is_not() {
        let of = |calls| Regime::Sustained.replays(1, calls);
        assert_eq!(of(150), Replays { warm: 5, calls: 10, timed: 15 });
        assert_eq!(of(30_000), Replays { warm: 20, calls: 512, timed: 59 });
        assert_eq!(of(1), Replays { warm: 1, calls: 1, timed: 1 });
        for calls in [1, 2, 7, 16, 149, 5000, 100_000] {
            let Replays { warm, calls: graph, timed } = of(calls);
            assert!(graph * timed >= calls && graph <= SUSTAINED_GRAPH && warm >= 1, "{calls}");
        }
        assert_eq!(Regime::Bursts.replays(1, 300), Replays { warm: 1, calls: 300, timed: 1 });
    }

    #[test]
    fn who_aligns_the_causal_mask_bottom_right_is_asked_for_any_lengths() {
        let problem = Problem::new(1, 2, 8, 64, DType::F16).with_mask(Mask::Causal).with_kv(2, 32);
        assert!(supports(FA3, &problem).is_ok() && supports("cudnn", &problem).is_err());
        assert!(supports(FA3, &problem.with_softcap(30.0)).is_err());
        assert!(supports("flash", &problem.with_kv(2, 8).with_quantised(Quantiser::new())).is_ok());
        assert!(supports(FA3, &problem.with_dtype_kv(DType::F8E4M3)).is_err());
    }

    #[test]
    fn sets_push_each_other_out_of_the_cache_and_large_problems_need_only_one() {
        let l2 = 60e6;
        assert!(2e6 * (sets_to_flush(2e6, l2) - 1) as f64 >= 2.0 * l2);
        assert_eq!(sets_to_flush(1e9, l2), 1);
        assert_eq!(sets_to_flush(1e3, l2), MOST_SETS);
        assert_eq!(sets_to_flush(100e6, l2), 3);
    }
}
