//! What kernels of fp8 are made of, run and assembled: tiles by TMA, `wgmma` from shared memory and from registers with
//! the keys permuted, the transposition of V in shared memory, `mma.sync`, and sums that are flushed before they drift.

mod common;

use common::*;
use flashcore_ptx::ptxas::{Ptxas, PtxasError};
use flashcore_ptx::*;
use flashcore_sim::{AsyncMode, Config, FindingKind, Fp8Sums, Swizzle, TensorElement, TensorMap};
use float8::{F8E4M3, F8E5M2};

/// Bytes of a row that is swizzled by 128: as many fp8 elements.
const ROW: u32 = 128;

/// Which key stands at each place of sixteen, where a lane's own scores make its A registers.
const KEY_AT: [usize; 16] = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];

/// Requires that ptxas takes the module for these targets, without spills or serialised products.
#[track_caller]
fn assemble(module: &Module, targets: &[Target]) {
    let Some(ptxas) = Ptxas::find_or_skip().unwrap_or_else(|error| panic!("{error}")) else {
        eprintln!("not assembled: {}", PtxasError::NotFound);
        return;
    };
    for &target in targets {
        let assembled = ptxas.assemble(module, target).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(assembled.remarks, [], "for {target}");
        assert_eq!(assembled.kernels[0].spill_store_bytes, 0, "for {target}");
    }
}

fn with_sums(fp8_sums: Fp8Sums) -> Config {
    Config { fp8_sums, ..Config::default() }
}

/// The value of a code.
fn value(ty: MatrixTy, code: u8) -> f64 {
    match ty {
        MatrixTy::E4m3 => F8E4M3::from_bits(code).to_f64(),
        _ => F8E5M2::from_bits(code).to_f64(),
    }
}

/// Codes of moderate numbers of both signs, subnormals among them.
fn codes(ty: MatrixTy, count: usize, seed: u32) -> Vec<u8> {
    let mask = if ty == MatrixTy::E4m3 { 0xBF } else { 0xBB };
    (0..count as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_761) >> 13) as u8 & mask).collect()
}

/// Codes of small whole numbers.
fn whole(count: usize, seed: usize) -> Vec<u8> {
    (0..count).map(|i| F8E4M3::from_f32(small(5 * i + i / 128 + seed)).to_bits()).collect()
}

/// The most that sums of 14 bits may be off: in each step, 33 numbers and their sum are cut off at 2^-13 of the largest.
fn drift(steps: usize, magnitudes: f64) -> f64 {
    steps as f64 * 34.0 / 8192.0 * magnitudes
}

/// The descriptor of a K-major tile with rows of 128 swizzled bytes, 32 bytes on for each k step.
fn descriptor(k: &mut KernelBuilder, tile: Shared, step: u32) -> Reg<B64> {
    let at = k.shared_addr(tile.at(32 * step as i32));
    let start = k.shr_u32(at, 4);
    let low = k.or_b32(start, 1 << 16);
    k.pack_b64(low, 0x4000_0040u32)
}

/// Emits products over one row of both tiles, four steps, and waits for them.
fn products(
    k: &mut KernelBuilder,
    spec: Wgmma,
    acc: &[Reg<F32>],
    a: Shared,
    b: Shared,
    first: Operand<Pred>,
) {
    let descriptors: Vec<_> = (0..4).map(|s| (descriptor(k, a, s), descriptor(k, b, s))).collect();
    k.wgmma_fence();
    for (i, (da, db)) in descriptors.into_iter().enumerate() {
        k.wgmma_ss(spec, acc, da, db, if i == 0 { first } else { true.into() });
    }
    k.wgmma_commit();
    k.wgmma_wait(0);
}

/// Stores the accumulators of a warpgroup to y, rows of `columns` floats.
fn store_rows(k: &mut KernelBuilder, acc: &[Reg<F32>], columns: u32) {
    let (tid, y) = (k.tid_x(), k.param(Maps::y));
    let (warp, lane) = (k.shr_u32(tid, 5), k.and_b32(tid, 31));
    let (group, quad) = (k.shr_u32(lane, 2), k.and_b32(lane, 3));
    let row = k.mad_lo_u32(warp, 16, group);
    let py = k.mad_wide_u32(row, 4 * columns, y);
    let py = k.mad_wide_u32(quad, 8, py);
    for (i, &sum) in acc.iter().enumerate() {
        let (j, below, odd) = (i / 4, i % 4 / 2, i % 2);
        k.st_global(py.at((32 * j + 32 * columns as usize * below + 4 * odd) as i32), sum);
    }
}

