//! PTX as Rust values: a typed assembler, a checker, a printer, a reader and the bridge to ptxas.
//!
//! A kernel is Rust code that calls a [`KernelBuilder`]: one method per instruction, named as in PTX, with typed
//! virtual registers. What comes out is a [`Module`] of plain data, which prints as PTX, is assembled by
//! [`ptxas`], or is run by a simulator.
//!
//! ```
//! use flashcore_ptx::*;
//!
//! kernel_params! {
//!     /// y = a x + y
//!     pub struct AxpyParams {
//!         /// The factor.
//!         a: f32,
//!         /// How many elements.
//!         n: u32,
//!         /// Read.
//!         x: GlobalPtr,
//!         /// Read and written.
//!         y: GlobalPtr,
//!     }
//! }
//!
//! let mut k = KernelBuilder::new("axpy", Target::Sm80).params::<AxpyParams>().threads(128);
//!
//! k.section("which element");
//! let (block, thread) = (k.ctaid_x(), k.tid_x());
//! let i = k.mad_lo_u32(block, 128, thread);
//! let n = k.param(AxpyParams::n);
//! let inside = k.setp_lt_u32(i, n);
//!
//! k.section("y += a x");
//! k.if_(inside, |k| {
//!     let (a, x, y) = (k.param(AxpyParams::a), k.param(AxpyParams::x), k.param(AxpyParams::y));
//!     let (px, py) = (k.mad_wide_u32(i, 4, x), k.mad_wide_u32(i, 4, y));
//!     let vx = k.ld_global_hint::<F32>(px, MemHint::new().nc());
//!     let vy = k.ld_global::<F32>(py);
//!     let sum = k.fma_f32(a, vx, vy);
//!     k.comment("the only write");
//!     k.st_global(py, sum);
//! });
//!
//! let module = Module::new(Target::Sm80).with(k.finish()?);
//! println!("{module}");
//!
//! // The launcher uses the same struct.
//! let bytes = AxpyParams { a: 2.0, n: 100, x: GlobalPtr(0x1000), y: GlobalPtr(0x2000) }.pack();
//! assert_eq!(bytes.len(), 24);
//! # Ok::<(), BuildErrors>(())
//! ```
//!
//! # What to know
//!
//! - **Registers** are [`Reg<T>`](Reg) with `T` one of [`Pred`], [`B16`], [`B32`], [`B64`], [`F32`]. Packed
//!   pairs of halves and quadruples of fp8 are `B32`; shared addresses are `B32`; global addresses, descriptors
//!   and tensor maps are `B64`. Signed or unsigned is in the instruction's name. Constants go where operands go.
//! - **Results** are new registers. To write one that exists, as in a loop, say so:
//!   `k.set(sum, |k| k.add_f32(sum, x))`. Arrays work too: `k.set(acc, |k| k.mma_m16n8k16(ty, a, b, acc))`.
//! - **Guards**: `k.when(p, |k| ...)` emits `@p` instructions, `!p` negates. Control flow proper is
//!   [`if_`](KernelBuilder::if_), [`if_else`](KernelBuilder::if_else), [`loop_`](KernelBuilder::loop_),
//!   [`while_`](KernelBuilder::while_), [`for_s32`](KernelBuilder::for_s32), [`roles`](KernelBuilder::roles).
//!   It is lowered to labels and branches; each guarded branch carries the label where its lanes reconverge.
//! - **Shared memory** is a [`SharedLayout`]: named allocations whose offsets Rust knows, checked against the
//!   target's limit. An address is a register, an allocation, or either with `.at(bytes)`.
//! - **Mistakes** are values: [`KernelBuilder::finish`] returns every one with the Rust line that made it.
//! - An operand of the wrong type does not compile:
//!
//! ```compile_fail
//! # use flashcore_ptx::*;
//! # let mut k = KernelBuilder::new("k", Target::Sm80);
//! let x: Reg<F32> = k.mov_f32(1.0);
//! k.add_u32(x, 1); // an integer addition of a float register
//! ```
//!
//! # Reading a finished module
//!
//! [`Kernel::body`] is a flat list of [`Inst`]: an [`Op`], an optional [`Guard`], destinations, sources, the
//! author's comment and line. Every modifier is an enum field of the [`Op`]; the plain instructions are
//! [`Op::Alu`]. [`Kernel::describe`] names an instruction in the author's words. After an edit,
//! [`flow::set_reconvergence`] brings the branches up to date.

pub mod builder;
pub mod check;
pub mod error;
pub mod flow;
pub mod inst;
pub mod modifiers;
pub mod module;
pub mod params;
pub mod print;
pub mod ptxas;
pub mod read;
pub mod sass;
pub mod shared;
pub mod table;
pub mod trace;
pub mod types;

pub use builder::*;
pub use error::{BuildError, BuildErrors, Fault, SharedError};
pub use inst::*;
pub use modifiers::*;
pub use module::{Kernel, Module, Place, RegInfo, Threads};
pub use params::{
    GlobalPtr, KernelParams, Param, ParamHandle, ParamType, ParamValue, ScalarParam, TensorMap,
};
pub use shared::{Shared, SharedAlloc, SharedLayout};
pub use table::Alu;
pub use trace::{Moment, Stamped, TraceParams, TraceSize, Track};
pub use types::*;
