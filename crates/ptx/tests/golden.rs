//! Whole kernels as text: what a reviewer of a change reads.

use flashcore_ptx::*;

kernel_params! {
    /// y = a x + y
    pub struct AxpyParams {
        /// The factor.
        a: f32,
        /// How many elements.
        n: u32,
        /// Read.
        x: GlobalPtr,
        /// Read and written.
        y: GlobalPtr,
    }
}

fn axpy() -> Kernel {
    let mut k = KernelBuilder::new("axpy", Target::Sm80).params::<AxpyParams>().threads(128);
    k.section("which element");
    let (block, thread) = (k.ctaid_x(), k.tid_x());
    let i = k.mad_lo_u32(block, 128, thread);
    let n = k.param(AxpyParams::n);
    let inside = k.setp_lt_u32(i, n);
    k.section("y += a x");
    k.if_(inside, |k| {
        let (a, x, y) = (k.param(AxpyParams::a), k.param(AxpyParams::x), k.param(AxpyParams::y));
        let (px, py) = (k.mad_wide_u32(i, 4, x), k.mad_wide_u32(i, 4, y));
        let vx = k.ld_global_hint::<F32>(px, MemHint::new().nc());
        let vy = k.ld_global::<F32>(py);
        let sum = k.fma_f32(a, vx, vy);
        k.comment("the only write");
        k.st_global(py, sum);
    });
    k.finish().unwrap_or_else(|errors| panic!("{errors}"))
}

kernel_params! {
    /// What the tile kernels are given.
    pub struct TileParams {
        /// The tiles, one after the other.
        data: GlobalPtr,
        /// How many.
        tiles: u32,
        /// The same as a tensor.
        map: TensorMap,
    }
}

/// Sums the product of tiles with themselves: a cp.async pipeline of two stages and mma.sync.
fn sm80_tiles() -> Kernel {
    let mut smem = SharedLayout::new();
    let tile = smem.alloc("tile", 2 * 512, 128);
    let mut k = KernelBuilder::new("tiles", Target::Sm80).params::<TileParams>().shared(smem).threads(32);

    k.section("prologue");
    let (data, tiles, lane) = (k.param(TileParams::data), k.param(TileParams::tiles), k.tid_x());
    let mine = k.mad_wide_u32(lane, 16, data);
    let base = k.shared_addr(tile);
    let at = k.mad_lo_u32(lane, 16, base);
    k.cp_async(CpAsyncCache::Cg, CpAsyncBytes::B16, at, mine);
    k.cp_async_commit();
    let acc = [0.0f32; 4].map(|zero| k.mov_f32(zero));

    k.section("main loop");
    k.for_s32(0, tiles, 1, |k, i, _| {
        let next = k.add_s32(i, 1);
        let inside = k.setp_lt_s32(next, tiles);
        let bytes = k.selp_b32(16, 0, inside);
        let odd = k.and_b32(next, 1);
        let to = k.mad_lo_u32(odd, 512, at);
        let from = k.mad_wide_s32(next, 512, mine);
        k.comment("the next tile, or zeros after the last");
        k.cp_async_zfill(CpAsyncCache::Cg, CpAsyncBytes::B16, to, from, bytes);
        k.cp_async_commit();
        k.cp_async_wait(1);
        k.bar_warp_sync();
        let even = k.and_b32(i, 1);
        let here = k.mad_lo_u32(even, 512, at);
        let a = k.ldmatrix::<4>(here);
        let b = k.ldmatrix_trans::<2>(here);
        k.set(acc, |k| k.mma_m16n8k16(MatrixTy::F16, a, b, acc));
        k.bar_warp_sync();
    });

    k.section("epilogue");
    k.cp_async_wait(0);
    k.st_global_vec(mine, acc);
    k.finish().unwrap_or_else(|errors| panic!("{errors}"))
}

