//! `flashcore bench --device cuda`: the kernel clock and the call clock, beside torch's backends.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use flashcore::plan::Kernel;
use serde::Serialize;
use serde_json::Value;

use super::after_bench::{Finished, INTERRUPTED};
use super::bench::{Options, Task, conclude_against_itself, keep_ceilings};
use super::screen::{Progress, Tone, say, toned};
use super::{Exit, Json};
use crate::bench::Comparison;
use crate::ceilings::Ceilings;
use crate::evidence::{Document, Environment, schemas};
use crate::gpu::bench::{Cache, GpuBench, Ours, PEERS, Setup};
use crate::gpu::cells::Member;
use crate::gpu::outcome::{Facts, Measured, Outcome, Summary, not_run, summaries};
use crate::gpu::pool::Stored;
use crate::stats::Verdict;
use crate::{interrupt, memory};

/// Time for a cell unless a limit for all is given.
const A_CELL: Duration = Duration::from_secs(6);
/// Time for one comparison of a thing with itself at most.
const AGAINST_ITSELF: Duration = Duration::from_secs(1);
/// Time for a shape that is looked at alone.
const ALONE: Duration = Duration::from_secs(15);

#[derive(Serialize)]
struct Report<'a> {
    clock: &'static str,
    cache: Cache,
    gpu: &'a Facts,
    no_torch_because: Option<&'a str>,
    ceilings: Option<&'a Ceilings>,
    inputs: Vec<&'a Stored>,
    budget_seconds: f64,
    seconds: f64,
    lost_workers: usize,
    /// Cells that were asked for.
    asked: usize,
    cells: &'a [Outcome],
    summaries: &'a [Summary],
}

impl<'a> Report<'a> {
    fn new(
        bench: &'a GpuBench,
        setup: &Setup,
        budget: Duration,
        started: Instant,
        asked: usize,
        cells: &'a [Outcome],
        summaries: &'a [Summary],
    ) -> Self {
        Self {
            clock: "kernel",
            cache: setup.cache,
            gpu: bench.facts(),
            no_torch_because: bench.no_torch(),
            ceilings: bench.ceilings(),
            inputs: bench.pools(),
            budget_seconds: budget.as_secs_f64(),
            seconds: started.elapsed().as_secs_f64(),
            lost_workers: bench.lost_workers(),
            asked,
            cells,
            summaries,
        }
    }
}

/// Keeps what a run found until it is ended in the middle of a cell.
fn keep_part(part: &Mutex<Option<Value>>, json: &Json) {
    let Some(part) = part.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
    say(&toned(Tone::Bad, INTERRUPTED));
    if let Err(why) = json.write(schemas::BENCH_GPU, &Environment::read(), false, &part) {
        interrupt::tell(&format!("error: {why}"));
    }
}

