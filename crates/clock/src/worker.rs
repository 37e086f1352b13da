//! FlashCore's worker: the `flashcore` binary, answering requests about one GPU.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{BufRead, Lines, StdinLock, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use flashcore::cuda::driver::{DeviceBuffer, Event, EventKind, GraphExec};
use flashcore::cuda::{Cuda, CudaLengths, CudaTensor, Recorder, Recording};
use flashcore::{
    Attention, Backward, DType, Device, F8E4M3, Layout, Name, Pages, Pass, Problem, Starts, Storage, Tensor,
    TensorBuf,
};
use serde_json::{Value, json};

use crate::ceilings;
use crate::cublas::{Addresses, CUBLAS, Unfused};
use crate::pool::NAMES;
use crate::protocol::{Asked, GRADIENT_FROM, Request};
use crate::sequences::{ARRANGEMENT, Lie, starts};
use flashcore_host::files::widened;
use flashcore_judge::stats;

/// Calls that are queued before the host waits for the GPU, when its own time is measured.
const QUEUED: usize = 32;

/// Warm-up calls per set of tensors before the call clock starts.
const WARM_UPS: usize = 5;

/// Launches of an empty kernel, from which the cost of a launch is taken.
const FLOOR_LAUNCHES: usize = 300;

/// `who` of a request: the planner's choice.
pub const PLANNER: &str = "flashcore";
/// `who` of a request begins with this: the default schedule of the kernel whose name follows.
pub const KERNEL: &str = "kernel ";
/// `who` of a request begins with this: the schedule whose text follows.
pub const SCHEDULE: &str = "schedule ";

/// Answers requests from stdin until it ends.
pub fn serve(ordinal: u32) -> Result<(), String> {
    let mut server = Server { cuda: open(ordinal), pools: HashMap::new(), rounded: HashMap::new() };
    let mut lines = std::io::stdin().lock().lines();
    let mut next = read(&mut lines);
    while let Some(request) = next {
        next = match request {
            Ok(Request::Load { problem, sets }) => {
                let prepared = server.prepare(problem, sets);
                match prepared {
                    Ok(cell) => {
                        reply(Ok(json!({})));
                        cell.serve(&mut lines)
                    }
                    Err(why) => {
                        reply(Err(why));
                        read(&mut lines)
                    }
                }
            }
            Ok(request) => {
                reply(server.answer(request));
                read(&mut lines)
            }
            Err(why) => {
                reply(Err(why));
                read(&mut lines)
            }
        };
    }
    Ok(())
}

/// The next request, if there is one; an error where a line is not a request.
fn read(lines: &mut Lines<StdinLock<'_>>) -> Option<Result<Request, String>> {
    let line = lines.next()?.ok()?;
    Some(serde_json::from_str(&line).map_err(|error| format!("this is no request ({error})")))
}

fn reply(answer: Result<Value, String>) {
    let line = answer.unwrap_or_else(|why| json!({ "error": why }));
    let mut out = std::io::stdout().lock();
    // An error here cannot be reported to anyone.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn open(ordinal: u32) -> Result<Cuda, String> {
    Cuda::new(ordinal).and_then(|cuda| cuda.on_new_stream()).map_err(say)
}

fn say(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Numbers on the GPU that tensors are taken from.
type PoolOnGpu = [DeviceBuffer; 3];

struct Server {
    cuda: Result<Cuda, String>,
    pools: HashMap<String, PoolOnGpu>,
    /// Those whose keys and values were rounded to f8.
    rounded: HashMap<String, PoolOnGpu>,
}

impl Server {
    fn answer(&mut self, request: Request) -> Result<Value, String> {
        let cuda = self.cuda.clone()?;
        match request {
            Request::Hello => hello(&cuda),
            Request::Ceilings => ceilings::measure(&cuda),
            Request::Pool { dtype, paths } => {
                let (pool, sums) = load_pool(&cuda, &paths)?;
                self.rounded.remove(&dtype);
                self.pools.insert(dtype, pool);
                Ok(json!({ "checksums": sums }))
            }
            _ => Err("load a problem first".into()),
        }
    }

    fn prepare(&mut self, asked: Asked, sets: usize) -> Result<Ready, String> {
        let problem = asked.problem()?;
        let (cuda, name) = (self.cuda.clone()?, problem.dtype.name());
        let mut pool = self.pools.get(name).ok_or("there is no pool of this dtype")?;
        if problem.dtype_kv.is_some() {
            pool = match self.rounded.entry(name.into()) {
                Entry::Occupied(made) => made.into_mut(),
                Entry::Vacant(place) => place.insert(rounded(&cuda, pool, problem.dtype)?),
            };
        }
        Ready::new(cuda, pool, asked, problem, sets)
    }
}

fn hello(cuda: &Cuda) -> Result<Value, String> {
    let properties = cuda.context().properties();
    let floor = cuda.launch_floor(FLOOR_LAUNCHES).map_err(say)?;
    Ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": option_env!("FLASHCORE_COMMIT"),
        "device": properties.name,
        "uuid": properties.uuid,
        "capability": properties.compute_capability.to_string(),
        "sms": properties.sm_count,
        "l2_bytes": properties.l2_bytes,
        "memory_bytes": properties.memory_bytes,
        "sm_clock_khz": properties.sm_clock_khz,
        "cuda": cuda.context().driver().version().to_string(),
        "empty_launch": {
            "host_p50_us": stats::median(&floor.host_us),
            "call_p50_us": stats::median(&floor.call_us),
        },
    }))
}

