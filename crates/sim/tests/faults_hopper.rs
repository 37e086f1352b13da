//! One planted fault of every kind that Hopper adds: each must be found under every policy, and the same kernel
//! without the fault must not be accused.

mod common;

use common::*;
use flashcore_ptx::*;
use flashcore_sim::*;

fn maps(x: u64, y: u64) -> (flashcore_sim::TensorMap, flashcore_sim::TensorMap) {
    use flashcore_sim::{TensorElement, TensorMap};
    (
        TensorMap::new(TensorElement::U32, x, &[32, 128], &[128], &[32, 8]),
        TensorMap::new(TensorElement::U32, y, &[32, 32], &[128], &[32, 8]),
    )
}

/// Runs under every policy; with the fault the kind must be found, without it nothing.
#[track_caller]
fn planted(build: impl Fn(bool) -> Module, kind: FindingKind) -> Finding {
    let x = u32_bytes(0..4096);
    let mut last = None;
    for config in policies() {
        let right = run_maps(&build(false), 1, &x, 4096, 4096, &maps, config.clone());
        assert_clean(&right, &config);
        let wrong = run_maps(&build(true), 1, &x, 4096, 4096, &maps, config.clone());
        last = Some(assert_found(&wrong, &config, kind));
    }
    last.expect("there are policies")
}

/// What can be wrong with a load of one tile and its use by all threads.
#[derive(Clone, Copy, Default)]
struct Load {
    no_init: bool,
    no_fence: bool,
    no_barrier: bool,
    no_wait: bool,
    second_init: bool,
    extra_arrival: bool,
    bytes: i32,
    shift: i32,
    over_the_barrier: bool,
    plain_read: bool,
}

/// Two warps; thread 0 sets up an mbarrier and loads a tile of 1 KiB by TMA; all threads read it.
fn load(f: Load) -> Module {
    let mut shared = SharedLayout::new();
    let bar = shared.alloc("bar", 8, 128);
    let tile = shared.alloc("tile", 1024, 128);
    let both = shared.alias("both", 1024, &[bar, tile]);
    hopper(64, shared, move |k| {
        let (tid, map, y) = (k.tid_x(), k.tensor_map(Maps::x_map), k.param(Maps::y));
        let first = k.setp_eq_u32(tid, 0);
        k.if_(first, |k| {
            if !f.no_init {
                k.mbarrier_init(bar, 1);
            }
            if f.second_init {
                k.mbarrier_init(bar, 1);
            }
            if !f.no_fence {
                k.fence_mbarrier_init();
            }
        });
        if !f.no_barrier {
            k.bar_sync_all();
        }
        k.if_(first, |k| {
            k.mbarrier_arrive_expect_tx(bar, (1024 + f.bytes) as u32);
            if f.extra_arrival {
                k.mbarrier_arrive(bar);
            }
            let to = k.shared_addr(if f.over_the_barrier { both } else { tile });
            let to = k.add_u32(to, f.shift as u32);
            k.comment("fill the tile");
            k.tensor_load(to, map, &[0.into(), 0.into()], bar, BulkHint::new());
        });
        if !f.no_wait {
            k.mbarrier_wait_parity(bar, 0, Scope::Cta);
        }
        let base = k.shared_addr(if f.plain_read { bar } else { tile });
        let offset = if f.plain_read { k.and_b32(tid, 0) } else { tid };
        let at = k.mad_lo_u32(offset, 4, base);
        k.comment("use the tile");
        let v = k.ld_shared::<B32>(at);
        let py = k.mad_wide_u32(tid, 4, y);
        k.st_global(py, v);
    })
}

#[test]
fn a_tile_read_before_its_mbarrier_is_waited_for_is_a_race_with_the_copy() {
    let finding = planted(|bad| load(Load { no_wait: bad, ..Load::default() }), FindingKind::SharedRace);
    let other = finding.other.as_ref().expect("both sites");
    let mut comments = [finding.site.comment.as_deref(), other.site.comment.as_deref()];
    comments.sort_unstable();
    assert_eq!(comments, [Some("fill the tile"), Some("use the tile")]);
    // Late and in order, the read comes after the start of the copy.
    let outcome = run_maps(
        &load(Load { no_wait: true, ..Load::default() }),
        1,
        &u32_bytes(0..4096),
        4096,
        0,
        &maps,
        Config::default(),
    );
    let finding = assert_found(&outcome, &Config::default(), FindingKind::SharedRace);
    let other = finding.other.as_ref().expect("both sites");
    assert!(other.by.starts_with("an asynchronous operation of block (0,0,0) warp 0"), "{}", other.by);
    assert!(finding.missing.as_ref().is_some_and(|m| m.starts_with("a wait for the asynchronous operation")));
}

