//! The forward kernel for few queries of 16 bits against many keys and values, of 16 bits or of 8: decoding.
//!
//! What takes time is reading keys and values, so everything is arranged around that. A block has up to 16 rows: the queries
//! of the heads that share a kv head, or of one head. Its warps take steps of keys in turn, each with all rows and a
//! softmax of its own, and merge through shared memory at the end. A thread copies by `cp.async` exactly what it will need
//! itself, several steps ahead, into a ring that no other thread reads: nobody waits for anybody.
//!
//! Sums over the head dim and over keys may be taken in any order, so operands of `mma.sync` are made of whichever four neighbours
//! a thread has read, and the columns of the output come out in an order of their own. Codes of an E4M3 cache become f16, which is
//! exact, in the order in which they come. Queries of bf16 then become f16 times a power of two of their row, which is exact
//! but for numbers 2^29 times smaller than the row's largest.
//!
//! Blocks of keys may have descales of their own, if every step lies in one: scores are multiplied by the keys', and what a step
//! adds to the output is made apart and multiplied by the values'.
//!
//! Sequences of queries and of keys may be packed; tiles of queries are then found as `sm80_fwd` finds them, and end with their
//! sequence. Keys and values may lie in pages of a pool, where every step of keys lies in one: its number is read while the
//! step before it is copied.
//!
//! Where there are too few rows to fill the GPU, the keys are cut into parts, and [`combine`](crate::combine) merges
//! them.

use flashcore_ptx::{
    Addr, B32, B64, CpAsyncBytes, CpAsyncCache, F32, GridDep, KernelBuilder, L2Prefetch, Module, Pred, Reg,
    Shared, SharedLayout, Target, TensorMap,
};

use crate::{
    Args, BindError, Blocks, ElementType, Family, FwdParams, Geometry, Map, Operand, Packed, ScheduleError,
    Spec,
    family::{MAX_REGISTERS, check_registers, schedule},
    parts::{
        fragment::{Acc, HALVES, Place, a_operands, matrix_ty, pack},
        params::{
            BlockDescaleParams, BlockDescales, DescaleParams, PageParams, PoolParams, TENSORS, check_rows,
        },
        softmax::{NEG_INF, OnlineRow, OnlineSoftmax, SoftmaxParams},
        work::{KeyRange, Order, QueryRows, Rows, Work, first_query_head},
    },
    sm80::packed::{self, Tile},
    sm90::PackedParams,
};

/// Rows of a block: what one `mma` takes.
pub const ROWS: u32 = 16;

/// Registers besides the fragments.
const OTHER_REGISTERS: u32 = 72;

/// The largest head dim whose queries are kept in registers rather than in shared memory, and the most registers that they and the
/// output then have together.
const MOST_IN_REGISTERS: [u32; 2] = [192, 172];

/// What pairs the bytes of two words: their lower two, and their upper two.
const PAIRS: [u32; 2] = [0x5140, 0x7362];

/// The same for halves of words: the lower one, and the upper one.
const PAIRS_OF_HALVES: [u32; 2] = [0x5410, 0x7632];

schedule! {
    /// The knobs of the kernel.
    pub struct Schedule {
        /// Warps per block, which take steps of keys in turn: 1 to 16.
        pub warps: u32,
        /// Keys per step: 16 or 32.
        pub keys: u32,
        /// Steps of each warp that are in flight or in use: 2 to 8.
        pub stages: u32,
        /// Parts that the keys are cut into, one block each; [`combine`](crate::combine) merges them.
        pub parts: u32,
    }
}

/// How a thread reads rows: neighbours in so many bytes, every so many threads.
#[derive(Clone, Copy)]
struct Pieces {
    /// Bytes of an element.
    element: u32,
    /// Bytes of a piece.
    bytes: u32,
    /// Pieces of a row that a thread has.
    count: u32,
    /// Threads that share a row.
    threads: u32,
    /// Bytes of a row.
    row: u32,
}

impl Pieces {
    fn new(elements: u32, of: ElementType, threads: u32) -> Self {
        let (element, row) = (of.size(), elements * of.size());
        let fits = |bytes: &u32| row.is_multiple_of(bytes * threads);
        let bytes = [16, 8].into_iter().find(fits).unwrap_or(4 * element);
        Self { element, bytes, count: row.div_ceil(bytes * threads), threads, row }
    }

    /// Fours of elements in a piece.
    fn quads(self) -> u32 {
        self.elements() / 4
    }

    /// Elements of a piece.
    fn elements(self) -> u32 {
        self.bytes / self.element
    }

    /// Elements from one piece of a thread to its next.
    fn elements_apart(self) -> u32 {
        self.elements() * self.threads
    }

    /// The words of a four of elements, of the words of a piece.
    fn quad(self, words: &[Reg<B32>], quad: u32) -> &[Reg<B32>] {
        let each = self.element as usize;
        &words[each * quad as usize..][..each]
    }

    /// Bytes from one piece of a thread to its next.
    fn stride(self) -> u32 {
        self.bytes * self.threads
    }

    /// Whether some threads have nothing of the last piece.
    fn is_ragged(self) -> bool {
        !self.row.is_multiple_of(self.stride())
    }

    /// Copies a thread's pieces of a row, or zeros where it is not there; `last`: whether it has the last piece.
    fn copy(
        self,
        k: &mut KernelBuilder,
        to: Reg<B32>,
        row: u32,
        from: Reg<B64>,
        there: Reg<Pred>,
        last: Option<Reg<Pred>>,
    ) {
        let (bytes, cache) = match self.bytes {
            16 => (CpAsyncBytes::B16, CpAsyncCache::Cg),
            8 => (CpAsyncBytes::B8, CpAsyncCache::Ca),
            _ => (CpAsyncBytes::B4, CpAsyncCache::Ca),
        };
        for piece in 0..self.count {
            let mut there = there;
            if let Some(last) = last.filter(|_| piece + 1 == self.count) {
                there = k.and_pred(there, last);
            }
            let read = k.selp_b32(self.bytes, 0u32, there);
            let to = to.at((32 * self.bytes * (row * self.count + piece)) as i32);
            let from = from.at((piece * self.stride()) as i32);
            let prefetch = Some(L2Prefetch::B128);
            k.cp_async_hint(cache, bytes, to, from, Some(read.into()), prefetch, None);
        }
    }

