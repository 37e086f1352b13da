//! The command line: what can be asked, and the exit code of each answer.

mod bench;
mod compare;
mod doctor;
mod evidence;
mod evolve;
mod inspect;
mod micro;
mod plan;
mod profile;
mod report;
mod run;
mod screen;
mod timeline;
mod verify;

use std::panic::PanicHookInfo;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use flashcore::{DType, Quantiser};
use serde::Serialize;

use crate::bench::cells::{AS_THEY_ARE, Types};
use crate::evidence::{Document, Environment};
use crate::{files, gpu, interrupt, search};

/// What a command without arguments says: ten lines on what to try first.
const FIRST_STEPS: &str = "\
FlashCore: exact attention, fused, and the workbench that proves and times it. Try first:

  flashcore doctor                   what this machine has, and which device is chosen
  flashcore bench mission            time attention, with its error beside every time
  flashcore bench long --dtype all   the same in f16, bf16 and f32, against torch where there is one
  flashcore verify                   put every engine of this machine through the quick corpus
  flashcore inspect mission          a GPU kernel: its plan, its registers, its bank conflicts; no GPU needed
  flashcore run IN.safetensors -o OUT.safetensors --causal
                                     attention on tensors q, k and v of a file

flashcore COMMAND --help explains a command; --json FILE keeps what it found.";

#[derive(Parser)]
#[command(
    name = "flashcore",
    version,
    about = "Exact attention, fused, and the workbench that proves and times it.",
    after_help = "Exit codes: 0 it ran and all is right; 1 a result is wrong; 2 it could not run, was interrupted or stayed undecided."
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Say what this machine has, which device would be chosen, and why
    Doctor(doctor::Options),
    /// Compute attention on the tensors q, k and v of a safetensors file
    Run(run::Options),
    /// Run the corpus of cases through the engines and judge every result by the oracle
    Verify(verify::Options),
    /// Time attention, beside torch where there is one
    Bench(bench::Options),
    /// Time the shapes of a file, and write tables of them
    Grid(bench::grid::Options),
    /// Compare a run of bench with an earlier one: has something become slower?
    Compare(compare::Options),
    /// Measure the highest rates this machine can reach
    Ceilings(bench::ceilings::Options),
    /// Compare ours with itself, and say how often the verdict is wrong
    AgainstItself(bench::itself::Options),
    /// Show the plan of a GPU kernel, what the assembler makes of it, and what the simulator counts
    Inspect(inspect::Options),
    /// Say what would run for a shape, and why
    Plan(plan::Options),
    /// Measure the pieces that kernels are made of, and order schedules by them
    Micro(micro::Options),
    /// Say what bounds a kernel, by Nsight Compute where it is, and from which figures
    Profile(profile::Options),
    /// Search for faster schedules, and accept only what is right and wins twice
    Evolve(evolve::Options),
    /// Check, compare and show evidence files
    Evidence(evidence::Options),
    /// Show what evidence files say: one HTML file, a Markdown twin and charts
    Report(report::Options),
    /// Answer the workbench's requests on the CPU: how evolve keeps what it tries apart from itself
    #[command(hide = true)]
    CpuWorker,
    /// Answer the workbench's requests on a GPU: how bench keeps what it times apart from itself
    #[command(hide = true)]
    GpuWorker {
        /// The GPU's number
        #[arg(long, default_value_t = 0)]
        ordinal: u32,
    },
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It ran, and all is right.
    Pass,
    /// A result is wrong.
    Fail,
    /// It could not run, was interrupted, or stayed undecided.
    CouldNot,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(match exit {
            Exit::Pass => 0,
            Exit::Fail => 1,
            Exit::CouldNot => 2,
        })
    }
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    end_on_panic();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(answer) => {
            // Help and the version are answers, the rest says what is wrong with the command line.
            return match answer.print() {
                Err(error) if !answer.use_stderr() => screen::cannot_write(&error),
                _ => ExitCode::from(answer.exit_code() as u8),
            };
        }
    };
    if !matches!(cli.command, Some(Command::CpuWorker | Command::GpuWorker { .. })) {
        interrupt::install();
    }
    let result = match cli.command {
        None => {
            screen::say(FIRST_STEPS);
            Ok(Exit::Pass)
        }
        Some(Command::Doctor(options)) => doctor::doctor(&options),
        Some(Command::Run(options)) => run::run(&options),
        Some(Command::Verify(options)) => verify::verify(&options),
        Some(Command::Bench(options)) => bench::bench(&options),
        Some(Command::Grid(options)) => bench::grid::grid(&options),
        Some(Command::Compare(options)) => compare::compare(&options),
        Some(Command::Ceilings(options)) => bench::ceilings::ceilings(&options),
        Some(Command::AgainstItself(options)) => bench::itself::against_itself(&options),
        Some(Command::Inspect(options)) => inspect::inspect(&options),
        Some(Command::Plan(options)) => plan::plan(&options),
        Some(Command::Micro(options)) => micro::micro(&options),
        Some(Command::Profile(options)) => profile::profile(&options),
        Some(Command::Evolve(options)) => evolve::evolve(&options),
        Some(Command::Evidence(options)) => evidence::evidence(&options),
        Some(Command::Report(options)) => report::report(&options),
        Some(Command::CpuWorker) => search::cpu_worker::serve().map(|()| Exit::Pass),
        Some(Command::GpuWorker { ordinal }) => gpu::worker::serve(ordinal).map(|()| Exit::Pass),
    };
    match result {
        Ok(exit) => exit.into(),
        Err(message) => {
            interrupt::tell(&format!("error: {message}"));
            Exit::CouldNot.into()
        }
    }
}

