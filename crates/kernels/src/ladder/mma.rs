//! The second rung of the ladder: tensor cores, and nothing else yet.
//!
//! A block of four warps takes 64 queries, 16 per warp, and walks over the keys in tiles of 64. All threads copy a tile
//! into shared memory, wait, multiply, wait, and copy the next: no pipeline, no swizzle, operands read two elements at
//! a time.

use flashcore_ptx::{B16, B32, B64, F32, KernelBuilder, Reg, Shared, SharedLayout, Target};

use crate::{
    Args, BindError, Blocks, Family, FwdParams, Geometry, ScheduleError, Spec,
    family::{MAX_REGISTERS, check_registers, schedule},
    parts::{
        epilogue,
        fragment::{Acc, Place, a_operands, matrix_ty},
        params::{TENSORS, check_rows},
        softmax::{OnlineSoftmax, SoftmaxParams},
        swizzle::{CHUNK, Tile},
        work::{Order, Rows, Work},
    },
};

const WARPS: u32 = 4;
const BLOCK_M: u32 = 16 * WARPS;

/// Registers besides the fragments: operands, addresses, softmax state.
const OTHER_REGISTERS: u32 = 44;

schedule! {
    /// The knobs of the kernel.
    pub struct Schedule {
        /// Keys per tile: a multiple of 16.
        pub block_n: u32,
    }
}

/// A tile whose rows are padded by one chunk, so that they do not all start at the same bank.
#[derive(Clone, Copy)]
struct PaddedTile {
    rows: u32,
    head_dim: u32,
}

impl PaddedTile {
    fn cols(self) -> u32 {
        self.head_dim.next_multiple_of(16)
    }

    fn pitch(self) -> u32 {
        self.cols() * 2 + CHUNK
    }

    fn bytes(self) -> u32 {
        self.rows * self.pitch()
    }
}

struct Memory {
    layout: SharedLayout,
    k: Shared,
    v: Shared,
    o: Shared,
}

impl Schedule {
    fn tiles(self, spec: &Spec) -> (PaddedTile, PaddedTile, Tile) {
        let rows = self.block_n;
        let k = PaddedTile { rows, head_dim: spec.head_dim };
        let v = PaddedTile { rows, head_dim: spec.head_dim_v };
        (k, v, Tile::new(BLOCK_M, spec.head_dim_v))
    }

    fn memory(self, spec: &Spec) -> Memory {
        let (k_tile, v_tile, o_tile) = self.tiles(spec);
        let mut layout = SharedLayout::new();
        let k = layout.alloc("k", k_tile.bytes(), 128);
        let v = layout.alloc("v", v_tile.bytes(), 128);
        let o = layout.alloc("o", o_tile.bytes(), 128);
        Memory { layout, k, v, o }
    }
}

impl Family for Schedule {
    fn geometry(self, spec: &Spec) -> Geometry {
        let shared_bytes = self.memory(spec).layout.bytes();
        Geometry { rows: BLOCK_M, threads: 32 * WARPS, shared_bytes, blocks: Blocks::Each(Order::HeadByHead) }
    }

    fn check(self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        if !(16..=128).contains(&self.block_n) || !self.block_n.is_multiple_of(16) {
            let reason = format!("block_n {}: possible is a multiple of 16 from 16 to 128", self.block_n);
            return Err(ScheduleError::Malformed { reason });
        }
        self.memory(spec).layout.fits(target)?;
        let (k_tile, v_tile, _) = self.tiles(spec);
        check_registers(
            self.block_n / 2 + v_tile.cols() / 2 + k_tile.cols() / 4,
            OTHER_REGISTERS,
            MAX_REGISTERS,
        )
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let memory = self.memory(spec);
        let mut k = KernelBuilder::new("flashcore_sm80_mma", target)
            .params::<FwdParams>()
            .shared(memory.layout.clone())
            .threads(32 * WARPS);
        self.body(&mut k, spec, &memory);
        k
    }

    fn check_args(self, args: &Args) -> Result<(), BindError> {
        check_rows(args, &TENSORS)
    }
}

