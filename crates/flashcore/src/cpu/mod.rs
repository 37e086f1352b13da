//! The CPU engine: fused online-softmax attention.

use crate::contract::Call;

/// The CPU engine.
#[derive(Clone, Debug, Default)]
pub struct Engine {}

impl Engine {
    /// With the widest instructions that this CPU has.
    pub fn new() -> Self {
        Self::default()
    }

    /// Computes a checked call.
    pub(crate) fn run(&self, _call: &Call<'_>) {}
}

impl std::fmt::Display for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("none")
    }
}
