//! PTX as Rust values.
