//! The first launch of a backward pass: what the gradients of each query have in common.
//!
//! For each row it writes lse · log2 e, with which probabilities are computed again, and delta = Σ dO∘O − dlse, which is
//! subtracted from the gradients of probabilities. Rows without keys, and rows of padding, get +∞ and 0: their probabilities
//! are then 0 whatever their scores are. A block has [`ROW_PADDING`] rows; a row's lanes have eight of its elements each.

use flashcore_ptx::{
    B32, B64, F32, GlobalPtr, GridDep, KernelBuilder, ParamHandle, Pred, Reg, Target, TensorMap,
    kernel_params,
};

use crate::{
    Args, Blocks, ElementType, Family, Geometry, Map, Operand, Packed, ROW_PADDING, ScheduleError, Spec,
    family::schedule,
    parts::{
        fragment::unpack,
        sequence::{self, Side},
        softmax::NEG_INF,
    },
    sm90::PackedParams,
};

/// Elements that a lane reads at once: 16 bytes.
const ELEMENTS: u32 = 8;

/// Rows that a lane has in flight before it waits for any of them.
const AT_ONCE: u32 = 4;

kernel_params! {
    /// What a launch is given. Strides are in bytes.
    pub struct BwdRowsParams {
        /// The output.
        o: GlobalPtr,
        /// Its gradient.
        d_o: GlobalPtr,
        /// The logarithm of the sum of exponentials.
        lse: GlobalPtr,
        /// Its gradient; read only by kernels that are given one.
        dlse: GlobalPtr,
        /// Where lse · log2 e goes.
        row_lse: GlobalPtr,
        /// Where delta goes.
        row_delta: GlobalPtr,
        /// Four u32 per block that are set to 0, or null.
        turns: GlobalPtr,
        /// From one batch entry of o to the next.
        o_batch: u64,
        /// From one head of o to the next.
        o_head: u64,
        /// From one row of o to the next.
        o_row: u64,
        /// From one batch entry of its gradient to the next.
        d_o_batch: u64,
        /// From one head of its gradient to the next.
        d_o_head: u64,
        /// From one row of its gradient to the next.
        d_o_row: u64,
        /// From one batch entry of lse to the next.
        lse_batch: u64,
        /// From one head of lse to the next.
        lse_head: u64,
        /// From one query's lse to the next.
        lse_row: u64,
        /// From one batch entry of its gradient to the next.
        dlse_batch: u64,
        /// From one head of its gradient to the next.
        dlse_head: u64,
        /// From one query's gradient to the next.
        dlse_row: u64,
        /// Queries per head; where they are packed, the rows of the workspace.
        len_q: u32,
        /// Query heads.
        heads: u32,
    }
}

schedule! {
    /// The knobs of the kernel.
    pub struct Schedule {
        /// Warps per block: 1, 2 or 4.
        pub warps: u32,
    }
}

impl Family for Schedule {
    fn check(self, _: &Spec, _: Target) -> Result<(), ScheduleError> {
        if [1, 2, 4].contains(&self.warps) {
            return Ok(());
        }
        Err(ScheduleError::malformed(format!("{} warps: possible are 1, 2 and 4", self.warps)))
    }

    fn geometry(self, _: &Spec) -> Geometry {
        Geometry {
            rows: ROW_PADDING,
            threads: 32 * self.warps,
            shared_bytes: 0,
            blocks: Blocks::Row { cluster: 1, resident: None, parts: 1 },
        }
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let mut k = KernelBuilder::new("flashcore_bwd_rows", target)
            .params::<BwdRowsParams>()
            .threads(32 * self.warps);
        if spec.packed_q {
            k = k.more_params::<PackedParams>();
        }
        self.body(&mut k, spec, target);
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
        let (o, d_o, lse, dlse) = (of(Operand::O), of(Operand::Do), of(Operand::Lse), of(Operand::Dlse));
        let [_, heads, len_q] = args.queries();
        let len_q =
            if spec.packed_q { ROW_PADDING * args.head_tiles(Operand::Q, true, ROW_PADDING) } else { len_q };
        packed.push(&BwdRowsParams {
            o: o.pointer(),
            d_o: d_o.pointer(),
            lse: lse.pointer(),
            dlse: dlse.pointer(),
            row_lse: of(Operand::RowLse).pointer(),
            row_delta: of(Operand::RowDelta).pointer(),
            turns: of(Operand::Turns).pointer(),
            o_batch: o.strides[0],
            o_head: o.strides[1],
            o_row: o.strides[2],
            d_o_batch: d_o.strides[0],
            d_o_head: d_o.strides[1],
            d_o_row: d_o.strides[2],
            lse_batch: lse.strides[0],
            lse_head: lse.strides[1],
            lse_row: lse.strides[2],
            dlse_batch: dlse.strides[0],
            dlse_head: dlse.strides[1],
            dlse_row: dlse.strides[2],
            len_q,
            heads,
        });
        if spec.packed_q {
            packed.extend(&PackedParams::bind(args));
        }
        Ok(())
    }
}

