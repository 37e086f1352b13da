//! The forward kernel for Ampere and Ada, and the fallback everywhere else: `mma.sync`, `ldmatrix`, `cp.async`.
//!
//! A block takes `block_m` queries of one head and walks over the keys in tiles of `block_n`, from the last to the
//! first, so that the tiles that need a mask come first. K and V tiles lie swizzled in a ring of `stages`
//! shared-memory slots that `cp.async` fills ahead. A warp holds 16 or 32 queries: its scores, probabilities and
//! output never leave its registers.
//!
//! From Ada on it takes 8-bit floats. To `ldmatrix`, two of them are one 16-bit element, and as operands of QKᵀ that is what
//! they are. Of V it turns pairs of columns around, which `prmt` takes apart: one product has the even columns of sixteen,
//! another the odd ones. Probabilities are scaled up by 2^8, which uses the range of e4m3 best; and as the tensor cores add
//! 8-bit products with few bits, each key tile is added up apart, and then to the output in f32.

use flashcore_ptx::{B32, B64, F32, KernelBuilder, Reg, Shared, SharedLayout, Target, TensorMap};

use super::{
    packed,
    pages::{InPool, Pages, look_ups},
};
use crate::{
    Args, BindError, Blocks, Family, FwdParams, Geometry, Map, Packed, Phase, ScheduleError, Spec,
    bind::Operand as Tensor,
    family::{MAX_REGISTERS, check_blocks, check_registers, schedule},
    parts::{
        copy::{Share, TileCopy},
        epilogue,
        fragment::{Acc, Place, a_operands, matrix_ty},
        lane::{LaneAddress, Operand},
        params::{
            BlockDescaleParams, BlockDescales, DescaleParams, PageParams, PoolParams, TENSORS, check_rows,
        },
        softmax::{OnlineSoftmax, SoftmaxParams},
        swizzle::Tile,
        work::{KeyRange, Order, Rows, Work},
    },
    sm90::PackedParams,
};

/// Registers besides the fragments: operands on their way to the tensor cores, addresses, softmax state.
const OTHER_REGISTERS: u32 = 87;

/// Registers more where 8-bit operands are widened to 16 bits, besides those of queries and probabilities.
const WIDENED_REGISTERS: u32 = 30;

/// Registers more where queries or keys are packed.
const PACKED_REGISTERS: u32 = 4;

/// Registers more where keys are in pages, besides those of the look-ups.
const PAGE_REGISTERS: u32 = 8;

/// Registers more where blocks of keys have descales of their own: where these are, and the two of a tile.
const BLOCK_REGISTERS: u32 = 10;

/// Columns of 8-bit values that are turned around and added up together.
const COLUMNS: u32 = 32;

/// Takes the even bytes of two registers.
const EVEN: u32 = 0x6420;
/// Takes the odd ones.
const ODD: u32 = 0x7531;

schedule! {
    /// The knobs of the kernel.
    pub struct Schedule {
        /// Queries per block: 64 or 128.
        pub block_m: u32,
        /// Keys per tile: a multiple of 16.
        pub block_n: u32,
        /// Warps per block, with 16 or 32 queries each.
        pub warps: u32,
        /// Slots for K and V tiles; with one slot, a tile's V is fetched during its QKᵀ and the next K during its PV.
        pub stages: u32,
        /// Whether the queries are kept in registers rather than read from shared memory for every key tile.
        pub q_in_regs: bool,
        /// The order of the blocks.
        pub order: Order,
    }
}

/// A kernel's shared memory.
struct Memory {
    layout: SharedLayout,
    q: Shared,
    k: Shared,
    v: Shared,
    o: Shared,
    /// What warps write down of tiles of packed queries.
    notes: Option<Shared>,
}

/// The tiles of a schedule.
#[derive(Clone, Copy)]
struct Tiles {
    q: Tile,
    k: Tile,
    v: Tile,
    o: Tile,
}

impl Schedule {
    /// Every schedule of the search space whose tiles are well formed; [`crate::Schedule::check`] says which of
    /// them fit a spec and a target.
    pub fn grid() -> Vec<Schedule> {
        let mut grid = Vec::new();
        for (block_m, warps) in [(64, 4), (128, 4), (128, 8)] {
            for block_n in (32..=128).step_by(16) {
                for stages in 1..=3 {
                    for q_in_regs in [false, true] {
                        for order in [Order::HeadByHead, Order::LongestFirst] {
                            grid.push(Schedule { block_m, block_n, warps, stages, q_in_regs, order });
                        }
                    }
                }
            }
        }
        grid
    }

