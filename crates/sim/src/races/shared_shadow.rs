//! The shadow of a block's shared memory: for every byte, who wrote it last and who has read it since.
//!
//! The unit is a cell of 16 bytes, which is what `ldmatrix`, `cp.async` and vector accesses touch; [`Cells`] has them.
//! TMA writes, and `wgmma` reads, many cells alike. 64 cells are a page, and a page that was last written as a whole is
//! tracked as a whole, with the asynchronous reads since then and which cells they read. Any other access makes cells of
//! it; the next write of the whole page unites it again.
//!
//! Mostly everything before an access is ordered before all lanes of the warp. That is checked first, for all cells that a
//! warp accesses at once; only if it does not hold are cells checked one by one.

use crate::machine::regs::Row;
use crate::races::clock::{Agent, Edge, Proxy, Stamp, WarpClock};
use crate::races::lanes::Lanes;
use crate::races::shared_cells::{Cells, Read, SharedCell};
use crate::vectors::matrices::Survey;

/// Bytes in a cell.
pub const CELL: u32 = 16;
/// Cells in a page.
pub const PAGE: usize = 64;
/// Bytes in a page.
pub const PAGE_BYTES: u32 = PAGE as u32 * CELL;

/// Stands for the first cell of a page that is tracked as a whole: no cell has such a number.
const TOGETHER: u32 = u32::MAX / 2;

/// Who accesses shared memory now.
#[derive(Clone, Copy)]
pub struct SharedAccess<'a> {
    /// The clocks of the warp that accesses, or that started the asynchronous operation.
    pub clocks: &'a WarpClock,
    /// Through which proxy.
    pub proxy: Proxy,
    /// The stamp to leave behind.
    pub stamp: Stamp,
    /// The lanes of the warp that make or start the access; the stamp's agent may be an asynchronous operation.
    pub lanes: Lanes,
    /// The instruction.
    pub pc: u32,
}

/// An earlier access that the present one is not ordered after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedConflict {
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

/// A page that is tracked as a whole, and where its cells are when it is not.
struct Page {
    /// The last write, of all its bytes.
    write: Stamp,
    /// Its instruction.
    write_pc: u32,
    /// The first of its cells, once there were any.
    cells: Option<u32>,
    /// The asynchronous reads since the last write.
    reads: Vec<PageRead>,
    /// Of cells: who has written them and up to which clock, perhaps with some whose writes were written over.
    writers: Vec<(Agent, u32)>,
    /// Of cells: whether some were accessed in part.
    split: bool,
    /// Of cells: whether others than warps of the block may have read some.
    others: bool,
    /// Of cells: reads that are not noted there yet, in their order.
    rows: Vec<RowsRead>,
    /// The cells that were written after all of those, one bit per cell.
    stale: u64,
}

impl Page {
    /// Nobody has accessed it.
    fn fresh(rows: Vec<RowsRead>) -> Page {
        Page {
            write: Stamp::NEVER,
            write_pc: 0,
            cells: None,
            reads: Vec::new(),
            writers: Vec::new(),
            split: false,
            others: false,
            rows,
            stale: 0,
        }
    }

    /// Takes the cells that were written since from the reads that are not noted yet.
    fn drop_stale(&mut self) {
        let stale = std::mem::take(&mut self.stale);
        if stale != 0 {
            self.rows.retain_mut(|read| {
                read.cells &= !stale;
                read.cells != 0
            });
        }
    }
}

/// An asynchronous read of some cells of a page.
struct PageRead {
    stamp: Stamp,
    pc: u32,
    /// One bit per cell.
    cells: u64,
}

/// A warp's read of rows of up to four 8x8 matrices, each a cell.
#[derive(Clone, Copy)]
struct RowsRead {
    /// The cells of the page that were not written since, one bit per cell.
    cells: u64,
    /// The cell of each row that is in the page, one byte per row; 255 where it is not.
    rows: [u64; 4],
    clock: u32,
    pc: u32,
    /// The warp's place in its block.
    local: u8,
    trans: bool,
}

