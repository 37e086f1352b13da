//! `wgmma`: the tensor cores of a warpgroup, which work on their own once started.
//!
//! The four warps of a warpgroup meet at a `wgmma.mma_async`; the last one starts the product. What it reads in
//! shared memory is checked and recorded then, under one operation for each group. Registers that a product uses
//! are marked until the wait: late, the accumulators hold NaN until then, and the product is computed at the wait
//! from what shared memory and the A registers hold at that time.

use std::collections::VecDeque;
use std::ops::Range;

use flashcore_ptx::{AccTy, MatrixTy, Op, Wgmma};

use crate::findings::{FindingKind, Severity};
use crate::machine::regs::{Aligned, Row};
use crate::machine::warp::{State, Wait, Warp};
use crate::machine::{Cluster, Step};
use crate::memory::descriptor::Descriptor;
use crate::memory::global::POISON;
use crate::memory::shared::SharedMemory;
use crate::program::decode::{Code, Program, Slot, Span};
use crate::races::clock::{Agent, Edge, Lanes, Proxy, Stamp};
use crate::races::shared_shadow::{Access, CELL, Conflict, PAGE, PAGE_BYTES};
use crate::vectors::mma::{self, ATile, BTile};
use crate::vectors::{self, Level};

/// What is known of the registers of one warp that `wgmma` uses.
#[derive(Clone, Default)]
pub struct WgmmaRegisters {
    rows: Vec<RowUse>,
    /// The rows that a product accumulates into.
    accumulating: Vec<u32>,
    /// The rows that a product reads as A.
    feeding: Vec<u32>,
    /// What rows hold where nobody sees it, while a late product accumulates into them and somebody looks.
    held: Vec<Aligned<Row>>,
    /// What ordinary instructions touched since the last fence while no product was under way: reads, and writes.
    touched: Vec<(Span, Span)>,
    /// Fences executed.
    interval: u32,
    /// Products started since the last commit.
    open: Option<u64>,
    /// The products that were started last, one after the other.
    series: Option<Series>,
    /// The last product of each group that has not been waited for, and its operation.
    groups: VecDeque<(u64, (Agent, u32))>,
}

/// How `wgmma` uses one row.
#[derive(Clone, Copy, Default)]
struct RowUse {
    /// One more than the product that accumulates into it, or 0.
    accumulates: u64,
    /// One more than the latest product that reads it as A, or 0.
    feeds: u64,
    /// The fence interval in which an ordinary instruction touched it last.
    touched: u32,
    /// Whether what it holds is not to be seen, because a late product accumulates into it.
    late: bool,
    /// Whether somebody has looked, and its value is out of sight.
    held: bool,
}

/// What ordinary instructions touched is noted later, up to so much of it.
const MAX_TOUCHED: usize = 64;

/// Products with the same accumulators, between whose starts nothing has happened that concerns a register of theirs: what
/// was asked of the accumulators before the first need not be asked again.
#[derive(Clone, Copy)]
struct Series {
    /// Where the list of the accumulators stands.
    accumulators: usize,
    n: u16,
    acc: AccTy,
    /// The first product, whose number the rows carry.
    first: u64,
    /// The last one, whose number they ought to carry.
    last: u64,
    /// Whether what the accumulators hold is not to be seen.
    late: bool,
}

impl WgmmaRegisters {
    /// No register is used yet.
    pub fn new(rows: usize) -> WgmmaRegisters {
        WgmmaRegisters { rows: vec![RowUse::default(); rows], ..WgmmaRegisters::default() }
    }

    /// No register is used yet, in the memory of those of a warp that has ended.
    pub fn renewed(self) -> WgmmaRegisters {
        let mut rows = self.rows;
        rows.fill(RowUse::default());
        WgmmaRegisters { rows, ..WgmmaRegisters::default() }
    }

    /// Notes that an ordinary instruction touches registers. False if a product under way uses one of them so that
    /// it may not.
    #[inline(always)]
    pub fn touch(&mut self, program: &Program<'_>, (reads, writes): (Span, Span)) -> bool {
        if reads.is_empty() && writes.is_empty() {
            return true;
        }
        if self.accumulating.is_empty() && self.feeding.is_empty() && self.touched.len() < MAX_TOUCHED {
            self.touched.push((reads, writes));
            return true;
        }
        self.end_series();
        self.note_touched(program);
        self.note_touch(program, (reads, writes))
    }

