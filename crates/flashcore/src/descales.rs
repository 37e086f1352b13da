//! Descales: what the stored numbers of 8-bit q, k and v are to be multiplied by.

use std::marker::PhantomData;

use rayon::prelude::*;

use crate::{
    DType, Error, Layout, Name, Place, Problem, Result, Storage, Tensor, TensorBuf, contract::Call,
    signature::PerTensor, tensor::Raw,
};

/// What the stored numbers of 8-bit q, k and v are to be multiplied by: `real = stored · descale`. Each is a tensor of f32
/// with one number per batch entry and kv head, of any strides; one that is not given is 1. Those of q are by kv head too:
/// the query heads of a group share theirs. Keys and values may have [a descale per block of keys](Self::per_block).
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
    /// The keys of a block that has descales of its own.
    keys: Option<usize>,
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
        Self {
            tensors: tensors.map(|tensor| tensor.map(|tensor| tensor.raw)),
            keys: None,
            lifetime: PhantomData,
        }
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

    /// Those of keys and values are for each block of so many keys, counted from the first: tensors of (batch, kv heads, blocks,
    /// 1).
    ///
    /// ```
    /// use flashcore::{Attention, Descales, Device, F8E4M3, Tensor};
    ///
    /// let stored = [F8E4M3::from_f32(0.5); 3 * 16];
    /// let (q, kv) = (Tensor::new(&stored[..16], &[1, 1, 1, 16])?, Tensor::new(&stored, &[1, 1, 3, 16])?);
    /// let of_blocks = [2.0_f32, 8.0]; // of keys 0 and 1, and of key 2
    /// let v_descale = Tensor::new(&of_blocks, &[1, 1, 2, 1])?;
    /// let attention = Attention::new().descales(Descales::new().v(&v_descale).per_block(2));
    /// let out = attention.run(&Device::cpu(), &q, &kv, &kv)?;
    /// assert_eq!(out.o.to_f32(), [2.0; 16]); // the mean of 1, 1 and 4
    /// # Ok::<(), flashcore::Error>(())
    /// ```
    pub fn per_block(self, keys: usize) -> Self {
        Self { keys: Some(keys), ..self }
    }

    /// The keys of a block that has descales of its own.
    pub(crate) fn keys(&self) -> Option<usize> {
        self.keys
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
        Self {
            tensors: Name::DESCALES.map(|name| tensors.get(name).copied()),
            keys: None,
            lifetime: PhantomData,
        }
    }

    /// Puts them among the tensors of a call.
    pub(crate) fn into_tensors(self, tensors: &mut PerTensor<Raw>) {
        for (name, raw) in Name::DESCALES.into_iter().zip(self.tensors) {
            if let Some(raw) = raw {
                tensors.set(name, raw);
            }
        }
    }

    /// Those of q, k and v for a batch entry, a kv head and a [block of keys](Problem::descale_block); those that are for all
    /// keys are for every block. Panics off the host.
    pub fn at(&self, batch: usize, head_kv: usize, block: usize) -> [f32; 3] {
        self.tensors.map(|raw| {
            let mut descale = [1.0];
            match raw {
                Some(raw) if raw.layout.shape[2] == 1 => raw.read_row(batch, head_kv, 0, &mut descale),
                Some(raw) if block < raw.layout.shape[2] => raw.read_row(batch, head_kv, block, &mut descale),
                _ => {}
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
            let only = Self { tensors: [raw, None, None], keys: None, lifetime: PhantomData };
            let blocks = raw.map_or(1, |raw| raw.layout.shape[2]);
            for (entry, head) in (0..problem.batch).flat_map(|b| (0..problem.heads_kv).map(move |h| (b, h))) {
                for block in 0..blocks {
                    let [given, ..] = only.at(entry, head, block);
                    if !(given.is_finite() && given > 0.0) {
                        return Err(Error::Descale { tensor, entry, head, given });
                    }
                }
            }
        }
        Ok(())
    }
}

/// What is rounded to f8 for a number that is to be stored under a descale. It is divided in f32, and every NaN becomes the
/// positive one, so that codes are the same bits as those of the kernels that append.
pub(crate) fn to_store(x: f32, descale: f32) -> f32 {
    let stored = x / descale;
    if stored.is_nan() { f32::NAN } else { stored }
}

/// Makes of a call whose blocks of keys have descales of their own one whose keys and values, in f32, are what is stored times
/// its descale, for an engine on the host.
pub(crate) fn applied(call: &Call<'_>, engine: impl FnOnce(&Call<'_>)) -> Result<()> {
    let descales = Descales::among(&call.tensors);
    let wide = |raw: &Raw, of: usize| {
        let [_, heads, len, width] = raw.layout.shape;
        let mut to = TensorBuf::zeros(DType::F32, Layout::bhsd(raw.layout.shape))?;
        if let Storage::F32(numbers) = to.storage_mut() {
            numbers.par_chunks_mut(width).enumerate().for_each(|(i, row)| {
                let (b, h, s) = (i / (heads * len), i / len % heads, i % len);
                raw.read_row(b, h, s, row);
                let descale = descales.at(b, h, call.problem.descale_block(s))[of];
                for x in row {
                    *x *= descale;
                }
            });
        }
        Ok::<_, Error>(to)
    };
    let (k, v) = (wide(&call.tensors[Name::K], 1)?, wide(&call.tensors[Name::V], 2)?);
    let tensors = call.tensors.with(Name::K, k.view().raw).with(Name::V, v.view().raw);
    let [of_q, ..] = call.problem.descales;
    let problem = Problem { descales: [of_q, false, false], descale_keys: None, ..call.problem };
    engine(&Call { problem, tensors: tensors.without([Name::KDescale, Name::VDescale]), ..*call });
    Ok(())
}
