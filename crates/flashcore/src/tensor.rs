//! Tensors are views: an address, a shape and strides, somewhere a device can reach.
//!
//! A [`Tensor`] is read, a [`TensorMut`] is written, a [`TensorBuf`] owns its memory. The order of batch, heads
//! and length in memory is free, as long as the elements of one head lie side by side, so the layouts
//! (batch, heads, length, head_dim) and (batch, length, heads, head_dim) both run without a copy.
//!
//! Views carry addresses rather than slices, because the same type names memory of a GPU, and because a call
//! has to see for itself whether an output overlaps an input. All reads and writes through them are here.
#![allow(unsafe_code)] // A view is an address; what makes it sound is checked when it is made.

use std::marker::PhantomData;

use float8::F8E4M3;
use half::{bf16, f16};

use crate::{Aligned, DType, Element, Error, Name, Result};

/// Where a tensor's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub enum Place {
    /// In the memory of this process.
    Host,
    /// In the memory of the CUDA device with this ordinal.
    Cuda(u32),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Host => f.write_str("the host"),
            Place::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Sizes and strides in the order (batch, heads, length, head_dim), strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Sizes.
    pub shape: [usize; 4],
    /// Strides in elements.
    pub strides: [usize; 4],
}

impl Layout {
    /// Contiguous in the order (batch, heads, length, head_dim).
    pub fn bhsd(shape: [usize; 4]) -> Self {
        let [_, h, s, d] = shape.map(|x| x.max(1));
        let sd = s.saturating_mul(d);
        Self { shape, strides: [h.saturating_mul(sd), sd, d, 1] }
    }

    /// Contiguous in the order (batch, length, heads, head_dim), for a shape given as (batch, heads, length,
    /// head_dim).
    pub fn bshd(shape: [usize; 4]) -> Self {
        let [_, h, s, d] = shape.map(|x| x.max(1));
        let hd = h.saturating_mul(d);
        Self { shape, strides: [s.saturating_mul(hd), d, hd, 1] }
    }

    /// Contiguous, with heads and length in the same order as in `other`.
    pub fn ordered_like(shape: [usize; 4], other: &Layout) -> Self {
        let heads_inside = other.shape[1] > 1 && other.shape[2] > 1 && other.strides[1] < other.strides[2];
        if heads_inside { Self::bshd(shape) } else { Self::bhsd(shape) }
    }

    /// How many elements there are.
    pub fn elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size))
    }

    /// One more than the largest offset; 0 for an empty tensor.
    pub(crate) fn reach(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let last = self
            .shape
            .iter()
            .zip(&self.strides)
            .try_fold(0_usize, |sum, (&size, &stride)| sum.checked_add((size - 1).checked_mul(stride)?));
        last?.checked_add(1)
    }

    /// Whether two indices can name the same element.
    fn overlaps_itself(&self) -> bool {
        self.overlaps_when_repeated(1, 0)
    }

    /// Whether this layout, repeated at a distance of so many elements, names an element twice: sorted by stride, each
    /// dimension must step over all that the smaller ones reach.
    pub(crate) fn overlaps_when_repeated(&self, times: usize, distance: usize) -> bool {
        if self.shape.contains(&0) {
            return false;
        }
        let of =
            |dim: usize| self.shape.get(dim).map_or((distance, times), |&size| (self.strides[dim], size));
        let mut dims: [(usize, usize); 5] = std::array::from_fn(of);
        dims.sort_unstable();
        let mut reached = 1_usize;
        for (stride, size) in dims.into_iter().filter(|&(_, size)| size > 1) {
            if stride < reached {
                return true;
            }
            reached = reached.saturating_add((size - 1).saturating_mul(stride));
        }
        false
    }

    /// The offset of every row's first element, in the order (batch, heads, length).
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn each_row(&self) -> impl Iterator<Item = usize> + '_ {
        let [nb, nh, ns, _] = self.shape;
        let rows = if self.shape.contains(&0) { 0 } else { nb * nh * ns };
        (0..rows).map(move |i| self.row(i / (nh * ns), i / ns % nh, i % ns))
    }

    /// The offset of one row's first element; for a row outside the shape, whose address is at most prefetched, any
    /// number.
    pub(crate) fn row(&self, b: usize, h: usize, s: usize) -> usize {
        let [b, h, s] = [(b, 0), (h, 1), (s, 2)].map(|(index, dim)| index.wrapping_mul(self.strides[dim]));
        b.wrapping_add(h).wrapping_add(s)
    }
}

