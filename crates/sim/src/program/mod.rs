//! A kernel ready to run: operands are rows of a compact register file, branches know their targets and where lanes meet
//! again.
//!
//! `decode` makes it from a kernel's instructions. It asks `flow` for the basic blocks, `rows` for the row of each
//! register, `assignment` for the registers that surely hold a value, `implemented` for what the simulator refuses, and
//! `class` for what an instruction counts as.

mod assignment;
mod class;
mod decode;
mod flow;
mod implemented;
mod rows;

use flashcore_ptx::{Kernel, Op};

use crate::error::SimError;
use crate::machine::regs::Constants;
pub use crate::program::class::Class;
use crate::program::decode::Decoder;
use crate::vectors::alu::{AluInst, SetpInst};
use crate::vectors::mma::MmaInst;

/// No instruction: where lanes meet only at the end.
pub const NEVER: u32 = u32::MAX;

/// A decoded operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    /// A row of 32-bit (or 16-bit) values.
    Word(u32),
    /// A row of 64-bit values.
    Long(u32),
    /// A predicate.
    Pred(u32),
    /// A shared address: a row and bytes after it.
    Shared(u32, i32),
    /// A global or generic address: a row and bytes after it.
    Global(u32, i32),
    /// Bytes of the parameters, from this one on.
    Param(u32),
    /// A result that is discarded.
    Sink,
}

impl Slot {
    /// The row of a word operand.
    pub fn word(self) -> u32 {
        match self {
            Slot::Word(row) => row,
            other => unreachable!("a 32-bit operand was decoded as {other:?}"),
        }
    }

    /// The row of a long operand.
    pub fn long(self) -> u32 {
        match self {
            Slot::Long(row) => row,
            other => unreachable!("a 64-bit operand was decoded as {other:?}"),
        }
    }

    /// The predicate of a predicate operand.
    pub fn pred(self) -> u32 {
        match self {
            Slot::Pred(row) => row,
            other => unreachable!("a predicate operand was decoded as {other:?}"),
        }
    }
}

/// The guard of an instruction.
#[derive(Clone, Copy, Debug)]
pub struct DecodedGuard {
    /// The predicate.
    pub pred: u32,
    /// Lanes where the predicate is false execute.
    pub negated: bool,
}

/// How an instruction is executed.
#[derive(Clone, Copy, Debug)]
pub enum Exec {
    /// A plain instruction.
    Alu(AluInst),
    /// A comparison.
    Setp(SetpInst),
    /// A product of a warp, with its index among those of the program.
    Mma(u32),
    /// By its [`Op`].
    Op,
    /// A branch.
    Branch,
    /// Nothing: a label.
    Nop,
}

/// A range of a pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct Span {
    start: u32,
    len: u32,
}

impl Span {
    /// Whether it is empty.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }
}

/// Plain instructions, or products of a warp, without a guard that follow each other. What has to be checked before each
/// of them is checked once.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// How many.
    pub len: u32,
    /// The first of the products, if it is a run of products.
    product: Option<u32>,
    /// Registers that they read and that may lack a value in some lane before the first of them.
    unproven: Span,
    /// Registers that some `wgmma` uses and that they read, each once.
    wgmma_reads: Span,
    /// Registers that some `wgmma` uses and that they write, each once.
    wgmma_writes: Span,
}

/// A decoded instruction. What the loop of plain instructions needs is in one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Code {
    /// Its guard.
    pub guard: Option<DecodedGuard>,
    /// Registers read that may lack a value in some lane.
    unproven: Span,
    /// Registers that begin their life here without being written in all lanes.
    births: Span,
    /// Where a branch goes.
    pub target: u32,
    /// Whether it touches registers that some `wgmma` uses.
    pub touches_wgmma: bool,
    /// Whether registers may lack a value before it, or begin their life at it.
    pub watched: bool,
    /// Its class in the statistics.
    pub class: Class,
    /// What it does, with all modifiers.
    pub op: Op,
    dst: Span,
    src: Span,
    /// Registers read.
    reads: Span,
    /// Registers that some `wgmma` uses and that this other instruction reads.
    wgmma_reads: Span,
    /// Registers that some `wgmma` uses and that this other instruction writes.
    wgmma_writes: Span,
    /// Where lanes that part at this branch meet.
    pub reconverge: u32,
}