fn init_barrier(k: &mut KernelBuilder, bar: Shared) -> Reg<Pred> {
    let tid = k.tid_x();
    let first = k.setp_eq_u32(tid, 0);
    k.if_(first, |k| {
        k.mbarrier_init(bar, 1);
        k.fence_mbarrier_init();
    });
    k.bar_sync_all();
    first
}

/// Y (64x64, f32) = A (64 x depth) times B (64 x depth) transposed; A and B lie one after the other in x. The depth is
/// `n` rows of 128. Where `flushed`, the sum of each row is added to f32 registers.
fn matmul(a_ty: MatrixTy, b_ty: MatrixTy, flushed: bool) -> Module {
    let mut shared = SharedLayout::new();
    let [a, b] = ["a", "b"].map(|name| shared.alloc(name, 64 * ROW, 1024));
    let full = shared.alloc("full", 8, 8);
    hopper(128, shared, move |k| {
        let (map, rows) = (k.tensor_map(Maps::x_map), k.param(Maps::n));
        let first = init_barrier(k, full);
        let spec = Wgmma { b: b_ty, ..Wgmma::new(64, a_ty) };
        let [acc, sums] = [(); 2].map(|()| (0..32).map(|_| k.mov_f32(0.0)).collect::<Vec<_>>());
        let (parity, more) = (k.mov_b32(0), k.mov_pred(false));
        k.for_s32(0, rows, 1, |k, i, _| {
            k.if_(first, |k| {
                k.mbarrier_arrive_expect_tx(full, 2 * 64 * ROW);
                let column = k.mul_lo_u32(i, ROW);
                k.tensor_load(a, map, &[column.into(), 0.into()], full, BulkHint::new());
                k.tensor_load(b, map, &[column.into(), 64.into()], full, BulkHint::new());
            });
            k.mbarrier_wait_parity(full, parity, Scope::Cta);
            k.set(parity, |k| k.xor_b32(parity, 1));
            products(k, spec, &acc, a, b, if flushed { false.into() } else { more.into() });
            k.set(more, |k| k.mov_pred(true));
            for (&acc, &sum) in acc.iter().zip(&sums).filter(|_| flushed) {
                k.set(sum, |k| k.add_f32(sum, acc));
            }
            k.comment("everybody has read the tiles");
            k.bar_sync_all();
        });
        store_rows(k, if flushed { &sums } else { &acc }, 64);
    })
}

/// Runs [`matmul`] on rows of codes.
fn run_matmul(module: &Module, x: &[u8], config: Config) -> Outcome {
    let depth = x.len() as u64 / 128;
    let maps = |x: u64, _: u64| {
        let map = TensorMap::new(TensorElement::U8, x, &[depth, 128], &[depth], &[ROW, 64]);
        (map.clone().swizzled(Swizzle::B128), map.swizzled(Swizzle::B128))
    };
    run_maps(module, 1, x, 64 * 64 * 4, depth as u32 / ROW, &maps, config)
}

#[test]
fn wgmma_multiplies_fp8_tiles_that_tma_has_loaded() {
    use MatrixTy::{E4m3, E5m2};
    for (a_ty, b_ty) in [(E4m3, E4m3), (E5m2, E4m3), (E4m3, E5m2)] {
        let module = matmul(a_ty, b_ty, false);
        assemble(&module, &[Target::Sm90a]);
        let depth = 256;
        let x = [codes(a_ty, 64 * depth, 1), codes(b_ty, 64 * depth, 77)].concat();
        for config in policies() {
            for (sums, steps) in [(Fp8Sums::F32, 0), (Fp8Sums::default(), depth / 32)] {
                let config = Config { fp8_sums: sums, ..config.clone() };
                let outcome = run_matmul(&module, &x, config.clone());
                assert_clean(&outcome, &config);
                for (at, got) in outcome.f32s().into_iter().enumerate() {
                    let product = |k: usize| {
                        value(a_ty, x[at / 64 * depth + k]) * value(b_ty, x[(64 + at % 64) * depth + k])
                    };
                    let want: f64 = (0..depth).map(product).sum();
                    let most: f64 = (0..depth).map(|k| product(k).abs()).sum();
                    let error = (f64::from(got) - want).abs();
                    assert!(error <= drift(steps, most) + 1e-5 * most, "{a_ty:?} {b_ty:?} {sums:?}: {error}");
                }
            }
        }
    }
}

