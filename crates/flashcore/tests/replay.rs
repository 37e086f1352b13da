//! A call that was captured runs on other lengths: the launches of one plan, bound once, over memory whose lengths, starts and
//! tables change in between. On the simulator, and on a GPU where there is one.
#![cfg(feature = "sim")]
#![allow(unsafe_code)] // Key lengths in a GPU's memory are an address.

#[allow(dead_code)] // Only its numbers.
mod shared;

use std::collections::HashMap;

use flashcore::{
    Append, Attention, DType, Descales, Device, DeviceLengths, F8E4M3, Keys, Layout, Name, Pages, Problem,
    Rotary, Starts, TensorBuf,
    cuda::{Cuda, CudaTensor},
    half::bf16,
    plan::{Bindings, Hardware, Kernel, Launch, Map, Packed, Plan, Target},
    signature::Parameter,
};
use flashcore_kernels::ElementType;
use flashcore_ptx::{Module, TensorMap};
use flashcore_sim::{Buffer, Config, LaunchDims, Launching, Sim, Swizzle, TensorElement};
use shared::noise;

/// What the tensors of a call hold, row by row, and its key lengths.
#[derive(Clone, Default)]
struct Values {
    tensors: HashMap<Name, Vec<f32>>,
    lengths: Vec<u32>,
}

impl Values {
    fn tensor(&self, of: &Parameter) -> TensorBuf {
        TensorBuf::from_f32(&self.tensors[&of.name], of.shape, of.dtype).unwrap()
    }

    /// Numbers that look random in every tensor that is read.
    fn draw(problem: &Problem, lengths: &[u32]) -> Self {
        let mut values = Self { lengths: lengths.into(), ..Self::default() };
        for (seed, of) in problem.signature().inputs().enumerate() {
            let mut numbers = noise(of.shape.iter().product(), seed);
            if Name::DESCALES.contains(&of.name) {
                for x in &mut numbers {
                    *x = x.abs() + 0.1;
                }
            }
            values.tensors.insert(of.name, numbers);
        }
        values
    }

    fn with(mut self, name: Name, numbers: impl IntoIterator<Item = u32>) -> Self {
        self.tensors.insert(name, numbers.into_iter().map(|x| x as f32).collect());
        self
    }

    /// Runs the call on the CPU: o, and what the caches hold then.
    fn on_cpu(&self, problem: &Problem) -> HashMap<Name, Vec<f32>> {
        let signature = problem.signature();
        let mut all: HashMap<Name, TensorBuf> =
            signature.inputs().map(|of| (of.name, self.tensor(of))).collect();
        let mut caches = [Name::K, Name::V].map(|name| all.remove(&name).unwrap());
        let view = |name: Name| all.get(&name).map(TensorBuf::view);
        let mut attention = Attention::new().mask(problem.mask);
        if problem.key_lengths {
            attention = attention.key_lengths(&self.lengths);
        }
        let places = [Name::QStarts, Name::KStarts, Name::Pages, Name::NewStarts].map(view);
        let [q_starts, k_starts, pages, new_starts] = places.each_ref().map(Option::as_ref);
        if let Some(starts) = q_starts {
            attention = attention.packed_queries(Starts::of(starts, problem.len_q));
        }
        if let Some(starts) = k_starts {
            let apart = matches!(problem.keys, Keys::Apart { .. });
            let of = if apart { Starts::apart } else { Starts::of };
            attention = attention.packed_keys(of(starts, problem.len_k));
        }
        if let Some(table) = pages {
            attention = attention.paged(Pages::new(table).with_most_keys(problem.len_k));
        }
        let descales = Name::DESCALES.map(view);
        let descales = Descales::some_of(descales.each_ref().map(Option::as_ref));
        attention =
            attention.descales(problem.descale_keys.map_or(descales, |keys| descales.per_block(keys)));
        let q = view(Name::Q).unwrap();
        let [k, v] = &mut caches;
        let out = match problem.append {
            None => attention.run(&Device::cpu(), &q, &k.view(), &v.view()),
            Some(append) => {
                let mut new = Append::new(&view(Name::NewK).unwrap(), &view(Name::NewV).unwrap());
                if let Some(starts) = new_starts {
                    new = new.packed(Starts::of(starts, append.len));
                }
                if let Some(turning) = append.rotary {
                    let rotary = Rotary::new(&view(Name::Cos).unwrap(), &view(Name::Sin).unwrap());
                    new = new.rotary(if turning.interleaved { rotary.interleaved() } else { rotary });
                }
                attention.append(&Device::cpu(), &new, &q, &mut k.view_mut(), &mut v.view_mut())
            }
        };
        let o = out.unwrap().o.to_f32();
        HashMap::from([(Name::O, o), (Name::K, caches[0].to_f32()), (Name::V, caches[1].to_f32())])
    }
}

