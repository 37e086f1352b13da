//! `flashcore doctor`: what this machine has and which device would be chosen.

use std::path::PathBuf;

use clap::Args;
use flashcore::cuda::CubinCache;
use flashcore::{Device, cpu};
use serde::Serialize;

use super::screen::{Tone, say, toned};
use super::{Exit, Json};
use crate::evidence::Environment;
use crate::peers;

#[derive(Args)]
pub struct Options {
    /// Remove the cached machine code of GPU kernels; it is made again when it is needed
    #[arg(long)]
    clear_cache: bool,
    #[command(flatten)]
    json: Json,
}

#[derive(Serialize)]
struct Report {
    device: String,
    why: String,
    paths: Vec<Path>,
    cuda: Cuda,
    cache: Cache,
    torch: Torch,
}

/// The machine code that is kept on disk.
#[derive(Serialize)]
struct Cache {
    folder: Option<PathBuf>,
    files: usize,
    bytes: u64,
    /// How many files and bytes were removed, where that was asked for.
    removed: Option<(usize, u64)>,
    /// Why it cannot be read.
    failure: Option<String>,
}

impl Cache {
    fn read(clear: bool) -> Self {
        let cache = CubinCache::of_user();
        let removed = if clear { cache.clear().map(Some) } else { Ok(None) };
        let size = cache.size();
        let failure = removed.as_ref().err().or(size.as_ref().err()).map(ToString::to_string);
        let (files, bytes) = size.unwrap_or((0, 0));
        let folder = cache.folder().map(PathBuf::from);
        Self { folder, files, bytes, removed: removed.unwrap_or(None), failure }
    }
}

impl std::fmt::Display for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(folder) = &self.folder else { return f.write_str("none: FLASHCORE_CACHE is empty") };
        let size = |files: usize, bytes: u64| format!("{files} kernels, {:.1} MB", bytes as f64 / 1e6);
        write!(f, "{} in {}", size(self.files, self.bytes), folder.display())?;
        if let Some((files, bytes)) = self.removed {
            write!(f, "; {} were removed", size(files, bytes))?;
        }
        match &self.failure {
            Some(why) => write!(f, " ({why})"),
            None => Ok(()),
        }
    }
}

#[derive(Serialize)]
struct Path {
    name: &'static str,
    available: bool,
    chosen: bool,
}

#[derive(Serialize)]
struct Cuda {
    found: bool,
    /// The GPU, or why there is none.
    what: String,
}

#[derive(Serialize)]
struct Torch {
    found: bool,
    python: String,
    why: Option<String>,
}

pub fn doctor(options: &Options) -> Result<Exit, String> {
    options.json.check()?;
    let environment = Environment::read();
    let engine = cpu::Engine::new();
    let torch = peers::torch_is_there();
    let cuda = Device::cuda(0);
    let report = Report {
        device: Device::best().to_string(),
        why: match &cuda {
            Ok(_) => format!(
                "there is a GPU; what its kernels do not take runs on the CPU, where {}",
                engine.why()
            ),
            Err(_) => format!("there is no GPU to use, and {}", engine.why()),
        },
        paths: cpu::Isa::ALL
            .into_iter()
            .rev()
            .map(|isa| Path { name: isa.name(), available: isa.is_available(), chosen: isa == engine.isa() })
            .collect(),
        cuda: match &cuda {
            Ok(device) => Cuda { found: true, what: device.to_string() },
            Err(error) => Cuda { found: false, what: error.to_string() },
        },
        cache: Cache::read(options.clear_cache),
        torch: Torch { found: torch.is_ok(), python: peers::python(), why: torch.err() },
    };
    say(&describe(&environment, &report));
    options.json.write("flashcore.doctor/1", &environment, true, &report)?;
    Ok(if options.clear_cache && report.cache.failure.is_some() { Exit::CouldNot } else { Exit::Pass })
}

fn describe(environment: &Environment, report: &Report) -> String {
    let commit = match (environment.commit, environment.dirty) {
        (Some(commit), dirty) => {
            let dirty = if dirty == Some(true) { ", with uncommitted changes" } else { "" };
            format!(" (commit {}{dirty})", &commit[..commit.len().min(12)])
        }
        (None, _) => String::new(),
    };
    let cores = environment.cpu.cores;
    let memory = environment
        .memory_bytes
        .map_or_else(|| "unknown".into(), |bytes| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)));
    let paths: Vec<String> = report
        .paths
        .iter()
        .map(|path| match (path.chosen, path.available) {
            (true, _) => format!("{} (chosen)", path.name),
            (false, true) => path.name.to_string(),
            (false, false) => format!("{} (not on this CPU)", path.name),
        })
        .collect();
    let torch = match &report.torch.why {
        None => format!("found by {}: bench compares with it", report.torch.python),
        Some(why) => format!("not found: {why}"),
    };
    let build = if environment.optimised { "" } else { "\nbuild     not optimised: use cargo run --release" };
    format!(
        "FlashCore {version}{commit} on {os} {arch}\n\
         cpu       {cpu}, {cores} core{s}\n\
         paths     {paths}\n\
         memory    {memory}\n\
         gpu       {gpu}\n\
         cache     {cache}\n\
         torch     {torch}{build}\n\n\
         {device}\n          because {why}",
        version = environment.flashcore,
        os = environment.os,
        arch = environment.arch,
        cpu = environment.cpu_name(),
        s = if cores == 1 { "" } else { "s" },
        paths = paths.join(", "),
        gpu = report.cuda.what,
        cache = report.cache,
        device = toned(Tone::Strong, &format!("device    {}", report.device)),
        why = report.why,
    )
}
