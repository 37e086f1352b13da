//! The code that runs while time is measured.
//!
//! - [`timing`] lets contenders take turns on a clock; [`cpu`] times FlashCore on the CPU, beside the machine's own
//!   limits; [`physics`] refuses times that no machine can reach.
//! - [`worker`] times FlashCore on a GPU, in a process of its own. It is asked by [`protocol`] and reads its inputs from
//!   the files of [`pool`]. [`cublas`] is a peer that does not fuse, with [`softmax`] between its products;
//!   [`ceilings`] measures the GPU's peak rates; [`stress`] repeats calls and compares their bits.
//! - [`cpu_worker`] times the CPU engine in a process of its own, by the same protocol.
//! - [`traced`] runs a kernel that stamps its sections, and times it with and without stamps; [`timeline`] puts the stamps
//!   on one time axis.
//! - [`sequences`] are calls whose batch entries have lengths of their own, packed or in pages.
//! - [`energy`] is what calls on a GPU used.
//! - [`python`] finds the Python that peers run in.
//!
//! A crate of its own because timed code must be optimised, while the workbench around it need not be.

pub mod ceilings;
pub mod cpu;
pub mod cpu_worker;
pub mod cublas;
pub mod energy;
pub mod physics;
pub mod pool;
pub mod protocol;
pub mod python;
pub mod sequences;
pub mod softmax;
pub mod stress;
pub mod timeline;
pub mod timing;
pub mod traced;
pub mod worker;
