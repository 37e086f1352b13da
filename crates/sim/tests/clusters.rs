//! Blocks that work together: clusters with distributed shared memory and multicast, and blocks of a grid that
//! synchronise through global memory.

mod common;

use common::*;
use flashcore_ptx::*;
use flashcore_sim::*;

/// A kernel for clusters of two blocks.
fn cluster(threads: u32, shared: SharedLayout, emit: impl FnOnce(&mut KernelBuilder)) -> Module {
    let mut k = KernelBuilder::new("test", Target::Sm90a)
        .params::<Maps>()
        .shared(shared)
        .threads(threads)
        .cluster(2, 1, 1);
    emit(&mut k);
    Module::new(Target::Sm90a).with(k.finish().expect("the test kernel is well formed"))
}

fn maps(x: u64, y: u64) -> (flashcore_sim::TensorMap, flashcore_sim::TensorMap) {
    use flashcore_sim::{TensorElement, TensorMap};
    let map = |address| TensorMap::new(TensorElement::U32, address, &[32, 32], &[128], &[32, 8]);
    (map(x), map(y))
}

fn run_cluster(module: &Module, grid: u32, config: Config) -> Outcome {
    run_maps(module, grid, &u32_bytes(0..1024), 4096, 0, &maps, config)
}

#[track_caller]
fn planted(build: impl Fn(bool) -> Module, kind: FindingKind) -> Finding {
    let mut last = None;
    for config in policies() {
        assert_clean(&run_cluster(&build(false), 4, config.clone()), &config);
        last = Some(assert_found(&run_cluster(&build(true), 4, config.clone()), &config, kind));
    }
    last.expect("there are policies")
}

/// The flat index of the thread in the grid.
fn global_thread(k: &mut KernelBuilder) -> Reg<B32> {
    let (block, tid, size) = (k.ctaid_x(), k.tid_x(), k.ntid_x());
    k.mad_lo_u32(block, size, tid)
}

/// Each thread writes a word of its block and reads the same word of the other block.
fn exchange(first_barrier: bool, last_barrier: bool, rank_error: bool) -> Module {
    let mut shared = SharedLayout::new();
    let words = shared.alloc("words", 256, 16);
    cluster(64, shared, move |k| {
        let (tid, y) = (k.tid_x(), k.param(Maps::y));
        let thread = global_thread(k);
        let base = k.shared_addr(words);
        let mine = k.mad_lo_u32(tid, 4, base);
        k.st_shared(mine, thread);
        if first_barrier {
            k.cluster_arrive(ClusterArrive::Release, true);
            k.cluster_wait(true);
        }
        let rank = k.cluster_ctarank();
        let other = k.xor_b32(rank, if rank_error { 2 } else { 1 });
        let theirs = k.mapa(mine, other);
        k.comment("read the other block");
        let [v] = k.ld_cluster::<B32, 1>(theirs);
        if last_barrier {
            k.cluster_arrive(ClusterArrive::Relaxed, true);
            k.cluster_wait(true);
        }
        let py = k.mad_wide_u32(thread, 4, y);
        k.st_global(py, v);
    })
}

#[test]
fn blocks_of_a_cluster_read_each_others_shared_memory() {
    for config in policies() {
        let outcome = run_cluster(&exchange(true, true, false), 4, config.clone());
        assert_clean(&outcome, &config);
        let want: Vec<u32> = (0..256).map(|i| i ^ 64).collect();
        assert_eq!(outcome.u32s()[..256], want);
    }
}

#[test]
fn a_missing_cluster_barrier_is_a_race_and_an_early_end_is_misuse() {
    // Whether the other block has written yet depends on the order, but the read is never ordered after it.
    for config in policies() {
        let outcome = run_cluster(&exchange(false, true, false), 4, config.clone());
        let kinds = [FindingKind::SharedRace, FindingKind::UninitialisedShared];
        assert!(outcome.report.findings.iter().any(|f| kinds.contains(&f.kind)));
    }
    let mut found = 0;
    for config in policies() {
        let outcome = run_cluster(&exchange(true, false, false), 4, config.clone());
        found += outcome.report.of(FindingKind::ClusterMisuse).count();
    }
    assert!(found > 0, "some interleaving ends a block before the other has read");
    planted(|bad| exchange(true, true, bad), FindingKind::ClusterMisuse);
}

