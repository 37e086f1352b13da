//! The table of driver functions, and how each is found.
//!
//! A driver exports several versions of one function under one base name (`cuMemAlloc` of CUDA 2.0 takes
//! 32-bit sizes, that of 3.2 takes `size_t`). `cuGetProcAddress(name, version)` returns the newest signature
//! that is not newer than `version`, so each row names the version whose signature it declares, and the
//! driver can never return another one. Drivers before 11.3 have no `cuGetProcAddress`: there the exported
//! name of the same row is looked up in the library itself.

use crate::driver::CudaVersion;
use crate::error::DriverError;
use crate::sys::*;
use libloading::Library;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};

/// A function that only newer drivers have.
pub(crate) struct Optional<F> {
    function: Option<F>,
    name: &'static str,
    since: CudaVersion,
}

impl<F: Copy> Optional<F> {
    /// The function, or an error that names the CUDA version which brought it.
    pub(crate) fn get(&self, driver: CudaVersion) -> Result<F, DriverError> {
        self.function.ok_or_else(|| DriverError::DriverTooOld {
            what: self.name.to_owned(),
            needs: self.since,
            has: driver,
        })
    }

    /// The function, where its absence is no error.
    pub(crate) fn available(&self) -> Option<F> {
        self.function
    }
}

/// Where a function is looked for.
pub(crate) enum Resolver {
    /// `cuGetProcAddress_v2`, CUDA 12.0 and later.
    ProcAddressV2(
        unsafe extern "system" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_uint) -> CUresult,
    ),
    /// `cuGetProcAddress` of CUDA 11.3 to 11.8, which reports no status.
    ProcAddress(unsafe extern "system" fn(*const c_char, *mut *mut c_void, c_int, u64) -> CUresult),
    /// The library's own symbol table.
    Exports,
}

impl Resolver {
    pub(crate) fn new(library: &Library) -> Self {
        // SAFETY: the two names are exported with exactly these signatures since CUDA 12.0 and 11.3.
        unsafe {
            if let Ok(symbol) = library.get(b"cuGetProcAddress_v2\0") {
                return Resolver::ProcAddressV2(*symbol);
            }
            if let Ok(symbol) = library.get(b"cuGetProcAddress\0") {
                return Resolver::ProcAddress(*symbol);
            }
        }
        Resolver::Exports
    }

    /// How functions are found, in a few words: for reports.
    pub(crate) fn describe(&self) -> &'static str {
        match self {
            Resolver::ProcAddressV2(_) => "cuGetProcAddress_v2",
            Resolver::ProcAddress(_) => "cuGetProcAddress",
            Resolver::Exports => "exported symbols",
        }
    }

    /// The address of `base` with the signature that CUDA `version` had, or null.
    fn address(&self, library: &Library, base: &str, version: c_int, export: &str) -> *mut c_void {
        let Ok(name) = CString::new(base) else { return std::ptr::null_mut() };
        let mut address: *mut c_void = std::ptr::null_mut();
        let flags = CU_GET_PROC_ADDRESS_LEGACY_STREAM;
        let status = match self {
            // SAFETY: the name is NUL-terminated, the two out pointers are live locals.
            Resolver::ProcAddressV2(get) => unsafe {
                let mut found = 0;
                get(name.as_ptr(), &raw mut address, version, flags, &raw mut found)
            },
            // SAFETY: as above.
            Resolver::ProcAddress(get) => unsafe { get(name.as_ptr(), &raw mut address, version, flags) },
            Resolver::Exports => {
                // SAFETY: only the address is taken; its type is given by the table's row.
                match unsafe { library.get::<*mut c_void>(export.as_bytes()) } {
                    Ok(symbol) => {
                        address = *symbol;
                        0
                    }
                    Err(_) => 1,
                }
            }
        };
        if status == 0 { address } else { std::ptr::null_mut() }
    }
}