/// Times the cells on the GPU of a number.
pub fn bench(
    options: &Options,
    task: &Task,
    ordinal: u32,
    cells: &[Member],
    json: &Json,
) -> Result<Exit, String> {
    for Member { cell, .. } in cells {
        memory::check(&cell.label(), memory::of_rows(&cell.problem()))?;
    }
    let alone = options.matrix().is_none() && task.config.is_none();
    let itself = options.against_itself();
    let setup = Setup {
        ordinal,
        ours: ours(options),
        peers: if itself.is_some() || cells.is_empty() { Vec::new() } else { peers(options, alone) },
        installed: alone && options.peers().is_none() && itself.is_none() && !cells.is_empty(),
        cache: options.cache(),
        call_clock: alone || options.call_clock(),
        first_call: alone,
        rounds: task.rounds,
        warmups: task.warmups,
        margin: options.margin() / 100.0,
    };
    let budget = options.budget().unwrap_or(cells.len() as u32 * if alone { ALONE } else { A_CELL });
    // What there would be to report if the next cell had no end.
    let part = Arc::new(Mutex::new(None));
    interrupt::finish_steps({
        let (part, json) = (Arc::clone(&part), json.clone());
        move || keep_part(&part, &json)
    });
    let started = Instant::now();
    let mut progress = Progress::new(cells.len() as u64 * 100);
    let mut bench = GpuBench::start(setup.clone(), cells, &mut |what| progress.at(0, what))?;
    if options.ceilings() {
        progress.at(0, "measuring what the GPU can do at most");
        let environment = Environment::read();
        let created = Document::new("", &environment, true, &()).created;
        let found = bench.measure_ceilings(&created)?;
        progress.finish();
        keep_ceilings(found);
        if cells.is_empty() {
            json.write(schemas::CEILINGS, &environment, true, found)?;
            return Ok(Exit::Pass);
        }
    }
    if let Some(itself) = itself {
        let mut all = Vec::new();
        for member in cells {
            let mut tell = |done: usize| {
                let share = 100 * done / itself.0.max(1);
                progress.at((all.len() * 100 + share) as u64, &member.cell.label());
            };
            let each = budget / (itself.0 * cells.len()).max(1) as u32;
            let each = options.budget().map_or(AGAINST_ITSELF, |_| each);
            let found = bench.against_itself(member, itself, each, &interrupt::requested, &mut tell)?;
            all.push(found);
        }
        interrupt::finishing();
        progress.finish();
        return conclude_against_itself(&all, &Environment::read(), json);
    }
    progress.say(&heading(&bench, &setup, alone));
    let mut outcomes = Vec::new();
    for (i, member) in cells.iter().enumerate() {
        if interrupt::requested() {
            break;
        }
        let label = member.cell.label();
        let mut tell = |what: &str, share: f64| {
            progress.at(i as u64 * 100 + (share * 100.0) as u64, &format!("{label}: {what}"));
        };
        let left = budget.saturating_sub(started.elapsed());
        let outcome = if left.is_zero() {
            not_run(member, "the budget is spent")
        } else {
            bench.run(member, left / (cells.len() - i) as u32, &interrupt::requested, &mut tell)
        };
        progress.say(&if alone { describe(&outcome) } else { row(&outcome) });
        outcomes.push(outcome);
        let all = summaries(&outcomes);
        let report = Report::new(&bench, &setup, budget, started, cells.len(), &outcomes, &all);
        *part.lock().unwrap_or_else(PoisonError::into_inner) = serde_json::to_value(&report).ok();
    }
    interrupt::finishing();
    progress.finish();
    let all = summaries(&outcomes);
    let report = Report::new(&bench, &setup, budget, started, cells.len(), &outcomes, &all);
    say(&closing(&report));
    let complete = outcomes.len() == cells.len() && outcomes.iter().all(|outcome| outcome.failure.is_none());
    let complete = complete && !interrupt::requested();
    let environment = Environment::read();
    let exit = exit(&outcomes, complete);
    Finished { schema: schemas::BENCH_GPU, environment: &environment, complete, report: &report, exit }
        .conclude(options.after(), json, task.config.as_ref(), setup.margin)
}

/// Who of ours: given schedules, given kernels, the whole ladder with its highest rung first, or the planner's choice.
fn ours(options: &Options) -> Ours {
    if !options.schedules().is_empty() {
        return Ours::Schedules(options.schedules().iter().map(ToString::to_string).collect());
    }
    if options.ladder() {
        return Ours::Kernels(Kernel::ALL.into_iter().rev().collect());
    }
    if options.kernels().is_empty() { Ours::Planner } else { Ours::Kernels(options.kernels().to_vec()) }
}

fn peers(options: &Options, alone: bool) -> Vec<String> {
    match options.peers() {
        Some(peers) => peers.to_vec(),
        None if alone => PEERS.map(String::from).into(),
        // The two that count; the others take longer than they tell.
        None => PEERS[..2].iter().map(ToString::to_string).collect(),
    }
}

