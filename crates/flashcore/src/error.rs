//! What can be wrong with a call, each as a value that names the tensor, what was given, what is possible
//! and what to do.

#[cfg(feature = "cuda")]
pub use flashcore_driver::PointerFault;

use std::{fmt, ops::Deref, path::PathBuf, sync::Arc};

use crate::{DType, tensor::Place};

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A tensor of a call, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub enum Name {
    /// The queries.
    Q,
    /// The keys.
    K,
    /// The values.
    V,
    /// The output.
    O,
    /// The logarithm of the sum of exponentials, one per query.
    Lse,
    /// The gradient of the output.
    Do,
    /// The gradient of lse.
    Dlse,
    /// The gradient of the queries.
    Dq,
    /// The gradient of the keys.
    Dk,
    /// The gradient of the values.
    Dv,
    /// What stored queries are to be multiplied by, one number per batch entry and kv head.
    QDescale,
    /// The same for keys.
    KDescale,
    /// The same for values.
    VDescale,
    /// Where each sequence of packed queries begins, and the last one ends: one number more than there are sequences.
    QStarts,
    /// The same for packed keys and values.
    KStarts,
    /// Which pages of a pool each sequence has, in order.
    Pages,
    /// How many keys each batch entry has.
    KeyLengths,
    /// The keys that a call appends to a cache.
    NewK,
    /// The values that it appends.
    NewV,
    /// Where the new keys of each sequence begin, and those of the last one end, where they lie one behind the other.
    NewStarts,
    /// The cosines of rotary embeddings, a row for each position.
    Cos,
    /// Their sines.
    Sin,
    /// At which position the new keys of each sequence begin.
    Positions,
    /// A tensor that is not yet part of a call.
    Tensor,
}

impl Name {
    /// The descales of q, k and v.
    pub const DESCALES: [Name; 3] = [Name::QDescale, Name::KDescale, Name::VDescale];
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Name::Q => "q",
            Name::K => "k",
            Name::V => "v",
            Name::O => "o",
            Name::Lse => "lse",
            Name::Do => "do",
            Name::Dlse => "dlse",
            Name::Dq => "dq",
            Name::Dk => "dk",
            Name::Dv => "dv",
            Name::QDescale => "q_descale",
            Name::KDescale => "k_descale",
            Name::VDescale => "v_descale",
            Name::QStarts => "q_starts",
            Name::KStarts => "k_starts",
            Name::Pages => "pages",
            Name::KeyLengths => "key_lengths",
            Name::NewK => "new_k",
            Name::NewV => "new_v",
            Name::NewStarts => "new_starts",
            Name::Cos => "cos",
            Name::Sin => "sin",
            Name::Positions => "positions",
            Name::Tensor => "the tensor",
        })
    }
}

/// The error of a layer below that an [`Error`] comes from: the driver's, say, or the file system's. It can be downcast.
///
/// Two are equal if they say the same.
#[derive(Clone, Debug)]
pub struct Source(Arc<dyn std::error::Error + Send + Sync>);

impl<E: std::error::Error + Send + Sync + 'static> From<E> for Source {
    fn from(error: E) -> Self {
        Self(Arc::new(error))
    }
}

