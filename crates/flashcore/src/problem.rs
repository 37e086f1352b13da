//! Problem: what is asked of attention, as a pure value.

use crate::{Appending, DType, Error, Mask, Name, Quantiser, Result, Turning, signature::Parameter};

/// The largest head dim of the contract; a device may take less.
pub const MAX_HEAD_DIM: usize = 1024;

/// The largest sequence length, so that row indices fit a signed 32-bit integer on every device.
pub const MAX_LEN: usize = i32::MAX as usize;

/// What is computed: attention itself, or the gradients of its inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub enum Pass {
    /// o, and lse where it is wanted, of q, k and v.
    #[default]
    Forward,
    /// The gradients of q, k and v, of those of o and lse.
    Backward,
}

impl Pass {
    /// Every pass, in the order in which a training step takes them.
    pub const ALL: [Pass; 2] = [Pass::Forward, Pass::Backward];

    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        }
    }
}

impl std::fmt::Display for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Pass {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let why = || "possible are forward and backward".into();
        let found = Self::ALL.into_iter().find(|pass| pass.name() == text);
        found.ok_or_else(|| Error::Text { what: "pass", given: text.into(), why: why() })
    }
}

/// How the queries of a call lie, and with them o, lse and their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub enum Queries {
    /// Each batch entry has as many of them: (batch, heads, length, head_dim).
    #[default]
    Dense,
    /// Sequences of any lengths lie one behind the other: (1, heads, total, head_dim). [`Name::QStarts`] says where each
    /// begins and ends; rows before the first and behind the last belong to none.
    Packed {
        /// Rows of the tensor.
        total: usize,
    },
}

/// How the keys and values of a call lie, and their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub enum Keys {
    /// Each batch entry has memory for as many of them: (batch, kv heads, length, head_dim).
    #[default]
    Dense,
    /// Sequences of any lengths lie one behind the other: (1, kv heads, total, head_dim). [`Name::KStarts`] says where each
    /// begins and ends.
    Packed {
        /// Rows of the tensor.
        total: usize,
    },
    /// Sequences lie anywhere in a tensor of (1, kv heads, total, head_dim), in any order and even over each other, as those
    /// of a cache whose batch entries are chosen. [`Name::KStarts`] says where each begins, and key lengths where it ends.
    Apart {
        /// Rows of the tensor.
        total: usize,
    },
    /// Sequences lie in pages of a pool: (pages, kv heads, page, head_dim). [`Name::Pages`] says which pages a sequence
    /// has, in order.
    Paged {
        /// Keys of a page.
        page: usize,
        /// Pages of the pool.
        pages: usize,
    },
}

