//! The shadow of a block's shared memory: for every byte, who wrote it last and who has read it since.
//!
//! The unit is a cell of 16 bytes, which is what TMA, `ldmatrix`, `cp.async` and vector accesses touch. A cell
//! that is accessed in part is split into four words, and a word into four bytes, so that the answer is exact to
//! the byte; a write to the whole makes it one cell again. Each cell keeps the last write and, for every warp of
//! the block, its last read; readers from elsewhere (asynchronous operations, other blocks of the cluster) are
//! few and kept in a list.

use crate::clock::{Agent, Edge, Lanes, Proxy, Stamp, WarpClock};

/// Bytes in a cell.
pub const CELL: u32 = 16;

/// Who accesses shared memory now.
#[derive(Clone, Copy)]
pub struct Access<'a> {
    /// The clocks of the warp that accesses, or that started the asynchronous operation.
    pub clocks: &'a WarpClock,
    /// Through which proxy.
    pub proxy: Proxy,
    /// The stamp to leave behind.
    pub stamp: Stamp,
    /// The lanes of the warp that stand for the access; the stamp's agent may be another one.
    pub lanes: Lanes,
    /// The instruction.
    pub pc: u32,
}

/// What a warp's ordinary accesses, whatever the lane, come after: asked for one access after the other of the same
/// agents, it remembers the last answer.
pub struct Known<'a> {
    clocks: &'a WarpClock,
    agent: Agent,
    covered: u32,
    /// The same for the warps of the block, where it was asked for.
    warps: [u32; 32],
}

impl<'a> Known<'a> {
    fn new(clocks: &'a WarpClock) -> Known<'a> {
        let agent = clocks.agent();
        Known { clocks, agent, covered: clocks.covered(agent), warps: [0; 32] }
    }

    /// Whether every lane comes after an access.
    #[inline(always)]
    fn covers(&mut self, agent: Agent, clock: u32) -> bool {
        if agent != self.agent {
            self.agent = agent;
            self.covered = self.clocks.covered(agent);
        }
        clock <= self.covered
    }
}

/// An earlier access that the present one is not ordered after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The earlier access.
    pub prior: Stamp,
    /// Its instruction.
    pub prior_pc: u32,
    /// Whether it was a write.
    pub prior_wrote: bool,
    /// What is missing between the two.
    pub edge: Edge,
    /// The first byte in question.
    pub address: u32,
}

#[derive(Clone, Copy)]
struct Cell {
    write: Stamp,
    write_pc: u32,
    /// The first of four parts, or 0.
    parts: u32,
    /// The warps of this block that have read since the last write.
    readers: u32,
    /// One more than the first of the other readers, or 0.
    others: u32,
}

impl Cell {
    const FRESH: Cell = Cell { write: Stamp::NEVER, write_pc: 0, parts: 0, readers: 0, others: 0 };
}

/// A warp's last read of a cell: its clock, and the instruction and lanes packed.
#[derive(Clone, Copy, Default)]
struct Read {
    clock: u32,
    pc_and_lanes: u32,
}

/// A read by somebody else than a warp of the block.
#[derive(Clone, Copy)]
struct OtherRead {
    stamp: Stamp,
    pc: u32,
    /// One more than the next one of the same cell, or 0.
    next: u32,
}

/// The shadow of one block's shared memory.
pub struct SharedShadow {
    /// The cells of the memory, then parts of them.
    cells: Vec<Cell>,
    /// The number of cells of the memory.
    whole: usize,
    /// The reads of cells, one warp after the other: a warp that reads many of them stays in its own lines of the cache.
    reads: Vec<Read>,
    /// The reads of parts, one part after the other.
    part_reads: Vec<Read>,
    /// Other readers, as lists; a cell that is read anew reuses the place of a read that came before.
    others: Vec<OtherRead>,
    /// One more than the first place that is free, or 0.
    free_other: u32,
    free_parts: Vec<u32>,
    first_warp: Agent,
    warps: usize,
}

/// The size of a node by its depth: cell, word, byte.
const SIZES: [u32; 3] = [16, 4, 1];
const FULL: [u16; 3] = [0xFFFF, 0xF, 1];

