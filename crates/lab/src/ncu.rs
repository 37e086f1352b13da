//! Nsight Compute: which metrics are asked for on which GPU, how its answer is read, and what bounds a kernel.
//!
//! A metric that the GPU does not have, or that was not answered, is absent, never 0.

use std::path::PathBuf;
use std::process::Command;

use serde::Serialize;

use crate::process::Group;

/// The variable that names ncu.
pub const NCU_VARIABLE: &str = "FLASHCORE_NCU";

/// A figure and the metrics that may give it; the first that a GPU has is taken.
struct Metric {
    figure: &'static str,
    names: &'static [&'static str],
}

const fn metric(figure: &'static str, names: &'static [&'static str]) -> Metric {
    Metric { figure, names }
}

/// The figures that are asked for. GPU generations name the tensor cores' pipe differently, so some figures have
/// several metrics.
const METRICS: [Metric; 20] = [
    metric("duration_ns", &["gpu__time_duration.sum"]),
    metric("sm_percent", &["sm__throughput.avg.pct_of_peak_sustained_elapsed"]),
    metric("memory_percent", &["gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"]),
    metric(
        "tensor_percent",
        &[
            "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
            "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        ],
    ),
    metric("dram_percent", &["dram__throughput.avg.pct_of_peak_sustained_elapsed"]),
    metric("l2_percent", &["lts__t_sectors.avg.pct_of_peak_sustained_elapsed"]),
    metric("l2_hit_percent", &["lts__t_sector_hit_rate.pct"]),
    metric(
        "shared_percent",
        &["l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed"],
    ),
    metric("issue_percent", &["smsp__issue_active.avg.pct_of_peak_sustained_active"]),
    metric("function_percent", &["sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"]),
    metric("occupancy_percent", &["sm__warps_active.avg.pct_of_peak_sustained_active"]),
    metric("registers", &["launch__registers_per_thread"]),
    metric("bank_conflicts", &["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"]),
    metric("spill_sectors", &["l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum"]),
    metric(
        "stall_long_scoreboard",
        &["smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"],
    ),
    metric(
        "stall_short_scoreboard",
        &["smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio"],
    ),
    metric("stall_barrier", &["smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"]),
    metric(
        "stall_math_throttle",
        &["smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio"],
    ),
    metric("stall_wait", &["smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"]),
    metric("stall_gmma", &["smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio"]),
];

/// The names of the figures, each with the metrics that may give it.
pub(crate) fn figures() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    METRICS.iter().map(|metric| (metric.figure, metric.names))
}

/// The chip's name for ncu.
fn chip(capability: &str) -> Option<&'static str> {
    match capability {
        "8.0" => Some("ga100"),
        "8.6" => Some("ga102"),
        "8.9" => Some("ad102"),
        "9.0" => Some("gh100"),
        _ => None,
    }
}

/// A figure of ncu.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Its name here.
    pub name: &'static str,
    /// The metric that it is, where the GPU has one.
    pub metric: Option<&'static str>,
    /// What ncu said; absent where it said nothing.
    pub value: Option<f64>,
}

/// An ncu that was found.
pub struct Ncu {
    path: PathBuf,
}

impl Ncu {
    /// `$FLASHCORE_NCU`, else ncu in PATH, else in a CUDA toolkit.
    pub fn find() -> Result<Self, String> {
        if let Some(path) = std::env::var_os(NCU_VARIABLE).filter(|path| !path.is_empty()) {
            let path = PathBuf::from(path);
            let missing = format!("{NCU_VARIABLE} is {}, which is not a file", path.display());
            return if path.is_file() { Ok(Self { path }) } else { Err(missing) };
        }
        let paths = std::env::var_os("PATH").map(|paths| std::env::split_paths(&paths).collect::<Vec<_>>());
        let toolkit = PathBuf::from("/usr/local/cuda/bin");
        let found = paths.unwrap_or_default().into_iter().chain([toolkit]).map(|folder| folder.join("ncu"));
        found
            .into_iter()
            .find(|path| path.is_file())
            .map(|path| Self { path })
            .ok_or_else(|| format!("ncu was not found: set {NCU_VARIABLE} to it, or put it in PATH"))
    }

