//! Bulk copies: `cp.async.bulk`, its tensor forms, reductions, and `st.async`.
//!
//! A copy is one asynchronous operation. What it reads and writes in shared memory is checked and recorded when
//! it is started, against what the starting thread may rely on in the asynchronous proxy. Its effect happens
//! later: copies that complete at an mbarrier when a warp waits there and nothing else can run (late), at once
//! (early), or at any moment (random); copies of bulk groups at the wait for the group.

use std::ops::Range;

use flashcore_ptx::{AtomOp, AtomTy, Op};

use crate::config::AsyncMode;
use crate::exec::for_lanes;
use crate::exec::mem::{apply, atom_bytes};
use crate::findings::{FindingKind, Severity};
use crate::machine::warp::{State, Wait};
use crate::machine::{Cluster, PARAM_BASE};
use crate::memory::global::{GlobalMemory, POISON};
use crate::memory::shared::{SharedMemory, for_cells};
use crate::memory::tensor_map::{Swizzle, TensorElement, TensorMap};
use crate::program::decode::Slot;
use crate::races::clock::{Agent, Lanes, Proxy, Stamp, VClock};
use crate::races::global_shadow::{Accessor, GlobalAccess, LINE};
use crate::races::shared_shadow::{Access, CELL, Conflict, PAGE, PAGE_BYTES};

/// The shared side of a copy: the block, the plain address, the bytes, and how they lie.
///
/// Rows of a swizzled box begin a swizzle span apart, even where they are shorter; chunks of 16 bytes are permuted.
#[derive(Clone, Copy, Debug)]
struct SharedSide {
    block: usize,
    address: u32,
    bytes: u32,
    swizzle: Swizzle,
    /// The bytes of a row of the box.
    row: u32,
}

impl SharedSide {
    /// Consecutive bytes.
    fn linear(block: usize, address: u32, bytes: u32) -> SharedSide {
        SharedSide { block, address, bytes, swizzle: Swizzle::None, row: bytes }
    }

    /// A box of a tensor.
    fn boxed(block: usize, address: u32, map: &TensorMap) -> SharedSide {
        let row = map.taken(0) * map.element.bytes();
        SharedSide { block, address, bytes: map.box_bytes(), swizzle: map.swizzle, row }
    }

    /// The bytes from the first to the last, those between short rows included.
    fn extent(&self) -> u32 {
        match self.swizzle {
            Swizzle::None => self.bytes,
            swizzle => self.bytes / self.row * swizzle.span(),
        }
    }

    /// The pages of shared memory that it is, if it is whole ones.
    fn pages(&self) -> Option<Range<u32>> {
        let dense = self.swizzle == Swizzle::None || self.row == self.swizzle.span();
        let whole = (self.address | self.bytes).is_multiple_of(PAGE_BYTES);
        (dense && whole).then(|| self.address / PAGE_BYTES..(self.address + self.bytes) / PAGE_BYTES)
    }

    /// Where each chunk of 16 bytes lies, in box order.
    fn chunks(self) -> impl Iterator<Item = u32> {
        (0..self.bytes).step_by(16).map(move |at| match self.swizzle {
            Swizzle::None => self.address + at,
            swizzle if self.row == swizzle.span() => swizzle.apply(self.address + at),
            swizzle => swizzle.apply(self.address + at / self.row * swizzle.span() + at % self.row),
        })
    }
}

/// The global side of a copy.
#[derive(Clone, Debug)]
enum GlobalSide {
    /// Consecutive bytes: where, and how many.
    Linear(u64, u32),
    /// A box of a tensor.
    Tensor(TensorMap, Vec<i32>),
}

/// What a copy does.
#[derive(Clone, Debug)]
enum Action {
    /// Global to shared.
    Load(GlobalSide, SharedSide),
    /// Shared to global, replacing or reducing.
    Store(SharedSide, GlobalSide, Option<(AtomOp, AtomTy)>),
    /// From a block's shared memory to that of another, replacing or reducing.
    Across(SharedSide, SharedSide, Option<(AtomOp, AtomTy)>),
    /// Register values of some lanes to the shared memory of a block.
    Values(LaneValues),
}

/// What an `st.async` of some lanes writes: to one block, and counted at one mbarrier.
#[derive(Clone, Debug)]
struct LaneValues {
    block: usize,
    /// Bytes of a lane.
    bytes: u32,
    /// Where each lane writes.
    to: Vec<u32>,
    /// What they write, one lane after the other.
    data: Vec<u8>,
}

/// Stores of a warp that have read their source and whose write is kept back.
const MAX_UNWRITTEN: usize = 16;

/// A copy that completes at an mbarrier.
#[derive(Clone, Debug)]
pub struct PendingCopy {
    action: Action,
    warp: usize,
    pc: u32,
    /// The mbarrier: its block and address.
    barrier: (usize, u32),
    operation: (Agent, u32),
    /// What the copy itself came after.
    after: VClock,
}

