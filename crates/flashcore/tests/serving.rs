//! What plans make of packed sequences and of keys in pages: on the simulator, against the same call on dense tensors.
#![cfg(feature = "sim")]

#[allow(dead_code)] // Only its numbers.
mod shared;

use flashcore::{
    Attention, DType, Device, Error, Pages, Problem, Starts, Tensor, TensorBuf,
    plan::{Hardware, Kernel, Plan, Target},
    sim::SimGpu,
};
use shared::noise;

fn tensor(values: &[f32], shape: [usize; 4], dtype: DType) -> TensorBuf {
    TensorBuf::from_f32(values, shape, dtype).unwrap()
}

fn gpu(target: Target) -> Device {
    Device::sim(SimGpu::new(target).with_sms(12))
}

#[test]
fn keys_in_pages_give_the_bits_of_dense_keys() {
    // A head with so many keys that they are cut into parts on Hopper, and heads that are not worth it.
    let hopper = ([16, 64, 256], Target::Sm90a);
    let (many, few) = ((4, 1, 2500, [2500, 2049]), (8, 4, 200, [200, 3]));
    for ((pages, target), (heads, heads_kv, len, lengths)) in
        [(hopper, many), (hopper, few), (([16, 64, 24], Target::Sm80), few)]
    {
        let dim = 64;
        let q = tensor(&noise(2 * heads * dim, 1), [2, heads, 1, dim], DType::BF16);
        let [k, v] = [2, 3].map(|seed| noise(2 * heads_kv * len * dim, seed));
        let dense = |values: &[f32]| tensor(values, [2, heads_kv, len, dim], DType::BF16);
        let attention = Attention::new().with_lse().key_lengths(&lengths);
        let device = gpu(target);
        let expected = attention.run(&device, &q.view(), &dense(&k).view(), &dense(&v).view()).unwrap();
        for page in pages {
            let per_sequence = len.div_ceil(page);
            let pool = 2 * per_sequence + 1;
            // The pages of a sequence lie backwards, the two sequences' in turn.
            let place = |batch: usize, index: usize| pool - 1 - 2 * index - batch;
            let table: Vec<u32> =
                (0..2).flat_map(|b| (0..per_sequence).map(move |i| place(b, i) as u32)).collect();
            let paged = |values: &[f32]| {
                let mut all = vec![f32::NAN; pool * heads_kv * page * dim];
                for (row, values) in values.chunks_exact(dim).enumerate() {
                    let (batch, head, key) = (row / len / heads_kv, row / len % heads_kv, row % len);
                    let at = (place(batch, key / page) * heads_kv + head) * page + key % page;
                    all[at * dim..][..dim].copy_from_slice(values);
                }
                tensor(&all, [pool, heads_kv, page, dim], DType::BF16)
            };
            let indices = Tensor::indices(&table, [2, per_sequence]).unwrap();
            let attention = attention.paged(Pages::new(&indices).with_most_keys(len));
            let found = attention.run(&device, &q.view(), &paged(&k).view(), &paged(&v).view()).unwrap();
            assert_eq!(found.o.to_f32(), expected.o.to_f32(), "{len} keys in pages of {page}");
            assert_eq!(found.lse.unwrap().to_f32(), expected.lse.as_ref().unwrap().to_f32());
        }
    }
}

