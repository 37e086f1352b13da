//! Constant shared addresses: within their allocation, and aligned as the access needs.

use crate::error::Fault;
use crate::inst::{Arg, Inst, MemBase, Op};
use crate::module::Kernel;
use crate::types::Imm;

pub(super) fn check(kernel: &Kernel, at: &mut dyn FnMut(usize, Fault)) {
    for (i, inst) in kernel.body.iter().enumerate() {
        for (position, &arg) in inst.src.iter().enumerate() {
            let Arg::Mem { base: MemBase::Shared(index), offset } = arg else { continue };
            let Some(alloc) = kernel.shared.allocs().get(index as usize) else { continue };
            let (bytes, align) = access(inst, position);
            let (start, end) = (i64::from(offset), i64::from(offset) + bytes);
            if start < 0 || end > i64::from(alloc.bytes) {
                let name = alloc.name.clone();
                at(i, Fault::OutOfBounds { name, start, end, bytes: alloc.bytes });
            }
            let place = i64::from(alloc.offset) + start;
            if place.rem_euclid(i64::from(align)) != 0 {
                at(i, Fault::Misaligned { name: alloc.name.clone(), offset: place, needs: align });
            }
        }
    }
}

/// The bytes that an instruction accesses at one of its shared addresses, as far as they are known, and the
/// alignment it needs.
fn access(inst: &Inst, position: usize) -> (i64, u32) {
    let constant = |index: usize| match inst.src.get(index) {
        Some(Arg::Imm(Imm { bits, .. })) => i64::try_from(*bits).unwrap_or(i64::MAX),
        _ => 1,
    };
    match inst.op {
        Op::Ld { ty, width, .. } | Op::St { ty, width, .. } => {
            let bytes = ty.bytes() * width.count();
            (i64::from(bytes), bytes)
        }
        Op::Atom { ty, .. } | Op::Red { ty, .. } => {
            let bytes = ty.bytes();
            (i64::from(bytes), bytes)
        }
        Op::Ldmatrix { .. } | Op::Stmatrix { .. } => (16, 16),
        Op::CpAsync { bytes, .. } => (i64::from(bytes.count()), bytes.count()),
        Op::CpAsyncMbarrierArrive { .. }
        | Op::MbarrierInit
        | Op::MbarrierInval
        | Op::MbarrierArrive { .. }
        | Op::MbarrierArriveExpectTx { .. }
        | Op::MbarrierExpectTx { .. }
        | Op::MbarrierTestWait { .. }
        | Op::MbarrierTryWait { .. } => (8, 8),
        Op::BulkLoad { .. } if position == 3 => (8, 8),
        Op::BulkLoad { .. } | Op::BulkStore { .. } | Op::BulkReduce { .. } => (constant(2), 16),
        Op::BulkToCluster | Op::BulkReduceCluster { .. } if position == 1 => (constant(2), 16),
        Op::TensorLoad { dims, .. } if position == 2 + dims.count() => (8, 8),
        Op::TensorLoad { .. } | Op::TensorStore { .. } | Op::TensorReduce { .. } => (1, 128),
        _ => (0, 1), // an address that is only computed, or another block's
    }
}
