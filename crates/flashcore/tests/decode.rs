//! The kernel for decoding on packed sequences: on the simulator, against the CPU's own answer to the same call.
#![cfg(feature = "sim")]

mod shared;

use flashcore::{
    Attention, DType, Device, Mask, Starts, Tensor, TensorBuf,
    plan::Target,
    sim::{AsyncMode, Config, SimGpu},
};
use flashcore_ptx::{Module, Op};
use shared::{errors, noise};

/// Rows behind the last sequence, which belong to none.
const SPARE: usize = 5;

/// What an output holds before the call: rows of no sequence keep it.
const LEFT_ALONE: f32 = 77.0;

/// Sequences of so many queries and keys, packed.
#[derive(Clone)]
struct Case {
    sequences: Vec<(usize, usize)>,
    /// Rows before the first one.
    first: usize,
    heads: [usize; 2],
    dims: [usize; 2],
    /// Of queries, and of keys and values.
    dtypes: [DType; 2],
    mask: Mask,
    softcap: f32,
    /// Sequences that are full of NaN. What comes of them does not matter.
    nan: Vec<usize>,
}

impl Case {
    fn new(sequences: &[(usize, usize)], heads: [usize; 2], dim: usize, dtypes: [DType; 2]) -> Self {
        Self {
            sequences: sequences.into(),
            first: 3,
            heads,
            dims: [dim, dim],
            dtypes,
            mask: Mask::Causal,
            softcap: 0.0,
            nan: Vec::new(),
        }
    }

    fn starts(&self, len: impl Fn(&(usize, usize)) -> usize) -> Vec<u32> {
        let mut starts = vec![self.first as u32];
        starts.extend(self.sequences.iter().map(len).scan(self.first, |end, len| {
            *end += len;
            Some(*end as u32)
        }));
        starts
    }

    /// A tensor's numbers; those of no sequence, and of some sequences, are NaN.
    fn tensor(&self, heads: usize, starts: &[u32], dim: usize, seed: usize, dtype: DType) -> TensorBuf {
        let rows = *starts.last().unwrap() as usize + SPARE;
        let mut values = noise(heads * rows * dim, seed);
        for head in values.chunks_exact_mut(rows * dim) {
            for &sequence in &self.nan {
                let [first, end] = [0, 1].map(|i| starts[sequence + i] as usize * dim);
                head[first..end].fill(f32::NAN);
            }
            head[..self.first * dim].fill(f32::NAN);
            head[(rows - SPARE) * dim..].fill(f32::NAN);
        }
        TensorBuf::from_f32(&values, [1, heads, rows, dim], dtype).unwrap()
    }

    /// o and lse on a device.
    fn run(&self, device: &Device) -> [Vec<f32>; 2] {
        self.try_run(device).unwrap_or_else(|error| panic!("{error}"))
    }

    fn try_run(&self, device: &Device) -> flashcore::Result<[Vec<f32>; 2]> {
        let (of_q, of_k) = (self.starts(|it| it.0), self.starts(|it| it.1));
        let ([heads, heads_kv], [dim, dim_v], [dtype, dtype_kv]) = (self.heads, self.dims, self.dtypes);
        let q = self.tensor(heads, &of_q, dim, 1, dtype);
        let k = self.tensor(heads_kv, &of_k, dim, 2, dtype_kv);
        let v = self.tensor(heads_kv, &of_k, dim_v, 3, dtype_kv);
        let attention = Attention::new()
            .mask(self.mask)
            .softcap(self.softcap)
            .packed_queries(Starts::new(&of_q).unwrap())
            .packed_keys(Starts::new(&of_k).unwrap());
        let rows = q.shape()[2];
        let left_alone = |dim: usize, dtype| {
            TensorBuf::from_f32(&vec![LEFT_ALONE; heads * rows * dim], [1, heads, rows, dim], dtype).unwrap()
        };
        let (mut o, mut lse) = (left_alone(dim_v, dtype), left_alone(1, DType::F32));
        let (mut to, mut lse_to) = (o.view_mut(), lse.view_mut());
        attention.run_into(device, &q.view(), &k.view(), &v.view(), &mut to, Some(&mut lse_to))?;
        Ok([o.to_f32(), lse.to_f32()])
    }

