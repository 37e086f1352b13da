//! The CPU engine on the call clock, and the machine's own limits beside it.

use std::time::Instant;

use flashcore::{Device, Mask, Problem, cpu};
use flashcore_judge::guarded::{Arrangement, Guarded, Poison};
use flashcore_judge::operands::Operands;

use crate::timing::Contender;

/// Calls of the library on given inputs.
pub struct Calls<'a> {
    device: &'a Device,
    operands: &'a Operands,
    mask: Mask,
    o: Guarded,
}

impl<'a> Calls<'a> {
    /// Of a device, into memory of its own that is poisoned first.
    pub fn new(device: &'a Device, operands: &'a Operands) -> Self {
        let Problem { batch, heads_q, len_q, head_dim_v, .. } = operands.problem;
        let mut o =
            Guarded::new(operands.problem.out(), Arrangement::Bhsd, [batch, heads_q, len_q, head_dim_v]);
        o.poison(Poison::First);
        Self { device, operands, mask: operands.problem.mask, o }
    }

    /// With another mask than the problem's.
    pub fn with_mask(mut self, mask: Mask) -> Self {
        self.mask = mask;
        self
    }

    fn call(&mut self) -> Result<(), String> {
        let Operands { q, k, v, .. } = self.operands;
        let attention = self.operands.attention().mask(self.mask);
        let run =
            attention.run_into(self.device, &q.view(), &k.view(), &v.view(), &mut self.o.view_mut(), None);
        run.map_err(|error| error.to_string())
    }

    /// What one call leaves in that memory.
    pub fn output(&mut self) -> Result<&Guarded, String> {
        self.call()?;
        Ok(&self.o)
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
        let mut calls = Calls::new(&device, &operands);
        assert!(calls.sample(1, 3).unwrap() > 0.0);
        let causal = calls.output().unwrap();
        assert_eq!(causal.unwritten(Poison::First), [0; 0]);
        let causal = causal.values();
        assert_ne!(causal, calls.with_mask(Mask::None).output().unwrap().values());
        let work = cpu::Work::fma(cpu::Isa::Portable, 1);
        assert!(Limit::new("FMA peak", work, 1e6).sample(0, 2).unwrap() > 0.0);
    }
}
