//! The shadow of global memory for races between the blocks of a launch.
//!
//! A cell covers 16 bytes and remembers the writes to its bytes in this launch and, of the readers, the first and
//! the latest. Two readers do not make every write-after-read conflict visible when many blocks read a cell, but
//! the first and the latest reader are ordered after each other only if the program orders all of them; what is
//! reported is always a conflict. Most memory is only read, or written once, and by whole lines of 128 bytes: a line has
//! one record until another kind of access makes cells of it. Lines are in shards of 4 KiB behind a lock, made when first
//! touched. Reads by `ld.global.nc` are recorded separately, to the byte: no order allows a write to those.
//!
//! A shard belongs to a launch. When a later launch touches it, it is dropped, or kept behind the new one if its launch may
//! be in flight.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use crate::races::clock::{Edge, Proxy, Stamp, WarpClock};
use crate::races::lanes::Lanes;

const CELL: usize = 16;
/// Bytes in a line of cells.
pub const LINE: usize = 128;
const SHARD: usize = 4096;

/// Which launch accesses memory now, and from which launch on earlier ones may be in flight beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Era {
    /// The launch.
    pub launch: u64,
    /// The oldest launch that may be in flight: the launch itself if there is no other.
    pub oldest: u64,
}

/// An access to global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalAccess {
    /// The cluster of the block.
    pub cluster: u32,
    /// When, and by which agent of the cluster.
    pub stamp: Stamp,
    /// The instruction.
    pub pc: u32,
    /// Whether it is atomic (or a bulk reduction): atomics do not conflict with each other.
    pub atomic: bool,
}

/// Two accesses of which one is a write and that nothing orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalConflict {
    /// The earlier one.
    pub prior: GlobalAccess,
    /// Whether the earlier one wrote.
    pub prior_wrote: bool,
    /// What is missing between the two.
    pub edge: Edge,
    /// Whether the read of the two is an `ld.global.nc`: then nothing that comes between them would help.
    pub non_coherent: bool,
    /// The first byte in question, from the start of the allocation.
    pub offset: usize,
}

/// An access of an earlier launch that is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlierAccess {
    /// The launch.
    pub launch: u64,
    /// The instruction.
    pub pc: u32,
    /// Whether it wrote.
    pub wrote: bool,
    /// The first byte in question, from the start of the allocation.
    pub offset: usize,
}

/// An access to bytes of a cell, packed; no bytes mean that there is none.
#[derive(Clone, Copy)]
struct Entry {
    cluster: u32,
    clock: u32,
    /// The instruction, and in the lowest bit whether the access is atomic.
    pc_and_atomic: u32,
    agent: u16,
    lanes: u16,
    bytes: u16,
}

impl Entry {
    const NONE: Entry = Entry { cluster: 0, clock: 0, pc_and_atomic: 0, agent: 0, lanes: 0, bytes: 0 };
    /// Marks the lanes of a line: the first cell belongs to the lane, each further one to the lane after.
    const STEPS: u16 = 0x800;

    #[inline(always)]
    fn new(access: &GlobalAccess, bytes: u16) -> Entry {
        Entry {
            cluster: access.cluster,
            clock: access.stamp.clock,
            pc_and_atomic: access.pc << 1 | u32::from(access.atomic),
            agent: access.stamp.agent,
            lanes: access.stamp.lanes.code(),
            bytes,
        }
    }

    /// A read of a whole line: by one lane after the other, or by no particular lane.
    #[inline(always)]
    fn of_line(access: &GlobalAccess) -> Entry {
        let steps = if access.stamp.lanes == Lanes::ALL { 0 } else { Entry::STEPS };
        let entry = Entry::new(access, u16::MAX);
        Entry { lanes: entry.lanes | steps, ..entry }
    }

    /// The same read of one cell of the line.
    fn of_cell(self, cell: usize) -> Entry {
        let steps = self.lanes & Entry::STEPS != 0;
        let lanes = if steps { (self.lanes & !Entry::STEPS) + cell as u16 } else { self.lanes };
        Entry { lanes, ..self }
    }

