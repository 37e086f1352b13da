//! Nothing: what this crate asks for is what it is for.
//!
//! The tests' crates ask for features of crates that the command uses too. Here the command asks for the same ones, so
//! that both are built from the same crates, once. `crates/lab/tests/features.rs` says which are missing.
