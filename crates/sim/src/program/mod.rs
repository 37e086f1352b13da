//! A kernel made ready to run.

mod assignment;
pub mod decode;
