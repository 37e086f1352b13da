//! The checker: one fault planted at a time is found, at its line; the correct way of doing the same passes.

use flashcore_ptx::*;

/// The faults of a kernel for a target.
fn faults(target: Target, emit: impl FnOnce(&mut KernelBuilder)) -> Vec<BuildError> {
    let mut k = KernelBuilder::new("planted", target).threads(128);
    emit(&mut k);
    k.finish().err().map(|errors| errors.0).unwrap_or_default()
}

/// The only fault of a kernel.
#[track_caller]
fn fault(target: Target, emit: impl FnOnce(&mut KernelBuilder)) -> Fault {
    let mut errors = faults(target, emit);
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors.remove(0).fault
}

#[track_caller]
fn clean(target: Target, emit: impl FnOnce(&mut KernelBuilder)) {
    assert_eq!(faults(target, emit), []);
}

#[track_caller]
fn forbidden(target: Target, words: &str, emit: impl FnOnce(&mut KernelBuilder)) {
    match fault(target, emit) {
        Fault::Forbidden(message) => assert!(message.contains(words), "{message}"),
        other => panic!("{other:?}"),
    }
}

mod messages {
    use super::*;

    #[test]
    fn a_fault_names_the_authors_rust_line_and_words() {
        let mut line = 0;
        let errors = faults(Target::Sm80, |k| {
            k.section("prologue");
            k.comment("one warpgroup waits");
            line = line!() + 1;
            k.bar_sync(16, 128);
        });
        let error = &errors[0];
        assert_eq!(error.loc.map(|l| (l.file(), l.line())), Some((file!(), line)));
        let text = error.to_string();
        assert!(text.starts_with(&format!("{}:{line}:", file!())), "{text}");
        assert!(text.contains("kernel `planted` (prologue: one warpgroup waits): barrier 16"), "{text}");
    }

    #[test]
    fn a_fault_within_a_helper_that_tracks_its_caller_names_the_callers_line() {
        #[track_caller]
        fn helper(k: &mut KernelBuilder) {
            k.cp_async_wait(0);
            k.setmaxnreg_inc(24);
        }
        let line = line!() + 1;
        let errors = faults(Target::Sm90, |k| helper(k));
        assert_eq!(errors[0].loc.map(std::panic::Location::line), Some(line));
    }

    #[test]
    fn every_fault_is_reported_not_only_the_first() {
        let errors = faults(Target::Sm80, |k| {
            k.bar_sync(16, 128);
            k.bar_sync(1, 100);
            k.wgmma_fence();
        });
        assert_eq!(errors.len(), 3);
    }
}

mod combinations {
    use super::*;

    #[test]
    fn an_instruction_that_the_target_lacks_is_refused_with_the_target_it_needs() {
        let expected =
            Fault::Target { syntax: "wgmma.fence.sync.aligned", needs: Target::Sm90a, target: Target::Sm90 };
        assert_eq!(fault(Target::Sm90, |k| k.wgmma_fence()), expected);
    }

    #[test]
    fn setmaxnreg_takes_multiples_of_8_from_24_to_256() {
        for count in [16, 23, 28, 264] {
            forbidden(Target::Sm90a, "multiple of 8 from 24 to 256", |k| k.setmaxnreg_inc(count));
        }
        clean(Target::Sm90a, |k| k.setmaxnreg_dec(24));
    }

    #[test]
    fn setmaxnreg_needs_a_kernel_that_states_its_threads() {
        let mut k = KernelBuilder::new("k", Target::Sm90a);
        k.setmaxnreg_dec(24);
        let errors = k.finish().expect_err("refused").to_string();
        assert!(errors.contains("setmaxnreg has no effect"), "{errors}");
    }

    #[test]
    fn barriers_have_ids_to_15_and_counts_of_whole_warps() {
        forbidden(Target::Sm80, "0 to 15", |k| k.bar_sync(16, 128));
        forbidden(Target::Sm80, "multiple of 32", |k| k.bar_sync(1, 100));
        forbidden(Target::Sm80, "multiple of 32", |k| k.barrier_sync(1, 0));
        clean(Target::Sm80, |k| k.bar_sync(15, 128));
    }

