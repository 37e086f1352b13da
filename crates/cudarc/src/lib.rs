//! FlashCore attention on [cudarc] slices and streams.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use flashcore_cudarc::{Attention, Gpu, Input, Output};
//! use half::f16;
//!
//! let stream = CudaContext::new(0)?.default_stream();
//! let shape = [1, 8, 512, 64]; // (batch, heads, length, head_dim)
//! let data = vec![f16::ONE; shape.iter().product()];
//! let (q, k, v) = (stream.clone_htod(&data)?, stream.clone_htod(&data)?, stream.clone_htod(&data)?);
//! let mut o = stream.alloc_zeros::<f16>(data.len())?;
//!
//! let gpu = Gpu::new(&stream)?; // kernels are made once per problem: keep it
//! gpu.run_into(
//!     &Attention::new().causal(),
//!     [Input::bhsd(&q, shape), Input::bhsd(&k, shape), Input::bhsd(&v, shape)],
//!     Output::bhsd(&mut o, shape),
//!     None,
//! )?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Both libraries use the GPU's primary context, so that memory and streams are shared as they are. A call is queued in
//! its stream after what the slices wait for, as cudarc's own launches are, and returns before it is done.
//!
//! No CUDA version is pinned: the feature that an application chooses for cudarc is the one that counts.
#![allow(unsafe_code)] // Slices become addresses here; they are borrowed until the call is queued.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DevicePtrMut};
pub use flashcore::{Attention, Error, Layout, Result};
use flashcore::{
    Backward, DType, Descales, Device, DeviceLengths, Element, Name, Pages, Place, Starts, Tensor, TensorMut,
    cuda::Cuda,
};

/// A GPU with the kernels that were made for it so far, and the stream that calls are queued in.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// The kernels. It does not use the stream below, so that a clone of it may outlive that stream.
    cuda: Cuda,
    /// The same GPU, queueing in the stream below. It is never handed out.
    device: Device,
    stream: Arc<CudaStream>,
}

