//! The driver's C types, constants and structures, as far as this crate uses them.
//!
//! Names are NVIDIA's, so that a reader can compare this file with the driver API's reference; values and
//! layouts are those of the public header of CUDA 11.0 to 13.0 (none of the ones below changed in between).

use std::ffi::{c_char, c_int, c_uint, c_void};

/// Declares an opaque C structure and the handle type that points to it.
macro_rules! handles {
    ($($handle:ident -> $opaque:ident),+ $(,)?) => {$(
        #[allow(non_camel_case_types)]
        #[repr(C)]
        pub struct $opaque { _opaque: [u8; 0] }
        pub type $handle = *mut $opaque;
    )+};
}

handles! {
    CUcontext -> CUctx_st,
    CUstream -> CUstream_st,
    CUevent -> CUevent_st,
    CUmodule -> CUmod_st,
    CUfunction -> CUfunc_st,
    CUlinkState -> CUlinkState_st,
    CUgraph -> CUgraph_st,
    CUgraphExec -> CUgraphExec_st,
    CUgraphNode -> CUgraphNode_st,
}

pub type CUresult = c_uint;
pub type CUdevice = c_int;
pub type CUdeviceptr = u64;

/// The sixteen bytes of a device's identity.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUuuid {
    pub bytes: [u8; 16],
}

