//! Several queries of heads that share keys as the rows of one tile: on the simulator, against the oracle.
#![cfg(feature = "sim")]

mod shared;

use flashcore::{
    Attention, DType, Device, Layout, Problem, Tensor, TensorBuf, oracle,
    plan::{Hardware, Plan, Schedule, Target},
    sim::SimGpu,
};
use flashcore_ptx::{Alu, Arg, Imm, Module, Op};
use shared::{errors, noise};

/// A schedule of the Hopper kernel that differs from small blocks in these knobs.
fn schedule(knobs: &str) -> Schedule {
    let default = [
        ("warpgroups", "1"),
        ("block_n", "32"),
        ("stages", "2"),
        ("q_stages", "1"),
        ("ctas", "1"),
        ("split", "1"),
        ("pingpong", "0"),
        ("lazy", "1"),
        ("poly", "0"),
        ("persistent", "0"),
        ("pairs", "0"),
    ];
    let given: Vec<(&str, &str)> = knobs.split_whitespace().filter_map(|knob| knob.split_once('=')).collect();
    let kept = default.iter().filter(|(knob, _)| given.iter().all(|(other, _)| other != knob));
    let all: Vec<String> = kept.chain(&given).map(|(knob, value)| format!("{knob}={value}")).collect();
    format!("sm90_fwd:{}", all.join(",")).parse().unwrap()
}

/// Whatever blocks do with their keys, alone or together.
const WAYS: [&str; 7] = [
    "",
    "persistent=1 q_stages=2",
    "parts=3",
    "split=2",
    "warpgroups=2 together=1",
    "warpgroups=2 together=1 parts=2",
    "warpgroups=2 pingpong=1",
];

#[test]
fn each_row_sees_the_keys_of_its_query() {
    for (i, text) in [
        "2x8/2x3/130x64 bf16 causal",
        "1x4/1x16/150x64 f16 window(40,5)",
        "1x8/4x5/100x128 bf16 causal-top-left softcap=5",
        "2x4/2x2/97x40/80 f16",
        "1x8/1x1/90x64 bf16 window(30,0)",
        "1x4/2x7/3x64 f16 causal",
    ]
    .into_iter()
    .enumerate()
    {
        for knobs in [WAYS[i], WAYS[(i + 3) % WAYS.len()]] {
            let (o, lse) = errors(text, schedule(knobs), None);
            assert!(o < 8e-3 && lse < 2e-3, "{text} with '{knobs}': o is off by {o:.1e}, lse by {lse:.1e}");
        }
    }
}

#[test]
fn a_tile_ends_with_a_whole_query() {
    // 64 rows hold 9 queries of 7 heads, 12 of 5, 21 of 3, 1 of 40.
    for (text, knobs) in [
        ("1x7/1x10/120x64 bf16 causal", ""),
        ("1x7/1x10/120x64 bf16 causal", "parts=2"),
        ("1x7/1x10/120x64 bf16 causal", "split=4"),
        ("1x10/2x13/70x128 f16 window(20,0)", "warpgroups=2 together=1"),
        ("2x40/1x3/50x64 f16 causal", "persistent=1"),
    ] {
        let (o, lse) = errors(text, schedule(knobs), None);
        assert!(o < 8e-3 && lse < 2e-3, "{text} with '{knobs}': o is off by {o:.1e}, lse by {lse:.1e}");
    }
    let hardware = Hardware::typical(Target::Sm90a);
    let problem: Problem = "1x7/1x10/120x64 bf16 causal".parse().unwrap();
    assert_eq!(Plan::with_schedule(&problem, &hardware, schedule("")).unwrap().main().grid, [2, 1, 1]);
    let refused = Plan::with_schedule(&problem, &hardware, schedule("warpgroups=2")).unwrap_err();
    assert!(refused.to_string().contains("7 heads as rows of several warpgroups"), "{refused}");
}

