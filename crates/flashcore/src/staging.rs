//! Host tensors on a device that has its own memory: copied in, computed, copied out.
//!
//! This is the convenient way, not the fast one: tensors that already lie on the device are used where they are.

use crate::{Layout, Result, contract::Call, plan::Bindings, signature::Role, tensor::Raw};

/// A device's memory, as much of it as staging needs.
pub(crate) trait Memory {
    /// Copies bytes to memory of their own and returns its address.
    fn upload(&mut self, name: &str, bytes: &[u8]) -> Result<u64>;
    /// Copies key lengths to memory of their own and returns its address.
    fn lengths(&mut self, lengths: &[u32]) -> Result<u64> {
        let bytes: Vec<u8> = lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
        self.upload("key lengths", &bytes)
    }
    /// Memory whose content is not set.
    fn reserve(&mut self, name: &str, len: usize) -> Result<u64>;
    /// What lies at an address.
    fn download(&mut self, address: u64, out: &mut [u8]) -> Result<()>;
}

/// Copies the inputs in, runs, and copies the outputs out.
pub(crate) fn run<M: Memory>(
    memory: &mut M,
    call: &Call<'_>,
    launch: impl FnOnce(&mut M, &Bindings) -> Result<()>,
) -> Result<()> {
    let signature = call.problem.signature();
    let mut bindings = Bindings::default();
    for parameter in &signature {
        let (name, raw) = (parameter.name, &call.tensors[parameter.name]);
        let (address, layout) = match parameter.role {
            Role::In | Role::Changed => {
                let (bytes, layout) = read(raw, parameter.alignment);
                (memory.upload(&name.to_string(), &bytes)?, layout)
            }
            // What belongs to no sequence stays as it is.
            Role::Out if !call.problem.is_dense() => {
                (memory.upload(&name.to_string(), &raw.rows())?, Layout::bhsd(raw.layout.shape))
            }
            Role::Out => {
                let layout = Layout::ordered_like(raw.layout.shape, &raw.layout);
                (memory.reserve(&name.to_string(), bytes_of(raw, &layout))?, layout)
            }
        };
        bindings.tensors.set(name, (address, layout));
    }
    bindings.key_lengths = call.key_lengths.map(|lengths| memory.lengths(lengths)).transpose()?;
    launch(memory, &bindings)?;
    for parameter in signature.changed().chain(signature.outputs()) {
        let (raw, (address, layout)) = (&call.tensors[parameter.name], bindings.tensors[parameter.name]);
        let mut bytes = vec![0; layout.reach().unwrap_or(0) * raw.dtype.size()];
        memory.download(address, &mut bytes)?;
        raw.write_rows(&bytes, &layout);
    }
    Ok(())
}

fn bytes_of(raw: &Raw, layout: &Layout) -> usize {
    layout.elements().unwrap_or(0) * raw.dtype.size()
}

/// The bytes of a host tensor: as they lie, where a kernel can read them so; else row by row.
fn read(raw: &Raw, alignment: usize) -> (Vec<u8>, Layout) {
    let size = raw.dtype.size();
    let strides = &raw.layout.strides[..3];
    if strides.iter().all(|stride| (stride * size).is_multiple_of(alignment)) {
        return (raw.bytes().to_vec(), raw.layout);
    }
    (raw.rows(), Layout::bhsd(raw.layout.shape))
}
