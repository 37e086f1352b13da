//! Every register is written before it is read, on every path.
//!
//! A write under a guard counts for reads under the same guard, and a write under a guard together with one
//! under its opposite counts for all, as long as the predicate has not changed in between. The same holds across
//! branches: what an `if_` on a predicate writes can be read in a later `if_` or guard on that predicate.
//!
//! Whether an accumulator of `wgmma` is read depends on scale-d. It counts as read only where scale-d is the
//! constant true: with a predicate the first iteration of a loop overwrites it.

use std::collections::BTreeSet;

use crate::error::Fault;
use crate::flow::{Flow, Worklist};
use crate::inst::{Arg, Inst, Op};
use crate::module::Kernel;
use crate::types::{Guard, RegClass, RegId};

/// A predicate register and the value it has.
type Known = (RegId, bool);

/// What is known at one point of the program.
#[derive(Clone, PartialEq, Default)]
struct State {
    /// Registers that are written on every path: one bit per register.
    written: Vec<u64>,
    /// Registers that are written wherever a predicate has a value.
    written_if: BTreeSet<(RegId, Known)>,
    /// Predicates whose value is known on this path.
    known: BTreeSet<Known>,
}

impl State {
    fn is_written(&self, reg: RegId) -> bool {
        self.written.get(reg.0 as usize / 64).is_some_and(|word| word >> (reg.0 % 64) & 1 == 1)
    }

    fn write(&mut self, reg: RegId) {
        if let Some(word) = self.written.get_mut(reg.0 as usize / 64) {
            *word |= 1 << (reg.0 % 64);
        }
    }

    /// Whether the register is written wherever the predicate has the value; vacuously so where it cannot.
    fn is_written_if(&self, reg: RegId, (pred, value): Known) -> bool {
        self.is_written(reg)
            || self.written_if.contains(&(reg, (pred, value)))
            || self.known.contains(&(pred, !value))
    }

    /// Whether a read under a guard finds the register written.
    fn can_read(&self, reg: RegId, guard: Option<Guard>) -> bool {
        self.is_written(reg)
            || guard.is_some_and(|g| self.is_written_if(reg, (g.reg.id(), !g.negated)))
            || self.known.iter().any(|&known| self.written_if.contains(&(reg, known)))
    }

    /// Applies the writes of an instruction of the kernel.
    fn step(&mut self, inst: &Inst, kernel: &Kernel) {
        for reg in inst.writes() {
            // What depended on the old value of a predicate is no longer known.
            if kernel.reg(reg).is_some_and(|info| info.class == RegClass::Pred) {
                self.known.retain(|(pred, _)| *pred != reg);
                self.written_if.retain(|(_, (pred, _))| *pred != reg);
            }
            match inst.guard {
                Some(guard) if guard.reg.id() != reg => {
                    let (pred, value) = (guard.reg.id(), !guard.negated);
                    if self.known.contains(&(pred, value)) || self.is_written_if(reg, (pred, !value)) {
                        self.write(reg);
                    } else {
                        self.written_if.insert((reg, (pred, value)));
                    }
                }
                Some(_) => {} // `@p` writes its own p: nothing is learned
                None => self.write(reg),
            }
        }
    }

    /// What is known where several paths meet.
    fn meet(states: &[State]) -> State {
        let Some((first, rest)) = states.split_first() else { return State::default() };
        let mut met = first.clone();
        for other in rest {
            met.written.iter_mut().zip(&other.written).for_each(|(a, b)| *a &= b);
            met.known.retain(|known| other.known.contains(known));
        }
        let mut candidates: BTreeSet<(RegId, Known)> =
            states.iter().flat_map(|s| s.written_if.iter().copied()).collect();
        // Written on one path, while on another a predicate has a known value: then it is written where the
        // predicate does not have that value.
        for state in states {
            let elsewhere: Vec<Known> = states
                .iter()
                .flat_map(|s| s.known.iter().filter(|known| !state.known.contains(known)))
                .map(|&(pred, value)| (pred, !value))
                .collect();
            if elsewhere.is_empty() {
                continue;
            }
            for (w, word) in state.written.iter().enumerate() {
                let mut partly = word & !met.written[w];
                while partly != 0 {
                    let reg = RegId(w as u32 * 64 + partly.trailing_zeros());
                    candidates.extend(elsewhere.iter().map(|&known| (reg, known)));
                    partly &= partly - 1;
                }
            }
        }
        candidates.retain(|&(r, k)| !met.is_written(r) && states.iter().all(|s| s.is_written_if(r, k)));
        met.written_if = candidates;
        met
    }
}

