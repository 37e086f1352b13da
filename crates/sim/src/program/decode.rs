//! From a kernel's instructions to the form that is executed: operands are rows of a compact register file,
//! branches know their targets and where lanes meet again.
//!
//! Kernels have thousands of virtual registers, of which few live at the same time. Rows are shared by registers
//! whose lives do not overlap, so that a warp's registers stay in the cache. Operands of `wgmma` keep rows of
//! their own, because they stay in use until the wait.

use std::collections::{HashMap, HashSet};

use flashcore_ptx::flow::Worklist;
use flashcore_ptx::{AccTy, Alu, Arg, GridDep, Inst, Kernel, MemBase, MmaShape, Op, RegClass, RegId};

use crate::error::SimError;
use crate::machine::regs::Constants;
use crate::program::assignment::{assigned_before, writes_surely};
use crate::vectors::alu::{AluInst, SetpInst};
use crate::vectors::mma::{self, Company, MmaInst};

/// Instructions that a kernel may have: what the shadow of shared memory has room to name.
const MAX_BODY: usize = 1 << 21;

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
    /// A result that is not wanted.
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
    /// Whether it has nothing.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }
}

/// Plain instructions, or products of a warp, without a guard that follow each other: what is asked before each of them
/// is asked once.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// How many.
    pub len: u32,
    /// The first of the products, if they are those.
    product: Option<u32>,
    /// Registers that they read and that may lack a value in some lane before the first of them.
    unproven: Span,
    /// Registers that some `wgmma` uses and that they read, each once.
    wgmma_reads: Span,
    /// Registers that some `wgmma` uses and that they write, each once.
    wgmma_writes: Span,
}

/// A decoded instruction. What the loop of plain instructions looks at stands in one line of the cache.
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

/// What an instruction counts as in the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Integer arithmetic, bits, addresses.
    Integer,
    /// Floating-point arithmetic.
    Float,
    /// Functions: `ex2`, `lg2`, `rcp`, `sqrt`, `tanh`, division.
    Function,
    /// Conversions.
    Convert,
    /// Moves and selections.
    Move,
    /// Comparisons and predicates.
    Compare,
    /// Branches and exits.
    Control,
    /// Parameter loads.
    Param,
    /// Global loads.
    GlobalLoad,
    /// Global stores.
    GlobalStore,
    /// Shared loads.
    SharedLoad,
    /// Shared stores.
    SharedStore,
    /// `ldmatrix` and `stmatrix`.
    Matrix,
    /// Tensor-core instructions.
    Tensor,
    /// Atomics.
    Atomic,
    /// Asynchronous copies.
    AsyncCopy,
    /// Shuffles, votes and the like.
    Warp,
    /// Barriers, waits and fences.
    Sync,
    /// The rest.
    Other,
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
    /// Whether it waits for the grid before it anywhere.
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

    /// The products that a run consists of, if it does.
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

    /// Registers of `wgmma`s that an instruction which is none reads, and those that it writes.
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

struct Decoder<'k> {
    kernel: &'k Kernel,
    labels: HashMap<u32, u32>,
    rows: Vec<u32>,
    pinned: Vec<bool>,
    /// For each register, one more than the basic block in which it is known to hold a value in all lanes from here on,
    /// or 0.
    proven: Vec<u32>,
    slots: Vec<Slot>,
    products: Vec<MmaInst>,
    /// The accumulators of the `wgmma`s so far, each list once, so that equal ones stand in one place.
    accumulators: Vec<Span>,
    constants: Constants,
    seen_words: HashMap<u32, u32>,
    seen_shared: HashMap<u32, u32>,
    seen_longs: HashMap<u64, u32>,
    first_constant: [u32; 3],
}

