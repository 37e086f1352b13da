//! Stress: the same calls from many threads on several streams, replayed from graphs, and repeated many times must give
//! the same bits every time.

use std::sync::atomic::{AtomicUsize, Ordering};

use flashcore::cuda::driver::{
    DeviceBuffer, DriverError, Function, JitOptions, LaunchConfig, Module, ParamBuffer,
};
use flashcore::cuda::{Cuda, CudaTensor};
use flashcore::{Attention, Backward, DType, Device, Layout, Mask, Name, Pass, Problem, Storage, TensorBuf};
use serde::Serialize;

use flashcore_judge::guarded::Arrangement;
use flashcore_judge::inputs::Distribution;
use flashcore_judge::operands::Operands;
use flashcore_judge::rule::Judgement;

/// How much stress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Threads that call concurrently.
    pub threads: usize,
    /// Streams that they share.
    pub streams: usize,
    /// Calls of all threads together.
    pub calls: usize,
    /// Replays per recorded call.
    pub replays: usize,
    /// Back-to-back runs per problem.
    pub repeats: usize,
}

impl Default for Plan {
    fn default() -> Self {
        Self { threads: 8, streams: 4, calls: 1000, replays: 100, repeats: 10_000 }
    }
}

/// What one problem went through.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// The problem.
    pub problem: String,
    /// The kernel's schedule.
    pub schedule: String,
    /// The rule's judgement of the first run.
    pub judgement: Judgement,
    /// Calls from several threads, and how many of them gave other bits.
    pub threaded: Count,
    /// Replays, and how many of them gave other bits.
    pub replayed: Count,
    /// Runs in a row, and how many of them gave other bits.
    pub repeated: Count,
}

/// Runs, and those that differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    /// How many ran.
    pub runs: usize,
    /// How many gave other bits than the first run of all.
    pub different: usize,
}

impl Record {
    /// Whether everything held.
    pub fn passed(&self) -> bool {
        let counts = [self.threaded, self.replayed, self.repeated];
        self.judgement.passed() && counts.iter().all(|count| count.runs > 0 && count.different == 0)
    }
}

/// A problem, and the key lengths that it has.
type Given = (Problem, Option<Vec<u32>>);

/// The problems of some passes, one pass after the other.
fn problems(passes: &[Pass]) -> Vec<Given> {
    let of = |pass: &Pass| match pass {
        Pass::Forward => forward(),
        Pass::Backward => backward(),
    };
    passes.iter().flat_map(of).collect()
}

/// Backward passes: every kernel of gradients, with and without turns that blocks wait for, and where what they add up meets in
/// the most tiles.
fn backward() -> Vec<Given> {
    use DType::{BF16, F16};
    let problem = Problem::new;
    let capped = problem(1, 4, 300, 192, BF16).with_head_dim_v(128).with_softcap(20.0);
    let problems = [
        problem(1, 8, 512, 64, F16),
        problem(2, 4, 1000, 64, BF16).with_mask(Mask::Causal),
        problem(1, 4, 1024, 128, F16),
        problem(1, 8, 700, 128, BF16).with_kv(2, 700).with_mask(Mask::Causal),
        problem(2, 6, 333, 96, F16)
            .with_kv(3, 517)
            .with_mask(Mask::Window { left: Some(100), right: Some(20) }),
        problem(1, 3, 129, 40, F16).with_kv(3, 257).with_mask(Mask::CausalTopLeft),
        problem(1, 4, 500, 256, BF16),
        problem(1, 4, 700, 256, F16).with_kv(1, 700).with_mask(Mask::Causal),
        capped,
    ];
    let ragged = problem(3, 4, 200, 128, F16).with_key_lengths().backward();
    let dense = problems.map(|problem| (problem.backward(), None));
    dense.into_iter().chain([(ragged, Some(vec![200, 64, 129]))]).collect()
}

