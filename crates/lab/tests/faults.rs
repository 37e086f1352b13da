//! The judge on trial: planted faults must be refused, and honest engines of every make accepted.

mod common;

use common::{Honest, Numerics};
use flashcore::{DType, Mask, Name, Problem};
use flashcore_lab::cases;
use flashcore_lab::check::{Fault, Outcome, Prepared};
use flashcore_lab::diagnose::Kind;
use flashcore_lab::engine::Engine;
use flashcore_lab::explain::explain;
use flashcore_lab::faults::planted::{Bending, Bent, Mood, Moody, swap_heads};
use flashcore_lab::faults::results::planted_in;
use flashcore_lab::faults::{self, Nature};
use flashcore_lab::inputs::Distribution;

fn untouched(_: &mut Vec<f32>, _: &mut [f32], _: &Problem) {}

fn refused(engine: &dyn Engine, mask: Mask) -> Vec<Vec<Fault>> {
    DType::WIDE
        .into_iter()
        .map(|dtype| match planted_in(dtype, mask).check(engine) {
            Outcome::Failed(faults) => faults,
            other => panic!("{} in {dtype} was not refused: {other:?}", engine.name()),
        })
        .collect()
}

/// Plants a fault in the inputs and requires that the result is called wrong in every dtype.
fn wrong(name: &'static str, mask: Mask, bend: fn(&mut Bent<'_>)) {
    for faults in refused(&Bending { name, bend, finish: untouched }, mask) {
        assert!(matches!(faults[0], Fault::Wrong { after: None, .. }), "{name}: {faults:?}");
    }
}

/// Plants a fault in the outputs and requires that the result is called wrong in every dtype.
fn wrong_after(name: &'static str, finish: fn(&mut Vec<f32>, &mut [f32], &Problem)) {
    for faults in refused(&Bending { name, bend: |_| {}, finish }, Mask::Causal) {
        assert!(matches!(faults[0], Fault::Wrong { after: None, .. }), "{name}: {faults:?}");
    }
}

#[test]
fn the_planting_engine_without_a_fault_is_accepted() {
    let engine = Bending { name: "none", bend: |_| {}, finish: untouched };
    for mask in [Mask::None, Mask::Causal] {
        for dtype in DType::WIDE {
            let outcome = planted_in(dtype, mask).check(&engine);
            assert!(matches!(outcome, Outcome::Passed(_)), "{dtype}: {outcome:?}");
        }
    }
}

#[test]
fn zeros_are_refused() {
    wrong_after("zeros", |o, _, _| o.fill(0.0));
}

#[test]
fn uniform_attention_is_refused() {
    wrong("uniform", Mask::None, |call| call.q.fill(0.0));
    wrong("uniform", Mask::Causal, |call| call.q.fill(0.0));
}

#[test]
fn a_dropped_last_tile_is_refused() {
    wrong("last tile dropped", Mask::None, |call| call.truncate_keys(192));
}

#[test]
fn a_key_tile_read_twice_is_refused() {
    wrong("K tile twice", Mask::None, |call| {
        let width = 64 * call.problem.head_dim;
        call.heads().for_each(|(k, _)| k.copy_within(0..width, width));
    });
}

#[test]
fn a_scale_five_percent_off_is_refused() {
    wrong("scale × 1.05", Mask::None, |call| {
        call.attention = call.attention.scale(call.problem.scale * 1.05);
    });
    wrong("scale × 0.95", Mask::Causal, |call| {
        call.attention = call.attention.scale(call.problem.scale * 0.95);
    });
}

#[test]
fn a_causal_mask_off_by_one_is_refused_in_both_directions() {
    wrong("one key too many", Mask::Causal, |call| call.attention = call.attention.window(None, 1));
    wrong("one key too few", Mask::Causal, |call| call.truncate_keys(255));
}

#[test]
fn a_mask_that_is_not_applied_is_refused() {
    wrong("no mask", Mask::Causal, |call| call.attention = call.attention.mask(Mask::None));
}

#[test]
fn swapped_keys_and_values_are_refused() {
    wrong("K and V swapped", Mask::None, |call| std::mem::swap(&mut call.k, &mut call.v));
}

