//! Every form of every instruction of the table, each in a small kernel of its own. The tests of this crate give them to
//! ptxas and to an independent parser.
//!
//! A separate crate, because that parser is large, and needs other features of common crates than the rest of the
//! workspace does.

use flashcore_ptx::table::{COMPARISONS, OperandSpec};
use flashcore_ptx::*;

kernel_params! {
    /// What the small kernels are given.
    pub struct FormParams {
        /// A place to read and write.
        data: GlobalPtr,
        /// A word.
        word: u32,
        /// A tensor map.
        map: TensorMap,
    }
}

/// One form: a kernel for the newest target, and which of its instructions is the one tested.
pub struct Form {
    /// The kernel.
    pub kernel: Kernel,
    /// Where in its body the instruction is.
    pub main: usize,
}

impl Form {
    /// The instruction that is tested.
    pub fn inst(&self) -> &Inst {
        &self.kernel.body[self.main]
    }

    /// That instruction as text.
    pub fn text(&self) -> String {
        self.kernel.line(self.inst())
    }
}

/// Registers of every type, written, and shared memory.
#[derive(Clone, Copy)]
pub struct Fixture {
    /// A predicate.
    pub p: Reg<Pred>,
    /// Half a word.
    pub h: Reg<B16>,
    /// A word.
    pub r: Reg<B32>,
    /// A double word: an address.
    pub rd: Reg<B64>,
    /// A float.
    pub f: Reg<F32>,
    /// A barrier.
    pub bar: Shared,
    /// A tile.
    pub tile: Shared,
}

impl Fixture {
    fn cluster(self) -> ClusterAddr {
        ClusterAddr(self.r)
    }
}

/// The mark that a form puts on its main instruction where that is not the first.
const MAIN: &str = "main";

/// A builder with the fixture's registers written, for the target.
pub fn fixture(name: &str, target: Target) -> (KernelBuilder, Fixture) {
    let mut smem = SharedLayout::new();
    let bar = smem.alloc("bar", 8, 8);
    let tile = smem.alloc("tile", 4096, 1024);
    let mut k = KernelBuilder::new(name, target).params::<FormParams>().shared(smem).threads(128);
    let rd = k.param(FormParams::data);
    let r = k.param(FormParams::word);
    let p = k.setp_ne_u32(r, 0);
    let h = k.cvt_u16_u32(r);
    let f = k.f32_from_bits(r);
    (k, Fixture { p, h, r, rd, f, bar, tile })
}

/// Collects forms.
struct Forms(Vec<Form>);

impl Forms {
    /// A form that the closure emits.
    fn add(&mut self, emit: impl FnOnce(&mut KernelBuilder, Fixture)) {
        let name = format!("form_{}", self.0.len());
        let (mut k, fixture) = fixture(&name, Target::Sm90a);
        k.section("form");
        emit(&mut k, fixture);
        let kernel = k.finish().unwrap_or_else(|errors| panic!("{errors}"));
        let marked = kernel.body.iter().position(|i| i.comment.as_deref() == Some(MAIN));
        let first = kernel.body.iter().position(|i| i.section.is_some() && !matches!(i.op, Op::Label(_)));
        let main = marked.or(first).expect("the form emits something");
        self.0.push(Form { kernel, main });
    }

    /// A form given as an instruction.
    fn add_inst(&mut self, op: Op, dst: &[RegClass], src: impl Fn(Fixture) -> Vec<Arg>) {
        self.add(|k, x| {
            k.comment(MAIN);
            k.mov_b32(x.r);
        });
        let Form { kernel, main } = self.0.last_mut().expect("just added");
        let x = first_fixture(kernel);
        let dst = dst.iter().map(|&class| {
            let number = kernel.regs.iter().filter(|r| r.class == class).count() as u32;
            kernel.regs.push(RegInfo { class, number });
            Arg::Reg(RegId(kernel.regs.len() as u32 - 1))
        });
        let dst: Vec<Arg> = dst.collect();
        let inst = &mut kernel.body[*main];
        (inst.op, inst.dst, inst.src) = (op, dst, src(x));
        let faults = check::kernel(kernel, Target::Sm90a);
        assert!(faults.is_empty(), "{}: {faults:?}", kernel.line(&kernel.body[*main]));
    }
}

/// The fixture of a finished kernel: its registers are the first of the kernel.
fn first_fixture(kernel: &Kernel) -> Fixture {
    let (_, fixture) = fixture(&kernel.name, Target::Sm90a);
    fixture
}

