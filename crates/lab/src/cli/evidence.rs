//! `flashcore evidence`: whether evidence files hold together, how two differ, and views of one.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::Value;

use super::Exit;
use super::screen::{Tone, say, toned};
use crate::evidence::audit::{Difference, audit, differences};
use crate::evidence::views::views;
use crate::files::{self, read_text as read};

#[derive(Args)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Make every hash and derived number again from the raw samples, and fail on what does not agree
    Verify {
        /// Evidence files, as --json writes them
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Show where two files differ, raw samples left out; exit code 1 if they do
    Diff {
        /// The first file
        first: PathBuf,
        /// The second
        second: PathBuf,
    },
    /// Write build_meta.json, correctness_summary.json and perf_baseline.json
    Views {
        /// The evidence file
        file: PathBuf,
        /// The folder to write to
        #[arg(short, long, value_name = "DIR")]
        out: PathBuf,
    },
}

pub fn evidence(options: &Options) -> Result<Exit, String> {
    match &options.what {
        What::Verify { files } => Ok(verify(files)),
        What::Diff { first, second } => diff(first, second),
        What::Views { file, out } => write_views(file, out),
    }
}

fn parse(path: &Path, text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("{} is not JSON: {error}", path.display()))
}

/// Contradictions shown per file; the rest are counted.
const SHOWN: usize = 20;

fn verify(paths: &[PathBuf]) -> Exit {
    let mut exit = Exit::Pass;
    for path in paths {
        let audit = match read(path).and_then(|text| audit(&text)) {
            Ok(audit) => audit,
            Err(why) => {
                say(&format!("{}  {}: {why}", toned(Tone::Bad, "CANNOT be checked"), path.display()));
                if exit == Exit::Pass {
                    exit = Exit::CouldNot;
                }
                continue;
            }
        };
        let word = if audit.holds() { toned(Tone::Good, "holds") } else { toned(Tone::Bad, "FAILS") };
        say(&format!("{word}  {}  {}: {} made again and agree", path.display(), audit.schema, audit.checked));
        for absent in &audit.absent {
            say(&format!("       absent: {absent}"));
        }
        for contradiction in audit.contradictions.iter().take(SHOWN) {
            say(&format!("       {} {contradiction}", toned(Tone::Bad, "no:")));
        }
        if audit.contradictions.len() > SHOWN {
            say(&format!("       … and {} more", audit.contradictions.len() - SHOWN));
        }
        if !audit.holds() {
            exit = Exit::Fail;
        }
    }
    exit
}

fn diff(first: &Path, second: &Path) -> Result<Exit, String> {
    let (a, b) = (parse(first, &read(first)?)?, parse(second, &read(second)?)?);
    let found = differences(&a, &b);
    for difference in &found {
        say(&line(difference));
    }
    say(&format!("{} differences", found.len()));
    Ok(if found.is_empty() { Exit::Pass } else { Exit::Fail })
}

fn line(Difference { at, first, second }: &Difference) -> String {
    let show = |value: &Option<Value>| value.as_ref().map_or("absent".into(), ToString::to_string);
    let change = match (first.as_ref().and_then(Value::as_f64), second.as_ref().and_then(Value::as_f64)) {
        (Some(a), Some(b)) if a != 0.0 => format!("  ({:+.2} %)", 100.0 * (b / a - 1.0)),
        _ => String::new(),
    };
    format!("{at}: {} → {}{change}", show(first), show(second))
}

fn write_views(file: &Path, folder: &Path) -> Result<Exit, String> {
    let text = read(file)?;
    let document = parse(file, &text)?;
    // A view of a file that contradicts itself would pass the error on.
    let audit = audit(&text).map_err(|why| format!("{}: {why}", file.display()))?;
    if let Some(first) = audit.contradictions.first() {
        return Err(format!("{} does not hold together: {first}", file.display()));
    }
    std::fs::create_dir_all(folder).map_err(|error| files::explain("make", folder, &error))?;
    let source = file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    for (name, view) in views(&source, &text, &document) {
        let path = folder.join(name);
        files::write_whole(&path, |out| {
            serde_json::to_writer_pretty(&mut *out, &view)?;
            out.write_all(b"\n")
        })
        .map_err(|error| files::explain("write", &path, &error))?;
        say(&format!("written: {}", path.display()));
    }
    Ok(Exit::Pass)
}
