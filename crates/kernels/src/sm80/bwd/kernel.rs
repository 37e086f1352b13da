//! The code: which rows of the walk a block takes up, and what it does with a tile of them.

use flashcore_ptx::{
    B32, B64, CpAsyncBytes, CpAsyncCache, F32, GlobalPtr, KernelBuilder, ParamHandle, Pred, Reg,
};

use super::{BwdParams, Memory, Of, Schedule, Tiles};
use crate::{
    Order, Spec,
    parts::{
        copy::{Share, TileCopy},
        epilogue::{self, Out},
        fragment::{Acc, HALVES, Place, a_operands, matrix_ty},
        lane::{self, LaneAddress},
        sequence::{self, Side},
        softmax::{NEG_INF, ScoreHandles, SoftmaxParams},
        swizzle::Tile,
        work::{Band, Work},
    },
};

type Pointer = ParamHandle<BwdParams, GlobalPtr>;
type Stride = ParamHandle<BwdParams, u64>;

/// Where a tensor starts, and its strides from one batch entry, head and row to the next.
type Tensor = (Pointer, [Stride; 3]);

const OWN_S: Tensor =
    (BwdParams::own_s, [BwdParams::own_s_batch, BwdParams::own_s_head, BwdParams::own_s_row]);
const OWN_P: Tensor =
    (BwdParams::own_p, [BwdParams::own_p_batch, BwdParams::own_p_head, BwdParams::own_p_row]);
const WALK_S: Tensor =
    (BwdParams::walk_s, [BwdParams::walk_s_batch, BwdParams::walk_s_head, BwdParams::walk_s_row]);
const WALK_P: Tensor =
    (BwdParams::walk_p, [BwdParams::walk_p_batch, BwdParams::walk_p_head, BwdParams::walk_p_row]);
const GRAD_S: Tensor =
    (BwdParams::grad_s, [BwdParams::grad_s_batch, BwdParams::grad_s_head, BwdParams::grad_s_row]);
const GRAD_P: Tensor =
    (BwdParams::grad_p, [BwdParams::grad_p_batch, BwdParams::grad_p_head, BwdParams::grad_p_row]);

/// The address of a head of a tensor.
fn head_of(
    k: &mut KernelBuilder,
    base: Pointer,
    [to_batch, to_head]: [Stride; 2],
    batch: Reg<B32>,
    head: Reg<B32>,
) -> Reg<B64> {
    let base = k.param(base);
    [(batch, to_batch), (head, to_head)].into_iter().fold(base, |at, (index, stride)| {
        let (index, stride) = (k.cvt_u64_u32(index), k.param(stride));
        k.mad_lo_u64(index, stride, at)
    })
}

/// The address of a row of a head.
fn row_of(
    k: &mut KernelBuilder,
    (base, [to_batch, to_head, to_row]): Tensor,
    side: Side,
    head: Reg<B32>,
    row: Reg<B32>,
) -> Reg<B64> {
    let head = head_of(k, base, [to_batch, to_head], side.entry, head);
    let (stride, row) = (k.param(to_row), side.row(k, row));
    Work::row_address(k, head, row, stride)
}

/// The tiles of the walk that any own row sees, and which of their rows all of them see.
struct Range {
    /// The first tile that any own row sees.
    first: Reg<B32>,
    /// One past the last.
    past: Reg<B32>,
    /// Rows before this one are hidden from some own rows.
    full_begin: Option<Reg<B32>>,
    /// Rows from this one on are hidden from some own rows.
    full_end: Option<Reg<B32>>,
}

/// A kernel under construction.
pub(super) struct Kernel<'a> {
    schedule: Schedule,
    spec: &'a Spec,
    memory: &'a Memory,
    tiles: Tiles,
    /// The head of the block's own rows.
    head: Reg<B32>,
    first_row: Reg<B32>,
    /// Whether there are such rows, where not every block has some.
    exists: Option<Reg<Pred>>,
    /// Where the own rows lie, and those that are walked over.
    sides: [Side; 2],
    len_q: Reg<B32>,
    band: Band,
    place: Place,
    params: SoftmaxParams,
}

