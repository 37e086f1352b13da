//! The tuned table: schedules that a search found faster than the planner's own choice, by device and problem.
//!
//! One table is shipped with the crate; the user's own, for the GPUs at hand, stands in the cache folder and goes before
//! it. An entry is used for the problem that it was measured on and for such that are near: the same kind of problem, of
//! about the same size, that gives the multiprocessors as many rounds of work.
//!
//! A table is a text, one entry per line: `device | target | problem | schedule | speed-up`.

use std::{
    fmt,
    io::Write,
    path::{Path, PathBuf},
    str::FromStr,
    sync::OnceLock,
};

use flashcore_kernels::{Blocks, Schedule, Spec};
use flashcore_ptx::Target;

use crate::{
    Error, Problem, Result, Source,
    cuda::CubinCache,
    plan::{Hardware, fold},
};

/// What is shipped.
const SHIPPED: &str = include_str!("../tuned/h200.txt");

/// The name of the user's table in the cache folder.
const FILE: &str = "tuned.txt";

/// A file beside it that whoever records holds a lock on.
const TURN: &str = ".tuned.lock";

/// How far a problem may be from the one that was measured: the sum of the binary logarithms of what its heads, queries
/// and keys differ by.
const NEAR: f64 = 0.5;

/// From so many rounds of work on, one more or less does not matter.
const MANY_ROUNDS: u64 = 8;

/// Where an entry comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It is shipped with the crate.
    Shipped,
    /// It was found on this machine.
    User,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Origin::Shipped => "the shipped table",
            Origin::User => "this machine's table",
        })
    }
}

/// A schedule that was measured to be faster than the planner's choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The device's name.
    pub device: String,
    /// What the code is for.
    pub target: Target,
    /// The problem that it was measured on; its mask is none or causal.
    pub problem: Problem,
    /// The schedule.
    pub schedule: Schedule,
    /// How many times faster it was than the planner's choice.
    pub speed_up: f64,
}

/// A table of entries.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    entries: Vec<(Entry, Origin)>,
}

impl Table {
    /// What plans are chosen by: the user's table and the shipped one, read once per process. A user's table that
    /// cannot be read is as good as none.
    pub fn current() -> &'static Self {
        static CURRENT: OnceLock<Table> = OnceLock::new();
        CURRENT.get_or_init(|| {
            let user = user_file().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
            let mut table = Self::parse(&user, Origin::User).unwrap_or_default();
            table.entries.extend(Self::shipped().entries);
            table
        })
    }

    /// The table that is shipped.
    pub fn shipped() -> Self {
        Self::parse(SHIPPED, Origin::Shipped).unwrap_or_default()
    }

    /// Reads a table's text.
    pub fn parse(text: &str, origin: Origin) -> Result<Self> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let entries = lines.map(|line| line.parse().map(|entry| (entry, origin)));
        entries.collect::<Result<_>>().map(|entries| Self { entries })
    }

    /// The entries, with where they come from.
    pub fn entries(&self) -> &[(Entry, Origin)] {
        &self.entries
    }

    /// The entry for a problem on some hardware: the nearest that is near enough and whose schedule fits.
    pub(crate) fn find(
        &self,
        problem: &Problem,
        spec: &Spec,
        hardware: &Hardware,
    ) -> Option<&(Entry, Origin)> {
        let near = |of: &&(Entry, Origin)| {
            let entry = &of.0;
            entry.target == hardware.target
                && short_name(&entry.device) == short_name(&hardware.name)
                && is_same_kind(&entry.problem, problem)
                && distance(&entry.problem, problem) <= NEAR
                // What fits no kernel has no geometry either.
                && entry.schedule.check(spec, hardware.target).is_ok()
                && has_same_rounds(entry, problem, spec, hardware)
        };
        let far = |of: &&(Entry, Origin)| distance(&of.0.problem, problem);
        self.entries.iter().filter(near).min_by(|a, b| far(a).total_cmp(&far(b)))
    }
}

/// Where the user's table is, if there is a cache folder.
pub fn user_file() -> Option<PathBuf> {
    CubinCache::of_user().folder().map(|folder| folder.join(FILE))
}

/// Puts entries into a table's file, in the place of those for the same device and problem. The file is replaced whole,
/// and who records at the same time waits.
pub fn record(path: &Path, found: &[Entry]) -> Result<()> {
    let refuse = |what: &'static str, source: Source| Error::File { what, path: path.into(), source };
    let unwritten = |error: std::io::Error| refuse("write", error.into());
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(unwritten)?;
    let turn = std::fs::File::create(folder.join(TURN)).map_err(unwritten)?;
    match turn.lock() {
        // Some network file systems have no locks.
        Err(error) if error.kind() != std::io::ErrorKind::Unsupported => {
            return Err(refuse("lock", error.into()));
        }
        _ => {}
    }
    let before = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(refuse("read", error.into())),
    };
    let kept = Table::parse(&before, Origin::User).map_err(|error| refuse("read", error.into()))?.entries;
    let is_replaced = |old: &Entry| {
        found
            .iter()
            .any(|new| (&new.device, new.target, new.problem) == (&old.device, old.target, old.problem))
    };
    let kept = kept.into_iter().map(|(entry, _)| entry).filter(|entry| !is_replaced(entry));
    let lines: Vec<String> = kept.chain(found.iter().cloned()).map(|entry| entry.to_string()).collect();
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(unwritten)?;
    writeln!(file, "{}", lines.join("\n")).map_err(unwritten)?;
    file.persist(path).map_err(|error| unwritten(error.error))?;
    Ok(())
}

