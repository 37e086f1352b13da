//! Tensors and key lengths that own memory of a GPU, for those who have no allocator of their own.
#![allow(unsafe_code)] // A view is an address; the owner of the memory vouches for it.

use flashcore_driver::DeviceBuffer;

use super::Cuda;
use crate::{
    DType, Layout, Result,
    tensor::{DeviceLengths, Place, Tensor, TensorMut},
};

/// A tensor in the memory of a GPU.
pub struct CudaTensor {
    buffer: DeviceBuffer,
    dtype: DType,
    layout: Layout,
    ordinal: u32,
    elements: usize,
}

/// Key lengths in the memory of a GPU.
pub struct CudaLengths {
    buffer: DeviceBuffer,
    count: usize,
    most: u32,
    ordinal: u32,
}

impl Cuda {
    /// Memory for a tensor of this layout, contiguous in some order.
    pub fn empty(&self, dtype: DType, layout: Layout) -> Result<CudaTensor> {
        let elements = layout.elements().unwrap_or(0);
        let bytes = (elements * dtype.size()).max(1);
        let buffer = self.context().alloc(bytes).map_err(|error| self.error(&error))?;
        Ok(CudaTensor { buffer, dtype, layout, ordinal: self.ordinal(), elements })
    }

    /// A copy of a host tensor on the GPU, contiguous in the order (batch, heads, length, head_dim).
    pub fn upload(&self, tensor: &Tensor<'_>) -> Result<CudaTensor> {
        let layout = Layout::bhsd(tensor.shape());
        let mut copy = self.empty(tensor.dtype(), layout)?;
        let bytes = tensor.raw.rows();
        if !bytes.is_empty() {
            self.stream().upload(&mut copy.buffer, 0, &bytes).map_err(|error| self.error(&error))?;
        }
        Ok(copy)
    }

    /// A copy of key lengths on the GPU.
    pub fn upload_lengths(&self, lengths: &[u32]) -> Result<CudaLengths> {
        let buffer = self.stream().upload_new(lengths).map_err(|error| self.error(&error))?;
        let most = lengths.iter().copied().max().unwrap_or(0);
        Ok(CudaLengths { buffer, count: lengths.len(), most, ordinal: self.ordinal() })
    }

    /// Queues filling a tensor's memory with one byte.
    pub fn fill(&self, tensor: &mut CudaTensor, byte: u8) -> Result<()> {
        let bytes = tensor.buffer.len();
        self.stream().fill_bytes(&mut tensor.buffer, 0, bytes, byte).map_err(|error| self.error(&error))
    }

    /// What a tensor on the GPU holds, once everything queued in the stream is done.
    pub fn download(&self, tensor: &CudaTensor, out: &mut TensorMut<'_>) -> Result<()> {
        self.synchronize()?;
        let mut bytes = vec![0_u8; tensor.elements * tensor.dtype.size()];
        if !bytes.is_empty() {
            self.stream().download(&tensor.buffer, 0, &mut bytes).map_err(|error| self.error(&error))?;
        }
        out.raw.write_rows(&bytes, &tensor.layout);
        Ok(())
    }
}

impl CudaTensor {
    /// The tensor to read.
    pub fn view(&self) -> Result<Tensor<'_>> {
        let ptr = self.buffer.address() as *const u8;
        // SAFETY: the buffer holds that many elements and lives as long as the view.
        unsafe {
            Tensor::from_raw_parts(ptr, self.elements, self.dtype, Place::Cuda(self.ordinal), self.layout)
        }
    }

    /// The tensor to write.
    pub fn view_mut(&mut self) -> Result<TensorMut<'_>> {
        self.target()
    }

    /// The tensor as what recorded calls write to, one after the other. The host sees none of it before it copies
    /// the bytes, in stream order.
    pub(super) fn target(&self) -> Result<TensorMut<'_>> {
        let ptr = self.buffer.address() as *mut u8;
        // SAFETY: the buffer holds that many elements and lives as long as the view, and the GPU's memory is not the
        // host's to alias.
        unsafe {
            TensorMut::from_raw_parts(ptr, self.elements, self.dtype, Place::Cuda(self.ordinal), self.layout)
        }
    }

    /// The memory.
    pub fn buffer_mut(&mut self) -> &mut DeviceBuffer {
        &mut self.buffer
    }
}

impl CudaLengths {
    /// The lengths to give to a call.
    pub fn view(&self) -> Result<DeviceLengths<'_>> {
        let ptr = self.buffer.address() as *const u32;
        // SAFETY: the buffer holds so many lengths, lives as long as the view, and `most` is their maximum.
        unsafe { DeviceLengths::from_raw_parts(ptr, self.count, self.most, self.ordinal) }
    }
}