/// The tile of the walk that is computed or fetched.
#[derive(Clone, Copy)]
struct Cursor {
    tile: Reg<B32>,
    /// The query head in its group, where queries are walked over.
    member: Reg<B32>,
}

/// How the threads copy tiles of the walk.
struct Copies {
    walk_s: TileCopy,
    walk_p: TileCopy,
}

/// Where lanes read operands.
struct Lanes {
    own_s: LaneAddress,
    walk_s: LaneAddress,
    /// What P is multiplied with, if its products are added up.
    sum_p: Option<LaneAddress>,
    /// Own and walked rows that dP is the product of, and what dS is multiplied with, if its products are added up.
    gradients: Option<[LaneAddress; 3]>,
}

/// What a thread has of the gradients, one entry per 16-row tile and 8 columns.
struct Sums {
    of_scores: Vec<Vec<Acc>>,
    of_probabilities: Vec<Vec<Acc>>,
}

/// lse · log2 e and delta of the queries that a thread's scores are of.
enum Stats {
    /// Of its own rows, by tile and half.
    Own(Vec<[[Reg<F32>; 2]; 2]>),
    /// Of the tile's, in shared memory: where this lane's first is.
    Walked(Reg<B32>),
}

impl<'a> Kernel<'a> {
    pub fn begin(k: &mut KernelBuilder, schedule: Schedule, spec: &'a Spec, memory: &'a Memory) -> Self {
        k.section("which rows of which head");
        let (x, y, z) = (k.ctaid_x(), k.ctaid_y(), k.ctaid_z());
        let (block, head, batch) = match (schedule.order, schedule.of) {
            (Order::HeadByHead, _) => (x, y, z),
            // The last queries see the most keys, and the first keys are seen by the most queries.
            (Order::LongestFirst, Of::Queries) => {
                let blocks = k.nctaid_z();
                let last = k.sub_u32(blocks, 1u32);
                (k.sub_u32(last, z), x, y)
            }
            (Order::LongestFirst, _) => (z, x, y),
        };
        let [q_starts, k_starts] = sequence::starts(spec);
        let packed = if schedule.of == Of::Queries { q_starts } else { k_starts };
        let [batch, block] = match packed {
            Some(starts) => sequence::find_tile(k, starts, [schedule.block, 1], block),
            None => [batch, block],
        };
        let side_k = Side::of(k, k_starts, batch);
        let keys = if spec.key_lengths {
            let lengths = k.param(BwdParams::key_lengths);
            let own = k.mad_wide_u32(batch, 4u32, lengths);
            k.ld_global::<B32>(own)
        } else {
            side_k.len().unwrap_or_else(|| k.param(BwdParams::len_k))
        };
        let side_q = Side::of(k, q_starts, batch);
        let len_q = side_q.len().unwrap_or_else(|| k.param(BwdParams::len_q));
        let band = Band::new(k, spec, keys, len_q, [BwdParams::left, BwdParams::right]);
        let sides = if schedule.of == Of::Queries { [side_q, side_k] } else { [side_k, side_q] };
        let handles = ScoreHandles {
            exp_scale: BwdParams::exp_scale,
            tanh_scale: BwdParams::tanh_scale,
            scale: BwdParams::scale,
            softcap: BwdParams::softcap,
        };
        Self {
            schedule,
            spec,
            memory,
            tiles: schedule.tiles(spec),
            head,
            first_row: k.mul_lo_u32(block, schedule.block),
            exists: sides[0].has_tile(k, block, schedule.block),
            sides,
            len_q,
            band,
            place: Place::new(k, schedule.block / schedule.warps),
            params: SoftmaxParams::read_from(k, spec, &handles),
        }
    }

    fn owns_queries(&self) -> bool {
        self.schedule.of == Of::Queries
    }

    /// Whether some own rows may be keys that a batch entry does not have.
    fn has_absent_keys(&self) -> bool {
        self.spec.key_lengths && !self.owns_queries()
    }

