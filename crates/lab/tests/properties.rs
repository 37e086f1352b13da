//! Random problems through every engine, judged as the corpus is.

use std::sync::OnceLock;

use flashcore::{DType, Mask, Problem};
use flashcore_lab::cases::{Case, Tier};
use flashcore_lab::check::{Outcome, Prepared};
use flashcore_lab::engine::{self, Engine};
use flashcore_lab::explain::explain;
use flashcore_lab::guarded::Arrangement;
use flashcore_lab::inputs::Distribution;
use proptest::prelude::*;
use proptest::sample::select;

fn mask() -> impl Strategy<Value = Mask> {
    let side = || prop_oneof![Just(None), (0_usize..200).prop_map(Some)];
    prop_oneof![
        Just(Mask::None),
        Just(Mask::Causal),
        Just(Mask::CausalTopLeft),
        (side(), side()).prop_map(|(left, right)| Mask::Window { left, right }),
    ]
}

/// Batch, kv heads, query heads per kv head, lengths and head dims: mostly small, some across several tiles.
fn sizes() -> impl Strategy<Value = [usize; 7]> {
    let length = || prop_oneof![4 => 0_usize..40, 2 => 40_usize..200, 1 => 200_usize..420];
    let width = || prop_oneof![3 => 1_usize..40, 2 => select(vec![64_usize, 80, 96, 128]), 1 => 1_usize..200];
    (0_usize..3, 1_usize..3, 1_usize..5, length(), length(), width(), width())
        .prop_map(|(b, kv, group, q, k, d, dv)| [b, kv, group, q, k, d, dv])
}

fn case() -> impl Strategy<Value = Case> {
    let options = (
        mask(),
        select(DType::WIDE.to_vec()),
        prop_oneof![3 => Just(0.0_f32), 1 => 0.5_f32..60.0],
        prop_oneof![3 => Just(None), 1 => (0.01_f32..2.0).prop_map(Some)],
        any::<(bool, bool)>(),
    );
    let inputs = (select(Arrangement::ALL.to_vec()), select(Distribution::ALL.to_vec()), any::<u64>());
    let key_lengths = prop_oneof![2 => Just(None), 1 => prop::array::uniform2(0.0_f64..=1.0).prop_map(Some)];
    (sizes(), options, inputs, key_lengths).prop_map(|(sizes, options, inputs, key_lengths)| {
        let [batch, heads_kv, group, len_q, len_k, head_dim, head_dim_v] = sizes;
        let (mask, dtype, softcap, scale, (lse, backward)) = options;
        let (arrangement, inputs, seed) = inputs;
        let mut problem = Problem::new(batch, heads_kv * group, len_q, head_dim, dtype)
            .with_kv(heads_kv, len_k)
            .with_head_dim_v(head_dim_v)
            .with_mask(mask)
            .with_softcap(softcap);
        problem.scale = scale.unwrap_or(problem.scale);
        problem.lse = lse;
        problem.key_lengths = key_lengths.is_some();
        let key_lengths =
            key_lengths.map(|shares| (0..batch).map(|b| (shares[b] * len_k as f64) as u32).collect());
        Case {
            name: "properties".into(),
            tier: Tier::Quick,
            problem: if backward { problem.backward() } else { problem },
            query_lengths: None,
            new_lengths: None,
            key_lengths,
            arrangement,
            inputs,
            wild: None,
            seed,
            rows: None,
        }
    })
}

fn engines() -> &'static [Box<dyn Engine>] {
    static ENGINES: OnceLock<Vec<Box<dyn Engine>>> = OnceLock::new();
    ENGINES.get_or_init(engine::all)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn any_problem_is_computed_rightly_by_every_engine(case in case()) {
        let prepared = Prepared::new(case);
        for engine in engines() {
            if let Outcome::Failed(faults) = prepared.check(engine.as_ref()) {
                prop_assert!(false, "{:#?}\n{}", prepared.case, explain(&prepared, engine.as_ref(), &faults));
            }
        }
    }
}
