//! Packed and paged calls: where the rows of each sequence are.
//!
//! A batch entry is a sequence. In a dense tensor each has memory of its own; packed sequences lie one behind the other, and
//! starts say where; the keys of a paged cache lie in pages anywhere in a pool, and a table says in which.

use std::marker::PhantomData;

use crate::{
    Error, Keys, Name, Place, Problem, Queries, Result, Tensor,
    signature::PerTensor,
    tensor::{Layout, Raw},
};

/// Where each of several sequences that lie one behind the other begins, and where the last one ends: `cu_seqlens`, one
/// number more than there are sequences.
///
/// ```
/// use flashcore::{Attention, Device, Starts, Tensor};
///
/// // Two heads of three sequences, of 2, 0 and 3 tokens, as (1, heads, tokens, head_dim).
/// let data: Vec<f32> = (0..2 * 5 * 16).map(|i| (i as f32 * 0.7).sin()).collect();
/// let q = Tensor::new(&data, &[1, 2, 5, 16])?;
/// let starts = Starts::new(&[0, 2, 2, 5])?;
/// let out = Attention::new().causal().packed(starts).run(&Device::cpu(), &q, &q, &q)?;
/// // The first token of each sequence sees itself alone, so its output is its value.
/// let (o, values) = (out.o.to_f32(), q.to_f32());
/// for token in [0, 2] {
///     assert_eq!(o[token * 16..][..16], values[token * 16..][..16]);
/// }
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Starts<'a> {
    pub(crate) raw: Raw,
    longest: usize,
    apart: bool,
    lifetime: PhantomData<&'a [u32]>,
}

impl<'a> Starts<'a> {
    /// On the host; the longest sequence is found there.
    pub fn new(starts: &'a [u32]) -> Result<Self> {
        let longest = starts.windows(2).map(|ends| ends[1].saturating_sub(ends[0])).max().unwrap_or(0);
        Ok(Self::of(&Tensor::indices(starts, [1, starts.len()])?, longest as usize))
    }

    /// A tensor of starts as of [`Tensor::indices`], on the host or in the memory of the GPU where the call runs, with a
    /// bound on how long the longest sequence is, which sizes grids. On a GPU nothing is copied, and a captured call reads
    /// them anew at every replay.
    ///
    /// What lies on the host is checked. What lies on a GPU is not, unless [`Attention::checked`](crate::Attention::checked)
    /// asks for it: starts that fall, that go beyond the tensor, or sequences longer than the bound then compute something
    /// else, and may read and write outside the tensors.
    pub fn of(starts: &Tensor<'a>, longest: usize) -> Self {
        Self { raw: starts.raw, longest, apart: false, lifetime: PhantomData }
    }

    /// Starts of keys that need not rise: sequences lie anywhere in the tensor, in any order and even over each other, and
    /// [`Attention::key_lengths`](crate::Attention::key_lengths), which are needed then, say where each ends. The number behind
    /// the last sequence's is not used. `longest` bounds the key lengths.
    ///
    /// A dense cache whose batch entries are chosen, and whose first rows count for nothing, is such a tensor:
    ///
    /// ```
    /// use flashcore::{Attention, Device, Starts, Tensor};
    ///
    /// // Three entries of four rows, as (entries, rows, heads, head_dim); two sequences are in entries 2 and 0, from row 1 on.
    /// let cache: Vec<f32> = (0..3 * 4).map(|i| i as f32).collect();
    /// let v = Tensor::bshd(&cache, &[1, 3 * 4, 1, 1])?;
    /// let q = Tensor::new(&[0.0_f32, 0.0], &[2, 1, 1, 1])?; // all keys count the same
    /// let starts = Tensor::indices(&[2 * 4 + 1, 1, 0], [1, 3])?;
    /// let attention = Attention::new().packed_keys(Starts::apart(&starts, 4)).key_lengths(&[2, 3]);
    /// let out = attention.run(&Device::cpu(), &q, &v, &v)?;
    /// assert_eq!(out.o.to_f32(), [(9.0 + 10.0) / 2.0, 2.0]);
    /// # Ok::<(), flashcore::Error>(())
    /// ```
    pub fn apart(starts: &Tensor<'a>, longest: usize) -> Self {
        Self { apart: true, ..Self::of(starts, longest) }
    }

