//! The backward kernel for Hopper's wide heads, whose gradients of keys, values and queries do not fit the registers of one
//! block: some blocks own keys, others own queries, and both compute the scores again. That is 7 products instead of 5, and
//! in return nothing is added up in memory: every gradient has one owner, and so always the same bits.
//!
//! A block of `keys` has 64 of them. One warpgroup holds dV: it computes Sᵀ = K Qᵀ, whose probabilities are the A operand of
//! dV += Pᵀ dO as they stand, and hands them to the other one, thread to thread. That one holds dK: it computes dPᵀ = V dOᵀ and
//! with the probabilities dSᵀ, the A operand of dK += dSᵀ Q. The first is a step ahead of the second.
//!
//! A block of `queries` has 128 of them, 64 in each warpgroup with their dQ, and walks over tiles of 64 keys: S = Q Kᵀ,
//! dP = dO Vᵀ, dQ += dS K.
//!
//! All tiles have 64 rows, so that both kinds of blocks have the same slots in shared memory.

mod block;
mod keys;
mod params;
mod producer;
mod queries;

use flashcore_ptx::{
    B32, BulkHint, F32, KernelBuilder, Operand as Coordinate, ParamHandle, Pred, ProxySpace, Reg, Shared,
    SharedLayout, Target, TensorMap,
};

pub use self::params::WideParams;
use self::{block::Block, producer::Producer};
use super::{
    ALL, CONSUMERS, OWN, PITCH, PackedGradients, ROWS, TURN, WARPGROUPS, columns, panels, params::Gradient,
    parts,
};
use crate::{
    Args, Blocks, Family, Geometry, Map, Packed, ScheduleError, Spec,
    family::{check_registers, schedule},
    parts::{
        sequence::Side,
        softmax::{ScoreHandles, SoftmaxParams},
    },
    phase::wait_for_launch,
    sm90::{ring::Ring, stage},
};

/// Queries of a block that owns queries.
pub const QUERIES: u32 = WARPGROUPS * ROWS;
/// Keys of a block that owns keys.
pub const KEYS: u32 = ROWS;
/// Slots for probabilities on their way from one warpgroup to the other.
const HANDED: u32 = 2;
/// Bytes of one: two per score.
const HANDED_BYTES: u32 = ROWS * ROWS * 2;
/// Slots for tiles of dO.
const DO_STAGES: u32 = 2;
/// Bytes of a number for each row of a tile.
const NUMBERS: u32 = ROWS * 4;
/// Registers besides the fragments.
const OTHER_REGISTERS: u32 = 24;
/// Registers of a producer's thread and of a consumer's.
const SHARES: (u16, u16) = (24, 240);

const HANDLES: ScoreHandles<WideParams> = ScoreHandles {
    exp_scale: WideParams::exp_scale,
    tanh_scale: WideParams::tanh_scale,
    scale: WideParams::scale,
    softcap: WideParams::softcap,
};

schedule! {
    /// The knobs of the kernel.
    pub struct Schedule {
        /// Slots for tiles of queries, or of keys: 2 or 3. Tiles of values have one less.
        pub stages: u32,
        /// Whether the warpgroups of a block of queries take turns at the tensor cores, so that one computes probabilities
        /// while the other multiplies.
        pub pingpong: bool,
        /// Whether products begin with the first panel of a tile, before the others are there.
        pub piecewise: bool = false,
    }
}

/// A kernel's shared memory.
struct Memory {
    layout: SharedLayout,
    /// Tiles of queries and keys: first those that the block owns, then the slots of the others.
    s: Shared,
    /// Tiles of dO and values, likewise.
    p: Shared,
    /// lse and delta of each query in a slot.
    lse: Shared,
    delta: Shared,
    s_bars: Shared,
    p_bars: Shared,
    /// For each slot, a barrier per panel from the second on, where tiles come piecewise.
    s_rest: Shared,
    p_rest: Shared,
    handed_bars: Shared,
    /// Whether the block's own tiles are there.
    own_s: Shared,
    own_p: Shared,
    /// Where queries are packed, a barrier for each producer: a sequence's last tile is there, with rows of the next.
    landed: Option<[Shared; 2]>,
}

/// Bytes of the tiles.
#[derive(Clone, Copy)]
struct Sizes {
    s: u32,
    p: u32,
}