    /// Notes a touch. False if a product under way uses one of the registers so that it may not be.
    fn note_touch(&mut self, program: &Program<'_>, (reads, writes): (Span, Span)) -> bool {
        let now = self.interval + 1;
        let mut allowed = true;
        for slot in program.pool(reads) {
            let row = &mut self.rows[slot.word() as usize];
            row.touched = now;
            allowed &= row.accumulates == 0;
        }
        for slot in program.pool(writes) {
            let row = &mut self.rows[slot.word() as usize];
            row.touched = now;
            allowed &= row.accumulates | row.feeds == 0;
        }
        allowed
    }

    /// Notes what was touched since the last fence.
    fn note_touched(&mut self, program: &Program<'_>) {
        let mut touched = std::mem::take(&mut self.touched);
        for touch in touched.drain(..) {
            self.note_touch(program, touch);
        }
        self.touched = touched;
    }

    /// Something has happened that may concern the registers of the last products.
    #[inline]
    pub fn end_series(&mut self) {
        if let Some(Series { first, last, .. }) = self.series.take() {
            for &row in &self.accumulating {
                let number = &mut self.rows[row as usize].accumulates;
                *number = if *number == first + 1 { last + 1 } else { *number };
            }
        }
    }

    /// Goes on with the last products, if this one has the same accumulators and its fragments may be read.
    fn goes_on(&mut self, number: u64, form: &Wgmma, accumulators: &[Slot], fragments: &[u32]) -> bool {
        let now = self.interval + 1;
        let rows = &mut self.rows;
        let fit = |row: &u32| rows[*row as usize].touched != now && rows[*row as usize].accumulates == 0;
        match &mut self.series {
            Some(series)
                if series.accumulators == accumulators.as_ptr().addr()
                    && (series.n, series.acc) == (form.n, form.acc)
                    && fragments.iter().all(fit) =>
            {
                series.last = number;
            }
            _ => return false,
        }
        for &row in fragments {
            if std::mem::replace(&mut rows[row as usize].feeds, number + 1) == 0 {
                self.feeding.push(row);
            }
        }
        self.open = Some(number);
        true
    }

    /// A product uses these rows from now on.
    fn start(&mut self, number: u64, accumulators: &[Slot], fragments: &[u32]) {
        for slot in accumulators {
            let row = slot.word();
            if std::mem::replace(&mut self.rows[row as usize].accumulates, number + 1) == 0 {
                self.accumulating.push(row);
            }
        }
        for &row in fragments {
            if std::mem::replace(&mut self.rows[row as usize].feeds, number + 1) == 0 {
                self.feeding.push(row);
            }
        }
        self.open = Some(number);
    }

    /// What these accumulators hold is not to be seen until the wait. Few look, so it stays where it is until then.
    fn conceal(&mut self, accumulators: &[Slot]) {
        if let Some(series) = &mut self.series
            && std::mem::replace(&mut series.late, true)
        {
            return;
        }
        for slot in accumulators {
            self.rows[slot.word() as usize].late = true;
        }
    }

    /// Somebody looks at a row: what is not to be seen is put out of sight.
    #[cold]
    fn hide(&mut self, row: usize, values: &mut [Aligned<Row>]) {
        if self.held.is_empty() {
            self.held.resize(self.rows.len(), Aligned([0; 32]));
        }
        if self.rows[row].late && !std::mem::replace(&mut self.rows[row].held, true) {
            self.held[row] = std::mem::replace(&mut values[row], Aligned([POISON as u32; 32]));
        }
    }

    /// Products up to this one are complete: gives back the rows whose last product is among those.
    fn retire(&mut self, last: u64, values: &mut [Aligned<Row>]) {
        self.end_series();
        let WgmmaRegisters { rows, accumulating, feeding, held, .. } = self;
        feeding.retain(|&row| {
            let number = &mut rows[row as usize].feeds;
            let done = *number <= last + 1;
            *number = if done { 0 } else { *number };
            !done
        });
        accumulating.retain(|&row| {
            let of = &mut rows[row as usize];
            let done = of.accumulates <= last + 1;
            if done {
                of.accumulates = 0;
                of.late = false;
                if std::mem::take(&mut of.held) {
                    values[row as usize] = held[row as usize];
                }
            }
            !done
        });
    }

    /// One more than the oldest product that accumulates into a row, if there is one.
    fn oldest(&self) -> Option<u64> {
        let number = |&row: &u32| match (self.rows[row as usize].accumulates, self.series) {
            (number, Some(Series { first, last, .. })) if number == first + 1 => last + 1,
            (number, _) => number,
        };
        self.accumulating.iter().map(number).min()
    }
}

/// A product that has been started.
#[derive(Clone, Copy, Debug)]
struct Product {
    /// Its number in the warpgroup, from 0.
    number: u64,
    pc: u32,
    form: Wgmma,
    a: ASource,
    b: Descriptor,
    scale_d: bool,
    done: bool,
}

