//! `flashcore profile`: what bounds a kernel, from Nsight Compute where it is, and from what can be known without it.

use std::process::Command;
use std::time::Duration;

use clap::Args;
use flashcore::cuda::Cuda;
use flashcore::plan::{Hardware, Kernel, Plan, Schedule, Target};
use flashcore::{DType, Mask, Pass};
use flashcore_ptx::ptxas::Ptxas;
use serde::Serialize;

use super::inspect::{self, Counts};
use super::screen::{Tone, say, toned};
use super::{EightBits, Exit, Json, timeline};
use crate::bench::Bench as _;
use crate::bench::cells::{Cell, Member};
use crate::bench::gpu::{Cache, GpuBench, Ours, Regime, Setup};
use crate::ceilings::Work;
use crate::evidence::{Environment, schemas};
use crate::ncu::{self, Bound, Figure, Ncu};
use crate::occupancy::Occupancy;
use crate::search::config;
use crate::stats::MARGIN;

#[derive(Args)]
#[command(after_help = "\
With a GPU and Nsight Compute ($FLASHCORE_NCU, PATH, or a CUDA toolkit) its counters say what bounds the kernel; clocks are \
left as they are, and a metric that the GPU does not have is null. Without it, or where the driver refuses its counters, \
the figures of ptxas and of the driver, the mix of the machine code, the occupancy, the roofline and the simulator's counts \
stand for themselves, each with its source.

With --trace or --svg the kernel is compiled with stamps at its sections and run once: a timeline, a table of where its time \
goes, and what the stamps cost. Open the trace at https://ui.perfetto.dev. With --device sim the simulator runs it, and time is \
counted in instructions.")]
pub struct Options {
    /// A shape by name, or BxHxSxD, with :causal, :full, :backward, :f16 or :bf16 after it; or a whole problem, such as
    /// '8x32/8x1/4096x128 bf16 key-lengths page=16/2051'
    #[arg(value_parser = config::target)]
    shape: config::Target,
    /// Without this machine's GPU: a typical one of sm_80, sm_89 or sm_90a
    #[arg(long, value_parser = inspect::target)]
    target: Option<Target>,
    /// A kernel with its default schedule instead of the planner's choice
    #[arg(long, value_name = "NAME", conflicts_with = "schedule")]
    kernel: Option<Kernel>,
    /// A schedule as plan prints it
    #[arg(long, value_name = "TEXT")]
    schedule: Option<Schedule>,
    #[command(flatten)]
    eight: EightBits,
    /// forward or backward (gradients)
    #[arg(long, default_value = "forward")]
    pass: Pass,
    #[command(flatten)]
    timeline: timeline::Options,
    #[command(flatten)]
    json: Json,
}

/// What ptxas says.
#[derive(Serialize)]
struct Assembled {
    source: String,
    registers: u32,
    spill_bytes: u32,
    barriers: u32,
    cubin_bytes: usize,
    serialised_wgmma: usize,
}

/// What the driver reports about the loaded code.
#[derive(Serialize)]
struct Loaded {
    registers: u64,
    local_bytes: u64,
    shared_bytes: u32,
}

/// Instructions of the machine code by kind, counted statically, not as executed.
#[derive(Serialize)]
struct Mix {
    source: &'static str,
    instructions: usize,
    kinds: Vec<(String, usize)>,
}

/// How the time compares with the ceilings.
#[derive(Serialize)]
struct Roofline {
    flops: f64,
    bytes: f64,
    /// Floating-point operations per byte that must move.
    intensity: f64,
    /// Measured by the kernel clock.
    time_us: Option<f64>,
    tflops: Option<f64>,
    /// The rate of a large matrix product, measured in the same run.
    matmul_tflops: Option<f64>,
    /// The rate on the data sheet.
    peak_tflops: Option<f64>,
}

