//! Engines with a planted fault: right attention, bent in one known way.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use flashcore::{Attention, DType, Device, Mask, Problem, Tensor, TensorBuf, TensorMut};
use safetensors::SafeTensors;

use crate::engine::Engine;
use crate::files;
use crate::rule::Row;
use crate::subject::command;
use crate::subject::failed;

/// Writes values in the order (batch, heads, length, head_dim).
pub fn write(values: &[f32], tensor: &mut TensorMut<'_>) {
    let [_, nh, ns, nd] = tensor.shape();
    for (i, row) in values.chunks_exact(nd.max(1)).enumerate() {
        tensor.write_row(i / (nh * ns), i / ns % nh, i % ns, row);
    }
}

/// The inputs of a call, to be bent before an honest engine computes them.
pub struct Bent<'a> {
    /// The call's options.
    pub attention: Attention<'a>,
    /// What is computed in the end.
    pub problem: Problem,
    /// The queries, in the order (batch, heads, length, head_dim).
    pub q: Vec<f32>,
    /// The keys.
    pub k: Vec<f32>,
    /// The values.
    pub v: Vec<f32>,
}

impl Bent<'_> {
    /// The elements of each kv head of k and v.
    pub fn heads(&mut self) -> impl Iterator<Item = (&mut [f32], &mut [f32])> {
        let Problem { len_k, head_dim, head_dim_v, .. } = self.problem;
        self.k.chunks_exact_mut(len_k * head_dim).zip(self.v.chunks_exact_mut(len_k * head_dim_v))
    }

    /// Lets every batch entry have all keys.
    pub fn forget_key_lengths(&mut self) {
        let Problem { mask, scale, softcap, .. } = self.problem;
        self.attention = Attention::new().mask(mask).scale(scale).softcap(softcap.unwrap_or(0.0));
    }

    /// Computes attention on the inputs as they are: o and lse.
    fn attend(&self) -> flashcore::Result<(Vec<f32>, Vec<f32>)> {
        let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, dtype, .. } =
            self.problem;
        let q = TensorBuf::from_f32(&self.q, [batch, heads_q, len_q, head_dim], dtype)?;
        let k = TensorBuf::from_f32(&self.k, [batch, heads_kv, len_k, head_dim], dtype)?;
        let v = TensorBuf::from_f32(&self.v, [batch, heads_kv, len_k, head_dim_v], dtype)?;
        let result = self.attention.with_lse().run(&Device::cpu(), &q.view(), &k.view(), &v.view())?;
        Ok((result.o.to_f32(), result.lse.expect("asked for").to_f32()))
    }

    /// Keeps only the first `len` keys.
    pub fn truncate_keys(&mut self, len: usize) {
        let Problem { len_k, head_dim, head_dim_v, .. } = self.problem;
        let cut = |x: &[f32], width: usize| -> Vec<f32> {
            x.chunks_exact(len_k * width).flat_map(|head| head[..len * width].to_vec()).collect()
        };
        (self.k, self.v) = (cut(&self.k, head_dim), cut(&self.v, head_dim_v));
        self.problem.len_k = len;
    }
}

/// Gives every query head kv head `h % heads_kv` instead of `h / group`.
pub fn swap_heads(call: &mut Bent<'_>) {
    let Problem { heads_q, heads_kv, len_k, head_dim, .. } = call.problem;
    let size = len_k * head_dim;
    let expand = |x: &[f32]| -> Vec<f32> {
        let batches = x.chunks_exact(heads_kv * size);
        batches
            .flat_map(|batch| {
                (0..heads_q).flat_map(move |h| batch[h % heads_kv * size..][..size].iter().copied())
            })
            .collect()
    };
    (call.k, call.v) = (expand(&call.k), expand(&call.v));
    call.problem.heads_kv = heads_q;
}

/// An engine that computes something other than what was asked: right attention on bent inputs, or a right result that
/// is bent afterwards.
pub struct Bending {
    /// Its name.
    pub name: &'static str,
    /// Bends the inputs.
    pub bend: fn(&mut Bent<'_>),
    /// Bends o and lse.
    pub finish: fn(&mut Vec<f32>, &mut [f32], &Problem),
}

impl Bending {
    /// One that bends nothing.
    pub fn straight(name: &'static str) -> Self {
        Self { name, bend: |_| {}, finish: |_, _, _| {} }
    }

    /// One that bends its inputs.
    pub fn inputs(name: &'static str, bend: fn(&mut Bent<'_>)) -> Self {
        Self { bend, ..Self::straight(name) }
    }

    /// One that bends its outputs.
    pub fn outputs(name: &'static str, finish: fn(&mut Vec<f32>, &mut [f32], &Problem)) -> Self {
        Self { finish, ..Self::straight(name) }
    }
}

