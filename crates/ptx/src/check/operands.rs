//! The operands of an instruction: how many it has, and of which class.
//!
//! The builder's types enforce the right ones. Checking finished instructions, and not only the builder's calls,
//! also covers kernels that a test has edited.

use crate::error::Fault;
use crate::inst::*;
use crate::modifiers::*;
use crate::module::Kernel;
use crate::types::{RegClass, RegId};

/// What may stand in one operand's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// A register of the class.
    Reg(RegClass),
    /// A register of the class or a constant.
    Value(RegClass),
    /// A constant.
    Constant,
    /// A register of the class or a sink.
    Result(RegClass),
    /// A 32-bit word: an integer or a float register.
    Word,
    /// A shared-memory address.
    Shared,
    /// A global or generic address.
    Global,
    /// A kernel parameter.
    Param,
    /// The address of something declared: shared memory or a parameter.
    Symbol,
}

use RegClass::{B16, B32, B64, F32, Pred};
use Slot::{Constant, Global, Param, Reg, Result, Shared, Symbol, Value, Word};

impl Slot {
    fn expected(self) -> String {
        match self {
            Reg(class) => format!("a {class:?} register"),
            Value(class) => format!("a {class:?} register or constant"),
            Constant => "a constant".to_owned(),
            Result(class) => format!("a {class:?} register or `_`"),
            Word => "a B32 or F32 register".to_owned(),
            Shared => "a shared-memory address".to_owned(),
            Global => "a global address".to_owned(),
            Param => "a parameter".to_owned(),
            Symbol => "shared memory or a parameter".to_owned(),
        }
    }

    fn takes(self, kernel: &Kernel, arg: Arg) -> bool {
        let class = |id: RegId| kernel.reg(id).map(|r| r.class);
        let shared = |i: u32| (i as usize) < kernel.shared.allocs().len();
        let param = |i: u32| (i as usize) < kernel.params.len();
        match (self, arg) {
            (Reg(c) | Value(c) | Result(c), Arg::Reg(id)) => class(id) == Some(c),
            (Word, Arg::Reg(id)) => matches!(class(id), Some(B32 | F32)),
            (Value(c), Arg::Imm(imm)) => imm.class == c,
            (Constant, Arg::Imm(_)) | (Result(_), Arg::Sink) => true,
            (Shared, Arg::Mem { base: MemBase::Reg(id), .. }) => class(id) == Some(B32),
            (Shared | Symbol, Arg::Mem { base: MemBase::Shared(i), .. }) => shared(i),
            (Global, Arg::Mem { base: MemBase::Reg(id), .. }) => class(id) == Some(B64),
            (Param | Symbol, Arg::Mem { base: MemBase::Param(i), .. }) => param(i),
            _ => false,
        }
    }
}

fn mem_class(ty: MemTy) -> RegClass {
    match ty {
        MemTy::U8 | MemTy::S8 | MemTy::B32 => B32,
        MemTy::B16 => B16,
        MemTy::B64 => B64,
        MemTy::F32 => F32,
    }
}

fn atom_class(ty: AtomTy) -> RegClass {
    match ty {
        AtomTy::B32 | AtomTy::U32 | AtomTy::S32 | AtomTy::F16x2 | AtomTy::Bf16x2 => B32,
        AtomTy::B64 | AtomTy::U64 | AtomTy::S64 => B64,
        AtomTy::F32 => F32,
        AtomTy::F16 | AtomTy::Bf16 => B16,
    }
}

fn num_class(ty: NumType) -> RegClass {
    match ty {
        NumType::S16 | NumType::U16 => B16,
        NumType::S32 | NumType::U32 => B32,
        NumType::S64 | NumType::U64 => B64,
        NumType::F32 => F32,
    }
}

fn address(space: Space) -> Slot {
    match space {
        Space::Global => Global,
        Space::Shared | Space::SharedCluster => Shared,
        Space::Param => Param,
    }
}

fn acc_class(acc: AccTy) -> RegClass {
    match acc {
        AccTy::F32 => F32,
        AccTy::F16 => B32,
    }
}

/// `slot`, where the condition holds.
fn opt(condition: bool, slot: Slot) -> impl Iterator<Item = Slot> {
    condition.then_some(slot).into_iter()
}