/// How many reads of rows of a page are collected before they are noted at its cells.
const MAX_PENDING: usize = 128;
/// How many writers of a page are remembered before those without a cell left are dropped.
const MAX_WRITERS: usize = 8;

/// The shadow of one block's shared memory.
pub struct SharedShadow {
    pages: Vec<Page>,
    /// For each page the first of its cells, or [`TOGETHER`].
    first: Vec<u32>,
    cells: Cells,
    /// For each page, one warp of the block after the other: the clock of its latest read there.
    latest: Vec<u32>,
    /// For each page, one bit per warp of the block: it is known that the page consists of whole cells that hold values, and
    /// that the warp comes after its last writes. Warps only learn, so this holds until the page changes.
    readable: Vec<u32>,
    warps: usize,
}

impl SharedShadow {
    /// The shadow of `bytes` of memory of a block whose warps are the agents from `first_warp` on.
    pub fn new(bytes: u32, first_warp: Agent, warps: usize) -> SharedShadow {
        let pages = bytes.div_ceil(PAGE_BYTES) as usize;
        SharedShadow {
            pages: (0..pages).map(|_| Page::fresh(Vec::new())).collect(),
            first: vec![TOGETHER; pages],
            cells: Cells::new(first_warp, warps, pages),
            latest: vec![0; pages * warps],
            readable: vec![0; pages],
            warps,
        }
    }

    /// Forgets all accesses.
    pub fn renew(&mut self) {
        for page in &mut self.pages {
            page.rows.clear();
            *page = Page::fresh(std::mem::take(&mut page.rows));
        }
        self.first.fill(TOGETHER);
        self.cells.renew();
        self.latest.fill(0);
        self.readable.fill(0);
    }

    /// The number of a cell, made from its page if need be.
    #[inline(always)]
    fn cell(&mut self, cell: u32) -> u32 {
        let (page, place) = (cell as usize / PAGE, cell % PAGE as u32);
        if self.first[page] == TOGETHER {
            self.tell_apart(page);
        } else if !self.pages[page].rows.is_empty() {
            self.settle(page);
        }
        self.first[page] + place
    }

    /// Makes cells of a page.
    fn tell_apart(&mut self, page: usize) {
        let Page { write, write_pc, cells, reads, writers, split, others, .. } = &mut self.pages[page];
        (*split, *others) = (false, !reads.is_empty());
        self.readable[page] = 0;
        writers.clear();
        writers.push((write.agent, write.clock));
        let first = *cells.get_or_insert_with(|| self.cells.add_page());
        for i in 0..PAGE {
            let mut cell = SharedCell::written(*write, *write_pc);
            for read in reads.iter().filter(|read| read.cells >> i & 1 == 1) {
                cell.others = self.cells.add_other(read.stamp, read.pc, cell.others);
            }
            self.cells.whole[first as usize + i] = cell;
        }
        reads.clear();
        self.first[page] = first;
    }

    /// Records a read of the bytes of a cell that `mask` names.
    #[inline(always)]
    pub fn read(&mut self, cell: u32, mask: u16, access: &SharedAccess<'_>) -> Option<SharedConflict> {
        let node = self.cell(cell);
        if let Some(local) = self.cells.local(access.stamp.agent) {
            self.latest[cell as usize / PAGE * self.warps + local] = access.stamp.clock;
        } else {
            self.pages[cell as usize / PAGE].others = true;
        }
        if mask != 0xFFFF {
            self.pages[cell as usize / PAGE].split = true;
            self.readable[cell as usize / PAGE] = 0;
        }
        self.cells.access(node, cell * CELL, mask, access, false)
    }

    /// Records a write of the bytes of a cell that `mask` names.
    #[inline(always)]
    pub fn write(&mut self, cell: u32, mask: u16, access: &SharedAccess<'_>) -> Option<SharedConflict> {
        let node = self.cell(cell);
        self.pages[cell as usize / PAGE].split |= mask != 0xFFFF;
        let conflict = self.cells.access(node, cell * CELL, mask, access, true);
        self.note_writer(cell as usize / PAGE, (access.stamp.agent, access.stamp.clock));
        conflict
    }

