//! `wgmma` stages that PTX leaves undefined: ptxas answers them with a C75xx note and serialised instructions, or
//! says nothing at all.
//!
//! A stage is: `wgmma.fence`, one or more `mma_async`, `commit_group`, and later a `wait_group` that covers it.
//! Between an `mma_async` and its wait nothing else may touch its accumulators or its A registers; whatever
//! touched them before must come before a fence. Descriptors are exempt: they are read when the instruction is
//! issued, and ptxas takes them from wherever they are computed.
//!
//! Nor may something else be made meanwhile that is copied into an A register later: ptxas 13.0 takes a copy for the same
//! register, and does not see that a product in flight still reads it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use crate::error::Fault;
use crate::flow::Flow;
use crate::inst::{Inst, Op};
use crate::modifiers::Wgmma;
use crate::module::Kernel;
use crate::table::Alu;
use crate::types::RegId;

/// The most groups that can be told apart: `wait_group` takes 0 to 7.
const GROUPS: usize = 8;

/// How a `wgmma` in flight uses a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    /// As an accumulator of this many columns.
    Accumulator(u16),
    /// As part of A.
    Input,
}

type Uses = BTreeMap<RegId, Use>;

/// What needs to be tracked of a kernel.
struct Used {
    /// The registers that any `wgmma` uses.
    registers: HashSet<RegId>,
    /// Registers that are copied into A registers or from them, by way of others or not, with those.
    copies: HashMap<RegId, Vec<RegId>>,
}

impl Used {
    fn of(kernel: &Kernel) -> Self {
        let (mut registers, mut inputs) = (HashSet::new(), BTreeSet::new());
        for inst in &kernel.body {
            let Op::Wgmma(spec) = inst.op else { continue };
            for (reg, how) in uses(inst, &spec) {
                registers.insert(reg);
                inputs.extend(Some(reg).filter(|_| how == Use::Input));
            }
        }
        let mut moves: [HashMap<RegId, Vec<RegId>>; 2] = Default::default();
        for inst in kernel.body.iter().filter(|inst| inst.op == Op::Alu(Alu::MovB32)) {
            let (Some(to), Some(from)) = (inst.writes().next(), inst.src.first().and_then(|from| from.reg()))
            else {
                continue;
            };
            moves[0].entry(to).or_default().push(from);
            moves[1].entry(from).or_default().push(to);
        }
        let mut copies: HashMap<RegId, Vec<RegId>> = HashMap::new();
        for (input, moves) in inputs.iter().flat_map(|&input| moves.iter().map(move |way| (input, way))) {
            let (mut seen, mut todo) = (HashSet::from([input]), vec![input]);
            while let Some(reg) = todo.pop() {
                let next = moves.get(&reg).into_iter().flatten().filter(|&&next| seen.insert(next));
                todo.extend(next);
            }
            seen.into_iter()
                .filter(|&reg| reg != input)
                .for_each(|reg| copies.entry(reg).or_default().push(input));
        }
        Self { registers, copies }
    }
}

/// How a `wgmma` uses its registers.
fn uses(inst: &Inst, spec: &Wgmma) -> Uses {
    let inputs = if spec.a_in_regs { &inst.src[..inst.src.len().min(4)] } else { &[] };
    let inputs = inputs.iter().filter_map(|a| a.reg()).map(|reg| (reg, Use::Input));
    inst.writes().map(|reg| (reg, Use::Accumulator(spec.n))).chain(inputs).collect()
}

/// What is in flight at one point of the program.
#[derive(Clone, PartialEq, Default)]
struct State {
    /// A fence has been executed on every path.
    fenced: bool,
    /// Registers that something else touched since the last fence.
    touched: BTreeSet<RegId>,
    /// The registers of `mma_async`s that are not committed.
    open: Uses,
    /// The registers of committed groups that are not waited for, the newest first.
    pending: VecDeque<Uses>,
}

impl State {
    fn in_flight(&self, reg: RegId) -> Option<Use> {
        self.open.get(&reg).or_else(|| self.pending.iter().find_map(|group| group.get(&reg))).copied()
    }

    /// Applies an instruction, telling what is wrong with it here.
    fn step(&mut self, kernel: &Kernel, inst: &Inst, used: &Used, tell: &mut dyn FnMut(Fault)) {
        match inst.op {
            Op::WgmmaFence => {
                self.fenced = true;
                self.touched.clear();
            }
            Op::Wgmma(spec) => self.issue(kernel, inst, &spec, tell),
            Op::WgmmaCommit => {
                let group = std::mem::take(&mut self.open);
                self.pending.push_front(group);
                if self.pending.len() > GROUPS {
                    let oldest = self.pending.pop_back().unwrap_or_default();
                    if let Some(last) = self.pending.back_mut() {
                        last.extend(oldest);
                    }
                }
            }
            Op::WgmmaWait(keep) => {
                if !self.open.is_empty() {
                    let problem =
                        "wgmma.wait_group before the wgmmas in front of it are committed".to_owned();
                    tell(Fault::Wgmma { code: None, problem });
                }
                self.pending.truncate(usize::from(keep));
            }
            _ => self.touch(kernel, inst, used, tell),
        }
    }

