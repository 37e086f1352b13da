//! Evidence: what a command leaves in a file, and what is done with such files later.
//!
//! A [`Document`] carries, along with its numbers, the machine, the versions, the command and the time. All of that is
//! read or measured; what cannot be known is null, never guessed. Its schema has a name and a version, so that what
//! reads it later knows what it reads.
//!
//! - [`audit`] finds out whether a file is consistent.
//! - [`saved`] reads a benchmark back, and [`compare`] compares two of them.
//! - [`views`] are files that show a part of one.
//! - [`kept`] is what stays in the user's cache folder for later runs.

pub mod audit;
pub mod compare;
pub mod kept;
pub mod saved;
pub mod views;

use std::time::SystemTime;

use flashcore::cpu;
use serde::Serialize;

/// A report as it is written to `--json FILE`.
#[derive(Debug, Serialize)]
pub struct Document<'a, T: Serialize> {
    /// `flashcore.COMMAND/VERSION`.
    pub schema: &'a str,
    /// When it was written, in UTC.
    pub created: String,
    /// The command line.
    pub command: Vec<String>,
    /// Whether the command ran to its end, rather than being interrupted.
    pub complete: bool,
    /// What it ran on.
    pub environment: &'a Environment,
    /// What the command found.
    #[serde(flatten)]
    pub body: &'a T,
}

impl<'a, T: Serialize> Document<'a, T> {
    /// A report of this process, as of now.
    pub fn new(schema: &'a str, environment: &'a Environment, complete: bool, body: &'a T) -> Self {
        let command = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect();
        Self { schema, created: now(), command, complete, environment, body }
    }

    /// The text of the file, sealed: a field `hash` holds BLAKE3 of the text in which that field is empty, so that
    /// editing the file breaks it.
    pub fn text(&self) -> serde_json::Result<String> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        let created = "\n  \"created\": ";
        Ok(seal(&text.replacen(created, &format!("\n  {},{created}", hash_field("")), 1)))
    }
}

/// The time as 2026-11-15T03:00:00Z.
pub fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// The field of the hash as it stands in a text.
fn hash_field(hash: &str) -> String {
    format!("\"hash\": \"{hash}\"")
}

fn hash_of(open: &str) -> String {
    format!("blake3:{}", blake3::hash(open.as_bytes()).to_hex())
}

/// Puts the hash of a text into its empty field.
pub fn seal(open: &str) -> String {
    open.replacen(&hash_field(""), &hash_field(&hash_of(open)), 1)
}

/// Whether the hash in a text is that of the text; absent where it has none.
pub fn hash_holds(text: &str, document: &serde_json::Value) -> Option<bool> {
    let hash = document["hash"].as_str()?;
    let open = text.replacen(&hash_field(hash), &hash_field(""), 1);
    Some(hash == hash_of(&open))
}

/// The schemas of evidence, in the version that is written now.
///
/// A version changes when a field comes, goes or changes its meaning: a reader must know every field of a file.
pub mod schemas {
    /// Benchmarks of a CPU.
    pub const BENCH: &str = "flashcore.bench/2";
    /// Benchmarks of a GPU.
    pub const BENCH_GPU: &str = "flashcore.bench-gpu/3";
    /// A thing compared with itself.
    pub const AGAINST_ITSELF: &str = "flashcore.against-itself/2";
    /// The corpus on engines.
    pub const VERIFY: &str = "flashcore.verify/2";
    /// Planted faults.
    pub const FAULTS: &str = "flashcore.faults/1";
    /// A GPU under stress.
    pub const STRESS: &str = "flashcore.stress/2";
    /// The ceilings of a machine.
    pub const CEILINGS: &str = "flashcore.ceilings/1";
    /// What bounds a kernel.
    pub const PROFILE: &str = "flashcore.profile/1";
}

