//! The contract of a call: tensors and problem fit each other, or the call is refused with the reason.

use crate::{
    DType, Error, Name, Problem, Result,
    tensor::{DeviceLengths, Raw, Tensor, TensorMut},
};

/// The tensors of one call, checked against its problem.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub problem: Problem,
    pub q: Raw,
    pub k: Raw,
    pub v: Raw,
    pub o: Raw,
    pub lse: Option<Raw>,
    pub key_lengths: Option<&'a [u32]>,
    /// The address of key lengths that lie beside the tensors, in a GPU's memory.
    pub device_lengths: Option<u64>,
}

/// Checks that the inputs fit the problem that was read off them.
pub(crate) fn check_inputs(problem: &Problem, q: &Tensor<'_>, k: &Tensor<'_>, v: &Tensor<'_>) -> Result<()> {
    for (tensor, given) in [(Name::K, k.dtype()), (Name::V, v.dtype())] {
        if given != problem.dtype {
            return Err(Error::DTypeMismatch { tensor, given, expected: problem.dtype });
        }
    }
    let [batch, heads, len_k, _] = k.shape();
    let sizes = [
        (Name::K, "batch", batch, problem.batch, Name::Q),
        (Name::K, "head_dim", k.shape()[3], q.shape()[3], Name::Q),
        (Name::V, "batch", v.shape()[0], problem.batch, Name::Q),
        (Name::V, "heads", v.shape()[1], heads, Name::K),
        (Name::V, "length", v.shape()[2], len_k, Name::K),
    ];
    for (tensor, what, given, expected, other) in sizes {
        if given != expected {
            return Err(Error::SizeMismatch { tensor, what, given, expected, other });
        }
    }
    Ok(())
}

/// Checks the key lengths against batch and keys.
pub(crate) fn check_key_lengths(problem: &Problem, lengths: &[u32]) -> Result<()> {
    if lengths.len() != problem.batch {
        return Err(Error::KeyLengthCount { given: lengths.len(), batch: problem.batch });
    }
    match lengths.iter().enumerate().find(|&(_, &len)| len as usize > problem.len_k) {
        Some((entry, &given)) => Err(Error::KeyLength { entry, given, len_k: problem.len_k }),
        None => Ok(()),
    }
}

/// Checks what is known of key lengths on a GPU against batch and keys.
pub(crate) fn check_device_lengths(problem: &Problem, lengths: &DeviceLengths<'_>) -> Result<()> {
    if lengths.len() != problem.batch {
        return Err(Error::KeyLengthCount { given: lengths.len(), batch: problem.batch });
    }
    if lengths.most() as usize > problem.len_k {
        return Err(Error::KeyLengthBound { given: lengths.most(), len_k: problem.len_k });
    }
    Ok(())
}

/// Checks that the outputs fit the problem and overlap nothing.
pub(crate) fn check_outputs(
    problem: &Problem,
    inputs: [&Tensor<'_>; 3],
    o: &TensorMut<'_>,
    lse: Option<&TensorMut<'_>>,
) -> Result<()> {
    let Problem { batch, heads_q, len_q, head_dim_v, .. } = *problem;
    let o_output = (Name::O, o, problem.dtype, [batch, heads_q, len_q, head_dim_v]);
    let lse_output = lse.map(|lse| (Name::Lse, lse, DType::F32, [batch, heads_q, len_q, 1]));
    let names = ["batch", "heads", "length", "head_dim"];
    for (tensor, output, dtype, shape) in [o_output].into_iter().chain(lse_output) {
        if output.dtype() != dtype {
            return Err(Error::DTypeMismatch { tensor, given: output.dtype(), expected: dtype });
        }
        for ((&what, given), expected) in names.iter().zip(output.shape()).zip(shape) {
            if given != expected {
                let other = if what == "head_dim" && tensor == Name::O { Name::V } else { Name::Q };
                return Err(Error::SizeMismatch { tensor, what, given, expected, other });
            }
        }
        for (other, input) in [Name::Q, Name::K, Name::V].into_iter().zip(inputs) {
            if overlap(&output.raw, &input.raw) {
                return Err(Error::Aliasing { output: tensor, other });
            }
        }
    }
    if let Some(lse) = lse
        && overlap(&o.raw, &lse.raw)
    {
        return Err(Error::Aliasing { output: Name::Lse, other: Name::O });
    }
    Ok(())
}

fn overlap(a: &Raw, b: &Raw) -> bool {
    let (a_span, b_span) = (a.span(), b.span());
    a.place == b.place && !a_span.is_empty() && a_span.start < b_span.end && b_span.start < a_span.end
}
