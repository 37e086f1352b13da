//! A kernel that stamps its sections, run as the kernel clock runs it: calls back to back in one graph.
//!
//! The first call of the graph, the last but one and the last write to memory of their own. The last is the trace; the one
//! before it says when the GPU became free; the first one, far back, gives the rate of the multiprocessors' clocks.

use std::time::Duration;

use flashcore::cuda::driver::{CaptureMode, DeviceBuffer, DriverError, GraphExec};
use flashcore::cuda::{Cuda, CudaTensor};
use flashcore::plan::Plan;
use flashcore::{Device, Layout, Problem};
use flashcore_judge::operands::Operands;
use flashcore_judge::stats;
use flashcore_ptx::{TraceSize, Track};

use crate::timing::{Contender, Effort, SAMPLE, measure};
use crate::worker::timed;

/// The most memory for stamps; of a launch that would need more, the first blocks are recorded.
const MOST_BYTES: usize = 1 << 30;
/// A graph of calls is about so long, in microseconds: enough to tell the rate of a clock by another of coarse ticks.
const GRAPH_US: f64 = 500.0;
/// The fewest and the most calls of a graph.
const CALLS: (f64, f64) = (3.0, 100.0);
/// How often the graph is replayed.
const REPLAYS: usize = 5;
/// How long the kernel clock may take.
const BUDGET: Duration = Duration::from_secs(2);

/// What was recorded and timed.
pub struct Recorded {
    /// The kernel clock without stamps, in microseconds.
    pub plain_us: f64,
    /// The kernel clock with stamps.
    pub stamped_us: f64,
    /// Registers per thread and bytes of local memory, without stamps and with them.
    pub registers: [(u32, u32); 2],
    /// The replays.
    pub replays: Vec<Replay>,
    /// Blocks of the launch, and how many of them were recorded.
    pub blocks: (u32, u32),
}

/// The tracks of three calls of a graph.
pub struct Replay {
    /// Of its first call: where they began and ended.
    pub first: Vec<Track>,
    /// Of the last call but one: where they began and ended.
    pub before: Vec<Track>,
    /// Of its last call.
    pub last: Vec<Track>,
}

fn say(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Memory for stamps, filled with ones.
struct Stamps {
    buffer: DeviceBuffer,
    size: TraceSize,
}

impl Stamps {
    fn new(cuda: &Cuda, size: TraceSize) -> Result<Self, String> {
        let mut buffer = cuda.context().alloc(size.bytes()).map_err(say)?;
        cuda.stream().fill_bytes(&mut buffer, 0, size.bytes(), u8::MAX).map_err(say)?;
        Ok(Self { buffer, size })
    }

    /// The device whose kernels write there.
    #[allow(unsafe_code)] // The memory is passed as an address.
    fn device(&self, cuda: &Cuda) -> Cuda {
        // SAFETY: it outlives every synchronisation with the calls, which run one after the other in one stream.
        unsafe { cuda.with_trace(self.buffer.address(), self.size) }
    }

    fn read(&self, cuda: &Cuda) -> Result<Vec<Track>, String> {
        let bytes: Vec<u8> = cuda.stream().download_all(&self.buffer).map_err(say)?;
        Ok(self.size.read(&bytes))
    }
}

/// The tensors of a call.
struct Call<'a> {
    operands: &'a Operands,
    inputs: [CudaTensor; 3],
    o: CudaTensor,
}

impl<'a> Call<'a> {
    fn new(cuda: &Cuda, operands: &'a Operands) -> Result<Self, String> {
        let Operands { q, k, v, problem, .. } = operands;
        let Problem { batch, heads_q, len_q, head_dim_v, .. } = *problem;
        let put = |tensor: &flashcore::Tensor<'_>| cuda.upload(tensor).map_err(say);
        let inputs = [put(&q.view())?, put(&k.view())?, put(&v.view())?];
        let o = cuda.empty(problem.out(), Layout::bhsd([batch, heads_q, len_q, head_dim_v])).map_err(say)?;
        Ok(Self { operands, inputs, o })
    }

    /// Queues one call.
    fn queue(&mut self, cuda: &Cuda) -> Result<(), String> {
        let [q, k, v] = &self.inputs;
        let device = Device::cuda_with(cuda.clone());
        let mut run = || {
            let (q, k, v) = (q.view()?, k.view()?, v.view()?);
            self.operands.attention().run_into(&device, &q, &k, &v, &mut self.o.view_mut()?, None)
        };
        run().map_err(say)
    }

    /// A graph of calls, the devices one after the other. Their kernels must have run before.
    fn graph<'b>(&mut self, devices: impl Iterator<Item = &'b Cuda>, on: &Cuda) -> Result<GraphExec, String> {
        let work = |_: &_| {
            for device in devices {
                self.queue(device).map_err(Failure)?;
            }
            Ok(())
        };
        let graph = on.stream().capture(CaptureMode::ThreadLocal, work).map_err(|Failure(why)| why)?;
        let exec = graph.instantiate().map_err(say)?;
        exec.upload(on.stream()).map_err(say)?;
        Ok(exec)
    }
}

