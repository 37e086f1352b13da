//! The CUDA device: plans become machine code, once, and calls become launches.
//!
//! The first call of a problem chooses a plan, emits its PTX, assembles it with the driver (or takes it from the
//! disk cache) and loads it. Every later call finds that by one look-up and asks the driver for nothing but the
//! launch: it allocates nothing, works under stream capture, and may come from any thread. Addresses are checked
//! against the allocations that the driver knows, each of which it is asked for once.
#![allow(unsafe_code)] // A launch reaches memory through addresses; the contract of the call has checked them.

mod again;
mod cache;
mod floor;
mod key;
mod lengths;
mod maps;
mod places;
mod pointers;
mod record;
mod staged;
mod tensor;
mod workspace;

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{Arc, OnceLock, PoisonError, RwLock},
};

pub use cache::CubinCache;
pub use flashcore_driver as driver;
use flashcore_driver::{
    Context, CudaVersion, DeviceBuffer, Driver, DriverError, Function, JitOptions, LaunchConfig, Module,
    Stream, link_ptx,
};
use flashcore_kernels::{Kernel, Schedule};
use flashcore_ptx::{Target, TraceSize};

#[doc(hidden)]
pub use self::floor::LaunchFloor;
use self::{
    again::{CallKey, KnownCalls, Made},
    key::{Choice, Key, QuickState},
    lengths::LengthsKernel,
    maps::KnownMaps,
    pointers::{BadPointer, KnownMemory, Span},
    workspace::{Lease, Workspaces},
};
pub use self::{
    record::{Recorder, Recording},
    tensor::{CudaLengths, CudaTensor},
};
use crate::{
    Error, Name, Pass, Problem, Result,
    contract::Call,
    plan::{Bindings, Hardware, Launch, Packed, Plan},
    tensor::Place,
};

/// Calls of so many operations take about as long as their launch.
const BRIEF_FLOPS: f64 = 4e9;

/// The first driver that records launches that overlap with the one before them: graphs know of them from here on.
const PROGRAMMATIC: CudaVersion = CudaVersion(12030);

/// A CUDA GPU with the kernels that were made for it so far, and the stream that calls are queued in.
///
/// Clones share the kernels. Calls on device tensors return when they are queued, not when they are done.
#[derive(Clone)]
pub struct Cuda {
    shared: Arc<Shared>,
    stream: Stream,
    hardware: Arc<Hardware>,
    choice: Choice,
    /// The caller's workspace: its address and how many bytes it has.
    workspace: Option<(u64, usize)>,
    /// Where kernels write their stamps, if they are traced.
    trace: Option<(u64, TraceSize)>,
}

struct Shared {
    context: Context,
    ordinal: u32,
    cache: CubinCache,
    ready: RwLock<HashMap<Key, Arc<Ready>, QuickState>>,
    calls: KnownCalls,
    memory: KnownMemory,
    maps: KnownMaps,
    lengths: OnceLock<LengthsKernel>,
    workspaces: Workspaces,
}

/// A plan whose code is loaded.
struct Ready {
    plan: Plan,
    /// The kernel of each launch, and how it is launched.
    kernels: Vec<(Function, LaunchConfig)>,
    /// The hash of the PTX texts.
    code: String,
    /// Whether the launch takes about as long as the kernel.
    brief: bool,
}

impl Ready {
    /// Queues the launches with these parameters.
    fn queue(&self, stream: &Stream, params: &Packed) -> std::result::Result<(), DriverError> {
        for (index, (function, launch)) in self.kernels.iter().enumerate() {
            let (bytes, places) = params.launch(index);
            // SAFETY: the parameters are the kernel's own struct, and the call's contract holds for its tensors.
            unsafe { function.launch_fields(stream, launch, bytes, places) }?;
        }
        Ok(())
    }

    fn context(&self) -> &Context {
        self.kernels[0].0.module().context()
    }
}

impl Cuda {
    /// The GPU of this number, with its default stream.
    pub fn new(ordinal: u32) -> Result<Self> {
        Self::with_cache(ordinal, CubinCache::of_user())
    }

