//! The forward kernel for Hopper: `wgmma`, TMA, mbarrier pipelines, warp specialisation.
//!
//! One producer thread moves tiles of Q, K and V into swizzled shared memory by TMA. Each of one to four consumer
//! warpgroups holds 64 queries: it multiplies them with a key tile from shared memory, turns the scores into
//! probabilities in its registers, and multiplies those with the value tile. The product with the next key tile is
//! issued before the product with this value tile, so that the tensor cores work during the softmax; with several
//! warpgroups, named barriers make them take turns at the tensor cores, so that one's softmax overlaps another's
//! products. A persistent block takes one query tile after another, and the copies for the next tile overlap the end of
//! this one.
//!
//! Where the tiles are too few to fill the GPU, the warpgroups of a block share the keys of the same 64 queries, and
//! the blocks of a cluster those of one tile; they merge their results through shared memory, their own and each
//! other's. Where even a cluster is too small, the keys are cut into parts, each a block of its own anywhere on the
//! GPU: it writes its partial result to global memory, and [`combine`](crate::combine) merges them. Where only the GPU knows
//! how many keys each sequence has, persistent blocks may share all keys `by_length`: each gets as many key tiles, of one
//! sequence or of several.
//!
//! Keys and values may lie in `pages` of a pool, and sequences `packed` one behind the other; a whole warp is then the
//! producer.
//!
//! Of 8-bit floats, `wgmma` takes both tiles only with their rows along the sum. V's rows are along the head dim, so the
//! warps beside the producer turn each tile around in shared memory. Probabilities are scaled up by 2^8, which uses the
//! range of e4m3 best; and as the tensor cores add 8-bit products with 14 bits, each key tile is added up apart, and then
//! to the output in f32, or the output of every thousand keys or so is put aside.

mod aside;
mod blocks;
mod by_length;
mod consumer;
mod gather;
mod merge;
mod packed;
mod pages;
mod partial;
mod producer;
mod softmax;
mod tiles;
mod turn;

pub(crate) use packed::ends;

pub(in crate::sm90) use self::softmax::hide;

use flashcore_ptx::{ClusterArrive, GridDep, KernelBuilder, Shared, SharedLayout, Target, TensorMap};

use self::{consumer::Consumer, producer::Producer, turn::Turner};
use super::{PackedParams, Sm90Params};
use crate::{
    Args, Blocks, ElementType, Family, Geometry, Map, Packed, ScheduleError, Spec,
    family::{MAX_REGISTERS, check_blocks, check_registers, schedule},
    parts::{
        params::{BlockDescaleParams, DescaleParams, PageParams},
        shares::ShareParams,
    },
};

/// Queries per warpgroup: what one `wgmma` takes.
pub(crate) const ROWS: u32 = 64;
/// Bytes of a panel's row, within which the swizzle permutes.
pub(crate) const PITCH: u32 = 128;
/// Registers besides the fragments: softmax state, addresses, barriers.
const OTHER_REGISTERS: u32 = 26;
/// The same with 8-bit floats.
const FP8_OTHER_REGISTERS: u32 = 32;
/// The same where their sums are flushed: between two tiles, some of those registers are free for others.
const FLUSHED_OTHER_REGISTERS: u32 = 24;
/// Registers more where blocks of keys have descales of their own: where these are, and the two of a tile.
const BLOCK_REGISTERS: u32 = 8;
/// Registers more with a softcap: its polynomial and what is between.
const CAP_REGISTERS: u32 = 10;
/// The same with 8-bit floats, whose scores are always scaled.
const FP8_CAP_REGISTERS: u32 = 24;

