//! 8-bit floats: the engines against the oracle, by the public call.

use flashcore::{Attention, DType, Descales, Device, Error, F8E4M3, Layout, Name, Tensor, TensorBuf, oracle};

/// Numbers of both signs that look random.
fn noise(len: usize, seed: usize) -> Vec<f32> {
    let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 20;
    (0..len).map(|i| (word(word(i)) % 4001) as f32 / 1000.0 - 2.0).collect()
}

fn tensor(shape: [usize; 4], seed: usize) -> TensorBuf {
    TensorBuf::from_f32(&noise(shape.iter().product(), seed), shape, DType::F8E4M3).unwrap()
}

/// The largest error of an output, as a part of the largest output, and that of lse.
fn errors(device: &Device, attention: &Attention<'_>, inputs: [&Tensor<'_>; 3]) -> [f64; 2] {
    let [q, k, v] = inputs;
    let problem = attention.problem(q, k, v).unwrap();
    let out = attention.with_lse().run(device, q, k, v).unwrap();
    let truth = oracle::descaled(&problem, inputs, attention.host_key_lengths(), &attention.given_descales());
    let off = |found: Vec<f32>, truth: &[f64]| {
        let pairs = found.iter().zip(truth).filter(|(found, truth)| f64::from(**found) != **truth);
        pairs.map(|(found, truth)| (f64::from(*found) - truth).abs()).fold(0.0, f64::max)
    };
    let largest = truth.o.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    [off(out.o.to_f32(), &truth.o) / largest, off(out.lse.unwrap().to_f32(), &truth.lse)]
}

const THREES: [f32; 4] = [3.0, 1.0 / 7.0, 0.5, 1.75];

#[test]
fn the_cpu_computes_what_stored_numbers_stand_for() {
    for (group, len_q, len_k, dim, dim_v) in
        [(1, 70, 130, 64, 64), (3, 40, 41, 80, 48), (2, 1, 300, 128, 128), (1, 5, 9, 7, 3)]
    {
        let q = tensor([2, 2 * group, len_q, dim], 1);
        let (k, v) = (tensor([2, 2, len_k, dim], 2), tensor([2, 2, len_k, dim_v], 3));
        let (q, k, v) = (q.view(), k.view(), v.view());
        let of = [0, 1, 2].map(|turn| {
            let mut all = THREES;
            all.rotate_left(turn);
            all
        });
        let each = of.each_ref().map(|all| Tensor::descale(all, [2, 2]).unwrap());
        let one = Tensor::descale(&[0.7], [2, 2]).unwrap();
        for attention in [
            Attention::new(),
            Attention::new().causal().descales(Descales::of(each.each_ref())),
            Attention::new().output(DType::F16).descales(Descales::new().q(&one).v(&each[0])),
            Attention::new().softcap(2.0).descales(Descales::new().k(&each[1])),
            Attention::new().key_lengths(&[3, 1]).descales(Descales::of([&one, &one, &one])),
        ] {
            let [o, lse] = errors(&Device::cpu(), &attention, [&q, &k, &v]);
            // The output is rounded to bf16.
            assert!(o < 0.004 && lse < 2e-5, "{attention:?}: off by {o}, lse by {lse}");
        }
    }
}

#[test]
fn tiny_and_huge_descales_cancel() {
    let (q, k, v) = (tensor([1, 1, 20, 32], 1), tensor([1, 1, 50, 32], 2), tensor([1, 1, 50, 32], 3));
    let (q, k, v) = (q.view(), k.view(), v.view());
    for [of_q, of_k, of_v] in [[1e-30, 1e30, 1e30], [1e20, 1e-20, 1e-20], [1e38, 1e-38, 1e-36]] {
        let [a, b, c] = [[of_q], [of_k], [of_v]];
        let each = [&a, &b, &c].map(|one| Tensor::descale(one, [1, 1]).unwrap());
        let attention = Attention::new().descales(Descales::of(each.each_ref()));
        let [o, lse] = errors(&Device::cpu(), &attention, [&q, &k, &v]);
        assert!(o < 0.004 && lse < 2e-5, "{of_q} {of_k} {of_v}: off by {o}, lse by {lse}");
    }
}