impl Deref for Source {
    type Target = dyn std::error::Error + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

/// Why a call was refused before anything ran.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has not four dimensions.
    #[error(
        "{tensor} has {given} dimensions, attention takes 4: (batch, heads, length, head_dim). Reshape it, or add the missing dimensions with size 1"
    )]
    Rank {
        /// Which tensor.
        tensor: Name,
        /// How many dimensions it has.
        given: usize,
    },
    /// The dtypes differ.
    #[error(
        "{tensor} is {given}, but {expected} is needed: q, k, v and o share one dtype with their gradients (o of f8 is f16 or bf16), lse and descales are f32, and starts, pages and positions are i32. Convert {tensor} to {expected}"
    )]
    DTypeMismatch {
        /// Which tensor.
        tensor: Name,
        /// Its dtype.
        given: DType,
        /// The dtype that fits.
        expected: DType,
    },
    /// A tensor lies where the device cannot reach it.
    #[error(
        "{tensor} lies on {given}, but the call runs on {device}. Copy {tensor} there, or choose the device where it lies"
    )]
    PlaceMismatch {
        /// Which tensor.
        tensor: Name,
        /// Where it lies.
        given: Place,
        /// The device of the call.
        device: String,
    },
    /// A size does not fit the other tensors.
    #[error("{tensor} has {what} {given}, but {other} asks for {expected}. Give both the same {what}")]
    SizeMismatch {
        /// Which tensor.
        tensor: Name,
        /// The dimension's name.
        what: &'static str,
        /// Its size.
        given: usize,
        /// The size that fits.
        expected: usize,
        /// The tensor that it must fit.
        other: Name,
    },
    /// The caller's workspace is too small.
    #[error(
        "the workspace has {given} bytes, and the plan needs {needed}: its workspace_bytes() says how many"
    )]
    Workspace {
        /// What there is.
        given: usize,
        /// What is needed.
        needed: usize,
    },
    /// A text that does not name what it should.
    #[error("'{given}' is not a {what}: {why}")]
    Text {
        /// What it should name.
        what: &'static str,
        /// The text.
        given: String,
        /// What is wrong with it, or what is possible.
        why: String,
    },
    /// A file that could not be used.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// What was to be done with it.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it could not be done.
        source: Source,
    },
    /// The query heads are not a multiple of the kv heads.
    #[error(
        "q has {heads_q} heads and k has {heads_kv}: every kv head serves the same number of query heads, so q's heads must be a multiple of k's, and k needs at least one where q has any"
    )]
    HeadGroups {
        /// Heads of q.
        heads_q: usize,
        /// Heads of k and v.
        heads_kv: usize,
    },
    /// A head dim out of range.
    #[error(
        "{tensor} has head_dim {given}, possible is {possible}. Pad the last dimension with zeros, or split the heads"
    )]
    HeadDim {
        /// Which tensor.
        tensor: Name,
        /// Its head dim.
        given: usize,
        /// What is possible.
        possible: &'static str,
    },
    /// The last dimension is not contiguous.
    #[error(
        "{tensor} has stride {given} in its last dimension, possible is 1: the elements of a head must lie side by side. Make {tensor} contiguous in head_dim"
    )]
    InnerStride {
        /// Which tensor.
        tensor: Name,
        /// The stride given.
        given: usize,
    },
    /// The view reaches beyond its memory.
    #[error(
        "{tensor} reaches to element {needs}, but its memory holds {has}. Check shape {shape:?} and strides {strides:?}"
    )]
    OutOfBounds {
        /// Which tensor.
        tensor: Name,
        /// Elements that the view needs.
        needs: usize,
        /// Elements that there are.
        has: usize,
        /// The shape as (batch, heads, length, head_dim).
        shape: [usize; 4],
        /// The strides in the same order, in elements.
        strides: [usize; 4],
    },
    /// An output in which two indices name the same element.
    #[error(
        "two places of {tensor} share memory (shape {shape:?}, strides {strides:?}), so it cannot be written. Use a contiguous output"
    )]
    OverlappingOutput {
        /// Which tensor.
        tensor: Name,
        /// The shape as (batch, heads, length, head_dim).
        shape: [usize; 4],
        /// The strides in the same order, in elements.
        strides: [usize; 4],
    },
    /// An output that shares memory with an input or another output.
    #[error(
        "{output} shares memory with {other}; attention reads its inputs while it writes. Give {output} memory of its own"
    )]
    Aliasing {
        /// The output.
        output: Name,
        /// What it shares memory with.
        other: Name,
    },
    /// An address or stride that the device cannot load from.
    #[error(
        "{tensor} has {what} {given}, which must be a multiple of {needed} bytes on {device}. Allocate {tensor} aligned, or copy it"
    )]
    Alignment {
        /// Which tensor.
        tensor: Name,
        /// "address", or the stride's name.
        what: &'static str,
        /// The value in bytes.
        given: usize,
        /// What it must be a multiple of.
        needed: usize,
        /// The device of the call.
        device: String,
    },
    /// A null pointer where there are elements.
    #[error("{tensor} has elements but its pointer is null. Pass the address of its first element")]
    NullPointer {
        /// Which tensor.
        tensor: Name,
    },
    /// More than an address can hold, or more than 2³¹−1 rows.
    #[error("{tensor} is too large ({what}). Split the batch or the sequence")]
    TooLarge {
        /// Which tensor.
        tensor: Name,
        /// What overflowed.
        what: String,
    },
    /// A scale that is not finite and positive.
    #[error(
        "scale is {given}, possible is a finite number above 0 (the default is 1/√head_dim). For a negative scale, negate q"
    )]
    Scale {
        /// The scale given.
        given: f32,
    },
    /// A softcap that is not finite and positive.
    #[error("softcap is {given}, possible is a finite number above 0, or none (0 turns it off)")]
    Softcap {
        /// The softcap given.
        given: f32,
    },
    /// Something that goes only with 8-bit floats, or only without.
    #[error("{what} with q, k and v of {dtype}: {possible}")]
    EightBit {
        /// What was asked.
        what: &'static str,
        /// The type of q, k and v.
        dtype: DType,
        /// What is possible.
        possible: &'static str,
    },
    /// A descale that is not finite and positive.
    #[error(
        "{tensor} is {given} for batch entry {entry}, kv head {head}; possible is a finite number above 0"
    )]
    Descale {
        /// Which tensor.
        tensor: Name,
        /// Which batch entry.
        entry: usize,
        /// Which kv head.
        head: usize,
        /// The number given.
        given: f32,
    },
    /// The number of key lengths is not the batch size.
    #[error("{given} key lengths were given for a batch of {batch}. Give one per batch entry")]
    KeyLengthCount {
        /// How many were given.
        given: usize,
        /// How many are needed.
        batch: usize,
    },
    /// A key length beyond the keys.
    #[error(
        "the key length of batch entry {entry} is {given}, but k has length {len_k}. Give at most {len_k}"
    )]
    KeyLength {
        /// Which batch entry.
        entry: usize,
        /// Its key length.
        given: u32,
        /// How many keys there are.
        len_k: usize,
    },
    /// A bound on key lengths beyond the keys.
    #[error(
        "the key lengths on the GPU are said to be up to {given}, but k has length {len_k}. Give lengths, and a bound on them, of at most {len_k}"
    )]
    KeyLengthBound {
        /// The bound given.
        given: u32,
        /// How many keys there are.
        len_k: usize,
    },
    /// Something that goes only with dense tensors, or sizes of packed or paged ones that cannot be.
    #[error("{what}: {possible}")]
    Layouts {
        /// What was asked.
        what: &'static str,
        /// What is possible.
        possible: &'static str,
    },
    /// Something that an append to a cache does not go with.
    #[error("{what}: {possible}")]
    Append {
        /// What was asked.
        what: &'static str,
        /// What is possible.
        possible: &'static str,
    },
    /// New keys that have no room behind those that are there.
    #[error(
        "sequence {sequence} has {length} keys and gets {new} more, but the cache has room for {room}. Give a larger cache, or the length before the append"
    )]
    Room {
        /// Which sequence.
        sequence: usize,
        /// Its key length.
        length: u32,
        /// Its new keys.
        new: usize,
        /// What there is room for.
        room: usize,
    },
    /// A position that the tables of rotary embeddings have not.
    #[error(
        "sequence {sequence} comes to position {position}, but cos and sin have {table}. Give longer tables"
    )]
    Position {
        /// Which sequence.
        sequence: usize,
        /// Its last position.
        position: usize,
        /// Positions of the tables.
        table: usize,
    },
    /// Starts without a first entry.
    #[error(
        "{tensor} is empty. Give one number more than there are sequences: where each begins, and where the last ends"
    )]
    NoStarts {
        /// Which starts.
        tensor: Name,
    },
    /// A sequence that ends before it begins, or behind the rows that there are.
    #[error(
        "sequence {sequence} begins at row {start} and ends at {end} by {tensor}, of {total} rows. Starts rise, and the last is at most the number of rows"
    )]
    Starts {
        /// Which starts.
        tensor: Name,
        /// Which sequence.
        sequence: usize,
        /// Where it begins.
        start: u32,
        /// Where it ends.
        end: u32,
        /// Rows that there are.
        total: usize,
    },
    /// A sequence that is longer than the call says.
    #[error(
        "sequence {sequence} has {given} rows by {tensor}, but the longest is said to have {longest}. Give a bound that none exceeds"
    )]
    SequenceLength {
        /// Which starts.
        tensor: Name,
        /// Which sequence.
        sequence: usize,
        /// How long it is.
        given: usize,
        /// How long the longest should be.
        longest: usize,
    },
    /// A table with fewer pages per sequence than its keys need.
    #[error(
        "the table has {given} pages per sequence, but {len_k} keys in pages of {page} need {needed}. Give a wider table, or say that no sequence has as many keys"
    )]
    PageTable {
        /// Pages per sequence.
        given: usize,
        /// How many are needed.
        needed: usize,
        /// The most keys of a sequence.
        len_k: usize,
        /// Keys of a page.
        page: usize,
    },
    /// A page that the pool has not.
    #[error(
        "page {place} of sequence {sequence} is {given}, but the pool has {}. Give the page where those keys are, or a smaller key length",
        if *pages == 0 { "no pages".into() } else { format!("pages 0 to {}", pages - 1) }
    )]
    Page {
        /// Which sequence.
        sequence: usize,
        /// Which of its pages, counted from its first key on.
        place: usize,
        /// What the table says.
        given: i32,
        /// Pages of the pool.
        pages: usize,
    },
    /// An address that the GPU cannot use.
    #[cfg(feature = "cuda")]
    #[error("{tensor} ({address:#x}) cannot be used on {device}: {fault}")]
    Pointer {
        /// Which tensor.
        tensor: Name,
        /// The address.
        address: u64,
        /// The device of the call.
        device: String,
        /// What is wrong with it and what to do.
        fault: PointerFault,
    },
    /// A stream of another context or GPU.
    #[error(
        "the stream belongs to another CUDA context (on GPU {stream_device}) than {device} uses. Give a stream of that GPU's primary context, or call on GPU {stream_device}"
    )]
    ForeignStream {
        /// The GPU of the stream.
        stream_device: usize,
        /// The device of the call.
        device: String,
    },
    /// Not enough memory.
    #[error("{device}: {what}")]
    OutOfMemory {
        /// The device.
        device: String,
        /// How many bytes were asked for.
        bytes: usize,
        /// How much there is and what to do.
        what: String,
        /// The error of the layer below that it comes from, if there is one.
        source: Option<Source>,
    },
    /// Something that this device does not do.
    #[error("{device} does not do {what}: possible is {possible}")]
    Unsupported {
        /// The device of the call.
        device: String,
        /// What was asked.
        what: String,
        /// What is possible.
        possible: String,
        /// The error of the layer below that it comes from, if there is one.
        source: Option<Source>,
    },
    /// The device is not there, or failed.
    #[error("{device}: {what}")]
    Device {
        /// The device.
        device: String,
        /// What happened and what to do.
        what: String,
        /// The error of the layer below that it comes from, if there is one.
        source: Option<Source>,
    },
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn an_error_of_a_layer_below_is_kept_and_can_be_downcast() {
        let below = std::io::Error::other("no space");
        let error = Error::File { what: "write", path: "a.txt".into(), source: below.into() };
        assert_eq!(error.to_string(), "cannot write a.txt: no space");
        assert!(error.source().unwrap().downcast_ref::<std::io::Error>().is_some());
        assert_eq!(error, error.clone());
        let lost = Error::Device { device: "cuda:0".into(), what: "lost".into(), source: None };
        assert!(lost.source().is_none());
    }
}
