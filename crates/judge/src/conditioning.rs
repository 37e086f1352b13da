//! How sensitive a row of attention is to rounding: first-order error analysis in f64.
//!
//! The tolerance rule needs a floor for rows where plain attention happens to be nearly exact. A guessed floor
//! lets faults through or refuses correct results, so it is derived from two numbers per row:
//!
//! - its **magnitude**, Σ pₖ·|vₖ|: rounding the probabilities and the output moves the output by a fraction of it;
//! - its **sensitivity**, Σ pₖ·aₖ·|vₖ − o| with aₖ = scale·Σ|qᵢ·kᵢ|: a relative error in the products of a score
//!   moves the output by that fraction of it. A row with one dominant key has no sensitivity, however large its scores.
//!
//! Where probabilities are rounded to 8 bits, the first is far too much for many keys, whose roundings average out, and its
//! **spread**, √Σ (pₖ·vₖ)², takes its place.

use flashcore::oracle::Reference;
use flashcore::{Descales, Problem, Tensor};
use rayon::prelude::*;

/// The conditioning of one query's output.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Conditioning {
    /// How many keys the query attends to.
    pub keys: usize,
    /// The largest Σ pₖ·|vₖ| of the row's columns.
    pub magnitude: f64,
    /// The largest Σ pₖ·aₖ·|vₖ − o| of the row's columns.
    pub sensitivity: f64,
    /// The largest √Σ (pₖ·vₖ)² of the row's columns.
    pub spread: f64,
    /// Σ pₖ·aₖ: what a relative error in the products moves lse by.
    pub score_magnitude: f64,
}