impl<'k> Decoder<'k> {
    fn new(kernel: &'k Kernel) -> Decoder<'k> {
        let labels = kernel
            .body
            .iter()
            .enumerate()
            .filter_map(|(pc, inst)| match inst.op {
                Op::Label(label) => Some((label.0, pc as u32)),
                _ => None,
            })
            .collect();
        Decoder {
            kernel,
            labels,
            rows: Vec::new(),
            pinned: wgmma_registers(kernel),
            proven: vec![0; kernel.regs.len()],
            slots: Vec::new(),
            products: Vec::new(),
            accumulators: Vec::new(),
            constants: Constants::default(),
            seen_words: HashMap::new(),
            seen_shared: HashMap::new(),
            seen_longs: HashMap::new(),
            first_constant: [0; 3],
        }
    }

    fn run(mut self) -> Result<Program<'k>, SimError> {
        let body = &self.kernel.body;
        if body.len() >= MAX_BODY {
            return Err(self.unsupported(0, &format!("a kernel of more than {MAX_BODY} instructions")));
        }
        let flow = Flow::new(body, |pc| self.target(pc))?;
        let lives = lives(self.kernel, &flow);
        let (rows, counts) = share_rows(self.kernel, &lives, &self.pinned);
        self.rows = rows;
        self.first_constant = counts;
        let mut births: Vec<Vec<RegId>> = vec![Vec::new(); body.len()];
        for (reg, life) in lives.iter().enumerate() {
            if let Some(life) = life {
                let inst = &body[life.start as usize];
                let id = RegId(reg as u32);
                if inst.guard.is_some() || !inst.writes().any(|w| w == id) {
                    births[life.start as usize].push(id);
                }
            }
        }
        let assigned = assigned_before(self.kernel, &flow.starts, &flow.successors);
        let mut code = Vec::with_capacity(body.len());
        let mut steps = Vec::with_capacity(body.len());
        for (pc, inst) in body.iter().enumerate() {
            let (decoded, step) = self.instruction(pc, inst, &births[pc], &flow, &assigned)?;
            code.push(decoded);
            steps.push(step);
        }
        let (run_at, runs) = self.runs(&code, &steps);
        let [words, longs, preds] = self.first_constant;
        Ok(Program {
            kernel: self.kernel,
            code,
            steps,
            run_at,
            runs,
            products: self.products,
            words: words as usize + self.constants.words.len(),
            longs: longs as usize + self.constants.longs.len(),
            preds: preds as usize + self.constants.preds.len(),
            slots: self.slots,
            constants: self.constants,
            waits_for_grid: self.kernel.body.iter().any(|inst| inst.op == Op::GridDepControl(GridDep::Wait)),
        })
    }

    fn unsupported(&self, pc: usize, why: &str) -> SimError {
        SimError::Unsupported {
            kernel: self.kernel.name.clone(),
            instruction: self.kernel.line(&self.kernel.body[pc]),
            place: self.kernel.describe(pc).to_string(),
            why: why.to_string(),
        }
    }

    fn target(&self, pc: usize) -> Result<Option<u32>, SimError> {
        match self.kernel.body[pc].op {
            Op::Bra { target, .. } => match self.labels.get(&target.0) {
                Some(&to) => Ok(Some(to)),
                None => Err(self.unsupported(pc, "its label does not exist")),
            },
            _ => Ok(None),
        }
    }

    fn class(&self, id: RegId) -> RegClass {
        self.kernel.regs[id.0 as usize].class
    }

    fn register(&self, id: RegId) -> Slot {
        let row = self.rows[id.0 as usize];
        match self.class(id) {
            RegClass::Pred => Slot::Pred(row),
            RegClass::B16 | RegClass::B32 | RegClass::F32 => Slot::Word(row),
            RegClass::B64 => Slot::Long(row),
        }
    }

    fn word(&mut self, value: u32) -> u32 {
        let (constants, first) = (&mut self.constants.words, self.first_constant[0]);
        *self.seen_words.entry(value).or_insert_with(|| {
            constants.push(value);
            first + constants.len() as u32 - 1
        })
    }

    /// The row of an address of shared memory, which has the block's rank added to it.
    fn shared_address(&mut self, value: u32) -> u32 {
        let (constants, first) = (&mut self.constants, self.first_constant[0]);
        *self.seen_shared.entry(value).or_insert_with(|| {
            constants.shared.push(constants.words.len());
            constants.words.push(value);
            first + constants.words.len() as u32 - 1
        })
    }

    fn long(&mut self, value: u64) -> u32 {
        let (constants, first) = (&mut self.constants.longs, self.first_constant[1]);
        *self.seen_longs.entry(value).or_insert_with(|| {
            constants.push(value);
            first + constants.len() as u32 - 1
        })
    }

