//! The CPU engine on the call clock, and the machine's own limits beside it.

use std::time::Instant;

use flashcore::{
    Attention, Backward, Device, Mask, Name, Pages, Pass, Problem, Starts, Tensor, TensorBuf, cpu,
};
use flashcore_judge::guarded::{Arrangement, Guarded, Poison};
use flashcore_judge::operands::Operands;
use flashcore_judge::rule::Row;

use crate::pool::Pool;
use crate::sequences::{ARRANGEMENT, Lie, Sequences, starts};
use crate::timing::Contender;

/// Calls of the library on given inputs.
pub struct Calls<'a> {
    device: &'a Device,
    operands: &'a Operands,
    mask: Mask,
    /// How outputs lie in memory.
    arrangement: Arrangement,
    /// o; or the gradients of q, k and v, and behind them o and lse where a call computes these too.
    outputs: Vec<Guarded>,
}

impl<'a> Calls<'a> {
    /// Of a device, into memory of its own that is poisoned first.
    pub fn new(device: &'a Device, operands: &'a Operands, arrangement: Arrangement) -> Self {
        let problem = operands.problem;
        let calls = Self { device, operands, mask: problem.mask, arrangement, outputs: Vec::new() };
        calls.with_outputs(problem)
    }

    /// With another mask than the problem's.
    pub fn with_mask(mut self, mask: Mask) -> Self {
        self.mask = mask;
        self
    }

    /// Of a backward pass: with the forward one before it, whose o and lse it then takes.
    pub fn with_forward(self) -> Self {
        let forward = self.operands.problem.with_pass(Pass::Forward).with_lse();
        self.with_outputs(forward)
    }

    /// With room for what a problem gives.
    fn with_outputs(mut self, problem: Problem) -> Self {
        for of in problem.signature().outputs() {
            let mut output = Guarded::new(of.dtype, self.arrangement, of.shape);
            output.poison(Poison::First);
            self.outputs.push(output);
        }
        self
    }

    fn call(&mut self) -> Result<(), String> {
        let Operands { q, k, v, .. } = self.operands;
        let (attention, device) = (self.operands.attention().mask(self.mask), self.device);
        let (q, k, v) = (q.view(), k.view(), v.view());
        let run = match &mut self.outputs[..] {
            [o] => attention.run_into(device, &q, &k, &v, &mut o.view_mut(), None),
            [dq, dk, dv, rest @ ..] => {
                let given = match rest {
                    [o, lse] => {
                        let (mut into_o, mut into_lse) = (o.view_mut(), lse.view_mut());
                        attention
                            .run_into(device, &q, &k, &v, &mut into_o, Some(&mut into_lse))
                            .map_err(|error| error.to_string())?;
                        let d_o = self.operands.operand(Name::Do).view();
                        Backward::new([&q, &k, &v], &o.view(), &lse.view(), &d_o)
                    }
                    _ => self.operands.given(),
                };
                let (mut dq, mut dk, mut dv) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
                attention.backward_into(device, &given, &mut dq, &mut dk, &mut dv)
            }
            _ => return Err("there is nothing to compute".into()),
        };
        run.map_err(|error| error.to_string())
    }

    /// What one call leaves in that memory: o, or the gradient of q.
    pub fn output(&mut self) -> Result<&Guarded, String> {
        self.call()?;
        Ok(&self.outputs[0])
    }
}

impl Contender for Calls<'_> {
    fn name(&self) -> String {
        "flashcore".into()
    }

    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String> {
        timed(warm, calls, || self.call())
    }
}

/// Calls of the library on sequences of lengths of their own.
pub struct SequenceCalls<'a> {
    name: &'static str,
    device: &'a Device,
    problem: Problem,
    sequences: &'a Sequences,
    inputs: [TensorBuf; 3],
    starts: [Vec<u32>; 2],
    table: Vec<i32>,
    o: TensorBuf,
}

impl<'a> SequenceCalls<'a> {
    /// Of a device, on tensors cut from a pool.
    pub fn new(
        name: &'static str,
        device: &'a Device,
        pool: &Pool,
        dense: Problem,
        sequences: &'a Sequences,
    ) -> Result<Self, String> {
        let say = |error: flashcore::Error| error.to_string();
        let problem = sequences.problem(dense);
        if problem.pass == Pass::Backward {
            return Err(
                "gradients of packed sequences are timed on a GPU; on the CPU those of dense ones".into()
            );
        }
        let inputs = pool.tensors(&problem, sequences).map_err(say)?;
        let [batch, heads, len, _] = inputs[0].shape();
        let o = ARRANGEMENT.layout([batch, heads, len, problem.head_dim_v]);
        Ok(Self {
            name,
            device,
            problem,
            sequences,
            inputs,
            starts: [sequences.queries.as_ref(), Some(&sequences.keys)]
                .map(|it| it.map_or(Vec::new(), |it| starts(it))),
            table: sequences.table(&problem).into_iter().map(|page| page as i32).collect(),
            o: TensorBuf::zeros(problem.out(), o).map_err(say)?,
        })
    }

