//! Inputs: q, k and v drawn from a seed and a distribution, a well-behaved one or a difficult one.
//!
//! Values come out as f32 in the order (batch, heads, length, head_dim), clamped to what the dtype can hold;
//! rounding to the dtype happens where they are stored.

use std::fmt;
use std::str::FromStr;

use flashcore::signature::PerTensor;
use flashcore::{DType, Name, Pass, Problem};
use serde::{Deserialize, Serialize};

use crate::rng::Rng;

/// How the values of q, k and v are spread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distribution {
    /// Standard normal, all elements independent.
    #[default]
    Normal,
    /// Scores with a standard deviation of 36: the softmax is nearly one-hot.
    LargeScores,
    /// Scores beyond f16's range: unfused half-precision attention gives infinities here.
    OverflowingScores,
    /// One key that every query attends to far more than to all others.
    DominantKey,
    /// All values of a head the same, so every output is that value.
    ConstantValues,
    /// All keys of a head the same, so every output is the mean of the values.
    EqualKeys,
    /// The first key draws most of the attention and carries almost no value.
    Sinks,
    /// Rows and columns whose magnitudes differ by factors up to 65536.
    MixedMagnitudes,
    /// Every other element is near or below the dtype's smallest normal number.
    Denormals,
    /// q and v near the dtype's largest numbers, k near its smallest.
    Extremes,
    /// Every score is below −70000, which f16 rounds to −∞.
    NegativeScores,
    /// Scores that rise along the keys, so that the running maximum moves in every tile.
    RisingScores,
    /// A needle in a haystack: all keys are alike but the first, which has about as much weight as all others together, more
    /// or less by query, and the opposite value.
    Needle,
}

impl Distribution {
    /// Every distribution, the well-behaved one first.
    pub const ALL: [Distribution; 13] = [
        Distribution::Normal,
        Distribution::LargeScores,
        Distribution::OverflowingScores,
        Distribution::DominantKey,
        Distribution::ConstantValues,
        Distribution::EqualKeys,
        Distribution::Sinks,
        Distribution::MixedMagnitudes,
        Distribution::Denormals,
        Distribution::Extremes,
        Distribution::NegativeScores,
        Distribution::RisingScores,
        Distribution::Needle,
    ];

    /// The name used in the corpus, on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Distribution::Normal => "normal",
            Distribution::LargeScores => "large-scores",
            Distribution::OverflowingScores => "overflowing-scores",
            Distribution::DominantKey => "dominant-key",
            Distribution::ConstantValues => "constant-values",
            Distribution::EqualKeys => "equal-keys",
            Distribution::Sinks => "sinks",
            Distribution::MixedMagnitudes => "mixed-magnitudes",
            Distribution::Denormals => "denormals",
            Distribution::Extremes => "extremes",
            Distribution::NegativeScores => "negative-scores",
            Distribution::RisingScores => "rising-scores",
            Distribution::Needle => "needle",
        }
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Distribution {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|d| d.name()).collect();
            format!("'{s}' is not a distribution; possible are {}", names.join(", "))
        })
    }
}

/// One element of an input that is NaN or infinite. It must reach whatever depends on it, and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wild {
    /// A query with a NaN.
    NanInQ,
    /// A key with a NaN.
    NanInK,
    /// A value with a NaN.
    NanInV,
    /// A query with an infinity.
    InfinityInQ,
    /// A key with an infinity.
    InfinityInK,
    /// A value with an infinity.
    InfinityInV,
}

impl Wild {
    /// Every kind.
    pub const ALL: [Wild; 6] =
        [Wild::NanInQ, Wild::NanInK, Wild::NanInV, Wild::InfinityInQ, Wild::InfinityInK, Wild::InfinityInV];

    /// The name used in the corpus and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Wild::NanInQ => "nan-in-q",
            Wild::NanInK => "nan-in-k",
            Wild::NanInV => "nan-in-v",
            Wild::InfinityInQ => "infinity-in-q",
            Wild::InfinityInK => "infinity-in-k",
            Wild::InfinityInV => "infinity-in-v",
        }
    }

    /// The input that holds it.
    pub const fn operand(self) -> Name {
        match self {
            Wild::NanInQ | Wild::InfinityInQ => Name::Q,
            Wild::NanInK | Wild::InfinityInK => Name::K,
            Wild::NanInV | Wild::InfinityInV => Name::V,
        }
    }

    /// Whether it is NaN rather than an infinity.
    pub const fn is_nan(self) -> bool {
        matches!(self, Wild::NanInQ | Wild::NanInK | Wild::NanInV)
    }
}

