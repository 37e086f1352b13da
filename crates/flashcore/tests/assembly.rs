//! Every schedule that a plan can choose assembles for its targets, within the registers: ptxas is the judge.
#![cfg(feature = "cuda")]

use std::collections::BTreeMap;
use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use flashcore::plan::choose::{default_schedule, merge, schedules};
use flashcore::plan::{Hardware, Plan};
use flashcore::{DType, Keys, Mask, Problem, Queries};
use flashcore_kernels::{ElementType, Kernel, Schedule, Spec, sm80, sm90};
use flashcore_ptx::{
    Op, Target,
    ptxas::Ptxas,
    sass::{self, Nvdisasm, Walked},
};

/// Specs that between them reach every part of the kernels' code.
fn specs() -> Vec<Spec> {
    let new = |head_dim| Spec::new(ElementType::F16, head_dim);
    vec![
        new(64),
        new(64).causal().with_lse(),
        new(128),
        new(128).causal().with_lse(),
        new(256).causal(),
        Spec { head_dim_v: 128, ..new(192) },
        Spec {
            dtype: ElementType::Bf16,
            left: true,
            softcap: true,
            key_lengths: true,
            grouped: true,
            ..new(96).causal().with_lse()
        },
        Spec { head_dim_v: 72, top_left: true, ..new(40).causal() },
        Spec { softcap: true, scaled_scores: true, ..new(128).causal().with_lse() },
        new(8),
    ]
}

#[test]
fn the_scalar_kernel_assembles_for_what_tensor_cores_do_not_take() {
    let spec = |dtype, head_dim, head_dim_v| Spec {
        head_dim_v,
        softcap: true,
        scaled_scores: true,
        ..Spec::new(dtype, head_dim).causal().with_lse()
    };
    let specs = [
        spec(ElementType::F32, 64, 64),
        spec(ElementType::F32, 1024, 1024),
        spec(ElementType::F16, 1, 1023),
        spec(ElementType::Bf16, 59, 7),
    ];
    let work: Vec<_> = specs
        .into_iter()
        .flat_map(|spec| [Target::Sm80, Target::Sm89, Target::Sm90a].map(|target| (spec, target)))
        .map(|(spec, target)| (default_schedule(Kernel::Scalar, &spec, target).unwrap(), spec, target))
        .collect();
    assert_eq!(assemble_all(&work), 12);
    for kernel in [Kernel::Sm80Mma, Kernel::Sm80Fwd, Kernel::Sm90Fwd] {
        for spec in specs {
            assert!(default_schedule(kernel, &spec, Target::Sm90a).is_err(), "{kernel} for {spec:?}");
        }
    }
}

/// The faults of a schedule for a spec and a target, as ptxas sees them; `None` where the schedule is refused
/// before emission.
fn faults(ptxas: &Ptxas, schedule: Schedule, spec: &Spec, target: Target) -> Option<Vec<String>> {
    schedule.check(spec, target).ok()?;
    let what = format!("{schedule} for {spec:?} on {target}");
    let module = schedule.emit(spec, target).unwrap_or_else(|error| panic!("{what}: {error}"));
    let assembled = ptxas.assemble(&module, target).unwrap_or_else(|error| panic!("{what}: {error}"));
    let mut faults: Vec<String> =
        assembled.remarks.iter().map(|remark| format!("{what}: {}", remark.text)).collect();
    for kernel in &assembled.kernels {
        if kernel.spill_store_bytes + kernel.spill_load_bytes + kernel.stack_bytes > 0 {
            faults.push(format!(
                "{what}: {} registers, {} bytes spilled",
                kernel.registers, kernel.spill_store_bytes
            ));
        }
    }
    if let Some(nvdisasm) = Nvdisasm::find().filter(|_| target == Target::Sm90a) {
        let walked = walk(&nvdisasm, &assembled.cubin);
        faults.extend(walked.touches.iter().map(|touch| format!("{what}: {touch}")));
    }
    Some(faults)
}

