//! Merges the partial results of the parts of the keys, on every target: one block per query. Every query has as many parts, or,
//! where blocks shared keys by length, as many as the kernel before it says.
//!
//! A part's output is the sum of its values, each times 2^((score − reference) · scale), stored with the reference and
//! the sum of those weights. The parts of a query are rescaled to their largest reference, added up, and divided by the
//! total of the weights. The warps of a block take parts in turn and add up through shared memory; a lane holds four
//! columns of every 128.

use flashcore_ptx::{
    B32, B64, F32, GlobalPtr, GridDep, KernelBuilder, Pred, Reg, SharedLayout, Target, TensorMap,
    kernel_params,
};

use crate::{
    Args, Blocks, Family, Geometry, Map, Operand, Packed, ScheduleError, Spec,
    family::schedule,
    parts::{
        fragment::pack,
        shares::ShareParams,
        softmax::{NEG_INF, ScoreHandles, SoftmaxParams},
        work::{QueryRows, Work, first_query_head},
    },
    sm90::PackedParams,
};

/// Columns that the lanes of a warp hold together in one step.
const COLUMNS: u32 = 128;

/// Parts that a warp has in flight before it waits for any of them.
pub const AT_ONCE: u32 = 4;

kernel_params! {
    /// What a launch is given. Strides are in bytes.
    pub struct CombineParams {
        /// The outputs of the parts.
        partial_o: GlobalPtr,
        /// Their references and sums.
        partial_state: GlobalPtr,
        /// The output.
        o: GlobalPtr,
        /// One f32 per query; read only by kernels that write lse.
        lse: GlobalPtr,
        /// From one batch entry of the outputs of the parts to the next.
        partial_o_batch: u64,
        /// From one head of the outputs of the parts to the next.
        partial_o_head: u64,
        /// From one row of the outputs of the parts to the next.
        partial_o_row: u64,
        /// From one batch entry of the states to the next.
        partial_state_batch: u64,
        /// From one head of the states to the next.
        partial_state_head: u64,
        /// From one state to the next.
        partial_state_row: u64,
        /// From one batch entry of o to the next.
        o_batch: u64,
        /// From one head of o to the next.
        o_head: u64,
        /// From one row of o to the next.
        o_row: u64,
        /// From one batch entry of lse to the next.
        lse_batch: u64,
        /// From one head of lse to the next.
        lse_head: u64,
        /// From one query's lse to the next.
        lse_row: u64,
        /// Rows per head: its queries, or those of all heads that share its keys.
        len_q: u32,
        /// Heads.
        heads: u32,
        /// Parts.
        parts: u32,
        /// As in [`crate::FwdParams`].
        exp_scale: f32,
        /// As in [`crate::FwdParams`].
        tanh_scale: f32,
        /// As in [`crate::FwdParams`].
        scale: f32,
        /// As in [`crate::FwdParams`].
        softcap: f32,
    }
}

schedule! {
    /// The knobs of the kernel.
    pub struct Schedule {
        /// Warps per block, which take parts in turn: 1 to 16.
        pub warps: u32,
        /// The power of two by which the sums were scaled down; see `shift` of the forward kernel's softmax.
        pub shift: u32 = 0,
        /// Whether blocks shared keys by length.
        pub by_length: bool = false,
    }
}

impl Family for Schedule {
    const PROGRAMMATIC: bool = true;

    fn check(self, _: &Spec, _: Target) -> Result<(), ScheduleError> {
        if (1..=16).contains(&self.warps) && self.shift < 32 {
            return Ok(());
        }
        Err(ScheduleError::malformed(format!(
            "{} warps and a shift of {}: possible are 1 to 16, and up to 31",
            self.warps, self.shift
        )))
    }

    fn geometry(self, spec: &Spec) -> Geometry {
        Geometry {
            rows: 1,
            threads: 32 * self.warps,
            shared_bytes: self.shared(spec).0.bytes(),
            blocks: Blocks::Row { cluster: 1, resident: None, parts: 1 },
        }
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let mut k = KernelBuilder::new("flashcore_combine", target)
            .params::<CombineParams>()
            .shared(self.shared(spec).0)
            .threads(32 * self.warps);
        if spec.packed_q {
            k = k.more_params::<PackedParams>();
        }
        if self.by_length {
            k = k.more_params::<ShareParams>();
        }
        self.body(&mut k, spec);
        k
    }

