//! A warp-specialised pipeline as Hopper kernels have it: TMA fills a ring of stages, `wgmma` reads them, the
//! result leaves by TMA. It is clean under every policy, and nearly every instruction that orders something is
//! missed when it is dropped.

mod common;

use common::*;
use flashcore_ptx::*;
use flashcore_sim::*;

const STAGES: i32 = 2;
const TILES: u32 = 5;
const TILE_BYTES: u32 = 64 * 64 * 2;
const DEPTH: usize = 64 * TILES as usize;

/// The descriptor of a K-major tile with rows of 128 swizzled bytes, 32 bytes on for each k step.
fn descriptor(k: &mut KernelBuilder, address: Reg<B32>, step: u32) -> Reg<B64> {
    let at = k.add_u32(address, 32 * step);
    let start = k.shr_u32(at, 4);
    let low = k.or_b32(start, 1 << 16);
    k.pack_b64(low, 0x4000_0040u32)
}

/// O (64x64, f16) = A (64 x DEPTH) times B (64 x DEPTH) transposed; A and B lie one after the other in x.
fn pipeline() -> Module {
    let mut shared = SharedLayout::new();
    let a = shared.alloc("a", STAGES as u32 * TILE_BYTES, 1024);
    let b = shared.alloc("b", STAGES as u32 * TILE_BYTES, 1024);
    let o = shared.alloc("o", TILE_BYTES, 1024);
    let full = shared.alloc("full", 8 * STAGES as u32, 8);
    let empty = shared.alloc("empty", 8 * STAGES as u32, 8);
    // The third warpgroup does nothing: it makes registers scarce.
    hopper(384, shared, move |k| {
        let tid = k.tid_x();
        let warp = k.shr_u32(tid, 5);
        let (x_map, y_map) = (k.tensor_map(Maps::x_map), k.tensor_map(Maps::y_map));
        let full_at = k.shared_addr(full);
        let empty_at = k.shared_addr(empty);

        k.section("barriers");
        let first = k.setp_eq_u32(tid, 0);
        k.if_(first, |k| {
            for s in 0..STAGES {
                k.mbarrier_init(full.at(8 * s), 1);
                k.mbarrier_init(empty.at(8 * s), 1);
            }
            k.fence_mbarrier_init();
        });
        k.bar_sync_all();

        k.roles(warp, |roles| {
            roles.warps(0..4, |k| {
                k.section("producer");
                k.setmaxnreg_dec(40);
                let one = k.setp_eq_u32(tid, 0);
                k.if_(one, |k| {
                    let (stage, parity) = (k.mov_b32(0), k.mov_b32(1));
                    k.for_s32(0, TILES, 1, |k, tile, _| {
                        let bar = k.mad_lo_u32(stage, 8, full_at);
                        let freed = k.mad_lo_u32(stage, 8, empty_at);
                        k.comment("the stage is free");
                        k.mbarrier_wait_parity(freed, parity, Scope::Cta);
                        k.mbarrier_arrive_expect_tx(bar, 2 * TILE_BYTES);
                        let (a_at, b_at) = (k.shared_addr(a), k.shared_addr(b));
                        let (a_at, b_at) =
                            (k.mad_lo_u32(stage, TILE_BYTES, a_at), k.mad_lo_u32(stage, TILE_BYTES, b_at));
                        let column = k.mul_lo_u32(tile, 64);
                        k.comment("load A");
                        k.tensor_load(a_at, x_map, &[column.into(), 0.into()], bar, BulkHint::new());
                        k.comment("load B");
                        k.tensor_load(b_at, x_map, &[column.into(), 64.into()], bar, BulkHint::new());
                        next_stage(k, stage, parity);
                    });
                });
            });
            roles.warps(4..8, |k| {
                k.section("consumer");
                k.setmaxnreg_inc(240);
                let acc: Vec<Reg<F32>> = (0..32).map(|_| k.mov_f32(0.0)).collect();
                let (stage, parity) = (k.mov_b32(0), k.mov_b32(0));
                let more = k.mov_pred(false);
                k.for_s32(0, TILES, 1, |k, _, _| {
                    let bar = k.mad_lo_u32(stage, 8, full_at);
                    let freed = k.mad_lo_u32(stage, 8, empty_at);
                    k.comment("the stage is filled");
                    k.mbarrier_wait_parity(bar, parity, Scope::Cta);
                    let (a_at, b_at) = (k.shared_addr(a), k.shared_addr(b));
                    let (a_at, b_at) =
                        (k.mad_lo_u32(stage, TILE_BYTES, a_at), k.mad_lo_u32(stage, TILE_BYTES, b_at));
                    let descriptors: Vec<_> =
                        (0..4).map(|s| (descriptor(k, a_at, s), descriptor(k, b_at, s))).collect();
                    k.wgmma_fence();
                    for (i, (da, db)) in descriptors.into_iter().enumerate() {
                        let spec = Wgmma::new(64, MatrixTy::F16);
                        if i == 0 {
                            k.wgmma_ss(spec, &acc, da, db, more);
                        } else {
                            k.wgmma_ss(spec, &acc, da, db, true);
                        }
                    }
                    k.wgmma_commit();
                    k.wgmma_wait(0);
                    let leader = k.setp_eq_u32(tid, 128);
                    k.when(leader, |k| {
                        k.comment("free the stage");
                        k.mbarrier_arrive(freed);
                    });
                    k.set(more, |k| k.mov_pred(true));
                    next_stage(k, stage, parity);
                });

                k.section("epilogue");
                let lane = k.and_b32(tid, 31);
                let rows = k.sub_u32(warp, 4);
                let group = k.shr_u32(lane, 2);
                let row = k.mad_lo_u32(rows, 16, group);
                let quad = k.and_b32(lane, 3);
                let base = k.shared_addr(o);
                for half in 0..2 {
                    let row = k.add_u32(row, 8 * half);
                    let line = k.mad_lo_u32(row, 128, base);
                    let phase = k.and_b32(row, 7);
                    for j in 0..8 {
                        let at = 4 * j + 2 * half as usize;
                        let pair = k.cvt_rn_f16x2_f32(acc[at + 1], acc[at]);
                        // Column 8j + 2 quad: chunk j, permuted as the tensor map has it.
                        let chunk = k.xor_b32(phase, j as u32);
                        let to = k.mad_lo_u32(chunk, 16, line);
                        let to = k.mad_lo_u32(quad, 4, to);
                        k.comment("stage the result");
                        k.st_shared(to, pair);
                    }
                }
                k.fence_proxy_async(ProxySpace::Shared);
                k.bar_sync(1, 128);
                let leader = k.setp_eq_u32(tid, 128);
                k.if_(leader, |k| {
                    k.comment("store the result");
                    k.tensor_store(y_map, &[0.into(), 0.into()], o, BulkHint::new());
                    k.bulk_commit();
                    k.bulk_wait_read(0);
                });
            });
        });
    })
}

