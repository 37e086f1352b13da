//! Control flow of a kernel's body: basic blocks, their successors, and where diverged lanes reconverge.

use std::collections::{BTreeSet, HashMap};

use crate::inst::{LabelId, Op};
use crate::module::Kernel;

/// A run of instructions that is entered only at its first and left only after its last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The index of its first instruction.
    pub start: usize,
    /// The index after its last instruction.
    pub end: usize,
    /// The blocks that control can pass to: the target of a branch first.
    pub next: Vec<usize>,
    /// Whether lanes can end here.
    pub exits: bool,
}

/// The control-flow graph of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The blocks, in the order of the body; the first is the entry.
    pub blocks: Vec<Block>,
    /// For each instruction, its block.
    pub block_of: Vec<usize>,
}

impl Flow {
    /// The graph of a kernel. A branch to a label that is not in the body has no successor.
    pub fn new(kernel: &Kernel) -> Flow {
        let body = &kernel.body;
        let mut block_of = Vec::with_capacity(body.len());
        let mut starts = Vec::new();
        for (i, inst) in body.iter().enumerate() {
            let after_branch = i > 0 && body[i - 1].op.ends_flow();
            let label =
                matches!(inst.op, Op::Label(_)) && (i == 0 || !matches!(body[i - 1].op, Op::Label(_)));
            if i == 0 || after_branch || label {
                starts.push(i);
            }
            block_of.push(starts.len() - 1);
        }

        let labels = labels(kernel);
        let mut blocks = Vec::with_capacity(starts.len());
        for (b, &start) in starts.iter().enumerate() {
            let end = starts.get(b + 1).copied().unwrap_or(body.len());
            let last = &body[end - 1];
            let falls_through = !last.op.ends_flow() || last.guard.is_some();
            let mut next = Vec::new();
            if let Op::Bra { target, .. } = last.op
                && let Some(&at) = labels.get(&target)
            {
                next.push(block_of[at]);
            }
            if falls_through && b + 1 < starts.len() && !next.contains(&(b + 1)) {
                next.push(b + 1);
            }
            let leaves = matches!(last.op, Op::Exit | Op::Ret | Op::Trap);
            let exits = leaves || (falls_through && b + 1 == starts.len());
            blocks.push(Block { start, end, next, exits });
        }
        Flow { blocks, block_of }
    }

    /// For each block, its immediate post-dominator: the nearest block that every path from it passes, or none
    /// where that is only the kernel's end.
    ///
    /// Lanes that leave the kernel early do not reconverge anywhere, so an `exit` before the last block
    /// is treated as if it fell through: the lanes that stay reconverge where they would have without it.
    pub fn post_dominators(&self) -> Vec<Option<usize>> {
        let end = self.blocks.len();
        let next = |b: usize| {
            let block = &self.blocks[b];
            let mut next = block.next.clone();
            if block.exits && !next.contains(&(b + 1)) {
                next.push(b + 1); // for the last block this is the end itself
            }
            next
        };
        let mut before = vec![Vec::new(); end + 1];
        for b in 0..end {
            for n in next(b) {
                before[n].push(b);
            }
        }

        // Cooper, Harvey and Kennedy's algorithm on the reversed graph, from the end.
        let order = post_order(end, &before);
        let mut position = vec![None; end + 1];
        for (i, &b) in order.iter().enumerate() {
            position[b] = Some(i);
        }
        let mut dominator: Vec<Option<usize>> = vec![None; end + 1];
        dominator[end] = Some(end);
        let mut changed = true;
        while changed {
            changed = false;
            for &b in order.iter().rev().skip(1) {
                let mut best: Option<usize> = None;
                for n in next(b) {
                    if dominator[n].is_some() {
                        best = Some(best.map_or(n, |other| meet(&dominator, &position, other, n)));
                    }
                }
                if best.is_some() && dominator[b] != best {
                    dominator[b] = best;
                    changed = true;
                }
            }
        }
        dominator.truncate(end);
        dominator.into_iter().map(|d| d.filter(|&d| d != end)).collect()
    }
}