/// A copy that belongs to a thread's bulk group.
#[derive(Clone, Debug)]
pub struct GroupCopy {
    action: Action,
    lane: u32,
    pc: u32,
    /// The operation as a reader of shared memory, and as a writer of global memory.
    reads: (Agent, u32),
    writes: (Agent, u32),
    group: Option<u32>,
    /// The bytes read from shared memory, once they are.
    data: Option<Vec<u8>>,
    /// Whether the thread has waited for that.
    read_awaited: bool,
    written: bool,
}

/// The bulk groups of a warp's lanes.
#[derive(Clone, Debug, Default)]
pub struct BulkGroups {
    copies: Vec<GroupCopy>,
    committed: [u32; 32],
}

impl Cluster<'_> {
    /// All bulk copies, and their groups.
    pub fn bulk(&mut self, w: usize, pc: u32, op: Op, mask: u32, src: &[Slot]) {
        match op {
            Op::BulkCommit => {
                let groups = &mut self.warps[w].bulk;
                for copy in groups.copies.iter_mut().filter(|c| c.group.is_none() && mask >> c.lane & 1 == 1)
                {
                    copy.group = Some(groups.committed[copy.lane as usize]);
                }
                for_lanes(mask, |l| groups.committed[l] += 1);
            }
            Op::BulkWait { pending, read } => self.bulk_wait(w, mask, u32::from(pending), read),
            // Each lane that executes a copy starts one of its own.
            _ => {
                let mut lanes = mask;
                while lanes != 0 {
                    let lane = lanes.trailing_zeros();
                    lanes &= lanes - 1;
                    self.start_bulk(w, pc, op, lane, src);
                }
            }
        }
    }

    fn start_bulk(&mut self, w: usize, pc: u32, op: Op, lane: u32, src: &[Slot]) {
        let l = lane as usize;
        let own = self.warps[w].block;
        let shared = |c: &Self, slot: Slot| c.shared_addresses(w, slot)[l];
        let in_cluster = |c: &Self, slot: Slot| c.ranked_addresses(w, slot)[l];
        let word = |c: &Self, slot: Slot| c.row(w, slot)[l];
        match op {
            Op::BulkLoad { multicast, .. } => {
                let (to, barrier) = (in_cluster(self, src[0]), in_cluster(self, src[3]));
                let bytes = word(self, src[2]);
                let from = GlobalSide::Linear(self.global_addresses(w, src[1])[l], bytes);
                if !self.bulk_sizes(w, pc, lane, bytes, &[to], 16) {
                    return;
                }
                let blocks = if multicast { Some(word(self, src[4])) } else { None };
                let side = SharedSide::linear(own, to, bytes);
                self.start_load(w, pc, lane, &from, side, barrier, blocks);
            }
            Op::TensorLoad { dims, multicast, .. } => {
                let rank = dims.count();
                let Some((map, at)) = self.tensor(w, pc, lane, src[1], &src[2..2 + rank]) else { return };
                let (to, barrier) = (in_cluster(self, src[0]), in_cluster(self, src[2 + rank]));
                let side = SharedSide::boxed(own, to, &map);
                if !self.bulk_sizes(w, pc, lane, side.bytes, &[to], 128) {
                    return;
                }
                let blocks = if multicast { Some(word(self, src[3 + rank])) } else { None };
                let from = GlobalSide::Tensor(map, at);
                self.start_load(w, pc, lane, &from, side, barrier, blocks);
            }
            Op::BulkStore { .. } | Op::BulkReduce { .. } => {
                let (address, bytes) = (shared(self, src[1]), word(self, src[2]));
                let to = GlobalSide::Linear(self.global_addresses(w, src[0])[l], bytes);
                if !self.bulk_sizes(w, pc, lane, bytes, &[address], 16) {
                    return;
                }
                let reduce = match op {
                    Op::BulkReduce { op, ty, .. } => Some((op, ty)),
                    _ => None,
                };
                let from = SharedSide::linear(own, address, bytes);
                self.start_store(w, pc, lane, from, to, reduce);
            }
            Op::TensorStore { dims, .. } | Op::TensorReduce { dims, .. } => {
                let rank = dims.count();
                let Some((map, at)) = self.tensor(w, pc, lane, src[0], &src[1..=rank]) else { return };
                let from = SharedSide::boxed(own, shared(self, src[1 + rank]), &map);
                if !self.bulk_sizes(w, pc, lane, from.bytes, &[from.address], 128) {
                    return;
                }
                if at[0] < 0 {
                    // Loads may begin before the tensor; a store that does is an illegal instruction on an H200.
                    let message =
                        format!("a store to a box that begins at {} in the innermost dimension", at[0]);
                    self.report_error(w, lane, pc, FindingKind::BadDescriptor, message);
                    return;
                }
                let reduce = match op {
                    Op::TensorReduce { op, .. } => {
                        if let Some(ty) = element_type(map.element) {
                            Some((op, ty))
                        } else {
                            self.unsupported(pc, "a tensor reduction of 8-bit or 16-bit integers");
                            return;
                        }
                    }
                    _ => None,
                };
                self.start_store(w, pc, lane, from, GlobalSide::Tensor(map, at), reduce);
            }
            Op::BulkToCluster | Op::BulkReduceCluster { .. } => {
                let (to, from) = (in_cluster(self, src[0]), shared(self, src[1]));
                let (bytes, barrier) = (word(self, src[2]), in_cluster(self, src[3]));
                let (to_block, to) = self.cluster_address(w, to);
                let (bar_block, bar) = self.cluster_address(w, barrier);
                if !self.bulk_sizes(w, pc, lane, bytes, &[to, from], 16) {
                    return;
                }
                if bar_block != to_block {
                    let message = "the mbarrier is in another block than the destination".to_string();
                    self.report_error(w, lane, pc, FindingKind::ClusterMisuse, message);
                }
                let reduce = match op {
                    Op::BulkReduceCluster { op, ty } => Some((op, ty)),
                    _ => None,
                };
                let from = SharedSide::linear(own, from, bytes);
                let to = SharedSide::linear(to_block, to, bytes);
                let (agent, clock) = self.agents.start(w, 1 << lane, &self.warps[w].clocks);
                let inside = self.record_side(w, pc, lane, from, false, Proxy::Async, (agent, clock))
                    && self.record_side(w, pc, lane, to, true, Proxy::Async, (agent, clock));
                if inside {
                    let action = Action::Across(from, to, reduce);
                    self.start_pending(w, pc, lane, action, (agent, clock), (bar_block, bar), Proxy::Async);
                }
            }
            _ => {}
        }
    }

    /// `st.async`.
    pub fn store_async(&mut self, w: usize, pc: u32, mask: u32, size: u32, count: u32, src: &[Slot]) {
        let to = self.ranked_addresses(w, src[0]);
        let barrier = self.ranked_addresses(w, src[1 + count as usize]);
        // Lanes that write to one block and barrier are one operation, unless it matters which of them is first.
        let apart =
            self.warps[w].clocks.is_parted() || matches!(self.launch.config.async_mode, AsyncMode::Random(_));
        let bytes = size * count;
        let mut left = mask;
        while left != 0 {
            let lane = left.trailing_zeros();
            let (block, _) = self.cluster_address(w, to[lane as usize]);
            let (bar_block, bar) = self.cluster_address(w, barrier[lane as usize]);
            let mut together = 1 << lane;
            if !apart {
                for_lanes(left, |l| {
                    let same = self.cluster_address(w, to[l]).0 == block
                        && self.cluster_address(w, barrier[l]) == (bar_block, bar);
                    together |= u32::from(same) << l;
                });
            }
            left &= !together;
            let operation = self.agents.start(w, together, &self.warps[w].clocks);
            let mut values = LaneValues { block, bytes, to: Vec::new(), data: Vec::new() };
            let mut lanes = together;
            while lanes != 0 {
                let lane = lanes.trailing_zeros();
                lanes &= lanes - 1;
                let l = lane as usize;
                let (_, address) = self.cluster_address(w, to[l]);
                let side = SharedSide::linear(block, address, bytes);
                if address % bytes != 0 {
                    let message = format!("address {address:#x} is not a multiple of {bytes}");
                    self.report_error(w, lane, pc, FindingKind::Misaligned, message);
                } else if self.record_side(w, pc, lane, side, true, Proxy::Generic, operation)
                    && self.check_mbarrier(w, pc, lane, bar_block, bar, Proxy::Generic)
                {
                    values.to.push(address);
                    for &slot in &src[1..=count as usize] {
                        let value = match slot {
                            Slot::Long(row) => self.warps[w].regs.r64[row as usize][l],
                            slot => u64::from(self.warps[w].regs.r32[slot.word() as usize][l]),
                        };
                        values.data.extend_from_slice(&value.to_le_bytes()[..size as usize]);
                    }
                }
            }
            if !values.to.is_empty() {
                let action = Action::Values(values);
                self.launch_pending(w, pc, together, action, operation, (bar_block, bar), Proxy::Generic);
            }
        }
    }

    /// Checks the size and the shared addresses of a bulk copy.
    fn bulk_sizes(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        bytes: u32,
        addresses: &[u32],
        align: u32,
    ) -> bool {
        if bytes == 0 || !bytes.is_multiple_of(16) {
            let message = format!("a bulk copy of {bytes} bytes; positive multiples of 16 are possible");
            self.report_error(w, lane, pc, FindingKind::BadDescriptor, message);
            return false;
        }
        if let Some(&address) = addresses.iter().find(|&&a| a % align != 0) {
            let (block, address) = self.cluster_address(w, address);
            self.report(w, lane, pc, FindingKind::Misaligned, Severity::Error, |c| {
                let what = format!("shared address {address:#x} is not a multiple of {align}");
                (what, Some(c.shared_place(block, address)))
            });
            return false;
        }
        true
    }

    /// The tensor map and coordinates of a tensor copy.
    fn tensor(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        map: Slot,
        coordinates: &[Slot],
    ) -> Option<(TensorMap, Vec<i32>)> {
        let l = lane as usize;
        let address = match map {
            Slot::Global(..) => self.global_addresses(w, map)[l],
            slot => self.row64(w, slot)[l],
        };
        let at: Vec<i32> = coordinates.iter().map(|&slot| self.row(w, slot)[l] as i32).collect();
        let decoded = self.map_bytes(address).and_then(|bytes| TensorMap::decode(&bytes));
        let problem = match &decoded {
            None => "there is no tensor map of the simulator at this address".to_string(),
            Some(_) if !address.is_multiple_of(64) => {
                format!("the tensor map at {address:#x} is not aligned to 64 bytes")
            }
            Some(map) if map.dims.len() != at.len() => {
                format!("{} coordinates for a tensor of {} dimensions", at.len(), map.dims.len())
            }
            Some(_) => return decoded.map(|map| (map, at)),
        };
        self.report_error(w, lane, pc, FindingKind::BadDescriptor, problem);
        None
    }

    fn map_bytes(&self, address: u64) -> Option<[u8; 128]> {
        let params = self.launch.params;
        if let Some(offset) = address.checked_sub(PARAM_BASE)
            && offset < 1 << 16
        {
            return params.get(offset as usize..offset as usize + 128)?.try_into().ok();
        }
        let (region, offset) = self.launch.memory.find(address, 128)?;
        Some(std::array::from_fn(|i| region.load_byte(offset + i)))
    }

    fn start_load(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        from: &GlobalSide,
        to: SharedSide,
        barrier: u32,
        blocks: Option<u32>,
    ) {
        let (block, address) = self.cluster_address(w, to.address);
        let (bar_block, bar) = self.cluster_address(w, barrier);
        let targets: Vec<(usize, usize)> = match blocks {
            None => vec![(block, bar_block)],
            Some(mask) => {
                if mask >> self.blocks.len() != 0 || mask == 0 {
                    let message =
                        format!("multicast to {mask:#b} in a cluster of {} blocks", self.blocks.len());
                    self.report_error(w, lane, pc, FindingKind::ClusterMisuse, message);
                }
                (0..self.blocks.len()).filter(|b| mask >> b & 1 == 1).map(|b| (b, b)).collect()
            }
        };
        let mut first = true;
        for (block, bar_block) in targets {
            let side = SharedSide { block, address, ..to };
            let operation = self.agents.start(w, 1 << lane, &self.warps[w].clocks);
            let inside = self.record_side(w, pc, lane, side, true, Proxy::Async, operation);
            if first {
                self.record_global(w, pc, lane, from, false, false, operation);
                first = false;
            }
            if inside {
                let action = Action::Load(from.clone(), side);
                self.start_pending(w, pc, lane, action, operation, (bar_block, bar), Proxy::Async);
            }
        }
    }

    /// Puts a lane's copy under way that completes at an mbarrier, if there is one.
    fn start_pending(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        action: Action,
        operation: (Agent, u32),
        barrier: (usize, u32),
        proxy: Proxy,
    ) {
        if self.check_mbarrier(w, pc, lane, barrier.0, barrier.1, proxy) {
            self.launch_pending(w, pc, 1 << lane, action, operation, barrier, proxy);
        }
    }

    /// Puts a copy of some lanes under way that completes at an mbarrier.
    fn launch_pending(
        &mut self,
        w: usize,
        pc: u32,
        lanes: u32,
        action: Action,
        operation: (Agent, u32),
        barrier: (usize, u32),
        proxy: Proxy,
    ) {
        let mut after = VClock::default();
        self.warps[w].clocks.reach(lanes, proxy, &mut after);
        let copy = PendingCopy { action, warp: w, pc, barrier, operation, after };
        if self.happens_now() {
            self.complete_pending(&copy);
            return;
        }
        match &copy.action {
            Action::Load(_, side) | Action::Across(_, side, None) => self.poison_side(*side),
            Action::Values(values) => {
                let shared = &mut self.blocks[values.block].shared;
                values.to.iter().for_each(|&to| shared.poison(to, values.bytes));
            }
            Action::Store(..) | Action::Across(..) => {}
        }
        self.pending.push(copy);
    }

    /// Whether an operation that is started now takes effect at once.
    pub fn happens_now(&mut self) -> bool {
        match self.launch.config.async_mode {
            AsyncMode::Early => true,
            AsyncMode::Late => false,
            AsyncMode::Random(_) => self.random.one_in(3),
        }
    }

    fn poison_side(&mut self, side: SharedSide) {
        let shared = &mut self.blocks[side.block].shared;
        match side.swizzle {
            Swizzle::None => shared.poison(side.address, side.bytes),
            // A swizzle changes the order of the bytes of a page, and not which they are.
            _ if side.pages().is_some() => shared.poison(side.address, side.bytes),
            _ => side.chunks().for_each(|address| shared.poison(address, 16)),
        }
    }

    /// A copy that completes at an mbarrier takes effect.
    fn complete_pending(&mut self, copy: &PendingCopy) {
        match &copy.action {
            Action::Load(from, to) => {
                let mut data = std::mem::take(&mut self.staging);
                self.read_global(from, to.bytes, &mut data);
                self.write_shared(*to, &data);
                self.staging = data;
                self.count_bytes(copy, to.bytes, true);
            }
            Action::Across(from, to, reduce) => {
                let data = self.read_shared(*from);
                match reduce {
                    None => self.write_shared(*to, &data),
                    Some((op, ty)) => {
                        let mut sum = self.read_shared(*to);
                        reduce_bytes(*op, *ty, &mut sum, &data);
                        self.write_shared(*to, &sum);
                    }
                }
                self.count_bytes(copy, to.bytes, true);
            }
            Action::Values(values) => {
                // A phase that expects too few bytes ends in the middle; who waits for it has seen no lane's write.
                let lanes = values.to.len();
                for (i, data) in values.data.chunks_exact(values.bytes as usize).enumerate() {
                    let shared = &mut self.blocks[values.block].shared;
                    shared.at_mut(values.to[i], values.bytes).copy_from_slice(data);
                    self.count_bytes(copy, values.bytes, i + 1 == lanes);
                }
            }
            Action::Store(..) => {}
        }
    }

    /// Counts bytes of a copy at its mbarrier; with the last of them, the copy is complete.
    fn count_bytes(&mut self, copy: &PendingCopy, bytes: u32, last: bool) {
        let (block, address) = copy.barrier;
        if let Some(bar) = self.blocks[block].mbarriers.get_mut(&address) {
            bar.tx -= i64::from(bytes);
            let ends = bar.pending == 0 && bar.tx == 0;
            if last || ends {
                bar.publication().join_both(&copy.after);
            }
            if last {
                let (agent, clock) = copy.operation;
                bar.publication().raise(agent, clock);
                bar.note(Stamp { clock, agent, lanes: Lanes::ALL });
            }
        }
        self.progress += 1;
        self.settle_mbarrier(block, address, copy.warp, copy.pc);
    }

    /// Nothing can run: completes a copy at an mbarrier that some warp waits at. False if there is none.
    pub fn complete_for_a_waiter(&mut self) -> bool {
        if self.pending.is_empty() {
            return false;
        }
        let mut barriers = Vec::with_capacity(self.warps.len());
        for warp in &self.warps {
            if let State::Waiting(Wait::Mbarrier { block, address, .. }) = warp.state
                && !barriers.contains(&(block, address))
            {
                barriers.push((block, address));
            }
        }
        let waited = |copy: &PendingCopy| barriers.contains(&copy.barrier);
        let candidates = self.pending.iter().filter(|copy| waited(copy)).count();
        if candidates == 0 {
            return false;
        }
        let nth = self.random.below(candidates);
        let chosen = self.pending.iter().enumerate().filter(|(_, copy)| waited(copy)).nth(nth);
        let Some((chosen, _)) = chosen else { return false };
        let copy = self.pending.swap_remove(chosen);
        self.complete_pending(&copy);
        true
    }

    /// In the random mode: some copy takes effect now.
    pub fn complete_one_at_random(&mut self) {
        if !self.pending.is_empty() {
            let chosen = self.random.below(self.pending.len());
            let copy = self.pending.swap_remove(chosen);
            self.complete_pending(&copy);
        }
    }

    fn start_store(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        from: SharedSide,
        to: GlobalSide,
        reduce: Option<(AtomOp, AtomTy)>,
    ) {
        let reads = self.agents.start(w, 1 << lane, &self.warps[w].clocks);
        let writes = self.agents.start(w, 1 << lane, &self.warps[w].clocks);
        if !self.record_side(w, pc, lane, from, false, Proxy::Async, reads) {
            return;
        }
        self.record_global(w, pc, lane, &to, true, reduce.is_some(), writes);
        let action = Action::Store(from, to, reduce);
        let mut copy = GroupCopy {
            action,
            lane,
            pc,
            reads,
            writes,
            group: None,
            data: None,
            read_awaited: false,
            written: false,
        };
        if self.happens_now() {
            self.read_source(&mut copy);
            self.write_destination(&mut copy);
        }
        self.warps[w].bulk.copies.push(copy);
    }

    fn read_source(&mut self, copy: &mut GroupCopy) {
        if copy.data.is_none()
            && let Action::Store(from, ..) = &copy.action
        {
            copy.data = Some(self.read_shared(*from));
        }
    }

    fn write_destination(&mut self, copy: &mut GroupCopy) {
        if let (false, Some(data), Action::Store(_, to, reduce)) = (copy.written, &copy.data, &copy.action) {
            self.write_global(to, data, *reduce);
            copy.written = true;
        }
    }

    /// `cp.async.bulk.wait_group`: the older groups have read their sources, and without `.read` also written.
    fn bulk_wait(&mut self, w: usize, mask: u32, pending: u32, read_only: bool) {
        let committed = self.warps[w].bulk.committed;
        let live = self.warps[w].live;
        let mut copies = std::mem::take(&mut self.warps[w].bulk.copies);
        copies.retain_mut(|copy| {
            let retired = mask >> copy.lane & 1 == 1
                && copy.group.is_some_and(|g| g + pending < committed[copy.lane as usize]);
            if !retired {
                return true;
            }
            self.read_source(copy);
            // The groups are the lane's own, so only the lane knows.
            let clocks = &mut self.warps[w].clocks;
            clocks.acquire_completion(1 << copy.lane, live, copy.reads.0, copy.reads.1);
            copy.read_awaited = true;
            if read_only {
                return true;
            }
            self.write_destination(copy);
            let clocks = &mut self.warps[w].clocks;
            clocks.acquire_completion(1 << copy.lane, live, copy.writes.0, copy.writes.1);
            false
        });
        // Writes that nobody waits for must happen before the kernel ends: the oldest happen now.
        let read = copies.iter().filter(|copy| copy.read_awaited).count();
        let mut surplus = read.saturating_sub(MAX_UNWRITTEN);
        copies.retain_mut(|copy| {
            if surplus == 0 || !copy.read_awaited {
                return true;
            }
            surplus -= 1;
            self.write_destination(copy);
            false
        });
        self.warps[w].bulk.copies = copies;
    }

    /// A warp has ended: its bulk groups must have read their sources.
    pub fn end_bulk(&mut self, w: usize) {
        let mut copies = std::mem::take(&mut self.warps[w].bulk.copies);
        for copy in &mut copies {
            if !copy.read_awaited {
                let message = "the block may end before a bulk copy has read its shared memory: \
                               wait_group.read is missing"
                    .to_string();
                self.report_error(w, copy.lane, copy.pc, FindingKind::PendingAtExit, message);
            }
            self.read_source(copy);
            self.write_destination(copy);
        }
    }

    /// The cluster has ended: copies that nobody waited for are pending.
    pub fn check_end(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        for copy in &pending {
            let message =
                "the block ends before a bulk copy into its shared memory has completed".to_string();
            self.report_error(copy.warp, 0, copy.pc, FindingKind::PendingAtExit, message);
        }
        pending.clear();
    }

    /// Checks and records what a copy does in shared memory. False where it is not possible.
    fn record_side(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        side: SharedSide,
        write: bool,
        proxy: Proxy,
        (agent, clock): (Agent, u32),
    ) -> bool {
        let SharedSide { block, address, .. } = side;
        let bytes = side.extent();
        self.check_block_alive(w, pc, lane, block);
        if !self.blocks[block].shared.contains(address, bytes) {
            self.report(w, lane, pc, FindingKind::OutOfBounds, Severity::Error, |c| {
                let what = format!("{bytes} bytes outside of the allocations of shared memory");
                (what, Some(c.shared_place(block, address)))
            });
            return false;
        }
        if !self.launch.config.checks.shared {
            return true;
        }
        let (shared, clocks) = (&mut self.blocks[block].shared, &self.warps[w].clocks);
        let lanes = Lanes::one(lane);
        let access = Access { clocks, proxy, stamp: Stamp { clock, agent, lanes: Lanes::ALL }, lanes, pc };
        let mut conflict: Option<Conflict> = None;
        let mut barrier = None;
        let mut uninitialised = None;
        let mut visit = |shared: &mut SharedMemory, cell: u32, mask: u16| {
            if shared.is_barrier(cell, mask) {
                barrier.get_or_insert(cell * 16);
            }
            let found = if write {
                shared.initialise(cell, mask);
                shared.shadow.write(cell, mask, &access)
            } else {
                if !shared.initialised(cell, mask) {
                    uninitialised.get_or_insert(cell * 16);
                }
                shared.shadow.read(cell, mask, &access)
            };
            conflict = conflict.or(found);
        };
        match (side.pages(), side.swizzle) {
            (Some(pages), _) => {
                for (i, page) in pages.enumerate() {
                    if record_page(shared, page, write, &access) {
                        continue;
                    }
                    let chunks = side.chunks().skip(i * PAGE).take(PAGE);
                    chunks.for_each(|address| visit(shared, address / CELL, 0xFFFF));
                    if write {
                        shared.shadow.unite(page, &access);
                    }
                }
            }
            (None, Swizzle::None) => for_cells(address, bytes, |cell, mask| visit(shared, cell as u32, mask)),
            (None, _) => side.chunks().for_each(|address| visit(shared, address / CELL, 0xFFFF)),
        }
        if let Some(found) = conflict {
            self.report_conflict(w, lane, pc, block, write, found);
        }
        if let Some(address) = barrier {
            self.report(w, lane, pc, FindingKind::MbarrierMisuse, Severity::Error, |c| {
                ("a bulk copy over an mbarrier in use".to_string(), Some(c.shared_place(block, address)))
            });
        }
        if let Some(address) = uninitialised {
            self.report(w, lane, pc, FindingKind::UninitialisedShared, Severity::Error, |c| {
                let what = "a bulk copy of shared memory that nothing was written to".to_string();
                (what, Some(c.shared_place(block, address)))
            });
        }
        true
    }

    /// Checks and records what a copy does in global memory.
    fn record_global(
        &mut self,
        w: usize,
        pc: u32,
        lane: u32,
        side: &GlobalSide,
        write: bool,
        atomic: bool,
        (agent, clock): (Agent, u32),
    ) {
        let checks = self.launch.config.checks;
        self.check_grid_wait(w, pc, 1 << lane);
        let memory = self.launch.memory;
        let mut outside = None;
        let mut uninitialised = None;
        let mut conflict = None;
        let mut sectors = 0;
        let mut total = 0;
        side.for_runs(|address, bytes| {
            sectors += ((address + u64::from(bytes) - 1) / 32 - address / 32 + 1) as u32;
            total += bytes;
            let Some((region, offset)) = memory.find(address, u64::from(bytes)) else {
                outside.get_or_insert((address, bytes));
                return;
            };
            if !checks.global {
                return;
            }
            let lanes = Lanes::one(lane);
            let by = Accessor {
                access: GlobalAccess {
                    cluster: self.id,
                    stamp: Stamp { clock, agent, lanes: Lanes::ALL },
                    pc,
                    atomic,
                },
                clocks: &self.warps[w].clocks,
                lanes,
                proxy: Proxy::Async,
            };
            let mut at = offset;
            let end = offset + bytes as usize;
            let mut guard = region.races.lock(at, self.launch.id);
            while at < end {
                let count = (16 - at % 16).min(end - at);
                if !guard.covers(at) {
                    drop(guard);
                    guard = region.races.lock(at, self.launch.id);
                }
                if at.is_multiple_of(LINE) && at + LINE <= end {
                    let noted = if write {
                        guard.write_line(at, &by.access)
                    } else {
                        region.line_initialised(at) && guard.read_line(at, &by.access)
                    };
                    if noted {
                        at += LINE;
                        continue;
                    }
                }
                if !write && !region.all_initialised(at, count as u32) {
                    uninitialised.get_or_insert(region.base + at as u64);
                }
                if let Some(found) = guard.access(at, count as u32, write, &by) {
                    conflict.get_or_insert((region.base + found.offset as u64, found));
                }
                at += count;
            }
        });
        if checks.costs {
            self.tally.counters[pc as usize].global(sectors, total);
        }
        if let Some((address, bytes)) = outside {
            self.report(w, lane, pc, FindingKind::OutOfBounds, Severity::Error, |c| {
                let what =
                    format!("a bulk copy of {bytes} bytes outside of every allocation of global memory");
                (what, Some(c.global_place(address)))
            });
        }
        if let Some(address) = uninitialised {
            self.report(w, lane, pc, FindingKind::UninitialisedGlobal, Severity::Error, |c| {
                let what = "a bulk copy of global memory that nothing was written to".to_string();
                (what, Some(c.global_place(address)))
            });
        }
        if let Some((address, found)) = conflict {
            self.report_global_conflict(w, lane, pc, address, write, found);
        }
    }

    /// Puts the bytes of a copy's source in global memory into `out`, in box order.
    fn read_global(&self, side: &GlobalSide, bytes: u32, out: &mut Vec<u8>) {
        let memory = self.launch.memory;
        // What lies outside of the allocations has been reported; it reads as poison, element by element.
        let read = |address: u64, size: usize, out: &mut [u8]| match memory.find(address, out.len() as u64) {
            Some((region, offset)) => region.read(offset, out),
            None => {
                for (i, element) in out.chunks_exact_mut(size).enumerate() {
                    match memory.find(address + (i * size) as u64, size as u64) {
                        Some((region, offset)) => region.read(offset, element),
                        None => element.copy_from_slice(&POISON.to_le_bytes()[..size]),
                    }
                }
            }
        };
        out.clear();
        out.resize(bytes as usize, 0);
        match side {
            GlobalSide::Linear(address, _) => read(*address, 8, out),
            GlobalSide::Tensor(map, at) => {
                let size = map.element.bytes() as usize;
                let fill = map.fill().to_le_bytes();
                map.for_runs(at, |start, bytes, address| {
                    let run = &mut out[start as usize..][..bytes as usize];
                    match address {
                        Some(address) => read(address, size, run),
                        None => run.chunks_exact_mut(size).for_each(|e| e.copy_from_slice(&fill[..size])),
                    }
                });
            }
        }
    }

    /// Writes or reduces a copy's bytes into global memory.
    fn write_global(&self, side: &GlobalSide, data: &[u8], reduce: Option<(AtomOp, AtomTy)>) {
        let memory = self.launch.memory;
        let put = |address: u64, bytes: &[u8]| {
            let size = bytes.len() as u32;
            let Some((region, offset)) = memory.find(address, u64::from(size)) else { return };
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            let value = u64::from_le_bytes(word);
            match reduce {
                None => region.store(offset, size, value),
                Some((op, ty)) => {
                    region.update(offset, size, |old| apply(op, ty, old, value, 0, true));
                    region.note_written(offset, size);
                }
            }
        };
        match side {
            GlobalSide::Linear(address, _) => {
                let size = reduce.map_or(8, |(_, ty)| atom_bytes(ty));
                for (i, chunk) in data.chunks_exact(size as usize).enumerate() {
                    put(address + i as u64 * u64::from(size), chunk);
                }
            }
            GlobalSide::Tensor(map, at) => {
                let size = map.element.bytes() as usize;
                map.for_runs(at, |start, bytes, address| {
                    let Some(address) = address else { return };
                    let run = &data[start as usize..][..bytes as usize];
                    // Whole words where nothing is reduced and the run allows it.
                    let inside = memory.find(address, u64::from(bytes)).is_some();
                    let whole = reduce.is_none() && inside && address % 8 == 0 && bytes % 8 == 0;
                    let size = if whole { 8 } else { size };
                    let lines = if whole { store_lines(memory, address, run) } else { 0 };
                    let (address, run) = (address + lines as u64, &run[lines..]);
                    for (i, element) in run.chunks_exact(size).enumerate() {
                        put(address + (i * size) as u64, element);
                    }
                });
            }
        }
    }

    /// The bytes of a copy's shared side, in box order.
    fn read_shared(&self, side: SharedSide) -> Vec<u8> {
        let shared = &self.blocks[side.block].shared;
        if side.swizzle == Swizzle::None {
            return shared.at(side.address, side.bytes).to_vec();
        }
        let mut bytes = Vec::with_capacity(side.bytes as usize);
        for address in side.chunks() {
            bytes.extend_from_slice(shared.at(address, 16));
        }
        bytes
    }

    /// Writes a copy's shared side.
    fn write_shared(&mut self, side: SharedSide, data: &[u8]) {
        let shared = &mut self.blocks[side.block].shared;
        if side.swizzle == Swizzle::None {
            shared.at_mut(side.address, side.bytes).copy_from_slice(data);
            return;
        }
        for (address, chunk) in side.chunks().zip(data.chunks_exact(16)) {
            shared.at_mut(address, 16).copy_from_slice(chunk);
        }
    }
}