#[test]
fn swapped_heads_under_grouped_queries_are_refused() {
    // Query head h reads kv head h % heads_kv instead of h / group.
    wrong("heads swapped", Mask::Causal, swap_heads);
}

#[test]
fn one_bad_row_among_many_is_refused_and_named() {
    // The row's neighbour in its place: right in size, and 1 of 2048 rows.
    let engine = Bending {
        name: "one bad row",
        bend: |_| {},
        finish: |o, _, p| o.copy_within(700 * p.head_dim_v..701 * p.head_dim_v, 701 * p.head_dim_v),
    };
    for faults in refused(&engine, Mask::None) {
        let Fault::Wrong { bad_rows, .. } = &faults[0] else { panic!("{faults:?}") };
        let [row] = bad_rows[..] else { panic!("{bad_rows:?}") };
        assert_eq!((row.batch, row.head, row.position), (0, 2, 701 - 512));
    }
}

#[test]
fn a_bad_row_too_faint_for_maximum_and_rms_is_refused_by_its_own_bound() {
    // Keys of large magnitude elsewhere make the whole's errors large; one quiet row is wrong by its own measure.
    let mut case = planted_in(DType::F16, Mask::Causal).case.clone();
    case.inputs = Distribution::MixedMagnitudes;
    let prepared = Prepared::new(case);
    let truth = prepared.yardstick().of(Name::O).truth();
    let width = prepared.case.problem.head_dim_v;
    let honest: Vec<f32> = truth.iter().map(|&x| DType::F16.round(x as f32)).collect();
    let size = |row: &[f32]| row.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let quiet = (0..honest.len() / width)
        .min_by(|&a, &b| size(&honest[a * width..][..width]).total_cmp(&size(&honest[b * width..][..width])))
        .unwrap();
    assert!(prepared.yardstick().judge(&[(Name::O, &honest)]).passed());
    let mut bad = honest;
    bad[quiet * width..][..width].iter_mut().for_each(|x| *x = -*x);
    let judgement = prepared.yardstick().judge(&[(Name::O, &bad)]);
    assert!(judgement.max().holds() && judgement.rms().holds(), "{judgement:?}");
    assert_eq!(judgement.outputs[0].bad_rows, [quiet]);
}

#[test]
fn a_nan_or_an_infinity_is_refused_wherever_it_is() {
    wrong_after("one NaN", |o, _, _| o[77] = f32::NAN);
    wrong_after("one infinity", |o, _, _| *o.last_mut().unwrap() = f32::INFINITY);
    wrong_after("lse NaN", |_, lse, _| lse[99] = f32::NAN);
}

#[test]
fn a_wrong_lse_beside_a_right_output_is_refused() {
    wrong_after("lse in base 2", |_, lse, _| lse.iter_mut().for_each(|x| *x *= std::f32::consts::LOG2_E));
    wrong_after("lse one part in 1e4 off", |_, lse, _| lse[1000] *= 1.0001);
}

#[test]
fn keys_for_a_query_that_has_none_are_refused() {
    let mut case = planted_in(DType::F16, Mask::Causal).case.clone();
    case.problem.len_q = 300;
    let engine = Bending {
        name: "no empty rows",
        bend: |_| {},
        finish: |o, lse, _| {
            assert_eq!((o[0], lse[0]), (0.0, f32::NEG_INFINITY));
            o[0] = 1e-7;
        },
    };
    let outcome = Prepared::new(case).check(&engine);
    let Outcome::Failed(faults) = outcome else { panic!("{outcome:?}") };
    let Fault::Wrong { bad_rows, .. } = &faults[0] else { panic!("{faults:?}") };
    assert_eq!((bad_rows.len(), bad_rows[0].position), (1, 0));
}

#[test]
fn an_output_that_is_not_written_is_refused() {
    for faults in refused(&Moody::new(Mood::Idle), Mask::None) {
        assert!(matches!(faults[0], Fault::NotWritten { tensor: Name::O, .. }), "{faults:?}");
    }
}

