//! Engines: whatever computes attention and can be put under test or on the clock.
//!
//! An [`Engine`] takes tensors on the host and leaves its result on the host, so that one adapter runs the corpus
//! through all of them.

use std::sync::{Arc, Mutex, PoisonError};

use flashcore::cuda::Cuda;
use flashcore::plan::{Kernel, Schedule, Target};
use flashcore::sim::{AsyncMode, Config, SimGpu};
use flashcore::{Append, Attention, Backward, Device, Error, Problem, Tensor, TensorMut, cpu};

use crate::device::{Code, DeviceName, Simulated};

/// Something that computes attention.
pub trait Engine: Send + Sync {
    /// The name in tables, in JSON and for `--device`.
    fn name(&self) -> &str;

    /// Whether it computes this problem, or why not.
    fn supports(&self, problem: &Problem) -> Result<(), String>;

    /// The option of `flashcore verify` that selects it.
    fn wish(&self) -> String {
        format!("--device {}", self.name())
    }

    /// Whether it gives lse where that is wanted; one that does not is judged by its output alone.
    fn gives_lse(&self) -> bool {
        true
    }

    /// Whether it takes sequences that are packed or in pages, or says itself which it does not.
    fn takes_sequences(&self) -> bool {
        false
    }

    /// Whether two runs on the same inputs give the same bits.
    fn deterministic(&self) -> bool {
        true
    }

    /// Whether a value that a query does not see never reaches it, even if it is NaN or infinite. An engine that
    /// multiplies whole tiles computes 0·NaN = NaN, in the value's own column.
    fn hides_values(&self) -> bool {
        true
    }

