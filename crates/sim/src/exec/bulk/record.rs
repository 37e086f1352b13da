//! What a bulk copy does to memory, checked and recorded when it is started.

use crate::exec::bulk::sides::{GlobalSide, SharedSide};
use crate::findings::{FindingKind, Severity};
use crate::machine::Cluster;
use crate::memory::shared::{SharedMemory, for_cells};
use crate::memory::tensor_map::Swizzle;
use crate::races::clock::{Agent, Proxy, Stamp};
use crate::races::global_shadow::{Accessor, GlobalAccess, LINE};
use crate::races::lanes::Lanes;
use crate::races::shared_shadow::{CELL, PAGE, SharedAccess, SharedConflict};

impl Cluster<'_> {
    /// Checks and records what a copy does in shared memory. False where it is not possible.
    pub(super) fn record_side(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        side: SharedSide,
        write: bool,
        proxy: Proxy,
        (agent, clock): (Agent, u32),
    ) -> bool {
        let SharedSide { block, address, .. } = side;
        let bytes = side.extent();
        self.check_block_alive(w, pc, lane, block);
        if !self.blocks[block].shared.contains(address, bytes) {
            self.report(w, lane, pc, FindingKind::OutOfBounds, Severity::Error, |c| {
                let what = format!("{bytes} bytes outside of the allocations of shared memory");
                (what, Some(c.shared_place(block, address)))
            });
            return false;
        }
        if !self.launch.config.checks.shared {
            return true;
        }
        let (shared, clocks) = (&mut self.blocks[block].shared, &self.warps[w].clocks);
        let lanes = Lanes::one(lane);
        let access =
            SharedAccess { clocks, proxy, stamp: Stamp { clock, agent, lanes: Lanes::ALL }, lanes, pc };
        let mut conflict: Option<SharedConflict> = None;
        let mut barrier = None;
        let mut uninitialised = None;
        let mut visit = |shared: &mut SharedMemory, cell: u32, mask: u16| {
            if shared.is_barrier(cell, mask) {
                barrier.get_or_insert(cell * 16);
            }
            let found = if write {
                shared.initialise(cell, mask);
                shared.shadow.write(cell, mask, &access)
            } else {
                if !shared.initialised(cell, mask) {
                    uninitialised.get_or_insert(cell * 16);
                }
                shared.shadow.read(cell, mask, &access)
            };
            conflict = conflict.or(found);
        };
        match (side.pages(), side.swizzle) {
            (Some(pages), _) => {
                for (i, page) in pages.enumerate() {
                    if record_page(shared, page, write, &access) {
                        continue;
                    }
                    let chunks = side.chunks().skip(i * PAGE).take(PAGE);
                    chunks.for_each(|address| visit(shared, address / CELL, 0xFFFF));
                    if write {
                        shared.shadow.unite(page, &access);
                    }
                }
            }
            (None, Swizzle::None) => for_cells(address, bytes, |cell, mask| visit(shared, cell as u32, mask)),
            (None, _) => side.chunks().for_each(|address| visit(shared, address / CELL, 0xFFFF)),
        }
        if let Some(found) = conflict {
            self.report_conflict(w, lane, pc, block, write, found);
        }
        if let Some(address) = barrier {
            self.report(w, lane, pc, FindingKind::MbarrierMisuse, Severity::Error, |c| {
                ("a bulk copy over an mbarrier in use".to_string(), Some(c.shared_place(block, address)))
            });
        }
        if let Some(address) = uninitialised {
            self.report(w, lane, pc, FindingKind::UninitialisedShared, Severity::Error, |c| {
                let what = "a bulk copy of shared memory that nothing was written to".to_string();
                (what, Some(c.shared_place(block, address)))
            });
        }
        true
    }

    /// Checks and records what a copy does in global memory.
    pub(super) fn record_global(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        side: &GlobalSide,
        write: bool,
        atomic: bool,
        (agent, clock): (Agent, u32),
    ) {
        let checks = self.launch.config.checks;
        if self.beside_others(w, 1 << lane) != 0 {
            side.for_runs(|address, bytes| {
                self.check_run_in_flight(w, pc, lane, (address, u64::from(bytes)), write);
            });
        }
        let memory = self.launch.memory;
        let mut outside = None;
        let mut uninitialised = None;
        let mut conflict = None;
        let mut sectors = 0;
        let mut total = 0;
        side.for_runs(|address, bytes| {
            sectors += ((address + u64::from(bytes) - 1) / 32 - address / 32 + 1) as u32;
            total += bytes;
            let Some((region, offset)) = memory.find(address, u64::from(bytes)) else {
                outside.get_or_insert((address, bytes));
                return;
            };
            if !checks.global {
                return;
            }
            let lanes = Lanes::one(lane);
            let by = Accessor {
                access: GlobalAccess {
                    cluster: self.id,
                    stamp: Stamp { clock, agent, lanes: Lanes::ALL },
                    pc,
                    atomic,
                },
                clocks: &self.warps[w].clocks,
                lanes,
                proxy: Proxy::Async,
            };
            let mut at = offset;
            let end = offset + bytes as usize;
            let mut guard = region.races.lock(at, self.launch.era);
            while at < end {
                let count = (16 - at % 16).min(end - at);
                if !guard.covers(at) {
                    drop(guard);
                    guard = region.races.lock(at, self.launch.era);
                }
                if at.is_multiple_of(LINE) && at + LINE <= end {
                    let noted = if write {
                        guard.write_line(at, &by.access)
                    } else {
                        region.line_initialised(at) && guard.read_line(at, &by.access)
                    };
                    if noted {
                        at += LINE;
                        continue;
                    }
                }
                if !write && !region.all_initialised(at, count as u32) {
                    uninitialised.get_or_insert(region.base + at as u64);
                }
                if let Some(found) = guard.access(at, count as u32, write, &by) {
                    conflict.get_or_insert((region.base + found.offset as u64, found));
                }
                at += count;
            }
        });
        if checks.costs {
            self.tally.counters[pc as usize].global(sectors, total);
        }
        if let Some((address, bytes)) = outside {
            self.report(w, lane, pc, FindingKind::OutOfBounds, Severity::Error, |c| {
                let what =
                    format!("a bulk copy of {bytes} bytes outside of every allocation of global memory");
                (what, Some(c.global_place(address)))
            });
        }
        if let Some(address) = uninitialised {
            self.report(w, lane, pc, FindingKind::UninitialisedGlobal, Severity::Error, |c| {
                let what = "a bulk copy of global memory that nothing was written to".to_string();
                (what, Some(c.global_place(address)))
            });
        }
        if let Some((address, found)) = conflict {
            self.report_global_conflict(w, lane, pc, address, write, found);
        }
    }
}

/// Records a copy's access to a page that is tracked as a whole, if it is ordered after all accesses that it conflicts
/// with. False if it has to be recorded cell by cell.
fn record_page(shared: &mut SharedMemory, page: u32, write: bool, access: &SharedAccess<'_>) -> bool {
    if write {
        let written = !shared.has_barriers(page) && shared.shadow.write_page(page, access);
        if written {
            shared.initialise_page(page);
        }
        return written;
    }
    let readable = shared.is_plain_page(page) && shared.shadow.is_readable(page, access);
    if readable {
        shared.shadow.read_page(page, u64::MAX, access);
    }
    readable
}