/// From now on a panic in any thread ends the process with the exit code of a command that could not run.
pub fn end_on_panic() {
    std::panic::set_hook(Box::new(own_fault));
}

fn own_fault(panic: &PanicHookInfo<'_>) {
    let what = panic.payload_as_str().unwrap_or("it panicked");
    let place = panic.location().map_or_else(String::new, |place| format!(" ({place})"));
    interrupt::tell(&format!(
        "error: this is a fault of flashcore itself: {what}{place}\nPlease report it, with the command line and the \
         files that it read."
    ));
    interrupt::end();
}

/// A share as 3, 3% or 2.5%.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>().ok();
    let share = number.map(|number| number / 100.0).filter(|share| (0.0..1.0).contains(share));
    share.ok_or_else(|| "give a percentage from 0 to 100, such as 3%".into())
}

/// Refuses a file that cannot be written before the work is done rather than after it.
fn check_file(option: &str, path: &Path) -> Result<(), String> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path == Path::new("-") {
        return Err(format!("{option} -: standard output has the table; name a file"));
    }
    if path.is_dir() {
        return Err(format!("{option} {} is a folder; name a file in it", path.display()));
    }
    if !folder.is_dir() {
        return Err(format!("{option} {}: there is no folder {}", path.display(), folder.display()));
    }
    Ok(())
}

/// What becomes f8 within a call, or is f8 beside queries that are not.
#[derive(Args, Clone, Copy, Debug)]
struct EightBits {
    /// Make f8 of 16-bit q, k and v within the call: plain (descales alone), smooth, rotate:SEED or smooth,rotate:SEED
    #[arg(long, value_name = "WAYS", value_parser = ways)]
    quantise: Option<Quantiser>,
    /// The type of k and v where it is not that of q: f8, as a cache has them
    #[arg(long, value_name = "DTYPE")]
    kv: Option<DType>,
}

impl EightBits {
    /// Whether either was given.
    fn is_given(self) -> bool {
        self.quantise.is_some() || self.kv.is_some()
    }

    /// The types of a cell whose q is of this one.
    fn types(self, dtype: DType) -> Types {
        let Self { quantise, kv } = self;
        Types { dtype, kv: kv.filter(|kv| *kv != dtype), quantise }
    }
}

/// How tensors are quantised, as problems have it in their texts.
fn ways(text: &str) -> Result<Quantiser, String> {
    let text = if text == AS_THEY_ARE { "quantise".into() } else { format!("quantise={text}") };
    text.parse().map_err(|_| {
        format!(
            "possible are {AS_THEY_ARE}, smooth, rotate:SEED and smooth,rotate:SEED, such as smooth,rotate:7"
        )
    })
}

/// `--json FILE`, which every command has.
#[derive(Args, Clone, Debug)]
struct Json {
    /// Also write what was found to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Json {
    /// Refuses a file that cannot be written.
    fn check(&self) -> Result<(), String> {
        self.json.as_deref().map_or(Ok(()), |path| check_file("--json", path))
    }

    /// Writes the report, if one is wanted.
    fn write<T: Serialize>(
        &self,
        schema: &str,
        environment: &Environment,
        complete: bool,
        body: &T,
    ) -> Result<(), String> {
        let Some(path) = &self.json else { return Ok(()) };
        let document = Document::new(schema, environment, complete, body);
        files::write_whole(path, |out| out.write_all(document.text()?.as_bytes()))
            .map_err(|error| files::explain("write", path, &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dash_is_no_file() {
        assert!(check_file("--json", Path::new("-")).is_err_and(|why| why.contains("name a file")));
        assert_eq!(check_file("--json", Path::new("./-")), Ok(()));
    }

    #[test]
    fn ways_to_quantise_are_those_of_a_problem() {
        assert_eq!(ways("plain"), Ok(Quantiser::new()));
        assert_eq!(ways("smooth,rotate:7"), Ok(Quantiser::new().smoothed().rotated(7)));
        assert!(["", "smoth", "rotate"].into_iter().all(|bad| ways(bad).is_err()));
    }

    #[test]
    fn percentages_are_read_with_and_without_their_sign_and_never_negative() {
        assert_eq!((percent("3%"), percent("2.5")), (Ok(0.03), Ok(0.025)));
        for bad in ["-3%", "100%", "three", "%"] {
            assert!(percent(bad).is_err(), "{bad}");
        }
    }
}
