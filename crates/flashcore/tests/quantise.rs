//! Tensors of 16 bits that become f8 within a call: the launches of a plan on the simulator, against the host's quantiser with
//! the CPU engine, and against attention of the tensors as they were.
#![cfg(feature = "sim")]

use flashcore::{
    Attention, DType, Device, Problem, Quantiser, Tensor, TensorBuf, oracle,
    plan::{Hardware, Kernel, Launch, Plan, Target},
    sim::{AsyncMode, Config, SimGpu},
};

/// Numbers of both signs that look random; some channels are larger than others, and not around 0.
fn tensor(shape: [usize; 4], seed: usize, dtype: DType) -> TensorBuf {
    let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 20;
    let noise = |i: usize| (word(word(i)) % 4001) as f32 / 2000.0 - 1.0;
    let one = |i: usize| {
        let channel = i % shape[3];
        noise(i) * [1.0, 0.3, 2.0][channel % 3] + if channel.is_multiple_of(7) { 1.5 } else { 0.0 }
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(one).collect();
    TensorBuf::from_f32(&values, shape, dtype).unwrap()
}

fn gpu(target: Target, mode: AsyncMode) -> Device {
    let config = Config { async_mode: mode, ..Config::default() };
    Device::sim(SimGpu::new(target).with_sms(4).with_config(config))
}

/// The largest difference of outputs, as a part of the largest output.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    let largest = b.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest
}

#[test]
fn launches_quantise_as_the_host_does() {
    let ways = [
        Quantiser::new(),
        Quantiser::new().smoothed(),
        Quantiser::new().rotated(7),
        Quantiser::new().smoothed().rotated(u32::MAX),
        Quantiser::new().per_block(64),
        Quantiser::new().smoothed().rotated(3).per_block(32),
    ];
    let shapes = [
        // (heads, queries), (kv heads, keys), head dims of keys and values
        ([4, 70], [2, 300], [64, 64], DType::BF16),
        ([2, 9], [2, 33], [32, 48], DType::F16),
        // One query per head: the heads of a group become rows.
        ([6, 1], [2, 100], [128, 128], DType::BF16),
    ];
    for (i, ([heads, len_q], [heads_kv, len_k], [dim, dim_v], dtype)) in shapes.into_iter().enumerate() {
        let q = tensor([2, heads, len_q, dim], 1, dtype);
        let (k, v) =
            (tensor([2, heads_kv, len_k, dim], 2, dtype), tensor([2, heads_kv, len_k, dim_v], 3, dtype));
        let (q, k, v) = (q.view(), k.view(), v.view());
        let lengths = [len_k as u32 - 7, 1];
        for (j, quantiser) in ways.into_iter().enumerate() {
            let attention = match j % 3 {
                0 => Attention::new().causal(),
                1 => Attention::new().key_lengths(&lengths),
                _ => Attention::new().scale(0.2),
            };
            let attention = attention.fp8(quantiser);
            let host = attention.run(&Device::cpu(), &q, &k, &v).unwrap().o;
            assert_eq!(host.dtype(), dtype);
            let target = if (i + j) % 2 == 0 { Target::Sm89 } else { Target::Sm90a };
            let mode = if j < 2 { AsyncMode::Late } else { AsyncMode::Early };
            let found = attention.run(&gpu(target, mode), &q, &k, &v).unwrap().o;
            assert_eq!(found.dtype(), dtype);
            // A probability is rounded to f8 on tensor cores, and not on the host.
            let off = apart(&found.to_f32(), &host.to_f32());
            assert!(off < 0.04, "{quantiser} on {target}, shape {i}: off by {off}");
            let problem = Attention::new().problem(&q, &k, &v).unwrap();
            if j % 3 == 2 {
                let exact = oracle::attention(&problem.with_scale(0.2), &q, &k, &v, None);
                let exact: Vec<f32> = exact.o.iter().map(|&x| x as f32).collect();
                assert!(apart(&found.to_f32(), &exact) < 0.1, "{quantiser}: not what 16 bits give");
            }
        }
    }
}

#[test]
fn values_that_the_quantiser_turns_around_give_the_same_bits() {
    let knobs = "warpgroups=2,block_n=64,stages=2,q_stages=1,ctas=1,split=1,pingpong=0,lazy=0,poly=0,persistent=1,pairs=0";
    let gpu = |rest: &str| {
        let schedule = format!("sm90_fwd:{knobs}{rest}").parse().unwrap();
        SimGpu::new(Target::Sm90a).with_sms(4).with_schedule(schedule)
    };
    let (q, kv) = (tensor([2, 4, 70, 64], 1, DType::BF16), tensor([2, 2, 150, 64], 2, DType::BF16));
    let (q, kv) = (q.view(), kv.view());
    for quantiser in [Quantiser::new().smoothed(), Quantiser::new().per_block(64)] {
        let attention = Attention::new().key_lengths(&[150, 37]).fp8(quantiser);
        let run = |rest: &str| attention.run(&Device::sim(gpu(rest)), &q, &kv, &kv).unwrap().o.to_f32();
        assert!(run("") == run(",turned=1"), "{quantiser}");
        let plan = gpu(",turned=1").plan(&attention.problem(&q, &kv, &kv).unwrap()).unwrap().to_string();
        assert!(plan.contains("pass=cast") && plan.contains("turn=1"), "{plan}");
    }
    // Values of 8 bits lie as they are.
    let eight = "1x2x70x64 f8".parse().unwrap();
    assert!(gpu(",turned=1").plan(&eight).unwrap_err().to_string().contains("take turned=0"));
}