schedule! {
    /// The knobs of the kernel.
    pub struct Schedule {
        /// Consumer warpgroups of 64 queries each: 1 to 4.
        pub warpgroups: u32,
        /// Keys per tile: a multiple of 16.
        pub block_n: u32,
        /// Slots for K tiles, and as many for V tiles.
        pub stages: u32,
        /// Slots for Q tiles: with two, the next tile's queries are fetched while this one is computed.
        pub q_stages: u32,
        /// Blocks per multiprocessor: up to four of one warpgroup, or two of two.
        pub ctas: u32,
        /// Blocks of a cluster that share the keys of a tile.
        pub split: u32,
        /// Whether warpgroups take turns at the tensor cores.
        pub pingpong: bool,
        /// The output is rescaled when the largest probability of a row has grown by more than this power of two: 0 to 8.
        /// At 0 the largest probability is exactly 1, as it is not rounded; otherwise it is rounded like the others.
        pub lazy: u32,
        /// Of eight exponentials in unmasked tiles, how many are computed by a polynomial.
        pub poly: u32,
        /// Whether blocks are persistent, taking one tile after another.
        pub persistent: bool,
        /// Under a causal mask, whether persistent blocks take tiles in pairs of a long and a short one, rather than
        /// longest first.
        pub pairs: bool,
        /// Whether the warpgroups of a block share the keys of the same 64 queries, rather than having queries of their own.
        pub together: bool = false,
        /// Parts that the keys of a tile are cut into, one block each; [`combine`](crate::combine) merges what they
        /// write to global memory.
        pub parts: u32 = 1,
        /// Whether all blocks share all keys, equally many key tiles each, by the lengths that the GPU finds. Also merged by
        /// [`combine`](crate::combine).
        pub by_length: bool = false,
        /// Whether blocks that share keys take their tiles in turn, so that what they read at a time lies together, rather than a
        /// stretch each.
        pub in_turn: bool = false,
        /// Blocks of a cluster that have neighbouring tiles of queries and the same keys: each copies its part of every key
        /// tile for all of them.
        pub multicast: u32 = 1,
        /// After how many key tiles the sums of the tensor cores are added to others in f32, so that they do not drift over
        /// many keys: 0 for never; with 1 the products with a value tile are added up in registers of their own, with more
        /// the output is put aside in global memory. For 8-bit floats; the tensor cores add 16-bit ones in f32 anyway.
        pub flush: u32 = 1,
        /// Whether the queries are kept in registers, rather than read from shared memory for every key tile.
        pub q_regs: bool = false,
        /// For 8-bit floats: whether V lies turned around in memory, as [`quantize`](crate::quantize) can write it, so that no warps
        /// of the block turn it around.
        pub turned: bool = false,
    }
}

/// The order in which query tiles are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walk {
    /// Head by head.
    Plain,
    /// Head by head, a long tile and a short one together, so that all work tiles have the same size.
    Pairs,
    /// Sections of heads, longest tiles first; persistent blocks go through every other round backwards.
    Sections,
}

/// A kernel's shared memory.
struct Memory {
    layout: SharedLayout,
    q: Shared,
    k: Shared,
    v: Shared,
    gathered: Shared,
    exchange: Shared,
    q_bars: Shared,
    k_bars: Shared,
    v_bars: Shared,
    merged: Shared,
    /// For 8-bit floats.
    turned: Option<Turned>,
    /// Where the producer finds tiles: what consumers are told of those whose queries are in the slots.
    told: Option<Shared>,
}

/// The part of a kernel's shared memory that is for V tiles that are turned around.
#[derive(Clone, Copy)]
struct Turned {
    slots: Shared,
    bars: Shared,
    /// For each slot of V as it was copied, a word from the producer to those who turn it around.
    left: Shared,
}

/// Bytes of the tiles.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub q_panel: u32,
    pub kv_panel: u32,
    /// Of a tile of Q, what is copied.
    pub q_copied: u32,
    pub k: u32,
    pub v: u32,
    /// Of a tile of V, what is copied.
    pub v_copied: u32,
    /// A slot of Q, where the output is staged too.
    pub q_slot: u32,
    /// A panel of a V tile that is turned around: 128 keys.
    pub turned_panel: u32,
    pub turned: u32,
}

/// Columns of a panel.
pub(crate) fn columns(dtype: ElementType) -> u32 {
    PITCH / dtype.size()
}

/// Panels of a head dim.
pub(crate) fn panels(head_dim: u32, dtype: ElementType) -> u32 {
    head_dim.div_ceil(columns(dtype))
}

/// The rows of the boxes in which each tensor is copied; boxes are 128 bytes wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boxes {
    /// Of the queries.
    pub q: u32,
    /// Of the keys, and of the values where these lie likewise.
    pub kv: u32,
    /// Of the values: where they are turned around, a column's keys are a row.
    pub v: u32,
    /// Of the output.
    pub o: u32,
}

impl Schedule {
    /// How many blocks can share the keys of a tile: every GPU with clusters can run that many together.
    pub const SPLITS: [u32; 4] = [1, 2, 4, 8];

    /// The most parts of the keys: two per multiprocessor of the largest Hopper.
    pub const MOST_PARTS: u32 = 264;

