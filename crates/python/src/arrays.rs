//! Arrays of other libraries, described without a copy.
//!
//! Three ways lead to an array's memory, fastest first: the exchange table that its type carries (torch 2.10 and
//! later), a torch tensor's own attributes, and a DLPack capsule (NumPy, CuPy, JAX and others).
#![allow(unsafe_code)] // Reads C structs that other libraries filled in.

use std::{
    ffi::{CStr, c_void},
    sync::{Mutex, PoisonError},
};

use flashcore::{DType, DeviceLengths, Error, Layout, Name, Place, Tensor, TensorMut};
use pyo3::{
    exceptions::{PyBufferError, PyTypeError},
    intern,
    prelude::*,
    types::{PyCapsule, PyDict, PyType},
};

use crate::{dlpack, errors, prepare};

/// The most dimensions that a call takes. Of an array with more, only their number is kept.
const MAX_RANK: usize = 4;

/// How the shape of a call's tensors is ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// (batch, heads, length, head_dim).
    HeadsFirst,
    /// (batch, length, heads, head_dim).
    LengthFirst,
}

impl Order {
    /// By its name in Python.
    pub fn from_name(py: Python<'_>, name: &str) -> PyResult<Self> {
        match name {
            "bhsd" => Ok(Order::HeadsFirst),
            "bshd" => Ok(Order::LengthFirst),
            _ => {
                let text = format!(
                    "layout is '{name}', possible are 'bhsd' (batch, heads, length, head_dim) and 'bshd' (batch, length, heads, head_dim)"
                );
                Err(errors::contract(py, &text))
            }
        }
    }

    fn of(self, [a, b, c, d]: [usize; 4]) -> [usize; 4] {
        match self {
            Order::HeadsFirst => [a, b, c, d],
            Order::LengthFirst => [a, c, b, d],
        }
    }
}

/// How an array was read, which decides the stream that its work belongs in.
#[derive(Clone, Copy)]
enum Source {
    Exchange(&'static dlpack::ExchangeApi),
    Torch,
    Capsule,
}

/// The stream that a call on a GPU belongs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// The `CUstream`; null is the default one.
    pub raw: usize,
    /// Whether the owner does not know that work was queued there, so that the call has to wait until it is done.
    pub wait: bool,
}

/// An array of another library: an address with sizes and strides. Valid while the object that it was read from lives.
pub struct Array<'py> {
    data: *mut u8,
    rank: usize,
    sizes: [i64; MAX_RANK],
    strides: [i64; MAX_RANK],
    /// The element type.
    pub dtype: dlpack::DataType,
    device: dlpack::Device,
    read_only: bool,
    source: Source,
    /// What owns the description, where it is not the array itself.
    _owner: Option<Bound<'py, PyAny>>,
}

impl<'py> Array<'py> {
    /// Reads an array, or says why the object is not one.
    pub fn read(object: &Bound<'py, PyAny>, name: Name) -> PyResult<Self> {
        if let Some(api) = exchange_api(object)? {
            return Self::through(object, api);
        }
        let py = object.py();
        if object.hasattr(intern!(py, "untyped_storage"))? && object.hasattr(intern!(py, "data_ptr"))? {
            return Self::from_torch(object, name);
        }
        if object.hasattr(intern!(py, "__dlpack__"))? {
            return Self::from_capsule(object, name);
        }
        Err(PyTypeError::new_err(format!(
            "{name} is a {}, possible are torch tensors, numpy arrays and whatever else has __dlpack__",
            object.get_type().name()?
        )))
    }

    /// Reads an array whose type has an exchange table.
    fn through(object: &Bound<'py, PyAny>, api: &'static dlpack::ExchangeApi) -> PyResult<Self> {
        let describe = api.tensor_from_object.expect("exchange_api checked that it is there");
        let mut tensor = std::mem::MaybeUninit::<dlpack::Tensor>::zeroed();
        // SAFETY: the table belongs to the object's type, and the out pointer is a live local.
        let status = unsafe { describe(object.as_ptr().cast(), tensor.as_mut_ptr()) };
        if status != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: the call succeeded, so the struct is filled in, and it describes an object that lives.
        Ok(unsafe { Self::describe(tensor.assume_init_ref(), false, Source::Exchange(api), None) })
    }