/// What is asked: the pass, sizes, dtype, mask, scale, softcap and the outputs wanted. A pure value without any data.
///
/// ```
/// use flashcore::{DType, Mask, Problem};
/// let problem = Problem::new(1, 8, 512, 64, DType::F16).with_mask(Mask::Causal);
/// assert!(problem.check().is_ok());
/// assert_eq!(problem.scale, 0.125);
/// assert_eq!(problem.to_string(), "1x8x512x64 f16 causal");
/// ```
/// Two problems are the same if everything in them is, numbers bit by bit: a problem is its own key.
///
/// Its text parses back to it. Sizes are (batch, heads, length, head_dim), with a slash where those of keys or values
/// differ; then the dtype, and whatever is not as usual:
///
/// ```
/// # use flashcore::Problem;
/// let text = "1x32/8x1/65536x128 bf16 softcap=50 lse";
/// let problem: Problem = text.parse()?;
/// assert_eq!((problem.heads_q, problem.heads_kv, problem.len_k), (32, 8, 65536));
/// assert_eq!(problem.to_string(), text);
/// # Ok::<(), flashcore::Error>(())
/// ```
///
/// Batch entries are sequences. Where they are packed or in pages, the lengths are the most that a sequence may have, which
/// size grids and counts of operations, and the text says how many rows there are: `packed=700` of queries and keys,
/// `packed=300/700` where these differ, `packed-q=300` or `packed-k=700` of one of them, `apart-k=700` for keys that begin
/// anywhere, `page=16/4096` for keys in 4096 pages of 16.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Problem {
    /// Attention, or its gradients.
    pub pass: Pass,
    /// Batch entries.
    pub batch: usize,
    /// Heads of q and o.
    pub heads_q: usize,
    /// Heads of k and v; divides `heads_q`.
    pub heads_kv: usize,
    /// Queries per head; the most of them where sequences differ.
    pub len_q: usize,
    /// Keys per head; the most of them where sequences differ.
    pub len_k: usize,
    /// How queries lie.
    pub queries: Queries,
    /// How keys and values lie.
    pub keys: Keys,
    /// Elements of a query and of a key.
    pub head_dim: usize,
    /// Elements of a value and of an output row.
    pub head_dim_v: usize,
    /// The type of q, k and v, and of their gradients.
    pub dtype: DType,
    /// The type of k and v where it is not that of q: f8, as a cache of keys and values has it. See [`Problem::dtype_kv`].
    pub dtype_kv: Option<DType>,
    /// The type of o where it is not the usual one, which is `dtype`, or bf16 where that is f8, or f32 and quantised. See
    /// [`Problem::out`].
    pub out: Option<DType>,
    /// Whether the stored q, k and v have descales, which a call gives by batch entry and kv head. Those of f8 can.
    pub descales: [bool; 3],
    /// How many keys share a descale of k and one of v, counted from the first key, where not all keys of a head do.
    pub descale_keys: Option<usize>,
    /// How q, k and v become f8 before they are computed with, if they do.
    pub quantise: Option<Quantiser>,
    /// Which keys a query may attend to.
    pub mask: Mask,
    /// Whether each batch entry has a key length of its own, given with the call.
    pub key_lengths: bool,
    /// Keys and values that the call adds to the cache before it attends, if it does. Key lengths are those before.
    pub append: Option<Appending>,
    /// What the scores are multiplied with before the softmax.
    pub scale: f32,
    /// Scores become `softcap · tanh(score / softcap)` before the mask.
    pub softcap: Option<f32>,
    /// Whether lse, the natural logarithm of the sum of exponentials per query, is a result: a forward pass gives it, a
    /// backward pass is given its gradient.
    pub lse: bool,
}

impl Problem {
    /// Self-attention without a mask, with the default scale 1/√head_dim.
    pub fn new(batch: usize, heads: usize, len: usize, head_dim: usize, dtype: DType) -> Self {
        Self {
            pass: Pass::Forward,
            batch,
            heads_q: heads,
            heads_kv: heads,
            len_q: len,
            len_k: len,
            queries: Queries::Dense,
            keys: Keys::Dense,
            head_dim,
            head_dim_v: head_dim,
            dtype,
            dtype_kv: None,
            out: None,
            descales: [false; 3],
            descale_keys: None,
            quantise: None,
            mask: Mask::None,
            key_lengths: false,
            append: None,
            scale: default_scale(head_dim),
            softcap: None,
            lse: false,
        }
    }

    /// With other heads and another length for k and v.
    pub fn with_kv(self, heads_kv: usize, len_k: usize) -> Self {
        Self { heads_kv, len_k, ..self }
    }

    /// With queries and keys of sequences that lie one behind the other, as many rows of each.
    pub fn with_packed(self, total_q: usize, total_k: usize) -> Self {
        let (queries, keys) = (Queries::Packed { total: total_q }, Keys::Packed { total: total_k });
        Self { queries, keys, ..self }
    }

    /// With queries that lie so.
    pub fn with_queries(self, queries: Queries) -> Self {
        Self { queries, ..self }
    }

    /// With keys and values that lie so.
    pub fn with_keys(self, keys: Keys) -> Self {
        Self { keys, ..self }
    }

    /// Whether every batch entry has memory of its own for queries and for keys.
    pub fn is_dense(&self) -> bool {
        (self.queries, self.keys) == (Queries::Dense, Keys::Dense)
    }

    /// With another head dim for v and o.
    pub fn with_head_dim_v(self, head_dim_v: usize) -> Self {
        Self { head_dim_v, ..self }
    }

    /// With k and v of this type.
    pub fn with_dtype_kv(self, dtype: DType) -> Self {
        Self { dtype_kv: (dtype != self.dtype).then_some(dtype), ..self }
    }

    /// The type of k and v.
    pub fn dtype_kv(&self) -> DType {
        self.dtype_kv.unwrap_or(self.dtype)
    }

    /// Whether k and v are computed with as f8.
    pub fn is_eight_bit(&self) -> bool {
        self.dtype_kv().is_f8() || self.quantise.is_some()
    }

