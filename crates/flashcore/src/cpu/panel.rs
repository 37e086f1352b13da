//! Rows in the lanes of vectors, and which keys these see.

use std::ops::Range;

use super::visible::Visible;

/// Lanes of the widest vector.
pub(super) const MAX_LANES: usize = 16;
/// Vectors of the widest panel.
pub(super) const MAX_VECS: usize = 3;

/// Some rows of a task, one a lane, with their place in scratch.
///
/// In scratch, Qᵀ, Sᵀ and Oᵀ of a panel are rows of as many vectors as the micro-kernel's.
pub(super) struct Panel {
    pub rows: Range<usize>,
    /// How many vectors the rows fill.
    pub vecs: usize,
    visible: Visible,
    /// How many rows are the same query.
    pub group: usize,
    /// For each vector, from the first key that any of its lanes sees to the last.
    pub any: [Range<usize>; MAX_VECS],
    /// For each vector, the keys that all of its lanes see.
    pub all: [Range<usize>; MAX_VECS],
    /// Qᵀ, head_dim rows.
    pub q: *mut f32,
    /// Oᵀ, head_dim_v rows.
    pub o: *mut f32,
    /// Whether nothing has been added to Oᵀ, which is then unspecified rather than zero.
    pub fresh: bool,
    /// Whether the outputs were written.
    pub done: bool,
    /// A row of running maxima.
    pub max: *mut f32,
    /// A row of running sums.
    pub sum: *mut f32,
    /// A row of the highest scores in the block at work.
    pub top: *mut f32,
    /// A row of what the outputs so far are to be multiplied with.
    pub rescale: *mut f32,
}

/// A rectangle of scores: some keys against some neighbouring vectors of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub first_key: usize,
    pub end_key: usize,
    pub first_vec: usize,
    pub end_vec: usize,
}

impl Panel {
    /// The panel of `rows`, of which `group` in a row are the same query, with `lanes` lanes a vector; its places
    /// in scratch are not set yet.
    pub(super) fn new(visible: Visible, rows: Range<usize>, group: usize, lanes: usize) -> Self {
        let vecs = rows.len().div_ceil(lanes);
        let mut panel = Self {
            rows,
            vecs,
            visible,
            group,
            any: [const { 0..0 }; MAX_VECS],
            all: [const { 0..0 }; MAX_VECS],
            q: std::ptr::null_mut(),
            o: std::ptr::null_mut(),
            fresh: true,
            done: false,
            max: std::ptr::null_mut(),
            sum: std::ptr::null_mut(),
            top: std::ptr::null_mut(),
            rescale: std::ptr::null_mut(),
        };
        for vec in 0..vecs {
            let lanes = vec * lanes..(vec + 1) * lanes;
            (panel.any[vec], panel.all[vec]) =
                visible.any_and_all(panel.query(lanes.start)..=panel.query(lanes.end - 1));
        }
        panel
    }

    /// The query of a lane; lanes beyond the rows repeat the last one.
    #[inline(always)]
    fn query(&self, lane: usize) -> usize {
        let row = (self.rows.start + lane).min(self.rows.end - 1);
        if self.group == 1 { row } else { row / self.group }
    }

    /// As of [`Visible::bounds`], of a lane's row.
    #[inline(always)]
    pub(super) fn bounds(&self, lane: usize) -> (i64, i64) {
        self.visible.bounds(self.query(lane))
    }

    /// The keys that a lane's row sees.
    pub(super) fn keys(&self, lane: usize) -> Range<usize> {
        self.visible.keys(self.query(lane))
    }

    /// What vector `vec` sees of `keys`.
    pub(super) fn seen(&self, vec: usize, keys: &Range<usize>) -> Range<usize> {
        let start = self.any[vec].start.clamp(keys.start, keys.end);
        start..self.any[vec].end.clamp(start, keys.end)
    }

    /// Whether any of its vectors sees any of `keys`.
    pub(super) fn sees(&self, keys: &Range<usize>) -> bool {
        (0..self.vecs).any(|vec| !self.seen(vec, keys).is_empty())
    }

