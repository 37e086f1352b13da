//! Key lengths: a list on the host, or an array on the GPU that the call reads where it lies. And where sequences are that are
//! packed or in pages.

use flashcore::{Attention, Name, Pages, Starts};
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

/// Starts of queries and of keys, and a table of pages, each with the most rows that a sequence has.
pub struct Places<'py> {
    q: Option<(Array<'py>, usize)>,
    k: Option<(Array<'py>, usize)>,
    /// Whether keys begin anywhere, and end where key lengths say.
    apart: bool,
    pages: Option<(Array<'py>, usize)>,
}

/// The same as they come: arrays of int32, or None.
type Given<'py> = (Option<Numbers<'py>>, Option<(Bound<'py, PyAny>, usize, bool)>, Option<Numbers<'py>>);

/// An array of int32, and a bound.
type Numbers<'py> = (Bound<'py, PyAny>, usize);

impl<'py> Places<'py> {
    /// Reads a tuple of starts of queries, starts of keys, and pages: each an array of int32 and the most rows that a sequence
    /// has, or None. Behind those of keys comes whether they need not rise.
    pub fn read(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        let (q, k, pages): Given<'py> = given.extract()?;
        let apart = k.as_ref().is_some_and(|(.., apart)| *apart);
        let k = k.map(|(starts, most, _)| (starts, most));
        let read = |given: Option<Numbers<'py>>, name| {
            given.map(|(array, most)| Ok::<_, PyErr>((Array::read(&array, name)?, most))).transpose()
        };
        Ok(Self {
            q: read(q, Name::QStarts)?,
            k: read(k, Name::KStarts)?,
            apart,
            pages: read(pages, Name::Pages)?,
        })
    }

    /// The call with sequences that are there.
    pub fn apply<'a>(&'a self, py: Python<'_>, attention: &Attention<'a>) -> PyResult<Attention<'a>> {
        let mut placed = *attention;
        if let Some((starts, most)) = &self.q {
            placed = placed.packed_queries(Starts::of(&starts.indices(py, Name::QStarts)?, *most));
        }
        if let Some((starts, most)) = &self.k {
            let starts = starts.indices(py, Name::KStarts)?;
            let of = if self.apart { Starts::apart } else { Starts::of };
            placed = placed.packed_keys(of(&starts, *most));
        }
        if let Some((table, most)) = &self.pages {
            placed = placed.paged(Pages::new(&table.indices(py, Name::Pages)?).with_most_keys(*most));
        }
        Ok(placed)
    }

    /// The most keys of a sequence, where keys do not lie as dense ones.
    pub fn most_keys(&self) -> Option<usize> {
        self.k.as_ref().or(self.pages.as_ref()).map(|(_, most)| *most)
    }
}
