//! Copies and fills, all of them in stream order.
//!
//! The driver also has copies without a stream. They run on the default stream, and may return while the
//! last bytes are still on their way; a stream that does not wait for the default stream would then read
//! old data. So there are none here: a copy that must be finished is a copy in a stream, and a wait for it.

use crate::api::call;
use crate::error::DriverError;
use crate::memory::{DeviceBuffer, PinnedBuffer, Scalar};
use crate::stream::Stream;
use std::ffi::c_void;

impl Stream {
    /// A new buffer with the contents of `source`; done when the call returns.
    pub fn upload_new<T: Scalar>(&self, source: &[T]) -> Result<DeviceBuffer, DriverError> {
        let mut buffer = self.context().alloc(size_of_val(source))?;
        self.upload(&mut buffer, 0, source)?;
        Ok(buffer)
    }

    /// Copies host memory into a buffer, from byte `offset` on; done when the call returns.
    pub fn upload<T: Scalar>(
        &self,
        target: &mut DeviceBuffer,
        offset: usize,
        source: &[T],
    ) -> Result<(), DriverError> {
        let bytes = size_of_val(source);
        let address = target.range("a copy to the GPU", offset, bytes)?;
        // SAFETY: the range lies in the buffer, the source is borrowed until the wait below is over.
        unsafe { self.copy_to_device_raw(address, source.as_ptr().cast(), bytes) }?;
        self.synchronize()
    }

    /// Copies a buffer, from byte `offset` on, into host memory; done when the call returns.
    pub fn download<T: Scalar>(
        &self,
        source: &DeviceBuffer,
        offset: usize,
        target: &mut [T],
    ) -> Result<(), DriverError> {
        let bytes = size_of_val(target);
        let address = source.range("a copy from the GPU", offset, bytes)?;
        // SAFETY: the range lies in the buffer, the target is borrowed until the wait below is over, and
        // any bytes are valid numbers.
        unsafe { self.copy_to_host_raw(target.as_mut_ptr().cast(), address, bytes) }?;
        self.synchronize()
    }

    /// The whole contents of a buffer as numbers; bytes that do not fill one are left out.
    pub fn download_all<T: Scalar>(&self, source: &DeviceBuffer) -> Result<Vec<T>, DriverError> {
        let mut target = vec![T::default(); source.len() / size_of::<T>()];
        self.download(source, 0, &mut target)?;
        Ok(target)
    }

    /// Queues a copy of `bytes` from one buffer to another.
    pub fn copy(
        &self,
        target: &mut DeviceBuffer,
        target_offset: usize,
        source: &DeviceBuffer,
        source_offset: usize,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let to = target.range("a copy on the GPU", target_offset, bytes)?;
        let from = source.range("a copy on the GPU", source_offset, bytes)?;
        // SAFETY: both ranges lie in their buffers; freeing device memory waits for or follows the copy.
        unsafe { self.copy_on_device_raw(to, from, bytes) }
    }

    /// Queues filling `bytes` bytes of a buffer, from byte `offset` on, with one byte.
    pub fn fill_bytes(
        &self,
        target: &mut DeviceBuffer,
        offset: usize,
        bytes: usize,
        value: u8,
    ) -> Result<(), DriverError> {
        let address = target.range("a fill", offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let _entered = self.context().enter()?;
        // SAFETY: the range lies in the buffer, the stream lives.
        unsafe { call!(self.driver(), cuMemsetD8Async(address, value, bytes, self.raw())) }
    }

    /// Queues filling `words` 32-bit words of a buffer, from byte `offset` (a multiple of 4) on, with one
    /// word.
    pub fn fill_words(
        &self,
        target: &mut DeviceBuffer,
        offset: usize,
        words: usize,
        value: u32,
    ) -> Result<(), DriverError> {
        let bytes = words.saturating_mul(4);
        let address = target.range("a fill", offset, bytes)?;
        if words == 0 {
            return Ok(());
        }
        let _entered = self.context().enter()?;
        // SAFETY: the range lies in the buffer, the stream lives.
        unsafe { call!(self.driver(), cuMemsetD32Async(address, value, words, self.raw())) }
    }

    /// Queues a copy from page-locked memory into a buffer. It runs while the CPU goes on.
    ///
    /// # Safety
    ///
    /// `source` must stay allocated and unchanged until the stream has passed the copy (and every replay of
    /// it, when captured).
    pub unsafe fn upload_async(
        &self,
        target: &mut DeviceBuffer,
        offset: usize,
        source: &PinnedBuffer,
    ) -> Result<(), DriverError> {
        let address = target.range("a copy to the GPU", offset, source.len())?;
        // SAFETY: the range lies in the buffer; the caller keeps the source.
        unsafe { self.copy_to_device_raw(address, source.as_slice::<u8>().as_ptr(), source.len()) }
    }

    /// Queues a copy from a buffer, from byte `offset` on, into the whole of a page-locked one. It runs
    /// while the CPU goes on.
    ///
    /// # Safety
    ///
    /// `target` must stay allocated, and must be neither read nor written, until the stream has passed the
    /// copy (and every replay of it, when captured).
    pub unsafe fn download_async(
        &self,
        source: &DeviceBuffer,
        offset: usize,
        target: &mut PinnedBuffer,
    ) -> Result<(), DriverError> {
        let bytes = target.len();
        let address = source.range("a copy from the GPU", offset, bytes)?;
        // SAFETY: the range lies in the buffer; the caller keeps the target.
        unsafe { self.copy_to_host_raw(target.as_mut_slice::<u8>().as_mut_ptr(), address, bytes) }
    }

    /// Queues a copy from a host address to a device address.
    ///
    /// # Safety
    ///
    /// Both ranges of `bytes` must be valid until the stream has passed the copy; the device address must be
    /// reachable from this context.
    pub unsafe fn copy_to_device_raw(
        &self,
        target: u64,
        source: *const u8,
        bytes: usize,
    ) -> Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        let _entered = self.context().enter()?;
        let source = source.cast::<c_void>();
        // SAFETY: the caller vouches for both ranges.
        unsafe { call!(self.driver(), cuMemcpyHtoDAsync(target, source, bytes, self.raw())) }
    }

    /// Queues a copy from a device address to a host address.
    ///
    /// # Safety
    ///
    /// As for [`Stream::copy_to_device_raw`]; the host range must not be read or written until the stream
    /// has passed the copy.
    pub unsafe fn copy_to_host_raw(
        &self,
        target: *mut u8,
        source: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        let _entered = self.context().enter()?;
        let target = target.cast::<c_void>();
        // SAFETY: the caller vouches for both ranges.
        unsafe { call!(self.driver(), cuMemcpyDtoHAsync(target, source, bytes, self.raw())) }
    }

    /// Queues a copy between two device addresses.
    ///
    /// # Safety
    ///
    /// Both ranges of `bytes` must be valid until the stream has passed the copy.
    pub unsafe fn copy_on_device_raw(
        &self,
        target: u64,
        source: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        let _entered = self.context().enter()?;
        // SAFETY: the caller vouches for both ranges.
        unsafe { call!(self.driver(), cuMemcpyDtoDAsync(target, source, bytes, self.raw())) }
    }
}