#[test]
fn an_mbarrier_without_init_without_fence_or_without_a_barrier_after_it_is_misused() {
    let kind = FindingKind::MbarrierMisuse;
    let finding = planted(|bad| load(Load { no_init: bad, ..Load::default() }), kind);
    assert!(finding.message.contains("no mbarrier here"), "{}", finding.message);
    let finding = planted(|bad| load(Load { no_fence: bad, ..Load::default() }), kind);
    assert!(finding.missing.as_ref().is_some_and(|m| m.starts_with("fence.mbarrier_init")), "{finding}");
    let finding = planted(|bad| load(Load { no_barrier: bad, ..Load::default() }), kind);
    // The other warp may even come before the init: both are told.
    assert!(finding.message.contains("mbarrier") || finding.message.contains("initialisation"), "{finding}");
}

#[test]
fn an_mbarrier_initialised_twice_overfilled_read_or_overwritten_is_misused() {
    let kind = FindingKind::MbarrierMisuse;
    let finding = planted(|bad| load(Load { second_init: bad, ..Load::default() }), kind);
    assert!(finding.message.contains("initialised again"), "{}", finding.message);
    let finding = planted(|bad| load(Load { plain_read: bad, ..Load::default() }), kind);
    assert!(finding.message.contains("ordinary access"), "{}", finding.message);
    let finding = planted(|bad| load(Load { over_the_barrier: bad, ..Load::default() }), kind);
    assert!(finding.message.contains("bulk copy over"), "{}", finding.message);
    for config in policies() {
        let module = load(Load { extra_arrival: true, ..Load::default() });
        let outcome = run_maps(&module, 1, &u32_bytes(0..4096), 4096, 0, &maps, config.clone());
        // Early, the bytes may have come and the second arrival begins a new phase; else the phase is full.
        assert!(!outcome.report.is_clean() || config.async_mode != AsyncMode::Late);
    }
}

#[test]
fn a_transaction_count_that_does_not_fit_the_copy_deadlocks_with_the_barriers_state() {
    let finding = planted(
        |bad| load(Load { bytes: if bad { 16 } else { 0 }, ..Load::default() }),
        FindingKind::Deadlock,
    );
    assert!(
        finding.message.contains(
            "shared bar + 0 = both + 0: phase 0 (parity 0), 0 of 1 arrivals pending, 16 bytes expected"
        ),
        "{}",
        finding.message
    );
    assert!(
        finding.message.contains("waits for shared bar + 0 = both + 0 to complete phase 0 (parity 0)"),
        "{}",
        finding.message
    );
}

#[test]
fn a_box_outside_of_shared_memory_or_misaligned_is_found() {
    planted(
        |bad| load(Load { shift: if bad { 128 } else { 0 }, ..Load::default() }),
        FindingKind::OutOfBounds,
    );
    planted(|bad| load(Load { shift: if bad { 64 } else { 0 }, ..Load::default() }), FindingKind::Misaligned);
}

/// A ring of one stage that is filled twice; the second filling must wait for the readers.
fn refill(wait_for_readers: bool, fence: bool, early_arrival: bool) -> Module {
    let mut shared = SharedLayout::new();
    let full = shared.alloc("full", 8, 8);
    let empty = shared.alloc("empty", 8, 8);
    let tile = shared.alloc("tile", 1024, 128);
    hopper(64, shared, move |k| {
        let (tid, map, y) = (k.tid_x(), k.tensor_map(Maps::x_map), k.param(Maps::y));
        let warp = k.shr_u32(tid, 5);
        let first = k.setp_eq_u32(tid, 0);
        k.if_(first, |k| {
            k.mbarrier_init(full, 1);
            k.mbarrier_init(empty, 1);
            k.fence_mbarrier_init();
        });
        k.bar_sync_all();
        k.roles(warp, |roles| {
            roles.warps(0..1, |k| {
                k.if_(first, |k| {
                    for turn in 0..2 {
                        if turn == 1 && wait_for_readers {
                            k.mbarrier_wait_parity(empty, 0, Scope::Cta);
                        }
                        k.mbarrier_arrive_expect_tx(full, 1024);
                        k.comment("fill the stage");
                        k.tensor_load(tile, map, &[0.into(), (8 * turn).into()], full, BulkHint::new());
                    }
                });
            });
            roles.warps(1..2, |k| {
                let lane = k.and_b32(tid, 31);
                let base = k.shared_addr(tile);
                let at = k.mad_lo_u32(lane, 4, base);
                for turn in 0..2 {
                    k.mbarrier_wait_parity(full, turn, Scope::Cta);
                    let leader = k.setp_eq_u32(lane, 0);
                    if early_arrival && turn == 0 {
                        k.when(leader, |k| k.mbarrier_arrive(empty));
                    }
                    k.comment("read the stage");
                    let v = k.ld_shared::<B32>(at);
                    if turn == 0 && !early_arrival {
                        if fence {
                            k.fence_proxy_async(ProxySpace::Shared);
                        }
                        k.bar_warp_sync();
                        k.when(leader, |k| {
                            k.comment("free the stage");
                            k.mbarrier_arrive(empty);
                        });
                    }
                    let py = k.mad_wide_u32(lane, 4, y);
                    k.st_global(py.at(128 * turn), v);
                }
            });
        });
    })
}