    /// Own rows of the head that there are.
    fn own_len(&self) -> Reg<B32> {
        if self.owns_queries() { self.len_q } else { self.band.keys }
    }

    /// Rows of a head that are walked over.
    fn walk_len(&self) -> Reg<B32> {
        if self.owns_queries() { self.band.keys } else { self.len_q }
    }

    /// Which rows of the walk an own row sees: from the first, and up to the second. `None` where there is no bound but
    /// what exists; queries that do not exist have no probabilities.
    fn sight(&self, k: &mut KernelBuilder, row: Reg<B32>) -> [Option<Reg<B32>>; 2] {
        if self.owns_queries() {
            let begin = self.band.row_begin(k, row);
            return [begin, Some(self.band.row_end(k, row))];
        }
        let begin = self.band.key_begin(k, row);
        [begin, self.band.key_end(k, row)]
    }

    fn range(&self, k: &mut KernelBuilder) -> Range {
        k.section("which rows these see, or are seen by");
        let walk = self.schedule.walk;
        let past = k.add_s32(self.first_row, self.schedule.block as i32);
        let past = k.min_s32(past, self.own_len());
        let last_row = k.sub_s32(past, 1);
        let [begin, full_end] = self.sight(k, self.first_row);
        let [full_begin, end] = self.sight(k, last_row);
        let first = match begin {
            Some(begin) => {
                let begin = k.max_s32(begin, 0);
                k.div_u32(begin, walk)
            }
            None => k.mov_b32(0u32),
        };
        let exists = self.walk_len();
        let end = end.map_or(exists, |end| k.min_s32(end, exists));
        let end = if self.has_absent_keys() {
            let any = k.setp_lt_s32(self.first_row, past);
            k.selp_b32(end, 0u32, any)
        } else {
            end
        };
        let end = k.max_s32(end, 0);
        let up = k.add_u32(end, walk - 1);
        Range { first, past: k.div_u32(up, walk), full_begin, full_end }
    }

    pub fn run(&self, k: &mut KernelBuilder) {
        match self.exists {
            Some(exists) => k.if_(exists, |k| self.rows(k)),
            None => self.rows(k),
        }
    }

    fn rows(&self, k: &mut KernelBuilder) {
        let range = self.range(k);
        let sums = self.sums(k);
        let any = k.setp_lt_s32(range.first, range.past);
        k.if_(any, |k| self.walk(k, &range, &sums));
        self.store(k, &sums);
    }

    fn sums(&self, k: &mut KernelBuilder) -> Sums {
        let (of, rows) = (self.schedule.of, self.schedule.m_tiles());
        let mut zeros = |wanted: bool, tile: Tile| {
            let columns = if wanted { tile.cols / 8 } else { 0 };
            (0..rows)
                .map(|_| (0..columns).map(|_| std::array::from_fn(|_| k.mov_f32(0.0))).collect())
                .collect()
        };
        Sums {
            of_scores: zeros(of.of_scores(), self.tiles.own_s),
            of_probabilities: zeros(of.of_probabilities(), self.tiles.own_p),
        }
    }

    /// Copies the block's own rows.
    fn fetch_own(&self, k: &mut KernelBuilder) {
        let threads = 32 * self.schedule.warps;
        let left = k.sub_s32(self.own_len(), self.first_row);
        let both = [
            (OWN_S, self.tiles.own_s, self.memory.own_s, self.spec.head_dim, true),
            (OWN_P, self.tiles.own_p, self.memory.own_p, self.spec.head_dim_v, self.schedule.of.of_scores()),
        ];
        for (tensor, tile, memory, head_dim, wanted) in both {
            if !wanted {
                continue;
            }
            let share = Share::new(k, tile, head_dim, threads);
            let stride = k.param(tensor.1[2]);
            let copy = TileCopy::new(k, share, stride);
            let address = row_of(k, tensor, self.sides[0], self.head, self.first_row);
            let source = copy.source(k, address);
            copy.start(k, memory, None, source, Some(left));
        }
    }

