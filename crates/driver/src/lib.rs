//! The CUDA driver as a safe, small Rust interface, loaded on first use.
//!
//! Nothing of CUDA is needed to build this crate: no headers, no toolkit, no `nvcc`. [`Driver::load`] opens
//! the library that comes with the GPU's kernel driver (`libcuda.so.1`, `nvcuda.dll`) and takes every entry
//! point by name *and* CUDA version, so that the signature called is the one declared here. Where there is
//! no library, no GPU, or too old a driver, it answers with a [`DriverError`] that says what to do; nothing
//! in this crate panics.
//!
//! ```
//! use flashcore_driver::{Driver, DriverError};
//!
//! fn first_gpu() -> Result<String, DriverError> {
//!     let driver = Driver::load()?;
//!     let properties = driver.device(0)?.properties()?;
//!     Ok(format!("{} ({} SMs)", properties.name, properties.sm_count))
//! }
//!
//! match first_gpu() {
//!     Ok(gpu) => println!("{gpu}"),
//!     Err(reason) => println!("no GPU here: {reason}"),
//! }
//! ```
//!
//! # Overview
//!
//! | step | type |
//! |---|---|
//! | the library, its version, its devices | [`Driver`], [`Device`], [`DeviceProperties`] |
//! | the primary context, shared with every other CUDA user of the process | [`Context`] |
//! | order and time | [`Stream`], [`Event`] |
//! | memory | [`DeviceBuffer`], [`PinnedBuffer`], [`PointerInfo`] |
//! | code: PTX in, cubin out, functions | [`Module`], [`link_ptx`], [`Function`] |
//! | launch | [`LaunchConfig`], [`ParamBuffer`], [`TensorMap`] |
//! | replay | [`Graph`], [`GraphExec`] |
//! | clocks, power and temperature | [`Nvml`], [`GpuState`] |
//!
//! # What is `unsafe` here
//!
//! A call is `unsafe` when it can reach memory that this crate does not hold: launching a kernel (its
//! parameters hold raw pointers), replaying a graph, wrapping a stream that other code owns, copying
//! through raw pointers, and asynchronous copies from or to host memory. Everything else is safe: sizes are
//! checked, handles live as long as what was made from them, and a bad argument is an error.
//! Device memory is plain bytes: two streams that race on one buffer give unspecified bytes, no more.
//!
//! # Threads
//!
//! [`Context`], [`Stream`], [`Module`], [`Function`] and [`DeviceBuffer`] are `Send + Sync`. Each call makes
//! the right context current for its own duration and restores the former one, so it does not disturb
//! other CUDA users on the same thread; [`Context::bind_to_thread`] saves the pushes and pops. A thread
//! that has no context at all keeps the first GPU's after its first launch.

// This crate is the one place where FlashCore calls C: every unsafe block states why it is sound.
#![allow(unsafe_code)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the CUDA driver interface declared here is the 64-bit one");

mod api;
mod context;
mod copy;
mod device;
mod driver;
mod error;
mod event;
mod graph;
mod jit;
mod launch;
mod memory;
mod module;
mod nvml;
mod pointer;
mod stream;
mod sys;
mod tensor_map;

pub use context::{BoundThread, Context};
pub use device::{ComputeCapability, Device, DeviceProperties};
pub use driver::{CudaVersion, Driver};
pub use error::{DriverError, PointerFault, Status};
pub use event::{Event, EventKind};
pub use graph::{CaptureMode, CaptureStatus, Graph, GraphExec};
pub use jit::{Cubin, JitLog, JitOptions, link_ptx};
pub use launch::{LaunchConfig, ParamBuffer};
pub use memory::{DeviceBuffer, PinnedBuffer, Scalar};
pub use module::{CarveOut, Function, FunctionAttributes, Module, Occupancy};
pub use nvml::{GpuState, Nvml, NvmlDevice};
pub use pointer::{MemoryKind, PointerInfo};
pub use stream::{Stream, StreamOptions};
pub use tensor_map::{
    L2Promotion, OutOfBounds, Swizzle, TensorMap, TensorMapElement, TensorMapError, TensorMapSpec,
};