/// An address with its layout; what [`Tensor`] and [`TensorMut`] share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Raw {
    pub ptr: *mut u8,
    pub dtype: DType,
    pub place: Place,
    pub layout: Layout,
}

// SAFETY: a Raw is an address; the views around it decide who may read or write through it.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Raw {
    fn new(ptr: *mut u8, len: usize, dtype: DType, place: Place, layout: Layout) -> Result<Self> {
        let tensor = Name::Tensor;
        let Layout { shape, strides } = layout;
        let Some(needs) = layout.reach().filter(|&n| n <= isize::MAX as usize / dtype.size()) else {
            return Err(Error::TooLarge {
                tensor,
                what: format!("shape {shape:?} with strides {strides:?}"),
            });
        };
        if needs > len {
            return Err(Error::OutOfBounds { tensor, needs, has: len, shape, strides });
        }
        if needs > 0 {
            if ptr.is_null() {
                return Err(Error::NullPointer { tensor });
            }
            if !(ptr as usize).is_multiple_of(dtype.size()) {
                return Err(Error::Alignment {
                    tensor,
                    what: "address",
                    given: ptr as usize,
                    needed: dtype.size(),
                    device: place.to_string(),
                });
            }
            if shape[3] > 1 && strides[3] != 1 {
                return Err(Error::InnerStride { tensor, given: strides[3] });
            }
        }
        // The strides of a tensor without elements mean nothing, and nobody shall compute with them.
        let strides = if needs == 0 { [0, 0, 0, 1] } else { strides };
        Ok(Self { ptr, dtype, place, layout: Layout { shape, strides } })
    }

    /// The bytes that the view may touch.
    pub(crate) fn span(&self) -> std::ops::Range<usize> {
        let start = self.ptr as usize;
        start..start + self.layout.reach().unwrap_or(0) * self.dtype.size()
    }

    /// The integers of starts or of a table, from the first to the last with what lies between its rows. Panics off the host.
    pub(crate) fn indices(&self) -> &[u32] {
        assert!(self.place == Place::Host && self.dtype == DType::I32);
        let len = self.layout.reach().unwrap_or(0);
        if len == 0 {
            return &[];
        }
        // SAFETY: `new` checked that the view lies inside its memory, which is aligned and outlives the view.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), len) }
    }

    /// The first `len` elements of a row, widened to f32. Panics out of bounds or off the host.
    pub(crate) fn read_row(&self, b: usize, h: usize, s: usize, out: &mut [f32]) {
        let [nb, nh, ns, nd] = self.layout.shape;
        assert!(b < nb && h < nh && s < ns && out.len() <= nd && self.place == Place::Host);
        let offset = self.layout.row(b, h, s);
        for (i, x) in out.iter_mut().enumerate() {
            // SAFETY: the index is inside the shape, and `new` checked that the shape lies inside the memory.
            *x = unsafe {
                match self.dtype {
                    DType::F16 => self.ptr.cast::<f16>().add(offset + i).read().to_f32(),
                    DType::BF16 => self.ptr.cast::<bf16>().add(offset + i).read().to_f32(),
                    DType::F32 => self.ptr.cast::<f32>().add(offset + i).read(),
                    DType::F8E4M3 => self.ptr.cast::<F8E4M3>().add(offset + i).read().to_f32(),
                    DType::I32 => self.ptr.cast::<i32>().add(offset + i).read() as f32,
                }
            };
        }
    }
}

/// Copies of rows, bit by bit.
impl Raw {
    /// Copies a row to one of another tensor of the same type and width. Panics out of bounds or off the host.
    pub(crate) fn copy_row(&self, [b, h, s]: [usize; 3], to: &Raw, [to_b, to_h, to_s]: [usize; 3]) {
        let inside = |raw: &Raw, at: [usize; 3]| {
            raw.place == Place::Host && at.iter().zip(raw.layout.shape).all(|(&index, size)| index < size)
        };
        let width = self.layout.shape[3];
        assert!(inside(self, [b, h, s]) && inside(to, [to_b, to_h, to_s]));
        assert!(self.dtype == to.dtype && width == to.layout.shape[3]);
        let size = self.dtype.size();
        let (from, into) = (self.layout.row(b, h, s) * size, to.layout.row(to_b, to_h, to_s) * size);
        // SAFETY: both rows lie inside their tensors, which `new` checked to lie inside their memory, and a call's contract
        // has seen to it that what is written overlaps nothing that is read.
        unsafe { std::ptr::copy(self.ptr.add(from), to.ptr.add(into), width * size) };
    }
}

