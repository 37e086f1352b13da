//! Which combinations of modifiers are executed; the others are refused when a kernel is decoded.

use flashcore_ptx::{AtomOp, AtomTy, MatrixTy, MmaShape, Op, Space};

/// Whether the combination of modifiers is one that is executed; nothing is guessed.
pub(super) fn implemented(op: &Op) -> Result<(), &'static str> {
    let halves = |ty: MatrixTy| ty.bits() == 16;
    match *op {
        Op::Mma { shape: MmaShape::M16n8k32, a, b, .. } if halves(a) || halves(b) => {
            Err("this shape is for fp8 operands")
        }
        Op::Mma { shape: MmaShape::M16n8k8 | MmaShape::M16n8k16, a, b, .. } if !halves(a) || a != b => {
            Err("this shape is for f16 or bf16 operands, both the same")
        }
        Op::Wgmma(form) if form.a.bits() != form.b.bits() => Err("operands of different sizes"),
        Op::Wgmma(form) if (form.trans_a || form.trans_b) && !halves(form.a) => {
            Err("only 16-bit operands can be M-major or N-major")
        }
        Op::Wgmma(form) if form.n % 8 != 0 || !(8..=256).contains(&form.n) => {
            Err("n must be a multiple of 8 from 8 to 256")
        }
        Op::Redux { op: AtomOp::Exch | AtomOp::Cas | AtomOp::Inc | AtomOp::Dec, .. } => {
            Err("this operation is not a reduction")
        }
        Op::Red { op: AtomOp::Exch | AtomOp::Cas, .. }
        | Op::BulkReduce { op: AtomOp::Exch | AtomOp::Cas, .. }
        | Op::BulkReduceCluster { op: AtomOp::Exch | AtomOp::Cas, .. }
        | Op::TensorReduce { op: AtomOp::Exch | AtomOp::Cas, .. } => Err("this operation is not a reduction"),
        Op::Atom { op, ty, .. } | Op::Red { op, ty, .. } | Op::BulkReduce { op, ty, .. } => {
            let float =
                matches!(ty, AtomTy::F32 | AtomTy::F16 | AtomTy::Bf16 | AtomTy::F16x2 | AtomTy::Bf16x2);
            let exists = matches!(op, AtomOp::Add | AtomOp::Min | AtomOp::Max)
                || (op == AtomOp::Exch && ty == AtomTy::F32);
            if float && !exists { Err("this operation does not exist for floats") } else { Ok(()) }
        }
        Op::St { space: Space::Param, .. } => Err("parameters cannot be written"),
        _ => Ok(()),
    }
}