/// What the code of a binary does with the registers of products in flight.
fn walk(nvdisasm: &Nvdisasm, cubin: &[u8]) -> Walked {
    let code = nvdisasm.disassemble(cubin).unwrap_or_else(|error| panic!("{error}"));
    sass::walk(&code).unwrap_or_else(|error| panic!("{error}"))
}

/// Assembles all, on every core, and returns how many there were.
fn assemble_all(work: &[(Schedule, Spec, Target)]) -> usize {
    let Some(ptxas) = Ptxas::find_or_skip().unwrap() else {
        eprintln!("skipped: no ptxas here; ./check tools installs it");
        return work.len();
    };
    let (next, assembled) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let found = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(&(schedule, spec, target)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Some(faults) = faults(&ptxas, schedule, &spec, target) {
                        assembled.fetch_add(1, Ordering::Relaxed);
                        found.lock().unwrap().extend(faults);
                    }
                }
            });
        }
    });
    let found = found.into_inner().unwrap();
    assert!(found.is_empty(), "{}", found.join("\n"));
    assembled.into_inner()
}

#[test]
fn every_default_schedule_assembles_without_a_spill() {
    let mut work = Vec::new();
    for spec in specs() {
        for target in [Target::Sm80, Target::Sm89, Target::Sm90a] {
            for kernel in Kernel::LADDER.into_iter().filter(|kernel| kernel.runs_on(target)) {
                // Those that the planner may come to: each is the first that fits on some target.
                let first = default_schedule(kernel, &spec, target).unwrap();
                let small = schedules(kernel, &spec).into_iter().find(|schedule| {
                    schedule.check(&spec, target).is_ok() && schedule.geometry(&spec).rows <= 64
                });
                work.push((first, spec, target));
                work.extend(small.filter(|&small| small != first).map(|small| (small, spec, target)));
            }
        }
    }
    // A softcap takes registers where there are fewest.
    for head_dim in [64, 128, 256] {
        let spec = Spec { softcap: true, ..Spec::new(ElementType::F16, head_dim).causal() };
        let first = default_schedule(Kernel::Sm90Fwd, &spec, Target::Sm90a).unwrap();
        work.push((first, spec, Target::Sm90a));
    }
    work.extend(hopper_choices().into_iter().map(|(schedule, spec)| (schedule, spec, Target::Sm90a)));
    work.sort_by_key(|(schedule, _, target)| (schedule.to_string(), *target));
    work.dedup();
    assert!(assemble_all(&work) >= specs().len() * 9);
}

/// A problem whose backward pass has this spec.
fn backward_problem(spec: &Spec) -> Problem {
    let dtype = if spec.dtype == ElementType::Bf16 { DType::BF16 } else { DType::F16 };
    let problem = Problem::new(1, 2, 8192, spec.head_dim as usize, dtype)
        .with_kv(if spec.grouped { 1 } else { 2 }, 8192)
        .with_head_dim_v(spec.head_dim_v as usize)
        .with_mask(match (spec.left, spec.right) {
            (true, _) => Mask::Window { left: Some(100), right: Some(10) },
            (false, true) if spec.top_left => Mask::CausalTopLeft,
            (false, true) => Mask::Causal,
            (false, false) => Mask::None,
        })
        .with_softcap(match (spec.softcap, spec.scaled_scores) {
            (false, _) => 0.0,
            (true, false) => 20.0,
            (true, true) => 1000.0,
        });
    let problem = if spec.key_lengths { problem.with_key_lengths() } else { problem };
    if spec.lse { problem.with_lse().backward() } else { problem.backward() }
}

