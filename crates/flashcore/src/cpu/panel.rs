//! Rows in the lanes of vectors, and which keys these see.
#![allow(unsafe_code)] // Raw scratch whose size the caller knows.

use std::ops::Range;

use super::{simd::Simd, visible::Visible};

/// Lanes of the widest vector.
pub(super) const MAX_LANES: usize = 16;
/// Vectors of the widest panel.
pub(super) const MAX_VECS: usize = 4;

/// Some rows of a task, one per lane, with their place in scratch.
///
/// In scratch, Qᵀ and Sᵀ of a panel are rows of as many vectors as the micro-kernel's.
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
    /// From the first key that any of its lanes sees to the last, and the keys that all of them see.
    any_at_all: Range<usize>,
    all_of_all: Range<usize>,
    /// Qᵀ, head_dim rows.
    pub q: *mut f32,
    /// O, a row for each lane.
    pub o: *mut f32,
    /// Whether nothing has been added to O, which is then unspecified rather than zero, as the other places are.
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
    /// A row of what the outputs are to be multiplied with in the end.
    pub inverse: *mut f32,
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
    /// The panel of `rows`, of which `group` in a row are the same query, with `lanes` lanes per vector; its places
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
            any_at_all: 0..0,
            all_of_all: 0..usize::MAX,
            q: std::ptr::null_mut(),
            o: std::ptr::null_mut(),
            fresh: true,
            done: false,
            max: std::ptr::null_mut(),
            sum: std::ptr::null_mut(),
            top: std::ptr::null_mut(),
            rescale: std::ptr::null_mut(),
            inverse: std::ptr::null_mut(),
        };
        for vec in 0..vecs {
            let lanes = vec * lanes..(vec + 1) * lanes;
            (panel.any[vec], panel.all[vec]) =
                visible.any_and_all(panel.query(lanes.start)..=panel.query(lanes.end - 1));
            panel.any_at_all = join(&panel.any_at_all, &panel.any[vec]);
            let (whole, all) = (&panel.all_of_all, &panel.all[vec]);
            panel.all_of_all = whole.start.max(all.start)..whole.end.min(all.end);
        }
        panel
    }

    /// Sets the places of maxima, sums and so on: five rows of `width` f32 at `at`.
    pub(super) fn place_stats(&mut self, at: *mut f32, width: usize) {
        let rows = [&mut self.max, &mut self.sum, &mut self.top, &mut self.rescale, &mut self.inverse];
        for (i, row) in rows.into_iter().enumerate() {
            *row = at.wrapping_add(i * width);
        }
    }

    /// Makes the running maxima and sums those of no keys.
    ///
    /// # Safety
    /// Requires a CPU with `S`, and that the panel has its places.
    #[inline(always)]
    pub(super) unsafe fn clear_stats<S: Simd>(&self) {
        for lane in (0..self.vecs * S::LANES).step_by(S::LANES) {
            // SAFETY: a panel has a row of each.
            unsafe {
                S::store(self.max.add(lane), S::splat(f32::NEG_INFINITY));
                S::store(self.sum.add(lane), S::splat(0.0));
                S::store(self.rescale.add(lane), S::splat(1.0));
                S::store(self.inverse.add(lane), S::splat(1.0));
            }
        }
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
        meet(&self.any[vec], keys)
    }

    /// What some lanes see of `keys`.
    #[inline(always)]
    pub(super) fn seen_by(&self, lanes: Range<usize>, keys: &Range<usize>) -> Range<usize> {
        let (any, _) = self.visible.any_and_all(self.query(lanes.start)..=self.query(lanes.end - 1));
        meet(&any, keys)
    }

    /// Which of `keys` lie between the first and the last that any of its lanes sees.
    #[inline(always)]
    pub(super) fn reach(&self, keys: &Range<usize>) -> Range<usize> {
        meet(&self.any_at_all, keys)
    }

    /// Whether any of its lanes sees any of `keys`.
    #[inline(always)]
    pub(super) fn sees(&self, keys: &Range<usize>) -> bool {
        !self.reach(keys).is_empty()
    }

    /// Whether all of its lanes see all of `keys`.
    #[inline(always)]
    pub(super) fn sees_all(&self, keys: &Range<usize>) -> bool {
        self.all_of_all.start <= keys.start && keys.end <= self.all_of_all.end
    }

    /// Up to where all of a segment's lanes see its keys.
    #[inline(always)]
    pub(super) fn plain(&self, segment: &Segment) -> usize {
        self.all[segment.first_vec..segment.end_vec].iter().fold(segment.end_key, |end, all| {
            if all.start <= segment.first_key {
                end.min(all.end.max(segment.first_key))
            } else {
                segment.first_key
            }
        })
    }

    /// Cuts `keys` into rectangles that cover what the vectors see and little else.
    pub(super) fn segments(&self, keys: &Range<usize>) -> Segments {
        if self.sees_all(keys) {
            let mut list = [Segment::EMPTY; 2 * MAX_VECS];
            list[0] = Segment { first_key: keys.start, end_key: keys.end, first_vec: 0, end_vec: self.vecs };
            return Segments { list, len: 1 };
        }
        let seen =
            std::array::from_fn::<_, MAX_VECS, _>(
                |vec| if vec < self.vecs { self.seen(vec, keys) } else { 0..0 },
            );
        let mut segments = Segments { list: [Segment::EMPTY; 2 * MAX_VECS], len: 0 };
        // Ranges move with the rows, so the vectors that see any keys are neighbours, and so are those that see a key.
        let Some(mut first_vec) = seen.iter().position(|seen| !seen.is_empty()) else { return segments };
        let last_vec = seen.iter().rposition(|seen| !seen.is_empty()).unwrap_or(first_vec);
        let (mut key, mut end_vec) = (seen[first_vec].start, first_vec);
        while first_vec <= last_vec {
            while end_vec <= last_vec && seen[end_vec].start <= key {
                end_vec += 1;
            }
            let next = if end_vec <= last_vec { seen[end_vec].start } else { usize::MAX };
            let end_key = next.min(seen[first_vec].end);
            if first_vec < end_vec && key < end_key {
                segments.list[segments.len] = Segment { first_key: key, end_key, first_vec, end_vec };
                segments.len += 1;
            }
            key = key.max(end_key);
            while first_vec <= last_vec && seen[first_vec].end <= key {
                first_vec += 1;
            }
        }
        segments
    }
}

