//! A block of keys and values as f32.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use std::ops::Range;

use super::{rows::Rows, simd::Simd};
use crate::DType;

/// A block of keys as f32: rows of K, and V in panels as wide as tiles of outputs.
pub(super) struct Block {
    pub keys: Range<usize>,
    pub k: *const f32,
    pub k_stride: usize,
    pub v: *const f32,
    pub head_dim_v: usize,
}

impl Block {
    /// Widens rows of K and V into scratch, from pieces with the number of rows before each; what is as it would be there
    /// stays where it is.
    ///
    /// # Safety
    /// Requires a CPU with `S`, readable rows, and room for them at `k_wide` and, padded to `LANES` columns, at
    /// `v_wide`.
    #[inline(always)]
    pub(super) unsafe fn new<S: Simd>(
        keys: Range<usize>,
        mut k_pieces: impl Iterator<Item = (usize, Rows)>,
        mut v_pieces: impl Iterator<Item = (usize, Rows)>,
        k_wide: *mut f32,
        v_wide: *mut f32,
    ) -> Self {
        let nothing = Rows { at: k_wide.cast(), dtype: DType::F32, stride: 0, count: 0, len: 0 };
        let [k, v] = [k_pieces.next(), v_pieces.next()].map(|piece| piece.map_or(nothing, |(_, rows)| rows));
        // SAFETY: the caller's promise.
        unsafe {
            if k.count < keys.len() {
                // Of several pages.
                for (at, k) in std::iter::once((0, k)).chain(k_pieces) {
                    k.widen::<S>(k_wide.add(at * k.len));
                }
                let one_panel = v.len.is_multiple_of(S::LANES) && v.len <= S::COLUMNS * S::LANES;
                for (at, v) in std::iter::once((0, v)).chain(v_pieces) {
                    if one_panel {
                        v.widen::<S>(v_wide.add(at * v.len));
                    } else {
                        v.widen_to_panels::<S>(v_wide, at, keys.len());
                    }
                }
                return Self { keys, k: k_wide, k_stride: k.len, v: v_wide, head_dim_v: v.len };
            }
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
                v.widen_to_panels::<S>(v_wide, 0, v.count);
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
