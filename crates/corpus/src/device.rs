//! The names of devices: what `--device` takes, in every command.

use std::fmt;
use std::str::FromStr;

use flashcore::cpu::{self, Isa};
use flashcore::cuda::driver::Driver;
use flashcore::plan::{Kernel, Target};
use flashcore::sim::AsyncMode;

/// A device by its name.
///
/// ```
/// use flashcore_corpus::device::DeviceName;
/// assert_eq!("cuda-1".parse(), Ok(DeviceName::Cuda(Some(1), None)));
/// assert_eq!(DeviceName::Cuda(Some(1), None).to_string(), "cuda-1");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// `auto`: the first GPU where there is one, else the CPU.
    Auto,
    /// `all` real ones.
    All,
    /// `cpu`, or one of its paths, such as `cpu-portable`.
    Cpu(Option<Isa>),
    /// `cuda`, a GPU by number, such as `cuda-0`, or one kind of code on it, such as `cuda-0-sm80_fwd`.
    Cuda(Option<u32>, Option<Code>),
    /// `sim`, or one kernel in the simulator, such as `sim-sm80_fwd`.
    Sim(Option<Simulated>),
}

/// What runs on a GPU in place of the planner's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// One kernel.
    Kernel(Kernel),
    /// Code for an older target.
    Target(Target),
}

/// What runs in the simulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Simulated {
    /// `sim-hopper`: the planner's choice on Hopper.
    Hopper,
    /// `sim-ada`: the planner's choice on Ada, for floats of 8 bits, and for few queries with many keys. For others it is
    /// Ampere's kernel.
    Ada,
    /// One kernel, with asynchronous effects as late as they may come, or `-early`, or at moments drawn by a seed
    /// (`-random7`).
    Kernel(Kernel, AsyncMode),
}

impl DeviceName {
    /// The number of the GPU; `auto` means the first where there is one. Absent where no GPU is meant.
    pub fn gpu(self) -> Option<u32> {
        let is_there = || Driver::load().and_then(Driver::device_count).is_ok_and(|count| count > 0);
        match self {
            DeviceName::Cuda(ordinal, None) => Some(ordinal.unwrap_or(0)),
            DeviceName::Auto if is_there() => Some(0),
            _ => None,
        }
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split('-').collect();
        let found = match parts[..] {
            ["auto"] => Some(DeviceName::Auto),
            ["all"] => Some(DeviceName::All),
            ["cpu"] => Some(DeviceName::Cpu(None)),
            ["cpu", isa] => {
                let isa = isa.parse().map_err(|error: flashcore::Error| error.to_string())?;
                Some(DeviceName::Cpu(Some(isa)))
            }
            ["cuda"] => Some(DeviceName::Cuda(None, None)),
            ["cuda", ordinal] => ordinal.parse().ok().map(|ordinal| DeviceName::Cuda(Some(ordinal), None)),
            ["cuda", ordinal, code] => ordinal
                .parse()
                .ok()
                .zip(self::code(code))
                .map(|(ordinal, code)| DeviceName::Cuda(Some(ordinal), Some(code))),
            ["sim"] => Some(DeviceName::Sim(None)),
            ["sim", "hopper"] => Some(DeviceName::Sim(Some(Simulated::Hopper))),
            ["sim", "ada"] => Some(DeviceName::Sim(Some(Simulated::Ada))),
            ["sim", kernel] => simulated(kernel, ""),
            ["sim", kernel, mode] => simulated(kernel, mode),
            _ => None,
        };
        found.ok_or_else(|| {
            let paths: Vec<String> = cpu::available().iter().map(|isa| format!("cpu-{isa}")).collect();
            let kernels = Kernel::LADDER.iter().chain(&[Kernel::Sm80Decode]).chain(&Kernel::BACKWARD);
            let kernels: Vec<String> = kernels.map(|kernel| format!("sim-{kernel}")).collect();
            format!(
                "'{text}' is not a device; possible are auto, all, cpu, {}, cuda, cuda-N for GPU number N, sim, {}",
                paths.join(", "),
                kernels.join(", ")
            )
        })
    }
}

fn code(text: &str) -> Option<Code> {
    Target::from_name(text).map(Code::Target).or_else(|| text.parse().ok().map(Code::Kernel))
}

fn simulated(kernel: &str, mode: &str) -> Option<DeviceName> {
    let mode = match mode {
        "" => AsyncMode::Late,
        "early" => AsyncMode::Early,
        _ => AsyncMode::Random(mode.strip_prefix("random")?.parse().ok()?),
    };
    Some(DeviceName::Sim(Some(Simulated::Kernel(kernel.parse().ok()?, mode))))
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Auto => f.write_str("auto"),
            DeviceName::All => f.write_str("all"),
            DeviceName::Cpu(None) => f.write_str("cpu"),
            DeviceName::Cpu(Some(isa)) => write!(f, "cpu-{isa}"),
            DeviceName::Cuda(ordinal, code) => {
                f.write_str("cuda")?;
                if let Some(ordinal) = ordinal {
                    write!(f, "-{ordinal}")?;
                }
                match code {
                    Some(Code::Kernel(kernel)) => write!(f, "-{kernel}"),
                    Some(Code::Target(target)) => write!(f, "-{target}"),
                    None => Ok(()),
                }
            }
            DeviceName::Sim(None) => f.write_str("sim"),
            DeviceName::Sim(Some(Simulated::Hopper)) => f.write_str("sim-hopper"),
            DeviceName::Sim(Some(Simulated::Ada)) => f.write_str("sim-ada"),
            DeviceName::Sim(Some(Simulated::Kernel(kernel, mode))) => match mode {
                AsyncMode::Late => write!(f, "sim-{kernel}"),
                AsyncMode::Early => write!(f, "sim-{kernel}-early"),
                AsyncMode::Random(seed) => write!(f, "sim-{kernel}-random{seed}"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_reads_back_as_it_is_written() {
        for name in [
            "auto",
            "all",
            "cpu",
            "cpu-portable",
            "cuda",
            "cuda-3",
            "cuda-0-sm80_fwd",
            "cuda-0-sm_80",
            "sim",
            "sim-hopper",
            "sim-ada",
            "sim-sm90_fwd",
            "sim-sm80_fwd-early",
            "sim-scalar-random7",
        ] {
            assert_eq!(name.parse::<DeviceName>().map(|it| it.to_string()), Ok(name.into()));
        }
    }

    #[test]
    fn what_is_no_device_is_answered_with_those_that_are() {
        for wish in ["gpu", "tpu", "cuda-x", "auto-1", "", "cuda-0-sm70", "sim-sm70", "cpu-sse9"] {
            let why = wish.parse::<DeviceName>().unwrap_err();
            assert!(why.contains("portable"), "{wish}: {why}");
        }
    }

    #[test]
    fn only_auto_looks_for_a_gpu() {
        let gpu = |name: &str| name.parse::<DeviceName>().unwrap().gpu();
        assert_eq!((gpu("cuda"), gpu("cuda-2"), gpu("cpu"), gpu("sim")), (Some(0), Some(2), None, None));
    }
}
