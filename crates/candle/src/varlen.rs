//! Attention of packed sequences, with keys and values that are packed too or lie in pages.
#![cfg_attr(feature = "cuda", allow(unsafe_code))] // The host does not read numbers on a GPU, which is what they are there for.

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor, backend::BackendStorage, bail,
};
use flashcore::{Attention, Backward, Element, Pages, Starts, TensorMut};
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
    queries: Numbers,
    /// The same for its keys.
    keys: Numbers,
    /// Which pages each sequence has, and how many keys, where keys lie in pages.
    pages: Option<Table>,
    /// The lse of all queries, (heads, rows), kept for the backward pass.
    lse: OnceLock<Lse>,
}

/// Numbers of sequences where the call runs. Those that come on the CPU are checked; the host does not read those that come on
/// a GPU.
struct Numbers {
    tensor: Tensor,
    /// Empty where they are not known.
    on_host: Vec<u32>,
    most: usize,
}

/// Which pages each sequence has.
struct Table {
    lengths: Numbers,
    pages: Numbers,
    width: usize,
}

impl FlashAttnVarLen {
    pub fn new(
        options: Options,
        device: &Device,
        [q, k]: [&Tensor; 2],
        [most_q, most_k]: [usize; 2],
    ) -> Result<Self> {
        let queries = starts("seqlens_q", q, most_q, device)?;
        let keys = starts("seqlens_k", k, most_k, device)?;
        if queries.tensor.elem_count() != keys.tensor.elem_count() {
            let [of_q, of_k] = [&queries, &keys].map(|starts| starts.tensor.elem_count() - 1);
            bail!("seqlens_q has {of_q} sequences and seqlens_k has {of_k}")
        }
        Ok(Self { options, queries, keys, pages: None, lse: OnceLock::new() })
    }

    /// With keys in pages of (pages, page, heads, head_dim) tensors: `seqlens_k` then says how many keys there are.
    pub fn with_pages(self, table: &Tensor) -> Result<Self> {
        let sequences = self.keys.tensor.elem_count() - 1;
        let (DType::U32, [rows, width]) = (table.dtype(), table.dims()) else {
            bail!("block_table is {:?} {:?}; it must be u32, (sequences, pages)", table.dtype(), table.dims())
        };
        let (rows, width) = (*rows, *width);
        if rows != sequences {
            bail!("block_table has {rows} rows for {sequences} sequences")
        }
        let (ends, device) = (&self.keys.tensor, self.keys.tensor.device());
        let lengths = (ends.narrow(0, 1, sequences)? - ends.narrow(0, 0, sequences)?)?;
        let lengths = Numbers::new(&lengths, self.keys.most, device)?;
        let table = Table { lengths, pages: Numbers::new(&table.flatten_all()?, 0, device)?, width };
        Ok(Self { pages: Some(table), ..self })
    }