    /// Reads a torch tensor by its attributes: older versions have no exchange table, and refuse a capsule for a
    /// tensor that requires a gradient.
    fn from_torch(object: &Bound<'py, PyAny>, name: Name) -> PyResult<Self> {
        let py = object.py();
        let sizes: Vec<i64> = object.getattr(intern!(py, "shape"))?.extract()?;
        let strides: Vec<i64> = object.call_method0(intern!(py, "stride"))?.extract()?;
        let dtype = object.getattr(intern!(py, "dtype"))?.str()?.to_string();
        let (code, bits) = match dtype.as_str() {
            "torch.float16" => (dlpack::FLOAT, 16),
            "torch.bfloat16" => (dlpack::BFLOAT, 16),
            "torch.float32" => (dlpack::FLOAT, 32),
            "torch.float8_e4m3fn" => (dlpack::FLOAT8_E4M3FN, 8),
            "torch.uint8" => (dlpack::UINT, 8),
            "torch.bool" => (dlpack::BOOL, 8),
            "torch.int32" => (dlpack::INT, 32),
            "torch.int64" => (dlpack::INT, 64),
            other => {
                let text = wrong_dtype(name, other.trim_start_matches("torch."));
                return Err(errors::contract(py, &text));
            }
        };
        let device = object.getattr(intern!(py, "device"))?;
        let kind: String = device.getattr(intern!(py, "type"))?.extract()?;
        let device = match kind.as_str() {
            "cpu" => dlpack::Device { kind: dlpack::CPU, id: 0 },
            "cuda" => dlpack::Device {
                kind: dlpack::CUDA,
                id: device.getattr(intern!(py, "index"))?.extract::<Option<i32>>()?.unwrap_or(0),
            },
            _ => return Err(errors::unsupported(py, &wrong_device(name, &kind))),
        };
        let address: usize = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
        Ok(Self {
            data: std::ptr::with_exposed_provenance_mut(address),
            rank: sizes.len(),
            sizes: first(&sizes),
            strides: first(&strides),
            dtype: dlpack::DataType { code, bits, lanes: 1 },
            device,
            read_only: false,
            source: Source::Torch,
            _owner: None,
        })
    }

    fn from_capsule(object: &Bound<'py, PyAny>, name: Name) -> PyResult<Self> {
        let py = object.py();
        let (kind, _): (i32, i32) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
        let options = PyDict::new(py);
        if kind == dlpack::CUDA || kind == dlpack::CUDA_MANAGED {
            // 1 is the default stream: the producer makes it wait for whatever still writes the array.
            options.set_item(intern!(py, "stream"), 1)?;
        }
        let plain = options.copy()?;
        options.set_item(intern!(py, "max_version"), (dlpack::MAJOR, 3))?;
        let method = object.getattr(intern!(py, "__dlpack__"))?;
        let capsule = match method.call((), Some(&options)) {
            // Producers older than version 1 do not know the argument.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => method.call((), Some(&plain)),
            result => result,
        }
        .map_err(|error| unshared(py, name, error))?
        .cast_into::<PyCapsule>()
        .map_err(|_| errors::contract(py, &format!("{name} has a __dlpack__ that returns no capsule")))?;
        let (tensor, read_only) = managed(&capsule)?;
        // SAFETY: the capsule keeps the struct alive, and the array keeps the capsule.
        Ok(unsafe { Self::describe(&*tensor, read_only, Source::Capsule, Some(capsule.into_any())) })
    }