#[derive(Serialize)]
struct Report {
    problem: String,
    device: String,
    target: &'static str,
    kernel: &'static str,
    schedule: String,
    reason: String,
    profiled: Option<Vec<Figure>>,
    /// Why there is no profile.
    not_profiled: Option<String>,
    bound: Option<Bound>,
    assembled: Option<Assembled>,
    loaded: Option<Loaded>,
    machine_code: Option<Mix>,
    occupancy: Option<Occupancy>,
    roofline: Roofline,
    simulated: Counts,
}

pub fn profile(options: &Options) -> Result<Exit, String> {
    options.json.check()?;
    let mut cell = options.shape.cell.clone();
    if options.eight.is_given() {
        cell.types = options.eight.types(cell.types.dtype);
    }
    if options.pass == Pass::Backward {
        cell.pass = options.pass.into();
    }
    let types = cell.types;
    if types.dtype == DType::F32 {
        return Err("on a GPU f16, bf16 and f8 are timed".into());
    }
    let problem = cell.problem().check().map_err(|error| error.to_string())?;
    let cuda =
        if options.target.is_some() || options.timeline.simulates() { None } else { Cuda::new(0).ok() };
    let hardware = match (&cuda, options.target) {
        (Some(cuda), _) => cuda.hardware().clone(),
        (None, target) => Hardware::typical(target.unwrap_or(Target::Sm90a)),
    };
    let plan = match (options.schedule, options.kernel) {
        (Some(schedule), _) => Plan::with_schedule(&problem, &hardware, schedule),
        (None, Some(kernel)) => Plan::with_kernel(&problem, &hardware, kernel),
        (None, None) => Plan::choose(&problem, &hardware),
    }
    .map_err(|error| error.to_string())?;
    if options.timeline.wanted() {
        return timeline::timeline(&options.timeline, &options.json, &plan, &hardware.name, cuda.as_ref());
    }
    let (profiled, not_profiled) = match counters(&cell, &plan, cuda.as_ref()) {
        Ok(figures) => (Some(figures), None),
        Err(why) => (None, Some(why)),
    };
    let (assembled, machine_code) = assemble(&plan)?;
    let registers = assembled.as_ref().map(|it| it.registers);
    let report = Report {
        problem: problem.to_string(),
        device: hardware.name.clone(),
        target: plan.target.name(),
        kernel: plan.kernel().name(),
        schedule: plan.main().schedule.to_string(),
        reason: plan.reason.clone(),
        bound: profiled.as_deref().and_then(ncu::bound),
        profiled,
        not_profiled,
        occupancy: registers.map(|registers| {
            Occupancy::of(plan.target, plan.main().threads, registers, plan.main().shared_bytes)
        }),
        loaded: cuda.as_ref().map(|cuda| loaded(cuda, &plan)).transpose()?,
        roofline: roofline(&cell, &plan, cuda.is_some()),
        assembled,
        machine_code,
        simulated: inspect::count(&plan)?,
    };
    say(&text(&report));
    options.json.write(schemas::PROFILE, &Environment::read(), true, &report)?;
    Ok(Exit::Pass)
}

/// The counters of one launch, or why there are none.
fn counters(cell: &Cell, plan: &Plan, cuda: Option<&Cuda>) -> Result<Vec<Figure>, String> {
    let cuda = cuda.ok_or("there is no GPU here")?;
    if cell.sequences.is_some() {
        return Err("sequences of lengths of their own are not profiled by Nsight Compute".into());
    }
    let ncu = Ncu::find()?;
    let capability = cuda.context().properties().compute_capability.to_string();
    let binary = std::env::current_exe().map_err(|error| format!("who am I? ({error})"))?;
    let mask = if cell.mask == Mask::Causal { "--causal" } else { "--no-causal" };
    let mut command: Vec<String> = [
        &binary.display().to_string(),
        "bench",
        &cell.shape.to_string(),
        mask,
        "--pass",
        cell.pass.name(),
        "--device",
        "cuda",
        "--no-peers",
        "--samples",
        "1",
        "--schedule",
        &plan.main().schedule.to_string(),
    ]
    .map(String::from)
    .to_vec();
    command.extend(cell.types.options());
    let module = plan.main().module(plan.target).map_err(|error| error.to_string())?;
    ncu.profile(&capability, &module.kernels[0].name, &command)
}