/// Forward passes: every kind of tile, mask, grid and edge once.
fn forward() -> Vec<Given> {
    use DType::{BF16, F16};
    let window = |left, right| Mask::Window { left, right };
    let problem = Problem::new;
    let mut problems: Vec<_> = [
        problem(1, 8, 512, 64, F16),
        problem(1, 16, 2048, 64, F16).with_mask(Mask::Causal).with_lse(),
        problem(2, 8, 333, 128, BF16).with_kv(2, 333).with_mask(Mask::Causal).with_lse(),
        problem(3, 4, 97, 64, F16).with_kv(4, 257).with_mask(window(Some(100), Some(20))),
        problem(1, 4, 200, 256, F16).with_softcap(20.0),
        problem(8, 16, 512, 64, F16),
        problem(2, 32, 1024, 64, BF16).with_mask(Mask::Causal),
        problem(4, 16, 1000, 128, F16).with_lse(),
        problem(1, 8, 1025, 256, BF16).with_mask(Mask::Causal),
        problem(1, 1, 1, 64, F16).with_kv(1, 4096),
        problem(1, 2, 65, 72, F16).with_kv(2, 513).with_mask(Mask::CausalTopLeft).with_lse(),
        problem(2, 6, 129, 96, BF16).with_kv(3, 127),
        problem(1, 3, 511, 192, F16).with_mask(window(Some(63), Some(0))),
        problem(16, 8, 128, 64, F16).with_mask(Mask::Causal),
        problem(1, 32, 64, 128, BF16).with_kv(8, 2048),
        problem(1, 8, 7, 8, F16).with_kv(8, 97),
        problem(5, 5, 250, 40, BF16).with_softcap(5.0).with_mask(Mask::Causal).with_lse(),
    ]
    .map(|problem| (problem, None))
    .to_vec();
    let decode = problem(4, 8, 1, 128, BF16).with_kv(2, 1000);
    let ragged = problem(3, 8, 300, 64, F16).with_mask(Mask::Causal);
    let wide = problem(2, 4, 64, 256, BF16);
    problems.extend([
        (decode.with_key_lengths(), Some(vec![1000, 1, 0, 513])),
        (ragged.with_key_lengths().with_lse(), Some(vec![300, 64, 129])),
        (wide.with_key_lengths(), Some(vec![63, 17])),
    ]);
    problems
}

/// The index of a problem, given as text, among the problems of both passes, and whether it is run with lse. Absent where there is no
/// such problem.
pub fn find(text: &str) -> Option<(usize, bool)> {
    let mut wanted: Problem = text.parse().ok()?;
    let problems = problems(&[Pass::Forward, Pass::Backward]);
    let place = problems.iter().position(|&(problem, _)| {
        // Older texts did not say whether lse is wanted.
        wanted.lse = problem.lse;
        problem == wanted
    })?;
    Some((place, problems[place].0.lse))
}

/// How many problems of some passes there are.
pub fn count(passes: &[Pass]) -> usize {
    problems(passes).len()
}

/// A problem with its inputs on the GPU and the bits that every run must give.
struct Subject {
    operands: Operands,
    /// As the problem's signature has them.
    inputs: Vec<CudaTensor>,
    expected: Vec<u32>,
}

/// The outputs of one run.
struct Outputs {
    /// As the problem's signature has them.
    tensors: Vec<(Name, CudaTensor)>,
}

/// Stresses the first `most` problems of some passes. `progress` is told what is going on and the share of all work that is done.
pub fn stress(
    cuda: &Cuda,
    plan: &Plan,
    passes: &[Pass],
    most: usize,
    stop: &(dyn Fn() -> bool + Sync),
    progress: &mut dyn FnMut(&str, f64),
) -> flashcore::Result<Vec<Record>> {
    let cuda = cuda.on_new_stream()?;
    let mut problems = problems(passes);
    problems.truncate(most);
    let count = problems.len();
    let mut records = Vec::new();
    for (i, (problem, lengths)) in problems.into_iter().enumerate() {
        if stop() {
            break;
        }
        let mut tell = |what: &str, share: f64| {
            progress(&format!("{problem}: {what}"), (i as f64 + share) / count as f64);
        };
        tell("asking the oracle", 0.0);
        let (subject, judgement) = Subject::new(&cuda, problem, lengths)?;
        tell("threads and streams", 0.1);
        let threaded = threaded(&cuda, plan, &subject)?;
        tell("replays", 0.2);
        let replayed = subject.replayed(&cuda, plan.replays)?;
        let repeated = subject.repeated(&cuda, plan.repeats, stop, &mut tell)?;
        let schedule = cuda.plan(&problem)?.main().schedule.to_string();
        let problem = problem.to_string();
        records.push(Record { problem, schedule, judgement, threaded, replayed, repeated });
    }
    Ok(records)
}

