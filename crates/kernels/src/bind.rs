//! What a launch is bound to: tensors in a GPU's memory and a few numbers, and the parameter bytes made of them.

use std::borrow::Cow;

use flashcore_ptx::{GlobalPtr, KernelParams, TraceParams};
use smallvec::SmallVec;

use crate::{ElementType, Spec, packed_tiles};

/// A tensor that a kernel reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// The queries.
    Q,
    /// The keys.
    K,
    /// The values.
    V,
    /// One u32 per batch entry: how many keys it has.
    KeyLengths,
    /// Where each sequence of packed queries begins and the last one ends: one u32 more than there are sequences, one behind
    /// the other. [`Operand::Q`], [`Operand::O`] and [`Operand::Lse`] then have one batch entry with all rows.
    QStarts,
    /// The same for packed keys and values.
    KStarts,
    /// The pages of each sequence, in order: an i32 each, of shape (sequences, 1, 1, pages of a sequence). [`Operand::K`] and
    /// [`Operand::V`] then have a page in the place of each batch entry. Only pages that hold keys of the sequence are read.
    Pages,
    /// One f32 per batch entry and kv head, which the stored queries of that head are to be multiplied by. Above 0; one
    /// that is not given is 1. Of 8-bit queries.
    QDescale,
    /// The same for the keys.
    KDescale,
    /// The same for the values.
    VDescale,
    /// The output.
    O,
    /// One f32 per query: the logarithm of the sum of exponentials.
    Lse,
    /// The gradient of the output.
    Do,
    /// The gradient of lse: one f32 per query.
    Dlse,
    /// The gradient of the queries.
    Dq,
    /// The gradient of the keys.
    Dk,
    /// The gradient of the values.
    Dv,
    /// The outputs of parts of the keys in f32, not yet divided by their sums. Its rows are those of the first part, then
    /// those of the second, and so on.
    PartialO,
    /// The reference score and the sum of weights of each partial output: two f32 per row of [`Operand::PartialO`].
    PartialState,
    /// For each tile of queries of each head, where blocks share keys by length: the number of the first part of its keys, and how
    /// many parts there are. Two u32. [`Operand::PartialO`] then has the rows of part 0, of part 1, and so on.
    PartialPlaces,
    /// The sums that each block of a kernel has put aside in f32, in the order in which its threads hold them.
    Aside,
    /// One f32 per query of a backward pass, and per row of padding up to a multiple of [`ROW_PADDING`]: lse · log2 e, and
    /// +∞ for rows that have no probabilities, because they see no key or do not exist.
    RowLse,
    /// Likewise: Σ dO∘O less the gradient of lse, which is subtracted from a row's gradients of probabilities. 0 where
    /// [`Operand::RowLse`] is +∞.
    RowDelta,
    /// The gradients of the queries in f32, not yet scaled, in tiles as the backward kernel holds them.
    DqTiles,
    /// How many key tiles have added to each tile of [`Operand::DqTiles`]: one u32 each, 0 at first.
    Turns,
    /// The queries as 8-bit floats, as [`Quantize`](crate::quantize::Quantize) writes them.
    Q8,
    /// The same for the keys.
    K8,
    /// The same for the values.
    V8,
    /// The mean over the keys of a kv head, one f32 per channel. Its one row is the mean, without distances between numbers.
    KMean,
    /// Memory that the launches of a quantisation share.
    Space,
    /// The keys that a call appends to its cache.
    NewK,
    /// The values that it appends.
    NewV,
    /// Where the new keys of each sequence begin and those of the last one end, as [`Operand::QStarts`] says of queries, where
    /// they lie one behind the other.
    NewStarts,
    /// The cosines of rotary embeddings, a row for each position.
    Cos,
    /// Their sines.
    Sin,
    /// At which position the new keys of each sequence begin: one u32 each.
    Positions,
    /// The queries, turned.
    TurnedQ,
    /// One u32 per batch entry: how many keys it has once the new ones are there.
    LengthsAfter,
}

/// Rows of [`Operand::RowLse`] and [`Operand::RowDelta`] are padded to a multiple of this: no tile is larger.
pub const ROW_PADDING: u32 = 128;

impl Operand {
    const COUNT: usize = Operand::LengthsAfter as usize + 1;
}

/// A tensor of shape (batch, heads, length, head dim) in a GPU's memory. Rows are contiguous; strides are in bytes, from
/// one batch entry, head and row to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorArg {
    /// The address of the first element.
    pub address: u64,
    /// Batch entries, heads, rows, elements per row.
    pub shape: [usize; 4],
    /// Bytes from one batch entry, head and row to the next.
    pub strides: [u64; 3],
}

impl TensorArg {
    /// The address as a parameter.
    pub(crate) fn pointer(&self) -> GlobalPtr {
        GlobalPtr(self.address)
    }
}

/// Heads whose query tiles are processed together, longest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// How many heads, over all batch entries.
    pub heads: u32,
    /// Places that a section takes in the order of all tiles: one per tile, and at its end perhaps some without a tile,
    /// so that the next section begins with a round of its own.
    pub places: u32,
}

/// What a launch is bound to.
#[derive(Clone, Copy, Debug)]
pub struct Args {
    tensors: [TensorArg; Operand::COUNT],
    /// The factor applied to the scores before the softmax.
    pub scale: f32,
    /// Scores become `softcap · tanh(score / softcap)` before the mask.
    pub softcap: Option<f32>,
    /// How many keys before its own position a query sees.
    pub left: i32,
    /// How many keys after its own position a query sees.
    pub right: i32,
    /// How many sequences there are, which are batch entries where they are dense.
    pub sequences: u32,
    /// The most queries and the most keys of a sequence.
    pub longest: [u32; 2],
    /// Which query tiles are processed together, where they are taken in sections.
    pub section: Section,
    /// Parts of the keys whose outputs are merged at the end.
    pub parts: u32,
    /// Where traced kernels write their stamps.
    pub trace: Option<TraceParams>,
}