impl Schedule {
    fn body(self, k: &mut KernelBuilder, spec: &Spec, memory: &Memory) {
        let (k_tile, v_tile, o_tile) = self.tiles(spec);
        let ty = matrix_ty(spec.dtype);
        let work = Work::begin(k, spec, |k| Rows::find(k, BLOCK_M, Order::HeadByHead));
        let place = Place::new(k, 16);
        let params = SoftmaxParams::read(k, spec);
        let softmax = OnlineSoftmax::new(k, params, 1);
        let o: Vec<Vec<Acc>> =
            vec![(0..o_tile.cols / 8).map(|_| std::array::from_fn(|_| k.mov_f32(0.0))).collect()];
        let q = load_queries(k, spec, &work, place);
        let range = work.key_range(k, BLOCK_M);
        let (k_row, v_row) = (k.param(FwdParams::k_row), k.param(FwdParams::v_row));

        k.section("main loop");
        let tile_index = k.div_u32(range.begin, self.block_n);
        let start = k.mul_lo_u32(tile_index, self.block_n);
        k.for_s32(start, range.end, self.block_n, |k, first_key, _| {
            k.comment("the tile before is no longer read");
            k.bar_sync_all();
            copy_tile(k, k_tile, memory.k, work.k, k_row, first_key, work.band.keys);
            copy_tile(k, v_tile, memory.v, work.v, v_row, first_key, work.band.keys);
            k.comment("this tile is there");
            k.bar_sync_all();

            k.comment("S = Q K^T");
            let zero: Reg<F32> = k.mov_f32(0.0);
            let mut scores = vec![vec![[zero; 4]; (self.block_n / 8) as usize]];
            // A thread's part of B: elements 2t, 2t + 1 (and 8 further) of key g.
            let base = k.shared_addr(memory.k);
            let row = k.mad_lo_u32(place.g, k_tile.pitch(), base);
            let at = k.mad_lo_u32(place.column, 2u32, row);
            for (step, &a) in q.iter().enumerate() {
                for (n, acc) in scores[0].iter_mut().enumerate() {
                    let offset = (8 * n as u32 * k_tile.pitch()) as i32 + 32 * step as i32;
                    let b = [k.ld_shared(at.at(offset)), k.ld_shared(at.at(offset + 16))];
                    *acc = k.mma_m16n8k16(ty, a, b, *acc);
                }
            }
            place.score(k, &work, params, &mut scores, Some(first_key));
            softmax.step(k, &scores, &o, true);

            k.comment("O += P V");
            // A thread's part of B: element g of keys 2t, 2t + 1 (and 8 further).
            let base = k.shared_addr(memory.v);
            let row = k.mad_lo_u32(place.column, v_tile.pitch(), base);
            let at = k.mad_lo_u32(place.g, 2u32, row);
            let p = a_operands(k, spec.dtype, &scores[0]);
            for (keys, &a) in p.iter().enumerate() {
                for (n, &acc) in o[0].iter().enumerate() {
                    let mut pair = |key: u32| {
                        let offset = |key: u32| (key * v_tile.pitch()) as i32 + 16 * n as i32;
                        let (first, second): (Reg<B16>, Reg<B16>) =
                            (k.ld_shared(at.at(offset(key))), k.ld_shared(at.at(offset(key + 1))));
                        k.pack_b32(first, second)
                    };
                    let b = [pair(16 * keys as u32), pair(16 * keys as u32 + 8)];
                    k.set(acc, |k| k.mma_m16n8k16(ty, a, b, acc));
                }
            }
        });

        k.section("epilogue");
        softmax.finish(k);
        epilogue::normalise(k, &softmax, &o, None);
        epilogue::store_lse(k, spec, &work.rows, &place, &softmax);
        epilogue::store_output(k, spec, &work.rows, &place, memory.o, o_tile, &o);
    }
}

/// The query fragments of this warp, one entry per 16 columns, straight from global memory; zeros outside the tensor.
fn load_queries(k: &mut KernelBuilder, spec: &Spec, work: &Work, place: Place) -> Vec<[Reg<B32>; 4]> {
    k.section("the queries");
    let stride = k.param(FwdParams::q_row);
    let rows = [0, 1].map(|half| {
        let row = place.row(k, &work.rows, 0, half);
        let exists = k.setp_lt_s32(row, work.rows.len_q);
        let address = Work::row_address(k, work.q, row, stride);
        (k.mad_wide_u32(place.column, 2u32, address), exists)
    });
    (0..spec.head_dim.div_ceil(16))
        .map(|step| {
            let mut element = |half: usize, column: u32| {
                let value = k.mov_b32(0u32);
                if column < spec.head_dim {
                    let (address, exists) = rows[half];
                    k.when(exists, |k| k.set(value, |k| k.ld_global(address.at(2 * column as i32))));
                }
                value
            };
            [
                element(0, 16 * step),
                element(1, 16 * step),
                element(0, 16 * step + 8),
                element(1, 16 * step + 8),
            ]
        })
        .collect()
}

/// Copies a tile with all threads, chunk by chunk; rows beyond the keys and columns beyond the head dim become zeros.
fn copy_tile(
    k: &mut KernelBuilder,
    tile: PaddedTile,
    to: Shared,
    from: Reg<B64>,
    stride: Reg<B64>,
    first_key: Reg<B32>,
    keys: Reg<B32>,
) {
    let chunks = tile.cols() / 8;
    let tid = k.tid_x();
    let base = k.shared_addr(to);
    for first in (0..tile.rows * chunks).step_by(32 * WARPS as usize) {
        let index = k.add_u32(tid, first);
        let row = k.div_u32(index, chunks);
        let before = k.mul_lo_u32(row, chunks);
        let chunk = k.sub_u32(index, before);
        let at = k.mad_lo_u32(row, tile.pitch(), base);
        let at = k.mad_lo_u32(chunk, CHUNK, at);
        let key = k.add_u32(first_key, row);
        let row_exists = k.setp_lt_s32(key, keys);
        let column_exists = k.setp_lt_u32(chunk, tile.head_dim / 8);
        let exists = k.and_pred(row_exists, column_exists);
        let source = Work::row_address(k, from, key, stride);
        let source = k.mad_wide_u32(chunk, CHUNK, source);
        let values: [Reg<B32>; 4] = std::array::from_fn(|_| k.mov_b32(0u32));
        k.when(exists, |k| k.set(values, |k| k.ld_global_vec(source)));
        let copy = |k: &mut KernelBuilder| k.st_shared_vec(at, values);
        if first + 32 * WARPS > tile.rows * chunks {
            let inside = k.setp_lt_u32(index, tile.rows * chunks);
            k.when(inside, copy);
        } else {
            copy(k);
        }
    }
}
