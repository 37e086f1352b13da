//! What the simulator's tests share: kernels with one input and one output, run under every policy.
#![allow(dead_code)]

use flashcore_ptx::*;
use flashcore_sim::*;

kernel_params! {
    /// One buffer to read, one to write, a number.
    pub struct Io {
        x: GlobalPtr,
        y: GlobalPtr,
        n: u32,
    }
}

kernel_params! {
    /// Tensor maps of what is read and written, and the same as plain pointers.
    pub struct Maps {
        x_map: flashcore_ptx::TensorMap,
        y_map: flashcore_ptx::TensorMap,
        x: GlobalPtr,
        y: GlobalPtr,
        n: u32,
    }
}

/// Late, early and random completion, each with several interleavings.
pub fn policies() -> Vec<Config> {
    let mut configs = Vec::new();
    for async_mode in [AsyncMode::Late, AsyncMode::Early, AsyncMode::Random(1), AsyncMode::Random(2)] {
        for seed in [0, 1, 2] {
            configs.push(Config { async_mode, seed, threads: 1, budget: 4_000_000, ..Config::default() });
        }
    }
    configs
}

/// A kernel of [`Io`] with blocks of so many threads.
pub fn kernel(
    threads: u32,
    shared: SharedLayout,
    target: Target,
    emit: impl FnOnce(&mut KernelBuilder),
) -> Module {
    let mut k = KernelBuilder::new("test", target).params::<Io>().shared(shared).threads(threads);
    emit(&mut k);
    Module::new(target).with(k.finish().expect("the test kernel is well formed"))
}

/// A kernel of [`Maps`] for Hopper.
pub fn hopper(threads: u32, shared: SharedLayout, emit: impl FnOnce(&mut KernelBuilder)) -> Module {
    try_hopper(threads, shared, emit).expect("the test kernel is well formed")
}

/// The same, or what the ptx crate's own checker has to say about it.
pub fn try_hopper(
    threads: u32,
    shared: SharedLayout,
    emit: impl FnOnce(&mut KernelBuilder),
) -> Result<Module, BuildErrors> {
    let mut k = KernelBuilder::new("test", Target::Sm90a)
        .params::<Maps>()
        .shared(shared)
        .threads(threads)
        .min_blocks_per_sm(1);
    emit(&mut k);
    Ok(Module::new(Target::Sm90a).with(k.finish()?))
}

/// What a run left behind.
pub struct Outcome {
    pub report: LaunchReport,
    pub y: Vec<u8>,
    pub unwritten: Vec<std::ops::Range<usize>>,
}

impl Outcome {
    pub fn f32s(&self) -> Vec<f32> {
        self.y.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    pub fn u32s(&self) -> Vec<u32> {
        self.y.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    pub fn f16s(&self) -> Vec<f32> {
        self.y.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
    }
}

/// Runs a kernel of [`Io`]: `x` is given, `y` has so many bytes without values, `n` is given.
pub fn run(module: &Module, grid: u32, x: &[u8], y_bytes: usize, n: u32, config: Config) -> Outcome {
    let threads = module.kernels[0].threads.expect("test kernels say their size").count();
    let mut sim = Sim::new(config);
    let (xb, yb) = (sim.alloc_from("x", x), sim.alloc("y", y_bytes));
    let params = Io { x: GlobalPtr(xb.address), y: GlobalPtr(yb.address), n };
    let report = sim
        .launch(module, "test", LaunchDims::linear(grid, threads), &params.pack())
        .expect("the launch is possible");
    Outcome { report, y: sim.read(yb), unwritten: sim.unwritten(yb) }
}

/// Runs a kernel of [`Maps`]; the maps are made from the buffers' addresses.
pub fn run_maps(
    module: &Module,
    grid: u32,
    x: &[u8],
    y_bytes: usize,
    n: u32,
    maps: &dyn Fn(u64, u64) -> (flashcore_sim::TensorMap, flashcore_sim::TensorMap),
    config: Config,
) -> Outcome {
    let threads = module.kernels[0].threads.expect("test kernels say their size").count();
    let mut sim = Sim::new(config);
    let (xb, yb) = (sim.alloc_from("x", x), sim.alloc("y", y_bytes));
    let (x_map, y_map) = maps(xb.address, yb.address);
    let params = Maps {
        x_map: flashcore_ptx::TensorMap(x_map.encode().expect("a valid map")),
        y_map: flashcore_ptx::TensorMap(y_map.encode().expect("a valid map")),
        x: GlobalPtr(xb.address),
        y: GlobalPtr(yb.address),
        n,
    };
    let report = sim
        .launch(module, "test", LaunchDims::linear(grid, threads), &params.pack())
        .expect("the launch is possible");
    Outcome { report, y: sim.read(yb), unwritten: sim.unwritten(yb) }
}

/// Requires that nothing is found.
#[track_caller]
pub fn assert_clean(outcome: &Outcome, config: &Config) {
    let text: Vec<String> = outcome.report.findings.iter().map(ToString::to_string).collect();
    assert!(text.is_empty(), "under {:?} seed {}:\n{}", config.async_mode, config.seed, text.join("\n"));
}

/// Requires that something of this kind is found, and returns it.
#[track_caller]
pub fn assert_found(outcome: &Outcome, config: &Config, kind: FindingKind) -> Finding {
    let text: Vec<String> = outcome.report.findings.iter().map(ToString::to_string).collect();
    match outcome.report.of(kind).next() {
        Some(finding) => finding.clone(),
        None => panic!(
            "under {:?} seed {}: no {kind:?} among\n{}",
            config.async_mode,
            config.seed,
            text.join("\n")
        ),
    }
}

/// The module without what an instruction orders, or `None` where it orders nothing.
pub fn without(module: &Module, at: usize) -> Option<(String, Module)> {
    let mut mutant = module.clone();
    let kernel = &mut mutant.kernels[0];
    let inst = &kernel.body[at];
    let name = format!("#{at} {} ({})", kernel.line(inst), kernel.describe(at));
    match inst.op {
        // A wait that always says yes.
        Op::MbarrierTryWait { .. } => {
            let yes = Arg::Imm(Imm { class: RegClass::Pred, bits: 1 });
            let inst = &mut kernel.body[at];
            inst.op = Op::Alu(Alu::MovPred);
            inst.src = vec![yes];
        }
        Op::MbarrierInit
        | Op::MbarrierArrive { .. }
        | Op::MbarrierArriveExpectTx { .. }
        | Op::FenceMbarrierInit
        | Op::FenceProxyAsync(_)
        | Op::BarSync { .. }
        | Op::WgmmaFence
        | Op::WgmmaCommit
        | Op::WgmmaWait(_)
        | Op::BulkCommit
        | Op::BulkWait { .. }
        | Op::SetMaxNReg { .. }
        | Op::TensorLoad { .. } => {
            kernel.body.remove(at);
        }
        _ => return None,
    }
    Some((name, mutant))
}

/// Little-endian bytes of f16 values.
pub fn f16_bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect()
}

/// Little-endian bytes of words.
pub fn u32_bytes(values: impl IntoIterator<Item = u32>) -> Vec<u8> {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Small whole numbers that no arithmetic rounds, different from place to place.
pub fn small(i: usize) -> f32 {
    ((i * 7 + i / 13) % 9) as f32 - 4.0
}
