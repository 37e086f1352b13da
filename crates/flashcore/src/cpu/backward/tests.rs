//! Gradients against the oracle, on every instruction set that this CPU has.

use super::super::{Engine, available};
use crate::{
    Attention, Backward, DType, Device, Gradients, Layout, Name, Problem, Tensor, TensorBuf, TensorMut,
    oracle::{self, Rounding},
};

/// A backward problem with data.
struct Case {
    problem: Problem,
    /// q, k, v, o, lse, do and dlse.
    tensors: Vec<TensorBuf>,
    key_lengths: Option<Vec<u32>>,
}

impl Case {
    /// Key lengths, if the problem has any, go from none to all.
    fn new(text: &str) -> Self {
        let problem: Problem = format!("{text} backward").parse().unwrap();
        let signature = problem.with_lse().signature();
        let length = |b: usize| (b * problem.len_k / (problem.batch - 1).max(1)) as u32;
        let key_lengths: Option<Vec<u32>> =
            problem.key_lengths.then(|| (0..problem.batch).map(length).collect());
        let draw = |(i, of): (usize, &crate::signature::Parameter)| {
            let wave = |n: usize| (((n * 7919 + i * 104_729) % 65_537) as f32 * 0.37).sin() * 1.4;
            let values: Vec<f32> = (0..of.shape.iter().product()).map(wave).collect();
            TensorBuf::from_f32(&values, of.shape, of.dtype).unwrap()
        };
        let tensors: Vec<TensorBuf> = signature.inputs().enumerate().map(draw).collect();
        let mut case = Self { problem, tensors, key_lengths };
        case.attend();
        case
    }

    fn set(&mut self, tensor: usize, values: &[f32]) {
        let (shape, dtype) = (self.tensors[tensor].shape(), self.tensors[tensor].dtype());
        self.tensors[tensor] = TensorBuf::from_f32(values, shape, dtype).unwrap();
    }

    /// Computes o and lse of q, k and v.
    fn attend(&mut self) {
        let [q, k, v] = [0, 1, 2].map(|i| self.tensors[i].view());
        let exact = oracle::attention(&self.problem, &q, &k, &v, self.key_lengths.as_deref());
        for (i, values) in [(3, exact.o), (4, exact.lse)] {
            self.set(i, &values.into_iter().map(|x| x as f32).collect::<Vec<f32>>());
        }
    }

    fn attention(&self) -> Attention<'_> {
        let Problem { mask, scale, softcap, .. } = self.problem;
        let attention = Attention::new().mask(mask).scale(scale).softcap(softcap.unwrap_or(0.0));
        match &self.key_lengths {
            Some(lengths) => attention.key_lengths(lengths),
            None => attention,
        }
    }

    /// Calls `work` with what the backward pass reads.
    fn given<T>(&self, work: impl FnOnce(&Backward<'_>) -> T) -> T {
        let views: Vec<Tensor<'_>> = self.tensors.iter().map(TensorBuf::view).collect();
        let given = Backward::new([&views[0], &views[1], &views[2]], &views[3], &views[4], &views[5]);
        if self.problem.lse { work(&given.with_dlse(&views[6])) } else { work(&given) }
    }

    fn run(&self, engine: Engine) -> Gradients {
        self.given(|given| self.attention().backward(&Device::cpu_with(engine), given).unwrap())
    }

    fn follows_the_oracle(&self) {
        let lengths = self.key_lengths.as_deref();
        let exact = self.given(|given| oracle::gradients(&self.problem, given, lengths));
        let rounding = Rounding::ScoresAndProbabilities;
        let plain =
            self.given(|given| oracle::same_precision_gradients(&self.problem, given, lengths, rounding));
        for isa in available() {
            let Gradients { dq, dk, dv } = self.run(Engine::new().with_isa(isa).unwrap());
            for (name, ours, exact, plain) in [
                (Name::Dq, dq, &exact.dq, &plain.dq),
                (Name::Dk, dk, &exact.dk, &plain.dk),
                (Name::Dv, dv, &exact.dv, &plain.dv),
            ] {
                let size = exact.iter().fold(0.0_f64, |size, x| size.max(x.abs()));
                let error = |values: &mut dyn Iterator<Item = f64>| {
                    let far = |(a, b): (f64, &f64)| if a.is_nan() { f64::INFINITY } else { (a - b).abs() };
                    values.zip(exact).map(far).fold(0.0, f64::max)
                };
                let ours = error(&mut ours.to_f32().into_iter().map(f64::from));
                let theirs = error(&mut plain.iter().copied());
                // What f32 makes of lse and of sums that cancel, and a rounding of the result.
                let (single, half) = (f64::from(f32::EPSILON), f64::from(self.problem.dtype.epsilon()));
                let floor = 64.0 * single * size.max(1.0) + 0.5 * half * size;
                assert!(
                    ours <= 2.0 * theirs + floor,
                    "{} of {} on {isa}: error {ours:.3e}, plain {theirs:.3e}, size {size:.3e}",
                    name,
                    self.problem
                );
            }
        }
    }
}

