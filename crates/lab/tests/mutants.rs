//! Would a fault in a kernel be seen? Every barrier, wait, commit, swizzle term and bound of the emitted kernels is
//! dropped or altered in turn; the simulator must object, or the numbers must.
//!
//! Mutants that survive are listed in `HARMLESS` with the reason why they change nothing. The list is exact: an
//! entry that no mutant needs fails the test as much as a mutant without an entry.

use std::collections::BTreeMap;
use std::fmt::Write;

use flashcore::plan::{Schedule, Target};
use flashcore::sim::{AsyncMode, Config, SimGpu};
use flashcore::{DType, Device, Mask, Problem};
use flashcore_lab::guarded::Arrangement;
use flashcore_lab::inputs::Distribution;
use flashcore_lab::operands::Operands;
use flashcore_lab::rule::Yardstick;
use flashcore_ptx::{Alu, Arg, Cmp, Kernel, NumType, Op};
use rayon::prelude::*;

/// Kernels that between them have every part: each rung, and the pipelines of one, two and three stages.
const SCHEDULES: [&str; 5] = [
    "scalar:warps=2",
    "sm80_mma:block_n=32",
    "sm80_fwd:block_m=64,block_n=32,warps=4,stages=1,q_in_regs=0,order=head",
    "sm80_fwd:block_m=64,block_n=32,warps=4,stages=2,q_in_regs=1,order=longest",
    "sm80_fwd:block_m=128,block_n=48,warps=4,stages=3,q_in_regs=0,order=head",
];

/// A change to one instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    /// The instruction is dropped.
    Drop,
    /// A wait lets one group more stay open.
    WaitLess,
    /// An exclusive or becomes a copy of its first operand: a term of the swizzle is lost.
    NoSwizzle,
    /// A comparison takes its edge in, or leaves it out.
    OffByOne,
}

/// The changes that can be made to an instruction.
fn changes(op: Op) -> Vec<Change> {
    match op {
        Op::BarSync { .. } | Op::BarArrive { .. } | Op::BarWarpSync | Op::CpAsyncCommit => vec![Change::Drop],
        Op::CpAsyncWait(_) => vec![Change::Drop, Change::WaitLess],
        Op::Alu(Alu::XorB32) => vec![Change::NoSwizzle],
        Op::Setp { ty: NumType::S32 | NumType::U32, cmp } if edge(cmp) != cmp => vec![Change::OffByOne],
        _ => vec![],
    }
}

fn edge(cmp: Cmp) -> Cmp {
    match cmp {
        Cmp::Lt => Cmp::Le,
        Cmp::Le => Cmp::Lt,
        Cmp::Gt => Cmp::Ge,
        Cmp::Ge => Cmp::Gt,
        other => other,
    }
}

/// A fault, named by where the emitter makes it, so that it means the same in the kernels of all trials: the section
/// and comment, the emitter's line, and which of the instructions that this line makes there. A comparison is changed
/// in all of them at once, since a mask is wrong in all its elements or in none.
type Fault = (String, String, u32, Change, usize);

/// The instructions of each trial's kernel that a fault changes.
type Mutants = BTreeMap<Fault, Vec<(usize, Vec<usize>)>>;

fn plant(kernel: &Kernel, trial: usize, mutants: &mut Mutants) {
    let mut here: Mutants = BTreeMap::new();
    for (at, inst) in kernel.body.iter().enumerate() {
        for change in changes(inst.op) {
            let mut fault = (place(kernel, at), inst.loc.file().to_string(), inst.loc.line(), change, 0);
            if change == Change::OffByOne {
                here.entry(fault).or_insert_with(|| vec![(trial, Vec::new())])[0].1.push(at);
            } else {
                while here.contains_key(&fault) {
                    fault.4 += 1;
                }
                here.insert(fault, vec![(trial, vec![at])]);
            }
        }
    }
    for (fault, mut places) in here {
        mutants.entry(fault).or_default().append(&mut places);
    }
}

