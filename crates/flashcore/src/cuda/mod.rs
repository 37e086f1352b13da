//! The CUDA device: plans become machine code, once, and calls become launches.
//!
//! The first call of a problem chooses a plan, emits its PTX, assembles it with the driver (or takes it from the
//! disk cache) and loads it. Every later call finds that by one look-up and asks the driver for nothing but the
//! launch: it allocates nothing, works under stream capture, and may come from any thread.
#![allow(unsafe_code)] // A launch reaches memory through addresses; the contract of the call has checked them.

mod cache;

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{Arc, PoisonError, RwLock},
};

pub use cache::CubinCache;
use flashcore_driver::{
    Context, DeviceBuffer, Driver, DriverError, Function, JitOptions, LaunchConfig, Module, Stream, link_ptx,
};
use flashcore_kernels::{MAX_ROW_STRIDE, Schedule};
use flashcore_ptx::{KernelParams, Target};

use crate::{
    DType, Error, Layout, Name, Problem, Result,
    contract::Call,
    plan::{ALIGNMENT, Addresses, Hardware, Plan},
    staging,
    tensor::{Place, Raw, Tensor, TensorMut},
};

/// A CUDA GPU with the kernels that were made for it so far, and the stream that calls are queued in.
///
/// Clones share the kernels. Calls on device tensors return when they are queued, not when they are done.
#[derive(Clone)]
pub struct Cuda {
    shared: Arc<Shared>,
    stream: Stream,
    schedule: Option<Schedule>,
}

struct Shared {
    context: Context,
    ordinal: u32,
    hardware: Hardware,
    cache: CubinCache,
    ready: RwLock<HashMap<Key, Arc<Ready>>>,
}

/// A plan whose code is loaded.
struct Ready {
    plan: Plan,
    function: Function,
    launch: LaunchConfig,
}

/// What a plan depends on. Floats are compared by their bits.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 7],
    dtype: DType,
    mask: crate::Mask,
    scale: u32,
    softcap: Option<u32>,
    flags: [bool; 2],
    schedule: Option<Schedule>,
}

impl Key {
    fn new(problem: &Problem, schedule: Option<Schedule>) -> Self {
        let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, .. } = *problem;
        Self {
            sizes: [batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v],
            dtype: problem.dtype,
            mask: problem.mask,
            scale: problem.scale.to_bits(),
            softcap: problem.softcap.map(f32::to_bits),
            flags: [problem.key_lengths, problem.lse],
            schedule,
        }
    }
}

impl Cuda {
    /// The GPU of this number, with its default stream.
    pub fn new(ordinal: u32) -> Result<Self> {
        Self::with_cache(ordinal, CubinCache::of_user())
    }

    /// The GPU of this number, with a cache of the caller's.
    pub fn with_cache(ordinal: u32, cache: CubinCache) -> Result<Self> {
        let open = || {
            let device = Driver::load()?.device(ordinal as usize)?;
            device.context()
        };
        let context = open().map_err(|error| device_error(ordinal, &error))?;
        let properties = context.properties();
        let capability = properties.compute_capability;
        let target = match (capability.major, capability.minor) {
            (8, 9) => Target::Sm89,
            (8.., _) => Target::Sm80,
            _ => {
                return Err(Error::Unsupported {
                    device: format!("cuda:{ordinal}"),
                    what: format!("compute capability {capability} ({})", properties.name),
                    possible: "8.0 (Ampere) and later; the CPU engine runs everywhere".into(),
                });
            }
        };
        let hardware = Hardware { name: properties.name.clone(), target, sms: properties.sm_count };
        let stream = context.default_stream();
        let ready = RwLock::new(HashMap::new());
        let shared = Arc::new(Shared { context, ordinal, hardware, cache, ready });
        Ok(Self { shared, stream, schedule: None })
    }

    /// The same GPU and kernels, queueing in a stream of the caller's.
    ///
    /// # Safety
    /// `stream` is a live `CUstream` for as long as the device is used.
    pub unsafe fn on_stream(&self, stream: *mut c_void) -> Result<Self> {
        // SAFETY: as the caller promises.
        let stream = unsafe { Stream::borrow_raw(&self.shared.context, stream) };
        let stream = stream.map_err(|error| self.error(&error))?;
        Ok(Self { stream, ..self.clone() })
    }

    /// The same GPU and kernels, queueing in a stream that FlashCore owns.
    pub fn with_stream(&self, stream: Stream) -> Self {
        Self { stream, ..self.clone() }
    }

    /// The same GPU, with one schedule for every problem.
    pub fn with_schedule(&self, schedule: Schedule) -> Self {
        Self { schedule: Some(schedule), ..self.clone() }
    }

    /// Which GPU it is.
    pub fn ordinal(&self) -> u32 {
        self.shared.ordinal
    }

    /// What plans depend on.
    pub fn hardware(&self) -> &Hardware {
        &self.shared.hardware
    }

    /// The driver's context.
    pub fn context(&self) -> &Context {
        &self.shared.context
    }