#[test]
fn a_long_sum_drifts_in_the_short_accumulator_and_not_where_it_is_flushed_every_128() {
    // 1.125 by 1.125, 4096 times: at the end the accumulator has steps of a half.
    let depth = 4096;
    let x = vec![F8E4M3::from_f32(1.125).to_bits(); 128 * depth];
    let exact = 1.125f32 * 1.125 * depth as f32;
    let error = |flushed: bool, sums: Fp8Sums| {
        let module = matmul(MatrixTy::E4m3, MatrixTy::E4m3, flushed);
        let outcome = run_matmul(&module, &x, with_sums(sums));
        assert_clean(&outcome, &Config::default());
        let got = outcome.f32s();
        assert!(got.iter().all(|&v| v == got[0]));
        (exact - got[0]) / exact
    };
    assert_eq!(Config::default().fp8_sums, Fp8Sums::Short { bits: 14 }, "the hardware's is the default");
    let long = error(false, Fp8Sums::default());
    assert!((0.03..0.1).contains(&long), "off by {long}");
    assert_eq!(error(true, Fp8Sums::default()), 0.0);
    assert_eq!(error(false, Fp8Sums::F32), 0.0);
    // The fewer the bits, the larger the drift.
    assert!(error(false, Fp8Sums::Short { bits: 12 }) > long);
    assert!(error(false, Fp8Sums::Short { bits: 17 }) < long);
}

#[test]
fn a_number_of_bits_that_is_not_possible_is_refused() {
    let module = matmul(MatrixTy::E4m3, MatrixTy::E4m3, false);
    for bits in [3, 18] {
        let mut sim = flashcore_sim::Sim::new(with_sums(Fp8Sums::Short { bits }));
        let dims = flashcore_sim::LaunchDims::linear(1, 128);
        let error = sim.launch(&module, "test", dims, &[0; 280]).expect_err("refused");
        assert!(error.to_string().ends_with(&format!("{bits} bits; 4 to 17 are possible")), "{error}");
    }
}

/// Turns 128 keys by 128 bytes around, one warpgroup: each sixteen keys of a row stand in the order of [`KEY_AT`]. Both
/// tiles have rows of 128 swizzled bytes. No two lanes meet in a bank.
fn transpose(k: &mut KernelBuilder, from: Shared, to: Shared) {
    let tid = k.tid_x();
    let (warp, lane) = (k.shr_u32(tid, 5), k.and_b32(tid, 31));
    let (matrix, i) = (k.shr_u32(lane, 3), k.and_b32(lane, 7));
    let (below, right) = (k.and_b32(matrix, 1), k.shr_u32(matrix, 1));
    let (from, to) = (k.shared_addr(from), k.shared_addr(to));

    // Matrices of eight keys by sixteen bytes: two below each other, two beside each other.
    let key = k.mad_lo_u32(warp, 32, i);
    let key = k.mad_lo_u32(below, 8, key);
    let read = k.mad_lo_u32(key, ROW, from);
    // A pair of them gives two matrices of eight rows: one has the even bytes of the first four places and the odd ones
    // of the last four, the other has the rest. So the rows of a matrix lie in eight different chunks of banks.
    let last = k.shr_u32(i, 2);
    let odd = k.xor_b32(below, last);
    let byte = k.mad_lo_u32(i, 2, odd);
    let swapped = k.setp_ge_u32(lane, 16);
    let (even, odd) = (0x6420u32, 0x7531u32);
    let picks = [k.selp_b32(odd, even, swapped), k.selp_b32(even, odd, swapped)];
    let phase = k.and_b32(byte, 7);
    let row = k.mad_lo_u32(right, 16, byte);
    let write = k.mad_lo_u32(row, ROW, to);
    for sixteen in 0..2 {
        let keys = k.mad_lo_u32(warp, 2, sixteen);
        let chunk = k.xor_b32(keys, phase);
        let write = k.mad_lo_u32(chunk, 16, write);
        for part in 0..4 {
            let chunk = k.add_u32(right, 2 * part);
            let chunk = k.xor_b32(chunk, i);
            let at = k.mad_lo_u32(chunk, 16, read);
            let [a, b, c, d] = k.ldmatrix_trans::<4>(at.at((16 * ROW * sixteen) as i32));
            let turned = [(a, b, 0), (a, b, 1), (c, d, 0), (c, d, 1)]
                .map(|(upper, lower, pick): (_, _, usize)| k.prmt_b32(upper, lower, picks[pick]));
            k.stmatrix(write.at((32 * ROW * part) as i32), turned);
        }
    }
}

