//! What a person sees of a benchmark, by either clock.

use std::fmt::Write as _;
use std::time::Duration;

use super::Report;
use crate::bench::cells::Member;
use crate::bench::cpu::NO_PEERS;
use crate::bench::gpu::{Cache, FA3, Regime};
use crate::bench::outcome::{Comparison, Exactness, Measured, Outcome, Rates};
use crate::bench::{Bench, Machine};
use crate::cli::screen::{Tone, toned};
use crate::energy::Energy;
use crate::evidence::Environment;
use crate::gpu::worker::KERNEL;
use crate::rule::Judgement;
use crate::stats::Verdict;

/// A p90 this many times p50 means that something else ran on the machine.
const NOISY: f64 = 1.3;

/// The machine, the peers, and the columns of a table.
pub(super) fn heading(
    environment: &Environment,
    bench: &dyn Bench,
    table: Option<(bool, &[&'static str])>,
) -> String {
    let (mut lines, unit) = match bench.machine() {
        Machine::Cpu { device, torch, .. } => {
            let mut lines =
                vec![format!("FlashCore {} on {device}, {}", environment.flashcore, environment.cpu_name())];
            lines.extend(torch.map(|torch| {
                format!("torch {} on {} threads, on the same inputs", torch.version, torch.threads)
            }));
            (lines, "GFLOP/s")
        }
        Machine::Gpu { gpu, cache, regime, .. } => {
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
            lines.extend(gpu.no_fa3_because.as_ref().map(|why| {
                format!(
                    "without {FA3}: {}; install FlashAttention-3, or put the folder of its flash_attn_interface.py \
                     on PYTHONPATH",
                    short(why)
                )
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
            let ms = regime.sample().as_secs_f64() * 1e3;
            lines.push(match regime {
                Regime::Bursts => {
                    format!("bursts: samples of {ms} ms; --sustained has those of a power limit")
                }
                Regime::Sustained => format!(
                    "sustained: samples of {ms} ms without a pause, so that the power limit has set the clock"
                ),
            });
            (lines, "TFLOP/s")
        }
    };
    lines.extend(bench.no_torch().filter(|why| *why != NO_PEERS).map(|why| format!("without torch: {why}")));
    if !environment.optimised {
        lines.push("this build is not optimised, its times say nothing: use cargo run --release".into());
    }
    if let Some((wide, forms)) = table {
        if !(bench.peers().is_empty() && forms.is_empty()) {
            lines.push(
                "\nUnder a peer: how many times its speed ours is, ± half of the 95 % interval, and the verdict:\n\
                 + FASTER, = SAME, - SLOWER, ? UNDECIDED. The error is the RMS of ours; x is that over the most\n\
                 exact peer's."
                    .into(),
            );
        }
        let limit = of_limit_width(unit == "TFLOP/s");
        let label = label_width(wide);
        let mut columns = format!("{:<label$} {:>8} {unit:>7} {:>limit$}", "", "µs", "of limit");
        for peer in forms.iter().map(ToString::to_string).chain(bench.peers()) {
            let _ = write!(columns, " {:>10}", peer.trim_start_matches("flashcore "));
        }
        lines.push(toned(Tone::Strong, &format!("{columns} {:>6}", "error")));
    }
    lines.join("\n")
}

/// How wide the share of a limit is: on a GPU it is always that of the peak.
fn of_limit_width(is_gpu: bool) -> usize {
    if is_gpu { 8 } else { 11 }
}

fn number(x: Option<f64>, digits: usize) -> String {
    x.map_or_else(|| "-".into(), |x| format!("{x:.digits$}"))
}

/// The rate as a share of what limits it.
fn of_limit(rates: &Rates) -> String {
    let (share, what) = match *rates {
        Rates::Cpu { bandwidth_share: Some(share), .. } => (Some(share), "memory"),
        Rates::Cpu { fma_peak_share, .. } => (fma_peak_share, "FMA"),
        Rates::Gpu { peak_share, .. } => (peak_share, ""),
    };
    let text = share.map_or_else(|| "-".into(), |share| format!("{:.0} % {what}", share * 100.0));
    text.trim_end().into()
}

/// A verdict in one character.
fn mark(verdict: Verdict) -> char {
    match verdict {
        Verdict::Faster => '+',
        Verdict::Same => '=',
        Verdict::Slower => '-',
        Verdict::Undecided => '?',
    }
}

/// How wide the column of labels is: where they are long, they stand in lines of their own.
fn label_width(wide: bool) -> usize {
    if wide { 4 } else { LABEL }
}

/// What a label may take of a line.
const LABEL: usize = 28;

/// Whether a label takes a line of its own.
pub(super) fn is_long(label: &str) -> bool {
    label.chars().count() > LABEL + 8
}

/// The other forms of ours that are columns of a table.
pub(super) fn forms(members: &[Member]) -> Vec<&'static str> {
    let first = members.first().filter(|member| member.with_forms);
    first.map_or_else(Vec::new, |member| member.cell.forms().into_iter().map(|(name, _)| name).collect())
}

/// A cell of a table in one line, and one more for everything that went wrong in it; the label is in a line of its own
/// where labels are `wide`.
pub(super) fn row(outcome: &Outcome, wide: bool) -> String {
    let label = outcome.label();
    let Some(ours) = outcome.ours() else {
        return format!("{label:<30} {}", outcome.failure().unwrap_or("no result"));
    };
    let (time, rate) = (number(ours.p50_us, 2), number(ours.rates.rate(), 0));
    let limit = of_limit_width(outcome.gpu().is_some());
    let (above, label, width) = match label_width(wide) {
        width if wide => (label + "\n", String::new(), width),
        width => (String::new(), label, width),
    };
    let mut line = format!("{above}{label:<width$} {time:>8} {rate:>7} {:>limit$}", of_limit(&ours.rates));
    for peer in &outcome.results[1..] {
        let found = outcome.comparisons.iter().find(|comparison| comparison.peer == peer.name);
        let against = found.map_or_else(
            || "-".into(),
            |it| {
                let spread = format!("{:.2}", (it.interval.high - it.interval.low) / 2.0);
                let spread = spread.trim_start_matches('0');
                format!("{:.2}±{spread} {}", it.speed_up, mark(it.verdict))
            },
        );
        let _ = write!(line, " {against:>10}");
    }
    let rms = number_of(ours, |error| error.rms().error);
    let _ = write!(line, " {rms:>6} {}", standing(outcome, ours));
    let mut lines = vec![line];
    lines.extend(energy_row(outcome, ours));
    for result in &outcome.results {
        if result.is_wrong() {
            lines.push(toned(Tone::Bad, &format!("    {}", wrong(result))));
        }
        if let Some(why) = &result.failure {
            lines.push(toned(Tone::Bad, &format!("    {}: {}", result.name, short(why))));
        }
    }
    lines.extend(remarks(outcome));
    lines.join("\n")
}

/// An error of a result, as `1.2e-4`.
fn number_of(result: &Measured, of: impl Fn(&Judgement) -> f64) -> String {
    result.error.as_ref().map_or_else(|| "-".into(), |error| format!("{:.1e}", of(error)))
}

/// How our error stands: wrong, over the most exact peer's, or right where there is no such peer.
fn standing(outcome: &Outcome, ours: &Measured) -> String {
    match outcome.gpu().and_then(|gpu| gpu.exactness.as_ref()) {
        _ if ours.is_wrong() => toned(Tone::Bad, "WRONG"),
        Some(found) if found.holds => format!("{:.2}x", found.rms_ratio),
        Some(found) => toned(Tone::Bad, &format!("{:.2}x", found.rms_ratio)),
        None if ours.is_right() => "right".into(),
        None => "not judged".into(),
    }
}

/// What is wrong with a result.
fn wrong(result: &Measured) -> String {
    let mut text = format!("{} is WRONG", result.name);
    if let Some(error) = result.error.as_ref().filter(|error| !error.passed()) {
        let _ =
            write!(text, ": it is off by {:.1e}, allowed are {:.1e}", error.max().error, error.max().allowed);
    }
    if result.replay_differs() {
        text += ": a replay DIFFERS";
    }
    text
}

/// The line below a row: the energy of a call, and under each peer ours over the peer's.
fn energy_row(outcome: &Outcome, ours: &Measured) -> Option<String> {
    let energy = ours.energy()?;
    let clock = energy.sm_clock_mhz.map_or_else(String::new, |mhz| format!(", {mhz:.0} MHz"));
    let words = format!(
        "    {:.1} mJ{}, {:.3} J/TFLOP, {:.0} W{clock}",
        energy.mj_per_call,
        spread(energy),
        energy.j_per_tflop,
        energy.power_w
    );
    let mut line = format!("{words:<54}");
    for peer in &outcome.results[1..] {
        let ratio = peer.energy().map(|theirs| energy.mj_per_call / theirs.mj_per_call);
        let _ = write!(line, " {:>10}", ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}x mJ")));
    }
    Some(line.trim_end().into())
}

/// Half of the interval of an energy, as ` ±1 %`.
fn spread(energy: &Energy) -> String {
    energy.mj_interval.map_or_else(String::new, |interval| {
        format!(" ±{:.1} %", (interval.high - interval.low) / 2.0 / energy.mj_per_call * 100.0)
    })
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
    let columns = columns(outcome);
    let head: Vec<String> =
        columns.iter().map(|column| format!("{:>1$}", column.name, column.width)).collect();
    lines.push(format!("  {:<width$} {}", "", head.join(" ")));
    for result in &outcome.results {
        let values = columns.iter().map(|column| format!("{:>1$}", (column.of)(result), column.width));
        lines.push(format!("  {:<width$} {}", result.name, values.collect::<Vec<_>>().join(" ")));
        if let Some(why) = &result.failure {
            lines.push(toned(Tone::Bad, &format!("    {}", short(why))));
        }
    }
    lines.extend(errors(outcome));
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

/// A column of a cell that is shown on its own.
struct Column {
    name: &'static str,
    width: usize,
    of: fn(&Measured) -> String,
}

/// What is shown of every contender, in at most a hundred columns; the report has all of it.
fn columns(outcome: &Outcome) -> Vec<Column> {
    let column = |name, width, of: fn(&Measured) -> String| Column { name, width, of };
    let is_gpu = outcome.gpu().is_some();
    let has = |it: fn(&Measured) -> bool| outcome.results.iter().any(it);
    let mut all = vec![
        column("p50 µs", 9, |it| number(it.p50_us, 2)),
        column("p90 µs", 9, |it| number(it.p90_us, 2)),
        column("±95 %", 6, |it| {
            it.median_interval_us.zip(it.p50_us).map_or_else(
                || "-".into(),
                |(interval, p50)| format!("{:.1} %", (interval.high - interval.low) / 2.0 / p50 * 100.0),
            )
        }),
        column(if is_gpu { "TFLOP/s" } else { "GFLOP/s" }, 7, |it| number(it.rates.rate(), 1)),
        column("of limit", of_limit_width(is_gpu), |it| of_limit(&it.rates)),
    ];
    if has(|it| it.energy().is_some()) {
        all.push(column("mJ", 8, |it| number(it.energy().map(|energy| energy.mj_per_call), 1)));
        all.push(column("J/TFLOP", 7, |it| number(it.energy().map(|energy| energy.j_per_tflop), 3)));
        all.push(column("MHz", 5, |it| number(it.energy().and_then(|energy| energy.sm_clock_mhz), 0)));
    } else if outcome.cell.is_decode() {
        all.push(column("GB/s", 6, |it| number(it.gbytes, 0)));
    } else {
        all.insert(2, column("min µs", 9, |it| number(it.min_us, 2)));
    }
    if has(|it| it.call().is_some()) {
        all.push(column("call µs", 8, |it| number(it.call().and_then(|call| call.p50_us), 2)));
        all.push(column("host µs", 7, |it| number(it.call().and_then(|call| call.host_p50_us), 2)));
    }
    all.push(column("RMS", 7, |it| number_of(it, |error| error.rms().error)));
    all.push(column("max", 7, |it| number_of(it, |error| error.max().error)));
    all
}

/// What the errors in the table are, who is right, and how ours stand beside the most exact peer's.
fn errors(outcome: &Outcome) -> Vec<String> {
    let mut lines = Vec::new();
    let right: Vec<&str> =
        outcome.results.iter().filter(|it| it.is_right()).map(|it| it.name.as_str()).collect();
    if !right.is_empty() {
        let (judged, rows) = (outcome.judged_rows, outcome.rows);
        let right = toned(Tone::Good, &format!("right: {}", right.join(", ")));
        lines.push(format!(
            "  RMS and max: errors against the f64 oracle on {judged} of {rows} rows; {right}"
        ));
    }
    for result in outcome.results.iter().filter(|it| it.is_wrong()) {
        lines.push(toned(Tone::Bad, &format!("  {}", wrong(result))));
    }
    if let Some(Exactness { rms_ratio, rms_peer, max_ratio, max_peer, allowed, holds }) =
        outcome.gpu().and_then(|gpu| gpu.exactness.as_ref())
    {
        let tone = if *holds { Tone::Good } else { Tone::Bad };
        let rms = toned(tone, &format!("{rms_ratio:.2}x"));
        lines.push(format!(
            "  {rms} the RMS error of {rms_peer}, the most exact peer ({allowed}x allowed); {max_ratio:.2}x the \
             largest of {max_peer}"
        ));
    }
    if let Some(energy) = outcome.ours().and_then(Measured::energy) {
        let steps: Vec<f64> = energy.used.iter().flatten().map(|used| used.us / 1e6).collect();
        lines.push(format!(
            "  energy of the whole board: {:.0} W{}, by {:.1} s between steps of its counter",
            energy.power_w,
            spread(energy),
            steps.iter().sum::<f64>()
        ));
    }
    lines
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
    let exactness = report.cells.iter().filter_map(|it| Some((it, it.gpu()?.exactness.as_ref()?)));
    let exactness: Vec<(&Outcome, &Exactness)> = exactness.collect();
    let worst = exactness.iter().max_by(|a, b| a.1.rms_ratio.total_cmp(&b.1.rms_ratio));
    if let Some((cell, worst)) = worst.filter(|_| exactness.len() > 1) {
        let above = exactness.iter().filter(|(_, found)| !found.holds).count();
        lines.push(format!(
            "RMS error: {:.2}x the most exact peer's at most ({}); above {}x in {above} of {} cells",
            worst.rms_ratio,
            cell.label(),
            worst.allowed,
            exactness.len()
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
    let has_energy = |outcome: &Outcome| outcome.results.iter().any(|result| result.energy().is_some());
    if matches!(report.machine, Machine::Gpu { regime: Regime::Sustained, .. })
        && count(&has_energy) == 0
        && !report.cells.is_empty()
    {
        lines.push(
            "no energy: it needs NVML (libnvidia-ml, which comes with the driver) and a counter on the GPU"
                .into(),
        );
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
        assert_eq!((of_limit(&rates(None)), of_limit(&rates(Some(0.515)))), ("-".into(), "52 %".into()));
    }
}
