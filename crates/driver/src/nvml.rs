//! What the GPU is doing: clocks, power, energy, temperature and what holds the clocks back, through NVML.
//!
//! NVML comes with the driver (`libnvidia-ml.so.1`) and needs no CUDA context, so a process that only monitors stays
//! out of the way of those that compute. All of it is optional: what NVML does not report is absent.

use libloading::Library;
use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};

#[cfg(target_os = "linux")]
const LIBRARY_NAMES: &[&str] = &["libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1"];
#[cfg(windows)]
const LIBRARY_NAMES: &[&str] = &["nvml.dll"];
#[cfg(not(any(target_os = "linux", windows)))]
const LIBRARY_NAMES: &[&str] = &[];

const NVML_CLOCK_SM: c_uint = 1;
const NVML_CLOCK_MEM: c_uint = 2;
const NVML_TEMPERATURE_GPU: c_uint = 0;

type Handle = *mut c_void;

/// NVML, loaded.
pub struct Nvml {
    library: Library,
}

/// A GPU as NVML knows it.
pub struct NvmlDevice<'n> {
    nvml: &'n Nvml,
    handle: Handle,
}

/// What the GPU is doing at one moment. What NVML does not report is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GpuState {
    /// The SM clock in MHz.
    pub sm_clock_mhz: Option<u32>,
    /// The memory clock in MHz.
    pub memory_clock_mhz: Option<u32>,
    /// Power in milliwatts.
    pub power_mw: Option<u32>,
    /// The power limit in milliwatts.
    pub power_limit_mw: Option<u32>,
    /// The temperature in degrees Celsius.
    pub temperature_c: Option<u32>,
    /// What holds the clocks back, as NVML's bits.
    pub throttle: Option<u64>,
}

impl GpuState {
    /// The names of the reasons that hold the clocks back at this moment; idling does not count.
    pub fn throttle_reasons(&self) -> Vec<&'static str> {
        const REASONS: [(u64, &str); 8] = [
            (0x2, "applications clocks"),
            (0x4, "power cap"),
            (0x8, "hardware slowdown"),
            (0x10, "sync boost"),
            (0x20, "software thermal slowdown"),
            (0x40, "hardware thermal slowdown"),
            (0x80, "power brake"),
            (0x100, "display clocks"),
        ];
        let bits = self.throttle.unwrap_or(0);
        REASONS.into_iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| name).collect()
    }

    /// Whether heat or a fault of the power supply slows the GPU down. (The power cap does so in any long run at full
    /// load, and is part of what the GPU can do.)
    pub fn is_unwell(&self) -> bool {
        self.throttle.unwrap_or(0) & (0x8 | 0x20 | 0x40 | 0x80) != 0
    }
}

impl Nvml {
    /// Loads and initialises NVML; `None` where there is none.
    pub fn load() -> Option<Self> {
        // SAFETY: these names belong to NVIDIA's library, whose initialisers are meant to run on load.
        let library = LIBRARY_NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok())?;
        let nvml = Self { library };
        let init = nvml.function::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2\0")?;
        // SAFETY: takes nothing, and may be called more than once.
        (unsafe { init() } == 0).then_some(nvml)
    }

    /// The GPU with this identity, as [`crate::DeviceProperties::uuid`] gives it.
    pub fn device(&self, uuid: &str) -> Option<NvmlDevice<'_>> {
        type Find = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
        let find = self.function::<Find>(b"nvmlDeviceGetHandleByUUID\0")?;
        let uuid = CString::new(uuid).ok()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text is NUL-terminated, the out pointer is a live local.
        (unsafe { find(uuid.as_ptr(), &raw mut handle) } == 0).then_some(NvmlDevice { nvml: self, handle })
    }

    /// The version of the kernel driver, such as 580.159.03.
    pub fn driver_version(&self) -> Option<String> {
        type Version = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
        let version = self.function::<Version>(b"nvmlSystemGetDriverVersion\0")?;
        let mut text = [0_u8; 96];
        // SAFETY: NVML writes at most that many bytes; the last one stays 0.
        let status = unsafe { version(text.as_mut_ptr().cast(), text.len() as c_uint - 1) };
        let text = std::ffi::CStr::from_bytes_until_nul(&text).ok()?;
        (status == 0).then(|| text.to_string_lossy().into_owned())
    }

    fn function<F: Copy>(&self, name: &[u8]) -> Option<F> {
        // SAFETY: each caller states the signature that NVML documents for the name.
        unsafe { self.library.get::<F>(name) }.ok().map(|symbol| *symbol)
    }
}