/// 128 rows of 128 bytes, as [`transpose`] leaves them.
fn turned(v: &[u8]) -> Vec<u8> {
    let place = |at: usize| at % 128 / 16 * 16 + KEY_AT[at % 16];
    (0..128 * 128).map(|at| v[128 * place(at) + at / 128]).collect()
}

#[test]
fn ldmatrix_prmt_and_stmatrix_turn_a_tile_of_bytes_around() {
    let mut shared = SharedLayout::new();
    let [v, vt] = ["v", "vt"].map(|name| shared.alloc(name, 128 * ROW, 1024));
    let full = shared.alloc("full", 8, 8);
    let module = hopper(128, shared, move |k| {
        let (x_map, y_map) = (k.tensor_map(Maps::x_map), k.tensor_map(Maps::y_map));
        let first = init_barrier(k, full);
        k.if_(first, |k| {
            k.mbarrier_arrive_expect_tx(full, 128 * ROW);
            k.tensor_load(v, x_map, &[0.into(), 0.into()], full, BulkHint::new());
        });
        k.mbarrier_wait_parity(full, 0, Scope::Cta);
        transpose(k, v, vt);
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_sync_all();
        k.if_(first, |k| {
            k.tensor_store(y_map, &[0.into(), 0.into()], vt, BulkHint::new());
            k.bulk_commit();
            k.bulk_wait_read(0);
        });
    });
    assemble(&module, &[Target::Sm90a]);
    let maps = |x: u64, y: u64| {
        let map = |at| TensorMap::new(TensorElement::U8, at, &[128, 128], &[128], &[128, 128]);
        (map(x).swizzled(Swizzle::B128), map(y).swizzled(Swizzle::B128))
    };
    // Every byte tells its key and its place.
    let x: Vec<u8> = (0..128 * 128usize).map(|i| (i / 128 * 31 + i % 128 * 7) as u8).collect();
    for config in policies() {
        let outcome = run_maps(&module, 1, &x, 128 * 128, 0, &maps, config.clone());
        assert_clean(&outcome, &config);
        assert_eq!(outcome.y, turned(&x));
        assert_eq!(outcome.report.stats.bank_conflicts(), 0);
    }
}

