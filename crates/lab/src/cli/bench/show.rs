//! What a person sees of a benchmark, by either clock.

use std::fmt::Write as _;
use std::time::Duration;

use super::Report;
use crate::bench::cpu::NO_PEERS;
use crate::bench::gpu::Cache;
use crate::bench::outcome::{Comparison, Measured, Outcome, Rates};
use crate::bench::{Bench, Machine};
use crate::cli::screen::{Tone, toned};
use crate::evidence::Environment;
use crate::gpu::worker::KERNEL;
use crate::stats::Verdict;

/// A p90 this many times p50 means that something else ran on the machine.
const NOISY: f64 = 1.3;

/// The machine, the peers, and the columns of a table.
pub(super) fn heading(environment: &Environment, bench: &dyn Bench, alone: bool) -> String {
    let (mut lines, unit) = match bench.machine() {
        Machine::Cpu { device, torch, .. } => {
            let mut lines =
                vec![format!("FlashCore {} on {device}, {}", environment.flashcore, environment.cpu_name())];
            lines.extend(torch.map(|torch| {
                format!("torch {} on {} threads, on the same inputs", torch.version, torch.threads)
            }));
            (lines, "GFLOP/s")
        }
        Machine::Gpu { gpu, cache, .. } => {
            let text =
                |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), Into::into);
            let rate = |rate: Option<f64>| rate.map_or("unknown".into(), |rate| format!("{rate:.0} TFLOP/s"));
            let empty = |clock: &str| number(gpu.ours["empty_launch"][clock].as_f64(), 2);
            let mut lines = vec![format!(
                "FlashCore {} on {} ({} SMs, driver {}, CUDA {})",
                text(&gpu.ours["version"]),
                text(&gpu.ours["device"]),
                gpu.ours["sms"],
                gpu.driver.as_deref().unwrap_or("unknown"),
                text(&gpu.ours["cuda"]),
            )];
            lines.extend(gpu.torch.as_ref().map(|torch| {
                let peers = bench.peers().join(", ");
                format!("torch {} with cuDNN {}: {peers}", text(&torch["version"]), torch["cudnn"])
            }));
            lines.push(format!(
                "peak {}, matrix product {}; an empty kernel takes {} µs by the call clock, {} of the host's",
                rate(gpu.peak_tflops),
                rate(gpu.matmul_tflops),
                empty("call_p50_us"),
                empty("host_p50_us"),
            ));
            let cache = match cache {
                Cache::Cold => "calls take turns on sets of tensors, so that none is in the L2 cache",
                Cache::Warm => "all calls work on one set of tensors, as the L2 cache holds it",
            };
            lines.push(format!("kernel clock: a graph of calls between two events; {cache}"));
            (lines, "TFLOP/s")
        }
    };
    lines.extend(bench.no_torch().filter(|why| *why != NO_PEERS).map(|why| format!("without torch: {why}")));
    if !environment.optimised {
        lines.push("this build is not optimised, its times say nothing: use cargo run --release".into());
    }
    if !alone {
        let mut columns = format!("\n{:<30} {:>10} {unit:>8} {:>12}", "", "µs", "of limit");
        for peer in bench.peers() {
            let _ = write!(columns, " {peer:>30}");
        }
        lines.push(toned(Tone::Strong, &(columns + "   error")));
    }
    lines.join("\n")
}

fn number(x: Option<f64>, digits: usize) -> String {
    x.map_or_else(|| "-".into(), |x| format!("{x:.digits$}"))
}

/// The rate as a share of what limits it.
fn of_limit(rates: &Rates) -> String {
    let (share, what) = match *rates {
        Rates::Cpu { bandwidth_share: Some(share), .. } => (Some(share), "memory"),
        Rates::Cpu { fma_peak_share, .. } => (fma_peak_share, "FMA"),
        Rates::Gpu { peak_share, .. } => (peak_share, "peak"),
    };
    share.map_or_else(|| "-".into(), |share| format!("{:.0} % {what}", share * 100.0))
}

