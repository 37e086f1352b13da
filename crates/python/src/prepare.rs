//! What torch does to a tensor before a call, so that the kernels can read it, or can read it fast.
//!
//! The CPU engine takes contiguous rows. The fast kernels of GPUs take 16-bit types with head dims that are multiples
//! of 8 up to 256, and move 16 bytes at once. Everything else, f32 and larger head dims, goes to the general kernel,
//! which takes rows with any stride.

use pyo3::prelude::*;

/// The largest head dim of the fast kernels.
const MAX_FAST_HEAD_DIM: i64 = 256;

/// How many bytes the fast kernels move at once.
const ALIGNMENT: i64 = 16;

/// Something to do with a tensor before a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Append zeros to its last dimension, up to this size.
    Pad(i64),
    /// Copy it, for this reason.
    Copy(&'static str),
}

/// What a tensor of four dimensions, head_dim last, needs before a call; strides in elements.
pub fn step(
    gpu: bool,
    element_bytes: i64,
    sizes: [i64; 4],
    strides: [i64; 4],
    address: usize,
) -> Option<Step> {
    let head_dim = sizes[3];
    let fast = gpu && element_bytes == 2 && head_dim <= MAX_FAST_HEAD_DIM;
    let unit = if fast { ALIGNMENT / element_bytes } else { 1 };
    let padded = (head_dim.max(1) as u64).next_multiple_of(unit as u64) as i64;
    if padded != head_dim {
        return Some(Step::Pad(padded));
    }
    // A tensor without elements is never read.
    if sizes.contains(&0) {
        return None;
    }
    if head_dim > 1 && strides[3] != 1 {
        return Some(Step::Copy("the elements of its last dimension do not lie side by side"));
    }
    if !address.is_multiple_of((unit * element_bytes) as usize) {
        return Some(Step::Copy("its address is not a multiple of 16 bytes"));
    }
    if strides[..3].iter().any(|stride| stride % unit != 0) {
        return Some(Step::Copy("its strides are not multiples of 16 bytes"));
    }
    None
}

/// The same for Python: None, or how far to pad, or why to copy.
#[pyfunction]
#[allow(clippy::type_complexity)] // One pair, taken apart where it is received.
pub fn preparation(
    gpu: bool,
    element_bytes: i64,
    sizes: [i64; 4],
    strides: [i64; 4],
    address: usize,
) -> Option<(Option<i64>, Option<&'static str>)> {
    step(gpu, element_bytes, sizes, strides, address).map(|step| match step {
        Step::Pad(to) => (Some(to), None),
        Step::Copy(why) => (None, Some(why)),
    })
}
