//! Launching kernels.
//!
//! # Parameters are one packed buffer
//!
//! The driver takes parameters as an array of pointers, one per parameter, or as one buffer that has the
//! kernel's parameter layout (`CU_LAUNCH_PARAM_BUFFER_POINTER`). This crate uses the buffer. The layout is
//! known where the kernel is generated, so a launch hands over one pointer and one length: nothing to build
//! for each call, and a 128-byte tensor map at its 64-byte-aligned offset is copied like any
//! other bytes. (With pointers the driver would look up each size in the module and copy the parameters one
//! by one.) What counts is the *offset* in the buffer, not where the buffer lies on the host.
//!
//! The length must be exactly the end of the last parameter, *without* padding at the end; otherwise the
//! driver answers `LAUNCH_OUT_OF_RESOURCES`, which does not name the cause. So the length is checked here first,
//! wherever the driver can tell the layout (CUDA 12.4).

use crate::error::{DriverError, Status};
use crate::module::Function;
use crate::stream::Stream;
use crate::sys::*;
use crate::tensor_map::TensorMap;
use std::ffi::{c_uint, c_void};
use std::fmt;

/// The shape of a launch.
///
/// ```
/// use flashcore_driver::LaunchConfig;
///
/// let config = LaunchConfig { cluster: Some([2, 1, 1]), ..LaunchConfig::new([132, 1, 1], [128, 1, 1]) };
/// assert_eq!(config.threads_per_block(), 128);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads per block in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory per block.
    pub shared_bytes: u32,
    /// Blocks per cluster in x, y and z; each divides the grid's. Needs compute capability 9.0.
    pub cluster: Option<[u32; 3]>,
    /// Programmatic dependent launch: the kernel may start before the one in front of it in the stream is
    /// finished, and waits for it itself (`griddepcontrol.wait`). Needs compute capability 9.0.
    pub programmatic: bool,
    /// The priority, where it differs from the stream's; smaller runs first.
    pub priority: Option<i32>,
}

impl LaunchConfig {
    /// A plain launch: no dynamic shared memory, no cluster.
    pub fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self { grid, block, shared_bytes: 0, cluster: None, programmatic: false, priority: None }
    }

    /// Threads per block.
    pub fn threads_per_block(&self) -> u64 {
        self.block.iter().map(|n| u64::from(*n)).product()
    }

    fn is_plain(&self) -> bool {
        self.cluster.is_none() && !self.programmatic && self.priority.is_none()
    }

    /// What is wrong with the shape itself, whatever the kernel.
    fn fault(&self) -> Option<String> {
        if self.grid.contains(&0) || self.block.contains(&0) {
            return Some(format!(
                "the grid {:?} and the block {:?} must not have a dimension of 0",
                self.grid, self.block
            ));
        }
        let cluster = self.cluster?;
        let divides = |(blocks, part): (&u32, &u32)| *part > 0 && blocks.is_multiple_of(*part);
        if self.grid.iter().zip(&cluster).all(divides) {
            None
        } else {
            Some(format!("the cluster {cluster:?} must divide the grid {:?} in every dimension", self.grid))
        }
    }

    /// Calls `work` with the configuration in the driver's form.
    pub(crate) fn with_raw<T>(&self, stream: CUstream, work: impl FnOnce(*const CUlaunchConfig) -> T) -> T {
        let blank = CUlaunchAttribute { id: 0, pad: [0; 4], value: CUlaunchAttributeValue { pad: [0; 8] } };
        let mut attributes = [blank; 3];
        let mut count = 0;
        if let Some(cluster_dim) = self.cluster {
            attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.cluster_dim = cluster_dim;
            count += 1;
        }
        if self.programmatic {
            attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmatic_stream_serialization_allowed = 1;
            count += 1;
        }
        if let Some(priority) = self.priority {
            attributes[count].id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
            attributes[count].value.priority = priority;
            count += 1;
        }
        let raw = CUlaunchConfig {
            grid_dim_x: self.grid[0],
            grid_dim_y: self.grid[1],
            grid_dim_z: self.grid[2],
            block_dim_x: self.block[0],
            block_dim_y: self.block[1],
            block_dim_z: self.block[2],
            shared_mem_bytes: self.shared_bytes,
            stream,
            attrs: attributes.as_mut_ptr(),
            num_attrs: count as c_uint,
        };
        work(&raw const raw)
    }
}

