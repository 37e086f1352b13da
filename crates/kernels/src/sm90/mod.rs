//! Kernels for Hopper.

pub mod combine;
pub mod fwd;
mod params;

pub use params::{Divisor, Sm90Params};
