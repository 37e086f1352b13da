//! Scales and rounds the gradients of the queries that [`sm90_bwd`](super) has added up in f32: one block per 64 queries.

use flashcore_ptx::{
    B32, B64, BulkHint, F32, GlobalPtr, GridDep, KernelBuilder, Operand as Coordinate, Pred, ProxySpace, Reg,
    Shared, SharedLayout, Target, TensorMap, kernel_params,
};

use super::{
    PITCH, PackedGradients, ROWS as QUERIES, block::keys_of, columns, panels, params, rotation::Rotation,
};
use crate::{
    Args, Blocks, Family, Geometry, Map, Operand, Packed, ScheduleError, Spec,
    family::schedule,
    parts::sequence::{self, Side, Starts},
    sm90::{params::describe, stage},
};

const THREADS: u32 = 128;

kernel_params! {
    /// What a launch is given. Strides are in bytes.
    pub struct FinishParams {
        /// The gradient of the queries, in boxes of a block's rows.
        dq_map: TensorMap,
        /// As in [`super::BwdParams`].
        row_lse: GlobalPtr,
        /// As in [`super::BwdParams`].
        dq_tiles: GlobalPtr,
        /// As in [`super::BwdParams`].
        row_batch: u64,
        /// As in [`super::BwdParams`].
        row_head: u64,
        /// Blocks per head.
        blocks: u32,
        /// Query tiles per head.
        q_tiles: u32,
        /// Query heads.
        heads: u32,
        /// The factor.
        scale: f32,
        /// As in [`super::BwdParams`].
        copy: u32,
        /// Keys per head.
        len_k: u32,
        /// As in [`super::BwdParams`].
        key_lengths: GlobalPtr,
    }
}

schedule! {
    /// The knobs of the kernel.
    pub struct Schedule {
        /// Queries per step of the kernel before.
        pub block_m: u32,
        /// Whether its blocks begin their walks at different query tiles, and so leave two copies.
        pub rotate: bool = false,
    }
}

impl Schedule {
    /// The kernel before.
    fn before(self) -> super::Schedule {
        super::Schedule {
            block_m: self.block_m,
            stages: 2,
            pingpong: false,
            rotate: self.rotate,
            rounds: false,
        }
    }

    fn shared(spec: &Spec) -> (SharedLayout, Shared) {
        let mut layout = SharedLayout::new();
        let tile = layout.alloc("dq", panels(spec.head_dim, spec.dtype) * QUERIES * PITCH, 1024);
        (layout, tile)
    }

    fn body(self, k: &mut KernelBuilder, spec: &Spec, tile: Shared) {
        k.griddepcontrol(GridDep::LaunchDependents);
        k.section("block: which queries of which head");
        let (item, blocks, heads) =
            (k.ctaid_x(), k.param(FinishParams::blocks), k.param(FinishParams::heads));
        let all_heads = k.div_u32(item, blocks);
        let taken = k.mul_lo_u32(all_heads, blocks);
        let number = k.sub_u32(item, taken);
        let batch = k.div_u32(all_heads, heads);
        let taken = k.mul_lo_u32(batch, heads);
        let head = k.sub_u32(all_heads, taken);
        let [q_starts, k_starts] = sequence::starts(spec);
        let [batch, number] = match q_starts {
            Some(starts) => sequence::find_tile(k, starts, [QUERIES, 1], number),
            None => [batch, number],
        };
        let queries = Side::of(k, q_starts, batch);
        let tile_of = Tile { queries, k_starts, batch, all_heads, head, number, blocks };
        match queries.has_tile(k, number, QUERIES) {
            Some(exists) => k.if_else(
                exists,
                |k| self.tile(k, spec, tile, &tile_of),
                // A grid that waits for nothing would end before the one that it follows.
                |k| k.griddepcontrol(GridDep::Wait),
            ),
            None => self.tile(k, spec, tile, &tile_of),
        }
    }