/// The numbers that turn dot products into exponents, as the kernels read them.
pub(crate) struct ScoreNumbers {
    pub exp_scale: f32,
    pub tanh_scale: f32,
    pub scale: f32,
    pub softcap: f32,
}

impl Default for Args {
    /// Without tensors, with every number 0.
    fn default() -> Self {
        Self {
            tensors: [TensorArg::default(); Operand::COUNT],
            scale: 0.0,
            softcap: None,
            left: 0,
            right: 0,
            sequences: 0,
            longest: [0; 2],
            section: Section::default(),
            parts: 0,
            trace: None,
        }
    }
}

impl Args {
    /// Gives a tensor.
    pub fn set(&mut self, operand: Operand, tensor: TensorArg) {
        self.tensors[operand as usize] = tensor;
    }

    /// A tensor; one that was not given has address 0 and no elements.
    pub fn tensor(&self, operand: Operand) -> &TensorArg {
        &self.tensors[operand as usize]
    }

    /// Batch entries, query heads and queries per head.
    pub(crate) fn queries(&self) -> [u32; 3] {
        let [batch, heads, len, _] = self.tensor(Operand::Q).shape;
        [batch, heads, len].map(|size| size as u32)
    }

    /// Batch entries, heads and rows per head as a kernel for this spec counts them: a head's rows are its queries, or
    /// those of all heads that share its keys.
    pub(crate) fn rows(&self, spec: &Spec) -> [u32; 3] {
        let [batch, heads, len] = self.queries();
        [batch, heads / spec.rows_per_query, len * spec.rows_per_query]
    }

    /// Tiles of so many rows that a head of a tensor has, or, where its sequences are packed, that are numbered.
    pub(crate) fn head_tiles(&self, operand: Operand, packed: bool, rows: u32) -> u32 {
        let len = self.tensor(operand).shape[2] as u32;
        if packed { packed_tiles(rows, len, self.sequences) } else { len.div_ceil(rows) }
    }

    /// The most queries of a sequence.
    pub(crate) fn most_queries(&self, spec: &Spec) -> u32 {
        if spec.packed_q { self.longest[0] } else { self.queries()[2] }
    }

    /// Query heads per key head.
    pub(crate) fn group(&self) -> u32 {
        (self.tensor(Operand::Q).shape[1] / self.tensor(Operand::K).shape[1].max(1)) as u32
    }

    pub(crate) fn scores(&self) -> ScoreNumbers {
        let Args { scale, softcap, .. } = *self;
        ScoreNumbers {
            exp_scale: softcap.unwrap_or(scale) * std::f32::consts::LOG2_E,
            // Finite, so that a dot product of 0 stays 0 under the smallest softcap.
            tanh_scale: softcap.map_or(0.0, |softcap| (scale / softcap).clamp(f32::MIN, f32::MAX)),
            scale,
            softcap: softcap.unwrap_or(0.0),
        }
    }
}

/// Why a launch cannot be bound to its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindError {
    /// Rows that are further apart than the kernel can address.
    RowStride {
        /// Which tensor.
        operand: Operand,
        /// Bytes from one row to the next.
        given: u64,
        /// The largest possible.
        most: u64,
    },
}

/// What a tensor map describes, innermost dimension first. Its boxes are swizzled within 128 bytes, and read zeros
/// outside the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Map {
    /// The element type.
    pub dtype: ElementType,
    /// The address of the first element.
    pub address: u64,
    /// Elements of each dimension.
    pub dims: [u64; 4],
    /// Bytes between neighbours in each dimension but the first.
    pub strides: [u64; 3],
    /// Elements of a box in each dimension.
    pub box_dims: [u32; 4],
}

/// Bytes of parameters that are kept without an allocation: enough for the launches of a backward pass.
const INLINE_BYTES: usize = 2048;

/// The parameters of a plan's launches, as bytes.
#[derive(Default)]
pub struct Packed {
    bytes: SmallVec<[u8; INLINE_BYTES]>,
    launches: SmallVec<[Bound; 4]>,
}

/// Where the parameters of one launch lie.
struct Bound {
    start: usize,
    places: Cow<'static, [u16]>,
}

impl Packed {
    /// Adds the parameters of the next launch.
    pub fn push<P: KernelParams>(&mut self, params: &P) {
        let start = self.bytes.len();
        self.bytes.resize(start + P::packed_bytes(), 0);
        params.pack_into(&mut self.bytes[start..]);
        self.launches.push(Bound { start, places: P::OFFSETS.into() });
    }

    /// Adds parameters behind those of the last launch.
    pub fn extend<P: KernelParams>(&mut self, params: &P) {
        let Some(last) = self.launches.last_mut() else { return };
        let align = P::FIELDS.iter().map(|(_, ty)| ty.align() as usize).max().unwrap_or(1);
        let more = (self.bytes.len() - last.start).next_multiple_of(align);
        let at = last.start + more;
        self.bytes.resize(at + P::packed_bytes(), 0);
        params.pack_into(&mut self.bytes[at..]);
        last.places.to_mut().extend(P::OFFSETS.iter().map(|offset| more as u16 + offset));
    }

    /// The bytes of a launch, and where each parameter starts in them.
    pub fn launch(&self, index: usize) -> (&[u8], &[u16]) {
        let Bound { start, places } = &self.launches[index];
        let end = self.launches.get(index + 1).map_or(self.bytes.len(), |next| next.start);
        (&self.bytes[*start..end], places)
    }
}