    /// Records a warp's reads of whole cells as the rows of 8x8 matrices, in pages whose cells are all plain and whose last
    /// writes all lanes come after. `plain` says whether the cells of a page are plain. Returns the rows that are recorded.
    #[inline(always)]
    pub fn read_rows(
        &mut self,
        survey: &Survey,
        wanted: u32,
        clocks: &WarpClock,
        trans: bool,
        pc: u32,
        mut plain: impl FnMut(u32) -> bool,
    ) -> u32 {
        let Stamp { clock, agent, .. } = clocks.stamp(Lanes::ALL);
        let Some(local) = self.cells.local(agent) else { return 0 };
        let mut done = 0;
        let mut note = |page: u32, cells: u64, rows: [u64; 4], lanes: u32| {
            if self.readable[page as usize] >> local & 1 == 0 {
                if !self.writers_are_covered(page as usize, clocks) || !plain(page) {
                    return;
                }
                self.readable[page as usize] |= 1 << local;
            }
            if self.pages[page as usize].stale != 0 {
                self.pages[page as usize].drop_stale();
            }
            let pending = &mut self.pages[page as usize].rows;
            pending.push(RowsRead { cells, rows, clock, pc, local: local as u8, trans });
            if pending.len() == MAX_PENDING {
                self.settle(page as usize);
            }
            self.latest[page as usize * self.warps + local] = clock;
            done |= lanes;
        };
        // Matrices that lie in one page are noted together, others by the rows that follow each other in one.
        let matrix_lanes = |i: usize| 0xFFu32 << (8 * i);
        let mut left = wanted;
        for i in 0..4 {
            if left & matrix_lanes(i) != matrix_lanes(i) {
                continue;
            }
            if survey.together & matrix_lanes(i) == matrix_lanes(i) {
                let page = survey.page(i);
                let (mut cells, mut rows, mut lanes) = (0, [u64::MAX; 4], 0);
                for j in i..4 {
                    let all = matrix_lanes(j);
                    if left & survey.together & all == all && survey.page(j) == page {
                        cells |= survey.cells[j];
                        rows[j] = survey.rows[j];
                        lanes |= all;
                    }
                }
                left &= !lanes;
                note(page, cells, rows, lanes);
                continue;
            }
            let addresses = &survey.addresses[8 * i..8 * i + 8];
            let mut r = 0;
            while r < 8 {
                let (begin, page) = (r, addresses[r] / PAGE_BYTES);
                let (mut cells, mut rows) = (0, [u64::MAX; 4]);
                while r < 8 && addresses[r] / PAGE_BYTES == page {
                    let cell = addresses[r] / CELL % PAGE as u32;
                    rows[i] ^= u64::from(!cell as u8) << (8 * r);
                    cells |= 1 << cell;
                    r += 1;
                }
                note(page, cells, rows, ((1 << (r - begin)) - 1) << (8 * i + begin));
            }
        }
        done
    }

    /// A page has changed: which warps may read it must be found out again.
    pub fn doubt(&mut self, page: u32) {
        self.readable[page as usize] = 0;
    }

    /// Whether a page consists of whole cells whose last writes all lanes of a warp come after.
    #[inline(always)]
    fn writers_are_covered(&self, page: usize, clocks: &WarpClock) -> bool {
        let of = &self.pages[page];
        self.first[page] != TOGETHER
            && !of.split
            && of.writers.iter().all(|&(agent, clock)| clock <= clocks.covered(agent))
    }

