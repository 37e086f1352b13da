//! What runs while time is taken, and what is asked of it.
//!
//! - [`timing`] lets contenders take turns on a clock; [`cpu`] is ours on the CPU's, beside the machine's own limits;
//!   [`physics`] refuses times that no machine can reach.
//! - [`worker`] times ours on a GPU, in a process of its own, asked by [`protocol`] for what lies in the files of
//!   [`pool`]; [`cublas`] is a peer that does not fuse, with [`softmax`] between its products; [`ceilings`] measures
//!   what the GPU can do at most, and [`stress`] runs calls again and again and compares bits.
//! - [`cpu_worker`] times the CPU engine in a process of its own, by the same protocol.
//! - [`python`] is where peers of Python's live.
//!
//! A crate of its own because what stands between two clocks must be fast, while the workbench around it need not be.

pub mod ceilings;
pub mod cpu;
pub mod cpu_worker;
pub mod cublas;
pub mod physics;
pub mod pool;
pub mod protocol;
pub mod python;
pub mod softmax;
pub mod stress;
pub mod timing;
pub mod worker;
