//! torch's attention as an engine: `torch` on the CPU, `torch-flash`, `torch-cudnn`, `torch-efficient` and `torch-math`
//! on a GPU.

use std::sync::{Mutex, PoisonError};

use flashcore::{Attention, DType, Mask, Problem, Tensor, TensorMut};

use super::failed;
use crate::bench::gpu::PEERS;
use crate::engine::Engine;
use crate::faults::planted::write;
use crate::files::widened;
use crate::gpu::host::{Host, Kind};
use crate::gpu::pool::{NAMES, Stored};
use crate::gpu::protocol::{Asked, Request};
use crate::guarded::Arrangement;
use crate::inputs::Values;
use crate::operands::Operands;
use crate::peers::Torch;

/// Who computes.
enum Place {
    /// torch on the CPU.
    Cpu(Torch),
    /// One backend of torch on the first GPU, with a folder for exchanged files.
    Gpu { host: Box<Host>, backend: &'static str, folder: tempfile::TempDir },
}

/// torch's scaled_dot_product_attention.
pub struct TorchEngine {
    name: String,
    place: Mutex<Place>,
}

impl TorchEngine {
    /// The names that [`TorchEngine::start`] knows.
    pub fn names() -> Vec<String> {
        let backends = PEERS.iter().map(|backend| format!("torch-{backend}"));
        std::iter::once("torch".to_string()).chain(backends).collect()
    }

    /// Starts the worker of a name, or says why not.
    pub fn start(name: &str) -> Result<Self, String> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let place = match name.strip_prefix("torch-") {
            _ if name == "torch" => Place::Cpu(Torch::start(threads)?),
            Some(backend) => {
                let backend = PEERS.iter().find(|known| **known == backend).ok_or_else(|| unknown(name))?;
                let mut host = Box::new(Host::new(Kind::Torch, 0));
                host.hello()?;
                let folder = tempfile::tempdir().map_err(|error| format!("no folder for inputs: {error}"))?;
                Place::Gpu { host, backend, folder }
            }
            None => return Err(unknown(name)),
        };
        Ok(Self { name: name.into(), place: Mutex::new(place) })
    }
}

fn unknown(name: &str) -> String {
    format!("'{name}' is not a subject; possible are {}", TorchEngine::names().join(", "))
}

impl Engine for TorchEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn wish(&self) -> String {
        format!("--subject {}", self.name)
    }

    fn gives_lse(&self) -> bool {
        false
    }

    fn hides_values(&self) -> bool {
        false
    }

    fn supports(&self, problem: &Problem) -> Result<(), String> {
        Torch::supports(problem)?;
        if problem.batch * problem.heads_q * problem.len_q * problem.len_k == 0 {
            return Err("torch is not asked about nothing".into());
        }
        if self.name == "torch" {
            return Ok(());
        }
        match (problem.dtype, problem.mask) {
            (DType::F32, _) => Err("torch's worker on a GPU takes f16 and bf16".into()),
            (_, Mask::None | Mask::Causal) => Ok(()),
            (_, mask) => Err(format!("torch's worker on a GPU has no {mask} mask")),
        }
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        _: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let problem = attention.problem(q, k, v)?;
        let values = Values { q: q.to_f32(), k: k.to_f32(), v: v.to_f32() };
        let operands = Operands::with_values(problem, None, Arrangement::Bhsd, &values);
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        let computed = match &mut *place {
            Place::Cpu(torch) => {
                torch.load(&operands, problem.pass.into()).and_then(|()| torch.output(&problem))
            }
            Place::Gpu { host, backend, folder } => on_gpu(host, backend, folder.path(), &operands),
        };
        write(&computed.map_err(|why| failed(&self.name, why))?, o);
        Ok(())
    }
}

/// One call on the GPU: the inputs are a pool of their own, of which each tensor is the beginning.
fn on_gpu(
    host: &mut Host,
    backend: &str,
    folder: &std::path::Path,
    operands: &Operands,
) -> Result<Vec<f32>, String> {
    let problem = operands.problem;
    let cannot =
        |what: &str, error: &std::io::Error| format!("cannot {what} in {}: {error}", folder.display());
    let mut checksums = [0; 3];
    let paths = NAMES.map(|name| folder.join(name));
    for ((tensor, path), sum) in
        [&operands.q, &operands.k, &operands.v].into_iter().zip(&paths).zip(&mut checksums)
    {
        let bytes = tensor.bytes();
        *sum = crc32fast::hash(&bytes);
        std::fs::write(path, bytes).map_err(|error| cannot("write", &error))?;
    }
    let elements_of_q = operands.q.shape().iter().product();
    let stored = Stored { dtype: problem.dtype.name(), seed: 0, elements: elements_of_q, checksums, paths };
    let rows = problem.batch * problem.heads_q * problem.len_q;
    let path = folder.join("o");
    let request = Request::Output { who: backend.into(), rows: (0..rows).collect(), path: path.clone() };
    host.ask_about(&stored, &Asked::of(&problem), 1, &request)?;
    let bytes = std::fs::read(&path).map_err(|error| cannot("read", &error))?;
    let expected = rows * problem.head_dim_v * problem.dtype.size();
    if bytes.len() != expected {
        return Err(format!("torch returned {} bytes where {expected} were expected", bytes.len()));
    }
    Ok(widened(&bytes, problem.dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_none_is_answered_with_those_that_are() {
        for name in ["tensorflow", "torch-fast", ""] {
            let why = TorchEngine::start(name).err().unwrap();
            assert!(why.contains("torch-cudnn") && why.contains("torch-math"), "{why}");
        }
    }
}
