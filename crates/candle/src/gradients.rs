//! The backward pass of attention, on the CPU.

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use flashcore::{Backward, Element, TensorMut};
use half::{bf16, f16};

use crate::{
    dense::FlashAttn,
    options::{dense, fail, view},
};

/// Attention that keeps its lse for the backward pass.
pub(crate) struct Differentiable {
    attention: FlashAttn,
    lse: OnceLock<Vec<f32>>,
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
}

/// The backward pass of an operation, given its inputs, o and the gradient of o.
pub(crate) fn backward(of: &impl Differentiate, tensors: [&Tensor; 5]) -> Result<Gradients> {
    let [q, k, v, o, d_o] = tensors;
    if !q.device().is_cpu() {
        bail!("gradients of attention are computed on the CPU so far: move q, k and v there")
    }
    // Gradients of sums are broadcast, and have no stride of 1.
    let d_o = d_o.contiguous()?;
    let tensors = [q, k, v, o, &d_o];
    match q.dtype() {
        DType::F16 => typed::<f16>(of, tensors),
        DType::BF16 => typed::<bf16>(of, tensors),
        _ => typed::<f32>(of, tensors),
    }
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
}

/// The lse that a forward pass has left.
pub(crate) fn kept(lse: &OnceLock<Vec<f32>>) -> Result<&[f32]> {
    match lse.get() {
        Some(lse) => Ok(lse),
        None => bail!("there was no forward pass on the CPU"),
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
        self.attention.cuda_fwd(q, q_layout, k, k_layout, v, v_layout)
    }

    fn bwd(&self, q: &Tensor, k: &Tensor, v: &Tensor, o: &Tensor, d_o: &Tensor) -> Result<Gradients> {
        backward(self, [q, k, v, o, d_o])
    }
}
