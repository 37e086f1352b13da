//! The hot loops, compiled for the processor at hand.
//!
//! Lane loops are ordinary Rust that the compiler vectorises. On x86 the baseline has no AVX2 and no fused
//! multiply-add, so the loops are compiled a second time with both, a third time with AVX-512, and chosen at run
//! time. Products of matrices are written for AVX-512 by hand. Results are the same.

pub mod alu;
#[cfg(target_arch = "x86_64")]
mod alu_avx512;
pub mod matrices;
#[cfg(target_arch = "x86_64")]
mod matrices_avx512;
pub mod mma;
#[cfg(target_arch = "x86_64")]
mod mma_avx512;
pub mod short;

use flashcore_ptx::MatrixTy;

use crate::machine::Tally;
use crate::machine::regs::{Aligned, Regs, Row, Row64};
use crate::machine::warp::Warp;
use crate::memory::lines;
use crate::program::{Exec, Program, Run, Slot};
use crate::vectors::matrices::Survey;
use crate::vectors::mma::{ATile, BTile, MmaInst, Tiles};
use crate::vectors::short::ShortSum;

/// The vector instructions that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What every processor of the architecture has.
    Baseline,
    /// AVX2 with FMA.
    Avx2,
    /// That and AVX-512.
    Avx512,
}

impl Level {
    /// The best that this processor has.
    pub fn detect() -> Level {
        #[cfg(target_arch = "x86_64")]
        {
            let has = std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("fma")
                && std::arch::is_x86_feature_detected!("f16c")
                && std::arch::is_x86_feature_detected!("bmi2")
                && std::arch::is_x86_feature_detected!("lzcnt")
                && std::arch::is_x86_feature_detected!("popcnt");
            let wide = std::arch::is_x86_feature_detected!("avx512f")
                && std::arch::is_x86_feature_detected!("avx512bw")
                && std::arch::is_x86_feature_detected!("avx512dq")
                && std::arch::is_x86_feature_detected!("avx512vl");
            if has && wide {
                return Level::Avx512;
            }
            if has {
                return Level::Avx2;
            }
        }
        Level::Baseline
    }
}

