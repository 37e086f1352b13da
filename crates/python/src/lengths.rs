//! Key lengths: a list on the host, or an array on the GPU that the call reads where it lies.

use flashcore::{Attention, Name};
use pyo3::{prelude::*, types::PyList};

use crate::{arrays::Array, errors};

/// How many keys each batch entry has.
pub enum Lengths<'py> {
    /// Numbers.
    Host(Vec<u32>),
    /// An array of a GPU, none of whose numbers is above the length of the keys.
    Device(Array<'py>),
}

impl<'py> Lengths<'py> {
    /// Reads a list of integers, or an array of a GPU.
    pub fn read(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = given.py();
        let Ok(list) = given.cast::<PyList>() else {
            return Array::read(given, Name::KeyLengths).map(Self::Device);
        };
        let number = |(entry, item): (usize, Bound<'py, PyAny>)| {
            item.extract::<u32>().map_err(|_| {
                let text = format!(
                    "the key length of batch entry {entry} is {item}, possible are integers from 0 on"
                );
                errors::contract(py, &text)
            })
        };
        list.iter().enumerate().map(number).collect::<PyResult<_>>().map(Self::Host)
    }

    /// The call with these lengths, for keys of length `len_k`.
    pub fn apply<'a>(
        &'a self,
        py: Python<'_>,
        attention: &Attention<'a>,
        len_k: usize,
    ) -> PyResult<Attention<'a>> {
        Ok(match self {
            Self::Host(lengths) => attention.key_lengths(lengths),
            Self::Device(array) => {
                let most = u32::try_from(len_k).unwrap_or(u32::MAX);
                attention.key_lengths_on_device(array.device_lengths(py, most)?)
            }
        })
    }
}
