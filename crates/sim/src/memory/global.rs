//! Global memory: allocations far apart from each other, with a record of which bytes hold a value.
//!
//! Every allocation has a window of the address space of its own, 8 GiB wide, so a stray pointer meets nothing
//! for gigabytes in either direction, and the allocation of an address is found by a shift. Blocks run on several
//! threads, so memory is made of atomic words; plain accesses are relaxed.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::races::global_shadow::{LINE, RaceShadow};

/// The byte pattern of memory that holds no value: a NaN in every float format, in either byte order of pairs.
pub const POISON: u64 = 0x7FFF_7FFF_7FFF_7FFF;

/// log2 of the address space that one allocation has to itself.
const WINDOW_BITS: u32 = 33;
/// Where in its window an allocation starts.
const LEAD: u64 = 1 << 31;

/// The largest allocation of global memory, in bytes.
pub const MOST_BUFFER_BYTES: usize = (1 << 32) - 1;

/// An allocation of global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer {
    /// The device address of its first byte.
    pub address: u64,
    /// Its size in bytes.
    pub len: usize,
}

/// One allocation with its shadow.
pub(crate) struct Region {
    pub name: String,
    pub base: u64,
    pub len: usize,
    words: Box<[AtomicU64]>,
    /// One bit per byte: holds a value.
    init: Box<[AtomicU64]>,
    /// One bit per byte: written by a kernel since the host last asked to forget.
    written: Box<[AtomicU64]>,
    pub races: RaceShadow,
}

impl Region {
    fn new(name: String, base: u64, len: usize, initialised: bool) -> Region {
        let words = len.div_ceil(8);
        Region {
            name,
            base,
            len,
            words: (0..words).map(|_| AtomicU64::new(POISON)).collect(),
            init: bits(len, initialised),
            written: bits(len, false),
            races: RaceShadow::new(len),
        }
    }

    /// Loads 1, 2, 4 or 8 bytes at a multiple of that size.
    #[inline]
    pub fn load(&self, offset: usize, bytes: u32) -> u64 {
        let word = self.words[offset / 8].load(Relaxed);
        let shifted = word >> ((offset % 8) * 8);
        if bytes == 8 { shifted } else { shifted & ((1 << (bytes * 8)) - 1) }
    }

    /// Stores 1, 2, 4 or 8 bytes at a multiple of that size.
    #[inline]
    pub fn store(&self, offset: usize, bytes: u32, value: u64) {
        self.put(offset, bytes, value);
        self.note_written(offset, bytes);
    }

    /// Stores 1, 2, 4 or 8 bytes at a multiple of that size; that they were written is noted by the caller.
    #[inline]
    pub fn put(&self, offset: usize, bytes: u32, value: u64) {
        let word = &self.words[offset / 8];
        if bytes == 8 {
            word.store(value, Relaxed);
        } else {
            self.update(offset, bytes, |_| value);
        }
    }

    /// Replaces 1, 2, 4 or 8 bytes by a function of them, atomically; returns the old value.
    pub fn update(&self, offset: usize, bytes: u32, f: impl Fn(u64) -> u64) -> u64 {
        let shift = (offset % 8) * 8;
        let mask = if bytes == 8 { u64::MAX } else { (1 << (bytes * 8)) - 1 };
        let word = &self.words[offset / 8];
        let mut old = word.load(Relaxed);
        loop {
            let new = old & !(mask << shift) | (f(old >> shift & mask) & mask) << shift;
            match word.compare_exchange_weak(old, new, Relaxed, Relaxed) {
                Ok(_) => return old >> shift & mask,
                Err(now) => old = now,
            }
        }
    }

    /// Notes that a kernel has written these bytes, within one word.
    pub fn note_written(&self, offset: usize, bytes: u32) {
        mark(&self.init, offset, bytes);
        mark(&self.written, offset, bytes);
    }

    /// Whether all these bytes hold a value.
    #[inline]
    pub fn all_initialised(&self, offset: usize, bytes: u32) -> bool {
        let mut at = offset;
        let end = offset + bytes as usize;
        while at < end {
            let count = (64 - at % 64).min(end - at);
            let bits = u64::MAX >> (64 - count) << (at % 64);
            if self.init[at / 64].load(Relaxed) & bits != bits {
                return false;
            }
            at += count;
        }
        true
    }