/// The destinations and sources that an instruction has.
fn signature(inst: &Inst) -> (Vec<Slot>, Vec<Slot>) {
    let none = Vec::new;
    let many = |slot, count: u32| vec![slot; count as usize];
    match inst.op {
        Op::Alu(alu) => {
            let line = alu.line();
            let source = |s: &crate::table::OperandSpec| match (s.register_only, s.constant_only) {
                (true, _) => Reg(s.class),
                (_, true) => Constant,
                _ => Value(s.class),
            };
            (vec![Reg(line.dst)], line.src.iter().map(source).collect())
        }
        Op::Setp { ty, .. } => (vec![Reg(Pred)], many(Value(num_class(ty)), 2)),
        Op::MovSpecial(s) => (vec![Reg(if s.is_64_bit() { B64 } else { B32 })], none()),
        Op::PackB64 => (vec![Reg(B64)], many(Value(B32), 2)),
        Op::UnpackB64 => (many(Result(B32), 2), vec![Reg(B64)]),
        Op::PackB32 => (vec![Reg(B32)], many(Value(B16), 2)),
        Op::UnpackB32 => (many(Result(B16), 2), vec![Reg(B32)]),
        Op::AddrOf => {
            let param = matches!(inst.src.first(), Some(Arg::Mem { base: MemBase::Param(_), .. }));
            (vec![Reg(if param { B64 } else { B32 })], vec![Symbol])
        }
        Op::Cvta { .. } => (vec![Reg(B64)], vec![Reg(B64)]),
        Op::CreatePolicy(_) => (vec![Reg(B64)], none()),
        Op::Ld { space, ty, width, cache, .. } => {
            let src = [address(space)].into_iter().chain(opt(cache.policy, Value(B64)));
            (many(Reg(mem_class(ty)), width.count()), src.collect())
        }
        Op::St { space, ty, width, cache, .. } => {
            let values = many(Value(mem_class(ty)), width.count());
            let src = [address(space)].into_iter().chain(values).chain(opt(cache.policy, Value(B64)));
            (none(), src.collect())
        }
        Op::Prefetch(_) | Op::PrefetchTensormap => (none(), vec![Global]),
        Op::Atom { space, op, ty, .. } => {
            let values = many(atom_value(ty), if op == AtomOp::Cas { 2 } else { 1 });
            (vec![Reg(atom_class(ty))], [address(space)].into_iter().chain(values).collect())
        }
        Op::Red { space, ty, width, .. } => {
            (none(), [address(space)].into_iter().chain(many(atom_value(ty), width.count())).collect())
        }
        Op::Shfl(_) => (vec![Word, Result(Pred)], vec![Word, Value(B32), Value(B32), Value(B32)]),
        Op::Vote(_) => (vec![Reg(Pred)], vec![Reg(Pred), Value(B32)]),
        Op::Ballot => (vec![Reg(B32)], vec![Reg(Pred), Value(B32)]),
        Op::Match(_) | Op::Redux { .. } => (vec![Reg(B32)], vec![Reg(B32), Value(B32)]),
        Op::Elect => (vec![Result(B32), Reg(Pred)], vec![Value(B32)]),
        Op::ActiveMask => (vec![Reg(B32)], none()),
        Op::BarWarpSync | Op::Nanosleep => (none(), vec![Value(B32)]),
        Op::BarSync { .. } => (none(), many(Value(B32), inst.src.len().clamp(1, 2) as u32)),
        Op::BarArrive { .. } => (none(), many(Value(B32), 2)),
        Op::CpAsync { src_size, policy, .. } => {
            let src =
                [Shared, Global].into_iter().chain(opt(src_size, Value(B32))).chain(opt(policy, Value(B64)));
            (none(), src.collect())
        }
        Op::CpAsyncMbarrierArrive { .. } | Op::MbarrierInval => (none(), vec![Shared]),
        Op::Ldmatrix { count, .. } => (many(Reg(B32), count.count()), vec![Shared]),
        Op::Stmatrix { count, .. } => {
            (none(), [Shared].into_iter().chain(many(Reg(B32), count.count())).collect())
        }
        Op::Mma { shape, acc, .. } => {
            let inputs = if shape == MmaShape::M16n8k8 { 3 } else { 6 };
            let acc = many(Reg(acc_class(acc)), if acc == AccTy::F32 { 4 } else { 2 });
            (acc.clone(), many(Reg(B32), inputs).into_iter().chain(acc).collect())
        }
        Op::MbarrierInit => (none(), vec![Shared, Value(B32)]),
        Op::MbarrierArrive { space, count, .. } => {
            let state = if space == Space::Shared { Result(B64) } else { Result(Pred) };
            (vec![state], [Shared].into_iter().chain(opt(count, Value(B32))).collect())
        }
        Op::MbarrierArriveExpectTx { space } => {
            let state = if space == Space::Shared { Result(B64) } else { Result(Pred) };
            (vec![state], vec![Shared, Value(B32)])
        }
        Op::MbarrierExpectTx { .. } => (none(), vec![Shared, Value(B32)]),
        Op::MbarrierTestWait { parity, .. } => {
            (vec![Reg(Pred)], vec![Shared, if parity { Value(B32) } else { Reg(B64) }])
        }
        Op::MbarrierTryWait { parity, hint, .. } => {
            let what = if parity { Value(B32) } else { Reg(B64) };
            (vec![Reg(Pred)], [Shared, what].into_iter().chain(opt(hint, Value(B32))).collect())
        }
        Op::BulkLoad { multicast, policy } => {
            let src = [Shared, Global, Value(B32), Shared].into_iter();
            (none(), src.chain(opt(multicast, Value(B16))).chain(opt(policy, Value(B64))).collect())
        }
        Op::BulkStore { policy } | Op::BulkReduce { policy, .. } => {
            (none(), [Global, Shared, Value(B32)].into_iter().chain(opt(policy, Value(B64))).collect())
        }
        Op::BulkToCluster | Op::BulkReduceCluster { .. } => {
            (none(), vec![Shared, Shared, Value(B32), Shared])
        }
        Op::BulkPrefetch { policy } => {
            (none(), [Global, Value(B32)].into_iter().chain(opt(policy, Value(B64))).collect())
        }
        Op::TensorLoad { dims, multicast, policy } => {
            let src =
                [Shared, Global].into_iter().chain(many(Value(B32), dims.count() as u32)).chain([Shared]);
            (none(), src.chain(opt(multicast, Value(B16))).chain(opt(policy, Value(B64))).collect())
        }
        Op::TensorStore { dims, policy } | Op::TensorReduce { dims, policy, .. } => {
            let src = [Global].into_iter().chain(many(Value(B32), dims.count() as u32)).chain([Shared]);
            (none(), src.chain(opt(policy, Value(B64))).collect())
        }
        Op::TensorPrefetch { dims, policy } => {
            let src = [Global].into_iter().chain(many(Value(B32), dims.count() as u32));
            (none(), src.chain(opt(policy, Value(B64))).collect())
        }
        Op::Wgmma(w) => {
            let a = if w.a_in_regs { many(Reg(B32), 4) } else { vec![Reg(B64)] };
            let src = a.into_iter().chain([Reg(B64), Value(Pred)]).collect();
            (many(Reg(acc_class(w.acc)), w.acc_regs() as u32), src)
        }
        Op::Mapa => (vec![Reg(B32)], vec![Reg(B32), Value(B32)]),
        Op::GetCtaRank => (vec![Reg(B32)], vec![Reg(B32)]),
        Op::StAsync { ty, width } => {
            let src = [Shared].into_iter().chain(many(Reg(mem_class(ty)), width.count())).chain([Shared]);
            (none(), src.collect())
        }
        Op::Label(_)
        | Op::Bra { .. }
        | Op::Exit
        | Op::Ret
        | Op::Trap
        | Op::Membar(_)
        | Op::Fence { .. }
        | Op::FenceProxyAsync(_)
        | Op::FenceMbarrierInit
        | Op::CpAsyncCommit
        | Op::CpAsyncWait(_)
        | Op::CpAsyncWaitAll
        | Op::BulkCommit
        | Op::BulkWait { .. }
        | Op::WgmmaFence
        | Op::WgmmaCommit
        | Op::WgmmaWait(_)
        | Op::SetMaxNReg { .. }
        | Op::ClusterArrive { .. }
        | Op::ClusterWait { .. }
        | Op::GridDepControl(_) => (none(), none()),
    }
}

