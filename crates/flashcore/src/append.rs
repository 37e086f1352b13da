//! A step of decoding: new keys and values go into a cache, turned by their positions, before the queries attend to it.

use std::marker::PhantomData;

use crate::{Error, Name, Pass, Place, Problem, Result, Starts, Tensor, signature::PerTensor, tensor::Raw};

/// What a problem says of keys and values that its call adds to a cache before it attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub struct Appending {
    /// New keys of a sequence; the most of them where sequences differ.
    pub len: usize,
    /// Rows of the tensors of new keys and values, where those of sequences lie one behind the other: see
    /// [`Name::NewStarts`]. Else each sequence has as many.
    pub total: Option<usize>,
    /// How queries and new keys are turned, if they are.
    pub rotary: Option<Turning>,
}

/// What a problem says of rotary embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub struct Turning {
    /// The first elements of a row, which are turned: a multiple of 16.
    pub dim: usize,
    /// Whether neighbours are a pair, rather than elements that are `dim / 2` apart.
    pub interleaved: bool,
    /// Positions that the tables of cosines and sines have.
    pub table: usize,
    /// Whether each sequence says at which position its new keys begin: see [`Name::Positions`]. Else it is their row.
    pub positions: bool,
}

impl Problem {
    /// With new keys and values: the call appends them, and attends to them too. Key lengths are those before.
    pub fn with_append(self, append: Appending) -> Self {
        Self { append: Some(append), key_lengths: true, ..self }
    }

    /// What is left to compute once keys and values are in the cache; the problem itself where there are none.
    pub fn appended(&self) -> Self {
        Self { append: None, ..*self }
    }

    /// Whether a query is turned for its own position, rather than all of a sequence for its first: under every mask.
    pub fn turns_by_row(&self) -> bool {
        let band = self.mask.band();
        band.left.is_some() || band.right.is_some()
    }

    /// What goes with an append.
    pub(crate) fn check_append(&self) -> Result<()> {
        let Some(Appending { rotary, .. }) = self.append else { return Ok(()) };
        let refuse = |what, possible| Err(Error::Append { what, possible });
        if self.pass == Pass::Backward {
            return refuse("an append in a backward pass", "gradients of the cache as it is then");
        }
        if self.dtype.is_f8() || self.quantise.is_some() {
            return refuse(
                "an append with q of f8, or with quantising",
                "q and new keys of f16 or bf16, also to a cache of f8, or of f32",
            );
        }
        if !self.key_lengths {
            return refuse(
                "an append without key lengths",
                "give them: they say where a sequence's new keys go",
            );
        }
        if let Some(Turning { dim, .. }) = rotary
            && (dim == 0 || !dim.is_multiple_of(16) || dim > self.head_dim)
        {
            return refuse(
                "tables of that width for rotary embeddings",
                "half as many cosines and sines as elements are turned, which are a multiple of 16 up to head_dim",
            );
        }
        Ok(())
    }
}

/// The words of an append in a problem's text: `append=4`, `append=4/30` where sequences differ and there are 30 in all,
/// `rotary=64/2048` for 64 elements and tables of 2048 positions, with `/interleaved`, `/positions` or both behind it.
impl std::fmt::Display for Appending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "append={}", self.len)?;
        if let Some(total) = self.total {
            write!(f, "/{total}")?;
        }
        if let Some(Turning { dim, interleaved, table, positions }) = self.rotary {
            write!(f, " rotary={dim}/{table}")?;
            for (word, there) in [("interleaved", interleaved), ("positions", positions)] {
                if there {
                    write!(f, "/{word}")?;
                }
            }
        }
        Ok(())
    }
}

impl Appending {
    /// Of the word behind `append=`.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let (len, total) = text.split_once('/').map_or((text, None), |(len, total)| (len, Some(total)));
        let total = total.map(str::parse).transpose().ok()?;
        Some(Self { len: len.parse().ok()?, total, rotary: None })
    }
}

impl Turning {
    /// Of the word behind `rotary=`.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let mut number = || parts.next()?.parse().ok();
        let mut turning = Self { dim: number()?, table: number()?, interleaved: false, positions: false };
        for word in parts {
            match word {
                "interleaved" => turning.interleaved = true,
                "positions" => turning.positions = true,
                _ => return None,
            }
        }
        Some(turning)
    }

    /// Turns the first elements of a row by the cosines and sines of its position.
    pub(crate) fn turn(&self, row: &mut [f32], cos: &[f32], sin: &[f32]) {
        for (i, (&cos, &sin)) in cos.iter().zip(sin).enumerate() {
            let [a, b] = if self.interleaved { [2 * i, 2 * i + 1] } else { [i, i + self.dim / 2] };
            let [x, y, cos, sin] = [row[a], row[b], cos, sin].map(f64::from);
            // Products of 16-bit floats are exact even in f32, so there is one rounding to f32 here and on a GPU.
            (row[a], row[b]) = ((x * cos - y * sin) as f32, (y * cos + x * sin) as f32);
        }
    }
}

