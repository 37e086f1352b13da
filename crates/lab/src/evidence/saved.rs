//! A report of `flashcore bench` as it stands in a file, of the CPU and of a GPU alike: as much of it as comparing two
//! runs needs. What a file does not say stays absent.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::evidence::schemas;
use crate::files;

/// The schemas that are read.
const SCHEMAS: [&str; 5] = [
    "flashcore.bench/1",
    schemas::BENCH,
    "flashcore.bench-gpu/1",
    "flashcore.bench-gpu/2",
    schemas::BENCH_GPU,
];

/// A report.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Saved {
    /// One of a benchmark.
    pub schema: String,
    /// When it was written.
    pub created: String,
    /// Whether the command ran to its end.
    pub complete: bool,
    /// Which clock the times are of: `kernel` or `call`.
    pub clock: String,
    /// What calls found in the L2 cache; a GPU's only.
    pub cache: Option<String>,
    /// How long a GPU's samples are; absent in older files, which hold bursts.
    pub regime: Option<String>,
    /// The CPU's path, such as `cpu-avx2`.
    pub device: Option<String>,
    /// Its threads.
    pub threads: Option<usize>,
    /// The GPU, the driver and the versions.
    #[serde(default)]
    pub gpu: Value,
    /// The machine and the binary.
    #[serde(default)]
    pub environment: Value,
    /// What was timed.
    pub cells: Vec<SavedCell>,
}

/// A cell of a report.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct SavedCell {
    /// The shape's name, if it has one.
    pub name: Option<String>,
    /// As BxHxSxD.
    pub shape: String,
    /// The dtype.
    pub dtype: String,
    /// The mask.
    pub mask: String,
    /// The pass, where it is not the forward one.
    #[serde(default)]
    pub pass: Option<String>,
    /// How sequences of lengths of their own lie.
    #[serde(default)]
    pub layout: Option<String>,
    /// Ours first.
    pub results: Vec<SavedResult>,
    /// Why there is no result at all.
    pub failure: Option<String>,
}

/// A contender of a cell.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct SavedResult {
    /// Its name.
    pub name: String,
    /// Microseconds per call, one sample per round.
    pub samples_us: Vec<f64>,
    /// Their median.
    pub p50_us: Option<f64>,
    /// Why it has no result, or left before the end.
    pub failure: Option<String>,
}

impl Saved {
    /// From a report's JSON.
    pub fn of(report: &Value) -> Result<Self, String> {
        let schema = report["schema"].as_str().unwrap_or("none");
        if !SCHEMAS.contains(&schema) {
            return Err(format!(
                "its schema is {schema}; wanted is a report of flashcore bench --json: {}",
                SCHEMAS.join(", ")
            ));
        }
        Self::deserialize(report).map_err(|error| format!("it is no whole report ({error})"))
    }

    /// From a file.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = files::read_text(path)?;
        let report: Value =
            serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        Self::of(&report).map_err(|why| format!("{}: {why}", path.display()))
    }

    /// What it ran on, so that times of different machines are never compared.
    pub fn machine(&self) -> String {
        if let Some(gpu) = self.gpu["ours"]["device"].as_str() {
            return gpu.to_string();
        }
        let model = self.environment["cpu"]["model"].as_str().unwrap_or("an unknown CPU");
        let threads = self.threads.map_or_else(String::new, |threads| format!(", {threads} threads"));
        format!("{} on {model}{threads}", self.device.as_deref().unwrap_or("an unknown device"))
    }
}

impl SavedCell {
    /// As `1x8x512x64 f16 causal`.
    pub fn label(&self) -> String {
        let pass = self.pass.as_ref().map_or_else(String::new, |pass| format!(" {pass}"));
        let layout = self.layout.as_ref().map_or_else(String::new, |layout| format!(" {layout}"));
        format!("{} {} {}{pass}{layout}", self.shape, self.dtype, self.mask)
    }

    /// A contender by name.
    pub fn result(&self, name: &str) -> Option<&SavedResult> {
        self.results.iter().find(|result| result.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_report_of_something_else_is_refused_by_its_schema() {
        let why = Saved::of(&json!({"schema": "flashcore.verify/1"})).unwrap_err();
        assert!(why.contains("flashcore.verify/1") && why.contains("bench --json"), "{why}");
        assert!(Saved::of(&json!({"schema": "flashcore.bench/1"})).unwrap_err().contains("no whole report"));
        assert!(Saved::of(&json!({"schema": "flashcore.bench/9"})).unwrap_err().contains("wanted is"));
    }
}
