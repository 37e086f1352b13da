//! Kernels that stamp their sections: they assemble, and they compute what they compute without stamps.
#![cfg(all(feature = "cuda", feature = "sim"))]

use flashcore::plan::{Hardware, Plan, Target};
use flashcore::Problem;
use flashcore_ptx::ptxas::Ptxas;

#[test]
fn probe() {
    let ptxas = Ptxas::find_or_skip().unwrap().unwrap();
    for (text, target) in [
        ("1x8x512x64 f16", Target::Sm90a),
        ("1x16x16384x128 bf16 causal", Target::Sm90a),
        ("1x16x16384x128 f16", Target::Sm90a),
        ("1x16x4096x64 f16", Target::Sm90a),
        ("1x16x4096x64 f16 causal", Target::Sm90a),
        ("1x16x16384x256 f16", Target::Sm90a),
        ("1x16x16384x256 f16 causal", Target::Sm90a),
        ("1x8x2048x64 f16", Target::Sm90a),
        ("4x32/8x1/8192x128 f16", Target::Sm90a),
        ("1x8x512x64 f16", Target::Sm80),
        ("4x16x4096x128 f16 causal", Target::Sm80),
    ] {
        let problem: Problem = text.parse().unwrap();
        let plan = Plan::choose(&problem, &Hardware::typical(target)).unwrap();
        for plan in [plan.clone(), plan.traced()] {
            let module = plan.main().module(target).unwrap();
            let made = ptxas.assemble(&module, target).unwrap();
            let it = &made.kernels[0];
            println!("{text} {} traced={} regs {} spill {}+{} stack {} remarks {:?} cubin {}", plan.main().schedule, plan.main().spec.traced,
                it.registers, it.spill_store_bytes, it.spill_load_bytes, it.stack_bytes, made.remarks.iter().map(|r| r.text.clone()).collect::<Vec<_>>(), made.cubin.len());
        }
    }
}
