//! Rows of a tensor to and from f32.
#![allow(unsafe_code)] // Tensors are addresses here; the contract has checked them.

use float8::F8E4M3;
use half::{bf16, f16};

use super::{
    lanes::{self, LaneRows},
    panel::MAX_LANES,
    simd::Simd,
};
use crate::{DType, Element};

/// An element type as vectors read and write it.
pub(super) trait Vectorised: Element {
    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V);
    /// [`lanes::columns`].
    #[inline(always)]
    unsafe fn columns<S: Simd>(rows: &LaneRows, d: usize) -> [S::V; MAX_LANES] {
        // SAFETY: the caller's promise.
        unsafe { lanes::columns::<S, Self>(rows, d) }
    }
}

impl Vectorised for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load(from) }
    }
    #[inline(always)]
    unsafe fn columns<S: Simd>(rows: &LaneRows, d: usize) -> [S::V; MAX_LANES] {
        // SAFETY: the caller's promise.
        unsafe { S::columns_f32(rows, d) }
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
    unsafe fn columns<S: Simd>(rows: &LaneRows, d: usize) -> [S::V; MAX_LANES] {
        // SAFETY: the caller's promise.
        unsafe { S::columns_bf16(rows, d) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V) {
        // SAFETY: the caller's promise.
        unsafe { S::store_bf16(to.cast(), x) }
    }
}

impl Vectorised for F8E4M3 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe {
            let x = S::load_e4m3(from.cast());
            // The code of NaN is what would come after 448.
            S::select_less(S::splat(448.0), S::abs(x), S::splat(f32::NAN), x)
        }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, x: S::V) {
        let mut lanes = [0.0; MAX_LANES];
        // SAFETY: the caller's promise; no vector has more lanes.
        unsafe {
            S::store(lanes.as_mut_ptr(), x);
            for (i, &x) in lanes.iter().enumerate().take(S::LANES) {
                *to.add(i) = F8E4M3::from_f32(x);
            }
        }
    }
}

/// Runs `$call::<S, E>` with the Rust type of a dtype.
macro_rules! by_type {
    ($dtype:expr, $call:ident::<$s:ident, _>($($arg:expr),*)) => {
        match $dtype {
            DType::F32 => $call::<$s, f32>($($arg),*),
            DType::F16 => $call::<$s, half::f16>($($arg),*),
            DType::BF16 => $call::<$s, half::bf16>($($arg),*),
            DType::F8E4M3 => $call::<$s, float8::F8E4M3>($($arg),*),
            DType::I32 => unreachable!("attention on integers"),
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

    /// Whether they are as [`widen`](Self::widen) would leave them.
    #[inline(always)]
    pub(super) fn are_wide(self) -> bool {
        self.dtype == DType::F32 && self.stride == self.len
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

    /// Widens the rows and cuts them into panels as wide as tiles of outputs ([`column_tiles`]): column d of row r, in a
    /// panel of w columns from column c on, comes to `c · all + (first + r) · w + d − c`, where these are rows from number
    /// `first` on of `all`. Zeros fill the last vector.
    ///
    /// # Safety
    /// Requires a CPU with `S`, readable rows, and room at `to`.
    #[inline(always)]
    pub(super) unsafe fn widen_to_panels<S: Simd>(self, to: *mut f32, first: usize, all: usize) {
        let Self { at, dtype, stride, count, len } = self;
        // SAFETY: the caller's promise.
        unsafe { by_type!(dtype, widen_to_panels::<S, _>(at.cast(), stride, count, len, to, first, all)) }
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
    first: usize,
    all: usize,
) {
    for row in 0..count {
        for columns in column_tiles::<S>(len) {
            let width = columns.len();
            // SAFETY: the caller's promise; no vector that is read ends behind the row.
            unsafe {
                let from = from.add(row * stride + columns.start);
                let to = to.add(columns.start * all + (first + row) * width);
                let whole = width.min(len - columns.start) / S::LANES * S::LANES;
                for d in (0..whole).step_by(S::LANES) {
                    // Stores wait for their lines one after the other.
                    S::prefetch_near(to.wrapping_add(8 * width + d).cast());
                    S::store(to.add(d), E::load::<S>(from.add(d)));
                }
                if whole < width {
                    S::store(to.add(whole), S::splat(0.0));
                    for d in whole..len - columns.start {
                        *to.add(d) = (*from.add(d)).to_f32();
                    }
                }
            }
        }
    }
}

/// How `len` columns, filled up to whole vectors, are cut into tiles of outputs: into as wide ones as there are, but none of
/// a single vector where that can be avoided.
#[inline(always)]
pub(super) fn column_tiles<S: Simd>(len: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let end = len.div_ceil(S::LANES);
    let mut next = 0;
    std::iter::from_fn(move || {
        let first = next;
        next += match end - first {
            left if left > 3 && left == S::COLUMNS + 1 => left - 2,
            left => left.min(S::COLUMNS),
        };
        (first < next).then_some(first * S::LANES..next * S::LANES)
    })
}

/// Whether none of `len` elements is infinite or NaN.
///
/// # Safety
/// Requires `len` f32 at `from`.
#[inline(always)]
pub(super) unsafe fn are_finite(from: *const f32, len: usize) -> bool {
    // Without a way out in the middle, so that it is done in vectors.
    // SAFETY: the caller's promise.
    (0..len).fold(true, |finite, d| finite & unsafe { (*from.add(d)).is_finite() })
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
