//! Why a launch could not run at all. What a kernel does wrong is a [`Finding`](crate::Finding), not an error.

/// A launch that cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimError {
    /// The module has no kernel of this name.
    #[error("the module has no kernel `{name}`; it has {}", .available.join(", "))]
    NoKernel {
        /// The name asked for.
        name: String,
        /// The kernels there are.
        available: Vec<String>,
    },
    /// An instruction, or a form of one, that is not implemented.
    #[error("kernel `{kernel}`, {place}: `{instruction}` is not implemented: {why}")]
    Unsupported {
        /// The kernel.
        kernel: String,
        /// The instruction.
        instruction: String,
        /// Section, comment and Rust line.
        place: String,
        /// What about it.
        why: String,
    },
    /// Launch dimensions that the kernel or the hardware does not allow.
    #[error("launch of `{kernel}`: {why}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// What is wrong.
        why: String,
    },
}
