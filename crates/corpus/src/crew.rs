//! Many jobs on a few threads, with the results in the order of the jobs.
//!
//! The threads are not rayon's own: what a job does may wait for its turn on a device, and may itself use rayon, whose
//! threads would start another job while they wait, and then wait for a turn that they hold themselves.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

/// Does every job on up to `threads` threads, and hands the results over on the calling thread, in order and as soon as
/// those before them are there. When `stop` says so, no further job is started, and those in flight are finished.
pub fn in_order<J: Sync, R: Send>(
    jobs: &[J],
    threads: usize,
    stop: &(dyn Fn() -> bool + Sync),
    work: impl Fn(&J) -> R + Sync,
    mut take: impl FnMut(usize, R),
) {
    let next = AtomicUsize::new(0);
    let (give, given) = channel();
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.len().max(1)) {
            let (give, next, work) = (give.clone(), &next, &work);
            scope.spawn(move || {
                while !stop() {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(at) else { break };
                    if give.send((at, work(job))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(give);
        let (mut waiting, mut due) = (BTreeMap::new(), 0);
        for (at, result) in given {
            waiting.insert(at, result);
            while let Some(result) = waiting.remove(&due) {
                take(due, result);
                due += 1;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn results_come_in_order_whoever_is_done_first() {
        let jobs: Vec<u64> = (0..40).collect();
        let mut taken = Vec::new();
        let work = |&job: &u64| {
            std::thread::sleep(Duration::from_millis((job * 7) % 5));
            job * 2
        };
        in_order(&jobs, 4, &|| false, work, |at, result| taken.push((at, result)));
        assert_eq!(taken, (0..40).map(|job| (job as usize, job * 2)).collect::<Vec<_>>());
    }

    #[test]
    fn after_a_stop_what_was_begun_is_finished_and_nothing_else_is() {
        let jobs: Vec<usize> = (0..1000).collect();
        let begun = AtomicUsize::new(0);
        let mut taken = 0;
        let stop = || begun.load(Ordering::SeqCst) >= 10;
        in_order(&jobs, 3, &stop, |_| begun.fetch_add(1, Ordering::SeqCst), |_, _| taken += 1);
        assert_eq!(taken, begun.load(Ordering::SeqCst));
        assert!((10..13).contains(&taken), "{taken}");
    }

    #[test]
    fn no_jobs_give_no_results() {
        in_order(&[], 8, &|| false, |&(): &()| (), |_, ()| panic!("nothing was asked"));
    }
}
