//! Host tensors on a device that has its own memory: copied in, computed, copied out.
//!
//! This is the convenient way, not the fast one: tensors that already lie on the device are used where they are.

use crate::{
    Layout, Result,
    contract::Call,
    plan::{ALIGNMENT, Addresses},
    tensor::Raw,
};

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
    launch: impl FnOnce(&mut M, &Addresses) -> Result<()>,
) -> Result<()> {
    let mut input = |name: &str, raw: &Raw| {
        let (bytes, layout) = read(raw);
        Ok((memory.upload(name, &bytes)?, layout))
    };
    let (q, k, v) = (input("q", &call.q)?, input("k", &call.k)?, input("v", &call.v)?);
    let key_lengths = call.key_lengths.map(|lengths| memory.lengths(lengths)).transpose()?;
    let mut output = |name: &str, raw: &Raw| {
        let layout = Layout::ordered_like(raw.layout.shape, &raw.layout);
        Ok((memory.reserve(name, layout.elements().unwrap_or(0) * raw.dtype.size())?, layout))
    };
    let o = output("o", &call.o)?;
    let lse = call.lse.as_ref().map(|lse| output("lse", lse)).transpose()?;
    launch(memory, &Addresses { q, k, v, o, lse, key_lengths })?;
    for (raw, (address, layout)) in
        [(Some(call.o), Some(o)), (call.lse, lse)].into_iter().filter_map(|(raw, at)| raw.zip(at))
    {
        let mut bytes = vec![0; layout.elements().unwrap_or(0) * raw.dtype.size()];
        memory.download(address, &mut bytes)?;
        raw.write_rows(&bytes, &layout);
    }
    Ok(())
}

/// The bytes of a host tensor: as they lie, where a kernel can read them so; else row by row.
fn read(raw: &Raw) -> (Vec<u8>, Layout) {
    let size = raw.dtype.size();
    let strides = &raw.layout.strides[..3];
    if strides.iter().all(|stride| (stride * size).is_multiple_of(ALIGNMENT)) {
        return (raw.bytes().to_vec(), raw.layout);
    }
    (raw.rows(), Layout::bhsd(raw.layout.shape))
}
