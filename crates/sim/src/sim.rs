//! The simulated device: memory, launches and their reports.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;

use flashcore_ptx::{Module, Threads};

use crate::config::{Config, Fp8Sums};
use crate::error::SimError;
use crate::findings::{Finding, FindingKind, Raw, Severity};
use crate::machine::sched::Slice;
use crate::machine::{Cluster, Launch, Tally};
use crate::memory::global::{Buffer, GlobalMemory};
use crate::program::Program;
use crate::races::global_shadow::Era;
use crate::races::sync_words::SyncWords;
use crate::stats::{Counter, Stats};
use crate::stream::{Conduct, Launching, PastLaunch, Stream};
use crate::vectors::Level;

/// Warp instructions that a cluster runs before another one gets its turn.
const SLICE: u64 = 1 << 20;
/// Clusters that a host thread runs in turn, so that blocks can wait for each other.
const RESIDENT: usize = 132;
/// Bytes that all clusters that run in turn may take together. Only kernels with tens of thousands of registers come near it.
const MOST_BYTES: u64 = 4 << 30;
/// The most blocks per grid in each dimension, as on hardware.
const MOST_BLOCKS: [u32; 3] = [(1 << 31) - 1, 65_535, 65_535];
/// The most threads per block in each dimension, as on hardware.
const MOST_THREADS: [u32; 3] = [1024, 1024, 64];

/// The dimensions of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchDims {
    /// Blocks per grid.
    pub grid: [u32; 3],
    /// Threads per block.
    pub block: [u32; 3],
    /// Blocks per cluster, or what the kernel says.
    pub cluster: Option<[u32; 3]>,
    /// Bytes of dynamic shared memory, or what the kernel's layout needs.
    pub dynamic_shared: Option<u32>,
}

impl LaunchDims {
    /// A grid and a block in one dimension; cluster and shared memory as the kernel says.
    pub fn linear(grid: u32, block: u32) -> LaunchDims {
        LaunchDims { grid: [grid, 1, 1], block: [block, 1, 1], cluster: None, dynamic_shared: None }
    }
}

/// What a launch did.
#[derive(Clone, Debug, Default)]
pub struct LaunchReport {
    /// What is wrong, errors first.
    pub findings: Vec<Finding>,
    /// What was counted.
    pub stats: Stats,
}

impl LaunchReport {
    /// Whether nothing at all was found.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// The findings of a kind.
    pub fn of(&self, kind: FindingKind) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |f| f.kind == kind)
    }
}

/// A simulated device.
#[derive(Default)]
pub struct Sim {
    /// How launches are simulated.
    pub config: Config,
    memory: GlobalMemory,
    stream: Stream,
    launches: u64,
}

impl Sim {
    /// A device without allocations.
    pub fn new(config: Config) -> Sim {
        Sim { config, ..Sim::default() }
    }

    /// Allocates global memory that holds no value.
    pub fn alloc(&mut self, name: &str, bytes: usize) -> Buffer {
        self.memory.allocate(Some(name.to_string()), bytes, None)
    }

    /// Allocates global memory that holds these bytes.
    pub fn alloc_from(&mut self, name: &str, bytes: &[u8]) -> Buffer {
        self.memory.allocate(Some(name.to_string()), bytes.len(), Some(bytes))
    }

    /// Ends an allocation: later accesses to it are out of bounds.
    pub fn free(&mut self, buffer: Buffer) {
        self.memory.free(buffer);
    }

    /// Fills an allocation from its first byte on.
    pub fn write(&mut self, buffer: Buffer, bytes: &[u8]) {
        self.memory.upload(buffer, bytes);
    }

    /// The bytes of an allocation.
    pub fn read(&self, buffer: Buffer) -> Vec<u8> {
        self.memory.download(buffer)
    }

    /// The byte ranges of an allocation that no kernel has written since it was made, or since
    /// [`Sim::forget_written`].
    pub fn unwritten(&self, buffer: Buffer) -> Vec<Range<usize>> {
        self.memory.unwritten(buffer)
    }