#[test]
fn every_launch_of_a_backward_pass_assembles_without_a_spill() {
    let mut work = Vec::new();
    // A softcap takes registers where there are fewest, and all masks take the most code.
    let capped = [64, 128, 192, 256].map(|head_dim| Spec {
        left: true,
        softcap: true,
        scaled_scores: head_dim == 128,
        key_lengths: true,
        grouped: true,
        ..Spec::new(ElementType::Bf16, head_dim).causal()
    });
    for spec in specs().into_iter().chain(capped) {
        for target in [Target::Sm80, Target::Sm89, Target::Sm90a] {
            for sms in [1, 1000] {
                // Large blocks where the GPU is small, and small ones where it is large.
                let hardware = Hardware { sms, ..Hardware::typical(target) };
                let plan = Plan::choose(&backward_problem(&spec), &hardware).unwrap();
                work.extend(plan.launches.iter().map(|launch| (launch.schedule, launch.spec, target)));
                // The last to add to a tile of dQ rounds it: nobody's choice yet, where it is possible.
                if let Schedule::Sm90Bwd(schedule) = plan.main().schedule {
                    let schedule =
                        Schedule::Sm90Bwd(sm90::bwd::Schedule { rounds: true, rotate: false, ..schedule });
                    work.extend(schedule.check(&spec, target).is_ok().then_some((schedule, spec, target)));
                }
            }
        }
    }
    let mut seen = std::collections::HashSet::new();
    work.retain(|(schedule, spec, target)| {
        // Which order blocks come in takes no registers.
        let knobs = schedule.to_string().replace("order=longest", "order=head");
        seen.insert((knobs, *spec, *target))
    });
    assert_eq!(assemble_all(&work), work.len());
    assert!(work.len() > 100);
}

#[test]
fn every_launch_of_packed_gradients_assembles_without_a_spill() {
    let mut work = Vec::new();
    // The most that there is to hold in registers, and the least.
    for head_dim in [64, 128, 192, 256] {
        let plain = Spec::new(ElementType::Bf16, head_dim);
        let full = Spec { left: true, softcap: true, grouped: true, ..plain.causal() };
        for spec in [plain, full] {
            let problem = backward_problem(&spec);
            let (queries, keys) =
                (Queries::Packed { total: problem.len_q }, Keys::Packed { total: problem.len_k });
            let problem = problem.with_queries(queries).with_keys(keys);
            for target in [Target::Sm80, Target::Sm90a] {
                let plan = Plan::choose(&problem, &Hardware::typical(target)).unwrap();
                work.extend(plan.launches.iter().map(|launch| (launch.schedule, launch.spec, target)));
            }
        }
    }
    assert_eq!(assemble_all(&work), work.len());
    assert!(work.len() > 40, "{}", work.len());
}

#[test]
fn the_schedules_for_8_bit_floats_assemble_without_a_spill() {
    let mut work = Vec::new();
    for head_dim in [64, 128, 256] {
        let plain = Spec::new(ElementType::E4m3, head_dim);
        let causal = Spec { grouped: true, key_lengths: true, ..plain.causal().with_lse() };
        let capped = Spec { softcap: true, scaled_scores: true, left: true, ..causal };
        let in_blocks = Spec { scaled_scores: true, descale_keys: Some(128), ..causal };
        for spec in [plain, causal, capped, in_blocks] {
            let fits = |schedule: &Schedule| schedule.check(&spec, Target::Sm90a).is_ok();
            let all: Vec<Schedule> = schedules(Kernel::Sm90Fwd, &spec).into_iter().filter(fits).collect();
            let few = all.iter().find(|schedule| schedule.geometry(&spec).rows == 64).unwrap();
            work.extend([all[0], *few].map(|schedule| (schedule, spec, Target::Sm90a)));
        }
        let ada = default_schedule(Kernel::Sm80Fwd, &in_blocks, Target::Sm89).unwrap();
        work.push((ada, in_blocks, Target::Sm89));
    }
    assert_eq!(assemble_all(&work), 27);
}