impl GlobalSide {
    /// Calls `f` for the consecutive runs of bytes that it touches.
    fn for_runs(&self, mut f: impl FnMut(u64, u32)) {
        match self {
            GlobalSide::Linear(address, bytes) => f(*address, *bytes),
            GlobalSide::Tensor(map, at) => {
                let mut run: Option<(u64, u32)> = None;
                map.for_runs(at, |_, bytes, address| {
                    let Some(address) = address else { return };
                    match &mut run {
                        Some((start, len)) if *start + u64::from(*len) == address => *len += bytes,
                        _ => {
                            if let Some((start, len)) = run.replace((address, bytes)) {
                                f(start, len);
                            }
                        }
                    }
                });
                if let Some((start, len)) = run {
                    f(start, len);
                }
            }
        }
    }
}

/// Stores the whole lines that a run of bytes begins with. Returns how many bytes they are.
fn store_lines(memory: &GlobalMemory, address: u64, run: &[u8]) -> usize {
    let Some((region, offset)) = memory.find(address, run.len() as u64) else { return 0 };
    if !offset.is_multiple_of(LINE) {
        return 0;
    }
    let lines = run.as_chunks::<LINE>().0;
    for (i, bytes) in lines.iter().enumerate() {
        let mut line = [0; LINE / 8];
        for (word, bytes) in line.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        region.store_line(offset + i * LINE, &line);
    }
    lines.len() * LINE
}