    fn bind<E>(
        self,
        spec: &Spec,
        args: &Args,
        _: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        let of = |operand| args.tensor(operand);
        let (partial_o, partial_state) = (of(Operand::PartialO), of(Operand::PartialState));
        let (o, lse) = (of(Operand::O), of(Operand::Lse));
        let [_, heads, len_q] = args.rows(spec);
        let scores = args.scores();
        packed.push(&CombineParams {
            partial_o: partial_o.pointer(),
            partial_state: partial_state.pointer(),
            o: o.pointer(),
            lse: lse.pointer(),
            partial_o_batch: partial_o.strides[0],
            partial_o_head: partial_o.strides[1],
            partial_o_row: partial_o.strides[2],
            partial_state_batch: partial_state.strides[0],
            partial_state_head: partial_state.strides[1],
            partial_state_row: partial_state.strides[2],
            o_batch: o.strides[0],
            o_head: o.strides[1],
            o_row: o.strides[2],
            lse_batch: lse.strides[0],
            lse_head: lse.strides[1],
            lse_row: lse.strides[2],
            len_q,
            heads,
            parts: args.parts,
            exp_scale: scores.exp_scale,
            tanh_scale: scores.tanh_scale,
            scale: scores.scale,
            softcap: scores.softcap,
        });
        if spec.packed_q {
            packed.extend(&PackedParams::bind(args));
        }
        if self.by_length {
            packed.extend(&ShareParams::bind(args, spec));
        }
        Ok(())
    }
}

/// The row of a block.
struct Query {
    batch: Reg<B32>,
    head: Reg<B32>,
    row: Reg<B32>,
    len_q: Reg<B32>,
}

type Stride = flashcore_ptx::ParamHandle<CombineParams, u64>;

impl Query {
    fn find(k: &mut KernelBuilder) -> Self {
        k.section("which query");
        let (len_q, heads, item) =
            (k.param(CombineParams::len_q), k.param(CombineParams::heads), k.ctaid_x());
        let all_heads = k.div_u32(item, len_q);
        let batch = k.div_u32(all_heads, heads);
        let rest = |k: &mut KernelBuilder, n: Reg<B32>, quotient: Reg<B32>, by: Reg<B32>| {
            let whole = k.mul_lo_u32(quotient, by);
            k.sub_u32(n, whole)
        };
        let row = rest(k, item, all_heads, len_q);
        let head = rest(k, all_heads, batch, heads);
        Self { batch, head, row, len_q }
    }

    /// Ends the block where packed sequences have no such row.
    fn leave_if_nobodys(&self, k: &mut KernelBuilder, spec: &Spec) {
        k.comment("rows before the first sequence and behind the last are nobody's");
        let (starts, sequences) = (k.param(PackedParams::q_starts), k.param(PackedParams::sequences));
        let past = k.mad_wide_u32(sequences, 4u32, starts);
        let [first, past] = [starts, past].map(|at| {
            let query = k.ld_global::<B32>(at);
            k.mul_lo_u32(query, spec.rows_per_query)
        });
        let (before, behind) = (k.setp_lt_u32(self.row, first), k.setp_ge_u32(self.row, past));
        let nobodys = k.or_pred(before, behind);
        k.if_(nobodys, |k| k.exit());
    }

    /// The address of the query's row in a tensor.
    fn address(
        &self,
        k: &mut KernelBuilder,
        base: flashcore_ptx::ParamHandle<CombineParams, GlobalPtr>,
        strides: [Stride; 3],
    ) -> Reg<B64> {
        let base = k.param(base);
        [self.batch, self.head, self.row].into_iter().zip(strides).fold(base, |at, (index, stride)| {
            let (index, stride) = (k.cvt_u64_u32(index), k.param(stride));
            k.mad_lo_u64(index, stride, at)
        })
    }

