//! `flashcore run`: attention on the tensors of a file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Args, ValueEnum};
use flashcore::{Attention, Descales, Device, F8E4M3, Layout, Mask, Tensor, TensorMut};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::Serialize;

use super::screen::say;
use super::{Exit, Json};
use crate::cases::parse_window;
use crate::engine;
use crate::evidence::Environment;
use crate::files::{self, Stored};
use crate::memory;

#[derive(Args)]
#[command(after_help = "\
IN holds the tensors q, k and v, all f16, all bf16 or all f32, with four dimensions each: (batch, heads, length, \
head_dim), or (batch, length, heads, head_dim) with --layout bshd. k and v may have fewer heads than q, and \
another length. A tensor key_lengths (i32, i64 or u32, one number per batch entry) says how many keys each entry has.

OUT gets the tensor o in the same layout and dtype, and with --lse the tensor lse in f32, without the last dimension. \
It is written whole or not at all.")]
pub struct Options {
    /// The file with q, k and v
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// Where to write o (and lse)
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: PathBuf,
    /// The order of the tensors' dimensions
    #[arg(long, value_enum, default_value_t = Order::Bhsd)]
    layout: Order,
    /// none, causal, causal-top-left or window(LEFT,RIGHT)
    #[arg(long, value_name = "MASK", group = "which")]
    mask: Option<Mask>,
    /// Each query sees keys up to its own position, counted from the end
    #[arg(long, group = "which")]
    causal: bool,
    /// Each query sees keys up to its own position, counted from the start, as torch's is_causal
    #[arg(long, group = "which")]
    causal_top_left: bool,
    /// Each query sees LEFT keys before and RIGHT keys after its own position; inf is without limit
    #[arg(long, value_name = "LEFT,RIGHT", value_parser = parse_window, group = "which")]
    window: Option<Mask>,
    /// Multiply scores by this instead of 1/√head_dim
    #[arg(long, allow_negative_numbers = true)]
    scale: Option<f32>,
    /// Scores become softcap·tanh(score/softcap)
    #[arg(long, allow_negative_numbers = true)]
    softcap: Option<f32>,
    /// Also write lse, the logarithm of the sum of exponentials of each query
    #[arg(long)]
    lse: bool,
    /// auto, cpu, one path of the CPU engine such as cpu-portable, or cuda
    #[arg(long, default_value = "auto", value_parser = device)]
    device: Device,
    #[command(flatten)]
    json: Json,
}

fn device(name: &str) -> Result<Device, String> {
    engine::device(name.parse()?)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Order {
    /// (batch, heads, length, head_dim)
    Bhsd,
    /// (batch, length, heads, head_dim)
    Bshd,
}

#[derive(Serialize)]
struct Report {
    input: String,
    output: String,
    output_bytes: u64,
    problem: String,
    layout: Order,
    device: String,
    call_us: f64,
    lse: bool,
}

/// The result of a call: the output's bytes and shapes, and how long it took.
struct Done {
    problem: String,
    o: (Vec<usize>, Vec<u8>),
    lse: Option<(Vec<usize>, Vec<u8>)>,
    dtype: Dtype,
    call_us: f64,
}

pub fn run(options: &Options) -> Result<Exit, String> {
    options.json.check()?;
    check_paths(&options.input, &options.output)?;
    let bytes = files::read(&options.input)?;
    let name = options.input.display();
    let file = SafeTensors::deserialize(&bytes).map_err(|error| {
        format!("{name} is not a safetensors file ({error}). Save q, k and v with safetensors.torch.save_file or alike")
    })?;
    let inputs = Inputs::find(&file).map_err(|why| format!("{name}: {why}"))?;
    let done = match inputs.dtype {
        Dtype::F16 => attend::<f16, f16>(options, &inputs),
        Dtype::BF16 => attend::<bf16, bf16>(options, &inputs),
        Dtype::F8_E4M3 => attend::<F8E4M3, bf16>(options, &inputs),
        _ => attend::<f32, f32>(options, &inputs),
    }
    .map_err(|why| format!("{name}: {why}"))?;
    let existed = options.output.exists();
    write(options, &done)?;
    let report = Report {
        input: options.input.display().to_string(),
        output: options.output.display().to_string(),
        output_bytes: std::fs::metadata(&options.output).map_or(0, |meta| meta.len()),
        problem: done.problem,
        layout: options.layout,
        device: options.device.to_string(),
        call_us: done.call_us,
        lse: options.lse,
    };
    say(&format!(
        "{} on {} in {:.1} µs\n{} {} ({} bytes: o{})",
        report.problem,
        report.device,
        report.call_us,
        if existed { "replaced" } else { "wrote" },
        report.output,
        report.output_bytes,
        if report.lse { ", lse" } else { "" },
    ));
    options.json.write("flashcore.run/1", &Environment::read(), true, &report)?;
    Ok(Exit::Pass)
}

/// Refuses what would overwrite the input, or cannot be written at all, before anything is computed.
fn check_paths(input: &Path, output: &Path) -> Result<(), String> {
    let same = |a: &Path, b: &Path| matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if same(input, output) {
        return Err(format!("OUT is IN ({}); it would be overwritten. Name another OUT", input.display()));
    }
    if output.is_dir() {
        return Err(format!("{} is a folder; name a file in it", output.display()));
    }
    let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder {
        Some(folder) if !folder.is_dir() => Err(format!(
            "there is no folder {} to write {} to; make it first",
            folder.display(),
            output.display()
        )),
        _ => Ok(()),
    }
}

/// The tensors of a file that a call needs.
struct Inputs<'a> {
    q: TensorView<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
    key_lengths: Option<Vec<u32>>,
    /// Of q, k and v: one number per batch entry and kv head, or one for all.
    descales: [Option<Vec<f32>>; 3],
    dtype: Dtype,
}

