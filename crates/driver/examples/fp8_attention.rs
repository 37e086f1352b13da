//! Runs Hopper's forward kernel with 8-bit floats on this GPU, checks some rows against f64, and times it.
//!
//! ```text
//! cargo run --release -p flashcore-driver --example fp8_attention -- \
//!     [--batch 1] [--heads 16] [--kv-heads 16] [--queries 16384] [--keys 16384] [--dim 128] \
//!     [--causal 1] [--knobs flush=0,block_n=160]
//! ```
//!
//! `--knobs` changes the default schedule, or is a whole one of another kernel:
//! `sm80_fwd:block_m=128,block_n=64,warps=8,stages=2,q_in_regs=0,order=head`. The exit status is 0 when all rows that were checked are right, 1 when one is
//! not, 2 when there is no Hopper GPU.

#![allow(unsafe_code)] // Launches are unsafe by nature; the kernel here is given buffers that outlive it.
#![allow(missing_docs)] // A program, not a library.

use std::{collections::BTreeMap, error::Error, process::ExitCode};

use flashcore_driver::{
    ComputeCapability, Context, DeviceBuffer, Driver, Event, EventKind, JitOptions, L2Promotion,
    LaunchConfig, OutOfBounds, StreamOptions, Swizzle, TensorMapElement, TensorMapSpec,
};
use flashcore_kernels::{
    Args, ElementType, Kernel, Map, Operand, Packed, Schedule, Section, Spec, TensorArg,
};
use flashcore_ptx::{Target, TensorMap};
use float8::F8E4M3;

/// Rows that are checked.
const ROWS: usize = 24;
/// The most that they may be off: probabilities are rounded to three bits, and 8-bit sums that are not flushed drift.
const MOST_ERROR: f64 = 0.06;
/// Launches that are timed together, and how often.
const LAUNCHES: u32 = 10;
const ROUNDS: usize = 15;
/// Keys and values of heads that are processed together: they should stay in the L2 cache.
const SECTION_BYTES: usize = 32 << 20;
/// What the stored queries, keys and values are multiplied by.
const DESCALES: [f32; 3] = [0.5, 1.5, 3.0];

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Shape {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    dim: usize,
    causal: bool,
    knobs: String,
}

impl Shape {
    fn read() -> Result<Self> {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let mut given: BTreeMap<&str, &str> = BTreeMap::new();
        for pair in words.chunks(2) {
            let [name, value] = pair else { return Err(format!("{} needs a value", pair[0]).into()) };
            given.insert(name, value);
        }
        let mut number = |name: &str, default: usize| match given.remove(name) {
            Some(text) => text.parse().map_err(|_| format!("{name} {text}: a whole number is needed")),
            None => Ok(default),
        };
        let (batch, heads) = (number("--batch", 1)?, number("--heads", 16)?);
        let (kv_heads, queries) = (number("--kv-heads", heads)?, number("--queries", 16384)?);
        let (keys, dim) = (number("--keys", queries)?, number("--dim", 128)?);
        let causal = number("--causal", 0)? != 0;
        let knobs = given.remove("--knobs").unwrap_or_default().to_owned();
        match given.keys().next() {
            Some(unknown) => Err(format!("{unknown} is not known; see the top of this example").into()),
            None => Ok(Self { batch, heads, kv_heads, queries, keys, dim, causal, knobs }),
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    fn flops(&self) -> f64 {
        let pairs = if self.causal {
            (0..self.queries).map(|i| self.seen(i) as f64).sum()
        } else {
            self.queries as f64 * self.keys as f64
        };
        4.0 * (self.batch * self.heads * self.dim) as f64 * pairs
    }

    /// How many keys a query sees: the last one sees them all.
    fn seen(&self, query: usize) -> usize {
        if self.causal { (query + 1 + self.keys).saturating_sub(self.queries) } else { self.keys }
    }

    /// The default schedule with these knobs.
    fn schedule(&self, spec: &Spec) -> Result<Schedule> {
        if self.knobs.contains(':') {
            return Ok(self.knobs.parse()?);
        }
        let (warpgroups, block_n, q_stages) = match spec.head_dim.max(spec.head_dim_v) {
            ..=64 => (3, 128, 2),
            65..=128 => (2, 128, 2),
            129..=192 => (2, 96, 1),
            _ => (2, 64, 1),
        };
        let text = format!(
            "sm90_fwd:warpgroups={warpgroups},block_n={block_n},stages=2,q_stages={q_stages},ctas=1,split=1,pingpong=1,\
             lazy=0,poly=0,persistent=1,pairs=0"
        );
        let name = |knob: &str| knob.split('=').next().unwrap_or_default().to_owned();
        let changed: Vec<&str> = self.knobs.split(',').filter(|knob| !knob.is_empty()).collect();
        let kept = text
            .split([':', ','])
            .skip(1)
            .filter(|knob| !changed.iter().any(|other| name(other) == name(knob)));
        let knobs: Vec<&str> = kept.chain(changed.iter().copied()).collect();
        Ok(format!("sm90_fwd:{}", knobs.join(",")).parse()?)
    }

    /// The heads that are processed together.
    fn section(&self, rows: u32) -> Section {
        let all = self.batch * self.heads;
        let cached = SECTION_BYTES * (self.heads / self.kv_heads) / (2 * self.keys * self.dim);
        let fits = (1..=all).rev().find(|&heads| all.is_multiple_of(heads) && heads <= cached.max(1));
        let heads = fits.unwrap_or(1) as u32;
        Section { heads, places: heads * (self.queries as u32).div_ceil(rows) }
    }
}

/// Codes of about normal numbers.
fn codes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state
    };
    // By the sum of four numbers from 0 to 31.
    let table: Vec<u8> = (0..128).map(|i| F8E4M3::from_f32((i as f32 - 62.0) / 18.5).to_bits()).collect();
    (0..len)
        .map(|_| {
            let word = random() >> 32;
            let sum: u64 = (0..4).map(|i| word >> (8 * i) & 31).sum();
            table[sum as usize]
        })
        .collect()
}

