//! The control flow of a kernel: basic blocks, and where lanes that part meet again.

use flashcore_ptx::Inst;

use crate::error::SimError;
use crate::program::NEVER;

/// The control flow of a body: basic blocks, their successors, and where their paths meet.
pub(super) struct Flow {
    /// The first instruction of each block, and the end of the body.
    pub(super) starts: Vec<u32>,
    /// The blocks that follow each block; the number of blocks stands for the end.
    pub(super) successors: Vec<Vec<usize>>,
    /// For each block, the block where all its paths meet first; the number of blocks stands for the end.
    meet: Vec<usize>,
    /// The block of each instruction.
    pub(super) block_of: Vec<u32>,
}

impl Flow {
    /// The blocks of a body, in which `target` says where a branch goes.
    pub(super) fn new(
        body: &[Inst],
        target: impl Fn(usize) -> Result<Option<u32>, SimError>,
    ) -> Result<Flow, SimError> {
        let mut leader = vec![false; body.len() + 1];
        leader[0] = true;
        leader[body.len()] = true;
        for (pc, inst) in body.iter().enumerate() {
            if let Some(to) = target(pc)? {
                leader[to as usize] = true;
            }
            if inst.op.ends_flow() {
                leader[pc + 1] = true;
            }
        }
        let starts: Vec<u32> =
            leader.iter().enumerate().filter(|&(_, &l)| l).map(|(pc, _)| pc as u32).collect();
        let blocks = starts.len() - 1;
        let mut block_of = vec![0; body.len() + 1];
        for block in 0..blocks {
            for pc in starts[block]..starts[block + 1] {
                block_of[pc as usize] = block as u32;
            }
        }
        block_of[body.len()] = blocks as u32;
        let mut successors = Vec::with_capacity(blocks);
        for block in 0..blocks {
            let last = starts[block + 1] as usize - 1;
            let inst = &body[last];
            let mut next = Vec::new();
            if let Some(to) = target(last)? {
                next.push(block_of[to as usize] as usize);
            } else if inst.op.ends_flow() {
                next.push(blocks);
            }
            if !inst.op.ends_flow() || inst.guard.is_some() {
                next.push(block + 1);
            }
            next.dedup();
            successors.push(next);
        }
        let meet = post_dominators(&successors);
        Ok(Flow { starts, successors, meet, block_of })
    }

    /// Where lanes that part at this instruction meet again.
    pub(super) fn meeting_point(&self, pc: usize) -> u32 {
        let block = self.block_of[pc] as usize;
        match self.meet.get(block) {
            Some(&to) if to < self.meet.len() => self.starts[to],
            _ => NEVER,
        }
    }
}

/// The blocks that lead to each block, and after them those that lead to the end.
pub(super) fn predecessors(successors: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut predecessors = vec![Vec::new(); successors.len() + 1];
    for (block, next) in successors.iter().enumerate() {
        for &to in next {
            predecessors[to].push(block);
        }
    }
    predecessors
}

/// The immediate post-dominator of each block, by iteration over the reversed graph. The end is block `n`.
fn post_dominators(successors: &[Vec<usize>]) -> Vec<usize> {
    let n = successors.len();
    let end = n;
    let predecessors = predecessors(successors);
    // Post-order of the reversed graph from the end.
    let mut order = Vec::with_capacity(n + 1);
    let mut state = vec![0u8; n + 1];
    let mut stack = vec![(end, 0usize)];
    state[end] = 1;
    while let Some((block, child)) = stack.pop() {
        if let Some(&next) = predecessors[block].get(child) {
            stack.push((block, child + 1));
            if state[next] == 0 {
                state[next] = 1;
                stack.push((next, 0));
            }
        } else {
            order.push(block);
        }
    }
    let mut number = vec![usize::MAX; n + 1];
    for (i, &block) in order.iter().enumerate() {
        number[block] = i;
    }
    let mut idom = vec![usize::MAX; n + 1];
    idom[end] = end;
    let mut changed = true;
    while changed {
        changed = false;
        for &block in order.iter().rev().filter(|&&b| b != end) {
            let mut new = usize::MAX;
            for &to in &successors[block] {
                if idom[to] == usize::MAX {
                    continue;
                }
                new = if new == usize::MAX {
                    to
                } else {
                    let (mut a, mut b) = (new, to);
                    while a != b {
                        while number[a] < number[b] {
                            a = idom[a];
                        }
                        while number[b] < number[a] {
                            b = idom[b];
                        }
                    }
                    a
                };
            }
            if new != usize::MAX && idom[block] != new {
                idom[block] = new;
                changed = true;
            }
        }
    }
    // A block that cannot reach the end (an endless loop) has no meeting point.
    idom.truncate(n);
    idom.into_iter().map(|b| if b == usize::MAX { end } else { b }).collect()
}
