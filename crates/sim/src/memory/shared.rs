//! A block's shared memory: its bytes, which of them hold a value, and the shadow that finds races.

use flashcore_ptx::SharedLayout;

use crate::exec::for_lanes;
use crate::machine::regs::Row;
use crate::memory::global::POISON;
use crate::races::clock::{Agent, Stamp, WarpClock};
use crate::races::lanes::Lanes;
use crate::races::shared_shadow::{CELL, PAGE, PAGE_BYTES, SharedShadow};
use crate::vectors::matrices::Survey;

/// One block's shared memory.
pub struct SharedMemory {
    bytes: Vec<u8>,
    /// What the bytes of each cell are.
    contents: Vec<Contents>,
    /// The pages of which all bytes are known to hold a value and not to belong to an mbarrier in use.
    plain_pages: Vec<bool>,
    /// The pages in which there has been an mbarrier.
    barrier_pages: Vec<bool>,
    /// One bit per byte: belongs to an allocation.
    allocated: Vec<u16>,
    /// Who wrote and read what.
    pub shadow: SharedShadow,
    len: u32,
    /// All bytes before this one belong to allocations.
    dense: u32,
}

/// What the bytes of a cell are: one bit per byte.
#[derive(Clone, Copy, Default)]
struct Contents {
    /// Holds a value.
    init: u16,
    /// Belongs to an mbarrier in use.
    barrier: u16,
}

impl Contents {
    /// Whether all bytes hold a value, and none belongs to an mbarrier in use.
    #[inline(always)]
    fn is_plain(self) -> bool {
        !self.init | self.barrier == 0
    }
}

/// The bits of the bytes `first..first + count` of a cell.
pub const fn cell_mask(first: u32, count: u32) -> u16 {
    ((((1u32 << count) - 1) << first) & 0xFFFF) as u16
}

impl SharedMemory {
    /// Shared memory of `len` bytes in which only what the layout names may be accessed. Without any allocation
    /// in the layout, all of it may.
    pub fn new(len: u32, layout: &SharedLayout, first_warp: Agent, warps: usize) -> SharedMemory {
        let cells = len.div_ceil(CELL) as usize;
        let bytes = POISON.to_le_bytes().repeat(cells * CELL as usize / 8);
        let mut allocated = vec![if layout.allocs().is_empty() { 0xFFFF } else { 0u16 }; cells];
        for alloc in layout.allocs() {
            for_cells(alloc.offset, alloc.bytes.min(len.saturating_sub(alloc.offset)), |cell, mask| {
                allocated[cell] |= mask;
            });
        }
        let whole = allocated.iter().take_while(|bits| **bits == 0xFFFF).count() as u32;
        SharedMemory {
            bytes,
            dense: (whole * CELL).min(len),
            contents: vec![Contents::default(); cells],
            plain_pages: vec![false; cells.div_ceil(PAGE)],
            barrier_pages: vec![false; cells.div_ceil(PAGE)],
            allocated,
            shadow: SharedShadow::new(len, first_warp, warps),
            len,
        }
    }

    /// The same memory as it is before a block begins.
    pub fn renewed(mut self) -> SharedMemory {
        self.bytes.as_chunks_mut().0.fill(POISON.to_le_bytes());
        self.contents.fill(Contents::default());
        self.plain_pages.fill(false);
        self.barrier_pages.fill(false);
        self.shadow.renew();
        self
    }

    /// Its size in bytes.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// All bytes before this one belong to allocations.
    #[inline]
    pub fn dense(&self) -> u32 {
        self.dense
    }

    /// Whether all these bytes belong to allocations.
    #[inline]
    pub fn contains(&self, address: u32, bytes: u32) -> bool {
        if u64::from(address) + u64::from(bytes) > u64::from(self.len) {
            return false;
        }
        let first = address % CELL;
        if first + bytes <= CELL {
            let mask = cell_mask(first, bytes);
            return self.allocated[(address / CELL) as usize] & mask == mask;
        }
        let mut inside = true;
        for_cells(address, bytes, |cell, mask| inside &= self.allocated[cell] & mask == mask);
        inside
    }

