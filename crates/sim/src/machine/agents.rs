//! The asynchronous operations of a cluster, as the vector clocks know them.

use crate::races::clock::{Agent, WarpClock};

/// How many asynchronous operations of a cluster have a number of their own at a time.
const MAX_OPERATIONS: usize = 1024;

/// The asynchronous operations of a cluster, numbered after its warps.
///
/// A number is used again for a new operation only if the warp that starts it has seen the old one complete, so
/// that knowing the new one implies knowing the old one. A cluster has [`MAX_OPERATIONS`] numbers; if more
/// operations than that are never waited for, the oldest numbers are used again nevertheless, and a race with an
/// operation that old may be missed.
///
/// One number between the warps and the operations stands for the grid before this one.
pub struct Agents {
    pub(super) first: Agent,
    pub(super) clocks: Vec<u32>,
    /// The number that is used again next where none is free.
    pub(super) oldest: usize,
    /// The warp that started the latest operation of each number.
    pub started_by: Vec<usize>,
}

impl Agents {
    pub(super) fn new(warps: usize) -> Agents {
        Agents { first: warps as Agent + 1, clocks: Vec::new(), oldest: 0, started_by: Vec::new() }
    }

    /// The grid before this one, which has completed once `griddepcontrol.wait` has returned.
    pub fn grid_before(&self) -> Agent {
        self.first - 1
    }

    /// A number and clock for an operation that these lanes of a warp start.
    pub fn start(&mut self, warp: usize, lanes: u32, clocks: &WarpClock) -> (Agent, u32) {
        let first = self.first;
        let slot = (0..self.clocks.len())
            .find(|&i| clocks.has_seen(lanes, first + i as Agent, self.clocks[i]))
            .unwrap_or_else(|| {
                if self.clocks.len() == MAX_OPERATIONS {
                    self.oldest = (self.oldest + 1) % MAX_OPERATIONS;
                    return self.oldest;
                }
                self.clocks.push(0);
                self.started_by.push(warp);
                self.clocks.len() - 1
            });
        self.clocks[slot] += 1;
        self.started_by[slot] = warp;
        (first + slot as Agent, self.clocks[slot])
    }

    /// The warp that an agent is, or that started it, and whether it is an asynchronous operation.
    pub fn warp_of(&self, agent: Agent) -> (usize, bool) {
        if agent < self.first {
            (usize::from(agent), false)
        } else {
            (self.started_by[usize::from(agent - self.first)], true)
        }
    }
}
