//! A cluster of blocks at work: the state that the instructions act on, and the words for what they do wrong.
//!
//! Blocks of a cluster run interleaved on one host thread; a launch without clusters has clusters of one block.
//! Different clusters share nothing but global memory.

pub mod barrier;
pub mod copy_queue;
pub mod mbarrier;
pub mod regs;
pub mod sched;
pub mod warp;

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::config::Config;
use crate::error::SimError;
use crate::exec::bulk::PendingCopy;
use crate::exec::cluster::ClusterBarrier;
use crate::exec::wgmma::{OperandPages, Warpgroup};
use crate::findings::{FindingKind, FindingSet, Place, Raw, Severity, Thread};
use crate::machine::barrier::NamedBarrier;
use crate::machine::mbarrier::{ByNumber, Mbarrier};
use crate::machine::regs::{Row, Row64};
use crate::machine::warp::{State, Warp};
use crate::memory::global::GlobalMemory;
use crate::memory::shared::SharedMemory;
use crate::program::decode::Program;
use crate::races::clock::{Agent, ClockPair, Edge, Stamp, WarpClock};
use crate::races::global_shadow::{GlobalConflict, SyncWords};
use crate::races::shared_shadow::Conflict;
use crate::random::Random;
use crate::stats::Counter;
use crate::vectors::Level;
use crate::vectors::matrices::Survey;
use crate::vectors::mma::Tiles;

/// Where the parameters appear in the generic address space.
pub const PARAM_BASE: u64 = 1 << 32;
/// Where a block's own shared memory appears in the generic address space.
pub const SHARED_BASE: u64 = 3 << 31;
/// The bits of a shared address below the rank of the block in its cluster.
///
/// As on hardware, the address of a block's own shared memory carries the rank as well; accesses to the block's own
/// memory take it or leave it, and a matrix descriptor has no place for it.
pub const RANK_SHIFT: u32 = 24;

/// Asynchronous operations of a cluster that can be told apart.
const MAX_OPERATIONS: usize = 1024;

/// A launch: what all clusters share.
pub struct Launch<'a> {
    /// The program.
    pub program: &'a Program<'a>,
    /// Global memory.
    pub memory: &'a GlobalMemory,
    /// How to run.
    pub config: &'a Config,
    /// The packed parameters.
    pub params: &'a [u8],
    /// Blocks in the grid.
    pub grid: [u32; 3],
    /// Threads in a block.
    pub block: [u32; 3],
    /// Blocks in a cluster.
    pub cluster: [u32; 3],
    /// Clusters in the grid.
    pub clusters: u64,
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// Which launch of the device it is.
    pub id: u64,
    /// Words of global memory that blocks synchronise on.
    pub sync: SyncWords,
    /// Warp instructions executed by finished slices, with what setting up clusters counts as.
    pub executed: AtomicU64,
    /// Set when the launch shall end early.
    pub stop: AtomicBool,
    /// The vector instructions to use.
    pub level: Level,
}

impl Launch<'_> {
    /// Blocks in a cluster and warps in a block.
    fn blocks_and_warps(&self) -> (u64, u64) {
        let product = |dims: [u32; 3]| dims.iter().map(|&d| u64::from(d)).product::<u64>();
        (product(self.cluster), product(self.block).div_ceil(32))
    }

    /// Ends the launch if that is asked for from outside.
    pub fn stopped(&self) -> Option<SimError> {
        self.config.stop.asked().then(|| {
            self.stop.store(true, Relaxed);
            SimError::Stopped { kernel: self.program.kernel.name.clone() }
        })
    }

    /// The warp instructions that setting up a cluster counts as: one for each register that is cleared, which takes about
    /// as long as an instruction, and one for each 128 bytes of shared memory.
    pub fn cluster_setup(&self) -> u64 {
        let (blocks, warps) = self.blocks_and_warps();
        let registers = (self.program.words + self.program.longs) as u64;
        blocks * (warps * (1 + registers) + u64::from(self.shared_bytes.div_ceil(128)))
    }

    /// About the bytes that a cluster takes: the rows of its registers, and its shared memory with the record of who
    /// accessed it.
    pub fn cluster_bytes(&self) -> u64 {
        let (blocks, warps) = self.blocks_and_warps();
        let rows = size_of::<Row>() * self.program.words + size_of::<Row64>() * self.program.longs;
        blocks * (warps * (rows as u64 + 4096) + 8 * u64::from(self.shared_bytes))
    }
}

