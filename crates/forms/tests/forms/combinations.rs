//! All combinations of an instruction's modifiers: what the checker accepts, ptxas accepts.

use flashcore_ptx::*;

use crate::ptxas;
use flashcore_forms::{Fixture, fixture, register};

/// An instruction of some family, whether PTX has it or not.
struct Candidate {
    op: Op,
    dst: Vec<RegClass>,
    src: Vec<Arg>,
}

fn options<T: Copy>(all: &[T]) -> Vec<Option<T>> {
    std::iter::once(None).chain(all.iter().copied().map(Some)).collect()
}

fn address(x: Fixture, space: Space) -> Arg {
    match space {
        Space::Global => x.rd.at(0).into(),
        Space::Shared => x.tile.at(0).into(),
        Space::SharedCluster => x.r.at(0).into(),
        Space::Param => Arg::Mem { base: MemBase::Param(1), offset: 0 },
    }
}

fn mem_class(ty: MemTy) -> RegClass {
    match ty {
        MemTy::B16 => RegClass::B16,
        MemTy::B64 => RegClass::B64,
        MemTy::F32 => RegClass::F32,
        MemTy::U8 | MemTy::S8 | MemTy::B32 => RegClass::B32,
    }
}

fn atom_class(ty: AtomTy) -> RegClass {
    match ty {
        AtomTy::F32 => RegClass::F32,
        _ => match ty.bytes() {
            2 => RegClass::B16,
            4 => RegClass::B32,
            _ => RegClass::B64,
        },
    }
}

/// Every cache hint.
fn hints() -> Vec<CacheHint> {
    let mut hints = Vec::new();
    for op in options(CacheOp::ALL) {
        for l1 in options(L1Evict::ALL) {
            for l2_prefetch in options(L2Prefetch::ALL) {
                for (non_coherent, policy) in [(false, false), (false, true), (true, false), (true, true)] {
                    hints.push(CacheHint { op, non_coherent, l1, l2_prefetch, policy });
                }
            }
        }
    }
    hints
}

const ORDERS: [Order; 6] = [
    Order::Weak,
    Order::Volatile,
    Order::Relaxed(Scope::Gpu),
    Order::Acquire(Scope::Gpu),
    Order::Release(Scope::Gpu),
    Order::Relaxed(Scope::Cta),
];

fn loads_and_stores(x: Fixture) -> Vec<Candidate> {
    let mut all = Vec::new();
    let mut both = |space, ty, width: Width, order, cache: CacheHint| {
        let class = mem_class(ty);
        let policy = cache.policy.then(|| x.rd.into());
        let values = vec![register(x, class); width.count() as usize];
        all.push(Candidate {
            op: Op::Ld { space, ty, width, order, cache },
            dst: vec![class; width.count() as usize],
            src: std::iter::once(address(x, space)).chain(policy).collect(),
        });
        all.push(Candidate {
            op: Op::St { space, ty, width, order, cache },
            dst: Vec::new(),
            src: std::iter::once(address(x, space)).chain(values).chain(policy).collect(),
        });
    };
    for order in ORDERS {
        for cache in hints() {
            both(Space::Global, MemTy::B32, Width::V4, order, cache);
        }
        for &space in Space::ALL {
            for &ty in MemTy::ALL {
                for &width in Width::ALL {
                    both(space, ty, width, order, CacheHint::default());
                }
            }
            for &op in CacheOp::ALL {
                both(space, MemTy::F32, Width::V1, order, CacheHint { op: Some(op), ..CacheHint::default() });
            }
            for non_coherent in [false, true] {
                let cache = CacheHint { non_coherent, policy: !non_coherent, ..CacheHint::default() };
                both(space, MemTy::F32, Width::V1, order, cache);
            }
        }
    }
    all
}

fn atomics(x: Fixture) -> Vec<Candidate> {
    let mut all = Vec::new();
    for &space in Space::ALL {
        for &op in AtomOp::ALL {
            for &ty in AtomTy::ALL {
                let class = atom_class(ty);
                for &sem in AtomSem::ALL {
                    for scope in [Scope::Gpu, Scope::Cluster] {
                        let count = if op == AtomOp::Cas { 2 } else { 1 };
                        let values = vec![register(x, class); count];
                        all.push(Candidate {
                            op: Op::Atom { space, op, ty, sem, scope },
                            dst: vec![class],
                            src: std::iter::once(address(x, space)).chain(values).collect(),
                        });
                    }
                    for &width in Width::ALL {
                        let values = vec![register(x, class); width.count() as usize];
                        all.push(Candidate {
                            op: Op::Red { space, op, ty, width, sem, scope: Scope::Gpu },
                            dst: Vec::new(),
                            src: std::iter::once(address(x, space)).chain(values).collect(),
                        });
                    }
                }
            }
        }
    }
    all
}

fn reductions(x: Fixture) -> Vec<Candidate> {
    let mut all = Vec::new();
    let (global, shared) = (address(x, Space::Global), address(x, Space::Shared));
    let (cluster, bytes) = (address(x, Space::SharedCluster), Arg::from(x.r));
    for &op in AtomOp::ALL {
        for &ty in AtomTy::ALL {
            let redux = Op::Redux { op, ty };
            all.push(Candidate { op: redux, dst: vec![RegClass::B32], src: vec![x.r.into(), x.r.into()] });
            let bulk = Op::BulkReduce { op, ty, policy: false };
            all.push(Candidate { op: bulk, dst: Vec::new(), src: vec![global, shared, bytes] });
            let remote = Op::BulkReduceCluster { op, ty };
            all.push(Candidate { op: remote, dst: Vec::new(), src: vec![cluster, shared, bytes, cluster] });
        }
        let tensor = Op::TensorReduce { op, dims: Dims::D1, policy: false };
        all.push(Candidate { op: tensor, dst: Vec::new(), src: vec![global, x.r.into(), shared] });
    }
    all
}

