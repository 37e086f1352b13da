//! Faults that hide where a corpus may not look, put through the quick corpus: at sizes that few cases have, behind
//! cached results, and in the handling of NaN and infinite elements.

use std::sync::OnceLock;

use flashcore::{DType, Mask, Problem};

use super::planted::{Bent, Hidden, Keeping, ThroughFile};
use super::{Trial, Verdict};
use crate::cases::{Case, Tier, corpus};
use crate::check::{Outcome, Prepared};
use crate::engine::Engine;
use crate::explain::describe;
use crate::rule::Row;

pub(super) const JUDGE: &str = "corpus";

/// A case with its inputs and the truth, which the first trial that needs them finds.
type Shared = (Case, OnceLock<Prepared>);

/// The quick corpus, the cheapest cases first.
fn quick() -> &'static [Shared] {
    static QUICK: OnceLock<Vec<Shared>> = OnceLock::new();
    QUICK.get_or_init(|| {
        let mut cases: Vec<Case> = corpus().into_iter().filter(|case| case.tier == Tier::Quick).collect();
        let work = |case: &Case| {
            let Problem { batch, heads_q, len_q, len_k, head_dim, .. } = case.problem;
            batch * heads_q * (len_q * len_k + len_q + len_k) * head_dim
        };
        cases.sort_by_key(work);
        cases.into_iter().map(|case| (case, OnceLock::new())).collect()
    })
}

/// Runs those cases of the quick corpus in which an engine may go wrong, until one refuses it.
pub(super) fn through_corpus(engine: &dyn Engine, shows: impl Fn(&Case) -> bool) -> Verdict {
    let mut passed = 0;
    for (case, prepared) in quick().iter().filter(|(case, _)| shows(case)) {
        match prepared.get_or_init(|| Prepared::new(case.clone())).check(engine) {
            Outcome::Failed(faults) => {
                let words = describe(&faults[0]);
                return Verdict::Refused(format!(
                    "{}: {}",
                    case.name,
                    words.lines().next().unwrap_or_default()
                ));
            }
            Outcome::Passed(_) => passed += 1,
            Outcome::Skipped(_) => {}
        }
    }
    Verdict::Accepted(format!("{passed} cases pass"))
}

/// Rows that come out wrong, in problems that have such rows.
fn rows(name: &'static str, shows: fn(&Problem) -> bool, wrong: fn(&Problem, Row) -> bool) -> Trial {
    Trial::fault(name, JUDGE, move || {
        through_corpus(&Hidden::rows(wrong), |case| shows(&case.problem) && case.wild.is_none())
    })
}

/// All rows of some problems come out wrong.
fn problems(name: &'static str, shows: fn(&Problem) -> bool) -> Trial {
    Trial::fault(name, JUDGE, move || {
        let engine = Hidden::rows(move |problem, _| shows(problem));
        through_corpus(&engine, |case| shows(&case.problem) && case.wild.is_none())
    })
}

/// The values of keys from some position on are ignored.
fn far_keys(name: &'static str, from: usize) -> Trial {
    Trial::fault(name, JUDGE, move || {
        let engine = Hidden::inputs(move |call| {
            let width = call.problem.head_dim_v;
            call.heads().for_each(|(_, v)| v[from * width..].fill(0.0));
        });
        through_corpus(&engine, |case| case.problem.len_k > from)
    })
}

/// Results that are cached by a part of the inputs.
fn kept(name: &'static str, key: fn(&[f32], [usize; 4]) -> Vec<f32>) -> Trial {
    Trial::fault(name, JUDGE, move || {
        let several = |case: &Case| {
            let Problem { batch, heads_q, len_q, len_k, .. } = case.problem;
            batch * heads_q > 0 && len_q > 8 && len_k > 8 && case.wild.is_none()
        };
        through_corpus(&Keeping::new(key), several)
    })
}

/// What happens to NaN and infinite elements.
fn wild(name: &'static str, engine: fn() -> Hidden) -> Trial {
    Trial::fault(name, JUDGE, move || through_corpus(&engine(), |case| case.wild.is_some()))
}

/// A finite number in place of NaN or infinity.
fn number(x: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(-65504.0, 65504.0) }
}