/// A register of the fixture, of a class.
pub fn register(x: Fixture, class: RegClass) -> Arg {
    match class {
        RegClass::Pred => x.p.into(),
        RegClass::B16 => x.h.into(),
        RegClass::B32 => x.r.into(),
        RegClass::B64 => x.rd.into(),
        RegClass::F32 => x.f.into(),
    }
}

fn constant(class: RegClass) -> Arg {
    Arg::Imm(Imm { class, bits: if class == RegClass::F32 { 0x3fc0_0000 } else { 1 } })
}

/// Every form.
pub fn all_forms() -> Vec<Form> {
    let mut forms = Forms(Vec::new());
    plain(&mut forms);
    control(&mut forms);
    memory(&mut forms);
    atomics(&mut forms);
    lanes(&mut forms);
    barriers(&mut forms);
    lane_copies(&mut forms);
    warp_tensor(&mut forms);
    mbarriers(&mut forms);
    bulk(&mut forms);
    warpgroup(&mut forms);
    clusters(&mut forms);
    forms.0
}

fn plain(forms: &mut Forms) {
    for &alu in Alu::ALL {
        let line = alu.line();
        let source = |x, spec: &OperandSpec, prefer_constant: bool| {
            let constant_here = spec.constant_only || (prefer_constant && !spec.register_only);
            if constant_here { constant(spec.class) } else { register(x, spec.class) }
        };
        forms.add_inst(Op::Alu(alu), &[line.dst], |x| line.src.iter().map(|s| source(x, s, false)).collect());
        // Each operand that may be a constant, as one.
        for (i, spec) in line.src.iter().enumerate() {
            if !spec.register_only && !spec.constant_only {
                forms.add_inst(Op::Alu(alu), &[line.dst], |x| {
                    line.src.iter().enumerate().map(|(j, s)| source(x, s, i == j)).collect()
                });
            }
        }
    }
    for &(cmp, ty) in COMPARISONS {
        let class = match ty {
            NumType::S16 | NumType::U16 => RegClass::B16,
            NumType::S32 | NumType::U32 => RegClass::B32,
            NumType::S64 | NumType::U64 => RegClass::B64,
            NumType::F32 => RegClass::F32,
        };
        let op = Op::Setp { cmp, ty };
        forms.add_inst(op, &[RegClass::Pred], |x| vec![register(x, class), register(x, class)]);
        forms.add_inst(op, &[RegClass::Pred], |x| vec![register(x, class), constant(class)]);
    }
    for &special in Special::ALL {
        let class = if special.is_64_bit() { RegClass::B64 } else { RegClass::B32 };
        forms.add_inst(Op::MovSpecial(special), &[class], |_| Vec::new());
    }
    forms.add(|k, x| _ = k.pack_b64(x.r, 7));
    forms.add(|k, x| _ = k.unpack_b64(x.rd));
    forms.add(|k, x| _ = k.pack_b32(x.h, 7u16));
    forms.add(|k, x| _ = k.unpack_b32(x.r));
    forms.add(|k, x| _ = k.shared_addr(x.tile.at(64)));
    forms.add(|k, _| _ = k.tensor_map(FormParams::map));
    for &space in Space::ALL {
        forms.add(|k, x| _ = k.cvta(space, true, x.rd));
        forms.add(|k, x| _ = k.cvta(space, false, x.rd));
    }
    for &evict in L2Evict::ALL {
        forms.add(|k, _| _ = k.create_policy(evict));
    }
    forms.add(|k, _| k.nanosleep(20));
    forms.add(|k, x| k.nanosleep(x.r));
}

fn control(forms: &mut Forms) {
    forms.add(|k, x| k.if_(x.p, |k| k.nanosleep(1)));
    forms.add(|k, x| k.if_else(!x.p, |k| k.nanosleep(1), |k| k.nanosleep(2)));
    forms.add(|k, x| k.loop_(|k, l| k.break_if(l, x.p)));
    forms.add(|k, x| {
        k.for_s32(0, x.r, 2, |k, _, l| {
            k.continue_if(l, x.p);
            k.nanosleep(1);
        });
    });
    forms.add(|k, x| k.when(x.p, KernelBuilder::exit));
    forms.add(|k, x| k.when(!x.p, KernelBuilder::ret));
    forms.add(|k, x| k.when(x.p, KernelBuilder::trap));
}

