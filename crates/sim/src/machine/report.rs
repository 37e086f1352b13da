//! The words for what instructions do wrong: where in memory, which other access, and what is missing between the two.

use std::sync::atomic::Ordering::Relaxed;

use crate::error::SimError;
use crate::findings::{FindingKind, MemoryPlace, NO_OTHER, Raw, RawOther, Severity, THIS_LAUNCH};
use crate::machine::Cluster;
use crate::races::clock::{Edge, Stamp};
use crate::races::global_shadow::GlobalConflict;
use crate::races::shared_shadow::SharedConflict;

impl Cluster<'_> {
    /// Reports something at an instruction of a warp.
    #[cold]
    pub fn report(
        &mut self,
        warp: usize,
        lane: u32,
        pc: u32,
        kind: FindingKind,
        severity: Severity,
        message: impl FnOnce(&Self) -> (String, Option<MemoryPlace>),
    ) {
        if self.tally.findings.again(kind, pc, NO_OTHER) {
            return;
        }
        let (message, place) = message(self);
        let thread = self.thread(warp, lane);
        let raw = Raw { kind, severity, pc, thread, message, place, other: None, missing: None };
        self.tally.findings.add(raw);
    }

    /// Reports an error at an instruction of a warp that concerns no address.
    #[cold]
    pub fn report_error(&mut self, warp: usize, lane: u32, pc: u32, kind: FindingKind, message: String) {
        self.report(warp, lane, pc, kind, Severity::Error, |_| (message, None));
    }

    /// Ends the launch because of an instruction that is not implemented.
    #[cold]
    pub fn unsupported(&mut self, pc: u32, why: &str) {
        let kernel = self.launch.program.kernel;
        self.tally.error.get_or_insert_with(|| SimError::Unsupported {
            kernel: kernel.name.clone(),
            instruction: kernel.line(&kernel.body[pc as usize]),
            place: kernel.describe(pc as usize).to_string(),
            why: why.to_string(),
        });
        self.launch.stop.store(true, Relaxed);
    }

    /// Where a shared address lies, in words.
    pub fn shared_place(&self, block: usize, address: u32) -> MemoryPlace {
        let allocs = self.launch.program.kernel.shared.allocs();
        let names: Vec<String> = allocs
            .iter()
            .filter(|a| (a.offset..a.offset + a.bytes).contains(&address))
            .map(|a| format!("{} + {}", a.name, address - a.offset))
            .collect();
        let len = self.blocks[block].shared.len();
        let mut description = if names.is_empty() && address >= len {
            format!("shared memory ends at {len}")
        } else if names.is_empty() && allocs.is_empty() {
            format!("shared memory + {address}")
        } else if names.is_empty() {
            "shared memory between allocations".to_string()
        } else {
            format!("shared {}", names.join(" = "))
        };
        if self.blocks.len() > 1 {
            description = format!("{description} of block {block} of the cluster");
        }
        MemoryPlace { address: u64::from(address), description }
    }

    /// Where a global address lies, in words.
    pub fn global_place(&self, address: u64) -> MemoryPlace {
        MemoryPlace { address, description: format!("global {}", self.launch.memory.describe(address)) }
    }

    /// Who made an access, in words.
    fn agent_name(&self, stamp: Stamp) -> String {
        let (warp, asynchronous) = self.agents.warp_of(stamp.agent);
        let thread = self.thread(warp, stamp.lanes.any());
        if asynchronous { format!("an asynchronous operation of {thread}") } else { thread.to_string() }
    }

    /// Whether an instruction's accesses are atomic or ordered, so that two such do not race.
    pub fn is_strong(&self, pc: u32) -> bool {
        use flashcore_ptx::{Op, Order};
        match self.launch.program.code[pc as usize].op {
            Op::Atom { .. } | Op::Red { .. } | Op::BulkReduce { .. } | Op::TensorReduce { .. } => true,
            Op::Ld { order, .. } | Op::St { order, .. } => order != Order::Weak,
            _ => false,
        }
    }

    /// Reports a conflict in the shared memory of a block.
    #[cold]
    pub fn report_conflict(
        &mut self,
        warp: usize,
        lane: u32,
        pc: u32,
        block: usize,
        write: bool,
        found: SharedConflict,
    ) {
        if self.is_strong(pc) && self.is_strong(found.prior_pc) {
            return;
        }
        let (kind, severity) = match found.edge {
            Edge::MissingProxyFence if !found.prior_wrote => {
                (FindingKind::MissingProxyFence, Severity::Warning)
            }
            Edge::MissingProxyFence => (FindingKind::MissingProxyFence, Severity::Error),
            Edge::MissingWarpBarrier => (FindingKind::WarpRace, Severity::Warning),
            Edge::Missing | Edge::Ordered => (FindingKind::SharedRace, Severity::Error),
        };
        if self.tally.findings.again(kind, pc, (THIS_LAUNCH, found.prior_pc)) {
            return;
        }
        let raw = Raw {
            kind,
            severity,
            pc,
            thread: self.thread(warp, lane),
            message: format!(
                "{} of shared memory that is not ordered after {}",
                if write { "a write" } else { "a read" },
                if found.prior_wrote { "a write" } else { "a read" },
            ),
            place: Some(self.shared_place(block, found.address)),
            other: Some(RawOther::own(found.prior_pc, self.agent_name(found.prior), found.prior_wrote)),
            missing: Some(self.missing_edge(found.edge, found.prior, write, found.prior_wrote)),
        };
        self.tally.findings.add(raw);
    }

    /// Reports a conflict in global memory.
    #[cold]
    pub fn report_global_conflict(
        &mut self,
        warp: usize,
        lane: u32,
        pc: u32,
        address: u64,
        write: bool,
        found: GlobalConflict,
    ) {
        let prior = found.prior;
        if !found.non_coherent && self.is_strong(pc) && self.is_strong(prior.pc) {
            return;
        }
        let (kind, severity) = match found.edge {
            _ if found.non_coherent => (FindingKind::ReadOnlyWritten, Severity::Error),
            Edge::MissingProxyFence => (FindingKind::MissingProxyFence, Severity::Error),
            Edge::MissingWarpBarrier => (FindingKind::WarpRace, Severity::Warning),
            Edge::Missing | Edge::Ordered => (FindingKind::GlobalRace, Severity::Error),
        };
        if self.tally.findings.again(kind, pc, (THIS_LAUNCH, prior.pc)) {
            return;
        }
        let (by, missing) = if prior.cluster == self.id {
            (
                self.agent_name(prior.stamp),
                self.missing_edge(found.edge, prior.stamp, write, found.prior_wrote),
            )
        } else {
            let by = format!("another block (cluster {})", prior.cluster);
            (by, "a release and an acquire of gpu scope between the two blocks, with a barrier where other threads made \
                 the accesses; or atomics"
                .to_string())
        };
        let (message, missing) = if found.non_coherent {
            let what = if write {
                "a write of global memory that ld.global.nc has read"
            } else {
                "ld.global.nc of global memory that the kernel has written"
            };
            (
                what.to_string(),
                "ld.global without .nc, which promises that nobody writes the memory while the kernel runs"
                    .to_string(),
            )
        } else {
            let kind = |wrote: bool| if wrote { "a write" } else { "a read" };
            let what = format!(
                "{} of global memory that is not ordered after {}",
                kind(write),
                kind(found.prior_wrote)
            );
            (what, missing)
        };
        let raw = Raw {
            kind,
            severity,
            pc,
            thread: self.thread(warp, lane),
            message,
            place: Some(self.global_place(address)),
            other: Some(RawOther::own(prior.pc, by, found.prior_wrote)),
            missing: Some(missing),
        };
        self.tally.findings.add(raw);
    }

    fn missing_edge(&self, edge: Edge, prior: Stamp, write: bool, prior_wrote: bool) -> String {
        let kind = |w: bool| if w { "write" } else { "read" };
        let (_, asynchronous) = self.agents.warp_of(prior.agent);
        match edge {
            Edge::MissingProxyFence => {
                format!("generic {} -> async {} without fence.proxy.async", kind(prior_wrote), kind(write))
            }
            Edge::MissingWarpBarrier => "bar.warp.sync between the lanes".to_string(),
            Edge::Missing | Edge::Ordered if asynchronous => {
                "a wait for the asynchronous operation, and a barrier if another warp waited for it"
                    .to_string()
            }
            Edge::Missing | Edge::Ordered => "a barrier between the two".to_string(),
        }
    }
}
