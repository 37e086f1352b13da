//! Graphs: work recorded once from a stream and replayed with one call.

use crate::api::{call, call_optional};
use crate::context::Context;
use crate::error::DriverError;
use crate::stream::Stream;
use crate::sys::*;

/// Which calls elsewhere are refused while a capture is going on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CaptureMode {
    /// Unsafe calls (allocating, synchronising the context) of any thread.
    Global,
    /// Unsafe calls of this thread.
    ThreadLocal,
    /// None.
    Relaxed,
}

impl CaptureMode {
    fn raw(self) -> u32 {
        match self {
            CaptureMode::Global => CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => CU_STREAM_CAPTURE_MODE_RELAXED,
        }
    }
}

/// Whether a stream is being captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CaptureStatus {
    /// It is not.
    None,
    /// It is.
    Active,
    /// It was, and a forbidden call spoiled the capture; it must still be ended.
    Invalidated,
}

impl Stream {
    /// Whether this stream is being captured.
    pub fn capture_status(&self) -> Result<CaptureStatus, DriverError> {
        let _entered = self.context().enter()?;
        let mut status = 0;
        // SAFETY: the stream lives, the out pointer is a live local.
        unsafe { call!(self.driver(), cuStreamIsCapturing(self.raw(), &raw mut status)) }?;
        Ok(match status {
            CU_STREAM_CAPTURE_STATUS_NONE => CaptureStatus::None,
            CU_STREAM_CAPTURE_STATUS_ACTIVE => CaptureStatus::Active,
            _ => CaptureStatus::Invalidated,
        })
    }

    /// Records what `work` queues in this stream as a graph, instead of running it. The capture is ended on
    /// every way out of `work`, also when it fails or panics; its error comes first.
    ///
    /// The default stream cannot be captured.
    pub fn capture<E: From<DriverError>>(
        &self,
        mode: CaptureMode,
        work: impl FnOnce(&Stream) -> Result<(), E>,
    ) -> Result<Graph, E> {
        let _entered = self.context().enter()?;
        // SAFETY: the stream lives.
        unsafe { call!(self.driver(), cuStreamBeginCapture(self.raw(), mode.raw())) }?;
        let capturing = Capturing { stream: self, ended: false };
        let worked = work(self);
        let graph = capturing.end();
        worked?;
        Ok(graph?)
    }
}

/// Ends a capture on every way out.
struct Capturing<'s> {
    stream: &'s Stream,
    ended: bool,
}

impl Capturing<'_> {
    fn end(mut self) -> Result<Graph, DriverError> {
        self.finish()
    }

    fn finish(&mut self) -> Result<Graph, DriverError> {
        self.ended = true;
        let mut raw = std::ptr::null_mut();
        // SAFETY: this stream's capture was begun by us; the out pointer is a live local.
        unsafe { call!(self.stream.driver(), cuStreamEndCapture(self.stream.raw(), &raw mut raw)) }?;
        Ok(Graph { context: self.stream.context().clone(), raw })
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.finish();
        }
    }
}

/// Recorded work.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    raw: CUgraph,
}

// SAFETY: a graph may move between threads; it is not `Sync`, as the driver asks.
unsafe impl Send for Graph {}

impl Graph {
    /// How many operations it has.
    pub fn node_count(&self) -> Result<usize, DriverError> {
        let mut count = 0;
        // SAFETY: with no array given, only the number is written.
        unsafe {
            call!(self.context.driver(), cuGraphGetNodes(self.raw, std::ptr::null_mut(), &raw mut count))
        }?;
        Ok(count)
    }

    /// Makes it ready to run.
    pub fn instantiate(&self) -> Result<GraphExec, DriverError> {
        let _entered = self.context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph lives, the out pointer is a live local; no flags.
        unsafe {
            call_optional!(self.context.driver(), cuGraphInstantiateWithFlags(&raw mut raw, self.raw, 0))
        }?;
        Ok(GraphExec { context: self.context.clone(), raw })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made by the capture, destroyed once.
            let _ = unsafe { call!(self.context.driver(), cuGraphDestroy(self.raw)) };
        }
    }
}

/// A graph that is ready to run. Its replays run one after another, never at the same time.
#[derive(Debug)]
pub struct GraphExec {
    context: Context,
    raw: CUgraphExec,
}

// SAFETY: may move between threads; it is not `Sync`, as the driver asks.
unsafe impl Send for GraphExec {}

impl GraphExec {
    /// Uploads it to the GPU, so that the first replay is as fast as the others.
    pub fn upload(&self, stream: &Stream) -> Result<(), DriverError> {
        let _entered = self.context.enter()?;
        // SAFETY: both handles live.
        unsafe { call_optional!(self.context.driver(), cuGraphUpload(self.raw, stream.raw())) }
    }

    /// Queues one replay.
    ///
    /// # Safety
    ///
    /// All memory and modules that the recorded work uses must stay valid until the replay is done, as for
    /// [`crate::Function::launch`].
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), DriverError> {
        let _entered = self.context.enter()?;
        // SAFETY: both handles live; the caller vouches for what the graph refers to.
        unsafe { call!(self.context.driver(), cuGraphLaunch(self.raw, stream.raw())) }
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made by `instantiate`, destroyed once.
            let _ = unsafe { call!(self.context.driver(), cuGraphExecDestroy(self.raw)) };
        }
    }
}
