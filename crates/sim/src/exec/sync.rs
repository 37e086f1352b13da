//! Barriers of the block and mbarriers.

use flashcore_ptx::{Op, Space};

use crate::config::AsyncMode;
use crate::exec::for_lanes;
use crate::findings::{FindingKind, Raw, RawOther, Severity, THIS_LAUNCH};
use crate::machine::barrier::NamedBarrier;
use crate::machine::mbarrier::Mbarrier;
use crate::machine::warp::{State, Wait};
use crate::machine::{Cluster, Outcome};
use crate::memory::shared::cell_mask;
use crate::program::Slot;
use crate::races::clock::{Edge, Proxy};
use crate::races::lanes::Lanes;
use crate::races::shared_shadow::{CELL, SharedAccess};

/// Failed polls of one mbarrier after which a warp sleeps until the barrier moves.
pub const POLLS_BEFORE_PARKING: u32 = 2;
/// The largest number of arrivals of an mbarrier.
const MAX_ARRIVALS: u32 = (1 << 20) - 1;

impl Cluster<'_> {
    /// `bar.sync` (waits) and `bar.arrive` (does not).
    pub fn bar(&mut self, w: usize, pc: u32, mask: u32, waits: bool, src: &[Slot]) -> Outcome {
        let lane = mask.trailing_zeros();
        let id = self.row(w, src[0])[lane as usize];
        let threads = src.get(1).map(|&slot| self.row(w, slot)[lane as usize]);
        if id > 15 {
            let message = format!("barrier {id} does not exist; a block has 0 to 15");
            self.report_error(w, lane, pc, FindingKind::BarrierMisuse, message);
            return Outcome::Next;
        }
        let block = self.warps[w].block;
        let barrier = &mut self.blocks[block].barriers[id as usize];
        for fault in barrier.arrive(w, waits, threads) {
            let message = format!("barrier {id}: {fault}");
            self.report_error(w, lane, pc, FindingKind::BarrierMisuse, message);
        }
        let barrier = &mut self.blocks[block].barriers[id as usize];
        barrier.pc = pc;
        let warp = &mut self.warps[w];
        warp.clocks.publish(mask, warp.live, &mut barrier.clocks);
        // Arriving at an aligned barrier, even without waiting, orders the lanes of a warp.
        warp.clocks.sync_lanes();
        self.progress += 1;
        if waits {
            self.warps[w].state = State::Waiting(Wait::Barrier(id));
        }
        self.settle_barriers(block);
        if waits { Outcome::Wait } else { Outcome::Next }
    }

    /// Ends every phase of a block's barriers that is complete.
    pub fn settle_barriers(&mut self, block: usize) {
        let warps = self.blocks[block].first_warp..self.blocks[block].first_warp + self.blocks[block].warps;
        let live = warps.filter(|&w| self.warps[w].state != State::Done).count() as u32 * 32;
        for id in 0..16 {
            let barrier = &mut self.blocks[block].barriers[id];
            if barrier.complete(live) {
                let (waited, clocks) = barrier.release();
                for w in waited {
                    let warp = &mut self.warps[w];
                    warp.clocks.acquire(warp.live, warp.live, &clocks);
                    warp.state = State::Ready;
                }
                self.progress += 1;
            }
        }
    }

    /// All warps have ended: reports barriers at which some threads arrived and others did not.
    pub fn check_barriers_at_end(&mut self) {
        for block in 0..self.blocks.len() {
            for id in 0..16 {
                let NamedBarrier { expected, arrived, came, pc, .. } = &self.blocks[block].barriers[id];
                let (Some(&(w, _)), Some(expected), pc) = (came.last(), expected, *pc) else { continue };
                let message =
                    format!("barrier {id}: the block ends when {arrived} of {expected} threads have come");
                let kind = FindingKind::BarrierMisuse;
                self.report(w, 0, pc, kind, Severity::Warning, |_| (message, None));
            }
        }
    }

    /// All mbarrier instructions.
    pub fn mbarrier(&mut self, w: usize, pc: u32, op: Op, mask: u32, dst: &[Slot], src: &[Slot]) -> Outcome {
        let space = match op {
            Op::MbarrierArrive { space, .. }
            | Op::MbarrierArriveExpectTx { space }
            | Op::MbarrierExpectTx { space } => space,
            _ => Space::Shared,
        };
        let raw = match space {
            Space::SharedCluster => self.ranked_addresses(w, src[0]),
            _ => self.shared_addresses(w, src[0]),
        };
        match op {
            Op::MbarrierTestWait { parity, .. } => {
                return self.mbarrier_wait(w, pc, mask, parity, false, &raw, dst, src);
            }
            Op::MbarrierTryWait { parity, .. } => {
                return self.mbarrier_wait(w, pc, mask, parity, true, &raw, dst, src);
            }
            _ => {}
        }
        // Each lane is a thread of its own, and arrives for itself.
        let operand = src.get(1).map(|&slot| self.row(w, slot));
        let mut tokens = [0u64; 32];
        let mut left = mask;
        while left != 0 {
            let lane = left.trailing_zeros();
            let l = lane as usize;
            let (block, address) = match space {
                Space::SharedCluster => self.cluster_address(w, raw[l]),
                _ => (self.warps[w].block, raw[l]),
            };
            // Lanes that do the same to the same barrier do it together, and publish together.
            let mut together = 0;
            for_lanes(left, |other| {
                let same = raw[other] == raw[l] && operand.is_none_or(|o| o[other] == o[l]);
                together |= u32::from(same) << other;
            });
            left &= !together;
            let value = operand.map(|o| o[l]);
            let token = match op {
                Op::MbarrierInit => {
                    self.mbarrier_init(w, pc, lane, block, address, value.unwrap_or(0));
                    0
                }
                Op::MbarrierInval => {
                    self.mbarrier_inval(w, pc, lane, block, address);
                    0
                }
                Op::MbarrierArrive { .. } => {
                    self.mbarrier_arrive(w, pc, together, block, address, value.unwrap_or(1), 0)
                }
                Op::MbarrierArriveExpectTx { .. } => {
                    self.mbarrier_arrive(w, pc, together, block, address, 1, i64::from(value.unwrap_or(0)))
                }
                Op::MbarrierExpectTx { .. } => {
                    if self.check_mbarrier(w, pc, lane, block, address, Proxy::Generic)
                        && let Some(bar) = self.blocks[block].mbarriers.get_mut(&address)
                    {
                        bar.tx += i64::from(value.unwrap_or(0)) * i64::from(together.count_ones());
                    }
                    self.settle_mbarrier(block, address, w, pc);
                    0
                }
                _ => 0,
            };
            for_lanes(together, |l| tokens[l] = token);
        }
        if let Some(Slot::Long(d)) = dst.first() {
            self.warps[w].regs.set64(*d, mask, &tokens);
        }
        Outcome::Next
    }

    fn mbarrier_init(&mut self, w: usize, pc: u32, lane: u32, block: usize, address: u32, count: u32) {
        if count == 0 || count > MAX_ARRIVALS {
            let message = format!("an mbarrier for {count} arrivals; 1 to {MAX_ARRIVALS} are possible");
            self.report_error(w, lane, pc, FindingKind::MbarrierMisuse, message);
        }
        if self.possible_shared(w, pc, block, &[address; 32], 1 << lane, 8) == 0 {
            return;
        }
        if self.blocks[block].mbarriers.contains_key(&address) {
            self.report(w, lane, pc, FindingKind::MbarrierMisuse, Severity::Error, |c| {
                (
                    "an mbarrier in use is initialised again without mbarrier.inval".to_string(),
                    Some(c.shared_place(block, address)),
                )
            });
        }
        let lanes = Lanes::one(lane);
        let clocks = &self.warps[w].clocks;
        let stamp = clocks.stamp(lanes);
        let access = SharedAccess { clocks, proxy: Proxy::Generic, stamp, lanes, pc };
        let shared = &mut self.blocks[block].shared;
        let conflict = shared.shadow.write(address / CELL, cell_mask(address % CELL, 8), &access);
        shared.set_barrier(address, true);
        self.blocks[block].mbarriers.insert(address, Mbarrier::new(count.max(1), (stamp, pc)));
        if let Some(conflict) = conflict {
            self.report_conflict(w, lane, pc, block, true, conflict);
        }
    }

    fn mbarrier_inval(&mut self, w: usize, pc: u32, lane: u32, block: usize, address: u32) {
        if !self.check_mbarrier(w, pc, lane, block, address, Proxy::Generic) {
            return;
        }
        if let Some(bar) = self.blocks[block].mbarriers.remove(&address)
            && (!bar.waiting.is_empty() || bar.tx != 0)
        {
            let message = format!("an mbarrier that is still waited for is ended: {}", bar.describe());
            self.report_error(w, lane, pc, FindingKind::MbarrierMisuse, message);
        }
        self.blocks[block].shared.set_barrier(address, false);
    }

    /// Checks that there is an mbarrier, initialised before this use of it.
    pub fn check_mbarrier(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        block: usize,
        address: u32,
        proxy: Proxy,
    ) -> bool {
        self.check_block_alive(w, pc, lane, block);
        let Some(bar) = self.blocks[block].mbarriers.get(&address) else {
            self.report(w, lane, pc, FindingKind::MbarrierMisuse, Severity::Error, |c| {
                (
                    "there is no mbarrier here: it was not initialised, or not yet".to_string(),
                    Some(c.shared_place(block, address)),
                )
            });
            return false;
        };
        let (init, init_pc) = bar.init;
        let edge = self.warps[w].clocks.edge(init, Lanes::one(lane), Proxy::Generic);
        let told = bar.known_from.is_some_and(|phase| self.warps[w].cluster_phases.1 >= phase);
        let unfenced = proxy == Proxy::Async
            && !bar.fenced
            && self.warps[w].clocks.edge(init, Lanes::one(lane), Proxy::Async) != Edge::Ordered;
        let (message, missing) = if edge != Edge::Ordered && !told {
            (
                "its initialisation is not ordered before this use",
                "a barrier between mbarrier.init and this use",
            )
        } else if unfenced {
            (
                "its initialisation is not visible to asynchronous copies",
                "fence.mbarrier_init (or fence.proxy.async) after mbarrier.init",
            )
        } else {
            return true;
        };
        if !self.tally.findings.again(FindingKind::MbarrierMisuse, pc, (THIS_LAUNCH, init_pc)) {
            let raw = Raw {
                kind: FindingKind::MbarrierMisuse,
                severity: Severity::Error,
                pc,
                thread: self.thread(w, lane),
                message: message.to_string(),
                place: Some(self.shared_place(block, address)),
                other: Some(RawOther::own(
                    init_pc,
                    self.thread(usize::from(init.agent), init.lanes.any()).to_string(),
                    true,
                )),
                missing: Some(missing.to_string()),
            };
            self.tally.findings.add(raw);
        }
        true
    }

    /// Arrivals of some lanes at one barrier. Returns the state token.
    fn mbarrier_arrive(
        &mut self,
        w: usize,
        pc: u32,
        lanes: u32,
        block: usize,
        address: u32,
        count: u32,
        bytes: i64,
    ) -> u64 {
        let lane = lanes.trailing_zeros();
        if !self.check_mbarrier(w, pc, lane, block, address, Proxy::Generic) {
            return 0;
        }
        let Some(bar) = self.blocks[block].mbarriers.get_mut(&address) else { return 0 };
        let warp = &mut self.warps[w];
        let lanes_here = Lanes::one(lane);
        let agent = warp.clocks.agent();
        let unordered = bar
            .came_before_with(agent)
            .iter()
            .any(|&came| {
                came.agent != agent && warp.clocks.edge(came, lanes_here, Proxy::Generic) != Edge::Ordered
            })
            .then(|| bar.describe());
        bar.note(warp.clocks.stamp(lanes_here));
        let token = bar.token();
        bar.tx += bytes * i64::from(lanes.count_ones());
        warp.clocks.publish(lanes, warp.live, bar.publication());
        if !bar.arrive(count * lanes.count_ones()) {
            let message = format!(
                "{} arrivals at an mbarrier whose phase takes no more of them: {}",
                count * lanes.count_ones(),
                bar.describe()
            );
            self.report(w, lane, pc, FindingKind::MbarrierMisuse, Severity::Error, |c| {
                (message, Some(c.shared_place(block, address)))
            });
        }
        if let Some(state) = unordered {
            let message = format!(
                "an arrival that is not ordered after the end of the phase that the warp arrived in before; both may fall into one phase: {state}"
            );
            self.report(w, lane, pc, FindingKind::MbarrierMisuse, Severity::Error, |c| {
                (message, Some(c.shared_place(block, address)))
            });
        }
        self.settle_mbarrier(block, address, w, pc);
        token
    }

    /// Ends the phase of an mbarrier if it is complete, and wakes those who wait for it.
    pub fn settle_mbarrier(&mut self, block: usize, address: u32, w: usize, pc: u32) {
        let Some(bar) = self.blocks[block].mbarriers.get_mut(&address) else { return };
        let Some(lapped) = bar.advance() else { return };
        let ended = bar.phase - 1;
        self.progress += 1;
        for warp in &mut self.warps {
            if let State::Waiting(Wait::Mbarrier { block: b, address: a, phase, .. }) = warp.state
                && b == block
                && a == address
                && phase <= ended
            {
                warp.state = State::Ready;
            }
        }
        if let Some(&late) = lapped.first() {
            let who = self.thread(late, 0);
            self.report(w, 0, pc, FindingKind::MbarrierMisuse, Severity::Error, |c| {
                let message = format!(
                    "phase {ended} completes while {who} has not yet seen an earlier one complete: its parity now means another phase"
                );
                (message, Some(c.shared_place(block, address)))
            });
        }
    }

    /// `test_wait` and `try_wait`.
    fn mbarrier_wait(
        &mut self,
        w: usize,
        pc: u32,
        mask: u32,
        by_parity: bool,
        may_block: bool,
        raw: &[u32; 32],
        dst: &[Slot],
        src: &[Slot],
    ) -> Outcome {
        let block = self.warps[w].block;
        let lane = mask.trailing_zeros();
        let l = lane as usize;
        let address = raw[l];
        let parity_of = |c: &Self, l: usize| -> u32 {
            if by_parity { c.row(w, src[1])[l] & 1 } else { (c.row64(w, src[1])[l] >> 32 & 1) as u32 }
        };
        let parity = parity_of(self, l);
        let mut uniform = true;
        for_lanes(mask, |other| uniform &= raw[other] == address && parity_of(self, other) == parity);
        if !uniform {
            self.unsupported(pc, "lanes of one warp wait for different phases");
            return Outcome::Next;
        }
        if !self.check_mbarrier(w, pc, lane, block, address, Proxy::Generic) {
            self.warps[w].regs.set_pred(dst[0].pred(), mask, u32::MAX);
            return Outcome::Next;
        }
        let Some(bar) = self.blocks[block].mbarriers.get_mut(&address) else { return Outcome::Next };
        let answer = bar.test(w, parity);
        if answer.lapped {
            let message = format!(
                "the barrier has moved on by two phases since this warp last saw one complete; parity {parity} now means another phase: {}",
                bar.describe()
            );
            self.report(w, lane, pc, FindingKind::MbarrierMisuse, Severity::Error, |c| {
                (message, Some(c.shared_place(block, address)))
            });
        }
        let Some(bar) = self.blocks[block].mbarriers.get_mut(&address) else { return Outcome::Next };
        let warp = &mut self.warps[w];
        if answer.complete {
            bar.waiting.retain(|&(waiter, _)| waiter != w);
            warp.clocks.acquire(mask, warp.live, bar.acquired(parity));
            warp.polls = (0, pc);
            warp.regs.set_pred(dst[0].pred(), mask, u32::MAX);
            return Outcome::Next;
        }
        // Not complete. A try_wait may give up early; in the random mode it sometimes does.
        let phase = bar.phase;
        let gives_up = matches!(self.launch.config.async_mode, AsyncMode::Random(_)) && self.random.one_in(4);
        if warp.polls.1 != pc {
            warp.polls = (0, pc);
        }
        let parks = if may_block { !gives_up } else { warp.polls.0 >= POLLS_BEFORE_PARKING };
        if !bar.waiting.iter().any(|&(waiter, _)| waiter == w) {
            bar.waiting.push((w, phase));
        }
        if parks {
            warp.state = State::Waiting(Wait::Mbarrier { block, address, parity, phase });
            // A parked poll answers when it is run again; the count makes sure that it does.
            if !may_block {
                warp.polls.0 = POLLS_BEFORE_PARKING;
            }
            return Outcome::Retry;
        }
        warp.polls.0 += 1;
        warp.regs.set_pred(dst[0].pred(), mask, 0);
        Outcome::Yield
    }

    /// `fence.mbarrier_init`: the barriers that this warp has initialised are visible to copies from here on.
    pub fn fence_mbarrier_init(&mut self, w: usize) {
        let agent = self.warps[w].clocks.agent();
        let block = self.warps[w].block;
        for bar in self.blocks[block].mbarriers.values_mut().filter(|b| b.init.0.agent == agent) {
            bar.fenced = true;
        }
    }
}
