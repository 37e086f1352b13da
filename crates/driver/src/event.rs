//! Events: points in a stream to wait for, and to measure time between.

use crate::api::call;
use crate::context::Context;
use crate::driver::Driver;
use crate::error::{DriverError, Status};
use crate::stream::Stream;
use crate::sys::*;

/// What an event is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// Time is measured.
    Timing,
    /// Only order matters; cheaper.
    Ordering,
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    context: Context,
    raw: CUevent,
}

// SAFETY: events may be used from any thread; the handle is only passed back to the driver.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new event, not recorded yet.
    pub fn new(context: &Context, kind: EventKind) -> Result<Self, DriverError> {
        let flags = match kind {
            EventKind::Timing => CU_EVENT_DEFAULT,
            EventKind::Ordering => CU_EVENT_DISABLE_TIMING,
        };
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current, the out pointer is a live local.
        unsafe { call!(context.driver(), cuEventCreate(&raw mut raw, flags)) }?;
        Ok(Self { context: context.clone(), raw })
    }

    /// Marks the point that the stream has reached.
    pub fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        let _entered = self.context.enter()?;
        // SAFETY: both handles live as long as their owners.
        unsafe { call!(self.driver(), cuEventRecord(self.raw, stream.raw())) }
    }

    /// Waits until the point is passed.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event lives as long as `self`.
        unsafe { call!(self.driver(), cuEventSynchronize(self.raw)) }
    }

    /// Whether the point is passed.
    pub fn is_done(&self) -> Result<bool, DriverError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event lives as long as `self`.
        match Status(unsafe { (self.driver().api().cuEventQuery)(self.raw) }) {
            Status::NOT_READY => Ok(false),
            status => self.driver().check("cuEventQuery", status.0).map(|()| true),
        }
    }

    /// Milliseconds on the GPU's clock from `start` to here. Both must be of [`EventKind::Timing`] and
    /// passed.
    pub fn ms_since(&self, start: &Event) -> Result<f32, DriverError> {
        let _entered = self.context.enter()?;
        let mut ms = 0.0;
        // SAFETY: both events live, the out pointer is a live local.
        unsafe { call!(self.driver(), cuEventElapsedTime(&raw mut ms, start.raw, self.raw)) }?;
        Ok(ms)
    }

    pub(crate) fn raw(&self) -> CUevent {
        self.raw
    }

    fn driver(&self) -> &'static Driver {
        self.context.driver()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made by `new`, destroyed once.
            let _ = unsafe { call!(self.context.driver(), cuEventDestroy(self.raw)) };
        }
    }
}