    /// The shape of the output, after a check that the tensors have dimensions as they must.
    fn check(&self, [q, k, v]: [&Layout; 3]) -> Result<[usize; 3]> {
        let rows = |name: &str, layout: &Layout, starts: &Numbers| {
            let [rows, _, _] = layout.dims() else {
                bail!(
                    "{name} has {} dimensions; attention takes (all rows, heads, head_dim)",
                    layout.dims().len()
                )
            };
            match starts.on_host.last() {
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

    /// Calls `work` with attention that knows where the sequences on the host are.
    fn attention<T>(&self, work: impl FnOnce(Attention<'_>) -> flashcore::Result<T>) -> Result<T> {
        let attention = self.options.attention()?.packed_queries(places(&self.queries)?);
        let done = match &self.pages {
            None => work(attention.packed_keys(places(&self.keys)?)),
            Some(Table { lengths, pages, width }) => {
                let (lengths, pages) = (&lengths.on_host, &pages.on_host);
                let rows = flashcore::Tensor::indices(pages, [lengths.len(), *width]).map_err(fail)?;
                let pages = Pages::new(&rows).with_most_keys(self.keys.most);
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
        self.attention(|it| it.run_into(&flashcore::Device::cpu(), &q, &k, &v, &mut out, Some(&mut sums)))?;
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
        self.attention(|it| it.backward_into(&flashcore::Device::cpu(), &given, &mut dq, &mut dk, &mut dv))
    }

    #[cfg(feature = "cuda")]
    fn differentiate_on_gpu<T: crate::gpu::GpuElement>(
        &self,
        gpu: &flashcore_cudarc::Gpu,
        given: [crate::gpu::Given<'_>; 5],
        [dq, dk, dv]: [&mut CudaSlice<T>; 3],
    ) -> Result<()> {
        use flashcore_cudarc::{Input, Output};
        let lse = kept_on_gpu(&self.lse)?;
        let tensor = |i: usize| {
            let (name, storage, layout) = given[i];
            let (layout, offset) = part(name, layout, [0, layout.shape().dims3()?.0])?;
            Ok::<_, candle_core::Error>((crate::gpu::from_offset::<T>(storage, offset)?, layout))
        };
        let tensors = [tensor(0)?, tensor(1)?, tensor(2)?, tensor(3)?, tensor(4)?];
        let inputs = tensors.each_ref().map(|(slice, layout)| Input::strided(slice, *layout));
        let shape = |i: usize| given[i].2.shape().dims3().map(|(rows, heads, width)| [1, rows, heads, width]);
        let [of_q, of_k, of_v] = [shape(0)?, shape(1)?, shape(2)?];
        let lse = Input::bhsd(lse, [1, of_q[2], of_q[1], 1]);
        let gradients = [Output::bshd(dq, of_q), Output::bshd(dk, of_k), Output::bshd(dv, of_v)];
        let attention = self.options.attention()?;
        self.on_gpu_sequences(|sequences| {
            // SAFETY: as for the forward pass.
            unsafe { gpu.backward_sequences(&attention, sequences, &inputs, &lse, gradients) }
        })
    }
}

impl Numbers {
    /// Numbers that are brought to the device where the call runs.
    fn new(given: &Tensor, most: usize, device: &Device) -> Result<Self> {
        let tensor = given.to_device(device)?.contiguous()?;
        let known = device.is_cpu() || given.device().is_cpu();
        let on_host = if known { given.to_vec1()? } else { Vec::new() };
        Ok(Self { tensor, on_host, most })
    }
}

/// Where sequences begin, as FlashCore takes it.
fn places(starts: &Numbers) -> Result<Starts<'_>> {
    let tensor = flashcore::Tensor::indices(&starts.on_host, [1, starts.on_host.len()]).map_err(fail)?;
    Ok(Starts::of(&tensor, starts.most))
}

/// Cumulative lengths, which begin every sequence at the end of the one before.
fn starts(name: &str, cumulative: &Tensor, most: usize, device: &Device) -> Result<Numbers> {
    if cumulative.dtype() != DType::U32 || cumulative.dims().len() != 1 {
        bail!(
            "{name} is {:?} {:?}; it must be u32, with one element per sequence and one more",
            cumulative.dtype(),
            cumulative.dims()
        )
    }
    if cumulative.elem_count() < 2 {
        bail!("{name} has {} entries; a batch of n sequences has n + 1", cumulative.elem_count())
    }
    let starts = Numbers::new(cumulative, most, device)?;
    for (i, pair) in starts.on_host.windows(2).enumerate() {
        let [start, end] = [pair[0], pair[1]];
        if end < start || (end - start) as usize > most {
            bail!("{name} gives sequence {i} from {start} to {end}; possible are lengths from 0 to {most}")
        }
    }
    Ok(starts)
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
        // Rows that are in no sequence stay zeros.
        let mut o = crate::gpu::output::<T>(device, shape.iter().product(), false)?;
        let mut lse = crate::gpu::output::<f32>(device, rows * heads, true)?;
        let gpu = crate::gpu::on(device)?;
        let keys = |name: &str, layout: &Layout| {
            if self.pages.is_some() {
                return Ok((dense(name, layout)?, layout.start_offset()));
            }
            part(name, layout, [0, layout.dims().first().copied().unwrap_or(0)])
        };
        let (q_layout, q_offset) = part("q", layouts[0], [0, rows])?;
        let ((k_layout, k_offset), (v_layout, v_offset)) = (keys("k", layouts[1])?, keys("v", layouts[2])?);
        let q = from_offset::<T>(q, q_offset)?;
        let (k, v) = (from_offset::<T>(k, k_offset)?, from_offset::<T>(v, v_offset)?);
        let inputs =
            [Input::strided(&q, q_layout), Input::strided(&k, k_layout), Input::strided(&v, v_layout)];
        let out = Output::bshd(&mut o, [1, rows, heads, width]);
        let sums = Output::lse(&mut lse, [1, heads, rows]);
        self.on_gpu_sequences(|sequences| {
            // SAFETY: the functions say what the numbers have to be, as candle-flash-attn does.
            unsafe { gpu.run_sequences(&attention, sequences, inputs, out, Some(sums)) }
        })?;
        // A second forward pass of the same call would give the same.
        let _ = self.lse.set(Lse::Gpu(lse));
        let storage = candle_core::CudaStorage::wrap_cuda_slice(o, device.clone());
        Ok((storage, Shape::from(shape.to_vec())))
    }

    /// Calls `work` with where the sequences on a GPU are.
    fn on_gpu_sequences(
        &self,
        work: impl FnOnce(&flashcore_cudarc::Sequences<'_>) -> flashcore::Result<()>,
    ) -> Result<()> {
        let pages = self.pages.as_ref();
        let all =
            [Some(&self.queries), Some(&self.keys), pages.map(|it| &it.pages), pages.map(|it| &it.lengths)];
        let memory = all.map(|numbers| numbers.map(|it| it.tensor.storage_and_layout()));
        let slice = |i: usize| {
            let Some((storage, layout)) = &memory[i] else { return Ok(None) };
            let candle_core::Storage::Cuda(storage) = &**storage else { bail!("lengths are not on the GPU") };
            let slice = storage.as_cuda_slice::<u32>()?;
            let start = layout.start_offset();
            Ok(Some(slice.slice(start..start + layout.shape().elem_count())))
        };
        let (queries, keys, table, lengths) = (slice(0)?, slice(1)?, slice(2)?, slice(3)?);
        let mut sequences = flashcore_cudarc::Sequences::new();
        if let Some(queries) = &queries {
            sequences = sequences.packed_queries(queries, self.queries.most);
        }
        sequences = match (&keys, &table, &lengths, pages) {
            (_, Some(table), Some(lengths), Some(pages)) => {
                let most = self.keys.most;
                sequences.paged_up_to(table, pages.width, most).key_lengths(lengths, most as u32)
            }
            (Some(keys), ..) => sequences.packed_keys(keys, self.keys.most),
            _ => sequences,
        };
        work(&sequences).map_err(fail)
    }
}
