//! Makes E4M3 of 16-bit queries, keys and values, with the descales that attention takes: the largest magnitude of a kv
//! head over 448, and for queries that of all heads of a group.
//!
//! The first pass finds the largest magnitude of each chunk of rows; the last one reduces those of its head, and writes
//! codes. It takes the chunks in the opposite order, as the last ones read are still in the L2 cache. No result depends on
//! the order in which blocks run.
//!
//! Keys can be smoothed: the mean over all keys is subtracted from each, channel by channel. That adds the same number to
//! all scores of a query, so that the output does not change, and lse lacks scale · q · mean, which a pass behind attention
//! gives back. The first pass then finds the sum, the smallest and the largest number of each channel, and a small pass
//! between makes of them the mean and the largest magnitude that will be left.
//!
//! Chunks of keys and of values can have descales of their own. The last pass then finds the largest magnitude of a chunk itself,
//! and reads it a second time from the cache; keys and values that are not smoothed need no other pass.
//!
//! Queries and keys can be rotated: signs that look random, then a Walsh-Hadamard transform, divided by √head_dim. It
//! leaves dot products as they are, and spreads outliers over all channels.

mod family;
mod params;
mod rotation;
mod shift;
mod smooth;
mod turn;

use flashcore_ptx::{B32, B64, F32, GridDep, KernelBuilder, Module, Pred, Reg, Shared, SharedLayout, Target};

pub use self::{family::Schedule, rotation::signs};
use self::{
    params::{Common, OfChunks, OfK, OfQ, OfV, TensorParams},
    rotation::Rotation,
    shift::OfLse,
    smooth::{Channels, mean_address},
};
use crate::{Args, ElementType, Operand, ScheduleError, parts::params::address};

/// The largest number of e4m3.
pub const MOST: f32 = 448.0;

/// Threads of a block, but for the pass between.
const THREADS: u32 = 256;
/// Threads of a block of the pass between.
const MEAN_THREADS: u32 = 1024;
/// Elements that a thread has of a row.
const WIDTH: u32 = 8;
/// Rows that a thread has in flight.
const AT_ONCE: u32 = 8;
/// Rows behind the last key of a batch entry that become zeros: no tile of keys is larger.
const BEHIND: u32 = 256;

/// What is to be quantised, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantize {
    /// Of the elements: f16 or bf16.
    pub dtype: ElementType,
    /// Elements of a query and of a key: a multiple of 16 up to 256.
    pub head_dim: u32,
    /// Elements of a value, likewise.
    pub head_dim_v: u32,
    /// Whether there are queries. How many heads share a descale follows from the shape of k, which is then needed even
    /// where there are no keys to quantise.
    pub q: bool,
    /// Whether there are keys.
    pub k: bool,
    /// Whether there are values.
    pub v: bool,
    /// Whether the mean over the keys is subtracted from them.
    pub smooth: bool,
    /// Whether queries and keys are rotated, and the seed of the [`signs`]. The head dim must be a power of two.
    pub rotate: Option<u32>,
    /// Whether batch entries have key lengths of their own: rows of k and v behind them are not read, and become zeros as far
    /// as a tile of keys reaches.
    pub key_lengths: bool,
    /// Whether every row of the elements starts at a multiple of 16 bytes, and every row of the codes at a multiple of 8.
    pub aligned: bool,
    /// Rows per block.
    pub rows: u32,
    /// Whether keys and values have a descale for each `rows` of a head, rather than one for all of them.
    pub by_chunk: bool,
    /// Whether values are written turned around: (batch, kv heads, head dim, keys), with the keys padded to a multiple of 16 by
    /// zeros, and in each sixteen in the order (`turn.rs`) in which the product of 8-bit floats takes them.
    pub turn: bool,
}

/// One of the launches, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Finds the largest magnitudes; of smoothed keys the sums and bounds of each channel.
    Scan,
    /// Makes the mean and the largest magnitude of smoothed keys.
    Mean,
    /// Writes codes and descales.
    Cast,
    /// Behind attention: adds to lse what the subtraction of the mean took from it.
    Shift,
}