fn load_pool(cuda: &Cuda, paths: &[PathBuf; 3]) -> Result<(PoolOnGpu, [u32; 3]), String> {
    let mut sums = [0; 3];
    let mut buffers = Vec::new();
    for (path, sum) in paths.iter().zip(&mut sums) {
        let bytes =
            std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        *sum = crc32fast::hash(&bytes);
        buffers.push(cuda.stream().upload_new(&bytes).map_err(say)?);
    }
    let pool = buffers.try_into().map_err(|_| format!("a pool has {} tensors", NAMES.len()))?;
    Ok((pool, sums))
}

/// A pool of this type whose keys and values are rounded to f8.
fn rounded(cuda: &Cuda, [q, k, v]: &PoolOnGpu, dtype: DType) -> Result<PoolOnGpu, String> {
    let to_f8 = |pool: &DeviceBuffer| {
        let bytes = cuda.stream().download_all::<u8>(pool).map_err(say)?;
        let codes: Vec<u8> =
            widened(&bytes, dtype).into_iter().map(|x| F8E4M3::from_f32(x).to_bits()).collect();
        cuda.stream().upload_new(&codes).map_err(say)
    };
    let queries = cuda.stream().download_all::<u8>(q).map_err(say)?;
    Ok([cuda.stream().upload_new(&queries).map_err(say)?, to_f8(k)?, to_f8(v)?])
}

/// One set of tensors that a call works on.
struct Set {
    inputs: [CudaTensor; 3],
    /// Backward: the gradient of o; and before it o and lse, unless they are outputs of the same call.
    further: Vec<CudaTensor>,
    out: Out,
    /// Where q, k, v and the first output are.
    addresses: Addresses,
}

/// What a call writes: o; or the gradients of q, k and v, and behind them o and lse where the call computes these too.
struct Out(Vec<CudaTensor>);

impl Out {
    fn new(cuda: &Cuda, problem: &Problem, asked: &Asked) -> Result<Self, String> {
        let mut all = problem.signature().outputs().copied().collect::<Vec<_>>();
        if asked.forward_too {
            all.extend(problem.with_pass(Pass::Forward).with_lse().signature().outputs());
        }
        let outputs = all.iter().map(|of| cuda.empty(of.dtype, layout(asked, of.shape)).map_err(say));
        outputs.collect::<Result<_, _>>().map(Self)
    }
}

impl Set {
    /// Queues one call.
    fn call(&self, attention: &Attention<'_>, device: &Device, out: &mut Out) -> Result<(), String> {
        let [q, k, v] = &self.inputs;
        let mut run = || {
            let (q, k, v) = (q.view()?, k.view()?, v.view()?);
            let (d_o, [dq, dk, dv], o, lse) = match (&self.further[..], &mut out.0[..]) {
                ([o, lse, d_o], [dq, dk, dv]) => (d_o, [dq, dk, dv], o, lse),
                ([d_o], [dq, dk, dv, o, lse]) => {
                    let (mut into_o, mut into_lse) = (o.view_mut()?, lse.view_mut()?);
                    attention.run_into(device, &q, &k, &v, &mut into_o, Some(&mut into_lse))?;
                    (d_o, [dq, dk, dv], &*o, &*lse)
                }
                (_, out) => {
                    return attention.run_into(device, &q, &k, &v, &mut out[0].view_mut()?, None);
                }
            };
            let (o, lse, d_o) = (o.view()?, lse.view()?, d_o.view()?);
            let given = Backward::new([&q, &k, &v], &o, &lse, &d_o);
            let (mut dq, mut dk, mut dv) = (dq.view_mut()?, dk.view_mut()?, dv.view_mut()?);
            attention.backward_into(device, &given, &mut dq, &mut dk, &mut dv)
        };
        run().map_err(say)
    }

