//! What a person sees: text on stdout, and on stderr how far a long command is, as a bar on a terminal and as
//! plain lines elsewhere.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Prints lines. A reader that went away (`| head`) ends the command quietly.
pub fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() {
        std::process::exit(2);
    }
}

/// How words stand out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Something to be glad of.
    Good,
    /// Something to look at.
    Bad,
    /// A heading.
    Strong,
}

/// Text in a tone, where the terminal shows tones.
pub fn toned(tone: Tone, text: &str) -> String {
    if !std::io::stdout().is_terminal() || std::env::var_os("NO_COLOR").is_some() {
        return text.to_string();
    }
    let code = match tone {
        Tone::Good => "32",
        Tone::Bad => "31;1",
        Tone::Strong => "1",
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// Without a terminal a line is due this often.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// How far a long command is.
pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    last_line: Instant,
}

impl Progress {
    /// For `total` steps of something.
    pub fn new(total: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            let style =
                ProgressStyle::with_template("{bar:30} {pos}/{len}  {elapsed} of about {duration}  {msg}");
            bar.set_style(style.expect("a template that indicatif reads"));
            bar
        });
        Self { bar, total, last_line: Instant::now() }
    }

    /// Says what is going on; `done` steps are behind it.
    pub fn at(&mut self, done: u64, what: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(done);
                bar.set_message(what.to_string());
            }
            None if self.last_line.elapsed() >= LINE_EVERY => {
                self.last_line = Instant::now();
                eprintln!("{:>3} %  {what}", 100 * done / self.total.max(1));
            }
            None => {}
        }
    }

    /// Prints a lasting line to stdout without tearing the bar.
    pub fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say(text)),
            None => say(text),
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