#[derive(Clone, Copy, Debug)]
enum ASource {
    Shared(Descriptor),
    Rows([u32; 4]),
}

/// The products of a warpgroup.
#[derive(Default)]
pub struct Warpgroup {
    /// The warps, by their place in the group, that have come to the next product.
    arrived: u8,
    products: VecDeque<Product>,
    started: u64,
    /// The operation that products since the last commit belong to.
    operation: Option<(Agent, u32)>,
}

impl Cluster<'_> {
    /// `wgmma` instructions; all lanes of the warp execute them.
    pub fn warpgroup(
        &mut self,
        w: usize,
        pc: u32,
        code: &Code,
        mask: u32,
        dst: &[Slot],
        src: &[Slot],
    ) -> Step {
        match code.op {
            Op::WgmmaFence => {
                let registers = &mut self.warps[w].wgmma;
                registers.interval += 1;
                registers.touched.clear();
                Step::Next
            }
            Op::WgmmaCommit => {
                let (block, group) = (self.warps[w].block, self.warps[w].index as usize / 4);
                let operation = self.blocks[block].warpgroups[group].operation;
                let registers = &mut self.warps[w].wgmma;
                // An empty group counts as one, too; it is complete with what came before it.
                let last = registers.open.take().or(registers.groups.back().map(|g| g.0));
                if let (Some(last), Some(operation)) =
                    (last, operation.or(registers.groups.back().map(|g| g.1)))
                {
                    registers.groups.push_back((last, operation));
                }
                Step::Next
            }
            Op::WgmmaWait(pending) => {
                self.wgmma_wait(w, mask, usize::from(pending));
                Step::Next
            }
            Op::Wgmma(form) => self.wgmma_arrive(w, pc, form, dst, src),
            _ => Step::Next,
        }
    }

    /// A warp comes to a product; the last of the four starts it.
    fn wgmma_arrive(&mut self, w: usize, pc: u32, form: Wgmma, dst: &[Slot], src: &[Slot]) -> Step {
        let block = self.warps[w].block;
        let (group, place) = (self.warps[w].index as usize / 4, self.warps[w].index % 4);
        let first = self.blocks[block].first_warp + 4 * group;
        if group * 4 + 4 > self.blocks[block].warps {
            let message = "the warp has no complete warpgroup: the block has too few warps".to_string();
            self.report_error(w, 0, pc, FindingKind::WarpgroupSplit, message);
            return Step::Next;
        }
        let warpgroup = &mut self.blocks[block].warpgroups[group];
        warpgroup.arrived |= 1 << place;
        if warpgroup.arrived != 0xF {
            self.warps[w].state = State::Waiting(Wait::Warpgroup);
            return Step::Retry;
        }
        warpgroup.arrived = 0;
        if let Some(other) = (first..first + 4).find(|&other| self.warps[other].pc != pc) {
            let (at, theirs) = (self.warps[w].index, self.warps[other].index);
            let message = format!(
                "warp {at} is at #{pc} and warp {theirs} at #{}: warps of a warpgroup must execute the same wgmma",
                self.warps[other].pc
            );
            self.report_error(w, 0, pc, FindingKind::WarpgroupSplit, message);
        }
        self.wgmma_start(first, pc, form, dst, src);
        for other in first..first + 4 {
            self.warps[other].pc = pc + 1;
            if self.warps[other].state == State::Waiting(Wait::Warpgroup) {
                self.warps[other].state = State::Ready;
            }
        }
        self.progress += 1;
        Step::Jumped
    }

    fn wgmma_start(&mut self, first: usize, pc: u32, form: Wgmma, dst: &[Slot], src: &[Slot]) {
        let block = self.warps[first].block;
        let group = self.warps[first].index as usize / 4;
        let a_count = if form.a_in_regs { 4 } else { 1 };
        let Some(b) = self.descriptor(first, pc, src[a_count]) else { return };
        let a = if form.a_in_regs {
            ASource::Rows(std::array::from_fn(|i| src[i].word()))
        } else {
            match self.descriptor(first, pc, src[0]) {
                Some(descriptor) => ASource::Shared(descriptor),
                None => return,
            }
        };
        let scale = src[a_count + 1].pred();
        let votes: [u32; 4] = std::array::from_fn(|i| self.warps[first + i].regs.pred[scale as usize]);
        if votes.iter().any(|&v| v != votes[0] || (v != 0 && v != u32::MAX)) {
            let message = "scale-d is not the same in all threads of the warpgroup".to_string();
            self.report_error(first, 0, pc, FindingKind::WarpgroupSplit, message);
        }
        let scale_d = votes[0] != 0;
        let number = self.blocks[block].warpgroups[group].started;
        self.blocks[block].warpgroups[group].started += 1;
        let fragments: &[u32] = match &a {
            ASource::Rows(rows) => rows,
            ASource::Shared(_) => &[],
        };
        for w in first..first + 4 {
            self.warps[w].wgmma.note_touched(self.launch.program);
            if self.warps[w].wgmma.goes_on(number, &form, dst, fragments) {
                continue;
            }
            self.warps[w].wgmma.end_series();
            let fine = self.check_wgmma_start(w, pc, &form, scale_d, dst, fragments);
            let warp = &mut self.warps[w];
            warp.wgmma.start(number, dst, fragments);
            warp.wgmma.series = fine.then_some(Series {
                accumulators: dst.as_ptr().addr(),
                n: form.n,
                acc: form.acc,
                first: number,
                last: number,
                late: false,
            });
            for slot in dst {
                warp.regs.init32[slot.word() as usize] = u32::MAX;
            }
        }
        let clocks = |i: usize| &self.warps[first + i].clocks;
        self.together.meet([clocks(0), clocks(1), clocks(2), clocks(3)]);
        let operation = match self.blocks[block].warpgroups[group].operation {
            // Products since the last commit of the first warp are one operation.
            Some(operation) if self.warps[first].wgmma.groups.back().is_none_or(|g| g.1 != operation) => {
                operation
            }
            _ => {
                let operation = self.agents.start(first, u32::MAX, &self.together);
                self.blocks[block].warpgroups[group].operation = Some(operation);
                operation
            }
        };
        if !self.record_operands(first, pc, &form, &a, &b, operation) {
            return;
        }
        let mut product = Product { number, pc, form, a, b, scale_d, done: false };
        if self.happens_now() && self.blocks[block].warpgroups[group].products.iter().all(|p| p.done) {
            self.compute(first, &product);
            product.done = true;
        } else {
            for w in first..first + 4 {
                self.warps[w].wgmma.conceal(dst);
            }
        }
        self.blocks[block].warpgroups[group].products.push_back(product);
    }

    /// The descriptor in a register, which must be the same in all threads of the warpgroup.
    fn descriptor(&mut self, first: usize, pc: u32, slot: Slot) -> Option<Descriptor> {
        let value = self.row64(first, slot)[0];
        if (first..first + 4).any(|w| self.row64(w, slot).iter().any(|&v| v != value)) {
            let message = "a matrix descriptor is not the same in all threads of the warpgroup".to_string();
            self.report_error(first, 0, pc, FindingKind::BadDescriptor, message);
        }
        match Descriptor::decode(value) {
            Ok(descriptor) => Some(descriptor),
            Err(why) => {
                self.unsupported(pc, &why);
                None
            }
        }
    }

    /// The registers of a product must be fenced, and not in use by a product of another shape. Whether all is well.
    fn check_wgmma_start(
        &mut self,
        w: usize,
        pc: u32,
        form: &Wgmma,
        scale_d: bool,
        accumulators: &[Slot],
        fragments: &[u32],
    ) -> bool {
        let accumulators = || accumulators.iter().map(|slot| slot.word() as usize);
        let registers = &self.warps[w].wgmma;
        let now = registers.interval + 1;
        let unfenced = accumulators()
            .chain(fragments.iter().map(|&row| row as usize))
            .any(|row| registers.rows[row].touched == now);
        let in_flight = fragments.iter().any(|&row| registers.rows[row as usize].accumulates != 0);
        let (block, group) = (self.warps[w].block, self.warps[w].index as usize / 4);
        let products = &self.blocks[block].warpgroups[group].products;
        let mut last = 0;
        let other_shape = accumulators().any(|row| {
            // Rows of one accumulator mostly have one product in common.
            let number = registers.rows[row].accumulates;
            let again = std::mem::replace(&mut last, number) == number;
            !again
                && products
                    .iter()
                    .any(|p| p.number + 1 == number && (p.form.n != form.n || p.form.acc != form.acc))
        });
        let unwritten = scale_d
            && accumulators().any(|row| {
                let live = self.warps[w].live;
                self.warps[w].regs.init32[row] & live != live
            });
        let unfenced = unfenced || registers.interval == 0;
        if registers.interval == 0 {
            let message = "there is no wgmma.fence before the first wgmma".to_string();
            self.report_error(w, 0, pc, FindingKind::MissingWgmmaFence, message);
        } else if unfenced {
            let message = "an accumulator or A register was touched after the last wgmma.fence".to_string();
            self.report_error(w, 0, pc, FindingKind::MissingWgmmaFence, message);
        } else if other_shape {
            let message = "an accumulator is still in use by a wgmma of another shape".to_string();
            self.report_error(w, 0, pc, FindingKind::MissingWgmmaFence, message);
        }
        if in_flight {
            let message =
                "an A register is the accumulator of a wgmma that has not been waited for".to_string();
            self.report_error(w, 0, pc, FindingKind::WgmmaRegister, message);
            let Warp { wgmma, regs, .. } = &mut self.warps[w];
            for &row in fragments {
                wgmma.hide(row as usize, &mut regs.r32);
            }
        }
        if unwritten {
            let message = "an accumulator that is added to holds no value".to_string();
            self.report_error(w, 0, pc, FindingKind::UninitialisedRegister, message);
        }
        !(unfenced || other_shape || in_flight || unwritten)
    }

    /// An ordinary instruction touches registers that `wgmma` uses.
    pub fn check_wgmma_registers(&mut self, w: usize, pc: u32, mask: u32) {
        let program = self.launch.program;
        let code = &program.code[pc as usize];
        if mask != 0 && !self.warps[w].wgmma.touch(program, program.wgmma_of(code)) {
            self.report_wgmma_register(w, pc, mask);
        }
    }

    /// Reports a register that a product uses and that the instruction may not touch, and lets it see no value there.
    #[cold]
    pub fn report_wgmma_register(&mut self, w: usize, pc: u32, mask: u32) {
        let program = self.launch.program;
        let code = &program.code[pc as usize];
        let Warp { wgmma, regs, .. } = &mut self.warps[w];
        let (reads, writes) = program.wgmma_of(code);
        let mut fault = None;
        for (slots, writes) in [(reads, false), (writes, true)] {
            for slot in program.pool(slots) {
                wgmma.hide(slot.word() as usize, &mut regs.r32);
                let row = wgmma.rows[slot.word() as usize];
                if row.accumulates != 0 {
                    fault = Some((if writes { "written" } else { "read" }, "accumulator", row.accumulates));
                } else if writes && row.feeds != 0 {
                    fault = Some(("written", "A register", row.feeds));
                }
            }
        }
        if let Some((did, what, number)) = fault {
            let (block, group) = (self.warps[w].block, self.warps[w].index as usize / 4);
            let products = &self.blocks[block].warpgroups[group].products;
            let by = products.iter().find(|p| p.number + 1 == number).map_or(pc, |p| p.pc);
            if !self.tally.findings.again(FindingKind::WgmmaRegister, pc, by) {
                let raw = crate::findings::Raw {
                    kind: FindingKind::WgmmaRegister,
                    severity: Severity::Error,
                    pc,
                    thread: self.thread(w, mask.trailing_zeros()),
                    message: format!("the {what} of a wgmma is {did} before the wait"),
                    place: None,
                    other: Some((by, "the warpgroup's wgmma".to_string(), what == "accumulator")),
                    missing: Some("wgmma.wait_group for the group of that wgmma".to_string()),
                };
                self.tally.findings.add(raw);
            }
        }
    }

    /// Waits until at most so many groups of the warp are open.
    fn wgmma_wait(&mut self, w: usize, mask: u32, pending: usize) {
        while self.warps[w].wgmma.groups.len() > pending {
            let Some((last, (agent, clock))) = self.warps[w].wgmma.groups.pop_front() else { return };
            let warp = &mut self.warps[w];
            warp.clocks.acquire_completion(mask, warp.live, agent, clock);
            self.retire_products(w, last);
        }
    }

    /// Products up to this one are complete, as far as this warp is concerned.
    fn retire_products(&mut self, w: usize, last: u64) {
        let (block, group) = (self.warps[w].block, self.warps[w].index as usize / 4);
        let first = self.blocks[block].first_warp + 4 * group;
        loop {
            let products = &mut self.blocks[block].warpgroups[group].products;
            let Some(product) = products.iter_mut().find(|p| !p.done && p.number <= last) else { break };
            product.done = true;
            let product = *product;
            self.compute(first, &product);
        }
        let Warp { wgmma, regs, .. } = &mut self.warps[w];
        wgmma.retire(last, &mut regs.r32);
        // Products that all four warps have waited for are forgotten.
        let waited = (first..first + 4)
            .map(|other| self.warps[other].wgmma.oldest().map_or(u64::MAX, |n| n - 1))
            .min()
            .unwrap_or(u64::MAX);
        self.blocks[block].warpgroups[group].products.retain(|p| !p.done || p.number >= waited);
    }

    /// A warp has ended: its products must have been waited for.
    pub fn end_wgmma(&mut self, w: usize) {
        let registers = &self.warps[w].wgmma;
        if registers.open.is_none() && registers.groups.is_empty() {
            return;
        }
        let (block, group) = (self.warps[w].block, self.warps[w].index as usize / 4);
        let pc = self.blocks[block].warpgroups[group].products.front().map_or(0, |p| p.pc);
        let message =
            "the warp ends before its wgmma have completed: wgmma.wait_group is missing".to_string();
        self.report_error(w, 0, pc, FindingKind::PendingAtExit, message);
    }

    /// Checks and records what a product reads in shared memory. False where it is not possible.
    fn record_operands(
        &mut self,
        first: usize,
        pc: u32,
        form: &Wgmma,
        a: &ASource,
        b: &Descriptor,
        (agent, clock): (Agent, u32),
    ) -> bool {
        let block = self.warps[first].block;
        let mut faults = OperandFaults::default();
        let checks = self.launch.config.checks.shared;
        let stamp = Stamp { clock, agent, lanes: Lanes::ALL };
        if let ASource::Shared(descriptor) = a {
            // Each warp reads sixteen rows of A of its own.
            for warp in 0..4 {
                let clocks = &self.warps[first + warp].clocks;
                let access = Access { clocks, proxy: Proxy::Async, stamp, lanes: Lanes::ALL, pc };
                let shared = &mut self.blocks[block].shared;
                let rows = 16 * warp as u32..16 * warp as u32 + 16;
                let (pages, first) = (&mut self.operand_pages, descriptor.start / PAGE_BYTES);
                let pages = pages.of(descriptor, form.trans_a, form.a, rows.clone());
                if !(checks && read_pages(shared, first, pages, &access)) {
                    for_chunks(descriptor, form.trans_a, form.a, rows, |address| {
                        faults.visit(shared, address, checks, &access);
                    });
                }
            }
        }
        let access = Access { clocks: &self.together, proxy: Proxy::Async, stamp, lanes: Lanes::ALL, pc };
        let shared = &mut self.blocks[block].shared;
        let rows = 0..u32::from(form.n);
        let pages = self.operand_pages.of(b, form.trans_b, form.b, rows.clone());
        if !(checks && read_pages(shared, b.start / PAGE_BYTES, pages, &access)) {
            for_chunks(b, form.trans_b, form.b, rows, |address| {
                faults.visit(shared, address, checks, &access);
            });
        }
        if let Some(mut found) = faults.conflict {
            // A write of the warpgroup itself that its own warp has not fenced lacks the fence first of all.
            let writer = usize::from(found.prior.agent);
            if (first..first + 4).contains(&writer)
                && self.warps[writer].clocks.edge(found.prior, Lanes::ALL, Proxy::Async) != Edge::Ordered
            {
                found.edge = Edge::MissingProxyFence;
            }
            self.report_conflict(first, 0, pc, block, false, found);
        }
        for (fault, kind, what) in [
            (
                faults.outside,
                FindingKind::OutOfBounds,
                "a matrix chunk outside of the allocations of shared memory",
            ),
            (
                faults.uninitialised,
                FindingKind::UninitialisedShared,
                "a matrix in shared memory that nothing was written to",
            ),
            (faults.barrier, FindingKind::MbarrierMisuse, "a matrix over an mbarrier in use"),
        ] {
            if let Some(address) = fault {
                self.report(first, 0, pc, kind, Severity::Error, |c| {
                    (what.to_string(), Some(c.shared_place(block, address)))
                });
            }
        }
        faults.outside.is_none()
    }

    /// Computes a product into the accumulators of the four warps.
    fn compute(&mut self, first: usize, product: &Product) {
        let level = self.launch.level;
        let form = &product.form;
        let shared = &self.blocks[self.warps[first].block].shared;
        let tiles = &mut *self.tiles;
        let columns = u32::from(form.n);
        read_operand(level, shared, &product.b, form.trans_b, form.b, columns, &mut tiles.b_rows);
        if form.negate_b {
            tiles.b_rows.iter_mut().for_each(|fragment| negate(form.b, fragment));
        }
        tiles.b_columns.resize(usize::from(form.n) / 8, [[0.0; 16]; 16]);
        for (tile, rows) in tiles.b_columns.iter_mut().zip(tiles.b_rows.as_chunks::<2>().0) {
            vectors::read_b(level, form.b, &[&*rows[0], &*rows[1]], tile);
        }
        if let ASource::Shared(descriptor) = &product.a {
            read_operand(level, shared, descriptor, form.trans_a, form.a, 64, &mut tiles.a_rows);
        }
        let program = self.launch.program;
        let accumulators = program.dst(&program.code[product.pc as usize]);
        for (place, warp) in self.warps[first..first + 4].iter_mut().enumerate() {
            let mut a: [Row; 4] = match &product.a {
                // Read as B is, two fragments for eight rows; as A, fragments go down the rows first.
                ASource::Shared(_) => [0, 2, 1, 3].map(|i| *tiles.a_rows[4 * place + i]),
                ASource::Rows(fragment) => fragment.map(|row| *warp.regs.r32[row as usize]),
            };
            if form.negate_a {
                for fragment in &mut a {
                    negate(form.a, fragment);
                }
            }
            let wide = &mut tiles.a[0];
            if !wide.is_of(form.a, &a.each_ref()) {
                vectors::read_a(level, form.a, &a.each_ref(), &mut wide.tile);
            }
            if !product.scale_d {
                for &slot in accumulators {
                    *accumulator(warp, slot) = [0; 32];
                }
            }
            let (a, depth) = (&wide.tile, usize::from(form.k()));
            if form.acc == AccTy::F32 {
                for (tiles, slots) in tiles.b_columns.chunks(2).zip(accumulators.chunks(8)) {
                    multiply_columns(level, depth, a, tiles, warp, slots);
                }
            } else {
                for (tile, slots) in tiles.b_columns.iter().zip(accumulators.chunks_exact(2)) {
                    let [low, high] = [0, 1].map(|i| *accumulator(warp, slots[i]));
                    let mut acc = mma::unpack_f16([&low, &high]);
                    vectors::multiply(level, depth, a, tile, acc.each_mut());
                    let sums = mma::pack_f16(&acc);
                    slots.iter().zip(&sums).for_each(|(&slot, sum)| *accumulator(warp, slot) = *sum);
                }
            }
        }
    }
}