    /// Records one call.
    fn record<'a>(
        &'a self,
        recorder: &mut Recorder<'a>,
        attention: &Attention<'a>,
        out: &'a Out,
    ) -> flashcore::Result<()> {
        let [q, k, v] = &self.inputs;
        match (&self.further[..], &out.0[..]) {
            ([o, lse, d_o], [dq, dk, dv]) => {
                recorder.backward(attention, [q, k, v, o, lse, d_o], [dq, dk, dv])
            }
            ([d_o], [dq, dk, dv, o, lse]) => {
                recorder.run(attention, [q, k, v], o, Some(lse))?;
                recorder.backward(attention, [q, k, v, o, lse, d_o], [dq, dk, dv])
            }
            (_, out) => recorder.run(attention, [q, k, v], &out[0], None),
        }
    }
}

/// How tensors of a call lie in memory.
fn layout(asked: &Asked, shape: [usize; 4]) -> Layout {
    if asked.sequences.is_some() { ARRANGEMENT.layout(shape) } else { Layout::bhsd(shape) }
}

/// Where sequences of lengths of their own are, in the memory of the GPU.
#[derive(Default)]
struct Places {
    q_starts: Option<CudaTensor>,
    k_starts: Option<CudaTensor>,
    table: Option<CudaTensor>,
    lengths: Option<CudaLengths>,
}

impl Places {
    fn new(cuda: &Cuda, asked: &Asked) -> Result<Self, String> {
        let Some(sequences) = &asked.sequences else { return Ok(Self::default()) };
        let upload = |numbers: &[u32], shape: [usize; 2]| {
            let numbers: Vec<i32> = numbers.iter().map(|&number| number as i32).collect();
            cuda.upload(&Tensor::indices(&numbers, shape).map_err(say)?).map_err(say)
        };
        let starts = |lengths: &[u32]| upload(&starts(lengths), [1, lengths.len() + 1]);
        let packed = sequences.lie == Lie::Packed;
        let rows = sequences.keys.len();
        Ok(Self {
            q_starts: sequences.queries.as_deref().map(starts).transpose()?,
            k_starts: packed.then(|| starts(&sequences.keys)).transpose()?,
            table: match sequences.lie {
                Lie::Pages(_) => Some(upload(&asked.table, [rows, asked.table.len() / rows.max(1)])?),
                Lie::Cache | Lie::Packed => None,
            },
            lengths: (!packed).then(|| cuda.upload_lengths(&sequences.keys).map_err(say)).transpose()?,
        })
    }

    /// The call of a problem.
    fn attention(&self, problem: &Problem) -> Result<Attention<'_>, String> {
        let mut attention = Attention::new().mask(problem.mask).scale(problem.scale);
        if let Some(quantiser) = problem.quantise {
            attention = attention.fp8(quantiser);
        }
        if let Some(starts) = &self.q_starts {
            attention = attention.packed_queries(Starts::of(&starts.view().map_err(say)?, problem.len_q));
        }
        if let Some(starts) = &self.k_starts {
            attention = attention.packed_keys(Starts::of(&starts.view().map_err(say)?, problem.len_k));
        }
        if let Some(table) = &self.table {
            let table = table.view().map_err(say)?;
            attention = attention.paged(Pages::new(&table).with_most_keys(problem.len_k));
        }
        if let Some(lengths) = &self.lengths {
            attention = attention.key_lengths_on_device(lengths.view().map_err(say)?);
        }
        Ok(attention)
    }
}

/// A call with the sets of tensors that it takes in turn.
struct Bound<'a> {
    attention: Attention<'a>,
    sets: &'a [Set],
}

/// A problem with its tensors.
struct Ready {
    cuda: Cuda,
    asked: Asked,
    problem: Problem,
    places: Places,
    sets: Vec<Set>,
    /// What direct calls write to when their result is wanted.
    direct: Out,
    /// The same for replays.
    replayed: Out,
    /// The peer that does not fuse, once it is asked for.
    unfused: Option<Unfused>,
}