/// The most parameters of [`Function::launch_fields`].
const MAX_FIELDS: usize = 64;

impl Function {
    /// Queues the kernel in the stream. `params` are the parameters' bytes in the kernel's layout, such as
    /// [`ParamBuffer`] makes; the driver copies them before the call returns.
    ///
    /// The call allocates nothing, and is one call of the driver where the context is current on the thread
    /// (it is from a thread's second launch on the first GPU). It works under stream capture.
    ///
    /// # Safety
    ///
    /// The bytes must be the parameters that the kernel expects, and all memory that the kernel reaches
    /// through them must stay valid until it has run (and at every replay, when captured).
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        config: &LaunchConfig,
        params: &[u8],
    ) -> Result<(), DriverError> {
        self.check_launch(stream, config)?;
        if let Some(expected) = self.param_bytes()
            && expected != params.len()
        {
            return Err(self.refuse(format!(
                "its parameters take {expected} bytes, and {} were given (no padding at the end)",
                params.len()
            )));
        }
        let mut size = params.len();
        let mut packed = [
            CU_LAUNCH_PARAM_BUFFER_POINTER,
            params.as_ptr().cast_mut().cast::<c_void>(),
            CU_LAUNCH_PARAM_BUFFER_SIZE,
            (&raw mut size).cast::<c_void>(),
            CU_LAUNCH_PARAM_END,
        ];
        let extra = if params.is_empty() { std::ptr::null_mut() } else { packed.as_mut_ptr() };
        // SAFETY: `extra` is a terminated list that outlives the call; the caller vouches for the rest.
        unsafe { self.launch_raw(stream, config, std::ptr::null_mut(), extra) }
    }

    /// As [`Function::launch`], with the place of every parameter in `params`. The driver then puts each where the
    /// kernel wants it. Parameters that are aligned to more than 16 bytes, such as tensor maps, need this: the driver
    /// alone decides at which absolute address the parameters begin.
    ///
    /// # Safety
    ///
    /// As for [`Function::launch`]; `places` has one entry for each of the kernel's parameters, in order.
    pub unsafe fn launch_fields(
        &self,
        stream: &Stream,
        config: &LaunchConfig,
        params: &[u8],
        places: &[u16],
    ) -> Result<(), DriverError> {
        self.check_launch(stream, config)?;
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_FIELDS];
        if places.len() > MAX_FIELDS || places.iter().any(|&place| usize::from(place) >= params.len()) {
            return Err(self.refuse(format!(
                "{} parameters in {} bytes were given",
                places.len(),
                params.len()
            )));
        }
        for (pointer, &place) in pointers.iter_mut().zip(places) {
            *pointer = params[usize::from(place)..].as_ptr().cast_mut().cast();
        }
        // SAFETY: the pointers reach into `params`, which outlives the call; the caller vouches for the rest.
        unsafe { self.launch_raw(stream, config, pointers.as_mut_ptr(), std::ptr::null_mut()) }
    }

    /// # Safety
    ///
    /// As for [`Function::launch`]; `pointers` or `extra` are the parameters as the driver wants them.
    unsafe fn launch_raw(
        &self,
        stream: &Stream,
        config: &LaunchConfig,
        pointers: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Result<(), DriverError> {
        let launch = || -> Result<_, DriverError> {
            if config.is_plain() {
                let ([gx, gy, gz], [bx, by, bz]) = (config.grid, config.block);
                let (shared, stream) = (config.shared_bytes, stream.raw());
                let launch = self.driver().api().cuLaunchKernel;
                // SAFETY: handles live; the caller vouches for the parameters.
                let status =
                    unsafe { launch(self.raw(), gx, gy, gz, bx, by, bz, shared, stream, pointers, extra) };
                return Ok(("cuLaunchKernel", Status(status)));
            }
            let launch = self.driver().api().cuLaunchKernelEx.get(self.driver().version())?;
            // SAFETY: as above; the configuration and its attributes live for the call.
            let status =
                config.with_raw(stream.raw(), |raw| unsafe { launch(raw, self.raw(), pointers, extra) });
            Ok(("cuLaunchKernelEx", Status(status)))
        };
        let (mut name, mut status) = launch()?;
        if matches!(status, Status::INVALID_CONTEXT | Status::INVALID_HANDLE) {
            let _entered = self.context().enter_after_launch()?;
            (name, status) = launch()?;
        }
        self.driver().check(name, status.0)
    }

    /// Refuses what cannot work, with the reason; the driver would only say "invalid argument".
    fn check_launch(&self, stream: &Stream, config: &LaunchConfig) -> Result<(), DriverError> {
        if let Some(fault) = config.fault() {
            return Err(self.refuse(fault));
        }
        if config.threads_per_block() > u64::from(self.max_threads()) {
            return Err(self.refuse(format!(
                "a block of {} threads was asked for, and with its registers the kernel can have {}",
                config.threads_per_block(),
                self.max_threads()
            )));
        }
        let limit = self.dynamic_shared_limit(config.shared_bytes)?;
        if config.shared_bytes > limit {
            return Err(self.refuse(format!(
                "{} bytes of dynamic shared memory were asked for, and {limit} are allowed; \
                 set_max_dynamic_shared raises that",
                config.shared_bytes
            )));
        }
        if stream.context() != self.context() {
            return Err(DriverError::ForeignStream {
                stream_device: stream.context().device().ordinal(),
                context_device: self.context().device().ordinal(),
            });
        }
        let properties = self.context().properties();
        if config.cluster.is_some() && !properties.cluster_launch {
            return Err(DriverError::Unsupported {
                device: properties.name.clone(),
                what: "cluster launch",
                needs: "compute capability 9.0",
            });
        }
        Ok(())
    }
}

