//! The builder: what kernel authors write in.
//!
//! A method emits one instruction and returns the registers it writes; [`KernelBuilder::set`] makes an
//! instruction write registers that exist already. Static choices are Rust `if` and `for`; run-time control
//! flow is structured, from [`KernelBuilder::if_`] to [`KernelBuilder::roles`]. Nothing panics: a mistake is
//! recorded with the author's line and returned by [`KernelBuilder::finish`].

mod atomics;
mod bulk;
mod control;
mod data;
mod memory;
mod sync;
mod tensor;
mod trace;

use std::any::TypeId;
use std::panic::Location;
use std::sync::Arc;

pub use atomics::{ATOMICS, At};
pub use bulk::BulkHint;
pub use control::{Loop, Roles};
pub use data::{FULL_MASK, Word32};
pub use memory::{ClusterAddr, MemHint};
pub use tensor::{Accumulator, MmaAccumulator};

use crate::check;
use crate::error::{BuildError, BuildErrors, Fault};
use crate::flow;
use crate::inst::{Arg, Inst, LabelId, MemBase, Op};
use crate::modifiers::Space;
use crate::module::{Kernel, RegInfo, Threads};
use crate::params::{self, KernelParams, ParamHandle, ScalarParam, TensorMap};
use crate::shared::SharedLayout;
use crate::table::Alu;
use crate::types::*;

/// A kernel under construction.
pub struct KernelBuilder {
    target: Target,
    kernel: Kernel,
    /// Its structs of parameters: the type, its name, and the index of its first parameter.
    params: Vec<(TypeId, &'static str, u32)>,
    guard: Option<Guard>,
    comment: Option<String>,
    section: Option<u32>,
    errors: Vec<BuildError>,
    /// The registers of each class so far.
    counts: [u32; RegClass::ALL.len()],
    /// How stamps are written, where they are.
    trace: Option<trace::Tracer>,
}

impl KernelBuilder {
    /// An empty kernel of this name.
    pub fn new(name: &str, target: Target) -> KernelBuilder {
        KernelBuilder {
            target,
            kernel: Kernel {
                name: name.to_owned(),
                params: Vec::new(),
                regs: Vec::new(),
                shared: SharedLayout::new(),
                threads: None,
                min_blocks_per_sm: None,
                cluster: None,
                max_regs: None,
                sections: Vec::new(),
                labels: Vec::new(),
                body: Vec::new(),
            },
            params: Vec::new(),
            guard: None,
            comment: None,
            section: None,
            errors: Vec::new(),
            counts: [0; RegClass::ALL.len()],
            trace: None,
        }
    }

    /// Gives the kernel its parameters.
    pub fn params<P: KernelParams>(mut self) -> Self {
        (self.params, self.kernel.params) = (Vec::new(), Vec::new());
        self.more_params::<P>()
    }

    /// Gives the kernel further parameters, behind those that it has.
    ///
    /// ```
    /// use flashcore_ptx::{KernelBuilder, Target, kernel_params};
    ///
    /// kernel_params! { pub struct Own { n: u32 } }
    /// kernel_params! { pub struct More { factor: f32 } }
    ///
    /// let mut k = KernelBuilder::new("k", Target::Sm80).params::<Own>().more_params::<More>();
    /// let (_n, _factor) = (k.param(Own::n), k.param(More::factor));
    /// let kernel = k.finish()?;
    /// assert_eq!((kernel.params[1].name.as_str(), kernel.params[1].offset), ("factor", 4));
    /// # Ok::<(), flashcore_ptx::BuildErrors>(())
    /// ```
    pub fn more_params<P: KernelParams>(mut self) -> Self {
        let first = self.append(P::FIELDS);
        self.params.push((TypeId::of::<P>(), P::NAME, first));
        self
    }