    fn wgmma(spec: Wgmma, count: usize) -> impl FnOnce(&mut KernelBuilder) {
        move |k| {
            let descriptor = k.mov_b64(0);
            let acc = k.reg_vec::<F32>(count);
            k.wgmma_fence();
            k.wgmma_ss(spec, &acc, descriptor, descriptor, false);
            k.wgmma_commit();
            k.wgmma_wait(0);
        }
    }

    #[test]
    fn wgmma_has_an_n_from_8_to_256_in_steps_of_8() {
        for n in [0, 4, 12, 264] {
            forbidden(
                Target::Sm90a,
                "multiple of 8 from 8 to 256",
                wgmma(Wgmma::new(n, MatrixTy::F16), n as usize / 2),
            );
        }
        clean(Target::Sm90a, wgmma(Wgmma::new(8, MatrixTy::F16), 4));
    }

    #[test]
    fn wgmma_has_as_many_accumulators_as_its_n_says() {
        let fault = fault(Target::Sm90a, wgmma(Wgmma::new(64, MatrixTy::F16), 31));
        assert!(
            matches!(fault, Fault::Operand { ref found, ref expected, .. }
            if found == "one of 31" && expected == "one of 32"),
            "{fault:?}"
        );
    }

    #[test]
    fn wgmma_of_fp8_does_not_transpose() {
        forbidden(Target::Sm90a, "cannot transpose", wgmma(Wgmma::new(8, MatrixTy::E4m3).trans_b(), 4));
    }

    #[test]
    fn wgmma_does_not_mix_16_bit_types() {
        let mixed = Wgmma { b: MatrixTy::Bf16, ..Wgmma::new(8, MatrixTy::F16) };
        forbidden(Target::Sm90a, "no F16 by Bf16", wgmma(mixed, 4));
    }

    #[test]
    fn wgmma_waits_for_at_most_7_groups() {
        forbidden(Target::Sm90a, "from 0 to 7", |k| k.wgmma_wait(8));
    }

    #[test]
    fn mma_has_the_types_of_its_shape() {
        forbidden(Target::Sm89, "has no E4m3", |k| {
            let (r, f) = (k.mov_b32(0), k.mov_f32(0.0));
            k.mma_m16n8k16(MatrixTy::E4m3, [r; 4], [r; 2], [f; 4]);
        });
        forbidden(Target::Sm80, "f32 only", |k| {
            let r = k.mov_b32(0);
            k.mma_m16n8k16(MatrixTy::Bf16, [r; 4], [r; 2], [r; 2]);
        });
    }

    #[test]
    fn a_cp_async_through_l2_only_copies_16_bytes() {
        forbidden(Target::Sm80, "16 bytes, not 8", |k| {
            let (to, from) = (k.mov_b32(0), k.mov_b64(0));
            k.cp_async(CpAsyncCache::Cg, CpAsyncBytes::B8, to, from);
        });
        forbidden(Target::Sm80, "reads 17 bytes", |k| {
            let (to, from) = (k.mov_b32(0), k.mov_b64(0));
            k.cp_async_zfill(CpAsyncCache::Cg, CpAsyncBytes::B16, to, from, 17);
        });
    }

    #[test]
    fn a_bulk_copy_moves_a_multiple_of_16_bytes() {
        forbidden(Target::Sm90, "multiple of 16", |k| {
            let (to, from) = (k.mov_b32(0), k.mov_b64(0));
            k.bulk_load(to, from, 40, to.at(64), BulkHint::new());
        });
    }

    #[test]
    fn a_tensor_map_has_1_to_5_dimensions() {
        forbidden(Target::Sm90, "1 to 5 dimensions", |k| {
            let (at, map) = (k.mov_b32(0), k.mov_b64(0));
            k.tensor_prefetch(map, &[at.into(); 6][..0], BulkHint::new());
        });
    }