fn memory(forms: &mut Forms) {
    forms.add(|k, _| _ = k.param(FormParams::word));
    macro_rules! widths {
        ($class:ident, $field:ident, $($n:literal),*) => {$(
            forms.add(|k, x| _ = k.ld_global_vec::<$class, $n>(x.rd.at(16)));
            forms.add(|k, x| _ = k.ld_shared_vec::<$class, $n>(x.tile.at(16)));
            forms.add(|k, x| _ = k.ld_shared_vec::<$class, $n>(x.r.at(-16)));
            forms.add(|k, x| _ = k.ld_cluster::<$class, $n>(x.cluster()));
            forms.add(|k, x| k.st_global_vec(x.rd.at(16), [x.$field; $n]));
            forms.add(|k, x| k.st_shared_vec(x.tile.at(16), [x.$field; $n]));
            forms.add(|k, x| k.st_shared_vec(x.r.at(16), [x.$field; $n]));
            forms.add(|k, x| k.st_cluster(x.cluster(), [x.$field; $n]));
        )*};
    }
    widths!(B16, h, 1, 2, 4);
    widths!(B32, r, 1, 2, 4);
    widths!(B64, rd, 1, 2);
    widths!(F32, f, 1, 2, 4);
    forms.add(|k, x| _ = k.ld_global_u8(x.rd));
    forms.add(|k, x| _ = k.ld_global_s8(x.rd));
    forms.add(|k, x| _ = k.ld_shared_u8(x.tile));
    forms.add(|k, x| k.st_global_u8(x.rd, x.r));
    forms.add(|k, x| k.st_shared_u8(x.tile, x.r));
    forms.add(|k, x| k.st_global::<B32>(x.rd, 3));
    forms.add(|k, x| k.st_shared::<F32>(x.tile, 1.5));
    forms.add(|k, x| k.st_global::<B64>(x.rd, 3));
    forms.add(|k, x| k.st_global::<B16>(x.rd, 3u16));

    let plain = MemHint::new();
    let mut loads = vec![plain.nc()];
    for op in [CacheOp::Ca, CacheOp::Cg, CacheOp::Cs] {
        loads.extend([plain.cache(op), plain.cache(op).nc()]);
        loads.push(plain.cache(op).nc().l2_prefetch(L2Prefetch::B128));
    }
    loads.push(plain.cache(CacheOp::Lu));
    for &evict in L1Evict::ALL {
        loads.extend([plain.l1(evict), plain.nc().l1(evict)]);
        loads.push(plain.nc().l1(evict).l2_prefetch(L2Prefetch::B256));
    }
    for &size in L2Prefetch::ALL {
        loads.extend([plain.l2_prefetch(size), plain.nc().l2_prefetch(size)]);
    }
    for &scope in Scope::ALL {
        loads.extend([plain.order(Order::Relaxed(scope)), plain.order(Order::Acquire(scope))]);
    }
    loads.push(plain.order(Order::Volatile));
    loads.push(plain.order(Order::Relaxed(Scope::Gpu)).l1(L1Evict::NoAllocate));
    for hint in loads {
        forms.add(|k, x| _ = k.ld_global_vec_hint::<B32, 4>(x.rd, hint));
        forms.add(|k, x| _ = k.ld_global_hint::<F32>(x.rd, hint));
    }
    forms.add(|k, x| _ = k.ld_global_hint::<F32>(x.rd, MemHint::new().policy(x.rd)));
    forms.add(|k, x| _ = k.ld_global_hint::<B32>(x.rd, MemHint::new().nc().l1(L1Evict::First).policy(x.rd)));
    forms.add(|k, x| {
        let hint = MemHint::new().nc().l1(L1Evict::NoAllocate).policy(0x1000_0000_0000_0000u64);
        _ = k.ld_global_vec_hint::<B32, 4>(x.rd, hint.l2_prefetch(L2Prefetch::B256));
    });

    let mut stores = Vec::new();
    for op in [CacheOp::Cg, CacheOp::Cs, CacheOp::Wb, CacheOp::Wt] {
        stores.push(plain.cache(op));
    }
    for &evict in L1Evict::ALL {
        stores.push(plain.l1(evict));
    }
    for &scope in Scope::ALL {
        stores.extend([plain.order(Order::Relaxed(scope)), plain.order(Order::Release(scope))]);
    }
    stores.push(plain.order(Order::Volatile));
    for hint in stores {
        forms.add(|k, x| k.st_global_vec_hint(x.rd, [x.r; 4], hint));
        forms.add(|k, x| k.st_global_hint::<F32>(x.rd, x.f, hint));
    }
    forms.add(|k, x| k.st_global_hint::<F32>(x.rd, x.f, MemHint::new().policy(x.rd)));
    forms.add(|k, x| k.st_global_hint::<F32>(x.rd, x.f, MemHint::new().l1(L1Evict::First).policy(x.rd)));
    for &level in PrefetchLevel::ALL {
        forms.add(|k, x| k.prefetch_global(level, x.rd.at(128)));
    }
}

