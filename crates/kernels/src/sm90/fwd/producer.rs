//! The thread that moves tiles from global to shared memory; where tiles or pages have to be found, the warp.

use flashcore_ptx::{B32, B64, BulkHint, KernelBuilder, L2Evict, Operand, Pred, Reg, Scope, Shared};

use super::{
    Memory, PITCH, Schedule, Sizes, Turned, by_length, columns, packed,
    pages::{Pages, Pieces},
    panels,
    tiles::{Tile, each_tile, step},
};
use crate::{
    Phase, Spec,
    phase::wait_for_launch,
    sm90::{Sm90Params, ring::Ring},
};

pub(super) struct Producer<'a> {
    schedule: Schedule,
    spec: &'a Spec,
    sizes: Sizes,
    q: Ring,
    k: Ring,
    v: Ring,
    q_map: Reg<B64>,
    k_map: Reg<B64>,
    v_map: Reg<B64>,
    turned: Option<Turned>,
    told: Option<Shared>,
    pages: Option<Pages>,
    /// Where a warp finds tiles or pages: whether this is the lane that does the rest.
    lead: Option<Reg<Pred>>,
    /// The same where the warp is together within a tile, for its pages.
    leads: Option<Reg<Pred>>,
    /// Queries are read once, keys and values by every block of the head.
    once: Reg<B64>,
    again: Reg<B64>,
}

/// A tile of a tensor: panels side by side.
struct Copy {
    map: Reg<B64>,
    panels: u32,
    /// Of a panel.
    columns: u32,
    panel_bytes: u32,
    policy: Reg<B64>,
    /// As in [`Producer`].
    leads: Option<Reg<Pred>>,
    /// For tiles that the blocks of a cluster copy for each other: how many blocks, and the rows that each copies.
    part: Option<(u32, u32)>,
}

/// Where a tile is copied from.
#[derive(Clone, Copy)]
enum Origin {
    /// Rows of a tensor, one behind the other: the first, its head and its batch entry.
    Rows([Operand<B32>; 3]),
    /// Columns of a tensor whose rows are along the keys: the first, its head and its batch entry.
    Columns([Operand<B32>; 3]),
    /// Pages of a pool.
    Pages(Pieces),
}

impl<'a> Producer<'a> {
    pub fn new(k: &mut KernelBuilder, schedule: Schedule, spec: &'a Spec, memory: &Memory) -> Self {
        k.section("producer");
        let sizes = schedule.sizes(spec);
        let Schedule { stages, q_stages, .. } = schedule;
        let (q_map, k_map, v_map) = (
            k.tensor_map(Sm90Params::q_map),
            k.tensor_map(Sm90Params::k_map),
            k.tensor_map(Sm90Params::v_map),
        );
        for map in [q_map, k_map, v_map] {
            k.prefetch_tensormap(map);
        }
        let lead = schedule.needs_warp(spec).then(|| {
            let lane = k.laneid();
            k.setp_eq_u32(lane, 0u32)
        });
        Self {
            schedule,
            spec,
            sizes,
            q: Ring::producer(k, memory.q, sizes.q_slot, memory.q_bars, q_stages),
            k: Ring::producer(k, memory.k, sizes.k, memory.k_bars, stages),
            v: Ring::producer(k, memory.v, sizes.v, memory.v_bars, stages),
            q_map,
            k_map,
            v_map,
            turned: memory.turned,
            told: memory.told,
            pages: spec.page.map(|page| Pages::new(k, schedule, page)),
            lead,
            leads: lead.filter(|_| spec.page.is_some()),
            once: k.create_policy(L2Evict::First),
            // Keys that are cut into parts are so many that they are hardly ever read again.
            again: k.create_policy(if schedule.leaves_parts() { L2Evict::First } else { L2Evict::Last }),
        }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        wait_for_launch(k);
        Phase::Tile.begin(k);
        match self.told {
            None => each_tile(k, self.schedule, self.spec, |k, tile| self.tile(k, tile)),
            Some(told) => {
                let alone = self.lead.filter(|_| self.pages.is_none());
                let tile = |k: &mut KernelBuilder, tile: &Tile| once(k, alone, |k| self.tile(k, tile));
                if self.schedule.by_length {
                    by_length::each_found(k, self.schedule, self.spec, tile);
                } else {
                    packed::each_found(k, self.schedule, self.spec, tile);
                }
                k.comment("there are no more tiles");
                once(k, self.lead, |k| {
                    self.q.wait_free(k);
                    packed::tell_end(k, told, &self.q);
                    let filled = self.q.filled(k);
                    k.mbarrier_arrive(filled);
                });
            }
        }
        if let Some(turned) = self.turned {
            k.comment("there are no more values");
            once(k, self.lead, |k| {
                self.v.wait_free(k);
                let (word, filled) = (self.v.word(k, turned.left), self.v.filled(k));
                let none = k.mov_b32(0u32);
                k.st_shared(word, none);
                k.mbarrier_arrive(filled);
            });
        }
        k.end_trace();
    }