    #[test]
    fn multicast_is_for_loads() {
        forbidden(Target::Sm90, "loads only", |k| {
            let (at, map) = (k.mov_b32(0), k.mov_b64(0));
            k.tensor_store(map, &[at.into()], at, BulkHint::new().multicast(3u16));
        });
    }

    #[test]
    fn a_cache_operator_and_an_eviction_priority_exclude_each_other() {
        forbidden(Target::Sm80, "exclude each other", |k| {
            let from = k.mov_b64(0);
            let _: Reg<F32> = k.ld_global_hint(from, MemHint::new().cache(CacheOp::Cg).l1(L1Evict::First));
        });
    }

    #[test]
    fn a_load_cannot_release_and_a_store_cannot_acquire() {
        forbidden(Target::Sm80, "cannot release", |k| {
            let at = k.mov_b64(0);
            let _: Reg<F32> = k.ld_global_hint(at, MemHint::new().order(Order::Release(Scope::Gpu)));
        });
        forbidden(Target::Sm80, "cannot acquire", |k| {
            let at = k.mov_b64(0);
            k.st_global_hint::<F32>(at, 0.0, MemHint::new().order(Order::Acquire(Scope::Gpu)));
        });
    }

    #[test]
    fn a_reduction_cannot_acquire() {
        forbidden(Target::Sm80, "Relaxed or Release", |k| {
            let at = k.mov_b64(0);
            k.red_add_u32(AtomSem::AcqRel, Scope::Gpu, at, 1);
        });
    }

    #[test]
    fn an_mbarrier_counts_1_to_2_pow_20_arrivals_and_has_two_parities() {
        forbidden(Target::Sm80, "from 1 to 1048575", |k| {
            let bar = k.mov_b32(0);
            k.mbarrier_init(bar, 0);
        });
        forbidden(Target::Sm90, "0 or 1, not 2", |k| {
            let bar = k.mov_b32(0);
            k.mbarrier_try_wait_parity(bar, 2, Scope::Cta);
        });
    }

    #[test]
    fn guards_do_not_nest_and_do_not_hold_control_flow() {
        forbidden(Target::Sm80, "guard within a guard", |k| {
            let p = k.mov_pred(true);
            k.when(p, |k| k.when(!p, |k| k.nanosleep(1)));
        });
        let errors = faults(Target::Sm80, |k| {
            let p = k.mov_pred(true);
            k.when(p, |k| k.if_(p, |k| k.nanosleep(1)));
        });
        assert!(errors[0].to_string().contains("use if_ for it"), "{errors:?}");
    }

    #[test]
    fn parameters_are_those_of_the_kernel() {
        kernel_params! {
            /// One.
            pub struct Mine { x: u32 }
        }
        kernel_params! {
            /// Another.
            pub struct Other { x: u32 }
        }
        let mut k = KernelBuilder::new("k", Target::Sm80).params::<Mine>();
        k.param(Mine::x);
        k.param(Other::x);
        let errors = k.finish().expect_err("refused");
        assert_eq!(errors.0.len(), 1);
        assert!(
            errors.to_string().contains("a parameter of Other is read, but the kernel's parameters are Mine")
        );
    }

    #[test]
    fn an_edited_operand_of_the_wrong_class_is_refused() {
        let mut k = KernelBuilder::new("k", Target::Sm80);
        let (a, f) = (k.mov_b32(1), k.mov_f32(1.0));
        k.add_u32(a, 2);
        let mut kernel = k.finish().expect("well formed");
        kernel.body[2].src[0] = f.into();
        let errors = check::kernel(&kernel, Target::Sm80);
        assert!(matches!(errors[0].fault, Fault::Operand { ref found, .. } if found == "%f0"), "{errors:?}");
    }

