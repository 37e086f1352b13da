//! Loads, stores and atomics, and the checks that every access to memory passes.

use flashcore_ptx::{AtomOp, AtomSem, AtomTy, MemTy, Order, Space};

use crate::exec::for_lanes;
use crate::findings::{FindingKind, Severity};
use crate::machine::regs::{Row, Row64};
use crate::machine::{Cluster, Step};
use crate::memory::banks;
use crate::memory::global::{POISON, Written};
use crate::memory::lines;
use crate::memory::shared::cell_mask;
use crate::numerics as num;
use crate::program::decode::Slot;
use crate::races::clock::{ClockPair, Lanes, Proxy};
use crate::races::global_shadow::{Accessor, GlobalAccess, GlobalConflict, LINE};
use crate::races::shared_shadow::{Access, CELL, Conflict};
use crate::vectors;

/// What an access does to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// It reads.
    Read,
    /// It writes.
    Write,
    /// It reads and writes at once.
    Atomic,
}

impl Touch {
    fn writes(self) -> bool {
        self != Touch::Read
    }

    fn reads(self) -> bool {
        self != Touch::Write
    }
}

/// The first fault of each kind that an instruction's accesses to shared memory show.
#[derive(Default)]
struct SharedFaults {
    conflict: Option<(u32, Conflict)>,
    uninitialised: Option<(u32, u32)>,
    barrier: Option<(u32, u32)>,
}