/// The head of a block.
struct Head {
    batch: Reg<B32>,
    head: Reg<B32>,
}

/// A tensor of the launch: where it starts, and its strides.
type Tensor = (ParamHandle<BwdRowsParams, GlobalPtr>, [ParamHandle<BwdRowsParams, u64>; 3]);

impl Head {
    /// Where this head's rows start in a tensor, and the bytes from one to the next.
    fn rows(&self, k: &mut KernelBuilder, (base, [batch, head, row]): Tensor) -> [Reg<B64>; 2] {
        let base = k.param(base);
        let start = [(self.batch, batch), (self.head, head)].into_iter().fold(base, |at, (index, stride)| {
            let (index, stride) = (k.cvt_u64_u32(index), k.param(stride));
            k.mad_lo_u64(index, stride, at)
        });
        [start, k.param(row)]
    }
}

/// A row's address in a tensor.
fn row_at(k: &mut KernelBuilder, [start, stride]: [Reg<B64>; 2], row: Reg<B32>) -> Reg<B64> {
    let row = k.cvt_u64_u32(row);
    k.mad_lo_u64(row, stride, start)
}

impl Schedule {
    fn body(self, k: &mut KernelBuilder, spec: &Spec, target: Target) {
        if target == Target::Sm90a {
            k.comment("whoever comes next may set itself up beside this grid");
            k.griddepcontrol(GridDep::LaunchDependents);
        }
        k.section("which rows of which head");
        let (len_q, heads, tile) =
            (k.param(BwdRowsParams::len_q), k.param(BwdRowsParams::heads), k.ctaid_x());
        let past = k.add_u32(len_q, ROW_PADDING - 1);
        let head_tiles = k.div_u32(past, ROW_PADDING);
        let all_heads = k.div_u32(tile, head_tiles);
        let block = k.rem_u32(tile, head_tiles);
        let [q_starts, _] = sequence::starts(spec);
        let sequence = q_starts.map(|starts| sequence::find_tile(k, starts, [ROW_PADDING, 1], block));
        let block = sequence.map_or(block, |[_, block]| block);
        let first_row = k.mul_lo_u32(block, ROW_PADDING);
        let batch = k.div_u32(all_heads, heads);
        let queries = Side::of(k, q_starts, sequence.map_or(batch, |[batch, _]| batch));
        let len_q = queries.len().unwrap_or(len_q);
        let exists = queries.has_tile(k, block, ROW_PADDING);
        let head = Head { batch: queries.entry, head: k.rem_u32(all_heads, heads) };
        let tensor = |k: &mut KernelBuilder, base, strides| {
            let [start, row] = head.rows(k, (base, strides));
            [queries.first_address(k, start, strides[2]), row]
        };
        type P = BwdRowsParams;
        let o = tensor(k, P::o, [P::o_batch, P::o_head, P::o_row]);
        let d_o = tensor(k, P::d_o, [P::d_o_batch, P::d_o_head, P::d_o_row]);
        let lse = tensor(k, P::lse, [P::lse_batch, P::lse_head, P::lse_row]);
        let dlse = spec.lse.then(|| tensor(k, P::dlse, [P::dlse_batch, P::dlse_head, P::dlse_row]));
        // The tiles of all heads lie one behind the other, as the blocks do.
        let results = [P::row_lse, P::row_delta].map(|result| {
            let result = k.param(result);
            k.mad_wide_u32(tile, 4 * ROW_PADDING, result)
        });

        k.section("those who add up gradients later take turns from the first one on");
        let (turns, tid) = (k.param(P::turns), k.tid_x());
        let (wanted, first) = (k.setp_ne_u64(turns, 0u64), k.setp_eq_u32(tid, 0u32));
        let clears = k.and_pred(wanted, first);
        let (own, zero) = (k.mad_wide_u32(tile, 16u32, turns), k.mov_b32(0u32));
        k.when(clears, |k| k.st_global_vec(own, [zero; 4]));

        let chunks = spec.head_dim_v / ELEMENTS;
        let lanes = chunks.next_power_of_two();
        let rows_at_once = 32 * self.warps / lanes;
        let (row, chunk) = (k.shr_u32(tid, lanes.trailing_zeros()), k.and_b32(tid, lanes - 1));
        let holds = (chunks < lanes).then(|| k.setp_lt_u32(chunk, chunks));
        let is_first = k.setp_eq_u32(chunk, 0u32);
        let turns = ROW_PADDING / rows_at_once;
        let step = AT_ONCE.min(turns) * rows_at_once;
        k.section("some rows at a time");
        let each = |k: &mut KernelBuilder, first: Reg<B32>| {
            let read: Vec<Row> = (0..step / rows_at_once)
                .map(|turn| {
                    let place = k.add_u32(first, turn * rows_at_once);
                    let row = k.add_u32(first_row, place);
                    let exists = k.setp_lt_u32(row, len_q);
                    let wanted = holds.map_or(exists, |holds| k.and_pred(exists, holds));
                    let values = [o, d_o].map(|tensor| {
                        let at = row_at(k, tensor, row);
                        let at = k.mad_wide_u32(chunk, ELEMENTS * spec.dtype.size(), at);
                        let values: [Reg<B32>; 4] = std::array::from_fn(|_| k.mov_b32(0u32));
                        k.when(wanted, |k| k.set(values, |k| k.ld_global_vec(at)));
                        values
                    });
                    let [lse, dlse] = [(Some(lse), NEG_INF), (dlse, 0.0)].map(|(tensor, absent)| {
                        let value = k.mov_f32(absent);
                        if let Some(tensor) = tensor {
                            let at = row_at(k, tensor, row);
                            k.when(exists, |k| k.set(value, |k| k.ld_global::<F32>(at)));
                        }
                        value
                    });
                    Row { place, values, lse, dlse }
                })
                .collect();
            for row in read {
                row.finish(k, spec.dtype, lanes, is_first, results);
            }
        };
        let all =
            |k: &mut KernelBuilder| k.for_s32(row, ROW_PADDING, step as i32, |k, first, _| each(k, first));
        match exists {
            Some(exists) => k.if_(exists, all),
            None => all(k),
        }
    }
}

