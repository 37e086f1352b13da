//! Executes one instruction of a warp that is not plain: dispatch, moves, control.

mod atomic;
pub mod bulk;
pub mod cluster;
mod copy;
mod grid;
mod lanes;
mod load_store;
mod matrix;
mod order;
pub mod sync;
mod touch;
pub mod wgmma;

use flashcore_ptx::{GridDep, MembarLevel, Op, Space, Special};

use crate::exec::order::is_wide;
use crate::findings::FindingKind;
use crate::machine::regs::{Row, Row64};
use crate::machine::{Cluster, Outcome, PARAM_BASE, RANK_SHIFT, SHARED_BASE};
use crate::program::{Code, Slot};

/// Calls `f` for each lane of a mask, lowest first.
#[inline(always)]
pub fn for_lanes(mut mask: u32, mut f: impl FnMut(usize)) {
    while mask != 0 {
        f(mask.trailing_zeros() as usize);
        mask &= mask - 1;
    }
}

impl Cluster<'_> {
    /// Executes the instruction in the lanes of the mask.
    pub fn execute(&mut self, w: usize, pc: u32, code: &Code, mask: u32) -> Outcome {
        let program = self.launch.program;
        let (dst, src) = (program.dst(code), program.src(code));
        match code.op {
            Op::Exit | Op::Ret => {
                self.warps[w].pc = pc + 1;
                self.end_lanes(w, mask);
                return Outcome::Jumped;
            }
            Op::Trap => {
                if mask != 0 {
                    let message = "the kernel executed trap".to_string();
                    self.report_error(w, mask.trailing_zeros(), pc, FindingKind::Trap, message);
                    self.warps[w].pc = pc + 1;
                    self.end_lanes(w, u32::MAX);
                    return Outcome::Jumped;
                }
            }
            // Instructions that all lanes execute together handle an empty mask themselves.
            Op::BarSync { .. }
            | Op::BarArrive { .. }
            | Op::BarWarpSync
            | Op::Ldmatrix { .. }
            | Op::Stmatrix { .. }
            | Op::Mma { .. }
            | Op::Wgmma(_)
            | Op::WgmmaFence
            | Op::WgmmaCommit
            | Op::WgmmaWait(_)
            | Op::SetMaxNReg { .. }
            | Op::ClusterArrive { .. }
            | Op::ClusterWait { .. } => return self.execute_together(w, pc, code, mask, dst, src),
            _ if mask == 0 => return Outcome::Next,
            Op::MovSpecial(special) => self.special(w, special, dst[0], mask),
            Op::PackB64 => {
                let (lo, hi) = (self.row(w, src[0]), self.row(w, src[1]));
                let out = std::array::from_fn(|l| u64::from(hi[l]) << 32 | u64::from(lo[l]));
                self.warps[w].regs.set64(dst[0].long(), mask, &out);
            }
            Op::UnpackB64 => {
                let x = self.row64(w, src[0]);
                self.put(w, dst[0], mask, &x.map(|v| v as u32));
                self.put(w, dst[1], mask, &x.map(|v| (v >> 32) as u32));
            }
            Op::PackB32 => {
                let (lo, hi) = (self.row(w, src[0]), self.row(w, src[1]));
                self.put(w, dst[0], mask, &std::array::from_fn(|l| hi[l] << 16 | lo[l] & 0xFFFF));
            }
            Op::UnpackB32 => {
                let x = self.row(w, src[0]);
                self.put(w, dst[0], mask, &x.map(|v| v & 0xFFFF));
                self.put(w, dst[1], mask, &x.map(|v| v >> 16));
            }
            Op::AddrOf => match src[0] {
                Slot::Shared(..) => {
                    let address = self.ranked_addresses(w, src[0]);
                    self.put(w, dst[0], mask, &address);
                }
                Slot::Param(offset) => {
                    self.warps[w].regs.set64(dst[0].long(), mask, &[u64::from(offset); 32]);
                }
                _ => self.unsupported(pc, "its source is neither shared memory nor a parameter"),
            },
            Op::Cvta { space, to_space } => {
                let base = match space {
                    Space::Global => 0,
                    Space::Param => PARAM_BASE,
                    Space::Shared | Space::SharedCluster => SHARED_BASE,
                };
                let x = self.row64(w, src[0]);
                let out = x.map(|v| if to_space { v.wrapping_sub(base) } else { v.wrapping_add(base) });
                self.warps[w].regs.set64(dst[0].long(), mask, &out);
            }
            // A policy only steers caches.
            Op::CreatePolicy(_) => self.warps[w].regs.set64(dst[0].long(), mask, &[0; 32]),
            Op::Ld { space, ty, width, order, cache } => {
                if cache.non_coherent && self.launch.config.checks.global {
                    self.check_read_only(w, pc, mask, ty.bytes() * width.count(), src[0]);
                }
                return self.load(w, pc, mask, space, ty, width.count(), order, dst, src);
            }
            Op::St { space, ty, width, order, .. } => {
                self.store(w, pc, mask, space, ty, width.count(), order, src);
            }
            Op::Atom { space, op, ty, sem, scope } => {
                self.atomic(w, pc, mask, space, op, ty, 1, sem, scope, dst, src);
                return Outcome::Yield;
            }
            Op::Red { space, op, ty, width, sem, scope } => {
                self.atomic(w, pc, mask, space, op, ty, width.count(), sem, scope, dst, src);
            }
            Op::Prefetch(_) | Op::BulkPrefetch { .. } | Op::TensorPrefetch { .. } | Op::PrefetchTensormap => {
            }
            Op::GridDepControl(GridDep::LaunchDependents) => self.launch_dependents(w, mask),
            Op::GridDepControl(GridDep::Wait) => self.grid_wait(w, mask),
            Op::Nanosleep => return Outcome::Yield,
            Op::Shfl(_)
            | Op::Vote(_)
            | Op::Ballot
            | Op::Match(_)
            | Op::Redux { .. }
            | Op::Elect
            | Op::ActiveMask => self.between_lanes(w, pc, code.op, mask, dst, src),
            Op::Membar(level) => self.fence(w, mask, level != MembarLevel::Cta),
            Op::Fence { scope, .. } => self.fence(w, mask, is_wide(scope)),
            Op::FenceProxyAsync(_) => {
                let warp = &mut self.warps[w];
                warp.clocks.fence_proxy(mask, warp.live);
            }
            Op::FenceMbarrierInit => self.fence_mbarrier_init(w),
            Op::CpAsync { bytes, src_size, .. } => {
                self.copy_async(w, pc, mask, bytes.count(), src_size, src);
            }
            Op::CpAsyncCommit => self.warps[w].copies.commit(mask),
            Op::CpAsyncWait(pending) => self.copy_wait(w, mask, Some(u32::from(pending))),
            Op::CpAsyncWaitAll => self.copy_wait(w, mask, None),
            Op::CpAsyncMbarrierArrive { noinc } => self.copy_mbarrier_arrive(w, pc, mask, noinc, src),
            Op::MbarrierInit
            | Op::MbarrierInval
            | Op::MbarrierArrive { .. }
            | Op::MbarrierArriveExpectTx { .. }
            | Op::MbarrierExpectTx { .. }
            | Op::MbarrierTestWait { .. }
            | Op::MbarrierTryWait { .. } => return self.mbarrier(w, pc, code.op, mask, dst, src),
            Op::BulkLoad { .. }
            | Op::BulkStore { .. }
            | Op::BulkToCluster
            | Op::BulkReduce { .. }
            | Op::BulkReduceCluster { .. }
            | Op::TensorLoad { .. }
            | Op::TensorStore { .. }
            | Op::TensorReduce { .. }
            | Op::BulkCommit
            | Op::BulkWait { .. } => self.bulk(w, pc, code.op, mask, src),
            Op::Mapa => {
                let (address, rank) = (self.row(w, src[0]), self.row(w, src[1]));
                let blocks = self.blocks.len() as u32;
                if let Some(lane) = (0..32).find(|&l| mask >> l & 1 == 1 && rank[l] >= blocks) {
                    let message = format!("rank {} of a cluster of {blocks} blocks", rank[lane]);
                    self.report_error(w, lane as u32, pc, FindingKind::ClusterMisuse, message);
                }
                let low = (1 << RANK_SHIFT) - 1;
                let out = std::array::from_fn(|l| (address[l] & low) | rank[l] << RANK_SHIFT);
                self.put(w, dst[0], mask, &out);
            }
            Op::GetCtaRank => {
                let out = self.row(w, src[0]).map(|a| a >> RANK_SHIFT);
                self.put(w, dst[0], mask, &out);
            }
            Op::StAsync { ty, width } => self.store_async(w, pc, mask, ty.bytes(), width.count(), src),
            // Executed before they come here.
            Op::Alu(_) | Op::Setp { .. } | Op::Label(_) | Op::Bra { .. } => {}
        }
        Outcome::Next
    }

    /// Executes an instruction that all live lanes of the warp must execute together.
    fn execute_together(
        &mut self,
        w: usize,
        pc: u32,
        code: &Code,
        mask: u32,
        dst: &[Slot],
        src: &[Slot],
    ) -> Outcome {
        let aligned = match code.op {
            Op::BarSync { aligned }
            | Op::BarArrive { aligned }
            | Op::ClusterArrive { aligned, .. }
            | Op::ClusterWait { aligned } => aligned,
            Op::BarWarpSync => false,
            _ => true,
        };
        if mask == 0 {
            return Outcome::Next;
        }
        let live = self.warps[w].live;
        if mask != live && !matches!(code.op, Op::BarWarpSync) {
            let missing = live & !mask;
            let message = format!(
                "{} of the warp's {} live lanes execute it, lane {} does not{}",
                mask.count_ones(),
                live.count_ones(),
                missing.trailing_zeros(),
                if aligned { "; it is .aligned" } else { "; it is simulated for whole warps only" }
            );
            self.report_error(w, missing.trailing_zeros(), pc, FindingKind::DivergentCollective, message);
        }
        match code.op {
            Op::BarSync { .. } => self.bar(w, pc, mask, true, src),
            Op::BarArrive { .. } => self.bar(w, pc, mask, false, src),
            Op::BarWarpSync => {
                self.bar_warp_sync(w, pc, mask, src);
                Outcome::Next
            }
            Op::Ldmatrix { count, trans } => {
                self.ldmatrix(w, pc, mask, count.count() as usize, trans, dst, src);
                Outcome::Next
            }
            Op::Stmatrix { count, trans } => {
                self.stmatrix(w, pc, mask, count.count() as usize, trans, src);
                Outcome::Next
            }
            Op::Mma { shape, a, b, acc } => {
                self.mma(w, shape, a, b, acc, dst, src);
                Outcome::Next
            }
            Op::ClusterArrive { sem, .. } => self.cluster_arrive(w, pc, mask, sem),
            Op::ClusterWait { .. } => self.cluster_wait(w, pc, mask),
            Op::SetMaxNReg { inc, count } => self.set_max_registers(w, pc, inc, u32::from(count)),
            _ => self.warpgroup(w, pc, code, mask, dst, src),
        }
    }

    /// The value of a word operand.
    #[inline]
    pub fn row(&self, w: usize, slot: Slot) -> Row {
        *self.warps[w].regs.r32[slot.word() as usize]
    }

    /// The value of a long operand.
    #[inline]
    pub fn row64(&self, w: usize, slot: Slot) -> Row64 {
        *self.warps[w].regs.r64[slot.long() as usize]
    }

    /// Writes a word operand, unless the result is discarded.
    #[inline]
    pub fn put(&mut self, w: usize, slot: Slot, mask: u32, value: &Row) {
        match slot {
            Slot::Sink => {}
            slot => self.warps[w].regs.set32(slot.word(), mask, value),
        }
    }

    /// The addresses of a memory operand in the block's own shared memory, without the rank.
    ///
    /// An address in the memory of another block stays as it is, beyond all allocations.
    #[inline]
    pub fn shared_addresses(&self, w: usize, slot: Slot) -> Row {
        let mut addresses = self.ranked_addresses(w, slot);
        if self.blocks.len() > 1 {
            let own = self.warps[w].block as u32;
            for address in &mut addresses {
                *address -= if *address >> RANK_SHIFT == own { own << RANK_SHIFT } else { 0 };
            }
        }
        addresses
    }

    /// The addresses of a memory operand in the shared memory of the cluster.
    #[inline]
    pub fn ranked_addresses(&self, w: usize, slot: Slot) -> Row {
        match slot {
            Slot::Shared(row, offset) => {
                let mut addresses = *self.warps[w].regs.r32[row as usize];
                for address in &mut addresses {
                    *address = address.wrapping_add_signed(offset);
                }
                addresses
            }
            other => unreachable!("a shared address was decoded as {other:?}"),
        }
    }

    /// The global addresses of a memory operand.
    #[inline]
    pub fn global_addresses(&self, w: usize, slot: Slot) -> Row64 {
        match slot {
            Slot::Global(row, offset) => {
                let mut addresses = *self.warps[w].regs.r64[row as usize];
                for address in &mut addresses {
                    *address = address.wrapping_add_signed(i64::from(offset));
                }
                addresses
            }
            other => unreachable!("a global address was decoded as {other:?}"),
        }
    }

    /// The block and the address in it of an address in the shared memory of the cluster.
    pub fn cluster_address(&self, w: usize, address: u32) -> (usize, u32) {
        let rank = (address >> RANK_SHIFT) as usize;
        if rank < self.blocks.len() {
            (rank, address & ((1 << RANK_SHIFT) - 1))
        } else {
            (self.warps[w].block, address)
        }
    }

    fn special(&mut self, w: usize, special: Special, dst: Slot, mask: u32) {
        let launch = self.launch;
        let warp = &self.warps[w];
        let block = &self.blocks[warp.block];
        let rank = warp.block as u32;
        let [cx, cy, _] = launch.cluster;
        let in_cluster = [rank % cx, rank / cx % cy, rank / (cx * cy)];
        let clusters = |d: usize| launch.grid[d] / launch.cluster[d];
        let flat_block =
            |along: u32, d: usize| along.wrapping_mul(launch.grid[d]).wrapping_add(block.index[d]);
        let all = |v: u32| -> Row { [v; 32] };
        let row = match special {
            Special::TidX => warp.tid[0],
            Special::TidY => warp.tid[1],
            Special::TidZ => warp.tid[2],
            Special::NtidX => all(launch.block[0]),
            Special::NtidY => all(launch.block[1]),
            Special::NtidZ => all(launch.block[2]),
            Special::CtaidX => all(block.index[0]),
            Special::CtaidY => all(block.index[1]),
            Special::CtaidZ => all(block.index[2]),
            Special::NctaidX => all(launch.grid[0]),
            Special::NctaidY => all(launch.grid[1]),
            Special::NctaidZ => all(launch.grid[2]),
            Special::LaneId => std::array::from_fn(|l| l as u32),
            Special::WarpId => all(warp.index),
            Special::LaneMaskLt => std::array::from_fn(|l| (1u32 << l) - 1),
            Special::SmId => all([2, 1, 0].into_iter().fold(0, flat_block) % 132),
            Special::NsmId => all(132),
            Special::ClusterIdX => all(block.index[0] / launch.cluster[0]),
            Special::ClusterIdY => all(block.index[1] / launch.cluster[1]),
            Special::ClusterIdZ => all(block.index[2] / launch.cluster[2]),
            Special::NclusterIdX => all(clusters(0)),
            Special::NclusterIdY => all(clusters(1)),
            Special::NclusterIdZ => all(clusters(2)),
            Special::ClusterCtaIdX => all(in_cluster[0]),
            Special::ClusterCtaIdY => all(in_cluster[1]),
            Special::ClusterCtaIdZ => all(in_cluster[2]),
            Special::ClusterNctaIdX => all(launch.cluster[0]),
            Special::ClusterNctaIdY => all(launch.cluster[1]),
            Special::ClusterNctaIdZ => all(launch.cluster[2]),
            Special::ClusterCtaRank => all(rank),
            Special::ClusterNctaRank => all(self.blocks.len() as u32),
            Special::DynamicSmemSize => all(launch.shared_bytes),
            Special::Clock => all(warp.clocks.time as u32),
            Special::Clock64 | Special::GlobalTimer => {
                let time = warp.clocks.time;
                self.warps[w].regs.set64(dst.long(), mask, &[time; 32]);
                return;
            }
        };
        self.put(w, dst, mask, &row);
    }
}
