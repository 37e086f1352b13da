//! Somebody else's attention under test: anything that can be brought to compute a case is judged as our own engines are.
//!
//! - [`torch`]: torch's attention, on the CPU or one of its backends on a GPU, through the worker processes that bench
//!   uses.
//! - [`command`]: any program that reads and writes safetensors files.
//! - [`ptx`]: a kernel as PTX text with a description of its launch, on a GPU or, read by
//!   [`flashcore_ptx::read`], in the simulator.

pub mod command;
pub mod ptx;
pub mod torch;

use flashcore::Error;

/// What went wrong with a subject, as the library's error.
pub(crate) fn failed(subject: &str, what: impl Into<String>) -> Error {
    Error::Device { device: subject.into(), what: what.into(), source: None }
}