    /// The address of the query's row in a tensor of the caller's.
    fn result(
        &self,
        k: &mut KernelBuilder,
        spec: &Spec,
        base: flashcore_ptx::ParamHandle<CombineParams, GlobalPtr>,
        [to_batch, to_head, to_row]: [Stride; 3],
    ) -> Reg<B64> {
        if spec.rows_per_query == 1 {
            return self.address(k, base, [to_batch, to_head, to_row]);
        }
        let (base, to_batch, head_bytes) = (k.param(base), k.param(to_batch), k.param(to_head));
        let head = first_query_head(k, spec, self.head);
        let base = Work::row_address(k, base, self.batch, to_batch);
        let base = Work::row_address(k, base, head, head_bytes);
        QueryRows::read(k, spec, [to_row, to_head]).address(k, base, self.row)
    }
}

/// The parts of a query: how many, where the first one's state and values are, and bytes from one to the next.
struct Parts {
    count: Reg<B32>,
    state: Reg<B64>,
    next_state: Reg<B64>,
    values: Reg<B64>,
    next_values: Reg<B64>,
}

impl Parts {
    /// Each head has so many parts with all of its rows.
    fn side_by_side(k: &mut KernelBuilder, query: &Query, count: Reg<B32>) -> Self {
        let state = query.address(
            k,
            CombineParams::partial_state,
            [
                CombineParams::partial_state_batch,
                CombineParams::partial_state_head,
                CombineParams::partial_state_row,
            ],
        );
        let next_state = rows_apart(k, query.len_q, CombineParams::partial_state_row);
        let values = query.address(
            k,
            CombineParams::partial_o,
            [CombineParams::partial_o_batch, CombineParams::partial_o_head, CombineParams::partial_o_row],
        );
        let next_values = rows_apart(k, query.len_q, CombineParams::partial_o_row);
        Self { count, state, next_state, values, next_values }
    }

    /// Each tile of queries has parts of its own.
    fn by_length(k: &mut KernelBuilder, query: &Query) -> Self {
        k.section("which parts");
        let (rows, tiles) = (k.param(ShareParams::part_rows), k.param(ShareParams::part_tiles));
        let heads = k.param(CombineParams::heads);
        let tile = k.div_u32(query.row, rows);
        let before = k.mul_lo_u32(tile, rows);
        let inside = k.sub_u32(query.row, before);
        let head = k.mad_lo_u32(query.batch, heads, query.head);
        let column = k.mad_lo_u32(head, tiles, tile);
        let [first, count] = ShareParams::parts_of(k, column);
        let row = k.mad_lo_u32(first, rows, inside);
        let of_row = |k: &mut KernelBuilder, base, to_row: Stride| {
            let (base, to_row) = (k.param(base), k.param(to_row));
            Work::row_address(k, base, row, to_row)
        };
        let state = of_row(k, CombineParams::partial_state, CombineParams::partial_state_row);
        let values = of_row(k, CombineParams::partial_o, CombineParams::partial_o_row);
        let next_state = rows_apart(k, rows, CombineParams::partial_state_row);
        let next_values = rows_apart(k, rows, CombineParams::partial_o_row);
        Self { count, state, next_state, values, next_values }
    }
}

/// Bytes of so many rows.
fn rows_apart(k: &mut KernelBuilder, rows: Reg<B32>, row: Stride) -> Reg<B64> {
    let (rows, row) = (k.cvt_u64_u32(rows), k.param(row));
    k.mul_lo_u64(rows, row)
}

impl Schedule {
    /// Room for the sums of each warp.
    fn shared(self, spec: &Spec) -> (SharedLayout, flashcore_ptx::Shared) {
        let mut layout = SharedLayout::new();
        let sums = layout.alloc("sums", self.warps * 4 * spec.head_dim_v, 16);
        (layout, sums)
    }

