//! Gradients of packed sequences by GPU kernels: on the simulator, against the CPU's.
#![cfg(feature = "sim")]

#[allow(dead_code)] // Only its numbers.
mod shared;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use flashcore::{
    Attention, Backward, DType, Device, Mask, Starts, TensorBuf,
    plan::{Kernel, Schedule, Target},
    sim::{AsyncMode, Config, SimGpu},
};
use flashcore_ptx::{Arg, Cmp, Inst, Kernel as KernelText, MemBase, Module, NumType, Op, Space};
use shared::noise;

/// Rows that belong to no sequence, before the first and behind the last.
const SPARE: [usize; 2] = [3, 70];

/// What no gradient is.
const LEFT_ALONE: f32 = 1.0e3;

/// A call: sequences of so many queries and keys.
#[derive(Clone)]
struct Case {
    sequences: Vec<(usize, usize)>,
    heads: [usize; 2],
    dims: [usize; 2],
    mask: Mask,
    softcap: f32,
    dtype: DType,
    /// Sequences whose numbers are NaN. What comes of these does not matter.
    nan: Vec<usize>,
}

impl Case {
    fn new(sequences: &[(usize, usize)], heads: [usize; 2], dim: usize) -> Self {
        let (mask, dtype) = (Mask::Causal, DType::F16);
        Self {
            sequences: sequences.to_vec(),
            heads,
            dims: [dim; 2],
            mask,
            softcap: 0.0,
            dtype,
            nan: Vec::new(),
        }
    }

    /// Where sequences begin, of queries or of keys.
    fn starts(&self, len: fn(&(usize, usize)) -> usize) -> Vec<u32> {
        let mut at = SPARE[0];
        let mut starts = vec![at as u32];
        starts.extend(self.sequences.iter().map(|sequence| {
            at += len(sequence);
            at as u32
        }));
        starts
    }

    /// A tensor's numbers; those of some sequences are NaN.
    fn tensor(&self, heads: usize, starts: &[u32], dim: usize, seed: usize) -> TensorBuf {
        let rows = *starts.last().unwrap() as usize + SPARE[1];
        let mut values = noise(heads * rows * dim, seed);
        for head in values.chunks_exact_mut(rows * dim) {
            for &sequence in &self.nan {
                let [first, end] = [0, 1].map(|i| starts[sequence + i] as usize * dim);
                head[first..end].fill(f32::NAN);
            }
            head[..SPARE[0] * dim].fill(f32::NAN);
            head[(rows - SPARE[1]) * dim..].fill(f32::NAN);
        }
        TensorBuf::from_f32(&values, [1, heads, rows, dim], self.dtype).unwrap()
    }

    /// dq, dk and dv on a device.
    fn run(&self, device: &Device) -> Result<[Vec<f32>; 3], String> {
        let (of_q, of_k) = (self.starts(|it| it.0), self.starts(|it| it.1));
        let ([heads, heads_kv], [dim, dim_v]) = (self.heads, self.dims);
        let q = self.tensor(heads, &of_q, dim, 1);
        let (k, v) = (self.tensor(heads_kv, &of_k, dim, 2), self.tensor(heads_kv, &of_k, dim_v, 3));
        let (d_o, dlse) = (self.tensor(heads, &of_q, dim_v, 4), {
            let rows = q.shape()[2];
            TensorBuf::from_f32(&noise(heads * rows, 5), [1, heads, rows, 1], DType::F32).unwrap()
        });
        let attention = Attention::new()
            .mask(self.mask)
            .softcap(self.softcap)
            .packed_queries(Starts::new(&of_q).unwrap())
            .packed_keys(Starts::new(&of_k).unwrap());
        let out = attention.with_lse().run(&Device::cpu(), &q.view(), &k.view(), &v.view()).unwrap();
        let (o, lse) = (out.o, out.lse.unwrap());
        let views = [q.view(), k.view(), v.view()];
        let given = Backward::new(views.each_ref(), &o.view(), &lse.view(), &d_o.view());
        let given = given.with_dlse(&dlse.view());
        let mut found = [&q, &k, &v].map(|of| {
            let values = vec![LEFT_ALONE; of.shape().iter().product()];
            TensorBuf::from_f32(&values, of.shape(), self.dtype).unwrap()
        });
        let [dq, dk, dv] = &mut found;
        attention
            .backward_into(device, &given, &mut dq.view_mut(), &mut dk.view_mut(), &mut dv.view_mut())
            .map_err(|error| error.to_string())?;
        Ok(found.map(|gradient| gradient.to_f32()))
    }