    #[test]
    fn a_kernel_and_its_launch_bounds_have_names_and_numbers_that_ptx_takes() {
        let bad = |k: KernelBuilder| k.finish().expect_err("refused").to_string();
        assert!(bad(KernelBuilder::new("9lives", Target::Sm80)).contains("not a PTX name"));
        assert!(bad(KernelBuilder::new("k", Target::Sm80).threads(2048)).contains("1 to 1024"));
        assert!(bad(KernelBuilder::new("k", Target::Sm89).cluster(2, 1, 1)).contains("clusters need sm_90"));
        assert!(bad(KernelBuilder::new("k", Target::Sm90).cluster(32, 1, 1)).contains("1 to 16"));
    }

    #[test]
    fn two_kernels_of_a_module_do_not_share_a_name() {
        let kernel = KernelBuilder::new("k", Target::Sm80).finish().expect("well formed");
        let module = Module::new(Target::Sm80).with(kernel.clone()).with(kernel);
        assert!(check::module(&module)[0].to_string().contains("same name"));
    }
}

mod registers {
    use super::*;

    #[track_caller]
    fn unwritten(emit: impl FnOnce(&mut KernelBuilder)) {
        let fault = fault(Target::Sm80, emit);
        assert!(matches!(fault, Fault::Unwritten { .. }), "{fault:?}");
    }

    fn condition(k: &mut KernelBuilder) -> Reg<Pred> {
        let tid = k.tid_x();
        k.setp_lt_u32(tid, 7)
    }

    #[test]
    fn a_register_that_nothing_writes_is_not_read() {
        unwritten(|k| {
            let x = k.reg::<B32>();
            k.add_u32(x, 1);
        });
    }

    #[test]
    fn a_register_written_on_one_path_only_is_not_read_after_the_paths_meet() {
        unwritten(|k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.if_(p, |k| k.set(x, |k| k.mov_b32(1)));
            k.add_u32(x, 1);
        });
    }

    #[test]
    fn a_register_written_on_both_paths_is_read_after_they_meet() {
        clean(Target::Sm80, |k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.if_else(p, |k| k.set(x, |k| k.mov_b32(1)), |k| k.set(x, |k| k.mov_b32(2)));
            k.add_u32(x, 1);
        });
    }

    #[test]
    fn a_register_written_in_a_loop_body_is_not_read_before_the_write() {
        unwritten(|k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.loop_(|k, l| {
                k.add_u32(x, 1);
                k.set(x, |k| k.mov_b32(1));
                k.break_if(l, p);
            });
        });
    }

    #[test]
    fn a_loop_that_may_not_run_writes_nothing() {
        unwritten(|k| {
            let n = k.tid_x();
            let x = k.reg::<B32>();
            k.for_s32(0, n, 1, |k, i, _| k.set(x, |k| k.mov_b32(i)));
            k.add_u32(x, 1);
        });
    }

    #[test]
    fn a_loop_that_always_runs_once_writes() {
        clean(Target::Sm80, |k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.loop_(|k, l| {
                k.set(x, |k| k.mov_b32(1));
                k.break_if(l, p);
            });
            k.add_u32(x, 1);
        });
    }

    #[test]
    fn a_guarded_write_is_read_under_the_same_guard_only() {
        clean(Target::Sm80, |k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.when(p, |k| k.set(x, |k| k.mov_b32(1)));
            k.when(p, |k| k.add_u32(x, 1));
        });
        unwritten(|k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.when(p, |k| k.set(x, |k| k.mov_b32(1)));
            k.when(!p, |k| k.add_u32(x, 1));
        });
        unwritten(|k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.when(p, |k| k.set(x, |k| k.mov_b32(1)));
            k.add_u32(x, 1);
        });
    }

    #[test]
    fn a_guarded_write_is_forgotten_when_the_predicate_changes() {
        unwritten(|k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.when(p, |k| k.set(x, |k| k.mov_b32(1)));
            k.set(p, |k| k.mov_pred(true));
            k.when(p, |k| k.add_u32(x, 1));
        });
    }

    #[test]
    fn writes_under_a_guard_and_its_opposite_are_a_write() {
        clean(Target::Sm80, |k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.when(p, |k| k.set(x, |k| k.mov_b32(1)));
            k.when(!p, |k| k.set(x, |k| k.mov_b32(2)));
            k.add_u32(x, 1);
        });
    }

    #[test]
    fn what_an_if_writes_is_read_in_a_later_if_on_the_same_predicate() {
        clean(Target::Sm80, |k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.if_(p, |k| k.set(x, |k| k.mov_b32(1)));
            k.bar_sync_all();
            k.if_(p, |k| _ = k.add_u32(x, 1));
            k.when(p, |k| _ = k.add_u32(x, 1));
        });
        unwritten(|k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.if_(p, |k| k.set(x, |k| k.mov_b32(1)));
            k.if_(!p, |k| _ = k.add_u32(x, 1));
        });
    }

    #[test]
    fn what_lanes_write_that_then_exit_is_not_missed() {
        clean(Target::Sm80, |k| {
            let p = condition(k);
            let x = k.reg::<B32>();
            k.if_else(p, |k| k.set(x, |k| k.mov_b32(1)), KernelBuilder::exit);
            k.add_u32(x, 1);
        });
    }

    #[test]
    fn a_guard_itself_must_be_written() {
        unwritten(|k| {
            let p = k.reg::<Pred>();
            k.when(p, |k| k.nanosleep(1));
        });
    }
}

