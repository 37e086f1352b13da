//! Loaded code: modules and the kernels in them.

use crate::api::{call, call_optional};
use crate::context::Context;
use crate::driver::Driver;
use crate::error::{DriverError, Status};
use crate::jit::{JitLog, JitOptions, OptionTable, ptx_text, with_log};
use crate::launch::LaunchConfig;
use crate::sys::*;
use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

struct Loaded {
    context: Context,
    raw: CUmodule,
    log: JitLog,
}

// SAFETY: modules may be used from any thread; the handle is only passed back to the driver.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: loaded once, unloaded once; every function holds the module alive.
            let _ = unsafe { call!(self.context.driver(), cuModuleUnload(self.raw)) };
        }
    }
}

/// Code loaded on a GPU. Clones share it; it is unloaded with the last clone and the last [`Function`].
#[derive(Clone)]
pub struct Module {
    loaded: Arc<Loaded>,
}

impl Module {
    /// Assembles PTX for the context's GPU and loads it. `name` appears in messages.
    pub fn from_ptx(
        context: &Context,
        name: &str,
        ptx: &str,
        options: &JitOptions,
    ) -> Result<Self, DriverError> {
        let text = ptx_text("cuModuleLoadDataEx", name, ptx)?;
        Self::load(context, name, text.as_bytes_with_nul(), options)
    }

    /// Loads machine code that [`crate::link_ptx`] or `ptxas` made. `name` appears in messages.
    pub fn from_cubin(context: &Context, name: &str, cubin: &[u8]) -> Result<Self, DriverError> {
        let refuse = |log: &str| {
            let log = JitLog { errors: log.to_owned(), ..JitLog::default() };
            let (status, name_of_status) = (Status::INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE".to_owned());
            Err(DriverError::Assembly {
                call: "cuModuleLoadDataEx",
                source_name: name.to_owned(),
                status,
                name: name_of_status,
                log: Box::new(log),
            })
        };
        // The driver is not told the length: it trusts the ELF headers, so a truncated file would be read beyond
        // its end.
        match elf_length(cubin) {
            None => refuse("not an ELF image for a GPU"),
            Some(end) if end > cubin.len() as u64 => refuse(&format!(
                "the image is cut short: its headers speak of {end} bytes, and there are {}",
                cubin.len()
            )),
            Some(_) => Self::load(context, name, cubin, &JitOptions::default()),
        }
    }

    fn load(context: &Context, name: &str, image: &[u8], options: &JitOptions) -> Result<Self, DriverError> {
        let mut table = OptionTable::new(options);
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image is NUL-terminated PTX or a whole ELF image; both arrays have `len` entries and
        // outlive the call, as do the log buffers.
        let loaded = unsafe {
            call!(
                context.driver(),
                cuModuleLoadDataEx(
                    &raw mut raw,
                    image.as_ptr().cast::<c_void>(),
                    table.len(),
                    table.keys(),
                    table.values()
                )
            )
        };
        loaded.map_err(|error| with_log(error, name, table.log()))?;
        Ok(Self { loaded: Arc::new(Loaded { context: context.clone(), raw, log: table.log() }) })
    }

    /// What the assembler said; empty for a cubin.
    pub fn log(&self) -> &JitLog {
        &self.loaded.log
    }

    /// The context it is loaded in.
    pub fn context(&self) -> &Context {
        &self.loaded.context
    }

    /// The kernel of that name.
    pub fn function(&self, name: &str) -> Result<Function, DriverError> {
        let c_name = CString::new(name).map_err(|_| DriverError::NulByte { what: "the kernel's name" })?;
        let driver = self.context().driver();
        let _entered = self.context().enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module lives, the name is NUL-terminated, the out pointer is a live local.
        let found =
            unsafe { call!(driver, cuModuleGetFunction(&raw mut raw, self.loaded.raw, c_name.as_ptr())) };
        found.map_err(|error| match error.status() {
            Some(Status::NOT_FOUND) => DriverError::Launch {
                kernel: name.to_owned(),
                reason: "the module has no kernel of that name".to_owned(),
            },
            _ => error,
        })?;
        let attribute = |key| {
            let mut value: c_int = 0;
            // SAFETY: the function was just found, the out pointer is a live local.
            unsafe { call!(driver, cuFuncGetAttribute(&raw mut value, key, raw)) }?;
            Ok::<u32, DriverError>(u32::try_from(value).unwrap_or(0))
        };
        Ok(Function {
            kernel: Arc::new(Kernel {
                module: self.clone(),
                raw,
                name: name.to_owned(),
                param_bytes: OnceLock::new(),
                max_threads: attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
                dynamic_shared: AtomicU32::new(attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?),
            }),
        })
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("context", &self.loaded.context).finish_non_exhaustive()
    }
}

/// How many bytes an ELF image has according to its headers, or `None` when it is not one.
fn elf_length(image: &[u8]) -> Option<u64> {
    const HEADER: usize = 64;
    const CUDA_MACHINE: [u8; 2] = [190, 0];
    // Magic, 64-bit class, little-endian, and code for a GPU.
    if image.len() < HEADER || image[..6] != [0x7f, b'E', b'L', b'F', 2, 1] || image[18..20] != CUDA_MACHINE {
        return None;
    }
    let number = |at: usize, bytes: usize| {
        image
            .get(at..at.checked_add(bytes)?)
            .map(|part| part.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte)))
    };
    let (program_table, section_table) = (number(32, 8)?, number(40, 8)?);
    let (program_size, programs) = (number(54, 2)?, number(56, 2)?);
    let (section_size, sections) = (number(58, 2)?, number(60, 2)?);
    let mut end = HEADER as u64;
    if programs > 0 {
        end = end.max(program_table.checked_add(program_size * programs)?);
    }
    if sections > 0 {
        end = end.max(section_table.checked_add(section_size * sections)?);
    }
    const NO_BITS: u64 = 8;
    for index in 0..sections {
        let header = section_table.checked_add(index * section_size)?;
        let Ok(header) = usize::try_from(header) else { return Some(u64::MAX) };
        // A header beyond the end of the file: `end` shows that already.
        let Some(kind) = number(header.checked_add(4)?, 4) else { break };
        if kind != NO_BITS
            && let (Some(offset), Some(size)) = (number(header + 24, 8), number(header + 32, 8))
        {
            end = end.max(offset.checked_add(size)?);
        }
    }
    Some(end)
}