/// What the clusters of one host thread have counted and found.
#[derive(Default)]
pub struct Tally {
    /// How often each instruction was executed, but for those of whole runs.
    pub executed: Vec<u64>,
    /// How often each run of instructions was executed as a whole.
    pub runs: Vec<u64>,
    /// What each instruction cost.
    pub counters: Vec<Counter>,
    /// What was found.
    pub findings: FindingSet,
    /// An instruction that could not be executed.
    pub error: Option<SimError>,
}

/// One block.
pub struct Block {
    /// Its index in the grid.
    pub index: [u32; 3],
    /// Its shared memory.
    pub shared: SharedMemory,
    /// Its barriers.
    pub barriers: [NamedBarrier; 16],
    /// Its mbarriers in use, by address.
    pub mbarriers: ByNumber<u32, Mbarrier>,
    /// Its first warp in the cluster.
    pub first_warp: usize,
    /// Its number of warps.
    pub warps: usize,
    /// Registers that its warps have given back. A block has no others than those that it was launched with.
    pub free_registers: i64,
    /// Its warpgroups.
    pub warpgroups: Vec<Warpgroup>,
    /// What was published through words of shared memory, by address.
    pub sync: HashMap<u32, ClockPair>,
}

/// The asynchronous operations of a cluster, numbered after its warps.
///
/// A number is used again for a new operation only if the warp that starts it has seen the old one complete, so
/// that knowing the new one implies knowing the old one. A cluster has [`MAX_OPERATIONS`] numbers; where more
/// operations than that are never waited for, the oldest numbers are used again all the same, and a race with an
/// operation that old may be missed.
///
/// One number between the warps and the operations stands for the grid before this one.
pub struct Agents {
    first: Agent,
    clocks: Vec<u32>,
    /// The number that is used again next where none is free.
    oldest: usize,
    /// The warp that started the latest operation of each number.
    pub started_by: Vec<usize>,
}

impl Agents {
    fn new(warps: usize) -> Agents {
        Agents { first: warps as Agent + 1, clocks: Vec::new(), oldest: 0, started_by: Vec::new() }
    }

    /// The grid before this one, which has completed once `griddepcontrol.wait` has returned.
    pub fn grid_before(&self) -> Agent {
        self.first - 1
    }

    /// A number and clock for an operation that these lanes of a warp start.
    pub fn start(&mut self, warp: usize, lanes: u32, clocks: &WarpClock) -> (Agent, u32) {
        let first = self.first;
        let slot = (0..self.clocks.len())
            .find(|&i| clocks.has_seen(lanes, first + i as Agent, self.clocks[i]))
            .unwrap_or_else(|| {
                if self.clocks.len() == MAX_OPERATIONS {
                    self.oldest = (self.oldest + 1) % MAX_OPERATIONS;
                    return self.oldest;
                }
                self.clocks.push(0);
                self.started_by.push(warp);
                self.clocks.len() - 1
            });
        self.clocks[slot] += 1;
        self.started_by[slot] = warp;
        (first + slot as Agent, self.clocks[slot])
    }

    /// The warp that an agent is, or that started it, and whether it is an asynchronous operation.
    pub fn warp_of(&self, agent: Agent) -> (usize, bool) {
        if agent < self.first {
            (usize::from(agent), false)
        } else {
            (self.started_by[usize::from(agent - self.first)], true)
        }
    }
}

/// A cluster at work.
pub struct Cluster<'a> {
    /// The launch it belongs to.
    pub launch: &'a Launch<'a>,
    /// Its number in the launch.
    pub id: u32,
    /// Its blocks, by rank.
    pub blocks: Vec<Block>,
    /// The warps of all its blocks.
    pub warps: Vec<Warp>,
    /// Its asynchronous operations.
    pub agents: Agents,
    /// Copies under way that complete at an mbarrier.
    pub pending: Vec<PendingCopy>,
    /// The bytes of the copy that is taking effect.
    pub staging: Vec<u8>,
    /// The cluster's barrier.
    pub barrier: ClusterBarrier,
    /// Its own source of random choices.
    pub random: Random,
    /// What it has counted and found.
    pub tally: Tally,
    /// Changes whenever something happens that may wake a warp.
    pub progress: u64,
    /// Instructions left in the slice it may run.
    pub slice: u64,
    /// Tiles that tensor instructions use.
    pub tiles: Box<Tiles>,
    /// The addresses of the matrix instruction that is executed.
    pub survey: Survey,
    /// Where the operands of `wgmma`s lie.
    pub operand_pages: OperandPages,
    /// The clocks of the warpgroup whose product is being started.
    pub together: WarpClock,
    /// What the clock registers show: it moves on whenever one is read.
    pub ticks: u64,
}