/// Y (64x128, f32) = fp8(Q Kᵀ / 16) V as attention has it: scores are rounded to fp8 in registers, V is turned around in
/// shared memory. x has the rows of Q (64), K (128) and V (128), each of 128 elements.
fn attention_tile() -> Module {
    let mut shared = SharedLayout::new();
    let q = shared.alloc("q", 64 * ROW, 1024);
    let [key, v, vt] = ["k", "v", "vt"].map(|name| shared.alloc(name, 128 * ROW, 1024));
    let full = shared.alloc("full", 8, 8);
    hopper(128, shared, move |k| {
        let map = k.tensor_map(Maps::x_map);
        let first = init_barrier(k, full);
        k.if_(first, |k| {
            k.mbarrier_arrive_expect_tx(full, 5 * 64 * ROW);
            for (i, to) in [q.at(0), key.at(0), key.at(8192), v.at(0), v.at(8192)].into_iter().enumerate() {
                k.tensor_load(to, map, &[0.into(), (64 * i as u32).into()], full, BulkHint::new());
            }
        });
        k.mbarrier_wait_parity(full, 0, Scope::Cta);

        k.section("scores");
        let spec = Wgmma::new(128, MatrixTy::E4m3);
        let s = k.reg_vec::<F32>(64);
        products(k, spec, &s, q, key, false.into());

        k.section("scores to fp8");
        let mut p = Vec::new();
        // A lane's own columns, of two blocks of eight, are four keys in a row of the permuted order.
        for pair in s.chunks(8) {
            for [a, b, c, d] in [[0, 1, 4, 5], [2, 3, 6, 7]] {
                let [a, b, c, d] = [a, b, c, d].map(|i: usize| k.mul_f32(pair[i], 0.0625));
                let low = k.cvt_rn_satfinite_e4m3x2_f32(b, a);
                let high = k.cvt_rn_satfinite_e4m3x2_f32(d, c);
                p.push(k.pack_b32(low, high));
            }
        }

        k.section("V turned around");
        transpose(k, v, vt);
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_sync_all();

        k.section("scores times V");
        let o = k.reg_vec::<F32>(64);
        let descriptors: Vec<_> = (0..4).map(|step| descriptor(k, vt, step)).collect();
        k.wgmma_fence();
        for (step, (p, vt)) in p.as_chunks::<4>().0.iter().zip(descriptors).enumerate() {
            k.wgmma_rs(spec, &o, *p, vt, step != 0);
        }
        k.wgmma_commit();
        k.wgmma_wait(0);
        store_rows(k, &o, 128);
    })
}

fn tile_maps(x: u64, _: u64) -> (TensorMap, TensorMap) {
    let map = TensorMap::new(TensorElement::U8, x, &[128, 320], &[128], &[128, 64]).swizzled(Swizzle::B128);
    (map.clone(), map)
}

/// What [`attention_tile`] computes, and the sum of magnitudes, element by element.
fn tile_wanted(x: &[u8]) -> Vec<(f64, f64)> {
    let at = |row: usize, i: usize| F8E4M3::from_bits(x[128 * row + i]).to_f64();
    let scores: Vec<f64> = (0..64 * 128)
        .map(|i| (0..128).map(|d| at(i / 128, d) * at(64 + i % 128, d)).sum::<f64>() / 16.0)
        .map(|s| F8E4M3::from_f64(s).to_f64())
        .collect();
    (0..64 * 128)
        .map(|i| {
            let terms = (0..128).map(|key| scores[i / 128 * 128 + key] * at(192 + key, i % 128));
            terms.fold((0.0, 0.0), |(sum, most), term| (sum + term, most + term.abs()))
        })
        .collect()
}

#[test]
fn scores_in_registers_meet_values_that_were_turned_around() {
    let module = attention_tile();
    assemble(&module, &[Target::Sm90a]);
    let x = whole(320 * 128, 3);
    let wanted = tile_wanted(&x);
    assert!(wanted.iter().any(|w| w.0.abs() > 100.0));
    for config in policies() {
        for sums in [Fp8Sums::F32, Fp8Sums::default()] {
            let config = Config { fp8_sums: sums, ..config.clone() };
            let outcome = run_maps(&module, 1, &x, 64 * 128 * 4, 0, &tile_maps, config.clone());
            assert_clean(&outcome, &config);
            for (got, (want, most)) in outcome.f32s().into_iter().zip(&wanted) {
                // Whole numbers in f32 are exact.
                let bound = if sums == Fp8Sums::F32 { 0.0 } else { drift(4, *most) };
                assert!((f64::from(got) - want).abs() <= bound, "{got} {want} {sums:?}");
            }
        }
    }
}

