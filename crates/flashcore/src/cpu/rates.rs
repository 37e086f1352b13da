//! What this machine can do at most: the yardsticks that a rate of the engine is a fraction of.
#![allow(unsafe_code)] // Enters code that is compiled for an instruction set.

use std::{
    hint::black_box,
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

#[cfg(target_arch = "x86_64")]
use super::simd::{amx, pairs};
use super::{
    helpers::{Helpers, Source},
    isa::Isa,
    math::Exp2Below,
    simd::{Simd, dispatch},
};

/// Independent chains of multiply-adds, enough to hide their latency on every core there is.
const CHAINS: usize = 12;
/// Rounds of all chains in one sample: about a millisecond.
const ROUNDS: usize = 400_000;
/// Rounds that take about as long as one product of matrices.
#[cfg(target_arch = "x86_64")]
const ROUNDS_PER_DOT: usize = 4;
/// Rounds of one piece of timed work. Threads take the pieces one by one.
const PIECE: usize = 20_000;
/// The most pieces per thread.
const MOST_PIECES: f64 = 1000.0;
/// Elements of memory that no cache holds.
const MEMORY: usize = 128 << 20;
/// Elements of one piece of it, as a timed read takes it.
const READ: usize = 256 << 10;
/// Independent exponentials in a row: they share the registers with the polynomial's coefficients.
const EXP_CHAINS: usize = 6;
/// Rounds of all of them in one sample: about a millisecond.
const EXP_ROUNDS: usize = 60_000;

/// The rate of multiply-adds that never leave the registers, in GFLOP/s, on `threads` threads at once: the best of
/// the samples that fit into `budget`. An instruction set that this CPU lacks is replaced by the portable one.
pub fn fma_peak(isa: Isa, threads: usize, budget: Duration) -> f64 {
    let isa = if isa.is_available() { isa } else { Isa::Portable };
    let threads = threads.max(1);
    let time = best_time(threads, budget, |_| {
        // SAFETY: the CPU has the instruction set.
        unsafe { multiply_adds(isa, ROUNDS) };
    });
    flops_of(isa, ROUNDS) * threads as f64 / time / 1e9
}

/// Work of one kind alone, to be timed beside other work. Where [`fma_peak`] and [`read_bandwidth`] are the best that was
/// ever seen, this is what the machine gives now, to be compared with what else it does now.
#[derive(Debug)]
pub struct Work {
    isa: Isa,
    threads: usize,
    helpers: Option<Helpers>,
    /// What is read; nothing where multiply-adds are done instead.
    memory: Vec<f32>,
    /// The piece of the memory that comes next.
    next: AtomicUsize,
}

impl Work {
    /// Multiply-adds that never leave the registers, on `threads` threads that are woken and placed as the engine's are. An
    /// instruction set that this CPU lacks is replaced by the portable one.
    pub fn fma(isa: Isa, threads: usize) -> Self {
        let isa = if isa.is_available() { isa } else { Isa::Portable };
        let threads = threads.max(1);
        let (helpers, next) = (Helpers::new(threads), AtomicUsize::new(0));
        Self { isa, threads, helpers, memory: Vec::new(), next }
    }

    /// Reads of memory that no cache holds, half a GiB of it, on such threads.
    pub fn read(isa: Isa, threads: usize) -> Self {
        Self { memory: vec![1.0; MEMORY], ..Self::fma(isa, threads) }
    }

    /// The seconds that so many floating-point operations or bytes take, by one run of as many, or of a part of them if they
    /// are very many.
    pub fn time(&self, amount: f64) -> f64 {
        let reads = !self.memory.is_empty();
        let each = if reads { (READ * size_of::<f32>()) as f64 } else { flops_of(self.isa, PIECE) };
        let pieces = (amount / each).ceil().clamp(self.threads as f64, MOST_PIECES * self.threads as f64);
        let left = AtomicUsize::new(pieces as usize);
        let take =
            || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
        let work = || {
            while take() {
                // SAFETY: the CPU has the instruction set.
                unsafe {
                    if reads {
                        let piece = self.next.fetch_add(1, Ordering::Relaxed) % (MEMORY / READ);
                        black_box(sum(self.isa, &self.memory[piece * READ..][..READ]));
                    } else {
                        multiply_adds(self.isa, PIECE);
                    }
                }
            }
        };
        let start = Instant::now();
        match &self.helpers {
            Some(helpers) => Helpers::join(Source::Own(helpers), self.threads - 1, work),
            None => work(),
        }
        start.elapsed().as_secs_f64() * amount / (pieces * each)
    }
}

/// Floating-point operations of so many rounds on one thread.
fn flops_of(isa: Isa, rounds: usize) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Amx {
        return (rounds / ROUNDS_PER_DOT * amx::DOT_FLOPS) as f64;
    }
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Bf16 {
        return (rounds * pairs::DOT_FLOPS) as f64;
    }
    (2 * CHAINS * isa.lanes() * rounds) as f64
}

/// Runs rounds of all chains, or, with AMX, as many products of matrices as take about that long.
///
/// # Safety
/// Requires a CPU with the instruction set.
unsafe fn multiply_adds(isa: Isa, rounds: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Amx {
            return amx::dots(rounds / ROUNDS_PER_DOT);
        }
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Bf16 {
            return pairs::dots(rounds);
        }
        black_box(chains(isa, black_box(0.5), rounds));
    }
}

