//! Ctrl-C: long commands stop between two steps and keep what they have, and no file is left half-written.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Files that are being written and have not got their name yet.
static PARTIAL: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// What a command does when it is interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// Ends at once.
    End,
    /// Ends the step that it is in and reports; at once if it is asked a second time.
    Finish,
}

/// Handles Ctrl-C (and a polite request to terminate) from now on.
pub fn install(on: On) {
    let handler = move || {
        let again = REQUESTED.swap(true, Ordering::SeqCst);
        if on == On::Finish && !again {
            eprintln!("\nstopping after this step; press Ctrl-C again to stop at once");
            return;
        }
        // Held until the process is gone, so that no new partial file can appear behind this.
        let partial = partial();
        for path in partial.iter() {
            let _ = std::fs::remove_file(path);
        }
        eprintln!("\ninterrupted; nothing was written");
        std::process::exit(2);
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        eprintln!("note: Ctrl-C will end this at once ({error})");
    }
}

/// Whether the command was asked to stop.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
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
