//! Where a call runs.

#[cfg(feature = "sim")]
use crate::sim::SimGpu;
use crate::{Problem, Result, contract::Call, cpu, tensor::Place};
#[cfg(feature = "cuda")]
use crate::{
    cuda::Cuda,
    plan::{Kernel, Plan},
};

/// Where a call runs.
///
/// ```
/// use flashcore::Device;
/// println!("{}", Device::best());
/// ```
#[derive(Clone, Debug)]
pub struct Device {
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Cpu(cpu::Engine),
    #[cfg(feature = "cuda")]
    Cuda(Cuda),
    /// The GPU, and the CPU for host tensors that tensor cores do not take.
    #[cfg(feature = "cuda")]
    Best(Cuda, cpu::Engine),
    #[cfg(feature = "sim")]
    Sim(SimGpu),
}

impl Device {
    /// The fastest device of this machine: the first GPU where there is one, else the CPU. Host tensors that tensor
    /// cores do not take (f32, say) run on the CPU.
    pub fn best() -> Self {
        #[cfg(feature = "cuda")]
        if let Ok(cuda) = Cuda::new(0) {
            return Self { kind: Kind::Best(cuda, cpu::Engine::new()) };
        }
        Self::cpu()
    }

    /// The CPU, with the widest instructions that it has.
    pub fn cpu() -> Self {
        Self { kind: Kind::Cpu(cpu::Engine::new()) }
    }

    /// The CPU, with an engine set up by hand.
    pub fn cpu_with(engine: cpu::Engine) -> Self {
        Self { kind: Kind::Cpu(engine) }
    }

    /// The GPU of this number, or why it cannot be used.
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: u32) -> Result<Self> {
        Cuda::new(ordinal).map(Self::cuda_with)
    }

    /// A GPU set up by hand.
    #[cfg(feature = "cuda")]
    pub fn cuda_with(cuda: Cuda) -> Self {
        Self { kind: Kind::Cuda(cuda) }
    }

    /// A simulated GPU.
    #[cfg(feature = "sim")]
    pub fn sim(gpu: SimGpu) -> Self {
        Self { kind: Kind::Sim(gpu) }
    }

    /// The plan for a problem; none on the CPU, which has no kernels to choose from.
    #[cfg(feature = "cuda")]
    pub fn plan(&self, problem: &Problem) -> Option<Result<Plan>> {
        match &self.kind {
            Kind::Cpu(_) => None,
            Kind::Cuda(cuda) | Kind::Best(cuda, _) => Some(cuda.plan(problem)),
            #[cfg(feature = "sim")]
            Kind::Sim(gpu) => Some(gpu.plan(problem)),
        }
    }

    /// Whether the device takes a problem, and if not, why.
    pub fn supports(&self, problem: &Problem) -> Result<()> {
        match &self.kind {
            Kind::Cpu(_) => problem.check().map(|_| ()),
            #[cfg(feature = "cuda")]
            Kind::Best(..) => problem.check().map(|_| ()),
            #[cfg(feature = "cuda")]
            Kind::Cuda(cuda) => cuda.plan(&problem.check()?).map(|_| ()),
            #[cfg(feature = "sim")]
            Kind::Sim(gpu) => gpu.plan(&problem.check()?).map(|_| ()),
        }
    }

    /// Whether tensors that lie there can be computed on. Every device takes host tensors; a GPU copies them in
    /// and out, which costs more than the attention itself.
    pub(crate) fn takes(&self, place: Place) -> bool {
        match (&self.kind, place) {
            (_, Place::Host) => true,
            (Kind::Cpu(_), Place::Cuda(_)) => false,
            #[cfg(feature = "cuda")]
            (Kind::Cuda(cuda) | Kind::Best(cuda, _), Place::Cuda(ordinal)) => cuda.ordinal() == ordinal,
            #[cfg(feature = "sim")]
            (Kind::Sim(_), Place::Cuda(_)) => false,
        }
    }

    /// Checks where a call's sequences are, if that is known to a GPU alone.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables, clippy::unnecessary_wraps))] // Other devices' are on the host.
    pub(crate) fn check_places(&self, call: &Call<'_>) -> Result<()> {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(cuda) | Kind::Best(cuda, _) if call.place() != Place::Host => cuda.check_places(call),
            _ => Ok(()),
        }
    }

    pub(crate) fn run(&self, call: &Call<'_>) -> Result<()> {
        match &self.kind {
            Kind::Cpu(engine) => engine.run(call),
            #[cfg(feature = "cuda")]
            Kind::Cuda(cuda) => cuda.run(call),
            #[cfg(feature = "sim")]
            Kind::Sim(gpu) => gpu.run(call),
            #[cfg(feature = "cuda")]
            Kind::Best(cuda, engine) => {
                let on_cpu = call.place() == Place::Host
                    && !cuda.plan(&call.problem).is_ok_and(|plan| plan.kernel() != Kernel::Scalar);
                if on_cpu { engine.run(call) } else { cuda.run(call) }
            }
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.kind {
            Kind::Cpu(engine) => write!(f, "cpu ({engine})"),
            #[cfg(feature = "cuda")]
            Kind::Cuda(cuda) | Kind::Best(cuda, _) => cuda.fmt(f),
            #[cfg(feature = "sim")]
            Kind::Sim(gpu) => gpu.fmt(f),
        }
    }
}