#[test]
fn a_stage_that_is_refilled_while_it_is_read_is_found() {
    // Without the wait the producer may also lap the consumer, who then waits forever: any of these may be first.
    let x = u32_bytes(0..4096);
    for config in policies() {
        let right = run_maps(&refill(true, true, false), 1, &x, 4096, 0, &maps, config.clone());
        assert_clean(&right, &config);
        let wrong = run_maps(&refill(false, true, false), 1, &x, 4096, 0, &maps, config.clone());
        assert!(!wrong.report.is_clean());
    }
}

#[test]
fn a_stage_that_is_freed_before_it_is_read_is_found() {
    let finding = planted(|bad| refill(true, true, bad), FindingKind::SharedRace);
    let mut sites =
        [finding.site.comment.clone(), finding.other.as_ref().and_then(|o| o.site.comment.clone())];
    sites.sort();
    assert_eq!(sites, [Some("fill the stage".to_string()), Some("read the stage".to_string())]);
}

#[test]
fn an_ordinary_read_that_a_copy_overwrites_without_a_proxy_fence_is_warned_of() {
    let finding = planted(|bad| refill(true, !bad, false), FindingKind::MissingProxyFence);
    assert_eq!(finding.severity, Severity::Warning);
    assert_eq!(finding.missing.as_deref(), Some("generic read -> async write without fence.proxy.async"));
}

/// Threads stage a tile in shared memory and one stores it by a bulk copy.
fn store(fence: bool, barrier: bool, wait: bool, reuse: bool) -> Module {
    let mut shared = SharedLayout::new();
    let tile = shared.alloc("tile", 1024, 128);
    hopper(64, shared, move |k| {
        let (tid, map) = (k.tid_x(), k.tensor_map(Maps::y_map));
        let base = k.shared_addr(tile);
        let at = k.mad_lo_u32(tid, 16, base);
        let v = [tid; 4];
        k.comment("stage the tile");
        k.st_shared_vec(at, v);
        if fence {
            k.fence_proxy_async(ProxySpace::Shared);
        }
        if barrier {
            k.bar_sync_all();
        }
        let first = k.setp_eq_u32(tid, 0);
        k.if_(first, |k| {
            k.comment("store the tile");
            k.tensor_store(map, &[0.into(), 0.into()], tile, BulkHint::new());
            k.bulk_commit();
            if wait {
                k.bulk_wait_read(0);
            }
        });
        if reuse {
            k.bar_sync_all();
            k.comment("use the tile again");
            k.st_shared_vec(at, v);
        }
    })
}

#[test]
fn a_tile_stored_without_a_proxy_fence_is_found() {
    let finding = planted(|bad| store(!bad, true, true, false), FindingKind::MissingProxyFence);
    assert_eq!(finding.severity, Severity::Error);
    assert_eq!(finding.missing.as_deref(), Some("generic write -> async read without fence.proxy.async"));
    assert_eq!(finding.site.comment.as_deref(), Some("store the tile"));
}

#[test]
fn a_tile_stored_without_a_barrier_after_the_other_warps_writes_is_found() {
    planted(|bad| store(true, !bad, true, false), FindingKind::SharedRace);
}