mod labels {
    use super::*;

    fn looping() -> Kernel {
        let mut k = KernelBuilder::new("k", Target::Sm80);
        let n = k.tid_x();
        k.for_s32(0, n, 1, |k, _, _| k.nanosleep(1));
        k.finish().expect("well formed")
    }

    fn problems(kernel: &Kernel) -> Vec<&'static str> {
        let errors = check::kernel(kernel, Target::Sm80);
        let problem = |e: &BuildError| match e.fault {
            Fault::Label { problem, .. } => Some(problem),
            _ => None,
        };
        errors.iter().filter_map(problem).collect()
    }

    #[test]
    fn a_label_that_is_branched_to_stands_somewhere() {
        let mut kernel = looping();
        let head = kernel.body.iter().position(|i| matches!(i.op, Op::Label(_))).expect("a loop has labels");
        kernel.body.remove(head);
        assert!(problems(&kernel).contains(&"is branched to, but stands nowhere"));
    }

    #[test]
    fn a_label_stands_once() {
        let mut kernel = looping();
        let label =
            kernel.body.iter().find(|i| matches!(i.op, Op::Label(_))).expect("a loop has labels").clone();
        kernel.body.push(label);
        assert_eq!(problems(&kernel), ["stands twice"]);
    }
}

mod barriers {
    use super::*;

