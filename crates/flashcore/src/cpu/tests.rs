//! The engine against the oracle, on every instruction set that this CPU has.

use half::f16;

use super::{Engine, Isa, Schedule, available};
use crate::{
    Attention, DType, Descales, Device, Layout, Mask, Output, Problem, Tensor, TensorBuf, TensorMut,
    oracle::{self, Reference, Rounding},
};

/// Standard normal numbers from a seed.
fn normal(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    (0..len)
        .map(|_| {
            let (a, b) = (uniform().max(1e-300), uniform());
            ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
        })
        .collect()
}

/// A problem with data.
struct Case {
    problem: Problem,
    q: TensorBuf,
    k: TensorBuf,
    v: TensorBuf,
    key_lengths: Option<Vec<u32>>,
}

impl Case {
    /// Normal data; key lengths, if the problem has any, from none to all.
    fn new(problem: Problem) -> Self {
        Self::with_data(problem, |_, x| x)
    }

    /// Normal data passed through `change(tensor, value)`; tensors are 0 for q, 1 for k, 2 for v.
    fn with_data(problem: Problem, change: impl Fn(usize, f32) -> f32) -> Self {
        let make = |tensor: usize, shape: [usize; 4]| {
            let mut data = normal(tensor as u64 + 1, shape.iter().product());
            for x in &mut data {
                *x = change(tensor, *x);
            }
            TensorBuf::from_f32(&data, shape, problem.dtype).unwrap()
        };
        let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, .. } = problem;
        let length = |b: usize| (b * len_k / (batch - 1).max(1)) as u32;
        Self {
            problem,
            q: make(0, [batch, heads_q, len_q, head_dim]),
            k: make(1, [batch, heads_kv, len_k, head_dim]),
            v: make(2, [batch, heads_kv, len_k, head_dim_v]),
            key_lengths: problem.key_lengths.then(|| (0..batch).map(length).collect()),
        }
    }

    fn attention(&self) -> Attention<'_> {
        let Problem { mask, scale, softcap, .. } = self.problem;
        let attention = Attention::new().mask(mask).scale(scale).softcap(softcap.unwrap_or(0.0)).with_lse();
        match &self.key_lengths {
            Some(lengths) => attention.key_lengths(lengths),
            None => attention,
        }
    }

    fn run(&self, engine: Engine) -> Output {
        let device = Device::cpu_with(engine);
        self.attention().run(&device, &self.q.view(), &self.k.view(), &self.v.view()).unwrap()
    }

    fn exact(&self) -> Reference {
        let lengths = self.key_lengths.as_deref();
        oracle::attention(&self.problem, &self.q.view(), &self.k.view(), &self.v.view(), lengths)
    }

    fn plain(&self, rounding: Rounding) -> Reference {
        let lengths = self.key_lengths.as_deref();
        let (q, k, v) = (self.q.view(), self.k.view(), self.v.view());
        oracle::same_precision(&self.problem, [&q, &k, &v], lengths, &Descales::new(), rounding)
    }

    /// On every instruction set, the error is at most twice that of plain attention in the same precision.
    fn follows_the_oracle(&self) {
        self.follows_the_oracle_with(Schedule::default(), Rounding::ScoresAndProbabilities);
    }

    fn follows_the_oracle_with(&self, schedule: Schedule, rounding: Rounding) {
        let (exact, plain) = (self.exact(), self.plain(rounding));
        for isa in available() {
            let out = self.run(engine(isa).with_schedule(schedule));
            let name = format!("{} on {isa} with {schedule}", self.problem);
            compare(&name, &out, &exact, &plain);
        }
    }
}

fn engine(isa: Isa) -> Engine {
    Engine::new().with_isa(isa).unwrap()
}

/// The larger; NaN if either is.
fn worse(a: f64, b: f64) -> f64 {
    if a >= b || a.is_nan() { a } else { b }
}

