//! Rows of a tensor to and from f32.
#![allow(unsafe_code)] // Tensors are addresses here; the contract has checked them.

use half::{bf16, f16};

use super::simd::Simd;
use crate::{DType, Element};

/// An element type as vectors read and write it.
pub(super) trait Vectorised: Element {
    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V);
}

impl Vectorised for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V) {
        // SAFETY: the caller's promise.
        unsafe { S::store(to, x) }
    }
}

impl Vectorised for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load_f16(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V) {
        // SAFETY: the caller's promise.
        unsafe { S::store_f16(to.cast(), x) }
    }
}

impl Vectorised for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load_bf16(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V) {
        // SAFETY: the caller's promise.
        unsafe { S::store_bf16(to.cast(), x) }
    }
}

/// Runs `$call::<S, E>` with the Rust type of a dtype.
macro_rules! by_type {
    ($dtype:expr, $call:ident::<$s:ident, _>($($arg:expr),*)) => {
        match $dtype {
            DType::F32 => $call::<$s, f32>($($arg),*),
            DType::F16 => $call::<$s, half::f16>($($arg),*),
            DType::BF16 => $call::<$s, half::bf16>($($arg),*),
        }
    };
}

pub(super) use by_type;

/// Some rows of a tensor: `count` times `len` elements, `stride` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub at: *const u8,
    pub dtype: DType,
    pub stride: usize,
    pub count: usize,
    pub len: usize,
}

impl Rows {
    /// Bytes of a row.
    #[inline(always)]
    pub(super) fn bytes(self) -> usize {
        self.len * self.dtype.size()
    }

    /// Some of the rows.
    #[inline(always)]
    pub(super) fn part(self, rows: std::ops::Range<usize>) -> Self {
        let at = self.at.wrapping_add(rows.start * self.stride * self.dtype.size());
        Self { at, count: rows.len(), ..self }
    }

    /// The same elements as one long row, where there are no gaps between the rows.
    #[inline(always)]
    pub(super) fn without_gaps(self) -> Self {
        if self.stride == self.len && self.count > 0 {
            let len = self.count * self.len;
            return Self { stride: len, count: 1, len, ..self };
        }
        self
    }

    /// Widens the rows, one behind the other.
    ///
    /// # Safety
    /// Requires a CPU with `S`, readable rows, and room at `to`.
    #[inline(always)]
    pub(super) unsafe fn widen<S: Simd>(self, to: *mut f32) {
        let Self { at, dtype, stride, count, len } = self.without_gaps();
        // SAFETY: the caller's promise.
        unsafe { by_type!(dtype, widen::<S, _>(at.cast(), stride, count, len, to)) }
    }

    /// Widens the rows and cuts them into panels of `LANES` columns: column d of row r comes to
    /// `(d / LANES · count + r) · LANES + d % LANES`. Zeros fill the last panel.
    ///
    /// # Safety
    /// Requires a CPU with `S`, readable rows, and room at `to`.
    #[inline(always)]
    pub(super) unsafe fn widen_to_panels<S: Simd>(self, to: *mut f32) {
        let Self { at, dtype, stride, count, len } = self;
        // SAFETY: the caller's promise.
        unsafe { by_type!(dtype, widen_to_panels::<S, _>(at.cast(), stride, count, len, to)) }
    }

    /// Asks for some bytes of the rows, counted without gaps, to be brought into the cache.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(self, rows: std::ops::Range<usize>) {
        let bytes = self.len * self.dtype.size();
        for row in rows.start..rows.end.min(self.count) {
            let at = self.at.wrapping_add(row * self.stride * self.dtype.size());
            for offset in (0..bytes).step_by(64) {
                S::prefetch(at.wrapping_add(offset));
            }
        }
    }
}

#[inline(always)]
unsafe fn widen<S: Simd, E: Vectorised>(
    from: *const E,
    stride: usize,
    count: usize,
    len: usize,
    to: *mut f32,
) {
    let whole = len - len % S::LANES;
    for row in 0..count {
        // SAFETY: the caller's promise; vectors end at `whole`.
        unsafe {
            let (from, to) = (from.add(row * stride), to.add(row * len));
            for i in (0..whole).step_by(S::LANES) {
                S::store(to.add(i), E::load::<S>(from.add(i)));
            }
            for i in whole..len {
                *to.add(i) = (*from.add(i)).to_f32();
            }
        }
    }
}

#[inline(always)]
unsafe fn widen_to_panels<S: Simd, E: Vectorised>(
    from: *const E,
    stride: usize,
    count: usize,
    len: usize,
    to: *mut f32,
) {
    let whole = len - len % S::LANES;
    // SAFETY: the caller's promise; vectors end at `whole`.
    unsafe {
        for row in 0..count {
            for d in (0..whole).step_by(S::LANES) {
                // Stores wait for their lines one after the other.
                S::prefetch_near(to.wrapping_add(d * count + (row + 2) * S::LANES).cast());
                S::store(to.add(d * count + row * S::LANES), E::load::<S>(from.add(row * stride + d)));
            }
        }
        if whole < len {
            for row in 0..count {
                let to = to.add(whole * count + row * S::LANES);
                S::store(to, S::splat(0.0));
                for d in whole..len {
                    *to.add(d - whole) = (*from.add(row * stride + d)).to_f32();
                }
            }
        }
    }
}

/// Rounds `len` elements to a row's type and writes them.
///
/// # Safety
/// Requires a CPU with `S`, `len` f32 at `from` and room for as many elements of `dtype` at `to`.
#[inline(always)]
pub(super) unsafe fn narrow<S: Simd>(dtype: DType, from: *const f32, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { by_type!(dtype, narrow_to::<S, _>(from, to.cast(), len)) }
}

#[inline(always)]
unsafe fn narrow_to<S: Simd, E: Vectorised>(from: *const f32, to: *mut E, len: usize) {
    let whole = len - len % S::LANES;
    // SAFETY: the caller's promise; vectors end at `whole`.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            E::store::<S>(to.add(i), S::load(from.add(i)));
        }
        for i in whole..len {
            *to.add(i) = E::from_f32(*from.add(i));
        }
    }
}