    fn tiles(self, spec: &Spec) -> Tiles {
        Tiles {
            q: Tile::new(self.block_m, width(spec, spec.head_dim)),
            k: Tile::new(self.block_n, width(spec, spec.head_dim)),
            v: Tile::new(self.block_n, width(spec, spec.head_dim_v)),
            o: Tile::new(self.block_m, spec.head_dim_v),
        }
    }

    fn memory(self, spec: &Spec) -> Memory {
        let tiles = self.tiles(spec);
        let mut layout = SharedLayout::new();
        // The output is staged where the queries were, so that place is as large as the larger of the two.
        let q = layout.alloc("q", tiles.q.bytes().max(tiles.o.bytes()), 128);
        let k = layout.alloc("k", self.stages * tiles.k.bytes(), 128);
        let v = layout.alloc("v", self.stages * tiles.v.bytes(), 128);
        let o = layout.alias("o", tiles.o.bytes(), &[q]);
        let notes = spec.packed_q.then(|| layout.alloc("notes", packed::bytes(self.warps), 16));
        Memory { layout, q, k, v, o, notes }
    }

    /// 16-row tiles per warp.
    fn m_tiles(self) -> u32 {
        self.block_m / self.warps / 16
    }
}

impl Family for Schedule {
    fn geometry(self, spec: &Spec) -> Geometry {
        let shared_bytes = self.memory(spec).layout.bytes();
        Geometry {
            rows: self.block_m,
            threads: 32 * self.warps,
            shared_bytes,
            blocks: if spec.packed_q { Blocks::EachPacked } else { Blocks::Each(self.order) },
        }
    }

    fn check(self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        let refuse = |reason: String| Err(ScheduleError::Malformed { reason });
        if ![(64, 4), (128, 4), (128, 8)].contains(&(self.block_m, self.warps)) {
            return refuse(format!(
                "block_m {} with {} warps: possible is 64 with 4, 128 with 4 and 128 with 8",
                self.block_m, self.warps
            ));
        }
        if !(32..=128).contains(&self.block_n) || !self.block_n.is_multiple_of(16) {
            return refuse(format!("block_n {}: possible is a multiple of 16 from 32 to 128", self.block_n));
        }
        if !(1..=3).contains(&self.stages) {
            return refuse(format!("{} stages: possible is 1 to 3", self.stages));
        }
        if spec.dtype.is_fp8() {
            self.check_fp8(spec, target)?;
        }
        self.memory(spec).layout.fits(target)?;
        let tiles = self.tiles(spec);
        // Where values are added up apart, the scores are packed already.
        let apart = if spec.dtype.is_fp8() { self.block_n / 8 + COLUMNS / 2 } else { 0 };
        let q = if self.q_in_regs { tiles.q.cols / 4 } else { 4 };
        // Hopper's mma.sync multiplies 8-bit floats as 16-bit ones, which the assembler makes of them.
        let widened = spec.dtype.is_fp8() && target >= Target::Sm90;
        let (q, others) = if widened {
            (3 * q, OTHER_REGISTERS + WIDENED_REGISTERS + self.block_n / 4)
        } else {
            (q, OTHER_REGISTERS)
        };
        let others = others + if spec.descale_keys.is_some() { BLOCK_REGISTERS } else { 0 };
        check_registers(
            self.m_tiles() * ((self.block_n / 2).max(apart) + tiles.o.cols / 2 + q),
            others + self.place_registers(spec),
            MAX_REGISTERS,
        )
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let memory = self.memory(spec);
        let mut k = KernelBuilder::new("flashcore_sm80_fwd", target)
            .params::<FwdParams>()
            .shared(memory.layout.clone())
            .threads(32 * self.warps)
            // Without a minimum, ptxas may spill to fit one more block on a multiprocessor.
            .min_blocks_per_sm(1);
        if spec.dtype.is_fp8() {
            k = k.more_params::<DescaleParams>();
        }
        if spec.descale_keys.is_some() {
            k = k.more_params::<BlockDescaleParams>();
        }
        if spec.packed_q || spec.packed_k {
            k = k.more_params::<PackedParams>();
        }
        if spec.page.is_some() {
            k = k.more_params::<PageParams>().more_params::<PoolParams>();
        }
        k = k.traced(spec.traced);
        self.body(&mut k, spec, &memory);
        k
    }

    fn roles(self) -> Vec<String> {
        (0..self.warps).map(|warp| format!("warp {warp}")).collect()
    }

    fn check_args(self, args: &Args) -> Result<(), BindError> {
        check_rows(args, &TENSORS)
    }

