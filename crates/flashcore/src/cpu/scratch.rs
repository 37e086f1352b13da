//! Memory that a thread keeps between tasks, so that nothing is allocated while it works.
#![allow(unsafe_code)] // Aligned memory is asked for by hand.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

/// One cache line and one vector of any instruction set.
const ALIGN: usize = 64;

/// A growing block of f32, aligned to a cache line, whose content is whatever was there before.
pub(super) struct Scratch {
    ptr: *mut f32,
    len: usize,
}

impl Scratch {
    pub(super) const fn new() -> Self {
        Self { ptr: std::ptr::null_mut(), len: 0 }
    }

    /// An address with room for at least `len` f32, valid until the next call.
    pub(super) fn reserve(&mut self, len: usize) -> *mut f32 {
        if len > self.len {
            self.release();
            let layout = Self::layout(len);
            // SAFETY: the size is not 0, because `len` is above a length.
            let ptr = unsafe { alloc(layout) };
            if ptr.is_null() {
                handle_alloc_error(layout);
            }
            (self.ptr, self.len) = (ptr.cast(), len);
        }
        self.ptr
    }

    fn layout(len: usize) -> Layout {
        Layout::array::<f32>(len)
            .and_then(|layout| layout.align_to(ALIGN))
            .expect("scratch is far below the address space")
    }

    fn release(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated by `reserve` with this layout.
            unsafe { dealloc(self.ptr.cast(), Self::layout(self.len)) };
            self.len = 0;
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.release();
    }
}

/// Cuts a block of scratch into aligned parts.
pub(super) struct Carve {
    at: usize,
}

impl Carve {
    pub(super) fn new() -> Self {
        Self { at: 0 }
    }

    /// The offset of the next part of `len` f32.
    pub(super) fn part(&mut self, len: usize) -> usize {
        let start = self.at;
        self.at += len.next_multiple_of(ALIGN / size_of::<f32>());
        start
    }

    /// How many f32 all parts need together.
    pub(super) fn total(&self) -> usize {
        self.at
    }
}