/// Copies of whole tensors, for devices with memory of their own.
#[cfg(feature = "cuda")]
impl Raw {
    /// The bytes from the first element to the last, on the host.
    pub(crate) fn bytes(&self) -> &[u8] {
        assert_eq!(self.place, Place::Host);
        let span = self.span();
        if span.is_empty() {
            return &[];
        }
        // SAFETY: `new` checked that the view lies inside its memory, which is initialised and outlives the view.
        unsafe { std::slice::from_raw_parts(self.ptr, span.len()) }
    }

    /// The elements row by row, in the order (batch, heads, length, head_dim).
    pub(crate) fn rows(&self) -> Vec<u8> {
        let (bytes, row_bytes) = (self.bytes(), self.layout.shape[3] * self.dtype.size());
        let mut all = Vec::new();
        for row in self.layout.each_row() {
            let start = row * self.dtype.size();
            all.extend_from_slice(&bytes[start..start + row_bytes]);
        }
        all
    }

    /// Writes every row of a host tensor from bytes that lie in another layout of the same shape.
    pub(crate) fn write_rows(&self, bytes: &[u8], layout: &Layout) {
        assert_eq!((self.place, self.layout.shape), (Place::Host, layout.shape));
        let (size, row_bytes) = (self.dtype.size(), self.layout.shape[3] * self.dtype.size());
        for (to, from) in self.layout.each_row().zip(layout.each_row()) {
            let row = &bytes[from * size..from * size + row_bytes];
            // SAFETY: `new` checked that the row lies inside the memory; `bytes` is memory of its own.
            unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), self.ptr.add(to * size), row_bytes) };
        }
    }
}

fn four(shape: &[usize]) -> Result<[usize; 4]> {
    shape.try_into().map_err(|_| Error::Rank { tensor: Name::Tensor, given: shape.len() })
}

/// A tensor to read.
///
/// ```
/// use flashcore::Tensor;
/// let data = vec![0.0_f32; 2 * 8 * 16 * 64];
/// let q = Tensor::new(&data, &[2, 8, 16, 64])?; // (batch, heads, length, head_dim)
/// let k = Tensor::bshd(&data, &[2, 16, 8, 64])?; // (batch, length, heads, head_dim)
/// assert_eq!(q.shape(), k.shape());
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub(crate) raw: Raw,
    lifetime: PhantomData<&'a [u8]>,
}