    fn bind<E>(
        self,
        spec: &Spec,
        args: &Args,
        _: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        let params = FwdParams::bind(args);
        // The tensor's rows are those of a page, of which a sequence may have several.
        let len_k = if spec.page.is_some() { args.longest[1] } else { params.len_k };
        packed.push(&FwdParams { len_k, ..params });
        if spec.dtype.is_fp8() {
            packed.extend(&DescaleParams::bind(args));
        }
        if spec.descale_keys.is_some() {
            packed.extend(&BlockDescaleParams::bind(args));
        }
        if spec.packed_q || spec.packed_k {
            packed.extend(&PackedParams::bind(args));
        }
        if spec.page.is_some() {
            packed.extend(&PageParams::bind(args));
            packed.extend(&PoolParams::bind(args));
        }
        Ok(())
    }
}

/// Columns of a tile: 16-bit elements, or pairs of 8-bit ones.
fn width(spec: &Spec, head_dim: u32) -> u32 {
    head_dim * spec.dtype.size() / 2
}

impl Schedule {
    /// What 8-bit floats need.
    fn check_fp8(self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        let refuse = |reason: String| Err(ScheduleError::Malformed { reason });
        if target == Target::Sm80 {
            return refuse("e4m3 needs sm_89 or later".into());
        }
        if !self.block_n.is_multiple_of(32) {
            return refuse(format!("block_n {}: with e4m3 a multiple of 32 is needed", self.block_n));
        }
        check_blocks(spec, self.block_n)?;
        if spec.softcap && !spec.scaled_scores {
            return refuse("with e4m3, a softcap needs scaled scores: see Spec::needs_scaled_scores".into());
        }
        Ok(())
    }

    /// Registers that finding rows of packed sequences and of pages takes.
    fn place_registers(self, spec: &Spec) -> u32 {
        let packed = if spec.packed_q || spec.packed_k { PACKED_REGISTERS } else { 0 };
        let Some(page) = spec.page else { return packed };
        let Tiles { k, v, .. } = self.tiles(spec);
        let rows = |tile: Tile| (self.block_n * tile.chunks()).div_ceil(32 * self.warps);
        let apart = if spec.has_one_dim() { 0 } else { look_ups(page, self.block_n, rows(v)) + 1 };
        packed + PAGE_REGISTERS + look_ups(page, self.block_n, rows(k)) + apart
    }

    /// The softmax of a block's rows, with the descales of its queries and keys in its scale, unless these are set for each tile.
    fn softmax(self, k: &mut KernelBuilder, spec: &Spec, work: &Work) -> OnlineSoftmax {
        let params = SoftmaxParams::read(k, spec);
        if !spec.dtype.is_fp8() {
            return OnlineSoftmax::new(k, params, self.m_tiles() as usize);
        }
        if spec.descale_keys.is_some() {
            return OnlineSoftmax::new(k, params, self.m_tiles() as usize).of_e4m3();
        }
        let kv_head = work.rows.kv_head(k, spec);
        let [q, keys] = [Tensor::Q, Tensor::K].map(|of| DescaleParams::read(k, of, work.rows.batch, kv_head));
        let both = k.mul_f32(q, keys);
        let multiplied = SoftmaxParams::read(k, spec);
        multiplied.set_multiplied(k, &params, both);
        OnlineSoftmax::new(k, multiplied, self.m_tiles() as usize).of_e4m3()
    }

    fn body(self, k: &mut KernelBuilder, spec: &Spec, memory: &Memory) {
        k.begin_trace(self.warps, 32);
        k.open_trace();
        match memory.notes {
            None => {
                let work = Work::begin(k, spec, |k| Rows::find(k, self.block_m, self.order));
                self.tile(k, spec, memory, &work);
            }
            Some(notes) => {
                let (found, exists) = packed::Tile::find(k, self.block_m, self.order);
                k.if_(exists, |k| {
                    found.note(k, notes);
                    let work = Work::begin(k, spec, |_| found.rows).with_queries_from(k, found.start);
                    self.tile(k, spec, memory, &work);
                });
            }
        }
        k.end_trace();
    }

    /// The rows of a block at the end of its work: their batch entry, and where they are in the tensors.
    fn rows_again(self, k: &mut KernelBuilder, memory: &Memory) -> (Reg<B32>, Rows) {
        let Some(notes) = memory.notes else {
            let rows = Rows::find(k, self.block_m, self.order);
            return (rows.batch, rows);
        };
        let noted = packed::Tile::noted(k, notes);
        (noted.rows.batch, noted.in_tensors(k))
    }

