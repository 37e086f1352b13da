//! A kernel as PTX text under test, in the simulator or on a GPU: the text, and a TOML file that says how it is launched
//! and what it computes.
//!
//! ```toml
//! entry = "attention"                        # the kernel's name in the PTX
//! grid = ["len_q/64", "heads_q", "batch"]    # numbers, or products of sizes; / divides and rounds up
//! block = [128, 1, 1]
//! shared = 0                                 # bytes of dynamic shared memory
//! parameters = ["q", "k", "v", "o", "len_q", "len_k", "scale"]
//!
//! [computes]                                 # other problems are skipped
//! dtype = ["f16"]
//! head_dim = [64]
//! mask = ["full", "causal"]
//! ```
//!
//! Tensors are contiguous, as (batch, heads, length, head_dim). On a GPU they lie between guard zones that must stay as
//! they were; the simulator finds accesses out of bounds by itself, with races and values that nobody wrote, but reads
//! only what [`flashcore_ptx::read`] does. There the warp instructions of a launch are limited, so that an endless one
//! is a fault like any other.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use flashcore::cuda::Cuda;
use flashcore::cuda::driver::{self, JitOptions, LaunchConfig, ParamBuffer};
use flashcore::{Attention, DType, Mask, Problem, Tensor, TensorMut};
use flashcore_ptx::{Module, read as ptx_text};
use flashcore_sim::{Buffer, Config, FindingKind, LaunchDims, Sim, SimError, Stop};
use serde::Deserialize;

use super::failed;
use crate::device::DeviceName;
use crate::engine::Engine;
use crate::faults::planted::write;
use crate::files;
use crate::guarded::{Arrangement, Guarded};
use crate::interrupt;

/// Bytes before and after each tensor on the GPU.
const GUARD: usize = 4096;

/// What guard zones hold: a NaN in every dtype.
const GUARD_BYTE: u8 = 0x7f;

/// How a kernel is launched, and what it computes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Launch {
    /// The kernel's name in the PTX.
    pub entry: String,
    /// Blocks in x, y and z.
    pub grid: [Size; 3],
    /// Threads per block in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    #[serde(default)]
    pub shared: u32,
    /// The kernel's parameters in order, by name.
    pub parameters: Vec<String>,
    /// What it computes.
    pub computes: Computes,
}

/// The problems that a kernel computes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Computes {
    /// Dtypes.
    pub dtype: Vec<String>,
    /// Head dims, of values too.
    pub head_dim: Vec<usize>,
    /// Masks.
    pub mask: Vec<String>,
    /// Whether keys may have fewer heads than queries.
    #[serde(default)]
    pub grouped_heads: bool,
    /// Whether there may be another number of keys than of queries.
    #[serde(default)]
    pub other_lengths: bool,
}

/// A number, or a product of sizes that may be divided, rounding up.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Size {
    /// A number.
    Number(u32),
    /// Such as `batch*heads_q` or `len_q/64`.
    Text(String),
}

impl Size {
    fn of(&self, problem: &Problem) -> Result<u32, String> {
        let text = match self {
            Size::Number(number) => return Ok(*number),
            Size::Text(text) => text,
        };
        let mut parts = text.split('/');
        let product = |text: &str| -> Result<usize, String> {
            text.split('*').try_fold(1_usize, |product, factor| {
                let factor = size(factor.trim(), problem)?;
                product.checked_mul(factor).ok_or_else(|| format!("'{text}' is too large"))
            })
        };
        let whole = product(parts.next().unwrap_or_default())?;
        let result = parts.try_fold(whole, |whole, part| match product(part)? {
            0 => Err(format!("'{text}' divides by 0")),
            part => Ok(whole.div_ceil(part)),
        })?;
        u32::try_from(result).map_err(|_| format!("'{text}' is {result}, which is too large"))
    }
}

/// A size of a problem by its name, or a number.
fn size(name: &str, problem: &Problem) -> Result<usize, String> {
    Ok(match name {
        "batch" => problem.batch,
        "heads_q" => problem.heads_q,
        "heads_kv" => problem.heads_kv,
        "len_q" => problem.len_q,
        "len_k" => problem.len_k,
        "head_dim" => problem.head_dim,
        "head_dim_v" => problem.head_dim_v,
        "group" => problem.group(),
        number => number.parse().map_err(|_| {
            format!(
                "'{number}' is not a size; possible are numbers, batch, heads_q, heads_kv, len_q, len_k, head_dim, \
                 head_dim_v and group"
            )
        })?,
    })
}

