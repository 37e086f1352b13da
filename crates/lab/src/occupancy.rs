//! How many blocks an SM holds at once, from a kernel's figures and the target's limits.

use flashcore::plan::Target;
use serde::Serialize;

/// What limits the number of blocks on an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// Threads that an SM can hold.
    Threads,
    /// Registers of an SM.
    Registers,
    /// Shared memory of an SM.
    Shared,
    /// Blocks that an SM can hold.
    Blocks,
}

/// Blocks and warps that an SM holds at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Occupancy {
    /// Blocks per SM.
    pub blocks: u32,
    /// Warps per SM.
    pub warps: u32,
    /// Warps that an SM could hold.
    pub max_warps: u32,
    /// What keeps another block out.
    pub limit: Limit,
}

/// What an SM of a target has.
struct Sm {
    warps: u32,
    blocks: u32,
    shared: u32,
}

const REGISTERS: u32 = 65_536;

/// Shared memory per block that the system keeps for itself.
const RESERVED: u32 = 1024;

fn sm(target: Target) -> Sm {
    match target {
        Target::Sm80 => Sm { warps: 64, blocks: 32, shared: 164 * 1024 },
        Target::Sm89 => Sm { warps: 48, blocks: 24, shared: 100 * 1024 },
        Target::Sm90 | Target::Sm90a => Sm { warps: 64, blocks: 32, shared: 228 * 1024 },
    }
}

impl Occupancy {
    /// For blocks with these threads, registers per thread and shared memory.
    pub fn of(target: Target, threads: u32, registers: u32, shared: u32) -> Self {
        let sm = sm(target);
        let warps = threads.div_ceil(32).max(1);
        // Registers are allocated to a warp in units of 256.
        let registers_per_warp = (registers * 32).next_multiple_of(256).max(256);
        let by = [
            (sm.warps / warps, Limit::Threads),
            (REGISTERS / registers_per_warp / warps, Limit::Registers),
            (sm.shared / (shared + RESERVED).next_multiple_of(128), Limit::Shared),
            (sm.blocks, Limit::Blocks),
        ];
        let (blocks, limit) = by.into_iter().min_by_key(|&(blocks, _)| blocks).unwrap_or((0, Limit::Blocks));
        Self { blocks, warps: blocks * warps, max_warps: sm.warps, limit }
    }
}

impl std::fmt::Display for Occupancy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let limit = match self.limit {
            Limit::Threads => "threads",
            Limit::Registers => "registers",
            Limit::Shared => "shared memory",
            Limit::Blocks => "the number of blocks",
        };
        write!(
            f,
            "{} blocks per SM, {} of {} warps, limited by {limit}",
            self.blocks, self.warps, self.max_warps
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scarcest_resource_decides() {
        let of = |registers, shared| Occupancy::of(Target::Sm80, 128, registers, shared);
        assert_eq!(of(255, 0), Occupancy { blocks: 2, warps: 8, max_warps: 64, limit: Limit::Registers });
        assert_eq!(of(32, 80 * 1024), Occupancy { blocks: 2, warps: 8, max_warps: 64, limit: Limit::Shared });
        assert_eq!(of(32, 0).limit, Limit::Threads);
        assert_eq!(Occupancy::of(Target::Sm89, 32, 16, 0).limit, Limit::Blocks);
    }

    #[test]
    fn two_blocks_of_the_largest_shared_memory_do_not_fit() {
        assert_eq!(Occupancy::of(Target::Sm90a, 384, 168, 227 * 1024).blocks, 1);
    }
}
