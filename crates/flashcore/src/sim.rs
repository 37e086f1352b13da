//! The simulated device: the same plans and the same PTX modules as on a GPU, run on the CPU and watched.
//!
//! A run fails on anything that the simulator has to say about it (races, reads of memory that holds no value,
//! deadlocks, …) and on any output element that no thread wrote, so a result is one that no luck had a part in.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use flashcore_kernels::{ElementType, Schedule, Spec};
use flashcore_ptx::{Module, Target, TensorMap, Track};
pub use flashcore_sim::{AsyncMode, Checks, Config, Finding, Fp8Sums, LaunchReport as Report, Stats, Stop};
use flashcore_sim::{Buffer, LaunchDims, Launching, MOST_BUFFER_BYTES, Sim, Swizzle, TensorElement};

use crate::{
    Error, Keys, Problem, Queries, Result,
    contract::Call,
    plan::{Bindings, Hardware, Kernel, Launch, Map, Plan},
    signature::Rows,
    staging::{self, Memory as _},
};

/// A GPU that is simulated.
#[derive(Clone)]
pub struct SimGpu {
    hardware: Hardware,
    config: Config,
    choice: Choice,
    edit: Option<Edit>,
    last: Arc<Mutex<Option<Report>>>,
    /// Stamps per role, where kernels are traced.
    trace: Option<u32>,
    last_trace: Arc<Mutex<Vec<Track>>>,
    made: Arc<Mutex<Made>>,
}

/// Kernels that were emitted, by what they were emitted for. They are used again: emitting and checking a kernel takes
/// as long as running it on a small problem.
type Made = HashMap<(Schedule, Spec, Target), Arc<Module>>;

/// The most kernels that are kept.
const MOST_MADE: usize = 256;

/// A change to a module before it runs.
type Edit = Arc<dyn Fn(&mut Module) + Send + Sync>;

/// Who chooses the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Planner,
    Kernel(Kernel),
    Schedule(Schedule),
}

impl SimGpu {
    /// A typical GPU of a target, with asynchronous effects as late as they may come.
    pub fn new(target: Target) -> Self {
        let hardware = Hardware::typical(target);
        Self {
            hardware,
            config: Config::default(),
            choice: Choice::Planner,
            edit: None,
            last: Arc::default(),
            trace: None,
            last_trace: Arc::default(),
            made: Arc::default(),
        }
    }

    /// The same with another way of simulating.
    pub fn with_config(self, config: Config) -> Self {
        Self { config, ..self }
    }

    /// The same with another number of multiprocessors, which decides how many persistent blocks there are.
    pub fn with_sms(self, sms: u32) -> Self {
        Self { hardware: Hardware { sms, ..self.hardware }, ..self }
    }

    /// The same with the default schedule of one kernel.
    pub fn with_kernel(self, kernel: Kernel) -> Self {
        Self { choice: Choice::Kernel(kernel), ..self }
    }

    /// The same with one schedule for every problem.
    pub fn with_schedule(self, schedule: Schedule) -> Self {
        Self { choice: Choice::Schedule(schedule), ..self }
    }

    /// The same with a change to the kernel before it runs: how a test plants a fault and sees whether it is
    /// found.
    #[doc(hidden)]
    pub fn with_edit(self, edit: impl Fn(&mut Module) + Send + Sync + 'static) -> Self {
        Self { edit: Some(Arc::new(edit)), ..self }
    }

    /// The same with kernels that stamp their sections, up to so many times per role of a block. A clock shows the
    /// instructions that a warp has executed, and at least the time of whatever it has waited for.
    #[doc(hidden)]
    pub fn with_trace(self, stamps: u32) -> Self {
        Self { trace: Some(stamps), ..self }
    }

