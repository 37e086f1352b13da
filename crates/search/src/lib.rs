//! The search for faster schedules.
//!
//! - A candidate is a schedule by its text; [`space`] lists them, [`propose`] chooses the next ones.
//! - [`gates`] are what a candidate passes before it costs time on the device, cheapest first.
//! - A [`device`] computes and times.
//! - [`decide`] is the rule that a candidate is accepted by, [`run`](mod@run) the search itself.
//! - [`journal`] is its memory, which survives any kill.
//!
//! Nothing here can accept a wrong result, a duplicate or a lucky timing: parity is a gate, identity is the machine
//! code, and a winner must win again on data that it has never seen. What a candidate is made of, and where it runs, is
//! up to the caller.

pub mod decide;
pub mod device;
pub mod gates;
pub mod journal;
pub mod propose;
pub mod run;
pub mod space;

/// A hash as written in journals.
pub fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..32].to_string()
}