    /// Notes the reads of rows that are pending in a page at its cells.
    fn settle(&mut self, page: usize) {
        let first = self.first[page];
        self.pages[page].drop_stale();
        for read in self.pages[page].rows.drain(..) {
            let rows = read.rows.iter().flat_map(|rows| rows.to_le_bytes().into_iter().enumerate());
            for (r, cell) in rows {
                if cell != u8::MAX && read.cells >> cell & 1 == 1 {
                    let (cell, local) = (first + u32::from(cell), usize::from(read.local));
                    // Row r of a matrix belongs to lanes 4r to 4r+3, four bytes each; transposed, to all.
                    let lanes = if read.trans { Lanes::ALL } else { Lanes::run(4 * r as u32, 4, 1) };
                    self.cells.whole[cell as usize].readers |= 1 << local;
                    self.cells.reads[Cells::place_of_read(cell, self.warps, local)] =
                        Read::new(read.clock, read.pc, lanes);
                }
            }
        }
    }

    /// Records a write of whole cells, one per lane, where all lanes of the warp that makes or starts it come after every
    /// earlier access, in pages that are `open` to it. `lanes` says which lanes have the bytes of a cell. Returns the lanes
    /// whose write is recorded.
    #[inline(always)]
    pub fn write_after_all(
        &mut self,
        addresses: &Row,
        wanted: u32,
        clocks: &WarpClock,
        by: (Agent, u32),
        pc: u32,
        lanes: impl Fn(u32) -> Lanes,
        mut open: impl FnMut(u32) -> bool,
    ) -> u32 {
        let (mut left, mut done) = (wanted, 0);
        while left != 0 {
            let page = (addresses[left.trailing_zeros() as usize] / PAGE_BYTES) as usize;
            let open = open(page as u32);
            if open && self.first[page] == TOGETHER {
                self.tell_apart(page);
            }
            let quiet = self.readers_are_covered(page, clocks);
            let calm = quiet && !self.pages[page].others && self.writers_are_covered(page, clocks);
            if open && !quiet {
                self.settle(page);
            }
            let first = self.first[page] as usize;
            let mut written = 0u64;
            // Lanes in their order: one that writes what another has just written is left for the careful check.
            while left != 0 {
                let l = left.trailing_zeros();
                let address = addresses[l as usize];
                if (address / PAGE_BYTES) as usize != page {
                    break;
                }
                left &= left - 1;
                if !open {
                    continue;
                }
                let place = address / CELL % PAGE as u32;
                let cell = &mut self.cells.whole[first + place as usize];
                let after = calm && written >> place & 1 == 0
                    || cell.parts | cell.others == 0
                        && (quiet || cell.readers == 0)
                        && cell.write.clock <= clocks.covered(cell.write.agent);
                if after {
                    *cell = SharedCell::written(Stamp { clock: by.1, agent: by.0, lanes: lanes(l) }, pc);
                    written |= 1 << place;
                    done |= 1 << l;
                }
            }
            if written != 0 {
                let of = &mut self.pages[page];
                of.stale |= written;
                if of.stale == u64::MAX {
                    of.rows.clear();
                }
                if of.rows.is_empty() {
                    of.stale = 0;
                }
                self.note_writer(page, by);
            }
        }
        done
    }

    /// Notes who has written to a page of cells.
    fn note_writer(&mut self, page: usize, (agent, clock): (Agent, u32)) {
        self.readable[page] = 0;
        let writers = &mut self.pages[page].writers;
        if let Some((_, latest)) = writers.iter_mut().find(|(of, _)| *of == agent) {
            *latest = clock.max(*latest);
            return;
        }
        writers.push((agent, clock));
        if writers.len() > MAX_WRITERS {
            // Most of their writes have been overwritten.
            writers.clear();
            for cell in &self.cells.whole[self.first[page] as usize..][..PAGE] {
                let Stamp { agent, clock, .. } = cell.write;
                match writers.iter_mut().find(|(of, _)| *of == agent) {
                    Some((_, latest)) => *latest = clock.max(*latest),
                    None => writers.push((agent, clock)),
                }
            }
        }
    }

    /// Whether all lanes of a warp come after every read of a page that a warp of the block has made.
    fn readers_are_covered(&self, page: usize, clocks: &WarpClock) -> bool {
        let latest = &self.latest[page * self.warps..][..self.warps];
        latest.iter().zip(self.cells.warps()).all(|(&clock, warp)| clock <= clocks.covered(warp))
    }