#[test]
fn a_row_that_is_not_written_is_refused() {
    for faults in refused(&Moody::new(Mood::Forgetful), Mask::None) {
        let wrong = |fault: &Fault| matches!(fault, Fault::NotWritten { .. } | Fault::Wrong { .. });
        assert!(faults.iter().any(wrong), "{faults:?}");
    }
}

#[test]
fn a_stale_result_is_refused_because_it_does_not_follow_its_inputs() {
    for dtype in DType::WIDE {
        let outcome = planted_in(dtype, Mask::None).check(&Moody::new(Mood::Stale));
        let Outcome::Failed(faults) = outcome else { panic!("{outcome:?}") };
        let ignored = [Fault::Ignored(Name::Q), Fault::Ignored(Name::K), Fault::Ignored(Name::V)];
        assert_eq!(faults, ignored);
    }
}

#[test]
fn a_race_that_passes_four_of_five_runs_is_refused_and_called_a_race() {
    for dtype in DType::WIDE {
        let outcome = planted_in(dtype, Mask::None).check(&Moody::new(Mood::Racy));
        let Outcome::Failed(faults) = outcome else { panic!("{outcome:?}") };
        let race = |fault: &Fault| match fault {
            Fault::Wrong { diagnosis, .. } => diagnosis.kind == Kind::Race,
            fault => matches!(fault, Fault::NotRepeatable { .. }),
        };
        assert!(faults.iter().all(race), "{faults:?}");
    }
}

#[test]
fn runs_that_differ_in_one_bit_are_refused() {
    let outcome = planted_in(DType::F16, Mask::None).check(&Moody::new(Mood::Unsteady));
    let Outcome::Failed(faults) = outcome else { panic!("{outcome:?}") };
    assert!(matches!(faults[0], Fault::NotRepeatable { count: 1, .. }), "{faults:?}");
}

/// The diagnosis of a planted fault, which must be of one kind in every dtype; the words of the first.
fn diagnosed(engine: &dyn Engine, mask: Mask, kind: Kind) -> String {
    let all = refused(engine, mask).into_iter().map(|faults| match &faults[0] {
        Fault::Wrong { diagnosis, .. } => diagnosis.clone(),
        other => panic!("{}: {other:?}", engine.name()),
    });
    let all: Vec<_> = all.collect();
    assert!(all.iter().all(|diagnosis| diagnosis.kind == kind), "{}: {all:?}", engine.name());
    all[0].why.clone()
}

#[test]
fn the_kind_of_each_fault_is_found_with_the_number_that_goes_with_it() {
    let bent = |name, mask, kind, bend| diagnosed(&Bending::inputs(name, bend), mask, kind);
    let why = bent("uniform", Mask::None, Kind::Scale, |call| call.q.fill(0.0));
    assert!(why.contains("same weight"), "{why}");
    let why = bent("scale", Mask::Causal, Kind::Scale, |call| {
        call.attention = call.attention.scale(call.problem.scale * 1.25);
    });
    assert!(why.contains("scores are 1.2"), "{why}");
    let why = bent("no mask", Mask::Causal, Kind::Mask, |call| {
        call.attention = call.attention.mask(Mask::None);
    });
    assert!(why.contains("not applied"), "{why}");
    let why = bent("one too many", Mask::Causal, Kind::Mask, |call| {
        call.attention = call.attention.window(None, 1);
    });
    assert!(why.contains("too many behind"), "{why}");
    let why = bent("dropped", Mask::None, Kind::Tile, |call| call.truncate_keys(192));
    assert!(why.contains("keys 192 to 255 are missing"), "{why}");
    let why = bent("k twice", Mask::None, Kind::Tile, |call| {
        let width = 64 * call.problem.head_dim;
        call.heads().for_each(|(k, _)| k.copy_within(0..width, width));
    });
    assert!(why.contains("keys 64 to 127") && why.contains("tile of k"), "{why}");
    let why = bent("k and v", Mask::None, Kind::Operands, |call| std::mem::swap(&mut call.k, &mut call.v));
    assert!(why.contains("swapped"), "{why}");
    let why = bent("heads", Mask::None, Kind::Place, swap_heads);
    assert!(why.contains("query head 1 reads kv head 1 rather than 0"), "{why}");
    let why = bent("floor", Mask::None, Kind::Bias, |call| {
        call.v.iter_mut().for_each(|x| *x = (*x * 8.0).floor() / 8.0);
    });
    assert!(why.contains('-') || why.contains("down"), "{why}");
}