/// The first fault of each kind that the operands of a product show.
#[derive(Default)]
struct OperandFaults {
    conflict: Option<Conflict>,
    outside: Option<u32>,
    uninitialised: Option<u32>,
    barrier: Option<u32>,
}

impl OperandFaults {
    #[inline]
    fn visit(&mut self, shared: &mut SharedMemory, address: u32, checks: bool, access: &Access<'_>) {
        if address.saturating_add(CELL) > shared.dense() && !shared.contains(address, CELL) {
            self.outside.get_or_insert(address);
            return;
        }
        if !checks {
            return;
        }
        let cell = address / CELL;
        if !shared.is_plain(cell) {
            if shared.is_barrier(cell, 0xFFFF) {
                self.barrier.get_or_insert(address);
            }
            if !shared.initialised(cell, 0xFFFF) {
                self.uninitialised.get_or_insert(address);
            }
        }
        if let Some(found) = shared.shadow.read(cell, 0xFFFF, access) {
            self.conflict.get_or_insert(found);
        }
    }
}

/// Which cells of which pages an operand takes, by its layout and where it begins in a page: products of a loop repeat few.
#[derive(Default)]
pub struct OperandPages {
    known: Vec<(Layout, Vec<(u32, u64)>)>,
}

/// What the cells of an operand depend on, but for the page that it begins in.
#[derive(PartialEq)]
struct Layout {
    /// Begins in the first page.
    descriptor: Descriptor,
    mn_major: bool,
    ty: MatrixTy,
    rows: Range<u32>,
}