fn atomics(forms: &mut Forms) {
    fn class(ty: AtomTy) -> RegClass {
        match ty {
            AtomTy::F32 => RegClass::F32,
            _ if ty.bytes() == 8 => RegClass::B64,
            _ => RegClass::B32,
        }
    }
    let exchanges =
        [AtomOp::Exch, AtomOp::Cas].into_iter().flat_map(|op| [(op, AtomTy::B32), (op, AtomTy::B64)]);
    let all: Vec<_> = ATOMICS.iter().copied().chain(exchanges).collect();
    let mem = |x: Fixture, space| match space {
        Space::Global => Arg::from(x.rd.at(8)),
        Space::Shared => x.tile.at(8).into(),
        _ => x.r.at(0).into(),
    };
    for space in [Space::Global, Space::Shared, Space::SharedCluster] {
        for &(op, ty) in &all {
            let class = class(ty);
            for (sem, scope) in [(AtomSem::Relaxed, Scope::Gpu), (AtomSem::Release, Scope::Cluster)] {
                let count = if op == AtomOp::Cas { 2 } else { 1 };
                forms.add_inst(Op::Atom { space, op, ty, sem, scope }, &[class], |x| {
                    let mut src = vec![mem(x, space)];
                    src.extend(vec![register(x, class); count]);
                    src
                });
                if op != AtomOp::Exch && op != AtomOp::Cas {
                    let width = Width::V1;
                    forms.add_inst(Op::Red { space, op, ty, width, sem, scope }, &[], |x| {
                        vec![mem(x, space), register(x, class)]
                    });
                }
            }
        }
    }
    for &sem in AtomSem::ALL {
        for &scope in Scope::ALL {
            forms.add(|k, x| _ = k.atom_add_u32(sem, scope, x.rd, 1));
            forms.add(|k, x| _ = k.atom_add_f32(sem, scope, x.tile, 1.0));
        }
    }
    forms.add(|k, x| _ = k.atom_cas_b32(AtomSem::AcqRel, Scope::Gpu, x.rd, 0, 1));
    forms.add(|k, x| _ = k.atom_cas_b64(AtomSem::AcqRel, Scope::Gpu, x.rd, 0, x.rd));
    forms.add(|k, x| _ = k.atom_exch_b32(AtomSem::Relaxed, Scope::Cta, x.r, 1));
    forms.add(|k, x| _ = k.atom_exch_b64(AtomSem::Relaxed, Scope::Cta, x.rd, x.rd));
    forms.add(|k, x| k.red_add_u32(AtomSem::Release, Scope::Sys, x.rd, 1));
    forms.add(|k, x| k.red_add_vec_f32(AtomSem::Relaxed, Scope::Gpu, x.rd, [x.f; 2]));
    forms.add(|k, x| k.red_add_vec_f32(AtomSem::Relaxed, Scope::Gpu, x.rd, [x.f; 4]));
}

fn lanes(forms: &mut Forms) {
    for &mode in ShflMode::ALL {
        forms.add(|k, x| _ = k.shfl(mode, x.f, 1));
        forms.add(|k, x| _ = k.shfl(mode, x.r, x.r));
        forms.add(|k, x| _ = k.shfl_with(mode, x.r, x.r, x.r, x.r));
    }
    for &mode in VoteMode::ALL {
        forms.add(|k, x| _ = k.vote(mode, x.p, FULL_MASK));
        forms.add(|k, x| _ = k.vote(mode, x.p, x.r));
    }
    forms.add(|k, x| _ = k.ballot(x.p, FULL_MASK));
    for &mode in MatchMode::ALL {
        forms.add(|k, x| _ = k.match_b32(mode, x.r, FULL_MASK));
    }
    forms.add(|k, x| _ = k.redux_add_u32(x.r, FULL_MASK));
    forms.add(|k, x| _ = k.redux_min_u32(x.r, FULL_MASK));
    forms.add(|k, x| _ = k.redux_max_u32(x.r, x.r));
    forms.add(|k, x| _ = k.redux_add_s32(x.r, FULL_MASK));
    forms.add(|k, x| _ = k.redux_min_s32(x.r, FULL_MASK));
    forms.add(|k, x| _ = k.redux_max_s32(x.r, FULL_MASK));
    forms.add(|k, x| _ = k.redux_and_b32(x.r, FULL_MASK));
    forms.add(|k, x| _ = k.redux_or_b32(x.r, FULL_MASK));
    forms.add(|k, x| _ = k.redux_xor_b32(x.r, FULL_MASK));
    forms.add(|k, _| _ = k.elect(FULL_MASK));
    forms.add(|k, x| _ = k.elect(x.r));
    forms.add(|k, _| _ = k.activemask());
    forms.add(|k, _| k.bar_warp_sync());
    forms.add(|k, x| k.bar_warp_sync_mask(x.r));
}