    /// Every schedule of the search space; [`crate::Schedule::check`] says which of them fit a spec. Knobs that have no
    /// effect with the others' values stay at one value.
    pub fn grid() -> Vec<Schedule> {
        let mut grid = Vec::new();
        for warpgroups in 1..=4 {
            let ctas = 1..=Self::most_ctas(warpgroups);
            // How warpgroups interact: independently, in turns, or together.
            let each_other: &[(bool, bool)] = if warpgroups == 1 {
                &[(false, false)]
            } else {
                &[(false, false), (true, false), (false, true)]
            };
            let ends = Self::SPLITS.map(|split| (false, false, split));
            let stays = [false, true].map(|pairs| (true, pairs, 1));
            let walks: Vec<(bool, bool, u32)> = ends.into_iter().chain(stays).collect();
            // Whether two blocks copy key tiles for each other.
            let alone_or_not = |split: u32, together: bool| {
                1..=if warpgroups > 1 && split == 1 && !together { 2 } else { 1 }
            };
            for (block_n, stages) in (16..=256).step_by(16).flat_map(|n| (2..=4).map(move |s| (n, s))) {
                for (q_stages, ctas) in (1..=2).flat_map(|q| ctas.clone().map(move |c| (q, c))) {
                    for &(persistent, pairs, split) in &walks {
                        for &(pingpong, together) in each_other {
                            let softmaxes = [0, 2, 8].into_iter().flat_map(|l| (0..=4).map(move |p| (l, p)));
                            for (multicast, q_regs, (lazy, poly)) in alone_or_not(split, together)
                                .flat_map(|blocks| [false, true].map(|q_regs| (blocks, q_regs)))
                                .flat_map(|(blocks, q_regs)| {
                                    softmaxes.clone().map(move |it| (blocks, q_regs, it))
                                })
                            {
                                grid.push(Schedule {
                                    warpgroups,
                                    block_n,
                                    stages,
                                    q_stages,
                                    ctas,
                                    split,
                                    pingpong,
                                    lazy,
                                    poly,
                                    persistent,
                                    pairs,
                                    together,
                                    parts: 1,
                                    by_length: false,
                                    in_turn: false,
                                    multicast,
                                    flush: 1,
                                    q_regs,
                                    turned: false,
                                });
                            }
                        }
                    }
                }
            }
        }
        grid
    }

    /// The rows of the boxes.
    pub fn boxes(self, spec: &Spec) -> Boxes {
        let copied = self.block_n / self.multicast;
        let kv = spec.page.map_or(copied, |page| pages::piece(copied, page));
        Boxes { q: self.rows(), kv, v: if self.turned { spec.head_dim_v } else { kv }, o: ROWS }
    }

    /// Queries per block.
    pub fn rows(self) -> u32 {
        if self.together { ROWS } else { ROWS * self.warpgroups }
    }

    /// Queries per work tile: those of all blocks that share key tiles.
    pub fn tile_rows(self) -> u32 {
        self.rows() * self.multicast
    }

    /// Rows per work tile that are taken: those of whole queries.
    pub fn rows_taken(self, spec: &Spec) -> u32 {
        self.tile_rows() / spec.rows_per_query * spec.rows_per_query
    }

    /// Rows of a box of queries: as many whole queries as a block's rows begin.
    fn box_rows(self, spec: &Spec) -> u32 {
        self.rows().next_multiple_of(spec.rows_per_query)
    }

    /// Blocks per cluster.
    fn cluster(self) -> u32 {
        self.split * self.multicast
    }

    /// Warpgroups of a block that read the same key tile.
    fn readers(self) -> u32 {
        if self.together { 1 } else { self.warpgroups }
    }

    /// How many key tiles a warpgroup advances at a time.
    fn stride(self) -> u32 {
        if self.together { self.warpgroups } else { 1 }
    }

    /// The order in which query tiles are taken. Without a right bound, all are equally long; and nearly so where they
    /// have few queries.
    pub fn order(self, spec: &Spec) -> Walk {
        match (spec.right && spec.rows_per_query == 1, self.pairs && self.persistent) {
            _ if self.by_length => Walk::Plain,
            (false, _) => Walk::Plain,
            (true, true) => Walk::Pairs,
            (true, false) => Walk::Sections,
        }
    }

    /// Whether the output is stored from shared memory, by TMA; else from registers.
    fn stores_by_tma(self) -> bool {
        self.split == 1 && !self.leaves_parts()
    }

    /// Whether blocks leave partial results, which are merged by another launch.
    pub fn leaves_parts(self) -> bool {
        self.parts > 1 || self.by_length
    }

    /// Whether the producer is a whole warp, rather than one thread.
    fn needs_warp(self, spec: &Spec) -> bool {
        self.by_length || pages::needs_warp(spec)
    }

    /// Whether the order of the tiles depends on how many heads are processed together.
    pub fn has_sections(self, spec: &Spec) -> bool {
        self.order(spec) == Walk::Sections
    }

    /// The power of two by which the sums of weights in its partial results are scaled down.
    pub fn shift(self, spec: &Spec) -> u32 {
        softmax::shift(self.lazy, spec.dtype) as u32
    }

