//! `griddepcontrol`: the grid before this one, which may still be at work.

use crate::findings::FindingKind;
use crate::machine::Cluster;

impl Cluster<'_> {
    /// `griddepcontrol.wait`: the grid before has completed, for these lanes.
    pub fn grid_wait(&mut self, w: usize, mask: u32) {
        let before = self.agents.grid_before();
        let warp = &mut self.warps[w];
        warp.clocks.acquire_completion(mask, warp.live, before, 1);
    }

    /// A kernel that waits for the grid before it may run beside that grid until then: no thread may touch global
    /// memory before it has waited, or has been told so by one that has.
    #[inline]
    pub fn check_grid_wait(&mut self, w: usize, pc: u32, mask: u32) {
        if self.launch.program.waits_for_grid {
            let early = self.warps[w].clocks.unaware(mask, self.agents.grid_before(), 1);
            if early != 0 {
                let message = "the grid before this one may still be at work in global memory".to_string();
                self.report_error(w, early.trailing_zeros(), pc, FindingKind::EarlyGridAccess, message);
            }
        }
    }
}