/// What a parameter is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Parameter {
    /// The address of a tensor: q, k, v, o or lse.
    Address(usize),
    U32(u32),
    F32(f32),
}

/// The tensors whose addresses can be parameters.
const TENSORS: [&str; 5] = ["q", "k", "v", "o", "lse"];

fn parameter(name: &str, problem: &Problem) -> Result<Parameter, String> {
    if let Some(tensor) = TENSORS.iter().position(|known| *known == name) {
        return Ok(Parameter::Address(tensor));
    }
    Ok(match name {
        "scale" => Parameter::F32(problem.scale),
        "scale_log2" => Parameter::F32(problem.scale * std::f32::consts::LOG2_E),
        "causal" => Parameter::U32(u32::from(problem.mask != flashcore::Mask::None)),
        name => {
            let number = size(name, problem).map_err(|why| {
                format!("{why}; and as parameters also {}, scale, scale_log2 and causal", TENSORS.join(", "))
            })?;
            Parameter::U32(u32::try_from(number).map_err(|_| format!("{name} is too large"))?)
        }
    })
}

impl Launch {
    /// Reads and checks a description.
    pub fn parse(text: &str) -> Result<Self, String> {
        let launch: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        let problem = Problem::new(1, 1, 1, 8, DType::F16);
        for name in &launch.parameters {
            parameter(name, &problem)?;
        }
        launch.grid.iter().try_for_each(|size| size.of(&problem).map(|_| ()))?;
        let say = |error: flashcore::Error| error.to_string();
        launch.computes.dtype.iter().try_for_each(|dtype| dtype.parse::<DType>().map(|_| ())).map_err(say)?;
        launch.computes.mask.iter().try_for_each(|mask| mask.parse::<Mask>().map(|_| ())).map_err(say)?;
        Ok(launch)
    }

    /// Whether the kernel computes a problem, or why not.
    fn supports(&self, problem: &Problem) -> Result<(), String> {
        let computes = &self.computes;
        let masks = computes.mask.iter().filter_map(|mask| mask.parse::<Mask>().ok());
        let no = |what: &str| Err(format!("the description does not say that it computes {what}"));
        match problem {
            _ if !computes.dtype.iter().any(|dtype| dtype == problem.dtype.name()) => {
                no(problem.dtype.name())
            }
            _ if !computes.head_dim.contains(&problem.head_dim) || problem.head_dim != problem.head_dim_v => {
                no("this head dim")
            }
            _ if !masks.into_iter().any(|mask| mask == problem.mask) => no("this mask"),
            _ if problem.group() > 1 && !computes.grouped_heads => no("grouped heads"),
            _ if problem.len_q != problem.len_k && !computes.other_lengths => no("other lengths of keys"),
            _ if problem.softcap.is_some() || problem.key_lengths => no("softcap or key lengths"),
            _ if problem.batch * problem.heads_q * problem.len_q * problem.len_k == 0 => no("nothing"),
            _ => Ok(()),
        }
    }
}

/// Where a kernel runs.
enum Place {
    Gpu(Box<Gpu>),
    Sim(Box<Module>),
}

struct Gpu {
    cuda: Cuda,
    function: driver::Function,
    /// Only one kernel runs at a time, so that the one that breaks the context is the one that is blamed.
    turn: Mutex<()>,
}

/// A kernel from a file.
pub struct PtxEngine {
    name: &'static str,
    place: Place,
    launch: Launch,
    /// Warp instructions that a launch may execute in the simulator.
    limit: u64,
    wish: String,
}

/// Warp instructions that a launch may execute in the simulator unless `--limit` says otherwise: some seconds' worth,
/// and a hundred times what a plain kernel needs for the largest problem that is simulated.
pub const LIMIT: u64 = 100_000_000;

/// The most pairs of queries and keys that a kernel is simulated for.
const MOST_PAIRS: u128 = 30_000;

fn read(path: &Path) -> Result<String, String> {
    files::read_text(path)
}