/// Records a copy's access to a page that is kept as one, if it comes after every earlier one that it must come after.
fn record_page(shared: &mut SharedMemory, page: u32, write: bool, access: &Access<'_>) -> bool {
    if write {
        let written = !shared.has_barriers(page) && shared.shadow.write_page(page, access);
        if written {
            shared.initialise_page(page);
        }
        return written;
    }
    let readable = shared.is_plain_page(page) && shared.shadow.is_readable(page, access);
    if readable {
        shared.shadow.read_page(page, u64::MAX, access);
    }
    readable
}

/// Reduces bytes element by element.
fn reduce_bytes(op: AtomOp, ty: AtomTy, into: &mut [u8], from: &[u8]) {
    let size = atom_bytes(ty) as usize;
    for (a, b) in into.chunks_exact_mut(size).zip(from.chunks_exact(size)) {
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..size].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        };
        let new = apply(op, ty, word(a), word(b), 0, false);
        a.copy_from_slice(&new.to_le_bytes()[..size]);
    }
}

/// How a reduction reads the elements of a tensor.
fn element_type(element: TensorElement) -> Option<AtomTy> {
    match element {
        TensorElement::U8 | TensorElement::U16 => None,
        TensorElement::U32 => Some(AtomTy::U32),
        TensorElement::S32 => Some(AtomTy::S32),
        TensorElement::U64 => Some(AtomTy::U64),
        TensorElement::S64 => Some(AtomTy::S64),
        TensorElement::F16 => Some(AtomTy::F16),
        TensorElement::Bf16 => Some(AtomTy::Bf16),
        TensorElement::F32 => Some(AtomTy::F32),
    }
}
