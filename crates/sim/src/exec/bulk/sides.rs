//! The two sides of a bulk copy: which bytes of shared and of global memory it touches, and in which order.

use std::ops::Range;

use crate::memory::tensor_map::{Swizzle, TensorMap};
use crate::races::shared_shadow::PAGE_BYTES;

/// The shared side of a copy: the block, the plain address, the bytes, and how they lie.
///
/// Rows of a swizzled box begin a swizzle span apart, even where they are shorter; chunks of 16 bytes are permuted.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedSide {
    pub(super) block: usize,
    pub(super) address: u32,
    pub(super) bytes: u32,
    pub(super) swizzle: Swizzle,
    /// The bytes of a row of the box.
    pub(super) row: u32,
}

impl SharedSide {
    /// Consecutive bytes.
    pub(super) fn linear(block: usize, address: u32, bytes: u32) -> SharedSide {
        SharedSide { block, address, bytes, swizzle: Swizzle::None, row: bytes }
    }

    /// A box of a tensor.
    pub(super) fn boxed(block: usize, address: u32, map: &TensorMap) -> SharedSide {
        let row = map.taken(0) * map.element.bytes();
        SharedSide { block, address, bytes: map.box_bytes(), swizzle: map.swizzle, row }
    }

    /// The bytes from the first to the last, including gaps between short rows.
    pub(super) fn extent(&self) -> u32 {
        match self.swizzle {
            Swizzle::None => self.bytes,
            swizzle => self.bytes / self.row * swizzle.span(),
        }
    }

    /// The pages of shared memory that it covers, if it covers whole pages only.
    pub(super) fn pages(&self) -> Option<Range<u32>> {
        let dense = self.swizzle == Swizzle::None || self.row == self.swizzle.span();
        let whole = (self.address | self.bytes).is_multiple_of(PAGE_BYTES);
        (dense && whole).then(|| self.address / PAGE_BYTES..(self.address + self.bytes) / PAGE_BYTES)
    }

    /// Where each chunk of 16 bytes lies, in box order.
    pub(super) fn chunks(self) -> impl Iterator<Item = u32> {
        (0..self.bytes).step_by(16).map(move |at| match self.swizzle {
            Swizzle::None => self.address + at,
            swizzle if self.row == swizzle.span() => swizzle.apply(self.address + at),
            swizzle => swizzle.apply(self.address + at / self.row * swizzle.span() + at % self.row),
        })
    }
}

/// The global side of a copy.
#[derive(Clone, Debug)]
pub(super) enum GlobalSide {
    /// Consecutive bytes: where, and how many.
    Linear(u64, u32),
    /// A box of a tensor.
    Tensor(TensorMap, Vec<i32>),
}

impl GlobalSide {
    /// Calls `f` for the consecutive runs of bytes that it touches.
    pub(super) fn for_runs(&self, mut f: impl FnMut(u64, u32)) {
        match self {
            GlobalSide::Linear(address, bytes) => f(*address, *bytes),
            GlobalSide::Tensor(map, at) => {
                let mut run: Option<(u64, u32)> = None;
                map.for_runs(at, |_, bytes, address| {
                    let Some(address) = address else { return };
                    match &mut run {
                        Some((start, len)) if *start + u64::from(*len) == address => *len += bytes,
                        _ => {
                            if let Some((start, len)) = run.replace((address, bytes)) {
                                f(start, len);
                            }
                        }
                    }
                });
                if let Some((start, len)) = run {
                    f(start, len);
                }
            }
        }
    }
}
