//! Threads that help a caller, and are kept off the core that it runs on.
//!
//! A helper that is late costs nothing: the caller waits only for those that have begun, so that a call ends with its
//! work even where other threads hold the cores. A helper that comes wakes two more, so that many are awake as soon as
//! few would be, and the caller loses no time with it.
//!
//! The system may wake a thread on the core of whoever woke it although another one is idle; inside a virtual machine
//! it was seen to do so often. Two threads then share a core for milliseconds, which is all that
//! a short call takes.
#![allow(unsafe_code)] // Helpers run a closure that the caller's stack holds; the caller outlasts them.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use super::openmp;

/// How long a caller that has nothing left to do looks out for its helpers before it sleeps.
const PATIENCE: Duration = Duration::from_micros(200);
/// How long a helper that has nothing left to do looks out for the next call: waking it up would take a good part of that.
const LOOKOUT: Duration = Duration::from_micros(100);
/// How many others a caller, and each helper that comes, wakes.
const WAKES: usize = 2;

/// Threads beside the caller's.
#[derive(Debug)]
pub(super) struct Helpers {
    crew: Arc<Crew>,
    place: Place,
}

impl Helpers {
    /// For calls on `threads` threads, the caller among them; none where that is the caller alone, or where the system has
    /// no threads to give.
    pub(super) fn new(threads: usize) -> Option<Self> {
        let count = threads.checked_sub(1).filter(|&count| count > 0)?;
        let crew = Arc::<Crew>::default();
        let (tell, told) = mpsc::channel();
        for index in 0..count {
            let (mine, tell) = (Arc::clone(&crew), tell.clone());
            let serve = move || {
                // Nobody listens any more where a later thread could not be started.
                let _ = tell.send(Place::here());
                mine.serve();
            };
            if thread::Builder::new().name(format!("flashcore-{index}")).spawn(serve).is_err() {
                crew.dismiss();
                return None;
            }
        }
        Some(Self { crew, place: Place::of(told.iter().take(count).collect()) })
    }

    /// Those that all engines share, for as many threads as rayon has.
    fn shared() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Helpers>> = OnceLock::new();
        SHARED.get_or_init(|| Self::new(rayon::current_num_threads())).as_ref()
    }

    /// Runs `work` on the calling thread and on up to `count` others, and returns when all that have begun have ended: the
    /// work must be done when one of them has nothing left to do.
    pub(super) fn join(of: Source<'_>, count: usize, work: impl Fn() + Sync) {
        let helpers = match of {
            // These are as many as there are cores.
            Source::Any | Source::OpenMp if rayon::current_thread_index().is_some() => None,
            Source::OpenMp if openmp::join(count, &work) => return,
            Source::Any | Source::OpenMp => Self::shared(),
            Source::Own(own) => Some(own),
        };
        let Some(helpers) = helpers else {
            return rayon::in_place_scope(|scope| {
                for _ in 0..count {
                    scope.spawn(|_| work());
                }
                work();
            });
        };
        helpers.place.clear();
        let shift = helpers.crew.begin(count, &work);
        work();
        drop(shift);
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.crew.dismiss();
    }
}

/// Whose threads help a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source<'a> {
    /// Those that all engines share, or, on one of rayon's threads, that thread's siblings.
    Any,
    /// The calling thread's OpenMP team, where the program has such a runtime; else any.
    OpenMp,
    Own(&'a Helpers),
}