    fn issue(&mut self, kernel: &Kernel, inst: &Inst, spec: &Wgmma, tell: &mut dyn FnMut(Fault)) {
        if !self.fenced {
            let problem = "wgmma without a wgmma.fence before it on every path".to_owned();
            tell(Fault::Wgmma { code: Some(7519), problem });
        }
        let uses = uses(inst, spec);
        for (&reg, &how) in &uses {
            let name = || kernel.reg_name(reg);
            if self.touched.contains(&reg) {
                let what = match how {
                    Use::Accumulator(_) => "accumulator",
                    Use::Input => "A register",
                };
                let problem = format!("{what} {} of a wgmma is touched after the last wgmma.fence", name());
                tell(Fault::Wgmma { code: Some(7519), problem });
                break;
            }
            if self.in_flight(reg).is_some_and(|other| other != how) {
                let problem = format!("register {} is used by a wgmma in flight in another way", name());
                tell(Fault::Wgmma { code: None, problem });
                break;
            }
        }
        self.open.extend(uses);
    }

    /// Something that is not a wgmma.
    fn touch(&mut self, kernel: &Kernel, inst: &Inst, used: &Used, tell: &mut dyn FnMut(Fault)) {
        let writes: Vec<RegId> = inst.writes().collect();
        let reads: Vec<RegId> = inst.reads().collect();
        for (regs, verb) in [(&reads, "read"), (&writes, "written")] {
            let Some((reg, how)) = regs.iter().find_map(|&r| Some((r, self.in_flight(r)?))) else { continue };
            let code = match (verb, how) {
                ("read", Use::Accumulator(_)) => Some(7517),
                _ => None,
            };
            let problem = format!("{} is {verb} while a wgmma in flight uses it", kernel.reg_name(reg));
            tell(Fault::Wgmma { code, problem });
        }
        let copied = writes.iter().find_map(|&reg| Some((reg, self.copied_in_flight(reg, used)?)));
        if let Some((reg, input)) = copied {
            let (reg, input) = (kernel.reg_name(reg), kernel.reg_name(input));
            let problem = format!(
                "{reg} is written while a wgmma in flight uses {input}, which it is copied to or from: ptxas takes both for \
                 one register"
            );
            tell(Fault::Wgmma { code: None, problem });
        }
        let touched = writes.into_iter().chain(reads);
        self.touched.extend(touched.filter(|reg| used.registers.contains(reg)));
    }

    /// An A register in flight that another is copied to or from.
    fn copied_in_flight(&self, reg: RegId, used: &Used) -> Option<RegId> {
        let inputs = used.copies.get(&reg)?.iter().copied();
        inputs.filter(|&input| self.in_flight(input) == Some(Use::Input)).min()
    }

    /// What may be in flight where several paths meet.
    fn meet(states: &[&State]) -> State {
        let Some((first, rest)) = states.split_first() else { return State::default() };
        let mut met = (*first).clone();
        for other in rest {
            met.fenced &= other.fenced;
            met.touched.extend(&other.touched);
            met.open.extend(&other.open);
            for (i, group) in other.pending.iter().enumerate() {
                match met.pending.get_mut(i) {
                    Some(mine) => mine.extend(group),
                    None => met.pending.push_back(group.clone()),
                }
            }
        }
        met
    }
}

pub(super) fn check(kernel: &Kernel, flow: &Flow, at: &mut dyn FnMut(usize, Fault)) {
    if !kernel.body.iter().any(|inst| inst.op.is_wgmma()) {
        return;
    }
    let used = Used::of(kernel);
    let mut before: Vec<Vec<usize>> = vec![Vec::new(); flow.blocks.len()];
    for (b, block) in flow.blocks.iter().enumerate() {
        block.next.iter().for_each(|&next| before[next].push(b));
    }
    let entry = State::default();
    let mut at_end: Vec<Option<State>> = vec![None; flow.blocks.len()];
    fn arriving<'s>(
        b: usize,
        before: &[usize],
        entry: &'s State,
        at_end: &'s [Option<State>],
    ) -> Vec<&'s State> {
        let start = (b == 0).then_some(entry);
        start.into_iter().chain(before.iter().filter_map(|&from| at_end[from].as_ref())).collect()
    }
    let mut changed = true;
    while changed {
        changed = false;
        for (b, block) in flow.blocks.iter().enumerate() {
            let states = arriving(b, &before[b], &entry, &at_end);
            if states.is_empty() {
                continue;
            }
            let mut state = State::meet(&states);
            for inst in &kernel.body[block.start..block.end] {
                state.step(kernel, inst, &used, &mut |_| {});
            }
            if at_end[b].as_ref() != Some(&state) {
                at_end[b] = Some(state);
                changed = true;
            }
        }
    }

    for (b, block) in flow.blocks.iter().enumerate() {
        let states = arriving(b, &before[b], &entry, &at_end);
        if states.is_empty() {
            continue;
        }
        if states.iter().any(|s| s.open.is_empty()) && states.iter().any(|s| !s.open.is_empty()) {
            let problem = "wgmmas are left uncommitted on one of the paths that meet here".to_owned();
            at(block.start, Fault::Wgmma { code: Some(7519), problem });
        }
        let mut state = State::meet(&states);
        for i in block.start..block.end {
            state.step(kernel, &kernel.body[i], &used, &mut |fault| at(i, fault));
        }
        let flying = !state.open.is_empty() || state.pending.iter().any(|group| !group.is_empty());
        if block.exits && kernel.body[block.end - 1].guard.is_none() && flying {
            let problem = "the kernel ends while wgmmas are in flight".to_owned();
            at(block.end - 1, Fault::Wgmma { code: Some(7517), problem });
        }
    }
}