    /// With an output of this type.
    pub fn with_out(self, out: DType) -> Self {
        Self { out: (out != self.usual_out()).then_some(out), ..self }
    }

    /// With descales for q, k and v.
    pub fn with_descales(self) -> Self {
        Self { descales: [true; 3], ..self }
    }

    /// With a descale of k and one of v for each block of so many keys, where they have descales.
    pub fn with_descales_per(self, keys: usize) -> Self {
        Self { descale_keys: Some(keys), ..self }
    }

    /// The block of keys whose descales a key has; 0 where all keys of a head share theirs.
    pub fn descale_block(&self, key: usize) -> usize {
        self.descale_keys.map_or(0, |keys| key / keys)
    }

    /// The type of o, and of its gradient.
    pub fn out(&self) -> DType {
        self.out.unwrap_or(self.usual_out())
    }

    /// The type of o, unless another is asked for.
    fn usual_out(&self) -> DType {
        let narrow = self.dtype.is_f8() || (self.quantise.is_some() && self.dtype == DType::F32);
        if narrow { DType::BF16 } else { self.dtype }
    }

    /// With q, k and v that become f8 before they are computed with.
    pub fn with_quantised(self, quantiser: Quantiser) -> Self {
        Self { quantise: Some(quantiser), ..self }
    }

    /// What is left to compute once q, k and v are f8; the problem itself where they do not become so.
    pub fn quantised(&self) -> Self {
        let eight = Self { dtype: DType::F8E4M3, out: None, quantise: None, ..*self };
        self.quantise.map_or(*self, |quantiser| Self {
            descale_keys: quantiser.block(),
            ..eight.with_descales().with_out(self.out())
        })
    }

    /// With a mask.
    pub fn with_mask(self, mask: Mask) -> Self {
        Self { mask, ..self }
    }

    /// With a key length for each batch entry.
    pub fn with_key_lengths(self) -> Self {
        Self { key_lengths: true, ..self }
    }

    /// With a scale of its own.
    pub fn with_scale(self, scale: f32) -> Self {
        Self { scale, ..self }
    }

    /// With a softcap; 0 turns it off.
    pub fn with_softcap(self, softcap: f32) -> Self {
        Self { softcap: (softcap != 0.0).then_some(softcap), ..self }
    }

    /// The backward pass of the same attention.
    pub fn backward(self) -> Self {
        self.with_pass(Pass::Backward)
    }

    /// This pass of the same attention.
    pub fn with_pass(self, pass: Pass) -> Self {
        Self { pass, ..self }
    }

    /// With lse as a result.
    pub fn with_lse(self) -> Self {
        Self { lse: true, ..self }
    }