/// New keys and values, which [`Attention::append`](crate::Attention::append) writes into a cache before it attends.
///
/// ```
/// use flashcore::{Append, Attention, Device, Rotary, Tensor, TensorMut};
///
/// // Two sequences with room for 8 keys have 5 and 2 of them, and get one more each.
/// let (mut k_cache, mut v_cache) = (vec![0.5_f32; 2 * 8 * 16], vec![0.25_f32; 2 * 8 * 16]);
/// let (q, k, v) = (vec![1.0_f32; 2 * 16], vec![1.0_f32; 2 * 16], vec![2.0_f32; 2 * 16]);
/// let [q, k, v] = [&q, &k, &v].map(|data| Tensor::new(data, &[2, 1, 1, 16]).unwrap());
/// // cos and sin of 8 positions, for all 16 elements of a row.
/// let angles: Vec<f32> = (0..8 * 8).map(|i| (i / 8) as f32 * 0.1_f32.powi(i % 8)).collect();
/// let [cos, sin] = [f32::cos, f32::sin].map(|of| angles.iter().copied().map(of).collect::<Vec<f32>>());
/// let [cos, sin] = [&cos, &sin].map(|data| Tensor::new(data, &[1, 1, 8, 8]).unwrap());
///
/// let new = Append::new(&k, &v).rotary(Rotary::new(&cos, &sin));
/// let attention = Attention::new().causal().key_lengths(&[5, 2]);
/// let mut k_cache = TensorMut::new(&mut k_cache, &[2, 1, 8, 16])?;
/// let mut v_cache = TensorMut::new(&mut v_cache, &[2, 1, 8, 16])?;
/// let out = attention.append(&Device::cpu(), &new, &q, &mut k_cache, &mut v_cache)?;
/// assert_eq!(out.o.shape(), [2, 1, 1, 16]);
/// let mut value = [0.0; 16];
/// v_cache.as_tensor().read_row(1, 0, 2, &mut value); // the third row of the second sequence
/// assert_eq!(value, [2.0; 16]);
/// # Ok::<(), flashcore::Error>(())
/// ```
///
/// The new key n of a sequence goes to the row behind its key length: row `length + n`, and is turned for that position. A
/// sequence's query i is turned for position `length + i` under a mask, and for `length` without one; q itself stays as it
/// is. Attention then sees `length` and the new keys. Two sequences whose new keys go to the same rows leave either's there.
///
/// The caches may be of [f8](crate::F8E4M3), with q and new keys and values of f16 or bf16, and with
/// [descales](crate::Attention::descales) or without. A number is then turned in f32, divided in f32 by the descale of its sequence,
/// head and block of keys, and rounded once: to the nearest code, of two as near to the even one, beyond the largest to that, and
/// every NaN to the code 0x7F. Descales on the host are finite numbers above 0, or the call is refused; those in a GPU's memory
/// are not looked at, and what is stored is the quotient all the same: under a descale of 0, ±448, or NaN for 0.
///
/// ```
/// use flashcore::{Append, Attention, Descales, Device, F8E4M3, Tensor, TensorMut, half::bf16};
///
/// let (mut k_cache, mut v_cache) = ([F8E4M3::from_f32(0.5); 8 * 16], [F8E4M3::from_f32(0.5); 8 * 16]);
/// let (ones, thousands) = ([bf16::ONE; 16], [bf16::from_f32(1000.0); 16]);
/// let [q, v] = [&ones, &thousands].map(|data| Tensor::new(data, &[1, 1, 1, 16]).unwrap());
/// let v_descale = Tensor::descale(&[4.0], [1, 1])?;
/// let attention = Attention::new().key_lengths(&[3]).descales(Descales::new().v(&v_descale));
/// let mut k_cache = TensorMut::new(&mut k_cache, &[1, 1, 8, 16])?;
/// let mut v_cache = TensorMut::new(&mut v_cache, &[1, 1, 8, 16])?;
/// attention.append(&Device::cpu(), &Append::new(&q, &v), &q, &mut k_cache, &mut v_cache)?;
/// let mut stored = [0.0; 16];
/// v_cache.as_tensor().read_row(0, 0, 3, &mut stored);
/// assert_eq!(stored, [256.0; 16]); // 1000 / 4 lies between 240 and 256
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Append<'t> {
    k: Raw,
    v: Raw,
    starts: Option<Starts<'t>>,
    rotary: Option<Rotary<'t>>,
}