#[test]
fn a_multicast_load_fills_every_block_of_the_mask_and_counts_at_each_ones_barrier() {
    let build = |bad: bool| {
        let mut shared = SharedLayout::new();
        let bar = shared.alloc("bar", 8, 8);
        let tile = shared.alloc("tile", 1024, 128);
        cluster(32, shared, move |k| {
            let (tid, map, y) = (k.tid_x(), k.tensor_map(Maps::x_map), k.param(Maps::y));
            let first = k.setp_eq_u32(tid, 0);
            k.if_(first, |k| {
                k.mbarrier_init(bar, 1);
                k.fence_mbarrier_init();
                k.mbarrier_arrive_expect_tx(bar, 1024);
            });
            if !bad {
                k.cluster_arrive(ClusterArrive::Release, true);
                k.cluster_wait(true);
            }
            let rank = k.cluster_ctarank();
            let zero = k.setp_eq_u32(rank, 0);
            let issue = k.and_pred(zero, first);
            k.if_(issue, |k| {
                let mask = k.mov_b16(3u16);
                k.tensor_load(tile, map, &[0.into(), 8.into()], bar, BulkHint::new().multicast(mask));
            });
            k.mbarrier_wait_parity(bar, 0, Scope::Cluster);
            let base = k.shared_addr(tile);
            let at = k.mad_lo_u32(tid, 4, base);
            let v = k.ld_shared::<B32>(at);
            let thread = global_thread(k);
            let py = k.mad_wide_u32(thread, 4, y);
            k.st_global(py, v);
            k.cluster_arrive(ClusterArrive::Relaxed, true);
            k.cluster_wait(true);
        })
    };
    planted(build, FindingKind::MbarrierMisuse);
    for config in policies() {
        let outcome = run_cluster(&build(false), 4, config.clone());
        let want: Vec<u32> = (0..128).map(|i| 256 + i % 32).collect();
        assert_eq!(outcome.u32s()[..128], want);
    }
}

#[test]
fn asynchronous_stores_and_copies_to_another_block_arrive_at_its_barrier() {
    let build = |bad: bool| {
        let mut shared = SharedLayout::new();
        let bar = shared.alloc("bar", 8, 8);
        let words = shared.alloc("words", 128, 16);
        let row = shared.alloc("row", 128, 16);
        let inbox = shared.alloc("inbox", 128, 16);
        cluster(32, shared, move |k| {
            let (tid, y) = (k.tid_x(), k.param(Maps::y));
            let thread = global_thread(k);
            let first = k.setp_eq_u32(tid, 0);
            k.if_(first, |k| {
                k.mbarrier_init(bar, 1);
                k.fence_mbarrier_init();
                k.mbarrier_arrive_expect_tx(bar, 256);
            });
            let row_at = k.shared_addr(row);
            let mine = k.mad_lo_u32(tid, 4, row_at);
            let tenfold = k.mul_lo_u32(thread, 10);
            k.st_shared(mine, tenfold);
            k.fence_proxy_async(ProxySpace::Shared);
            k.cluster_arrive(ClusterArrive::Release, true);
            k.cluster_wait(true);
            let rank = k.cluster_ctarank();
            let other = k.xor_b32(rank, 1);
            let (bar_at, words_at, inbox_at) =
                (k.shared_addr(bar), k.shared_addr(words), k.shared_addr(inbox));
            let bar_there = k.mapa(bar_at, other);
            let to = k.mad_lo_u32(tid, 4, words_at);
            let to = k.mapa(to, other);
            k.st_async(to, [thread], bar_there);
            k.if_(first, |k| {
                let there = k.mapa(inbox_at, other);
                k.bulk_to_cluster(there, row, 128, bar_there);
            });
            if !bad {
                k.mbarrier_wait_parity(bar, 0, Scope::Cluster);
            }
            let at = k.mad_lo_u32(tid, 4, words_at);
            let v = k.ld_shared::<B32>(at);
            let at = k.mad_lo_u32(tid, 4, inbox_at);
            let u = k.ld_shared::<B32>(at);
            let sum = k.add_u32(u, v);
            let py = k.mad_wide_u32(thread, 4, y);
            k.st_global(py, sum);
            k.cluster_arrive(ClusterArrive::Relaxed, true);
            k.cluster_wait(true);
        })
    };
    for config in policies() {
        let outcome = run_cluster(&build(false), 4, config.clone());
        assert_clean(&outcome, &config);
        let want: Vec<u32> = (0..128).map(|i| 11 * (i ^ 32)).collect();
        assert_eq!(outcome.u32s()[..128], want);
        let outcome = run_cluster(&build(true), 4, config.clone());
        let kinds = [FindingKind::SharedRace, FindingKind::UninitialisedShared];
        assert!(outcome.report.findings.iter().any(|f| kinds.contains(&f.kind)));
    }
}