#[test]
fn a_tile_reused_before_the_store_has_read_it_is_found() {
    let finding = planted(|bad| store(true, true, !bad, true), FindingKind::SharedRace);
    let sites = [finding.site.comment.clone(), finding.other.as_ref().and_then(|o| o.site.comment.clone())];
    assert!(sites.contains(&Some("use the tile again".to_string())), "{finding}");
}

#[test]
fn a_block_that_ends_before_its_store_has_read_is_found() {
    planted(|bad| store(true, true, !bad, false), FindingKind::PendingAtExit);
}

#[test]
fn a_load_that_nobody_waits_for_is_reported_at_the_end() {
    let build = |bad: bool| {
        let mut shared = SharedLayout::new();
        let bar = shared.alloc("bar", 8, 8);
        let tile = shared.alloc("tile", 1024, 128);
        hopper(32, shared, move |k| {
            let (tid, map) = (k.tid_x(), k.tensor_map(Maps::x_map));
            let first = k.setp_eq_u32(tid, 0);
            k.if_(first, |k| {
                k.mbarrier_init(bar, 1);
                k.fence_mbarrier_init();
                k.mbarrier_arrive_expect_tx(bar, 1024);
                k.tensor_load(tile, map, &[0.into(), 0.into()], bar, BulkHint::new());
                if !bad {
                    k.mbarrier_wait_parity(bar, 0, Scope::Cta);
                }
            });
        })
    };
    let x = u32_bytes(0..4096);
    for config in policies() {
        let right = run_maps(&build(false), 1, &x, 4096, 0, &maps, config.clone());
        assert_clean(&right, &config);
        // A copy that happens to be done by then leaves nothing pending.
        if config.async_mode == AsyncMode::Late {
            let wrong = run_maps(&build(true), 1, &x, 4096, 0, &maps, config.clone());
            assert_found(&wrong, &config, FindingKind::PendingAtExit);
        }
    }
}

/// What can be wrong around one `wgmma`.
#[derive(Clone, Copy, Default)]
struct Wrong {
    no_fence: bool,
    touch_after_fence: bool,
    no_commit: bool,
    weak_wait: bool,
    read_early: bool,
    write_early: bool,
    change_a_early: bool,
    overwrite_b_early: bool,
    no_proxy_fence: bool,
    no_barrier: bool,
    never_waited: bool,
    one_warp_less: bool,
    descriptor_differs: bool,
}

/// D = A B with A in registers and B (64 x 16, K-major, no swizzle) written by the threads.
fn product(f: Wrong) -> Result<Module, BuildErrors> {
    let mut shared = SharedLayout::new();
    let b = shared.alloc("b", 2048, 128);
    try_hopper(128, shared, move |k| {
        let (tid, y) = (k.tid_x(), k.param(Maps::y));
        let base = k.shared_addr(b);
        let mine = k.mad_lo_u32(tid, 16, base);
        let one = k.mov_b32(0x3C00_3C00);
        k.comment("write B");
        k.st_shared_vec(mine, [one; 4]);
        if !f.no_proxy_fence {
            k.fence_proxy_async(ProxySpace::Shared);
        }
        if !f.no_barrier {
            k.bar_sync_all();
        }
        let address = if f.descriptor_differs {
            let odd = k.and_b32(tid, 1);
            k.mad_lo_u32(odd, 16, base)
        } else {
            base
        };
        let start = k.shr_u32(address, 4);
        let low = k.or_b32(start, 64 << 16);
        let descriptor = k.pack_b64(low, 8u32);
        let a: [Reg<B32>; 4] = std::array::from_fn(|_| k.mov_b32(0x3C00_3C00));
        let acc: Vec<Reg<F32>> = (0..32).map(|_| k.mov_f32(0.0)).collect();
        if !f.no_fence {
            k.wgmma_fence();
        }
        if f.touch_after_fence {
            k.comment("touch an accumulator");
            k.set(acc[3], |k| k.mov_f32(1.0));
        }
        let spec = Wgmma::new(64, MatrixTy::F16);
        let warp = k.shr_u32(tid, 5);
        let runs = k.setp_lt_u32(warp, if f.one_warp_less { 3 } else { 4 });
        k.if_(runs, |k| {
            k.comment("the product");
            k.wgmma_rs(spec, &acc, a, descriptor, true);
            if !f.no_commit {
                k.wgmma_commit();
            }
        });
        if f.read_early {
            k.comment("read an accumulator");
            let v = k.add_f32(acc[0], 1.0);
            let py = k.mad_wide_u32(tid, 4, y);
            k.st_global(py.at(2048), v);
        }
        if f.write_early {
            k.comment("write an accumulator");
            k.set(acc[0], |k| k.mov_f32(2.0));
        }
        if f.change_a_early {
            k.comment("change A");
            k.set(a[1], |k| k.mov_b32(0));
        }
        if f.overwrite_b_early {
            k.comment("overwrite B");
            k.st_shared_vec(mine, [one; 4]);
        }
        if !f.never_waited {
            k.wgmma_wait(u8::from(f.weak_wait));
        }
        let v = if f.never_waited { k.mov_f32(0.0) } else { k.mov_f32(acc[5]) };
        let py = k.mad_wide_u32(tid, 4, y);
        k.st_global(py, v);
    })
}