    #[track_caller]
    fn check(&self, gpu: &SimGpu, what: &str) {
        let (expected, starts) = (self.run(&Device::cpu()), self.starts(|it| it.0));
        for (async_mode, seed) in [(AsyncMode::Late, 0), (AsyncMode::Early, 7)] {
            let gpu = gpu.clone().with_config(Config { async_mode, seed, ..Config::default() });
            let found = self.run(&Device::sim(gpu));
            let rows = *starts.last().unwrap() as usize + SPARE;
            for (of, dim, most) in [(0, self.dims[1], 1e-2), (1, 1, 2e-3)] {
                let pairs = found[of].chunks_exact(dim).zip(expected[of].chunks_exact(dim));
                for (i, (found, expected)) in pairs.enumerate() {
                    let at = (i % rows) as u32;
                    let sequence = starts.windows(2).position(|ends| (ends[0]..ends[1]).contains(&at));
                    let right = |(a, b): (&f32, &f32)| match sequence {
                        Some(sequence) => self.nan.contains(&sequence) || a == b || (a - b).abs() < most,
                        None => *a == LEFT_ALONE,
                    };
                    let right = found.iter().zip(expected).all(right);
                    assert!(
                        right,
                        "{what}: row {i}, of sequence {sequence:?}: {found:?} is not {expected:?}"
                    );
                }
            }
        }
    }
}

/// Empty sequences, without queries or without keys; single tokens, whole tiles of 16, and one row more; few and many keys.
const UNEVEN: [(usize, usize); 11] =
    [(5, 5), (0, 40), (1, 1), (40, 300), (16, 64), (0, 0), (17, 128), (7, 0), (1, 129), (3, 2), (0, 7)];

/// Blocks with one part of the keys, and with several.
const WAYS: [&str; 3] = [
    "warps=4,keys=32,stages=2,parts=1",
    "warps=2,keys=16,stages=3,parts=3",
    "warps=1,keys=16,stages=2,parts=5",
];

fn gpu(target: Target, knobs: &str) -> SimGpu {
    SimGpu::new(target).with_schedule(format!("sm80_decode:{knobs}").parse().unwrap())
}

/// Types of queries and of keys, and where they are decoded.
const TYPES: [([DType; 2], Target); 6] = [
    ([DType::BF16, DType::F8E4M3], Target::Sm89),
    ([DType::F16, DType::F8E4M3], Target::Sm90a),
    ([DType::BF16, DType::BF16], Target::Sm80),
    ([DType::F16, DType::F8E4M3], Target::Sm89),
    ([DType::F16, DType::F16], Target::Sm89),
    ([DType::BF16, DType::F8E4M3], Target::Sm90a),
];

#[test]
fn packed_queries_see_the_keys_of_their_sequence() {
    // Groups with as many rows as a tile, fewer, more, and such that a query's rows are in two tiles.
    for (i, heads) in [[1, 1], [4, 2], [3, 1], [16, 1], [7, 1], [20, 1]].into_iter().enumerate() {
        let (dtypes, target) = TYPES[i % TYPES.len()];
        let case = Case::new(&UNEVEN, heads, 64, dtypes);
        for (knobs, mask) in [
            (WAYS[i % 3], Mask::Causal),
            (WAYS[(i + 1) % 3], Mask::None),
            (WAYS[(i + 2) % 3], Mask::Window { left: Some(20), right: Some(3) }),
            (WAYS[(i + 1) % 3], Mask::CausalTopLeft),
        ] {
            let case = Case { mask, ..case.clone() };
            case.check(&gpu(target, knobs), &format!("{heads:?} {mask:?} {knobs} on {target}"));
        }
    }
}

