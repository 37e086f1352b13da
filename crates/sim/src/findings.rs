//! What the simulator finds wrong with a kernel.

use std::collections::HashMap;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use flashcore_ptx::Kernel;

use crate::stream::PastLaunch;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FindingKind {
    /// An access outside of every allocation.
    OutOfBounds,
    /// An address that is not a multiple of what the access needs.
    Misaligned,
    /// A read of global memory that holds no value.
    UninitialisedGlobal,
    /// A read of shared memory that holds no value.
    UninitialisedShared,
    /// A read of a register that holds no value.
    UninitialisedRegister,
    /// Two accesses to shared memory, one a write, that nothing orders.
    SharedRace,
    /// Two accesses to global memory, one a write, that nothing orders.
    GlobalRace,
    /// Global memory that the kernel writes and reads by `ld.global.nc`, whose cache does not see writes, in whatever order.
    ReadOnlyWritten,
    /// Accesses by two lanes of one warp, one a write, without a warp barrier between them.
    WarpRace,
    /// An ordinary and an asynchronous access without `fence.proxy.async` between them.
    MissingProxyFence,
    /// A register of a `wgmma` touched before its wait.
    WgmmaRegister,
    /// A `wgmma` on registers touched since the last `wgmma.fence`.
    MissingWgmmaFence,
    /// Warps of a warpgroup that do not execute `wgmma` together.
    WarpgroupSplit,
    /// All warps wait, and nothing is in flight that could wake one.
    Deadlock,
    /// A block barrier used with the wrong number of threads, or left incomplete.
    BarrierMisuse,
    /// An mbarrier used before its initialisation or after its end, with more arrivals than it expects, or waited for after
    /// it has moved on by two phases.
    MbarrierMisuse,
    /// Lanes that should execute an instruction together do not.
    DivergentCollective,
    /// A block ends while asynchronous operations are in flight.
    PendingAtExit,
    /// Registers asked for or given back beyond the block's pool.
    RegisterPool,
    /// A tensor map, descriptor or copy that the hardware does not accept.
    BadDescriptor,
    /// A block that ends while another block of its cluster may still access it, or a rank that does not exist.
    ClusterMisuse,
    /// Global memory touched while a grid before may still write it, or written while one may still read it:
    /// `griddepcontrol.wait` is missing. [`Launching`](crate::Launching) says which grids may be in flight.
    EarlyGridAccess,
    /// `trap` was executed.
    Trap,
    /// The launch did not end within its budget of instructions.
    Budget,
}

impl FindingKind {
    /// A few words.
    pub const fn title(self) -> &'static str {
        match self {
            FindingKind::OutOfBounds => "out of bounds",
            FindingKind::Misaligned => "misaligned",
            FindingKind::UninitialisedGlobal => "uninitialised global memory",
            FindingKind::UninitialisedShared => "uninitialised shared memory",
            FindingKind::UninitialisedRegister => "uninitialised register",
            FindingKind::SharedRace => "race in shared memory",
            FindingKind::GlobalRace => "race in global memory",
            FindingKind::ReadOnlyWritten => "ld.global.nc of memory that is written",
            FindingKind::WarpRace => "race between lanes of a warp",
            FindingKind::MissingProxyFence => "missing fence.proxy.async",
            FindingKind::WgmmaRegister => "wgmma register in flight",
            FindingKind::MissingWgmmaFence => "missing wgmma.fence",
            FindingKind::WarpgroupSplit => "warpgroup split",
            FindingKind::Deadlock => "deadlock",
            FindingKind::BarrierMisuse => "barrier misuse",
            FindingKind::MbarrierMisuse => "mbarrier misuse",
            FindingKind::DivergentCollective => "divergent collective",
            FindingKind::PendingAtExit => "asynchronous operations pending at exit",
            FindingKind::RegisterPool => "register pool",
            FindingKind::BadDescriptor => "bad descriptor",
            FindingKind::ClusterMisuse => "cluster misuse",
            FindingKind::EarlyGridAccess => "access beside a grid in flight",
            FindingKind::Trap => "trap",
            FindingKind::Budget => "instruction budget used up",
        }
    }
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Undefined by the memory model, though today's hardware happens to cope.
    Warning,
    /// Wrong.
    Error,
}

/// An instruction, in the kernel author's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Its index in the kernel's body.
    pub pc: u32,
    /// The instruction as PTX has it.
    pub instruction: String,
    /// The section it stands in.
    pub section: Option<String>,
    /// Its comment, or the nearest one before it in the section.
    pub comment: Option<String>,
    /// The Rust line that emitted it.
    pub loc: Option<&'static Location<'static>>,
}

impl Site {
    /// The site of an instruction.
    pub fn of(kernel: &Kernel, pc: u32) -> Site {
        let place = kernel.describe(pc as usize);
        Site {
            pc,
            instruction: kernel.body.get(pc as usize).map_or("the end".to_string(), |inst| kernel.line(inst)),
            section: place.section.map(str::to_string),
            comment: place.comment.map(str::to_string),
            loc: place.loc,
        }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {}", self.pc, self.instruction)?;
        for words in [&self.section, &self.comment].into_iter().flatten() {
            write!(f, " · {words}")?;
        }
        if let Some(loc) = self.loc {
            write!(f, " ({}:{})", loc.file(), loc.line())?;
        }
        Ok(())
    }
}

/// A thread of the launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Thread {
    /// The block.
    pub block: [u32; 3],
    /// The warp in the block.
    pub warp: u32,
    /// The lane in the warp.
    pub lane: u32,
}

impl fmt::Display for Thread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        write!(f, "block ({x},{y},{z}) warp {} lane {}", self.warp, self.lane)
    }
}