/// Wrong or impossible results of ours fail; a cell without a result or an interrupt is no answer. What is undecided about
/// speed is for a gate (`--compare`).
fn exit(outcomes: &[Outcome], complete: bool) -> Exit {
    let wrong = |outcome: &Outcome| {
        outcome.impossible
            || outcome.results.iter().any(|result| result.plan.is_some() && !result.is_right())
            || outcome.ours().is_some_and(|ours| ours.error.is_some() && !ours.is_right())
    };
    let is_missing = |outcome: &Outcome| outcome.ours().is_none_or(|ours| ours.failure.is_some());
    if outcomes.iter().any(wrong) {
        Exit::Fail
    } else if !complete || outcomes.iter().any(is_missing) {
        Exit::CouldNot
    } else {
        Exit::Pass
    }
}

fn heading(bench: &GpuBench, setup: &Setup, alone: bool) -> String {
    let Facts { ours, torch, driver, peak_tflops, matmul_tflops } = bench.facts();
    let text = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), String::from);
    let mut lines = vec![format!(
        "FlashCore {} on {} ({} SMs, driver {}, CUDA {})",
        text(&ours["version"]),
        text(&ours["device"]),
        ours["sms"],
        driver.as_deref().unwrap_or("unknown"),
        text(&ours["cuda"]),
    )];
    match (torch, bench.no_torch()) {
        (Some(torch), _) => lines.push(format!(
            "torch {} with cuDNN {}: {}",
            text(&torch["version"]),
            torch["cudnn"],
            bench.peers().join(", ")
        )),
        (None, Some(why)) => lines.push(format!("without torch: {why}")),
        (None, None) => {}
    }
    let rate =
        |rate: &Option<f64>| rate.map_or_else(|| "unknown".into(), |rate| format!("{rate:.0} TFLOP/s"));
    let empty = |clock: &str| number(ours["empty_launch"][clock].as_f64(), 2);
    lines.push(format!(
        "peak {}, matrix product {}; an empty kernel takes {} µs by the call clock, {} of the host's",
        rate(peak_tflops),
        rate(matmul_tflops),
        empty("call_p50_us"),
        empty("host_p50_us"),
    ));
    let cache = match setup.cache {
        Cache::Cold => "calls take turns on sets of tensors, so that none is in the L2 cache",
        Cache::Warm => "all calls work on one set of tensors, as the L2 cache holds it",
    };
    lines.push(format!("kernel clock: a graph of calls between two events; {cache}; causal counted half"));
    if !alone {
        let mut columns = format!("\n{:<30} {:>10} {:>8} {:>6}", "", "µs", "TFLOP/s", "peak");
        for peer in bench.peers() {
            let _ = write!(columns, " {peer:>30}");
        }
        columns += "   error";
        lines.push(toned(Tone::Strong, &columns));
    }
    lines.join("\n")
}

fn number(x: Option<f64>, digits: usize) -> String {
    x.map_or_else(|| "-".into(), |x| format!("{x:.digits$}"))
}

fn percent(x: Option<f64>) -> String {
    x.map_or_else(|| "-".into(), |x| format!("{:.0} %", x * 100.0))
}

fn verdict_tone(verdict: Verdict) -> Tone {
    if verdict == Verdict::Slower { Tone::Bad } else { Tone::Good }
}

