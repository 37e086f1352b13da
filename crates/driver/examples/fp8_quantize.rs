//! Makes E4M3 of bf16 queries, keys and values on this GPU, checks descales and codes, and times it.
//!
//! ```text
//! cargo run --release -p flashcore-driver --example fp8_quantize -- \
//!     [--batch 1] [--heads 32] [--kv-heads 8] [--rows 16384] [--dim 128] [--chunk 256] [--smooth 1] [--rotate 1]
//! ```
//!
//! `--chunk` is the number of rows per block. The exit status is 0 when everything is right, 1 when something is not, 2 when
//! there is no GPU with e4m3.

#![allow(unsafe_code)] // Launches are unsafe by nature; the kernels here are given buffers that outlive them.
#![allow(missing_docs)] // A program, not a library.

use std::{collections::BTreeMap, error::Error, process::ExitCode};

use flashcore_driver::{
    ComputeCapability, Context, DeviceBuffer, Driver, Event, EventKind, JitOptions, LaunchConfig,
    StreamOptions,
};
use flashcore_kernels::{
    Args, ElementType, Operand, Packed, TensorArg,
    quantize::{Quantize, signs},
};
use flashcore_ptx::Target;
use float8::F8E4M3;

/// Calls that are timed together, and how often.
const CALLS: u32 = 20;
const ROUNDS: usize = 15;
/// Rows of each tensor whose codes are checked.
const ROWS: usize = 64;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// About normal numbers as bf16, with some that are ten times as large.
fn numbers(len: usize, seed: u64) -> Vec<u16> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let word = state >> 32;
            let sum: u64 = (0..4).map(|i| word >> (8 * i) & 255).sum();
            let size = if word.is_multiple_of(1009) { 10.0 } else { 1.0 };
            ((size * (sum as f32 - 510.0) / 148.0).to_bits() >> 16) as u16
        })
        .collect()
}

