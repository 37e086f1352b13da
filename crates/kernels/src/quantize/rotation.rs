//! Rotations of queries and keys: signs, then a Walsh-Hadamard transform, divided by √head_dim.

use flashcore_ptx::{B32, F32, KernelBuilder, Reg};

use super::WIDTH;

/// Which channels change their sign before the transform, given the seed.
pub fn signs(seed: u32, head_dim: u32) -> Vec<bool> {
    (0..head_dim)
        .map(|channel| {
            // The finaliser of MurmurHash3: every bit depends on all bits of the input.
            let mut word = seed.wrapping_mul(0x9e37_79b9).wrapping_add(channel);
            for (shift, factor) in [(16, 0x85eb_ca6b), (13, 0xc2b2_ae35)] {
                word = (word ^ (word >> shift)).wrapping_mul(factor);
            }
            (word ^ (word >> 16)) & 1 == 1
        })
        .collect()
}

/// Turns rows around: a thread has eight channels, and its neighbours have the others.
pub(super) struct Rotation {
    /// The signs of this thread's channels, over √head_dim.
    factors: Vec<Reg<F32>>,
    /// For each distance between lanes: 1 for the lower lane of a pair, −1 for the upper.
    signs: Vec<(u32, Reg<F32>)>,
}

impl Rotation {
    pub fn new(k: &mut KernelBuilder, seed: u32, head_dim: u32) -> Self {
        let threads = head_dim / WIDTH;
        let tid = k.tid_x();
        let lane = k.and_b32(tid, threads - 1);
        let column = k.mul_lo_u32(lane, WIDTH);
        let factors = sign_factors(k, seed, head_dim, column, WIDTH);
        let distances = (0..threads.trailing_zeros()).map(|bit| 1 << bit);
        let signs = distances.map(|distance| (distance, butterfly_sign(k, lane, distance))).collect();
        Self { factors, signs }
    }

    pub fn turn(&self, k: &mut KernelBuilder, x: [Reg<F32>; 8]) -> [Reg<F32>; 8] {
        let mut x: [Reg<F32>; 8] = std::array::from_fn(|i| k.mul_f32(x[i], self.factors[i]));
        for distance in [1, 2, 4] {
            x = std::array::from_fn(|i| {
                let other = x[i ^ distance];
                if i & distance == 0 { k.add_f32(x[i], other) } else { k.sub_f32(other, x[i]) }
            });
        }
        for &(distance, sign) in &self.signs {
            x = x.map(|x| {
                let other = k.shfl_bfly(x, distance);
                k.fma_f32(x, sign, other)
            });
        }
        x
    }
}

/// 1 for the lower of two that are `distance` apart, −1 for the upper.
pub(super) fn butterfly_sign(k: &mut KernelBuilder, index: Reg<B32>, distance: u32) -> Reg<F32> {
    let bit = k.and_b32(index, distance);
    let lower = k.setp_eq_u32(bit, 0u32);
    k.selp_f32(1.0, -1.0, lower)
}

/// The signs of so many channels from one on, over √head_dim. That one is a multiple of their number.
pub(super) fn sign_factors(
    k: &mut KernelBuilder,
    seed: u32,
    head_dim: u32,
    first: Reg<B32>,
    count: u32,
) -> Vec<Reg<F32>> {
    let words = signs(seed, head_dim)
        .chunks(32)
        .map(|signs| (0..).zip(signs).fold(0, |word, (bit, &sign)| word | u32::from(sign) << bit))
        .collect::<Vec<u32>>();
    let index = k.shr_u32(first, 5u32);
    let mut word = k.mov_b32(words[0]);
    for (i, &other) in (1..).zip(&words[1..]) {
        let this = k.setp_eq_u32(index, i as u32);
        word = k.selp_b32(other, word, this);
    }
    let inside = k.and_b32(first, 31u32);
    let bits = k.shr_u32(word, inside);
    let size = 1.0 / f64::from(head_dim).sqrt();
    (0..count)
        .map(|i| {
            let bit = k.bfe_u32(bits, i, 1u32);
            let turns = k.setp_ne_u32(bit, 0u32);
            k.selp_f32(-size, size, turns)
        })
        .collect()
}
