//! Timing on the CPU by the call clock, in turns with torch and with measurements of the machine's own limits.

use std::time::Duration;

use flashcore::{Device, Mask, Name, Pass, cpu};

use super::cells::{Cell, Member};
use super::gpu::largest_tensor;
use super::itself::{AgainstItself, Repetitions};
use super::outcome::{CpuConditions, Outcome, SEED, judged_rows, rows};
use super::{Bench, Clock, Machine};
use crate::cases::Passes;
use crate::ceilings::Ceilings;
use crate::engine::DeviceEngine;
use crate::evidence::Environment;
use crate::gpu::pool::Pool;
use crate::gpu::sequences::Sequences;
use crate::gpu::worker::PLANNER;
use crate::guarded::Arrangement;
use crate::inputs::Distribution;
use crate::operands::Operands;
use crate::peers::{self, Torch};
use crate::rule::Row;
use crate::timing::{Contender, Effort, SAMPLE, SETTLE, Samples, measure};
use flashcore_clock::cpu::{Calls, Limit, SequenceCalls};

/// The reason for the absence of torch when none was wanted.
pub(crate) const NO_PEERS: &str = "--no-peers";

/// How cells are timed.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The CPU's instructions.
    pub isa: cpu::Isa,
    /// Threads per contender.
    pub threads: usize,
    /// Whether torch is looked for.
    pub peers: bool,
    /// Rounds, if an exact number is wanted.
    pub rounds: Option<usize>,
    /// Calls of each contender before the first sample, besides the one that finds out how long a call takes.
    pub warmups: u32,
    /// The smallest difference that matters.
    pub margin: f64,
}

/// Times cells on the CPU.
pub struct CpuBench {
    setup: Setup,
    device: Device,
    machine: String,
    torch: Option<Torch>,
    no_torch: Option<String>,
    ceilings: Option<Ceilings>,
}

impl CpuBench {
    /// With torch where it is wanted and there is one.
    pub fn start(setup: Setup, environment: &Environment) -> Result<Self, String> {
        let device = DeviceEngine::cpu(setup.isa, setup.threads)?.device().clone();
        let torch = if setup.peers { Torch::start(setup.threads) } else { Err(NO_PEERS.into()) };
        let (torch, no_torch) = match torch {
            Ok(torch) => (Some(torch), None),
            Err(why) => (None, Some(why)),
        };
        let model = environment.cpu.model.as_deref().unwrap_or("an unknown CPU");
        let machine = format!("cpu-{} on {model}, {} threads", setup.isa, setup.threads);
        let ceilings = Ceilings::kept(&machine)?;
        Ok(Self { setup, device, machine, torch, no_torch, ceilings })
    }

    fn effort(&self, budget: Duration) -> Effort {
        let Setup { rounds, margin, .. } = self.setup;
        Effort { rounds, budget, margin, settle: SETTLE, sample: SAMPLE }
    }
}