#[test]
fn packed_queries_may_have_any_head_dim_and_a_softcap() {
    let all = [[128, 128], [192, 128], [48, 80], [256, 256]];
    for (i, (dtypes, target)) in TYPES.into_iter().enumerate() {
        for dims in [all[i % 4], all[(i + 2) % 4]] {
            let case = Case { dims, softcap: 2.0, ..Case::new(&UNEVEN, [4, 2], 64, dtypes) };
            case.check(&gpu(target, "warps=2,keys=16,stages=2,parts=3"), &format!("{dims:?}"));
        }
    }
}

#[test]
fn what_the_neighbours_of_a_packed_sequence_hold_does_not_matter_to_decoding() {
    for (dtypes, target) in TYPES {
        for (nan, knobs) in [(vec![0, 3, 8], WAYS[0]), (vec![2, 4, 6, 9], WAYS[1])] {
            let case = Case { nan, ..Case::new(&UNEVEN, [4, 2], 64, dtypes) };
            case.check(&gpu(target, knobs), knobs);
        }
    }
}

#[test]
fn there_may_be_any_number_of_rows_before_the_first_sequence() {
    for (first, knobs) in [(20, WAYS[1]), (200, WAYS[0])] {
        for (dtypes, target) in TYPES {
            Case { first, ..Case::new(&UNEVEN, [4, 2], 64, dtypes) }.check(&gpu(target, knobs), knobs);
        }
        let case = Case { first, ..Case::new(&UNEVEN, [4, 2], 64, [DType::F16; 2]) };
        case.check(&SimGpu::new(Target::Sm80), "sm80_fwd");
    }
}

#[test]
fn heads_that_share_keys_of_16_bits_are_rows_of_one_tile() {
    for (i, (text, lengths)) in [
        ("2x8/2x1/300x64 bf16", None),
        ("1x4/1x5/150x64 f16 window(40,5)", None),
        ("1x8/4x3/100x128 bf16 causal-top-left softcap=5", None),
        ("2x4/2x2/97x48/80 f16", None),
        ("1x40/1x2/90x64 bf16 causal", None),
        ("1x4/2x7/3x64 f16 causal", None),
        ("2x2/2x1/70x256 f16 softcap=200", None),
        ("2x8/2x4/100x192/128 bf16 causal key-lengths", Some([75, 0])),
    ]
    .into_iter()
    .enumerate()
    {
        for knobs in [
            "warps=4,keys=16,stages=2,parts=1",
            ["warps=2,keys=16,stages=3,parts=3", "warps=1,keys=16,stages=2,parts=9"][i % 2],
        ] {
            let schedule = format!("sm80_decode:{knobs}").parse().unwrap();
            let (o, lse) = errors(text, schedule, lengths.as_ref().map(|it| &it[..]));
            assert!(o < 8e-3 && lse < 2e-3, "{text} with '{knobs}': o is off by {o:.1e}, lse by {lse:.1e}");
        }
    }
}

