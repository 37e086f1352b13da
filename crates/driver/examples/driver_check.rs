//! Checks this crate against a real GPU and its driver, and prints PASS or FAIL for each thing it promises.
//!
//! ```text
//! cargo run --release -p flashcore-driver --example driver_check -- [--gpu N] [--json PATH]
//! ```
//!
//! The exit status is 0 when nothing failed, 1 when something did, 2 when there is no GPU to check. The binary
//! carries its kernels with it and needs nothing but the driver. One check loses a context on purpose, and does
//! so in a process of its own.

#![allow(unsafe_code)] // Launches are unsafe by nature; each kernel here is given buffers that outlive it.
#![allow(missing_docs)] // A program, not a library.

#[path = "driver_check/basics.rs"]
mod basics;
#[path = "driver_check/code.rs"]
mod code;
#[path = "driver_check/faults.rs"]
mod faults;
#[path = "driver_check/graphs.rs"]
mod graphs;
#[path = "driver_check/hopper.rs"]
mod hopper;
#[path = "driver_check/kernels.rs"]
mod kernels;
#[path = "driver_check/report.rs"]
mod report;
#[path = "driver_check/timing.rs"]
mod timing;

use flashcore_driver::{Context, Driver, DriverError};
use kernels::Kernels;
use report::Report;
use std::path::PathBuf;
use std::process::ExitCode;

struct Arguments {
    gpu: usize,
    json: Option<PathBuf>,
    child: bool,
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("{message}\nusage: driver_check [--gpu N] [--json PATH]");
            return ExitCode::from(64);
        }
    };
    if arguments.child {
        return faults::lose_the_context(arguments.gpu);
    }
    let mut report = Report::new();
    let context = match open(arguments.gpu) {
        Ok(context) => context,
        Err(error) => {
            println!("nothing to check: {error}");
            return ExitCode::from(2);
        }
    };
    report.machine(&context);
    check(&mut report, &context, arguments.gpu);
    report.finish(arguments.json.as_deref())
}

fn arguments() -> Result<Arguments, String> {
    let mut parsed = Arguments { gpu: 0, json: None, child: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--gpu" => {
                let number = words.next().ok_or("--gpu needs a number")?;
                parsed.gpu = number.parse().map_err(|_| format!("{number} is not a number"))?;
            }
            "--json" => parsed.json = Some(words.next().ok_or("--json needs a path")?.into()),
            faults::CHILD_FLAG => parsed.child = true,
            other => return Err(format!("unknown argument {other}")),
        }
    }
    Ok(parsed)
}

fn open(gpu: usize) -> Result<Context, DriverError> {
    Driver::load()?.device(gpu)?.context()
}

fn check(report: &mut Report, context: &Context, gpu: usize) {
    basics::check(report, context);
    code::check(report, context);
    let Some(kernels) = report.obtain("the basic kernels load", || Ok(Kernels::load(context)?)) else {
        return;
    };
    basics::check_with_kernels(report, context, &kernels);
    graphs::check(report, context, &kernels);
    hopper::check(report, context, &kernels);
    faults::check(report, context, &kernels, gpu);
    timing::check(report, context, &kernels);
    basics::check_nothing_leaks(report, context);
}
