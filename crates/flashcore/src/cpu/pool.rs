//! Threads: they take tasks one by one, dearest first, and the calling thread works too.
#![allow(unsafe_code)] // Enters code that is compiled for an instruction set.

use std::cell::RefCell;

#[cfg(target_arch = "x86_64")]
use super::matrix;
use super::{
    attend, backward,
    helpers::{Helpers, Source},
    isa::Isa,
    job::{Job, Workspace},
    merge,
    plan::{Plan, Split, Task},
    queue::Queue,
    schedule::Schedule,
    scoring::Scoring,
    scratch::Scratch,
    simd::{Simd, dispatch},
    stream, wide,
};
use crate::{Pass, contract::Call};

/// Below this many multiply-adds, waking a thread costs more than it saves.
pub(super) const WORTH_A_THREAD: usize = 2_000_000;

thread_local! {
    static WORKSPACE: RefCell<Workspace> = const { RefCell::new(Workspace::new()) };
}

/// Computes a call.
pub(super) fn run(isa: Isa, schedule: &Schedule, helpers: Source<'_>, call: &Call<'_>) {
    if call.problem.pass == Pass::Backward {
        return backward::run(isa, schedule, helpers, call);
    }
    let descaled = Scoring::descaled(call);
    let scoring = descaled.first().map_or_else(|| Scoring::of(&call.problem), |&(of_first, _)| of_first);
    // Rows in f64 are not split.
    let split_k = if scoring.fits { schedule.split_k } else { usize::MAX };
    let plan = Plan::new(call, &Schedule { split_k, ..*schedule }, isa.panel());
    let mut job = Job {
        call,
        scoring,
        descaled,
        block_k: schedule.block_k.max(1),
        parts: std::ptr::null_mut(),
        part_rows: plan.part_rows,
    };
    let mut parts = Scratch::new();
    job.parts = parts.reserve(plan.parts() * job.part_len());
    let threads = schedule.threads.min(1 + plan.work / WORTH_A_THREAD);
    // SAFETY: the engine has only an instruction set that this CPU has; the call is checked and the plan its own.
    each(helpers, threads, &plan.tasks, |task, tasks, space| unsafe {
        #[cfg(target_arch = "x86_64")]
        if isa.multiplies_bf16() && scoring.fits && matrix::suits(&call.problem, job.rows(task)) {
            return matrix::run(isa, &job, task, space);
        }
        attend(isa, &job, task, tasks, space);
    });
    let threads = threads.min(1 + plan.parts() * job.part_len() / WORTH_A_THREAD);
    // SAFETY: as above, and all tasks have run.
    each(helpers, threads, &plan.splits, |split, _, space| unsafe { merge(isa, &job, split, space) });
}

/// Runs `work` on every item, on up to `threads` threads; it is told the queue that items are taken from.
pub(super) fn each<T: Sync>(
    helpers: Source<'_>,
    threads: usize,
    items: &[T],
    work: impl Fn(&T, &Queue<'_, T>, &mut Workspace) + Sync,
) {
    let queue = Queue::new(items);
    let take_all = || {
        WORKSPACE.with_borrow_mut(|workspace| {
            while let Some(item) = queue.take() {
                work(item, &queue, workspace);
            }
        });
    };
    match threads.min(items.len()).saturating_sub(1) {
        0 => take_all(),
        others => Helpers::join(helpers, others, take_all),
    }
}

dispatch! {
    /// Runs a task.
    unsafe fn attend(job: &Job<'_>, task: &Task, tasks: &Queue<'_, Task>, workspace: &mut Workspace) = attend_on
}

#[inline(always)]
unsafe fn attend_on<S: Simd>(job: &Job<'_>, task: &Task, tasks: &Queue<'_, Task>, workspace: &mut Workspace) {
    // SAFETY: the caller's promise.
    unsafe {
        if !job.scoring.fits {
            wide::run::<S>(job, task);
        } else if stream::suits::<S>(&job.call.problem, job.rows(task)) {
            stream::run::<S>(job, task, workspace);
        } else {
            attend::run::<S>(job, task, tasks, workspace);
        }
    }
}

dispatch! {
    /// Merges the parts of some rows.
    unsafe fn merge(job: &Job<'_>, split: &Split, workspace: &mut Workspace) = merge::run
}