/// A product with a B of two panels of 64 columns; panel `p` holds 2^p everywhere, and `panels` of them lie in shared
/// memory. With `spoiled`, the descriptor is made of the whole address, so that the rank of the block gets into the
/// offset from one panel to the next.
fn product(spoiled: bool, panels: u32) -> Module {
    let mut shared = SharedLayout::new();
    let b = shared.alloc("b", 2048 * panels, 1024);
    cluster(128, shared, move |k| {
        let (tid, y) = (k.tid_x(), k.param(Maps::y));
        let base = k.shared_addr(b);
        k.for_s32(tid, 512 * panels, 128, |k, i, _| {
            let (panel, to) = (k.shr_u32(i, 9), k.mad_lo_u32(i, 4, base));
            // Two halves of one power of two.
            let value = k.mad_lo_u32(panel, 0x0400_0400, 0x3C00_3C00);
            k.st_shared(to, value);
        });
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_sync_all();
        let start = if spoiled { k.shr_u32(base, 4) } else { k.bfe_u32(base, 4u32, 14u32) };
        let low = k.or_b32(start, (2048 / 16) << 16);
        let descriptor = k.pack_b64(low, (1 << 30) | (1024 / 16));
        let ones: [Reg<B32>; 4] = std::array::from_fn(|_| k.mov_b32(0x3C00_3C00));
        let d: Vec<Reg<F32>> = k.reg_vec(64);
        let form = Wgmma { trans_b: true, ..Wgmma::new(128, MatrixTy::F16) };
        k.wgmma_fence();
        k.wgmma_rs(form, &d, ones, descriptor, false);
        k.wgmma_commit();
        k.wgmma_wait(0);
        let thread = global_thread(k);
        let py = k.mad_wide_u32(thread, 8, y);
        for (offset, register) in [(0, d[0]), (4, d[32])] {
            let sum = k.f32_to_bits(register);
            k.st_global(py.at(offset), sum);
        }
    })
}

#[test]
fn an_address_carries_the_blocks_rank_which_spoils_a_descriptor_made_of_all_of_it() {
    // The second panel is looked for 256 bytes too far: beyond all memory, or where other numbers lie.
    planted(|bad| product(bad, 2), FindingKind::OutOfBounds);
    for config in policies() {
        let sums = |spoiled: bool| {
            let outcome = run_cluster(&product(spoiled, 3), 4, config.clone());
            assert_clean(&outcome, &config);
            outcome.f32s()
        };
        assert!(sums(false).chunks(2).all(|sums| sums == [16.0, 32.0]));
        for (thread, sums) in sums(true).chunks(2).enumerate() {
            let first_block = thread / 128 % 2 == 0;
            assert_eq!(sums, if first_block { [16.0, 32.0] } else { [16.0, 36.0] });
        }
    }
}

#[test]
fn an_address_of_another_block_is_no_address_of_ones_own_memory() {
    let mut shared = SharedLayout::new();
    let words = shared.alloc("words", 128, 16);
    let build = |bad: bool| {
        cluster(32, shared.clone(), move |k| {
            let (tid, y) = (k.tid_x(), k.param(Maps::y));
            let rank = k.cluster_ctarank();
            let base = k.shared_addr(words);
            let whose = if bad { k.xor_b32(rank, 1) } else { rank };
            // The same bytes by the address of the symbol, by the plain offset, and by rank and offset.
            let plain = k.and_b32(base, 0x00FF_FFFF);
            let ranked = k.mad_lo_u32(whose, 1 << 24, plain);
            let mut sum = k.mov_b32(0);
            for (i, at) in [base, plain, ranked].into_iter().enumerate() {
                let mine = k.mad_lo_u32(tid, 4, at);
                k.st_shared::<B32>(mine, i as u32 + 1);
                let back = k.ld_shared::<B32>(mine);
                sum = k.add_u32(sum, back);
            }
            k.bar_warp_sync();
            let first = k.ld_shared::<B32>(words);
            let sum = k.add_u32(sum, first);
            let thread = global_thread(k);
            let py = k.mad_wide_u32(thread, 4, y);
            k.st_global(py, sum);
        })
    };
    planted(build, FindingKind::OutOfBounds);
    for config in policies() {
        let sums = run_cluster(&build(false), 4, config).u32s();
        assert_eq!(sums[..128], [9; 128]);
    }
}