    /// A block's tile of queries.
    fn tile(self, k: &mut KernelBuilder, spec: &Spec, memory: &Memory, work: &Work) {
        let tiles = self.tiles(spec);
        let place = Place::new(k, self.block_m / self.warps);
        let softmax = self.softmax(k, spec, work);
        let o: Vec<Vec<Acc>> = (0..self.m_tiles())
            .map(|_| (0..tiles.o.cols / 8).map(|_| std::array::from_fn(|_| k.mov_f32(0.0))).collect())
            .collect();

        let range = work.key_range(k, self.block_m);
        let any = k.setp_lt_s32(range.begin, range.end);
        k.if_(any, |k| MainLoop::new(k, self, spec, memory, work, place).run(k, &range, &softmax, &o));

        k.section("epilogue");
        Phase::Store.begin(k);
        softmax.finish(k);
        let descale = (spec.dtype.is_fp8() && spec.descale_keys.is_none()).then(|| {
            let (batch, rows) = self.rows_again(k, memory);
            let kv_head = rows.kv_head(k, spec);
            DescaleParams::read(k, Tensor::V, batch, kv_head)
        });
        epilogue::normalise(k, &softmax, &o, descale);
        let (_, rows) = self.rows_again(k, memory);
        let place = Place::new(k, self.block_m / self.warps);
        epilogue::store_lse(k, spec, &rows, &place, &softmax);
        // A warp stages its output where it read its own queries. Where the two tiles differ in panel width, its rows
        // lie elsewhere, and the other warps must be done with their queries first.
        if tiles.o.panel() != tiles.q.panel() {
            k.bar_sync_all();
        } else if spec.dtype.is_fp8() {
            k.bar_warp_sync();
        }
        epilogue::store_output(k, spec, &rows, &place, memory.o, tiles.o, &o);
    }
}

/// The walk over the key tiles.
struct MainLoop<'a> {
    schedule: Schedule,
    spec: &'a Spec,
    memory: &'a Memory,
    tiles: Tiles,
    work: &'a Work,
    place: Place,
    q_copy: TileCopy,
    k_copy: TileCopy,
    v_copy: TileCopy,
    q_row: Reg<B64>,
    k_row: Reg<B64>,
    v_row: Reg<B64>,
    q_lane: LaneAddress,
    k_lane: LaneAddress,
    v_lane: LaneAddress,
    blocks: Option<BlockScales>,
}

/// Descales of blocks of keys, each of whole key tiles.
struct BlockScales {
    /// Key tiles of a block.
    tiles: u32,
    /// Of the keys and of the values.
    each: [BlockDescales; 2],
    of_q: Reg<F32>,
}

impl BlockScales {
    /// Reads those of a tile that exists.
    fn of(&self, k: &mut KernelBuilder, tile: Reg<B32>) -> [Reg<F32>; 2] {
        k.comment("the descales of this tile's block of keys");
        let block = k.div_u32(tile, self.tiles);
        self.each.map(|each| each.read_there(k, block))
    }

    /// Makes that of a tile's keys a part of the scale.
    fn scale(&self, k: &mut KernelBuilder, spec: &Spec, softmax: &OnlineSoftmax, of_k: Reg<F32>) {
        let both = k.mul_f32(self.of_q, of_k);
        let base = SoftmaxParams::read(k, spec);
        softmax.params.set_multiplied(k, &base, both);
    }
}

/// The registers that change from tile to tile.
struct Cursor {
    /// The tile to compute next.
    tile: Reg<B32>,
    /// The slot where it lies.
    slot: Reg<B32>,
    /// Where the next tiles to fetch come from.
    sources: Sources,
    /// The first tile that any row sees.
    first: Reg<B32>,
}

/// Where the next tiles to fetch come from.
enum Sources {
    /// This thread's place in the next K tile and in the next V tile.
    Rows { k: Reg<B64>, v: Reg<B64> },
    /// Pages, for K tiles and, where these are shared otherwise, for V tiles.
    Pages { k: Pages, v: Option<Pages> },
}

