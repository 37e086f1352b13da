//! A schedule on the simulator, beside the f64 oracle.

use flashcore::{
    Attention, Device, Problem, TensorBuf, oracle,
    plan::{Schedule, Target},
    sim::SimGpu,
};

/// Numbers that look random.
pub fn noise(len: usize, seed: usize) -> Vec<f32> {
    let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 20;
    (0..len).map(|i| (word(word(i)) % 2001) as f32 / 1000.0 - 1.0).collect()
}

/// The largest errors of o and lse, relative where they are above 1, for a problem with a schedule, beside the f64 oracle.
pub fn errors(text: &str, schedule: Schedule, key_lengths: Option<&[u32]>) -> (f64, f64) {
    errors_on(SimGpu::new(Target::Sm90a).with_schedule(schedule), text, key_lengths)
}

/// The same on a GPU.
pub fn errors_on(gpu: SimGpu, text: &str, key_lengths: Option<&[u32]>) -> (f64, f64) {
    let problem: Problem = text.parse().unwrap();
    let buffer = |shape: [usize; 4], seed| {
        TensorBuf::from_f32(&noise(shape.iter().product(), seed), shape, problem.dtype).unwrap()
    };
    let inputs: Vec<TensorBuf> =
        problem.signature().iter().take(3).zip(0..).map(|(it, seed)| buffer(it.shape, seed)).collect();
    let [q, k, v] = [0, 1, 2].map(|i| inputs[i].view());
    let mut attention = Attention::new().mask(problem.mask).scale(problem.scale).with_lse();
    attention = attention.softcap(problem.softcap.unwrap_or(0.0));
    if let Some(lengths) = key_lengths {
        attention = attention.key_lengths(lengths);
    }
    let device = Device::sim(gpu);
    let found = attention.run(&device, &q, &k, &v).unwrap_or_else(|error| panic!("{text}: {error}"));
    let truth = oracle::attention(&attention.problem(&q, &k, &v).unwrap(), &q, &k, &v, key_lengths);
    let apart = |found: &[f32], truth: &[f64]| {
        found.iter().zip(truth).fold(0.0_f64, |most, (&a, &b)| {
            if f64::from(a) == b { most } else { most.max((f64::from(a) - b).abs() / b.abs().max(1.0)) }
        })
    };
    let lse = found.lse.unwrap();
    (apart(&found.o.to_f32(), &truth.o), apart(&lse.to_f32(), &truth.lse))
}
