//! The highest rates a machine can reach, measured once and kept, and how near a kernel comes to them.
//!
//! A ceiling is the best rate of one thing alone: products that never leave the registers or shared memory, copies,
//! exponentials. Attention needs all three at once, so the **floor** of a problem is the longest of the three times
//! that it would take at these rates, and its roofline figure is the floor divided by its time.

use std::time::Duration;

use flashcore::{Pass, Problem, cpu};
use serde::{Deserialize, Serialize};

use crate::evidence::kept;
use crate::files;

/// The measured ceilings of a machine. What was not measured is absent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// The machine that they are of.
    pub machine: String,
    /// When they were measured, in UTC.
    pub created: String,
    /// Products: f16 with f32 sums in the tensor cores of a GPU, f32 multiply-adds of a CPU. In units of 1e12
    /// floating-point operations per second.
    pub matmul_tflops: Option<f64>,
    /// Bytes read and written by a copy in a GPU's memory, bytes read by a CPU. In units of 1e9 per second.
    pub memory_gbytes: Option<f64>,
    /// Exponentials, in units of 1e9 per second.
    pub exp_gops: Option<f64>,
    /// An empty kernel from an event before it to one after it, in microseconds; a GPU's only.
    pub launch_us: Option<f64>,
    /// The host's own time for launching it.
    pub launch_host_us: Option<f64>,
}

/// What limits a problem at the ceilings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// The products.
    Matmul,
    /// The bytes that must move.
    Memory,
    /// The exponentials.
    Exponentials,
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Bound::Matmul => "products",
            Bound::Memory => "memory",
            Bound::Exponentials => "exponentials",
        })
    }
}

/// A time compared with the ceilings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Roofline {
    /// Time that the products alone would take, in microseconds.
    pub matmul_us: f64,
    /// Time that moving the bytes alone would take.
    pub memory_us: f64,
    /// Time that the exponentials alone would take; absent where their rate was not measured.
    pub exp_us: Option<f64>,
    /// The longest of them.
    pub floor_us: f64,
    /// Which of the three is the longest.
    pub bound: Bound,
    /// Floating-point operations per byte that must move.
    pub intensity: f64,
    /// The floor as a share of the time; 1 is the machine's limit.
    pub share: f64,
    /// The rate of the products as a share of their ceiling.
    pub matmul_share: f64,
    /// The rate of the bytes as a share of theirs.
    pub memory_share: f64,
}

/// What a call has to do, which rates and floors are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Floating-point operations of its products, causal counted half.
    pub flops: f64,
    /// Bytes that must move.
    pub bytes: f64,
    /// Exponentials: in each pass one per pair of a query and a key that it sees.
    pub exponentials: f64,
    /// Products that tensor cores do in the time of one of 16 bits.
    pub at_once: f64,
}

impl Work {
    /// Of a problem.
    pub fn of(problem: &Problem) -> Self {
        let width = (2 * (problem.head_dim + problem.head_dim_v)) as f64;
        Self {
            flops: problem.flops(),
            bytes: problem.min_bytes(),
            exponentials: problem.with_pass(Pass::Forward).flops() / width,
            at_once: products_at_once(problem),
        }
    }

    /// One after the other, of products of one width.
    pub fn and(self, other: Self) -> Self {
        Self {
            flops: self.flops + other.flops,
            bytes: self.bytes + other.bytes,
            exponentials: self.exponentials + other.exponentials,
            at_once: self.at_once,
        }
    }
}

/// Products that tensor cores do in the time of one of 16 bits, which is what is measured. A CPU does all in f32.
pub fn products_at_once(problem: &Problem) -> f64 {
    if problem.dtype.is_f8() { 2.0 } else { 1.0 }
}

impl Ceilings {
    /// Compares a time in microseconds with these. Absent where products or memory were not measured.
    pub fn roofline(&self, work: &Work, us: Option<f64>) -> Option<Roofline> {
        let us = us.filter(|&us| us > 0.0)?;
        let Work { flops, bytes, exponentials, at_once } = *work;
        let at_once = self.launch_us.map_or(1.0, |_| at_once);
        let matmul_us = flops / (at_once * self.matmul_tflops?) / 1e6;
        let memory_us = bytes / self.memory_gbytes? / 1e3;
        let exp_us = self.exp_gops.map(|rate| exponentials / rate / 1e3);
        let mut longest = (matmul_us, Bound::Matmul);
        for (time, bound) in [(Some(memory_us), Bound::Memory), (exp_us, Bound::Exponentials)] {
            longest = time.filter(|&time| time > longest.0).map_or(longest, |time| (time, bound));
        }
        let (floor_us, bound) = longest;
        Some(Roofline {
            matmul_us,
            memory_us,
            exp_us,
            floor_us,
            bound,
            intensity: flops / bytes,
            share: floor_us / us,
            matmul_share: matmul_us / us,
            memory_share: memory_us / us,
        })
    }

