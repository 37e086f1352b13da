//! Runs PTX modules on the CPU, warp by warp, and finds what a GPU hides.
//!
//! The simulator executes the modules of [`flashcore_ptx`]: 32-lane warps that part and meet, blocks, clusters,
//! barriers, `cp.async`, mbarriers, TMA with real tensor-map semantics, `ldmatrix`, `mma.sync`, `wgmma` by its
//! descriptors. It needs no GPU. Integer work, data movement and layouts are exact to the bit; f32 is IEEE;
//! tensor cores multiply exactly and add in f32, k ascending, or for fp8 in the few bits that the hardware has
//! ([`Fp8Sums`]); `ex2` and similar functions are correct to the last place.
//!
//! Beside the results it reports [findings](Finding): accesses out of bounds, reads of memory or registers without
//! a value, races (with both sites and what is missing between them), missing proxy fences, `wgmma` registers
//! touched too early, deadlocks with what every warp waits for, launches that do not end, misuse of barriers, memory
//! touched while an earlier launch may use it, and more. Each carries the kernel author's comment and the line of Rust that
//! emitted the instruction. And it counts: bank conflicts and sectors by instruction, instructions by class.
//!
//! Asynchrony is adversarial: by [`AsyncMode`] an asynchronous copy or product takes effect as late as its wait
//! allows, with NaN in its place until then, or as early as possible, or at random moments; and warps interleave
//! as the seed says. Races are found by vector clocks, whatever the interleaving.
//!
//! Launches of a [`Sim`] are on one stream, over the same memory. [`Launching`] says whether one starts in stream order or
//! programmatically, beside the launch before it; then every access before `griddepcontrol.wait` is checked against what
//! the launches in flight have accessed.
//!
//! ```
//! use flashcore_ptx::*;
//! use flashcore_sim::{Config, FindingKind, LaunchDims, Sim};
//!
//! kernel_params! {
//!     /// The words to turn around.
//!     pub struct Reverse {
//!         /// 64 of them.
//!         x: GlobalPtr,
//!     }
//! }
//!
//! // Two warps turn 64 words around through shared memory, and forget the barrier.
//! let mut shared = SharedLayout::new();
//! let words = shared.alloc("words", 64 * 4, 16);
//! let mut k = KernelBuilder::new("reverse", Target::Sm80).params::<Reverse>().shared(shared).threads(64);
//! let (x, tid) = (k.param(Reverse::x), k.tid_x());
//! let px = k.mad_wide_u32(tid, 4, x);
//! let v = k.ld_global::<B32>(px);
//! let base = k.shared_addr(words);
//! let mine = k.mad_lo_u32(tid, 4, base);
//! k.comment("my end");
//! k.st_shared(mine, v);
//! let other = k.xor_b32(tid, 63);
//! let theirs = k.mad_lo_u32(other, 4, base);
//! k.comment("the other end");
//! let v = k.ld_shared::<B32>(theirs);
//! k.st_global(px, v);
//! let module = Module::new(Target::Sm80).with(k.finish()?);
//!
//! let mut sim = Sim::new(Config::default());
//! let x = sim.alloc_from("x", &[0; 256]);
//! let params = Reverse { x: GlobalPtr(x.address) }.pack();
//! let report = sim.launch(&module, "reverse", LaunchDims::linear(1, 64), &params)?;
//! let race = report.of(FindingKind::SharedRace).next().expect("found");
//! let other = race.other.as_ref().expect("both sites are known");
//! assert_eq!(race.site.comment.as_deref(), Some("my end"));
//! assert_eq!(other.site.comment.as_deref(), Some("the other end"));
//! assert_eq!(race.missing.as_deref(), Some("a barrier between the two"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How it works
//!
//! Folders are named by what they simulate. `program` turns a kernel into instructions on rows of a compact register file,
//! and proves which reads need no check that the register holds a value. `machine` is the state that instructions act on
//! (clusters, blocks, warps, barriers) and the scheduler that interleaves warps and sees deadlocks. `exec` executes
//! instructions on it, one file for each kind. `vectors` executes plain instructions and products of matrices for whole
//! warps in vector code, also written by hand for AVX-512. `memory` holds global and shared memory, tensor maps and matrix
//! descriptors. `races` holds the vector clocks and the shadows: which bytes were accessed when, by page and by line where
//! that says the same.

// Lane loops index several arrays by the same lane.
#![allow(clippy::needless_range_loop)]

mod config;
mod error;
mod exec;
mod findings;
mod machine;
mod memory;
pub mod numerics;
mod program;
mod races;
mod random;
mod sim;
mod stats;
mod stream;
mod vectors;

pub use config::{AsyncMode, Checks, Config, Fp8Sums, Stop};
pub use error::SimError;
pub use findings::{Finding, FindingKind, MemoryPlace, OtherAccess, Severity, Site, Thread};
pub use memory::global::{Buffer, MOST_BUFFER_BYTES};
pub use memory::tensor_map::{Swizzle, TensorElement, TensorMap};
pub use program::Program;
pub use sim::{LaunchDims, LaunchReport, Sim};
pub use stats::{BankStats, SectorStats, Stats};
pub use stream::Launching;
