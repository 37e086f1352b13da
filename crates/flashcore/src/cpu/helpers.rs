//! Threads that help a caller: rayon's, and kept off the core that the caller runs on.
//!
//! The system may wake a thread on the core of whoever woke it although another one is idle; inside a virtual machine
//! it was seen to do so often. Two threads then share a core for milliseconds, which is all that
//! a short call takes.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// How long a caller that has nothing left to do looks out for its helpers before it sleeps.
const PATIENCE: Duration = Duration::from_micros(200);
/// How long a helper that has nothing left to do looks out for the next call: waking it up would take a good part of that.
const LOOKOUT: Duration = Duration::from_micros(100);

/// Threads beside the caller's.
#[derive(Debug)]
pub(super) struct Helpers {
    pool: rayon::ThreadPool,
    place: Place,
    /// How many calls there have been.
    calls: Arc<AtomicUsize>,
}

impl Helpers {
    /// For calls on `threads` threads, the caller among them; none where that is the caller alone, or where the system has
    /// no threads to give.
    pub(super) fn new(threads: usize) -> Option<Self> {
        let count = threads.checked_sub(1).filter(|&count| count > 0)?;
        let name = |index| format!("flashcore-{index}");
        let pool = rayon::ThreadPoolBuilder::new().num_threads(count).thread_name(name).build().ok()?;
        let place = Place::of(&pool);
        Some(Self { pool, place, calls: Arc::default() })
    }

    /// Those that all engines share, for as many threads as rayon has.
    fn shared() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Helpers>> = OnceLock::new();
        SHARED.get_or_init(|| Self::new(rayon::current_num_threads())).as_ref()
    }

    /// Runs `work` on the calling thread and on `count` others, and returns when all have. Without helpers of its own a
    /// call uses those that all engines share, or, on one of rayon's threads, that thread's siblings: these are as many as
    /// there are cores.
    pub(super) fn join(own: Option<&Self>, count: usize, work: impl Fn() + Sync) {
        let helpers = match own {
            None if rayon::current_thread_index().is_some() => None,
            None => Self::shared(),
            own => own,
        };
        let Some(helpers) = helpers else {
            return rayon::in_place_scope(|scope| with(scope, count, &work, &work));
        };
        let busy = AtomicUsize::new(count);
        let help = || {
            work();
            busy.fetch_sub(1, Ordering::Release);
            let calls = Arc::clone(&helpers.calls);
            let call = calls.load(Ordering::Relaxed);
            // Of the pool that this runs on, and nobody waits for it.
            rayon::spawn(move || wait(LOOKOUT, || calls.load(Ordering::Relaxed) == call));
        };
        let lead = || {
            work();
            // Waking up costs as much as many a task that a helper is at.
            wait(PATIENCE, || busy.load(Ordering::Acquire) > 0);
        };
        helpers.place.clear();
        helpers.pool.in_place_scope(|scope| {
            with(scope, count, &help, || {
                helpers.calls.fetch_add(1, Ordering::Relaxed);
                lead();
            });
        });
    }
}

/// Looks out, so long at most, until there is no reason to wait any more.
fn wait(most: Duration, there_is_reason: impl Fn() -> bool) {
    let start = Instant::now();
    while there_is_reason() && start.elapsed() < most {
        std::hint::spin_loop();
    }
}

fn with<'scope>(
    scope: &rayon::Scope<'scope>,
    count: usize,
    help: &'scope (impl Fn() + Sync),
    lead: impl FnOnce(),
) {
    for _ in 0..count {
        scope.spawn(|_| help());
    }
    lead();
}

#[cfg(not(target_os = "linux"))]
use elsewhere::Place;
#[cfg(target_os = "linux")]
use linux::Place;

#[cfg(target_os = "linux")]
mod linux {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

    /// Where the threads of a pool may run: wherever they might when they began, but for one core.
    #[derive(Debug)]
    pub(super) struct Place {
        threads: Vec<Pid>,
        allowed: Option<CpuSet>,
        /// The core that is kept free.
        free: AtomicUsize,
    }

    impl Place {
        pub(super) fn of(pool: &rayon::ThreadPool) -> Self {
            let threads = pool.broadcast(|_| gettid());
            Self { threads, allowed: sched_getaffinity(None).ok(), free: AtomicUsize::new(usize::MAX) }
        }

        /// Keeps the threads off the core that this one is on.
        pub(super) fn clear(&self) {
            let here = sched_getcpu();
            if self.free.swap(here, Ordering::Relaxed) == here || here >= CpuSet::MAX_CPU {
                return;
            }
            let Some(mut cores) = self.allowed else { return };
            cores.unset(here);
            if cores.count() == 0 {
                return;
            }
            for &thread in &self.threads {
                // Where that is not allowed they run, as any thread does, wherever the system puts them.
                let _ = sched_setaffinity(Some(thread), &cores);
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    /// The system places threads.
    #[derive(Debug)]
    pub(super) struct Place;

    impl Place {
        pub(super) fn of(_: &rayon::ThreadPool) -> Self {
            Self
        }

        pub(super) fn clear(&self) {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn the_caller_and_each_helper_work_once() {
        let own = Helpers::new(4).unwrap();
        for (own, count) in [(Some(&own), 3), (None, 1), (None, 5)] {
            let runs = AtomicUsize::new(0);
            Helpers::join(own, count, || _ = runs.fetch_add(1, Ordering::Relaxed));
            assert_eq!(runs.into_inner(), count + 1);
        }
    }

    #[test]
    fn a_caller_on_one_of_rayons_threads_is_helped_by_its_siblings() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let names = Mutex::new(Vec::new());
        let note = || names.lock().unwrap().push(std::thread::current().name().map(str::to_owned));
        pool.install(|| Helpers::join(None, 3, note));
        assert_eq!(names.into_inner().unwrap(), [const { None }; 4]);
    }

    #[test]
    fn one_thread_needs_no_helpers() {
        assert!(Helpers::new(0).is_none() && Helpers::new(1).is_none());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn helpers_stay_off_the_core_of_the_caller() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

        let allowed = sched_getaffinity(None).unwrap();
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
        let helpers = Helpers::new(3).unwrap();
        let caller = std::thread::current().id();
        for &core in cores.iter().cycle().take(8) {
            let mut here = CpuSet::new();
            here.set(core);
            sched_setaffinity(None, &here).unwrap();
            let theirs = Mutex::new(Vec::new());
            Helpers::join(Some(&helpers), 2, || {
                if std::thread::current().id() != caller {
                    theirs.lock().unwrap().push(sched_getcpu());
                }
            });
            let theirs = theirs.into_inner().unwrap();
            assert_eq!(theirs.len(), 2);
            assert!(cores.len() == 1 || !theirs.contains(&core), "{theirs:?} beside {core}");
        }
    }
}
