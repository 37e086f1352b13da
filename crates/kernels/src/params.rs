//! The launch parameters, the same for every forward kernel.

use flashcore_ptx::{GlobalPtr, kernel_params};

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
        /// softcap · log2 e.
        exp_scale: f32,
        /// With a softcap, what a dot product is multiplied with before the tanh: scale / softcap.
        tanh_scale: f32,
    }
}