impl fmt::Display for Wild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The values of one call's inputs in the order (batch, heads, length, head_dim).
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    /// The queries.
    pub q: Vec<f32>,
    /// The keys.
    pub k: Vec<f32>,
    /// The values.
    pub v: Vec<f32>,
}

/// The largest finite value of a dtype.
pub fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => half::f16::MAX.to_f64(),
        DType::BF16 => half::bf16::MAX.to_f64(),
        DType::F32 => f64::from(f32::MAX),
        DType::F8E4M3 => 448.0,
        DType::I32 => f64::from(i32::MAX),
    }
}

/// The smallest positive normal value of a dtype.
pub fn smallest_normal(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => half::f16::MIN_POSITIVE.to_f64(),
        DType::BF16 => half::bf16::MIN_POSITIVE.to_f64(),
        DType::F32 => f64::from(f32::MIN_POSITIVE),
        DType::F8E4M3 => 1.0 / 64.0,
        DType::I32 => 1.0,
    }
}

/// The smallest positive value of a dtype.
pub fn smallest_subnormal(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => half::f16::MIN_POSITIVE_SUBNORMAL.to_f64(),
        DType::BF16 => half::bf16::MIN_POSITIVE_SUBNORMAL.to_f64(),
        DType::F32 => f64::from(f32::from_bits(1)),
        DType::F8E4M3 => 1.0 / 512.0,
        DType::I32 => 1.0,
    }
}

/// Draws q, k and v for a problem.
pub fn draw(problem: &Problem, distribution: Distribution, seed: u64) -> Values {
    let draw = Draw { problem, seed };
    let (mut q, mut k, mut v) = (draw.normal(0), draw.normal(1), draw.normal(2));
    let Problem { heads_kv, len_k, head_dim, head_dim_v, dtype, .. } = *problem;
    // With standard normals and the default scale a score has variance 1; `reach` is what a shared direction of
    // ±1 in q and k adds to a score before any factor.
    let reach = head_dim as f64 * f64::from(problem.scale);
    match distribution {
        Distribution::Normal | Distribution::Needle => {}
        Distribution::LargeScores => {
            scale_all(&mut q, 6.0);
            scale_all(&mut k, 6.0);
        }
        Distribution::OverflowingScores => {
            scale_all(&mut q, 300.0);
            scale_all(&mut k, 300.0);
        }
        Distribution::DominantKey => {
            let chosen = |b, h| Rng::stream(seed, 100 + (b * heads_kv + h) as u64).below(len_k);
            draw.lean(&mut q, Side::Queries, |_, _, _| 3.0);
            draw.lean(&mut k, Side::Keys, |b, h, s| if s == chosen(b, h) { 10.0 / reach } else { 0.0 });
        }
        Distribution::ConstantValues => {
            for head in v.chunks_mut((len_k * head_dim_v).max(1)) {
                let value = head[0];
                head.fill(value);
            }
        }
        Distribution::EqualKeys => {
            for head in k.chunks_mut((len_k * head_dim).max(1)) {
                let (first, rest) = head.split_at_mut(head_dim);
                rest.chunks_exact_mut(head_dim).for_each(|key| key.copy_from_slice(first));
            }
        }
        Distribution::Sinks => {
            draw.lean(&mut q, Side::Queries, |_, _, _| 1.0);
            draw.lean(&mut k, Side::Keys, |_, _, s| if s == 0 { 15.0 / reach } else { 0.0 });
            for head in v.chunks_mut((len_k * head_dim_v).max(1)) {
                scale_all(&mut head[..head_dim_v], 0.01);
            }
        }
        Distribution::MixedMagnitudes => {
            let mut rng = Rng::stream(seed, 3);
            let mut power = |reach: f64| rng.range(-reach, reach).round().exp2();
            let columns: Vec<f64> = (0..head_dim_v).map(|_| power(4.0)).collect();
            q.chunks_exact_mut(head_dim).for_each(|row| scale_all(row, power(2.0)));
            k.chunks_exact_mut(head_dim).for_each(|row| scale_all(row, power(2.0)));
            for row in v.chunks_exact_mut(head_dim_v) {
                let factor = power(4.0);
                row.iter_mut()
                    .zip(&columns)
                    .for_each(|(x, column)| *x = (f64::from(*x) * factor * column) as f32);
            }
        }
        Distribution::Denormals => {
            let tiny = smallest_normal(dtype);
            let mut rng = Rng::stream(seed, 3);
            for x in q.iter_mut().chain(&mut k).chain(&mut v) {
                if rng.chance(0.5) {
                    *x = (f64::from(*x) * tiny) as f32;
                }
            }
        }
        Distribution::Extremes => {
            let huge_q = match dtype {
                DType::F16 | DType::F8E4M3 => largest(dtype) / 8.0,
                DType::BF16 | DType::F32 | DType::I32 => 100_f64.exp2(),
            };
            scale_all(&mut q, huge_q);
            scale_all(&mut k, 1.0 / huge_q);
            scale_all(&mut v, huge_value(problem));
        }
        Distribution::NegativeScores => {
            let lean = (7.5e4 / reach).sqrt();
            scale_all(&mut k, 0.1);
            draw.lean(&mut q, Side::Queries, |_, _, _| lean);
            draw.lean(&mut k, Side::Keys, |_, _, _| -lean);
        }
        Distribution::RisingScores => {
            draw.lean(&mut q, Side::Queries, |_, _, _| 1.0);
            draw.lean(&mut k, Side::Keys, |_, _, s| 40.0 / reach * s as f64 / len_k.max(1) as f64);
        }
    }
    if distribution == Distribution::Needle {
        k.fill(0.0);
        let score = (len_k.max(2) as f64).ln();
        draw.lean(&mut q, Side::Queries, |_, _, _| 1.0);
        draw.lean(&mut k, Side::Keys, |_, _, s| if s == 0 { score / reach } else { 0.0 });
        for head in v.chunks_mut((len_k * head_dim_v).max(1)) {
            let (first, rest) = head.split_at_mut(head_dim_v);
            for x in first.iter_mut() {
                *x = 1.0 + x.abs().min(0.9);
            }
            rest.chunks_exact_mut(head_dim_v).for_each(|value| value.copy_from_slice(first));
            scale_all(first, -1.0);
        }
    }
    let limit = largest(dtype) as f32;
    for x in q.iter_mut().chain(&mut k).chain(&mut v) {
        *x = x.clamp(-limit, limit);
    }
    Values { q, k, v }
}

