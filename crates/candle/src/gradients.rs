//! The backward pass of attention.

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use flashcore::{Backward, Element, TensorMut};
use half::{bf16, f16};

#[cfg(feature = "cuda")]
use candle_core::{Error, cuda_backend::cudarc::driver::CudaSlice, op::BackpropOp};
#[cfg(feature = "cuda")]
use flashcore_cudarc::{Input, Output};

#[cfg(feature = "cuda")]
use crate::gpu;
use crate::{
    dense::FlashAttn,
    options::{dense, fail, view},
};

/// Attention that keeps its lse for the backward pass.
pub(crate) struct Differentiable {
    attention: FlashAttn,
    lse: OnceLock<Lse>,
}

/// The lse that a forward pass has left where it ran.
pub(crate) enum Lse {
    Cpu(Vec<f32>),
    #[cfg(feature = "cuda")]
    Gpu(CudaSlice<f32>),
}

/// Attention, with a backward pass if a gradient may be asked for.
pub(crate) fn apply(attention: FlashAttn, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    if [q, k, v].into_iter().any(Tensor::track_op) {
        q.apply_op3(k, v, Differentiable { attention, lse: OnceLock::new() })
    } else {
        q.apply_op3(k, v, attention)
    }
}

/// The gradients of q, k and v.
pub(crate) type Gradients = (Option<Tensor>, Option<Tensor>, Option<Tensor>);

/// A tensor in memory: its name, its elements, and how they lie.
pub(crate) type Given<'a, T> = (&'static str, &'a [T], &'a Layout);