impl Segment {
    const EMPTY: Self = Self { first_key: 0, end_key: 0, first_vec: 0, end_vec: 0 };
}

/// The rectangles of a panel and a block of keys, in the order of keys.
pub(super) struct Segments {
    list: [Segment; 2 * MAX_VECS],
    len: usize,
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

/// What is in both: with its end at its start, which lies in `b`, where there is nothing.
#[inline(always)]
pub(super) fn meet(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.clamp(b.start, b.end);
    start..a.end.clamp(start, b.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A panel of three vectors that see these keys.
    fn panel(any: [Range<usize>; 3]) -> Panel {
        let visible = Visible::all(1000);
        let [a, b, c] = any;
        Panel { any: [a, b, c, 0..0], all_of_all: 0..0, ..Panel::new(visible, 0..12, 1, 4) }
    }

    fn segment(keys: Range<usize>, vecs: Range<usize>) -> Segment {
        Segment { first_key: keys.start, end_key: keys.end, first_vec: vecs.start, end_vec: vecs.end }
    }

    #[test]
    fn a_causal_block_is_a_stair() {
        let stair = panel([0..5, 0..9, 0..13]).segments(&(0..11));
        assert_eq!(*stair, [segment(0..5, 0..3), segment(5..9, 1..3), segment(9..11, 2..3)]);
        let stair = panel([0..8, 0..12, 0..16]).segments(&(8..16));
        assert_eq!(*stair, [segment(8..12, 1..3), segment(12..16, 2..3)]);
    }

    #[test]
    fn a_window_s_segments_cover_what_each_vector_sees_once() {
        let seen = [2..10, 6..14, 10..18];
        let segments = panel(seen.clone()).segments(&(0..16));
        let pairs = |s: &Segment| {
            let (keys, vecs) = (s.first_key..s.end_key, s.first_vec..s.end_vec);
            vecs.flat_map(move |vec| keys.clone().map(move |key| (vec, key)))
        };
        let mut pairs: Vec<(usize, usize)> = segments.iter().flat_map(pairs).collect();
        pairs.sort_unstable();
        let expected = seen
            .into_iter()
            .enumerate()
            .flat_map(|(vec, keys)| (keys.start..keys.end.min(16)).map(move |key| (vec, key)));
        assert_eq!(pairs, expected.collect::<Vec<_>>());
    }

    #[test]
    fn a_segment_is_plain_up_to_the_first_key_that_a_lane_does_not_see() {
        let panel = Panel { all: [0..2, 0..6, 3..9, 0..0], ..panel([0..5, 0..9, 0..13]) };
        assert_eq!(panel.plain(&segment(0..5, 0..2)), 2);
        assert_eq!(panel.plain(&segment(0..5, 1..2)), 5);
        assert_eq!(panel.plain(&segment(5..9, 0..2)), 5);
        assert_eq!(panel.plain(&segment(2..9, 1..3)), 2);
        assert_eq!(panel.plain(&segment(3..13, 2..3)), 9);
    }
}