/// Draws the gradients of o and of lse for a problem whose inputs are of some distribution; none for a forward pass. Where
/// values are large, the gradients of o are as small, so that theirs are numbers.
pub fn draw_gradients(problem: &Problem, distribution: Distribution, seed: u64) -> PerTensor<Vec<f32>> {
    let mut all = PerTensor::default();
    if problem.pass == Pass::Forward {
        return all;
    }
    for (stream, name) in [(4, Name::Do), (5, Name::Dlse)] {
        let Some(of) = problem.signature().inputs().find(|of| of.name == name).copied() else { continue };
        let mut rng = Rng::stream(seed, stream);
        let mut values: Vec<f32> =
            (0..of.shape.iter().product()).map(|_: usize| rng.normal() as f32).collect();
        if name == Name::Do && distribution == Distribution::Extremes {
            scale_all(&mut values, 1.0 / huge_value(problem));
        }
        all.set(name, values);
    }
    all
}

/// The numbers that descales are of: none is 1, and no two neighbours are alike.
const DESCALES: [f32; 5] = [3.0, 1.0 / 7.0, 0.6, 1.75, 0.25];

/// Draws the descales of a problem's q, k and v; for [`Distribution::Extremes`], huge ones of q and tiny ones of k and v.
pub fn draw_descales(problem: &Problem, distribution: Distribution, seed: u64) -> PerTensor<Vec<f32>> {
    let mut all = PerTensor::default();
    for (which, name) in Name::DESCALES.into_iter().enumerate().filter(|&(which, _)| problem.descales[which])
    {
        let both = problem.descales[..2] == [true; 2];
        let factor = match (distribution, which) {
            (Distribution::Extremes, 0) if both => 1e18,
            (Distribution::Extremes, 1) if both => 1e-18,
            (Distribution::Extremes, 2) => 1e-20,
            _ => 1.0,
        };
        let one = |i: usize| factor * DESCALES[(i + 2 * which + seed as usize) % DESCALES.len()];
        let signature = problem.signature();
        let numbers = signature.inputs().find(|of| of.name == name).map_or(0, |of| of.shape.iter().product());
        all.set(name, (0..numbers).map(one).collect());
    }
    all
}

/// What values of [`Distribution::Extremes`] are a small multiple of. A fused kernel sums p·v before it divides, so a sum of
/// len_k of them must fit f32.
fn huge_value(problem: &Problem) -> f64 {
    match problem.dtype {
        DType::F16 | DType::F8E4M3 => largest(problem.dtype) / 3.0,
        DType::BF16 | DType::F32 | DType::I32 => largest(problem.dtype) / 8.0 / problem.len_k.max(1) as f64,
    }
}

fn scale_all(values: &mut [f32], factor: f64) {
    for x in values {
        *x = (f64::from(*x) * factor) as f32;
    }
}

/// Whether a tensor has the query's heads and length, or the keys'.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Queries,
    Keys,
}

