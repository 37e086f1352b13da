//! Attention of 8-bit floats: of q, k and v, or of k and v alone, as a cache has them.

use candle_core::{
    CpuStorage, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, backend::BackendStorage, bail,
};
use flashcore::{Descales, Device, Element, F8E4M3, TensorMut};
use half::{bf16, f16};

use crate::options::{Options, dense, fail, view};

/// The names of the tensors, in errors.
const DESCALES: [&str; 3] = ["q_descale", "k_descale", "v_descale"];

/// Attention of (batch, length, heads, head_dim) tensors of `F8E4M3`, where q may have 16 bits instead. What is stored stands for
/// `stored · descale`. It has no gradients.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use flashcore_candle::FlashAttnFp8;
///
/// let x = Tensor::randn(0_f32, 1.0, (1, 16, 2, 64), &Device::Cpu)?.to_dtype(DType::F8E4M3)?;
/// let halves = Tensor::new(&[0.5_f32], &Device::Cpu)?; // one number for all heads
/// let op = FlashAttnFp8 { descales: [None, None, Some(halves)], ..FlashAttnFp8::new(0.125) };
/// let o = x.apply_op3(&x, &x, op)?;
/// assert_eq!((o.dims(), o.dtype()), (&[1, 16, 2, 64][..], DType::BF16));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct FlashAttnFp8 {
    /// What scores are multiplied by.
    pub softmax_scale: f32,
    /// Keys before its own position that a query sees.
    pub window_size_left: Option<usize>,
    /// Keys after its own position that a query sees.
    pub window_size_right: Option<usize>,
    /// Scores become `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// What the stored q, k and v are to be multiplied by, in f32 on their device: one number, or (batch, kv heads), or of k and v
    /// (batch, kv heads, blocks). One that is not given is 1; q of 16 bits has none.
    pub descales: [Option<Tensor>; 3],
    /// The keys of a block, where blocks of keys have descales of their own.
    pub descale_keys: Option<usize>,
    /// The type of the output where q is of 8 bits: f16 or bf16.
    pub out: DType,
}

impl FlashAttnFp8 {
    /// Every query sees every key, nothing has a descale, and the output is bf16 unless q has 16 bits.
    pub fn new(softmax_scale: f32) -> Self {
        Self {
            softmax_scale,
            window_size_left: None,
            window_size_right: None,
            softcap: None,
            descales: [None, None, None],
            descale_keys: None,
            out: DType::BF16,
        }
    }

    /// The same with a causal mask, aligned to the last query and key.
    #[must_use]
    pub fn causal(self) -> Self {
        Self { window_size_right: Some(0), ..self }
    }

    fn attention(&self) -> Result<flashcore::Attention<'static>> {
        let options = Options {
            scale: self.softmax_scale,
            alibi: false,
            left: self.window_size_left,
            right: self.window_size_right,
            softcap: self.softcap.unwrap_or(0.0),
        };
        options.attention()
    }

    /// The type of the output, given those of q, k and v.
    fn out_of(&self, [q, k, v]: [DType; 3]) -> Result<DType> {
        match (q, k, v) {
            (DType::F16 | DType::BF16, DType::F8E4M3, DType::F8E4M3) => Ok(q),
            (DType::F8E4M3, DType::F8E4M3, DType::F8E4M3) => match self.out {
                DType::F16 | DType::BF16 => Ok(self.out),
                other => bail!("of f8 e4m3 the output is f16 or bf16, not {other:?}"),
            },
            _ => bail!(
                "flash-attn-fp8 takes k and v of f8 e4m3, with q of f8 e4m3, f16 or bf16, not {q:?}, {k:?} and {v:?}"
            ),
        }
    }

    /// How a descale lies, as FlashCore sees it: a number for each of (batch, kv heads, blocks, 1).
    fn layout_of_descale(
        &self,
        of: usize,
        given: &Layout,
        k: &flashcore::Layout,
    ) -> Result<flashcore::Layout> {
        let [batch, heads, keys, _] = k.shape;
        let blocks = self.descale_keys.filter(|_| of > 0).map_or(1, |block| keys.div_ceil(block.max(1)));
        let (name, shape) = (DESCALES[of], [batch, heads, blocks, 1]);
        let strides = match (given.dims(), given.stride()) {
            ([] | [1], _) => [0, 0, 0, 1],
            ([b, h], [b_stride, h_stride]) if (*b, *h) == (batch, heads) => [*b_stride, *h_stride, 0, 1],
            ([b, h, n], [b_stride, h_stride, n_stride]) if (*b, *h, *n) == (batch, heads, blocks) => {
                [*b_stride, *h_stride, *n_stride, 1]
            }
            (dims, _) => bail!(
                "{name} has the shape {dims:?}; possible are one number, {:?} and {:?}",
                [batch, heads],
                [batch, heads, blocks]
            ),
        };
        Ok(flashcore::Layout { shape, strides })
    }

    fn on_cpu<Q: Element, O: Element + Default>(
        &self,
        q: &[Q],
        [k, v]: [&[F8E4M3]; 2],
        [q_layout, k_layout, v_layout]: [&Layout; 3],
    ) -> Result<(Vec<O>, Shape)> {
        let q = view(q, q_layout.start_offset(), dense("q", q_layout)?)?;
        let k = view(k, k_layout.start_offset(), dense("k", k_layout)?)?;
        let v = view(v, v_layout.start_offset(), dense("v", v_layout)?)?;
        let held = self.descales.each_ref().map(|it| it.as_ref().map(Tensor::storage_and_layout));
        let mut descales = [None; 3];
        for (of, held) in held.iter().enumerate() {
            let Some((storage, layout)) = held else { continue };
            let Storage::Cpu(CpuStorage::F32(data)) = &**storage else {
                bail!("{} is not of f32 on the CPU, where q, k and v are", DESCALES[of])
            };
            let lies = self.layout_of_descale(of, layout, &k.layout())?;
            descales[of] = Some(view(data, layout.start_offset(), lies)?);
        }
        let descales = Descales::some_of(descales.each_ref().map(Option::as_ref));
        let descales = self.descale_keys.map_or(descales, |keys| descales.per_block(keys));
        let ([b, h, s, _], [_, _, _, d]) = (q.shape(), v.shape());
        let shape = [b, s, h, d];
        let mut o = vec![O::default(); shape.iter().product()];
        let mut out = TensorMut::bshd(&mut o, &shape).map_err(fail)?;
        let attention = self.attention()?.output(O::DTYPE).descales(descales);
        attention.run_into(&Device::cpu(), &q, &k, &v, &mut out, None).map_err(fail)?;
        Ok((o, Shape::from(shape.to_vec())))
    }
}