fn apply(kernel: &mut Kernel, at: usize, change: Change) {
    let inst = &mut kernel.body[at];
    match (change, inst.op) {
        (Change::Drop, _) => {
            kernel.body.remove(at);
        }
        (Change::WaitLess, Op::CpAsyncWait(pending)) => inst.op = Op::CpAsyncWait(pending + 1),
        (Change::NoSwizzle, _) => {
            inst.op = Op::Alu(Alu::MovB32);
            // The register operand, where one is a constant.
            let kept =
                *inst.src.iter().find(|arg| matches!(arg, Arg::Reg(_))).expect("an xor reads a register");
            inst.src = vec![kept];
        }
        (Change::OffByOne, Op::Setp { cmp, ty }) => inst.op = Op::Setp { cmp: edge(cmp), ty },
        (change, op) => unreachable!("{change:?} does not apply to {op:?}"),
    }
}

/// A problem with its inputs and the truth about them.
struct Trial {
    operands: Operands,
    truth: Yardstick,
}

/// Problems in which every bound is met exactly: tails, empty rows, windows, groups, key lengths.
fn trials() -> Vec<Trial> {
    let f16 = |batch, heads, len, head_dim| Problem::new(batch, heads, len, head_dim, DType::F16).with_lse();
    let window = Mask::Window { left: Some(150), right: Some(10) };
    let problems = [
        (f16(1, 2, 101, 64).with_kv(1, 300).with_mask(Mask::Causal), None),
        (f16(1, 1, 500, 64).with_head_dim_v(72).with_mask(window), None),
        (f16(3, 1, 70, 64).with_kv(1, 130).with_key_lengths(), Some(vec![130, 37, 0])),
        (f16(1, 1, 130, 8).with_kv(1, 65).with_mask(Mask::Causal), None),
        (f16(1, 1, 128, 96).with_kv(1, 384), None),
    ];
    let trial = |(problem, lengths)| {
        let operands = Operands::draw(problem, lengths, Arrangement::Bhsd, Distribution::Normal, 7);
        Trial { truth: operands.yardstick(), operands }
    };
    problems.into_iter().map(trial).collect()
}

/// Whether a run is right and nothing is said against it.
fn passes(gpu: SimGpu, trial: &Trial) -> bool {
    let Operands { q, k, v, .. } = &trial.operands;
    let run = trial.operands.attention().with_lse().run(&Device::sim(gpu), &q.view(), &k.view(), &v.view());
    run.is_ok_and(|out| {
        let lse = out.lse.map(|lse| lse.to_f32());
        trial.truth.judge(&out.o.to_f32(), lse.as_deref()).passed()
    })
}

/// The ways of running: asynchronous effects late and early, and warps interleaved.
fn configs() -> [Config; 3] {
    // A mutant may wait for ever; no honest run here needs a tenth of this.
    let config = Config { budget: 40_000_000, threads: 1, ..Config::default() };
    [
        config.clone(),
        Config { async_mode: AsyncMode::Early, ..config.clone() },
        Config { async_mode: AsyncMode::Random(3), seed: 5, ..config },
    ]
}

