//! The register file of a warp: one row of 32 lanes per register, predicates as masks.
//!
//! 16-bit and 32-bit registers share the rows of words; 64-bit registers have rows of their own. Constants are
//! rows too, filled once, so that an operand is always a row. Beside each row stands the mask of lanes that
//! hold a value.

use std::ops::{Deref, DerefMut};

/// A 32-bit register of all lanes.
pub type Row = [u32; 32];
/// A 64-bit register of all lanes.
pub type Row64 = [u64; 32];

/// A row aligned to a cache line, so that no vector of lanes crosses one.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Aligned<T>(pub T);

impl<T> Deref for Aligned<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Aligned<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// The registers of one warp.
#[derive(Clone, Default)]
pub struct Regs {
    /// 32-bit and 16-bit registers; the upper half of a 16-bit one is zero.
    pub r32: Vec<Aligned<Row>>,
    /// 64-bit registers.
    pub r64: Vec<Aligned<Row64>>,
    /// Predicates, one bit per lane.
    pub pred: Vec<u32>,
    /// The lanes of each 32-bit row that hold a value.
    pub init32: Vec<u32>,
    /// The lanes of each 64-bit row that hold a value.
    pub init64: Vec<u32>,
    /// The lanes of each predicate that hold a value.
    pub init_pred: Vec<u32>,
}

impl Regs {
    /// Writes a row in the lanes of the mask.
    #[inline(always)]
    pub fn set32(&mut self, d: u32, mask: u32, value: &Row) {
        let d = d as usize;
        let row = &mut self.r32[d];
        if mask == u32::MAX {
            row.0 = *value;
        } else {
            for (lane, (old, new)) in row.iter_mut().zip(value).enumerate() {
                *old = if mask >> lane & 1 == 1 { *new } else { *old };
            }
        }
        self.init32[d] |= mask;
    }

    /// Writes a 64-bit row in the lanes of the mask.
    #[inline(always)]
    pub fn set64(&mut self, d: u32, mask: u32, value: &Row64) {
        let d = d as usize;
        let row = &mut self.r64[d];
        if mask == u32::MAX {
            row.0 = *value;
        } else {
            for (lane, (old, new)) in row.iter_mut().zip(value).enumerate() {
                *old = if mask >> lane & 1 == 1 { *new } else { *old };
            }
        }
        self.init64[d] |= mask;
    }

    /// Writes a predicate in the lanes of the mask.
    #[inline(always)]
    pub fn set_pred(&mut self, d: u32, mask: u32, value: u32) {
        let d = d as usize;
        self.pred[d] = self.pred[d] & !mask | value & mask;
        self.init_pred[d] |= mask;
    }
}

/// The first row of each file of constants, in program order of first use: what a decoder collects.
#[derive(Clone, Default)]
pub struct Constants {
    /// 32-bit values.
    pub words: Vec<u32>,
    /// Which of the words are addresses of shared memory.
    pub shared: Vec<usize>,
    /// 64-bit values.
    pub longs: Vec<u64>,
    /// Predicate values.
    pub preds: Vec<bool>,
}