/// The bytes of all parameters, without padding at the end, where the driver can tell (CUDA 12.4). `None` where it
/// does not answer for the first one, which means either no parameters or an unknown layout.
fn parameter_bytes(driver: &'static Driver, function: CUfunction) -> Option<usize> {
    let info = driver.api().cuFuncGetParamInfo.available()?;
    let mut end = 0;
    for index in 0.. {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded; an index past the last parameter is answered with an error.
        let status = Status(unsafe { info(function, index, &raw mut offset, &raw mut size) });
        match status {
            Status::SUCCESS => end = end.max(offset + size),
            Status::INVALID_VALUE => break,
            _ => return None,
        }
    }
    (end > 0).then_some(end)
}

pub(crate) struct Kernel {
    module: Module,
    raw: CUfunction,
    name: String,
    /// Asked for once, and only by launches that pass packed bytes: the driver ends the list with an error.
    param_bytes: OnceLock<Option<usize>>,
    max_threads: u32,
    /// The limit for dynamic shared memory as last seen; see [`Function::set_max_dynamic_shared`].
    dynamic_shared: AtomicU32,
}

// SAFETY: functions may be used from any thread; the handle is only passed back to the driver.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// A kernel of a loaded module.
#[derive(Clone)]
pub struct Function {
    kernel: Arc<Kernel>,
}

/// What a kernel uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionAttributes {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of static shared memory per block.
    pub static_shared_bytes: u32,
    /// Bytes of local memory per thread: the stack and spilled registers.
    pub local_bytes: u32,
    /// Bytes of constant memory, without the parameters.
    pub const_bytes: u32,
    /// Threads that a block may have with these registers.
    pub max_threads_per_block: u32,
    /// Bytes of dynamic shared memory that a launch may currently ask for.
    pub max_dynamic_shared_bytes: u32,
    /// The target of the PTX it came from, times ten: 90 for sm_90.
    pub ptx_version: u32,
    /// The target of its machine code, times ten.
    pub binary_version: u32,
}

/// How an SM's memory is divided between L1 cache and shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CarveOut {
    /// The driver chooses.
    Default,
    /// At least this much of the largest shared memory, in percent.
    Percent(u8),
}

