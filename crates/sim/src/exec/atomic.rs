//! `atom` and `red`, and the new value of an atomic.

use flashcore_ptx::{AtomOp, AtomSem, AtomTy, Scope, Space};

use crate::exec::for_lanes;
use crate::exec::touch::Touch;
use crate::machine::Cluster;
use crate::machine::regs::Row64;
use crate::memory::global::POISON;
use crate::numerics as num;
use crate::program::Slot;

impl Cluster<'_> {
    /// `atom` and `red`.
    pub fn atomic(
        &mut self,
        w: usize,
        pc: u32,
        mask: u32,
        space: Space,
        op: AtomOp,
        ty: AtomTy,
        count: u32,
        sem: AtomSem,
        scope: Scope,
        dst: &[Slot],
        src: &[Slot],
    ) {
        let size = atom_bytes(ty);
        let operand = |c: &Self, slot: Slot| -> Row64 {
            match slot {
                Slot::Long(_) => c.row64(w, slot),
                slot => c.row(w, slot).map(u64::from),
            }
        };
        let (compare, first) = if op == AtomOp::Cas { (operand(self, src[1]), 2) } else { ([0; 32], 1) };
        let operands: Vec<Row64> =
            src[first..first + count as usize].iter().map(|&slot| operand(self, slot)).collect();
        let mut old = [POISON; 32];
        let order = match sem {
            AtomSem::Relaxed => (false, false),
            AtomSem::Acquire => (true, false),
            AtomSem::Release => (false, true),
            AtomSem::AcqRel => (true, true),
        };
        // A reduction returns nothing, so nobody learns from it.
        let observes = !dst.is_empty();
        match space {
            Space::Param => self.unsupported(pc, "parameters cannot be written"),
            Space::Global => {
                let addresses = self.global_addresses(w, src[0]);
                self.publish_global(w, mask, order.1, scope, &addresses);
                let ok = self.touch_global(w, pc, &addresses, mask, size * count, Touch::Atomic);
                let memory = self.launch.memory;
                for_lanes(ok, |l| {
                    if let Some((region, offset)) = memory.find(addresses[l], u64::from(size * count)) {
                        for (e, row) in operands.iter().enumerate() {
                            let at = offset + e * size as usize;
                            let change = |v| apply(op, ty, v, row[l], compare[l], true);
                            let before = region.update(at, size, change);
                            region.note_written(at, size);
                            old[l] = before;
                        }
                    }
                });
                if observes {
                    self.observe_global(w, mask, order.0, scope, &addresses);
                }
            }
            Space::Shared | Space::SharedCluster => {
                self.by_block(w, space, src[0], mask, |c, block, addresses, lanes| {
                    c.publish_shared(w, block, lanes, order.1, addresses);
                    let ok = c.touch_shared(w, pc, block, addresses, lanes, size * count, Touch::Atomic);
                    let shared = &mut c.blocks[block].shared;
                    for_lanes(ok, |l| {
                        for (e, row) in operands.iter().enumerate() {
                            let at = addresses[l] + e as u32 * size;
                            old[l] = shared.load(at, size);
                            shared.store(at, size, apply(op, ty, old[l], row[l], compare[l], false));
                        }
                    });
                    if observes {
                        c.observe_shared(w, block, lanes, order.0, addresses);
                    }
                });
            }
        }
        match dst.first() {
            None | Some(Slot::Sink) => {}
            Some(Slot::Long(d)) => self.warps[w].regs.set64(*d, mask, &old),
            Some(slot) => self.put(w, *slot, mask, &old.map(|v| v as u32)),
        }
    }
}

/// The bytes of an atomic's element.
pub const fn atom_bytes(ty: AtomTy) -> u32 {
    match ty {
        AtomTy::F16 | AtomTy::Bf16 => 2,
        AtomTy::B64 | AtomTy::U64 | AtomTy::S64 => 8,
        _ => 4,
    }
}

/// The new value of an atomic. f32 sums in global memory flush subnormals.
pub fn apply(op: AtomOp, ty: AtomTy, old: u64, operand: u64, compare: u64, flush: bool) -> u64 {
    let (a, b) = (old as u32, operand as u32);
    match ty {
        AtomTy::F32 => {
            let (x, y) = (f32::from_bits(a), f32::from_bits(b));
            u64::from(match op {
                AtomOp::Exch => b,
                AtomOp::Min => num::canonical(num::min(x, y)),
                AtomOp::Max => num::canonical(num::max(x, y)),
                _ if flush => num::canonical(num::flush(num::flush(x) + num::flush(y))),
                _ => num::canonical(x + y),
            })
        }
        AtomTy::F16 | AtomTy::Bf16 | AtomTy::F16x2 | AtomTy::Bf16x2 => {
            let one = |x: u16, y: u16| -> u16 {
                let half = matches!(ty, AtomTy::F16 | AtomTy::F16x2);
                let widen = |v: u16| if half { num::f16_to_f32(v) } else { num::bf16_to_f32(v) };
                let (x, y) = (widen(x), widen(y));
                let new = match op {
                    AtomOp::Min => num::min(x, y),
                    AtomOp::Max => num::max(x, y),
                    _ => x + y,
                };
                if half { num::f32_to_f16(new) } else { num::f32_to_bf16(new) }
            };
            let lo = one(a as u16, b as u16);
            if matches!(ty, AtomTy::F16 | AtomTy::Bf16) {
                u64::from(lo)
            } else {
                u64::from(one((a >> 16) as u16, (b >> 16) as u16)) << 16 | u64::from(lo)
            }
        }
        AtomTy::B64 | AtomTy::U64 | AtomTy::S64 => match op {
            AtomOp::Add => old.wrapping_add(operand),
            AtomOp::Min if ty == AtomTy::S64 => (old as i64).min(operand as i64) as u64,
            AtomOp::Min => old.min(operand),
            AtomOp::Max if ty == AtomTy::S64 => (old as i64).max(operand as i64) as u64,
            AtomOp::Max => old.max(operand),
            AtomOp::And => old & operand,
            AtomOp::Or => old | operand,
            AtomOp::Xor => old ^ operand,
            AtomOp::Exch => operand,
            AtomOp::Cas if old == compare => operand,
            AtomOp::Cas => old,
            AtomOp::Inc => {
                if old >= operand {
                    0
                } else {
                    old + 1
                }
            }
            AtomOp::Dec => {
                if old == 0 || old > operand {
                    operand
                } else {
                    old - 1
                }
            }
        },
        AtomTy::B32 | AtomTy::U32 | AtomTy::S32 => u64::from(match op {
            AtomOp::Add => a.wrapping_add(b),
            AtomOp::Min if ty == AtomTy::S32 => (a as i32).min(b as i32) as u32,
            AtomOp::Min => a.min(b),
            AtomOp::Max if ty == AtomTy::S32 => (a as i32).max(b as i32) as u32,
            AtomOp::Max => a.max(b),
            AtomOp::And => a & b,
            AtomOp::Or => a | b,
            AtomOp::Xor => a ^ b,
            AtomOp::Exch => b,
            AtomOp::Cas if a == compare as u32 => b,
            AtomOp::Cas => a,
            AtomOp::Inc => {
                if a >= b {
                    0
                } else {
                    a + 1
                }
            }
            AtomOp::Dec => {
                if a == 0 || a > b {
                    b
                } else {
                    a - 1
                }
            }
        }),
    }
}
