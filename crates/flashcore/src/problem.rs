//! Problem: what is asked of attention, as a pure value.

use crate::{DType, Error, Mask, Name, Result};

/// The largest head dim of the contract; a device may take less.
pub const MAX_HEAD_DIM: usize = 1024;

/// The largest sequence length, so that row indices fit a signed 32-bit integer on every device.
pub const MAX_LEN: usize = i32::MAX as usize;

/// What is asked: sizes, dtype, mask, scale, softcap and the outputs wanted. A pure value without any data.
///
/// ```
/// use flashcore::{DType, Mask, Problem};
/// let problem = Problem::new(1, 8, 512, 64, DType::F16).with_mask(Mask::Causal);
/// assert!(problem.check().is_ok());
/// assert_eq!(problem.scale, 0.125);
/// assert_eq!(problem.to_string(), "1x8x512x64 f16 causal");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Problem {
    /// Batch entries.
    pub batch: usize,
    /// Heads of q and o.
    pub heads_q: usize,
    /// Heads of k and v; divides `heads_q`.
    pub heads_kv: usize,
    /// Queries a head.
    pub len_q: usize,
    /// Keys a head.
    pub len_k: usize,
    /// Elements of a query and of a key.
    pub head_dim: usize,
    /// Elements of a value and of an output row.
    pub head_dim_v: usize,
    /// The type of q, k, v and o.
    pub dtype: DType,
    /// Which keys a query may attend to.
    pub mask: Mask,
    /// Whether each batch entry has a key length of its own, given with the call.
    pub key_lengths: bool,
    /// What the scores are multiplied with before the softmax.
    pub scale: f32,
    /// Scores become `softcap · tanh(score / softcap)` before the mask.
    pub softcap: Option<f32>,
    /// Whether lse, the natural logarithm of the sum of exponentials a query, is wanted.
    pub lse: bool,
}

impl Problem {
    /// Self-attention without a mask, with the default scale 1/√head_dim.
    pub fn new(batch: usize, heads: usize, len: usize, head_dim: usize, dtype: DType) -> Self {
        Self {
            batch,
            heads_q: heads,
            heads_kv: heads,
            len_q: len,
            len_k: len,
            head_dim,
            head_dim_v: head_dim,
            dtype,
            mask: Mask::None,
            key_lengths: false,
            scale: default_scale(head_dim),
            softcap: None,
            lse: false,
        }
    }

    /// With other heads and another length for k and v.
    pub fn with_kv(self, heads_kv: usize, len_k: usize) -> Self {
        Self { heads_kv, len_k, ..self }
    }

    /// With another head dim for v and o.
    pub fn with_head_dim_v(self, head_dim_v: usize) -> Self {
        Self { head_dim_v, ..self }
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

    /// With lse wanted.
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
        let sizes = [
            (Name::Q, self.heads_q, self.len_q, self.head_dim),
            (Name::K, self.heads_kv, self.len_k, self.head_dim),
            (Name::V, self.heads_kv, self.len_k, self.head_dim_v),
            (Name::O, self.heads_q, self.len_q, self.head_dim_v),
        ];
        for (tensor, heads, len, head_dim) in sizes {
            if len > MAX_LEN {
                return Err(Error::TooLarge {
                    tensor,
                    what: format!("length {len}, possible is up to {MAX_LEN}"),
                });
            }
            let elements = [self.batch, heads, len, head_dim, self.dtype.size()]
                .into_iter()
                .try_fold(1_usize, usize::checked_mul);
            if elements.is_none_or(|bytes| bytes > isize::MAX as usize) {
                let what =
                    format!("{}x{heads}x{len}x{head_dim} elements overflow the address space", self.batch);
                return Err(Error::TooLarge { tensor, what });
            }
        }
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

    /// How many query heads share one kv head.
    pub fn group(&self) -> usize {
        self.heads_q / self.heads_kv.max(1)
    }

    /// The floating-point operations that count: 2·(head_dim + head_dim_v) for each query and key that meet.
    /// Causal self-attention counts exactly half of full attention, as the field does; every other mask counts
    /// the pairs that it leaves.
    pub fn flops(&self) -> f64 {
        let full = self.len_q as f64 * self.len_k as f64;
        let pairs = match self.mask {
            Mask::None => full,
            Mask::Causal | Mask::CausalTopLeft if self.len_q == self.len_k => full / 2.0,
            mask => mask.pairs(self.len_q, self.len_k) as f64,
        };
        2.0 * (self.head_dim + self.head_dim_v) as f64 * pairs * (self.batch * self.heads_q) as f64
    }

    /// The fewest bytes that must move: each input read once, each output written once.
    pub fn min_bytes(&self) -> f64 {
        let q = self.heads_q as f64 * self.len_q as f64 * (self.head_dim + self.head_dim_v) as f64;
        let kv = self.heads_kv as f64 * self.len_k as f64 * (self.head_dim + self.head_dim_v) as f64;
        let lse = if self.lse { 4.0 * self.heads_q as f64 * self.len_q as f64 } else { 0.0 };
        self.batch as f64 * ((q + kv) * self.dtype.size() as f64 + lse)
    }
}

/// 1/√head_dim.
pub fn default_scale(head_dim: usize) -> f32 {
    (1.0 / (head_dim.max(1) as f64).sqrt()) as f32
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}x{}x{} {}", self.batch, self.heads_q, self.len_q, self.head_dim, self.dtype)?;
        if self.mask != Mask::None {
            write!(f, " {}", self.mask)?;
        }
        if self.len_k != self.len_q {
            write!(f, " len_k={}", self.len_k)?;
        }
        if self.heads_kv != self.heads_q {
            write!(f, " heads_kv={}", self.heads_kv)?;
        }
        if self.head_dim_v != self.head_dim {
            write!(f, " head_dim_v={}", self.head_dim_v)?;
        }
        if let Some(softcap) = self.softcap {
            write!(f, " softcap={softcap}")?;
        }
        if self.scale != default_scale(self.head_dim) {
            write!(f, " scale={}", self.scale)?;
        }
        if self.key_lengths {
            write!(f, " key-lengths")?;
        }
        Ok(())
    }
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
    fn causal_self_attention_counts_half() {
        assert_eq!(mission().flops(), 4.0 * 8.0 * 512.0 * 512.0 * 64.0);
        assert_eq!(mission().with_mask(Mask::Causal).flops(), mission().flops() / 2.0);
    }
}