    fn consumer_threads(self) -> u32 {
        128 * self.warpgroups
    }

    /// Whether warps of a block turn V around.
    fn turns(self, spec: &Spec) -> bool {
        spec.dtype.is_fp8() && !self.turned
    }

    /// One warpgroup needs no registers from its producer, which can then be a single warp, unless V is turned around.
    fn threads(self, spec: &Spec) -> u32 {
        let alone = self.warpgroups == 1 && !self.turns(spec);
        self.consumer_threads() + if alone { 32 } else { 128 }
    }

    /// Registers per producer thread and per consumer thread, where `setmaxnreg` redistributes them. A block has only
    /// those that it was launched with: if the shares added up to more, its warps would wait forever.
    fn shares(self, spec: &Spec) -> Option<(u16, u16)> {
        match (self.warpgroups, self.ctas) {
            (1, _) => None,
            // Those who turn V around need more, and so does a producer that tells them of its keys.
            (2, 1) if self.turns(spec) => Some((40, 232)),
            (2, _) if self.turns(spec) => Some((40, 96)),
            (3, _) if self.turns(spec) => Some((56, 152)),
            (4, _) if self.turns(spec) => Some((56, 104)),
            // A producer that copies for others needs more.
            (2, 1) if self.multicast > 1 || pages::needs_warp(spec) => Some((40, 232)),
            // One that finds its tiles or pages, too.
            (2, _) if pages::needs_warp(spec) => Some((32, 104)),
            (4, _) if pages::needs_warp(spec) => Some((32, 112)),
            (2, 1) => Some((24, 240)),
            (2, _) => Some((24, 104)),
            (3, _) => Some((32, 160)),
            _ => Some((24, 112)),
        }
    }

    /// The most blocks per multiprocessor, given their warpgroups.
    const fn most_ctas(warpgroups: u32) -> u32 {
        match warpgroups {
            1 => 4,
            2 => 2,
            _ => 1,
        }
    }

    /// The most registers that a consumer's thread can have.
    fn register_limit(self, spec: &Spec) -> u32 {
        match self.shares(spec) {
            Some((_, consumer)) => u32::from(consumer),
            // The assembler rounds down to a multiple of 32 here.
            None => (65536 / (self.ctas * self.threads(spec)) / 32 * 32).min(MAX_REGISTERS),
        }
    }

    pub(crate) fn sizes(self, spec: &Spec) -> Sizes {
        let box_rows = self.box_rows(spec);
        // Eight rows are what the swizzle permutes.
        let (q_panel, kv_panel) = (box_rows.next_multiple_of(8) * PITCH, self.block_n * PITCH);
        let (of_qk, of_v) = (panels(spec.head_dim, spec.dtype), panels(spec.head_dim_v, spec.dtype));
        let (q, o) = (of_qk * q_panel, panels(spec.head_dim_v, spec.out()) * q_panel);
        let turned_panel = turn::rows(spec) * PITCH;
        let of_keys = panels(self.block_n, spec.dtype);
        let turned = of_keys * turned_panel;
        let (k, v) = (of_qk * kv_panel, of_v * kv_panel);
        // A slot of V holds whole panels of keys, of which what lies behind a tile is not used.
        let (v, v_copied) = if self.turned { (turned, of_keys * spec.head_dim_v * PITCH) } else { (v, v) };
        let q_copied = of_qk * box_rows * PITCH;
        Sizes { q_panel, kv_panel, q_copied, k, v, v_copied, q_slot: q.max(o), turned_panel, turned }
    }

    /// Columns of the output whose sums over one key tile are in registers at a time, where they are [flushed](Self::flush)
    /// to the output: all of them or a half, a quarter or an eighth, as there is room.
    fn flushed_columns(self, spec: &Spec) -> Option<u32> {
        let all = spec.head_dim_v;
        let parts = || {
            [1, 2, 4, 8].into_iter().filter(|parts| all.is_multiple_of(8 * parts)).map(|parts| all / parts)
        };
        let fits = |columns: &u32| self.registers(spec, *columns) <= self.register_limit(spec);
        (spec.dtype.is_fp8() && self.flush == 1)
            .then(|| parts().find(fits).or(parts().next_back()).unwrap_or(all))
    }

    /// Bytes per block of the sums that are put aside in global memory.
    pub fn aside_bytes(self, spec: &Spec) -> u32 {
        let one = ROWS * spec.head_dim_v * 4;
        if spec.dtype.is_fp8() && self.flush > 1 { self.warpgroups * one } else { 0 }
    }

