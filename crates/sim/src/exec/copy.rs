//! `cp.async`: the copies that each lane makes on its own.
//!
//! A copy is checked when it is started, by the clocks of its warp, and recorded under an operation of its own,
//! one for each group. Waiting for the group makes each lane see its own copies; a barrier makes the others see
//! them.

use std::sync::atomic::Ordering::Relaxed;

use crate::config::AsyncMode;
use crate::exec::for_lanes;
use crate::exec::touch::Touch;
use crate::findings::FindingKind;
use crate::machine::Cluster;
use crate::machine::copy_queue::WarpCopy;
use crate::memory::banks::{self, Wavefronts};
use crate::memory::global::POISON;
use crate::memory::shared::cell_mask;
use crate::program::Slot;
use crate::races::clock::{Proxy, Stamp};
use crate::races::global_shadow::LINE;
use crate::races::lanes::Lanes;
use crate::races::shared_shadow::{CELL, SharedAccess};
use crate::vectors;

impl Cluster<'_> {
    /// Starts a copy.
    pub fn copy_async(&mut self, w: usize, pc: u32, mask: u32, bytes: u32, src_size: bool, src: &[Slot]) {
        let mut copy = self.warps[w].copies.room();
        copy.from = self.global_addresses(w, src[1]);
        copy.read = [bytes as u8; 32];
        if src_size {
            let sizes = self.row(w, src[2]);
            for_lanes(mask, |l| copy.read[l] = sizes[l].min(bytes) as u8);
            if let Some(lane) = (0..32).find(|&l| mask >> l & 1 == 1 && sizes[l] > bytes) {
                let message = format!("a source size of {} bytes for a copy of {bytes}", sizes[lane]);
                self.report_error(w, lane as u32, pc, FindingKind::OutOfBounds, message);
            }
        }
        let block = self.warps[w].block;
        let checks = self.launch.config.checks;
        self.survey(w, src[0]);
        copy.to = self.survey.addresses;
        let whole = bytes == CELL && mask == u32::MAX;
        if checks.costs {
            let free = whole && (0..4).all(|eight| self.survey.free_of_conflicts(eight));
            let wavefronts = if free {
                Wavefronts { taken: 4, ideal: 4 }
            } else {
                banks::shared_wavefronts(&copy.to, mask, bytes)
            };
            self.tally.counters[pc as usize].shared(wavefronts);
        }
        let mut ok = mask;
        if !whole || self.survey.inside != u32::MAX {
            ok = self.possible_shared(w, pc, block, &copy.to, mask, bytes);
        }
        ok = self.check_copy_sources(w, pc, ok, bytes, &copy.from, &copy.read);
        let (agent, clock) = match self.warps[w].copies.open() {
            Some(open) => open,
            None => self.agents.start(w, mask, &self.warps[w].clocks),
        };
        if checks.shared {
            self.record_copy(w, pc, block, ok, bytes, &copy.to, agent, clock);
        }
        let early = match self.launch.config.async_mode {
            AsyncMode::Early => true,
            AsyncMode::Late => false,
            AsyncMode::Random(_) => self.random.one_in(2),
        };
        let level = self.launch.level;
        let reads_all = bytes == CELL && copy.read == [CELL as u8; 32];
        copy.lines = if reads_all { ok & vectors::whole_lines(level, &copy.from) } else { 0 };
        (copy.mask, copy.bytes, copy.pc) = (ok, bytes, pc);
        (copy.agent, copy.clock, copy.group, copy.done) = (agent, clock, None, early);
        if early {
            self.move_bytes(w, &copy);
        } else {
            let shared = &mut self.blocks[block].shared;
            if bytes == CELL {
                for_lanes(ok, |l| shared.poison_cell(copy.to[l]));
            } else {
                for_lanes(ok, |l| shared.poison(copy.to[l], bytes));
            }
        }
        self.warps[w].copies.push(copy);
    }

    /// Checks the global side of a copy: lanes that read nothing need no valid address.
    fn check_copy_sources(
        &mut self,
        w: usize,
        pc: u32,
        mask: u32,
        bytes: u32,
        from: &[u64; 32],
        read: &[u8; 32],
    ) -> u32 {
        if *read == [bytes as u8; 32] {
            return self.touch_global(w, pc, from, mask, bytes, Touch::Read);
        }
        let (mut whole, mut none) = (0u32, 0u32);
        for (l, &read) in read.iter().enumerate() {
            whole |= u32::from(u32::from(read) == bytes) << l;
            none |= u32::from(read == 0) << l;
        }
        let part = mask & !whole & !none;
        let whole = mask & whole;
        let mut ok = mask & !whole | self.touch_global(w, pc, from, whole, bytes, Touch::Read);
        for_lanes(part, |l| {
            let address = from[l];
            let inside = self.launch.memory.find(address, u64::from(read[l])).is_some();
            if address.is_multiple_of(u64::from(bytes)) && inside {
                self.touch_part(w, pc, l, address, u32::from(read[l]));
            } else {
                ok &= !(1 << l);
                self.report_bad_global(w, l as u32, pc, address, bytes);
            }
        });
        ok
    }

    /// Records what a copy will write, under its own operation.
    fn record_copy(
        &mut self,
        w: usize,
        pc: u32,
        block: usize,
        mask: u32,
        bytes: u32,
        to: &[u32; 32],
        agent: u16,
        clock: u32,
    ) {
        let (shared, clocks) = (&mut self.blocks[block].shared, &self.warps[w].clocks);
        let mut conflict = None;
        let mut barrier = None;
        let mut left = mask;
        if bytes == CELL {
            // Most copies fill whole cells, after everybody's accesses to them.
            left &= !shared.write_after_all(to, mask, clocks, (agent, clock), pc, Lanes::one);
        }
        for_lanes(left, |l| {
            let lanes = Lanes::one(l as u32);
            let stamp = Stamp { clock, agent, lanes };
            let access = SharedAccess { clocks, proxy: Proxy::Generic, stamp, lanes, pc };
            let (cell, bits) = (to[l] / CELL, cell_mask(to[l] % CELL, bytes));
            if shared.is_barrier(cell, bits) {
                barrier.get_or_insert((l, to[l]));
            }
            shared.initialise(cell, bits);
            if let Some(found) = shared.shadow.write(cell, bits, &access) {
                // Copies of one group may not overlap either, but a lane may repeat its own.
                if found.prior.agent != agent || found.prior.lanes != lanes {
                    conflict.get_or_insert((l, found));
                }
            }
        });
        if let Some((lane, found)) = conflict {
            self.report_conflict(w, lane as u32, pc, block, true, found);
        }
        if let Some((lane, address)) = barrier {
            let place = self.shared_place(block, address).description;
            let message = format!("a copy over an mbarrier in use: {place}");
            self.report_error(w, lane as u32, pc, FindingKind::MbarrierMisuse, message);
        }
    }

    /// Waits until at most so many groups of these lanes are open, or until all copies are done.
    pub fn copy_wait(&mut self, w: usize, mask: u32, pending: Option<u32>) {
        let copies = &mut self.warps[w].copies;
        let retired = match pending {
            Some(pending) => copies.retire(mask, pending),
            None => copies.retire_all(mask),
        };
        let mut last = None;
        for copy in &retired {
            self.perform_copy(w, copy);
            if last != Some((copy.agent, copy.clock)) {
                self.warps[w].clocks.acquire_own_copies(copy.agent, copy.clock);
                last = Some((copy.agent, copy.clock));
            }
        }
        self.warps[w].copies.recycle(retired);
    }

    /// Makes a copy's effect happen, if it has not.
    pub fn perform_copy(&mut self, w: usize, copy: &WarpCopy) {
        if !copy.done {
            self.move_bytes(w, copy);
        }
    }

    fn move_bytes(&mut self, w: usize, copy: &WarpCopy) {
        let memory = self.launch.memory;
        let shared = &mut self.blocks[self.warps[w].block].shared;
        let mut left = copy.mask;
        for (eight, to) in copy.to.as_chunks::<8>().0.iter().enumerate() {
            let lanes = 0xFF << (8 * eight);
            if copy.lines & lanes == lanes
                && let Some((region, offset)) = memory.find(copy.from[8 * eight], LINE as u64)
            {
                for (&to, cell) in to.iter().zip(region.line(offset).as_chunks::<2>().0) {
                    shared.store_cell(to, cell.each_ref().map(|word| word.load(Relaxed)));
                }
                left &= !lanes;
            }
        }
        // Lanes usually read one allocation.
        let near = memory.near(copy.from[left.trailing_zeros() as usize % 32]);
        for_lanes(left, |l| {
            let read = u32::from(copy.read[l]);
            if read == copy.bytes
                && let Some(region) = near
                && let offset = copy.from[l].wrapping_sub(region.base)
                && offset.saturating_add(u64::from(read)) <= region.len as u64
            {
                if read == CELL && offset.is_multiple_of(8) {
                    return shared.store_cell(copy.to[l], region.load_cell(offset as usize));
                }
                return region.read(offset as usize, shared.at_mut(copy.to[l], read));
            }
            let mut at = 0;
            while at < copy.bytes {
                let size = (copy.bytes - at).min(8);
                let mut value = 0;
                let want = read.saturating_sub(at).min(size);
                if want == size {
                    value = memory
                        .find(copy.from[l] + u64::from(at), u64::from(size))
                        .map_or(POISON, |(region, offset)| region.load(offset, size));
                } else {
                    for b in 0..want {
                        let byte = memory
                            .find(copy.from[l] + u64::from(at + b), 1)
                            .map_or(0xFF, |(region, offset)| region.load_byte(offset));
                        value |= u64::from(byte) << (8 * b);
                    }
                }
                shared.store(copy.to[l] + at, size, value);
                at += size;
            }
        });
    }

    /// `cp.async.mbarrier.arrive`: the arrival happens when the copies so far of each lane are done.
    ///
    /// Here the copies happen at once and then the lanes arrive: a waiter cannot tell this from any other order.
    pub fn copy_mbarrier_arrive(&mut self, w: usize, pc: u32, mask: u32, noinc: bool, src: &[Slot]) {
        let raw = self.shared_addresses(w, src[0]);
        let lane = mask.trailing_zeros();
        let (block, address) = (self.warps[w].block, raw[lane as usize]);
        let mut uniform = true;
        for_lanes(mask, |l| uniform &= raw[l] == address);
        if !uniform {
            self.unsupported(pc, "lanes of one warp arrive at different mbarriers");
            return;
        }
        if !self.check_mbarrier(w, pc, lane, block, address, Proxy::Generic) {
            return;
        }
        let retired = self.warps[w].copies.retire_all(mask);
        for copy in &retired {
            self.perform_copy(w, copy);
        }
        let Some(bar) = self.blocks[block].mbarriers.get_mut(&address) else { return };
        for copy in &retired {
            bar.publication().generic.raise(copy.agent, copy.clock);
        }
        let arrivals = mask.count_ones();
        if !noinc {
            // Without .noinc the pending count is raised first, so that the arrival leaves it as it was.
            bar.pending += i64::from(arrivals);
        }
        if !bar.arrive(arrivals) {
            let message = format!("more arrivals than the phase takes: {}", bar.describe());
            self.report_error(w, lane, pc, FindingKind::MbarrierMisuse, message);
        }
        self.settle_mbarrier(block, address, w, pc);
    }
}
