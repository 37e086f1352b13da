//! The parameters of the kernels that access memory by address rather than by TMA.

use flashcore_ptx::{
    B32, B64, F32, GlobalPtr, KernelBuilder, KernelParams, ParamHandle, Pred, Reg, kernel_params,
};

use crate::bind::{Args, BindError, Operand};
use crate::parts::copy::MAX_ROW_STRIDE;

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
        /// One f32 per query; read only by kernels that write lse.
        lse: GlobalPtr,
        /// One u32 per batch entry; read only by kernels with key lengths.
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
        /// Queries per head.
        len_q: u32,
        /// Keys per head.
        len_k: u32,
        /// Query heads per kv head; read only by grouped kernels.
        group: u32,
        /// How many keys before its own position a query sees; read only by kernels with a left bound.
        left: i32,
        /// How many keys after its own position a query sees; read only by kernels with a right bound.
        right: i32,
        /// The factor applied to a score before the base-2 exponential: scale · log2 e, or with a softcap softcap ·
        /// log2 e. Not read by kernels with scaled scores, where it is log2 e.
        exp_scale: f32,
        /// With a softcap, the factor applied to a dot product before the tanh: scale / softcap.
        tanh_scale: f32,
        /// The scale; read only by kernels with scaled scores.
        scale: f32,
        /// The softcap; read only by kernels with scaled scores and a softcap.
        softcap: f32,
        /// Query heads; read only by kernels with a one-dimensional grid.
        heads: u32,
    }
}

impl FwdParams {
    /// The parameters of a launch.
    pub(crate) fn bind(args: &Args) -> Self {
        let of = |operand| args.tensor(operand);
        let (q, k, v) = (of(Operand::Q), of(Operand::K), of(Operand::V));
        let (o, lse) = (of(Operand::O), of(Operand::Lse));
        let [_, heads, len_q] = args.queries();
        let scores = args.scores();
        Self {
            q: q.pointer(),
            k: k.pointer(),
            v: v.pointer(),
            o: o.pointer(),
            lse: lse.pointer(),
            key_lengths: of(Operand::KeyLengths).pointer(),
            q_batch: q.strides[0],
            q_head: q.strides[1],
            q_row: q.strides[2],
            k_batch: k.strides[0],
            k_head: k.strides[1],
            k_row: k.strides[2],
            v_batch: v.strides[0],
            v_head: v.strides[1],
            v_row: v.strides[2],
            o_batch: o.strides[0],
            o_head: o.strides[1],
            o_row: o.strides[2],
            lse_batch: lse.strides[0],
            lse_head: lse.strides[1],
            lse_row: lse.strides[2],
            len_q,
            len_k: k.shape[2] as u32,
            group: args.group(),
            left: args.left,
            right: args.right,
            exp_scale: scores.exp_scale,
            tanh_scale: scores.tanh_scale,
            scale: scores.scale,
            softcap: scores.softcap,
            heads,
        }
    }
}

/// The tensors of a forward pass.
pub(crate) const TENSORS: [Operand; 4] = [Operand::Q, Operand::K, Operand::V, Operand::O];

kernel_params! {
    /// What a launch with 8-bit floats is given behind its other parameters: descales, by batch entry and kv head, or null.
    /// Strides are in bytes.
    pub struct DescaleParams {
        /// Of the queries.
        q_descale: GlobalPtr,
        /// Of the keys.
        k_descale: GlobalPtr,
        /// Of the values.
        v_descale: GlobalPtr,
        /// From one batch entry of the queries' descales to the next.
        q_descale_batch: u64,
        /// From one kv head of the queries' descales to the next.
        q_descale_head: u64,
        /// From one batch entry of the keys' descales to the next.
        k_descale_batch: u64,
        /// From one kv head of the keys' descales to the next.
        k_descale_head: u64,
        /// From one batch entry of the values' descales to the next.
        v_descale_batch: u64,
        /// From one kv head of the values' descales to the next.
        v_descale_head: u64,
    }
}

impl DescaleParams {
    /// The descale of a batch entry's kv head; 1 where none is given.
    pub(crate) fn read(k: &mut KernelBuilder, of: Operand, batch: Reg<B32>, kv_head: Reg<B32>) -> Reg<F32> {
        let (own, given) = Self::place(k, of, batch, kv_head);
        let value = k.mov_f32(1.0);
        k.when(given, |k| k.set(value, |k| k.ld_global(own)));
        value
    }

    /// Where the first descale of a batch entry's kv head is, and whether there is one.
    pub(crate) fn place(
        k: &mut KernelBuilder,
        of: Operand,
        batch: Reg<B32>,
        kv_head: Reg<B32>,
    ) -> (Reg<B64>, Reg<Pred>) {
        let (descales, batch_stride, head_stride) = match of {
            Operand::Q => (Self::q_descale, Self::q_descale_batch, Self::q_descale_head),
            Operand::K => (Self::k_descale, Self::k_descale_batch, Self::k_descale_head),
            _ => (Self::v_descale, Self::v_descale_batch, Self::v_descale_head),
        };
        let descales = k.param(descales);
        let (batch_stride, head_stride) = (k.param(batch_stride), k.param(head_stride));
        let (batch, head) = (k.cvt_u64_u32(batch), k.cvt_u64_u32(kv_head));
        let entry = k.mad_lo_u64(batch, batch_stride, descales);
        let own = k.mad_lo_u64(head, head_stride, entry);
        (own, k.setp_ne_u64(descales, 0u64))
    }