    fn copies(&self, k: &mut KernelBuilder) -> Copies {
        let threads = 32 * self.schedule.warps;
        let (head_dim, head_dim_v) = (self.spec.head_dim, self.spec.head_dim_v);
        let share_s = Share::new(k, self.tiles.walk_s, head_dim, threads);
        let same = head_dim == head_dim_v;
        let share_p = if same { share_s } else { Share::new(k, self.tiles.walk_p, head_dim_v, threads) };
        let (row_s, row_p) = (k.param(BwdParams::walk_s_row), k.param(BwdParams::walk_p_row));
        Copies { walk_s: TileCopy::new(k, share_s, row_s), walk_p: TileCopy::new(k, share_p, row_p) }
    }

    /// The head of the rows that are walked over.
    fn walk_head(&self, k: &mut KernelBuilder, cursor: Cursor) -> Reg<B32> {
        if !self.spec.grouped {
            return self.head;
        }
        let group = k.param(BwdParams::group);
        if self.owns_queries() {
            return k.div_u32(self.head, group);
        }
        k.mad_lo_u32(self.head, group, cursor.member)
    }

    /// Starts to copy a tile of the walk to a slot.
    fn fetch(&self, k: &mut KernelBuilder, copies: &Copies, cursor: Cursor, slot: Option<Reg<B32>>) {
        let row = k.mul_lo_u32(cursor.tile, self.schedule.walk);
        let left = k.sub_s32(self.walk_len(), row);
        let head = self.walk_head(k, cursor);
        let both = [
            (WALK_S, &copies.walk_s, self.memory.walk_s, self.tiles.walk_s),
            (WALK_P, &copies.walk_p, self.memory.walk_p, self.tiles.walk_p),
        ];
        for (tensor, copy, memory, tile) in both {
            let address = row_of(k, tensor, self.sides[1], head, row);
            let source = copy.source(k, address);
            let slot = slot.map(|slot| k.mul_lo_u32(slot, tile.bytes()));
            copy.start(k, memory, slot, source, Some(left));
        }
        let Some(stats) = self.memory.stats else { return };
        k.comment("the numbers of these queries");
        let tid = k.tid_x();
        let mine = k.setp_lt_u32(tid, self.schedule.walk / 4);
        let base = k.shared_addr(stats);
        let to = k.mad_lo_u32(tid, 16u32, base);
        let to = slot.map_or(to, |slot| k.mad_lo_u32(slot, self.schedule.stats_bytes(), to));
        let wanted = if self.schedule.of.of_scores() { 2 } else { 1 };
        for (i, stat) in [BwdParams::row_lse, BwdParams::row_delta].into_iter().take(wanted).enumerate() {
            let from = self.stats_head(k, stat, head);
            let row = self.sides[1].padded(k, row);
            let from = k.mad_wide_u32(row, 4u32, from);
            let from = k.mad_wide_u32(tid, 16u32, from);
            let to = to.at((4 * self.schedule.walk) as i32 * i as i32);
            k.when(mine, |k| k.cp_async(CpAsyncCache::Cg, CpAsyncBytes::B16, to, from));
        }
    }

    /// Where the numbers of a query head are.
    fn stats_head(&self, k: &mut KernelBuilder, stat: Pointer, head: Reg<B32>) -> Reg<B64> {
        let queries = self.sides[usize::from(!self.owns_queries())];
        head_of(k, stat, [BwdParams::stats_batch, BwdParams::stats_head], queries.entry, head)
    }

