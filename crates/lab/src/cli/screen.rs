//! What a person sees: text on stdout, and on stderr how far a long command is, as a bar on a terminal and as
//! plain lines elsewhere.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use console::Style;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::interrupt::{self, tell};

/// Prints lines. If the reader went away (`| head`), the command ends quietly; if the disk is full, with a message.
pub fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush()) {
        cannot_write(&error);
    }
}

/// Ends a command whose output cannot be written.
pub fn cannot_write(error: &io::Error) -> ! {
    if error.kind() != io::ErrorKind::BrokenPipe {
        tell(&format!("error: what was found cannot be written to stdout: {error}"));
    }
    interrupt::end()
}

/// How words stand out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Good news.
    Good,
    /// Something that needs attention.
    Bad,
    /// A heading.
    Strong,
}

/// Text in a tone, where the terminal shows tones.
pub fn toned(tone: Tone, text: &str) -> String {
    let style = match tone {
        Tone::Good => Style::new().green(),
        Tone::Bad => Style::new().red().bold(),
        Tone::Strong => Style::new().bold(),
    };
    style.apply_to(text).to_string()
}

/// How often a line is printed without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// How far a long command is.
pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    started: Instant,
    last_line: Instant,
}

impl Progress {
    /// For `total` steps of something.
    pub fn new(total: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            let style =
                ProgressStyle::with_template("{bar:30} {pos}/{len}  {elapsed}, about {eta} left  {msg}");
            bar.set_style(style.expect("a template that indicatif reads"));
            bar
        });
        Self { bar, total, started: Instant::now(), last_line: Instant::now() }
    }

    /// Says what is going on; `done` steps are finished.
    pub fn at(&mut self, done: u64, what: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(done);
                bar.set_message(what.to_string());
            }
            None if self.last_line.elapsed() >= LINE_EVERY => {
                self.last_line = Instant::now();
                let left = left(self.started.elapsed(), done, self.total);
                tell(&format!("{:>3} %  {what}{left}", 100 * done / self.total.max(1)));
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

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// How long the rest will take at the rate so far, as `; about 3 min left`; empty before there is a rate.
fn left(spent: Duration, done: u64, total: u64) -> String {
    if done == 0 || done >= total {
        return String::new();
    }
    let seconds = spent.as_secs_f64() * (total - done) as f64 / done as f64;
    if seconds < 90.0 {
        format!("; about {seconds:.0} s left")
    } else {
        format!("; about {:.0} min left", seconds / 60.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_from_the_time_spent_and_is_not_made_up() {
        let minute = Duration::from_mins(1);
        assert_eq!(left(minute, 0, 100), "");
        assert_eq!(left(minute, 50, 100), "; about 60 s left");
        assert_eq!(left(minute, 10, 100), "; about 9 min left");
        assert_eq!(left(minute, 100, 100), "");
    }
}
