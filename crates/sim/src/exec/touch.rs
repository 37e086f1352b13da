//! The checks that every access to memory passes, and the record of it in the shadows.

use crate::exec::for_lanes;
use crate::findings::{FindingKind, Severity};
use crate::machine::Cluster;
use crate::machine::regs::{Row, Row64};
use crate::memory::shared::cell_mask;
use crate::memory::{banks, lines};
use crate::program::Slot;
use crate::races::clock::Proxy;
use crate::races::global_shadow::{Accessor, GlobalAccess, GlobalConflict, LINE};
use crate::races::lanes::Lanes;
use crate::races::shared_shadow::{CELL, SharedAccess, SharedConflict};
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
    conflict: Option<(u32, SharedConflict)>,
    uninitialised: Option<(u32, u32)>,
    barrier: Option<(u32, u32)>,
}

impl Cluster<'_> {
    /// Checks and records a warp's access to the shared memory of a block, `bytes` per lane. Returns the lanes
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
            // Most words are parts of fragments: four lanes fill a whole cell, after everybody's accesses to it.
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
            let access =
                SharedAccess { clocks, proxy: Proxy::Generic, stamp: clocks.stamp(lanes), lanes, pc };
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

    /// Checks and records a warp's access to global memory, `bytes` per lane. Returns the lanes whose access is
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
        self.check_in_flight(w, pc, mask, addresses, bytes, touch.writes());
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
            // Lanes that fill a cell in order are checked together.
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
                    &mut other.insert((region.base, region.races.lock(offset, self.launch.era))).1
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

    /// Checks and records the read of a lane whose copy reads only some of its bytes and fills the rest with zeros.
    pub fn touch_part(&mut self, w: usize, pc: u32, lane: usize, address: u64, bytes: u32) {
        if self.beside_others(w, 1 << lane) != 0 {
            self.check_run_in_flight(w, pc, lane as u32, (address, u64::from(bytes)), false);
        }
        if !self.launch.config.checks.global {
            return;
        }
        let Some((region, offset)) = self.launch.memory.find(address, u64::from(bytes)) else { return };
        let lanes = Lanes::one(lane as u32);
        let access = self.by_lane(w, pc, lane);
        let by = Accessor { access, clocks: &self.warps[w].clocks, lanes, proxy: Proxy::Generic };
        let found = region.races.lock(offset, self.launch.era).access(offset, bytes, false, &by);
        if let Some(found) = found {
            let address = region.base + found.offset as u64;
            self.report_global_conflict(w, lane as u32, pc, address, false, found);
        }
    }

    /// Records the reads of whole cells that hold values and that nobody has written in this launch: the usual case.
    /// Returns the other lanes.
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
            let mut guard = region.races.lock(offset, self.launch.era);
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
                    &mut other.insert((region.base, region.races.lock(offset, self.launch.era))).1
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

    #[cold]
    pub fn report_bad_global(&mut self, w: usize, lane: u32, pc: u32, address: u64, bytes: u32) {
        let (kind, what) = if address.is_multiple_of(u64::from(bytes)) {
            (FindingKind::OutOfBounds, format!("{bytes} bytes outside of every allocation of global memory"))
        } else {
            (FindingKind::Misaligned, format!("address {address:#x} is not a multiple of {bytes}"))
        };
        self.report(w, lane, pc, kind, Severity::Error, |c| (what, Some(c.global_place(address))));
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
                let mut guard = region.races.lock(offset, self.launch.era);
                if let Some(found) = guard.read_only(offset, bytes, &self.by_lane(w, pc, l)) {
                    broken.get_or_insert((l as u32, region.base + found.offset as u64, found));
                }
            }
        });
        if let Some((lane, address, found)) = broken {
            self.report_global_conflict(w, lane, pc, address, false, found);
        }
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
