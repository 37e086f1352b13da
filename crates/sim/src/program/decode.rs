//! From a kernel's instructions to a [`Program`]: operands become rows or constants, and plain instructions that follow
//! each other become runs.

use std::collections::{HashMap, HashSet};

use flashcore_ptx::{AccTy, Arg, GridDep, Inst, Kernel, MemBase, MmaShape, Op, RegClass, RegId};

use crate::error::SimError;
use crate::machine::regs::Constants;
use crate::program::assignment::{assigned_before, writes_surely};
use crate::program::class::classify;
use crate::program::flow::Flow;
use crate::program::implemented::implemented;
use crate::program::rows::{lives, share_rows, wgmma_registers};
use crate::program::{Code, DecodedGuard, Exec, NEVER, Program, Run, Slot, Span};
use crate::vectors::alu::{AluInst, SetpInst};
use crate::vectors::mma::{self, Company, MmaInst};

/// Instructions that a kernel may have: what the shadow of shared memory has room to name.
const MAX_BODY: usize = 1 << 21;

/// A kernel on its way to a program.
pub(super) struct Decoder<'k> {
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
    /// Nothing is decoded yet.
    pub(super) fn new(kernel: &'k Kernel) -> Decoder<'k> {
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

    /// Decodes the kernel.
    pub(super) fn run(mut self) -> Result<Program<'k>, SimError> {
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

    /// An earlier list equal to the accumulators that were added last, which are then dropped; or that list itself.
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

    /// Finds the runs of plain instructions. Labels and branches are not plain, so lanes part and meet only between runs.
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