    fn atomic(&self) -> bool {
        self.pc_and_atomic & 1 == 1
    }

    fn access(&self) -> GlobalAccess {
        GlobalAccess {
            cluster: self.cluster,
            stamp: Stamp { clock: self.clock, agent: self.agent, lanes: Lanes::from_code(self.lanes) },
            pc: self.pc_and_atomic >> 1,
            atomic: self.atomic(),
        }
    }

    /// Whether the same lanes of the same agent make the other access, in the same way.
    #[inline(always)]
    fn same_agent(&self, other: &Entry) -> bool {
        self.cluster == other.cluster
            && self.agent == other.agent
            && self.lanes == other.lanes
            && self.atomic() == other.atomic()
    }
}

/// Who accessed sixteen bytes: as much as one line of the cache holds.
#[derive(Clone)]
#[repr(align(64))]
struct GlobalCell {
    first_read: Entry,
    last_read: Entry,
    write: Entry,
    /// The bytes that anybody has read.
    read_bytes: u16,
    /// One more than the index of a list of further writers, of other bytes of the cell; or 0.
    more_writes: u16,
}

/// Who accessed 128 bytes.
#[derive(Clone, Copy)]
struct Line {
    first_read: Entry,
    last_read: Entry,
    write: Entry,
    /// One more than the index of its cells, once it has them, or 0.
    cells: u32,
}

impl Line {
    const FRESH: Line =
        Line { first_read: Entry::NONE, last_read: Entry::NONE, write: Entry::NONE, cells: 0 };
}

struct Shard {
    launch: u64,
    /// The accesses of an earlier launch to the same bytes, if it may be in flight.
    earlier: Option<Box<Shard>>,
    lines: [Line; SHARD / LINE],
    cells: Vec<[GlobalCell; LINE / CELL]>,
    more_writes: Vec<Vec<Entry>>,
    /// For each cell, the bytes that were read by `ld.global.nc`, and who read some of them first.
    read_only: Option<Box<[Entry; SHARD / CELL]>>,
}

impl Shard {
    fn new(launch: u64, earlier: Option<Box<Shard>>) -> Box<Shard> {
        let lines = [Line::FRESH; SHARD / LINE];
        let (cells, more_writes) = (Vec::new(), Vec::new());
        Box::new(Shard { launch, earlier, lines, cells, more_writes, read_only: None })
    }

    /// An access of this launch to some of these bytes of a cell: a write, or for a write also a read.
    fn accessed(&self, offset: usize, mask: u16, write: bool) -> Option<EarlierAccess> {
        let line = &self.lines[offset % SHARD / LINE];
        let found = |entry: &Entry, wrote: bool, overlap: u16| EarlierAccess {
            launch: self.launch,
            pc: entry.access().pc,
            wrote,
            offset: offset - offset % CELL + overlap.trailing_zeros() as usize,
        };
        let Some(cells) = (line.cells as usize).checked_sub(1) else {
            let written = line.write.bytes & mask;
            if written != 0 {
                return Some(found(&line.write, true, written));
            }
            let read = line.first_read.bytes & mask;
            return (write && read != 0).then(|| found(&line.first_read, false, read));
        };
        let cell = &self.cells[cells][offset % LINE / CELL];
        if let Some(entry) = cell.writes(&self.more_writes).find(|entry| entry.bytes & mask != 0) {
            return Some(found(entry, true, entry.bytes & mask));
        }
        let read = cell.read_bytes & mask;
        let reader = if cell.last_read.bytes & read != 0 { &cell.last_read } else { &cell.first_read };
        (write && read != 0).then(|| found(reader, false, read))
    }

    /// The cell of an offset, made from its line if need be, and the lists of further writers.
    #[inline]
    fn cell(&mut self, offset: usize) -> (&mut GlobalCell, &mut Vec<Vec<Entry>>) {
        let line = &mut self.lines[offset % SHARD / LINE];
        if line.cells == 0 {
            self.cells.push(std::array::from_fn(|cell| GlobalCell {
                first_read: line.first_read.of_cell(cell),
                last_read: line.last_read.of_cell(cell),
                write: line.write.of_cell(cell),
                read_bytes: line.first_read.bytes,
                more_writes: 0,
            }));
            line.cells = self.cells.len() as u32;
        }
        (&mut self.cells[line.cells as usize - 1][offset % LINE / CELL], &mut self.more_writes)
    }
}

