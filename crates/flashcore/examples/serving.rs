//! Packed sequences, keys in pages and sequences of mixed length on this GPU: checks them against dense tensors with the same numbers, and times them
//! beside those, in an order that is shuffled every round, on data that is not left in the cache.
//!
//! ```text
//! cargo run --release -p flashcore --features cuda --example serving -- serving.json
//! ```
//!
//! The exit status is 0 when all results are right, 1 when one is not, 2 when there is no Hopper GPU.

#![allow(missing_docs)] // A program, not a library.

use std::{process::ExitCode, time::Instant};

use flashcore::{
    Attention, DType, Device, Layout, Pages, Result, Starts, Tensor, TensorBuf,
    cuda::{
        Cuda, CudaLengths, CudaTensor, Recording,
        driver::{DriverError, Event, EventKind},
    },
    plan::{Schedule, Target},
};
use serde_json::{Value, json};

/// Heads of queries and of keys, and their dimension.
const HEADS: usize = 32;
const HEADS_KV: usize = 8;
const DIM: usize = 128;
/// Rounds of timing.
const ROUNDS: usize = 15;
/// How long the calls that are timed together take, about, and the most of them.
const TOGETHER_US: f64 = 4000.0;
const MOST_CALLS: usize = 100;
/// What no cache holds.
const BEYOND_CACHES: usize = 200 << 20;
/// The most that an output may be off, beside the largest: two ways round differently.
const MOST_ERROR: f32 = 0.01;

/// Prompts of very different lengths.
const PROMPTS: [usize; 16] =
    [64, 4096, 128, 2048, 333, 1000, 777, 3000, 512, 96, 1536, 2222, 64, 700, 1800, 256];
/// Batches and keys of one query per head.
const DECODES: [(usize, usize); 4] = [(1, 8192), (8, 4096), (32, 4096), (64, 2048)];
/// Keys of the sequences of a batch: one is long, or all are different.
const MIXED: [[u32; 8]; 2] =
    [[512, 512, 512, 32768, 512, 512, 512, 512], [4096, 100, 9000, 0, 2048, 20000, 700, 1]];
/// Keys of a page.
const PAGES: [usize; 3] = [16, 64, 256];

/// Numbers that look random, as bf16.
fn noise(elements: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut bytes = Vec::with_capacity(2 * elements);
    for _ in 0..elements {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        // From -2 to 2.
        let value = (state >> 8) as f32 / (1 << 22) as f32 - 2.0;
        bytes.extend(((value.to_bits() >> 16) as u16).to_le_bytes());
    }
    bytes
}

fn said(cuda: &Cuda, error: DriverError) -> flashcore::Error {
    flashcore::Error::Device { device: cuda.to_string(), what: error.to_string(), source: Some(error.into()) }
}

/// A tensor of tokens, all heads of one behind the other.
fn tokens(cuda: &Cuda, shape: [usize; 4], bytes: &[u8]) -> Result<CudaTensor> {
    let mut tensor = cuda.empty(DType::BF16, Layout::bshd(shape))?;
    cuda.stream().upload(tensor.buffer_mut(), 0, bytes).map_err(|error| said(cuda, error))?;
    Ok(tensor)
}

fn indices(cuda: &Cuda, values: &[u32], shape: [usize; 2]) -> Result<CudaTensor> {
    cuda.upload(&Tensor::indices(values, shape)?)
}

fn download(cuda: &Cuda, tensor: &CudaTensor) -> Result<Vec<f32>> {
    let layout = tensor.view()?.layout();
    let mut found = TensorBuf::zeros(DType::BF16, layout)?;
    cuda.download(tensor, &mut found.view_mut())?;
    Ok(found.to_f32())
}

/// How far two results are apart, beside the largest number.
fn off(found: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
    let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    // NaN is as far off as can be.
    apart.fold(0.0, |most: f32, x| if x.is_nan() { f32::INFINITY } else { most.max(x) }) / largest
}