impl Cluster<'_> {
    /// Checks and records a warp's access to the shared memory of a block, `bytes` a lane. Returns the lanes
    /// whose access is possible.
    pub fn touch_shared(
        &mut self,
        w: usize,
        pc: u32,
        block: usize,
        addresses: &Row,
        mask: u32,
        bytes: u32,
        touch: Touch,
    ) -> u32 {
        let checks = self.launch.config.checks;
        if checks.costs {
            let wavefronts = banks::shared_wavefronts(addresses, mask, bytes);
            self.tally.counters[pc as usize].shared(wavefronts);
        }
        let ok = self.possible_shared(w, pc, block, addresses, mask, bytes);
        if !checks.shared {
            return ok;
        }
        let (shared, clocks) = (&mut self.blocks[block].shared, &self.warps[w].clocks);
        let mut left = ok;
        if touch == Touch::Write && bytes == 4 && ok == u32::MAX {
            // Most words are parts of fragments, whose rows are whole cells that everybody is done with.
            left = !shared.write_quads(addresses, clocks, pc);
            if left == 0 {
                return ok;
            }
        }
        let mut faults = SharedFaults::default();
        let mut visit = |cell: u32, bits: u16, lane: u32, lanes: Lanes| {
            if shared.is_barrier(cell, bits) {
                faults.barrier.get_or_insert((lane, cell * CELL + bits.trailing_zeros()));
            }
            if touch.reads() && !shared.initialised(cell, bits) {
                faults.uninitialised.get_or_insert((lane, cell));
            }
            let access = Access { clocks, proxy: Proxy::Generic, stamp: clocks.stamp(lanes), lanes, pc };
            let conflict = if touch.writes() {
                shared.initialise(cell, bits);
                shared.shadow.write(cell, bits, &access)
            } else {
                shared.shadow.read(cell, bits, &access)
            };
            if let Some(conflict) = conflict {
                faults.conflict.get_or_insert((lane, conflict));
            }
        };
        if bytes == 16 {
            for_lanes(left, |l| visit(addresses[l] / CELL, 0xFFFF, l as u32, Lanes::one(l as u32)));
        } else {
            for_runs(addresses, left, bytes, touch == Touch::Read, visit);
        }
        self.report_shared_faults(w, pc, block, touch, &faults);
        ok
    }

    fn report_shared_faults(&mut self, w: usize, pc: u32, block: usize, touch: Touch, faults: &SharedFaults) {
        if let Some((lane, conflict)) = faults.conflict {
            self.report_conflict(w, lane, pc, block, touch.writes(), conflict);
        }
        if let Some((lane, cell)) = faults.uninitialised {
            self.report(w, lane, pc, FindingKind::UninitialisedShared, Severity::Error, |c| {
                (
                    "a read of shared memory that nothing was written to".to_string(),
                    Some(c.shared_place(block, cell * CELL)),
                )
            });
        }
        if let Some((lane, address)) = faults.barrier {
            self.report(w, lane, pc, FindingKind::MbarrierMisuse, Severity::Error, |c| {
                ("an ordinary access to an mbarrier in use".to_string(), Some(c.shared_place(block, address)))
            });
        }
    }

    /// The lanes whose shared address is aligned and inside, reporting the others.
    pub fn possible_shared(
        &mut self,
        w: usize,
        pc: u32,
        block: usize,
        addresses: &Row,
        mask: u32,
        bytes: u32,
    ) -> u32 {
        let shared = &self.blocks[block].shared;
        if mask == u32::MAX {
            let (bits, last) = vectors::extremes(self.launch.level, addresses);
            if bits & (bytes - 1) == 0 && last < shared.dense() && last + bytes <= shared.dense() {
                return mask;
            }
        }
        let mut ok = mask;
        for_lanes(mask, |l| {
            let address = addresses[l];
            let fine = address.is_multiple_of(bytes) && shared.contains(address, bytes);
            ok &= !(u32::from(!fine) << l);
        });
        if ok != mask {
            let lane = (mask & !ok).trailing_zeros();
            let address = addresses[lane as usize];
            let (kind, what) = if address.is_multiple_of(bytes) {
                (
                    FindingKind::OutOfBounds,
                    format!("{bytes} bytes outside of the allocations of shared memory"),
                )
            } else {
                (FindingKind::Misaligned, format!("address {address:#x} is not a multiple of {bytes}"))
            };
            self.report(w, lane, pc, kind, Severity::Error, |c| (what, Some(c.shared_place(block, address))));
        }
        ok
    }

    /// Checks and records a warp's access to global memory, `bytes` a lane. Returns the lanes whose access is
    /// possible.
    pub fn touch_global(
        &mut self,
        w: usize,
        pc: u32,
        addresses: &Row64,
        mask: u32,
        bytes: u32,
        touch: Touch,
    ) -> u32 {
        let checks = self.launch.config.checks;
        self.check_grid_wait(w, pc, mask);
        let lines = if bytes == CELL { vectors::whole_lines(self.launch.level, addresses) } else { 0 };
        if checks.costs {
            let four = if mask & lines == u32::MAX { lines::sectors_of_four(addresses) } else { None };
            let sectors = four.unwrap_or_else(|| banks::sectors(addresses, mask));
            self.tally.counters[pc as usize].global(sectors, mask.count_ones() * bytes);
        }
        let memory = self.launch.memory;
        let clocks = &self.warps[w].clocks;
        let mut ok = mask;
        let mut left = mask;
        if bytes == CELL && checks.global {
            left = match touch {
                Touch::Read => self.read_cells(w, pc, addresses, lines, mask),
                Touch::Write => self.touch_lines(w, pc, addresses, lines, mask, true),
                Touch::Atomic => mask,
            };
            if left == 0 {
                return ok;
            }
        }
        let mut bad = None;
        let mut uninitialised: Option<u32> = None;
        let mut conflict: Option<(u32, u64, GlobalConflict)> = None;
        let mut shard: Option<(u64, crate::races::global_shadow::ShardGuard<'_>)> = None;
        while left != 0 {
            let l = left.trailing_zeros() as usize;
            let address = addresses[l];
            // Lanes that fill a cell in order are looked at together.
            let mut lanes_here = 1;
            if (2..CELL).contains(&bytes) && address.is_multiple_of(u64::from(CELL)) {
                while lanes_here < (CELL / bytes) as usize
                    && l + lanes_here < 32
                    && left >> (l + lanes_here) & 1 == 1
                    && addresses[l + lanes_here] == address + (lanes_here as u32 * bytes) as u64
                {
                    lanes_here += 1;
                }
            }
            let total = bytes * lanes_here as u32;
            let aligned = address & u64::from(bytes - 1) == 0;
            let mut found = if aligned { memory.find(address, u64::from(total)) } else { None };
            if found.is_none() && lanes_here > 1 {
                lanes_here = 1;
                found = memory.find(address, u64::from(bytes));
            }
            let total = bytes * lanes_here as u32;
            left &= !((((1u64 << lanes_here) - 1) << l) as u32);
            let Some((region, offset)) = found else {
                ok &= !(1 << l);
                bad.get_or_insert(l);
                continue;
            };
            if !checks.global {
                continue;
            }
            if touch.reads() && !region.all_initialised(offset, total) {
                let lane = (0..lanes_here as u32)
                    .find(|i| !region.all_initialised(offset + (i * bytes) as usize, bytes));
                uninitialised.get_or_insert(l as u32 + lane.unwrap_or(0));
            }
            let lanes = if lanes_here > 1 { Lanes::run(l as u32, bytes, 1) } else { Lanes::one(l as u32) };
            let by = Accessor {
                access: GlobalAccess {
                    cluster: self.id,
                    stamp: clocks.stamp(lanes),
                    pc,
                    atomic: touch == Touch::Atomic,
                },
                clocks,
                lanes,
                proxy: Proxy::Generic,
            };
            let guard = match &mut shard {
                Some((base, guard)) if *base == region.base && guard.covers(offset) => guard,
                other => {
                    // The old lock is given up before the new one is taken.
                    *other = None;
                    &mut other.insert((region.base, region.races.lock(offset, self.launch.id))).1
                }
            };
            if let Some(found) = guard.access(offset, total, touch.writes(), &by) {
                conflict.get_or_insert((l as u32, region.base + found.offset as u64, found));
            }
        }
        drop(shard);
        if let Some(lane) = bad {
            self.report_bad_global(w, lane as u32, pc, addresses[lane], bytes);
        }
        if let Some(lane) = uninitialised {
            let address = addresses[lane as usize];
            self.report(w, lane, pc, FindingKind::UninitialisedGlobal, Severity::Error, |c| {
                (
                    "a read of global memory that nothing was written to".to_string(),
                    Some(c.global_place(address)),
                )
            });
        }
        if let Some((lane, address, found)) = conflict {
            self.report_global_conflict(w, lane, pc, address, touch.writes(), found);
        }
        ok
    }

    /// Records the reads of whole cells that hold values and that nobody has written in this launch, which is most of
    /// what there is. Returns the other lanes.
    fn read_cells(&self, w: usize, pc: u32, addresses: &Row64, lines: u32, mask: u32) -> u32 {
        let mut left = self.touch_lines(w, pc, addresses, lines, mask, false);
        let mut todo = left;
        while todo != 0 {
            let first = addresses[todo.trailing_zeros() as usize];
            let Some((region, offset)) = self.launch.memory.find(first, u64::from(CELL)) else {
                todo &= todo - 1;
                continue;
            };
            // All lanes whose cells are in the same shard, under one lock.
            let mut guard = region.races.lock(offset, self.launch.id);
            for_lanes(todo, |l| {
                let offset = addresses[l].wrapping_sub(region.base) as usize;
                if !guard.covers(offset) {
                    return;
                }
                todo &= !(1 << l);
                let whole = offset.is_multiple_of(CELL as usize) && offset + CELL as usize <= region.len;
                if whole
                    && region.cell_initialised(offset)
                    && guard.read_unwritten(offset, &self.by_lane(w, pc, l))
                {
                    left &= !(1 << l);
                }
            });
        }
        left
    }

    /// An access that a lane makes now.
    #[inline(always)]
    fn by_lane(&self, w: usize, pc: u32, lane: usize) -> GlobalAccess {
        let stamp = self.warps[w].clocks.stamp(Lanes::one(lane as u32));
        GlobalAccess { cluster: self.id, stamp, pc, atomic: false }
    }

    /// Records the accesses of eight lanes that have a line of cells, one cell after the other: reads of what holds values
    /// and was not written in this launch, and first writes. Returns the other lanes.
    fn touch_lines(&self, w: usize, pc: u32, addresses: &Row64, lines: u32, mask: u32, write: bool) -> u32 {
        let mut left = mask;
        let mut locked: Option<(u64, crate::races::global_shadow::ShardGuard<'_>)> = None;
        for eight in 0..4 {
            let (first, lanes) = (addresses[8 * eight], 0xFF << (8 * eight));
            if mask & lines & lanes != lanes {
                continue;
            }
            let Some((region, offset)) = self.launch.memory.find(first, LINE as u64) else { continue };
            let guard = match &mut locked {
                Some((base, guard)) if *base == region.base && guard.covers(offset) => guard,
                other => {
                    // The old lock is given up before the new one is taken.
                    *other = None;
                    &mut other.insert((region.base, region.races.lock(offset, self.launch.id))).1
                }
            };
            let access = self.by_lane(w, pc, 8 * eight);
            let noted = if write {
                guard.write_line(offset, &access)
            } else {
                region.line_initialised(offset) && guard.read_line(offset, &access)
            };
            if noted {
                left &= !lanes;
            }
        }
        left
    }

    /// `griddepcontrol.wait`: the grid before has completed, for these lanes.
    pub fn grid_wait(&mut self, w: usize, mask: u32) {
        let before = self.agents.grid_before();
        let warp = &mut self.warps[w];
        warp.clocks.acquire_completion(mask, warp.live, before, 1);
    }

    /// A kernel that waits for the grid before it may run beside that grid until then: no thread may touch global
    /// memory before it has waited, or has been told so by one that has.
    #[inline]
    pub fn check_grid_wait(&mut self, w: usize, pc: u32, mask: u32) {
        if self.launch.program.waits_for_grid {
            let early = self.warps[w].clocks.unaware(mask, self.agents.grid_before(), 1);
            if early != 0 {
                let message = "the grid before this one may still be at work in global memory".to_string();
                self.report_error(w, early.trailing_zeros(), pc, FindingKind::EarlyGridAccess, message);
            }
        }
    }

    #[cold]
    pub fn report_bad_global(&mut self, w: usize, lane: u32, pc: u32, address: u64, bytes: u32) {
        let (kind, what) = if address.is_multiple_of(u64::from(bytes)) {
            (FindingKind::OutOfBounds, format!("{bytes} bytes outside of every allocation of global memory"))
        } else {
            (FindingKind::Misaligned, format!("address {address:#x} is not a multiple of {bytes}"))
        };
        self.report(w, lane, pc, kind, Severity::Error, |c| (what, Some(c.global_place(address))));
    }

    /// `ld`.
    pub fn load(
        &mut self,
        w: usize,
        pc: u32,
        mask: u32,
        space: Space,
        ty: MemTy,
        count: u32,
        order: Order,
        dst: &[Slot],
        src: &[Slot],
    ) -> Step {
        let size = ty.bytes();
        // The usual loads of one word or half a lane go straight into a row.
        if count == 1
            && order == Order::Weak
            && space == Space::Global
            && matches!(ty, MemTy::B16 | MemTy::B32 | MemTy::F32)
        {
            let addresses = self.global_addresses(w, src[0]);
            let ok = self.touch_global(w, pc, &addresses, mask, size, Touch::Read);
            let row = self.gather(&addresses, ok, size);
            self.put(w, dst[0], mask, &row);
            return Step::Next;
        }
        let mut values = [[POISON; 32]; 4];
        match space {
            Space::Param => self.load_params(w, pc, src[0], size, count, &mut values),
            Space::Global => {
                let addresses = self.global_addresses(w, src[0]);
                let ok = self.touch_global(w, pc, &addresses, mask, size * count, Touch::Read);
                let memory = self.launch.memory;
                for_lanes(ok, |l| {
                    if let Some((region, offset)) = memory.find(addresses[l], u64::from(size * count)) {
                        for e in 0..count as usize {
                            values[e][l] = region.load(offset + e * size as usize, size);
                        }
                    }
                });
                self.acquire_global(w, mask, order, &addresses);
            }
            Space::Shared | Space::SharedCluster => {
                self.by_block(w, space, src[0], mask, |c, block, addresses, lanes| {
                    let ok = c.touch_shared(w, pc, block, addresses, lanes, size * count, Touch::Read);
                    let shared = &c.blocks[block].shared;
                    match (size, count) {
                        (4, 1) => for_lanes(ok, |l| values[0][l] = u64::from(shared.word(addresses[l]))),
                        (4, 4) => for_lanes(ok, |l| {
                            let words = shared.words(addresses[l]);
                            for e in 0..4 {
                                values[e][l] = u64::from(words[e]);
                            }
                        }),
                        _ => for_lanes(ok, |l| {
                            for e in 0..count {
                                values[e as usize][l] = shared.load(addresses[l] + e * size, size);
                            }
                        }),
                    }
                    c.acquire_shared(w, block, lanes, order, addresses);
                });
            }
        }
        for (slot, row) in dst.iter().zip(&values) {
            match slot {
                Slot::Sink => {}
                Slot::Long(d) => self.warps[w].regs.set64(*d, mask, row),
                slot => {
                    let narrow: Row = match ty {
                        MemTy::S8 => row.map(|v| i32::from(v as u8 as i8) as u32),
                        _ => row.map(|v| v as u32 & (u64::MAX >> (64 - 8 * size)) as u32),
                    };
                    self.put(w, *slot, mask, &narrow);
                }
            }
        }
        // A load that others' stores are awaited with lets them run.
        if order == Order::Weak { Step::Next } else { Step::Yield }
    }

    /// `ld.global.nc`, before it loads: its promise is that nobody writes the memory while the kernel runs.
    pub fn check_read_only(&mut self, w: usize, pc: u32, mask: u32, bytes: u32, address: Slot) {
        let addresses = self.global_addresses(w, address);
        let memory = self.launch.memory;
        let mut broken = None;
        for_lanes(mask, |l| {
            // What is misaligned or outside is reported by the load.
            let aligned = addresses[l].is_multiple_of(u64::from(bytes));
            if let Some((region, offset)) = memory.find(addresses[l], u64::from(bytes)).filter(|_| aligned) {
                let mut guard = region.races.lock(offset, self.launch.id);
                if let Some(found) = guard.read_only(offset, bytes, &self.by_lane(w, pc, l)) {
                    broken.get_or_insert((l as u32, region.base + found.offset as u64, found));
                }
            }
        });
        if let Some((lane, address, found)) = broken {
            self.report_global_conflict(w, lane, pc, address, false, found);
        }
    }

    /// One value of 2 or 4 bytes for each lane of the mask.
    fn gather(&self, addresses: &Row64, mask: u32, size: u32) -> Row {
        let mut row = [POISON as u32 & (u64::MAX >> (64 - 8 * size)) as u32; 32];
        let memory = self.launch.memory;
        let Some(first) = addresses.get(mask.trailing_zeros() as usize) else { return row };
        let Some(region) = memory.near(*first) else { return row };
        for_lanes(mask, |l| {
            // Lanes usually read one allocation; the checks before have seen that the address is inside of some.
            let offset = addresses[l].wrapping_sub(region.base);
            if offset < region.len as u64 {
                row[l] = region.load(offset as usize, size) as u32;
            } else if let Some((other, offset)) = memory.find(addresses[l], u64::from(size)) {
                row[l] = other.load(offset, size) as u32;
            }
        });
        row
    }

    fn load_params(
        &mut self,
        w: usize,
        pc: u32,
        src: Slot,
        size: u32,
        count: u32,
        values: &mut [[u64; 32]; 4],
    ) {
        let Slot::Param(offset) = src else {
            self.unsupported(pc, "parameters are read by name");
            return;
        };
        let start = offset as usize;
        let Some(bytes) = self.launch.params.get(start..start + (size * count) as usize) else {
            let message = format!("parameter bytes {start}.. of {}", self.launch.params.len());
            self.report_error(w, 0, pc, FindingKind::OutOfBounds, message);
            return;
        };
        for (e, chunk) in bytes.chunks_exact(size as usize).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            values[e] = [u64::from_le_bytes(word); 32];
        }
    }

    /// Splits lanes by the block that their address belongs to; usually all are of one.
    pub fn by_block(
        &mut self,
        w: usize,
        space: Space,
        operand: Slot,
        mask: u32,
        mut f: impl FnMut(&mut Self, usize, &Row, u32),
    ) {
        let own = self.warps[w].block;
        if space == Space::Shared {
            let addresses = self.shared_addresses(w, operand);
            return f(self, own, &addresses, mask);
        }
        let raw = self.ranked_addresses(w, operand);
        let mut left = mask;
        while left != 0 {
            let (block, _) = self.cluster_address(w, raw[left.trailing_zeros() as usize]);
            let mut lanes = 0;
            let mut addresses = [0; 32];
            for_lanes(left, |l| {
                let (b, address) = self.cluster_address(w, raw[l]);
                if b == block {
                    lanes |= 1 << l;
                    addresses[l] = address;
                }
            });
            left &= !lanes;
            self.check_block_alive(w, self.warps[w].pc, lanes.trailing_zeros(), block);
            f(self, block, &addresses, lanes);
        }
    }

    /// `st`.
    pub fn store(
        &mut self,
        w: usize,
        pc: u32,
        mask: u32,
        space: Space,
        ty: MemTy,
        count: u32,
        order: Order,
        src: &[Slot],
    ) {
        let size = ty.bytes();
        let mut values = [[0u64; 32]; 4];
        for (slot, row) in src[1..=count as usize].iter().zip(&mut values) {
            *row = match slot {
                Slot::Long(_) => self.row64(w, *slot),
                slot => self.row(w, *slot).map(u64::from),
            };
        }
        match space {
            Space::Param => self.unsupported(pc, "parameters cannot be written"),
            Space::Global => {
                let addresses = self.global_addresses(w, src[0]);
                self.release_global(w, mask, order, &addresses);
                let distinct = without_repeats(&addresses, &values[..count as usize], mask);
                let touched = self.touch_global(w, pc, &addresses, distinct, size * count, Touch::Write);
                let memory = self.launch.memory;
                let mut left = touched | mask & !distinct;
                if size == 4 && count == 4 {
                    left = self.store_lines(&addresses, &values, left);
                }
                let mut written = Written::default();
                for_lanes(left, |l| {
                    let Some((region, offset)) = memory.find(addresses[l], u64::from(size * count)) else {
                        return;
                    };
                    written.add(region, offset, size * count);
                    if size == 4 && offset.is_multiple_of(8) && count.is_multiple_of(2) {
                        // Two words at once are one store to the host, too.
                        for e in (0..count as usize).step_by(2) {
                            region.put(offset + e * 4, 8, values[e + 1][l] << 32 | values[e][l]);
                        }
                        return;
                    }
                    for e in 0..count as usize {
                        region.put(offset + e * size as usize, size, values[e][l]);
                    }
                });
                written.note();
            }
            Space::Shared | Space::SharedCluster => {
                self.by_block(w, space, src[0], mask, |c, block, addresses, lanes| {
                    c.release_shared(w, block, lanes, order, addresses);
                    let distinct = without_repeats(addresses, &values[..count as usize], lanes);
                    let ok = c.touch_shared(w, pc, block, addresses, distinct, size * count, Touch::Write);
                    let shared = &mut c.blocks[block].shared;
                    for_lanes(ok, |l| {
                        for e in 0..count {
                            match size {
                                4 => shared.store_word(addresses[l] + 4 * e, values[e as usize][l] as u32),
                                _ => shared.store(addresses[l] + e * size, size, values[e as usize][l]),
                            }
                        }
                    });
                });
            }
        }
    }

    /// Stores the lines that eight lanes have, one cell after the other. Returns the other lanes.
    fn store_lines(&self, addresses: &Row64, values: &[Row64; 4], mask: u32) -> u32 {
        let lines = vectors::whole_lines(self.launch.level, addresses);
        let mut left = mask;
        for eight in 0..4 {
            let (first, lanes) = (8 * eight, 0xFF << (8 * eight));
            if left & lines & lanes == lanes
                && let Some((region, offset)) = self.launch.memory.find(addresses[first], LINE as u64)
            {
                let mut line = [0; LINE / 8];
                for (i, words) in line.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    let value = |e: usize| values[e][first + i];
                    *words = [value(1) << 32 | value(0), value(3) << 32 | value(2)];
                }
                region.store_line(offset, &line);
                left &= !lanes;
            }
        }
        left
    }

    /// `atom` and `red`.
    pub fn atomic(
        &mut self,
        w: usize,
        pc: u32,
        mask: u32,
        space: Space,
        op: AtomOp,
        ty: AtomTy,
        count: u32,
        sem: AtomSem,
        dst: &[Slot],
        src: &[Slot],
    ) {
        let size = atom_bytes(ty);
        let operand = |c: &Self, slot: Slot| -> Row64 {
            match slot {
                Slot::Long(_) => c.row64(w, slot),
                slot => c.row(w, slot).map(u64::from),
            }
        };
        let (compare, first) = if op == AtomOp::Cas { (operand(self, src[1]), 2) } else { ([0; 32], 1) };
        let operands: Vec<Row64> =
            src[first..first + count as usize].iter().map(|&slot| operand(self, slot)).collect();
        let mut old = [POISON; 32];
        let order = match sem {
            AtomSem::Relaxed => (false, false),
            AtomSem::Acquire => (true, false),
            AtomSem::Release => (false, true),
            AtomSem::AcqRel => (true, true),
        };
        match space {
            Space::Param => self.unsupported(pc, "parameters cannot be written"),
            Space::Global => {
                let addresses = self.global_addresses(w, src[0]);
                self.publish_global(w, mask, order.1, &addresses);
                let ok = self.touch_global(w, pc, &addresses, mask, size * count, Touch::Atomic);
                let memory = self.launch.memory;
                for_lanes(ok, |l| {
                    if let Some((region, offset)) = memory.find(addresses[l], u64::from(size * count)) {
                        for (e, row) in operands.iter().enumerate() {
                            let at = offset + e * size as usize;
                            let change = |v| apply(op, ty, v, row[l], compare[l], true);
                            let before = region.update(at, size, change);
                            region.note_written(at, size);
                            old[l] = before;
                        }
                    }
                });
                self.observe_global(w, mask, order.0, &addresses);
            }
            Space::Shared | Space::SharedCluster => {
                self.by_block(w, space, src[0], mask, |c, block, addresses, lanes| {
                    c.publish_shared(w, block, lanes, order.1, addresses);
                    let ok = c.touch_shared(w, pc, block, addresses, lanes, size * count, Touch::Atomic);
                    let shared = &mut c.blocks[block].shared;
                    for_lanes(ok, |l| {
                        for (e, row) in operands.iter().enumerate() {
                            let at = addresses[l] + e as u32 * size;
                            old[l] = shared.load(at, size);
                            shared.store(at, size, apply(op, ty, old[l], row[l], compare[l], false));
                        }
                    });
                    c.observe_shared(w, block, lanes, order.0, addresses);
                });
            }
        }
        match dst.first() {
            None | Some(Slot::Sink) => {}
            Some(Slot::Long(d)) => self.warps[w].regs.set64(*d, mask, &old),
            Some(slot) => self.put(w, *slot, mask, &old.map(|v| v as u32)),
        }
    }

    fn acquire_global(&mut self, w: usize, mask: u32, order: Order, addresses: &Row64) {
        if order != Order::Weak {
            self.observe_global(w, mask, matches!(order, Order::Acquire(_)), addresses);
        }
    }

    fn release_global(&mut self, w: usize, mask: u32, order: Order, addresses: &Row64) {
        if order != Order::Weak {
            self.publish_global(w, mask, matches!(order, Order::Release(_)), addresses);
        }
    }

    fn acquire_shared(&mut self, w: usize, block: usize, mask: u32, order: Order, addresses: &Row) {
        if order != Order::Weak {
            self.observe_shared(w, block, mask, matches!(order, Order::Acquire(_)), addresses);
        }
    }

    fn release_shared(&mut self, w: usize, block: usize, mask: u32, order: Order, addresses: &Row) {
        if order != Order::Weak {
            self.publish_shared(w, block, mask, matches!(order, Order::Release(_)), addresses);
        }
    }

    /// A strong write to words of global memory publishes: what the warp has done if it is a release, else what
    /// it had done at its last fence.
    fn publish_global(&mut self, w: usize, mask: u32, release: bool, addresses: &Row64) {
        let (id, launch) = (self.id, self.launch);
        let warp = &mut self.warps[w];
        let published = if release {
            warp.clocks.publish_abroad(id, mask, warp.live)
        } else if let Some(fenced) = &warp.fenced {
            fenced.abroad.clone()
        } else {
            return;
        };
        self.progress += 1;
        for_lanes(mask, |l| launch.sync.release(addresses[l], &published));
    }

    /// A strong read of words of global memory takes in what was published there: at once if it is an acquire,
    /// else at the next fence.
    fn observe_global(&mut self, w: usize, mask: u32, acquire: bool, addresses: &Row64) {
        let launch = self.launch;
        let warp = &mut self.warps[w];
        for_lanes(mask, |l| {
            if let Some(published) = launch.sync.acquire(addresses[l]) {
                if acquire {
                    warp.clocks.acquire_abroad(&published);
                } else {
                    crate::races::global_shadow::join(&mut warp.observed.abroad, &published);
                }
            }
        });
    }

    fn publish_shared(&mut self, w: usize, block: usize, mask: u32, release: bool, addresses: &Row) {
        let warp = &mut self.warps[w];
        let mut published = ClockPair::default();
        if release {
            warp.clocks.publish(mask, warp.live, &mut published);
        } else if let Some(fenced) = &warp.fenced {
            published.join(&fenced.pair);
        } else {
            return;
        }
        self.progress += 1;
        let sync = &mut self.blocks[block].sync;
        for_lanes(mask, |l| sync.entry(addresses[l]).or_default().join(&published));
    }

    fn observe_shared(&mut self, w: usize, block: usize, mask: u32, acquire: bool, addresses: &Row) {
        let (sync, warp) = (&self.blocks[block].sync, &mut self.warps[w]);
        for_lanes(mask, |l| {
            if let Some(published) = sync.get(&addresses[l]) {
                if acquire {
                    warp.clocks.acquire(mask, warp.live, published);
                } else {
                    warp.observed.pair.join(published);
                }
            }
        });
    }

    /// `fence` and `membar`: what strong reads have observed is taken in, and strong writes from here on publish
    /// what the warp has done so far.
    pub fn fence(&mut self, w: usize, mask: u32) {
        let id = self.id;
        let warp = &mut self.warps[w];
        let observed = std::mem::take(&mut warp.observed);
        warp.clocks.acquire_abroad(&observed.abroad);
        warp.clocks.acquire(mask, warp.live, &observed.pair);
        let mut fenced = crate::machine::warp::Strong::default();
        warp.clocks.publish(mask, warp.live, &mut fenced.pair);
        fenced.abroad = warp.clocks.publish_abroad(id, mask, warp.live);
        warp.fenced = Some(Box::new(fenced));
    }
}

