//! `flashcore inspect`: the plan for a shape, what the assembler makes of its kernel, and what the simulator counts.

use clap::Args;
use flashcore::plan::{Hardware, Kernel, Plan, Schedule, Target};
use flashcore::sim::{Report as SimReport, SimGpu, Stats};
use flashcore::{DType, Device, Keys, Mask, Pass, Problem, Queries};
use flashcore_judge::placing;
use flashcore_ptx::ptxas::{Ptxas, PtxasError};
use serde::Serialize;

use super::screen::{Tone, say, toned};
use super::{EightBits, Exit, Json};
use crate::cases::Case;
use crate::evidence::Environment;
use crate::occupancy::Occupancy;
use crate::{memory, shapes};

#[derive(Args)]
pub struct Options {
    /// A shape by name, or BxHxSxD; or a whole problem, such as '16x32/8x4096x128 bf16 causal packed=18632'
    shape: String,
    /// With a causal mask
    #[arg(long)]
    causal: bool,
    /// f16, bf16 or f8
    #[arg(long)]
    dtype: Option<DType>,
    #[command(flatten)]
    eight: EightBits,
    /// What the code is for: sm_80, sm_89 or sm_90a
    #[arg(long, default_value = "sm_80", value_parser = target)]
    target: Target,
    /// forward or backward (gradients)
    #[arg(long, default_value = "forward")]
    pass: Pass,
    /// The kernel, with its default schedule: scalar, sm80_mma, sm80_fwd, sm90_fwd or, backward, sm80_bwd, sm90_bwd and sm90_bwd_wide
    #[arg(long, conflicts_with = "schedule")]
    kernel: Option<Kernel>,
    /// A schedule, as the plan prints it
    #[arg(long)]
    schedule: Option<Schedule>,
    /// Print the PTX, and nothing else
    #[arg(long)]
    ptx: bool,
    #[command(flatten)]
    json: Json,
}

pub(super) fn target(name: &str) -> Result<Target, String> {
    Target::from_name(name).ok_or_else(|| {
        format!("'{name}' is not a target; possible are {}", Target::ALL.map(Target::name).join(", "))
    })
}

/// What ptxas reported about the kernel.
#[derive(Serialize)]
struct Assembly {
    registers: u32,
    spill_bytes: u32,
    stack_bytes: u32,
    barriers: u32,
    cubin_bytes: usize,
    remarks: Vec<String>,
}

