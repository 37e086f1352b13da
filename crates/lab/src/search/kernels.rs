//! The gates of GPU kernels: the schedule's own check, the assembler, and the simulator.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use flashcore::plan::{Hardware, Kernel, Plan, Schedule};
use flashcore::sim::{AsyncMode, Config, SimGpu};
use flashcore::{DType, Device, Mask, Name, Pass, Problem};
use flashcore_kernels::{sm80, sm90};
use flashcore_ptx::ptxas::Ptxas;

use flashcore_search::hash;

use super::gates::Gates;
use super::space::Space;
use crate::gpu::host::{Host, Kind};
use crate::gpu::pool::{Pool, Stored};
use crate::gpu::protocol::{Asked, Request};
use crate::gpu::worker::SCHEDULE;
use crate::guarded::Arrangement;
use crate::inputs::Distribution;
use crate::micro::Costs;
use crate::operands::Operands;

/// Every schedule of a kernel's search space.
pub fn space(kernel: Kernel) -> Space {
    let texts: Vec<String> = match kernel {
        Kernel::Sm80Fwd => {
            sm80::fwd::Schedule::grid().into_iter().map(|it| Schedule::Sm80Fwd(it).to_string()).collect()
        }
        Kernel::Sm90Fwd => {
            sm90::fwd::Schedule::grid().into_iter().map(|it| Schedule::Sm90Fwd(it).to_string()).collect()
        }
        Kernel::Scalar => (1..=8).map(|warps| format!("scalar:warps={warps}")).collect(),
        Kernel::Sm80Mma => (1..=8).map(|n| format!("sm80_mma:block_n={}", 16 * n)).collect(),
        Kernel::Sm90Bwd => (2..=4)
            .flat_map(|stages| [0, 1].map(|turns| format!("stages={stages},pingpong={turns}")))
            .flat_map(|rest| [64, 128].map(|rows| format!("sm90_bwd:block_m={rows},{rest}")))
            .flat_map(|rest| ["", ",rotate=1", ",rounds=1"].map(|order| format!("{rest}{order}")))
            .collect(),
        Kernel::Sm90BwdWide => [2, 3]
            .into_iter()
            .flat_map(|stages| [0, 1].map(|turns| format!("stages={stages},pingpong={turns}")))
            .flat_map(|rest| [0, 1].map(|pieces| format!("sm90_bwd_wide:{rest},piecewise={pieces}")))
            .collect(),
        // These compute nothing by themselves, or have no search space yet.
        Kernel::Combine
        | Kernel::BwdRows
        | Kernel::Sm80Bwd
        | Kernel::Sm90BwdFinish
        | Kernel::Sm80Decode
        | Kernel::Quantize
        | Kernel::Append => Vec::new(),
    };
    Space::of(texts)
}

/// What makes machine code.
pub enum Assembler {
    /// ptxas, which says what it spilled and whether it serialised a `wgmma`. Where there is a GPU, its driver then
    /// assembles too, ahead of time: it leaves the code in its cache, where the device finds it.
    Ptxas(Ptxas, Option<Drivers>),
    /// The driver, in workers of its own. It leaves the code in its cache, where the device finds it.
    Driver(Drivers),
    /// None: the gate lets everything pass, and candidates are identified by their PTX.
    Absent,
}

/// Workers that assemble with the driver.
pub struct Drivers {
    hosts: Vec<Mutex<Host>>,
    pools: Vec<Stored>,
    _folder: tempfile::TempDir,
}

/// Warp instructions that a launch may execute at the simulator gate: some seconds' worth, and far more than a correct
/// candidate needs for the small problems there.
const GATE_BUDGET: u64 = 100_000_000;

/// Elements of the inputs that an assembling worker is given; nothing is computed with them.
const FEW: usize = 1 << 12;