    /// Whether the sixteen bytes at a multiple of sixteen hold a value.
    #[inline(always)]
    pub fn cell_initialised(&self, offset: usize) -> bool {
        (self.init[offset / 64].load(Relaxed) >> (offset % 64)) as u16 == u16::MAX
    }

    /// Whether the line at a multiple of its size holds a value.
    #[inline(always)]
    pub fn line_initialised(&self, offset: usize) -> bool {
        self.init[offset / 64..][..LINE / 64].iter().all(|bits| bits.load(Relaxed) == u64::MAX)
    }

    /// Copies bytes from an offset on.
    #[inline]
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        if offset.is_multiple_of(8) && out.len().is_multiple_of(8) {
            let words = &self.words[offset / 8..][..out.len() / 8];
            for (out, word) in out.as_chunks_mut::<8>().0.iter_mut().zip(words) {
                *out = word.load(Relaxed).to_le_bytes();
            }
            return;
        }
        let mut at = offset;
        let mut left = out;
        while !left.is_empty() {
            let count = (8 - at % 8).min(left.len());
            let word = self.words[at / 8].load(Relaxed).to_le_bytes();
            let (now, later) = left.split_at_mut(count);
            now.copy_from_slice(&word[at % 8..][..count]);
            at += count;
            left = later;
        }
    }

    /// Sixteen bytes at a multiple of eight, as two words.
    #[inline(always)]
    pub fn load_cell(&self, offset: usize) -> [u64; 2] {
        let words = &self.words[offset / 8..][..2];
        [words[0].load(Relaxed), words[1].load(Relaxed)]
    }

    /// The words of the line at a multiple of its size.
    #[inline(always)]
    pub fn line(&self, offset: usize) -> &[AtomicU64] {
        &self.words[offset / 8..][..LINE / 8]
    }

    /// Stores a line at a multiple of its size, as a kernel does.
    pub fn store_line(&self, offset: usize, line: &[u64; LINE / 8]) {
        for (word, value) in self.line(offset).iter().zip(line) {
            word.store(*value, Relaxed);
        }
        // Whole words of bits, which no other bytes share.
        for bits in [&self.init, &self.written] {
            for bits in &bits[offset / 64..][..LINE / 64] {
                bits.store(u64::MAX, Relaxed);
            }
        }
    }

    /// One byte.
    pub fn load_byte(&self, offset: usize) -> u8 {
        self.load(offset, 1) as u8
    }
}

/// Bytes that a kernel writes one after the other, noted 64 at a time.
#[derive(Default)]
pub(crate) struct Written<'a> {
    region: Option<&'a Region>,
    word: usize,
    bits: u64,
}

impl<'a> Written<'a> {
    /// Adds up to sixteen bytes, at a multiple of their number.
    #[inline]
    pub fn add(&mut self, region: &'a Region, offset: usize, bytes: u32) {
        let same = self.region.is_some_and(|of| std::ptr::eq(of, region)) && self.word == offset / 64;
        if !same {
            self.note();
            *self = Written { region: Some(region), word: offset / 64, bits: 0 };
        }
        self.bits |= ((1 << bytes) - 1) << (offset % 64);
    }

    /// Notes what was added.
    pub fn note(&mut self) {
        if let Some(region) = self.region.take() {
            for bits in [&region.init, &region.written] {
                set(&bits[self.word], self.bits);
            }
        }
    }
}

/// One bit for each of `len` bytes.
fn bits(len: usize, set: bool) -> Box<[AtomicU64]> {
    (0..len.div_ceil(64)).map(|_| AtomicU64::new(if set { u64::MAX } else { 0 })).collect()
}

/// Sets the bits of up to eight bytes, within one word of memory.
#[inline]
fn mark(bits: &[AtomicU64], offset: usize, bytes: u32) {
    set(&bits[offset / 64], ((1 << bytes) - 1) << (offset % 64));
}

