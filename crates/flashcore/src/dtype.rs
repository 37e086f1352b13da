//! The element types that attention runs on.

use half::{bf16, f16};

/// The type of q, k, v and o. Accumulation is always in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub enum DType {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single precision.
    F32,
}

impl DType {
    /// Every type, in the order that tables show them.
    pub const ALL: [DType; 3] = [DType::F16, DType::BF16, DType::F32];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F16 | DType::BF16 => 2,
            DType::F32 => 4,
        }
    }

    /// The name used in the command line, in JSON and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
        }
    }

    /// Rounds to the nearest value of this type.
    pub fn round(self, x: f32) -> f32 {
        match self {
            DType::F16 => f16::from_f32(x).to_f32(),
            DType::BF16 => bf16::from_f32(x).to_f32(),
            DType::F32 => x,
        }
    }

    /// The distance from 1 to the next larger value.
    pub const fn epsilon(self) -> f32 {
        match self {
            DType::F16 => 9.765_625e-4,
            DType::BF16 => 7.812_5e-3,
            DType::F32 => f32::EPSILON,
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = crate::Error;

    fn from_str(s: &str) -> crate::Result<Self> {
        match s.to_ascii_lowercase().as_str() {
            "f16" | "fp16" | "float16" | "half" => Ok(DType::F16),
            "bf16" | "bfloat16" => Ok(DType::BF16),
            "f32" | "fp32" | "float32" | "float" => Ok(DType::F32),
            _ => Err(crate::Error::Text {
                what: "dtype",
                given: s.into(),
                why: "possible are f16, bf16 and f32".into(),
            }),
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for f32 {}
}

/// A Rust type whose slices can be tensors: [`struct@f16`], [`bf16`] or `f32`.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// The dtype of this Rust type.
    const DTYPE: DType;

    /// Rounds to the nearest value of this type.
    fn from_f32(x: f32) -> Self;

    /// The exact value.
    fn to_f32(self) -> f32;
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;

    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }

    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;

    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }

    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    fn from_f32(x: f32) -> Self {
        x
    }

    fn to_f32(self) -> f32 {
        self
    }
}