    fn operand(&mut self, pc: usize, arg: Arg) -> Result<Slot, SimError> {
        Ok(match arg {
            Arg::Reg(id) => self.register(id),
            Arg::Imm(imm) => match imm.class {
                RegClass::Pred => {
                    self.constants.preds.push(imm.bits != 0);
                    Slot::Pred(self.first_constant[2] + self.constants.preds.len() as u32 - 1)
                }
                RegClass::B64 => Slot::Long(self.long(imm.bits)),
                RegClass::B16 => Slot::Word(self.word(imm.bits as u32 & 0xFFFF)),
                RegClass::B32 | RegClass::F32 => Slot::Word(self.word(imm.bits as u32)),
            },
            Arg::Mem { base: MemBase::Reg(id), offset } => match self.register(id) {
                Slot::Word(row) => Slot::Shared(row, offset),
                Slot::Long(row) => Slot::Global(row, offset),
                _ => return Err(self.unsupported(pc, "its address is a predicate")),
            },
            Arg::Mem { base: MemBase::Shared(alloc), offset } => {
                let Some(alloc) = self.kernel.shared.allocs().get(alloc as usize) else {
                    return Err(self.unsupported(pc, "its shared allocation does not exist"));
                };
                let address = alloc.offset.wrapping_add_signed(offset);
                Slot::Shared(self.shared_address(address), 0)
            }
            Arg::Mem { base: MemBase::Param(index), offset } => {
                let Some(param) = self.kernel.params.get(index as usize) else {
                    return Err(self.unsupported(pc, "its parameter does not exist"));
                };
                Slot::Param(param.offset.wrapping_add_signed(offset))
            }
            Arg::Sink => Slot::Sink,
        })
    }

    /// What was added to the pool since it had `start` slots.
    fn span_from(&self, start: usize) -> Span {
        Span { start: start as u32, len: (self.slots.len() - start) as u32 }
    }

    fn operands(&mut self, pc: usize, args: &[Arg]) -> Result<Span, SimError> {
        let start = self.slots.len();
        for &arg in args {
            let slot = self.operand(pc, arg)?;
            self.slots.push(slot);
        }
        Ok(self.span_from(start))
    }

    /// The place where the accumulators that were added last stand already, or those.
    fn same_accumulators(&mut self, new: Span) -> Span {
        let of = |span: Span| &self.slots[span.start as usize..][..span.len as usize];
        if let Some(&seen) = self.accumulators.iter().find(|&&seen| of(seen) == of(new)) {
            self.slots.truncate(new.start as usize);
            return seen;
        }
        self.accumulators.push(new);
        new
    }

    fn registers(&mut self, ids: impl Iterator<Item = RegId>) -> Span {
        let start = self.slots.len();
        for id in ids {
            self.slots.push(self.register(id));
        }
        self.span_from(start)
    }

    fn instruction(
        &mut self,
        pc: usize,
        inst: &Inst,
        births: &[RegId],
        flow: &Flow,
        assigned: &[Vec<u64>],
    ) -> Result<(Code, Exec), SimError> {
        let mut dst = self.operands(pc, &inst.dst)?;
        if let Op::Wgmma(_) = inst.op {
            dst = self.same_accumulators(dst);
        }
        let src = self.operands(pc, &inst.src)?;
        let guard =
            inst.guard.map(|g| DecodedGuard { pred: self.rows[g.reg.id().0 as usize], negated: g.negated });
        if let Err(why) = implemented(&inst.op) {
            return Err(self.unsupported(pc, why));
        }
        let exec = self.exec(pc, inst.op, dst, src)?;
        // wgmma reads its accumulators only where scale-d is true; its execution checks them.
        let sources =
            || inst.guard.map(|g| g.reg.id()).into_iter().chain(inst.src.iter().filter_map(|a| a.reg()));
        let reads = self.registers(sources());
        // Lanes do not join within a basic block: what it has written or read without a guard holds a value in all of
        // them, or has been reported.
        let block = flow.block_of[pc] + 1;
        let assigned = &assigned[flow.block_of[pc] as usize];
        let surely = |id: RegId| assigned[id.0 as usize / 64] >> (id.0 % 64) & 1 == 1;
        let start = self.slots.len();
        for id in sources().filter(|&id| self.proven[id.0 as usize] != block && !surely(id)) {
            self.slots.push(self.register(id));
        }
        let unproven = self.span_from(start);
        if inst.guard.is_none() {
            sources().for_each(|id| self.proven[id.0 as usize] = block);
            if writes_surely(&inst.op) {
                inst.writes().for_each(|id| self.proven[id.0 as usize] = block);
            }
        }
        let births = self.registers(births.iter().copied());
        let start = self.slots.len();
        let other = !matches!(inst.op, Op::Wgmma(_));
        for id in inst.reads().filter(|id| other && self.pinned[id.0 as usize]) {
            self.slots.push(self.register(id));
        }
        let wgmma_reads = self.span_from(start);
        let start = self.slots.len();
        for id in inst.writes().filter(|id| other && self.pinned[id.0 as usize]) {
            self.slots.push(self.register(id));
        }
        let wgmma_writes = self.span_from(start);
        let code = Code {
            guard,
            unproven,
            births,
            target: self.target(pc)?.unwrap_or(NEVER),
            touches_wgmma: wgmma_reads.len + wgmma_writes.len != 0,
            watched: unproven.len + births.len != 0,
            class: classify(&inst.op),
            op: inst.op,
            dst,
            src,
            reads,
            wgmma_reads,
            wgmma_writes,
            reconverge: flow.meeting_point(pc),
        };
        Ok((code, exec))
    }

