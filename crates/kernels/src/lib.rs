//! FlashCore's attention kernels: Rust that, for a target and a schedule, emits one PTX module.
//!
//! A [`Kernel`] is a [`Family`] of generated code, a [`Schedule`] its knobs, a [`Spec`] what it is compiled for, and
//! [`Args`] what a launch is bound to. The forward kernels are a ladder: [`Kernel::Scalar`] is the simplest right one,
//! [`Kernel::Sm80Mma`] adds tensor cores, [`Kernel::Sm80Fwd`] is the real one for Ampere and Ada, and
//! [`Kernel::Sm90Fwd`] the one for Hopper. These two take 8-bit floats too. [`Kernel::Combine`] merges the partial results of
//! a long sequence. [`Kernel::BwdRows`] and then [`Kernel::Sm80Bwd`] or [`Kernel::Sm90Bwd`] compute gradients.
//!
//! ```
//! use flashcore_kernels::{ElementType, Schedule, Spec};
//! use flashcore_ptx::Target;
//!
//! let spec = Spec::new(ElementType::F16, 64).causal();
//! let schedule: Schedule = "sm80_fwd:block_m=64,block_n=64,warps=4,stages=2,q_in_regs=1,order=longest".parse()?;
//! let module = schedule.emit(&spec, Target::Sm80)?;
//! assert!(module.to_string().contains("ldmatrix"));
//! # Ok::<(), flashcore_kernels::ScheduleError>(())
//! ```
//!
//! # How it is laid out
//!
//! `registry` lists the families. Each has a file: the ladder's first rungs in [`ladder`], the others by generation of
//! GPU in [`sm80`] and [`sm90`]. What they are made of lies in `parts`: tiles and their swizzle, copies, fragments, the
//! online softmax, the walk over keys, the epilogue. `family` says what a family must provide, `bind` what its launches
//! are bound to. [`append`] writes new keys into a cache before attention, and [`quantize`] makes 8-bit floats of 16-bit ones
//! ([`Kernel::Quantize`] is one pass of it), and
//! [`sm80::decode`] reads a cache of them. [`Phase`] names what a kernel does at a time, for the stamps of a timeline.

mod bind;
mod family;
mod parts;
mod phase;
mod registry;
mod spec;

pub mod append;
pub mod combine;
pub mod ladder;
pub mod quantize;
pub mod sm80;
pub mod sm90;

pub use bind::{Args, BindError, Map, Operand, Packed, ROW_PADDING, Section, TensorArg};
pub use family::{Blocks, Family, Geometry, ScheduleError};
pub use parts::{
    copy::MAX_ROW_STRIDE,
    params::{DescaleParams, FwdParams, PageParams},
    sequence::packed_tiles,
    shares::{share_rows, share_tiles},
    work::Order,
};
pub use phase::Phase;
pub use registry::{Kernel, Schedule};
pub use spec::{ElementType, MAX_TENSOR_CORE_HEAD_DIM, Spec};