/// The rows of each head of a tensor.
fn heads(values: &[f32], [_, _, len, width]: [usize; 4]) -> impl Iterator<Item = &[f32]> {
    values.chunks_exact((len * width).max(1))
}

/// Every trial.
pub fn trials() -> Vec<Trial> {
    let mut trials = vec![
        rows("wrong from batch entry 2 on", |p| p.batch > 2, |_, row| row.batch >= 2),
        rows("wrong from batch entry 8 on", |p| p.batch > 8, |_, row| row.batch >= 8),
        rows("wrong from batch entry 64 on", |p| p.batch > 64, |_, row| row.batch >= 64),
        rows("wrong from head 8 on", |p| p.heads_q > 8, |_, row| row.head >= 8),
        rows("wrong from head 16 on", |p| p.heads_q > 16, |_, row| row.head >= 16),
        rows("wrong from head 64 on", |p| p.heads_q > 64, |_, row| row.head >= 64),
        rows(
            "wrong from kv head 2 on, under grouped queries",
            |p| p.heads_kv > 2 && p.group() > 1,
            |p, row| row.head / p.group() >= 2,
        ),
        rows(
            "wrong from kv head 4 on, under grouped queries",
            |p| p.heads_kv > 4 && p.group() > 1,
            |p, row| row.head / p.group() >= 4,
        ),
        rows(
            "wrong from the ninth head of a group on",
            |p| p.group() > 8,
            |p, row| row.head % p.group() >= 8,
        ),
        rows("wrong for queries beyond 1100", |p| p.len_q > 1100, |_, row| row.position > 1100),
        rows("wrong for queries beyond 2200", |p| p.len_q > 2200, |_, row| row.position > 2200),
        rows("wrong for queries beyond 4600", |p| p.len_q > 4600, |_, row| row.position > 4600),
        rows(
            "wrong only in the last head of the last batch entry, where there are several of both",
            |p| p.batch > 1 && p.heads_q > 1,
            |p, row| row.batch + 1 == p.batch && row.head + 1 == p.heads_q,
        ),
        rows(
            "wrong only in the last query of many",
            |p| p.len_q > 1500,
            |p, row| row.position + 1 == p.len_q,
        ),
        far_keys("the values of keys beyond 4100 lost", 4100),
        far_keys("the values of keys beyond 8200 lost", 8200),
        far_keys("the values of keys beyond 16400 lost", 16400),
        problems("wrong for a long decode", |p| p.len_q == 1 && p.len_k > 4200),
        problems("wrong for odd multiples of 8 as head dims", |p| p.head_dim % 16 == 8 && p.head_dim > 8),
        problems("wrong where v is wider than k", |p| p.head_dim_v > p.head_dim && p.head_dim > 1),
        problems("wrong without lse", |p| !p.lse),
        problems("wrong for groups of three", |p| p.group() == 3),
        problems("wrong for key lengths under a window", |p| {
            p.key_lengths && matches!(p.mask, Mask::Window { .. })
        }),
        problems("wrong for key lengths with a softcap", |p| p.key_lengths && p.softcap.is_some()),
        problems("wrong for a softcap in bf16 with several batch entries", |p| {
            p.softcap.is_some() && p.dtype == DType::BF16 && p.batch > 1
        }),
        problems("wrong for a window in bf16 with grouped queries", |p| {
            matches!(p.mask, Mask::Window { .. }) && p.dtype == DType::BF16 && p.group() > 1
        }),
        problems("wrong for top-left causal without lse", |p| p.mask == Mask::CausalTopLeft && !p.lse),
        problems("wrong for top-left causal with more queries than keys", |p| {
            p.mask == Mask::CausalTopLeft && p.len_q > p.len_k
        }),
        problems("wrong for softcaps beyond 1000", |p| p.softcap.is_some_and(|cap| cap > 1e3)),
        problems("wrong for softcaps below 0.1", |p| p.softcap.is_some_and(|cap| cap < 0.1)),
        kept("results kept by shape", |_, _| Vec::new()),
        kept("results kept by the first and the last row of each head", |values, shape| {
            let width = shape[3];
            heads(values, shape)
                .flat_map(|head| [&head[..width], &head[head.len() - width..]].concat())
                .collect()
        }),
        kept("results kept by the middle row of each head", |values, shape| {
            let (middle, width) = (shape[2] / 2 * shape[3], shape[3]);
            heads(values, shape).flat_map(|head| head[middle..middle + width].to_vec()).collect()
        }),
        kept("results kept by the first, the middle and the last rows of each head", |values, shape| {
            let width = shape[3];
            let rows = [0, 1, shape[2] / 4, shape[2] / 2, shape[2] / 2 + 1, shape[2] * 3 / 4, shape[2] - 1];
            heads(values, shape)
                .flat_map(|head| {
                    rows.iter().flat_map(|row| head[row * width..][..width].to_vec()).collect::<Vec<_>>()
                })
                .collect()
        }),
        kept("results kept by every other row", |values, shape| {
            values.chunks_exact(shape[3]).step_by(2).flatten().copied().collect()
        }),
        kept("results kept by a sample of elements", |values, _| {
            (0..64).map(|i: usize| values[i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % values.len()]).collect()
        }),
        kept("results kept by the first element of each row", |values, shape| {
            values.chunks_exact(shape[3]).map(|row| row[0]).collect()
        }),
        kept("results kept by the magnitude of each element", |values, _| {
            values.iter().map(|x| x.abs().log2().round()).collect()
        }),
        wild("NaN and infinity in inputs made numbers", || {
            Hidden::inputs(|call| {
                for x in call.q.iter_mut().chain(&mut call.k).chain(&mut call.v) {
                    *x = number(*x);
                }
            })
        }),
        wild("NaN and infinity in outputs made numbers", || {
            Hidden::outputs(|_, o, lse| o.iter_mut().chain(lse).for_each(|x| *x = number(*x)))
        }),
        wild("NaN in outputs made zero", || {
            Hidden::outputs(|_, o, _| o.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = 0.0))
        }),
        wild("a NaN that spreads over its head", || {
            Hidden::outputs(|problem, o, _| {
                for head in o.chunks_exact_mut((problem.len_q * problem.head_dim_v).max(1)) {
                    if head.iter().any(|x| x.is_nan()) {
                        head.fill(f32::NAN);
                    }
                }
            })
        }),
        wild("a NaN that spreads over its row", || {
            Hidden::outputs(|problem, o, _| {
                for row in o.chunks_exact_mut(problem.head_dim_v) {
                    if row.iter().any(|x| x.is_nan()) {
                        row.fill(f32::NAN);
                    }
                }
            })
        }),
        wild("an infinity taken for the largest number", || {
            Hidden::inputs(|call| {
                for x in call.q.iter_mut().chain(&mut call.k).chain(&mut call.v) {
                    if x.is_infinite() {
                        *x = 65504_f32.copysign(*x);
                    }
                }
            })
        }),
        Trial::fault("key lengths ignored", JUDGE, || {
            let engine = Hidden::inputs(|call: &mut Bent<'_>| {
                call.forget_key_lengths();
            });
            through_corpus(&engine, |case| case.problem.key_lengths)
        }),
        Trial::fault("key lengths ignored, and what lies behind them cleared", JUDGE, || {
            let engine = Hidden::inputs(|call| {
                call.forget_key_lengths();
                call.k.iter_mut().chain(&mut call.v).for_each(|x| *x = number(*x));
            });
            through_corpus(&engine, |case| case.problem.key_lengths && case.wild.is_none())
        }),
        Trial::fault("key lengths ignored by a command", JUDGE, || {
            through_corpus(&ThroughFile { reads_lengths: false }, |case| case.problem.key_lengths)
        }),
    ];
    trials.push(Trial::honest("a command that reads key lengths", JUDGE, || {
        let few = |case: &Case| case.name.starts_with("masks/key-lengths");
        through_corpus(&ThroughFile { reads_lengths: true }, few)
    }));
    trials.push(Trial::honest("elements that are no number, where they belong", JUDGE, || {
        through_corpus(&Hidden::outputs(|_, _, _| {}), |case| case.wild.is_some())
    }));
    trials.push(Trial::honest("results kept by all of their inputs", JUDGE, || {
        let some = |case: &Case| case.name.starts_with("lengths/causal-len6");
        through_corpus(&Keeping::new(|values, _| values.to_vec()), some)
    }));
    trials
}