fn compare(name: &str, out: &Output, exact: &Reference, plain: &Reference) {
    let values = out.o.to_f32();
    let size = exact.o.iter().fold(0.0, |a, b| worse(a, b.abs()));
    let error = |values: &mut dyn Iterator<Item = f64>| {
        values.zip(&exact.o).map(|(a, b)| (a - b).abs()).fold(0.0, worse)
    };
    let ours = error(&mut values.iter().copied().map(f64::from));
    let theirs = error(&mut plain.o.iter().copied());
    let floor = 1e-6 * size;
    assert!(ours <= 2.0 * theirs + floor, "{name}: error {ours:.3e}, plain attention has {theirs:.3e}");
    for (i, (&ours, &exact)) in out.lse.as_ref().unwrap().to_f32().iter().zip(&exact.lse).enumerate() {
        let ours = f64::from(ours);
        let close = (ours - exact).abs() <= 2e-6 * exact.abs().max(4.0);
        assert!(ours == exact || close, "{name}: lse {i} is {ours}, not {exact}");
    }
}

fn window(left: usize, right: usize) -> Mask {
    Mask::Window { left: Some(left), right: Some(right) }
}

#[test]
fn every_length_follows_the_oracle() {
    for len in [1, 2, 7, 63, 64, 65, 97, 127, 129, 200, 257, 511, 513, 1025] {
        for dtype in DType::ALL {
            let problem = Problem::new(1, 1, len, 64, dtype);
            Case::new(problem).follows_the_oracle();
            Case::new(problem.with_mask(Mask::Causal)).follows_the_oracle();
        }
    }
}

#[test]
fn every_head_dim_follows_the_oracle() {
    let equal = [1, 8, 40, 64, 72, 80, 96, 128, 160, 192, 256, 512].map(|d| (d, d));
    for (d, dv) in equal.into_iter().chain([(192, 128), (1024, 1), (3, 1024), (64, 80), (13, 29)]) {
        for dtype in DType::ALL {
            for len in [1, 70] {
                let problem = Problem::new(1, 2, len, d, dtype).with_kv(1, 70).with_head_dim_v(dv);
                Case::new(problem).follows_the_oracle();
            }
        }
    }
}

#[test]
fn every_mask_follows_the_oracle() {
    let masks = [
        Mask::None,
        Mask::Causal,
        Mask::CausalTopLeft,
        window(20, 3),
        window(0, 0),
        window(usize::MAX, 0),
        Mask::Window { left: None, right: Some(40) },
        Mask::Window { left: Some(5), right: None },
    ];
    for (len_q, len_k) in [(130, 130), (70, 200), (200, 70), (1, 300), (4, 150), (33, 1), (5, 0), (0, 5)] {
        for mask in masks {
            for dtype in [DType::F32, DType::BF16] {
                let problem = Problem::new(3, 2, len_q, 32, dtype).with_kv(1, len_k).with_mask(mask);
                Case::new(problem).follows_the_oracle();
                Case::new(problem.with_key_lengths()).follows_the_oracle();
                Case::new(problem.with_key_lengths().with_softcap(2.0)).follows_the_oracle();
            }
        }
    }
}

#[test]
fn every_group_of_heads_follows_the_oracle() {
    for heads_q in [2, 3, 6, 8, 10, 16, 34] {
        for heads_kv in [1, 2].into_iter().filter(|kv| heads_q % kv == 0) {
            for (len_q, mask) in [(1, Mask::None), (3, Mask::Causal), (50, window(30, 0))] {
                let problem = Problem::new(2, heads_q, len_q, 64, DType::F16).with_kv(heads_kv, 90);
                Case::new(problem.with_mask(mask)).follows_the_oracle();
            }
        }
    }
}

#[test]
fn decode_over_many_keys_follows_the_oracle() {
    for dtype in DType::ALL {
        for (heads_q, heads_kv) in [(2, 2), (4, 1), (8, 1), (12, 1)] {
            let problem = Problem::new(1, heads_q, 1, 128, dtype).with_kv(heads_kv, 5000);
            Case::new(problem).follows_the_oracle();
            Case::new(problem.with_mask(window(3000, 0)).with_softcap(20.0)).follows_the_oracle();
        }
    }
}