/// Parameters packed as PTX lays them out: each at the next multiple of its alignment, no padding at the end.
///
/// ```
/// use flashcore_driver::ParamBuffer;
///
/// let mut params = ParamBuffer::new();
/// params.push_u32(7)?.push_u64(0x1000)?; // .param .u32, .param .u64: the second one starts at byte 8
/// assert_eq!(params.as_bytes().len(), 16);
/// # Ok::<(), flashcore_driver::DriverError>(())
/// ```
#[derive(Clone)]
#[repr(align(64))]
pub struct ParamBuffer {
    bytes: [u8; ParamBuffer::CAPACITY],
    len: usize,
}

impl ParamBuffer {
    /// What every GPU accepts: 4 KB, less the part that the driver uses itself.
    pub const CAPACITY: usize = 4096;

    /// No parameters yet.
    pub fn new() -> Self {
        Self { bytes: [0; Self::CAPACITY], len: 0 }
    }

    /// The packed bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Adds a 32-bit integer.
    pub fn push_u32(&mut self, value: u32) -> Result<&mut Self, DriverError> {
        self.push(&value.to_ne_bytes(), 4)
    }

    /// Adds a 64-bit integer or an address.
    pub fn push_u64(&mut self, value: u64) -> Result<&mut Self, DriverError> {
        self.push(&value.to_ne_bytes(), 8)
    }

    /// Adds a 32-bit float.
    pub fn push_f32(&mut self, value: f32) -> Result<&mut Self, DriverError> {
        self.push(&value.to_ne_bytes(), 4)
    }

    /// Adds a tensor map by value (`.param .align 64 .b8 name[128]`).
    pub fn push_tensor_map(&mut self, map: &TensorMap) -> Result<&mut Self, DriverError> {
        self.push(map.as_bytes(), align_of::<TensorMap>())
    }

    /// Adds bytes at the next multiple of `align`, which is a power of two.
    pub fn push(&mut self, value: &[u8], align: usize) -> Result<&mut Self, DriverError> {
        let offset = self.len.next_multiple_of(align.max(1));
        let Some(target) = self.bytes.get_mut(offset..offset + value.len()) else {
            return Err(DriverError::OutOfBounds {
                what: "a kernel parameter",
                offset,
                bytes: value.len(),
                len: Self::CAPACITY,
            });
        };
        target.copy_from_slice(value);
        self.len = offset + value.len();
        Ok(self)
    }
}