/// PTX has no constants of packed halves.
fn atom_value(ty: AtomTy) -> Slot {
    match ty {
        AtomTy::F16 | AtomTy::Bf16 | AtomTy::F16x2 | AtomTy::Bf16x2 => Reg(atom_class(ty)),
        _ => Value(atom_class(ty)),
    }
}

/// Every operand of an instruction that its place does not accept.
pub(super) fn faults(kernel: &Kernel, inst: &Inst) -> Vec<Fault> {
    let (dst, src) = signature(inst);
    let fault = |operand: String, found: String, expected: String| Fault::Operand {
        syntax: inst.op.syntax(),
        operand,
        found,
        expected,
    };
    let mut faults = Vec::new();
    for (what, slots, args) in [("destination", &dst, &inst.dst), ("source", &src, &inst.src)] {
        if slots.len() != args.len() {
            let (found, expected) = (format!("one of {}", args.len()), format!("one of {}", slots.len()));
            faults.push(fault(what.to_owned(), found, expected));
            continue;
        }
        for (i, (slot, &arg)) in slots.iter().zip(args).enumerate() {
            if !slot.takes(kernel, arg) {
                faults.push(fault(format!("{what} {i}"), kernel.arg_name(arg), slot.expected()));
            }
        }
    }
    if let Some(guard) = inst.guard
        && kernel.reg(guard.reg.id()).map(|r| r.class) != Some(Pred)
    {
        faults.push(fault("guard".to_owned(), kernel.reg_name(guard.reg.id()), Reg(Pred).expected()));
    }
    faults
}
