//! The element types that attention runs on.

use float8::F8E4M3;
use half::{bf16, f16};

/// The type of a tensor: of q, k and v, and of o unless that of q is too narrow for it. Accumulation is always in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub enum DType {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single precision.
    F32,
    /// 8 bits, 4 of exponent and 3 of fraction: up to 448, without infinities (torch's `float8_e4m3fn`). Of q, k and v.
    F8E4M3,
    /// Integers of 32 bits from 0 on: where sequences begin, and which pages they have. Attention is not computed on them.
    I32,
}

impl DType {
    /// Every type that attention is computed on, in the order that tables show them.
    pub const ALL: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F8E4M3];

    /// Those whose outputs and gradients are of the same type.
    pub const WIDE: [DType; 3] = [DType::F16, DType::BF16, DType::F32];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F8E4M3 => 1,
        }
    }

    /// The name used in the command line, in JSON and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F8E4M3 => "f8",
            DType::I32 => "i32",
        }
    }

    /// Rounds to the nearest value of this type; what is beyond the largest of f8 becomes that.
    pub fn round(self, x: f32) -> f32 {
        match self {
            DType::F16 => f16::from_f32(x).to_f32(),
            DType::BF16 => bf16::from_f32(x).to_f32(),
            DType::F32 => x,
            DType::F8E4M3 => F8E4M3::from_f32(x).to_f32(),
            DType::I32 => x.round(),
        }
    }

    /// Whether it has 8 bits: what is stored then needs descales, and o a type of its own.
    pub const fn is_f8(self) -> bool {
        matches!(self, DType::F8E4M3)
    }

    /// The distance from 1 to the next larger value.
    pub const fn epsilon(self) -> f32 {
        match self {
            DType::F16 => 9.765_625e-4,
            DType::BF16 => 7.812_5e-3,
            DType::F32 => f32::EPSILON,
            DType::F8E4M3 => 0.125,
            DType::I32 => 1.0,
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
            "f8" | "fp8" | "e4m3" | "f8e4m3" | "float8_e4m3fn" => Ok(DType::F8E4M3),
            _ => Err(crate::Error::Text {
                what: "dtype",
                given: s.into(),
                why: "possible are f16, bf16, f32 and f8".into(),
            }),
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for f32 {}
    impl Sealed for float8::F8E4M3 {}
    impl Sealed for i32 {}
    impl Sealed for u32 {}
}

/// A Rust type whose slices can be tensors: [`struct@f16`], [`bf16`], `f32` or [`F8E4M3`]; and `i32` or `u32`, for starts and
/// tables of pages.
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

impl Element for F8E4M3 {
    const DTYPE: DType = DType::F8E4M3;

    fn from_f32(x: f32) -> Self {
        F8E4M3::from_f32(x)
    }

    fn to_f32(self) -> f32 {
        F8E4M3::to_f32(&self)
    }
}

/// Both kinds of integers stand for the same numbers, from 0 up to 2³¹ − 1.
macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Element for $integer {
            const DTYPE: DType = DType::I32;

            fn from_f32(x: f32) -> Self {
                x.round() as Self
            }

            fn to_f32(self) -> f32 {
                self as f32
            }
        }
    )*};
}

integers!(i32, u32);