    /// Finds the runs of plain instructions. Labels and branches are none, so that lanes part and meet between runs.
    fn runs(&mut self, code: &[Code], steps: &[Exec]) -> (Vec<u32>, Vec<Run>) {
        let (mut run_at, mut runs) = (vec![0; code.len()], Vec::new());
        let mut fragments = HashMap::new();
        let mut pc = 0;
        while pc < code.len() {
            let product = match steps[pc] {
                Exec::Mma(product) => Some(product),
                _ => None,
            };
            let belongs = |next: usize| {
                let alike = match steps[next] {
                    Exec::Mma(_) => product.is_some(),
                    Exec::Alu(_) | Exec::Setp(_) => product.is_none(),
                    Exec::Op | Exec::Branch | Exec::Nop => false,
                };
                alike && code[next].guard.is_none() && code[next].births.len == 0
            };
            let end = (pc..code.len()).find(|&next| !belongs(next)).unwrap_or(code.len());
            if end > pc {
                if let Some(first) = product {
                    mma::acquaint(&mut self.products[first as usize..][..end - pc], &mut fragments);
                }
                let unproven = self.union(&code[pc..end], |code| code.unproven);
                let wgmma_reads = self.union(&code[pc..end], |code| code.wgmma_reads);
                let wgmma_writes = self.union(&code[pc..end], |code| code.wgmma_writes);
                runs.push(Run { len: (end - pc) as u32, product, unproven, wgmma_reads, wgmma_writes });
                run_at[pc] = runs.len() as u32;
            }
            pc = end.max(pc + 1);
        }
        (run_at, runs)
    }

    /// All registers of a kind that some instructions have, each once.
    fn union(&mut self, code: &[Code], span: impl Fn(&Code) -> Span) -> Span {
        let start = self.slots.len();
        let mut seen = HashSet::new();
        for code in code {
            let Span { start, len } = span(code);
            for at in start..start + len {
                let slot = self.slots[at as usize];
                if seen.insert(slot) {
                    self.slots.push(slot);
                }
            }
        }
        self.span_from(start)
    }