fn comparisons_and_copies(x: Fixture) -> Vec<Candidate> {
    let mut all = Vec::new();
    for &cmp in Cmp::ALL {
        for &ty in NumType::ALL {
            let class = match ty {
                NumType::S16 | NumType::U16 => RegClass::B16,
                NumType::S32 | NumType::U32 => RegClass::B32,
                NumType::S64 | NumType::U64 => RegClass::B64,
                NumType::F32 => RegClass::F32,
            };
            let src = vec![register(x, class); 2];
            all.push(Candidate { op: Op::Setp { cmp, ty }, dst: vec![RegClass::Pred], src });
        }
    }
    for &cache in CpAsyncCache::ALL {
        for &bytes in CpAsyncBytes::ALL {
            for l2_prefetch in options(L2Prefetch::ALL) {
                for (src_size, policy) in [(false, false), (false, true), (true, false), (true, true)] {
                    let mut src = vec![address(x, Space::Shared), address(x, Space::Global)];
                    src.extend(src_size.then(|| Arg::from(x.r)));
                    src.extend(policy.then(|| Arg::from(x.rd)));
                    let op = Op::CpAsync { cache, bytes, l2_prefetch, src_size, policy };
                    all.push(Candidate { op, dst: Vec::new(), src });
                }
            }
        }
    }
    for &ty in MemTy::ALL {
        for &width in Width::ALL {
            let mut src = vec![address(x, Space::SharedCluster)];
            src.extend(vec![register(x, mem_class(ty)); width.count() as usize]);
            src.push(address(x, Space::SharedCluster));
            all.push(Candidate { op: Op::StAsync { ty, width }, dst: Vec::new(), src });
        }
    }
    all
}

fn tensor_cores(x: Fixture) -> Vec<Candidate> {
    let mut all = Vec::new();
    for &a in MatrixTy::ALL {
        for &b in MatrixTy::ALL {
            for &acc in AccTy::ALL {
                let class = if acc == AccTy::F32 { RegClass::F32 } else { RegClass::B32 };
                for &shape in MmaShape::ALL {
                    let inputs = if shape == MmaShape::M16n8k8 { 3 } else { 6 };
                    let accs = if acc == AccTy::F32 { 4 } else { 2 };
                    let mut src = vec![Arg::from(x.r); inputs];
                    src.extend(vec![register(x, class); accs]);
                    all.push(Candidate { op: Op::Mma { shape, a, b, acc }, dst: vec![class; accs], src });
                }
                for bits in 0..32u32 {
                    let flag = |i: u32| bits >> i & 1 == 1;
                    let spec = Wgmma {
                        n: 16,
                        a,
                        b,
                        acc,
                        a_in_regs: flag(0),
                        negate_a: flag(1),
                        negate_b: flag(2),
                        trans_a: flag(3),
                        trans_b: flag(4),
                    };
                    let mut src =
                        if spec.a_in_regs { vec![Arg::from(x.r); 4] } else { vec![Arg::from(x.rd)] };
                    src.extend([Arg::from(x.rd), Operand::<Pred>::from(false).into()]);
                    all.push(Candidate { op: Op::Wgmma(spec), dst: vec![class; spec.acc_regs()], src });
                }
            }
        }
    }
    all
}

/// The fixture's kernel with some instructions after it.
fn kernel_of<'c>(candidates: impl IntoIterator<Item = &'c Candidate>) -> Kernel {
    let (mut k, _) = fixture("combinations", Target::Sm90a);
    k.nanosleep(1);
    let mut kernel = k.finish().expect("the fixture is well formed");
    let (end, template) = (kernel.body.pop(), kernel.body.pop().expect("it was emitted"));
    for candidate in candidates {
        let dst = candidate.dst.iter().map(|&class| {
            let number = kernel.regs.iter().rev().find(|r| r.class == class).map_or(0, |r| r.number + 1);
            kernel.regs.push(RegInfo { class, number });
            Arg::Reg(RegId(kernel.regs.len() as u32 - 1))
        });
        let dst = dst.collect();
        kernel.body.push(Inst { op: candidate.op, dst, src: candidate.src.clone(), ..template.clone() });
    }
    kernel.body.extend(end);
    kernel
}

/// Whether the checker accepts the form of an instruction; faults of the code around it do not count.
fn is_taken(candidate: &Candidate) -> bool {
    let faults = check::kernel(&kernel_of([candidate]), Target::Sm90a);
    !faults.iter().any(|e| matches!(e.fault, Fault::Forbidden(_) | Fault::Operand { .. }))
}

fn all_candidates() -> Vec<Candidate> {
    let (_, x) = fixture("any", Target::Sm90a);
    let families = [loads_and_stores, atomics, reductions, comparisons_and_copies, tensor_cores];
    families.iter().flat_map(|family| family(x)).collect()
}

#[test]
fn every_combination_that_the_checker_takes_ptxas_takes() {
    let Some(ptxas) = ptxas() else { return };
    let candidates = all_candidates();
    let taken: Vec<&Candidate> = candidates.iter().filter(|c| is_taken(c)).collect();
    assert!(taken.len() > 1900, "only {} of {}", taken.len(), candidates.len());
    assert!(taken.len() < candidates.len() / 4, "{} of {}", taken.len(), candidates.len());
    let module = Module::new(Target::Sm90a).with(kernel_of(taken));
    let refused = ptxas.assemble(&module, Target::Sm90a).err().map(|error| error.to_string());
    assert_eq!(refused, None);
}