fn value(code: u8) -> f64 {
    F8E4M3::from_bits(code).to_f64()
}

fn encode(context: &Context, map: &Map) -> Result<TensorMap> {
    let spec = TensorMapSpec {
        element: match map.dtype {
            ElementType::F16 => TensorMapElement::F16,
            ElementType::Bf16 => TensorMapElement::Bf16,
            ElementType::F32 => TensorMapElement::F32,
            ElementType::E4m3 => TensorMapElement::U8,
        },
        address: map.address,
        dims: &map.dims,
        strides: &map.strides,
        box_dims: &map.box_dims,
        swizzle: Swizzle::Bytes128,
        l2_promotion: L2Promotion::Bytes256,
        out_of_bounds: OutOfBounds::Zeros,
    };
    Ok(TensorMap(*spec.encode(context)?.as_bytes()))
}

/// The error of the rows that are checked, by root mean squares, beside the outputs themselves.
fn error(shape: &Shape, [q, k, v]: &[Vec<u8>; 3], o: &[u16]) -> f64 {
    let Shape { heads, kv_heads, queries, keys, dim, .. } = *shape;
    let rows = shape.batch * heads * queries;
    let scale = f64::from(shape.scale() * DESCALES[0] * DESCALES[1]);
    let (mut errors, mut sizes) = (0.0, 0.0);
    for row in (0..ROWS).map(|i| i * (rows - 1) / (ROWS - 1)) {
        let (head, query) = (row / queries, row % queries);
        let kv_head = head / heads * kv_heads + head % heads / (heads / kv_heads);
        let at = |codes: &[u8], key: usize, d: usize| value(codes[(kv_head * keys + key) * dim + d]);
        let scores: Vec<f64> = (0..shape.seen(query))
            .map(|key| scale * (0..dim).map(|d| value(q[row * dim + d]) * at(k, key, d)).sum::<f64>())
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for d in 0..dim {
            let sum_of_values: f64 = weights.iter().enumerate().map(|(key, p)| p * at(v, key, d)).sum();
            let want = if sum > 0.0 { sum_of_values / sum * f64::from(DESCALES[2]) } else { 0.0 };
            let have = f64::from(f32::from_bits(u32::from(o[row * dim + d]) << 16));
            (errors, sizes) = (errors + (have - want).powi(2), sizes + want.powi(2));
        }
    }
    (errors / sizes).sqrt()
}

