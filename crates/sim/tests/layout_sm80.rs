//! Where the bytes go: `ldmatrix`, `stmatrix`, `mma.sync`, shuffles and the rest of the warp-wide instructions
//! against plain loops over the definition.

mod common;

use common::*;
use flashcore_ptx::*;
use flashcore_sim::Config;

/// One warp copies x (so many words per lane) to shared memory as it is.
fn fill(k: &mut KernelBuilder, tile: Shared, words: u32) -> (Reg<B32>, Reg<B32>) {
    let (x, lane) = (k.param(Io::x), k.tid_x());
    let base = k.shared_addr(tile);
    for w in 0..words {
        let px = k.mad_wide_u32(lane, 4, x);
        let to = k.mad_lo_u32(lane, 4, base);
        let v = k.ld_global::<B32>(px.at(128 * w as i32));
        k.st_shared(to.at(128 * w as i32), v);
    }
    k.bar_warp_sync();
    (base, lane)
}

/// Stores one word per lane at y[32 index + lane].
fn put(k: &mut KernelBuilder, index: u32, value: Reg<B32>) {
    let (y, lane) = (k.param(Io::y), k.tid_x());
    let py = k.mad_wide_u32(lane, 4, y);
    k.st_global(py.at(128 * index as i32), value);
}

/// 16-bit elements that name their own place.
fn halves(count: usize) -> Vec<u8> {
    (0..count as u16).flat_map(u16::to_le_bytes).collect()
}

#[test]
fn ldmatrix_gives_lane_4r_plus_t_the_words_of_row_r_and_transposed_the_columns() {
    for trans in [false, true] {
        let mut shared = SharedLayout::new();
        let tile = shared.alloc("tile", 512, 16);
        let module = kernel(32, shared, Target::Sm80, |k| {
            let (base, lane) = fill(k, tile, 4);
            // Lane l gives the address of row l; 16 bytes per row.
            let row = k.mad_lo_u32(lane, 16, base);
            let m: [Reg<B32>; 4] = if trans { k.ldmatrix_trans(row) } else { k.ldmatrix(row) };
            for (i, r) in m.into_iter().enumerate() {
                put(k, i as u32, r);
            }
        });
        let outcome = run(&module, 1, &halves(256), 512, 0, Config::default());
        assert_clean(&outcome, &Config::default());
        let words = outcome.u32s();
        for matrix in 0..4u32 {
            for lane in 0..32u32 {
                let (g, t) = (lane / 4, lane % 4);
                let element = |row: u32, column: u32| 64 * matrix + 8 * row + column;
                let (lo, hi) = if trans {
                    (element(2 * t, g), element(2 * t + 1, g))
                } else {
                    (element(g, 2 * t), element(g, 2 * t + 1))
                };
                assert_eq!(
                    words[(32 * matrix + lane) as usize],
                    hi << 16 | lo,
                    "matrix {matrix} lane {lane}"
                );
            }
        }
    }
}

#[test]
fn stmatrix_is_the_inverse_of_ldmatrix() {
    for trans in [false, true] {
        let mut shared = SharedLayout::new();
        let tile = shared.alloc("tile", 512, 16);
        let copy = shared.alloc("copy", 512, 16);
        let module = kernel(32, shared, Target::Sm90, |k| {
            let (base, lane) = fill(k, tile, 4);
            let row = k.mad_lo_u32(lane, 16, base);
            let m: [Reg<B32>; 4] = if trans { k.ldmatrix_trans(row) } else { k.ldmatrix(row) };
            let to = k.shared_addr(copy);
            let to_row = k.mad_lo_u32(lane, 16, to);
            if trans {
                k.stmatrix_trans(to_row, m);
            } else {
                k.stmatrix(to_row, m);
            }
            k.bar_warp_sync();
            for w in 0..4 {
                let at = k.mad_lo_u32(lane, 4, to);
                let v = k.ld_shared::<B32>(at.at(128 * w));
                put(k, w as u32, v);
            }
        });
        let outcome = run(&module, 1, &halves(256), 512, 0, Config::default());
        assert_clean(&outcome, &Config::default());
        assert_eq!(outcome.y, halves(256));
    }
}

/// The fragments of A (16 x depth) and B (depth x 8) as the manual lays them out, computed element by element.
fn fragments(depth: usize, bytes: usize, a: &[Vec<u32>], b: &[Vec<u32>]) -> Vec<u8> {
    let per = 4 / bytes;
    let (a_regs, b_regs) = (if depth * bytes == 16 { 2 } else { 4 }, if depth * bytes == 16 { 1 } else { 2 });
    let mut out = vec![0u32; 32 * (a_regs + b_regs)];
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        for r in 0..a_regs {
            for i in 0..per {
                let row = g + 8 * (r % 2);
                let k = per * t + i + (r / 2) * 4 * per;
                out[32 * r + lane] |= a[row][k] << (8 * bytes * i);
            }
        }
        for r in 0..b_regs {
            for i in 0..per {
                let k = per * t + i + r * 4 * per;
                out[32 * (a_regs + r) + lane] |= b[k][g] << (8 * bytes * i);
            }
        }
    }
    u32_bytes(out)
}