impl<'a> Tensor<'a> {
    /// Contiguous in the order (batch, heads, length, head_dim).
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Self::strided(data, Layout::bhsd(four(shape)?))
    }

    /// Contiguous in the order (batch, length, heads, head_dim); the shape is given in that order too.
    pub fn bshd<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        let [b, s, h, d] = four(shape)?;
        Self::strided(data, Layout::bshd([b, h, s, d]))
    }

    /// With any strides, as long as those of the last dimension are 1. A stride of 0 repeats.
    pub fn strided<T: Element>(data: &'a [T], layout: Layout) -> Result<Self> {
        let raw = Raw::new(data.as_ptr().cast_mut().cast(), data.len(), T::DTYPE, Place::Host, layout)?;
        Ok(Self { raw, lifetime: PhantomData })
    }

    /// For descales: one f32 per batch entry and kv head, contiguous in that order. A single number serves all of them.
    pub fn descale(data: &'a [f32], shape: [usize; 2]) -> Result<Self> {
        let [b, h] = shape;
        let strides = if data.len() == 1 { [0, 0, 1, 1] } else { [h, 1, 1, 1] };
        Self::strided(data, Layout { shape: [b, h, 1, 1], strides })
    }

    /// For starts and tables of pages: rows of integers, one behind the other.
    pub fn indices<T: Element>(data: &'a [T], shape: [usize; 2]) -> Result<Self> {
        let [rows, entries] = shape;
        Self::strided(data, Layout { shape: [rows, 1, 1, entries], strides: [entries, 0, 0, 1] })
    }

    /// From an address that holds `len` elements.
    ///
    /// # Safety
    /// `ptr` points at `len` initialised elements of `dtype` in `place`. They stay valid, and nobody writes to them, for
    /// as long as the tensor lives *and* until all work that was queued with it is done: a call on tensors of a GPU
    /// returns when its work is queued, and the GPU reads them later. Work that is queued in the same stream behind the
    /// call may write to them or free them. What a CUDA graph captured stays valid as long as the graph can run. (An
    /// output of the same call may overlap them: the call is refused then.)
    pub unsafe fn from_raw_parts(
        ptr: *const u8,
        len: usize,
        dtype: DType,
        place: Place,
        layout: Layout,
    ) -> Result<Self> {
        Ok(Self { raw: Raw::new(ptr.cast_mut(), len, dtype, place, layout)?, lifetime: PhantomData })
    }

    /// The view of an address that was checked, for as long as its memory lives.
    pub(crate) fn of(raw: Raw) -> Self {
        Self { raw, lifetime: PhantomData }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.raw.dtype
    }

    /// Sizes as (batch, heads, length, head_dim).
    pub fn shape(&self) -> [usize; 4] {
        self.raw.layout.shape
    }

    /// Sizes and strides.
    pub fn layout(&self) -> Layout {
        self.raw.layout
    }

    /// Where the memory is.
    pub fn place(&self) -> Place {
        self.raw.place
    }

    /// The start of row `(b, h, s)`, widened to f32. Panics out of bounds, or if the tensor is not on the host.
    pub fn read_row(&self, b: usize, h: usize, s: usize, out: &mut [f32]) {
        self.raw.read_row(b, h, s, out);
    }

    /// All elements in the order (batch, heads, length, head_dim), widened to f32. Panics if the tensor is not
    /// on the host.
    pub fn to_f32(&self) -> Vec<f32> {
        let [nb, nh, ns, nd] = self.shape();
        if self.shape().contains(&0) {
            return Vec::new();
        }
        let mut all = vec![0.0; nb * nh * ns * nd];
        for (i, row) in all.chunks_exact_mut(nd).enumerate() {
            self.read_row(i / (nh * ns), i / ns % nh, i % ns, row);
        }
        all
    }
}

/// A tensor to write.
#[derive(Debug)]
pub struct TensorMut<'a> {
    pub(crate) raw: Raw,
    lifetime: PhantomData<&'a mut [u8]>,
}

impl<'a> TensorMut<'a> {
    /// The tensor of a call.
    pub(crate) fn of(raw: Raw) -> Self {
        Self { raw, lifetime: PhantomData }
    }

