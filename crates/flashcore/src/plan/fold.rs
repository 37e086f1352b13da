//! One query per head: the heads that share keys become the rows of one tile, so that the keys are read once for all of
//! them.

use crate::{
    Layout, Mask, Problem, Queries,
    signature::{Parameter, Rows},
};

/// The problem as a kernel is to see it. The only query of a head sees the same keys as that of the next, so query
/// heads that share a key head are as good as queries of one head.
pub(crate) fn fold(problem: &Problem) -> Problem {
    let one = problem.len_q == 1 && problem.queries == Queries::Dense;
    if !one || problem.heads_kv == 0 || !sees_all(problem) {
        return *problem;
    }
    Problem { heads_q: problem.heads_kv, len_q: problem.group(), mask: Mask::None, ..*problem }
}

/// Whether the mask leaves every key to the only query.
fn sees_all(problem: &Problem) -> bool {
    let band = problem.mask.band();
    let to_the_first = band.left.is_none_or(|left| left >= problem.len_k.saturating_sub(1));
    // The query is aligned with the last key, unless with the first.
    to_the_first && (band.right.is_none() || !band.top_left)
}

/// The layout of a tensor of a problem as the folded one has it.
pub(super) fn fold_layout(layout: &Layout, of: &Parameter, problem: &Problem, folded: &Problem) -> Layout {
    if problem.len_q == folded.len_q || of.rows != Rows::Queries {
        return *layout;
    }
    let group = folded.len_q;
    let Layout { shape: [batch, heads, _, dim], strides: [to_batch, to_head, _, to_next] } = *layout;
    let shape = [batch, heads / group, group, dim];
    Layout { shape, strides: [to_batch, group * to_head, to_head, to_next] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn decode() -> Problem {
        Problem::new(2, 32, 1, 128, DType::BF16).with_kv(8, 1000)
    }

    #[test]
    fn heads_of_a_group_become_rows_where_the_mask_leaves_them_every_key() {
        let window = |left, right| Mask::Window { left, right };
        let all = [
            Mask::None,
            Mask::Causal,
            window(None, Some(0)),
            window(Some(999), None),
            window(Some(usize::MAX), Some(3)),
        ];
        for mask in all {
            let folded = fold(&decode().with_mask(mask).with_softcap(3.0).with_lse());
            assert_eq!(
                folded,
                Problem::new(2, 8, 4, 128, DType::BF16).with_kv(8, 1000).with_softcap(3.0).with_lse()
            );
        }
        for mask in [Mask::CausalTopLeft, window(Some(998), None), window(Some(0), Some(0))] {
            let problem = decode().with_mask(mask);
            assert_eq!(fold(&problem), problem);
        }
        let several = Problem::new(2, 32, 2, 128, DType::BF16).with_kv(8, 1000);
        assert_eq!(fold(&several), several);
        let none = Problem::new(2, 0, 1, 128, DType::BF16).with_kv(0, 1000);
        assert_eq!(fold(&none), none);
    }

    #[test]
    fn every_row_of_the_folded_tensors_is_where_its_head_was() {
        let problem = decode().with_lse();
        let folded = fold(&problem);
        // Heads are further apart than they need be, and the batch is inside of them.
        let strides = [128, 300, 7000, 1];
        let at = |layout: &Layout, place: [usize; 3]| {
            place.iter().zip(layout.strides).map(|(at, stride)| at * stride).sum::<usize>()
        };
        for parameter in &problem.signature() {
            let was = Layout { shape: parameter.shape, strides };
            let is = fold_layout(&was, parameter, &problem, &folded);
            if parameter.rows == Rows::Keys {
                assert_eq!(is, was);
                continue;
            }
            assert_eq!(is.shape[..3], [2, 8, 4]);
            for (batch, head) in (0..2).flat_map(|batch| (0..32).map(move |head| (batch, head))) {
                assert_eq!(at(&was, [batch, head, 0]), at(&is, [batch, head / 4, head % 4]));
            }
        }
    }
}