/// How many blocks an SM holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Occupancy {
    /// Blocks per SM.
    pub blocks_per_sm: u32,
    /// Threads per SM.
    pub threads_per_sm: u32,
}

impl Function {
    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.kernel.name
    }

    /// The module it is part of.
    pub fn module(&self) -> &Module {
        &self.kernel.module
    }

    /// How many bytes its parameters take, where the driver can tell (CUDA 12.4 and later); `None` also for a
    /// kernel without parameters.
    pub fn param_bytes(&self) -> Option<usize> {
        *self.kernel.param_bytes.get_or_init(|| parameter_bytes(self.driver(), self.raw()))
    }

    /// What it uses.
    pub fn attributes(&self) -> Result<FunctionAttributes, DriverError> {
        let _entered = self.context().enter()?;
        let get = |key| self.attribute(key);
        Ok(FunctionAttributes {
            registers: get(CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            static_shared_bytes: get(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            local_bytes: get(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            const_bytes: get(CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES)?,
            max_threads_per_block: get(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            max_dynamic_shared_bytes: get(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?,
            ptx_version: get(CU_FUNC_ATTRIBUTE_PTX_VERSION)?,
            binary_version: get(CU_FUNC_ATTRIBUTE_BINARY_VERSION)?,
        })
    }

    /// Lets launches ask for up to `bytes` of dynamic shared memory. Above 48 KB this must be called first;
    /// the GPU's limit is [`crate::DeviceProperties::shared_per_block_optin`], less the static part.
    pub fn set_max_dynamic_shared(&self, bytes: u32) -> Result<(), DriverError> {
        let _entered = self.context().enter()?;
        let limit = self.context().properties().shared_per_block_optin;
        let fixed = self.attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        if bytes > limit.saturating_sub(fixed) {
            let name = &self.context().properties().name;
            return Err(self.refuse(format!(
                "{bytes} bytes of dynamic and {fixed} of static shared memory do not fit: {name} gives a block \
                 {limit}. Use smaller tiles or fewer stages."
            )));
        }
        self.set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as c_int)?;
        self.kernel.dynamic_shared.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Sets how an SM's memory is divided while this kernel runs. A hint.
    pub fn set_carve_out(&self, carve_out: CarveOut) -> Result<(), DriverError> {
        let value = match carve_out {
            CarveOut::Default => -1,
            CarveOut::Percent(percent) => c_int::from(percent.min(100)),
        };
        let _entered = self.context().enter()?;
        self.set_attribute(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, value)
    }

    /// Allows clusters of more than 8 blocks, which not every GPU of a generation can run.
    pub fn allow_non_portable_clusters(&self) -> Result<(), DriverError> {
        let _entered = self.context().enter()?;
        self.set_attribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    }

    /// How many blocks of `threads` threads with `dynamic_shared` bytes an SM holds. `caching_override`
    /// false asks for the number that holds even where the driver would turn caching off to fit more.
    pub fn occupancy(
        &self,
        threads: u32,
        dynamic_shared: usize,
        caching_override: bool,
    ) -> Result<Occupancy, DriverError> {
        let flags =
            if caching_override { CU_OCCUPANCY_DEFAULT } else { CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE };
        let threads_int = c_int::try_from(threads).unwrap_or(c_int::MAX);
        let _entered = self.context().enter()?;
        let mut blocks = 0;
        // SAFETY: the function is loaded, the out pointer is a live local.
        unsafe {
            call!(
                self.driver(),
                cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
                    &raw mut blocks,
                    self.raw(),
                    threads_int,
                    dynamic_shared,
                    flags
                )
            )
        }?;
        let blocks_per_sm = u32::try_from(blocks).unwrap_or(0);
        Ok(Occupancy { blocks_per_sm, threads_per_sm: blocks_per_sm * threads })
    }

    /// How many clusters of the launch's size the whole GPU runs at once.
    pub fn max_active_clusters(&self, config: &LaunchConfig) -> Result<u32, DriverError> {
        config.with_raw(std::ptr::null_mut(), |raw| {
            let _entered = self.context().enter()?;
            let mut clusters = 0;
            // SAFETY: the configuration and its attributes live for the call.
            unsafe {
                call_optional!(
                    self.driver(),
                    cuOccupancyMaxActiveClusters(&raw mut clusters, self.raw(), raw)
                )
            }?;
            Ok(u32::try_from(clusters).unwrap_or(0))
        })
    }

    /// The largest cluster that a launch of this block size and shared memory can have.
    pub fn max_cluster_size(&self, config: &LaunchConfig) -> Result<u32, DriverError> {
        let without_cluster = LaunchConfig { cluster: None, ..*config };
        without_cluster.with_raw(std::ptr::null_mut(), |raw| {
            let _entered = self.context().enter()?;
            let mut size = 0;
            // SAFETY: the configuration lives for the call.
            unsafe {
                call_optional!(
                    self.driver(),
                    cuOccupancyMaxPotentialClusterSize(&raw mut size, self.raw(), raw)
                )
            }?;
            Ok(u32::try_from(size).unwrap_or(0))
        })
    }

    pub(crate) fn raw(&self) -> CUfunction {
        self.kernel.raw
    }

    pub(crate) fn context(&self) -> &Context {
        self.kernel.module.context()
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.context().driver()
    }

    pub(crate) fn max_threads(&self) -> u32 {
        self.kernel.max_threads
    }

    /// Whether a launch may ask for that much dynamic shared memory. The limit may have been raised through
    /// another handle of the same kernel, so the driver is asked before a launch is refused.
    pub(crate) fn dynamic_shared_limit(&self, asked: u32) -> Result<u32, DriverError> {
        let known = self.kernel.dynamic_shared.load(Ordering::Relaxed);
        if asked <= known {
            return Ok(known);
        }
        let _entered = self.context().enter()?;
        let limit = self.attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?;
        self.kernel.dynamic_shared.store(limit, Ordering::Relaxed);
        Ok(limit)
    }

    pub(crate) fn refuse(&self, reason: String) -> DriverError {
        DriverError::Launch { kernel: self.name().to_owned(), reason }
    }

    fn attribute(&self, key: c_int) -> Result<u32, DriverError> {
        let mut value = 0;
        // SAFETY: the function is loaded, the out pointer is a live local.
        unsafe { call!(self.driver(), cuFuncGetAttribute(&raw mut value, key, self.raw())) }?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    fn set_attribute(&self, key: c_int, value: c_int) -> Result<(), DriverError> {
        // SAFETY: the function is loaded.
        unsafe { call!(self.driver(), cuFuncSetAttribute(self.raw(), key, value)) }
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function")
            .field("name", &self.kernel.name)
            .field("param_bytes", &self.param_bytes())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF image of one section header at byte 64, whose section lies at 128 and is 72 bytes long.
    fn elf() -> Vec<u8> {
        let mut image = vec![0u8; 200];
        image[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
        image[18] = 190;
        image[40..48].copy_from_slice(&64u64.to_le_bytes());
        image[58..60].copy_from_slice(&64u16.to_le_bytes());
        image[60..62].copy_from_slice(&1u16.to_le_bytes());
        image[68..72].copy_from_slice(&1u32.to_le_bytes());
        image[88..96].copy_from_slice(&128u64.to_le_bytes());
        image[96..104].copy_from_slice(&72u64.to_le_bytes());
        image
    }

    #[test]
    fn the_length_of_an_elf_image_is_that_of_its_last_section() {
        assert_eq!(elf_length(&elf()), Some(200));
    }

    #[test]
    fn a_section_without_contents_takes_no_room() {
        let mut image = elf();
        image[68..72].copy_from_slice(&8u32.to_le_bytes());
        assert_eq!(elf_length(&image), Some(128));
    }

    #[test]
    fn an_image_cut_anywhere_is_never_taken_for_whole() {
        let whole = elf();
        for length in 0..whole.len() {
            let cut = &whole[..length];
            assert!(elf_length(cut).is_none_or(|end| end > length as u64), "cut at {length}");
        }
    }

    #[test]
    fn hostile_headers_are_refused_without_a_panic() {
        let mut image = elf();
        image[40..48].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(elf_length(&image).is_none_or(|end| end > image.len() as u64));
        let mut image = elf();
        image[88..96].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(elf_length(&image).is_none_or(|end| end > image.len() as u64));
    }

    #[test]
    fn neither_ptx_nor_a_program_for_the_cpu_is_taken_for_a_cubin() {
        assert_eq!(elf_length(&[b'.'; 100]), None);
        let mut x86 = elf();
        x86[18] = 62;
        assert_eq!(elf_length(&x86), None);
    }
}
