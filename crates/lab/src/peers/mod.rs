//! Peers: somebody else's attention, timed in the same run on the same inputs.
//!
//! torch lives in Python, so a small worker process runs it and speaks JSON lines over its pipes. Inputs go over as
//! raw files with checksums that the worker sends back, and its output comes back to be judged like ours.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use flashcore::{Mask, Name, Pass, Problem};
pub use flashcore_clock::python::{PYTHON_VARIABLE, python};
use serde::Serialize;
use serde_json::{Value, json};

use crate::cases::Passes;
use crate::files::widened;
use crate::gpu::protocol::Asked;
use crate::guarded::Guarded;
use crate::operands::Operands;
use crate::process::{Silence, Worker};
use crate::timing::Contender;

const WORKER: &str = include_str!("worker.py");
/// Time to import torch from a cold disk.
const START: Duration = Duration::from_mins(2);
/// Time for a single request; longer is a hang.
const ANSWER: Duration = Duration::from_mins(5);

/// Whether that Python could import torch, found out without importing it; the reason if not.
pub fn torch_is_there() -> Result<(), String> {
    let python = python();
    let probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)";
    match Command::new(&python).args(["-c", probe]).stdout(Stdio::null()).stderr(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(format!(
            "{python} has no torch; to compare with it, set {PYTHON_VARIABLE} to a Python that has"
        )),
        Err(error) => {
            Err(format!("{python} does not run ({error}); to compare with torch, set {PYTHON_VARIABLE}"))
        }
    }
}

/// torch's scaled_dot_product_attention in a worker process.
#[derive(Debug)]
pub struct Torch {
    worker: Worker,
    folder: Folder,
    version: String,
    threads: usize,
}

/// What is known about the peer, for reports.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TorchFacts {
    /// torch's version.
    pub version: String,
    /// Threads that it uses.
    pub threads: usize,
    /// The Python that runs it.
    pub python: String,
}

