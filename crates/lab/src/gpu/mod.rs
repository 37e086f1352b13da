//! The workers that run attention on a GPU, ours and torch's, on the same inputs, by the same protocol.
//!
//! - [`pool`] holds the inputs, and [`protocol`] says how a worker is asked.
//! - [`worker`] is ours (the `flashcore` binary itself), `torch.py` is torch's; [`host`] keeps either running.
//! - [`cublas`] is a peer that does not fuse, with [`softmax`] between its products.
//! - [`ceilings`] measures the highest rates of the GPU.
//! - [`stress`] runs calls from many threads and streams, and again and again, and compares bits.
//!
//! Two clocks, always named. The **kernel** clock is the GPU's: a CUDA graph of many calls is replayed between two
//! events, after another replay that keeps the GPU busy meanwhile, so that no launch overhead is in it. The **call**
//! clock is the caller's: an event before and after every single call, and the host's own time beside it.

pub use flashcore_clock::{ceilings, cublas, pool, protocol, sequences, softmax, stress, worker};

pub mod host;
