//! The text of a problem says everything: it parses back to the same problem, whatever that is.

use flashcore::{Appending, DType, Keys, Mask, Problem, Queries, Turning};
use proptest::prelude::*;

fn masks() -> impl Strategy<Value = Mask> {
    let side = || prop_oneof![Just(None), any::<usize>().prop_map(Some), (0..9_usize).prop_map(Some)];
    prop_oneof![
        Just(Mask::None),
        Just(Mask::Causal),
        Just(Mask::CausalTopLeft),
        (side(), side()).prop_map(|(left, right)| Mask::Window { left, right }),
    ]
}

/// Numbers that are finite and above 0, the smallest and the largest among them.
fn numbers() -> impl Strategy<Value = f32> {
    (1_u32..0x7f80_0000).prop_map(f32::from_bits)
}

fn layouts() -> impl Strategy<Value = (Queries, Keys)> {
    let size = || 0..99_999_usize;
    let queries = prop_oneof![Just(Queries::Dense), size().prop_map(|total| Queries::Packed { total })];
    let keys = prop_oneof![
        Just(Keys::Dense),
        size().prop_map(|total| Keys::Packed { total }),
        size().prop_map(|total| Keys::Apart { total }),
        (1..999_usize, size()).prop_map(|(page, pages)| Keys::Paged { page, pages }),
    ];
    (queries, keys)
}

fn appends() -> impl Strategy<Value = Option<Appending>> {
    let size = || 0..99_999_usize;
    let turning =
        (any::<[bool; 2]>(), size(), 1..4_usize).prop_map(|([interleaved, positions], table, dim)| Turning {
            dim: 16 * dim,
            interleaved,
            table,
            positions,
        });
    let append = (size(), prop::option::of(size()), prop::option::of(turning));
    prop::option::of(append.prop_map(|(len, total, rotary)| Appending { len, total, rotary }))
}

prop_compose! {
    fn problems()(
        (batch, heads_kv, group) in (0..9_usize, 1..9_usize, 1..9_usize),
        (len_q, len_k) in (0..99_999_usize, 0..99_999_usize),
        (head_dim, head_dim_v) in (1..=1024_usize, 1..=1024_usize),
        square in any::<bool>(),
        dtype in prop::sample::select(DType::ALL.to_vec()),
        mask in masks(),
        (scale, softcap) in (prop::option::of(numbers()), prop::option::of(numbers())),
        (key_lengths, lse, backward, half_out) in any::<(bool, bool, bool, bool)>(),
        (descales, block) in (any::<[bool; 3]>(), prop::option::of(1..999_usize)),
        (queries, keys) in layouts(),
        append in appends(),
    ) -> Problem {
        let (len_k, head_dim_v) = if square { (len_q, head_dim) } else { (len_k, head_dim_v) };
        let mut problem = Problem::new(batch, heads_kv * group, len_q, head_dim, dtype)
            .with_kv(heads_kv, len_k)
            .with_head_dim_v(head_dim_v)
            .with_mask(mask)
            .with_queries(queries)
            .with_keys(keys)
            .with_softcap(softcap.unwrap_or(0.0));
        problem.scale = scale.unwrap_or(problem.scale);
        problem.key_lengths = key_lengths || matches!(keys, Keys::Apart { .. });
        problem.lse = lse;
        if dtype == DType::F8E4M3 {
            problem.descales = descales;
            problem.descale_keys = block.filter(|_| keys == Keys::Dense && (descales[1] || descales[2]));
            return if half_out { problem.with_out(DType::F16) } else { problem };
        }
        if let Some(append) = append.filter(|_| !backward && head_dim >= 48) {
            let mut problem = problem.with_append(append);
            let [_, of_k, of_v] = descales;
            if half_out && dtype != DType::F32 {
                problem = problem.with_dtype_kv(DType::F8E4M3);
                problem.descales = [false, of_k, of_v];
                problem.descale_keys = block.filter(|_| keys == Keys::Dense && (of_k || of_v));
            }
            return problem;
        }
        let no_gradients = matches!(keys, Keys::Paged { .. } | Keys::Apart { .. });
        if backward && !no_gradients { problem.backward() } else { problem }
    }
}

proptest! {
    #[test]
    fn a_problem_comes_back_from_its_text(problem in problems()) {
        let text = problem.to_string();
        prop_assert_eq!(text.parse::<Problem>(), Ok(problem), "{}", text);
    }

    #[test]
    fn any_text_is_read_or_refused(text in ".*") {
        let _ = text.parse::<Problem>();
    }

    #[test]
    fn words_in_any_order_are_read(problem in problems(), turn in 0..4_usize) {
        let text = problem.to_string();
        let mut words: Vec<&str> = text.split(' ').collect();
        let behind = words.len() - 1;
        words[1..].rotate_left(turn % behind.max(1));
        prop_assert_eq!(words.join("  ").parse::<Problem>(), Ok(problem));
    }
}
