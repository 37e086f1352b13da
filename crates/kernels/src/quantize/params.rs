//! The parameters of the quantising kernels, and how they are bound.

use flashcore_ptx::{GlobalPtr, KernelParams, ParamHandle, kernel_params};

use super::{Pass, Quantize, Which, shift::OfLse};
use crate::{
    Operand, TensorArg,
    bind::{Args, Packed},
};

kernel_params! {
    /// What every pass is given. Strides are in bytes; what there is of each tensor is a [`OfQ`], [`OfK`] or [`OfV`]. The
    /// first blocks are for q, those from `k_first` on for k, and those from `v_first` on for v.
    pub(super) struct Common {
        key_lengths: GlobalPtr,
        mean: GlobalPtr,
        partials: GlobalPtr,
        mean_batch: u64,
        mean_head: u64,
        k_first: u32,
        v_first: u32,
        blocks: u32,
        group: u32,
    }
}

kernel_params! {
    /// What a pass is given behind that where chunks have descales of their own: bytes from one to the next.
    pub(super) struct OfChunks {
        k_descale_chunk: u64,
        v_descale_chunk: u64,
    }
}

/// Declares what a pass is given of one tensor: its elements and their strides, where the codes go and with which strides,
/// its descales and theirs, and the largest magnitudes of its parts, so many per head.
macro_rules! tensor_params {
    ($name:ident { $x:ident $x0:ident $x1:ident $x2:ident $out:ident $o0:ident $o1:ident $o2:ident
        $descale:ident $d0:ident $d1:ident $amax:ident $rows:ident $heads:ident $parts:ident }) => {
        kernel_params! {
            pub(super) struct $name {
                $x: GlobalPtr, $x0: u64, $x1: u64, $x2: u64,
                $out: GlobalPtr, $o0: u64, $o1: u64, $o2: u64,
                $descale: GlobalPtr, $d0: u64, $d1: u64,
                $amax: GlobalPtr, $rows: u32, $heads: u32, $parts: u32,
            }
        }

        impl TensorParams for $name {
            fn of(tensor: &Tensor) -> Self {
                let Tensor { x, out, descale, amax, parts } = *tensor;
                Self {
                    $x: x.pointer(),
                    $x0: x.strides[0],
                    $x1: x.strides[1],
                    $x2: x.strides[2],
                    $out: out.pointer(),
                    $o0: out.strides[0],
                    $o1: out.strides[1],
                    $o2: out.strides[2],
                    $descale: descale.pointer(),
                    $d0: descale.strides[0],
                    $d1: descale.strides[1],
                    $amax: GlobalPtr(amax),
                    $rows: x.shape[2] as u32,
                    $heads: x.shape[1] as u32,
                    $parts: parts,
                }
            }
        }
    };
}

/// The parameters of one tensor, in the same order for each.
pub(super) trait TensorParams: KernelParams + Sized {
    fn of(tensor: &Tensor) -> Self;

    /// The element type's address, and strides from one batch entry, head and row to the next.
    fn x() -> (ParamHandle<Self, GlobalPtr>, [ParamHandle<Self, u64>; 3]) {
        (ParamHandle::new(0), [1, 2, 3].map(ParamHandle::new))
    }

    /// The same of the codes.
    fn out() -> (ParamHandle<Self, GlobalPtr>, [ParamHandle<Self, u64>; 3]) {
        (ParamHandle::new(4), [5, 6, 7].map(ParamHandle::new))
    }

    /// The same of the descales, by batch entry and kv head.
    fn descale() -> (ParamHandle<Self, GlobalPtr>, [ParamHandle<Self, u64>; 2]) {
        (ParamHandle::new(8), [9, 10].map(ParamHandle::new))
    }

    /// The largest magnitudes of the parts.
    fn amax() -> ParamHandle<Self, GlobalPtr> {
        ParamHandle::new(11)
    }

    /// Rows per head, heads, and parts per head.
    fn counts() -> [ParamHandle<Self, u32>; 3] {
        [12, 13, 14].map(ParamHandle::new)
    }
}

tensor_params!(OfQ { q q_batch q_head q_row q8 q8_batch q8_head q8_row
    q_descale q_descale_batch q_descale_head q_amax q_rows q_heads q_parts });