impl SharedShadow {
    /// The shadow of `bytes` of memory of a block whose warps are the agents from `first_warp` on.
    pub fn new(bytes: u32, first_warp: Agent, warps: usize) -> SharedShadow {
        let cells = bytes.div_ceil(CELL) as usize;
        SharedShadow {
            cells: vec![Cell::FRESH; cells],
            whole: cells,
            reads: vec![Read::default(); cells * warps],
            part_reads: Vec::new(),
            others: Vec::new(),
            free_other: 0,
            free_parts: Vec::new(),
            first_warp,
            warps,
        }
    }

    /// The place of a warp's last read of a node.
    #[inline(always)]
    fn read_of(&mut self, node: u32, local: usize) -> &mut Read {
        match (node as usize).checked_sub(self.whole) {
            None => &mut self.reads[local * self.whole + node as usize],
            Some(part) => &mut self.part_reads[part * self.warps + local],
        }
    }

    /// Records a read of the bytes of a cell that `mask` names.
    #[inline(always)]
    pub fn read(&mut self, cell: u32, mask: u16, access: &Access<'_>) -> Option<Conflict> {
        if mask == 0xFFFF && self.cells[cell as usize].parts == 0 {
            return self.read_leaf(cell, cell * CELL, access);
        }
        self.visit(cell, cell * CELL, 0, mask, access, false)
    }

    /// Records ordinary reads of whole cells by a warp of the block, of those whose last write all its lanes come
    /// after; `lanes_of` says which lanes have the cell of an address. Returns which of the addresses are done with.
    #[inline(always)]
    pub fn read_after_all(
        &mut self,
        addresses: &[u32],
        wanted: u32,
        clocks: &WarpClock,
        lanes_of: impl Fn(usize) -> Lanes,
        pc: u32,
    ) -> u32 {
        let Stamp { clock, agent, .. } = clocks.stamp(Lanes::ALL);
        let (warps, local) = (self.warps, usize::from(agent.wrapping_sub(self.first_warp)));
        if local >= warps {
            return 0;
        }
        let cells = &mut self.cells[..self.whole];
        let reads = &mut self.reads[local * self.whole..][..self.whole];
        let mut known = Known::new(clocks);
        let mut done = 0;
        for (l, address) in addresses.iter().enumerate() {
            let cell = (address / CELL) as usize;
            if wanted >> l & 1 == 0 {
                continue;
            }
            let of = &mut cells[cell];
            if of.parts == 0 && known.covers(of.write.agent, of.write.clock) {
                of.readers |= 1 << local;
                reads[cell] = Read { clock, pc_and_lanes: pc << 11 | u32::from(lanes_of(l).code()) };
                done |= 1 << l;
            }
        }
        done
    }