    /// How an instruction is executed.
    fn exec(&mut self, pc: usize, op: Op, dst: Span, src: Span) -> Result<Exec, SimError> {
        let of = |span: Span| &self.slots[span.start as usize..][..span.len as usize];
        let (dst, src) = (of(dst), of(src));
        let rows = |slots: &[Slot]| -> [u32; 4] {
            let mut rows = [0; 4];
            for (row, slot) in rows.iter_mut().zip(slots) {
                *row = match *slot {
                    Slot::Word(r) | Slot::Long(r) | Slot::Pred(r) => r,
                    _ => unreachable!("plain instructions have register operands"),
                };
            }
            rows
        };
        Ok(match op {
            Op::Alu(alu) => {
                let line = alu.line();
                let plain = |s: &Slot| matches!(s, Slot::Word(_) | Slot::Long(_) | Slot::Pred(_));
                if dst.len() != 1 || src.len() != line.src.len() || !dst.iter().chain(src).all(plain) {
                    return Err(self.unsupported(pc, "its operands do not fit the instruction table"));
                }
                Exec::Alu(AluInst { alu, d: rows(dst)[0], s: rows(src) })
            }
            Op::Setp { cmp, ty } => match (dst, src) {
                ([Slot::Pred(d)], [Slot::Word(a), Slot::Word(b)] | [Slot::Long(a), Slot::Long(b)]) => {
                    Exec::Setp(SetpInst { cmp, ty, d: *d, a: *a, b: *b })
                }
                _ => return Err(self.unsupported(pc, "its operands do not fit the instruction table")),
            },
            Op::Mma { shape: MmaShape::M16n8k16, a, b, acc: AccTy::F32, .. }
                if a.bits() == 16 && b.bits() == 16 =>
            {
                let word = |slots: &[Slot], at: usize| match slots.get(at) {
                    Some(Slot::Word(row)) => Some(*row),
                    _ => None,
                };
                let four = |slots: &[Slot], at: usize| -> Option<[u32; 4]> {
                    Some([word(slots, at)?, word(slots, at + 1)?, word(slots, at + 2)?, word(slots, at + 3)?])
                };
                let apart = |(acc, c): &([u32; 4], [u32; 4])| {
                    (1..4).all(|i| !acc[..i].contains(&acc[i]))
                        && (acc == c || !acc.iter().any(|row| c.contains(row)))
                };
                let sums = four(dst, 0).zip(four(src, 6)).filter(apart);
                match (four(src, 0), word(src, 4), word(src, 5), sums) {
                    (Some(rows), Some(b0), Some(b1), Some((acc, c))) => {
                        let company = Company::default();
                        let inst = MmaInst { a_ty: a, b_ty: b, a: rows, b: [b0, b1], c, acc, company };
                        self.products.push(inst);
                        Exec::Mma(self.products.len() as u32 - 1)
                    }
                    _ => Exec::Op,
                }
            }
            Op::Label(_) => Exec::Nop,
            Op::Bra { .. } => Exec::Branch,
            _ => Exec::Op,
        })
    }
}

/// The control flow of a body: basic blocks, their successors, and where their paths meet.
struct Flow {
    /// The first instruction of each block, and the end of the body.
    starts: Vec<u32>,
    successors: Vec<Vec<usize>>,
    /// For each block, the block where all its paths meet first; the number of blocks stands for the end.
    meet: Vec<usize>,
    block_of: Vec<u32>,
}

impl Flow {
    fn new(body: &[Inst], target: impl Fn(usize) -> Result<Option<u32>, SimError>) -> Result<Flow, SimError> {
        let mut leader = vec![false; body.len() + 1];
        leader[0] = true;
        leader[body.len()] = true;
        for (pc, inst) in body.iter().enumerate() {
            if let Some(to) = target(pc)? {
                leader[to as usize] = true;
            }
            if inst.op.ends_flow() {
                leader[pc + 1] = true;
            }
        }
        let starts: Vec<u32> =
            leader.iter().enumerate().filter(|&(_, &l)| l).map(|(pc, _)| pc as u32).collect();
        let blocks = starts.len() - 1;
        let mut block_of = vec![0; body.len() + 1];
        for block in 0..blocks {
            for pc in starts[block]..starts[block + 1] {
                block_of[pc as usize] = block as u32;
            }
        }
        block_of[body.len()] = blocks as u32;
        let mut successors = Vec::with_capacity(blocks);
        for block in 0..blocks {
            let last = starts[block + 1] as usize - 1;
            let inst = &body[last];
            let mut next = Vec::new();
            if let Some(to) = target(last)? {
                next.push(block_of[to as usize] as usize);
            } else if inst.op.ends_flow() {
                next.push(blocks);
            }
            if !inst.op.ends_flow() || inst.guard.is_some() {
                next.push(block + 1);
            }
            next.dedup();
            successors.push(next);
        }
        let meet = post_dominators(&successors);
        Ok(Flow { starts, successors, meet, block_of })
    }

    /// Where lanes that part at this instruction meet again.
    fn meeting_point(&self, pc: usize) -> u32 {
        let block = self.block_of[pc] as usize;
        match self.meet.get(block) {
            Some(&to) if to < self.meet.len() => self.starts[to],
            _ => NEVER,
        }
    }
}

/// The blocks that lead to each block, and after them those that lead to the end.
fn predecessors(successors: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut predecessors = vec![Vec::new(); successors.len() + 1];
    for (block, next) in successors.iter().enumerate() {
        for &to in next {
            predecessors[to].push(block);
        }
    }
    predecessors
}