fn short_name(device: &str) -> &str {
    device.strip_prefix("NVIDIA ").unwrap_or(device)
}

/// Whether two problems differ in nothing but sizes, the scale, and the lse, which costs nothing.
fn is_same_kind(a: &Problem, b: &Problem) -> bool {
    let kind = |it: &Problem| Problem {
        batch: 1,
        heads_q: it.group(),
        heads_kv: 1,
        len_q: 1,
        len_k: 1,
        scale: 1.0,
        lse: false,
        ..*it
    };
    kind(a) == kind(b)
}

fn distance(a: &Problem, b: &Problem) -> f64 {
    let apart = |a: usize, b: usize| (a.max(1) as f64 / b.max(1) as f64).log2().abs();
    apart(a.batch * a.heads_q, b.batch * b.heads_q) + apart(a.len_q, b.len_q) + apart(a.len_k, b.len_k)
}

/// Whether the multiprocessors take up tiles as often as they did when the entry was measured.
fn has_same_rounds(entry: &Entry, problem: &Problem, spec: &Spec, hardware: &Hardware) -> bool {
    let geometry = entry.schedule.geometry(spec);
    let at_once = match geometry.blocks {
        Blocks::Each(_)
        | Blocks::EachKeys(_)
        | Blocks::EachPacked
        | Blocks::KeyRow
        | Blocks::QueriesThenKeys { .. } => hardware.sms,
        Blocks::Row { cluster, resident, .. } => hardware.sms * resident.unwrap_or(1) / cluster.max(1),
        Blocks::Packed { resident } | Blocks::Shares { resident } => hardware.sms * resident,
    };
    let rounds = |of: &Problem| {
        let of = fold(of, entry.schedule.kernel()).problem;
        geometry
            .tiles(of.batch as u32, of.heads_q as u32, of.len_q as u32)
            .div_ceil(u64::from(at_once.max(1)))
    };
    let (measured, asked) = (rounds(&entry.problem), rounds(problem));
    measured == asked || measured.min(asked) >= MANY_ROUNDS
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, target, problem, schedule, speed_up } = self;
        write!(f, "{device} | {target} | {problem} | {schedule} | {speed_up:.4}")
    }
}

