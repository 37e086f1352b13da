//! A block of keys and values as f32.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use std::ops::Range;

use super::{rows::Rows, simd::Simd};

/// A block of keys as f32: rows of K, and V in panels as wide as tiles of outputs.
pub(super) struct Block {
    pub keys: Range<usize>,
    pub k: *const f32,
    pub k_stride: usize,
    pub v: *const f32,
    pub head_dim_v: usize,
}

impl Block {
    /// Widens rows of K and V into scratch; what is as it would be there stays where it is.
    ///
    /// # Safety
    /// Requires a CPU with `S`, readable rows, and room for them at `k_wide` and, padded to `LANES` columns, at
    /// `v_wide`.
    #[inline(always)]
    pub(super) unsafe fn new<S: Simd>(
        keys: Range<usize>,
        k: Rows,
        v: Rows,
        k_wide: *mut f32,
        v_wide: *mut f32,
    ) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let k_stays = k.are_wide();
            if !k_stays {
                k.widen::<S>(k_wide);
            }
            // Rows of a single panel are as they would be in it. Vectors are read whole, which is slow across cache lines.
            let one_panel = v.len.is_multiple_of(S::LANES) && v.len <= S::COLUMNS * S::LANES;
            let aligned = v.at.addr().is_multiple_of(size_of::<f32>() * S::LANES);
            let v_stays = one_panel && aligned && v.are_wide();
            if one_panel && !v_stays {
                v.widen::<S>(v_wide);
            } else if !v_stays {
                v.widen_to_panels::<S>(v_wide);
            }
            Self {
                keys,
                k: if k_stays { k.at.cast() } else { k_wide },
                k_stride: k.len,
                v: if v_stays { v.at.cast() } else { v_wide },
                head_dim_v: v.len,
            }
        }
    }

    /// The values of some columns ([`column_tiles`](super::rows::column_tiles)) of key number `key` of the block.
    #[inline(always)]
    pub(super) fn values(&self, key: usize, columns: &Range<usize>) -> *const f32 {
        self.v.wrapping_add(columns.start * self.keys.len() + key * columns.len())
    }
}