#[test]
fn key_lengths_are_aligned_with_the_last_query() {
    for (lengths, knobs) in [([0, 2], ""), ([75, 4], "parts=4"), ([33, 100], "warpgroups=2 together=1")] {
        let text = "2x8/2x4/100x64 bf16 causal key-lengths";
        let (o, lse) = errors(text, schedule(knobs), Some(&lengths));
        assert!(o < 8e-3 && lse < 2e-3, "{lengths:?} with '{knobs}': o is off by {o:.1e}, lse by {lse:.1e}");
    }
}

#[test]
fn queries_and_results_may_lie_in_any_order() {
    let problem: Problem = "2x8/2x3/70x64 bf16 causal lse".parse().unwrap();
    let [batch, heads, len, dim] = [2, 8, 3, 64];
    let data: Vec<half::bf16> =
        noise(batch * heads * len * dim, 1).into_iter().map(half::bf16::from_f32).collect();
    let kv = TensorBuf::from_f32(&noise(2 * 2 * 70 * 64, 2), [2, 2, 70, 64], DType::BF16).unwrap();
    // Head by head, query by query, and the batch inside of both.
    for strides in [
        [heads * len * dim, len * dim, dim, 1],
        [heads * len * dim, dim, heads * dim, 1],
        [dim, batch * dim, heads * batch * dim, 1],
    ] {
        let layout = Layout { shape: [batch, heads, len, dim], strides };
        let q = Tensor::strided(&data, layout).unwrap();
        let kv = kv.view();
        let attention = Attention::new().mask(problem.mask).with_lse();
        let device = Device::sim(SimGpu::new(Target::Sm90a).with_schedule(schedule("")));
        let found = attention.run(&device, &q, &kv, &kv).unwrap();
        let truth = oracle::attention(&attention.problem(&q, &kv, &kv).unwrap(), &q, &kv, &kv, None);
        let found = found.o.to_f32();
        let apart = found.iter().zip(&truth.o).map(|(&a, b)| (f64::from(a) - b).abs());
        let most = apart.fold(0.0, f64::max);
        assert!(most < 8e-3, "{strides:?}: o is off by {most:.1e}");
    }
}

#[test]
fn a_limit_taken_from_the_wrong_query_is_found() {
    let problem: Problem = "1x4/1x5/9x64 bf16 causal".parse().unwrap();
    let error = |spoilt: bool| {
        let edit = move |module: &mut Module| {
            for inst in &mut module.kernels[0].body {
                // The number of a row's head taken for that of its query.
                let of_group = inst.src.iter().any(|arg| matches!(arg, Arg::Imm(Imm { bits: 4, .. })));
                if spoilt && of_group && inst.op == Op::Alu(Alu::DivU32) {
                    inst.op = Op::Alu(Alu::RemU32);
                }
            }
        };
        let gpu = SimGpu::new(Target::Sm90a).with_schedule(schedule("")).with_edit(edit);
        let tensor = |heads: usize, len: usize, seed| {
            let shape = [1, heads, len, 64];
            TensorBuf::from_f32(&noise(heads * len * 64, seed), shape, DType::BF16).unwrap()
        };
        let (q, kv) = (tensor(4, 5, 1), tensor(1, 9, 2));
        let (q, kv) = (q.view(), kv.view());
        let attention = Attention::new().mask(problem.mask);
        let found = attention.run(&Device::sim(gpu), &q, &kv, &kv).map(|result| result.o.to_f32());
        let truth = oracle::attention(&attention.problem(&q, &kv, &kv).unwrap(), &q, &kv, &kv, None);
        found.map_or(f64::INFINITY, |found| {
            let apart = found.iter().zip(&truth.o).map(|(&a, b)| (f64::from(a) - b).abs());
            apart.fold(0.0, f64::max)
        })
    };
    let (right, wrong) = (error(false), error(true));
    assert!(right < 8e-3 && wrong > 0.1, "{right:.1e}, {wrong:.1e}");
}
