//! The gradients of plain attention, in f64 and in the problem's own precision.

use std::{
    iter::Sum,
    ops::{AddAssign, Mul, Range},
};

use rayon::prelude::*;

use super::Rounding;
use crate::{Backward, Name, Problem, Tensor};

/// The gradients of q, k and v, each in the order (batch, heads, length, head_dim).
#[derive(Clone, Debug, PartialEq)]
pub struct GradientReference {
    /// The gradient of q.
    pub dq: Vec<f64>,
    /// The gradient of k, summed over the query heads that share a kv head.
    pub dk: Vec<f64>,
    /// The gradient of v, summed likewise.
    pub dv: Vec<f64>,
}

/// Gradients in f64, by the definition: o and lse are not read, but computed again. The tensors must fit the problem and
/// lie on the host.
pub fn gradients(problem: &Problem, given: &Backward<'_>, key_lengths: Option<&[u32]>) -> GradientReference {
    let scale = f64::from(problem.scale);
    by_group(problem, given, key_lengths, |group, dq, [dk, dv]| {
        group.each_row(|row, dq_at| {
            let mut p: Vec<f64> = group.k.dots(&row.query, &row.keys);
            let mut slopes = vec![scale; p.len()];
            for (score, slope) in p.iter_mut().zip(&mut slopes) {
                *score *= scale;
                if let Some(cap) = problem.softcap.map(f64::from) {
                    let t = (*score / cap).tanh();
                    (*score, *slope) = (cap * t, scale * (1.0 - t * t));
                }
            }
            let max = p.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            for p in &mut p {
                *p = (*p - max).exp();
            }
            let sum: f64 = p.iter().sum();
            let dp: Vec<f64> = group.v.dots(&row.d_o, &row.keys);
            let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p / sum * dp).sum();
            let dq = &mut dq[dq_at];
            for (i, key) in row.keys.clone().enumerate() {
                let p = p[i] / sum;
                let ds = p * (dp[i] - mean + f64::from(row.dlse)) * slopes[i];
                add(&mut dv[group.v.at(key)], p, &row.d_o);
                add(&mut dk[group.k.at(key)], ds, &row.query);
                add(dq, ds, group.k.row(key));
            }
        });
    })
}

/// Gradients as an unfused framework computes them in the problem's own precision: products are summed in f32, and what is
/// kept between them (scores, probabilities, their gradients) is rounded to the dtype. Every query head has a gradient of
/// its own for k and v, and those of a group are added up.
#[doc(hidden)]
pub fn same_precision_gradients(
    problem: &Problem,
    given: &Backward<'_>,
    key_lengths: Option<&[u32]>,
    rounding: Rounding,
) -> GradientReference {
    let &Problem { dtype, scale, .. } = problem;
    let keep = |x: f32| if rounding == Rounding::Probabilities { x } else { dtype.round(x) };
    by_group(problem, given, key_lengths, |group, all_dq, [all_dk, all_dv]| {
        let mut head = usize::MAX;
        let (mut dk, mut dv) = (vec![0.0_f32; all_dk.len()], vec![0.0_f32; all_dv.len()]);
        let mut end_head = |dk: &mut [f32], dv: &mut [f32]| {
            for (all, own, factor) in [(&mut *all_dk, dk, scale), (&mut *all_dv, dv, 1.0)] {
                for (all, own) in all.iter_mut().zip(own) {
                    *all = f64::from(*all as f32 + dtype.round(*own * factor));
                    *own = 0.0;
                }
            }
        };
        group.each_row(|row, dq_at| {
            if row.head != head {
                end_head(&mut dk, &mut dv);
                head = row.head;
            }
            let mut p: Vec<f32> = group.k.dots(&row.query, &row.keys);
            let mut slopes = vec![1.0_f32; p.len()];
            for (score, slope) in p.iter_mut().zip(&mut slopes) {
                *score = keep(*score * scale);
                if let Some(cap) = problem.softcap {
                    let t = (*score / cap).tanh();
                    (*score, *slope) = (keep(cap * t), 1.0 - t * t);
                }
            }
            let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for p in &mut p {
                *p = (*p - max).exp();
            }
            let sum: f32 = p.iter().sum();
            for p in &mut p {
                *p = dtype.round(*p / sum);
            }
            let mut dp: Vec<f32> = group.v.dots(&row.d_o, &row.keys);
            for dp in &mut dp {
                *dp = keep(*dp);
            }
            let mean: f32 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            let mut dq = vec![0.0_f32; row.query.len()];
            for (i, key) in row.keys.clone().enumerate() {
                let ds = keep(p[i] * (dp[i] - mean + row.dlse) * slopes[i]);
                add(&mut dv[group.v.at(key)], p[i], &row.d_o);
                add(&mut dk[group.k.at(key)], ds, &row.query);
                add(&mut dq, ds, group.k.row(key));
            }
            for (to, x) in all_dq[dq_at].iter_mut().zip(dq) {
                *to = f64::from(dtype.round(x * scale));
            }
        });
        end_head(&mut dk, &mut dv);
        for x in all_dk.iter_mut().chain(all_dv) {
            *x = f64::from(dtype.round(*x as f32));
        }
    })
}