    /// The stamps of the last run, clones' included.
    #[doc(hidden)]
    pub fn last_trace(&self) -> Vec<Track> {
        self.last_trace.lock().unwrap_or_else(PoisonError::into_inner).clone()
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

    /// What the simulator said of the last run, clones' included.
    pub fn last_report(&self) -> Option<Report> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn run(&self, call: &Call<'_>) -> Result<()> {
        let plan = self.plan(&call.problem)?;
        if plan.is_empty() {
            return Ok(());
        }
        let mut modules = Vec::new();
        for launch in &plan.launches {
            let mut module = self.module(launch, plan.target)?;
            if let Some(edit) = &self.edit {
                edit(Arc::make_mut(&mut module));
            }
            modules.push(module);
        }
        let mut memory = Memory { sim: Sim::new(self.config.clone()), buffers: Vec::new() };
        staging::run(&mut memory, call, |memory, bindings| self.launch(memory, &plan, &modules, bindings))
    }

    /// The kernel of a launch.
    fn module(&self, launch: &Launch, target: Target) -> Result<Arc<Module>> {
        let made = || self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (launch.schedule, launch.spec, target);
        if let Some(module) = made().get(&key) {
            return Ok(Arc::clone(module));
        }
        let module = Arc::new(launch.module(target)?);
        let mut all = made();
        if all.len() >= MOST_MADE {
            all.clear();
        }
        Ok(Arc::clone(all.entry(key).or_insert(module)))
    }

    /// Runs the launches one after the other, over the same memory.
    fn launch(
        &self,
        memory: &mut Memory,
        plan: &Plan,
        modules: &[Arc<Module>],
        bindings: &Bindings,
    ) -> Result<()> {
        let workspace = memory.reserve("workspace", plan.workspace_bytes())?;
        let trace = self.trace.map(|stamps| plan.trace_size(stamps));
        let traced = trace.map(|size| memory.upload("trace", &vec![u8::MAX; size.bytes()])).transpose()?;
        let bindings = &Bindings { workspace, trace: traced.zip(trace), ..*bindings };
        let params = plan.bind(bindings, &mut encode)?;
        for (index, (launch, module)) in plan.launches.iter().zip(modules).enumerate() {
            let dims = LaunchDims {
                grid: launch.grid,
                block: [launch.threads, 1, 1],
                cluster: (launch.cluster > 1).then_some([launch.cluster, 1, 1]),
                dynamic_shared: Some(launch.shared_bytes),
            };
            let (bytes, _) = params.launch(index);
            // What runs before the first launch is not known; the others run beside the one before them, if they may.
            let beside = index > 0 && plan.target == Target::Sm90a && launch.schedule.is_programmatic();
            let launching = if beside { Launching::Programmatic } else { Launching::StreamOrder };
            let report = memory.sim.launch_as(module, &module.kernels[0].name, dims, bytes, launching);
            let report = report.map_err(|error| Error::Device {
                device: "sim".into(),
                what: error.to_string(),
                source: Some(error.into()),
            })?;
            // What is said of a run is said of its main launch, unless another went wrong.
            if index == plan.main_index() || !report.is_clean() {
                *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(report.clone());
            }
            if let Some(first) = report.findings.first() {
                let more = report.findings.len() - 1;
                let rest = if more > 0 { format!("\n(and {more} more)") } else { String::new() };
                return Err(failed(&format!("{first}{rest}")));
            }
        }
        if let Some((address, size)) = bindings.trace {
            let mut bytes = vec![0; size.bytes()];
            memory.download(address, &mut bytes)?;
            *self.last_trace.lock().unwrap_or_else(PoisonError::into_inner) = size.read(&bytes);
        }
        for output in plan.problem.signature().outputs() {
            let (name, (address, _)) = (output.name, bindings.tensors[output.name]);
            let Some(buffer) = memory.find(address) else { continue };
            // Rows that belong to no packed sequence are left alone.
            let packed = match output.rows {
                Rows::Keys => plan.problem.keys != Keys::Dense,
                _ => plan.problem.queries != Queries::Dense,
            };
            if packed {
                continue;
            }
            if let Some(range) = memory.sim.unwritten(buffer).first() {
                return Err(failed(&format!("{name} was not written: bytes {range:?} of {}", buffer.len)));
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for SimGpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimGpu")
            .field("hardware", &self.hardware)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Display for SimGpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sim ({}, asynchronous effects {:?})", self.hardware.target, self.config.async_mode)
    }
}

/// The simulator's memory during one run.
struct Memory {
    sim: Sim,
    buffers: Vec<Buffer>,
}

impl Memory {
    fn find(&self, address: u64) -> Option<Buffer> {
        self.buffers.iter().copied().find(|buffer| buffer.address == address)
    }
}

/// Whether the simulator has room for a tensor of so many bytes.
fn check_room(name: &str, bytes: usize) -> Result<()> {
    if bytes > MOST_BUFFER_BYTES {
        return Err(failed(&format!(
            "{name} has {bytes} bytes, and the simulator takes tensors of up to {MOST_BUFFER_BYTES}; simulate a smaller \
             problem"
        )));
    }
    Ok(())
}

impl staging::Memory for Memory {
    fn upload(&mut self, name: &str, bytes: &[u8]) -> Result<u64> {
        check_room(name, bytes.len())?;
        let buffer = self.sim.alloc_from(name, bytes);
        self.buffers.push(buffer);
        Ok(buffer.address)
    }

    fn reserve(&mut self, name: &str, len: usize) -> Result<u64> {
        check_room(name, len)?;
        let buffer = self.sim.alloc(name, len);
        self.buffers.push(buffer);
        Ok(buffer.address)
    }

    fn download(&mut self, address: u64, out: &mut [u8]) -> Result<()> {
        let buffer = self.find(address).expect("staging downloads what it reserved");
        out.copy_from_slice(&self.sim.read(buffer)[..out.len()]);
        Ok(())
    }
}

/// A tensor map as the simulator reads it.
fn encode(map: &Map) -> Result<TensorMap> {
    let element = match map.dtype {
        ElementType::F16 => TensorElement::F16,
        ElementType::Bf16 => TensorElement::Bf16,
        ElementType::F32 => TensorElement::F32,
        ElementType::E4m3 => TensorElement::U8,
    };
    let described =
        flashcore_sim::TensorMap::new(element, map.address, &map.dims, &map.strides, &map.box_dims);
    described.swizzled(Swizzle::B128).encode().map(TensorMap).map_err(|what| failed(&what))
}

fn failed(what: &str) -> Error {
    Error::Device { device: "sim".into(), what: what.into(), source: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, Device, Tensor};

    /// A small call on a GPU that is simulated in this way.
    fn run(config: Config) -> Result<()> {
        let data = vec![half::f16::ONE; 64 * 64];
        let tensor = Tensor::new(&data, &[1, 1, 64, 64])?;
        let device = Device::sim(SimGpu::new(Target::Sm80).with_config(config));
        Attention::new().run(&device, &tensor, &tensor, &tensor).map(|_| ())
    }

    #[test]
    fn a_call_that_takes_too_long_or_is_stopped_is_an_error_that_says_so() {
        assert!(run(Config::default()).is_ok());
        let said = run(Config { budget: 3000, ..Config::default() }).unwrap_err().to_string();
        assert!(said.contains("did not end within 3000 warp instructions"), "{said}");
        let said = run(Config { budget: 3, ..Config::default() }).unwrap_err().to_string();
        assert!(said.contains("the limit is 3"), "{said}");
        let said = run(Config { stop: Stop::when(|| true), ..Config::default() }).unwrap_err().to_string();
        assert!(said.contains("stopped before its end"), "{said}");
    }
}
