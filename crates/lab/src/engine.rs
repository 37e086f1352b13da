//! Engines: whatever computes attention and can be put under test or on the clock.
//!
//! An [`Engine`] takes tensors on the host and leaves its result on the host, so that one adapter runs the corpus
//! through all of them.

use flashcore::{Attention, Device, Problem, Tensor, TensorMut, cpu};

/// Something that computes attention.
pub trait Engine: Send + Sync {
    /// The name in tables, in JSON and for `--device`.
    fn name(&self) -> &str;

    /// Whether it computes this problem, or why not.
    fn supports(&self, problem: &Problem) -> Result<(), String>;

    /// Whether two runs on the same inputs give the same bits.
    fn deterministic(&self) -> bool {
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
}

/// The CPU engine on one of its instruction sets.
#[derive(Clone, Debug)]
pub struct CpuEngine {
    name: String,
    device: Device,
}

impl CpuEngine {
    /// On a given instruction set with a given number of threads (0: all cores).
    pub fn new(isa: cpu::Isa, threads: usize) -> Result<Self, String> {
        let schedule = format!("threads={threads}").parse()?;
        let engine = cpu::Engine::new().with_isa(isa)?.with_schedule(schedule);
        Ok(Self { name: format!("cpu-{isa}"), device: Device::cpu_with(engine) })
    }

    /// Every instruction set that this CPU runs, the widest first.
    pub fn all() -> Vec<Self> {
        let engine = |isa| Self::new(isa, 0).expect("an available instruction set makes an engine");
        cpu::available().into_iter().rev().map(engine).collect()
    }

    /// The device that it runs on.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Engine for CpuEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn supports(&self, _: &Problem) -> Result<(), String> {
        Ok(())
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        attention.run_into(&self.device, q, k, v, o, lse)
    }
}

/// The CPU engine on the path that a name such as `cpu-portable` means.
pub fn cpu_path(name: &str) -> Result<cpu::Engine, String> {
    if let Some(isa) = name.strip_prefix("cpu-") {
        return cpu::Engine::new().with_isa(isa.parse()?);
    }
    let paths: Vec<String> = cpu::available().iter().map(|isa| format!("cpu-{isa}")).collect();
    Err(format!("'{name}' is not a device of this version; possible are cpu, {}", paths.join(", ")))
}

/// Every engine of this build that runs on this machine.
pub fn all() -> Vec<Box<dyn Engine>> {
    CpuEngine::all().into_iter().map(|engine| Box::new(engine) as Box<dyn Engine>).collect()
}

/// The engines that `--device` means: one by name, or all of a kind (`cpu`).
pub fn select(wish: &str) -> Result<Vec<Box<dyn Engine>>, String> {
    let mut engines = all();
    let names = engines.iter().map(|engine| engine.name()).collect::<Vec<_>>().join(", ");
    engines.retain(|engine| {
        engine.name() == wish || engine.name().strip_prefix(wish).is_some_and(|rest| rest.starts_with('-'))
    });
    if engines.is_empty() {
        return Err(format!("'{wish}' is not a device of this version; possible are cpu, {names}"));
    }
    Ok(engines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_means_every_instruction_set_and_a_name_means_one() {
        assert_eq!(select("cpu").unwrap().len(), cpu::available().len());
        assert_eq!(select("cpu-portable").unwrap().len(), 1);
        assert!(select("cpu-port").err().unwrap().contains("cpu-portable"));
        assert!(select("cuda").err().unwrap().contains("not a device of this version"));
    }
}