fn barriers(forms: &mut Forms) {
    forms.add(|k, _| k.bar_sync_all());
    forms.add(|k, _| k.bar_sync(15, 128));
    forms.add(|k, x| k.bar_sync(x.r, x.r));
    forms.add(|k, _| k.barrier_sync(1, 64));
    forms.add(|k, _| {
        k.bar_arrive(1, 64);
        k.bar_sync(1, 64);
    });
    forms.add(|k, _| {
        k.barrier_arrive(1, 64);
        k.barrier_sync(1, 64);
    });
    for &level in MembarLevel::ALL {
        forms.add(|k, _| k.membar(level));
    }
    for &sem in FenceSem::ALL {
        for &scope in Scope::ALL {
            forms.add(|k, _| k.fence(sem, scope));
        }
    }
    for &space in ProxySpace::ALL {
        forms.add(|k, _| k.fence_proxy_async(space));
    }
    forms.add(|k, _| k.fence_mbarrier_init());
}

fn lane_copies(forms: &mut Forms) {
    for &cache in CpAsyncCache::ALL {
        for &bytes in CpAsyncBytes::ALL {
            if cache == CpAsyncCache::Cg && bytes != CpAsyncBytes::B16 {
                continue;
            }
            forms.add(|k, x| k.cp_async(cache, bytes, x.tile.at(32), x.rd));
            forms.add(|k, x| k.cp_async_zfill(cache, bytes, x.r, x.rd.at(16), x.r));
            forms.add(|k, x| k.cp_async_zfill(cache, bytes, x.r, x.rd, 0));
            for prefetch in [None, Some(L2Prefetch::B64), Some(L2Prefetch::B128), Some(L2Prefetch::B256)] {
                for sized in [false, true] {
                    forms.add(|k, x| {
                        let size = sized.then(|| x.r.into());
                        k.cp_async_hint(cache, bytes, x.r, x.rd, size, prefetch, Some(x.rd.into()));
                    });
                    forms.add(|k, x| {
                        let size = sized.then(|| x.r.into());
                        k.cp_async_hint(cache, bytes, x.r, x.rd, size, prefetch, None);
                    });
                }
            }
        }
    }
    forms.add(|k, _| k.cp_async_commit());
    forms.add(|k, _| k.cp_async_wait(0));
    forms.add(|k, _| k.cp_async_wait(9));
    forms.add(|k, _| k.cp_async_wait_all());
    forms.add(|k, x| k.cp_async_mbarrier_arrive(x.bar, false));
    forms.add(|k, x| k.cp_async_mbarrier_arrive(x.bar, true));
}

fn warp_tensor(forms: &mut Forms) {
    forms.add(|k, x| _ = k.ldmatrix::<1>(x.r));
    forms.add(|k, x| _ = k.ldmatrix::<2>(x.r.at(64)));
    forms.add(|k, x| _ = k.ldmatrix::<4>(x.tile));
    forms.add(|k, x| _ = k.ldmatrix_trans::<1>(x.r));
    forms.add(|k, x| _ = k.ldmatrix_trans::<2>(x.r));
    forms.add(|k, x| _ = k.ldmatrix_trans::<4>(x.r));
    forms.add(|k, x| k.stmatrix(x.r, [x.r]));
    forms.add(|k, x| k.stmatrix(x.r, [x.r; 2]));
    forms.add(|k, x| k.stmatrix(x.tile, [x.r; 4]));
    forms.add(|k, x| k.stmatrix_trans(x.r, [x.r]));
    forms.add(|k, x| k.stmatrix_trans(x.r, [x.r; 2]));
    forms.add(|k, x| k.stmatrix_trans(x.r.at(16), [x.r; 4]));
    for ty in [MatrixTy::F16, MatrixTy::Bf16] {
        forms.add(|k, x| _ = k.mma_m16n8k16(ty, [x.r; 4], [x.r; 2], [x.f; 4]));
        forms.add(|k, x| _ = k.mma_m16n8k8(ty, [x.r; 2], x.r, [x.f; 4]));
    }
    forms.add(|k, x| _ = k.mma_m16n8k16(MatrixTy::F16, [x.r; 4], [x.r; 2], [x.r; 2]));
    forms.add(|k, x| _ = k.mma_m16n8k8(MatrixTy::F16, [x.r; 2], x.r, [x.r; 2]));
    for a in [MatrixTy::E4m3, MatrixTy::E5m2] {
        for b in [MatrixTy::E4m3, MatrixTy::E5m2] {
            forms.add(|k, x| _ = k.mma_m16n8k32(a, b, [x.r; 4], [x.r; 2], [x.f; 4]));
            forms.add(|k, x| _ = k.mma_m16n8k32(a, b, [x.r; 4], [x.r; 2], [x.r; 2]));
        }
    }
}

