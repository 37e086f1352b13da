//! Attention of packed sequences, with keys and values that are packed too or lie in pages.

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, backend::BackendStorage, bail,
};
use flashcore::{Attention, Backward, Device, Element, Pages, Starts, TensorMut};
use half::{bf16, f16};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaSlice;

#[cfg(feature = "cuda")]
use crate::gradients::kept_on_gpu;
use crate::{
    gradients::{Differentiate, Given, Gradients, Lse, backward, kept},
    options::{Options, bad_dtypes, dense, fail, part, view},
};

/// The operation behind the functions for sequences of different lengths.
pub(crate) struct FlashAttnVarLen {
    options: Options,
    /// Where each sequence's queries begin, and the last one's end; and the most that one has.
    queries: (Vec<u32>, usize),
    /// The same for its keys.
    keys: (Vec<u32>, usize),
    /// How many keys each sequence has, and which pages, where keys lie in pages.
    pages: Option<Table>,
    /// The lse of all queries, kept for the backward pass.
    lse: OnceLock<Lse>,
}

/// Which pages each sequence has.
struct Table {
    lengths: Vec<u32>,
    pages: Vec<u32>,
    width: usize,
}

impl FlashAttnVarLen {
    pub fn new(options: Options, [q, k]: [&Tensor; 2], [most_q, most_k]: [usize; 2]) -> Result<Self> {
        let queries = (starts("seqlens_q", q, most_q)?, most_q);
        let keys = (starts("seqlens_k", k, most_k)?, most_k);
        if queries.0.len() != keys.0.len() {
            let [of_q, of_k] = [&queries, &keys].map(|(starts, _)| starts.len() - 1);
            bail!("seqlens_q has {of_q} sequences and seqlens_k has {of_k}")
        }
        Ok(Self { options, queries, keys, pages: None, lse: OnceLock::new() })
    }

    /// With keys in pages of (pages, page, heads, head_dim) tensors: `seqlens_k` then says how many keys there are.
    pub fn with_pages(self, table: &Tensor) -> Result<Self> {
        let sequences = self.keys.0.len() - 1;
        let (DType::U32, [rows, width]) = (table.dtype(), table.dims()) else {
            bail!("block_table is {:?} {:?}; it must be u32, (sequences, pages)", table.dtype(), table.dims())
        };
        if *rows != sequences {
            bail!("block_table has {rows} rows for {sequences} sequences")
        }
        let lengths = self.keys.0.windows(2).map(|ends| ends[1] - ends[0]).collect();
        let table = Table { lengths, pages: table.flatten_all()?.to_vec1()?, width: *width };
        Ok(Self { pages: Some(table), ..self })
    }

    /// The shape of the output, after a check that the tensors have dimensions as they must.
    fn check(&self, [q, k, v]: [&Layout; 3]) -> Result<[usize; 3]> {
        let rows = |name: &str, layout: &Layout, (starts, _): &(Vec<u32>, usize)| {
            let [rows, _, _] = layout.dims() else {
                bail!(
                    "{name} has {} dimensions; attention takes (all rows, heads, head_dim)",
                    layout.dims().len()
                )
            };
            match starts.last() {
                Some(&end) if end as usize > *rows => {
                    bail!("the sequences end at row {end}, and {name} has {rows}")
                }
                _ => Ok(*rows),
            }
        };
        let all = rows("q", q, &self.queries)?;
        if self.pages.is_none() {
            rows("k", k, &self.keys)?;
            rows("v", v, &self.keys)?;
        }
        let Some(width) = v.dims().last() else { bail!("v has no dimensions") };
        Ok([all, q.dims()[1], *width])
    }