/// A panel of a tile.
const PANEL: u32 = ROWS * PITCH;

impl Schedule {
    fn sizes(spec: &Spec) -> Sizes {
        let [s, p] = [spec.head_dim, spec.head_dim_v].map(|dim| panels(dim, spec.dtype) * PANEL);
        Sizes { s, p }
    }

    /// Slots for tiles of values.
    fn value_stages(self) -> u32 {
        self.stages - 1
    }

    /// In how many pieces tiles of a head dim are waited for.
    fn pieces(self, head_dim: u32, spec: &Spec) -> u32 {
        if self.piecewise { panels(head_dim, spec.dtype) } else { 1 }
    }

    /// Slots for tiles of dO or values.
    fn p_stages(self) -> u32 {
        DO_STAGES.max(self.value_stages())
    }

    /// Where the handed probabilities are among the tiles of queries and keys: behind the slots that a block of keys has.
    fn handed(self, spec: &Spec) -> u32 {
        (1 + self.stages) * Self::sizes(spec).s
    }

    fn memory(self, spec: &Spec) -> Memory {
        let sizes = Self::sizes(spec);
        let mut layout = SharedLayout::new();
        // Blocks of queries own two tiles of each.
        let of_keys = self.handed(spec) + HANDED * HANDED_BYTES;
        let s = layout.alloc("s", of_keys.max((WARPGROUPS + self.stages) * sizes.s), 1024);
        let p_tiles = (1 + DO_STAGES).max(WARPGROUPS + self.value_stages());
        let p = layout.alloc("p", p_tiles * sizes.p, 1024);
        let lse = layout.alloc("lse", self.stages * NUMBERS, 128);
        let delta = layout.alloc("delta", DO_STAGES * NUMBERS, 128);
        let mut bars = |name: &str, count: u32| layout.alloc(name, 8 * count, 8);
        let (s_bars, p_bars) = (bars("s barriers", 2 * self.stages), bars("p barriers", 2 * self.p_stages()));
        let [s_rest, p_rest] = [(spec.head_dim, self.stages), (spec.head_dim_v, self.p_stages())]
            .map(|(dim, stages)| bars("barriers of further panels", stages * (self.pieces(dim, spec) - 1)));
        let handed_bars = bars("handed barriers", 2 * HANDED);
        let (own_s, own_p) = (bars("own s barrier", 1), bars("own p barrier", 1));
        let landed =
            spec.packed_q.then(|| ["s landed barrier", "p landed barrier"].map(|name| bars(name, 1)));
        Memory { layout, s, p, lse, delta, s_bars, p_bars, s_rest, p_rest, handed_bars, own_s, own_p, landed }
    }

    /// About how many registers a consumer's thread needs: sums, scores, and operands made of them.
    fn registers(spec: &Spec) -> u32 {
        let of_values = spec.head_dim_v / 2 + ROWS / 2 + ROWS / 2;
        let of_keys = spec.head_dim / 2 + ROWS / 2 + ROWS / 2;
        let of_queries = spec.head_dim / 2 + ROWS + ROWS / 4;
        of_values.max(of_keys).max(of_queries) + OTHER_REGISTERS
    }

    fn threads() -> u32 {
        CONSUMERS + 128
    }

    fn initialise(self, k: &mut KernelBuilder, memory: &Memory) {
        k.section("barriers");
        k.griddepcontrol(flashcore_ptx::GridDep::LaunchDependents);
        let tid = k.tid_x();
        let first = k.setp_eq_u32(tid, 0u32);
        k.if_(first, |k| {
            // Slots are released, and probabilities handed over, by one thread of each warp.
            let (all, half) = (CONSUMERS / 32, 128 / 32);
            let rings = [
                (memory.s_bars, self.stages, 1, all),
                (memory.p_bars, self.p_stages(), 1, all),
                (memory.handed_bars, HANDED, half, half),
            ];
            for (bars, stages, fillers, readers) in rings {
                for stage in 0..stages {
                    k.mbarrier_init(bars.at((16 * stage) as i32), fillers);
                    k.mbarrier_init(bars.at((16 * stage + 8) as i32), readers);
                }
            }
            for rest in [memory.s_rest, memory.p_rest] {
                for bar in (0..rest.bytes()).step_by(8) {
                    k.mbarrier_init(rest.at(bar as i32), 1u32);
                }
            }
            k.mbarrier_init(memory.own_s, 1u32);
            k.mbarrier_init(memory.own_p, 1u32);
            for &landed in memory.landed.iter().flatten() {
                k.mbarrier_init(landed, 1u32);
            }
            k.fence_mbarrier_init();
        });
        k.bar_sync_all();
    }
}

