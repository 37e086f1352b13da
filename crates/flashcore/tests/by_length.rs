//! Keys of sequences of different lengths, which blocks share evenly by what the GPU finds: on the simulator, against the oracle.
#![cfg(feature = "sim")]

mod shared;

use flashcore::{
    Attention, DType, Device, Starts, TensorBuf,
    plan::{Hardware, Kernel, Launch, Plan, Schedule, Target},
    sim::SimGpu,
};
use flashcore_kernels::sm90::fwd;

use shared::{errors, errors_on, noise};

/// A schedule whose blocks share keys by length.
fn schedule(block_n: u32) -> Schedule {
    let text = format!(
        "sm90_fwd:warpgroups=1,block_n={block_n},stages=3,q_stages=2,ctas=1,split=1,pingpong=0,lazy=1,poly=0,persistent=1,pairs=0,\
         by_length=1"
    );
    text.parse().unwrap()
}

/// So many multiprocessors.
fn gpu(sms: u32, block_n: u32) -> SimGpu {
    SimGpu::new(Target::Sm90a).with_sms(sms).with_schedule(schedule(block_n))
}

fn check(gpu: SimGpu, text: &str, lengths: &[u32]) {
    let (o, lse) = errors_on(gpu, text, Some(lengths));
    assert!(o < 8e-3 && lse < 2e-3, "{text} {lengths:?}: o is off by {o:.1e}, lse by {lse:.1e}");
}

#[test]
fn sequences_of_any_lengths_come_to_what_attention_is() {
    for (text, lengths, sms) in [
        // One long sequence and short ones, without keys and with one.
        ("5x4/2x1/900x64 bf16 key-lengths", vec![0, 7, 900, 1, 0], 6),
        // Shares end where sequences do, and fewer keys than blocks.
        ("3x2/1x1/256x64 f16 key-lengths", vec![256, 128, 256], 5),
        ("2x2/1x1/300x128 bf16 key-lengths", vec![3, 1], 7),
        ("2x1x1/300x64 bf16 key-lengths", vec![0, 0], 3),
        // One block has everything.
        ("3x4/2x1/200x64 bf16 key-lengths", vec![33, 200, 64], 1),
    ] {
        check(gpu(sms, 32), text, &lengths);
    }
    let lengths = [0, 7, 900, 1];
    let (o, lse) = errors("4x4/2x1/900x64 bf16 key-lengths", schedule(32), Some(&lengths));
    assert!(o < 8e-3 && lse < 2e-3, "more blocks than keys: o is off by {o:.1e}, lse by {lse:.1e}");
}

#[test]
fn a_warp_finds_its_part_among_more_sequences_than_it_has_lanes() {
    let uneven = |i: u32| if i % 11 == 3 { 0 } else { i * 37 % 91 + 1 };
    for (sequences, sms) in [(33, 4), (65, 7), (200, 3)] {
        let mut lengths: Vec<u32> = (0..sequences).map(uneven).collect();
        check(gpu(sms, 32), &format!("{sequences}x2/1x1/400x64 bf16 key-lengths"), &lengths);
        // Rounds of 32 without a key, at the beginning, in the middle and at the end.
        lengths.fill(0);
        lengths[sequences as usize / 64 * 32] = 400;
        check(gpu(sms, 32), &format!("{sequences}x2/1x1/400x64 bf16 key-lengths"), &lengths);
    }
}

#[test]
fn several_queries_masks_and_head_dims_come_to_what_attention_is() {
    for (text, block_n) in [
        // Three queries of four heads are 12 rows; of 24 heads they are two tiles, of two queries and of one.
        ("3x8/2x3/500x64 bf16 causal key-lengths", 32),
        ("3x24/1x3/500x64 bf16 causal key-lengths", 16),
        // A tile whose rows see no key of the last key tile.
        ("3x8/1x16/500x64 bf16 causal key-lengths", 16),
        ("3x2x70/500x64 f16 window(inf,3) key-lengths", 32),
        ("3x2x5/500x40/72 f16 softcap=5 key-lengths", 48),
        ("3x8/1x1/500x256 bf16 key-lengths", 16),
        ("3x2/1x1/500x128 bf16 scale=1000000 key-lengths", 64),
    ] {
        check(gpu(5, block_n), text, &[500, 3, 130]);
    }
}

#[test]
fn packed_keys_are_shared_by_their_lengths() {
    let (lens, heads, dim) = ([70_u32, 0, 400, 1, 33], 2, 64);
    let starts: Vec<u32> = (0..=lens.len()).map(|i| lens[..i].iter().sum()).collect();
    let total = starts[lens.len()] as usize;
    let tensor = |seed, shape: [usize; 4]| {
        TensorBuf::from_f32(&noise(shape.iter().product(), seed), shape, DType::BF16).unwrap()
    };
    let q = tensor(1, [lens.len(), 2 * heads, 3, dim]);
    let [k, v] = [2, 3].map(|seed| tensor(seed, [1, heads, total, dim]));
    let attention = Attention::new().causal().with_lse().packed_keys(Starts::new(&starts).unwrap());
    let run = |device: &Device| {
        let out = attention.run(device, &q.view(), &k.view(), &v.view()).unwrap();
        [out.o.to_f32(), out.lse.unwrap().to_f32()].concat()
    };
    let [found, expected] = [run(&Device::sim(gpu(5, 32))), run(&Device::cpu())];
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!(found == expected || (found - expected).abs() < 1e-2, "number {i} is {found} for {expected}");
    }
}