impl CpuBench {
    /// A cell whose sequences have lengths of their own, beside ours in other forms; torch has no such calls on a CPU.
    fn run_sequences(
        &self,
        member: &Member,
        sequences: &Sequences,
        budget: Duration,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(&str, f64),
    ) -> Result<Outcome, String> {
        let cell = &member.cell;
        let (problem, effort) = (cell.problem(), self.effort(budget));
        progress("drawing inputs", 0.0);
        let pool = pool(cell);
        progress("asking the oracle", 0.0);
        let rows = cell.judged_rows();
        let yardstick = pool.yardstick_of(&problem, sequences, &rows).ok_or("there is no row to judge")?;
        let forms = if member.with_forms { cell.forms() } else { Vec::new() };
        let mut all = vec![(PLANNER, cell)];
        all.extend(forms.iter().map(|(name, form)| (*name, form)));
        let (mut errors, mut contenders) = (Vec::new(), Vec::<Box<dyn Contender + '_>>::new());
        for (name, form) in all {
            progress(&format!("judging {name}"), 0.0);
            let sequences = form.sequences.as_ref().unwrap_or(sequences);
            let mut calls = SequenceCalls::new(name, &self.device, &pool, form.dense(), sequences)?;
            errors.push(yardstick.judge(&[(Name::O, calls.output(&rows)?)]));
            contenders.push(Box::new(calls));
        }
        let ours = contenders.len();
        let Setup { isa, threads, margin, .. } = self.setup;
        let (work, products) = (cell.work(), isa.of_products(problem.dtype));
        let peak = cpu::Work::fma(products, threads);
        contenders.push(Box::new(Limit::new("FMA peak", peak, work.flops)));
        if cell.is_decode() {
            let read = cpu::Work::read(isa, threads);
            contenders.push(Box::new(Limit::new("read bandwidth", read, work.bytes)));
        }
        let mut round = |round: usize, share: f64| progress(&format!("round {round}"), share.min(1.0));
        let mut samples = measure(&mut contenders, &effort, stop, &mut round);
        drop(contenders);
        let mut limits = samples.split_off(ours).into_iter().map(|samples| samples.times);
        let fma_peak_samples_us = limits.next().unwrap_or_default();
        let unseen = fma_peak_samples_us.is_empty();
        let conditions = CpuConditions {
            checksums: pool.checksums(),
            fma_peak_gflops: if unseen { cpu::fma_peak(products, threads, Duration::ZERO) } else { 0.0 },
            fma_peak_samples_us,
            bandwidth_samples_us: limits.next().unwrap_or_default(),
            ..CpuConditions::default()
        };
        let mut taken: Vec<_> = samples.into_iter().zip(errors.into_iter().map(Some)).collect();
        if self.torch.is_some() {
            let failure = Some("torch on a CPU takes no sequences of lengths of their own".into());
            taken.push((Samples { name: "torch".into(), failure, ..Samples::default() }, None));
        }
        Ok(Outcome::on_cpu(cell, rows.len(), taken, conditions, self.ceilings.as_ref(), margin))
    }
}

/// The numbers that a cell's sequences are cut from.
pub(crate) fn pool(cell: &Cell) -> Pool {
    Pool::draw(cell.types.dtype, largest_tensor(&cell.problem()), SEED)
}

impl Bench for CpuBench {
    fn clock(&self) -> Clock {
        Clock::Call
    }

    fn machine(&self) -> Machine<'_> {
        Machine::Cpu {
            device: self.device.to_string(),
            threads: self.setup.threads,
            torch: self.torch.as_ref().map(Torch::facts),
        }
    }

    fn peers(&self) -> Vec<String> {
        self.torch.iter().map(|_| "torch".into()).collect()
    }

    fn no_torch(&self) -> Option<&str> {
        self.no_torch.as_deref()
    }

    fn ceilings(&self) -> Option<&Ceilings> {
        self.ceilings.as_ref()
    }

    fn measure_ceilings(&mut self, created: &str) -> Result<&Ceilings, String> {
        let Setup { isa, threads, .. } = self.setup;
        let found = Ceilings::of_cpu(&self.machine, created, isa, threads, Duration::from_secs(1));
        Ok(self.ceilings.insert(found))
    }

