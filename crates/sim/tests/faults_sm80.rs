//! One planted fault of every kind that the sm_80 instructions allow: each must be found under every policy, and
//! the same kernel without the fault must not be accused.

mod common;

use common::*;
use flashcore_ptx::*;
use flashcore_sim::*;

/// Runs under every policy; with the fault the kind must be found, without it nothing.
#[track_caller]
fn planted(build: impl Fn(bool) -> Module, grid: u32, kind: FindingKind) -> Finding {
    let x = u32_bytes(0..4096);
    let mut last = None;
    for config in policies() {
        let right = run(&build(false), grid, &x, 16384, 4096, config.clone());
        assert_clean(&right, &config);
        let wrong = run(&build(true), grid, &x, 16384, 4096, config.clone());
        last = Some(assert_found(&wrong, &config, kind));
    }
    last.expect("there are policies")
}

/// `y[i] = x[i + shift]` for the thread's own i.
fn copy_kernel(shift: i32, bytes_off: i32) -> Module {
    kernel(64, SharedLayout::new(), Target::Sm80, |k| {
        let (x, y, tid) = (k.param(Io::x), k.param(Io::y), k.tid_x());
        let (px, py) = (k.mad_wide_u32(tid, 4, x), k.mad_wide_u32(tid, 4, y));
        k.comment("the shifted load");
        let v = k.ld_global::<B32>(px.at(4 * shift + bytes_off));
        k.st_global(py, v);
    })
}

#[test]
fn a_global_load_outside_of_its_buffer_is_found_with_its_distance() {
    let finding = planted(|bad| copy_kernel(if bad { 4093 } else { 0 }, 0), 1, FindingKind::OutOfBounds);
    let place = finding.place.as_ref().expect("an address");
    assert_eq!(place.description, "global 0 bytes past the end of x (16384 bytes)");
    assert_eq!(finding.site.comment.as_deref(), Some("the shifted load"));
    assert!(finding.site.loc.expect("a line").file().ends_with("faults_sm80.rs"));
    assert_eq!((finding.thread.warp, finding.thread.lane), (0, 3));
}

#[test]
fn a_misaligned_global_load_is_found() {
    planted(|bad| copy_kernel(0, if bad { 2 } else { 0 }), 1, FindingKind::Misaligned);
}

#[test]
fn a_read_of_global_memory_without_a_value_is_found() {
    let build = |bad: bool| {
        kernel(32, SharedLayout::new(), Target::Sm80, |k| {
            let (x, y, tid) = (k.param(Io::x), k.param(Io::y), k.tid_x());
            let (px, py) = (k.mad_wide_u32(tid, 4, x), k.mad_wide_u32(tid, 4, y));
            let v = k.ld_global::<B32>(if bad { py } else { px });
            k.st_global(py.at(128), v);
        })
    };
    planted(build, 1, FindingKind::UninitialisedGlobal);
}

/// Takes a register its first value. The checker of the ptx crate would refuse this, so it is done to a finished module.
fn drop_first_move(module: &mut Module) {
    let body = &mut module.kernels[0].body;
    let first = body.iter().position(|i| i.op == Op::Alu(Alu::MovB32)).expect("the first move");
    body.remove(first);
}

#[test]
fn a_register_written_in_some_lanes_and_read_in_all_is_found() {
    let build = |bad: bool| {
        let mut module = kernel(32, SharedLayout::new(), Target::Sm80, |k| {
            let (y, tid) = (k.param(Io::y), k.tid_x());
            let py = k.mad_wide_u32(tid, 4, y);
            let low = k.setp_lt_u32(tid, 16);
            let v = k.mov_b32(1);
            k.when(low, |k| k.set(v, |k| k.mov_b32(2)));
            k.st_global(py, v);
        });
        if bad {
            drop_first_move(&mut module);
        }
        module
    };
    let finding = planted(build, 1, FindingKind::UninitialisedRegister);
    assert_eq!(finding.thread.lane, 16);
    assert!(finding.message.contains("%r"), "{}", finding.message);
}

