//! How products of queries and keys become what the softmax is of.

use super::math::SCALES;
use crate::Problem;

/// A score is `scale · change(product)`. The scale is left to the exponential, where it costs nothing and sees only
/// differences of scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scoring {
    pub change: Option<Change>,
    pub scale: f32,
}

/// `outer · tanh(inner · x)`, or without the tanh.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Change {
    pub inner: f32,
    pub tanh: bool,
    pub outer: f32,
}

impl Scoring {
    pub(super) fn of(problem: &Problem) -> Self {
        // Scales at the ends of f32 would overflow there, so they are multiplied in before.
        let (outer, scale) = match problem.softcap.unwrap_or(problem.scale) {
            scale if SCALES.contains(&scale) => (1.0, scale),
            scale => (scale, 1.0),
        };
        let change = match problem.softcap {
            // Kept finite, so that 0 stays 0.
            Some(cap) => Some(Change { inner: (problem.scale / cap).min(f32::MAX), tanh: true, outer }),
            None if outer != 1.0 => Some(Change { inner: outer, tanh: false, outer: 1.0 }),
            None => None,
        };
        Self { change, scale }
    }
}
