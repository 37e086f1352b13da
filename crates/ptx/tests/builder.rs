//! What the builder emits: destinations, guards, control flow and where lanes reconverge, parameters, comments.

use flashcore_ptx::*;

fn builder() -> KernelBuilder {
    KernelBuilder::new("k", Target::Sm80)
}

fn lines(kernel: &Kernel) -> Vec<String> {
    kernel.body.iter().map(|inst| kernel.line(inst)).collect()
}

fn finish(k: KernelBuilder) -> Kernel {
    k.finish().unwrap_or_else(|errors| panic!("{errors}"))
}

mod destinations {
    use super::*;

    #[test]
    fn an_instruction_writes_a_new_register() {
        let mut k = builder();
        let a = k.mov_b32(1);
        k.add_u32(a, a);
        assert_eq!(lines(&finish(k)), ["mov.b32 %r0, 1;", "add.u32 %r1, %r0, %r0;", "ret;"]);
    }

    #[test]
    fn set_writes_an_existing_register_without_a_move() {
        let mut k = builder();
        let sum = k.mov_f32(0.0);
        k.set(sum, |k| k.add_f32(sum, 1.0));
        let kernel = finish(k);
        assert_eq!(lines(&kernel)[1], "add.rn.f32 %f0, %f0, 0f3F800000;");
        assert_eq!(kernel.regs.len(), 1);
    }

    #[test]
    fn set_writes_a_whole_array_at_once() {
        let mut k = builder();
        let (r, f) = (k.mov_b32(0), k.mov_f32(0.0));
        let acc = [f; 4].map(|f| k.mov_f32(f));
        k.set(acc, |k| k.mma_m16n8k16(MatrixTy::F16, [r; 4], [r; 2], acc));
        let expected = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, \
                        {%r0, %r0, %r0, %r0}, {%r0, %r0}, {%f1, %f2, %f3, %f4};";
        assert_eq!(lines(&finish(k))[6], expected);
    }

    #[test]
    fn set_computes_through_other_registers() {
        let mut k = builder();
        let x = k.mov_b32(1);
        k.set(x, |k| {
            let twice = k.add_u32(x, x);
            k.add_u32(twice, x)
        });
        assert_eq!(lines(&finish(k))[1..3], ["add.u32 %r1, %r0, %r0;", "add.u32 %r0, %r1, %r0;"]);
    }

    #[test]
    fn set_moves_what_was_not_computed_last() {
        let mut k = builder();
        let x = k.mov_b32(1);
        k.set(x, |k| {
            let next = k.add_u32(x, 1);
            k.nanosleep(x); // reads the old value
            next
        });
        let expected = ["add.u32 %r1, %r0, 1;", "nanosleep.u32 %r0;", "mov.b32 %r0, %r1;"];
        assert_eq!(lines(&finish(k))[1..4], expected);
    }

    #[test]
    fn set_moves_a_register_that_exists() {
        let mut k = builder();
        let (x, y) = (k.mov_b32(1), k.mov_b32(2));
        k.set(x, |_| y);
        assert_eq!(lines(&finish(k))[2], "mov.b32 %r0, %r1;");
    }

    #[test]
    fn set_of_a_permutation_swaps_through_new_registers() {
        let mut k = builder();
        let (x, y) = (k.mov_b32(1), k.mov_b32(2));
        k.set([x, y], |_| [y, x]);
        let expected = ["mov.b32 %r2, %r1;", "mov.b32 %r3, %r0;", "mov.b32 %r0, %r2;", "mov.b32 %r1, %r3;"];
        assert_eq!(lines(&finish(k))[2..6], expected);
    }
}

mod guards {
    use super::*;

    #[test]
    fn when_guards_each_instruction() {
        let mut k = builder();
        let p = k.mov_pred(true);
        k.when(p, |k| k.nanosleep(1));
        k.when(!p, |k| k.nanosleep(2));
        k.nanosleep(3);
        let expected = ["@%p0 nanosleep.u32 1;", "@!%p0 nanosleep.u32 2;", "nanosleep.u32 3;"];
        assert_eq!(lines(&finish(k))[1..4], expected);
    }
}

mod control_flow {
    use super::*;

    /// For each guarded branch, in order, the label where its lanes meet.
    fn meeting_points(kernel: &Kernel) -> Vec<Option<String>> {
        let meet = |inst: &Inst| match inst.op {
            Op::Bra { reconverge, .. } if inst.guard.is_some() => {
                Some(reconverge.map(|label| kernel.labels[label.0 as usize].clone()))
            }
            _ => None,
        };
        kernel.body.iter().filter_map(meet).collect()
    }

    fn condition(k: &mut KernelBuilder) -> Reg<Pred> {
        let tid = k.tid_x();
        k.setp_lt_u32(tid, 7)
    }