    /// Contiguous in the order (batch, heads, length, head_dim).
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        Self::strided(data, Layout::bhsd(four(shape)?))
    }

    /// Contiguous in the order (batch, length, heads, head_dim); the shape is given in that order too.
    pub fn bshd<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        let [b, s, h, d] = four(shape)?;
        Self::strided(data, Layout::bshd([b, h, s, d]))
    }

    /// With any strides in which no two indices name the same element.
    pub fn strided<T: Element>(data: &'a mut [T], layout: Layout) -> Result<Self> {
        Self::from_raw(Raw::new(data.as_mut_ptr().cast(), data.len(), T::DTYPE, Place::Host, layout)?)
    }

    /// For lse: one f32 per query, contiguous in the order (batch, heads, length).
    pub fn lse(data: &'a mut [f32], shape: [usize; 3]) -> Result<Self> {
        let [b, h, s] = shape;
        Self::strided(data, Layout::bhsd([b, h, s, 1]))
    }

    /// To an address that holds `len` elements.
    ///
    /// # Safety
    /// `ptr` points at `len` elements of `dtype` in `place`. They stay valid, and nobody else reads or writes them, for as
    /// long as the tensor lives *and* until all work that was queued with it is done: a call on tensors of a GPU returns
    /// when its work is queued, and the GPU writes them later. Work that is queued in the same stream behind the call
    /// may use them or free them. What a CUDA graph captured stays valid as long as the graph can run. (An input of the
    /// same call may overlap them: the call is refused then.)
    pub unsafe fn from_raw_parts(
        ptr: *mut u8,
        len: usize,
        dtype: DType,
        place: Place,
        layout: Layout,
    ) -> Result<Self> {
        Self::from_raw(Raw::new(ptr, len, dtype, place, layout)?)
    }

    fn from_raw(raw: Raw) -> Result<Self> {
        if raw.layout.overlaps_itself() {
            let Layout { shape, strides } = raw.layout;
            return Err(Error::OverlappingOutput { tensor: Name::Tensor, shape, strides });
        }
        Ok(Self { raw, lifetime: PhantomData })
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.raw.dtype
    }

    /// Sizes as (batch, heads, length, head_dim).
    pub fn shape(&self) -> [usize; 4] {
        self.raw.layout.shape
    }

    /// Sizes and strides.
    pub fn layout(&self) -> Layout {
        self.raw.layout
    }

    /// Where the memory is.
    pub fn place(&self) -> Place {
        self.raw.place
    }

    /// Rounds a row to the tensor's type and stores it. Panics out of bounds, or if the tensor is not on the host.
    pub fn write_row(&mut self, b: usize, h: usize, s: usize, row: &[f32]) {
        let Raw { ptr, dtype, place, layout } = self.raw;
        let [nb, nh, ns, nd] = layout.shape;
        assert!(b < nb && h < nh && s < ns && row.len() <= nd && place == Place::Host);
        let offset = layout.row(b, h, s);
        for (i, &x) in row.iter().enumerate() {
            // SAFETY: the index is inside the shape, and `Raw::new` checked that the shape lies inside the memory.
            unsafe {
                match dtype {
                    DType::F16 => ptr.cast::<f16>().add(offset + i).write(f16::from_f32(x)),
                    DType::BF16 => ptr.cast::<bf16>().add(offset + i).write(bf16::from_f32(x)),
                    DType::F32 => ptr.cast::<f32>().add(offset + i).write(x),
                    DType::F8E4M3 => ptr.cast::<F8E4M3>().add(offset + i).write(F8E4M3::from_f32(x)),
                    DType::I32 => ptr.cast::<i32>().add(offset + i).write(x as i32),
                }
            }
        }
    }

    /// The same tensor, to read.
    pub fn as_tensor(&self) -> Tensor<'_> {
        Tensor { raw: self.raw, lifetime: PhantomData }
    }
}

/// Key lengths in the memory of a GPU: one u32 per batch entry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceLengths<'a> {
    address: u64,
    len: usize,
    most: u32,
    ordinal: u32,
    lifetime: PhantomData<&'a [u32]>,
}

impl DeviceLengths<'_> {
    /// From an address that holds `len` lengths, on the GPU with this ordinal.
    ///
    /// # Safety
    /// Until all work that was queued with it is done, `ptr` points at `len` numbers on that GPU, none of them above
    /// `most`. (A call compares `most` with the length of its keys; what the GPU holds it does not ask.)
    pub unsafe fn from_raw_parts(ptr: *const u32, len: usize, most: u32, ordinal: u32) -> Result<Self> {
        let tensor = Name::KeyLengths;
        if len > 0 && ptr.is_null() {
            return Err(Error::NullPointer { tensor });
        }
        if !(ptr as usize).is_multiple_of(size_of::<u32>()) {
            let (given, needed) = (ptr as usize, size_of::<u32>());
            return Err(Error::Alignment {
                tensor,
                what: "address",
                given,
                needed,
                device: Place::Cuda(ordinal).to_string(),
            });
        }
        Ok(Self { address: ptr as u64, len, most, ordinal, lifetime: PhantomData })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What none of them is above.
    pub fn most(&self) -> u32 {
        self.most
    }

    /// Where the memory is.
    pub fn place(&self) -> Place {
        Place::Cuda(self.ordinal)
    }

    /// The address of the first.
    pub fn address(&self) -> u64 {
        self.address
    }
}

/// The memory of a [`TensorBuf`].
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub enum Storage {
    /// f16 elements.
    F16(Aligned<f16>),
    /// bf16 elements.
    BF16(Aligned<bf16>),
    /// f32 elements.
    F32(Aligned<f32>),
    /// f8 elements.
    F8E4M3(Aligned<F8E4M3>),
    /// i32 elements.
    I32(Aligned<i32>),
}

/// A tensor on the host that owns its memory.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorBuf {
    storage: Storage,
    layout: Layout,
}