impl<'a> Inputs<'a> {
    fn find(file: &SafeTensors<'a>) -> Result<Self, String> {
        let contents = files::contents(file);
        let get = |name: &str| {
            file.tensor(name).map_err(|_| {
                format!("there is no tensor {name}; q, k and v are needed, the file holds {contents}")
            })
        };
        let (q, k, v) = (get("q")?, get("k")?, get("v")?);
        for (name, tensor) in [("q", &q), ("k", &k), ("v", &v)] {
            if files::dtype(tensor.dtype()).is_none() {
                return Err(format!(
                    "{name} is {:?}; possible are F16, BF16, F32 and F8_E4M3. Convert it before saving",
                    tensor.dtype()
                ));
            }
            if tensor.shape().len() != 4 {
                return Err(format!(
                    "{name} has the shape {:?}; attention takes four dimensions, (batch, heads, length, head_dim) or, \
                     with --layout bshd, (batch, length, heads, head_dim). Reshape it before saving",
                    tensor.shape()
                ));
            }
            if tensor.dtype() != q.dtype() {
                return Err(format!(
                    "{name} is {:?} and q is {:?}; q, k and v share one dtype. Convert {name}",
                    tensor.dtype(),
                    q.dtype()
                ));
            }
        }
        let key_lengths = file.tensor("key_lengths").ok().map(|tensor| key_lengths(&tensor)).transpose()?;
        let descales = files::descales(file)?;
        let dtype = q.dtype();
        Ok(Self { q, k, v, key_lengths, descales, dtype })
    }
}

/// The key lengths as numbers, whatever integers they are stored as.
fn key_lengths(tensor: &TensorView<'_>) -> Result<Vec<u32>, String> {
    if tensor.shape().len() != 1 {
        return Err(format!(
            "key_lengths has the shape {:?}; give one number per batch entry",
            tensor.shape()
        ));
    }
    let number = |bytes: &[u8]| -> Option<i64> {
        Some(match tensor.dtype() {
            Dtype::I32 => i64::from(i32::from_le_bytes(bytes.try_into().ok()?)),
            Dtype::U32 => i64::from(u32::from_le_bytes(bytes.try_into().ok()?)),
            Dtype::I64 => i64::from_le_bytes(bytes.try_into().ok()?),
            _ => return None,
        })
    };
    let width = if tensor.dtype() == Dtype::I64 { 8 } else { 4 };
    tensor
        .data()
        .chunks(width)
        .map(|bytes| {
            let number = number(bytes).ok_or_else(|| {
                format!("key_lengths is {:?}; possible are I32, I64 and U32", tensor.dtype())
            })?;
            u32::try_from(number)
                .map_err(|_| format!("key_lengths holds {number}; a length is from 0 to the length of k"))
        })
        .collect()
}