    #[track_caller]
    fn barrier(words: &str, emit: impl FnOnce(&mut KernelBuilder)) {
        match fault(Target::Sm80, emit) {
            Fault::Barrier { problem, .. } => assert!(problem.contains(words), "{problem}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn all_who_come_to_a_barrier_agree_on_the_number() {
        barrier("is for 64 threads here, but for 128 threads at", |k| {
            k.bar_arrive(2, 128);
            k.bar_sync(2, 64);
        });
        barrier("but for the whole block", |k| {
            k.bar_sync_all();
            k.bar_sync(0, 64);
        });
        clean(Target::Sm80, |k| {
            k.bar_arrive(2, 128);
            k.bar_sync(2, 128);
        });
    }

    #[test]
    fn no_barrier_awaits_more_threads_than_the_block_has() {
        barrier("256 threads are awaited, but the block has 128", |k| k.bar_sync(1, 256));
    }

    #[test]
    fn whoever_arrives_is_awaited() {
        barrier("nobody waits", |k| k.bar_arrive(2, 128));
        clean(Target::Sm80, |k| {
            let id = k.tid_x();
            k.bar_arrive(2, 128);
            k.bar_sync(id, 128);
        });
    }
}

mod shared_memory {
    use super::*;

    fn with_tile(emit: impl FnOnce(&mut KernelBuilder, Shared)) -> Vec<BuildError> {
        let mut smem = SharedLayout::new();
        smem.alloc("bars", 8, 8);
        let tile = smem.alloc("tile", 256, 16);
        let mut k = KernelBuilder::new("k", Target::Sm80).shared(smem);
        emit(&mut k, tile);
        k.finish().err().map(|e| e.0).unwrap_or_default()
    }

    #[test]
    fn a_constant_address_lies_within_its_allocation() {
        let faults = with_tile(|k, tile| _ = k.ld_shared_vec::<B32, 4>(tile.at(256)));
        let expected = Fault::OutOfBounds { name: "tile".to_owned(), start: 256, end: 272, bytes: 256 };
        assert_eq!(faults[0].fault, expected);
        let faults = with_tile(|k, tile| k.st_shared::<B32>(tile.at(-4), 0));
        assert!(matches!(faults[0].fault, Fault::OutOfBounds { start: -4, .. }));
        assert_eq!(with_tile(|k, tile| _ = k.ld_shared_vec::<B32, 4>(tile.at(240))), []);
    }

    #[test]
    fn a_constant_address_is_aligned_as_its_access() {
        let faults = with_tile(|k, tile| _ = k.ld_shared_vec::<B32, 4>(tile.at(8)));
        let expected = Fault::Misaligned { name: "tile".to_owned(), offset: 24, needs: 16 };
        assert_eq!(faults[0].fault, expected);
        assert_eq!(with_tile(|k, tile| _ = k.ld_shared_vec::<B32, 2>(tile.at(8))), []);
    }

    #[test]
    fn a_layout_over_the_targets_limit_is_refused_with_the_sizes() {
        let mut smem = SharedLayout::new();
        let q = smem.alloc("q", 64 * 1024, 1024);
        smem.alloc("kv", 36 * 1024, 1024);
        smem.alias("o", 32 * 1024, &[q]);
        assert!(smem.fits(Target::Sm80).is_ok());
        let errors =
            KernelBuilder::new("k", Target::Sm89).shared(smem).finish().expect_err("refused").to_string();
        let words = "shared memory of 102400 bytes is over the 101376 that a block of sm_89 can have: \
                     q 65536, kv 36864, o 32768 (reuses others)";
        assert!(errors.contains(words), "{errors}");
    }

    #[test]
    fn the_limits_are_those_of_the_architectures() {
        let limits = Target::ALL.map(|t| t.max_shared_bytes() / 1024);
        assert_eq!(limits, [163, 99, 227, 227]);
    }

    #[test]
    fn an_alias_lies_within_what_it_reuses() {
        let mut smem = SharedLayout::new();
        let (k, v) = (smem.alloc("k", 1024, 16), smem.alloc("v", 1024, 16));
        let over_both = smem.alias("both", 2048, &[k, v]);
        assert_eq!((over_both.offset(), smem.bytes()), (0, 2048));
        assert!(smem.fits(Target::Sm80).is_ok());
        smem.alias("too_much", 1040, &[v]);
        assert!(smem.fits(Target::Sm80).expect_err("refused").to_string().contains("does not fit over"));
    }

    #[test]
    fn an_alignment_is_a_power_of_two() {
        let mut smem = SharedLayout::new();
        smem.alloc("odd", 64, 48);
        assert!(smem.fits(Target::Sm80).expect_err("refused").to_string().contains("not a power of two"));
    }
}

mod wgmma {
    use super::*;

    const SPEC: Wgmma = Wgmma::new(8, MatrixTy::F16);

    struct Stage {
        acc: [Reg<F32>; 4],
        a: [Reg<B32>; 4],
        descriptor: Reg<B64>,
    }

    fn stage(k: &mut KernelBuilder) -> Stage {
        let tid = k.tid_x();
        Stage { acc: k.regs(), a: [tid; 4].map(|t| k.mov_b32(t)), descriptor: k.cvt_u64_u32(tid) }
    }

    #[track_caller]
    fn wgmma(words: &str, emit: impl FnOnce(&mut KernelBuilder, Stage)) {
        let found = faults(Target::Sm90a, |k| {
            let s = stage(k);
            emit(k, s);
        });
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), 1, "{found:#?}");
        assert!(found[0].contains(words), "{found:#?}");
    }

