//! The corpus of cases, and what puts an engine of attention through it.
//!
//! - [`cases`] says what is run (long lists of parameters stand for covering designs).
//! - An [`engine`] computes: ours on a [`device`], or anybody else's.
//! - [`check`] runs a case through an engine and judges the result, and [`explain`] says what is wrong with it.
//! - [`gradients`] has a backward pass of another make, [`eight`] a forward pass of 8-bit floats, and the slips that the check
//!   must find.
//! - [`shapes`] have names, or are spelled out.
//! - A [`crew`] of threads takes up many cases at once, and a [`tally`] counts them.

pub mod cases;
pub mod check;
pub mod crew;
pub mod device;
pub mod eight;
pub mod engine;
pub mod explain;
pub mod gradients;
pub mod shapes;
pub mod tally;
