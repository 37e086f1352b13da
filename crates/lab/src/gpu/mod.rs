//! Timing on a GPU: ours and torch's attention, each in a worker process, on the same inputs, by the same protocol.
//!
//! - [`cells`] says what is timed, [`pool`] on which inputs, [`protocol`] how a worker is asked.
//! - [`worker`] is ours (the `flashcore` binary itself), `torch.py` is torch's; [`host`] keeps either running.
//! - [`bench`](mod@bench) puts a cell together: who is right, how fast each is, and who is faster; [`outcome`] is what it says.
//! - [`cublas`] is a peer that does not fuse, with [`softmax`] between its products.
//! - [`ceilings`] measures what the GPU can do at most.
//! - [`stress`] runs calls from many threads and streams, and again and again, and compares bits.
//!
//! Two clocks, always named. The **kernel** clock is the GPU's: a CUDA graph of many calls is replayed between two
//! events, behind a replay that keeps the GPU busy meanwhile, so that no launch is in it. The **call** clock is the
//! caller's: an event before and after every single call, and the host's own time beside it.

pub use flashcore_clock::{ceilings, cublas, pool, protocol, softmax, stress, worker};

pub mod bench;
pub mod cells;
pub mod host;
pub mod outcome;