/// The nearest common dominator of two nodes.
fn meet(dominator: &[Option<usize>], position: &[Option<usize>], a: usize, b: usize) -> usize {
    let (mut a, mut b) = (a, b);
    while a != b {
        let step = if position[a] < position[b] { &mut a } else { &mut b };
        match dominator[*step] {
            Some(up) if up != *step => *step = up,
            _ => break,
        }
    }
    a.max(b)
}

/// A worklist: blocks are visited again as long as what is known of their neighbours changes.
///
/// Where possible a block comes before its successors, so that facts travel far in one pass. Only changes are passed
/// on, so that a long way against that order does not cost one pass over all blocks per step.
pub struct Worklist {
    /// The blocks, in visiting order.
    order: Vec<usize>,
    /// The place of each block in it.
    place: Vec<usize>,
    /// The places of those still to be visited.
    pending: BTreeSet<usize>,
}

impl Worklist {
    /// All nodes of a graph, each to be visited at least once. Those reachable from `root` come first.
    pub fn new(root: usize, edges: &[Vec<usize>]) -> Worklist {
        let mut order = if edges.is_empty() { Vec::new() } else { post_order(root, edges) };
        order.reverse();
        let mut place = vec![usize::MAX; edges.len()];
        order.iter().enumerate().for_each(|(at, &node)| place[node] = at);
        for (node, place) in place.iter_mut().enumerate().filter(|(_, place)| **place == usize::MAX) {
            *place = order.len();
            order.push(node);
        }
        Worklist { pending: (0..order.len()).collect(), order, place }
    }

    /// The next one.
    pub fn pop(&mut self) -> Option<usize> {
        self.pending.pop_first().map(|place| self.order[place])
    }

    /// Adds one whose neighbour has changed.
    pub fn push(&mut self, node: usize) {
        self.pending.insert(self.place[node]);
    }
}

/// The nodes reachable from `root`, each after its successors.
fn post_order(root: usize, edges: &[Vec<usize>]) -> Vec<usize> {
    let mut seen = vec![false; edges.len()];
    let mut order = Vec::new();
    let mut stack = vec![(root, 0)];
    seen[root] = true;
    while let Some((node, edge)) = stack.pop() {
        if let Some(&to) = edges[node].get(edge) {
            stack.push((node, edge + 1));
            if !seen[to] {
                seen[to] = true;
                stack.push((to, 0));
            }
        } else {
            order.push(node);
        }
    }
    order
}

/// Where each label is placed; the first place if there are two.
fn labels(kernel: &Kernel) -> HashMap<LabelId, usize> {
    let mut labels = HashMap::new();
    for (i, inst) in kernel.body.iter().enumerate() {
        if let Op::Label(label) = inst.op {
            labels.entry(label).or_insert(i);
        }
    }
    labels
}

/// Writes into every guarded branch where its lanes reconverge. To be called again after the body was edited.
///
/// That is the nearest post-dominator that has a label. One without is entered from this branch alone (the jump of
/// `if_(p, |k| k.break_(l))`), so lanes that reach it at different times need not wait there.
pub fn set_reconvergence(kernel: &mut Kernel) {
    let flow = Flow::new(kernel);
    let dominators = flow.post_dominators();
    let label_of = |block: usize| match kernel.body[flow.blocks[block].start].op {
        Op::Label(label) => Some(label),
        _ => None,
    };
    // What is found on the way up is noted for all blocks on it, so that no path is walked twice.
    let mut meet: Vec<Option<Option<LabelId>>> = vec![None; flow.blocks.len()];
    for block in 0..flow.blocks.len() {
        let (mut way, mut at) = (Vec::new(), block);
        let label = loop {
            match (meet[at], dominators[at]) {
                (Some(label), _) => break label,
                (None, None) => {
                    way.push(at);
                    break None;
                }
                (None, Some(up)) => {
                    way.push(at);
                    if let Some(label) = label_of(up) {
                        break Some(label);
                    }
                    at = up;
                }
            }
        };
        for block in way {
            meet[block] = Some(label);
        }
    }
    for (i, inst) in kernel.body.iter_mut().enumerate() {
        if let Op::Bra { reconverge, .. } = &mut inst.op {
            *reconverge = if inst.guard.is_some() { meet[flow.block_of[i]].flatten() } else { None };
        }
    }
}