/// What ptxas makes of the kernel, and the mix of its machine code where nvdisasm stands beside ptxas.
fn assemble(plan: &Plan) -> Result<(Option<Assembled>, Option<Mix>), String> {
    let Ok(ptxas) = Ptxas::find() else { return Ok((None, None)) };
    let module = plan.main().module(plan.target).map_err(|error| error.to_string())?;
    let made = ptxas.assemble(&module, plan.target).map_err(|error| error.to_string())?;
    let usage = made.kernels.first().ok_or("ptxas reported no kernel")?;
    let assembled = Assembled {
        source: format!("ptxas {}", ptxas.version().unwrap_or_else(|_| "of unknown version".into())),
        registers: usage.registers,
        spill_bytes: usage.spill_store_bytes + usage.spill_load_bytes,
        barriers: usage.barriers,
        cubin_bytes: made.cubin.len(),
        serialised_wgmma: made.serialised_wgmma().count(),
    };
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let cubin = folder.path().join("kernel.cubin");
    std::fs::write(&cubin, &made.cubin).map_err(|error| error.to_string())?;
    let nvdisasm = ptxas.path().with_file_name("nvdisasm");
    let said = Command::new(nvdisasm).arg("-c").arg(&cubin).output().ok();
    let mix = said.filter(|it| it.status.success()).map(|it| mix(&String::from_utf8_lossy(&it.stdout)));
    Ok((Some(assembled), mix))
}

/// Counts the instructions of a disassembly by what stands before the first dot of each.
fn mix(disassembly: &str) -> Mix {
    let mut counts = std::collections::BTreeMap::<String, usize>::new();
    for line in disassembly.lines() {
        // A line is `/*0010*/ @!P0 LDG.E.64 R2, … ;`.
        let Some((_, rest)) = line.trim().strip_prefix("/*").and_then(|line| line.split_once("*/")) else {
            continue;
        };
        let opcode = rest.split_whitespace().find(|word| !word.starts_with('@'));
        let Some(kind) = opcode.and_then(|word| word.split(['.', ';']).next()) else { continue };
        if !kind.is_empty() && kind.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit()) {
            *counts.entry(kind.to_string()).or_default() += 1;
        }
    }
    let mut kinds: Vec<(String, usize)> = counts.into_iter().collect();
    kinds.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let instructions = kinds.iter().map(|(_, count)| count).sum();
    Mix { source: "nvdisasm of ptxas's code", instructions, kinds }
}

fn loaded(cuda: &Cuda, plan: &Plan) -> Result<Loaded, String> {
    let cuda = cuda.with_schedule(plan.main().schedule);
    let function = cuda.function(&plan.problem).map_err(|error| error.to_string())?;
    let attributes = function.attributes().map_err(|error| error.to_string())?;
    Ok(Loaded {
        registers: attributes.registers as u64,
        local_bytes: attributes.local_bytes as u64,
        shared_bytes: plan.main().shared_bytes,
    })
}

/// The kernel clock and the measured matrix product, where there is a GPU.
fn roofline(cell: &Cell, plan: &Plan, gpu: bool) -> Roofline {
    let Work { flops, bytes, .. } = cell.work();
    let mut roofline = Roofline {
        flops,
        bytes,
        intensity: flops / bytes,
        time_us: None,
        tflops: None,
        matmul_tflops: None,
        peak_tflops: None,
    };
    if !gpu {
        return roofline;
    }
    let setup = Setup {
        ordinal: 0,
        ours: Ours::Schedules(vec![plan.main().schedule.to_string()]),
        peers: vec!["flash".into()],
        cache: Cache::Warm,
        call_clock: false,
        first_call: false,
        warmups: 0,
        installed: &[],
        regime: Regime::Bursts,
        rounds: None,
        margin: MARGIN,
    };
    let member = Member::of_all(cell.clone());
    let Ok(mut bench) = GpuBench::start(setup, std::slice::from_ref(&member), &mut |_| {}) else {
        return roofline;
    };
    let outcome = bench.run(&member, Duration::from_secs(5), &|| false, &mut |_, _| {});
    roofline.time_us = outcome.ok().and_then(|outcome| outcome.ours()?.p50_us);
    roofline.tflops = roofline.time_us.map(|us| flops / us / 1e6);
    roofline.matmul_tflops = bench.facts().matmul_tflops;
    roofline.peak_tflops = bench.facts().peak_tflops;
    roofline
}