#[test]
fn parts_of_the_keys_and_what_merges_them_assemble_without_a_spill() {
    let mut work = Vec::new();
    for spec in specs() {
        let alone = |schedule: &Schedule| {
            matches!(schedule, Schedule::Sm90Fwd(it) if it.split == 1 && !it.persistent)
                && schedule.check(&spec, Target::Sm90a).is_ok()
        };
        for schedule in schedules(Kernel::Sm90Fwd, &spec).into_iter().filter(alone).take(2) {
            let Schedule::Sm90Fwd(mut parts) = schedule else { continue };
            parts.parts = 16;
            let parts = Schedule::Sm90Fwd(parts);
            let combine = merge(&spec, &parts, 16, 132).expect("parts are merged");
            work.push((parts, Spec { lse: false, ..spec }, Target::Sm90a));
            work.push((combine, spec, Target::Sm90a));
        }
    }
    work.sort_by_key(|(schedule, spec, _)| (schedule.to_string(), format!("{spec:?}")));
    work.dedup();
    assert_eq!(assemble_all(&work), work.len());
    assert!(work.len() >= 2 * specs().len());
}

/// What plans choose where blocks share keys by length.
fn by_length() -> Vec<(Schedule, Spec, Target)> {
    let mut work = Vec::new();
    let hardware = Hardware::typical(Target::Sm90a);
    for dims in ["40/72", "64", "128", "192/128", "256"] {
        for rest in [
            "4x8/2x1/9000xDIMS f16 key-lengths",
            "4x8/2x3/9000xDIMS bf16 causal softcap=30 key-lengths page=16/2400 lse",
            "4x8/2x1/9000xDIMS f16 softcap=200 packed-k=20000",
        ] {
            let problem: Problem = rest.replace("DIMS", dims).parse().unwrap();
            let plan = Plan::choose(&problem, &hardware).unwrap();
            assert!(plan.main().schedule.to_string().contains("by_length=1"), "{plan}");
            work.extend(plan.launches.iter().map(|launch| (launch.schedule, launch.spec, plan.target)));
        }
    }
    work
}

#[test]
fn blocks_that_share_keys_by_length_assemble_without_a_spill() {
    let work = by_length();
    assert_eq!(assemble_all(&work), work.len());
}

#[test]
fn the_launch_that_appends_assembles_without_a_spill() {
    let mut work = Vec::new();
    for text in ["append:", "append:rotary=32,packed=1", "append:rotary=32,interleaved=1,positions=1"] {
        let schedule: Schedule = text.parse().unwrap();
        for dtype in [ElementType::F16, ElementType::Bf16] {
            let plain = Spec { key_lengths: true, right: true, ..Spec::new(dtype, 72) };
            let packed = Spec { packed_q: true, packed_k: true, ..plain };
            for spec in [plain, packed, Spec { page: Some(16), ..plain }] {
                work.extend([Target::Sm80, Target::Sm90a].map(|target| (schedule, spec, target)));
                let codes = Spec { kv: Some(ElementType::E4m3), ..spec };
                let blocks = Spec { descale_keys: Some(16), ..codes };
                work.extend([(schedule, codes, Target::Sm89), (schedule, blocks, Target::Sm90a)]);
            }
        }
    }
    assert_eq!(assemble_all(&work), 72);
}

#[test]
fn heads_as_rows_of_one_tile_assemble_without_a_spill() {
    let mut work = Vec::new();
    let causal = |head_dim| Spec::new(ElementType::Bf16, head_dim).causal().with_lse();
    let capped = Spec { left: true, softcap: true, key_lengths: true, rows_per_query: 7, ..causal(128) };
    for spec in
        [64, 128, 256].map(|dim| Spec { rows_per_query: 4, ..causal(dim) }).into_iter().chain([capped])
    {
        let fits = |it: &Schedule| it.check(&spec, Target::Sm90a).is_ok();
        let all: Vec<Schedule> = schedules(Kernel::Sm90Fwd, &spec).into_iter().filter(fits).collect();
        let of = |knobs: &str| all.iter().copied().find(|it| it.to_string().contains(knobs));
        let ways = ["split=2", "together=1", "persistent=1,pairs=0", "persistent=0,pairs=0"].map(of);
        for schedule in ways.into_iter().flatten() {
            work.push((schedule, spec, Target::Sm90a));
            let Schedule::Sm90Fwd(mut parts) = schedule else { continue };
            if parts.split == 1 && !parts.persistent {
                (parts.parts, parts.in_turn) = (16, true);
                let parts = Schedule::Sm90Fwd(parts);
                work.push((parts, Spec { lse: false, ..spec }, Target::Sm90a));
                work.push((merge(&spec, &parts, 16, 132).expect("parts are merged"), spec, Target::Sm90a));
            }
        }
        let cache = Spec { kv: Some(ElementType::E4m3), scaled_scores: spec.softcap, ..spec };
        let decode = default_schedule(Kernel::Sm80Decode, &cache, Target::Sm89).unwrap();
        work.extend([Target::Sm89, Target::Sm90a].map(|target| (decode, cache, target)));
    }
    work.sort_by_key(|(schedule, spec, target)| (schedule.to_string(), format!("{spec:?}"), *target));
    work.dedup();
    assert_eq!(assemble_all(&work), work.len());
    assert!(work.len() > 25);
}