#[test]
fn any_schedule_follows_the_oracle() {
    let masks = [Mask::None, Mask::Causal, window(40, 7)];
    for (mask, dtype) in masks.into_iter().flat_map(|mask| [(mask, DType::F32), (mask, DType::BF16)]) {
        let problem = Problem::new(2, 2, 150, 48, dtype).with_kv(1, 170);
        let case = Case::new(problem.with_mask(mask));
        for text in [
            "block_q=1",
            "block_q=7,block_k=1",
            "block_q=100,block_k=3,split_k=10",
            "block_q=100000,block_k=100000",
            "split_k=1,threads=3",
            "split_k=64,block_k=50,threads=1",
        ] {
            case.follows_the_oracle_with(text.parse().unwrap(), Rounding::ScoresAndProbabilities);
        }
    }
}

#[test]
fn values_at_the_ends_of_their_type_follow_the_oracle() {
    for dtype in DType::ALL {
        let largest = match dtype {
            DType::F16 => f32::from(f16::MAX),
            // Squares of these summed over the head dim stay below the largest f32.
            DType::BF16 | DType::F32 => 1e18,
            DType::F8E4M3 => 448.0,
            DType::I32 => unreachable!("attention on integers"),
        };
        let sizes = [largest, 1e-3 * largest, 1e4, 100.0, 1e-3, 1e-7, 1e-30, 1e-42];
        for (size_q, size_k) in sizes.into_iter().flat_map(|q| sizes.map(|k| (q, k))) {
            let problem = Problem::new(1, 1, 20, 16, dtype).with_kv(1, 40).with_mask(Mask::Causal);
            let case = Case::with_data(problem, |tensor, x| match tensor {
                0 => (x * size_q).clamp(-largest, largest),
                1 => (x * size_k).clamp(-largest, largest),
                _ => x,
            });
            case.follows_the_oracle_with(Schedule::default(), Rounding::Probabilities);
        }
    }
}

#[test]
fn scales_and_softcaps_at_the_ends_of_f32_follow_the_oracle() {
    for len_q in [1, 20] {
        let problem = Problem::new(1, 1, len_q, 16, DType::F32).with_kv(1, 40).with_mask(Mask::Causal);
        for scale in [f32::MIN_POSITIVE / 1e5, 1e-37, 1e-29, 1e-3, 1e3, 1e20, f32::MAX / 1e3] {
            Case::new(problem.with_scale(scale)).follows_the_oracle();
            for softcap in [1e-38, 1e-10, 1.0, 1e10, 1e38] {
                let case = Case::new(problem.with_scale(scale).with_softcap(softcap));
                case.follows_the_oracle_with(Schedule::default(), Rounding::Probabilities);
            }
        }
    }
}

/// Where f32 leaves its range plain attention is no yardstick: elements agree with the oracle itself, ∞ and NaN included.
fn agree(name: &str, ours: &[f32], exact: &[f64], allowed: f64) {
    assert_eq!(ours.len(), exact.len());
    for (i, (&ours, &exact)) in ours.iter().zip(exact).enumerate() {
        // What f64 holds and f32 does not is infinite.
        let (ours, rounded) = (f64::from(ours), f64::from(exact as f32));
        let close = (ours - exact).abs() <= allowed * exact.abs().max(1.0);
        assert!(
            close || ours == rounded || ours.is_nan() && exact.is_nan(),
            "{name}: {i} is {ours:e}, not {exact:e}"
        );
    }
}