/// The immediate post-dominator of each block, by iteration over the reversed graph. The end is block `n`.
fn post_dominators(successors: &[Vec<usize>]) -> Vec<usize> {
    let n = successors.len();
    let end = n;
    let predecessors = predecessors(successors);
    // Post-order of the reversed graph from the end.
    let mut order = Vec::with_capacity(n + 1);
    let mut state = vec![0u8; n + 1];
    let mut stack = vec![(end, 0usize)];
    state[end] = 1;
    while let Some((block, child)) = stack.pop() {
        if let Some(&next) = predecessors[block].get(child) {
            stack.push((block, child + 1));
            if state[next] == 0 {
                state[next] = 1;
                stack.push((next, 0));
            }
        } else {
            order.push(block);
        }
    }
    let mut number = vec![usize::MAX; n + 1];
    for (i, &block) in order.iter().enumerate() {
        number[block] = i;
    }
    let mut idom = vec![usize::MAX; n + 1];
    idom[end] = end;
    let mut changed = true;
    while changed {
        changed = false;
        for &block in order.iter().rev().filter(|&&b| b != end) {
            let mut new = usize::MAX;
            for &to in &successors[block] {
                if idom[to] == usize::MAX {
                    continue;
                }
                new = if new == usize::MAX {
                    to
                } else {
                    let (mut a, mut b) = (new, to);
                    while a != b {
                        while number[a] < number[b] {
                            a = idom[a];
                        }
                        while number[b] < number[a] {
                            b = idom[b];
                        }
                    }
                    a
                };
            }
            if new != usize::MAX && idom[block] != new {
                idom[block] = new;
                changed = true;
            }
        }
    }
    // A block that cannot reach the end (an endless loop) has no meeting point.
    idom.truncate(n);
    idom.into_iter().map(|b| if b == usize::MAX { end } else { b }).collect()
}

/// From the first to the last instruction where a register holds something that is still needed.
#[derive(Clone, Copy)]
struct Life {
    start: u32,
    end: u32,
}

impl Life {
    fn cover(life: &mut Option<Life>, pc: u32) {
        match life {
            Some(l) => {
                l.start = l.start.min(pc);
                l.end = l.end.max(pc);
            }
            None => *life = Some(Life { start: pc, end: pc }),
        }
    }
}

/// The lives of all registers; `None` for one that is never used.
fn lives(kernel: &Kernel, flow: &Flow) -> Vec<Option<Life>> {
    let regs = kernel.regs.len();
    let blocks = flow.successors.len();
    let words = regs.div_ceil(64);
    let mut read_first = vec![vec![0u64; words]; blocks];
    let mut killed = vec![vec![0u64; words]; blocks];
    let mut lives: Vec<Option<Life>> = vec![None; regs];
    for block in 0..blocks {
        for pc in flow.starts[block]..flow.starts[block + 1] {
            let inst = &kernel.body[pc as usize];
            for id in inst.reads() {
                let i = id.0 as usize;
                Life::cover(&mut lives[i], pc);
                if killed[block][i / 64] >> (i % 64) & 1 == 0 {
                    read_first[block][i / 64] |= 1 << (i % 64);
                }
            }
            for id in inst.writes() {
                let i = id.0 as usize;
                Life::cover(&mut lives[i], pc);
                // Under a guard, other lanes keep the old value.
                if inst.guard.is_none() {
                    killed[block][i / 64] |= 1 << (i % 64);
                }
            }
        }
    }
    let mut live_in = read_first.clone();
    let predecessors = predecessors(&flow.successors);
    let mut work = Worklist::new(blocks, &predecessors);
    while let Some(block) = work.pop() {
        if block == blocks {
            continue;
        }
        let mut changed = false;
        for w in 0..words {
            let out = flow.successors[block]
                .iter()
                .filter(|&&to| to < blocks)
                .fold(0, |bits, &to| bits | live_in[to][w]);
            let new = read_first[block][w] | out & !killed[block][w];
            changed |= new != live_in[block][w];
            live_in[block][w] = new;
        }
        if changed {
            predecessors[block].iter().for_each(|&before| work.push(before));
        }
    }
    for block in 0..blocks {
        let (first, last) = (flow.starts[block], flow.starts[block + 1] - 1);
        for w in 0..words {
            let out = flow.successors[block]
                .iter()
                .filter(|&&to| to < blocks)
                .fold(0, |bits, &to| bits | live_in[to][w]);
            for (mut bits, pc) in [(live_in[block][w], first), (out, last)] {
                while bits != 0 {
                    let i = w * 64 + bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    Life::cover(&mut lives[i], pc);
                }
            }
        }
    }
    lives
}