impl Drivers {
    /// This many workers on the GPU with this number.
    pub fn new(ordinal: u32, workers: usize) -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|error| format!("no folder for inputs: {error}"))?;
        let pool = |dtype| Pool::draw(dtype, FEW, 0).store(folder.path());
        let pools = vec![pool(DType::F16)?, pool(DType::BF16)?, pool(DType::F8E4M3)?];
        let hosts = (0..workers.max(1)).map(|_| Mutex::new(Host::new(Kind::Ours, ordinal))).collect();
        Ok(Self { hosts, pools, _folder: folder })
    }

    /// Assembles a schedule for a problem's kind; says why not where it spills.
    fn assemble(&self, candidate: &str, problem: &Problem) -> Result<(), String> {
        let at = rayon::current_thread_index().unwrap_or(0) % self.hosts.len();
        let mut host = self.hosts[at].lock().unwrap_or_else(PoisonError::into_inner);
        let pool = self.pools.iter().find(|pool| pool.dtype == problem.dtype.name());
        let pool = pool.ok_or("on a GPU f16, bf16 and f8 are timed")?;
        // The code depends only on the problem's kind, so the smallest of its kind will do.
        let mut small = problem.with_kv(1, 1);
        (small.batch, small.heads_q, small.len_q) =
            (1, problem.group(), if problem.mask == Mask::None { 1 } else { 2 });
        small.len_k = small.len_q;
        let request = Request::Plan { who: format!("{SCHEDULE}{candidate}") };
        let reply = host.ask_about(pool, &Asked::of(&small), 1, &request)?;
        match reply["local_bytes"].as_u64() {
            Some(0) => Ok(()),
            Some(bytes) => Err(format!("the driver spills {bytes} bytes per thread")),
            None => Err("the driver does not say what it spills".into()),
        }
    }
}

/// The gates of a GPU's kernels for some problems.
pub struct KernelGates {
    hardware: Hardware,
    problems: Vec<Problem>,
    assembler: Assembler,
    /// What became of each PTX text, by its hash: cases of one kind share one module.
    assembled: Mutex<HashMap<String, Result<String, String>>>,
    simulated: Mutex<HashMap<String, Result<(), String>>>,
    costs: Costs,
    /// The predicted cost of each candidate, from the simulator's counts and the instruction costs.
    guesses: Mutex<HashMap<String, f64>>,
}

/// Multiprocessors of the simulated GPU: so few that persistent blocks have several tiles each.
const FEW_SMS: u32 = 2;

/// The most keys of a simulated case.
const MOST_KEYS: usize = 1100;

impl KernelGates {
    /// For problems on some hardware.
    pub fn new(hardware: Hardware, problems: Vec<Problem>, assembler: Assembler) -> Self {
        Self {
            hardware,
            problems,
            assembler,
            assembled: Mutex::default(),
            simulated: Mutex::default(),
            costs: Costs::nominal(),
            guesses: Mutex::default(),
        }
    }

    /// With costs of instructions that were measured, for the guesses that order candidates.
    pub fn with_costs(self, costs: Costs) -> Self {
        Self { costs, ..self }
    }

    fn plan(&self, candidate: &str, case: usize) -> Result<Plan, String> {
        let schedule: Schedule = candidate.parse().map_err(|error| format!("{error}"))?;
        Plan::with_schedule(&self.problems[case], &self.hardware, schedule).map_err(|error| error.to_string())
    }

    /// Assembles a module, or looks up the earlier result.
    fn machine_code(&self, candidate: &str, plan: &Plan) -> Result<String, String> {
        let module = plan.main().module(plan.target).map_err(|error| error.to_string())?;
        let ptx = module.to_string();
        let key = hash(ptx.as_bytes());
        let lock = || self.assembled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(&key) {
            return known.clone();
        }
        let made = match &self.assembler {
            Assembler::Absent => Ok(key.clone()),
            Assembler::Driver(drivers) => drivers.assemble(candidate, &plan.problem).map(|()| key.clone()),
            Assembler::Ptxas(ptxas, drivers) => match ptxas.assemble_text(&ptx, plan.target) {
                Err(error) => Err(error.to_string()),
                Ok(assembled) => {
                    let spilled: u32 =
                        assembled.kernels.iter().map(|it| it.spill_store_bytes + it.spill_load_bytes).sum();
                    let serialised = assembled.serialised_wgmma().next();
                    match serialised {
                        _ if spilled > 0 => Err(format!("ptxas spills {spilled} bytes")),
                        Some(message) => Err(format!("ptxas serialises wgmma: {message}")),
                        None => {
                            let ahead = drivers.as_ref().map(|it| it.assemble(candidate, &plan.problem));
                            ahead.unwrap_or(Ok(())).map(|()| hash(&assembled.cubin))
                        }
                    }
                }
            },
        };
        lock().insert(key, made.clone());
        made
    }

