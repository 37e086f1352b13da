//! Kernels that stamp their sections: they assemble as well as those that do not, compute the same, and tell the truth.
#![cfg(all(feature = "cuda", feature = "sim"))]

use std::collections::BTreeSet;

use flashcore::plan::{Hardware, Plan, Schedule, Target};
use flashcore::sim::SimGpu;
use flashcore::{Attention, Device, Problem, TensorBuf, oracle};
use flashcore_kernels::Phase::{self, *};
use flashcore_ptx::{Track, ptxas::Ptxas};

/// A persistent schedule whose warpgroups take turns.
const TURNS: &str = "sm90_fwd:warpgroups=2,block_n=128,stages=2,q_stages=2,ctas=1,split=1,pingpong=1,lazy=1,poly=0,\
                     persistent=1,pairs=0";
const AMPERE: &str = "sm80_fwd:block_m=64,block_n=64,warps=4,stages=2,q_in_regs=1,order=head";

/// The planner's choice for the mission shape, a persistent schedule with turns, and the kernel for Ampere.
fn cases() -> Vec<(Problem, Target, Option<Schedule>)> {
    let case = |text: &str, target, schedule: Option<&str>| {
        (text.parse().unwrap(), target, schedule.map(|text| text.parse().unwrap()))
    };
    vec![
        case("1x8x512x64 f16", Target::Sm90a, None),
        case("1x2x512x128 bf16 causal", Target::Sm90a, Some(TURNS)),
        case("1x2x256x64 f16 causal lse", Target::Sm80, Some(AMPERE)),
    ]
}

fn gpu(target: Target, schedule: Option<Schedule>) -> SimGpu {
    let gpu = SimGpu::new(target);
    // Few multiprocessors, so that a persistent block has several tiles; the planner's choice is for the real number.
    if let Some(schedule) = schedule { gpu.with_sms(3).with_schedule(schedule) } else { gpu }
}

#[test]
fn stamps_make_no_kernel_spill_and_serialise_no_product() {
    let Some(ptxas) = Ptxas::find_or_skip().unwrap() else {
        eprintln!("skipped: no ptxas here; ./check tools installs it");
        return;
    };
    for (problem, target, schedule) in cases() {
        let plan = gpu(target, schedule).with_trace(0).plan(&problem).unwrap();
        let made = ptxas.assemble(&plan.main().module(target).unwrap(), target).unwrap();
        let said: Vec<&str> = made.remarks.iter().map(|remark| remark.text.as_str()).collect();
        let it = &made.kernels[0];
        let spilled = it.spill_store_bytes + it.spill_load_bytes + it.stack_bytes;
        assert!(said.is_empty() && spilled == 0, "{problem}: {spilled} bytes spilled, {said:?}");
    }
}

/// What a device computes.
fn run(problem: &Problem, gpu: &SimGpu) -> (Vec<f32>, f64) {
    let noise = |len: usize, seed: usize| -> Vec<f32> {
        let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 20;
        (0..len).map(|i| (word(word(i)) % 2001) as f32 / 1000.0 - 1.0).collect()
    };
    let inputs: Vec<TensorBuf> = (problem.signature().iter().take(3).zip(0..))
        .map(|(it, seed)| {
            let numbers = noise(it.shape.iter().product(), seed);
            TensorBuf::from_f32(&numbers, it.shape, problem.dtype).unwrap()
        })
        .collect();
    let [q, k, v] = [0, 1, 2].map(|i| inputs[i].view());
    let mut attention = Attention::new().mask(problem.mask).scale(problem.scale);
    if problem.lse {
        attention = attention.with_lse();
    }
    let found = attention.run(&Device::sim(gpu.clone()), &q, &k, &v).unwrap().o.to_f32();
    let truth = oracle::attention(problem, &q, &k, &v, None).o;
    let error = found.iter().zip(&truth).map(|(&a, &b)| (f64::from(a) - b).abs()).fold(0.0, f64::max);
    (found, error)
}

/// The sections of a role, over all blocks.
fn sections(tracks: &[Track], role: u32) -> BTreeSet<Phase> {
    let stamps = tracks.iter().filter(|track| track.role == role).flat_map(|track| &track.stamps);
    stamps.map(|stamp| Phase::of(stamp.section).unwrap()).collect()
}

