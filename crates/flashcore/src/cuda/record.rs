//! Calls recorded once as a CUDA graph, and replayed with one launch.
//!
//! ```no_run
//! use flashcore::{Attention, DType, Layout, cuda::Cuda};
//!
//! let cuda = Cuda::new(0)?.on_new_stream()?; // the default stream cannot be recorded
//! let layout = Layout::bhsd([1, 8, 512, 64]);
//! let (q, o) = (cuda.empty(DType::F16, layout)?, cuda.empty(DType::F16, layout)?);
//! let recording = cuda.record(|calls| calls.run(&Attention::new().causal(), [&q, &q, &q], &o, None))?;
//! for _ in 0..100 {
//!     recording.replay()?;
//! }
//! # Ok::<(), flashcore::Error>(())
//! ```
#![allow(unsafe_code)] // A replay reaches memory through addresses; the recording borrows what they belong to.

use std::{marker::PhantomData, sync::Arc};

use flashcore_driver::{CaptureMode, DeviceBuffer, DriverError, GraphExec};

use super::{Cuda, CudaTensor, Ready};
use crate::{Append, Attention, Backward, Device, Error, Problem, Result};

/// Takes calls into a recording.
pub struct Recorder<'a> {
    cuda: Cuda,
    kernels: Vec<Arc<Ready>>,
    /// The workspace of all calls, which run one after the other; the last is the largest.
    workspaces: Vec<DeviceBuffer>,
    calls: usize,
    tensors: PhantomData<&'a [u8]>,
}

/// Recorded calls, ready to run again. It borrows their tensors.
pub struct Recording<'a> {
    exec: GraphExec,
    cuda: Cuda,
    calls: usize,
    /// The code that the graph refers to.
    _kernels: Vec<Arc<Ready>>,
    /// The memory that it refers to.
    _workspaces: Vec<DeviceBuffer>,
    tensors: PhantomData<&'a [u8]>,
}

impl Cuda {
    /// Records the calls that `work` makes, instead of running them. The stream must not be the default one.
    pub fn record<'a>(&self, work: impl FnOnce(&mut Recorder<'a>) -> Result<()>) -> Result<Recording<'a>> {
        let mut recorder = Recorder {
            cuda: self.clone(),
            kernels: Vec::new(),
            workspaces: Vec::new(),
            calls: 0,
            tensors: PhantomData,
        };
        let graph =
            self.stream.capture(CaptureMode::ThreadLocal, |_| work(&mut recorder).map_err(Failure::Work));
        let graph = graph.map_err(|failure| match failure {
            Failure::Work(error) => error,
            Failure::Capture(error) => self.error(&error),
        })?;
        let ready = || {
            let exec = graph.instantiate()?;
            exec.upload(&self.stream)?;
            Ok(exec)
        };
        let exec = ready().map_err(|error: DriverError| self.error(&error))?;
        let Recorder { cuda, kernels, workspaces, calls, .. } = recorder;
        Ok(Recording { exec, cuda, calls, _kernels: kernels, _workspaces: workspaces, tensors: PhantomData })
    }
}

/// Why nothing was recorded.
enum Failure {
    Work(Error),
    Capture(DriverError),
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Failure::Capture(error)
    }
}

impl<'a> Recorder<'a> {
    /// Records one call; lse is computed if there is a place for it. Calls run one after the other, so that one
    /// output may be given to several: it then holds the last one's result.
    pub fn run(
        &mut self,
        attention: &Attention<'a>,
        [q, k, v]: [&'a CudaTensor; 3],
        o: &'a CudaTensor,
        lse: Option<&'a CudaTensor>,
    ) -> Result<()> {
        let (q, k, v) = (q.view()?, k.view()?, v.view()?);
        let mut problem = attention.problem(&q, &k, &v)?;
        problem.lse = lse.is_some();
        let mut lse = lse.map(CudaTensor::target).transpose()?;
        let device = self.device(&problem)?;
        attention.run_into(&device, &q, &k, &v, &mut o.target()?, lse.as_mut())?;
        self.calls += 1;
        Ok(())
    }

    /// Records one step of decoding, which appends to the caches k and v.
    pub fn append(
        &mut self,
        attention: &Attention<'a>,
        new: &Append<'a>,
        [q, k, v]: [&'a CudaTensor; 3],
        o: &'a CudaTensor,
    ) -> Result<()> {
        let problem = attention.append_problem(new, &q.view()?, &k.view()?, &v.view()?)?;
        let device = self.device(&problem)?;
        let (mut k, mut v) = (k.target()?, v.target()?);
        attention.append_into(&device, new, &q.view()?, &mut k, &mut v, &mut o.target()?, None)?;
        self.calls += 1;
        Ok(())
    }

    /// Records one backward pass, given q, k, v, o, lse and the gradient of o, into the gradients of q, k and v.
    pub fn backward(
        &mut self,
        attention: &Attention<'a>,
        given: [&'a CudaTensor; 6],
        [dq, dk, dv]: [&'a CudaTensor; 3],
    ) -> Result<()> {
        let [q, k, v, o, lse, d_o] = given.map(CudaTensor::view);
        let given = Backward::new([&q?, &k?, &v?], &o?, &lse?, &d_o?);
        let device = self.device(&attention.backward_problem(&given)?)?;
        attention.backward_into(&device, &given, &mut dq.target()?, &mut dk.target()?, &mut dv.target()?)?;
        self.calls += 1;
        Ok(())
    }

    /// The device for a call, with code and a workspace that live as long as the recording.
    fn device(&mut self, problem: &Problem) -> Result<Device> {
        let mut cuda = self.cuda.clone();
        if problem.signature().outputs().any(|output| !output.shape.contains(&0)) {
            let ready = cuda.ready(problem)?;
            let needed = ready.plan.workspace_bytes();
            self.kernels.push(ready);
            if needed > 0 && cuda.workspace.is_none() {
                let (address, bytes) = self.workspace(needed)?;
                // SAFETY: the recording keeps it, and its calls run one after the other.
                cuda = unsafe { cuda.with_workspace(address, bytes) };
            }
        }
        Ok(Device::cuda_with(cuda))
    }

    /// Memory of at least so many bytes that lives as long as the recording.
    fn workspace(&mut self, bytes: usize) -> Result<(u64, usize)> {
        if self.workspaces.last().is_none_or(|last| last.len() < bytes) {
            let context = &self.cuda.shared.context;
            let made = context.with_relaxed_capture(|| context.alloc(bytes)).and_then(|made| made);
            self.workspaces.push(made.map_err(|error| self.cuda.error(&error))?);
        }
        let last = &self.workspaces[self.workspaces.len() - 1];
        Ok((last.address(), last.len()))
    }
}

impl Recording<'_> {
    /// Queues all recorded calls again.
    pub fn replay(&self) -> Result<()> {
        // SAFETY: the recording borrows every tensor and holds the code of every call.
        unsafe { self.exec.launch(&self.cuda.stream) }.map_err(|error| self.cuda.error(&error))
    }

    /// How many calls were recorded.
    pub fn calls(&self) -> usize {
        self.calls
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        // Whoever frees the tensors next must not do so under a replay.
        let _ = self.cuda.synchronize();
    }
}