/// Layouts that are remembered.
const MAX_LAYOUTS: usize = 64;

impl OperandPages {
    /// The pages of these rows of an operand, counted from the one that it begins in, and their cells, one bit a cell.
    fn of(
        &mut self,
        descriptor: &Descriptor,
        mn_major: bool,
        ty: MatrixTy,
        rows: Range<u32>,
    ) -> &[(u32, u64)] {
        let descriptor = Descriptor { start: descriptor.start % PAGE_BYTES, ..*descriptor };
        let layout = Layout { descriptor, mn_major, ty, rows };
        let known = self.known.iter().position(|(of, _)| *of == layout);
        let place = known.unwrap_or_else(|| {
            let mut pages: Vec<(u32, u64)> = Vec::new();
            for_chunks(&layout.descriptor, mn_major, ty, layout.rows.clone(), |address| {
                let (page, cell) = (address / PAGE_BYTES, 1 << (address / CELL % PAGE as u32));
                match pages.iter_mut().rev().find(|(of, _)| *of == page) {
                    Some((_, cells)) => *cells |= cell,
                    None => pages.push((page, cell)),
                }
            });
            if self.known.len() == MAX_LAYOUTS {
                self.known.clear();
            }
            self.known.push((layout, pages));
            self.known.len() - 1
        });
        &self.known[place].1
    }
}