    fn body(self, k: &mut KernelBuilder, spec: &Spec) {
        let beside = k.target() >= Target::Sm90;
        if beside {
            k.comment(
                "whoever comes next may set itself up beside this grid, as this one does beside the one before",
            );
            k.griddepcontrol(GridDep::LaunchDependents);
        }
        let tid = k.tid_x();
        let (lane, warp) = (k.and_b32(tid, 31u32), k.shr_u32(tid, 5u32));
        let handles = ScoreHandles {
            exp_scale: CombineParams::exp_scale,
            tanh_scale: CombineParams::tanh_scale,
            scale: CombineParams::scale,
            softcap: CombineParams::softcap,
        };
        let softmax = SoftmaxParams::read_from(k, spec, &handles);
        let parts = (!self.by_length).then(|| k.param(CombineParams::parts));
        let query = Query::find(k);
        let known = parts.map(|parts| Parts::side_by_side(k, &query, parts));
        if beside {
            k.griddepcontrol(GridDep::Wait);
        }
        if spec.packed_q {
            query.leave_if_nobodys(k, spec);
        }
        let of_query = known.unwrap_or_else(|| Parts::by_length(k, &query));
        let Parts { count: parts, state, next_state, values: partial, next_values: next_partial } = of_query;

        // The values do not wait for their weights: all of a warp's first reads are in flight at once.
        let columns = Columns::new(k, spec, lane);
        let first = columns.address(k, partial);
        let reader =
            Reader { columns: &columns, values: first, next_values: next_partial, state, next_state, parts };
        k.section("the first parts of this warp");
        let read = reader.read(k, warp, self.warps);

        k.section("the largest reference, and the sum relative to it: every warp for itself");
        let most = k.mov_f32(NEG_INF);
        let sum = k.mov_f32(0.0);
        k.for_s32(lane, parts, 32, |k, part, _| {
            let at = part_address(k, state, part, next_state);
            let [theirs, weights]: [Reg<F32>; 2] = k.ld_global_vec(at);
            let larger = k.max_f32(most, theirs);
            let reference = SoftmaxParams::reference(k, larger, false);
            let (before, now) = (softmax.exp(k, most, reference), softmax.exp(k, theirs, reference));
            let scaled = k.mul_f32(sum, before);
            k.set(sum, |k| k.fma_f32(weights, now, scaled));
            k.set(most, |k| k.mov_f32(larger));
        });
        let of_lane = most;
        let most = reduce(k, most, |k, a, b| k.max_f32(a, b));
        let reference = SoftmaxParams::reference(k, most, false);
        let factor = softmax.exp(k, of_lane, reference);
        let sum = k.mul_f32(sum, factor);
        let sum = reduce(k, sum, |k, a, b| k.add_f32(a, b));

        k.section("the parts of this warp");
        let totals = columns.zeros(k);
        let add = |k: &mut KernelBuilder, read: Vec<Part>| {
            for Part { reference: theirs, values } in read {
                let factor = softmax.exp(k, theirs, reference);
                for (totals, values) in totals.iter().zip(values) {
                    for (&total, value) in totals.iter().zip(values) {
                        k.set(total, |k| k.fma_f32(value, factor, total));
                    }
                }
            }
        };
        add(k, read);
        let at_once = AT_ONCE * self.warps;
        let second = k.add_u32(warp, at_once);
        k.for_s32(second, parts, at_once as i32, |k, first, _| {
            let read = reader.read(k, first, self.warps);
            add(k, read);
        });

        k.section("all warps together");
        let (_, sums) = self.shared(spec);
        let sums = k.shared_addr(sums);
        let mine = k.mad_lo_u32(warp, 4 * spec.head_dim_v, sums);
        let mine = k.mad_lo_u32(columns.first, 4u32, mine);
        for ((offset, held), totals) in columns.groups().zip(&totals) {
            let store = |k: &mut KernelBuilder| k.st_shared_vec(mine.at(offset), *totals);
            match held {
                Some(held) => k.when(held, store),
                None => store(k),
            }
        }
        k.bar_sync_all();
        let inverse = SoftmaxParams::inverse(k, sum);
        let o = query.result(
            k,
            spec,
            CombineParams::o,
            [CombineParams::o_batch, CombineParams::o_head, CombineParams::o_row],
        );
        let (pairs, pair) = (spec.head_dim_v / 2, k.mov_b32(tid));
        k.while_(
            |k| k.setp_lt_u32(pair, pairs),
            |k, _| {
                let at = k.mad_lo_u32(pair, 8u32, sums);
                let mut total: [Reg<F32>; 2] = k.ld_shared_vec(at);
                for warp in 1..self.warps {
                    let theirs: [Reg<F32>; 2] = k.ld_shared_vec(at.at((4 * warp * spec.head_dim_v) as i32));
                    total = [0, 1].map(|i| k.add_f32(total[i], theirs[i]));
                }
                let [a, b] = total.map(|total| k.mul_f32(total, inverse));
                let both = pack(k, spec.dtype, a, b);
                let at = k.mad_wide_u32(pair, 4u32, o);
                k.st_global(at, both);
                k.set(pair, |k| k.add_u32(pair, 32 * self.warps));
            },
        );
        if spec.lse {
            k.section("lse");
            let lse = query.result(
                k,
                spec,
                CombineParams::lse,
                [CombineParams::lse_batch, CombineParams::lse_head, CombineParams::lse_row],
            );
            let value = softmax.lse(k, most, sum, self.shift as f32);
            let first = k.setp_eq_u32(tid, 0u32);
            k.when(first, |k| k.st_global(lse, value));
        }
    }
}