    /// Forgets which bytes of an allocation kernels have written.
    pub fn forget_written(&mut self, buffer: Buffer) {
        self.memory.forget_written(buffer);
    }

    /// Runs a kernel of a module to its end, after everything before it: in [stream order](Launching::StreamOrder).
    pub fn launch(
        &mut self,
        module: &Module,
        kernel: &str,
        dims: LaunchDims,
        params: &[u8],
    ) -> Result<LaunchReport, SimError> {
        self.launch_as(module, kernel, dims, params, Launching::StreamOrder)
    }

    /// Runs a kernel of a module to its end, started as `launching` says.
    ///
    /// The launches of a device are on one stream. They are simulated one after the other; that a programmatic one may run
    /// beside those before it on a GPU is checked, access by access.
    pub fn launch_as(
        &mut self,
        module: &Module,
        kernel: &str,
        dims: LaunchDims,
        params: &[u8],
        launching: Launching,
    ) -> Result<LaunchReport, SimError> {
        let Some(kernel) = module.kernel(kernel) else {
            return Err(SimError::NoKernel {
                name: kernel.to_string(),
                available: module.kernels.iter().map(|k| k.name.clone()).collect(),
            });
        };
        self.launch_program_as(&Program::new(kernel)?, dims, params, launching)
    }

    /// Runs a kernel that was decoded before, in [stream order](Launching::StreamOrder).
    pub fn launch_program(
        &mut self,
        program: &Program<'_>,
        dims: LaunchDims,
        params: &[u8],
    ) -> Result<LaunchReport, SimError> {
        self.launch_program_as(program, dims, params, Launching::StreamOrder)
    }

    /// Runs a kernel that was decoded before, started as `launching` says.
    pub fn launch_program_as(
        &mut self,
        program: &Program<'_>,
        dims: LaunchDims,
        params: &[u8],
        launching: Launching,
    ) -> Result<LaunchReport, SimError> {
        let launch = self.prepare(program, dims, params, launching)?;
        let started = Instant::now();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if self.config.threads == 0 { cores } else { self.config.threads };
        let room = (MOST_BYTES / launch.cluster_bytes()).max(1) as usize;
        let threads = threads.min(launch.clusters as usize).min(room).max(1);
        let resident = (room / threads).clamp(1, RESIDENT);
        let next = AtomicU64::new(0);
        let mut tallies: Vec<Tally> = Vec::new();
        if threads == 1 {
            tallies.push(work(&launch, &next, resident));
        } else {
            std::thread::scope(|scope| {
                let workers: Vec<_> =
                    (0..threads).map(|_| scope.spawn(|| work(&launch, &next, resident))).collect();
                for worker in workers {
                    match worker.join() {
                        Ok(tally) => tallies.push(tally),
                        Err(panic) => std::panic::resume_unwind(panic),
                    }
                }
            });
        }
        let mut total = Tally::default();
        total.executed.resize(program.code.len(), 0);
        total.counters.resize(program.code.len(), Counter::default());
        for tally in tallies {
            if let Some(error) = tally.error {
                return Err(error);
            }
            total.findings.merge(tally.findings);
            for (sum, executed) in total.executed.iter_mut().zip(&tally.executed) {
                *sum += executed;
            }
            program.spread(&tally.runs, &mut total.executed);
            for (sum, counter) in total.counters.iter_mut().zip(&tally.counters) {
                sum.add(counter);
            }
        }
        let conduct =
            Conduct { waited: launch.waited.into_inner(), waited_first: !launch.unwaited.into_inner() };
        let beside = launch.in_flight;
        self.launches += 1;
        let past = PastLaunch::new(self.launches, program, &total.executed);
        self.stream.launched(launching, past, beside, conduct);
        let stats = Stats::new(program, &total, started.elapsed(), threads);
        Ok(LaunchReport { findings: total.findings.into_findings(program.kernel), stats })
    }