/// A plan whose launches are bound to memory of a simulated GPU.
struct Captured {
    problem: Problem,
    plan: Plan,
    modules: Vec<Module>,
    sim: Sim,
    buffers: HashMap<Name, Buffer>,
    lengths: Buffer,
    workspace: Buffer,
    params: Packed,
}

fn encode(map: &Map) -> TensorMap {
    assert_eq!(map.dtype, ElementType::Bf16);
    let (dims, strides) = (&map.dims, &map.strides);
    let map = flashcore_sim::TensorMap::new(TensorElement::Bf16, map.address, dims, strides, &map.box_dims);
    TensorMap(map.swizzled(Swizzle::B128).encode().unwrap())
}

#[allow(clippy::match_wildcard_for_single_variants)] // It is one variant for the workbench, and any for others.
fn bytes(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        DType::F8E4M3 => values.iter().map(|&x| F8E4M3::from_f32(x).to_bits()).collect(),
        DType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::I32 => values.iter().flat_map(|&x| (x as i32).to_le_bytes()).collect(),
        other => unreachable!("{other}"),
    }
}

impl Captured {
    fn new(problem: &Problem, target: Target) -> Self {
        let hardware = Hardware { sms: 12, ..Hardware::typical(target) };
        let plan = Plan::choose(problem, &hardware).unwrap();
        let mut sim = Sim::new(Config::default());
        let mut buffers = HashMap::new();
        let mut tensors = Vec::new();
        for of in &problem.signature() {
            let size = of.shape.iter().product::<usize>() * of.dtype.size();
            let buffer = sim.alloc(&of.name.to_string(), size);
            buffers.insert(of.name, buffer);
            tensors.push((of.name, buffer.address, Layout::bhsd(of.shape)));
        }
        let lengths = sim.alloc("key lengths", 4 * problem.batch);
        let workspace = sim.alloc("workspace", plan.workspace_bytes());
        let key_lengths = problem.key_lengths.then_some(lengths.address);
        let bindings = Bindings { key_lengths, workspace: workspace.address, ..Bindings::of(tensors) };
        let params = plan.bind(&bindings, &mut |map| Ok(encode(map))).unwrap();
        let modules = plan.launches.iter().map(|launch| launch.module(target).unwrap()).collect();
        Self { problem: *problem, plan, modules, sim, buffers, lengths, workspace, params }
    }

    /// Puts numbers where the launches read them.
    fn write(&mut self, values: &Values) {
        for of in self.problem.signature().inputs() {
            self.sim.write(self.buffers[&of.name], &bytes(&values.tensors[&of.name], of.dtype));
        }
        let lengths: Vec<u8> = values.lengths.iter().flat_map(|len| len.to_le_bytes()).collect();
        self.sim.write(self.lengths, &lengths);
    }

