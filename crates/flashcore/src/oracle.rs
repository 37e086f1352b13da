//! The oracle: plain attention in f64, written to be obviously right and used to judge everything else.
//!
//! Beside it stands plain attention in the problem's own precision, as an unfused framework computes it. Its
//! error against the oracle is the yardstick of the tolerance rule: a fused kernel may have at most twice that.
//!
//! Both read the tensors element by element and hold a whole row of scores: not for speed. Only the loops are in the
//! order that lets a compiler work on several keys at once; every sum is taken one term after the other.

mod backward;

use std::ops::Range;

use rayon::prelude::*;

pub use backward::{GradientReference, gradients, same_precision_gradients};

use crate::{Descales, Problem, Tensor};

/// What the oracle computes, in the order (batch, heads, length, head_dim_v) and (batch, heads, length).
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// The output.
    pub o: Vec<f64>,
    /// The natural logarithm of the sum of exponentials; −∞ for a query without keys, or whose keys all score −∞.
    pub lse: Vec<f64>,
}

/// Attention in f64. The tensors must fit the problem and lie on the host.
pub fn attention(
    problem: &Problem,
    q: &Tensor<'_>,
    k: &Tensor<'_>,
    v: &Tensor<'_>,
    key_lengths: Option<&[u32]>,
) -> Reference {
    descaled(problem, [q, k, v], key_lengths, &Descales::new())
}

/// Attention in f64 of what stored q, k and v stand for.
pub fn descaled(
    problem: &Problem,
    inputs: [&Tensor<'_>; 3],
    key_lengths: Option<&[u32]>,
    descales: &Descales<'_>,
) -> Reference {
    by_row(problem, inputs, key_lengths, descales, |head, query, keys, out| {
        let scale = f64::from(problem.scale);
        let mut scores = vec![0.0; keys.len()];
        for (d, &a) in query.iter().enumerate() {
            for (dot, &b) in scores.iter_mut().zip(head.keys_at(d, &keys)) {
                *dot += f64::from(a) * f64::from(b);
            }
        }
        for (score, key) in scores.iter_mut().zip(keys.clone()) {
            let [of_q, of_k, _] = head.descales(key).map(f64::from);
            let scale = scale * of_q * of_k;
            *score = match problem.softcap.map(f64::from) {
                Some(cap) => cap * (*score * scale / cap).tanh(),
                None => *score * scale,
            };
        }
        let nothing = scores.iter().all(|&score| score == f64::NEG_INFINITY);
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        for score in &mut scores {
            *score = (*score - max).exp();
        }
        let sum: f64 = scores.iter().sum();
        for (p, key) in scores.iter().zip(keys) {
            let of_v = f64::from(head.descales(key)[2]);
            for (o, &x) in out.iter_mut().zip(head.value(key)) {
                *o += p / sum * f64::from(x) * of_v;
            }
        }
        // The logarithm of 0; o is 0 / 0.
        if nothing { f64::NEG_INFINITY } else { max + sum.ln() }
    })
}

/// How far plain same-precision attention rounds what it keeps between its steps.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Scores and probabilities, and their gradients, are stored in the problem's dtype, as an unfused framework does.
    ScoresAndProbabilities,
    /// Only probabilities are: for inputs whose scores overflow the dtype, where the former gives no yardstick.
    Probabilities,
}

/// What the largest probability of a row is scaled up to before it is rounded to f8: as far as the rounding of 448 allows a
/// power of two, so that the smallest are least often lost.
const F8_TOP: f32 = 256.0;