fn mbarriers(forms: &mut Forms) {
    forms.add(|k, x| k.mbarrier_init(x.bar, 128));
    forms.add(|k, x| k.mbarrier_init(x.r.at(8), x.r));
    forms.add(|k, x| k.mbarrier_inval(x.bar));
    forms.add(|k, x| k.mbarrier_arrive(x.bar));
    forms.add(|k, x| _ = k.mbarrier_arrive_state(x.bar));
    forms.add(|k, x| k.mbarrier_arrive_count(x.bar, 2));
    forms.add(|k, x| k.mbarrier_arrive_count(x.bar, x.r));
    forms.add(|k, x| k.mbarrier_arrive_cluster(x.cluster(), Scope::Cta));
    forms.add(|k, x| k.mbarrier_arrive_cluster(x.cluster(), Scope::Cluster));
    forms.add(|k, x| k.mbarrier_arrive_count_cluster(x.cluster(), 2));
    forms.add(|k, x| k.mbarrier_arrive_expect_tx(x.bar, 4096));
    forms.add(|k, x| k.mbarrier_arrive_expect_tx(x.r.at(8), x.r));
    forms.add(|k, x| k.mbarrier_arrive_expect_tx_cluster(x.cluster(), 4096));
    forms.add(|k, x| k.mbarrier_expect_tx(x.bar, 4096));
    forms.add(|k, x| k.mbarrier_expect_tx_cluster(x.cluster(), x.r));
    for scope in [Scope::Cta, Scope::Cluster] {
        forms.add(|k, x| _ = k.mbarrier_test_wait_parity(x.bar, 1, scope));
        forms.add(|k, x| _ = k.mbarrier_test_wait_parity(x.r.at(8), x.r, scope));
        forms.add(|k, x| _ = k.mbarrier_test_wait(x.bar, x.rd, scope));
        forms.add(|k, x| _ = k.mbarrier_try_wait_parity(x.bar, 1, scope));
        forms.add(|k, x| _ = k.mbarrier_try_wait_parity(x.r, x.r, scope));
        forms.add(|k, x| _ = k.mbarrier_try_wait_parity_for(x.r, x.r, scope, 1000));
        forms.add(|k, x| _ = k.mbarrier_try_wait(x.bar, x.rd, scope));
        forms.add(|k, x| k.mbarrier_wait_parity(x.bar, x.r, scope));
    }
}