    /// Whether they need not rise.
    pub(crate) fn is_apart(&self) -> bool {
        self.apart
    }

    /// How many sequences there are.
    pub fn sequences(&self) -> usize {
        self.raw.layout.shape[3].saturating_sub(1)
    }

    /// The numbers.
    #[doc(hidden)]
    pub fn tensor(&self) -> Tensor<'a> {
        Tensor::of(self.raw)
    }

    /// Whether there is a first entry.
    pub(crate) fn check(&self, tensor: Name) -> Result<()> {
        if self.raw.layout.shape[3] == 0 { Err(Error::NoStarts { tensor }) } else { Ok(()) }
    }

    /// What no sequence is longer than.
    pub fn longest(&self) -> usize {
        self.longest
    }
}

/// Which pages of a pool each sequence of a cache has: a `block_table`.
///
/// k and v are then tensors of shape (pages, kv heads, page, head_dim), of any strides: with heads inside of tokens or
/// around them, K and V apart or in one allocation.
///
/// ```
/// use flashcore::{Attention, Device, Pages, Tensor};
///
/// // A pool of four pages of two tokens; the sequence is in pages 3 and 1, and has three tokens.
/// let pool: Vec<f32> = (0..4 * 2).map(|i| i as f32).collect();
/// let v = Tensor::new(&pool, &[4, 1, 2, 1])?;
/// let q = Tensor::new(&[0.0_f32], &[1, 1, 1, 1])?; // all keys count the same
/// let table = Tensor::indices(&[3, 1], [1, 2])?;
/// let attention = Attention::new().paged(Pages::new(&table)).key_lengths(&[3]);
/// let out = attention.run(&Device::cpu(), &q, &v, &v)?;
/// assert_eq!(out.o.to_f32(), [(6.0 + 7.0 + 2.0) / 3.0]);
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pages<'a> {
    pub(crate) raw: Raw,
    most: Option<usize>,
    lifetime: PhantomData<&'a [u32]>,
}

impl<'a> Pages<'a> {
    /// A table as of [`Tensor::indices`]: a row of page numbers for each sequence, on the host or in the memory of the GPU
    /// where the call runs. Only the entries that a sequence's key length reaches are read.
    ///
    /// What lies on the host is checked. What lies on a GPU is not, unless [`Attention::checked`](crate::Attention::checked)
    /// asks for it: a page that the pool has not counts as one of zeros, for which nothing is read.
    pub fn new(table: &Tensor<'a>) -> Self {
        Self { raw: table.raw, most: None, lifetime: PhantomData }
    }

    /// With a bound on how many keys a sequence has, where that is less than the table has room for.
    pub fn with_most_keys(self, most: usize) -> Self {
        Self { most: Some(most), ..self }
    }

    /// The most keys of a sequence, in pages of so many.
    pub(crate) fn most_keys(&self, page: usize) -> usize {
        self.most.unwrap_or_else(|| self.raw.layout.shape[3].saturating_mul(page))
    }

    /// How many sequences there are.
    pub fn sequences(&self) -> usize {
        self.raw.layout.shape[0]
    }

    /// The table.
    #[doc(hidden)]
    pub fn table(&self) -> Tensor<'a> {
        Tensor::of(self.raw)
    }

    /// Whether the table has room for all keys.
    pub(crate) fn check(&self, page: usize) -> Result<()> {
        let (given, len_k) = (self.raw.layout.shape[3], self.most_keys(page));
        match len_k.div_ceil(page.max(1)) {
            needed if needed > given => Err(Error::PageTable { given, needed, len_k, page }),
            _ => Ok(()),
        }
    }

    /// As much of the table as a call reads.
    pub(crate) fn read(&self, page: usize) -> Raw {
        let mut raw = self.raw;
        let shape = &mut raw.layout.shape;
        shape[3] = shape[3].min(self.most_keys(page).div_ceil(page.max(1)));
        raw
    }
}