fn text(report: &Report) -> String {
    let mut lines = vec![
        format!("{} on {}", report.problem, report.device),
        format!("{}\n{}", report.schedule, report.reason),
    ];
    let heading = |text: &str| toned(Tone::Strong, text);
    match (&report.profiled, &report.not_profiled) {
        (Some(figures), _) => {
            lines.push(heading("\nNsight Compute"));
            for Figure { name, value, .. } in figures {
                let value = value.map_or("not available".into(), |value| format!("{value:.2}"));
                lines.push(format!("{name:<24} {value}"));
            }
        }
        (None, why) => {
            lines.push(format!("\nno counters: {}", why.as_deref().unwrap_or("unknown")));
        }
    }
    lines.push(report.bound.as_ref().map_or_else(
        || "bound     unknown without counters; the figures below stand for themselves".into(),
        |bound| heading(&format!("bound     {}", bound.verdict)),
    ));
    if let Some(it) = &report.assembled {
        lines.push(heading(&format!("\n{}", it.source)));
        lines.push(format!(
            "registers {}, spilled {} bytes, {} barriers, {} serialised wgmma, {} bytes of code",
            it.registers, it.spill_bytes, it.barriers, it.serialised_wgmma, it.cubin_bytes
        ));
    }
    if let Some(it) = &report.loaded {
        lines.push(format!(
            "driver    {} registers, {} bytes of local memory, {} bytes of shared memory",
            it.registers, it.local_bytes, it.shared_bytes
        ));
    }
    if let Some(it) = &report.machine_code {
        let share = |count: usize| 100.0 * count as f64 / it.instructions.max(1) as f64;
        let kinds: Vec<String> =
            it.kinds.iter().take(10).map(|(kind, count)| format!("{kind} {:.0} %", share(*count))).collect();
        lines.push(format!(
            "code      {} instructions: {} ({})",
            it.instructions,
            kinds.join(", "),
            it.source
        ));
    }
    if let Some(occupancy) = &report.occupancy {
        lines.push(format!("occupancy {occupancy} (computed)"));
    }
    let roofline = &report.roofline;
    let known = |value: Option<f64>, unit: &str| {
        value.map_or("not measured".into(), |value| format!("{value:.1} {unit}"))
    };
    lines.push(format!(
        "roofline  {:.0} operations per byte; time {}, rate {}; matrix product {}; data sheet {}",
        roofline.intensity,
        known(roofline.time_us, "µs"),
        known(roofline.tflops, "TFLOP/s"),
        known(roofline.matmul_tflops, "TFLOP/s"),
        known(roofline.peak_tflops, "TFLOP/s"),
    ));
    lines.push(format!("simulator {}", report.simulated.line()));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mix_of_a_disassembly_counts_opcodes_and_not_comments_or_encodings() {
        let text = "        /*0000*/                   LDC R1, c[0x0][0x28] ;\n\
                    \x20       /*0010*/              @!P0 HGMMA.64x128x16.F32 R24, gdesc[UR4] ;\n\
                    .L_x_1:\n\
                    \x20       /*0020*/                   HGMMA.64x128x16.F32 R24, gdesc[UR4] ;\n\
                    \x20                                  /* 0x000000ff00007b82 */\n";
        let mix = mix(text);
        assert_eq!(mix.kinds, [("HGMMA".to_string(), 2), ("LDC".to_string(), 1)]);
        assert_eq!(mix.instructions, 3);
    }
}