/// The file of a register: words, longs, predicates.
fn file(class: RegClass) -> usize {
    match class {
        RegClass::B16 | RegClass::B32 | RegClass::F32 => 0,
        RegClass::B64 => 1,
        RegClass::Pred => 2,
    }
}

/// The accumulators and A fragments of `wgmma`s, which stay in use until a wait.
fn wgmma_registers(kernel: &Kernel) -> Vec<bool> {
    let mut used = vec![false; kernel.regs.len()];
    for inst in &kernel.body {
        if let Op::Wgmma(form) = inst.op {
            let fragments = if form.a_in_regs { &inst.src[..inst.src.len().min(4)] } else { &[] };
            for id in inst.dst.iter().chain(fragments).filter_map(|a| a.reg()) {
                used[id.0 as usize] = true;
            }
        }
    }
    used
}

/// Gives registers rows, shared where lives do not overlap. Returns the row of each and the rows of each file.
fn share_rows(kernel: &Kernel, lives: &[Option<Life>], pinned: &[bool]) -> (Vec<u32>, [u32; 3]) {
    let mut order: Vec<usize> = (0..kernel.regs.len()).filter(|&i| lives[i].is_some()).collect();
    order.sort_by_key(|&i| lives[i].map(|l| l.start));
    let mut rows = vec![0; kernel.regs.len()];
    let mut counts = [0u32; 3];
    let mut free: [Vec<u32>; 3] = Default::default();
    let mut active: [std::collections::BinaryHeap<std::cmp::Reverse<(u32, u32)>>; 3] = Default::default();
    for i in order {
        let Some(life) = lives[i] else { continue };
        let f = file(kernel.regs[i].class);
        while let Some(&std::cmp::Reverse((end, row))) = active[f].peek() {
            if end >= life.start {
                break;
            }
            active[f].pop();
            free[f].push(row);
        }
        let row = if pinned[i] { None } else { free[f].pop() };
        let row = row.unwrap_or_else(|| {
            counts[f] += 1;
            counts[f] - 1
        });
        rows[i] = row;
        if !pinned[i] {
            active[f].push(std::cmp::Reverse((life.end, row)));
        }
    }
    (rows, counts)
}

/// Whether the combination of modifiers is one that is executed; nothing is guessed.
fn implemented(op: &Op) -> Result<(), &'static str> {
    use flashcore_ptx::{AtomOp, AtomTy, MatrixTy, MmaShape, Space};
    let halves = |ty: MatrixTy| ty.bits() == 16;
    match *op {
        Op::Mma { shape: MmaShape::M16n8k32, a, b, .. } if halves(a) || halves(b) => {
            Err("this shape is for fp8 operands")
        }
        Op::Mma { shape: MmaShape::M16n8k8 | MmaShape::M16n8k16, a, b, .. } if !halves(a) || a != b => {
            Err("this shape is for f16 or bf16 operands, both the same")
        }
        Op::Wgmma(form) if form.a.bits() != form.b.bits() => Err("operands of different sizes"),
        Op::Wgmma(form) if (form.trans_a || form.trans_b) && !halves(form.a) => {
            Err("only 16-bit operands can be M-major or N-major")
        }
        Op::Wgmma(form) if form.n % 8 != 0 || !(8..=256).contains(&form.n) => {
            Err("n must be a multiple of 8 from 8 to 256")
        }
        Op::Redux { op: AtomOp::Exch | AtomOp::Cas | AtomOp::Inc | AtomOp::Dec, .. } => {
            Err("this operation is not a reduction")
        }
        Op::Red { op: AtomOp::Exch | AtomOp::Cas, .. }
        | Op::BulkReduce { op: AtomOp::Exch | AtomOp::Cas, .. }
        | Op::BulkReduceCluster { op: AtomOp::Exch | AtomOp::Cas, .. }
        | Op::TensorReduce { op: AtomOp::Exch | AtomOp::Cas, .. } => Err("this operation is not a reduction"),
        Op::Atom { op, ty, .. } | Op::Red { op, ty, .. } | Op::BulkReduce { op, ty, .. } => {
            let float =
                matches!(ty, AtomTy::F32 | AtomTy::F16 | AtomTy::Bf16 | AtomTy::F16x2 | AtomTy::Bf16x2);
            let exists = matches!(op, AtomOp::Add | AtomOp::Min | AtomOp::Max)
                || (op == AtomOp::Exch && ty == AtomTy::F32);
            if float && !exists { Err("this operation does not exist for floats") } else { Ok(()) }
        }
        Op::St { space: Space::Param, .. } => Err("parameters cannot be written"),
        _ => Ok(()),
    }
}

