//! The shadow of a block's shared memory: for every byte, who wrote it last and who has read it since.
//!
//! The unit is a cell of 16 bytes, which is what `ldmatrix`, `cp.async` and vector accesses touch; [`Cells`] has them.
//! TMA writes, and `wgmma` reads, many cells alike: 64 of them are a page, and a page that was last written as a whole
//! is kept as one, with the asynchronous readers since and which of its cells they had. Any other access makes cells of
//! it; the next write of the whole makes it one page again.
//!
//! What everybody is ordered after is most of what there is. Reads and writes of a whole warp are asked for that first,
//! all cells in one go; only where the answer is no, cells are looked at one by one.

use crate::cells::{Cell, Cells, Read};
use crate::clock::{Agent, Edge, Lanes, Proxy, Stamp, WarpClock};

/// Bytes in a cell.
pub const CELL: u32 = 16;
/// Cells in a page.
pub const PAGE: usize = 64;
/// Bytes in a page.
pub const PAGE_BYTES: u32 = PAGE as u32 * CELL;

/// In the place of the first cell of a page that is kept as one: no cell has such a number.
const TOGETHER: u32 = u32::MAX / 2;

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

/// A page that is kept as one, and where its cells are when it is not.
struct Page {
    /// The last write, of all its bytes.
    write: Stamp,
    /// Its instruction.
    write_pc: u32,
    /// The first of its cells, once there were any.
    cells: Option<u32>,
    /// The asynchronous reads since the last write.
    reads: Vec<PageRead>,
}

/// An asynchronous read of some cells of a page.
struct PageRead {
    stamp: Stamp,
    pc: u32,
    /// One bit a cell.
    cells: u64,
}

/// The shadow of one block's shared memory.
pub struct SharedShadow {
    pages: Vec<Page>,
    /// For each page the first of its cells, or [`TOGETHER`].
    first: Vec<u32>,
    cells: Cells,
    /// For each page, one warp of the block after the other: the clock of its latest read there.
    latest: Vec<u32>,
    warps: usize,
}

impl SharedShadow {
    /// The shadow of `bytes` of memory of a block whose warps are the agents from `first_warp` on.
    pub fn new(bytes: u32, first_warp: Agent, warps: usize) -> SharedShadow {
        let pages = bytes.div_ceil(PAGE_BYTES) as usize;
        let fresh = || Page { write: Stamp::NEVER, write_pc: 0, cells: None, reads: Vec::new() };
        SharedShadow {
            pages: (0..pages).map(|_| fresh()).collect(),
            first: vec![TOGETHER; pages],
            cells: Cells::new(first_warp, warps),
            latest: vec![0; pages * warps],
            warps,
        }
    }

    /// The number of a cell, told apart from the others of its page.
    #[inline(always)]
    fn cell(&mut self, cell: u32) -> u32 {
        let (page, place) = (cell as usize / PAGE, cell % PAGE as u32);
        if self.first[page] == TOGETHER {
            self.tell_apart(page);
        }
        self.first[page] + place
    }

