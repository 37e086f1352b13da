//! Wrong results, put through the check that `flashcore verify` makes; and right ones at every length.

use std::sync::OnceLock;

use flashcore::plan::{Schedule, Target};
use flashcore::sim::{Config, SimGpu};
use flashcore::{DType, Device, Mask, Problem};
use flashcore_ptx::Op;

use super::planted::{Bending, Bent, Mood, Moody, rows_by_head, swap_heads};
use super::{Trial, Verdict};
use crate::cases::Case;
use crate::check::{Outcome, Prepared};
use crate::eight;
use crate::engine::{DeviceEngine, Engine};
use crate::explain::describe;
use crate::gradients::{Slip, Tiled};
use crate::guarded::Arrangement;

const JUDGE: &str = "verify";

/// Keys of a tile that is dropped or read twice.
const TILE: usize = 64;

/// Lengths around every edge that a tile has.
const LENGTHS: [usize; 14] = [1, 2, 7, 63, 64, 65, 97, 127, 129, 200, 257, 511, 513, 1025];

/// A schedule whose keys and values come in copies that must be waited for.
const PIPELINED: &str = "sm80_fwd:block_m=64,block_n=32,warps=4,stages=2,q_in_regs=1,order=longest";

/// A case of the kind that faults are planted in: grouped heads, several tiles, gaps between the rows of a head.
fn case(problem: Problem, name: &str) -> Case {
    Case { arrangement: Arrangement::Bshd, ..Case::new(&format!("faults/{name}"), problem.with_lse()) }
}

/// The masks that faults of results are planted under.
const MASKS: [Mask; 2] = [Mask::None, Mask::Causal];

/// What faults of results are planted in, without a mask or causal. The oracle is asked about it only once.
pub fn planted_in(dtype: DType, mask: Mask) -> &'static Prepared {
    static PREPARED: [[OnceLock<Prepared>; MASKS.len()]; DType::WIDE.len()] =
        [const { [const { OnceLock::new() }; MASKS.len()] }; DType::WIDE.len()];
    let mask_at = MASKS.iter().position(|&of| of == mask).expect("no fault is planted under another mask");
    PREPARED[dtype as usize][mask_at].get_or_init(|| {
        let problem = Problem::new(2, 4, 256, 64, dtype).with_kv(2, 256).with_mask(mask);
        Prepared::new(case(problem, "planted"))
    })
}

/// Few queries of heads that share keys, as rows of one tile. The oracle is asked about them only once.
fn few_queries(dtype: DType) -> &'static Prepared {
    static PREPARED: [OnceLock<Prepared>; DType::WIDE.len()] = [const { OnceLock::new() }; DType::WIDE.len()];
    PREPARED[dtype as usize].get_or_init(|| {
        let problem = Problem::new(2, 6, 4, 64, dtype).with_kv(2, 40).with_mask(Mask::Causal);
        Prepared::new(case(problem, "few-queries"))
    })
}

/// What faults of gradients are planted in. The oracle is asked about it only once.
pub fn gradients_of(dtype: DType) -> &'static Prepared {
    static PREPARED: [OnceLock<Prepared>; DType::WIDE.len()] = [const { OnceLock::new() }; DType::WIDE.len()];
    PREPARED[dtype as usize].get_or_init(|| {
        let problem = Problem::new(1, 4, 160, 32, dtype).with_kv(2, 200).with_mask(Mask::Causal);
        Prepared::new(case(problem.backward(), "gradients"))
    })
}

/// What the check says of an engine.
pub(super) fn verdict(prepared: &Prepared, engine: &dyn Engine) -> Verdict {
    match prepared.check(engine) {
        Outcome::Failed(faults) => {
            let words = describe(&faults[0]);
            // Of several lines, the one that names the kind says most.
            let kind = words.lines().find(|line| line.trim_start().starts_with("kind:"));
            Verdict::Refused(kind.or(words.lines().next()).unwrap_or_default().trim().to_string())
        }
        Outcome::Passed(judgement) => {
            Verdict::Accepted(format!("{:.0} % of what is allowed", 100.0 * judgement.share_used()))
        }
        Outcome::Skipped(why) => Verdict::NotRun(why),
    }
}

