//! Memory whose first element begins a cache line.
#![allow(unsafe_code)] // Aligned memory is asked for by hand.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
};

use crate::Element;

/// A cache line, and a vector of any instruction set.
const ALIGN: usize = 64;

/// A fixed number of elements, the first of which begins a cache line: so vectors of them do not lie across two, which some
/// engines would copy them for.
///
/// ```
/// let x = flashcore::Aligned::filled(1.0_f32, 3);
/// assert_eq!(*x, [1.0; 3]);
/// assert!(x.as_ptr().addr().is_multiple_of(64));
/// ```
pub struct Aligned<T: Element> {
    ptr: NonNull<T>,
    len: usize,
}

// SAFETY: it owns its elements, which may go anywhere.
unsafe impl<T: Element> Send for Aligned<T> {}
// SAFETY: shared, it only gives out shared slices.
unsafe impl<T: Element> Sync for Aligned<T> {}

impl<T: Element> Aligned<T> {
    /// `len` zeros.
    ///
    /// # Panics
    /// Where so many elements are more than an address space has.
    pub fn zeros(len: usize) -> Self {
        Self::zeros_if_possible(len).unwrap_or_else(|| handle_alloc_error(Self::layout(len)))
    }

    /// `len` zeros, or `None` where there is no memory for so many.
    pub(crate) fn zeros_if_possible(len: usize) -> Option<Self> {
        let layout = Self::layout(len);
        if layout.size() == 0 {
            return Some(Self { ptr: NonNull::dangling(), len });
        }
        // SAFETY: the size is not 0.
        let ptr = unsafe { alloc_zeroed(layout) };
        Some(Self { ptr: NonNull::new(ptr.cast())?, len })
    }

    /// `len` times the same.
    pub fn filled(value: T, len: usize) -> Self {
        let mut all = Self::zeros(len);
        all.fill(value);
        all
    }

    /// The elements of a slice, each passed through `change`.
    pub fn of<F: Copy>(values: &[F], change: impl Fn(F) -> T) -> Self {
        let mut all = Self::zeros(values.len());
        for (to, &from) in all.iter_mut().zip(values) {
            *to = change(from);
        }
        all
    }

    fn layout(len: usize) -> Layout {
        Layout::array::<T>(len)
            .and_then(|layout| layout.align_to(ALIGN))
            .expect("a tensor's elements fit the address space")
    }
}

impl<T: Element> Drop for Aligned<T> {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated by `zeros` with this layout.
            unsafe { dealloc(self.ptr.as_ptr().cast(), Self::layout(self.len)) };
        }
    }
}

impl<T: Element> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: there are `len` elements, and zero is a value of every element type.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as of `deref`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Element> Clone for Aligned<T> {
    fn clone(&self) -> Self {
        Self::of(self, |x| x)
    }
}

impl<T: Element + PartialEq> PartialEq for Aligned<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for Aligned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn every_length_begins_a_line_and_is_copied_whole() {
        for len in [0, 1, 31, 32, 1000, 100_000] {
            let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let all = Aligned::of(&values, |x| x);
            assert!(all.as_ptr().addr().is_multiple_of(ALIGN) || len == 0);
            assert_eq!(*all, *values);
            assert_eq!(all.clone(), all);
        }
        assert_eq!(*Aligned::<f16>::zeros(5), [f16::ZERO; 5]);
    }
}