    fn lanes(&self, k: &mut KernelBuilder) -> Lanes {
        let Tiles { own_s, own_p, walk_s, walk_p } = self.tiles;
        let place = self.place;
        let own = |k: &mut KernelBuilder, tile: Tile, memory| {
            let lane = LaneAddress::new(k, tile, memory, place, lane::Operand::A);
            let rows = k.mul_lo_u32(place.warp_row, tile.pitch());
            lane.moved(k, Some(rows))
        };
        let of = self.schedule.of;
        let lane =
            |k: &mut KernelBuilder, tile, memory, operand| LaneAddress::new(k, tile, memory, place, operand);
        let (s, p) = ((walk_s, self.memory.walk_s), (walk_p, self.memory.walk_p));
        let (straight, turned) = (lane::Operand::B, lane::Operand::BTransposed);
        Lanes {
            own_s: own(k, own_s, self.memory.own_s),
            walk_s: lane(k, s.0, s.1, straight),
            sum_p: of.of_probabilities().then(|| lane(k, p.0, p.1, turned)),
            gradients: of.of_scores().then(|| {
                let own = own(k, own_p, self.memory.own_p);
                [own, lane(k, p.0, p.1, straight), lane(k, s.0, s.1, turned)]
            }),
        }
    }

    /// The numbers of the thread's own queries; they exist for every row of a block.
    fn own_stats(&self, k: &mut KernelBuilder) -> Vec<[[Reg<F32>; 2]; 2]> {
        let starts =
            [BwdParams::row_lse, BwdParams::row_delta].map(|stat| self.stats_head(k, stat, self.head));
        let row = k.add_u32(self.first_row, self.place.warp_row);
        let row = k.add_u32(row, self.place.g);
        let row = self.sides[0].padded(k, row);
        let starts = starts.map(|start| k.mad_wide_u32(row, 4u32, start));
        let rows = 0..self.schedule.m_tiles();
        rows.map(|m| {
            [0, 1].map(|half| {
                starts.map(|start| k.ld_global::<F32>(start.at((4 * (16 * m + 8 * half)) as i32)))
            })
        })
        .collect()
    }

    fn walk(&self, k: &mut KernelBuilder, range: &Range, sums: &Sums) {
        let two = self.schedule.stages == 2;
        k.section("the first copies");
        let copies = self.copies(k);
        let cursor = Cursor { tile: k.mov_b32(range.first), member: k.mov_b32(0u32) };
        self.fetch_own(k);
        self.fetch(k, &copies, cursor, None);
        k.cp_async_commit();
        let lanes = self.lanes(k);
        let own_stats = self.owns_queries().then(|| self.own_stats(k));
        let slot = two.then(|| k.mov_b32(0u32));
        let tiles = k.sub_s32(range.past, range.first);
        let members = !self.owns_queries() && self.spec.grouped;
        let left = if members {
            let group = k.param(BwdParams::group);
            k.mul_lo_u32(tiles, group)
        } else {
            k.mov_b32(tiles)
        };

        k.section("the walk");
        k.while_(
            |k| k.setp_gt_s32(left, 0),
            |k, _| {
                k.comment("the tile that comes next");
                let after = k.add_u32(cursor.tile, 1u32);
                let next = if members {
                    let wraps = k.setp_eq_u32(after, range.past);
                    let member = k.add_u32(cursor.member, 1u32);
                    Cursor {
                        tile: k.selp_b32(range.first, after, wraps),
                        member: k.selp_b32(member, cursor.member, wraps),
                    }
                } else {
                    Cursor { tile: after, member: cursor.member }
                };
                k.set(left, |k| k.sub_s32(left, 1));
                k.comment("this thread's copies of the tile are done");
                k.cp_async_wait(0);
                k.comment("everybody's are, and the tile before is no longer read");
                k.bar_sync_all();
                let fetch = |k: &mut KernelBuilder, slot: Option<Reg<B32>>| {
                    let exists = k.setp_gt_s32(left, 0);
                    k.if_(exists, |k| {
                        k.comment("a tile ahead");
                        self.fetch(k, &copies, next, slot);
                    });
                    k.cp_async_commit();
                };
                if let Some(slot) = slot {
                    let other = k.xor_b32(slot, 1u32);
                    fetch(k, Some(other));
                }
                let stats = match &own_stats {
                    Some(own) => Stats::Own(own.clone()),
                    None => Stats::Walked(self.walked_stats(k, slot)),
                };
                self.tile(k, range, cursor.tile, slot, &lanes, &stats, sums);
                if let Some(slot) = slot {
                    k.set(slot, |k| k.xor_b32(slot, 1u32));
                } else {
                    k.comment("the tile is no longer read");
                    k.bar_sync_all();
                    fetch(k, None);
                }
                k.set(cursor.tile, |k| k.mov_b32(next.tile));
                if members {
                    k.set(cursor.member, |k| k.mov_b32(next.member));
                }
            },
        );
    }