impl Pass {
    /// The name of its kernel.
    pub const fn name(self) -> &'static str {
        match self {
            Pass::Scan => "flashcore_quantize_scan",
            Pass::Mean => "flashcore_quantize_mean",
            Pass::Cast => "flashcore_quantize_cast",
            Pass::Shift => "flashcore_quantize_shift",
        }
    }
}

/// One of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Q,
    K,
    V,
}

impl Which {
    /// Its elements, its codes, and its descales.
    fn operands(self) -> (Operand, Operand, Operand) {
        match self {
            Which::Q => (Operand::Q, Operand::Q8, Operand::QDescale),
            Which::K => (Operand::K, Operand::K8, Operand::KDescale),
            Which::V => (Operand::V, Operand::V8, Operand::VDescale),
        }
    }
}

impl Quantize {
    /// Queries, keys and values of one head dim, as they are.
    pub fn new(dtype: ElementType, head_dim: u32) -> Self {
        Self {
            dtype,
            head_dim,
            head_dim_v: head_dim,
            q: true,
            k: true,
            v: true,
            smooth: false,
            rotate: None,
            key_lengths: false,
            aligned: true,
            rows: 256,
            by_chunk: false,
            turn: false,
        }
    }

    /// Its launches before attention, in this order.
    pub fn passes(self) -> &'static [Pass] {
        match (self.smooth, self.by_chunk && !self.q) {
            (true, _) => &[Pass::Scan, Pass::Mean, Pass::Cast],
            (false, false) => &[Pass::Scan, Pass::Cast],
            (false, true) => &[Pass::Cast],
        }
    }

    /// Threads per block.
    pub fn threads(self, pass: Pass) -> u32 {
        if pass == Pass::Mean { MEAN_THREADS } else { THREADS }
    }

    /// The grid of a pass.
    pub fn grid(self, pass: Pass, args: &Args) -> [u32; 3] {
        let [batch, heads, ..] = args.tensor(Operand::K).shape;
        match pass {
            Pass::Mean => [(batch * heads) as u32, 1, 1],
            Pass::Shift => [self.blocks(args)[0], 1, 1],
            Pass::Scan | Pass::Cast => [self.blocks(args)[2], 1, 1],
        }
    }

    /// Whether kernels can be made of it.
    pub fn check(self, target: Target) -> Result<(), ScheduleError> {
        let refuse = |reason: String| Err(ScheduleError::Malformed { reason });
        let possible = |dim: u32| (16..=256).contains(&dim) && dim.is_multiple_of(16);
        if !possible(self.head_dim) || !possible(self.head_dim_v) {
            return Err(ScheduleError::HeadDim {
                head_dim: self.head_dim,
                head_dim_v: self.head_dim_v,
                possible: "multiples of 16 from 16 to 256",
            });
        }
        if !matches!(self.dtype, ElementType::F16 | ElementType::Bf16) {
            return refuse(format!("{:?} cannot be quantised: f16 and bf16 can", self.dtype));
        }
        if target == Target::Sm80 {
            return refuse("e4m3 needs sm_89 or later".into());
        }
        if self.tensors().next().is_none() || (self.smooth && !self.k) {
            return refuse("nothing to quantise: take q, k or v, and k if it is to be smoothed".into());
        }
        if self.rotate.is_some() && !self.head_dim.is_power_of_two() {
            return refuse(format!("head_dim {}: rotations need a power of two", self.head_dim));
        }
        if self.turn && !(self.aligned && self.rows.is_multiple_of(turn::KEYS)) {
            return refuse(format!(
                "{} rows per block to be turned around: possible are multiples of {}, of aligned tensors",
                self.rows,
                turn::KEYS
            ));
        }
        if self.rows == 0 {
            return refuse("0 rows per block: take some, such as 256".into());
        }
        Ok(())
    }

    /// The kernel of a pass, as a module with one entry.
    pub fn emit(self, pass: Pass, target: Target) -> Result<Module, ScheduleError> {
        self.check(target)?;
        Ok(Module::new(target).with(self.kernel(pass, target).finish()?))
    }

    /// The kernel of a pass, where one can be made.
    fn kernel(self, pass: Pass, target: Target) -> KernelBuilder {
        let memory = self.memory(pass);
        let mut k = KernelBuilder::new(pass.name(), target)
            .params::<Common>()
            .more_params::<OfQ>()
            .more_params::<OfK>()
            .more_params::<OfV>();
        if self.by_chunk {
            k = k.more_params::<OfChunks>();
        }
        if pass == Pass::Shift {
            k = k.more_params::<OfLse>();
        }
        let mut k = k.shared(memory.layout.clone()).threads(self.threads(pass));
        self.body(&mut k, pass, &memory);
        k
    }

    /// Bytes of shared memory of a block.
    pub fn shared_bytes(self, pass: Pass) -> u32 {
        self.memory(pass).layout.bytes()
    }

    fn memory(self, pass: Pass) -> Memory {
        let mut layout = SharedLayout::new();
        // Three numbers for each channel that a thread has.
        let floats = match pass {
            Pass::Mean => 3 * MEAN_THREADS,
            Pass::Scan if self.smooth => 3 * WIDTH * THREADS,
            Pass::Scan | Pass::Cast | Pass::Shift => 0,
        };
        let channels = layout.alloc("channels", 4 * floats, 16);
        let reduced = layout.alloc("reduced", 4 * self.threads(pass) / 32, 4);
        Memory { layout, channels, reduced }
    }

    fn tensors(self) -> impl Iterator<Item = Which> {
        [(self.q, Which::Q), (self.k, Which::K), (self.v, Which::V)]
            .into_iter()
            .filter_map(|(there, which)| there.then_some(which))
    }

    fn smooths(self, which: Which) -> bool {
        self.smooth && which == Which::K
    }

    /// Whether chunks of a tensor have descales of their own.
    fn chunks_differ(self, which: Which) -> bool {
        self.by_chunk && which != Which::Q
    }

    /// The seed of a tensor's rotation.
    fn rotates(self, which: Which) -> Option<u32> {
        self.rotate.filter(|_| which != Which::V)
    }

    fn columns(self, which: Which) -> u32 {
        if which == Which::V { self.head_dim_v } else { self.head_dim }
    }

    fn body(self, k: &mut KernelBuilder, pass: Pass, memory: &Memory) {
        if k.target() >= Target::Sm90 {
            k.comment(
                "the next launch may set itself up beside this one, as this one does beside the one before",
            );
            k.griddepcontrol(GridDep::LaunchDependents);
            k.griddepcontrol(GridDep::Wait);
        }
        if pass == Pass::Mean {
            return self.mean(k, memory);
        }
        if pass == Pass::Shift {
            return self.shift(k);
        }
        let mut item = k.ctaid_x();
        if pass == Pass::Cast {
            // Blocks run in about the order of their numbers, and this pass goes the other way.
            let blocks = k.param(Common::blocks);
            let last = k.sub_u32(blocks, 1u32);
            item = k.sub_u32(last, item);
        }
        let (k_first, v_first) = (k.param(Common::k_first), k.param(Common::v_first));
        let (after_q, after_k) = (k.setp_ge_u32(item, k_first), k.setp_ge_u32(item, v_first));
        for which in self.tensors() {
            match which {
                Which::Q => k.if_(!after_q, |k| self.tensor::<OfQ>(k, pass, memory, which, item)),
                Which::K => {
                    let inside = k.sub_u32(item, k_first);
                    let mine = k.xor_pred(after_q, after_k);
                    k.if_(mine, |k| self.tensor::<OfK>(k, pass, memory, which, inside));
                }
                Which::V => {
                    let inside = k.sub_u32(item, v_first);
                    k.if_(after_k, |k| self.tensor::<OfV>(k, pass, memory, which, inside));
                }
            }
        }
    }

    /// One chunk of a tensor, given its number.
    fn tensor<P: TensorParams>(
        self,
        k: &mut KernelBuilder,
        pass: Pass,
        memory: &Memory,
        which: Which,
        item: Reg<B32>,
    ) {
        if pass == Pass::Scan && self.chunks_differ(which) && !self.smooths(which) {
            return;
        }
        k.section(match which {
            Which::Q => "queries",
            Which::K => "keys",
            Which::V => "values",
        });
        let [rows, heads, _] = P::counts();
        let (rows, heads) = (k.param(rows), k.param(heads));
        let chunks = self.chunks_of(k, rows);
        let (all_heads, chunk) = (k.div_u32(item, chunks), k.rem_u32(item, chunks));
        let (batch, head) = (k.div_u32(all_heads, heads), k.rem_u32(all_heads, heads));
        let first = k.mul_lo_u32(chunk, self.rows);
        let mut end = rows;
        let mut behind = None;
        let past = k.add_u32(first, self.rows);
        if self.key_lengths && which != Which::Q {
            let lengths = k.param(Common::key_lengths);
            let own = k.mad_wide_u32(batch, 4u32, lengths);
            let length = k.ld_global::<B32>(own);
            end = k.min_u32(rows, length);
            if pass == Pass::Cast {
                let reach = k.add_u32(end, BEHIND);
                let reach = k.min_u32(reach, rows);
                behind = Some((k.max_u32(first, end), k.min_u32(reach, past)));
            }
        }
        let end = k.min_u32(end, past);
        let chunk = Chunk { batch, head, heads, chunk, first, end, behind };
        match pass {
            Pass::Cast => self.cast::<P>(k, memory, which, &chunk),
            _ => self.scan::<P>(k, memory, which, &chunk),
        }
    }

    /// Chunks per head.
    fn chunks_of(self, k: &mut KernelBuilder, rows: Reg<B32>) -> Reg<B32> {
        let up = k.add_u32(rows, self.rows - 1);
        k.div_u32(up, self.rows)
    }

    /// The first pass over a chunk.
    fn scan<P: TensorParams>(self, k: &mut KernelBuilder, memory: &Memory, which: Which, chunk: &Chunk) {
        let [_, _, parts] = P::counts();
        let reader = Reader::new::<P>(k, self, which, chunk);
        let rotation = self.rotates(which).map(|seed| Rotation::new(k, seed, self.head_dim));
        if self.smooths(which) {
            let channels = Channels::new(k);
            reader.each(k, self, |k, words, exists| {
                let x = self.unpack(k, words);
                channels.add(k, &x, exists);
                let y = rotation.as_ref().map_or(x, |rotation| rotation.turn(k, x));
                channels.bound(k, &y);
            });
            return channels.store(k, self, memory, &reader, chunk);
        }
        k.section("scan: the largest magnitude");
        let most = if let Some(rotation) = rotation {
            let most: [Reg<F32>; 4] = std::array::from_fn(|_| k.mov_f32(0.0));
            reader.each(k, self, |k, words, _| {
                let x = self.unpack(k, words);
                let y = rotation.turn(k, x);
                for (i, y) in y.into_iter().enumerate() {
                    let size = k.abs_f32(y);
                    k.set(most[i % 4], |k| k.max_f32(most[i % 4], size));
                }
            });
            most.into_iter().reduce(|a, b| k.max_f32(a, b)).expect("four")
        } else {
            // Pairs of magnitudes are compared at once.
            let most: [Reg<B32>; 4] = std::array::from_fn(|_| k.mov_b32(0u32));
            reader.each(k, self, |k, words, _| {
                for (word, most) in words.into_iter().zip(most) {
                    let size = k.and_b32(word, 0x7fff_7fff_u32);
                    k.set(most, |k| match self.dtype {
                        ElementType::F16 => k.max_f16x2(most, size),
                        _ => k.max_bf16x2(most, size),
                    });
                }
            });
            let all = self.unpack(k, most);
            all.into_iter().reduce(|a, b| k.max_f32(a, b)).expect("eight")
        };
        let most = reduce(k, memory, most, THREADS);
        k.section("scan: what this chunk came to");
        let parts = k.param(parts);
        let head = k.mad_lo_u32(chunk.batch, chunk.heads, chunk.head);
        let place = k.mad_lo_u32(head, parts, chunk.chunk);
        let amax = k.param(P::amax());
        let at = k.mad_wide_u32(place, 4u32, amax);
        let first = first_thread(k);
        k.when(first, |k| k.st_global(at, most));
    }

    /// The last pass over a chunk.
    fn cast<P: TensorParams>(self, k: &mut KernelBuilder, memory: &Memory, which: Which, chunk: &Chunk) {
        let [_, _, parts] = P::counts();
        k.section("cast: the largest magnitude of the head, or of its group");
        let parts = k.param(parts);
        let (group, kv_head) = if which == Which::Q {
            let group = k.param(Common::group);
            (group, k.div_u32(chunk.head, group))
        } else {
            (k.mov_b32(1u32), chunk.head)
        };
        let first_head = k.mul_lo_u32(kv_head, group);
        let early = self.chunks_differ(which).then(|| Prepared::new::<P>(k, self, which, chunk));
        let most = if let Some(prepared) = &early {
            let most = k.mov_f32(0.0);
            prepared.reader.each(k, self, |k, words, _| {
                for y in prepared.numbers(k, self, words) {
                    let size = k.abs_f32(y);
                    k.set(most, |k| k.max_f32(most, size));
                }
            });
            most
        } else {
            let of_batch = k.mad_lo_u32(chunk.batch, chunk.heads, first_head);
            let start = k.mul_lo_u32(of_batch, parts);
            let count = k.mul_lo_u32(group, parts);
            let amax = k.param(P::amax());
            let base = k.mad_wide_u32(start, 4u32, amax);
            let most = k.mov_f32(0.0);
            let tid = k.tid_x();
            k.for_s32(tid, count, THREADS as i32, |k, i, _| {
                let at = k.mad_wide_u32(i, 4u32, base);
                let part: Reg<F32> = k.ld_global(at);
                k.set(most, |k| k.max_f32(most, part));
            });
            most
        };
        let most = reduce(k, memory, most, THREADS);
        let none = k.setp_eq_f32(most, 0.0);
        let descale = k.mul_f32(most, 1.0 / f64::from(MOST));
        // Its inverse must be finite.
        let descale = k.max_f32(descale, f32::MIN_POSITIVE);
        let descale = k.selp_f32(1.0, descale, none);
        let inverse = k.rcp_f32(descale);

        k.section("cast: the descale, written by the first chunk of the head or group");
        let (base, strides) = P::descale();
        let at = address(k, base, &strides, &[chunk.batch, kv_head]);
        if self.chunks_differ(which) {
            let first = first_thread(k);
            let stride =
                if which == Which::K { OfChunks::k_descale_chunk } else { OfChunks::v_descale_chunk };
            let (stride, chunk) = (k.param(stride), k.cvt_u64_u32(chunk.chunk));
            let at = k.mad_lo_u64(chunk, stride, at);
            k.when(first, |k| k.st_global(at, descale));
        } else {
            let leads = k.setp_eq_u32(chunk.head, first_head);
            let first_chunk = k.setp_eq_u32(chunk.chunk, 0u32);
            let writes = k.and_pred(leads, first_chunk);
            let first = first_thread(k);
            let writes = k.and_pred(writes, first);
            k.when(writes, |k| k.st_global(at, descale));
        }

        if self.turn && which == Which::V {
            return self.cast_turned::<P>(k, chunk, inverse);
        }
        let prepared = early.unwrap_or_else(|| Prepared::new::<P>(k, self, which, chunk));
        let reader = &prepared.reader;
        let (base, [to_batch, to_head, to_row]) = P::out();
        let out = address(k, base, &[to_batch, to_head], &[chunk.batch, chunk.head]);
        let to_row = k.param(to_row);
        k.section("cast: codes");
        reader.each_row(k, self, |k, words, row, exists| {
            let x = prepared.numbers(k, self, words);
            let x = x.map(|x| k.mul_f32(x, inverse));
            let pairs: [_; 4] =
                std::array::from_fn(|i| k.cvt_rn_satfinite_e4m3x2_f32(x[2 * i + 1], x[2 * i]));
            let codes = [k.pack_b32(pairs[0], pairs[1]), k.pack_b32(pairs[2], pairs[3])];
            let at = code_address(k, out, to_row, row, reader.column);
            self.store(k, at, codes, Some(exists));
        });
        if let Some((from, to)) = chunk.behind {
            k.section("cast: zeros behind the last key");
            let mine = k.add_u32(from, reader.row);
            k.for_s32(mine, to, reader.at_once as i32, |k, row, _| {
                let at = code_address(k, out, to_row, row, reader.column);
                let zero = k.mov_b32(0u32);
                self.store(k, at, [zero, zero], None);
            });
        }
    }

    /// Stores eight codes, where there is a row for them.
    fn store(self, k: &mut KernelBuilder, at: Reg<B64>, codes: [Reg<B32>; 2], there: Option<Reg<Pred>>) {
        let when = |k: &mut KernelBuilder, does: &dyn Fn(&mut KernelBuilder)| match there {
            Some(there) => k.when(there, |k| does(k)),
            None => does(k),
        };
        if self.aligned {
            return when(k, &|k| k.st_global_vec(at, codes));
        }
        for byte in 0..8 {
            let code = k.shr_u32(codes[byte / 4], (8 * (byte % 4)) as u32);
            when(k, &|k| k.st_global_u8(at.at(byte as i32), code));
        }
    }

    /// Eight numbers of four words.
    fn unpack(self, k: &mut KernelBuilder, words: [Reg<B32>; 4]) -> [Reg<F32>; 8] {
        let pairs = words.map(|word| {
            if self.dtype == ElementType::F16 {
                return k.unpack_b32(word).map(|half| k.cvt_f32_f16(half));
            }
            let (low, high) = (k.shl_b32(word, 16u32), k.and_b32(word, 0xffff_0000_u32));
            [k.f32_from_bits(low), k.f32_from_bits(high)]
        });
        std::array::from_fn(|i| pairs[i / 2][i % 2])
    }
}

