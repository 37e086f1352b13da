//! Vectors of f32, one type per instruction set, so that the algorithm is written once.
//!
//! Every method is `#[inline(always)]` and lands in an entry point that is compiled for the instruction set;
//! none of them may be called outside one.
#![allow(unsafe_code)] // Vector instructions and raw loads have no safe form that inlines into these kernels.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
pub(super) mod pairs;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use {avx2::Avx2, avx512::Avx512};

pub(super) use portable::Portable;

use std::ops::Range;

use half::bf16;

use super::{
    ahead::{Coming, Lines},
    job::Job,
    lanes::{self, LaneRows},
    math,
    panel::MAX_LANES,
    rows::Vectorised,
    stream,
    tile::{self, Outputs, Scalars, Scores, Vectors},
    wide,
};

/// Defines a function that takes an [`Isa`](super::Isa) before its other arguments and calls a generic one,
/// compiled for that instruction set. It is unsafe: this CPU must have the instruction set, and the generic
/// function may ask for more.
macro_rules! dispatch {
    ($(#[$doc:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? = $($generic:ident)::+) => {
        $(#[$doc])*
        $vis unsafe fn $name(isa: $crate::cpu::Isa, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f")]
            unsafe fn avx512($($arg: $type),*) $(-> $result)? {
                // SAFETY: compiled for what the vectors need; the rest is the caller's promise.
                unsafe { $($generic)::+::<$crate::cpu::simd::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $type),*) $(-> $result)? {
                // SAFETY: compiled for what the vectors need; the rest is the caller's promise.
                unsafe { $($generic)::+::<$crate::cpu::simd::Avx2>($($arg),*) }
            }
            // SAFETY: the caller's promise.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::Isa::Avx512 | $crate::cpu::Isa::Bf16 | $crate::cpu::Isa::Amx => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::Isa::Avx2 => avx2($($arg),*),
                    _ => $($generic)::+::<$crate::cpu::simd::Portable>($($arg),*),
                }
            }
        }
    };
}
pub(super) use dispatch;