#[test]
fn the_kind_of_a_wrong_output_is_found() {
    let after = |name, kind, finish| diagnosed(&Bending::outputs(name, finish), Mask::Causal, kind);
    after("zeros", Kind::Zero, |o, _, _| o.fill(0.0));
    after("nan", Kind::NotFinite, |o, _, _| o[77] = f32::NAN);
    let why = after("gain", Kind::Scale, |o, _, _| o.iter_mut().for_each(|x| *x *= 1.1));
    assert!(why.contains("1.1"), "{why}");
    let why = after("offset", Kind::Bias, |o, _, _| o.iter_mut().for_each(|x| *x += 0.125));
    assert!(why.contains("1.25"), "{why}");
    let why = after("shifted rows", Kind::Place, |o, _, p| {
        let width = p.head_dim_v;
        o.copy_within(0..100 * width, width);
    });
    assert!(why.contains("wrong places"), "{why}");
    let why =
        after("lse", Kind::Scale, |_, lse, _| lse.iter_mut().for_each(|x| *x *= std::f32::consts::LOG2_E));
    assert!(why.contains("base 2"), "{why}");
    let why = after("columns", Kind::Unknown, |o, _, p| {
        o.chunks_exact_mut(p.head_dim_v).for_each(|row| row.swap(3, 40));
    });
    assert!(why.contains("columns 3, 40"), "{why}");
}

#[test]
fn every_planted_fault_is_caught_and_all_honest_work_accepted() {
    let findings: Vec<_> = faults::all().iter().map(faults::Trial::run).collect();
    let astray: Vec<_> = findings.iter().filter(|finding| !finding.as_it_should).collect();
    assert!(astray.is_empty(), "{astray:#?}");
    assert!(
        faults::count(&findings, Nature::Fault).1 >= 100 && faults::count(&findings, Nature::Honest).1 >= 25
    );
}

#[test]
fn a_failure_is_explained_with_its_place_and_the_command_that_shows_it_again() {
    let engine =
        Bending { name: "last tile dropped", bend: |call| call.truncate_keys(192), finish: untouched };
    let prepared = planted_in(DType::F16, Mask::None);
    let Outcome::Failed(faults) = prepared.check(&engine) else { panic!("accepted") };
    let text = explain(prepared, &engine, &faults);
    for part in [
        "faults/planted",
        "2x4/2x256x64 f16",
        "BROKEN",
        "heads 0-3",
        "kind: tile: keys 192 to 255 are missing",
        "batch 1 head 0-3  ####",
        "expected",
        "actual",
        "--filter '=faults/planted'",
    ] {
        assert!(text.contains(part), "{part} is missing in:\n{text}");
    }
}

#[test]
fn honest_engines_of_every_make_are_accepted_on_every_kind_of_input() {
    let text = "
        [[case]]
        name = 'inputs'
        tier = 'quick'
        inputs = ['normal', 'large-scores', 'overflowing-scores', 'dominant-key', 'constant-values', 'equal-keys',
            'sinks', 'mixed-magnitudes', 'denormals', 'extremes', 'negative-scores', 'rising-scores']
        mask = ['none', 'causal']
        heads = 1
        len = 97

        [[case]]
        name = 'small'
        tier = 'quick'
        len_q = [1, 2, 7]
        len_k = [1, 2, 5, 130]
        head_dim = [1, 8]
        seed = [1, 2, 3]
        heads = 1

        [[case]]
        name = 'softcap'
        tier = 'quick'
        softcap = [0.5, 30.0]
        inputs = ['normal', 'large-scores']
        len = 65";
    for case in cases::parse("honest", text).unwrap() {
        let prepared = Prepared::new(case);
        for numerics in Numerics::ALL {
            let engine = Honest { numerics };
            if let Outcome::Failed(faults) = prepared.check(&engine) {
                panic!("{}", explain(&prepared, &engine, &faults));
            }
        }
    }
}
