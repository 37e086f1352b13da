//! Heads that share keys become the rows of one tile, so that the keys are read once for all of them.

use flashcore_kernels::Kernel;

use crate::{
    Layout, Mask, Pass, Problem, Queries,
    signature::{Parameter, Rows},
};

/// The most queries per head that are rows beside those of other heads: with more, a head has enough rows of its own.
const MOST_QUERIES: usize = 16;

/// Rows of a warpgroup, whose first is a query's first.
const WARPGROUP: usize = 64;

/// The most rows of such a tile, over all heads and queries: two warpgroups have as many.
const MOST_ROWS: usize = 128;

/// A problem as a kernel is to see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Folded {
    /// Its sizes are those that the kernel sees: heads that are rows of one tile count as one, whose queries are all of
    /// theirs. Its mask is that of the problem, so it is about queries rather than rows.
    pub problem: Problem,
    /// Rows that a query has: 1, or as many as heads share keys. Where each head has one query that sees every key, it is
    /// 1 too, for then it makes no difference whether rows are heads or queries.
    pub rows_per_query: usize,
}

/// The problem as a kernel is to see it.
pub(crate) fn fold(problem: &Problem, kernel: Kernel) -> Folded {
    let (group, as_it_is) = (problem.group(), Folded { problem: *problem, rows_per_query: 1 });
    // Other kernels find tiles of packed queries among those of one head.
    let is_packed = problem.queries != Queries::Dense;
    if problem.heads_kv == 0 || problem.len_q == 0 || is_packed && kernel != Kernel::Sm80Decode {
        return as_it_is;
    }
    let queries = match problem.queries {
        Queries::Dense => Queries::Dense,
        Queries::Packed { total } => Queries::Packed { total: group * total },
    };
    let rows = Problem { heads_q: problem.heads_kv, len_q: group * problem.len_q, queries, ..*problem };
    if problem.len_q == 1 && sees_all(problem) && !is_packed {
        // The only query of a head sees the same keys as that of the next, so heads that share keys are as good as queries
        // of one head.
        return Folded { problem: Problem { mask: Mask::None, ..rows }, rows_per_query: 1 };
    }
    match unfoldable(problem, kernel) {
        None if group > 1 => Folded { problem: rows, rows_per_query: group },
        _ => as_it_is,
    }
}

/// Why heads that share keys cannot be the rows of one tile of a kernel, if they cannot.
fn unfoldable(problem: &Problem, kernel: Kernel) -> Option<String> {
    let Problem { len_q, .. } = *problem;
    let (group, rows) = (problem.group(), problem.group() * len_q);
    let many = || Some(format!("{group} heads of {len_q} queries are more than {MOST_ROWS} rows"));
    match kernel {
        _ if problem.pass == Pass::Backward => Some("a backward pass has one head at a time".into()),
        Kernel::Sm90Fwd if problem.dtype.is_f8() => Some("queries of f8 are those of one head".into()),
        Kernel::Sm90Fwd if group > WARPGROUP => {
            Some(format!("{group} heads do not fit a warpgroup's {WARPGROUP} rows"))
        }
        Kernel::Sm90Fwd if len_q > MOST_QUERIES => Some(format!("{len_q} queries fill tiles of one head")),
        Kernel::Sm90Fwd if rows > MOST_ROWS => many(),
        Kernel::Sm90Fwd | Kernel::Sm80Decode => None,
        _ => Some(format!("{kernel} has the rows of one head in a tile")),
    }
}

/// What a plan says where few queries of heads that share keys have tiles of their own nevertheless.
pub(super) fn apart(problem: &Problem, folded: &Folded, kernel: Kernel) -> Option<String> {
    let apart = folded.problem.heads_q == problem.heads_q && problem.group() > 1;
    let why = unfoldable(problem, kernel).filter(|_| apart && problem.len_q <= MOST_QUERIES)?;
    Some(format!("; each of the {} heads that share keys reads them for itself: {why}", problem.group()))
}

/// Whether the mask leaves every key to the only query.
fn sees_all(problem: &Problem) -> bool {
    let band = problem.mask.band();
    let to_the_first = band.left.is_none_or(|left| left >= problem.len_k.saturating_sub(1));
    // The query is aligned with the last key, unless with the first.
    to_the_first && (band.right.is_none() || !band.top_left)
}