/// Rows of a kv head as f32, which holds every dtype exactly.
struct Rows {
    /// One row behind the other.
    along: Vec<f32>,
    /// All first elements, then all second ones, and so on.
    across: Vec<f32>,
    len: usize,
    width: usize,
}

impl Rows {
    fn read(tensor: &Tensor<'_>, b: usize, h: usize, len: usize) -> Self {
        let width = tensor.shape()[3];
        let (mut along, mut across) = (vec![0.0; len * width], vec![0.0; len * width]);
        for (s, row) in along.chunks_exact_mut(width).enumerate() {
            tensor.read_row(b, h, s, row);
            for (d, &x) in row.iter().enumerate() {
                across[d * len + s] = x;
            }
        }
        Self { along, across, len, width }
    }

    fn at(&self, row: usize) -> Range<usize> {
        row * self.width..(row + 1) * self.width
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.along[self.at(row)]
    }

    /// The products of a row with some of these, each summed term by term.
    fn dots<T: Number>(&self, x: &[f32], rows: &Range<usize>) -> Vec<T> {
        let mut dots = vec![T::from(0.0); rows.len()];
        for (d, &a) in x.iter().enumerate() {
            for (dot, &b) in dots.iter_mut().zip(&self.across[d * self.len..][rows.clone()]) {
                *dot += T::from(a) * T::from(b);
            }
        }
        dots
    }
}

/// f32 or f64.
trait Number: Copy + From<f32> + AddAssign + Mul<Output = Self> + Sum {}
impl<T: Copy + From<f32> + AddAssign + Mul<Output = T> + Sum> Number for T {}

fn add<T: Number>(sums: &mut [T], factor: T, row: &[f32]) {
    for (sum, &x) in sums.iter_mut().zip(row) {
        *sum += factor * T::from(x);
    }
}

/// One query that sees keys.
struct Row {
    /// Which query head of the group it is of.
    head: usize,
    keys: Range<usize>,
    query: Vec<f32>,
    d_o: Vec<f32>,
    dlse: f32,
}

/// A kv head with the query heads that share it.
struct Group<'a> {
    problem: &'a Problem,
    given: &'a Backward<'a>,
    b: usize,
    head_kv: usize,
    /// As many rows as there are keys.
    k: Rows,
    v: Rows,
}

impl Group<'_> {
    /// Takes up every query that sees keys, head by head, with the place of its gradient among those of the group.
    fn each_row(&self, mut work: impl FnMut(&Row, Range<usize>)) {
        let Problem { len_q, head_dim, head_dim_v, mask, .. } = *self.problem;
        let read = |name: Name, h: usize, s: usize, width: usize| {
            let mut row = vec![0.0; width];
            if let Some(tensor) = self.given.tensor(name) {
                tensor.read_row(self.b, h, s, &mut row);
            }
            row
        };
        let group = self.problem.group();
        for i in 0..group * len_q {
            let (head, s) = (i / len_q, i % len_q);
            let (h, keys) = (self.head_kv * group + head, mask.keys(s, len_q, self.k.len));
            if !keys.is_empty() {
                let query = read(Name::Q, h, s, head_dim);
                let d_o = read(Name::Do, h, s, head_dim_v);
                let row = Row { head, keys, query, d_o, dlse: read(Name::Dlse, h, s, 1)[0] };
                work(&row, i * head_dim..(i + 1) * head_dim);
            }
        }
    }
}

