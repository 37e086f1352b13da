//! The devices of the process: made when first used, shared by every call.
#![allow(unsafe_code)] // Borrows the streams of other libraries.

use std::sync::{
    Arc, Mutex, OnceLock, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use flashcore::{Device, Error, Place, Result, cpu, cuda::Cuda};
use rayon::ThreadPool;

use crate::arrays::Stream;

/// The most streams that are remembered; torch has 32 per device and priority.
const MAX_STREAMS: usize = 128;

/// The GPUs that were used so far.
static GPUS: Mutex<Vec<Cuda>> = Mutex::new(Vec::new());

/// A GPU with a stream of another library.
struct Queue {
    ordinal: u32,
    stream: usize,
    device: Device,
    cuda: Cuda,
}

static QUEUES: Mutex<Vec<Queue>> = Mutex::new(Vec::new());

/// The CPU.
pub fn cpu() -> &'static Device {
    static CPU: OnceLock<Device> = OnceLock::new();
    CPU.get_or_init(|| Device::cpu_with(cpu::Engine::new().with_openmp_team()))
}

/// A GPU with its default stream.
pub fn gpu(ordinal: u32) -> Result<Cuda> {
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = gpus.iter().find(|cuda| cuda.ordinal() == ordinal) {
        return Ok(found.clone());
    }
    let cuda = Cuda::new(ordinal)?;
    gpus.push(cuda.clone());
    Ok(cuda)
}

/// A device as a call needs it.
pub struct Placed {
    /// Where the call runs.
    pub device: Device,
    /// What to wait for after the call, if the stream's owner cannot know about it.
    pub wait_for: Option<Cuda>,
}

impl Placed {
    /// Runs a call on tensors that lie there.
    pub fn run(&self, place: Place, call: impl FnOnce() -> Result<()> + Send) -> Result<()> {
        match place {
            Place::Host => on_live_threads(call),
            Place::Cuda(_) => {
                call()?;
                self.wait_for.as_ref().map_or(Ok(()), Cuda::synchronize)
            }
        }
    }
}

/// The device where tensors lie, queueing in their owner's stream.
pub fn of(place: Place, stream: Option<Stream>) -> Result<Placed> {
    let (Place::Cuda(ordinal), Some(stream)) = (place, stream) else {
        return Ok(Placed { device: cpu().clone(), wait_for: None });
    };
    let mut queues = QUEUES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = |queue: &Queue| queue.ordinal == ordinal && queue.stream == stream.raw;
    let index = if let Some(index) = queues.iter().position(known) {
        index
    } else {
        let pointer = std::ptr::with_exposed_provenance_mut(stream.raw);
        // SAFETY: a queue is used only while its stream is its owner's current one, and then the stream lives.
        let cuda = unsafe { gpu(ordinal)?.on_stream(pointer) }?;
        if queues.len() == MAX_STREAMS {
            queues.remove(0);
        }
        queues.push(Queue { ordinal, stream: stream.raw, device: Device::cuda_with(cuda.clone()), cuda });
        queues.len() - 1
    };
    let queue = &queues[index];
    Ok(Placed { device: queue.device.clone(), wait_for: stream.wait.then(|| queue.cuda.clone()) })
}

/// Whether this process is a fork of the one that loaded the library: threads do not survive a fork, so the pool
/// that the CPU engine shares is dead there.
static FORKED: AtomicBool = AtomicBool::new(false);

/// The threads of a forked process.
static FORKED_POOL: Mutex<Option<Arc<ThreadPool>>> = Mutex::new(None);

/// Has to be called in the child of a fork.
pub fn after_fork() {
    FORKED.store(true, Ordering::Relaxed);
    // A pool inherited from a process that was itself a fork is dead too; it has no threads to stop.
    if let Ok(mut pool) = FORKED_POOL.try_lock() {
        std::mem::forget(pool.take());
    }
}

/// Runs a call on threads that are alive in this process.
pub fn on_live_threads<T: Send>(call: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    if !FORKED.load(Ordering::Relaxed) {
        return call();
    }
    let mut pool = FORKED_POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let threads = if let Some(threads) = &*pool {
        Arc::clone(threads)
    } else {
        let made = rayon::ThreadPoolBuilder::new().build().map_err(|error| Error::Device {
            device: "cpu".into(),
            what: format!("threads of a forked process could not be started: {error}"),
            source: Some(error.into()),
        })?;
        Arc::clone(pool.insert(Arc::new(made)))
    };
    drop(pool);
    threads.install(call)
}