#[test]
fn mma_multiplies_rows_by_columns_in_every_shape_and_format() {
    use MatrixTy::{Bf16, E4m3, E5m2, F16};
    for (depth, a_ty, b_ty) in [
        (16, F16, F16),
        (16, Bf16, Bf16),
        (8, F16, F16),
        (8, Bf16, Bf16),
        (32, E4m3, E4m3),
        (32, E4m3, E5m2),
        (32, E5m2, E4m3),
    ] {
        let encode = |ty: MatrixTy, v: f32| -> u32 {
            use flashcore_sim::numerics as num;
            match ty {
                F16 => u32::from(num::f32_to_f16(v)),
                Bf16 => u32::from(num::f32_to_bf16(v)),
                E4m3 => u32::from(num::f32_to_e4m3(v)),
                E5m2 => u32::from(num::f32_to_e5m2(v)),
            }
        };
        let bytes = a_ty.bits() as usize / 8;
        let a: Vec<Vec<f32>> = (0..16).map(|i| (0..depth).map(|k| small(31 * i + k)).collect()).collect();
        let b: Vec<Vec<f32>> =
            (0..depth).map(|k| (0..8).map(|n| small(5 * k + 3 * n + 1)).collect()).collect();
        let codes = |m: &[Vec<f32>], ty| -> Vec<Vec<u32>> {
            m.iter().map(|row| row.iter().map(|&v| encode(ty, v)).collect()).collect()
        };
        let x = fragments(depth, bytes, &codes(&a, a_ty), &codes(&b, b_ty));
        let module = kernel(32, SharedLayout::new(), Target::Sm89, |k| {
            let (x, lane) = (k.param(Io::x), k.tid_x());
            let px = k.mad_wide_u32(lane, 4, x);
            let count = if depth == 8 { 3 } else { 6 };
            let r: Vec<Reg<B32>> = (0..count).map(|i| k.ld_global::<B32>(px.at(128 * i))).collect();
            let lanes = k.cvt_rn_f32_u32(lane);
            let c: [Reg<F32>; 4] = std::array::from_fn(|i| k.add_f32(lanes, i as f32));
            let d = match depth {
                8 => k.mma_m16n8k8(a_ty, [r[0], r[1]], r[2], c),
                16 => k.mma_m16n8k16(a_ty, [r[0], r[1], r[2], r[3]], [r[4], r[5]], c),
                _ => k.mma_m16n8k32(a_ty, b_ty, [r[0], r[1], r[2], r[3]], [r[4], r[5]], c),
            };
            for (i, v) in d.into_iter().enumerate() {
                let bits = k.f32_to_bits(v);
                put(k, i as u32, bits);
            }
        });
        let outcome = run(&module, 1, &x, 512, 0, Config::default());
        assert_clean(&outcome, &Config::default());
        let got = outcome.f32s();
        for lane in 0..32 {
            for i in 0..4 {
                let (row, column) = (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2);
                let dot: f32 = (0..depth).map(|k| a[row][k] * b[k][column]).sum();
                assert_eq!(
                    got[32 * i + lane],
                    dot + (lane + i) as f32,
                    "{a_ty:?} k{depth} row {row} column {column}"
                );
            }
        }
    }
}

#[test]
fn mma_accumulates_in_ascending_k_with_one_rounding_per_step() {
    // 1 + 2^-12 - 1 in this order loses nothing; 2^24 + 1 - 2^24 does: the order shows.
    let a: Vec<Vec<f32>> =
        (0..16).map(|_| (0..16).map(|k| [2048.0, 1.0, -2048.0][k % 3]).collect()).collect();
    let b: Vec<Vec<f32>> = (0..16)
        .map(|k| {
            vec![
                if k == 0 || k == 2 {
                    8192.0
                } else if k == 1 {
                    1.0
                } else {
                    0.0
                };
                8
            ]
        })
        .collect();
    let codes = |m: &[Vec<f32>]| -> Vec<Vec<u32>> {
        m.iter().map(|r| r.iter().map(|&v| u32::from(half::f16::from_f32(v).to_bits())).collect()).collect()
    };
    let x = fragments(16, 2, &codes(&a), &codes(&b));
    let module = kernel(32, SharedLayout::new(), Target::Sm80, |k| {
        let (x, lane) = (k.param(Io::x), k.tid_x());
        let px = k.mad_wide_u32(lane, 4, x);
        let r: Vec<Reg<B32>> = (0..6).map(|i| k.ld_global::<B32>(px.at(128 * i))).collect();
        let c: [Reg<F32>; 4] = std::array::from_fn(|_| k.mov_f32(0.0));
        let d = k.mma_m16n8k16(MatrixTy::F16, [r[0], r[1], r[2], r[3]], [r[4], r[5]], c);
        let bits = k.f32_to_bits(d[0]);
        put(k, 0, bits);
    });
    let outcome = run(&module, 1, &x, 128, 0, Config::default());
    let want = a[0].iter().zip(&b).fold(0.0f32, |sum, (x, y)| x.mul_add(y[0], sum));
    assert_eq!(want, 0.0, "2^24 + 1 rounds back to 2^24");
    assert!(outcome.f32s().iter().all(|&v| v == want));
}