    fn prepare<'a>(
        &'a self,
        program: &'a Program<'a>,
        dims: LaunchDims,
        params: &'a [u8],
        launching: Launching,
    ) -> Result<Launch<'a>, SimError> {
        let kernel = program.kernel;
        let refuse = |why: String| Err(SimError::Launch { kernel: kernel.name.clone(), why });
        let cluster = dims.cluster.or(kernel.cluster).unwrap_or([1, 1, 1]);
        let too_large = |dims: [u32; 3], most: [u32; 3]| (0..3).any(|d| dims[d] > most[d]);
        if dims.grid.contains(&0) || dims.block.contains(&0) || cluster.contains(&0) {
            return refuse(format!(
                "a dimension is zero: grid {:?}, block {:?}, cluster {cluster:?}",
                dims.grid, dims.block
            ));
        }
        if too_large(dims.grid, MOST_BLOCKS) {
            return refuse(format!("a grid of {:?} blocks; {MOST_BLOCKS:?} is the most", dims.grid));
        }
        let threads: u64 = dims.block.iter().fold(1, |count, &d| count.saturating_mul(u64::from(d)));
        if threads > 1024 || too_large(dims.block, MOST_THREADS) {
            return refuse(format!(
                "a block of {:?} threads; 1024 is the most, and {MOST_THREADS:?} by dimension",
                dims.block
            ));
        }
        match kernel.threads {
            Some(Threads::Exactly(want)) if want != dims.block => {
                return refuse(format!("the kernel is for blocks of {want:?} threads, not {:?}", dims.block));
            }
            Some(Threads::AtMost(most)) if threads > u64::from(Threads::AtMost(most).count()) => {
                return refuse(format!(
                    "the kernel is for blocks of at most {most:?} threads, not {:?}",
                    dims.block
                ));
            }
            _ => {}
        }
        if (0..3).any(|d| !dims.grid[d].is_multiple_of(cluster[d])) {
            return refuse(format!(
                "a grid of {:?} blocks does not divide into clusters of {cluster:?}",
                dims.grid
            ));
        }
        if cluster.iter().fold(1, |count: u32, &d| count.saturating_mul(d)) > 16 {
            return refuse(format!("a cluster of {cluster:?} blocks; 16 is the most"));
        }
        let needed = kernel.param_bytes() as usize;
        if params.len() < needed {
            return refuse(format!("{} bytes of parameters; the kernel has {needed}", params.len()));
        }
        let shared_bytes = dims.dynamic_shared.unwrap_or_else(|| kernel.shared_bytes());
        if shared_bytes > 227 * 1024 {
            return refuse(format!(
                "{shared_bytes} bytes of shared memory; 232448 is the most a block can have"
            ));
        }
        if let Fp8Sums::Short { bits } = self.config.fp8_sums
            && !(4..=17).contains(&bits)
        {
            return refuse(format!("sums of fp8 products with {bits} bits; 4 to 17 are possible"));
        }
        let id = self.launches + 1;
        let in_flight = self.stream.in_flight(launching, program.waits_for_grid);
        let oldest = in_flight.iter().filter_map(|grid| Some(grid.launch.as_ref()?.id)).min();
        let launch = Launch {
            program,
            memory: &self.memory,
            config: &self.config,
            params,
            grid: dims.grid,
            block: dims.block,
            cluster,
            clusters: (0..3).map(|d| u64::from(dims.grid[d] / cluster[d])).product(),
            shared_bytes,
            era: Era { launch: id, oldest: oldest.unwrap_or(id) },
            in_flight,
            waited: AtomicBool::new(false),
            unwaited: AtomicBool::new(false),
            sync: SyncWords::default(),
            executed: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            level: Level::detect(),
        };
        let (bytes, budget) = (launch.cluster_bytes(), self.config.budget);
        if bytes > MOST_BYTES {
            return refuse(format!(
                "a cluster of {cluster:?} blocks takes {} MiB to simulate, most of it for {} registers per thread; {} MiB \
                 is the most",
                bytes >> 20,
                program.words + program.longs,
                MOST_BYTES >> 20
            ));
        }
        let setup = launch.clusters.saturating_mul(launch.cluster_setup());
        if setup > budget || launch.clusters > u64::from(u32::MAX) {
            let blocks = dims.grid.iter().map(|&d| u64::from(d)).product();
            return Err(SimError::Budget { kernel: kernel.name.clone(), blocks, setup, budget });
        }
        Ok(launch)
    }
}

