//! Which row of the register file each register has.
//!
//! Kernels have thousands of virtual registers, of which few live at the same time. Rows are shared by registers
//! whose lives do not overlap, so that a warp's registers stay in the cache. Operands of `wgmma` keep rows of
//! their own, because they stay in use until the wait.

use flashcore_ptx::flow::Worklist;
use flashcore_ptx::{Kernel, Op, RegClass};

use crate::program::flow::{Flow, predecessors};

/// From the first to the last instruction where a register holds something that is still needed.
#[derive(Clone, Copy)]
pub(super) struct Life {
    pub(super) start: u32,
    end: u32,
}

impl Life {
    fn cover(life: &mut Option<Life>, pc: u32) {
        match life {
            Some(l) => {
                l.start = l.start.min(pc);
                l.end = l.end.max(pc);
            }
            None => *life = Some(Life { start: pc, end: pc }),
        }
    }
}

/// The lives of all registers; `None` for one that is never used.
pub(super) fn lives(kernel: &Kernel, flow: &Flow) -> Vec<Option<Life>> {
    let regs = kernel.regs.len();
    let blocks = flow.successors.len();
    let words = regs.div_ceil(64);
    let mut read_first = vec![vec![0u64; words]; blocks];
    let mut killed = vec![vec![0u64; words]; blocks];
    let mut lives: Vec<Option<Life>> = vec![None; regs];
    for block in 0..blocks {
        for pc in flow.starts[block]..flow.starts[block + 1] {
            let inst = &kernel.body[pc as usize];
            for id in inst.reads() {
                let i = id.0 as usize;
                Life::cover(&mut lives[i], pc);
                if killed[block][i / 64] >> (i % 64) & 1 == 0 {
                    read_first[block][i / 64] |= 1 << (i % 64);
                }
            }
            for id in inst.writes() {
                let i = id.0 as usize;
                Life::cover(&mut lives[i], pc);
                // Under a guard, other lanes keep the old value.
                if inst.guard.is_none() {
                    killed[block][i / 64] |= 1 << (i % 64);
                }
            }
        }
    }
    let mut live_in = read_first.clone();
    let predecessors = predecessors(&flow.successors);
    let mut work = Worklist::new(blocks, &predecessors);
    while let Some(block) = work.pop() {
        if block == blocks {
            continue;
        }
        let mut changed = false;
        for w in 0..words {
            let out = flow.successors[block]
                .iter()
                .filter(|&&to| to < blocks)
                .fold(0, |bits, &to| bits | live_in[to][w]);
            let new = read_first[block][w] | out & !killed[block][w];
            changed |= new != live_in[block][w];
            live_in[block][w] = new;
        }
        if changed {
            predecessors[block].iter().for_each(|&before| work.push(before));
        }
    }
    for block in 0..blocks {
        let (first, last) = (flow.starts[block], flow.starts[block + 1] - 1);
        for w in 0..words {
            let out = flow.successors[block]
                .iter()
                .filter(|&&to| to < blocks)
                .fold(0, |bits, &to| bits | live_in[to][w]);
            for (mut bits, pc) in [(live_in[block][w], first), (out, last)] {
                while bits != 0 {
                    let i = w * 64 + bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    Life::cover(&mut lives[i], pc);
                }
            }
        }
    }
    lives
}

/// The file of a register: words, longs, predicates.
pub(super) fn file(class: RegClass) -> usize {
    match class {
        RegClass::B16 | RegClass::B32 | RegClass::F32 => 0,
        RegClass::B64 => 1,
        RegClass::Pred => 2,
    }
}

/// The accumulators and A fragments of `wgmma`s, which stay in use until a wait.
pub(super) fn wgmma_registers(kernel: &Kernel) -> Vec<bool> {
    let mut used = vec![false; kernel.regs.len()];
    for inst in &kernel.body {
        if let Op::Wgmma(form) = inst.op {
            let fragments = if form.a_in_regs { &inst.src[..inst.src.len().min(4)] } else { &[] };
            for id in inst.dst.iter().chain(fragments).filter_map(|a| a.reg()) {
                used[id.0 as usize] = true;
            }
        }
    }
    used
}

/// Gives registers rows, shared where lives do not overlap. Returns the row of each and the rows of each file.
pub(super) fn share_rows(kernel: &Kernel, lives: &[Option<Life>], pinned: &[bool]) -> (Vec<u32>, [u32; 3]) {
    let mut order: Vec<usize> = (0..kernel.regs.len()).filter(|&i| lives[i].is_some()).collect();
    order.sort_by_key(|&i| lives[i].map(|l| l.start));
    let mut rows = vec![0; kernel.regs.len()];
    let mut counts = [0u32; 3];
    let mut free: [Vec<u32>; 3] = Default::default();
    let mut active: [std::collections::BinaryHeap<std::cmp::Reverse<(u32, u32)>>; 3] = Default::default();
    for i in order {
        let Some(life) = lives[i] else { continue };
        let f = file(kernel.regs[i].class);
        while let Some(&std::cmp::Reverse((end, row))) = active[f].peek() {
            if end >= life.start {
                break;
            }
            active[f].pop();
            free[f].push(row);
        }
        let row = if pinned[i] { None } else { free[f].pop() };
        let row = row.unwrap_or_else(|| {
            counts[f] += 1;
            counts[f] - 1
        });
        rows[i] = row;
        if !pinned[i] {
            active[f].push(std::cmp::Reverse((life.end, row)));
        }
    }
    (rows, counts)
}
