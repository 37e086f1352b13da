//! Kernels for Ampere and Ada.

pub mod fwd;