    /// The parameters of a launch.
    pub(crate) fn bind(args: &Args) -> Self {
        let [q, k, v] = [Operand::QDescale, Operand::KDescale, Operand::VDescale].map(|it| args.tensor(it));
        Self {
            q_descale: q.pointer(),
            k_descale: k.pointer(),
            v_descale: v.pointer(),
            q_descale_batch: q.strides[0],
            q_descale_head: q.strides[1],
            k_descale_batch: k.strides[0],
            k_descale_head: k.strides[1],
            v_descale_batch: v.strides[0],
            v_descale_head: v.strides[1],
        }
    }
}

kernel_params! {
    /// What a launch is given behind that where blocks of keys have descales of their own. Strides are in bytes.
    pub struct BlockDescaleParams {
        /// From one block's descale of the keys to the next.
        k_descale_block: u64,
        /// From one block's descale of the values to the next.
        v_descale_block: u64,
    }
}

/// Where the descales of a kv head's blocks are.
#[derive(Clone, Copy)]
pub(crate) struct BlockDescales {
    first: Reg<B64>,
    stride: Reg<B64>,
    given: Reg<Pred>,
}

impl BlockDescaleParams {
    /// Those of a batch entry's kv head.
    pub(crate) fn of(
        k: &mut KernelBuilder,
        of: Operand,
        batch: Reg<B32>,
        kv_head: Reg<B32>,
    ) -> BlockDescales {
        let stride = if of == Operand::K { Self::k_descale_block } else { Self::v_descale_block };
        let (first, given) = DescaleParams::place(k, of, batch, kv_head);
        BlockDescales { first, stride: k.param(stride), given }
    }

    /// The descale of a block that exists, given where the first of its kv head is; 1 where none is given.
    pub(crate) fn read(k: &mut KernelBuilder, of: Operand, first: Reg<B64>, block: Reg<B32>) -> Reg<F32> {
        let (descales, stride) = match of {
            Operand::K => (DescaleParams::k_descale, Self::k_descale_block),
            _ => (DescaleParams::v_descale, Self::v_descale_block),
        };
        let (descales, stride) = (k.param(descales), k.param(stride));
        let given = k.setp_ne_u64(descales, 0u64);
        BlockDescales { first, stride, given }.read_there(k, block)
    }

    /// The parameters of a launch.
    pub(crate) fn bind(args: &Args) -> Self {
        let [k, v] = [Operand::KDescale, Operand::VDescale].map(|it| args.tensor(it));
        Self { k_descale_block: k.strides[2], v_descale_block: v.strides[2] }
    }
}

impl BlockDescales {
    /// The descale of a block, where there is one; 1 where none is given.
    pub(crate) fn read(self, k: &mut KernelBuilder, block: Reg<B32>, exists: Reg<Pred>) -> Reg<F32> {
        let reads = k.and_pred(exists, self.given);
        self.read_if(k, block, reads)
    }

    /// The descale of a block that exists; 1 where none is given.
    pub(crate) fn read_there(self, k: &mut KernelBuilder, block: Reg<B32>) -> Reg<F32> {
        self.read_if(k, block, self.given)
    }

    fn read_if(self, k: &mut KernelBuilder, block: Reg<B32>, reads: Reg<Pred>) -> Reg<F32> {
        let block = k.cvt_u64_u32(block);
        let at = k.mad_lo_u64(block, self.stride, self.first);
        let value = k.mov_f32(1.0);
        k.when(reads, |k| k.set(value, |k| k.ld_global(at)));
        value
    }
}

kernel_params! {
    /// What a launch with keys in pages is given behind its other parameters. The strides of batch entries are then those of pages.
    pub struct PageParams {
        /// The pages of each batch entry.
        pages: GlobalPtr,
        /// Bytes from one batch entry's to the next.
        pages_row: u64,
        /// The most pages of a batch entry.
        most_pages: u32,
    }
}

impl PageParams {
    /// The parameters of a launch.
    pub(crate) fn bind(args: &Args) -> Self {
        let pages = args.tensor(Operand::Pages);
        Self { pages: pages.pointer(), pages_row: pages.strides[0], most_pages: pages.shape[3] as u32 }
    }
}

kernel_params! {
    /// What a launch is given behind that where pages are read by address rather than by TMA.
    pub struct PoolParams {
        /// Pages of the pool. What is read of one that it has not is zeros.
        pool: u32,
    }
}

impl PoolParams {
    /// The parameters of a launch.
    pub(crate) fn bind(args: &Args) -> Self {
        Self { pool: args.tensor(Operand::K).shape[0] as u32 }
    }
}

/// Refuses rows that are further apart than the kernels without TMA can address.
pub(crate) fn check_rows(args: &Args, tensors: &[Operand]) -> Result<(), BindError> {
    for &operand in tensors {
        let tensor = args.tensor(operand);
        let given = tensor.strides[2];
        if tensor.shape[2] > 1 && given > MAX_ROW_STRIDE {
            return Err(BindError::RowStride { operand, given, most: MAX_ROW_STRIDE });
        }
    }
    Ok(())
}

/// An address in a tensor.
pub(crate) fn address<P: KernelParams>(
    k: &mut KernelBuilder,
    base: ParamHandle<P, GlobalPtr>,
    strides: &[ParamHandle<P, u64>],
    indices: &[Reg<B32>],
) -> Reg<B64> {
    let base = k.param(base);
    strides.iter().zip(indices).fold(base, |at, (&stride, &index)| {
        let (index, stride) = (k.cvt_u64_u32(index), k.param(stride));
        k.mad_lo_u64(index, stride, at)
    })
}
