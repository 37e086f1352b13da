//! What blocks of a cluster share: the cluster's barrier; and what warps of a block share: its registers.

use flashcore_ptx::ClusterArrive;

use crate::findings::FindingKind;
use crate::machine::warp::{State, Wait};
use crate::machine::{Cluster, Outcome};
use crate::races::clock::ClockPair;

/// The barrier of a cluster.
#[derive(Default)]
pub struct ClusterBarrier {
    /// The number of phases completed.
    phase: u64,
    /// What those who came in the present phase have published.
    coming: ClockPair,
    /// What those who came in the last complete phase had published.
    came: ClockPair,
}

impl Cluster<'_> {
    /// `barrier.cluster.arrive`.
    pub fn cluster_arrive(&mut self, w: usize, pc: u32, mask: u32, sem: ClusterArrive) -> Outcome {
        let warp = &mut self.warps[w];
        let (arrived, waited) = warp.cluster_phases;
        if arrived > waited {
            let message = "the warp comes to the cluster's barrier again without having waited".to_string();
            self.report_error(w, mask.trailing_zeros(), pc, FindingKind::ClusterMisuse, message);
            return Outcome::Next;
        }
        warp.cluster_phases.0 += 1;
        let (phase, agent, block) = (warp.cluster_phases.0, warp.clocks.agent(), warp.block);
        let mbarriers = self.blocks[block].mbarriers.values_mut();
        for bar in mbarriers.filter(|b| b.fenced && b.init.0.agent == agent) {
            bar.known_from.get_or_insert(phase);
        }
        let warp = &mut self.warps[w];
        if sem == ClusterArrive::Release {
            warp.clocks.publish(mask, warp.live, &mut self.barrier.coming);
        }
        self.progress += 1;
        self.settle_cluster_barrier();
        Outcome::Next
    }

    /// `barrier.cluster.wait`.
    pub fn cluster_wait(&mut self, w: usize, pc: u32, mask: u32) -> Outcome {
        let warp = &mut self.warps[w];
        let (arrived, waited) = warp.cluster_phases;
        if arrived == waited {
            let message = "the warp waits at the cluster's barrier without having come to it".to_string();
            self.report_error(w, mask.trailing_zeros(), pc, FindingKind::ClusterMisuse, message);
            return Outcome::Next;
        }
        if self.barrier.phase < arrived {
            warp.state = State::Waiting(Wait::Cluster);
            return Outcome::Retry;
        }
        warp.cluster_phases.1 = arrived;
        warp.clocks.acquire(mask, warp.live, &self.barrier.came);
        warp.clocks.sync_lanes();
        Outcome::Next
    }

    /// Ends the phase of the cluster's barrier if all live warps have come.
    pub fn settle_cluster_barrier(&mut self) {
        let next = self.barrier.phase + 1;
        let mut live = self.warps.iter().filter(|w| w.state != State::Done).peekable();
        if live.peek().is_none() || !live.all(|w| w.cluster_phases.0 >= next) {
            return;
        }
        self.barrier.phase = next;
        self.barrier.came = std::mem::take(&mut self.barrier.coming);
        self.progress += 1;
        for warp in &mut self.warps {
            if warp.state == State::Waiting(Wait::Cluster) {
                warp.state = State::Ready;
            }
        }
    }

    /// Reports an access to the shared memory of a block whose warps have all ended.
    pub fn check_block_alive(&mut self, w: usize, pc: u32, lane: u32, block: usize) {
        if block == self.warps[w].block {
            return;
        }
        let warps = self.blocks[block].first_warp..self.blocks[block].first_warp + self.blocks[block].warps;
        if warps.clone().all(|other| self.warps[other].state == State::Done) {
            let message = format!("block {block} of the cluster has ended; its shared memory is gone");
            self.report_error(w, lane, pc, FindingKind::ClusterMisuse, message);
        }
    }

    /// `setmaxnreg`.
    pub fn set_max_registers(&mut self, w: usize, pc: u32, inc: bool, count: u32) -> Outcome {
        let block = self.warps[w].block;
        let had = self.warps[w].register_count;
        let change = i64::from(count.abs_diff(had)) * 32;
        let name = if inc { "inc" } else { "dec" };
        let wrong_way = if inc { count < had } else { count > had };
        let problem = if !(24..=256).contains(&count) || !count.is_multiple_of(8) {
            Some(format!("{count} registers per thread; multiples of 8 from 24 to 256 are possible"))
        } else if wrong_way {
            Some(format!("setmaxnreg.{name} to {count} where a thread has {had}"))
        } else {
            None
        };
        if let Some(message) = problem {
            self.report_error(w, 0, pc, FindingKind::RegisterPool, message);
            return Outcome::Next;
        }
        let free = &mut self.blocks[block].free_registers;
        if !inc {
            *free += change;
        } else if *free >= change {
            *free -= change;
        } else {
            self.warps[w].state = State::Waiting(Wait::Registers(count));
            return Outcome::Retry;
        }
        self.warps[w].register_count = count;
        if !inc {
            self.settle_registers(block);
        }
        Outcome::Next
    }

    /// Wakes warps that wait for registers: some have been given back.
    pub fn settle_registers(&mut self, block: usize) {
        self.progress += 1;
        for warp in self.warps.iter_mut().filter(|warp| warp.block == block) {
            if matches!(warp.state, State::Waiting(Wait::Registers(_))) {
                warp.state = State::Ready;
            }
        }
    }
}