/// Tells a row its query as if rows were head by head, when they are query by query. The queries of a head and their number
/// have no common divisor, so that each query is taken for one other.
pub fn rows_by_head() -> Bending {
    /// Where a query's vector must stand to have the limits that the row is given, in queries of all heads.
    fn taken_for(problem: &Problem) -> impl Iterator<Item = usize> {
        let Problem { batch, heads_q, len_q, .. } = *problem;
        let group = problem.group();
        (0..batch * heads_q * len_q).map(move |i| {
            let (head, query) = (i / len_q, i % len_q);
            head * len_q + (query * group + head % group) % len_q
        })
    }
    Bending {
        name: "rows by head",
        bend: |call| {
            let width = call.problem.head_dim;
            let given = call.q.clone();
            for (row, at) in given.chunks_exact(width).zip(taken_for(&call.problem)) {
                call.q[at * width..][..width].copy_from_slice(row);
            }
        },
        finish: |o, lse, problem| {
            let width = problem.head_dim_v;
            let (found, sums) = (o.clone(), lse.to_vec());
            for ((row, sum), at) in o.chunks_exact_mut(width).zip(lse).zip(taken_for(problem)) {
                row.copy_from_slice(&found[at * width..][..width]);
                *sum = sums[at];
            }
        },
    }
}

impl Engine for Bending {
    fn name(&self) -> &str {
        self.name
    }

    fn supports(&self, _: &Problem) -> Result<(), String> {
        Ok(())
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let asked = attention.problem(q, k, v)?;
        let mut bent =
            Bent { attention: *attention, problem: asked, q: q.to_f32(), k: k.to_f32(), v: v.to_f32() };
        (self.bend)(&mut bent);
        let (mut values, mut sums) = bent.attend()?;
        (self.finish)(&mut values, &mut sums, &asked);
        write(&values, o);
        if let Some(lse) = lse {
            write(&sums, lse);
        }
        Ok(())
    }
}

/// What an engine with a memory does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// Never writes.
    Idle,
    /// Always returns the first result.
    Stale,
    /// Returns before its result is there: what is read is what the previous call left.
    Late,
    /// Gets one row wrong in one of five runs.
    Racy,
    /// The last bit of one element depends on the run.
    Unsteady,
    /// Leaves one row as it was.
    Forgetful,
    /// Is right once, and never again.
    Worn,
}

/// An engine with a memory: what it does depends on how often it was called.
pub struct Moody {
    calls: AtomicUsize,
    kept: Mutex<Option<Vec<f32>>>,
    mood: Mood,
}

impl Moody {
    /// One that was never called.
    pub fn new(mood: Mood) -> Self {
        Self { calls: AtomicUsize::new(0), kept: Mutex::new(None), mood }
    }

    fn kept(&self) -> MutexGuard<'_, Option<Vec<f32>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine for Moody {
    fn name(&self) -> &'static str {
        "moody"
    }

    fn supports(&self, _: &Problem) -> Result<(), String> {
        Ok(())
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let result = attention.with_lse().run(&Device::cpu(), q, k, v)?;
        let mut values = result.o.to_f32();
        match self.mood {
            Mood::Idle => return Ok(()),
            Mood::Stale => values.clone_from(self.kept().get_or_insert_with(|| values.clone())),
            Mood::Late => match self.kept().replace(values.clone()) {
                Some(before) => values = before,
                None => return Ok(()),
            },
            Mood::Worn if call > 0 => values.iter_mut().for_each(|x| *x *= 1.01),
            Mood::Racy if call % 5 == 4 => {
                let width = result.o.shape()[3];
                values[100 * width..101 * width].fill(0.25);
            }
            Mood::Unsteady if call % 2 == 1 => {
                let last = match result.o.dtype() {
                    DType::F16 => 13,
                    DType::BF16 => 16,
                    DType::F32 | DType::F8E4M3 | DType::I32 => 0,
                };
                values[9] = f32::from_bits(values[9].to_bits() ^ (1 << last));
            }
            _ => {}
        }
        if self.mood == Mood::Forgetful {
            let [.., width] = o.shape();
            o.as_tensor().read_row(0, 0, 1, &mut values[width..2 * width]);
        }
        write(&values, o);
        if let Some(lse) = lse {
            write(&result.lse.expect("asked for").to_f32(), lse);
        }
        Ok(())
    }
}

