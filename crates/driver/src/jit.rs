//! The driver's PTX assembler: its options, its log, and cubins out.
//!
//! [`crate::Module::from_ptx`] assembles and loads in one step. [`link_ptx`] assembles and hands out the
//! cubin, which can be kept on disk and loaded in milliseconds by [`crate::Module::from_cubin`].

use crate::api::call;
use crate::context::Context;
use crate::driver::Driver;
use crate::error::{DriverError, Status};
use crate::sys::*;
use std::ffi::{CStr, CString, c_uint, c_void};

/// How PTX is assembled. The default is what `ptxas` does without options.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JitOptions {
    /// The most registers per thread.
    pub max_registers: Option<u32>,
    /// The level of optimisation, 0 to 4; 4 where none is given.
    pub optimization: Option<u8>,
    /// Whether the log reports registers, shared memory and spills of each kernel.
    pub verbose: bool,
    /// Whether line numbers are kept for profilers.
    pub line_info: bool,
}

/// What the assembler said.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct JitLog {
    /// Information and warnings.
    pub info: String,
    /// Errors.
    pub errors: String,
    /// The time it took by its own clock, where it reports one; 0 when the driver found the result in its cache.
    pub wall_ms: Option<f32>,
}

/// Machine code for one GPU generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Cubin {
    /// The ELF image.
    pub bytes: Vec<u8>,
    /// What the assembler said.
    pub log: JitLog,
}

/// Bytes of a log: enough for the verbose log of hundreds of kernels; the driver cuts what is longer.
const LOG_BYTES: usize = 64 * 1024;

/// The option arrays in the form that the driver takes: two of equal length, where a value is a number or a
/// pointer. The driver writes sizes and the time back into the second one.
pub(crate) struct OptionTable {
    keys: Vec<c_uint>,
    values: Vec<*mut c_void>,
    info: Vec<u8>,
    errors: Vec<u8>,
}

impl OptionTable {
    pub(crate) fn new(options: &JitOptions) -> Self {
        let mut table = Self {
            keys: Vec::with_capacity(9),
            values: Vec::with_capacity(9),
            info: vec![0; LOG_BYTES],
            errors: vec![0; LOG_BYTES],
        };
        table.number(CU_JIT_WALL_TIME, 0);
        let (info, errors) = (table.info.as_mut_ptr(), table.errors.as_mut_ptr());
        table.push(CU_JIT_INFO_LOG_BUFFER, info.cast());
        table.number(CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, LOG_BYTES);
        table.push(CU_JIT_ERROR_LOG_BUFFER, errors.cast());
        table.number(CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, LOG_BYTES);
        if let Some(registers) = options.max_registers {
            table.number(CU_JIT_MAX_REGISTERS, registers as usize);
        }
        if let Some(level) = options.optimization {
            table.number(CU_JIT_OPTIMIZATION_LEVEL, usize::from(level.min(4)));
        }
        if options.verbose {
            table.number(CU_JIT_LOG_VERBOSE, 1);
        }
        if options.line_info {
            table.number(CU_JIT_GENERATE_LINE_INFO, 1);
        }
        table
    }

    fn number(&mut self, key: c_uint, value: usize) {
        self.push(key, std::ptr::without_provenance_mut(value));
    }

    fn push(&mut self, key: c_uint, value: *mut c_void) {
        self.keys.push(key);
        self.values.push(value);
    }

    pub(crate) fn len(&self) -> c_uint {
        self.keys.len() as c_uint
    }

    pub(crate) fn keys(&mut self) -> *mut c_uint {
        self.keys.as_mut_ptr()
    }

    pub(crate) fn values(&mut self) -> *mut *mut c_void {
        self.values.as_mut_ptr()
    }

    /// What the driver has written by now.
    pub(crate) fn log(&self) -> JitLog {
        let text = |bytes: &[u8]| match CStr::from_bytes_until_nul(bytes) {
            Ok(text) => text.to_string_lossy().into_owned(),
            Err(_) => String::from_utf8_lossy(bytes).into_owned(),
        };
        // The driver stores a float in the first four bytes of the time option's value.
        let wall_ms = self.values.first().map(|value| f32::from_bits(value.addr() as u32));
        JitLog { info: text(&self.info), errors: text(&self.errors), wall_ms }
    }
}

/// Adds the log to a failure of the assembler or the loader.
pub(crate) fn with_log(error: DriverError, source_name: &str, log: JitLog) -> DriverError {
    match error {
        DriverError::Call { call, status, name, .. } => DriverError::Assembly {
            call,
            source_name: source_name.to_owned(),
            status,
            name,
            log: Box::new(log),
        },
        other => other,
    }
}