#[cfg(feature = "cuda")]
#[test]
fn few_queries_share_many_keys_on_ampere_and_ada_and_plans_say_so() {
    use flashcore::plan::{Hardware, Kernel, Launch, Plan};

    let plan = |text: &str, target| Plan::choose(&text.parse().unwrap(), &Hardware::typical(target)).unwrap();
    for (text, target, grid) in [
        ("1x32/8x1/32768x128 bf16", Target::Sm80, [8, 13, 1]),
        ("1x32/8x1/32768x128 bf16", Target::Sm89, [8, 7, 1]),
        ("1x32/8x5/32768x128 bf16 causal lse", Target::Sm80, [16, 6, 1]),
        ("2x16/2x1/4096x64 f16 page=16/512 key-lengths", Target::Sm89, [4, 14, 1]),
        (
            "4x32/8x3/4096x128 bf16 causal packed-q=9 page=64/256 key-lengths",
            Target::Sm80,
            [8 * (36 / 16 + 4), 3, 1],
        ),
        ("2x8x1/2000x256 bf16 window(900,0)", Target::Sm89, [16, 3, 1]),
    ] {
        let plan = plan(text, target);
        let kernels: Vec<Kernel> = plan.launches.iter().map(Launch::kernel).collect();
        assert_eq!(
            (&kernels[..], plan.main().grid),
            (&[Kernel::Sm80Decode, Kernel::Combine][..], grid),
            "{plan}"
        );
        assert!(plan.reason.contains("blocks share the keys of each"), "{plan}");
    }
    for (text, why) in [
        ("1x32/8x1/500x128 bf16", "few keys"),
        ("16x32/8x1/32768x128 bf16", "tiles enough"),
        ("1x32/8x100/32768x128 bf16", "many queries"),
        ("1x32/8x1/32768x72 bf16", "a head dim that is no multiple of 16"),
        ("1x32/8x1/32768x128 bf16 page=24/2048", "a page that no step divides"),
        ("1x4x1/2000x128 f16 backward", "gradients"),
    ] {
        for target in [Target::Sm80, Target::Sm89] {
            assert_ne!(plan(text, target).kernel(), Kernel::Sm80Decode, "{why}");
        }
    }
    let hopper = plan("1x32/8x1/32768x128 bf16", Target::Sm90a);
    assert_eq!(hopper.kernel(), Kernel::Sm90Fwd, "Hopper has a kernel of its own");
    for target in [Target::Sm80, Target::Sm89] {
        for [dim, dim_v] in (16..=256).step_by(16).flat_map(|dim| [[dim, dim], [dim, 256], [256, dim]]) {
            let plan = plan(&format!("1x8/2x1/9000x{dim}/{dim_v} f16 softcap=30"), target);
            assert_eq!(plan.kernel(), Kernel::Sm80Decode, "{plan}");
        }
    }
}

#[test]
fn keys_of_sequences_may_begin_anywhere() {
    let (of_k, lengths, of_q) = ([130, 3, 60, 0], [70, 300, 0], [0, 2, 3, 9]);
    for (dtypes, target) in TYPES {
        let tensor = |heads: usize, rows: usize, seed, dtype| {
            TensorBuf::from_f32(&noise(heads * rows * 64, seed), [1, heads, rows, 64], dtype).unwrap()
        };
        let q = tensor(4, 9, 1, dtypes[0]);
        let [k, v] = [2, 3].map(|seed| tensor(2, 310, seed, dtypes[1]));
        let indices = Tensor::indices(&of_k, [1, 4]).unwrap();
        let attention = Attention::new().causal().packed_queries(Starts::new(&of_q).unwrap());
        let attention = attention.packed_keys(Starts::apart(&indices, 300)).key_lengths(&lengths);
        let run =
            |device: &Device| attention.run(device, &q.view(), &k.view(), &v.view()).unwrap().o.to_f32();
        let expected = run(&Device::cpu());
        for knobs in WAYS {
            let found = run(&Device::sim(gpu(target, knobs)));
            let apart = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-2, "{knobs} on {target}: off by {apart}");
        }
    }
}

#[test]
fn a_merge_of_rows_that_are_nobodys_is_found() {
    let case = Case::new(&UNEVEN, [4, 2], 64, [DType::BF16, DType::F8E4M3]);
    let edit = |module: &mut Module| {
        for kernel in module.kernels.iter_mut().filter(|kernel| &*kernel.name == "flashcore_combine") {
            kernel.body.retain(|inst| inst.op != Op::Exit);
        }
    };
    let gpu = gpu(Target::Sm89, WAYS[1]);
    assert!(case.try_run(&Device::sim(gpu.clone())).is_ok());
    assert!(case.try_run(&Device::sim(gpu.with_edit(edit))).is_err());
}

#[test]
fn without_a_sequence_or_a_query_nothing_is_written() {
    for (dtypes, target) in TYPES {
        for sequences in [vec![], vec![(0, 5), (0, 0)]] {
            for knobs in [WAYS[0], WAYS[1]] {
                Case::new(&sequences, [4, 2], 64, dtypes).check(&gpu(target, knobs), knobs);
            }
        }
    }
}
