//! Attention of tensors with a batch dimension.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, backend::BackendStorage};
use flashcore::{Device, Element, TensorMut};
use half::{bf16, f16};

use crate::gradients::Lse;
use crate::options::{Options, bad_dtypes, dense, fail, view};

/// The operation behind the functions for (batch, length, heads, head_dim) tensors.
pub struct FlashAttn {
    /// What scores are multiplied by.
    pub softmax_scale: f32,
    /// ALiBi slopes, which are refused.
    pub alibi_slopes: Option<Tensor>,
    /// Keys before its own position that a query sees.
    pub window_size_left: Option<usize>,
    /// Keys after its own position that a query sees.
    pub window_size_right: Option<usize>,
    /// Scores become `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
}

impl FlashAttn {
    pub(crate) fn options(&self) -> Options {
        Options {
            scale: self.softmax_scale,
            alibi: self.alibi_slopes.is_some(),
            left: self.window_size_left,
            right: self.window_size_right,
            softcap: self.softcap.unwrap_or(0.0),
        }
    }

    fn on_cpu<T: Element + Default>(
        &self,
        [q, k, v]: [&[T]; 3],
        [q_layout, k_layout, v_layout]: [&Layout; 3],
        keep: Option<&OnceLock<Lse>>,
    ) -> Result<(Vec<T>, Shape)> {
        let attention = self.options().attention()?;
        let tensor = |name, data, layout: &Layout| view(data, layout.start_offset(), dense(name, layout)?);
        let (q, k, v) = (tensor("q", q, q_layout)?, tensor("k", k, k_layout)?, tensor("v", v, v_layout)?);
        let shape = out_shape(q.shape(), v.shape());
        let mut o = vec![T::default(); shape.iter().product()];
        let mut out = TensorMut::bshd(&mut o, &shape).map_err(fail)?;
        let [batch, heads, len, _] = q.shape();
        let mut lse = vec![0.0_f32; keep.map_or(0, |_| batch * heads * len)];
        let place = keep.map(|_| TensorMut::new(&mut lse, &[batch, heads, len, 1]));
        let mut place = place.transpose().map_err(fail)?;
        attention.run_into(&Device::cpu(), &q, &k, &v, &mut out, place.as_mut()).map_err(fail)?;
        if let Some(keep) = keep {
            // A second forward pass of the same call would give the same.
            let _ = keep.set(Lse::Cpu(lse));
        }
        Ok((o, Shape::from(shape.to_vec())))
    }

    /// Attention on the CPU; `keep` is where lse goes.
    pub(crate) fn forward(
        &self,
        [q, k, v]: [&CpuStorage; 3],
        layouts: [&Layout; 3],
        keep: Option<&OnceLock<Lse>>,
    ) -> Result<(CpuStorage, Shape)> {
        match (q, k, v) {
            (CpuStorage::F16(q), CpuStorage::F16(k), CpuStorage::F16(v)) => {
                let (o, shape) = self.on_cpu::<f16>([q, k, v], layouts, keep)?;
                Ok((CpuStorage::F16(o), shape))
            }
            (CpuStorage::BF16(q), CpuStorage::BF16(k), CpuStorage::BF16(v)) => {
                let (o, shape) = self.on_cpu::<bf16>([q, k, v], layouts, keep)?;
                Ok((CpuStorage::BF16(o), shape))
            }
            (CpuStorage::F32(q), CpuStorage::F32(k), CpuStorage::F32(v)) => {
                let (o, shape) = self.on_cpu::<f32>([q, k, v], layouts, keep)?;
                Ok((CpuStorage::F32(o), shape))
            }
            _ => bad_dtypes([q.dtype(), k.dtype(), v.dtype()]),
        }
    }
}

/// (batch, length, heads, head_dim) of the output.
fn out_shape([b, h, s, _]: [usize; 4], [_, _, _, d]: [usize; 4]) -> [usize; 4] {
    [b, s, h, d]
}

impl CustomOp3 for FlashAttn {
    fn name(&self) -> &'static str {
        "flash-attn"
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
        self.forward([q, k, v], [q_layout, k_layout, v_layout], None)
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
        self.forward_on_gpu([q, k, v], [q_layout, k_layout, v_layout], None)
    }
}

#[cfg(feature = "cuda")]
impl FlashAttn {
    /// Attention on a GPU; `keep` is where lse goes.
    pub(crate) fn forward_on_gpu(
        &self,
        tensors: [&candle_core::CudaStorage; 3],
        layouts: [&Layout; 3],
        keep: Option<&OnceLock<Lse>>,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::DType::{BF16, F16};
        match tensors.map(BackendStorage::dtype) {
            [F16, F16, F16] => self.on_gpu::<f16>(tensors, layouts, keep),
            [BF16, BF16, BF16] => self.on_gpu::<bf16>(tensors, layouts, keep),
            others => bad_dtypes(others),
        }
    }

    fn on_gpu<T: crate::gpu::GpuElement>(
        &self,
        [q, k, v]: [&candle_core::CudaStorage; 3],
        [q_layout, k_layout, v_layout]: [&Layout; 3],
        keep: Option<&OnceLock<Lse>>,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use flashcore_cudarc::{Input, Output};
        let attention = self.options().attention()?;
        let layouts = [dense("q", q_layout)?, dense("k", k_layout)?, dense("v", v_layout)?];
        let shape = out_shape(layouts[0].shape, layouts[2].shape);
        let device = q.device();
        let q = crate::gpu::from_offset::<T>(q, q_layout.start_offset())?;
        let k = crate::gpu::from_offset::<T>(k, k_layout.start_offset())?;
        let v = crate::gpu::from_offset::<T>(v, v_layout.start_offset())?;
        let mut o = crate::gpu::output::<T>(device, shape.iter().product(), true)?;
        let inputs =
            [Input::strided(&q, layouts[0]), Input::strided(&k, layouts[1]), Input::strided(&v, layouts[2])];
        let [batch, heads, len, _] = layouts[0].shape;
        let mut lse =
            keep.map(|_| crate::gpu::output::<f32>(device, batch * heads * len, true)).transpose()?;
        let place = lse.as_mut().map(|lse| Output::lse(lse, [batch, heads, len]));
        let gpu = crate::gpu::on(device)?;
        gpu.run_into(&attention, inputs, Output::bshd(&mut o, shape), place).map_err(fail)?;
        if let (Some(keep), Some(lse)) = (keep, lse) {
            // A second forward pass of the same call would give the same.
            let _ = keep.set(Lse::Gpu(lse));
        }
        let storage = candle_core::CudaStorage::wrap_cuda_slice(o, device.clone());
        Ok((storage, Shape::from(shape.to_vec())))
    }
}