fn run(context: &Context) -> Result<bool> {
    let shape = Shape::read()?;
    let Shape { batch, heads, kv_heads, queries, keys, dim, causal, .. } = shape;
    let spec = Spec { right: causal, grouped: heads != kv_heads, ..Spec::new(ElementType::E4m3, dim as u32) };
    let schedule = shape.schedule(&spec)?;
    let target = if schedule.kernel() == Kernel::Sm90Fwd { Target::Sm90a } else { Target::Sm89 };
    let text = schedule.emit(&spec, target)?.to_string();
    let module = flashcore_driver::Module::from_ptx(context, "fp8.ptx", &text, &JitOptions::default())?;
    let function = module.function(&format!("flashcore_{}", schedule.kernel()))?;
    println!("{schedule}");

    let stream = context.stream(StreamOptions::default())?;
    let sizes = [heads * queries, kv_heads * keys, kv_heads * keys].map(|rows| batch * rows * dim);
    let inputs = [codes(sizes[0], 1), codes(sizes[1], 2), codes(sizes[2], 3)];
    let buffers: Vec<DeviceBuffer> =
        inputs.iter().map(|codes| stream.upload_new(codes)).collect::<std::result::Result<_, _>>()?;
    let descales = stream.upload_new(&DESCALES)?;
    let o = stream.upload_new(&vec![u16::MAX; sizes[0]])?;

    let mut args = Args::default();
    args.scale = shape.scale();
    let mut set = |operand, address, [heads, len]: [usize; 2], size: usize| {
        let row = (dim * size) as u64;
        let strides = [row * (heads * len) as u64, row * len as u64, row];
        args.set(operand, TensorArg { address, shape: [batch, heads, len, dim], strides });
    };
    set(Operand::Q, buffers[0].address(), [heads, queries], 1);
    set(Operand::K, buffers[1].address(), [kv_heads, keys], 1);
    set(Operand::V, buffers[2].address(), [kv_heads, keys], 1);
    set(Operand::O, o.address(), [heads, queries], 2);
    for (i, operand) in (0..).zip([Operand::QDescale, Operand::KDescale, Operand::VDescale]) {
        let address = descales.address() + 4 * i;
        args.set(operand, TensorArg { address, shape: [batch, kv_heads, 1, 1], strides: [0; 3] });
    }
    let geometry = schedule.geometry(&spec);
    args.section = shape.section(geometry.rows);
    let sms = context.properties().sm_count;
    let grid = geometry.grid(batch as u32, heads as u32, queries as u32, sms);
    let aside = match &schedule {
        Schedule::Sm90Fwd(schedule) => grid[0] * schedule.aside_bytes(&spec),
        _ => 0,
    };
    let aside = stream.upload_new(&vec![u8::MAX; aside.max(1) as usize])?;
    args.set(Operand::Aside, TensorArg { address: aside.address(), ..TensorArg::default() });
    let mut packed = Packed::default();
    schedule.bind(&spec, &args, &mut |map| encode(context, map), &mut packed)?;
    let (params, places) = packed.launch(0);
    let config = LaunchConfig {
        shared_bytes: geometry.shared_bytes,
        programmatic: schedule.is_programmatic(),
        ..LaunchConfig::new(grid, [geometry.threads, 1, 1])
    };
    function.set_max_dynamic_shared(geometry.shared_bytes)?;
    let launch = || {
        // SAFETY: the parameters were bound for this kernel, and its buffers live until the stream is done.
        unsafe { function.launch_fields(&stream, &config, params, places) }
    };
    launch()?;
    let error = error(&shape, &inputs, &stream.download_all::<u16>(&o)?);
    println!("{ROWS} rows: off by {:.2} %", 100.0 * error);

    let (start, end) = (Event::new(context, EventKind::Timing)?, Event::new(context, EventKind::Timing)?);
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        start.record(&stream)?;
        for _ in 0..LAUNCHES {
            launch()?;
        }
        end.record(&stream)?;
        end.synchronize()?;
        times.push(f64::from(end.ms_since(&start)?) / f64::from(LAUNCHES));
    }
    times.sort_by(f64::total_cmp);
    let rate = |ms: f64| shape.flops() / ms / 1e9;
    let (best, median) = (times[0], times[ROUNDS / 2]);
    println!(
        "median {median:.4} ms, {:.0} TFLOP/s; best {best:.4} ms, {:.0} TFLOP/s",
        rate(median),
        rate(best)
    );
    Ok(error < MOST_ERROR)
}

fn main() -> ExitCode {
    let hopper = ComputeCapability { major: 9, minor: 0 };
    let context = match Driver::load().and_then(|driver| driver.device(0)?.context()) {
        Ok(context) if context.properties().compute_capability == hopper => context,
        Ok(_) => {
            eprintln!("a Hopper GPU is needed");
            return ExitCode::from(2);
        }
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    match run(&context) {
        Ok(right) => ExitCode::from(u8::from(!right)),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