/// A cell of a matrix in one line, and one more for everything that went wrong in it.
fn row(outcome: &Outcome) -> String {
    let label = outcome.label();
    let Some(ours) = outcome.ours() else {
        return format!("{label:<30} {}", outcome.failure.as_deref().unwrap_or("no result"));
    };
    let mut line = format!(
        "{label:<30} {:>10} {:>8} {:>6}",
        number(ours.p50_us, 2),
        number(ours.tflops, 0),
        percent(ours.peak_share)
    );
    for peer in &outcome.results[1..] {
        let found = outcome.comparisons.iter().find(|comparison| comparison.peer == peer.name);
        let against = found.map_or_else(|| "-".into(), ratio);
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

fn ratio(comparison: &Comparison) -> String {
    let Comparison { speed_up, interval, verdict, .. } = comparison;
    format!("{speed_up:.2}x [{:.2}, {:.2}] {verdict}", interval.low, interval.high)
}

/// A shape that is looked at alone.
fn describe(outcome: &Outcome) -> String {
    let name = outcome.name.map_or_else(String::new, |name| format!("{name}: "));
    let rounds = outcome.ours().map_or(0, |ours| ours.samples_us.len());
    let title = format!(
        "\n{name}{}  ({:.3} GFLOP a call; {rounds} rounds, {} sets of tensors)",
        outcome.label(),
        outcome.flops / 1e9,
        outcome.sets
    );
    let mut lines = vec![toned(Tone::Strong, &title)];
    if let Some(why) = &outcome.failure {
        lines.push(toned(Tone::Bad, &format!("  {why}")));
        return lines.join("\n");
    }
    let width = outcome.results.iter().map(|result| result.name.len()).max().unwrap_or(0).max(10);
    lines.push(format!(
        "  {:<width$} {:>9} {:>9} {:>9} {:>7} {:>8} {:>6} {:>8} {:>9} {:>9} {:>8}",
        "", "kernel µs", "p90", "min", "±95 %", "TFLOP/s", "peak", "GB/s", "call µs", "p90", "host µs"
    ));
    for result in &outcome.results {
        lines.push(line(outcome, result, width));
    }
    for result in outcome.results.iter().filter_map(|result| result.plan.as_ref()) {
        lines.push(format!(
            "  {} on a grid of {}, {} threads, {} registers, {} bytes of shared memory",
            result["schedule"].as_str().unwrap_or("?"),
            result["grid"],
            result["threads"],
            result["registers"],
            result["shared_bytes"],
        ));
    }
    for comparison in &outcome.comparisons {
        lines.push(format!(
            "  {} than {}: {:.2}x its speed, with 95 % confidence {:.2}x to {:.2}x",
            toned(verdict_tone(comparison.verdict), &comparison.verdict.to_string()),
            comparison.peer,
            comparison.speed_up,
            comparison.interval.low,
            comparison.interval.high,
        ));
    }
    if !outcome.ladder.is_empty() {
        lines.push("  the ladder".into());
    }
    for rung in &outcome.ladder {
        let gain = rung.gain.as_ref().map_or_else(String::new, |gain| {
            let below = gain.peer.replace(crate::gpu::worker::KERNEL, "");
            format!("   {:.2}x {below} [{:.2}, {:.2}]", gain.speed_up, gain.interval.low, gain.interval.high)
        });
        lines.push(format!("    {:<12} {:>12} µs{gain}", rung.kernel, number(rung.p50_us, 2)));
    }
    if let Some(first) = &outcome.first_call {
        let ms = |us: Option<f64>| us.map_or_else(|| "-".into(), |us| format!("{:.1} ms", us / 1e3));
        let why = first.failure.as_ref().map_or_else(String::new, |why| format!(" ({})", short(why)));
        let (cold, warm) = (ms(first.cold_us), ms(first.warm_us));
        lines.push(format!("  first call {cold} with empty caches, {warm} with the code on disk{why}"));
    }
    lines.extend(remarks(outcome));
    lines.join("\n")
}

fn line(outcome: &Outcome, result: &Measured, width: usize) -> String {
    let spread = result.median_interval_us.zip(result.p50_us).map_or_else(
        || "-".into(),
        |(interval, p50)| format!("{:.1} %", (interval.high - interval.low) / 2.0 / p50 * 100.0),
    );
    let call = result.call.as_ref();
    let mut text = format!(
        "  {:<width$} {:>9} {:>9} {:>9} {:>7} {:>8} {:>6} {:>8} {:>9} {:>9} {:>8}   {}",
        result.name,
        number(result.p50_us, 2),
        number(result.p90_us, 2),
        number(result.min_us, 2),
        spread,
        number(result.tflops, 1),
        percent(result.peak_share),
        number(result.gbytes, 0),
        number(call.and_then(|call| call.p50_us), 2),
        number(call.and_then(|call| call.p90_us), 2),
        number(call.and_then(|call| call.host_p50_us), 2),
        error(outcome, result),
    );
    if let Some(why) = &result.failure {
        text += &toned(Tone::Bad, &format!("\n    {}", short(why)));
    }
    text
}

/// The error beside a time: its size, how it compares with plain attention's, and of how many rows.
fn error(outcome: &Outcome, result: &Measured) -> String {
    let Some(judgement) = &result.error else { return "not judged".into() };
    let verdict = if judgement.passed() { toned(Tone::Good, "right") } else { toned(Tone::Bad, "WRONG") };
    let against =
        judgement.error_ratio().map_or_else(String::new, |ratio| format!(", {ratio:.2} of plain's"));
    let replay = if result.replay_is_same == Some(false) {
        toned(Tone::Bad, ", a replay DIFFERS")
    } else {
        String::new()
    };
    let rows = if outcome.judged_rows == outcome.rows {
        String::new()
    } else {
        format!(", {} of {} rows", outcome.judged_rows, outcome.rows)
    };
    format!("{verdict}: max {:.1e}{against}{rows}{replay}", judgement.max.error)
}

fn remarks(outcome: &Outcome) -> Vec<String> {
    let mut lines = Vec::new();
    if outcome.impossible {
        lines.push(toned(Tone::Bad, "    faster than the chip's peak: this measurement is wrong"));
    }
    if outcome.is_launch_bound() {
        lines.push("    under 1 % of the peak: this times the launch".into());
    }
    if let Some(roofline) = outcome.ours().and_then(|ours| ours.roofline) {
        lines.push(format!(
            "    {:.0} % of what the GPU could do: {:.2} µs at its measured ceilings, bound by {}",
            roofline.share * 100.0,
            roofline.floor_us,
            roofline.bound
        ));
    }
    if outcome.retaken_rounds > 0 {
        let rounds = outcome.retaken_rounds;
        let text =
            format!("    heat or power slowed the GPU down in {rounds} rounds, which were taken again");
        lines.push(toned(Tone::Bad, &text));
    }
    if outcome.throttled_rounds > 0 {
        let rounds = outcome.throttled_rounds;
        let text = format!(
            "    heat or power slowed the GPU down in {rounds} rounds that count: it did not recover"
        );
        lines.push(toned(Tone::Bad, &text));
    }
    lines
}

/// The first line of a reason, cut where it is long; the report has all of it.
fn short(why: &str) -> String {
    let line = why.lines().next().unwrap_or_default();
    if line.chars().count() > 160 { line.chars().take(160).collect::<String>() + "…" } else { line.into() }
}

fn closing(report: &Report<'_>) -> String {
    let mut lines = Vec::new();
    for summary in report.summaries.iter().filter(|summary| summary.cells > 1) {
        let [faster, same, slower, undecided] = summary.verdicts;
        let mean = toned(Tone::Strong, &format!("{:.2}x", summary.geometric_mean));
        lines.push(format!(
            "{:<24} {:>2} cells: {mean} the speed of {} by the geometric mean, {:.2}x at least ({}); \
             {faster} FASTER, {same} SAME, {slower} SLOWER, {undecided} UNDECIDED",
            summary.group, summary.cells, summary.peer, summary.smallest, summary.smallest_cell,
        ));
    }
    let wrong =
        |outcome: &&Outcome| outcome.ours().is_some_and(|ours| ours.error.is_some() && !ours.is_right());
    let wrong = report.cells.iter().filter(wrong).count();
    let impossible = report.cells.iter().filter(|outcome| outcome.impossible).count();
    let without =
        report.cells.iter().filter(|outcome| outcome.ours().is_none_or(|ours| ours.p50_us.is_none())).count();
    if wrong + impossible + without > 0 {
        let text = format!(
            "{wrong} results are wrong, {impossible} times impossible, {without} cells without a time"
        );
        lines.push(toned(Tone::Bad, &text));
    }
    if report.lost_workers > 0 {
        let text = format!("a worker was lost {} times and started again", report.lost_workers);
        lines.push(toned(Tone::Bad, &text));
    }
    lines.push(format!("{} cells in {:.0} s", report.cells.len(), report.seconds));
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
    fn numbers_that_were_not_measured_are_dashes() {
        assert_eq!((number(None, 2), percent(None)), ("-".into(), "-".into()));
        assert_eq!((number(Some(1.005), 1), percent(Some(0.515))), ("1.0".into(), "52 %".into()));
    }
}
