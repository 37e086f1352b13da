//! The search for faster schedules, on our kernels and the CPU engine: `flashcore evolve`.
//!
//! The search itself is the crate `flashcore_search`. Here are the gates of the GPU kernels ([`kernels`]) and of the CPU
//! engine's schedules ([`cpu`]), the worker processes that compute and time ([`device`]), what a search is set up from
//! ([`config`]), and the leaderboard ([`report`]).

pub use flashcore_clock::cpu_worker;
pub use flashcore_search::{decide, gates, journal, propose, run, space};

pub mod config;
pub mod cpu;
pub mod device;
pub mod kernels;
pub mod report;