    /// Calls `work` with attention that knows where the sequences are.
    fn attention<T>(&self, work: impl FnOnce(Attention<'_>) -> flashcore::Result<T>) -> Result<T> {
        let attention = self.options.attention()?.packed_queries(places(&self.queries)?);
        let done = match &self.pages {
            None => work(attention.packed_keys(places(&self.keys)?)),
            Some(Table { lengths, pages, width }) => {
                let rows = flashcore::Tensor::indices(pages, [lengths.len(), *width]).map_err(fail)?;
                let pages = Pages::new(&rows).with_most_keys(self.keys.1);
                work(attention.paged(pages).key_lengths(lengths))
            }
        };
        done.map_err(fail)
    }

    /// A tensor of packed rows, or of pages.
    fn view<'a, T: Element>(
        &self,
        name: &str,
        data: &'a [T],
        layout: &Layout,
    ) -> Result<flashcore::Tensor<'a>> {
        if self.pages.is_some() && name != "q" {
            return view(data, layout.start_offset(), dense(name, layout)?);
        }
        let rows = layout.dims().first().copied().unwrap_or(0);
        let (layout, offset) = part(name, layout, [0, rows])?;
        view(data, offset, layout)
    }

    fn on_cpu<T: Element + Default>(
        &self,
        [q, k, v]: [&[T]; 3],
        layouts: [&Layout; 3],
    ) -> Result<(Vec<T>, Shape)> {
        let shape @ [rows, heads, width] = self.check(layouts)?;
        // Rows that are in no sequence stay zeros.
        let mut o = vec![T::default(); shape.iter().product()];
        let mut lse = vec![0.0_f32; rows * heads];
        let q = self.view("q", q, layouts[0])?;
        let (k, v) = (self.view("k", k, layouts[1])?, self.view("v", v, layouts[2])?);
        let mut out = TensorMut::bshd(&mut o, &[1, rows, heads, width]).map_err(fail)?;
        let mut sums = TensorMut::new(&mut lse, &[1, heads, rows, 1]).map_err(fail)?;
        self.attention(|it| it.run_into(&Device::cpu(), &q, &k, &v, &mut out, Some(&mut sums)))?;
        // A second forward pass of the same call would give the same.
        let _ = self.lse.set(Lse::Cpu(lse));
        Ok((o, Shape::from(shape.to_vec())))
    }
}

impl Differentiate for FlashAttnVarLen {
    fn differentiate<T: Element>(&self, given: [Given<'_, T>; 5], into: [&mut [T]; 3]) -> Result<()> {
        let lse = kept(&self.lse)?;
        let tensor = |i: usize| {
            let (name, data, layout) = given[i];
            self.view(name, data, layout)
        };
        let [q, k, v, o, d_o] = [tensor(0)?, tensor(1)?, tensor(2)?, tensor(3)?, tensor(4)?];
        let [_, heads, rows, _] = q.shape();
        let lse = flashcore::Tensor::new(lse, &[1, heads, rows, 1]).map_err(fail)?;
        // The gradients of rows that are in no sequence stay 0.
        let place = |memory, of: &flashcore::Tensor<'_>| {
            let [_, heads, rows, width] = of.shape();
            TensorMut::bshd(memory, &[1, rows, heads, width]).map_err(fail)
        };
        let [dq, dk, dv] = into;
        let (mut dq, mut dk, mut dv) = (place(dq, &q)?, place(dk, &k)?, place(dv, &v)?);
        let given = Backward::new([&q, &k, &v], &o, &lse, &d_o);
        self.attention(|it| it.backward_into(&Device::cpu(), &given, &mut dq, &mut dk, &mut dv))
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
        for (queries, keys) in ends(&self.queries).into_iter().zip(ends(&self.keys)) {
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

/// Where sequences begin, as FlashCore takes it.
fn places((starts, longest): &(Vec<u32>, usize)) -> Result<Starts<'_>> {
    let tensor = flashcore::Tensor::indices(starts, [1, starts.len()]).map_err(fail)?;
    Ok(Starts::of(&tensor, *longest))
}

/// Where sequences begin and end.
#[cfg(feature = "cuda")]
fn ends((starts, _): &(Vec<u32>, usize)) -> Vec<[usize; 2]> {
    starts.windows(2).map(|ends| [ends[0] as usize, ends[1] as usize]).collect()
}

/// Cumulative lengths, which begin every sequence at the end of the one before.
fn starts(name: &str, cumulative: &Tensor, most: usize) -> Result<Vec<u32>> {
    if cumulative.dtype() != DType::U32 || cumulative.dims().len() != 1 {
        bail!(
            "{name} is {:?} {:?}; it must be u32, with one element per sequence and one more",
            cumulative.dtype(),
            cumulative.dims()
        )
    }
    let cumulative = cumulative.to_vec1::<u32>()?;
    for (i, pair) in cumulative.windows(2).enumerate() {
        let [start, end] = [pair[0], pair[1]];
        if end < start || (end - start) as usize > most {
            bail!("{name} gives sequence {i} from {start} to {end}; possible are lengths from 0 to {most}")
        }
    }
    if cumulative.len() < 2 {
        bail!("{name} has {} entries; a batch of n sequences has n + 1", cumulative.len())
    }
    Ok(cumulative)
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
        if self.pages.is_some() {
            bail!("caches in pages are read on the CPU so far; gather the pages into k and v")
        }
        let shape @ [rows, heads, width] = self.check(layouts)?;
        let device = q.device();
        let mut o = crate::gpu::output::<T>(device, shape.iter().product(), self.covers(rows))?;
        let mut lse = crate::gpu::output::<f32>(device, rows * heads, true)?;
        let gpu = crate::gpu::on(device)?;
        for (queries, keys) in ends(&self.queries).into_iter().zip(ends(&self.keys)) {
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
        matches!(self.queries.0[..], [0, .., end] if end as usize == rows)
    }
}