struct Draw<'a> {
    problem: &'a Problem,
    seed: u64,
}

impl Draw<'_> {
    /// Standard normal values for q (0), k (1) or v (2), each from its own random stream.
    fn normal(&self, tensor: u64) -> Vec<f32> {
        let p = self.problem;
        let len = p.batch
            * match tensor {
                0 => p.heads_q * p.len_q * p.head_dim,
                1 => p.heads_kv * p.len_k * p.head_dim,
                _ => p.heads_kv * p.len_k * p.head_dim_v,
            };
        let mut rng = Rng::stream(self.seed, tensor);
        (0..len).map(|_| rng.normal() as f32).collect()
    }

    /// Adds `weight(b, kv head, row)` times the kv head's own direction of ±1 to each row of q or k.
    fn lean(&self, values: &mut [f32], side: Side, weight: impl Fn(usize, usize, usize) -> f64) {
        let p = self.problem;
        let (heads, len, group) = match side {
            Side::Queries => (p.heads_q, p.len_q, p.group().max(1)),
            Side::Keys => (p.heads_kv, p.len_k, 1),
        };
        for (i, head) in values.chunks_mut((len * p.head_dim).max(1)).enumerate() {
            let (b, h) = (i / heads, i % heads / group);
            let mut rng = Rng::stream(self.seed, 1_000_000 + (b * p.heads_kv + h) as u64);
            let direction: Vec<f64> = (0..p.head_dim).map(|_| rng.sign()).collect();
            for (s, row) in head.chunks_exact_mut(p.head_dim).enumerate() {
                let weight = weight(b, h, s);
                row.iter_mut().zip(&direction).for_each(|(x, u)| *x = (f64::from(*x) + weight * u) as f32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::{TensorBuf, oracle};

    fn problem(dtype: DType) -> Problem {
        Problem::new(2, 4, 40, 32, dtype).with_kv(2, 70)
    }

    fn reference(dtype: DType, distribution: Distribution) -> (Values, oracle::Reference) {
        let p = problem(dtype);
        let values = draw(&p, distribution, 5);
        let buf = |x: &[f32], h, s| TensorBuf::from_f32(x, [p.batch, h, s, p.head_dim], dtype).unwrap();
        let (q, k, v) = (buf(&values.q, 4, 40), buf(&values.k, 2, 70), buf(&values.v, 2, 70));
        let out = oracle::attention(&p, &q.view(), &k.view(), &v.view(), None);
        (values, out)
    }

    #[test]
    fn every_distribution_is_finite_in_every_dtype_and_so_is_its_attention() {
        for dtype in DType::WIDE {
            for distribution in Distribution::ALL {
                let (values, out) = reference(dtype, distribution);
                let rounded = |x: &f32| dtype.round(*x).is_finite();
                assert!(
                    values.q.iter().chain(&values.k).chain(&values.v).all(rounded),
                    "{distribution} {dtype}"
                );
                assert!(out.o.iter().all(|x| x.abs() <= largest(dtype)), "{distribution} {dtype}");
                assert!(out.lse.iter().all(|x| x.is_finite()), "{distribution} {dtype}");
            }
        }
    }

    #[test]
    fn a_seed_repeats_and_another_differs_in_every_tensor() {
        for distribution in Distribution::ALL {
            let one = draw(&problem(DType::F16), distribution, 1);
            assert_eq!(one, draw(&problem(DType::F16), distribution, 1));
            let two = draw(&problem(DType::F16), distribution, 2);
            assert!(one.q != two.q && one.k != two.k && one.v != two.v, "{distribution}");
        }
    }

    #[test]
    fn a_dominant_key_dominates_every_query() {
        // lse is the score of one key alone when it dominates: with 70 unit scores it would be about 4.7.
        let (_, out) = reference(DType::F32, Distribution::DominantKey);
        let least = out.lse.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(least > 18.0, "{least}");
    }

    #[test]
    fn overflowing_and_negative_scores_leave_f16_behind() {
        let (_, out) = reference(DType::F16, Distribution::OverflowingScores);
        assert!(out.lse.iter().filter(|&&lse| lse > 65504.0).count() > out.lse.len() / 2);
        let (_, out) = reference(DType::F16, Distribution::NegativeScores);
        assert!(out.lse.iter().all(|&lse| lse < -65504.0));
    }

    #[test]
    fn names_read_back_as_what_they_name() {
        for distribution in Distribution::ALL {
            assert_eq!(distribution.name().parse(), Ok(distribution));
            let json = serde_json::to_string(&distribution).unwrap();
            assert_eq!(json, format!("\"{distribution}\""));
        }
        assert!("gaussian".parse::<Distribution>().unwrap_err().contains("dominant-key"));
    }
}
