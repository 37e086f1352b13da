//! Merges what the parts of the keys came to: one block per query.
//!
//! A part's output is the sum of its values, each times 2^((score − reference) · scale), with the reference and the sum of
//! those weights beside it. The parts of a query are brought to their largest reference, added up, and divided by the sum.
//! The warps of a block take parts in turn and add up through shared memory; a lane has four columns of every 128.

use flashcore_ptx::{
    B32, B64, F32, GlobalPtr, GridDep, KernelBuilder, Pred, Reg, SharedLayout, Target, TensorMap, kernel_params,
};

use crate::{
    Args, Blocks, Family, Geometry, Map, Operand, Packed, ScheduleError, Spec,
    family::schedule,
    parts::{
        fragment::pack,
        softmax::{NEG_INF, ScoreHandles, SoftmaxParams},
    },
};

/// Columns that the lanes of a warp have at once.
const COLUMNS: u32 = 128;

/// Parts that a warp reads before it waits for any of them.
const AT_ONCE: u32 = 4;

kernel_params! {
    /// What a launch is given. Strides are in bytes.
    pub struct CombineParams {
        /// The outputs of the parts.
        partial_o: GlobalPtr,
        /// What they are relative to, and their sums.
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
        /// Queries per head.
        len_q: u32,
        /// Query heads.
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
        /// Warps of a block, which take parts in turn: 1 to 16.
        pub warps: u32,
        /// The power of two by which the sums are smaller than said; see `shift` of the forward kernel's softmax.
        pub shift: u32 = 0,
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
        self.body(&mut k, spec);
        k
    }

    fn bind<E>(
        self,
        _: &Spec,
        args: &Args,
        _: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        let of = |operand| args.tensor(operand);
        let (partial_o, partial_state) = (of(Operand::PartialO), of(Operand::PartialState));
        let (o, lse) = (of(Operand::O), of(Operand::Lse));
        let [_, heads, len_q] = args.queries();
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
        Ok(())
    }
}

/// The query of a block.
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
        let (len_q, heads, item) = (k.param(CombineParams::len_q), k.param(CombineParams::heads), k.ctaid_x());
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

    /// Bytes from a row of one part to that of the next.
    fn to_next_part(&self, k: &mut KernelBuilder, row: Stride) -> Reg<B64> {
        let (len_q, row) = (k.cvt_u64_u32(self.len_q), k.param(row));
        k.mul_lo_u64(len_q, row)
    }
}

impl Schedule {
    /// Room for what each warp has added up.
    fn shared(self, spec: &Spec) -> (SharedLayout, flashcore_ptx::Shared) {
        let mut layout = SharedLayout::new();
        let sums = layout.alloc("sums", self.warps * 4 * spec.head_dim_v, 16);
        (layout, sums)
    }