#[test]
fn shuffles_follow_the_manual_in_all_modes_and_segments() {
    let module = kernel(32, SharedLayout::new(), Target::Sm80, |k| {
        let lane = k.tid_x();
        let v = k.mul_lo_u32(lane, 10);
        let up = k.shfl_up(v, 3);
        let down = k.shfl_down(v, 5);
        let across = k.shfl_bfly(v, 6);
        let index = k.shfl_idx(v, 9);
        for (i, r) in [up, down, across, index].into_iter().enumerate() {
            put(k, i as u32, r);
        }
    });
    let outcome = run(&module, 1, &[0; 4], 512, 0, Config::default());
    assert_clean(&outcome, &Config::default());
    let words = outcome.u32s();
    for l in 0..32u32 {
        let at = |i: u32| words[(32 * i + l) as usize] / 10;
        assert_eq!(at(0), if l < 3 { l } else { l - 3 });
        assert_eq!(at(1), if l + 5 > 31 { l } else { l + 5 });
        assert_eq!(at(2), l ^ 6);
        assert_eq!(at(3), 9);
    }
}

#[test]
fn votes_matches_reductions_and_elections_see_all_lanes() {
    let module = kernel(32, SharedLayout::new(), Target::Sm90, |k| {
        let lane = k.tid_x();
        let odd = k.and_b32(lane, 1);
        let p = k.setp_eq_u32(odd, 1);
        let ballot = k.ballot(p, FULL_MASK);
        put(k, 0, ballot);
        for (i, mode) in [VoteMode::All, VoteMode::Any, VoteMode::Uni].into_iter().enumerate() {
            let vote = k.vote(mode, p, FULL_MASK);
            let word = k.selp_b32(1u32, 0u32, vote);
            put(k, 1 + i as u32, word);
        }
        let group = k.shr_u32(lane, 3);
        let same = k.match_b32(MatchMode::Any, group, FULL_MASK);
        put(k, 4, same);
        let sum = k.redux_add_u32(lane, FULL_MASK);
        put(k, 5, sum);
        let leader = k.elect(FULL_MASK);
        let word = k.selp_b32(1u32, 0u32, leader);
        put(k, 6, word);
    });
    let outcome = run(&module, 1, &[0; 4], 7 * 128, 0, Config::default());
    assert_clean(&outcome, &Config::default());
    let words = outcome.u32s();
    for l in 0..32 {
        let at = |i: usize| words[32 * i + l];
        assert_eq!(at(0), 0xAAAA_AAAA);
        assert_eq!([at(1), at(2), at(3)], [0, 1, 0]);
        assert_eq!(at(4), 0xFF << (8 * (l / 8)));
        assert_eq!(at(5), 496);
        assert_eq!(at(6), u32::from(l == 0));
    }
}

#[test]
fn lanes_that_part_meet_again_and_each_keeps_its_own_values() {
    let module = kernel(64, SharedLayout::new(), Target::Sm80, |k| {
        let (y, tid) = (k.param(Io::y), k.tid_x());
        // Collatz steps until 1: every lane leaves the loop at its own time.
        let n = k.add_u32(tid, 1);
        let steps = k.mov_b32(0);
        k.loop_(|k, l| {
            let done = k.setp_eq_u32(n, 1);
            k.break_if(l, done);
            let odd = k.and_b32(n, 1);
            let is_odd = k.setp_eq_u32(odd, 1);
            k.if_else(is_odd, |k| k.set(n, |k| k.mad_lo_u32(n, 3, 1)), |k| k.set(n, |k| k.shr_u32(n, 1)));
            k.set(steps, |k| k.add_u32(steps, 1));
        });
        // All lanes are together again: the active ones are counted.
        let active = k.activemask();
        let count = k.popc_b32(active);
        let sum = k.add_u32(steps, count);
        let py = k.mad_wide_u32(tid, 4, y);
        k.st_global(py, sum);
    });
    for config in policies() {
        let outcome = run(&module, 1, &[0; 4], 256, 0, config.clone());
        assert_clean(&outcome, &config);
        let want: Vec<u32> = (1..=64u64)
            .map(|mut n| {
                let mut steps = 0;
                while n != 1 {
                    n = if n % 2 == 1 { 3 * n + 1 } else { n / 2 };
                    steps += 1;
                }
                steps + 32
            })
            .collect();
        assert_eq!(outcome.u32s(), want);
    }
}
