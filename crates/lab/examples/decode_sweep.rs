//! Which schedules decode fastest on this GPU: for every cell of `bench --matrix decode`, what is promising, timed beside the
//! planner's choice, in turns whose order is shuffled, with a cold cache, and judged by the oracle.
//!
//! ```text
//! cargo run --release -p flashcore-lab --example decode_sweep -- [--json FILE] [--seconds 90] [--only TEXT] [--list]
//! ```
//!
//! `--list` shows what would be timed, without a GPU; `--only` takes the cells whose label contains TEXT. The exit status is
//! 0 when everything ran and was right, 1 when something did not or was not, 2 when there is no GPU.

#![allow(missing_docs)] // A program, not a library.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use flashcore::Problem;
use flashcore::plan::{Hardware, Plan, Schedule, Target};
use flashcore_kernels::sm90::fwd;
use flashcore_lab::bench::Bench;
use flashcore_lab::bench::cells::{Matrix, Member};
use flashcore_lab::bench::gpu::{Cache, GpuBench, Ours, Regime, Setup};
use flashcore_lab::{cli, interrupt};

/// One warpgroup with so many keys in flight, at a head_dim of 128. Narrower heads have as many bytes, where tiles are no
/// longer than 128 keys.
fn one(head_dim: usize, block_n: u32, stages: u32) -> fwd::Schedule {
    let block_n = (block_n * 128 / head_dim as u32).clamp(16, 128);
    let text = format!(
        "sm90_fwd:warpgroups=1,block_n={block_n},stages={stages},q_stages=1,ctas=1,split=1,pingpong=0,lazy=1,poly=0,\
         persistent=0,pairs=0"
    );
    match text.parse() {
        Ok(Schedule::Sm90Fwd(schedule)) => schedule,
        other => panic!("{text}: {other:?}"),
    }
}

/// What is promising, by what was measured so far (`2026-11-15-h200-decode.json` and `2026-11-16-h200-parts-trials.json` in
/// `record/gpu-checks`): a start, an end and a merge take 2, 2.5 and 1.7 µs, a key tile of one warpgroup 0.2 µs and 6.6 ns per
/// key, the memory gives 4.2 TB/s however many bytes are in flight; what it gives where blocks read side by side is open.
fn candidates(problem: &Problem, hardware: &Hardware) -> Result<Vec<Schedule>, String> {
    let chosen = Plan::choose(problem, hardware).map_err(|error| error.to_string())?;
    let (tiles, sms) = ((problem.batch * problem.heads_kv) as u32, hardware.sms);
    let one = |block_n, stages| one(problem.head_dim, block_n, stages);
    let both = |block_n, stages| fwd::Schedule { warpgroups: 2, together: true, ..one(block_n, stages) };
    // The next tile's queries arrive while the last one's output leaves.
    let stays = |it: fwd::Schedule, ctas| fwd::Schedule { persistent: true, q_stages: 2, ctas, ..it };
    let parts = |it: fwd::Schedule, parts| fwd::Schedule { parts, ..it };
    let cluster = |it: fwd::Schedule, split| fwd::Schedule { split, ..it };
    let in_turn = |it: fwd::Schedule| fwd::Schedule { in_turn: true, ..it };
    let beside = |it: fwd::Schedule, ctas| fwd::Schedule { ctas, ..it };
    let share = (sms / tiles.max(1)).max(2);
    let all = if tiles * 10 >= sms * 9 {
        vec![
            stays(one(64, 3), 1),
            stays(one(128, 3), 1),
            stays(one(64, 2), 2),
            stays(one(32, 3), 3),
            both(32, 2),
            both(32, 8),
            both(64, 4),
            in_turn(parts(both(32, 4), 2)),
            in_turn(cluster(both(32, 4), 2)),
            in_turn(parts(beside(one(64, 2), 2), 2)),
        ]
    } else if share <= 4 {
        vec![
            in_turn(cluster(both(64, 4), 2)),
            in_turn(cluster(both(32, 4), 2)),
            cluster(one(128, 3), 2),
            in_turn(cluster(one(64, 3), 4)),
            parts(both(64, 4), share),
            in_turn(parts(both(64, 4), share)),
            parts(one(128, 3), share),
            in_turn(parts(one(128, 3), share)),
            in_turn(parts(one(64, 4), share)),
            in_turn(parts(beside(one(64, 2), 2), 2 * share)),
        ]
    } else {
        vec![
            parts(one(128, 3), share),
            in_turn(parts(one(128, 3), share)),
            parts(one(64, 6), share),
            in_turn(parts(one(64, 6), share)),
            parts(both(64, 4), share),
            in_turn(parts(both(64, 4), share)),
            parts(one(64, 6), share / 2),
            in_turn(parts(beside(one(64, 2), 2), 2 * share)),
            in_turn(cluster(one(64, 4), 8)),
            in_turn(cluster(both(64, 4), 8)),
        ]
    };
    let fits =
        |it: &Schedule| *it != chosen.main().schedule && Plan::with_schedule(problem, hardware, *it).is_ok();
    Ok(all.into_iter().map(Schedule::Sm90Fwd).filter(fits).collect())
}