    /// A small problem of a case's kind, in which tiles are full, partial and several.
    fn small(&self, plan: &Plan, block_n: usize, stages: usize) -> Problem {
        let problem = self.problems[plan_case(&self.problems, &plan.problem)];
        let rows = plan.main().schedule.geometry(&plan.main().spec).rows as usize;
        let len_k = (block_n * (stages + 1) + 9).min(MOST_KEYS);
        let mut small = problem.with_kv(1, len_k);
        (small.batch, small.heads_q, small.len_q) = (1, problem.group().min(2), rows + 7);
        if small.heads_q == 1 {
            small.batch = 2;
        }
        small
    }

    fn run_simulated(&self, candidate: &str, plan: &Plan) -> Result<(), String> {
        let (block_n, stages) = match plan.main().schedule {
            Schedule::Sm90Fwd(it) => (it.block_n, it.stages),
            Schedule::Sm80Fwd(it) => (it.block_n, it.stages),
            Schedule::Sm80Mma(it) => (it.block_n, 1),
            Schedule::Sm90Bwd(it) => (sm90::bwd::KEYS, it.stages),
            Schedule::Sm90BwdWide(it) => (sm90::bwd::wide::KEYS, it.stages),
            Schedule::Scalar(_)
            | Schedule::Combine(_)
            | Schedule::BwdRows(_)
            | Schedule::Quantize(_)
            | Schedule::Append(_)
            | Schedule::Sm90BwdFinish(_) => (32, 1),
            Schedule::Sm80Bwd(it) => (it.walk, it.stages),
            Schedule::Sm80Decode(it) => (it.keys, it.stages),
        };
        // An accepted candidate must also be right where lse is wanted.
        let problem = self.small(plan, block_n as usize, stages as usize);
        let backward = problem.pass == Pass::Backward;
        let problem = if backward { problem } else { problem.with_lse() };
        let rows = plan.main().schedule.geometry(&plan.main().spec).rows;
        let operands = Operands::draw(problem, None, Arrangement::Bhsd, Distribution::Normal, 11);
        let yardstick = operands.yardstick();
        for mode in [AsyncMode::Late, AsyncMode::Early] {
            let config = Config { async_mode: mode, threads: 1, budget: GATE_BUDGET, ..Config::default() };
            let gpu = SimGpu::new(plan.target)
                .with_sms(FEW_SMS)
                .with_schedule(plan.main().schedule)
                .with_config(config);
            let (attention, device) = (operands.attention(), Device::sim(gpu.clone()));
            let given = if backward {
                let found = attention.backward(&device, &operands.given());
                found.map(|of| vec![(Name::Dq, of.dq), (Name::Dk, of.dk), (Name::Dv, of.dv)])
            } else {
                let (q, k, v) = (operands.q.view(), operands.k.view(), operands.v.view());
                let found = attention.with_lse().run(&device, &q, &k, &v);
                found.map(|of| {
                    [(Name::O, of.o)].into_iter().chain(of.lse.map(|lse| (Name::Lse, lse))).collect()
                })
            };
            let given = given.map_err(|error| format!("{problem}: {error}"))?;
            let given: Vec<_> = given.into_iter().map(|(name, of)| (name, of.to_f32())).collect();
            if !yardstick.judge(&given).passed() {
                return Err(format!("{problem} with asynchronous effects {mode:?}: wrong in the simulator"));
            }
            if let Some(report) = gpu.last_report() {
                // Tiles are computed whole, even where they are partly empty.
                let whole = |len: usize, tile: u32| (len.div_ceil(tile as usize) * tile as usize) as f64;
                let pairs = whole(problem.len_q, rows) * whole(problem.len_k, block_n);
                let guess = self.costs.predict(&report.stats, pairs);
                self.guesses.lock().unwrap_or_else(PoisonError::into_inner).insert(candidate.into(), guess);
            }
        }
        Ok(())
    }
}

/// Which of the cases a problem is.
fn plan_case(problems: &[Problem], problem: &Problem) -> usize {
    problems.iter().position(|known| known == problem).unwrap_or(0)
}

impl Gates for KernelGates {
    fn check(&self, candidate: &str, case: usize) -> Result<(), String> {
        self.plan(candidate, case).map(|_| ())
    }