    /// Appends parameters, and returns the index of the first.
    fn append(&mut self, fields: &[(&str, params::ParamType)]) -> u32 {
        let first = self.kernel.params.len() as u32;
        let own = self.kernel.params.iter().map(|param| (param.name.as_str(), param.ty));
        let all: Vec<(&str, params::ParamType)> = own.chain(fields.iter().copied()).collect();
        self.kernel.params = params::layout(&all);
        first
    }

    /// Gives the kernel its shared memory.
    pub fn shared(mut self, layout: SharedLayout) -> Self {
        self.kernel.shared = layout;
        self
    }

    /// The block has exactly this many threads, in one dimension.
    pub fn threads(mut self, x: u32) -> Self {
        self.kernel.threads = Some(Threads::Exactly([x, 1, 1]));
        self
    }

    /// The block has at most this many threads.
    pub fn max_threads(mut self, x: u32) -> Self {
        self.kernel.threads = Some(Threads::AtMost([x, 1, 1]));
        self
    }

    /// ptxas must leave room for this many blocks per multiprocessor.
    pub fn min_blocks_per_sm(mut self, blocks: u32) -> Self {
        self.kernel.min_blocks_per_sm = Some(blocks);
        self
    }

    /// The blocks come in clusters of this shape.
    pub fn cluster(mut self, x: u32, y: u32, z: u32) -> Self {
        self.kernel.cluster = Some([x, y, z]);
        self
    }

    /// A thread has at most this many registers.
    pub fn max_regs(mut self, count: u32) -> Self {
        self.kernel.max_regs = Some(count);
        self
    }

    /// The target that the kernel is for: for static choices.
    pub fn target(&self) -> Target {
        self.target
    }

    /// A new register, not written yet.
    pub fn reg<T: RegType>(&mut self) -> Reg<T> {
        Reg::new(self.new_reg(T::CLASS))
    }

    fn new_reg(&mut self, class: RegClass) -> RegId {
        let number = self.counts[class as usize];
        self.counts[class as usize] += 1;
        self.kernel.regs.push(RegInfo { class, number });
        RegId(self.kernel.regs.len() as u32 - 1)
    }

    /// An array of new registers, not written yet.
    pub fn regs<T: RegType, const N: usize>(&mut self) -> [Reg<T>; N] {
        std::array::from_fn(|_| self.reg())
    }

    /// As many new registers as asked for, not written yet.
    pub fn reg_vec<T: RegType>(&mut self, count: usize) -> Vec<Reg<T>> {
        (0..count).map(|_| self.reg()).collect()
    }

    /// Says what comes next: printed above the next instruction, and the label of what a simulator or the
    /// checker finds there.
    pub fn comment(&mut self, words: &str) {
        match &mut self.comment {
            Some(comment) => {
                comment.push('\n');
                comment.push_str(words);
            }
            None => self.comment = Some(words.to_owned()),
        }
    }

    /// Begins a section of the kernel: a heading in the text, and part of the label of what is found in it.
    pub fn section(&mut self, name: &str) {
        self.section = Some(self.kernel.sections.len() as u32);
        self.kernel.sections.push(name.to_owned());
    }

    /// Emits under a predicate: only lanes where it holds execute what the closure emits.
    ///
    /// Registers written there keep their old value in the other lanes, so give them a value first. Labels and
    /// guards are not allowed inside: use [`KernelBuilder::if_`] for those.
    #[track_caller]
    pub fn when<R>(&mut self, guard: impl Into<Guard>, emit: impl FnOnce(&mut Self) -> R) -> R {
        let outer = self.guard;
        if outer.is_some() {
            self.forbidden("a guard within a guard: combine the predicates, or use if_");
        }
        self.guard = Some(guard.into());
        let result = emit(self);
        self.guard = outer;
        result
    }