impl CustomOp3 for FlashAttnFp8 {
    fn name(&self) -> &'static str {
        "flash-attn-fp8"
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
        let out = self.out_of([q.dtype(), k.dtype(), v.dtype()])?;
        let layouts = [q_layout, k_layout, v_layout];
        let (CpuStorage::F8E4M3(k), CpuStorage::F8E4M3(v)) = (k, v) else { unreachable!("that was checked") };
        let f16 = |(o, shape)| (CpuStorage::F16(o), shape);
        let bf16 = |(o, shape)| (CpuStorage::BF16(o), shape);
        match (q, out) {
            (CpuStorage::F16(q), _) => self.on_cpu::<_, f16>(q, [k, v], layouts).map(f16),
            (CpuStorage::BF16(q), _) => self.on_cpu::<_, bf16>(q, [k, v], layouts).map(bf16),
            (CpuStorage::F8E4M3(q), DType::F16) => self.on_cpu::<_, f16>(q, [k, v], layouts).map(f16),
            (CpuStorage::F8E4M3(q), _) => self.on_cpu::<_, bf16>(q, [k, v], layouts).map(bf16),
            _ => unreachable!("that was checked"),
        }
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
        let layouts = [q_layout, k_layout, v_layout];
        match (q.dtype(), self.out_of([q.dtype(), k.dtype(), v.dtype()])?) {
            (DType::F8E4M3, DType::F16) => self.on_gpu::<F8E4M3, f16>([q, k, v], layouts),
            (DType::F8E4M3, _) => self.on_gpu::<F8E4M3, bf16>([q, k, v], layouts),
            (DType::F16, _) => self.on_gpu::<f16, f16>([q, k, v], layouts),
            _ => self.on_gpu::<bf16, bf16>([q, k, v], layouts),
        }
    }
}

#[cfg(feature = "cuda")]
impl FlashAttnFp8 {
    fn on_gpu<Q: crate::gpu::GpuElement, O: crate::gpu::GpuElement>(
        &self,
        [q, k, v]: [&candle_core::CudaStorage; 3],
        [q_layout, k_layout, v_layout]: [&Layout; 3],
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use crate::gpu::from_offset;
        use flashcore_cudarc::{Input, Output};
        let layouts = [dense("q", q_layout)?, dense("k", k_layout)?, dense("v", v_layout)?];
        let ([b, h, s, _], [_, _, _, d]) = (layouts[0].shape, layouts[2].shape);
        let shape = [b, s, h, d];
        let device = q.device();
        let held = self.descales.each_ref().map(|it| it.as_ref().map(Tensor::storage_and_layout));
        let mut slices = [None, None, None];
        for (of, held) in held.iter().enumerate() {
            let Some((storage, layout)) = held else { continue };
            let Storage::Cuda(storage) = &**storage else {
                bail!("{} is not on the GPU, where q, k and v are", DESCALES[of])
            };
            let lies = self.layout_of_descale(of, layout, &layouts[1])?;
            slices[of] = Some((from_offset::<f32>(storage, layout.start_offset())?, lies));
        }
        let descales =
            slices.each_ref().map(|it| it.as_ref().map(|(slice, layout)| Input::strided(slice, *layout)));
        let q = from_offset::<Q>(q, q_layout.start_offset())?;
        let k = from_offset::<F8E4M3>(k, k_layout.start_offset())?;
        let v = from_offset::<F8E4M3>(v, v_layout.start_offset())?;
        let mut o = crate::gpu::output::<O>(device, shape.iter().product(), true)?;
        let attention = self.attention()?.output(O::DTYPE);
        let keys = [Input::strided(&k, layouts[1]), Input::strided(&v, layouts[2])];
        let out = Output::bshd(&mut o, shape);
        let gpu = crate::gpu::on(device)?;
        gpu.run_fp8(&attention, Input::strided(&q, layouts[0]), keys, descales, self.descale_keys, out)
            .map_err(fail)?;
        let storage = candle_core::CudaStorage::wrap_cuda_slice(o, device.clone());
        Ok((storage, Shape::from(shape.to_vec())))
    }
}
