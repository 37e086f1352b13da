//! A cluster of blocks at work: the state that the instructions act on.
//!
//! Blocks of a cluster run interleaved on one host thread; a launch without clusters has clusters of one block.
//! Different clusters share nothing but global memory.

mod agents;
pub mod barrier;
pub mod copy_queue;
pub mod mbarrier;
pub mod regs;
mod report;
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
use crate::findings::{FindingSet, Thread};
use crate::machine::agents::Agents;
use crate::machine::barrier::NamedBarrier;
use crate::machine::mbarrier::{ByNumber, Mbarrier};
use crate::machine::regs::{Row, Row64};
use crate::machine::warp::{State, Warp};
use crate::memory::global::GlobalMemory;
use crate::memory::shared::SharedMemory;
use crate::program::Program;
use crate::races::clock::{Agent, ClockPair, WarpClock};
use crate::races::global_shadow::Era;
use crate::races::sync_words::SyncWords;
use crate::random::Random;
use crate::stats::Counter;
use crate::stream::InFlight;
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
    /// Threads per block.
    pub block: [u32; 3],
    /// Blocks per cluster.
    pub cluster: [u32; 3],
    /// Clusters in the grid.
    pub clusters: u64,
    /// Bytes of shared memory per block.
    pub shared_bytes: u32,
    /// Which launch of the device it is.
    pub era: Era,
    /// Earlier launches that may be in flight beside it.
    pub in_flight: Vec<InFlight>,
    /// Whether a thread has waited for them.
    pub waited: AtomicBool,
    /// Whether a block has let dependents start, or has ended, without having waited for them.
    pub unwaited: AtomicBool,
    /// Words of global memory that blocks synchronise on.
    pub sync: SyncWords,
    /// Warp instructions executed by finished slices, with what setting up clusters counts as.
    pub executed: AtomicU64,
    /// Set to end the launch early.
    pub stop: AtomicBool,
    /// The vector instructions to use.
    pub level: Level,
}

impl Launch<'_> {
    /// Blocks per cluster and warps per block.
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

    /// About how many bytes a cluster takes: the rows of its registers, and its shared memory with its shadow.
    pub fn cluster_bytes(&self) -> u64 {
        let (blocks, warps) = self.blocks_and_warps();
        let rows = size_of::<Row>() * self.program.words + size_of::<Row64>() * self.program.longs;
        blocks * (warps * (rows as u64 + 4096) + 8 * u64::from(self.shared_bytes))
    }
}

/// What the clusters of one host thread have counted and found.
#[derive(Default)]
pub struct Tally {
    /// How often each instruction was executed outside of whole runs.
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
    /// Whether a thread of it has waited for the grids before.
    pub waited: bool,
    /// Whether it has let the grids after it start.
    pub released: bool,
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
    /// Copies in flight that complete at an mbarrier.
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
}

/// What the scheduler does after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Goes on with the next instruction.
    Next,
    /// The instruction has set the place to go on at.
    Jumped,
    /// Goes on with the next instruction, after other warps have had their turn.
    Yield,
    /// The warp waits; it executes the instruction again when woken.
    Retry,
    /// The warp waits; it goes on after the instruction when woken.
    Wait,
}

impl<'a> Cluster<'a> {
    /// A cluster at the start of the program; reuses the memory of an ended cluster of the same launch.
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
                waited: false,
                released: false,
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
}

/// The registers per thread at launch: what the kernel is limited to, or what the block leaves each thread.
fn launch_registers(program: &Program<'_>, threads: u32) -> u32 {
    let kernel = program.kernel;
    if let Some(max) = kernel.max_regs {
        return max;
    }
    let blocks = kernel.min_blocks_per_sm.unwrap_or(1).max(1);
    let share = 65536 / (threads.next_multiple_of(128) * blocks) / 8 * 8;
    share.min(255)
}
