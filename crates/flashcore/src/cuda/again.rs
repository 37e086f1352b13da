//! Calls that were made before, ready to be launched again.
//!
//! Programs make the same calls over and over: the same problem on the same tensors. What such a call goes through
//! (its addresses checked, its tensor maps made, its parameters packed) is kept, in a table of fixed size in which a new
//! call takes the place of an old one: a call that is found again is one look-up and the launch, and one that is not
//! allocates nothing either.

use std::{
    hash::BuildHasher,
    sync::{Arc, RwLock},
};

use super::{
    Ready,
    key::{Key, QuickState},
};
use crate::{contract::Call, plan::Packed, tensor::Raw};

/// Calls that are kept; a power of two.
const SLOTS: usize = 256;

/// Everything that a launch depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct CallKey {
    plan: Key,
    /// Address and strides of q, k, v, o and lse; the problem has the shapes.
    tensors: [(usize, [usize; 3]); 5],
    lengths: Option<u64>,
}

impl CallKey {
    pub(super) fn new(plan: Key, call: &Call<'_>) -> Self {
        let at = |raw: &Raw| {
            let [batch, head, row, _] = raw.layout.strides;
            (raw.ptr as usize, [batch, head, row])
        };
        let lse = call.lse.as_ref().map_or((0, [0; 3]), at);
        let tensors = [at(&call.q), at(&call.k), at(&call.v), at(&call.o), lse];
        Self { plan, tensors, lengths: call.device_lengths }
    }

    fn slot(&self) -> usize {
        QuickState::default().hash_one(self) as usize % SLOTS
    }
}

struct Made {
    key: CallKey,
    ready: Arc<Ready>,
    packed: Packed,
}

/// Calls by what they depend on.
pub(super) struct KnownCalls {
    slots: Box<[RwLock<Option<Made>>]>,
}

impl Default for KnownCalls {
    fn default() -> Self {
        Self { slots: (0..SLOTS).map(|_| RwLock::new(None)).collect() }
    }
}

impl KnownCalls {
    /// Launches a call that was made before; `None` if it was not, or has made room for another.
    pub(super) fn again<T>(&self, key: &CallKey, launch: impl FnOnce(&Ready, &Packed) -> T) -> Option<T> {
        // Whoever is changing the slot is making another call.
        let slot = self.slots[key.slot()].try_read().ok()?;
        let made = slot.as_ref().filter(|made| made.key == *key)?;
        Some(launch(&made.ready, &made.packed))
    }

    /// Keeps a call.
    pub(super) fn remember(&self, key: &CallKey, ready: Arc<Ready>, packed: Packed) {
        if let Ok(mut slot) = self.slots[key.slot()].try_write() {
            *slot = Some(Made { key: *key, ready, packed });
        }
    }
}