    /// The problem itself if it obeys the contract, else what is wrong.
    pub fn check(self) -> Result<Self> {
        let heads_fit = match (self.heads_q, self.heads_kv) {
            (0, _) => true,
            (_, 0) => false,
            (q, kv) => q % kv == 0,
        };
        if !heads_fit {
            return Err(Error::HeadGroups { heads_q: self.heads_q, heads_kv: self.heads_kv });
        }
        for (tensor, head_dim) in [(Name::Q, self.head_dim), (Name::V, self.head_dim_v)] {
            if !(1..=MAX_HEAD_DIM).contains(&head_dim) {
                return Err(Error::HeadDim { tensor, given: head_dim, possible: "1 to 1024" });
            }
        }
        let lengths = [(Name::Q, self.len_q), (Name::K, self.len_k)];
        let signature = self.signature();
        let rows = signature.iter().map(|of| (of.name, of.shape[2]));
        for (tensor, len) in lengths.into_iter().chain(rows) {
            if len > MAX_LEN {
                return Err(Error::TooLarge {
                    tensor,
                    what: format!("length {len}, possible is up to {MAX_LEN}"),
                });
            }
        }
        for Parameter { name: tensor, shape, dtype, .. } in &signature {
            let bytes = shape
                .iter()
                .chain([&dtype.size()])
                .try_fold(1_usize, |product, &size| product.checked_mul(size));
            if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
                let [batch, heads, len, width] = shape;
                let what = format!("{batch}x{heads}x{len}x{width} elements overflow the address space");
                return Err(Error::TooLarge { tensor: *tensor, what });
            }
        }
        self.check_layouts()?;
        self.check_types()?;
        self.check_append()?;
        if !(self.scale.is_finite() && self.scale > 0.0) {
            return Err(Error::Scale { given: self.scale });
        }
        if let Some(softcap) = self.softcap
            && !(softcap.is_finite() && softcap > 0.0)
        {
            return Err(Error::Softcap { given: softcap });
        }
        Ok(self)
    }

    /// What goes with sequences that are packed or in pages.
    fn check_layouts(&self) -> Result<()> {
        let refuse = |what, possible| Err(Error::Layouts { what, possible });
        if let Keys::Paged { page, pages } = self.keys {
            if page == 0 {
                return refuse("pages of 0 keys", "give pages of at least one");
            }
            if pages > MAX_LEN {
                return refuse("a pool of more pages than a table can name", "up to 2147483647 of them");
            }
            if self.pass == Pass::Backward {
                return refuse(
                    "a backward pass of keys in pages",
                    "those of dense or packed keys have gradients",
                );
            }
        }
        if matches!(self.keys, Keys::Apart { .. }) {
            if !self.key_lengths {
                return refuse(
                    "keys that begin anywhere, without key lengths",
                    "give them: they say where each ends",
                );
            }
            if self.pass == Pass::Backward {
                return refuse(
                    "a backward pass of keys that begin anywhere",
                    "those of dense or packed keys have gradients",
                );
            }
        }
        if self.quantise.is_some() && !self.is_dense() {
            return refuse(
                "quantising packed or paged tensors",
                "dense ones, or tensors of f8 with their descales",
            );
        }
        Ok(())
    }

    /// What goes with 8-bit floats, and what with others.
    fn check_types(&self) -> Result<()> {
        let refuse = |what, possible| Err(Error::EightBit { what, dtype: self.dtype, possible });
        for (tensor, given) in [(Name::Q, self.dtype), (Name::K, self.dtype_kv())] {
            if !DType::ALL.contains(&given) {
                return Err(Error::DTypeMismatch { tensor, given, expected: DType::F32 });
            }
        }
        if self.dtype.is_f8() && self.pass == Pass::Backward {
            return refuse("a backward pass", "gradients need q, k and v of f16, bf16 or f32");
        }
        if let Some(dtype_kv) = self.dtype_kv {
            if !dtype_kv.is_f8() || !matches!(self.dtype, DType::F16 | DType::BF16) {
                return refuse("k and v of another type", "those of f8 go with q of f16 or bf16");
            }
            if self.pass == Pass::Backward || self.quantise.is_some() {
                return refuse(
                    "a backward pass, or quantising, of k and v of f8",
                    "all three of f16 or bf16",
                );
            }
        }
        if !self.dtype_kv().is_f8() && self.descales != [false; 3] {
            return refuse("descales", "multiply the scale, or the output, by them instead");
        }
        if self.descale_keys == Some(0) {
            return refuse("descales of blocks of 0 keys", "a block has at least one");
        }
        if self.descale_keys.is_some() && self.keys != Keys::Dense {
            return refuse(
                "descales of blocks of packed or paged keys",
                "descales per kv head, or dense keys",
            );
        }
        if self.descale_keys.is_some() && self.descales[1..] == [false; 2] {
            return refuse("descales of blocks of keys without any of k or v", "give those");
        }
        if !self.dtype.is_f8() && self.descales[0] {
            return refuse("a descale of q", "multiply the scale by it instead");
        }
        if let Some(quantiser) = self.quantise {
            if self.dtype.is_f8() {
                return refuse("quantising", "they are f8 already: give their descales instead");
            }
            if self.pass == Pass::Backward {
                return refuse("a backward pass of quantised tensors", "gradients of them as they are");
            }
            quantiser.check(self)?;
        }
        let eight = self.dtype.is_f8() || self.quantise.is_some();
        match self.out() {
            DType::F16 | DType::BF16 if eight => Ok(()),
            _ if eight => refuse("an output of another type", "o is bf16 or f16"),
            out if out != self.dtype => refuse("an output of another type", "o has the type of q, k and v"),
            _ => Ok(()),
        }
    }

    /// How many query heads share one kv head.
    pub fn group(&self) -> usize {
        self.heads_q / self.heads_kv.max(1)
    }

    /// The floating-point operations that count, for each query and key that meet: 2·(head_dim + head_dim_v), and in a
    /// backward pass, which has five products rather than two, 2·(3·head_dim + 2·head_dim_v). Causal self-attention counts
    /// exactly half of full attention, as the field does; every other mask counts
    /// the pairs that it leaves. Where lengths differ, all are counted as the longest.
    pub fn flops(&self) -> f64 {
        let full = self.len_q as f64 * self.len_k as f64;
        let pairs = match self.mask {
            Mask::None => full,
            Mask::Causal | Mask::CausalTopLeft if self.len_q == self.len_k => full / 2.0,
            mask => mask.pairs(self.len_q, self.len_k) as f64,
        };
        let width = match self.pass {
            Pass::Forward => self.head_dim + self.head_dim_v,
            Pass::Backward => 3 * self.head_dim + 2 * self.head_dim_v,
        };
        2.0 * width as f64 * pairs * (self.batch * self.heads_q) as f64
    }

    /// The fewest bytes that must move: each input read once, each output written once; of a pool of pages, all of it.
    pub fn min_bytes(&self) -> f64 {
        let elements = |shape: [usize; 4]| shape.map(|size| size as f64).iter().product::<f64>();
        self.signature().iter().map(|tensor| elements(tensor.shape) * tensor.dtype.size() as f64).sum()
    }
}

