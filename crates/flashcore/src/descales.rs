//! Descales: what the stored numbers of 8-bit q, k and v are to be multiplied by.

use std::marker::PhantomData;

use crate::{Error, Name, Place, Problem, Result, Tensor, signature::PerTensor, tensor::Raw};

/// What the stored numbers of 8-bit q, k and v are to be multiplied by: `real = stored · descale`. Each is a tensor of f32
/// with one number per batch entry and kv head, of any strides; one that is not given is 1. Those of q are by kv head too:
/// the query heads of a group share theirs.
///
/// ```
/// use flashcore::{Attention, DType, Descales, Device, F8E4M3, Tensor};
///
/// let stored = [F8E4M3::from_f32(0.5); 2 * 4 * 16];
/// let q = Tensor::new(&stored, &[1, 2, 4, 16])?;
/// let v_descale = Tensor::descale(&[3.0, 0.25], [1, 2])?; // one per head
/// let attention = Attention::new().descales(Descales::new().v(&v_descale));
/// let out = attention.run(&Device::cpu(), &q, &q, &q)?;
/// assert_eq!(out.o.dtype(), DType::BF16);
/// assert_eq!((out.o.to_f32()[0], out.o.to_f32()[4 * 16]), (1.5, 0.125));
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Descales<'t> {
    /// Of q, k and v.
    tensors: [Option<Raw>; 3],
    lifetime: PhantomData<&'t [f32]>,
}

impl<'t> Descales<'t> {
    /// All of them 1.
    pub fn new() -> Self {
        Self::default()
    }

    /// Those of q, k and v.
    pub fn of(tensors: [&Tensor<'t>; 3]) -> Self {
        Self::some_of(tensors.map(Some))
    }

    /// Those of q, k and v that there are.
    pub fn some_of(tensors: [Option<&Tensor<'t>>; 3]) -> Self {
        Self { tensors: tensors.map(|tensor| tensor.map(|tensor| tensor.raw)), lifetime: PhantomData }
    }

    /// With descales of the queries.
    pub fn q(self, descale: &Tensor<'t>) -> Self {
        self.with(0, descale)
    }

    /// With descales of the keys.
    pub fn k(self, descale: &Tensor<'t>) -> Self {
        self.with(1, descale)
    }

    /// With descales of the values.
    pub fn v(self, descale: &Tensor<'t>) -> Self {
        self.with(2, descale)
    }

    fn with(mut self, of: usize, descale: &Tensor<'t>) -> Self {
        self.tensors[of] = Some(descale.raw);
        self
    }

    /// One of them by its name, if it was given.
    pub fn get(&self, name: Name) -> Option<Tensor<'t>> {
        let of = Name::DESCALES.into_iter().position(|it| it == name)?;
        self.tensors[of].map(Tensor::of)
    }

    /// Which of q, k and v have some.
    pub(crate) fn given(&self) -> [bool; 3] {
        self.tensors.map(|tensor| tensor.is_some())
    }

    /// Those of a call.
    pub(crate) fn among(tensors: &PerTensor<Raw>) -> Self {
        Self { tensors: Name::DESCALES.map(|name| tensors.get(name).copied()), lifetime: PhantomData }
    }

    /// Puts them among the tensors of a call.
    pub(crate) fn into_tensors(self, tensors: &mut PerTensor<Raw>) {
        for (name, raw) in Name::DESCALES.into_iter().zip(self.tensors) {
            if let Some(raw) = raw {
                tensors.set(name, raw);
            }
        }
    }

    /// Those of q, k and v for a batch entry and a kv head. Panics off the host.
    pub fn at(&self, batch: usize, head_kv: usize) -> [f32; 3] {
        self.tensors.map(|raw| {
            let mut descale = [1.0];
            if let Some(raw) = raw {
                raw.read_row(batch, head_kv, 0, &mut descale);
            }
            descale[0]
        })
    }

    /// Checks the numbers of those that lie on the host.
    pub(crate) fn check(&self, problem: &Problem) -> Result<()> {
        for (tensor, raw) in Name::DESCALES.into_iter().zip(self.tensors) {
            if raw.is_none_or(|raw| raw.place != Place::Host) {
                continue;
            }
            let only = Self { tensors: [raw, None, None], lifetime: PhantomData };
            for (entry, head) in (0..problem.batch).flat_map(|b| (0..problem.heads_kv).map(move |h| (b, h))) {
                let [given, ..] = only.at(entry, head);
                if !(given.is_finite() && given > 0.0) {
                    return Err(Error::Descale { tensor, entry, head, given });
                }
            }
        }
        Ok(())
    }
}