/// The same on Hopper: a producer warp with TMA, a consumer warpgroup with wgmma.
fn sm90_tiles() -> Kernel {
    const TILE: u32 = 64 * 64 * 2;
    let mut smem = SharedLayout::new();
    let tile = smem.alloc("tile", TILE, 1024);
    let full = smem.alloc("full", 8, 8);
    let empty = smem.alloc("empty", 8, 8);
    let out = smem.alias("out", 64 * 8 * 4, &[tile]);
    let mut k = KernelBuilder::new("tiles", Target::Sm90a)
        .params::<TileParams>()
        .shared(smem)
        .threads(256)
        .min_blocks_per_sm(1);

    k.section("barriers");
    let tid = k.tid_x();
    let warp = k.shr_u32(tid, 5);
    let first = k.setp_eq_u32(tid, 0);
    k.if_(first, |k| {
        k.mbarrier_init(full, 1);
        k.mbarrier_init(empty, 1);
        k.fence_mbarrier_init();
    });
    k.bar_sync_all();
    let tiles = k.param(TileParams::tiles);
    let map = k.tensor_map(TileParams::map);

    k.roles(warp, |roles| {
        roles.warps(0..4, |k| {
            k.section("producer");
            k.setmaxnreg_dec(24);
            k.if_(first, |k| {
                let phase = k.mov_b32(1);
                k.for_s32(0, tiles, 1, |k, i, _| {
                    k.mbarrier_wait_parity(empty, phase, Scope::Cta);
                    k.mbarrier_arrive_expect_tx(full, TILE);
                    let row = k.shl_b32(i, 6);
                    k.comment("tile i");
                    k.tensor_load(tile, map, &[0.into(), row.into()], full, BulkHint::new());
                    k.set(phase, |k| k.xor_b32(phase, 1));
                });
            });
        });
        roles.warps(4..8, |k| {
            k.section("consumer");
            k.setmaxnreg_inc(240);
            let acc = k.reg_vec::<F32>(4);
            for &acc in &acc {
                k.set(acc, |k| k.mov_f32(0.0));
            }
            let address = k.shared_addr(tile);
            let start = k.shr_u32(address, 4);
            let low = k.or_b32(start, 0x0001_0000);
            let descriptor = k.pack_b64(low, 0x4000_0040);
            let phase = k.mov_b32(0);
            let leader = k.setp_eq_u32(tid, 128);
            k.for_s32(0, tiles, 1, |k, _, _| {
                k.mbarrier_wait_parity(full, phase, Scope::Cta);
                k.wgmma_fence();
                k.comment("S += tile tileᵀ");
                k.wgmma_ss(Wgmma::new(8, MatrixTy::F16), &acc, descriptor, descriptor, true);
                k.wgmma_commit();
                k.wgmma_wait(0);
                k.when(leader, |k| k.mbarrier_arrive(empty));
                k.set(phase, |k| k.xor_b32(phase, 1));
            });
            k.section("epilogue");
            k.bar_sync(1, 128);
            let own = k.sub_u32(tid, 128);
            let to = k.shared_addr(out);
            let to = k.mad_lo_u32(own, 16, to);
            k.st_shared_vec(to, [acc[0], acc[1], acc[2], acc[3]]);
            k.fence_proxy_async(ProxySpace::Shared);
            k.bar_sync(1, 128);
            k.if_(leader, |k| {
                let data = k.param(TileParams::data);
                k.bulk_store(data, out, 64 * 8 * 4, BulkHint::new());
                k.bulk_commit();
                k.bulk_wait_read(0);
            });
        });
    });
    k.finish().unwrap_or_else(|errors| panic!("{errors}"))
}

/// Scores of fp8 tiles, rounded to fp8 in registers, times a tile whose keys are in the order that this gives.
fn sm90_fp8() -> Kernel {
    const TILE: u32 = 64 * 128;
    let mut smem = SharedLayout::new();
    let tile = smem.alloc("tile", TILE, 1024);
    let full = smem.alloc("full", 8, 8);
    let mut k = KernelBuilder::new("fp8_tiles", Target::Sm90a)
        .params::<TileParams>()
        .shared(smem)
        .threads(128)
        .min_blocks_per_sm(1);

    k.section("a tile of bytes");
    let (tid, map) = (k.tid_x(), k.tensor_map(TileParams::map));
    let first = k.setp_eq_u32(tid, 0);
    k.if_(first, |k| {
        k.mbarrier_init(full, 1);
        k.fence_mbarrier_init();
        k.mbarrier_arrive_expect_tx(full, TILE);
        k.tensor_load(tile, map, &[0.into(), 0.into()], full, BulkHint::new());
    });
    k.bar_sync_all();
    k.mbarrier_wait_parity(full, 0, Scope::Cta);
    let address = k.shared_addr(tile);
    let start = k.shr_u32(address, 4);
    let low = k.or_b32(start, 0x0001_0000);
    let descriptor = k.pack_b64(low, 0x4000_0040);

    k.section("scores");
    let scores = k.reg_vec::<F32>(16);
    k.wgmma_fence();
    k.wgmma_ss(Wgmma::new(32, MatrixTy::E4m3), &scores, descriptor, descriptor, false);
    k.wgmma_commit();
    k.wgmma_wait(0);

    k.section("values");
    let a: [Reg<B32>; 4] = std::array::from_fn(|i| {
        let pair = &scores[8 * (i / 2) + 2 * (i % 2)..];
        let lo = k.cvt_rn_satfinite_e4m3x2_f32(pair[1], pair[0]);
        let hi = k.cvt_rn_satfinite_e4m3x2_f32(pair[5], pair[4]);
        k.pack_b32(lo, hi)
    });
    let sums = k.reg_vec::<F32>(4);
    k.wgmma_fence();
    let spec = Wgmma { b: MatrixTy::E5m2, ..Wgmma::new(8, MatrixTy::E4m3) };
    k.wgmma_rs(spec, &sums, a, descriptor, false);
    k.wgmma_commit();
    k.wgmma_wait(0);
    let data = k.param(TileParams::data);
    let to = k.mad_wide_u32(tid, 16, data);
    k.st_global_vec(to, [sums[0], sums[1], sums[2], sums[3]]);
    k.finish().unwrap_or_else(|errors| panic!("{errors}"))
}