/// Why some mutants change nothing, by schedule, place and change.
const HARMLESS: &[(&str, [&str; 2], Change, &str)] = &[
    (
        "sm80_fwd",
        ["masked tiles at the window's start", "fragment.rs"],
        Change::OffByOne,
        "these tiles end before the last key of every row, so the comparison with it always holds",
    ),
    (
        "sm80_fwd:block_m=64,block_n=32,warps=4,stages=1",
        ["masked tiles at the window's start / this tile's V", "copy.rs"],
        Change::OffByOne,
        "these tiles have all their keys, so the comparison with the last one always holds",
    ),
    (
        "sm80_fwd:block_m=64,block_n=32,warps=4,stages=1",
        ["epilogue: lse", "sm80_fwd.rs"],
        Change::Drop,
        "with one stage the barrier after the scores already parts the reads of the queries from the output",
    ),
    (
        "sm80_fwd:block_m=64,block_n=32,warps=4,stages=2,q_in_regs=1",
        ["epilogue: lse", "sm80_fwd.rs"],
        Change::Drop,
        "the queries were read into registers before the first tile's barrier",
    ),
    (
        "sm80_fwd",
        ["the last K tile", "copy.rs"],
        Change::OffByOne,
        "the row too many lands at the start of the next tile in shared memory, which is filled after it",
    ),
    (
        "sm80_fwd:block_m=128,block_n=48",
        ["tile ahead", "copy.rs"],
        Change::OffByOne,
        "the row too many lands at the start of the next tile in shared memory, which is filled after it",
    ),
    (
        "sm80_mma",
        ["main loop / -", "sm80_mma.rs"],
        Change::OffByOne,
        "one tile more begins behind the last key, and is masked whole",
    ),
];

/// Where an instruction stands, in the author's words.
fn place(kernel: &Kernel, at: usize) -> String {
    let described = kernel.describe(at);
    format!("{} / {}", described.section.unwrap_or("-"), described.comment.unwrap_or("-"))
}

#[test]
fn every_fault_planted_in_a_kernel_is_found_or_known_to_be_harmless() {
    let trials = trials();
    let mut total = 0;
    let mut survivors: BTreeMap<(String, String, Change), usize> = BTreeMap::new();
    for text in SCHEDULES {
        let schedule: Schedule = text.parse().unwrap();
        let gpu = SimGpu::new(Target::Sm80).with_schedule(schedule);
        for trial in &trials {
            for config in configs() {
                assert!(passes(gpu.clone().with_config(config), trial), "{text} fails unchanged");
            }
        }
        let mut mutants = Mutants::new();
        for (i, trial) in trials.iter().enumerate() {
            let module = gpu.plan(&trial.operands.problem).unwrap().module().unwrap();
            plant(&module.kernels[0], i, &mut mutants);
        }
        total += mutants.len();
        let mutants: Vec<_> = mutants.into_iter().collect();
        let lived: Vec<&Fault> = mutants
            .par_iter()
            .filter(|((.., change, _), places)| {
                places.iter().all(|(trial, at)| {
                    let (at, change) = (at.clone(), *change);
                    let mutant = gpu.clone().with_edit(move |module| {
                        at.iter().rev().for_each(|&at| apply(&mut module.kernels[0], at, change));
                    });
                    configs()
                        .into_iter()
                        .all(|config| passes(mutant.clone().with_config(config), &trials[*trial]))
                })
            })
            .map(|(fault, _)| fault)
            .collect();
        for (place, file, line, change, _) in lived {
            let place = format!("{place} ({file}:{line})");
            *survivors.entry((text.to_string(), place, *change)).or_default() += 1;
        }
    }
    let known = |text: &str, place: &str, change: Change| {
        HARMLESS
            .iter()
            .any(|&(s, p, c, _)| text.starts_with(s) && p.iter().all(|p| place.contains(p)) && c == change)
    };
    let mut report = String::new();
    let mut unknown = 0;
    for ((text, place, change), count) in &survivors {
        if !known(text, place, *change) {
            unknown += count;
            writeln!(report, "{count} × {change:?} at {place} in {text}").unwrap();
        }
    }
    for &(s, p, c, reason) in HARMLESS {
        let needed = survivors.keys().any(|(text, place, change)| {
            text.starts_with(s) && p.iter().all(|p| place.contains(p)) && *change == c
        });
        if !needed {
            writeln!(report, "no longer needed: {s} {p:?} {c:?} ({reason})").unwrap();
        }
    }
    let harmless: usize = survivors.values().sum::<usize>() - unknown;
    println!("{total} mutants, {harmless} harmless by the list, {unknown} others lived");
    assert!(report.is_empty(), "{total} mutants, of which lived:\n{report}");
}
