//! 16-bit queries against a cache of 8-bit keys and values: the engines against the oracle.

use flashcore::{Attention, DType, Descales, Device, Error, Problem, Tensor, TensorBuf, oracle};

fn tensor(shape: [usize; 4], seed: usize, dtype: DType) -> TensorBuf {
    let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 20;
    let noise = |i: usize| (word(word(i)) % 4001) as f32 / 1000.0 - 2.0;
    let values: Vec<f32> = (0..shape.iter().product()).map(noise).collect();
    TensorBuf::from_f32(&values, shape, dtype).unwrap()
}

/// The largest error of an output, as a part of the largest output, and that of lse.
fn errors(device: &Device, attention: &Attention<'_>, [q, k, v]: [&Tensor<'_>; 3]) -> [f64; 2] {
    let problem = attention.problem(q, k, v).unwrap();
    let out = attention.with_lse().run(device, q, k, v).unwrap();
    assert_eq!(out.o.dtype(), q.dtype());
    let (lengths, descales) = (attention.host_key_lengths(), attention.given_descales());
    let truth = oracle::descaled(&problem, [q, k, v], lengths, &descales);
    let off = |found: Vec<f32>, truth: &[f64]| {
        let pairs = found.iter().zip(truth).filter(|(found, truth)| f64::from(**found) != **truth);
        pairs.map(|(found, truth)| (f64::from(*found) - truth).abs()).fold(0.0, f64::max)
    };
    let largest = truth.o.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    [off(out.o.to_f32(), &truth.o) / largest, off(out.lse.unwrap().to_f32(), &truth.lse)]
}

/// Every shape and option on a device.
fn check(device: &Device) {
    let shapes = [(4, 1, 300, 64), (1, 5, 41, 80), (8, 1, 1100, 128), (2, 3, 70, 256), (5, 7, 90, 64)];
    for (i, (group, len_q, len_k, dim)) in shapes.into_iter().enumerate() {
        let dtype = if i % 2 == 0 { DType::BF16 } else { DType::F16 };
        let q = tensor([2, 2 * group, len_q, dim], 1, dtype);
        let [k, v] = [2, 3].map(|seed| tensor([2, 2, len_k, dim], seed, DType::F8E4M3));
        let (q, k, v) = (q.view(), k.view(), v.view());
        let of = [3.0, 1.0 / 7.0, 0.5, 1.75];
        let each = Tensor::descale(&of, [2, 2]).unwrap();
        let both = Descales::new().k(&each).v(&each);
        for attention in [
            Attention::new(),
            Attention::new().causal().descales(both),
            Attention::new().key_lengths(&[17, 0]).descales(Descales::new().v(&each)),
            Attention::new().softcap(3.0).descales(both),
        ] {
            let [o, lse] = errors(device, &attention, [&q, &k, &v]);
            assert!(o < 0.006 && lse < 2e-3, "{attention:?}, shape {i}: off by {o}, lse by {lse}");
        }
    }
}

#[test]
fn the_cpu_computes_what_a_cache_stands_for() {
    check(&Device::cpu());
}

#[cfg(feature = "sim")]
#[test]
fn simulated_gpus_compute_what_a_cache_stands_for() {
    use flashcore::{plan::Target, sim::SimGpu};

    for (target, sms) in [4, 20].into_iter().flat_map(|sms| [(Target::Sm89, sms), (Target::Sm90a, sms)]) {
        check(&Device::sim(SimGpu::new(target).with_sms(sms)));
    }
}