    fn run(
        &mut self,
        member: &Member,
        budget: Duration,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(&str, f64),
    ) -> Result<Outcome, String> {
        let cell = &member.cell;
        if let Some(sequences) = &cell.sequences {
            return self.run_sequences(member, sequences, budget, stop, progress);
        }
        let (problem, effort) = (cell.problem(), self.effort(budget));
        progress("drawing inputs", 0.0);
        let operands = inputs(cell, &self.device)?;
        progress("asking the oracle", 0.0);
        let judged = judged_rows(&problem);
        let all = judged.len() == rows(&problem);
        let whole = all && problem.pass == Pass::Forward;
        let yardstick = if whole { operands.yardstick() } else { operands.yardstick_of_rows(&judged) };
        let (output, width) = cell.asked().judged();
        let of_rows = |o: Vec<f32>| -> Vec<f32> {
            let index = |row: &Row| (row.batch * problem.heads_q + row.head) * problem.len_q + row.position;
            judged.iter().flat_map(|row| o[index(row) * width..][..width].to_vec()).collect()
        };
        let judge = |o: Vec<f32>| yardstick.judge(&[(output, of_rows(o))]);
        let mut ours = calls(cell, &self.device, &operands);
        let mut errors = vec![Ok(judge(ours.output()?.values()))];
        if let Some(torch) = &mut self.torch {
            progress("handing the inputs to torch", 0.0);
            errors.push(torch.load(&operands, cell.pass).and_then(|()| torch.output(&problem)).map(judge));
        }
        let mut contenders: Vec<Box<dyn Contender + '_>> = vec![Box::new(ours)];
        let mut absent = None;
        if let Some(torch) = &mut self.torch {
            match &errors[1] {
                Ok(_) => contenders.push(Box::new(torch)),
                Err(why) => absent = Some(why.clone()),
            }
        }
        let limits = contenders.len();
        let Setup { isa, threads, warmups, margin, .. } = self.setup;
        let (products, amount) = (isa.of_products(problem.dtype), cell.work());
        let work = cpu::Work::fma(products, threads);
        contenders.push(Box::new(Limit::new("FMA peak", work, amount.flops)));
        if cell.is_decode() {
            let work = cpu::Work::read(isa, threads);
            contenders.push(Box::new(Limit::new("read bandwidth", work, amount.bytes)));
        }
        // A rate that was measured minutes earlier says nothing on a machine that others share.
        let causal = cell.has_causal_share();
        if causal {
            contenders.push(Box::new(calls(cell, &self.device, &operands).with_mask(Mask::None)));
        }
        if warmups > 0 {
            progress("warming up", 0.0);
            for contender in &mut contenders {
                // A contender that fails here fails again on the clock, where it is recorded.
                let _ = contender.sample(warmups, 1);
            }
        }
        let mut round = |round: usize, share: f64| progress(&format!("round {round}"), share.min(1.0));
        let mut samples = measure(&mut contenders, &effort, stop, &mut round);
        drop(contenders);
        let mut limits = samples.split_off(limits).into_iter().map(|samples| samples.times);
        let fma_peak_samples_us = limits.next().unwrap_or_default();
        let full_samples_us = if causal { limits.next_back().unwrap_or_default() } else { Vec::new() };
        let bandwidth_samples_us = limits.next().unwrap_or_default();
        let unseen = fma_peak_samples_us.is_empty();
        let fma_peak_gflops = if unseen { cpu::fma_peak(products, threads, Duration::ZERO) } else { 0.0 };
        if let Some(why) = absent {
            samples.push(Samples { name: "torch".into(), failure: Some(why), ..Samples::default() });
        }
        let conditions = CpuConditions {
            checksums: checksums(&operands),
            fma_peak_gflops,
            fma_peak_samples_us,
            bandwidth_samples_us,
            full_samples_us,
            ..CpuConditions::default()
        };
        let taken = samples.into_iter().zip(errors).map(|(samples, error)| (samples, error.ok())).collect();
        Ok(Outcome::on_cpu(cell, judged.len(), taken, conditions, self.ceilings.as_ref(), margin))
    }

    fn against_itself(
        &self,
        Member { cell, .. }: &Member,
        repetitions: Repetitions,
        budget: Duration,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<AgainstItself, String> {
        let operands = inputs(cell, &self.device)?;
        // No other contender's threads are running.
        let effort = Effort { settle: Duration::ZERO, ..self.effort(budget) };
        let side = || -> Box<dyn Contender + '_> { Box::new(calls(cell, &self.device, &operands)) };
        AgainstItself::measure(cell, repetitions, [side(), side()], &effort, stop, progress)
    }
}

/// A cell's inputs; o and lse of a backward pass are what a device makes of the forward one.
pub(crate) fn inputs(cell: &Cell, device: &Device) -> Result<Operands, String> {
    let drawn =
        Operands::draw_by(device, cell.problem(), None, Arrangement::Bhsd, Distribution::Normal, SEED);
    drawn.map_err(|error| error.to_string())
}

/// Calls of a cell.
fn calls<'a>(cell: &Cell, device: &'a Device, operands: &'a Operands) -> Calls<'a> {
    let calls = Calls::new(device, operands, Arrangement::Bhsd);
    if cell.pass == Passes::Both { calls.with_forward() } else { calls }
}

/// The checksums of q, k and v.
pub(crate) fn checksums(operands: &Operands) -> [u32; 3] {
    [&operands.q, &operands.k, &operands.v].map(peers::checksum)
}