impl Subject {
    fn new(cuda: &Cuda, problem: Problem, lengths: Option<Vec<u32>>) -> flashcore::Result<(Self, Judgement)> {
        let operands = Operands::draw(problem, lengths, Arrangement::Bhsd, Distribution::Normal, 41);
        let signature = problem.signature();
        let inputs = signature.inputs().map(|input| cuda.upload(&operands.operand(input.name).view()));
        let inputs = inputs.collect::<flashcore::Result<_>>()?;
        let mut subject = Self { operands, inputs, expected: Vec::new() };
        let mut outputs = subject.outputs(cuda)?;
        outputs.poison(cuda)?;
        subject.run(&Device::cuda_with(cuda.clone()), &mut outputs)?;
        let found = outputs.download(cuda)?;
        let given: Vec<_> = found.iter().map(|(name, tensor)| (*name, tensor.to_f32())).collect();
        let judgement = subject.operands.yardstick().judge(&given);
        subject.expected = bits(&found);
        Ok((subject, judgement))
    }

    fn outputs(&self, cuda: &Cuda) -> flashcore::Result<Outputs> {
        let signature = self.operands.problem.signature();
        let made = signature
            .outputs()
            .map(|output| Ok((output.name, cuda.empty(output.dtype, Layout::bhsd(output.shape))?)));
        Ok(Outputs { tensors: made.collect::<flashcore::Result<_>>()? })
    }

    fn attention(&self) -> Attention<'_> {
        self.operands.attention()
    }

    fn run(&self, device: &Device, outputs: &mut Outputs) -> flashcore::Result<()> {
        let views = outputs.tensors.iter_mut().map(|(_, tensor)| tensor.view_mut());
        let mut views = views.collect::<flashcore::Result<Vec<_>>>()?;
        let given = self.inputs.iter().map(CudaTensor::view).collect::<flashcore::Result<Vec<_>>>()?;
        match (self.operands.problem.pass, &given[..], &mut views[..]) {
            (Pass::Forward, [q, k, v], [o, lse @ ..]) => {
                self.attention().run_into(device, q, k, v, o, lse.first_mut())
            }
            (Pass::Backward, [q, k, v, o, lse, d_o], [dq, dk, dv]) => {
                let given = Backward::new([q, k, v], o, lse, d_o);
                self.attention().backward_into(device, &given, dq, dk, dv)
            }
            _ => unreachable!("these are the tensors of all problems"),
        }
    }

    /// Runs into poisoned memory, and returns whether the bits are those of the first run.
    fn run_is_same(&self, cuda: &Cuda, device: &Device, outputs: &mut Outputs) -> flashcore::Result<bool> {
        outputs.poison(cuda)?;
        self.run(device, outputs)?;
        Ok(bits(&outputs.download(cuda)?) == self.expected)
    }

    fn replayed(&self, cuda: &Cuda, replays: usize) -> flashcore::Result<Count> {
        let mut count = Count::default();
        let mut outputs = self.outputs(cuda)?;
        for _ in 0..replays {
            outputs.poison(cuda)?;
            let recording = cuda.record(|calls| match (&self.inputs[..], &outputs.tensors[..]) {
                ([q, k, v], [(_, o), lse @ ..]) => {
                    calls.run(&self.attention(), [q, k, v], o, lse.first().map(|(_, lse)| lse))
                }
                ([q, k, v, o, lse, d_o], [(_, dq), (_, dk), (_, dv)]) => {
                    calls.backward(&self.attention(), [q, k, v, o, lse, d_o], [dq, dk, dv])
                }
                _ => unreachable!("these are the tensors of all problems"),
            })?;
            // Only the second replay is compared: the first must not have spoiled it.
            recording.replay()?;
            recording.replay()?;
            drop(recording);
            count.add(bits(&outputs.download(cuda)?) == self.expected);
        }
        Ok(count)
    }

    /// Runs back to back without a pause; the GPU itself compares every run's bits with the first's.
    fn repeated(
        &self,
        cuda: &Cuda,
        repeats: usize,
        stop: &dyn Fn() -> bool,
        tell: &mut dyn FnMut(&str, f64),
    ) -> flashcore::Result<Count> {
        let device = Device::cuda_with(cuda.clone());
        let [mut expected, mut outputs] = [self.outputs(cuda)?, self.outputs(cuda)?];
        let mut count = Count::default();
        // The reference of these runs is itself compared with the first run of all.
        count.add(self.run_is_same(cuda, &device, &mut expected)?);
        let mut comparison = Comparison::new(cuda)?;
        while count.runs < repeats && !stop() {
            tell("again and again", 0.3 + 0.7 * count.runs as f64 / repeats as f64);
            let runs = (repeats - count.runs).min(Comparison::RUNS);
            for run in 0..runs {
                outputs.poison(cuda)?;
                self.run(&device, &mut outputs)?;
                comparison.compare(cuda, run, &mut outputs, &mut expected)?;
            }
            for same in comparison.take(cuda, runs)? {
                count.add(same);
            }
        }
        Ok(count)
    }
}

