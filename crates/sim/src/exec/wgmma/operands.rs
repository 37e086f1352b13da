//! What a product reads in shared memory, checked and recorded when it is started.

use std::ops::Range;

use flashcore_ptx::{MatrixTy, Wgmma};

use crate::exec::wgmma::ASource;
use crate::findings::{FindingKind, Severity};
use crate::machine::Cluster;
use crate::memory::descriptor::Descriptor;
use crate::memory::shared::SharedMemory;
use crate::races::clock::{Agent, Edge, Proxy, Stamp};
use crate::races::lanes::Lanes;
use crate::races::shared_shadow::{CELL, PAGE, PAGE_BYTES, SharedAccess, SharedConflict};

impl Cluster<'_> {
    /// Checks and records what a product reads in shared memory. False where it is not possible.
    pub(super) fn record_operands(
        &mut self,
        first: usize,
        pc: u32,
        form: &Wgmma,
        a: &ASource,
        b: &Descriptor,
        (agent, clock): (Agent, u32),
    ) -> bool {
        let block = self.warps[first].block;
        let mut faults = OperandFaults::default();
        let checks = self.launch.config.checks.shared;
        let stamp = Stamp { clock, agent, lanes: Lanes::ALL };
        if let ASource::Shared(descriptor) = a {
            // Each warp reads sixteen rows of A of its own.
            for warp in 0..4 {
                let clocks = &self.warps[first + warp].clocks;
                let access = SharedAccess { clocks, proxy: Proxy::Async, stamp, lanes: Lanes::ALL, pc };
                let shared = &mut self.blocks[block].shared;
                let rows = 16 * warp as u32..16 * warp as u32 + 16;
                let (pages, first) = (&mut self.operand_pages, descriptor.start / PAGE_BYTES);
                let pages = pages.of(descriptor, form.trans_a, form.a, rows.clone());
                if !(checks && read_pages(shared, first, pages, &access)) {
                    for_chunks(descriptor, form.trans_a, form.a, rows, |address| {
                        faults.visit(shared, address, checks, &access);
                    });
                }
            }
        }
        let access =
            SharedAccess { clocks: &self.together, proxy: Proxy::Async, stamp, lanes: Lanes::ALL, pc };
        let shared = &mut self.blocks[block].shared;
        let rows = 0..u32::from(form.n);
        let pages = self.operand_pages.of(b, form.trans_b, form.b, rows.clone());
        if !(checks && read_pages(shared, b.start / PAGE_BYTES, pages, &access)) {
            for_chunks(b, form.trans_b, form.b, rows, |address| {
                faults.visit(shared, address, checks, &access);
            });
        }
        if let Some(mut found) = faults.conflict {
            // If the writing warp belongs to this warpgroup and has not fenced, the fence is what is missing first.
            let writer = usize::from(found.prior.agent);
            if (first..first + 4).contains(&writer)
                && self.warps[writer].clocks.edge(found.prior, Lanes::ALL, Proxy::Async) != Edge::Ordered
            {
                found.edge = Edge::MissingProxyFence;
            }
            self.report_conflict(first, 0, pc, block, false, found);
        }
        for (fault, kind, what) in [
            (
                faults.outside,
                FindingKind::OutOfBounds,
                "a matrix chunk outside of the allocations of shared memory",
            ),
            (
                faults.uninitialised,
                FindingKind::UninitialisedShared,
                "a matrix in shared memory that nothing was written to",
            ),
            (faults.barrier, FindingKind::MbarrierMisuse, "a matrix over an mbarrier in use"),
        ] {
            if let Some(address) = fault {
                self.report(first, 0, pc, kind, Severity::Error, |c| {
                    (what.to_string(), Some(c.shared_place(block, address)))
                });
            }
        }
        faults.outside.is_none()
    }
}

/// The first fault of each kind that the operands of a product show.
#[derive(Default)]
struct OperandFaults {
    conflict: Option<SharedConflict>,
    outside: Option<u32>,
    uninitialised: Option<u32>,
    barrier: Option<u32>,
}

