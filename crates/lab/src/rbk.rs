//! `rbk_config.yaml`: a grid of shapes to time, and `rbk_report.json`, `.csv` and `.md` of what came out, with every
//! contender's error beside its time.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use flashcore::{DType, Mask, Pass};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bench::cells::Cell;
use crate::bench::outcome::{Measured, Outcome};
use crate::evidence::saved::Saved;
use crate::rule::Judgement;
use crate::shapes;
use crate::stats::{self, Verdict};

/// The file's fields.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Calls of each contender before the first sample.
    #[serde(default = "default_warmups")]
    pub warmups: u32,
    /// Samples of each contender, one per round.
    #[serde(default = "default_iterations")]
    pub iterations: u32,
    /// Where the reports go; relative to where the command runs.
    #[serde(default = "default_folder")]
    pub output_dir: PathBuf,
    /// Whether to write `rbk_report.json`.
    #[serde(default = "yes")]
    pub save_json: bool,
    /// Whether to write `rbk_report.csv`.
    #[serde(default = "yes")]
    pub save_csv: bool,
    /// Whether to write `rbk_report.md`.
    #[serde(default = "yes")]
    pub save_markdown: bool,
    /// What to time.
    pub shapes: Vec<Wanted>,
}

/// A shape of the grid.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// Its name in the reports.
    pub name: String,
    /// Batch entries.
    pub batch_size: usize,
    /// Heads.
    pub num_heads: usize,
    /// Queries and keys per head.
    pub seq_len: usize,
    /// Elements of a query, a key and a value.
    pub head_dim: usize,
    /// Whether a query sees only keys up to its own position.
    #[serde(default)]
    pub causal: bool,
    /// f16 (float16, fp16), bf16 (bfloat16) or f32 (float32, fp32).
    #[serde(default = "default_dtype")]
    pub dtype: String,
}

fn default_warmups() -> u32 {
    5
}

fn default_iterations() -> u32 {
    30
}

fn default_folder() -> PathBuf {
    ".".into()
}

fn default_dtype() -> String {
    "f16".into()
}

fn yes() -> bool {
    true
}

impl Config {
    /// Reads a file's text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let config: Config = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        if config.shapes.is_empty() {
            return Err("shapes: there is none".into());
        }
        if config.iterations < 5 {
            return Err(format!("iterations: {}; five is the least that has an interval", config.iterations));
        }
        for (i, wanted) in config.shapes.iter().enumerate() {
            wanted.cell().map_err(|why| format!("shapes: {}: {why}", wanted.name))?;
            if config.shapes[..i].iter().any(|other| other.name == wanted.name) {
                return Err(format!("shapes: {} is there twice", wanted.name));
            }
        }
        Ok(config)
    }

    /// What is timed, in the order of the file.
    pub fn cells(&self) -> Vec<Cell> {
        self.shapes.iter().filter_map(|wanted| wanted.cell().ok()).collect()
    }
}

impl Wanted {
    fn cell(&self) -> Result<Cell, String> {
        let Wanted { batch_size, num_heads, seq_len, head_dim, causal, dtype, .. } = self;
        let named = shapes::parse(&format!("{batch_size}x{num_heads}x{seq_len}x{head_dim}"))?;
        let dtype: DType = dtype.parse().map_err(|error: flashcore::Error| error.to_string())?;
        let mask = if *causal { Mask::Causal } else { Mask::None };
        Ok(Cell {
            name: "",
            shape: named.shape,
            mask,
            types: dtype.into(),
            pass: Pass::Forward.into(),
            sequences: None,
        })
    }
}