/// Records the read of an operand whose cells are these, from the page on that it begins in, if all of it lies in pages that
/// are kept as one, hold values, and were written before it. False where there is more to look at.
fn read_pages(shared: &mut SharedMemory, first: u32, pages: &[(u32, u64)], access: &Access<'_>) -> bool {
    let ordered = pages.iter().all(|&(page, _)| {
        let page = first + page;
        (page + 1) * PAGE_BYTES <= shared.dense()
            && shared.is_plain_page(page)
            && shared.shadow.is_readable(page, access)
    });
    if ordered {
        for &(page, cells) in pages {
            shared.shadow.read_page(first + page, cells, access);
        }
    }
    ordered
}

/// Calls `f` with the address of every 16-byte chunk of these rows of an operand.
fn for_chunks(
    descriptor: &Descriptor,
    mn_major: bool,
    ty: MatrixTy,
    rows: Range<u32>,
    mut f: impl FnMut(u32),
) {
    if mn_major {
        let per_chunk = 128 / ty.bits();
        for chunk in rows.start / per_chunk..rows.end / per_chunk {
            for k in 0..256 / ty.bits() {
                f(descriptor.mn_major(chunk, k));
            }
        }
    } else {
        for row in rows {
            for chunk in 0..2 {
                f(descriptor.k_major(row, chunk));
            }
        }
    }
}

