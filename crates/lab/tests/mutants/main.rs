//! Would a fault in a kernel be seen? Every barrier, wait, arrival, commit, fence, swizzle term, descriptor constant
//! and bound of the emitted kernels is dropped or altered in turn; the simulator must object, or the numbers must.
//!
//! Mutants that survive are listed in `HARMLESS` with the reason why they change nothing. The list is exact: an
//! entry that no mutant needs fails the test as much as a mutant without an entry.

mod faults;
mod harmless;
mod trials;

use std::collections::BTreeMap;
use std::fmt::Write;

use flashcore::plan::{Schedule, Target};
use flashcore::sim::SimGpu;
use flashcore_ptx::check;
use rayon::prelude::*;

use self::faults::{Change, Fault, Mutants, apply, plant};
use self::harmless::HARMLESS;
use self::trials::Trial;

/// Kernels that between them have every part: each rung, and the pipelines of one, two and three stages.
const AMPERE: [&str; 5] = [
    "scalar:warps=2",
    "sm80_mma:block_n=32",
    "sm80_fwd:block_m=64,block_n=32,warps=4,stages=1,q_in_regs=0,order=head",
    "sm80_fwd:block_m=64,block_n=32,warps=4,stages=2,q_in_regs=1,order=longest",
    "sm80_fwd:block_m=128,block_n=48,warps=4,stages=3,q_in_regs=0,order=head",
];

/// What these have besides for packed sequences and for keys in pages.
const AMPERE_PLACED: [&str; 2] = [
    "sm80_fwd:block_m=64,block_n=96,warps=4,stages=1,q_in_regs=1,order=longest",
    "sm80_fwd:block_m=64,block_n=48,warps=4,stages=2,q_in_regs=0,order=head",
];

/// The kernel for few queries: all keys in one block, and in parts.
const DECODING: [&str; 2] =
    ["sm80_decode:warps=2,keys=16,stages=2,parts=1", "sm80_decode:warps=2,keys=16,stages=3,parts=3"];

/// The backward kernels: both gradients of keys, with one slot and with two, and those of queries.
const BACKWARD: [&str; 3] = [
    "sm80_bwd:of=dkdv,block=64,walk=32,warps=4,stages=1,order=head",
    "sm80_bwd:of=dkdv,block=64,walk=16,warps=4,stages=2,order=longest",
    "sm80_bwd:of=dq,block=64,walk=32,warps=4,stages=2,order=longest",
];

/// The Hopper kernel: warpgroups that take turns, in persistent blocks; one warpgroup, two blocks per multiprocessor
/// and tiles in pairs; keys that the blocks of a cluster share, and their warpgroups.
const HOPPER: [&str; 4] = [
    "sm90_fwd:warpgroups=2,block_n=32,stages=2,q_stages=2,ctas=1,split=1,pingpong=1,lazy=1,poly=0,persistent=1,pairs=0",
    "sm90_fwd:warpgroups=1,block_n=32,stages=2,q_stages=1,ctas=2,split=1,pingpong=0,lazy=0,poly=0,persistent=1,pairs=1",
    "sm90_fwd:warpgroups=1,block_n=16,stages=2,q_stages=1,ctas=1,split=2,pingpong=0,lazy=1,poly=0,persistent=0,pairs=0",
    "sm90_fwd:warpgroups=2,block_n=16,stages=2,q_stages=1,ctas=1,split=2,pingpong=0,lazy=1,poly=0,persistent=0,pairs=0,together=1",
];

/// Three warpgroups, which take turns, with one slot of queries; and four; two blocks of two on a multiprocessor; and
/// keys that four blocks share.
const HOPPER_TOO: [&str; 4] = [
    "sm90_fwd:warpgroups=3,block_n=32,stages=2,q_stages=1,ctas=1,split=1,pingpong=1,lazy=0,poly=0,persistent=1,pairs=1",
    "sm90_fwd:warpgroups=4,block_n=32,stages=2,q_stages=2,ctas=1,split=1,pingpong=1,lazy=1,poly=0,persistent=1,pairs=0",
    "sm90_fwd:warpgroups=2,block_n=32,stages=2,q_stages=1,ctas=2,split=1,pingpong=1,lazy=1,poly=0,persistent=1,pairs=0",
    "sm90_fwd:warpgroups=1,block_n=16,stages=2,q_stages=1,ctas=1,split=4,pingpong=0,lazy=1,poly=0,persistent=0,pairs=0",
];

/// Blocks that share keys by length, with one slot for queries and with two.
const HOPPER_BY_LENGTH: [&str; 2] = [
    "sm90_fwd:warpgroups=1,block_n=32,stages=2,q_stages=1,ctas=1,split=1,pingpong=0,lazy=1,poly=0,persistent=1,pairs=0,by_length=1",
    "sm90_fwd:warpgroups=1,block_n=16,stages=3,q_stages=2,ctas=1,split=1,pingpong=0,lazy=0,poly=0,persistent=1,pairs=0,by_length=1",
];

