//! The fake driver (`fake_libcuda.c`), built here by the system's C compiler and loaded like the real one. Tests of
//! other crates use parts of it too.
#![allow(dead_code)]

use flashcore_driver::{Context, Driver, DriverError};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use tempfile::TempDir;

/// Makes the fake keep the name of every driver function that is called, for [`Fake::calls`].
pub const COUNT_CALLS: &[&str] = &["-DCOUNT_CALLS", "-finstrument-functions"];

/// One private copy of the fake driver: tests run side by side, and each has its own state.
pub struct Fake {
    pub driver: &'static Driver,
    control: libloading::Library,
    // The library stays mapped after the file is gone.
    _directory: TempDir,
}

/// A private copy of the fake, built with these -D flags; `None`, with a reason printed, without a C compiler.
pub fn fake_library(flags: &[&str]) -> Option<(TempDir, PathBuf)> {
    // One compilation for all tests that use the same flags.
    static BUILT: Mutex<BTreeMap<String, Option<Vec<u8>>>> = Mutex::new(BTreeMap::new());
    let image = BUILT.lock().unwrap().entry(flags.join(" ")).or_insert_with(|| compile(flags)).clone()?;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let library = directory.path().join("libcuda_fake.so");
    std::fs::write(&library, image).expect("room for the library");
    Some((directory, library))
}

fn compile(flags: &[&str]) -> Option<Vec<u8>> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let library = directory.path().join("libcuda_fake.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../driver/tests/fake_libcuda.c");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let run = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .arg(&library)
        .args(flags)
        .arg(source)
        .output();
    match run {
        Err(error) => {
            println!("skipped: no C compiler to build the fake driver with ({compiler}: {error})");
            None
        }
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(std::fs::read(&library).expect("the library just built"))
        }
    }
}

impl Fake {
    pub fn start(flags: &[&str]) -> Option<Self> {
        let (directory, library) = fake_library(flags)?;
        // SAFETY: the fake declares its functions as the real driver does.
        let (driver, control) = unsafe {
            let driver = Driver::load_from(&library).expect("the fake driver loads");
            (driver, libloading::Library::new(&library).expect("it is loaded already"))
        };
        Some(Self { driver, control, _directory: directory })
    }

    pub fn context(&self) -> Context {
        self.driver.device(0).unwrap().context().unwrap()
    }

    pub fn call<T>(&self, name: &str) -> T {
        // SAFETY: every control function without arguments has the type that its caller asks for.
        unsafe { self.control.get::<extern "C" fn() -> T>(name).unwrap()() }
    }

    /// What the driver was asked for since the last time, without pushes and pops of contexts.
    pub fn record(&self) -> Vec<String> {
        self.raw_record().into_iter().filter(|line| line != "push" && line != "pop").collect()
    }

    pub fn raw_record(&self) -> Vec<String> {
        // SAFETY: the record is a NUL-terminated static buffer.
        let text = unsafe { CStr::from_ptr(self.call::<*const c_char>("fake_record")) };
        let lines = text.to_string_lossy().lines().map(str::to_owned).collect();
        self.call::<()>("fake_clear");
        lines
    }

    /// Makes the next call of a function fail, by its exported name, or by a prefix and a `*`.
    pub fn fail(&self, function: &str, status: c_int) {
        let name = CString::new(function).unwrap();
        // SAFETY: the control function has this signature.
        unsafe {
            let fail = self.control.get::<extern "C" fn(*const c_char, c_int)>("fake_fail").unwrap();
            fail(name.as_ptr(), status);
        }
    }

    /// The driver functions called since the last time, by their exported names; needs [`COUNT_CALLS`].
    pub fn calls(&self) -> Vec<String> {
        // SAFETY: the list is a NUL-terminated static buffer.
        let text = unsafe { CStr::from_ptr(self.call::<*const c_char>("fake_calls")) };
        let names = text.to_string_lossy().lines().map(str::to_owned).collect();
        self.call::<()>("fake_clear_calls");
        names
    }

    pub fn live(&self) -> c_int {
        self.call("fake_live")
    }
}

pub fn load_error(flags: &[&str]) -> Option<DriverError> {
    let (_directory, library) = fake_library(flags)?;
    // SAFETY: the fake declares its functions as the real driver does.
    Some(unsafe { Driver::load_from(&library) }.expect_err("this library must be refused"))
}

/// A folder with the fake under the name of the system's driver, for `LD_LIBRARY_PATH` of another process.
pub fn as_system_driver(flags: &[&str]) -> Option<TempDir> {
    let (directory, library) = fake_library(flags)?;
    std::fs::rename(library, directory.path().join("libcuda.so.1")).expect("room for the library");
    Some(directory)
}
