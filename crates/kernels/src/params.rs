//! The launch parameters: one struct for the kernels that reach memory by addresses, one for those with tensor maps.

use flashcore_ptx::{GlobalPtr, TensorMap, kernel_params};

kernel_params! {
    /// What a launch of a forward kernel is given. Strides are in bytes.
    pub struct FwdParams {
        /// The queries.
        q: GlobalPtr,
        /// The keys.
        k: GlobalPtr,
        /// The values.
        v: GlobalPtr,
        /// The output.
        o: GlobalPtr,
        /// One f32 a query; read only by kernels that write lse.
        lse: GlobalPtr,
        /// One u32 a batch entry; read only by kernels with key lengths.
        key_lengths: GlobalPtr,
        /// From one batch entry of q to the next.
        q_batch: u64,
        /// From one head of q to the next.
        q_head: u64,
        /// From one query to the next.
        q_row: u64,
        /// From one batch entry of k to the next.
        k_batch: u64,
        /// From one head of k to the next.
        k_head: u64,
        /// From one key to the next.
        k_row: u64,
        /// From one batch entry of v to the next.
        v_batch: u64,
        /// From one head of v to the next.
        v_head: u64,
        /// From one value to the next.
        v_row: u64,
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
        /// Queries a head.
        len_q: u32,
        /// Keys a head.
        len_k: u32,
        /// Query heads a kv head; read only by grouped kernels.
        group: u32,
        /// Keys before its own place that a query sees; read only by kernels with a left bound.
        left: i32,
        /// Keys after its own place that a query sees; read only by kernels with a right bound.
        right: i32,
        /// What a score is multiplied with before the exponential of base 2: scale · log2 e, or with a softcap
        /// softcap · log2 e. Not read by kernels with scaled scores, where it is log2 e.
        exp_scale: f32,
        /// With a softcap, what a dot product is multiplied with before the tanh: scale / softcap.
        tanh_scale: f32,
        /// The scale; read only by kernels with scaled scores.
        scale: f32,
        /// The softcap; read only by kernels with scaled scores and a softcap.
        softcap: f32,
        /// Query heads; read only by kernels whose blocks lie in a row.
        heads: u32,
    }
}

kernel_params! {
    /// What a launch of the Hopper kernel is given. Strides are in bytes; a division by a number that only the launch
    /// knows is a multiplication and a shift, as [`Divisor`] has them.
    pub struct Sm90Params {
        /// The queries, in boxes of a block's rows.
        q_map: TensorMap,
        /// The keys, in boxes of a key tile.
        k_map: TensorMap,
        /// The values, in boxes of a key tile.
        v_map: TensorMap,
        /// The output, in boxes of a warpgroup's rows.
        o_map: TensorMap,
        /// The output; read only by kernels that split the keys.
        o: GlobalPtr,
        /// One f32 a query; read only by kernels that write lse.
        lse: GlobalPtr,
        /// One u32 a batch entry; read only by kernels with key lengths.
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
        /// Queries a head.
        len_q: u32,
        /// Keys a head.
        len_k: u32,
        /// Pieces of work, over all heads and batch entries: tiles of queries, or pairs of them.
        items: u32,
        /// Pieces of work a head.
        head_items: u32,
        /// Tiles of queries a head.
        blocks: u32,
        /// Heads whose tiles are taken up together, longest first.
        section: u32,
        /// Query heads.
        heads: u32,
        /// Divides by the tiles of a section.
        section_tiles_mul: u32,
        /// Divides by the tiles of a section.
        section_tiles_shift: u32,
        /// Divides by the heads of a section.
        section_mul: u32,
        /// Divides by the heads of a section.
        section_shift: u32,
        /// Divides by the pieces of work a head.
        items_mul: u32,
        /// Divides by the pieces of work a head.
        items_shift: u32,
        /// Divides by the query heads.
        heads_mul: u32,
        /// Divides by the query heads.
        heads_shift: u32,
        /// Divides by the query heads a kv head; read only by grouped kernels.
        group_mul: u32,
        /// Divides by the query heads a kv head; read only by grouped kernels.
        group_shift: u32,
        /// Keys before its own place that a query sees; read only by kernels with a left bound.
        left: i32,
        /// Keys after its own place that a query sees; read only by kernels with a right bound.
        right: i32,
        /// As in [`FwdParams`].
        exp_scale: f32,
        /// As in [`FwdParams`].
        tanh_scale: f32,
        /// As in [`FwdParams`].
        scale: f32,
        /// As in [`FwdParams`].
        softcap: f32,
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
