//! Descales of blocks of keys, each of whole key tiles. That of a tile's keys is a part of the scale of its scores. The output
//! is kept in units of the values' descale of the tile that was added last, so that what is owed to it before the next tile is
//! added changes the unit, too: no number of the output is multiplied by a descale of its own.

use flashcore_ptx::{B32, B64, F32, KernelBuilder, Reg};

use super::{Schedule, consumer::HANDLES, softmax::Softmax, tiles::Tile};
use crate::{
    Operand, Spec,
    parts::{
        params::{BlockDescaleParams, DescaleParams},
        softmax::SoftmaxParams,
    },
};

/// The descales of a consumer's tile of queries, and of its keys.
pub(super) struct BlockScales {
    /// Key tiles of a block.
    tiles: u32,
    /// Where those of the keys and of the values begin.
    first: [Reg<B64>; 2],
    /// Of the queries.
    of_q: Reg<F32>,
    /// What the output is to be multiplied by at the end.
    pub unit: Reg<F32>,
}

impl BlockScales {
    /// None where all keys of a head share theirs.
    pub fn new(k: &mut KernelBuilder, schedule: Schedule, spec: &Spec) -> Option<Self> {
        let tiles = spec.descale_keys? / schedule.block_n;
        let first = [0, 1].map(|_| k.mov_b64(0u64));
        Some(Self { tiles, first, of_q: k.mov_f32(1.0), unit: k.mov_f32(1.0) })
    }

    /// Begins with a tile of queries.
    pub fn begin(&self, k: &mut KernelBuilder, tile: &Tile) {
        let (batch, kv_head) = (tile.rows.batch, tile.kv_head);
        k.set(self.of_q, |k| DescaleParams::read(k, Operand::Q, batch, kv_head));
        for (first, of) in self.first.into_iter().zip([Operand::K, Operand::V]) {
            k.set(first, |k| DescaleParams::place(k, of, batch, kv_head).0);
        }
        k.set(self.unit, |k| k.mov_f32(1.0));
    }

    /// Those of a tile of keys and its values.
    pub fn of(&self, k: &mut KernelBuilder, at: Reg<B32>) -> [Reg<F32>; 2] {
        k.comment("the descales of this tile's block of keys");
        let block = k.div_u32(at, self.tiles);
        [(Operand::K, 0), (Operand::V, 1)]
            .map(|(of, i)| BlockDescaleParams::read(k, of, self.first[i], block))
    }

    /// Makes that of a tile's keys a part of the scale.
    pub fn scale(&self, k: &mut KernelBuilder, spec: &Spec, softmax: &Softmax, of_k: Reg<F32>) {
        let both = k.mul_f32(self.of_q, of_k);
        let base = SoftmaxParams::read_from(k, spec, &HANDLES);
        softmax.params.set_multiplied(k, &base, both);
    }

    /// Goes over to the unit of a tile's values. The result is what brings the output there.
    pub fn change(&self, k: &mut KernelBuilder, of_v: Reg<F32>) -> Reg<F32> {
        let inverse = k.rcp_approx_ftz_f32(of_v);
        let change = k.mul_f32(self.unit, inverse);
        k.set(self.unit, |k| k.mov_f32(of_v));
        change
    }
}