/// How sequences lie in a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lie<'a> {
    /// Each in a batch entry of its own.
    Dense,
    /// One behind the other.
    Packed(&'a [u32]),
    /// In pages: the table, its entries from one sequence to the next, and the keys of a page.
    Paged { table: &'a [u32], stride: usize, page: usize },
}

impl<'a> Lie<'a> {
    /// As queries lie in a call with these tensors.
    #[inline(always)]
    pub(crate) fn of_queries(problem: &Problem, tensors: &'a PerTensor<Raw>) -> Self {
        match problem.queries {
            Queries::Dense => Lie::Dense,
            Queries::Packed { .. } => Lie::Packed(tensors[Name::QStarts].indices()),
        }
    }

    /// As its keys lie.
    #[inline(always)]
    pub(crate) fn of_keys(problem: &Problem, tensors: &'a PerTensor<Raw>) -> Self {
        match problem.keys {
            Keys::Dense => Lie::Dense,
            Keys::Packed { .. } | Keys::Apart { .. } => Lie::Packed(tensors[Name::KStarts].indices()),
            Keys::Paged { page, .. } => {
                let table = &tensors[Name::Pages];
                Lie::Paged { table: table.indices(), stride: table.layout.strides[0], page }
            }
        }
    }

    /// The batch entry and the row of a tensor where row `row` of a sequence is.
    #[inline(always)]
    pub(crate) fn place(&self, sequence: usize, row: usize) -> [usize; 2] {
        match *self {
            Lie::Dense => [sequence, row],
            Lie::Packed(starts) => [0, (starts[sequence] as usize).wrapping_add(row)],
            Lie::Paged { table, stride, page } => {
                // A row behind the last may be asked for, to be prefetched; its page need not be in the table.
                let entry = table.get(sequence * stride + row / page);
                [entry.map_or(0, |&page| page as usize), row % page]
            }
        }
    }

    /// How many rows from this one on lie one behind the other.
    #[inline(always)]
    pub(crate) fn together(&self, row: usize) -> usize {
        match *self {
            Lie::Paged { page, .. } => page - row % page,
            Lie::Dense | Lie::Packed(_) => usize::MAX,
        }
    }
}

/// A tensor of a call, whose rows are found by sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub raw: &'a Raw,
    pub lie: Lie<'a>,
}

impl std::ops::Deref for View<'_> {
    type Target = Raw;

    fn deref(&self) -> &Raw {
        self.raw
    }
}

impl View<'_> {
    /// The address of a row of a sequence; it is in bounds if the row is one of them.
    #[inline(always)]
    pub(crate) fn row_at(&self, sequence: usize, head: usize, row: usize) -> *mut u8 {
        let [entry, row] = self.lie.place(sequence, row);
        self.ptr.wrapping_add(self.layout.row(entry, head, row).wrapping_mul(self.dtype.size()))
    }

    /// How many rows of the tensor lie one behind the other from a row of a sequence on, whosever they are.
    #[inline(always)]
    pub(crate) fn rows_from(&self, sequence: usize, row: usize) -> usize {
        let [_, row] = self.lie.place(sequence, row);
        self.layout.shape[2].saturating_sub(row)
    }
}

/// The sequences of a call: where their rows are, as its starts, its table and its key lengths say, which lie on the host.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    problem: &'a Problem,
    pub(crate) q: Lie<'a>,
    pub(crate) k: Lie<'a>,
    key_lengths: Option<&'a [u32]>,
}

impl<'a> Sequences<'a> {
    /// Those of a call with these tensors.
    pub(crate) fn among(
        problem: &'a Problem,
        tensors: &'a PerTensor<Raw>,
        key_lengths: Option<&'a [u32]>,
    ) -> Self {
        let (q, k) = (Lie::of_queries(problem, tensors), Lie::of_keys(problem, tensors));
        Self { problem, q, k, key_lengths }
    }

