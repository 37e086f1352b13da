//! The loaded driver library: its version and its devices.

use crate::api::{Api, Resolver, call};
use crate::device::Device;
use crate::error::{DriverError, Status};
use crate::sys::CUresult;
use libloading::Library;
use std::ffi::{CStr, OsStr, c_char};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A CUDA version as the driver counts it: 12.4 is 12040.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CudaVersion(pub i32);

impl CudaVersion {
    /// The oldest driver that this crate works with: the first that knows sm_80.
    pub const MINIMUM: CudaVersion = CudaVersion(11000);

    /// The number before the dot.
    pub fn major(self) -> i32 {
        self.0 / 1000
    }

    /// The number after the dot.
    pub fn minor(self) -> i32 {
        self.0 % 1000 / 10
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major(), self.minor())
    }
}

/// Where the driver library is looked for, in this order. The loader's own search comes first; the two
/// directories are where WSL and NixOS keep it without telling the loader.
#[cfg(target_os = "linux")]
const LIBRARY_NAMES: &[&str] =
    &["libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1", "/run/opengl-driver/lib/libcuda.so.1"];
#[cfg(windows)]
const LIBRARY_NAMES: &[&str] = &["nvcuda.dll"];
#[cfg(not(any(target_os = "linux", windows)))]
const LIBRARY_NAMES: &[&str] = &[];

/// The CUDA driver library, loaded and initialised once for the process.
pub struct Driver {
    api: Api,
    version: CudaVersion,
    resolver: &'static str,
    path: PathBuf,
    // Never unloaded: the driver keeps threads and exit handlers of its own. Declared last, dropped last.
    _library: Library,
}

impl Driver {
    /// Loads and initialises the system's CUDA driver; later calls return the same driver, or the same
    /// error.
    pub fn load() -> Result<&'static Driver, DriverError> {
        static DRIVER: OnceLock<Result<Driver, DriverError>> = OnceLock::new();
        DRIVER.get_or_init(load_system).as_ref().map_err(Clone::clone)
    }

    /// Loads the driver from one given library instead of searching for it. It stays loaded for the rest of
    /// the process.
    ///
    /// # Safety
    ///
    /// The file must be a CUDA driver library: its initialisers run, and its functions are called with the
    /// signatures of the CUDA driver API.
    pub unsafe fn load_from(path: impl AsRef<Path>) -> Result<&'static Driver, DriverError> {
        let path = path.as_ref();
        // SAFETY: the caller vouches for the library.
        let library = unsafe { Library::new(path.as_os_str()) }
            .map_err(|error| not_found(vec![(path.display().to_string(), reason(&error))]))?;
        let driver = start(library, path.as_os_str())?;
        Ok(Box::leak(Box::new(driver)))
    }

    /// The CUDA version that this driver implements.
    pub fn version(&self) -> CudaVersion {
        self.version
    }

    /// The library's name as it was passed to the loader.
    pub fn library(&self) -> &Path {
        &self.path
    }

    /// How the functions were found: `cuGetProcAddress_v2` on any driver of the last years.
    pub fn symbol_source(&self) -> &'static str {
        self.resolver
    }

    /// The number of GPUs that the process may see (`CUDA_VISIBLE_DEVICES` limits them).
    pub fn device_count(&self) -> Result<usize, DriverError> {
        let mut count = 0;
        // SAFETY: the driver is initialised and the out pointer is a live local.
        unsafe { call!(self, cuDeviceGetCount(&raw mut count)) }?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The GPU with this ordinal.
    pub fn device(&'static self, ordinal: usize) -> Result<Device, DriverError> {
        Device::new(self, ordinal)
    }

    pub(crate) fn api(&self) -> &Api {
        &self.api
    }

    /// Turns a driver status into a `Result` that names the call.
    #[inline]
    pub(crate) fn check(&self, call: &'static str, status: CUresult) -> Result<(), DriverError> {
        if status == 0 { Ok(()) } else { Err(self.failure(call, Status(status))) }
    }

    #[cold]
    fn failure(&self, call: &'static str, status: Status) -> DriverError {
        let (name, text) = describe(&self.api, status);
        DriverError::Call { call, status, name, text }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("library", &self.path)
            .field("version", &self.version)
            .field("symbols", &self.resolver)
            .finish_non_exhaustive()
    }
}

fn not_found(tried: Vec<(String, String)>) -> DriverError {
    DriverError::LibraryNotFound { tried }
}

/// The loader's own message, which libloading keeps as the source of its error.
fn reason(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

fn load_system() -> Result<Driver, DriverError> {
    let mut tried = Vec::new();
    for name in LIBRARY_NAMES {
        // SAFETY: these names belong to NVIDIA's driver, whose initialisers are meant to run on load.
        match unsafe { Library::new(*name) } {
            Ok(library) => return start(library, OsStr::new(name)),
            Err(error) => tried.push(((*name).to_owned(), reason(&error))),
        }
    }
    Err(not_found(tried))
}

fn start(library: Library, path: &OsStr) -> Result<Driver, DriverError> {
    let resolver = Resolver::new(&library);
    let api = Api::resolve(&library, &resolver)?;
    let mut version = 0;
    // SAFETY: may be called before cuInit; the out pointer is a live local.
    let status = Status(unsafe { (api.cuDriverGetVersion)(&raw mut version) });
    let version = CudaVersion(if status.is_success() { version } else { 0 });
    if status.is_success() && version < CudaVersion::MINIMUM {
        let what = "FlashCore".to_owned();
        return Err(DriverError::DriverTooOld { what, needs: CudaVersion::MINIMUM, has: version });
    }
    // SAFETY: 0 is the only flag there is.
    let status = Status(unsafe { (api.cuInit)(0) });
    match status {
        Status::SUCCESS => {}
        Status::NO_DEVICE => return Err(DriverError::NoDevice),
        _ => {
            let (name, text) = describe(&api, status);
            return Err(DriverError::Call { call: "cuInit", status, name, text });
        }
    }
    Ok(Driver { api, version, resolver: resolver.describe(), path: PathBuf::from(path), _library: library })
}

/// The driver's own name and sentence for a status.
fn describe(api: &Api, status: Status) -> (String, String) {
    let read = |get: unsafe extern "system" fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the out pointer is a live local; on success it points to a static C string.
        unsafe {
            if get(status.0, &raw mut text) == 0 && !text.is_null() {
                Some(CStr::from_ptr(text).to_string_lossy().into_owned())
            } else {
                None
            }
        }
    };
    let name = read(api.cuGetErrorName).unwrap_or_else(|| format!("CUresult {}", status.0));
    let text = read(api.cuGetErrorString).unwrap_or_else(|| "a status this driver does not describe".into());
    (name, text)
}
