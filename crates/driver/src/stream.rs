//! Streams: queues of work, owned or borrowed.

use crate::api::call;
use crate::context::Context;
use crate::driver::Driver;
use crate::error::{DriverError, Status};
use crate::event::Event;
use crate::sys::*;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

/// How a stream is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamOptions {
    /// Whether it waits for the default stream, and the default stream for it.
    pub waits_for_default: bool,
    /// The priority: smaller runs first; 0 is the usual one. See [`Context::stream_priorities`].
    pub priority: i32,
}

struct Inner {
    context: Context,
    raw: CUstream,
    owned: bool,
}

// SAFETY: streams may be used from any thread; the handle is only passed back to the driver.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver orders concurrent submissions itself.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made by `create`, destroyed once. Work in it still runs to its end.
            let _ = unsafe { call!(self.context.driver(), cuStreamDestroy(self.raw)) };
        }
    }
}

/// A queue of work on one GPU. Clones are the same queue; it is destroyed with the last clone, unless it is
/// borrowed.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

impl Stream {
    pub(crate) fn create(context: &Context, options: StreamOptions) -> Result<Self, DriverError> {
        let flags = if options.waits_for_default { CU_STREAM_DEFAULT } else { CU_STREAM_NON_BLOCKING };
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current, the out pointer is a live local.
        unsafe {
            call!(context.driver(), cuStreamCreateWithPriority(&raw mut raw, flags, options.priority))
        }?;
        Ok(Self { inner: Arc::new(Inner { context: context.clone(), raw, owned: true }) })
    }

    pub(crate) fn null(context: &Context) -> Self {
        let inner = Inner { context: context.clone(), raw: std::ptr::null_mut(), owned: false };
        Self { inner: Arc::new(inner) }
    }

    /// Uses a stream that other code owns (a `CUstream` or `cudaStream_t`; null is the default stream).
    /// A stream of another context is refused.
    ///
    /// # Safety
    ///
    /// `raw` must be a live stream, and stay one as long as the result, its clones, and whatever was
    /// allocated from them live.
    pub unsafe fn borrow_raw(context: &Context, raw: *mut c_void) -> Result<Self, DriverError> {
        let raw = raw.cast::<CUstream_st>();
        let entered = context.enter()?;
        let driver = context.driver();
        let mut owner = std::ptr::null_mut();
        // SAFETY: the caller vouches for the stream; the out pointer is a live local.
        unsafe { call!(driver, cuStreamGetCtx(raw, &raw mut owner)) }?;
        drop(entered);
        if owner != context.raw() {
            return Err(DriverError::ForeignStream {
                stream_device: device_of(driver, owner)?,
                context_device: context.device().ordinal(),
            });
        }
        Ok(Self { inner: Arc::new(Inner { context: context.clone(), raw, owned: false }) })
    }

    /// The driver's handle (`CUstream`), for other libraries. It is valid while this stream lives.
    pub fn as_raw(&self) -> *mut c_void {
        self.inner.raw.cast()
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Waits until everything in it is done, and reports a fault of any of it.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _entered = self.context().enter()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { call!(self.driver(), cuStreamSynchronize(self.raw())) }
    }

    /// Whether everything in it is done.
    pub fn is_done(&self) -> Result<bool, DriverError> {
        let _entered = self.context().enter()?;
        // SAFETY: the stream lives as long as `self`.
        match Status(unsafe { (self.driver().api().cuStreamQuery)(self.raw()) }) {
            Status::NOT_READY => Ok(false),
            status => self.driver().check("cuStreamQuery", status.0).map(|()| true),
        }
    }

    /// Makes what is queued here from now on wait for the event.
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        let _entered = self.context().enter()?;
        // SAFETY: both handles live as long as their owners.
        unsafe { call!(self.driver(), cuStreamWaitEvent(self.raw(), event.raw(), CU_EVENT_WAIT_DEFAULT)) }
    }

    /// The priority it runs with.
    pub fn priority(&self) -> Result<i32, DriverError> {
        let _entered = self.context().enter()?;
        let mut priority = 0;
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self.driver(), cuStreamGetPriority(self.raw(), &raw mut priority)) }?;
        Ok(priority)
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.inner.raw
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.inner.context.driver()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("raw", &self.inner.raw)
            .field("owned", &self.inner.owned)
            .field("context", &self.inner.context)
            .finish()
    }
}

/// The ordinal of the GPU that a context belongs to.
fn device_of(driver: &'static Driver, context: CUcontext) -> Result<usize, DriverError> {
    let mut device = 0;
    let mut popped = std::ptr::null_mut();
    // SAFETY: the context came from the driver a moment ago; push and pop are paired.
    unsafe {
        call!(driver, cuCtxPushCurrent(context))?;
        let asked = call!(driver, cuCtxGetDevice(&raw mut device));
        let _ = call!(driver, cuCtxPopCurrent(&raw mut popped));
        asked?;
    }
    Ok(usize::try_from(device).unwrap_or(0))
}
