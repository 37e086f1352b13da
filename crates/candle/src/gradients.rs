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

type Gradients = (Option<Tensor>, Option<Tensor>, Option<Tensor>);

impl Differentiable {
    /// The gradients of q, k and v, given these, o and its gradient.
    fn gradients<T: Element + WithDType + Default>(&self, tensors: [&Tensor; 5]) -> Result<Gradients> {
        let memory = tensors.map(Tensor::storage_and_layout);
        let tensor = |i: usize| {
            let (storage, layout) = &memory[i];
            let Storage::Cpu(storage) = &**storage else { bail!("a tensor of this call is not on the CPU") };
            let name = ["q", "k", "v", "o", "the gradient"][i];
            view(T::cpu_storage_as_slice(storage)?, layout.start_offset(), dense(name, layout)?)
        };
        let [q, k, v, o, d_o] = [tensor(0)?, tensor(1)?, tensor(2)?, tensor(3)?, tensor(4)?];
        let [batch, heads, len, _] = q.shape();
        let Some(lse) = self.lse.get() else { bail!("there was no forward pass on the CPU") };
        let lse = flashcore::Tensor::new(lse, &[batch, heads, len, 1]).map_err(fail)?;
        let mut gradients = [0, 1, 2].map(|i| vec![T::default(); tensors[i].elem_count()]);
        let [dq, dk, dv] = &mut gradients;
        let place = |memory, i: usize| TensorMut::bshd(memory, tensors[i].dims()).map_err(fail);
        let (mut dq, mut dk, mut dv) = (place(dq, 0)?, place(dk, 1)?, place(dv, 2)?);
        let given = Backward::new([&q, &k, &v], &o, &lse, &d_o);
        let (attention, device) = (self.attention.options().attention()?, flashcore::Device::cpu());
        attention.backward_into(&device, &given, &mut dq, &mut dk, &mut dv).map_err(fail)?;
        let [dq, dk, dv] = gradients;
        let gradient = |data, i: usize| Tensor::from_vec(data, tensors[i].dims(), &Device::Cpu).map(Some);
        Ok((gradient(dq, 0)?, gradient(dk, 1)?, gradient(dv, 2)?))
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
        if !q.device().is_cpu() {
            bail!("gradients of attention are computed on the CPU so far: move q, k and v there")
        }
        // Gradients of sums are broadcast, and have no stride of 1.
        let d_o = d_o.contiguous()?;
        let tensors = [q, k, v, o, &d_o];
        match q.dtype() {
            DType::F16 => self.gradients::<f16>(tensors),
            DType::BF16 => self.gradients::<bf16>(tensors),
            _ => self.gradients::<f32>(tensors),
        }
    }
}
