//! The checker: what can be seen wrong in a kernel without running it.

use crate::builder::shared_error;
use crate::error::BuildError;
use crate::module::Kernel;
use crate::types::Target;

/// Every fault of a kernel for a target.
pub fn kernel(kernel: &Kernel, target: Target) -> Vec<BuildError> {
    let mut errors = Vec::new();
    if let Err(error) = kernel.shared.fits(target) {
        errors.push(shared_error(kernel, error));
    }
    errors
}