/// The layout of a tensor of a problem as a kernel is told of it: where rows have queries, the kernel finds them itself.
pub(super) fn fold_layout(layout: &Layout, of: &Parameter, problem: &Problem, folded: &Folded) -> Layout {
    let group = folded.problem.len_q;
    if problem.len_q == group || folded.rows_per_query > 1 || of.rows != Rows::Queries {
        return *layout;
    }
    let Layout { shape: [batch, heads, _, dim], strides: [to_batch, to_head, _, to_next] } = *layout;
    let shape = [batch, heads / group, group, dim];
    Layout { shape, strides: [to_batch, group * to_head, to_head, to_next] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::plan::{Hardware, Plan, Target};

    fn decode() -> Problem {
        Problem::new(2, 32, 1, 128, DType::BF16).with_kv(8, 1000)
    }

    fn window(left: Option<usize>, right: Option<usize>) -> Mask {
        Mask::Window { left, right }
    }

    #[test]
    fn heads_of_a_group_become_queries_of_one_head_where_the_mask_leaves_them_every_key() {
        let all = [
            Mask::None,
            Mask::Causal,
            window(None, Some(0)),
            window(Some(999), None),
            window(Some(usize::MAX), Some(3)),
        ];
        for mask in all {
            for kernel in [Kernel::Sm90Fwd, Kernel::Sm80Fwd, Kernel::Scalar] {
                let folded = fold(&decode().with_mask(mask).with_softcap(3.0).with_lse(), kernel);
                let problem = Problem::new(2, 8, 4, 128, DType::BF16).with_kv(8, 1000);
                let problem = problem.with_softcap(3.0).with_lse();
                assert_eq!(folded, Folded { problem, rows_per_query: 1 });
            }
        }
        let none = Problem::new(2, 0, 1, 128, DType::BF16).with_kv(0, 1000);
        assert_eq!(fold(&none, Kernel::Sm90Fwd), Folded { problem: none, rows_per_query: 1 });
    }

    #[test]
    fn several_queries_and_those_with_a_mask_become_rows_too_where_the_kernel_finds_the_query_of_a_row() {
        let rows = |problem: Problem, kernel| {
            let folded = fold(&problem, kernel);
            assert_eq!(folded.problem.mask, problem.mask, "a mask is about queries");
            (folded.problem.heads_q, folded.problem.len_q, folded.rows_per_query)
        };
        let several = |len_q, mask| Problem { len_q, ..decode() }.with_mask(mask);
        for mask in [Mask::None, Mask::Causal, Mask::CausalTopLeft, window(Some(998), None)] {
            for kernel in [Kernel::Sm90Fwd, Kernel::Sm80Decode] {
                assert_eq!(rows(several(3, mask), kernel), (8, 12, 4));
                assert_eq!(rows(several(16, mask), kernel), (8, 64, 4));
            }
            assert_eq!(rows(several(3, mask), Kernel::Sm80Fwd), (32, 3, 1));
        }
        assert_eq!(rows(several(1, Mask::CausalTopLeft), Kernel::Sm90Fwd), (8, 4, 4));
        assert_eq!(rows(several(17, Mask::None), Kernel::Sm90Fwd), (32, 17, 1));
        assert_eq!(rows(several(33, Mask::None), Kernel::Sm80Decode), (8, 132, 4));
        let packed = several(5, Mask::Causal).with_queries(Queries::Packed { total: 9 });
        assert_eq!(rows(packed, Kernel::Sm90Fwd), (32, 5, 1));
        assert_eq!(rows(packed, Kernel::Sm80Decode), (8, 20, 4));
        assert_eq!(fold(&packed, Kernel::Sm80Decode).problem.queries, Queries::Packed { total: 36 });
        let own_keys = several(3, Mask::Causal).with_kv(32, 1000);
        assert_eq!(rows(own_keys, Kernel::Sm90Fwd), (32, 3, 1));
        assert_eq!(rows(several(3, Mask::Causal).backward(), Kernel::Sm90Fwd), (32, 3, 1));
    }

    #[test]
    fn every_row_of_the_folded_tensors_is_where_its_head_was() {
        let problem = decode().with_lse();
        let folded = fold(&problem, Kernel::Sm90Fwd);
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

    #[test]
    fn a_plan_says_that_heads_are_rows_or_why_they_are_not() {
        let plan = |text: &str, target| {
            Plan::choose(&text.parse().unwrap(), &Hardware::typical(target)).unwrap().to_string()
        };
        let folded = plan("4x32/8x4/4096x128 bf16 causal", Target::Sm90a);
        assert!(
            folded.contains("4 heads that share keys are rows of one tile: 4 queries, 16 rows"),
            "{folded}"
        );
        for (text, target, why) in [
            ("4x32/8x4/900x128 bf16 causal", Target::Sm80, "sm80_fwd has the rows of one head in a tile"),
            ("4x80/1x4/4096x128 bf16 causal", Target::Sm90a, "80 heads do not fit a warpgroup's 64 rows"),
            ("4x32/1x8/4096x128 bf16", Target::Sm90a, "32 heads of 8 queries are more than 128 rows"),
            ("4x32/8x4/4096x128 f8", Target::Sm90a, "queries of f8 are those of one head"),
        ] {
            let plan = plan(text, target);
            assert!(plan.contains(why), "{text}: {plan}");
        }
        for text in ["4x32/8x1/4096x128 bf16", "4x32/32x4/4096x128 bf16", "4x32/8x400/4096x128 bf16"] {
            let plan = plan(text, Target::Sm80);
            assert!(!plan.contains("for itself"), "{plan}");
        }
    }
}
