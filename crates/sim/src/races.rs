//! The shadow of global memory for races between the blocks of a launch.
//!
//! A cell covers 16 bytes and remembers the writes to its bytes in this launch and, of the readers, the first and
//! the latest. Two readers do not make every write-after-read conflict visible when many blocks read a cell, but
//! the first and the latest reader are ordered after each other only if the program orders all of them; what is
//! reported is always a conflict. Cells live in shards of 4 KiB behind a lock, made when first touched.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use crate::clock::{Edge, Lanes, Proxy, Stamp, WarpClock};

const CELL: usize = 16;
const SHARD: usize = 4096;

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
    /// The first byte in question, from the start of the allocation.
    pub offset: usize,
}

#[derive(Clone, Copy)]
struct Entry {
    access: GlobalAccess,
    bytes: u16,
}

#[derive(Default)]
struct Cell {
    first_read: Option<Entry>,
    last_read: Option<Entry>,
    write: Option<Entry>,
    /// Further writers of other bytes of the cell.
    more_writes: Vec<Entry>,
}

struct Shard {
    launch: u64,
    cells: Vec<Cell>,
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
    /// The lanes of the warp that stand for it.
    pub lanes: Lanes,
    /// Through which proxy.
    pub proxy: Proxy,
}

impl Accessor<'_> {
    /// Whether each of the bytes was accessed by the lane that accesses it now: then program order orders them.
    #[inline]
    fn same_lanes(&self, prior: &Entry, bytes: u16) -> bool {
        let (a, b) = (prior.access.stamp, self.access.stamp);
        if prior.access.cluster != self.access.cluster || a.agent != b.agent {
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
        } else if self.clocks.covers_foreign(prior.cluster, prior.stamp) {
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

    /// Locks the shard of an offset for accesses of this launch.
    pub fn lock(&self, offset: usize, launch: u64) -> ShardGuard<'_> {
        let mut shard = match self.shards[offset / SHARD].lock() {
            Ok(shard) => shard,
            Err(poisoned) => poisoned.into_inner(),
        };
        if shard.as_ref().is_none_or(|s| s.launch != launch) {
            let cells = (0..SHARD / CELL).map(|_| Cell::default()).collect();
            *shard = Some(Box::new(Shard { launch, cells }));
        }
        ShardGuard { first: offset / SHARD * SHARD, shard }
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
        let cell = &mut shard.cells[offset % SHARD / CELL];
        let mask = (((1u32 << bytes) - 1) << (offset % CELL)) as u16;
        let base = offset - offset % CELL;
        if write { cell.write(mask, base, by) } else { cell.read(mask, base, by) }
    }
}

impl Cell {
    fn check(
        entry: &Entry,
        wrote: bool,
        mask: u16,
        base: usize,
        by: &Accessor<'_>,
    ) -> Option<GlobalConflict> {
        let overlap = entry.bytes & mask;
        if overlap == 0 || (entry.access.atomic && by.access.atomic) {
            return None;
        }
        let edge = if by.same_lanes(entry, overlap) { Edge::Ordered } else { by.edge(&entry.access) };
        (edge != Edge::Ordered).then(|| GlobalConflict {
            prior: entry.access,
            prior_wrote: wrote,
            edge,
            offset: base + overlap.trailing_zeros() as usize,
        })
    }

    #[inline]
    fn read(&mut self, mask: u16, base: usize, by: &Accessor<'_>) -> Option<GlobalConflict> {
        let conflict = match &self.write {
            None => None,
            Some(first) => std::iter::once(first)
                .chain(&self.more_writes)
                .find_map(|entry| Self::check(entry, true, mask, base, by)),
        };
        let entry = Entry { access: by.access, bytes: mask };
        match &mut self.first_read {
            None => self.first_read = Some(entry),
            Some(first) if same_agent(first, &entry) => {
                let bytes = first.bytes | mask;
                *first = Entry { bytes, ..entry };
            }
            Some(_) => match &mut self.last_read {
                Some(last) if same_agent(last, &entry) => {
                    let bytes = last.bytes | mask;
                    *last = Entry { bytes, ..entry };
                }
                last => *last = Some(entry),
            },
        }
        conflict
    }