/// A thread's numbers of a chunk as they are to be stored, but for the descale.
struct Prepared {
    reader: Reader,
    rotation: Option<Rotation>,
    mean: Option<[Reg<F32>; 8]>,
}

impl Prepared {
    fn new<P: TensorParams>(k: &mut KernelBuilder, of: Quantize, which: Which, chunk: &Chunk) -> Self {
        let reader = Reader::new::<P>(k, of, which, chunk);
        let rotation = of.rotates(which).map(|seed| Rotation::new(k, seed, of.head_dim));
        let mean = of.smooths(which).then(|| {
            let at = mean_address(k, chunk.batch, chunk.head);
            let at = k.mad_wide_u32(reader.column, 4u32, at);
            let ([a, b, c, d], [e, f, g, h]) = (k.ld_global_vec(at), k.ld_global_vec(at.at(16)));
            [a, b, c, d, e, f, g, h]
        });
        Self { reader, rotation, mean }
    }

    fn numbers(&self, k: &mut KernelBuilder, of: Quantize, words: [Reg<B32>; 4]) -> [Reg<F32>; 8] {
        let mut x = of.unpack(k, words);
        if let Some(mean) = self.mean {
            x = std::array::from_fn(|i| k.sub_f32(x[i], mean[i]));
        }
        self.rotation.as_ref().map_or(x, |rotation| rotation.turn(k, x))
    }
}

