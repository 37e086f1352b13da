//! What a launch did, counted: instructions by class, bank conflicts and sectors by instruction, and the rate.

use std::collections::BTreeMap;
use std::time::Duration;

use flashcore_ptx::Kernel;

use crate::findings::Site;
use crate::machine::Tally;
use crate::memory::banks::Wavefronts;
use crate::program::{Class, Program};

/// What one instruction has cost while a launch runs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counter {
    pub wavefronts: u64,
    pub ideal_wavefronts: u64,
    pub requests: u64,
    pub sectors: u64,
    pub bytes: u64,
}

impl Counter {
    pub fn shared(&mut self, wavefronts: Wavefronts) {
        self.wavefronts += u64::from(wavefronts.taken);
        self.ideal_wavefronts += u64::from(wavefronts.ideal);
    }

    pub fn global(&mut self, sectors: u32, bytes: u32) {
        self.requests += 1;
        self.sectors += u64::from(sectors);
        self.bytes += u64::from(bytes);
    }

    pub fn add(&mut self, other: &Counter) {
        self.wavefronts += other.wavefronts;
        self.ideal_wavefronts += other.ideal_wavefronts;
        self.requests += other.requests;
        self.sectors += other.sectors;
        self.bytes += other.bytes;
    }
}

/// How an instruction used shared memory.
#[derive(Clone, Debug)]
pub struct BankStats {
    /// The instruction.
    pub site: Site,
    /// How often a warp executed it.
    pub executed: u64,
    /// Passes through the banks.
    pub wavefronts: u64,
    /// Passes without conflicts.
    pub ideal: u64,
}

impl BankStats {
    /// Passes lost to conflicts.
    pub fn conflicts(&self) -> u64 {
        self.wavefronts - self.ideal
    }
}

/// How an instruction used global memory.
#[derive(Clone, Debug)]
pub struct SectorStats {
    /// The instruction.
    pub site: Site,
    /// Warp requests.
    pub requests: u64,
    /// 32-byte sectors touched.
    pub sectors: u64,
    /// Bytes asked for.
    pub bytes: u64,
}

impl SectorStats {
    /// Sectors per request.
    pub fn sectors_per_request(&self) -> f64 {
        self.sectors as f64 / self.requests.max(1) as f64
    }

    /// The part of the bytes of those sectors that was asked for.
    pub fn efficiency(&self) -> f64 {
        self.bytes as f64 / (self.sectors.max(1) * 32) as f64
    }
}

/// The counts of a launch.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Warp instructions executed, labels not counted.
    pub warp_instructions: u64,
    /// Warp instructions by class.
    pub mix: BTreeMap<&'static str, u64>,
    /// Tensor-core instructions: a `wgmma` counts once for its warpgroup.
    pub tensor_instructions: u64,
    /// Use of shared memory, one entry per instruction that was executed.
    pub banks: Vec<BankStats>,
    /// Use of global memory, one entry per instruction that was executed.
    pub sectors: Vec<SectorStats>,
    /// How long the launch took to simulate.
    pub wall: Duration,
    /// Host threads that ran it.
    pub threads: usize,
}

impl Stats {
    pub(crate) fn new(program: &Program<'_>, tally: &Tally, wall: Duration, threads: usize) -> Stats {
        let kernel: &Kernel = program.kernel;
        let mut stats = Stats { wall, threads, ..Stats::default() };
        let counted = tally.executed.iter().zip(&tally.counters).zip(&program.code);
        for (pc, ((&executed, counter), code)) in counted.enumerate() {
            if executed == 0 {
                continue;
            }
            stats.warp_instructions += executed;
            *stats.mix.entry(class_name(code.class)).or_default() += executed;
            if code.class == Class::Tensor {
                let warps = if matches!(code.op, flashcore_ptx::Op::Wgmma(_)) { 4 } else { 1 };
                stats.tensor_instructions += executed / warps;
            }
            if counter.wavefronts != 0 {
                stats.banks.push(BankStats {
                    site: Site::of(kernel, pc as u32),
                    executed,
                    wavefronts: counter.wavefronts,
                    ideal: counter.ideal_wavefronts,
                });
            }
            if counter.requests != 0 {
                stats.sectors.push(SectorStats {
                    site: Site::of(kernel, pc as u32),
                    requests: counter.requests,
                    sectors: counter.sectors,
                    bytes: counter.bytes,
                });
            }
        }
        stats
    }

    /// Passes lost to bank conflicts in the whole launch.
    pub fn bank_conflicts(&self) -> u64 {
        self.banks.iter().map(BankStats::conflicts).sum()
    }

    /// Warp instructions per second that were simulated, all threads together.
    pub fn rate(&self) -> f64 {
        self.warp_instructions as f64 / self.wall.as_secs_f64().max(1e-9)
    }
}

/// The name of a class in reports.
fn class_name(class: Class) -> &'static str {
    match class {
        Class::Integer => "integer",
        Class::Float => "float",
        Class::Function => "function",
        Class::Convert => "convert",
        Class::Move => "move",
        Class::Compare => "compare",
        Class::Control => "control",
        Class::Param => "param",
        Class::GlobalLoad => "global load",
        Class::GlobalStore => "global store",
        Class::SharedLoad => "shared load",
        Class::SharedStore => "shared store",
        Class::Matrix => "matrix",
        Class::Tensor => "tensor",
        Class::Atomic => "atomic",
        Class::AsyncCopy => "async copy",
        Class::Warp => "warp",
        Class::Sync => "sync",
        Class::Other => "other",
    }
}