    /// Whether bytes of a cell hold a value.
    #[inline]
    pub fn initialised(&self, cell: u32, mask: u16) -> bool {
        self.contents[cell as usize].init & mask == mask
    }

    /// Whether all bytes of a cell hold a value, and none belongs to an mbarrier in use.
    #[inline(always)]
    pub fn is_plain(&self, cell: u32) -> bool {
        self.contents[cell as usize].is_plain()
    }

    /// Records a write of whole cells, one per lane, where all lanes of the warp that makes or starts it come after every
    /// earlier access and the page has no mbarrier. `lanes` says which lanes have the bytes of a cell. Returns the lanes
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
    ) -> u32 {
        let SharedMemory { contents, plain_pages, barrier_pages, shadow, .. } = self;
        let mut plain = true;
        let done = shadow.write_after_all(addresses, wanted, clocks, by, pc, lanes, |page| {
            plain &= plain_pages[page as usize];
            !barrier_pages[page as usize]
        });
        if !plain {
            for_lanes(done, |l| contents[(addresses[l] / CELL) as usize].init = 0xFFFF);
        }
        done
    }

    /// Records a warp's write of words in the same way, for the cells that four lanes fill in order. Returns the lanes whose
    /// write is recorded.
    pub fn write_quads(&mut self, addresses: &Row, clocks: &WarpClock, pc: u32) -> u32 {
        let mut heads = 0;
        for (quad, words) in addresses.as_chunks::<4>().0.iter().enumerate() {
            let first = words[0];
            let apart = (first % CELL)
                | (words[1] ^ first.wrapping_add(4))
                | (words[2] ^ first.wrapping_add(8))
                | (words[3] ^ first.wrapping_add(12));
            heads |= u32::from(apart == 0) << (4 * quad);
        }
        let Stamp { agent, clock, .. } = clocks.stamp(Lanes::ALL);
        let lanes = |first: u32| Lanes::run(first, 4, 1);
        let done = self.write_after_all(addresses, heads, clocks, (agent, clock), pc, lanes);
        // All four lanes of a cell.
        done * 0xF
    }

    /// Whether all bytes of a page hold a value, and none belongs to an mbarrier in use.
    #[inline]
    pub fn is_plain_page(&mut self, page: u32) -> bool {
        if !self.plain_pages[page as usize] {
            let lack = self.contents_of(page).iter().fold(0, |lack, cell| lack | !cell.init | cell.barrier);
            self.plain_pages[page as usize] = lack == 0;
        }
        self.plain_pages[page as usize]
    }

    /// Whether any byte of a page belongs to an mbarrier in use.
    pub fn has_barriers(&self, page: u32) -> bool {
        self.contents_of(page).iter().fold(0, |bits, cell| bits | cell.barrier) != 0
    }

    /// Records the reads of rows of 16 bytes that hold values and were written before. Returns the rows that are recorded.
    #[inline(always)]
    pub fn read_rows(
        &mut self,
        survey: &Survey,
        wanted: u32,
        clocks: &WarpClock,
        trans: bool,
        pc: u32,
    ) -> u32 {
        let SharedMemory { contents, plain_pages, shadow, .. } = self;
        shadow.read_rows(survey, wanted, clocks, trans, pc, |page| {
            let page = page as usize;
            if !plain_pages[page] {
                let end = contents.len().min((page + 1) * PAGE);
                plain_pages[page] = contents[page * PAGE..end].iter().all(|cell| cell.is_plain());
            }
            plain_pages[page]
        })
    }

    fn contents_of(&self, page: u32) -> &[Contents] {
        &self.contents[page as usize * PAGE..][..PAGE]
    }

    /// Notes that all bytes of a page hold a value.
    pub fn initialise_page(&mut self, page: u32) {
        self.contents[page as usize * PAGE..][..PAGE].iter_mut().for_each(|cell| cell.init = 0xFFFF);
    }

    /// Notes that bytes of a cell hold a value.
    #[inline]
    pub fn initialise(&mut self, cell: u32, mask: u16) {
        self.contents[cell as usize].init |= mask;
    }

    /// Whether any of the bytes of a cell belongs to an mbarrier in use.
    #[inline]
    pub fn is_barrier(&self, cell: u32, mask: u16) -> bool {
        self.contents[cell as usize].barrier & mask != 0
    }

    /// Says whether the 8 bytes at this address are an mbarrier in use.
    pub fn set_barrier(&mut self, address: u32, in_use: bool) {
        let mask = cell_mask(address % CELL, 8);
        self.plain_pages[(address / PAGE_BYTES) as usize] = false;
        self.barrier_pages[(address / PAGE_BYTES) as usize] = true;
        self.shadow.doubt(address / PAGE_BYTES);
        let bits = &mut self.contents[(address / CELL) as usize].barrier;
        *bits = if in_use { *bits | mask } else { *bits & !mask };
    }

    /// The bytes from an address on.
    #[inline]
    pub fn at(&self, address: u32, bytes: u32) -> &[u8] {
        &self.bytes[address as usize..][..bytes as usize]
    }

    /// The bytes from an address on, to be written.
    #[inline]
    pub fn at_mut(&mut self, address: u32, bytes: u32) -> &mut [u8] {
        &mut self.bytes[address as usize..][..bytes as usize]
    }

    /// All its bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Loads 1, 2, 4 or 8 bytes.
    #[inline]
    pub fn load(&self, address: u32, bytes: u32) -> u64 {
        let mut word = [0; 8];
        word[..bytes as usize].copy_from_slice(self.at(address, bytes));
        u64::from_le_bytes(word)
    }

    /// Loads a word.
    #[inline]
    pub fn word(&self, address: u32) -> u32 {
        let b = &self.bytes[address as usize..][..4];
        u32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }

    /// Loads four words.
    #[inline]
    pub fn words(&self, address: u32) -> [u32; 4] {
        let b = &self.bytes[address as usize..][..16];
        std::array::from_fn(|i| u32::from_le_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]]))
    }

    /// Stores a word.
    #[inline]
    pub fn store_word(&mut self, address: u32, value: u32) {
        self.bytes[address as usize..][..4].copy_from_slice(&value.to_le_bytes());
    }

    /// Stores 1, 2, 4 or 8 bytes.
    #[inline]
    pub fn store(&mut self, address: u32, bytes: u32, value: u64) {
        self.at_mut(address, bytes).copy_from_slice(&value.to_le_bytes()[..bytes as usize]);
    }

    /// Stores sixteen bytes as two words.
    #[inline(always)]
    pub fn store_cell(&mut self, address: u32, words: [u64; 2]) {
        let cell = &mut self.bytes[address as usize..][..CELL as usize];
        cell.as_chunks_mut::<8>().0.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
    }

    /// Fills sixteen bytes at a multiple of eight with the pattern of memory that holds no value.
    #[inline(always)]
    pub fn poison_cell(&mut self, address: u32) {
        self.store_cell(address, [POISON; 2]);
    }

    /// Fills bytes with the pattern of memory that holds no value.
    pub fn poison(&mut self, address: u32, bytes: u32) {
        let poison = POISON.to_le_bytes();
        let first = address as usize % 8;
        let at = self.at_mut(address, bytes);
        if let (0, Ok(cell)) = (first, <&mut [u8; CELL as usize]>::try_from(&mut *at)) {
            cell.as_chunks_mut().0.fill(poison);
            return;
        }
        if first == 0 {
            // Whole words, and the beginning of one at the end.
            for word in at.chunks_mut(8) {
                word.copy_from_slice(&poison[..word.len()]);
            }
        } else {
            for (i, byte) in at.iter_mut().enumerate() {
                *byte = poison[(first + i) % 8];
            }
        }
    }
}

