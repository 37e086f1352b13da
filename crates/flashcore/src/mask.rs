//! Which keys a query may attend to.
//!
//! Every mask here lets a query attend to one contiguous range of keys, so [`Mask::keys`] is its whole
//! meaning: the oracle, the CPU engine and the kernels all follow that one function.

use std::ops::Range;

/// Which keys a query may attend to.
///
/// ```
/// use flashcore::Mask;
/// // 2 queries, 4 keys: the last query sees the last key.
/// assert_eq!(Mask::Causal.keys(0, 2, 4), 0..3);
/// // torch's `is_causal`: the first query sees the first key.
/// assert_eq!(Mask::CausalTopLeft.keys(0, 2, 4), 0..1);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub enum Mask {
    /// Every query attends to every key.
    #[default]
    None,
    /// Query i attends to keys up to i + len_k − len_q: the last query sees the last key (bottom-right).
    Causal,
    /// Query i attends to keys up to i: the first query sees the first key (top-left, as torch's `is_causal`).
    CausalTopLeft,
    /// Query i attends to `left` keys before and `right` keys after its own place i + len_k − len_q.
    /// `None` is without limit; `right: Some(0)` is causal with a window.
    Window {
        /// How many keys before its own place a query sees.
        left: Option<usize>,
        /// How many keys after its own place a query sees.
        right: Option<usize>,
    },
}

/// The band of a [`Mask`]: query `i` sees keys from `i + shift − left` to `i + shift + right`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band {
    /// How many keys before its own place a query sees; `None` is without limit.
    pub left: Option<usize>,
    /// How many keys after its own place a query sees; `None` is without limit.
    pub right: Option<usize>,
    /// Whether a query's own place is i (top-left) rather than i + len_k − len_q (bottom-right).
    pub top_left: bool,
}

impl Mask {
    /// The mask as a band around the diagonal.
    pub const fn band(self) -> Band {
        match self {
            Mask::None => Band { left: None, right: None, top_left: false },
            Mask::Causal => Band { left: None, right: Some(0), top_left: false },
            Mask::CausalTopLeft => Band { left: None, right: Some(0), top_left: true },
            Mask::Window { left, right } => Band { left, right, top_left: false },
        }
    }

    /// The keys that query `row` attends to, of `len_k` keys; empty when there are none.
    pub fn keys(self, row: usize, len_q: usize, len_k: usize) -> Range<usize> {
        let band = self.band();
        let place = if band.top_left { row as i128 } else { row as i128 + len_k as i128 - len_q as i128 };
        let first = band.left.map_or(0, |left| (place - left as i128).clamp(0, len_k as i128)) as usize;
        let end =
            band.right.map_or(len_k, |right| (place + right as i128 + 1).clamp(0, len_k as i128) as usize);
        if first < end { first..end } else { 0..0 }
    }

    /// The sum over all queries of the number of keys that they attend to.
    pub fn pairs(self, len_q: usize, len_k: usize) -> u128 {
        if self == Mask::None {
            return len_q as u128 * len_k as u128;
        }
        (0..len_q).map(|row| self.keys(row, len_q, len_k).len() as u128).sum()
    }
}

impl std::fmt::Display for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let side = |x: Option<usize>| x.map_or_else(|| "∞".to_string(), |x| x.to_string());
        match *self {
            Mask::None => f.pad("full"),
            Mask::Causal => f.pad("causal"),
            Mask::CausalTopLeft => f.pad("causal-top-left"),
            Mask::Window { left, right } => f.pad(&format!("window({},{})", side(left), side(right))),
        }
    }
}

impl std::str::FromStr for Mask {
    type Err = crate::Error;

    /// Reads what a mask prints: `full`, `causal`, `causal-top-left`, `window(128,0)`, with ∞ or inf where there is no
    /// limit.
    fn from_str(text: &str) -> crate::Result<Self> {
        let possible = "possible are full, causal, causal-top-left and window(left,right)";
        let refuse = || crate::Error::Text { what: "mask", given: text.into(), why: possible.into() };
        match text {
            "full" | "none" => return Ok(Mask::None),
            "causal" => return Ok(Mask::Causal),
            "causal-top-left" => return Ok(Mask::CausalTopLeft),
            _ => {}
        }
        let sides = text.strip_prefix("window(").and_then(|rest| rest.strip_suffix(')'));
        let (left, right) = sides.and_then(|sides| sides.split_once(',')).ok_or_else(refuse)?;
        let side = |text: &str| match text.trim() {
            "∞" | "inf" => Ok(None),
            number => number.parse().map(Some).map_err(|_| refuse()),
        };
        Ok(Mask::Window { left: side(left)?, right: side(right)? })
    }
}

#[cfg(test)]
mod tests {
    use super::Mask;

    #[test]
    fn a_mask_reads_back_what_it_prints() {
        let window = |left, right| Mask::Window { left, right };
        for mask in [
            Mask::None,
            Mask::Causal,
            Mask::CausalTopLeft,
            window(Some(3), Some(0)),
            window(None, None),
            window(Some(usize::MAX), None),
        ] {
            assert_eq!(mask.to_string().parse(), Ok(mask));
        }
        assert_eq!("window(inf, 2)".parse(), Ok(window(None, Some(2))));
        for wrong in ["", "Causal", "window", "window(1)", "window(1,2", "window(-1,2)", "window(1,2,3)"] {
            assert!(wrong.parse::<Mask>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn bottom_right_causal_lets_the_last_query_see_the_last_key() {
        assert_eq!(Mask::Causal.keys(2, 3, 5), 0..5);
        assert_eq!(Mask::Causal.keys(0, 3, 5), 0..3);
    }

    #[test]
    fn bottom_right_causal_with_more_queries_than_keys_leaves_the_first_queries_empty() {
        assert_eq!(Mask::Causal.keys(0, 5, 3), 0..0);
        assert_eq!(Mask::Causal.keys(1, 5, 3), 0..0);
        assert_eq!(Mask::Causal.keys(2, 5, 3), 0..1);
    }

    #[test]
    fn top_left_causal_ignores_the_difference_of_lengths() {
        assert_eq!(Mask::CausalTopLeft.keys(0, 3, 5), 0..1);
        assert_eq!(Mask::CausalTopLeft.keys(4, 5, 3), 0..3);
    }

    #[test]
    fn a_window_is_cut_at_both_ends() {
        let mask = Mask::Window { left: Some(2), right: Some(1) };
        assert_eq!(mask.keys(0, 8, 8), 0..2);
        assert_eq!(mask.keys(4, 8, 8), 2..6);
        assert_eq!(mask.keys(7, 8, 8), 5..8);
    }

    #[test]
    fn a_window_beyond_every_key_is_empty() {
        assert_eq!(Mask::Window { left: Some(0), right: Some(0) }.keys(0, 8, 4), 0..0);
        assert_eq!(Mask::Window { left: Some(usize::MAX), right: Some(usize::MAX) }.keys(3, 8, 4), 0..4);
    }

    #[test]
    fn pairs_count_what_keys_lists() {
        assert_eq!(Mask::None.pairs(3, 5), 15);
        assert_eq!(Mask::Causal.pairs(4, 4), 10);
        assert_eq!(Mask::Causal.pairs(0, 4), 0);
    }
}