    /// Runs the launches, with the parameters that they were bound to once.
    fn replay(&mut self) {
        for (index, (launch, module)) in self.plan.launches.iter().zip(&self.modules).enumerate() {
            let dims = LaunchDims {
                grid: launch.grid,
                block: [launch.threads, 1, 1],
                cluster: (launch.cluster > 1).then_some([launch.cluster, 1, 1]),
                dynamic_shared: Some(launch.shared_bytes),
            };
            let beside = index > 0 && launch.schedule.is_programmatic() && self.plan.target == Target::Sm90a;
            let launching = if beside { Launching::Programmatic } else { Launching::StreamOrder };
            let (bytes, _) = self.params.launch(index);
            let report = self.sim.launch_as(module, &module.kernels[0].name, dims, bytes, launching).unwrap();
            assert!(report.is_clean(), "{}: {:?}", self.problem, report.findings.first());
        }
    }

    fn read(&self, name: Name) -> Vec<f32> {
        let bytes = self.sim.read(self.buffers[&name]);
        if self.problem.dtype_kv().is_f8() && [Name::K, Name::V].contains(&name) {
            return bytes.iter().map(|&code| F8E4M3::from_bits(code).to_f32()).collect();
        }
        bytes.chunks_exact(2).map(|two| bf16::from_le_bytes([two[0], two[1]]).to_f32()).collect()
    }

    /// Replays with these numbers, and compares with the CPU.
    fn check(&mut self, values: &Values, what: &str) {
        self.write(values);
        self.replay();
        let expected = values.on_cpu(&self.problem);
        let what = format!("{} on {}, {what}", self.problem, self.plan.target);
        for name in [Name::K, Name::V] {
            assert_eq!(self.read(name), expected[&name], "{what}: {name}");
        }
        let o = self.read(Name::O);
        for (i, (a, b)) in o.iter().zip(&expected[&Name::O]).enumerate() {
            assert!((a - b).abs() < 2e-2, "{what}: o[{i}] is {a} for {b}");
        }
    }
}

fn starts(lens: &[u32]) -> Vec<u32> {
    (0..=lens.len()).map(|n| lens[..n].iter().sum()).collect()
}

const TARGETS: [Target; 2] = [Target::Sm80, Target::Sm90a];

#[test]
fn packed_sequences_of_other_lengths() {
    // As many tokens in all, so that every row of o is some sequence's.
    let problem: Problem = "4x4/2x90x64 bf16 causal packed=200".parse().unwrap();
    for target in TARGETS {
        let mut captured = Captured::new(&problem, target);
        for lens in [[90, 20, 0, 90], [1, 60, 70, 69], [80, 80, 40, 0]] {
            let values = Values::draw(&problem, &[]);
            let values = values.with(Name::QStarts, starts(&lens)).with(Name::KStarts, starts(&lens));
            captured.check(&values, &format!("{lens:?}"));
        }
    }
}

#[test]
fn pages_and_entries_of_other_places_and_lengths() {
    for text in
        ["3x8/2x1/200x64 bf16 page=16/60 key-lengths", "3x8/2x3/200x64 bf16 causal apart-k=700 key-lengths"]
    {
        let problem: Problem = text.parse().unwrap();
        for target in TARGETS {
            let mut captured = Captured::new(&problem, target);
            for (round, lengths) in [[200, 3, 17], [0, 64, 199], [33, 200, 1]].into_iter().enumerate() {
                let values = Values::draw(&problem, &lengths);
                let table = (0..3 * 13).map(|i| (i * 7 + round as u32 * 11) % 60);
                let of_k = [[450, 0, 500, 0], [7, 450, 451, 0], [600, 300, 100, 0]][round];
                let values = values.with(Name::Pages, table).with(Name::KStarts, of_k);
                captured.check(&values, &format!("{lengths:?}"));
            }
        }
    }
}

/// The targets that have E4M3.
const EIGHT: [Target; 2] = [Target::Sm89, Target::Sm90a];