/// The rate at which `threads` threads read memory that no cache holds, in GB/s: the best of the passes that fit
/// into `budget`. Allocates half a GiB while it runs.
pub fn read_bandwidth(isa: Isa, threads: usize, budget: Duration) -> f64 {
    let isa = if isa.is_available() { isa } else { Isa::Portable };
    let threads = threads.max(1);
    let memory = vec![1.0_f32; MEMORY];
    let share = memory.len() / threads;
    let time = best_time(threads, budget, |thread| {
        let mine = &memory[thread * share..][..share];
        // SAFETY: the CPU has the instruction set.
        black_box(unsafe { sum(isa, mine) });
    });
    (share * threads * size_of::<f32>()) as f64 / time / 1e9
}

/// The rate of exponentials as the engine computes them, in registers, in units of 1e9 per second, on `threads` threads at
/// once: the best of the samples that fit into `budget`.
pub fn exp_rate(isa: Isa, threads: usize, budget: Duration) -> f64 {
    let isa = if isa.is_available() { isa } else { Isa::Portable };
    let threads = threads.max(1);
    let time = best_time(threads, budget, |_| {
        // SAFETY: the CPU has the instruction set.
        black_box(unsafe { exponentials(isa, black_box(0.5)) });
    });
    (EXP_CHAINS * isa.lanes() * EXP_ROUNDS * threads) as f64 / time / 1e9
}

/// The shortest time in seconds in which all threads did their `work(thread)`.
fn best_time(threads: usize, budget: Duration, work: impl Fn(usize) + Sync) -> f64 {
    let (barrier, over) = (Barrier::new(threads), AtomicBool::new(false));
    let rounds = |thread: usize| {
        let (started, mut best) = (Instant::now(), f64::INFINITY);
        loop {
            barrier.wait();
            if over.load(Ordering::Relaxed) {
                return best;
            }
            let start = Instant::now();
            work(thread);
            barrier.wait();
            best = best.min(start.elapsed().as_secs_f64());
            if thread == 0 && started.elapsed() >= budget {
                over.store(true, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        let rounds = &rounds;
        for thread in 1..threads {
            scope.spawn(move || rounds(thread));
        }
        rounds(0)
    })
}

dispatch! {
    /// Runs rounds of all chains.
    unsafe fn chains(x: f32, rounds: usize) -> f32 = chains_of
}

#[inline(always)]
unsafe fn chains_of<S: Simd>(x: f32, rounds: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let (factor, term) = (S::splat(x), S::splat(1.0));
        let mut acc = [S::splat(0.0); CHAINS];
        for _ in 0..rounds {
            for acc in &mut acc {
                *acc = S::fma(*acc, factor, term);
            }
        }
        let mut total = acc[0];
        for &acc in &acc[1..] {
            total = S::add(total, acc);
        }
        first_lane::<S>(total)
    }
}

dispatch! {
    /// Runs `EXP_ROUNDS` rounds of exponentials.
    unsafe fn exponentials(x: f32) -> f32 = exponentials_of
}

#[inline(always)]
unsafe fn exponentials_of<S: Simd>(x: f32) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let exp = Exp2Below::<S>::new(x);
        let mut values = [S::splat(x); EXP_CHAINS];
        for _ in 0..EXP_ROUNDS {
            for value in &mut values {
                *value = exp.of(*value);
            }
        }
        let mut total = values[0];
        for &value in &values[1..] {
            total = S::add(total, value);
        }
        first_lane::<S>(total)
    }
}

dispatch! {
    /// The sum of all elements.
    unsafe fn sum(memory: &[f32]) -> f32 = sum_of
}

#[inline(always)]
unsafe fn sum_of<S: Simd>(memory: &[f32]) -> f32 {
    let mut total = 0.0;
    // SAFETY: the caller's promise; vectors end inside the chunk.
    unsafe {
        let mut acc = [S::splat(0.0); 8];
        for chunk in memory.chunks_exact(8 * S::LANES) {
            for (i, acc) in acc.iter_mut().enumerate() {
                *acc = S::add(*acc, S::load(chunk.as_ptr().add(i * S::LANES)));
            }
        }
        for &acc in &acc {
            total += first_lane::<S>(acc);
        }
    }
    total
}

#[inline(always)]
unsafe fn first_lane<S: Simd>(x: S::V) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: the caller's promise; no vector has more than 16 lanes.
    unsafe { S::store(lanes.as_mut_ptr(), x) };
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_positive_on_every_instruction_set_and_any_number_of_threads() {
        for isa in super::super::available() {
            for threads in [0, 1, 3] {
                let rate = fma_peak(isa, threads, Duration::ZERO);
                assert!(rate.is_finite() && rate > 0.01, "{isa}: {rate}");
                let work = Work::fma(isa, threads);
                for flops in [1e3, 3e7] {
                    let now = flops / work.time(flops) / 1e9;
                    assert!(now.is_finite() && now > 0.01, "{isa}: {now}");
                }
                let exponentials = exp_rate(isa, threads, Duration::ZERO);
                assert!(exponentials.is_finite() && exponentials > 0.001, "{isa}: {exponentials}");
            }
        }
        let rate = read_bandwidth(Isa::Portable, 2, Duration::ZERO);
        assert!(rate.is_finite() && rate > 0.01, "{rate}");
        let now = 1e8 / Work::read(Isa::Portable, 2).time(1e8) / 1e9;
        assert!(now.is_finite() && now > 0.01, "{now}");
    }
}
