//! The corpus through every engine of this machine, with one line per engine: what passed, what was skipped, and why.
//!
//! `cargo test --release -p flashcore-lab --test corpus` runs the quick cases, and with `-- --include-ignored` all of
//! them. Single cases: `flashcore verify --full --filter NAME`.

use flashcore::plan::Kernel;
use flashcore::{DType, Keys, Pass, Problem};
use flashcore_lab::cases::{Case, Passes, Tier, corpus_of};
use flashcore_lab::check::{Outcome, Prepared};
use flashcore_lab::crew;
use flashcore_lab::engine::{self, Engine};
use flashcore_lab::explain::explain;
use flashcore_lab::tally::Tally;
use libtest_mimic::{Arguments, Failed, Trial};

/// Failures that are explained; the others are counted.
const EXPLAINED: usize = 10;

/// One case on every engine, each with what is wrong in words.
fn check(case: &Case, engines: &[Box<dyn Engine>]) -> Vec<(Outcome, Option<String>)> {
    let prepared = Prepared::new(case.clone());
    let one = |engine: &dyn Engine| {
        let outcome = prepared.check(engine);
        let wrong = match &outcome {
            Outcome::Failed(faults) => Some(explain(&prepared, engine, faults)),
            Outcome::Skipped(why) if !may_skip(engine.name(), &case.problem, why) => {
                Some(format!("{} is skipped by {}, which supports it: {why}", case.name, engine.name()))
            }
            _ => None,
        };
        (outcome, wrong)
    };
    engines.iter().map(|engine| one(engine.as_ref())).collect()
}

/// What an engine need not compute: the CPU computes everything; a GPU's kernels take 16-bit types and head dims in multiples
/// of 8 up to 256, each of them one pass, some take f8 and multiples of 16, and a simulated one nothing large.
fn may_skip(engine: &str, problem: &Problem, why: &str) -> bool {
    let step = if problem.is_eight_bit() || engine.contains("sm80_decode") { 16 } else { 8 };
    let odd = |head_dim: usize| !head_dim.is_multiple_of(step) || head_dim > 256;
    let eight =
        problem.is_eight_bit() && why.contains("e4m3") && !["sim-hopper", "sim-ada"].contains(&engine);
    // GPUs' kernels take blocks of keys with descales of their own where a tile of keys lies in one.
    let tile = if problem.dtype_kv.is_some() { 16 } else { 32 };
    let simple = ["scalar", "sm80_mma"].iter().any(|kernel| engine.contains(kernel));
    let blocks = problem.descale_keys.is_some_and(|keys| simple || !keys.is_multiple_of(tile));
    let others = engine == "sim-ada" && !problem.is_eight_bit();
    let beyond = problem.dtype == DType::F32 || odd(problem.head_dim) || odd(problem.head_dim_v);
    // Planners take another kernel then.
    let wide = engine.contains("sm90_bwd")
        && !engine.contains("wide")
        && problem.head_dim.max(problem.head_dim_v) > 128;
    // Few kernels take sequences that are packed or in pages.
    let placed = !(problem.is_dense() || takes(engine, problem));
    let large = engine.starts_with("sim") && why.contains("would take long to simulate");
    !engine.starts_with("cpu")
        && (beyond || wide || large || placed || eight || blocks || others || !computes(engine, problem.pass))
}

/// Whether an engine has a kernel for a problem whose sequences are packed or in pages.
fn takes(engine: &str, problem: &Problem) -> bool {
    let (paged, odd) = match problem.keys {
        Keys::Paged { page, .. } => (true, !page.is_multiple_of(16)),
        _ => (false, false),
    };
    let planned = matches!(engine, "sim-hopper" | "sim-ada");
    if problem.dtype_kv.is_some() {
        return planned && !odd;
    }
    let kernel = match problem.pass {
        Pass::Forward => {
            let whole = ["sm80_decode", "sm90_fwd"].iter().any(|kernel| engine.contains(kernel));
            engine.contains("sm80_fwd") || whole && !odd
        }
        Pass::Backward => engine.contains("_bwd"),
    };
    (planned || kernel) && !(paged && problem.pass == Pass::Backward)
}