fn classify(op: &Op) -> Class {
    use flashcore_ptx::Space;
    match op {
        Op::Alu(alu) => classify_alu(*alu),
        Op::Setp { .. } => Class::Compare,
        Op::MovSpecial(_)
        | Op::PackB64
        | Op::UnpackB64
        | Op::PackB32
        | Op::UnpackB32
        | Op::AddrOf
        | Op::Cvta { .. }
        | Op::CreatePolicy(_)
        | Op::Mapa
        | Op::GetCtaRank => Class::Move,
        Op::Label(_) | Op::Bra { .. } | Op::Exit | Op::Ret | Op::Trap => Class::Control,
        Op::Ld { space: Space::Param, .. } => Class::Param,
        Op::Ld { space: Space::Global, .. } => Class::GlobalLoad,
        Op::Ld { .. } => Class::SharedLoad,
        Op::St { space: Space::Global, .. } => Class::GlobalStore,
        Op::St { .. } | Op::StAsync { .. } => Class::SharedStore,
        Op::Atom { .. } | Op::Red { .. } => Class::Atomic,
        Op::Shfl(_)
        | Op::Vote(_)
        | Op::Ballot
        | Op::Match(_)
        | Op::Redux { .. }
        | Op::Elect
        | Op::ActiveMask => Class::Warp,
        Op::BarWarpSync
        | Op::BarSync { .. }
        | Op::BarArrive { .. }
        | Op::Membar(_)
        | Op::Fence { .. }
        | Op::FenceProxyAsync(_)
        | Op::FenceMbarrierInit
        | Op::MbarrierInit
        | Op::MbarrierInval
        | Op::MbarrierArrive { .. }
        | Op::MbarrierArriveExpectTx { .. }
        | Op::MbarrierExpectTx { .. }
        | Op::MbarrierTestWait { .. }
        | Op::MbarrierTryWait { .. }
        | Op::CpAsyncCommit
        | Op::CpAsyncWait(_)
        | Op::CpAsyncWaitAll
        | Op::CpAsyncMbarrierArrive { .. }
        | Op::BulkCommit
        | Op::BulkWait { .. }
        | Op::WgmmaFence
        | Op::WgmmaCommit
        | Op::WgmmaWait(_)
        | Op::ClusterArrive { .. }
        | Op::ClusterWait { .. } => Class::Sync,
        Op::CpAsync { .. }
        | Op::BulkLoad { .. }
        | Op::BulkStore { .. }
        | Op::BulkToCluster
        | Op::BulkReduce { .. }
        | Op::BulkReduceCluster { .. }
        | Op::TensorLoad { .. }
        | Op::TensorStore { .. }
        | Op::TensorReduce { .. } => Class::AsyncCopy,
        Op::Ldmatrix { .. } | Op::Stmatrix { .. } => Class::Matrix,
        Op::Mma { .. } | Op::Wgmma(_) => Class::Tensor,
        _ => Class::Other,
    }
}

fn classify_alu(alu: Alu) -> Class {
    let text = alu.line().text;
    let (head, rest) = text.split_once('.').unwrap_or((text, ""));
    match head {
        "mov" | "selp" | "slct" => Class::Move,
        "cvt" => Class::Convert,
        "ex2" | "lg2" | "rcp" | "sqrt" | "rsqrt" | "sin" | "cos" | "tanh" => Class::Function,
        "div" if rest.contains('f') => Class::Function,
        _ if rest.ends_with("pred") => Class::Compare,
        _ if rest.contains("f32") || rest.contains("f16") => Class::Float,
        _ => Class::Integer,
    }
}
