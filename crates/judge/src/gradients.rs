//! What rounding alone may move gradients by: first-order error analysis in f64, for the floors of the rule.
//!
//! With P the probabilities, dP their gradients, D what a row of these has in common and dS = P∘(dP − D) the gradients of
//! scores, a correct engine has these errors (ε of the dtype, ε₃₂ of f32):
//!
//! - **luck**: it may round P and dS to the dtype, ε/2 of each, and the result. Scores and dP are sums of head_dim products in
//!   f32, and so are the sums over keys or queries. Such errors are independent, so their squares are added up.
//! - **habit**: o is given in the dtype, so that D = Σ dO∘O is off by about `ε·√Σ(dO∘O)²`, the same for all keys of a query.
//!   lse is given in f32, so that all probabilities of a query are off by a few times `ε₃₂·|lse|`. Neither cancels the errors
//!   that the scores of a query have, as the softmax of plain attention does.

use flashcore::oracle::GradientReference;
use flashcore::{Backward, Name, Problem, Tensor};
use rayon::prelude::*;

use crate::conditioning::{dot_and_size, largest_number, read_head};
use crate::inputs::smallest_subnormal;
use crate::rule::Floor;

/// What a probability may be off by where exponentials do not reach below the smallest normal number of f32.
const FLUSHED: f64 = 2.0 * f32::MIN_POSITIVE as f64;

/// The floors of every row of dq, dk and dv.
pub(crate) fn floors(
    problem: &Problem,
    given: &Backward<'_>,
    key_lengths: Option<&[u32]>,
    truth: &GradientReference,
) -> [Vec<Floor>; 3] {
    let Problem { batch, heads_kv, len_q, len_k, head_dim, head_dim_v, .. } = *problem;
    let rows = problem.group() * len_q;
    let one = |i: usize| {
        let (b, head_kv) = (i / heads_kv, i % heads_kv);
        let len = key_lengths.map_or(len_k, |lengths| lengths[b] as usize);
        let head = |name: Name, width: usize| {
            given.tensor(name).map_or_else(Vec::new, |tensor| read_head(&tensor, b, head_kv, len, width))
        };
        let keys = Keys { k: head(Name::K, head_dim), v: head(Name::V, head_dim_v), len };
        let part = |all: &[f64], len: usize| all[i * len..(i + 1) * len].to_vec();
        let truth = [
            part(&truth.dq, rows * head_dim),
            part(&truth.dk, len_k * head_dim),
            part(&truth.dv, len_k * head_dim_v),
        ];
        keys.floors(problem, given, [b, head_kv], &truth)
    };
    let parts: Vec<[Vec<Floor>; 3]> = (0..batch * heads_kv).into_par_iter().map(one).collect();
    let mut all = [const { Vec::new() }; 3];
    for part in parts {
        all.iter_mut().zip(part).for_each(|(all, part)| all.extend(part));
    }
    all
}

/// The keys and values of one kv head.
struct Keys {
    k: Vec<f64>,
    v: Vec<f64>,
    len: usize,
}

/// Sums of squares of errors, one for each element of some rows.
struct Squares {
    luck: Vec<f64>,
    habit: Vec<f64>,
    width: usize,
}

impl Squares {
    fn new(rows: usize, width: usize) -> Self {
        Self { luck: vec![0.0; rows * width], habit: vec![0.0; rows * width], width }
    }

    /// Adds the errors of a product: of a factor, times a row.
    fn add(&mut self, row: usize, [luck, habit]: [f64; 2], by: &[f64]) {
        let at = row * self.width..(row + 1) * self.width;
        let (luck, habit) = (luck * luck, habit * habit);
        for ((l, h), x) in self.luck[at.clone()].iter_mut().zip(&mut self.habit[at]).zip(by) {
            *l += luck * x * x;
            *h += habit * x * x;
        }
    }

    /// The floors, with half an ε for the rounding of the results.
    fn floors(self, truth: &[f64], epsilon: f64, least: f64) -> Vec<Floor> {
        let rows = self.luck.chunks_exact(self.width).zip(self.habit.chunks_exact(self.width));
        let floor = |((luck, habit), truth): ((&[f64], &[f64]), &[f64])| {
            let root = |squares: &[f64]| squares.iter().map(|x| x.sqrt()).collect::<Vec<_>>();
            let rounded: Vec<f64> =
                root(luck).iter().zip(truth).map(|(x, y)| x + epsilon / 2.0 * y.abs()).collect();
            // What nobody sees is zero, exactly.
            let seen = luck.iter().any(|&x| x != 0.0);
            let habit = largest_number(&root(habit)) + if seen { least } else { 0.0 };
            Floor { luck: largest_number(&rounded), habit }
        };
        rows.zip(truth.chunks_exact(self.width)).map(floor).collect()
    }
}

