//! Bulk copies that complete at an mbarrier: loads, copies between blocks, and `st.async`.

use crate::config::AsyncMode;
use crate::exec::bulk::Action;
use crate::exec::bulk::bytes::reduce_bytes;
use crate::exec::bulk::sides::{GlobalSide, SharedSide};
use crate::exec::for_lanes;
use crate::findings::FindingKind;
use crate::machine::Cluster;
use crate::machine::warp::{State, Wait};
use crate::memory::tensor_map::Swizzle;
use crate::program::Slot;
use crate::races::clock::{Agent, Proxy, Stamp, VClock};
use crate::races::lanes::Lanes;

/// What an `st.async` of some lanes writes: to one block, and counted at one mbarrier.
#[derive(Clone, Debug)]
pub(super) struct LaneValues {
    block: usize,
    /// Bytes per lane.
    bytes: u32,
    /// Where each lane writes.
    to: Vec<u32>,
    /// What they write, one lane after the other.
    data: Vec<u8>,
}

/// A copy that completes at an mbarrier.
#[derive(Clone, Debug)]
pub struct PendingCopy {
    action: Action,
    warp: usize,
    pc: u32,
    /// The mbarrier: its block and address.
    barrier: (usize, u32),
    operation: (Agent, u32),
    /// What the copy itself came after.
    after: VClock,
}