/// Hopper's backward kernel: steps of 64 queries with warpgroups that take turns, and steps of 128 without.
const HOPPER_BACKWARD: [&str; 2] =
    ["sm90_bwd:block_m=64,stages=2,pingpong=1", "sm90_bwd:block_m=128,stages=2,pingpong=0"];

/// The same, where the block that adds last to a tile of dQ rounds it, and head dims that each takes.
const HOPPER_ROUNDS: [(&str, usize); 2] = [
    ("sm90_bwd:block_m=64,stages=2,pingpong=1,rounds=1", 72),
    ("sm90_bwd:block_m=128,stages=2,pingpong=0,rounds=1", 40),
];

/// Hopper's backward kernel for wide heads: blocks of queries whose warpgroups take turns, and such that do not, with tiles
/// that are waited for panel by panel.
const HOPPER_WIDE: [&str; 2] =
    ["sm90_bwd_wide:stages=2,pingpong=1", "sm90_bwd_wide:stages=3,pingpong=0,piecewise=1"];

/// The mutants that lived, by schedule and by where and what was changed.
type Survivors = BTreeMap<(String, String, Change), usize>;

/// Plants every fault in a kernel, or in what some files emit of it. Returns how many there are.
fn survivors(text: &str, gpu: &SimGpu, trials: &[Trial], files: &[&str], lived: &mut Survivors) -> usize {
    let mut mutants = Mutants::new();
    let mut modules = Vec::new();
    for (i, trial) in trials.iter().enumerate() {
        trial.run(gpu).unwrap_or_else(|why| panic!("{text} fails unchanged: {why}"));
        let plan = gpu.plan(&trial.operands.placed().problem).unwrap();
        let module = plan.main().module(plan.target).unwrap();
        plant(&module.kernels[0], i, &mut mutants);
        modules.push(module);
    }
    let wanted = |fault: &Fault| files.is_empty() || files.iter().any(|file| fault.file.ends_with(file));
    let mutants: Vec<_> = mutants.into_iter().filter(|(fault, _)| wanted(fault)).collect();
    let lives = |(fault, places): &&(Fault, Vec<(usize, Vec<usize>)>)| {
        let runs = places.iter().all(|(trial, at)| {
            let (at, change) = (at.clone(), fault.change);
            let main = modules[*trial].kernels[0].name.clone();
            let mutant = gpu.clone().with_edit(move |module| {
                let kernel = &mut module.kernels[0];
                // The other launches of a plan stay as they are.
                if kernel.name == main {
                    apply(kernel, &at, change);
                }
            });
            trials[*trial].run(&mutant).is_ok()
        });
        // A fault that is found without running counts, too.
        let refused = |(trial, at): &(usize, Vec<usize>)| {
            let mut mutant = modules[*trial].clone();
            apply(&mut mutant.kernels[0], at, fault.change);
            !check::module(&mutant).is_empty()
        };
        runs && !places.iter().any(refused)
    };
    let living: Vec<_> = mutants.par_iter().filter(lives).map(|(fault, _)| fault).collect();
    for Fault { place, file, line, change, nth } in living {
        let place = format!("{place} #{nth} ({file}:{line})");
        *lived.entry((text.to_string(), place, *change)).or_default() += 1;
    }
    mutants.len()
}

/// Requires that every mutant which lived is on the list, and that every entry of the list stands for as many mutants
/// of each of its schedules as it says.
fn judge(total: usize, lived: &Survivors, schedules: &[&str]) {
    let mut report = String::new();
    let mut unknown = 0;
    for ((text, place, change), count) in lived {
        if !HARMLESS.iter().any(|entry| entry.fits(text, place, *change)) {
            unknown += count;
            writeln!(report, "{count} × {change:?} at {place} in {text}").unwrap();
        }
    }
    for entry in HARMLESS {
        for text in schedules.iter().filter(|text| entry.is_for(text)) {
            let here = |key: &&(String, String, Change)| key.0 == *text && entry.fits(&key.0, &key.1, key.2);
            let count: usize = lived.keys().filter(here).map(|key| lived[key]).sum();
            if count != entry.count {
                writeln!(report, "{count} lived, {} are known: {entry} in {text}", entry.count).unwrap();
            }
        }
    }
    let harmless: usize = lived.values().sum::<usize>() - unknown;
    println!("{total} mutants, {harmless} harmless by the list, {unknown} others lived");
    assert!(report.is_empty(), "{total} mutants; not as the list says:\n{report}");
}