/// The registers that must be written before an instruction; see the module's text on accumulators.
fn reads(inst: &Inst) -> Vec<RegId> {
    let accumulates =
        matches!(inst.op, Op::Wgmma(_)) && matches!(inst.src.last(), Some(Arg::Imm(imm)) if imm.bits == 1);
    let accumulators = if accumulates { inst.dst.as_slice() } else { &[] };
    let guard = inst.guard.map(|g| g.reg.id());
    guard.into_iter().chain(inst.src.iter().chain(accumulators).filter_map(|a| a.reg())).collect()
}

pub(super) fn check(kernel: &Kernel, flow: &Flow, at: &mut dyn FnMut(usize, Fault)) {
    if flow.blocks.is_empty() {
        return;
    }
    let words = kernel.regs.len().div_ceil(64);
    let entry = State { written: vec![0; words], ..State::default() };
    let mut before: Vec<Vec<(usize, Option<Known>)>> = vec![Vec::new(); flow.blocks.len()];
    for (b, block) in flow.blocks.iter().enumerate() {
        for &next in &block.next {
            before[next].push((b, edge(kernel, flow, b, next)));
        }
    }

    // Forward to a fixed point; a block that is not reached yet contributes nothing.
    let mut at_end: Vec<Option<State>> = vec![None; flow.blocks.len()];
    let arrive = |b: usize, at_end: &[Option<State>]| {
        let mut states: Vec<State> = before[b]
            .iter()
            .filter_map(|&(from, known)| {
                let mut state = at_end[from].clone()?;
                state.known.extend(known);
                Some(state)
            })
            .collect();
        if b == 0 {
            states.push(entry.clone());
        }
        (!states.is_empty()).then(|| State::meet(&states))
    };
    let edges: Vec<Vec<usize>> = flow.blocks.iter().map(|block| block.next.clone()).collect();
    let mut work = Worklist::new(0, &edges);
    while let Some(b) = work.pop() {
        let Some(mut state) = arrive(b, &at_end) else { continue };
        let block = &flow.blocks[b];
        kernel.body[block.start..block.end].iter().for_each(|inst| state.step(inst, kernel));
        if at_end[b].as_ref() != Some(&state) {
            at_end[b] = Some(state);
            block.next.iter().for_each(|&next| work.push(next));
        }
    }

    let mut told = BTreeSet::new();
    for (b, block) in flow.blocks.iter().enumerate() {
        let Some(mut state) = arrive(b, &at_end) else { continue };
        for i in block.start..block.end {
            let inst = &kernel.body[i];
            for reg in reads(inst) {
                // The guard itself must be written whatever its value.
                let guard = inst.guard.filter(|g| g.reg.id() != reg);
                if !state.can_read(reg, guard) && told.insert(reg) {
                    at(i, Fault::Unwritten { reg: kernel.reg_name(reg) });
                }
            }
            state.step(inst, kernel);
        }
    }
}

/// What is known of the guard of a block's last branch on the way to `next`.
fn edge(kernel: &Kernel, flow: &Flow, block: usize, next: usize) -> Option<Known> {
    let last = &kernel.body[flow.blocks[block].end - 1];
    let guard = last.guard?;
    let holds = (guard.reg.id(), !guard.negated);
    let fails = (guard.reg.id(), guard.negated);
    match last.op {
        Op::Bra { .. } => {
            // The target is the first of a block's successors.
            let taken = flow.blocks[block].next.first() == Some(&next);
            // Where both ways lead to the same block, nothing is known.
            match (taken, next == block + 1) {
                (true, true) => None,
                (true, false) => Some(holds),
                (false, _) => Some(fails),
            }
        }
        Op::Exit | Op::Ret | Op::Trap => Some(fails),
        _ => None,
    }
}
