//! Who accessed the cells of shared memory, exact to the byte.
//!
//! A cell of 16 bytes that is accessed in part is split into four words, and a word into four bytes; a write to the
//! whole makes it one cell again. Each keeps the last write and, for every warp of the block, its last read; readers
//! from elsewhere (asynchronous operations, other blocks of the cluster) are few and kept in a list.

use crate::races::clock::{Agent, Edge, Stamp};
use crate::races::lanes::Lanes;
use crate::races::shared_shadow::{PAGE, SharedAccess, SharedConflict};

/// The first number of a part; smaller ones are cells.
const PARTS: u32 = 1 << 24;

/// What is known of a cell, or of a part of one.
#[derive(Clone, Copy)]
pub struct SharedCell {
    /// The last write.
    pub write: Stamp,
    /// Its instruction.
    pub write_pc: u32,
    /// The first of four parts, or 0.
    pub parts: u32,
    /// The warps of this block that have read since the last write.
    pub readers: u32,
    /// One more than the first of the other readers, or 0.
    pub others: u32,
}

impl SharedCell {
    /// Nobody has accessed it.
    const FRESH: SharedCell = SharedCell::written(Stamp::NEVER, 0);

    /// It was written, and nothing happened since.
    pub const fn written(write: Stamp, write_pc: u32) -> SharedCell {
        SharedCell { write, write_pc, parts: 0, readers: 0, others: 0 }
    }

    /// The conflict of an access with the last write, if it does not come after it.
    #[inline(always)]
    fn after_write(&self, address: u32, access: &SharedAccess<'_>) -> Option<SharedConflict> {
        if self.write.clock == 0 {
            return None;
        }
        let edge = access.clocks.edge(self.write, access.lanes, access.proxy);
        let (prior, prior_pc) = (self.write, self.write_pc);
        (edge != Edge::Ordered).then_some(SharedConflict {
            prior,
            prior_pc,
            prior_wrote: true,
            edge,
            address,
        })
    }
}

/// A warp's last read of a cell: its clock, and the instruction and lanes packed.
#[derive(Clone, Copy, Default)]
pub struct Read {
    /// The warp's clock.
    pub clock: u32,
    pc_and_lanes: u32,
}

impl Read {
    /// A read by these lanes.
    #[inline(always)]
    pub fn new(clock: u32, pc: u32, lanes: Lanes) -> Read {
        Read { clock, pc_and_lanes: pc << 11 | u32::from(lanes.code()) }
    }

    fn pc(self) -> u32 {
        self.pc_and_lanes >> 11
    }

    fn lanes(self) -> Lanes {
        Lanes::from_code(self.pc_and_lanes as u16 & 0x7FF)
    }
}

/// A read by anything but a warp of the block.
#[derive(Clone, Copy)]
struct OtherRead {
    stamp: Stamp,
    pc: u32,
    /// One more than the next one of the same cell, or 0.
    next: u32,
}

/// The cells of one block's shared memory, for the pages that have cells.
pub struct Cells {
    /// The cells, a page after the other.
    pub whole: Vec<SharedCell>,
    /// The reads of cells: a page after the other, and in a page one warp after the other, so that a warp that reads many
    /// of them stays in its own lines of the cache.
    pub reads: Vec<Read>,
    parts: Vec<SharedCell>,
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

impl Cells {
    /// No cells yet, for a block of `pages` pages whose warps are the agents from `first_warp` on.
    pub fn new(first_warp: Agent, warps: usize, pages: usize) -> Cells {
        Cells {
            whole: Vec::with_capacity(pages * PAGE),
            reads: Vec::with_capacity(pages * PAGE * warps),
            parts: Vec::new(),
            part_reads: Vec::new(),
            others: Vec::new(),
            free_other: 0,
            free_parts: Vec::new(),
            first_warp,
            warps,
        }
    }

    /// Drops all cells.
    pub fn renew(&mut self) {
        self.whole.clear();
        self.reads.clear();
        self.parts.clear();
        self.part_reads.clear();
        self.others.clear();
        self.free_other = 0;
        self.free_parts.clear();
    }

    /// The number of parts that there are, used or not.
    #[cfg(test)]
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Makes the cells of a page. Returns the number of the first.
    pub fn add_page(&mut self) -> u32 {
        let first = self.whole.len();
        self.whole.resize(first + PAGE, SharedCell::FRESH);
        self.reads.resize((first + PAGE) * self.warps, Read::default());
        first as u32
    }

    /// The place of a warp's last read of a cell.
    #[inline(always)]
    pub fn place_of_read(cell: u32, warps: usize, local: usize) -> usize {
        let (page, cell) = (cell as usize / PAGE, cell as usize % PAGE);
        (page * warps + local) * PAGE + cell
    }

    /// The place in its block of a warp of the block.
    #[inline(always)]
    pub fn local(&self, agent: Agent) -> Option<usize> {
        Some(usize::from(agent.wrapping_sub(self.first_warp))).filter(|&local| local < self.warps)
    }

    /// The warps of the block as agents.
    pub fn warps(&self) -> std::ops::Range<Agent> {
        self.first_warp..self.first_warp + self.warps as Agent
    }

    #[inline(always)]
    fn node(&mut self, node: u32) -> &mut SharedCell {
        match node.checked_sub(PARTS) {
            None => &mut self.whole[node as usize],
            Some(part) => &mut self.parts[part as usize],
        }
    }

    /// The place of a warp's last read of a node.
    #[inline(always)]
    fn read_of(&mut self, node: u32, local: usize) -> &mut Read {
        match node.checked_sub(PARTS) {
            None => &mut self.reads[Cells::place_of_read(node, self.warps, local)],
            Some(part) => &mut self.part_reads[part as usize * self.warps + local],
        }
    }

