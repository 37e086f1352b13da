//! Attention on cudarc slices, checked against the CPU engine. Needs a GPU.

use cudarc::driver::CudaContext;
use flashcore_cudarc::{Attention, Gpu, Input, Output};
use half::f16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let shape = [2, 8, 333, 64];
    let count: usize = shape.iter().product();
    let data: Vec<Vec<f16>> = (1..4)
        .map(|seed: usize| {
            (0..count).map(|i| f16::from_f32(((i * 7919 * seed) as f32 * 0.37).sin())).collect()
        })
        .collect();
    let stream = CudaContext::new(0)?.new_stream()?;
    let (q, k, v) =
        (stream.clone_htod(&data[0])?, stream.clone_htod(&data[1])?, stream.clone_htod(&data[2])?);
    let mut o = stream.alloc_zeros::<f16>(count)?;
    let gpu = Gpu::new(&stream)?;
    let attention = Attention::new().causal();
    let inputs = [Input::bhsd(&q, shape), Input::bhsd(&k, shape), Input::bhsd(&v, shape)];
    gpu.run_into(&attention, inputs, Output::bhsd(&mut o, shape), None)?;
    let on_gpu = stream.clone_dtoh(&o)?;

    let host = |data: &'_ [f16]| flashcore::Tensor::new(data, &shape).map(|tensor| tensor.to_f32());
    let tensors: Vec<flashcore::TensorBuf> = data
        .iter()
        .map(|data| flashcore::TensorBuf::from_f32(&host(data)?, shape, flashcore::DType::F16))
        .collect::<Result<_, _>>()?;
    let (q, k, v) = (tensors[0].view(), tensors[1].view(), tensors[2].view());
    let on_cpu = attention.run(&flashcore::Device::cpu(), &q, &k, &v)?.o.to_f32();
    let worst = on_gpu.iter().zip(&on_cpu).map(|(a, b)| (a.to_f32() - b).abs()).fold(0.0, f32::max);
    println!("{}: the GPU differs from the CPU by at most {worst:.2e}", gpu.cuda());
    if worst > 2e-3 { Err("that is too much".into()) } else { Ok(()) }
}