impl Gpu {
    /// For calls in a cudarc stream.
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        Self::sharing(&Cuda::new(stream.context().ordinal() as u32)?, stream)
    }

    /// With the kernels of a FlashCore device, for calls in a cudarc stream.
    pub fn sharing(cuda: &Cuda, stream: &Arc<CudaStream>) -> Result<Self> {
        let context = stream.context();
        let (stream_device, device) = (context.ordinal(), name(cuda));
        // The handles of the default and the per-thread stream do not tell their context.
        if stream_device as u32 != cuda.ordinal() || !context.is_primary() {
            return Err(Error::ForeignStream { stream_device, device });
        }
        // SAFETY: the stream is held for as long as the device that uses it.
        let device = Device::cuda_with(unsafe { cuda.on_stream(stream.cu_stream().cast()) }?);
        Ok(Self { cuda: cuda.clone(), device, stream: Arc::clone(stream) })
    }

    /// The same GPU and kernels, queueing in another cudarc stream.
    pub fn on(&self, stream: &Arc<CudaStream>) -> Result<Self> {
        Self::sharing(&self.cuda, stream)
    }

    /// FlashCore's own device, which has the kernels. Calls made directly on it do not go through cudarc's stream.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// The stream that calls are queued in.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Queues a call; lse is computed if there is a place for it.
    pub fn run_into<T: Element>(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [Input<'_, T>; 3],
        o: Output<'_, T>,
        lse: Option<Output<'_, f32>>,
    ) -> Result<()> {
        self.run_of(attention, &q, &[k, v], o, lse)
    }

    /// Queues a call whose k and v are 8-bit floats (`F8E4M3`), and q, too, or of 16 bits, as with a cache. Descales of q, k and v are
    /// tensors of (batch, kv heads, 1, 1), or of k and v (batch, kv heads, blocks, 1) where each `descale_keys` keys have one of
    /// their own.
    pub fn run_fp8<Q: Element, K: Element, O: Element>(
        &self,
        attention: &Attention<'_>,
        q: Input<'_, Q>,
        [k, v]: [Input<'_, K>; 2],
        descales: [Option<Input<'_, f32>>; 3],
        descale_keys: Option<usize>,
        o: Output<'_, O>,
    ) -> Result<()> {
        let stream = self.enter()?;
        for (name, descale) in Name::DESCALES.into_iter().zip(&descales) {
            if let Some(descale) = descale {
                self.check_context(name, descale.slice.stream().context())?;
            }
        }
        let pointers = descales.each_ref().map(|it| it.as_ref().map(|it| it.slice.device_ptr(stream)));
        let mut tensors = [None; 3];
        for (i, (descale, pointer)) in descales.iter().zip(&pointers).enumerate() {
            let Some((descale, (ptr, _))) = descale.as_ref().zip(pointer.as_ref()) else { continue };
            tensors[i] = Some(self.tensor(*ptr, descale)?);
        }
        let tensors = Descales::some_of(tensors.each_ref().map(Option::as_ref));
        let tensors = descale_keys.map_or(tensors, |keys| tensors.per_block(keys));
        self.run_of(&attention.descales(tensors), &q, &[k, v], o, None)
    }

    /// What lies at a slice's address.
    fn tensor<T: Element>(&self, ptr: u64, input: &Input<'_, T>) -> Result<Tensor<'static>> {
        let len = input.slice.len();
        // SAFETY: the slice holds this many elements of its type, and is borrowed until the call is queued; cudarc orders later
        // uses after that.
        unsafe { Tensor::from_raw_parts(ptr as *const u8, len, T::DTYPE, self.place(), input.layout) }
    }

    /// Queues a call with tensors of up to three types.
    fn run_of<Q: Element, K: Element, O: Element>(
        &self,
        attention: &Attention<'_>,
        q: &Input<'_, Q>,
        [k, v]: &[Input<'_, K>; 2],
        o: Output<'_, O>,
        lse: Option<Output<'_, f32>>,
    ) -> Result<()> {
        let stream = self.enter()?;
        self.check_context(Name::Q, q.slice.stream().context())?;
        for (name, slice) in [(Name::K, k.slice), (Name::V, v.slice)] {
            self.check_context(name, slice.stream().context())?;
        }
        self.check_context(Name::O, o.slice.stream().context())?;
        if let Some(lse) = &lse {
            self.check_context(Name::Lse, lse.slice.stream().context())?;
        }
        // The guard returned with an address records, when dropped, how far the stream has come with the slice.
        let (q_ptr, _q) = q.slice.device_ptr(stream);
        let (k_ptr, _k) = k.slice.device_ptr(stream);
        let (v_ptr, _v) = v.slice.device_ptr(stream);
        let (q, k, v) = (self.tensor(q_ptr, q)?, self.tensor(k_ptr, k)?, self.tensor(v_ptr, v)?);
        let Output { slice: o_slice, layout: o_layout } = o;
        let o_len = o_slice.len();
        let (o_ptr, _o) = o_slice.device_ptr_mut(stream);
        // SAFETY: as of the inputs, and the slice is borrowed by this call alone.
        let mut o =
            unsafe { TensorMut::from_raw_parts(o_ptr as *mut u8, o_len, O::DTYPE, self.place(), o_layout) }?;
        let Some(lse) = lse else { return attention.run_into(&self.device, &q, &k, &v, &mut o, None) };
        let lse_len = lse.slice.len();
        let (lse_ptr, _lse) = lse.slice.device_ptr_mut(stream);
        // SAFETY: as above.
        let mut lse = unsafe {
            TensorMut::from_raw_parts(lse_ptr as *mut u8, lse_len, f32::DTYPE, self.place(), lse.layout)
        }?;
        attention.run_into(&self.device, &q, &k, &v, &mut o, Some(&mut lse))
    }

    /// Queues a backward pass, from q, k, v, o, the gradient of o, and lse, into the gradients of q, k and v.
    pub fn backward_into<T: Element>(
        &self,
        attention: &Attention<'_>,
        given: &[Input<'_, T>; 5],
        lse: &Input<'_, f32>,
        gradients: [Output<'_, T>; 3],
    ) -> Result<()> {
        let stream = self.enter()?;
        for (name, input) in [Name::Q, Name::K, Name::V, Name::O, Name::Do].into_iter().zip(given) {
            self.check_context(name, input.slice.stream().context())?;
        }
        self.check_context(Name::Lse, lse.slice.stream().context())?;
        for (name, output) in [Name::Dq, Name::Dk, Name::Dv].into_iter().zip(&gradients) {
            self.check_context(name, output.slice.stream().context())?;
        }
        // The guard returned with an address records, when dropped, how far the stream has come with the slice.
        let pointers = given.each_ref().map(|input| input.slice.device_ptr(stream));
        let tensor = |i: usize| {
            let Input { slice, layout } = &given[i];
            // SAFETY: as for a forward pass.
            unsafe {
                Tensor::from_raw_parts(
                    pointers[i].0 as *const u8,
                    slice.len(),
                    T::DTYPE,
                    self.place(),
                    *layout,
                )
            }
        };
        let [q, k, v, o, d_o] = [tensor(0)?, tensor(1)?, tensor(2)?, tensor(3)?, tensor(4)?];
        let (lse_ptr, _lse) = lse.slice.device_ptr(stream);
        let (lse_len, place) = (lse.slice.len(), self.place());
        // SAFETY: as for a forward pass.
        let lse =
            unsafe { Tensor::from_raw_parts(lse_ptr as *const u8, lse_len, f32::DTYPE, place, lse.layout) }?;
        let [dq, dk, dv] = gradients;
        let (dq_len, dk_len, dv_len) = (dq.slice.len(), dk.slice.len(), dv.slice.len());
        let (dq_ptr, _dq) = dq.slice.device_ptr_mut(stream);
        let (dk_ptr, _dk) = dk.slice.device_ptr_mut(stream);
        let (dv_ptr, _dv) = dv.slice.device_ptr_mut(stream);
        let output = |ptr: u64, len: usize, layout: Layout| {
            // SAFETY: as for a forward pass.
            unsafe { TensorMut::from_raw_parts(ptr as *mut u8, len, T::DTYPE, self.place(), layout) }
        };
        let mut dq = output(dq_ptr, dq_len, dq.layout)?;
        let mut dk = output(dk_ptr, dk_len, dk.layout)?;
        let mut dv = output(dv_ptr, dv_len, dv.layout)?;
        let given = Backward::new([&q, &k, &v], &o, &lse, &d_o);
        attention.backward_into(&self.device, &given, &mut dq, &mut dk, &mut dv)
    }

    /// Queues a call with key lengths that lie on the GPU, one per batch entry; none of them may be above `most`.
    ///
    /// # Safety
    /// None of the lengths may be above `most`: the GPU's memory is not read to check them.
    pub unsafe fn run_with_lengths<T: Element>(
        &self,
        attention: &Attention<'_>,
        lengths: &dyn DevicePtr<u32>,
        most: u32,
        inputs: [Input<'_, T>; 3],
        o: Output<'_, T>,
        lse: Option<Output<'_, f32>>,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the lengths.
        unsafe { self.run_sequences(attention, &Sequences::new().key_lengths(lengths, most), inputs, o, lse) }
    }

    /// Queues a call on sequences that are packed or in the pages of a cache, as numbers on the GPU say. The host does not
    /// read them, so a captured call reads them anew at every replay.
    ///
    /// # Safety
    /// What the numbers say is inside of the tensors, and within the bounds that were given with them: see [`Starts::of`]
    /// and [`Pages::new`]. [`Attention::checked`] has the call wait for them and refuse those that are not.
    pub unsafe fn run_sequences<T: Element>(
        &self,
        attention: &Attention<'_>,
        sequences: &Sequences<'_>,
        inputs: [Input<'_, T>; 3],
        o: Output<'_, T>,
        lse: Option<Output<'_, f32>>,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the numbers.
        unsafe { self.placed(attention, sequences, |attention| self.run_into(attention, inputs, o, lse)) }
    }

    /// Queues a backward pass on such sequences.
    ///
    /// # Safety
    /// As for [`Gpu::run_sequences`].
    pub unsafe fn backward_sequences<T: Element>(
        &self,
        attention: &Attention<'_>,
        sequences: &Sequences<'_>,
        given: &[Input<'_, T>; 5],
        lse: &Input<'_, f32>,
        gradients: [Output<'_, T>; 3],
    ) -> Result<()> {
        // SAFETY: the caller vouches for the numbers.
        unsafe {
            self.placed(attention, sequences, |attention| {
                self.backward_into(attention, given, lse, gradients)
            })
        }
    }

    /// Makes a call with attention that knows where sequences are.
    ///
    /// # Safety
    /// As for [`Gpu::run_sequences`].
    unsafe fn placed(
        &self,
        attention: &Attention<'_>,
        sequences: &Sequences<'_>,
        call: impl FnOnce(&Attention<'_>) -> Result<()>,
    ) -> Result<()> {
        let stream = self.enter()?;
        let Sequences { queries, keys, pages, key_lengths } = sequences;
        let slices = [
            (Name::QStarts, queries.map(|it| it.slice)),
            (Name::KStarts, keys.map(|it| it.slice)),
            (Name::Pages, pages.map(|it| it.slice)),
            (Name::KeyLengths, key_lengths.map(|it| it.slice)),
        ];
        for (name, slice) in slices {
            if let Some(slice) = slice {
                self.check_context(name, slice.stream().context())?;
            }
        }
        // The guard beside an address records, when dropped, how far the stream has come with the slice.
        let guards = slices.map(|(_, slice)| slice.map(|slice| (slice.device_ptr(stream), slice.len())));
        let address = |i: usize| guards[i].as_ref().map(|((ptr, _), len)| (*ptr, *len));
        let numbers = |(ptr, len): (u64, usize), [rows, width]: [usize; 2]| {
            let layout = Layout { shape: [rows, 1, 1, width], strides: [width, 0, 0, 1] };
            // SAFETY: the slice holds this many numbers and is borrowed until the call is queued; the caller vouches for
            // their values.
            unsafe { Tensor::from_raw_parts(ptr as *const u8, len, DType::I32, self.place(), layout) }
        };
        let mut attention = *attention;
        if let (Some(at), Some(of)) = (address(0), queries) {
            attention = attention.packed_queries(Starts::of(&numbers(at, [1, at.1])?, of.most));
        }
        if let (Some(at), Some(of)) = (address(1), keys) {
            attention = attention.packed_keys(Starts::of(&numbers(at, [1, at.1])?, of.most));
        }
        if let (Some(at), Some(of)) = (address(2), pages) {
            let rows = at.1.checked_div(of.width).unwrap_or(0);
            let table = Pages::new(&numbers(at, [rows, of.width])?);
            attention = attention.paged(of.most.map_or(table, |most| table.with_most_keys(most)));
        }
        if let (Some((ptr, len)), Some(of)) = (address(3), key_lengths) {
            let most = u32::try_from(of.most).unwrap_or(u32::MAX);
            // SAFETY: as above.
            let lengths =
                unsafe { DeviceLengths::from_raw_parts(ptr as *const u32, len, most, self.cuda.ordinal()) }?;
            attention = attention.key_lengths_on_device(lengths);
        }
        call(&attention)
    }

    /// Makes the stream's context current, as cudarc does before it queues anything: the default and the
    /// per-thread stream are those of the context that is current.
    fn enter(&self) -> Result<&CudaStream> {
        let entered = self.stream.context().bind_to_thread();
        entered.map_err(|error| Error::Device {
            device: name(&self.cuda),
            what: error.to_string(),
            source: Some(error.into()),
        })?;
        Ok(&self.stream)
    }

    /// Refuses a slice of another context before cudarc makes the stream wait for it, which would leave an error behind.
    fn check_context(&self, tensor: Name, context: &CudaContext) -> Result<()> {
        if context == self.stream.context().as_ref() {
            return Ok(());
        }
        let (given, device) = (context.ordinal() as u32, name(&self.cuda));
        if given != self.cuda.ordinal() {
            return Err(Error::PlaceMismatch { tensor, given: Place::Cuda(given), device });
        }
        Err(Error::Unsupported {
            device,
            what: format!("{tensor} in memory of another CUDA context"),
            possible: "memory of the GPU's primary context, which CudaContext::new gives".into(),
            source: None,
        })
    }

    fn place(&self) -> Place {
        Place::Cuda(self.cuda.ordinal())
    }
}

/// The name of a GPU in errors.
fn name(cuda: &Cuda) -> String {
    format!("cuda:{}", cuda.ordinal())
}

/// Where the sequences of a call are, as numbers on the GPU say.
///
/// ```no_run
/// # use cudarc::driver::CudaContext;
/// use flashcore_cudarc::{Attention, Gpu, Input, Output, Sequences};
/// # use half::f16;
/// # let stream = CudaContext::new(0)?.default_stream();
/// # let gpu = Gpu::new(&stream)?;
/// // One new query of each of two sequences, of 20 and of 3 keys, which lie in pages 5 and 2, and in page 0.
/// let (heads, kv_heads, dim, page, pages) = (8, 2, 64, 16, 6);
/// let table = stream.clone_htod(&[5_u32, 2, 0, 0])?;
/// let lengths = stream.clone_htod(&[20_u32, 3])?;
/// let q = stream.alloc_zeros::<f16>(2 * heads * dim)?;
/// let pool = stream.alloc_zeros::<f16>(pages * page * kv_heads * dim)?;
/// let mut o = stream.alloc_zeros::<f16>(2 * heads * dim)?;
/// let keys = || Input::bshd(&pool, [pages, page, kv_heads, dim]);
/// let sequences = Sequences::new().paged(&table, 2).key_lengths(&lengths, 32);
/// let inputs = [Input::bshd(&q, [2, 1, heads, dim]), keys(), keys()];
/// let out = Output::bshd(&mut o, [2, 1, heads, dim]);
/// // SAFETY: the pool has these pages, and no length is above two of them.
/// unsafe { gpu.run_sequences(&Attention::new(), &sequences, inputs, out, None) }?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Default)]
pub struct Sequences<'a> {
    queries: Option<Numbers<'a>>,
    keys: Option<Numbers<'a>>,
    pages: Option<Table<'a>>,
    key_lengths: Option<Numbers<'a>>,
}

/// Numbers, and what they, or the differences of neighbours, are not above.
#[derive(Clone, Copy)]
struct Numbers<'a> {
    slice: &'a dyn DevicePtr<u32>,
    most: usize,
}

/// Pages of sequences, a row of so many for each, and the most keys of one.
#[derive(Clone, Copy)]
struct Table<'a> {
    slice: &'a dyn DevicePtr<u32>,
    width: usize,
    most: Option<usize>,
}

impl<'a> Sequences<'a> {
    /// Each a batch entry of dense tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Queries and keys one behind the other in tensors of shape (1, heads, tokens, head_dim): where each sequence begins, and
    /// where the last one ends, `cu_seqlens`. None is longer than `longest`.
    pub fn packed(self, starts: &'a dyn DevicePtr<u32>, longest: usize) -> Self {
        self.packed_queries(starts, longest).packed_keys(starts, longest)
    }

    /// Packed queries, with keys that lie otherwise, or whose sequences have other lengths.
    pub fn packed_queries(self, starts: &'a dyn DevicePtr<u32>, longest: usize) -> Self {
        Self { queries: Some(Numbers { slice: starts, most: longest }), ..self }
    }

    /// Packed keys and values.
    pub fn packed_keys(self, starts: &'a dyn DevicePtr<u32>, longest: usize) -> Self {
        Self { keys: Some(Numbers { slice: starts, most: longest }), pages: None, ..self }
    }

    /// Keys and values in the pages of a pool, (pages, heads, page, head_dim): a table with a row of `width` pages for each
    /// sequence, `block_table`.
    pub fn paged(self, table: &'a dyn DevicePtr<u32>, width: usize) -> Self {
        Self { pages: Some(Table { slice: table, width, most: None }), keys: None, ..self }
    }

    /// The same, where no sequence has more keys than so many.
    pub fn paged_up_to(self, table: &'a dyn DevicePtr<u32>, width: usize, most: usize) -> Self {
        Self { pages: Some(Table { slice: table, width, most: Some(most) }), keys: None, ..self }
    }

    /// How many keys each sequence has; none more than `most`.
    pub fn key_lengths(self, lengths: &'a dyn DevicePtr<u32>, most: u32) -> Self {
        Self { key_lengths: Some(Numbers { slice: lengths, most: most as usize }), ..self }
    }
}

/// A slice to read, with its layout.
pub struct Input<'a, T> {
    slice: &'a dyn DevicePtr<T>,
    layout: Layout,
}

impl<T> Copy for Input<'_, T> {}

impl<T> Clone for Input<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

/// A slice to write, with its layout.
pub struct Output<'a, T> {
    slice: &'a mut dyn DevicePtrMut<T>,
    layout: Layout,
}

impl<'a, T> Input<'a, T> {
    /// Contiguous in the order (batch, heads, length, head_dim), in which the shape is given.
    pub fn bhsd(slice: &'a dyn DevicePtr<T>, shape: [usize; 4]) -> Self {
        Self::strided(slice, Layout::bhsd(shape))
    }

    /// Contiguous in the order (batch, length, heads, head_dim), in which the shape is given.
    pub fn bshd(slice: &'a dyn DevicePtr<T>, [b, s, h, d]: [usize; 4]) -> Self {
        Self::strided(slice, Layout::bshd([b, h, s, d]))
    }

    /// With any strides, as long as that of the last dimension is 1.
    pub fn strided(slice: &'a dyn DevicePtr<T>, layout: Layout) -> Self {
        Self { slice, layout }
    }
}

impl<'a, T> Output<'a, T> {
    /// Contiguous in the order (batch, heads, length, head_dim), in which the shape is given.
    pub fn bhsd(slice: &'a mut dyn DevicePtrMut<T>, shape: [usize; 4]) -> Self {
        Self::strided(slice, Layout::bhsd(shape))
    }

    /// Contiguous in the order (batch, length, heads, head_dim), in which the shape is given.
    pub fn bshd(slice: &'a mut dyn DevicePtrMut<T>, [b, s, h, d]: [usize; 4]) -> Self {
        Self::strided(slice, Layout::bshd([b, h, s, d]))
    }

    /// With any strides in which no two indices name the same element.
    pub fn strided(slice: &'a mut dyn DevicePtrMut<T>, layout: Layout) -> Self {
        Self { slice, layout }
    }
}

impl<'a> Output<'a, f32> {
    /// For lse: one f32 per query, contiguous in the order (batch, heads, length).
    pub fn lse(slice: &'a mut dyn DevicePtrMut<f32>, [b, h, s]: [usize; 3]) -> Self {
        Self::bhsd(slice, [b, h, s, 1])
    }
}