    fn assemble(&self, candidate: &str, case: usize) -> Result<String, String> {
        let plan = self.plan(candidate, case)?;
        let code = self.machine_code(candidate, &plan)?;
        // One binary launched in two ways is two candidates.
        let launches: Vec<String> = plan
            .launches
            .iter()
            .map(|it| format!("{:?}x{}/{}/{}", it.grid, it.threads, it.cluster, it.shared_bytes))
            .collect();
        Ok(format!("{code}/{}", launches.join("+")))
    }

    fn simulate(&self, candidate: &str, case: usize) -> Result<(), String> {
        let plan = self.plan(candidate, case)?;
        let key = format!("{candidate} {:?}", plan.main().spec);
        let lock = || self.simulated.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(&key) {
            return known.clone();
        }
        let result = self.run_simulated(candidate, &plan);
        lock().insert(key, result.clone());
        result
    }

    fn guess(&self, candidate: &str) -> Option<f64> {
        self.guesses.lock().unwrap_or_else(PoisonError::into_inner).get(candidate).copied()
    }

    fn can_overlap(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::plan::Target;

    fn gates(target: Target) -> KernelGates {
        let problems = vec![
            Problem::new(1, 8, 512, 64, DType::F16),
            Problem::new(4, 16, 512, 64, DType::F16).with_mask(Mask::Causal),
        ];
        KernelGates::new(Hardware::typical(target), problems, Assembler::Absent)
    }

    #[test]
    fn the_static_gate_leaves_some_of_every_kernels_space() {
        for (kernel, target) in [(Kernel::Sm80Fwd, Target::Sm89), (Kernel::Sm90Fwd, Target::Sm90a)] {
            let (gates, space) = (gates(target), space(kernel));
            let left = space.members().iter().step_by(17).filter(|text| gates.check(text, 0).is_ok()).count();
            let all = space.members().len().div_ceil(17);
            assert!(left * 20 > all && left < all, "{kernel}: {left} of {all}");
        }
        assert!(gates(Target::Sm80).check("sm80_fwd:block=3", 0).is_err());
    }

    #[test]
    fn schedules_that_emit_one_code_have_one_identity_per_launch() {
        let gates = gates(Target::Sm90a);
        let text = |pairs: u32| {
            format!(
                "sm90_fwd:warpgroups=2,block_n=128,stages=2,q_stages=1,ctas=1,split=1,pingpong=1,lazy=1,poly=0,\
                 persistent=1,pairs={pairs}"
            )
        };
        // Without a mask there are no long and short tiles to pair.
        assert_eq!(gates.assemble(&text(0), 0), gates.assemble(&text(1), 0));
        assert_ne!(gates.assemble(&text(0), 1), gates.assemble(&text(1), 1));
        assert_ne!(gates.assemble(&text(0), 0), gates.assemble(&text(0), 1));
    }

    #[test]
    fn the_simulator_passes_right_kernels() {
        let gates = gates(Target::Sm80);
        let text = "sm80_fwd:block_m=64,block_n=32,warps=4,stages=2,q_in_regs=1,order=longest";
        for case in 0..2 {
            assert_eq!(gates.simulate(text, case), Ok(()));
        }
    }

    #[test]
    fn the_simulator_refuses_exponentials_that_are_too_rough_for_lse() {
        let gates = gates(Target::Sm90a);
        let text = |poly: u32| {
            format!(
                "sm90_fwd:warpgroups=1,block_n=64,stages=2,q_stages=1,ctas=1,split=1,pingpong=0,lazy=1,poly={poly},\
                 persistent=0,pairs=0"
            )
        };
        assert_eq!(gates.simulate(&text(0), 0), Ok(()));
        assert!(gates.simulate(&text(4), 0).unwrap_err().contains("wrong in the simulator"));
    }

    #[test]
    fn ptxas_refuses_what_spills_and_names_code_by_its_bytes() {
        let Some(ptxas) = Ptxas::find_or_skip().unwrap() else { return };
        let gates = KernelGates { assembler: Assembler::Ptxas(ptxas, None), ..gates(Target::Sm80) };
        let text =
            |n: u32| format!("sm80_fwd:block_m=64,block_n={n},warps=4,stages=2,q_in_regs=1,order=head");
        let (small, large) = (gates.assemble(&text(32), 0).unwrap(), gates.assemble(&text(64), 0).unwrap());
        assert_ne!(small, large);
        assert_eq!(gates.assemble(&text(32), 0), Ok(small));
    }
}