    fn issue(k: &mut KernelBuilder, s: &Stage) {
        k.wgmma_ss(SPEC, &s.acc, s.descriptor, s.descriptor, false);
    }

    #[test]
    fn a_whole_stage_is_well_formed() {
        clean(Target::Sm90a, |k| {
            let s = stage(k);
            k.wgmma_fence();
            issue(k, &s);
            let next = k.add_u64(s.descriptor, 2);
            k.wgmma_ss(SPEC, &s.acc, next, next, true);
            k.wgmma_commit();
            k.wgmma_wait(0);
            k.add_f32(s.acc[0], s.acc[1]);
        });
    }

    #[test]
    fn two_groups_in_flight_are_told_apart() {
        clean(Target::Sm90a, |k| {
            let (s, t) = (stage(k), stage(k));
            k.wgmma_fence();
            issue(k, &s);
            k.wgmma_commit();
            issue(k, &t);
            k.wgmma_commit();
            k.wgmma_wait(1);
            k.add_f32(s.acc[0], 1.0);
            k.wgmma_wait(0);
            k.add_f32(t.acc[0], 1.0);
        });
    }

    #[test]
    fn a_fence_comes_before_the_first() {
        wgmma("without a wgmma.fence", |k, s| {
            issue(k, &s);
            k.wgmma_commit();
            k.wgmma_wait(0);
        });
    }

    #[test]
    fn a_fence_comes_between_a_write_of_an_accumulator_and_its_use() {
        wgmma("accumulator %f0 of a wgmma is touched after the last wgmma.fence", |k, s| {
            k.wgmma_fence();
            k.set(s.acc[0], |k| k.mov_f32(0.0));
            issue(k, &s);
            k.wgmma_commit();
            k.wgmma_wait(0);
        });
    }

    #[test]
    fn a_fence_comes_between_a_write_of_an_a_register_and_its_use() {
        wgmma("A register %r1 of a wgmma is touched after the last wgmma.fence", |k, s| {
            k.wgmma_fence();
            k.set(s.a[0], |k| k.mov_b32(0));
            k.wgmma_rs(SPEC, &s.acc, s.a, s.descriptor, false);
            k.wgmma_commit();
            k.wgmma_wait(0);
        });
    }

    #[test]
    fn an_accumulator_in_flight_is_not_read() {
        wgmma("%f2 is read while a wgmma in flight uses it", |k, s| {
            k.wgmma_fence();
            issue(k, &s);
            k.wgmma_commit();
            k.add_f32(s.acc[2], 1.0);
            k.wgmma_wait(0);
        });
    }

    #[test]
    fn an_accumulator_in_flight_is_not_written() {
        wgmma("%f2 is written while a wgmma in flight uses it", |k, s| {
            k.wgmma_fence();
            issue(k, &s);
            k.wgmma_commit();
            k.set(s.acc[2], |k| k.mov_f32(0.0));
            k.wgmma_wait(0);
        });
    }

    #[test]
    fn an_a_register_in_flight_is_not_written() {
        wgmma("%r1 is written while a wgmma in flight uses it", |k, s| {
            k.wgmma_fence();
            k.wgmma_rs(SPEC, &s.acc, s.a, s.descriptor, false);
            k.wgmma_commit();
            k.set(s.a[0], |k| k.mov_b32(0));
            k.wgmma_wait(0);
        });
    }

    #[test]
    fn a_wait_that_leaves_the_group_open_does_not_free_its_registers() {
        wgmma("%f0 is read", |k, s| {
            k.wgmma_fence();
            issue(k, &s);
            k.wgmma_commit();
            k.wgmma_wait(1);
            k.add_f32(s.acc[0], 1.0);
            k.wgmma_wait(0);
        });
    }

