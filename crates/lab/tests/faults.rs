//! The judge on trial: planted faults must be refused, and honest engines of every make accepted.

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Honest, Numerics};
use flashcore::{Attention, DType, Device, Mask, Name, Problem, Tensor, TensorBuf, TensorMut};
use flashcore_lab::cases::{self, Case, Tier};
use flashcore_lab::check::{Fault, Outcome, Prepared};
use flashcore_lab::engine::Engine;
use flashcore_lab::explain::explain;
use flashcore_lab::guarded::Arrangement;
use flashcore_lab::inputs::Distribution;

/// The inputs of a call, to be bent before an honest engine computes them.
struct Bent<'a> {
    attention: Attention<'a>,
    problem: Problem,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Bent<'_> {
    /// The elements of one kv head of k and v.
    fn heads(&mut self) -> impl Iterator<Item = (&mut [f32], &mut [f32])> {
        let Problem { len_k, head_dim, head_dim_v, .. } = self.problem;
        self.k.chunks_exact_mut(len_k * head_dim).zip(self.v.chunks_exact_mut(len_k * head_dim_v))
    }

    /// Keeps only the first `len` keys.
    fn truncate_keys(&mut self, len: usize) {
        let Problem { len_k, head_dim, head_dim_v, .. } = self.problem;
        let cut = |x: &[f32], width: usize| -> Vec<f32> {
            x.chunks_exact(len_k * width).flat_map(|head| head[..len * width].to_vec()).collect()
        };
        (self.k, self.v) = (cut(&self.k, head_dim), cut(&self.v, head_dim_v));
        self.problem.len_k = len;
    }
}

/// An engine that computes something other than what was asked: right attention on bent inputs.
struct Bending {
    name: &'static str,
    bend: fn(&mut Bent<'_>),
    finish: fn(&mut Vec<f32>, &mut [f32], &Problem),
}

impl Engine for Bending {
    fn name(&self) -> &str {
        self.name
    }

    fn supports(&self, _: &Problem) -> Result<(), String> {
        Ok(())
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let asked = attention.problem(q, k, v)?;
        let mut bent =
            Bent { attention: *attention, problem: asked, q: q.to_f32(), k: k.to_f32(), v: v.to_f32() };
        (self.bend)(&mut bent);
        let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, dtype, .. } =
            bent.problem;
        let q = TensorBuf::from_f32(&bent.q, [batch, heads_q, len_q, head_dim], dtype)?;
        let k = TensorBuf::from_f32(&bent.k, [batch, heads_kv, len_k, head_dim], dtype)?;
        let v = TensorBuf::from_f32(&bent.v, [batch, heads_kv, len_k, head_dim_v], dtype)?;
        let result = bent.attention.with_lse().run(&Device::cpu(), &q.view(), &k.view(), &v.view())?;
        let (mut values, mut sums) = (result.o.to_f32(), result.lse.expect("asked for").to_f32());
        (self.finish)(&mut values, &mut sums, &asked);
        common::write(&values, o);
        if let Some(lse) = lse {
            common::write(&sums, lse);
        }
        Ok(())
    }
}

fn untouched(_: &mut Vec<f32>, _: &mut [f32], _: &Problem) {}

/// A case of the kind that faults are planted in: causal, grouped heads, several tiles.
fn case(dtype: DType, mask: Mask) -> Case {
    let problem = Problem::new(2, 4, 256, 64, dtype).with_kv(2, 256).with_mask(mask).with_lse();
    Case {
        name: "faults/planted".into(),
        tier: Tier::Quick,
        problem,
        key_lengths: None,
        arrangement: Arrangement::Bshd,
        inputs: Distribution::Normal,
        seed: 42,
    }
}

