//! The threads of an OpenMP runtime that the program has loaded, as torch has.
//!
//! Between two calls of such a runtime its threads spin for milliseconds, one on every core, and any other thread gets
//! its share of a core late. So while they do, they are the ones to ask: they begin within a microsecond.
#![allow(unsafe_code)] // Calls a function of another library, whose type is part of its ABI.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::helpers::Guarded;

/// `GOMP_parallel(function, data, num_threads, flags)`, which GNU's, LLVM's and Intel's runtimes all have: every thread of
/// the calling thread's team calls the function, the calling thread among them.
type Parallel = unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, u32, u32);

/// Runs `work` on the calling thread and on up to `count` others of its team; false, and nothing is run, where the program
/// has no OpenMP runtime.
pub(super) fn join(count: usize, work: &(dyn Fn() + Sync)) -> bool {
    let Some(parallel) = parallel() else { return false };
    let team = Team { work: Guarded::new(work), places: AtomicUsize::new(count + 1) };
    // As many threads as the team has: with another number some would end now and begin again for the next owner.
    // SAFETY: the function is what the name promises, and takes the team; it returns when all threads have.
    unsafe { parallel(enter, (&raw const team).cast_mut().cast(), 0, 0) };
    team.work.check();
    true
}

struct Team<'a> {
    work: Guarded<'a>,
    /// How many more may work.
    places: AtomicUsize,
}

unsafe extern "C" fn enter(team: *mut c_void) {
    // SAFETY: `join` passes a team that outlives the call, and threads only share it.
    let team = unsafe { &*team.cast::<Team<'_>>() };
    let take = |places: usize| places.checked_sub(1);
    if team.places.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
        team.work.run();
    }
}

/// The runtime's function. It is looked for each time, because the runtime may come and go.
#[cfg(target_os = "linux")]
fn parallel() -> Option<Parallel> {
    // SAFETY: the name is this function's in every runtime that has it.
    unsafe {
        libloading::os::unix::Library::this().get::<Parallel>(c"GOMP_parallel").ok().map(|found| *found)
    }
}

#[cfg(not(target_os = "linux"))]
fn parallel() -> Option<Parallel> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_team_does_the_work_where_there_is_one() {
        let runs = AtomicUsize::new(0);
        let work = || _ = runs.fetch_add(1, Ordering::Relaxed);
        assert!(!join(3, &work), "no OpenMP runtime has been loaded yet");
        assert_eq!(runs.load(Ordering::Relaxed), 0);
        let flags = libloading::os::unix::RTLD_NOW | libloading::os::unix::RTLD_GLOBAL;
        // SAFETY: the runtime has no more to initialise than any program that uses it.
        let runtime = unsafe { libloading::os::unix::Library::open(Some("libgomp.so.1"), flags) };
        let Ok(runtime) = runtime else {
            eprintln!("skipped: this machine has no libgomp.so.1");
            return;
        };
        // Its threads outlive the test.
        std::mem::forget(runtime);
        for count in [0, 1, 3] {
            runs.store(0, Ordering::Relaxed);
            assert!(join(count, &work));
            assert!((1..=count + 1).contains(&runs.load(Ordering::Relaxed)));
        }
        let panic = std::panic::catch_unwind(|| join(3, &|| panic!("on purpose")));
        assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"on purpose"));
    }
}
