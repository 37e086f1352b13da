//! What can go wrong, told so that the reader knows what to do next.

use crate::driver::CudaVersion;
use crate::jit::JitLog;
use crate::tensor_map::TensorMapError;
use std::fmt;

/// A `CUresult`. The constants are those that this crate or its users tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u32);

#[allow(missing_docs)] // Each is CUDA_ERROR_<name> of the driver API.
impl Status {
    pub const SUCCESS: Status = Status(0);
    pub const INVALID_VALUE: Status = Status(1);
    pub const OUT_OF_MEMORY: Status = Status(2);
    pub const NOT_INITIALIZED: Status = Status(3);
    pub const DEINITIALIZED: Status = Status(4);
    pub const STUB_LIBRARY: Status = Status(34);
    pub const DEVICE_UNAVAILABLE: Status = Status(46);
    pub const NO_DEVICE: Status = Status(100);
    pub const INVALID_DEVICE: Status = Status(101);
    pub const INVALID_IMAGE: Status = Status(200);
    pub const INVALID_CONTEXT: Status = Status(201);
    pub const NO_BINARY_FOR_GPU: Status = Status(209);
    pub const ECC_UNCORRECTABLE: Status = Status(214);
    pub const INVALID_PTX: Status = Status(218);
    pub const JIT_COMPILER_NOT_FOUND: Status = Status(221);
    pub const UNSUPPORTED_PTX_VERSION: Status = Status(222);
    pub const JIT_COMPILATION_DISABLED: Status = Status(223);
    pub const CONTAINED: Status = Status(226);
    pub const INVALID_HANDLE: Status = Status(400);
    pub const NOT_FOUND: Status = Status(500);
    pub const NOT_READY: Status = Status(600);
    pub const ILLEGAL_ADDRESS: Status = Status(700);
    pub const LAUNCH_OUT_OF_RESOURCES: Status = Status(701);
    pub const LAUNCH_TIMEOUT: Status = Status(702);
    pub const CONTEXT_IS_DESTROYED: Status = Status(709);
    pub const ASSERT: Status = Status(710);
    pub const HARDWARE_STACK_ERROR: Status = Status(714);
    pub const ILLEGAL_INSTRUCTION: Status = Status(715);
    pub const MISALIGNED_ADDRESS: Status = Status(716);
    pub const INVALID_ADDRESS_SPACE: Status = Status(717);
    pub const INVALID_PC: Status = Status(718);
    pub const LAUNCH_FAILED: Status = Status(719);
    pub const TENSOR_MEMORY_LEAK: Status = Status(721);
    pub const NOT_PERMITTED: Status = Status(800);
    pub const NOT_SUPPORTED: Status = Status(801);
    pub const SYSTEM_NOT_READY: Status = Status(802);
    pub const SYSTEM_DRIVER_MISMATCH: Status = Status(803);
    pub const COMPAT_NOT_SUPPORTED_ON_DEVICE: Status = Status(804);
    pub const STREAM_CAPTURE_UNSUPPORTED: Status = Status(900);
    pub const STREAM_CAPTURE_INVALIDATED: Status = Status(901);
    pub const STREAM_CAPTURE_IMPLICIT: Status = Status(906);
    pub const INVALID_CLUSTER_SIZE: Status = Status(912);
    pub const UNKNOWN: Status = Status(999);
}

impl Status {
    /// Whether the call did what was asked.
    pub fn is_success(self) -> bool {
        self == Status::SUCCESS
    }

    /// Whether the context is lost: after such a fault every later call in it fails the same way, until the
    /// process ends.
    pub fn loses_context(self) -> bool {
        matches!(
            self,
            Status::ECC_UNCORRECTABLE
                | Status::CONTAINED
                | Status::ILLEGAL_ADDRESS
                | Status::LAUNCH_TIMEOUT
                | Status::ASSERT
                | Status::HARDWARE_STACK_ERROR
                | Status::ILLEGAL_INSTRUCTION
                | Status::MISALIGNED_ADDRESS
                | Status::INVALID_ADDRESS_SPACE
                | Status::INVALID_PC
                | Status::LAUNCH_FAILED
                | Status::TENSOR_MEMORY_LEAK
        )
    }

