//! The knobs of the engine: how a problem is cut into tasks and blocks.

use crate::{Error, Result};

/// Threads that a schedule may ask for by name: more than any machine has cores.
const MOST_THREADS: usize = 4096;

/// How a problem is cut: 0 leaves a knob to the default for the head dim and the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Schedule {
    /// Rows (queries times the query heads of a group) that one task holds at most; fewer where there are many
    /// threads.
    pub block_q: usize,
    /// Keys that are worked on between two updates of the running maximum.
    pub block_k: usize,
    /// Keys after which a long row is split into tasks of its own, where there are few rows.
    pub split_k: usize,
    /// Threads.
    pub threads: usize,
}

impl Schedule {
    /// The defaults for head dims `head_dim` and `head_dim_v`, and the threads of this machine.
    pub fn for_head_dims(head_dim: usize, head_dim_v: usize) -> Self {
        // Queries and outputs of a task are to stay in the second-level cache beside a block of keys and values.
        Self {
            block_q: (576 * 256 / (head_dim + head_dim_v).max(1)).clamp(96, 576),
            block_k: if head_dim.max(head_dim_v) <= 256 { 128 } else { 64 },
            split_k: 1024,
            threads: rayon::current_num_threads(),
        }
    }

    /// With every knob that is 0 taken from `defaults`.
    pub fn or(self, defaults: Self) -> Self {
        let pick = |mine: usize, default: usize| if mine == 0 { default } else { mine };
        Self {
            block_q: pick(self.block_q, defaults.block_q),
            block_k: pick(self.block_k, defaults.block_k),
            split_k: pick(self.split_k, defaults.split_k),
            threads: pick(self.threads, defaults.threads),
        }
    }

    /// The knobs as (name, value), in the order that they are printed.
    pub fn knobs(&self) -> [(&'static str, usize); 4] {
        [
            ("block_q", self.block_q),
            ("block_k", self.block_k),
            ("split_k", self.split_k),
            ("threads", self.threads),
        ]
    }

    /// Sets a knob by its name.
    pub fn set(&mut self, knob: &str, value: usize) -> Result<()> {
        let place = match knob {
            "block_q" => &mut self.block_q,
            "block_k" => &mut self.block_k,
            "split_k" => &mut self.split_k,
            "threads" => &mut self.threads,
            _ => {
                let names = self.knobs().map(|(name, _)| name).join(", ");
                return Err(refuse("knob of the CPU engine", knob, format!("possible are {names}")));
            }
        };
        if knob == "threads" && value > MOST_THREADS {
            let why = format!("possible are up to {MOST_THREADS}");
            return Err(refuse("number of threads", &value.to_string(), why));
        }
        *place = value;
        Ok(())
    }
}

fn refuse(what: &'static str, given: &str, why: String) -> Error {
    Error::Text { what, given: given.into(), why }
}

/// As `block_q=576,block_k=128,split_k=1024,threads=2`.
impl std::fmt::Display for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let knobs = self.knobs().map(|(name, value)| format!("{name}={value}"));
        f.write_str(&knobs.join(","))
    }
}

impl std::str::FromStr for Schedule {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let mut schedule = Self::default();
        for part in s.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (knob, value) =
                part.split_once('=').ok_or_else(|| refuse("knob", part, "write it as knob=value".into()))?;
            let value = value.trim();
            let value = value
                .parse()
                .map_err(|_| refuse("knob's value", value, "possible are whole numbers".into()))?;
            schedule.set(knob.trim(), value)?;
        }
        Ok(schedule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_reads_back_what_it_prints() {
        let schedule = Schedule::for_head_dims(64, 128);
        assert_eq!(schedule.to_string().parse(), Ok(schedule));
        assert_eq!("".parse(), Ok(Schedule::default()));
    }

    #[test]
    fn unknown_knobs_and_values_are_named() {
        assert!("block=3".parse::<Schedule>().unwrap_err().to_string().contains("block_q"));
        assert!("block_q=x".parse::<Schedule>().is_err());
        assert!("block_q".parse::<Schedule>().is_err());
        assert!("threads=18446744073709551615".parse::<Schedule>().unwrap_err().to_string().contains("4096"));
    }

    #[test]
    fn only_knobs_left_at_zero_take_the_default() {
        let mine = Schedule { block_q: 7, ..Schedule::default() };
        let full = mine.or(Schedule::for_head_dims(64, 64));
        assert_eq!((full.block_q, full.split_k), (7, 1024));
    }
}