/// The next slot of the ring; the parity turns when it begins again.
fn next_stage(k: &mut KernelBuilder, stage: Reg<B32>, parity: Reg<B32>) {
    k.set(stage, |k| k.add_u32(stage, 1));
    let wrap = k.setp_eq_u32(stage, STAGES);
    k.when(wrap, |k| {
        k.set(stage, |k| k.mov_b32(0));
        k.set(parity, |k| k.xor_b32(parity, 1));
    });
}

fn maps(x: u64, y: u64) -> (flashcore_sim::TensorMap, flashcore_sim::TensorMap) {
    use flashcore_sim::{Swizzle, TensorElement, TensorMap};
    let row = DEPTH as u64 * 2;
    (
        TensorMap::new(TensorElement::F16, x, &[DEPTH as u64, 128], &[row], &[64, 64])
            .swizzled(Swizzle::B128),
        TensorMap::new(TensorElement::F16, y, &[64, 64], &[128], &[64, 64]).swizzled(Swizzle::B128),
    )
}

fn input() -> Vec<f32> {
    (0..128 * DEPTH).map(|i| small(i * 3 + i / DEPTH)).collect()
}

fn want() -> Vec<f32> {
    let x = input();
    let dot =
        |i: usize, j: usize| (0..DEPTH).map(|k| x[i * DEPTH + k] * x[(64 + j) * DEPTH + k]).sum::<f32>();
    (0..64)
        .flat_map(|i| (0..64).map(move |j| (i, j)))
        .map(|(i, j)| half::f16::from_f32(dot(i, j)).to_f32())
        .collect()
}

