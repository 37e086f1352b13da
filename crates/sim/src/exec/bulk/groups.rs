//! Bulk copies to global memory, which a thread waits for by groups.

use flashcore_ptx::{AtomOp, AtomTy};

use crate::exec::bulk::Action;
use crate::exec::bulk::sides::{GlobalSide, SharedSide};
use crate::exec::for_lanes;
use crate::findings::FindingKind;
use crate::machine::Cluster;
use crate::races::clock::{Agent, Proxy};

/// How many stores of a warp, after they have read their source, have their writes delayed.
const MAX_UNWRITTEN: usize = 16;

/// A copy that belongs to a thread's bulk group.
#[derive(Clone, Debug)]
pub struct GroupCopy {
    action: Action,
    lane: u32,
    pc: u32,
    /// The operation as a reader of shared memory, and as a writer of global memory.
    reads: (Agent, u32),
    writes: (Agent, u32),
    group: Option<u32>,
    /// The bytes read from shared memory, once that has happened.
    data: Option<Vec<u8>>,
    /// Whether the thread has waited for that.
    read_awaited: bool,
    written: bool,
}

/// The bulk groups of a warp's lanes.
#[derive(Clone, Debug, Default)]
pub struct BulkGroups {
    copies: Vec<GroupCopy>,
    committed: [u32; 32],
}

impl BulkGroups {
    /// `cp.async.bulk.commit_group`: the copies of these lanes since the last commit become a group of each lane.
    pub(super) fn commit(&mut self, mask: u32) {
        for copy in self.copies.iter_mut().filter(|c| c.group.is_none() && mask >> c.lane & 1 == 1) {
            copy.group = Some(self.committed[copy.lane as usize]);
        }
        for_lanes(mask, |l| self.committed[l] += 1);
    }
}

impl Cluster<'_> {
    /// Starts a copy from shared to global memory, in the lane's open group.
    pub(super) fn start_store(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        from: SharedSide,
        to: GlobalSide,
        reduce: Option<(AtomOp, AtomTy)>,
    ) {
        let reads = self.agents.start(w, 1 << lane, &self.warps[w].clocks);
        let writes = self.agents.start(w, 1 << lane, &self.warps[w].clocks);
        if !self.record_side(w, pc, lane, from, false, Proxy::Async, reads) {
            return;
        }
        self.record_global(w, pc, lane, &to, true, reduce.is_some(), writes);
        let action = Action::Store(from, to, reduce);
        let mut copy = GroupCopy {
            action,
            lane,
            pc,
            reads,
            writes,
            group: None,
            data: None,
            read_awaited: false,
            written: false,
        };
        if self.happens_now() {
            self.read_source(&mut copy);
            self.write_destination(&mut copy);
        }
        self.warps[w].bulk.copies.push(copy);
    }

    fn read_source(&mut self, copy: &mut GroupCopy) {
        if copy.data.is_none()
            && let Action::Store(from, ..) = &copy.action
        {
            copy.data = Some(self.read_shared(*from));
        }
    }

    fn write_destination(&mut self, copy: &mut GroupCopy) {
        if let (false, Some(data), Action::Store(_, to, reduce)) = (copy.written, &copy.data, &copy.action) {
            self.write_global(to, data, *reduce);
            copy.written = true;
        }
    }

    /// `cp.async.bulk.wait_group`: the older groups have read their sources, and without `.read` also written.
    pub(super) fn bulk_wait(&mut self, w: usize, mask: u32, pending: u32, read_only: bool) {
        let committed = self.warps[w].bulk.committed;
        let live = self.warps[w].live;
        let mut copies = std::mem::take(&mut self.warps[w].bulk.copies);
        copies.retain_mut(|copy| {
            let retired = mask >> copy.lane & 1 == 1
                && copy.group.is_some_and(|g| g + pending < committed[copy.lane as usize]);
            if !retired {
                return true;
            }
            self.read_source(copy);
            // The groups are the lane's own, so only the lane knows.
            let clocks = &mut self.warps[w].clocks;
            clocks.acquire_completion(1 << copy.lane, live, copy.reads.0, copy.reads.1);
            copy.read_awaited = true;
            if read_only {
                return true;
            }
            self.write_destination(copy);
            let clocks = &mut self.warps[w].clocks;
            clocks.acquire_completion(1 << copy.lane, live, copy.writes.0, copy.writes.1);
            false
        });
        // Writes that nobody waits for must happen before the kernel ends: the oldest happen now.
        let read = copies.iter().filter(|copy| copy.read_awaited).count();
        let mut surplus = read.saturating_sub(MAX_UNWRITTEN);
        copies.retain_mut(|copy| {
            if surplus == 0 || !copy.read_awaited {
                return true;
            }
            surplus -= 1;
            self.write_destination(copy);
            false
        });
        self.warps[w].bulk.copies = copies;
    }

    /// A warp has ended: its bulk groups must have read their sources.
    pub fn end_bulk(&mut self, w: usize) {
        let mut copies = std::mem::take(&mut self.warps[w].bulk.copies);
        for copy in &mut copies {
            if !copy.read_awaited {
                let message = "the block may end before a bulk copy has read its shared memory: \
                               wait_group.read is missing"
                    .to_string();
                self.report_error(w, copy.lane, copy.pc, FindingKind::PendingAtExit, message);
            }
            self.read_source(copy);
            self.write_destination(copy);
        }
    }
}