/// Why nothing was recorded.
struct Failure(String);

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Failure(error.to_string())
    }
}

/// A device on the kernel clock.
struct Clocked<'a, 'b> {
    name: &'static str,
    cuda: Cuda,
    call: &'a std::cell::RefCell<Call<'b>>,
    graph: Option<(u32, GraphExec)>,
}

impl Contender for Clocked<'_, '_> {
    fn name(&self) -> String {
        self.name.into()
    }

    #[allow(unsafe_code)] // A replay reaches memory through addresses.
    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String> {
        if self.graph.as_ref().is_none_or(|(of, _)| *of != calls) {
            let devices = std::iter::repeat_n(&self.cuda, calls as usize);
            self.graph = Some((calls, self.call.borrow_mut().graph(devices, &self.cuda)?));
        }
        let Some((_, graph)) = &self.graph else { return Err("nothing was recorded".into()) };
        // SAFETY: the call's tensors outlive the clock, and so do the kernels, which the device keeps.
        let replay = || unsafe { graph.launch(self.cuda.stream()) }.map_err(say);
        timed(&self.cuda, [warm.max(1), 1], calls as usize, replay).map(|(us, _)| us)
    }
}

/// Runs the main kernel of a plan with stamps and without. The device's choice is the plan's schedule.
#[allow(unsafe_code)] // A replay reaches memory through addresses.
pub fn record(cuda: &Cuda, plan: &Plan, operands: &Operands) -> Result<Recorded, String> {
    let cuda = cuda.on_new_stream().map_err(say)?.with_schedule(plan.main().schedule);
    let mut call = Call::new(&cuda, operands)?;
    // Without room for any stamp, all are counted.
    let none = plan.trace_size(0);
    let [first, before] = [Stamps::new(&cuda, none)?, Stamps::new(&cuda, none)?];
    let devices = [&first, &before].map(|stamps| stamps.device(&cuda));
    for device in [&cuda, &devices[0], &devices[1]] {
        call.queue(device)?;
    }
    let most = first.read(&cuda)?.iter().map(|track| track.lost).max().unwrap_or(0);
    let all = plan.trace_size(most);
    let each = all.bytes() / all.blocks.max(1) as usize;
    let size = TraceSize { blocks: all.blocks.min((MOST_BYTES / each.max(1)) as u32), ..all };
    let last = Stamps::new(&cuda, size)?;
    let traced = last.device(&cuda);
    call.queue(&traced)?;
    cuda.synchronize().map_err(say)?;

    let registers = [&cuda, &traced].map(|device| {
        let attributes = device.function(&plan.problem).map_err(say)?.attributes().map_err(say)?;
        Ok::<_, String>((attributes.registers, attributes.local_bytes))
    });
    let [plain, stamped] = registers;
    let call = std::cell::RefCell::new(call);
    let clocked = |name, device: &Cuda| -> Box<dyn Contender + '_> {
        Box::new(Clocked { name, cuda: device.clone(), call: &call, graph: None })
    };
    let effort =
        Effort { rounds: None, budget: BUDGET, margin: 0.01, settle: Duration::ZERO, sample: SAMPLE };
    let mut contenders = [clocked("plain", &cuda), clocked("stamped", &traced)];
    let samples = measure(&mut contenders, &effort, &|| false, &mut |_, _| {});
    drop(contenders);
    let time = |i: usize| match (&samples[i].failure, stats::median(&samples[i].times)) {
        (None, Some(us)) => Ok(us),
        (why, _) => Err(why.clone().unwrap_or_else(|| "the kernel was not timed".into())),
    };
    let (plain_us, stamped_us) = (time(0)?, time(1)?);

    let calls = (GRAPH_US / stamped_us).ceil().clamp(CALLS.0, CALLS.1) as usize;
    let between = std::iter::repeat_n(&devices[1], calls - 2);
    let order = std::iter::once(&devices[0]).chain(between).chain([&traced]);
    let graph = call.borrow_mut().graph(order, &cuda)?;
    let mut replays = Vec::new();
    for _ in 0..REPLAYS {
        // The first of two brings the clocks up.
        for _ in 0..2 {
            // SAFETY: tensors, stamps and kernels are there until the function returns, and it waits for the calls.
            unsafe { graph.launch(cuda.stream()) }.map_err(say)?;
        }
        let [first, before, last] = [&first, &before, &last].map(|stamps| stamps.read(&cuda));
        replays.push(Replay { first: first?, before: before?, last: last? });
    }
    let blocks = (all.blocks, size.blocks);
    Ok(Recorded { plain_us, stamped_us, registers: [plain?, stamped?], replays, blocks })
}