/// A cell of a table in one line, and one more for everything that went wrong in it.
pub(super) fn row(outcome: &Outcome) -> String {
    let label = outcome.label();
    let Some(ours) = outcome.ours() else {
        return format!("{label:<30} {}", outcome.failure().unwrap_or("no result"));
    };
    let (time, rate) = (number(ours.p50_us, 2), number(ours.rates.rate(), 0));
    let mut line = format!("{label:<30} {time:>10} {rate:>8} {:>12}", of_limit(&ours.rates));
    for peer in &outcome.results[1..] {
        let found = outcome.comparisons.iter().find(|comparison| comparison.peer == peer.name);
        let against = found.map_or_else(
            || "-".into(),
            |it| {
                format!(
                    "{:.2}x [{:.2}, {:.2}] {}",
                    it.speed_up, it.interval.low, it.interval.high, it.verdict
                )
            },
        );
        let _ = write!(line, " {against:>30}");
    }
    let _ = write!(line, "   {}", error(outcome, ours));
    let mut lines = vec![line];
    for result in &outcome.results {
        if let Some(why) = &result.failure {
            lines.push(toned(Tone::Bad, &format!("    {}: {}", result.name, short(why))));
        }
    }
    lines.extend(remarks(outcome));
    lines.join("\n")
}

/// A cell shown on its own.
pub(super) fn describe(outcome: &Outcome) -> String {
    let name = outcome.name.map_or_else(String::new, |name| format!("{name}: "));
    let half = if outcome.mask.starts_with("causal") { ", causal counted half" } else { "" };
    let rounds = outcome.ours().map_or(0, |ours| ours.samples_us.len());
    let sets = outcome.gpu().map_or_else(String::new, |gpu| format!(", {} sets of tensors", gpu.sets));
    let title = format!(
        "\n{name}{}  ({:.3} GFLOP and {:.1} MB per call{half}; {rounds} rounds{sets})",
        outcome.label(),
        outcome.flops / 1e9,
        outcome.bytes / 1e6,
    );
    let mut lines = vec![toned(Tone::Strong, &title)];
    if let Some(why) = outcome.failure() {
        lines.push(toned(Tone::Bad, &format!("  {why}")));
        return lines.join("\n");
    }
    let width = outcome.results.iter().map(|result| result.name.len()).max().unwrap_or(0).max(10);
    let unit = if outcome.gpu().is_some() { "TFLOP/s" } else { "GFLOP/s" };
    let called = outcome.results.iter().any(|result| result.call().is_some());
    let mut columns = format!(
        "  {:<width$} {:>11} {:>11} {:>11} {:>7} {unit:>8} {:>12} {:>8}",
        "", "p50 µs", "p90 µs", "min µs", "±95 %", "of limit", "GB/s"
    );
    if called {
        let _ = write!(columns, " {:>9} {:>9} {:>8}", "call µs", "p90", "host µs");
    }
    lines.push(columns + "   error against the oracle");
    lines.extend(outcome.results.iter().map(|result| line(outcome, result, width, called)));
    for plan in outcome.results.iter().filter_map(Measured::plan) {
        lines.push(format!(
            "  {} on a grid of {}, {} threads per block, {} registers, {} bytes of shared memory",
            plan["schedule"].as_str().unwrap_or("?"),
            plan["grid"],
            plan["threads"],
            plan["registers"],
            plan["shared_bytes"],
        ));
    }
    for Comparison { peer, speed_up, interval, verdict, .. } in &outcome.comparisons {
        let tone = if *verdict == Verdict::Slower { Tone::Bad } else { Tone::Good };
        lines.push(format!(
            "  {} than {peer}: {speed_up:.2}x its speed, with 95 % confidence {:.2}x to {:.2}x",
            toned(tone, &verdict.to_string()),
            interval.low,
            interval.high,
        ));
    }
    if let Some(share) = outcome.cpu().and_then(|cpu| cpu.causal_share) {
        lines.push(format!("  {share:.2} of the rate without the mask, by useful operations"));
    }
    if let Some(gpu) = outcome.gpu() {
        lines.extend(gpu.ladder.first().map(|_| "  the ladder".into()));
        for rung in &gpu.ladder {
            let gain = rung.gain.as_ref().map_or_else(String::new, |gain| {
                let (below, low, high) =
                    (gain.peer.replace(KERNEL, ""), gain.interval.low, gain.interval.high);
                format!("   {:.2}x {below} [{low:.2}, {high:.2}]", gain.speed_up)
            });
            lines.push(format!("    {:<12} {:>12} µs{gain}", rung.kernel, number(rung.p50_us, 2)));
        }
        if let Some(first) = &gpu.first_call {
            let ms = |us: Option<f64>| us.map_or_else(|| "-".into(), |us| format!("{:.1} ms", us / 1e3));
            let why = first.failure.as_ref().map_or_else(String::new, |why| format!(" ({})", short(why)));
            let (cold, warm) = (ms(first.cold_us), ms(first.warm_us));
            lines.push(format!("  first call {cold} with empty caches, {warm} with the code on disk{why}"));
        }
    }
    lines.extend(remarks(outcome));
    lines.join("\n")
}

