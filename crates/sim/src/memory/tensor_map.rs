//! Tensor maps: what a TMA copy knows of a tensor in global memory.
//!
//! A [`TensorMap`] has the fields that the driver's `cuTensorMapEncodeTiled` takes, and the same limits. The
//! driver's 128 bytes are opaque; [`TensorMap::encode`] makes 128 bytes of the simulator's own, which travel as a
//! kernel parameter in the same place.

/// The element of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorElement {
    /// A byte: also for fp8.
    U8,
    /// 16 unsigned bits.
    U16,
    /// 32 unsigned bits.
    U32,
    /// 32 signed bits.
    S32,
    /// 64 unsigned bits.
    U64,
    /// 64 signed bits.
    S64,
    /// Half precision.
    F16,
    /// Brain float.
    Bf16,
    /// Single precision.
    F32,
}

impl TensorElement {
    const ALL: [TensorElement; 9] = [
        TensorElement::U8,
        TensorElement::U16,
        TensorElement::U32,
        TensorElement::S32,
        TensorElement::U64,
        TensorElement::S64,
        TensorElement::F16,
        TensorElement::Bf16,
        TensorElement::F32,
    ];

    /// Its size.
    pub const fn bytes(self) -> u32 {
        match self {
            TensorElement::U8 => 1,
            TensorElement::U16 | TensorElement::F16 | TensorElement::Bf16 => 2,
            TensorElement::U32 | TensorElement::S32 | TensorElement::F32 => 4,
            TensorElement::U64 | TensorElement::S64 => 8,
        }
    }
}

/// How 16-byte chunks are permuted in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Swizzle {
    /// Not at all.
    #[default]
    None,
    /// Within 32 bytes: address bit 4 is xored with bit 7.
    B32,
    /// Within 64 bytes: bits 4 and 5 with bits 7 and 8.
    B64,
    /// Within 128 bytes: bits 4 to 6 with bits 7 to 9.
    B128,
}

impl Swizzle {
    const ALL: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

    /// The bytes within which chunks move; 16 where none do.
    pub const fn span(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }

    /// Where the byte of a plain address lies.
    #[inline]
    pub const fn apply(self, address: u32) -> u32 {
        let bits = match self {
            Swizzle::None => 0,
            Swizzle::B32 => 1,
            Swizzle::B64 => 3,
            Swizzle::B128 => 7,
        };
        address ^ (address >> 7 & bits) << 4
    }
}

/// A tensor in global memory, and the box of it that one copy moves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorMap {
    /// The element.
    pub element: TensorElement,
    /// The device address of the first element.
    pub address: u64,
    /// Elements of each dimension, the innermost first: 1 to 5 of them.
    pub dims: Vec<u64>,
    /// Bytes from one element to the next of each dimension but the innermost.
    pub strides: Vec<u64>,
    /// Elements of the box in each dimension.
    pub box_dims: Vec<u32>,
    /// Every how many elements of a dimension the box takes one.
    pub element_strides: Vec<u32>,
    /// How the box is permuted in shared memory.
    pub swizzle: Swizzle,
    /// Whether elements outside of the tensor read as NaN rather than as zero.
    pub fill_nan: bool,
}

const MAGIC: u32 = 0x4D_54_43_46;

impl TensorMap {
    /// A map with every element of the box taken, no swizzle, and zeros outside.
    pub fn new(
        element: TensorElement,
        address: u64,
        dims: &[u64],
        strides: &[u64],
        box_dims: &[u32],
    ) -> TensorMap {
        TensorMap {
            element,
            address,
            dims: dims.to_vec(),
            strides: strides.to_vec(),
            box_dims: box_dims.to_vec(),
            element_strides: vec![1; dims.len()],
            swizzle: Swizzle::None,
            fill_nan: false,
        }
    }

    /// The same with a swizzle.
    pub fn swizzled(self, swizzle: Swizzle) -> TensorMap {
        TensorMap { swizzle, ..self }
    }

    /// What the driver would refuse, in words.
    pub fn check(&self) -> Result<(), String> {
        let rank = self.dims.len();
        let bytes = self.element.bytes();
        if !(1..=5).contains(&rank) {
            return Err(format!("a tensor of {rank} dimensions; 1 to 5 are possible"));
        }
        if self.strides.len() != rank - 1 || self.box_dims.len() != rank || self.element_strides.len() != rank
        {
            return Err(format!("{rank} dimensions need {} strides and {rank} box dimensions", rank - 1));
        }
        if !self.address.is_multiple_of(16) {
            return Err(format!("the address {:#x} is not a multiple of 16", self.address));
        }
        if let Some(dim) = self.dims.iter().find(|&&d| d == 0 || d > 1 << 32) {
            return Err(format!("a dimension of {dim} elements; 1 to 2^32 are possible"));
        }
        if let Some(stride) = self.strides.iter().find(|&&s| s % 16 != 0 || s >= 1 << 40) {
            return Err(format!("a stride of {stride} bytes; multiples of 16 below 2^40 are possible"));
        }
        if let Some(size) = self.box_dims.iter().find(|&&b| b == 0 || b > 256) {
            return Err(format!("a box of {size} elements in a dimension; 1 to 256 are possible"));
        }
        if let Some(stride) = self.element_strides.iter().find(|&&s| s == 0 || s > 8) {
            return Err(format!("an element stride of {stride}; 1 to 8 are possible"));
        }
        let inner = self.taken(0) * bytes;
        if !inner.is_multiple_of(16) {
            return Err(format!(
                "the innermost box dimension has {inner} bytes, which is not a multiple of 16"
            ));
        }
        if self.swizzle != Swizzle::None && inner > self.swizzle.span() {
            return Err(format!(
                "the innermost box dimension has {inner} bytes; the swizzle allows {}",
                self.swizzle.span()
            ));
        }
        Ok(())
    }