impl Ready {
    fn new(
        cuda: Cuda,
        pool: &PoolOnGpu,
        asked: Asked,
        problem: Problem,
        sets: usize,
    ) -> Result<Self, String> {
        let dtype = problem.dtype;
        let signature = problem.with_pass(Pass::Forward).with_lse().signature();
        let shape = |name| signature.iter().find(|of| of.name == name).map_or([0; 4], |of| of.shape);
        let names = [Name::Q, Name::K, Name::V];
        let dtypes = [dtype, problem.dtype_kv(), problem.dtype_kv()];
        let places = Places::new(&cuda, &asked)?;
        let attention = places.attention(&problem)?;
        let device = Device::cuda_with(cuda.clone());
        let set = |_| {
            let mut inputs = Vec::new();
            for ((name, dtype), pool) in names.into_iter().zip(dtypes).zip(pool) {
                let layout = layout(&asked, shape(name));
                inputs.push(if name != Name::Q && places.table.is_some() {
                    in_pages(&cuda, pool, dtype, layout, &asked, problem.len_k)?
                } else {
                    cut(&cuda, pool, 0, dtype, layout)?
                });
            }
            let mut inputs: [CudaTensor; 3] = inputs.try_into().map_err(|_| "three inputs".to_string())?;
            let mut further = Vec::new();
            if problem.pass == Pass::Backward {
                further.push(cut(&cuda, &pool[0], GRADIENT_FROM, dtype, layout(&asked, shape(Name::O)))?);
            }
            if problem.pass == Pass::Backward && !asked.forward_too {
                let empty = |dtype, name| cuda.empty(dtype, layout(&asked, shape(name))).map_err(say);
                let (mut o, mut lse) = (empty(dtype, Name::O)?, empty(DType::F32, Name::Lse)?);
                let [q, k, v] = &inputs;
                let mut run = || {
                    let (q, k, v) = (q.view()?, k.view()?, v.view()?);
                    attention.run_into(&device, &q, &k, &v, &mut o.view_mut()?, Some(&mut lse.view_mut()?))
                };
                run().map_err(say)?;
                further.splice(..0, [o, lse]);
            }
            let mut out = Out::new(&cuda, &problem, &asked)?;
            let [q, k, v] = inputs.each_mut().map(|tensor| tensor.buffer_mut().address());
            let addresses = [q, k, v, out.0[0].buffer_mut().address()];
            Ok(Set { inputs, further, out, addresses })
        };
        let sets = (0..sets.max(1)).map(set).collect::<Result<Vec<Set>, String>>()?;
        let out = || Out::new(&cuda, &problem, &asked);
        let (direct, replayed) = (out()?, out()?);
        cuda.synchronize().map_err(say)?;
        Ok(Self { cuda, asked, problem, places, sets, direct, replayed, unfused: None })
    }

    /// Answers requests about this problem, until one is about something else.
    fn serve(mut self, lines: &mut Lines<StdinLock<'_>>) -> Option<Result<Request, String>> {
        // Recordings borrow the sets, so these are kept apart from what the other requests change.
        let (sets, places) = (std::mem::take(&mut self.sets), std::mem::take(&mut self.places));
        // It was made before, from the same.
        let bound = Bound { attention: places.attention(&self.problem).ok()?, sets: &sets };
        let mut recordings: HashMap<(String, usize), Recording<'_>> = HashMap::new();
        let mut graphs: HashMap<usize, GraphExec> = HashMap::new();
        loop {
            let request = match read(lines)? {
                Ok(request) => request,
                Err(why) => {
                    reply(Err(why));
                    continue;
                }
            };
            let answer = match request {
                Request::First { who } => self.first(&who, &bound),
                Request::Output { who, rows, path } => self.output(&who, &bound, &rows, &path),
                Request::Sample { who, warm, calls, replays } => {
                    let calls = (calls.max(1) as usize).next_multiple_of(sets.len());
                    let replays = [warm, replays].map(|replays| replays.max(1));
                    if who == CUBLAS {
                        reply(self.sample_unfused(&mut graphs, &sets, calls, replays));
                        continue;
                    }
                    self.sample(&mut recordings, &bound, &(who, calls), replays)
                }
                Request::Calls { who, calls } => self.calls(&who, &bound, calls as usize),
                Request::Check { who } => self.check(&who, &bound),
                Request::Plan { who } => self.plan(&who),
                other => return Some(Ok(other)),
            };
            reply(answer);
        }
    }