/// 1/√head_dim.
pub fn default_scale(head_dim: usize) -> f32 {
    (1.0 / (head_dim.max(1) as f64).sqrt()) as f32
}

impl Problem {
    /// Everything that makes a problem what it is. Whoever adds a field meets this line.
    #[rustfmt::skip]
    fn identity(&self) -> impl Eq + std::hash::Hash + use<> {
        let Self {
            pass, batch, heads_q, heads_kv, len_q, len_k, queries, keys, head_dim, head_dim_v, dtype, dtype_kv, out, descales,
            descale_keys, quantise, mask, key_lengths, append, scale, softcap, lse,
        } = *self;
        let sizes = [batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v];
        let types = (dtype, dtype_kv, out, descales, descale_keys, quantise);
        (pass, sizes, (queries, keys, append), types, mask, [key_lengths, lse], scale.to_bits(), softcap.map(f32::to_bits))
    }
}

impl PartialEq for Problem {
    fn eq(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for Problem {}

impl std::hash::Hash for Problem {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pair = |a: usize, b: usize| if a == b { a.to_string() } else { format!("{a}/{b}") };
        let heads = pair(self.heads_q, self.heads_kv);
        let len = pair(self.len_q, self.len_k);
        let dim = pair(self.head_dim, self.head_dim_v);
        write!(f, "{}x{heads}x{len}x{dim} {}", self.batch, self.dtype)?;
        if let Some(dtype) = self.dtype_kv {
            write!(f, " kv={dtype}")?;
        }
        if let Some(out) = self.out {
            write!(f, " out={out}")?;
        }
        if self.descales != [false; 3] {
            write!(f, " descales")?;
            if self.descales != [true; 3] || self.descale_keys.is_some() {
                let named = self.descales.into_iter().zip(['q', 'k', 'v']).filter(|(there, _)| *there);
                write!(f, "={}", named.map(|(_, name)| name).collect::<String>())?;
            }
            if let Some(keys) = self.descale_keys {
                write!(f, "/{keys}")?;
            }
        }
        if let Some(quantiser) = self.quantise {
            write!(f, " {quantiser}")?;
        }
        if self.mask != Mask::None {
            write!(f, " {}", self.mask)?;
        }
        if let Some(softcap) = self.softcap {
            write!(f, " softcap={softcap}")?;
        }
        if self.scale.to_bits() != default_scale(self.head_dim).to_bits() {
            write!(f, " scale={}", self.scale)?;
        }
        match (self.queries, self.keys) {
            (Queries::Packed { total: q }, Keys::Packed { total: k }) => write!(f, " packed={}", pair(q, k))?,
            (Queries::Packed { total }, _) => write!(f, " packed-q={total}")?,
            (Queries::Dense, Keys::Packed { total }) => write!(f, " packed-k={total}")?,
            (Queries::Dense, _) => {}
        }
        match self.keys {
            Keys::Paged { page, pages } => write!(f, " page={page}/{pages}")?,
            Keys::Apart { total } => write!(f, " apart-k={total}")?,
            Keys::Dense | Keys::Packed { .. } => {}
        }
        if self.key_lengths {
            write!(f, " key-lengths")?;
        }
        if let Some(append) = self.append {
            write!(f, " {append}")?;
        }
        if self.lse {
            write!(f, " lse")?;
        }
        if self.pass != Pass::Forward {
            write!(f, " {}", self.pass)?;
        }
        Ok(())
    }
}

impl std::str::FromStr for Problem {
    type Err = Error;