/// Rotary embeddings: tables of cosines and sines, of which queries and new keys take the row of their position.
///
/// x and y of a pair become `x·cos − y·sin` and `y·cos + x·sin`. Pairs are elements half of what is turned apart, or
/// [neighbours](Self::interleaved). What of a row the tables are too narrow for stays as it is.
#[derive(Clone, Copy, Debug)]
pub struct Rotary<'t> {
    cos: Raw,
    sin: Raw,
    interleaved: bool,
    positions: Option<Raw>,
    lifetime: PhantomData<&'t [u8]>,
}

impl<'t> Append<'t> {
    /// As many new keys for each sequence: (batch, kv heads, new, head_dim).
    pub fn new(k: &Tensor<'t>, v: &Tensor<'t>) -> Self {
        Self { k: k.raw, v: v.raw, starts: None, rotary: None }
    }

    /// The new keys of sequences lie one behind the other, (1, kv heads, all new, head_dim), and these starts say where those
    /// of each begin and end.
    pub fn packed(self, starts: Starts<'t>) -> Self {
        Self { starts: Some(starts), ..self }
    }

    /// Queries and new keys are turned by their positions.
    pub fn rotary(self, rotary: Rotary<'t>) -> Self {
        Self { rotary: Some(rotary), ..self }
    }

    /// The same, with nothing turned.
    pub fn without_rotary(self) -> Self {
        Self { rotary: None, ..self }
    }

    /// The rotary embeddings.
    #[doc(hidden)]
    pub fn given_rotary(&self) -> Option<Rotary<'t>> {
        self.rotary
    }

    /// What a problem says of it.
    pub(crate) fn appending(&self) -> Result<Appending> {
        let rows = self.k.layout.shape[2];
        let (len, total) = match self.starts {
            None => (rows, None),
            Some(starts) => {
                starts.check(Name::NewStarts)?;
                (starts.longest(), Some(rows))
            }
        };
        let rotary = self.rotary.map(|Rotary { cos, interleaved, positions, .. }| {
            let [.., table, half] = cos.layout.shape;
            Turning { dim: 2 * half, interleaved, table, positions: positions.is_some() }
        });
        Ok(Appending { len, total, rotary })
    }

    /// Adds its tensors to those of a call.
    pub(crate) fn into_tensors(self, tensors: &mut PerTensor<Raw>) {
        let rotary = self.rotary;
        let given = [
            (Name::NewK, Some(self.k)),
            (Name::NewV, Some(self.v)),
            (Name::NewStarts, self.starts.map(|starts| starts.raw)),
            (Name::Cos, rotary.map(|rotary| rotary.cos)),
            (Name::Sin, rotary.map(|rotary| rotary.sin)),
            (Name::Positions, rotary.and_then(|rotary| rotary.positions)),
        ];
        for (name, raw) in given {
            if let Some(raw) = raw {
                tensors.set(name, raw);
            }
        }
    }
}

impl<'t> Rotary<'t> {
    /// Tables of shape (1, 1, positions, half of the elements that are turned), in the type of q. A pair is an element and
    /// the one half of what is turned behind it, as in GPT-NeoX and Llama.
    pub fn new(cos: &Tensor<'t>, sin: &Tensor<'t>) -> Self {
        Self { cos: cos.raw, sin: sin.raw, interleaved: false, positions: None, lifetime: PhantomData }
    }

    /// A pair is an element with an even place and its neighbour, as in GPT-J.
    pub fn interleaved(self) -> Self {
        Self { interleaved: true, ..self }
    }

    /// The positions of each sequence's first new key and query, as [`Tensor::indices`] of shape [1, batch], where they are
    /// not the key lengths. On a GPU they are read anew at every replay.
    pub fn positions(self, positions: &Tensor<'t>) -> Self {
        Self { positions: Some(positions.raw), ..self }
    }
}

/// How many new keys a sequence has, as far as the host knows.
pub(crate) fn new_keys(append: &Appending, tensors: &PerTensor<Raw>, sequence: usize) -> Option<usize> {
    if append.total.is_none() {
        return Some(append.len);
    }
    let starts = tensors.get(Name::NewStarts).filter(|raw| raw.place == Place::Host)?;
    let ends = &starts.indices()[sequence..sequence + 2];
    Some(ends[1].saturating_sub(ends[0]) as usize)
}

