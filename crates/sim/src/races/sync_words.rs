//! Words of global memory that blocks synchronise on, and what was published through them.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::races::clock::VClock;

/// What has been published through words of memory that blocks synchronise on.
#[derive(Default)]
pub struct SyncWords {
    words: Mutex<HashMap<u64, Published>>,
}

/// For each cluster, which of its accesses are ordered before whoever acquires. These clocks know of no other clusters.
pub type Published = HashMap<u32, VClock>;

impl SyncWords {
    /// Adds what a warp publishes by a release to the word at this address.
    pub fn release(&self, address: u64, published: &Published) {
        let mut words = match self.words.lock() {
            Ok(words) => words,
            Err(poisoned) => poisoned.into_inner(),
        };
        join(words.entry(address).or_default(), published);
    }

    /// What an acquire of the word at this address sees.
    pub fn acquire(&self, address: u64) -> Option<Published> {
        match self.words.lock() {
            Ok(words) => words.get(&address).cloned(),
            Err(poisoned) => poisoned.into_inner().get(&address).cloned(),
        }
    }
}

/// Adds what is published in `from` to `into`.
pub fn join(into: &mut Published, from: &Published) {
    for (&cluster, clock) in from {
        into.entry(cluster).or_default().join(clock);
    }
}