impl<'a> MainLoop<'a> {
    fn new(
        k: &mut KernelBuilder,
        schedule: Schedule,
        spec: &'a Spec,
        memory: &'a Memory,
        work: &'a Work,
        place: Place,
    ) -> Self {
        k.section("main loop: how threads copy and read tiles");
        let tiles = schedule.tiles(spec);
        let threads = 32 * schedule.warps;
        let (q_row, k_row, v_row) =
            (k.param(FwdParams::q_row), k.param(FwdParams::k_row), k.param(FwdParams::v_row));
        let q_share = Share::new(k, tiles.q, width(spec, spec.head_dim), threads);
        let k_share = Share::new(k, tiles.k, width(spec, spec.head_dim), threads);
        let v_share = if spec.has_one_dim() {
            k_share
        } else {
            Share::new(k, tiles.v, width(spec, spec.head_dim_v), threads)
        };
        let q_copy = TileCopy::new(k, q_share, q_row);
        let k_copy = TileCopy::new(k, k_share, k_row);
        let v_copy = TileCopy::new(k, v_share, v_row);
        let q_lane = LaneAddress::new(k, tiles.q, memory.q, place, Operand::A);
        let q_rows = k.mul_lo_u32(place.warp_row, tiles.q.pitch());
        let q_lane = q_lane.moved(k, Some(q_rows));
        let k_lane = LaneAddress::new(k, tiles.k, memory.k, place, Operand::B);
        let v_lane = LaneAddress::new(k, tiles.v, memory.v, place, Operand::BTransposed);
        let blocks = spec.descale_keys.map(|keys| {
            let (batch, kv_head) = (work.rows.batch, work.rows.kv_head(k, spec));
            let each = [Tensor::K, Tensor::V].map(|of| BlockDescaleParams::of(k, of, batch, kv_head));
            let of_q = DescaleParams::read(k, Tensor::Q, batch, kv_head);
            BlockScales { tiles: keys / schedule.block_n, each, of_q }
        });
        Self {
            schedule,
            spec,
            memory,
            tiles,
            work,
            place,
            q_copy,
            k_copy,
            v_copy,
            q_row,
            k_row,
            v_row,
            q_lane,
            k_lane,
            v_lane,
            blocks,
        }
    }

    fn run(&self, k: &mut KernelBuilder, range: &KeyRange, softmax: &OnlineSoftmax, o: &[Vec<Acc>]) {
        let Schedule { block_n, stages, q_in_regs, .. } = self.schedule;
        let tiles_to = |k: &mut KernelBuilder, keys: Reg<B32>| {
            let up = k.add_u32(keys, block_n - 1);
            k.div_u32(up, block_n)
        };
        let past = tiles_to(k, range.end);
        let last = k.sub_s32(past, 1);
        let first = k.div_u32(range.begin, block_n);
        // Tiles from `after_full` on hold keys that some row does not see; so do those before `first_full`.
        let after_full = k.div_u32(range.full_end, block_n);
        let after_full = k.max_s32(after_full, first);

        k.section("main loop: the first copies");
        let first_key = k.mul_lo_u32(last, block_n);
        let rows_left = k.sub_s32(self.work.band.keys, first_key);
        let q_address = Work::row_address(k, self.work.q, self.work.rows.first_row, self.q_row);
        let q_source = self.q_copy.source(k, q_address);
        let queries_left = k.sub_s32(self.work.rows.len_q, self.work.rows.first_row);
        Phase::CopyQ.begin(k);
        k.comment("the queries");
        self.q_copy.start(k, self.memory.q, None, q_source, Some(queries_left));
        let cursor = match self.spec.page {
            None => {
                let k_address = Work::row_address(k, self.work.k, first_key, self.k_row);
                let v_address = Work::row_address(k, self.work.v, first_key, self.v_row);
                Cursor {
                    tile: k.mov_b32(last),
                    slot: k.mov_b32(0u32),
                    sources: Sources::Rows {
                        k: self.k_copy.source(k, k_address),
                        v: self.v_copy.source(k, v_address),
                    },
                    first,
                }
            }
            Some(page) => {
                let pages = |k: &mut KernelBuilder, copy: &TileCopy| {
                    Pages::begin(k, [page, block_n], copy.share(), self.work, first_key)
                };
                let of_values = (!self.spec.has_one_dim()).then(|| pages(k, &self.v_copy));
                let sources = Sources::Pages { k: pages(k, &self.k_copy), v: of_values };
                Cursor { tile: k.mov_b32(last), slot: k.mov_b32(0u32), sources, first }
            }
        };
        Phase::CopyK.begin_tile(k, last);
        k.comment("the last K tile");
        self.fetch_k(k, &cursor, None, Some(rows_left));
        if stages > 1 {
            Phase::CopyV.begin_tile(k, last);
            k.comment("the last V tile");
            self.fetch_v(k, &cursor, None, Some(rows_left));
        }
        k.cp_async_commit();
        for ahead in 1..stages.saturating_sub(1) {
            let slot = k.mov_b32(ahead);
            self.fetch_ahead(k, &cursor, ahead, slot);
        }
        let q = q_in_regs.then(|| {
            Phase::QWait.begin_tile(k, self.work.rows.first_row);
            self.wait_for_tile(k);
            Phase::Tile.begin(k);
            self.load_queries(k)
        });

        k.section("main loop: masked tiles from the end");
        self.tiles_down_to(k, &cursor, after_full, q.as_deref(), softmax, o, true);
        k.section("main loop: tiles that every row sees");
        let first_full = if self.spec.left { tiles_to(k, range.full_begin) } else { first };
        let first_full = k.max_s32(first_full, first);
        self.tiles_down_to(k, &cursor, first_full, q.as_deref(), softmax, o, false);
        if self.spec.left {
            k.section("main loop: masked tiles at the window's start");
            self.tiles_down_to(k, &cursor, first, q.as_deref(), softmax, o, true);
        }
    }

