//! Instructions between the lanes of a warp: shuffles, votes, reductions, elections.

use flashcore_ptx::{AtomOp, AtomTy, MatchMode, Op, ShflMode, VoteMode};

use crate::exec::for_lanes;
use crate::findings::FindingKind;
use crate::machine::Cluster;
use crate::machine::regs::Row;
use crate::program::Slot;

impl Cluster<'_> {
    /// Executes an instruction between lanes.
    pub fn between_lanes(&mut self, w: usize, pc: u32, op: Op, mask: u32, dst: &[Slot], src: &[Slot]) {
        match op {
            Op::ActiveMask => self.put(w, dst[0], mask, &[mask; 32]),
            Op::Shfl(mode) => {
                self.check_members(w, pc, mask, src[3]);
                let (value, by, clamp) = (self.row(w, src[0]), self.row(w, src[1]), self.row(w, src[2]));
                let (out, in_range) = self.shuffle(w, pc, mode, mask, &value, &by, &clamp);
                self.put(w, dst[0], mask, &out);
                if let Some(Slot::Pred(d)) = dst.get(1) {
                    self.warps[w].regs.set_pred(*d, mask, in_range);
                }
            }
            Op::Vote(mode) => {
                self.check_members(w, pc, mask, src[1]);
                let holds = self.warps[w].regs.pred[src[0].pred() as usize] & mask;
                let answer = match mode {
                    VoteMode::All => holds == mask,
                    VoteMode::Any => holds != 0,
                    VoteMode::Uni => holds == mask || holds == 0,
                };
                self.warps[w].regs.set_pred(dst[0].pred(), mask, if answer { u32::MAX } else { 0 });
            }
            Op::Ballot => {
                self.check_members(w, pc, mask, src[1]);
                let holds = self.warps[w].regs.pred[src[0].pred() as usize] & mask;
                self.put(w, dst[0], mask, &[holds; 32]);
            }
            Op::Match(mode) => {
                self.check_members(w, pc, mask, src[1]);
                let value = self.row(w, src[0]);
                let same = |l: usize| {
                    let mut lanes = 0;
                    for_lanes(mask, |other| lanes |= u32::from(value[other] == value[l]) << other);
                    lanes
                };
                let out: Row = match mode {
                    MatchMode::Any => std::array::from_fn(same),
                    MatchMode::All => {
                        let first = mask.trailing_zeros() as usize;
                        [if same(first) == mask { mask } else { 0 }; 32]
                    }
                };
                self.put(w, dst[0], mask, &out);
            }
            Op::Redux { op, ty } => {
                self.check_members(w, pc, mask, src[1]);
                let value = self.row(w, src[0]);
                let mut lanes = (0..32).filter(|l| mask >> l & 1 == 1).map(|l| value[l]);
                let Some(first) = lanes.next() else { return };
                let result = lanes.fold(first, |a, b| reduce(op, ty, a, b));
                self.put(w, dst[0], mask, &[result; 32]);
            }
            Op::Elect => {
                self.check_members(w, pc, mask, src[0]);
                let chosen = mask.trailing_zeros();
                self.put(w, dst[0], mask, &[chosen; 32]);
                self.warps[w].regs.set_pred(dst[1].pred(), mask, 1 << chosen);
            }
            _ => {}
        }
    }

    /// The lanes that execute must be the live lanes of the member mask.
    fn check_members(&mut self, w: usize, pc: u32, mask: u32, members: Slot) {
        let members = self.row(w, members);
        let first = mask.trailing_zeros() as usize;
        let named = members[first];
        let live = self.warps[w].live;
        if named & live == mask {
            return;
        }
        let absent = named & live & !mask;
        let message = if absent != 0 {
            format!(
                "the member mask {named:#010x} names lane {}, which does not execute it",
                absent.trailing_zeros()
            )
        } else {
            let extra = mask & !named;
            format!(
                "lane {} executes it, but the member mask {named:#010x} does not name it",
                extra.trailing_zeros()
            )
        };
        let lane = if absent != 0 { absent } else { mask & !named }.trailing_zeros();
        self.report_error(w, lane.min(31), pc, FindingKind::DivergentCollective, message);
    }

    fn shuffle(
        &mut self,
        w: usize,
        pc: u32,
        mode: ShflMode,
        mask: u32,
        value: &Row,
        by: &Row,
        clamp: &Row,
    ) -> (Row, u32) {
        // The usual case: all lanes, one operand, the whole warp as one segment.
        if mask == u32::MAX
            && mode == ShflMode::Bfly
            && by.iter().all(|&b| b == by[0])
            && clamp.iter().all(|&c| c == 31)
        {
            let across = (by[0] & 31) as usize;
            return (std::array::from_fn(|l| value[l ^ across]), u32::MAX);
        }
        let mut out = *value;
        let mut in_range = 0;
        let mut outside = None;
        for_lanes(mask, |l| {
            let lane = l as i32;
            let (b, c) = ((by[l] & 31) as i32, (clamp[l] & 31) as i32);
            let segment = (clamp[l] >> 8 & 31) as i32;
            let last = lane & segment | c & !segment;
            let (from, fits) = match mode {
                ShflMode::Up => (lane - b, lane - b >= last),
                ShflMode::Down => (lane + b, lane + b <= last),
                ShflMode::Bfly => (lane ^ b, lane ^ b <= last),
                ShflMode::Idx => {
                    let from = lane & segment | b & !segment;
                    (from, from <= last)
                }
            };
            let from = if fits { from } else { lane };
            in_range |= u32::from(fits) << l;
            if mask >> from & 1 == 0 {
                outside.get_or_insert((l, from));
            }
            out[l] = value[from as usize];
        });
        if let Some((lane, from)) = outside {
            let message = format!("lane {lane} reads from lane {from}, which does not execute it");
            self.report_error(w, lane as u32, pc, FindingKind::DivergentCollective, message);
        }
        (out, in_range)
    }

    /// `bar.warp.sync`.
    pub fn bar_warp_sync(&mut self, w: usize, pc: u32, mask: u32, src: &[Slot]) {
        self.check_members(w, pc, mask, src[0]);
        // A barrier of some lanes is taken to order all lanes, so that no correct kernel is reported.
        self.warps[w].clocks.sync_lanes();
    }
}

fn reduce(op: AtomOp, ty: AtomTy, a: u32, b: u32) -> u32 {
    let signed = ty == AtomTy::S32;
    match op {
        AtomOp::Add => a.wrapping_add(b),
        AtomOp::Min if signed => (a as i32).min(b as i32) as u32,
        AtomOp::Min => a.min(b),
        AtomOp::Max if signed => (a as i32).max(b as i32) as u32,
        AtomOp::Max => a.max(b),
        AtomOp::And => a & b,
        AtomOp::Or => a | b,
        AtomOp::Xor => a ^ b,
        AtomOp::Exch | AtomOp::Cas | AtomOp::Inc | AtomOp::Dec => a,
    }
}
