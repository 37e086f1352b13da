//! `flashcore report`: evidence files as a page that people read.

use std::path::{Component, Path, PathBuf};

use clap::Args;

use super::Exit;
use super::screen::{Tone, say, toned};
use crate::evidence::audit::contradictions;
use crate::files;
use crate::report;
use crate::report::source::{Evidence, Refused};

#[derive(Args)]
pub struct Options {
    /// Evidence: files that commands wrote with --json
    #[arg(required = true, value_name = "EVIDENCE.json")]
    evidence: Vec<PathBuf>,
    /// The folder to write report.html and report.md to
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Also write the charts as SVG files to this folder
    #[arg(long, value_name = "DIR")]
    charts: Option<PathBuf>,
}

pub fn report(options: &Options) -> Result<Exit, String> {
    let mut evidence = Vec::new();
    for path in &options.evidence {
        let text = files::read_text(path)?;
        let name = path.display().to_string().replace('\\', "/");
        let link = relative(&absolute(path)?, &absolute(&options.output)?);
        match Evidence::read(&name, &link, &text, contradictions) {
            Ok(found) => evidence.push(found),
            Err(Refused::Contradiction(first)) => {
                say(&format!("{}  {name}: {first}", toned(Tone::Bad, "FAILS")));
            }
            Err(Refused::NoEvidence(why)) => return Err(format!("{name}: {why}")),
        }
    }
    if evidence.len() < options.evidence.len() {
        say(
            "No report is made of evidence that contradicts itself; flashcore evidence verify FILE says all.",
        );
        return Ok(Exit::Fail);
    }
    write(&options.output, &report::pages(&evidence))?;
    if let Some(folder) = &options.charts {
        let charts = report::charts(&evidence);
        if charts.is_empty() {
            say(
                "There is nothing to draw in these files: no benchmark of several lengths, small shapes or kernels.",
            );
        }
        write(folder, &charts)?;
    }
    Ok(Exit::Pass)
}

fn write(folder: &Path, all: &[report::Written]) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|error| files::explain("make", folder, &error))?;
    for (name, text) in all {
        let path = folder.join(name);
        files::write_whole(&path, |out| out.write_all(text.as_bytes()))
            .map_err(|error| files::explain("write", &path, &error))?;
        say(&format!("{} ({} KB)", path.display(), text.len().div_ceil(1024)));
    }
    Ok(())
}

fn absolute(path: &Path) -> Result<PathBuf, String> {
    std::path::absolute(path).map_err(|error| files::explain("find", path, &error))
}

/// A file as seen from a folder, with forward slashes; both are absolute.
fn relative(file: &Path, folder: &Path) -> String {
    let plain = |path: &Path| -> Vec<String> {
        let mut parts = Vec::new();
        for part in path.components() {
            match part {
                Component::CurDir => {}
                Component::ParentDir => drop(parts.pop()),
                part => parts.push(part.as_os_str().to_string_lossy().into_owned()),
            }
        }
        parts
    };
    let (file, folder) = (plain(file), plain(folder));
    let common = file.iter().zip(&folder).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n("..".to_string(), folder.len() - common);
    up.chain(file[common..].iter().cloned()).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_from_the_report_to_the_evidence() {
        let link = |file: &str, folder: &str| relative(Path::new(file), Path::new(folder));
        assert_eq!(link("/a/record/x.json", "/a/docs/report"), "../../record/x.json");
        assert_eq!(link("/a/x.json", "/a"), "x.json");
        assert_eq!(link("/a/b/../x.json", "/a/./out"), "../x.json");
    }
}