    /// Measures a CPU's ceilings on this many threads, in about three times `budget`.
    pub fn of_cpu(machine: &str, created: &str, isa: cpu::Isa, threads: usize, budget: Duration) -> Self {
        Self {
            machine: machine.into(),
            created: created.into(),
            matmul_tflops: Some(cpu::fma_peak(isa, threads, budget) / 1e3),
            memory_gbytes: Some(cpu::read_bandwidth(isa, threads, budget)),
            exp_gops: Some(cpu::exp_rate(isa, threads, budget)),
            launch_us: None,
            launch_host_us: None,
        }
    }

    /// Those that were kept for a machine; absent where none were, an error where the file cannot be read.
    pub fn kept(machine: &str) -> Result<Option<Self>, String> {
        let Ok(path) = kept::path("ceilings", machine, NAME) else { return Ok(None) };
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(files::explain("read", &path, &error)),
        };
        let found: Self = serde_json::from_slice(&text).map_err(|error| {
            format!("{}: {error}; flashcore ceilings measures them again", path.display())
        })?;
        Ok(Some(found).filter(|found| found.machine == machine))
    }

    /// Keeps them for the machine.
    pub fn keep(&self) -> Result<std::path::PathBuf, String> {
        kept::keep("ceilings", &self.machine, NAME, self)
    }
}

/// The file's name in the machine's folder.
const NAME: &str = "ceilings";

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::{DType, Mask};

    fn ceilings() -> Ceilings {
        Ceilings {
            machine: "test".into(),
            created: "now".into(),
            matmul_tflops: Some(800.0),
            memory_gbytes: Some(4000.0),
            exp_gops: Some(4000.0),
            launch_us: Some(2.0),
            launch_host_us: None,
        }
    }

    #[test]
    fn a_long_problem_is_bound_by_products_and_a_decode_by_memory() {
        let long = Problem::new(1, 16, 16384, 128, DType::F16);
        let roofline = ceilings().roofline(&Work::of(&long), Some(5000.0)).unwrap();
        assert_eq!(roofline.bound, Bound::Matmul);
        let floor = 4.0 * 16.0 * 16384.0 * 16384.0 * 128.0 / 800e6;
        assert!((roofline.floor_us - floor).abs() < 1e-6 && (roofline.share - floor / 5000.0).abs() < 1e-9);
        let decode = Problem::new(1, 32, 1, 128, DType::BF16).with_kv(8, 32768);
        assert_eq!(ceilings().roofline(&Work::of(&decode), Some(50.0)).unwrap().bound, Bound::Memory);
        let narrow = Problem::new(1, 16, 8192, 32, DType::F16);
        assert_eq!(ceilings().roofline(&Work::of(&narrow), Some(9e3)).unwrap().bound, Bound::Exponentials);
    }

    #[test]
    fn one_exponential_is_counted_for_every_pair_and_half_of_them_under_a_causal_mask() {
        let problem = Problem::new(2, 3, 64, 128, DType::F16).with_head_dim_v(64);
        let exponentials = |problem: Problem| Work::of(&problem).exponentials;
        assert!((exponentials(problem) - 2.0 * 3.0 * 64.0 * 64.0).abs() < 1e-6);
        let causal = exponentials(problem.with_mask(Mask::Causal));
        assert!(causal < 0.6 * exponentials(problem), "{causal}");
        assert_eq!(exponentials(problem.backward()), exponentials(problem), "whatever its products are");
        let both = Work::of(&problem).and(Work::of(&problem.backward()));
        assert_eq!(both.exponentials, 2.0 * exponentials(problem));
    }

    #[test]
    fn without_a_time_or_a_ceiling_there_is_no_share() {
        let work = Work::of(&Problem::new(1, 8, 512, 64, DType::F16));
        assert_eq!(ceilings().roofline(&work, None), None);
        assert_eq!(ceilings().roofline(&work, Some(0.0)), None);
        assert_eq!(Ceilings { matmul_tflops: None, ..ceilings() }.roofline(&work, Some(5.0)), None);
        let matmul_us = |dtype| {
            let work = Work::of(&Problem::new(1, 2, 64, 64, dtype));
            ceilings().roofline(&work, Some(9.0)).unwrap().matmul_us
        };
        assert_eq!(matmul_us(DType::F8E4M3) * 2.0, matmul_us(DType::F16));
        let without_exp = Ceilings { exp_gops: None, ..ceilings() };
        assert_eq!(without_exp.roofline(&work, Some(5.0)).unwrap().exp_us, None);
    }

    #[test]
    fn a_cpu_has_all_three_rates() {
        let found = Ceilings::of_cpu("cpu", "now", cpu::Isa::Portable, 1, Duration::ZERO);
        for rate in [found.matmul_tflops, found.memory_gbytes, found.exp_gops] {
            assert!(rate.is_some_and(|rate| rate > 0.0), "{found:?}");
        }
        assert_eq!(found.launch_us, None);
    }
}