    /// The metrics of a GPU that figures are taken from.
    fn available(&self, capability: &str) -> Result<Vec<Option<&'static str>>, String> {
        let chip = chip(capability).ok_or_else(|| format!("no metrics are known for {capability}"))?;
        let said = self.run(&["--query-metrics", "--chip", chip])?;
        Ok(METRICS.iter().map(|metric| choose(metric.names, &said)).collect())
    }

    /// Profiles one launch of a kernel that a command makes.
    pub fn profile(&self, capability: &str, kernel: &str, command: &[String]) -> Result<Vec<Figure>, String> {
        let metrics = self.available(capability)?;
        let asked: Vec<&str> = metrics.iter().flatten().copied().collect();
        let asked = asked.join(",");
        let fixed = [
            "--clock-control",
            "none",
            "--target-processes",
            "all",
            "--csv",
            "--page",
            "raw",
            "--kernel-name",
            kernel,
            "--launch-skip",
            "2",
            "--launch-count",
            "1",
            "--metrics",
            &asked,
        ];
        let arguments: Vec<&str> = fixed.into_iter().chain(command.iter().map(String::as_str)).collect();
        let said = self.run(&arguments)?;
        if said.contains("ERR_NVGPUCTRPERM") {
            return Err("the driver refuses its counters to this user (ERR_NVGPUCTRPERM)".into());
        }
        let rows = read_raw(&said).ok_or("ncu answered without a table of metrics: an empty profile")?;
        let figure = |(metric, name): (&Metric, Option<&'static str>)| Figure {
            name: metric.figure,
            metric: name,
            value: name.and_then(|name| rows.iter().find(|(of, _)| of == name)).and_then(|(_, value)| *value),
        };
        let figures: Vec<Figure> = METRICS.iter().zip(metrics).map(figure).collect();
        if figures.iter().all(|figure| figure.value.is_none()) {
            return Err("ncu answered no metric: an empty profile".into());
        }
        Ok(figures)
    }

    fn run(&self, arguments: &[&str]) -> Result<String, String> {
        let output = Group::output(Command::new(&self.path).args(arguments))
            .map_err(|error| format!("{} does not start: {error}", self.path.display()))?;
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        if output.status.success() || said.contains("ERR_NVGPUCTRPERM") {
            return Ok(said);
        }
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing").to_string();
        Err(format!("ncu failed ({}): {last}", output.status))
    }
}