/// Declares a function that runs `$body` compiled for the level given as its first argument, or `$avx512` where
/// there is such a form.
macro_rules! for_level {
    ($(#[$doc:meta])* $name:ident, $avx2:ident = $body:path, $avx512:path,
     ($($arg:ident: $ty:ty),*) -> $ret:ty) => {
        $(#[$doc])*
        // The baseline form is not inlined into the caller: it is large, and seldom the one that runs.
        #[inline(never)]
        #[allow(unsafe_code)]
        pub fn $name(level: Level, $($arg: $ty),*) -> $ret {
            match level {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Level::Avx512` is made only by `Level::detect`, which has seen all these features.
                Level::Avx512 => unsafe { $avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Level::Avx2` is made only by `Level::detect`, which has seen all these features.
                Level::Avx2 => unsafe { $avx2($($arg),*) },
                _ => $body($($arg),*),
            }
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
        fn $avx2($($arg: $ty),*) -> $ret {
            $body($($arg),*)
        }
    };
}

for_level! {
    /// Executes plain instructions and comparisons one after the other, in the lanes of the mask.
    run_steps, run_steps_avx2 = all_steps, alu_avx512::run_steps,
    (regs: &mut Regs, steps: &[Exec], mask: u32) -> ()
}

for_level! {
    /// Computes products of a warp one after the other.
    multiply_all, multiply_all_avx2 = mma::multiply_all, mma_avx512::multiply_all,
    (regs: &mut Regs, products: &[MmaInst], tiles: &mut Tiles) -> ()
}

for_level! {
    /// Widens the A fragment of a warp.
    read_a, read_a_avx2 = mma::read_a, mma_avx512::read_a,
    (ty: MatrixTy, regs: &[&Row], tile: &mut ATile) -> ()
}

for_level! {
    /// Widens the B fragment of a warp.
    read_b, read_b_avx2 = mma::read_b, mma_avx512::read_b,
    (ty: MatrixTy, regs: &[&Row], tile: &mut BTile) -> ()
}

for_level! {
    /// Widens the fragments of a product, A only where it is not the one that was widened last.
    widen_both, widen_both_avx2 = mma::widen_both, mma_avx512::widen_both,
    (a_ty: MatrixTy, a: &[&Row], b_ty: MatrixTy, b: &[&Row], tiles: &mut Tiles) -> ()
}

for_level! {
    /// Loads 8x8 matrices of 16-bit elements, each into a row of registers, from rows that are all inside of memory.
    load_matrices, load_matrices_avx2 = matrices::load, matrices_avx512::load,
    (bytes: &[u8], addresses: &Row, trans: bool, to: &[u32], regs: &mut [Aligned<Row>]) -> ()
}

for_level! {
    /// Surveys the addresses `base + offset` of rows in the block of rank `own`, whose shared memory ends at `end`. The rank
    /// may be part of the addresses.
    survey, survey_avx2 = matrices::survey, matrices_avx512::survey,
    (base: &Row, offset: u32, own: u32, end: u32, out: &mut Survey) -> ()
}

for_level! {
    /// The lanes of each eight that have an aligned line of cells of global memory, one cell after the other.
    whole_lines, whole_lines_avx2 = lines::whole_lines, whole_lines_avx512,
    (addresses: &Row64) -> u32
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
fn whole_lines_avx512(addresses: &Row64) -> u32 {
    lines::whole_lines(addresses)
}

for_level! {
    /// All bits that occur in some words, and the largest of them.
    extremes, extremes_avx2 = both_extremes, extremes_avx2,
    (words: &Row) -> (u32, u32)
}

for_level! {
    /// Multiplies sixteen rows by eight columns into four accumulator registers.
    multiply, multiply_avx2 = mma::multiply, mma_avx512::multiply,
    (depth: usize, a: &ATile, b: &BTile, acc: [&mut Row; 4]) -> ()
}

for_level! {
    /// Multiplies sixteen rows by eight columns of fp8 into four accumulator registers, in few bits.
    multiply_short, multiply_short_avx2 = short::multiply, mma_avx512::multiply_short,
    (how: &ShortSum, a: &ATile, b: &BTile, acc: [&mut Row; 4]) -> ()
}

for_level! {
    /// Computes two products of one A at once, each from four rows into four. What one writes, the other does not read.
    multiply_two, multiply_two_avx2 = mma::multiply_two, mma_avx512::multiply_two,
    (depth: usize, a: &ATile, b: [&BTile; 2], rows: &mut [Aligned<Row>], from: [[u32; 4]; 2], to: [[u32; 4]; 2]) -> ()
}

/// Why plain execution stopped.
#[derive(Clone, Copy, Debug)]
pub enum Pause {
    /// The next instruction is not plain, or the warp has no active lane.
    Op,
    /// The slice is used up.
    Slice,
    /// The next instruction reads a register without a value.
    Unwritten(Slot),
    /// The next instruction touches, in these lanes, a register that a `wgmma` in flight uses.
    Wgmma(u32),
}

/// Runs plain instructions until one comes that is not, or something needs attention.
pub fn run_plain(
    level: Level,
    warp: &mut Warp,
    program: &Program<'_>,
    tally: &mut Tally,
    left: &mut u64,
    tiles: &mut Tiles,
    check: bool,
) -> Pause {
    loop {
        if warp.pc == warp.reconverge || warp.active == 0 {
            warp.settle();
            if warp.active == 0 {
                return Pause::Op;
            }
        }
        if *left == 0 {
            return Pause::Slice;
        }
        let pc = warp.pc as usize;
        if let Some((index, run)) = program.run(pc)
            && u64::from(run.len) <= *left
            && run_begins(warp, program, run, check)
        {
            let end = pc + run.len as usize;
            match program.products(run) {
                [] => run_steps(level, &mut warp.regs, &program.steps[pc..end], warp.active),
                products => multiply_all(level, &mut warp.regs, products, tiles),
            }
            tally.runs[index] += 1;
            *left -= u64::from(run.len);
            warp.pc = end as u32;
            continue;
        }
        let Some(code) = program.code.get(pc) else { return Pause::Op };
        let mask = match code.guard {
            None => warp.active,
            Some(guard) => {
                let holds = warp.regs.pred[guard.pred as usize];
                warp.active & if guard.negated { !holds } else { holds }
            }
        };
        let step = &program.steps[pc];
        match step {
            Exec::Nop => {
                warp.pc += 1;
                continue;
            }
            Exec::Op | Exec::Mma(_) => return Pause::Op,
            Exec::Branch => {
                if check && let Some(slot) = unwritten(warp, program, pc, warp.active) {
                    return Pause::Unwritten(slot);
                }
                if mask == warp.active {
                    warp.pc = code.target;
                } else if mask == 0 {
                    warp.pc += 1;
                } else {
                    return Pause::Op;
                }
            }
            Exec::Alu(_) | Exec::Setp(_) => {
                if check && code.watched {
                    for slot in program.births(code) {
                        forget(warp, *slot);
                    }
                    if let Some(slot) = unwritten(warp, program, pc, mask) {
                        return Pause::Unwritten(slot);
                    }
                }
                if mask != 0 {
                    if code.touches_wgmma && !warp.wgmma.touch(program, program.wgmma_of(code)) {
                        return Pause::Wgmma(mask);
                    }
                    run_steps(level, &mut warp.regs, std::slice::from_ref(step), mask);
                }
                warp.pc += 1;
            }
        }
        tally.executed[pc] += 1;
        *left -= 1;
    }
}

/// Whether a run that all active lanes begin has nothing to report. If it has, its instructions are executed one by one to
/// find the one to report.
#[inline]
fn run_begins(warp: &mut Warp, program: &Program<'_>, run: &Run, check: bool) -> bool {
    // Products need all lanes.
    if !program.products(run).is_empty() && warp.active != u32::MAX {
        return false;
    }
    let lacks = |slot: &Slot| {
        let init = match *slot {
            Slot::Word(row) => warp.regs.init32[row as usize],
            Slot::Long(row) => warp.regs.init64[row as usize],
            Slot::Pred(row) => warp.regs.init_pred[row as usize],
            _ => return false,
        };
        warp.active & !init != 0
    };
    if check && program.unproven_in(run).iter().any(lacks) {
        return false;
    }
    warp.wgmma.touch(program, program.wgmma_in(run))
}

#[inline(always)]
fn all_steps(regs: &mut Regs, steps: &[Exec], mask: u32) {
    for step in steps {
        match step {
            Exec::Alu(inst) => alu::execute(regs, inst, mask),
            Exec::Setp(inst) => alu::compare(regs, inst, mask),
            Exec::Mma(_) | Exec::Op | Exec::Branch | Exec::Nop => {}
        }
    }
}

#[inline(always)]
fn both_extremes(words: &Row) -> (u32, u32) {
    words.iter().fold((0, 0), |(bits, largest), &word| (bits | word, largest.max(word)))
}

/// The first register that the instruction reads in these lanes and that has no value in one of them.
#[inline(always)]
pub fn unwritten(warp: &Warp, program: &Program<'_>, pc: usize, mask: u32) -> Option<Slot> {
    let code = &program.code[pc];
    for &slot in program.unproven(code) {
        let (init, needed) = match slot {
            Slot::Word(row) => (warp.regs.init32[row as usize], mask),
            Slot::Long(row) => (warp.regs.init64[row as usize], mask),
            Slot::Pred(row) => {
                // A guard is read by all active lanes, whatever it says.
                let guard = code.guard.is_some_and(|g| g.pred == row);
                (warp.regs.init_pred[row as usize], if guard { warp.active } else { mask })
            }
            _ => continue,
        };
        if init & needed != needed {
            return Some(slot);
        }
    }
    None
}

/// Forgets the value that a row held for a register whose life has ended.
#[inline(always)]
pub fn forget(warp: &mut Warp, slot: Slot) {
    let lanes = !warp.active;
    match slot {
        Slot::Word(row) => {
            warp.regs.init32[row as usize] &= lanes;
            warp.wgmma.end_series();
        }
        Slot::Long(row) => warp.regs.init64[row as usize] &= lanes,
        Slot::Pred(row) => warp.regs.init_pred[row as usize] &= lanes,
        _ => {}
    }
}
