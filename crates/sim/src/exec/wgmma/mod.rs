//! `wgmma`: the tensor cores of a warpgroup, which work on their own once started.
//!
//! The four warps of a warpgroup meet at a `wgmma.mma_async`; the last one starts the product. What it reads in
//! shared memory is checked and recorded then (`operands`), under one operation for each group. Registers that a product
//! uses are marked until the wait (`registers`). In the late mode the accumulators hold NaN until then, and the product is
//! computed (`compute`) at the wait, from what shared memory and the A registers hold at that time.

mod compute;
mod operands;
mod registers;

pub use operands::OperandPages;
pub use registers::WgmmaRegisters;

use std::collections::VecDeque;

use flashcore_ptx::{Op, Wgmma};

use crate::exec::wgmma::registers::Series;
use crate::findings::FindingKind;
use crate::machine::warp::{State, Wait, Warp};
use crate::machine::{Cluster, Outcome};
use crate::memory::descriptor::Descriptor;
use crate::program::{Code, Slot};
use crate::races::clock::Agent;

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
    ) -> Outcome {
        match code.op {
            Op::WgmmaFence => {
                let registers = &mut self.warps[w].wgmma;
                registers.interval += 1;
                registers.touched.clear();
                Outcome::Next
            }
            Op::WgmmaCommit => {
                let (block, group) = (self.warps[w].block, self.warps[w].index as usize / 4);
                let operation = self.blocks[block].warpgroups[group].operation;
                let registers = &mut self.warps[w].wgmma;
                // An empty group counts, too: it is complete when what came before it is.
                let last = registers.open.take().or(registers.groups.back().map(|g| g.0));
                if let (Some(last), Some(operation)) =
                    (last, operation.or(registers.groups.back().map(|g| g.1)))
                {
                    registers.groups.push_back((last, operation));
                }
                Outcome::Next
            }
            Op::WgmmaWait(pending) => {
                self.wgmma_wait(w, mask, usize::from(pending));
                Outcome::Next
            }
            Op::Wgmma(form) => self.wgmma_arrive(w, pc, form, dst, src),
            _ => Outcome::Next,
        }
    }

    /// A warp comes to a product; the last of the four starts it.
    fn wgmma_arrive(&mut self, w: usize, pc: u32, form: Wgmma, dst: &[Slot], src: &[Slot]) -> Outcome {
        let block = self.warps[w].block;
        let (group, place) = (self.warps[w].index as usize / 4, self.warps[w].index % 4);
        let first = self.blocks[block].first_warp + 4 * group;
        if group * 4 + 4 > self.blocks[block].warps {
            let message = "the warp has no complete warpgroup: the block has too few warps".to_string();
            self.report_error(w, 0, pc, FindingKind::WarpgroupSplit, message);
            return Outcome::Next;
        }
        let warpgroup = &mut self.blocks[block].warpgroups[group];
        warpgroup.arrived |= 1 << place;
        if warpgroup.arrived != 0xF {
            self.warps[w].state = State::Waiting(Wait::Warpgroup);
            return Outcome::Retry;
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
        Outcome::Jumped
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
}