/// One contender on one shape. What was not measured is absent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The shape, as the file has it.
    #[serde(flatten)]
    pub shape: Wanted,
    /// The contender.
    pub contender: String,
    /// Whether its output obeys the rule.
    pub correct: Option<bool>,
    /// Its largest error against the oracle.
    pub max_error: Option<f64>,
    /// What the rule allows.
    pub max_error_allowed: Option<f64>,
    /// Its root mean square error.
    pub rms_error: Option<f64>,
    /// How many samples.
    pub samples: usize,
    /// Microseconds per call.
    pub samples_us: Vec<f64>,
    /// Their mean.
    pub mean_us: Option<f64>,
    /// Their standard deviation.
    pub std_us: Option<f64>,
    /// Their median.
    pub p50_us: Option<f64>,
    /// The lower end of its 95 % interval.
    pub p50_low_us: Option<f64>,
    /// The upper end.
    pub p50_high_us: Option<f64>,
    /// Their 90 % quantile.
    pub p90_us: Option<f64>,
    /// Their minimum.
    pub min_us: Option<f64>,
    /// Floating-point operations per second by the median, causal counted half, in units of 1e12.
    pub tflops: Option<f64>,
    /// This contender's median over ours: how many times faster ours is. Absent for ours.
    pub flashcore_speedup: Option<f64>,
    /// The verdict on ours against it.
    pub verdict: Option<Verdict>,
    /// Why it has no result.
    pub failure: Option<String>,
}

/// The columns of `rbk_report.csv`.
const COLUMNS: [&str; 24] = [
    "name",
    "batch_size",
    "num_heads",
    "seq_len",
    "head_dim",
    "causal",
    "dtype",
    "contender",
    "correct",
    "max_error",
    "max_error_allowed",
    "rms_error",
    "samples",
    "mean_us",
    "std_us",
    "p50_us",
    "p50_low_us",
    "p50_high_us",
    "p90_us",
    "min_us",
    "tflops",
    "flashcore_speedup",
    "verdict",
    "failure",
];

/// The content of `rbk_report.json` apart from its environment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// What was asked for.
    pub config: Config,
    /// What it ran on.
    pub machine: String,
    /// Which clock the times are of.
    pub clock: String,
    /// What calls found in the L2 cache; a GPU's only.
    pub cache: Option<String>,
    /// Every contender on every shape.
    pub results: Vec<Row>,
}

impl Report {
    /// From a run of the config's cells, which has them in the order of the file.
    pub fn new(config: &Config, run: &Saved, outcomes: &[Outcome]) -> Result<Self, String> {
        let mut results = Vec::new();
        for (wanted, outcome) in config.shapes.iter().zip(outcomes) {
            let (meant, timed) = (wanted.cell()?.label(), outcome.label());
            if meant != timed {
                return Err(format!("{}: {meant} was asked for, and {timed} was timed", wanted.name));
            }
            results.extend(outcome.results.iter().map(|result| row(wanted, outcome, result)));
        }
        Ok(Self {
            config: config.clone(),
            machine: run.machine(),
            clock: run.clock.clone(),
            cache: run.cache.clone(),
            results,
        })
    }

    /// As comma-separated values; what is absent is empty.
    pub fn csv(&self) -> String {
        let mut text = COLUMNS.join(",") + "\n";
        for row in &self.results {
            let row = serde_json::to_value(row).unwrap_or_default();
            let field = |column: &&str| match &row[column] {
                Value::Null => String::new(),
                Value::String(text) => quoted(text),
                other => other.as_f64().map_or_else(|| other.to_string(), |number| number.to_string()),
            };
            text += &(COLUMNS.iter().map(field).collect::<Vec<_>>().join(",") + "\n");
        }
        text
    }

