//! candle's CUDA devices and tensors as FlashCore takes them.
#![allow(unsafe_code)] // Memory that a kernel is about to fill need not be cleared first.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use candle_core::{
    CudaStorage, Layout, Result,
    cuda_backend::{
        CudaDType, CudaDevice,
        cudarc::driver::{CudaSlice, CudaView, DeviceRepr, ValidAsZeroBits},
    },
};
use flashcore::{Element, cuda::Cuda};
use flashcore_cudarc::Gpu;

use crate::options::fail;

/// What tensors on a GPU hold.
pub(crate) trait GpuElement: Element + CudaDType + DeviceRepr + ValidAsZeroBits {}
impl<T: Element + CudaDType + DeviceRepr + ValidAsZeroBits> GpuElement for T {}

/// A tensor on a GPU: its name, its memory, and how it lies there.
pub(crate) type Given<'a> = (&'static str, &'a CudaStorage, &'a Layout);

/// FlashCore on a device's GPU, queueing in its stream. Kernels are kept per GPU for the life of the process; streams
/// are not.
pub(crate) fn on(device: &CudaDevice) -> Result<Gpu> {
    static GPUS: Mutex<BTreeMap<usize, Cuda>> = Mutex::new(BTreeMap::new());
    let stream = device.cuda_stream();
    let ordinal = stream.context().ordinal();
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let cuda = if let Some(cuda) = gpus.get(&ordinal) {
        cuda.clone()
    } else {
        let cuda = Cuda::new(ordinal as u32).map_err(fail)?;
        gpus.insert(ordinal, cuda.clone());
        cuda
    };
    drop(gpus);
    Gpu::sharing(&cuda, &stream).map_err(fail)
}

/// A tensor's memory from an offset on. Where there is nothing to read, the offset may lie beyond the end.
pub(crate) fn from_offset<T: GpuElement>(storage: &CudaStorage, offset: usize) -> Result<CudaView<'_, T>> {
    let slice = storage.as_cuda_slice::<T>()?;
    Ok(slice.slice(offset.min(slice.len())..))
}

/// Memory for an output: zeros where parts of it are not written, else uninitialised.
pub(crate) fn output<T: GpuElement>(
    device: &CudaDevice,
    elements: usize,
    all_is_written: bool,
) -> Result<CudaSlice<T>> {
    // An empty output has room for one element, because a driver may refuse to allocate nothing.
    let elements = elements.max(1);
    if !all_is_written {
        return device.alloc_zeros::<T>(elements);
    }
    // SAFETY: the kernel writes every element before anything reads one.
    unsafe { device.alloc::<T>(elements) }
}
