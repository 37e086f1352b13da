//! The name of a plan: what it depends on, compared and hashed in a few nanoseconds.

use std::hash::{BuildHasherDefault, Hasher};

use flashcore_kernels::{Kernel, Schedule};
use flashcore_ptx::Target;

use crate::Problem;

/// Who chooses the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Choice {
    Planner,
    Kernel(Kernel),
    Schedule(Schedule),
}

/// What a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub problem: Problem,
    pub target: Target,
    pub choice: Choice,
    /// Whether its kernels write stamps.
    pub traced: bool,
}

/// Hashes word by word, by multiplying and rotating. Nobody gains from choosing problems whose keys collide, so
/// the standard hasher's defence against that would be paid for nothing in every call.
#[derive(Default)]
pub(super) struct Quick(u64);

/// How the map of plans is hashed.
pub(super) type QuickState = BuildHasherDefault<Quick>;

impl Quick {
    fn word(&mut self, word: u64) {
        // An odd number with about as many ones as zeros, and no pattern: 2^64 divided by the golden ratio.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for Quick {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.word(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.word(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.word(value.into());
    }

    fn write_u64(&mut self, value: u64) {
        self.word(value);
    }

    fn write_usize(&mut self, value: usize) {
        self.word(value as u64);
    }

    fn finish(&self) -> u64 {
        // Multiplication mixes upwards, and the map looks at the lowest bits first.
        self.0.rotate_left(26)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::{HashMap, HashSet},
        hash::BuildHasher,
    };

    use super::*;
    use crate::{DType, Mask};

    fn key(problem: &Problem, target: Target, choice: Choice) -> Key {
        Key { problem: *problem, target, choice, traced: false }
    }

    fn keys() -> Vec<Key> {
        let mut keys = Vec::new();
        for batch in [1, 2, 16] {
            for heads in [1, 8, 32] {
                for len in [1, 64, 65, 512, 16384] {
                    for dtype in [DType::F16, DType::BF16] {
                        for mask in [Mask::None, Mask::Causal, Mask::Window { left: Some(8), right: None }] {
                            let problem = Problem::new(batch, heads, len, 64, dtype).with_mask(mask);
                            keys.push(key(&problem, Target::Sm80, Choice::Planner));
                            keys.push(key(&problem.with_lse(), Target::Sm80, Choice::Planner));
                            keys.push(key(&problem.with_softcap(30.0), Target::Sm80, Choice::Planner));
                            keys.push(key(&problem, Target::Sm80, Choice::Kernel(Kernel::Scalar)));
                            keys.push(key(&problem, Target::Sm90a, Choice::Planner));
                        }
                    }
                }
            }
        }
        keys
    }

    #[test]
    fn problems_that_differ_in_anything_have_keys_of_their_own() {
        let keys = keys();
        let found: HashMap<Key, usize, QuickState> =
            keys.iter().enumerate().map(|(index, key)| (*key, index)).collect();
        assert_eq!(found.len(), keys.len());
        for (index, key) in keys.iter().enumerate() {
            assert_eq!(found[key], index);
        }
    }

    #[test]
    fn keys_spread_over_the_low_bits_that_a_map_looks_at() {
        let keys = keys();
        let low: HashSet<u64> =
            keys.iter().map(|key| QuickState::default().hash_one(key) % (4 * keys.len() as u64)).collect();
        assert!(low.len() > keys.len() * 3 / 4, "{} places for {} keys", low.len(), keys.len());
    }
}