/// Declares the table: `field = "base name" version "exported name" (signature)`.
macro_rules! symbols {
    (
        required { $($req:ident = $req_base:literal $req_version:literal $req_export:literal ($($req_arg:ty),* $(,)?);)+ }
        optional { $($opt:ident = $opt_base:literal $opt_version:literal $opt_export:literal ($($opt_arg:ty),* $(,)?);)+ }
    ) => {
        /// The driver's functions, by their C names.
        #[allow(non_snake_case)]
        pub(crate) struct Api {
            $(pub(crate) $req: unsafe extern "system" fn($($req_arg),*) -> CUresult,)+
            $(pub(crate) $opt: Optional<unsafe extern "system" fn($($opt_arg),*) -> CUresult>,)+
        }

        impl Api {
            /// Takes every function of the table; a missing required one is an error.
            pub(crate) fn resolve(library: &Library, resolver: &Resolver) -> Result<Self, DriverError> {
                Ok(Self {
                    $($req: {
                        let address = resolver.address(library, $req_base, $req_version, $req_export);
                        if address.is_null() {
                            return Err(DriverError::MissingSymbol {
                                symbol: $req_export.to_owned(),
                                since: CudaVersion($req_version),
                            });
                        }
                        // SAFETY: the driver returned this address for this name and version, whose
                        // signature the row states.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "system" fn($($req_arg),*) -> CUresult,
                            >(address)
                        }
                    },)+
                    $($opt: {
                        let address = resolver.address(library, $opt_base, $opt_version, $opt_export);
                        // SAFETY: as above; a null address becomes None, which `Option<fn>` defines.
                        let function = unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                Option<unsafe extern "system" fn($($opt_arg),*) -> CUresult>,
                            >(address)
                        };
                        Optional { function, name: $opt_base, since: CudaVersion($opt_version) }
                    },)+
                })
            }
        }
    };
}