    /// Waits until the next tile has arrived and every thread can see it.
    fn wait_for_tile(&self, k: &mut KernelBuilder) {
        k.comment("this thread's copies of the next tile are done");
        k.cp_async_wait(self.schedule.stages.saturating_sub(2) as u8);
        k.comment("everybody's are, and the tile before is no longer read");
        k.bar_sync_all();
    }

    fn fetch_k(
        &self,
        k: &mut KernelBuilder,
        cursor: &Cursor,
        slot: Option<Reg<B32>>,
        rows: Option<Reg<B32>>,
    ) {
        let slot = slot.map(|slot| k.mul_lo_u32(slot, self.tiles.k.bytes()));
        match &cursor.sources {
            &Sources::Rows { k: source, .. } => {
                self.k_copy.start(k, self.memory.k, slot, source, rows);
                self.k_copy.step_back(k, source);
            }
            Sources::Pages { k: pages, .. } => {
                pages.copy(k, &InPool::keys(self.work), self.memory.k, slot);
            }
        }
    }

    fn fetch_v(
        &self,
        k: &mut KernelBuilder,
        cursor: &Cursor,
        slot: Option<Reg<B32>>,
        rows: Option<Reg<B32>>,
    ) {
        let slot = slot.map(|slot| k.mul_lo_u32(slot, self.tiles.v.bytes()));
        match &cursor.sources {
            &Sources::Rows { v: source, .. } => {
                self.v_copy.start(k, self.memory.v, slot, source, rows);
                self.v_copy.step_back(k, source);
            }
            Sources::Pages { k: of_keys, v: of_values } => {
                of_values.as_ref().unwrap_or(of_keys).copy(
                    k,
                    &InPool::values(self.work),
                    self.memory.v,
                    slot,
                );
                // The keys of a tile are always copied before its values.
                for pages in [Some(of_keys), of_values.as_ref()].into_iter().flatten() {
                    pages.step_back(k);
                }
            }
        }
    }

    /// Fetches the tile that comes `ahead` tiles after the cursor's, if there is one. The group is committed either
    /// way, so that counting groups counts tiles.
    fn fetch_ahead(&self, k: &mut KernelBuilder, cursor: &Cursor, ahead: u32, slot: Reg<B32>) {
        let tile = k.sub_s32(cursor.tile, ahead as i32);
        let exists = k.setp_ge_s32(tile, cursor.first);
        k.if_(exists, |k| {
            Phase::CopyK.begin_tile(k, tile);
            k.comment("a K tile ahead");
            self.fetch_k(k, cursor, Some(slot), None);
            Phase::CopyV.begin_tile(k, tile);
            k.comment("a V tile ahead");
            self.fetch_v(k, cursor, Some(slot), None);
        });
        k.cp_async_commit();
    }

    /// The query fragments of this warp, one entry per 16-row tile and 16 columns.
    fn load_queries(&self, k: &mut KernelBuilder) -> Vec<Vec<[Reg<B32>; 4]>> {
        let rows = 0..self.schedule.m_tiles();
        rows.map(|m| (0..self.tiles.q.cols / 16).map(|c| self.query(k, m, c)).collect()).collect()
    }

    fn query(&self, k: &mut KernelBuilder, m: u32, column: u32) -> [Reg<B32>; 4] {
        let step = self.q_lane.step(k, column);
        k.ldmatrix(self.q_lane.at(step, 16 * m, column))
    }

    fn tiles_down_to(
        &self,
        k: &mut KernelBuilder,
        cursor: &Cursor,
        stop: Reg<B32>,
        q: Option<&[Vec<[Reg<B32>; 4]>]>,
        softmax: &OnlineSoftmax,
        o: &[Vec<Acc>],
        masked: bool,
    ) {
        k.while_(|k| k.setp_ge_s32(cursor.tile, stop), |k, _| self.tile(k, cursor, q, softmax, o, masked));
    }