    /// The most keys of which nothing is put aside: those of the first tile and of as many as come before a flush.
    pub fn keys_before_aside(self) -> u32 {
        self.block_n * (1 + self.flush)
    }

    /// About how many registers a consumer's thread needs, given how many columns are added up apart.
    fn registers(self, spec: &Spec, flushed: u32) -> u32 {
        let probabilities = self.block_n * spec.dtype.size() / 8;
        let cap = match (spec.softcap, spec.dtype.is_fp8()) {
            (false, _) => 0,
            (true, false) => CAP_REGISTERS,
            (true, true) => FP8_CAP_REGISTERS,
        };
        let others = match (spec.dtype.is_fp8(), flushed) {
            (false, _) => OTHER_REGISTERS,
            (true, 0) => FP8_OTHER_REGISTERS,
            (true, _) => FLUSHED_OTHER_REGISTERS,
        };
        let queries = if self.q_regs { panels(spec.head_dim, spec.dtype) * PITCH / 8 } else { 0 };
        let blocks = if spec.descale_keys.is_some() { BLOCK_REGISTERS } else { 0 };
        self.block_n / 2 + probabilities + queries + spec.head_dim_v / 2 + flushed / 2 + others + cap + blocks
    }

    fn memory(self, spec: &Spec) -> Memory {
        let sizes = self.sizes(spec);
        let mut layout = SharedLayout::new();
        let q = layout.alloc("q", self.q_stages * sizes.q_slot, 1024);
        let k = layout.alloc("k", self.stages * sizes.k, 1024);
        let v = layout.alloc("v", self.stages * sizes.v, 1024);
        let gathered = layout.alloc("gathered", gather::bytes(self, spec), 16);
        let exchange = layout.alloc("exchange", merge::exchange_bytes(self, spec), 16);
        let mut bars = |name: &str, stages: u32| layout.alloc(name, 16 * stages, 8);
        let q_bars = bars("q barriers", self.q_stages);
        let k_bars = bars("k barriers", self.stages);
        let v_bars = bars("v barriers", self.stages);
        let merged = layout.alloc("merged", 8, 8);
        let turned = self.turns(spec).then(|| {
            let slots = layout.alloc("turned v", self.stages * sizes.turned, 1024);
            let bars = layout.alloc("turned v barriers", 16 * self.stages, 8);
            Turned { slots, bars, left: layout.alloc("keys left", 4 * self.stages, 4) }
        });
        let tells = spec.packed_q || self.by_length;
        let told = tells.then(|| layout.alloc("tiles told", packed::bytes(self), 16));
        Memory { layout, q, k, v, gathered, exchange, q_bars, k_bars, v_bars, merged, turned, told }
    }
}

impl Family for Schedule {
    const PROGRAMMATIC: bool = true;

    fn geometry(self, spec: &Spec) -> Geometry {
        Geometry {
            rows: self.rows_taken(spec),
            threads: self.threads(spec),
            shared_bytes: self.memory(spec).layout.bytes(),
            blocks: if spec.packed_q {
                Blocks::Packed { resident: self.ctas }
            } else if self.by_length {
                Blocks::Shares { resident: self.ctas }
            } else {
                Blocks::Row {
                    cluster: self.cluster(),
                    resident: self.persistent.then_some(self.ctas),
                    parts: self.parts,
                }
            },
        }
    }

