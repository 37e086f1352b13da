//! The block's barriers: every use of a barrier states the same number of threads, and every arrival has a wait.
//!
//! Only constant ids and counts can be compared. A barrier whose id is in a register may be any.

use std::collections::BTreeMap;

use crate::error::Fault;
use crate::inst::{Arg, Inst, Op};
use crate::module::{Kernel, Threads};

/// What is known of one barrier.
#[derive(Default)]
struct Barrier {
    /// The first instruction with a count, and the count; no number stands for the whole block.
    count: Option<(usize, Option<u64>)>,
    first_arrive: Option<usize>,
    synced: bool,
}

pub(super) fn check(kernel: &Kernel, at: &mut dyn FnMut(usize, Fault)) {
    let mut barriers: BTreeMap<u64, Barrier> = BTreeMap::new();
    let mut any_sync_by_register = false;
    for (i, inst) in kernel.body.iter().enumerate() {
        let sync = matches!(inst.op, Op::BarSync { .. });
        if !sync && !matches!(inst.op, Op::BarArrive { .. }) {
            continue;
        }
        let Some(id) = constant(inst, 0) else {
            any_sync_by_register |= sync;
            continue;
        };
        let barrier = barriers.entry(id).or_default();
        barrier.synced |= sync;
        if !sync {
            barrier.first_arrive.get_or_insert(i);
        }
        let count = match inst.src.get(1) {
            None => None,
            Some(Arg::Imm(imm)) => Some(imm.bits),
            Some(_) => continue, // counted at run time
        };
        let fault = |problem| Fault::Barrier { id: id as u32, problem };
        if let (Some(n), Some(Threads::Exactly(_))) = (count, kernel.threads) {
            let block = kernel.threads.map_or(0, Threads::count);
            if n > u64::from(block) {
                at(i, fault(format!("{n} threads are awaited, but the block has {block}")));
            }
        }
        match barrier.count {
            None => barrier.count = Some((i, count)),
            Some((first, other)) if other != count => {
                let (here, there) = (words(count), words(other));
                let place = kernel.describe(first);
                at(i, fault(format!("is for {here} here, but for {there} at {place}")));
            }
            Some(_) => {}
        }
    }
    for (id, barrier) in barriers {
        if let Some(i) = barrier.first_arrive
            && !barrier.synced
            && !any_sync_by_register
        {
            at(
                i,
                Fault::Barrier {
                    id: id as u32,
                    problem: "is arrived at, but nobody waits for it".to_owned(),
                },
            );
        }
    }
}

fn constant(inst: &Inst, index: usize) -> Option<u64> {
    match inst.src.get(index) {
        Some(Arg::Imm(imm)) => Some(imm.bits),
        _ => None,
    }
}

fn words(count: Option<u64>) -> String {
    count.map_or_else(|| "the whole block".to_owned(), |n| format!("{n} threads"))
}