impl OperandFaults {
    #[inline]
    fn visit(&mut self, shared: &mut SharedMemory, address: u32, checks: bool, access: &SharedAccess<'_>) {
        if address.saturating_add(CELL) > shared.dense() && !shared.contains(address, CELL) {
            self.outside.get_or_insert(address);
            return;
        }
        if !checks {
            return;
        }
        let cell = address / CELL;
        if !shared.is_plain(cell) {
            if shared.is_barrier(cell, 0xFFFF) {
                self.barrier.get_or_insert(address);
            }
            if !shared.initialised(cell, 0xFFFF) {
                self.uninitialised.get_or_insert(address);
            }
        }
        if let Some(found) = shared.shadow.read(cell, 0xFFFF, access) {
            self.conflict.get_or_insert(found);
        }
    }
}

/// Which cells of which pages an operand takes, by its layout and where it begins in a page. The products of a loop have
/// few layouts, so they are remembered.
#[derive(Default)]
pub struct OperandPages {
    known: Vec<(Layout, Vec<(u32, u64)>)>,
}

/// What the cells of an operand depend on, except the page that it begins in.
#[derive(PartialEq)]
struct Layout {
    /// Begins in the first page.
    descriptor: Descriptor,
    mn_major: bool,
    ty: MatrixTy,
    rows: Range<u32>,
}

/// How many layouts are remembered.
const MAX_LAYOUTS: usize = 64;

impl OperandPages {
    /// The pages of these rows of an operand, counted from the one that it begins in, and their cells, one bit per cell.
    pub(super) fn of(
        &mut self,
        descriptor: &Descriptor,
        mn_major: bool,
        ty: MatrixTy,
        rows: Range<u32>,
    ) -> &[(u32, u64)] {
        let descriptor = Descriptor { start: descriptor.start % PAGE_BYTES, ..*descriptor };
        let layout = Layout { descriptor, mn_major, ty, rows };
        let known = self.known.iter().position(|(of, _)| *of == layout);
        let place = known.unwrap_or_else(|| {
            let mut pages: Vec<(u32, u64)> = Vec::new();
            for_chunks(&layout.descriptor, mn_major, ty, layout.rows.clone(), |address| {
                let (page, cell) = (address / PAGE_BYTES, 1 << (address / CELL % PAGE as u32));
                match pages.iter_mut().rev().find(|(of, _)| *of == page) {
                    Some((_, cells)) => *cells |= cell,
                    None => pages.push((page, cell)),
                }
            });
            if self.known.len() == MAX_LAYOUTS {
                self.known.clear();
            }
            self.known.push((layout, pages));
            self.known.len() - 1
        });
        &self.known[place].1
    }
}

/// Records the read of an operand with these cells, counted from page `first`, if all of it lies in pages that are tracked
/// as a whole, hold values, and were written before it. False if it has to be recorded cell by cell.
fn read_pages(
    shared: &mut SharedMemory,
    first: u32,
    pages: &[(u32, u64)],
    access: &SharedAccess<'_>,
) -> bool {
    let ordered = pages.iter().all(|&(page, _)| {
        let page = first + page;
        (page + 1) * PAGE_BYTES <= shared.dense()
            && shared.is_plain_page(page)
            && shared.shadow.is_readable(page, access)
    });
    if ordered {
        for &(page, cells) in pages {
            shared.shadow.read_page(first + page, cells, access);
        }
    }
    ordered
}

/// Calls `f` with the address of every 16-byte chunk of these rows of an operand.
fn for_chunks(
    descriptor: &Descriptor,
    mn_major: bool,
    ty: MatrixTy,
    rows: Range<u32>,
    mut f: impl FnMut(u32),
) {
    if mn_major {
        let per_chunk = 128 / ty.bits();
        for chunk in rows.start / per_chunk..rows.end / per_chunk {
            for k in 0..256 / ty.bits() {
                f(descriptor.mn_major(chunk, k));
            }
        }
    } else {
        for row in rows {
            for chunk in 0..2 {
                f(descriptor.k_major(row, chunk));
            }
        }
    }
}
