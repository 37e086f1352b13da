//! The `flashcore` command.

#![allow(unsafe_code)] // An allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::ExitCode;

use flashcore_lab::{cli, interrupt};

/// The system's allocator. When memory runs out, the command ends with exit code 2 rather than by a signal.
struct OrEnd;

fn or_end(at: *mut u8, bytes: usize) -> *mut u8 {
    if at.is_null() {
        interrupt::out_of_memory(bytes);
    }
    at
}

// SAFETY: every call is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for OrEnd {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are passed on.
        or_end(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are passed on.
        or_end(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promises are passed on.
        or_end(unsafe { System.realloc(at, layout, size) }, size)
    }
}

#[global_allocator]
static ALLOCATOR: OrEnd = OrEnd;

fn main() -> ExitCode {
    cli::main()
}
