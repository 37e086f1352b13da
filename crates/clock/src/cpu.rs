//! The CPU engine on the call clock, and the machine's own limits beside it.

use std::time::Instant;

use flashcore::{Backward, Device, Mask, Name, Pass, Problem, cpu};
use flashcore_judge::guarded::{Arrangement, Guarded, Poison};
use flashcore_judge::operands::Operands;

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
        for _ in 0..warm {
            self.call()?;
        }
        let start = Instant::now();
        for _ in 0..calls {
            self.call()?;
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls))
    }
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