    /// Makes cells of a page.
    fn tell_apart(&mut self, page: usize) {
        let Page { write, write_pc, cells, reads } = &mut self.pages[page];
        let first = *cells.get_or_insert_with(|| self.cells.add_page());
        for i in 0..PAGE {
            let mut cell = Cell::written(*write, *write_pc);
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
    pub fn read(&mut self, cell: u32, mask: u16, access: &Access<'_>) -> Option<Conflict> {
        let node = self.cell(cell);
        if let Some(local) = self.cells.local(access.stamp.agent) {
            self.latest[cell as usize / PAGE * self.warps + local] = access.stamp.clock;
        }
        self.cells.access(node, cell * CELL, mask, access, false)
    }

    /// Records a write of the bytes of a cell that `mask` names.
    #[inline(always)]
    pub fn write(&mut self, cell: u32, mask: u16, access: &Access<'_>) -> Option<Conflict> {
        let node = self.cell(cell);
        self.cells.access(node, cell * CELL, mask, access, true)
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
        let Some(local) = self.cells.local(agent) else { return 0 };
        let (first, warps) = (&self.first[..], self.warps);
        let number = |address: u32| {
            let first = first.get((address / PAGE_BYTES) as usize).copied().unwrap_or(TOGETHER);
            first + address / CELL % PAGE as u32
        };
        // All are looked at before any is noted: without branches, this takes a few instructions a row.
        let mut done = 0;
        for (l, &address) in addresses.iter().enumerate() {
            let ordered =
                self.cells.whole.get(number(address) as usize).is_some_and(|cell| {
                    cell.parts == 0 && cell.write.clock <= clocks.covered(cell.write.agent)
                });
            done |= u32::from(ordered) << l;
        }
        done &= wanted;
        for (l, &address) in addresses.iter().enumerate() {
            if done >> l & 1 == 1 {
                let cell = number(address);
                self.cells.whole[cell as usize].readers |= 1 << local;
                self.cells.reads[Cells::place_of_read(cell, warps, local)] =
                    Read::new(clock, pc, lanes_of(l));
                self.latest[(address / PAGE_BYTES) as usize * warps + local] = clock;
            }
        }
        done
    }

    /// Records a write of whole cells, one a lane, through ordinary addresses, of those where all lanes of the warp that
    /// makes or starts it come after every earlier access. Returns which lanes are done with.
    #[inline(always)]
    pub fn write_after_all(
        &mut self,
        addresses: &[u32; 32],
        wanted: u32,
        clocks: &WarpClock,
        (agent, clock): (Agent, u32),
        pc: u32,
    ) -> u32 {
        let mut done = 0;
        let (mut page, mut quiet) = (usize::MAX, false);
        crate::exec::for_lanes(wanted, |l| {
            let address = addresses[l];
            if page != (address / PAGE_BYTES) as usize {
                page = (address / PAGE_BYTES) as usize;
                quiet = self.readers_are_covered(page, clocks);
            }
            let number = self.first[page] + address / CELL % PAGE as u32;
            let Some(cell) = self.cells.whole.get_mut(number as usize) else { return };
            if cell.parts | cell.others == 0
                && (quiet || cell.readers == 0)
                && cell.write.clock <= clocks.covered(cell.write.agent)
            {
                *cell = Cell::written(Stamp { clock, agent, lanes: Lanes::one(l as u32) }, pc);
                done |= 1 << l;
            }
        });
        done
    }

    /// Whether all lanes of a warp come after every read of a page that a warp of the block has made.
    fn readers_are_covered(&self, page: usize, clocks: &WarpClock) -> bool {
        let latest = &self.latest[page * self.warps..][..self.warps];
        latest.iter().zip(self.cells.warps()).all(|(&clock, warp)| clock <= clocks.covered(warp))
    }

    /// Whether a page is kept as one and an access comes after its last write.
    #[inline]
    pub fn is_readable(&self, page: u32, access: &Access<'_>) -> bool {
        let write = self.pages[page as usize].write;
        self.first[page as usize] == TOGETHER
            && access.clocks.edge(write, access.lanes, access.proxy) == Edge::Ordered
    }

    /// Records an asynchronous read of some cells of a page that is readable.
    pub fn read_page(&mut self, page: u32, cells: u64, access: &Access<'_>) {
        let mut noted = false;
        // A read that the new one comes after needs no memory of its own.
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

    /// Records a write of a page that is kept as one, if it comes after every earlier access. False where there is more to
    /// look at.
    pub fn write_page(&mut self, page: u32, access: &Access<'_>) -> bool {
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

    /// Makes one of a page of which an access has just written all cells.
    pub fn unite(&mut self, page: u32, access: &Access<'_>) {
        let of = &mut self.pages[page as usize];
        (of.write, of.write_pc) = (access.stamp, access.pc);
        self.first[page as usize] = TOGETHER;
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
    fn by(clocks: &WarpClock, agent: Agent, pc: u32) -> Access<'_> {
        let stamp = Stamp { clock: 1, agent, lanes: Lanes::ALL };
        Access { clocks, proxy: Proxy::Async, stamp, lanes: Lanes::one(0), pc }
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
            assert!(!page.write_page(0, &by(&warps[0], 7, 4)), "the reads are under way");
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
        let of = |l: usize| Lanes::one(l as u32);
        assert_eq!(
            shadow.write_after_all(&rows, ALL_LANES, &warps[0], (0, 1), 1),
            0,
            "pages are kept as one"
        );
        for (l, row) in rows.iter().enumerate() {
            assert!(shadow.write(row / CELL, 0xFFFF, &access(&warps[0], of(l), 1)).is_none());
        }
        assert_eq!(shadow.read_after_all(&rows, ALL_LANES, &warps[1], of, 2), 0);
        meet(&mut warps);
        assert_eq!(shadow.read_after_all(&rows, 0xFF, &warps[1], of, 2), 0xFF);
        let stamp = warps[0].stamp(Lanes::ALL);
        let written = shadow.write_after_all(&rows, ALL_LANES, &warps[0], (0, stamp.clock), 3);
        assert_eq!(written, !0xFF, "warp 1 may still read the others");
        let conflict = shadow.write(0, 0xFFFF, &access(&warps[0], Lanes::one(0), 3)).expect("a race");
        assert_eq!((conflict.prior_pc, conflict.prior_wrote), (2, false));
        meet(&mut warps);
        assert_eq!(shadow.write_after_all(&rows, ALL_LANES, &warps[1], (1, 9), 4), ALL_LANES);
        assert_eq!(shadow.write_after_all(&rows, 1, &warps[1], (1, 9), 4), 0, "it has just been written");
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
