//! What the planner makes of problems on Hopper: which schedule, and parameters that reach every tile.
#![cfg(feature = "cuda")]

use flashcore::plan::{Bindings, Hardware, Kernel, Plan, Schedule, Target};
use flashcore::{DType, Layout, Mask, Problem};
use flashcore_kernels::sm90;
use flashcore_ptx::TensorMap;

fn h200() -> Hardware {
    Hardware::typical(Target::Sm90a)
}

fn schedule(problem: &Problem) -> sm90::fwd::Schedule {
    match Plan::choose(problem, &h200()).unwrap().main().schedule {
        Schedule::Sm90Fwd(schedule) => schedule,
        other => panic!("{problem} is planned with {other}"),
    }
}

#[test]
fn every_head_dim_is_for_the_hopper_kernel_and_its_plan_says_why() {
    for head_dim in (8..=256).step_by(8) {
        for len in [1, 100, 4096] {
            let problem = Problem::new(2, 16, len, head_dim, DType::BF16).with_lse();
            let plan = Plan::choose(&problem, &h200()).unwrap();
            assert_eq!(plan.kernel(), Kernel::Sm90Fwd, "{problem}");
            assert!(plan.reason.contains("Hopper"), "{}", plan.reason);
        }
    }
}

#[test]
fn large_grids_get_wide_blocks_that_stay() {
    let narrow_heads = schedule(&Problem::new(8, 32, 2048, 64, DType::F16));
    assert_eq!((narrow_heads.warpgroups, narrow_heads.persistent), (3, true));
    let wide_heads = schedule(&Problem::new(8, 16, 2048, 128, DType::F16));
    assert_eq!((wide_heads.warpgroups, wide_heads.persistent), (2, true));
    let plan = Plan::choose(&Problem::new(8, 32, 2048, 64, DType::F16), &h200()).unwrap();
    assert_eq!(plan.main().grid, [132, 1, 1]);
}

#[test]
fn small_grids_share_the_keys_of_a_tile() {
    let mission = Problem::new(1, 8, 512, 64, DType::F16);
    assert_eq!(schedule(&mission).split, 2);
    let plan = Plan::choose(&mission, &h200()).unwrap();
    assert_eq!((plan.main().grid, plan.main().cluster), ([128, 1, 1], 2));
    // One key tile cannot be shared.
    assert_eq!(schedule(&Problem::new(1, 8, 128, 64, DType::F16)).split, 1);
    // Nor can columns that do not come out even.
    assert_eq!(schedule(&Problem::new(1, 8, 512, 72, DType::F16)).split, 1);
}

/// The parameters of a plan as a launch would get them, with the maps that were asked for.
fn packed(problem: &Problem) -> (Plan, Vec<u8>, Vec<flashcore::plan::Map>) {
    let plan = Plan::choose(problem, &h200()).unwrap();
    let tensors = problem.signature();
    let tensors = tensors.iter().zip(1..).map(|(it, n)| (it.name, 0x1000 * n, Layout::bshd(it.shape)));
    let bindings = Bindings::of(tensors);
    let mut maps = Vec::new();
    let mut encode = |map: &flashcore::plan::Map| {
        maps.push(*map);
        Ok(TensorMap::default())
    };
    let packed = plan.bind(&bindings, &mut encode).unwrap().launch(0).0.to_vec();
    (plan, packed, maps)
}

#[test]
fn tensor_maps_describe_the_tensors_as_they_lie() {
    let (_, bytes, maps) =
        packed(&Problem::new(2, 8, 512, 64, DType::F16).with_kv(4, 300).with_head_dim_v(96));
    assert!(bytes.len() > 512);
    let [q, k, v, o] = maps[..] else { panic!("{} maps", maps.len()) };
    assert_eq!((q.address, q.dims, q.strides), (0x1000, [64, 512, 8, 2], [8 * 128, 128, 512 * 8 * 128]));
    assert_eq!((k.address, k.dims, k.strides), (0x2000, [64, 300, 4, 2], [4 * 128, 128, 300 * 4 * 128]));
    assert_eq!((v.dims, o.dims), ([96, 300, 4, 2], [96, 512, 8, 2]));
    assert!([q, k, v, o].iter().all(|map| map.box_dims[0] == 64 && map.box_dims[2..] == [1, 1]));
}

#[test]
fn a_tensor_without_keys_still_has_a_map_that_the_driver_takes() {
    let (_, _, maps) = packed(&Problem::new(1, 2, 64, 64, DType::F16).with_kv(2, 0));
    assert!(maps.iter().all(|map| map.address != 0 && map.dims.iter().all(|&size| size > 0)));
}

#[test]
fn causal_plans_are_as_small_with_many_tiles_as_with_few() {
    let bytes = |(batch, heads, len): (usize, usize, usize)| {
        let problem = Problem::new(batch, heads, len, 64, DType::F16).with_mask(Mask::Causal);
        packed(&problem).1.len()
    };
    let few = bytes((32, 32, 512));
    assert_eq!([(1, 32, 16384), (7, 13, 1000), (1000, 64, 4096)].map(bytes), [few; 3]);
}
