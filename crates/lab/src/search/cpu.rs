//! The gates of the CPU engine's schedules: only the static one, by the knobs. Its code is already compiled, so there
//! is nothing to assemble, and it runs where it is tested, so there is nothing to simulate.

use flashcore::{Problem, cpu};

use super::gates::Gates;
use super::space::Space;

/// Bytes that the rows of a task may take: beyond this no cache holds them.
const MOST_TASK_BYTES: usize = 4 << 20;

/// The schedules of the CPU engine that are worth trying on this many cores.
pub fn space(cores: usize) -> Space {
    let mut members = Vec::new();
    for block_q in [16, 48, 96, 144, 192, 288, 384, 576] {
        for block_k in [32, 64, 96, 128, 192, 256] {
            for split_k in [256, 512, 1024, 2048] {
                for threads in (1..=cores).filter(|threads| threads * 2 >= cores) {
                    members.push(format!(
                        "block_q={block_q},block_k={block_k},split_k={split_k},threads={threads}"
                    ));
                }
            }
        }
    }
    Space::of(members)
}

/// What the engine would choose for a problem.
pub fn incumbent(problem: &Problem) -> String {
    cpu::Engine::new().schedule(problem.head_dim, problem.head_dim_v).to_string()
}

/// The gates of the CPU engine for some problems.
pub struct CpuGates {
    problems: Vec<Problem>,
    cores: usize,
}

impl CpuGates {
    /// For problems on this many cores.
    pub fn new(problems: Vec<Problem>, cores: usize) -> Self {
        Self { problems, cores }
    }

    fn schedule(candidate: &str) -> Result<cpu::Schedule, String> {
        let schedule: cpu::Schedule =
            candidate.parse().map_err(|error: flashcore::Error| error.to_string())?;
        match schedule.knobs().into_iter().find(|&(_, value)| value == 0) {
            Some((knob, _)) => Err(format!("{knob} is 0 or missing; a candidate says every knob")),
            None => Ok(schedule),
        }
    }
}

impl Gates for CpuGates {
    fn check(&self, candidate: &str, case: usize) -> Result<(), String> {
        let schedule = Self::schedule(candidate)?;
        if schedule.threads > self.cores {
            return Err(format!("{} threads on {} cores", schedule.threads, self.cores));
        }
        let Problem { head_dim, head_dim_v, .. } = self.problems[case];
        let bytes = schedule.block_q.saturating_mul(4 * (head_dim + head_dim_v + schedule.block_k));
        if bytes > MOST_TASK_BYTES {
            return Err(format!("a task of {bytes} bytes; {MOST_TASK_BYTES} are the most"));
        }
        Ok(())
    }

    /// The knobs' effective values in a case: beyond the problem's own sizes they change nothing.
    fn assemble(&self, candidate: &str, case: usize) -> Result<String, String> {
        let mut schedule = Self::schedule(candidate)?;
        let problem = &self.problems[case];
        schedule.block_q = schedule.block_q.min(problem.group() * problem.len_q);
        schedule.block_k = schedule.block_k.min(problem.len_k);
        schedule.split_k = schedule.split_k.min(problem.len_k);
        Ok(schedule.to_string())
    }

    fn simulate(&self, _candidate: &str, _case: usize) -> Result<(), String> {
        Ok(())
    }

    /// The gates would take cores from what is timed.
    fn can_overlap(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::DType;

    fn gates() -> CpuGates {
        CpuGates::new(vec![Problem::new(1, 2, 128, 64, DType::F16)], 2)
    }

    #[test]
    fn the_static_gate_refuses_threads_and_tasks_that_do_not_fit() {
        let check = |text: &str| gates().check(text, 0);
        assert_eq!(check("block_q=48,block_k=64,split_k=512,threads=2"), Ok(()));
        assert!(check("block_q=48,block_k=64,split_k=512,threads=3").unwrap_err().contains("cores"));
        assert!(check("block_q=99999999,block_k=64,split_k=512,threads=1").unwrap_err().contains("bytes"));
        assert!(check("block_q=48").unwrap_err().contains("block_k"));
        assert!(check("tiles=4").is_err());
    }

    #[test]
    fn knobs_beyond_the_problem_make_one_candidate() {
        let of = |text: &str| gates().assemble(text, 0);
        let small = of("block_q=192,block_k=128,split_k=512,threads=2");
        assert_eq!(small, of("block_q=288,block_k=256,split_k=1024,threads=2"));
        assert_ne!(small, of("block_q=48,block_k=128,split_k=512,threads=2"));
    }

    #[test]
    fn every_member_of_the_space_passes_on_its_cores() {
        for member in space(2).members() {
            assert_eq!(gates().check(member, 0), Ok(()), "{member}");
        }
    }
}