    fn check(self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        let refuse = |reason: String| Err(ScheduleError::Malformed { reason });
        if !(1..=4).contains(&self.warpgroups) {
            return refuse(format!("{} warpgroups: possible are 1 to 4", self.warpgroups));
        }
        if !(16..=256).contains(&self.block_n) || !self.block_n.is_multiple_of(16) {
            return refuse(format!("block_n {}: possible is a multiple of 16 from 16 to 256", self.block_n));
        }
        if !(2..=8).contains(&self.stages) || !(1..=2).contains(&self.q_stages) {
            return refuse(format!(
                "{} stages and {} for q: possible are 2 to 8, and 1 or 2",
                self.stages, self.q_stages
            ));
        }
        if !(1..=Self::most_ctas(self.warpgroups)).contains(&self.ctas) {
            return refuse(format!(
                "{} blocks of {} warpgroups on a multiprocessor: possible are 1 to 4 blocks of one, or 2 of two",
                self.ctas, self.warpgroups
            ));
        }
        let values = spec.head_dim_v / 8;
        if !Self::SPLITS.contains(&self.split) || !values.is_multiple_of(self.split) {
            return refuse(format!(
                "split {}: possible are {:?}, and head_dim_v / 8 must be a multiple",
                self.split,
                Self::SPLITS
            ));
        }
        if self.split > 1 && self.warpgroups > 1 && !self.together {
            return refuse(
                "blocks that share a tile have one warpgroup, or several together: take warpgroups=1, split=1 or \
                 together=1"
                    .into(),
            );
        }
        // Otherwise a warpgroup would get a slot whose previous phase it did not see, and mistake that phase for the
        // one that it waits for: a phase is known only by its parity.
        if self.together && (self.warpgroups == 1 || !self.stages.is_multiple_of(self.warpgroups)) {
            return refuse(format!(
                "{} warpgroups together on {} stages: possible are 2 to 4, and a multiple of as many stages",
                self.warpgroups, self.stages
            ));
        }
        if self.together && (self.persistent || self.pingpong) {
            return refuse(
                "warpgroups together end with their tile, and take no turns: take persistent=0 and pingpong=0"
                    .into(),
            );
        }
        if self.split > 1 && self.persistent {
            return refuse("blocks that share a tile end with it: take persistent=0 or split=1".into());
        }
        if !(1..=Self::MOST_PARTS).contains(&self.parts) {
            return refuse(format!("{} parts: possible are 1 to {}", self.parts, Self::MOST_PARTS));
        }
        if self.parts > 1 && (self.persistent || self.split > 1) {
            return refuse(
                "blocks that take a part of the keys end with it, and are in no cluster: take persistent=0 and split=1"
                    .into(),
            );
        }
        if self.by_length {
            self.check_by_length(spec)?;
        }
        let alone = self.parts * self.split == 1;
        if self.in_turn && (alone || self.warpgroups > 1 && !self.together) {
            return refuse(
                "blocks that take key tiles in turn are several, whose warpgroups have the same queries: take parts or split from 2 \
                 on, and warpgroups=1 or together=1"
                    .into(),
            );
        }
        if !(1..=2).contains(&self.multicast) {
            return refuse(format!("multicast {}: possible are 1 and 2", self.multicast));
        }
        if self.multicast > 1
            && (self.warpgroups == 1 || self.together || self.cluster() > 2 || self.parts > 1)
        {
            return refuse(
                "blocks that share key tiles have several warpgroups with queries of their own: take warpgroups from 2 \
                 to 4, together=0, split=1 and parts=1"
                    .into(),
            );
        }
        let rows = spec.rows_per_query;
        if rows > ROWS || rows > 1 && self.tile_rows() > self.rows() {
            return refuse(format!(
                "{rows} heads as rows of one tile: possible are up to {ROWS}, with multicast=1"
            ));
        }
        if rows > 1 && self.rows() > ROWS && !ROWS.is_multiple_of(rows) {
            return refuse(format!(
                "{rows} heads as rows of several warpgroups: possible are 1, 2, 4 and so on up to {ROWS}; or take warpgroups=1 or \
                 together=1"
            ));
        }
        let shares = self.cluster() > 1 || self.parts > 1 || self.together || spec.rows_per_query > 1;
        if spec.packed_q && (shares || !self.persistent || self.aside_bytes(spec) > 0) {
            return refuse(
                "blocks that find their tiles among packed sequences are persistent, have their rows and keys for themselves, and \
                 put nothing aside: take persistent=1, split=1, parts=1, together=0, multicast=1 and, with e4m3, flush=1"
                    .into(),
            );
        }
        if spec.page.is_some() && self.multicast > 1 {
            return refuse("blocks copy no pages for each other: take multicast=1".into());
        }
        if spec.page.is_some() && self.in_turn {
            return refuse("pages are looked up one key tile after the other: take in_turn=0".into());
        }
        if self.lazy > 8 {
            return refuse(format!("lazy {}: possible are 0 to 8", self.lazy));
        }
        if self.poly > 8 {
            return refuse(format!("poly {}: possible are 0 to 8 of eight", self.poly));
        }
        if spec.dtype.is_fp8() {
            self.check_fp8(spec)?;
        }
        if self.turned && (!spec.dtype.is_fp8() || spec.packed_q || spec.packed_k || spec.page.is_some()) {
            return refuse("V that lies turned around is dense and of e4m3: take turned=0".into());
        }
        let memory = self.memory(spec);
        memory.layout.fits(target)?;
        // All shared memory of a multiprocessor; the system takes 1 KiB per block.
        let (all, needed) = (233_472, self.ctas * (memory.layout.bytes() + 1024));
        if needed > all {
            return refuse(format!(
                "{} blocks need {needed} bytes of shared memory, but a multiprocessor has {all}",
                self.ctas
            ));
        }
        let flushed = self.flushed_columns(spec).unwrap_or(0);
        check_registers(self.registers(spec, flushed), 0, self.register_limit(spec))
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let memory = self.memory(spec);
        let mut k = KernelBuilder::new("flashcore_sm90_fwd", target)
            .params::<Sm90Params>()
            .shared(memory.layout.clone())
            .threads(self.threads(spec))
            .min_blocks_per_sm(self.ctas);
        if spec.dtype.is_fp8() {
            k = k.more_params::<DescaleParams>();
        }
        if spec.descale_keys.is_some() {
            k = k.more_params::<BlockDescaleParams>();
        }
        if spec.packed_q || spec.packed_k {
            k = k.more_params::<PackedParams>();
        }
        if spec.page.is_some() {
            k = k.more_params::<PageParams>();
        }
        if self.by_length {
            k = k.more_params::<ShareParams>();
        }
        k = k.traced(spec.traced);
        if self.cluster() > 1 {
            k = k.cluster(self.cluster(), 1, 1);
        }
        self.body(&mut k, spec, &memory);
        k
    }

