//! The registers that a `wgmma` in flight uses, which no other instruction may touch until the wait.

use std::collections::VecDeque;

use flashcore_ptx::{AccTy, Wgmma};

use crate::findings::{FindingKind, Raw, RawOther, Severity, THIS_LAUNCH};
use crate::machine::Cluster;
use crate::machine::regs::{Aligned, Row};
use crate::machine::warp::Warp;
use crate::memory::global::POISON;
use crate::program::{Program, Slot, Span};
use crate::races::clock::Agent;

/// What is known of the registers of one warp that `wgmma` uses.
#[derive(Clone, Default)]
pub struct WgmmaRegisters {
    pub(super) rows: Vec<RowUse>,
    /// The rows that a product accumulates into.
    accumulating: Vec<u32>,
    /// The rows that a product reads as A.
    feeding: Vec<u32>,
    /// The values of rows that are set aside: a late product accumulates into them, and somebody has looked at them.
    pub(super) held: Vec<Aligned<Row>>,
    /// What ordinary instructions touched since the last fence while no product was in flight: reads, and writes.
    pub(super) touched: Vec<(Span, Span)>,
    /// Fences executed.
    pub(super) interval: u32,
    /// Products started since the last commit.
    pub(super) open: Option<u64>,
    /// The products that were started last, one after the other.
    pub(super) series: Option<Series>,
    /// The last product of each group that has not been waited for, and its operation.
    pub(super) groups: VecDeque<(u64, (Agent, u32))>,
}

/// How `wgmma` uses one row.
#[derive(Clone, Copy, Default)]
pub(super) struct RowUse {
    /// One more than the product that accumulates into it, or 0.
    accumulates: u64,
    /// One more than the latest product that reads it as A, or 0.
    feeds: u64,
    /// The fence interval in which an ordinary instruction touched it last.
    touched: u32,
    /// Whether its value must not be seen yet, because a late product accumulates into it.
    late: bool,
    /// Whether somebody has looked at it, and its value is set aside.
    pub(super) held: bool,
}

/// How many touches by ordinary instructions are collected before they are noted.
const MAX_TOUCHED: usize = 64;

/// Products with the same accumulators that were started one after the other, with nothing between them that touches their
/// registers. The accumulators were checked before the first of them and need not be checked again.
#[derive(Clone, Copy)]
pub(super) struct Series {
    /// Where the list of the accumulators stands.
    pub(super) accumulators: usize,
    pub(super) n: u16,
    pub(super) acc: AccTy,
    /// The first product, whose number the rows carry.
    pub(super) first: u64,
    /// The last one, whose number they ought to carry.
    pub(super) last: u64,
    /// Whether the accumulators' values must not be seen yet.
    pub(super) late: bool,
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

    /// Notes that an ordinary instruction touches registers. False if a product in flight uses one of them in a way that
    /// forbids it.
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

    /// Notes a touch. False if a product in flight uses one of the registers in a way that forbids it.
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
    pub(super) fn note_touched(&mut self, program: &Program<'_>) {
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

    /// Continues the series, if this product has the same accumulators and its fragments may be read.
    pub(super) fn goes_on(
        &mut self,
        number: u64,
        form: &Wgmma,
        accumulators: &[Slot],
        fragments: &[u32],
    ) -> bool {
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
    pub(super) fn start(&mut self, number: u64, accumulators: &[Slot], fragments: &[u32]) {
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

    /// The values of these accumulators must not be seen until the wait. Few instructions look at them, so they stay in place
    /// until one does.
    pub(super) fn conceal(&mut self, accumulators: &[Slot]) {
        if let Some(series) = &mut self.series
            && std::mem::replace(&mut series.late, true)
        {
            return;
        }
        for slot in accumulators {
            self.rows[slot.word() as usize].late = true;
        }
    }

    /// Somebody looks at a row: a value that must not be seen is set aside.
    #[cold]
    fn hide(&mut self, row: usize, values: &mut [Aligned<Row>]) {
        if self.held.is_empty() {
            self.held.resize(self.rows.len(), Aligned([0; 32]));
        }
        if self.rows[row].late && !std::mem::replace(&mut self.rows[row].held, true) {
            self.held[row] = std::mem::replace(&mut values[row], Aligned([POISON as u32; 32]));
        }
    }

    /// Products up to this one are complete: frees the rows that no later product uses.
    pub(super) fn retire(&mut self, last: u64, values: &mut [Aligned<Row>]) {
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
    pub(super) fn oldest(&self) -> Option<u64> {
        let number = |&row: &u32| match (self.rows[row as usize].accumulates, self.series) {
            (number, Some(Series { first, last, .. })) if number == first + 1 => last + 1,
            (number, _) => number,
        };
        self.accumulating.iter().map(number).min()
    }
}

impl Cluster<'_> {
    /// The registers of a product must be fenced, and not in use by a product of another shape. Whether all is well.
    pub(super) fn check_wgmma_start(
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

    /// Reports a register that a product uses and that the instruction may not touch; the instruction reads NaN there.
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
            if !self.tally.findings.again(FindingKind::WgmmaRegister, pc, (THIS_LAUNCH, by)) {
                let raw = Raw {
                    kind: FindingKind::WgmmaRegister,
                    severity: Severity::Error,
                    pc,
                    thread: self.thread(w, mask.trailing_zeros()),
                    message: format!("the {what} of a wgmma is {did} before the wait"),
                    place: None,
                    other: Some(RawOther::own(
                        by,
                        "the warpgroup's wgmma".to_string(),
                        what == "accumulator",
                    )),
                    missing: Some("wgmma.wait_group for the group of that wgmma".to_string()),
                };
                self.tally.findings.add(raw);
            }
        }
    }
}