    fn variant(&self, who: &str) -> Result<Cuda, String> {
        if let Some(kernel) = who.strip_prefix(KERNEL) {
            return Ok(self.cuda.with_kernel(kernel.parse().map_err(say)?));
        }
        if let Some(schedule) = who.strip_prefix(SCHEDULE) {
            return Ok(self.cuda.with_schedule(schedule.parse().map_err(say)?));
        }
        if who == PLANNER { Ok(self.cuda.clone()) } else { Err(format!("'{who}' is not known here")) }
    }

    fn first(&mut self, who: &str, bound: &Bound<'_>) -> Result<Value, String> {
        let cuda = self.variant(who)?;
        let device = Device::cuda_with(cuda.clone());
        let start = Instant::now();
        bound.sets[0].call(&bound.attention, &device, &mut self.direct)?;
        cuda.synchronize().map_err(say)?;
        Ok(json!({ "us": start.elapsed().as_secs_f64() * 1e6 }))
    }

    /// The peer that does not fuse, made ready when it is first asked for.
    fn unfused(&mut self) -> Result<&Unfused, String> {
        if self.unfused.is_none() {
            self.unfused = Some(Unfused::new(&self.cuda, &self.problem)?);
        }
        self.unfused.as_ref().ok_or_else(|| "it is not ready".into())
    }

    /// Queues one of its calls on a set's inputs, into the tensor that direct calls write to.
    #[allow(unsafe_code)] // Tensors are passed as addresses.
    fn call_unfused(&mut self, set: &Set) -> Result<(), String> {
        let [q, k, v, _] = set.addresses;
        let o = self.direct.0[0].buffer_mut().address();
        // SAFETY: the tensors are the problem's, contiguous, and outlive every synchronisation of this worker.
        unsafe { self.unfused()?.queue([q, k, v, o]) }
    }

    #[allow(unsafe_code)] // A replay reaches memory through addresses.
    fn sample_unfused(
        &mut self,
        graphs: &mut HashMap<usize, GraphExec>,
        sets: &[Set],
        calls: usize,
        replays: [u32; 2],
    ) -> Result<Value, String> {
        let cuda = self.cuda.clone();
        if let Entry::Vacant(place) = graphs.entry(calls) {
            let addresses: Vec<Addresses> = sets.iter().map(|set| set.addresses).collect();
            // What cuBLAS loads on its first call cannot be recorded.
            self.call_unfused(&sets[0])?;
            cuda.synchronize().map_err(say)?;
            // SAFETY: as for a call; graphs are dropped before the sets.
            let graph = unsafe { self.unfused()?.record(&addresses, calls) }?;
            place.insert(graph);
        }
        let graph = &graphs[&calls];
        // SAFETY: as above.
        timed(&cuda, replays, calls, || unsafe { graph.launch(cuda.stream()) }.map_err(say)).map(written)
    }

    /// What one direct call writes into poisoned memory.
    fn direct_bits(&mut self, who: &str, bound: &Bound<'_>) -> Result<Vec<u16>, String> {
        if who == CUBLAS {
            let cuda = self.cuda.clone();
            poison(&cuda, &mut self.direct)?;
            self.call_unfused(&bound.sets[0])?;
            return download(&cuda, &self.direct);
        }
        let cuda = self.variant(who)?;
        poison(&cuda, &mut self.direct)?;
        bound.sets[0].call(&bound.attention, &Device::cuda_with(cuda.clone()), &mut self.direct)?;
        download(&cuda, &self.direct)
    }

    fn output(&mut self, who: &str, bound: &Bound<'_>, rows: &[usize], path: &Path) -> Result<Value, String> {
        let bits = self.direct_bits(who, bound)?;
        let unwritten = bits.iter().filter(|&&bits| bits == POISON).count();
        if unwritten > 0 {
            return Err(format!("{unwritten} of {} elements were never written", bits.len()));
        }
        let (_, width) = self.asked.judged();
        let chosen = rows.iter().flat_map(|row| bits.get(row * width..(row + 1) * width).unwrap_or_default());
        let bytes: Vec<u8> = chosen.flat_map(|bits| bits.to_le_bytes()).collect();
        std::fs::write(path, &bytes).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(json!({ "bytes": bytes.len() }))
    }