/// Groups the lanes of an access of less than 16 bytes by the cells they touch, and calls `visit` with the cell,
/// its bytes, a lane to name, and which lane has which byte.
fn for_runs(
    addresses: &Row,
    mask: u32,
    bytes: u32,
    merge_repeats: bool,
    mut visit: impl FnMut(u32, u16, u32, Lanes),
) {
    // Lanes in the order of their addresses.
    let mut order = [0u64; 32];
    let mut count = 0;
    let mut sorted = true;
    for_lanes(mask, |l| {
        let key = u64::from(addresses[l]) << 5 | l as u64;
        sorted &= count == 0 || order[count - 1] < key;
        order[count] = key;
        count += 1;
    });
    if !sorted {
        order[..count].sort_unstable();
    }
    let per_cell = (CELL / bytes) as usize;
    let at = |i: usize| ((order[i] >> 5) as u32, (order[i] & 31) as u32);
    let mut i = 0;
    while i < count {
        let (address, lane) = at(i);
        // Lanes at even distances that fill a cell in order are one access to the whole cell.
        if bytes > 1 && address % CELL == 0 && i + per_cell <= count {
            let distance = at(i + 1).1.wrapping_sub(lane);
            let fills = matches!(distance, 1 | 2 | 4 | 8)
                && (1..per_cell).all(|j| {
                    let (next, other) = at(i + j);
                    next == address + j as u32 * bytes && other == lane + j as u32 * distance
                });
            if fills {
                visit(address / CELL, 0xFFFF, lane, Lanes::run(lane, bytes, distance));
                i += per_cell;
                continue;
            }
        }
        // Lanes that read the same bytes are one access.
        let mut end = i + 1;
        while merge_repeats && end < count && at(end).0 == address {
            end += 1;
        }
        let lanes = if end == i + 1 { Lanes::one(lane) } else { Lanes::ALL };
        visit(address / CELL, cell_mask(address % CELL, bytes), lane, lanes);
        i = end;
    }
}