    /// Whether a page is tracked as a whole and an access comes after its last write.
    #[inline]
    pub fn is_readable(&self, page: u32, access: &SharedAccess<'_>) -> bool {
        let write = self.pages[page as usize].write;
        self.first[page as usize] == TOGETHER
            && access.clocks.edge(write, access.lanes, access.proxy) == Edge::Ordered
    }

    /// Records an asynchronous read of some cells of a page that is readable.
    pub fn read_page(&mut self, page: u32, cells: u64, access: &SharedAccess<'_>) {
        let mut noted = false;
        // A read that the new one comes after need not be kept.
        let reads = &mut self.pages[page as usize].reads;
        reads.retain_mut(|read| {
            if read.stamp == access.stamp && read.pc == access.pc {
                read.cells |= cells;
                noted = true;
            } else if read.cells & cells != 0
                && (read.stamp.agent == access.stamp.agent
                    || access.clocks.edge(read.stamp, access.lanes, access.proxy) == Edge::Ordered)
            {
                read.cells &= !cells;
            }
            read.cells != 0
        });
        if !noted {
            reads.push(PageRead { stamp: access.stamp, pc: access.pc, cells });
        }
    }

    /// Records a write of a page that is tracked as a whole, if it comes after every earlier access. False if it must be
    /// checked cell by cell.
    pub fn write_page(&mut self, page: u32, access: &SharedAccess<'_>) -> bool {
        let after = |prior| access.clocks.edge(prior, access.lanes, access.proxy) == Edge::Ordered;
        let of = &mut self.pages[page as usize];
        let ordered = self.first[page as usize] == TOGETHER
            && after(of.write)
            && of.reads.iter().all(|read| after(read.stamp));
        if ordered {
            (of.write, of.write_pc) = (access.stamp, access.pc);
            of.reads.clear();
        }
        ordered
    }

    /// Unites a page of which an access has just written all cells.
    pub fn unite(&mut self, page: u32, access: &SharedAccess<'_>) {
        let of = &mut self.pages[page as usize];
        (of.write, of.write_pc) = (access.stamp, access.pc);
        self.first[page as usize] = TOGETHER;
        self.readable[page as usize] = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::races::clock::ClockPair;
    use crate::vectors::matrices::survey;

    const ALL_LANES: u32 = u32::MAX;

    fn access(clocks: &WarpClock, lanes: Lanes, pc: u32) -> SharedAccess<'_> {
        SharedAccess { clocks, proxy: Proxy::Generic, stamp: clocks.stamp(lanes), lanes, pc }
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
        assert!(shadow.cells.parts() <= 8, "parts are reused: {}", shadow.cells.parts());
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

    /// An access of an asynchronous operation that lane 0 of a warp has started.
    fn by(clocks: &WarpClock, agent: Agent, pc: u32) -> SharedAccess<'_> {
        let stamp = Stamp { clock: 1, agent, lanes: Lanes::ALL };
        SharedAccess { clocks, proxy: Proxy::Async, stamp, lanes: Lanes::one(0), pc }
    }