/// A kernel ready to run.
pub struct Program<'k> {
    /// The kernel it was made from.
    pub kernel: &'k Kernel,
    /// The instructions, one for one with the kernel's body.
    pub code: Vec<Code>,
    /// How each instruction is executed.
    pub steps: Vec<Exec>,
    /// For each instruction, one more than the index of the run that begins with it, or 0.
    run_at: Vec<u32>,
    runs: Vec<Run>,
    products: Vec<MmaInst>,
    slots: Vec<Slot>,
    /// Rows of words, constants included.
    pub words: usize,
    /// Rows of longs, constants included.
    pub longs: usize,
    /// Predicates, constants included.
    pub preds: usize,
    /// The constants, which take the last rows of each file.
    pub constants: Constants,
    /// Whether it has a `griddepcontrol.wait` anywhere.
    pub waits_for_grid: bool,
}

impl<'k> Program<'k> {
    /// Decodes a kernel.
    pub fn new(kernel: &'k Kernel) -> Result<Program<'k>, SimError> {
        Decoder::new(kernel).run()
    }

    /// The destinations of an instruction.
    #[inline]
    pub fn dst(&self, code: &Code) -> &[Slot] {
        self.pool(code.dst)
    }

    /// The sources of an instruction.
    #[inline]
    pub fn src(&self, code: &Code) -> &[Slot] {
        self.pool(code.src)
    }

    /// The run of plain instructions that begins with an instruction, and its index.
    #[inline]
    pub fn run(&self, pc: usize) -> Option<(usize, &Run)> {
        let index = (*self.run_at.get(pc)? as usize).wrapping_sub(1);
        Some((index, self.runs.get(index)?))
    }

    /// How many runs there are.
    pub fn run_count(&self) -> usize {
        self.runs.len()
    }

    /// Adds how often each run was executed as a whole to the counts of its instructions.
    pub fn spread(&self, runs: &[u64], executed: &mut [u64]) {
        for (pc, &at) in self.run_at.iter().enumerate().filter(|&(_, &at)| at != 0) {
            let (run, count) = (&self.runs[at as usize - 1], runs[at as usize - 1]);
            executed[pc..pc + run.len as usize].iter_mut().for_each(|executed| *executed += count);
        }
    }

    /// The products of a run, if it is a run of products.
    #[inline]
    pub fn products(&self, run: &Run) -> &[MmaInst] {
        run.product.map_or(&[], |first| &self.products[first as usize..][..run.len as usize])
    }

    /// The registers that a run reads and that may lack a value in some lane.
    #[inline]
    pub fn unproven_in(&self, run: &Run) -> &[Slot] {
        self.pool(run.unproven)
    }

    /// Registers of `wgmma`s that a run reads, and those that it writes.
    #[inline]
    pub fn wgmma_in(&self, run: &Run) -> (Span, Span) {
        (run.wgmma_reads, run.wgmma_writes)
    }

    /// The registers an instruction reads.
    #[inline]
    pub fn reads(&self, code: &Code) -> &[Slot] {
        self.pool(code.reads)
    }

    /// Of those, the registers that may lack a value in some lane.
    #[inline]
    pub fn unproven(&self, code: &Code) -> &[Slot] {
        self.pool(code.unproven)
    }

    /// The registers whose old value ends before an instruction.
    #[inline]
    pub fn births(&self, code: &Code) -> &[Slot] {
        self.pool(code.births)
    }

    /// The `wgmma` registers that an instruction other than `wgmma` reads, and those that it writes.
    #[inline]
    pub fn wgmma_of(&self, code: &Code) -> (Span, Span) {
        (code.wgmma_reads, code.wgmma_writes)
    }

    /// The operands of a range of the pool.
    #[inline]
    pub fn pool(&self, span: Span) -> &[Slot] {
        &self.slots[span.start as usize..][..span.len as usize]
    }
}