#[test]
fn every_length_follows_the_oracle() {
    for len in [1, 2, 7, 63, 64, 65, 97, 129, 257, 513] {
        for dtype in DType::WIDE {
            Case::new(&format!("1x1x{len}x64 {dtype}")).follows_the_oracle();
            Case::new(&format!("1x1x{len}x64 {dtype} causal lse")).follows_the_oracle();
        }
    }
}

#[test]
fn what_is_next_to_nothing_is_not_lost() {
    // One of q, k, v and dO.
    for small in [0, 1, 2, 5] {
        let mut case = Case::new("1x2x150x64 bf16 causal");
        let factor = 2.0_f32.powi(-122);
        let scaled: Vec<f32> = case.tensors[small].to_f32().into_iter().map(|x| x * factor).collect();
        case.set(small, &scaled);
        case.attend();
        let exact = case.given(|given| oracle::gradients(&case.problem, given, None));
        for isa in available() {
            let Gradients { dq, dk, dv } = case.run(Engine::new().with_isa(isa).unwrap());
            for (name, ours, exact) in [("dq", dq, &exact.dq), ("dk", dk, &exact.dk), ("dv", dv, &exact.dv)] {
                let most = exact.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
                let far = |(a, b): (f32, &f64)| (f64::from(a) - b).abs();
                let error = ours.to_f32().into_iter().zip(exact).map(far).fold(0.0, f64::max);
                assert!(
                    error <= 0.02 * most,
                    "{name} with tensor {small} on {isa}: {error:.2e} of {most:.2e}"
                );
            }
        }
    }
}

#[test]
fn every_head_dim_follows_the_oracle() {
    for dims in
        ["1", "8", "40", "64", "72", "96", "128", "192/128", "256", "13/29", "3/300", "520/1", "64/80"]
    {
        for dtype in DType::WIDE {
            Case::new(&format!("1x2/1x40/70x{dims} {dtype}")).follows_the_oracle();
        }
    }
}

#[test]
fn every_mask_follows_the_oracle() {
    for mask in
        ["", "causal", "causal-top-left", "window(20,3)", "window(0,0)", "window(inf,40)", "window(5,inf)"]
    {
        for lens in ["130", "70/200", "200/70", "1/300", "33/1", "5/0", "0/5", "700/20"] {
            for rest in ["f32", "bf16 lse key-lengths", "f32 key-lengths softcap=2 lse", "f16 softcap=5"] {
                Case::new(&format!("3x4/2x{lens}x32 {rest} {mask}")).follows_the_oracle();
            }
        }
    }
}

#[test]
fn keys_in_several_chunks_and_stretches_follow_the_oracle() {
    for text in
        ["1x1x200/2500x64 f32 causal", "1x3/1x70/1100x128 bf16", "1x2/1x900/600x256 f32 window(300,100)"]
    {
        Case::new(text).follows_the_oracle();
    }
}

#[test]
fn scales_and_softcaps_beyond_f32_follow_the_oracle() {
    for rest in ["scale=1e-35", "scale=2e30", "softcap=1e30", "softcap=1e-35", "scale=1e38 softcap=1e-3"] {
        Case::new(&format!("2x4/2x20/30x16 f32 lse causal {rest}")).follows_the_oracle();
    }
}

#[test]
fn scores_in_the_millions_follow_the_oracle() {
    for dtype in DType::WIDE {
        Case::new(&format!("1x4/2x70/90x64 {dtype} lse causal scale=100000")).follows_the_oracle();
    }
}