/// The largest number of all threads of a block, which all get.
fn reduce(k: &mut KernelBuilder, memory: &Memory, value: Reg<F32>, threads: u32) -> Reg<F32> {
    let most = [16u32, 8, 4, 2, 1].into_iter().fold(value, |most, distance| {
        let other = k.shfl_bfly(most, distance);
        k.max_f32(most, other)
    });
    let tid = k.tid_x();
    let (warp, lane) = (k.shr_u32(tid, 5u32), k.and_b32(tid, 31u32));
    let base = k.shared_addr(memory.reduced);
    let mine = k.mad_lo_u32(warp, 4u32, base);
    let first = k.setp_eq_u32(lane, 0u32);
    k.when(first, |k| k.st_shared(mine, most));
    k.bar_sync_all();
    let each = (0..threads / 32).map(|warp| k.ld_shared::<F32>(base.at(4 * warp as i32)));
    let each: Vec<Reg<F32>> = each.collect();
    each.into_iter().reduce(|a, b| k.max_f32(a, b)).expect("at least one warp")
}

/// A block's shared memory.
struct Memory {
    layout: SharedLayout,
    channels: Shared,
    /// One f32 per warp.
    reduced: Shared,
}

/// A block's rows.
struct Chunk {
    batch: Reg<B32>,
    head: Reg<B32>,
    /// Of the tensor.
    heads: Reg<B32>,
    chunk: Reg<B32>,
    first: Reg<B32>,
    /// One past the last of its rows that exists; below the first where none does.
    end: Reg<B32>,
    /// Its rows that are to be zeros: the first, and one past the last.
    behind: Option<(Reg<B32>, Reg<B32>)>,
}