    /// The stream that calls are queued in.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Waits until everything queued in the stream is done.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(|error| self.error(&error))
    }

    /// The plan for a problem.
    pub fn plan(&self, problem: &Problem) -> Result<Plan> {
        match self.schedule {
            Some(schedule) => Plan::with_schedule(problem, &self.shared.hardware, schedule),
            None => Plan::choose(problem, &self.shared.hardware),
        }
    }

    /// Makes the code for a problem, so that the first call does not have to.
    pub fn prepare(&self, problem: &Problem) -> Result<()> {
        self.ready(problem).map(|_| ())
    }

    /// The loaded kernel of a problem, for those who ask for its attributes.
    pub fn function(&self, problem: &Problem) -> Result<Function> {
        Ok(self.ready(problem)?.function.clone())
    }

    fn error(&self, error: &DriverError) -> Error {
        device_error(self.shared.ordinal, error)
    }

    fn ready(&self, problem: &Problem) -> Result<Arc<Ready>> {
        let key = Key::new(problem, self.schedule);
        if let Some(ready) = self.shared.ready.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(Arc::clone(ready));
        }
        // Assembled outside the lock: two threads may do it twice, none waits for the other.
        let made = self.shared.context.with_relaxed_capture(|| self.make(problem));
        let ready = Arc::new(made.map_err(|error| self.error(&error))??);
        let mut all = self.shared.ready.write().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(all.entry(key).or_insert(ready)))
    }

    fn make(&self, problem: &Problem) -> Result<Ready> {
        let plan = self.plan(problem)?;
        let module = plan.module()?;
        let entry = module.kernels[0].name.clone();
        let shared = &self.shared;
        let load = || {
            let ptx = module.to_string();
            let gpu = shared.context.properties().compute_capability.to_string();
            let key = CubinCache::key(&ptx, &gpu, &shared.context.driver().version().to_string());
            let kept = shared
                .cache
                .get(&key)
                .and_then(|cubin| Module::from_cubin(&shared.context, &entry, &cubin).ok());
            let loaded = if let Some(loaded) = kept {
                loaded
            } else {
                let cubin = link_ptx(&shared.context, &entry, &ptx, &JitOptions::default())?.bytes;
                // A cache that cannot be written costs time, not the call.
                let _ = shared.cache.put(&key, &cubin);
                Module::from_cubin(&shared.context, &entry, &cubin)?
            };
            let function = loaded.function(&entry)?;
            if plan.shared_bytes > 0 {
                function.set_max_dynamic_shared(plan.shared_bytes)?;
            }
            Ok(function)
        };
        let function = load().map_err(|error: DriverError| self.error(&error))?;
        let mut launch = LaunchConfig::new(plan.grid, [plan.threads, 1, 1]);
        launch.shared_bytes = plan.shared_bytes;
        Ok(Ready { plan, function, launch })
    }

    pub(crate) fn run(&self, call: &Call<'_>) -> Result<()> {
        if call.o.layout.elements() == Some(0) {
            return Ok(());
        }
        if call.q.place == Place::Host {
            let mut memory = Staged { cuda: self, buffers: Vec::new() };
            return staging::run(&mut memory, call, |memory, addresses| {
                memory.cuda.launch(&call.problem, addresses)?;
                memory.cuda.synchronize()
            });
        }
        for (name, raw) in [(Name::Q, &call.q), (Name::K, &call.k), (Name::V, &call.v), (Name::O, &call.o)] {
            self.check_alignment(name, raw)?;
        }
        let at = |raw: &Raw| (raw.ptr as u64, raw.layout);
        let mut lengths = None;
        if let Some(values) = call.key_lengths {
            let bytes: Vec<u8> = values.iter().flat_map(|length| length.to_le_bytes()).collect();
            let buffer = self.stream.upload_new(&bytes).map_err(|error| self.error(&error))?;
            lengths = Some(buffer);
        }
        let addresses = Addresses {
            q: at(&call.q),
            k: at(&call.k),
            v: at(&call.v),
            o: at(&call.o),
            lse: call.lse.as_ref().map(at),
            key_lengths: lengths.as_ref().map(DeviceBuffer::address),
        };
        self.launch(&call.problem, &addresses)?;
        // The lengths must outlive the kernel.
        if lengths.is_some() { self.synchronize() } else { Ok(()) }
    }

    /// Queues the kernel.
    fn launch(&self, problem: &Problem, addresses: &Addresses) -> Result<()> {
        let ready = self.ready(problem)?;
        let params = ready.plan.params(addresses).pack();
        // SAFETY: the parameters are the kernel's own struct, and the call's contract holds for its tensors.
        unsafe { ready.function.launch(&self.stream, &ready.launch, &params) }
            .map_err(|error| self.error(&error))
    }

    fn check_alignment(&self, tensor: Name, raw: &Raw) -> Result<()> {
        let size = raw.dtype.size();
        let [batch, head, row, _] = raw.layout.strides.map(|stride| stride * size);
        let misaligned = [
            ("address", raw.ptr as usize),
            ("batch stride", batch),
            ("head stride", head),
            ("row stride", row),
        ]
        .into_iter()
        .find(|(_, value)| !value.is_multiple_of(ALIGNMENT));
        if let Some((what, given)) = misaligned {
            return Err(Error::Alignment { tensor, what, given, needed: ALIGNMENT, device: self.name() });
        }
        if row as u64 > MAX_ROW_STRIDE {
            return Err(Error::Unsupported {
                device: self.name(),
                what: format!("rows of {tensor} that are {row} bytes apart"),
                possible: format!("up to {MAX_ROW_STRIDE} bytes; copy {tensor} to a denser layout"),
            });
        }
        Ok(())
    }

    fn name(&self) -> String {
        format!("cuda:{}", self.shared.ordinal)
    }

    /// Memory for a tensor of this layout.
    pub fn empty(&self, dtype: DType, layout: Layout) -> Result<CudaTensor> {
        let elements = layout.elements().unwrap_or(0);
        let buffer = self
            .shared
            .context
            .alloc((elements * dtype.size()).max(1))
            .map_err(|error| self.error(&error))?;
        Ok(CudaTensor { buffer, dtype, layout, ordinal: self.shared.ordinal, elements })
    }

    /// A copy of a host tensor on the GPU, contiguous with heads and length in the same order.
    pub fn upload(&self, tensor: &Tensor<'_>) -> Result<CudaTensor> {
        let layout = Layout::bhsd(tensor.shape());
        let mut copy = self.empty(tensor.dtype(), layout)?;
        let bytes = tensor.raw.rows();
        if !bytes.is_empty() {
            self.stream.upload(&mut copy.buffer, 0, &bytes).map_err(|error| self.error(&error))?;
        }
        Ok(copy)
    }

    /// What a tensor on the GPU holds, once everything queued in the stream is done.
    pub fn download(&self, tensor: &CudaTensor, out: &mut TensorMut<'_>) -> Result<()> {
        self.synchronize()?;
        let mut bytes = vec![0_u8; tensor.elements * tensor.dtype.size()];
        if !bytes.is_empty() {
            self.stream.download(&tensor.buffer, 0, &mut bytes).map_err(|error| self.error(&error))?;
        }
        out.raw.write_rows(&bytes, &tensor.layout);
        Ok(())
    }
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda").field("ordinal", &self.shared.ordinal).finish_non_exhaustive()
    }
}