    fn body(self, k: &mut KernelBuilder, spec: &Spec) {
        k.comment("whoever comes next may set itself up beside this grid, as this one does beside the one before");
        k.griddepcontrol(GridDep::LaunchDependents);
        let tid = k.tid_x();
        let (lane, warp) = (k.and_b32(tid, 31u32), k.shr_u32(tid, 5u32));
        let handles = ScoreHandles {
            exp_scale: CombineParams::exp_scale,
            tanh_scale: CombineParams::tanh_scale,
            scale: CombineParams::scale,
            softcap: CombineParams::softcap,
        };
        let softmax = SoftmaxParams::read_from(k, spec, &handles);
        let parts = k.param(CombineParams::parts);
        let query = Query::find(k);
        let state = query.address(
            k,
            CombineParams::partial_state,
            [
                CombineParams::partial_state_batch,
                CombineParams::partial_state_head,
                CombineParams::partial_state_row,
            ],
        );
        let next_state = query.to_next_part(k, CombineParams::partial_state_row);
        let partial = query.address(
            k,
            CombineParams::partial_o,
            [CombineParams::partial_o_batch, CombineParams::partial_o_head, CombineParams::partial_o_row],
        );
        let next_partial = query.to_next_part(k, CombineParams::partial_o_row);
        let part_address = |k: &mut KernelBuilder, base: Reg<B64>, part: Reg<B32>, stride: Reg<B64>| {
            let part = k.cvt_u64_u32(part);
            k.mad_lo_u64(part, stride, base)
        };
        k.griddepcontrol(GridDep::Wait);

        k.section("the largest reference, and the sum relative to it: every warp for itself");
        let most = k.mov_f32(NEG_INF);
        k.for_s32(lane, parts, 32, |k, part, _| {
            let at = part_address(k, state, part, next_state);
            let reference = k.ld_global::<F32>(at);
            k.set(most, |k| k.max_f32(most, reference));
        });
        let most = reduce(k, most, |k, a, b| k.max_f32(a, b));
        let reference = SoftmaxParams::reference(k, most, false);
        let sum = k.mov_f32(0.0);
        k.for_s32(lane, parts, 32, |k, part, _| {
            let at = part_address(k, state, part, next_state);
            let [theirs, weights]: [Reg<F32>; 2] = k.ld_global_vec(at);
            let factor = softmax.exp(k, theirs, reference);
            k.set(sum, |k| k.fma_f32(weights, factor, sum));
        });
        let sum = reduce(k, sum, |k, a, b| k.add_f32(a, b));

        k.section("the parts of this warp");
        let groups = spec.head_dim_v.div_ceil(COLUMNS);
        let column = k.shl_b32(lane, 2u32);
        // Only the last group of columns can be incomplete.
        let held: Vec<Option<Reg<Pred>>> = (0..groups)
            .map(|group| {
                let left = spec.head_dim_v - group * COLUMNS;
                (left < COLUMNS).then(|| k.setp_lt_u32(column, left))
            })
            .collect();
        let totals: Vec<[Reg<F32>; 4]> =
            (0..groups).map(|_| std::array::from_fn(|_| k.mov_f32(0.0))).collect();
        let columns = k.mad_wide_u32(column, 4u32, partial);
        k.for_s32(warp, parts, (AT_ONCE * self.warps) as i32, |k, first, _| {
            let mut read = Vec::new();
            for step in 0..AT_ONCE {
                let part = if step == 0 { first } else { k.add_u32(first, step * self.warps) };
                let exists = k.setp_lt_u32(part, parts);
                let at = part_address(k, state, part, next_state);
                let theirs = k.mov_f32(NEG_INF);
                k.when(exists, |k| k.set(theirs, |k| k.ld_global::<F32>(at)));
                let at = part_address(k, columns, part, next_partial);
                let values: Vec<[Reg<F32>; 4]> = (0..groups)
                    .zip(&held)
                    .map(|(group, &held)| {
                        let wanted = held.map_or(exists, |held| k.and_pred(exists, held));
                        let values: [Reg<F32>; 4] = std::array::from_fn(|_| k.mov_f32(0.0));
                        let at = at.at((4 * group * COLUMNS) as i32);
                        k.if_(wanted, |k| {
                            let read: [Reg<F32>; 4] = k.ld_global_vec(at);
                            for (value, read) in values.into_iter().zip(read) {
                                k.set(value, |k| k.mov_f32(read));
                            }
                        });
                        values
                    })
                    .collect();
                read.push((theirs, values));
            }
            for (theirs, values) in read {
                let factor = softmax.exp(k, theirs, reference);
                for (totals, values) in totals.iter().zip(values) {
                    for (&total, value) in totals.iter().zip(values) {
                        k.set(total, |k| k.fma_f32(value, factor, total));
                    }
                }
            }
        });

        k.section("all warps together");
        let (_, sums) = self.shared(spec);
        let sums = k.shared_addr(sums);
        let mine = k.mad_lo_u32(warp, 4 * spec.head_dim_v, sums);
        let mine = k.mad_lo_u32(column, 4u32, mine);
        for ((group, &held), totals) in (0..groups).zip(&held).zip(&totals) {
            let at = mine.at((4 * group * COLUMNS) as i32);
            let store = |k: &mut KernelBuilder| k.st_shared_vec(at, *totals);
            match held {
                Some(held) => k.when(held, store),
                None => store(k),
            }
        }
        k.bar_sync_all();
        let inverse = SoftmaxParams::inverse(k, sum);
        let o = query.address(
            k,
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
            let lse = query.address(
                k,
                CombineParams::lse,
                [CombineParams::lse_batch, CombineParams::lse_head, CombineParams::lse_row],
            );
            let value = softmax.lse(k, most, sum, self.shift as f32);
            let first = k.setp_eq_u32(tid, 0u32);
            k.when(first, |k| k.st_global(lse, value));
        }
    }
}

/// What the lanes of a warp have together, in every lane.
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