/// What a thread reads of a chunk: eight columns of every so many rows.
struct Reader {
    /// Its first column.
    column: Reg<B32>,
    /// Its first row in the chunk; behind the last one, and behind those of all others, for threads that have none.
    row: Reg<B32>,
    /// Rows that all threads together read at once.
    at_once: u32,
    columns: u32,
    first: Reg<B32>,
    end: Reg<B32>,
    /// Where its columns are, in row 0.
    base: Reg<B64>,
    to_row: Reg<B64>,
}

impl Reader {
    fn new<P: TensorParams>(k: &mut KernelBuilder, of: Quantize, which: Which, chunk: &Chunk) -> Self {
        let columns = of.columns(which);
        let threads = columns / WIDTH;
        let tid = k.tid_x();
        let (row, column) = (k.div_u32(tid, threads), k.rem_u32(tid, threads));
        let at_once = THREADS / threads;
        let works = k.setp_lt_u32(row, at_once);
        let row = k.selp_b32(row, of.rows.max(at_once), works);
        let column = k.mul_lo_u32(column, WIDTH);
        let (base, [to_batch, to_head, to_row]) = P::x();
        let base = address(k, base, &[to_batch, to_head], &[chunk.batch, chunk.head]);
        let base = k.mad_wide_u32(column, 2u32, base);
        let to_row = k.param(to_row);
        Self { column, row, at_once, columns, first: chunk.first, end: chunk.end, base, to_row }
    }