    /// What a warp knows of all agents, the warps of the block among them.
    pub fn known<'a>(&self, clocks: &'a WarpClock) -> Known<'a> {
        let mut known = Known::new(clocks);
        for (local, covered) in known.warps.iter_mut().enumerate().take(self.warps) {
            *covered = clocks.covered(self.first_warp + local as Agent);
        }
        known
    }

    /// Records a write of a whole cell through ordinary addresses, if all lanes of the warp that makes or starts it
    /// come after every earlier access. False where there is more to look at.
    #[inline(always)]
    pub fn write_after_all(&mut self, cell: u32, known: &mut Known<'_>, stamp: Stamp, pc: u32) -> bool {
        let of = &mut self.cells[cell as usize];
        if of.parts != 0 || of.others != 0 || !known.covers(of.write.agent, of.write.clock) {
            return false;
        }
        let mut readers = of.readers;
        while readers != 0 {
            let local = readers.trailing_zeros() as usize;
            readers &= readers - 1;
            if self.reads[local * self.whole + cell as usize].clock > known.warps[local] {
                return false;
            }
        }
        *of = Cell { write: stamp, write_pc: pc, ..Cell::FRESH };
        true
    }

    /// Records a write of the bytes of a cell that `mask` names.
    #[inline(always)]
    pub fn write(&mut self, cell: u32, mask: u16, access: &Access<'_>) -> Option<Conflict> {
        if mask == 0xFFFF && self.cells[cell as usize].parts == 0 {
            return self.write_leaf(cell, cell * CELL, access);
        }
        self.visit(cell, cell * CELL, 0, mask, access, true)
    }

    /// Walks down to the parts that the mask names, splitting where it names only some.
    fn visit(
        &mut self,
        node: u32,
        address: u32,
        depth: usize,
        mask: u16,
        access: &Access<'_>,
        write: bool,
    ) -> Option<Conflict> {
        if self.cells[node as usize].parts == 0 {
            if mask == FULL[depth] {
                return if write {
                    self.write_leaf(node, address, access)
                } else {
                    self.read_leaf(node, address, access)
                };
            }
            self.split(node, depth);
        }
        let parts = self.cells[node as usize].parts;
        let size = SIZES[depth + 1];
        let mut first = None;
        for i in 0..4 {
            let part = (mask >> (i * size)) & FULL[depth + 1];
            if part != 0 {
                let access = Access {
                    stamp: access.stamp.part(i * size, size),
                    lanes: access.lanes.part(i * size, size),
                    ..*access
                };
                let conflict = self.visit(parts + i, address + i * size, depth + 1, part, &access, write);
                first = first.or(conflict);
            }
        }
        if write && mask == FULL[depth] {
            self.unite(node);
            let cell = &mut self.cells[node as usize];
            cell.write = access.stamp;
            cell.write_pc = access.pc;
            cell.readers = 0;
        }
        first
    }

    #[inline(always)]
    fn read_leaf(&mut self, node: u32, address: u32, access: &Access<'_>) -> Option<Conflict> {
        let cell = &mut self.cells[node as usize];
        let mut conflict = None;
        if cell.write.clock != 0 {
            let edge = access.clocks.edge(cell.write, access.lanes, access.proxy);
            if edge != Edge::Ordered {
                conflict = Some(Conflict {
                    prior: cell.write,
                    prior_pc: cell.write_pc,
                    prior_wrote: true,
                    edge,
                    address,
                });
            }
        }
        let local = usize::from(access.stamp.agent.wrapping_sub(self.first_warp));
        if local < self.warps {
            cell.readers |= 1 << local;
            *self.read_of(node, local) = Read {
                clock: access.stamp.clock,
                pc_and_lanes: access.pc << 11 | u32::from(access.stamp.lanes.code()),
            };
        } else {
            self.read_by_other(node, access);
        }
        conflict
    }

    #[inline]
    fn write_leaf(&mut self, node: u32, address: u32, access: &Access<'_>) -> Option<Conflict> {
        let cell = self.cells[node as usize];
        let mut conflict = None;
        if cell.write.clock != 0 {
            let edge = access.clocks.edge(cell.write, access.lanes, access.proxy);
            if edge != Edge::Ordered {
                conflict = Some(Conflict {
                    prior: cell.write,
                    prior_pc: cell.write_pc,
                    prior_wrote: true,
                    edge,
                    address,
                });
            }
        }
        let mut readers = cell.readers;
        while readers != 0 {
            let local = readers.trailing_zeros();
            readers &= readers - 1;
            let read = *self.read_of(node, local as usize);
            let prior = Stamp {
                clock: read.clock,
                agent: self.first_warp + local as Agent,
                lanes: Lanes::from_code(read.pc_and_lanes as u16 & 0x7FF),
            };
            let edge = access.clocks.edge(prior, access.lanes, access.proxy);
            if edge != Edge::Ordered && conflict.is_none() {
                conflict = Some(Conflict {
                    prior,
                    prior_pc: read.pc_and_lanes >> 11,
                    prior_wrote: false,
                    edge,
                    address,
                });
            }
        }
        let mut other = cell.others;
        while other != 0 {
            let OtherRead { stamp: prior, pc: prior_pc, next } = self.others[other as usize - 1];
            let edge = access.clocks.edge(prior, access.lanes, access.proxy);
            if edge != Edge::Ordered && conflict.is_none() {
                conflict = Some(Conflict { prior, prior_pc, prior_wrote: false, edge, address });
            }
            self.drop_other(other);
            other = next;
        }
        self.cells[node as usize] =
            Cell { write: access.stamp, write_pc: access.pc, parts: 0, readers: 0, others: 0 };
        conflict
    }

    fn read_by_other(&mut self, node: u32, access: &Access<'_>) {
        // A read that the new one comes after needs no memory of its own: who comes after the new one comes
        // after it too.
        let mut other = self.cells[node as usize].others;
        if let Some(only) = other.checked_sub(1)
            && let read = &mut self.others[only as usize]
            && read.next == 0
            && (read.stamp.agent == access.stamp.agent
                || access.clocks.edge(read.stamp, access.lanes, access.proxy) == Edge::Ordered)
        {
            *read = OtherRead { stamp: access.stamp, pc: access.pc, next: 0 };
            return;
        }
        let mut kept = 0;
        while other != 0 {
            let read = &mut self.others[other as usize - 1];
            let next = read.next;
            let stays = read.stamp.agent != access.stamp.agent
                && access.clocks.edge(read.stamp, access.lanes, access.proxy) != Edge::Ordered;
            if stays {
                read.next = std::mem::replace(&mut kept, other);
            } else {
                self.drop_other(other);
            }
            other = next;
        }
        self.cells[node as usize].others = self.add_other(access.stamp, access.pc, kept);
    }

    /// Puts a read before the others of a list. Returns the list.
    fn add_other(&mut self, stamp: Stamp, pc: u32, next: u32) -> u32 {
        let read = OtherRead { stamp, pc, next };
        let place = self.free_other;
        if place == 0 {
            self.others.push(read);
            return self.others.len() as u32;
        }
        self.free_other = std::mem::replace(&mut self.others[place as usize - 1], read).next;
        place
    }

    /// Gives the place of a read back.
    fn drop_other(&mut self, place: u32) {
        self.others[place as usize - 1].next = std::mem::replace(&mut self.free_other, place);
    }

    fn drop_others(&mut self, list: u32) {
        let mut other = list;
        while other != 0 {
            let next = self.others[other as usize - 1].next;
            self.drop_other(other);
            other = next;
        }
    }

    fn split(&mut self, node: u32, depth: usize) {
        let parts = self.free_parts.pop().unwrap_or_else(|| {
            let first = self.cells.len() as u32;
            self.cells.resize(self.cells.len() + 4, Cell::FRESH);
            self.part_reads.resize((self.cells.len() - self.whole) * self.warps, Read::default());
            first
        });
        let whole = self.cells[node as usize];
        let size = SIZES[depth + 1];
        for i in 0..4u32 {
            let part = (parts + i) as usize;
            let mut others = 0;
            let mut other = whole.others;
            while other != 0 {
                let OtherRead { stamp, pc, next } = self.others[other as usize - 1];
                others = self.add_other(stamp.part(i * size, size), pc, others);
                other = next;
            }
            self.cells[part] = Cell { write: whole.write.part(i * size, size), parts: 0, others, ..whole };
            for warp in 0..self.warps {
                let read = *self.read_of(node, warp);
                let lanes = Lanes::from_code(read.pc_and_lanes as u16 & 0x7FF);
                let stamp = Stamp { clock: 0, agent: 0, lanes }.part(i * size, size);
                *self.read_of(part as u32, warp) = Read {
                    clock: read.clock,
                    pc_and_lanes: read.pc_and_lanes & !0x7FF | u32::from(stamp.lanes.code()),
                };
            }
        }
        self.drop_others(whole.others);
        let cell = &mut self.cells[node as usize];
        cell.parts = parts;
        cell.others = 0;
        cell.readers = 0;
    }

    /// Gives the parts of a node back.
    fn unite(&mut self, node: u32) {
        let parts = self.cells[node as usize].parts;
        if parts == 0 {
            return;
        }
        for i in 0..4 {
            self.unite(parts + i);
            self.drop_others(self.cells[(parts + i) as usize].others);
            self.cells[(parts + i) as usize] = Cell::FRESH;
        }
        self.free_parts.push(parts);
        self.cells[node as usize].parts = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ClockPair;

    const ALL_LANES: u32 = u32::MAX;

    fn access(clocks: &WarpClock, lanes: Lanes, pc: u32) -> Access<'_> {
        Access { clocks, proxy: Proxy::Generic, stamp: clocks.stamp(lanes), lanes, pc }
    }

    fn meet(warps: &mut [WarpClock]) {
        let mut barrier = ClockPair::default();
        for w in warps.iter_mut() {
            w.publish(ALL_LANES, ALL_LANES, &mut barrier);
        }
        for w in warps.iter_mut() {
            w.acquire(ALL_LANES, ALL_LANES, &barrier);
            w.sync_lanes();
        }
    }

    #[test]
    fn a_read_conflicts_with_an_unordered_write_and_not_after_a_barrier() {
        let mut warps = [WarpClock::new(0), WarpClock::new(1)];
        let mut shadow = SharedShadow::new(64, 0, 2);
        assert!(shadow.write(1, 0xFFFF, &access(&warps[0], Lanes::one(3), 7)).is_none());
        let conflict = shadow.read(1, 0xFFFF, &access(&warps[1], Lanes::one(0), 9)).expect("a race");
        assert_eq!((conflict.prior_pc, conflict.prior_wrote, conflict.address), (7, true, 16));
        assert_eq!(conflict.edge, Edge::Missing);
        meet(&mut warps);
        assert!(shadow.read(1, 0xFFFF, &access(&warps[1], Lanes::one(0), 9)).is_none());
    }

    #[test]
    fn a_write_conflicts_with_every_unordered_reader_even_when_another_reader_came_later() {
        let mut warps = [WarpClock::new(0), WarpClock::new(1), WarpClock::new(2)];
        let mut shadow = SharedShadow::new(16, 0, 3);
        shadow.read(0, 0xFFFF, &access(&warps[1], Lanes::ALL, 1));
        shadow.read(0, 0xFFFF, &access(&warps[2], Lanes::ALL, 2));
        // Warp 2 tells warp 0 that it has read; warp 1 does not.
        let mut flag = ClockPair::default();
        warps[2].publish(ALL_LANES, ALL_LANES, &mut flag);
        warps[0].acquire(ALL_LANES, ALL_LANES, &flag);
        let conflict = shadow.write(0, 0xFFFF, &access(&warps[0], Lanes::one(0), 3)).expect("a race");
        assert_eq!((conflict.prior_pc, conflict.prior_wrote), (1, false));
    }

    #[test]
    fn accesses_to_different_bytes_of_a_cell_do_not_conflict() {
        let warps = [WarpClock::new(0), WarpClock::new(1)];
        let mut shadow = SharedShadow::new(16, 0, 2);
        assert!(shadow.write(0, 0x0003, &access(&warps[0], Lanes::one(0), 1)).is_none());
        assert!(shadow.write(0, 0x000C, &access(&warps[1], Lanes::one(0), 2)).is_none());
        assert!(shadow.write(0, 0x00F0, &access(&warps[1], Lanes::one(0), 3)).is_none());
        let conflict = shadow.read(0, 0xFFFF, &access(&warps[0], Lanes::one(0), 4)).expect("a race");
        assert_eq!((conflict.address, conflict.prior_pc), (2, 2));
        let conflict = shadow.write(0, 0x0001, &access(&warps[1], Lanes::one(0), 5)).expect("a race");
        assert_eq!(conflict.address, 0);
    }

    #[test]
    fn a_whole_write_unites_a_split_cell() {
        let mut warps = [WarpClock::new(0)];
        let mut shadow = SharedShadow::new(16, 0, 1);
        for _ in 0..100 {
            shadow.write(0, 0x0001, &access(&warps[0], Lanes::one(0), 1));
            meet(&mut warps);
            assert!(shadow.write(0, 0xFFFF, &access(&warps[0], Lanes::one(1), 2)).is_none());
            meet(&mut warps);
        }
        assert!(shadow.cells.len() <= 9, "parts are reused: {}", shadow.cells.len());
    }

    #[test]
    fn a_run_of_lanes_keeps_each_lane_apart_when_the_cell_is_split() {
        let warp = WarpClock::new(0);
        let mut shadow = SharedShadow::new(16, 0, 1);
        shadow.write(0, 0xFFFF, &access(&warp, Lanes::run(4, 4, 1), 1));
        assert!(shadow.read(0, 0x0F00, &access(&warp, Lanes::one(6), 2)).is_none());
        let conflict = shadow.read(0, 0x00F0, &access(&warp, Lanes::one(6), 3)).expect("lane 5 wrote it");
        assert_eq!(conflict.edge, Edge::MissingWarpBarrier);
    }

    #[test]
    fn asynchronous_readers_are_remembered_until_the_write() {
        let mut warp = WarpClock::new(0);
        let mut shadow = SharedShadow::new(16, 0, 1);
        let by_tensor_core = Access {
            clocks: &warp,
            proxy: Proxy::Async,
            stamp: Stamp { clock: 1, agent: 1, lanes: Lanes::ALL },
            lanes: Lanes::ALL,
            pc: 5,
        };
        shadow.read(0, 0xFFFF, &by_tensor_core);
        let conflict = shadow.write(0, 0xF, &access(&warp, Lanes::one(0), 6)).expect("still being read");
        assert_eq!((conflict.prior_pc, conflict.prior_wrote), (5, false));
        warp.acquire_completion(ALL_LANES, ALL_LANES, 1, 1);
        assert!(shadow.write(0, 0xFFF0, &access(&warp, Lanes::one(0), 7)).is_none());
    }
}