    /// The queries of a block.
    fn tile(self, k: &mut KernelBuilder, spec: &Spec, tile: Shared, of: &Tile) {
        let Tile { queries, k_starts, batch, all_heads, head, number, blocks } = *of;
        let first_row = k.mul_lo_u32(number, QUERIES);
        let tid = k.tid_x();
        let (lane, warp) = (k.and_b32(tid, 31u32), k.shr_u32(tid, 5u32));
        let g = k.shr_u32(lane, 2u32);
        let row = k.mad_lo_u32(warp, 16u32, g);

        let (numbers, to_batch) = (k.param(FinishParams::row_lse), k.param(FinishParams::row_batch));
        let (batch_wide, head_wide) = (k.cvt_u64_u32(queries.entry), k.cvt_u64_u32(head));
        let to_head = k.param(FinishParams::row_head);
        let numbers = k.mad_lo_u64(batch_wide, to_batch, numbers);
        let numbers = k.mad_lo_u64(head_wide, to_head, numbers);
        let own_row = k.add_u32(first_row, row);
        let own_row = queries.padded(k, own_row);
        let numbers = k.mad_wide_u32(own_row, 4u32, numbers);
        let (tiles, q_tiles) = (k.param(FinishParams::dq_tiles), k.param(FinishParams::q_tiles));
        let before = self.before();
        let place = queries.padded_tile(k, number, QUERIES);
        let width = before.part_columns(spec.head_dim);
        let part_bytes = QUERIES * width * 4;
        let tile_bytes = before.dq_tile_bytes(spec.head_dim);
        let from = if before.parts_by_rows() {
            // A block's rows are one part of a tile.
            let first = k.mul_lo_u32(all_heads, q_tiles);
            let index = k.mad_lo_u32(first, self.block_m / QUERIES, place);
            k.mad_wide_u32(index, part_bytes, tiles)
        } else {
            let index = k.mad_lo_u32(all_heads, q_tiles, place);
            k.mad_wide_u32(index, tile_bytes, tiles)
        };
        let from = k.mad_wide_u32(tid, 16u32, from);
        let scale = k.param(FinishParams::scale);
        k.griddepcontrol(GridDep::Wait);

        k.section("rows that see no key have no gradient, and nobody has written one");
        let factors = [0, 8].map(|lower: i32| {
            let lse = k.ld_global::<F32>(numbers.at(4 * lower));
            let none = k.setp_eq_f32(lse, f32::INFINITY);
            (none, k.selp_f32(0.0, scale, none))
        });
        let neither = k.and_pred(factors[0].0, factors[1].0);
        let some = k.not_pred(neither);
        let eights = spec.head_dim / 8;
        let read = |k: &mut KernelBuilder, from: Reg<B64>, wanted: Reg<Pred>| -> Vec<[Reg<F32>; 4]> {
            let eight = |eight: u32| {
                let (part, inside) = (8 * eight / width, 8 * eight % width / 8);
                let at = from.at((part * part_bytes + inside * THREADS * 16) as i32);
                let zero: [Reg<F32>; 4] = std::array::from_fn(|_| k.mov_f32(0.0));
                k.when(wanted, |k| k.set(zero, |k| k.ld_global_vec(at)));
                zero
            };
            (0..eights).map(eight).collect()
        };
        let values = read(k, from, some);
        if self.rotate {
            k.comment("what blocks added that came to tile 0 before");
            let side = Side::of(k, k_starts, batch);
            let keys = keys_of(k, spec, batch, &side, (FinishParams::len_k, FinishParams::key_lengths));
            let blocks = match queries.len() {
                Some(len) => {
                    let past = k.add_u32(len, QUERIES - 1);
                    k.div_u32(past, QUERIES)
                }
                None => blocks,
            };
            let per_tile = self.block_m / QUERIES;
            let past = k.add_u32(blocks, per_tile - 1);
            let (query_tiles, at) = (k.div_u32(past, per_tile), k.div_u32(number, per_tile));
            let rotation = Rotation::new(k, keys, query_tiles);
            let blocks = rotation.second(k, at);
            let any = k.setp_gt_u32(blocks, 0u32);
            let wanted = k.and_pred(some, any);
            let copy = k.param(FinishParams::copy);
            let from = k.mad_wide_u32(copy, tile_bytes, from);
            let further = read(k, from, wanted);
            for (&value, &more) in values.iter().flatten().zip(further.iter().flatten()) {
                k.set(value, |k| k.add_f32(value, more));
            }
        }
        let scaled: Vec<Reg<F32>> = values
            .iter()
            .flat_map(|quad| quad.iter().enumerate())
            .map(|(i, &value)| {
                let (none, factor) = factors[i / 2];
                let value = k.mul_f32(value, factor);
                k.selp_f32(0.0, value, none)
            })
            .collect();
        let packed = stage::rounded(k, spec.dtype, &scaled);

        k.section("through shared memory to whole rows");
        let start = k.shared_addr(tile);
        stage::write(k, &packed, tid, start, QUERIES * PITCH);
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_sync_all();
        let by_tma = |k: &mut KernelBuilder| {
            let first = k.setp_eq_u32(tid, 0u32);
            k.if_(first, |k| {
                let map = k.tensor_map(FinishParams::dq_map);
                let first_row = queries.row(k, first_row);
                for panel in 0..panels(spec.head_dim, spec.dtype) {
                    let column = Coordinate::from(panel * columns(spec.dtype));
                    let at = [column, first_row.into(), head.into(), queries.entry.into()];
                    k.tensor_store(map, &at, start.at((panel * QUERIES * PITCH) as i32), BulkHint::new());
                }
                k.bulk_commit();
                k.bulk_wait_read(0);
            });
        };
        let Some(len) = queries.len() else { return by_tma(k) };
        let left = k.sub_s32(len, first_row);
        let all = k.setp_ge_s32(left, QUERIES as i32);
        k.if_else(all, by_tma, |k| {
            k.comment("the rows behind are the next sequence's");
            let to = PackedGradients::row(k, params::DQ, &queries, head, first_row);
            stage::store_rows(k, (start, QUERIES * PITCH), tid, left, to, (spec.head_dim, spec.dtype));
        });
    }
}

