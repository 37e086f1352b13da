//! Spec: the part of an attention problem that a kernel is compiled for. Sizes beside the head dims are
//! parameters of the launch, so one module serves every batch, head count and length.

/// The element type of q, k, v and o.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

/// What a kernel is compiled for. What a problem does not ask for costs nothing: it is not emitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    /// The element type.
    pub dtype: Dtype,
    /// Elements of a query and of a key: a multiple of 8, at most 256.
    pub head_dim: u32,
    /// Elements of a value and of an output row: a multiple of 8, at most 256.
    pub head_dim_v: u32,
    /// Whether a query sees only so many keys before its own place.
    pub left: bool,
    /// Whether a query sees only so many keys after its own place (causal: none).
    pub right: bool,
    /// Whether a query's own place counts from the first key rather than from the last.
    pub top_left: bool,
    /// Whether scores go through softcap · tanh(score / softcap).
    pub softcap: bool,
    /// Whether each batch entry has a key length of its own.
    pub key_lengths: bool,
    /// Whether several query heads share one kv head.
    pub grouped: bool,
    /// Whether lse is written.
    pub lse: bool,
}

/// The largest head dim of the kernels.
pub const MAX_HEAD_DIM: u32 = 256;

impl Spec {
    /// Full attention with one head dim, nothing else.
    pub fn new(dtype: Dtype, head_dim: u32) -> Self {
        Self {
            dtype,
            head_dim,
            head_dim_v: head_dim,
            left: false,
            right: false,
            top_left: false,
            softcap: false,
            key_lengths: false,
            grouped: false,
            lse: false,
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

    /// Whether some queries may not see some keys that exist.
    pub fn is_masked(&self) -> bool {
        self.left || self.right
    }
}