/// Sets bits of a word.
#[inline]
fn set(bits: &AtomicU64, new: u64) {
    if bits.load(Relaxed) & new != new {
        bits.fetch_or(new, Relaxed);
    }
}

/// All allocations of a device.
#[derive(Default)]
pub(crate) struct GlobalMemory {
    regions: Vec<Option<Region>>,
}

impl GlobalMemory {
    /// Adds an allocation; the contents hold no value unless bytes are given.
    pub fn allocate(&mut self, name: Option<String>, len: usize, contents: Option<&[u8]>) -> Buffer {
        assert!(
            len <= MOST_BUFFER_BYTES,
            "an allocation must be smaller than 4 GiB; {len} bytes were asked for"
        );
        let index = self.regions.len() as u64;
        let base = (index + 1) << WINDOW_BITS | LEAD;
        let name = name.unwrap_or_else(|| format!("buffer {index}"));
        let region = Region::new(name, base, len, contents.is_some());
        self.regions.push(Some(region));
        let buffer = Buffer { address: base, len };
        if let Some(bytes) = contents {
            self.upload(buffer, bytes);
        }
        buffer
    }

    /// Forgets an allocation: later accesses to it are out of bounds.
    pub fn free(&mut self, buffer: Buffer) {
        let index = Self::index(buffer.address);
        if let Some(slot) = index.and_then(|i| self.regions.get_mut(i)) {
            *slot = None;
        }
    }

    fn index(address: u64) -> Option<usize> {
        ((address >> WINDOW_BITS) as usize).checked_sub(1)
    }

    /// The allocation in whose window the address lies, whether or not it is inside.
    #[inline]
    pub fn near(&self, address: u64) -> Option<&Region> {
        self.regions.get(Self::index(address)?)?.as_ref()
    }

    /// The allocation that holds these bytes, and where in it they start.
    #[inline]
    pub fn find(&self, address: u64, bytes: u64) -> Option<(&Region, usize)> {
        let region = self.near(address)?;
        let offset = address.checked_sub(region.base)?;
        (offset + bytes <= region.len as u64).then_some((region, offset as usize))
    }

    fn region(&self, buffer: Buffer) -> &Region {
        match self.find(buffer.address, 0) {
            Some((region, _)) => region,
            None => panic!("buffer at {:#x} is not an allocation of this device", buffer.address),
        }
    }

    /// Fills an allocation from the host, from its first byte on.
    pub fn upload(&mut self, buffer: Buffer, bytes: &[u8]) {
        let region = self.region(buffer);
        assert!(bytes.len() <= region.len, "{} bytes do not fit a buffer of {}", bytes.len(), region.len);
        for (i, chunk) in bytes.chunks(8).enumerate() {
            let mut word = region.words[i].load(Relaxed).to_le_bytes();
            word[..chunk.len()].copy_from_slice(chunk);
            region.words[i].store(u64::from_le_bytes(word), Relaxed);
            mark(&region.init, 8 * i, chunk.len() as u32);
        }
    }

    /// The bytes of an allocation.
    pub fn download(&self, buffer: Buffer) -> Vec<u8> {
        let region = self.region(buffer);
        let mut bytes: Vec<u8> = region.words.iter().flat_map(|w| w.load(Relaxed).to_le_bytes()).collect();
        bytes.truncate(buffer.len.min(region.len));
        bytes
    }

    /// The byte ranges of an allocation that no kernel has written.
    pub fn unwritten(&self, buffer: Buffer) -> Vec<Range<usize>> {
        let region = self.region(buffer);
        let mut gaps: Vec<Range<usize>> = Vec::new();
        let mut byte = 0;
        while byte < region.len {
            let bits = region.written[byte / 64].load(Relaxed);
            if bits == u64::MAX && byte % 64 == 0 {
                byte += 64;
                continue;
            }
            if bits >> (byte % 64) & 1 == 0 {
                match gaps.last_mut() {
                    Some(gap) if gap.end == byte => gap.end += 1,
                    _ => gaps.push(byte..byte + 1),
                }
            }
            byte += 1;
        }
        gaps
    }

    /// Forgets which bytes kernels have written.
    pub fn forget_written(&mut self, buffer: Buffer) {
        for bits in &self.region(buffer).written {
            bits.store(0, Relaxed);
        }
    }