/// The queries of a block.
struct Tile {
    /// Where the queries of its batch entry lie, and where keys begin that are packed.
    queries: Side,
    k_starts: Option<Starts>,
    batch: Reg<B32>,
    /// The head, over all batch entries and in its own.
    all_heads: Reg<B32>,
    head: Reg<B32>,
    /// Its number among the tiles of the head.
    number: Reg<B32>,
    blocks: Reg<B32>,
}

impl Family for Schedule {
    const PROGRAMMATIC: bool = true;

    fn check(self, spec: &Spec, _: Target) -> Result<(), ScheduleError> {
        self.before().check_shape(spec)
    }

    fn geometry(self, spec: &Spec) -> Geometry {
        Geometry {
            rows: QUERIES,
            threads: THREADS,
            shared_bytes: Self::shared(spec).0.bytes(),
            blocks: Blocks::Row { cluster: 1, resident: None, parts: 1 },
        }
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let (layout, tile) = Self::shared(spec);
        let mut k = KernelBuilder::new("flashcore_sm90_bwd_finish", target)
            .params::<FinishParams>()
            .shared(layout)
            .threads(THREADS);
        k = PackedGradients::declare(k, spec);
        self.body(&mut k, spec, tile);
        k
    }

    fn bind<E>(
        self,
        spec: &Spec,
        args: &Args,
        encode: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        let of = |operand| args.tensor(operand);
        let [entries, heads, _] = args.queries();
        let rows = of(Operand::RowLse);
        let q_tiles = self.before().head_tiles(spec, args);
        packed.push(&FinishParams {
            dq_map: encode(&describe(spec.dtype, args, of(Operand::Dq), QUERIES))?,
            row_lse: rows.pointer(),
            dq_tiles: of(Operand::DqTiles).pointer(),
            row_batch: rows.strides[0],
            row_head: rows.strides[1],
            blocks: args.head_tiles(Operand::Q, spec.packed_q, QUERIES),
            q_tiles,
            heads,
            scale: args.scale,
            copy: entries * heads * q_tiles,
            len_k: of(Operand::K).shape[2] as u32,
            key_lengths: of(Operand::KeyLengths).pointer(),
        });
        PackedGradients::bind(spec, args, packed);
        Ok(())
    }
}