impl Cluster<'_> {
    /// `st.async`.
    pub fn store_async(&mut self, w: usize, pc: u32, mask: u32, size: u32, count: u32, src: &[Slot]) {
        let to = self.ranked_addresses(w, src[0]);
        let barrier = self.ranked_addresses(w, src[1 + count as usize]);
        // Lanes that write to one block and barrier are one operation, unless it matters which of them is first.
        let apart =
            self.warps[w].clocks.is_parted() || matches!(self.launch.config.async_mode, AsyncMode::Random(_));
        let bytes = size * count;
        let mut left = mask;
        while left != 0 {
            let lane = left.trailing_zeros();
            let (block, _) = self.cluster_address(w, to[lane as usize]);
            let (bar_block, bar) = self.cluster_address(w, barrier[lane as usize]);
            let mut together = 1 << lane;
            if !apart {
                for_lanes(left, |l| {
                    let same = self.cluster_address(w, to[l]).0 == block
                        && self.cluster_address(w, barrier[l]) == (bar_block, bar);
                    together |= u32::from(same) << l;
                });
            }
            left &= !together;
            let operation = self.agents.start(w, together, &self.warps[w].clocks);
            let mut values = LaneValues { block, bytes, to: Vec::new(), data: Vec::new() };
            let mut lanes = together;
            while lanes != 0 {
                let lane = lanes.trailing_zeros();
                lanes &= lanes - 1;
                let l = lane as usize;
                let (_, address) = self.cluster_address(w, to[l]);
                let side = SharedSide::linear(block, address, bytes);
                if address % bytes != 0 {
                    let message = format!("address {address:#x} is not a multiple of {bytes}");
                    self.report_error(w, lane, pc, FindingKind::Misaligned, message);
                } else if self.record_side(w, pc, lane, side, true, Proxy::Generic, operation)
                    && self.check_mbarrier(w, pc, lane, bar_block, bar, Proxy::Generic)
                {
                    values.to.push(address);
                    for &slot in &src[1..=count as usize] {
                        let value = match slot {
                            Slot::Long(row) => self.warps[w].regs.r64[row as usize][l],
                            slot => u64::from(self.warps[w].regs.r32[slot.word() as usize][l]),
                        };
                        values.data.extend_from_slice(&value.to_le_bytes()[..size as usize]);
                    }
                }
            }
            if !values.to.is_empty() {
                let action = Action::Values(values);
                self.launch_pending(w, pc, together, action, operation, (bar_block, bar), Proxy::Generic);
            }
        }
    }

    pub(super) fn start_load(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        from: &GlobalSide,
        to: SharedSide,
        barrier: u32,
        blocks: Option<u32>,
    ) {
        let (block, address) = self.cluster_address(w, to.address);
        let (bar_block, bar) = self.cluster_address(w, barrier);
        let targets: Vec<(usize, usize)> = match blocks {
            None => vec![(block, bar_block)],
            Some(mask) => {
                if mask >> self.blocks.len() != 0 || mask == 0 {
                    let message =
                        format!("multicast to {mask:#b} in a cluster of {} blocks", self.blocks.len());
                    self.report_error(w, lane, pc, FindingKind::ClusterMisuse, message);
                }
                (0..self.blocks.len()).filter(|b| mask >> b & 1 == 1).map(|b| (b, b)).collect()
            }
        };
        let mut first = true;
        for (block, bar_block) in targets {
            let side = SharedSide { block, address, ..to };
            let operation = self.agents.start(w, 1 << lane, &self.warps[w].clocks);
            let inside = self.record_side(w, pc, lane, side, true, Proxy::Async, operation);
            if first {
                self.record_global(w, pc, lane, from, false, false, operation);
                first = false;
            }
            if inside {
                let action = Action::Load(from.clone(), side);
                self.start_pending(w, pc, lane, action, operation, (bar_block, bar), Proxy::Async);
            }
        }
    }

    /// Starts a lane's copy that completes at an mbarrier, if there is one.
    pub(super) fn start_pending(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        action: Action,
        operation: (Agent, u32),
        barrier: (usize, u32),
        proxy: Proxy,
    ) {
        if self.check_mbarrier(w, pc, lane, barrier.0, barrier.1, proxy) {
            self.launch_pending(w, pc, 1 << lane, action, operation, barrier, proxy);
        }
    }

    /// Starts a copy of some lanes that completes at an mbarrier.
    fn launch_pending(
        &mut self,
        w: usize,
        pc: u32,
        lanes: u32,
        action: Action,
        operation: (Agent, u32),
        barrier: (usize, u32),
        proxy: Proxy,
    ) {
        let mut after = VClock::default();
        self.warps[w].clocks.reach(lanes, proxy, &mut after);
        let copy = PendingCopy { action, warp: w, pc, barrier, operation, after };
        if self.happens_now() {
            self.complete_pending(&copy);
            return;
        }
        match &copy.action {
            Action::Load(_, side) | Action::Across(_, side, None) => self.poison_side(*side),
            Action::Values(values) => {
                let shared = &mut self.blocks[values.block].shared;
                values.to.iter().for_each(|&to| shared.poison(to, values.bytes));
            }
            Action::Store(..) | Action::Across(..) => {}
        }
        self.pending.push(copy);
    }

    fn poison_side(&mut self, side: SharedSide) {
        let shared = &mut self.blocks[side.block].shared;
        match side.swizzle {
            Swizzle::None => shared.poison(side.address, side.bytes),
            // A swizzle changes the order of the bytes within a page, not which bytes belong to it.
            _ if side.pages().is_some() => shared.poison(side.address, side.bytes),
            _ => side.chunks().for_each(|address| shared.poison(address, 16)),
        }
    }

    /// A copy that completes at an mbarrier takes effect.
    fn complete_pending(&mut self, copy: &PendingCopy) {
        match &copy.action {
            Action::Load(from, to) => {
                let mut data = std::mem::take(&mut self.staging);
                self.read_global(from, to.bytes, &mut data);
                self.write_shared(*to, &data);
                self.staging = data;
                self.count_bytes(copy, to.bytes, true);
            }
            Action::Across(from, to, reduce) => {
                let data = self.read_shared(*from);
                match reduce {
                    None => self.write_shared(*to, &data),
                    Some((op, ty)) => {
                        let mut sum = self.read_shared(*to);
                        reduce_bytes(*op, *ty, &mut sum, &data);
                        self.write_shared(*to, &sum);
                    }
                }
                self.count_bytes(copy, to.bytes, true);
            }
            Action::Values(values) => {
                // A phase that expects too few bytes ends halfway; its waiters have then seen no lane's write.
                let lanes = values.to.len();
                for (i, data) in values.data.chunks_exact(values.bytes as usize).enumerate() {
                    let shared = &mut self.blocks[values.block].shared;
                    shared.at_mut(values.to[i], values.bytes).copy_from_slice(data);
                    self.count_bytes(copy, values.bytes, i + 1 == lanes);
                }
            }
            Action::Store(..) => {}
        }
    }

    /// Counts bytes of a copy at its mbarrier; with the last of them, the copy is complete.
    fn count_bytes(&mut self, copy: &PendingCopy, bytes: u32, last: bool) {
        let (block, address) = copy.barrier;
        if let Some(bar) = self.blocks[block].mbarriers.get_mut(&address) {
            bar.tx -= i64::from(bytes);
            let ends = bar.pending == 0 && bar.tx == 0;
            if last || ends {
                bar.publication().join_both(&copy.after);
            }
            if last {
                let (agent, clock) = copy.operation;
                bar.publication().raise(agent, clock);
                bar.note(Stamp { clock, agent, lanes: Lanes::ALL });
            }
        }
        self.progress += 1;
        self.settle_mbarrier(block, address, copy.warp, copy.pc);
    }

    /// Nothing can run: completes a copy at an mbarrier that some warp waits at. False if there is none.
    pub fn complete_for_a_waiter(&mut self) -> bool {
        if self.pending.is_empty() {
            return false;
        }
        let mut barriers = Vec::with_capacity(self.warps.len());
        for warp in &self.warps {
            if let State::Waiting(Wait::Mbarrier { block, address, .. }) = warp.state
                && !barriers.contains(&(block, address))
            {
                barriers.push((block, address));
            }
        }
        let waited = |copy: &PendingCopy| barriers.contains(&copy.barrier);
        let candidates = self.pending.iter().filter(|copy| waited(copy)).count();
        if candidates == 0 {
            return false;
        }
        let nth = self.random.below(candidates);
        let chosen = self.pending.iter().enumerate().filter(|(_, copy)| waited(copy)).nth(nth);
        let Some((chosen, _)) = chosen else { return false };
        let copy = self.pending.swap_remove(chosen);
        self.complete_pending(&copy);
        true
    }

    /// In the random mode: some copy takes effect now.
    pub fn complete_one_at_random(&mut self) {
        if !self.pending.is_empty() {
            let chosen = self.random.below(self.pending.len());
            let copy = self.pending.swap_remove(chosen);
            self.complete_pending(&copy);
        }
    }

    /// The cluster has ended: copies that nobody waited for are pending.
    pub fn check_end(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        for copy in &pending {
            let message =
                "the block ends before a bulk copy into its shared memory has completed".to_string();
            self.report_error(copy.warp, 0, copy.pc, FindingKind::PendingAtExit, message);
        }
        pending.clear();
    }
}
