//! Results: a line for the reader, a JSON object for the record.

use flashcore_driver::Context;
use serde_json::{Map, Value, json};
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How a check ended when it did not fail; the text says what was seen.
pub enum Seen {
    Pass(String),
    Skip(String),
}

/// Fails a check with a message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+).into());
        }
    };
}
pub(crate) use ensure;

pub struct Report {
    checks: Vec<Value>,
    measures: Map<String, Value>,
    machine: Value,
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Report {
    pub fn new() -> Self {
        Self {
            checks: Vec::new(),
            measures: Map::new(),
            machine: Value::Null,
            passed: 0,
            failed: 0,
            skipped: 0,
        }
    }

    pub fn machine(&mut self, context: &Context) {
        let (driver, p) = (context.driver(), context.properties());
        println!("{} · driver for CUDA {} · symbols: {}", p.name, driver.version(), driver.symbol_source());
        println!("{p:#?}");
        self.machine = json!({
            "library": driver.library().display().to_string(),
            "cuda": driver.version().to_string(),
            "symbols": driver.symbol_source(),
            "gpu": p.name,
            "uuid": p.uuid,
            "pci": p.pci,
            "compute_capability": p.compute_capability.to_string(),
            "sm_count": p.sm_count,
            "max_threads_per_sm": p.max_threads_per_sm,
            "max_blocks_per_sm": p.max_blocks_per_sm,
            "max_threads_per_block": p.max_threads_per_block,
            "registers_per_sm": p.registers_per_sm,
            "shared_per_sm": p.shared_per_sm,
            "shared_per_block": p.shared_per_block,
            "shared_per_block_optin": p.shared_per_block_optin,
            "shared_reserved_per_block": p.shared_reserved_per_block,
            "l2_bytes": p.l2_bytes,
            "memory_bytes": p.memory_bytes,
            "sm_clock_khz": p.sm_clock_khz,
            "memory_clock_khz": p.memory_clock_khz,
            "memory_bus_bits": p.memory_bus_bits,
            "ecc": p.ecc,
            "cluster_launch": p.cluster_launch,
            "memory_pools": p.memory_pools,
            "tensor_maps": p.tensor_maps,
        });
    }

    /// Runs one check and prints its line.
    pub fn check(&mut self, name: &str, work: impl FnOnce() -> Result<Seen>) {
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(work));
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let (word, detail) = match outcome {
            Ok(Ok(Seen::Pass(detail))) => {
                self.passed += 1;
                ("PASS", detail)
            }
            Ok(Ok(Seen::Skip(reason))) => {
                self.skipped += 1;
                ("SKIP", reason)
            }
            Ok(Err(error)) => {
                self.failed += 1;
                ("FAIL", error.to_string())
            }
            Err(_) => {
                self.failed += 1;
                ("FAIL", "it panicked".to_owned())
            }
        };
        println!("{word}  {name}  ({ms:.1} ms)");
        for line in detail.lines() {
            println!("      {line}");
        }
        self.checks.push(json!({ "name": name, "result": word, "detail": detail, "ms": ms }));
    }

    /// Runs a step whose result later checks need.
    pub fn obtain<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Option<T> {
        let mut obtained = None;
        self.check(name, || {
            obtained = Some(work()?);
            Ok(Seen::Pass(String::new()))
        });
        obtained
    }

    /// Keeps a number.
    pub fn measure(&mut self, name: &str, value: f64) {
        println!("      {name} = {value:.1}");
        self.measures.insert(name.to_owned(), json!(value));
    }

    pub fn finish(self, json: Option<&Path>) -> ExitCode {
        println!("\n{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        let object = json!({
            "machine": self.machine,
            "passed": self.passed,
            "failed": self.failed,
            "skipped": self.skipped,
            "checks": self.checks,
            "measures": self.measures,
        });
        if let Some(path) = json {
            let written = serde_json::to_string_pretty(&object)
                .map_err(|e| e.to_string())
                .and_then(|text| std::fs::write(path, text).map_err(|error| error.to_string()));
            match written {
                Ok(()) => println!("written to {}", path.display()),
                Err(error) => {
                    eprintln!("could not write {}: {error}", path.display());
                    return ExitCode::FAILURE;
                }
            }
        }
        if self.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
