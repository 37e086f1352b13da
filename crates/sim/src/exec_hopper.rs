//! Bulk copies, warpgroups and clusters.

use flashcore_ptx::{ClusterArrive, Op};

use crate::decode::{Code, Slot};
use crate::machine::{Cluster, Step};

impl Cluster<'_> {
    pub fn bulk(&mut self, _w: usize, pc: u32, _op: Op, _mask: u32, _src: &[Slot]) {
        self.unsupported(pc, "bulk copies");
    }
    pub fn store_async(&mut self, _w: usize, pc: u32, _mask: u32, _size: u32, _count: u32, _src: &[Slot]) {
        self.unsupported(pc, "st.async");
    }
    pub fn cluster_arrive(&mut self, _w: usize, pc: u32, _mask: u32, _sem: ClusterArrive) -> Step {
        self.unsupported(pc, "clusters");
        Step::Next
    }
    pub fn cluster_wait(&mut self, _w: usize, pc: u32, _mask: u32) -> Step {
        self.unsupported(pc, "clusters");
        Step::Next
    }
    pub fn set_max_registers(&mut self, _w: usize, pc: u32, _inc: bool, _count: u32) -> Step {
        self.unsupported(pc, "setmaxnreg");
        Step::Next
    }
    pub fn warpgroup(
        &mut self,
        _w: usize,
        pc: u32,
        _code: &Code,
        _mask: u32,
        _dst: &[Slot],
        _src: &[Slot],
    ) -> Step {
        self.unsupported(pc, "wgmma");
        Step::Next
    }
    pub fn check_wgmma_registers(&mut self, _w: usize, _pc: u32, _mask: u32) {}
    pub fn settle_registers(&mut self, _block: usize) {}
    pub fn settle_cluster_barrier(&mut self) {}
    pub fn complete_for_a_waiter(&mut self) -> bool {
        false
    }
    pub fn complete_one_at_random(&mut self) {}
    pub fn check_end(&mut self) {}
}
