//! bf16 tensors that become 8-bit floats within a call, on this GPU: checks every way against the CPU engine, and times the
//! calls beside those of the tensors as they are. Then a query per head against a cache of 8 bits, beside one of 16.
//!
//! ```text
//! cargo run --release -p flashcore --example eight_bit
//! ```
//!
//! The exit status is 0 when all results are right, 1 when one is not, 2 when there is no GPU that takes 8-bit floats.

#![allow(missing_docs)] // A program, not a library.

use std::process::ExitCode;

use flashcore::{
    Attention, DType, Device, Layout, Quantiser, Result, TensorBuf,
    cuda::{
        Cuda,
        driver::{DriverError, Event, EventKind},
    },
    plan::Target,
};

/// Calls that are timed together, and how often.
const CALLS: u32 = 20;
const ROUNDS: usize = 15;
/// The most that an output may be off, beside the largest: the GPU rounds probabilities to 8 bits, the CPU does not.
const MOST_ERROR: f32 = 0.04;

/// Numbers that look random; some channels are not around 0.
fn tensor(shape: [usize; 4], seed: usize, dtype: DType) -> Result<TensorBuf> {
    let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 20;
    let one = |i: usize| {
        let offset = if (i % shape[3]).is_multiple_of(7) { 1.5 } else { 0.0 };
        (word(word(i)) % 4001) as f32 / 2000.0 - 1.0 + offset
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(one).collect();
    TensorBuf::from_f32(&values, shape, dtype)
}

/// The median time of a call, in microseconds.
fn time(cuda: &Cuda, call: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    let said = |error: DriverError| flashcore::Error::Device {
        device: cuda.to_string(),
        what: error.to_string(),
        source: Some(error.into()),
    };
    let event = || Event::new(cuda.context(), EventKind::Timing).map_err(said);
    let (start, end) = (event()?, event()?);
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        start.record(cuda.stream()).map_err(said)?;
        for _ in 0..CALLS {
            call()?;
        }
        end.record(cuda.stream()).map_err(said)?;
        end.synchronize().map_err(said)?;
        times.push(1e3 * f64::from(end.ms_since(&start).map_err(said)?) / f64::from(CALLS));
    }
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}

/// Checks or times one problem in every way; whether all results are right.
fn problem(cuda: &Cuda, [heads, heads_kv, len_q, len_k, dim]: [usize; 5], check: bool) -> Result<bool> {
    let device = Device::cuda_with(cuda.clone());
    let host = [
        tensor([2, heads, len_q, dim], 1, DType::BF16)?,
        tensor([2, heads_kv, len_k, dim], 2, DType::BF16)?,
        tensor([2, heads_kv, len_k, dim], 3, DType::BF16)?,
    ];
    let mut there = Vec::new();
    for tensor in &host {
        there.push(cuda.upload(&tensor.view())?);
    }
    let mut o = cuda.empty(DType::BF16, Layout::bhsd([2, heads, len_q, dim]))?;
    let (q, k, v) = (there[0].view()?, there[1].view()?, there[2].view()?);
    let ways = [
        None,
        Some(Quantiser::new()),
        Some(Quantiser::new().smoothed()),
        Some(Quantiser::new().rotated(7)),
        Some(Quantiser::new().smoothed().rotated(7)),
    ];
    let mut right = true;
    for way in ways {
        let attention = way.map_or(Attention::new().causal(), |way| Attention::new().causal().fp8(way));
        let name = format!("{}", attention.problem(&q, &k, &v)?);
        if check {
            cuda.fill(&mut o, 0xff)?;
            attention.run_into(&device, &q, &k, &v, &mut o.view_mut()?, None)?;
            let mut found = TensorBuf::zeros(DType::BF16, Layout::bhsd([2, heads, len_q, dim]))?;
            cuda.download(&o, &mut found.view_mut())?;
            let [q, k, v] = host.each_ref().map(TensorBuf::view);
            let expected = attention.run(&Device::cpu(), &q, &k, &v)?.o.to_f32();
            let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            let found = found.to_f32();
            let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
            // NaN is as far off as can be.
            let off =
                off.fold(0.0, |most: f32, x| if x.is_nan() { f32::INFINITY } else { most.max(x) }) / largest;
            let fine = off <= MOST_ERROR;
            right &= fine;
            println!(
                "{} {name}: off by {:.2} % of the largest",
                if fine { "right" } else { "WRONG" },
                100.0 * off
            );
        } else {
            let mut view = o.view_mut()?;
            let us = time(cuda, &mut || attention.run_into(&device, &q, &k, &v, &mut view, None))?;
            println!("{us:9.1} us  {name}");
        }
    }
    Ok(right)
}

/// Times a query per head against keys and values of a type.
fn cache(cuda: &Cuda, dtype: DType, len_k: usize) -> Result<()> {
    let q = cuda.upload(&tensor([1, 32, 1, 128], 1, DType::BF16)?.view())?;
    let k = cuda.upload(&tensor([1, 8, len_k, 128], 2, dtype)?.view())?;
    let v = cuda.upload(&tensor([1, 8, len_k, 128], 3, dtype)?.view())?;
    let mut o = cuda.empty(DType::BF16, Layout::bhsd([1, 32, 1, 128]))?;
    let (device, attention) = (Device::cuda_with(cuda.clone()), Attention::new());
    let (q, k, v, mut o) = (q.view()?, k.view()?, v.view()?, o.view_mut()?);
    let us = time(cuda, &mut || attention.run_into(&device, &q, &k, &v, &mut o, None))?;
    println!("{us:9.1} us  {}", attention.problem(&q, &k, &v)?);
    Ok(())
}

fn run(cuda: &Cuda) -> Result<bool> {
    let mut right = true;
    for target in [Target::Sm89, Target::Sm90a] {
        let cuda = cuda.with_target(target);
        println!("code for {target}");
        for sizes in [[4, 2, 300, 700, 64], [8, 8, 513, 513, 128], [32, 8, 1, 4000, 128]] {
            right &= problem(&cuda, sizes, true)?;
        }
    }
    for len in [1024, 4096, 16384] {
        problem(cuda, [16, 16, len, len, 128], false)?;
    }
    for len_k in [8192, 65536] {
        cache(cuda, DType::BF16, len_k)?;
        cache(cuda, DType::F8E4M3, len_k)?;
    }
    Ok(right)
}

fn main() -> ExitCode {
    let cuda = match Cuda::new(0).and_then(|cuda| cuda.on_new_stream()) {
        Ok(cuda) if cuda.hardware().target == Target::Sm90a => cuda,
        Ok(cuda) => {
            eprintln!("{cuda}: a Hopper GPU is needed");
            return ExitCode::from(2);
        }
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    match run(&cuda) {
        Ok(right) => ExitCode::from(u8::from(!right)),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