/// Work that may panic on any thread, which the caller then does too.
pub(super) struct Guarded<'a> {
    work: &'a (dyn Fn() + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl<'a> Guarded<'a> {
    pub(super) fn new(work: &'a (dyn Fn() + Sync)) -> Self {
        Self { work, panic: Mutex::new(None) }
    }

    pub(super) fn run(&self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(self.work)) {
            *lock(&self.panic) = Some(panic);
        }
    }

    /// Panics if the work did.
    pub(super) fn check(&self) {
        if let Some(panic) = lock(&self.panic).take() {
            resume_unwind(panic);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a caller and its helpers share.
struct Shift {
    work: Guarded<'static>,
    /// How many more may come; changed by those who hold the crew.
    wanted: AtomicUsize,
    /// How many are at work; raised by those who hold the crew.
    inside: AtomicUsize,
    caller: Thread,
}

/// Helpers and the calls that want them.
#[derive(Default)]
struct Crew {
    state: Mutex<State>,
    /// How many calls there have been.
    calls: AtomicUsize,
}

#[derive(Default)]
struct State {
    shifts: Vec<Arc<Shift>>,
    asleep: Vec<Thread>,
    dismissed: bool,
}

impl Crew {
    /// Lets up to `count` helpers begin with `work`, until what is returned is dropped.
    fn begin<'a>(&'a self, count: usize, work: &'a (dyn Fn() + Sync)) -> Open<'a> {
        // SAFETY: a helper begins only while the shift is listed. Dropping `Open` takes it off the list and waits for those
        // who have begun; it borrows the work until then. Nobody forgets it: it is a local of `Helpers::join`.
        let work = unsafe { std::mem::transmute::<&'a (dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(work) };
        let shift = Arc::new(Shift {
            work: Guarded::new(work),
            wanted: AtomicUsize::new(count),
            inside: AtomicUsize::new(0),
            caller: thread::current(),
        });
        let mut state = lock(&self.state);
        state.shifts.push(Arc::clone(&shift));
        self.calls.fetch_add(1, Ordering::Relaxed);
        wake(state, count);
        Open { crew: self, shift }
    }

    /// What a helper does all its life.
    fn serve(&self) {
        while let Some(shift) = self.next_shift() {
            shift.work.run();
            let calls = self.calls.load(Ordering::Relaxed);
            if shift.inside.fetch_sub(1, Ordering::Release) == 1 {
                shift.caller.unpark();
            }
            drop(shift);
            wait(LOOKOUT, || self.calls.load(Ordering::Relaxed) == calls);
        }
    }

    /// Begins with a call's work, after sleeping until there is one; none when the crew is dismissed.
    fn next_shift(&self) -> Option<Arc<Shift>> {
        let mut state = lock(&self.state);
        loop {
            if state.dismissed {
                return None;
            }
            let wanted = |shift: &&Arc<Shift>| shift.wanted.load(Ordering::Relaxed) > 0;
            if let Some(shift) = state.shifts.iter().find(wanted).cloned() {
                let left = shift.wanted.fetch_sub(1, Ordering::Relaxed) - 1;
                shift.inside.fetch_add(1, Ordering::Relaxed);
                wake(state, left);
                return Some(shift);
            }
            let me = thread::current();
            state.asleep.push(me.clone());
            drop(state);
            thread::park();
            state = lock(&self.state);
            // Still there if nobody meant it.
            state.asleep.retain(|other| other.id() != me.id());
        }
    }

    fn dismiss(&self) {
        let mut state = lock(&self.state);
        state.dismissed = true;
        let asleep = std::mem::take(&mut state.asleep);
        drop(state);
        asleep.iter().for_each(Thread::unpark);
    }
}

impl std::fmt::Debug for Crew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Crew").field("calls", &self.calls).finish_non_exhaustive()
    }
}

/// Wakes some of the helpers that sleep, where `wanted` are; each of them will wake others.
fn wake(mut state: MutexGuard<'_, State>, wanted: usize) {
    let mut woken = [const { None }; WAKES];
    for thread in woken.iter_mut().take(wanted) {
        *thread = state.asleep.pop();
    }
    // A thread that is woken wants the lock.
    drop(state);
    woken.iter().flatten().for_each(Thread::unpark);
}

/// A call that helpers may join; when dropped, none may any more, and those that did have ended.
struct Open<'a> {
    crew: &'a Crew,
    shift: Arc<Shift>,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        lock(&self.crew.state).shifts.retain(|shift| !Arc::ptr_eq(shift, &self.shift));
        let busy = || self.shift.inside.load(Ordering::Acquire) > 0;
        // Waking up costs as much as many a task that a helper is at.
        wait(PATIENCE, busy);
        while busy() {
            thread::park();
        }
        if !thread::panicking() {
            self.shift.work.check();
        }
    }
}