impl Family for Schedule {
    const PROGRAMMATIC: bool = true;

    fn check(self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        if !(2..=3).contains(&self.stages) {
            return Err(ScheduleError::malformed(format!("{} stages: possible are 2 and 3", self.stages)));
        }
        if self.piecewise && spec.packed_q {
            return Err(ScheduleError::malformed("tiles of packed queries come whole: take piecewise=0"));
        }
        self.memory(spec).layout.fits(target)?;
        check_registers(Self::registers(spec), 0, u32::from(SHARES.1))
    }

    fn geometry(self, spec: &Spec) -> Geometry {
        Geometry {
            rows: KEYS,
            threads: Self::threads(),
            shared_bytes: self.memory(spec).layout.bytes(),
            blocks: Blocks::QueriesThenKeys { queries: QUERIES },
        }
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let memory = self.memory(spec);
        let mut k = KernelBuilder::new("flashcore_sm90_bwd_wide", target)
            .params::<WideParams>()
            .shared(memory.layout.clone())
            .threads(Self::threads())
            .min_blocks_per_sm(1);
        k = PackedGradients::declare(k, spec);
        let tid = k.tid_x();
        let warp = k.shr_u32(tid, 5u32);
        // Taken from one lane, so that the assembler knows that it is the same in all.
        let warp = k.shfl_idx(warp, 0u32);
        self.initialise(&mut k, &memory);
        k.roles(warp, |roles| {
            roles.warps(0..CONSUMERS / 32, |k| {
                k.setmaxnreg_inc(SHARES.1);
                Consumer::new(k, self, spec, &memory).run(k);
            });
            roles.others(|k| {
                k.setmaxnreg_dec(SHARES.0);
                // Whole warps, where they clear what they have copied.
                let (number, scale) = if spec.packed_q { (warp, 32) } else { (tid, 1) };
                let first = k.setp_eq_u32(number, CONSUMERS / scale);
                k.if_(first, |k| Producer::of_scores(k, self, spec, &memory).run(k));
                let second = k.setp_eq_u32(number, (CONSUMERS + 32) / scale);
                k.if_(second, |k| Producer::of_values(k, self, spec, &memory).run(k));
            });
        });
        k
    }

    fn bind<E>(
        self,
        spec: &Spec,
        args: &Args,
        encode: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        packed.push(&WideParams::bind(spec, args, encode)?);
        PackedGradients::bind(spec, args, packed);
        Ok(())
    }
}

/// The tiles that a block walks over, as their readers see them.
struct Walked {
    ring: Ring,
    rest: Shared,
    pieces: u32,
}

impl Walked {
    /// Waits for a piece of the tile.
    fn wait(&self, k: &mut KernelBuilder, piece: u32) {
        self.ring.wait_piece(k, self.rest, self.pieces - 1, piece);
    }

    /// Waits for a panel that is a piece of its own, and not the first.
    fn wait_further(&self, k: &mut KernelBuilder, panel: u32) {
        if (1..self.pieces).contains(&panel) {
            self.wait(k, panel);
            // The assembler wants one after every loop.
            k.wgmma_fence();
        }
    }

    /// Waits for the whole tile.
    fn wait_all(&self, k: &mut KernelBuilder) {
        for piece in 0..self.pieces {
            self.wait(k, piece);
        }
    }
}

/// A consumer warpgroup.
struct Consumer<'a> {
    schedule: Schedule,
    spec: &'a Spec,
    sizes: Sizes,
    memory: &'a Memory,
    params: SoftmaxParams,
    /// The warpgroup.
    group: Reg<B32>,
    /// The thread in the warpgroup.
    thread: Reg<B32>,
    first_lane: Reg<Pred>,
    /// This thread's upper row in a tile.
    row: Reg<B32>,
    /// The first column that this thread holds of every eight.
    column: Reg<B32>,
}