/// What one host thread does: takes clusters and runs them, a slice at a time, until none is left.
fn work(launch: &Launch<'_>, next: &AtomicU64, resident: usize) -> Tally {
    let mut tally = Tally::default();
    tally.executed.resize(launch.program.code.len(), 0);
    tally.runs.resize(launch.program.run_count(), 0);
    tally.counters.resize(launch.program.code.len(), Counter::default());
    let mut under_way: std::collections::VecDeque<Cluster<'_>> = std::collections::VecDeque::new();
    let mut ended = None;
    loop {
        if launch.stop.load(Relaxed) {
            return tally;
        }
        if let Some(stopped) = launch.stopped() {
            tally.error = Some(stopped);
            return tally;
        }
        let mut cluster = match under_way.pop_front() {
            Some(cluster) if under_way.len() + 1 >= resident => cluster,
            waiting => {
                let id = next.fetch_add(1, Relaxed);
                if id < launch.clusters {
                    under_way.extend(waiting);
                    launch.executed.fetch_add(launch.cluster_setup(), Relaxed);
                    Cluster::new(launch, id as u32, ended.take())
                } else if let Some(cluster) = waiting {
                    cluster
                } else {
                    return tally;
                }
            }
        };
        let left = launch.config.budget.saturating_sub(launch.executed.load(Relaxed));
        if cluster.run(SLICE.min(left), &mut tally) == Slice::Unfinished {
            if left <= SLICE && launch.executed.load(Relaxed) >= launch.config.budget {
                out_of_budget(&cluster, &mut tally);
                launch.stop.store(true, Relaxed);
            } else {
                under_way.push_back(cluster);
            }
        } else {
            ended = Some(cluster);
        }
        if tally.findings.len() >= launch.config.max_findings {
            launch.stop.store(true, Relaxed);
        }
    }
}

/// How many warps the finding of a launch without end names.
const NAMED_WARPS: usize = 8;

/// Reports that the launch does not end.
fn out_of_budget(cluster: &Cluster<'_>, tally: &mut Tally) {
    let live: Vec<usize> = (0..cluster.warps.len()).filter(|&w| cluster.warps[w].live != 0).collect();
    let Some(&first) = live.first() else { return };
    let kernel = cluster.launch.program.kernel;
    let lane = |w: usize| cluster.warps[w].live.trailing_zeros();
    let mut lines: Vec<String> = live
        .iter()
        .take(NAMED_WARPS)
        .map(|&w| {
            let pc = cluster.warps[w].pc;
            format!("{} at #{pc} {}", cluster.thread(w, lane(w)), kernel.describe(pc as usize))
        })
        .collect();
    if live.len() > NAMED_WARPS {
        lines.push(format!("and {} more warps", live.len() - NAMED_WARPS));
    }
    tally.findings.add(Raw {
        kind: FindingKind::Budget,
        severity: Severity::Error,
        pc: cluster.warps[first].pc,
        thread: cluster.thread(first, lane(first)),
        message: format!(
            "kernel `{}` did not end within {} warp instructions: it loops forever, waits for something that never \
             happens, or needs a higher limit\n    {}",
            kernel.name,
            cluster.launch.config.budget,
            lines.join("\n    ")
        ),
        place: None,
        other: None,
        missing: None,
    });
}