#[test]
fn what_orders_an_fp8_tile_is_missed_where_it_is_dropped() {
    let module = attention_tile();
    let x = whole(320 * 128, 3);
    let wanted = tile_wanted(&x);
    let mut mutants = 0;
    for at in 0..module.kernels[0].body.len() {
        let Some((name, mutant)) = without(&module, at) else { continue };
        mutants += 1;
        for async_mode in [AsyncMode::Late, AsyncMode::Early] {
            let config = Config { async_mode, budget: 4_000_000, ..with_sums(Fp8Sums::F32) };
            let outcome = run_maps(&mutant, 1, &x, 64 * 128 * 4, 0, &tile_maps, config.clone());
            let right = outcome.f32s().iter().zip(&wanted).all(|(got, want)| f64::from(*got) == want.0);
            assert!(!outcome.report.is_clean() || !right, "{name} under {async_mode:?}");
            if matches!(module.kernels[0].body[at].op, Op::FenceProxyAsync(_)) {
                assert_found(&outcome, &config, FindingKind::MissingProxyFence);
            }
        }
    }
    assert!(mutants >= 12, "only {mutants} mutants");
}

#[test]
fn mma_sync_multiplies_fp8_rows_that_ldmatrix_has_read() {
    use MatrixTy::{E4m3, E5m2};
    const DEPTH: usize = 64;
    for (a_ty, b_ty) in [(E4m3, E4m3), (E5m2, E4m3), (E4m3, E5m2), (E5m2, E5m2)] {
        let mut shared = SharedLayout::new();
        let tile = shared.alloc("rows of A, then of B", 24 * DEPTH as u32, 16);
        let module = kernel(32, shared, Target::Sm89, |k| {
            let (lane, x, y) = (k.tid_x(), k.param(Io::x), k.param(Io::y));
            let base = k.shared_addr(tile);
            k.for_s32(lane, 6 * DEPTH as u32, 32, |k, i, _| {
                let (from, to) = (k.mad_wide_u32(i, 4, x), k.mad_lo_u32(i, 4, base));
                let word = k.ld_global::<B32>(from);
                k.st_shared(to, word);
            });
            k.bar_warp_sync();
            let (matrix, i) = (k.shr_u32(lane, 3), k.and_b32(lane, 7));
            let (below, right) = (k.and_b32(matrix, 1), k.shr_u32(matrix, 1));
            let row = k.mad_lo_u32(below, 8, i);
            let a_at = k.mad_lo_u32(row, DEPTH as u32, base);
            let a_at = k.mad_lo_u32(right, 16, a_at);
            let b_at = k.mad_lo_u32(i, DEPTH as u32, base);
            let b_at = k.mad_lo_u32(below, 16, b_at);
            let mut sums: [Reg<F32>; 4] = std::array::from_fn(|_| k.mov_f32(0.0));
            for step in 0..DEPTH as i32 / 32 {
                let a = k.ldmatrix::<4>(a_at.at(32 * step));
                let b = k.ldmatrix::<2>(b_at.at(16 * DEPTH as i32 + 32 * step));
                sums = k.mma_m16n8k32(a_ty, b_ty, a, b, sums);
            }
            let (group, quad) = (k.shr_u32(lane, 2), k.and_b32(lane, 3));
            let py = k.mad_wide_u32(group, 32, y);
            let py = k.mad_wide_u32(quad, 8, py);
            for (sum, at) in sums.into_iter().zip([0, 4, 256, 260]) {
                k.st_global(py.at(at), sum);
            }
        });
        assert_eq!(module.isa(), IsaVersion::V8_4);
        assemble(&module, &[Target::Sm89, Target::Sm90, Target::Sm90a]);
        let x = [codes(a_ty, 16 * DEPTH, 5), codes(b_ty, 8 * DEPTH, 9)].concat();
        // Sixteen k are added at once.
        for (sums, steps) in [(Fp8Sums::F32, 0), (Fp8Sums::default(), DEPTH / 16)] {
            let outcome = run(&module, 1, &x, 512, 0, with_sums(sums));
            assert_clean(&outcome, &Config::default());
            for (at, got) in outcome.f32s().into_iter().enumerate() {
                let product =
                    |k: usize| value(a_ty, x[at / 8 * DEPTH + k]) * value(b_ty, x[(16 + at % 8) * DEPTH + k]);
                let want: f64 = (0..DEPTH).map(product).sum();
                let most: f64 = (0..DEPTH).map(|k| product(k).abs()).sum();
                let error = (f64::from(got) - want).abs();
                assert!(error <= drift(steps, most) + 1e-5 * most, "{a_ty:?} {b_ty:?} {sums:?}: {error}");
            }
        }
    }
}