impl<'a> Consumer<'a> {
    fn new(k: &mut KernelBuilder, schedule: Schedule, spec: &'a Spec, memory: &'a Memory) -> Self {
        k.section("consumer");
        let tid = k.tid_x();
        let group = k.shr_u32(tid, 7u32);
        let group = k.shfl_idx(group, 0u32);
        let (thread, lane) = (k.and_b32(tid, 127u32), k.and_b32(tid, 31u32));
        let warp = k.shr_u32(thread, 5u32);
        let (g, t) = (k.shr_u32(lane, 2u32), k.and_b32(lane, 3u32));
        Self {
            schedule,
            spec,
            sizes: Schedule::sizes(spec),
            memory,
            params: SoftmaxParams::read_from(k, spec, &HANDLES),
            group,
            thread,
            first_lane: k.setp_eq_u32(lane, 0u32),
            row: k.mad_lo_u32(warp, 16u32, g),
            column: k.shl_b32(t, 1u32),
        }
    }

    fn run(&self, k: &mut KernelBuilder) {
        wait_for_launch(k);
        Block::find(
            k,
            self.spec,
            |k, block| self.own_queries(k, &block),
            |k, block| {
                let second = k.setp_eq_u32(self.group, 1u32);
                k.if_else(second, |k| self.own_values(k, &block), |k| self.own_keys(k, &block));
            },
        );
    }

    /// The product of 64 rows with a tile.
    fn times(&self, k: &mut KernelBuilder, to: &[Reg<F32>], a: Reg<B32>, b: &Walked, head_dim: u32) {
        let tile = b.ring.address(k);
        b.wait(k, 0);
        k.wgmma_fence();
        let ready = |k: &mut KernelBuilder, panel| b.wait_further(k, panel);
        parts::times_rows(k, self.spec.dtype, to, [a, tile], [PANEL; 2], head_dim, ready);
        k.wgmma_commit();
    }

    /// A ring of tiles of queries or keys, so many bytes behind the first.
    fn walked_s(&self, k: &mut KernelBuilder, behind: u32) -> Walked {
        let Memory { s, s_bars, s_rest, .. } = *self.memory;
        let behind = k.mov_b32(behind);
        let ring = Ring::consumer(k, s, self.sizes.s, s_bars, self.schedule.stages).further(k, behind);
        Walked { ring, rest: s_rest, pieces: self.schedule.pieces(self.spec.head_dim, self.spec) }
    }

    /// The same of tiles of dO or values, in so many slots.
    fn walked_p(&self, k: &mut KernelBuilder, behind: u32, stages: u32) -> Walked {
        let Memory { p, p_bars, p_rest, .. } = *self.memory;
        let behind = k.mov_b32(behind);
        let ring = Ring::consumer(k, p, self.sizes.p, p_bars, stages).further(k, behind);
        Walked { ring, rest: p_rest, pieces: self.schedule.pieces(self.spec.head_dim_v, self.spec) }
    }

    /// Adds the product of operands in registers with a tile.
    fn add(&self, k: &mut KernelBuilder, to: &[Reg<F32>], a: &[[Reg<B32>; 4]], tile: Reg<B32>) {
        k.wgmma_fence();
        parts::add(k, self.spec.dtype, to, a, tile, PANEL);
        k.wgmma_commit();
    }

    /// Probabilities of scores, in place, given each one's lse. What dP is to be multiplied by is the probability; under a
    /// softcap it is less, by the derivative of the score, and `weigh` is given it for every eight columns.
    fn probabilities(
        &self,
        k: &mut KernelBuilder,
        s: &[Reg<F32>],
        hidden: Reg<Pred>,
        hide: Hide<'_>,
        lse: &dyn Fn(&mut KernelBuilder, usize) -> [Reg<F32>; 4],
        weigh: Weigh<'_>,
    ) {
        if !self.spec.softcap {
            self.params.score(k, s);
            let probabilities = |k: &mut KernelBuilder| {
                for (eight, s) in s.chunks_exact(4).enumerate() {
                    let lse = lse(k, eight);
                    for (&s, lse) in s.iter().zip(lse) {
                        k.set(s, |k| parts::probability(k, self.params, s, lse));
                    }
                }
            };
            // On both ways, so that the assembler does not move them behind a wait.
            k.if_else(
                hidden,
                |k| {
                    hide(k, s, 0);
                    probabilities(k);
                },
                probabilities,
            );
            return;
        }
        // A few at a time, so that intermediate values fit in registers.
        for (eight, s) in s.chunks_exact(4).enumerate() {
            let slopes: Vec<Option<Reg<F32>>> = s.iter().map(|&dot| self.params.slope(k, dot)).collect();
            self.params.score(k, s);
            k.if_(hidden, |k| hide(k, s, 4 * eight));
            let lse = lse(k, eight);
            let weights = std::array::from_fn(|i| {
                k.set(s[i], |k| parts::probability(k, self.params, s[i], lse[i]));
                slopes[i].map_or(s[i], |slope| k.mul_f32(s[i], slope))
            });
            weigh(k, eight, weights);
        }
    }