    /// Where an address lies, in words.
    pub fn describe(&self, address: u64) -> String {
        match self.near(address) {
            Some(region) => {
                let offset = i128::from(address) - i128::from(region.base);
                if offset < 0 {
                    format!("{} bytes before {}", -offset, region.name)
                } else if offset >= region.len as i128 {
                    format!(
                        "{} bytes past the end of {} ({} bytes)",
                        offset - region.len as i128,
                        region.name,
                        region.len
                    )
                } else {
                    format!("{} + {offset}", region.name)
                }
            }
            None => "no allocation".to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_the_round_trip_whatever_their_number() {
        let mut memory = GlobalMemory::default();
        for len in [1, 7, 8, 9, 63, 64] {
            let bytes: Vec<u8> = (0..len as u8).collect();
            let buffer = memory.allocate(None, len, Some(&bytes));
            assert_eq!(memory.download(buffer), bytes);
        }
    }

    #[test]
    fn narrow_stores_touch_only_their_bytes() {
        let mut memory = GlobalMemory::default();
        let buffer = memory.allocate(None, 16, Some(&[0; 16]));
        let (region, offset) = memory.find(buffer.address + 6, 2).expect("inside");
        region.store(offset, 2, 0xBEEF);
        region.store(8, 1, 0x77);
        region.store(12, 4, 0x0102_0304);
        assert_eq!(region.load(4, 4), 0xBEEF_0000);
        let mut want = [0; 16];
        want[6..8].copy_from_slice(&[0xEF, 0xBE]);
        want[8] = 0x77;
        want[12..].copy_from_slice(&[4, 3, 2, 1]);
        assert_eq!(memory.download(buffer), want);
        assert_eq!(memory.unwritten(buffer), [0..6, 9..12]);
    }

    #[test]
    fn what_is_stored_by_lines_and_by_many_lanes_is_known_to_be_written() {
        let mut memory = GlobalMemory::default();
        let buffers = [(); 2].map(|()| memory.allocate(None, 512, None));
        let [first, second] = buffers.map(|buffer| memory.find(buffer.address, 512).expect("inside").0);
        first.store_line(128, &std::array::from_fn(|i| i as u64));
        assert_eq!((first.load(128, 8), first.load(248, 8)), (0, 15));
        let mut written = Written::default();
        for (region, offset) in [(first, 264), (first, 272), (first, 320), (second, 320), (first, 0)] {
            region.put(offset, 8, 7);
            written.add(region, offset, 8);
        }
        written.note();
        assert_eq!((first.load(272, 8), second.load(320, 4)), (7, 7));
        assert_eq!(memory.unwritten(buffers[0]), [8..128, 256..264, 280..320, 328..512]);
        assert_eq!(memory.unwritten(buffers[1]), [0..320, 328..512]);
        assert!(first.all_initialised(128, 128) && !first.all_initialised(256, 16));
    }

    #[test]
    fn fresh_memory_holds_no_value_and_reads_as_nan() {
        let mut memory = GlobalMemory::default();
        let buffer = memory.allocate(None, 8, None);
        let (region, _) = memory.find(buffer.address, 8).expect("inside");
        assert!(!region.all_initialised(0, 4));
        assert!(f32::from_bits(region.load(0, 4) as u32).is_nan());
        region.store(0, 4, 1);
        assert!(region.all_initialised(0, 4));
        assert!(!region.all_initialised(0, 8));
    }

    #[test]
    fn addresses_outside_are_described_by_their_distance() {
        let mut memory = GlobalMemory::default();
        let buffer = memory.allocate(Some("k".to_string()), 10, None);
        assert!(memory.find(buffer.address + 8, 4).is_none());
        assert!(memory.find(buffer.address.wrapping_sub(1), 1).is_none());
        assert_eq!(memory.describe(buffer.address + 12), "2 bytes past the end of k (10 bytes)");
        assert_eq!(memory.describe(buffer.address - 4), "4 bytes before k");
        assert_eq!(memory.describe(16), "no allocation");
        memory.free(buffer);
        assert!(memory.find(buffer.address, 1).is_none());
    }
}