    /// Where this lane's first number of the tile's queries is.
    fn walked_stats(&self, k: &mut KernelBuilder, slot: Option<Reg<B32>>) -> Reg<B32> {
        let base = k.shared_addr(self.memory.stats.expect("queries are walked over"));
        let base = slot.map_or(base, |slot| k.mad_lo_u32(slot, self.schedule.stats_bytes(), base));
        k.mad_lo_u32(self.place.column, 4u32, base)
    }

    /// One tile of the walk.
    fn tile(
        &self,
        k: &mut KernelBuilder,
        range: &Range,
        tile: Reg<B32>,
        slot: Option<Reg<B32>>,
        lanes: &Lanes,
        stats: &Stats,
        sums: &Sums,
    ) {
        let (of, dtype) = (self.schedule.of, self.spec.dtype);
        let in_slot = |k: &mut KernelBuilder, lane: &LaneAddress| {
            let bytes = slot.map(|slot| k.mul_lo_u32(slot, lane.tile().bytes()));
            lane.moved(k, bytes)
        };
        k.comment("S = own * walked^T");
        let walked = in_slot(k, &lanes.walk_s);
        let scores = self.product(k, &lanes.own_s, &walked);
        let dots: Vec<Reg<F32>> = scores.iter().flatten().flatten().copied().collect();
        let slopes: Vec<Reg<F32>> = if of.of_scores() {
            dots.iter().filter_map(|&dot| self.params.slope(k, dot)).collect()
        } else {
            Vec::new()
        };
        self.params.score(k, &dots);
        self.hide(k, range, tile, &scores);
        k.comment("P = 2^(S - lse)");
        let lse = self.stat(k, stats, 0);
        let each = |mut does: Box<dyn FnMut(Reg<F32>, [usize; 4]) + '_>| {
            for (m, row) in scores.iter().enumerate() {
                for (n, score) in row.iter().enumerate() {
                    for (half, elements) in HALVES.iter().enumerate() {
                        for &i in elements {
                            does(score[i], [m, n, half, i]);
                        }
                    }
                }
            }
        };
        each(Box::new(|score, at| k.set(score, |k| self.params.exp_less(k, score, lse.of(at)))));
        if let Some(walked) = &lanes.sum_p {
            k.comment("dV += P * walked");
            let p: Vec<_> = scores.iter().map(|scores| a_operands(k, dtype, scores)).collect();
            let walked = in_slot(k, walked);
            self.add_product(k, &p, &walked, &sums.of_probabilities);
        }
        let Some([own, walked, walked_again]) = &lanes.gradients else { return };
        k.comment("dP = own * walked^T");
        let walked = in_slot(k, walked);
        let gradients = self.product(k, own, &walked);
        k.comment("dS = P (dP - delta)");
        let delta = self.stat(k, stats, 1);
        let width = self.schedule.walk as usize / 8;
        each(Box::new(|p, at @ [m, n, _, i]| {
            let less = k.sub_f32(gradients[m][n][i], delta.of(at));
            let p = match slopes.get(4 * (m * width + n) + i) {
                Some(&slope) => {
                    k.set(p, |k| k.mul_f32(p, slope));
                    p
                }
                None => p,
            };
            k.set(p, |k| k.mul_f32(p, less));
        }));
        k.comment("own += dS * walked");
        let ds: Vec<_> = scores.iter().map(|scores| a_operands(k, dtype, scores)).collect();
        let walked = in_slot(k, walked_again);
        self.add_product(k, &ds, &walked, &sums.of_scores);
    }

    /// One number of each query that a thread's scores are of.
    fn stat(&self, k: &mut KernelBuilder, stats: &Stats, which: usize) -> Stat {
        match stats {
            Stats::Own(own) => Stat::Rows(own.iter().map(|row| row.map(|half| half[which])).collect()),
            Stats::Walked(at) => {
                let first = 4 * self.schedule.walk * which as u32;
                let columns = 0..self.schedule.walk / 8;
                Stat::Columns(columns.map(|n| k.ld_shared_vec(at.at((first + 32 * n) as i32))).collect())
            }
        }
    }

    /// Hides what own rows do not see of a tile, if there is any such.
    fn hide(&self, k: &mut KernelBuilder, range: &Range, tile: Reg<B32>, scores: &[Vec<Acc>]) {
        let first = k.mul_lo_u32(tile, self.schedule.walk);
        let before = range.full_begin.map(|begin| k.setp_lt_s32(first, begin));
        let behind = range.full_end.map(|end| {
            let past = k.add_s32(first, self.schedule.walk as i32);
            k.setp_gt_s32(past, end)
        });
        let partly: Reg<Pred> = match (before, behind) {
            (Some(before), Some(behind)) => k.or_pred(before, behind),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => return,
        };
        k.if_(partly, |k| {
            k.comment("some own rows do not see all of this tile");
            let origin = k.add_s32(first, self.place.column);
            let row = k.add_u32(self.first_row, self.place.warp_row);
            let row = k.add_u32(row, self.place.g);
            for (m, scores) in scores.iter().enumerate() {
                for (half, elements) in HALVES.iter().enumerate() {
                    let row = k.add_u32(row, (16 * m + 8 * half) as u32);
                    let [begin, end] =
                        self.sight(k, row).map(|bound| bound.map(|bound| k.sub_s32(bound, origin)));
                    for (n, score) in scores.iter().enumerate() {
                        for &i in elements {
                            let column = (8 * n + i % 2) as i32;
                            let seen = [
                                begin.map(|begin| k.setp_le_s32(begin, column)),
                                end.map(|end| k.setp_gt_s32(end, column)),
                            ];
                            for seen in seen.into_iter().flatten() {
                                k.set(score[i], |k| k.selp_f32(score[i], NEG_INF, seen));
                            }
                        }
                    }
                }
            }
        });
    }

    /// The products of own rows with those of a tile.
    fn product(&self, k: &mut KernelBuilder, own: &LaneAddress, walked: &LaneAddress) -> Vec<Vec<Acc>> {
        let ty = matrix_ty(self.spec.dtype);
        let m_tiles = self.schedule.m_tiles();
        let zero: Reg<F32> = k.mov_f32(0.0);
        let mut result = vec![vec![[zero; 4]; (self.schedule.walk / 8) as usize]; m_tiles as usize];
        for column in 0..own.tile().cols / 16 {
            let step = own.step(k, column);
            let a: Vec<[Reg<B32>; 4]> =
                (0..m_tiles).map(|m| k.ldmatrix(own.at(step, 16 * m, column))).collect();
            let step = walked.step(k, column);
            for n in 0..self.schedule.walk / 16 {
                let [b0, b1, b2, b3] = k.ldmatrix(walked.at(step, 16 * n, column));
                for (result, &a) in result.iter_mut().zip(&a) {
                    for (i, b) in [[b0, b1], [b2, b3]].into_iter().enumerate() {
                        let acc = &mut result[2 * n as usize + i];
                        *acc = k.mma_m16n8k16(ty, a, b, *acc);
                    }
                }
            }
        }
        result
    }

    /// Adds the products of probabilities, or of gradients of scores, with the rows of a tile.
    fn add_product(
        &self,
        k: &mut KernelBuilder,
        a: &[Vec<[Reg<B32>; 4]>],
        walked: &LaneAddress,
        sums: &[Vec<Acc>],
    ) {
        let (ty, tile) = (matrix_ty(self.spec.dtype), walked.tile());
        let steps: Vec<Reg<B32>> = (0..tile.chunks() / 2).map(|column| walked.step(k, column)).collect();
        for rows in 0..self.schedule.walk / 16 {
            for column in 0..tile.cols / 16 {
                let step = steps[column as usize % steps.len()];
                let [b0, b1, b2, b3] = k.ldmatrix_trans(walked.at(step, 16 * rows, column));
                for (sums, a) in sums.iter().zip(a) {
                    for (i, b) in [[b0, b1], [b2, b3]].into_iter().enumerate() {
                        let acc = sums[2 * column as usize + i];
                        k.set(acc, |k| k.mma_m16n8k16(ty, a[rows as usize], b, acc));
                    }
                }
            }
        }
    }

    /// Writes the gradients: a warp's rows go through the place where it read its own.
    fn store(&self, k: &mut KernelBuilder, sums: &Sums) {
        k.section("the end");
        let of = self.schedule.of;
        let names = if self.owns_queries() { ["dq", ""] } else { ["dk", "dv"] };
        let own = self.sides[0];
        let len = match own.len() {
            Some(len) => len,
            None if self.owns_queries() => self.len_q,
            None => k.param(BwdParams::len_k),
        };
        let scale = k.param(BwdParams::scale);
        let both = [
            (GRAD_S, of.of_scores(), &sums.of_scores, Some(scale), self.memory.own_s, self.tiles.own_s),
            (
                GRAD_P,
                of.of_probabilities(),
                &sums.of_probabilities,
                None,
                self.memory.own_p,
                self.tiles.own_p,
            ),
        ];
        let head_dims = [self.spec.head_dim, self.spec.head_dim_v];
        for (i, (gradient, wanted, sums, scale, memory, tile)) in both.into_iter().enumerate() {
            if !wanted {
                continue;
            }
            self.finish(k, sums, scale);
            let (base, [to_batch, to_head, row]) = gradient;
            let out = Out {
                name: names[i],
                first_row: self.first_row,
                len,
                row,
                dtype: self.spec.dtype,
                head_dim: head_dims[i],
                interleaved: false,
            };
            epilogue::store(k, &out, &self.place, memory, tile, sums, |k| {
                let head = head_of(k, base, [to_batch, to_head], own.entry, self.head);
                own.first_address(k, head, row)
            });
        }
    }

    /// Scales the sums. Those of keys that a batch entry does not have are 0.
    fn finish(&self, k: &mut KernelBuilder, sums: &[Vec<Acc>], scale: Option<Reg<F32>>) {
        let row = k.add_u32(self.first_row, self.place.warp_row);
        let row = k.add_u32(row, self.place.g);
        for (m, sums) in sums.iter().enumerate() {
            for (half, elements) in HALVES.iter().enumerate() {
                let exists = self.has_absent_keys().then(|| {
                    let row = k.add_u32(row, (16 * m + 8 * half) as u32);
                    k.setp_lt_s32(row, self.band.keys)
                });
                for sum in sums {
                    for &i in elements {
                        if let Some(scale) = scale {
                            k.set(sum[i], |k| k.mul_f32(sum[i], scale));
                        }
                        if let Some(exists) = exists {
                            k.set(sum[i], |k| k.selp_f32(sum[i], 0.0, exists));
                        }
                    }
                }
            }
        }
    }
}

/// One number of each query that a thread's scores are of.
enum Stat {
    /// By tile and half: queries are own rows.
    Rows(Vec<[Reg<F32>; 2]>),
    /// By 8 columns: a thread has two of them.
    Columns(Vec<[Reg<F32>; 2]>),
}

impl Stat {
    /// Of the score of this 16-row tile, these 8 columns, this half, and this element.
    fn of(&self, [m, n, half, i]: [usize; 4]) -> Reg<F32> {
        match self {
            Stat::Rows(rows) => rows[m][half],
            Stat::Columns(columns) => columns[n][i % 2],
        }
    }
}
