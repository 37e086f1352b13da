//! `flashcore grid`: the shapes of a file, timed into three tables.

use std::path::PathBuf;

use clap::Args;

use super::{Against, Finished, Pace, Place, Task, time};
use crate::bench::cells::Member;
use crate::cli::screen::say;
use crate::cli::{Exit, Json};
use crate::evidence::{Document, kept, saved::Saved};
use crate::{files, rbk};

#[derive(Args)]
pub struct Options {
    /// The grid, as rbk_config.yaml; writes rbk_report.json, .csv and .md
    #[arg(value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    against: Against,
    /// GPU: read the call clock too
    #[arg(long)]
    calls: bool,
    #[command(flatten)]
    json: Json,
}

pub fn grid(options: &Options) -> Result<Exit, String> {
    let text = files::read_text(&options.config)?;
    let config = rbk::Config::parse(&text).map_err(|why| format!("{}: {why}", options.config.display()))?;
    let members = config.cells().into_iter().map(Member::of_all).collect();
    let task = Task {
        budget: options.pace.budget,
        rounds: Some(config.iterations as usize),
        warmups: config.warmups,
        peers: options.against.named(),
        alone: false,
        calls: options.calls,
        ..Task::new(members, &options.place, options.pace.margin()?)
    };
    let finished = time(&task, &options.json)?;
    write(&config, &finished)?;
    Ok(finished.exit)
}

/// Writes the tables that the grid asks for.
fn write(config: &rbk::Config, finished: &Finished) -> Result<(), String> {
    let report = rbk::Report::new(config, &Saved::of(&finished.document)?, &finished.outcomes)?;
    let folder = &config.output_dir;
    std::fs::create_dir_all(folder).map_err(|error| files::explain("make", folder, &error))?;
    let text = |ending: &str, text: &str| {
        let path = rbk::path(config, ending);
        files::write_whole(&path, |out| out.write_all(text.as_bytes()))
            .map_err(|error| files::explain("write", &path, &error))
    };
    let mut written = Vec::new();
    if config.save_json {
        let Finished { environment, complete, .. } = finished;
        let document = Document::new("flashcore.rbk/1", environment, *complete, &report);
        kept::write_json(&rbk::path(config, "json"), &document)?;
        written.push("json");
    }
    if config.save_csv {
        text("csv", &report.csv())?;
        written.push("csv");
    }
    if config.save_markdown {
        text("md", &report.markdown())?;
        written.push("md");
    }
    if !written.is_empty() {
        say(&format!("written: rbk_report.{{{}}} in {}", written.join(","), folder.display()));
    }
    Ok(())
}