/// The ptx crate's own checker refuses most of these; the tests are about what the simulator sees.
#[track_caller]
fn planted_product(change: fn(&mut Wrong), kind: FindingKind) -> Finding {
    let build = |bad: bool| {
        let mut wrong = Wrong::default();
        if bad {
            change(&mut wrong);
        }
        product(wrong).unwrap_or_else(|_| mutate(product(Wrong::default()).expect("right"), wrong))
    };
    planted(build, kind)
}

/// Plants a fault in the finished module that the builder refuses to emit.
fn mutate(mut module: Module, f: Wrong) -> Module {
    let body = &mut module.kernels[0].body;
    let find = |body: &[Inst], what: &dyn Fn(&Inst) -> bool| body.iter().position(what).expect("it is there");
    if f.no_fence {
        let at = find(body, &|i| i.op == Op::WgmmaFence);
        body.remove(at);
    }
    if f.no_commit {
        let at = find(body, &|i| i.op == Op::WgmmaCommit);
        body.remove(at);
    }
    if f.never_waited {
        let at = find(body, &|i| matches!(i.op, Op::WgmmaWait(_)));
        body.remove(at);
    }
    let wgmma = find(body, &|i| matches!(i.op, Op::Wgmma(_)));
    let wait = body.iter().position(|i| matches!(i.op, Op::WgmmaWait(_))).unwrap_or(wgmma + 2);
    let set = |d: Arg, class: RegClass, alu: Alu, like: &Inst| Inst {
        op: Op::Alu(alu),
        guard: None,
        dst: vec![d],
        src: vec![Arg::Imm(Imm { class, bits: 0 })],
        comment: Some("planted".into()),
        ..like.clone()
    };
    let (acc, a) = (body[wgmma].dst.clone(), body[wgmma].src.clone());
    let like = body[wgmma].clone();
    if f.touch_after_fence {
        let at = find(body, &|i| i.op == Op::WgmmaFence);
        body.insert(at + 1, set(acc[3], RegClass::F32, Alu::MovF32, &like));
    }
    if f.write_early {
        body.insert(wait, set(acc[0], RegClass::F32, Alu::MovF32, &like));
    }
    if f.change_a_early {
        body.insert(wait, set(a[1], RegClass::B32, Alu::MovB32, &like));
    }
    if f.read_early {
        let mut read = set(acc[1], RegClass::F32, Alu::AbsF32, &like);
        let spare = body.iter().rev().find_map(|i| match i.op {
            Op::Alu(Alu::MovF32) => i.dst.first().copied(),
            _ => None,
        });
        read.src = vec![acc[0]];
        read.dst = vec![spare.expect("a register for the result")];
        body.insert(wait, read);
    }
    if f.weak_wait {
        body[wait].op = Op::WgmmaWait(1);
    }
    module
}

#[test]
fn a_product_is_right_and_clean() {
    let x = u32_bytes(0..4096);
    for config in policies() {
        let outcome =
            run_maps(&product(Wrong::default()).expect("right"), 1, &x, 512, 0, &maps, config.clone());
        assert_clean(&outcome, &config);
        assert!(outcome.f32s().iter().all(|&v| v == 16.0));
    }
}

#[test]
fn accumulators_and_a_registers_touched_before_the_wait_are_found() {
    let kind = FindingKind::WgmmaRegister;
    let finding = planted_product(|f| f.read_early = true, kind);
    assert!(finding.message.contains("the accumulator of a wgmma is read before the wait"), "{finding}");
    assert_eq!(finding.other.as_ref().and_then(|o| o.site.comment.clone()).as_deref(), Some("the product"));
    let finding = planted_product(|f| f.write_early = true, kind);
    assert!(finding.message.contains("accumulator of a wgmma is written"), "{finding}");
    let finding = planted_product(|f| f.change_a_early = true, kind);
    assert!(finding.message.contains("A register of a wgmma is written"), "{finding}");
    planted_product(|f| f.weak_wait = true, kind);
    planted_product(|f| f.no_commit = true, kind);
}