/// The shadow of one allocation.
pub struct RaceShadow {
    shards: Vec<Mutex<Option<Box<Shard>>>>,
}

/// Who accesses now.
pub struct Accessor<'a> {
    /// The access to record.
    pub access: GlobalAccess,
    /// The clocks of the warp.
    pub clocks: &'a WarpClock,
    /// The lanes of the warp that make or start it.
    pub lanes: Lanes,
    /// Through which proxy.
    pub proxy: Proxy,
}

impl Accessor<'_> {
    /// Whether each of the bytes was accessed by the lane that accesses it now: then program order orders them.
    #[inline]
    fn same_lanes(&self, prior: &GlobalAccess, bytes: u16) -> bool {
        let (a, b) = (prior.stamp, self.access.stamp);
        if prior.cluster != self.access.cluster || a.agent != b.agent {
            return false;
        }
        if a.lanes == b.lanes && a.lanes != Lanes::ALL {
            return true;
        }
        (0..16).filter(|byte| bytes >> byte & 1 == 1).all(|byte| {
            let lane = a.lanes.at(byte);
            lane.is_some() && lane == b.lanes.at(byte)
        })
    }

    fn edge(&self, prior: &GlobalAccess) -> Edge {
        if prior.cluster == self.access.cluster {
            self.clocks.edge(prior.stamp, self.lanes, self.proxy)
        } else if self.clocks.covers_foreign(prior.cluster, prior.stamp, self.lanes) {
            Edge::Ordered
        } else {
            Edge::Missing
        }
    }
}

impl RaceShadow {
    /// The shadow of an allocation of this size.
    pub fn new(len: usize) -> RaceShadow {
        RaceShadow { shards: (0..len.div_ceil(SHARD)).map(|_| Mutex::new(None)).collect() }
    }

    /// Locks the shard of an offset for accesses of the launch.
    pub fn lock(&self, offset: usize, era: Era) -> ShardGuard<'_> {
        let mut shard = match self.shards[offset / SHARD].lock() {
            Ok(shard) => shard,
            Err(poisoned) => poisoned.into_inner(),
        };
        if shard.as_ref().is_none_or(|s| s.launch != era.launch) {
            let earlier = shard.take().filter(|s| s.launch >= era.oldest);
            *shard = Some(Shard::new(era.launch, earlier));
        }
        ShardGuard { first: offset / SHARD * SHARD, shard }
    }

    /// An access to some of these bytes by an earlier launch in flight that an access now conflicts with: a write, or
    /// for a write also a read.
    pub fn earlier_access(
        &self,
        bytes: Range<usize>,
        write: bool,
        era: Era,
        in_flight: impl Fn(u64) -> bool,
    ) -> Option<EarlierAccess> {
        let mut at = bytes.start;
        while at < bytes.end {
            let guard = self.lock(at, era);
            while at < bytes.end && guard.covers(at) {
                let count = (CELL - at % CELL).min(bytes.end - at);
                let mut earlier = guard.shard.as_ref().and_then(|shard| shard.earlier.as_deref());
                while let Some(shard) = earlier {
                    if in_flight(shard.launch)
                        && let Some(found) = shard.accessed(at, cell_bytes(at, count as u32), write)
                    {
                        return Some(found);
                    }
                    earlier = shard.earlier.as_deref();
                }
                at += count;
            }
        }
        None
    }
}

/// A locked shard of an allocation's shadow.
pub struct ShardGuard<'a> {
    first: usize,
    shard: MutexGuard<'a, Option<Box<Shard>>>,
}