    /// Cuts `keys` into rectangles that cover what the vectors see and little else.
    pub(super) fn segments(&self, keys: &Range<usize>) -> Segments {
        let mut bounds = [0; 2 * MAX_VECS];
        for vec in 0..self.vecs {
            let seen = self.seen(vec, keys);
            (bounds[2 * vec], bounds[2 * vec + 1]) = (seen.start, seen.end);
        }
        let bounds = &mut bounds[..2 * self.vecs];
        bounds.sort_unstable();
        let mut segments = Segments { list: [Segment::EMPTY; 2 * MAX_VECS], len: 0 };
        for pair in bounds.windows(2) {
            let (first_key, end_key) = (pair[0], pair[1]);
            if first_key == end_key {
                continue;
            }
            // Ranges move with the rows, so the vectors that see a key are neighbours.
            let sees = |&vec: &usize| {
                let seen = self.seen(vec, keys);
                seen.start <= first_key && end_key <= seen.end
            };
            let Some(first_vec) = (0..self.vecs).find(sees) else { continue };
            let end_vec = 1 + (first_vec..self.vecs).rfind(sees).unwrap_or(first_vec);
            segments.list[segments.len] = Segment { first_key, end_key, first_vec, end_vec };
            segments.len += 1;
        }
        segments
    }
}

impl Segment {
    const EMPTY: Self = Self { first_key: 0, end_key: 0, first_vec: 0, end_vec: 0 };
}

/// Segments behind each other that end at the same vector, each later than the one before: a causal mask's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stair {
    pub first_key: usize,
    pub first_vec: usize,
    pub end_vec: usize,
    /// How many keys each of its vectors takes.
    pub keys: [usize; MAX_VECS],
}

/// The rectangles of a panel and a block of keys, in the order of keys.
pub(super) struct Segments {
    list: [Segment; 2 * MAX_VECS],
    len: usize,
}

impl Segments {
    /// Segments taken together wherever they are a stair.
    pub(super) fn stairs(&self) -> impl Iterator<Item = Stair> {
        let mut left: &[Segment] = self;
        std::iter::from_fn(move || {
            let first = *left.first()?;
            let mut stair = Stair {
                first_key: first.first_key,
                first_vec: first.first_vec,
                end_vec: first.end_vec,
                keys: [0; MAX_VECS],
            };
            let mut end = (first.first_key, first.first_vec);
            while let [next, rest @ ..] = left
                && next.first_key == end.0
                && next.first_vec >= end.1
                && next.end_vec == first.end_vec
            {
                stair.keys[next.first_vec - first.first_vec..].fill(next.end_key - first.first_key);
                end = (next.end_key, next.first_vec);
                left = rest;
            }
            Some(stair)
        })
    }
}

impl std::ops::Deref for Segments {
    type Target = [Segment];

    fn deref(&self) -> &[Segment] {
        &self.list[..self.len]
    }
}

/// The smallest range that holds both.
pub(super) fn join(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b.clone(),
        (_, true) => a.clone(),
        _ => a.start.min(b.start)..a.end.max(b.end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A panel of three vectors that see these keys.
    fn panel(any: [Range<usize>; 3]) -> Panel {
        let visible = Visible::all(1000);
        Panel { any, ..Panel::new(visible, 0..12, 1, 4) }
    }

    /// The keys and vectors of a stair's steps.
    fn covered(stairs: impl Iterator<Item = Stair>) -> Vec<(usize, Range<usize>)> {
        let columns = |stair: Stair| {
            (stair.first_vec..stair.end_vec)
                .map(move |vec| (vec, stair.first_key..stair.first_key + stair.keys[vec - stair.first_vec]))
        };
        stairs.flat_map(columns).filter(|(_, keys)| !keys.is_empty()).collect()
    }

    #[test]
    fn a_causal_block_is_one_stair() {
        let stairs = panel([0..5, 0..9, 0..13]).segments(&(0..11));
        let only = Stair { first_key: 0, first_vec: 0, end_vec: 3, keys: [5, 9, 11] };
        assert_eq!(stairs.stairs().collect::<Vec<_>>(), [only]);
    }

    #[test]
    fn a_stair_begins_with_the_first_vector_that_sees_a_key() {
        let stairs = panel([0..8, 0..12, 0..16]).segments(&(8..16));
        let only = Stair { first_key: 8, first_vec: 1, end_vec: 3, keys: [4, 8, 8] };
        assert_eq!(stairs.stairs().collect::<Vec<_>>(), [only]);
    }

    #[test]
    fn a_window_s_stairs_cover_what_each_vector_sees_once() {
        let seen = [2..10, 6..14, 10..18];
        let segments = panel(seen.clone()).segments(&(0..16));
        let mut pairs: Vec<(usize, usize)> = covered(segments.stairs())
            .into_iter()
            .flat_map(|(vec, keys)| keys.map(move |key| (vec, key)))
            .collect();
        pairs.sort_unstable();
        let expected = seen
            .into_iter()
            .enumerate()
            .flat_map(|(vec, keys)| (keys.start..keys.end.min(16)).map(move |key| (vec, key)));
        assert_eq!(pairs, expected.collect::<Vec<_>>());
    }
}
