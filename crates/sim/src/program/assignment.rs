//! Which registers surely hold a value: definite assignment over the paths of a kernel.
//!
//! Every lane follows a path through the basic blocks. A register that is written without a guard on all paths to a block
//! holds a value there in all lanes, however they part and meet; reads of it need no check while the kernel runs.

use flashcore_ptx::flow::Worklist;
use flashcore_ptx::{Kernel, Op};

/// A set of registers.
type Registers = Vec<u64>;

/// Whether an instruction without a guard writes all its results in every lane that executes it.
pub fn writes_surely(op: &Op) -> bool {
    matches!(
        op,
        Op::Alu(_)
            | Op::Setp { .. }
            | Op::Mma { .. }
            | Op::Ldmatrix { .. }
            | Op::Ld { .. }
            | Op::MovSpecial(_)
            | Op::PackB64
            | Op::UnpackB64
            | Op::PackB32
            | Op::UnpackB32
            | Op::AddrOf
            | Op::Cvta { .. }
            | Op::CreatePolicy(_)
            | Op::Mapa
            | Op::GetCtaRank
            | Op::Shfl(_)
            | Op::Vote(_)
            | Op::Ballot
            | Op::Elect
            | Op::ActiveMask
    )
}

/// For each basic block, the registers that hold a value in every lane that comes to it. `starts` are the blocks' first
/// instructions and the end of the body; a successor past the last block is the end.
pub fn assigned_before(kernel: &Kernel, starts: &[u32], successors: &[Vec<usize>]) -> Vec<Registers> {
    let words = kernel.regs.len().div_ceil(64);
    let blocks = successors.len();
    let mut written: Vec<Registers> = vec![vec![0; words]; blocks];
    for (block, written) in written.iter_mut().enumerate() {
        for inst in &kernel.body[starts[block] as usize..starts[block + 1] as usize] {
            if inst.guard.is_none() && writes_surely(&inst.op) {
                for id in inst.writes() {
                    written[id.0 as usize / 64] |= 1 << (id.0 % 64);
                }
            }
        }
    }
    // All registers at first, and fewer with every path that lacks one, until nothing changes.
    let mut before: Vec<Registers> = vec![vec![u64::MAX; words]; blocks];
    if let Some(entry) = before.first_mut() {
        entry.fill(0);
    }
    let edges: Vec<Vec<usize>> =
        successors.iter().map(|next| next.iter().copied().filter(|&next| next < blocks).collect()).collect();
    let mut work = Worklist::new(0, &edges);
    while let Some(block) = work.pop() {
        for &next in &edges[block] {
            let mut changed = false;
            for w in 0..words {
                let after = before[block][w] | written[block][w];
                changed |= before[next][w] & !after != 0;
                before[next][w] &= after;
            }
            if changed {
                work.push(next);
            }
        }
    }
    before
}
