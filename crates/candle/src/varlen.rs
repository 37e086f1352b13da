//! Attention of packed sequences, one after the other.

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, backend::BackendStorage, bail,
};
use flashcore::{Backward, Device, Element, TensorMut};
use half::{bf16, f16};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaSlice;

#[cfg(feature = "cuda")]
use crate::gradients::kept_on_gpu;
use crate::{
    gradients::{Differentiate, Given, Gradients, Lse, backward, kept},
    options::{Options, bad_dtypes, fail, part, view},
};

/// The operation behind the functions for sequences of different lengths.
pub(crate) struct FlashAttnVarLen {
    options: Options,
    /// Where each sequence's queries begin and end.
    queries: Vec<[usize; 2]>,
    /// Where its keys do.
    keys: Vec<[usize; 2]>,
    /// The lse of every sequence, kept for the backward pass.
    lse: OnceLock<Lse>,
}

impl FlashAttnVarLen {
    pub fn new(options: Options, [q, k]: [&Tensor; 2], [most_q, most_k]: [usize; 2]) -> Result<Self> {
        let (queries, keys) = (ranges("seqlens_q", q, most_q)?, ranges("seqlens_k", k, most_k)?);
        if queries.len() != keys.len() {
            bail!("seqlens_q has {} sequences and seqlens_k has {}", queries.len(), keys.len())
        }
        Ok(Self { options, queries, keys, lse: OnceLock::new() })
    }

    /// The shape of the output, after a check that the sequences lie within the tensors.
    fn check(&self, [q, k, v]: [&Layout; 3]) -> Result<[usize; 3]> {
        let rows = |name: &str, layout: &Layout, ranges: &[[usize; 2]]| {
            let [rows, _, _] = layout.dims() else {
                bail!(
                    "{name} has {} dimensions; attention takes (all rows, heads, head_dim)",
                    layout.dims().len()
                )
            };
            match ranges.last() {
                Some([_, end]) if end > rows => {
                    bail!("the sequences end at row {end}, and {name} has {rows}")
                }
                _ => Ok(*rows),
            }
        };
        let all = rows("q", q, &self.queries)?;
        rows("k", k, &self.keys)?;
        rows("v", v, &self.keys)?;
        Ok([all, q.dims()[1], v.dims()[2]])
    }

    fn on_cpu<T: Element + Default>(
        &self,
        [q, k, v]: [&[T]; 3],
        layouts: [&Layout; 3],
    ) -> Result<(Vec<T>, Shape)> {
        let attention = self.options.attention()?;
        let shape @ [_, heads, width] = self.check(layouts)?;
        let mut o = vec![T::default(); shape.iter().product()];
        let mut lse = vec![0.0_f32; shape[0] * heads];
        for (&queries, &keys) in self.queries.iter().zip(&self.keys) {
            let tensor = |name, data, layout, range| {
                let (layout, offset) = part(name, layout, range)?;
                view(data, offset, layout)
            };
            let q = tensor("q", q, layouts[0], queries)?;
            let k = tensor("k", k, layouts[1], keys)?;
            let v = tensor("v", v, layouts[2], keys)?;
            let [start, end] = queries;
            let rows = &mut o[start * heads * width..end * heads * width];
            let mut out = TensorMut::bshd(rows, &[1, end - start, heads, width]).map_err(fail)?;
            let lse = &mut lse[start * heads..end * heads];
            let mut lse = TensorMut::new(lse, &[1, heads, end - start, 1]).map_err(fail)?;
            attention.run_into(&Device::cpu(), &q, &k, &v, &mut out, Some(&mut lse)).map_err(fail)?;
        }
        // A second forward pass of the same call would give the same.
        let _ = self.lse.set(Lse::Cpu(lse));
        Ok((o, Shape::from(shape.to_vec())))
    }
}

