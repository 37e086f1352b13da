//! Trains a small transformer on this repository's README, byte by byte, with FlashCore's attention or, for comparison, with
//! attention that candle computes and differentiates step by step.
//!
//! ```text
//! cargo run --release --example train                  # 200 steps
//! cargo run --release --example train -- 50 plain      # 50 steps, step by step
//! cargo run --release --features cuda --example train  # on a GPU, with attention in bf16; cpu behind it for the CPU
//! ```

use candle_core::{D, DType, Device, Result, Tensor, Var};
use flashcore_candle::flash_attn;

const TEXT: &[u8] = include_bytes!("../../../README.md");
const WIDTH: usize = 64;
const HEADS: usize = 2;
const BLOCKS: usize = 2;
const LENGTH: usize = 64;
const BATCH: usize = 4;
const BYTES: usize = 256;

/// Which attention a model has.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    FlashCore,
    Plain,
}

/// Numbers that look random, the same in every run.
struct Noise(u64);

impl Noise {
    /// From −1 to 1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn var(&mut self, shape: (usize, usize), size: f64, device: &Device) -> Result<Var> {
        let values: Vec<f32> = (0..shape.0 * shape.1).map(|_| self.next()).collect();
        Var::from_tensor(&(Tensor::from_vec(values, shape, device)? * size)?)
    }
}

struct Block {
    qkv: Var,
    out: Var,
    up: Var,
    down: Var,
}

struct Model {
    bytes: Var,
    places: Var,
    blocks: Vec<Block>,
    head: Var,
    kind: Kind,
}

/// A row less its mean, over its deviation.
fn normalised(x: &Tensor) -> Result<Tensor> {
    let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?.sqrt()?)
}

/// Rows times a matrix.
fn times(x: &Tensor, matrix: &Var) -> Result<Tensor> {
    let dims = x.dims();
    let (rows, width) = (dims[..dims.len() - 1].iter().product::<usize>(), matrix.dim(1)?);
    let shape = [&dims[..dims.len() - 1], &[width]].concat();
    x.reshape((rows, ()))?.matmul(matrix)?.reshape(shape)
}

/// The logarithms of the softmax of rows.
fn log_softmax(x: &Tensor) -> Result<Tensor> {
    let x = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
    x.broadcast_sub(&x.exp()?.sum_keepdim(D::Minus1)?.log()?)
}

/// Causal attention of (batch, length, heads, head_dim) tensors, step by step.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Result<Tensor> {
    let [q, k, v] = [q, k, v].map(|x| x.transpose(1, 2)?.contiguous());
    let scores = (q?.matmul(&k?.transpose(2, 3)?.contiguous()?)? * scale)?;
    let hidden = (0..LENGTH * LENGTH).map(|i| if i % LENGTH > i / LENGTH { f32::NEG_INFINITY } else { 0.0 });
    let mask = Tensor::from_iter(hidden, scores.device())?.reshape((LENGTH, LENGTH))?;
    let p = log_softmax(&scores.broadcast_add(&mask)?)?.exp()?;
    p.matmul(&v?)?.transpose(1, 2)?.contiguous()
}

/// The same by FlashCore, in bf16 on a GPU, where f32 has no gradients.
fn fused(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32) -> Result<Tensor> {
    if q.device().is_cpu() {
        return flash_attn(q, k, v, scale, true);
    }
    let [q, k, v] = [q, k, v].map(|x| x.to_dtype(DType::BF16));
    flash_attn(&q?, &k?, &v?, scale, true)?.to_dtype(DType::F32)
}

impl Model {
    fn new(kind: Kind, device: &Device) -> Result<Self> {
        let (mut noise, size) = (Noise(1), (WIDTH as f64).sqrt().recip());
        let mut var = |shape, size| noise.var(shape, size, device);
        let bytes = var((BYTES, WIDTH), 0.1)?;
        let places = var((LENGTH, WIDTH), 0.1)?;
        let mut block = || {
            Ok(Block {
                qkv: var((WIDTH, 3 * WIDTH), size)?,
                out: var((WIDTH, WIDTH), size)?,
                up: var((WIDTH, 4 * WIDTH), size)?,
                down: var((4 * WIDTH, WIDTH), size / 2.0)?,
            })
        };
        let blocks = (0..BLOCKS).map(|_| block()).collect::<Result<_>>()?;
        Ok(Self { bytes, places, blocks, head: var((WIDTH, BYTES), size)?, kind })
    }

    fn vars(&self) -> Vec<&Var> {
        let blocks = self.blocks.iter().flat_map(|it| [&it.qkv, &it.out, &it.up, &it.down]);
        blocks.chain([&self.bytes, &self.places, &self.head]).collect()
    }