/// The lanes without those that write the same values to the same address as an earlier lane does.
fn without_repeats<A: Copy + PartialEq + Into<u64>>(addresses: &[A; 32], values: &[Row64], mask: u32) -> u32 {
    // Addresses that fall into different places of a small table are different.
    let mut table = [0u64; 32];
    let mut apart = true;
    for_lanes(mask, |l| {
        let address: u64 = addresses[l].into();
        let place = ((address / 2) ^ (address >> 12)) as usize % 2048;
        let bit = 1 << (place % 64);
        apart &= table[place / 64] & bit == 0;
        table[place / 64] |= bit;
    });
    if apart {
        return mask;
    }
    let mut distinct = mask;
    for_lanes(mask, |l| {
        let repeats = |earlier: usize| {
            distinct >> earlier & 1 == 1
                && addresses[earlier] == addresses[l]
                && values.iter().all(|row| row[earlier] == row[l])
        };
        if (0..l).any(repeats) {
            distinct &= !(1 << l);
        }
    });
    distinct
}

/// The bytes of an atomic's element.
pub const fn atom_bytes(ty: AtomTy) -> u32 {
    match ty {
        AtomTy::F16 | AtomTy::Bf16 => 2,
        AtomTy::B64 | AtomTy::U64 | AtomTy::S64 => 8,
        _ => 4,
    }
}