    fn roles(self) -> Vec<String> {
        let consumers = (0..self.warpgroups).map(|group| format!("consumer {group}"));
        consumers.chain(["producer".into()]).collect()
    }

    fn bind<E>(
        self,
        spec: &Spec,
        args: &Args,
        encode: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        packed.push(&Sm90Params::bind(self, spec, args, encode)?);
        if spec.dtype.is_fp8() {
            packed.extend(&DescaleParams::bind(args));
        }
        if spec.descale_keys.is_some() {
            packed.extend(&BlockDescaleParams::bind(args));
        }
        if spec.packed_q || spec.packed_k {
            packed.extend(&PackedParams::bind(args));
        }
        if spec.page.is_some() {
            packed.extend(&PageParams::bind(args));
        }
        if self.by_length {
            packed.extend(&ShareParams::bind(args, spec));
        }
        Ok(())
    }
}

impl Schedule {
    /// What blocks that share keys by length need, and what they cannot have.
    fn check_by_length(self, spec: &Spec) -> Result<(), ScheduleError> {
        let shares = self.cluster() > 1 || self.parts > 1;
        if !self.persistent || self.warpgroups > 1 || shares {
            return Err(ScheduleError::malformed(
                "blocks that share keys by length take one part after the other, with one warpgroup: take persistent=1, \
                 warpgroups=1, split=1, parts=1 and multicast=1",
            ));
        }
        if spec.packed_q || !(spec.key_lengths || spec.packed_k) {
            return Err(ScheduleError::malformed(
                "keys are shared by length where queries are dense and each sequence has a key length or packed keys: take \
                 by_length=0",
            ));
        }
        if spec.left || spec.top_left {
            return Err(ScheduleError::malformed(
                "keys are shared by length where queries see all keys but a few at the end: take by_length=0, or a mask \
                 without a left bound that is aligned bottom-right",
            ));
        }
        if spec.dtype.is_fp8() {
            return Err(ScheduleError::malformed(
                "with e4m3, keys are not shared by length: take by_length=0",
            ));
        }
        Ok(())
    }

    /// What 8-bit floats need, and what they cannot have.
    fn check_fp8(self, spec: &Spec) -> Result<(), ScheduleError> {
        if !self.block_n.is_multiple_of(32) {
            return Err(ScheduleError::malformed(format!(
                "block_n {}: with e4m3 a multiple of 32 is needed",
                self.block_n
            )));
        }
        check_blocks(spec, self.block_n)?;
        if spec.descale_keys.is_some() && self.flush != 1 {
            return Err(ScheduleError::malformed(
                "descales of blocks of keys: each tile's values are added in units of their own, so take flush=1",
            ));
        }
        if self.split > 1 || self.parts > 1 || self.together || self.multicast > 1 {
            return Err(ScheduleError::malformed(
                "with e4m3, a block has its queries and their keys for itself: take split=1, parts=1, together=0 and \
                 multicast=1",
            ));
        }
        if spec.softcap && !spec.scaled_scores {
            return Err(ScheduleError::malformed(
                "with e4m3, a softcap needs scaled scores: see Spec::needs_scaled_scores",
            ));
        }
        Ok(())
    }

