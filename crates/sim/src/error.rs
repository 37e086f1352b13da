//! Why a launch could not run at all. What a kernel does wrong is a [`Finding`](crate::Finding), not an error.

/// A launch that cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimError {
    /// The module has no kernel of this name.
    #[error("the module has no kernel `{name}`; it has {}", .available.join(", "))]
    NoKernel {
        /// The name asked for.
        name: String,
        /// The kernels that the module has.
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
        /// What is not implemented about it.
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
    /// A grid that is larger than the budget, however little its blocks do.
    #[error(
        "launch of `{kernel}`: a grid of {blocks} blocks counts as {setup} warp instructions before the first one is \
         executed, and the limit is {budget}; launch a smaller grid or raise the limit"
    )]
    Budget {
        /// The kernel.
        kernel: String,
        /// The blocks of the grid.
        blocks: u64,
        /// What setting them up counts as.
        setup: u64,
        /// What the launch may take.
        budget: u64,
    },
    /// The launch was ended by [`Config::stop`](crate::Config::stop).
    #[error("launch of `{kernel}`: stopped before its end")]
    Stopped {
        /// The kernel.
        kernel: String,
    },
}