    fn tile(&self, k: &mut KernelBuilder, tile: &Tile) {
        if let Some(pages) = &self.pages {
            pages.ask(k, tile);
        }
        let keys = tile.keys(k, self.schedule);
        k.section("producer: one tile of queries");
        Phase::SlotWait.begin(k);
        self.q.wait_free(k);
        if self.leads.is_some() {
            // Or a lane could miss the phase that it waits for, while the others go on from tile to tile.
            k.bar_warp_sync();
        }
        if let Some(told) = self.told {
            once(k, self.leads, |k| match tile.part {
                Some(part) => by_length::tell(k, told, &self.q, tile, part),
                None => packed::tell(k, told, &self.q, tile),
            });
        }
        k.if_else(
            keys.any,
            |k| {
                self.load_q(k, tile);
                let at = k.mov_b32(keys.last);
                if let Some(pages) = &self.pages {
                    pages.begin(k, tile, at);
                }
                self.load_k(k, tile, at);
                k.while_(
                    |k| keys.follows(k, self.schedule, at),
                    |k, _| {
                        let next = step(k, self.schedule, at, 1);
                        if let Some(pages) = &self.pages {
                            pages.advance(k, next);
                        }
                        self.load_k(k, tile, next);
                        self.load_v(k, tile, at);
                        k.set(at, |k| k.mov_b32(next));
                    },
                );
                if let Some(pages) = &self.pages {
                    pages.end(k);
                }
                self.load_v(k, tile, at);
            },
            |k| {
                k.comment("nothing to fetch, but the slot counts");
                let filled = self.q.filled(k);
                once(k, self.leads, |k| k.mbarrier_arrive(filled));
            },
        );
        self.q.advance(k);
        if self.schedule.persistent {
            Phase::Tile.begin(k);
        }
    }

    /// How the blocks of a cluster divide a key tile.
    fn part(&self) -> Option<(u32, u32)> {
        let Schedule { multicast, .. } = self.schedule;
        (multicast > 1).then_some((multicast, self.schedule.boxes(self.spec).kv))
    }

    fn load_q(&self, k: &mut KernelBuilder, tile: &Tile) {
        let Sizes { q_panel, q_copied, .. } = self.sizes;
        let copy = Copy {
            map: self.q_map,
            panels: panels(self.spec.head_dim, self.spec.dtype),
            columns: columns(self.spec.dtype),
            panel_bytes: q_panel,
            policy: self.once,
            leads: self.leads,
            part: None,
        };
        Phase::CopyQ.begin(k);
        k.comment("the queries");
        let [_, row, head, batch] = tile.place(k, self.spec, 0, tile.rows.first_row);
        copy.start(k, &self.q, q_copied, &Origin::Rows([row, head, batch]));
    }

    fn load_k(&self, k: &mut KernelBuilder, tile: &Tile, at: Reg<B32>) {
        let copy = Copy {
            map: self.k_map,
            panels: panels(self.spec.head_dim, self.spec.dtype),
            columns: columns(self.spec.dtype),
            panel_bytes: self.sizes.kv_panel,
            policy: self.again,
            leads: self.leads,
            part: self.part(),
        };
        Phase::SlotWait.begin_tile(k, at);
        k.comment("a K tile, once its slot is free");
        self.k.wait_free(k);
        Phase::CopyK.begin_tile(k, at);
        let first_key = k.mul_lo_u32(at, self.schedule.block_n);
        let from = match &self.pages {
            None => Origin::Rows(tile.place_of_keys(k, first_key)),
            Some(pages) => Origin::Pages(pages.keys(k, first_key, tile.kv_head)),
        };
        copy.start(k, &self.k, self.sizes.k, &from);
        self.k.advance(k);
    }

