//! `griddepcontrol`: the grids before this one, which may still be in flight.
//!
//! A thread may touch what such a grid touches only after it has waited, or after it has been told so by a thread that has.
//! [`stream`](crate::stream) says which grids may be in flight, and which of them a wait waits for.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::exec::for_lanes;
use crate::findings::{FindingKind, Raw, RawOther, Severity};
use crate::machine::Cluster;
use crate::machine::regs::Row64;
use crate::races::global_shadow::EarlierAccess;
use crate::stream::InFlight;

impl Cluster<'_> {
    /// `griddepcontrol.wait`: the grid before has completed, for these lanes.
    pub fn grid_wait(&mut self, w: usize, mask: u32) {
        let before = self.agents.grid_before();
        let warp = &mut self.warps[w];
        warp.clocks.acquire_completion(mask, warp.live, before, 1);
        self.blocks[warp.block].waited = true;
        self.launch.waited.store(true, Relaxed);
    }

    /// `griddepcontrol.launch_dependents`: the first thread of a block that executes it counts for the block.
    pub fn launch_dependents(&mut self, w: usize, mask: u32) {
        let block = &mut self.blocks[self.warps[w].block];
        if !std::mem::replace(&mut block.released, true)
            && self.warps[w].clocks.unaware(mask, self.agents.grid_before(), 1) != 0
        {
            self.launch.unwaited.store(true, Relaxed);
        }
    }

    /// The cluster has ended, which lets the grids after it start as well.
    pub fn end_grid(&mut self) {
        if self.blocks.iter().any(|block| !block.released && !block.waited) {
            self.launch.unwaited.store(true, Relaxed);
        }
    }

    /// Checks that no grid in flight stands against an access by these lanes, each to so many bytes of global memory.
    #[inline]
    pub fn check_in_flight(
        &mut self,
        w: usize,
        pc: u32,
        mask: u32,
        addresses: &Row64,
        bytes: u32,
        write: bool,
    ) {
        let lanes = self.beside_others(w, mask);
        if lanes != 0 {
            for_lanes(lanes, |l| {
                self.check_run_in_flight(w, pc, l as u32, (addresses[l], u64::from(bytes)), write);
            });
        }
    }

    /// The lanes beside which a grid may be in flight.
    #[inline]
    pub fn beside_others(&self, w: usize, mask: u32) -> u32 {
        let in_flight = &self.launch.in_flight;
        if in_flight.is_empty() {
            0
        } else if in_flight.iter().all(|grid| grid.until_wait) {
            self.warps[w].clocks.unaware(mask, self.agents.grid_before(), 1)
        } else {
            mask
        }
    }

    /// Checks an access to consecutive bytes by a lane beside which a grid may be in flight.
    #[cold]
    pub fn check_run_in_flight(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        (address, bytes): (u64, u64),
        write: bool,
    ) {
        let launch = self.launch;
        let waited = self.warps[w].clocks.unaware(1 << lane, self.agents.grid_before(), 1) == 0;
        let open = |grid: &&InFlight| !(waited && grid.until_wait);
        if launch.in_flight.iter().filter(open).any(|grid| grid.launch.is_none()) {
            self.report_unknown_in_flight(w, pc, lane, waited);
        }
        if launch.era.oldest < launch.era.launch
            && let Some((region, offset)) = launch.memory.find(address, bytes)
        {
            let in_flight = |id: u64| {
                let mut grids = launch.in_flight.iter().filter(open);
                grids.any(|grid| grid.launch.as_ref().is_some_and(|past| past.id == id))
            };
            let run = offset..offset + bytes as usize;
            if let Some(found) = region.races.earlier_access(run, write, launch.era, in_flight) {
                let address = region.base + found.offset as u64;
                self.report_in_flight(w, pc, lane, address, write, waited, found);
            }
        }
    }

    fn report_unknown_in_flight(&mut self, w: usize, pc: u32, lane: u32, waited: bool) {
        let message = match self.launch.in_flight.first().and_then(|grid| grid.launch.as_ref()) {
            Some(last) if waited => {
                format!(
                    "a grid before kernel `{}`, which has not waited for it, may still be in flight",
                    last.kernel
                )
            }
            _ => "the grid before this one may still be at work in global memory".to_string(),
        };
        self.report_error(w, lane, pc, FindingKind::EarlyGridAccess, message);
    }

    fn report_in_flight(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        address: u64,
        write: bool,
        waited: bool,
        found: EarlierAccess,
    ) {
        let kind = FindingKind::EarlyGridAccess;
        if self.tally.findings.again(kind, pc, (found.launch, found.pc)) {
            return;
        }
        let launch = self.launch;
        let known = || launch.in_flight.iter().filter_map(|grid| grid.launch.as_ref());
        let Some(past) = known().find(|past| past.id == found.launch) else { return };
        let ago = launch.era.launch - past.id;
        let when = if ago == 1 { "the launch before".to_string() } else { format!("{ago} launches before") };
        let missing = match known().next() {
            Some(last) if waited => format!(
                "griddepcontrol.wait in kernel `{}`: this kernel waits for that one, which has not waited for `{}`",
                last.kernel, past.kernel
            ),
            _ if launch.program.waits_for_grid => {
                "griddepcontrol.wait before it, or a barrier after the wait of another thread".to_string()
            }
            _ => "griddepcontrol.wait: this kernel has none".to_string(),
        };
        let raw = Raw {
            kind,
            severity: Severity::Error,
            pc,
            thread: self.thread(w, lane),
            message: format!(
                "{} of global memory that kernel `{}` {}, which may still be in flight",
                if write { "a write" } else { "a read" },
                past.kernel,
                if found.wrote { "writes" } else { "reads" },
            ),
            place: Some(self.global_place(address)),
            other: Some(RawOther {
                pc: found.pc,
                launch: Some(Arc::clone(past)),
                by: format!("kernel `{}`, {when},", past.kernel),
                wrote: found.wrote,
            }),
            missing: Some(missing),
        };
        self.tally.findings.add(raw);
    }
}
