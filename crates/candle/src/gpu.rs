//! candle's CUDA devices as FlashCore's.
#![allow(unsafe_code)] // Memory that a kernel is about to fill need not be cleared first.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaDevice};
use candle_core::{Result, backend::BackendDevice};
use flashcore::Element;
use flashcore_cudarc::Gpu;

use crate::options::fail;

/// What tensors on a GPU hold.
pub(crate) trait GpuElement: Element + CudaDType + DeviceRepr {}
impl<T: Element + CudaDType + DeviceRepr> GpuElement for T {}

/// FlashCore on a device's GPU, queueing in its stream. Kernels are kept for the life of the process.
pub(crate) fn on(device: &CudaDevice) -> Result<Gpu> {
    static GPUS: Mutex<Option<HashMap<usize, Gpu>>> = Mutex::new(None);
    let candle_core::DeviceLocation::Cuda { gpu_id } = device.location() else {
        candle_core::bail!("a CUDA device lies on a GPU")
    };
    let stream = device.cuda_stream();
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let gpus = gpus.get_or_insert_default();
    if let Some(gpu) = gpus.get(&gpu_id) {
        return gpu.on(&stream).map_err(fail);
    }
    let gpu = Gpu::new(&stream).map_err(fail)?;
    gpus.insert(gpu_id, gpu.clone());
    Ok(gpu)
}

/// Memory for an output.
pub(crate) fn output<T: GpuElement>(device: &CudaDevice, elements: usize) -> Result<CudaSlice<T>> {
    // SAFETY: the kernel writes every element before anybody reads one.
    unsafe { device.alloc::<T>(elements) }
}
