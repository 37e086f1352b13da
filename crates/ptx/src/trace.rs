//! Stamps: when a kernel began which of its sections, written to global memory by the kernel itself.
//!
//! A *track* is one role of one block: a warp, or a group of warps that work together. One thread of it writes, so that a
//! stamp costs a few instructions of each warp and one store. A track is a header, a fixed number of stamps of 8 bytes, and a footer:
//!
//! | bytes | what |
//! |---|---|
//! | 16 | `%globaltimer` (8), `%clock` (4) and `%smid` (4), at the track's start |
//! | 8 each | `%clock` (4), then the section in the low 5 bits and its number in the others (4) |
//! | 16 | `%globaltimer` (8), `%clock` (4) and the stamps that were left (4), at the track's end |
//!
//! A section lasts until the next stamp. Stamps that find no room are counted (fewer than none are left), not written.
//! [`KernelBuilder::traced`](crate::KernelBuilder::traced) makes a kernel write them; without it none is emitted.

use crate::{GlobalPtr, kernel_params};

/// Bits of a stamp that say which section it is.
pub(crate) const SECTION_BITS: u32 = 5;
/// The number of a section that has none.
pub(crate) const NO_NUMBER: u32 = u32::MAX >> SECTION_BITS;
/// Bytes of a header, and of a footer.
pub(crate) const EDGE: u32 = 16;
/// Bytes of a stamp.
pub(crate) const STAMP: u32 = 8;
/// What a thread that writes nothing has left: so few that counting down never comes back to zero.
pub(crate) const NOBODY: i32 = -(1 << 30);

kernel_params! {
    /// What a traced kernel is given behind its own parameters.
    pub struct TraceParams {
        /// Where the tracks lie.
        trace: GlobalPtr,
        /// Stamps per track.
        trace_stamps: u32,
        /// How many blocks write: the first ones.
        trace_blocks: u32,
    }
}

/// How much is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceSize {
    /// Blocks that write: the first ones.
    pub blocks: u32,
    /// Tracks per block.
    pub roles: u32,
    /// Stamps per track: an even number.
    pub stamps: u32,
}

/// When a stamp was written, and what began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamped {
    /// The low half of the multiprocessor's clock.
    pub clock: u32,
    /// Which section.
    pub section: u8,
    /// Its number, if it has one.
    pub number: Option<u32>,
}

/// The same moment by two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Nanoseconds, by a clock that all multiprocessors share.
    pub global: u64,
    /// The low half of the multiprocessor's clock.
    pub clock: u32,
}

/// What one role of one block has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Track {
    /// The block's number in the grid.
    pub block: u32,
    /// The role's number in the block.
    pub role: u32,
    /// The multiprocessor.
    pub sm: u32,
    /// When it began.
    pub start: Moment,
    /// When it ended.
    pub end: Moment,
    /// Its stamps, in order.
    pub stamps: Vec<Stamped>,
    /// Stamps for which there was no room.
    pub lost: u32,
}

impl TraceSize {
    /// Bytes of a track.
    fn track(self) -> usize {
        2 * EDGE as usize + STAMP as usize * self.stamps as usize
    }

    /// Bytes of all tracks.
    pub fn bytes(self) -> usize {
        self.blocks as usize * self.roles as usize * self.track()
    }

    /// The parameters of a kernel that writes to this address.
    pub fn params(self, address: u64) -> TraceParams {
        TraceParams { trace: GlobalPtr(address), trace_stamps: self.stamps, trace_blocks: self.blocks }
    }

    /// The tracks in memory that was filled with ones before the launch; those that nobody wrote are left out.
    pub fn read(self, bytes: &[u8]) -> Vec<Track> {
        let tracks = bytes.chunks_exact(self.track()).enumerate();
        tracks.filter_map(|(index, bytes)| self.read_track(index as u32, bytes)).collect()
    }

    fn read_track(self, index: u32, bytes: &[u8]) -> Option<Track> {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let moment = |at: usize| Moment {
            global: u64::from(word(at)) | u64::from(word(at + 4)) << 32,
            clock: word(at + 8),
        };
        let (edge, footer) = (EDGE as usize, bytes.len() - EDGE as usize);
        let (start, end) = (moment(0), moment(footer));
        if start.global == u64::MAX || end.global == u64::MAX {
            return None;
        }
        let left = word(footer + 12).cast_signed();
        let lost = left.min(0).unsigned_abs();
        let written = self.stamps - left.clamp(0, self.stamps.cast_signed()).unsigned_abs();
        let stamp = |i: u32| {
            let at = edge + (STAMP * i) as usize;
            let (clock, what) = (word(at), word(at + 4));
            let number = what >> SECTION_BITS;
            Stamped {
                clock,
                section: (what & ((1 << SECTION_BITS) - 1)) as u8,
                number: (number != NO_NUMBER).then_some(number),
            }
        };
        Some(Track {
            block: index / self.roles,
            role: index % self.roles,
            sm: word(12),
            start,
            end,
            stamps: (0..written).map(stamp).collect(),
            lost,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracks_are_read_as_they_are_laid_out_and_what_nobody_wrote_is_left_out() {
        let size = TraceSize { blocks: 2, roles: 2, stamps: 2 };
        assert_eq!(size.bytes(), 4 * (16 + 2 * 8 + 16));
        let mut bytes = vec![u8::MAX; size.bytes()];
        let mut write = |at: usize, words: &[u32]| {
            for (i, word) in words.iter().enumerate() {
                bytes[at + 4 * i..at + 4 * i + 4].copy_from_slice(&word.to_le_bytes());
            }
        };
        // The second role of the first block has one stamp of two; the first of the second block had one too many.
        write(48, &[7, 1, 100, 5, 120, 3 << 5 | 4]);
        write(48 + 32, &[9, 1, 150, 1]);
        write(96, &[7, 1, 100, 6, 110, 1, 120, u32::MAX >> 5 << 5 | 2, 9, 1, 130, u32::MAX]);
        let tracks = size.read(&bytes);
        assert_eq!(tracks.len(), 2);
        let one = &tracks[0];
        assert_eq!((one.block, one.role, one.sm, one.lost), (0, 1, 5, 0));
        assert_eq!((one.start, one.end.clock), (Moment { global: 1 << 32 | 7, clock: 100 }, 150));
        assert_eq!(one.stamps, [Stamped { clock: 120, section: 4, number: Some(3) }]);
        let two = &tracks[1];
        assert_eq!((two.block, two.role, two.stamps.len(), two.lost), (1, 0, 2, 1));
        assert_eq!(two.stamps[1], Stamped { clock: 120, section: 2, number: None });
    }
}