/// Computes gradients from q, k, v, o and the gradient of o, into memory with the shapes of q, k and v.
pub(crate) trait Differentiate {
    fn differentiate<T: Element>(&self, given: [Given<'_, T>; 5], into: [&mut [T]; 3]) -> Result<()>;

    #[cfg(feature = "cuda")]
    fn differentiate_on_gpu<T: gpu::GpuElement>(
        &self,
        gpu: &flashcore_cudarc::Gpu,
        given: [gpu::Given<'_>; 5],
        into: [&mut CudaSlice<T>; 3],
    ) -> Result<()>;
}

/// The backward pass of an operation, given its inputs, o and the gradient of o.
pub(crate) fn backward(of: &impl Differentiate, tensors: [&Tensor; 5]) -> Result<Gradients> {
    let [q, k, v, o, d_o] = tensors;
    // Gradients of sums are broadcast, and have no stride of 1.
    let d_o = d_o.contiguous()?;
    let tensors = [q, k, v, o, &d_o];
    match (q.device(), q.dtype()) {
        (Device::Cpu, DType::F16) => typed::<f16>(of, tensors),
        (Device::Cpu, DType::BF16) => typed::<bf16>(of, tensors),
        (Device::Cpu, _) => typed::<f32>(of, tensors),
        #[cfg(feature = "cuda")]
        (Device::Cuda(device), DType::F16) => on_gpu::<f16>(of, device, tensors),
        #[cfg(feature = "cuda")]
        (Device::Cuda(device), DType::BF16) => on_gpu::<bf16>(of, device, tensors),
        (device, dtype) => bail!("attention has no gradients of {dtype:?} on {:?}", device.location()),
    }
}

#[cfg(feature = "cuda")]
fn on_gpu<T: gpu::GpuElement>(
    of: &impl Differentiate,
    device: &candle_core::CudaDevice,
    tensors: [&Tensor; 5],
) -> Result<Gradients> {
    let memory = tensors.map(Tensor::storage_and_layout);
    let given = |i: usize| {
        let (storage, layout) = &memory[i];
        let Storage::Cuda(storage) = &**storage else { bail!("a tensor of this call is not on the GPU") };
        Ok((["q", "k", "v", "o", "the gradient"][i], storage, *layout))
    };
    // Rows that are in no sequence, or that nobody computes because there is nothing to see, have gradients of 0.
    let place = |i: usize| gpu::output::<T>(device, tensors[i].elem_count(), false);
    let (mut dq, mut dk, mut dv) = (place(0)?, place(1)?, place(2)?);
    let given = [given(0)?, given(1)?, given(2)?, given(3)?, given(4)?];
    of.differentiate_on_gpu(&gpu::on(device)?, given, [&mut dq, &mut dk, &mut dv])?;
    let gradient = |slice, i: usize| {
        let storage = Storage::Cuda(candle_core::CudaStorage::wrap_cuda_slice(slice, device.clone()));
        Some(Tensor::from_storage(storage, tensors[i].dims(), BackpropOp::none(), false))
    };
    Ok((gradient(dq, 0), gradient(dk, 1), gradient(dv, 2)))
}

fn typed<T: Element + WithDType + Default>(
    of: &impl Differentiate,
    tensors: [&Tensor; 5],
) -> Result<Gradients> {
    let memory = tensors.map(Tensor::storage_and_layout);
    let given = |i: usize| {
        let (storage, layout) = &memory[i];
        let Storage::Cpu(storage) = &**storage else { bail!("a tensor of this call is not on the CPU") };
        Ok((["q", "k", "v", "o", "the gradient"][i], T::cpu_storage_as_slice(storage)?, *layout))
    };
    let mut gradients = [0, 1, 2].map(|i| vec![T::default(); tensors[i].elem_count()]);
    let into = gradients.each_mut().map(Vec::as_mut_slice);
    of.differentiate([given(0)?, given(1)?, given(2)?, given(3)?, given(4)?], into)?;
    let [dq, dk, dv] = gradients;
    let gradient = |data, i: usize| Tensor::from_vec(data, tensors[i].dims(), &Device::Cpu).map(Some);
    Ok((gradient(dq, 0)?, gradient(dk, 1)?, gradient(dv, 2)?))
}

impl Differentiate for Differentiable {
    fn differentiate<T: Element>(&self, given: [Given<'_, T>; 5], into: [&mut [T]; 3]) -> Result<()> {
        let tensor = |i: usize| {
            let (name, data, layout) = given[i];
            view(data, layout.start_offset(), dense(name, layout)?)
        };
        let [q, k, v, o, d_o] = [tensor(0)?, tensor(1)?, tensor(2)?, tensor(3)?, tensor(4)?];
        let [batch, heads, len, _] = q.shape();
        let lse = kept(&self.lse)?;
        let lse = flashcore::Tensor::new(lse, &[batch, heads, len, 1]).map_err(fail)?;
        let [dq, dk, dv] = into;
        let place = |memory, i: usize| TensorMut::bshd(memory, given[i].2.dims()).map_err(fail);
        let (mut dq, mut dk, mut dv) = (place(dq, 0)?, place(dk, 1)?, place(dv, 2)?);
        let given = Backward::new([&q, &k, &v], &o, &lse, &d_o);
        let (attention, device) = (self.attention.options().attention()?, flashcore::Device::cpu());
        attention.backward_into(&device, &given, &mut dq, &mut dk, &mut dv).map_err(fail)
    }

    #[cfg(feature = "cuda")]
    fn differentiate_on_gpu<T: gpu::GpuElement>(
        &self,
        gpu: &flashcore_cudarc::Gpu,
        given: [gpu::Given<'_>; 5],
        into: [&mut CudaSlice<T>; 3],
    ) -> Result<()> {
        let slice = |i: usize| gpu::from_offset::<T>(given[i].1, given[i].2.start_offset());
        let slices = [slice(0)?, slice(1)?, slice(2)?, slice(3)?, slice(4)?];
        let input = |i: usize| Ok::<_, Error>(Input::strided(&slices[i], dense(given[i].0, given[i].2)?));
        let inputs = [input(0)?, input(1)?, input(2)?, input(3)?, input(4)?];
        let (batch, len, heads, _) = given[0].2.shape().dims4()?;
        let lse = Input::bhsd(kept_on_gpu(&self.lse)?, [batch, heads, len, 1]);
        let [dq, dk, dv] = into;
        let place = |i: usize| given[i].2.shape().dims4().map(|(b, s, h, d)| [b, s, h, d]);
        let gradients =
            [Output::bshd(dq, place(0)?), Output::bshd(dk, place(1)?), Output::bshd(dv, place(2)?)];
        gpu.backward_into(&self.attention.options().attention()?, &inputs, &lse, gradients).map_err(fail)
    }
}

/// The lse that a forward pass on the CPU has left.
pub(crate) fn kept(lse: &OnceLock<Lse>) -> Result<&[f32]> {
    match lse.get() {
        Some(Lse::Cpu(lse)) => Ok(lse),
        _ => bail!("there was no forward pass on the CPU"),
    }
}

/// The lse that a forward pass on a GPU has left.
#[cfg(feature = "cuda")]
pub(crate) fn kept_on_gpu(lse: &OnceLock<Lse>) -> Result<&CudaSlice<f32>> {
    match lse.get() {
        Some(Lse::Gpu(lse)) => Ok(lse),
        _ => bail!("there was no forward pass on the GPU"),
    }
}

impl CustomOp3 for Differentiable {
    fn name(&self) -> &'static str {
        self.attention.name()
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.attention.forward([q, k, v], [q_layout, k_layout, v_layout], Some(&self.lse))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        q_layout: &Layout,
        k: &candle_core::CudaStorage,
        k_layout: &Layout,
        v: &candle_core::CudaStorage,
        v_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        self.attention.forward_on_gpu([q, k, v], [q_layout, k_layout, v_layout], Some(&self.lse))
    }

    fn bwd(&self, q: &Tensor, k: &Tensor, v: &Tensor, o: &Tensor, d_o: &Tensor) -> Result<Gradients> {
        backward(self, [q, k, v, o, d_o])
    }
}
