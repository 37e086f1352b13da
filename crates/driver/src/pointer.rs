//! What an address points to, so that a host pointer, or one of another GPU, is an error and not a lost context.

use crate::api::call;
use crate::context::Context;
use crate::error::{DriverError, PointerFault};
use crate::sys::*;
use std::ffi::{c_int, c_uint, c_void};

/// The kind of memory behind an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Nothing that CUDA knows: ordinary host memory, or memory already freed.
    Unknown,
    /// Page-locked host memory.
    PinnedHost,
    /// Memory of a GPU.
    Device,
    /// Managed memory, which moves between host and GPU.
    Managed,
}

/// What the driver knows about an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PointerInfo {
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The GPU it was allocated on or registered with.
    pub device: Option<usize>,
    /// Whether it was allocated in the context that was asked. Memory from a pool belongs to a GPU, but to
    /// no context.
    pub in_this_context: bool,
    /// The start and length of the allocation around it, where the driver tells. Memory that was put
    /// together from parts (torch's expandable segments) reports one part only.
    pub range: Option<(u64, usize)>,
}

impl Context {
    /// Asks the driver what an address is. Any address may be asked for, valid or not.
    pub fn pointer_info(&self, address: u64) -> Result<PointerInfo, DriverError> {
        let mut owner: CUcontext = std::ptr::null_mut();
        let mut memory_type: c_uint = 0;
        let mut managed: c_uint = 0;
        let mut ordinal: c_int = -1;
        let mut start: CUdeviceptr = 0;
        let mut size: usize = 0;
        let mut attributes = [
            CU_POINTER_ATTRIBUTE_CONTEXT,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_IS_MANAGED,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ];
        let mut values: [*mut c_void; 6] = [
            (&raw mut owner).cast(),
            (&raw mut memory_type).cast(),
            (&raw mut managed).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut start).cast(),
            (&raw mut size).cast(),
        ];
        let _entered = self.enter()?;
        // SAFETY: six attributes, six live locals of at least the size that each attribute has.
        unsafe {
            call!(
                self.driver(),
                cuPointerGetAttributes(
                    attributes.len() as c_uint,
                    attributes.as_mut_ptr(),
                    values.as_mut_ptr(),
                    address
                )
            )
        }?;
        // The flag is one byte in some drivers and an int in others; the rest of the word was zero.
        let kind = match (managed & 0xff, memory_type) {
            (1.., _) => MemoryKind::Managed,
            (_, CU_MEMORYTYPE_DEVICE) => MemoryKind::Device,
            (_, CU_MEMORYTYPE_HOST) => MemoryKind::PinnedHost,
            _ => MemoryKind::Unknown,
        };
        Ok(PointerInfo {
            kind,
            device: if kind == MemoryKind::Unknown { None } else { usize::try_from(ordinal).ok() },
            in_this_context: owner == self.raw(),
            range: (start != 0 && size != 0).then_some((start, size)),
        })
    }

    /// Checks that a kernel in this context may be given the address: device or managed memory of this GPU,
    /// aligned to `align` bytes (a power of two). `what` names it in the error.
    pub fn require_device_pointer(&self, what: &str, address: u64, align: u64) -> Result<(), DriverError> {
        let ordinal = self.device().ordinal();
        let refuse = |fault| Err(DriverError::Pointer { what: what.to_owned(), address, ordinal, fault });
        if address == 0 {
            return refuse(PointerFault::Null);
        }
        if align > 1 && !address.is_multiple_of(align) {
            return refuse(PointerFault::Misaligned(align));
        }
        let info = self.pointer_info(address)?;
        match (info.kind, info.device) {
            (MemoryKind::Unknown, _) => refuse(PointerFault::NotCuda),
            (MemoryKind::PinnedHost, _) => refuse(PointerFault::PinnedHost),
            (MemoryKind::Device, Some(other)) if other != ordinal => refuse(PointerFault::OtherDevice(other)),
            (MemoryKind::Device | MemoryKind::Managed, _) => Ok(()),
        }
    }
}