    #[test]
    fn the_lanes_of_an_if_meet_at_its_end() {
        let mut k = builder();
        let p = condition(&mut k);
        k.if_(p, |k| k.nanosleep(1));
        assert_eq!(meeting_points(&finish(k)), [Some("endif_0".to_owned())]);
    }

    #[test]
    fn the_lanes_of_an_if_else_meet_at_its_end() {
        let mut k = builder();
        let p = condition(&mut k);
        k.if_else(p, |k| k.nanosleep(1), |k| k.nanosleep(2));
        assert_eq!(meeting_points(&finish(k)), [Some("endif_1".to_owned())]);
    }

    #[test]
    fn lanes_that_leave_a_loop_wait_at_its_end() {
        let mut k = builder();
        let p = condition(&mut k);
        k.loop_(|k, l| {
            k.break_if(l, p);
            k.nanosleep(1);
        });
        assert_eq!(meeting_points(&finish(k)), [Some("endloop_1".to_owned())]);
    }

    #[test]
    fn an_if_that_may_break_lets_its_lanes_meet_only_where_the_loop_ends() {
        let mut k = builder();
        let p = condition(&mut k);
        k.loop_(|k, l| {
            k.if_(p, |k| k.break_(l));
            k.nanosleep(1);
        });
        assert_eq!(meeting_points(&finish(k)), [Some("endloop_1".to_owned())]);
    }

    #[test]
    fn an_if_that_may_continue_lets_its_lanes_meet_where_the_next_turn_begins() {
        let mut k = builder();
        let p = condition(&mut k);
        let n = k.tid_x();
        k.for_s32(0, n, 1, |k, _, l| {
            k.continue_if(l, p);
            k.nanosleep(1);
        });
        let expected = [Some("endfor_2".to_owned()), Some("next_1".to_owned())];
        assert_eq!(meeting_points(&finish(k)), expected);
    }

    #[test]
    fn lanes_that_exit_do_not_keep_the_others_from_meeting() {
        let mut k = builder();
        let (p, q) = (condition(&mut k), condition(&mut k));
        k.if_(p, |k| {
            k.if_(q, KernelBuilder::exit);
            k.nanosleep(1);
        });
        let expected = [Some("endif_0".to_owned()), Some("endif_1".to_owned())];
        assert_eq!(meeting_points(&finish(k)), expected);
    }

    #[test]
    fn the_meeting_points_follow_an_edit() {
        let mut k = builder();
        let p = condition(&mut k);
        k.loop_(|k, l| {
            k.if_(p, |k| k.break_(l));
            k.nanosleep(1);
            k.break_if(l, p);
        });
        let mut kernel = finish(k);
        let jump = kernel.body.iter().position(|i| matches!(i.op, Op::Bra { .. }) && i.guard.is_none());
        kernel.body.remove(jump.expect("the break within the if"));
        flow::set_reconvergence(&mut kernel);
        let expected = [Some("endif_2".to_owned()), Some("endloop_1".to_owned())];
        assert_eq!(meeting_points(&kernel), expected);
    }

    #[test]
    fn roles_part_the_warps_and_meet_at_the_end() {
        let mut k = builder().threads(384);
        let tid = k.tid_x();
        let warp = k.shr_u32(tid, 5);
        k.roles(warp, |roles| {
            roles.warps(0..4, |k| k.nanosleep(1));
            roles.warps(4..12, |k| k.nanosleep(2));
            roles.others(KernelBuilder::trap);
        });
        let kernel = finish(k);
        let text = lines(&kernel);
        assert!(text.contains(&"setp.lt.u32 %p0, %r1, 4;".to_owned()), "{text:?}");
        assert!(text.contains(&"sub.u32 %r2, %r1, 4;".to_owned()), "{text:?}");
        assert!(text.contains(&"setp.lt.u32 %p1, %r2, 8;".to_owned()), "{text:?}");
        let end = Some("endroles_0".to_owned());
        assert_eq!(meeting_points(&kernel), [end.clone(), end]);
    }

    #[test]
    fn a_loop_tests_before_its_first_turn() {
        let mut k = builder();
        let n = k.tid_x();
        k.for_s32(2, n, 3, |k, i, _| k.nanosleep(i));
        let expected = [
            "mov.u32 %r0, %tid.x;",
            "mov.b32 %r1, 2;",
            "$k_for_0:",
            "setp.lt.s32 %p0, %r1, %r0;",
            "@!%p0 bra $k_endfor_2;",
            "nanosleep.u32 %r1;",
            "$k_next_1:",
            "add.s32 %r1, %r1, 3;",
            "bra $k_for_0;",
            "$k_endfor_2:",
            "ret;",
        ];
        assert_eq!(lines(&finish(k)), expected);
    }