impl PtxEngine {
    /// The kernel of a file on each requested device: `sim`, `cuda`, or `all` for the simulator and a GPU where there
    /// is one.
    ///
    /// `limit` is the number of warp instructions that a launch may execute in the simulator.
    pub fn select(
        ptx: &Path,
        description: &Path,
        device: DeviceName,
        limit: Option<u64>,
    ) -> Result<Vec<Box<dyn Engine>>, String> {
        let launch =
            Launch::parse(&read(description)?).map_err(|why| format!("{}: {why}", description.display()))?;
        let text = read(ptx)?;
        let engine = |name: &'static str, place: Place, device: &str| -> Box<dyn Engine> {
            let given = limit.map_or_else(String::new, |limit| format!(" --limit {limit}"));
            let (ptx, description) = (ptx.display(), description.display());
            let wish = format!("--ptx {ptx} --launch {description} --device {device}{given}");
            Box::new(Self { name, place, launch: launch.clone(), limit: limit.unwrap_or(LIMIT), wish })
        };
        let in_sim = || -> Result<Box<dyn Engine>, String> {
            let module = ptx_text::module(&text).map_err(|why| format!("{}: {why}", ptx.display()))?;
            let kernel = module.kernel(&launch.entry).ok_or(format!(
                "{} has no kernel {}",
                ptx.display(),
                launch.entry
            ))?;
            let (takes, given) = (kernel.params.len(), launch.parameters.len());
            if takes != given {
                return Err(format!("{} takes {takes} parameters, and {given} are described", launch.entry));
            }
            Ok(engine("ptx-sim", Place::Sim(Box::new(module)), "sim"))
        };
        let on_gpu = |cuda: Cuda| -> Result<Box<dyn Engine>, String> {
            let name = ptx.display().to_string();
            let module = driver::Module::from_ptx(cuda.context(), &name, &text, &JitOptions::default());
            let function = module
                .and_then(|module| module.function(&launch.entry))
                .map_err(|error| error.to_string())?;
            if launch.shared > 0 {
                function.set_max_dynamic_shared(launch.shared).map_err(|error| error.to_string())?;
            }
            let gpu = Gpu { cuda, function, turn: Mutex::new(()) };
            Ok(engine("ptx-cuda", Place::Gpu(Box::new(gpu)), "cuda"))
        };
        match device {
            DeviceName::Sim(None) => Ok(vec![in_sim()?]),
            DeviceName::Cuda(None, None) if limit.is_some() => {
                Err("--limit counts what the simulator executes: give it with --device sim".into())
            }
            DeviceName::Cuda(None, None) => {
                Ok(vec![on_gpu(Cuda::new(0).map_err(|error| error.to_string())?)?])
            }
            DeviceName::All if limit.is_some() => Ok(vec![in_sim()?]),
            DeviceName::All => match Cuda::new(0) {
                Ok(cuda) => Ok(vec![on_gpu(cuda)?]),
                Err(_) => Ok(vec![in_sim()?]),
            },
            other => Err(format!("--ptx runs on --device sim or cuda, not on {other}")),
        }
    }

    /// The parameters' values, in the kernel's order.
    fn parameters(&self, problem: &Problem) -> Result<Vec<Parameter>, String> {
        self.launch.parameters.iter().map(|name| parameter(name, problem)).collect()
    }

    fn grid(&self, problem: &Problem) -> Result<[u32; 3], String> {
        let [x, y, z] = &self.launch.grid;
        Ok([x.of(problem)?, y.of(problem)?, z.of(problem)?])
    }

    /// Runs the kernel once on the bytes of q, k, v, o and lse, and returns these afterwards.
    fn compute(&self, problem: &Problem, tensors: [&[u8]; 5]) -> Result<[Vec<u8>; 5], String> {
        match &self.place {
            Place::Gpu(gpu) => self.on_gpu(gpu, problem, tensors),
            Place::Sim(module) => self.in_sim(module, problem, tensors),
        }
    }

    fn in_sim(
        &self,
        module: &Module,
        problem: &Problem,
        tensors: [&[u8]; 5],
    ) -> Result<[Vec<u8>; 5], String> {
        let stop = Stop::when(interrupt::requested);
        let mut sim = Sim::new(Config { threads: 1, budget: self.limit, stop, ..Config::default() });
        let buffers: Vec<Buffer> = TENSORS
            .iter()
            .zip(tensors)
            .enumerate()
            // A kernel may not read an output before writing it.
            .map(
                |(n, (name, bytes))| {
                    if n < 3 { sim.alloc_from(name, bytes) } else { sim.alloc(name, bytes.len()) }
                },
            )
            .collect();
        let kernel = module.kernel(&self.launch.entry).ok_or("the kernel is gone")?;
        let mut params = vec![0; kernel.param_bytes() as usize];
        for (param, value) in kernel.params.iter().zip(self.parameters(problem)?) {
            let bytes = match value {
                Parameter::Address(tensor) => buffers[tensor].address.to_le_bytes().to_vec(),
                Parameter::U32(number) => number.to_le_bytes().to_vec(),
                Parameter::F32(number) => number.to_le_bytes().to_vec(),
            };
            if bytes.len() != param.ty.bytes() as usize {
                return Err(format!("the parameter {} has another size than what is described", param.name));
            }
            params[param.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        let shared = self.launch.shared.max(kernel.shared_bytes());
        let dims = LaunchDims {
            grid: self.grid(problem)?,
            block: self.launch.block,
            cluster: None,
            dynamic_shared: Some(shared),
        };
        let raise = format!("\n  the limit of {} warp instructions is set by --limit", self.limit);
        let report = sim.launch(module, &self.launch.entry, dims, &params).map_err(|error| match error {
            SimError::Budget { .. } => format!("{error}{raise}"),
            _ => error.to_string(),
        })?;
        if let Some(finding) = report.findings.first() {
            let raise = if finding.kind == FindingKind::Budget { raise.as_str() } else { "" };
            return Err(format!("{finding}{raise}"));
        }
        let outputs = if self.gives_lse() { 3..5 } else { 3..4 };
        for n in outputs {
            if let Some(range) = sim.unwritten(buffers[n]).first() {
                return Err(format!("{} was not written: bytes {range:?}", TENSORS[n]));
            }
        }
        Ok(std::array::from_fn(|n| sim.read(buffers[n])))
    }

    #[allow(unsafe_code)] // A launch reaches memory through addresses.
    fn on_gpu(&self, gpu: &Gpu, problem: &Problem, tensors: [&[u8]; 5]) -> Result<[Vec<u8>; 5], String> {
        let _turn = gpu.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let say = |error: driver::DriverError| error.to_string();
        let stream = gpu.cuda.stream();
        let guard = vec![GUARD_BYTE; GUARD];
        let mut buffers = Vec::new();
        for tensor in tensors {
            buffers.push(stream.upload_new(&[&guard, tensor, &guard].concat()).map_err(say)?);
        }
        let mut params = ParamBuffer::new();
        for value in self.parameters(problem)? {
            match value {
                Parameter::Address(tensor) => params.push_u64(buffers[tensor].address() + GUARD as u64),
                Parameter::U32(number) => params.push_u32(number),
                Parameter::F32(number) => params.push_f32(number),
            }
            .map_err(say)?;
        }
        let plain = LaunchConfig::new(self.grid(problem)?, self.launch.block);
        let config = LaunchConfig { shared_bytes: self.launch.shared, ..plain };
        // SAFETY: the parameters are those that the user describes, and the buffers outlive the synchronisation below.
        // What a wrong description or kernel does beyond them ends this process's context, and is reported.
        unsafe { gpu.function.launch(stream, &config, params.as_bytes()) }.map_err(say)?;
        gpu.cuda.synchronize().map_err(|error| error.to_string())?;
        let mut results = [const { Vec::new() }; 5];
        for ((buffer, name), result) in buffers.iter().zip(TENSORS).zip(&mut results) {
            let bytes = stream.download_all::<u8>(buffer).map_err(say)?;
            let (before, rest) = bytes.split_at(GUARD);
            let (inside, after) = rest.split_at(rest.len() - GUARD);
            if before.iter().chain(after).any(|&byte| byte != GUARD_BYTE) {
                return Err(format!("memory outside {name} was overwritten"));
            }
            *result = inside.to_vec();
        }
        Ok(results)
    }
}

impl Engine for PtxEngine {
    fn name(&self) -> &str {
        self.name
    }

    fn wish(&self) -> String {
        self.wish.clone()
    }

    fn gives_lse(&self) -> bool {
        self.launch.parameters.iter().any(|name| name == "lse")
    }

    fn hides_values(&self) -> bool {
        false
    }

    fn supports(&self, problem: &Problem) -> Result<(), String> {
        self.launch.supports(problem)?;
        let pairs =
            problem.mask.pairs(problem.len_q, problem.len_k) * (problem.batch * problem.heads_q) as u128;
        match self.place {
            Place::Sim(_) if pairs > MOST_PAIRS => Err(format!(
                "{pairs} pairs of queries and keys would take long to simulate; {MOST_PAIRS} are the most"
            )),
            _ => Ok(()),
        }
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let problem = attention.problem(q, k, v)?;
        let plain = |tensor: &Tensor<'_>| {
            Guarded::with_values(problem.dtype, Arrangement::Bhsd, tensor.shape(), &tensor.to_f32()).bytes()
        };
        let inputs = [q, k, v].map(plain);
        // The outputs are copied to the GPU too, so that elements that the kernel does not write show.
        let before = plain(&o.as_tensor());
        let sums = vec![0xff_u8; problem.batch * problem.heads_q * problem.len_q * size_of::<f32>()];
        let results = self
            .compute(&problem, [&inputs[0], &inputs[1], &inputs[2], &before, &sums])
            .map_err(|why| failed(self.name, why))?;
        for ((name, sent), back) in TENSORS.iter().zip(&inputs).zip(&results) {
            if sent != back {
                return Err(failed(
                    self.name,
                    format!("{name} was changed by the kernel, though it is an input"),
                ));
            }
        }
        write(&files::widened(&results[3], problem.dtype), o);
        if let Some(lse) = lse {
            write(&files::elements::<f32>(&results[4]), lse);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::Mask;

    const TEXT: &str = "
        entry = 'attention'
        grid = ['len_q/64', 'batch*heads_q', 1]
        block = [128, 1, 1]
        parameters = ['q', 'k', 'v', 'o', 'len_q', 'scale_log2', 'causal']
        [computes]
        dtype = ['f16']
        head_dim = [64]
        mask = ['full', 'causal']";

    #[test]
    fn sizes_are_products_that_are_divided_rounding_up() {
        let launch = Launch::parse(TEXT).unwrap();
        let problem = Problem::new(2, 3, 65, 64, DType::F16);
        let grid: Vec<u32> = launch.grid.iter().map(|size| size.of(&problem).unwrap()).collect();
        assert_eq!(grid, [2, 6, 1]);
        assert_eq!(parameter("len_q", &problem), Ok(Parameter::U32(65)));
        assert_eq!(parameter("o", &problem), Ok(Parameter::Address(3)));
        assert_eq!(parameter("scale", &problem), Ok(Parameter::F32(0.125)));
        assert_eq!(parameter("causal", &problem.with_mask(Mask::Causal)), Ok(Parameter::U32(1)));
    }

    #[test]
    fn only_what_the_description_says_is_asked_of_a_kernel() {
        let launch = Launch::parse(TEXT).unwrap();
        let problem = Problem::new(2, 4, 65, 64, DType::F16);
        assert_eq!(launch.supports(&problem), Ok(()));
        assert_eq!(launch.supports(&problem.with_mask(Mask::Causal)), Ok(()));
        assert!(launch.supports(&problem.with_mask(Mask::CausalTopLeft)).is_err());
        assert!(launch.supports(&problem.with_kv(2, 65)).is_err());
        assert!(launch.supports(&problem.with_kv(4, 66)).is_err());
        assert!(launch.supports(&Problem::new(2, 4, 65, 64, DType::BF16)).is_err());
        assert!(launch.supports(&Problem::new(2, 4, 65, 128, DType::F16)).is_err());
    }

    #[test]
    fn a_description_that_cannot_be_meant_is_refused_in_words() {
        let wrong = |from: &str, to: &str| Launch::parse(&TEXT.replace(from, to)).unwrap_err();
        assert!(wrong("'len_q/64'", "'seqlen/64'").contains("'seqlen' is not a size"));
        assert!(wrong("'len_q/64'", "'len_q/0'").contains("divides by 0"));
        let large = "'18446744073709551615*18446744073709551615'";
        assert!(wrong("'len_q/64'", large).contains("too large"));
        assert!(wrong("'len_q/64'", "'4294967296*len_q'").contains("too large"));
        assert!(wrong("'scale_log2'", "'scale_ln'").contains("scale_log2"));
        assert!(wrong("'full'", "'half'").contains("not a mask"));
        assert!(wrong("entry", "entrance").contains("entrance"));
    }
}