/// What was asked for.
struct Options {
    json: Option<String>,
    seconds: f64,
    only: String,
    list: bool,
}

fn options() -> Result<Options, String> {
    let mut options = Options { json: None, seconds: 90.0, only: String::new(), list: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match word.as_str() {
            "--json" => options.json = Some(value()?),
            "--only" => options.only = value()?,
            "--seconds" => options.seconds = value()?.parse().map_err(|_| "--seconds needs a number")?,
            "--list" => options.list = true,
            _ => return Err(format!("{word} is not known; see the top of this example")),
        }
    }
    Ok(options)
}

fn run(options: &Options) -> Result<bool, String> {
    let hardware = Hardware::typical(Target::Sm90a);
    let wanted = |member: &Member| member.cell.label().contains(&options.only);
    let members: Vec<Member> = Matrix::Decode.usual_cells().into_iter().filter(wanted).collect();
    let mut sweep = Vec::new();
    for member in &members {
        let schedules = candidates(&member.cell.problem(), &hardware)?;
        sweep.push(schedules.iter().map(ToString::to_string).collect::<Vec<_>>());
    }
    if options.list {
        for (member, schedules) in members.iter().zip(&sweep) {
            println!("{}\n  {}", member.cell.label(), schedules.join("\n  "));
        }
        return Ok(true);
    }
    let setup = Setup {
        ordinal: 0,
        ours: Ours::Planner,
        peers: Vec::new(),
        installed: &[],
        cache: Cache::Cold,
        regime: Regime::Bursts,
        call_clock: false,
        first_call: false,
        rounds: Some(10),
        warmups: 1,
        margin: 0.01,
    };
    let started = Instant::now();
    let mut bench = GpuBench::start(setup, &members, &mut |_| {})?;
    let (mut cells, mut right) = (Vec::new(), true);
    for (i, (member, schedules)) in members.iter().zip(sweep).enumerate() {
        let left = Duration::from_secs_f64(options.seconds).saturating_sub(started.elapsed());
        if left.is_zero() || interrupt::requested() {
            eprintln!("{} of {} cells are left for want of time", members.len() - i, members.len());
            right = false;
            break;
        }
        bench.take(Ours::Beside(schedules));
        let budget = left / (members.len() - i) as u32;
        let outcome = bench.run(member, budget, &interrupt::requested, &mut |_, _| {})?;
        println!("{}", member.cell.label());
        let mut rows: Vec<_> = outcome.results.iter().collect();
        rows.sort_by(|a, b| a.p50_us.unwrap_or(f64::MAX).total_cmp(&b.p50_us.unwrap_or(f64::MAX)));
        for row in rows {
            right &= row.p50_us.is_some();
            println!("  {:8.2} us  {}", row.p50_us.unwrap_or(f64::NAN), row.name);
        }
        cells.push(outcome);
    }
    if let Some(path) = &options.json {
        let report = serde_json::json!({
            "what": "decode_sweep: kernel clock, cold cache, shuffled; the planner's choice first",
            "gpu": bench.facts(),
            "seconds": started.elapsed().as_secs_f64(),
            "cells": cells,
        });
        std::fs::write(path, format!("{report:#}\n")).map_err(|error| format!("{path}: {error}"))?;
    }
    Ok(right)
}

fn main() -> ExitCode {
    // The workers that time things are this very program.
    if std::env::args().nth(1).is_some_and(|word| word == "gpu-worker") {
        return cli::main();
    }
    match options().and_then(|options| run(&options)) {
        Ok(right) => ExitCode::from(u8::from(!right)),
        Err(why) => {
            eprintln!("{why}");
            ExitCode::from(2)
        }
    }
}