#[test]
fn packed_sequences_come_to_what_each_does_alone() {
    let lens = [70, 0, 200, 1, 33];
    let starts: Vec<u32> = (0..=lens.len()).map(|i| lens[..i].iter().sum::<usize>() as u32).collect();
    let (heads, heads_kv, dim, total) = (4, 2, 64, 304);
    let [q, k, v] =
        [(heads, 1), (heads_kv, 2), (heads_kv, 3)].map(|(heads, seed)| noise(heads * total * dim, seed));
    let attention = Attention::new().causal();
    for (dtype, most, target) in [
        (DType::BF16, 2e-2, Target::Sm90a),
        (DType::F8E4M3, 8e-2, Target::Sm90a),
        (DType::BF16, 2e-2, Target::Sm80),
        (DType::F8E4M3, 8e-2, Target::Sm89),
    ] {
        let part = |values: &[f32], heads: usize, from: usize, len: usize| {
            let rows = (0..heads).flat_map(|head| &values[(head * total + from) * dim..][..len * dim]);
            tensor(&rows.copied().collect::<Vec<f32>>(), [1, heads, len, dim], dtype)
        };
        let run = |attention: &Attention<'_>, device: &Device, from: usize, len: usize| {
            let (q, k, v) =
                (part(&q, heads, from, len), part(&k, heads_kv, from, len), part(&v, heads_kv, from, len));
            attention.run(device, &q.view(), &k.view(), &v.view()).unwrap().o.to_f32()
        };
        let all = run(&attention.packed(Starts::new(&starts).unwrap()), &gpu(target), 0, total);
        for (sequence, len) in lens.into_iter().enumerate().filter(|(_, len)| *len > 0) {
            let from = starts[sequence] as usize;
            let alone = run(&attention, &Device::cpu(), from, len);
            for (row, expected) in alone.chunks_exact(dim).enumerate() {
                let found = &all[((row / len) * total + from + row % len) * dim..][..dim];
                for (found, expected) in found.iter().zip(expected) {
                    let right = (found - expected).abs() < most;
                    assert!(
                        right,
                        "{dtype} on {target}, sequence {sequence}, row {row}: {found} is not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn packed_and_paged_problems_have_plans_on_every_gpu_or_a_reason() {
    let plan =
        |text: &str, target| Plan::choose(&text.parse::<Problem>().unwrap(), &Hardware::typical(target));
    for (text, most_blocks) in [
        ("16x32/8x4096x128 bf16 causal packed=18632", 132),
        ("300x8x40x64 f16 packed=3000", 264),
        ("4x8x100x256 bf16 causal lse packed-q=250 page=16/99", 132),
        ("3x4x70x192/128 bf16 window(30,0) softcap=20 packed=90/200 key-lengths", 132),
        ("2x16/4x3000x128 f8 causal packed=4000", 132),
    ] {
        let plan = plan(text, Target::Sm90a).unwrap();
        assert_eq!(plan.kernel(), Kernel::Sm90Fwd, "{plan}");
        assert!(plan.main().grid[0] <= most_blocks, "{plan}");
        plan.main().module(Target::Sm90a).unwrap();
    }
    // Places for tiles of 128 queries, or of 64 where sequences are short: as many as are full in all, and one per sequence.
    for (text, target, grid) in [
        ("16x32/8x4096x128 bf16 causal packed=18632", Target::Sm80, [145 + 16, 32, 1]),
        ("300x8x40x64 f16 packed=3000", Target::Sm89, [46 + 300, 8, 1]),
        ("16x32/8x4096x128 f8 causal packed=18632", Target::Sm89, [145 + 16, 32, 1]),
        ("4x8x100x256 bf16 causal lse packed-q=250 page=24/99", Target::Sm90a, [3 + 4, 8, 1]),
        ("300x8x40x64 f16 packed=0", Target::Sm80, [0, 8, 1]),
    ] {
        let plan = plan(text, target).unwrap();
        assert_eq!(plan.kernel(), Kernel::Sm80Fwd, "{plan}");
        assert_eq!(plan.main().grid, grid, "{plan}");
        plan.main().module(target).unwrap();
    }
    let paged = "8x32/8x1/4096x128 bf16 key-lengths page=16/2048";
    let dense = "8x32/8x1/4096x128 bf16 key-lengths";
    for target in [Target::Sm80, Target::Sm90a] {
        let [paged, dense] = [paged, dense].map(|text| plan(text, target).unwrap());
        assert_eq!(paged.main().schedule, dense.main().schedule);
    }
    let odd = plan("8x32/8x1/4096x128 bf16 page=24/2048", Target::Sm90a).unwrap();
    assert!(odd.reason.contains("pages of 24 keys"), "{odd}");
    for (text, target, why) in [
        ("3x2x70x64 f32 packed=90", Target::Sm90a, "f32"),
        ("3x2x70x60 f16 packed=90", Target::Sm80, "head_dim 60"),
        ("3x2x70x60 f16 packed=90 backward", Target::Sm90a, "head_dim 60"),
        ("3x2x70x64 f8 packed=90", Target::Sm80, "e4m3"),
    ] {
        match plan(text, target) {
            Err(Error::Unsupported { what, .. }) => assert!(what.contains(why), "{text}: {what}"),
            other => panic!("{text}: {other:?}"),
        }
    }
}