fn line(outcome: &Outcome, result: &Measured, width: usize, called: bool) -> String {
    let spread = result.median_interval_us.zip(result.p50_us).map_or_else(
        || "-".into(),
        |(interval, p50)| format!("{:.1} %", (interval.high - interval.low) / 2.0 / p50 * 100.0),
    );
    let mut text = format!(
        "  {:<width$} {:>11} {:>11} {:>11} {spread:>7} {:>8} {:>12} {:>8}",
        result.name,
        number(result.p50_us, 2),
        number(result.p90_us, 2),
        number(result.min_us, 2),
        number(result.rates.rate(), 1),
        of_limit(&result.rates),
        number(result.gbytes, 0),
    );
    if called {
        let call = result.call();
        let (p50, p90) = (call.and_then(|it| it.p50_us), call.and_then(|it| it.p90_us));
        let host = call.and_then(|it| it.host_p50_us);
        let _ = write!(text, " {:>9} {:>9} {:>8}", number(p50, 2), number(p90, 2), number(host, 2));
    }
    let _ = write!(text, "   {}", error(outcome, result));
    if let Some(why) = &result.failure {
        text += &toned(Tone::Bad, &format!("\n    {}", short(why)));
    }
    text
}

/// The error shown beside a time: its size, how it compares with plain attention's, and how many rows were judged.
fn error(outcome: &Outcome, result: &Measured) -> String {
    let Some(judgement) = &result.error else { return "not judged".into() };
    let verdict = if judgement.passed() { toned(Tone::Good, "right") } else { toned(Tone::Bad, "WRONG") };
    let mut text = format!("{verdict}: max {:.1e}", judgement.max().error);
    if let Some(ratio) = judgement.error_ratio() {
        let _ = write!(text, ", {ratio:.2} of plain's");
    }
    if outcome.judged_rows != outcome.rows {
        let _ = write!(text, ", {} of {} rows", outcome.judged_rows, outcome.rows);
    }
    if result.replay_differs() {
        text += &toned(Tone::Bad, ", a replay DIFFERS");
    }
    text
}