/// The methods of [`Simd`] that are functions of their own, compiled for a target feature.
macro_rules! outlined {
    ($(#[$feature:meta])?) => {
        $(#[$feature])?
        #[inline(never)]
        unsafe fn score<const R: usize, const V: usize>(
            scores: &Scores,
            keys: Range<usize>,
            coming: &mut Coming,
        ) {
            // SAFETY: the caller's promise.
            unsafe { tile::score::<Self, R, V>(scores, keys, coming) }
        }
        $(#[$feature])?
        #[inline(never)]
        unsafe fn output<const R: usize, const V: usize>(
            outputs: &Outputs,
            rows: Range<usize>,
            coming: &mut Coming,
        ) -> bool {
            // SAFETY: the caller's promise.
            unsafe { tile::output::<Self, R, V>(outputs, rows, coming) }
        }
        $(#[$feature])?
        #[inline(never)]
        unsafe fn dots<E: Vectorised, const G: usize>(
            k: stream::Places<'_>,
            ahead: Option<stream::Places<'_>>,
            q: *const f32,
            p: *mut f32,
        ) {
            // SAFETY: the caller's promise.
            unsafe { stream::dots::<Self, E, G>(k, ahead, q, p) }
        }
        $(#[$feature])?
        #[inline(never)]
        unsafe fn outputs<E: Vectorised, const G: usize>(
            v: stream::Places<'_>,
            ahead: Option<stream::Places<'_>>,
            rescale: [f32; G],
            p: *const f32,
            o: *mut f32,
        ) {
            // SAFETY: the caller's promise.
            unsafe { stream::outputs::<Self, E, G>(v, ahead, rescale, p, o) }
        }
        $(#[$feature])?
        #[inline(never)]
        unsafe fn write_row(job: &Job<'_>, batch: usize, head_kv: usize, row: usize) {
            // SAFETY: the caller's promise.
            unsafe { wide::write_row::<Self>(job, batch, head_kv, row) }
        }
    };
}
use outlined;

/// One instruction set's vector of f32 and the tile that its registers hold.
///
/// # Safety
/// All methods require a CPU that has the instruction set. Loads and stores take `LANES` elements at any
/// alignment.
pub(super) trait Simd: Copy {
    /// The vector.
    type V: Copy;
    /// Its elements.
    const LANES: usize;
    /// Keys of the widest tile of scores.
    const ROWS: usize;
    /// Vectors of queries of the widest tile of scores.
    const VECS: usize;
    /// Vectors of columns of the widest tile of outputs.
    const COLUMNS: usize;
    /// Rows of a tile of so many vectors: 8, 6 or 4.
    #[inline(always)]
    fn tall(_vectors: usize) -> usize {
        4
    }

    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self::V;
    /// Reads `LANES` elements.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Writes `LANES` elements.
    unsafe fn store(to: *mut f32, x: Self::V);
    /// Widens `LANES` f16.
    unsafe fn load_f16(from: *const u16) -> Self::V;
    /// Widens `LANES` bf16.
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    /// Widens `LANES` e4m3, by way of f16, of which they are the upper bits but for a factor of 2^8; the code of NaN becomes
    /// 480.
    unsafe fn load_e4m3(from: *const u8) -> Self::V;
    /// Rounds to nearest-even f16 and writes.
    unsafe fn store_f16(to: *mut u16, x: Self::V);
    /// Rounds to nearest-even bf16 and writes; NaN stays NaN.
    unsafe fn store_bf16(to: *mut u16, x: Self::V);
    /// a + b.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// a − b.
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// a · b.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// a / b.
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// a · b + c.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// a · b − c.
    unsafe fn fms(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` where either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `x` where a < b, `y` elsewhere (NaN included).
    unsafe fn select_less(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Whether no lane is NaN.
    unsafe fn are_numbers(x: Self::V) -> bool;
    /// |x|.
    unsafe fn abs(x: Self::V) -> Self::V;
    /// |x| with the sign of `s`.
    unsafe fn copy_sign(x: Self::V, s: Self::V) -> Self::V;
    /// 2^(x · scale) for a negative scale, with x · scale = −127 at `most`, as of [`math::Exp2Below`].
    unsafe fn exp2(x: Self::V, scale: Self::V, most: Self::V) -> Self::V;
    /// [`tile::accumulate`].
    #[inline(always)]
    unsafe fn accumulate<const R: usize, const V: usize>(
        acc: [[Self::V; V]; R],
        a: Scalars<R>,
        b: Vectors,
        len: usize,
        lines: Lines,
    ) -> [[Self::V; V]; R] {
        // SAFETY: the caller's promise.
        unsafe { tile::accumulate::<Self, R, V>(acc, a, b, len, lines) }
    }
    /// [`tile::product`].
    #[inline(always)]
    unsafe fn product<const R: usize, const V: usize>(
        p: *const f32,
        v: *const f32,
        keys: usize,
        lines: Lines,
    ) -> [[Self::V; V]; R] {
        // SAFETY: the caller's promise.
        unsafe { tile::product::<Self, R, V>(p, v, keys, lines) }
    }
    /// [`tile::score`], compiled for the instruction set as a function of its own.
    unsafe fn score<const R: usize, const V: usize>(scores: &Scores, keys: Range<usize>, coming: &mut Coming);
    /// [`tile::output`], compiled for the instruction set as a function of its own.
    unsafe fn output<const R: usize, const V: usize>(
        outputs: &Outputs,
        rows: Range<usize>,
        coming: &mut Coming,
    ) -> bool;
    /// [`stream::dots`], compiled for the instruction set as a function of its own.
    unsafe fn dots<E: Vectorised, const G: usize>(
        k: stream::Places<'_>,
        ahead: Option<stream::Places<'_>>,
        q: *const f32,
        p: *mut f32,
    );
    /// [`stream::outputs`], compiled for the instruction set as a function of its own.
    unsafe fn outputs<E: Vectorised, const G: usize>(
        v: stream::Places<'_>,
        ahead: Option<stream::Places<'_>>,
        rescale: [f32; G],
        p: *const f32,
        o: *mut f32,
    );
    /// [`wide::write_row`], compiled for the instruction set as a function of its own.
    unsafe fn write_row(job: &Job<'_>, batch: usize, head_kv: usize, row: usize);
    /// Asks for a cache line to be brought near.
    #[inline(always)]
    fn prefetch(_: *const u8) {}
    /// Asks for a cache line to be brought as near as can be.
    #[inline(always)]
    fn prefetch_near(_: *const u8) {}
    /// [`lanes::columns`] of f32.
    #[inline(always)]
    unsafe fn columns_f32(rows: &LaneRows, d: usize) -> [Self::V; MAX_LANES] {
        // SAFETY: the caller's promise.
        unsafe { lanes::columns::<Self, f32>(rows, d) }
    }
    /// [`lanes::columns`] of bf16.
    #[inline(always)]
    unsafe fn columns_bf16(rows: &LaneRows, d: usize) -> [Self::V; MAX_LANES] {
        // SAFETY: the caller's promise.
        unsafe { lanes::columns::<Self, bf16>(rows, d) }
    }
    /// Turns `LANES` rows into `LANES` columns: `rows[i][j]` becomes `rows[j][i]`; `rows` has `LANES` vectors.
    unsafe fn transpose(rows: &mut [Self::V]);
}
