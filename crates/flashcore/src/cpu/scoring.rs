//! How products of queries and keys become what the softmax is of.

use std::ops::Range;

use super::math::SCALES;
use crate::{Descales, Problem, contract::Call};

/// What products may be multiplied with before the tanh: an infinite product is far beyond where that is 1, and none that
/// matters vanishes.
const INNER: Range<f32> = 1e-36..1e36;

/// What outputs may be multiplied by, without leaving f32 on the way.
const OUTER: Range<f32> = 1e-30..1e30;

/// A score is `scale · product`, or with a softcap `scale · tanh(inner · product)`. The scale is left to the exponential,
/// where it costs nothing and sees only differences of scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scoring {
    /// What the tanh is of, where there is a softcap.
    pub inner: Option<f32>,
    pub scale: f32,
    /// Whether f32 holds all that lies between products and exponentials; if not, rows are computed in f64
    /// ([`wide`](super::wide)).
    pub fits: bool,
}

impl Scoring {
    pub(super) fn of(problem: &Problem) -> Self {
        Self::scaled(problem, 1.0)
    }

    /// Where products are `factor` times smaller than those of the real queries and keys.
    fn scaled(problem: &Problem, factor: f32) -> Self {
        let factor = problem.scale * factor;
        let inner = problem.softcap.map(|cap| factor / cap);
        let scale = problem.softcap.unwrap_or(factor);
        let fits = SCALES.contains(&scale) && inner.is_none_or(|inner| INNER.contains(&inner));
        Self { inner, scale, fits }
    }

    /// That of each batch entry and kv head of a call with descales, and what its outputs are to be multiplied by. Where one
    /// does not fit, none does.
    pub(super) fn descaled(call: &Call<'_>) -> Vec<(Self, f32)> {
        let (problem, descales) = (&call.problem, Descales::among(&call.tensors));
        if problem.descales == [false; 3] {
            return Vec::new();
        }
        let heads = (0..problem.batch).flat_map(|b| (0..problem.heads_kv).map(move |h| (b, h)));
        let each = heads.map(|(b, h)| descales.at(b, h, 0));
        let mut all: Vec<(Self, f32)> = each.map(|[q, k, v]| (Self::scaled(problem, q * k), v)).collect();
        let fit = all.iter().all(|(it, v)| it.fits && OUTER.contains(v));
        for (it, _) in &mut all {
            it.fits = fit;
        }
        all
    }
}
