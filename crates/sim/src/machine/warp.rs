//! A warp: its registers, its place in the program, its clocks, and what it waits for.

use crate::exec::bulk::BulkGroups;
use crate::exec::wgmma::WgmmaRegisters;
use crate::machine::RANK_SHIFT;
use crate::machine::copy_queue::CopyQueue;
use crate::machine::regs::{Aligned, Regs, Row};
use crate::program::{NEVER, Program};
use crate::races::clock::WarpClock;

/// Lanes that parted from the others and wait for their turn.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// Where they go on.
    pub pc: u32,
    /// The lanes.
    pub mask: u32,
    /// Where they meet the others.
    pub reconverge: u32,
}

/// What a warp waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// A barrier of the block.
    Barrier(u32),
    /// A phase of an mbarrier: the block, the address, and the phase's number.
    Mbarrier {
        /// The block in the cluster.
        block: usize,
        /// The address in its shared memory.
        address: u32,
        /// The parity asked for.
        parity: u32,
        /// The phase's number.
        phase: u64,
    },
    /// The other warps of its warpgroup.
    Warpgroup,
    /// Registers of the block's pool.
    Registers(u32),
    /// The cluster's barrier.
    Cluster,
}

/// Whether a warp can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It can.
    Ready,
    /// It waits.
    Waiting(Wait),
    /// All its lanes have exited.
    Done,
}

/// One warp.
pub struct Warp {
    /// Its registers.
    pub regs: Regs,
    /// The next instruction.
    pub pc: u32,
    /// The lanes that execute now.
    pub active: u32,
    /// The lanes that have not exited.
    pub live: u32,
    /// Where the active lanes meet others.
    pub reconverge: u32,
    /// Other lanes, and what the active ones become when they have met.
    pub stack: Vec<Path>,
    /// Whether it can run.
    pub state: State,
    /// Its block in the cluster.
    pub block: usize,
    /// Its index in the block.
    pub index: u32,
    /// Its clocks.
    pub clocks: WarpClock,
    /// Its `cp.async` copies.
    pub copies: CopyQueue,
    /// Its bulk groups.
    pub bulk: BulkGroups,
    /// Its registers that `wgmma` uses.
    pub wgmma: WgmmaRegisters,
    /// The phases of the cluster's barrier that it has come to and waited for.
    pub cluster_phases: (u64, u64),
    /// Thread indices, by dimension.
    pub tid: [Row; 3],
    /// Failed polls of an mbarrier in a row, and where.
    pub polls: (u32, u32),
    /// Registers per thread, by `setmaxnreg`.
    pub register_count: u32,
}

impl Warp {
    /// A warp at the start of a program, given its block and its index there; reuses the memory of an ended warp.
    pub fn new(
        program: &Program<'_>,
        (block, index): (usize, u32),
        clocks: WarpClock,
        dims: [u32; 3],
        register_count: u32,
        ended: Option<Warp>,
    ) -> Warp {
        let threads = dims[0] * dims[1] * dims[2];
        let first = index * 32;
        let live = if threads - first >= 32 { u32::MAX } else { (1 << (threads - first)) - 1 };
        let flat = |lane: usize| first + lane as u32;
        let x = std::array::from_fn(|l| flat(l) % dims[0]);
        let y = std::array::from_fn(|l| flat(l) / dims[0] % dims[1]);
        let z = std::array::from_fn(|l| flat(l) / (dims[0] * dims[1]));
        let (regs, copies, wgmma) = match ended {
            Some(ended) => (ended.regs, ended.copies.renewed(), ended.wgmma.renewed()),
            None => (Regs::default(), CopyQueue::default(), WgmmaRegisters::new(program.words)),
        };
        Warp {
            regs: fresh_registers(program, block, regs),
            pc: 0,
            active: live,
            live,
            reconverge: NEVER,
            stack: Vec::new(),
            state: State::Ready,
            block,
            index,
            clocks,
            copies,
            bulk: BulkGroups::default(),
            wgmma,
            cluster_phases: (0, 0),
            tid: [x, y, z],
            polls: (0, 0),
            register_count,
        }
    }

    /// Ends lanes: they take part in nothing from here on.
    pub fn exit(&mut self, mask: u32) {
        self.live &= !mask;
        self.active &= !mask;
        for path in &mut self.stack {
            path.mask &= !mask;
        }
    }

    /// Switches to waiting lanes if the active ones have met them, or have all exited.
    pub fn settle(&mut self) {
        while self.active == 0 || self.pc == self.reconverge {
            match self.stack.pop() {
                Some(path) => {
                    self.pc = path.pc;
                    self.active = path.mask;
                    self.reconverge = path.reconverge;
                }
                None => break,
            }
        }
    }

    /// Parts the active lanes at a branch. `taken_first` chooses which side runs first.
    pub fn diverge(&mut self, taken: u32, target: u32, next: u32, meet: u32, taken_first: bool) {
        let others = self.active & !taken;
        self.stack.push(Path { pc: meet, mask: self.active, reconverge: self.reconverge });
        let (first, second) =
            if taken_first { ((target, taken), (next, others)) } else { ((next, others), (target, taken)) };
        self.stack.push(Path { pc: second.0, mask: second.1, reconverge: meet });
        self.pc = first.0;
        self.active = first.1;
        self.reconverge = meet;
    }
}

/// Registers at the start of a program, in the block of this rank in its cluster; reuses the memory of others.
fn fresh_registers(program: &Program<'_>, rank: usize, mut regs: Regs) -> Regs {
    let poison = crate::memory::global::POISON;
    refill(&mut regs.r32, program.words, Aligned([poison as u32; 32]));
    refill(&mut regs.r64, program.longs, Aligned([poison; 32]));
    refill(&mut regs.pred, program.preds, 0);
    refill(&mut regs.init32, program.words, 0);
    refill(&mut regs.init64, program.longs, 0);
    refill(&mut regs.init_pred, program.preds, 0);
    let constants = &program.constants;
    for (i, &value) in constants.words.iter().enumerate() {
        regs.set32((program.words - constants.words.len() + i) as u32, u32::MAX, &[value; 32]);
    }
    for &i in &constants.shared {
        let address = constants.words[i] | (rank as u32) << RANK_SHIFT;
        regs.set32((program.words - constants.words.len() + i) as u32, u32::MAX, &[address; 32]);
    }
    for (i, &value) in constants.longs.iter().enumerate() {
        regs.set64((program.longs - constants.longs.len() + i) as u32, u32::MAX, &[value; 32]);
    }
    for (i, &value) in constants.preds.iter().enumerate() {
        let row = (program.preds - constants.preds.len() + i) as u32;
        regs.set_pred(row, u32::MAX, if value { u32::MAX } else { 0 });
    }
    regs
}

/// Fills a list with `len` equal values, in its own memory.
fn refill<T: Clone>(list: &mut Vec<T>, len: usize, value: T) {
    list.clear();
    list.resize(len, value);
}
