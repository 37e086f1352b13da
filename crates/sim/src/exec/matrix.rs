//! Matrix fragments and the tensor cores of a warp: `ldmatrix`, `stmatrix`, `mma.sync`.

use flashcore_ptx::{AccTy, MatrixTy, MmaShape};

use crate::config::Fp8Sums;
use crate::findings::FindingKind;
use crate::machine::Cluster;
use crate::machine::regs::Row;
use crate::memory::banks::{self, Wavefronts};
use crate::program::Slot;
use crate::races::clock::{Proxy, Stamp};
use crate::races::lanes::Lanes;
use crate::races::shared_shadow::{CELL, SharedAccess};
use crate::vectors::mma::{self, ATile, BTile};
use crate::vectors::short::{self, ShortSum};
use crate::vectors::{self, Level};

/// Multiplies sixteen rows by eight columns into four accumulator registers.
pub fn multiply(
    level: Level,
    short: Option<ShortSum>,
    depth: usize,
    a: &ATile,
    b: &BTile,
    acc: [&mut Row; 4],
) {
    match short {
        Some(short) => vectors::multiply_short(level, &short, a, b, acc),
        None => vectors::multiply(level, depth, a, b, acc),
    }
}

impl Cluster<'_> {
    /// Surveys the addresses of the rows of a matrix instruction, or of the cells of a copy.
    pub fn survey(&mut self, w: usize, slot: Slot) {
        let Slot::Shared(row, offset) = slot else {
            unreachable!("a shared address was decoded as {slot:?}");
        };
        let warp = &self.warps[w];
        let (base, end) = (&warp.regs.r32[row as usize], self.blocks[warp.block].shared.dense());
        vectors::survey(self.launch.level, base, offset as u32, warp.block as u32, end, &mut self.survey);
    }

    /// The rows of a matrix instruction that are possible; each is 16 bytes. Their addresses have been surveyed.
    fn touch_rows(&mut self, w: usize, pc: u32, count: usize, trans: bool, write: bool) -> u32 {
        let block = self.warps[w].block;
        let checks = self.launch.config.checks;
        if checks.costs {
            let mut wavefronts = Wavefronts { taken: 0, ideal: count as u32 };
            for (matrix, rows) in self.survey.addresses.as_chunks().0.iter().enumerate().take(count) {
                let free = self.survey.free_of_conflicts(matrix);
                wavefronts.taken += if free { 1 } else { banks::row_passes(rows) };
            }
            self.tally.counters[pc as usize].shared(wavefronts);
        }
        let mut ok = if count == 4 { u32::MAX } else { (1 << (8 * count)) - 1 };
        if self.survey.inside & ok != ok {
            let addresses = self.survey.addresses;
            ok = self.possible_shared(w, pc, block, &addresses, ok, 16);
        }
        if !checks.shared {
            return ok;
        }
        let (shared, clocks) = (&mut self.blocks[block].shared, &self.warps[w].clocks);
        // Row r of a matrix belongs to lanes 4r to 4r+3, four bytes each; transposed, to all.
        let lanes_of = |l: usize| if trans { Lanes::ALL } else { Lanes::run(4 * (l as u32 % 8), 4, 1) };
        // Most reads are of rows that hold a value and were written before a barrier; most writes come after everybody's
        // accesses.
        let done = if write {
            let Stamp { agent, clock, .. } = clocks.stamp(Lanes::ALL);
            let (addresses, by) = (&self.survey.addresses, (agent, clock));
            shared.write_after_all(addresses, ok, clocks, by, pc, |l| lanes_of(l as usize))
        } else {
            shared.read_rows(&self.survey, ok, clocks, trans, pc)
        };
        let left = ok & !done;
        if left == 0 {
            return ok;
        }
        let addresses = self.survey.addresses;
        let mut conflict = None;
        let mut uninitialised = None;
        let mut barrier = None;
        for l in (0..8 * count).filter(|l| left >> l & 1 == 1) {
            let lanes = lanes_of(l);
            let access =
                SharedAccess { clocks, proxy: Proxy::Generic, stamp: clocks.stamp(lanes), lanes, pc };
            let cell = addresses[l] / CELL;
            if shared.is_barrier(cell, 0xFFFF) {
                barrier.get_or_insert(l);
            }
            let found = if write {
                shared.initialise(cell, 0xFFFF);
                shared.shadow.write(cell, 0xFFFF, &access)
            } else {
                if !shared.initialised(cell, 0xFFFF) {
                    uninitialised.get_or_insert(l);
                }
                shared.shadow.read(cell, 0xFFFF, &access)
            };
            if let Some(found) = found {
                conflict.get_or_insert((l, found));
            }
        }
        if let Some((l, found)) = conflict {
            self.report_conflict(w, l as u32, pc, block, write, found);
        }
        for (fault, kind, what) in [
            (
                uninitialised,
                FindingKind::UninitialisedShared,
                "a row of shared memory that nothing was written to",
            ),
            (barrier, FindingKind::MbarrierMisuse, "an ordinary access to an mbarrier in use"),
        ] {
            if let Some(l) = fault {
                let address = addresses[l];
                self.report(w, l as u32, pc, kind, crate::findings::Severity::Error, |c| {
                    (what.to_string(), Some(c.shared_place(block, address)))
                });
            }
        }
        ok
    }

    /// `ldmatrix`.
    pub fn ldmatrix(
        &mut self,
        w: usize,
        pc: u32,
        mask: u32,
        count: usize,
        trans: bool,
        dst: &[Slot],
        src: &[Slot],
    ) {
        self.survey(w, src[0]);
        let ok = self.touch_rows(w, pc, count, trans, false);
        if mask == u32::MAX && ok.count_ones() as usize == 8 * count {
            let mut to = [0; 4];
            let wanted = dst.iter().take(count).zip(&mut to).all(|(slot, to)| match slot {
                Slot::Word(row) => {
                    *to = *row;
                    true
                }
                _ => false,
            });
            if wanted {
                let shared = &self.blocks[self.warps[w].block].shared;
                let (regs, to) = (&mut self.warps[w].regs, &to[..count]);
                let (level, addresses) = (self.launch.level, &self.survey.addresses);
                vectors::load_matrices(level, shared.bytes(), addresses, trans, to, &mut regs.r32);
                for &row in to {
                    regs.init32[row as usize] = mask;
                }
                return;
            }
        }
        let addresses = self.survey.addresses;
        for (i, &slot) in dst.iter().enumerate().take(count) {
            let shared = &self.blocks[self.warps[w].block].shared;
            let mut matrix = [crate::memory::global::POISON as u32; 32];
            for (row, words) in matrix.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let l = 8 * i + row;
                if ok >> l & 1 == 1 {
                    *words = shared.words(addresses[l]);
                }
            }
            let matrix = if trans { mma::transposed(&matrix) } else { matrix };
            self.put(w, slot, mask, &matrix);
        }
    }

    /// `stmatrix`.
    pub fn stmatrix(&mut self, w: usize, pc: u32, mask: u32, count: usize, trans: bool, src: &[Slot]) {
        if mask == 0 {
            return;
        }
        self.survey(w, src[0]);
        let ok = self.touch_rows(w, pc, count, trans, true);
        let addresses = self.survey.addresses;
        for (i, &slot) in src[1..=count].iter().enumerate() {
            let matrix = self.row(w, slot);
            let matrix = if trans { mma::transposed(&matrix) } else { matrix };
            let shared = &mut self.blocks[self.warps[w].block].shared;
            for (row, words) in matrix.as_chunks::<4>().0.iter().enumerate() {
                let l = 8 * i + row;
                if ok >> l & 1 == 1 {
                    let [a, b, c, d] = words.map(u64::from);
                    shared.store_cell(addresses[l], [b << 32 | a, d << 32 | c]);
                }
            }
        }
    }

    /// How products of these types are added up, if not in f32; so many k at once.
    pub fn short_sum(&self, a: MatrixTy, b: MatrixTy, acc: AccTy, block: usize) -> Option<ShortSum> {
        match self.launch.config.fp8_sums {
            Fp8Sums::Short { bits } if a.bits() == 8 => Some(ShortSum::new(bits, block, a, b, acc)),
            _ => None,
        }
    }

    /// `mma.sync`.
    pub fn mma(
        &mut self,
        w: usize,
        shape: MmaShape,
        a_ty: MatrixTy,
        b_ty: MatrixTy,
        acc_ty: AccTy,
        dst: &[Slot],
        src: &[Slot],
    ) {
        let level = self.launch.level;
        let short = self.short_sum(a_ty, b_ty, acc_ty, short::MMA_BLOCK);
        let (a_regs, b_regs, depth) = match shape {
            MmaShape::M16n8k8 => (2, 1, 8),
            MmaShape::M16n8k16 => (4, 2, 16),
            MmaShape::M16n8k32 => (4, 2, 32),
        };
        let regs = &self.warps[w].regs;
        let row = |i: usize| -> &Row { &regs.r32[src[i].word() as usize] };
        let a: [&Row; 4] = std::array::from_fn(|i| row(i.min(a_regs - 1)));
        let b: [&Row; 2] = std::array::from_fn(|i| row(a_regs + i.min(b_regs - 1)));
        let c = a_regs + b_regs;
        let tiles = &mut *self.tiles;
        vectors::widen_both(level, a_ty, &a[..a_regs], b_ty, &b[..b_regs], tiles);
        let c: [usize; 4] = std::array::from_fn(|i| src[(c + i).min(src.len() - 1)].word() as usize);
        let regs = &mut self.warps[w].regs;
        match acc_ty {
            AccTy::F32 => {
                let in_place = dst.iter().zip(c).all(|(slot, row)| *slot == Slot::Word(row as u32));
                if in_place && let Ok(acc) = regs.r32.get_disjoint_mut(c) {
                    let acc = acc.map(|row| &mut **row);
                    multiply(level, short, depth, &tiles.a[0].tile, &tiles.b[0], acc);
                    for row in c {
                        regs.init32[row] = u32::MAX;
                    }
                    return;
                }
                let mut acc = c.map(|row| *regs.r32[row]);
                multiply(level, short, depth, &tiles.a[0].tile, &tiles.b[0], acc.each_mut());
                for (slot, value) in dst.iter().zip(&acc) {
                    self.put(w, *slot, u32::MAX, value);
                }
            }
            AccTy::F16 => {
                let mut acc = mma::unpack_f16([&regs.r32[c[0]], &regs.r32[c[1]]]);
                multiply(level, short, depth, &tiles.a[0].tile, &tiles.b[0], acc.each_mut());
                for (slot, value) in dst.iter().zip(&mma::pack_f16(&acc)) {
                    self.put(w, *slot, u32::MAX, value);
                }
            }
        }
    }
}