    #[test]
    fn a_commit_comes_before_the_wait() {
        let found = faults(Target::Sm90a, |k| {
            let s = stage(k);
            k.wgmma_fence();
            issue(k, &s);
            k.wgmma_wait(0);
        });
        assert!(found[0].to_string().contains("before the wgmmas in front of it are committed"), "{found:?}");
    }

    #[test]
    fn a_wait_comes_before_the_end() {
        wgmma("ends while wgmmas are in flight", |k, s| {
            k.wgmma_fence();
            issue(k, &s);
            k.wgmma_commit();
        });
    }

    #[test]
    fn a_wgmma_on_one_path_is_committed_on_that_path() {
        wgmma("uncommitted on one of the paths", |k, s| {
            let p = k.setp_eq_u32(s.a[0], 0);
            k.wgmma_fence();
            k.if_(p, |k| issue(k, &s));
            k.wgmma_commit();
            k.wgmma_wait(0);
        });
    }

    #[test]
    fn what_a_loop_leaves_in_flight_is_seen_at_its_head() {
        wgmma("%f1 is read", |k, s| {
            let n = s.a[0];
            for acc in s.acc {
                k.set(acc, |k| k.mov_f32(0.0));
            }
            k.for_s32(0, n, 1, |k, _, _| {
                k.comment("on the second turn the first is in flight");
                k.add_f32(s.acc[1], s.acc[0]);
                k.wgmma_fence();
                issue(k, &s);
                k.wgmma_commit();
            });
            k.wgmma_wait(0);
        });
    }

    #[test]
    fn an_a_register_is_not_written_while_the_product_of_the_turn_before_reads_it() {
        let turns = |keep: u8| {
            move |k: &mut KernelBuilder, s: Stage| {
                for acc in s.acc {
                    k.set(acc, |k| k.mov_f32(0.0));
                }
                k.for_s32(0, 3, 1, |k, i, _| {
                    k.set(s.a[2], |k| k.add_u32(i, 1));
                    k.wgmma_fence();
                    k.wgmma_rs(SPEC, &s.acc, s.a, s.descriptor, true);
                    k.wgmma_commit();
                    k.wgmma_wait(keep);
                });
                k.wgmma_wait(0);
            }
        };
        wgmma("%r3 is written while a wgmma in flight uses it", turns(1));
        clean(Target::Sm90a, |k| {
            let s = stage(k);
            turns(0)(k, s);
        });
    }

    /// What kernels packed for the next product beside one in flight, and copied once that was done.
    fn copied(k: &mut KernelBuilder, s: &Stage, keep: u8) {
        let (next, by_way) = (k.mov_b32(0), k.reg::<B32>());
        for acc in s.acc {
            k.set(acc, |k| k.mov_f32(0.0));
        }
        k.for_s32(0, 3, 1, |k, i, _| {
            k.wgmma_wait(0);
            k.set(by_way, |k| k.mov_b32(next));
            k.set(s.a[2], |k| k.mov_b32(by_way));
            k.wgmma_fence();
            k.wgmma_rs(SPEC, &s.acc, s.a, s.descriptor, true);
            k.wgmma_commit();
            k.wgmma_wait(keep);
            k.set(next, |k| k.add_u32(i, 1));
        });
        k.wgmma_wait(0);
    }

    #[test]
    fn what_is_copied_into_an_a_register_is_not_made_while_a_product_reads_that() {
        wgmma("which it is copied to or from", |k, s| copied(k, &s, 1));
        clean(Target::Sm90a, |k| {
            let s = stage(k);
            copied(k, &s, 0);
        });
    }

    #[test]
    fn accumulators_that_a_predicate_overwrites_in_the_first_turn_need_no_write_before() {
        clean(Target::Sm90a, |k| {
            let s = stage(k);
            k.for_s32(0, s.a[0], 1, |k, i, _| {
                let later = k.setp_ne_u32(i, 0);
                k.wgmma_fence();
                k.wgmma_ss(SPEC, &s.acc, s.descriptor, s.descriptor, later);
                k.wgmma_commit();
                k.wgmma_wait(0);
            });
        });
    }
}