    /// Reads the text of a problem and checks it against the contract. Words may come in any order; without a dtype it is
    /// f16.
    fn from_str(text: &str) -> Result<Self> {
        let refuse = |why: &str| {
            let why = format!("{why}; write it as 1x32/8x1/4096x128 bf16 causal");
            Error::Text { what: "problem", given: text.into(), why }
        };
        let unknown = |word: &str| {
            let why = format!("'{word}' is unknown; possible behind the sizes are {WORDS}");
            Error::Text { what: "problem", given: text.into(), why }
        };
        let mut words = text.split_whitespace();
        let sizes = words.next().unwrap_or_default();
        let mut problem = sizes_of(sizes).ok_or_else(|| refuse(&format!("'{sizes}' is not BxHxSxD")))?;
        let (mut out, mut dtype_kv, mut rotary) = (None, None, None);
        let mut said: Vec<(&str, &str)> = Vec::new();
        for word in words {
            let wrong = |text: &str| refuse(&format!("'{text}' is not a number"));
            let number = |text: &str| text.parse::<f32>().map_err(|_| wrong(text));
            let size = |text: &str| text.parse::<usize>().map_err(|_| wrong(text));
            if let Ok(dtype) = word.parse::<DType>() {
                problem.dtype = dtype;
            } else if let Ok(mask) = word.parse::<Mask>() {
                problem.mask = mask;
            } else if let Ok(pass) = word.parse::<Pass>() {
                problem.pass = pass;
            } else if let Ok(quantiser) = word.parse::<Quantiser>() {
                problem.quantise = Some(quantiser);
            } else {
                match word.split_once('=') {
                    Some(("packed", value)) => {
                        let (q, k) = value.split_once('/').unwrap_or((value, value));
                        problem = problem.with_packed(size(q)?, size(k)?);
                    }
                    Some(("packed-q", value)) => problem.queries = Queries::Packed { total: size(value)? },
                    Some(("packed-k", value)) => problem.keys = Keys::Packed { total: size(value)? },
                    Some(("apart-k", value)) => problem.keys = Keys::Apart { total: size(value)? },
                    Some(("append", value)) => {
                        problem.append = Some(Appending::read(value).ok_or_else(|| wrong(value))?);
                    }
                    Some(("rotary", value)) => {
                        rotary = Some(Turning::read(value).ok_or_else(|| wrong(value))?);
                    }
                    Some(("page", value)) => {
                        let (page, pages) = value.split_once('/').ok_or_else(|| wrong(value))?;
                        problem.keys = Keys::Paged { page: size(page)?, pages: size(pages)? };
                    }
                    Some(("softcap", value)) => problem.softcap = Some(number(value)?),
                    Some(("scale", value)) => problem.scale = number(value)?,
                    Some(("out", value)) => out = Some(value.parse::<DType>()?),
                    Some(("kv", value)) => dtype_kv = Some(value.parse::<DType>()?),
                    Some(("descales", value)) => {
                        let (names, keys) =
                            value.split_once('/').map_or((value, None), |(a, b)| (a, Some(b)));
                        if !["q", "k", "v", "qk", "qv", "kv", "qkv"].contains(&names) {
                            return Err(unknown(word));
                        }
                        problem.descales = ['q', 'k', 'v'].map(|name| names.contains(name));
                        problem.descale_keys = keys.map(size).transpose()?;
                    }
                    // As evidence from before the slashes has it.
                    Some(("len_k", value)) => problem.len_k = size(value)?,
                    Some(("heads_kv", value)) => problem.heads_kv = size(value)?,
                    Some(("head_dim_v", value)) => problem.head_dim_v = size(value)?,
                    None if word == "key-lengths" => problem.key_lengths = true,
                    None if word == "lse" => problem.lse = true,
                    None if word == "descales" => problem.descales = [true; 3],
                    _ => return Err(unknown(word)),
                }
            }
            let about = about(word);
            for of in about {
                if let Some((_, before)) = said.iter().find(|(other, _)| other == of) {
                    return Err(refuse(&format!("'{before}' and '{word}' say two things of {of}")));
                }
            }
            said.extend(about.iter().map(|&of| (of, word)));
        }
        match (&mut problem.append, rotary) {
            (Some(append), rotary) => append.rotary = rotary,
            (None, Some(_)) => return Err(refuse("rotary embeddings are of keys that are appended")),
            (None, None) => {}
        }
        let problem = dtype_kv.map_or(problem, |dtype| problem.with_dtype_kv(dtype));
        out.map_or(problem, |out| problem.with_out(out)).check()
    }
}

/// The words that may follow the sizes.
const WORDS: &str = "f16, bf16, f32, f8, kv=f8, out=f16, causal, causal-top-left, window(LEFT,RIGHT), scale=X, softcap=X, \
                     key-lengths, lse, backward, packed=TOKENS, packed=Q/K, packed-q=Q, packed-k=K, apart-k=K, page=KEYS/PAGES, \
                     append=NEW, rotary=DIM/POSITIONS, descales, descales=qkv/BLOCK and quantise";

/// What a word that was read is about, of which a text says one thing.
fn about(word: &str) -> &'static [&'static str] {
    match word.split_once('=').map_or(word, |(name, _)| name) {
        _ if word.parse::<DType>().is_ok() => &["the type"],
        _ if word.parse::<Mask>().is_ok() => &["the mask"],
        _ if word.parse::<Pass>().is_ok() => &["the pass"],
        "packed" => &["queries", "keys"],
        "packed-q" => &["queries"],
        "packed-k" | "apart-k" | "page" => &["keys"],
        "softcap" => &["the softcap"],
        "scale" => &["the scale"],
        "append" => &["new keys"],
        "rotary" => &["rotary embeddings"],
        "descales" => &["descales"],
        _ => &[],
    }
}