fn bulk(forms: &mut Forms) {
    let hint = BulkHint::new;
    forms.add(|k, x| k.bulk_load(x.tile, x.rd, 4096, x.bar, hint()));
    forms.add(|k, x| k.bulk_load(x.r, x.rd.at(64), x.r, x.r.at(8), hint()));
    forms.add(|k, x| k.bulk_load(x.tile, x.rd, 4096, x.bar, hint().multicast(3u16)));
    forms.add(|k, x| k.bulk_load(x.tile, x.rd, 4096, x.bar, hint().policy(x.rd)));
    forms.add(|k, x| k.bulk_load(x.tile, x.rd, 4096, x.bar, hint().multicast(x.h).policy(x.rd)));
    forms.add(|k, x| k.bulk_store(x.rd, x.tile, 4096, hint()));
    forms.add(|k, x| k.bulk_store(x.rd, x.r, x.r, hint().policy(0x12f0_0000_0000_0000u64)));
    forms.add(|k, x| k.bulk_to_cluster(x.cluster(), x.tile, 4096, x.cluster()));
    forms.add(|k, x| k.bulk_prefetch(x.rd, 4096, hint()));
    forms.add(|k, x| k.bulk_prefetch(x.rd, x.r, hint().policy(x.rd)));
    use AtomTy::{B32, B64, Bf16, F16, F32, S32, S64, U32, U64};
    let to_global: &[(AtomOp, &[AtomTy])] = &[
        (AtomOp::Add, &[U32, S32, U64, F32, F16, Bf16]),
        (AtomOp::Min, &[U32, S32, U64, S64, F16, Bf16]),
        (AtomOp::Max, &[U32, S32, U64, S64, F16, Bf16]),
        (AtomOp::And, &[B32, B64]),
        (AtomOp::Or, &[B32, B64]),
        (AtomOp::Xor, &[B32, B64]),
        (AtomOp::Inc, &[U32]),
        (AtomOp::Dec, &[U32]),
    ];
    for &(op, types) in to_global {
        for &ty in types {
            forms.add(|k, x| k.bulk_reduce(op, ty, x.rd, x.tile, 4096, hint()));
            forms.add(|k, x| k.bulk_reduce(op, ty, x.rd, x.tile, x.r, hint().policy(x.rd)));
        }
    }
    let to_cluster: &[(AtomOp, &[AtomTy])] = &[
        (AtomOp::Add, &[U32, S32, U64]),
        (AtomOp::Min, &[U32, S32]),
        (AtomOp::Max, &[U32, S32]),
        (AtomOp::And, &[B32]),
        (AtomOp::Or, &[B32]),
        (AtomOp::Xor, &[B32]),
        (AtomOp::Inc, &[U32]),
        (AtomOp::Dec, &[U32]),
    ];
    for &(op, types) in to_cluster {
        for &ty in types {
            forms.add(|k, x| k.bulk_reduce_cluster(op, ty, x.cluster(), x.tile, 4096, x.cluster()));
        }
    }
    forms.add(|k, _| k.bulk_commit());
    forms.add(|k, _| k.bulk_wait(0));
    forms.add(|k, _| k.bulk_wait(3));
    forms.add(|k, _| k.bulk_wait_read(0));
    forms.add(|k, x| k.prefetch_tensormap(x.rd));

    for dims in 1..=5 {
        let coordinates = |x: Fixture| -> Vec<Operand<flashcore_ptx::B32>> {
            (0..dims).map(|i| if i % 2 == 0 { x.r.into() } else { 0.into() }).collect()
        };
        let loads = |x: Fixture| {
            [
                hint(),
                hint().multicast(x.h),
                hint().policy(x.rd),
                hint().multicast(5u16).policy(0x14f0_0000_0000_0000u64),
            ]
        };
        for i in 0..4 {
            forms.add(|k, x| k.tensor_load(x.tile, x.rd, &coordinates(x), x.bar, loads(x)[i]));
        }
        forms.add(|k, x| k.tensor_load(x.r, x.rd, &coordinates(x), x.r.at(8), hint()));
        forms.add(|k, x| k.tensor_store(x.rd, &coordinates(x), x.tile, hint()));
        forms.add(|k, x| k.tensor_store(x.rd, &coordinates(x), x.r, hint().policy(x.rd)));
        forms.add(|k, x| k.tensor_prefetch(x.rd, &coordinates(x), hint()));
        forms.add(|k, x| k.tensor_prefetch(x.rd, &coordinates(x), hint().policy(x.rd)));
        for &op in AtomOp::ALL {
            if op != AtomOp::Exch && op != AtomOp::Cas {
                forms.add(|k, x| k.tensor_reduce(op, x.rd, &coordinates(x), x.tile, hint()));
                forms.add(|k, x| k.tensor_reduce(op, x.rd, &coordinates(x), x.r, hint().policy(x.rd)));
            }
        }
    }
}

fn warpgroup(forms: &mut Forms) {
    forms.add(|k, _| k.wgmma_fence());
    forms.add(|k, _| k.wgmma_commit());
    for pending in [0, 1, 7] {
        forms.add(|k, _| k.wgmma_wait(pending));
    }
    for count in (24..=256).step_by(8) {
        forms.add(|k, _| k.setmaxnreg_inc(count));
        forms.add(|k, _| k.setmaxnreg_dec(count));
    }
    /// A whole stage around one instruction.
    fn stage<A: Accumulator>(
        k: &mut KernelBuilder,
        x: Fixture,
        spec: Wgmma,
        in_regs: bool,
        scale_d: Operand<Pred>,
    ) {
        let acc = k.reg_vec::<A>(Wgmma { acc: A::TYPE, ..spec }.acc_regs());
        k.wgmma_fence();
        k.comment(MAIN);
        if in_regs {
            k.wgmma_rs(spec, &acc, [x.r; 4], x.rd, scale_d);
        } else {
            k.wgmma_ss(spec, &acc, x.rd, x.rd, scale_d);
        }
        k.wgmma_commit();
        k.wgmma_wait(0);
    }
    let mut add = |spec: Wgmma, in_regs: bool, half: bool, scale_d: bool| {
        forms.add(|k, x| {
            let scale_d: Operand<Pred> = if scale_d { x.p.into() } else { false.into() };
            if half {
                stage::<B32>(k, x, spec, in_regs, scale_d);
            } else {
                stage::<F32>(k, x, spec, in_regs, scale_d);
            }
        });
    };
    for n in (8..=256).step_by(8) {
        add(Wgmma::new(n, MatrixTy::F16), false, false, true);
        add(Wgmma::new(n, MatrixTy::Bf16).trans_b(), true, false, false);
        add(Wgmma::new(n, MatrixTy::E4m3), false, false, true);
    }
    for n in [8, 96, 256] {
        for in_regs in [false, true] {
            for ty in [MatrixTy::F16, MatrixTy::Bf16] {
                for (trans_a, trans_b) in [(false, false), (false, true), (true, false), (true, true)] {
                    if in_regs && trans_a {
                        continue;
                    }
                    let spec = Wgmma { trans_a, trans_b, ..Wgmma::new(n, ty) };
                    add(spec, in_regs, false, true);
                    add(Wgmma { negate_a: true, negate_b: true, ..spec }, in_regs, false, false);
                    if ty == MatrixTy::F16 {
                        add(spec, in_regs, true, true);
                    }
                }
            }
            for a in [MatrixTy::E4m3, MatrixTy::E5m2] {
                for b in [MatrixTy::E4m3, MatrixTy::E5m2] {
                    let spec = Wgmma { b, ..Wgmma::new(n, a) };
                    add(spec, in_regs, false, true);
                    add(spec, in_regs, true, false);
                }
            }
        }
    }
}

