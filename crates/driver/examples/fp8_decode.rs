//! One bf16 query per head against a cache of 8-bit floats on this GPU: checks all rows of the first and the last kv head
//! against f64, and times it.
//!
//! ```text
//! cargo run --release -p flashcore-driver --example fp8_decode -- \
//!     [--batch 1] [--heads 32] [--kv-heads 8] [--keys 32768] [--dim 128] \
//!     [--parts 16] [--warps 8] [--step 32] [--stages 3]
//! ```
//!
//! Without `--parts`, as many blocks share the keys of a kv head as keep the GPU busy. The exit status is 0 when the rows
//! that were checked are right, 1 when one is not, 2 when there is no Hopper GPU.

#![allow(unsafe_code)] // Launches are unsafe by nature; the kernels here are given buffers that outlive them.
#![allow(missing_docs)] // A program, not a library.

use std::{collections::BTreeMap, error::Error, process::ExitCode};

use flashcore_driver::{
    ComputeCapability, Context, Driver, Event, EventKind, Function, JitOptions, LaunchConfig, StreamOptions,
};
use flashcore_kernels::{
    Args, ElementType, Family, Geometry, Map, Operand, Packed, Schedule, Spec, TensorArg,
    sm80::decode::{self, ROWS},
    sm90::combine,
};
use flashcore_ptx::{Module, Target, TensorMap};
use float8::F8E4M3;

/// Calls that are timed together, and how often.
const CALLS: u32 = 20;
const ROUNDS: usize = 15;
/// The most that an output may be off, beside the sum of its weighted magnitudes: bf16 rounds by 2^-9.
const MOST_ERROR: f64 = 5e-3;
/// What the stored keys and values are multiplied by.
const DESCALES: [f32; 2] = [0.5, 3.0];

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Sums of four numbers from 0 to 255.
fn sums(len: usize, seed: u64) -> impl Iterator<Item = usize> {
    let mut state = seed;
    (0..len).map(move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let word = (state >> 32) as usize;
        (0..4).map(|i| word >> (8 * i) & 255).sum()
    })
}

/// An about normal number of a sum.
fn normal(sum: usize) -> f32 {
    (sum as f32 - 510.0) / 148.0
}

/// A kernel with its launch.
struct Ready {
    function: Function,
    config: LaunchConfig,
}

impl Ready {
    fn new(
        context: &Context,
        name: &str,
        module: &Module,
        geometry: Geometry,
        grid: [u32; 3],
    ) -> Result<Self> {
        let text = module.to_string();
        let module = flashcore_driver::Module::from_ptx(context, name, &text, &JitOptions::default())?;
        let function = module.function(name)?;
        function.set_max_dynamic_shared(geometry.shared_bytes)?;
        let config = LaunchConfig {
            shared_bytes: geometry.shared_bytes,
            programmatic: true,
            ..LaunchConfig::new(grid, [geometry.threads, 1, 1])
        };
        Ok(Self { function, config })
    }
}

