//! Which keys a query sees, at a cost that can be paid for every row.

use std::ops::{Range, RangeInclusive};

use super::panel::join;
use crate::{Band, contract::Call};

/// The mask of one batch entry: query i sees keys from i + `first` up to, not including, i + `end`, of `len` keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Visible {
    first: i64,
    end: i64,
    len: i64,
}

impl Visible {
    /// Every query sees all of `len` keys.
    #[cfg(test)]
    pub(super) fn all(len: usize) -> Self {
        Self { first: i64::MIN / 2, end: i64::MAX / 2, len: len as i64 }
    }

    pub(super) fn new(call: &Call<'_>, batch: usize) -> Self {
        // Beyond every key, yet far from overflow when a query is added.
        const FAR: i64 = 1 << 40;
        let sequences = call.sequences();
        let len = sequences.keys(batch) as i64;
        let Band { left, right, top_left } = call.problem.mask.band();
        let place = if top_left { 0 } else { len - sequences.queries(batch) as i64 };
        let reach = |side: Option<usize>| side.map_or(FAR, |side| side.min(FAR as usize) as i64);
        Self { first: place - reach(left), end: place + reach(right) + 1, len }
    }

    /// How many keys there are.
    pub(super) fn count(&self) -> usize {
        self.len as usize
    }

    /// The keys that a query sees; all of its empty ranges are 0..0.
    #[inline(always)]
    pub(super) fn keys(&self, query: usize) -> Range<usize> {
        let (first, end) = self.bounds(query);
        let (first, end) = (first.clamp(0, self.len), end.clamp(0, self.len));
        if first < end { first as usize..end as usize } else { 0..0 }
    }

    /// The first key that a query would see if there were keys without end on both sides, and the one after the last.
    #[inline(always)]
    pub(super) fn bounds(&self, query: usize) -> (i64, i64) {
        (query as i64 + self.first, query as i64 + self.end)
    }
}

impl Visible {
    /// For queries behind each other, from the first key that any of them sees to the last, and the keys that all see.
    pub(super) fn any_and_all(&self, queries: RangeInclusive<usize>) -> (Range<usize>, Range<usize>) {
        let (first, last) = (self.keys(*queries.start()), self.keys(*queries.end()));
        // What is seen moves with the queries, so where the outermost see keys, those between them do.
        if !first.is_empty() && !last.is_empty() {
            return (first.start..last.end, last.start..first.end);
        }
        (queries.map(|query| self.keys(query)).fold(0..0, |a, b| join(&a, &b)), 0..0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, Mask, Name, Tensor, signature::PerTensor};

    #[test]
    fn it_follows_the_mask() {
        let sides = [None, Some(0), Some(1), Some(5), Some(usize::MAX)];
        let windows = sides.into_iter().flat_map(|left| sides.map(|right| Mask::Window { left, right }));
        for mask in [Mask::None, Mask::Causal, Mask::CausalTopLeft].into_iter().chain(windows) {
            for (len_q, len_k) in [(1, 1), (3, 8), (8, 3), (5, 5), (4, 0)] {
                let data = [0.0_f32; 16];
                let q = Tensor::new(&data[..2 * len_q], &[2, 1, len_q, 1]).unwrap();
                let k = Tensor::new(&data[..2 * len_k], &[2, 1, len_k, 1]).unwrap();
                let lengths = [len_k as u32 / 2, len_k as u32];
                let attention = Attention::new().mask(mask).key_lengths(&lengths);
                let call = Call {
                    problem: attention.problem(&q, &k, &k).unwrap(),
                    tensors: PerTensor::default().with(Name::Q, q.raw).with(Name::K, k.raw),
                    key_lengths: Some(&lengths),
                    device_lengths: None,
                };
                for (batch, &len) in lengths.iter().enumerate() {
                    for query in 0..len_q {
                        let exact = mask.keys(query, len_q, len as usize);
                        assert_eq!(Visible::new(&call, batch).keys(query), exact, "{mask} {len_q} {len}");
                        for last in query..len_q {
                            let (any, all) = Visible::new(&call, batch).any_and_all(query..=last);
                            let seen = |key: &usize| {
                                (query..=last)
                                    .filter(|&q| mask.keys(q, len_q, len as usize).contains(key))
                                    .count()
                            };
                            let some: Vec<usize> = (0..len as usize).filter(|key| seen(key) > 0).collect();
                            let every = (0..len as usize).filter(|key| seen(key) == 1 + last - query);
                            assert_eq!(
                                (any.start, any.end),
                                (some.first().copied().unwrap_or(0), some.last().map_or(0, |k| k + 1)),
                                "{mask}"
                            );
                            assert_eq!(
                                all.collect::<Vec<_>>(),
                                every.collect::<Vec<_>>(),
                                "{mask} {len_q} {len}"
                            );
                        }
                    }
                }
            }
        }
    }
}
