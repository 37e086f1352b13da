//! The parameters of the Hopper kernel.

use flashcore_ptx::{GlobalPtr, TensorMap, kernel_params};

use super::fwd::{Schedule, Walk, columns};
use crate::{
    ElementType, Spec,
    bind::{Args, Map, Operand, Section, TensorArg},
};

kernel_params! {
    /// What a launch of the Hopper kernel is given. Strides are in bytes; a division by a number known only at launch
    /// is a multiplication and a shift, given by [`Divisor`].
    pub struct Sm90Params {
        /// The queries, in boxes of a block's rows.
        q_map: TensorMap,
        /// The keys, in boxes of a key tile.
        k_map: TensorMap,
        /// The values, in boxes of a key tile.
        v_map: TensorMap,
        /// The output, in boxes of a warpgroup's rows.
        o_map: TensorMap,
        /// The output, of kernels that split the keys; or what is put aside of it, of kernels that do that.
        o: GlobalPtr,
        /// One f32 per query; read only by kernels that write lse.
        lse: GlobalPtr,
        /// One u32 per batch entry; read only by kernels with key lengths.
        key_lengths: GlobalPtr,
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
        /// Keys per head.
        len_k: u32,
        /// Work tiles over all heads and batch entries: query tiles, pairs of them, or the places of all sections.
        items: u32,
        /// Work tiles per head.
        head_items: u32,
        /// Query tiles per head.
        blocks: u32,
        /// Heads whose tiles are processed together, longest first.
        section: u32,
        /// Places per section.
        places: u32,
        /// Query heads.
        heads: u32,
        /// Divides by the places per section.
        places_mul: u32,
        /// Divides by the places per section.
        places_shift: u32,
        /// Divides by the heads of a section.
        section_mul: u32,
        /// Divides by the heads of a section.
        section_shift: u32,
        /// Divides by the work tiles per head.
        items_mul: u32,
        /// Divides by the work tiles per head.
        items_shift: u32,
        /// Divides by the query heads.
        heads_mul: u32,
        /// Divides by the query heads.
        heads_shift: u32,
        /// Divides by the query heads per kv head; read only by grouped kernels.
        group_mul: u32,
        /// Divides by the query heads per kv head; read only by grouped kernels.
        group_shift: u32,
        /// How many keys before its own position a query sees; read only by kernels with a left bound.
        left: i32,
        /// How many keys after its own position a query sees; read only by kernels with a right bound.
        right: i32,
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

kernel_params! {
    /// What a launch with packed sequences is given behind its other parameters.
    pub struct PackedParams {
        /// Where each sequence of queries begins, and where the last one ends; read only by kernels with packed ones.
        q_starts: GlobalPtr,
        /// The same for the keys; read only by kernels with packed ones.
        k_starts: GlobalPtr,
        /// Sequences.
        sequences: u32,
    }
}

impl PackedParams {
    /// The parameters of a launch.
    pub(crate) fn bind(args: &Args) -> Self {
        let pointer = |operand| args.tensor(operand).pointer();
        Self {
            q_starts: pointer(Operand::QStarts),
            k_starts: pointer(Operand::KStarts),
            sequences: args.sequences,
        }
    }
}

impl Sm90Params {
    /// The parameters of a launch; `encode` makes tensor maps.
    pub(crate) fn bind<E>(
        schedule: Schedule,
        spec: &Spec,
        args: &Args,
        encode: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
    ) -> Result<Self, E> {
        let of = |operand| args.tensor(operand);
        let boxes = schedule.boxes(spec);
        let mut map = |operand, rows: u32| {
            let dtype = if operand == Operand::O { spec.out() } else { spec.dtype };
            let of_rows = describe(dtype, args, of(operand), rows);
            let of_queries = matches!(operand, Operand::Q | Operand::O) && spec.rows_per_query > 1;
            encode(&if of_queries { by_query(of_rows, spec.rows_per_query, operand) } else { of_rows })
        };
        let (q_map, k_map) = (map(Operand::Q, boxes.q)?, map(Operand::K, boxes.kv)?);
        let (v_map, o_map) = (map(Operand::V, boxes.v)?, map(Operand::O, boxes.o)?);
        // Parts of the keys write their partial results side by side, and the combine kernel merges them.
        let (o, lse) = if schedule.leaves_parts() {
            (of(Operand::PartialO), of(Operand::PartialState))
        } else if schedule.aside_bytes(spec) > 0 {
            (of(Operand::Aside), of(Operand::Lse))
        } else {
            (of(Operand::O), of(Operand::Lse))
        };
        let [batch, heads, len_q] = args.rows(spec);
        let blocks = len_q.div_ceil(schedule.rows_taken(spec));
        let order = schedule.order(spec);
        let head_items = if order == Walk::Pairs { blocks.div_ceil(2) } else { blocks };
        let Section { heads: section, places } = args.section;
        let items = match order {
            Walk::Sections => batch * heads / section.max(1) * places,
            Walk::Plain | Walk::Pairs => head_items * batch * heads,
        };
        let by = Divisor::new;
        let scores = args.scores();
        Ok(Self {
            q_map,
            k_map,
            v_map,
            o_map,
            o: o.pointer(),
            lse: lse.pointer(),
            key_lengths: of(Operand::KeyLengths).pointer(),
            o_batch: o.strides[0],
            o_head: o.strides[1],
            o_row: o.strides[2],
            lse_batch: lse.strides[0],
            lse_head: lse.strides[1],
            lse_row: lse.strides[2],
            len_q,
            len_k: if spec.page.is_some() { args.longest[1] } else { of(Operand::K).shape[2] as u32 },
            items,
            head_items,
            blocks,
            section,
            places,
            heads,
            places_mul: by(places).mul,
            places_shift: by(places).shift,
            section_mul: by(section).mul,
            section_shift: by(section).shift,
            items_mul: by(head_items).mul,
            items_shift: by(head_items).shift,
            heads_mul: by(heads).mul,
            heads_shift: by(heads).shift,
            group_mul: by(args.group()).mul,
            group_shift: by(args.group()).shift,
            left: args.left,
            right: args.right,
            exp_scale: scores.exp_scale,
            tanh_scale: scores.tanh_scale,
            scale: scores.scale,
            softcap: scores.softcap,
        })
    }
}

/// What a tensor map describes: a tensor in boxes of this many rows.
pub(super) fn describe(dtype: ElementType, args: &Args, tensor: &TensorArg, box_rows: u32) -> Map {
    let TensorArg { address, shape: [batch, heads, len, dim], strides: [to_batch, to_head, to_row] } =
        *tensor;
    let row_bytes = dim as u64 * u64::from(dtype.size());
    // With a single entry, any distance to the next will do.
    let distance = |size: usize, stride: u64| if size > 1 { stride } else { row_bytes };
    let empty = [batch, heads, len].contains(&0);
    Map {
        dtype,
        // Nothing is read from a tensor without elements, but its map needs an address.
        address: if empty { args.tensor(Operand::Q).address } else { address },
        dims: [dim, len, heads, batch].map(|size| size.max(1) as u64),
        strides: [distance(len, to_row), distance(heads, to_head), distance(batch, to_batch)],
        box_dims: [columns(dtype), box_rows, 1, 1],
    }
}

/// The same where a tile's rows are the heads that share keys, query by query: a box has all heads of a group, and as many
/// queries as its rows begin. The output's has whole queries only, for the rest is the next tile's.
fn by_query(map: Map, heads: u32, operand: Operand) -> Map {
    let Map { dims: [dim, len, all_heads, batch], strides: [to_row, to_head, to_batch], .. } = map;
    let [columns, rows, ..] = map.box_dims;
    let queries = if operand == Operand::O { rows / heads } else { rows.div_ceil(heads) };
    Map {
        dims: [dim, all_heads, len, batch],
        strides: [to_head, to_row, to_batch],
        box_dims: [columns, heads, queries, 1],
        ..map
    }
}

/// A division by a constant of the launch: `n / divisor` is `(n · mul) >> shift`, for n below 2^31.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divisor {
    /// The factor.
    pub mul: u32,
    /// The bits that are dropped.
    pub shift: u32,
}

impl Divisor {
    /// For a divisor from 1 to 2^31.
    pub fn new(divisor: u32) -> Self {
        let bits = divisor.max(1).next_power_of_two().trailing_zeros();
        let shift = 31 + bits;
        let mul = (1_u64 << shift).div_ceil(u64::from(divisor.max(1)));
        Self { mul: mul as u32, shift }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divisor_divides_every_number_below_two_to_the_31() {
        let most = (1_u32 << 31) - 1;
        let mut seen = 12345_u32;
        for divisor in (1..200).chain([255, 256, 257, 1000, 65535, 65536, 1 << 20, most - 1, most]) {
            let Divisor { mul, shift } = Divisor::new(divisor);
            let check = |n: u32| {
                let quotient = (u64::from(n) * u64::from(mul)) >> shift;
                assert_eq!(quotient, u64::from(n / divisor), "{n} / {divisor}");
            };
            for n in [0, 1, divisor - 1, divisor, divisor.saturating_add(1).min(most), most - 1, most] {
                check(n);
            }
            for _ in 0..1000 {
                seen = seen.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let n = seen >> 1;
                check(n);
                check(n / divisor * divisor);
                check((n / divisor * divisor).saturating_sub(1));
            }
        }
    }
}