    /// The rows of a gradient that are of sequences without NaN, and those of none: each with whether it is of one.
    fn rows<'a>(&self, which: usize, gradient: &'a [f32]) -> Vec<(bool, &'a [f32])> {
        let starts = if which == 0 { self.starts(|it| it.0) } else { self.starts(|it| it.1) };
        let dim = self.dims[usize::from(which == 2)];
        let len = *starts.last().unwrap() as usize + SPARE[1];
        let mut rows = Vec::new();
        for (i, row) in gradient.chunks_exact(dim).enumerate() {
            let at = (i % len) as u32;
            let sequence = starts.windows(2).position(|ends| (ends[0]..ends[1]).contains(&at));
            if sequence.is_none_or(|sequence| !self.nan.contains(&sequence)) {
                rows.push((sequence.is_some(), row));
            }
        }
        rows
    }

    /// Whether a device's gradients are those of the CPU, and it has left alone what is no sequence's.
    fn wrong(&self, device: &Device) -> Option<String> {
        let expected = self.run(&Device::cpu()).unwrap();
        let found = match self.run(device) {
            Ok(found) => found,
            Err(error) => return Some(error),
        };
        for (which, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
            let expected = self.rows(which, &expected[which]);
            let most = expected.iter().filter(|row| row.0).flat_map(|row| row.1);
            let most = most.fold(1e-3_f32, |most, x| most.max(x.abs()));
            for (at, (found, expected)) in self.rows(which, &found[which]).iter().zip(&expected).enumerate() {
                if !found.0 {
                    if found.1.iter().any(|&x| x != LEFT_ALONE) {
                        return Some(format!("{name}: row {at} is no sequence's"));
                    }
                    continue;
                }
                let off = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-2 * most || a.is_nan();
                if found.1.iter().zip(expected.1).any(off) {
                    return Some(format!("{name}: row {at} is wrong"));
                }
            }
        }
        None
    }
}

/// Empty sequences, sequences of one, whole tiles and one row more, and one far longer than the others.
const UNEVEN: [(usize, usize); 9] =
    [(5, 5), (0, 40), (1, 1), (130, 300), (64, 64), (0, 0), (65, 128), (7, 0), (128, 129)];

/// What the planner chooses for every target, and Hopper's kernels with all that may be otherwise.
fn engines(case: &Case) -> Vec<(String, SimGpu)> {
    let planned = [Target::Sm80, Target::Sm89, Target::Sm90a];
    let planned = planned.into_iter().map(|target| (target.to_string(), SimGpu::new(target)));
    let [narrow, wide] = [64, 128].map(|most| case.dims.iter().all(|&dim| dim <= most));
    let full = case.mask == Mask::None;
    let schedules = [
        (wide, "sm90_bwd:block_m=64,stages=2,pingpong=1"),
        (wide && full, "sm90_bwd:block_m=64,stages=3,pingpong=0,rotate=1"),
        (narrow, "sm90_bwd:block_m=128,stages=2,pingpong=1"),
        (true, "sm90_bwd_wide:stages=2,pingpong=0"),
    ];
    let schedules = schedules.into_iter().filter(|(fits, _)| *fits).map(|(_, text)| {
        let schedule = text.parse().unwrap();
        (text.to_string(), SimGpu::new(Target::Sm90a).with_schedule(schedule))
    });
    planned.chain(schedules).collect()
}

#[track_caller]
fn check(case: &Case) {
    for (name, gpu) in engines(case) {
        for (async_mode, seed) in [(AsyncMode::Late, 0), (AsyncMode::Early, 7)] {
            let gpu = gpu.clone().with_config(Config { async_mode, seed, ..Config::default() });
            assert_eq!(case.wrong(&Device::sim(gpu)), None, "{name}, {async_mode:?}");
        }
    }
}

#[test]
fn packed_gradients_are_those_of_each_sequence() {
    check(&Case::new(&UNEVEN, [4, 2], 64));
    check(&Case { mask: Mask::None, ..Case::new(&UNEVEN, [1, 1], 128) });
    let window = Mask::Window { left: Some(40), right: Some(7) };
    check(&Case { mask: window, dtype: DType::BF16, dims: [72, 40], ..Case::new(&UNEVEN, [3, 1], 72) });
    check(&Case { softcap: 2.0, ..Case::new(&UNEVEN[3..], [2, 2], 64) });
    check(&Case::new(&UNEVEN, [2, 1], 192));
}

#[test]
fn what_the_neighbours_of_a_sequence_hold_does_not_matter_to_its_gradients() {
    for dim in [64, 128, 256] {
        for mask in [Mask::Causal, Mask::None] {
            let case = Case::new(&[(70, 70), (30, 50), (64, 64), (100, 101), (9, 9)], [2, 1], dim);
            check(&Case { nan: vec![0, 2, 4], mask, ..case });
        }
    }
}