    /// Copies a description.
    ///
    /// # Safety
    /// `tensor` is filled in according to DLPack, and its memory lives as long as the result.
    unsafe fn describe(
        tensor: &dlpack::Tensor,
        read_only: bool,
        source: Source,
        owner: Option<Bound<'py, PyAny>>,
    ) -> Self {
        let rank = tensor.ndim.max(0) as usize;
        let (mut sizes, mut strides) = ([0; MAX_RANK], [0; MAX_RANK]);
        if rank <= MAX_RANK {
            let mut contiguous = 1_i64;
            for dim in (0..rank).rev() {
                // SAFETY: shape has `ndim` elements.
                sizes[dim] = unsafe { tensor.shape.add(dim).read() };
                strides[dim] = if tensor.strides.is_null() {
                    contiguous
                } else {
                    // SAFETY: strides, where there are any, have `ndim` elements.
                    unsafe { tensor.strides.add(dim).read() }
                };
                contiguous = contiguous.saturating_mul(sizes[dim]);
            }
        }
        let data = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        let (dtype, device) = (tensor.dtype, tensor.device);
        Self { data, rank, sizes, strides, dtype, device, read_only, source, _owner: owner }
    }

    /// How many dimensions it has.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Sizes.
    pub fn sizes(&self) -> &[i64] {
        &self.sizes[..self.rank.min(MAX_RANK)]
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.rank.min(MAX_RANK)]
    }

    /// Whether it has four dimensions and the last one, of several elements, is contiguous. The memory of such a tensor
    /// holds its values: torch negates lazily only in views of complex numbers' parts, whose elements are two apart.
    pub fn has_rows(&self) -> bool {
        self.rank == 4 && self.strides[3] == 1 && self.sizes[3] > 1
    }

    /// Whether the kernels read its type, and nothing has to be done with it first.
    pub fn is_ready(&self) -> bool {
        let known = matches!(
            (self.dtype.code, self.dtype.bits, self.dtype.lanes),
            (dlpack::FLOAT | dlpack::BFLOAT, 16, 1) | (dlpack::FLOAT, 32, 1)
        );
        let bytes = i64::from(self.dtype.bits) / 8;
        known && prepare::step(!self.on_host(), bytes, self.sizes, self.strides, self.data.addr()).is_none()
    }

    /// The first element.
    pub fn data(&self) -> *const u8 {
        self.data
    }

    /// Whether it lies where the CPU can read it.
    pub fn on_host(&self) -> bool {
        matches!(self.device.kind, dlpack::CPU | dlpack::CUDA_HOST)
    }

    fn place(&self, py: Python<'_>, name: Name) -> PyResult<Place> {
        match self.device.kind {
            dlpack::CPU | dlpack::CUDA_HOST => Ok(Place::Host),
            dlpack::CUDA | dlpack::CUDA_MANAGED => Ok(Place::Cuda(self.device.id.max(0) as u32)),
            kind => {
                let text = wrong_device(name, &format!("DLPack device {kind}"));
                Err(errors::unsupported(py, &text))
            }
        }
    }

    fn element(&self, py: Python<'_>, name: Name) -> PyResult<DType> {
        match (self.dtype.code, self.dtype.bits, self.dtype.lanes) {
            (dlpack::FLOAT, 16, 1) => Ok(DType::F16),
            (dlpack::BFLOAT, 16, 1) => Ok(DType::BF16),
            (dlpack::FLOAT, 32, 1) => Ok(DType::F32),
            (dlpack::FLOAT8_E4M3FN, 8, 1) => Ok(DType::F8E4M3),
            (code, bits, _) => {
                let kind = match code {
                    dlpack::INT => "int",
                    dlpack::UINT => "uint",
                    dlpack::FLOAT => "float",
                    dlpack::BOOL => "bool",
                    _ => "an unknown type of bits ",
                };
                Err(errors::contract(py, &wrong_dtype(name, &format!("{kind}{bits}"))))
            }
        }
    }

    /// Sizes and strides as (batch, heads, length, head_dim), and how many elements the memory spans.
    fn layout(&self, py: Python<'_>, name: Name, order: Order) -> PyResult<(Layout, usize)> {
        if self.rank != 4 {
            return Err(errors::raise(py, &Error::Rank { tensor: name, given: self.rank }));
        }
        let four = |values: &[i64; MAX_RANK]| -> PyResult<[usize; 4]> {
            let mut out = [0; 4];
            for (to, &from) in out.iter_mut().zip(values) {
                *to = usize::try_from(from).map_err(|_| {
                    let text = format!(
                        "{name} has stride {from}; strides must not be negative. Copy {name}, for example with numpy.ascontiguousarray"
                    );
                    errors::contract(py, &text)
                })?;
            }
            Ok(order.of(out))
        };
        let layout = Layout { shape: four(&self.sizes)?, strides: four(&self.strides)? };
        Ok((layout, span(&layout)))
    }

    /// The same array, whose bytes are the codes of 8-bit floats: not every library tells others of that type.
    pub fn with_float8(mut self) -> Self {
        if (self.dtype.code, self.dtype.bits) == (dlpack::UINT, 8) {
            self.dtype.code = dlpack::FLOAT8_E4M3FN;
        }
        self
    }

    /// The array as an input with one number per batch entry and kv head, (batch, heads), or per block of keys too, (batch,
    /// heads, blocks).
    pub fn descale(&self, py: Python<'_>, name: Name) -> PyResult<Tensor<'_>> {
        if ![2, 3].contains(&self.rank) {
            let text =
                format!("{name} has {} dimensions, it takes (batch, kv heads), or blocks behind", self.rank);
            return Err(errors::contract(py, &text));
        }
        let mut four = Self { rank: 4, _owner: None, ..*self };
        four.sizes[self.rank..].fill(1);
        four.strides[self.rank..].fill(1);
        let (layout, len) = four.layout(py, name, Order::HeadsFirst)?;
        self.readable(py, name, layout, len)
    }

    /// The array as starts, or as a table of pages: one or two dimensions of int32.
    pub fn indices(&self, py: Python<'_>, name: Name) -> PyResult<Tensor<'_>> {
        let integers = matches!(
            (self.dtype.code, self.dtype.bits, self.dtype.lanes),
            (dlpack::INT | dlpack::UINT, 32, 1)
        );
        if !integers || !(1..=2).contains(&self.rank) {
            let text = format!("{name} must be int32 of one dimension, or of two for pages");
            return Err(errors::contract(py, &text));
        }
        let mut four = Self { rank: 4, _owner: None, ..*self };
        let last = self.rank - 1;
        let rows = if self.rank == 2 { (self.sizes[0], self.strides[0]) } else { (1, 0) };
        (four.sizes[0], four.strides[0]) = rows;
        four.sizes[1..3].fill(1);
        four.strides[1..3].fill(0);
        (four.sizes[3], four.strides[3]) = (self.sizes[last], self.strides[last]);
        let (layout, len) = four.layout(py, name, Order::HeadsFirst)?;
        let place = self.place(py, name)?;
        // SAFETY: as for an input of floats.
        unsafe { Tensor::from_raw_parts(self.data, len, DType::I32, place, layout) }
            .map_err(|error| errors::raise(py, &errors::named(error, name)))
    }

    /// The array as an input of a call.
    pub fn tensor(&self, py: Python<'_>, name: Name, order: Order) -> PyResult<Tensor<'_>> {
        let (layout, len) = self.layout(py, name, order)?;
        self.readable(py, name, layout, len)
    }

    fn readable(&self, py: Python<'_>, name: Name, layout: Layout, len: usize) -> PyResult<Tensor<'_>> {
        let (dtype, place) = (self.element(py, name)?, self.place(py, name)?);
        // SAFETY: the array lives as long as the view, and its producer says that these sizes and strides stay
        // inside its memory.
        unsafe { Tensor::from_raw_parts(self.data, len, dtype, place, layout) }
            .map_err(|error| errors::raise(py, &errors::named(error, name)))
    }

    /// The array as an output of a call.
    pub fn tensor_mut(&self, py: Python<'_>, name: Name, order: Order) -> PyResult<TensorMut<'_>> {
        let (layout, len) = self.layout(py, name, order)?;
        self.writable(py, name, layout, len)
    }

    /// The array as a place for lse, (batch, heads, length).
    pub fn lse_mut(&self, py: Python<'_>) -> PyResult<TensorMut<'_>> {
        let (layout, len) = self.layout_of_lse(py, Name::Lse)?;
        self.writable(py, Name::Lse, layout, len)
    }

    /// The array as an input with one number per query, (batch, heads, length).
    pub fn lse(&self, py: Python<'_>, name: Name) -> PyResult<Tensor<'_>> {
        let (layout, len) = self.layout_of_lse(py, name)?;
        self.readable(py, name, layout, len)
    }

    fn layout_of_lse(&self, py: Python<'_>, name: Name) -> PyResult<(Layout, usize)> {
        if self.rank != 3 {
            let text = format!("{name} has {} dimensions, it takes 3: (batch, heads, length)", self.rank);
            return Err(errors::contract(py, &text));
        }
        let mut four = Self { rank: 4, _owner: None, ..*self };
        (four.sizes[3], four.strides[3]) = (1, 1);
        four.layout(py, name, Order::HeadsFirst)
    }

    fn writable(&self, py: Python<'_>, name: Name, layout: Layout, len: usize) -> PyResult<TensorMut<'_>> {
        if self.read_only {
            let text = format!("{name} is read-only. Give an array that can be written");
            return Err(errors::contract(py, &text));
        }
        let (dtype, place) = (self.element(py, name)?, self.place(py, name)?);
        // SAFETY: as for an input; the caller must not use the memory meanwhile, as with every
        // function that writes into an array.
        unsafe { TensorMut::from_raw_parts(self.data, len, dtype, place, layout) }
            .map_err(|error| errors::raise(py, &errors::named(error, name)))
    }

    /// The array as key lengths in the memory of a GPU, none of them above `most`.
    pub fn device_lengths(&self, py: Python<'_>, most: u32) -> PyResult<DeviceLengths<'_>> {
        let name = Name::KeyLengths;
        let fits = self.rank == 1
            && (self.strides[0] == 1 || self.sizes[0] <= 1)
            && matches!(
                (self.dtype.code, self.dtype.bits, self.dtype.lanes),
                (dlpack::INT | dlpack::UINT, 32, 1)
            );
        let Place::Cuda(ordinal) = self.place(py, name)? else {
            return Err(errors::contract(py, "key_lengths on the host are given as a list of integers"));
        };
        if !fits {
            let text = "key_lengths on a GPU must be contiguous, with one int32 per batch entry";
            return Err(errors::contract(py, text));
        }
        let len = self.sizes[0].max(0) as usize;
        // SAFETY: the array lives as long as the view; Python clamped the numbers to the length of the keys.
        unsafe { DeviceLengths::from_raw_parts(self.data.cast_const().cast(), len, most, ordinal) }
            .map_err(|error| errors::raise(py, &error))
    }

    /// The stream that work on this array belongs in; `None` on the host.
    pub fn stream(&self, py: Python<'_>) -> PyResult<Option<Stream>> {
        if self.on_host() {
            return Ok(None);
        }
        let raw = match self.source {
            Source::Exchange(api) => {
                let current = api.current_stream.expect("exchange_api checked that it is there");
                let mut stream: *mut c_void = std::ptr::null_mut();
                // SAFETY: the table is the library's own, and the out pointer is a live local.
                if unsafe { current(self.device.kind, self.device.id, &raw mut stream) } != 0 {
                    return Err(PyErr::fetch(py));
                }
                stream.expose_provenance()
            }
            Source::Torch => {
                let cuda = py.import(intern!(py, "torch.cuda"))?;
                let stream = cuda.call_method1(intern!(py, "current_stream"), (self.device.id,))?;
                stream.getattr(intern!(py, "cuda_stream"))?.extract()?
            }
            Source::Capsule => return Ok(Some(Stream { raw: 0, wait: true })),
        };
        Ok(Some(Stream { raw, wait: false }))
    }
}

/// How many elements there are from the first to the last, both included.
fn span(layout: &Layout) -> usize {
    if layout.shape.contains(&0) {
        return 0;
    }
    let steps = layout.shape.iter().zip(&layout.strides);
    steps.fold(1_usize, |sum, (&size, &stride)| sum.saturating_add((size - 1).saturating_mul(stride)))
}

/// As many values as there may be dimensions.
fn first(values: &[i64]) -> [i64; MAX_RANK] {
    std::array::from_fn(|dim| values.get(dim).copied().unwrap_or(0))
}

fn wrong_dtype(name: Name, given: &str) -> String {
    format!("{name} is {given}, possible are float16, bfloat16 and float32. Convert {name} to one of them")
}

/// The error of a producer that cannot share an array, as a violation of the contract.
fn unshared(py: Python<'_>, name: Name, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyBufferError>(py) {
        return error;
    }
    let text =
        format!("{name} does not share its memory: {}. Give an array of floats that does", error.value(py));
    let raised = errors::contract(py, &text);
    raised.set_cause(py, Some(error));
    raised
}

fn wrong_device(name: Name, given: &str) -> String {
    format!("{name} lies on {given}, possible are the CPU and CUDA devices. Copy {name} to one of them")
}

const MANAGED_VERSIONED: &CStr = c"dltensor_versioned";
const MANAGED: &CStr = c"dltensor";

/// The tensor in a capsule, and whether it must not be written.
fn managed(capsule: &Bound<'_, PyCapsule>) -> PyResult<(*const dlpack::Tensor, bool)> {
    if capsule.is_valid_checked(Some(MANAGED_VERSIONED)) {
        let managed = capsule.pointer_checked(Some(MANAGED_VERSIONED))?.cast::<dlpack::ManagedVersioned>();
        // SAFETY: a capsule of this name holds this struct up to `flags` whatever its version.
        let (version, flags) = unsafe { ((*managed.as_ptr()).version, (*managed.as_ptr()).flags) };
        if version.major != dlpack::MAJOR {
            let text = format!("DLPack {}.{} is not known, possible is 1", version.major, version.minor);
            return Err(errors::unsupported(capsule.py(), &text));
        }
        // SAFETY: as above, and the version is the one whose struct this is.
        Ok((unsafe { &raw const (*managed.as_ptr()).tensor }, flags & dlpack::READ_ONLY != 0))
    } else {
        let managed = capsule.pointer_checked(Some(MANAGED))?.cast::<dlpack::Managed>();
        // SAFETY: a capsule of this name holds this struct.
        Ok((unsafe { &raw const (*managed.as_ptr()).tensor }, false))
    }
}

/// What is known about a type. It is kept alive, so that no other type gets its address.
struct Known {
    class: Py<PyType>,
    api: Option<&'static dlpack::ExchangeApi>,
}

// SAFETY: the table is constant and its functions may be called from any thread that holds the interpreter.
unsafe impl Send for Known {}

static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

/// The most types that are remembered; later ones are asked every time.
const MAX_KNOWN: usize = 16;

/// The exchange table of an object's type, if it has one that can be used.
fn exchange_api(object: &Bound<'_, PyAny>) -> PyResult<Option<&'static dlpack::ExchangeApi>> {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let class = object.get_type_ptr().cast();
    if let Some(found) = known.iter().find(|known| known.class.as_ptr() == class) {
        return Ok(found.api);
    }
    // Asking runs Python, which may call this function again.
    drop(known);
    let class = object.get_type();
    let api = ask_exchange_api(&class)?;
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if known.len() < MAX_KNOWN {
        known.push(Known { class: class.unbind(), api });
    }
    Ok(api)
}

fn ask_exchange_api(class: &Bound<'_, PyType>) -> PyResult<Option<&'static dlpack::ExchangeApi>> {
    let py = class.py();
    let Some(attribute) = class.getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))? else {
        return Ok(None);
    };
    let Ok(capsule) = attribute.cast_into::<PyCapsule>() else { return Ok(None) };
    let pointer = capsule.pointer_checked(Some(c"dlpack_exchange_api"))?;
    let mut table: *const dlpack::ExchangeApi = pointer.as_ptr().cast();
    while !table.is_null() {
        // SAFETY: the capsule's name promises the header of this struct, and that it lives as long as the process.
        let version = unsafe { (*table).version };
        if version.major == dlpack::MAJOR {
            // SAFETY: as above, and the version is the one whose struct this is.
            let api = unsafe { &*table };
            return Ok((api.tensor_from_object.is_some() && api.current_stream.is_some()).then_some(api));
        }
        // SAFETY: the header is the same in every version.
        table = unsafe { (*table).previous };
    }
    Ok(None)
}

/// Whether the type's arrays are read without going through Python.
pub fn is_direct(class: &Bound<'_, PyType>) -> PyResult<bool> {
    Ok(ask_exchange_api(class)?.is_some())
}
