//! FlashCore: exact attention, fused, in Rust from the tensor API down to the machine code.
//!
//! ```
//! use flashcore::{Attention, Device, Tensor};
//!
//! let data: Vec<f32> = (0..8 * 512 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
//! let q = Tensor::new(&data, &[1, 8, 512, 64])?; // (batch, heads, length, head_dim)
//! let out = Attention::new().causal().run(&Device::best(), &q, &q, &q)?;
//! assert_eq!(out.o.shape(), [1, 8, 512, 64]);
//! # Ok::<(), flashcore::Error>(())
//! ```
//!
//! [`Attention::backward`] gives the gradients of q, k and v. q, k and v may be 8-bit floats ([`DType::F8E4M3`]) with
//! [`Descales`]; [`Attention::fp8`] makes them of wider ones, on the CPU and on the GPU.
//!
//! Sequences of different lengths may be packed ([`Attention::packed`]), and keys and values may lie in the pages of a cache
//! ([`Attention::paged`]). [`Attention::append`] writes new keys and values into a cache, with rotary embeddings, before it
//! attends.
//!
//! [`Attention`] holds the options, [`Tensor`] and [`TensorMut`] are views of memory in any order of batch, heads
//! and length, [`Problem`] is what they pose together, and [`Device`] is where it runs. Everything that a call
//! can get wrong is an [`Error`] that says what was given, what is possible and what to do.
//!
//! Semantics: scores and sums are in f32 whatever the dtype; a query without keys gives zeros and lse = −∞,
//! never NaN, and has no gradient; [`Mask::Causal`] is aligned bottom-right when lengths differ; lse is a natural logarithm.
//!
//! Features: `cuda` (on by default) brings NVIDIA GPUs, whose driver is loaded when the program runs. Without it
//! only the CPU engine is built. `sim` adds a simulated GPU that checks every step of a kernel. `serde`
//! reads and writes [`Problem`], [`DType`] and [`Mask`] as their text.

mod aligned;
mod append;
mod attention;
mod contract;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod descales;
mod device;
mod dtype;
mod error;
mod layouts;
mod mask;
pub mod oracle;
#[cfg(feature = "cuda")]
pub mod plan;
mod problem;
mod quantise;
#[cfg(feature = "serde")]
mod serde_text;
pub mod signature;
#[cfg(feature = "sim")]
pub mod sim;
#[cfg(feature = "cuda")]
mod staging;
mod tensor;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod tuned;

pub use aligned::Aligned;
pub use append::{Append, Appending, Rotary, Turning};
pub use attention::{Attention, Backward, Gradients, Output};
pub use descales::Descales;
pub use device::Device;
pub use dtype::{DType, Element};
#[cfg(feature = "cuda")]
pub use error::PointerFault;
pub use error::{Error, Name, Result, Source};
pub use float8::{self, F8E4M3};
pub use half;
pub use layouts::{Pages, Sequences, Starts};
pub use mask::{Band, Mask};
pub use problem::{Keys, MAX_HEAD_DIM, MAX_LEN, Pass, Problem, Queries, default_scale};
pub use quantise::{Quantised, Quantiser};
pub use tensor::{DeviceLengths, Layout, Place, Storage, Tensor, TensorBuf, TensorMut};