    /// The elements that the box takes of a dimension.
    pub fn taken(&self, dim: usize) -> u32 {
        self.box_dims[dim].div_ceil(self.element_strides[dim])
    }

    /// The bytes of a box in shared memory, elements outside of the tensor included.
    pub fn box_bytes(&self) -> u32 {
        (0..self.dims.len()).map(|d| self.taken(d)).product::<u32>() * self.element.bytes()
    }

    /// The 128 bytes that a launch passes as a kernel parameter.
    pub fn encode(&self) -> Result<[u8; 128], String> {
        self.check()?;
        let mut out = [0u8; 128];
        out[..4].copy_from_slice(&MAGIC.to_le_bytes());
        let index = |all: usize| all as u8;
        out[8] = index(self.dims.len());
        out[9] = index(TensorElement::ALL.iter().position(|e| *e == self.element).unwrap_or(0));
        out[10] = index(Swizzle::ALL.iter().position(|s| *s == self.swizzle).unwrap_or(0));
        out[11] = u8::from(self.fill_nan);
        out[16..24].copy_from_slice(&self.address.to_le_bytes());
        for d in 0..self.dims.len() {
            // A dimension of 2^32 does not fit 32 bits: one less does.
            let size = (self.dims[d] - 1) as u32;
            out[24 + 4 * d..28 + 4 * d].copy_from_slice(&size.to_le_bytes());
            out[44 + 2 * d..46 + 2 * d].copy_from_slice(&(self.box_dims[d] as u16).to_le_bytes());
            out[54 + d] = self.element_strides[d] as u8;
            if d > 0 {
                out[56 + 8 * d..64 + 8 * d].copy_from_slice(&self.strides[d - 1].to_le_bytes());
            }
        }
        let sum = checksum(&out);
        out[4..8].copy_from_slice(&sum.to_le_bytes());
        Ok(out)
    }

    /// The map of 128 bytes that [`TensorMap::encode`] made; `None` for any others.
    pub fn decode(bytes: &[u8; 128]) -> Option<TensorMap> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if word(0) != MAGIC || word(4) != checksum(bytes) {
            return None;
        }
        let rank = usize::from(bytes[8]);
        Some(TensorMap {
            element: *TensorElement::ALL.get(usize::from(bytes[9]))?,
            address: long(16),
            dims: (0..rank).map(|d| u64::from(word(24 + 4 * d)) + 1).collect(),
            strides: (1..rank).map(|d| long(56 + 8 * d)).collect(),
            box_dims: (0..rank)
                .map(|d| u32::from(u16::from_le_bytes([bytes[44 + 2 * d], bytes[45 + 2 * d]])))
                .collect(),
            element_strides: (0..rank).map(|d| u32::from(bytes[54 + d])).collect(),
            swizzle: *Swizzle::ALL.get(usize::from(bytes[10]))?,
            fill_nan: bytes[11] != 0,
        })
    }

    /// Calls `f` for the box at these coordinates, run by run: where the run lies in the box (plain bytes from the
    /// start), how many bytes it has, and its global address, or none outside of the tensor.
    pub fn for_runs(&self, coordinates: &[i32], mut f: impl FnMut(u32, u32, Option<u64>)) {
        let rank = self.dims.len();
        let bytes = self.element.bytes();
        let inner = self.taken(0);
        let rows: u32 = (1..rank).map(|d| self.taken(d)).product();
        let first = i64::from(coordinates[0]);
        let stride = i64::from(self.element_strides[0]);
        // The elements of a row that lie in the tensor: those before come before its start, the rest after its end.
        let reaching = |bound: i64| ((bound - first + stride - 1) / stride).clamp(0, i64::from(inner)) as u32;
        let (begin, end) = (reaching(0), reaching(self.dims[0] as i64));
        for row in 0..rows {
            let mut rest = row;
            let mut base = Some(self.address);
            for d in 1..rank {
                let at =
                    i64::from(coordinates[d]) + i64::from(rest % self.taken(d) * self.element_strides[d]);
                rest /= self.taken(d);
                let inside = (0..self.dims[d] as i64).contains(&at);
                base = base.filter(|_| inside).map(|b| b + at.unsigned_abs() * self.strides[d - 1]);
            }
            let start = row * inner * bytes;
            let Some(base) = base.filter(|_| begin < end) else {
                f(start, inner * bytes, None);
                continue;
            };
            let address = |i: u32| base + (first + i64::from(i) * stride).unsigned_abs() * u64::from(bytes);
            if begin > 0 {
                f(start, begin * bytes, None);
            }
            if stride == 1 {
                f(start + begin * bytes, (end - begin) * bytes, Some(address(begin)));
            } else {
                (begin..end).for_each(|i| f(start + i * bytes, bytes, Some(address(i))));
            }
            if end < inner {
                f(start + end * bytes, (inner - end) * bytes, None);
            }
        }
    }

    /// The value of elements outside of the tensor.
    pub fn fill(&self) -> u64 {
        match (self.fill_nan, self.element) {
            (true, TensorElement::F16 | TensorElement::Bf16) => 0x7FFF,
            (true, TensorElement::F32) => 0x7FFF_FFFF,
            _ => 0,
        }
    }
}

