//! Attention as other engines would write it, with their own roundings: the rule must accept all of these.

use flashcore::Problem;

/// How an honest engine rounds and in which order it sums.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Numerics {
    /// Unfused: scores in f32, normalised probabilities in the dtype, keys summed from the last to the first.
    PlainReversed,
    /// As a GPU kernel: tiles of 64 keys, base 2 with the scale folded in, unnormalised probabilities in the dtype,
    /// one reciprocal at the end.
    TiledBase2,
    /// As a CPU engine: tiles of 16 keys, f32 throughout, sums in eight lanes.
    TiledLanes,
    /// Four splits of the keys, each on its own, merged by their lse.
    Split,
}

impl Numerics {
    /// All of them.
    pub const ALL: [Numerics; 4] =
        [Numerics::PlainReversed, Numerics::TiledBase2, Numerics::TiledLanes, Numerics::Split];

    /// The output and the lse of one query over the keys that it sees, at least one, and their values.
    pub fn attend(self, problem: &Problem, query: &[f32], keys: &[f32], values: &[f32]) -> (Vec<f32>, f32) {
        let row = Row { query, keys, values, problem };
        match self {
            Numerics::PlainReversed => row.plain_reversed(),
            Numerics::TiledBase2 => row.tiled::<1>(64, true),
            Numerics::TiledLanes => row.tiled::<8>(16, false),
            Numerics::Split => row.split(),
        }
    }
}

/// One query: its keys and values, how to score, and the dtype.
struct Row<'a> {
    query: &'a [f32],
    keys: &'a [f32],
    values: &'a [f32],
    problem: &'a Problem,
}

impl Row<'_> {
    fn len(&self) -> usize {
        self.keys.len() / self.problem.head_dim
    }

    fn dot<const LANES: usize>(&self, key: usize) -> f32 {
        let d = self.problem.head_dim;
        let mut sums = [0.0_f32; LANES];
        for (query, key) in self.query.chunks(LANES).zip(self.keys[key * d..][..d].chunks(LANES)) {
            for (sum, (a, &b)) in sums.iter_mut().zip(query.iter().zip(key)) {
                *sum = a.mul_add(b, *sum);
            }
        }
        sums.iter().sum()
    }

    fn capped(&self, score: f32) -> f32 {
        self.problem.softcap.map_or(score, |cap| cap * (score / cap).tanh())
    }

    fn value(&self, key: usize) -> &[f32] {
        &self.values[key * self.problem.head_dim_v..][..self.problem.head_dim_v]
    }

    fn plain_reversed(&self) -> (Vec<f32>, f32) {
        let scores: Vec<f32> =
            (0..self.len()).map(|key| self.capped(self.dot::<1>(key) * self.problem.scale)).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = scores.iter().rev().map(|s| (s - max).exp()).sum();
        let mut o = vec![0.0; self.problem.head_dim_v];
        for key in (0..self.len()).rev() {
            let p = self.problem.dtype.round((scores[key] - max).exp() / sum);
            o.iter_mut().zip(self.value(key)).for_each(|(o, v)| *o += p * v);
        }
        (o, max + sum.ln())
    }

    /// Online softmax over tiles; `base2` folds the scale into base 2 and rounds the probabilities.
    fn tiled<const LANES: usize>(&self, tile: usize, base2: bool) -> (Vec<f32>, f32) {
        let log2e = std::f32::consts::LOG2_E;
        let factor = if base2 { self.problem.scale * log2e } else { self.problem.scale };
        let exp = |x: f32| if base2 { x.exp2() } else { x.exp() };
        let round = |p: f32| if base2 { self.problem.dtype.round(p) } else { p };
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0_f32);
        let mut o = vec![0.0_f32; self.problem.head_dim_v];
        for first in (0..self.len()).step_by(tile) {
            let keys = first..(first + tile).min(self.len());
            let scores: Vec<f32> = keys
                .clone()
                .map(|key| {
                    let dot = self.dot::<LANES>(key);
                    match (self.problem.softcap, base2) {
                        (None, _) => dot * factor,
                        (Some(_), true) => self.capped(dot * self.problem.scale) * log2e,
                        (Some(_), false) => self.capped(dot * factor),
                    }
                })
                .collect();
            let new_max = scores.iter().copied().fold(max, f32::max);
            let rescale = exp(max - new_max);
            sum *= rescale;
            for o in &mut o {
                *o *= rescale;
            }
            max = new_max;
            for (key, score) in keys.zip(scores) {
                let p = exp(score - max);
                sum += p;
                o.iter_mut().zip(self.value(key)).for_each(|(o, v)| *o += round(p) * v);
            }
        }
        let reciprocal = 1.0 / sum;
        for o in &mut o {
            *o *= reciprocal;
        }
        let lse = if base2 { (max + sum.log2()) / log2e } else { max + sum.ln() };
        (o, lse)
    }

    fn split(&self) -> (Vec<f32>, f32) {
        let Problem { head_dim, head_dim_v, .. } = *self.problem;
        let size = self.len().div_ceil(4).max(1);
        let parts: Vec<(Vec<f32>, f32)> = (0..self.len())
            .step_by(size)
            .map(|first| {
                let len = size.min(self.len() - first);
                let keys = &self.keys[first * head_dim..][..len * head_dim];
                let values = &self.values[first * head_dim_v..][..len * head_dim_v];
                Row { keys, values, ..*self }.tiled::<8>(64, false)
            })
            .collect();
        let max = parts.iter().map(|(_, lse)| *lse).fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = parts.iter().map(|(_, lse)| (lse - max).exp()).sum();
        let mut o = vec![0.0; head_dim_v];
        for (part, lse) in &parts {
            let weight = (lse - max).exp() / sum;
            o.iter_mut().zip(part).for_each(|(o, x)| *o += weight * x);
        }
        (o, max + sum.ln())
    }
}
