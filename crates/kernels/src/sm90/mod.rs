//! Kernels for Hopper.

pub mod bwd;
pub mod combine;
mod descriptor;
pub mod fwd;
mod params;
mod ring;

pub use params::{DescaleParams, Divisor, Sm90Params};
