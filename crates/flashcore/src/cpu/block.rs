//! A block of keys and values as f32.
#![allow(unsafe_code)] // Raw tensors and scratch; the contract and the plan bound every index.

use std::{cell::Cell, ops::Range};

use super::{panel::MAX_LANES, rows::Rows, simd::Simd};
use crate::DType;

/// A block of keys as f32: rows of K, and V in panels of `LANES` columns.
pub(super) struct Block {
    pub keys: Range<usize>,
    pub k: *const f32,
    pub k_stride: usize,
    pub v: *const f32,
    pub head_dim_v: usize,
    /// Whether V has wild values, once that was asked.
    wild: Cell<Option<bool>>,
}

impl Block {
    /// Widens rows of K and V into scratch; contiguous f32 rows of K stay where they are.
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
            v.widen_to_panels::<S>(v_wide);
            let in_place = k.dtype == DType::F32 && k.stride == k.len;
            if !in_place {
                k.widen::<S>(k_wide);
            }
            Self {
                keys,
                k: if in_place { k.at.cast() } else { k_wide },
                k_stride: k.len,
                v: v_wide,
                head_dim_v: v.len,
                wild: Cell::new(None),
            }
        }
    }

    /// Column `d` of key number `key` of the block.
    #[inline(always)]
    pub(super) fn value<S: Simd>(&self, key: usize, d: usize) -> *const f32 {
        self.v.wrapping_add((d / S::LANES * self.keys.len() + key) * S::LANES + d % S::LANES)
    }

    /// Whether a value is infinite or NaN, so that a probability of 0 does not make it vanish.
    ///
    /// # Safety
    /// Requires a CPU with `S`, the one that the block was made for.
    #[inline(always)]
    pub(super) unsafe fn has_wild_values<S: Simd>(&self) -> bool {
        if let Some(wild) = self.wild.get() {
            return wild;
        }
        // SAFETY: the panels hold whole vectors, and no vector has more than `MAX_LANES` lanes.
        let wild = unsafe {
            // 0 · x is 0, or NaN where x is wild; several sums, so that none waits for another.
            let mut sums = [S::splat(0.0); 8];
            let vectors = self.keys.len() * self.head_dim_v.div_ceil(S::LANES);
            let whole = vectors - vectors % sums.len();
            for first in (0..whole).step_by(sums.len()) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = S::fma(S::load(self.v.add((first + i) * S::LANES)), S::splat(0.0), *sum);
                }
            }
            for vector in whole..vectors {
                sums[0] = S::fma(S::load(self.v.add(vector * S::LANES)), S::splat(0.0), sums[0]);
            }
            let mut lanes = [0.0; MAX_LANES];
            sums.iter().any(|&sum| {
                S::store(lanes.as_mut_ptr(), sum);
                lanes.iter().any(|&x| x != 0.0)
            })
        };
        self.wild.set(Some(wild));
        wild
    }
}