/// Compares outputs on the GPU.
struct Comparison {
    differ: Function,
    /// Words that differ, one count per run.
    counts: DeviceBuffer,
}

impl Comparison {
    /// Runs between two readings of the counts.
    const RUNS: usize = 500;

    fn new(cuda: &Cuda) -> flashcore::Result<Self> {
        let ptx = include_str!("differ.ptx");
        let load = || {
            let differ = Module::from_ptx(cuda.context(), "differ.ptx", ptx, &JitOptions::default())?
                .function("flashcore_differ")?;
            Ok(Self { differ, counts: cuda.stream().upload_new(&[0u32; Self::RUNS])? })
        };
        load().map_err(|error: DriverError| failed(cuda, &error))
    }

    #[allow(unsafe_code)] // A launch reaches memory through addresses.
    fn compare(
        &self,
        cuda: &Cuda,
        run: usize,
        ours: &mut Outputs,
        expected: &mut Outputs,
    ) -> flashcore::Result<()> {
        for ((_, ours), (_, expected)) in ours.tensors.iter_mut().zip(&mut expected.tensors) {
            let (ours, expected) = (ours.buffer_mut(), expected.buffer_mut());
            let words = ours.len() / size_of::<u32>();
            let launch = || {
                let mut params = ParamBuffer::new();
                params.push_u64(ours.address())?.push_u64(expected.address())?.push_u64(words as u64)?;
                params.push_u64(self.counts.address() + (run * size_of::<u32>()) as u64)?;
                let config = LaunchConfig::new([words.div_ceil(1024).min(264) as u32, 1, 1], [256, 1, 1]);
                // SAFETY: both buffers have this many words, and the counts have one per run.
                unsafe { self.differ.launch(cuda.stream(), &config, params.as_bytes()) }
            };
            launch().map_err(|error: DriverError| failed(cuda, &error))?;
        }
        Ok(())
    }

    /// Whether the runs gave the expected bits; resets the counts.
    fn take(&mut self, cuda: &Cuda, runs: usize) -> flashcore::Result<Vec<bool>> {
        let mut take = || {
            let counts: Vec<u32> = cuda.stream().download_all(&self.counts)?;
            cuda.stream().upload(&mut self.counts, 0, &[0u32; Self::RUNS])?;
            Ok(counts.into_iter().take(runs).map(|words| words == 0).collect())
        };
        take().map_err(|error: DriverError| failed(cuda, &error))
    }
}

