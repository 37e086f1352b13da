//! The bridge to ptxas: assembles a module and returns what ptxas reports, as values.
//!
//! ptxas is only for those who develop kernels: the driver assembles PTX for users. It is looked for in
//! `$FLASHCORE_PTXAS`, in `PATH`, and where the PyPI package `nvidia-cuda-nvcc` puts it in a virtual
//! environment (`$VIRTUAL_ENV`, or a `.venv` in the working folder or one above it).
//!
//! ```no_run
//! use flashcore_ptx::{Module, Target, ptxas::Ptxas};
//!
//! # let module = Module::new(Target::Sm80);
//! let assembled = Ptxas::find()?.assemble(&module, Target::Sm89)?;
//! for kernel in &assembled.kernels {
//!     println!("{}: {} registers, {} bytes spilled", kernel.name, kernel.registers, kernel.spill_store_bytes);
//! }
//! assert!(assembled.serialised_wgmma().next().is_none());
//! # Ok::<(), flashcore_ptx::ptxas::PtxasError>(())
//! ```

use std::env;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::module::Module;
use crate::types::Target;

/// The environment variable that holds the path of ptxas.
pub const PTXAS_VARIABLE: &str = "FLASHCORE_PTXAS";

/// The environment variable that, set to `1`, makes tests fail where they would skip because ptxas is missing.
pub const REQUIRE_VARIABLE: &str = "FLASHCORE_REQUIRE_PTXAS";

/// Where PyPI packages put ptxas, below `site-packages`.
const PACKAGE_PLACES: [&str; 2] = ["nvidia/cu13/bin/ptxas", "nvidia/cuda_nvcc/bin/ptxas"];

/// A ptxas that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ptxas {
    path: PathBuf,
}

/// What ptxas made of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assembled {
    /// The binary that the driver loads.
    pub cubin: Vec<u8>,
    /// What each kernel uses.
    pub kernels: Vec<KernelUsage>,
    /// Everything that ptxas remarked: warnings, and the C75xx notes on `wgmma`.
    pub remarks: Vec<Message>,
}

impl Assembled {
    /// What the kernel of this name uses.
    pub fn kernel(&self, name: &str) -> Option<&KernelUsage> {
        self.kernels.iter().find(|k| k.name == name)
    }

    /// The C75xx notes: each means that `wgmma`s were serialised, or that a wait was put in.
    pub fn serialised_wgmma(&self) -> impl Iterator<Item = &Message> {
        self.remarks.iter().filter(|m| m.code.is_some_and(|c| (7500..7600).contains(&c)))
    }
}

/// What a kernel uses, as reported by ptxas.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct KernelUsage {
    /// The kernel.
    pub name: String,
    /// Registers per thread.
    pub registers: u32,
    /// Static shared memory, which includes what the hardware reserves where ptxas counts it; the dynamic part
    /// is the launch's.
    pub static_shared_bytes: u32,
    /// The stack frame, in bytes per thread.
    pub stack_bytes: u32,
    /// Bytes of spill stores: registers ran out.
    pub spill_store_bytes: u32,
    /// Bytes of spill loads.
    pub spill_load_bytes: u32,
    /// Named barriers.
    pub barriers: u32,
    /// Constant memory, all banks.
    pub constant_bytes: u32,
}

/// How severe a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// For information.
    Info,
    /// A warning.
    Warning,
    /// The module was refused.
    Error,
}

/// One message of ptxas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// How severe it is.
    pub severity: Severity,
    /// Its number, such as 7510 of C7510.
    pub code: Option<u16>,
    /// The line of the PTX text, from 1.
    pub line: Option<usize>,
    /// That line's text.
    pub source: Option<String>,
    /// What it says.
    pub text: String,
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if let Some(code) = self.code {
            write!(f, "C{code}: ")?;
        }
        f.write_str(&self.text)?;
        if let Some(source) = &self.source {
            write!(f, "\n    {source}")?;
        }
        Ok(())
    }
}

/// Why there is no binary.
#[derive(Debug, thiserror::Error)]
pub enum PtxasError {
    /// ptxas is not on this machine.
    #[error(
        "ptxas was not found: set {PTXAS_VARIABLE} to it, put it in PATH, or install the PyPI package \
         nvidia-cuda-nvcc in a virtual environment"
    )]
    NotFound,
    /// The variable names something that is not there.
    #[error("{PTXAS_VARIABLE} is {}, which is not a file", .0.display())]
    NotThere(PathBuf),
    /// It could not be run, or its files could not be written or read.
    #[error("{} could not be run: {source}", .path.display())]
    Run {
        /// The program.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It refused the module.
    #[error("ptxas for {target} refused the module:\n{}", lines(.messages))]
    Refused {
        /// The target.
        target: Target,
        /// Its messages.
        messages: Vec<Message>,
    },
}