/// A fault in every dtype; it is refused only if it is in all of them.
fn in_every_dtype(
    name: &'static str,
    mask: Mask,
    engine: impl Fn() -> Box<dyn Engine> + Send + Sync + 'static,
) -> Trial {
    in_each(name, move |dtype| planted_in(dtype, mask), engine)
}

fn in_each(
    name: &'static str,
    prepared: impl Fn(DType) -> &'static Prepared + Send + Sync + 'static,
    engine: impl Fn() -> Box<dyn Engine> + Send + Sync + 'static,
) -> Trial {
    Trial::fault(name, JUDGE, move || {
        let of = |dtype| verdict(prepared(dtype), engine().as_ref());
        let verdicts = DType::WIDE.map(|dtype| (dtype, of(dtype)));
        match verdicts.iter().find(|(_, verdict)| !matches!(verdict, Verdict::Refused(_))) {
            Some((dtype, verdict)) => Verdict::Accepted(format!("{verdict:?} in {dtype}")),
            None => verdicts[0].1.clone(),
        }
    })
}

fn bent(name: &'static str, mask: Mask, bend: fn(&mut Bent<'_>)) -> Trial {
    in_every_dtype(name, mask, move || Box::new(Bending::inputs(name, bend)))
}

fn moody(name: &'static str, mood: Mood) -> Trial {
    in_every_dtype(name, Mask::None, move || Box::new(Moody::new(mood)))
}

/// Every trial of results.
pub fn trials() -> Vec<Trial> {
    let mut trials = vec![
        in_every_dtype("zeros", Mask::Causal, || Box::new(Bending::outputs("zeros", |o, _, _| o.fill(0.0)))),
        bent("uniform attention", Mask::None, |call| call.q.fill(0.0)),
        bent("the last tile of keys dropped", Mask::None, |call| call.truncate_keys(256 - TILE)),
        bent("a tile of k read twice", Mask::None, |call| {
            let width = TILE * call.problem.head_dim;
            call.heads().for_each(|(k, _)| k.copy_within(0..width, width));
        }),
        bent("a scale that is 5 % too large", Mask::None, |call| {
            call.attention = call.attention.scale(call.problem.scale * 1.05);
        }),
        bent("a scale that is 5 % too small", Mask::Causal, |call| {
            call.attention = call.attention.scale(call.problem.scale * 0.95);
        }),
        bent("causal with one key too many", Mask::Causal, |call| {
            call.attention = call.attention.window(None, 1);
        }),
        bent("causal with one key too few", Mask::Causal, |call| {
            call.truncate_keys(255);
        }),
        bent("no causal mask at all", Mask::Causal, |call| {
            call.attention = call.attention.mask(Mask::None);
        }),
        in_each("a row's limit taken from the wrong query", few_queries, || Box::new(rows_by_head())),
        bent("k and v swapped", Mask::None, |call| std::mem::swap(&mut call.k, &mut call.v)),
        bent("heads swapped under grouped queries", Mask::Causal, swap_heads),
        bent("a quantiser that rounds v down", Mask::None, |call| {
            call.v.iter_mut().for_each(|x| *x = (*x * 32.0).floor() / 32.0);
        }),
        in_every_dtype("one bad row among 2048", Mask::None, || {
            Box::new(Bending::outputs("one bad row", |o, _, p| {
                o.copy_within(700 * p.head_dim_v..701 * p.head_dim_v, 701 * p.head_dim_v);
            }))
        }),
        in_every_dtype("lse to base 2", Mask::None, || {
            Box::new(Bending::outputs("lse to base 2", |_, lse, _| {
                for x in lse {
                    *x *= std::f32::consts::LOG2_E;
                }
            }))
        }),
        moody("an output that is never written", Mood::Idle),
        moody("a row that is not written", Mood::Forgetful),
        moody("a stale output", Mood::Stale),
        moody("right at the first call only", Mood::Worn),
        moody("a result written on another stream, late", Mood::Late),
        moody("a race that passes 4 of 5 runs", Mood::Racy),
        moody("runs that differ in one bit", Mood::Unsteady),
        Trial::fault("a kernel that does not wait for its copies", "simulator", || simulated(true)),
    ];
    trials.extend(
        Slip::ALL
            .map(|slip| in_each(slip.name(), gradients_of, move || Box::new(Tiled { slip: Some(slip) }))),
    );
    trials.extend(DType::WIDE.map(|dtype| {
        Trial::honest(format!("gradients of a tiled make in {dtype}"), JUDGE, move || {
            verdict(gradients_of(dtype), &Tiled { slip: None })
        })
    }));
    trials.extend(eight::Slip::ALL.map(|slip| {
        let engine = eight::Tiled { slip: Some(slip) };
        Trial::fault(slip.name(), JUDGE, move || verdict(&Prepared::new(slip.planted_in()), &engine))
    }));
    trials.extend([eight::Slip::OtherHead, eight::Slip::BlockBefore, eight::Slip::FewBits].map(|slip| {
        let (case, engine) = (slip.planted_in(), eight::Tiled { slip: None });
        let name = format!("{} without a fault", case.name);
        Trial::honest(name, JUDGE, move || verdict(&Prepared::new(case.clone()), &engine))
    }));
    trials.push(Trial::honest("the kernel that does wait", "simulator", || simulated(false)));
    trials.push(Trial::honest("the engine that faults are planted in, without one", JUDGE, || {
        verdict(planted_in(DType::BF16, Mask::Causal), &Bending::straight("none"))
    }));
    trials.extend(
        LENGTHS.map(|len| {
            Trial::honest(format!("right kernels at length {len}"), JUDGE, move || at_length(len))
        }),
    );
    trials
}

