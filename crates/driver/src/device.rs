//! GPUs and what they can do.

use crate::api::call;
use crate::context::Context;
use crate::driver::Driver;
use crate::error::DriverError;
use crate::sys::*;
use std::ffi::{CStr, c_char, c_int};
use std::fmt::{self, Write};

/// A GPU's generation: 9.0 is Hopper, 8.0 the A100, 8.9 Ada.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// The number before the dot.
    pub major: u32,
    /// The number after the dot.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What a GPU is and has, asked once. Sizes are bytes, clocks kHz.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProperties {
    /// The product's name.
    pub name: String,
    /// The identity that nvidia-smi shows, as `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
    pub uuid: String,
    /// The place on the PCI bus, as `domain:bus:device`.
    pub pci: String,
    /// The generation.
    pub compute_capability: ComputeCapability,
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// The most threads that an SM holds at once.
    pub max_threads_per_sm: u32,
    /// The most blocks that an SM holds at once.
    pub max_blocks_per_sm: u32,
    /// The most threads per block.
    pub max_threads_per_block: u32,
    /// 32-bit registers per SM.
    pub registers_per_sm: u32,
    /// Shared memory per SM.
    pub shared_per_sm: u32,
    /// The most shared memory per block without opting in.
    pub shared_per_block: u32,
    /// The most shared memory per block with opting in.
    pub shared_per_block_optin: u32,
    /// Shared memory per block that the system reserves.
    pub shared_reserved_per_block: u32,
    /// The L2 cache.
    pub l2_bytes: u64,
    /// Global memory.
    pub memory_bytes: u64,
    /// The highest SM clock, as the driver states it; 0 where it states none.
    pub sm_clock_khz: u32,
    /// The highest memory clock, as the driver states it; 0 where it states none.
    pub memory_clock_khz: u32,
    /// The width of the memory bus in bits.
    pub memory_bus_bits: u32,
    /// Whether memory errors are corrected.
    pub ecc: bool,
    /// Whether blocks can be launched in clusters.
    pub cluster_launch: bool,
    /// Whether stream-ordered allocation works ([`crate::Stream::alloc`]).
    pub memory_pools: bool,
    /// Whether kernels can use tensor maps.
    pub tensor_maps: bool,
}

/// A GPU, by its number among those that the process may see.
#[derive(Debug, Clone, Copy)]
pub struct Device {
    driver: &'static Driver,
    raw: CUdevice,
    ordinal: usize,
}

impl Device {
    pub(crate) fn new(driver: &'static Driver, ordinal: usize) -> Result<Self, DriverError> {
        let count = driver.device_count()?;
        let in_range = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let Some(index) = in_range else { return Err(DriverError::NoSuchDevice { ordinal, count }) };
        let mut raw = 0;
        // SAFETY: the out pointer is a live local.
        unsafe { call!(driver, cuDeviceGet(&raw mut raw, index)) }?;
        Ok(Self { driver, raw, ordinal })
    }

    /// The number it was asked for by.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// The primary context: made by its first user, shared by all users in the process, torch among them.
    pub fn context(&self) -> Result<Context, DriverError> {
        Context::retain(*self)
    }

    /// Asks the driver for everything in [`DeviceProperties`].
    pub fn properties(&self) -> Result<DeviceProperties, DriverError> {
        let number = |attribute| self.attribute(attribute).map(|value| u32::try_from(value).unwrap_or(0));
        // An attribute that an older driver does not know reads as 0: the GPU feature is not usable there.
        let newer = |attribute| number(attribute).unwrap_or(0);
        Ok(DeviceProperties {
            name: self.name()?,
            uuid: self.uuid()?,
            pci: format!(
                "{:04x}:{:02x}:{:02x}",
                number(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
                number(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
                number(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?
            ),
            compute_capability: ComputeCapability {
                major: number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                minor: number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            },
            sm_count: number(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            max_threads_per_sm: number(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
            max_blocks_per_sm: newer(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR),
            max_threads_per_block: number(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            registers_per_sm: number(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
            shared_per_sm: number(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
            shared_per_block: number(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)?,
            shared_per_block_optin: number(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_reserved_per_block: newer(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK),
            l2_bytes: number(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
            memory_bytes: self.total_memory()?,
            sm_clock_khz: newer(CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
            memory_clock_khz: newer(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
            memory_bus_bits: number(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?,
            ecc: number(CU_DEVICE_ATTRIBUTE_ECC_ENABLED)? != 0,
            cluster_launch: newer(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH) != 0,
            memory_pools: newer(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) != 0,
            tensor_maps: newer(CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED) != 0,
        })
    }

    pub(crate) fn raw(&self) -> CUdevice {
        self.raw
    }

    fn attribute(&self, attribute: c_int) -> Result<c_int, DriverError> {
        let mut value = 0;
        // SAFETY: the device handle came from cuDeviceGet, the out pointer is a live local.
        unsafe { call!(self.driver, cuDeviceGetAttribute(&raw mut value, attribute, self.raw)) }?;
        Ok(value)
    }

    fn name(&self) -> Result<String, DriverError> {
        let mut text = [0u8; 256];
        let room = (text.len() - 1) as c_int;
        // SAFETY: the driver writes at most `room` bytes; the last byte stays 0.
        unsafe { call!(self.driver, cuDeviceGetName(text.as_mut_ptr().cast::<c_char>(), room, self.raw)) }?;
        let name = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    fn uuid(&self) -> Result<String, DriverError> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // The newer function tells the parts of a divided GPU (MIG) apart.
        match self.driver.api().cuDeviceGetUuid_v2.available() {
            // SAFETY: the out pointer is a live local of 16 bytes.
            Some(get) => self.driver.check("cuDeviceGetUuid_v2", unsafe { get(&raw mut uuid, self.raw) }),
            // SAFETY: as above.
            None => unsafe { call!(self.driver, cuDeviceGetUuid(&raw mut uuid, self.raw)) },
        }?;
        Ok(format_uuid(uuid.bytes))
    }

    fn total_memory(&self) -> Result<u64, DriverError> {
        let mut bytes = 0;
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self.driver, cuDeviceTotalMem(&raw mut bytes, self.raw)) }?;
        Ok(bytes as u64)
    }
}

fn format_uuid(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_writes_it() {
        let bytes: [u8; 16] = std::array::from_fn(|index| index as u8 * 17);
        assert_eq!(format_uuid(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