    /// Writes what the closure computes to registers that exist already.
    ///
    /// ```
    /// # use flashcore_ptx::{KernelBuilder, Target};
    /// # let mut k = KernelBuilder::new("k", Target::Sm80);
    /// let sum = k.mov_f32(0.0);
    /// k.set(sum, |k| k.add_f32(sum, 1.0)); // add.rn.f32 %f0, %f0, 1.0
    /// ```
    ///
    /// Where the closure's result is written by its last instruction, that instruction writes `dst` directly;
    /// otherwise a move follows.
    #[track_caller]
    pub fn set<D: Destination>(&mut self, dst: D, compute: impl FnOnce(&mut Self) -> D) {
        let first_new = self.kernel.regs.len() as u32;
        let start = self.kernel.body.len();
        let result = compute(self);
        let (mut from, mut to) = (Vec::new(), Vec::new());
        result.each(&mut |id| from.push(id));
        dst.each(&mut |id| to.push(id));

        let fresh = from.iter().all(|id| id.0 >= first_new);
        let distinct = from.iter().enumerate().all(|(i, id)| !from[..i].contains(id));
        let last = self.kernel.body.len().checked_sub(1).filter(|&i| i >= start);
        let direct = fresh
            && distinct
            && last.is_some_and(|i| from.iter().all(|id| self.kernel.body[i].dst.contains(&Arg::Reg(*id))))
            && !self.kernel.body[start..].iter().any(|inst| inst.reads().any(|r| from.contains(&r)))
            && self.kernel.body[start..self.kernel.body.len() - 1]
                .iter()
                .all(|inst| inst.writes().all(|w| !from.contains(&w)));
        if let (true, Some(last)) = (direct, last) {
            for arg in &mut self.kernel.body[last].dst {
                if let Some(i) = from.iter().position(|id| *arg == Arg::Reg(*id)) {
                    *arg = Arg::Reg(to[i]);
                }
            }
            self.forget_unused(&from);
        } else {
            self.move_all(&from, &to);
        }
    }

    /// Moves registers to others, all at once: a register that is both source and destination goes through a new one.
    #[track_caller]
    fn move_all(&mut self, from: &[RegId], to: &[RegId]) {
        let crossed = to.iter().enumerate().any(|(i, id)| from[i + 1..].contains(id));
        let mut from = from.to_vec();
        if crossed {
            for id in &mut from {
                let Some(class) = self.class(*id) else { continue };
                let copy = self.new_reg(class);
                self.emit(mov(class), vec![Arg::Reg(copy)], vec![Arg::Reg(*id)]);
                *id = copy;
            }
        }
        for (&from, &to) in from.iter().zip(to).filter(|(from, to)| from != to) {
            let Some(class) = self.class(to) else { continue };
            self.emit(mov(class), vec![Arg::Reg(to)], vec![Arg::Reg(from)]);
        }
    }

    /// The class of a register. `None`, with the mistake recorded, where the kernel has no such register.
    #[track_caller]
    fn class(&mut self, id: RegId) -> Option<RegClass> {
        let class = self.kernel.reg(id).map(|reg| reg.class);
        if class.is_none() {
            self.forbidden("a register of another kernel");
        }
        class
    }

    /// Drops registers that a retargeted instruction no longer names, where they are the newest ones.
    fn forget_unused(&mut self, dropped: &[RegId]) {
        while let Some(last) = self.kernel.regs.len().checked_sub(1) {
            if !dropped.contains(&RegId(last as u32)) {
                break;
            }
            if let Some(reg) = self.kernel.regs.pop() {
                self.counts[reg.class as usize] -= 1;
            }
        }
    }

    /// Reads a parameter into a register. A global pointer is converted to a global address.
    #[track_caller]
    pub fn param<P: KernelParams, T: ScalarParam>(&mut self, handle: ParamHandle<P, T>) -> Reg<T::Class> {
        let first = self.first_of::<P>();
        let value = self.reg();
        self.load_param(first + handle.index(), T::Class::CLASS, value.into());
        if T::TYPE == params::ParamType::GlobalPtr {
            let global = self.reg();
            self.emit(
                Op::Cvta { space: Space::Global, to_space: true },
                vec![global.into()],
                vec![value.into()],
            );
            return global;
        }
        value
    }