    /// Computes into o, and into lse where there is a place for it.
    fn run(
        &self,
        attention: &Attention<'_>,
        inputs: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()>;

    /// Whether it appends to caches.
    fn appends(&self) -> bool {
        false
    }

    /// Appends to the caches k and v, and computes into o, and into lse where there is a place for it.
    fn append(
        &self,
        _: &Attention<'_>,
        _: &Append<'_>,
        _: &Tensor<'_>,
        _: [&mut TensorMut<'_>; 2],
        _: (&mut TensorMut<'_>, Option<&mut TensorMut<'_>>),
    ) -> flashcore::Result<()> {
        let (what, possible) = ("an append".into(), "calls on what the cache has".into());
        Err(Error::Unsupported { device: self.name().into(), what, possible, source: None })
    }

    /// Whether it computes backward passes at all.
    fn differentiates(&self) -> bool {
        false
    }

    /// Computes the gradients of q, k and v.
    fn differentiate(
        &self,
        _: &Attention<'_>,
        _: &Backward<'_>,
        _: [&mut TensorMut<'_>; 3],
    ) -> flashcore::Result<()> {
        let (what, possible) = ("the backward pass".into(), "the forward pass".into());
        Err(Error::Unsupported { device: self.name().into(), what, possible, source: None })
    }
}

/// The most pairs of queries and keys that the simulator takes: about a second per run.
const MOST_PAIRS: u128 = 1_000_000;

/// The same for the scalar kernel, which executes some forty warp instructions per pair.
const MOST_SCALAR_PAIRS: u128 = 30_000;

/// The number of elements of a query and a value for which that holds; with more, a pair takes longer.
const SCALAR_ELEMENTS: usize = 256;

/// The same for the Hopper kernel, whose every block has a producer and wide tiles however small the problem is.
const MOST_HOPPER_PAIRS: u128 = 100_000;

/// Queries per block.
const TILE_OF_BLOCK: usize = 64;

/// The fixed cost of a block, in pairs.
const PAIRS_OF_BLOCK: u128 = 1000;

/// Multiprocessors of the simulated GPU.
const FEW_SMS: u32 = 3;

/// A device of the library, put under test or on the clock.
#[derive(Clone, Debug)]
pub struct DeviceEngine {
    name: String,
    device: Device,
    /// The most pairs of queries and keys that it takes; a simulator is not for large problems.
    most_pairs: u128,
    /// Whether values that a query does not see never reach it.
    hides_values: bool,
    /// Whether another engine computes everything in the same way but floats of 8 bits, and few queries that share many keys.
    as_on_ampere: bool,
    /// Held by the engine that runs on a GPU, so that a kernel that breaks the context is the one that is blamed.
    turn: Option<Arc<Mutex<()>>>,
}

impl DeviceEngine {
    /// The CPU on a given instruction set with a given number of threads (0: all cores).
    pub fn cpu(isa: cpu::Isa, threads: usize) -> Result<Self, String> {
        let said = |error: flashcore::Error| error.to_string();
        let schedule = format!("threads={threads}").parse().map_err(said)?;
        let engine = cpu::Engine::new().with_isa(isa).map_err(said)?.with_schedule(schedule);
        Ok(Self {
            name: DeviceName::Cpu(Some(isa)).to_string(),
            device: Device::cpu_with(engine),
            most_pairs: u128::MAX,
            hides_values: true,
            as_on_ampere: false,
            turn: None,
        })
    }

    /// The CPU on every instruction set that it has, the widest first.
    pub fn cpu_paths() -> Vec<Self> {
        let engine = |isa| Self::cpu(isa, 0).expect("an available instruction set makes an engine");
        cpu::available().into_iter().rev().map(engine).collect()
    }

    /// A GPU by number in every way that it can be used: the planner's choice, every kernel that it runs, and code for
    /// older targets.
    pub fn cudas(ordinal: u32) -> flashcore::Result<Vec<Self>> {
        let cuda = Cuda::new(ordinal)?;
        let turn = Arc::new(Mutex::new(()));
        let engine = |code: Option<Code>, cuda: Cuda| Self {
            name: DeviceName::Cuda(Some(ordinal), code).to_string(),
            device: Device::cuda_with(cuda),
            most_pairs: u128::MAX,
            hides_values: false,
            as_on_ampere: false,
            turn: Some(turn.clone()),
        };
        let own = cuda.hardware().target;
        let kernels = every_kernel().filter(|kernel| kernel.runs_on(own));
        let kernels = kernels.map(|kernel| Self {
            hides_values: hides_values(kernel),
            ..engine(Some(Code::Kernel(kernel)), cuda.with_kernel(kernel))
        });
        let older = [Target::Sm80, Target::Sm89].into_iter().filter(|&target| target != own);
        let older = older.filter(|&target| target == Target::Sm80 || own == Target::Sm90a);
        let older = older.map(|target| engine(Some(Code::Target(target)), cuda.with_target(target)));
        Ok([engine(None, cuda.clone())].into_iter().chain(kernels).chain(older).collect())
    }

    /// A kernel on the simulated GPU, with asynchronous effects as late or as early as they may come.
    pub fn sim(kernel: Kernel, mode: AsyncMode) -> Self {
        let config = Config { async_mode: mode, ..Config::default() };
        let target = simulated_target(kernel);
        // With few multiprocessors, persistent blocks have several tiles each.
        let gpu = SimGpu::new(target).with_sms(FEW_SMS).with_kernel(kernel).with_config(config);
        let most_pairs = match kernel {
            Kernel::Scalar => MOST_SCALAR_PAIRS,
            Kernel::Sm90Fwd | Kernel::Sm90Bwd | Kernel::Sm90BwdFinish | Kernel::Sm90BwdWide => {
                MOST_HOPPER_PAIRS
            }
            Kernel::Sm80Mma
            | Kernel::Sm80Fwd
            | Kernel::Combine
            | Kernel::BwdRows
            | Kernel::Sm80Bwd
            | Kernel::Sm80Decode
            | Kernel::Quantize
            | Kernel::Append => MOST_PAIRS,
        };
        Self {
            name: DeviceName::Sim(Some(Simulated::Kernel(kernel, mode))).to_string(),
            device: Device::sim(gpu),
            most_pairs,
            hides_values: hides_values(kernel),
            as_on_ampere: false,
            turn: None,
        }
    }

    /// The simulated Hopper GPU with the planner's own choice, which for the sizes that a simulator takes is mostly a
    /// schedule for small grids.
    pub fn sim_hopper() -> Self {
        let device = Device::sim(SimGpu::new(Target::Sm90a));
        Self {
            name: DeviceName::Sim(Some(Simulated::Hopper)).to_string(),
            device,
            most_pairs: MOST_HOPPER_PAIRS,
            hides_values: false,
            as_on_ampere: false,
            turn: None,
        }
    }

    /// The simulated Ada GPU with the planner's own choice for floats of 8 bits, which Ampere has not, and for few queries that
    /// share many keys.
    pub fn sim_ada() -> Self {
        Self {
            name: DeviceName::Sim(Some(Simulated::Ada)).to_string(),
            device: Device::sim(SimGpu::new(Target::Sm89)),
            as_on_ampere: true,
            ..Self::sim(Kernel::Sm80Fwd, AsyncMode::Late)
        }
    }

    /// Every kernel on the simulated GPU, in both asynchronous modes where it has anything asynchronous.
    pub fn sims() -> Vec<Self> {
        let late = every_kernel().map(|kernel| Self::sim(kernel, AsyncMode::Late));
        let asynchronous =
            [Kernel::Sm80Fwd, Kernel::Sm80Decode, Kernel::Sm90Fwd].into_iter().chain(Kernel::BACKWARD);
        let early = asynchronous.map(|kernel| Self::sim(kernel, AsyncMode::Early));
        late.chain(early).chain([Self::sim_hopper(), Self::sim_ada()]).collect()
    }

    /// Any device under a name, for problems of any size.
    pub fn of(name: &str, device: Device) -> Self {
        Self {
            name: name.into(),
            device,
            most_pairs: u128::MAX,
            hides_values: false,
            as_on_ampere: false,
            turn: None,
        }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Engine for DeviceEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn supports(&self, problem: &Problem) -> Result<(), String> {
        let heads = (problem.batch * problem.heads_q) as u128;
        let pairs = problem.mask.pairs(problem.len_q, problem.len_k) * heads;
        // A block has a fixed cost, however little work it has.
        let blocks = problem.len_q.div_ceil(TILE_OF_BLOCK) as u128 * heads;
        let kernel = self.device.plan(problem).and_then(Result::ok).map(|plan| plan.kernel());
        if self.as_on_ampere && !problem.is_eight_bit() && kernel != Some(Kernel::Sm80Decode) {
            return Err("others than f8, and few queries with many keys, are computed by sim-sm80_fwd".into());
        }
        let scalar = kernel == Some(Kernel::Scalar);
        let (pairs, most) = if scalar && self.most_pairs != u128::MAX {
            let wide = (problem.head_dim + problem.head_dim_v).div_ceil(SCALAR_ELEMENTS);
            (pairs * wide as u128, self.most_pairs.min(MOST_SCALAR_PAIRS))
        } else {
            (pairs, self.most_pairs)
        };
        if pairs.max(blocks * PAIRS_OF_BLOCK) > most {
            return Err(format!(
                "more than {most} pairs of queries and keys, or {} blocks, would take long to simulate",
                most / PAIRS_OF_BLOCK
            ));
        }
        self.device.supports(problem).map_err(|error| error.to_string())
    }

    fn hides_values(&self) -> bool {
        self.hides_values
    }

    fn takes_sequences(&self) -> bool {
        true
    }

    fn appends(&self) -> bool {
        true
    }

    fn append(
        &self,
        attention: &Attention<'_>,
        new: &Append<'_>,
        q: &Tensor<'_>,
        [k, v]: [&mut TensorMut<'_>; 2],
        (o, lse): (&mut TensorMut<'_>, Option<&mut TensorMut<'_>>),
    ) -> flashcore::Result<()> {
        let _turn = self.turn.as_ref().map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
        attention.append_into(&self.device, new, q, k, v, o, lse)
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let _turn = self.turn.as_ref().map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
        attention.run_into(&self.device, q, k, v, o, lse)
    }

    fn differentiates(&self) -> bool {
        true
    }

    fn differentiate(
        &self,
        attention: &Attention<'_>,
        given: &Backward<'_>,
        [dq, dk, dv]: [&mut TensorMut<'_>; 3],
    ) -> flashcore::Result<()> {
        let _turn = self.turn.as_ref().map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
        attention.backward_into(&self.device, given, dq, dk, dv)
    }
}

fn boxed(engines: impl IntoIterator<Item = DeviceEngine>) -> Vec<Box<dyn Engine>> {
    engines.into_iter().map(|engine| Box::new(engine) as Box<dyn Engine>).collect()
}

/// Every engine that is real: the paths of the CPU, and the first GPU's where there is one.
fn real() -> Vec<DeviceEngine> {
    DeviceEngine::cpu_paths().into_iter().chain(DeviceEngine::cudas(0).unwrap_or_default()).collect()
}

/// Every engine of this build that runs on this machine, the simulated ones last.
pub fn all() -> Vec<Box<dyn Engine>> {
    boxed(real().into_iter().chain(DeviceEngine::sims()))
}

/// The engines that a name selects: one by its own name, or all of a kind. A GPU is opened only where one is selected.
pub fn select(wish: DeviceName) -> Result<Vec<Box<dyn Engine>>, String> {
    let cudas = |ordinal| DeviceEngine::cudas(ordinal).map_err(|error| error.to_string());
    Ok(match wish {
        DeviceName::All => boxed(real()),
        DeviceName::Auto => {
            let cpu = DeviceName::Cpu(Some(cpu::Engine::new().isa()));
            return select(wish.gpu().map_or(cpu, |ordinal| DeviceName::Cuda(Some(ordinal), None)));
        }
        DeviceName::Cpu(None) => boxed(DeviceEngine::cpu_paths()),
        DeviceName::Cpu(Some(isa)) => boxed([DeviceEngine::cpu(isa, 0)?]),
        DeviceName::Cuda(None, _) => boxed(cudas(0)?),
        DeviceName::Cuda(Some(ordinal), _) => {
            let name = wish.to_string();
            let found = cudas(ordinal)?.into_iter().find(|engine| engine.name() == name);
            boxed([found.ok_or_else(|| format!("that GPU does not run {name}"))?])
        }
        DeviceName::Sim(None) => boxed(DeviceEngine::sims()),
        DeviceName::Sim(Some(Simulated::Hopper)) => boxed([DeviceEngine::sim_hopper()]),
        DeviceName::Sim(Some(Simulated::Ada)) => boxed([DeviceEngine::sim_ada()]),
        DeviceName::Sim(Some(Simulated::Kernel(kernel, mode))) => boxed([DeviceEngine::sim(kernel, mode)]),
    })
}

/// One schedule on a kind of device: `cuda` means the first GPU, `sim` the simulated one in both asynchronous modes.
pub fn with_schedule(wish: DeviceName, schedule: &str) -> Result<Vec<Box<dyn Engine>>, String> {
    let schedule: Schedule = schedule.parse().map_err(|error| format!("--schedule {schedule}: {error}"))?;
    let engines = match wish {
        DeviceName::Cuda(ordinal, None) => {
            let ordinal = ordinal.unwrap_or(0);
            let cuda = Cuda::new(ordinal).map_err(|error| error.to_string())?.with_schedule(schedule);
            vec![DeviceEngine::of(&format!("cuda-{ordinal}-schedule"), Device::cuda_with(cuda))]
        }
        DeviceName::Sim(None) => {
            let engine = |(name, mode): (&str, AsyncMode)| {
                let kernel = schedule.kernel();
                let config = Config { async_mode: mode, ..Config::default() };
                let gpu = SimGpu::new(simulated_target(kernel)).with_sms(FEW_SMS);
                let device = Device::sim(gpu.with_schedule(schedule).with_config(config));
                DeviceEngine { name: name.into(), device, ..DeviceEngine::sim(kernel, mode) }
            };
            [("sim-schedule", AsyncMode::Late), ("sim-schedule-early", AsyncMode::Early)].map(engine).into()
        }
        _ => return Err(format!("--schedule is for --device cuda or sim, not {wish}")),
    };
    Ok(boxed(engines))
}

/// The kernels that stand for a whole pass.
fn every_kernel() -> impl Iterator<Item = Kernel> {
    Kernel::LADDER.into_iter().chain([Kernel::Sm80Decode]).chain(Kernel::BACKWARD)
}

/// Whether a kernel reads only the values that its queries see, rather than whole tiles.
const fn hides_values(kernel: Kernel) -> bool {
    matches!(kernel, Kernel::Scalar)
}

/// The oldest target that a kernel is simulated for.
fn simulated_target(kernel: Kernel) -> Target {
    if kernel.runs_on(Target::Sm80) { Target::Sm80 } else { Target::Sm90a }
}

/// The device that a name selects.
pub fn device(wish: DeviceName) -> Result<Device, String> {
    let cuda = |ordinal| Cuda::new(ordinal).map_err(|error| error.to_string());
    Ok(match wish {
        DeviceName::Auto => Device::best(),
        DeviceName::All => return Err("all is many devices; one is needed here, such as auto".into()),
        DeviceName::Cpu(None) => Device::cpu(),
        DeviceName::Cpu(Some(isa)) => {
            Device::cpu_with(cpu::Engine::new().with_isa(isa).map_err(|error| error.to_string())?)
        }
        DeviceName::Cuda(ordinal, code) => {
            let cuda = cuda(ordinal.unwrap_or(0))?;
            Device::cuda_with(match code {
                None => cuda,
                Some(Code::Kernel(kernel)) => cuda.with_kernel(kernel),
                Some(Code::Target(target)) => cuda.with_target(target),
            })
        }
        DeviceName::Sim(None) => Device::sim(SimGpu::new(Target::Sm80)),
        DeviceName::Sim(Some(Simulated::Hopper)) => Device::sim(SimGpu::new(Target::Sm90a)),
        DeviceName::Sim(Some(Simulated::Ada)) => Device::sim(SimGpu::new(Target::Sm89)),
        DeviceName::Sim(Some(Simulated::Kernel(kernel, mode))) => {
            let config = Config { async_mode: mode, ..Config::default() };
            Device::sim(SimGpu::new(simulated_target(kernel)).with_kernel(kernel).with_config(config))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> DeviceName {
        text.parse().unwrap()
    }

    #[test]
    fn cpu_means_every_instruction_set_and_a_name_means_one() {
        assert_eq!(select(name("cpu")).unwrap().len(), cpu::available().len());
        assert!(select(name("all")).unwrap().len() >= cpu::available().len());
        assert_eq!(select(name("cpu-portable")).unwrap().len(), 1);
        for engine in all() {
            let [one] = &select(name(engine.name())).unwrap()[..] else { panic!("{}", engine.name()) };
            assert_eq!(one.name(), engine.name());
        }
    }

    #[test]
    fn a_schedule_is_put_under_test_in_both_modes_and_only_where_schedules_run() {
        let text = "sm80_fwd:block_m=64,block_n=32,warps=4,stages=2,q_in_regs=1,order=head";
        let engines = with_schedule(name("sim"), text).unwrap();
        assert_eq!(
            engines.iter().map(|it| it.name()).collect::<Vec<_>>(),
            ["sim-schedule", "sim-schedule-early"]
        );
        assert!(with_schedule(name("cpu"), text).err().unwrap().contains("not cpu"));
        assert!(with_schedule(name("sim"), "sm80_fwd:block_m=64").err().unwrap().contains("--schedule"));
    }

    #[test]
    fn a_device_is_found_by_its_name_and_simulates_a_gpu_that_its_kernel_runs_on() {
        assert!(device(name("cpu")).unwrap().to_string().starts_with("cpu ("));
        assert!(device(name("cpu-portable")).unwrap().to_string().starts_with("cpu (portable"));
        let problem = Problem::new(1, 1, 64, 64, flashcore::DType::F16);
        for kernel in Kernel::LADDER {
            let device = device(name(&format!("sim-{kernel}"))).unwrap();
            assert_eq!(device.supports(&problem), Ok(()), "{kernel}");
        }
    }
}
