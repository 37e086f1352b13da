//! Shared memory as named, aligned allocations whose offsets are known in Rust.
//!
//! All of a kernel's shared memory is one dynamic block. A [`SharedLayout`] is a plain value, so that a planner
//! can ask whether a schedule fits a target before anything is emitted, and the kernel then uses the same value.

use crate::error::SharedError;
use crate::inst::MemBase;
use crate::types::{Addr, B32, Target};

/// One allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedAlloc {
    /// What it holds, for messages and the printed text.
    pub name: String,
    /// Its size.
    pub bytes: u32,
    /// The alignment of its start: a power of two.
    pub align: u32,
    /// Its start in the block's shared memory.
    pub offset: u32,
    /// The allocations whose bytes it reuses, as indices; empty for one with bytes of its own.
    pub over: Vec<u32>,
}

/// A handle to an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shared {
    index: u32,
    offset: u32,
    bytes: u32,
}

impl Shared {
    /// Which allocation of the layout it is.
    pub const fn index(self) -> u32 {
        self.index
    }

    /// Its start in the block's shared memory.
    pub const fn offset(self) -> u32 {
        self.offset
    }

    /// Its size.
    pub const fn bytes(self) -> u32 {
        self.bytes
    }

    const fn end(self) -> u32 {
        self.offset.saturating_add(self.bytes)
    }

    /// The address `bytes` after its start.
    pub const fn at(self, bytes: i32) -> Addr<B32> {
        Addr::new(MemBase::Shared(self.index), bytes)
    }
}

/// A kernel's shared memory: allocations one after the other, each at its alignment.
///
/// ```
/// use flashcore_ptx::{SharedLayout, Target};
///
/// let mut smem = SharedLayout::new();
/// let bars = smem.alloc("kv_full", 2 * 8, 8);
/// let q = smem.alloc("q", 128 * 64 * 2, 1024);
/// let o = smem.alias("o", 128 * 64 * 2, &[q]); // the output goes where the queries were
/// assert_eq!((bars.offset(), q.offset(), o.offset()), (0, 1024, 1024));
/// assert_eq!(smem.bytes(), 1024 + 16384);
/// assert!(smem.fits(Target::Sm89).is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct SharedLayout {
    allocs: Vec<SharedAlloc>,
    errors: Vec<SharedError>,
}

impl SharedLayout {
    /// A layout without allocations.
    pub fn new() -> SharedLayout {
        SharedLayout::default()
    }

    /// Places `bytes` after everything so far, at a multiple of `align` (a power of two).
    pub fn alloc(&mut self, name: &str, bytes: u32, align: u32) -> Shared {
        if !align.is_power_of_two() {
            self.errors.push(SharedError::Alignment { name: name.to_owned(), align });
        }
        // Numbers beyond 32 bits saturate: no target has that much, and the layout is refused by its size.
        let align = align.checked_next_power_of_two().unwrap_or(1);
        let offset = self.bytes().checked_next_multiple_of(align).unwrap_or(u32::MAX);
        self.push(name, bytes, align, offset, Vec::new())
    }

    /// Reuses the bytes of other allocations, from the start of the first of `over` on.
    ///
    /// The new allocation must end within them, and they must follow each other; [`SharedLayout::fits`] says
    /// where that is not so. The kernel must make sure that the old content is dead by then.
    pub fn alias(&mut self, name: &str, bytes: u32, over: &[Shared]) -> Shared {
        let offset = over.first().map_or(0, |s| s.offset);
        let end = over.iter().map(|s| s.end()).max().unwrap_or(0);
        let ordered = over.windows(2).all(|w| w[0].end() <= w[1].offset);
        if over.is_empty() || !ordered || offset.saturating_add(bytes) > end {
            self.errors.push(SharedError::Alias {
                name: name.to_owned(),
                bytes,
                available: end.saturating_sub(offset),
            });
        }
        let align = over.first().and_then(|s| self.allocs.get(s.index as usize)).map_or(1, |a| a.align);
        self.push(name, bytes, align, offset, over.iter().map(|s| s.index).collect())
    }

    fn push(&mut self, name: &str, bytes: u32, align: u32, offset: u32, over: Vec<u32>) -> Shared {
        let index = self.allocs.len() as u32;
        self.allocs.push(SharedAlloc { name: name.to_owned(), bytes, align, offset, over });
        Shared { index, offset, bytes }
    }

    /// The allocations, in the order in which they were made.
    pub fn allocs(&self) -> &[SharedAlloc] {
        &self.allocs
    }

    /// The size of the whole.
    pub fn bytes(&self) -> u32 {
        self.allocs.iter().map(|a| a.offset.saturating_add(a.bytes)).max().unwrap_or(0)
    }

    /// The alignment of the whole: that of its most aligned allocation, at least 16.
    pub fn align(&self) -> u32 {
        self.allocs.iter().map(|a| a.align).max().unwrap_or(16).max(16)
    }

    /// Whether the layout is well formed and within what a block of the target can opt in to.
    pub fn fits(&self, target: Target) -> Result<(), SharedError> {
        if let Some(error) = self.errors.first() {
            return Err(error.clone());
        }
        let limit = target.max_shared_bytes();
        if self.bytes() > limit {
            let sizes = self.allocs.iter().map(|a| (a.name.clone(), a.bytes, a.over.is_empty())).collect();
            return Err(SharedError::TooLarge { target, bytes: self.bytes(), limit, sizes });
        }
        Ok(())
    }
}
