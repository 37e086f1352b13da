//! Structured control flow: branches, loops, and the roles of warps.

use std::ops::Range;

use super::KernelBuilder;
use crate::inst::{LabelId, Op};
use crate::types::{B32, Guard, Operand, Pred, Reg};

/// A loop under construction: what `break_if` and `continue_if` refer to.
#[derive(Clone, Copy, Debug)]
pub struct Loop {
    next: LabelId,
    end: LabelId,
}

/// The roles of a block's warps, under construction: see [`KernelBuilder::roles`].
pub struct Roles<'k> {
    k: &'k mut KernelBuilder,
    warp: Reg<B32>,
    end: LabelId,
}

impl KernelBuilder {
    /// Runs the body in lanes where the guard holds.
    #[track_caller]
    pub fn if_(&mut self, guard: impl Into<Guard>, then: impl FnOnce(&mut Self)) {
        let end = self.new_label("endif");
        self.branch(end, Some(!guard.into()));
        then(self);
        self.label(end);
    }

    /// Runs the first body in lanes where the guard holds, the second in the others.
    #[track_caller]
    pub fn if_else(
        &mut self,
        guard: impl Into<Guard>,
        then: impl FnOnce(&mut Self),
        otherwise: impl FnOnce(&mut Self),
    ) {
        let other = self.new_label("else");
        let end = self.new_label("endif");
        self.branch(other, Some(!guard.into()));
        then(self);
        self.branch(end, None);
        self.label(other);
        otherwise(self);
        self.label(end);
    }

    /// Repeats the body until a [`KernelBuilder::break_if`] leaves it.
    #[track_caller]
    pub fn loop_(&mut self, body: impl FnOnce(&mut Self, Loop)) {
        let head = self.new_label("loop");
        let end = self.new_label("endloop");
        self.label(head);
        body(self, Loop { next: head, end });
        self.branch(head, None);
        self.label(end);
    }

    /// Repeats the body while the condition, computed anew each time, holds.
    #[track_caller]
    pub fn while_<G: Into<Guard>>(
        &mut self,
        condition: impl FnOnce(&mut Self) -> G,
        body: impl FnOnce(&mut Self, Loop),
    ) {
        let head = self.new_label("while");
        let end = self.new_label("endwhile");
        self.label(head);
        let guard = condition(self).into();
        self.branch(end, Some(!guard));
        body(self, Loop { next: head, end });
        self.branch(head, None);
        self.label(end);
    }

    /// Counts a register from `start` up to but not including `end` by `step`, as signed integers.
    ///
    /// The body must not write the counter.
    #[track_caller]
    pub fn for_s32(
        &mut self,
        start: impl Into<Operand<B32>>,
        end: impl Into<Operand<B32>>,
        step: impl Into<Operand<B32>>,
        body: impl FnOnce(&mut Self, Reg<B32>, Loop),
    ) {
        let (end, step) = (end.into(), step.into());
        let i = self.mov_b32(start);
        let head = self.new_label("for");
        let next = self.new_label("next");
        let done = self.new_label("endfor");
        self.label(head);
        let more = self.setp_lt_s32(i, end);
        self.branch(done, Some(!more));
        body(self, i, Loop { next, end: done });
        self.label(next);
        self.set(i, |k| k.add_s32(i, step));
        self.branch(head, None);
        self.label(done);
    }

    /// Leaves the loop in lanes where the guard holds.
    #[track_caller]
    pub fn break_if(&mut self, of: Loop, guard: impl Into<Guard>) {
        self.branch(of.end, Some(guard.into()));
    }

    /// Leaves the loop.
    #[track_caller]
    pub fn break_(&mut self, of: Loop) {
        self.branch(of.end, None);
    }

    /// Goes on with the loop's next iteration in lanes where the guard holds.
    #[track_caller]
    pub fn continue_if(&mut self, of: Loop, guard: impl Into<Guard>) {
        self.branch(of.next, Some(guard.into()));
    }

    /// Gives ranges of warps their own code. `warp` is the warp's index in the block, the same in all its lanes.
    ///
    /// ```
    /// # use flashcore_ptx::{KernelBuilder, Target};
    /// # let mut k = KernelBuilder::new("k", Target::Sm80);
    /// let tid = k.tid_x();
    /// let warp = k.shr_u32(tid, 5);
    /// k.roles(warp, |roles| {
    ///     roles.warps(0..1, |k| k.comment("producer"));
    ///     roles.warps(4..12, |k| k.comment("consumers"));
    /// });
    /// ```
    #[track_caller]
    pub fn roles(&mut self, warp: Reg<B32>, assign: impl FnOnce(&mut Roles<'_>)) {
        let end = self.new_label("endroles");
        assign(&mut Roles { k: self, warp, end });
        self.label(end);
    }

    /// Ends the lanes that execute it.
    #[track_caller]
    pub fn exit(&mut self) {
        self.emit(Op::Exit, Vec::new(), Vec::new());
    }

    /// Returns from the kernel.
    #[track_caller]
    pub fn ret(&mut self) {
        self.emit(Op::Ret, Vec::new(), Vec::new());
    }

    /// Stops the kernel with an error.
    #[track_caller]
    pub fn trap(&mut self) {
        self.emit(Op::Trap, Vec::new(), Vec::new());
    }

    #[track_caller]
    fn branch(&mut self, target: LabelId, guard: Option<Guard>) {
        let outer = self.guard;
        if outer.is_some() {
            self.forbidden("control flow under a guard: use if_ for it");
        }
        self.guard = guard;
        self.emit(Op::Bra { target, reconverge: None }, Vec::new(), Vec::new());
        self.guard = outer;
    }

    #[track_caller]
    pub(super) fn label(&mut self, label: LabelId) {
        let (outer, comment) = (self.guard.take(), self.comment.take());
        self.emit(Op::Label(label), Vec::new(), Vec::new());
        self.guard = outer;
        self.comment = comment;
    }

    /// Loops until a predicate holds, which the closure computes anew each time.
    #[track_caller]
    pub(super) fn spin_until(&mut self, poll: impl FnOnce(&mut Self) -> Reg<Pred>) {
        let again = self.new_label("wait");
        self.label(again);
        let done = poll(self);
        self.branch(again, Some(!done));
    }
}

impl Roles<'_> {
    /// The code of the warps of a range.
    #[track_caller]
    pub fn warps(&mut self, range: Range<u32>, body: impl FnOnce(&mut KernelBuilder)) {
        let (k, warp, end) = (&mut *self.k, self.warp, self.end);
        if range.is_empty() {
            k.forbidden(&format!("a role for the empty range of warps {range:?}"));
        }
        let size = range.end.saturating_sub(range.start);
        let other = k.new_label("role");
        // Unsigned, so that one comparison tests both ends.
        let from_start = if range.start == 0 { warp } else { k.sub_u32(warp, range.start) };
        let mine = k.setp_lt_u32(from_start, size);
        k.branch(other, Some(!mine));
        body(k);
        k.branch(end, None);
        k.label(other);
    }

    /// The code of the warps that have no role so far.
    #[track_caller]
    pub fn others(&mut self, body: impl FnOnce(&mut KernelBuilder)) {
        body(self.k);
    }
}