/// What the simulator counted.
#[derive(Serialize)]
pub(super) struct Counts {
    /// What was simulated: the shape itself, or a smaller one with the same tiles.
    problem: String,
    warp_instructions: u64,
    tensor_instructions: u64,
    mix: Vec<(&'static str, u64)>,
    shared_passes: u64,
    bank_conflicts: u64,
    /// The instructions with bank conflicts, and the passes that they lose.
    conflicting: Vec<(String, u64)>,
    global_requests: u64,
    sectors_per_request: f64,
    sector_efficiency: f64,
    warp_instructions_per_second: f64,
}

#[derive(Serialize)]
struct Report {
    problem: String,
    target: &'static str,
    kernel: &'static str,
    schedule: String,
    reason: String,
    grid: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    shared_limit: u32,
    instructions: usize,
    assembly: Option<Assembly>,
    /// Why there is no assembly.
    not_assembled: Option<String>,
    occupancy: Option<Occupancy>,
    counts: Counts,
}

pub fn inspect(options: &Options) -> Result<Exit, String> {
    options.json.check()?;
    let problem = if options.shape.contains(' ') {
        if options.causal || options.dtype.is_some() {
            let shape = &options.shape;
            return Err(format!("'{shape}' says its mask and dtype itself: leave out --causal and --dtype"));
        }
        options.shape.parse::<Problem>().map_err(|error| error.to_string())?.with_lse()
    } else {
        let named = shapes::parse(&options.shape)?;
        let mask = if options.causal || named.causal { Mask::Causal } else { Mask::None };
        let types = options.eight.types(options.dtype.unwrap_or(named.dtype));
        types.problem(named.shape, mask).with_lse()
    };
    let pass = if problem.pass == Pass::Backward { problem.pass } else { options.pass };
    let problem = problem.with_pass(pass).check().map_err(|error| error.to_string())?;
    let hardware = Hardware::typical(options.target);
    let plan = match (options.schedule, options.kernel) {
        (Some(schedule), _) => Plan::with_schedule(&problem, &hardware, schedule),
        (None, Some(kernel)) => Plan::with_kernel(&problem, &hardware, kernel),
        (None, None) => Plan::choose(&problem, &hardware),
    };
    let plan = plan.map_err(|error| error.to_string())?;
    let module = plan.main().module(plan.target).map_err(|error| error.to_string())?;
    if options.ptx {
        say(&module.to_string());
        return Ok(Exit::Pass);
    }
    let (assembly, not_assembled) = match Ptxas::find().and_then(|ptxas| ptxas.assemble(&module, plan.target))
    {
        Ok(assembled) => {
            let usage = assembled.kernels.first().ok_or("ptxas reported no kernel")?;
            let assembly = Assembly {
                registers: usage.registers,
                spill_bytes: usage.spill_store_bytes + usage.spill_load_bytes,
                stack_bytes: usage.stack_bytes,
                barriers: usage.barriers,
                cubin_bytes: assembled.cubin.len(),
                remarks: assembled.remarks.iter().map(|remark| remark.text.clone()).collect(),
            };
            (Some(assembly), None)
        }
        Err(error @ PtxasError::NotFound) => (None, Some(error.to_string())),
        Err(error) => return Err(error.to_string()),
    };
    let occupancy = assembly.as_ref().map(|assembly| {
        Occupancy::of(plan.target, plan.main().threads, assembly.registers, plan.main().shared_bytes)
    });
    let counts = count(&plan)?;
    let report = Report {
        problem: problem.to_string(),
        target: plan.target.name(),
        kernel: plan.kernel().name(),
        schedule: plan.main().schedule.to_string(),
        reason: plan.reason.clone(),
        grid: plan.main().grid,
        threads: plan.main().threads,
        shared_bytes: plan.main().shared_bytes,
        shared_limit: plan.target.max_shared_bytes(),
        instructions: module.kernels[0].body.len(),
        assembly,
        not_assembled,
        occupancy,
        counts,
    };
    say(&text(&plan, &report));
    options.json.write("flashcore.inspect/1", &Environment::read(), true, &report)?;
    Ok(Exit::Pass)
}

/// As much of the problem as the simulator runs in a moment: a few blocks and a few key tiles.
pub(super) fn reduced(plan: &Plan) -> Problem {
    let mut problem = plan.problem;
    let rows = plan.main().schedule.geometry(&plan.main().spec).rows as usize;
    problem.batch = problem.batch.min(1);
    problem.heads_kv = problem.heads_kv.min(1);
    problem.heads_q = problem.heads_kv * plan.problem.group();
    let square = problem.len_q == problem.len_k;
    problem.len_k = problem.len_k.min(512);
    problem.len_q = if square { problem.len_k } else { problem.len_q.min(2 * rows) };
    // One sequence, as it lies in the whole.
    if matches!(problem.queries, Queries::Packed { .. }) {
        problem.queries = Queries::Packed { total: problem.len_q };
    }
    problem.keys = match problem.keys {
        Keys::Packed { .. } => Keys::Packed { total: problem.len_k },
        Keys::Paged { page, .. } => Keys::Paged { page, pages: placing::pool(&[problem.len_k as u32], page) },
        other => other,
    };
    problem
}

pub(super) fn count(plan: &Plan) -> Result<Counts, String> {
    let problem = reduced(plan);
    let gpu = SimGpu::new(plan.target).with_schedule(plan.main().schedule);
    memory::check(&problem, memory::to_judge(&problem))?;
    let lengths = problem.key_lengths.then(|| vec![problem.len_k as u32; problem.batch]);
    let case = Case { key_lengths: lengths, seed: 0, ..Case::new("inspect", problem) };
    let run = case.operands().placed().run_on(&Device::sim(gpu.clone()));
    run.map_err(|error| format!("the simulator refuses this kernel: {error}"))?;
    let SimReport { stats, .. } = gpu.last_report().ok_or("the simulator left no report")?;
    Ok(Counts::new(&problem, &stats))
}

impl Counts {
    /// On one line, with what was simulated.
    pub(super) fn line(&self) -> String {
        format!(
            "{} warp instructions, {} of them tensor, {} bank conflicts in {} passes, {:.1} sectors per request, for {}",
            self.warp_instructions,
            self.tensor_instructions,
            self.bank_conflicts,
            self.shared_passes,
            self.sectors_per_request,
            self.problem
        )
    }