#[test]
fn a_register_without_a_value_is_named_at_the_first_of_the_plain_instructions_that_read_it() {
    let build = |bad: bool| {
        let mut module = kernel(32, SharedLayout::new(), Target::Sm80, |k| {
            let (y, tid) = (k.param(Io::y), k.tid_x());
            let py = k.mad_wide_u32(tid, 4, y);
            let low = k.setp_lt_u32(tid, 8);
            let v = k.mov_b32(1);
            k.when(low, |k| k.set(v, |k| k.mov_b32(2)));
            let one_more = k.add_u32(tid, 1);
            let thrice = k.mul_lo_u32(one_more, 3);
            k.comment("the first that reads it");
            let sum = k.xor_b32(v, thrice);
            k.comment("the second");
            let sum = k.xor_b32(v, sum);
            k.st_global(py, sum);
        });
        if bad {
            drop_first_move(&mut module);
        }
        module
    };
    let finding = planted(build, 1, FindingKind::UninitialisedRegister);
    assert_eq!(finding.site.comment.as_deref(), Some("the first that reads it"));
    assert_eq!(finding.thread.lane, 8);
}

/// Each thread stores to shared memory, then reads another thread's word.
fn exchange(distance: u32, sync: impl Fn(&mut KernelBuilder), again: impl Fn(&mut KernelBuilder)) -> Module {
    let mut shared = SharedLayout::new();
    let words = shared.alloc("words", 64 * 4, 16);
    kernel(64, shared, Target::Sm80, |k| {
        let (y, tid) = (k.param(Io::y), k.tid_x());
        let base = k.shared_addr(words);
        let mine = k.mad_lo_u32(tid, 4, base);
        let other = k.xor_b32(tid, distance);
        let theirs = k.mad_lo_u32(other, 4, base);
        k.comment("publish my word");
        k.st_shared(mine, tid);
        sync(k);
        k.comment("read the other's word");
        let v = k.ld_shared::<B32>(theirs);
        again(k);
        k.comment("overwrite my word");
        k.st_shared(mine, v);
        let py = k.mad_wide_u32(tid, 4, y);
        k.st_global(py, v);
    })
}

#[test]
fn a_read_of_another_warps_store_without_a_barrier_is_a_race() {
    let build = |bad: bool| {
        exchange(
            32,
            |k| {
                if !bad {
                    k.bar_sync_all();
                }
            },
            KernelBuilder::bar_sync_all,
        )
    };
    let finding = planted(build, 1, FindingKind::SharedRace);
    assert_eq!(finding.severity, Severity::Error);
    let mut sites = [&finding.site, &finding.other.as_ref().expect("both sites").site];
    sites.sort_by_key(|s| s.pc);
    assert_eq!(sites[0].comment.as_deref(), Some("publish my word"));
    assert_eq!(sites[1].comment.as_deref(), Some("read the other's word"));
    assert!(sites[0].instruction.starts_with("st.shared.b32"), "{}", sites[0].instruction);
    assert!(finding.place.as_ref().is_some_and(|p| p.description.starts_with("shared words + ")));
    assert_eq!(finding.missing.as_deref(), Some("a barrier between the two"));
}

#[test]
fn an_overwrite_of_what_another_warp_still_reads_is_a_race() {
    let build = |bad: bool| {
        exchange(32, KernelBuilder::bar_sync_all, |k| {
            if !bad {
                k.bar_sync_all();
            }
        })
    };
    // Which warp is first depends on the interleaving: the write races with the read, or the read with the write.
    let finding = planted(build, 1, FindingKind::SharedRace);
    let sites = [&finding.site, &finding.other.as_ref().expect("both sites").site];
    assert!(sites.iter().any(|s| s.comment.as_deref() == Some("overwrite my word")));
}