    fn body(self, k: &mut KernelBuilder, spec: &Spec, memory: &Memory) {
        k.begin_trace(self.warpgroups + 1, 128);
        let tid = k.tid_x();
        let warp = k.shr_u32(tid, 5u32);
        // Taken from one lane, so that the assembler knows that it is the same in all.
        let warp = k.shfl_idx(warp, 0u32);
        self.initialise(k, memory);
        let consumers = 4 * self.warpgroups;
        k.roles(warp, |roles| {
            roles.warps(0..consumers, |k| {
                if let Some((_, registers)) = self.shares(spec) {
                    k.setmaxnreg_inc(registers);
                }
                Consumer::new(k, self, spec, memory).run(k);
                self.leave(k);
            });
            roles.others(|k| {
                if let Some((registers, _)) = self.shares(spec) {
                    k.setmaxnreg_dec(registers);
                }
                let first = if self.needs_warp(spec) {
                    k.setp_eq_u32(warp, consumers)
                } else {
                    k.setp_eq_u32(tid, self.consumer_threads())
                };
                k.if_(first, |k| Producer::new(k, self, spec, memory).run(k));
                if let Some(turned) = memory.turned {
                    let turns = k.setp_gt_u32(warp, consumers);
                    k.if_(turns, |k| Turner::new(k, self, spec, memory, turned).run(k));
                }
                if self.split > 1 {
                    k.comment("every thread of a cluster waits for what it arrived at");
                    k.bar_warp_sync();
                    k.cluster_wait(true);
                }
                if self.multicast > 1 {
                    k.bar_warp_sync();
                }
                self.leave(k);
            });
        });
    }

    /// Blocks that copy for each other, and say so to each other, end together.
    fn leave(self, k: &mut KernelBuilder) {
        if self.multicast > 1 {
            k.comment("the other block may still copy to this one, or tell it that a slot is free");
            k.cluster_arrive(ClusterArrive::Relaxed, true);
            k.cluster_wait(true);
        }
    }

    /// Sets up the barriers, and makes them visible to all threads.
    fn initialise(self, k: &mut KernelBuilder, memory: &Memory) {
        k.section("barriers");
        // The next launch in the stream may start its setup beside this grid, as this one did beside the previous one:
        // up to here nothing was read from memory, and everything that reads waits first.
        k.griddepcontrol(GridDep::LaunchDependents);
        let tid = k.tid_x();
        let first = k.setp_eq_u32(tid, 0u32);
        k.if_(first, |k| {
            let mut pair = |bars: Shared, stages: u32, producers: u32, readers: u32| {
                for stage in 0..stages {
                    k.mbarrier_init(bars.at((16 * stage) as i32), producers);
                    k.mbarrier_init(bars.at((16 * stage + 8) as i32), readers);
                }
            };
            // A slot of Q is released by one thread of each warpgroup, once its output has left it; a slot of K or V, and of Q
            // where outputs do not go through it, by one thread of each warp.
            let q_readers = if self.by_length { 4 } else { 1 };
            pair(memory.q_bars, self.q_stages, 1, q_readers * self.warpgroups);
            let readers = 4 * self.readers() * self.multicast;
            pair(memory.k_bars, self.stages, self.multicast, readers);
            match memory.turned {
                None => pair(memory.v_bars, self.stages, self.multicast, readers),
                Some(Turned { bars, .. }) => {
                    pair(memory.v_bars, self.stages, 1, turn::WARPS);
                    pair(bars, self.stages, turn::WARPS, readers);
                }
            }
            if self.split > 1 {
                k.mbarrier_init(memory.merged, 1u32);
            }
            k.fence_mbarrier_init();
            if self.split > 1 {
                k.comment("what the other blocks will send");
                k.mbarrier_arrive_expect_tx(memory.merged, memory.exchange.bytes());
            }
        });
        k.bar_sync_all();
        if self.split > 1 {
            k.comment("a block's shared memory may be written to once it has arrived here");
            k.cluster_arrive(ClusterArrive::Relaxed, true);
        }
        if self.multicast > 1 {
            k.comment("the other block's barriers are there, too");
            k.cluster_arrive(ClusterArrive::Relaxed, true);
            k.cluster_wait(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_shares_out_no_more_registers_than_it_is_launched_with() {
        let mut seen = std::collections::BTreeSet::new();
        for spec in [ElementType::F16, ElementType::E4m3].map(|dtype| Spec::new(dtype, 64)) {
            for schedule in Schedule::grid() {
                let Some((producer, consumer)) = schedule.shares(&spec) else { continue };
                // Registers are allocated to threads in steps of 8.
                let threads = schedule.threads(&spec);
                let launched = (65536 / (schedule.ctas * threads) / 8 * 8).min(MAX_REGISTERS);
                let (all, consumers) = (threads * launched, schedule.consumer_threads());
                let wanted = consumers * u32::from(consumer) + (threads - consumers) * u32::from(producer);
                assert!(wanted <= all, "{schedule:?}: {wanted} of {all}");
                seen.insert((schedule.warpgroups, schedule.ctas));
            }
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [(2, 1), (2, 2), (3, 1), (4, 1)]);
    }
}
