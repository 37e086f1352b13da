//! Runs PTX modules on the CPU, warp by warp, and finds what a GPU hides.
#![allow(dead_code)]

mod alu;
mod banks;
mod barrier;
mod clock;
mod config;
mod copies;
mod decode;
mod error;
mod exec;
mod exec_copy;
mod exec_hopper;
mod exec_mem;
mod exec_sync;
mod exec_tensor;
mod exec_warp;
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
mod warp;

pub use config::{AsyncMode, Checks, Config};
pub use decode::{Class, Program};
pub use error::SimError;
pub use findings::{Finding, FindingKind, OtherAccess, Place, Severity, Site, Thread};
pub use memory::Buffer;
pub use sim::{LaunchDims, Report, Sim};
pub use stats::{BankStats, SectorStats, Stats, class_name};