/// Every path of the CPU engine at one length, with and without a mask.
fn at_length(len: usize) -> Verdict {
    let mut most = String::new();
    for (mask, dtype) in [(Mask::None, DType::F16), (Mask::Causal, DType::BF16), (Mask::Causal, DType::F32)] {
        let prepared = Prepared::new(case(Problem::new(1, 1, len, 64, dtype).with_mask(mask), "length"));
        for engine in DeviceEngine::cpu_paths() {
            match verdict(&prepared, &engine) {
                Verdict::Accepted(said) => most = said,
                Verdict::Refused(why) | Verdict::NotRun(why) => {
                    return Verdict::Refused(format!("{} {dtype} {mask}: {why}", engine.name()));
                }
            }
        }
    }
    Verdict::Accepted(most)
}

/// A pipelined kernel in the simulator, as it is or without its waits.
fn simulated(spoilt: bool) -> Verdict {
    let schedule: Schedule = match PIPELINED.parse() {
        Ok(schedule) => schedule,
        Err(error) => return Verdict::NotRun(error.to_string()),
    };
    let config = Config { threads: 1, ..Config::default() };
    let gpu = SimGpu::new(Target::Sm80).with_sms(2).with_schedule(schedule).with_config(config);
    let gpu = gpu.with_edit(move |module| {
        let kept = |op: &Op| !(spoilt && matches!(op, Op::CpAsyncWait(_)));
        module.kernels.iter_mut().for_each(|kernel| kernel.body.retain(|inst| kept(&inst.op)));
    });
    let engine = DeviceEngine::of("sim", Device::sim(gpu));
    let problem = Problem::new(1, 1, 100, 64, DType::F16).with_mask(Mask::Causal);
    verdict(&Prepared::new(case(problem, "simulated")), &engine)
}
