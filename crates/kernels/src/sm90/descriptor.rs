//! Descriptors of tiles in shared memory, as `wgmma` takes them.

use flashcore_ptx::{B32, B64, KernelBuilder, Reg};

/// The upper half of every descriptor: a swizzle of 128 bytes, and 1024 bytes from eight rows to the next eight.
const DESCRIPTOR_HIGH: u32 = 0x4000_0040;

/// The lower half of the descriptor of a swizzled tile in shared memory.
pub(crate) struct Descriptor(Reg<B32>);

impl Descriptor {
    /// `leading`: bytes from one panel to the next, where one product spans several.
    pub fn new(k: &mut KernelBuilder, address: Reg<B32>, leading: u32) -> Self {
        // In a cluster, an address has the block's rank in its upper bits, and a descriptor has no room for it.
        let start = k.bfe_u32(address, 4u32, 14u32);
        Self(k.or_b32(start, (leading >> 4) << 16))
    }

    /// Some bytes further.
    pub fn at(&self, k: &mut KernelBuilder, bytes: u32) -> Reg<B64> {
        let low = if bytes == 0 { self.0 } else { k.add_u32(self.0, bytes >> 4) };
        k.pack_b64(low, DESCRIPTOR_HIGH)
    }
}
