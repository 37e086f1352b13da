//! The CPU's worker: answers the requests of the GPU workers' protocol with the CPU engine, so that one search drives
//! both. The clock is that of the caller, which on the CPU is the only one.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};

use flashcore::{DType, Device, Problem, cpu};
use flashcore_host::files::widened;
use flashcore_host::memory;
use flashcore_judge::guarded::{Arrangement, Poison};
use flashcore_judge::inputs::Values;
use flashcore_judge::operands::Operands;
use serde_json::{Value, json};

use crate::cpu::Calls;
use crate::protocol::Request;
use crate::timing::Contender;
use crate::worker::{PLANNER, SCHEDULE};

/// Calls of one sample at most: a host that wants more has lost its count.
pub const MOST_CALLS: u32 = 1_000_000;

/// Answers requests from stdin until it ends.
pub fn serve() -> Result<(), String> {
    let mut server = Server::default();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| format!("stdin: {error}"))?;
        let reply = server.answer_line(&line);
        let mut out = std::io::stdout().lock();
        if writeln!(out, "{reply}").and_then(|()| out.flush()).is_err() {
            break;
        }
    }
    Ok(())
}

/// What the worker knows between two requests.
#[derive(Default)]
pub struct Server {
    /// The numbers that q, k and v are cut from, by their dtype.
    pools: HashMap<&'static str, [Vec<f32>; 3]>,
    ready: Option<Operands>,
    /// Engines keep their threads between calls.
    engines: HashMap<String, Device>,
}

/// The tensors of a problem, cut from a pool's.
fn cut(problem: Problem, pool: &[Vec<f32>; 3]) -> Operands {
    let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, .. } = problem;
    let counts = [heads_q * len_q * head_dim, heads_kv * len_k * head_dim, heads_kv * len_k * head_dim_v];
    let tensor = |n: usize| -> Vec<f32> { pool[n].iter().copied().cycle().take(batch * counts[n]).collect() };
    let values = Values { q: tensor(0), k: tensor(1), v: tensor(2) };
    Operands::with_values(problem, None, Arrangement::Bhsd, &values)
}

impl Server {
    /// The reply to a line.
    pub fn answer_line(&mut self, line: &str) -> Value {
        let request = serde_json::from_str(line).map_err(|error| format!("this is no request ({error})"));
        let reply = request.and_then(|request| self.answer(request));
        reply.unwrap_or_else(|why| json!({ "error": why }))
    }

    fn answer(&mut self, request: Request) -> Result<Value, String> {
        match request {
            Request::Hello => Ok(json!({
                "version": env!("CARGO_PKG_VERSION"),
                "device": cpu::Engine::new().to_string(),
            })),
            Request::Pool { dtype, paths } => {
                self.read_pool(dtype.parse().map_err(|error: flashcore::Error| error.to_string())?, &paths)
            }
            Request::Load { problem, .. } => {
                let problem = problem.problem()?;
                memory::check(&problem, memory::to_judge(&problem))?;
                if problem.dtype == DType::F32 {
                    return Err("searches are in f16, bf16 and f8".into());
                }
                let pool = self.pools.get(problem.dtype.name()).ok_or("there is no pool of this dtype")?;
                self.ready = Some(cut(problem, pool));
                Ok(json!({}))
            }
            Request::Output { who, rows, path } => self.output(&who, &rows, &path),
            Request::Sample { warm, calls, .. } if warm.max(calls) > MOST_CALLS => {
                Err(format!("{MOST_CALLS} calls are the most of a sample"))
            }
            Request::Sample { who, warm, calls, .. } => {
                let calls = calls.max(1);
                Ok(json!({ "us": self.calls(&who)?.sample(warm, calls)?, "calls": calls }))
            }
            Request::Check { who } => {
                let mut run = || Ok::<_, String>(self.calls(&who)?.output()?.bits());
                Ok(json!({ "same": run()? == run()? }))
            }
            _ => Err("the CPU's worker does not answer this".into()),
        }
    }

    fn read_pool(&mut self, dtype: DType, paths: &[PathBuf; 3]) -> Result<Value, String> {
        let (mut pool, mut sums) = (<[Vec<f32>; 3]>::default(), [0; 3]);
        for ((path, values), sum) in paths.iter().zip(&mut pool).zip(&mut sums) {
            let bytes =
                std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
            (*values, *sum) = (widened(&bytes, dtype), crc32fast::hash(&bytes));
            if values.is_empty() {
                return Err(format!("{} holds no element", path.display()));
            }
        }
        self.pools.insert(dtype.name(), pool);
        Ok(json!({ "checksums": sums }))
    }

    /// Calls of whoever is meant on the problem that is loaded, into poisoned memory.
    fn calls(&mut self, who: &str) -> Result<Calls<'_>, String> {
        if !self.engines.contains_key(who) {
            let engine = match who.strip_prefix(SCHEDULE) {
                Some(schedule) => cpu::Engine::new()
                    .with_schedule(schedule.parse().map_err(|error: flashcore::Error| error.to_string())?),
                None if who == PLANNER => cpu::Engine::new(),
                None => return Err(format!("'{who}' is nobody here")),
            };
            self.engines.insert(who.to_string(), Device::cpu_with(engine));
        }
        let ready = self.ready.as_ref().ok_or("load a problem first")?;
        Ok(Calls::new(&self.engines[who], ready, Arrangement::Bhsd))
    }

    fn output(&mut self, who: &str, rows: &[usize], path: &Path) -> Result<Value, String> {
        let mut calls = self.calls(who)?;
        let o = calls.output()?;
        let unwritten = o.unwritten(Poison::First).len();
        if unwritten > 0 {
            let all = o.shape().iter().product::<usize>();
            return Err(format!("{unwritten} of {all} elements were never written"));
        }
        let (all, width) = (o.bytes(), o.shape()[3] * o.dtype().size());
        let row = |at: &usize| all.chunks_exact(width).nth(*at).unwrap_or_default();
        let chosen: Vec<u8> = rows.iter().flat_map(row).copied().collect();
        std::fs::write(path, &chosen).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(json!({ "bytes": chosen.len() }))
    }
}