/// Warnings about a measurement, and notes that help to read it.
fn remarks(outcome: &Outcome) -> Vec<String> {
    let mut lines = Vec::new();
    let mut bad = |text: String| lines.push(toned(Tone::Bad, &text));
    if outcome.impossible && outcome.gpu().is_some() {
        bad("    faster than the chip's peak: this measurement is wrong".into());
    } else if outcome.impossible {
        bad("    faster than the best that was seen of this machine's limit, so its speed changed meanwhile: UNDECIDED; \
             close other programs, or give a longer --budget"
            .into());
    }
    if let Some(gpu) = outcome.gpu() {
        let slowed = "    heat or power slowed the GPU down in";
        if gpu.retaken_rounds > 0 {
            bad(format!("{slowed} {} rounds, which were taken again", gpu.retaken_rounds));
        }
        if gpu.throttled_rounds > 0 {
            bad(format!("{slowed} {} rounds that count: it did not recover", gpu.throttled_rounds));
        }
    }
    if outcome.is_launch_bound() {
        lines.push("    under 1 % of the peak: this times the launch, not the arithmetic".into());
    }
    let Some(ours) = outcome.ours() else { return lines };
    if let (Some(p50), Some(p90)) = (ours.p50_us, ours.p90_us)
        && p90 > NOISY * p50
    {
        let times = p90 / p50;
        lines.push(format!(
            "    noisy: p90 is {times:.1} times p50; close other programs, or give a longer --budget"
        ));
    }
    if let Some(roofline) = ours.roofline {
        lines.push(format!(
            "    {:.0} % of what this machine could do: {:.2} µs at its measured ceilings, bound by {}",
            roofline.share * 100.0,
            roofline.floor_us,
            roofline.bound
        ));
    }
    lines
}

/// The first line of a reason, cut where it is long; the report has all of it.
fn short(why: &str) -> String {
    let line = why.lines().next().unwrap_or_default();
    if line.chars().count() > 160 { line.chars().take(160).collect::<String>() + "…" } else { line.into() }
}

/// The summary over all cells.
pub(super) fn closing(report: &Report<'_>, spent: Duration) -> String {
    let mut lines = Vec::new();
    for summary in report.summaries.iter().filter(|summary| summary.cells > 1) {
        let [faster, same, slower, undecided] = summary.verdicts;
        let mean = toned(Tone::Strong, &format!("{:.2}x", summary.geometric_mean));
        lines.push(format!(
            "{:<24} {:>2} cells: {mean} the speed of {} by the geometric mean, {:.2}x at least ({}); \
             {faster} FASTER, {same} SAME, {slower} SLOWER, {undecided} UNDECIDED",
            summary.group.as_deref().unwrap_or("all"),
            summary.cells,
            summary.peer,
            summary.smallest,
            summary.smallest_cell,
        ));
    }
    let shares = report.causal_shares.iter().flatten();
    if let Some(least) = shares.min_by(|a, b| a.share.total_cmp(&b.share)) {
        lines.push(format!(
            "causal runs at {:.2} of the full rate at least, by useful operations ({})",
            least.share, least.cell
        ));
    }
    let count = |is: &dyn Fn(&Outcome) -> bool| report.cells.iter().filter(|outcome| is(outcome)).count();
    let wrong = count(&|outcome| outcome.ours().is_some_and(Measured::is_wrong));
    let impossible = count(&|outcome| outcome.impossible);
    let without = count(&|outcome| outcome.ours().is_none_or(|ours| ours.p50_us.is_none()));
    if wrong + impossible + without > 0 {
        let text = format!(
            "{wrong} results are wrong, {impossible} times impossible, {without} cells without a time"
        );
        lines.push(toned(Tone::Bad, &text));
    }
    if let Machine::Gpu { lost_workers: lost @ 1.., .. } = report.machine {
        lines.push(toned(Tone::Bad, &format!("a worker was lost {lost} times and started again")));
    }
    if report.cells.len() > 1 {
        lines.push(format!("{} cells in {:.0} s", report.cells.len(), spent.as_secs_f64()));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_reason_is_cut_and_a_short_one_is_not() {
        assert_eq!(short("OutOfMemoryError: 34 GiB\nTraceback …"), "OutOfMemoryError: 34 GiB");
        assert_eq!(short(&"ä".repeat(500)).chars().count(), 161);
    }

    #[test]
    fn what_was_not_measured_is_a_dash() {
        assert_eq!((number(None, 2), number(Some(1.005), 1)), ("-".into(), "1.0".into()));
        let rates = |peak_share| Rates::Gpu { tflops: None, peak_share, matmul_share: None };
        assert_eq!((of_limit(&rates(None)), of_limit(&rates(Some(0.515)))), ("-".into(), "52 % peak".into()));
    }
}