/// The machine and the binary.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Environment {
    /// FlashCore's version.
    pub flashcore: &'static str,
    /// The commit that the binary was built from.
    pub commit: Option<&'static str>,
    /// Whether the tree had uncommitted changes.
    pub dirty: Option<bool>,
    /// Operating system and architecture.
    pub os: &'static str,
    /// The architecture.
    pub arch: &'static str,
    /// The CPU.
    pub cpu: CpuFacts,
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Whether the binary was built with optimisation.
    pub optimised: bool,
}

/// What is known of the CPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CpuFacts {
    /// Its name for itself.
    pub model: Option<String>,
    /// Cores that this process may use.
    pub cores: usize,
    /// The instruction sets that the engine has a path for and this CPU runs, the widest first.
    pub paths: Vec<&'static str>,
    /// The one that is chosen.
    pub chosen: &'static str,
    /// Why that one.
    pub why: String,
}

impl Environment {
    /// Of this process on this machine.
    pub fn read() -> Self {
        let engine = cpu::Engine::new();
        Self {
            flashcore: env!("CARGO_PKG_VERSION"),
            commit: option_env!("FLASHCORE_COMMIT"),
            dirty: option_env!("FLASHCORE_DIRTY").and_then(|dirty| dirty.parse().ok()),
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            cpu: CpuFacts {
                model: proc_field("/proc/cpuinfo", "model name"),
                cores: std::thread::available_parallelism().map_or(1, usize::from),
                paths: cpu::available().into_iter().rev().map(cpu::Isa::name).collect(),
                chosen: engine.isa().name(),
                why: engine.why().to_string(),
            },
            memory_bytes: proc_field("/proc/meminfo", "MemTotal").and_then(|text| kilobytes(&text)),
            optimised: !cfg!(debug_assertions),
        }
    }

    /// The CPU in a few words.
    pub fn cpu_name(&self) -> String {
        self.cpu.model.clone().unwrap_or_else(|| format!("{} CPU", self.arch))
    }
}

/// The first `name : value` of a file in /proc; absent elsewhere.
fn proc_field(path: &str, name: &str) -> Option<String> {
    field(&std::fs::read_to_string(path).ok()?, name)
}

fn field(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.split_whitespace().collect::<Vec<_>>().join(" "))
    })
}

fn kilobytes(text: &str) -> Option<u64> {
    Some(text.strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_text_shows_every_edit() {
        #[derive(Serialize)]
        struct Body {
            p50_us: f64,
            hash: &'static str,
        }
        let body = Body { p50_us: 1.5, hash: "of something else" };
        let text =
            Document::new("flashcore.test/1", &Environment::read(), true, &Nested { body }).text().unwrap();
        #[derive(Serialize)]
        struct Nested {
            body: Body,
        }
        let holds = |text: &str| hash_holds(text, &serde_json::from_str(text).unwrap());
        assert_eq!(holds(&text), Some(true));
        assert_eq!(holds(&text.replace("1.5", "1.4")), Some(false));
        assert_eq!(holds(&text.replace("blake3:", "blake3:0")), Some(false));
        assert_eq!(holds("{\"a\": 1}"), None);
    }

    #[test]
    fn fields_of_proc_files_are_found_by_name() {
        let text = "processor\t: 0\nmodel name\t: Some  CPU @ 3 GHz\nMemTotal:       24576000 kB\n";
        assert_eq!(field(text, "model name").as_deref(), Some("Some CPU @ 3 GHz"));
        assert_eq!(field(text, "MemTotal").and_then(|text| kilobytes(&text)), Some(24_576_000 * 1024));
        assert_eq!(field(text, "model"), None);
    }

    #[test]
    fn an_environment_knows_its_cpu_paths() {
        let environment = Environment::read();
        assert!(environment.cpu.paths.contains(&environment.cpu.chosen));
        assert_eq!(environment.cpu.paths.last(), Some(&"portable"));
        assert!(environment.cpu.cores > 0);
    }
}