/// Where in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlace {
    /// The address as the kernel has it.
    pub address: u64,
    /// The allocation and the offset in it, in words.
    pub description: String,
}

/// The other of two accesses that conflict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherAccess {
    /// Its kernel, if that is the kernel of an earlier launch.
    pub kernel: Option<String>,
    /// Its instruction.
    pub site: Site,
    /// Who: a thread, or an asynchronous operation.
    pub by: String,
    /// Whether it wrote.
    pub wrote: bool,
}

/// One thing that is wrong with a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub kind: FindingKind,
    /// How bad.
    pub severity: Severity,
    /// The details.
    pub message: String,
    /// The instruction.
    pub site: Site,
    /// Who executed it, the first time.
    pub thread: Thread,
    /// Where in memory, if it concerns memory.
    pub place: Option<MemoryPlace>,
    /// The access that it conflicts with.
    pub other: Option<OtherAccess>,
    /// What would have ordered the two.
    pub missing: Option<String>,
    /// How often it was seen at this instruction.
    pub occurrences: u64,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        write!(f, "{level}: {}: {}", self.kind.title(), self.message)?;
        write!(f, "\n  at {}\n  by {}", self.site, self.thread)?;
        if let Some(place) = &self.place {
            write!(f, "\n  address {:#x}: {}", place.address, place.description)?;
        }
        if let Some(other) = &self.other {
            let did = if other.wrote { "wrote" } else { "read" };
            write!(f, "\n  {} {did} it at {}", other.by, other.site)?;
        }
        if let Some(missing) = &self.missing {
            write!(f, "\n  missing: {missing}")?;
        }
        if self.occurrences > 1 {
            write!(f, "\n  seen {} times", self.occurrences)?;
        }
        Ok(())
    }
}

/// A finding before its sites are put into words; many are seen again and only counted.
#[derive(Clone, Debug)]
pub(crate) struct Raw {
    pub kind: FindingKind,
    pub severity: Severity,
    pub pc: u32,
    pub thread: Thread,
    pub message: String,
    pub place: Option<MemoryPlace>,
    pub other: Option<RawOther>,
    pub missing: Option<String>,
}

/// The other of two accesses before its site is put into words.
#[derive(Clone, Debug)]
pub(crate) struct RawOther {
    pub pc: u32,
    /// The launch that it belongs to, if that is an earlier one.
    pub launch: Option<Arc<PastLaunch>>,
    pub by: String,
    pub wrote: bool,
}

impl RawOther {
    /// An access of the launch that the finding is about.
    pub fn own(pc: u32, by: String, wrote: bool) -> RawOther {
        RawOther { pc, launch: None, by, wrote }
    }

    /// What tells it apart from other accesses: its launch and its instruction.
    fn key(&self) -> OtherKey {
        (self.launch.as_ref().map_or(THIS_LAUNCH, |launch| launch.id), self.pc)
    }

    fn into_words(self, kernel: &Kernel) -> OtherAccess {
        let own = || Site::of(kernel, self.pc);
        let (site, kernel) = match &self.launch {
            None => (own(), None),
            Some(past) => (past.sites.get(&self.pc).cloned().unwrap_or_else(own), Some(past.kernel.clone())),
        };
        OtherAccess { kernel, site, by: self.by, wrote: self.wrote }
    }
}

/// The launch and the instruction of the other access.
pub(crate) type OtherKey = (u64, u32);
/// The launch that runs, in an [`OtherKey`].
pub(crate) const THIS_LAUNCH: u64 = 0;
/// There is no other access.
pub(crate) const NO_OTHER: OtherKey = (THIS_LAUNCH, u32::MAX);

/// The findings of a launch, each kind once for an instruction (and the one it conflicts with).
#[derive(Default)]
pub(crate) struct FindingSet {
    seen: HashMap<(FindingKind, u32, OtherKey), usize>,
    list: Vec<(Raw, u64)>,
}

impl FindingSet {
    /// Whether this is known already; then it is only counted.
    pub fn again(&mut self, kind: FindingKind, pc: u32, other: OtherKey) -> bool {
        match self.seen.get(&(kind, pc, other)) {
            Some(&i) => {
                self.list[i].1 += 1;
                true
            }
            None => false,
        }
    }

    /// Adds a finding, or counts it if it is known.
    pub fn add(&mut self, raw: Raw) {
        self.add_counted(raw, 1);
    }

    fn add_counted(&mut self, raw: Raw, count: u64) {
        let other = raw.other.as_ref().map_or(NO_OTHER, RawOther::key);
        let list = &mut self.list;
        let i = *self.seen.entry((raw.kind, raw.pc, other)).or_insert_with(|| {
            list.push((raw, 0));
            list.len() - 1
        });
        self.list[i].1 += count;
    }

    /// Adds all findings of another set.
    pub fn merge(&mut self, other: FindingSet) {
        for (raw, count) in other.list {
            self.add_counted(raw, count);
        }
    }

    /// The number of different findings.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// The findings in words, errors first, in program order.
    pub fn into_findings(self, kernel: &Kernel) -> Vec<Finding> {
        let mut list = self.list;
        list.sort_by_key(|(raw, _)| (std::cmp::Reverse(raw.severity), raw.pc, raw.kind));
        let word = |(raw, occurrences): (Raw, u64)| Finding {
            kind: raw.kind,
            severity: raw.severity,
            message: raw.message,
            site: Site::of(kernel, raw.pc),
            thread: raw.thread,
            place: raw.place,
            other: raw.other.map(|other| other.into_words(kernel)),
            missing: raw.missing,
            occurrences,
        };
        list.into_iter().map(word).collect()
    }
}
