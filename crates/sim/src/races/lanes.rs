//! Which lanes of a warp made an access, in sixteen bits.

/// Which lane of a warp accessed each byte of a 16-byte cell (or of a quarter of one, or of one byte).
///
/// Packed: bits 0-4 the first lane, bits 5-6 log2 of the bytes that each lane has (8 for one lane, by bit 9), bits 7-8
/// log2 of the lanes' distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes(u16);

impl Lanes {
    /// Several lanes, or no particular one.
    pub const ALL: Lanes = Lanes(0x7FF);
    /// Marks a run of lanes.
    const RUN: u16 = 0x200;
    /// Marks half of a run of 2-byte lanes: four bytes, two lanes.
    const PAIR: u16 = 0x400;

    /// One lane has all bytes.
    pub const fn one(lane: u32) -> Lanes {
        Lanes(lane as u16)
    }

    /// Byte `b` of a cell belongs to lane `first + distance * (b / bytes)`, for `bytes` of 2, 4 or 8 and a
    /// distance of 1, 2, 4 or 8.
    pub const fn run(first: u32, bytes: u32, distance: u32) -> Lanes {
        let code = bytes.trailing_zeros() << 5 | distance.trailing_zeros() << 7 | first;
        Lanes(Lanes::RUN | code as u16)
    }

    const fn first(self) -> u32 {
        (self.0 & 0x1F) as u32
    }

    /// The lanes of the part of `size` bytes (4 or 1) that starts at `offset`.
    pub const fn part(self, offset: u32, size: u32) -> Lanes {
        if self.0 == Lanes::ALL.0 || self.0 & Lanes::RUN == 0 {
            return self;
        }
        let bytes = 1 << (self.0 >> 5 & 3);
        let first = self.first() + ((offset / bytes) << (self.0 >> 7 & 3));
        if size > bytes {
            // Four bytes of a run of 2-byte lanes.
            Lanes(self.0 & !0x1F | Lanes::PAIR | first as u16)
        } else {
            Lanes::one(first)
        }
    }

    /// The set of lanes as a mask.
    pub fn mask(self) -> u32 {
        if self == Lanes::ALL {
            return u32::MAX;
        }
        if self.0 & Lanes::RUN == 0 {
            return 1 << self.first();
        }
        let bytes = 1u32 << (self.0 >> 5 & 3);
        let count = if self.0 & Lanes::PAIR != 0 { 2 } else { 16 / bytes };
        (0..count).fold(0, |mask, i| mask | 1 << (self.first() + (i << (self.0 >> 7 & 3))))
    }

    /// The lane that has a byte of the cell, if it is one.
    #[inline]
    pub fn at(self, byte: u32) -> Option<u32> {
        if self == Lanes::ALL {
            None
        } else if self.0 & Lanes::RUN == 0 {
            Some(self.first())
        } else {
            Some(self.first() + (byte >> (self.0 >> 5 & 3) << (self.0 >> 7 & 3)))
        }
    }

    /// Some lane of the set, to name in a report.
    pub fn any(self) -> u32 {
        self.mask().trailing_zeros()
    }

    pub const fn code(self) -> u16 {
        self.0
    }

    pub const fn from_code(code: u16) -> Lanes {
        Lanes(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_run_name_the_lane_that_has_the_byte() {
        let halves = Lanes::run(8, 2, 1);
        assert_eq!(halves.mask(), 0xFF00);
        assert_eq!(halves.part(4, 4).mask(), 0b11 << 10);
        assert_eq!(halves.part(4, 4).part(2, 1), Lanes::one(11));
        assert_eq!(Lanes::run(0, 8, 1).part(8, 4), Lanes::one(1));
        assert_eq!(Lanes::one(7).part(12, 4), Lanes::one(7));
        let strided = Lanes::run(1, 2, 4);
        assert_eq!(strided.mask(), 0x2222_2222);
        assert_eq!(strided.part(8, 4).mask(), 1 << 17 | 1 << 21);
        assert_eq!(strided.part(8, 4).part(3, 1), Lanes::one(21));
        assert_eq!(Lanes::run(2, 4, 8).part(12, 4), Lanes::one(26));
        assert_eq!(Lanes::ALL.part(4, 4), Lanes::ALL);
    }
}
