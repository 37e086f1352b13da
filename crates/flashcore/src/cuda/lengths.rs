//! Key lengths: given on the host, needed on the GPU.
//!
//! They travel as the parameters of a small kernel that stores them, in stream order: nobody waits, no host memory
//! must outlive the call, and a captured call replays with the lengths that it was captured with. Whoever has them on
//! the GPU already gives them as [`DeviceLengths`](crate::DeviceLengths) and spares even that.

use flashcore_driver::{
    Context, DeviceBuffer, DriverError, Function, JitOptions, LaunchConfig, Module, ParamBuffer, Stream,
};

/// Lengths that one launch stores, one per thread; `lengths.ptx` has room for so many.
const A_LAUNCH: usize = 256;

const PTX: &str = include_str!("lengths.ptx");
const ENTRY: &str = "flashcore_key_lengths";

/// The kernel that stores lengths.
pub(super) struct LengthsKernel {
    function: Function,
}

impl LengthsKernel {
    pub(super) fn load(context: &Context) -> Result<Self, DriverError> {
        let module = Module::from_ptx(context, ENTRY, PTX, &JitOptions::default())?;
        Ok(Self { function: module.function(ENTRY)? })
    }

    /// A buffer that holds the lengths for whatever is queued in the stream from now on.
    pub(super) fn store(&self, stream: &Stream, lengths: &[u32]) -> Result<DeviceBuffer, DriverError> {
        let buffer = reserve(stream, size_of_val(lengths))?;
        for (part, values) in lengths.chunks(A_LAUNCH).enumerate() {
            let mut params = ParamBuffer::new();
            params.push_u64(buffer.address() + (part * A_LAUNCH * size_of::<u32>()) as u64)?;
            params.push_u32(values.len() as u32)?;
            for place in 0..A_LAUNCH {
                params.push_u32(values.get(place).copied().unwrap_or(0))?;
            }
            let launch = LaunchConfig::new([1; 3], [A_LAUNCH as u32, 1, 1]);
            // SAFETY: the parameters are those of `lengths.ptx`, and the buffer holds as many lengths as are
            // stored; its memory is freed in stream order, or after everything is done.
            unsafe { self.function.launch(stream, &launch, params.as_bytes()) }?;
        }
        Ok(buffer)
    }
}

/// Memory in stream order where the GPU has it, so that freeing it waits for nobody.
fn reserve(stream: &Stream, bytes: usize) -> Result<DeviceBuffer, DriverError> {
    if stream.context().properties().memory_pools {
        stream.alloc(bytes)
    } else {
        stream.context().alloc(bytes)
    }
}
