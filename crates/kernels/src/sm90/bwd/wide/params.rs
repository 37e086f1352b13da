//! The parameters of the kernel.

use flashcore_ptx::{GlobalPtr, TensorMap, kernel_params};

use super::{KEYS, QUERIES, ROWS};
use crate::{
    Spec,
    bind::{Args, Map, Operand},
    sm90::{bwd::params::SECTION_BYTES, params::describe},
};

kernel_params! {
    /// What a launch is given. Tensor maps have boxes of 64 rows; strides are in bytes.
    pub struct WideParams {
        /// The queries.
        q_map: TensorMap,
        /// The keys.
        k_map: TensorMap,
        /// The values.
        v_map: TensorMap,
        /// The gradient of the output.
        do_map: TensorMap,
        /// The gradient of the queries.
        dq_map: TensorMap,
        /// The gradient of the keys.
        dk_map: TensorMap,
        /// The gradient of the values.
        dv_map: TensorMap,
        /// As in [`BwdParams`](crate::sm90::bwd::BwdParams).
        row_lse: GlobalPtr,
        /// As in [`BwdParams`](crate::sm90::bwd::BwdParams).
        row_delta: GlobalPtr,
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
        /// Query heads per key head; read only by grouped kernels.
        group: u32,
        /// Blocks that own queries; those that own keys follow.
        q_blocks: u32,
        /// Blocks of queries per head.
        q_tiles: u32,
        /// Blocks of keys per head.
        k_tiles: u32,
        /// Query heads over all batch entries.
        q_units: u32,
        /// Key heads over all batch entries.
        k_units: u32,
        /// Query heads that are processed together.
        q_section: u32,
        /// Key heads that are processed together.
        k_section: u32,
        /// How many keys before its own position a query sees; read only by kernels with a left bound.
        left: i32,
        /// How many keys after its own position a query sees; read only by kernels with a right bound.
        right: i32,
        /// As in [`crate::FwdParams`].
        exp_scale: f32,
        /// As in [`crate::FwdParams`].
        tanh_scale: f32,
        /// The scale, which the gradients of queries and keys are multiplied by at the end.
        scale: f32,
        /// As in [`crate::FwdParams`].
        softcap: f32,
    }
}

impl WideParams {
    /// The parameters of a launch; `encode` makes tensor maps.
    pub(super) fn bind<E>(
        spec: &Spec,
        args: &Args,
        encode: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
    ) -> Result<Self, E> {
        let of = |operand| args.tensor(operand);
        let mut map = |operand| encode(&describe(spec.dtype, args, of(operand), ROWS));
        let [entries, heads, len_q] = args.queries();
        let [entries_k, heads_kv, len_k, _] = of(Operand::K).shape.map(|size| size as u32);
        let (q_units, k_units) = (entries * heads, entries_k * heads_kv);
        let q_tiles = args.head_tiles(Operand::Q, spec.packed_q, QUERIES);
        let k_tiles = args.head_tiles(Operand::K, spec.packed_k, KEYS);
        let most_keys = if spec.packed_k { args.longest[1] } else { len_k };
        // So many heads that what all their blocks read stays in L2.
        let row_bytes = u64::from(2 * (spec.head_dim + spec.head_dim_v));
        let section = |rows: u64, units: u32| {
            (SECTION_BYTES / (rows * row_bytes).max(1)).clamp(1, u64::from(units.max(1))) as u32
        };
        let group = args.group();
        let rows = of(Operand::RowLse);
        let scores = args.scores();
        Ok(Self {
            q_map: map(Operand::Q)?,
            k_map: map(Operand::K)?,
            v_map: map(Operand::V)?,
            do_map: map(Operand::Do)?,
            dq_map: map(Operand::Dq)?,
            dk_map: map(Operand::Dk)?,
            dv_map: map(Operand::Dv)?,
            row_lse: rows.pointer(),
            row_delta: of(Operand::RowDelta).pointer(),
            key_lengths: of(Operand::KeyLengths).pointer(),
            row_batch: rows.strides[0],
            row_head: rows.strides[1],
            len_q,
            len_k,
            heads,
            heads_kv,
            group,
            q_blocks: q_units * q_tiles,
            q_tiles,
            k_tiles,
            q_units,
            k_units,
            q_section: section(u64::from(most_keys), q_units),
            k_section: section(u64::from(args.most_queries(spec)) * u64::from(group), k_units),
            left: args.left,
            right: args.right,
            exp_scale: scores.exp_scale,
            tanh_scale: scores.tanh_scale,
            scale: scores.scale,
            softcap: scores.softcap,
        })
    }
}
