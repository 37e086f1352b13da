//! Tensor maps: descriptions of tiled global memory that the TMA unit follows.
//!
//! Dimensions are counted from the innermost, as the hardware does: `dims[0]` is contiguous, `strides[0]` is
//! the distance in bytes between neighbours along `dims[1]`. All rules of the driver are checked here first,
//! because the driver's own answer to any breach is "invalid argument".

use crate::api::call_optional;
use crate::context::Context;
use crate::error::DriverError;
use crate::sys::*;
use std::ffi::c_uint;
use std::fmt;

/// The type of an element. 8-bit floats are [`TensorMapElement::U8`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it.
pub enum TensorMapElement {
    U8,
    U16,
    U32,
    I32,
    U64,
    I64,
    F16,
    F32,
    F64,
    Bf16,
}

impl TensorMapElement {
    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            TensorMapElement::U8 => 1,
            TensorMapElement::U16 | TensorMapElement::F16 | TensorMapElement::Bf16 => 2,
            TensorMapElement::U32 | TensorMapElement::I32 | TensorMapElement::F32 => 4,
            TensorMapElement::U64 | TensorMapElement::I64 | TensorMapElement::F64 => 8,
        }
    }

    fn is_float(self) -> bool {
        matches!(
            self,
            TensorMapElement::F16 | TensorMapElement::Bf16 | TensorMapElement::F32 | TensorMapElement::F64
        )
    }

    /// CUtensorMapDataType.
    fn raw(self) -> c_uint {
        match self {
            TensorMapElement::U8 => 0,
            TensorMapElement::U16 => 1,
            TensorMapElement::U32 => 2,
            TensorMapElement::I32 => 3,
            TensorMapElement::U64 => 4,
            TensorMapElement::I64 => 5,
            TensorMapElement::F16 => 6,
            TensorMapElement::F32 => 7,
            TensorMapElement::F64 => 8,
            TensorMapElement::Bf16 => 9,
        }
    }
}

/// How 16-byte chunks are permuted in shared memory, so that columns can be read without bank conflicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it.
pub enum Swizzle {
    None,
    Bytes32,
    Bytes64,
    Bytes128,
}

impl Swizzle {
    /// The bytes within which chunks are permuted: the longest inner box. `None` has no such limit.
    pub fn span(self) -> Option<u64> {
        match self {
            Swizzle::None => None,
            Swizzle::Bytes32 => Some(32),
            Swizzle::Bytes64 => Some(64),
            Swizzle::Bytes128 => Some(128),
        }
    }

    /// CUtensorMapSwizzle.
    fn raw(self) -> c_uint {
        match self {
            Swizzle::None => 0,
            Swizzle::Bytes32 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes128 => 3,
        }
    }
}

/// How much a miss fetches into the L2 cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it.
pub enum L2Promotion {
    None,
    Bytes64,
    Bytes128,
    Bytes256,
}

impl L2Promotion {
    /// CUtensorMapL2promotion.
    fn raw(self) -> c_uint {
        match self {
            L2Promotion::None => 0,
            L2Promotion::Bytes64 => 1,
            L2Promotion::Bytes128 => 2,
            L2Promotion::Bytes256 => 3,
        }
    }
}

/// What is loaded for elements outside the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutOfBounds {
    /// Zeros.
    Zeros,
    /// A special NaN that the tensor cores count as zero; for floats only.
    Nan,
}

impl OutOfBounds {
    /// CUtensorMapFloatOOBfill.
    fn raw(self) -> c_uint {
        match self {
            OutOfBounds::Zeros => 0,
            OutOfBounds::Nan => 1,
        }
    }
}

/// An encoded tensor map: 128 opaque bytes, passed to a kernel by value.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct TensorMap {
    opaque: [u8; 128],
}

impl TensorMap {
    /// The bytes, as a kernel parameter holds them.
    pub fn as_bytes(&self) -> &[u8; 128] {
        &self.opaque
    }

    pub(crate) fn zeroed() -> Self {
        Self { opaque: [0; 128] }
    }
}

impl fmt::Debug for TensorMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TensorMap(..)")
    }
}

/// A rule that a [`TensorMapSpec`] breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum TensorMapError {
    #[error("the rank is {0}; 1 to 5 are possible")]
    Rank(usize),
    #[error("a tensor of rank {rank} has {strides} strides and {boxes} box sizes; it needs {} and {rank}", rank - 1)]
    Lengths { rank: usize, strides: usize, boxes: usize },
    #[error("the address {0:#x} is not a multiple of 16")]
    Address(u64),
    #[error("dimension {dim} has {size} elements; 1 to 2^32 are possible")]
    Dim { dim: usize, size: u64 },
    #[error("the stride of dimension {dim} is {bytes} bytes; it must be a multiple of 16 below 2^40")]
    Stride { dim: usize, bytes: u64 },
    #[error("the box has {size} elements in dimension {dim}; 1 to 256 are possible")]
    Box { dim: usize, size: u32 },
    #[error("the box's rows have {0} bytes; they must be a multiple of 16")]
    InnerBox(u64),
    #[error(
        "the box's rows have {row} bytes, more than the {span} within which the swizzle permutes; use several boxes"
    )]
    SwizzleSpan { row: u64, span: u64 },
    #[error("a NaN fill is possible for floats only, not for {0:?}")]
    NanFill(TensorMapElement),
}