fn clusters(forms: &mut Forms) {
    forms.add(|k, x| _ = k.mapa(x.r, 1));
    forms.add(|k, x| _ = k.mapa(x.r, x.r));
    forms.add(|k, x| _ = k.getctarank(x.cluster()));
    for &sem in ClusterArrive::ALL {
        forms.add(|k, _| k.cluster_arrive(sem, true));
        forms.add(|k, _| k.cluster_arrive(sem, false));
    }
    forms.add(|k, _| k.cluster_wait(true));
    forms.add(|k, _| k.cluster_wait(false));
    forms.add(|k, x| k.st_async(x.cluster(), [x.r], x.cluster()));
    forms.add(|k, x| k.st_async(x.cluster(), [x.r; 2], x.cluster()));
    forms.add(|k, x| k.st_async(x.cluster(), [x.r; 4], x.cluster()));
    forms.add(|k, x| k.st_async(x.cluster(), [x.rd], x.cluster()));
    forms.add(|k, x| k.st_async(x.cluster(), [x.rd; 2], x.cluster()));
    forms.add(|k, x| k.st_async(x.cluster(), [x.f; 4], x.cluster()));
    for &action in GridDep::ALL {
        forms.add(|k, _| k.griddepcontrol(action));
    }
}

/// One kernel out of several forms: the fixture, then what each form adds, with its registers and labels renamed.
pub fn joined(forms: &[&Form]) -> Kernel {
    let (k, _) = fixture("joined", Target::Sm90a);
    let mut kernel = k.finish().expect("the fixture is well formed");
    let end = kernel.body.pop().expect("a kernel ends with ret");
    let (own_regs, own_insts) = (kernel.regs.len() as u32, kernel.body.len());
    for form in forms {
        let from = &form.kernel;
        let (reg_shift, label_shift) = (kernel.regs.len() as u32 - own_regs, kernel.labels.len() as u32);
        let reg = |id: RegId| if id.0 < own_regs { id } else { RegId(id.0 + reg_shift) };
        let arg = |arg: Arg| match arg {
            Arg::Reg(id) => Arg::Reg(reg(id)),
            Arg::Mem { base: MemBase::Reg(id), offset } => Arg::Mem { base: MemBase::Reg(reg(id)), offset },
            other => other,
        };
        let label = |id: LabelId| LabelId(id.0 + label_shift);
        for info in &from.regs[own_regs as usize..] {
            let number = kernel.regs.iter().filter(|r| r.class == info.class).count() as u32;
            kernel.regs.push(RegInfo { class: info.class, number });
        }
        kernel.labels.extend(from.labels.iter().map(|name| format!("{name}_{label_shift}")));
        for inst in &from.body[own_insts..from.body.len() - 1] {
            let mut inst = inst.clone();
            inst.section = None;
            inst.dst = inst.dst.into_iter().map(arg).collect();
            inst.src = inst.src.into_iter().map(arg).collect();
            match &mut inst.op {
                Op::Label(id) => *id = label(*id),
                Op::Bra { target, reconverge } => {
                    *target = label(*target);
                    *reconverge = reconverge.map(label);
                }
                _ => {}
            }
            kernel.body.push(inst);
        }
    }
    kernel.body.push(end);
    kernel
}