/// Calls `f` for each cell that the bytes touch, with the bits of the bytes in it.
pub fn for_cells(address: u32, bytes: u32, mut f: impl FnMut(usize, u16)) {
    let end = address + bytes;
    let mut at = address;
    while at < end {
        let first = at % CELL;
        let count = (CELL - first).min(end - at);
        f((at / CELL) as usize, cell_mask(first, count));
        at += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::races::clock::{ClockPair, Proxy};
    use crate::races::shared_shadow::SharedAccess;

    #[test]
    fn only_allocated_bytes_may_be_accessed() {
        let mut layout = SharedLayout::new();
        layout.alloc("bars", 8, 8);
        layout.alloc("tile", 64, 32);
        let memory = SharedMemory::new(96, &layout, 0, 1);
        assert!(memory.contains(0, 8));
        assert!(!memory.contains(8, 4), "padding");
        assert!(!memory.contains(28, 8), "begins in padding");
        assert!(memory.contains(32, 64));
        assert!(!memory.contains(92, 8), "beyond the end");
        assert!(!memory.contains(u32::MAX, 4));
    }

    #[test]
    fn words_that_fill_cells_are_written_at_once_where_nobody_may_still_access_them() {
        let mut memory = SharedMemory::new(2048, &SharedLayout::new(), 0, 2);
        let mut clocks = [WarpClock::new(0), WarpClock::new(1)];
        // Rows of 16 bytes, but for one whose lanes are in another order.
        let mut words: Row = std::array::from_fn(|l| 64 * (l as u32 / 4) + 4 * (l as u32 % 4));
        words.swap(5, 6);
        assert_eq!(memory.write_quads(&words, &clocks[0], 1), !0xF0);
        assert!(memory.initialised(0, 0xFFFF) && !memory.initialised(4, 1) && memory.initialised(8, 0xFFFF));
        assert_eq!(memory.write_quads(&words, &clocks[1], 2), 0, "nothing orders the two");
        let lanes = Lanes::one(9);
        let stamp = clocks[0].stamp(lanes);
        let access = SharedAccess { clocks: &clocks[0], proxy: Proxy::Generic, stamp, lanes, pc: 3 };
        let race = memory.shadow.read(8, 0x000F, &access).expect("lane 8 wrote these bytes");
        assert_eq!((race.prior.lanes.any(), race.prior_pc), (8, 1));
        assert!(memory.shadow.read(8, 0x00F0, &access).is_none(), "lane 9 wrote these");
        let mut barrier = ClockPair::default();
        clocks[0].publish(u32::MAX, u32::MAX, &mut barrier);
        clocks[1].acquire(u32::MAX, u32::MAX, &barrier);
        assert_eq!(memory.write_quads(&words, &clocks[1], 4), !0xFF0, "the cell that is split is looked at");
    }

    #[test]
    fn renewed_memory_is_as_new() {
        let mut memory = SharedMemory::new(2048, &SharedLayout::new(), 0, 2);
        let clocks = [WarpClock::new(0), WarpClock::new(1)];
        let rows: Row = std::array::from_fn(|l| 16 * l as u32);
        memory.set_barrier(1024, true);
        assert_eq!(memory.write_after_all(&rows, u32::MAX, &clocks[0], (0, 1), 1, Lanes::one), u32::MAX);
        memory.at_mut(0, 16).fill(0);
        let mut memory = memory.renewed();
        assert_eq!(memory.load(0, 8), POISON);
        assert!(!memory.initialised(0, 1) && !memory.is_barrier(64, 0xFF));
        let unordered = memory.write_after_all(&rows, u32::MAX, &clocks[1], (1, 1), 2, Lanes::one);
        assert_eq!(unordered, u32::MAX, "nobody has written before");
    }

    #[test]
    fn cells_of_a_range_cover_exactly_its_bytes() {
        let mut seen = Vec::new();
        for_cells(12, 24, |cell, mask| seen.push((cell, mask)));
        assert_eq!(seen, [(0, 0xF000), (1, 0xFFFF), (2, 0x000F)]);
    }

    #[test]
    fn poisoned_bytes_are_nan_in_every_format() {
        let mut memory = SharedMemory::new(32, &SharedLayout::new(), 0, 1);
        memory.at_mut(0, 32).fill(0);
        memory.poison(4, 12);
        assert!(f32::from_bits(memory.load(4, 4) as u32).is_nan());
        assert!(half::f16::from_bits(memory.load(6, 2) as u16).is_nan());
        assert!(half::bf16::from_bits(memory.load(8, 2) as u16).is_nan());
        assert_eq!(memory.load(0, 4), 0);
        assert_eq!(memory.load(16, 4), 0);
    }
}