    fn load_v(&self, k: &mut KernelBuilder, tile: &Tile, at: Reg<B32>) {
        let copy = Copy {
            map: self.v_map,
            panels: panels(
                if self.schedule.turned { self.schedule.block_n } else { self.spec.head_dim_v },
                self.spec.dtype,
            ),
            columns: columns(self.spec.dtype),
            panel_bytes: if self.schedule.turned { self.sizes.turned_panel } else { self.sizes.kv_panel },
            policy: self.again,
            leads: self.leads,
            part: self.part(),
        };
        Phase::SlotWait.begin_tile(k, at);
        k.comment("a V tile, once its slot is free");
        self.v.wait_free(k);
        Phase::CopyV.begin_tile(k, at);
        let first_key = k.mul_lo_u32(at, self.schedule.block_n);
        if let Some(turned) = self.turned {
            let (word, left) = (self.v.word(k, turned.left), k.sub_s32(tile.band.keys, first_key));
            once(k, self.leads, |k| k.st_shared(word, left));
        }
        let from = match &self.pages {
            _ if self.schedule.turned => Origin::Columns(tile.place_of_keys(k, first_key)),
            None => Origin::Rows(tile.place_of_keys(k, first_key)),
            Some(pages) => Origin::Pages(pages.values(k, first_key, tile.kv_head)),
        };
        copy.start(k, &self.v, self.sizes.v_copied, &from);
        self.v.advance(k);
    }
}

impl Copy {
    fn start(&self, k: &mut KernelBuilder, ring: &Ring, bytes: u32, from: &Origin) {
        let (slot, filled) = (ring.address(k), ring.filled(k));
        match from {
            Origin::Rows(place) => once(k, self.leads, |k| self.rows(k, slot, filled, bytes, *place)),
            Origin::Columns(place) => {
                k.mbarrier_arrive_expect_tx(filled, bytes);
                let hint = BulkHint::new().policy(self.policy);
                self.all_rows(k, slot, *place, filled, hint);
            }
            Origin::Pages(pieces) => {
                once(k, self.leads, |k| k.mbarrier_arrive_expect_tx(filled, bytes));
                let hint = BulkHint::new().policy(self.policy);
                pieces.each(k, |k, before, place| {
                    once(k, self.leads, |k| self.panels(k, slot, before, place, filled, hint));
                });
            }
        }
    }

    /// Copies rows that lie one behind the other.
    fn rows(
        &self,
        k: &mut KernelBuilder,
        mut slot: Reg<B32>,
        filled: Reg<B32>,
        bytes: u32,
        [mut row, head, batch]: [Operand<B32>; 3],
    ) {
        let mut hint = BulkHint::new().policy(self.policy);
        k.mbarrier_arrive_expect_tx(filled, bytes);
        if let Some((blocks, rows)) = self.part {
            k.comment("this block's part, for all blocks of the cluster");
            let rank = k.cluster_ctarank();
            // Its consumers then know that this block's have left the slot's previous phase.
            for distance in 1..blocks {
                let other = k.xor_b32(rank, distance);
                let there = k.mapa(filled, other);
                k.mbarrier_arrive_cluster(there, Scope::Cta);
            }
            row = k.mad_lo_u32(rank, rows, row).into();
            slot = k.mad_lo_u32(rank, rows * PITCH, slot);
            let everyone = k.mov_b16((1_u16 << blocks) - 1);
            hint = hint.multicast(everyone);
        }
        self.panels(k, slot, 0, [row, head, batch], filled, hint);
    }

    /// Copies a box of each panel, of all rows, given the first column and its head and batch entry.
    fn all_rows(
        &self,
        k: &mut KernelBuilder,
        slot: Reg<B32>,
        [first, head, batch]: [Operand<B32>; 3],
        filled: Reg<B32>,
        hint: BulkHint,
    ) {
        for panel in 0..self.panels {
            let column = k.add_u32(first, panel * self.columns);
            let to = slot.at((panel * self.panel_bytes) as i32);
            k.tensor_load(to, self.map, &[column.into(), 0u32.into(), head, batch], filled, hint);
        }
    }

    /// Copies a box of each panel, given the bytes before it in the panel and its row, head and batch entry or page.
    fn panels(
        &self,
        k: &mut KernelBuilder,
        slot: Reg<B32>,
        before: u32,
        [row, head, batch]: [Operand<B32>; 3],
        filled: Reg<B32>,
        hint: BulkHint,
    ) {
        for panel in 0..self.panels {
            let column = Operand::from(panel * self.columns);
            let to = slot.at((panel * self.panel_bytes + before) as i32);
            k.tensor_load(to, self.map, &[column, row, head, batch], filled, hint);
        }
    }
}

/// Runs the body in one lane of a warp; where only one thread is here, in that.
fn once(k: &mut KernelBuilder, leads: Option<Reg<Pred>>, body: impl FnOnce(&mut KernelBuilder)) {
    match leads {
        None => body(k),
        Some(leads) => k.if_(leads, body),
    }
}