    fn call(&mut self) -> Result<(), String> {
        let say = |error: flashcore::Error| error.to_string();
        let Problem { mask, scale, len_k, .. } = self.problem;
        let mut attention = Attention::new().mask(mask).scale(scale);
        let [q_starts, k_starts] = &self.starts;
        if self.sequences.queries.is_some() {
            attention = attention.packed_queries(Starts::new(q_starts).map_err(say)?);
        }
        let rows = self.sequences.keys.len();
        let table = Tensor::indices(&self.table, [rows, self.table.len() / rows.max(1)]).map_err(say)?;
        attention = match self.sequences.lie {
            Lie::Packed => attention.packed_keys(Starts::new(k_starts).map_err(say)?),
            Lie::Cache => attention.key_lengths(&self.sequences.keys),
            Lie::Pages(_) => {
                attention.paged(Pages::new(&table).with_most_keys(len_k)).key_lengths(&self.sequences.keys)
            }
        };
        let [q, k, v] = self.inputs.each_ref().map(TensorBuf::view);
        attention.run_into(self.device, &q, &k, &v, &mut self.o.view_mut(), None).map_err(say)
    }

    /// What one call gives for some rows.
    pub fn output(&mut self, rows: &[Row]) -> Result<Vec<f32>, String> {
        self.call()?;
        let (o, width) = (self.o.to_f32(), self.problem.head_dim_v);
        let of = |row: &Row| o[self.sequences.index(&self.problem, row) * width..][..width].to_vec();
        Ok(rows.iter().flat_map(of).collect())
    }
}

impl Contender for SequenceCalls<'_> {
    fn name(&self) -> String {
        self.name.into()
    }

    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String> {
        timed(warm, calls, || self.call())
    }
}

/// Microseconds per call, after some that are not timed.
fn timed(warm: u32, calls: u32, mut call: impl FnMut() -> Result<(), String>) -> Result<f64, String> {
    (0..warm).try_for_each(|_| call())?;
    let start = Instant::now();
    (0..calls).try_for_each(|_| call())?;
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls))
}

/// The operations or the bytes of a problem with nothing in their way: what everybody's rate is a share of.
pub struct Limit {
    name: &'static str,
    work: cpu::Work,
    amount: f64,
}

impl Limit {
    /// So much work of a kind.
    pub fn new(name: &'static str, work: cpu::Work, amount: f64) -> Self {
        Self { name, work, amount }
    }
}

impl Contender for Limit {
    fn name(&self) -> String {
        self.name.into()
    }

    fn sample(&mut self, warm: u32, calls: u32) -> Result<f64, String> {
        for _ in 0..warm {
            self.work.time(self.amount);
        }
        Ok(self.work.time(self.amount * f64::from(calls)) * 1e6 / f64::from(calls))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::DType;
    use flashcore_judge::inputs::Distribution;

    #[test]
    fn sequences_have_the_truth_of_the_pool_however_they_lie() {
        let dense = Problem::new(3, 4, 40, 16, DType::BF16).with_kv(2, 40).with_mask(Mask::Causal);
        let pool = Pool::draw(DType::BF16, 5003, 1);
        let device = Device::cpu();
        let cached = |lie| Sequences::cached(vec![40, 7, 25], lie);
        for (queries, sequences) in [
            (40, Sequences::packed(&[12, 40, 1])),
            (1, cached(Lie::Cache)),
            (3, cached(Lie::Pages(16))),
            (40, Sequences { queries: Some(vec![1, 40, 3]), ..cached(Lie::Pages(7)) }),
        ] {
            let mut dense = dense;
            dense.len_q = queries;
            let problem = sequences.problem(dense);
            let rows = sequences.rows(&problem, 1000, 1);
            let yardstick = pool.yardstick_of(&problem, &sequences, &rows).unwrap();
            let mut calls = SequenceCalls::new("flashcore", &device, &pool, dense, &sequences).unwrap();
            let output = calls.output(&rows).unwrap();
            assert!(yardstick.judge(&[(Name::O, output.clone())]).passed(), "{sequences}");
            let mut moved = output;
            moved.rotate_left(16);
            assert!(!yardstick.judge(&[(Name::O, moved)]).passed(), "{sequences}");
        }
    }

    #[test]
    fn a_sample_is_the_time_of_one_call_and_an_output_is_whole() {
        let problem = Problem::new(1, 2, 16, 8, DType::F32).with_mask(Mask::Causal);
        let operands = Operands::draw(problem, None, Arrangement::Bhsd, Distribution::Normal, 1);
        let device = Device::cpu();
        let mut calls = Calls::new(&device, &operands, Arrangement::Bhsd);
        assert!(calls.sample(1, 3).unwrap() > 0.0);
        let causal = calls.output().unwrap();
        assert_eq!(causal.unwritten(Poison::First), [0; 0]);
        let causal = causal.values();
        assert_ne!(causal, calls.with_mask(Mask::None).output().unwrap().values());
        let backward = Operands::draw(problem.backward(), None, Arrangement::Bhsd, Distribution::Normal, 1);
        let alone = Calls::new(&device, &backward, Arrangement::Bhsd).output().unwrap().values();
        let both =
            Calls::new(&device, &backward, Arrangement::Bhsd).with_forward().output().unwrap().values();
        let apart = alone.iter().zip(&both).map(|(a, b)| (a - b).abs());
        assert!(
            alone != causal && apart.fold(0.0, f32::max) < 1e-5,
            "the gradient of q, given o or computing it"
        );
        let work = cpu::Work::fma(cpu::Isa::Portable, 1);
        assert!(Limit::new("FMA peak", work, 1e6).sample(0, 2).unwrap() > 0.0);
    }
}