type Bend = Box<dyn Fn(&mut Bent<'_>) + Send + Sync>;
type Finish = Box<dyn Fn(&Problem, &mut [f32], &mut [f32]) + Send + Sync>;

/// An engine that is right except where its fault shows: on some inputs, or in some of its outputs.
pub struct Hidden {
    bend: Bend,
    finish: Finish,
}

impl Hidden {
    /// One that bends its inputs.
    pub fn inputs(bend: impl Fn(&mut Bent<'_>) + Send + Sync + 'static) -> Self {
        Self { bend: Box::new(bend), finish: Box::new(|_, _, _| {}) }
    }

    /// One that bends o and lse.
    pub fn outputs(finish: impl Fn(&Problem, &mut [f32], &mut [f32]) + Send + Sync + 'static) -> Self {
        Self { bend: Box::new(|_| {}), finish: Box::new(finish) }
    }

    /// One that gets some rows wrong by 5 %.
    pub fn rows(wrong: impl Fn(&Problem, Row) -> bool + Send + Sync + 'static) -> Self {
        Self::outputs(move |problem, o, _| {
            let Problem { heads_q, len_q, head_dim_v, .. } = *problem;
            for (i, row) in o.chunks_exact_mut(head_dim_v).enumerate() {
                if wrong(problem, Row::query(i / (heads_q * len_q), i / len_q % heads_q, i % len_q)) {
                    for x in row {
                        *x *= 1.05;
                    }
                }
            }
        })
    }
}

impl Engine for Hidden {
    fn name(&self) -> &'static str {
        "hidden"
    }

    fn supports(&self, _: &Problem) -> Result<(), String> {
        Ok(())
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let mut asked = attention.problem(q, k, v)?;
        asked.lse = lse.is_some();
        let mut bent =
            Bent { attention: *attention, problem: asked, q: q.to_f32(), k: k.to_f32(), v: v.to_f32() };
        (self.bend)(&mut bent);
        let (mut values, mut sums) = bent.attend()?;
        (self.finish)(&asked, &mut values, &mut sums);
        write(&values, o);
        if let Some(lse) = lse {
            write(&sums, lse);
        }
        Ok(())
    }
}

/// The cache key of a result: a part of a tensor's elements, given with its shape.
type Key = fn(&[f32], [usize; 4]) -> Vec<f32>;

/// An engine that caches its results, and returns them when the inputs look the same.
pub struct Keeping {
    key: Key,
    kept: Mutex<HashMap<Vec<u32>, Answer>>,
}

/// o and lse.
type Answer = (Vec<f32>, Vec<f32>);

impl Keeping {
    /// One with an empty cache.
    pub fn new(key: Key) -> Self {
        Self { key, kept: Mutex::new(HashMap::new()) }
    }
}

impl Engine for Keeping {
    fn name(&self) -> &'static str {
        "keeping"
    }

    fn supports(&self, _: &Problem) -> Result<(), String> {
        Ok(())
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let problem = attention.problem(q, k, v)?;
        let parts = [q, k, v].map(|tensor| (self.key)(&tensor.to_f32(), tensor.shape()));
        let asked = format!("{problem} {attention:?}").into_bytes().into_iter().map(u32::from);
        let key: Vec<u32> = asked.chain(parts.iter().flatten().map(|x| x.to_bits())).collect();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if !kept.contains_key(&key) {
            let bent = Bent { attention: *attention, problem, q: q.to_f32(), k: k.to_f32(), v: v.to_f32() };
            kept.insert(key.clone(), bent.attend()?);
        }
        let (values, sums) = &kept[&key];
        write(values, o);
        if let Some(lse) = lse {
            write(sums, lse);
        }
        Ok(())
    }
}

/// An engine that is handed its call as a command is: in the bytes of a file, from which it reads key lengths or does
/// not.
pub struct ThroughFile {
    /// Whether it reads key lengths.
    pub reads_lengths: bool,
}

impl Engine for ThroughFile {
    fn name(&self) -> &'static str {
        "through a file"
    }

    fn supports(&self, problem: &Problem) -> Result<(), String> {
        command::supports(problem)
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        inputs: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let problem = attention.problem(inputs[0], inputs[1], inputs[2])?;
        let answer = self.answer(&problem, attention, inputs).map_err(|why| failed(self.name(), why))?;
        write(&answer.0, o);
        if let Some(lse) = lse {
            write(&answer.1, lse);
        }
        Ok(())
    }
}

impl ThroughFile {
    fn answer(
        &self,
        problem: &Problem,
        attention: &Attention<'_>,
        inputs: [&Tensor<'_>; 3],
    ) -> Result<Answer, String> {
        let bytes = command::file(problem, attention.host_key_lengths(), inputs)?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| error.to_string())?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| error.to_string())?;
        let said = header.metadata().clone().unwrap_or_default();
        let number = |name: &str| -> Result<f32, String> {
            said.get(name).and_then(|text| text.parse().ok()).ok_or(format!("the file has no {name}"))
        };
        let mask = said.get("mask").ok_or("the file has no mask")?;
        let mask: Mask = mask.parse().map_err(|error: flashcore::Error| error.to_string())?;
        let mut called = Attention::new().mask(mask).scale(number("scale")?).softcap(number("softcap")?);
        let lengths = file.tensor("key_lengths").ok().map(|tensor| -> Vec<u32> {
            let (numbers, _) = tensor.data().as_chunks();
            numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
        });
        if let Some(lengths) = lengths.as_ref().filter(|_| self.reads_lengths) {
            called = called.key_lengths(lengths);
        }
        let values = |name: &str| {
            let tensor = file.tensor(name).map_err(|error| error.to_string())?;
            files::floats(&tensor).ok_or(format!("{name} is no float"))
        };
        let bent =
            Bent { attention: called, problem: *problem, q: values("q")?, k: values("k")?, v: values("v")? };
        bent.attend().map_err(|error| error.to_string())
    }
}