impl Case {
    /// On every instruction set, o and lse agree with the oracle's.
    fn agrees_with_the_oracle(&self, schedule: Schedule, what: &str) {
        let exact = self.exact();
        // Rounded products of large scores move the weights, as in plain attention; elsewhere a few roundings are left.
        let plain = self.plain(Rounding::Probabilities);
        let off = |(a, b): (&f64, &f64)| (a - b).abs();
        let theirs = plain.o.iter().zip(&exact.o).map(off).filter(|x| x.is_finite()).fold(0.0, f64::max);
        let rounding = f64::from(self.problem.dtype.epsilon());
        for isa in available() {
            let out = self.run(engine(isa).with_schedule(schedule));
            let name = format!("{} on {isa}, {what}", self.problem);
            agree(&name, &out.o.to_f32(), &exact.o, 2.0 * theirs + 4.0 * rounding);
            agree(&format!("lse of {name}"), &out.lse.unwrap().to_f32(), &exact.lse, 4e-6);
        }
    }
}

/// Shapes that take every path: lanes, one query over rows of whole vectors and of others, keys that are split.
fn paths(dtype: DType) -> [(Problem, Schedule); 4] {
    let problem = |len_q, d| Problem::new(1, 1, len_q, d, dtype).with_kv(1, 40).with_mask(Mask::Causal);
    let split = Schedule { split_k: 16, block_k: 8, ..Schedule::default() };
    [
        (problem(70, 16), Schedule::default()),
        (problem(1, 16), Schedule::default()),
        (problem(1, 13), split),
        (problem(33, 16), split),
    ]
}

#[test]
fn scores_beyond_f32_agree_with_the_oracle() {
    let scales = [f32::from_bits(1), 1e-38, 1e-29, 0.25, 1e20, 1.1e30, 3e38, f32::MAX];
    let caps = [0.0, f32::from_bits(1), 1e-38, 1e-3, 1e3, 1e10, 1e30, 3e38];
    let sizes = [(1.0, 1.0), (1e-19, 1e-19), (1e17, 1e17), (1e30, 1e30), (1e38, 1e-38), (1e20, 1e-3)];
    for (problem, schedule) in paths(DType::F32) {
        for (scale, cap) in scales.into_iter().flat_map(|scale| caps.map(|cap| (scale, cap))) {
            for (q, k) in sizes {
                let problem = problem.with_scale(scale).with_softcap(cap);
                let case = Case::with_data(problem, |tensor, x| x * [q, k, 1.0][tensor]);
                case.agrees_with_the_oracle(schedule, &format!("q of {q:e}, k of {k:e}"));
            }
        }
    }
}

#[test]
fn values_whose_sum_is_beyond_f32_agree_with_the_oracle() {
    for dtype in DType::ALL {
        let largest = if dtype == DType::F16 { f32::from(f16::MAX) } else { 3e38 };
        for (problem, schedule) in paths(dtype) {
            // All of one sign, so that sums overflow; and of both, which must be told apart from NaN.
            let same = Case::with_data(problem, |tensor, x| if tensor == 2 { largest } else { x });
            same.agrees_with_the_oracle(schedule, "largest values");
            let signs =
                Case::with_data(problem, |tensor, x| if tensor == 2 { x.signum() * largest } else { x });
            // The sums cancel, so that errors are of the values' size rather than of the result's.
            let exact = signs.exact();
            for isa in available() {
                let o = signs.run(engine(isa).with_schedule(schedule)).o.to_f32();
                let allowed = 8.0 * f64::from(dtype.epsilon()) * f64::from(largest);
                let close = o.iter().zip(&exact.o).all(|(&a, b)| (f64::from(a) - b).abs() <= allowed);
                assert!(close, "{problem} on {isa}");
            }
        }
    }
}