fn run(context: &Context) -> Result<bool> {
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
    let (batch, heads, kv_heads) = (number("--batch", 1)?, number("--heads", 32)?, number("--kv-heads", 8)?);
    let (keys, dim) = (number("--keys", 32768)?, number("--dim", 128)?);
    let group = heads / kv_heads;
    let spec = Spec::new(ElementType::Bf16, dim as u32);
    let first = decode::Schedule::new(&spec, 1);
    let (warps, stages) =
        (number("--warps", first.warps as usize)?, number("--stages", first.stages as usize)?);
    let step = number("--step", first.keys as usize)?;
    let tiles = batch * kv_heads * group.div_ceil(ROWS as usize);
    let sms = context.properties().sm_count as usize;
    let most = keys.div_ceil(step * warps).max(1);
    let parts = number("--parts", (sms / tiles).clamp(1, most))?;
    if let Some(unknown) = given.keys().next() {
        return Err(format!("{unknown} is not known; see the top of this example").into());
    }
    let schedule = decode::Schedule {
        warps: warps as u32,
        keys: step as u32,
        stages: stages as u32,
        parts: parts as u32,
    };
    println!("{schedule}: {tiles} tiles of up to {ROWS} rows, {} blocks", tiles * parts);

    let stream = context.stream(StreamOptions::default())?;
    let bits = |sum: usize| (normal(sum).to_bits() >> 16) as u16;
    let q: Vec<u16> = sums(batch * heads * dim, 1).map(bits).collect();
    let table: Vec<u8> = (0..=4 * 255).map(|sum| F8E4M3::from_f32(normal(sum)).to_bits()).collect();
    let codes =
        |seed| -> Vec<u8> { sums(batch * kv_heads * keys * dim, seed).map(|sum| table[sum]).collect() };
    let (k, v) = (codes(2), codes(3));
    let (q_buffer, k_buffer, v_buffer) =
        (stream.upload_new(&q)?, stream.upload_new(&k)?, stream.upload_new(&v)?);
    let descales = stream.upload_new(&DESCALES)?;
    let o = stream.upload_new(&vec![u16::MAX; q.len()])?;
    let partial = stream.upload_new(&vec![f32::NAN; q.len() * parts])?;
    let state = stream.upload_new(&vec![f32::NAN; 2 * batch * heads * parts])?;

    let mut args = Args::default();
    (args.scale, args.parts) = (1.0 / (dim as f32).sqrt(), parts as u32);
    // The heads that share a kv head are the rows of one head.
    let mut set = |operand, address, [rows, columns]: [usize; 2], size: usize| {
        let row = (columns * size) as u64;
        let strides = [row * (kv_heads * rows) as u64, row * rows as u64, row];
        args.set(operand, TensorArg { address, shape: [batch, kv_heads, rows, columns], strides });
    };
    set(Operand::Q, q_buffer.address(), [group, dim], 2);
    set(Operand::K, k_buffer.address(), [keys, dim], 1);
    set(Operand::V, v_buffer.address(), [keys, dim], 1);
    set(Operand::O, o.address(), [group, dim], 2);
    set(Operand::PartialO, partial.address(), [parts * group, dim], 4);
    set(Operand::PartialState, state.address(), [parts * group, 2], 4);
    for (i, operand) in (0..).zip([Operand::KDescale, Operand::VDescale]) {
        let address = descales.address() + 4 * i;
        args.set(operand, TensorArg { address, shape: [batch, kv_heads, 1, 1], strides: [0; 3] });
    }
    let mut packed = Packed::default();
    let mut no_maps = |_: &Map| Err::<TensorMap, Box<dyn Error>>("these kernels have no tensor maps".into());
    schedule.bind(&spec, &args, &mut no_maps, &mut packed)?;
    let grid = |geometry: &Geometry| geometry.grid(batch as u32, kv_heads as u32, group as u32, sms as u32);
    let geometry = schedule.geometry(&spec);
    let module = schedule.module(&spec, Target::Sm90a)?;
    let mut launches =
        vec![Ready::new(context, "flashcore_sm80_decode", &module, geometry, grid(&geometry))?];
    if parts > 1 {
        let warps = (parts as u32).div_ceil(combine::AT_ONCE).clamp(4, 16);
        let combine = Schedule::Combine(combine::Schedule { warps, shift: 0 });
        combine.bind(&spec, &args, &mut no_maps, &mut packed)?;
        let (module, geometry) = (combine.emit(&spec, Target::Sm90a)?, combine.geometry(&spec));
        launches.push(Ready::new(context, "flashcore_combine", &module, geometry, grid(&geometry))?);
    }
    let call = || -> Result<()> {
        for (i, ready) in launches.iter().enumerate() {
            let (params, places) = packed.launch(i);
            // SAFETY: the parameters were bound for these kernels, and their buffers live until the stream is done.
            unsafe { ready.function.launch_fields(&stream, &ready.config, params, places) }?;
        }
        Ok(())
    };
    call()?;

    let found = stream.download_all::<u16>(&o)?;
    let bf16 = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
    let e4m3 = |code: u8| F8E4M3::from_bits(code).to_f64();
    let mut worst = 0.0_f64;
    for kv_head in [0, batch * kv_heads - 1] {
        let row_of = |codes: &'_ [u8], key: usize| -> Vec<f64> {
            codes[(kv_head * keys + key) * dim..][..dim].iter().map(|&code| e4m3(code)).collect()
        };
        for row in kv_head * group..(kv_head + 1) * group {
            let query: Vec<f64> = q[row * dim..][..dim].iter().map(|&bits| bf16(bits)).collect();
            let scale = f64::from(args.scale * DESCALES[0]);
            let scores: Vec<f64> = (0..keys)
                .map(|key| scale * query.iter().zip(row_of(&k, key)).map(|(q, k)| q * k).sum::<f64>())
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
            let (mut want, mut sizes) = (vec![0.0; dim], vec![0.0; dim]);
            for (key, score) in scores.iter().enumerate() {
                let p = (score - max).exp() / sum * f64::from(DESCALES[1]);
                for (d, v) in row_of(&v, key).into_iter().enumerate() {
                    (want[d], sizes[d]) = (want[d] + p * v, sizes[d] + p * v.abs());
                }
            }
            for ((want, size), &have) in want.iter().zip(&sizes).zip(&found[row * dim..]) {
                let error = (bf16(have) - want).abs() / size;
                worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
            }
        }
    }
    println!("{} rows: off by up to {:.2} % of the weighted magnitudes", 2 * group, 100.0 * worst);

    let (start, end) = (Event::new(context, EventKind::Timing)?, Event::new(context, EventKind::Timing)?);
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        start.record(&stream)?;
        for _ in 0..CALLS {
            call()?;
        }
        end.record(&stream)?;
        end.synchronize()?;
        times.push(1e3 * f64::from(end.ms_since(&start)?) / f64::from(CALLS));
    }
    times.sort_by(f64::total_cmp);
    let (best, median) = (times[0], times[ROUNDS / 2]);
    let bytes = (k.len() + v.len()) as f64;
    println!(
        "median {median:.1} us, best {best:.1} us; {:.2} MB of keys and values, {:.2} TB/s{}",
        bytes / 1e6,
        bytes / median / 1e6,
        if bytes < 40e6 { " (they fit in the L2 cache)" } else { "" }
    );
    Ok(worst < MOST_ERROR)
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