#[test]
fn a_barrier_that_expects_too_few_bytes_of_an_asynchronous_store_orders_none_of_it() {
    let build = |bytes: u32| {
        let mut shared = SharedLayout::new();
        let bar = shared.alloc("bar", 8, 8);
        let words = shared.alloc("words", 128, 16);
        cluster(32, shared, move |k| {
            let (tid, y) = (k.tid_x(), k.param(Maps::y));
            let first = k.setp_eq_u32(tid, 0);
            k.if_(first, |k| {
                k.mbarrier_init(bar, 1);
                k.fence_mbarrier_init();
                k.mbarrier_arrive_expect_tx(bar, bytes);
            });
            k.cluster_arrive(ClusterArrive::Release, true);
            k.cluster_wait(true);
            let rank = k.cluster_ctarank();
            let other = k.xor_b32(rank, 1);
            let (bar_at, words_at) = (k.shared_addr(bar), k.shared_addr(words));
            let mine = k.mad_lo_u32(tid, 4, words_at);
            let (to, bar_there) = (k.mapa(mine, other), k.mapa(bar_at, other));
            k.st_async(to, [tid], bar_there);
            k.mbarrier_wait_parity(bar, 0, Scope::Cluster);
            let v = k.ld_shared::<B32>(mine);
            let thread = global_thread(k);
            let py = k.mad_wide_u32(thread, 4, y);
            k.st_global(py, v);
            k.cluster_arrive(ClusterArrive::Relaxed, true);
            k.cluster_wait(true);
        })
    };
    for config in policies() {
        assert_clean(&run_cluster(&build(128), 4, config.clone()), &config);
        assert_found(&run_cluster(&build(64), 4, config.clone()), &config, FindingKind::SharedRace);
    }
}

/// Blocks add to the same words one after the other, in the order of their index, behind a semaphore.
fn in_turn(release: bool, acquire: bool, barrier: bool) -> Module {
    kernel(64, SharedLayout::new(), Target::Sm80, move |k| {
        let (x, tid, block) = (k.param(Io::x), k.tid_x(), k.ctaid_x());
        let first = k.setp_eq_u32(tid, 0);
        k.if_(first, |k| {
            k.loop_(|k, l| {
                let order = if acquire { Order::Acquire(Scope::Gpu) } else { Order::Relaxed(Scope::Gpu) };
                let turn = k.ld_global_hint::<B32>(x, MemHint::new().order(order));
                let mine = k.setp_eq_u32(turn, block);
                k.break_if(l, mine);
                k.nanosleep(20);
            });
        });
        if barrier {
            k.bar_sync_all();
        }
        let at = k.mad_wide_u32(tid, 4, x);
        let v = k.ld_global::<B32>(at.at(64));
        let sum = k.add_u32(v, 1);
        k.comment("add in turn");
        k.st_global(at.at(64), sum);
        k.bar_sync_all();
        let next = k.add_u32(block, 1);
        k.if_(first, |k| {
            let order = if release { Order::Release(Scope::Gpu) } else { Order::Relaxed(Scope::Gpu) };
            k.st_global_hint(x, next, MemHint::new().order(order));
        });
    })
}

#[test]
fn blocks_that_take_turns_behind_a_semaphore_are_ordered_and_not_otherwise() {
    for threads in [1, 2] {
        for seed in [0, 1] {
            let config = Config { threads, seed, budget: 50_000_000, ..Config::default() };
            let clean = |release, acquire, barrier| {
                let outcome =
                    run(&in_turn(release, acquire, barrier), 5, &vec![0; 512], 4, 0, config.clone());
                let races = outcome.report.of(FindingKind::GlobalRace).count();
                assert_eq!(races, outcome.report.findings.len(), "nothing else is found");
                races == 0
            };
            assert!(clean(true, true, true));
            assert!(!clean(false, true, true), "the release is missing");
            assert!(!clean(true, false, true), "the acquire is missing");
            assert!(!clean(true, true, false), "the other warp does not wait for the one that acquired");
        }
    }
}

