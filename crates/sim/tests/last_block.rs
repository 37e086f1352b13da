//! The last block to arrive merges what all blocks have written: blocks write partial results to global memory, one thread
//! of each counts its block at a counter, and the block that sees the last count reads the results of all.
//!
//! Every way of doing it right is clean, and everything that is left out is a race.

mod common;

use common::*;
use flashcore_ptx::*;
use flashcore_sim::*;

const BLOCKS: u32 = 4;

/// How the results of a block are made known to the block that merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The counting thread fences before and after it counts, between two barriers.
    OneFences,
    /// Every thread fences before the first barrier, and after the second one.
    AllFence,
    /// The counting atomic releases and acquires, between two barriers.
    AtomicOrders,
}

/// What is left out or too weak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    NoReleasingFence,
    NoAcquiringFence,
    NoFirstBarrier,
    NoSecondBarrier,
    /// Fences, or the atomic that orders, reach the block only.
    NarrowFence,
    /// The counter's atomic reaches the block only.
    NarrowAtomic,
    /// Only the counting thread fences, before the barrier.
    FenceOfOneBeforeTheBarrier,
}

fn merge(way: Way, fault: Fault, threads: u32) -> Module {
    let mut shared = SharedLayout::new();
    let count = shared.alloc("count", 4, 4);
    kernel(threads, shared, Target::Sm90, move |k| {
        let (x, y, tid, block) = (k.param(Io::x), k.param(Io::y), k.tid_x(), k.ctaid_x());
        let first = k.setp_eq_u32(tid, 0);
        let scope = if fault == Fault::NarrowFence { Scope::Cta } else { Scope::Gpu };
        let fence = |k: &mut KernelBuilder| k.fence(FenceSem::AcqRel, scope);
        let slot = k.mad_lo_u32(block, threads, tid);
        let mine = k.mad_wide_u32(slot, 4, x);
        let value = k.add_u32(block, 1);
        k.comment("a partial result");
        k.st_global(mine.at(128), value);
        if way == Way::AllFence && fault == Fault::FenceOfOneBeforeTheBarrier {
            k.if_(first, fence);
        } else if way == Way::AllFence && fault != Fault::NoReleasingFence {
            fence(k);
        }
        if fault != Fault::NoFirstBarrier {
            k.bar_sync_all();
        }
        k.if_(first, |k| {
            if way == Way::OneFences && fault != Fault::NoReleasingFence {
                fence(k);
            }
            let sem = match way {
                Way::AtomicOrders if fault == Fault::NoReleasingFence => AtomSem::Acquire,
                Way::AtomicOrders if fault == Fault::NoAcquiringFence => AtomSem::Release,
                Way::AtomicOrders => AtomSem::AcqRel,
                _ => AtomSem::Relaxed,
            };
            let narrow = fault == Fault::NarrowAtomic || way == Way::AtomicOrders && scope == Scope::Cta;
            k.comment("count the block");
            let before = k.atom_add_u32(sem, if narrow { Scope::Cta } else { Scope::Gpu }, x, 1u32);
            if way == Way::OneFences && fault != Fault::NoAcquiringFence {
                fence(k);
            }
            k.st_shared(count, before);
        });
        if fault == Fault::NoSecondBarrier {
            // The threads that did not count merge if their block's number is the last, whatever was counted.
            let last = k.setp_eq_u32(block, BLOCKS - 1);
            k.if_(last, |k| sum(k, x, y, tid, threads));
            return;
        }
        k.bar_sync_all();
        if way == Way::AllFence && fault != Fault::NoAcquiringFence {
            fence(k);
        }
        let counted = k.ld_shared::<B32>(count);
        let last = k.setp_eq_u32(counted, BLOCKS - 1);
        k.if_(last, |k| sum(k, x, y, tid, threads));
    })
}

/// Adds the partial results of a thread in all blocks.
fn sum(k: &mut KernelBuilder, x: Reg<B64>, y: Reg<B64>, tid: Reg<B32>, threads: u32) {
    let at = k.mad_wide_u32(tid, 4, x);
    let sum = k.mov_b32(0);
    for block in 0..BLOCKS {
        k.comment("merge");
        let v = k.ld_global::<B32>(at.at((128 + 4 * threads * block) as i32));
        k.set(sum, |k| k.add_u32(sum, v));
    }
    let py = k.mad_wide_u32(tid, 4, y);
    k.st_global(py, sum);
}

fn run_merge(way: Way, fault: Fault, threads: u32, config: &Config) -> Outcome {
    let module = merge(way, fault, threads);
    run(
        &module,
        BLOCKS,
        &vec![0; 128 + 4 * (threads * BLOCKS) as usize],
        4 * threads as usize,
        0,
        config.clone(),
    )
}

fn configs() -> Vec<Config> {
    let with = |seed, threads| Config { seed, threads, ..Config::default() };
    vec![with(0, 1), with(1, 1), with(2, 1), with(3, 2)]
}

const WAYS: [Way; 3] = [Way::OneFences, Way::AllFence, Way::AtomicOrders];

#[test]
fn the_last_block_may_read_what_all_have_written() {
    for way in WAYS {
        for threads in [32, 64, 96] {
            for config in configs() {
                let outcome = run_merge(way, Fault::None, threads, &config);
                assert_clean(&outcome, &config);
                assert_eq!(outcome.u32s(), vec![1 + 2 + 3 + 4; threads as usize], "{way:?}");
            }
        }
    }
}

#[test]
fn a_fence_or_a_barrier_that_is_missing_or_too_narrow_is_a_race() {
    let faults = [
        Fault::NoReleasingFence,
        Fault::NoAcquiringFence,
        Fault::NoFirstBarrier,
        Fault::NoSecondBarrier,
        Fault::NarrowFence,
        Fault::NarrowAtomic,
    ];
    let also = [(Way::AllFence, Fault::FenceOfOneBeforeTheBarrier)];
    let all = WAYS.into_iter().flat_map(|way| faults.map(|fault| (way, fault))).chain(also);
    for (way, fault) in all {
        // In a block of one warp, too, lanes are ordered only by a barrier.
        for threads in [32, 64] {
            for config in configs() {
                let outcome = run_merge(way, fault, threads, &config);
                let race = outcome.report.of(FindingKind::GlobalRace).next();
                let race = race.unwrap_or_else(|| panic!("{way:?} {fault:?} {threads} {}", config.seed));
                let sites = [Some(&race.site), race.other.as_ref().map(|other| &other.site)];
                let comments = sites.map(|site| site.and_then(|site| site.comment.as_deref()));
                assert!(comments.contains(&Some("a partial result")), "{way:?} {fault:?}: {race}");
            }
        }
    }
}