impl std::fmt::Display for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{} ({})", self.shared.ordinal, self.shared.hardware.name)
    }
}

/// A tensor in the memory of a GPU.
pub struct CudaTensor {
    buffer: DeviceBuffer,
    dtype: DType,
    layout: Layout,
    ordinal: u32,
    elements: usize,
}

impl CudaTensor {
    /// The tensor to read.
    pub fn view(&self) -> Result<Tensor<'_>> {
        let ptr = self.buffer.address() as *const u8;
        // SAFETY: the buffer holds that many elements and lives as long as the view.
        unsafe {
            Tensor::from_raw_parts(ptr, self.elements, self.dtype, Place::Cuda(self.ordinal), self.layout)
        }
    }

    /// The tensor to write.
    pub fn view_mut(&mut self) -> Result<TensorMut<'_>> {
        let ptr = self.buffer.address() as *mut u8;
        // SAFETY: the buffer holds that many elements, lives as long as the view, and is borrowed by it alone.
        unsafe {
            TensorMut::from_raw_parts(ptr, self.elements, self.dtype, Place::Cuda(self.ordinal), self.layout)
        }
    }

    /// The memory.
    pub fn buffer_mut(&mut self) -> &mut DeviceBuffer {
        &mut self.buffer
    }
}

/// Buffers that live for one staged call.
struct Staged<'a> {
    cuda: &'a Cuda,
    buffers: Vec<DeviceBuffer>,
}

impl staging::Memory for Staged<'_> {
    fn upload(&mut self, _: &str, bytes: &[u8]) -> Result<u64> {
        let bytes = if bytes.is_empty() { &[0][..] } else { bytes };
        let buffer = self.cuda.stream.upload_new(bytes).map_err(|error| self.cuda.error(&error))?;
        self.buffers.push(buffer);
        Ok(self.buffers[self.buffers.len() - 1].address())
    }

    fn reserve(&mut self, _: &str, len: usize) -> Result<u64> {
        let buffer = self.cuda.context().alloc(len.max(1)).map_err(|error| self.cuda.error(&error))?;
        self.buffers.push(buffer);
        Ok(self.buffers[self.buffers.len() - 1].address())
    }

    fn download(&mut self, address: u64, out: &mut [u8]) -> Result<()> {
        let buffer = self.buffers.iter().find(|buffer| buffer.address() == address);
        let buffer = buffer.expect("staging downloads what it reserved");
        self.cuda.stream.download(buffer, 0, out).map_err(|error| self.cuda.error(&error))
    }
}

fn device_error(ordinal: u32, error: &DriverError) -> Error {
    Error::Device { device: format!("cuda:{ordinal}"), what: error.to_string() }
}
