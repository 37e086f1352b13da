//! Host tensors on a GPU: copied in, computed, copied out.

use flashcore_driver::DeviceBuffer;

use super::Cuda;
use crate::{Result, contract::Call, plan::Bindings, staging};

/// Buffers that live for one staged call.
struct Staged<'a> {
    cuda: &'a Cuda,
    buffers: Vec<DeviceBuffer>,
}

/// Runs a call on host tensors and waits for its end.
pub(super) fn run(cuda: &Cuda, call: &Call<'_>) -> Result<()> {
    let mut memory = Staged { cuda, buffers: Vec::new() };
    staging::run(&mut memory, call, |memory, bindings| {
        let cuda = memory.cuda;
        let ready = cuda.ready(&call.problem)?;
        let workspace = cuda.lease(&ready.plan)?;
        let packed = cuda
            .bind(&ready.plan, &Bindings { workspace: workspace.address, trace: cuda.trace, ..*bindings })?;
        cuda.launch(&ready, &packed)?;
        cuda.synchronize()
    })
}

impl Staged<'_> {
    fn keep(&mut self, buffer: DeviceBuffer) -> u64 {
        let address = buffer.address();
        self.buffers.push(buffer);
        address
    }
}

impl staging::Memory for Staged<'_> {
    fn upload(&mut self, _: &str, bytes: &[u8]) -> Result<u64> {
        let bytes = if bytes.is_empty() { &[0][..] } else { bytes };
        let buffer = self.cuda.stream.upload_new(bytes).map_err(|error| self.cuda.error(&error))?;
        Ok(self.keep(buffer))
    }

    fn lengths(&mut self, lengths: &[u32]) -> Result<u64> {
        let buffer = self.cuda.store_lengths(lengths)?;
        Ok(self.keep(buffer))
    }

    fn reserve(&mut self, _: &str, len: usize) -> Result<u64> {
        let buffer = self.cuda.context().alloc(len.max(1)).map_err(|error| self.cuda.error(&error))?;
        Ok(self.keep(buffer))
    }

    fn download(&mut self, address: u64, out: &mut [u8]) -> Result<()> {
        let buffer = self.buffers.iter().find(|buffer| buffer.address() == address);
        let buffer = buffer.expect("staging downloads what it reserved");
        self.cuda.stream.download(buffer, 0, out).map_err(|error| self.cuda.error(&error))
    }
}