fn module(target: Target, kernel: Kernel) -> Module {
    Module::new(target).with(kernel)
}

#[test]
fn a_plain_kernel_reads_well() {
    insta::assert_snapshot!(module(Target::Sm80, axpy()));
}

#[test]
fn a_pipelined_kernel_of_ampere_reads_well() {
    insta::assert_snapshot!(module(Target::Sm80, sm80_tiles()));
}

#[test]
fn a_specialised_kernel_of_hopper_reads_well() {
    insta::assert_snapshot!(module(Target::Sm90a, sm90_tiles()));
}

#[test]
fn an_fp8_kernel_of_hopper_reads_well() {
    insta::assert_snapshot!(module(Target::Sm90a, sm90_fp8()));
}

mod assembled {
    use super::*;
    use flashcore_ptx::ptxas::{Ptxas, PtxasError, Severity};

    fn ptxas() -> Option<Ptxas> {
        let found = Ptxas::find_or_skip().unwrap_or_else(|error| panic!("{error}"));
        if found.is_none() {
            eprintln!("skipped: {}", PtxasError::NotFound);
        }
        found
    }

    #[test]
    fn the_kernels_assemble_for_their_targets_without_spills_or_remarks() {
        let Some(ptxas) = ptxas() else { return };
        let cases = [
            (module(Target::Sm80, axpy()), vec![Target::Sm80, Target::Sm89, Target::Sm90a]),
            (module(Target::Sm80, sm80_tiles()), vec![Target::Sm80, Target::Sm89, Target::Sm90]),
            (module(Target::Sm90a, sm90_tiles()), vec![Target::Sm90a]),
            (module(Target::Sm90a, sm90_fp8()), vec![Target::Sm90a]),
        ];
        for (module, targets) in cases {
            for target in targets {
                let name = &module.kernels[0].name;
                let assembled = ptxas.assemble(&module, target).unwrap_or_else(|error| panic!("{error}"));
                let usage = assembled.kernel(name).expect("reported");
                assert_eq!((usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes), (0, 0, 0));
                assert!(usage.registers > 0);
                assert_eq!(assembled.remarks, [], "{name} for {target}");
                assert_eq!(assembled.cubin[..4], *b"\x7fELF");
            }
        }
    }

    #[test]
    fn named_barriers_are_counted() {
        let Some(ptxas) = ptxas() else { return };
        let module = module(Target::Sm90a, sm90_tiles());
        let assembled = ptxas.assemble(&module, Target::Sm90a).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(assembled.kernels[0].barriers, 2);
    }

    #[test]
    fn a_serialised_wgmma_is_a_value_with_its_number() {
        let Some(ptxas) = ptxas() else { return };
        let mut module = module(Target::Sm90a, sm90_tiles());
        module.kernels[0].body.retain(|inst| inst.op != Op::WgmmaFence);
        let assembled = ptxas.assemble(&module, Target::Sm90a).unwrap_or_else(|error| panic!("{error}"));
        let codes: Vec<_> = assembled.serialised_wgmma().filter_map(|m| m.code).collect();
        assert_eq!(codes, [7519], "{:?}", assembled.remarks);
        let checked = check::module(&module);
        assert!(
            checked.iter().any(|e| matches!(e.fault, Fault::Wgmma { code: Some(7519), .. })),
            "{checked:?}"
        );
    }

    #[test]
    fn a_refused_module_comes_back_with_the_line_and_its_text() {
        let Some(ptxas) = ptxas() else { return };
        let text = module(Target::Sm80, axpy()).to_string().replace("fma.rn.f32", "fma.rn.f31");
        let Err(PtxasError::Refused { target, messages }) = ptxas.assemble_text(&text, Target::Sm80) else {
            panic!("accepted");
        };
        assert_eq!(target, Target::Sm80);
        let message = messages.iter().find(|m| m.line.is_some()).expect("a line is named");
        assert_eq!(message.severity, Severity::Error);
        assert!(message.source.as_deref().is_some_and(|s| s.starts_with("fma.rn.f31")), "{message:?}");
    }

    #[test]
    fn ptxas_says_its_version() {
        let Some(ptxas) = ptxas() else { return };
        let version = ptxas.version().unwrap_or_else(|error| panic!("{error}"));
        let parts: Vec<u32> = version.split('.').filter_map(|p| p.parse().ok()).collect();
        assert_eq!(parts.len(), 3, "{version}");
    }

    #[test]
    fn a_ptxas_that_is_not_there_is_an_error_that_says_so() {
        let module = module(Target::Sm80, axpy());
        let error = Ptxas::at("/nowhere/ptxas").assemble(&module, Target::Sm80).expect_err("not there");
        assert!(error.to_string().contains("/nowhere/ptxas could not be run"), "{error}");
        assert!(PtxasError::NotFound.to_string().contains("nvidia-cuda-nvcc"));
    }
}
