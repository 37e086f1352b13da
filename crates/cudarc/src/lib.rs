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
//! let gpu = Gpu::new(&stream)?; // kernels are made once a problem: keep it
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
//! its stream behind what the slices wait for, as cudarc's own launches are, and returns before it is done.
//!
//! No CUDA version is pinned: the feature that an application chooses for cudarc is the one that counts.
#![allow(unsafe_code)] // Slices become addresses here; they are borrowed until the call is queued.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
pub use flashcore::{Attention, Error, Layout, Result};
use flashcore::{Device, DeviceLengths, Element, Place, Tensor, TensorMut, cuda::Cuda};

/// A GPU with the kernels that were made for it so far, and the stream that calls are queued in.
#[derive(Clone, Debug)]
pub struct Gpu {
    cuda: Cuda,
    device: Device,
    stream: Arc<CudaStream>,
}

impl Gpu {
    /// For calls in a stream of cudarc's.
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        let cuda = Cuda::new(stream.context().ordinal() as u32)?;
        Self::queueing(&cuda, stream)
    }

    /// The same GPU and kernels, queueing in another stream of cudarc's.
    pub fn on(&self, stream: &Arc<CudaStream>) -> Result<Self> {
        Self::queueing(&self.cuda, stream)
    }

    fn queueing(cuda: &Cuda, stream: &Arc<CudaStream>) -> Result<Self> {
        // SAFETY: the stream is held for as long as the device that uses it.
        let cuda = unsafe { cuda.on_stream(stream.cu_stream().cast()) }?;
        Ok(Self { device: Device::cuda_with(cuda.clone()), cuda, stream: Arc::clone(stream) })
    }

    /// FlashCore's own device.
    pub fn device(&self) -> &Device {
        &self.device
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
        let stream = self.stream.as_ref();
        // What is returned beside an address marks, when it is dropped, how far the stream has come with the slice.
        let (q_ptr, _q) = q.slice.device_ptr(stream);
        let (k_ptr, _k) = k.slice.device_ptr(stream);
        let (v_ptr, _v) = v.slice.device_ptr(stream);
        let input = |ptr: u64, len: usize, layout: Layout| {
            // SAFETY: the slice holds so many elements of its type, and is borrowed until the call is queued; cudarc
            // orders what happens to it later behind that.
            unsafe { Tensor::from_raw_parts(ptr as *const u8, len, T::DTYPE, self.place(), layout) }
        };
        let q = input(q_ptr, q.slice.len(), q.layout)?;
        let k = input(k_ptr, k.slice.len(), k.layout)?;
        let v = input(v_ptr, v.slice.len(), v.layout)?;
        let Output { slice: o_slice, layout: o_layout } = o;
        let o_len = o_slice.len();
        let (o_ptr, _o) = o_slice.device_ptr_mut(stream);
        // SAFETY: as above, and the slice is borrowed by this call alone.
        let mut o =
            unsafe { TensorMut::from_raw_parts(o_ptr as *mut u8, o_len, T::DTYPE, self.place(), o_layout) }?;
        let Some(lse) = lse else { return attention.run_into(&self.device, &q, &k, &v, &mut o, None) };
        let lse_len = lse.slice.len();
        let (lse_ptr, _lse) = lse.slice.device_ptr_mut(stream);
        // SAFETY: as above.
        let mut lse = unsafe {
            TensorMut::from_raw_parts(lse_ptr as *mut u8, lse_len, f32::DTYPE, self.place(), lse.layout)
        }?;
        attention.run_into(&self.device, &q, &k, &v, &mut o, Some(&mut lse))
    }

    /// Queues a call with key lengths that lie on the GPU, one a batch entry; none of them may be above `most`.
    ///
    /// # Safety
    /// None of the lengths is above `most`: the GPU's memory is not looked at.
    pub unsafe fn run_with_lengths<T: Element>(
        &self,
        attention: &Attention<'_>,
        lengths: &dyn DevicePtr<u32>,
        most: u32,
        inputs: [Input<'_, T>; 3],
        o: Output<'_, T>,
        lse: Option<Output<'_, f32>>,
    ) -> Result<()> {
        let (ptr, _lengths) = lengths.device_ptr(&self.stream);
        let ordinal = self.stream.context().ordinal() as u32;
        // SAFETY: the slice holds so many numbers and is borrowed until the call is queued; the caller vouches for
        // their values.
        let lengths =
            unsafe { DeviceLengths::from_raw_parts(ptr as *const u32, lengths.len(), most, ordinal) }?;
        self.run_into(&attention.key_lengths_on_device(lengths), inputs, o, lse)
    }

    fn place(&self) -> Place {
        Place::Cuda(self.stream.context().ordinal() as u32)
    }
}

/// A slice to read, with its layout.
pub struct Input<'a, T> {
    slice: &'a dyn DevicePtr<T>,
    layout: Layout,
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

    /// With any strides, as long as those of the last dimension are 1.
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
    /// For lse: one f32 a query, contiguous in the order (batch, heads, length).
    pub fn lse(slice: &'a mut dyn DevicePtrMut<f32>, [b, h, s]: [usize; 3]) -> Self {
        Self::bhsd(slice, [b, h, s, 1])
    }
}