#[test]
fn a_missing_wgmma_fence_and_a_touch_after_it_are_found() {
    planted_product(|f| f.no_fence = true, FindingKind::MissingWgmmaFence);
    planted_product(|f| f.touch_after_fence = true, FindingKind::MissingWgmmaFence);
}

#[test]
fn shared_memory_of_a_product_needs_the_proxy_fence_the_barrier_and_the_wait() {
    let finding = planted_product(|f| f.no_proxy_fence = true, FindingKind::MissingProxyFence);
    assert_eq!(finding.missing.as_deref(), Some("generic write -> async read without fence.proxy.async"));
    planted_product(|f| f.no_barrier = true, FindingKind::SharedRace);
    let finding = planted_product(|f| f.overwrite_b_early = true, FindingKind::SharedRace);
    assert_eq!(finding.site.comment.as_deref(), Some("overwrite B"));
    assert_eq!(finding.other.as_ref().and_then(|o| o.site.comment.clone()).as_deref(), Some("the product"));
}

#[test]
fn a_product_that_is_never_waited_for_is_reported_at_the_end() {
    planted_product(|f| f.never_waited = true, FindingKind::PendingAtExit);
}

#[test]
fn a_warpgroup_that_is_not_complete_or_disagrees_is_found() {
    let finding = planted_product(|f| f.one_warp_less = true, FindingKind::Deadlock);
    assert!(finding.message.contains("waits for the other warps of its warpgroup"), "{}", finding.message);
    planted_product(|f| f.descriptor_differs = true, FindingKind::BadDescriptor);
}

#[test]
fn registers_that_nobody_gives_back_deadlock_and_wrong_counts_are_named() {
    let build = |bad: bool| {
        hopper(384, SharedLayout::new(), move |k| {
            let tid = k.tid_x();
            let warp = k.shr_u32(tid, 5);
            k.roles(warp, |roles| {
                roles.warps(0..4, |k| {
                    if !bad {
                        k.setmaxnreg_dec(24);
                    }
                });
                roles.warps(4..12, |k| k.setmaxnreg_inc(240));
            });
        })
    };
    let finding = planted(build, FindingKind::Deadlock);
    assert!(
        finding.message.contains("waits for 240 registers per thread (0 are free in the block)"),
        "{}",
        finding.message
    );
    let build =
        |bad: bool| hopper(128, SharedLayout::new(), move |k| k.setmaxnreg_dec(if bad { 256 } else { 128 }));
    let finding = planted(build, FindingKind::RegisterPool);
    assert!(finding.message.contains("setmaxnreg.dec to 256 where a thread has 255"), "{}", finding.message);
}

#[test]
fn thousands_of_stores_whose_writes_nobody_waits_for_are_not_lost() {
    let mut shared = SharedLayout::new();
    let row = shared.alloc("row", 128, 128);
    let module = hopper(32, shared, move |k| {
        let (tid, y) = (k.tid_x(), k.param(Maps::y));
        let base = k.shared_addr(row);
        let mine = k.mad_lo_u32(tid, 4, base);
        k.for_s32(0, 3000, 1, |k, i, _| {
            let slot = k.and_b32(i, 31);
            k.st_shared(mine, i);
            k.fence_proxy_async(ProxySpace::Shared);
            k.bar_warp_sync();
            let first = k.setp_eq_u32(tid, 0);
            k.if_(first, |k| {
                let to = k.mad_wide_u32(slot, 128, y);
                k.bulk_store(to, row, 128, BulkHint::new());
                k.bulk_commit();
                k.bulk_wait_read(0);
            });
            k.bar_warp_sync();
        });
    });
    let config = Config { threads: 1, ..Config::default() };
    let outcome = run_maps(&module, 1, &u32_bytes(0..1024), 4096, 0, &maps, config.clone());
    // Two stores to the same row without a wait for the first one's write do race.
    assert!(outcome.report.findings.iter().all(|f| f.kind == FindingKind::GlobalRace));
    for (slot, words) in outcome.u32s().chunks_exact(32).enumerate() {
        let last = (0..3000).rev().find(|i| i % 32 == slot as u32).expect("written");
        assert!(words.iter().all(|&word| word == last), "row {slot}");
    }
}

