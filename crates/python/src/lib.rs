//! FlashCore for Python: the extension module `flashcore_attn._native`.
//!
//! It reads arrays without a copy (`arrays`), recognises masks (`masks`), says what torch has to copy first
//! (`prepare`), and runs calls (`call`, and `torch` for the thin path); what a user sees is the Python around it.

mod arrays;
mod call;
mod devices;
mod dlpack;
mod errors;
mod lengths;
mod masks;
mod options;
mod prepare;
mod torch;

/// The functions behind the package `flashcore_attn`.
#[pyo3::pymodule(gil_used = false)]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::call::{append, check, explain, machine, run, run_backward};
    #[pymodule_export]
    use crate::masks::recognise_mask;
    #[pymodule_export]
    use crate::prepare::preparation;
    #[pymodule_export]
    use crate::torch::{bind_torch, torch_attention};

    /// The version of the package.
    #[pymodule_export]
    #[allow(non_upper_case_globals)] // Python's name for it.
    const __version__: &str = env!("CARGO_PKG_VERSION");

    /// Has to be called in the child of a fork, whose threads are gone.
    #[pyfunction]
    fn after_fork() {
        crate::devices::after_fork();
    }
}