    /// Zeros behind the last key, in tiles of keys and values that begin with this key.
    fn clear(&self, k: &mut KernelBuilder, block: &Block, first_key: Reg<B32>, tiles: [Reg<B32>; 2]) {
        let left = k.sub_s32(block.band.keys, first_key);
        let [keys, values] = tiles;
        let count = |head_dim| panels(head_dim, self.spec.dtype);
        parts::clear(
            k,
            left,
            ROWS,
            &[
                (&|_| keys, count(self.spec.head_dim), PANEL),
                (&|_| values, count(self.spec.head_dim_v), PANEL),
            ],
        );
    }

    /// Rounds a gradient, and stores it through this tile, which nobody reads any more: 64 rows of a side, from a row of a head
    /// on.
    fn store(
        &self,
        k: &mut KernelBuilder,
        gradient: &[Reg<F32>],
        tile: Reg<B32>,
        (map, to, side): (ParamHandle<WideParams, TensorMap>, Gradient, &Side),
        [row, head]: [Reg<B32>; 2],
    ) {
        let packed = stage::rounded(k, self.spec.dtype, gradient);
        stage::write(k, &packed, self.thread, tile, PANEL);
        k.fence_proxy_async(ProxySpace::Shared);
        let own = k.add_u32(self.group, OWN);
        k.bar_sync(own, 128u32);
        let head_dim = 2 * gradient.len() as u32;
        let by_tma = |k: &mut KernelBuilder| {
            let leader = k.setp_eq_u32(self.thread, 0u32);
            k.if_(leader, |k| {
                let map = k.tensor_map(map);
                let row = side.row(k, row);
                for panel in 0..panels(head_dim, self.spec.dtype) {
                    let column = Coordinate::from(panel * columns(self.spec.dtype));
                    let from = tile.at((panel * PANEL) as i32);
                    let at = [column, row.into(), head.into(), side.entry.into()];
                    k.tensor_store(map, &at, from, BulkHint::new());
                }
                k.bulk_commit();
                k.bulk_wait_read(0);
            });
        };
        let Some(len) = side.len() else { return by_tma(k) };
        let left = k.sub_s32(len, row);
        let all = k.setp_ge_s32(left, ROWS as i32);
        k.if_else(all, by_tma, |k| {
            k.comment("the rows behind are the next sequence's");
            let to = PackedGradients::row(k, to, side, head, row);
            stage::store_rows(k, (tile, PANEL), self.thread, left, to, (head_dim, self.spec.dtype));
        });
    }
}

/// Hides scores that a mask hides, given the number of the first.
type Hide<'a> = &'a dyn Fn(&mut KernelBuilder, &[Reg<F32>], usize);

/// Takes what dP is to be multiplied by, eight columns at a time, of which a thread has four.
type Weigh<'a> = &'a mut dyn FnMut(&mut KernelBuilder, usize, [Reg<F32>; 4]);

/// Fresh registers with zeros.
fn zeros(k: &mut KernelBuilder, count: u32) -> Vec<Reg<F32>> {
    (0..count).map(|_| k.mov_f32(0.0)).collect()
}

/// Fresh registers for a tile's A operands.
fn operands(k: &mut KernelBuilder) -> Vec<[Reg<B32>; 4]> {
    (0..ROWS / 16).map(|_| std::array::from_fn(|_| k.mov_b32(0u32))).collect()
}