    /// Records an access to the bytes of a cell that `mask` names.
    #[inline(always)]
    pub fn access(
        &mut self,
        cell: u32,
        address: u32,
        mask: u16,
        access: &SharedAccess<'_>,
        write: bool,
    ) -> Option<SharedConflict> {
        if mask == 0xFFFF && self.whole[cell as usize].parts == 0 {
            return if write {
                self.write_leaf(cell, address, access)
            } else {
                self.read_leaf(cell, address, access)
            };
        }
        self.visit(cell, address, 0, mask, access, write)
    }

    /// Walks down to the parts that the mask names, splitting where it names only some.
    fn visit(
        &mut self,
        node: u32,
        address: u32,
        depth: usize,
        mask: u16,
        access: &SharedAccess<'_>,
        write: bool,
    ) -> Option<SharedConflict> {
        if self.node(node).parts == 0 {
            if mask == FULL[depth] {
                return if write {
                    self.write_leaf(node, address, access)
                } else {
                    self.read_leaf(node, address, access)
                };
            }
            self.split(node, depth);
        }
        let parts = self.node(node).parts;
        let size = SIZES[depth + 1];
        let mut first = None;
        for i in 0..4 {
            let part = (mask >> (i * size)) & FULL[depth + 1];
            if part != 0 {
                let access = SharedAccess {
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
            let cell = self.node(node);
            cell.write = access.stamp;
            cell.write_pc = access.pc;
            cell.readers = 0;
        }
        first
    }

    #[inline(always)]
    fn read_leaf(&mut self, node: u32, address: u32, access: &SharedAccess<'_>) -> Option<SharedConflict> {
        let conflict = self.node(node).after_write(address, access);
        if let Some(local) = self.local(access.stamp.agent) {
            self.node(node).readers |= 1 << local;
            *self.read_of(node, local) = Read::new(access.stamp.clock, access.pc, access.stamp.lanes);
        } else {
            self.read_by_other(node, access);
        }
        conflict
    }

    #[inline]
    fn write_leaf(&mut self, node: u32, address: u32, access: &SharedAccess<'_>) -> Option<SharedConflict> {
        let cell = *self.node(node);
        let mut conflict = cell.after_write(address, access);
        let mut readers = cell.readers;
        while readers != 0 {
            let local = readers.trailing_zeros();
            readers &= readers - 1;
            let read = *self.read_of(node, local as usize);
            let prior =
                Stamp { clock: read.clock, agent: self.first_warp + local as Agent, lanes: read.lanes() };
            let edge = access.clocks.edge(prior, access.lanes, access.proxy);
            if edge != Edge::Ordered && conflict.is_none() {
                conflict =
                    Some(SharedConflict { prior, prior_pc: read.pc(), prior_wrote: false, edge, address });
            }
        }
        let mut other = cell.others;
        while other != 0 {
            let OtherRead { stamp: prior, pc: prior_pc, next } = self.others[other as usize - 1];
            let edge = access.clocks.edge(prior, access.lanes, access.proxy);
            if edge != Edge::Ordered && conflict.is_none() {
                conflict = Some(SharedConflict { prior, prior_pc, prior_wrote: false, edge, address });
            }
            self.drop_other(other);
            other = next;
        }
        *self.node(node) = SharedCell::written(access.stamp, access.pc);
        conflict
    }

    fn read_by_other(&mut self, node: u32, access: &SharedAccess<'_>) {
        // A read that the new one comes after need not be kept: whatever comes after the new one comes
        // after it too.
        let mut other = self.node(node).others;
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
        let others = self.add_other(access.stamp, access.pc, kept);
        self.node(node).others = others;
    }

    /// Puts a read before the others of a list. Returns the list.
    pub fn add_other(&mut self, stamp: Stamp, pc: u32, next: u32) -> u32 {
        let read = OtherRead { stamp, pc, next };
        let place = self.free_other;
        if place == 0 {
            self.others.push(read);
            return self.others.len() as u32;
        }
        self.free_other = std::mem::replace(&mut self.others[place as usize - 1], read).next;
        place
    }

    /// Frees the place of a read.
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
            let first = self.parts.len();
            self.parts.resize(first + 4, SharedCell::FRESH);
            self.part_reads.resize((first + 4) * self.warps, Read::default());
            PARTS + first as u32
        });
        let whole = *self.node(node);
        let size = SIZES[depth + 1];
        for i in 0..4u32 {
            let part = parts + i;
            let mut others = 0;
            let mut other = whole.others;
            while other != 0 {
                let OtherRead { stamp, pc, next } = self.others[other as usize - 1];
                others = self.add_other(stamp.part(i * size, size), pc, others);
                other = next;
            }
            *self.node(part) =
                SharedCell { write: whole.write.part(i * size, size), parts: 0, others, ..whole };
            for warp in 0..self.warps {
                let read = *self.read_of(node, warp);
                *self.read_of(part, warp) =
                    Read::new(read.clock, read.pc(), read.lanes().part(i * size, size));
            }
        }
        self.drop_others(whole.others);
        let cell = self.node(node);
        cell.parts = parts;
        cell.others = 0;
        cell.readers = 0;
    }

    /// Frees the parts of a node.
    fn unite(&mut self, node: u32) {
        let parts = self.node(node).parts;
        if parts == 0 {
            return;
        }
        for i in 0..4 {
            self.unite(parts + i);
            let others = std::mem::replace(self.node(parts + i), SharedCell::FRESH).others;
            self.drop_others(others);
        }
        self.free_parts.push(parts);
        self.node(node).parts = 0;
    }
}