#[test]
fn blocks_share_the_keys_of_sequences_of_other_lengths() {
    for (text, of_k) in [
        ("4x4/2x1/4000x64 bf16 key-lengths", [0; 5]),
        ("4x4/2x2/4000x64 bf16 causal page=64/250 key-lengths", [0; 5]),
        ("4x4/2x1/4000x64 bf16 packed-k=5000", [0, 4000, 4000, 4130, 4132]),
    ] {
        let problem: Problem = text.parse().unwrap();
        let mut captured = Captured::new(&problem, Target::Sm90a);
        for (round, lengths) in
            [[4000, 0, 130, 2], [0, 0, 0, 0], [1, 999, 3000, 1000]].into_iter().enumerate()
        {
            let table = (0..4 * 63).map(|i| (i * 7 + round as u32 * 11) % 250);
            let of_k = if round == 0 { of_k.into() } else { starts(&lengths) };
            let values = Values::draw(&problem, &lengths).with(Name::Pages, table).with(Name::KStarts, of_k);
            captured.check(&values, &format!("{lengths:?}"));
            if round == 0 {
                // 70 key tiles of 128 keys and the starts of six columns: seven for each of eleven blocks. For each kv head of each
                // sequence, the number of its first part and how many it has. The tenth block ends before a first tile.
                let places = [[0, 5], [5, 6], [0, 0], [0, 0], [13, 1], [15, 1], [16, 1], [17, 1]];
                let bytes = captured.sim.read(captured.workspace);
                let words: Vec<u32> =
                    bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
                let found = &words[words.len() - 64..][..16];
                assert_eq!(found, places.as_flattened(), "{text}");
            }
        }
    }
}

#[test]
fn steps_of_decoding_one_behind_the_other() {
    steps(
        &TARGETS,
        &[
            "3x8/2x2/100x64 bf16 causal page=16/24 key-lengths append=2 rotary=32/128",
            "3x4/4x1/100x64 bf16 key-lengths append=1 rotary=64/128/interleaved",
            "3x4/2x7/100x64 bf16 causal packed-q=12 apart-k=420 key-lengths append=7/12 rotary=64/128",
        ],
    );
}

#[test]
fn steps_of_decoding_with_a_cache_of_8_bits() {
    steps(
        &EIGHT,
        &[
            "3x8/2x2/100x64 bf16 kv=f8 descales=kv causal page=16/24 key-lengths append=2 rotary=32/128",
            "3x4/4x1/100x64 bf16 kv=f8 descales=kv/32 key-lengths append=1 rotary=64/128/interleaved",
            "3x4/2x2/100x64 bf16 kv=f8 descales=v causal key-lengths append=7/12 rotary=64/128",
        ],
    );
}

/// Three steps of each problem, each of which finds the caches as the one before has left them.
fn steps(targets: &[Target], problems: &[&str]) {
    for text in problems {
        let problem: Problem = text.parse().unwrap();
        for &target in targets {
            let mut captured = Captured::new(&problem, target);
            let pages = (0..3 * 7).map(|i| (i * 5 + 3) % 24);
            let mut values = Values::draw(&problem, &[5, 60, 15])
                .with(Name::Pages, pages)
                .with(Name::KStarts, [300, 130, 3, 0]);
            for step in 0..3 {
                let new = [[7, 1, 4], [0, 6, 6], [5, 5, 2]][step];
                values = values.with(Name::NewStarts, starts(&new)).with(Name::QStarts, starts(&new));
                captured.check(&values, &format!("step {step}"));
                // The next step finds the caches as this one has left them.
                for name in [Name::K, Name::V] {
                    values.tensors.insert(name, captured.read(name));
                }
                let append = problem.append.unwrap();
                for (b, len) in values.lengths.iter_mut().enumerate() {
                    *len += if append.total.is_some() { new[b] } else { append.len as u32 };
                }
                for name in [Name::Q, Name::NewK, Name::NewV] {
                    let numbers = values.tensors.get_mut(&name).unwrap();
                    numbers.rotate_left(7 + step);
                }
            }
        }
    }
}

