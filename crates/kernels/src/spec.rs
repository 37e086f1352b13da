//! Spec: the part of an attention problem that a kernel is compiled for. Sizes other than the head dims are launch
//! parameters, so one module serves every batch, head count and length.

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single precision, which only the scalar kernel takes.
    F32,
    /// 8 bits with 4 of exponent and 3 of fraction, up to 448 and without infinities: of q, k and v, never of o. The
    /// forward kernels for Ada and for Hopper take it.
    E4m3,
}

impl ElementType {
    /// Bytes per element.
    pub const fn size(self) -> u32 {
        match self {
            ElementType::F16 | ElementType::Bf16 => 2,
            ElementType::F32 => 4,
            ElementType::E4m3 => 1,
        }
    }

    /// Whether elements are floats of 8 bits.
    pub const fn is_fp8(self) -> bool {
        matches!(self, ElementType::E4m3)
    }
}

/// What a kernel is compiled for. What a problem does not ask for costs nothing: it is not emitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    /// The element type of q, k, v, and of o unless `out` names another.
    pub dtype: ElementType,
    /// The element type of o where it has one of its own: f16 or bf16 with e4m3, and `None` with all others.
    pub out: Option<ElementType>,
    /// The element type of k and v where it is not that of q: e4m3, of a cache that [`Kernel::Sm80Decode`] reads.
    ///
    /// [`Kernel::Sm80Decode`]: crate::Kernel::Sm80Decode
    pub kv: Option<ElementType>,
    /// How many keys share a descale of k and one of v, where not all of a head do: kernels that take e4m3 take such, where each
    /// of their key tiles lies in one block.
    pub descale_keys: Option<u32>,
    /// Elements of a query and of a key; the tensor-core kernels take multiples of 8 up to 256.
    pub head_dim: u32,
    /// Elements of a value and of an output row, likewise.
    pub head_dim_v: u32,
    /// Whether the keys before its own position that a query sees are limited.
    pub left: bool,
    /// Whether the keys after its own position that a query sees are limited (causal: to none).
    pub right: bool,
    /// Whether a query's own position counts from the first key rather than from the last.
    pub top_left: bool,
    /// Whether scores go through softcap · tanh(score / softcap).
    pub softcap: bool,
    /// Whether scores are scaled before the softmax, rather than within its exponential. It costs a few instructions
    /// per score, and is right for every scale and softcap; see [`Spec::needs_scaled_scores`]. Queries of e4m3 need it with
    /// [`descale_keys`](Self::descale_keys), too.
    pub scaled_scores: bool,
    /// Whether each batch entry has a key length of its own.
    pub key_lengths: bool,
    /// Whether the queries of all sequences lie one behind the other, and only the GPU knows where each begins:
    /// [`Operand::QStarts`](crate::Operand::QStarts). [`Kernel::Sm80Fwd`](crate::Kernel::Sm80Fwd),
    /// [`Kernel::Sm80Decode`](crate::Kernel::Sm80Decode), [`Kernel::Sm90Fwd`](crate::Kernel::Sm90Fwd) and the backward kernels take
    /// them.
    pub packed_q: bool,
    /// The same for keys and values: [`Operand::KStarts`](crate::Operand::KStarts).
    pub packed_k: bool,
    /// Keys of a page, where keys and values lie in pages of a pool that [`Operand::Pages`](crate::Operand::Pages) lists.
    /// k and v are then (pages, kv heads, keys of a page, head dim). [`Kernel::Sm80Fwd`](crate::Kernel::Sm80Fwd) takes them,
    /// and, where it is a multiple of 16, [`Kernel::Sm90Fwd`](crate::Kernel::Sm90Fwd) and
    /// [`Kernel::Sm80Decode`](crate::Kernel::Sm80Decode).
    pub page: Option<u32>,
    /// Whether several query heads share one kv head.
    pub grouped: bool,
    /// Rows of a tile that a query has: 1; or, where the heads that share a kv head are rows of one tile, their number.
    /// Row r is then query r / `rows_per_query` of the group's head r % `rows_per_query`.
    pub rows_per_query: u32,
    /// Whether lse is written.
    pub lse: bool,
    /// Whether the kernel stamps its [phases](crate::Phase). It then has parameters more, and computes the same.
    pub traced: bool,
}

/// The largest head dim of the tensor-core kernels.
pub const MAX_TENSOR_CORE_HEAD_DIM: u32 = 256;

/// The largest softcap whose error is far below that of 16-bit probabilities when it is computed the fast way: models
/// use 15 to 50.
const MAX_FAST_SOFTCAP: f32 = 64.0;

/// The scales, as parts of the softcap, whose powers up to the ninth are normal numbers.
const FAST_TANH_SCALES: std::ops::RangeInclusive<f32> = 2e-4..=1e4;

impl Spec {
    /// Full attention with one head dim, nothing else; from e4m3 to bf16.
    pub fn new(dtype: ElementType, head_dim: u32) -> Self {
        Self {
            dtype,
            out: (dtype == ElementType::E4m3).then_some(ElementType::Bf16),
            kv: None,
            descale_keys: None,
            head_dim,
            head_dim_v: head_dim,
            left: false,
            right: false,
            top_left: false,
            softcap: false,
            scaled_scores: false,
            key_lengths: false,
            packed_q: false,
            packed_k: false,
            page: None,
            grouped: false,
            rows_per_query: 1,
            lse: false,
            traced: false,
        }
    }

    /// The same with a causal mask.
    pub fn causal(self) -> Self {
        Self { right: true, ..self }
    }

    /// The same with lse written.
    pub fn with_lse(self) -> Self {
        Self { lse: true, ..self }
    }

    /// Whether this scale and softcap need [`Spec::scaled_scores`], for inputs of this type.
    ///
    /// The fast way computes a polynomial of the dot product for small scores, and `1 − 2 / (1 + e^2x)` for large ones; the
    /// softcap is part of the exponent's scale, which would round away the last bits of larger ones. And it multiplies by `scale · log2 e` scores that may be −∞, so that factor must be
    /// finite and above 0.
    pub fn needs_scaled_scores(dtype: ElementType, scale: f32, softcap: Option<f32>) -> bool {
        let factor = softcap.unwrap_or(scale) * std::f32::consts::LOG2_E;
        let fast_tanh =
            softcap.is_none_or(|cap| cap <= MAX_FAST_SOFTCAP && FAST_TANH_SCALES.contains(&(scale / cap)));
        let fast = factor.is_normal() && factor > 0.0 && fast_tanh;
        // The descales of e4m3 are part of the scale, and known to the GPU alone: a softcap has to be right for all.
        let any_scale = dtype == ElementType::E4m3 && softcap.is_some();
        !fast || any_scale || dtype == ElementType::F32
    }

    /// The element type of o.
    pub fn out(&self) -> ElementType {
        self.out.unwrap_or(self.dtype)
    }

    /// Whether what lies behind a batch entry's last key may be anything: another's keys, or what nobody has written.
    pub fn has_foreign_keys(&self) -> bool {
        self.key_lengths || self.packed_k || self.page.is_some()
    }

    /// Whether values have as many elements as keys.
    pub(crate) fn has_one_dim(&self) -> bool {
        self.head_dim == self.head_dim_v
    }

    /// Whether some queries may not see some keys that exist.
    pub fn is_masked(&self) -> bool {
        self.left || self.right
    }
}