#[test]
fn codes_of_nan_behind_the_last_key_do_not_matter() {
    let (q, k) = (tensor([1, 1, 3, 16], 1), tensor([1, 1, 4, 16], 2));
    let mut stored = [F8E4M3::from_f32(0.75); 4 * 16];
    stored[32..].fill(F8E4M3::from_bits(0x7f));
    let v = Tensor::new(&stored, &[1, 1, 4, 16]).unwrap();
    let (q, k) = (q.view(), k.view());
    let out = Attention::new().key_lengths(&[2]).run(&Device::cpu(), &q, &k, &v).unwrap();
    assert_eq!(out.o.to_f32(), [0.75; 48]);
    let seen = Attention::new().key_lengths(&[3]).run(&Device::cpu(), &q, &k, &v).unwrap();
    assert!(seen.o.to_f32().iter().all(|x| x.is_nan()));
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    let q = tensor([1, 2, 4, 16], 1);
    let q = q.view();
    let run = |attention: Attention<'_>| attention.run(&Device::cpu(), &q, &q, &q).map(|_| ());
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let wrong = [1.0, bad];
        let wrong = Tensor::descale(&wrong, [1, 2]).unwrap();
        match run(Attention::new().descales(Descales::new().k(&wrong))) {
            Err(Error::Descale { tensor: Name::KDescale, entry: 0, head: 1, .. }) => {}
            other => panic!("{bad}: {other:?}"),
        }
    }
    let many = [1.0; 3];
    let many = Tensor::descale(&many, [1, 3]).unwrap();
    let refused = run(Attention::new().descales(Descales::new().v(&many)));
    assert!(
        matches!(refused, Err(Error::SizeMismatch { tensor: Name::VDescale, what: "heads", given: 3, .. })),
        "{refused:?}"
    );
    assert!(matches!(run(Attention::new().output(DType::F32)), Err(Error::EightBit { .. })));
    let halves = TensorBuf::from_f32(&noise(128, 1), [1, 2, 4, 16], DType::BF16).unwrap();
    let one = Tensor::descale(&[2.0], [1, 2]).unwrap();
    let with_16_bits = Attention::new().descales(Descales::new().q(&one)).problem(
        &halves.view(),
        &halves.view(),
        &halves.view(),
    );
    assert!(matches!(with_16_bits, Err(Error::EightBit { what: "descales", .. })), "{with_16_bits:?}");
    let mixed = Attention::new().problem(&q, &halves.view(), &halves.view());
    assert!(matches!(mixed, Err(Error::DTypeMismatch { tensor: Name::K, .. })), "{mixed:?}");
    let half_a_cache = Attention::new().problem(&halves.view(), &q, &halves.view());
    assert!(matches!(half_a_cache, Err(Error::DTypeMismatch { tensor: Name::V, .. })), "{half_a_cache:?}");
    let backward: Result<flashcore::Problem, Error> = "1x2x4x16 f8 backward".parse();
    assert!(matches!(backward, Err(Error::EightBit { what: "a backward pass", .. })), "{backward:?}");
}

#[test]
fn strides_of_descales_are_free() {
    let (q, v) = (tensor([2, 2, 4, 16], 1), tensor([2, 2, 4, 16], 2));
    let (q, v) = (q.view(), v.view());
    // Head by head, with a gap between them.
    let apart = [3.0, 0.5, f32::NAN, 0.25, 1.5];
    let strided = Layout { shape: [2, 2, 1, 1], strides: [1, 3, 1, 1] };
    let apart = Tensor::strided(&apart, strided).unwrap();
    let dense = [3.0, 0.25, 0.5, 1.5];
    let dense = Tensor::descale(&dense, [2, 2]).unwrap();
    let run = |descale: &Tensor<'_>| {
        Attention::new().descales(Descales::new().v(descale)).run(&Device::cpu(), &q, &q, &v).unwrap()
    };
    assert_eq!(run(&apart), run(&dense));
}

#[cfg(feature = "sim")]
#[test]
fn memory_for_sums_put_aside_is_there_from_the_first_key_on_that_needs_it() {
    use flashcore::{plan::Target, sim::SimGpu};

    let schedule = "sm90_fwd:warpgroups=2,block_n=32,stages=2,q_stages=1,ctas=1,split=1,pingpong=0,lazy=0,poly=0,\
                    persistent=1,pairs=0,flush=2";
    let gpu = SimGpu::new(Target::Sm90a).with_schedule(schedule.parse().unwrap()).with_sms(2);
    // Three tiles of keys, one key more, and so many that sums are put aside twice.
    for (len_k, aside) in [(96, false), (97, true), (200, true)] {
        let q = tensor([1, 1, 130, 64], 1);
        let (k, v) = (tensor([1, 1, len_k, 64], 2), tensor([1, 1, len_k, 64], 3));
        let inputs = [&q.view(), &k.view(), &v.view()];
        let attention = Attention::new();
        let plan = gpu.plan(&attention.problem(inputs[0], inputs[1], inputs[2]).unwrap()).unwrap();
        assert_eq!(plan.workspace_bytes() > 0, aside, "{len_k} keys");
        let [o, lse] = errors(&Device::sim(gpu.clone()), &attention, inputs);
        assert!(o < 0.05 && lse < 0.02, "{len_k} keys: off by {o}, lse by {lse}");
    }
}

#[cfg(feature = "sim")]
#[test]
fn simulated_gpus_compute_what_stored_numbers_stand_for() {
    use flashcore::{plan::Target, sim::SimGpu};

    let q = tensor([2, 4, 70, 64], 1);
    let (k, v) = (tensor([2, 2, 100, 64], 2), tensor([2, 2, 100, 64], 3));
    let (q, k, v) = (q.view(), k.view(), v.view());
    let each = Tensor::descale(&THREES, [2, 2]).unwrap();
    let one = Tensor::descale(&[0.7], [2, 2]).unwrap();
    for attention in [
        Attention::new().descales(Descales::new().q(&one).v(&each)),
        Attention::new().causal().key_lengths(&[100, 31]).output(DType::F16),
        Attention::new().softcap(3.0).descales(Descales::of([&each, &each, &one])),
    ] {
        for target in [Target::Sm89, Target::Sm90a] {
            let device = Device::sim(SimGpu::new(target).with_sms(4));
            let [o, lse] = errors(&device, &attention, [&q, &k, &v]);
            // A probability is rounded by up to a sixteenth of it, and sums have 14 bits.
            assert!(o < 0.05 && lse < 0.02, "{attention:?} on {target}: off by {o}, lse by {lse}");
        }
    }
}