#[test]
fn plans_share_keys_by_length_where_lengths_are_on_the_gpu_and_may_be_long() {
    let plan = |text: &str| Plan::choose(&text.parse().unwrap(), &Hardware::typical(Target::Sm90a)).unwrap();
    let shares = |plan: &Plan| matches!(plan.main().schedule, Schedule::Sm90Fwd(it) if it.by_length);
    for text in [
        "8x32/8x1/32768x128 bf16 key-lengths",
        "256x32/8x1/4096x128 bf16 causal key-lengths page=16/9000 lse",
        "2x8/1x8/2000x256 f16 causal packed-k=2300",
        "8x64/8x8/32768x64 bf16 causal key-lengths",
        "2x128/2x1/8192x128 bf16 key-lengths",
    ] {
        let plan = plan(text);
        assert!(shares(&plan), "{plan}");
        let kernels: Vec<Kernel> = plan.launches.iter().map(Launch::kernel).collect();
        assert_eq!(kernels, [Kernel::Sm90Fwd, Kernel::Combine], "{plan}");
        assert_eq!(plan.main().grid, [132, 1, 1], "{plan}");
        assert!(plan.reason.contains("share evenly"), "{plan}");
        for launch in &plan.launches {
            launch.module(Target::Sm90a).unwrap();
        }
    }
    for text in [
        // Alike, alone, short, with a window, from the first key on, many rows, packed queries, 8 bits.
        "8x32/8x1/32768x128 bf16",
        "8x32/8x1/32768x128 bf16 page=16/20000",
        "1x32/8x1/32768x128 bf16 key-lengths",
        "8x32/8x1/1024x128 bf16 key-lengths",
        "8x32/8x1/32768x128 bf16 window(300,0) key-lengths",
        "8x32/8x4/32768x128 bf16 causal-top-left key-lengths",
        "8x32/8x65/32768x128 bf16 key-lengths",
        "8x32/8x16/32768x128 bf16 causal key-lengths packed-q=40",
        "8x32/8x1/32768x128 f8 key-lengths",
    ] {
        let plan = plan(text);
        assert!(!shares(&plan), "{plan}");
    }
}

#[test]
fn what_cannot_be_shared_by_length_is_refused_with_the_reason() {
    let plan = |text: &str, schedule| {
        Plan::with_schedule(&text.parse().unwrap(), &Hardware::typical(Target::Sm90a), schedule)
    };
    let refused = |text: &str, schedule, why: &str| match plan(text, schedule) {
        Err(error) => assert!(error.to_string().contains(why), "{text}: {error}"),
        Ok(plan) => panic!("{plan}"),
    };
    let decode = "8x32/8x1/4096x128 bf16";
    let lengths = &format!("{decode} key-lengths");
    refused(decode, schedule(32), "by_length=0");
    refused(&format!("{lengths} window(30,0)"), schedule(32), "left bound");
    refused("2x4x9/200x64 f16 causal-top-left key-lengths", schedule(32), "left bound");
    refused("2x4x9/200x64 f16 packed-q=9 key-lengths", schedule(32), "queries are dense");
    refused("2x4x9/200x64 f8 key-lengths", schedule(32), "e4m3");
    refused(&format!("1024x32/8x1/{}x128 bf16 key-lengths", 1 << 28), schedule(32), "2^31");
    let Schedule::Sm90Fwd(one) = schedule(32) else { panic!("not Hopper's") };
    for wrong in [
        fwd::Schedule { persistent: false, ..one },
        fwd::Schedule { persistent: false, parts: 2, ..one },
        fwd::Schedule { warpgroups: 2, ..one },
    ] {
        refused(lengths, Schedule::Sm90Fwd(wrong), "take persistent=1");
    }
    // Room for 132 parts and one per kv head and batch entry, of 4 rows of 128 columns and a state; and where they are.
    let plan = plan(lengths, schedule(32)).unwrap();
    let regions = [(132 + 64) * 4 * 128, (132 + 64) * 4 * 2, 64 * 2].map(|words: usize| 4 * words);
    assert_eq!(
        plan.workspace_bytes(),
        regions.map(|bytes| bytes.next_multiple_of(256)).iter().sum::<usize>()
    );
    let empty = "8x0x1/4096x128 bf16 key-lengths".parse().unwrap();
    let nothing = Plan::choose(&empty, &Hardware::typical(Target::Sm90a));
    assert!(nothing.unwrap().is_empty());
}