/// Whether an engine computes a pass: one that is named after a kernel computes only that kernel's.
fn computes(engine: &str, pass: Pass) -> bool {
    let others = match pass {
        Pass::Forward => Kernel::BACKWARD.to_vec(),
        Pass::Backward => Kernel::LADDER.into_iter().chain([Kernel::Sm80Decode]).collect(),
    };
    !others.iter().any(|kernel| engine.split('-').any(|part| part == kernel.name()))
}

/// Simulated kernels that the quick test leaves out: `sim-ada` and `sim-hopper` run two of them where a planner chooses them, and the
/// mutants' test, which needs them right, the third.
const SEEN_ELSEWHERE: [&str; 4] =
    ["sim-sm80_decode", "sim-sm80_decode-early", "sim-sm90_fwd", "sim-sm80_mma"];

/// Simulated kernels of the backward pass take their time: of those, the quick test has Ampere's, and what the planner chooses
/// for Hopper, which are all of them but for the order of asynchronous effects. Ada's simulator is for 8-bit floats, which have no
/// gradients.
fn is_for(engine: &str, pass: Pass, tier: Tier) -> bool {
    if engine == "sim-ada" && pass == Pass::Backward {
        return false;
    }
    if tier == Tier::Quick && SEEN_ELSEWHERE.contains(&engine) {
        return false;
    }
    let backward = Kernel::BACKWARD.iter().any(|kernel| engine.contains(kernel.name()));
    pass == Pass::Forward || tier == Tier::Full || !backward || engine == "sim-sm80_bwd"
}

fn run(pass: Pass, tier: Tier) -> Result<(), Failed> {
    let engines = engine::all();
    let engines: Vec<_> = engines.into_iter().filter(|engine| is_for(engine.name(), pass, tier)).collect();
    let all = corpus_of(Passes::One(pass));
    let cases: Vec<Case> = all.into_iter().filter(|case| case.tier == tier).collect();
    let mut tallies: Vec<Tally> = engines.iter().map(|engine| Tally::new(engine.name())).collect();
    let mut wrong = Vec::new();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    crew::in_order(
        &cases,
        threads,
        &|| false,
        |case| check(case, &engines),
        |at, checked| {
            for ((outcome, words), tally) in checked.into_iter().zip(&mut tallies) {
                tally.count(&cases[at].name, &outcome);
                wrong.extend(words);
            }
        },
    );
    for tally in &tallies {
        let Tally { engine, passed, skipped, failed, .. } = tally;
        println!(
            "{engine:<20} {passed:>5} passed {failed:>5} failed {skipped:>5} skipped  {}",
            tally.reasons()
        );
    }
    let busy = tallies.iter().filter(|tally| computes(&tally.engine, pass));
    let idle = busy.filter(|tally| tally.passed == 0);
    wrong.extend(idle.map(|tally| format!("{} passes nothing", tally.engine)));
    if wrong.is_empty() {
        return Ok(());
    }
    let count = wrong.len();
    wrong.truncate(EXPLAINED);
    Err(format!("{count} wrong, the first of them:\n{}", wrong.join("\n")).into())
}

fn main() {
    let trials = vec![
        Trial::test("the quick corpus on every engine", || run(Pass::Forward, Tier::Quick)),
        Trial::test("the quick corpus backward on every engine", || run(Pass::Backward, Tier::Quick)),
        Trial::test("the rest of the corpus on every engine", || run(Pass::Forward, Tier::Full))
            .with_ignored_flag(true),
        Trial::test("the rest of the corpus backward on every engine", || run(Pass::Backward, Tier::Full))
            .with_ignored_flag(true),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