impl Differentiate for FlashAttnVarLen {
    fn differentiate<T: Element>(&self, given: [Given<'_, T>; 5], into: [&mut [T]; 3]) -> Result<()> {
        let (attention, lse) = (self.options.attention()?, kept(&self.lse)?);
        let [dq, dk, dv] = into;
        for (&queries, &keys) in self.queries.iter().zip(&self.keys) {
            let tensor = |i: usize, rows| {
                let (name, data, layout) = given[i];
                let (layout, offset) = part(name, layout, rows)?;
                view(data, offset, layout)
            };
            let [q, o, d_o] = [tensor(0, queries)?, tensor(3, queries)?, tensor(4, queries)?];
            let (k, v) = (tensor(1, keys)?, tensor(2, keys)?);
            let [_, heads, len, _] = q.shape();
            let lse = &lse[queries[0] * heads..queries[1] * heads];
            let lse = flashcore::Tensor::new(lse, &[1, heads, len, 1]).map_err(fail)?;
            // The gradients of rows that are in no sequence stay 0.
            let mut dq = rows_of(dq, given[0].2, queries)?;
            let (mut dk, mut dv) = (rows_of(dk, given[1].2, keys)?, rows_of(dv, given[2].2, keys)?);
            let given = Backward::new([&q, &k, &v], &o, &lse, &d_o);
            attention.backward_into(&Device::cpu(), &given, &mut dq, &mut dk, &mut dv).map_err(fail)?;
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn differentiate_on_gpu<T: crate::gpu::GpuElement>(
        &self,
        gpu: &flashcore_cudarc::Gpu,
        given: [crate::gpu::Given<'_>; 5],
        [dq, dk, dv]: [&mut CudaSlice<T>; 3],
    ) -> Result<()> {
        use flashcore_cudarc::{Input, Output};
        let (attention, lse) = (self.options.attention()?, kept_on_gpu(&self.lse)?);
        // A gradient's rows have the width and the heads of another tensor.
        let sizes = |i: usize| given[i].2.shape().dims3().map(|(_, heads, width)| (heads, width));
        let ((heads, of_q), (kv, of_k), (_, of_v)) = (sizes(0)?, sizes(1)?, sizes(2)?);
        for (&queries, &keys) in self.queries.iter().zip(&self.keys) {
            let (len_q, len_k) = (queries[1] - queries[0], keys[1] - keys[0]);
            if len_q == 0 || len_k == 0 {
                continue;
            }
            let tensor = |i: usize, rows| {
                let (name, storage, layout) = given[i];
                let (layout, offset) = part(name, layout, rows)?;
                Ok::<_, candle_core::Error>((crate::gpu::from_offset::<T>(storage, offset)?, layout))
            };
            let tensors = [
                tensor(0, queries)?,
                tensor(1, keys)?,
                tensor(2, keys)?,
                tensor(3, queries)?,
                tensor(4, queries)?,
            ];
            let inputs = tensors.each_ref().map(|(slice, layout)| Input::strided(slice, *layout));
            let lse = lse.slice(queries[0] * heads..queries[1] * heads);
            let lse = Input::bhsd(&lse, [1, heads, len_q, 1]);
            let rows = |[start, end]: [usize; 2], row: usize| start * row..end * row;
            let mut dq = dq.slice_mut(rows(queries, heads * of_q));
            let mut dk = dk.slice_mut(rows(keys, kv * of_k));
            let mut dv = dv.slice_mut(rows(keys, kv * of_v));
            let gradients = [
                Output::bshd(&mut dq, [1, len_q, heads, of_q]),
                Output::bshd(&mut dk, [1, len_k, kv, of_k]),
                Output::bshd(&mut dv, [1, len_k, kv, of_v]),
            ];
            gpu.backward_into(&attention, &inputs, &lse, gradients).map_err(fail)?;
        }
        Ok(())
    }
}

/// The rows of a sequence in a gradient that has the shape of another tensor.
fn rows_of<'a, T: Element>(
    all: &'a mut [T],
    like: &Layout,
    [start, end]: [usize; 2],
) -> Result<TensorMut<'a>> {
    let (heads, width) = (like.dims()[1], like.dims()[2]);
    let rows = &mut all[start * heads * width..end * heads * width];
    TensorMut::bshd(rows, &[1, end - start, heads, width]).map_err(fail)
}

/// Where sequences begin and end, from their cumulative lengths.
fn ranges(name: &str, cumulative: &Tensor, most: usize) -> Result<Vec<[usize; 2]>> {
    if cumulative.dtype() != DType::U32 || cumulative.dims().len() != 1 {
        bail!(
            "{name} is {:?} {:?}; it must be u32, with one element per sequence and one more",
            cumulative.dtype(),
            cumulative.dims()
        )
    }
    let cumulative = cumulative.to_vec1::<u32>()?;
    let mut ranges = Vec::new();
    for (i, pair) in cumulative.windows(2).enumerate() {
        let [start, end] = [pair[0] as usize, pair[1] as usize];
        if end < start || end - start > most {
            bail!("{name} gives sequence {i} from {start} to {end}; possible are lengths from 0 to {most}")
        }
        ranges.push([start, end]);
    }
    if ranges.is_empty() {
        bail!("{name} has {} entries; a batch of n sequences has n + 1", cumulative.len())
    }
    Ok(ranges)
}

impl CustomOp3 for FlashAttnVarLen {
    fn name(&self) -> &'static str {
        "flash-attn-varlen"
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
        let layouts = [q_layout, k_layout, v_layout];
        match (q, k, v) {
            (CpuStorage::F16(q), CpuStorage::F16(k), CpuStorage::F16(v)) => {
                let (o, shape) = self.on_cpu::<f16>([q, k, v], layouts)?;
                Ok((CpuStorage::F16(o), shape))
            }
            (CpuStorage::BF16(q), CpuStorage::BF16(k), CpuStorage::BF16(v)) => {
                let (o, shape) = self.on_cpu::<bf16>([q, k, v], layouts)?;
                Ok((CpuStorage::BF16(o), shape))
            }
            (CpuStorage::F32(q), CpuStorage::F32(k), CpuStorage::F32(v)) => {
                let (o, shape) = self.on_cpu::<f32>([q, k, v], layouts)?;
                Ok((CpuStorage::F32(o), shape))
            }
            _ => bad_dtypes([q.dtype(), k.dtype(), v.dtype()]),
        }
    }

    fn bwd(&self, q: &Tensor, k: &Tensor, v: &Tensor, o: &Tensor, d_o: &Tensor) -> Result<Gradients> {
        backward(self, [q, k, v, o, d_o])
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
        let (tensors, layouts) = ([q, k, v], [q_layout, k_layout, v_layout]);
        match tensors.map(BackendStorage::dtype) {
            [DType::F16, DType::F16, DType::F16] => self.on_gpu::<f16>(tensors, layouts),
            [DType::BF16, DType::BF16, DType::BF16] => self.on_gpu::<bf16>(tensors, layouts),
            others => bad_dtypes(others),
        }
    }
}

#[cfg(feature = "cuda")]
impl FlashAttnVarLen {
    fn on_gpu<T: crate::gpu::GpuElement>(
        &self,
        [q, k, v]: [&candle_core::CudaStorage; 3],
        layouts: [&Layout; 3],
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use crate::gpu::from_offset;
        use flashcore_cudarc::{Input, Output};
        let attention = self.options.attention()?;
        let shape @ [rows, heads, width] = self.check(layouts)?;
        let device = q.device();
        let mut o = crate::gpu::output::<T>(device, shape.iter().product(), self.covers(rows))?;
        let mut lse = crate::gpu::output::<f32>(device, rows * heads, true)?;
        let gpu = crate::gpu::on(device)?;
        for (&queries, &keys) in self.queries.iter().zip(&self.keys) {
            let [start, end] = queries;
            if start == end {
                continue;
            }
            let (q_layout, q_offset) = part("q", layouts[0], queries)?;
            let (k_layout, k_offset) = part("k", layouts[1], keys)?;
            let (v_layout, v_offset) = part("v", layouts[2], keys)?;
            let q = from_offset::<T>(q, q_offset)?;
            let k = from_offset::<T>(k, k_offset)?;
            let v = from_offset::<T>(v, v_offset)?;
            let inputs =
                [Input::strided(&q, q_layout), Input::strided(&k, k_layout), Input::strided(&v, v_layout)];
            let mut rows = o.slice_mut(start * heads * width..end * heads * width);
            let out = Output::bshd(&mut rows, [1, end - start, heads, width]);
            let mut lse = lse.slice_mut(start * heads..end * heads);
            let lse = Output::lse(&mut lse, [1, heads, end - start]);
            gpu.run_into(&attention, inputs, out, Some(lse)).map_err(fail)?;
        }
        // A second forward pass of the same call would give the same.
        let _ = self.lse.set(Lse::Gpu(lse));
        let storage = candle_core::CudaStorage::wrap_cuda_slice(o, device.clone());
        Ok((storage, Shape::from(shape.to_vec())))
    }

    /// Whether every row of q is in a sequence.
    fn covers(&self, rows: usize) -> bool {
        matches!(self.queries[..], [[0, _], ..]) && matches!(self.queries[..], [.., [_, end]] if end == rows)
    }
}