/// The columns of a lane: four of every [`COLUMNS`].
struct Columns {
    /// The first of them.
    first: Reg<B32>,
    /// For each group of columns, which lanes have some of it; `None` where all do.
    held: Vec<Option<Reg<Pred>>>,
}

impl Columns {
    fn new(k: &mut KernelBuilder, spec: &Spec, lane: Reg<B32>) -> Self {
        let first = k.shl_b32(lane, 2u32);
        let held = (0..spec.head_dim_v.div_ceil(COLUMNS))
            .map(|group| {
                let left = spec.head_dim_v - group * COLUMNS;
                (left < COLUMNS).then(|| k.setp_lt_u32(first, left))
            })
            .collect();
        Self { first, held }
    }

    /// Where this lane's first column is, in a row of f32 at an address.
    fn address(&self, k: &mut KernelBuilder, row: Reg<B64>) -> Reg<B64> {
        k.mad_wide_u32(self.first, 4u32, row)
    }

    /// How many bytes further each group of columns is, and which lanes have some of it.
    fn groups(&self) -> impl Iterator<Item = (i32, Option<Reg<Pred>>)> {
        (0..).step_by(4 * COLUMNS as usize).zip(self.held.iter().copied())
    }

    fn zeros(&self, k: &mut KernelBuilder) -> Vec<[Reg<F32>; 4]> {
        self.held.iter().map(|_| std::array::from_fn(|_| k.mov_f32(0.0))).collect()
    }
}

/// What was read from a part: its reference, and this lane's values.
struct Part {
    reference: Reg<F32>,
    values: Vec<[Reg<F32>; 4]>,
}

/// Reads parts of a query.
struct Reader<'a> {
    columns: &'a Columns,
    /// This lane's first value of the first part.
    values: Reg<B64>,
    /// Bytes to the next part's.
    next_values: Reg<B64>,
    state: Reg<B64>,
    next_state: Reg<B64>,
    parts: Reg<B32>,
}

impl Reader<'_> {
    /// Starts to read a part and the same warp's parts after it. Parts that do not exist have weight 0.
    fn read(&self, k: &mut KernelBuilder, first: Reg<B32>, step: u32) -> Vec<Part> {
        (0..AT_ONCE)
            .map(|i| {
                let part = if i == 0 { first } else { k.add_u32(first, i * step) };
                let exists = k.setp_lt_u32(part, self.parts);
                let at = part_address(k, self.state, part, self.next_state);
                let reference = k.mov_f32(NEG_INF);
                k.when(exists, |k| k.set(reference, |k| k.ld_global::<F32>(at)));
                let at = part_address(k, self.values, part, self.next_values);
                let values = self.columns.zeros(k);
                for ((offset, held), values) in self.columns.groups().zip(&values) {
                    let wanted = held.map_or(exists, |held| k.and_pred(exists, held));
                    k.when(wanted, |k| k.set(*values, |k| k.ld_global_vec(at.at(offset))));
                }
                Part { reference, values }
            })
            .collect()
    }
}

/// The address of a part's data, given the bytes from one part to the next.
fn part_address(k: &mut KernelBuilder, base: Reg<B64>, part: Reg<B32>, stride: Reg<B64>) -> Reg<B64> {
    let part = k.cvt_u64_u32(part);
    k.mad_lo_u64(part, stride, base)
}

/// Reduces over the lanes of a warp; every lane gets the result.
fn reduce(
    k: &mut KernelBuilder,
    value: Reg<F32>,
    both: impl Fn(&mut KernelBuilder, Reg<F32>, Reg<F32>) -> Reg<F32>,
) -> Reg<F32> {
    [16u32, 8, 4, 2, 1].into_iter().fold(value, |value, distance| {
        let other = k.shfl_bfly(value, distance);
        both(k, value, other)
    })
}