    fn check(&mut self, who: &str, bound: &Bound<'_>) -> Result<Value, String> {
        let direct = self.direct_bits(who, bound)?;
        let cuda = self.variant(who)?;
        poison(&cuda, &mut self.replayed)?;
        let recording = cuda.record(|calls| bound.sets[0].record(calls, &bound.attention, &self.replayed));
        recording.and_then(|recording| recording.replay()).map_err(say)?;
        let replayed = download(&cuda, &self.replayed)?;
        Ok(json!({ "same": direct == replayed }))
    }

    fn sample<'a>(
        &self,
        recordings: &mut HashMap<(String, usize), Recording<'a>>,
        bound: &Bound<'a>,
        who: &(String, usize),
        replays: [u32; 2],
    ) -> Result<Value, String> {
        let (calls, &Bound { attention, sets }) = (who.1, bound);
        let cuda = self.variant(&who.0)?;
        if !recordings.contains_key(who) {
            let recording = cuda.record(|recorder| {
                (0..calls).try_for_each(|call| {
                    let set = &sets[call % sets.len()];
                    set.record(recorder, &attention, &set.out)
                })
            });
            recordings.insert(who.clone(), recording.map_err(say)?);
        }
        let recording = &recordings[who];
        timed(&cuda, replays, calls, || recording.replay().map_err(say)).map(written)
    }

    fn calls(&mut self, who: &str, bound: &Bound<'_>, calls: usize) -> Result<Value, String> {
        let sets = bound.sets;
        if who == CUBLAS {
            let cuda = self.cuda.clone();
            return call_clock(&cuda, calls, sets.len(), |call| self.call_unfused(&sets[call % sets.len()]));
        }
        let cuda = self.variant(who)?;
        let device = Device::cuda_with(cuda.clone());
        call_clock(&cuda, calls, sets.len(), |call| {
            sets[call % sets.len()].call(&bound.attention, &device, &mut self.direct)
        })
    }

    fn plan(&self, who: &str) -> Result<Value, String> {
        let cuda = self.variant(who)?;
        let plan = cuda.plan(&self.problem).map_err(say)?;
        let attributes = cuda.function(&self.problem).map_err(say)?.attributes().map_err(say)?;
        Ok(json!({
            "kernel": plan.kernel().name(),
            "schedule": plan.main().schedule.to_string(),
            "target": plan.target.name(),
            "reason": plan.reason,
            "grid": plan.main().grid,
            "threads": plan.main().threads,
            "shared_bytes": plan.main().shared_bytes,
            "registers": attributes.registers,
            "local_bytes": attributes.local_bytes,
            "code": cuda.code_hash(&self.problem).map_err(say)?,
        }))
    }
}

/// A sample as the reply has it.
fn written((us, calls): (f64, usize)) -> Value {
    json!({ "us": us, "calls": calls })
}

/// Microseconds per call, and how many calls: some replays of recorded calls between two events, after others that keep
/// the GPU busy meanwhile.
pub(crate) fn timed(
    cuda: &Cuda,
    [warm, replays]: [u32; 2],
    calls: usize,
    replay: impl Fn() -> Result<(), String>,
) -> Result<(f64, usize), String> {
    let event = || Event::new(cuda.context(), EventKind::Timing).map_err(say);
    let (start, end) = (event()?, event()?);
    for _ in 0..warm {
        replay()?;
    }
    start.record(cuda.stream()).map_err(say)?;
    for _ in 0..replays {
        replay()?;
    }
    end.record(cuda.stream()).map_err(say)?;
    end.synchronize().map_err(say)?;
    let ms = end.ms_since(&start).map_err(say)?;
    let calls = calls * replays as usize;
    Ok((f64::from(ms) * 1e3 / calls as f64, calls))
}

