//! Ctrl-C: a command ends within a second, keeps what it has, and leaves no file half-written and no process behind.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use crate::process;

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Whether a command may end the step that it is in.
static MAY_FINISH: AtomicBool = AtomicBool::new(false);

/// Whether a command is past its steps and writes what it found.
static FINISHING: AtomicBool = AtomicBool::new(false);

/// Files that are being written under a temporary name.
static PARTIAL: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Saves the results so far when a command must end in the middle of a step.
type Save = Box<dyn FnOnce() + Send>;

static SAVE: Mutex<Option<Save>> = Mutex::new(None);

/// How long a step may go on after Ctrl-C. An oracle, a simulation or a call could take minutes more.
const GRACE: Duration = Duration::from_millis(600);

/// Handles Ctrl-C from now on. A command ends at once, unless it asks to finish its step.
pub fn install() {
    let handler = || {
        let again = REQUESTED.swap(true, Ordering::SeqCst);
        if again || !MAY_FINISH.load(Ordering::SeqCst) {
            tell("\ninterrupted; no file was left half-written");
            end();
        }
        tell("\nstopping after this step; press Ctrl-C again to stop at once");
        std::thread::spawn(|| {
            std::thread::sleep(GRACE);
            if FINISHING.load(Ordering::SeqCst) {
                return;
            }
            let save = SAVE.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(save) = save {
                save();
            }
            tell("interrupted in the middle of a step, which is lost; what was finished before it is kept");
            end();
        });
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        tell(&format!("note: Ctrl-C will end this at once ({error})"));
    }
}

/// From now on the command finishes its current step on Ctrl-C, if that takes only a moment, and reports. `save` keeps
/// the results so far where the step takes longer.
pub fn finish_steps(save: impl FnOnce() + Send + 'static) {
    *SAVE.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(save));
    MAY_FINISH.store(true, Ordering::SeqCst);
}

/// Says that all steps are done and the results are being written, which Ctrl-C waits for.
pub fn finishing() {
    FINISHING.store(true, Ordering::SeqCst);
}

/// Whether the command was asked to stop.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}

/// Says something on stderr. A closed stderr is no reason to end.
pub fn tell(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Ends the command with exit code 2 from anywhere, together with all processes that it started, and removes partial
/// files.
pub fn end() -> ! {
    process::end_all();
    // Held until the process is gone, so that no new partial file can appear after this.
    let partial = lock_soon(&PARTIAL);
    for path in partial.iter().flat_map(|partial| partial.iter()) {
        let _ = std::fs::remove_file(path);
    }
    exit()
}

/// Locks something that others hold only for a moment; none if this very thread holds it.
pub(crate) fn lock_soon<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    for _ in 0..50 {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(guard)) => return Some(guard.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
    None
}

/// Ends the command because this many bytes could not be allocated. Nothing here allocates.
pub fn out_of_memory(bytes: usize) -> ! {
    let _ = writeln!(
        io::stderr(),
        "error: there is no memory for another {bytes} bytes; choose a smaller problem"
    );
    end()
}

/// Exits without the libraries' exit handlers: CUDA's would wait for the work that is to be ended.
#[cfg(unix)]
#[allow(unsafe_code)]
fn exit() -> ! {
    // SAFETY: it ends the process without running any more of its code, and holders of locks are gone with it.
    unsafe { nix::libc::_exit(2) }
}

#[cfg(not(unix))]
fn exit() -> ! {
    std::process::exit(2)
}

fn partial() -> MutexGuard<'static, Vec<PathBuf>> {
    PARTIAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates a file that goes away if the command is interrupted before [`keep`].
pub fn create_partial(path: &Path) -> io::Result<File> {
    let mut partial = partial();
    let file = OpenOptions::new().write(true).create_new(true).open(path)?;
    partial.push(path.to_path_buf());
    Ok(file)
}

/// Gives a partial file its name.
pub fn keep(path: &Path, name: &Path) -> io::Result<()> {
    let mut partial = partial();
    std::fs::rename(path, name)?;
    partial.retain(|other| other != path);
    Ok(())
}

/// Removes a partial file that will not be finished.
pub fn discard(path: &Path) {
    let mut partial = partial();
    let _ = std::fs::remove_file(path);
    partial.retain(|other| other != path);
}