    /// The generic address of a tensor map that is passed by value.
    #[track_caller]
    pub fn tensor_map<P: KernelParams>(&mut self, handle: ParamHandle<P, TensorMap>) -> Reg<B64> {
        let first = self.first_of::<P>();
        let (local, generic) = (self.reg::<B64>(), self.reg::<B64>());
        let symbol = Arg::Mem { base: MemBase::Param(first + handle.index()), offset: 0 };
        self.emit(Op::AddrOf, vec![local.into()], vec![symbol]);
        let to_generic = Op::Cvta { space: Space::Param, to_space: false };
        self.emit(to_generic, vec![generic.into()], vec![local.into()]);
        generic
    }

    /// The index of the first parameter of a struct.
    #[track_caller]
    fn first_of<P: KernelParams>(&mut self) -> u32 {
        if let Some(&(_, _, first)) = self.params.iter().find(|(id, ..)| *id == TypeId::of::<P>()) {
            return first;
        }
        let names: Vec<&str> = self.params.iter().map(|&(_, name, _)| name).collect();
        let has = if names.is_empty() { "none".to_owned() } else { names.join(" and ") };
        self.forbidden(&format!("a parameter of {} is read, but the kernel's parameters are {has}", P::NAME));
        0
    }

    /// Emits one instruction.
    #[track_caller]
    pub(crate) fn emit(&mut self, op: Op, dst: Vec<Arg>, src: Vec<Arg>) {
        let loc = Some(Location::caller());
        let comment = self.comment.take().map(Arc::from);
        self.kernel.body.push(Inst { op, guard: self.guard, dst, src, comment, section: self.section, loc });
    }

    /// Records that the caller asks for something that PTX forbids.
    #[track_caller]
    pub(crate) fn forbidden(&mut self, what: &str) {
        self.error(Location::caller(), Fault::Forbidden(what.to_owned()));
    }

    fn error(&mut self, loc: &'static Location<'static>, fault: Fault) {
        self.errors.push(BuildError { kernel: self.kernel.name.clone(), loc: Some(loc), place: None, fault });
    }

    pub(crate) fn new_label(&mut self, name: &str) -> LabelId {
        let id = LabelId(self.kernel.labels.len() as u32);
        self.kernel.labels.push(format!("{name}_{}", id.0));
        id
    }

    /// The finished kernel, checked, or every fault found.
    #[track_caller]
    pub fn finish(mut self) -> Result<Kernel, BuildErrors> {
        if !self.kernel.body.last().is_some_and(|inst| inst.op.ends_flow() && inst.guard.is_none()) {
            self.guard = None;
            self.emit(Op::Ret, Vec::new(), Vec::new());
        }
        flow::set_reconvergence(&mut self.kernel);
        self.errors.extend(check::kernel(&self.kernel, self.target));
        if self.errors.is_empty() { Ok(self.kernel) } else { Err(BuildErrors(self.errors)) }
    }
}

/// The move of a class of registers.
fn mov(class: RegClass) -> Op {
    Op::Alu(match class {
        RegClass::Pred => Alu::MovPred,
        RegClass::B16 => Alu::MovB16,
        RegClass::B32 => Alu::MovB32,
        RegClass::B64 => Alu::MovB64,
        RegClass::F32 => Alu::MovF32,
    })
}

/// Registers that [`KernelBuilder::set`] can write: one, or an array of such.
pub trait Destination: Copy {
    /// Calls `visit` for each register.
    fn each(self, visit: &mut dyn FnMut(RegId));
}

impl<T: RegType> Destination for Reg<T> {
    fn each(self, visit: &mut dyn FnMut(RegId)) {
        visit(self.id());
    }
}

impl<D: Destination, const N: usize> Destination for [D; N] {
    fn each(self, visit: &mut dyn FnMut(RegId)) {
        for d in self {
            d.each(visit);
        }
    }
}