#[test]
fn the_kernel_for_few_queries_assembles_without_a_spill() {
    let mut work = Vec::new();
    for (head_dim, head_dim_v) in [(64, 64), (128, 128), (192, 256), (256, 256)] {
        for kv in [None, Some(ElementType::E4m3)] {
            let plain = Spec { kv, head_dim_v, ..Spec::new(ElementType::Bf16, head_dim).causal().with_lse() };
            let packed = Spec { packed_q: true, packed_k: true, rows_per_query: 4, ..plain };
            let full = Spec {
                left: true,
                softcap: true,
                scaled_scores: kv.is_some(),
                key_lengths: true,
                page: Some(16),
                packed_k: false,
                rows_per_query: 7,
                ..packed
            };
            for (spec, parts) in [(plain, 1), (packed, 1), (full, 3)] {
                for target in [Target::Sm80, Target::Sm89, Target::Sm90a] {
                    // The first that fits.
                    let Ok(Schedule::Sm80Decode(one)) = default_schedule(Kernel::Sm80Decode, &spec, target)
                    else {
                        assert!(kv.is_some() && target == Target::Sm80, "{spec:?} on {target}");
                        continue;
                    };
                    let schedule = Schedule::Sm80Decode(sm80::decode::Schedule { parts, ..one });
                    work.push((schedule, Spec { lse: parts == 1, ..spec }, target));
                    let merged = merge(&spec, &schedule, 16, 132).filter(|_| kv.is_none());
                    work.extend(merged.map(|merge| (merge, spec, target)));
                }
            }
        }
    }
    assert_eq!(assemble_all(&work), work.len());
    assert_eq!(work.len(), 4 * (3 * 3 + 3 * 2 + 3));
}

/// What the planner has to choose from on Hopper. Of schedules that differ in nothing but how many stages there are and
/// how many blocks share the keys, whose code differs in constants, each is taken for some specs in turn.
fn hopper_choices() -> Vec<(Schedule, Spec)> {
    let mut families: BTreeMap<String, Vec<(Schedule, Spec)>> = BTreeMap::new();
    for spec in specs() {
        for schedule in schedules(Kernel::Sm90Fwd, &spec) {
            if schedule.check(&spec, Target::Sm90a).is_ok() {
                families.entry(family(schedule)).or_default().push((schedule, spec));
            }
        }
    }
    let mut chosen = Vec::new();
    for of in families.values() {
        let mut taken: BTreeMap<String, usize> = BTreeMap::new();
        for group in of.chunk_by(|(_, a), (_, b)| a == b) {
            // The one that was taken least often so far.
            let next = group.iter().min_by_key(|(schedule, _)| taken.get(&schedule.to_string()));
            chosen.extend(next);
            *taken.entry(next.unwrap().0.to_string()).or_default() += 1;
        }
        // Where there are more schedules than specs, the others are taken for the first that they fit.
        let mut left: Vec<_> =
            of.iter().filter(|(schedule, _)| !taken.contains_key(&schedule.to_string())).collect();
        left.sort_by_key(|(schedule, _)| schedule.to_string());
        left.dedup_by_key(|(schedule, _)| schedule.to_string());
        chosen.extend(left);
    }
    chosen
}