#[test]
fn a_store_that_begins_before_the_tensor_is_found() {
    let build = |bad: bool| {
        let mut shared = SharedLayout::new();
        let tile = shared.alloc("tile", 1024, 128);
        hopper(64, shared, move |k| {
            let (tid, map) = (k.tid_x(), k.tensor_map(Maps::y_map));
            let base = k.shared_addr(tile);
            let at = k.mad_lo_u32(tid, 16, base);
            k.st_shared_vec(at, [tid; 4]);
            k.fence_proxy_async(ProxySpace::Shared);
            k.bar_sync_all();
            let first = k.setp_eq_u32(tid, 0);
            k.if_(first, |k| {
                let column = if bad { -8 } else { 8 };
                k.tensor_store(map, &[column.into(), 0.into()], tile, BulkHint::new());
                k.bulk_commit();
                k.bulk_wait(0);
            });
        })
    };
    let finding = planted(build, FindingKind::BadDescriptor);
    assert!(finding.message.contains("begins at -8"), "{}", finding.message);
}

#[test]
fn a_bulk_copy_of_an_odd_size_is_found() {
    let build = |bad: bool| {
        let mut shared = SharedLayout::new();
        let tile = shared.alloc("tile", 1024, 128);
        hopper(32, shared, move |k| {
            let (tid, y) = (k.tid_x(), k.param(Maps::y));
            let base = k.shared_addr(tile);
            let at = k.mad_lo_u32(tid, 4, base);
            k.st_shared(at, tid);
            k.fence_proxy_async(ProxySpace::All);
            k.bar_warp_sync();
            let bytes = k.and_b32(tid, 0);
            let bytes = k.add_u32(bytes, if bad { 24u32 } else { 32 });
            let first = k.setp_eq_u32(tid, 0);
            k.if_(first, |k| {
                k.bulk_store(y, tile, bytes, BulkHint::new());
                k.bulk_commit();
                k.bulk_wait(0);
            });
        })
    };
    planted(build, FindingKind::BadDescriptor);
}

#[test]
fn one_lane_that_frees_a_stage_for_its_warp_needs_a_warp_barrier_first() {
    let build = |bad: bool| {
        let mut shared = SharedLayout::new();
        let bar = shared.alloc("bar", 8, 8);
        let words = shared.alloc("words", 128, 128);
        hopper(64, shared, move |k| {
            let tid = k.tid_x();
            let warp = k.shr_u32(tid, 5);
            let first = k.setp_eq_u32(tid, 0);
            k.if_(first, |k| k.mbarrier_init(bar, 1));
            k.bar_sync_all();
            let lane = k.and_b32(tid, 31);
            let base = k.shared_addr(words);
            let at = k.mad_lo_u32(lane, 4, base);
            k.roles(warp, |roles| {
                roles.warps(0..1, |k| {
                    k.st_shared(at, tid);
                    if !bad {
                        k.bar_warp_sync();
                    }
                    let leader = k.setp_eq_u32(lane, 0);
                    k.when(leader, |k| k.mbarrier_arrive(bar));
                });
                roles.warps(1..2, |k| {
                    k.mbarrier_wait_parity(bar, 0, Scope::Cta);
                    let v = k.ld_shared::<B32>(at);
                    let y = k.param(Maps::y);
                    let py = k.mad_wide_u32(lane, 4, y);
                    k.st_global(py, v);
                });
            });
        })
    };
    planted(build, FindingKind::SharedRace);
}

/// Two warps; the first reads a word of the grid before, and lets the second write where that grid may have read.
fn after_the_grid_before(first_waits: bool, second_waits: bool, barrier: bool) -> Module {
    hopper(64, SharedLayout::new(), move |k| {
        let (tid, x, y) = (k.tid_x(), k.param(Maps::x), k.param(Maps::y));
        let warp = k.shr_u32(tid, 5);
        let (px, py) = (k.mad_wide_u32(tid, 4, x), k.mad_wide_u32(tid, 4, y));
        k.griddepcontrol(GridDep::LaunchDependents);
        k.roles(warp, |roles| {
            roles.warps(0..1, |k| {
                if first_waits {
                    k.griddepcontrol(GridDep::Wait);
                }
                let v = k.ld_global::<B32>(px);
                k.st_global(py, v);
                if barrier {
                    k.bar_sync(1, 64);
                }
            });
            roles.others(|k| {
                if second_waits {
                    k.griddepcontrol(GridDep::Wait);
                }
                if barrier {
                    k.bar_sync(1, 64);
                }
                k.st_global(py, tid);
            });
        });
    })
}