/// Reads an operand in shared memory as fragments: for eight rows each, one for the first half of k and one for the
/// second.
fn read_operand(
    level: Level,
    shared: &SharedMemory,
    descriptor: &Descriptor,
    mn_major: bool,
    ty: MatrixTy,
    rows: u32,
    fragments: &mut Vec<Aligned<Row>>,
) {
    // A chunk along the rows has 16-bit elements of one k: eight of them are the matrix turned around.
    debug_assert!(!mn_major || ty.bits() == 16);
    fragments.resize(rows as usize / 4, Aligned([0; 32]));
    for (four, fragments) in fragments.chunks_mut(4).enumerate() {
        let mut addresses: Row = [0; 32];
        for (l, address) in (0..).zip(&mut addresses[..8 * fragments.len()]) {
            let (eight, half, i) = (2 * four as u32 + l / 16, l / 8 % 2, l % 8);
            *address = if mn_major {
                descriptor.mn_major(eight, 8 * half + i)
            } else {
                descriptor.k_major(8 * eight + i, half)
            };
        }
        let to = &[0, 1, 2, 3][..fragments.len()];
        vectors::load_matrices(level, shared.bytes(), &addresses, mn_major, to, fragments);
    }
}

/// Changes the sign of every element.
fn negate(ty: MatrixTy, fragment: &mut Row) {
    let signs = if ty.bits() == 16 { 0x8000_8000 } else { 0x8080_8080 };
    for word in fragment {
        *word ^= signs;
    }
}

