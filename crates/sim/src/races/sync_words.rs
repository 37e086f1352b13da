//! Words of global memory that blocks synchronise on, and what was published through them.

use std::collections::HashMap;
use std::sync::Mutex;

/// What has been published through words of memory that blocks synchronise on.
#[derive(Default)]
pub struct SyncWords {
    words: Mutex<HashMap<u64, Published>>,
}

/// For each cluster, how far its agents' accesses are ordered before whoever acquires.
pub type Published = HashMap<u32, Vec<u32>>;

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

/// Raises one record of what is published to another.
pub fn join(into: &mut Published, from: &Published) {
    for (&cluster, clocks) in from {
        let mine = into.entry(cluster).or_default();
        if mine.len() < clocks.len() {
            mine.resize(clocks.len(), 0);
        }
        for (a, &b) in mine.iter_mut().zip(clocks) {
            *a = (*a).max(b);
        }
    }
}
