//! Where each block of a head begins its walk, so that no block waits for its turn from the start.
//!
//! Without a mask, the walk of every block is a round over all query tiles. Block n of N begins at tile s(n) = ⌊((n + 1) M − 1) /
//! N⌋ of M, goes down to tile 0, and on from the last tile down to the one behind s(n). At any moment the blocks are spread
//! over the tiles, and each comes to a tile some time after the block before it.
//!
//! Those that see a tile before they come to tile 0 add to one copy of dQ, the others to a second one. In both, the order is
//! that of the blocks' numbers, so that a block waits only for blocks before it in the grid: none can wait for each other. The
//! first copy of tile m has the blocks from a(m) = ⌊m N / M⌋ on, which is the first one with s(n) ≥ m; the second one has
//! those before it, if there are any.

use flashcore_ptx::{B32, KernelBuilder, Pred, Reg};

use super::KEYS;

/// Copies of dQ.
pub(super) const COPIES: u32 = 2;

/// How the blocks of a head are spread over its query tiles.
#[derive(Clone, Copy)]
pub(super) struct Rotation {
    key_tiles: Reg<B32>,
    query_tiles: Reg<B32>,
}

impl Rotation {
    /// Of a head with so many keys and query tiles.
    pub fn new(k: &mut KernelBuilder, keys: Reg<B32>, query_tiles: Reg<B32>) -> Self {
        let past = k.add_u32(keys, KEYS - 1);
        let key_tiles = k.div_u32(past, KEYS);
        // Where there are none, nobody asks, but dividends need a divisor.
        Self { key_tiles: k.max_u32(key_tiles, 1u32), query_tiles }
    }

    /// Where the walk of a key tile's block begins.
    pub fn start(self, k: &mut KernelBuilder, key_tile: Reg<B32>) -> Reg<B32> {
        let next = k.add_u32(key_tile, 1u32);
        let shares = k.mul_lo_u32(next, self.query_tiles);
        let before = k.sub_u32(shares, 1u32);
        k.div_u32(before, self.key_tiles)
    }

    /// The first key tile whose block comes to a query tile before tile 0: so many add to the second copy.
    pub fn second(self, k: &mut KernelBuilder, query_tile: Reg<B32>) -> Reg<B32> {
        let shares = k.mul_lo_u32(query_tile, self.key_tiles);
        k.div_u32(shares, self.query_tiles)
    }

    /// The turn of a key tile's block, and whether it adds to the second copy.
    pub fn turn(
        self,
        k: &mut KernelBuilder,
        key_tile: Reg<B32>,
        query_tile: Reg<B32>,
    ) -> (Reg<B32>, Reg<Pred>) {
        let second = self.second(k, query_tile);
        let in_second = k.setp_lt_u32(key_tile, second);
        let behind = k.sub_u32(key_tile, second);
        (k.selp_b32(key_tile, behind, in_second), in_second)
    }
}