fn checksum(bytes: &[u8; 128]) -> u32 {
    let fields = bytes[8..].iter();
    fields.fold(0x811C_9DC5u32, |hash, &b| (hash ^ u32::from(b)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> TensorMap {
        TensorMap {
            element: TensorElement::Bf16,
            address: 0x12_3456_7890,
            dims: vec![64, 1 << 32, 3],
            strides: vec![128, 1 << 30],
            box_dims: vec![64, 128, 1],
            element_strides: vec![1, 2, 1],
            swizzle: Swizzle::B128,
            fill_nan: true,
        }
    }

    #[test]
    fn a_map_survives_its_encoding_and_other_bytes_are_not_taken_for_one() {
        let bytes = map().encode().expect("valid");
        assert_eq!(TensorMap::decode(&bytes), Some(map()));
        let mut broken = bytes;
        broken[20] ^= 1;
        assert_eq!(TensorMap::decode(&broken), None);
        assert_eq!(TensorMap::decode(&[0; 128]), None);
    }

    #[test]
    fn what_the_driver_refuses_is_refused() {
        let refused = |change: fn(&mut TensorMap)| {
            let mut m = map();
            change(&mut m);
            m.encode().expect_err("refused")
        };
        assert!(refused(|m| m.address += 8).contains("multiple of 16"));
        assert!(refused(|m| m.strides[0] = 100).contains("stride of 100"));
        assert!(refused(|m| m.box_dims[1] = 257).contains("box of 257"));
        assert!(refused(|m| m.box_dims[0] = 4).contains("8 bytes"));
        assert!(refused(|m| m.swizzle = Swizzle::B64).contains("the swizzle allows 64"));
        assert!(refused(|m| m.element_strides[1] = 9).contains("element stride"));
        assert!(refused(|m| m.dims.truncate(2)).contains("strides"));
    }

    #[test]
    fn a_box_is_runs_of_what_lies_in_the_tensor_and_of_what_does_not() {
        let runs = |map: &TensorMap, at: &[i32]| {
            let mut runs = Vec::new();
            map.for_runs(at, |start, bytes, address| runs.push((start, bytes, address)));
            runs
        };
        let map = TensorMap::new(TensorElement::U32, 4096, &[10, 3], &[64], &[8, 2]);
        assert_eq!(runs(&map, &[0, 0]), [(0, 32, Some(4096)), (32, 32, Some(4160))]);
        assert_eq!(
            runs(&map, &[-2, 2]),
            [(0, 8, None), (8, 24, Some(4096 + 128)), (32, 32, None)],
            "it begins before the first element, and its second row is after the last"
        );
        assert_eq!(runs(&map, &[6, -1])[1..], [(32, 16, Some(4096 + 24)), (48, 16, None)]);
        assert_eq!(runs(&map, &[10, 0]), [(0, 32, None), (32, 32, None)]);
        let every_third = TensorMap { element_strides: vec![3, 1], box_dims: vec![12, 1], ..map };
        assert_eq!(
            runs(&every_third, &[-1, 0]),
            [(0, 4, None), (4, 4, Some(4096 + 8)), (8, 4, Some(4096 + 20)), (12, 4, Some(4096 + 32))]
        );
    }

    #[test]
    fn a_swizzle_moves_chunks_within_its_span_and_is_its_own_inverse() {
        for swizzle in Swizzle::ALL {
            for address in 0..4096 {
                let moved = swizzle.apply(address);
                assert_eq!(swizzle.apply(moved), address);
                assert_eq!(moved / swizzle.span(), address / swizzle.span());
                assert_eq!(moved % 16, address % 16);
            }
        }
        assert_eq!(Swizzle::B128.apply(3 * 128 + 16), 3 * 128 + (1 ^ 3) * 16);
        assert_eq!(Swizzle::B64.apply(5 * 128 + 64), 5 * 128 + 64 + 16);
        assert_eq!(Swizzle::B32.apply(128 + 32), 128 + 32 + 16);
    }
}
