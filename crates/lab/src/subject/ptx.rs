//! A kernel as PTX text under test, on a GPU: the text, and a TOML file that says how it is launched and what it computes.
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
//! Tensors are contiguous, as (batch, heads, length, head_dim), and lie between guard zones that must stay as they were.

use std::path::Path;

use flashcore::cuda::Cuda;
use flashcore::cuda::driver::{self, JitOptions, LaunchConfig, ParamBuffer};
use flashcore::{Attention, DType, Problem, Tensor, TensorMut};
use serde::Deserialize;

use super::failed;
use crate::cases::parse_mask;
use crate::engine::Engine;
use crate::faults::planted::write;
use crate::files;
use crate::guarded::{Arrangement, Guarded};

const NAME: &str = "ptx";

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
    /// Threads of a block in x, y and z.
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
            text.split('*').map(|factor| size(factor.trim(), problem)).product()
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
        launch.computes.dtype.iter().try_for_each(|dtype| dtype.parse::<DType>().map(|_| ()))?;
        launch.computes.mask.iter().try_for_each(|mask| parse_mask(mask).map(|_| ()))?;
        Ok(launch)
    }

    /// Whether the kernel computes a problem, or why not.
    fn supports(&self, problem: &Problem) -> Result<(), String> {
        let computes = &self.computes;
        let masks = computes.mask.iter().filter_map(|mask| parse_mask(mask).ok());
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

/// A kernel from a file.
pub struct PtxEngine {
    cuda: Cuda,
    function: driver::Function,
    launch: Launch,
    wish: String,
}

impl PtxEngine {
    /// Assembles the PTX for the first GPU.
    pub fn load(ptx: &Path, description: &Path) -> Result<Self, String> {
        let read =
            |path: &Path| std::fs::read_to_string(path).map_err(|error| files::explain("read", path, &error));
        let launch =
            Launch::parse(&read(description)?).map_err(|why| format!("{}: {why}", description.display()))?;
        let text = read(ptx)?;
        let cuda = Cuda::new(0).map_err(|error| error.to_string())?;
        let module = driver::Module::from_ptx(
            cuda.context(),
            &ptx.display().to_string(),
            &text,
            &JitOptions::default(),
        );
        let function =
            module.and_then(|module| module.function(&launch.entry)).map_err(|error| error.to_string())?;
        if launch.shared > 0 {
            function.set_max_dynamic_shared(launch.shared).map_err(|error| error.to_string())?;
        }
        let wish = format!("--ptx {} --launch {}", ptx.display(), description.display());
        Ok(Self { cuda, function, launch, wish })
    }

    #[allow(unsafe_code)] // A launch reaches memory through addresses.
    fn compute(&self, problem: &Problem, tensors: [&[u8]; 5]) -> Result<[Vec<u8>; 5], String> {
        let say = |error: driver::DriverError| error.to_string();
        let stream = self.cuda.stream();
        let mut buffers = Vec::new();
        for tensor in tensors {
            let guard = vec![GUARD_BYTE; GUARD];
            buffers.push(stream.upload_new(&[&guard, tensor, &guard].concat()).map_err(say)?);
        }
        let mut params = ParamBuffer::new();
        for name in &self.launch.parameters {
            match parameter(name, problem)? {
                Parameter::Address(tensor) => params.push_u64(buffers[tensor].address() + GUARD as u64),
                Parameter::U32(number) => params.push_u32(number),
                Parameter::F32(number) => params.push_f32(number),
            }
            .map_err(say)?;
        }
        let [x, y, z] = &self.launch.grid;
        let grid = [x.of(problem)?, y.of(problem)?, z.of(problem)?];
        let config =
            LaunchConfig { shared_bytes: self.launch.shared, ..LaunchConfig::new(grid, self.launch.block) };
        // SAFETY: the parameters are those that the user describes; the buffers outlive the synchronisation below. What
        // a wrong description or kernel reaches beyond them is the GPU's fault handling, and this process's context.
        unsafe { self.function.launch(stream, &config, params.as_bytes()) }.map_err(say)?;
        self.cuda.synchronize().map_err(|error| error.to_string())?;
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
        NAME
    }

    fn wish(&self) -> String {
        self.wish.clone()
    }

    fn gives_lse(&self) -> bool {
        self.launch.parameters.iter().any(|name| name == "lse")
    }

    fn supports(&self, problem: &Problem) -> Result<(), String> {
        self.launch.supports(problem)
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let problem = attention.problem(q, k, v)?;
        let plain = |tensor: &Tensor<'_>, dtype| {
            Guarded::with_values(dtype, Arrangement::Bhsd, tensor.shape(), &tensor.to_f32()).bytes()
        };
        let inputs = [q, k, v].map(|tensor| plain(tensor, problem.dtype));
        // What stands in the outputs goes over too, so that what the kernel does not write shows.
        let before = plain(&o.as_tensor(), problem.dtype);
        let sums = vec![0xff_u8; problem.batch * problem.heads_q * problem.len_q * 4];
        let results = self
            .compute(&problem, [&inputs[0], &inputs[1], &inputs[2], &before, &sums])
            .map_err(|why| failed(NAME, why))?;
        for ((name, sent), back) in TENSORS.iter().zip(&inputs).zip(&results) {
            if sent != back {
                return Err(failed(NAME, format!("{name} was changed by the kernel, though it is an input")));
            }
        }
        let values: Vec<f32> = match problem.dtype {
            DType::F16 => {
                files::elements::<half::f16>(&results[3]).into_iter().map(half::f16::to_f32).collect()
            }
            DType::BF16 => {
                files::elements::<half::bf16>(&results[3]).into_iter().map(half::bf16::to_f32).collect()
            }
            DType::F32 => files::elements::<f32>(&results[3]),
        };
        write(&values, o);
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
        assert!(wrong("'scale_log2'", "'scale_ln'").contains("scale_log2"));
        assert!(wrong("'full'", "'half'").contains("not a mask"));
        assert!(wrong("entry", "entrance").contains("entrance"));
    }
}