    fn load(self, k: &mut KernelBuilder, at: Addr<B32>) -> Vec<Reg<B32>> {
        match self.bytes {
            16 => k.ld_shared_vec::<B32, 4>(at).into(),
            8 => k.ld_shared_vec::<B32, 2>(at).into(),
            _ => vec![k.ld_shared(at)],
        }
    }
}

/// A kernel's shared memory.
struct Memory {
    layout: SharedLayout,
    ring: Shared,
    o: Shared,
    states: Shared,
    /// The queries as operands, where they are not in registers.
    queries: Option<Shared>,
    /// What warps write down of tiles of packed queries.
    notes: Option<Shared>,
}

impl Schedule {
    /// The schedule to begin with. With 16 bits, a step of as many keys is twice as large.
    pub fn new(spec: &Spec, parts: u32) -> Self {
        let bytes = spec.head_dim.max(spec.head_dim_v) * of_keys(spec).size();
        let odd = [spec.descale_keys, spec.page].into_iter().flatten().any(|keys| keys % 32 != 0);
        let keys = if bytes > 128 || odd { 16 } else { 32 };
        let warps = if spec.kv.is_some() { 8 } else { 4 };
        Self { warps, keys, stages: 3, parts }
    }

    fn k_pieces(spec: &Spec) -> Pieces {
        Pieces::new(spec.head_dim, of_keys(spec), 4)
    }

    fn v_pieces(spec: &Spec) -> Pieces {
        Pieces::new(spec.head_dim_v, of_keys(spec), 8)
    }

    /// Bytes of a step of keys, of one lane.
    fn lane_bytes(self, spec: &Spec) -> u32 {
        let [k, v] = [Self::k_pieces(spec), Self::v_pieces(spec)];
        self.keys / 8 * k.count * k.bytes + self.keys / 4 * v.count * v.bytes
    }

    /// Columns of the output with those that a thread has beyond the last.
    fn columns(spec: &Spec) -> u32 {
        let v = Self::v_pieces(spec);
        v.count * v.elements_apart()
    }

    /// Whether the queries are kept in registers.
    fn in_registers(spec: &Spec) -> bool {
        let [widest, most] = MOST_IN_REGISTERS;
        spec.head_dim <= widest && spec.head_dim / 4 + Self::columns(spec) / 2 <= most
    }

    fn memory(self, spec: &Spec) -> Memory {
        let mut layout = SharedLayout::new();
        let ring = 32 * self.warps * self.stages * self.lane_bytes(spec);
        let results = 4 * self.warps * ROWS * Self::columns(spec);
        let ring = layout.alloc("ring", ring.max(results), 128);
        let o = layout.alias("outputs of the warps", results, &[ring]);
        let states = layout.alloc("states of the warps", 8 * self.warps * ROWS, 16);
        let queries =
            (!Self::in_registers(spec)).then(|| layout.alloc("queries", 2 * ROWS * spec.head_dim, 16));
        let notes = spec.packed_q.then(|| layout.alloc("notes", packed::bytes(self.warps), 16));
        Memory { layout, ring, o, states, queries, notes }
    }
}

impl Family for Schedule {
    const PROGRAMMATIC: bool = true;

    fn check(self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        let refuse = |reason: String| Err(ScheduleError::Malformed { reason });
        let Self { warps, keys, stages, parts } = self;
        if !matches!(spec.dtype, ElementType::F16 | ElementType::Bf16) || spec.out.is_some() {
            return refuse("queries and outputs are of f16 or bf16, both of one type".into());
        }
        let possible = |dim: u32| (16..=256).contains(&dim) && dim.is_multiple_of(16);
        if !possible(spec.head_dim) || !possible(spec.head_dim_v) {
            return Err(ScheduleError::HeadDim {
                head_dim: spec.head_dim,
                head_dim_v: spec.head_dim_v,
                possible: "multiples of 16 from 16 to 256",
            });
        }
        if spec.kv.is_some() && target == Target::Sm80 {
            return refuse("e4m3 needs sm_89 or later".into());
        }
        if !(1..=16).contains(&warps) || ![16, 32].contains(&keys) || !(2..=8).contains(&stages) || parts == 0
        {
            return refuse(format!(
                "{self}: possible are 1 to 16 warps, 16 or 32 keys, 2 to 8 stages, and at least one part"
            ));
        }
        if let Some(block) = spec.descale_keys
            && !block.is_multiple_of(keys)
        {
            return refuse(format!(
                "descales of blocks of {block} keys: possible are multiples of {keys}, the keys of a step (16 at least); for \
                 others copy the tensors to the host and call Device::cpu()"
            ));
        }
        if let Some(page) = spec.page
            && !page.is_multiple_of(keys)
        {
            return refuse(format!(
                "pages of {page} keys: possible are multiples of {keys}, the keys of a step (16 at least)"
            ));
        }
        if spec.kv.is_some() && spec.softcap && !spec.scaled_scores {
            return refuse("with e4m3, a softcap needs scaled scores: see Spec::needs_scaled_scores".into());
        }
        self.memory(spec).layout.fits(target)?;
        let q = if Self::in_registers(spec) { spec.head_dim / 4 } else { 4 };
        // What a step adds to eight columns, and the words that it is made of.
        let apart = if spec.descale_keys.is_some() { 16 + keys / 2 } else { 0 };
        let fragments = Self::columns(spec) / 2 + q + keys / 2 + apart;
        let limit = (65536 / (32 * warps) / 8 * 8).min(MAX_REGISTERS);
        check_registers(fragments, OTHER_REGISTERS, limit)
    }