    /// How many queries a sequence has.
    pub fn queries(&self, sequence: usize) -> usize {
        match self.q {
            Lie::Packed(starts) => (starts[sequence + 1] - starts[sequence]) as usize,
            Lie::Dense | Lie::Paged { .. } => self.problem.len_q,
        }
    }

    /// How many keys a sequence has.
    pub fn keys(&self, sequence: usize) -> usize {
        match (self.key_lengths, self.k) {
            (Some(lengths), _) => lengths[sequence] as usize,
            (None, _) => self.room(sequence),
        }
    }

    /// How many keys there is memory for in a sequence that has no pages.
    pub(crate) fn room(&self, sequence: usize) -> usize {
        match self.k {
            Lie::Packed(starts) => (starts[sequence + 1] - starts[sequence]) as usize,
            Lie::Dense | Lie::Paged { .. } => self.problem.len_k,
        }
    }

    /// The rows of a kv head's queries: one for each of the query heads that share it.
    pub(crate) fn rows(&self, sequence: usize) -> usize {
        self.problem.group() * self.queries(sequence)
    }
}

/// Checks starts, tables and key lengths that lie on the host; those of a call that appends are those after it.
pub(crate) fn check(problem: &Problem, tensors: &PerTensor<Raw>, key_lengths: Option<&[u32]>) -> Result<()> {
    let on_host = |name| tensors.get(name).filter(|raw| raw.place == Place::Host);
    let of_q = if let Queries::Packed { total } = problem.queries { total } else { 0 };
    let of_k = if let Keys::Packed { total } = problem.keys { total } else { 0 };
    let new = problem.append.map_or((0, 0), |append| (append.len, append.total.unwrap_or(0)));
    let rising = [
        (Name::QStarts, problem.len_q, of_q),
        (Name::KStarts, problem.len_k, of_k),
        (Name::NewStarts, new.0, new.1),
    ];
    for (tensor, longest, total) in rising {
        let Some(raw) = on_host(tensor) else { continue };
        if let (Name::KStarts, Keys::Apart { total }) = (tensor, problem.keys) {
            check_apart(raw.indices(), key_lengths, total)?;
            continue;
        }
        for (sequence, ends) in raw.indices().windows(2).enumerate() {
            let (start, end) = (ends[0], ends[1]);
            if end < start || end as usize > total {
                return Err(Error::Starts { tensor, sequence, start, end, total });
            }
            let given = (end - start) as usize;
            if given > longest {
                return Err(Error::SequenceLength { tensor, sequence, given, longest });
            }
            if let (Name::KStarts, Some(lengths)) = (tensor, key_lengths)
                && lengths[sequence] as usize > given
            {
                return Err(Error::KeyLength { entry: sequence, given: lengths[sequence], len_k: given });
            }
        }
    }
    if let (Some(raw), Keys::Paged { page, pages }) = (on_host(Name::Pages), problem.keys) {
        let Layout { shape: [sequences, .., width], strides: [stride, ..] } = raw.layout;
        for sequence in 0..sequences {
            let keys = key_lengths.map_or(problem.len_k, |lengths| lengths[sequence] as usize);
            let row =
                &raw.indices()[if width == 0 { 0..0 } else { sequence * stride..sequence * stride + width }];
            for (place, &given) in row.iter().enumerate().take(keys.div_ceil(page)) {
                if given as usize >= pages {
                    return Err(Error::Page { sequence, place, given: given as i32, pages });
                }
            }
        }
    }
    Ok(())
}

/// Checks starts that need not rise: each sequence ends within the tensor.
fn check_apart(starts: &[u32], key_lengths: Option<&[u32]>, total: usize) -> Result<()> {
    let lengths = key_lengths.unwrap_or_default();
    for (sequence, (&start, &length)) in starts.iter().zip(lengths).enumerate() {
        let end = start.saturating_add(length);
        if end as usize > total {
            return Err(Error::Starts { tensor: Name::KStarts, sequence, start, end, total });
        }
    }
    Ok(())
}