fn every_fault_is_found(target: Target, sms: Option<u32>, schedules: &[&str], trials: &[Trial]) {
    let mut lived = Survivors::new();
    let mut total = 0;
    for text in schedules {
        let schedule: Schedule = text.parse().unwrap();
        let gpu = SimGpu::new(target).with_schedule(schedule);
        let gpu = sms.into_iter().fold(gpu, SimGpu::with_sms);
        total += survivors(text, &gpu, trials, &[], &mut lived);
    }
    judge(total, &lived, schedules);
}

#[test]
fn every_fault_planted_in_a_kernel_for_ampere_is_found_or_known_to_be_harmless() {
    every_fault_is_found(Target::Sm80, None, &AMPERE, &trials::ampere());
}

/// Run it with `cargo test --release -p flashcore-lab --test mutants -- --ignored` after a change to packed sequences or pages
/// on Ampere.
#[test]
#[ignore = "a quarter of a minute, for code that seldom changes"]
fn every_fault_planted_in_what_finds_sequences_and_pages_is_found_or_known_to_be_harmless() {
    every_fault_is_found(Target::Sm80, None, &AMPERE_PLACED, &trials::placed());
}

/// Run it with `cargo test --release -p flashcore-lab --test mutants -- --ignored` after a change to the kernel.
#[test]
#[ignore = "a minute, for code that seldom changes"]
fn every_fault_planted_in_the_kernel_for_few_queries_is_found_or_known_to_be_harmless() {
    every_fault_is_found(Target::Sm89, None, &DECODING, &trials::decoding());
}

#[test]
fn every_fault_planted_in_a_backward_kernel_is_found_or_known_to_be_harmless() {
    every_fault_is_found(Target::Sm80, None, &BACKWARD, &trials::backward());
}

#[test]
fn every_fault_planted_in_the_kernel_for_hopper_is_found_or_known_to_be_harmless() {
    every_fault_is_found(Target::Sm90a, Some(2), &HOPPER, &trials::hopper());
}

/// The rest of the kernel is that of other blocks.
#[test]
fn every_fault_planted_in_what_shares_keys_by_length_is_found() {
    let files = ["parts/shares.rs", "fwd/by_length.rs", "fwd/partial.rs"];
    for text in HOPPER_BY_LENGTH {
        let gpu = SimGpu::new(Target::Sm90a).with_schedule(text.parse().unwrap()).with_sms(4);
        let mut lived = Survivors::new();
        let total = survivors(text, &gpu, &trials::by_length(), &files, &mut lived);
        // A sequence behind the last one counts for nothing.
        lived.retain(|(_, place, _), _| {
            !place.starts_with("shares: how much each block has / - / setp.lt.s32")
        });
        assert!(total > 5 && lived.is_empty(), "{total} mutants, of which these lived: {lived:?}");
    }
}

/// Takes minutes: run it with `cargo test --release -p flashcore-lab --test mutants -- --ignored` after a change to the
/// kernel.
#[test]
#[ignore = "takes minutes"]
fn every_fault_planted_in_the_backward_kernel_for_hopper_is_found_or_known_to_be_harmless() {
    every_fault_is_found(Target::Sm90a, None, &HOPPER_BACKWARD, &trials::hopper_backward());
}

/// Takes minutes: run it with `cargo test --release -p flashcore-lab --test mutants -- --ignored` after a change to the
/// kernel.
#[test]
#[ignore = "takes minutes"]
fn every_fault_planted_in_the_backward_kernel_that_rounds_is_found_or_known_to_be_harmless() {
    let mut lived = Survivors::new();
    let totals = HOPPER_ROUNDS.map(|(text, head_dim)| {
        let gpu = SimGpu::new(Target::Sm90a).with_schedule(text.parse().unwrap());
        survivors(text, &gpu, &trials::hopper_rounds(head_dim), &[], &mut lived)
    });
    judge(totals.iter().sum(), &lived, &HOPPER_ROUNDS.map(|(text, _)| text));
}

/// Takes minutes: run it with `cargo test --release -p flashcore-lab --test mutants -- --ignored` after a change to the
/// kernel.
#[test]
#[ignore = "takes minutes"]
fn every_fault_planted_in_the_backward_kernel_for_wide_heads_is_found_or_known_to_be_harmless() {
    every_fault_is_found(Target::Sm90a, None, &HOPPER_WIDE, &trials::hopper_wide());
}

/// Takes minutes: run it with `cargo test --release -p flashcore-lab --test mutants -- --ignored` after a change to the
/// kernel.
#[test]
#[ignore = "takes minutes, and shares most of its code with the others"]
fn every_fault_planted_in_the_other_blocks_for_hopper_is_found_or_known_to_be_harmless() {
    every_fault_is_found(Target::Sm90a, Some(2), &HOPPER_TOO, &trials::hopper());
}