symbols! {
    required {
        cuInit = "cuInit" 2000 "cuInit" (c_uint);
        cuDriverGetVersion = "cuDriverGetVersion" 2020 "cuDriverGetVersion" (*mut c_int);
        cuGetErrorName = "cuGetErrorName" 6000 "cuGetErrorName" (CUresult, *mut *const c_char);
        cuGetErrorString = "cuGetErrorString" 6000 "cuGetErrorString" (CUresult, *mut *const c_char);

        cuDeviceGetCount = "cuDeviceGetCount" 2000 "cuDeviceGetCount" (*mut c_int);
        cuDeviceGet = "cuDeviceGet" 2000 "cuDeviceGet" (*mut CUdevice, c_int);
        cuDeviceGetName = "cuDeviceGetName" 2000 "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
        cuDeviceGetUuid = "cuDeviceGetUuid" 9020 "cuDeviceGetUuid" (*mut CUuuid, CUdevice);
        cuDeviceTotalMem = "cuDeviceTotalMem" 3020 "cuDeviceTotalMem_v2" (*mut usize, CUdevice);
        cuDeviceGetAttribute = "cuDeviceGetAttribute" 2000 "cuDeviceGetAttribute" (*mut c_int, c_int, CUdevice);

        cuDevicePrimaryCtxRetain = "cuDevicePrimaryCtxRetain" 7000 "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease = "cuDevicePrimaryCtxRelease" 11000 "cuDevicePrimaryCtxRelease_v2" (CUdevice);
        cuCtxPushCurrent = "cuCtxPushCurrent" 4000 "cuCtxPushCurrent_v2" (CUcontext);
        cuCtxPopCurrent = "cuCtxPopCurrent" 4000 "cuCtxPopCurrent_v2" (*mut CUcontext);
        cuCtxGetCurrent = "cuCtxGetCurrent" 4000 "cuCtxGetCurrent" (*mut CUcontext);
        cuCtxGetDevice = "cuCtxGetDevice" 2000 "cuCtxGetDevice" (*mut CUdevice);
        cuCtxSynchronize = "cuCtxSynchronize" 2000 "cuCtxSynchronize" ();
        cuCtxGetStreamPriorityRange = "cuCtxGetStreamPriorityRange" 5050 "cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);

        cuStreamCreateWithPriority = "cuStreamCreateWithPriority" 5050 "cuStreamCreateWithPriority" (*mut CUstream, c_uint, c_int);
        cuStreamDestroy = "cuStreamDestroy" 4000 "cuStreamDestroy_v2" (CUstream);
        cuStreamSynchronize = "cuStreamSynchronize" 2000 "cuStreamSynchronize" (CUstream);
        cuStreamQuery = "cuStreamQuery" 2000 "cuStreamQuery" (CUstream);
        cuStreamWaitEvent = "cuStreamWaitEvent" 3020 "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
        cuStreamGetCtx = "cuStreamGetCtx" 9020 "cuStreamGetCtx" (CUstream, *mut CUcontext);
        cuStreamGetPriority = "cuStreamGetPriority" 5050 "cuStreamGetPriority" (CUstream, *mut c_int);
        cuStreamBeginCapture = "cuStreamBeginCapture" 10010 "cuStreamBeginCapture_v2" (CUstream, c_uint);
        cuStreamEndCapture = "cuStreamEndCapture" 10000 "cuStreamEndCapture" (CUstream, *mut CUgraph);
        cuStreamIsCapturing = "cuStreamIsCapturing" 10000 "cuStreamIsCapturing" (CUstream, *mut c_uint);
        cuThreadExchangeStreamCaptureMode = "cuThreadExchangeStreamCaptureMode" 10010 "cuThreadExchangeStreamCaptureMode" (*mut c_uint);

        cuEventCreate = "cuEventCreate" 2000 "cuEventCreate" (*mut CUevent, c_uint);
        cuEventDestroy = "cuEventDestroy" 4000 "cuEventDestroy_v2" (CUevent);
        cuEventRecord = "cuEventRecord" 2000 "cuEventRecord" (CUevent, CUstream);
        cuEventQuery = "cuEventQuery" 2000 "cuEventQuery" (CUevent);
        cuEventSynchronize = "cuEventSynchronize" 2000 "cuEventSynchronize" (CUevent);
        cuEventElapsedTime = "cuEventElapsedTime" 2000 "cuEventElapsedTime" (*mut f32, CUevent, CUevent);

        cuMemAlloc = "cuMemAlloc" 3020 "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
        cuMemFree = "cuMemFree" 3020 "cuMemFree_v2" (CUdeviceptr);
        cuMemGetInfo = "cuMemGetInfo" 3020 "cuMemGetInfo_v2" (*mut usize, *mut usize);
        cuMemHostAlloc = "cuMemHostAlloc" 2020 "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        cuMemFreeHost = "cuMemFreeHost" 2000 "cuMemFreeHost" (*mut c_void);
        cuMemcpyHtoDAsync = "cuMemcpyHtoDAsync" 3020 "cuMemcpyHtoDAsync_v2" (CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpyDtoHAsync = "cuMemcpyDtoHAsync" 3020 "cuMemcpyDtoHAsync_v2" (*mut c_void, CUdeviceptr, usize, CUstream);
        cuMemcpyDtoDAsync = "cuMemcpyDtoDAsync" 3020 "cuMemcpyDtoDAsync_v2" (CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuMemsetD8Async = "cuMemsetD8Async" 3020 "cuMemsetD8Async" (CUdeviceptr, u8, usize, CUstream);
        cuMemsetD32Async = "cuMemsetD32Async" 3020 "cuMemsetD32Async" (CUdeviceptr, c_uint, usize, CUstream);
        cuPointerGetAttributes = "cuPointerGetAttributes" 7000 "cuPointerGetAttributes" (c_uint, *mut c_uint, *mut *mut c_void, CUdeviceptr);

        cuModuleLoadDataEx = "cuModuleLoadDataEx" 2010 "cuModuleLoadDataEx" (*mut CUmodule, *const c_void, c_uint, *mut c_uint, *mut *mut c_void);
        cuModuleUnload = "cuModuleUnload" 2000 "cuModuleUnload" (CUmodule);
        cuModuleGetFunction = "cuModuleGetFunction" 2000 "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
        cuLinkCreate = "cuLinkCreate" 6050 "cuLinkCreate_v2" (c_uint, *mut c_uint, *mut *mut c_void, *mut CUlinkState);
        cuLinkAddData = "cuLinkAddData" 6050 "cuLinkAddData_v2" (CUlinkState, c_uint, *mut c_void, usize, *const c_char, c_uint, *mut c_uint, *mut *mut c_void);
        cuLinkComplete = "cuLinkComplete" 5050 "cuLinkComplete" (CUlinkState, *mut *mut c_void, *mut usize);
        cuLinkDestroy = "cuLinkDestroy" 5050 "cuLinkDestroy" (CUlinkState);

        cuFuncGetAttribute = "cuFuncGetAttribute" 2020 "cuFuncGetAttribute" (*mut c_int, c_int, CUfunction);
        cuFuncSetAttribute = "cuFuncSetAttribute" 9000 "cuFuncSetAttribute" (CUfunction, c_int, c_int);
        cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags" 7000 "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags" (*mut c_int, CUfunction, c_int, usize, c_uint);
        cuLaunchKernel = "cuLaunchKernel" 4000 "cuLaunchKernel" (CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void);

        cuGraphGetNodes = "cuGraphGetNodes" 10000 "cuGraphGetNodes" (CUgraph, *mut CUgraphNode, *mut usize);
        cuGraphLaunch = "cuGraphLaunch" 10000 "cuGraphLaunch" (CUgraphExec, CUstream);
        cuGraphExecDestroy = "cuGraphExecDestroy" 10000 "cuGraphExecDestroy" (CUgraphExec);
        cuGraphDestroy = "cuGraphDestroy" 10000 "cuGraphDestroy" (CUgraph);
    }
    optional {
        cuDeviceGetUuid_v2 = "cuDeviceGetUuid" 11040 "cuDeviceGetUuid_v2" (*mut CUuuid, CUdevice);
        cuMemAllocAsync = "cuMemAllocAsync" 11020 "cuMemAllocAsync" (*mut CUdeviceptr, usize, CUstream);
        cuMemFreeAsync = "cuMemFreeAsync" 11020 "cuMemFreeAsync" (CUdeviceptr, CUstream);
        cuGraphInstantiateWithFlags = "cuGraphInstantiateWithFlags" 11040 "cuGraphInstantiateWithFlags" (*mut CUgraphExec, CUgraph, u64);
        cuGraphUpload = "cuGraphUpload" 11010 "cuGraphUpload" (CUgraphExec, CUstream);
        cuLaunchKernelEx = "cuLaunchKernelEx" 11060 "cuLaunchKernelEx" (*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
        cuOccupancyMaxActiveClusters = "cuOccupancyMaxActiveClusters" 11070 "cuOccupancyMaxActiveClusters" (*mut c_int, CUfunction, *const CUlaunchConfig);
        cuOccupancyMaxPotentialClusterSize = "cuOccupancyMaxPotentialClusterSize" 11070 "cuOccupancyMaxPotentialClusterSize" (*mut c_int, CUfunction, *const CUlaunchConfig);
        cuFuncGetParamInfo = "cuFuncGetParamInfo" 12040 "cuFuncGetParamInfo" (CUfunction, usize, *mut usize, *mut usize);
        cuTensorMapEncodeTiled = "cuTensorMapEncodeTiled" 12000 "cuTensorMapEncodeTiled" (*mut crate::tensor_map::TensorMap, c_uint, c_uint, *mut c_void, *const u64, *const u64, *const c_uint, *const c_uint, c_uint, c_uint, c_uint, c_uint);
    }
}

/// Calls a required driver function and turns its status into a `Result`. Expands to an unsafe call, which
/// belongs inside the caller's `unsafe` block, next to the reason why that call is sound.
macro_rules! call {
    ($driver:expr, $function:ident ( $($argument:expr),* $(,)? )) => {
        $driver.check(stringify!($function), ($driver.api().$function)($($argument),*))
    };
}

/// The same for a function that older drivers do not have.
macro_rules! call_optional {
    ($driver:expr, $function:ident ( $($argument:expr),* $(,)? )) => {
        match $driver.api().$function.get($driver.version()) {
            Ok(function) => $driver.check(stringify!($function), function($($argument),*)),
            Err(too_old) => Err(too_old),
        }
    };
}

pub(crate) use {call, call_optional};
