//! FlashCore's attention kernels: Rust that, for a target and a schedule, emits one PTX module.
//!
//! A [`Kernel`] is a family of generated code, a [`Schedule`] its knobs, a [`Spec`] what it is compiled for, and
//! [`FwdParams`] or [`Sm90Params`] what a launch is given. The kernels are a ladder: [`Kernel::Scalar`] is the simplest
//! right one, [`Kernel::Sm80Mma`] adds tensor cores, [`Kernel::Sm80Fwd`] is the real one for Ampere and Ada, and
//! [`Kernel::Sm90Fwd`] the one for Hopper.
//!
//! ```
//! use flashcore_kernels::{Dtype, Kernel, Spec};
//! use flashcore_ptx::Target;
//!
//! let spec = Spec::new(Dtype::F16, 64).causal();
//! let schedule = Kernel::Sm80Fwd.default_schedule(&spec, Target::Sm80)?;
//! let module = schedule.emit(&spec, Target::Sm80)?;
//! assert!(module.to_string().contains("ldmatrix"));
//! # Ok::<(), flashcore_kernels::ScheduleError>(())
//! ```

mod copy;
mod epilogue;
mod fragment;
mod params;
mod schedule;
mod softmax;
mod spec;
mod swizzle;
mod work;

pub mod scalar;
pub mod sm80_fwd;
pub mod sm80_mma;
pub mod sm90_fwd;

pub use copy::MAX_ROW_STRIDE;
pub use params::{Divisor, FwdParams, Sm90Params};
pub use schedule::{Blocks, Geometry, Kernel, Schedule, ScheduleError};
pub use spec::{Dtype, MAX_HEAD_DIM, Spec};
pub use work::Order;