    fn new(problem: &Problem, stats: &Stats) -> Self {
        let mut mix: Vec<(&'static str, u64)> =
            stats.mix.iter().map(|(&class, &count)| (class, count)).collect();
        mix.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        let conflicting = stats.banks.iter().filter(|bank| bank.conflicts() > 0);
        let (requests, sectors, bytes) =
            stats.sectors.iter().fold((0, 0, 0), |(requests, sectors, bytes), site| {
                (requests + site.requests, sectors + site.sectors, bytes + site.bytes)
            });
        Self {
            problem: problem.to_string(),
            warp_instructions: stats.warp_instructions,
            tensor_instructions: stats.tensor_instructions,
            mix,
            shared_passes: stats.banks.iter().map(|bank| bank.wavefronts).sum(),
            bank_conflicts: stats.bank_conflicts(),
            conflicting: conflicting.map(|bank| (bank.site.to_string(), bank.conflicts())).collect(),
            global_requests: requests,
            sectors_per_request: sectors as f64 / requests.max(1) as f64,
            sector_efficiency: bytes as f64 / (32 * sectors.max(1)) as f64,
            warp_instructions_per_second: stats.rate(),
        }
    }
}

fn text(plan: &Plan, report: &Report) -> String {
    let mut lines = vec![toned(Tone::Strong, "plan"), plan.to_string()];
    lines.push(toned(Tone::Strong, "\nassembler"));
    match (&report.assembly, &report.not_assembled) {
        (Some(assembly), _) => {
            let tone = if assembly.spill_bytes > 0 { Tone::Bad } else { Tone::Good };
            lines.push(format!("registers {} per thread", assembly.registers));
            lines.push(toned(tone, &format!("spilled   {} bytes", assembly.spill_bytes)));
            lines.push(format!(
                "code      {} PTX instructions, {} bytes",
                report.instructions, assembly.cubin_bytes
            ));
            lines.extend(assembly.remarks.iter().map(|remark| toned(Tone::Bad, remark)));
        }
        (None, why) => lines.push(format!("not run: {}", why.as_deref().unwrap_or("unknown"))),
    }
    if let Some(occupancy) = &report.occupancy {
        lines.push(format!("occupancy {occupancy}"));
    }
    let counts = &report.counts;
    lines.push(toned(Tone::Strong, &format!("\nsimulator, for {}", counts.problem)));
    lines.push(format!(
        "executed  {} warp instructions, {} of them tensor",
        counts.warp_instructions, counts.tensor_instructions
    ));
    let share = |count: u64| 100.0 * count as f64 / counts.warp_instructions.max(1) as f64;
    let mix: Vec<String> =
        counts.mix.iter().take(8).map(|&(class, count)| format!("{class} {:.0} %", share(count))).collect();
    lines.push(format!("mix       {}", mix.join(", ")));
    let tone = if counts.bank_conflicts > 0 { Tone::Bad } else { Tone::Good };
    lines.push(toned(
        tone,
        &format!("banks     {} conflicts in {} passes", counts.bank_conflicts, counts.shared_passes),
    ));
    lines.extend(counts.conflicting.iter().take(6).map(|(site, lost)| format!("          {lost} at {site}")));
    lines.push(format!(
        "global    {} requests, {:.1} sectors each, {:.0} % of their bytes used",
        counts.global_requests,
        counts.sectors_per_request,
        100.0 * counts.sector_efficiency
    ));
    lines.push(format!(
        "speed     {:.1} M warp instructions per second",
        counts.warp_instructions_per_second / 1e6
    ));
    lines.join("\n")
}
