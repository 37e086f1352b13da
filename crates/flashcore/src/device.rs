//! Where a call runs.

use crate::{Result, contract::Call, cpu, tensor::Place};

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
}

impl Device {
    /// The fastest device of this machine.
    pub fn best() -> Self {
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

    /// Where tensors for this device must be.
    pub fn place(&self) -> Place {
        match self.kind {
            Kind::Cpu(_) => Place::Host,
        }
    }

    #[allow(clippy::unnecessary_wraps)] // A device beside the CPU can fail.
    pub(crate) fn run(&self, call: &Call<'_>) -> Result<()> {
        match &self.kind {
            Kind::Cpu(engine) => {
                engine.run(call);
                Ok(())
            }
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.kind {
            Kind::Cpu(engine) => write!(f, "cpu ({engine})"),
        }
    }
}