/// A schedule without its number of stages and the number of blocks that share keys, if more than one do.
fn family(schedule: Schedule) -> String {
    let kept = |knob: &&str| !knob.starts_with("stages=");
    let text = schedule.to_string();
    let knobs: Vec<&str> = text.split(',').filter(kept).collect();
    knobs.join(",").replace("split=4", "split=2").replace("split=8", "split=2")
}

#[test]
fn every_choice_on_hopper_is_assembled_for_some_spec() {
    let chosen = hopper_choices();
    for spec in specs() {
        assert!(chosen.iter().any(|(_, of)| *of == spec), "{spec:?}");
        for schedule in schedules(Kernel::Sm90Fwd, &spec) {
            let possible = schedule.check(&spec, Target::Sm90a).is_ok();
            assert!(!possible || chosen.iter().any(|(of, _)| *of == schedule), "{schedule}");
            let of_family =
                |(of, for_spec): &&(Schedule, Spec)| family(*of) == family(schedule) && *for_spec == spec;
            assert!(!possible || chosen.iter().any(|choice| of_family(&choice)), "{schedule} for {spec:?}");
        }
    }
}

/// Takes minutes: run it with `cargo test -p flashcore-kernels -- --ignored` after a change to the kernels.
#[test]
#[ignore = "assembles the whole search space, which takes minutes"]
fn the_whole_grid_assembles_without_a_spill() {
    let hopper = specs().into_iter().flat_map(|spec| {
        let choices = schedules(Kernel::Sm90Fwd, &spec).into_iter();
        choices.map(move |schedule| (schedule, spec, Target::Sm90a))
    });
    assert!(assemble_all(&hopper.collect::<Vec<_>>()) > 200);
    let specs = [64, 128, 256].map(|head_dim| {
        [Spec::new(ElementType::F16, head_dim), Spec::new(ElementType::F16, head_dim).causal()]
    });
    let mut work = Vec::new();
    for spec in specs.into_iter().flatten() {
        let grid = sm80::fwd::Schedule::grid().into_iter().map(Schedule::Sm80Fwd);
        work.extend(grid.map(|schedule| (schedule, spec, Target::Sm80)));
    }
    assert!(assemble_all(&work) > 100);
}

/// Needs nvdisasm, and takes minutes.
#[test]
#[ignore = "disassembles every kernel with wgmma that plans choose, which takes minutes"]
fn no_code_that_plans_choose_touches_the_registers_of_products_in_flight() {
    let nvdisasm = Nvdisasm::find().expect("nvdisasm of the PyPI package nvidia-cuda-nvdisasm");
    let hardware = Hardware::typical(Target::Sm90a);
    let mut work: Vec<(Schedule, Spec, Target)> = Vec::new();
    let masks = [Mask::None, Mask::Causal, Mask::Window { left: Some(100), right: Some(10) }];
    for (i, head_dim) in (8..=256).step_by(8).enumerate() {
        let (dtype, softcap) = [(DType::F16, 0.0), (DType::BF16, 20.0)][i % 2];
        // Values as wide as keys, and as wide as is left.
        for head_dim_v in [head_dim, 264 - head_dim] {
            let problem = Problem::new(2, 8, 4096, head_dim, dtype).with_head_dim_v(head_dim_v);
            let problem = problem.with_mask(masks[i % 3]).with_softcap(softcap).with_kv(4, 4096);
            for problem in [problem.backward(), problem.with_lse()] {
                let plan = Plan::choose(&problem, &hardware).unwrap();
                work.extend(plan.launches.iter().map(|launch| (launch.schedule, launch.spec, plan.target)));
            }
        }
    }
    work.extend(by_length());
    work.extend(hopper_choices().into_iter().map(|(schedule, spec)| (schedule, spec, Target::Sm90a)));
    let has_wgmma = |(schedule, spec, target): &(Schedule, Spec, Target)| {
        let module = schedule.emit(spec, *target).unwrap();
        module.kernels.iter().any(|kernel| kernel.body.iter().any(|inst| matches!(inst.op, Op::Wgmma(_))))
    };
    work.sort_by_key(|(schedule, spec, _)| (schedule.to_string(), format!("{spec:?}")));
    work.dedup();
    work.retain(has_wgmma);
    println!("{} kernels", work.len());
    assert!(work.len() > 150);
    assert_eq!(assemble_all(&work), work.len());

    // The walk sees the products, those with operands in registers among them.
    let spec = Spec::new(ElementType::Bf16, 192);
    let schedule = default_schedule(Kernel::Sm90BwdWide, &spec, Target::Sm90a).unwrap();
    let module = schedule.emit(&spec, Target::Sm90a).unwrap();
    let ptxas = Ptxas::find().unwrap();
    let walked = walk(&nvdisasm, &ptxas.assemble(&module, Target::Sm90a).unwrap().cubin);
    assert!(walked.wgmmas > 100 && walked.with_registers > 20, "{walked:?}");
}

