//! Stamps, where a kernel is [traced](KernelBuilder::traced); see [`crate::trace`].

use super::KernelBuilder;
use crate::modifiers::Space;
use crate::params::KernelParams;
use crate::trace::{EDGE, NO_NUMBER, NOBODY, SECTION_BITS, STAMP, TraceParams};
use crate::types::*;

/// How a kernel under construction writes stamps.
#[derive(Clone, Copy)]
pub(super) struct Tracer {
    /// The first of its parameters.
    param: u32,
    /// What a thread needs for a stamp, once it has begun.
    thread: Option<Thread>,
}

/// What a thread needs for a stamp.
#[derive(Clone, Copy)]
struct Thread {
    /// One header before the track's footer.
    end: Reg<B64>,
    /// Stamps for which there is room; far below zero in threads that write none.
    left: Reg<B32>,
    /// When it began, by both clocks.
    began: (Reg<B64>, Reg<B32>),
}

/// Stamps.
impl KernelBuilder {
    /// Whether the kernel writes stamps: it then has [`TraceParams`] behind its own parameters, which are given before.
    pub fn traced(mut self, traced: bool) -> Self {
        if !traced {
            return self;
        }
        self.trace = Some(Tracer { param: self.append(TraceParams::FIELDS), thread: None });
        self
    }

    fn tracing(&self) -> Option<Thread> {
        self.trace.and_then(|trace| trace.thread)
    }

    /// The tracks begin: one for every so many threads, a power of two, and so many per block. The first thread of each
    /// will write. Nothing is written yet: see [`KernelBuilder::open_trace`].
    #[track_caller]
    pub fn begin_trace(&mut self, roles: u32, threads: u32) {
        let Some(Tracer { param, .. }) = self.trace else { return };
        let (clock, global) = (self.clock(), self.globaltimer());
        self.comment("where this track is written");
        let base = self.reg::<B64>();
        self.load_param(param, RegClass::B64, base.into());
        let base = self.cvta(Space::Global, true, base);
        let (stamps, blocks) = (self.reg::<B32>(), self.reg::<B32>());
        self.load_param(param + 1, RegClass::B32, stamps.into());
        self.load_param(param + 2, RegClass::B32, blocks.into());
        let (x, y, z) = (self.ctaid_x(), self.ctaid_y(), self.ctaid_z());
        let (width, height) = (self.nctaid_x(), self.nctaid_y());
        let row = self.mad_lo_u32(z, height, y);
        let block = self.mad_lo_u32(row, width, x);
        let tid = self.tid_x();
        let role = self.shr_u32(tid, threads.trailing_zeros());
        let inside = self.and_b32(tid, threads - 1);
        let (first, recorded) = (self.setp_eq_u32(inside, 0u32), self.setp_lt_u32(block, blocks));
        let who = self.and_pred(first, recorded);
        let track = self.mad_lo_u32(block, roles, role);
        let bytes = self.mad_lo_u32(stamps, STAMP, 2 * EDGE);
        let start = self.mad_wide_u32(track, bytes, base);
        let end = self.mad_wide_u32(stamps, STAMP, start);
        let left = self.selp_b32(stamps, NOBODY, who);
        let left = self.mov_b32(left);
        self.trace = Some(Tracer { param, thread: Some(Thread { end, left, began: (global, clock) }) });
    }

    /// The time of a stamp that is to be written later.
    #[track_caller]
    pub fn trace_clock(&mut self) -> Option<Reg<B32>> {
        self.tracing().map(|_| self.clock())
    }

    /// Each role, before its first stamp, writes when it began; what came before that stamp is section 0. A kernel that
    /// waits for the launch before it does so first: the memory may still be that one's.
    #[track_caller]
    pub fn open_trace(&mut self) {
        let Some(Thread { end, left, began: (global, clock) }) = self.tracing() else { return };
        let start = self.mad_wide_s32(left, -STAMP.cast_signed(), end);
        let sm = self.smid();
        self.write_edge(start.into(), global, clock, sm);
    }

    /// A section begins, and with it the one before it ends. `number` says which of many it is: a register and what is
    /// added to it.
    #[track_caller]
    pub fn stamp(&mut self, section: u32, number: Option<(Reg<B32>, u32)>) {
        if let Some(clock) = self.trace_clock() {
            self.stamp_at(clock, section, number);
        }
    }

    /// The same for a section that began at this [time](KernelBuilder::trace_clock).
    #[track_caller]
    pub fn stamp_at(&mut self, clock: Reg<B32>, section: u32, number: Option<(Reg<B32>, u32)>) {
        let Some(Thread { end, left, .. }) = self.tracing() else { return };
        let constant = |number: u32| (number << SECTION_BITS) | section;
        let what = match number {
            Some((number, more)) => self.mad_lo_u32(number, 1u32 << SECTION_BITS, constant(more)),
            None => self.mov_b32(constant(NO_NUMBER)),
        };
        let room = self.setp_gt_s32(left, 0);
        let at = self.mad_wide_s32(left, -STAMP.cast_signed(), end);
        self.when(room, |k| k.st_global_vec(at.at(EDGE.cast_signed()), [clock, what]));
        self.set(left, |k| k.sub_s32(left, 1));
    }

    /// The track ends.
    #[track_caller]
    pub fn end_trace(&mut self) {
        let Some(Thread { end, left, .. }) = self.tracing() else { return };
        let (clock, global) = (self.clock(), self.globaltimer());
        self.write_edge(end.at(EDGE.cast_signed()), global, clock, left);
    }

    /// Writes a header or a footer.
    #[track_caller]
    fn write_edge(&mut self, at: Addr<B64>, global: Reg<B64>, clock: Reg<B32>, word: Reg<B32>) {
        let Some(Thread { left, .. }) = self.tracing() else { return };
        let [low, high] = self.unpack_b64(global);
        let who = self.setp_gt_s32(left, NOBODY / 2);
        self.when(who, |k| k.st_global_vec(at, [low, high, clock, word]));
    }
}
