//! The parameters of Hopper's backward kernels.

use flashcore_ptx::{B32, B64, GlobalPtr, KernelBuilder, ParamHandle, Reg, TensorMap, kernel_params};

use super::{KEYS, ROWS, Schedule};
use crate::{
    Spec,
    bind::{Args, Map, Operand, Packed},
    parts::sequence::Side,
    sm90::{PackedParams, params::describe},
};

kernel_params! {
    /// What a launch is given. Strides are in bytes.
    pub struct BwdParams {
        /// The queries, in boxes of a query tile.
        q_map: TensorMap,
        /// The keys, in boxes of a key tile.
        k_map: TensorMap,
        /// The values, in boxes of a key tile.
        v_map: TensorMap,
        /// The gradient of the output, in boxes of a query tile.
        do_map: TensorMap,
        /// The gradient of the keys, in boxes of a warpgroup's keys.
        dk_map: TensorMap,
        /// The gradient of the values, in boxes of a warpgroup's keys.
        dv_map: TensorMap,
        /// One f32 per query: lse · log2 e, or +∞.
        row_lse: GlobalPtr,
        /// One f32 per query: what its output and the gradient of that come to.
        row_delta: GlobalPtr,
        /// The gradients of the queries in f32, tile by tile.
        dq_tiles: GlobalPtr,
        /// How many key tiles have added to each tile of dQ.
        turns: GlobalPtr,
        /// One u32 per batch entry; read only by kernels with key lengths.
        key_lengths: GlobalPtr,
        /// From one batch entry of the rows' numbers to the next.
        row_batch: u64,
        /// From one head of the rows' numbers to the next.
        row_head: u64,
        /// Queries per head.
        len_q: u32,
        /// Keys per head.
        len_k: u32,
        /// Query heads.
        heads: u32,
        /// Key heads.
        heads_kv: u32,
        /// Query heads per key head.
        group: u32,
        /// Query tiles per head, as the workspace has them.
        q_tiles: u32,
        /// Key tiles per head.
        k_tiles: u32,
        /// Key heads over all batch entries.
        units: u32,
        /// Key heads that are processed together.
        section: u32,
        /// How many keys before its own position a query sees; read only by kernels with a left bound.
        left: i32,
        /// How many keys after its own position a query sees; read only by kernels with a right bound.
        right: i32,
        /// As in [`crate::FwdParams`].
        exp_scale: f32,
        /// As in [`crate::FwdParams`].
        tanh_scale: f32,
        /// The scale, which the gradients of the keys are multiplied by at the end.
        scale: f32,
        /// As in [`crate::FwdParams`].
        softcap: f32,
        /// Query tiles of all heads, as the workspace has them: from a tile of dQ to the same in the second copy.
        copy: u32,
    }
}

kernel_params! {
    /// What a launch with packed sequences is given behind [`PackedParams`](crate::sm90::PackedParams): where the gradients are,
    /// for rows that TMA would store together with those of the next sequence. Strides are in bytes.
    pub struct PackedGradients {
        /// The gradient of the queries.
        dq: GlobalPtr,
        /// The gradient of the keys.
        dk: GlobalPtr,
        /// The gradient of the values.
        dv: GlobalPtr,
        /// From one head of it to the next.
        dq_head: u64,
        /// From one row of it to the next.
        dq_row: u64,
        /// From one head of it to the next.
        dk_head: u64,
        /// From one row of it to the next.
        dk_row: u64,
        /// From one head of it to the next.
        dv_head: u64,
        /// From one row of it to the next.
        dv_row: u64,
    }
}

kernel_params! {
    /// What a launch is given whose last block to add to a tile of dQ stores it.
    pub struct RoundingParams {
        /// The gradient of the queries, in boxes of a warpgroup's rows.
        dq_map: TensorMap,
    }
}

impl RoundingParams {
    pub(super) fn bind<E>(
        spec: &Spec,
        args: &Args,
        encode: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
    ) -> Result<Self, E> {
        Ok(Self { dq_map: encode(&describe(spec.dtype, args, args.tensor(Operand::Dq), ROWS))? })
    }
}

/// Where a gradient is, and its strides from one head and row to the next.
pub(super) type Gradient = (ParamHandle<PackedGradients, GlobalPtr>, [ParamHandle<PackedGradients, u64>; 2]);

pub(super) const DQ: Gradient = (PackedGradients::dq, [PackedGradients::dq_head, PackedGradients::dq_row]);
pub(super) const DK: Gradient = (PackedGradients::dk, [PackedGradients::dk_head, PackedGradients::dk_row]);
pub(super) const DV: Gradient = (PackedGradients::dv, [PackedGradients::dv_head, PackedGradients::dv_row]);