impl Default for ParamBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for ParamBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ParamBuffer").field(&self.as_bytes()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_aligned_to_their_size_and_not_padded_at_the_end() {
        let mut params = ParamBuffer::new();
        params.push_u32(1).unwrap().push_u64(2).unwrap().push_f32(1.0).unwrap();
        let mut expected = vec![1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
        expected.extend(1f32.to_ne_bytes());
        assert_eq!(params.as_bytes(), expected);
    }

    #[test]
    fn a_tensor_map_stands_at_a_multiple_of_64() {
        let mut params = ParamBuffer::new();
        params.push_u64(1).unwrap().push_tensor_map(&TensorMap::zeroed()).unwrap();
        assert_eq!(params.as_bytes().len(), 64 + 128);
        assert_eq!(align_of::<ParamBuffer>(), 64);
    }

    #[test]
    fn too_many_parameters_are_an_error_and_leave_the_buffer_as_it_was() {
        let mut params = ParamBuffer::new();
        params.push(&[0; ParamBuffer::CAPACITY - 4], 1).unwrap();
        assert!(matches!(params.push_u64(1), Err(DriverError::OutOfBounds { .. })));
        params.push_u32(1).unwrap();
        assert_eq!(params.as_bytes().len(), ParamBuffer::CAPACITY);
    }

    #[test]
    fn a_dimension_of_zero_is_refused() {
        assert!(LaunchConfig::new([0, 1, 1], [32, 1, 1]).fault().is_some());
        assert!(LaunchConfig::new([1, 1, 1], [32, 0, 1]).fault().is_some());
        assert!(LaunchConfig::new([1, 1, 1], [32, 1, 1]).fault().is_none());
    }

    #[test]
    fn a_cluster_must_divide_the_grid() {
        let grid = LaunchConfig::new([6, 1, 1], [32, 1, 1]);
        let with = |cluster| LaunchConfig { cluster: Some(cluster), ..grid }.fault();
        assert!(with([2, 1, 1]).is_none());
        assert!(with([4, 1, 1]).is_some_and(|text| text.contains("[4, 1, 1]")));
        assert!(with([2, 2, 1]).is_some());
        assert!(with([0, 1, 1]).is_some());
    }

    #[test]
    fn a_configuration_reaches_the_driver_with_one_attribute_for_each_wish() {
        let config = LaunchConfig {
            shared_bytes: 1024,
            cluster: Some([2, 3, 1]),
            programmatic: true,
            priority: Some(-5),
            ..LaunchConfig::new([4, 6, 1], [64, 2, 1])
        };
        config.with_raw(std::ptr::without_provenance_mut(0x55), |raw| {
            // SAFETY: the closure is given a live configuration with `num_attrs` attributes.
            let (raw, attributes) = unsafe {
                let raw = &*raw;
                (raw, std::slice::from_raw_parts(raw.attrs, raw.num_attrs as usize))
            };
            assert_eq!((raw.grid_dim_x, raw.grid_dim_y, raw.grid_dim_z), (4, 6, 1));
            assert_eq!((raw.block_dim_x, raw.block_dim_y, raw.block_dim_z), (64, 2, 1));
            assert_eq!((raw.shared_mem_bytes, raw.stream.addr()), (1024, 0x55));
            assert_eq!(attributes.iter().map(|a| a.id).collect::<Vec<_>>(), [4, 6, 8]);
            // SAFETY: each id says which member was written.
            unsafe {
                assert_eq!(attributes[0].value.cluster_dim, [2, 3, 1]);
                assert_eq!(attributes[1].value.programmatic_stream_serialization_allowed, 1);
                assert_eq!(attributes[2].value.priority, -5);
            }
        });
        assert!(!config.is_plain());
        assert!(LaunchConfig::new([1; 3], [1; 3]).is_plain());
    }
}
