//! Device memory and page-locked host memory that frees itself.

use crate::api::{call, call_optional};
use crate::context::Context;
use crate::error::{DriverError, Status};
use crate::stream::Stream;
use crate::sys::*;
use std::ffi::c_void;
use std::fmt;

mod sealed {
    pub trait Sealed {}
}

/// A plain number: what buffers are filled from and read into. 16-bit floats are passed
/// as `u16`, 8-bit floats as `u8`.
///
/// # Safety
///
/// Implemented here only, for types without padding whose every bit pattern is a value.
pub unsafe trait Scalar: sealed::Sealed + Copy + Default + 'static {}

macro_rules! scalars {
    ($($scalar:ty),+) => {$(
        impl sealed::Sealed for $scalar {}
        // SAFETY: a primitive number has no padding, and every bit pattern is one.
        unsafe impl Scalar for $scalar {}
    )+};
}

scalars!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

/// A block of global memory, freed on drop. A buffer of zero bytes has the address 0 and holds nothing.
pub struct DeviceBuffer {
    context: Context,
    address: CUdeviceptr,
    len: usize,
    /// The stream it is freed in, for memory that a stream allocated.
    stream: Option<Stream>,
}

impl Context {
    /// Allocates `bytes` of global memory, aligned to 256 bytes at least. Its contents are not defined.
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer, DriverError> {
        let mut address = 0;
        if bytes > 0 {
            let _entered = self.enter()?;
            // SAFETY: the context is current, the out pointer is a live local.
            let made = unsafe { call!(self.driver(), cuMemAlloc(&raw mut address, bytes)) };
            made.map_err(|error| name_shortage(error, self, bytes))?;
        }
        Ok(DeviceBuffer { context: self.clone(), address, len: bytes, stream: None })
    }

    /// Allocates `bytes` of page-locked host memory, filled with zeros: copies from and to it run without
    /// the CPU.
    pub fn alloc_pinned(&self, bytes: usize) -> Result<PinnedBuffer, DriverError> {
        let mut pointer: *mut c_void = std::ptr::null_mut();
        if bytes > 0 {
            let _entered = self.enter()?;
            // SAFETY: the context is current, the out pointer is a live local.
            let made = unsafe {
                call!(self.driver(), cuMemHostAlloc(&raw mut pointer, bytes, CU_MEMHOSTALLOC_PORTABLE))
            };
            made.map_err(|error| match error.status() {
                Some(Status::OUT_OF_MEMORY) => {
                    DriverError::OutOfMemory { place: "page-locked host", bytes, free_total: None }
                }
                _ => error,
            })?;
            // SAFETY: the driver gave `bytes` writable bytes, and nobody else knows of them yet.
            unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, bytes) };
        }
        Ok(PinnedBuffer { context: self.clone(), pointer: pointer.cast(), len: bytes })
    }
}

impl Stream {
    /// Allocates `bytes` from the GPU's memory pool, in stream order: the memory may be used by what is
    /// queued here afterwards, and is freed in this stream on drop. Quick, and legal in a capture.
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer, DriverError> {
        let mut address = 0;
        if bytes > 0 {
            let _entered = self.context().enter()?;
            // SAFETY: the stream lives, the out pointer is a live local.
            let made = unsafe {
                call_optional!(self.driver(), cuMemAllocAsync(&raw mut address, bytes, self.raw()))
            };
            made.map_err(|error| name_shortage(error, self.context(), bytes))?;
        }
        let stream = Some(self.clone());
        Ok(DeviceBuffer { context: self.context().clone(), address, len: bytes, stream })
    }
}

/// Says how much memory there is when there is not enough.
fn name_shortage(error: DriverError, context: &Context, bytes: usize) -> DriverError {
    if error.status() == Some(Status::OUT_OF_MEMORY) {
        DriverError::OutOfMemory { place: "GPU", bytes, free_total: context.memory_info().ok() }
    } else {
        error
    }
}

impl DeviceBuffer {
    /// The address, as kernels take it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The context it was allocated in.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Checks that a range lies within the buffer.
    pub(crate) fn range(
        &self,
        what: &'static str,
        offset: usize,
        bytes: usize,
    ) -> Result<CUdeviceptr, DriverError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.len => Ok(self.address + offset as u64),
            _ => Err(DriverError::OutOfBounds { what, offset, bytes, len: self.len }),
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        if let Ok(_entered) = self.context.enter() {
            let driver = self.context.driver();
            // SAFETY: allocated once by the matching call, freed once here.
            let _ = unsafe {
                match &self.stream {
                    Some(stream) => call_optional!(driver, cuMemFreeAsync(self.address, stream.raw())),
                    None => call!(driver, cuMemFree(self.address)),
                }
            };
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .field("stream_ordered", &self.stream.is_some())
            .finish_non_exhaustive()
    }
}

/// A block of page-locked host memory, freed on drop.
pub struct PinnedBuffer {
    context: Context,
    pointer: *mut u8,
    len: usize,
}

// SAFETY: plain memory that this value alone owns.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared references only read.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address at which both the CPU and the GPU see it.
    pub fn address(&self) -> u64 {
        self.pointer as u64
    }

    /// The contents as numbers; bytes that do not fill one are left out.
    pub fn as_slice<T: Scalar>(&self) -> &[T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: page-aligned, initialised at allocation, `len` bytes long, borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.pointer.cast::<T>(), self.len / size_of::<T>()) }
    }

    /// The contents as numbers to write; bytes that do not fill one are left out.
    pub fn as_mut_slice<T: Scalar>(&mut self) -> &mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast::<T>(), self.len / size_of::<T>()) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: allocated once by cuMemHostAlloc, freed once here; the driver waits for copies.
            let _ = unsafe { call!(self.context.driver(), cuMemFreeHost(self.pointer.cast())) };
        }
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("pointer", &self.pointer)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