/// A folder for the files exchanged with the worker, removed at the end.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Result<Self, String> {
        let path = std::env::temp_dir().join(format!("flashcore-peer-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        Ok(Self(path))
    }

    /// A folder in it.
    pub(crate) fn within(&self, name: &str) -> Result<PathBuf, String> {
        let path = self.0.join(name);
        std::fs::create_dir_all(&path).map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        Ok(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Torch {
    /// Starts the worker on a number of threads, or says why not.
    pub fn start(threads: usize) -> Result<Self, String> {
        torch_is_there()?;
        let worker = Worker::start("torch worker", Command::new(python()).args(["-u", "-c", WORKER]))?;
        let folder = Folder::new()?;
        let mut torch = Self { worker, folder, version: String::new(), threads };
        let hello = torch.ask(&json!({"op": "hello", "threads": threads}), START)?;
        torch.version = hello["torch"].as_str().unwrap_or("unknown").to_string();
        torch.threads = hello["threads"].as_u64().unwrap_or(0) as usize;
        if torch.threads != threads {
            return Err(format!("torch uses {} threads where {threads} were asked for", torch.threads));
        }
        Ok(torch)
    }

    /// What is known about it.
    pub fn facts(&self) -> TorchFacts {
        TorchFacts { version: self.version.clone(), threads: self.threads, python: python() }
    }

    /// Whether torch computes a problem, or why not.
    pub fn supports(problem: &Problem) -> Result<(), String> {
        let square = problem.len_q == problem.len_k;
        match problem.mask {
            Mask::None => {}
            Mask::CausalTopLeft => {}
            Mask::Causal if square || problem.len_q == 1 => {}
            mask => return Err(format!("torch's is_causal has no {mask} mask for these lengths")),
        }
        if problem.dtype_kv().is_f8() {
            return Err("torch's attention takes no f8".into());
        }
        if problem.softcap.is_some() || problem.key_lengths {
            return Err("torch's attention has no softcap and no key lengths".into());
        }
        Ok(())
    }

    /// Hands over a problem's inputs, and makes sure that they arrived as they were sent. A call then takes these passes.
    pub fn load(&mut self, operands: &Operands, passes: Passes) -> Result<(), String> {
        let problem = &operands.problem;
        Self::supports(problem)?;
        let mut tensors = serde_json::Map::new();
        let mut sums = Vec::new();
        let mut inputs = vec![("q", &operands.q), ("k", &operands.k), ("v", &operands.v)];
        if passes.last() == Pass::Backward {
            inputs.push(("gradient", operands.operand(Name::Do)));
        }
        for &(name, tensor) in &inputs {
            let (path, bytes) = (self.folder.0.join(name), tensor.bytes());
            std::fs::write(&path, &bytes)
                .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
            tensors.insert(name.into(), json!([path, tensor.shape()]));
            sums.push((name, crc32fast::hash(&bytes)));
        }
        // One query sees every key under a bottom-right causal mask, but only the first under torch's.
        let causal = problem.mask != Mask::None && !(problem.mask == Mask::Causal && problem.len_q == 1);
        let reply = self.ask(
            &json!({"op": "load", "dtype": problem.dtype.name(), "tensors": tensors, "causal": causal,
                    "scale": f64::from(problem.scale), "passes": passes.name()}),
            ANSWER,
        )?;
        for (name, _) in inputs {
            let _ = std::fs::remove_file(self.folder.0.join(name));
        }
        match sums.iter().find(|(name, sum)| reply["checksums"][name].as_u64() != Some(u64::from(*sum))) {
            Some((name, _)) => Err(format!("torch read another {name} than was written")),
            None => Ok(()),
        }
    }

    /// What it computes, o or the gradient of q, in the order (batch, heads, length, head_dim).
    pub fn output(&mut self, problem: &Problem) -> Result<Vec<f32>, String> {
        let path = self.folder.0.join("o");
        self.ask(&json!({"op": "output", "path": path}), ANSWER)?;
        let bytes =
            std::fs::read(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let Problem { batch, heads_q, len_q, dtype, .. } = *problem;
        let (_, width) = Asked::of(problem).judged();
        let expected = batch * heads_q * len_q * width * dtype.size();
        if bytes.len() != expected {
            return Err(format!("torch returned {} bytes where {expected} were expected", bytes.len()));
        }
        Ok(widened(&bytes, dtype))
    }

    /// Sends a request and waits for its reply.
    fn ask(&mut self, request: &Value, limit: Duration) -> Result<Value, String> {
        self.worker.ask(request, limit).map_err(Silence::reason)
    }
}

impl Contender for &mut Torch {
    fn name(&self) -> String {
        "torch".into()
    }

    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String> {
        let reply = self.ask(&json!({"op": "sample", "warm": warm, "calls": calls}), ANSWER)?;
        let nanoseconds = reply["ns"].as_f64().ok_or("the torch worker sent no time")?;
        Ok(nanoseconds / 1e3 / f64::from(calls))
    }
}

/// The checksum of a tensor's elements in the order (batch, heads, length, head_dim).
pub fn checksum(tensor: &Guarded) -> u32 {
    crc32fast::hash(&tensor.bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::DType;

    #[test]
    fn what_torch_cannot_do_is_not_asked_of_it() {
        let problem = Problem::new(1, 2, 8, 16, DType::F32);
        assert!(Torch::supports(&problem.with_mask(Mask::Causal)).is_ok());
        assert!(Torch::supports(&problem.with_mask(Mask::Causal).with_kv(2, 9)).is_err());
        assert!(Torch::supports(&problem.with_mask(Mask::CausalTopLeft).with_kv(2, 9)).is_ok());
        assert!(Torch::supports(&problem.with_softcap(3.0)).is_err());
        let mut decode = problem.with_mask(Mask::Causal).with_kv(2, 9);
        decode.len_q = 1;
        assert!(Torch::supports(&decode).is_ok());
    }
}