#[test]
fn a_fence_before_a_relaxed_atomic_and_one_after_it_order_as_well() {
    // The last block to arrive sums what all have written: the threadfence pattern.
    let build = |fences: bool| {
        kernel(32, SharedLayout::new(), Target::Sm80, move |k| {
            let (x, y, tid, block) = (k.param(Io::x), k.param(Io::y), k.tid_x(), k.ctaid_x());
            let slot = k.mad_lo_u32(block, 32, tid);
            let mine = k.mad_wide_u32(slot, 4, x);
            let one = k.add_u32(block, 1);
            k.st_global(mine.at(128), one);
            if fences {
                k.membar(MembarLevel::Gl);
            }
            k.bar_warp_sync();
            let first = k.setp_eq_u32(tid, 0);
            let ticket = k.mov_b32(0);
            k.if_(first, |k| {
                let old = k.atom_add_u32(AtomSem::Relaxed, Scope::Gpu, x, 1u32);
                k.set(ticket, |k| k.mov_b32(old));
            });
            if fences {
                k.membar(MembarLevel::Gl);
            }
            let ticket = k.shfl_idx(ticket, 0);
            k.bar_warp_sync();
            let last = k.setp_eq_u32(ticket, 3);
            k.if_(last, |k| {
                let at = k.mad_wide_u32(tid, 4, x);
                let sum = k.mov_b32(0);
                for b in 0..4 {
                    let v = k.ld_global::<B32>(at.at(128 + 128 * b));
                    k.set(sum, |k| k.add_u32(sum, v));
                }
                let py = k.mad_wide_u32(tid, 4, y);
                k.st_global(py, sum);
            });
        })
    };
    for seed in [0, 1, 2] {
        let config = Config { seed, threads: 1, ..Config::default() };
        let right = run(&build(true), 4, &vec![0; 1024], 128, 0, config.clone());
        assert_clean(&right, &config);
        assert_eq!(right.u32s(), vec![10; 32]);
        let wrong = run(&build(false), 4, &vec![0; 1024], 128, 0, config.clone());
        assert_found(&wrong, &config, FindingKind::GlobalRace);
    }
}

#[test]
fn warps_of_a_block_may_synchronise_through_a_word_of_global_memory() {
    let build = |release: bool| {
        kernel(64, SharedLayout::new(), Target::Sm80, move |k| {
            let (x, y, tid) = (k.param(Io::x), k.param(Io::y), k.tid_x());
            let (warp, lane) = (k.shr_u32(tid, 5), k.and_b32(tid, 31));
            let (first, at) = (k.setp_eq_u32(lane, 0), k.mad_wide_u32(lane, 4, x));
            k.roles(warp, |roles| {
                roles.warps(0..1, |k| {
                    k.st_global(at.at(128), lane);
                    k.bar_warp_sync();
                    let order = if release { Order::Release(Scope::Gpu) } else { Order::Relaxed(Scope::Gpu) };
                    let flag = k.mov_b32(1);
                    k.if_(first, |k| k.st_global_hint(x, flag, MemHint::new().order(order)));
                });
                roles.others(|k| {
                    k.if_(first, |k| {
                        k.loop_(|k, l| {
                            let acquire = MemHint::new().order(Order::Acquire(Scope::Gpu));
                            let flag = k.ld_global_hint::<B32>(x, acquire);
                            let set = k.setp_eq_u32(flag, 1);
                            k.break_if(l, set);
                        });
                    });
                    k.bar_warp_sync();
                    let v = k.ld_global::<B32>(at.at(128));
                    let py = k.mad_wide_u32(lane, 4, y);
                    k.st_global(py, v);
                });
            });
        })
    };
    for seed in [0, 1, 2] {
        let config = Config { seed, threads: 1, ..Config::default() };
        let right = run(&build(true), 1, &vec![0; 512], 128, 0, config.clone());
        assert_clean(&right, &config);
        assert_eq!(right.u32s(), (0..32).collect::<Vec<u32>>());
        let wrong = run(&build(false), 1, &vec![0; 512], 128, 0, config.clone());
        assert_found(&wrong, &config, FindingKind::GlobalRace);
    }
}