fn lines(messages: &[Message]) -> String {
    messages.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

impl Ptxas {
    /// The ptxas of this machine.
    pub fn find() -> Result<Ptxas, PtxasError> {
        if let Some(named) = env::var_os(PTXAS_VARIABLE).filter(|v| !v.is_empty()) {
            let path = PathBuf::from(named);
            return if path.is_file() { Ok(Ptxas { path }) } else { Err(PtxasError::NotThere(path)) };
        }
        tool("ptxas", &PACKAGE_PLACES).map(|path| Ptxas { path }).ok_or(PtxasError::NotFound)
    }

    /// As [`Ptxas::find`], but none where it is absent and `FLASHCORE_REQUIRE_PTXAS` is not `1`: for tests,
    /// which then skip.
    pub fn find_or_skip() -> Result<Option<Ptxas>, PtxasError> {
        match Ptxas::find() {
            Ok(ptxas) => Ok(Some(ptxas)),
            Err(PtxasError::NotFound) if env::var_os(REQUIRE_VARIABLE).is_none_or(|v| v != "1") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A ptxas at a known place.
    pub fn at(path: impl Into<PathBuf>) -> Ptxas {
        Ptxas { path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its release, as it says it: `13.0.88`.
    pub fn version(&self) -> Result<String, PtxasError> {
        let output = Command::new(&self.path).arg("--version").output().map_err(|e| self.run_error(e))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let release = text.split_whitespace().find_map(|word| word.strip_prefix('V'));
        release
            .map(str::to_owned)
            .ok_or_else(|| self.run_error(io::Error::other("it does not say its version")))
    }

    /// Assembles a module for a target: its own, or a later one that runs it.
    pub fn assemble(&self, module: &Module, target: Target) -> Result<Assembled, PtxasError> {
        self.assemble_text(&module.to_string(), target)
    }

    /// Assembles PTX text for a target.
    pub fn assemble_text(&self, ptx: &str, target: Target) -> Result<Assembled, PtxasError> {
        let folder = tempfile::tempdir().map_err(|e| self.run_error(e))?;
        let (input, cubin) = (folder.path().join("module.ptx"), folder.path().join("module.cubin"));
        fs::write(&input, ptx).map_err(|e| self.run_error(e))?;
        let output = Command::new(&self.path)
            .args(["-v", "-arch", target.name(), "-o"])
            .args([&cubin, &input])
            .output()
            .map_err(|e| self.run_error(e))?;
        let said =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        let report = Report::read(&said, ptx);
        if !output.status.success() {
            let mut messages: Vec<_> =
                report.messages.into_iter().filter(|m| m.severity == Severity::Error).collect();
            if messages.is_empty() {
                let text = format!("{}: {}", output.status, said.trim());
                messages.push(Message {
                    severity: Severity::Error,
                    code: None,
                    line: None,
                    source: None,
                    text,
                });
            }
            return Err(PtxasError::Refused { target, messages });
        }
        let cubin = fs::read(&cubin).map_err(|e| self.run_error(e))?;
        Ok(Assembled { cubin, kernels: report.kernels, remarks: report.messages })
    }

    fn run_error(&self, source: io::Error) -> PtxasError {
        PtxasError::Run { path: self.path.clone(), source }
    }
}

/// A program of the toolkit: in `PATH`, or where a package has put it in a virtual environment, below `site-packages`.
pub(crate) fn tool(name: &str, places: &[&str]) -> Option<PathBuf> {
    let in_path = env::var_os("PATH").map(|paths| env::split_paths(&paths).collect::<Vec<_>>());
    let in_path = in_path.unwrap_or_default().into_iter().map(|folder| folder.join(name));
    let working = env::current_dir().unwrap_or_default();
    let environments = env::var_os("VIRTUAL_ENV")
        .map(PathBuf::from)
        .into_iter()
        .chain(working.ancestors().map(|folder| folder.join(".venv")));
    in_path.chain(environments.flat_map(|e| in_environment(&e, places))).find(|path| path.is_file())
}

/// Where it can be in a virtual environment.
fn in_environment(environment: &Path, places: &[&str]) -> Vec<PathBuf> {
    let pythons = fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    let pythons = pythons.filter(|entry| entry.file_name().to_string_lossy().starts_with("python"));
    let packages = pythons.map(|entry| entry.path().join("site-packages"));
    packages.flat_map(|site| places.iter().map(move |place| site.join(place))).collect()
}

/// What ptxas printed.
#[derive(Debug, Default)]
struct Report {
    kernels: Vec<KernelUsage>,
    messages: Vec<Message>,
}

impl Report {
    fn read(said: &str, ptx: &str) -> Report {
        let mut report = Report::default();
        for line in said.lines() {
            if let Some(name) = between(line, "Compiling entry function '", "'") {
                report.kernels.push(KernelUsage { name: name.to_owned(), ..KernelUsage::default() });
            } else if line.contains("bytes stack frame") {
                if let Some(kernel) = report.kernels.last_mut() {
                    kernel.stack_bytes = number_before(line, " bytes stack frame");
                    kernel.spill_store_bytes = number_before(line, " bytes spill stores");
                    kernel.spill_load_bytes = number_before(line, " bytes spill loads");
                }
            } else if line.contains(": Used ") && line.contains(" registers") {
                if let Some(kernel) = report.kernels.last_mut() {
                    kernel.registers = number_before(line, " registers");
                    kernel.barriers = number_before(line, " barriers");
                    kernel.static_shared_bytes = number_before(line, " bytes smem");
                    kernel.constant_bytes =
                        line.split(", ").map(|part| number_before(part, " bytes cmem[")).sum();
                }
            } else if let Some(message) = message(line, ptx) {
                report.messages.push(message);
            }
        }
        report
    }
}

/// A line `ptxas FILE, line 9; error : TEXT` or `ptxas info : (C7510) TEXT`; none for plain information.
fn message(line: &str, ptx: &str) -> Option<Message> {
    let (head, text) = line.strip_prefix("ptxas ")?.split_once(" : ")?;
    let kind = head.split_whitespace().last()?;
    let severity = match kind {
        "info" => Severity::Info,
        "warning" => Severity::Warning,
        "error" | "fatal" => Severity::Error,
        _ => return None,
    };
    let number = between(head, ", line ", ";").and_then(|n| n.parse::<usize>().ok());
    let source = number.and_then(|n| ptx.lines().nth(n.checked_sub(1)?)).map(|s| s.trim().to_owned());
    let coded = between(text, "(C", ")").and_then(|c| c.parse::<u16>().ok());
    if severity == Severity::Info && coded.is_none() {
        return None;
    }
    let text = match coded {
        Some(_) => text.split_once(')').map_or(text, |(_, rest)| rest),
        None => text,
    };
    Some(Message { severity, code: coded, line: number, source, text: text.trim().to_owned() })
}

/// What stands between two marks.
fn between<'t>(text: &'t str, open: &str, close: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(open)?;
    rest.split_once(close).map(|(inner, _)| inner)
}

/// The number that ends where a mark begins; 0 where there is none.
fn number_before(text: &str, mark: &str) -> u32 {
    let Some((head, _)) = text.split_once(mark) else { return 0 };
    let digits = head.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or("");
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
ptxas info    : (C7517) warpgroup.wait is injected in around line 2 by compiler to allow use of registers defined by GMMA in function 'k'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    64 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 30 registers, used 4 barriers, 64 bytes cumulative stack size, 1024 bytes smem, 352 bytes cmem[0], 8 bytes cmem[2]
ptxas module.ptx, line 2; warning : Advisory: something
ptxas info    : Compile time = 6.944 ms
";

    #[test]
    fn a_kernels_figures_are_read_from_the_verbose_report() {
        let report = Report::read(SAID, "first\n  second;\n");
        let expected = KernelUsage {
            name: "k".to_owned(),
            registers: 30,
            static_shared_bytes: 1024,
            stack_bytes: 64,
            spill_store_bytes: 12,
            spill_load_bytes: 16,
            barriers: 4,
            constant_bytes: 360,
        };
        assert_eq!(report.kernels, [expected]);
    }

    #[test]
    fn notes_with_a_number_and_warnings_are_remarks_and_plain_information_is_not() {
        let report = Report::read(SAID, "first\n  second;\n");
        let [note, warning] = report.messages.as_slice() else { panic!("{:?}", report.messages) };
        assert_eq!((note.code, note.severity), (Some(7517), Severity::Info));
        assert!(note.text.starts_with("warpgroup.wait is injected"));
        assert_eq!((warning.line, warning.source.as_deref()), (Some(2), Some("second;")));
        assert_eq!(warning.severity, Severity::Warning);
    }
}
