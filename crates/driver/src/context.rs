//! The primary context of a GPU, and making it current.
//!
//! A driver call works in the context that is current on the calling thread. Every call of this crate makes
//! its own context current first and restores the former one afterwards, so that it does not disturb other
//! users of CUDA. When the context is current already, as on any thread of a torch process, that costs one
//! look-up in thread-local storage.
//!
//! A launch does not even look: it tries, and makes its context current only when the driver says that another
//! one is. A thread that had no context keeps the first GPU's from then on, which is the one that the CUDA
//! runtime would have given it.

use crate::api::call;
use crate::device::{Device, DeviceProperties};
use crate::driver::Driver;
use crate::error::DriverError;
use crate::stream::{Stream, StreamOptions};
use crate::sys::*;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

struct Inner {
    device: Device,
    properties: DeviceProperties,
    raw: CUcontext,
}

// SAFETY: the driver's contexts may be used from any thread; the handle is only passed back to it.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver serialises what needs to be serialised.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained once by `Context::retain`, released once here. An error means that the driver is
        // already shut down, and then there is nothing left to release.
        let _ = unsafe { call!(self.device.driver(), cuDevicePrimaryCtxRelease(self.device.raw())) };
    }
}

/// A GPU's primary context. Clones share it; it is released when the last clone, and everything made from
/// it, is gone.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

impl Context {
    pub(crate) fn retain(device: Device) -> Result<Self, DriverError> {
        let properties = device.properties()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the out pointer is a live local.
        unsafe { call!(device.driver(), cuDevicePrimaryCtxRetain(&raw mut raw, device.raw())) }?;
        Ok(Self { inner: Arc::new(Inner { device, properties, raw }) })
    }

    /// The GPU.
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// What the GPU is and has.
    pub fn properties(&self) -> &DeviceProperties {
        &self.inner.properties
    }

    /// The driver.
    pub fn driver(&self) -> &'static Driver {
        self.inner.device.driver()
    }

    /// Waits until all work of the context is done, and reports a fault of any of it.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _entered = self.enter()?;
        // SAFETY: the context is current.
        unsafe { call!(self.driver(), cuCtxSynchronize()) }
    }

    /// Free and total bytes of global memory.
    pub fn memory_info(&self) -> Result<(usize, usize), DriverError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out pointers are live locals.
        unsafe { call!(self.driver(), cuMemGetInfo(&raw mut free, &raw mut total)) }?;
        Ok((free, total))
    }

    /// The lowest and the highest stream priority; a smaller number is a higher priority.
    pub fn stream_priorities(&self) -> Result<(i32, i32), DriverError> {
        let _entered = self.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the out pointers are live locals.
        unsafe { call!(self.driver(), cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)) }?;
        Ok((least, greatest))
    }

    /// A new stream. [`StreamOptions::default`] makes one that does not wait for the default stream.
    pub fn stream(&self, options: StreamOptions) -> Result<Stream, DriverError> {
        Stream::create(self, options)
    }

    /// The context's default (null) stream, which other blocking streams wait for.
    pub fn default_stream(&self) -> Stream {
        Stream::null(self)
    }

    /// Keeps this context current on the calling thread until the guard is dropped, so that calls need not
    /// push and pop it. Worth it on threads that call often and use no other CUDA library.
    pub fn bind_to_thread(&self) -> Result<BoundThread, DriverError> {
        // SAFETY: the context is retained by the clone that the guard holds.
        unsafe { call!(self.driver(), cuCtxPushCurrent(self.raw())) }?;
        Ok(BoundThread { context: self.clone(), not_send: PhantomData })
    }

    /// Runs `work` while calls that a capture on another stream of this thread would forbid (allocating,
    /// loading a module) are allowed. Use it to warm up when a caller may be capturing; `work` must not
    /// touch the capturing stream.
    pub fn with_relaxed_capture<T>(&self, work: impl FnOnce() -> T) -> Result<T, DriverError> {
        let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: swaps the thread's mode with the live local.
        unsafe { call!(self.driver(), cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
        let restore = RestoreCaptureMode { driver: self.driver(), mode };
        let result = work();
        drop(restore);
        Ok(result)
    }

    pub(crate) fn raw(&self) -> CUcontext {
        self.inner.raw
    }

    /// Makes the context current for the guard's life.
    #[inline]
    pub(crate) fn enter(&self) -> Result<Entered<'_>, DriverError> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self.driver(), cuCtxGetCurrent(&raw mut current)) }?;
        let pushed = current != self.inner.raw;
        if pushed {
            // SAFETY: the context is retained as long as `self` lives.
            unsafe { call!(self.driver(), cuCtxPushCurrent(self.inner.raw)) }?;
        }
        Ok(Entered { context: self, pushed, not_send: PhantomData })
    }
}

impl Context {
    /// Makes the context current after a launch found that it was not. A thread without a context keeps the
    /// first GPU's, so that its next launch finds it.
    #[cold]
    pub(crate) fn enter_after_launch(&self) -> Result<Entered<'_>, DriverError> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self.driver(), cuCtxGetCurrent(&raw mut current)) }?;
        let mut entered = self.enter()?;
        if current.is_null() && self.device().ordinal() == 0 {
            entered.pushed = false;
        }
        Ok(entered)
    }
}

impl PartialEq for Context {
    fn eq(&self, other: &Self) -> bool {
        self.inner.raw == other.inner.raw
    }
}

impl Eq for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("gpu", &self.inner.device.ordinal())
            .field("name", &self.inner.properties.name)
            .finish_non_exhaustive()
    }
}

/// Restores the thread's capture mode, also when the work in between panics.
struct RestoreCaptureMode {
    driver: &'static Driver,
    mode: u32,
}

impl Drop for RestoreCaptureMode {
    fn drop(&mut self) {
        // SAFETY: hands back the mode that the same call returned on this thread.
        let _ = unsafe { call!(self.driver, cuThreadExchangeStreamCaptureMode(&raw mut self.mode)) };
    }
}

/// The context is current on this thread while this lives.
pub(crate) struct Entered<'c> {
    context: &'c Context,
    pushed: bool,
    not_send: PhantomData<*mut ()>,
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.pushed {
            pop(self.context.driver());
        }
    }
}

/// Keeps a context current on a thread; see [`Context::bind_to_thread`].
#[derive(Debug)]
pub struct BoundThread {
    context: Context,
    not_send: PhantomData<*mut ()>,
}

impl BoundThread {
    /// The context that is bound.
    pub fn context(&self) -> &Context {
        &self.context
    }
}

impl Drop for BoundThread {
    fn drop(&mut self) {
        let driver = self.context.driver();
        let mut current = std::ptr::null_mut();
        // SAFETY: the out pointer is a live local.
        let known = unsafe { call!(driver, cuCtxGetCurrent(&raw mut current)) };
        // Other code may have changed the stack since: then popping would remove its context.
        if known.is_ok() && current == self.context.raw() {
            pop(driver);
        }
    }
}

fn pop(driver: &'static Driver) {
    let mut popped = std::ptr::null_mut();
    // SAFETY: undoes a push of this thread; the out pointer is a live local.
    let _ = unsafe { call!(driver, cuCtxPopCurrent(&raw mut popped)) };
}