    /// One key tile.
    fn tile(
        &self,
        k: &mut KernelBuilder,
        cursor: &Cursor,
        q: Option<&[Vec<[Reg<B32>; 4]>]>,
        softmax: &OnlineSoftmax,
        o: &[Vec<Acc>],
        masked: bool,
    ) {
        let Schedule { block_n, stages, .. } = self.schedule;
        let first_key = masked.then(|| k.mul_lo_u32(cursor.tile, block_n));
        let descales = self.blocks.as_ref().map(|blocks| blocks.of(k, cursor.tile));
        Phase::KWait.begin_tile(k, cursor.tile);
        self.wait_for_tile(k);
        if stages == 1 {
            // A tile that every row sees has all its keys.
            let rows = first_key.map(|first_key| k.sub_s32(self.work.band.keys, first_key));
            Phase::CopyV.begin_tile(k, cursor.tile);
            k.comment("this tile's V, while its scores are computed");
            self.fetch_v(k, cursor, None, rows);
            k.cp_async_commit();
        } else {
            k.comment("the slot of the tile before is free again");
            let behind = k.add_u32(cursor.slot, stages - 1);
            let wraps = k.setp_ge_u32(behind, stages);
            let wrapped = k.sub_u32(behind, stages);
            let free = k.selp_b32(wrapped, behind, wraps);
            self.fetch_ahead(k, cursor, stages - 1, free);
        }

        Phase::Qk.begin_tile(k, cursor.tile);
        let mut scores = self.scores(k, cursor, q);
        if stages == 1 {
            Phase::VWait.begin_tile(k, cursor.tile);
            self.wait_for_tile(k);
            let tile = k.sub_s32(cursor.tile, 1);
            let exists = k.setp_ge_s32(tile, cursor.first);
            k.if_(exists, |k| {
                Phase::CopyK.begin_tile(k, tile);
                k.comment("the next tile's K, while this one's output is computed");
                self.fetch_k(k, cursor, None, None);
            });
            k.cp_async_commit();
        }
        Phase::Softmax.begin_tile(k, cursor.tile);
        if let Some((blocks, [of_k, _])) = self.blocks.as_ref().zip(descales) {
            blocks.scale(k, self.spec, softmax, of_k);
        }
        self.place.score(k, self.work, softmax.params, &mut scores, first_key);
        softmax.step(k, &scores, o, masked);
        let p: Vec<Vec<[Reg<B32>; 4]>> =
            scores.iter().map(|scores| a_operands(k, self.spec.dtype, scores)).collect();
        Phase::Pv.begin_tile(k, cursor.tile);
        if self.spec.dtype.is_fp8() {
            self.add_fp8_values(k, cursor, &p, o, descales.map(|[_, of_v]| of_v));
        } else {
            self.add_values(k, cursor, &p, o);
        }

        k.set(cursor.tile, |k| k.sub_s32(cursor.tile, 1));
        if stages > 1 {
            let next = k.add_u32(cursor.slot, 1u32);
            let wraps = k.setp_eq_u32(next, stages);
            k.set(cursor.slot, |k| k.selp_b32(0u32, next, wraps));
        }
    }

    /// S = Q Kᵀ.
    fn scores(
        &self,
        k: &mut KernelBuilder,
        cursor: &Cursor,
        q: Option<&[Vec<[Reg<B32>; 4]>]>,
    ) -> Vec<Vec<Acc>> {
        k.comment("S = Q K^T");
        let ty = matrix_ty(self.spec.dtype);
        let m_tiles = self.schedule.m_tiles();
        let zero: Reg<F32> = k.mov_f32(0.0);
        let mut scores = vec![vec![[zero; 4]; (self.schedule.block_n / 8) as usize]; m_tiles as usize];
        let slot = self.slot_offset(k, cursor, self.tiles.k);
        let lane = self.k_lane.moved(k, slot);
        for column in 0..self.tiles.q.cols / 16 {
            let a: Vec<[Reg<B32>; 4]> = (0..m_tiles)
                .map(|m| q.map_or_else(|| self.query(k, m, column), |q| q[m as usize][column as usize]))
                .collect();
            let step = lane.step(k, column);
            for n in 0..self.schedule.block_n / 16 {
                let [b0, b1, b2, b3] = k.ldmatrix(lane.at(step, 16 * n, column));
                for (scores, &a) in scores.iter_mut().zip(&a) {
                    for (i, b) in [[b0, b1], [b2, b3]].into_iter().enumerate() {
                        let acc = &mut scores[2 * n as usize + i];
                        *acc = if self.spec.dtype.is_fp8() {
                            k.mma_m16n8k32(ty, ty, a, b, *acc)
                        } else {
                            k.mma_m16n8k16(ty, a, b, *acc)
                        };
                    }
                }
            }
        }
        scores
    }