    /// What to do about it, where there is something to say.
    pub fn advice(self) -> Option<&'static str> {
        Some(match self {
            Status::OUT_OF_MEMORY => {
                "Free memory on the GPU (nvidia-smi shows who holds it), or ask for less."
            }
            Status::NOT_INITIALIZED => {
                "A process forked after CUDA was initialised cannot use it: spawn a new process instead."
            }
            Status::DEINITIALIZED => "The process is ending and the driver is already shut down.",
            Status::STUB_LIBRARY => {
                "This is the toolkit's stub, not the driver: take the stubs directory out of \
                 LD_LIBRARY_PATH, so that the driver's own libcuda.so.1 is found."
            }
            Status::DEVICE_UNAVAILABLE => {
                "Another process holds the GPU exclusively, or its compute mode forbids use: see nvidia-smi."
            }
            Status::NO_DEVICE => "See CUDA_VISIBLE_DEVICES and nvidia-smi.",
            Status::INVALID_IMAGE => {
                "The module is damaged, or of another GPU generation: build it again from PTX."
            }
            Status::INVALID_CONTEXT => {
                "The handle belongs to another CUDA context than the one in use: take streams, memory and \
                 modules from one device's primary context."
            }
            Status::NO_BINARY_FOR_GPU => {
                "The code was built for another GPU. PTX for sm_90a runs on compute capability 9.0 only; a \
                 cubin runs on its own major version only."
            }
            Status::INVALID_PTX => "The log says where the assembler stopped.",
            Status::JIT_COMPILER_NOT_FOUND => {
                "The driver's PTX assembler (libnvidia-ptxjitcompiler) is missing: a container must be \
                 started with the compute capability (NVIDIA_DRIVER_CAPABILITIES=compute,utility)."
            }
            Status::UNSUPPORTED_PTX_VERSION => {
                "The PTX asks for a newer ISA than this driver knows: update the driver, or emit a lower \
                 .version."
            }
            Status::JIT_COMPILATION_DISABLED => "CUDA_DISABLE_PTX_JIT is set: unset it.",
            Status::NOT_FOUND => "The module has no symbol of that name.",
            Status::LAUNCH_OUT_OF_RESOURCES => {
                "The block needs more registers or shared memory than an SM has, or the parameter bytes are \
                 not exactly as many as the kernel declares."
            }
            Status::SYSTEM_NOT_READY => {
                "On NVSwitch machines the fabric manager service must run before CUDA can be used."
            }
            Status::SYSTEM_DRIVER_MISMATCH => {
                "The kernel module and libcuda are of different versions: restart the machine, or match the \
                 container's driver files to the host's."
            }
            Status::COMPAT_NOT_SUPPORTED_ON_DEVICE => {
                "A cuda-compat library is in use that this GPU does not support: remove it from \
                 LD_LIBRARY_PATH."
            }
            Status::STREAM_CAPTURE_UNSUPPORTED | Status::STREAM_CAPTURE_INVALIDATED => {
                "The operation cannot be part of a graph: do it before the capture begins (warm up once)."
            }
            Status::STREAM_CAPTURE_IMPLICIT => {
                "The default stream cannot be used while another blocking stream captures: use a \
                 non-blocking stream."
            }
            Status::INVALID_CLUSTER_SIZE => {
                "No SM group can hold a cluster of that size with the block's registers and shared memory: \
                 use a smaller cluster, or allow non-portable sizes above 8."
            }
            lost if lost.loses_context() => {
                "The context is lost: every later CUDA call of this process fails. Run under \
                 compute-sanitizer to find the kernel at fault, and restart the process."
            }
            _ => return None,
        })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Why an address cannot be given to a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PointerFault {
    /// It is null.
    Null,
    /// CUDA does not know it: ordinary host memory, or memory already freed.
    NotCuda,
    /// It is page-locked host memory.
    PinnedHost,
    /// It lies on the GPU with this ordinal.
    OtherDevice(usize),
    /// It is not a multiple of this many bytes.
    Misaligned(u64),
}

impl fmt::Display for PointerFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PointerFault::Null => f.write_str("it is null; give the address of a device allocation"),
            PointerFault::NotCuda => f.write_str(
                "it is not CUDA memory (ordinary host memory, or already freed); copy the data to the GPU first",
            ),
            PointerFault::PinnedHost => {
                f.write_str("it is page-locked host memory; copy the data to the GPU first")
            }
            PointerFault::OtherDevice(ordinal) => write!(
                f,
                "it lies on GPU {ordinal}; copy the data over, or run the call on GPU {ordinal}"
            ),
            PointerFault::Misaligned(bytes) => write!(f, "it is not aligned to {bytes} bytes"),
        }
    }
}

