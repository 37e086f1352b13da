//! Kernels for Ampere and Ada.

pub mod bwd;
pub mod bwd_rows;
pub mod decode;
pub mod fwd;
mod packed;
mod pages;
