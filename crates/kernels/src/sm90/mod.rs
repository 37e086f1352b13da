//! Kernels for Hopper.

pub mod bwd;
mod descriptor;
pub mod fwd;
mod params;
mod ring;
mod stage;

pub use params::{Divisor, PackedParams, Sm90Params};
