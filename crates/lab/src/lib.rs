//! The workbench behind the `flashcore` command: is an attention kernel right, how fast is it, and how sure are we.
//!
//! What it is made of, and what has a crate of its own:
//!
//! - `flashcore_corpus`: [`cases`] say what is run, an [`engine`] computes it on a [`device`], [`check`] judges the result
//!   and [`explain`] says what is wrong. [`subject`] is somebody else's attention.
//! - `flashcore_judge`: [`inputs`], the [`rule`] for results and the statistics of times ([`stats`]).
//! - `flashcore_clock`: [`timing`] lets engines and [`peers`] take turns, [`physics`] refuses what no machine can do.
//! - `flashcore_host`: [`files`], [`memory`], worker processes ([`process`]) and interrupts ([`interrupt`]).
//!
//! Over these:
//!
//! - [`bench`](mod@bench) times [`shapes`] on the CPU or on a [`gpu`]; [`ceilings`] are the highest rates of the
//!   machine, and [`rbk`] makes tables of a grid in a file.
//! - [`search`] looks for faster schedules, and accepts only those that win twice; [`micro`] measures the pieces that
//!   kernels are made of, to order what is tried.
//! - [`ncu`] reads what a GPU counts about a kernel; [`occupancy`] computes what can be known without it; [`timeline`] says
//!   what each role of its blocks does when.
//! - [`needle`] shows what short sums of 8-bit floats lose.
//! - [`faults`] are planted to see whether all this would notice.
//! - [`evidence`] is what a command leaves in a file, and how it is checked, compared and kept; [`report`] makes a page
//!   for people from it.
//! - [`cli`] is the command itself.
//!
//! Use it through the command; as a library it serves the project's own tests.

pub use flashcore_clock::{energy, physics, timeline, timing};
pub use flashcore_corpus::{cases, check, crew, device, eight, engine, explain, gradients, shapes, tally};
pub use flashcore_host::{files, interrupt, memory, process};
pub use flashcore_judge::{
    conditioning, cover, diagnose, guarded, honest, inputs, operands, rng, rule, stats,
};
pub use flashcore_report as report;

pub mod bench;
pub mod ceilings;
pub mod cli;
pub mod evidence;
pub mod faults;
pub mod gpu;
pub mod micro;
pub mod ncu;
pub mod needle;
pub mod occupancy;
pub mod peers;
pub mod rbk;
pub mod search;
pub mod subject;
