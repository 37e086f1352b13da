//! mbarriers: phases that complete when all arrivals and all expected bytes have come.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::races::clock::{Agent, ClockPair, Stamp};

/// A map from addresses or other small numbers. It is looked up often, and nobody chooses the keys to collide.
pub type ByNumber<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Spreads a number over all bits.
#[derive(Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0 << 8 | u64::from(byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}

/// One mbarrier in use.
pub struct Mbarrier {
    /// Arrivals that a phase needs.
    pub count: u32,
    /// Arrivals that the present phase still needs.
    pub pending: i64,
    /// Bytes that the present phase still expects; below zero where they came before they were expected.
    pub tx: i64,
    /// The number of phases completed.
    pub phase: u64,
    /// What was published to each phase, by its parity.
    published: [ClockPair; 2],
    /// Who has arrived in each phase, by its parity: warps, and copies that were counted.
    came: [Vec<Stamp>; 2],
    /// When it was initialised, and by which instruction.
    pub init: (Stamp, u32),
    /// Whether the initialisation has been made visible to the asynchronous proxy.
    pub fenced: bool,
    /// The phase of the cluster's barrier at which the warp came that had initialised and fenced it: whoever has waited
    /// for that phase knows of the initialisation, even where the arrival was relaxed.
    pub known_from: Option<u64>,
    /// The phase that each warp has seen complete last.
    seen: ByNumber<usize, u64>,
    /// The warps that wait, and for which phase.
    pub waiting: Vec<(usize, u64)>,
}

/// The answer to a test of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether the phase asked for is complete.
    pub complete: bool,
    /// The barrier has moved on by two phases since this warp looked: the parity it asks for now means another phase.
    pub lapped: bool,
}

impl Mbarrier {
    /// A fresh barrier for this many arrivals per phase.
    pub fn new(count: u32, init: (Stamp, u32)) -> Mbarrier {
        Mbarrier {
            count,
            pending: i64::from(count),
            tx: 0,
            phase: 0,
            published: Default::default(),
            came: Default::default(),
            init,
            fenced: false,
            known_from: None,
            seen: ByNumber::default(),
            waiting: Vec::new(),
        }
    }

    /// Where those who arrive in the present phase publish to.
    pub fn publication(&mut self) -> &mut ClockPair {
        &mut self.published[(self.phase % 2) as usize]
    }

    /// What a warp that has seen the phase of this parity complete may rely on.
    pub fn acquired(&self, parity: u32) -> &ClockPair {
        &self.published[parity as usize & 1]
    }

    /// Notes who arrives in the present phase.
    pub fn note(&mut self, stamp: Stamp) {
        self.came[(self.phase % 2) as usize].push(stamp);
    }

    /// Those who came in the phase before the present one, if this agent was among them.
    ///
    /// An agent that arrives again must know that all of them had arrived: else its two arrivals may fall into one phase.
    pub fn came_before_with(&self, agent: Agent) -> &[Stamp] {
        let came = &self.came[((self.phase + 1) % 2) as usize];
        if came.iter().any(|stamp| stamp.agent == agent) { came } else { &[] }
    }

    /// Counts arrivals. False if that is more than the phase expects.
    pub fn arrive(&mut self, count: u32) -> bool {
        let enough = self.pending >= i64::from(count);
        self.pending -= i64::from(count).min(self.pending);
        enough
    }

    /// Ends the phase if all has come. Returns the warps that were lapped: they still wait for a phase before
    /// the one that has ended.
    pub fn advance(&mut self) -> Option<Vec<usize>> {
        if self.pending > 0 || self.tx != 0 {
            return None;
        }
        let ended = self.phase;
        self.phase += 1;
        self.pending = i64::from(self.count);
        self.publication().clear();
        self.came[(self.phase % 2) as usize].clear();
        Some(self.waiting.iter().filter(|&&(_, phase)| phase < ended).map(|&(warp, _)| warp).collect())
    }

    /// Tests the phase of a parity for a warp.
    pub fn test(&mut self, warp: usize, parity: u32) -> Answer {
        let complete = self.phase % 2 != u64::from(parity & 1);
        // The phase the warp must mean: the one after the last it has seen.
        let next = self.seen.get(&warp).map_or(0, |&seen| seen + 1);
        let means_next = next % 2 == u64::from(parity & 1);
        let lapped = means_next && self.phase >= next + 2;
        if complete && self.phase > 0 {
            self.seen.insert(warp, self.phase - 1);
        }
        Answer { complete, lapped }
    }

    /// The state token that an arrival returns: it names the present phase.
    pub fn token(&self) -> u64 {
        self.phase << 32 | self.pending.cast_unsigned() & 0xFFFF_FFFF
    }

    /// In words, for reports.
    pub fn describe(&self) -> String {
        format!(
            "phase {} (parity {}), {} of {} arrivals pending, {} bytes expected",
            self.phase,
            self.phase % 2,
            self.pending,
            self.count,
            self.tx
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh(count: u32) -> Mbarrier {
        Mbarrier::new(count, (Stamp::NEVER, 0))
    }

    #[test]
    fn a_fresh_barrier_passes_parity_one_and_holds_parity_zero() {
        let mut bar = fresh(1);
        assert!(bar.test(0, 1).complete);
        assert!(!bar.test(0, 0).complete);
    }

    #[test]
    fn a_phase_needs_both_its_arrivals_and_its_bytes() {
        let mut bar = fresh(2);
        bar.tx += 128;
        assert!(bar.arrive(1) && bar.advance().is_none());
        assert!(bar.arrive(1) && bar.advance().is_none());
        bar.tx -= 128;
        assert_eq!(bar.advance(), Some(vec![]));
        assert!(bar.test(0, 0).complete);
        assert_eq!((bar.pending, bar.phase), (2, 1));
    }

    #[test]
    fn an_arrival_too_many_is_refused() {
        let mut bar = fresh(1);
        bar.tx = 16;
        assert!(bar.arrive(1));
        assert!(!bar.arrive(1));
    }

    #[test]
    fn a_warp_that_was_lapped_is_told() {
        let mut bar = fresh(1);
        for _ in 0..2 {
            bar.arrive(1);
            bar.advance();
        }
        let answer = bar.test(3, 0);
        assert!(!answer.complete && answer.lapped);
        let mut bar = fresh(1);
        bar.waiting.push((7, 0));
        bar.arrive(1);
        assert_eq!(bar.advance(), Some(vec![]));
        bar.arrive(1);
        assert_eq!(bar.advance(), Some(vec![7]), "it still waits for phase 0");
    }

    #[test]
    fn what_is_published_to_the_next_phase_is_not_acquired_with_the_last() {
        let mut bar = fresh(1);
        bar.publication().raise(5, 1);
        bar.arrive(1);
        bar.advance();
        bar.publication().raise(6, 1);
        assert_eq!(bar.acquired(0).generic.of(5), 1);
        assert_eq!(bar.acquired(0).generic.of(6), 0);
    }
}