fn float(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

/// Signs, then the transform, over √head_dim.
fn rotated(seed: u32, x: &[f64]) -> Vec<f64> {
    let signs = signs(seed, x.len() as u32);
    let entry = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let signed = |j: usize| if signs[j] { -x[j] } else { x[j] };
    let root = (x.len() as f64).sqrt();
    (0..x.len()).map(|i| (0..x.len()).map(|j| entry(i, j) * signed(j)).sum::<f64>() / root).collect()
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
    let (rows, dim, chunk) = (number("--rows", 16384)?, number("--dim", 128)?, number("--chunk", 256)?);
    let (smooth, rotate) = (number("--smooth", 0)? != 0, number("--rotate", 0)?);
    if let Some(unknown) = given.keys().next() {
        return Err(format!("{unknown} is not known; see the top of this example").into());
    }
    let quantize = Quantize {
        smooth,
        rotate: (rotate != 0).then_some(rotate as u32),
        rows: chunk as u32,
        ..Quantize::new(ElementType::Bf16, dim as u32)
    };
    let hopper = context.properties().compute_capability.major >= 9;
    let target = if hopper { Target::Sm90a } else { Target::Sm89 };

    let stream = context.stream(StreamOptions::default())?;
    let mut args = Args::default();
    let operands = [
        (Operand::Q, Operand::Q8, Operand::QDescale, heads),
        (Operand::K, Operand::K8, Operand::KDescale, kv_heads),
        (Operand::V, Operand::V8, Operand::VDescale, kv_heads),
    ];
    let mut kept: Vec<(Vec<u16>, DeviceBuffer, DeviceBuffer, DeviceBuffer)> = Vec::new();
    for (seed, (from, to, descale, heads)) in (1..).zip(operands) {
        let x = numbers(batch * heads * rows * dim, seed);
        let (input, output) = (stream.upload_new(&x)?, stream.upload_new(&vec![0xff_u8; x.len()])?);
        let descales = stream.upload_new(&vec![f32::NAN; batch * kv_heads])?;
        let strides = |size: usize| [heads * rows * dim, rows * dim, dim].map(|it| (it * size) as u64);
        let shape = [batch, heads, rows, dim];
        args.set(from, TensorArg { address: input.address(), shape, strides: strides(2) });
        args.set(to, TensorArg { address: output.address(), shape, strides: strides(1) });
        let strides = [4 * kv_heads as u64, 4, 4];
        let shape = [batch, kv_heads, 1, 1];
        args.set(descale, TensorArg { address: descales.address(), shape, strides });
        kept.push((x, input, output, descales));
    }
    let mean = stream.upload_new(&vec![f32::NAN; batch * kv_heads * dim])?;
    let row = 4 * dim as u64;
    let shape = [batch, kv_heads, 1, dim];
    let strides = [row * kv_heads as u64, row, row];
    args.set(Operand::KMean, TensorArg { address: mean.address(), shape, strides });
    let space = stream.upload_new(&vec![0xff_u8; quantize.space(&args) as usize])?;
    args.set(Operand::Space, TensorArg { address: space.address(), ..TensorArg::default() });

    let mut launches = Vec::new();
    for &pass in quantize.passes() {
        let text = quantize.emit(pass, target)?.to_string();
        let module = flashcore_driver::Module::from_ptx(context, pass.name(), &text, &JitOptions::default())?;
        let (grid, block) = (quantize.grid(pass, &args), [quantize.threads(pass), 1, 1]);
        let shared_bytes = quantize.shared_bytes(pass);
        let config = LaunchConfig { programmatic: hopper, shared_bytes, ..LaunchConfig::new(grid, block) };
        let mut packed = Packed::default();
        quantize.bind(pass, &args, &mut packed);
        launches.push((module.function(pass.name())?, config, packed));
    }
    let call = || -> Result<()> {
        for (function, config, packed) in &launches {
            let (params, places) = packed.launch(0);
            // SAFETY: the parameters were bound for these kernels, and their buffers live until the stream is done.
            unsafe { function.launch_fields(&stream, config, params, places) }?;
        }
        Ok(())
    };
    call()?;

    let mut right = true;
    let means = stream.download_all::<f32>(&mean)?;
    for (tensor, (x, _, output, descales)) in kept.iter().enumerate() {
        let (codes, descales) = (stream.download_all::<u8>(output)?, stream.download_all::<f32>(descales)?);
        let (smoothed, turned) =
            (smooth && tensor == 1, (rotate != 0 && tensor < 2).then_some(rotate as u32));
        let of_descale = x.len() / descales.len();
        for (head, (x, &descale)) in x.chunks(of_descale).zip(&descales).enumerate() {
            if smoothed {
                for (d, &mean) in means[head * dim..][..dim].iter().enumerate() {
                    let want = x.iter().skip(d).step_by(dim).map(|&x| float(x)).sum::<f64>() / rows as f64;
                    right &= (f64::from(mean) - want).abs() < 1e-5;
                }
            } else if turned.is_none() {
                let amax = x.iter().fold(0.0_f64, |most, &x| most.max(float(x).abs()));
                right &= (f64::from(descale) * 448.0 / amax - 1.0).abs() < 1e-6;
            }
        }
        for row in (0..ROWS).map(|i| i * (x.len() / dim - 1) / (ROWS - 1) * dim) {
            let head = row / of_descale;
            let mean = |d: usize| if smoothed { f64::from(means[head * dim + d]) } else { 0.0 };
            let mut want: Vec<f64> = (0..dim).map(|d| float(x[row + d]) - mean(d)).collect();
            if let Some(seed) = turned {
                want = rotated(seed, &want);
            }
            for (d, want) in want.into_iter().enumerate() {
                let want = want / f64::from(descales[head]);
                let code = F8E4M3::from_bits(codes[row + d]).to_f64();
                let step = want.abs().max(1.0 / 64.0).log2().floor().exp2() / 8.0;
                right &= (code - want).abs() <= 0.51 * step;
            }
        }
    }
    println!("{}", if right { "descales and codes are right" } else { "descales, means or codes are WRONG" });

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
    let elements = (batch * (heads + 2 * kv_heads) * rows * dim) as f64;
    let (best, median) = (times[0], times[ROUNDS / 2]);
    println!(
        "median {median:.1} us, best {best:.1} us; at 5 bytes per element {:.2} TB/s",
        5.0 * elements / median / 1e6
    );
    Ok(right)
}

fn main() -> ExitCode {
    let ada = ComputeCapability { major: 8, minor: 9 };
    let context = match Driver::load().and_then(|driver| driver.device(0)?.context()) {
        Ok(context) if context.properties().compute_capability >= ada => context,
        Ok(_) => {
            eprintln!("a GPU with e4m3 is needed: Ada or later");
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