#[test]
fn lanes_of_one_warp_that_exchange_without_a_warp_barrier_are_warned_of() {
    let build = |bad: bool| {
        exchange(
            1,
            |k| {
                if !bad {
                    k.bar_warp_sync();
                }
            },
            KernelBuilder::bar_warp_sync,
        )
    };
    let finding = planted(build, 1, FindingKind::WarpRace);
    assert_eq!(finding.severity, Severity::Warning);
}

#[test]
fn two_warps_that_write_the_same_word_race() {
    let build = |bad: bool| {
        let mut shared = SharedLayout::new();
        let words = shared.alloc("words", 64 * 4, 16);
        kernel(64, shared, Target::Sm80, move |k| {
            let tid = k.tid_x();
            let slot = if bad { k.and_b32(tid, 31) } else { tid };
            let base = k.shared_addr(words);
            let at = k.mad_lo_u32(slot, 4, base);
            k.st_shared(at, tid);
        })
    };
    planted(build, 1, FindingKind::SharedRace);
}

#[test]
fn shared_memory_without_a_value_outside_or_misaligned_is_found() {
    // (offset of the store, offset of the load)
    let build = |store: i32, load: i32| {
        let mut shared = SharedLayout::new();
        shared.alloc("low", 64, 16);
        let tile = shared.alloc("tile", 64, 256);
        let mut module = kernel(32, shared, Target::Sm80, move |k| {
            let base = k.shared_addr(tile);
            k.st_shared::<B32>(base.at(16), 7);
            k.bar_warp_sync();
            let v = k.ld_shared::<B32>(base.at(16));
            let y = k.param(Io::y);
            k.st_global(y, v);
        });
        let offsets = [store, load];
        let mut next = offsets.iter();
        for inst in &mut module.kernels[0].body {
            if matches!(inst.op, Op::Ld { space: Space::Shared, .. } | Op::St { space: Space::Shared, .. }) {
                for arg in &mut inst.src {
                    if let Arg::Mem { offset, .. } = arg {
                        *offset = *next.next().expect("two accesses");
                    }
                }
            }
        }
        module
    };
    planted(|bad| build(16, if bad { 20 } else { 16 }), 1, FindingKind::UninitialisedShared);
    planted(|bad| build(if bad { 64 } else { 16 }, 16), 1, FindingKind::OutOfBounds);
    planted(|bad| build(if bad { -64 } else { 16 }, 16), 1, FindingKind::OutOfBounds);
    planted(|bad| build(16, if bad { 18 } else { 16 }), 1, FindingKind::Misaligned);
}

/// Copies x to shared memory asynchronously in two groups, waits, and sums both parts of another thread.
fn async_copies(wait: Option<u8>, barrier: bool) -> Module {
    let mut shared = SharedLayout::new();
    let tile = shared.alloc("tile", 2 * 64 * 16, 16);
    kernel(64, shared, Target::Sm80, move |k| {
        let (x, y, tid) = (k.param(Io::x), k.param(Io::y), k.tid_x());
        let base = k.shared_addr(tile);
        let mine = k.mad_lo_u32(tid, 16, base);
        let px = k.mad_wide_u32(tid, 16, x);
        for part in 0..2 {
            k.comment("copy a part");
            k.cp_async(CpAsyncCache::Cg, CpAsyncBytes::B16, mine.at(part * 1024), px.at(part * 1024));
            k.cp_async_commit();
        }
        if let Some(pending) = wait {
            k.cp_async_wait(pending);
        }
        if barrier {
            k.bar_sync_all();
        }
        let other = k.xor_b32(tid, 32);
        let theirs = k.mad_lo_u32(other, 16, base);
        let a = k.ld_shared::<B32>(theirs);
        let b = k.ld_shared::<B32>(theirs.at(1024));
        let sum = k.add_u32(a, b);
        let py = k.mad_wide_u32(tid, 4, y);
        k.st_global(py, sum);
    })
}