/// Samples of the call clock: every call between two events, and then the host's own time for as many. Before that,
/// each of the `sets` is called until it is warm.
fn call_clock(
    cuda: &Cuda,
    calls: usize,
    sets: usize,
    mut run: impl FnMut(usize) -> Result<(), String>,
) -> Result<Value, String> {
    for call in 0..(WARM_UPS * sets).max(QUEUED) {
        run(call)?;
    }
    cuda.synchronize().map_err(say)?;
    let event = || Event::new(cuda.context(), EventKind::Timing).map_err(say);
    let (start, end) = (event()?, event()?);
    let mut call_us = Vec::with_capacity(calls);
    for call in 0..calls {
        start.record(cuda.stream()).map_err(say)?;
        run(call)?;
        end.record(cuda.stream()).map_err(say)?;
        cuda.synchronize().map_err(say)?;
        call_us.push(f64::from(end.ms_since(&start).map_err(say)?) * 1e3);
    }
    let mut host_us = Vec::with_capacity(calls);
    for call in 0..calls {
        let start = Instant::now();
        run(call)?;
        host_us.push(start.elapsed().as_secs_f64() * 1e6);
        if call % QUEUED == QUEUED - 1 {
            cuda.synchronize().map_err(say)?;
        }
    }
    cuda.synchronize().map_err(say)?;
    Ok(json!({ "call_us": call_us, "host_us": host_us }))
}

/// Every bit set: a NaN that no arithmetic gives.
const POISON: u16 = 0xffff;

/// How many outputs come before lse: gradients and o.
const BEFORE_LSE: usize = 4;

fn poison(cuda: &Cuda, out: &mut Out) -> Result<(), String> {
    out.0.iter_mut().try_for_each(|tensor| cuda.fill(tensor, POISON as u8)).map_err(say)
}

/// The bits of all outputs but lse, each in the order (batch, heads, length, head_dim), one behind the other.
fn download(cuda: &Cuda, out: &Out) -> Result<Vec<u16>, String> {
    let mut bits = Vec::new();
    for tensor in out.0.iter().take(BEFORE_LSE) {
        let view = tensor.view().map_err(say)?;
        let mut host = TensorBuf::zeros(view.dtype(), Layout::bhsd(view.shape())).map_err(say)?;
        cuda.download(tensor, &mut host.view_mut()).map_err(say)?;
        match host.storage() {
            Storage::F16(values) => bits.extend(values.iter().map(|value| value.to_bits())),
            Storage::BF16(values) => bits.extend(values.iter().map(|value| value.to_bits())),
            Storage::F32(_) | Storage::F8E4M3(_) | Storage::I32(_) => {
                return Err("on a GPU outputs of f16 and bf16 are timed".into());
            }
        }
    }
    Ok(bits)
}

/// A tensor taken from a pool, from an element on, going through it as often as it takes.
fn cut(
    cuda: &Cuda,
    pool: &DeviceBuffer,
    from: usize,
    dtype: DType,
    layout: Layout,
) -> Result<CudaTensor, String> {
    let mut tensor = cuda.empty(dtype, layout).map_err(say)?;
    let total = layout.shape.iter().product::<usize>() * dtype.size();
    copy(cuda, pool, from * dtype.size(), &mut tensor, 0..total)?;
    Ok(tensor)
}

/// Fills some bytes of a tensor from a pool.
fn copy(
    cuda: &Cuda,
    pool: &DeviceBuffer,
    from: usize,
    tensor: &mut CudaTensor,
    bytes: Range<usize>,
) -> Result<(), String> {
    let (mut filled, mut start) = (bytes.start, from % pool.len().max(1));
    while filled < bytes.end {
        let part = (pool.len() - start).min(bytes.end - filled);
        cuda.stream().copy(tensor.buffer_mut(), filled, pool, start, part).map_err(say)?;
        (filled, start) = (filled + part, 0);
    }
    Ok(())
}

/// A pool of pages that hold what a cache of `len_k` keys of each sequence would. All other bytes are NaN.
fn in_pages(
    cuda: &Cuda,
    pool: &DeviceBuffer,
    dtype: DType,
    layout: Layout,
    asked: &Asked,
    len_k: usize,
) -> Result<CudaTensor, String> {
    let [_, heads, page, width] = layout.shape;
    let lengths = asked.sequences.as_ref().map_or(&[][..], |sequences| &sequences.keys);
    let mut tensor = cuda.empty(dtype, layout).map_err(say)?;
    cuda.fill(&mut tensor, POISON as u8).map_err(say)?;
    let token = heads * width * dtype.size();
    let pages = len_k.div_ceil(page);
    for (sequence, &len) in lengths.iter().enumerate() {
        for (n, key) in (0..len as usize).step_by(page).enumerate() {
            let to = asked.table[sequence * pages + n] as usize * page * token;
            let bytes = to..to + page.min(len as usize - key) * token;
            copy(cuda, pool, (sequence * len_k + key) * token, &mut tensor, bytes)?;
        }
    }
    Ok(tensor)
}