#[cfg(feature = "cuda")]
#[test]
fn a_cache_has_its_own_kernel_for_any_number_of_queries() {
    use flashcore::plan::{Hardware, Kernel, Launch, Plan, Target};

    let plan =
        |text: &str, target| Plan::choose(&text.parse::<Problem>().unwrap(), &Hardware::typical(target));
    let text = "1x32/8x1/32768x128 bf16 kv=f8 descales=kv";
    assert_eq!(text.parse::<Problem>().unwrap().to_string(), text);
    let long = plan(text, Target::Sm90a).unwrap();
    let kernels: Vec<Kernel> = long.launches.iter().map(Launch::kernel).collect();
    assert_eq!(kernels, [Kernel::Sm80Decode, Kernel::Combine]);
    // 8 heads of keys on 132 SMs.
    assert_eq!(long.main().grid, [8, 16, 1]);
    let ada = plan(text, Target::Sm89).unwrap();
    let kernels: Vec<Kernel> = ada.launches.iter().map(Launch::kernel).collect();
    assert_eq!(kernels, [Kernel::Sm80Decode, Kernel::Combine]);
    assert_eq!(ada.main().grid, [8, 7, 1]);
    let rows = plan("1x32/8x5/100x128 bf16 kv=f8 causal", Target::Sm89).unwrap();
    assert_eq!(rows.main().grid, [8 * 2, 1, 1], "20 rows in tiles of 16");
    let prompt = plan("2x32/8x1000/3000x128 bf16 kv=f8 causal", Target::Sm90a).unwrap();
    assert_eq!(prompt.launches.len(), 1);
    assert_eq!(prompt.main().grid, [2 * 8 * 250, 1, 1], "4000 rows in tiles of 16");
    assert!(prompt.to_string().contains("rows of the same tiles: 1000 queries, 4000 rows"), "{prompt}");
    // No other kernel takes such keys.
    let hopper = Hardware::typical(Target::Sm90a);
    for (text, kernel) in [(text, Kernel::Scalar), (text, Kernel::Sm80Fwd), (text, Kernel::Sm90Fwd)] {
        let refused = Plan::with_kernel(&text.parse().unwrap(), &hopper, kernel).unwrap_err().to_string();
        assert!(refused.contains("only sm80_decode takes 16-bit queries"), "{refused}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn a_cache_in_pages_is_read_from_ada_on() {
    use flashcore::plan::{Hardware, Kernel, Plan, Target};

    let plan =
        |text: &str, target| Plan::choose(&text.parse::<Problem>().unwrap(), &Hardware::typical(target));
    let text = "8x32/8x1/4096x128 bf16 kv=f8 descales=kv page=16/2048 key-lengths";
    for target in [Target::Sm89, Target::Sm90a] {
        let paged = plan(text, target).unwrap();
        assert_eq!(paged.kernel(), Kernel::Sm80Decode, "{paged}");
        // A step of keys lies in a page.
        assert!(paged.main().schedule.to_string().contains("keys=16"), "{paged}");
        let dense = plan(&text.replace(" page=16/2048", ""), target).unwrap();
        let large = plan(&text.replace("page=16/2048", "page=64/512"), target).unwrap();
        assert_eq!(large.main().schedule, dense.main().schedule);
    }
    for (text, target, why) in [
        (text.to_owned(), Target::Sm80, "sm_89"),
        (text.replace("page=16", "page=24"), Target::Sm90a, "pages of 24 keys"),
        (text.replace("page=16/2048", "packed-q=8 page=24/2048"), Target::Sm89, "pages of 24 keys"),
    ] {
        let Err(Error::Unsupported { what, .. }) = plan(&text, target) else { panic!("{text}") };
        assert!(what.contains(why), "{text}: {what}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn a_cache_may_be_packed_and_so_may_its_queries() {
    use flashcore::plan::{Hardware, Kernel, Plan, Target};

    for target in [Target::Sm89, Target::Sm90a] {
        // Of the tiles that 20 queries of 8 sequences may have, each with 4 heads that share keys: all that are full, and one
        // for each sequence.
        for keys in ["page=16/2048", "packed-k=9000 key-lengths", "apart-k=9000 key-lengths", ""] {
            let text = format!("8x32/8x9/4096x128 bf16 kv=f8 descales=kv causal packed-q=20 {keys}");
            let plan = Plan::choose(&text.parse().unwrap(), &Hardware::typical(target)).unwrap();
            assert_eq!(
                (plan.kernel(), plan.main().grid[0]),
                (Kernel::Sm80Decode, 8 * (80 / 16 + 8)),
                "{plan}"
            );
            plan.main().module(target).unwrap();
        }
    }
    let few = "2x8/2x4/9000x64 f16 kv=f8 causal packed=7/9000";
    let plan = Plan::choose(&few.parse().unwrap(), &Hardware::typical(Target::Sm90a)).unwrap();
    // A row of the workspace, and one block that merges, for each row.
    assert_eq!([plan.main().grid, plan.launches[1].grid], [[2 * 3, 33, 1], [2 * 28, 1, 1]], "{plan}");
    assert_eq!(plan.workspace_bytes(), 33 * 56 * 64 * 4 + (33_usize * 56 * 2 * 4).next_multiple_of(256));
}

#[test]
fn blocks_of_keys_with_descales_of_their_own_have_whole_tiles_or_the_cpu() {
    use flashcore::plan::{Hardware, Plan, Target};

    let on = |text: &str, target| Plan::choose(&text.parse::<Problem>().unwrap(), &Hardware::typical(target));
    let plan = |text: &str| on(text, Target::Sm90a);
    for (text, kernel, tile) in [
        ("1x32/8x1/32768x128 bf16 kv=f8 descales=kv/128", "sm80_decode", "keys=32"),
        ("1x32/8x1/32768x128 bf16 kv=f8 descales=v/48 key-lengths", "sm80_decode", "keys=16"),
        ("1x8x512x64 f8 descales=qkv/128", "sm90_fwd", "block_n=128"),
        ("8x16x2048x128 f8 descales=v/64 causal", "sm90_fwd", "block_n=64"),
        ("8x16x2048x256 f8 descales=k/192 lse", "sm90_fwd", "block_n=64"),
        ("8x16x2048x64 bf16 quantise=smooth,block:96", "sm90_fwd", "block_n=96"),
    ] {
        assert_eq!(text.parse::<Problem>().unwrap().to_string(), text);
        let schedule = plan(text).unwrap().main().schedule.to_string();
        assert!(schedule.starts_with(kernel) && schedule.contains(&format!("{tile},")), "{text}: {schedule}");
        let ada = on(text, Target::Sm89).unwrap().main().schedule.to_string();
        assert!(ada.starts_with("sm80"), "{text}: {ada}");
    }
    for text in [
        "1x32/8x1/32768x128 bf16 kv=f8 descales=kv/40",
        "1x8x512x64 f8 descales=qkv/48",
        "1x8x512x64 bf16 quantise=smooth,block:100",
    ] {
        let refused = plan(text).unwrap_err().to_string();
        assert!(refused.contains("Device::cpu()"), "{text}: {refused}");
    }
    for text in ["1x1x9x64 f8 descales=q/4", "1x1x9x64 f8 descales=kv/0", "1x1x9x64 f16 descales=kv/4"] {
        assert!(matches!(text.parse::<Problem>(), Err(Error::EightBit { .. })), "{text}");
    }
}

#[test]
fn what_goes_with_no_cache_is_refused() {
    for text in [
        "1x4x1/9x64 f32 kv=f8",
        "1x4x1/9x64 f16 kv=bf16",
        "1x4x1/9x64 f16 kv=f8 descales=qkv",
        "1x4x1/9x64 f16 kv=f8 backward",
        "1x4x1/9x64 f16 kv=f8 quantise",
        "1x4x1/9x64 f16 kv=f8 out=bf16",
    ] {
        let refused = text.parse::<Problem>();
        assert!(matches!(refused, Err(Error::EightBit { .. })), "{text}: {refused:?}");
    }
}