#[test]
fn packed_sequences_of_which_none_has_queries_or_keys() {
    check(&Case::new(&[(0, 70), (0, 3)], [2, 1], 64));
    check(&Case::new(&[(70, 0), (3, 0)], [2, 1], 64));
    check(&Case::new(&[(0, 0), (0, 0)], [2, 1], 192));
    check(&Case::new(&[], [2, 1], 64));
}

#[test]
fn many_short_sequences_find_their_tiles() {
    let many: Vec<_> = (0..75).map(|i| (i * 7 % 11, i * 5 % 23)).collect();
    check(&Case::new(&many, [1, 1], 16));
}

/// The kernels of gradients, with a schedule that has each.
const KERNELS: [(&str, &str); 5] = [
    ("flashcore_sm80_bwd_dkdv", "sm80_bwd:of=dkdv,block=64,walk=32,warps=4,stages=1,order=longest"),
    ("flashcore_sm80_bwd_dq", "sm80_bwd:of=dq,block=64,walk=32,warps=4,stages=1,order=longest"),
    ("flashcore_sm90_bwd", "sm90_bwd:block_m=64,stages=2,pingpong=1"),
    ("flashcore_sm90_bwd_finish", "sm90_bwd:block_m=64,stages=2,pingpong=1"),
    ("flashcore_sm90_bwd_wide", "sm90_bwd_wide:stages=2,pingpong=1"),
];

/// What is wrong with a case when instructions of a kernel are altered: the first time, the second, and so on. `alter` says
/// whether it has altered one.
#[track_caller]
fn found(
    case: &Case,
    (kernel, schedule): (&'static str, &str),
    alter: impl Fn(&KernelText, &mut Inst) -> bool + Copy + Send + Sync + 'static,
) {
    let schedule: Schedule = schedule.parse().unwrap();
    let target = if schedule.kernel() == Kernel::Sm80Bwd { Target::Sm80 } else { Target::Sm90a };
    let gpu = SimGpu::new(target).with_schedule(schedule);
    assert_eq!(case.wrong(&Device::sim(gpu.clone())), None);
    for place in 0.. {
        let altered = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&altered);
        let edit = move |module: &mut Module| {
            let text = module.kernels[0].clone();
            if text.name != kernel {
                return;
            }
            for inst in &mut module.kernels[0].body {
                let mut other = inst.clone();
                if alter(&text, &mut other) && count.fetch_add(1, Ordering::Relaxed) == place {
                    *inst = other;
                }
            }
        };
        let config = Config { budget: 3_000_000, ..Config::default() };
        let wrong = case.wrong(&Device::sim(gpu.clone().with_config(config).with_edit(edit)));
        if altered.load(Ordering::Relaxed) <= place {
            assert!(place > 0, "{kernel} has nothing to alter");
            return;
        }
        assert!(wrong.is_some(), "{kernel}: alteration {place} is not found");
    }
}

fn names(text: &KernelText, inst: &Inst, parameter: &str) -> bool {
    let of = |&param: &u32| text.params[param as usize].name == parameter;
    matches!(inst.src.first(), Some(Arg::Mem { base: MemBase::Param(param), .. }) if of(param))
}

#[test]
fn starts_of_others_are_found() {
    let case = Case::new(&[(70, 130), (100, 40), (30, 90)], [2, 1], 64);
    for (kernel, schedule) in KERNELS {
        found(&case, (kernel, schedule), |text, inst| {
            let is_of_q = names(text, inst, "q_starts");
            if !is_of_q && !names(text, inst, "k_starts") {
                return false;
            }
            let other = if is_of_q { "k_starts" } else { "q_starts" };
            let place = text.params.iter().position(|param| param.name == other).unwrap();
            inst.src[0] = Arg::Mem { base: MemBase::Param(place as u32), offset: 0 };
            true
        });
    }
}

#[test]
fn a_tile_that_writes_into_the_next_sequence_is_found() {
    let case = Case::new(&[(70, 70), (100, 100), (30, 30)], [1, 1], 64);
    for (kernel, schedule) in KERNELS {
        found(&case, (kernel, schedule), |_, inst| match inst.op {
            // Rows that are stored where they exist.
            Op::St { space: Space::Global, .. } if inst.guard.is_some() => {
                inst.guard = None;
                true
            }
            // Rows of which there are 64, or not.
            Op::Setp { cmp: Cmp::Ge, ty: NumType::S32 } => match &mut inst.src[1] {
                Arg::Imm(imm) if imm.bits == 64 => {
                    imm.bits = u64::from(i32::MIN as u32);
                    true
                }
                _ => false,
            },
            _ => false,
        });
    }
}