/// Runs `work(group, dq, [dk, dv])` for every kv head, on gradients that are zeros.
fn by_group(
    problem: &Problem,
    given: &Backward<'_>,
    key_lengths: Option<&[u32]>,
    work: impl Fn(&Group<'_>, &mut [f64], [&mut [f64]; 2]) + Sync,
) -> GradientReference {
    let Problem { heads_kv, len_k, .. } = *problem;
    let signature = problem.signature();
    let zeros = |name: Name| {
        let elements = |shape: [usize; 4]| shape.iter().product();
        let of = signature.outputs().find(|output| output.name == name);
        vec![0.0; of.map_or(0, |output| elements(output.shape))]
    };
    let [mut dq, mut dk, mut dv] = [Name::Dq, Name::Dk, Name::Dv].map(zeros);
    let tensor = |name: Name| given.tensor(name).expect("every backward pass has it");
    let (k, v) = (tensor(Name::K), tensor(Name::V));
    let heads = (problem.batch * heads_kv).max(1);
    let size = |all: &[f64]| (all.len() / heads).max(1);
    let sizes = [size(&dq), size(&dk), size(&dv)];
    // Where there are no queries or no keys, there is nothing to add up.
    let parts = dq.par_chunks_mut(sizes[0]).zip(dk.par_chunks_mut(sizes[1]).zip(dv.par_chunks_mut(sizes[2])));
    parts.enumerate().for_each(|(i, (dq, (dk, dv)))| {
        let (b, head_kv) = (i / heads_kv, i % heads_kv);
        let len = key_lengths.map_or(len_k, |lengths| lengths[b] as usize);
        let (k, v) = (Rows::read(&k, b, head_kv, len), Rows::read(&v, b, head_kv, len));
        work(&Group { problem, given, b, head_kv, k, v }, dq, [dk, dv]);
    });
    GradientReference { dq, dk, dv }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, DType, Device, TensorBuf, oracle};

    /// A problem with values that f32 holds exactly, and so do they after small steps.
    struct Case {
        problem: Problem,
        key_lengths: Option<Vec<u32>>,
        /// q, k, v, do and dlse.
        values: [Vec<f32>; 5],
    }

    /// The steps of the differences: powers of two, as the values' grid.
    const STEP: f32 = 1.0 / 64.0;

    impl Case {
        fn new(text: &str, key_lengths: Option<Vec<u32>>) -> Self {
            let problem: Problem = text.parse().unwrap();
            let mut state = 1_u64;
            let mut values = |shape: [usize; 4]| -> Vec<f32> {
                let mut next = || {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 1.5
                };
                (0..shape.iter().product()).map(|_| (next() / STEP).round() * STEP).collect()
            };
            let signature = problem.with_lse().signature();
            let inputs: Vec<[usize; 4]> = signature.inputs().map(|it| it.shape).collect();
            // q, k, v, o, lse, do, dlse.
            let values = [0, 1, 2, 5, 6].map(|i| values(inputs[i]));
            Self { problem, key_lengths, values }
        }

        fn buf(&self, which: usize, values: &[f32]) -> TensorBuf {
            let names = [Name::Q, Name::K, Name::V, Name::Do, Name::Dlse];
            let signature = self.problem.with_lse().signature();
            let of = signature.iter().find(|it| it.name == names[which]).unwrap();
            TensorBuf::from_f32(values, of.shape, DType::F32).unwrap()
        }

        /// Σ do·o + Σ dlse·lse, with one element of an input moved.
        fn loss(&self, which: usize, element: usize, by: f32) -> f64 {
            let inputs: Vec<TensorBuf> = (0..3)
                .map(|i| {
                    let mut values = self.values[i].clone();
                    if i == which {
                        values[element] += by;
                    }
                    self.buf(i, &values)
                })
                .collect();
            let [q, k, v] = &inputs[..] else { unreachable!() };
            let out = oracle::attention(
                &self.problem,
                &q.view(),
                &k.view(),
                &v.view(),
                self.key_lengths.as_deref(),
            );
            let dot = |a: &[f32], b: &[f64]| -> f64 {
                a.iter().zip(b).filter(|(_, b)| b.is_finite()).map(|(&a, b)| f64::from(a) * b).sum()
            };
            let of_lse = if self.problem.lse { dot(&self.values[4], &out.lse) } else { 0.0 };
            dot(&self.values[3], &out.o) + of_lse
        }

        fn gradients(&self) -> GradientReference {
            let all: Vec<TensorBuf> = (0..5).map(|i| self.buf(i, &self.values[i])).collect();
            // o and lse are not read.
            let (o, lse) = (&all[3], &all[4]);
            let given = Backward::new(
                [&all[0].view(), &all[1].view(), &all[2].view()],
                &o.view(),
                &lse.view(),
                &all[3].view(),
            );
            let dlse = all[4].view();
            let given = if self.problem.lse { given.with_dlse(&dlse) } else { given };
            gradients(&self.problem, &given, self.key_lengths.as_deref())
        }
    }

    #[test]
    fn gradients_are_the_slopes_of_the_forward_oracle() {
        for (text, key_lengths) in [
            ("1x1x3/4x2/3 f32 backward", None),
            ("2x4/2x3/5x2 f32 lse backward", None),
            ("1x2x4/6x3/2 f32 causal softcap=2 lse backward", None),
            ("1x2/1x5/3x2 f32 causal scale=0.9 lse backward", None),
            ("1x3/1x4/7x2 f32 causal-top-left softcap=1.5 backward", None),
            ("2x2/1x4/6x2 f32 window(1,2) lse backward", None),
            ("3x2/1x3/5x2 f32 causal key-lengths lse backward", Some(vec![5, 0, 2])),
        ] {
            let case = Case::new(text, key_lengths);
            let found = case.gradients();
            for (which, found) in [found.dq, found.dk, found.dv].iter().enumerate() {
                for (element, &found) in found.iter().enumerate() {
                    let slope = |step: f32| {
                        (case.loss(which, element, step) - case.loss(which, element, -step))
                            / (2.0 * f64::from(step))
                    };
                    // The error of a central difference falls with the square of its step.
                    let slope = (4.0 * slope(STEP / 2.0) - slope(STEP)) / 3.0;
                    assert!(
                        (found - slope).abs() < 1e-6,
                        "{text}: element {element} of tensor {which} is {found}, its slope {slope}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_nobody_sees_has_no_gradient() {
        // Of 4 queries and 2 keys, the first two queries see nothing; of a key length of 1, nobody sees key 1.
        let case = Case::new("2x1x4/2x3 f32 causal key-lengths backward", Some(vec![2, 1]));
        let GradientReference { dq, dk, dv } = case.gradients();
        assert!(dq[..6].iter().all(|&x| x == 0.0) && dq[9..12].iter().any(|&x| x != 0.0));
        assert!(dk[9..].iter().chain(&dv[9..]).all(|&x| x == 0.0) && dv[6..9].iter().any(|&x| x != 0.0));
    }

    #[test]
    fn same_precision_in_f32_is_near_the_truth_and_in_half_precision_less_so() {
        let error = |text: &str| {
            let problem: Problem = text.parse().unwrap();
            let shapes: Vec<[usize; 4]> = problem.signature().inputs().map(|it| it.shape).collect();
            let wave = |i: usize, shape: [usize; 4]| {
                let values: Vec<f32> =
                    (0..shape.iter().product()).map(|n: usize| (n as f32 * 0.7 + i as f32).sin()).collect();
                TensorBuf::from_f32(&values, shape, problem.dtype).unwrap()
            };
            let [q, k, v, d_o] = [0, 1, 2, 5].map(|i| wave(i, shapes[i]));
            let attention = Attention::new().mask(problem.mask).with_lse();
            let out = attention.run(&Device::cpu(), &q.view(), &k.view(), &v.view()).unwrap();
            let (o, lse) = (out.o, out.lse.unwrap());
            let given = Backward::new([&q.view(), &k.view(), &v.view()], &o.view(), &lse.view(), &d_o.view());
            let truth = gradients(&problem, &given, None);
            let plain = same_precision_gradients(&problem, &given, None, Rounding::ScoresAndProbabilities);
            let most = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            [most(&truth.dq, &plain.dq), most(&truth.dk, &plain.dk), most(&truth.dv, &plain.dv)]
        };
        for (text, most) in [("f32", 1e-5), ("f16", 1e-2), ("bf16", 8e-2)] {
            let errors = error(&format!("1x4/2x9/12x8 {text} causal backward"));
            assert!(errors.iter().all(|&error| error > 0.0 && error < most), "{text}: {errors:?}");
        }
    }
}
