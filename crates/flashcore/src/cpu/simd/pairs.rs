//! AVX-512 with BF16: products of pairs of bf16, summed in f32, lane by lane.

use std::arch::x86_64::*;

use super::amx::{MATRIX, ROW, SIDE};
use crate::cpu::matrix::{Multiplier, Product, STRIDE};

/// Rows of a result that are worked on together: sixteen sums hide the latency of an addition.
const ROWS: usize = 8;

/// The products of [`Matrices`](super::amx::Matrices) from vectors: a word of A, one pair, goes to all lanes and meets a row
/// of B.
pub(in crate::cpu) struct Pairs;

impl Multiplier for Pairs {
    #[inline(always)]
    unsafe fn multiply(&mut self, product: &Product, tall: bool, wide: bool) {
        // SAFETY: the caller's promise, and this CPU has the instructions.
        unsafe { if wide { rows::<2>(product, tall) } else { rows::<1>(product, tall) } }
    }
}

/// All rows of a product of so many right matrices.
///
/// # Safety
/// Requires a CPU with AVX-512 and BF16, and matrices that can be read and written.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows<const VECS: usize>(product: &Product, tall: bool) {
    let Product { a_next, a_stride, a_step, steps, onto, .. } = *product;
    let all = if tall { 2 * SIDE } else { SIDE };
    for row in (0..all).step_by(ROWS) {
        // SAFETY: the caller's promise.
        unsafe {
            let c = product.c.add(row * STRIDE);
            let mut sums = [[_mm512_setzero_ps(); VECS]; ROWS];
            if onto {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (vec, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm512_loadu_ps(c.add(i * STRIDE + vec * ROW).cast());
                    }
                }
            }
            let mut a = product.a.add(row / SIDE * a_next + row % SIDE * a_stride);
            let mut b = product.b;
            for _ in 0..steps {
                let right = b;
                for word in 0..SIDE {
                    let b: [__m512bh; VECS] = std::array::from_fn(|vec| {
                        let at = right.wrapping_add(vec * MATRIX + word * ROW);
                        std::mem::transmute(_mm512_loadu_si512(at.cast()))
                    });
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let pair = a.wrapping_add(i * a_stride + word * size_of::<i32>());
                        let pair = _mm512_set1_epi32(pair.cast::<i32>().read_unaligned());
                        for (sum, b) in sums.iter_mut().zip(b) {
                            *sum = _mm512_dpbf16_ps(*sum, std::mem::transmute::<__m512i, __m512bh>(pair), b);
                        }
                    }
                }
                (a, b) = (a.wrapping_add(a_step), b.wrapping_add(4 * MATRIX));
            }
            for (i, sums) in sums.iter().enumerate() {
                for (vec, &sum) in sums.iter().enumerate() {
                    _mm512_storeu_ps(c.add(i * STRIDE + vec * ROW).cast(), sum);
                }
            }
        }
    }
}

/// Whether this CPU has the instructions.
pub(in crate::cpu) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")
}

/// Floating-point operations of one round of [`dots`].
pub(in crate::cpu) const DOT_FLOPS: usize = CHAINS * 2 * 2 * SIDE;
/// Independent sums, enough to hide the latency of an addition.
const CHAINS: usize = 16;

/// Runs so many rounds of products that never leave the registers.
///
/// # Safety
/// Requires a CPU with AVX-512 and BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(in crate::cpu) unsafe fn dots(rounds: usize) {
    // SAFETY: any bits are a vector of bf16.
    let one: __m512bh = unsafe { std::mem::transmute(std::hint::black_box(_mm512_set1_epi32(0x3f80_3f80))) };
    let mut sums = [_mm512_setzero_ps(); CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, one, one);
        }
    }
    std::hint::black_box(sums);
}

#[cfg(test)]
mod tests {
    use super::{super::amx::Model, *};
    use crate::cpu::simd::amx::Matrices;

    /// Small whole numbers, whose sums are exact in any order.
    fn small(seed: u32, words: usize) -> Vec<u32> {
        let number = |i: u32| (((i.wrapping_mul(2_654_435_761) >> 20) % 15) as f32 - 7.0).to_bits() >> 16;
        (0..words as u32).map(|i| number(2 * i + seed) | number(2 * i + 1 + seed) << 16).collect()
    }

    #[test]
    fn products_are_those_of_matrices() {
        if !is_available() {
            eprintln!("skipped: this CPU has no AVX-512 with BF16");
            return;
        }
        const STEPS: usize = 3;
        let (a, b) = (small(1, 2 * SIDE * STEPS * SIDE), small(2, STEPS * 4 * SIDE * SIDE));
        let before: Vec<f32> = (0..2 * SIDE * STRIDE / 4).map(|i| (i % 7) as f32).collect();
        for (tall, wide, onto) in (0..8).map(|i| (i & 1 == 1, i & 2 == 2, i & 4 == 4)) {
            let run = |multiplier: &mut dyn FnMut(&Product)| {
                let mut c = before.clone();
                let product = Product {
                    a: a.as_ptr().cast(),
                    a_next: SIDE * STEPS * ROW,
                    a_stride: STEPS * ROW,
                    a_step: ROW,
                    b: b.as_ptr().cast(),
                    steps: STEPS,
                    c: c.as_mut_ptr().cast(),
                    onto,
                };
                multiplier(&product);
                c
            };
            // SAFETY: the CPU has the instructions, and all matrices are there.
            let (ours, exact) = unsafe {
                (
                    run(&mut |product| Pairs.multiply(product, tall, wide)),
                    run(&mut |product| Model::new().multiply(product, tall, wide)),
                )
            };
            assert_eq!(ours, exact, "tall {tall}, wide {wide}, onto {onto}");
        }
    }
}
