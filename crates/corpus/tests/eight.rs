//! Floats of 8 bits: what the check refuses and what it accepts, and the needle that short sums lose.

use flashcore::plan::Target;
use flashcore::sim::SimGpu;
use flashcore::{DType, Device, Mask, Problem};
use flashcore_corpus::cases::{Case, corpus};
use flashcore_corpus::check::{Outcome, Prepared};
use flashcore_corpus::eight::{Slip, Tiled};
use flashcore_corpus::engine::{DeviceEngine, Engine};
use flashcore_judge::inputs::Distribution;

fn case(problem: Problem, inputs: Distribution) -> Prepared {
    Prepared::new(Case { inputs, ..Case::new("eight", problem.with_lse()) })
}

fn passes(case: &Prepared, engine: &dyn Engine) -> bool {
    match case.check(engine) {
        Outcome::Passed(_) => true,
        Outcome::Failed(_) => false,
        Outcome::Skipped(why) => panic!("skipped: {why}"),
    }
}

#[test]
fn every_slip_is_refused_and_a_kernel_without_one_accepted() {
    let cases =
        [Slip::OtherHead, Slip::FewBits, Slip::BlockBefore].map(|slip| Prepared::new(slip.planted_in()));
    assert!(cases.iter().all(|case| passes(case, &Tiled { slip: None })));
    let [usual, long, in_blocks] = &cases;
    for slip in Slip::ALL {
        let case = match slip {
            Slip::FewBits => long,
            Slip::BlockBefore => in_blocks,
            _ => usual,
        };
        assert!(!passes(case, &Tiled { slip: Some(slip) }), "{}", slip.name());
    }
}

#[test]
fn a_kernel_without_a_slip_is_accepted_with_all_inputs_and_masks() {
    for distribution in Distribution::ALL {
        for mask in [Mask::None, Mask::Window { left: Some(20), right: Some(3) }] {
            let problem = Problem::new(1, 2, 40, 48, DType::F8E4M3).with_kv(1, 90).with_descales();
            let case = case(problem.with_mask(mask), distribution);
            assert!(passes(&case, &Tiled { slip: None }), "{distribution} {mask}");
        }
    }
}

#[test]
fn the_needle_is_found_unless_sums_go_on_over_all_keys() {
    let problem = Problem::new(1, 1, 16, 16, DType::F8E4M3).with_kv(1, 4096);
    let case = case(problem, Distribution::Needle);
    let gpu = SimGpu::new(Target::Sm90a);
    let default = gpu.plan(&problem).unwrap().main().schedule.to_string();
    let one_chain = format!("{default},flush=0").parse().unwrap();
    let run = |gpu: SimGpu| passes(&case, &DeviceEngine::of("sim", Device::sim(gpu)));
    assert!(run(gpu.clone()), "{default}");
    assert!(!run(gpu.with_schedule(one_chain)), "one chain over all keys");
}

#[test]
fn the_corpus_has_cases_of_8_bits_that_say_so() {
    let cases = corpus();
    let eight: Vec<&Case> = cases.iter().filter(|case| case.problem.dtype.is_f8()).collect();
    assert!(eight.iter().all(|case| case.name.ends_with("-f8")));
    assert!(eight.iter().any(|case| case.key_lengths.is_some()));
    for distribution in Distribution::ALL {
        assert!(eight.iter().any(|case| case.inputs == distribution), "{distribution}");
    }
}