#[test]
fn asynchronous_copies_give_the_right_sum_and_are_not_accused() {
    let x = u32_bytes(0..4096);
    for config in policies() {
        let outcome = run(&async_copies(Some(0), true), 1, &x, 256, 0, config.clone());
        assert_clean(&outcome, &config);
        let want: Vec<u32> = (0..64).map(|t| 2 * 4 * (t ^ 32) + 256).collect();
        assert_eq!(outcome.u32s(), want);
        assert!(outcome.unwritten.is_empty());
    }
}

#[test]
fn a_missing_or_too_weak_wait_for_copies_is_found() {
    planted(|bad| async_copies(if bad { None } else { Some(0) }, true), 1, FindingKind::SharedRace);
    let finding = planted(|bad| async_copies(Some(u8::from(bad)), true), 1, FindingKind::SharedRace);
    assert!(finding.other.as_ref().is_some_and(|o| o.by.starts_with("an asynchronous operation of block")));
    assert!(finding.missing.as_ref().is_some_and(|m| m.contains("wait for the asynchronous operation")));
}

#[test]
fn a_wait_for_copies_without_a_barrier_does_not_help_other_warps() {
    planted(|bad| async_copies(Some(0), !bad), 1, FindingKind::SharedRace);
}

#[test]
fn late_copies_leave_nan_where_the_wait_is_missing_and_early_ones_do_not() {
    let x = u32_bytes(0..4096);
    let late = Config { async_mode: AsyncMode::Late, threads: 1, ..Config::default() };
    let wrong = run(&async_copies(None, true), 1, &x, 256, 0, late.clone());
    let right = run(&async_copies(Some(0), true), 1, &x, 256, 0, late);
    assert_ne!(wrong.y, right.y, "the poison is visible in the result");
    let early = Config { async_mode: AsyncMode::Early, threads: 1, ..Config::default() };
    assert_eq!(run(&async_copies(None, true), 1, &x, 256, 0, early).y, right.y);
}

#[test]
fn copies_that_are_never_waited_for_are_reported_at_the_end() {
    let build = |bad: bool| {
        let mut shared = SharedLayout::new();
        let tile = shared.alloc("tile", 512, 16);
        kernel(32, shared, Target::Sm80, move |k| {
            let (x, tid) = (k.param(Io::x), k.tid_x());
            let base = k.shared_addr(tile);
            let (to, from) = (k.mad_lo_u32(tid, 16, base), k.mad_wide_u32(tid, 16, x));
            k.cp_async(CpAsyncCache::Ca, CpAsyncBytes::B16, to, from);
            k.cp_async_commit();
            if !bad {
                k.cp_async_wait_all();
            }
        })
    };
    planted(build, 1, FindingKind::PendingAtExit);
}

#[test]
fn a_short_source_fills_the_rest_with_zeros_and_reads_nothing_beyond() {
    let mut shared = SharedLayout::new();
    let tile = shared.alloc("tile", 512, 16);
    let module = kernel(32, shared, Target::Sm80, |k| {
        let (x, y, tid) = (k.param(Io::x), k.param(Io::y), k.tid_x());
        let base = k.shared_addr(tile);
        let to = k.mad_lo_u32(tid, 16, base);
        let from = k.mad_wide_u32(tid, 16, x);
        // Lane l reads l bytes, at most 16; lanes beyond the buffer read none.
        let bytes = k.min_u32(tid, 16u32);
        let last = k.setp_ge_u32(tid, 20);
        let bytes = k.selp_b32(0u32, bytes, last);
        k.cp_async_zfill(CpAsyncCache::Cg, CpAsyncBytes::B16, to, from, bytes);
        k.cp_async_commit();
        k.cp_async_wait(0);
        let v: [Reg<B32>; 4] = k.ld_shared_vec(to);
        let py = k.mad_wide_u32(tid, 16, y);
        k.st_global_vec(py, v);
    });
    let x: Vec<u8> = (0..20 * 16).map(|i| (i % 251) as u8 + 1).collect();
    for config in policies() {
        let outcome = run(&module, 1, &x, 512, 0, config.clone());
        assert_clean(&outcome, &config);
        for lane in 0..32 {
            for byte in 0..16 {
                let read = if lane >= 20 { 0 } else { lane.min(16) };
                let want = if byte < read { x[lane * 16 + byte] } else { 0 };
                assert_eq!(outcome.y[lane * 16 + byte], want, "lane {lane} byte {byte}");
            }
        }
    }
}

