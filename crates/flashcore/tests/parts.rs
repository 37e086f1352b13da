//! Keys that are cut into parts, computed apart and merged by a second launch: on the simulator, against the oracle.
#![cfg(feature = "sim")]

mod shared;

use flashcore::{
    Attention, DType, Device, Mask, Problem, TensorBuf,
    plan::{Hardware, Kernel, Launch, Plan, Schedule, Target},
    sim::SimGpu,
};
use flashcore_kernels::sm90;
use flashcore_ptx::{GridDep, Module, Op};
use shared::{errors, noise};

/// A schedule with so many parts.
fn schedule(parts: u32, together: bool) -> Schedule {
    let (warpgroups, stages) = if together { (2, 4) } else { (1, 2) };
    let text = format!(
        "sm90_fwd:warpgroups={warpgroups},block_n=32,stages={stages},q_stages=1,ctas=1,split=1,pingpong=0,lazy=1,poly=0,\
         persistent=0,pairs=0,together={},parts={parts}",
        u32::from(together)
    );
    text.parse().unwrap()
}

#[test]
fn parts_come_to_what_attention_is() {
    for (text, parts, together) in [
        ("1x4/1x1/200x64 f16", 3, false),
        ("2x2x70/150x64 bf16 causal", 2, false),
        ("1x3x5/333x128 bf16 window(100,20)", 4, true),
        ("1x2x3/97x40/72 f16 softcap=5", 5, false),
        ("1x8/1x1/300x256 bf16", 8, false),
        ("1x2x9/64x8 f16 scale=1000000", 2, true),
    ] {
        let (o, lse) = errors(text, schedule(parts, together), None);
        assert!(o < 8e-3 && lse < 2e-3, "{text} in {parts} parts: o is off by {o:.1e}, lse by {lse:.1e}");
    }
}

#[test]
fn parts_and_clusters_may_take_key_tiles_in_turn() {
    for (text, parts, together) in [
        ("1x4/1x1/200x64 f16", 3, false),
        ("2x2x70/150x64 bf16 causal", 2, false),
        ("1x3x5/333x128 bf16 window(100,20)", 4, true),
        ("1x8/1x1/90x64 bf16", 5, true),
    ] {
        let Schedule::Sm90Fwd(each) = schedule(parts, together) else { panic!("not Hopper's") };
        let in_turn = Schedule::Sm90Fwd(sm90::fwd::Schedule { in_turn: true, ..each });
        let cluster = Schedule::Sm90Fwd(sm90::fwd::Schedule { split: 4, parts: 1, in_turn: true, ..each });
        let (o, lse) = errors(text, cluster, None);
        assert!(o < 8e-3 && lse < 2e-3, "{text} in a cluster: o is off by {o:.1e}, lse by {lse:.1e}");
        let (o, lse) = errors(text, in_turn, None);
        assert!(o < 8e-3 && lse < 2e-3, "{text} in {parts} parts: o is off by {o:.1e}, lse by {lse:.1e}");
        let lengths = [33, 70];
        let (o, lse) = errors("2x4/2x1/200x64 bf16 key-lengths", in_turn, Some(&lengths));
        assert!(o < 8e-3 && lse < 2e-3, "{lengths:?}: o is off by {o:.1e}, lse by {lse:.1e}");
    }
}

#[test]
fn parts_without_keys_count_for_nothing() {
    for lengths in [[0, 1], [33, 0], [200, 31]] {
        let (o, lse) = errors("2x4/2x1/200x64 bf16 key-lengths", schedule(6, false), Some(&lengths));
        assert!(o < 8e-3 && lse < 2e-3, "{lengths:?}: o is off by {o:.1e}, lse by {lse:.1e}");
    }
}

/// What the simulator says of two parts when instructions of the kernel that merges them are left out.
fn without(dropped: fn(&Op) -> bool) -> Result<(), String> {
    let edit = move |module: &mut Module| {
        let kernel = &mut module.kernels[0];
        if kernel.name == "flashcore_combine" {
            kernel.body.retain(|inst| !dropped(&inst.op));
        }
    };
    let gpu = SimGpu::new(Target::Sm90a).with_schedule(schedule(8, false)).with_edit(edit);
    let kv = TensorBuf::from_f32(&noise(300 * 64, 1), [1, 1, 300, 64], DType::F16).unwrap();
    let q = TensorBuf::from_f32(&noise(64, 2), [1, 1, 1, 64], DType::F16).unwrap();
    let run = Attention::new().run(&Device::sim(gpu), &q.view(), &kv.view(), &kv.view());
    run.map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn a_merge_that_does_not_wait_is_found() {
    assert_eq!(without(|_| false), Ok(()));
    let said = without(|op| *op == Op::GridDepControl(GridDep::Wait)).unwrap_err();
    assert!(said.contains("in flight") && said.contains("flashcore_sm90_fwd"), "{said}");
    let said = without(|op| matches!(op, Op::BarSync { .. })).unwrap_err();
    assert!(said.contains("race"), "{said}");
}

#[test]
fn a_plan_with_parts_is_two_launches_and_says_what_they_share() {
    let problem: Problem = "1x8/2x1/4096x64 f16 lse".parse().unwrap();
    let hardware = Hardware::typical(Target::Sm90a);
    let plan = Plan::with_schedule(&problem, &hardware, schedule(16, false)).unwrap();
    let kernels: Vec<Kernel> = plan.launches.iter().map(Launch::kernel).collect();
    assert_eq!(kernels, [Kernel::Sm90Fwd, Kernel::Combine]);
    assert_eq!((plan.launches[0].grid, plan.launches[1].grid), ([2, 16, 1], [8, 1, 1]));
    // 2 heads of 4 queries, 16 parts: 64 columns and two numbers of 4 bytes each.
    assert_eq!(plan.workspace_bytes(), 2 * 4 * 16 * 4 * (64 + 2));
    assert!(plan.to_string().contains("workspace 33792 bytes"), "{plan}");
    let causal = problem.with_mask(Mask::Causal);
    assert!(Plan::with_kernel(&causal, &hardware, Kernel::Combine).is_err());
}
