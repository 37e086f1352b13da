//! Kernels for Ampere and Ada.

pub mod decode;
pub mod fwd;
