//! Kernels for Hopper.

pub mod combine;
pub mod fwd;
mod params;

pub use params::{DescaleParams, Divisor, Sm90Params};