    /// The mean loss, in nats per byte, of predicting `next` from `given`, both (batch, length).
    fn loss(&self, given: &Tensor, next: &Tensor) -> Result<Tensor> {
        let x = self.bytes.index_select(&given.flatten_all()?, 0)?.reshape((BATCH, LENGTH, WIDTH))?;
        let mut x = x.broadcast_add(&self.places)?;
        for block in &self.blocks {
            let qkv = times(&normalised(&x)?, &block.qkv)?;
            let head =
                |i: usize| qkv.narrow(2, i * WIDTH, WIDTH)?.reshape((BATCH, LENGTH, HEADS, WIDTH / HEADS));
            let (q, k, v) = (head(0)?, head(1)?, head(2)?);
            let scale = ((WIDTH / HEADS) as f32).sqrt().recip();
            let o = match self.kind {
                Kind::FlashCore => fused(&q, &k, &v, scale)?,
                Kind::Plain => plain(&q, &k, &v, scale.into())?,
            };
            x = (x + times(&o.reshape((BATCH, LENGTH, WIDTH))?, &block.out)?)?;
            x = (&x + times(&times(&normalised(&x)?, &block.up)?.gelu()?, &block.down)?)?;
        }
        let logs = log_softmax(&times(&normalised(&x)?, &self.head)?)?;
        logs.gather(&next.unsqueeze(2)?, 2)?.mean_all()?.neg()
    }
}

/// Adam's running means of a variable's gradient and of its square.
struct Means {
    gradient: Tensor,
    square: Tensor,
}

/// Trains a model, and returns the loss of every step.
fn train(kind: Kind, device: &Device, steps: usize, mut each: impl FnMut(usize, f32)) -> Result<Vec<f32>> {
    let (model, mut noise) = (Model::new(kind, device)?, Noise(2));
    let zeros = |var: &&Var| {
        let zero = var.zeros_like()?.detach();
        Ok(Means { gradient: zero.clone(), square: zero })
    };
    let mut means = model.vars().iter().map(zeros).collect::<Result<Vec<_>>>()?;
    let mut losses = Vec::with_capacity(steps);
    for step in 0..steps {
        let starts: Vec<usize> =
            (0..BATCH).map(|_| (noise.next().abs() * (TEXT.len() - LENGTH - 1) as f32) as usize).collect();
        let rows = |shift: usize| {
            let bytes = starts.iter().flat_map(|&start| &TEXT[start + shift..start + shift + LENGTH]);
            Tensor::from_iter(bytes.map(|&byte| u32::from(byte)), device)?.reshape((BATCH, LENGTH))
        };
        let loss = model.loss(&rows(0)?, &rows(1)?)?;
        let gradients = loss.backward()?;
        let t = step as i32 + 1;
        for (var, means) in model.vars().into_iter().zip(&mut means) {
            let Some(gradient) = gradients.get(var) else { continue };
            means.gradient = ((&means.gradient * 0.9)? + (gradient * 0.1)?)?.detach();
            means.square = ((&means.square * 0.99)? + (gradient.sqr()? * 0.01)?)?.detach();
            let (first, second) = (1.0 - 0.9_f64.powi(t), 1.0 - 0.99_f64.powi(t));
            let size = ((&means.square / second)?.sqrt()? + 1e-8)?;
            var.set(&(var.as_tensor() - ((&means.gradient / first)? / size)? * 3e-3)?.detach())?;
        }
        losses.push(loss.to_dtype(DType::F32)?.to_scalar()?);
        each(step, losses[step]);
    }
    Ok(losses)
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let steps = arguments.iter().find_map(|it| it.parse().ok()).unwrap_or(200);
    let asked = |word: &str| arguments.iter().any(|it| it == word);
    let kind = if asked("plain") { Kind::Plain } else { Kind::FlashCore };
    let device = if asked("cpu") { Device::Cpu } else { Device::cuda_if_available(0)? };
    println!("on {:?}", device.location());
    let start = std::time::Instant::now();
    train(kind, &device, steps, |step, loss| {
        if step % 10 == 0 || step + 1 == steps {
            println!("step {step:4}  loss {loss:.4} nats per byte  {:.1} s", start.elapsed().as_secs_f32());
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_falls_as_it_does_step_by_step() {
        let truth = train(Kind::Plain, &Device::Cpu, 12, |_, _| ()).unwrap();
        // On a GPU attention is computed in bf16.
        let gpu = Device::cuda_if_available(0).ok().filter(Device::is_cuda).map(|gpu| (gpu, 5e-2));
        for (device, most) in [(Device::Cpu, 2e-3)].into_iter().chain(gpu) {
            let ours = train(Kind::FlashCore, &device, 12, |_, _| ()).unwrap();
            assert!(ours[11] < ours[0] - 1.0, "{ours:?}");
            for (ours, truth) in ours.iter().zip(&truth) {
                assert!((ours - truth).abs() < most, "{ours} for {truth} on {:?}", device.location());
            }
        }
    }
}