/// Every failure of this crate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The driver library could not be loaded.
    #[error("{}", library_not_found(tried))]
    LibraryNotFound {
        /// Each name tried, with the loader's answer.
        tried: Vec<(String, String)>,
    },
    /// The library lacks a function that every driver since CUDA 11.0 has.
    #[error(
        "the CUDA driver library has no {symbol} (CUDA {since}): it is older than CUDA 11.0, or not NVIDIA's. \
         Update the NVIDIA driver."
    )]
    MissingSymbol {
        /// The exported name.
        symbol: String,
        /// The CUDA version that brought it.
        since: CudaVersion,
    },
    /// The driver works, but lacks what was asked for.
    #[error(
        "{what} needs a driver for CUDA {needs} or later; this one is for CUDA {has}. Update the NVIDIA driver."
    )]
    DriverTooOld {
        /// The function or feature.
        what: String,
        /// The CUDA version that brought it.
        needs: CudaVersion,
        /// The CUDA version of the driver.
        has: CudaVersion,
    },
    /// The driver sees no GPU.
    #[error(
        "the CUDA driver is installed but sees no GPU. nvidia-smi shows what the system has; \
         CUDA_VISIBLE_DEVICES may hide it, and a container must be started with the GPU (docker run --gpus all)."
    )]
    NoDevice,
    /// There is no GPU of that number.
    #[error(
        "there is no GPU {ordinal}: the driver sees {count} (CUDA_VISIBLE_DEVICES limits and renumbers them)"
    )]
    NoSuchDevice {
        /// The ordinal asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The GPU lacks what was asked for.
    #[error("{device} has no {what}; it needs {needs}")]
    Unsupported {
        /// The GPU's name.
        device: String,
        /// The feature.
        what: &'static str,
        /// What has it.
        needs: &'static str,
    },
    /// A driver call failed.
    #[error("{call} failed: {name} ({status}): {text}.{}", sentence(status.advice()))]
    Call {
        /// The function.
        call: &'static str,
        /// Its status.
        status: Status,
        /// The status's name.
        name: String,
        /// The driver's sentence for it.
        text: String,
    },
    /// PTX or a cubin was refused.
    #[error("{call} refused {source_name}: {name} ({status}).{}{}", sentence(status.advice()), indented(log))]
    Assembly {
        /// The function.
        call: &'static str,
        /// What was to be assembled or loaded.
        source_name: String,
        /// Its status.
        status: Status,
        /// The status's name.
        name: String,
        /// What the assembler said.
        log: Box<JitLog>,
    },
    /// Not enough memory.
    #[error(
        "out of {place} memory: {bytes} bytes asked for{}. {}",
        match free_total { Some((free, total)) => format!(", {free} of {total} free"), None => String::new() },
        if *place == "GPU" { "Free memory on the GPU (nvidia-smi shows who holds it), or ask for less." }
        else { "Page-locked memory is scarce: ask for less." },
    )]
    OutOfMemory {
        /// `GPU` or `page-locked host`.
        place: &'static str,
        /// The bytes asked for.
        bytes: usize,
        /// Free and total bytes of the GPU, where known.
        free_total: Option<(usize, usize)>,
    },
    /// An address that cannot be used.
    #[error("{what} ({address:#x}) cannot be used on GPU {ordinal}: {fault}")]
    Pointer {
        /// What the address is for.
        what: String,
        /// The address.
        address: u64,
        /// The GPU it was meant for.
        ordinal: usize,
        /// What is wrong with it.
        fault: PointerFault,
    },
    /// A stream of another context.
    #[error(
        "the stream belongs to another CUDA context (on GPU {stream_device}) than the one in use (GPU {context_device}): \
         give a stream of GPU {context_device}'s primary context, or call on GPU {stream_device}"
    )]
    ForeignStream {
        /// The GPU of the stream's context.
        stream_device: usize,
        /// The GPU of the context in use.
        context_device: usize,
    },
    /// A launch that cannot work.
    #[error("cannot launch {kernel}: {reason}")]
    Launch {
        /// The kernel's name.
        kernel: String,
        /// Why not, and what is possible.
        reason: String,
    },
    /// A copy or fill beyond the end of a buffer.
    #[error("{what} of {bytes} bytes at offset {offset} goes beyond a buffer of {len} bytes")]
    OutOfBounds {
        /// The operation.
        what: &'static str,
        /// Where it starts.
        offset: usize,
        /// How long it is.
        bytes: usize,
        /// How long the buffer is.
        len: usize,
    },
    /// A name or text that cannot be given to C.
    #[error("{what} contains a NUL byte")]
    NulByte {
        /// What it is.
        what: &'static str,
    },
    /// A tensor map that is not possible.
    #[error("no such tensor map: {0}")]
    TensorMap(#[from] TensorMapError),
}

impl DriverError {
    /// The driver's status, where a driver call is the reason.
    pub fn status(&self) -> Option<Status> {
        match self {
            DriverError::Call { status, .. } | DriverError::Assembly { status, .. } => Some(*status),
            DriverError::OutOfMemory { .. } => Some(Status::OUT_OF_MEMORY),
            DriverError::NoDevice => Some(Status::NO_DEVICE),
            _ => None,
        }
    }

