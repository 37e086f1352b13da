//! The softmax of a column: what one vector of a panel sees of some keys of a block.
#![allow(unsafe_code)] // Raw scratch whose size the caller knows.

use std::ops::Range;

use super::{
    math::{self, Exp2Below},
    panel::{MAX_LANES, Panel},
    scoring::Scoring,
    simd::Simd,
};

/// Some keys that vector `vec` of a panel sees: scores in a column.
///
/// Its methods require a CPU with the `S` of the panel, and that the column lies inside the block's scores.
pub(super) struct Column<'a> {
    pub panel: &'a Panel,
    pub vec: usize,
    pub keys: Range<usize>,
    /// The first key's scores; the next key's are `VECS` vectors further.
    pub at: *mut f32,
}

impl Column<'_> {
    /// The vector's place in a row of the panel.
    #[inline(always)]
    fn of<S: Simd>(&self, row: *mut f32) -> *mut f32 {
        row.wrapping_add(self.vec * S::LANES)
    }

    /// The scores of a key of the column.
    #[inline(always)]
    fn score<S: Simd>(&self, key: usize) -> *mut f32 {
        self.at.wrapping_add(key * S::VECS * S::LANES)
    }

    /// Whether products are scores as they are, and all rows see all of the keys.
    #[inline(always)]
    pub(super) fn is_settled(&self, scoring: Scoring) -> bool {
        scoring.inner.is_none() && !self.is_masked()
    }

    #[inline(always)]
    fn is_masked(&self) -> bool {
        let all = &self.panel.all[self.vec];
        self.keys.start < all.start || all.end < self.keys.end
    }

    /// Brings products into the scoring's form, makes the scores of keys that a row does not see −∞, and raises the tops to
    /// what is left.
    #[inline(always)]
    pub(super) unsafe fn settle<S: Simd>(&self, scoring: Scoring) {
        let (keys, masked) = (&self.keys, self.is_masked());
        // SAFETY: as of the type.
        unsafe {
            if let Some(inner) = scoring.inner {
                for key in 0..keys.len() {
                    let at = self.score::<S>(key);
                    S::store(at, math::capped::<S>(inner, S::load(at)));
                }
            }
            let hidden = S::splat(f32::NEG_INFINITY);
            let (first, end) = if masked { self.bounds::<S>() } else { (hidden, hidden) };
            let settled = |number: usize| {
                let at = self.score::<S>(number);
                let x = S::load(at);
                if !masked {
                    return x;
                }
                let key = S::splat(number as f32);
                let x = S::select_less(key, end, x, hidden);
                let x = S::select_less(key, first, hidden, x);
                S::store(at, x);
                x
            };
            // Several at once, because one chain would wait for each comparison.
            let mut tops = [hidden; 4];
            let fours = keys.len() - keys.len() % 4;
            for first in (0..fours).step_by(4) {
                for (i, top) in tops.iter_mut().enumerate() {
                    *top = S::max(settled(first + i), *top);
                }
            }
            for key in fours..keys.len() {
                tops[0] = S::max(settled(key), tops[0]);
            }
            let at = self.of::<S>(self.panel.top);
            let top = S::max(S::max(tops[0], tops[1]), S::max(tops[2], tops[3]));
            S::store(at, S::max(top, S::load(at)));
        }
    }

    /// The first key that each lane sees and the one after the last, counted from the column's first key, so that f32 holds
    /// them exactly.
    #[inline(always)]
    unsafe fn bounds<S: Simd>(&self) -> (S::V, S::V) {
        /// Farther than any key of a column, and not so far that f32 would round.
        const FAR: i64 = 1 << 23;
        const NUMBERS: [f32; MAX_LANES] =
            [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
        let from_start = |key: i64| (key - self.keys.start as i64).clamp(-FAR, FAR) as f32;
        let bounds = |lane: usize| {
            let (first, end) = self.panel.bounds(self.vec * S::LANES + lane);
            (from_start(first), from_start(end))
        };
        let (mut first, mut end) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
        // SAFETY: as of the type; no vector has more than `MAX_LANES` lanes.
        unsafe {
            if self.panel.group == 1 {
                // A query further, both are a key further.
                let (first, end) = bounds(0);
                let number = S::load(NUMBERS.as_ptr());
                return (S::add(S::splat(first), number), S::add(S::splat(end), number));
            }
            for lane in 0..S::LANES {
                (first[lane], end[lane]) = bounds(lane);
            }
            (S::load(first.as_ptr()), S::load(end.as_ptr()))
        }
    }

    /// Moves the running maxima to the tops, turns scores into exponentials, and adds these to the running sums.
    #[inline(always)]
    pub(super) unsafe fn softmax<S: Simd>(&self, scale: f32) {
        // SAFETY: as of the type.
        unsafe {
            self.move_to_tops::<S>(scale, |exp, base| {
                let mut sum = S::splat(0.0);
                for key in 0..self.keys.len() {
                    let at = self.score::<S>(key);
                    let p = exp.of(S::sub(base, S::load(at)));
                    sum = S::add(sum, p);
                    S::store(at, p);
                }
                sum
            });
        }
    }

    /// Turns products into probabilities, and the gradients of these, at `dp`, into gradients of the scores before their
    /// scale. `from_scores` is each row's lse in units of the scale, `from_gradients` what its gradients have in common.
    #[inline(always)]
    pub(super) unsafe fn differentiate<S: Simd>(
        &self,
        scoring: Scoring,
        from_scores: S::V,
        from_gradients: S::V,
        dp: *mut f32,
    ) {
        // SAFETY: as of the type, and gradients lie as scores do.
        unsafe {
            let exp = Exp2Below::<S>::new(scoring.scale * std::f32::consts::LOG2_E);
            let (masked, hidden) = (self.is_masked(), S::splat(f32::INFINITY));
            let (first, end) = if masked { self.bounds::<S>() } else { (hidden, hidden) };
            for number in 0..self.keys.len() {
                let at = self.score::<S>(number);
                let dp = dp.add(number * S::VECS * S::LANES);
                let product = S::load(at);
                let score = scoring.inner.map_or(product, |inner| math::capped::<S>(inner, product));
                let mut below = S::sub(from_scores, score);
                if masked {
                    let key = S::splat(number as f32);
                    below = S::select_less(key, end, below, hidden);
                    below = S::select_less(key, first, hidden, below);
                }
                let p = exp.of(below);
                let mut ds = S::mul(p, S::sub(S::load(dp), from_gradients));
                if scoring.inner.is_some() {
                    ds = S::mul(ds, S::sub(S::splat(1.0), S::mul(score, score)));
                }
                S::store(at, p);
                S::store(dp, ds);
            }
        }
    }

    /// Moves the running maxima to the tops where these are higher, adds what `exponentials(exp, base)` sums up to the running
    /// sums, exponentials being `exp.of(base - score)`, and notes what the outputs so far are to be multiplied with.
    #[inline(always)]
    pub(super) unsafe fn move_to_tops<S: Simd>(
        &self,
        scale: f32,
        exponentials: impl FnOnce(Exp2Below<S>, S::V) -> S::V,
    ) {
        // SAFETY: as of the type.
        unsafe {
            let (max_at, sum_at) = (self.of::<S>(self.panel.max), self.of::<S>(self.panel.sum));
            let exp = Exp2Below::<S>::new(scale * std::f32::consts::LOG2_E);
            let old = S::load(max_at);
            let max = S::max(S::load(self.of::<S>(self.panel.top)), old);
            S::store(max_at, max);
            // A row that has seen only −∞ subtracts 0, so that its exponentials are 0 rather than NaN.
            let base = S::select_less(S::splat(f32::NEG_INFINITY), max, max, S::splat(0.0));
            let rescale = exp.of(S::sub(base, old));
            let sum = exponentials(exp, base);
            S::store(sum_at, S::fma(S::load(sum_at), rescale, sum));
            S::store(self.of::<S>(self.panel.rescale), rescale);
        }
    }
}