#[test]
fn blocks_that_write_the_same_global_word_race_and_atomics_do_not() {
    let build = |atomic: bool, apart: bool| {
        kernel(32, SharedLayout::new(), Target::Sm80, move |k| {
            let (x, tid, block) = (k.param(Io::x), k.tid_x(), k.ctaid_x());
            let i = if apart { k.mad_lo_u32(block, 32, tid) } else { tid };
            let at = k.mad_wide_u32(i, 4, x);
            if atomic {
                k.red_add_u32(AtomSem::Relaxed, Scope::Gpu, at, 1u32);
            } else {
                k.st_global(at, tid);
            }
        })
    };
    let finding = planted(|bad| build(false, !bad), 4, FindingKind::GlobalRace);
    assert!(finding.other.as_ref().is_some_and(|o| o.by.starts_with("another block")));
    planted(|bad| build(!bad, false), 4, FindingKind::GlobalRace);
}

#[test]
fn warps_of_a_block_race_in_global_memory_without_a_barrier() {
    let build = |bad: bool| {
        kernel(64, SharedLayout::new(), Target::Sm80, move |k| {
            let (y, tid) = (k.param(Io::y), k.tid_x());
            let mine = k.mad_wide_u32(tid, 4, y);
            k.st_global(mine, tid);
            if !bad {
                k.bar_sync_all();
            }
            let other = k.xor_b32(tid, 32);
            let theirs = k.mad_wide_u32(other, 4, y);
            let v = k.ld_global::<B32>(theirs);
            k.st_global(mine.at(1024), v);
        })
    };
    planted(build, 1, FindingKind::GlobalRace);
}

#[test]
fn a_barrier_with_the_wrong_number_of_threads_deadlocks_with_reasons() {
    let build = |bad: bool| {
        kernel(64, SharedLayout::new(), Target::Sm80, move |k| {
            let tid = k.tid_x();
            let warp = k.shr_u32(tid, 5);
            let first = k.setp_eq_u32(warp, 0);
            k.if_(first, |k| {
                k.comment("wait for the other warp");
                k.bar_sync(3, 64);
            });
            if !bad {
                k.if_(!first, |k| k.bar_arrive(3, 64));
            }
        })
    };
    let finding = planted(build, 1, FindingKind::Deadlock);
    assert!(
        finding.message.contains("block (0,0,0) warp 0 lane 0 waits for barrier 3"),
        "{}",
        finding.message
    );
    assert!(finding.message.contains("barrier 3: 32 of 64 threads: warp 0"), "{}", finding.message);
    assert!(finding.message.contains("wait for the other warp"), "{}", finding.message);
}

#[test]
fn barrier_counts_that_disagree_or_are_no_multiple_of_a_warp_are_named() {
    let build = |threads: u32| {
        kernel(64, SharedLayout::new(), Target::Sm80, move |k| {
            let tid = k.tid_x();
            let warp = k.shr_u32(tid, 5);
            let odd = k.mul_lo_u32(warp, threads.wrapping_sub(64));
            let count = k.add_u32(odd, 64u32);
            k.bar_sync(1, count);
        })
    };
    let finding = planted(|bad| build(if bad { 96 } else { 64 }), 1, FindingKind::BarrierMisuse);
    assert!(finding.message.contains("threads"), "{}", finding.message);
    planted(|bad| build(if bad { 72 } else { 64 }), 1, FindingKind::BarrierMisuse);
}