/// The first of some metrics whose base name a query lists.
fn choose(names: &[&'static str], listed: &str) -> Option<&'static str> {
    let base = |name: &str| name.split('.').next().unwrap_or(name).to_string();
    names.iter().copied().find(|name| {
        // Metrics that describe the launch are not counters, and are not listed.
        name.starts_with("launch__")
            || listed.lines().any(|line| line.split_whitespace().next() == Some(base(name).as_str()))
    })
}

/// The names and values of ncu's raw page: a line of names, one of units, one of values.
fn read_raw(said: &str) -> Option<Vec<(String, Option<f64>)>> {
    let table: Vec<&str> = said.lines().skip_while(|line| !line.starts_with("\"ID\"")).collect();
    let (names, values) = (fields(table.first()?), fields(table.get(2)?));
    let number = |text: &String| text.replace(',', "").parse::<f64>().ok().filter(|value| value.is_finite());
    Some(names.into_iter().zip(values.iter().map(number)).collect())
}

/// The fields of a line of CSV in which every field is quoted.
fn fields(line: &str) -> Vec<String> {
    line.trim().trim_matches('"').split("\",\"").map(String::from).collect()
}

/// What bounds a kernel, and the figures that show it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// In a few words.
    pub verdict: String,
    /// The figures.
    pub from: Vec<String>,
}

/// A unit that is busy for this share of the time is what bounds a kernel.
const BUSY: f64 = 60.0;

/// What bounds a kernel, from ncu's figures; absent where the necessary figures are.
pub fn bound(figures: &[Figure]) -> Option<Bound> {
    let value = |name: &str| figures.iter().find(|figure| figure.name == name)?.value;
    let units = [
        ("tensor_percent", "the tensor cores"),
        ("dram_percent", "device memory"),
        ("l2_percent", "the L2 cache"),
        ("shared_percent", "shared memory"),
        ("function_percent", "the unit for exponentials"),
        ("issue_percent", "the issue of instructions"),
    ];
    let mut busy: Vec<(f64, &str, &str)> =
        units.iter().filter_map(|&(name, unit)| Some((value(name)?, name, unit))).collect();
    busy.sort_by(|a, b| b.0.total_cmp(&a.0));
    let &(share, name, unit) = busy.first()?;
    let mut from: Vec<String> = busy.iter().map(|(share, name, _)| format!("{name} {share:.1}")).collect();
    if share >= BUSY {
        return Some(Bound { verdict: format!("{unit} ({name} {share:.1})"), from });
    }
    let stalls = figures.iter().filter(|figure| figure.name.starts_with("stall_"));
    let worst =
        stalls.filter_map(|figure| Some((figure.value?, figure.name))).max_by(|a, b| a.0.total_cmp(&b.0));
    let verdict = match worst {
        Some((ratio, stall)) => {
            from.push(format!("{stall} {ratio:.2}"));
            format!("waiting: no unit is busy for {BUSY} % of the time; most warps wait for {stall}")
        }
        None => format!("waiting: no unit is busy for {BUSY} % of the time"),
    };
    Some(Bound { verdict, from })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: &str = "==PROF== Connected to process 1\n\
        \"ID\",\"Kernel Name\",\"gpu__time_duration.sum\",\"sm__throughput.avg.pct_of_peak_sustained_elapsed\",\"x\"\n\
        \"\",\"\",\"ns\",\"%\",\"\"\n\
        \"0\",\"flashcore_sm90_fwd\",\"12,345\",\"61.5\",\"n/a\"\n";

    fn figure(name: &'static str, value: Option<f64>) -> Figure {
        Figure { name, metric: None, value }
    }

    #[test]
    fn a_raw_page_is_read_by_name_and_what_is_no_number_is_absent() {
        let rows = read_raw(RAW).unwrap();
        let value = |name: &str| rows.iter().find(|(of, _)| of == name).and_then(|(_, value)| *value);
        assert_eq!(value("gpu__time_duration.sum"), Some(12345.0));
        assert_eq!(value("sm__throughput.avg.pct_of_peak_sustained_elapsed"), Some(61.5));
        assert_eq!(value("x"), None);
        assert_eq!(read_raw("==PROF== nothing"), None);
    }

    #[test]
    fn of_a_figures_metrics_the_first_that_the_gpu_lists_is_taken() {
        let listed = "sm__pipe_tensor_cycles_active   Counter  cycle\nlts__t_sectors Counter";
        let tensor = METRICS.iter().find(|metric| metric.figure == "tensor_percent").unwrap();
        assert_eq!(
            choose(tensor.names, listed),
            Some("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active")
        );
        assert_eq!(choose(&["dram__throughput.avg"], listed), None);
        assert_eq!(choose(&["launch__registers_per_thread"], ""), Some("launch__registers_per_thread"));
    }

    #[test]
    fn the_busiest_unit_is_the_bound_and_without_one_the_worst_stall() {
        let busy = [figure("tensor_percent", Some(71.0)), figure("dram_percent", Some(20.0))];
        assert!(bound(&busy).unwrap().verdict.starts_with("the tensor cores"));
        let idle = [
            figure("tensor_percent", Some(31.0)),
            figure("stall_barrier", Some(2.0)),
            figure("stall_wait", Some(0.5)),
        ];
        assert!(bound(&idle).unwrap().verdict.contains("stall_barrier"));
        assert_eq!(bound(&[figure("tensor_percent", None)]), None);
    }
}
