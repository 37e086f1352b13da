//! The workbench behind the `flashcore` command: is an attention kernel right, how fast is it, and how sure are we.
//!
//! - [`cases`] and [`shapes`] say what is run, [`inputs`] what on; [`operands`] puts it into [`guarded`] memory.
//! - An [`engine`] computes; [`check`] runs a case through it and [`rule`] judges the result, on the floor that
//!   [`conditioning`] derives; [`explain`] says what went wrong.
//!
//! Use it through the command; as a library it serves the project's own tests.

pub mod cases;
pub mod check;
pub mod conditioning;
pub mod engine;
pub mod explain;
pub mod guarded;
pub mod inputs;
pub mod operands;
pub mod rng;
pub mod rule;
pub mod shapes;
pub mod stats;