/// Looks out, so long at most, until there is no reason to wait any more.
fn wait(most: Duration, there_is_reason: impl Fn() -> bool) {
    let start = Instant::now();
    while there_is_reason() && start.elapsed() < most {
        std::hint::spin_loop();
    }
}

#[cfg(not(target_os = "linux"))]
use elsewhere::Place;
#[cfg(target_os = "linux")]
use linux::Place;

#[cfg(target_os = "linux")]
mod linux {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

    /// Where some threads may run: wherever they might when they began, but for one core.
    #[derive(Debug)]
    pub(super) struct Place {
        threads: Vec<Pid>,
        allowed: Option<CpuSet>,
        /// The core that is kept free.
        free: AtomicUsize,
    }

    impl Place {
        /// The calling thread, as [`of`](Self::of) takes it.
        pub(super) fn here() -> Pid {
            gettid()
        }

        pub(super) fn of(threads: Vec<Pid>) -> Self {
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
        pub(super) fn here() {}

        pub(super) fn of(_: Vec<()>) -> Self {
            Self
        }

        pub(super) fn clear(&self) {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn the_caller_and_each_helper_work_once() {
        let own = Helpers::new(4).unwrap();
        for count in [1, 3, 1] {
            let (runs, all) = (AtomicUsize::new(0), Barrier::new(count + 1));
            Helpers::join(Source::Own(&own), count, || {
                runs.fetch_add(1, Ordering::Relaxed);
                // So that nobody is late.
                all.wait();
            });
            assert_eq!(runs.into_inner(), count + 1);
        }
    }

    #[test]
    fn calls_at_the_same_time_share_the_helpers() {
        let own = Helpers::new(4).unwrap();
        let all = Barrier::new(5);
        // Two callers, of which one wants more helpers than are left.
        thread::scope(|scope| {
            scope.spawn(|| Helpers::join(Source::Own(&own), 1, || _ = all.wait()));
            scope.spawn(|| Helpers::join(Source::Own(&own), 2, || _ = all.wait()));
        });
    }

    #[test]
    fn nobody_waits_for_a_helper_that_has_not_come() {
        let own = Helpers::new(3).unwrap();
        let (held, free) = (Barrier::new(4), Barrier::new(4));
        thread::scope(|scope| {
            // Holds both helpers.
            scope.spawn(|| {
                Helpers::join(Source::Own(&own), 2, || {
                    held.wait();
                    free.wait();
                });
            });
            held.wait();
            let runs = AtomicUsize::new(0);
            Helpers::join(Source::Own(&own), 2, || _ = runs.fetch_add(1, Ordering::Relaxed));
            assert_eq!(runs.into_inner(), 1);
            free.wait();
        });
    }

    #[test]
    fn a_panic_of_a_helper_reaches_the_caller_and_the_helper_lives_on() {
        let own = Helpers::new(2).unwrap();
        let caller = thread::current().id();
        for _ in 0..2 {
            let both = Barrier::new(2);
            let join = || {
                Helpers::join(Source::Own(&own), 1, || {
                    both.wait();
                    assert!(thread::current().id() == caller, "on purpose");
                });
            };
            let panic = catch_unwind(AssertUnwindSafe(join)).unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&"on purpose"));
        }
    }

    #[test]
    fn a_caller_on_one_of_rayons_threads_is_helped_by_its_siblings() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let names = Mutex::new(Vec::new());
        let note = || names.lock().unwrap().push(thread::current().name().map(str::to_owned));
        pool.install(|| Helpers::join(Source::Any, 3, note));
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
        let caller = thread::current().id();
        for &core in cores.iter().cycle().take(8) {
            let mut here = CpuSet::new();
            here.set(core);
            sched_setaffinity(None, &here).unwrap();
            let (theirs, all) = (Mutex::new(Vec::new()), Barrier::new(3));
            Helpers::join(Source::Own(&helpers), 2, || {
                if thread::current().id() != caller {
                    theirs.lock().unwrap().push(sched_getcpu());
                }
                all.wait();
            });
            let theirs = theirs.into_inner().unwrap();
            assert_eq!(theirs.len(), 2);
            assert!(cores.len() == 1 || !theirs.contains(&core), "{theirs:?} beside {core}");
        }
    }
}
