//! Combinations of modifiers and constants that PTX forbids.
//!
//! What passes here, ptxas accepts: a test tries all combinations. A few that ptxas would accept are refused here
//! because they have no effect, such as a cache hint on a parameter.

use crate::inst::*;
use crate::modifiers::*;
use crate::types::Imm;

/// The constant in a source, if it is one.
fn constant(inst: &Inst, index: usize) -> Option<u64> {
    match inst.src.get(index) {
        Some(Arg::Imm(Imm { bits, .. })) => Some(*bits),
        _ => None,
    }
}

/// What PTX forbids in an instruction whose operands have the right types.
pub(super) fn faults(inst: &Inst) -> Vec<String> {
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