/// Key lengths once the new keys are there; as they are, where a call has none.
pub(crate) fn lengths_after(problem: &Problem, tensors: &PerTensor<Raw>, before: &[u32]) -> Vec<u32> {
    let new = |sequence| problem.append.and_then(|append| new_keys(&append, tensors, sequence)).unwrap_or(0);
    before.iter().enumerate().map(|(sequence, &len)| len.saturating_add(new(sequence) as u32)).collect()
}

/// Checks what is known on the host of an append: that the new keys have room, and that there are tables for their positions
/// and for those of queries.
pub(crate) fn check(problem: &Problem, tensors: &PerTensor<Raw>, before: &[u32]) -> Result<()> {
    let Some(append) = problem.append else { return Ok(()) };
    let positions = tensors.get(Name::Positions);
    for (sequence, &length) in before.iter().enumerate() {
        let Some(new) = new_keys(&append, tensors, sequence) else { continue };
        if length as usize + new > problem.len_k {
            return Err(Error::Room { sequence, length, new, room: problem.len_k });
        }
        let Some(turning) = append.rotary else { continue };
        let first = match positions {
            None => length,
            Some(raw) if raw.place == Place::Host => raw.indices()[sequence],
            Some(_) => continue,
        };
        let queries = queries_on_host(problem, tensors, sequence);
        let past = first as usize + new.max(if problem.turns_by_row() { queries } else { queries.min(1) });
        if past > turning.table {
            return Err(Error::Position { sequence, position: past - 1, table: turning.table });
        }
    }
    Ok(())
}

/// How many queries a sequence has, as far as the host knows; else 0.
fn queries_on_host(problem: &Problem, tensors: &PerTensor<Raw>, sequence: usize) -> usize {
    match tensors.get(Name::QStarts) {
        None => problem.len_q,
        Some(raw) if raw.place == Place::Host => {
            let ends = &raw.indices()[sequence..sequence + 2];
            ends[1].saturating_sub(ends[0]) as usize
        }
        Some(_) => 0,
    }
}

/// Whether a cache of keys and one of values, which share a range of memory, have no element in common: halves of one tensor.
pub(crate) fn apart(k: &Raw, v: &Raw) -> bool {
    let (size, distance) = (k.dtype.size(), (k.ptr as usize).abs_diff(v.ptr as usize));
    let mut both = k.layout;
    both.shape[3] = both.shape[3].max(v.layout.shape[3]);
    both.strides == v.layout.strides
        && distance.is_multiple_of(size)
        && !both.overlaps_when_repeated(2, distance / size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, DType, Device, Layout, TensorMut};

    #[test]
    fn keys_and_values_may_be_halves_of_one_cache_but_not_the_same() {
        // (pages, 2, page, heads, head_dim): 3 pages of 4 keys, of 2 heads.
        let mut data = vec![0.25_f32; 3 * 2 * 4 * 2 * 16];
        let layout = Layout { shape: [3, 2, 4, 16], strides: [2 * 4 * 2 * 16, 16, 2 * 16, 1] };
        let half = 4 * 2 * 16;
        let mut k = TensorMut::strided(&mut data, layout).unwrap();
        let mut v = TensorMut::of(Raw { ptr: k.raw.ptr.wrapping_add(half * DType::F32.size()), ..k.raw });
        let (ones, twos) = ([1.0_f32; 32], [2.0_f32; 32]);
        let [q, twos] = [&ones, &twos].map(|of| Tensor::new(of, &[1, 2, 1, 16]).unwrap());
        let table = Tensor::indices(&[2, 0, 1], [1, 3]).unwrap();
        let attention = Attention::new().paged(crate::Pages::new(&table)).key_lengths(&[5]);
        let new = Append::new(&q, &twos);
        attention.append(&Device::cpu(), &new, &q, &mut k, &mut v).unwrap();
        // The sixth key is the second of page 0, in both halves.
        for (head, dim) in (0..2).flat_map(|head| (0..16).map(move |dim| (head, dim))) {
            let at = 2 * 16 + head * 16 + dim;
            assert_eq!([data[at], data[at + half]], [1.0, 2.0]);
        }
        assert_eq!(data.iter().filter(|&&x| x != 0.25).count(), 2 * 2 * 16);
        let mut k = TensorMut::strided(&mut data, layout).unwrap();
        for off in [0, 16, 4 * 16] {
            let mut v = TensorMut::of(Raw { ptr: k.raw.ptr.wrapping_add(off * DType::F32.size()), ..k.raw });
            let shared = attention.append(&Device::cpu(), &new, &q, &mut k, &mut v);
            assert_eq!(shared.unwrap_err(), Error::Aliasing { output: Name::K, other: Name::V }, "{off}");
        }
    }
}
