//! The bridge to ptxas.