impl PackedGradients {
    /// A kernel with what it is given where sequences are packed.
    pub(super) fn declare(k: KernelBuilder, spec: &Spec) -> KernelBuilder {
        if spec.packed_q || spec.packed_k { k.more_params::<PackedParams>().more_params::<Self>() } else { k }
    }

    /// The same of a launch.
    pub(super) fn bind(spec: &Spec, args: &Args, packed: &mut Packed) {
        if !(spec.packed_q || spec.packed_k) {
            return;
        }
        packed.extend(&PackedParams::bind(args));
        let [dq, dk, dv] = [Operand::Dq, Operand::Dk, Operand::Dv].map(|operand| args.tensor(operand));
        packed.extend(&Self {
            dq: dq.pointer(),
            dk: dk.pointer(),
            dv: dv.pointer(),
            dq_head: dq.strides[1],
            dq_row: dq.strides[2],
            dk_head: dk.strides[1],
            dk_row: dk.strides[2],
            dv_head: dv.strides[1],
            dv_row: dv.strides[2],
        });
    }

    /// Where a row of a head of a packed sequence is, and the bytes to the next.
    pub(super) fn row(
        k: &mut KernelBuilder,
        (gradient, [to_head, to_row]): Gradient,
        side: &Side,
        head: Reg<B32>,
        row: Reg<B32>,
    ) -> (Reg<B64>, Reg<B64>) {
        let (gradient, to_head, to_row) = (k.param(gradient), k.param(to_head), k.param(to_row));
        let (head, row) = (k.cvt_u64_u32(head), side.row(k, row));
        let head = k.mad_lo_u64(head, to_head, gradient);
        let row = k.cvt_u64_u32(row);
        (k.mad_lo_u64(row, to_row, head), to_row)
    }
}

/// Bytes of L2 that the query side of a section may take: most of the 50 MB that a Hopper has.
pub(super) const SECTION_BYTES: u64 = 40 << 20;

/// The fewest columns of the key heads of a section under a mask, where blocks have different lengths: the fewer blocks of
/// one head there are at a time, the less they wait for each other.
const MASKED_COLUMNS: u32 = 2048;

impl BwdParams {
    /// The parameters of a launch; `encode` makes tensor maps.
    pub(super) fn bind<E>(
        schedule: Schedule,
        spec: &Spec,
        args: &Args,
        encode: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
    ) -> Result<Self, E> {
        let of = |operand| args.tensor(operand);
        let mut map = |operand, rows: u32| encode(&describe(spec.dtype, args, of(operand), rows));
        let [entries, heads, len_q] = args.queries();
        let [entries_k, heads_kv, len_k, _] = of(Operand::K).shape.map(|size| size as u32);
        let units = entries_k * heads_kv;
        // Of a key head: its queries, the gradients of their outputs, and those of the queries in f32.
        let per_row = u64::from((2 + 4 * schedule.copies()) * spec.head_dim + 2 * spec.head_dim_v);
        let unit_bytes = u64::from(args.most_queries(spec)) * u64::from(args.group()) * per_row;
        let fits = SECTION_BYTES / unit_bytes.max(1);
        let section =
            if spec.is_masked() { fits.max(u64::from(MASKED_COLUMNS / spec.head_dim)) } else { fits };
        let section = section.clamp(1, u64::from(units.max(1))) as u32;
        let rows = of(Operand::RowLse);
        let q_tiles = schedule.head_tiles(spec, args);
        let scores = args.scores();
        Ok(Self {
            q_map: map(Operand::Q, schedule.block_m)?,
            k_map: map(Operand::K, KEYS)?,
            v_map: map(Operand::V, KEYS)?,
            do_map: map(Operand::Do, schedule.block_m)?,
            dk_map: map(Operand::Dk, ROWS)?,
            dv_map: map(Operand::Dv, ROWS)?,
            row_lse: rows.pointer(),
            row_delta: of(Operand::RowDelta).pointer(),
            dq_tiles: of(Operand::DqTiles).pointer(),
            turns: of(Operand::Turns).pointer(),
            key_lengths: of(Operand::KeyLengths).pointer(),
            row_batch: rows.strides[0],
            row_head: rows.strides[1],
            len_q,
            len_k,
            heads,
            heads_kv,
            group: args.group(),
            q_tiles,
            k_tiles: args.head_tiles(Operand::K, spec.packed_k, KEYS),
            units,
            section,
            left: args.left,
            right: args.right,
            exp_scale: scores.exp_scale,
            tanh_scale: scores.tanh_scale,
            scale: scores.scale,
            softcap: scores.softcap,
            copy: entries * heads * q_tiles,
        })
    }
}