#[test]
fn a_barrier_in_a_branch_that_only_some_lanes_take_is_found() {
    let build = |bad: bool| {
        kernel(64, SharedLayout::new(), Target::Sm80, move |k| {
            let tid = k.tid_x();
            let some = k.setp_lt_u32(tid, if bad { 48 } else { 64 });
            k.if_(some, |k| k.bar_sync(2, 64));
        })
    };
    let finding = planted(build, 1, FindingKind::DivergentCollective);
    assert!(finding.message.contains("16 of the warp's 32 live lanes"), "{}", finding.message);
}

#[test]
fn a_shuffle_that_names_absent_lanes_is_found() {
    let build = |bad: bool| {
        kernel(32, SharedLayout::new(), Target::Sm80, move |k| {
            let (y, tid) = (k.param(Io::y), k.tid_x());
            let v = k.mov_b32(tid);
            let some = k.setp_lt_u32(tid, if bad { 20 } else { 32 });
            k.if_(some, |k| {
                let got = k.shfl_bfly(tid, 16);
                k.set(v, |k| k.mov_b32(got));
            });
            let py = k.mad_wide_u32(tid, 4, y);
            k.st_global(py, v);
        })
    };
    planted(build, 1, FindingKind::DivergentCollective);
}

#[test]
fn a_trap_and_an_endless_loop_are_findings() {
    let trap = |bad: bool| {
        kernel(32, SharedLayout::new(), Target::Sm80, move |k| {
            let n = k.param(Io::n);
            let wrong = k.setp_ne_u32(n, if bad { 1 } else { 4096 });
            k.if_(wrong, KernelBuilder::trap);
        })
    };
    planted(trap, 1, FindingKind::Trap);
    let endless = |bad: bool| {
        kernel(32, SharedLayout::new(), Target::Sm80, move |k| {
            let n = k.param(Io::n);
            k.loop_(|k, l| {
                let done = k.setp_ne_u32(n, if bad { 4096 } else { 0 });
                k.break_if(l, done);
            });
        })
    };
    let finding = planted(endless, 1, FindingKind::Budget);
    assert!(finding.message.contains("warp 0 lane 0 at #"), "{}", finding.message);
}

#[test]
fn output_that_was_not_written_is_told_to_the_byte() {
    let module = kernel(32, SharedLayout::new(), Target::Sm80, |k| {
        let (y, tid) = (k.param(Io::y), k.tid_x());
        let even = k.and_b32(tid, 1);
        let odd = k.setp_ne_u32(even, 0);
        let at = k.mad_wide_u32(tid, 4, y);
        k.when(odd, |k| k.st_global(at, tid));
    });
    let outcome = run(&module, 1, &[0; 4], 32, 0, Config::default());
    assert_eq!(outcome.unwritten, [0..4, 8..12, 16..20, 24..28]);
}

#[test]
fn a_module_without_the_kernel_and_impossible_launches_are_errors_with_reasons() {
    let module = copy_kernel(0, 0);
    let mut sim = Sim::new(Config::default());
    let error =
        sim.launch(&module, "other", LaunchDims::linear(1, 64), &[0; 64]).expect_err("no such kernel");
    assert_eq!(error.to_string(), "the module has no kernel `other`; it has test");
    let error = sim.launch(&module, "test", LaunchDims::linear(1, 32), &[0; 64]).expect_err("wrong block");
    assert!(error.to_string().contains("[64, 1, 1]"), "{error}");
    let error = sim.launch(&module, "test", LaunchDims::linear(1, 64), &[0; 4]).expect_err("few parameters");
    assert!(error.to_string().contains("4 bytes of parameters; the kernel has 20"), "{error}");
}