fn refused(engine: &dyn Engine, mask: Mask) -> Vec<Vec<Fault>> {
    DType::ALL
        .into_iter()
        .map(|dtype| match Prepared::new(case(dtype, mask)).check(engine) {
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
        for dtype in DType::ALL {
            let outcome = Prepared::new(case(dtype, mask)).check(&engine);
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
    wrong("heads swapped", Mask::Causal, |call| {
        let Problem { heads_q, heads_kv, len_k, head_dim, .. } = call.problem;
        let size = len_k * head_dim;
        let expand = |x: &[f32]| -> Vec<f32> {
            let batches = x.chunks_exact(heads_kv * size);
            batches
                .flat_map(|batch| {
                    (0..heads_q).flat_map(move |h| batch[h % heads_kv * size..][..size].iter().copied())
                })
                .collect()
        };
        (call.k, call.v) = (expand(&call.k), expand(&call.v));
        call.problem.heads_kv = heads_q;
    });
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
        assert_eq!((row.batch, row.head, row.query), (0, 2, 701 - 512));
    }
}

#[test]
fn a_bad_row_too_faint_for_maximum_and_rms_is_refused_by_its_own_bound() {
    // Keys of large magnitude elsewhere make the whole's errors large; one quiet row is wrong by its own measure.
    let mut case = case(DType::F16, Mask::Causal);
    case.inputs = Distribution::MixedMagnitudes;
    let prepared = Prepared::new(case);
    let truth = prepared.yardstick().oracle().o.clone();
    let width = prepared.case.problem.head_dim_v;
    let honest: Vec<f32> = truth.iter().map(|&x| DType::F16.round(x as f32)).collect();
    let size = |row: &[f32]| row.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let quiet = (0..honest.len() / width)
        .min_by(|&a, &b| size(&honest[a * width..][..width]).total_cmp(&size(&honest[b * width..][..width])))
        .unwrap();
    assert!(prepared.yardstick().judge(&honest, None).passed());
    let mut bad = honest;
    bad[quiet * width..][..width].iter_mut().for_each(|x| *x = -*x);
    let judgement = prepared.yardstick().judge(&bad, None);
    assert!(judgement.max.holds() && judgement.rms.holds(), "{judgement:?}");
    assert_eq!(judgement.bad_rows, [quiet]);
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
    let mut case = case(DType::F16, Mask::Causal);
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
    assert_eq!((bad_rows.len(), bad_rows[0].query), (1, 0));
}

/// An engine with a memory: what it does depends on how often it was called.
struct Moody {
    calls: AtomicUsize,
    first_result: Mutex<Option<Vec<f32>>>,
    mood: Mood,
}

#[derive(Clone, Copy, PartialEq)]
enum Mood {
    /// Never writes.
    Idle,
    /// Returns the first result for ever.
    Stale,
    /// Gets one row wrong in one of five runs.
    Racy,
    /// The last bit of one element depends on the run.
    Unsteady,
    /// Leaves one row as it was.
    Forgetful,
}

impl Moody {
    fn new(mood: Mood) -> Self {
        Self { calls: AtomicUsize::new(0), first_result: Mutex::new(None), mood }
    }
}

impl Engine for Moody {
    fn name(&self) -> &'static str {
        "moody"
    }

    fn supports(&self, _: &Problem) -> Result<(), String> {
        Ok(())
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let result = attention.with_lse().run(&Device::cpu(), q, k, v)?;
        let mut values = result.o.to_f32();
        match self.mood {
            Mood::Idle => return Ok(()),
            Mood::Stale => {
                values.clone_from(self.first_result.lock().unwrap().get_or_insert_with(|| values.clone()));
            }
            Mood::Racy if call % 5 == 4 => values[6400..6464].fill(0.25),
            Mood::Unsteady if call % 2 == 1 => values[9] = f32::from_bits(values[9].to_bits() ^ (1 << 13)),
            _ => {}
        }
        if self.mood == Mood::Forgetful {
            let [.., width] = o.shape();
            o.as_tensor().read_row(0, 0, 1, &mut values[width..2 * width]);
        }
        common::write(&values, o);
        if let Some(lse) = lse {
            common::write(&result.lse.expect("asked for").to_f32(), lse);
        }
        Ok(())
    }
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
    for dtype in DType::ALL {
        let outcome = Prepared::new(case(dtype, Mask::None)).check(&Moody::new(Mood::Stale));
        let Outcome::Failed(faults) = outcome else { panic!("{outcome:?}") };
        let ignored = [Fault::Ignored(Name::Q), Fault::Ignored(Name::K), Fault::Ignored(Name::V)];
        assert_eq!(faults, ignored);
    }
}

#[test]
fn a_race_that_passes_four_of_five_runs_is_refused() {
    for dtype in DType::ALL {
        let outcome = Prepared::new(case(dtype, Mask::None)).check(&Moody::new(Mood::Racy));
        assert!(matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
    }
}

#[test]
fn runs_that_differ_in_one_bit_are_refused() {
    let outcome = Prepared::new(case(DType::F16, Mask::None)).check(&Moody::new(Mood::Unsteady));
    let Outcome::Failed(faults) = outcome else { panic!("{outcome:?}") };
    assert!(matches!(faults[0], Fault::NotRepeatable { count: 1, .. }), "{faults:?}");
}

#[test]
fn a_failure_is_explained_with_its_place_and_the_command_that_shows_it_again() {
    let engine =
        Bending { name: "last tile dropped", bend: |call| call.truncate_keys(192), finish: untouched };
    let prepared = Prepared::new(case(DType::F16, Mask::None));
    let Outcome::Failed(faults) = prepared.check(&engine) else { panic!("accepted") };
    let text = explain(&prepared, engine.name(), &faults);
    for part in [
        "faults/planted",
        "2x4x256x64 f16",
        "BROKEN",
        "heads 0-3",
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
                panic!("{}", explain(&prepared, engine.name(), &faults));
            }
        }
    }
}