/// The sizes of a problem: `1x32/8x1/65536x128/64`, each pair for queries and keys, or keys and values.
fn sizes_of(text: &str) -> Option<Problem> {
    let pair = |part: &str| {
        let (a, b) = part.split_once('/').unwrap_or((part, part));
        Some((a.parse::<usize>().ok()?, b.parse::<usize>().ok()?))
    };
    let parts: Vec<&str> = text.split(['x', 'X', '×']).collect();
    let [batch, heads, len, dim] = parts[..] else { return None };
    let ((heads_q, heads_kv), (len_q, len_k), (dim, dim_v)) = (pair(heads)?, pair(len)?, pair(dim)?);
    let problem = Problem::new(batch.parse().ok()?, heads_q, len_q, dim, DType::F16);
    Some(problem.with_kv(heads_kv, len_k).with_head_dim_v(dim_v))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mission() -> Problem {
        Problem::new(1, 8, 512, 64, DType::F16)
    }

    #[test]
    fn empty_sequences_and_batches_are_legal() {
        for problem in [
            Problem::new(0, 8, 512, 64, DType::F16),
            Problem::new(1, 0, 512, 64, DType::F16),
            Problem::new(1, 8, 0, 64, DType::F16),
            mission().with_kv(8, 0),
        ] {
            assert_eq!(problem.check(), Ok(problem));
        }
    }

    #[test]
    fn heads_must_be_a_multiple() {
        assert_eq!(mission().with_kv(3, 512).check(), Err(Error::HeadGroups { heads_q: 8, heads_kv: 3 }));
        assert_eq!(mission().with_kv(0, 512).check(), Err(Error::HeadGroups { heads_q: 8, heads_kv: 0 }));
        assert!(mission().with_kv(2, 512).check().is_ok());
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let big = Problem::new(usize::MAX, 2, 2, 64, DType::F16);
        assert!(matches!(big.check(), Err(Error::TooLarge { tensor: Name::Q, .. })));
        let long = mission().with_kv(8, MAX_LEN + 1);
        assert!(matches!(long.check(), Err(Error::TooLarge { tensor: Name::K, .. })));
    }

    #[test]
    fn scale_and_softcap_must_be_finite_and_positive() {
        for bad in [f32::NAN, f32::INFINITY, -1.0] {
            assert!(mission().with_scale(bad).check().is_err());
            assert!(mission().with_softcap(bad).check().is_err());
        }
        assert!(mission().with_scale(0.0).check().is_err());
        assert_eq!(mission().with_softcap(0.0).softcap, None);
    }

    #[test]
    fn a_text_that_is_no_problem_is_refused_with_the_word_that_is_wrong() {
        for (text, what) in [
            ("", "BxHxSxD"),
            ("1x8x512", "1x8x512"),
            ("1x8x-1x64", "1x8x-1x64"),
            ("1x8x512x64 f17", "f17"),
            ("1x8x512x64 window(3", "window(3"),
            ("1x8x512x64 softcap=much", "much"),
            ("1x8/3x512x64", "multiple"),
            ("1x8x512x4096", "head_dim"),
            ("1x8x512x64 packed=many", "many"),
            ("1x8x512x64 page=16", "16"),
            ("1x8x512x64 page=0/4", "at least one"),
            ("1x8x512x64 page=16/4 backward", "gradients"),
            ("1x8x512x64 packed=600 quantise", "quantising"),
            ("1x8x512x64 paged=16", "'paged=16' is unknown; possible behind the sizes are f16"),
            ("1x8x512x64 f16 f32", "'f16' and 'f32' say two things of the type"),
            ("1x8x512x64 causal lse full", "'causal' and 'full' say two things of the mask"),
            ("1x8x512x64 packed=600 page=16/4", "'packed=600' and 'page=16/4' say two things of keys"),
            ("1x8x512x64 softcap=3 softcap=3", "two things of the softcap"),
        ] {
            let said = text.parse::<Problem>().unwrap_err().to_string();
            assert!(said.contains(what), "{text}: {said}");
        }
        assert_eq!("1×8x512X64".parse(), Ok(mission()));
    }

    #[test]
    fn packed_and_paged_problems_are_others_than_the_dense_one_and_read_back() {
        let dense = Problem::new(16, 32, 4096, 128, DType::BF16).with_kv(8, 4096).with_mask(Mask::Causal);
        let packed_q = dense.with_queries(Queries::Packed { total: 300 });
        let (paged, packed_k) = (Keys::Paged { page: 16, pages: 4096 }, Keys::Packed { total: 700 });
        let text = "16x32/8x4096x128 bf16 causal";
        let of = [
            (dense, ""),
            (dense.with_packed(16728, 16728), " packed=16728"),
            (dense.with_packed(300, 700).backward(), " packed=300/700 backward"),
            (packed_q, " packed-q=300"),
            (dense.with_keys(packed_k), " packed-k=700"),
            (dense.with_keys(paged).with_key_lengths().with_lse(), " page=16/4096 key-lengths lse"),
            (packed_q.with_keys(paged), " packed-q=300 page=16/4096"),
        ];
        for (i, (problem, words)) in of.iter().enumerate() {
            assert_eq!(problem.to_string(), format!("{text}{words}"));
            assert_eq!(problem.to_string().parse(), Ok(*problem));
            assert!(of[..i].iter().all(|(other, _)| other != problem), "{problem}");
        }
    }

    #[test]
    fn totals_beyond_what_a_row_index_holds_are_refused() {
        let packed = |q, k| mission().with_packed(q, k).check();
        assert!(packed(MAX_LEN, MAX_LEN).is_ok());
        assert!(matches!(packed(MAX_LEN + 1, 1), Err(Error::TooLarge { tensor: Name::Q, .. })));
        assert!(matches!(packed(1, MAX_LEN + 1), Err(Error::TooLarge { tensor: Name::K, .. })));
    }

    #[test]
    fn a_backward_problem_is_another_one_and_has_five_products() {
        let backward = mission().backward();
        assert_ne!(backward, mission());
        assert_eq!(backward.to_string(), "1x8x512x64 f16 backward");
        assert_eq!(backward.flops(), 2.5 * mission().flops());
        // q, k, v, o, do, dq, dk and dv, and lse.
        assert_eq!(backward.min_bytes(), 8.0 * (8 * 512 * 64 * 2) as f64 + (8 * 512 * 4) as f64);
        assert_eq!(mission().with_lse().min_bytes(), 4.0 * (8 * 512 * 64 * 2) as f64 + (8 * 512 * 4) as f64);
    }

    #[test]
    fn causal_self_attention_counts_half() {
        assert_eq!(mission().flops(), 4.0 * 8.0 * 512.0 * 512.0 * 64.0);
        assert_eq!(mission().with_mask(Mask::Causal).flops(), mission().flops() / 2.0);
    }
}