    /// As Markdown.
    pub fn markdown(&self) -> String {
        let Config { warmups, iterations, .. } = self.config;
        let cache = self.cache.as_ref().map_or_else(String::new, |cache| format!(", {cache} L2 cache"));
        let mut text = format!(
            "# Attention on {}\n\n{} clock{cache}, {iterations} samples after {warmups} warm-ups, times in \
             microseconds, causal counted half.\n\n\
             | shape | contender | correct | max error (allowed) | p50 [95 %] | p90 | min | TFLOP/s | FlashCore against it |\n\
             |---|---|---|---|---:|---:|---:|---:|---|\n",
            self.machine, self.clock
        );
        let number =
            |x: Option<f64>, digits: usize| x.map_or_else(|| "–".into(), |x| format!("{x:.digits$}"));
        let error = |x: Option<f64>| x.map_or_else(|| "–".into(), |x| format!("{x:.1e}"));
        for row in &self.results {
            let Wanted { name, batch_size, num_heads, seq_len, head_dim, causal, dtype } = &row.shape;
            let mask = if *causal { " causal" } else { "" };
            let correct = match (row.correct, &row.failure) {
                (Some(true), _) => "yes".into(),
                (Some(false), _) => "**NO**".into(),
                (None, Some(why)) => why.replace('|', "\\|").replace('\n', " "),
                (None, None) => "not judged".into(),
            };
            let against = match (row.flashcore_speedup, row.verdict) {
                (Some(ratio), Some(verdict)) => format!("{ratio:.2}x {verdict}"),
                _ => String::new(),
            };
            let _ = writeln!(
                text,
                "| {name} ({batch_size}, {num_heads}, {seq_len}, {head_dim}) {dtype}{mask} | {} | {correct} | {} ({}) | \
                 {} [{}, {}] | {} | {} | {} | {against} |",
                row.contender,
                error(row.max_error),
                error(row.max_error_allowed),
                number(row.p50_us, 2),
                number(row.p50_low_us, 2),
                number(row.p50_high_us, 2),
                number(row.p90_us, 2),
                number(row.min_us, 2),
                number(row.tflops, 2),
            );
        }
        text
    }
}

fn row(wanted: &Wanted, outcome: &Outcome, result: &Measured) -> Row {
    let samples = &result.samples_us;
    let mean = (!samples.is_empty()).then(|| samples.iter().sum::<f64>() / samples.len() as f64);
    let std = mean.filter(|_| samples.len() > 1).map(|mean| {
        let squares: f64 = samples.iter().map(|x| (x - mean) * (x - mean)).sum();
        (squares / (samples.len() - 1) as f64).sqrt()
    });
    let against = outcome.comparisons.iter().find(|comparison| comparison.peer == result.name);
    Row {
        shape: wanted.clone(),
        contender: result.name.clone(),
        correct: result.error.as_ref().map(Judgement::passed),
        max_error: result.error.as_ref().map(|error| error.max().error),
        max_error_allowed: result.error.as_ref().map(|error| error.max().allowed),
        rms_error: result.error.as_ref().map(|error| error.rms().error),
        samples: samples.len(),
        samples_us: samples.clone(),
        mean_us: mean,
        std_us: std,
        p50_us: stats::median(samples),
        p50_low_us: result.median_interval_us.map(|interval| interval.low),
        p50_high_us: result.median_interval_us.map(|interval| interval.high),
        p90_us: stats::quantile(samples, 0.9),
        min_us: stats::quantile(samples, 0.0),
        tflops: stats::median(samples).map(|us| outcome.flops / us / 1e6),
        flashcore_speedup: against.map(|comparison| comparison.speed_up),
        verdict: against.map(|comparison| comparison.verdict),
        failure: result.failure.clone(),
    }
}

/// A field of a CSV file, quoted where it must be.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.into()
    }
}

