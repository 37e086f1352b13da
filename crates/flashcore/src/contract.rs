//! The contract of a call: tensors and problem fit each other, or the call is refused with the reason.

use crate::{
    Error, Name, Problem, Result, Sequences, append,
    layouts::{self, Lie, View},
    signature::{Parameter, PerTensor, Role, Rows},
    tensor::{DeviceLengths, Raw},
};

/// The tensors of one call, checked against its problem.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub problem: Problem,
    pub tensors: PerTensor<Raw>,
    pub key_lengths: Option<&'a [u32]>,
    /// The address of key lengths that lie beside the tensors, in a GPU's memory.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub device_lengths: Option<u64>,
}

impl Call<'_> {
    pub fn q(&self) -> View<'_> {
        self.of_queries(Name::Q)
    }

    pub fn k(&self) -> View<'_> {
        self.of_keys(Name::K)
    }

    pub fn v(&self) -> View<'_> {
        self.of_keys(Name::V)
    }

    pub fn o(&self) -> View<'_> {
        self.of_queries(Name::O)
    }

    pub fn lse(&self) -> Option<View<'_>> {
        self.some_of_queries(Name::Lse)
    }

    /// A tensor with a row for each query.
    pub fn of_queries(&self, name: Name) -> View<'_> {
        View { raw: &self.tensors[name], lie: Lie::of_queries(&self.problem, &self.tensors) }
    }

    /// The same, if the call has it.
    pub fn some_of_queries(&self, name: Name) -> Option<View<'_>> {
        self.tensors.get(name).map(|_| self.of_queries(name))
    }

    /// A tensor with a row for each key.
    pub fn of_keys(&self, name: Name) -> View<'_> {
        View { raw: &self.tensors[name], lie: Lie::of_keys(&self.problem, &self.tensors) }
    }

    /// Its sequences, as what lies on the host says.
    pub fn sequences(&self) -> Sequences<'_> {
        Sequences::among(&self.problem, &self.tensors, self.key_lengths)
    }

    /// Where the tensors lie.
    #[cfg(feature = "cuda")]
    pub fn place(&self) -> crate::Place {
        self.tensors[Name::Q].place
    }
}

/// Checks the tensors of a role, inputs or outputs, against the problem that was read off the inputs: dtypes, sizes, and that
/// nothing that is written overlaps another tensor.
pub(crate) fn check(problem: &Problem, tensors: &PerTensor<Raw>, role: Role) -> Result<()> {
    let signature = problem.signature();
    let given = |parameter: &Parameter| tensors.get(parameter.name).map(|raw| (*parameter, *raw));
    for (Parameter { name, role: own, dtype, shape, decided_by, rows, .. }, raw) in
        signature.iter().filter(|it| (it.role == Role::Out) == (role == Role::Out)).filter_map(given)
    {
        if raw.dtype != dtype {
            return Err(Error::DTypeMismatch { tensor: name, given: raw.dtype, expected: dtype });
        }
        let what = ["batch", "heads", "length", "head_dim"];
        for (dim, (given, expected)) in raw.layout.shape.into_iter().zip(shape).enumerate() {
            if given != expected {
                let (mut what, other) = (what[dim], decided_by[dim]);
                if (rows, dim) == (Rows::Places, 3) {
                    what = "entries";
                }
                return Err(Error::SizeMismatch { tensor: name, what, given, expected, other });
            }
        }
        if own != Role::In {
            let place = signature.iter().take_while(|other| other.name != name).count();
            let behind = if own == Role::Changed { place + 1 } else { usize::MAX };
            let before = signature.iter().take(place);
            for (other, theirs) in before.chain(signature.iter().skip(behind)).filter_map(given) {
                // Keys and values may be halves of one cache.
                let halves =
                    own == Role::Changed && other.role == Role::Changed && append::apart(&theirs, &raw);
                if overlap(&raw, &theirs) && !halves {
                    return Err(Error::Aliasing { output: name, other: other.name });
                }
            }
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

/// Checks where the sequences of a call are, and where those of an append will be, as far as the host knows.
pub(crate) fn check_places(
    problem: &Problem,
    tensors: &PerTensor<Raw>,
    key_lengths: Option<&[u32]>,
) -> Result<()> {
    let Some(before) = key_lengths.filter(|_| problem.append.is_some()) else {
        return layouts::check(problem, tensors, key_lengths);
    };
    append::check(problem, tensors, before)?;
    layouts::check(problem, tensors, Some(&append::lengths_after(problem, tensors, before)))
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

fn overlap(a: &Raw, b: &Raw) -> bool {
    let (a_span, b_span) = (a.span(), b.span());
    a.place == b.place && !a_span.is_empty() && a_span.start < b_span.end && b_span.start < a_span.end
}
