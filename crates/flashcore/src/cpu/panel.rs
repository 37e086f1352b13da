//! Rows in the lanes of vectors, and which keys these see.

use std::ops::Range;

use super::visible::Visible;

/// Lanes of the widest vector.
pub(super) const MAX_LANES: usize = 16;
/// Vectors of the widest panel.
pub(super) const MAX_VECS: usize = 3;

/// Some rows of a task, one a lane, with their place in scratch.
///
/// In scratch, Qᵀ, Sᵀ and Oᵀ of a panel are rows of `vecs` vectors.
pub(super) struct Panel {
    pub rows: Range<usize>,
    /// How many vectors the rows fill.
    pub vecs: usize,
    /// The keys of each lane's row; lanes beyond the rows repeat the last one.
    pub lanes: [Range<usize>; MAX_LANES * MAX_VECS],
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
            lanes: [const { 0..0 }; MAX_LANES * MAX_VECS],
            any: [const { 0..0 }; MAX_VECS],
            all: [const { 0..0 }; MAX_VECS],
            q: std::ptr::null_mut(),
            o: std::ptr::null_mut(),
            fresh: true,
            max: std::ptr::null_mut(),
            sum: std::ptr::null_mut(),
            top: std::ptr::null_mut(),
            rescale: std::ptr::null_mut(),
        };
        for vec in 0..vecs {
            let (mut any, mut all) = (0..0, 0..usize::MAX);
            for lane in vec * lanes..(vec + 1) * lanes {
                let row = (panel.rows.start + lane).min(panel.rows.end - 1);
                let keys = visible.keys(row / group);
                any = join(&any, &keys);
                all = all.start.max(keys.start)..all.end.min(keys.end);
                panel.lanes[lane] = keys;
            }
            (panel.any[vec], panel.all[vec]) = (any, all);
        }
        panel
    }

    /// What vector `vec` sees of `keys`.
    pub(super) fn seen(&self, vec: usize, keys: &Range<usize>) -> Range<usize> {
        let start = self.any[vec].start.clamp(keys.start, keys.end);
        start..self.any[vec].end.clamp(start, keys.end)
    }

    /// Whether the last key that any of its lanes sees is among `keys`.
    pub(super) fn ends_in(&self, keys: &Range<usize>) -> bool {
        let end = self.any[..self.vecs].iter().map(|any| any.end).max().unwrap_or(0);
        keys.start < end && end <= keys.end
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
