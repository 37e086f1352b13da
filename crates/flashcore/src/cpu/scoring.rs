//! How products of queries and keys become what the softmax is of.

use std::ops::Range;

use super::math::SCALES;
use crate::Problem;

/// What products may be multiplied with before the tanh: an infinite product is far beyond where that is 1, and none that
/// matters vanishes.
const INNER: Range<f32> = 1e-36..1e36;

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
        let inner = problem.softcap.map(|cap| problem.scale / cap);
        let scale = problem.softcap.unwrap_or(problem.scale);
        let fits = SCALES.contains(&scale) && inner.is_none_or(|inner| INNER.contains(&inner));
        Self { inner, scale, fits }
    }
}