impl FromStr for Entry {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self> {
        let refuse = |why: String| Error::Text { what: "tuned entry", given: line.into(), why };
        let fields: Vec<&str> = line.split('|').map(str::trim).collect();
        let [device, target, problem, schedule, speed_up] = fields[..] else {
            return Err(refuse("write it as device | target | problem | schedule | speed-up".into()));
        };
        Ok(Self {
            device: device.into(),
            target: Target::from_name(target).ok_or_else(|| refuse(format!("'{target}' is not a target")))?,
            problem: problem.parse().map_err(|error: Error| refuse(error.to_string()))?,
            schedule: schedule.parse().map_err(|error| refuse(format!("{error}")))?,
            speed_up: speed_up
                .parse()
                .ok()
                .filter(|times: &f64| times.is_finite() && *times > 0.0)
                .ok_or_else(|| refuse(format!("'{speed_up}' is not a number above 0")))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Mask, plan::Plan};

    const SCHEDULE: &str = "sm80_fwd:block_m=64,block_n=32,warps=4,stages=3,q_in_regs=0,order=longest";

    fn table(lines: &[&str]) -> Table {
        Table::parse(&lines.join("\n"), Origin::User).unwrap()
    }

    fn line(problem: &str) -> String {
        format!("NVIDIA A100 | sm_80 | {problem} | {SCHEDULE} | 1.05")
    }

    fn mission() -> Problem {
        Problem::new(1, 8, 512, 64, DType::F16)
    }

    fn chosen(table: &Table, problem: &Problem, name: &str) -> Plan {
        let hardware = Hardware { name: name.into(), ..Hardware::typical(Target::Sm80) };
        Plan::choose_by(problem, &hardware, table).unwrap()
    }

    #[test]
    fn an_entry_reads_back_what_it_prints() {
        let text = line("1x8/2x512/600x64/128 bf16 causal");
        let entry: Entry = text.parse().unwrap();
        assert_eq!((entry.problem.heads_kv, entry.problem.len_k, entry.problem.head_dim_v), (2, 600, 128));
        assert_eq!(entry.to_string().parse(), Ok(entry));
    }

    #[test]
    fn what_is_shipped_can_be_read_and_every_schedule_fits_its_problem() {
        let table = Table::parse(SHIPPED, Origin::Shipped).unwrap();
        for (entry, _) in table.entries() {
            let hardware = Hardware { name: entry.device.clone(), ..Hardware::typical(entry.target) };
            assert!(Plan::with_schedule(&entry.problem, &hardware, entry.schedule).is_ok(), "{entry}");
            assert!(entry.speed_up > 1.0);
        }
    }

    #[test]
    fn the_entry_of_a_problem_is_chosen_and_the_plan_says_where_it_is_from() {
        let table = table(&[&line("1x8/8x512/512x64/64 f16 full")]);
        let plan = chosen(&table, &mission(), "A100");
        assert_eq!(plan.main().schedule.to_string(), SCHEDULE);
        assert!(
            plan.reason.contains("this machine's table") && plan.reason.contains("5.0 %"),
            "{}",
            plan.reason
        );
        let with_lse = chosen(&table, &mission().with_lse(), "A100");
        assert_eq!(with_lse.main().schedule, plan.main().schedule);
    }

    #[test]
    fn a_near_problem_takes_the_entry_and_one_that_is_far_or_of_another_kind_does_not() {
        let table = table(&[&line("1x8/8x512/512x64/64 f16 full")]);
        let tuned = |problem: Problem, name: &str| {
            chosen(&table, &problem, name).main().schedule.to_string() == SCHEDULE
        };
        assert!(tuned(Problem::new(1, 8, 600, 64, DType::F16), "A100"));
        assert!(!tuned(Problem::new(1, 8, 1024, 64, DType::F16), "A100"));
        // 10 heads are near 8, but 14 x 10 blocks of 64 queries are more than 108 SMs take up at once.
        assert!(!tuned(Problem::new(1, 14, 512, 64, DType::F16), "A100"));
        assert!(!tuned(mission().with_mask(Mask::Causal), "A100"));
        assert!(!tuned(Problem::new(1, 8, 512, 64, DType::BF16), "A100"));
        assert!(!tuned(mission().with_softcap(5.0), "A100"));
        assert!(!tuned(mission(), "A30"));
    }

    #[test]
    fn an_entry_whose_schedule_no_kernel_can_have_is_passed_over() {
        let absurd = line("1x8/8x512/512x64/64 f16 full").replace("block_n=32", "block_n=4294967295");
        let plan = chosen(&table(&[&absurd]), &mission(), "A100");
        assert!(!plan.reason.contains("this machine's table"), "{}", plan.reason);
    }

    #[test]
    fn of_two_near_entries_the_nearer_is_taken() {
        let other = line("1x8/8x560/560x64/64 f16 full").replace("block_n=32", "block_n=48");
        let table = table(&[&line("1x8/8x512/512x64/64 f16 full"), &other]);
        let block_n = |len| {
            chosen(&table, &Problem::new(1, 8, len, 64, DType::F16), "A100").main().schedule.to_string()
        };
        assert!(block_n(520).contains("block_n=32") && block_n(550).contains("block_n=48"));
    }

    #[test]
    fn what_is_recorded_replaces_the_entry_of_the_same_problem_and_keeps_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new").join(FILE);
        let first: Entry = line("1x8/8x512/512x64/64 f16 full").parse().unwrap();
        let other: Entry = line("1x8/8x512/512x64/64 bf16 full").parse().unwrap();
        record(&path, &[first.clone(), other.clone()]).unwrap();
        let better = Entry { speed_up: 1.2, ..first };
        record(&path, std::slice::from_ref(&better)).unwrap();
        let table = Table::parse(&std::fs::read_to_string(&path).unwrap(), Origin::User).unwrap();
        let entries: Vec<&Entry> = table.entries().iter().map(|(entry, _)| entry).collect();
        assert_eq!(entries, [&other, &better]);
        std::fs::write(&path, "nonsense").unwrap();
        assert!(record(&path, &[better]).unwrap_err().to_string().contains("'nonsense'"));
    }

    #[test]
    fn what_is_recorded_at_the_same_time_is_all_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        std::thread::scope(|scope| {
            for thread in 1..5 {
                let path = &path;
                scope.spawn(move || {
                    for number in 1..9 {
                        let entry = line(&format!("{thread}x8/8x{number}/512x64/64 f16 full"));
                        record(path, &[entry.parse().unwrap()]).unwrap();
                    }
                });
            }
        });
        let table = Table::parse(&std::fs::read_to_string(&path).unwrap(), Origin::User).unwrap();
        assert_eq!(table.entries().len(), 32);
    }

    #[test]
    fn a_speed_up_that_is_no_number_above_zero_is_refused() {
        for wrong in ["nan", "inf", "-1", "0", "1e999", "fast"] {
            let text = line("1x8/8x512/512x64/64 f16 full").replace("1.05", wrong);
            assert!(text.parse::<Entry>().unwrap_err().to_string().contains("above 0"), "{wrong}");
        }
    }
}