#[test]
fn a_schedule_over_the_shared_memory_of_a_target_is_refused_with_the_sizes() {
    let text = "sm80_fwd:block_m=128,block_n=128,warps=8,stages=2,q_in_regs=0,order=head";
    let schedule: Schedule = text.parse().unwrap();
    let spec = Spec::new(ElementType::F16, 128);
    assert!(schedule.check(&spec, Target::Sm80).is_ok());
    let refused = schedule.emit(&spec, Target::Sm89).unwrap_err().to_string();
    for part in ["163840", "101376", "q 32768", "k 65536", "v 65536"] {
        assert!(refused.contains(part), "{part} is missing in: {refused}");
    }
}

#[test]
fn what_hopper_blocks_cannot_do_together_is_refused_with_the_reason() {
    let text = |warpgroups: u32, split: u32, persistent: u32, ctas: u32| {
        format!(
            "sm90_fwd:warpgroups={warpgroups},block_n=64,stages=2,q_stages=1,ctas={ctas},split={split},pingpong=0,\
             lazy=1,poly=0,persistent={persistent},pairs=0"
        )
    };
    let check = |text: String, target: Target| {
        let schedule: Schedule = text.parse().unwrap();
        assert_eq!(schedule.to_string(), text);
        schedule.check(&Spec::new(ElementType::F16, 64), target)
    };
    assert!(check(text(1, 2, 0, 1), Target::Sm90a).is_ok());
    for (text, target, reason) in [
        (text(2, 2, 0, 1), Target::Sm90a, "one warpgroup"),
        (text(1, 2, 1, 1), Target::Sm90a, "persistent=0"),
        (text(3, 1, 1, 2), Target::Sm90a, "1 to 4 blocks of one, or 2 of two"),
        (text(5, 1, 1, 1), Target::Sm90a, "possible are 1 to 4"),
        (text(1, 1, 1, 1), Target::Sm80, "sm_90a"),
    ] {
        let refused = check(text, target).unwrap_err().to_string();
        assert!(refused.contains(reason), "{reason} is missing in: {refused}");
    }
}

#[test]
fn text_that_names_no_schedule_is_refused_with_the_reason() {
    for (text, reason) in [
        ("sm80_fwd", "kernel:knob=value"),
        ("sm99:block_n=64", "'sm99' is not a kernel"),
        ("sm80_mma:block_n", "knob=value"),
        ("sm80_mma:block_n=x", "whole number"),
        ("sm80_mma:", "needs the knob block_n"),
        ("sm80_mma:block_n=64,block_m=64", "no knob block_m"),
        ("scalar:warps=99", ""),
    ] {
        let parsed: Result<Schedule, _> = text.parse();
        match parsed {
            Err(error) => assert!(error.to_string().contains(reason), "{text}: {error}"),
            Ok(schedule) => {
                assert!(schedule.check(&Spec::new(ElementType::F16, 64), Target::Sm80).is_err(), "{text}");
            }
        }
    }
}