/// What a tensor map describes. Every element of the box is taken (element strides of 1), without
/// interleaving.
///
/// ```
/// use flashcore_driver::*;
///
/// // A row-major [4096][64] matrix of f16, in boxes of 128 rows.
/// let spec = TensorMapSpec {
///     element: TensorMapElement::F16,
///     address: 0x7f00_0000_0000,
///     dims: &[64, 4096],
///     strides: &[64 * 2],
///     box_dims: &[64, 128],
///     swizzle: Swizzle::Bytes128,
///     l2_promotion: L2Promotion::Bytes256,
///     out_of_bounds: OutOfBounds::Zeros,
/// };
/// assert_eq!(spec.validate(), Ok(()));
/// assert_eq!(spec.box_bytes(), 128 * 64 * 2);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMapSpec<'a> {
    /// The type of an element.
    pub element: TensorMapElement,
    /// The address of the first element.
    pub address: u64,
    /// Elements in each dimension, the contiguous one first.
    pub dims: &'a [u64],
    /// Bytes between neighbours in each dimension but the first.
    pub strides: &'a [u64],
    /// Elements of a box in each dimension.
    pub box_dims: &'a [u32],
    /// The permutation in shared memory.
    pub swizzle: Swizzle,
    /// How much a miss fetches.
    pub l2_promotion: L2Promotion,
    /// What is loaded for elements outside the tensor.
    pub out_of_bounds: OutOfBounds,
}

