//! `ld` and `st`.

use flashcore_ptx::{MemTy, Order, Space};

use crate::exec::for_lanes;
use crate::exec::touch::Touch;
use crate::findings::FindingKind;
use crate::machine::regs::{Row, Row64};
use crate::machine::{Cluster, Outcome};
use crate::memory::global::{POISON, Written};
use crate::program::Slot;
use crate::races::global_shadow::LINE;
use crate::vectors;

impl Cluster<'_> {
    /// `ld`.
    pub fn load(
        &mut self,
        w: usize,
        pc: u32,
        mask: u32,
        space: Space,
        ty: MemTy,
        count: u32,
        order: Order,
        dst: &[Slot],
        src: &[Slot],
    ) -> Outcome {
        let size = ty.bytes();
        // The usual loads, of one word or half word per lane, go straight into a row.
        if count == 1
            && order == Order::Weak
            && space == Space::Global
            && matches!(ty, MemTy::B16 | MemTy::B32 | MemTy::F32)
        {
            let addresses = self.global_addresses(w, src[0]);
            let ok = self.touch_global(w, pc, &addresses, mask, size, Touch::Read);
            let row = self.gather(&addresses, ok, size);
            self.put(w, dst[0], mask, &row);
            return Outcome::Next;
        }
        let mut values = [[POISON; 32]; 4];
        match space {
            Space::Param => self.load_params(w, pc, src[0], size, count, &mut values),
            Space::Global => {
                let addresses = self.global_addresses(w, src[0]);
                let ok = self.touch_global(w, pc, &addresses, mask, size * count, Touch::Read);
                let memory = self.launch.memory;
                for_lanes(ok, |l| {
                    if let Some((region, offset)) = memory.find(addresses[l], u64::from(size * count)) {
                        for e in 0..count as usize {
                            values[e][l] = region.load(offset + e * size as usize, size);
                        }
                    }
                });
                self.acquire_global(w, mask, order, &addresses);
            }
            Space::Shared | Space::SharedCluster => {
                self.by_block(w, space, src[0], mask, |c, block, addresses, lanes| {
                    let ok = c.touch_shared(w, pc, block, addresses, lanes, size * count, Touch::Read);
                    let shared = &c.blocks[block].shared;
                    match (size, count) {
                        (4, 1) => for_lanes(ok, |l| values[0][l] = u64::from(shared.word(addresses[l]))),
                        (4, 4) => for_lanes(ok, |l| {
                            let words = shared.words(addresses[l]);
                            for e in 0..4 {
                                values[e][l] = u64::from(words[e]);
                            }
                        }),
                        _ => for_lanes(ok, |l| {
                            for e in 0..count {
                                values[e as usize][l] = shared.load(addresses[l] + e * size, size);
                            }
                        }),
                    }
                    c.acquire_shared(w, block, lanes, order, addresses);
                });
            }
        }
        for (slot, row) in dst.iter().zip(&values) {
            match slot {
                Slot::Sink => {}
                Slot::Long(d) => self.warps[w].regs.set64(*d, mask, row),
                slot => {
                    let narrow: Row = match ty {
                        MemTy::S8 => row.map(|v| i32::from(v as u8 as i8) as u32),
                        _ => row.map(|v| v as u32 & (u64::MAX >> (64 - 8 * size)) as u32),
                    };
                    self.put(w, *slot, mask, &narrow);
                }
            }
        }
        // A strong load usually polls for another warp's store: let the other warps run.
        if order == Order::Weak { Outcome::Next } else { Outcome::Yield }
    }

    /// One value of 2 or 4 bytes for each lane of the mask.
    fn gather(&self, addresses: &Row64, mask: u32, size: u32) -> Row {
        let mut row = [POISON as u32 & (u64::MAX >> (64 - 8 * size)) as u32; 32];
        let memory = self.launch.memory;
        let Some(first) = addresses.get(mask.trailing_zeros() as usize) else { return row };
        let Some(region) = memory.near(*first) else { return row };
        for_lanes(mask, |l| {
            // Lanes usually read one allocation. Earlier checks made sure that each address lies in one.
            let offset = addresses[l].wrapping_sub(region.base);
            if offset < region.len as u64 {
                row[l] = region.load(offset as usize, size) as u32;
            } else if let Some((other, offset)) = memory.find(addresses[l], u64::from(size)) {
                row[l] = other.load(offset, size) as u32;
            }
        });
        row
    }

    fn load_params(
        &mut self,
        w: usize,
        pc: u32,
        src: Slot,
        size: u32,
        count: u32,
        values: &mut [[u64; 32]; 4],
    ) {
        let Slot::Param(offset) = src else {
            self.unsupported(pc, "parameters are read by name");
            return;
        };
        let start = offset as usize;
        let Some(bytes) = self.launch.params.get(start..start + (size * count) as usize) else {
            let message = format!("parameter bytes {start}.. of {}", self.launch.params.len());
            self.report_error(w, 0, pc, FindingKind::OutOfBounds, message);
            return;
        };
        for (e, chunk) in bytes.chunks_exact(size as usize).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            values[e] = [u64::from_le_bytes(word); 32];
        }
    }

    /// Splits lanes by the block that their address belongs to; usually all are of one.
    pub fn by_block(
        &mut self,
        w: usize,
        space: Space,
        operand: Slot,
        mask: u32,
        mut f: impl FnMut(&mut Self, usize, &Row, u32),
    ) {
        let own = self.warps[w].block;
        if space == Space::Shared {
            let addresses = self.shared_addresses(w, operand);
            return f(self, own, &addresses, mask);
        }
        let raw = self.ranked_addresses(w, operand);
        let mut left = mask;
        while left != 0 {
            let (block, _) = self.cluster_address(w, raw[left.trailing_zeros() as usize]);
            let mut lanes = 0;
            let mut addresses = [0; 32];
            for_lanes(left, |l| {
                let (b, address) = self.cluster_address(w, raw[l]);
                if b == block {
                    lanes |= 1 << l;
                    addresses[l] = address;
                }
            });
            left &= !lanes;
            self.check_block_alive(w, self.warps[w].pc, lanes.trailing_zeros(), block);
            f(self, block, &addresses, lanes);
        }
    }

    /// `st`.
    pub fn store(
        &mut self,
        w: usize,
        pc: u32,
        mask: u32,
        space: Space,
        ty: MemTy,
        count: u32,
        order: Order,
        src: &[Slot],
    ) {
        let size = ty.bytes();
        let mut values = [[0u64; 32]; 4];
        for (slot, row) in src[1..=count as usize].iter().zip(&mut values) {
            *row = match slot {
                Slot::Long(_) => self.row64(w, *slot),
                slot => self.row(w, *slot).map(u64::from),
            };
        }
        match space {
            Space::Param => self.unsupported(pc, "parameters cannot be written"),
            Space::Global => {
                let addresses = self.global_addresses(w, src[0]);
                self.release_global(w, mask, order, &addresses);
                let distinct = without_repeats(&addresses, &values[..count as usize], mask);
                let touched = self.touch_global(w, pc, &addresses, distinct, size * count, Touch::Write);
                let memory = self.launch.memory;
                let mut left = touched | mask & !distinct;
                if size == 4 && count == 4 {
                    left = self.store_lines(&addresses, &values, left);
                }
                let mut written = Written::default();
                for_lanes(left, |l| {
                    let Some((region, offset)) = memory.find(addresses[l], u64::from(size * count)) else {
                        return;
                    };
                    written.add(region, offset, size * count);
                    if size == 4 && offset.is_multiple_of(8) && count.is_multiple_of(2) {
                        // Two words at once are a single store on the host, too.
                        for e in (0..count as usize).step_by(2) {
                            region.put(offset + e * 4, 8, values[e + 1][l] << 32 | values[e][l]);
                        }
                        return;
                    }
                    for e in 0..count as usize {
                        region.put(offset + e * size as usize, size, values[e][l]);
                    }
                });
                written.note();
            }
            Space::Shared | Space::SharedCluster => {
                self.by_block(w, space, src[0], mask, |c, block, addresses, lanes| {
                    c.release_shared(w, block, lanes, order, addresses);
                    let distinct = without_repeats(addresses, &values[..count as usize], lanes);
                    let ok = c.touch_shared(w, pc, block, addresses, distinct, size * count, Touch::Write);
                    let shared = &mut c.blocks[block].shared;
                    for_lanes(ok, |l| {
                        for e in 0..count {
                            match size {
                                4 => shared.store_word(addresses[l] + 4 * e, values[e as usize][l] as u32),
                                _ => shared.store(addresses[l] + e * size, size, values[e as usize][l]),
                            }
                        }
                    });
                });
            }
        }
    }

    /// Stores the lines that eight lanes have, one cell after the other. Returns the other lanes.
    fn store_lines(&self, addresses: &Row64, values: &[Row64; 4], mask: u32) -> u32 {
        let lines = vectors::whole_lines(self.launch.level, addresses);
        let mut left = mask;
        for eight in 0..4 {
            let (first, lanes) = (8 * eight, 0xFF << (8 * eight));
            if left & lines & lanes == lanes
                && let Some((region, offset)) = self.launch.memory.find(addresses[first], LINE as u64)
            {
                let mut line = [0; LINE / 8];
                for (i, words) in line.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    let value = |e: usize| values[e][first + i];
                    *words = [value(1) << 32 | value(0), value(3) << 32 | value(2)];
                }
                region.store_line(offset, &line);
                left &= !lanes;
            }
        }
        left
    }
}

/// The lanes without those that write the same values to the same address as an earlier lane does.
fn without_repeats<A: Copy + PartialEq + Into<u64>>(addresses: &[A; 32], values: &[Row64], mask: u32) -> u32 {
    // Addresses that fall into different places of a small table are different.
    let mut table = [0u64; 32];
    let mut apart = true;
    for_lanes(mask, |l| {
        let address: u64 = addresses[l].into();
        let place = ((address / 2) ^ (address >> 12)) as usize % 2048;
        let bit = 1 << (place % 64);
        apart &= table[place / 64] & bit == 0;
        table[place / 64] |= bit;
    });
    if apart {
        return mask;
    }
    let mut distinct = mask;
    for_lanes(mask, |l| {
        let repeats = |earlier: usize| {
            distinct >> earlier & 1 == 1
                && addresses[earlier] == addresses[l]
                && values.iter().all(|row| row[earlier] == row[l])
        };
        if (0..l).any(repeats) {
            distinct &= !(1 << l);
        }
    });
    distinct
}