#[test]
fn lse_is_that_of_the_host_and_has_back_what_the_mean_took() {
    let shapes = [
        ([4, 270], [2, 90], 64, DType::BF16),
        ([3, 20], [3, 40], 48, DType::F16),
        ([6, 1], [2, 70], 128, DType::BF16),
    ];
    for (i, ([heads, len_q], [heads_kv, len_k], dim, dtype)) in shapes.into_iter().enumerate() {
        let (q, kv) = (tensor([2, heads, len_q, dim], 5, dtype), tensor([2, heads_kv, len_k, dim], 6, dtype));
        let (q, kv) = (q.view(), kv.view());
        let lengths = [len_k as u32, 0];
        let quantiser = if i == 1 { Quantiser::new() } else { Quantiser::new().rotated(1) };
        for quantiser in [quantiser, quantiser.smoothed(), quantiser.smoothed().per_block(32)] {
            let attention = Attention::new().key_lengths(&lengths).with_lse().fp8(quantiser);
            let of = |device: &Device| attention.run(device, &q, &kv, &kv).unwrap().lse.unwrap().to_f32();
            let host = of(&Device::cpu());
            let target = if i == 1 { Target::Sm89 } else { Target::Sm90a };
            let found = of(&gpu(target, AsyncMode::Late));
            // The rows of the second entry have no keys.
            let rows = heads * len_q;
            assert_eq!(
                (&found[rows..], &host[rows..]),
                (&[f32::NEG_INFINITY; 1].repeat(rows)[..], &found[rows..])
            );
            let off = found.iter().zip(&host).take(rows).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < 0.02, "{quantiser}, shape {i}: off by {off}");
        }
    }
    // With smoothed keys the shift is far larger than what is tolerated above.
    let plan = Plan::choose(
        &"1x2x9x64 bf16 quantise=smooth lse".parse().unwrap(),
        &Hardware::typical(Target::Sm90a),
    );
    assert!(plan.unwrap().launches.last().unwrap().schedule.to_string().contains("pass=shift"));
}

#[test]
fn a_plan_has_the_launches_that_quantise_and_one_workspace() {
    let problem: Problem = "1x16/4x2048x128 bf16 quantise=smooth,rotate:3 causal".parse().unwrap();
    assert_eq!(problem.to_string(), "1x16/4x2048x128 bf16 quantise=smooth,rotate:3 causal");
    let kernels = |problem: &Problem, target| -> Vec<Kernel> {
        let plan = Plan::choose(problem, &Hardware::typical(target)).unwrap();
        plan.launches.iter().map(Launch::kernel).collect()
    };
    let quantize = Kernel::Quantize;
    assert_eq!(kernels(&problem, Target::Sm90a), [quantize, quantize, quantize, Kernel::Sm90Fwd]);
    let plain: Problem = "1x16/4x2048x128 bf16 quantise".parse().unwrap();
    assert_eq!(kernels(&plain, Target::Sm89), [quantize, quantize, Kernel::Sm80Fwd]);
    let plan = Plan::choose(&plain, &Hardware::typical(Target::Sm90a)).unwrap();
    assert_eq!(plan.kernel(), Kernel::Sm90Fwd);
    // The codes; and of more keys, what 132 blocks of 128 queries put aside in f32.
    let stored = (16 + 4 + 4) * 2048 * 128;
    assert!((stored..stored + 4096).contains(&plan.workspace_bytes()), "{plan}");
    let long = Plan::choose(&plain.with_kv(4, 4096), &Hardware::typical(Target::Sm90a)).unwrap();
    let stored = (16 * 2048 + (4 + 4) * 4096) * 128 + 132 * 128 * 128 * 4;
    assert!((stored..stored + 4096).contains(&long.workspace_bytes()), "{long}");
    // The same blocks as for tensors that are f8 already.
    let eight = Plan::choose(&plain.quantised(), &Hardware::typical(Target::Sm90a)).unwrap();
    assert_eq!((plan.main(), &plan.reason), (eight.main(), &eight.reason));
    // Without keys there is nothing to quantise.
    let none: Problem = "1x2x5/0x64 f16 quantise".parse().unwrap();
    assert_eq!(kernels(&none, Target::Sm90a), [Kernel::Sm90Fwd]);
}

#[test]
fn what_cannot_be_quantised_is_refused_with_what_can() {
    for (text, target, said) in [
        ("1x2x64x64 f32 quantise", Target::Sm90a, "f16 and bf16"),
        ("1x2x64x64 f16 quantise", Target::Sm80, "sm_89 or later"),
        ("1x2x64x72 f16 quantise", Target::Sm90a, "multiples of 16"),
    ] {
        let problem: Problem = text.parse().unwrap();
        let refused = Plan::choose(&problem, &Hardware::typical(target)).unwrap_err().to_string();
        assert!(refused.contains(said), "{text}: {refused}");
    }
    for text in [
        "1x2x64x64 f8 quantise",
        "1x2x64x64 f16 quantise backward",
        "1x2x64x64 f16 quantise=smooth softcap=3",
        "1x2x64x96 f16 quantise=rotate:1",
        "1x2x64x64 f16 quantise=turn",
        "1x2x64x64 f16 quantise=",
        "1x2x64x64 f16 quantise=rotate:-1",
        "1x2x64x64 f16 quantise out=f32",
    ] {
        assert!(text.parse::<Problem>().is_err(), "{text}");
    }
}

#[test]
fn a_call_without_keys_gives_zeros() {
    let q = tensor([1, 1, 5, 64], 1, DType::F16);
    let none = Tensor::new(&[] as &[half::f16], &[1, 1, 0, 64]).unwrap();
    let attention = Attention::new().fp8(Quantiser::new());
    for device in [Device::cpu(), gpu(Target::Sm90a, AsyncMode::Late)] {
        let out = attention.run(&device, &q.view(), &none, &none).unwrap();
        assert_eq!(out.o.to_f32(), [0.0; 5 * 64], "{device}");
    }
}