#[test]
fn a_traced_kernel_computes_the_same_and_names_all_its_sections_in_order() {
    let every_tile = [KWait, Qk, QkWait, Softmax, VWait, Pv, PvWait];
    let producer = BTreeSet::from([LaunchWait, Tile, SlotWait, CopyQ, CopyK, CopyV]);
    let mission: BTreeSet<_> =
        [LaunchWait, Tile, QWait, Merge, Store].into_iter().chain(every_tile).collect();
    let turns: BTreeSet<_> =
        [LaunchWait, Tile, QWait, Turn, Rescale, Store].into_iter().chain(every_tile).collect();
    let ampere = BTreeSet::from([Tile, QWait, CopyQ, CopyK, CopyV, KWait, Qk, Softmax, Pv, Store]);
    for ((problem, target, schedule), (roles, first, last)) in cases().into_iter().zip([
        (3, mission, producer.clone()),
        (3, turns, producer),
        (4, ampere.clone(), ampere),
    ]) {
        let plain = gpu(target, schedule);
        let traced = plain.clone().with_trace(4096);
        let ((expected, error), (found, _)) = (run(&problem, &plain), run(&problem, &traced));
        assert!(found == expected, "{problem}: stamps change the result");
        assert!(error < 8e-3, "{problem}: off by {error:.1e}");
        let tracks = traced.last_trace();
        let blocks: u32 = plain.plan(&problem).unwrap().main().grid.iter().product();
        assert_eq!(tracks.len() as u32, roles * blocks, "{problem}");
        assert_eq!(sections(&tracks, 0), first, "{problem}");
        assert_eq!(sections(&tracks, roles - 1), last, "{problem}");
        for track in &tracks {
            let clocks: Vec<u32> = [track.start.clock]
                .into_iter()
                .chain(track.stamps.iter().map(|stamp| stamp.clock))
                .chain([track.end.clock])
                .collect();
            assert!(clocks.is_sorted(), "{problem}: {clocks:?}");
            assert_eq!(track.lost, 0);
        }
    }
}

#[test]
fn key_tiles_are_numbered_from_the_last_and_no_wait_ends_before_the_copy_it_waits_for_is_issued() {
    let (problem, target, schedule) = cases().remove(1);
    let config =
        flashcore::sim::Config { async_mode: flashcore::sim::AsyncMode::Early, ..Default::default() };
    let traced = gpu(target, schedule).with_config(config).with_trace(4096);
    run(&problem, &traced);
    let tracks = traced.last_trace();
    // Four key tiles; the block of the last queries sees all of them.
    let of = |role: u32, section: Phase| -> Vec<(u32, u32, u32)> {
        let track = tracks.iter().find(|track| track.block == 0 && track.role == role).unwrap();
        let stamps = track.stamps.windows(2).filter(|pair| pair[0].section == section as u8);
        stamps.take(4).map(|pair| (pair[0].number.unwrap(), pair[0].clock, pair[1].clock)).collect()
    };
    let (copies, waits) = (of(2, CopyK), of(1, KWait));
    assert_eq!(waits.iter().map(|wait| wait.0).collect::<Vec<_>>(), [3, 2, 1, 0]);
    for (copy, wait) in copies.iter().zip(&waits) {
        assert_eq!(copy.0, wait.0);
        assert!(
            wait.2 > copy.1,
            "the wait for tile {} ends at {}, the copy begins at {}",
            wait.0,
            wait.2,
            copy.1
        );
    }
}

#[test]
fn stamps_without_room_are_counted_and_not_written() {
    let (problem, target, schedule) = cases().remove(2);
    let stamps = |room: u32| -> Vec<(usize, u32)> {
        let traced = gpu(target, schedule).with_trace(room);
        run(&problem, &traced);
        traced.last_trace().iter().map(|track| (track.stamps.len(), track.lost)).collect()
    };
    let (all, some, none) = (stamps(4096), stamps(6), stamps(0));
    for ((&(all, _), some), none) in all.iter().zip(some).zip(none) {
        assert!(all > 6);
        assert_eq!(some, (6, all as u32 - 6));
        assert_eq!(none, (0, all as u32));
    }
}

#[test]
fn what_has_no_stamps_is_refused_with_what_has() {
    let problem: Problem = "1x8x512x64 f32".parse().unwrap();
    let plan = Plan::choose(&problem, &Hardware::typical(Target::Sm90a)).unwrap().traced();
    let refused = plan.main().module(Target::Sm90a).unwrap_err().to_string();
    assert!(refused.contains("sm80_fwd and sm90_fwd"), "{refused}");
}