/// Where the report with this file extension goes.
pub fn path(config: &Config, ending: &str) -> PathBuf {
    Path::new(&config.output_dir).join(format!("rbk_report.{ending}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::outcome::{Conditions, GpuConditions, Limits};
    use crate::rule::Bound;
    use crate::timing::Samples;
    use serde_json::json;

    const TEXT: &str = "
warmups: 3
iterations: 7
output_dir: out
save_markdown: false
shapes:
  - { name: mission, batch_size: 1, num_heads: 8, seq_len: 512, head_dim: 64, causal: false, dtype: float16 }
  - { name: tail, batch_size: 2, num_heads: 4, seq_len: 97, head_dim: 128, causal: true, dtype: bf16 }
";

    #[test]
    fn the_fields_of_the_file_are_read_and_dtypes_go_by_their_usual_names() {
        let config = Config::parse(TEXT).unwrap();
        assert_eq!((config.warmups, config.iterations, config.save_csv), (3, 7, true));
        assert!(!config.save_markdown);
        let labels: Vec<String> = config.cells().iter().map(Cell::label).collect();
        assert_eq!(labels, ["1x8x512x64 f16 full", "2x4x97x128 bf16 causal"]);
    }

    #[test]
    fn a_mistake_in_the_file_is_named() {
        for (from, to, word) in [
            ("warmups", "warmupps", "warmupps"),
            ("float16", "float17", "mission"),
            ("head_dim: 128", "head_dim: 0", "tail"),
            ("name: tail", "name: mission", "twice"),
            ("iterations: 7", "iterations: 2", "five"),
        ] {
            let why = Config::parse(&TEXT.replace(from, to)).unwrap_err();
            assert!(why.contains(word), "{why}");
        }
        assert!(Config::parse("shapes: []").is_err());
    }

    /// A run of two cells, the first of some shape: ours has times, and flash none.
    fn report(shape: &str) -> Result<Report, String> {
        let outcome = |shape: &str, mask: Mask, dtype: DType| {
            let shape = shapes::parse(shape).unwrap().shape;
            let cell = Cell {
                name: "",
                shape,
                mask,
                types: dtype.into(),
                pass: Pass::Forward.into(),
                sequences: None,
            };
            let limits = Limits::Gpu { peak_tflops: None, matmul_tflops: None };
            let bound = |error: f64| Bound { error, plain: error, allowed: 2.0 * error };
            let right = Judgement::forward(1, [1e-4, 1e-5, 1e-4].map(bound), None);
            let times = vec![5.0, 4.0, 6.0, 5.0, 5.0, 5.0, 5.0];
            let ours = Samples { name: "flashcore".into(), calls: 1, times, ..Samples::default() };
            let why = Some("OutOfMemoryError: 3 GiB, \"sorry\"".into());
            let flash = Samples { name: "flash".into(), failure: why, ..Samples::default() };
            let measured = |(samples, error)| Measured::new(samples, error, &cell.work(), &limits, None);
            let results = [(ours, Some(right)), (flash, None)].map(measured).into();
            Outcome::new(&cell, 1, results, Conditions::Gpu(GpuConditions::default()), 0.02)
        };
        let outcomes =
            [outcome(shape, Mask::None, DType::F16), outcome("2x4x97x128", Mask::Causal, DType::BF16)];
        let run = json!({
            "schema": "flashcore.bench-gpu/3", "created": "now", "complete": true, "clock": "kernel", "cache": "cold",
            "gpu": {"ours": {"device": "NVIDIA H200"}}, "environment": {}, "cells": [],
        });
        Report::new(&Config::parse(TEXT).unwrap(), &Saved::of(&run).unwrap(), &outcomes)
    }

    #[test]
    fn tables_hold_what_was_measured_and_nothing_where_nothing_was() {
        let report = report("1x8x512x64").unwrap();
        assert_eq!(report.results.len(), 4);
        let [ours, flash] = &report.results[..2] else { panic!() };
        assert_eq!((ours.correct, ours.p50_us, ours.min_us), (Some(true), Some(5.0), Some(4.0)));
        assert!((ours.tflops.unwrap() - 107.374_182_4).abs() < 1e-6);
        assert_eq!((flash.correct, flash.p50_us, flash.mean_us, flash.tflops), (None, None, None, None));
        let csv = report.csv();
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(
            lines[1].starts_with("mission,1,8,512,64,false,float16,flashcore,true,0.0001,0.0002,"),
            "{csv}"
        );
        assert!(lines[2].ends_with(",0,,,,,,,,,,,\"OutOfMemoryError: 3 GiB, \"\"sorry\"\"\""), "{csv}");
        assert_eq!(lines[0].split(',').count(), lines[1].split(',').count());
        let markdown = report.markdown();
        assert!(markdown.contains("| 5.00 [") && markdown.contains("– [–, –]"), "{markdown}");
    }

    #[test]
    fn a_time_of_another_shape_is_not_written_under_this_ones_name() {
        let why = report("4x8x512x64").unwrap_err();
        assert!(why.contains("mission") && why.contains("was timed"), "{why}");
    }
}