    /// The GPU of this number, with a cache of the caller's.
    pub fn with_cache(ordinal: u32, cache: CubinCache) -> Result<Self> {
        let device = Driver::load().and_then(|driver| driver.device(ordinal as usize));
        Self::of_device(device.map_err(|error| device_error(ordinal, &error))?, cache)
    }

    /// A GPU of a driver that the caller has loaded.
    pub fn of_device(device: driver::Device, cache: CubinCache) -> Result<Self> {
        let ordinal = device.ordinal() as u32;
        let context = device.context().map_err(|error| device_error(ordinal, &error))?;
        let properties = context.properties();
        let capability = properties.compute_capability;
        let target = match (capability.major, capability.minor) {
            (8, 9) => Target::Sm89,
            // Code for sm_90a runs on 9.0 alone; that for sm_80 on everything later.
            (9, 0) => Target::Sm90a,
            (8.., _) => Target::Sm80,
            _ => {
                return Err(Error::Unsupported {
                    device: format!("cuda:{ordinal}"),
                    what: format!("compute capability {capability} ({})", properties.name),
                    possible: "8.0 (Ampere) and later; the CPU engine runs everywhere".into(),
                    source: None,
                });
            }
        };
        let hardware = Hardware { name: properties.name.clone(), target, sms: properties.sm_count };
        let stream = context.default_stream();
        let shared = Shared {
            context,
            ordinal,
            cache,
            ready: RwLock::default(),
            calls: KnownCalls::default(),
            memory: KnownMemory::default(),
            maps: KnownMaps::default(),
            lengths: OnceLock::new(),
            workspaces: Workspaces::default(),
        };
        let (shared, hardware) = (Arc::new(shared), Arc::new(hardware));
        Ok(Self { shared, stream, hardware, choice: Choice::Planner, workspace: None, trace: None })
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

    /// The same GPU and kernels, queueing in a stream of its context.
    pub fn with_stream(&self, stream: &Stream) -> Result<Self> {
        if stream.context() != &self.shared.context {
            let stream_device = stream.context().device().ordinal();
            return Err(Error::ForeignStream { stream_device, device: self.name() });
        }
        Ok(Self { stream: stream.clone(), ..self.clone() })
    }

    /// The same GPU and kernels, queueing in a stream of its own, which waits for no other.
    pub fn on_new_stream(&self) -> Result<Self> {
        let stream = self.shared.context.stream(driver::StreamOptions::default());
        self.with_stream(&stream.map_err(|error| self.error(&error))?)
    }

    /// The same GPU and kernels, with a workspace of the caller's: plans say how many bytes they need
    /// ([`Plan::workspace_bytes`]). Without one, each stream has its own.
    ///
    /// # Safety
    /// So many bytes at this address of the GPU's memory are aligned to 256 bytes and belong to the calls on this device,
    /// one after the other, until the last of them has run, and as long as a graph that captured one can run.
    pub unsafe fn with_workspace(&self, address: u64, bytes: usize) -> Self {
        Self { workspace: Some((address, bytes)), ..self.clone() }
    }

    /// The same GPU, with kernels that stamp their sections: see [`Plan::trace_size`].
    ///
    /// # Safety
    /// Memory of this size at this address of the GPU belongs to the calls on this device, as for
    /// [`Cuda::with_workspace`].
    #[doc(hidden)]
    pub unsafe fn with_trace(&self, address: u64, size: TraceSize) -> Self {
        Self { trace: Some((address, size)), ..self.clone() }
    }

    /// The same GPU, with the default schedule of one kernel for every problem.
    pub fn with_kernel(&self, kernel: Kernel) -> Self {
        Self { choice: Choice::Kernel(kernel), ..self.clone() }
    }

    /// The same GPU, with one schedule for every problem.
    pub fn with_schedule(&self, schedule: Schedule) -> Self {
        Self { choice: Choice::Schedule(schedule), ..self.clone() }
    }

    /// The same GPU with code for another target that it runs, as an older GPU would get it.
    pub fn with_target(&self, target: Target) -> Self {
        let hardware = Hardware { target, ..Hardware::clone(&self.hardware) };
        Self { hardware: Arc::new(hardware), ..self.clone() }
    }

    /// Which GPU it is.
    pub fn ordinal(&self) -> u32 {
        self.shared.ordinal
    }

    /// What plans depend on.
    pub fn hardware(&self) -> &Hardware {
        &self.hardware
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
        let plan = self.untraced_plan(problem)?;
        Ok(if self.trace.is_some() { plan.traced() } else { plan })
    }

    fn untraced_plan(&self, problem: &Problem) -> Result<Plan> {
        match self.choice {
            Choice::Planner => Plan::choose(problem, &self.hardware),
            Choice::Kernel(kernel) => Plan::with_kernel(problem, &self.hardware, kernel),
            Choice::Schedule(schedule) => Plan::with_schedule(problem, &self.hardware, schedule),
        }
    }

    /// Makes the code for a problem, so that the first call does not have to.
    pub fn prepare(&self, problem: &Problem) -> Result<()> {
        self.ready(problem).map(|_| ())
    }

    /// The loaded main kernel of a problem, for those who ask for its attributes.
    #[doc(hidden)]
    pub fn function(&self, problem: &Problem) -> Result<Function> {
        let ready = self.ready(problem)?;
        Ok(ready.kernels[ready.plan.main_index()].0.clone())
    }

    /// The hash of the code for a problem, as PTX: two schedules with one hash are one kernel.
    #[doc(hidden)]
    pub fn code_hash(&self, problem: &Problem) -> Result<String> {
        Ok(self.ready(problem)?.code.clone())
    }

    fn error(&self, error: &DriverError) -> Error {
        device_error(self.shared.ordinal, error)
    }

    fn key(&self, problem: &Problem) -> Key {
        Key {
            problem: *problem,
            target: self.hardware.target,
            choice: self.choice,
            traced: self.trace.is_some(),
        }
    }

    fn ready(&self, problem: &Problem) -> Result<Arc<Ready>> {
        let key = self.key(problem);
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
        let mut hasher = blake3::Hasher::new();
        let mut kernels = Vec::new();
        for launch in &plan.launches {
            let module = launch.module(plan.target)?;
            let ptx = module.to_string();
            hasher.update(ptx.as_bytes());
            let function = self.load(&module.kernels[0].name, &ptx, plan.target, launch.shared_bytes);
            kernels.push((function.map_err(|error| self.error(&error))?, self.config(launch)));
        }
        let (code, brief) = (hasher.finalize().to_hex().to_string(), problem.flops() <= BRIEF_FLOPS);
        Ok(Ready { plan, kernels, code, brief })
    }

    /// How a kernel of a plan is launched.
    fn config(&self, launch: &Launch) -> LaunchConfig {
        let mut config = LaunchConfig::new(launch.grid, [launch.threads, 1, 1]);
        config.shared_bytes = launch.shared_bytes;
        config.cluster = (launch.cluster > 1).then_some([launch.cluster, 1, 1]);
        // Such a kernel sets itself up beside the one before it, and waits for that one before it reads anything.
        config.programmatic = launch.schedule.is_programmatic()
            && self.hardware.target == Target::Sm90a
            && self.shared.context.driver().version() >= PROGRAMMATIC;
        config
    }

    /// The machine code of a kernel, loaded.
    fn load(
        &self,
        entry: &str,
        ptx: &str,
        target: Target,
        shared_bytes: u32,
    ) -> std::result::Result<Function, DriverError> {
        let Shared { context, cache, .. } = &*self.shared;
        let function = if target == Target::Sm90a {
            // The linker assembles for code it does not know, and then ignores setmaxnreg: the kernel would
            // spill. Loading assembles the module as a whole, and the driver keeps the result in its own cache.
            Module::from_ptx(context, entry, ptx, &JitOptions::default())?.function(entry)?
        } else {
            let gpu = context.properties().compute_capability.to_string();
            let key = CubinCache::key(ptx, &gpu, &context.driver().version().to_string());
            let kept = cache.get(&key).and_then(|cubin| Module::from_cubin(context, entry, &cubin).ok());
            let loaded = if let Some(loaded) = kept {
                loaded
            } else {
                let cubin = link_ptx(context, entry, ptx, &JitOptions::default())?.bytes;
                // A cache that cannot be written costs time, not the call.
                let _ = cache.put(&key, &cubin);
                Module::from_cubin(context, entry, &cubin)?
            };
            loaded.function(entry)?
        };
        if shared_bytes > 0 {
            function.set_max_dynamic_shared(shared_bytes)?;
        }
        Ok(function)
    }

    pub(crate) fn run(&self, call: &Call<'_>) -> Result<()> {
        if call.place() == Place::Host {
            return staged::run(self, call);
        }
        let workspace = (workspace::stream_key(&self.stream), self.workspace.map(|(address, _)| address));
        let key = CallKey::new(&self.key(&call.problem), call, workspace, self.trace);
        // Lengths that are on the host may differ from those of last time.
        let repeatable = call.key_lengths.is_none();
        if repeatable
            && let Some(launched) = self.shared.calls.again(&key, |made| self.launch_again(made)).flatten()
        {
            return launched;
        }
        self.check_memory(call)?;
        let scalar =
            matches!(self.choice, Choice::Kernel(Kernel::Scalar) | Choice::Schedule(Schedule::Scalar(_)));
        let launched = match self.misaligned(call) {
            Some(misaligned) if !scalar => Err(misaligned),
            _ => self.run_as(call, &key),
        };
        match launched {
            // Whether it comes to this follows from the addresses and strides, which are part of the call's key.
            Err(Error::Alignment { .. } | Error::Unsupported { .. })
                if self.choice == Choice::Planner
                    && call.problem.pass == Pass::Forward
                    && !call.problem.is_eight_bit()
                    && call.problem.append.is_none()
                    && call.problem.is_dense() =>
            {
                self.with_kernel(Kernel::Scalar).run_as(call, &key)
            }
            launched => launched,
        }
    }

    /// Launches the kernels that this device chooses, and remembers the call by a key.
    fn run_as(&self, call: &Call<'_>, key: &CallKey) -> Result<()> {
        let lengths = call.key_lengths.map(|values| self.store_lengths(values)).transpose()?;
        let ready = self.ready(&call.problem)?;
        let workspace = self.lease(&ready.plan)?;
        let bindings = Bindings {
            tensors: call.tensors.map(|raw| (raw.ptr as u64, raw.layout)),
            key_lengths: lengths.as_ref().map(DeviceBuffer::address).or(call.device_lengths),
            workspace: workspace.address,
            trace: self.trace,
        };
        let packed = self.bind(&ready.plan, &bindings)?;
        self.launch(&ready, &packed)?;
        if call.key_lengths.is_none() && workspace.stays {
            self.shared.calls.remember(key, ready, packed);
        }
        // The lengths must outlive the kernel. Memory of a pool is freed in stream order, behind it.
        let freed_at_once = lengths.is_some() && !self.shared.context.properties().memory_pools;
        if freed_at_once { self.synchronize() } else { Ok(()) }
    }

    /// The workspace for a plan's launches, for as long as they are queued.
    fn lease(&self, plan: &Plan) -> Result<Lease> {
        let needed = plan.workspace_bytes();
        match self.workspace {
            _ if needed == 0 => Ok(Lease::kept(0)),
            Some((address, given)) if given >= needed => Ok(Lease::kept(address)),
            Some((_, given)) => Err(Error::Workspace { given, needed }),
            None => {
                let context = &self.shared.context;
                let leased =
                    context.with_relaxed_capture(|| self.shared.workspaces.get(&self.stream, needed));
                leased.and_then(|leased| leased).map_err(|error| self.error(&error))
            }
        }
    }

    /// Puts key lengths where a kernel that is queued next finds them.
    fn store_lengths(&self, values: &[u32]) -> Result<DeviceBuffer> {
        let kernel = if let Some(kernel) = self.shared.lengths.get() {
            kernel
        } else {
            let context = &self.shared.context;
            let loaded = context.with_relaxed_capture(|| LengthsKernel::load(context));
            let kernel = loaded.and_then(|kernel| kernel).map_err(|error| self.error(&error))?;
            self.shared.lengths.get_or_init(|| kernel)
        };
        kernel.store(&self.stream, values).map_err(|error| self.error(&error))
    }

    /// Refuses tensors that are not in this GPU's memory, which would cost the whole context.
    fn check_memory(&self, call: &Call<'_>) -> Result<()> {
        let batch = call.problem.batch as u64;
        let lengths = call.device_lengths.map(|start| (Name::KeyLengths, start..start + 4 * batch));
        let signature = call.problem.signature();
        let tensors = signature.iter().map(|parameter| -> Span {
            let span = call.tensors[parameter.name].span();
            (parameter.name, span.start as u64..span.end as u64)
        });
        let spans = tensors.chain(lengths).filter(|(_, span)| !span.is_empty());
        match self.shared.memory.check(&self.shared.context, spans) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(BadPointer { tensor, address, fault })) => {
                Err(Error::Pointer { tensor, address, device: self.name(), fault })
            }
            Err(error) => Err(self.error(&error)),
        }
    }

    /// The parameters of a plan's launches for tensors that lie there.
    fn bind(&self, plan: &Plan, bindings: &Bindings) -> Result<Packed> {
        plan.bind(bindings, &mut |map| {
            self.shared.maps.get(&self.shared.context, map).map_err(|error| self.error(&error))
        })
    }

    /// Queues the launches.
    fn launch(&self, ready: &Ready, params: &Packed) -> Result<()> {
        let _turn = self.shared.workspaces.turn(&ready.plan);
        ready.queue(&self.stream, params).map_err(|error| self.error(&error))
    }

    /// Queues a call that was made before; `None` if it has to be made anew, because its workspace cannot be used again.
    fn launch_again(&self, made: &Made) -> Option<Result<()>> {
        if made.ready.plan.workspace_bytes() > 0
            && self.workspace.is_none()
            && workspace::is_shared(&self.stream)
        {
            return None;
        }
        let _turn = self.shared.workspaces.turn(&made.ready.plan);
        let launched = made.launch(&self.stream, |stream| made.ready.queue(stream, &made.packed));
        Some(launched.map_err(|error| self.error(&error)))
    }

    /// What is not aligned as the kernels with tensor cores need it, if anything.
    fn misaligned(&self, call: &Call<'_>) -> Option<Error> {
        call.problem.signature().iter().find_map(|parameter| {
            let (raw, needed) = (&call.tensors[parameter.name], parameter.alignment);
            let size = raw.dtype.size();
            let [batch, head, row, _] = raw.layout.strides.map(|stride| stride * size);
            let numbers = [
                ("address", raw.ptr as usize),
                ("batch stride", batch),
                ("head stride", head),
                ("row stride", row),
            ];
            let (what, given) = numbers.into_iter().find(|(_, value)| !value.is_multiple_of(needed))?;
            Some(Error::Alignment { tensor: parameter.name, what, given, needed, device: self.name() })
        })
    }

    fn name(&self) -> String {
        format!("cuda:{}", self.shared.ordinal)
    }
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda").field("ordinal", &self.shared.ordinal).finish_non_exhaustive()
    }
}

impl std::fmt::Display for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{} ({})", self.shared.ordinal, self.hardware.name)
    }
}

fn device_error(ordinal: u32, error: &DriverError) -> Error {
    let (device, what, source) = (format!("cuda:{ordinal}"), error.to_string(), Some(error.clone().into()));
    match *error {
        DriverError::OutOfMemory { bytes, .. } => Error::OutOfMemory { device, bytes, what, source },
        DriverError::ForeignStream { stream_device, .. } => Error::ForeignStream { stream_device, device },
        _ => Error::Device { device, what, source },
    }
}
