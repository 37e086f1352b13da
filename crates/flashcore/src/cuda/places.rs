//! Starts, tables and key lengths that lie in a GPU's memory, brought to the host to be checked.
#![allow(unsafe_code)] // Reads from addresses that the caller of a call answers for.

use super::Cuda;
use crate::{
    DType, Layout, Result, TensorBuf,
    contract::{Call, check_key_lengths, check_places},
    signature::{PerTensor, Rows},
    tensor::{Raw, Storage},
};

impl Cuda {
    /// Waits for the stream, and checks what the places of a call's sequences are then.
    pub(crate) fn check_places(&self, call: &Call<'_>) -> Result<()> {
        self.check_memory(call)?;
        let mut kept = Vec::new();
        let mut names = Vec::new();
        for of in call.problem.signature().iter().filter(|of| of.rows == Rows::Places) {
            let raw = &call.tensors[of.name];
            let shape = raw.layout.shape;
            let [rows, .., entries] = shape;
            let stride = raw.layout.strides[0];
            let numbers: Vec<i32> = (0..rows)
                .map(|row| self.integers(raw.ptr as u64 + (row * stride * DType::I32.size()) as u64, entries))
                .collect::<Result<Vec<_>>>()?
                .concat();
            let layout = Layout { shape, strides: [entries, 0, 0, 1] };
            let mut host = TensorBuf::zeros(DType::I32, layout)?;
            if let Storage::I32(to) = host.storage_mut() {
                to.iter_mut().zip(numbers).for_each(|(to, x)| *to = x);
            }
            kept.push(host);
            names.push(of.name);
        }
        let lengths = call.device_lengths.map(|at| self.integers(at, call.problem.batch)).transpose()?;
        let lengths: Option<Vec<u32>> = lengths.map(|all| all.into_iter().map(|len| len as u32).collect());
        let lengths = lengths.as_deref().or(call.key_lengths);
        if let Some(lengths) = lengths {
            check_key_lengths(&call.problem, lengths)?;
        }
        let on_host = names.into_iter().zip(&mut kept);
        let tensors: PerTensor<Raw> =
            on_host.fold(PerTensor::default(), |all, (name, host)| all.with(name, host.view_mut().raw));
        check_places(&call.problem, &tensors, lengths)
    }

    /// Integers from an address on.
    fn integers(&self, address: u64, count: usize) -> Result<Vec<i32>> {
        let mut numbers = vec![0_i32; count];
        if count > 0 {
            // SAFETY: whoever made the tensor promised that there are as many, and the memory was just looked up.
            let copied = unsafe {
                let to = numbers.as_mut_ptr().cast();
                self.stream.copy_to_host_raw(to, address, count * size_of::<i32>())
            };
            copied.map_err(|error| self.error(&error))?;
            self.synchronize()?;
        }
        Ok(numbers)
    }
}