#[test]
fn the_pipeline_is_right_and_clean_under_every_policy() {
    let module = pipeline();
    let (x, want) = (f16_bytes(input()), want());
    for config in policies() {
        let outcome = run_maps(&module, 1, &x, 8192, 0, &maps, config.clone());
        assert_clean(&outcome, &config);
        assert_eq!(outcome.f16s(), want, "under {:?} seed {}", config.async_mode, config.seed);
        assert!(outcome.unwritten.is_empty());
        assert_eq!(outcome.report.stats.tensor_instructions, u64::from(TILES) * 4);
    }
}

/// Whether a mutant is noticed under a policy: by a finding or by its result.
fn noticed(mutant: &Module, x: &[u8], want: &[f32], config: &Config) -> bool {
    let outcome = run_maps(mutant, 1, x, 8192, 0, &maps, config.clone());
    !outcome.report.is_clean() || outcome.f16s() != want
}

#[test]
fn every_instruction_that_orders_something_is_missed_under_every_policy() {
    let module = pipeline();
    let (x, want) = (f16_bytes(input()), want());
    let mut mutants = 0;
    let mut survivors = Vec::new();
    for at in 0..module.kernels[0].body.len() {
        let Some((name, mutant)) = without(&module, at) else { continue };
        mutants += 1;
        for config in policies() {
            if !noticed(&mutant, &x, &want, &config) {
                survivors.push(format!("{name} under {:?} seed {}", config.async_mode, config.seed));
            }
        }
    }
    // Taking fewer registers than there are is no fault.
    survivors.retain(|s| !s.contains("setmaxnreg.inc"));
    assert!(
        survivors.is_empty(),
        "{} of {mutants} mutants survive:\n{}",
        survivors.len(),
        survivors.join("\n")
    );
    assert!(mutants >= 15, "only {mutants} mutants");
}

/// Alters constants: half a transaction count, a flipped parity, a swizzle term, a count.
#[test]
fn altered_counts_parities_and_swizzles_are_noticed() {
    let module = pipeline();
    let (x, want) = (f16_bytes(input()), want());
    let mut mutants: Vec<(String, Module)> = Vec::new();
    for (at, inst) in module.kernels[0].body.iter().enumerate() {
        let mut alter = |what: &str, change: &dyn Fn(&mut Inst)| {
            let mut mutant = module.clone();
            change(&mut mutant.kernels[0].body[at]);
            mutants.push((format!("{what} at #{at}"), mutant));
        };
        let constant = |inst: &mut Inst, i: usize, f: &dyn Fn(u64) -> u64| {
            if let Arg::Imm(imm) = &mut inst.src[i] {
                imm.bits = f(imm.bits);
            }
        };
        match inst.op {
            Op::MbarrierArriveExpectTx { .. } => alter("half the bytes", &|i| constant(i, 1, &|b| b / 2)),
            Op::MbarrierInit => alter("one arrival more", &|i| constant(i, 1, &|b| b + 1)),
            Op::BarSync { .. } if inst.src.len() == 2 => {
                alter("a larger count", &|i| constant(i, 1, &|b| b + 32));
            }
            Op::WgmmaWait(_) => alter("a weaker wait", &|i| i.op = Op::WgmmaWait(1)),
            Op::Alu(Alu::XorB32) => alter("a flipped or dropped xor", &|i| constant(i, 1, &|b| b ^ 1)),
            _ => {}
        }
    }
    assert!(mutants.len() >= 20);
    for config in [Config::default(), Config { async_mode: AsyncMode::Early, seed: 3, ..Config::default() }] {
        let config = Config { budget: 4_000_000, threads: 1, ..config };
        for (name, mutant) in &mutants {
            assert!(noticed(mutant, &x, &want, &config), "{name} under {:?}", config.async_mode);
        }
    }
}