/// What a lane has read of a row.
struct Row {
    /// Which row of the block it is.
    place: Reg<B32>,
    /// Its elements of o and of the gradient of o.
    values: [[Reg<B32>; 4]; 2],
    lse: Reg<F32>,
    dlse: Reg<F32>,
}

impl Row {
    fn finish(
        self,
        k: &mut KernelBuilder,
        dtype: ElementType,
        lanes: u32,
        is_first: Reg<Pred>,
        [row_lse, row_delta]: [Reg<B64>; 2],
    ) {
        let [o, d_o] = self.values;
        let zero = k.mov_f32(0.0);
        let mut sum = o.into_iter().zip(d_o).fold(zero, |sum, (o, d_o)| {
            let (o, d_o) = (unpack(k, dtype, o), unpack(k, dtype, d_o));
            let sum = k.fma_f32(o[0], d_o[0], sum);
            k.fma_f32(o[1], d_o[1], sum)
        });
        let mut distance = lanes / 2;
        while distance > 0 {
            let other = k.shfl_bfly(sum, distance);
            sum = k.add_f32(sum, other);
            distance /= 2;
        }
        let none = k.setp_eq_f32(self.lse, NEG_INF);
        let delta = k.sub_f32(sum, self.dlse);
        let delta = k.selp_f32(0.0, delta, none);
        let lse = k.mul_f32(self.lse, std::f64::consts::LOG2_E);
        let lse = k.selp_f32(f32::INFINITY, lse, none);
        for (at, value) in [(row_lse, lse), (row_delta, delta)] {
            let at = k.mad_wide_u32(self.place, 4u32, at);
            k.when(is_first, |k| k.st_global(at, value));
        }
    }
}
