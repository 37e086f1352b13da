//! The workbench behind the `flashcore` command: is an attention kernel right, how fast is it, and how sure are we.
//!
//! - [`cases`] (by [covering designs](cover)) and [`shapes`] say what is run, [`inputs`] what on; [`operands`] puts it into [`guarded`] memory.
//! - An [`engine`] computes, ours on a [`device`] or somebody else's ([`subject`]); [`check`] runs a case through it and [`rule`] judges the result, on the floor that
//!   [`conditioning`] derives; [`diagnose`] finds out what kind of fault it is and [`explain`] says it. A [`crew`] of
//!   threads takes up many cases at once, and a [`tally`] counts them.
//! - [`timing`] lets engines and [`peers`] take turns, [`stats`] decides, [`bench`](mod@bench) puts it together; on a
//!   [`gpu`] everyone runs in a [`process`] of their own.
//! - [`physics`] refuses what no machine can do, [`ceilings`] are what this one can; [`rbk`] times a grid of a file.
//! - [`search`] looks for faster schedules, and believes none that it has not seen win twice.
//! - [`micro`] measures the pieces that kernels are made of, to order what [`search`] tries.
//! - [`ncu`] reads what a GPU counts about a kernel; [`occupancy`] computes what can be known without it.
//! - [`faults`] are planted to see whether all this would notice.
//! - [`evidence`] is what a command leaves in a file, and how it is checked, compared and kept; [`report`] makes a page
//!   for people of it. [`files`] and [`interrupt`] see to it that a file is written whole or not at all, [`memory`] that
//!   a problem fits the machine. [`cli`] is the command itself.
//!
//! Use it through the command; as a library it serves the project's own tests.

pub use flashcore_clock::{physics, timing};
pub use flashcore_corpus::{cases, check, crew, device, engine, explain, tally};
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
pub mod occupancy;
pub mod peers;
pub mod rbk;
pub mod search;
pub mod shapes;
pub mod subject;