    fn geometry(self, spec: &Spec) -> Geometry {
        Geometry {
            rows: ROWS,
            threads: 32 * self.warps,
            shared_bytes: self.memory(spec).layout.bytes(),
            blocks: Blocks::Row { cluster: 1, resident: None, parts: self.parts },
        }
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let memory = self.memory(spec);
        let mut k = KernelBuilder::new("flashcore_sm80_decode", target).params::<FwdParams>();
        if spec.kv.is_some() {
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
        let mut k = k.shared(memory.layout.clone()).threads(32 * self.warps).min_blocks_per_sm(1);
        self.body(&mut k, spec, &memory);
        k
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
        let mut own = *args;
        if self.parts > 1 {
            own.set(Operand::O, *args.tensor(Operand::PartialO));
            own.set(Operand::Lse, *args.tensor(Operand::PartialState));
        }
        let [_, heads, len_q] = args.rows(spec);
        let fwd = FwdParams { len_q, heads, ..FwdParams::bind(&own) };
        let len_k = if spec.page.is_some() { args.longest[1] } else { fwd.len_k };
        packed.push(&FwdParams { len_k, ..fwd });
        if spec.kv.is_some() {
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

impl Schedule {
    /// The kernel as a PTX module with one entry.
    pub fn module(self, spec: &Spec, target: Target) -> Result<Module, ScheduleError> {
        self.check(spec, target)?;
        Ok(Module::new(target).with(Family::emit(self, spec, target).finish()?))
    }

    fn body(self, k: &mut KernelBuilder, spec: &Spec, memory: &Memory) {
        if k.target() >= Target::Sm90 {
            k.comment(
                "the next launch may set itself up beside this one, as this one does beside the one before",
            );
            k.griddepcontrol(GridDep::LaunchDependents);
            k.griddepcontrol(GridDep::Wait);
        }
        let Some(notes) = memory.notes else {
            let work = Work::begin(k, spec, |k| Rows::find_in_row(k, ROWS));
            return self.tile(k, spec, memory, &work);
        };
        let each = [ROWS, spec.rows_per_query];
        let (found, exists) = Tile::find_in_row(k, each, Order::HeadByHead);
        k.if_(exists, |k| {
            found.note(k, notes);
            let work = Work::begin(k, spec, |_| found.rows).with_queries_from(k, found.start);
            self.tile(k, spec, memory, &work);
        });
    }

    /// A block's tile of rows.
    fn tile(self, k: &mut KernelBuilder, spec: &Spec, memory: &Memory, work: &Work) {
        let place = Place::new(k, 0);
        let range = work.key_range(k, ROWS);
        let steps = self.steps(k, &range);
        let walk = Walk::new(k, self, spec, memory, work, place, &range);
        // Before anything else is waited for.
        let first = walk.begin(k, &steps);
        let queries = Queries::load(k, spec, memory, work, place, walk.k);
        let kv_head = work.rows.kv_head(k, spec);
        let blocks = spec.descale_keys.map(|_| {
            [Operand::K, Operand::V].map(|of| BlockDescaleParams::of(k, of, work.rows.batch, kv_head))
        });
        let descale = spec.kv.map(|_| match blocks {
            Some(_) => k.mov_f32(1.0),
            None => DescaleParams::read(k, Operand::K, work.rows.batch, kv_head),
        });
        let mut params = SoftmaxParams::read(k, spec);
        if let Some(descale) = descale {
            let multiplied = SoftmaxParams::read(k, spec);
            multiplied.set_multiplied(k, &params, descale);
            params = multiplied;
        }
        let softmax = OnlineSoftmax::new(k, params, 1);
        let o: Vec<Acc> =
            (0..Self::columns(spec) / 8).map(|_| std::array::from_fn(|_| k.mov_f32(0.0))).collect();
        walk.run(k, first, &steps, &queries, &softmax, &o, blocks);
        softmax.finish(k);
        self.merge(k, spec, memory, &place, &softmax, &o, descale);
    }

    /// This part's steps of keys.
    fn steps(self, k: &mut KernelBuilder, range: &KeyRange) -> Steps {
        k.section("which keys this part has");
        let first = k.div_u32(range.begin, self.keys);
        let up = k.add_u32(range.end, self.keys - 1);
        let past = k.div_u32(up, self.keys);
        let some = k.setp_lt_s32(range.begin, range.end);
        let past = k.selp_b32(past, first, some);
        if self.parts == 1 {
            return Steps { first, past };
        }
        let (part, parts) = (k.ctaid_y(), k.nctaid_y());
        let count = k.sub_u32(past, first);
        let up = k.add_u32(count, parts);
        let up = k.sub_u32(up, 1u32);
        let share = k.div_u32(up, parts);
        let first = k.mad_lo_u32(part, share, first);
        let end = k.add_u32(first, share);
        Steps { first, past: k.min_u32(end, past) }
    }

    /// Merges what the warps have, and stores it.
    fn merge(
        self,
        k: &mut KernelBuilder,
        spec: &Spec,
        memory: &Memory,
        place: &Place,
        softmax: &OnlineSoftmax,
        o: &[Acc],
        k_descale: Option<Reg<F32>>,
    ) {
        k.section("merge: what each warp has");
        // Four columns of a row at a time, as threads have them: each lane's in a place of its own.
        let quads = Self::columns(spec) / 8;
        let pieces = Self::v_pieces(spec);
        let tid = k.tid_x();
        let warp = k.shr_u32(tid, 5u32);
        let (base, states) = (k.shared_addr(memory.o), k.shared_addr(memory.states));
        k.comment("no thread reads its keys any more");
        k.bar_sync_all();
        let first = k.setp_eq_u32(place.column, 0u32);
        let index = k.mad_lo_u32(warp, ROWS, place.g);
        let state = k.mad_lo_u32(index, 8u32, states);
        let mine = k.mul_lo_u32(warp, 32 * quads);
        let mine = k.add_u32(mine, place.lane);
        let mine = k.mad_lo_u32(mine, 16u32, base);
        let mut quad = 0;
        for (half, row) in softmax.rows[0].iter().enumerate() {
            k.when(first, |k| k.st_shared_vec(state.at(64 * half as i32), [row.max, row.sum]));
            for four in o.chunks_exact(4) {
                for &i in &HALVES[half] {
                    k.st_shared_vec(mine.at(512 * quad), std::array::from_fn::<_, 4, _>(|j| four[j][i]));
                    quad += 1;
                }
            }
        }
        k.bar_sync_all();

        k.section("merge: all of them");
        let (batch, rows) = match memory.notes {
            None => {
                let rows = Rows::find_in_row(k, ROWS);
                (rows.batch, rows)
            }
            Some(notes) => {
                let noted = Tile::noted_in_row(k, notes, [ROWS, spec.rows_per_query]);
                (noted.rows.batch, noted.in_tensors(k))
            }
        };
        let kv_head = rows.kv_head(k, spec);
        let v_descale = spec.kv.map(|_| match spec.descale_keys {
            Some(_) => k.mov_f32(1.0),
            None => DescaleParams::read(k, Operand::V, batch, kv_head),
        });
        // What parts come to lies row by row.
        let as_rows = Spec { rows_per_query: if self.parts > 1 { 1 } else { spec.rows_per_query }, ..*spec };
        let of_queries = Rows { head: first_query_head(k, &as_rows, rows.head), ..rows };
        let (o_head, lse_head) = (of_queries.o(k), of_queries.lse(k));
        let o_rows = QueryRows::read(k, &as_rows, [FwdParams::o_row, FwdParams::o_head]);
        let lse_rows = QueryRows::read(k, &as_rows, [FwdParams::lse_row, FwdParams::lse_head]);
        let quad = k.mov_b32(warp);
        k.while_(
            |k| k.setp_lt_u32(quad, quads),
            |k, _| {
                let half = k.div_u32(quad, quads / 2);
                let inside = k.rem_u32(quad, quads / 2);
                let side = k.and_b32(inside, 1u32);
                let four = k.shr_u32(inside, 1u32);
                let (piece, four) = (k.div_u32(four, pieces.quads()), k.rem_u32(four, pieces.quads()));
                let row = k.mad_lo_u32(half, 8u32, place.g);
                let column = k.add_u32(place.column, side);
                let column = k.mul_lo_u32(column, pieces.elements());
                let column = k.mad_lo_u32(piece, pieces.elements_apart(), column);
                let column = k.mad_lo_u32(four, 4u32, column);

                let at = k.mad_lo_u32(row, 8u32, states);
                let each: Vec<[Reg<F32>; 2]> =
                    (0..self.warps).map(|warp| k.ld_shared_vec(at.at((8 * ROWS * warp) as i32))).collect();
                let max = each.iter().map(|it| it[0]).reduce(|a, b| k.max_f32(a, b)).expect("a warp");
                let reference = SoftmaxParams::reference(k, max, false);
                let at = k.mad_lo_u32(quad, 32u32, place.lane);
                let at = k.mad_lo_u32(at, 16u32, base);
                let mut sum = k.mov_f32(0.0);
                let mut total: [Reg<F32>; 4] = std::array::from_fn(|_| sum);
                for (warp, [theirs, weights]) in (0..).zip(each) {
                    let factor = softmax.params.exp(k, theirs, reference);
                    sum = k.fma_f32(weights, factor, sum);
                    let values: [Reg<F32>; 4] = k.ld_shared_vec(at.at((512 * quads) as i32 * warp));
                    total = std::array::from_fn(|i| k.fma_f32(values[i], factor, total[i]));
                }
                let index = k.add_u32(rows.first_row, row);
                let mut exists = k.setp_lt_s32(index, rows.len_q);
                if pieces.is_ragged() {
                    let inside = k.setp_lt_u32(column, spec.head_dim_v);
                    exists = k.and_pred(exists, inside);
                }
                let leads = k.setp_eq_u32(column, 0u32);
                let leads = k.and_pred(leads, exists);
                if self.parts > 1 {
                    let part = k.ctaid_y();
                    // The rows of a head in memory, of whatever sequence.
                    let all_rows = if spec.packed_q { k.param(FwdParams::len_q) } else { rows.len_q };
                    let index = k.mad_lo_u32(part, all_rows, index);
                    // What merges the parts knows nothing of descales.
                    let max = match k_descale.filter(|_| !spec.scaled_scores) {
                        Some(descale) => k.mul_f32(max, descale),
                        None => max,
                    };
                    let at = lse_rows.address(k, lse_head, index);
                    k.when(leads, |k| k.st_global_vec(at, [max, sum]));
                    let total = v_descale.map_or(total, |by| total.map(|total| k.mul_f32(total, by)));
                    let at = o_rows.address(k, o_head, index);
                    let at = k.mad_wide_u32(column, 4u32, at);
                    k.when(exists, |k| k.st_global_vec(at, total));
                } else {
                    let inverse = SoftmaxParams::inverse(k, sum);
                    let inverse = v_descale.map_or(inverse, |by| k.mul_f32(inverse, by));
                    let [a, b, c, d] = total.map(|total| k.mul_f32(total, inverse));
                    let both = [pack(k, spec.dtype, a, b), pack(k, spec.dtype, c, d)];
                    let at = o_rows.address(k, o_head, index);
                    let at = k.mad_wide_u32(column, 2u32, at);
                    k.when(exists, |k| k.st_global_vec(at, both));
                    if spec.lse {
                        let value = softmax.lse(k, OnlineRow { max, sum });
                        let at = lse_rows.address(k, lse_head, index);
                        k.when(leads, |k| k.st_global(at, value));
                    }
                }
                k.set(quad, |k| k.add_u32(quad, self.warps));
            },
        );
    }
}

/// Steps of keys, counted from the first key: the end is not included.
struct Steps {
    first: Reg<B32>,
    past: Reg<B32>,
}

/// A warp's walk over its steps of keys.
struct Walk<'a> {
    schedule: Schedule,
    spec: &'a Spec,
    work: &'a Work,
    place: Place,
    range: KeyRange,
    k: Pieces,
    v: Pieces,
    /// This thread's first piece of the first key and value that it has.
    k_base: Reg<B64>,
    v_base: Reg<B64>,
    k_row: Reg<B32>,
    v_row: Reg<B32>,
    /// This thread's ring.
    ring: Reg<B32>,
    /// For the last piece of a value: whether this thread has one.
    v_last: Option<Reg<Pred>>,
    pages: Option<Pages>,
}

/// Keys and values in pages.
struct Pages {
    /// Steps of keys in a page.
    steps: u32,
    /// The pages of the batch entry.
    table: Reg<B64>,
    /// That of the step which is copied next.
    next: Reg<B32>,
}

impl Pages {
    /// The page of a step, if there is such a step.
    fn of(&self, k: &mut KernelBuilder, step: Reg<B32>, past: Reg<B32>) -> Reg<B32> {
        let exists = k.setp_lt_s32(step, past);
        let index = k.div_u32(step, self.steps);
        let at = k.mad_wide_u32(index, 4u32, self.table);
        let page = k.mov_b32(0u32);
        k.when(exists, |k| k.set(page, |k| k.ld_global(at)));
        page
    }
}

/// Where A operands are.
enum Operands {
    InRegisters(Vec<[Reg<B32>; 4]>),
    /// The address of this lane's first one, which others follow.
    Shared(Reg<B32>),
}

/// A block's rows as A operands, one per 16 elements, and for bf16 what their scores are to be multiplied by.
struct Queries {
    operands: Operands,
    factors: Option<[Reg<F32>; 2]>,
}

impl<'a> Walk<'a> {
    fn new(
        k: &mut KernelBuilder,
        schedule: Schedule,
        spec: &'a Spec,
        memory: &Memory,
        work: &'a Work,
        place: Place,
        range: &KeyRange,
    ) -> Self {
        k.section("walk: what this thread reads");
        let (pieces_k, pieces_v) = (Schedule::k_pieces(spec), Schedule::v_pieces(spec));
        let (k_row, v_row) = (k.param(FwdParams::k_row), k.param(FwdParams::v_row));
        let (k_row, v_row) = (k.cvt_u32_u64(k_row), k.cvt_u32_u64(v_row));
        // Of eight keys this thread has the one of its g, and of a key every fourth piece from its t on. Of values it is
        // the other way: keys 2t, 2t + 1, 2t + 8, 2t + 9 of sixteen, and every eighth piece from its g on.
        let t = k.shr_u32(place.column, 1u32);
        let k_base = k.mad_wide_u32(place.g, k_row, work.k);
        let k_base = k.mad_wide_u32(t, pieces_k.bytes, k_base);
        let v_base = k.mad_wide_u32(place.column, v_row, work.v);
        let v_base = k.mad_wide_u32(place.g, pieces_v.bytes, v_base);
        let v_last = pieces_v.is_ragged().then(|| {
            let left = pieces_v.row - (pieces_v.count - 1) * pieces_v.stride();
            k.setp_lt_u32(place.g, left / pieces_v.bytes)
        });
        let tid = k.tid_x();
        let warp = k.shr_u32(tid, 5u32);
        let base = k.shared_addr(memory.ring);
        // Pieces of all lanes of a warp lie side by side, so the lane's place depends on their size: see `at`.
        let ring = k.mad_lo_u32(warp, 32 * schedule.stages * schedule.lane_bytes(spec), base);
        let pages = spec.page.map(|page| {
            let (table, row) = (k.param(PageParams::pages), k.param(PageParams::pages_row));
            let batch = k.cvt_u64_u32(work.rows.batch);
            let (table, next) = (k.mad_lo_u64(batch, row, table), k.mov_b32(0u32));
            Pages { steps: page / schedule.keys, table, next }
        });
        Self {
            schedule,
            spec,
            work,
            place,
            range: *range,
            k: pieces_k,
            v: pieces_v,
            k_base,
            v_base,
            k_row,
            v_row,
            ring,
            v_last,
            pages,
        }
    }

    /// Starts the first copies, and returns this warp's first step.
    fn begin(&self, k: &mut KernelBuilder, steps: &Steps) -> Reg<B32> {
        let Schedule { warps, stages, .. } = self.schedule;
        k.section("walk: the first copies");
        let tid = k.tid_x();
        let warp = k.shr_u32(tid, 5u32);
        let step = k.add_u32(steps.first, warp);
        // All of them are read at once.
        let pages = self.pages.as_ref().map_or_else(Vec::new, |pages| {
            let each = (0..stages).map(|ahead| {
                let step = k.add_u32(step, ahead * warps);
                pages.of(k, step, steps.past)
            });
            each.collect()
        });
        for ahead in 0..stages - 1 {
            let step = k.add_u32(step, ahead * warps);
            let slot = k.mov_b32(ahead);
            self.fetch(k, step, steps.past, slot, pages.get(ahead as usize).copied());
        }
        if let (Some(pages), Some(&last)) = (&self.pages, pages.last()) {
            k.set(pages.next, |k| k.mov_b32(last));
        }
        step
    }

    fn run(
        &self,
        k: &mut KernelBuilder,
        first: Reg<B32>,
        steps: &Steps,
        queries: &Queries,
        softmax: &OnlineSoftmax,
        o: &[Acc],
        blocks: Option<[BlockDescales; 2]>,
    ) {
        let Schedule { warps, stages, .. } = self.schedule;
        let (slot, free) = (k.mov_b32(0u32), k.mov_b32(stages - 1));
        // Those of a step are read while the step before it is computed with.
        let next = blocks.map(|of| of.map(|of| self.descale(k, of, first, steps.past)));
        k.section("walk: one step of keys");
        k.for_s32(first, steps.past, warps as i32, |k, step, _| {
            let descales = blocks.zip(next).map(|(of, next)| {
                let now = next.map(|next| k.mov_f32(next));
                let after = k.add_u32(step, warps);
                for (of, next) in of.into_iter().zip(next) {
                    k.set(next, |k| self.descale(k, of, after, steps.past));
                }
                now
            });
            let ahead = k.add_u32(step, (stages - 1) * warps);
            self.fetch(k, ahead, steps.past, free, self.pages.as_ref().map(|pages| pages.next));
            if let Some(pages) = &self.pages {
                let after = k.add_u32(ahead, warps);
                k.set(pages.next, |k| pages.of(k, after, steps.past));
            }
            k.comment("this thread's own copies of this step are done, and nobody else reads them");
            k.cp_async_wait((stages - 1) as u8);
            self.step(k, step, slot, queries, softmax, o, descales);
            for at in [slot, free] {
                let next = k.add_u32(at, 1u32);
                let wraps = k.setp_eq_u32(next, stages);
                k.set(at, |k| k.selp_b32(0u32, next, wraps));
            }
        });
        k.cp_async_wait_all();
    }

    /// The descale of a step's block of keys, if there is such a step.
    fn descale(&self, k: &mut KernelBuilder, of: BlockDescales, step: Reg<B32>, past: Reg<B32>) -> Reg<F32> {
        let steps = self.spec.descale_keys.map_or(1, |keys| keys / self.schedule.keys);
        let block = k.div_u32(step, steps);
        let exists = k.setp_lt_s32(step, past);
        of.read(k, block, exists)
    }

    /// Where this lane's pieces of some size are in a slot, after so many bytes of each lane.
    fn at(&self, k: &mut KernelBuilder, slot: Reg<B32>, after: u32, bytes: u32) -> Reg<B32> {
        let start = k.mad_lo_u32(slot, 32 * self.schedule.lane_bytes(self.spec), self.ring);
        let at = k.mad_lo_u32(self.place.lane, bytes, start);
        if after == 0 { at } else { k.add_u32(at, 32 * after) }
    }

    /// Bytes of a lane's keys in a step.
    fn k_bytes(&self) -> u32 {
        self.schedule.keys / 8 * self.k.count * self.k.bytes
    }

    /// Starts to copy a step, if there is one. The group is committed either way, so that counting groups counts steps.
    fn fetch(
        &self,
        k: &mut KernelBuilder,
        step: Reg<B32>,
        past: Reg<B32>,
        slot: Reg<B32>,
        page: Option<Reg<B32>>,
    ) {
        let exists = k.setp_lt_s32(step, past);
        k.if_(exists, |k| {
            let first_key = k.mul_lo_u32(step, self.schedule.keys);
            // Keys that nobody sees become zeros: their probabilities are 0, but 0 · NaN is NaN.
            let mut left = k.sub_s32(self.range.end, first_key);
            let (mut row, mut bases) = (first_key, [self.k_base, self.v_base]);
            if let Some((pages, page)) = self.pages.as_ref().zip(page) {
                row = k.rem_u32(first_key, pages.steps * self.schedule.keys);
                let pool = k.param(PoolParams::pool);
                let exists = k.setp_lt_u32(page, pool);
                left = k.selp_b32(left, 0u32, exists);
                let page = k.cvt_u64_u32(page);
                let strides = [FwdParams::k_batch, FwdParams::v_batch];
                bases = std::array::from_fn(|i| {
                    let stride = k.param(strides[i]);
                    k.mad_lo_u64(page, stride, bases[i])
                });
            }
            let start = k.mad_wide_u32(row, self.k_row, bases[0]);
            let to = self.at(k, slot, 0, self.k.bytes);
            k.comment("keys");
            for eight in 0..self.schedule.keys / 8 {
                let from = k.mad_wide_u32(self.k_row, 8 * eight, start);
                let before = k.sub_s32(left, self.place.g);
                let there = k.setp_gt_s32(before, (8 * eight) as i32);
                self.k.copy(k, to, eight, from, there, None);
            }
            let start = k.mad_wide_u32(row, self.v_row, bases[1]);
            let to = self.at(k, slot, self.k_bytes(), self.v.bytes);
            k.comment("values");
            for (i, key) in self.value_keys() {
                let from = k.mad_wide_u32(self.v_row, key, start);
                let before = k.sub_s32(left, self.place.column);
                let there = k.setp_gt_s32(before, key as i32);
                self.v.copy(k, to, i, from, there, self.v_last);
            }
        });
        k.cp_async_commit();
    }

    /// The rows of V that a thread has, relative to its first: their numbers and their keys.
    fn value_keys(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let sixteens = (0..self.schedule.keys).step_by(16);
        (0..).zip(sixteens.flat_map(|first| [0, 1, 8, 9].map(|key| first + key)))
    }

    fn step(
        &self,
        k: &mut KernelBuilder,
        step: Reg<B32>,
        slot: Reg<B32>,
        queries: &Queries,
        softmax: &OnlineSoftmax,
        o: &[Acc],
        descales: Option<[Reg<F32>; 2]>,
    ) {
        k.comment("S = Q K^T");
        let ty = matrix_ty(multiplied_as(self.spec));
        let from = self.at(k, slot, 0, self.k.bytes);
        let zero = k.mov_f32(0.0);
        let mut scores: Vec<Acc> = vec![[zero; 4]; (self.schedule.keys / 8) as usize];
        for piece in 0..self.k.count {
            let codes: Vec<Vec<Reg<B32>>> = (0..self.schedule.keys / 8)
                .map(|eight| {
                    let at = from.at((32 * self.k.bytes * (eight * self.k.count + piece)) as i32);
                    self.k.load(k, at)
                })
                .collect();
            for quad in 0..self.k.quads() {
                let a = queries.operand(k, piece * self.k.quads() + quad);
                for (acc, codes) in scores.iter_mut().zip(&codes) {
                    let b = match *self.k.quad(codes, quad) {
                        [low, high] => [low, high],
                        [four] => k.unpack_b32(four).map(|pair| k.cvt_rn_f16x2_e4m3x2(pair)),
                        _ => unreachable!("elements have one byte or two"),
                    };
                    *acc = k.mma_m16n8k16(ty, a, b, *acc);
                }
            }
        }
        let mut factors = queries.factors;
        if let Some([of_k, _]) = descales {
            factors =
                Some(factors.map_or([of_k; 2], |factors| factors.map(|factor| k.mul_f32(factor, of_k))));
        }
        if let Some(factors) = factors {
            for acc in &scores {
                for (half, factor) in HALVES.iter().zip(factors) {
                    for &i in half {
                        k.set(acc[i], |k| k.mul_f32(acc[i], factor));
                    }
                }
            }
        }
        let dots: Vec<Reg<F32>> = scores.iter().flatten().copied().collect();
        softmax.params.score(k, &dots);
        self.mask(k, step, &scores);
        softmax.step(k, std::slice::from_ref(&scores), &[o.to_vec()], true);

        k.comment("O += P V");
        let p = a_operands(k, multiplied_as(self.spec), &scores);
        let from = self.at(k, slot, self.k_bytes(), self.v.bytes);
        let p: Vec<_> = (0..).zip(p).collect();
        let Some([_, of_v]) = descales else {
            for &(sixteen, a) in &p {
                for piece in 0..self.v.count {
                    let rows = self.values(k, from, sixteen, piece);
                    for quad in 0..self.v.quads() {
                        let b = self.value_operands(k, &rows, quad);
                        for (acc, b) in o[(4 * (piece * self.v.quads() + quad)) as usize..].iter().zip(b) {
                            k.set(*acc, |k| k.mma_m16n8k16(ty, a, b, *acc));
                        }
                    }
                }
            }
            return;
        };
        for piece in 0..self.v.count {
            let rows: Vec<_> = p.iter().map(|&(sixteen, _)| self.values(k, from, sixteen, piece)).collect();
            for quad in 0..self.v.quads() {
                let operands: Vec<_> = rows.iter().map(|rows| self.value_operands(k, rows, quad)).collect();
                let own = &o[(4 * (piece * self.v.quads() + quad)) as usize..][..4];
                // One sum at a time: wide outputs leave few registers.
                for (i, &acc) in own.iter().enumerate() {
                    let sum = operands
                        .iter()
                        .zip(&p)
                        .fold([zero; 4], |sum, (b, &(_, a))| k.mma_m16n8k16(ty, a, b[i], sum));
                    for (acc, sum) in acc.into_iter().zip(sum) {
                        k.set(acc, |k| k.fma_f32(sum, of_v, acc));
                    }
                }
            }
        }
    }

    /// A piece of the four rows that a thread has of sixteen values.
    fn values(&self, k: &mut KernelBuilder, from: Reg<B32>, sixteen: u32, piece: u32) -> [Vec<Reg<B32>>; 4] {
        std::array::from_fn(|i| {
            let row = 4 * sixteen + i as u32;
            let at = from.at((32 * self.v.bytes * (row * self.v.count + piece)) as i32);
            self.v.load(k, at)
        })
    }

    /// The B operands of four times eight columns, of a four of elements of each of a thread's four rows.
    fn value_operands(
        &self,
        k: &mut KernelBuilder,
        rows: &[Vec<Reg<B32>>; 4],
        quad: u32,
    ) -> [[Reg<B32>; 2]; 4] {
        let rows: [&[Reg<B32>]; 4] = std::array::from_fn(|i| self.v.quad(&rows[i], quad));
        let pair = |k: &mut KernelBuilder, a: &[Reg<B32>], b: &[Reg<B32>]| -> [Reg<B32>; 4] {
            let both: [[Reg<B32>; 2]; 2] = match (a, b) {
                (&[a], &[b]) => PAIRS.map(|picks| {
                    let pairs = k.prmt_b32(a, b, picks);
                    k.unpack_b32(pairs).map(|pair| k.cvt_rn_f16x2_e4m3x2(pair))
                }),
                _ => [0, 1].map(|i| PAIRS_OF_HALVES.map(|picks| k.prmt_b32(a[i], b[i], picks))),
            };
            [both[0][0], both[0][1], both[1][0], both[1][1]]
        };
        let upper = pair(k, rows[0], rows[1]);
        let lower = pair(k, rows[2], rows[3]);
        std::array::from_fn(|i| [upper[i], lower[i]])
    }

    /// Hides the keys that rows do not see, in steps that have any.
    fn mask(&self, k: &mut KernelBuilder, step: Reg<B32>, scores: &[Acc]) {
        let first_key = k.mul_lo_u32(step, self.schedule.keys);
        let past = k.add_s32(first_key, self.schedule.keys as i32);
        let mut partly = k.setp_gt_s32(past, self.range.full_end);
        if self.spec.left {
            let before = k.setp_lt_s32(first_key, self.range.full_begin);
            partly = k.or_pred(partly, before);
        }
        k.if_(partly, |k| {
            let origin = k.add_s32(first_key, self.place.column);
            for (half, elements) in HALVES.iter().enumerate() {
                let row = self.place.row(k, &self.work.rows, 0, half);
                let end = self.work.band.row_end(k, row);
                let end = k.sub_s32(end, origin);
                let begin = self.work.band.row_begin(k, row).map(|begin| k.sub_s32(begin, origin));
                for (n, score) in scores.iter().enumerate() {
                    for &i in elements {
                        let column = (8 * n + i % 2) as i32;
                        let mut seen = k.setp_gt_s32(end, column);
                        if let Some(begin) = begin {
                            let after = k.setp_le_s32(begin, column);
                            seen = k.and_pred(seen, after);
                        }
                        k.set(score[i], |k| k.selp_f32(score[i], NEG_INF, seen));
                    }
                }
            }
        });
    }
}

/// The type of the keys and values.
fn of_keys(spec: &Spec) -> ElementType {
    spec.kv.unwrap_or(spec.dtype)
}

/// What tensor cores multiply: codes become f16.
fn multiplied_as(spec: &Spec) -> ElementType {
    if spec.kv.is_some() { ElementType::F16 } else { spec.dtype }
}

impl Queries {
    /// Of each four elements that a thread has of a key, the same of its two rows.
    fn load(
        k: &mut KernelBuilder,
        spec: &Spec,
        memory: &Memory,
        work: &Work,
        place: Place,
        pieces: Pieces,
    ) -> Self {
        k.section("walk: the queries");
        let q_rows = QueryRows::read(k, spec, [FwdParams::q_row, FwdParams::q_head]);
        let t = k.shr_u32(place.column, 1u32);
        // The fours of elements of the upper row, then those of the lower.
        let rows: [Vec<[Reg<B32>; 2]>; 2] = std::array::from_fn(|half| {
            let row = place.row(k, &work.rows, 0, half);
            let exists = k.setp_lt_s32(row, work.rows.len_q);
            let at = q_rows.address(k, work.q, row);
            let at = k.mad_wide_u32(t, 2 * pieces.elements(), at);
            let words = (0..pieces.count * pieces.quads()).map(|quad| {
                let (piece, quad) = (quad / pieces.quads(), quad % pieces.quads());
                let at = at.at((2 * (piece * pieces.elements_apart() + 4 * quad)) as i32);
                let words = [k.mov_b32(0u32), k.mov_b32(0u32)];
                k.when(exists, |k| k.set(words, |k| k.ld_global_vec(at)));
                words
            });
            words.collect()
        });
        let mut factors = None;
        let rows = if spec.dtype == multiplied_as(spec) {
            rows
        } else {
            let both = rows.map(|row| to_f16(k, &row));
            factors = Some([both[0].1, both[1].1]);
            both.map(|(row, _)| row)
        };
        let [upper, lower] = rows;
        let operands: Vec<_> = upper.into_iter().zip(lower).map(|([a, c], [b, d])| [a, b, c, d]).collect();
        let Some(queries) = memory.queries else {
            return Self { operands: Operands::InRegisters(operands), factors };
        };
        k.comment("every warp has the same");
        let base = k.shared_addr(queries);
        let mine = k.mad_lo_u32(place.lane, 16u32, base);
        let tid = k.tid_x();
        let first = k.setp_lt_u32(tid, 32u32);
        for (i, operand) in (0..).zip(operands) {
            k.when(first, |k| k.st_shared_vec(mine.at(512 * i), operand));
        }
        k.bar_sync_all();
        Self { operands: Operands::Shared(mine), factors }
    }

    /// The operand of these 16 elements.
    fn operand(&self, k: &mut KernelBuilder, index: u32) -> [Reg<B32>; 4] {
        match &self.operands {
            Operands::InRegisters(operands) => operands[index as usize],
            Operands::Shared(mine) => k.ld_shared_vec(mine.at(512 * index as i32)),
        }
    }
}

/// A row of bf16, shared by four threads, as f16 times the power of two that brings its largest magnitude to 2^14 or
/// above; and the inverse of that power.
fn to_f16(k: &mut KernelBuilder, row: &[[Reg<B32>; 2]]) -> (Vec<[Reg<B32>; 2]>, Reg<F32>) {
    let mut most = k.mov_b32(0u32);
    for &word in row.iter().flatten() {
        let size = k.and_b32(word, 0x7fff_7fff_u32);
        most = k.max_bf16x2(most, size);
    }
    for distance in [1u32, 2] {
        let other = k.shfl_bfly(most, distance);
        most = k.max_bf16x2(most, other);
    }
    let low = k.shl_b32(most, 16u32);
    let most = k.max_u32(low, most);
    // Its exponent is e − 127; that of the power is 14 less that, and both must be those of normal numbers.
    let e = k.bfe_u32(most, 23u32, 8u32);
    let e = k.max_u32(e, 15u32);
    let power = k.sub_u32(2 * 127 + 14, e);
    let inverse = k.sub_u32(e, 14u32);
    let [power, inverse] = [power, inverse].map(|exponent| {
        let bits = k.shl_b32(exponent, 23u32);
        k.f32_from_bits(bits)
    });
    let turned = row
        .iter()
        .map(|words| {
            words.map(|word| {
                let (low, high) = (k.shl_b32(word, 16u32), k.and_b32(word, 0xffff_0000_u32));
                let [low, high] = [low, high].map(|bits| {
                    let x = k.f32_from_bits(bits);
                    k.mul_f32(x, power)
                });
                k.cvt_rn_f16x2_f32(high, low)
            })
        })
        .collect();
    (turned, inverse)
}
