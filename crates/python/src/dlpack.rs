//! DLPack 1.x: the C structs in which array libraries describe memory to each other.
//!
//! Only what is read here: a tensor, the two managed forms that a capsule holds, and the table of functions that
//! a library puts on its array type (`__dlpack_c_exchange_api__`) so that C code need not go through Python.

use std::ffi::c_void;

/// The host.
pub const CPU: i32 = 1;
/// The memory of a CUDA device.
pub const CUDA: i32 = 2;
/// Page-locked host memory.
pub const CUDA_HOST: i32 = 3;
/// Managed memory, reachable from both sides.
pub const CUDA_MANAGED: i32 = 13;

/// Signed integers.
pub const INT: u8 = 0;
/// Unsigned integers.
pub const UINT: u8 = 1;
/// IEEE floats.
pub const FLOAT: u8 = 2;
/// bfloat16.
pub const BFLOAT: u8 = 4;
/// 8-bit floats with 4 bits of exponent, without infinities.
pub const FLOAT8_E4M3FN: u8 = 10;
/// Booleans of one byte.
pub const BOOL: u8 = 6;

/// The major version whose structs these are.
pub const MAJOR: u32 = 1;
/// The bit of a managed tensor's flags that forbids writing.
pub const READ_ONLY: u64 = 1;

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Device {
    /// One of the constants above.
    pub kind: i32,
    /// The number among devices of that kind.
    pub id: i32,
}

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DataType {
    /// One of the constants above.
    pub code: u8,
    /// Bits of one lane.
    pub bits: u8,
    /// 1, except for vector types.
    pub lanes: u16,
}

/// A view of memory; its maker owns shape and strides (in elements).
#[derive(Debug)]
#[repr(C)]
pub struct Tensor {
    /// The start of the allocation.
    pub data: *mut c_void,
    /// Where it is.
    pub device: Device,
    /// Dimensions.
    pub ndim: i32,
    /// The element type.
    pub dtype: DataType,
    /// Sizes.
    pub shape: *mut i64,
    /// Strides in elements; null is contiguous before version 1.2.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// What a capsule named `dltensor` holds.
#[repr(C)]
pub struct Managed {
    /// The view.
    pub tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// A version.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Version {
    /// Another major version has other structs.
    pub major: u32,
    /// Another minor version has more constants.
    pub minor: u32,
}

/// What a capsule named `dltensor_versioned` holds.
#[repr(C)]
pub struct ManagedVersioned {
    /// The version of the structs.
    pub version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    /// [`READ_ONLY`] and others.
    pub flags: u64,
    /// The view.
    pub tensor: Tensor,
}

/// The functions of an array library, as `__dlpack_c_exchange_api__` on its array type points to.
#[repr(C)]
pub struct ExchangeApi {
    /// The version of this struct.
    pub version: Version,
    /// The table of an older major version, or null.
    pub previous: *const ExchangeApi,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    /// Describes an array without owning it: valid while the object lives and is not changed.
    pub tensor_from_object: Option<unsafe extern "C" fn(object: *mut c_void, out: *mut Tensor) -> i32>,
    /// The stream that the library queues work in now.
    pub current_stream: Option<unsafe extern "C" fn(kind: i32, id: i32, out: *mut *mut c_void) -> i32>,
}