#[test]
fn infinite_scores_and_values_agree_with_the_oracle() {
    let wild = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN];
    for dtype in DType::ALL {
        for (problem, schedule) in paths(dtype) {
            for (tensor, wild) in [0, 1, 2].into_iter().flat_map(|tensor| wild.map(|wild| (tensor, wild))) {
                // One element of one row in three, and one of every row.
                for every in [1, 3] {
                    for softcap in [0.0, 20.0] {
                        let mut case = Case::with_data(problem.with_softcap(softcap), |t, x| {
                            // Positive queries, so that −∞ in a key is −∞ in a score.
                            if t == 0 { x.abs() + 0.1 } else { x }
                        });
                        let width = problem.head_dim;
                        let changed = match tensor {
                            0 => &mut case.q,
                            1 => &mut case.k,
                            _ => &mut case.v,
                        };
                        let mut data = changed.to_f32();
                        for row in data.chunks_exact_mut(width).step_by(every) {
                            row[width / 2] = wild;
                        }
                        *changed = TensorBuf::from_f32(&data, changed.shape(), dtype).unwrap();
                        let what = format!("{wild} in one row of {every} of tensor {tensor}");
                        case.agrees_with_the_oracle(schedule, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn an_only_key_that_scores_minus_infinity_has_an_lse_of_minus_infinity() {
    for dtype in DType::WIDE {
        for (len_q, head_dim) in [(1, 16), (1, 5), (64, 16), (9, 16)] {
            let problem = Problem::new(1, 1, len_q, head_dim, dtype).with_kv(1, 1);
            let case = Case::with_data(problem, |tensor, x| match tensor {
                0 => 1.0,
                1 => f32::NEG_INFINITY,
                _ => x,
            });
            for isa in available() {
                let out = case.run(engine(isa));
                assert!(out.lse.unwrap().to_f32().iter().all(|&x| x == f32::NEG_INFINITY), "{dtype} {isa}");
                assert!(out.o.to_f32().iter().all(|x| x.is_nan()), "{dtype} {isa}");
            }
        }
    }
}

#[test]
fn a_key_of_no_weight_in_f32_still_spreads_an_infinite_value() {
    // e^−150 is 0 in f32, and 0 · ∞ would be NaN.
    for (len_q, d) in [(1, 16), (1, 3), (64, 16)] {
        let problem = Problem::new(1, 1, len_q, d, DType::F32).with_kv(1, 2).with_scale(1.0 / d as f32);
        let mut case = Case::with_data(problem, |_, _| 1.0);
        let keys = [vec![0.0; d], vec![-150.0; d]].concat();
        let values = [vec![1.0; d], vec![f32::INFINITY; d]].concat();
        case.k = TensorBuf::from_f32(&keys, [1, 1, 2, d], DType::F32).unwrap();
        case.v = TensorBuf::from_f32(&values, [1, 1, 2, d], DType::F32).unwrap();
        case.agrees_with_the_oracle(Schedule::default(), "an infinite value");
        assert_eq!(case.run(Engine::new()).o.to_f32(), vec![f32::INFINITY; len_q * d]);
    }
}

/// Plain attention in f32 as a library of matrix products computes it: long sums in parts of 128 terms.
fn plain_in_parts(case: &Case) -> Vec<f64> {
    let Problem { len_q, len_k, head_dim, head_dim_v, scale, .. } = case.problem;
    let (q, k, v) = (case.q.to_f32(), case.k.to_f32(), case.v.to_f32());
    let sum = |len: usize, term: &dyn Fn(usize) -> f32| -> f32 {
        let part = |start: usize| (start..(start + 128).min(len)).map(term).sum::<f32>();
        (0..len).step_by(128).map(part).sum()
    };
    let mut o = Vec::new();
    for (i, query) in q.chunks_exact(head_dim).enumerate() {
        let head = i / len_q;
        let (k, v) = (&k[head * len_k * head_dim..], &v[head * len_k * head_dim_v..]);
        let score = |key: usize| scale * sum(head_dim, &|d| query[d] * k[key * head_dim + d]);
        let scores: Vec<f32> = (0..len_k).map(score).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
        let total = sum(len_k, &|key| weights[key]);
        let output = |d: usize| sum(len_k, &|key| weights[key] / total * v[key * head_dim_v + d]);
        o.extend((0..head_dim_v).map(|d| f64::from(output(d))));
    }
    o
}

#[test]
fn long_sums_are_as_exact_as_those_of_matrix_products() {
    // Head dims on both sides of where products are summed in parts; and many keys, in lanes and for one query.
    let of_head_dim = [128, 256, 257, 512, 1000, 1024].map(|d| (d, 16, 100));
    for (d, d_v, keys) in of_head_dim.into_iter().chain([(16, 16, 1024), (16, 16, 3000)]) {
        for (heads, len_q) in [(48, 1), (1, 48), (1, 64)] {
            let problem = Problem::new(1, heads, len_q, d, DType::F32).with_kv(heads, keys);
            // Scores with a spread of 2, so that their errors show in the outputs.
            let case = Case::new(problem.with_head_dim_v(d_v).with_scale(2.0 * problem.scale));
            let exact = case.exact().o;
            let rms = |o: &mut dyn Iterator<Item = f64>| {
                let squares: f64 = o.zip(&exact).map(|(a, b)| (a - b).powi(2)).sum();
                (squares / exact.len() as f64).sqrt()
            };
            let plain = rms(&mut plain_in_parts(&case).into_iter());
            for isa in available() {
                // One stretch of keys, which is where a chain is longest.
                let schedule = Schedule { split_k: usize::MAX, ..Schedule::default() };
                let out = case.run(engine(isa).with_schedule(schedule)).o.to_f32();
                let share = rms(&mut out.into_iter().map(f64::from)) / plain;
                assert!(share <= 1.5, "{problem} on {isa}: {share:.2} times plain attention's error");
            }
        }
    }
}

#[test]
fn both_layouts_and_broadcast_keys_follow_the_oracle() {
    let (b, h, hk, s, d) = (2, 4, 2, 45, 40);
    let problem = Problem::new(b, h, s, d, DType::BF16).with_kv(hk, s).with_mask(Mask::Causal).with_lse();
    let data: Vec<half::bf16> = normal(5, b * h * s * 2 * d).into_iter().map(half::bf16::from_f32).collect();
    let q = Tensor::bshd(&data[..b * h * s * d], &[b, s, h, d]).unwrap();
    // Rows with gaps, and one key sequence for both batch entries and heads.
    let k = Layout { shape: [b, hk, s, d], strides: [0, 0, 2 * d, 1] };
    let v = Layout { shape: [b, hk, s, d], strides: [s * hk * d, d, hk * d, 1] };
    let (k, v) = (Tensor::strided(&data, k).unwrap(), Tensor::strided(&data[1..], v).unwrap());
    let exact = oracle::attention(&problem, &q, &k, &v, None);
    let plain = oracle::same_precision(
        &problem,
        [&q, &k, &v],
        None,
        &Descales::new(),
        Rounding::ScoresAndProbabilities,
    );
    for isa in available() {
        let attention = Attention::new().causal().with_lse();
        let out = attention.run(&Device::cpu_with(engine(isa)), &q, &k, &v).unwrap();
        assert_eq!(out.o.layout(), Layout::bshd([b, h, s, d]));
        compare(&format!("strided on {isa}"), &out, &exact, &plain);
    }
}

#[test]
fn nothing_is_written_between_the_rows_of_an_output() {
    for (s, d) in [(1, 16), (50, 21)] {
        let (h, gap) = (3, 7);
        let data = normal(9, h * s * d);
        let x = Tensor::new(&data, &[1, h, s, d]).unwrap();
        for isa in available() {
            let layout = Layout { shape: [1, h, s, d], strides: [0, s * (d + gap), d + gap, 1] };
            let lse_layout = Layout { shape: [1, h, s, 1], strides: [0, 2 * s, 2, 1] };
            let (mut o, mut lse) = (vec![f32::NAN; h * s * (d + gap)], vec![f32::NAN; h * s * 2]);
            Attention::new()
                .run_into(
                    &Device::cpu_with(engine(isa)),
                    &x,
                    &x,
                    &x,
                    &mut TensorMut::strided(&mut o, layout).unwrap(),
                    Some(&mut TensorMut::strided(&mut lse, lse_layout).unwrap()),
                )
                .unwrap();
            assert!(o.chunks(d + gap).all(|row| row[..d].iter().all(|x| x.is_finite())));
            assert!(o.chunks(d + gap).all(|row| row[d..].iter().all(|x| x.is_nan())));
            assert!(lse.chunks(2).all(|pair| pair[0].is_finite() && pair[1].is_nan()));
        }
    }
}

#[test]
fn a_query_without_keys_gives_zeros_and_minus_infinity() {
    for (len_q, len_k, mask, empty) in
        [(90, 30, Mask::Causal, 60), (4, 0, Mask::None, 4), (7, 3, window(0, 0), 4)]
    {
        let problem = Problem::new(1, 1, len_q, 16, DType::F32).with_kv(1, len_k).with_mask(mask);
        for isa in available() {
            let out = Case::new(problem).run(engine(isa));
            let (o, lse) = (out.o.to_f32(), out.lse.unwrap().to_f32());
            assert!(o[..empty * 16].iter().all(|&x| x == 0.0), "{isa}");
            assert!(lse[..empty].iter().all(|&x| x == f32::NEG_INFINITY), "{isa}");
            assert!(o[empty * 16..].iter().all(|x| x.is_finite()), "{isa}");
        }
    }
}

#[test]
fn nan_reaches_the_rows_that_see_it_and_no_other() {
    let (len, d, bad) = (100, 32, 37);
    for (mask, len_q) in [(Mask::Causal, len), (window(10, 4), len), (Mask::Causal, 4), (Mask::None, 1)] {
        let problem = Problem::new(1, 2, len_q, d, DType::F32).with_kv(1, len).with_mask(mask);
        for wild in [f32::NAN, f32::INFINITY] {
            for in_v in [false, true] {
                // The key after the last query's place is seen by none under a causal mask.
                for bad in [bad, len - 2] {
                    let mut case = Case::new(problem);
                    let tensor = if in_v { &mut case.v } else { &mut case.k };
                    let mut data = tensor.to_f32();
                    // An infinite key must not meet zeros of its own, so every element of it is infinite.
                    data[bad * d..][..d].fill(wild);
                    *tensor = TensorBuf::from_f32(&data, tensor.shape(), DType::F32).unwrap();
                    let exact = case.exact();
                    for isa in available() {
                        let out = case.run(engine(isa)).o.to_f32();
                        for (i, (ours, exact)) in out.iter().zip(&exact.o).enumerate() {
                            let agree = f64::from(*ours) == *exact
                                || ours.is_nan() && exact.is_nan()
                                || (f64::from(*ours) - exact).abs() < 1e-4;
                            assert!(
                                agree,
                                "{isa}, {problem}, {wild} at key {bad}: {i} is {ours}, not {exact}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn wild_inputs_of_every_type_do_not_panic() {
    for dtype in DType::ALL {
        for wild in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN] {
            for len_q in [1, 40] {
                let problem = Problem::new(1, 1, len_q, 24, dtype).with_kv(1, 40).with_mask(Mask::Causal);
                for tensor in 0..3 {
                    let case = Case::with_data(problem, |t, x| if t == tensor && x > 0.5 { wild } else { x });
                    for isa in available() {
                        assert_eq!(case.run(engine(isa)).o.shape(), [1, 1, len_q, 24]);
                    }
                }
            }
        }
    }
}

#[test]
fn a_single_key_is_passed_on_exactly() {
    for dtype in DType::ALL {
        let case = Case::new(Problem::new(1, 1, 60, 64, dtype).with_kv(1, 1));
        for isa in available() {
            let o = case.run(engine(isa)).o.to_f32();
            assert!(o.chunks(64).all(|row| row == case.v.to_f32()), "{dtype} on {isa}");
        }
    }
}

#[test]
fn equal_weights_average_all_values_exactly() {
    for (len_q, keys, d) in [(16, 32, 32), (70, 64, 40), (100, 512, 64), (33, 1024, 16)] {
        let problem = Problem::new(1, 2, len_q, d, DType::BF16).with_kv(1, keys);
        // Whole numbers, whose sums f32 holds exactly; so it does their products with 1 / keys.
        let case = Case::with_data(problem, |tensor, x| if tensor == 0 { 0.0 } else { x.round() });
        let v = case.v.to_f32();
        let mean = |column: usize| v.chunks_exact(d).map(|row| row[column]).sum::<f32>() / keys as f32;
        let row: Vec<f32> = (0..d).map(|column| half::bf16::from_f32(mean(column)).to_f32()).collect();
        for isa in available() {
            let o = case.run(engine(isa)).o.to_f32();
            assert!(o.chunks_exact(d).all(|o| o == row), "{problem} on {isa}");
        }
    }
}

#[test]
fn the_value_of_a_key_that_outweighs_all_others_is_passed_on_exactly() {
    for (len_q, keys, d) in [(16, 32, 32), (70, 100, 40), (200, 517, 64), (40, 600, 13)] {
        let problem = Problem::new(1, 1, len_q, d, DType::BF16).with_kv(1, keys).with_scale(200.0);
        let mut case = Case::new(problem);
        // The bits of a key's number as signs: its product with itself is at least 2 above that with any other.
        let code = |key: usize| (0..d).map(move |bit| if key >> (bit % 10) & 1 == 1 { 1.0 } else { -1.0 });
        let wanted = |row: usize| (row * 37 + 5) % keys;
        let fill = |rows: usize, key: &dyn Fn(usize) -> usize| {
            let data: Vec<f32> = (0..rows).flat_map(|row| code(key(row))).collect();
            TensorBuf::from_f32(&data, [1, 1, rows, d], DType::BF16).unwrap()
        };
        (case.q, case.k) = (fill(len_q, &wanted), fill(keys, &|key| key));
        let v = case.v.to_f32();
        for isa in available() {
            let o = case.run(engine(isa)).o.to_f32();
            for (row, o) in o.chunks_exact(d).enumerate() {
                let key = wanted(row);
                assert_eq!(o, &v[key * d..][..d], "{problem} on {isa}: row {row}, key {key}");
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_threads_nor_on_the_run() {
    for problem in [
        Problem::new(1, 2, 300, 64, DType::F32).with_mask(Mask::Causal),
        Problem::new(1, 4, 1, 64, DType::F16).with_kv(2, 9000),
        Problem::new(1, 1, 20, 40, DType::BF16).with_kv(1, 4000),
        Problem::new(1, 2, 300, 64, DType::BF16).with_mask(Mask::Causal),
        Problem::new(1, 4, 250, 24, DType::BF16).with_kv(2, 700).with_mask(window(300, 50)),
        Problem::new(1, 2, 1500, 16, DType::F32).with_kv(1, 2500).with_mask(window(900, 50)),
    ] {
        let case = Case::new(problem);
        for isa in available() {
            let run = |threads: usize| {
                case.run(engine(isa).with_schedule(format!("threads={threads}").parse().unwrap()))
            };
            let one = run(1);
            for threads in [1, 2, 3, 7] {
                assert!(run(threads) == one, "{problem} on {isa} differs with {threads} threads");
            }
        }
    }
}

#[test]
fn the_engine_says_what_it_runs_on() {
    let engine = engine(Isa::Portable).with_schedule("threads=1".parse().unwrap());
    assert_eq!(engine.to_string(), "portable, 1 thread");
    assert_eq!(Device::cpu_with(engine).to_string(), "cpu (portable, 1 thread)");
}

#[test]
fn an_instruction_set_that_the_cpu_lacks_is_refused() {
    for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_available()) {
        assert!(Engine::new().with_isa(isa).unwrap_err().to_string().contains("portable"));
    }
}