    /// Does something with the words of each of this thread's rows. All lanes come by equally often, some with the last row
    /// once more; the predicate says which have a row of their own.
    fn each(
        &self,
        k: &mut KernelBuilder,
        of: Quantize,
        mut does: impl FnMut(&mut KernelBuilder, [Reg<B32>; 4], Reg<Pred>),
    ) {
        self.each_row(k, of, |k, words, _, exists| does(k, words, exists));
    }

    /// The same with the row.
    fn each_row(
        &self,
        k: &mut KernelBuilder,
        of: Quantize,
        mut does: impl FnMut(&mut KernelBuilder, [Reg<B32>; 4], Reg<B32>, Reg<Pred>),
    ) {
        let last = k.sub_u32(self.end, 1u32);
        k.for_s32(self.first, self.end, (AT_ONCE * self.at_once) as i32, |k, start, _| {
            let mine = k.add_u32(start, self.row);
            let rows: Vec<_> = (0..AT_ONCE)
                .map(|i| {
                    let row = if i == 0 { mine } else { k.add_u32(mine, i * self.at_once) };
                    let exists = k.setp_lt_u32(row, self.end);
                    let row = k.min_u32(row, last);
                    (self.read(k, of, row), row, exists)
                })
                .collect();
            for (words, row, exists) in rows {
                does(k, words, row, exists);
            }
        });
    }

    fn read(&self, k: &mut KernelBuilder, of: Quantize, row: Reg<B32>) -> [Reg<B32>; 4] {
        let row = k.cvt_u64_u32(row);
        let at = k.mad_lo_u64(row, self.to_row, self.base);
        if of.aligned {
            return k.ld_global_vec(at);
        }
        let halves: [_; 8] = std::array::from_fn(|i| k.ld_global(at.at(2 * i as i32)));
        std::array::from_fn(|i| k.pack_b32(halves[2 * i], halves[2 * i + 1]))
    }
}

fn first_thread(k: &mut KernelBuilder) -> Reg<Pred> {
    let tid = k.tid_x();
    k.setp_eq_u32(tid, 0u32)
}

/// Where the codes of a row are, from a column on.
fn code_address(
    k: &mut KernelBuilder,
    out: Reg<B64>,
    to_row: Reg<B64>,
    row: Reg<B32>,
    column: Reg<B32>,
) -> Reg<B64> {
    let row = k.cvt_u64_u32(row);
    let at = k.mad_lo_u64(row, to_row, out);
    let column = k.cvt_u64_u32(column);
    k.add_u64(at, column)
}
