//! A backward pass as a GPU's kernels do it, and the slips that such kernels make: what the check must accept, and what it
//! must refuse.
//!
//! Keys are taken in tiles. Probabilities come from lse to base 2, they and the gradients of scores are rounded to the dtype
//! for the products, and every tile adds its part to dQ.

use flashcore::{Attention, Backward, Mask, Name, Problem, Tensor, TensorMut};

use crate::engine::Engine;

/// Keys of a tile.
const TILE: usize = 64;

/// What may be wrong with a backward pass, and with it alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slip {
    /// The part of dQ of one tile of keys is lost.
    TileLost,
    /// The part of dQ of one tile of keys is added twice.
    TileTwice,
    /// What the gradients of a query's probabilities have in common is not subtracted.
    MeanLeftOut,
    /// The gradient of lse is not added.
    DlseLeftOut,
    /// dQ is multiplied with the scale once too often.
    ScaledTwice,
    /// The sums over the query heads of a group lack one.
    HeadMissing,
    /// A causal mask lets a query see one key more than in the forward pass.
    MaskTooWide,
    /// A causal mask lets a query see one key less than in the forward pass.
    MaskTooNarrow,
    /// Probabilities are taken from lse as if it were to base 2.
    OtherBase,
    /// dK and dV are exchanged.
    Exchanged,
}

impl Slip {
    /// All of them.
    pub const ALL: [Slip; 10] = [
        Slip::TileLost,
        Slip::TileTwice,
        Slip::MeanLeftOut,
        Slip::DlseLeftOut,
        Slip::ScaledTwice,
        Slip::HeadMissing,
        Slip::MaskTooWide,
        Slip::MaskTooNarrow,
        Slip::OtherBase,
        Slip::Exchanged,
    ];

    /// What it is, in words.
    pub const fn name(self) -> &'static str {
        match self {
            Slip::TileLost => "dq without the part of one tile of keys",
            Slip::TileTwice => "dq with the part of one tile of keys twice",
            Slip::MeanLeftOut => "gradients without what a query's have in common",
            Slip::DlseLeftOut => "gradients without that of lse",
            Slip::ScaledTwice => "dq scaled once too often",
            Slip::HeadMissing => "dk and dv without one query head of a group",
            Slip::MaskTooWide => "a backward pass that sees one key too many",
            Slip::MaskTooNarrow => "a backward pass that sees one key too few",
            Slip::OtherBase => "a backward pass that takes lse to base 2",
            Slip::Exchanged => "dk and dv exchanged",
        }
    }
}

/// An engine that computes gradients alone, rightly or with a slip.
#[derive(Clone, Copy, Debug)]
pub struct Tiled {
    /// What is wrong with it, if anything.
    pub slip: Option<Slip>,
}

impl Engine for Tiled {
    fn name(&self) -> &'static str {
        self.slip.map_or("tiled gradients", Slip::name)
    }

    fn supports(&self, problem: &Problem) -> Result<(), String> {
        if problem.key_lengths { Err("key lengths are not its business".into()) } else { Ok(()) }
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        attention.run_into(&flashcore::Device::cpu(), q, k, v, o, lse)
    }

    fn differentiates(&self) -> bool {
        true
    }

    fn differentiate(
        &self,
        attention: &Attention<'_>,
        given: &Backward<'_>,
        [dq, dk, dv]: [&mut TensorMut<'_>; 3],
    ) -> flashcore::Result<()> {
        let problem = attention.backward_problem(given)?;
        let mut gradients = self.gradients(&problem, given);
        if self.slip == Some(Slip::Exchanged) {
            gradients.swap(1, 2);
        }
        for (values, tensor) in gradients.iter().zip([dq, dk, dv]) {
            let [_, heads, len, width] = tensor.shape();
            for (i, row) in values.chunks_exact(width).enumerate() {
                tensor.write_row(i / (heads * len), i / len % heads, i % len, row);
            }
        }
        Ok(())
    }
}

impl Tiled {
    /// dq, dk and dv.
    fn gradients(self, problem: &Problem, given: &Backward<'_>) -> [Vec<f32>; 3] {
        let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, dtype, .. } = *problem;
        let slip = |slip| self.slip == Some(slip);
        let all = |name: Name| given.tensor(name).map_or_else(Vec::new, |tensor| tensor.to_f32());
        let (q, k, v) = (all(Name::Q), all(Name::K), all(Name::V));
        let (o, lse, d_o, dlse) = (all(Name::O), all(Name::Lse), all(Name::Do), all(Name::Dlse));
        let mask = match (problem.mask, self.slip) {
            (Mask::Causal, Some(Slip::MaskTooWide)) => Mask::Window { left: None, right: Some(1) },
            (mask, _) => mask,
        };
        let log2e = std::f32::consts::LOG2_E;
        let mut dq = vec![0.0; q.len()];
        let (mut dk, mut dv) = (vec![0.0; k.len()], vec![0.0; v.len()]);
        for row in 0..batch * heads_q * len_q {
            let (b, h, s) = (row / len_q / heads_q, row / len_q % heads_q, row % len_q);
            let mut seen = mask.keys(s, len_q, len_k);
            seen.end -= usize::from(slip(Slip::MaskTooNarrow) && !seen.is_empty());
            let head = (b * heads_kv + h / problem.group()) * len_k;
            let (query, d_o) = (&q[row * head_dim..][..head_dim], &d_o[row * head_dim_v..][..head_dim_v]);
            let base = if slip(Slip::OtherBase) { lse[row] } else { lse[row] * log2e };
            let mut mean = dot(d_o, &o[row * head_dim_v..][..head_dim_v]);
            if slip(Slip::MeanLeftOut) {
                mean = 0.0;
            }
            if !slip(Slip::DlseLeftOut) {
                mean -= dlse.get(row).copied().unwrap_or(0.0);
            }
            for first in seen.clone().step_by(TILE) {
                let mut part = vec![0.0; head_dim];
                for key in first..(first + TILE).min(seen.end) {
                    let at = head + key;
                    let (k, v) = (&k[at * head_dim..][..head_dim], &v[at * head_dim_v..][..head_dim_v]);
                    let product = dot(query, k);
                    let (score, slope) = problem.softcap.map_or((product * problem.scale, 1.0), |cap| {
                        let t = (product * problem.scale / cap).tanh();
                        (cap * t, 1.0 - t * t)
                    });
                    let p = (score * log2e - base).exp2();
                    let ds = dtype.round(p * (dot(d_o, v) - mean) * slope);
                    add(&mut part, ds * problem.scale, k);
                    if !(slip(Slip::HeadMissing) && h == 0) {
                        add(&mut dk[at * head_dim..][..head_dim], ds * problem.scale, query);
                        add(&mut dv[at * head_dim_v..][..head_dim_v], dtype.round(p), d_o);
                    }
                }
                let times = match self.slip {
                    Some(Slip::TileLost) if first == seen.start => 0.0,
                    Some(Slip::TileTwice) if first == seen.start => 2.0,
                    Some(Slip::ScaledTwice) => problem.scale,
                    _ => 1.0,
                };
                add(&mut dq[row * head_dim..][..head_dim], times, &part);
            }
        }
        [dq, dk, dv]
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(sums: &mut [f32], factor: f32, row: &[f32]) {
    for (sum, x) in sums.iter_mut().zip(row) {
        *sum += factor * x;
    }
}