impl TensorBuf {
    /// All zeros. The layout must be contiguous in some order.
    pub fn zeros(dtype: DType, layout: Layout) -> Result<Self> {
        let too_large =
            || Error::TooLarge { tensor: Name::Tensor, what: format!("shape {:?}", layout.shape) };
        let len = layout.reach().filter(|&n| n <= isize::MAX as usize / 8).ok_or_else(too_large)?;
        let storage = match dtype {
            DType::F16 => Aligned::zeros_if_possible(len).map(Storage::F16),
            DType::BF16 => Aligned::zeros_if_possible(len).map(Storage::BF16),
            DType::F32 => Aligned::zeros_if_possible(len).map(Storage::F32),
            DType::F8E4M3 => Aligned::zeros_if_possible(len).map(Storage::F8E4M3),
            DType::I32 => Aligned::zeros_if_possible(len).map(Storage::I32),
        };
        let none = || Error::OutOfMemory {
            device: Place::Host.to_string(),
            bytes: len * dtype.size(),
            what: format!(
                "there is no memory for {len} elements of {dtype}, shape {:?}. Split the batch or the sequence",
                layout.shape
            ),
            source: None,
        };
        Ok(Self { storage: storage.ok_or_else(none)?, layout })
    }

    /// Values in the order (batch, heads, length, head_dim), rounded to `dtype`.
    pub fn from_f32(values: &[f32], shape: [usize; 4], dtype: DType) -> Result<Self> {
        let layout = Layout::bhsd(shape);
        let needs = layout.elements().unwrap_or(usize::MAX);
        if needs != values.len() {
            let Layout { shape, strides } = layout;
            return Err(Error::OutOfBounds {
                tensor: Name::Tensor,
                needs,
                has: values.len(),
                shape,
                strides,
            });
        }
        let storage = match dtype {
            DType::F16 => Storage::F16(Aligned::of(values, f16::from_f32)),
            DType::BF16 => Storage::BF16(Aligned::of(values, bf16::from_f32)),
            DType::F32 => Storage::F32(Aligned::of(values, |x| x)),
            DType::F8E4M3 => Storage::F8E4M3(Aligned::of(values, F8E4M3::from_f32)),
            DType::I32 => Storage::I32(Aligned::of(values, <i32 as Element>::from_f32)),
        };
        Ok(Self { storage, layout })
    }