impl NvmlDevice<'_> {
    /// What the GPU is doing now.
    pub fn state(&self) -> GpuState {
        GpuState {
            sm_clock_mhz: self.sm_clock_mhz(),
            memory_clock_mhz: self.of_kind(b"nvmlDeviceGetClockInfo\0", NVML_CLOCK_MEM),
            power_mw: self.number(b"nvmlDeviceGetPowerUsage\0"),
            power_limit_mw: self.number(b"nvmlDeviceGetEnforcedPowerLimit\0"),
            temperature_c: self.of_kind(b"nvmlDeviceGetTemperature\0", NVML_TEMPERATURE_GPU),
            throttle: self.bits(b"nvmlDeviceGetCurrentClocksThrottleReasons\0"),
        }
    }

    /// The SM clock in MHz.
    pub fn sm_clock_mhz(&self) -> Option<u32> {
        self.of_kind(b"nvmlDeviceGetClockInfo\0", NVML_CLOCK_SM)
    }

    /// What the whole board has used since the driver was loaded, in millijoules. The counter moves in steps of some 20
    /// to 100 ms; between two steps it stands still.
    pub fn energy_mj(&self) -> Option<u64> {
        self.bits(b"nvmlDeviceGetTotalEnergyConsumption\0")
    }

    fn number(&self, name: &[u8]) -> Option<u32> {
        let get = self.nvml.function::<unsafe extern "C" fn(Handle, *mut c_uint) -> c_int>(name)?;
        let mut value = 0;
        // SAFETY: the handle came from NVML, the out pointer is a live local.
        (unsafe { get(self.handle, &raw mut value) } == 0).then_some(value)
    }

    fn of_kind(&self, name: &[u8], kind: c_uint) -> Option<u32> {
        let get = self.nvml.function::<unsafe extern "C" fn(Handle, c_uint, *mut c_uint) -> c_int>(name)?;
        let mut value = 0;
        // SAFETY: as above.
        (unsafe { get(self.handle, kind, &raw mut value) } == 0).then_some(value)
    }

    fn bits(&self, name: &[u8]) -> Option<u64> {
        let get = self.nvml.function::<unsafe extern "C" fn(Handle, *mut c_ulonglong) -> c_int>(name)?;
        let mut value = 0;
        // SAFETY: as above.
        (unsafe { get(self.handle, &raw mut value) } == 0).then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvml_is_there_or_is_absent_without_a_fuss() {
        if let Some(nvml) = Nvml::load() {
            assert!(nvml.driver_version().is_some());
            assert!(nvml.device("GPU-00000000-0000-0000-0000-000000000000").is_none());
        }
    }

    #[test]
    fn heat_makes_a_gpu_unwell_and_its_power_cap_does_not() {
        let with = |bits| GpuState { throttle: Some(bits), ..GpuState::default() };
        assert!(!with(0).is_unwell() && !with(0x1).is_unwell() && !with(0x4).is_unwell());
        assert!(with(0x40).is_unwell() && with(0x8).is_unwell());
        assert_eq!(with(0x44).throttle_reasons(), ["power cap", "hardware thermal slowdown"]);
        assert!(GpuState::default().throttle_reasons().is_empty());
    }
}