#[test]
fn nothing_to_attend_to_has_gradients_of_zero() {
    for text in ["1x2x4/0x8 f32", "2x2/1x0/5x8 bf16", "1x0/2x3x8 f32", "0x2x3x8 f32", "1x2x9/3x8 f16 causal"]
    {
        let Gradients { dq, dk, dv } = Case::new(text).run(Engine::new());
        let zeros = |x: &TensorBuf| x.to_f32().iter().all(|&x| x == 0.0);
        let seen = text.contains("causal");
        assert!(seen || zeros(&dq) && zeros(&dk) && zeros(&dv), "{text}");
        // Six of nine queries see nothing.
        assert!(!seen || dq.to_f32()[..6 * 8].iter().all(|&x| x == 0.0) && !zeros(&dk), "{text}");
    }
}

#[test]
fn what_lies_in_rows_that_see_nothing_does_not_matter() {
    for (text, blind) in [("1x1x9/3x8 f32 causal lse", 6), ("1x1x40/9x8 bf16 causal lse", 31)] {
        let mut case = Case::new(text);
        let clean = case.run(Engine::new());
        for (i, width) in [(0, 8), (3, 8), (5, 8), (6, 1)] {
            let mut values = case.tensors[i].to_f32();
            values[..blind * width].fill(f32::NAN);
            let (shape, dtype) = (case.tensors[i].shape(), case.tensors[i].dtype());
            case.tensors[i] = TensorBuf::from_f32(&values, shape, dtype).unwrap();
        }
        assert_eq!(case.run(Engine::new()), clean, "{text}");
    }
}

#[test]
fn the_same_call_gives_the_same_bits_on_any_number_of_threads() {
    let case = Case::new("1x6/2x300/700x64 bf16 causal softcap=20 lse");
    let one = case.run(Engine::new().with_schedule("threads=1".parse().unwrap()));
    for threads in [1, 2, 3, 5] {
        let schedule = format!("threads={threads}").parse().unwrap();
        assert_eq!(case.run(Engine::new().with_schedule(schedule)), one, "{threads}");
    }
}

#[test]
fn any_strides_give_the_same_bits() {
    let case = Case::new("2x4/2x33/50x24/40 f16 causal");
    let expected = case.run(Engine::new());
    // (batch, length, heads, head_dim) with gaps between rows, in and out.
    let apart = |shape: [usize; 4]| {
        let [_, h, s, d] = shape;
        Layout { shape, strides: [s * h * (d + 5), d + 5, h * (d + 5), 1] }
    };
    let spread = |buf: &TensorBuf| {
        let [b, h, s, d] = buf.shape();
        let mut memory = vec![half::f16::NAN; b * h * s * (d + 5)];
        let mut view = TensorMut::strided(&mut memory, apart(buf.shape())).unwrap();
        for (i, row) in buf.to_f32().chunks_exact(d).enumerate() {
            view.write_row(i / (h * s), i / s % h, i % s, row);
        }
        memory
    };
    let memories: Vec<Vec<half::f16>> = [0, 1, 2, 3, 5].map(|i| spread(&case.tensors[i])).into();
    let view = |n: usize, i: usize| Tensor::strided(&memories[n], apart(case.tensors[i].shape())).unwrap();
    let (q, k, v, o, d_o) = (view(0, 0), view(1, 1), view(2, 2), view(3, 3), view(4, 5));
    let lse = case.tensors[4].view();
    let given = Backward::new([&q, &k, &v], &o, &lse, &d_o);
    let mut outputs = [memories[0].clone(), memories[1].clone(), memories[2].clone()];
    let [dq, dk, dv] = &mut outputs;
    let out = |memory, i: usize| TensorMut::strided(memory, apart(case.tensors[i].shape())).unwrap();
    let (mut dq, mut dk, mut dv) = (out(dq, 0), out(dk, 1), out(dv, 2));
    case.attention().backward_into(&Device::cpu(), &given, &mut dq, &mut dk, &mut dv).unwrap();
    assert_eq!(dq.as_tensor().to_f32(), expected.dq.to_f32());
    assert_eq!(dk.as_tensor().to_f32(), expected.dk.to_f32());
    assert_eq!(dv.as_tensor().to_f32(), expected.dv.to_f32());
    // The gaps are as they were.
    assert!(outputs.iter().zip([24, 24, 40]).all(|(memory, d)| memory[d].is_nan()));
    // A gradient of memory of its own has the order of its tensor.
    let gradients = case.attention().backward(&Device::cpu(), &given).unwrap();
    assert_eq!(gradients.dq.layout(), Layout::bshd(case.tensors[0].shape()));
    assert_eq!(gradients.dk.to_f32(), expected.dk.to_f32());
}