/// The new value of an atomic. f32 sums in global memory flush subnormals.
pub fn apply(op: AtomOp, ty: AtomTy, old: u64, operand: u64, compare: u64, flush: bool) -> u64 {
    let (a, b) = (old as u32, operand as u32);
    match ty {
        AtomTy::F32 => {
            let (x, y) = (f32::from_bits(a), f32::from_bits(b));
            u64::from(match op {
                AtomOp::Exch => b,
                AtomOp::Min => num::canonical(num::min(x, y)),
                AtomOp::Max => num::canonical(num::max(x, y)),
                _ if flush => num::canonical(num::flush(num::flush(x) + num::flush(y))),
                _ => num::canonical(x + y),
            })
        }
        AtomTy::F16 | AtomTy::Bf16 | AtomTy::F16x2 | AtomTy::Bf16x2 => {
            let one = |x: u16, y: u16| -> u16 {
                let half = matches!(ty, AtomTy::F16 | AtomTy::F16x2);
                let widen = |v: u16| if half { num::f16_to_f32(v) } else { num::bf16_to_f32(v) };
                let (x, y) = (widen(x), widen(y));
                let new = match op {
                    AtomOp::Min => num::min(x, y),
                    AtomOp::Max => num::max(x, y),
                    _ => x + y,
                };
                if half { num::f32_to_f16(new) } else { num::f32_to_bf16(new) }
            };
            let lo = one(a as u16, b as u16);
            if matches!(ty, AtomTy::F16 | AtomTy::Bf16) {
                u64::from(lo)
            } else {
                u64::from(one((a >> 16) as u16, (b >> 16) as u16)) << 16 | u64::from(lo)
            }
        }
        AtomTy::B64 | AtomTy::U64 | AtomTy::S64 => match op {
            AtomOp::Add => old.wrapping_add(operand),
            AtomOp::Min if ty == AtomTy::S64 => (old as i64).min(operand as i64) as u64,
            AtomOp::Min => old.min(operand),
            AtomOp::Max if ty == AtomTy::S64 => (old as i64).max(operand as i64) as u64,
            AtomOp::Max => old.max(operand),
            AtomOp::And => old & operand,
            AtomOp::Or => old | operand,
            AtomOp::Xor => old ^ operand,
            AtomOp::Exch => operand,
            AtomOp::Cas if old == compare => operand,
            AtomOp::Cas => old,
            AtomOp::Inc => {
                if old >= operand {
                    0
                } else {
                    old + 1
                }
            }
            AtomOp::Dec => {
                if old == 0 || old > operand {
                    operand
                } else {
                    old - 1
                }
            }
        },
        AtomTy::B32 | AtomTy::U32 | AtomTy::S32 => u64::from(match op {
            AtomOp::Add => a.wrapping_add(b),
            AtomOp::Min if ty == AtomTy::S32 => (a as i32).min(b as i32) as u32,
            AtomOp::Min => a.min(b),
            AtomOp::Max if ty == AtomTy::S32 => (a as i32).max(b as i32) as u32,
            AtomOp::Max => a.max(b),
            AtomOp::And => a & b,
            AtomOp::Or => a | b,
            AtomOp::Xor => a ^ b,
            AtomOp::Exch => b,
            AtomOp::Cas if a == compare as u32 => b,
            AtomOp::Cas => a,
            AtomOp::Inc => {
                if a >= b {
                    0
                } else {
                    a + 1
                }
            }
            AtomOp::Dec => {
                if a == 0 || a > b {
                    b
                } else {
                    a - 1
                }
            }
        }),
    }
}
