//! The order of work in a task: blocks of keys, stretches of blocks, and the panels that go through them.

use std::ops::Range;

use super::{panel::Panel, plan::Task};

/// How many f32 of keys and values a stretch has, at most: as many as a core's cache holds beside queries and outputs, or
/// twice as many where that is all and these are done one panel after the other.
const STRETCH: usize = 32 * 1024;

/// How a task's keys are cut into blocks, which are numbered from the tensor's first key on, so that a row's do not depend on
/// its task.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    keys: Range<usize>,
    /// Keys of a block.
    len: usize,
    /// The task's blocks, and how many of them a stretch has.
    blocks: Range<usize>,
    stretch: usize,
}

/// A panel and a block that it sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub panel: usize,
    pub block: usize,
    /// The blocks that the panel goes through before the next one does.
    pub stretch: Range<usize>,
}

impl Cut {
    /// Into blocks of `len` keys, with `width` f32 for the key and the value of each.
    pub(super) fn new(task: &Task, len: usize, width: usize) -> Self {
        let Range { start, end } = task.keys;
        let blocks = start / len..end.div_ceil(len);
        let most = (STRETCH / width.max(1) / len).max(1);
        let stretch = if blocks.len() <= 2 * most { blocks.len().max(1) } else { most };
        Self { keys: start..end, len, blocks, stretch }
    }

    /// The keys of a block, or of some behind each other.
    #[inline(always)]
    pub(super) fn keys(&self, blocks: Range<usize>) -> Range<usize> {
        let end = blocks.end.saturating_mul(self.len).min(self.keys.end);
        (blocks.start * self.len).max(self.keys.start).min(end)..end
    }

    /// The keys of the task's first block.
    pub(super) fn first_keys(&self) -> Range<usize> {
        self.keys(self.blocks.start..self.blocks.start + 1)
    }

    /// The most blocks of a stretch, and whether one is all.
    pub(super) fn longest_stretch(&self) -> (usize, bool) {
        (self.stretch.min(self.blocks.len()), self.stretch >= self.blocks.len())
    }

    /// The first step of a task.
    #[inline(always)]
    pub(super) fn first(&self, panels: &[Panel]) -> Option<Step> {
        let stretch = self.blocks.start..self.blocks.end.min(self.blocks.start + self.stretch);
        self.next(panels, 0, stretch.start, stretch)
    }

    /// The step after one.
    #[inline(always)]
    pub(super) fn after(&self, panels: &[Panel], step: &Step) -> Option<Step> {
        self.next(panels, step.panel, step.block + 1, step.stretch.clone())
    }

    /// The next step from a panel and a block on, which may be of it.
    #[inline(always)]
    fn next(
        &self,
        panels: &[Panel],
        mut panel: usize,
        mut block: usize,
        mut stretch: Range<usize>,
    ) -> Option<Step> {
        while !stretch.is_empty() {
            while panel < panels.len() {
                while block < stretch.end {
                    if panels[panel].sees(&self.keys(block..block + 1)) {
                        return Some(Step { panel, block, stretch });
                    }
                    block += 1;
                }
                (panel, block) = (panel + 1, stretch.start);
            }
            stretch = stretch.end..self.blocks.end.min(stretch.end + self.stretch);
            (panel, block) = (0, stretch.start);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::visible::Visible;

    fn task(keys: Range<usize>) -> Task {
        Task { batch: 0, head: 0, rows: 0..8, keys, part: None }
    }

    /// Panels of four rows that see all of `keys` keys.
    fn panels(keys: usize) -> Vec<Panel> {
        [0..4, 4..8].map(|rows| Panel::new(Visible::all(keys), rows, 1, 4)).into()
    }

    fn steps(cut: &Cut, panels: &[Panel]) -> Vec<(usize, usize)> {
        std::iter::successors(cut.first(panels), |step| cut.after(panels, step))
            .map(|step| (step.panel, step.block))
            .collect()
    }

    #[test]
    fn blocks_begin_at_multiples_of_their_length() {
        let cut = Cut::new(&task(5..23), 10, 1);
        assert_eq!((cut.first_keys(), cut.keys(1..2), cut.keys(2..3)), (5..10, 10..20, 20..23));
        assert_eq!((cut.keys(0..3), cut.keys(3..4)), (5..23, 23..23));
    }

    #[test]
    fn each_panel_goes_through_a_stretch_before_the_next_one_does() {
        let cut = Cut::new(&task(0..50), 10, STRETCH / 20);
        assert_eq!(cut.longest_stretch(), (2, false));
        let all = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (0, 4), (1, 4)];
        assert_eq!(steps(&cut, &panels(50)), all);
    }

    #[test]
    fn blocks_that_a_panel_does_not_see_are_left_out() {
        let cut = Cut::new(&task(0..30), 10, STRETCH / 20);
        assert_eq!(cut.longest_stretch(), (3, true));
        assert_eq!(steps(&cut, &panels(10)), [(0, 0), (1, 0)]);
        assert_eq!(steps(&cut, &panels(0)), []);
        assert_eq!(steps(&Cut::new(&task(0..0), 10, 1), &panels(30)), []);
    }
}
