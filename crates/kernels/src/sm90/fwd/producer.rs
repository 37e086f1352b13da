//! The thread that moves tiles from global to shared memory.

use flashcore_ptx::{B32, B64, BulkHint, KernelBuilder, L2Evict, Operand, Reg, Scope};

use super::{
    Memory, PITCH, Schedule, Sizes, Turned, columns, panels,
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
    /// For tiles that the blocks of a cluster copy for each other: how many blocks, and the rows that each copies.
    part: Option<(u32, u32)>,
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
            once: k.create_policy(L2Evict::First),
            // Keys that are cut into parts are so many that they are hardly ever read again.
            again: k.create_policy(if schedule.parts > 1 { L2Evict::First } else { L2Evict::Last }),
        }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        wait_for_launch(k);
        Phase::Tile.begin(k);
        each_tile(k, self.schedule, self.spec, |k, tile| self.tile(k, tile));
        if let Some(turned) = self.turned {
            k.comment("there are no more values");
            self.v.wait_free(k);
            let (word, filled) = (self.v.word(k, turned.left), self.v.filled(k));
            let none = k.mov_b32(0u32);
            k.st_shared(word, none);
            k.mbarrier_arrive(filled);
        }
        k.end_trace();
    }

    fn tile(&self, k: &mut KernelBuilder, tile: &Tile) {
        let keys = tile.keys(k, self.schedule);
        k.section("producer: one tile of queries");
        Phase::SlotWait.begin(k);
        self.q.wait_free(k);
        k.if_else(
            keys.any,
            |k| {
                self.load_q(k, tile);
                let at = k.mov_b32(keys.last);
                self.load_k(k, tile, at);
                k.while_(
                    |k| keys.follows(k, self.schedule, at),
                    |k, _| {
                        let next = step(k, self.schedule, at, 1);
                        self.load_k(k, tile, next);
                        self.load_v(k, tile, at);
                        k.set(at, |k| k.mov_b32(next));
                    },
                );
                self.load_v(k, tile, at);
            },
            |k| {
                k.comment("nothing to fetch, but the slot counts");
                let filled = self.q.filled(k);
                k.mbarrier_arrive(filled);
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
        (multicast > 1).then_some((multicast, self.schedule.boxes().kv))
    }

    fn load_q(&self, k: &mut KernelBuilder, tile: &Tile) {
        let Sizes { q_panel, q_copied, .. } = self.sizes;
        let copy = Copy {
            map: self.q_map,
            panels: panels(self.spec.head_dim, self.spec.dtype),
            columns: columns(self.spec.dtype),
            panel_bytes: q_panel,
            policy: self.once,
            part: None,
        };
        Phase::CopyQ.begin(k);
        k.comment("the queries");
        let place = tile.place(k, self.spec, tile.rows.first_row);
        copy.start(k, &self.q, q_copied, place);
    }

    fn load_k(&self, k: &mut KernelBuilder, tile: &Tile, at: Reg<B32>) {
        let copy = Copy {
            map: self.k_map,
            panels: panels(self.spec.head_dim, self.spec.dtype),
            columns: columns(self.spec.dtype),
            panel_bytes: self.sizes.kv_panel,
            policy: self.again,
            part: self.part(),
        };
        Phase::SlotWait.begin_tile(k, at);
        k.comment("a K tile, once its slot is free");
        self.k.wait_free(k);
        Phase::CopyK.begin_tile(k, at);
        let first_key = k.mul_lo_u32(at, self.schedule.block_n);
        copy.start(k, &self.k, self.sizes.k, [first_key, tile.kv_head, tile.rows.batch]);
        self.k.advance(k);
    }

    fn load_v(&self, k: &mut KernelBuilder, tile: &Tile, at: Reg<B32>) {
        let copy = Copy {
            map: self.v_map,
            panels: panels(self.spec.head_dim_v, self.spec.dtype),
            columns: columns(self.spec.dtype),
            panel_bytes: self.sizes.kv_panel,
            policy: self.again,
            part: self.part(),
        };
        Phase::SlotWait.begin_tile(k, at);
        k.comment("a V tile, once its slot is free");
        self.v.wait_free(k);
        Phase::CopyV.begin_tile(k, at);
        let first_key = k.mul_lo_u32(at, self.schedule.block_n);
        if let Some(turned) = self.turned {
            let (word, left) = (self.v.word(k, turned.left), k.sub_s32(tile.band.keys, first_key));
            k.st_shared(word, left);
        }
        copy.start(k, &self.v, self.sizes.v, [first_key, tile.kv_head, tile.rows.batch]);
        self.v.advance(k);
    }
}

impl Copy {
    /// Starts to copy the tile whose first column is at these coordinates.
    fn start(&self, k: &mut KernelBuilder, ring: &Ring, bytes: u32, [mut row, head, batch]: [Reg<B32>; 3]) {
        let (mut slot, filled) = (ring.address(k), ring.filled(k));
        k.mbarrier_arrive_expect_tx(filled, bytes);
        let mut hint = BulkHint::new().policy(self.policy);
        if let Some((blocks, rows)) = self.part {
            k.comment("this block's part, for all blocks of the cluster");
            let rank = k.cluster_ctarank();
            // Its consumers then know that this block's have left the slot's previous phase.
            for distance in 1..blocks {
                let other = k.xor_b32(rank, distance);
                let there = k.mapa(filled, other);
                k.mbarrier_arrive_cluster(there, Scope::Cta);
            }
            row = k.mad_lo_u32(rank, rows, row);
            slot = k.mad_lo_u32(rank, rows * PITCH, slot);
            let everyone = k.mov_b16((1_u16 << blocks) - 1);
            hint = hint.multicast(everyone);
        }
        for panel in 0..self.panels {
            let column = Operand::from(panel * self.columns);
            let to = slot.at((panel * self.panel_bytes) as i32);
            k.tensor_load(to, self.map, &[column, row.into(), head.into(), batch.into()], filled, hint);
        }
    }
}