impl TensorMapSpec<'_> {
    /// Bytes that one box brings to shared memory: what the barrier must expect, parts outside the tensor
    /// included.
    pub fn box_bytes(&self) -> u64 {
        self.box_dims.iter().map(|n| u64::from(*n)).product::<u64>() * self.element.bytes()
    }

    /// Checks every rule that the driver has for such a map.
    pub fn validate(&self) -> Result<(), TensorMapError> {
        let rank = self.dims.len();
        if !(1..=5).contains(&rank) {
            return Err(TensorMapError::Rank(rank));
        }
        if self.strides.len() != rank - 1 || self.box_dims.len() != rank {
            let (strides, boxes) = (self.strides.len(), self.box_dims.len());
            return Err(TensorMapError::Lengths { rank, strides, boxes });
        }
        if !self.address.is_multiple_of(16) {
            return Err(TensorMapError::Address(self.address));
        }
        for (dim, &size) in self.dims.iter().enumerate() {
            if !(1..=1 << 32).contains(&size) {
                return Err(TensorMapError::Dim { dim, size });
            }
        }
        for (index, &bytes) in self.strides.iter().enumerate() {
            if !bytes.is_multiple_of(16) || bytes >= 1 << 40 {
                return Err(TensorMapError::Stride { dim: index + 1, bytes });
            }
        }
        for (dim, &size) in self.box_dims.iter().enumerate() {
            if !(1..=256).contains(&size) {
                return Err(TensorMapError::Box { dim, size });
            }
        }
        let row = u64::from(self.box_dims[0]) * self.element.bytes();
        if !row.is_multiple_of(16) {
            return Err(TensorMapError::InnerBox(row));
        }
        if let Some(span) = self.swizzle.span()
            && row > span
        {
            return Err(TensorMapError::SwizzleSpan { row, span });
        }
        if self.out_of_bounds == OutOfBounds::Nan && !self.element.is_float() {
            return Err(TensorMapError::NanFill(self.element));
        }
        Ok(())
    }

    /// Encodes the map for the context's GPU.
    pub fn encode(&self, context: &Context) -> Result<TensorMap, DriverError> {
        self.validate()?;
        let properties = context.properties();
        if properties.compute_capability.major < 9 {
            return Err(DriverError::Unsupported {
                device: properties.name.clone(),
                what: "tensor maps",
                needs: "compute capability 9.0",
            });
        }
        let every_element: [c_uint; 5] = [1; 5];
        let mut map = TensorMap::zeroed();
        let _entered = context.enter()?;
        // SAFETY: `map` is 64-byte aligned; the arrays have `rank` entries (`rank - 1` for the strides), as
        // validated; the address is stored, not read.
        unsafe {
            call_optional!(
                context.driver(),
                cuTensorMapEncodeTiled(
                    &raw mut map,
                    self.element.raw(),
                    self.dims.len() as c_uint,
                    std::ptr::with_exposed_provenance_mut(self.address as usize),
                    self.dims.as_ptr(),
                    self.strides.as_ptr(),
                    self.box_dims.as_ptr(),
                    every_element.as_ptr(),
                    CU_TENSOR_MAP_INTERLEAVE_NONE,
                    self.swizzle.raw(),
                    self.l2_promotion.raw(),
                    self.out_of_bounds.raw()
                )
            )
        }?;
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: TensorMapSpec<'static> = TensorMapSpec {
        element: TensorMapElement::F16,
        address: 0x1000,
        dims: &[64, 512, 8],
        strides: &[128, 65536],
        box_dims: &[64, 128, 1],
        swizzle: Swizzle::Bytes128,
        l2_promotion: L2Promotion::Bytes256,
        out_of_bounds: OutOfBounds::Zeros,
    };

    #[test]
    fn a_map_is_128_bytes_aligned_to_64() {
        assert_eq!((size_of::<TensorMap>(), align_of::<TensorMap>()), (128, 64));
    }

    #[test]
    fn a_good_map_passes_and_knows_the_bytes_of_its_box() {
        assert_eq!(GOOD.validate(), Ok(()));
        assert_eq!(GOOD.box_bytes(), 64 * 128 * 2);
    }

    #[test]
    fn rank_is_one_to_five() {
        let none = TensorMapSpec { dims: &[], strides: &[], box_dims: &[], ..GOOD };
        assert_eq!(none.validate(), Err(TensorMapError::Rank(0)));
        let six = TensorMapSpec { dims: &[1; 6], strides: &[16; 5], box_dims: &[8; 6], ..GOOD };
        assert_eq!(six.validate(), Err(TensorMapError::Rank(6)));
        let one = TensorMapSpec { dims: &[64], strides: &[], box_dims: &[64], ..GOOD };
        assert_eq!(one.validate(), Ok(()));
    }

    #[test]
    fn strides_and_boxes_must_be_as_many_as_the_rank_asks() {
        let wrong = TensorMapSpec { strides: &[128], ..GOOD };
        assert_eq!(wrong.validate(), Err(TensorMapError::Lengths { rank: 3, strides: 1, boxes: 3 }));
    }

    #[test]
    fn addresses_and_strides_are_multiples_of_16() {
        assert_eq!(
            TensorMapSpec { address: 0x1008, ..GOOD }.validate(),
            Err(TensorMapError::Address(0x1008))
        );
        let odd = TensorMapSpec { strides: &[128, 65544], ..GOOD };
        assert_eq!(odd.validate(), Err(TensorMapError::Stride { dim: 2, bytes: 65544 }));
        let far = TensorMapSpec { strides: &[128, 1 << 40], ..GOOD };
        assert_eq!(far.validate(), Err(TensorMapError::Stride { dim: 2, bytes: 1 << 40 }));
    }

    #[test]
    fn dimensions_are_one_to_two_to_the_32() {
        let largest = TensorMapSpec { dims: &[64, 1 << 32, 8], ..GOOD };
        assert_eq!(largest.validate(), Ok(()));
        let larger = TensorMapSpec { dims: &[64, (1 << 32) + 1, 8], ..GOOD };
        assert_eq!(larger.validate(), Err(TensorMapError::Dim { dim: 1, size: (1 << 32) + 1 }));
        let empty = TensorMapSpec { dims: &[64, 0, 8], ..GOOD };
        assert_eq!(empty.validate(), Err(TensorMapError::Dim { dim: 1, size: 0 }));
    }

    #[test]
    fn boxes_have_one_to_256_elements_and_rows_of_16_byte_chunks() {
        let tall = TensorMapSpec { box_dims: &[64, 257, 1], ..GOOD };
        assert_eq!(tall.validate(), Err(TensorMapError::Box { dim: 1, size: 257 }));
        let odd = TensorMapSpec { box_dims: &[20, 128, 1], ..GOOD };
        assert_eq!(odd.validate(), Err(TensorMapError::InnerBox(40)));
    }

    #[test]
    fn a_swizzled_row_must_fit_its_span() {
        let wide = TensorMapSpec { box_dims: &[128, 64, 1], ..GOOD };
        assert_eq!(wide.validate(), Err(TensorMapError::SwizzleSpan { row: 256, span: 128 }));
        assert_eq!(TensorMapSpec { swizzle: Swizzle::None, ..wide }.validate(), Ok(()));
    }

    #[test]
    fn only_floats_are_filled_with_nan() {
        let nan = TensorMapSpec { out_of_bounds: OutOfBounds::Nan, ..GOOD };
        assert_eq!(nan.validate(), Ok(()));
        let bytes = TensorMapSpec { element: TensorMapElement::U8, ..nan };
        assert_eq!(bytes.validate(), Err(TensorMapError::NanFill(TensorMapElement::U8)));
    }
}
