//! The non-bulk `cp.async` copies of a warp: which are in flight, and to which group each belongs.
//!
//! Groups belong to threads. Lanes that commit together share groups, and usually all 32 do; where they do not,
//! a copy is kept once for each set of lanes that agree.

#![expect(clippy::vec_box, reason = "a copy is large, and moves from list to list")]

use crate::races::clock::Agent;

/// One `cp.async` of a warp.
#[derive(Clone, Debug)]
pub struct WarpCopy {
    /// The lanes.
    pub mask: u32,
    /// Shared addresses.
    pub to: [u32; 32],
    /// Global addresses.
    pub from: [u64; 32],
    /// Bytes written.
    pub bytes: u32,
    /// Bytes read; the rest is zero.
    pub read: [u8; 32],
    /// The lanes that read lines of global memory: eight consecutive lanes per line, one cell each.
    pub lines: u32,
    /// The asynchronous operation it belongs to.
    pub agent: Agent,
    /// That operation's clock.
    pub clock: u32,
    /// The group, once committed.
    pub group: Option<u32>,
    /// The instruction.
    pub pc: u32,
    /// Whether the data has been moved already.
    pub done: bool,
}

impl WarpCopy {
    /// Nothing is copied.
    const NONE: WarpCopy = WarpCopy {
        mask: 0,
        to: [0; 32],
        from: [0; 32],
        bytes: 0,
        read: [0; 32],
        lines: 0,
        agent: 0,
        clock: 0,
        group: None,
        pc: 0,
        done: false,
    };
}

/// The copies of a warp.
#[derive(Clone, Debug, Default)]
pub struct CopyQueue {
    copies: Vec<Box<WarpCopy>>,
    /// For each lane, the number of groups committed.
    committed: [u32; 32],
    /// The asynchronous operation that copies of the open group belong to.
    open: Option<(Agent, u32)>,
    /// Copies that are done, kept to reuse their memory.
    spare: Vec<Box<WarpCopy>>,
}

impl CopyQueue {
    /// No copies yet; reuses the memory of an ended warp's queue.
    pub fn renewed(self) -> CopyQueue {
        CopyQueue { spare: self.spare, ..CopyQueue::default() }
    }

    /// The operation of the open group, if it has begun.
    pub fn open(&self) -> Option<(Agent, u32)> {
        self.open
    }

    /// Memory for a copy, with the stale contents of an earlier one.
    pub fn room(&mut self) -> Box<WarpCopy> {
        self.spare.pop().unwrap_or_else(|| Box::new(WarpCopy::NONE))
    }

    /// Adds a copy to the open group.
    pub fn push(&mut self, copy: Box<WarpCopy>) {
        self.open = Some((copy.agent, copy.clock));
        self.copies.push(copy);
    }

    /// Takes back the memory of copies that are done.
    pub fn recycle(&mut self, copies: Vec<Box<WarpCopy>>) {
        self.spare.extend(copies);
    }

    /// Closes the open group of these lanes.
    pub fn commit(&mut self, mask: u32) {
        let group = self.committed[mask.trailing_zeros() as usize % 32];
        if self.committed.iter().all(|&count| count == group) {
            // Lanes with the same history usually all commit together.
            let open = || self.copies.iter().filter(|copy| copy.group.is_none());
            if open().all(|copy| copy.mask & !mask == 0) {
                self.copies
                    .iter_mut()
                    .filter(|copy| copy.group.is_none())
                    .for_each(|c| c.group = Some(group));
                self.count_commit(mask);
                return;
            }
        }
        let mut split = Vec::new();
        for copy in self.copies.iter_mut().filter(|c| c.group.is_none() && c.mask & mask != 0) {
            let rest = copy.mask & !mask;
            if rest != 0 {
                split.push(Box::new(WarpCopy { mask: rest, ..(**copy).clone() }));
                copy.mask &= mask;
            }
            let mut lanes = copy.mask;
            let group = self.committed[lanes.trailing_zeros() as usize];
            copy.group = Some(group);
            // Lanes with another history have other group numbers.
            let mut strangers = 0u32;
            while lanes != 0 {
                let lane = lanes.trailing_zeros();
                lanes &= lanes - 1;
                if self.committed[lane as usize] != group {
                    strangers |= 1 << lane;
                }
            }
            copy.mask &= !strangers;
            while strangers != 0 {
                let lane = strangers.trailing_zeros();
                strangers &= strangers - 1;
                let group = Some(self.committed[lane as usize]);
                split.push(Box::new(WarpCopy { mask: 1 << lane, group, ..(**copy).clone() }));
            }
        }
        self.copies.extend(split);
        self.count_commit(mask);
    }

