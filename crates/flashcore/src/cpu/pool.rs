//! Threads: they take tasks one by one, dearest first, and the calling thread works too.
#![allow(unsafe_code)] // Enters code that is compiled for an instruction set.

use std::{
    cell::RefCell,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::{
    attend,
    isa::Isa,
    job::{Job, Workspace},
    merge,
    plan::{Plan, Split, Task},
    schedule::Schedule,
    scoring::Scoring,
    scratch::Scratch,
    simd::{Simd, dispatch},
    stream,
};
use crate::contract::Call;

/// Below this many multiply-adds, waking a thread costs more than it saves.
const WORTH_A_THREAD: usize = 2_000_000;

thread_local! {
    static WORKSPACE: RefCell<Workspace> = const { RefCell::new(Workspace::new()) };
}

/// Threads apart from rayon's own, where another number of them is asked for.
pub(super) fn of_its_own(threads: usize) -> Option<std::sync::Arc<rayon::ThreadPool>> {
    if threads <= 1 || threads == rayon::current_num_threads() {
        return None;
    }
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().ok().map(std::sync::Arc::new)
}

/// Computes a call.
pub(super) fn run(isa: Isa, schedule: &Schedule, pool: Option<&rayon::ThreadPool>, call: &Call<'_>) {
    let plan = Plan::new(call, schedule, isa.panel());
    let mut job = Job {
        call,
        scoring: Scoring::of(&call.problem),
        block_k: schedule.block_k.max(1),
        parts: std::ptr::null_mut(),
        part_rows: plan.part_rows,
    };
    let mut parts = Scratch::new();
    job.parts = parts.reserve(plan.parts() * job.part_len());
    let threads = schedule.threads.min(1 + plan.work / WORTH_A_THREAD);
    // SAFETY: the engine has only an instruction set that this CPU has; the call is checked and the plan its own.
    each(pool, threads, &plan.tasks, |task, space| unsafe { attend(isa, &job, task, space) });
    // SAFETY: as above, and all tasks have run.
    each(pool, threads, &plan.splits, |split, space| unsafe { merge(isa, &job, split, space) });
}

/// Runs `work` on every item, on up to `threads` threads.
fn each<T: Sync>(
    pool: Option<&rayon::ThreadPool>,
    threads: usize,
    items: &[T],
    work: impl Fn(&T, &mut Workspace) + Sync,
) {
    let next = AtomicUsize::new(0);
    let take_all = || {
        WORKSPACE.with_borrow_mut(|workspace| {
            while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                work(item, workspace);
            }
        });
    };
    let helpers = threads.min(items.len()).saturating_sub(1);
    if helpers == 0 {
        return take_all();
    }
    match pool {
        Some(pool) => pool.in_place_scope(|scope| with_helpers(scope, helpers, &take_all)),
        None => rayon::in_place_scope(|scope| with_helpers(scope, helpers, &take_all)),
    }
}

fn with_helpers<'scope>(scope: &rayon::Scope<'scope>, helpers: usize, take_all: &'scope (impl Fn() + Sync)) {
    for _ in 0..helpers {
        scope.spawn(|_| take_all());
    }
    take_all();
}

dispatch! {
    /// Runs a task.
    unsafe fn attend(job: &Job<'_>, task: &Task, workspace: &mut Workspace) = attend_on
}

#[inline(always)]
unsafe fn attend_on<S: Simd>(job: &Job<'_>, task: &Task, workspace: &mut Workspace) {
    // SAFETY: the caller's promise.
    unsafe {
        if stream::suits::<S>(&job.call.problem) {
            stream::run::<S>(job, task, workspace);
        } else {
            attend::run::<S>(job, task, workspace);
        }
    }
}

dispatch! {
    /// Merges the parts of some rows.
    unsafe fn merge(job: &Job<'_>, split: &Split, workspace: &mut Workspace) = merge::run
}