/// What the scheduler does after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Goes on with the next instruction.
    Next,
    /// The instruction has set the place to go on at.
    Jumped,
    /// Goes on with the next instruction, after other warps had their turn.
    Yield,
    /// The warp waits; it executes the instruction again when woken.
    Retry,
    /// The warp waits; it goes on after the instruction when woken.
    Wait,
}

impl<'a> Cluster<'a> {
    /// A cluster at the start of the program, in the memory of one of the same launch that has come to its end.
    pub fn new(launch: &'a Launch<'a>, id: u32, ended: Option<Cluster<'a>>) -> Cluster<'a> {
        let program = launch.program;
        let [cx, cy, cz] = launch.cluster;
        let blocks_in_cluster = (cx * cy * cz) as usize;
        let threads: u32 = launch.block.iter().product();
        let warps_in_block = threads.div_ceil(32) as usize;
        let clusters = [launch.grid[0] / cx, launch.grid[1] / cy, launch.grid[2] / cz];
        let origin =
            [id % clusters[0] * cx, id / clusters[0] % clusters[1] * cy, id / clusters[0] / clusters[1] * cz];
        let registers = launch_registers(program, threads);
        let (mut tiles, mut operand_pages) = (Box::default(), OperandPages::default());
        let (mut old_blocks, mut old_warps) = (Vec::new(), Vec::new());
        if let Some(ended) = ended {
            (tiles, operand_pages) = (ended.tiles, ended.operand_pages);
            (old_blocks, old_warps) = (ended.blocks, ended.warps);
        }
        let mut old_shared = old_blocks.into_iter().map(|block: Block| block.shared);
        let mut old_warps = old_warps.into_iter();
        let mut blocks = Vec::with_capacity(blocks_in_cluster);
        let mut warps = Vec::with_capacity(blocks_in_cluster * warps_in_block);
        for rank in 0..blocks_in_cluster as u32 {
            let first_warp = warps.len();
            let index = [origin[0] + rank % cx, origin[1] + rank / cx % cy, origin[2] + rank / (cx * cy)];
            for w in 0..warps_in_block {
                let clocks = WarpClock::new((first_warp + w) as Agent);
                let (place, ended) = ((rank as usize, w as u32), old_warps.next());
                warps.push(Warp::new(program, place, clocks, launch.block, registers, ended));
            }
            blocks.push(Block {
                index,
                // The blocks of a cluster are alike, and so are the clusters of a launch.
                shared: old_shared.next().map_or_else(
                    || {
                        let layout = &program.kernel.shared;
                        let first_warp = first_warp as Agent;
                        SharedMemory::new(launch.shared_bytes, layout, first_warp, warps_in_block)
                    },
                    SharedMemory::renewed,
                ),
                barriers: Default::default(),
                mbarriers: ByNumber::default(),
                first_warp,
                warps: warps_in_block,
                free_registers: 0,
                warpgroups: (0..warps_in_block.div_ceil(4)).map(|_| Warpgroup::default()).collect(),
                sync: HashMap::new(),
            });
        }
        let agents = Agents::new(warps.len());
        let random =
            Random::new(launch.config.seed ^ (u64::from(id) << 32) ^ launch.config.async_mode.salt());
        Cluster {
            launch,
            id,
            blocks,
            warps,
            agents,
            pending: Vec::new(),
            staging: Vec::new(),
            barrier: ClusterBarrier::default(),
            random,
            tally: Tally::default(),
            progress: 0,
            slice: 0,
            tiles,
            survey: Survey::NONE,
            operand_pages,
            together: WarpClock::new(Agent::MAX),
            ticks: 0,
        }
    }

    /// Whether all warps have ended.
    pub fn finished(&self) -> bool {
        self.warps.iter().all(|w| w.state == State::Done)
    }

    /// The thread of a lane of a warp.
    pub fn thread(&self, warp: usize, lane: u32) -> Thread {
        let w = &self.warps[warp];
        Thread { block: self.blocks[w.block].index, warp: w.index, lane }
    }

    /// Reports something at an instruction of a warp.
    #[cold]
    pub fn report(
        &mut self,
        warp: usize,
        lane: u32,
        pc: u32,
        kind: FindingKind,
        severity: Severity,
        message: impl FnOnce(&Self) -> (String, Option<Place>),
    ) {
        if self.tally.findings.again(kind, pc, u32::MAX) {
            return;
        }
        let (message, place) = message(self);
        let thread = self.thread(warp, lane);
        let raw = Raw { kind, severity, pc, thread, message, place, other: None, missing: None };
        self.tally.findings.add(raw);
    }

    /// Reports an error at an instruction of a warp that concerns no address.
    #[cold]
    pub fn report_error(&mut self, warp: usize, lane: u32, pc: u32, kind: FindingKind, message: String) {
        self.report(warp, lane, pc, kind, Severity::Error, |_| (message, None));
    }

    /// Ends the launch because of an instruction that is not implemented.
    #[cold]
    pub fn unsupported(&mut self, pc: u32, why: &str) {
        let kernel = self.launch.program.kernel;
        self.tally.error.get_or_insert_with(|| SimError::Unsupported {
            kernel: kernel.name.clone(),
            instruction: kernel.line(&kernel.body[pc as usize]),
            place: kernel.describe(pc as usize).to_string(),
            why: why.to_string(),
        });
        self.launch.stop.store(true, Relaxed);
    }

    /// Where a shared address lies, in words.
    pub fn shared_place(&self, block: usize, address: u32) -> Place {
        let allocs = self.launch.program.kernel.shared.allocs();
        let names: Vec<String> = allocs
            .iter()
            .filter(|a| (a.offset..a.offset + a.bytes).contains(&address))
            .map(|a| format!("{} + {}", a.name, address - a.offset))
            .collect();
        let len = self.blocks[block].shared.len();
        let mut description = if names.is_empty() && address >= len {
            format!("shared memory ends at {len}")
        } else if names.is_empty() && allocs.is_empty() {
            format!("shared memory + {address}")
        } else if names.is_empty() {
            "shared memory between allocations".to_string()
        } else {
            format!("shared {}", names.join(" = "))
        };
        if self.blocks.len() > 1 {
            description = format!("{description} of block {block} of the cluster");
        }
        Place { address: u64::from(address), description }
    }

    /// Where a global address lies, in words.
    pub fn global_place(&self, address: u64) -> Place {
        Place { address, description: format!("global {}", self.launch.memory.describe(address)) }
    }

    /// Who made an access, in words.
    fn agent_name(&self, stamp: Stamp) -> String {
        let (warp, asynchronous) = self.agents.warp_of(stamp.agent);
        let thread = self.thread(warp, stamp.lanes.any());
        if asynchronous { format!("an asynchronous operation of {thread}") } else { thread.to_string() }
    }

    /// Whether an instruction's accesses are atomic or ordered, so that two such do not race.
    pub fn is_strong(&self, pc: u32) -> bool {
        use flashcore_ptx::{Op, Order};
        match self.launch.program.code[pc as usize].op {
            Op::Atom { .. } | Op::Red { .. } | Op::BulkReduce { .. } | Op::TensorReduce { .. } => true,
            Op::Ld { order, .. } | Op::St { order, .. } => order != Order::Weak,
            _ => false,
        }
    }

    /// Reports a conflict in the shared memory of a block.
    #[cold]
    pub fn report_conflict(
        &mut self,
        warp: usize,
        lane: u32,
        pc: u32,
        block: usize,
        write: bool,
        found: Conflict,
    ) {
        if self.is_strong(pc) && self.is_strong(found.prior_pc) {
            return;
        }
        let (kind, severity) = match found.edge {
            Edge::MissingProxyFence if !found.prior_wrote => {
                (FindingKind::MissingProxyFence, Severity::Warning)
            }
            Edge::MissingProxyFence => (FindingKind::MissingProxyFence, Severity::Error),
            Edge::MissingWarpBarrier => (FindingKind::WarpRace, Severity::Warning),
            Edge::Missing | Edge::Ordered => (FindingKind::SharedRace, Severity::Error),
        };
        if self.tally.findings.again(kind, pc, found.prior_pc) {
            return;
        }
        let raw = Raw {
            kind,
            severity,
            pc,
            thread: self.thread(warp, lane),
            message: format!(
                "{} of shared memory that is not ordered after {}",
                if write { "a write" } else { "a read" },
                if found.prior_wrote { "a write" } else { "a read" },
            ),
            place: Some(self.shared_place(block, found.address)),
            other: Some((found.prior_pc, self.agent_name(found.prior), found.prior_wrote)),
            missing: Some(self.missing_edge(found.edge, found.prior, write, found.prior_wrote)),
        };
        self.tally.findings.add(raw);
    }

    /// Reports a conflict in global memory.
    #[cold]
    pub fn report_global_conflict(
        &mut self,
        warp: usize,
        lane: u32,
        pc: u32,
        address: u64,
        write: bool,
        found: GlobalConflict,
    ) {
        let prior = found.prior;
        if !found.non_coherent && self.is_strong(pc) && self.is_strong(prior.pc) {
            return;
        }
        let (kind, severity) = match found.edge {
            _ if found.non_coherent => (FindingKind::ReadOnlyWritten, Severity::Error),
            Edge::MissingProxyFence => (FindingKind::MissingProxyFence, Severity::Error),
            Edge::MissingWarpBarrier => (FindingKind::WarpRace, Severity::Warning),
            Edge::Missing | Edge::Ordered => (FindingKind::GlobalRace, Severity::Error),
        };
        if self.tally.findings.again(kind, pc, prior.pc) {
            return;
        }
        let (by, missing) = if prior.cluster == self.id {
            (
                self.agent_name(prior.stamp),
                self.missing_edge(found.edge, prior.stamp, write, found.prior_wrote),
            )
        } else {
            let by = format!("another block (cluster {})", prior.cluster);
            (by, "a release and an acquire between the two blocks, or atomics".to_string())
        };
        let (message, missing) = if found.non_coherent {
            let what = if write {
                "a write of global memory that ld.global.nc has read"
            } else {
                "ld.global.nc of global memory that the kernel has written"
            };
            (
                what.to_string(),
                "ld.global without .nc, which promises that nobody writes the memory while the kernel runs"
                    .to_string(),
            )
        } else {
            let kind = |wrote: bool| if wrote { "a write" } else { "a read" };
            let what = format!(
                "{} of global memory that is not ordered after {}",
                kind(write),
                kind(found.prior_wrote)
            );
            (what, missing)
        };
        let raw = Raw {
            kind,
            severity,
            pc,
            thread: self.thread(warp, lane),
            message,
            place: Some(self.global_place(address)),
            other: Some((prior.pc, by, found.prior_wrote)),
            missing: Some(missing),
        };
        self.tally.findings.add(raw);
    }

    fn missing_edge(&self, edge: Edge, prior: Stamp, write: bool, prior_wrote: bool) -> String {
        let kind = |w: bool| if w { "write" } else { "read" };
        let (_, asynchronous) = self.agents.warp_of(prior.agent);
        match edge {
            Edge::MissingProxyFence => {
                format!("generic {} -> async {} without fence.proxy.async", kind(prior_wrote), kind(write))
            }
            Edge::MissingWarpBarrier => "bar.warp.sync between the lanes".to_string(),
            Edge::Missing | Edge::Ordered if asynchronous => {
                "a wait for the asynchronous operation, and a barrier if another warp waited for it"
                    .to_string()
            }
            Edge::Missing | Edge::Ordered => "a barrier between the two".to_string(),
        }
    }
}

/// The registers a thread has at launch: what the kernel is limited to, or what the block leaves each thread.
fn launch_registers(program: &Program<'_>, threads: u32) -> u32 {
    let kernel = program.kernel;
    if let Some(max) = kernel.max_regs {
        return max;
    }
    let blocks = kernel.min_blocks_per_sm.unwrap_or(1).max(1);
    let share = 65536 / (threads.next_multiple_of(128) * blocks) / 8 * 8;
    share.min(255)
}
