//! Matrix descriptors: how `wgmma` finds a tile in shared memory.
//!
//! A tile is made of 16-byte chunks. K-major, a chunk holds consecutive k of one row; MN-major, consecutive rows
//! of one k. Eight chunks along the other dimension, a swizzle span apart, make the unit whose repetitions the
//! two byte offsets of the descriptor place.

use crate::memory::tensor_map::Swizzle;

/// A decoded descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The address of the first chunk.
    pub start: u32,
    /// The leading byte offset.
    pub leading: u32,
    /// The stride byte offset.
    pub stride: u32,
    /// The swizzle.
    pub swizzle: Swizzle,
}

impl Descriptor {
    /// Decodes the 64 bits; the fields that are not implemented must be zero.
    pub fn decode(bits: u64) -> Result<Descriptor, String> {
        let field = |shift: u32| ((bits >> shift & 0x3FFF) << 4) as u32;
        let base_offset = bits >> 49 & 7;
        if base_offset != 0 {
            return Err(format!(
                "descriptor {bits:#018x} has base offset {base_offset}; only 0 is implemented"
            ));
        }
        // Bits 14-15, 30-31, 46-48 and 52-61.
        if bits & 0x3FF1_C000_C000_C000 != 0 {
            return Err(format!("descriptor {bits:#018x} has reserved bits set"));
        }
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        Ok(Descriptor { start: field(0), leading: field(16), stride: field(32), swizzle })
    }

    /// The address of a chunk of a K-major tile: consecutive k of a row.
    #[inline]
    pub fn k_major(&self, row: u32, chunk: u32) -> u32 {
        let plain = match self.swizzle {
            Swizzle::None => self.start + row / 8 * self.stride + row % 8 * 16 + chunk * self.leading,
            swizzle => self.start + row / 8 * self.stride + row % 8 * swizzle.span() + chunk * 16,
        };
        self.swizzle.apply(plain)
    }

    /// The address of a chunk of an MN-major tile: consecutive rows of one k.
    #[inline]
    pub fn mn_major(&self, chunk: u32, k: u32) -> u32 {
        let plain = match self.swizzle {
            Swizzle::None => self.start + chunk * self.stride + k / 8 * self.leading + k % 8 * 16,
            swizzle => {
                let wide = swizzle.span() / 16;
                self.start
                    + chunk / wide * self.leading
                    + k / 8 * self.stride
                    + k % 8 * swizzle.span()
                    + chunk % wide * 16
            }
        };
        self.swizzle.apply(plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_stand_where_the_manual_has_them() {
        let bits = 1u64 << 62 | 64 << 32 | 1 << 16 | (0x4400 >> 4);
        let d = Descriptor::decode(bits).expect("valid");
        assert_eq!(d, Descriptor { start: 0x4400, leading: 16, stride: 1024, swizzle: Swizzle::B128 });
        assert!(Descriptor::decode(bits | 1 << 49).is_err());
        assert!(Descriptor::decode(bits | 1 << 14).is_err());
        assert!(Descriptor::decode(bits | 1 << 53).is_err());
    }

    #[test]
    fn a_k_major_panel_of_64_halves_is_rows_of_128_swizzled_bytes() {
        let d = Descriptor { start: 0x2000, leading: 16, stride: 1024, swizzle: Swizzle::B128 };
        assert_eq!(d.k_major(0, 0), 0x2000);
        assert_eq!(d.k_major(3, 1), 0x2000 + 3 * 128 + (1 ^ 3) * 16);
        assert_eq!(d.k_major(9, 0), 0x2000 + 1024 + 128 + 16);
        // The next k step starts 32 bytes on; the swizzle follows the address.
        let next = Descriptor { start: 0x2020, ..d };
        assert_eq!(next.k_major(3, 1), 0x2000 + 3 * 128);
    }

    #[test]
    fn an_mn_major_panel_is_rows_of_k() {
        let d = Descriptor { start: 0, leading: 8192, stride: 1024, swizzle: Swizzle::B128 };
        assert_eq!(d.mn_major(0, 5), 5 * 128 + 5 * 16);
        assert_eq!(d.mn_major(8, 0), 8192, "the next 64 columns");
        assert_eq!(d.mn_major(1, 8), 1024 + 16, "the next 8 rows of k");
    }
}
