//! Where the tests run: on the CPU, and on the first GPU where the crate is built for GPUs and there is one.

use std::io::Write;

use candle_core::{DType, Device, Result};

/// Every device there is. The CPU comes first.
pub fn devices() -> Vec<Device> {
    std::iter::once(Device::Cpu).chain(gpu()).collect()
}

/// The GPU, by a handle of the caller's own. Where there is none, that is printed once, past the capture of the tests'
/// output; where FLASHCORE_REQUIRE_CUDA is set it is an error.
pub fn gpu() -> Option<Device> {
    static SAID: std::sync::Once = std::sync::Once::new();
    match open() {
        Ok(gpu) => Some(gpu),
        Err(reason) => {
            // Where backtraces are on, one follows.
            let reason = reason.to_string();
            let reason = reason.lines().next().unwrap_or_default();
            assert!(std::env::var_os("FLASHCORE_REQUIRE_CUDA").is_none(), "no GPU: {reason}");
            SAID.call_once(|| {
                let _ = writeln!(std::io::stderr(), "no GPU, so the tests run on the CPU alone: {reason}");
            });
            None
        }
    }
}

#[cfg(feature = "cuda")]
fn open() -> Result<Device> {
    Device::new_cuda(0)
}

#[cfg(not(feature = "cuda"))]
fn open() -> Result<Device> {
    candle_core::bail!("built without the feature cuda")
}

/// The dtypes that attention accepts on a device.
pub fn dtypes(device: &Device) -> &'static [DType] {
    if device.is_cpu() { &[DType::F32, DType::F16, DType::BF16] } else { &[DType::F16, DType::BF16] }
}