impl ShardGuard<'_> {
    /// Whether the shard covers an offset.
    pub fn covers(&self, offset: usize) -> bool {
        offset / SHARD * SHARD == self.first
    }

    /// Records a read of a whole cell, if nothing was written to it. False if the read must be checked.
    #[inline(always)]
    pub fn read_unwritten(&mut self, offset: usize, access: &GlobalAccess) -> bool {
        let Some(shard) = self.shard.as_mut() else { return false };
        let (cell, _) = shard.cell(offset);
        let unwritten = cell.write.bytes == 0;
        if unwritten {
            cell.note_read(Entry::new(access, u16::MAX));
        }
        unwritten
    }

    /// Records a read of a whole line: of its first cell by the lane of the access and of each further one by the lane
    /// after, or of all of them by no particular lane. False if the line has cells of its own or was written.
    #[inline(always)]
    pub fn read_line(&mut self, offset: usize, access: &GlobalAccess) -> bool {
        let Some(shard) = self.shard.as_mut() else { return false };
        let Line { first_read, last_read, write, cells } = &mut shard.lines[offset % SHARD / LINE];
        let unwritten = *cells == 0 && write.bytes == 0;
        if unwritten {
            note_read(first_read, last_read, Entry::of_line(access));
        }
        unwritten
    }

    /// Records a write of a whole line in the same way, if it is the first access to it. False where it is not.
    #[inline(always)]
    pub fn write_line(&mut self, offset: usize, access: &GlobalAccess) -> bool {
        let Some(shard) = self.shard.as_mut() else { return false };
        if shard.read_only.is_some() {
            return false;
        }
        let line = &mut shard.lines[offset % SHARD / LINE];
        let first = line.cells == 0 && line.write.bytes | line.first_read.bytes == 0;
        if first {
            line.write = Entry::of_line(access);
        }
        first
    }

    /// Records a read by `ld.global.nc` of bytes of one 16-byte cell. Any write to them in this launch is a conflict.
    pub fn read_only(&mut self, offset: usize, bytes: u32, access: &GlobalAccess) -> Option<GlobalConflict> {
        let shard = self.shard.as_mut()?;
        let mask = cell_bytes(offset, bytes);
        let read_only =
            shard.read_only.get_or_insert_with(|| Box::new([const { Entry::NONE }; SHARD / CELL]));
        let entry = &mut read_only[offset % SHARD / CELL];
        if entry.bytes == 0 {
            *entry = Entry::new(access, 0);
        }
        entry.bytes |= mask;
        let line = &shard.lines[offset % SHARD / LINE];
        if line.cells == 0 && line.write.bytes == 0 {
            return None;
        }
        let (cell, more) = shard.cell(offset);
        let written = cell.writes(more).find(|write| write.bytes & mask != 0)?;
        Some(GlobalConflict::with_read_only(written, true, written.bytes & mask, offset))
    }

    /// Records an access to bytes of one 16-byte cell.
    #[inline]
    pub fn access(
        &mut self,
        offset: usize,
        bytes: u32,
        write: bool,
        by: &Accessor<'_>,
    ) -> Option<GlobalConflict> {
        let shard = self.shard.as_mut()?;
        let mask = cell_bytes(offset, bytes);
        let read_only = shard.read_only.as_ref().map(|cells| cells[offset % SHARD / CELL]);
        let (cell, more_writes) = shard.cell(offset);
        let base = offset - offset % CELL;
        if !write {
            return cell.read(mask, base, by, more_writes);
        }
        let conflict = cell.write(mask, base, by, more_writes);
        match read_only.filter(|read| read.bytes & mask != 0) {
            Some(read) => Some(GlobalConflict::with_read_only(&read, false, read.bytes & mask, offset)),
            None => conflict,
        }
    }
}

/// The bits of some bytes of a cell.
#[inline(always)]
fn cell_bytes(offset: usize, bytes: u32) -> u16 {
    (((1u32 << bytes) - 1) << (offset % CELL)) as u16
}

impl GlobalConflict {
    /// Of an `ld.global.nc` and a write, of which `prior` is the earlier one.
    fn with_read_only(prior: &Entry, prior_wrote: bool, overlap: u16, offset: usize) -> GlobalConflict {
        GlobalConflict {
            prior: prior.access(),
            prior_wrote,
            edge: Edge::Missing,
            non_coherent: true,
            offset: offset - offset % CELL + overlap.trailing_zeros() as usize,
        }
    }
}