    /// These lanes have closed a group.
    fn count_commit(&mut self, mask: u32) {
        for (lane, committed) in self.committed.iter_mut().enumerate() {
            *committed += mask >> lane & 1;
        }
        if !self.copies.iter().any(|c| c.group.is_none()) {
            self.open = None;
        }
    }

    /// Takes out the copies that these lanes must have done when at most `pending` groups stay open.
    pub fn retire(&mut self, mask: u32, pending: u32) -> Vec<Box<WarpCopy>> {
        let committed = self.committed;
        self.take(mask, |copy, lane| copy.group.is_some_and(|g| g + pending < committed[lane]))
    }

    /// Takes out all copies of these lanes, committed or not.
    pub fn retire_all(&mut self, mask: u32) -> Vec<Box<WarpCopy>> {
        let all = self.take(mask, |_, _| true);
        if self.copies.is_empty() {
            self.open = None;
        }
        all
    }

    fn take(&mut self, mask: u32, retired: impl Fn(&WarpCopy, usize) -> bool) -> Vec<Box<WarpCopy>> {
        // Lanes with the same history have the same answer.
        let alike = self.committed.iter().all(|&count| count == self.committed[0]);
        let lanes_of = |copy: &WarpCopy| {
            let lanes = copy.mask & mask;
            if alike {
                return if lanes != 0 && retired(copy, 0) { lanes } else { 0 };
            }
            (0..32)
                .filter(|&lane| lanes >> lane & 1 == 1 && retired(copy, lane))
                .fold(0, |l, lane| l | 1 << lane)
        };
        if alike && self.copies.iter().all(|copy| copy.mask & !mask == 0) {
            return self.copies.extract_if(.., |copy| lanes_of(copy) != 0).collect();
        }
        let mut out = Vec::new();
        for mut copy in std::mem::take(&mut self.copies) {
            let lanes = lanes_of(&copy);
            if lanes == copy.mask {
                out.push(copy);
                continue;
            }
            if lanes != 0 {
                out.push(Box::new(WarpCopy { mask: lanes, ..(*copy).clone() }));
                copy.mask &= !lanes;
            }
            self.copies.push(copy);
        }
        out
    }

    /// All copies in flight.
    pub fn iter(&self) -> impl Iterator<Item = &WarpCopy> {
        self.copies.iter().map(Box::as_ref)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(mask: u32, pc: u32) -> Box<WarpCopy> {
        Box::new(WarpCopy { mask, bytes: 16, read: [16; 32], agent: 1, clock: 1, pc, ..WarpCopy::NONE })
    }

    #[test]
    fn a_wait_retires_the_older_groups_and_leaves_the_newest_open() {
        let mut queue = CopyQueue::default();
        for pc in 0..3 {
            queue.push(copy(u32::MAX, pc));
            queue.commit(u32::MAX);
        }
        let retired: Vec<u32> = queue.retire(u32::MAX, 1).iter().map(|c| c.pc).collect();
        assert_eq!(retired, [0, 1]);
        assert_eq!(queue.retire(u32::MAX, 0).len(), 1);
        assert_eq!(queue.iter().count(), 0);
    }

    #[test]
    fn an_open_group_is_not_waited_for() {
        let mut queue = CopyQueue::default();
        queue.push(copy(u32::MAX, 0));
        assert!(queue.retire(u32::MAX, 0).is_empty());
        assert_eq!(queue.retire_all(u32::MAX).len(), 1);
    }

    #[test]
    fn an_empty_commit_counts_as_a_group() {
        let mut queue = CopyQueue::default();
        queue.push(copy(u32::MAX, 0));
        queue.commit(u32::MAX);
        queue.commit(u32::MAX);
        assert_eq!(queue.retire(u32::MAX, 1).len(), 1, "the newest group is the empty one");
    }

    #[test]
    fn lanes_keep_their_own_groups() {
        let mut queue = CopyQueue::default();
        queue.push(copy(u32::MAX, 0));
        queue.commit(0xFFFF);
        let retired = queue.retire(u32::MAX, 0);
        assert_eq!((retired.len(), retired[0].mask), (1, 0xFFFF));
        queue.commit(u32::MAX);
        let retired = queue.retire(u32::MAX, 0);
        assert_eq!((retired.len(), retired[0].mask), (1, 0xFFFF_0000));
        assert_eq!(queue.iter().count(), 0);
    }
}