/// PTX as the driver takes it. What is not PTX at all is refused here: the driver guesses what an image is
/// from its first bytes, and reads on from there.
pub(crate) fn ptx_text(call: &'static str, name: &str, ptx: &str) -> Result<CString, DriverError> {
    if !ptx.contains(".version") {
        let errors = "this is not PTX: it has no .version directive".to_owned();
        return Err(DriverError::Assembly {
            call,
            source_name: name.to_owned(),
            status: Status::INVALID_PTX,
            name: "CUDA_ERROR_INVALID_PTX".to_owned(),
            log: Box::new(JitLog { errors, ..JitLog::default() }),
        });
    }
    CString::new(ptx).map_err(|_| DriverError::NulByte { what: "the PTX text" })
}

/// Destroys the link on every way out.
struct Link {
    driver: &'static Driver,
    state: CUlinkState,
}

impl Drop for Link {
    fn drop(&mut self) {
        // SAFETY: made by cuLinkCreate, destroyed once.
        let _ = unsafe { call!(self.driver, cuLinkDestroy(self.state)) };
    }
}

/// Assembles one PTX module for the context's GPU and returns the machine code. `name` appears in messages.
pub fn link_ptx(
    context: &Context,
    name: &str,
    ptx: &str,
    options: &JitOptions,
) -> Result<Cubin, DriverError> {
    let text = ptx_text("cuLinkAddData", name, ptx)?;
    let c_name = CString::new(name).map_err(|_| DriverError::NulByte { what: "the module's name" })?;
    let driver = context.driver();
    let mut table = OptionTable::new(options);
    let _entered = context.enter()?;
    let mut state = std::ptr::null_mut();
    // SAFETY: both arrays have `len` entries; they and the log buffers outlive the link, which is dropped
    // before `table` because it is declared after it.
    unsafe { call!(driver, cuLinkCreate(table.len(), table.keys(), table.values(), &raw mut state)) }?;
    let link = Link { driver, state };

    let bytes = text.as_bytes_with_nul();
    // SAFETY: the driver reads `len` bytes of NUL-terminated PTX and keeps no reference; no options here.
    let added = unsafe {
        call!(
            driver,
            cuLinkAddData(
                link.state,
                CU_JIT_INPUT_PTX,
                bytes.as_ptr().cast_mut().cast(),
                bytes.len(),
                c_name.as_ptr(),
                0,
                std::ptr::null_mut(),
                std::ptr::null_mut()
            )
        )
    };
    added.map_err(|error| with_log(error, name, table.log()))?;

    let mut image: *mut c_void = std::ptr::null_mut();
    let mut size = 0;
    // SAFETY: the out pointers are live locals.
    let completed = unsafe { call!(driver, cuLinkComplete(link.state, &raw mut image, &raw mut size)) };
    completed.map_err(|error| with_log(error, name, table.log()))?;
    // SAFETY: the image belongs to the link, which still lives; `size` is its length.
    let bytes = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), size) }.to_vec();
    drop(link);
    Ok(Cubin { bytes, log: table.log() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value_of(table: &OptionTable, key: c_uint) -> Option<usize> {
        table.keys.iter().position(|k| *k == key).map(|index| table.values[index].addr())
    }

    #[test]
    fn the_default_asks_for_both_logs_and_the_time_and_nothing_else() {
        let table = OptionTable::new(&JitOptions::default());
        assert_eq!(table.len(), 5);
        assert_eq!(value_of(&table, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES), Some(LOG_BYTES));
        assert_eq!(value_of(&table, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES), Some(LOG_BYTES));
        assert_eq!(value_of(&table, CU_JIT_INFO_LOG_BUFFER), Some(table.info.as_ptr().addr()));
        assert_eq!(value_of(&table, CU_JIT_ERROR_LOG_BUFFER), Some(table.errors.as_ptr().addr()));
    }

    #[test]
    fn each_option_becomes_one_key_with_its_value() {
        let options =
            JitOptions { max_registers: Some(168), optimization: Some(9), verbose: true, line_info: true };
        let table = OptionTable::new(&options);
        assert_eq!(value_of(&table, CU_JIT_MAX_REGISTERS), Some(168));
        assert_eq!(value_of(&table, CU_JIT_OPTIMIZATION_LEVEL), Some(4), "the highest level is 4");
        assert_eq!(value_of(&table, CU_JIT_LOG_VERBOSE), Some(1));
        assert_eq!(value_of(&table, CU_JIT_GENERATE_LINE_INFO), Some(1));
        assert_eq!(table.len(), 9);
    }

    #[test]
    fn the_log_is_what_the_driver_wrote_up_to_the_first_nul() {
        let mut table = OptionTable::new(&JitOptions::default());
        table.errors[..4].copy_from_slice(b"bad\0");
        table.values[0] = std::ptr::without_provenance_mut(12.5f32.to_bits() as usize);
        let log = table.log();
        assert_eq!((log.errors.as_str(), log.info.as_str()), ("bad", ""));
        assert_eq!(log.wall_ms, Some(12.5));
    }
}
