//! Keeps a worker running: starts it when it is first needed, again when it is lost, and hands it the inputs.

use std::ffi::OsString;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::pool::{NAMES, Stored};
use super::protocol::{Asked, Request};
use crate::peers;
use crate::process::{Silence, Worker};

const TORCH: &str = include_str!("torch.py");

/// Time to start CUDA, and for torch to import it from a cold disk.
const START: Duration = Duration::from_mins(2);
/// Time to read a pool, cut tensors, and make the first call of a problem, which may build its code.
const PREPARE: Duration = Duration::from_mins(1);
/// Time for a sample; anything longer is a hang.
const SAMPLE: Duration = Duration::from_secs(20);

/// Which attention a worker runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Ours, in this very binary.
    Ours,
    /// torch's, in a Python that has it.
    Torch,
    /// Whatever a command runs that speaks the protocol, by the name that stands in messages.
    Command(&'static str, Vec<OsString>),
}

/// A worker that is started again when it is lost.
pub struct Host {
    kind: Kind,
    ordinal: u32,
    environment: Vec<(String, String)>,
    /// The longest that any answer is waited for.
    watchdog: Duration,
    worker: Option<Worker>,
    /// The pool that the running worker holds.
    pool: Option<Stored>,
    /// The problem, with its sets, that it is ready for.
    loaded: Option<(Asked, usize)>,
    /// How often it had to be started again.
    lost: usize,
}

impl Host {
    /// For the GPU with this number. Nothing is started yet.
    pub fn new(kind: Kind, ordinal: u32) -> Self {
        Self {
            kind,
            ordinal,
            environment: Vec::new(),
            watchdog: Duration::MAX,
            worker: None,
            pool: None,
            loaded: None,
            lost: 0,
        }
    }

    /// With a limit on how long any answer is waited for, where the usual limits are too long.
    pub fn with_watchdog(mut self, limit: Duration) -> Self {
        self.watchdog = limit;
        self
    }

    /// With a variable in the worker's environment.
    pub fn with_variable(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Starts the worker and asks who it is.
    pub fn hello(&mut self) -> Result<Value, String> {
        self.ask(&Request::Hello)
    }

    /// How often the worker was lost.
    pub fn lost(&self) -> usize {
        self.lost
    }

    /// Makes sure that the worker runs and holds a pool.
    pub fn give(&mut self, pool: &Stored) -> Result<(), String> {
        if self.worker.is_some() && self.pool.as_ref() == Some(pool) {
            return Ok(());
        }
        let request = Request::Pool { dtype: pool.dtype.into(), paths: pool.paths.clone() };
        let reply = self.ask(&request)?;
        for ((name, sum), given) in
            NAMES.iter().zip(pool.checksums).zip(reply["checksums"].as_array().into_iter().flatten())
        {
            if given.as_u64() != Some(u64::from(sum)) {
                return Err(format!("the {} read another {name} than was written", self.name()));
            }
        }
        (self.pool, self.loaded) = (Some(pool.clone()), None);
        Ok(())
    }

    /// Asks about a problem. A worker that was lost since is restarted and brought back to its state.
    pub fn ask_about(
        &mut self,
        pool: &Stored,
        problem: &Asked,
        sets: usize,
        request: &Request,
    ) -> Result<Value, String> {
        self.give(pool)?;
        let wanted = (problem.clone(), sets);
        if self.loaded.as_ref() != Some(&wanted) {
            self.loaded = None;
            self.ask(&Request::Load { problem: problem.clone(), sets })?;
            self.loaded = Some(wanted);
        }
        self.ask(request)
    }

    /// Asks the worker, which is started if none runs.
    pub fn ask(&mut self, request: &Request) -> Result<Value, String> {
        let limit = match request {
            Request::Hello => START,
            Request::Sample { .. } => SAMPLE,
            _ => PREPARE,
        }
        .min(self.watchdog);
        if self.worker.is_none() {
            self.worker = Some(self.start()?);
        }
        let Some(worker) = &mut self.worker else { return Err("no worker runs".into()) };
        worker.ask(request, limit).map_err(|silence| {
            if matches!(silence, Silence::Lost(_)) || is_lost(&silence) {
                (self.worker, self.pool, self.loaded) = (None, None, None);
                self.lost += 1;
            }
            silence.reason()
        })
    }

    fn name(&self) -> &'static str {
        match self.kind {
            Kind::Ours => "flashcore worker",
            Kind::Torch => "torch worker",
            Kind::Command(name, _) => name,
        }
    }

    fn start(&self) -> Result<Worker, String> {
        let mut command = match &self.kind {
            Kind::Ours => {
                let binary = std::env::current_exe().map_err(|error| format!("who am I? ({error})"))?;
                let mut command = Command::new(binary);
                command.args(["gpu-worker", "--ordinal", &self.ordinal.to_string()]);
                command
            }
            Kind::Torch => {
                peers::torch_is_there()?;
                let mut command = Command::new(peers::python());
                command.args(["-u", "-c", TORCH, &self.ordinal.to_string()]);
                command
            }
            Kind::Command(name, words) => {
                let (program, arguments) =
                    words.split_first().ok_or_else(|| format!("the {name} has no command"))?;
                let mut command = Command::new(program);
                command.args(arguments);
                command
            }
        };
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        Worker::start(self.name(), &mut command)
    }
}

/// Whether a refusal says that the worker's CUDA context is gone, so that nothing it is asked can succeed.
fn is_lost(silence: &Silence) -> bool {
    let Silence::Refused(why) = silence else { return true };
    why.contains("context is lost") || why.contains("CUDA error") || why.starts_with("AcceleratorError")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_context_is_told_from_a_refusal() {
        let refused = |why: &str| is_lost(&Silence::Refused(why.into()));
        assert!(refused("cuStreamSynchronize failed: … The context is lost: every later CUDA call …"));
        assert!(refused("RuntimeError: CUDA error: an illegal memory access was encountered"));
        assert!(!refused("OutOfMemoryError: CUDA out of memory. Tried to allocate 34.00 GiB"));
        assert!(!refused("RuntimeError: No available kernel. Aborting execution."));
    }
}
