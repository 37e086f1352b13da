//! The CPU's worker: answers the requests of the GPU workers' protocol with the CPU engine, so that one search drives
//! both. The clock is that of the caller, which on the CPU is the only one.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use flashcore::half::{bf16, f16};
use flashcore::{Attention, DType, Device, Element, Problem, Tensor, TensorMut, cpu};
use serde_json::{Value, json};

use flashcore_host::files::{Stored, bytes, elements};
use flashcore_host::memory;

use crate::protocol::Request;
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
    /// The numbers that tensors are cut from, as bytes.
    pools: HashMap<String, Vec<Vec<u8>>>,
    ready: Option<Box<dyn Calls>>,
    /// Engines keep their threads between calls.
    engines: HashMap<String, Device>,
}

/// A problem with its tensors, whatever their dtype.
trait Calls {
    fn call(&mut self, device: &Device) -> Result<(), String>;
    fn poison(&mut self);
    fn output(&self) -> Vec<u8>;
    fn problem(&self) -> &Problem;
}

struct Typed<T> {
    problem: Problem,
    attention: Attention<'static>,
    inputs: [(Vec<T>, [usize; 4]); 3],
    o: Vec<T>,
}

impl<T: Stored> Typed<T> {
    fn new(problem: Problem, pool: &[Vec<u8>]) -> Self {
        let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, .. } = problem;
        let shapes = [
            [batch, heads_q, len_q, head_dim],
            [batch, heads_kv, len_k, head_dim],
            [batch, heads_kv, len_k, head_dim_v],
        ];
        let cut = |tensor: usize| {
            let pool: Vec<T> = elements(&pool[tensor]);
            let count = shapes[tensor].iter().product();
            (pool.iter().copied().cycle().take(count).collect(), shapes[tensor])
        };
        let attention = Attention::new().mask(problem.mask).scale(problem.scale);
        let o = vec![T::default(); batch * heads_q * len_q * head_dim_v];
        Self { problem, attention, inputs: [cut(0), cut(1), cut(2)], o }
    }
}

impl<T: Stored + Element> Calls for Typed<T> {
    fn call(&mut self, device: &Device) -> Result<(), String> {
        let Problem { batch, heads_q, len_q, head_dim_v, .. } = self.problem;
        let mut run = || {
            let [q, k, v] = &self.inputs;
            let (q, k, v) = (Tensor::new(&q.0, &q.1)?, Tensor::new(&k.0, &k.1)?, Tensor::new(&v.0, &v.1)?);
            let mut o = TensorMut::new(&mut self.o, &[batch, heads_q, len_q, head_dim_v])?;
            self.attention.run_into(device, &q, &k, &v, &mut o, None)
        };
        run().map_err(|error| error.to_string())
    }

    fn poison(&mut self) {
        let poison: Vec<T> = elements(&vec![0xff; size_of::<T>()]);
        self.o.fill(poison[0]);
    }

    fn output(&self) -> Vec<u8> {
        bytes(&self.o)
    }

    fn problem(&self) -> &Problem {
        &self.problem
    }
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
            Request::Pool { dtype, paths } => self.read_pool(dtype, &paths),
            Request::Load { problem, .. } => {
                let problem = problem.problem()?;
                memory::check(&problem, memory::to_call(&problem))?;
                let pool = self.pools.get(problem.dtype.name()).ok_or("there is no pool of this dtype")?;
                self.ready = Some(match problem.dtype {
                    DType::F16 => Box::new(Typed::<f16>::new(problem, pool)),
                    DType::BF16 => Box::new(Typed::<bf16>::new(problem, pool)),
                    DType::F32 => return Err("searches are in f16 and bf16".into()),
                });
                Ok(json!({}))
            }
            Request::Output { who, rows, path } => self.output(&who, &rows, &path),
            Request::Sample { warm, calls, .. } if warm.max(calls) > MOST_CALLS => {
                Err(format!("{MOST_CALLS} calls are the most of a sample"))
            }
            Request::Sample { who, warm, calls } => {
                let (ready, device) = self.both(&who)?;
                for _ in 0..warm {
                    ready.call(device)?;
                }
                let calls = calls.max(1);
                let start = Instant::now();
                for _ in 0..calls {
                    ready.call(device)?;
                }
                let us = start.elapsed().as_secs_f64() * 1e6 / f64::from(calls);
                Ok(json!({ "us": us, "calls": calls }))
            }
            Request::Check { who } => {
                let (ready, device) = self.both(&who)?;
                let mut run = || {
                    ready.poison();
                    ready.call(device).map(|()| ready.output())
                };
                Ok(json!({ "same": run()? == run()? }))
            }
            _ => Err("the CPU's worker does not answer this".into()),
        }
    }

    fn read_pool(&mut self, dtype: String, paths: &[PathBuf; 3]) -> Result<Value, String> {
        let read = |path: &PathBuf| {
            std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
        };
        let pool = paths.iter().map(read).collect::<Result<Vec<Vec<u8>>, String>>()?;
        let sums: Vec<u32> = pool.iter().map(|bytes| crc32fast::hash(bytes)).collect();
        self.pools.insert(dtype, pool);
        Ok(json!({ "checksums": sums }))
    }

    /// The problem and whose engine is meant.
    fn both(&mut self, who: &str) -> Result<(&mut dyn Calls, &Device), String> {
        if !self.engines.contains_key(who) {
            let engine = match who.strip_prefix(SCHEDULE) {
                Some(schedule) => cpu::Engine::new().with_schedule(schedule.parse()?),
                None if who == PLANNER => cpu::Engine::new(),
                None => return Err(format!("'{who}' is nobody here")),
            };
            self.engines.insert(who.to_string(), Device::cpu_with(engine));
        }
        let ready = self.ready.as_deref_mut().ok_or("load a problem first")?;
        Ok((ready, &self.engines[who]))
    }

    fn output(&mut self, who: &str, rows: &[usize], path: &Path) -> Result<Value, String> {
        let (ready, device) = self.both(who)?;
        ready.poison();
        ready.call(device)?;
        let (width, size) = (ready.problem().head_dim_v, ready.problem().dtype.size());
        let all = ready.output();
        let unwritten = all.chunks_exact(size).filter(|bits| bits.iter().all(|&byte| byte == 0xff)).count();
        if unwritten > 0 {
            return Err(format!("{unwritten} of {} elements were never written", all.len() / size));
        }
        let all = all.chunks_exact(width * size);
        let chosen: Vec<u8> =
            rows.iter().flat_map(|&at| all.clone().nth(at).unwrap_or_default().to_vec()).collect();
        std::fs::write(path, &chosen).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(json!({ "bytes": chosen.len() }))
    }
}