/// The time of each variant's call by round, in microseconds.
fn time(cuda: &Cuda, variants: &[(String, Recording<'_>)]) -> Result<Vec<Vec<f64>>> {
    let event = || Event::new(cuda.context(), EventKind::Timing).map_err(|error| said(cuda, error));
    let (start, end) = (event()?, event()?);
    let mut times = vec![Vec::new(); variants.len()];
    let mut order: Vec<usize> = (0..variants.len()).collect();
    let mut state = 1_u32;
    for round in 0..=ROUNDS {
        for last in (1..order.len()).rev() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            order.swap(last, (state >> 16) as usize % (last + 1));
        }
        for &variant in &order {
            let recording = &variants[variant].1;
            start.record(cuda.stream()).map_err(|error| said(cuda, error))?;
            recording.replay()?;
            end.record(cuda.stream()).map_err(|error| said(cuda, error))?;
            end.synchronize().map_err(|error| said(cuda, error))?;
            let ms = end.ms_since(&start).map_err(|error| said(cuda, error))?;
            // The first round warms up.
            if round > 0 {
                times[variant].push(1e3 * f64::from(ms) / recording.calls() as f64);
            }
        }
    }
    Ok(times)
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Times variants and says what came out.
fn report(cuda: &Cuda, case: &str, variants: &[(String, Recording<'_>)]) -> Result<Value> {
    let times = time(cuda, variants)?;
    let first = median(&times[0]);
    let rows = variants.iter().zip(&times).map(|((name, _), times)| {
        let us = median(times);
        println!("{us:9.2} us  {:.3}  {case} {name}", us / first);
        json!({ "variant": name, "p50_us": us, "us": times })
    });
    Ok(json!({ "case": case, "variants": rows.collect::<Vec<_>>() }))
}

/// One way in which keys lie, with the sets of tensors that calls go through in turn.
struct Way {
    name: String,
    keys: Vec<[CudaTensor; 2]>,
    table: Option<CudaTensor>,
}

/// The keys of a batch in pages anywhere in a pool, and the table of these pages.
fn scattered(bytes: &[u8], page: usize, batch: usize) -> (Vec<u8>, Vec<u32>, usize) {
    let page_bytes = page * HEADS_KV * DIM * 2;
    let pages = bytes.len() / page_bytes;
    // A step without a divisor in common with the number of pages.
    let step = (pages * 5 / 8..=pages).find(|step| gcd(*step, pages) == 1).unwrap_or(1);
    let mut pool = vec![0; bytes.len()];
    let mut table = Vec::with_capacity(pages);
    for (index, content) in bytes.chunks_exact(page_bytes).enumerate() {
        let place = index * step % pages;
        pool[place * page_bytes..][..page_bytes].copy_from_slice(content);
        table.push(place as u32);
    }
    (pool, table, pages / batch)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// One query per head against dense keys and against pages; whether all results are right.
fn decode(cuda: &Cuda, batch: usize, len: usize, results: &mut Vec<Value>) -> Result<bool> {
    let case = format!("{batch}x{HEADS}/{HEADS_KV}x1/{len}x{DIM}");
    let elements = batch * len * HEADS_KV * DIM;
    let sets = (BEYOND_CACHES / (4 * elements)).clamp(1, 16) + 1;
    let host: Vec<[Vec<u8>; 2]> =
        (0..sets).map(|set| [0, 1].map(|of| noise(elements, 1 + 2 * set as u32 + of))).collect();
    let shape = [batch, HEADS_KV, len, DIM];
    let dense = || {
        host.iter()
            .map(|[k, v]| Ok([tokens(cuda, shape, k)?, tokens(cuda, shape, v)?]))
            .collect::<Result<_>>()
    };
    let mut ways = vec![
        Way { name: "dense with key lengths".into(), keys: dense()?, table: None },
        Way { name: "dense".into(), keys: dense()?, table: None },
    ];
    for page in PAGES {
        let mut keys = Vec::new();
        let mut table = (Vec::new(), 0);
        for both in &host {
            let [k, v] = both.each_ref().map(|bytes| scattered(bytes, page, batch));
            let shape = [batch * len / page, HEADS_KV, page, DIM];
            keys.push([tokens(cuda, shape, &k.0)?, tokens(cuda, shape, &v.0)?]);
            table = (k.1, k.2);
        }
        let table = indices(cuda, &table.0, [batch, table.1])?;
        ways.push(Way { name: format!("pages of {page}"), keys, table: Some(table) });
    }
    let q = tokens(cuda, [batch, HEADS, 1, DIM], &noise(batch * HEADS * DIM, 99))?;
    let lengths = cuda.upload_lengths(&vec![len as u32; batch])?;
    let outputs = ways.iter().map(|_| cuda.empty(DType::BF16, Layout::bshd([batch, HEADS, 1, DIM])));
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    let calls = ((TOGETHER_US / (elements as f64 * 4.0 / 4.3e6)) as usize).clamp(sets, MOST_CALLS);
    let mut variants = Vec::new();
    for (way, o) in ways.iter().zip(&outputs) {
        let attention = of(way, &lengths)?;
        let recording = cuda.record(|recorder| {
            // The last call is one of the first set.
            (0..calls).rev().try_for_each(|call| {
                let [k, v] = &way.keys[call % sets];
                recorder.run(&attention, [&q, k, v], o, None)
            })
        })?;
        variants.push((way.name.clone(), recording));
    }
    let right = alike(cuda, &case, &variants, &outputs)?;
    results.push(report(cuda, &case, &variants)?);
    Ok(right)
}

/// Whether all variants come to the same numbers as the first, which are finite.
fn alike(
    cuda: &Cuda,
    case: &str,
    variants: &[(String, Recording<'_>)],
    outputs: &[CudaTensor],
) -> Result<bool> {
    let mut right = true;
    let mut expected: Option<Vec<f32>> = None;
    for ((name, recording), o) in variants.iter().zip(outputs) {
        recording.replay()?;
        let found = download(cuda, o)?;
        let off = expected.as_ref().map_or(0.0, |expected| off(&found, expected));
        let is_right = off <= MOST_ERROR && found.iter().all(|x| x.is_finite());
        right &= is_right;
        let word = if is_right { "right" } else { "WRONG" };
        println!("{word} {case} {name}: off by {:.3} %", 100.0 * off);
        expected.get_or_insert(found);
    }
    Ok(right)
}

/// One query per head of sequences of mixed length, with each of these schedules; whether all results are the same.
fn mixed(cuda: &Cuda, lens: &[u32], schedules: &[&str], results: &mut Vec<Value>) -> Result<bool> {
    let (batch, len) = (lens.len(), lens.iter().copied().max().unwrap_or(0) as usize);
    let case = format!("{batch}x{HEADS}/{HEADS_KV}x1/{len}x{DIM} with {lens:?} keys");
    let of =
        |heads, len, seed| tokens(cuda, [batch, heads, len, DIM], &noise(batch * heads * len * DIM, seed));
    let (q, k, v) = (of(HEADS, 1, 1)?, of(HEADS_KV, len, 2)?, of(HEADS_KV, len, 3)?);
    let lengths = cuda.upload_lengths(lens)?;
    let attention = Attention::new().key_lengths_on_device(lengths.view()?);
    let outputs = schedules.iter().map(|_| cuda.empty(DType::BF16, Layout::bshd([batch, HEADS, 1, DIM])));
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    let mut variants = Vec::new();
    for (&schedule, o) in schedules.iter().zip(&outputs) {
        let cuda = match schedule {
            "planned" => cuda.clone(),
            text => cuda.with_schedule(text.parse::<Schedule>().expect("a schedule")),
        };
        let recording = cuda
            .record(|recorder| (0..20).try_for_each(|_| recorder.run(&attention, [&q, &k, &v], o, None)))?;
        variants.push((schedule.to_string(), recording));
    }
    let right = alike(cuda, &case, &variants, &outputs)?;
    results.push(report(cuda, &case, &variants)?);
    Ok(right)
}

/// What a call of a way is.
fn of<'a>(way: &'a Way, lengths: &'a CudaLengths) -> Result<Attention<'a>> {
    let attention = Attention::new();
    match &way.table {
        None if way.name == "dense" => Ok(attention),
        None => Ok(attention.key_lengths_on_device(lengths.view()?)),
        Some(table) => Ok(attention.paged(Pages::new(&table.view()?)).key_lengths_on_device(lengths.view()?)),
    }
}

/// Packed prompts with a causal mask, against a dense call for each; whether all results are right.
fn packed(cuda: &Cuda, schedules: &[&str], results: &mut Vec<Value>) -> Result<bool> {
    let case = format!("{} packed prompts, {HEADS}/{HEADS_KV} heads of {DIM}, causal", PROMPTS.len());
    let total: usize = PROMPTS.iter().sum();
    let starts: Vec<u32> = std::iter::once(0)
        .chain(PROMPTS.iter().scan(0, |at, len| {
            *at += *len as u32;
            Some(*at)
        }))
        .collect();
    let host = [HEADS, HEADS_KV, HEADS_KV].map(|heads| noise(total * heads * DIM, heads as u32));
    let heads = [HEADS, HEADS_KV, HEADS_KV];
    let of = |from: usize, len: usize| -> Result<[CudaTensor; 3]> {
        let mut parts = heads.into_iter().zip(&host).map(|(heads, bytes)| {
            let token = heads * DIM * 2;
            tokens(cuda, [1, heads, len, DIM], &bytes[from * token..(from + len) * token])
        });
        let mut next = || parts.next().expect("three tensors");
        Ok([next()?, next()?, next()?])
    };
    let all = of(0, total)?;
    let starts_there = indices(cuda, &starts, [1, starts.len()])?;
    let longest = PROMPTS.into_iter().max().unwrap_or(0);
    let starts_view = starts_there.view()?;
    let attention = Attention::new().causal().packed(Starts::of(&starts_view, longest));
    let mut o = cuda.empty(DType::BF16, Layout::bshd([1, HEADS, total, DIM]))?;
    cuda.fill(&mut o, 0xff)?;
    let [q, k, v] = all.each_ref().map(CudaTensor::view);
    let (q, k, v) = (q?, k?, v?);
    let device = Device::cuda_with(cuda.clone());
    attention.run_into(&device, &q, &k, &v, &mut o.view_mut()?, None)?;
    let found = download(cuda, &o)?;
    let mut worst = 0.0_f32;
    // Of the packed output, head by head.
    for (sequence, &len) in PROMPTS.iter().enumerate() {
        let from = starts[sequence] as usize;
        let own = of(from, len)?;
        let mut expected = cuda.empty(DType::BF16, Layout::bshd([1, HEADS, len, DIM]))?;
        let [q, k, v] = own.each_ref().map(CudaTensor::view);
        Attention::new().causal().run_into(&device, &q?, &k?, &v?, &mut expected.view_mut()?, None)?;
        let expected = download(cuda, &expected)?;
        for head in 0..HEADS {
            let (there, here) = ((head * total + from) * DIM, head * len * DIM);
            worst = worst.max(off(&found[there..][..len * DIM], &expected[here..][..len * DIM]));
        }
    }
    let right = worst <= MOST_ERROR;
    println!("{} {case}: off by {:.3} %", if right { "right" } else { "WRONG" }, 100.0 * worst);

    // What the host does for a call.
    let mut view = o.view_mut()?;
    let mut host_us = Vec::new();
    for _ in 0..100 {
        let start = Instant::now();
        attention.run_into(&device, &q, &k, &v, &mut view, None)?;
        host_us.push(start.elapsed().as_secs_f64() * 1e6);
        cuda.synchronize()?;
    }
    println!("{:9.2} us  of the host for a call", median(&host_us));

    let mut variants = Vec::new();
    for &schedule in schedules {
        let cuda = match schedule {
            "planned" => cuda.clone(),
            text => cuda.with_schedule(text.parse::<Schedule>().expect("a schedule")),
        };
        let [q, k, v] = &all;
        let recording =
            cuda.record(|recorder| (0..4).try_for_each(|_| recorder.run(&attention, [q, k, v], &o, None)))?;
        variants.push((schedule.to_string(), recording));
    }
    let mut result = report(cuda, &case, &variants)?;
    result["host_p50_us"] = json!(median(&host_us));
    results.push(result);
    Ok(right)
}

/// Blocks for packed prompts that may be faster than the planned ones.
const OTHERS: [&str; 5] = [
    "planned",
    "sm90_fwd:warpgroups=2,block_n=128,stages=2,q_stages=1,ctas=1,split=1,pingpong=1,lazy=1,poly=0,persistent=1,pairs=0",
    "sm90_fwd:warpgroups=2,block_n=112,stages=2,q_stages=2,ctas=1,split=1,pingpong=1,lazy=1,poly=0,persistent=1,pairs=0",
    "sm90_fwd:warpgroups=2,block_n=80,stages=2,q_stages=2,ctas=1,split=1,pingpong=1,lazy=1,poly=0,persistent=1,pairs=0",
    "sm90_fwd:warpgroups=1,block_n=64,stages=2,q_stages=2,ctas=2,split=1,pingpong=0,lazy=1,poly=0,persistent=1,pairs=0",
];

/// What plans had for mixed lengths before blocks shared keys by length, what they have, and what may be faster.
const MIXED_BLOCKS: [&str; 5] = [
    "sm90_fwd:warpgroups=2,block_n=64,stages=4,q_stages=1,ctas=1,split=2,pingpong=0,lazy=2,poly=0,persistent=0,pairs=0,together=1",
    "planned",
    "sm90_fwd:warpgroups=1,block_n=128,stages=3,q_stages=1,ctas=1,split=1,pingpong=0,lazy=2,poly=0,persistent=1,pairs=0,by_length=1",
    "sm90_fwd:warpgroups=1,block_n=64,stages=6,q_stages=1,ctas=1,split=1,pingpong=0,lazy=2,poly=0,persistent=1,pairs=0,by_length=1",
    "sm90_fwd:warpgroups=1,block_n=64,stages=5,q_stages=2,ctas=1,split=1,pingpong=0,lazy=2,poly=0,persistent=1,pairs=0,by_length=1",
];

fn run(cuda: &Cuda, path: Option<&str>) -> Result<bool> {
    let mut results = Vec::new();
    let mut right = packed(cuda, &OTHERS, &mut results)?;
    for (batch, len) in DECODES {
        right &= decode(cuda, batch, len, &mut results)?;
    }
    for lens in MIXED {
        right &= mixed(cuda, &lens, &MIXED_BLOCKS, &mut results)?;
    }
    let all = json!({ "device": cuda.hardware().name, "right": right, "rounds": ROUNDS, "cases": results });
    if let Some(path) = path {
        std::fs::write(path, format!("{all:#}\n")).expect("the file can be written");
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
    match run(&cuda, std::env::args().nth(1).as_deref()) {
        Ok(right) => ExitCode::from(u8::from(!right)),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
