//! Runs PTX modules on the CPU, warp by warp, and finds what a GPU hides.

// Lane loops index several arrays by the same lane.
#![allow(clippy::needless_range_loop)]

mod alu;
mod banks;
mod barrier;
mod clock;
mod config;
mod copies;
mod decode;
mod descriptor;
mod error;
mod exec;
mod exec_bulk;
mod exec_cluster;
mod exec_copy;
mod exec_mem;
mod exec_sync;
mod exec_tensor;
mod exec_warp;
mod exec_wgmma;
mod findings;
mod machine;
mod mbarrier;
mod memory;
mod mma;
pub mod numerics;
mod races;
mod random;
mod regs;
mod sched;
mod shadow;
mod shared;
mod sim;
mod simd;
mod stats;
mod tensor_map;
mod warp;

pub use config::{AsyncMode, Checks, Config};
pub use decode::{Class, Program};
pub use error::SimError;
pub use findings::{Finding, FindingKind, OtherAccess, Place, Severity, Site, Thread};
pub use memory::Buffer;
pub use sim::{LaunchDims, Report, Sim};
pub use stats::{BankStats, SectorStats, Stats, class_name};
pub use tensor_map::{Swizzle, TensorElement, TensorMap};