/// The value of a launch attribute: a 64-byte union in C. The members used here all start at its beginning.
#[repr(C)]
#[derive(Clone, Copy)]
pub union CUlaunchAttributeValue {
    pub pad: [u64; 8],
    pub cluster_dim: [c_uint; 3],
    pub programmatic_stream_serialization_allowed: c_int,
    pub priority: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUlaunchAttribute {
    pub id: c_uint,
    pub pad: [c_char; 4],
    pub value: CUlaunchAttributeValue,
}

#[repr(C)]
pub struct CUlaunchConfig {
    pub grid_dim_x: c_uint,
    pub grid_dim_y: c_uint,
    pub grid_dim_z: c_uint,
    pub block_dim_x: c_uint,
    pub block_dim_y: c_uint,
    pub block_dim_z: c_uint,
    pub shared_mem_bytes: c_uint,
    pub stream: CUstream,
    pub attrs: *mut CUlaunchAttribute,
    pub num_attrs: c_uint,
}

// cuGetProcAddress
pub const CU_GET_PROC_ADDRESS_LEGACY_STREAM: u64 = 1;

// cuDeviceGetAttribute
pub const CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: c_int = 1;
pub const CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: c_int = 8;
pub const CU_DEVICE_ATTRIBUTE_CLOCK_RATE: c_int = 13;
pub const CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: c_int = 16;
pub const CU_DEVICE_ATTRIBUTE_ECC_ENABLED: c_int = 32;
pub const CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: c_int = 33;
pub const CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: c_int = 34;
pub const CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: c_int = 36;
pub const CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: c_int = 37;
pub const CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: c_int = 38;
pub const CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: c_int = 39;
pub const CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: c_int = 50;
pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: c_int = 75;
pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: c_int = 76;
pub const CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: c_int = 81;
pub const CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: c_int = 82;
pub const CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
pub const CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: c_int = 106;
pub const CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: c_int = 111;
pub const CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: c_int = 115;
pub const CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: c_int = 120;
pub const CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: c_int = 127;

// cuStreamCreateWithPriority, cuStreamWaitEvent, cuEventCreate
pub const CU_STREAM_DEFAULT: c_uint = 0;
pub const CU_STREAM_NON_BLOCKING: c_uint = 1;
pub const CU_EVENT_WAIT_DEFAULT: c_uint = 0;
pub const CU_EVENT_DEFAULT: c_uint = 0;
pub const CU_EVENT_DISABLE_TIMING: c_uint = 2;

// cuStreamBeginCapture, cuStreamIsCapturing
pub const CU_STREAM_CAPTURE_MODE_GLOBAL: c_uint = 0;
pub const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: c_uint = 1;
pub const CU_STREAM_CAPTURE_MODE_RELAXED: c_uint = 2;
pub const CU_STREAM_CAPTURE_STATUS_NONE: c_uint = 0;
pub const CU_STREAM_CAPTURE_STATUS_ACTIVE: c_uint = 1;

// cuMemHostAlloc
pub const CU_MEMHOSTALLOC_PORTABLE: c_uint = 1;

// cuPointerGetAttributes
pub const CU_POINTER_ATTRIBUTE_CONTEXT: c_uint = 1;
pub const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: c_uint = 2;
pub const CU_POINTER_ATTRIBUTE_IS_MANAGED: c_uint = 8;
pub const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_uint = 9;
pub const CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: c_uint = 11;
pub const CU_POINTER_ATTRIBUTE_RANGE_SIZE: c_uint = 12;
pub const CU_MEMORYTYPE_HOST: c_uint = 1;
pub const CU_MEMORYTYPE_DEVICE: c_uint = 2;

// cuModuleLoadDataEx, cuLinkCreate, cuLinkAddData
pub const CU_JIT_MAX_REGISTERS: c_uint = 0;
pub const CU_JIT_WALL_TIME: c_uint = 2;
pub const CU_JIT_INFO_LOG_BUFFER: c_uint = 3;
pub const CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: c_uint = 4;
pub const CU_JIT_ERROR_LOG_BUFFER: c_uint = 5;
pub const CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_uint = 6;
pub const CU_JIT_OPTIMIZATION_LEVEL: c_uint = 7;
pub const CU_JIT_LOG_VERBOSE: c_uint = 12;
pub const CU_JIT_GENERATE_LINE_INFO: c_uint = 13;
pub const CU_JIT_INPUT_PTX: c_uint = 1;

// cuFuncGetAttribute, cuFuncSetAttribute
pub const CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: c_int = 0;
pub const CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: c_int = 1;
pub const CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: c_int = 2;
pub const CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: c_int = 3;
pub const CU_FUNC_ATTRIBUTE_NUM_REGS: c_int = 4;
pub const CU_FUNC_ATTRIBUTE_PTX_VERSION: c_int = 5;
pub const CU_FUNC_ATTRIBUTE_BINARY_VERSION: c_int = 6;
pub const CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
pub const CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: c_int = 9;
pub const CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: c_int = 14;

// cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
pub const CU_OCCUPANCY_DEFAULT: c_uint = 0;
pub const CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE: c_uint = 1;

// cuLaunchKernel, cuLaunchKernelEx
pub const CU_LAUNCH_PARAM_END: *mut c_void = std::ptr::null_mut();
pub const CU_LAUNCH_PARAM_BUFFER_POINTER: *mut c_void = std::ptr::without_provenance_mut(1);
pub const CU_LAUNCH_PARAM_BUFFER_SIZE: *mut c_void = std::ptr::without_provenance_mut(2);
pub const CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: c_uint = 4;
pub const CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;
pub const CU_LAUNCH_ATTRIBUTE_PRIORITY: c_uint = 8;

// cuTensorMapEncodeTiled
pub const CU_TENSOR_MAP_INTERLEAVE_NONE: c_uint = 0;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, offset_of, size_of};

    #[test]
    fn structures_have_the_sizes_and_offsets_of_the_c_header() {
        assert_eq!(size_of::<CUuuid>(), 16);
        assert_eq!(size_of::<CUlaunchAttributeValue>(), 64);
        assert_eq!((size_of::<CUlaunchAttribute>(), align_of::<CUlaunchAttribute>()), (72, 8));
        assert_eq!(offset_of!(CUlaunchAttribute, value), 8);
        assert_eq!((size_of::<CUlaunchConfig>(), align_of::<CUlaunchConfig>()), (56, 8));
        assert_eq!(offset_of!(CUlaunchConfig, shared_mem_bytes), 24);
        assert_eq!(offset_of!(CUlaunchConfig, stream), 32);
        assert_eq!(offset_of!(CUlaunchConfig, attrs), 40);
        assert_eq!(offset_of!(CUlaunchConfig, num_attrs), 48);
    }
}
