//! The engine against the oracle, on every instruction set that this CPU has.

use super::{Engine, Isa, available};
use crate::{
    Attention, DType, Device, Mask, Problem, Tensor, TensorBuf,
    oracle::{self, Rounding},
};

/// Standard normal numbers from a seed.
fn normal(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    (0..len)
        .map(|_| {
            let (a, b) = (uniform().max(1e-300), uniform());
            ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
        })
        .collect()
}

struct Inputs {
    q: TensorBuf,
    k: TensorBuf,
    v: TensorBuf,
    key_lengths: Option<Vec<u32>>,
}

fn inputs(problem: &Problem, seed: u64) -> Inputs {
    let make = |seed, shape: [usize; 4]| {
        TensorBuf::from_f32(&normal(seed, shape.iter().product()), shape, problem.dtype).unwrap()
    };
    let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, .. } = *problem;
    Inputs {
        q: make(3 * seed + 1, [batch, heads_q, len_q, head_dim]),
        k: make(3 * seed + 2, [batch, heads_kv, len_k, head_dim]),
        v: make(3 * seed + 3, [batch, heads_kv, len_k, head_dim_v]),
        key_lengths: problem
            .key_lengths
            .then(|| (0..batch).map(|b| ((b + 1) * len_k / (batch + 1)) as u32).collect()),
    }
}

fn attention<'a>(problem: &Problem, key_lengths: Option<&'a [u32]>) -> Attention<'a> {
    let attention = Attention::new()
        .mask(problem.mask)
        .scale(problem.scale)
        .softcap(problem.softcap.unwrap_or(0.0))
        .with_lse();
    match key_lengths {
        Some(lengths) => attention.key_lengths(lengths),
        None => attention,
    }
}

fn engine(isa: Isa) -> Device {
    Device::cpu_with(Engine::new().with_isa(isa).unwrap())
}

/// At most twice the error of plain attention in the same precision, by the maximum.
fn follows_the_oracle(problem: &Problem, isa: Isa) {
    let x = inputs(problem, 7);
    check(problem, isa, &x.q.view(), &x.k.view(), &x.v.view(), x.key_lengths.as_deref());
}

fn check(
    problem: &Problem,
    isa: Isa,
    q: &Tensor<'_>,
    k: &Tensor<'_>,
    v: &Tensor<'_>,
    lengths: Option<&[u32]>,
) {
    let out = attention(problem, lengths).run(&engine(isa), q, k, v).unwrap();
    let exact = oracle::attention(problem, q, k, v, lengths);
    let plain = oracle::same_precision(problem, q, k, v, lengths, Rounding::ScoresAndProbabilities);
    let worst = |values: &mut dyn Iterator<Item = f64>| {
        values
            .zip(&exact.o)
            .map(|(a, &b)| (a - b).abs())
            .fold(0.0, |worst: f64, x| if x <= worst { worst } else { x })
    };
    let ours = worst(&mut out.o.to_f32().into_iter().map(f64::from));
    let theirs = worst(&mut plain.o.iter().copied());
    assert!(
        ours <= 2.0 * theirs + 2e-6,
        "{problem} on {isa}: error {ours:.3e}, plain attention {theirs:.3e}"
    );
    for (i, (&ours, &exact)) in out.lse.unwrap().to_f32().iter().zip(&exact.lse).enumerate() {
        let close = (f64::from(ours) - exact).abs() <= 2e-6 * exact.abs().max(4.0);
        assert!(f64::from(ours) == exact || close, "{problem} on {isa}: lse {i} is {ours}, not {exact}");
    }
}

#[test]
fn every_length_follows_the_oracle() {
    for isa in available() {
        for len in [1, 2, 7, 63, 64, 65, 97, 127, 129, 200, 257, 511, 513, 1025] {
            for dtype in DType::ALL {
                let problem = Problem::new(1, 2, len, 64, dtype);
                follows_the_oracle(&problem, isa);
                follows_the_oracle(&problem.with_mask(Mask::Causal), isa);
            }
        }
    }
}

#[test]
fn every_head_dim_follows_the_oracle() {
    for isa in available() {
        for (d, dv) in [
            (1, 1),
            (8, 8),
            (40, 40),
            (64, 64),
            (72, 72),
            (80, 80),
            (96, 96),
            (128, 128),
            (160, 160),
            (192, 128),
            (256, 256),
            (512, 512),
            (1024, 1),
            (3, 1024),
            (64, 80),
            (13, 29),
        ] {
            for dtype in DType::ALL {
                follows_the_oracle(&Problem::new(1, 2, 70, d, dtype).with_head_dim_v(dv), isa);
            }
        }
    }
}

#[test]
fn every_mask_follows_the_oracle() {
    let window = |left, right| Mask::Window { left, right };
    for isa in available() {
        for (len_q, len_k) in [(130, 130), (70, 200), (200, 70), (1, 300), (3, 1500), (33, 1), (5, 0), (0, 5)]
        {
            for mask in [
                Mask::None,
                Mask::Causal,
                Mask::CausalTopLeft,
                window(Some(20), Some(3)),
                window(None, Some(40)),
                window(Some(0), None),
                window(Some(0), Some(0)),
                window(Some(usize::MAX), Some(0)),
            ] {
                let problem = Problem::new(2, 4, len_q, 32, DType::F32).with_kv(2, len_k).with_mask(mask);
                follows_the_oracle(&problem, isa);
                follows_the_oracle(&problem.with_key_lengths().with_softcap(5.0), isa);
            }
        }
    }
}
