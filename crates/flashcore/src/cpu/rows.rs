//! Rows of a tensor to and from f32.
#![allow(unsafe_code)] // Tensors are addresses here; the contract has checked them.

use half::{bf16, f16};

use super::simd::Simd;
use crate::DType;

/// Widens `len` elements of a row.
///
/// # Safety
/// Requires a CPU with `S`, `len` elements of `dtype` at `from` and room for as many f32 at `to`.
#[inline(always)]
pub(super) unsafe fn widen<S: Simd>(dtype: DType, from: *const u8, to: *mut f32, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { widen_strided::<S>(dtype, from, to, S::LANES, len) }
}

/// Widens `len` elements of a row and writes each `LANES` of them `step` f32 behind the last.
///
/// # Safety
/// Requires a CPU with `S`, `len` elements of `dtype` at `from`, and room at `to`.
#[inline(always)]
pub(super) unsafe fn widen_strided<S: Simd>(
    dtype: DType,
    from: *const u8,
    to: *mut f32,
    step: usize,
    len: usize,
) {
    let (vectors, rest) = (len / S::LANES, len % S::LANES);
    // SAFETY: the caller's promise; vectors end at the last whole one, and single elements follow.
    unsafe {
        let tail = to.add(vectors * step);
        match dtype {
            DType::F32 => {
                let from = from.cast::<f32>();
                for i in 0..vectors {
                    S::store(to.add(i * step), S::load(from.add(i * S::LANES)));
                }
                for i in 0..rest {
                    *tail.add(i) = *from.add(vectors * S::LANES + i);
                }
            }
            DType::F16 => {
                let from = from.cast::<u16>();
                for i in 0..vectors {
                    S::store(to.add(i * step), S::load_f16(from.add(i * S::LANES)));
                }
                for i in 0..rest {
                    *tail.add(i) = f16::from_bits(*from.add(vectors * S::LANES + i)).to_f32();
                }
            }
            DType::BF16 => {
                let from = from.cast::<u16>();
                for i in 0..vectors {
                    S::store(to.add(i * step), S::load_bf16(from.add(i * S::LANES)));
                }
                for i in 0..rest {
                    *tail.add(i) = bf16::from_bits(*from.add(vectors * S::LANES + i)).to_f32();
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
    let whole = len - len % S::LANES;
    // SAFETY: the caller's promise; vectors end at `whole`.
    unsafe {
        match dtype {
            DType::F32 => std::ptr::copy_nonoverlapping(from, to.cast(), len),
            DType::F16 => {
                let to = to.cast::<u16>();
                for i in (0..whole).step_by(S::LANES) {
                    S::store_f16(to.add(i), S::load(from.add(i)));
                }
                for i in whole..len {
                    *to.add(i) = f16::from_f32(*from.add(i)).to_bits();
                }
            }
            DType::BF16 => {
                let to = to.cast::<u16>();
                for i in (0..whole).step_by(S::LANES) {
                    S::store_bf16(to.add(i), S::load(from.add(i)));
                }
                for i in whole..len {
                    *to.add(i) = bf16::from_f32(*from.add(i)).to_bits();
                }
            }
        }
    }
}