impl GlobalCell {
    fn check(
        entry: &Entry,
        wrote: bool,
        mask: u16,
        base: usize,
        by: &Accessor<'_>,
    ) -> Option<GlobalConflict> {
        let overlap = entry.bytes & mask;
        if overlap == 0 || (entry.atomic() && by.access.atomic) {
            return None;
        }
        let prior = entry.access();
        let edge = if by.same_lanes(&prior, overlap) { Edge::Ordered } else { by.edge(&prior) };
        (edge != Edge::Ordered).then(|| GlobalConflict {
            prior,
            prior_wrote: wrote,
            edge,
            non_coherent: false,
            offset: base + overlap.trailing_zeros() as usize,
        })
    }

    fn writes<'a>(&'a self, more: &'a [Vec<Entry>]) -> impl Iterator<Item = &'a Entry> {
        let more = (self.more_writes as usize).checked_sub(1).map(|list| &more[list]);
        std::iter::once(&self.write).chain(more.into_iter().flatten())
    }

    #[inline]
    fn read(
        &mut self,
        mask: u16,
        base: usize,
        by: &Accessor<'_>,
        more: &[Vec<Entry>],
    ) -> Option<GlobalConflict> {
        let conflict = if self.write.bytes == 0 {
            None
        } else {
            self.writes(more).find_map(|entry| Self::check(entry, true, mask, base, by))
        };
        self.note_read(Entry::new(&by.access, mask));
        conflict
    }

    #[inline(always)]
    fn note_read(&mut self, entry: Entry) {
        self.read_bytes |= entry.bytes;
        note_read(&mut self.first_read, &mut self.last_read, entry);
    }

    fn write(
        &mut self,
        mask: u16,
        base: usize,
        by: &Accessor<'_>,
        more: &mut Vec<Vec<Entry>>,
    ) -> Option<GlobalConflict> {
        let reads = [&self.first_read, &self.last_read].into_iter().map(|entry| (entry, false));
        let conflict = self
            .writes(more)
            .map(|entry| (entry, true))
            .chain(reads)
            .find_map(|(entry, wrote)| Self::check(entry, wrote, mask, base, by));
        let entry = Entry::new(&by.access, mask);
        if self.write.bytes & !mask == 0 {
            self.write = entry;
        } else {
            self.write.bytes &= !mask;
            if self.more_writes == 0 {
                more.push(Vec::new());
                self.more_writes = more.len() as u16;
            }
            let others = &mut more[self.more_writes as usize - 1];
            for other in others.iter_mut() {
                other.bytes &= !mask;
            }
            others.retain(|other| other.bytes != 0);
            others.push(entry);
        }
        conflict
    }
}