#[test]
fn a_thread_that_touches_global_memory_before_the_grid_before_has_ended_is_found() {
    let kind = FindingKind::EarlyGridAccess;
    let first = planted(|fault| after_the_grid_before(!fault, true, false), kind);
    assert!(first.site.instruction.contains("ld.global"), "{first}");
    let second = planted(|fault| after_the_grid_before(true, !fault, false), kind);
    assert!(second.site.instruction.contains("st.global"), "{second}");
}

#[test]
fn a_thread_may_learn_from_another_that_the_grid_before_has_ended() {
    let told = planted(|fault| after_the_grid_before(true, false, !fault), FindingKind::EarlyGridAccess);
    assert_eq!(told.thread.warp, 1, "{told}");
}

#[test]
fn a_barrier_that_is_left_with_an_arrival_that_nobody_waited_for_is_found() {
    let left_over = |fault: bool| {
        hopper(64, SharedLayout::new(), move |k| {
            let tid = k.tid_x();
            let warp = k.shr_u32(tid, 5);
            k.roles(warp, |roles| {
                roles.warps(0..1, |k| {
                    k.bar_sync(3, 64);
                    if fault {
                        k.bar_arrive(3, 64);
                    }
                });
                roles.others(|k| k.bar_sync(3, 64));
            });
        })
    };
    let finding = planted(left_over, FindingKind::BarrierMisuse);
    assert!(finding.message.contains("32 of 64"), "{finding}");
}

/// Two warps arrive twice at an mbarrier for both; between, each waits for the first phase, or the second warp does not.
fn twice(fault: bool) -> Module {
    let mut shared = SharedLayout::new();
    let bar = shared.alloc("bar", 8, 8);
    let word = shared.alloc("word", 4, 4);
    hopper(64, shared, move |k| {
        let (tid, y) = (k.tid_x(), k.param(Maps::y));
        let (warp, lane) = (k.shr_u32(tid, 5), k.and_b32(tid, 31));
        let (first, leader) = (k.setp_eq_u32(tid, 0), k.setp_eq_u32(lane, 0));
        k.if_(first, |k| {
            k.mbarrier_init(bar, 2);
            k.fence_mbarrier_init();
        });
        k.bar_sync_all();
        k.roles(warp, |roles| {
            roles.warps(0..1, |k| {
                k.if_(leader, |k| {
                    k.st_shared(word, tid);
                    k.mbarrier_arrive(bar);
                });
                k.bar_warp_sync();
                k.mbarrier_wait_parity(bar, 0, Scope::Cta);
                k.if_(leader, |k| k.mbarrier_arrive(bar));
                k.bar_warp_sync();
                k.mbarrier_wait_parity(bar, 1, Scope::Cta);
            });
            roles.others(|k| {
                k.if_(leader, |k| k.mbarrier_arrive(bar));
                k.bar_warp_sync();
                if !fault {
                    k.mbarrier_wait_parity(bar, 0, Scope::Cta);
                }
                k.comment("the second arrival");
                k.if_(leader, |k| k.mbarrier_arrive(bar));
                k.bar_warp_sync();
                k.mbarrier_wait_parity(bar, 1, Scope::Cta);
                let v = k.ld_shared::<B32>(word);
                let py = k.mad_wide_u32(tid, 4, y);
                k.st_global(py, v);
            });
        });
    })
}

#[test]
fn a_second_arrival_that_does_not_know_of_the_end_of_the_first_phase_is_found() {
    let x = u32_bytes(0..4096);
    for config in policies() {
        assert_clean(&run_maps(&twice(false), 1, &x, 4096, 4096, &maps, config.clone()), &config);
    }
    // The first warp runs first here, so that the phases are what they should be: only the order tells.
    for async_mode in [AsyncMode::Late, AsyncMode::Early] {
        let config = Config { async_mode, ..Config::default() };
        let wrong = run_maps(&twice(true), 1, &x, 4096, 4096, &maps, config.clone());
        let finding = assert_found(&wrong, &config, FindingKind::MbarrierMisuse);
        assert!(finding.message.contains("both may fall into one phase"), "{finding}");
        assert_eq!(finding.site.comment.as_deref(), Some("the second arrival"));
    }
}