tensor_params!(OfK { k k_batch k_head k_row k8 k8_batch k8_head k8_row
    k_descale k_descale_batch k_descale_head k_amax k_rows k_heads k_parts });
tensor_params!(OfV { v v_batch v_head v_row v8 v8_batch v8_head v8_row
    v_descale v_descale_batch v_descale_head v_amax v_rows v_heads v_parts });

/// What is bound of one tensor.
pub(super) struct Tensor {
    x: TensorArg,
    out: TensorArg,
    descale: TensorArg,
    amax: u64,
    parts: u32,
}

impl Quantize {
    /// Chunks of rows per head of a tensor.
    fn chunks(self, args: &Args, which: Which) -> u32 {
        (args.tensor(which.operands().0).shape[2] as u32).div_ceil(self.rows)
    }

    /// The largest magnitudes per head that the last pass reads.
    fn parts(self, args: &Args, which: Which) -> u32 {
        match (self.smooths(which), self.chunks_differ(which)) {
            (true, _) => 1,
            (false, true) => 0,
            (false, false) => self.chunks(args, which),
        }
    }

    /// Heads of a tensor over all batch entries.
    fn heads(args: &Args, which: Which) -> u32 {
        let [batch, heads, ..] = args.tensor(which.operands().0).shape;
        (batch * heads) as u32
    }

    /// One block per chunk: the first of k, the first of v, and how many there are.
    pub(super) fn blocks(self, args: &Args) -> [u32; 3] {
        let blocks = |of: Which| {
            let there = self.tensors().any(|which| which == of);
            if there { Self::heads(args, of) * self.chunks(args, of) } else { 0 }
        };
        let (q, k, v) = (blocks(Which::Q), blocks(Which::K), blocks(Which::V));
        [q, q + k, q + k + v]
    }

    /// Where each tensor's largest magnitudes start in the workspace, and where the partial means do; then its size.
    fn places(self, args: &Args) -> ([u64; 3], u64, u64) {
        let heads = |which: Which| u64::from(Self::heads(args, which));
        let (mut starts, mut end) = ([0; 3], 0);
        for which in self.tensors() {
            starts[which as usize] = end;
            end += 4 * heads(which) * u64::from(self.parts(args, which));
        }
        let each = 12 * u64::from(self.head_dim) * u64::from(self.chunks(args, Which::K));
        let all = if self.smooth { heads(Which::K) * each } else { 0 };
        (starts, end, end + all)
    }

    /// Bytes of the workspace, [`Operand::Space`], which need not hold anything.
    pub fn space(self, args: &Args) -> u64 {
        self.places(args).2
    }

    /// Adds the parameters of the next launch: they are the same for all passes but the last.
    pub fn bind(self, pass: Pass, args: &Args, packed: &mut Packed) {
        let space = args.tensor(Operand::Space).address;
        let (starts, partials, _) = self.places(args);
        let [k_first, v_first, blocks] = self.blocks(args);
        let mean = args.tensor(Operand::KMean);
        packed.push(&Common {
            key_lengths: args.tensor(Operand::KeyLengths).pointer(),
            mean: mean.pointer(),
            partials: GlobalPtr(space + partials),
            mean_batch: mean.strides[0],
            mean_head: mean.strides[1],
            k_first,
            v_first,
            blocks,
            group: args.group(),
        });
        let tensor = |which: Which| {
            let (x, out, descale) = which.operands();
            Tensor {
                x: *args.tensor(x),
                out: *args.tensor(out),
                descale: *args.tensor(descale),
                amax: space + starts[which as usize],
                parts: self.parts(args, which),
            }
        };
        packed.extend(&OfQ::of(&tensor(Which::Q)));
        packed.extend(&OfK::of(&tensor(Which::K)));
        packed.extend(&OfV::of(&tensor(Which::V)));
        if self.by_chunk {
            let [k, v] = [Operand::KDescale, Operand::VDescale].map(|of| args.tensor(of).strides[2]);
            packed.extend(&OfChunks { k_descale_chunk: k, v_descale_chunk: v });
        }
        if pass == Pass::Shift {
            packed.extend(&OfLse::of(args));
        }
    }
}
