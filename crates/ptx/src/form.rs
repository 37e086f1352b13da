//! The form of one instruction: which operands it has, and which combinations PTX forbids.
//!
//! The builder's types rule out most of what is refused here; the rest depends on values. Looking at finished
//! instructions, and not only at the builder's calls, covers modules that a test has edited, too.

use crate::error::Fault;
use crate::inst::*;
use crate::module::Kernel;
use crate::types::{Imm, RegClass, RegId};

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
        Op::MbarrierArrive { space, count } => {
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

/// Every fault in the form of an instruction.
pub(crate) fn faults(kernel: &Kernel, inst: &Inst) -> Vec<Fault> {
    let mut faults = operand_faults(kernel, inst);
    faults.extend(forbidden(inst).into_iter().map(Fault::Forbidden));
    faults
}

fn operand_faults(kernel: &Kernel, inst: &Inst) -> Vec<Fault> {
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

/// The constant in a source, if it is one.
fn constant(inst: &Inst, index: usize) -> Option<u64> {
    match inst.src.get(index) {
        Some(Arg::Imm(Imm { bits, .. })) => Some(*bits),
        _ => None,
    }
}

/// What PTX forbids in an instruction whose operands have the right types.
fn forbidden(inst: &Inst) -> Vec<String> {
    let mut faults = Vec::new();
    let mut refuse = |condition: bool, message: String| {
        if condition {
            faults.push(message);
        }
    };
    match inst.op {
        Op::Setp { cmp, ty } => {
            let float_only = !matches!(cmp, Cmp::Eq | Cmp::Ne | Cmp::Lt | Cmp::Le | Cmp::Gt | Cmp::Ge);
            refuse(float_only && ty != NumType::F32, format!("setp{} is for floats only", cmp.text()));
        }
        Op::Ld { space, ty, width, order, cache } => {
            memory(&mut refuse, space, ty, width, order, cache);
            refuse(matches!(order, Order::Release(_)), "a load cannot release".to_owned());
            let bad_op = matches!(cache.op, Some(CacheOp::Wb | CacheOp::Wt));
            refuse(bad_op, "the cache operators .wb and .wt are for stores".to_owned());
            refuse(cache.non_coherent && space != Space::Global, "ld.nc is for global memory".to_owned());
            refuse(
                cache.non_coherent && order != Order::Weak,
                "ld.nc has no memory order: the data may not change".to_owned(),
            );
            let bad_nc = cache.non_coherent && cache.op == Some(CacheOp::Lu);
            refuse(bad_nc, "ld.nc takes the cache operators .ca, .cg and .cs".to_owned());
            refuse(
                space == Space::Param && (order != Order::Weak || cache != CacheHint::default()),
                "a parameter is loaded without order or cache hint".to_owned(),
            );
        }
        Op::St { space, ty, width, order, cache } => {
            memory(&mut refuse, space, ty, width, order, cache);
            refuse(matches!(order, Order::Acquire(_)), "a store cannot acquire".to_owned());
            let bad_op = matches!(cache.op, Some(CacheOp::Ca | CacheOp::Lu));
            refuse(bad_op, "the cache operators .ca and .lu are for loads".to_owned());
            refuse(
                cache.non_coherent || cache.l2_prefetch.is_some(),
                "a store takes no .nc and no prefetch".to_owned(),
            );
            refuse(space == Space::Param, "a kernel cannot store to its parameters".to_owned());
            refuse(ty == MemTy::S8, "a byte is stored with .u8".to_owned());
        }
        Op::Atom { space, op, ty, .. } => {
            refuse(!atom_exists(op, ty), format!("atom has no {op:?} of {ty:?}"));
            refuse(space == Space::Param, "an atomic acts on global or shared memory".to_owned());
        }
        Op::Red { space, op, ty, width, sem, .. } => {
            let exchange = matches!(op, AtomOp::Exch | AtomOp::Cas);
            refuse(exchange || !atom_exists(op, ty), format!("red has no {op:?} of {ty:?}"));
            refuse(space == Space::Param, "an atomic acts on global or shared memory".to_owned());
            refuse(
                matches!(sem, AtomSem::Acquire | AtomSem::AcqRel),
                format!("red returns nothing, so it cannot be {sem:?}: it is Relaxed or Release"),
            );
            let vector = width != Width::V1;
            refuse(
                vector && (op, ty, space) != (AtomOp::Add, AtomTy::F32, Space::Global),
                "red of a vector adds floats to global memory".to_owned(),
            );
        }
        Op::Redux { op, ty } => {
            let exists = match op {
                AtomOp::Add | AtomOp::Min | AtomOp::Max => matches!(ty, AtomTy::U32 | AtomTy::S32),
                AtomOp::And | AtomOp::Or | AtomOp::Xor => ty == AtomTy::B32,
                _ => false,
            };
            refuse(!exists, format!("redux has no {op:?} of {ty:?}"));
        }
        Op::BarSync { .. } | Op::BarArrive { .. } => {
            let id = constant(inst, 0).unwrap_or(0);
            refuse(id > 15, format!("barrier {id}: a block has barriers 0 to 15"));
            let threads = constant(inst, 1).unwrap_or(32);
            refuse(
                threads == 0 || !threads.is_multiple_of(32) || threads > 1024,
                format!(
                    "a barrier of {threads} threads: the number must be a multiple of 32 from 32 to 1024"
                ),
            );
        }
        Op::CpAsync { cache, bytes, src_size, .. } => {
            refuse(
                cache == CpAsyncCache::Cg && bytes != CpAsyncBytes::B16,
                format!("cp.async.cg copies 16 bytes, not {}", bytes.text()),
            );
            let read = constant(inst, 2).filter(|_| src_size).unwrap_or(0);
            let copied = u64::from(bytes.count());
            refuse(read > copied, format!("cp.async reads {read} bytes, but copies only {copied}"));
        }
        Op::Mma { shape, a, b, acc } => {
            let bits = if shape == MmaShape::M16n8k32 { 8 } else { 16 };
            let fits = a.bits() == bits && b.bits() == bits && (bits == 8 || a == b);
            refuse(!fits, format!("mma.sync{} has no {a:?} by {b:?}", shape.text()));
            refuse(
                acc == AccTy::F16 && a == MatrixTy::Bf16,
                "mma.sync of bf16 accumulates in f32 only".to_owned(),
            );
        }
        Op::MbarrierInit => {
            let arrivals = constant(inst, 1).unwrap_or(1);
            let most = (1 << 20) - 1;
            refuse(
                arrivals == 0 || arrivals > most,
                format!("an mbarrier for {arrivals} arrivals: the number must be from 1 to {most}"),
            );
        }
        Op::MbarrierArrive { space, .. }
        | Op::MbarrierArriveExpectTx { space }
        | Op::MbarrierExpectTx { space } => {
            mbarrier_space(&mut refuse, space);
            let state = inst.dst.first().is_some_and(|d| *d != Arg::Sink);
            refuse(
                space == Space::SharedCluster && state,
                "an arrival at another block's mbarrier returns no state".to_owned(),
            );
        }
        Op::MbarrierTestWait { parity, scope } | Op::MbarrierTryWait { parity, scope, .. } => {
            let known = matches!(scope, Scope::Cta | Scope::Cluster);
            refuse(!known, format!("an mbarrier wait of scope {scope:?}: it is Cta or Cluster"));
            let bit = constant(inst, 1).filter(|_| parity).unwrap_or(0);
            refuse(bit > 1, format!("an mbarrier's parity is 0 or 1, not {bit}"));
        }
        Op::BulkLoad { .. } | Op::BulkStore { .. } | Op::BulkToCluster => {
            bulk_bytes(&mut refuse, constant(inst, 2));
        }
        Op::BulkPrefetch { .. } => bulk_bytes(&mut refuse, constant(inst, 1)),
        Op::BulkReduce { op, ty, .. } => {
            bulk_bytes(&mut refuse, constant(inst, 2));
            refuse(
                !bulk_reduce_exists(op, ty),
                format!("cp.reduce.async.bulk to global memory has no {op:?} of {ty:?}"),
            );
        }
        Op::BulkReduceCluster { op, ty } => {
            bulk_bytes(&mut refuse, constant(inst, 2));
            let exists = match op {
                AtomOp::Add => matches!(ty, AtomTy::U32 | AtomTy::S32 | AtomTy::U64),
                AtomOp::Min | AtomOp::Max => matches!(ty, AtomTy::U32 | AtomTy::S32),
                AtomOp::And | AtomOp::Or | AtomOp::Xor => ty == AtomTy::B32,
                AtomOp::Inc | AtomOp::Dec => ty == AtomTy::U32,
                AtomOp::Exch | AtomOp::Cas => false,
            };
            refuse(!exists, format!("cp.reduce.async.bulk to shared memory has no {op:?} of {ty:?}"));
        }
        Op::TensorReduce { op, .. } => {
            let exchange = matches!(op, AtomOp::Exch | AtomOp::Cas);
            refuse(exchange, format!("cp.reduce.async.bulk.tensor has no {op:?}"));
        }
        Op::Wgmma(w) => faults.extend(wgmma(&w)),
        Op::WgmmaWait(pending) => {
            refuse(pending > 7, format!("wgmma.wait_group {pending}: the number must be from 0 to 7"));
        }
        Op::SetMaxNReg { count, .. } => refuse(
            !(24..=256).contains(&count) || !count.is_multiple_of(8),
            format!("setmaxnreg {count}: the number must be a multiple of 8 from 24 to 256"),
        ),
        Op::StAsync { ty, width } => {
            let exists = matches!(ty, MemTy::B32 | MemTy::B64 | MemTy::F32);
            refuse(!exists, format!("st.async has no {ty:?}"));
            vector_width(&mut refuse, ty, width);
        }
        _ => {}
    }
    faults
}

type Refuse<'a> = dyn FnMut(bool, String) + 'a;

/// Rules that loads and stores share.
fn memory(refuse: &mut Refuse<'_>, space: Space, ty: MemTy, width: Width, order: Order, cache: CacheHint) {
    vector_width(refuse, ty, width);
    let hinted = cache.l1.is_some() || cache.l2_prefetch.is_some() || cache.policy;
    refuse(
        hinted && space != Space::Global,
        "eviction priorities, prefetch and policies are for global memory".to_owned(),
    );
    refuse(
        cache.op.is_some() && cache.l1.is_some(),
        "a cache operator and an L1 eviction priority exclude each other".to_owned(),
    );
    refuse(
        order != Order::Weak && cache.op.is_some(),
        "a cache operator is for accesses without a memory order".to_owned(),
    );
    refuse(order == Order::Volatile && hinted, "a volatile access takes no cache hint".to_owned());
}

fn vector_width(refuse: &mut Refuse<'_>, ty: MemTy, width: Width) {
    let bytes = ty.bytes() * width.count();
    refuse(
        bytes > 16,
        format!("{} elements of {} bytes: an access moves at most 16", width.count(), ty.bytes()),
    );
}

fn mbarrier_space(refuse: &mut Refuse<'_>, space: Space) {
    let known = matches!(space, Space::Shared | Space::SharedCluster);
    refuse(!known, "an mbarrier is in shared memory".to_owned());
}

fn bulk_bytes(refuse: &mut Refuse<'_>, bytes: Option<u64>) {
    if let Some(n) = bytes {
        refuse(
            n == 0 || n % 16 != 0,
            format!("a bulk copy of {n} bytes: the number must be a multiple of 16"),
        );
    }
}

fn atom_exists(op: AtomOp, ty: AtomTy) -> bool {
    use AtomTy::{Bf16x2, F16x2, S32, S64, U32, U64};
    match op {
        AtomOp::Add => matches!(ty, U32 | S32 | U64 | AtomTy::F32 | F16x2 | Bf16x2),
        AtomOp::Min | AtomOp::Max => matches!(ty, U32 | S32 | U64 | S64),
        AtomOp::And | AtomOp::Or | AtomOp::Xor | AtomOp::Exch | AtomOp::Cas => {
            matches!(ty, AtomTy::B32 | AtomTy::B64)
        }
        AtomOp::Inc | AtomOp::Dec => ty == U32,
    }
}

fn bulk_reduce_exists(op: AtomOp, ty: AtomTy) -> bool {
    use AtomTy::{Bf16, F16, S32, S64, U32, U64};
    match op {
        AtomOp::Add => matches!(ty, U32 | S32 | U64 | AtomTy::F32 | F16 | Bf16),
        AtomOp::Min | AtomOp::Max => matches!(ty, U32 | S32 | U64 | S64 | F16 | Bf16),
        AtomOp::And | AtomOp::Or | AtomOp::Xor => matches!(ty, AtomTy::B32 | AtomTy::B64),
        AtomOp::Inc | AtomOp::Dec => ty == U32,
        AtomOp::Exch | AtomOp::Cas => false,
    }
}

fn wgmma(w: &Wgmma) -> Vec<String> {
    let mut faults = Vec::new();
    let mut refuse = |condition: bool, message: String| {
        if condition {
            faults.push(message);
        }
    };
    let n_exists = (8..=256).contains(&w.n) && w.n.is_multiple_of(8);
    refuse(!n_exists, format!("wgmma of n = {}: n must be a multiple of 8 from 8 to 256", w.n));
    let fp8 = w.a.bits() == 8;
    refuse(w.a.bits() != w.b.bits() || (!fp8 && w.a != w.b), format!("wgmma has no {:?} by {:?}", w.a, w.b));
    refuse(w.a == MatrixTy::Bf16 && w.acc == AccTy::F16, "wgmma of bf16 accumulates in f32 only".to_owned());
    refuse(
        fp8 && (w.trans_a || w.trans_b),
        "wgmma of fp8 cannot transpose: both operands must be K-major".to_owned(),
    );
    refuse(w.a_in_regs && w.trans_a, "wgmma with A in registers cannot transpose A".to_owned());
    faults
}