#[test]
fn few_queries_whose_keys_blocks_share_of_other_lengths() {
    let text = "3x8/2x3/1100x64 bf16 causal packed-q=6 page=16/210 key-lengths append=3/6 rotary=64/1200";
    let problem: Problem = text.parse().unwrap();
    for target in [Target::Sm80, Target::Sm89] {
        let mut captured = Captured::new(&problem, target);
        let kernels: Vec<Kernel> = captured.plan.launches.iter().map(Launch::kernel).collect();
        assert_eq!(kernels, [Kernel::Append, Kernel::Sm80Decode, Kernel::Combine]);
        for (new, before) in [([3, 3, 0], [1090, 0, 17]), ([0, 3, 3], [5, 1000, 700]), ([2, 1, 3], [0, 0, 1])]
        {
            let values =
                Values::draw(&problem, &before).with(Name::Pages, (0..3 * 69).map(|i| (i * 11 + 5) % 210));
            let values = values.with(Name::NewStarts, starts(&new)).with(Name::QStarts, starts(&new));
            captured.check(&values, &format!("{new:?} behind {before:?}"));
        }
    }
}

#[test]
fn a_captured_step_runs_on_other_lengths_on_a_gpu() {
    let cuda = match Cuda::new(0).and_then(|cuda| cuda.on_new_stream()) {
        Ok(cuda) => cuda,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let problem: Problem = "2x4/2x1/100x64 bf16 causal key-lengths append=1 rotary=64/128".parse().unwrap();
    let mut values = Values::draw(&problem, &[5, 60]);
    let on_gpu: HashMap<Name, CudaTensor> = problem
        .signature()
        .inputs()
        .map(|of| (of.name, cuda.upload(&values.tensor(of).view()).unwrap()))
        .collect();
    let o = cuda.empty(DType::BF16, Layout::bhsd([2, 4, 1, 64])).unwrap();
    let mut lengths = cuda.stream().upload_new(&values.lengths).unwrap();
    // SAFETY: the buffer holds two lengths of at most 100, and outlives the recording.
    let of_gpu = unsafe { DeviceLengths::from_raw_parts(lengths.address() as *const u32, 2, 100, 0) };
    let attention = Attention::new().causal().key_lengths_on_device(of_gpu.unwrap());
    let view = |name: Name| on_gpu[&name].view().unwrap();
    let (new_k, new_v, cos, sin) = (view(Name::NewK), view(Name::NewV), view(Name::Cos), view(Name::Sin));
    let new = Append::new(&new_k, &new_v).rotary(Rotary::new(&cos, &sin));
    let inputs = [Name::Q, Name::K, Name::V].map(|name| &on_gpu[&name]);
    let recording = cuda.record(|calls| calls.append(&attention, &new, inputs, &o)).unwrap();
    for _ in 0..3 {
        cuda.stream().upload(&mut lengths, 0, &values.lengths).unwrap();
        recording.replay().unwrap();
        let expected = values.on_cpu(&problem);
        for (name, of) in [(Name::K, inputs[1]), (Name::V, inputs[2]), (Name::O, &o)] {
            let shape = of.view().unwrap().shape();
            let mut host = TensorBuf::zeros(DType::BF16, Layout::bhsd(shape)).unwrap();
            cuda.download(of, &mut host.view_mut()).unwrap();
            let most = if name == Name::O { 2e-2 } else { 0.0 };
            for (a, b) in host.to_f32().iter().zip(&expected[&name]) {
                assert!((a - b).abs() <= most, "{name} after {:?}: {a} for {b}", values.lengths);
            }
        }
        for name in [Name::K, Name::V] {
            values.tensors.insert(name, expected[&name].clone());
        }
        values.lengths.iter_mut().for_each(|len| *len += 7);
    }
}

/// On a host they are refused. In the memory of a GPU nobody looks at them.
#[test]
fn descales_that_are_no_numbers_above_0_leave_what_the_division_gives() {
    let descales = [0.0, -2.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE / 2.0];
    let problem: Problem = "1x5x1/8x16 bf16 kv=f8 descales=kv key-lengths append=1".parse().unwrap();
    for target in EIGHT {
        let mut captured = Captured::new(&problem, target);
        let mut values = Values::draw(&problem, &[3]);
        for name in [Name::KDescale, Name::VDescale] {
            values.tensors.insert(name, descales.into());
        }
        let numbers = [1.5, -0.25, 0.0, -0.0, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        for name in [Name::NewK, Name::NewV] {
            values.tensors.insert(name, [numbers, numbers.map(|x| -x)].concat().repeat(5));
        }
        captured.write(&values);
        captured.replay();
        for name in [Name::K, Name::V] {
            let codes = captured.sim.read(captured.buffers[&name]);
            for (head, descale) in descales.into_iter().enumerate() {
                for i in 0..16 {
                    let number = bf16::from_f32(values.tensors[&Name::NewK][16 * head + i]).to_f32();
                    let quotient = number / descale;
                    let expected =
                        if quotient.is_nan() { 0x7f } else { F8E4M3::from_f32(quotient).to_bits() };
                    assert_eq!(codes[(8 * head + 3) * 16 + i], expected, "{name}: {number} / {descale}");
                }
            }
        }
    }
}

#[test]
fn what_has_no_room_or_no_page_is_not_written_and_positions_end_with_the_tables() {
    let dense = "2x4/2x1/40x64 bf16 key-lengths append=2 rotary=64/30";
    let paged = "2x4/2x1/40x64 bf16 page=16/8 key-lengths append=2 rotary=64/30";
    for (text, target, expected) in [
        (dense, Target::Sm80, vec![[0, 39], [1, 33], [1, 34]]),
        (dense, Target::Sm90a, vec![[0, 39], [1, 33], [1, 34]]),
        (paged, Target::Sm90a, vec![[2, 7]]),
    ] {
        let problem: Problem = text.parse().unwrap();
        let mut captured = Captured::new(&problem, target);
        // The first sequence has room for one of two new keys; those of the second are in a page that the pool has not.
        let values = Values::draw(&problem, &[39, 33]).with(Name::Pages, [0, 1, 2, 3, 4, 99]);
        captured.write(&values);
        let before = captured.read(Name::K);
        captured.replay();
        let after = captured.read(Name::K);
        let signature = problem.signature();
        let [_, heads, len, width] = signature.inputs().find(|of| of.name == Name::K).unwrap().shape;
        let row = |i: usize| [i / (heads * len), i % len];
        let pairs = before.chunks_exact(width).zip(after.chunks_exact(width));
        let mut changed: Vec<[usize; 2]> =
            pairs.enumerate().filter(|(_, (a, b))| a != b).map(|(i, _)| row(i)).collect();
        changed.sort_unstable();
        changed.dedup();
        assert_eq!(changed, expected, "{text} on {target}");
        // The first new key of the first sequence, by the last cosines and sines.
        let rounded = |name: Name, from: usize, count: usize| -> Vec<f32> {
            values.tensors[&name][from..][..count].iter().map(|&x| bf16::from_f32(x).to_f32()).collect()
        };
        let (cos, sin) = (rounded(Name::Cos, 29 * 32, 32), rounded(Name::Sin, 29 * 32, 32));
        let key = rounded(Name::NewK, 0, 64);
        let [entry, at] = expected[0];
        let found = &after[(entry * heads * len + at) * width..][..width];
        for i in 0..32 {
            let turned = key[i] * cos[i] - key[32 + i] * sin[i];
            assert_eq!(found[i], bf16::from_f32(turned).to_f32(), "{text} on {target}: element {i}");
        }
    }
}