    /// The tensor to read.
    pub fn view(&self) -> Tensor<'_> {
        let view = match &self.storage {
            Storage::F16(data) => Tensor::strided(data, self.layout),
            Storage::BF16(data) => Tensor::strided(data, self.layout),
            Storage::F32(data) => Tensor::strided(data, self.layout),
            Storage::F8E4M3(data) => Tensor::strided(data, self.layout),
            Storage::I32(data) => Tensor::strided(data, self.layout),
        };
        view.expect("a TensorBuf's layout fits its memory")
    }

    /// The tensor to write.
    pub fn view_mut(&mut self) -> TensorMut<'_> {
        let view = match &mut self.storage {
            Storage::F16(data) => TensorMut::strided(data, self.layout),
            Storage::BF16(data) => TensorMut::strided(data, self.layout),
            Storage::F32(data) => TensorMut::strided(data, self.layout),
            Storage::F8E4M3(data) => TensorMut::strided(data, self.layout),
            Storage::I32(data) => TensorMut::strided(data, self.layout),
        };
        view.expect("a TensorBuf's layout fits its memory")
    }

    /// The elements as they lie in memory, to be changed.
    pub(crate) fn storage_mut(&mut self) -> &mut Storage {
        &mut self.storage
    }

    /// The elements as they lie in memory.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Sizes and strides.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self.storage {
            Storage::F16(_) => DType::F16,
            Storage::BF16(_) => DType::BF16,
            Storage::F32(_) => DType::F32,
            Storage::F8E4M3(_) => DType::F8E4M3,
            Storage::I32(_) => DType::I32,
        }
    }

    /// Sizes as (batch, heads, length, head_dim).
    pub fn shape(&self) -> [usize; 4] {
        self.layout.shape
    }

    /// All elements in the order (batch, heads, length, head_dim), widened to f32.
    pub fn to_f32(&self) -> Vec<f32> {
        self.view().to_f32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_read_the_same_elements() {
        let (b, h, s, d) = (2, 3, 4, 2);
        let bhsd: Vec<f32> = (0..b * h * s * d).map(|i| i as f32).collect();
        let mut bshd = vec![0.0; bhsd.len()];
        for (i, &x) in bhsd.iter().enumerate() {
            let (ib, ih, is, id) = (i / (h * s * d), i / (s * d) % h, i / d % s, i % d);
            bshd[((ib * s + is) * h + ih) * d + id] = x;
        }
        let left = Tensor::new(&bhsd, &[b, h, s, d]).unwrap();
        let right = Tensor::bshd(&bshd, &[b, s, h, d]).unwrap();
        assert_eq!(left.to_f32(), right.to_f32());
    }

    #[test]
    fn a_view_beyond_its_memory_is_refused() {
        let data = [0.0_f32; 63];
        let error = Tensor::new(&data, &[1, 1, 8, 8]).unwrap_err();
        assert!(matches!(error, Error::OutOfBounds { needs: 64, has: 63, .. }), "{error}");
    }

    #[test]
    fn an_output_that_no_memory_holds_is_an_error() {
        // A stride of 0 repeats, so that a few numbers are a query of any size.
        let layout = Layout { shape: [1 << 20, 1 << 10, 1 << 20, 1 << 8], strides: [0, 0, 0, 1] };
        let data = [0.5_f32; 1 << 8];
        let q = Tensor::strided(&data, layout).unwrap();
        let kv = Tensor::strided(&data, Layout { shape: [1 << 20, 1, 1, 1 << 8], ..layout }).unwrap();
        let error = crate::Attention::new().run(&crate::Device::cpu(), &q, &kv, &kv).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { bytes, .. } if bytes == 1 << 60), "{error}");
        assert!(error.to_string().starts_with("the host: there is no memory for"), "{error}");
    }

    #[test]
    fn rank_and_inner_stride_are_checked() {
        let data = [0.0_f32; 64];
        assert!(matches!(Tensor::new(&data, &[8, 8]), Err(Error::Rank { given: 2, .. })));
        let layout = Layout { shape: [1, 1, 4, 4], strides: [0, 0, 1, 4] };
        assert!(matches!(Tensor::strided(&data, layout), Err(Error::InnerStride { given: 4, .. })));
    }

    #[test]
    fn an_output_may_not_repeat_but_an_input_may() {
        let mut data = [0.0_f32; 64];
        let layout = Layout { shape: [1, 4, 4, 4], strides: [0, 0, 4, 1] };
        assert!(Tensor::strided(&data, layout).is_ok());
        assert!(matches!(TensorMut::strided(&mut data, layout), Err(Error::OverlappingOutput { .. })));
        let rows_overlap = Layout { shape: [1, 1, 4, 4], strides: [64, 64, 2, 1] };
        assert!(TensorMut::strided(&mut data, rows_overlap).is_err());
    }

    #[test]
    fn sizes_that_overflow_are_refused_rather_than_wrapped() {
        let data = [0.0_f32; 4];
        let layout = Layout { shape: [usize::MAX, 2, 2, 1], strides: [usize::MAX, 1, 1, 1] };
        assert!(matches!(Tensor::strided(&data, layout), Err(Error::TooLarge { .. })));
        assert!(TensorBuf::zeros(DType::F16, Layout::bhsd([usize::MAX / 2, 2, 2, 2])).is_err());
    }

    #[test]
    fn the_strides_of_an_empty_tensor_are_never_computed_with() {
        let layout = Layout { shape: [3, 2, 0, 4], strides: [usize::MAX; 4] };
        let empty = Tensor::strided(&[0.0_f32; 0], layout).unwrap();
        assert_eq!(empty.layout().row(2, 1, 0), 0);
        assert!(TensorMut::strided(&mut [0.0_f32; 0], layout).is_ok());
        assert_eq!(Layout::bhsd([usize::MAX, usize::MAX, 0, 4]).each_row().count(), 0);
    }

    #[test]
    fn misaligned_and_null_addresses_are_refused() {
        let data = [0.0_f32; 4];
        let layout = Layout::bhsd([1, 1, 1, 2]);
        // SAFETY: both are refused before anything is read.
        unsafe {
            let odd = data.as_ptr().cast::<u8>().add(1);
            assert!(matches!(
                Tensor::from_raw_parts(odd, 2, DType::F32, Place::Host, layout),
                Err(Error::Alignment { needed: 4, .. })
            ));
            assert!(matches!(
                Tensor::from_raw_parts(std::ptr::null(), 2, DType::F32, Place::Host, layout),
                Err(Error::NullPointer { .. })
            ));
        }
    }
}
