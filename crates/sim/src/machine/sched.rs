//! Which warp runs when, and what is reported when none can.

use std::sync::atomic::Ordering::Relaxed;

use flashcore_ptx::Op;

use crate::config::AsyncMode;
use crate::findings::{FindingKind, Severity};
use crate::machine::warp::{State, Wait};
use crate::machine::{Cluster, Outcome, Tally};
use crate::program::Slot;
use crate::vectors::{self, Pause};

/// Warp instructions between two polls of [`Config::stop`](crate::Config::stop): some milliseconds of them.
const ASK_AFTER: u64 = 1 << 13;

/// How a slice of a cluster's work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    /// All warps have ended, or cannot go on.
    Finished,
    /// The slice was used up.
    Unfinished,
}

impl Cluster<'_> {
    /// Runs up to `instructions` warp instructions, counting into `tally`.
    pub fn run(&mut self, instructions: u64, tally: &mut Tally) -> Slice {
        std::mem::swap(&mut self.tally, tally);
        self.slice = instructions;
        let end = self.run_slice();
        self.launch.executed.fetch_add(instructions - self.slice, Relaxed);
        std::mem::swap(&mut self.tally, tally);
        end
    }

    fn run_slice(&mut self) -> Slice {
        let mut ready: Vec<usize> = Vec::with_capacity(self.warps.len());
        let mut turn = 0;
        let mut last_unpark = u64::MAX;
        let mut until_asked = ASK_AFTER;
        loop {
            if self.launch.stop.load(Relaxed) {
                return Slice::Finished;
            }
            self.complete_some_at_random();
            ready.clear();
            ready.extend((0..self.warps.len()).filter(|&w| self.warps[w].state == State::Ready));
            if ready.is_empty() {
                if self.finished() {
                    self.check_end();
                    self.end_grid();
                    self.check_barriers_at_end();
                    return Slice::Finished;
                }
                if self.complete_for_a_waiter() {
                    continue;
                }
                if last_unpark != self.progress && self.unpark_pollers() {
                    last_unpark = self.progress;
                    continue;
                }
                self.report_deadlock();
                return Slice::Finished;
            }
            if self.slice == 0 {
                // Warps that spin on something else must not keep a copy from completing forever.
                self.complete_for_a_waiter();
                return Slice::Unfinished;
            }
            let seeded = self.launch.config.seed != 0;
            let (warp, quantum) = if seeded {
                // Short turns mostly, long ones now and then: both kinds of interleaving occur.
                let bits = self.random.below(10);
                (ready[self.random.below(ready.len())], 1 + self.random.below(1 << bits) as u64)
            } else {
                turn = ready.iter().copied().find(|&w| w >= turn).unwrap_or(ready[0]);
                (turn, u64::MAX)
            };
            let cut = quantum.min(self.slice).min(until_asked);
            let used = self.run_warp(warp, cut);
            self.slice -= used;
            until_asked -= used;
            if until_asked == 0 {
                until_asked = ASK_AFTER;
                if let Some(stopped) = self.launch.stopped() {
                    self.tally.error.get_or_insert(stopped);
                    return Slice::Finished;
                }
            }
            // A turn that was interrupted only for the poll continues.
            let goes_on = used == cut && cut < quantum && self.warps[warp].state == State::Ready;
            if !seeded && !goes_on {
                turn = warp + 1;
            }
        }
    }

    /// Runs one warp until it waits, ends, yields, or has had its turn. Returns the instructions executed.
    fn run_warp(&mut self, w: usize, quantum: u64) -> u64 {
        let program = self.launch.program;
        let check = self.launch.config.checks.registers;
        let mut left = quantum;
        let mut counted = left;
        loop {
            let pause = vectors::run_plain(
                self.launch.level,
                &mut self.warps[w],
                program,
                &mut self.tally,
                &mut left,
                &mut self.tiles,
                check,
            );
            match pause {
                Pause::Slice => break,
                Pause::Unwritten(slot) => {
                    self.report_unwritten(w, slot);
                    continue;
                }
                Pause::Wgmma(mask) => {
                    let pc = self.warps[w].pc;
                    self.report_wgmma_register(w, pc, mask);
                    let step = std::slice::from_ref(&program.steps[pc as usize]);
                    vectors::run_steps(self.launch.level, &mut self.warps[w].regs, step, mask);
                    self.warps[w].pc = pc + 1;
                    self.tally.executed[pc as usize] += 1;
                    left -= 1;
                    continue;
                }
                Pause::Op => {}
            }
            if self.warps[w].active == 0 || self.warps[w].pc as usize >= program.code.len() {
                self.end_lanes(w, self.warps[w].active);
                if self.warps[w].state == State::Done {
                    break;
                }
                continue;
            }
            left -= 1;
            self.warps[w].clocks.time += counted - left;
            counted = left;
            let pc = self.warps[w].pc;
            let code = &program.code[pc as usize];
            self.tally.executed[pc as usize] += 1;
            if check && code.watched {
                for &slot in program.births(code) {
                    vectors::forget(&mut self.warps[w], slot);
                }
            }
            let warp = &self.warps[w];
            let mask = match code.guard {
                None => warp.active,
                Some(guard) => {
                    let holds = warp.regs.pred[guard.pred as usize];
                    warp.active & if guard.negated { !holds } else { holds }
                }
            };
            if check
                && code.watched
                && let Some(slot) = vectors::unwritten(warp, program, pc as usize, mask)
            {
                self.report_unwritten(w, slot);
            }
            if code.touches_wgmma {
                self.check_wgmma_registers(w, pc, mask);
            }
            let step = if let Op::Bra { .. } = code.op {
                let taken_first = self.launch.config.seed != 0 && self.random.one_in(2);
                let warp = &mut self.warps[w];
                warp.diverge(mask, code.target, pc + 1, code.reconverge, taken_first);
                Outcome::Jumped
            } else {
                self.execute(w, pc, code, mask)
            };
            match step {
                Outcome::Next => self.warps[w].pc = pc + 1,
                Outcome::Jumped => {}
                Outcome::Yield => {
                    self.warps[w].pc = pc + 1;
                    break;
                }
                Outcome::Retry => break,
                Outcome::Wait => {
                    self.warps[w].pc = pc + 1;
                    break;
                }
            }
            if self.warps[w].state != State::Ready || left == 0 {
                break;
            }
        }
        self.warps[w].clocks.time += counted - left;
        quantum - left
    }

    /// Reports a register without a value, and gives it one so that it is reported once.
    #[cold]
    fn report_unwritten(&mut self, w: usize, slot: Slot) {
        let pc = self.warps[w].pc;
        let regs = &mut self.warps[w].regs;
        let init = match slot {
            Slot::Word(row) => &mut regs.init32[row as usize],
            Slot::Long(row) => &mut regs.init64[row as usize],
            Slot::Pred(row) => &mut regs.init_pred[row as usize],
            _ => return,
        };
        let lane = (!*init).trailing_zeros();
        *init = u32::MAX;
        let program = self.launch.program;
        let reads = program.reads(&program.code[pc as usize]);
        let operand = reads.iter().position(|&s| s == slot).unwrap_or(0);
        let name = program.kernel.body[pc as usize]
            .guard
            .map(|g| g.reg.id())
            .into_iter()
            .chain(program.kernel.body[pc as usize].src.iter().filter_map(|a| a.reg()))
            .nth(operand)
            .and_then(|id| program.kernel.reg(id))
            .map_or_else(|| "a register".to_string(), std::string::ToString::to_string);
        let message = format!("{name} is read in lanes where nothing was written to it");
        self.report_error(w, lane.min(31), pc, FindingKind::UninitialisedRegister, message);
    }

    /// Lanes have come to their end.
    pub fn end_lanes(&mut self, w: usize, mask: u32) {
        let warp = &mut self.warps[w];
        warp.exit(mask);
        warp.settle();
        if warp.live == 0 {
            warp.state = State::Done;
            self.progress += 1;
            self.check_warp_end(w);
            let block = self.warps[w].block;
            self.settle_barriers(block);
            self.settle_registers(block);
            self.settle_cluster_barrier();
        }
    }

    /// A warp has ended, perhaps with copies or products in flight.
    fn check_warp_end(&mut self, w: usize) {
        self.end_bulk(w);
        self.end_wgmma(w);
        let first = self.warps[w].copies.iter().next().map(|copy| (copy.pc, copy.mask.trailing_zeros()));
        if let Some((pc, lane)) = first {
            let message = "cp.async copies were started and never waited for".to_string();
            self.report(w, lane, pc, FindingKind::PendingAtExit, Severity::Warning, |_| (message, None));
            let copies = self.warps[w].copies.retire_all(u32::MAX);
            for copy in &copies {
                self.perform_copy(w, copy);
            }
        }
    }

    /// Lets warps that poll an mbarrier poll once more. True if there were any.
    fn unpark_pollers(&mut self) -> bool {
        let mut any = false;
        for warp in &mut self.warps {
            if warp.polls.0 >= crate::exec::sync::POLLS_BEFORE_PARKING
                && matches!(warp.state, State::Waiting(Wait::Mbarrier { .. }))
            {
                warp.state = State::Ready;
                any = true;
            }
        }
        any
    }

    /// In the random mode, lets asynchronous operations complete at any moment.
    fn complete_some_at_random(&mut self) {
        if let AsyncMode::Random(_) = self.launch.config.async_mode
            && self.random.one_in(3)
        {
            self.complete_one_at_random();
        }
    }

    /// All warps wait, and nothing can wake one.
    fn report_deadlock(&mut self) {
        let mut lines = Vec::new();
        let mut first = None;
        for (w, warp) in self.warps.iter().enumerate() {
            let State::Waiting(wait) = warp.state else { continue };
            // A warp that waits at a block barrier already stands after the instruction.
            let pc = match wait {
                Wait::Barrier(_) => warp.pc - 1,
                _ => warp.pc,
            };
            first.get_or_insert((w, pc));
            let at = self.launch.program.kernel.describe(pc as usize);
            let what = self.describe_wait(w, wait);
            lines.push(format!(
                "{} waits for {what} at #{pc} {at}",
                self.thread(w, warp.live.trailing_zeros())
            ));
        }
        for (rank, block) in self.blocks.iter().enumerate() {
            for (id, barrier) in block.barriers.iter().enumerate().filter(|(_, b)| !b.came.is_empty()) {
                let came: Vec<String> = barrier
                    .came
                    .iter()
                    .map(|&(w, waits)| {
                        format!("warp {}{}", self.warps[w].index, if waits { "" } else { " (arrived)" })
                    })
                    .collect();
                let expected = barrier.expected.map_or("all".to_string(), |n| n.to_string());
                lines.push(format!(
                    "block {rank} barrier {id}: {} of {expected} threads: {}",
                    barrier.arrived,
                    came.join(", ")
                ));
            }
            let mut addresses: Vec<&u32> = block.mbarriers.keys().collect();
            addresses.sort();
            for address in addresses {
                let place = self.shared_place(rank, *address);
                lines.push(format!("{}: {}", place.description, block.mbarriers[address].describe()));
            }
        }
        let Some((w, pc)) = first else { return };
        let message = format!("no warp can run\n    {}", lines.join("\n    "));
        self.report_error(w, self.warps[w].live.trailing_zeros(), pc, FindingKind::Deadlock, message);
    }

    fn describe_wait(&self, w: usize, wait: Wait) -> String {
        match wait {
            Wait::Barrier(id) => format!("barrier {id}"),
            Wait::Mbarrier { block, address, parity, phase } => {
                format!(
                    "{} to complete phase {phase} (parity {parity})",
                    self.shared_place(block, address).description
                )
            }
            Wait::Warpgroup => "the other warps of its warpgroup".to_string(),
            Wait::Registers(n) => format!(
                "{n} registers per thread ({} are free in the block)",
                self.blocks[self.warps[w].block].free_registers
            ),
            Wait::Cluster => "the cluster's barrier".to_string(),
        }
    }
}