    /// O += P V.
    fn add_values(&self, k: &mut KernelBuilder, cursor: &Cursor, p: &[Vec<[Reg<B32>; 4]>], o: &[Vec<Acc>]) {
        k.comment("O += P V");
        let ty = matrix_ty(self.spec.dtype);
        let slot = self.slot_offset(k, cursor, self.tiles.v);
        let lane = self.v_lane.moved(k, slot);
        let steps: Vec<Reg<B32>> =
            (0..self.tiles.v.chunks() / 2).map(|column| lane.step(k, column)).collect();
        for keys in 0..self.schedule.block_n / 16 {
            for column in 0..self.tiles.v.cols / 16 {
                let step = steps[column as usize % steps.len()];
                let [b0, b1, b2, b3] = k.ldmatrix_trans(lane.at(step, 16 * keys, column));
                for (o, p) in o.iter().zip(p) {
                    let a = p[keys as usize];
                    for (i, b) in [[b0, b1], [b2, b3]].into_iter().enumerate() {
                        let acc = o[2 * column as usize + i];
                        k.set(acc, |k| k.mma_m16n8k16(ty, a, b, acc));
                    }
                }
            }
        }
    }

    /// O += P V of 8-bit floats, a few columns at a time: the products with all keys of the tile are added up apart, and
    /// multiplied by the values' descale, if they have one of their own.
    fn add_fp8_values(
        &self,
        k: &mut KernelBuilder,
        cursor: &Cursor,
        p: &[Vec<[Reg<B32>; 4]>],
        o: &[Vec<Acc>],
        descale: Option<Reg<F32>>,
    ) {
        k.comment("O += P V");
        let slot = self.slot_offset(k, cursor, self.tiles.v);
        let lane = self.v_lane.moved(k, slot);
        // Always so, but the assembler does not know it: it keeps the columns apart, and so the registers that they take.
        let here = k.setp_ge_s32(cursor.tile, cursor.first);
        for column in 0..self.spec.head_dim_v.div_ceil(COLUMNS) {
            k.if_(here, |k| self.add_fp8_columns(k, &lane, column, p, o, descale));
        }
    }

    /// The same for some columns.
    fn add_fp8_columns(
        &self,
        k: &mut KernelBuilder,
        lane: &LaneAddress,
        column: u32,
        p: &[Vec<[Reg<B32>; 4]>],
        o: &[Vec<Acc>],
        descale: Option<Reg<F32>>,
    ) {
        let ty = matrix_ty(self.spec.dtype);
        let step = lane.step(k, column);
        // Sixteens of columns; the last of all may be alone.
        let sixteens = ((self.spec.head_dim_v - COLUMNS * column) / 16).min(2) as usize;
        let zero = k.mov_f32(0.0);
        let mut apart = vec![vec![[zero; 4]; 2 * sixteens]; o.len()];
        for keys in 0..self.schedule.block_n / 32 {
            // For each sixteen keys: the upper and lower eight of the first sixteen columns, then of the others.
            let [first, second]: [[Reg<B32>; 4]; 2] =
                [0, 16].map(|more| k.ldmatrix_trans(lane.at(step, 32 * keys + more, column)));
            for sixteen in 0..sixteens {
                for (parity, picks) in [EVEN, ODD].into_iter().enumerate() {
                    let b = [first, second]
                        .map(|four| k.prmt_b32(four[2 * sixteen], four[2 * sixteen + 1], picks));
                    for (apart, p) in apart.iter_mut().zip(p) {
                        let acc = &mut apart[2 * sixteen + parity];
                        *acc = k.mma_m16n8k32(ty, ty, p[keys as usize], b, *acc);
                    }
                }
            }
        }
        for (o, apart) in o.iter().zip(apart) {
            for (o, apart) in o.iter().skip((COLUMNS / 8 * column) as usize).zip(apart) {
                for (&o, apart) in o.iter().zip(apart) {
                    k.set(o, |k| match descale {
                        Some(descale) => k.fma_f32(apart, descale, o),
                        None => k.add_f32(o, apart),
                    });
                }
            }
        }
    }

    fn slot_offset(&self, k: &mut KernelBuilder, cursor: &Cursor, tile: Tile) -> Option<Reg<B32>> {
        (self.schedule.stages > 1).then(|| k.mul_lo_u32(cursor.slot, tile.bytes()))
    }
}
