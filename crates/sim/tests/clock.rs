//! What the clock registers show: the instructions that a warp has executed, and at least the time of what it waited for.

mod common;

use common::*;
use flashcore_ptx::*;
use flashcore_sim::*;

/// The clocks of two warps: at the start, after each has done its own work, and after they have met.
fn clocks(long: u32, config: &Config, meet: impl FnOnce(&mut KernelBuilder, Reg<Pred>)) -> [[u32; 3]; 2] {
    let mut layout = SharedLayout::new();
    layout.alloc("barrier", 8, 8);
    let module = kernel(64, layout, Target::Sm90a, |k| {
        let start = k.clock();
        let tid = k.tid_x();
        let first = k.setp_lt_u32(tid, 32u32);
        let left = k.selp_b32(long, 0u32, first);
        let left = k.mov_b32(left);
        k.while_(|k| k.setp_gt_u32(left, 0u32), |k, _| k.set(left, |k| k.sub_u32(left, 1u32)));
        let worked = k.clock();
        meet(k, first);
        let met = k.clock();
        let y = k.param(Io::y);
        let at = k.mad_wide_u32(tid, 16, y);
        k.st_global_vec(at, [start, worked, met, met]);
    });
    let outcome = run(&module, 1, &[0; 4], 64 * 16, 0, config.clone());
    assert_clean(&outcome, config);
    let words = outcome.u32s();
    [0, 32].map(|thread: usize| [0, 1, 2].map(|i| words[4 * thread + i]))
}

#[test]
fn a_clock_counts_the_warps_own_instructions() {
    for config in policies() {
        let [long, short] = clocks(100, &config, |_, _| {});
        assert_eq!(long[0], short[0]);
        // A turn of the loop is a comparison, two branches or one, and a subtraction.
        assert!((300..=500).contains(&(long[1] - long[0])), "{long:?}");
        assert!(short[1] - short[0] < 10, "{short:?}");
        assert!(short[2] - short[1] < 3, "nothing is waited for: {short:?}");
    }
}

#[test]
fn whoever_waits_at_a_barrier_goes_on_at_the_time_of_the_last_to_come() {
    for config in policies() {
        let [long, short] = clocks(100, &config, |k, _| k.bar_sync_all());
        assert!(short[2] >= long[1] && short[2] - long[1] < 10, "{long:?} {short:?}");
        assert!(long[2] - long[1] < 10, "the last to come does not wait: {long:?}");
    }
}

#[test]
fn whoever_only_arrives_does_not_wait() {
    for config in policies() {
        let [long, short] = clocks(100, &config, |k, first| {
            k.if_else(first, |k| k.bar_sync(1u32, 64u32), |k| k.bar_arrive(1u32, 64u32));
        });
        assert!(short[2] < long[1] && long[2] - long[1] < 10, "{long:?} {short:?}");
    }
}