    #[test]
    fn a_page_that_is_kept_as_one_tells_of_the_same_conflicts_as_its_cells() {
        let mut warps = [WarpClock::new(0), WarpClock::new(1)];
        for cell in [0, 9, 63] {
            let (mut page, mut cells) = (SharedShadow::new(1024, 0, 2), SharedShadow::new(1024, 0, 2));
            warps[0].acquire_completion(ALL_LANES, ALL_LANES, 5, 1);
            assert!(page.write_page(0, &by(&warps[0], 5, 1)));
            assert!(page.is_readable(0, &by(&warps[0], 6, 2)));
            assert!(!page.is_readable(0, &by(&warps[1], 6, 2)), "it knows nothing of the write");
            page.read_page(0, 0xFF, &by(&warps[0], 6, 2));
            page.read_page(0, u64::MAX << 8, &by(&warps[0], 6, 3));
            for i in 0..64 {
                assert!(cells.write(i, 0xFFFF, &by(&warps[0], 5, 1)).is_none());
                let pc = if i < 8 { 2 } else { 3 };
                assert!(cells.read(i, 0xFFFF, &by(&warps[0], 6, pc)).is_none());
            }
            assert!(!page.write_page(0, &by(&warps[0], 7, 4)), "the reads are in flight");
            let found =
                [&mut page, &mut cells].map(|shadow| shadow.write(cell, 0xFFFF, &by(&warps[0], 7, 4)));
            assert_eq!(found[0], found[1]);
            assert_eq!(found[0].expect("a race").prior_pc, if cell < 8 { 2 } else { 3 });
        }
        let mut page = SharedShadow::new(1024, 0, 2);
        page.read(3, 0xFFFF, &access(&warps[1], Lanes::one(0), 9));
        assert!(!page.write_page(0, &by(&warps[0], 5, 1)), "its cells are told apart");
        page.write(3, 0xFFFF, &by(&warps[0], 5, 1)).expect("the read is not ordered");
        page.unite(0, &by(&warps[0], 5, 1));
        assert!(page.is_readable(0, &by(&warps[0], 6, 2)));
    }

    #[test]
    fn rows_of_a_whole_warp_are_accessed_at_once_only_after_everybody() {
        let mut warps = [WarpClock::new(0), WarpClock::new(1)];
        let mut shadow = SharedShadow::new(4096, 0, 2);
        let rows: [u32; 32] = std::array::from_fn(|l| 128 * l as u32);
        let closed =
            shadow.write_after_all(&rows, ALL_LANES, &warps[0], (0, 1), 1, Lanes::one, |page| page > 0);
        assert_eq!(closed, !0xFF, "the first page is not open");
        for l in 0..8 {
            assert!(shadow.write(8 * l, 0xFFFF, &access(&warps[0], Lanes::one(l), 1)).is_none());
        }
        let mut matrices = Survey::NONE;
        survey(&rows, 0, 0, 4096, &mut matrices);
        assert_eq!(shadow.read_rows(&matrices, ALL_LANES, &warps[1], false, 2, |_| true), 0);
        meet(&mut warps);
        assert_eq!(shadow.read_rows(&matrices, ALL_LANES, &warps[1], false, 2, |_| false), 0);
        assert_eq!(shadow.read_rows(&matrices, 0xFF, &warps[1], false, 2, |_| true), 0xFF);
        let stamp = warps[0].stamp(Lanes::ALL);
        let by = (0, stamp.clock);
        let written = shadow.write_after_all(&rows, ALL_LANES, &warps[0], by, 3, Lanes::one, |_| true);
        assert_eq!(written, !0xFF, "warp 1 may still read the others");
        let conflict = shadow.write(24, 0xFFFF, &access(&warps[0], Lanes::one(0), 3)).expect("a race");
        assert_eq!((conflict.prior_pc, conflict.prior_wrote), (2, false));
        assert_eq!(conflict.prior.lanes.mask(), 0xF000, "row 3 belongs to lanes 12 to 15");
        assert_eq!(shadow.read_rows(&matrices, ALL_LANES, &warps[1], false, 5, |_| true), 0, "written anew");
        meet(&mut warps);
        assert_eq!(
            shadow.write_after_all(&rows, ALL_LANES, &warps[1], (1, 9), 4, Lanes::one, |_| true),
            ALL_LANES
        );
        assert_eq!(
            shadow.write_after_all(&rows, 1, &warps[1], (1, 9), 4, Lanes::one, |_| true),
            0,
            "it has just been written"
        );
    }

    #[test]
    fn asynchronous_readers_are_remembered_until_the_write() {
        let mut warp = WarpClock::new(0);
        let mut shadow = SharedShadow::new(16, 0, 1);
        let by_tensor_core = SharedAccess {
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
