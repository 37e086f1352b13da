//! The sixteen barriers of a block.

use crate::races::clock::ClockPair;

/// One barrier of a block, by id.
#[derive(Default)]
pub struct NamedBarrier {
    /// The threads that complete the phase, if an arrival has named a number; else all live threads.
    pub expected: Option<u32>,
    /// The threads that have come so far.
    pub arrived: u32,
    /// What those who came have published.
    pub clocks: ClockPair,
    /// The warps that came, and whether they wait.
    pub came: Vec<(usize, bool)>,
    /// The instruction by which the last of them came.
    pub pc: u32,
}

/// What is wrong with an arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BarrierFault {
    /// The number of threads is not a multiple of the warp size, or zero.
    Count(u32),
    /// Others in this phase named another number.
    Disagreement {
        /// What this warp names.
        mine: Option<u32>,
        /// What the first one named.
        theirs: Option<u32>,
    },
    /// More threads came than the phase is for.
    Overflow {
        /// How many came.
        arrived: u32,
        /// How many were expected.
        expected: u32,
    },
    /// The warp has already come in this phase.
    Twice,
}

impl std::fmt::Display for BarrierFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let number = |n: &Option<u32>| n.map_or("all threads".to_string(), |n| format!("{n} threads"));
        match self {
            BarrierFault::Count(n) => write!(f, "{n} threads is not a positive multiple of 32"),
            BarrierFault::Disagreement { mine, theirs } => {
                write!(
                    f,
                    "this warp says {}, an earlier one of the phase said {}",
                    number(mine),
                    number(theirs)
                )
            }
            BarrierFault::Overflow { arrived, expected } => {
                write!(f, "{arrived} threads came to a phase of {expected}")
            }
            BarrierFault::Twice => write!(f, "the warp comes a second time in the same phase"),
        }
    }
}

impl NamedBarrier {
    /// A warp comes to the barrier. A fault is reported, and the arrival still counts.
    pub fn arrive(&mut self, warp: usize, waits: bool, expected: Option<u32>) -> Vec<BarrierFault> {
        let mut faults = Vec::new();
        if let Some(n) = expected
            && (n == 0 || n % 32 != 0)
        {
            faults.push(BarrierFault::Count(n));
        }
        if self.came.is_empty() {
            self.expected = expected;
        } else if self.expected != expected {
            faults.push(BarrierFault::Disagreement { mine: expected, theirs: self.expected });
        }
        if self.came.iter().any(|&(w, _)| w == warp) {
            faults.push(BarrierFault::Twice);
        }
        self.arrived += 32;
        if let Some(n) = self.expected
            && self.arrived > n
            && n != 0
            && n % 32 == 0
        {
            faults.push(BarrierFault::Overflow { arrived: self.arrived, expected: n });
        }
        self.came.push((warp, waits));
        faults
    }

    /// Whether the phase is complete, given the threads of the block that have not exited.
    pub fn complete(&self, live: u32) -> bool {
        !self.came.is_empty() && self.arrived >= self.expected.unwrap_or(live)
    }

    /// Ends the phase: returns those who waited and what all have published.
    pub fn release(&mut self) -> (Vec<usize>, ClockPair) {
        let waited = self.came.iter().filter(|(_, waits)| *waits).map(|&(w, _)| w).collect();
        let clocks = std::mem::take(&mut self.clocks);
        *self = NamedBarrier::default();
        (waited, clocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_completes_when_the_named_number_of_threads_has_come() {
        let mut barrier = NamedBarrier::default();
        assert!(barrier.arrive(0, true, Some(64)).is_empty());
        assert!(!barrier.complete(256));
        assert!(barrier.arrive(1, false, Some(64)).is_empty());
        assert!(barrier.complete(256));
        assert_eq!(barrier.release().0, [0]);
        assert!(!barrier.complete(256));
    }

    #[test]
    fn without_a_number_all_live_threads_are_needed() {
        let mut barrier = NamedBarrier::default();
        barrier.arrive(0, true, None);
        assert!(!barrier.complete(64));
        assert!(barrier.complete(32), "the other warp has exited");
    }

    #[test]
    fn wrong_counts_are_named() {
        let mut barrier = NamedBarrier::default();
        assert_eq!(barrier.arrive(0, true, Some(48)), [BarrierFault::Count(48)]);
        let mut barrier = NamedBarrier::default();
        barrier.arrive(0, true, Some(64));
        assert_eq!(
            barrier.arrive(1, true, Some(96)),
            [BarrierFault::Disagreement { mine: Some(96), theirs: Some(64) }]
        );
        assert_eq!(
            barrier.arrive(1, true, Some(64)),
            [BarrierFault::Twice, BarrierFault::Overflow { arrived: 96, expected: 64 }]
        );
    }
}