/// A failure of the driver as one of the device.
fn failed(cuda: &Cuda, error: &DriverError) -> flashcore::Error {
    let source = Some(error.clone().into());
    flashcore::Error::Device { device: cuda.to_string(), what: error.to_string(), source }
}

/// Calls from several threads that share streams, each into memory of its own.
fn threaded(cuda: &Cuda, plan: &Plan, subject: &Subject) -> flashcore::Result<Count> {
    let streams: Vec<Cuda> =
        (0..plan.streams).map(|_| cuda.on_new_stream()).collect::<flashcore::Result<_>>()?;
    let started = AtomicUsize::new(0);
    let thread = |first: usize| -> flashcore::Result<Count> {
        let mut count = Count::default();
        let mut outputs = subject.outputs(cuda)?;
        while started.fetch_add(1, Ordering::Relaxed) < plan.calls {
            let cuda = &streams[(first + count.runs) % streams.len()];
            let same = subject.run_is_same(cuda, &Device::cuda_with(cuda.clone()), &mut outputs)?;
            count.add(same);
        }
        Ok(count)
    };
    let counts: Vec<flashcore::Result<Count>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.threads).map(|first| scope.spawn(move || thread(first))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread that does not panic")).collect()
    });
    let mut all = Count::default();
    for count in counts {
        let Count { runs, different } = count?;
        all.runs += runs;
        all.different += different;
    }
    Ok(all)
}

impl Count {
    fn add(&mut self, same: bool) {
        self.runs += 1;
        self.different += usize::from(!same);
    }
}

impl Outputs {
    fn poison(&mut self, cuda: &Cuda) -> flashcore::Result<()> {
        for (_, tensor) in &mut self.tensors {
            cuda.fill(tensor, 0xff)?;
        }
        Ok(())
    }

    fn download(&self, cuda: &Cuda) -> flashcore::Result<Vec<(Name, TensorBuf)>> {
        let host = |(name, tensor): &(Name, CudaTensor)| {
            let view = tensor.view()?;
            let mut host = TensorBuf::zeros(view.dtype(), view.layout())?;
            cuda.download(tensor, &mut host.view_mut())?;
            Ok((*name, host))
        };
        self.tensors.iter().map(host).collect()
    }
}

/// The bits of the outputs.
fn bits(outputs: &[(Name, TensorBuf)]) -> Vec<u32> {
    let of = |(_, tensor): &(Name, TensorBuf)| -> Vec<u32> {
        match tensor.storage() {
            Storage::F16(values) => values.iter().map(|x| u32::from(x.to_bits())).collect(),
            Storage::BF16(values) => values.iter().map(|x| u32::from(x.to_bits())).collect(),
            Storage::F32(values) => values.iter().map(|x| x.to_bits()).collect(),
            Storage::F8E4M3(values) => values.iter().map(|x| u32::from(x.to_bits())).collect(),
            Storage::I32(values) => values.iter().map(|x| *x as u32).collect(),
        }
    };
    outputs.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_problem_under_stress_obeys_the_contract() {
        for (problem, lengths) in problems(&[Pass::Forward, Pass::Backward]) {
            assert_eq!(problem.check(), Ok(problem));
            assert_eq!(lengths.is_some(), problem.key_lengths);
            // A recording takes no gradient of lse.
            assert!(problem.pass == Pass::Forward || !problem.lse, "{problem}");
        }
    }

    #[test]
    fn bits_tell_apart_what_compares_equal() {
        let of = |x: f32| {
            let tensor = TensorBuf::from_f32(&[x], [1, 1, 1, 1], DType::F32).unwrap();
            bits(&[(Name::O, tensor)])
        };
        assert_ne!(of(0.0), of(-0.0));
        assert_eq!(of(f32::NAN), of(f32::NAN));
    }
}