    fn write(&mut self, mask: u16, base: usize, by: &Accessor<'_>) -> Option<GlobalConflict> {
        let writes = self.write.iter().chain(&self.more_writes).map(|entry| (entry, true));
        let reads = self.first_read.iter().chain(&self.last_read).map(|entry| (entry, false));
        let conflict =
            writes.chain(reads).find_map(|(entry, wrote)| Self::check(entry, wrote, mask, base, by));
        let entry = Entry { access: by.access, bytes: mask };
        match &mut self.write {
            None => self.write = Some(entry),
            Some(first) if first.bytes & !mask == 0 => *first = entry,
            Some(first) => {
                first.bytes &= !mask;
                for other in &mut self.more_writes {
                    other.bytes &= !mask;
                }
                self.more_writes.retain(|other| other.bytes != 0);
                self.more_writes.push(entry);
            }
        }
        conflict
    }
}

fn same_agent(a: &Entry, b: &Entry) -> bool {
    a.access.cluster == b.access.cluster
        && a.access.stamp.agent == b.access.stamp.agent
        && a.access.stamp.lanes == b.access.stamp.lanes
        && a.access.atomic == b.access.atomic
}

/// What has been published through words of memory that blocks synchronise on.
#[derive(Default)]
pub struct SyncWords {
    words: Mutex<HashMap<u64, Published>>,
}

/// For each cluster, how far its agents' accesses are ordered before whoever acquires.
pub type Published = HashMap<u32, Vec<u32>>;

impl SyncWords {
    /// Adds what a warp publishes by a release to the word at this address.
    pub fn release(&self, address: u64, published: &Published) {
        let mut words = match self.words.lock() {
            Ok(words) => words,
            Err(poisoned) => poisoned.into_inner(),
        };
        join(words.entry(address).or_default(), published);
    }

    /// What an acquire of the word at this address sees.
    pub fn acquire(&self, address: u64) -> Option<Published> {
        match self.words.lock() {
            Ok(words) => words.get(&address).cloned(),
            Err(poisoned) => poisoned.into_inner().get(&address).cloned(),
        }
    }
}

/// Raises one record of what is published to another.
pub fn join(into: &mut Published, from: &Published) {
    for (&cluster, clocks) in from {
        let mine = into.entry(cluster).or_default();
        if mine.len() < clocks.len() {
            mine.resize(clocks.len(), 0);
        }
        for (a, &b) in mine.iter_mut().zip(clocks) {
            *a = (*a).max(b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(
        shadow: &RaceShadow,
        offset: usize,
        bytes: u32,
        write: bool,
        by: &Accessor<'_>,
    ) -> Option<GlobalConflict> {
        shadow.lock(offset, 1).access(offset, bytes, write, by)
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
        assert!(shadow.lock(0, 2).access(0, 4, true, &by(&b, 1, 0, false)).is_none());
    }

    #[test]
    fn what_is_released_through_a_word_orders_the_accesses_before_it() {
        let (mut a, mut b) = (WarpClock::new(0), WarpClock::new(0));
        let shadow = RaceShadow::new(64);
        let words = SyncWords::default();
        touch(&shadow, 0, 4, true, &by(&a, 0, 0, false));
        words.release(64, &a.publish_abroad(0, u32::MAX, u32::MAX));
        touch(&shadow, 4, 4, true, &by(&a, 0, 0, false));
        b.acquire_abroad(&words.acquire(64).expect("published"));
        assert!(touch(&shadow, 0, 4, true, &by(&b, 1, 0, false)).is_none());
        assert!(touch(&shadow, 4, 4, true, &by(&b, 1, 0, false)).is_some());
    }
}