    #[test]
    fn while_computes_its_condition_anew() {
        let mut k = builder();
        let n = k.tid_x();
        let i = k.mov_b32(0);
        k.while_(|k| k.setp_lt_u32(i, n), |k, _| k.set(i, |k| k.add_u32(i, 1)));
        let text = lines(&finish(k));
        assert_eq!(text[2..5], ["$k_while_0:", "setp.lt.u32 %p0, %r1, %r0;", "@!%p0 bra $k_endwhile_1;"]);
    }
}

mod words {
    use super::*;

    #[test]
    fn a_comment_belongs_to_the_next_instruction_and_a_section_to_all_that_follow() {
        let mut k = builder();
        k.section("softmax");
        let x = k.mov_f32(1.0);
        k.comment("row maximum");
        k.comment("of this tile");
        k.max_f32(x, x);
        k.section("epilogue");
        k.nanosleep(1);
        let kernel = finish(k);
        assert_eq!(kernel.describe(0).section, Some("softmax"));
        assert_eq!(kernel.describe(0).comment, None);
        assert_eq!(kernel.body[1].comment.as_deref(), Some("row maximum\nof this tile"));
        assert_eq!(kernel.describe(2).section, Some("epilogue"));
        assert_eq!(kernel.describe(2).comment, None, "a comment does not reach into the next section");
        let place = kernel.describe(1).to_string();
        assert!(place.starts_with("softmax: row maximum\nof this tile ("), "{place}");
    }

    #[test]
    fn a_comment_before_a_loop_belongs_to_the_first_instruction_in_it() {
        let mut k = builder();
        k.comment("every tile");
        k.loop_(|k, l| {
            let p = k.mov_pred(true);
            k.break_if(l, p);
        });
        let kernel = finish(k);
        let commented = kernel.body.iter().find(|i| i.comment.is_some()).expect("there is one");
        assert_eq!(commented.op, Op::Alu(Alu::MovPred));
    }
}

mod parameters {
    use super::*;

    kernel_params! {
        /// Everything a parameter can be, in an order that needs padding.
        pub struct Everything {
            /// 4 bytes at 0.
            count: u32,
            /// 8 bytes at 8.
            stride: u64,
            /// 4 bytes at 16.
            scale: f32,
            /// 128 bytes at 64.
            map: TensorMap,
            /// 4 bytes at 192.
            delta: i32,
            /// 8 bytes at 200.
            offset: i64,
            /// 8 bytes at 208.
            data: GlobalPtr,
        }
    }

    fn values() -> Everything {
        let map = TensorMap(std::array::from_fn(|i| i as u8));
        Everything {
            count: 7,
            stride: 1 << 40,
            scale: 0.5,
            map,
            delta: -1,
            offset: -2,
            data: GlobalPtr(0xabcd),
        }
    }

    #[test]
    fn fields_lie_at_multiples_of_their_alignment() {
        let offsets: Vec<u32> = params::layout(Everything::FIELDS).iter().map(|p| p.offset).collect();
        assert_eq!(offsets, [0, 8, 16, 64, 192, 200, 208]);
    }

    #[test]
    fn values_are_packed_where_the_kernel_reads_them() {
        let bytes = values().pack();
        assert_eq!(bytes.len(), 216);
        assert_eq!(bytes[0..4], 7u32.to_le_bytes());
        assert_eq!(bytes[4..8], [0; 4], "padding is zero");
        assert_eq!(bytes[8..16], (1u64 << 40).to_le_bytes());
        assert_eq!(bytes[16..20], 0.5f32.to_le_bytes());
        assert_eq!(bytes[64..192], values().map.0);
        assert_eq!(bytes[192..196], (-1i32).to_le_bytes());
        assert_eq!(bytes[200..208], (-2i64).to_le_bytes());
        assert_eq!(bytes[208..216], 0xabcdu64.to_le_bytes());
    }

    #[test]
    fn a_kernel_reads_a_parameter_through_the_structs_own_handle() {
        let mut k = builder().params::<Everything>();
        let (_, _): (Reg<B32>, Reg<F32>) = (k.param(Everything::count), k.param(Everything::scale));
        let _: Reg<B64> = k.param(Everything::data);
        let _: Reg<B64> = k.tensor_map(Everything::map);
        let kernel = finish(k);
        let expected = [
            "ld.param.b32 %r0, [k_count];",
            "ld.param.f32 %f0, [k_scale];",
            "ld.param.b64 %rd0, [k_data];",
            "cvta.to.global.u64 %rd1, %rd0;",
            "mov.b64 %rd2, k_map;",
            "cvta.param.u64 %rd3, %rd2;",
            "ret;",
        ];
        assert_eq!(lines(&kernel), expected);
        assert_eq!(kernel.param_bytes(), 216);
    }

    #[test]
    fn the_kernels_declaration_has_the_layout_that_values_are_packed_by() {
        let kernel = finish(builder().params::<Everything>());
        assert_eq!(kernel.params, params::layout(Everything::FIELDS));
    }
}