    /// Whether the context is lost, so that nothing more can be done on the GPU in this process.
    pub fn context_is_lost(&self) -> bool {
        self.status().is_some_and(Status::loses_context)
    }

    /// Whether there is simply no usable GPU here: no library, no device, or too old a driver. A program
    /// that can also run on the CPU does so then.
    pub fn means_no_gpu(&self) -> bool {
        matches!(
            self,
            DriverError::LibraryNotFound { .. }
                | DriverError::MissingSymbol { .. }
                | DriverError::DriverTooOld { .. }
                | DriverError::NoDevice
        )
    }
}

fn library_not_found(tried: &[(String, String)]) -> String {
    let mut text = String::from("the CUDA driver library could not be loaded");
    if tried.is_empty() {
        text.push_str(": there is none for this operating system.");
        return text;
    }
    text.push_str(
        ". Install the NVIDIA driver; in a container, start it with the GPU (docker run --gpus all).",
    );
    for (name, reason) in tried {
        text.push_str("\n  ");
        if !reason.starts_with(name) {
            text.push_str(name);
            text.push_str(": ");
        }
        text.push_str(reason);
    }
    text
}

fn sentence(advice: Option<&str>) -> String {
    advice.map(|advice| format!(" {advice}")).unwrap_or_default()
}

fn indented(log: &JitLog) -> String {
    let mut text = String::new();
    for line in log.errors.lines().chain(log.info.lines()).filter(|line| !line.trim().is_empty()) {
        text.push_str("\n  ");
        text.push_str(line.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(status: Status) -> DriverError {
        DriverError::Call { call: "cuTest", status, name: "CUDA_ERROR_TEST".into(), text: "a test".into() }
    }

    #[test]
    fn a_failed_call_tells_its_function_its_name_its_number_and_what_to_do() {
        let text = call(Status::UNSUPPORTED_PTX_VERSION).to_string();
        assert!(text.starts_with("cuTest failed: CUDA_ERROR_TEST (222): a test. "), "{text}");
        assert!(text.ends_with("update the driver, or emit a lower .version."), "{text}");
    }

    #[test]
    fn a_status_without_advice_ends_after_the_drivers_sentence() {
        assert_eq!(call(Status(12345)).to_string(), "cuTest failed: CUDA_ERROR_TEST (12345): a test.");
    }

    #[test]
    fn faults_inside_a_kernel_lose_the_context_and_failures_before_it_do_not() {
        for lost in [700, 710, 714, 715, 716, 717, 718, 719, 721] {
            assert!(call(Status(lost)).context_is_lost(), "{lost}");
            assert!(Status(lost).advice().is_some_and(|text| text.contains("restart")), "{lost}");
        }
        for kept in [1, 2, 200, 209, 218, 222, 500, 600, 701, 801, 900, 912] {
            assert!(!call(Status(kept)).context_is_lost(), "{kept}");
        }
    }

    #[test]
    fn a_refused_assembly_shows_the_assemblers_lines_indented() {
        let log = JitLog { errors: "ptxas fatal: no\n\n".into(), info: "line two".into(), wall_ms: None };
        let error = DriverError::Assembly {
            call: "cuLinkAddData",
            source_name: "kernel.ptx".into(),
            status: Status::INVALID_PTX,
            name: "CUDA_ERROR_INVALID_PTX".into(),
            log: Box::new(log),
        };
        assert_eq!(
            error.to_string(),
            "cuLinkAddData refused kernel.ptx: CUDA_ERROR_INVALID_PTX (218). The log says where the \
             assembler stopped.\n  ptxas fatal: no\n  line two"
        );
    }

    #[test]
    fn every_reason_to_do_without_a_gpu_is_told_apart_from_a_fault_on_one() {
        let none = DriverError::LibraryNotFound { tried: vec![] };
        assert!(none.means_no_gpu() && none.to_string().contains("operating system"));
        assert!(DriverError::NoDevice.means_no_gpu());
        assert!(!call(Status::OUT_OF_MEMORY).means_no_gpu());
    }

    #[test]
    fn each_pointer_fault_says_what_to_do() {
        let told =
            |fault| DriverError::Pointer { what: "q".into(), address: 0x10, ordinal: 1, fault }.to_string();
        assert_eq!(
            told(PointerFault::Null),
            "q (0x10) cannot be used on GPU 1: it is null; give the address of a device allocation"
        );
        assert!(told(PointerFault::NotCuda).contains("copy the data to the GPU"));
        assert!(told(PointerFault::PinnedHost).contains("copy the data to the GPU"));
        assert!(told(PointerFault::OtherDevice(3)).contains("run the call on GPU 3"));
        assert!(told(PointerFault::Misaligned(16)).contains("16 bytes"));
    }
}
