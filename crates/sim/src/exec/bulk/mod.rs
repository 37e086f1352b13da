//! Bulk copies: `cp.async.bulk`, its tensor forms, reductions, and `st.async`.
//!
//! A copy is one asynchronous operation. What it reads and writes is checked and recorded when it is started (`record`),
//! against what the starting thread may rely on in the asynchronous proxy. Its effect happens later: copies that complete
//! at an mbarrier (`pending`) when a warp waits there and nothing else can run (late), at once (early), or at any moment
//! (random); copies of bulk groups (`groups`) at the wait for the group.

mod bytes;
mod groups;
mod pending;
mod record;
mod sides;

pub use groups::BulkGroups;
pub use pending::PendingCopy;

use flashcore_ptx::{AtomOp, AtomTy, Op};

use crate::config::AsyncMode;
use crate::exec::bulk::pending::LaneValues;
use crate::exec::bulk::sides::{GlobalSide, SharedSide};
use crate::findings::{FindingKind, Severity};
use crate::machine::{Cluster, PARAM_BASE};
use crate::memory::tensor_map::{TensorElement, TensorMap};
use crate::program::Slot;
use crate::races::clock::Proxy;

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

impl Cluster<'_> {
    /// All bulk copies, and their groups.
    pub fn bulk(&mut self, w: usize, pc: u32, op: Op, mask: u32, src: &[Slot]) {
        match op {
            Op::BulkCommit => self.warps[w].bulk.commit(mask),
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

    /// Whether an operation that is started now takes effect at once.
    pub fn happens_now(&mut self) -> bool {
        match self.launch.config.async_mode {
            AsyncMode::Early => true,
            AsyncMode::Late => false,
            AsyncMode::Random(_) => self.random.one_in(3),
        }
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
