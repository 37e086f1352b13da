//! The search for faster schedules: `flashcore evolve`.
//!
//! - A candidate is a schedule by its text; [`space`] says which there are, [`propose`] who names the next ones.
//! - [`gates`] are what a candidate passes before it costs time on the device, cheapest first; [`kernels`] has those of
//!   the GPU kernels, [`cpu`] those of the CPU engine's schedules.
//! - [`device`] computes and times, in worker processes with a watchdog; [`cpu_worker`] is the CPU's.
//! - [`decide`] is the rule that a candidate is accepted by, [`run`](mod@run) the search itself.
//! - [`journal`] is its memory, which survives any kill; [`report`] makes the leaderboard and the log from it.
//!
//! Nothing here can accept a wrong result, a duplicate or a lucky timing: parity is a gate, identity is the machine
//! code, and a winner must win again on data that it has never seen.

pub mod config;
pub mod cpu;
pub mod cpu_worker;
pub mod decide;
pub mod device;
pub mod gates;
pub mod journal;
pub mod kernels;
pub mod propose;
pub mod report;
pub mod run;
pub mod space;