/// From tensors of `T` to an output of `U`.
fn attend<T: Stored, U: Stored>(options: &Options, inputs: &Inputs<'_>) -> Result<Done, String> {
    let say = |error: flashcore::Error| error.to_string();
    let order = options.layout;
    let data = [&inputs.q, &inputs.k, &inputs.v].map(|tensor| files::elements::<T>(tensor.data()));
    let view = |i: usize, tensor: &TensorView<'_>| {
        Tensor::strided(&data[i], arrange(order, swap(order, tensor.shape())))
    };
    let (q, k, v) = (
        view(0, &inputs.q).map_err(say)?,
        view(1, &inputs.k).map_err(say)?,
        view(2, &inputs.v).map_err(say)?,
    );
    let heads = [q.shape()[0], k.shape()[1]];
    let mut each = [None; 3];
    for (tensor, descale) in each.iter_mut().zip(&inputs.descales) {
        *tensor = descale.as_ref().map(|data| Tensor::descale(data, heads)).transpose().map_err(say)?;
    }
    let descales = Descales::some_of(each.each_ref().map(Option::as_ref));
    let attention = attention(options, inputs).descales(descales);
    let problem = attention.problem(&q, &k, &v).map_err(say)?;
    memory::check(&problem, memory::to_call(&problem))?;
    let shape = [problem.batch, problem.heads_q, problem.len_q, problem.head_dim_v];
    let [batch, heads, len, width] = shape;
    let mut o = vec![U::default(); batch * heads * len * width];
    let mut lse = vec![0.0_f32; batch * heads * len];
    let mut o_view = TensorMut::strided(&mut o, arrange(order, shape)).map_err(say)?;
    let mut lse_view = TensorMut::strided(&mut lse, arrange(order, [batch, heads, len, 1])).map_err(say)?;
    let start = Instant::now();
    let lse_wanted = options.lse.then_some(&mut lse_view);
    attention.run_into(&options.device, &q, &k, &v, &mut o_view, lse_wanted).map_err(say)?;
    let call_us = start.elapsed().as_secs_f64() * 1e6;
    let stored = swap(order, &shape);
    Ok(Done {
        problem: problem.to_string(),
        o: (stored.to_vec(), files::bytes(&o)),
        lse: options.lse.then(|| (stored[..3].to_vec(), files::bytes(&lse))),
        dtype: U::STORED,
        call_us,
    })
}

fn attention<'a>(options: &Options, inputs: &'a Inputs<'_>) -> Attention<'a> {
    let mask = match (options.mask, options.window) {
        (Some(mask), _) | (_, Some(mask)) => mask,
        _ if options.causal => Mask::Causal,
        _ if options.causal_top_left => Mask::CausalTopLeft,
        _ => Mask::None,
    };
    let mut attention = Attention::new().mask(mask);
    if let Some(scale) = options.scale {
        attention = attention.scale(scale);
    }
    if let Some(softcap) = options.softcap {
        attention = attention.softcap(softcap);
    }
    match &inputs.key_lengths {
        Some(lengths) => attention.key_lengths(lengths),
        None => attention,
    }
}

/// A stored shape as (batch, heads, length, head_dim), or the other way round: the swap is its own inverse.
fn swap(order: Order, shape: &[usize]) -> [usize; 4] {
    match order {
        Order::Bhsd => [shape[0], shape[1], shape[2], shape[3]],
        Order::Bshd => [shape[0], shape[2], shape[1], shape[3]],
    }
}

fn arrange(order: Order, shape: [usize; 4]) -> Layout {
    match order {
        Order::Bhsd => Layout::bhsd(shape),
        Order::Bshd => Layout::bshd(shape),
    }
}

fn write(options: &Options, done: &Done) -> Result<(), String> {
    let view = |dtype, shape: &[usize], bytes| {
        TensorView::new(dtype, shape.to_vec(), bytes).expect("shape and bytes were made together")
    };
    let mut tensors = vec![("o", view(done.dtype, &done.o.0, &done.o.1))];
    tensors.extend(done.lse.as_ref().map(|(shape, bytes)| ("lse", view(Dtype::F32, shape, bytes))));
    let metadata = HashMap::from([
        ("producer".to_string(), format!("flashcore {}", env!("CARGO_PKG_VERSION"))),
        ("problem".to_string(), done.problem.clone()),
    ]);
    let file = safetensors::serialize(tensors, Some(metadata))
        .map_err(|error| format!("cannot lay out {}: {error}", options.output.display()))?;
    files::write_whole(&options.output, |out| out.write_all(&file))
        .map_err(|error| files::explain("write", &options.output, &error))
}