/// Where an accumulator is: out of sight while a late product is under way.
fn accumulator(warp: &mut Warp, slot: Slot) -> &mut Row {
    let row = slot.word() as usize;
    if warp.wgmma.rows[row].held { &mut warp.wgmma.held[row] } else { &mut warp.regs.r32[row] }
}

/// Multiplies by one or two tiles of columns into as many times four accumulators, where they are: two at once if all are
/// in one place.
fn multiply_columns(level: Level, depth: usize, a: &ATile, tiles: &[BTile], warp: &mut Warp, slots: &[Slot]) {
    if let ([first, second], Ok(rows)) = (tiles, <&[Slot; 8]>::try_from(slots)) {
        let rows = rows.map(Slot::word);
        let held = warp.wgmma.rows[rows[0] as usize].held;
        if rows.iter().all(|&row| warp.wgmma.rows[row as usize].held == held) {
            let file = if held { &mut warp.wgmma.held } else { &mut warp.regs.r32 };
            let [a0, a1, a2, a3, b0, b1, b2, b3] = rows;
            let sums = [[a0, a1, a2, a3], [b0, b1, b2, b3]];
            return vectors::multiply_two(level, depth, a, [first, second], file, sums, sums);
        }
    }
    for (tile, slots) in tiles.iter().zip(slots.chunks_exact(4)) {
        let mut values: [Row; 4] = std::array::from_fn(|i| *accumulator(warp, slots[i]));
        vectors::multiply(level, depth, a, tile, values.each_mut());
        slots.iter().zip(values).for_each(|(&slot, value)| *accumulator(warp, slot) = value);
    }
}