impl Keys {
    fn floors(
        &self,
        problem: &Problem,
        given: &Backward<'_>,
        [b, head_kv]: [usize; 2],
        truth: &[Vec<f64>; 3],
    ) -> [Vec<Floor>; 3] {
        let Problem { len_q, len_k, head_dim, head_dim_v, mask, dtype, .. } = *problem;
        let (group, scale) = (problem.group(), f64::from(problem.scale));
        let (epsilon, single) = (f64::from(dtype.epsilon()), f64::from(f32::EPSILON));
        let least = smallest_subnormal(dtype);
        let (root_d, root_dv) = ((head_dim as f64).sqrt(), (head_dim_v as f64).sqrt());
        let root_n = (self.len.max(group * len_q) as f64).sqrt();
        let mut dq = Squares::new(group * len_q, head_dim);
        let (mut dk, mut dv) = (Squares::new(len_k, head_dim), Squares::new(len_k, head_dim_v));
        let read = |name: Name, row: usize, width: usize| -> Vec<f64> {
            let tensor: Option<Tensor<'_>> = given.tensor(name);
            let mut elements = vec![0.0; width];
            if let Some(tensor) = tensor {
                tensor.read_row(b, head_kv * group + row / len_q, row % len_q, &mut elements);
            }
            elements.into_iter().map(f64::from).collect()
        };
        for row in 0..group * len_q {
            let range = mask.keys(row % len_q, len_q, self.len);
            if range.is_empty() {
                continue;
            }
            let (query, d_o) = (read(Name::Q, row, head_dim), read(Name::Do, row, head_dim_v));
            let (o, dlse) = (read(Name::O, row, head_dim_v), read(Name::Dlse, row, 1)[0]);
            let key = |key: usize| &self.k[key * head_dim..][..head_dim];
            let value = |key: usize| &self.v[key * head_dim_v..][..head_dim_v];
            let scored = |at: usize| {
                let (dot, size) = dot_and_size(&query, key(at));
                // The score, the tanh of the softcap, and what the products add up to without their signs.
                problem.softcap.map_or((dot * scale, 0.0, size * scale), |cap| {
                    let cap = f64::from(cap);
                    let t = (dot * scale / cap).tanh();
                    (cap * t, t, size * scale)
                })
            };
            let scores: Vec<(f64, f64, f64)> = range.clone().map(scored).collect();
            let max = scores.iter().map(|&(score, ..)| score).fold(f64::NEG_INFINITY, f64::max);
            let lse = max + scores.iter().map(|&(score, ..)| (score - max).exp()).sum::<f64>().ln();
            let dp: Vec<(f64, f64)> = range.clone().map(|at| dot_and_size(&d_o, value(at))).collect();
            let p: Vec<f64> = scores.iter().map(|&(score, ..)| (score - lse).exp()).collect();
            let mean = p.iter().zip(&dp).map(|(p, &(dp, _))| p * dp).sum::<f64>() - dlse;
            // What D is off by, and what all probabilities are.
            let squares: f64 = o.iter().zip(&d_o).map(|(o, d_o)| (o * d_o).powi(2)).sum();
            let sizes: f64 = o.iter().zip(&d_o).map(|(o, d_o)| (o * d_o).abs()).sum();
            let off_mean = epsilon * squares.sqrt() + single * (root_dv * sizes + dlse.abs());
            let off_p = single * (4.0 + 2.0 * lse.abs());
            let mut pull = vec![0.0; head_dim];
            for (i, at) in range.enumerate() {
                let ((_, t, size), p) = (scores[i], p[i]);
                // Where a score is not finite, rounding no longer matters.
                if p.is_nan() {
                    continue;
                }
                let slope = 1.0 - t * t;
                let felt = if size.is_finite() { size * slope } else { 0.0 };
                let (dp_size, away) = (dp[i].1, (dp[i].0 - mean).abs());
                let of_p = single * (root_d * felt + root_n + lse.abs() + 1.0);
                // A softcap's slope is a difference from 1, and moves with the score.
                let of_slope = problem
                    .softcap
                    .map_or(0.0, |cap| single * (2.0 + 2.0 * t.abs() * root_d * felt / f64::from(cap)));
                let ds = p * away * slope;
                let luck = ds * (epsilon + of_p)
                    + p * away * of_slope
                    + p * slope * single * root_dv * dp_size
                    + FLUSHED * away
                    + least;
                // What plain attention has in common is the sum of its own gradients, so that the errors of its scores cancel.
                let of_scores = 2.0 * single * felt * ds;
                let habit = ds * off_p + p * slope * off_mean + of_scores;
                dk.add(at, [scale * luck, scale * habit], &query);
                dv.add(at, [p * (epsilon + of_p) + FLUSHED + least, p * off_p], &d_o);
                dq.add(row, [scale * luck, scale * of_scores], key(at));
                pull.iter_mut().zip(key(at)).for_each(|(pull, x)| *pull += p * slope * x);
            }
            // These errors are the same for all keys of a query: they do not average out.
            let own = row * head_dim..(row + 1) * head_dim;
            let coherent = pull.iter().zip(&truth[0][own.clone()]);
            for (habit, (pull, dq)) in dq.habit[own].iter_mut().zip(coherent) {
                *habit = (habit.sqrt() + scale * off_mean * pull.abs() + off_p * dq.abs()).powi(2);
            }
        }
        let [of_dq, of_dk, of_dv] = truth;
        [dq.floors(of_dq, epsilon, least), dk.floors(of_dk, epsilon, least), dv.floors(of_dv, epsilon, least)]
    }
}