/// The conditioning of every row, in the order (batch, heads, length). `oracle` is the problem's true result.
pub fn conditioning(
    problem: &Problem,
    [q, k, v]: [&Tensor<'_>; 3],
    key_lengths: Option<&[u32]>,
    descales: &Descales<'_>,
    oracle: &Reference,
) -> Vec<Conditioning> {
    let Problem { batch, heads_q, len_q, len_k, head_dim, head_dim_v, mask, .. } = *problem;
    let mut rows = vec![Conditioning::default(); batch * heads_q * len_q];
    rows.par_chunks_mut(len_q.max(1)).enumerate().for_each(|(i, rows)| {
        let (b, h) = (i / heads_q, i % heads_q);
        let len = key_lengths.map_or(len_k, |lengths| lengths[b] as usize);
        let of_key = |key| descales.at(b, h / problem.group(), problem.descale_block(key)).map(f64::from);
        let scales: Vec<f64> = (0..len)
            .map(|key| {
                let [of_q, of_k, _] = of_key(key);
                f64::from(problem.scale) * of_q * of_k
            })
            .collect();
        let keys = read_head(k, b, h / problem.group(), len, head_dim);
        let mut values = read_head(v, b, h / problem.group(), len, head_dim_v);
        for (key, value) in values.chunks_exact_mut(head_dim_v).enumerate() {
            let [.., of_v] = of_key(key);
            for x in value {
                *x *= of_v;
            }
        }
        let mut query = vec![0.0_f32; head_dim];
        for (s, row) in rows.iter_mut().enumerate() {
            let range = mask.keys(s, len_q, len);
            if range.is_empty() {
                continue;
            }
            q.read_row(b, h, s, &mut query);
            let query: Vec<f64> = query.iter().map(|&x| f64::from(x)).collect();
            let index = i * len_q + s;
            let o = &oracle.o[index * head_dim_v..][..head_dim_v];
            row.keys = range.len();
            let [mut magnitudes, mut sensitivities, mut squares] = [const { Vec::new() }; 3];
            for sums in [&mut magnitudes, &mut sensitivities, &mut squares] {
                sums.resize(head_dim_v, 0.0);
            }
            for key in range {
                let (dot, size) = dot_and_size(&query, &keys[key * head_dim..][..head_dim]);
                let scale = scales[key];
                let score = problem.softcap.map_or(dot * scale, |cap| {
                    let cap = f64::from(cap);
                    cap * (dot * scale / cap).tanh()
                });
                let p = (score - oracle.lse[index]).exp();
                // Below this a key adds nothing that an f64 sum could show. Where a score is not finite, rounding
                // no longer matters.
                if p < 1e-40 || p.is_nan() {
                    continue;
                }
                // Products that overflow leave a softcap's score where it is, at the cap.
                let felt = if size.is_finite() { size * scale } else { 0.0 };
                row.score_magnitude += p * felt;
                let value = &values[key * head_dim_v..][..head_dim_v];
                for j in 0..head_dim_v {
                    magnitudes[j] += p * value[j].abs();
                    squares[j] += (p * value[j]).powi(2);
                    sensitivities[j] += p * felt * (value[j] - o[j]).abs();
                }
            }
            row.magnitude = largest_number(&magnitudes);
            row.sensitivity = largest_number(&sensitivities);
            row.spread = largest_number(&squares).sqrt();
        }
    });
    rows
}

/// The largest finite value of some columns; one that holds NaN or infinity is not sensitive to rounding.
pub(crate) fn largest_number(columns: &[f64]) -> f64 {
    columns.iter().copied().filter(|x| x.is_finite()).fold(0.0, f64::max)
}

pub(crate) fn read_head(tensor: &Tensor<'_>, b: usize, h: usize, len: usize, head_dim: usize) -> Vec<f64> {
    let mut row = vec![0.0_f32; head_dim];
    let mut all = Vec::with_capacity(len * head_dim);
    for s in 0..len {
        tensor.read_row(b, h, s, &mut row);
        all.extend(row.iter().map(|&x| f64::from(x)));
    }
    all
}

/// Σ xᵢ·yᵢ and Σ |xᵢ·yᵢ|, in four lanes for speed.
pub(crate) fn dot_and_size(x: &[f64], y: &[f64]) -> (f64, f64) {
    let (mut dot, mut size) = ([0.0; 4], [0.0; 4]);
    let (xs, ys) = (x.chunks_exact(4), y.chunks_exact(4));
    for (x, y) in xs.remainder().iter().zip(ys.remainder()) {
        dot[0] += x * y;
        size[0] += (x * y).abs();
    }
    for (x, y) in xs.zip(ys) {
        for lane in 0..4 {
            let product = x[lane] * y[lane];
            dot[lane] += product;
            size[lane] += product.abs();
        }
    }
    (dot.iter().sum(), size.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::{DType, Mask, TensorBuf, oracle};

    fn rows(problem: &Problem, q: &[f32], k: &[f32], v: &[f32]) -> Vec<Conditioning> {
        let buf =
            |x: &[f32], h, s, d| TensorBuf::from_f32(x, [problem.batch, h, s, d], problem.dtype).unwrap();
        let q = buf(q, problem.heads_q, problem.len_q, problem.head_dim);
        let k = buf(k, problem.heads_kv, problem.len_k, problem.head_dim);
        let v = buf(v, problem.heads_kv, problem.len_k, problem.head_dim_v);
        let (q, k, v) = (q.view(), k.view(), v.view());
        let truth = oracle::attention(problem, &q, &k, &v, None);
        conditioning(problem, [&q, &k, &v], None, &Descales::new(), &truth)
    }

    #[test]
    fn two_equal_keys_with_opposite_values_have_magnitude_but_cancel() {
        let problem = Problem::new(1, 1, 1, 1, DType::F32).with_kv(1, 2).with_scale(1.0);
        let [row] = rows(&problem, &[3.0], &[2.0, 2.0], &[1.0, -1.0])[..] else { panic!("one row") };
        assert_eq!(row.keys, 2);
        assert!((row.magnitude - 1.0).abs() < 1e-12);
        assert!((row.sensitivity - 6.0).abs() < 1e-12 && (row.score_magnitude - 6.0).abs() < 1e-12);
    }

    #[test]
    fn a_dominant_key_leaves_no_sensitivity_however_large_its_score() {
        let problem = Problem::new(1, 1, 1, 1, DType::F32).with_kv(1, 2).with_scale(1.0);
        let row = rows(&problem, &[1e4], &[1e4, -1e4], &[5.0, -7.0])[0];
        assert_eq!((row.magnitude, row.sensitivity), (5.0, 0.0));
    }

    #[test]
    fn a_row_without_keys_has_nothing_to_feel() {
        let problem = Problem::new(1, 1, 2, 1, DType::F32).with_kv(1, 1).with_mask(Mask::Causal);
        let rows = rows(&problem, &[1.0, 1.0], &[1.0], &[2.0]);
        assert_eq!(rows[0], Conditioning::default());
        assert_eq!(rows[1].keys, 1);
    }

    /// Moves every product of every score by a relative 1e-6 and measures how the output moves.
    #[test]
    fn sensitivity_bounds_what_an_error_in_the_products_does() {
        let problem = Problem::new(1, 1, 1, 4, DType::F32).with_kv(1, 9);
        let values = crate::inputs::draw(&problem, crate::inputs::Distribution::Normal, 4);
        let row = rows(&problem, &values.q, &values.k, &values.v)[0];
        let attend = |relative: f64| {
            let mut rng = crate::rng::Rng::new(9);
            let weights: Vec<f64> = values
                .k
                .chunks_exact(4)
                .map(|key| {
                    let dot =
                        |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(*b) * (1.0 + relative * rng.sign());
                    (values.q.iter().zip(key).map(dot).sum::<f64>() * 0.5).exp()
                })
                .collect();
            let total: f64 = weights.iter().sum();
            (0..4)
                .map(|j| {
                    weights
                        .iter()
                        .zip(values.v[j..].iter().step_by(4))
                        .map(|(w, &v)| w / total * f64::from(v))
                        .sum()
                })
                .collect::<Vec<f64>>()
        };
        let moved = attend(0.0).iter().zip(attend(1e-6)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(moved > 0.0 && moved <= 1.001e-6 * row.sensitivity, "{moved} {row:?}");
    }
}