/// Plain attention in the problem's own precision: matmuls accumulate in f32, what is kept between them is
/// rounded to the dtype, and so is the output.
///
/// With 8 bits, scores are kept in the output's type, as a matmul of 8 bits gives them. Probabilities are rounded to f8 for
/// the second matmul, relative to the largest of their row and scaled up by 2^8; what is left of the division by their sum
/// is done with its result, as is the multiplication by the values' descale.
#[doc(hidden)]
pub fn same_precision(
    problem: &Problem,
    inputs: [&Tensor<'_>; 3],
    key_lengths: Option<&[u32]>,
    descales: &Descales<'_>,
    rounding: Rounding,
) -> Reference {
    let (dtype, kept) = (problem.dtype, problem.out());
    let keep_score = |x: f32| if rounding == Rounding::Probabilities { x } else { kept.round(x) };
    by_row(problem, inputs, key_lengths, descales, |head, query, keys, out| {
        // The values' descales are left to the end, where there is one.
        let blocks = problem.descale_keys.is_some();
        let after = if blocks { 1.0 } else { head.descales(0)[2] };
        let mut scores = vec![0.0_f32; keys.len()];
        for (d, &a) in query.iter().enumerate() {
            for (dot, &b) in scores.iter_mut().zip(head.keys_at(d, &keys)) {
                *dot += a * b;
            }
        }
        for (score, key) in scores.iter_mut().zip(keys.clone()) {
            let [of_q, of_k, _] = head.descales(key);
            *score = keep_score(*score * (problem.scale * (of_q * of_k)));
            if let Some(cap) = problem.softcap {
                // Kept only when it is a score again: what stands between would be lost beside a large cap.
                *score = keep_score(cap * (*score / cap).tanh());
            }
        }
        let nothing = scores.iter().all(|&score| score == f32::NEG_INFINITY);
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for score in &mut scores {
            *score = (*score - max).exp();
        }
        let sum: f32 = scores.iter().sum();
        let mut row = vec![0.0_f32; out.len()];
        let after = if dtype.is_f8() { after / (F8_TOP * sum) } else { after };
        for (p, key) in scores.iter().zip(keys) {
            let p = dtype.round(if dtype.is_f8() { p * F8_TOP } else { p / sum });
            let of_v = if blocks { head.descales(key)[2] } else { 1.0 };
            for (o, &x) in row.iter_mut().zip(head.value(key)) {
                *o += p * x * of_v;
            }
        }
        for (o, x) in out.iter_mut().zip(row) {
            *o = f64::from(kept.round(x * after));
        }
        if nothing { f64::NEG_INFINITY } else { f64::from(max + sum.ln()) }
    })
}

/// The keys and values of one head, widened to f32 (which holds every dtype exactly).
struct Head {
    /// All keys' first elements, then all keys' second ones, and so on.
    keys: Vec<f32>,
    values: Vec<f32>,
    len_k: usize,
    head_dim_v: usize,
    /// What queries, keys and values are to be multiplied by, for each block of keys.
    descales: Vec<[f32; 3]>,
    /// The keys of a block.
    descale_keys: usize,
}

impl Head {
    fn read(problem: &Problem, k: &Tensor<'_>, v: &Tensor<'_>, b: usize, h: usize) -> Self {
        let Problem { len_k, head_dim, head_dim_v, .. } = *problem;
        let mut head = Self {
            keys: vec![0.0; len_k * head_dim],
            values: vec![0.0; len_k * head_dim_v],
            len_k,
            head_dim_v,
            descales: vec![[1.0; 3]],
            descale_keys: problem.descale_keys.unwrap_or(usize::MAX),
        };
        let mut row = vec![0.0; head_dim];
        for s in 0..len_k {
            k.read_row(b, h, s, &mut row);
            for (d, &x) in row.iter().enumerate() {
                head.keys[d * len_k + s] = x;
            }
        }
        for (s, row) in head.values.chunks_exact_mut(head_dim_v).enumerate() {
            v.read_row(b, h, s, row);
        }
        head
    }

    /// Element `d` of some keys.
    fn keys_at(&self, d: usize, keys: &Range<usize>) -> &[f32] {
        &self.keys[d * self.len_k..][keys.clone()]
    }

    /// What belongs to a key, and to queries.
    fn descales(&self, key: usize) -> [f32; 3] {
        self.descales[key / self.descale_keys]
    }

    fn value(&self, key: usize) -> &[f32] {
        &self.values[key * self.head_dim_v..][..self.head_dim_v]
    }
}

/// Runs `row(head, query, keys, out) -> lse` for every query that has keys; the others give zeros and −∞.
fn by_row(
    problem: &Problem,
    [q, k, v]: [&Tensor<'_>; 3],
    key_lengths: Option<&[u32]>,
    descales: &Descales<'_>,
    row: impl Fn(&Head, &[f32], Range<usize>, &mut [f64]) -> f64 + Sync,
) -> Reference {
    let Problem { batch, heads_q, len_q, len_k, head_dim, head_dim_v, mask, .. } = *problem;
    let rows = batch * heads_q * len_q;
    let mut o = vec![0.0; rows * head_dim_v];
    let mut lse = vec![f64::NEG_INFINITY; rows];
    if rows == 0 {
        return Reference { o, lse };
    }
    o.par_chunks_mut(len_q * head_dim_v).zip(lse.par_chunks_mut(len_q)).enumerate().for_each(
        |(i, (o, lse))| {
            let (b, h) = (i / heads_q, i % heads_q);
            let keys_here = key_lengths.map_or(len_k, |lengths| lengths[b] as usize);
            let head_kv = h / problem.group();
            let blocks = problem.descale_block(len_k.saturating_sub(1)) + 1;
            let of_blocks = (0..blocks).map(|block| descales.at(b, head_kv, block)).collect();
            let head = Head { descales: of_blocks, ..Head::read(problem, k, v, b, head_kv) };
            let mut query = vec![0.0; head_dim];
            for (s, (o, lse)) in o.chunks_exact_mut(head_dim_v).zip(lse).enumerate() {
                let keys = mask.keys(s, len_q, keys_here);
                if !keys.is_empty() {
                    q.read_row(b, h, s, &mut query);
                    *lse = row(&head, &query, keys, o);
                }
            }
        },
    );
    Reference { o, lse }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Mask, TensorBuf};

    fn tensor(values: &[f32], shape: [usize; 4]) -> TensorBuf {
        TensorBuf::from_f32(values, shape, DType::F32).unwrap()
    }

    #[test]
    fn equal_scores_average_the_values() {
        let problem = Problem::new(1, 1, 2, 1, DType::F32).with_kv(1, 4);
        let q = tensor(&[0.0, 0.0], [1, 1, 2, 1]);
        let k = tensor(&[1.0, 2.0, 3.0, 4.0], [1, 1, 4, 1]);
        let v = tensor(&[1.0, 2.0, 3.0, 6.0], [1, 1, 4, 1]);
        let out = attention(&problem, &q.view(), &k.view(), &v.view(), None);
        assert_eq!(out.o, [3.0, 3.0]);
        assert!((out.lse[0] - 4.0_f64.ln()).abs() < 1e-15);
    }

    #[test]
    fn two_keys_give_the_logistic_function() {
        let problem = Problem::new(1, 1, 1, 1, DType::F32).with_kv(1, 2).with_scale(0.5);
        let q = tensor(&[2.0], [1, 1, 1, 1]);
        let k = tensor(&[0.0, 1.5], [1, 1, 2, 1]);
        let v = tensor(&[0.0, 1.0], [1, 1, 2, 1]);
        let out = attention(&problem, &q.view(), &k.view(), &v.view(), None);
        assert!((out.o[0] - 1.0 / (1.0 + (-1.5_f64).exp())).abs() < 1e-15);
        let capped = attention(&problem.with_softcap(1.0), &q.view(), &k.view(), &v.view(), None);
        assert!((capped.o[0] - 1.0 / (1.0 + (-(1.5_f64.tanh())).exp())).abs() < 1e-15);
    }

    #[test]
    fn a_query_without_keys_gives_zeros_and_minus_infinity() {
        let problem = Problem::new(1, 1, 3, 1, DType::F32).with_kv(1, 2).with_mask(Mask::Causal);
        let q = tensor(&[1.0; 3], [1, 1, 3, 1]);
        let kv = tensor(&[1.0, 2.0], [1, 1, 2, 1]);
        let out = attention(&problem, &q.view(), &kv.view(), &kv.view(), None);
        assert_eq!((out.o[0], out.lse[0]), (0.0, f64::NEG_INFINITY));
        assert_eq!(out.o[1], 1.0);
    }

    #[test]
    fn keys_that_all_score_minus_infinity_have_the_logarithm_of_zero() {
        let problem = Problem::new(1, 1, 1, 1, DType::F32).with_kv(1, 2);
        let lse = |keys: [f32; 2]| {
            let (q, k) = (tensor(&[1.0], [1, 1, 1, 1]), tensor(&keys, [1, 1, 2, 1]));
            let (q, k) = (q.view(), k.view());
            let plain =
                same_precision(&problem, [&q, &k, &k], None, &Descales::new(), Rounding::Probabilities);
            let out = attention(&problem, &q, &k, &k, None);
            assert!(out.o[0].is_nan() && plain.o[0].is_nan());
            assert!(out.lse[0] == plain.lse[0] || out.lse[0].is_nan() && plain.lse[0].is_nan());
            out.lse[0]
        };
        assert_eq!(lse([f32::NEG_INFINITY; 2]), f64::NEG_INFINITY);
        assert!(lse([f32::NEG_INFINITY, f32::NAN]).is_nan());
        assert!(lse([f32::NEG_INFINITY, f32::INFINITY]).is_nan());
    }

    #[test]
    fn key_lengths_hide_the_keys_behind_them_and_move_the_diagonal() {
        let problem =
            Problem::new(2, 1, 1, 1, DType::F32).with_kv(1, 3).with_mask(Mask::Causal).with_key_lengths();
        let q = tensor(&[0.0; 2], [2, 1, 1, 1]);
        let kv = tensor(&[1.0, 3.0, 8.0, 1.0, 3.0, 8.0], [2, 1, 3, 1]);
        let out = attention(&problem, &q.view(), &kv.view(), &kv.view(), Some(&[2, 0]));
        assert_eq!(out.o, [2.0, 0.0]);
        assert_eq!(out.lse[1], f64::NEG_INFINITY);
    }

    #[test]
    fn query_heads_of_a_group_share_their_kv_head() {
        let problem = Problem::new(1, 4, 1, 1, DType::F32).with_kv(2, 1);
        let q = tensor(&[1.0; 4], [1, 4, 1, 1]);
        let kv = tensor(&[5.0, 7.0], [1, 2, 1, 1]);
        let out = attention(&problem, &q.view(), &kv.view(), &kv.view(), None);
        assert_eq!(out.o, [5.0, 5.0, 7.0, 7.0]);
    }

    #[test]
    fn descales_multiply_what_is_stored() {
        let problem = Problem::new(1, 2, 1, 1, DType::F8E4M3).with_kv(2, 2).with_descales();
        let tensor = |values: &[f32], shape| TensorBuf::from_f32(values, shape, DType::F8E4M3).unwrap();
        let (q, k) = (tensor(&[1.0; 2], [1, 2, 1, 1]), tensor(&[0.0, 1.0, 0.0, 1.0], [1, 2, 2, 1]));
        let v = tensor(&[0.0, 1.0, 0.0, 1.0], [1, 2, 2, 1]);
        let of = [[3.0, 0.5], [0.25, 1.0], [2.0, 7.0]];
        let descales = of.each_ref().map(|values| Tensor::descale(values, [1, 2]).unwrap());
        let descales = Descales::of(descales.each_ref());
        let out = descaled(&problem, [&q.view(), &k.view(), &v.view()], None, &descales);
        for (head, o) in out.o.iter().enumerate() {
            let [q, k, v] = of.map(|values| f64::from(values[head]));
            assert!((o - v / (1.0 + (-q * k).exp())).abs() < 1e-15);
        }
        let rounding = Rounding::ScoresAndProbabilities;
        let plain = same_precision(&problem, [&q.view(), &k.view(), &v.view()], None, &descales, rounding);
        // Of two probabilities, the larger is 2^8 exactly.
        assert!(plain.o.iter().zip(&out.o).all(|(plain, o)| (plain / o - 1.0).abs() < 0.004), "{plain:?}");
    }

    #[test]
    fn same_precision_rounds_to_the_dtype() {
        let problem = Problem::new(1, 1, 1, 1, DType::BF16).with_kv(1, 3);
        let one = TensorBuf::from_f32(&[1.0], [1, 1, 1, 1], DType::BF16).unwrap();
        let kv = TensorBuf::from_f32(&[0.0, 0.0, 0.0], [1, 1, 3, 1], DType::BF16).unwrap();
        let v = TensorBuf::from_f32(&[1.0, 0.0, 0.0], [1, 1, 3, 1], DType::BF16).unwrap();
        let rounding = Rounding::ScoresAndProbabilities;
        let plain =
            same_precision(&problem, [&one.view(), &kv.view(), &v.view()], None, &Descales::new(), rounding);
        assert_eq!(plain.o[0], f64::from(half::bf16::from_f32(1.0 / 3.0).to_f32()));
    }
}
