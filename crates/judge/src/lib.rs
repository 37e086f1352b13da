//! What decides whether a result is right and whether a time is shorter: inputs, operands in guarded memory, the rule,
//! and the statistics.
//!
//! - [`cover`] chooses few cases among many. [`inputs`] draws the values of a problem from the random numbers of
//!   [`rng`]; [`operands`] puts them into [`guarded`] memory, where
//!   [`placing`] says that they lie.
//! - [`rule`] judges a result by the oracle, with the floor that [`conditioning`] derives; [`honest`] results must pass
//!   it. [`diagnose`](mod@diagnose) finds out what kind of fault a refused result shows.
//! - [`stats`] says what conclusions the samples allow.
//!
//! A crate of its own because it is small and must be fast, while the workbench around it is large and need not be.

mod codes;
pub mod conditioning;
pub mod cover;
pub mod diagnose;
mod gradients;
pub mod guarded;
pub mod honest;
pub mod inputs;
pub mod operands;
pub mod placing;
pub mod rng;
pub mod rule;
pub mod stats;
