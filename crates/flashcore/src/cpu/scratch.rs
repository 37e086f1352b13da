//! Memory that a thread keeps between tasks, so that nothing is allocated while it works.

use crate::aligned::{ALIGN, Aligned};

/// A growing block of f32, aligned to a cache line, whose content is whatever was there before.
pub(super) struct Scratch(Aligned<f32>);

impl Scratch {
    pub(super) const fn new() -> Self {
        Self(Aligned::empty())
    }

    /// An address with room for at least `len` f32, valid until the next call.
    pub(super) fn reserve(&mut self, len: usize) -> *mut f32 {
        if len > self.0.len() {
            // The old one goes first, so that there are never both.
            self.0 = Aligned::empty();
            self.0 = Aligned::zeros(len);
        }
        self.0.as_mut_ptr()
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