/// Adds a read to the first and the latest one.
#[inline(always)]
fn note_read(first: &mut Entry, last: &mut Entry, entry: Entry) {
    for read in [first, &mut *last] {
        if read.bytes == 0 || read.same_agent(&entry) {
            *read = Entry { bytes: read.bytes | entry.bytes, ..entry };
            return;
        }
    }
    *last = entry;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::races::sync_words::SyncWords;

    /// The first launch, or the second in stream order.
    const FIRST: Era = Era { launch: 1, oldest: 1 };
    const SECOND: Era = Era { launch: 2, oldest: 2 };

    fn touch(
        shadow: &RaceShadow,
        offset: usize,
        bytes: u32,
        write: bool,
        by: &Accessor<'_>,
    ) -> Option<GlobalConflict> {
        shadow.lock(offset, FIRST).access(offset, bytes, write, by)
    }

    fn by(clocks: &WarpClock, cluster: u32, lane: u32, atomic: bool) -> Accessor<'_> {
        let lanes = Lanes::one(lane);
        let access = GlobalAccess { cluster, stamp: clocks.stamp(lanes), pc: cluster, atomic };
        Accessor { access, clocks, lanes, proxy: Proxy::Generic }
    }

    #[test]
    fn blocks_that_write_the_same_bytes_conflict_and_neighbours_do_not() {
        let (a, b) = (WarpClock::new(0), WarpClock::new(0));
        let shadow = RaceShadow::new(8192);
        assert!(touch(&shadow, 4096, 4, true, &by(&a, 0, 0, false)).is_none());
        assert!(touch(&shadow, 4100, 4, true, &by(&b, 1, 0, false)).is_none());
        let conflict = touch(&shadow, 4096, 8, true, &by(&b, 1, 0, false)).expect("a race");
        assert_eq!((conflict.offset, conflict.prior_wrote, conflict.prior.cluster), (4096, true, 0));
    }

    #[test]
    fn a_write_after_another_blocks_read_conflicts() {
        let (a, b) = (WarpClock::new(0), WarpClock::new(0));
        let shadow = RaceShadow::new(64);
        assert!(touch(&shadow, 0, 16, false, &by(&a, 0, 0, false)).is_none());
        assert!(touch(&shadow, 0, 16, false, &by(&b, 1, 0, false)).is_none());
        assert!(!touch(&shadow, 8, 2, true, &by(&b, 1, 0, false)).expect("a race").prior_wrote);
    }

    #[test]
    fn a_line_that_is_read_at_once_is_remembered_as_its_cells_are() {
        let warps = [0, 1, 2].map(WarpClock::new);
        let (whole, single) = (RaceShadow::new(4096), RaceShadow::new(4096));
        for (clocks, lane) in [(&warps[0], 8), (&warps[1], 0), (&warps[2], 16)] {
            assert!(whole.lock(256, FIRST).read_line(256, &by(clocks, 0, lane, false).access));
            for cell in 0..8 {
                let access = by(clocks, 0, lane + cell, false).access;
                assert!(single.lock(256, FIRST).read_unwritten(256 + 16 * cell as usize, &access));
            }
        }
        // A lane may write what it has read itself; then the latest reader objects, and else the first one.
        for (cell, lane, prior) in [(3, 11, (2, 19)), (4, 9, (0, 12))] {
            let writes = [&whole, &single].map(|shadow| {
                touch(shadow, 256 + 16 * cell, 16, true, &by(&warps[0], 0, lane, false)).expect("a race")
            });
            assert_eq!(writes[0], writes[1]);
            assert_eq!((writes[0].prior.stamp.agent, writes[0].prior.stamp.lanes.any()), prior);
            assert!(!writes[0].prior_wrote);
        }
        let access = by(&warps[1], 0, 0, false).access;
        assert!(!whole.lock(256, FIRST).read_line(256, &access), "its cells are told apart by now");
    }

    #[test]
    fn a_line_that_is_written_at_once_is_remembered_as_its_cells_are() {
        let warps = [0, 1].map(WarpClock::new);
        for (cell, lane) in [(0, 8), (5, 13), (5, 12)] {
            let (whole, single) = (RaceShadow::new(4096), RaceShadow::new(4096));
            assert!(whole.lock(512, FIRST).write_line(512, &by(&warps[0], 0, 8, false).access));
            for cell in 0..8 {
                let by = by(&warps[0], 0, 8 + cell, false);
                assert!(touch(&single, 512 + 16 * cell as usize, 16, true, &by).is_none());
            }
            let access = by(&warps[1], 0, 0, false).access;
            assert!(!whole.lock(512, FIRST).read_line(512, &access), "it was written");
            assert!(!whole.lock(512, FIRST).write_line(512, &access), "it was written");
            for (i, (clocks, write)) in
                [(&warps[0], true), (&warps[0], false), (&warps[1], false)].into_iter().enumerate()
            {
                let found = [&whole, &single]
                    .map(|shadow| touch(shadow, 512 + 16 * cell, 16, write, &by(clocks, 0, lane, false)));
                assert_eq!(found[0], found[1]);
                assert!(i > 0 || found[0].is_none() == (lane as usize == 8 + cell), "each has its own cell");
                assert!(i < 2 || found[0].is_some(), "another warp has written it");
            }
        }
    }

    #[test]
    fn atomics_do_not_conflict_with_each_other_but_with_plain_accesses() {
        let (a, b) = (WarpClock::new(0), WarpClock::new(0));
        let shadow = RaceShadow::new(64);
        assert!(touch(&shadow, 0, 4, true, &by(&a, 0, 0, true)).is_none());
        assert!(touch(&shadow, 0, 4, true, &by(&b, 1, 0, true)).is_none());
        assert!(touch(&shadow, 0, 4, false, &by(&a, 0, 0, false)).is_some());
    }

    #[test]
    fn a_new_launch_forgets_the_old_one() {
        let (a, b) = (WarpClock::new(0), WarpClock::new(0));
        let shadow = RaceShadow::new(64);
        touch(&shadow, 0, 4, true, &by(&a, 0, 0, false));
        assert!(shadow.lock(0, SECOND).access(0, 4, true, &by(&b, 1, 0, false)).is_none());
    }

    #[test]
    fn an_earlier_launch_in_flight_is_remembered_to_the_byte_and_one_in_stream_order_is_not() {
        let warps = [0, 1, 2, 3].map(WarpClock::new);
        let shadow = RaceShadow::new(8192);
        let first = |offset, bytes, write, warp: usize| {
            shadow.lock(offset, FIRST).access(offset, bytes, write, &by(&warps[warp], 7, 0, false));
        };
        first(4, 4, true, 0);
        first(8, 2, true, 1);
        // Three warps read different bytes of one cell, of which the shadow names the first and the latest.
        (1..4).for_each(|warp| first(16 + 4 * warp, 4, false, warp));
        assert!(shadow.lock(4096, FIRST).write_line(4096, &by(&warps[0], 7, 0, false).access));
        assert!(shadow.lock(4224, FIRST).read_line(4224, &by(&warps[0], 7, 0, false).access));
        let beside = Era { launch: 3, oldest: 1 };
        let found = |bytes: Range<usize>, write| {
            let found = shadow.earlier_access(bytes, write, beside, |launch| launch == 1)?;
            assert_eq!((found.launch, found.pc), (1, 7));
            Some((found.offset, found.wrote))
        };
        assert_eq!((found(0..4, true), found(10..20, true)), (None, None), "nobody touched these");
        assert_eq!((found(0..16, false), found(9..12, false)), (Some((4, true)), Some((9, true))));
        for at in [20, 24, 28] {
            assert_eq!((found(at..at + 2, false), found(at..at + 2, true)), (None, Some((at, false))));
        }
        assert_eq!(found(4000..8192, false), Some((4096, true)), "across cells and shards");
        assert_eq!((found(4224..4352, false), found(4232..4233, true)), (None, Some((4232, false))));
        // What launch 3 itself does hides nothing of launch 1, which stays in flight beside launch 4.
        shadow.lock(4, beside).access(4, 4, true, &by(&warps[0], 9, 0, false));
        let next = Era { launch: 4, oldest: 1 };
        let of = |id: u64| shadow.earlier_access(4..8, false, next, |launch| launch == id).map(|e| e.pc);
        assert_eq!([of(1), of(2), of(3)], [Some(7), None, Some(9)]);
        let alone = Era { launch: 5, oldest: 5 };
        assert!(shadow.earlier_access(0..8192, true, alone, |_| true).is_none());
    }

    #[test]
    fn what_is_released_through_a_word_orders_the_accesses_before_it() {
        let (mut a, mut b) = (WarpClock::new(0), WarpClock::new(0));
        let shadow = RaceShadow::new(64);
        let words = SyncWords::default();
        touch(&shadow, 0, 4, true, &by(&a, 0, 0, false));
        words.release(64, &a.publish_abroad(0, u32::MAX, u32::MAX));
        touch(&shadow, 4, 4, true, &by(&a, 0, 0, false));
        b.acquire_abroad(1, u32::MAX, u32::MAX, &words.acquire(64).expect("published"));
        assert!(touch(&shadow, 0, 4, true, &by(&b, 1, 0, false)).is_none());
        assert!(touch(&shadow, 4, 4, true, &by(&b, 1, 0, false)).is_some());
    }
}
